// Products of few rows with a B whose columns lie in runs, by AVX-512.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_IN_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_IN_COLUMNS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_IN_COLUMNS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_IN_COLUMNS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"
#include "npu_model/host/transpose-inl.h"

#if HWY_TARGET <= HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

constexpr std::int64_t kHeldWords = 1 << 15;  // Of A at once: an eighth of the core's own cache.

// Of a B whose columns lie in runs, where rows of A are so few that they wait for memory: as many columns as a vector has
// lanes, and as many words of each, a line of the cache, are turned and multiplied at once. The columns that come next are
// asked for in the order of their addresses meanwhile, a line for each that is read. Lines are turned in two steps: blocks of
// four words as they are read, into L1, and inside the blocks as they are multiplied, so that four words are in registers and
// not sixteen. A line is read once, a block before its products, or a tile's first beside the last products of the tile before:
// in these a sum waits for itself at each word, and the turning of the next lines fills the wait; and columns a power of two
// apart, which share a set of L1, need no room there.
// Sixteen rows fill the lanes of MultiplyColumns, below. Zen 5, bf16, 7168 columns of 2048 from memory: lines turned whole took
// 1.2 times as long for one to eight rows, MultiplyColumns 1.2 to 1.4 times for ten to thirteen.

template <class E, int kRows>
void TurnedTile(const MmadTile<float>& tile) {
  const FloatTag d;
  using V = hn::Vec<FloatTag>;
  alignas(64) float taken[2][kLanes * kLanes];
  const std::int64_t b_col = tile.b_step, blocks = tile.words / kLanes, left = tile.words % kLanes;
  constexpr int kLines = kLanes * sizeof(E) / 4;
  // Columns q, q + 4, q + 8 and q + 12: blocks of four words, the first of all four columns as vector q, the next as q + 4.
  const auto take = [&](const E* from, int q, float* to) HWY_ATTR {
    from += q * b_col;
    V v[4];
    TransposeBlocks(LoadFew(from), LoadFew(from + 4 * b_col), LoadFew(from + 8 * b_col),
                    LoadFew(from + 12 * b_col), v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) hn::Store(v[i], d, to + (q + 4 * i) * kLanes);
  };
  std::int64_t turn = 0;
  if (blocks > 0) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) take(SourceOf<E>(tile), q, taken[0]);
  }
  for (std::int64_t col = 0; col < tile.cols; col += kLanes) {
    const float* a = tile.a;
    const E* b = SourceOf<E>(tile) + col * b_col;
    const E* const next = col + kLanes < tile.cols ? b + kLanes * b_col : b;  // Or what is there once more.
    ColumnsAhead<E> ahead(b + kLanes * b_col, b_col, CeilDiv(blocks * kLines, kLanes));
    V sum[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      sum[i] = tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + col);
    for (std::int64_t block = 0; block < blocks; ++block, ++turn, a += kRows * kLanes) {
      b += kLanes;
      const E* const from = block + 1 < blocks ? b : next;
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        ahead.template Ask<kLines / 4>();
        take(from, q, taken[(turn + 1) % 2]);
        V v[4], words[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) v[i] = hn::Load(d, taken[turn % 2] + (4 * q + i) * kLanes);
        Transpose4(v, words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i)
            sum[i] = hn::MulAdd(hn::Set(d, a[i * kLanes + 4 * q + w]), words[w], sum[i]);
        }
      }
    }
    if (left > 0) {
      V words[kLanes];
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) words[c] = hn::BitCast(d, LoadSome(b + c * b_col, left));
      Transpose(words);
      for (std::int64_t w = 0; w < left; ++w, ++a) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) sum[i] = hn::MulAdd(hn::Set(d, a[i * kLanes]), words[w], sum[i]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) hn::StoreU(sum[i], d, tile.c + i * tile.c_pitch + col);
  }
}
template <class E>
constexpr MmadTileFunction<float> kTurnedF32[] = {
    &TurnedTile<E, 1>,  &TurnedTile<E, 2>,  &TurnedTile<E, 3>,  &TurnedTile<E, 4>,  &TurnedTile<E, 5>,
    &TurnedTile<E, 6>,  &TurnedTile<E, 7>,  &TurnedTile<E, 8>,  &TurnedTile<E, 9>,  &TurnedTile<E, 10>,
    &TurnedTile<E, 11>, &TurnedTile<E, 12>, &TurnedTile<E, 13>, &TurnedTile<E, 14>, &TurnedTile<E, 15>};

// A line of every row of A, then the next lines: rows a power of two apart would drive each other out of L1.
template <class T>
void LineByLine(const T* a, std::int64_t a_pitch, std::int64_t rows, const Range& k, T* lines) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (const Range line : Split(k.size(), kLine)) {
    for (std::int64_t i = 0; i < rows; ++i)
      std::copy_n(a + i * a_pitch + k.begin + line.begin, line.size(), lines + i * kLine);
    lines += rows * kLine;
  }
}

