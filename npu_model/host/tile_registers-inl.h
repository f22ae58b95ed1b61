// The walks of a Mmad over the tile registers of AMX, which need more of both operands at a time than vector registers do.
// Included once per Highway target by cube_ops.cc, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "npu_model/cache.h"
#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#endif

#include "npu_model/host/mmad-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// k in as few pieces of at most `most` as there can be, of about one length, cut where sums keep their bits.
inline Split EvenPieces(std::int64_t k, std::int64_t most) {
  constexpr std::int64_t kCut = 32;
  const std::int64_t count = std::max<std::int64_t>(CeilDiv(k, most), 1);
  return AtLeastOnce(Split(k, RoundUp(CeilDiv(k, count), kCut)));
}

// Tiles of sixteen rows and more take as many operands as multiply-adds are quick: at 32 x 32, 64 bytes a cycle, when L2 gives
// 43. So one operand of each tile has to stand in L1.
//
// Where B is in L2, strips of A are outermost: a piece of one stays in L1 while B passes (MmadTile::b_passes), many panels by
// one call, and what comes after it is asked for meanwhile. Sums of more than one piece stand beside C, whose rows may share
// sets. An Emerald Rapids, operands in L2: 128 x 1024 x 128 .57 of the peak, 128 x 128 x 1024 .69, 512 x 512 x 512 .70; by panels
// .48, .59 and .55. A from L3, 2048 x 256 x 2048: .50.
//
// Else k passes by pieces of which a panel of B, read once, stays in L1 while the strips of A go by it, as many as have room for
// their sums beside it: they stay in L2 while all of B passes. What lies behind the piece is asked for meanwhile, a part by each
// strip: 1.13 times as fast where B comes from L3. Rows of A that share sets of L1 cost nothing, as none of their lines is met
// twice. 256 x 512 x 1024, B in L3: .43 of the peak, .34 with all of k at once.
template <class T, int kTileRows>
class MmadNear {
 public:
  MmadNear(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles)
      : args_(args),
        tiles_(tiles),
        panels_(args.n, kNr),
        in_strips_(RoundDown(args.m, std::int64_t{kTileRows})),
        c_bytes_(SizeOf(args.c_type)),
        conflict_(args.a_pitch * kBytes % kSetsBytes == 0 && args.k > kRoomyK &&
                  panels_.count() > kFewPanels) {
    tile_.adds = args.adds, tile_.panel_step = args.b_panel_stride;
    tile_.prefetch_step = kAskedBytes;
  }

  void Run() {
    if (StripsStay()) {
      StripByStrip();
    } else {
      PieceByPiece();
    }
    LastRows();
  }

 private:
  static constexpr std::int64_t kPerWord = 4 / sizeof(T), kBytes = sizeof(T);
  static constexpr std::int64_t kWords = 128, kRows = 256;  // Of a piece, and of A that stays in L2.
  // Of a strip, as much of k as stays in L1. Where its rows are a multiple of kSetsBytes apart their lines share sets: up to
  // kRoomyK there is room for them all the same, and kFewPanels meet lines out of L2 sooner than copied ones (4096 x 64 x 7168
  // 1.45 times, 1024 x 256 x 1024 1.07).
  static constexpr std::int64_t kStripK = 640, kSetsBytes = 2 << 10, kRoomyK = 256, kCopyPitch = kStripK + 32;
  static constexpr std::int64_t kFewPanels = 8;
  static constexpr std::int64_t kPanelsThatAsk = 4;  // Beside fewer the machine's own prefetching is in time.
  static constexpr std::int64_t kSideBySide = 16;    // Tiles of a strip whose sums stand beside C.
  // Bytes of B: what may come from L3 with the first strip, and what is asked for then.
  static constexpr std::int64_t kMostOfNewB = 512 << 10, kFetchedB = 128 << 10;
  static_assert(kRows <= kSideBySide * kTileRows);
  static constexpr std::int64_t kFetchedA = 512 << 10;  // Bytes of A that may have been driven out of L2.

