// Products of few rows with a B whose columns lie in runs, by AVX-512.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "npu_model/host/cpu.h"
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
// Zen 5, bf16, 7168 columns of 2048 from memory: lines turned whole took 1.2 times as long for one to eight rows, MultiplyColumns,
// below, 1.2 to 1.4 times for ten to thirteen; of 16384 columns of 576 1.4 (fp32 2) times for sixteen.

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
    ColumnsAhead<E> ahead(b + kLanes * b_col, b_col, CeilDiv(blocks * kLines, kLanes), tile.prefetch_near);
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
    &TurnedTile<E, 1>,  &TurnedTile<E, 2>,  &TurnedTile<E, 3>,  &TurnedTile<E, 4>,
    &TurnedTile<E, 5>,  &TurnedTile<E, 6>,  &TurnedTile<E, 7>,  &TurnedTile<E, 8>,
    &TurnedTile<E, 9>,  &TurnedTile<E, 10>, &TurnedTile<E, 11>, &TurnedTile<E, 12>,
    &TurnedTile<E, 13>, &TurnedTile<E, 14>, &TurnedTile<E, 15>, &TurnedTile<E, 16>};

// A line of every row of A, then the next lines: rows a power of two apart would drive each other out of L1.
template <class T>
void LineByLine(const T* a, std::int64_t a_pitch, std::int64_t rows, const Range& k, T* lines) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  const hn::ScalableTag<std::uint8_t> d;
  std::int64_t word = 0;
  for (; word + kLine <= k.size(); word += kLine) {
    for (std::int64_t i = 0; i < rows; ++i, lines += kLine)
      hn::StoreU(hn::LoadU(d, reinterpret_cast<const std::uint8_t*>(a + i * a_pitch + k.begin + word)), d,
                 reinterpret_cast<std::uint8_t*>(lines));
  }
  for (std::int64_t i = 0; word < k.size() && i < rows; ++i, lines += kLine)
    std::copy_n(a + i * a_pitch + k.begin + word, k.size() - word, lines);
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
                     .prefetch_near = AsksNear(),
                     .c = args.c,
                     .c_pitch = args.c_pitch};
    StartAt(args, 0, k.begin == 0, &tile);
    all.turned[args.m - 1](tile);
  }
}

// Of more rows: no panel is made of it either. Each of its words meets 32 rows of A at once, whose words are turned before: per
// step of k and column of B one instruction for sixteen rows. Panels cost a 16 x 16 transposition per 256 words, as much as six
// rows of A do, and their columns come by short pieces. Eight columns at a time, whose sums the registers hold, and which find room
// in any set of L1. Zen 4, 7168 columns of 2048: 64 rows of bf16 take .83 of what panels took.

template <class E>
void WidenWords(const E* from, float* to) {
  hn::Store(LoadFew(from), FloatTag(), to);
}

template <class E>
void MultiplyColumns(const ColumnTile<float>& tile) {
  const FloatTag d;
  using V = hn::Vec<FloatTag>;
  constexpr int kColumns = 8, kVectors = 2;
  constexpr std::int64_t kRows = ColumnTile<float>::kRows;
  static_assert(kRows == kVectors * kLanes);
  constexpr bool kWidens = !std::is_same_v<E, float>;  // Words of a line, a block ahead.
  constexpr int kLines = kColumns * sizeof(E) / 4;
  alignas(64) float wide[2][kColumns * kLanes];
  const std::int64_t b_col = tile.b_col, blocks = tile.words / kLanes;
  for (std::int64_t first = 0; first < ColumnTile<float>::kColumns; first += kColumns) {
    float* const sums = tile.sums + first * kRows;
    V sum[kColumns][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::Load(d, sums + c * kRows + v * kLanes);
    }
    const float* a = tile.a;
    const E* b = reinterpret_cast<const E*>(tile.b) + first * b_col;
    const auto add = [&](const auto* columns, std::int64_t pitch) HWY_ATTR {
      V rows[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) rows[v] = hn::Load(d, a + v * kLanes);
      a += kRows;
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const V column = hn::Set(d, static_cast<float>(columns[c * pitch]));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(rows[v], column, sum[c][v]);
      }
    };
    const E* const next = reinterpret_cast<const E*>(tile.next);
    ColumnsAhead<E> ahead(next == nullptr ? nullptr : next + first * b_col, b_col,
                          CeilDiv(blocks * kLines, kColumns), tile.near);
    if (kWidens && blocks > 0) {
      for (int c = 0; c < kColumns; ++c) WidenWords(b + c * b_col, wide[0] + c * kLanes);
    }
    for (std::int64_t block = 0; block < blocks; ++block, b += kLanes) {
      const float* const words = wide[block % 2];
      float* to = wide[(block + 1) % 2];
      const E* from = block + 1 < blocks ? b + kLanes : b;
      ahead.template Ask<kLines>();
      for (int w = 0; w < kLanes; ++w) {
        if (kWidens && w < kColumns) WidenWords(from, to), from += b_col, to += kLanes;
        kWidens ? add(words + w, kLanes) : add(b + w, b_col);
      }
    }
    for (std::int64_t word = blocks * kLanes; word < tile.words; ++word, ++b) add(b, b_col);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[c][v], d, sums + c * kRows + v * kLanes);
    }
  }
}

