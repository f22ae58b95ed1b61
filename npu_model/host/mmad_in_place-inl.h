// The walk of a Mmad whose B lies where the caller has it.
// Included once per Highway target by cube_ops.cc, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "npu_model/cache.h"
#include "npu_model/host/cpu.h"
#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_MMAD_IN_PLACE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_MMAD_IN_PLACE_INL_H_
#undef CUBIST_NPU_MODEL_HOST_MMAD_IN_PLACE_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_MMAD_IN_PLACE_INL_H_
#endif

#include "npu_model/host/in_place-inl.h"
#include "npu_model/host/mmad-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

constexpr std::int64_t kInPlaceWords = 256;     // Of k in a panel, at most.
constexpr std::int64_t kMostRowsInPlace = 132;  // Of A that a panel serves, whose copies fit a stack.
template <int kTileRows>
constexpr std::int64_t kRowsInPlace = RoundDown(kMostRowsInPlace, std::int64_t{kTileRows});

// How B comes nearer: each panel asks, while it is multiplied, for what is needed `ahead` panels later.
struct InPlacePace {
  bool b_is_near = false;    // Once it has been met: nothing is asked for.
  std::int64_t words = 128;  // Of k in a panel.
  std::int64_t ahead = 1;
  std::int64_t turns = 1;   // Panels that are asked for together, beside each of them a part of their rows.
  bool in_one_run = false;  // Rows as they lie, for all panels of the next words of k.
  bool in_turns = false;    // Each row a panel further along than its neighbour (MmadTile::prefetch_turn).
};

constexpr std::int64_t kLowStrip = 8;  // Rows of A.

// Words of k in a panel that many rows meet. Sums go through C from panel to panel, less often the longer these are: 128 words give
// eight rows of floats .75 of a Zen 4's peak where 32 gave .57. Half of L1 they may take: with AVX2 256 words do, and 17 to 96 rows
// pass 1.0 to 1.08 times as fast on a Zen 3. A roomy L1 holds 256 words of AVX-512 beside what a strip needs: on a Zen 5 1.03 to 1.08
// times as fast from 48 rows on, on an Emerald Rapids, where products of 256 to 1000 words are in L2, 1.02 to 1.03 times.
std::int64_t LongestPanel() {
  constexpr std::int64_t kHalfOfL1 = 16 << 10;
  return HasRoomyL1() ? kInPlaceWords : Min(kInPlaceWords, kHalfOfL1 / (kNr * 4));
}

// Of rows. Low strips of 16-bit elements, one or two of them, have a Zen 5 wait least with short panels (1.05 to 1.1 times).
std::int64_t WordsOfRows(const MmadArgs& args) {
  if (args.m > 2 * kLowStrip) return LongestPanel();
  return ThisCpu() == Cpu::kZen5 && SizeOf(args.b_type) == 2 ? 64 : 128;
}

// Of rows of 16-bit elements. Two lines of a row are of several panels, each of which has a part of the rows asked for. Short rows
// without gaps are asked for as they lie: decoding with 7 or 8 heads a key head 1.08 to 1.12 times as fast on a Zen 5, floats and
// more rows no faster.
template <class T>
InPlacePace PaceOfNarrowRows(const MmadArgs& args, std::int64_t words) {
  constexpr std::int64_t kBytes = 2, kRunBytes = 64 << 10,
                         kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  return {
      .words = words,
      .turns = std::clamp<std::int64_t>(CeilDiv(args.n, kNr), 1, kAskedBytes / (kNr * kBytes)),
      .in_one_run = args.b_source.row_stride == args.n && words * kPerWord * args.n * kBytes <= kRunBytes};
}

// Of rows of floats. Lines of rows that share a set of L1 hold each other up, the more the longer a strip takes with each. Zen 5,
// 7168 columns of 2048 from memory, asked for in turns: 12 rows 1.5 times as fast, 10, 24 and 36 1.12 to 1.2 times; low strips,
// and bf16, no faster.
template <int kTileRows>
InPlacePace PaceOfFloatRows(const MmadArgs& args, std::int64_t words) {
  constexpr std::int64_t kBytes = 4, kWideRow = 64 * kNr;
  const bool share_sets = args.n >= kWideRow && args.b_source.row_stride * kBytes % kWayBytes == 0;
  return {.words = words,
          .in_turns = ThisCpu() == Cpu::kZen5 && share_sets &&
                      Strips<kTileRows>(Min(args.m, kRowsInPlace<kTileRows>))[0].size() > kLowStrip};
}

// Rows of A that stay in L2, all of k long, while the panels of a column pass. More meet all panels of a piece of k first, as they
// do where B lies in rows: 128 rows of bf16 of 2048, as they stay .67 of a Zen 5's peak, so .79.
constexpr std::int64_t kRowsThatStay = 72;