  // Where the sums of tiles side by side stand until they are done.
  struct Sums {
    float* at;
    std::int64_t pitch, step;
  };
  Sums Beside(std::int64_t tile = 0) { return {sums_ + tile * kTileRows * kNr, kNr, kTileRows * kNr}; }

  // Whether StripByStrip is quicker. Few rows whose sums leave the core are taken to be the only ones that meet this B: the first
  // strip waits for L3 while the others have nothing to ask for.
  bool StripsStay() const {
    const bool one_piece = args_.k <= kStripK, more_strips = in_strips_ > kTileRows,
               met_before = !args_.exact || in_strips_ >= kRows;
    return !args_.adds && (one_piece || more_strips) &&
           BytesOfB() <= (met_before ? kPassingBytes : kMostOfNewB);
  }
  std::int64_t BytesOfB() const { return panels_.count() * args_.k * kNr * kBytes; }

  void StripByStrip() {
    tile_.b_passes = true;
    const auto pieces = EvenPieces(args_.k, kStripK);
    // Tiles that are cast when they are done are so while they are in L1.
    const bool cast_at_once = args_.cast != nullptr && pieces.count() == 1;
    const std::int64_t whole = args_.n / kNr, most = cast_at_once ? 1 : kSideBySide;
    for (const Range strip : Split(in_strips_, kTileRows)) {
      for (std::int64_t panel = 0; panel < panels_.count();) {
        const std::int64_t count = panel < whole ? std::min(most, whole - panel) : 1;
        for (const Range k : pieces) {
          if (panel == 0 || pieces.count() > 1) BringA(strip.begin, k);
          FindB(panel, k.begin);
          strip.begin == 0 ? AskForB(panel, k) : AskForA(strip.begin, k, count);
          Multiply(strip, panels_[panel], k, Beside(), count);
        }
        panel += count;
      }
    }
    tile_.prefetch_row = INT64_MAX;
  }

  // The first strip asks for the panels that come next; of a small B only where so many strips meet it that it costs nothing:
  // attention's backward pass, whose operands come from L3, takes .96 of the time.
  void AskForB(std::int64_t panel, const Range& k) {
    const bool asks = BytesOfB() > kFetchedB || (!args_.exact && in_strips_ >= kRows);
    tile_.prefetch = tile_.b + args_.b_panel_stride;
    tile_.prefetch_words = asks && panel + 1 < panels_.count() ? CeilDiv(k.size(), kPerWord) : 0;
    tile_.prefetch_row = tile_.prefetch_words;
    tile_.prefetch_gap = (args_.b_panel_stride - k.size() * kNr) * kBytes;
  }

  // The others for the next piece of A, of their own rows or of the next ones, which `count` panels share.
  void AskForA(std::int64_t row, const Range& k, std::int64_t count) {
    const bool ends = k.end == args_.k, last = ends && row + kTileRows >= in_strips_;
    const std::int64_t words = CeilDiv(k.size() * kBytes, kAskedBytes);
    const std::int64_t next_row = ends ? row + kTileRows : row, next_k = ends ? 0 : k.end;
    tile_.prefetch = static_cast<const T*>(args_.a) + (last ? 0 : next_row * args_.a_pitch + next_k);
    tile_.prefetch_words =
        last || count < kPanelsThatAsk || BytesOfA() <= kFetchedA ? 0 : CeilDiv(words * kTileRows, count);
    tile_.prefetch_row = words, tile_.prefetch_gap = args_.a_pitch * kBytes - words * kAskedBytes;
  }
  std::int64_t BytesOfA() const { return args_.m * args_.k * kBytes; }

