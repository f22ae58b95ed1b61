// Products of few rows with a B that lies where the caller has it, its rows or columns in runs.
// Included once per Highway target by cube_ops.cc, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/packing-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Where the sums of columns from `col` on start: for the first words of k, or for later ones.
template <class T>
void StartAt(const MmadArgs& args, std::int64_t col, bool first, MmadTile<T>* tile) {
  tile->start = args.c + col, tile->start_pitch = args.c_pitch;
  if (!first) return;
  if (args.start == MmadStart::kZero) tile->start = nullptr;
  if (args.start == MmadStart::kBias) tile->start = args.bias + col, tile->start_pitch = 0;
  if (args.start == MmadStart::kAdd && args.sums != nullptr)
    tile->start = args.sums + col, tile->start_pitch = args.sums_pitch;
}

// The columns of a product from `col` on.
inline MmadArgs ColumnsFrom(MmadArgs args, std::int64_t col) {
  args.n -= col, args.c += col;
  args.b_source.data = static_cast<const std::byte*>(args.b_source.data) +
                       col * args.b_source.col_stride * SizeOf(args.b_type);
  args.exact = args.exact || col % kNr != 0;  // A panel from there on reaches beyond the room of C.
  if (args.bias != nullptr) args.bias += col;
  if (args.sums != nullptr) args.sums += col;
  return args;
}

#if HWY_TARGET != HWY_SCALAR
// B's elements, of the source's type, as floats.
template <class E>
HWY_INLINE hn::Vec<FloatTag> LoadFew(const E* p) {
  return hn::BitCast(FloatTag(), LoadWords(p));
}
#endif

#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64

// Few rows of A, whose sums cost little to keep in C: a few rows of B pass at a time, each as long as it is, a run of 256
// bytes beside those of the others, and the next run is asked for meanwhile. A core follows so many rows that way: on a Zen 4
// four or eight give what memory gives, sixteen 0.8 of it, and the 32 of a panel half.

constexpr std::int64_t kFewRows = 8;  // Of B at a time.
// Vectors of a run of 256 bytes of floats, as far as the registers hold their sums of so many rows of A.
constexpr int FewVectors(int rows) {
  constexpr int kRun = static_cast<int>(64 / kLanes);
  const int held = rows == 1 ? 16 : rows == 2 ? 8 : 4;
  return kRun < held ? kRun : held;
}

template <class E>
const E* SourceOf(const MmadTile<float>& tile) {
  return reinterpret_cast<const E*>(tile.b);
}

template <class E, int kRows, int kVectors>
void FewTile(const MmadTile<float>& tile) {
  const FloatTag d;
  hn::Vec<FloatTag> sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] =
          tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + j * kLanes);
    }
  }
  constexpr int kOfLine = static_cast<int>(64 / (kLanes * sizeof(E)));  // Vectors.
  const float* a = tile.a;
  const E* b = SourceOf<E>(tile);
  const std::int64_t a_pitch = tile.a_pitch, b_step = tile.b_step;
  for (std::int64_t word = tile.words; word > 0; --word, ++a, b += b_step) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const auto columns = LoadFew(b + j * kLanes);
      if (j % kOfLine == 0) __builtin_prefetch(b + (kVectors + j) * kLanes, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sum[i][j] = hn::MulAdd(hn::Set(d, a[i * a_pitch]), columns, sum[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, tile.c + i * tile.c_pitch + j * kLanes);
  }
}

template <class E, int kRows>
constexpr FewRowTile kFewOf = {&FewTile<E, kRows, FewVectors(kRows)>, FewVectors(kRows)};
template <class E>
constexpr FewRowTile kFewF32[] = {kFewOf<E, 1>, kFewOf<E, 2>, kFewOf<E, 3>, kFewOf<E, 4>};
// Of three rows and more panels of floats are as quick; elements that are to be widened would be packed.
template <class E>
constexpr std::int64_t kMostInRows = std::is_same_v<E, float> ? 2 : std::size(kFewF32<E>);