// Bytes of a column. Of shorter ones, to turn sums, or to begin with the next columns, costs more than panels do.
constexpr std::int64_t ShortestColumn(std::int64_t rows) { return rows <= 8 ? 64 : rows <= 16 ? 192 : 512; }

// The rows of A in parts, each with what multiplies it: 32 rows as long as they are fairly full, and what is left in even parts
// of a TurnedTile.
struct ColumnParts {
  static constexpr std::int64_t kMostRows = 72, kMostParts = 4, kMostTurned = 16;
  Range rows[kMostParts];
  std::int64_t count = 0, lanes = 0;  // All parts' rows, with those that fill them up.

  static bool Turned(const Range& part) { return part.size() <= kMostTurned; }
  static std::int64_t Lanes(const Range& part) {
    return Turned(part) ? part.size() : ColumnTile<float>::kRows;
  }
  explicit ColumnParts(std::int64_t m) {
    constexpr std::int64_t kWhole = ColumnTile<float>::kRows, kFairlyFull = 24;
    for (std::int64_t row = 0; row < m; row = rows[count - 1].end) {
      const std::int64_t left = m - row,
                         part = left > kFairlyFull ? kWhole : CeilDiv(left, CeilDiv(left, kMostTurned));
      rows[count++] = {row, Min(row + part, m)};
      lanes += Lanes(rows[count - 1]);
    }
  }
};

// Words of some rows of A, turned: of each word kRows rows, zeros behind those that there are. A half word's last elements are
// zero.
template <class T>
void TurnRows(const MmadArgs& args, const Range& rows, const Range& k, T* turned) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kRows = ColumnTile<T>::kRows;
  const WordTag d;
  const auto* const a = static_cast<const T*>(args.a) + rows.begin * args.a_pitch + k.begin;
  const auto word_at = [&](std::int64_t row, std::int64_t word) {
    return a + row * args.a_pitch + word * kPerWord;
  };
  auto* const to = reinterpret_cast<std::uint32_t*>(turned);
  const std::int64_t whole = k.size() / kPerWord, blocks = RoundDown(whole, kLanes),
                     words = CeilDiv(k.size(), kPerWord);
  for (std::int64_t word = 0; word < blocks; word += kLanes) {
    for (std::int64_t first = 0; first < kRows; first += kLanes) {
      Words v[kLanes];
#pragma GCC unroll 1
      for (std::int64_t i = 0; i < kLanes; ++i)
        v[i] = first + i < rows.size()
                   ? hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(word_at(first + i, word)))
                   : hn::Zero(d);
      Transpose(v);
#pragma GCC unroll 1
      for (std::int64_t w = 0; w < kLanes; ++w) hn::StoreU(v[w], d, to + (word + w) * kRows + first);
    }
  }
  std::fill(to + blocks * kRows, to + words * kRows, 0u);
  for (std::int64_t word = blocks; word < words; ++word) {
    for (std::int64_t i = 0; i < rows.size(); ++i)
      std::memcpy(to + word * kRows + i, static_cast<const void*>(word_at(i, word)),
                  word < whole ? 4 : sizeof(T));
  }
}