  void PieceByPiece() {
    // What is added is one sum over all of k, and a strip alone finds nothing in L1 twice.
    const bool whole = args_.adds || args_.m <= kTileRows;
    const auto pieces = AtLeastOnce(Split(args_.k, whole ? args_.k : kWords * kPerWord));
    for (const Range group : Split(in_strips_, kRows)) {
      const std::int64_t strips = group.size() / kTileRows;
      for (std::int64_t panel = 0; panel < panels_.count(); ++panel) {
        for (const Range k : pieces) {
          FindB(panel, k.begin);
          const std::int64_t words = CeilDiv(k.size(), kPerWord), asks = CeilDiv(words, strips);
          for (std::int64_t i = 0; i < strips; ++i) {
            const std::int64_t row = i * kTileRows;
            tile_.prefetch = tile_.b + (words + i * asks) * kNr * kPerWord, tile_.prefetch_words = asks;
            FindA(group.begin + row, k);
            Multiply({group.begin + row, group.begin + row + kTileRows}, panels_[panel], k, Beside(i));
          }
        }
      }
    }
  }

  // Rows that fill no strip set the registers anew, which takes hundreds of cycles: once, and for all of k at a time.
  void LastRows() {
    tile_.b_passes = false;
    for (std::int64_t panel = 0; in_strips_ < args_.m && panel < panels_.count(); ++panel) {
      FindA(in_strips_, {0, args_.k});
      FindB(panel, 0);
      tile_.prefetch = tile_.b + args_.b_panel_stride, tile_.prefetch_words = CeilDiv(args_.k, kPerWord);
      Multiply({in_strips_, args_.m}, panels_[panel], {0, args_.k}, Beside());
    }
  }

  void FindA(std::int64_t row, const Range& k) {
    tile_.a = static_cast<const T*>(args_.a) + row * args_.a_pitch + k.begin, tile_.a_pitch = args_.a_pitch;
  }
  // A piece of a strip, at a place where its rows do not share sets of L1.
  void BringA(std::int64_t row, const Range& k) {
    FindA(row, k);
    if (!conflict_) return;
    T* const copy = reinterpret_cast<T*>(copy_);
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      std::memcpy(static_cast<void*>(copy + i * kCopyPitch), tile_.a + i * args_.a_pitch,
                  static_cast<std::size_t>(k.size()) * sizeof(T));
    }
    tile_.a = copy, tile_.a_pitch = kCopyPitch;
  }
  void FindB(std::int64_t panel, std::int64_t k) {
    tile_.b = static_cast<const T*>(args_.b) + panel * args_.b_panel_stride + k * kNr;
  }

  // A piece of k of a tile of C, and of `count` - 1 whole ones beside it: their sums stand in `own` until the last piece.
  void Multiply(const Range& m, const Range& n, const Range& k, const Sums& own, std::int64_t count = 1) {
    alignas(64) float bias[kNr];
    const bool ends = k.end == args_.k, to_own = !ends || args_.cast != nullptr;
    tile_.rows = m.size(), tile_.words = k.size() / kPerWord, tile_.half = k.size() % kPerWord != 0;
    tile_.start = own.at, tile_.start_pitch = own.pitch, tile_.start_step = own.step;
    if (k.begin == 0) StartOf(args_, m, n, bias, &tile_), tile_.start_step = kNr;
    tile_.asks = ends && !args_.adds ? PlaceOf(m, n) : nullptr;
    tile_.asks_pitch = args_.c_pitch * c_bytes_;
    tile_.panels = count;
    const ColumnsTiles<T> tiles = TilesOf(tiles_.panel, n);
    const auto function = tiles.OfRows(m.size());
    tile_.c = to_own ? own.at : args_.c + m.begin * args_.c_pitch + n.begin;
    tile_.c_pitch = to_own ? own.pitch : args_.c_pitch, tile_.c_step = to_own ? own.step : kNr;
    const bool in_c = !to_own || (k.begin == 0 && args_.start == MmadStart::kAdd && args_.sums == nullptr);
    if (in_c && args_.exact && n.size() < tiles.width) {
      MmadEdge<kTileRows>(function, m.size(), n.size(), tile_);
    } else {
      function(tile_);
    }
    if (!ends || args_.cast == nullptr) return;
    for (std::int64_t i = 0; i < count; ++i)
      Cast(m, {n.begin + i * kNr, n.end + i * kNr}, own.at + i * own.step);
  }

  void Cast(const Range& m, const Range& n, float* own) const {
    std::byte* const c = PlaceOf(m, n);
    if (args_.c_type == DType::kBF16 &&
        tiles_.to_bf16(own, m.size(), n.size(), reinterpret_cast<BF16*>(c), args_.c_pitch, args_.stream))
      return;
    args_.cast({c, args_.c_pitch, m.size(), n.size()}, args_.c_type, {own, kNr, m.size(), n.size()},
               DType::kF32, args_.stream);
  }
  std::byte* PlaceOf(const Range& m, const Range& n) const {
    return reinterpret_cast<std::byte*>(args_.c) + (m.begin * args_.c_pitch + n.begin) * c_bytes_;
  }

  const MmadArgs& args_;
  const MmadTiles<T, kTileRows>& tiles_;
  const Split panels_;
  const std::int64_t in_strips_, c_bytes_;
  const bool conflict_;  // Lines of a piece of a strip share too few sets of L1.
  MmadTile<T> tile_;
  alignas(64) float sums_[kSideBySide * kTileRows * kNr];
  alignas(64) std::byte copy_[kTileRows * kCopyPitch * kBytes];  // Bytes, which nothing initialises.
};