// The columns that whole tiles make; of a B in rows.
template <class E>
void MmadFew(const MmadArgs& args, const FewRowTile& few, std::int64_t cols) {
  constexpr std::int64_t kMostRows = 4;
  alignas(64) float rows[kMostRows * kFewRows];
  const auto* const a = static_cast<const float*>(args.a);
  const auto* const b = static_cast<const E*>(args.b_source.data);
  const std::int64_t b_row = args.b_source.row_stride;
  MmadTile<float> tile{.a = rows, .a_pitch = kFewRows, .b_step = b_row, .c_pitch = args.c_pitch};
  for (const Range k : AtLeastOnce(Split(args.k, kFewRows))) {
    for (std::int64_t i = 0; i < args.m; ++i)
      std::copy_n(a + i * args.a_pitch + k.begin, k.size(), rows + i * kFewRows);
    tile.words = k.size();
    for (std::int64_t col = 0; col < cols; col += few.vectors * kLanes) {
      tile.b = reinterpret_cast<const float*>(b + k.begin * b_row + col), tile.c = args.c + col;
      StartAt(args, col, k.begin == 0, &tile);
      few.function(tile);
    }
  }
}

#if HWY_TARGET <= HWY_AVX3

constexpr std::int64_t kHeldWords = 1 << 15;  // Of A at once: an eighth of the core's own cache.
constexpr std::int64_t kWayBytes = 4096;      // Lines so far apart share a set of the first-level cache.

// Of a B whose columns lie in runs, where rows of A are so few that they wait for memory: as many columns as a vector has
// lanes, and as many words of each, a line of the cache, are turned in registers and multiplied at once. The columns that come
// next are asked for in the order of their addresses meanwhile, a line for each that is read. Columns a power of two apart
// share a set of the first-level cache, where sixteen lines find no room and drive out those of A: they pass through a copy,
// made beside the products of the lines before, so that each is read once. Zen 4, 7168 columns of 2048: with copies three rows
// take .9 of the time, five to eight .8; of 1984, where nothing is shared, eight take 1.1 times as long.

inline void CopyWords(const float* from, float* to) {
  const hn::Half<FloatTag> half;
  hn::Store(hn::LoadU(half, from), half, to);
  hn::Store(hn::LoadU(half, from + kLanes / 2), half, to + kLanes / 2);
}
template <class E>
void CopyWords(const E* from, float* to) {
  hn::Store(LoadFew(from), FloatTag(), to);
}