// Of columns. Each strip asks for a part of the next panel, so that it has to be short where strips are few.
template <int kTileRows>
InPlacePace PaceOfColumns(std::int64_t rows) {
  InPlacePace pace{.words = rows > kRowsThatStay   ? LongestPanel()
                            : rows > 3 * kTileRows ? 128
                            : rows > kTileRows     ? 64
                                                   : 32};
  if (rows <= kTileRows) pace.ahead = kStreamAhead / (pace.words * kNr * 4);
  return pace;
}

template <class T, int kTileRows>
InPlacePace PaceOfRows(const MmadArgs& args) {
  constexpr std::int64_t kWordsAhead = 256;
  const std::int64_t words = WordsOfRows(args);
  InPlacePace pace =
      SizeOf(args.b_type) == 2 ? PaceOfNarrowRows<T>(args, words) : PaceOfFloatRows<kTileRows>(args, words);
  const std::int64_t least = ThisCpu() == Cpu::kZen5 ? 2 : 1;
  pace.ahead = RoundUp(std::max(kWordsAhead / words, least), pace.turns);
  return pace;
}

template <class T, int kTileRows>
InPlacePace PaceOf(const MmadArgs& args) {
  const StridedSource& b = args.b_source;
  const bool in_rows = b.col_stride == 1;
  const std::int64_t bytes = SizeOf(args.b_type),
                     b_bytes = (in_rows ? args.k * std::abs(b.row_stride) : args.n * std::abs(b.col_stride)) *
                               bytes;
  InPlacePace pace = in_rows ? PaceOfRows<T, kTileRows>(args) : PaceOfColumns<kTileRows>(args.m);
  pace.b_is_near = (bytes == 4 || args.m > kTileRows) && b_bytes <= kNearB;
  return pace;
}

// B a panel of a few rows at a time: read where it lies by the first strip of A, which leaves a packed one in the
// first-level cache for the others, or packed there if it must be; multiplied with every row of A, forgotten. Nothing is
// written to farther memory, which is what counts where few rows use B: its bytes come from memory at a few per cycle.
// Panels follow each other along B's rows, or along its columns where A stays near.
template <class T, int kTileRows>
class MmadInPlace {
 public:
  MmadInPlace(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles, decltype(CubeOps::pack_b) pack)
      : args_(args),
        source_(args.b_source),
        b_bytes_(SizeOf(args.b_type)),
        in_rows_(source_.col_stride == 1),
        as_stored_(in_rows_ && args.b_type == DTypeOf<T>()),
        conflict_(args.a_pitch * kElement % kWayBytes == 0),
        pace_(PaceOf<T, kTileRows>(args)),
        tiles_(tiles),
        pack_(pack),
        pieces_(AtLeastOnce(Split(args.k, pace_.words * kPerWord))),
        panels_(args.n, kNr),
        along_n_(in_rows_ || args.m > kRowsThatStay),
        inner_(along_n_ ? panels_.count() : pieces_.count()),
        count_(pieces_.count() * panels_.count()),
        asks_(!in_rows_          ? kNr
              : pace_.in_one_run ? CeilDiv(pace_.words * kPerWord * kNr * b_bytes_, kAskedBytes)
                                 : CeilDiv(pace_.words * kPerWord, pace_.turns)) {
    if (pieces_.count() == 1) return;  // A copy waits for the stores that have just made what it is of.
    rest_ = args, rest_.sums = nullptr, rest_.start = MmadStart::kAdd;
  }

  void Run() {
    alignas(64) std::byte panel[kInPlaceWords * kNr * 4];
    alignas(64) std::byte copy[kRowsInPlace<kTileRows> * kCopyPitch * sizeof(T)];
    panel_ = reinterpret_cast<T*>(panel), copy_ = reinterpret_cast<T*>(copy);
    for (const Range m : Split(args_.m, kRowsInPlace<kTileRows>)) {
      for (std::int64_t i = 0; i < count_; ++i) {
        if (conflict_ && (!along_n_ || i % inner_ == 0)) CopyRows(m, K(i));
        Multiply(m, K(i), N(i), NextOf(i));
      }
    }
  }

 private:
  static constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kElement = sizeof(T),
                                kLine = 64, kCopyPitch = (kInPlaceWords + 16) * kPerWord;

  // Of panel i.
  Range K(std::int64_t i) const { return pieces_[along_n_ ? i / inner_ : i % inner_]; }
  Range N(std::int64_t i) const { return panels_[along_n_ ? i % inner_ : i / inner_]; }

  const std::byte* At(std::int64_t p, std::int64_t j) const {
    return static_cast<const std::byte*>(source_.data) +
           (p * source_.row_stride + j * source_.col_stride) * b_bytes_;
  }