// For tiles whose instructions need so much of B at a time that its lines would come one by one: B a slab at a time, packed into
// L2 in runs that are long enough for the machine's own prefetching, then multiplied. Asked for line by line, 32 x 64 bytes of
// B come at the pace of L1's fill buffers: one row of A at .28 of the read bandwidth.
constexpr std::int64_t kSlabK = 256, kSlabN = 512;          // Where each row of B is one run of memory,
constexpr std::int64_t kTallSlabK = 1024, kTallSlabN = 64;  // and where each column is.

// The longest k of one slab. Sums of more than one stand in C, which is of fp32 then.
constexpr std::int64_t SlabK(const StridedSource& b) { return b.col_stride == 1 ? kSlabK : kTallSlabK; }

template <class T, int kTileRows>
void MmadBySlabs(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles, decltype(CubeOps::pack_b) pack) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  constexpr std::int64_t kApart = 4 * kNr * kPerWord;  // Or panels would be written to the same sets of L1.
  constexpr std::int64_t kSpace = kSlabN / kNr * (kSlabK * kNr + kApart);
  static_assert(kTallSlabN / kNr * (kTallSlabK * kNr + kApart) <= kSpace);
  alignas(64) std::byte slab[kSpace * sizeof(T)];
  const StridedSource& source = args.b_source;
  const bool in_rows = source.col_stride == 1;
  MmadArgs part = args;
  part.b = slab, part.b_source = {};
  for (const Range n : Split(args.n, in_rows ? kSlabN : kTallSlabN)) {
    auto* const c = reinterpret_cast<std::byte*>(args.c) + n.begin * SizeOf(args.c_type);
    part.n = n.size(), part.c = reinterpret_cast<float*>(c);
    part.start = args.start, part.bias = args.bias == nullptr ? nullptr : args.bias + n.begin;
    part.sums = args.sums == nullptr ? nullptr : args.sums + n.begin;
    for (const Range k : EvenPieces(args.k, SlabK(source))) {
      const std::int64_t first = k.begin * source.row_stride + n.begin * source.col_stride;
      part.k = k.size(), part.a = static_cast<const T*>(args.a) + k.begin;
      part.b_panel_stride = RoundUp(k.size(), kPerWord) * kNr + kApart;
      pack(args.b_type, k.size(), n.size(),
           {static_cast<const std::byte*>(source.data) + first * SizeOf(args.b_type), source.row_stride,
            source.col_stride},
           slab, part.b_panel_stride);
      MmadNear(part, tiles).Run();
      part.start = MmadStart::kAdd, part.sums = nullptr;
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