template <class E, int kRows, bool kCopies>
void TurnedTile(const MmadTile<float>& tile) {
  const FloatTag d;
  alignas(64) float copies[2][kLanes * kLanes];
  hn::Vec<FloatTag> sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
    sum[i] = tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch);
  const float* a = tile.a;
  const E* b = SourceOf<E>(tile);
  const std::int64_t b_col = tile.b_step, blocks = tile.words / kLanes;
  constexpr int kLines = kLanes * sizeof(E) / 4;
  ColumnsAhead<E> ahead(tile.prefetch, b_col, CeilDiv(blocks * kLines, kLanes));
  if (kCopies && blocks > 0) {
    for (int c = 0; c < kLanes; ++c) CopyWords(b + c * b_col, copies[0] + c * kLanes);
  }
  for (std::int64_t block = 0; block < blocks; ++block, a += kRows * kLanes, b += kLanes) {
    const float* const copy = copies[block % 2];
    float* const to = copies[(block + 1) % 2];
    const E* from = block + 1 < blocks ? b + kLanes : b;
    hn::Vec<FloatTag> words[kLanes];
#pragma GCC unroll 16
    for (int c = 0; c < kLanes; ++c)
      words[c] = kCopies ? hn::Load(d, copy + c * kLanes) : LoadFew(b + c * b_col);
    ahead.template Ask<kLines>();
    Transpose(words);
#pragma GCC unroll 16
    for (int w = 0; w < kLanes; ++w) {
      if (kCopies) CopyWords(from, to + w * kLanes), NextRow(from, b_col);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i] = hn::MulAdd(hn::Set(d, a[i * kLanes + w]), words[w], sum[i]);
    }
  }
  for (std::int64_t word = blocks * kLanes; word < tile.words; ++word, ++a, ++b) {
    alignas(64) float lanes[kLanes];
    for (std::int64_t c = 0; c < kLanes; ++c) lanes[c] = static_cast<float>(b[c * b_col]);
    for (int i = 0; i < kRows; ++i)
      sum[i] = hn::MulAdd(hn::Set(d, a[i * kLanes]), hn::Load(d, lanes), sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) hn::StoreU(sum[i], d, tile.c + i * tile.c_pitch);
}
template <class E, bool kCopies>
constexpr MmadTileFunction<float> kTurnedF32[] = {&TurnedTile<E, 1, kCopies>, &TurnedTile<E, 2, kCopies>,
                                                  &TurnedTile<E, 3, kCopies>, &TurnedTile<E, 4, kCopies>,
                                                  &TurnedTile<E, 5, kCopies>, &TurnedTile<E, 6, kCopies>,
                                                  &TurnedTile<E, 7, kCopies>, &TurnedTile<E, 8, kCopies>};

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
  const bool share_set = b_col * static_cast<std::int64_t>(sizeof(E)) % kWayBytes == 0;
  const MmadTileFunction<T> function = (share_set ? all.turned_copies : all.turned)[args.m - 1];
  for (const Range k : Split(args.k, RoundDown(kHeldWords / args.m, kLanes) * kPerWord)) {
    LineByLine(static_cast<const T*>(args.a), args.a_pitch, args.m, k, lines);
    MmadTile<T> tile{.words = k.size() / kPerWord,
                     .a = lines,
                     .b_step = b_col,
                     .half = k.size() % kPerWord != 0,
                     .c_pitch = args.c_pitch};
    for (std::int64_t col = 0; col < cols; col += kLanes) {
      const E* const columns = b + k.begin + col * b_col;
      StartAt(args, col, k.begin == 0, &tile);
      tile.b = reinterpret_cast<const T*>(columns), tile.c = args.c + col;
      tile.prefetch = columns + kLanes * b_col;  // Often also where another call goes on.
      function(tile);
    }
  }
}

// Of more rows: no panel is made of it either. Each of its words meets all rows of A at once, whose words are turned before:
// per step of k and column of B one instruction for eight or sixteen rows. Panels cost a 16 x 16 transposition per 256 words,
// as much as six rows of A do, and their columns come by short pieces. Sixteen columns at once, where the registers hold their
// sums, pass through copies as above, eight find room in any set. Zen 4, 7168 columns of 2048: 64 rows of bf16 take .83 of what
// panels took.

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

// Bytes. Of shorter columns, turning sums costs more than panels do.
constexpr std::int64_t kShortestColumn = 512;

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

#endif  // HWY_TARGET <= HWY_AVX3

// Elements of two bytes. Shorter rows pass as quickly by packed panels.
constexpr std::int64_t kShortestRow = 768;

// Does what of a product few rows are good for whose B, of elements E, is in place, and returns the rest: all, or the last
// columns.
template <class T, class E>
MmadArgs AfterFew(const MmadArgs& args, const FewRowTiles<T>& tiles) {
#if HWY_TARGET <= HWY_AVX3
  const bool in_columns = args.b_source.row_stride == 1 && args.b_source.col_stride != 1 &&
                          args.b_type == DTypeOf<E>() &&
                          args.k * static_cast<std::int64_t>(sizeof(E)) >= kShortestColumn;
  if (in_columns && tiles.in_columns != nullptr && args.m >= 1 && args.m <= ColumnParts<T>::kMostRows) {
    const std::int64_t cols = RoundDown(args.n, kLanes);
    if (cols > 0 && args.m <= tiles.most_turned) FewTurned<T, E>(args, tiles, cols);
    if (cols > 0 && args.m > tiles.most_turned) FewInColumns<T, E>(args, tiles, cols);
    return ColumnsFrom(args, cols);
  }
#endif
  const bool in_rows = args.b_source.col_stride == 1 && args.b_type == DTypeOf<E>() &&
                       (std::is_same_v<E, float> || args.n >= kShortestRow);
  if (!in_rows || args.m < 1 || args.m > tiles.most_in_rows) return args;
  const auto& few = tiles.in_rows[args.m - 1];
  const std::int64_t cols = RoundDown(args.n, few.vectors * kLanes);
  if (cols > 0) MmadFew<E>(args, few, cols);
  return ColumnsFrom(args, cols);
}