// Of the columns that whole tiles make.
template <class T, class E>
void FewTurned(const MmadArgs& args, const FewRowTiles<T>& all, std::int64_t cols) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  alignas(64) std::byte storage[kHeldWords * 4];  // Bytes, which nothing initialises.
  T* const lines = reinterpret_cast<T*>(storage);
  const std::int64_t b_col = args.b_source.col_stride;
  const auto* const b = static_cast<const E*>(args.b_source.data);
  for (const Range k : Split(args.k, RoundDown(kHeldWords / args.m, kLanes) * kPerWord)) {
    LineByLine(static_cast<const T*>(args.a), args.a_pitch, args.m, k, lines);
    MmadTile<T> tile{.words = k.size() / kPerWord,
                     .a = lines,
                     .b = reinterpret_cast<const T*>(b + k.begin),
                     .b_step = b_col,
                     .half = k.size() % kPerWord != 0,
                     .cols = cols,
                     .c = args.c,
                     .c_pitch = args.c_pitch};
    StartAt(args, 0, k.begin == 0, &tile);
    all.turned[args.m - 1](tile);
  }
}

// Of more rows: no panel is made of it either. Each of its words meets all rows of A at once, whose words are turned before:
// per step of k and column of B one instruction for eight or sixteen rows. Panels cost a 16 x 16 transposition per 256 words,
// as much as six rows of A do, and their columns come by short pieces. Sixteen columns at once, where the registers hold their
// sums, pass through copies, since those that share a set of L1 would drive each other out; eight find room in any set. Zen 4,
// 7168 columns of 2048: 64 rows of bf16 take .83 of what panels took.

inline void CopyWords(const float* from, float* to) {
  const hn::Half<FloatTag> half;
  hn::Store(hn::LoadU(half, from), half, to);
  hn::Store(hn::LoadU(half, from + kLanes / 2), half, to + kLanes / 2);
}
template <class E>
void CopyWords(const E* from, float* to) {
  hn::Store(LoadFew(from), FloatTag(), to);
}

template <class E, int kColumns, int kVectors, int kLanesOfTile>
void MultiplyColumns(const ColumnTile<float>& tile) {
  const hn::CappedTag<float, kLanesOfTile> d;
  using V = hn::Vec<decltype(d)>;
  constexpr std::int64_t kRows = kVectors * kLanesOfTile;
  constexpr bool kCopies = kColumns == 16 || !std::is_same_v<E, float>;
  constexpr int kLines = kColumns * sizeof(E) / 4;
  alignas(64) float copies[2][kColumns * kLanes];
  const std::int64_t b_col = tile.b_col, blocks = tile.words / kLanes;
  for (std::int64_t first = 0; first < ColumnTile<float>::kColumns; first += kColumns) {
    float* const sums = tile.sums + first * kRows;
    V sum[kColumns][kVectors];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::Load(d, sums + c * kRows + v * kLanesOfTile);
    }
    const float* a = tile.a;
    const E* b = reinterpret_cast<const E*>(tile.b) + first * b_col;
    const auto add = [&](const auto* columns, std::int64_t pitch) HWY_ATTR {
      V rows[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) rows[v] = hn::Load(d, a + v * kLanesOfTile);
      a += kRows;
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) {
        const V column = hn::Set(d, static_cast<float>(columns[c * pitch]));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(rows[v], column, sum[c][v]);
      }
    };
    const E* const next = reinterpret_cast<const E*>(tile.next);
    ColumnsAhead<E> ahead(next == nullptr ? nullptr : next + first * b_col, b_col,
                          CeilDiv(blocks * kLines, kColumns));
    if (kCopies && blocks > 0) {
      for (int c = 0; c < kColumns; ++c) CopyWords(b + c * b_col, copies[0] + c * kLanes);
    }
    for (std::int64_t block = 0; block < blocks; ++block, b += kLanes) {
      const float* const copy = copies[block % 2];
      float* to = copies[(block + 1) % 2];
      const E* from = block + 1 < blocks ? b + kLanes : b;
      ahead.template Ask<kLines>();
      for (int w = 0; w < kLanes; ++w) {
        if (kCopies && w < kColumns) CopyWords(from, to), from += b_col, to += kLanes;
        kCopies ? add(copy + w, kLanes) : add(b + w, b_col);
      }
    }
    for (std::int64_t word = blocks * kLanes; word < tile.words; ++word, ++b) add(b, b_col);
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[c][v], d, sums + c * kRows + v * kLanesOfTile);
    }
  }
}
template <class E>
constexpr ColumnTiles<float> kColumnTilesF32[] = {{32, &MultiplyColumns<E, 8, 2, 16>},
                                                  {16, &MultiplyColumns<E, 16, 1, 16>},
                                                  {8, &MultiplyColumns<E, 16, 1, 8>}};