// Sums of a tile's columns: `count` rows of C turned, and turned back.
inline void SumsOfRows(const float* from, std::int64_t pitch, std::int64_t count, float* sums) {
  const FloatTag d;
  for (std::int64_t first = 0; first < count; first += kLanes) {
    hn::Vec<FloatTag> v[kLanes];
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < kLanes; ++i)
      v[i] = first + i < count ? hn::LoadU(d, from + (first + i) * pitch) : hn::Zero(d);
    Transpose(v);
#pragma GCC unroll 1
    for (std::int64_t c = 0; c < kLanes; ++c) hn::Store(v[c], d, sums + c * ColumnTile<float>::kRows + first);
  }
}
inline void RowsOfSums(const float* sums, std::int64_t count, float* to, std::int64_t pitch) {
  const FloatTag d;
  for (std::int64_t first = 0; first < count; first += kLanes) {
    hn::Vec<FloatTag> v[kLanes];
#pragma GCC unroll 1
    for (std::int64_t c = 0; c < kLanes; ++c) v[c] = hn::Load(d, sums + c * ColumnTile<float>::kRows + first);
    Transpose(v);
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < Min(count - first, kLanes); ++i)
      hn::StoreU(v[i], d, to + (first + i) * pitch);
  }
}

// Of the columns that whole tiles make.
template <class T, class E>
void FewInColumns(const MmadArgs& args, const FewRowTiles<T>& all, std::int64_t cols) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kLine = kLanes * kPerWord;
  constexpr std::int64_t kColumns = ColumnTile<T>::kColumns;
  static_assert(kColumns == kLanes);              // Rows of C are vectors.
  alignas(64) std::byte storage[kHeldWords * 4];  // As above.
  const ColumnParts parts(args.m);
  const std::int64_t b_col = args.b_source.col_stride;
  for (const Range k : Split(args.k, RoundDown(kHeldWords / parts.lanes, kLanes) * kPerWord)) {
    T* a[ColumnParts::kMostParts];
    T* to = reinterpret_cast<T*>(storage);
    for (std::int64_t p = 0; p < parts.count; ++p) {
      const Range& rows = parts.rows[p];
      a[p] = to, to += ColumnParts::Lanes(rows) * RoundUp(k.size(), kLine);
      if (ColumnParts::Turned(rows))
        LineByLine(static_cast<const T*>(args.a) + rows.begin * args.a_pitch, args.a_pitch, rows.size(), k,
                   a[p]);
      else
        TurnRows(args, rows, k, a[p]);
    }
    for (std::int64_t col = 0; col < cols; col += kColumns) {
      const E* const b = static_cast<const E*>(args.b_source.data) + col * b_col + k.begin;
      for (std::int64_t p = 0; p < parts.count; ++p) {
        const Range& rows = parts.rows[p];
        MmadTile<T> tile{.words = k.size() / kPerWord,
                         .a = a[p],
                         .b = reinterpret_cast<const T*>(b),
                         .b_step = b_col,
                         .half = k.size() % kPerWord != 0,
                         .cols = kColumns,
                         .prefetch_near = AsksNear(),
                         .c = args.c + rows.begin * args.c_pitch + col,
                         .c_pitch = args.c_pitch};
        StartAt(args, col, k.begin == 0, &tile);
        if (tile.start != nullptr) tile.start += rows.begin * tile.start_pitch;
        if (ColumnParts::Turned(rows)) {
          all.turned[rows.size() - 1](tile);
          continue;
        }
        alignas(64) float sums[kColumns * ColumnTile<T>::kRows] = {};
        if (tile.start != nullptr) SumsOfRows(tile.start, tile.start_pitch, rows.size(), sums);
        // What comes next is often also where another call goes on.
        const E* const next = p == 0 ? b + kColumns * b_col : nullptr;
        all.in_columns({.a = a[p],
                        .b = tile.b,
                        .b_col = b_col,
                        .words = tile.words,
                        .half = tile.half,
                        .sums = sums,
                        .next = reinterpret_cast<const T*>(next),
                        .near = AsksNear()});
        RowsOfSums(sums, rows.size(), tile.c, tile.c_pitch);
      }
    }
  }
}

// Of the columns that whole tiles make.
template <class T, class E>
void FewColumns(const MmadArgs& args, const FewRowTiles<T>& tiles, std::int64_t cols) {
  args.m <= ColumnParts::kMostTurned ? FewTurned<T, E>(args, tiles, cols)
                                     : FewInColumns<T, E>(args, tiles, cols);
}

// The columns that are fewer than a tile has: copied, a run of each at a time, beside columns of zeros.
template <class T, class E>
void LastColumns(const MmadArgs& args, const FewRowTiles<T>& tiles) {
  constexpr std::int64_t kRun = static_cast<std::int64_t>(2048 / sizeof(E)),
                         kPitch = kRun + static_cast<std::int64_t>(64 / sizeof(E));
  alignas(64) std::byte storage[kLanes * kPitch * sizeof(E)];
  alignas(64) float sums[ColumnParts::kMostRows * kLanes];
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