#elif HWY_TARGET == HWY_SCALAR

template <class T, class E>
MmadArgs AfterFew(const MmadArgs& args, const FewRowTiles<T>&) {
  return args;
}

#else

// In sixteen registers sums of but a few columns would stay. Instead those of all columns, or columns of B, pass through the
// first-level cache, a few rows or columns of B at a time, each in a long run. One row of A times a B of rows takes 1.2 times
// as long as reading B, where panels took 1.7 (fp32) and 4.5 times as long (bf16), eight rows 0.4 (bf16) to 0.8 of what those
// did; of columns, one row 0.5, eight rows 1 or more.
constexpr std::int64_t kMostOfRows = 8, kMostOfColumns = 4;  // Rows of A, for a B of rows or columns.
constexpr std::int64_t kFewElements = 4096;  // Sums, or elements of A, in the first-level cache,
constexpr std::int64_t kFewGap = 16;         // and so many between rows of those.
constexpr int kFewSteps = 4;

// Adds kSteps rows of B, the first at `b`, times as many columns of A from `a` on to the sums of `cols` columns, a multiple
// of a panel's. Meanwhile asks for the rows that come next.
template <int kSteps, class E>
void AddFewSteps(const MmadArgs& args, const float* a, const E* b, const E* next, std::int64_t cols,
                 float* sums, std::int64_t pitch) {
  const FloatTag d;
  const std::int64_t b_row = args.b_source.row_stride, a_pitch = args.a_pitch;
  for (std::int64_t j = 0; j < cols; j += kNr) {
    hn::Vec<FloatTag> low[kSteps], high[kSteps];
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step) {
      __builtin_prefetch(next + step * b_row + j, 0, 2);
      low[step] = LoadFew(b + step * b_row + j), high[step] = LoadFew(b + step * b_row + j + kLanes);
    }
    const float* ai = a;
    float* sum = sums + j;
    for (std::int64_t i = 0; i < args.m; ++i, ai += a_pitch, sum += pitch) {
      auto s0 = hn::LoadU(d, sum), s1 = hn::LoadU(d, sum + kLanes);
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        const auto factor = hn::Set(d, ai[step]);
        s0 = hn::MulAdd(factor, low[step], s0), s1 = hn::MulAdd(factor, high[step], s1);
      }
      hn::StoreU(s0, d, sum), hn::StoreU(s1, d, sum + kLanes);
    }
  }
}

// Of a B whose rows lie in runs: as many columns at a time as have room for their sums, which stand side by side, since rows
// of C a power of two apart would share a set of the cache.
template <class E>
void FewInRows(const MmadArgs& args, std::int64_t cols) {
  alignas(64) float sums[kFewElements + kMostOfRows * kFewGap];
  const std::int64_t length = RoundDown(kFewElements / args.m, kNr), pitch = length + kFewGap,
                     b_row = args.b_source.row_stride;
  const auto* const a = static_cast<const float*>(args.a);
  for (const Range run : Split(cols, length)) {
    MmadTile<float> tile;  // Its start alone.
    StartAt(args, run.begin, /*first=*/true, &tile);
    for (std::int64_t i = 0; i < args.m; ++i) {
      if (tile.start == nullptr)
        std::fill_n(sums + i * pitch, run.size(), 0.0f);
      else
        CopyRow(tile.start + i * tile.start_pitch, sums + i * pitch, run.size());
    }
    const E* b = static_cast<const E*>(args.b_source.data) + run.begin;
    std::int64_t k = 0;
    for (; k + kFewSteps <= args.k; k += kFewSteps, b += kFewSteps * b_row) {
      const E* const next = k + 2 * kFewSteps <= args.k ? b + kFewSteps * b_row : b;
      AddFewSteps<kFewSteps>(args, a + k, b, next, run.size(), sums, pitch);
    }
    for (; k < args.k; ++k, b += b_row) AddFewSteps<1>(args, a + k, b, b, run.size(), sums, pitch);
    for (std::int64_t i = 0; i < args.m; ++i)
      CopyRow(sums + i * pitch, args.c + i * args.c_pitch + run.begin, run.size());
  }
}