// Bytes. Of shorter columns, turning sums costs more than panels do; a few rows turn none.
constexpr std::int64_t kShortestColumn = 512, kShortestOfFew = 64, kFew = 8;

// The rows of A in parts, each with what multiplies it: of most rows as long as they are fairly full.
template <class T>
struct ColumnParts {
  static constexpr std::int64_t kMostRows = 72, kMostParts = 4;
  Range rows[kMostParts];
  const ColumnTiles<T>* tiles[kMostParts];
  std::int64_t count = 0, lanes = 0;  // All parts' rows, with those that fill them up.

  ColumnParts(std::int64_t m, const FewRowTiles<T>& all) {
    for (std::int64_t row = 0; row < m;) {
      const ColumnTiles<T>* tile = all.in_columns;
      while (tile->rows - (m - row) >= 8) ++tile;
      rows[count] = {row, Min(row + tile->rows, m)}, tiles[count++] = tile;
      row += tile->rows, lanes += tile->rows;
    }
  }
};

// Words of some rows of A, turned: of each word `lanes` rows, zeros behind those that there are. A half word's last elements
// are zero.
template <class T>
void TurnRows(const MmadArgs& args, const Range& rows, std::int64_t lanes, const Range& k, T* turned) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  const WordTag d;
  const hn::Half<WordTag> half;
  const auto* const a = static_cast<const T*>(args.a) + rows.begin * args.a_pitch + k.begin;
  const auto word_at = [&](std::int64_t row, std::int64_t word) {
    return a + row * args.a_pitch + word * kPerWord;
  };
  auto* const to = reinterpret_cast<std::uint32_t*>(turned);
  const std::int64_t whole = k.size() / kPerWord, blocks = RoundDown(whole, kLanes),
                     words = CeilDiv(k.size(), kPerWord);
  for (std::int64_t word = 0; word < blocks; word += kLanes) {
    for (std::int64_t first = 0; first < lanes; first += kLanes) {
      Words v[kLanes];
#pragma GCC unroll 1
      for (std::int64_t i = 0; i < kLanes; ++i)
        v[i] = first + i < rows.size()
                   ? hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(word_at(first + i, word)))
                   : hn::Zero(d);
      Transpose(v);
#pragma GCC unroll 1
      for (std::int64_t w = 0; w < kLanes; ++w) {
        std::uint32_t* const at = to + (word + w) * lanes + first;
        if (lanes < kLanes)
          hn::StoreU(hn::LowerHalf(half, v[w]), half, at);
        else
          hn::StoreU(v[w], d, at);
      }
    }
  }
  std::fill(to + blocks * lanes, to + words * lanes, 0u);
  for (std::int64_t word = blocks; word < words; ++word) {
    for (std::int64_t i = 0; i < rows.size(); ++i)
      std::memcpy(to + word * lanes + i, static_cast<const void*>(word_at(i, word)),
                  word < whole ? 4 : sizeof(T));
  }
}

// Sums of a tile's columns: `count` rows of C turned, and turned back. What the last vectors have too many goes over what
// comes next, in `sums` as long as there is room for a vector behind it.
inline void SumsOfRows(const float* from, std::int64_t pitch, std::int64_t count, std::int64_t lanes,
                       float* sums) {
  const FloatTag d;
  for (std::int64_t first = 0; first < count; first += kLanes) {
    hn::Vec<FloatTag> v[kLanes];
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < kLanes; ++i)
      v[i] = first + i < count ? hn::LoadU(d, from + (first + i) * pitch) : hn::Zero(d);
    Transpose(v);
#pragma GCC unroll 1
    for (std::int64_t c = 0; c < kLanes; ++c) hn::StoreU(v[c], d, sums + c * lanes + first);
  }
}
inline void RowsOfSums(const float* sums, std::int64_t lanes, std::int64_t count, float* to,
                       std::int64_t pitch) {
  const FloatTag d;
  for (std::int64_t first = 0; first < count; first += kLanes) {
    hn::Vec<FloatTag> v[kLanes];
#pragma GCC unroll 1
    for (std::int64_t c = 0; c < kLanes; ++c) v[c] = hn::LoadU(d, sums + c * lanes + first);
    Transpose(v);
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < Min(count - first, kLanes); ++i)
      hn::StoreU(v[i], d, to + (first + i) * pitch);
  }
}