  // What panel i asks for: lines in which pieces of rows, or columns, end. One that begins in the middle of a line shares it with
  // a piece that was asked for before. Behind the last panel another call often goes on.
  const std::byte* NextOf(std::int64_t i) const {
    if (pace_.in_one_run) return At(K(i).end, 0) + i % inner_ * asks_ * kAskedBytes;
    const std::int64_t turn = i % inner_ % pace_.turns, next = i + pace_.ahead - turn, row = turn * asks_;
    return (next < count_ ? At(K(next).begin + row, N(next).begin) : At(row, args_.n)) + kLine - 1;
  }

  // Rows of A that share sets of L1.
  void CopyRows(Range m, Range k) {
    for (std::int64_t i = m.begin; i < m.end; ++i) {
      std::memcpy(static_cast<void*>(copy_ + (i - m.begin) * kCopyPitch),
                  static_cast<const T*>(args_.a) + i * args_.a_pitch + k.begin,
                  static_cast<std::size_t>(k.size()) * sizeof(T));
    }
  }

  // Rows `m` of A, all of them with B's panel (k, n), while what lies at `next` is asked for.
  void Multiply(Range m, Range k, Range n, const std::byte* next) {
    const bool whole = n.size() == kNr;
    const auto of_rows = whole ? ColumnsTiles<T>{tiles_.in_rows, kNr} : TilesOf(tiles_.some_of_rows, n);
    bool as_it_lies = as_stored_ && of_rows.functions != nullptr;
    // For further strips, too, or the first one keeps a panel.
    const bool stays = as_it_lies && pace_.b_is_near && tiles_.in_near_rows != nullptr;
    MmadTile<T> tile{
        .words = k.size() / kPerWord, .b = panel_, .half = k.size() % kPerWord != 0, .cols = n.size()};
    const Strips<kTileRows> strips(m.size());
    if (as_it_lies) {
      tile.b = reinterpret_cast<const T*>(At(k.begin, n.begin));
      tile.b_step = source_.row_stride * kPerWord, tile.b_pair = source_.row_stride;
      if (strips.count() > 1 && !stays) tile.keep = panel_;
    } else {
      pack_(args_.b_type, k.size(), n.size(), {At(k.begin, n.begin), source_.row_stride, source_.col_stride},
            panel_, RoundUp(k.size(), kPerWord) * kNr);
    }
    const std::int64_t asking = SetSteps(&tile);
    for (std::int64_t i = 0; i < strips.count(); ++i) {
      const Range strip{m.begin + strips[i].begin, m.begin + strips[i].end};
      if (conflict_) {
        tile.a = copy_ + strips[i].begin * kCopyPitch, tile.a_pitch = kCopyPitch;
      } else {
        tile.a = static_cast<const T*>(args_.a) + strip.begin * args_.a_pitch + k.begin,
        tile.a_pitch = args_.a_pitch;
      }
      tile.prefetch = next + kAskedBytes * i;
      tile.prefetch_words = i < asking ? Min(tile.words, asks_) : 0;
      const auto used = stays && whole ? ColumnsTiles<T>{tiles_.in_near_rows, kNr}
                        : as_it_lies   ? of_rows
                                       : TilesOf(tiles_.panel, n);
      const float* c = TileToFetch(args_, MmadStart::kZero, strip.begin, n.begin, strip.begin, n.begin);
      RunTile<kTileRows>(k.begin == 0 ? args_ : rest_, strip, n, used, c, tile);
      if (stays) continue;
      as_it_lies = false;
      tile.b = panel_;
    }
  }

  // What is asked for beside a word of k: two lines of a row of what comes next, by the first strip; or of one of its columns, by
  // as many strips as it takes. Returns how many strips ask.
  std::int64_t SetSteps(MmadTile<T>* tile) const {
    const std::int64_t apart = (in_rows_ ? source_.row_stride : source_.col_stride) * b_bytes_;
    tile->prefetch_step = pace_.in_one_run ? kAskedBytes : apart;
    tile->prefetch_turn = kTurnWords * tile->prefetch_step;
    if (pace_.in_turns) tile->prefetch_step += kAskedBytes;
    if (pace_.b_is_near) return 0;
    return in_rows_ ? 1 : CeilDiv(pace_.words * kPerWord * b_bytes_, kAskedBytes);
  }

  const MmadArgs& args_;
  MmadArgs rest_;  // Of a tile of C, after its first panel.
  const StridedSource& source_;
  const std::int64_t b_bytes_;
  const bool in_rows_, as_stored_, conflict_;
  const InPlacePace pace_;
  const MmadTiles<T, kTileRows>& tiles_;
  const decltype(CubeOps::pack_b) pack_;
  const Split pieces_, panels_;
  const bool along_n_;
  const std::int64_t inner_, count_;      // Panels along a line of the source, and all of them.
  const std::int64_t asks_;               // What is asked for beside one, in pairs of lines.
  T *panel_ = nullptr, *copy_ = nullptr;  // Not within: what tiles may write to is none of the above.
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_MMAD_IN_PLACE_INL_H_