// Of a B whose columns lie in runs: kLanes columns and steps of k at a time are transposed in registers. Rows of A are as
// long as there is room for, side by side: many rows a power of two apart would share a set of the cache.
template <int kRows, class E>
void FewInColumns(const MmadArgs& args, std::int64_t cols) {
  const FloatTag d;
  const std::int64_t length = RoundDown(kFewElements / kRows, kLanes), pitch = length + kFewGap;
  alignas(64) float rows[kFewElements + kRows * kFewGap];
  const auto* const b = static_cast<const E*>(args.b_source.data);
  const std::int64_t b_col = args.b_source.col_stride;
  MmadTile<float> tile;  // Its start alone.
  for (const Range k : Split(args.k, length)) {
    for (std::int64_t i = 0; i < kRows; ++i)
      CopyRow(static_cast<const float*>(args.a) + i * args.a_pitch + k.begin, rows + i * pitch, k.size());
    StartAt(args, 0, k.begin == 0, &tile);
    for (std::int64_t j = 0; j < cols; j += kLanes) {
      const E* const column = b + j * b_col + k.begin;
      hn::Vec<FloatTag> sums[kRows], v[kLanes];
#pragma GCC unroll 4
      for (std::int64_t i = 0; i < kRows; ++i)
        sums[i] = tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + j);
      std::int64_t p = 0;
      for (; p + kLanes <= k.size(); p += kLanes) {
#pragma GCC unroll 8
        for (std::int64_t q = 0; q < kLanes; ++q) v[q] = LoadFew(column + q * b_col + p);
        Transpose(v);
#pragma GCC unroll 4
        for (std::int64_t i = 0; i < kRows; ++i) {
          const float* const a = rows + i * pitch + p;
#pragma GCC unroll 8
          for (std::int64_t q = 0; q < kLanes; ++q) sums[i] = hn::MulAdd(hn::Set(d, a[q]), v[q], sums[i]);
        }
      }
      for (; p < k.size(); ++p) {
        HWY_ALIGN float lanes[kLanes];
        for (std::int64_t q = 0; q < kLanes; ++q) lanes[q] = static_cast<float>(column[q * b_col + p]);
#pragma GCC unroll 4
        for (std::int64_t i = 0; i < kRows; ++i)
          sums[i] = hn::MulAdd(hn::Set(d, rows[i * pitch + p]), hn::Load(d, lanes), sums[i]);
      }
#pragma GCC unroll 4
      for (std::int64_t i = 0; i < kRows; ++i) hn::StoreU(sums[i], d, args.c + i * args.c_pitch + j);
    }
  }
}

template <class E>
constexpr void (*kInColumns[kMostOfColumns])(const MmadArgs&, std::int64_t) = {
    &FewInColumns<1, E>, &FewInColumns<2, E>, &FewInColumns<3, E>, &FewInColumns<4, E>};

// Does what of a product few rows are good for whose B, of elements E, is in place, and returns the rest: all, or the last
// columns.
template <class T, class E>
MmadArgs AfterFew(const MmadArgs& args, const FewRowTiles<T>&) {
  const bool in_rows = args.b_source.col_stride == 1;
  const std::int64_t cols = RoundDown(args.n, in_rows ? kNr : kLanes);
  if (args.m < 1 || args.m > (in_rows ? kMostOfRows : kMostOfColumns) || args.k < 1 || cols == 0) return args;
  in_rows ? FewInRows<E>(args, cols) : kInColumns<E>[args.m - 1](args, cols);
  return ColumnsFrom(args, cols);
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