// Of the columns that whole tiles make.
template <class T, class E>
void FewInColumns(const MmadArgs& args, const FewRowTiles<T>& all, std::int64_t cols) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  constexpr std::int64_t kColumns = ColumnTile<T>::kColumns, kMostLanes = 32;  // Of a part.
  static_assert(kColumns == kLanes);                                           // Rows of C are vectors.
  alignas(64) std::byte storage[kHeldWords * 4];                               // As above.
  T* const turned = reinterpret_cast<T*>(storage);
  const ColumnParts<T> parts(args.m, all);
  const auto* const b = static_cast<const E*>(args.b_source.data);
  const std::int64_t b_col = args.b_source.col_stride;
  MmadTile<T> from;  // Its start alone.
  for (const Range k : Split(args.k, RoundDown(kHeldWords / parts.lanes, kLanes) * kPerWord)) {
    T* to = turned;
    for (std::int64_t p = 0; p < parts.count;
         to += parts.tiles[p]->rows * CeilDiv(k.size(), kPerWord) * kPerWord, ++p)
      TurnRows(args, parts.rows[p], parts.tiles[p]->rows, k, to);
    for (std::int64_t col = 0; col < cols; col += kColumns) {
      const T* a = turned;
      StartAt(args, col, k.begin == 0, &from);
      for (std::int64_t p = 0; p < parts.count; ++p) {
        const Range& rows = parts.rows[p];
        const std::int64_t lanes = parts.tiles[p]->rows;
        alignas(64) float sums[(kColumns + 1) * kMostLanes] = {};
        if (from.start != nullptr)
          SumsOfRows(from.start + rows.begin * from.start_pitch, from.start_pitch, rows.size(), lanes, sums);
        const E* const columns = b + col * b_col + k.begin;
        ColumnTile<T> tile{.a = a,
                           .b = reinterpret_cast<const T*>(columns),
                           .b_col = b_col,
                           .words = k.size() / kPerWord,
                           .half = k.size() % kPerWord != 0,
                           .sums = sums};
        if (p == 0)
          tile.next = reinterpret_cast<const T*>(columns +
                                                 kColumns * b_col);  // Often also where another call goes on.
        parts.tiles[p]->function(tile);
        RowsOfSums(sums, lanes, rows.size(), args.c + rows.begin * args.c_pitch + col, args.c_pitch);
        a += CeilDiv(k.size(), kPerWord) * kPerWord * lanes;
      }
    }
  }
}

// Of the columns that whole tiles make.
template <class T, class E>
void FewColumns(const MmadArgs& args, const FewRowTiles<T>& tiles, std::int64_t cols) {
  args.m <= tiles.most_turned ? FewTurned<T, E>(args, tiles, cols) : FewInColumns<T, E>(args, tiles, cols);
}

// The columns that are fewer than a tile has: copied, a run of each at a time, beside columns of zeros.
template <class T, class E>
void LastColumns(const MmadArgs& args, const FewRowTiles<T>& tiles) {
  constexpr std::int64_t kRun = static_cast<std::int64_t>(2048 / sizeof(E)),
                         kPitch = kRun + static_cast<std::int64_t>(64 / sizeof(E));
  alignas(64) std::byte storage[kLanes * kPitch * sizeof(E)];
  alignas(64) float sums[ColumnParts<T>::kMostRows * kLanes];
  E* const columns = reinterpret_cast<E*>(storage);
  const auto row_bytes = static_cast<std::size_t>(args.n) * sizeof(float);
  MmadTile<T> from;  // Its start alone.
  StartAt(args, 0, /*first=*/true, &from);
  std::fill_n(sums, args.m * kLanes, 0.0f);
  for (std::int64_t i = 0; from.start != nullptr && i < args.m; ++i)
    std::memcpy(sums + i * kLanes, from.start + i * from.start_pitch, row_bytes);
  MmadArgs part = args;
  part.n = kLanes, part.c = sums, part.c_pitch = kLanes;
  part.start = MmadStart::kAdd, part.sums = nullptr;
  part.b_source = {columns, 1, kPitch};
  std::memset(static_cast<void*>(columns + args.n * kPitch), 0,
              static_cast<std::size_t>((kLanes - args.n) * kPitch) * sizeof(E));
  for (const Range k : Split(args.k, kRun)) {
    const E* const b = static_cast<const E*>(args.b_source.data) + k.begin;
    for (std::int64_t col = 0; col < args.n; ++col)
      std::memcpy(static_cast<void*>(columns + col * kPitch), b + col * args.b_source.col_stride,
                  static_cast<std::size_t>(k.size()) * sizeof(E));
    part.a = static_cast<const T*>(args.a) + k.begin, part.k = k.size();
    FewColumns<T, E>(part, tiles, kLanes);
  }
  for (std::int64_t i = 0; i < args.m; ++i)
    std::memcpy(args.c + i * args.c_pitch, sums + i * kLanes, row_bytes);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif

#endif  // CUBIST_NPU_MODEL_HOST_FEW_IN_COLUMNS_INL_H_
