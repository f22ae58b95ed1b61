#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "npu_model/host/cube_bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#ifndef __clang__  // GCC 12 takes the operand that its own shuffles leave undefined for one that is used (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

// Per function, so that no inline function of a header is ever compiled with AVX-512.
#define CUBIST_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace cubist {
namespace {

constexpr int kMr = 12;     // 24 of the 32 registers hold sums, two B, one A.
constexpr int kLanes = 16;  // Floats of a vector, and also its pairs of bf16.
constexpr int kNr = 2 * kLanes;
constexpr int kRowsPerPointer = 3;  // As in cube_ops.cc.

// The pair of bf16 in `bits`, sixteen times.
CUBIST_AVX512_BF16 inline __m512bh Spread(int bits) {
  __m512i pairs = _mm512_set1_epi32(bits);
#ifdef __clang__
  asm("" : "+v"(pairs));  // Clang 16 crashes where it sees through the cast.
#endif
  return (__m512bh)pairs;
}

CUBIST_AVX512_BF16 inline __m256bh SpreadHalf(int bits) {
  __m256i pairs = _mm256_set1_epi32(bits);
#ifdef __clang__
  asm("" : "+v"(pairs));
#endif
  return (__m256bh)pairs;
}

// The vectors of a tile: of sixteen floats, or of eight, of which a core that starts one of sixteen a cycle starts two.
struct Full {
  using Sum = __m512;
  using Pairs = __m512bh;
  static constexpr int kLanes = 16;
  CUBIST_AVX512_BF16 static Sum Zero() { return _mm512_setzero_ps(); }
  CUBIST_AVX512_BF16 static Sum Load(const float* p) { return _mm512_loadu_ps(p); }
  CUBIST_AVX512_BF16 static void Store(Sum x, float* p) { _mm512_storeu_ps(p, x); }
  CUBIST_AVX512_BF16 static Sum Add(Sum x, Sum y) { return _mm512_add_ps(x, y); }
  CUBIST_AVX512_BF16 static Pairs LoadPairs(const BF16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  CUBIST_AVX512_BF16 static Pairs Spread(int bits) { return cubist::Spread(bits); }
  CUBIST_AVX512_BF16 static Sum Dot(Sum sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
};
struct Half {
  using Sum = __m256;
  using Pairs = __m256bh;
  static constexpr int kLanes = 8;
  CUBIST_AVX512_BF16 static Sum Zero() { return _mm256_setzero_ps(); }
  CUBIST_AVX512_BF16 static Sum Load(const float* p) { return _mm256_loadu_ps(p); }
  CUBIST_AVX512_BF16 static void Store(Sum x, float* p) { _mm256_storeu_ps(p, x); }
  CUBIST_AVX512_BF16 static Sum Add(Sum x, Sum y) { return _mm256_add_ps(x, y); }
  CUBIST_AVX512_BF16 static Pairs LoadPairs(const BF16* p) {
    return (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  CUBIST_AVX512_BF16 static Pairs Spread(int bits) { return SpreadHalf(bits); }
  CUBIST_AVX512_BF16 static Sum Dot(Sum sum, Pairs a, Pairs b) { return _mm256_dpbf16_ps(sum, a, b); }
};

// A pair may stand at any even address.
inline int PairAt(const BF16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof(pair));
  return pair;
}

// The same of the last element of an odd k, whose pair is zero: what stands behind it may be anything.
inline int OneAt(const BF16* p) {
  std::uint16_t one;
  std::memcpy(&one, p, sizeof(one));
  return one;
}

// Of kPairOrder, for columns from kFirst on.
template <int kFirst>
CUBIST_AVX512_BF16 inline __m512i InterleaveOrder() {
  return _mm512_load_si512(kPairOrder.data() + 2 * kFirst);
}

// Where a tile has B from: a panel, rows of k, or rows that end before a panel does.
enum class Source { kPanel, kRows, kSomeOfRows };

// The next word of B: kVectors times as many pairs of k as a vector has. In rows, a half word has no second row.
template <class Vector, int kVectors, Source kSource>
CUBIST_AVX512_BF16 inline void LoadWord(const MmadTile<BF16>& tile, const BF16* b, bool half,
                                        typename Vector::Pairs* columns) {
  if constexpr (kSource != Source::kPanel) {
    const auto load = [&](const BF16* row) CUBIST_AVX512_BF16 {
      if constexpr (kSource == Source::kRows) return _mm512_loadu_si512(row);
      return _mm512_maskz_loadu_epi16(_cvtu32_mask32(~std::uint32_t{0} >> (kNr - tile.cols)), row);
    };
    const __m512i first = load(b), second = half ? _mm512_setzero_si512() : load(b + tile.b_pair);
    columns[0] = (__m512bh)_mm512_permutex2var_epi16(first, InterleaveOrder<0>(), second);
    if (kVectors > 1) columns[1] = (__m512bh)_mm512_permutex2var_epi16(first, InterleaveOrder<16>(), second);
  } else {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = Vector::LoadPairs(b + 2 * j * Vector::kLanes);
  }
}

template <int kVectors>
CUBIST_AVX512_BF16 inline void KeepWord(const __m512bh* columns, BF16* panel) {
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; ++j) _mm512_storeu_si512(panel + j * kNr, (__m512i)columns[j]);
}

// See kEnd in cube_ops.cc. Steps of bf16 are half as many, and their multiplications wait for each other longer: of the peak .963
// is left for .915 where k is 128, .988 for .970 where it is 512.
constexpr int kEnd = 3;

// kWords words of k row by row, each row's sums going to C at once.
template <int kWords, class Vector, int kRows, int kVectors, int kPointers>
[[gnu::always_inline]] CUBIST_AVX512_BF16 inline void LastSteps(
    typename Vector::Sum (&sum)[kRows][kVectors], const BF16* const (&row)[kPointers], std::int64_t a_pitch,
    const typename Vector::Pairs (*columns)[kVectors], bool adds, float* c, std::int64_t c_pitch) {
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int word = 0; word < kWords; ++word) {
      const auto ai =
          Vector::Spread(PairAt(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch + 2 * word));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector::Dot(sum[i][j], ai, columns[word][j]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      float* const at = c + j * Vector::kLanes;
      if (adds) sum[i][j] = Vector::Add(Vector::Load(at), sum[i][j]);
      Vector::Store(sum[i][j], at);
    }
    NextRow(c, c_pitch);
  }
}

template <int kRows, int kVectors, Source kSource, class Vector>
CUBIST_AVX512_BF16 void Tile(const MmadTile<BF16>& tile) {
  const std::int64_t a_pitch = tile.a_pitch;
  constexpr int kPointers = (kRows + kRowsPerPointer - 1) / kRowsPerPointer;
  const BF16* row[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    row[i] = tile.a + i * kRowsPerPointer * a_pitch;
    asm("" : "+r"(row[i]));
  }
  typename Vector::Sum sum[kRows][kVectors] = {};
  if (const float* start = tile.start) {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector::Load(start + j * Vector::kLanes);
      NextRow(start, tile.start_pitch);
    }
  }
  const BF16* b = tile.b;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  constexpr bool kInRows = kSource != Source::kPanel;
  const std::int64_t b_step = kInRows ? tile.b_step : 2 * kNr;
  [[maybe_unused]] BF16* keep = tile.keep;
  const std::int64_t prefetch_step = tile.prefetch_step;
  const bool near = kSource == Source::kPanel && tile.prefetch_near;
  std::int64_t ahead = tile.prefetch_words;
  typename Vector::Pairs columns[kVectors];
  const bool ends = tile.words >= kEnd && !tile.half;
  for (std::int64_t word = ends ? tile.words - kEnd : tile.words; word > 0; --word) {
    LoadWord<Vector, kVectors, kSource>(tile, b, /*half=*/false, columns);
    if constexpr (kInRows) {
      if (keep != nullptr) KeepWord<kVectors>(columns, keep), keep += kNr * 2;
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const auto ai = Vector::Spread(PairAt(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector::Dot(sum[i][j], ai, columns[j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) row[i] += 2;
    b += b_step;
    if (ahead <= 0) continue;
    --ahead;
    AskFor<2>(prefetch, near);
    prefetch += prefetch_step;
  }
  for (; ahead > 0; --ahead, prefetch += prefetch_step) AskFor<2>(prefetch, near);
  if (tile.half) {
    LoadWord<Vector, kVectors, kSource>(tile, b, /*half=*/true, columns);
    if constexpr (kInRows) {
      if (keep != nullptr) KeepWord<kVectors>(columns, keep);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const auto ai = Vector::Spread(OneAt(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector::Dot(sum[i][j], ai, columns[j]);
    }
  }
  if (!ends) return LastSteps<0, Vector>(sum, row, a_pitch, &columns, tile.adds, tile.c, tile.c_pitch);
  typename Vector::Pairs last[kEnd][kVectors];
#pragma GCC unroll 4
  for (int word = 0; word < kEnd; ++word) {
    LoadWord<Vector, kVectors, kSource>(tile, b + word * b_step, /*half=*/false, last[word]);
    if constexpr (kInRows) {
      if (keep != nullptr) KeepWord<kVectors>(last[word], keep + word * kNr * 2);
    }
  }
  LastSteps<kEnd, Vector>(sum, row, a_pitch, last, tile.adds, tile.c, tile.c_pitch);
}

}  // namespace

bool HasBF16Avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

namespace {

template <int kVectors, Source kSource, class Vector = Full>
constexpr MmadTileFunction<BF16> kTiles[kMr] = {
    &Tile<1, kVectors, kSource, Vector>,  &Tile<2, kVectors, kSource, Vector>,
    &Tile<3, kVectors, kSource, Vector>,  &Tile<4, kVectors, kSource, Vector>,
    &Tile<5, kVectors, kSource, Vector>,  &Tile<6, kVectors, kSource, Vector>,
    &Tile<7, kVectors, kSource, Vector>,  &Tile<8, kVectors, kSource, Vector>,
    &Tile<9, kVectors, kSource, Vector>,  &Tile<10, kVectors, kSource, Vector>,
    &Tile<11, kVectors, kSource, Vector>, &Tile<12, kVectors, kSource, Vector>};

// See few_in_rows-inl.h. Sixteen rows of B pass at a time.
constexpr std::int64_t kFewWords = 8;
template <int kRows, bool kAsks>
CUBIST_AVX512_BF16 void FewTile(const MmadTile<BF16>& tile) {
  constexpr int kAhead = 4 * kNr;
  const MmadTile<BF16> own = tile;  // Which no store to C can change.
  for (std::int64_t col = 0; col < own.cols; col += kNr) {
    __m512 sum[kRows][2];
#pragma GCC unroll 3
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j)
        sum[i][j] = own.start == nullptr
                        ? _mm512_setzero_ps()
                        : _mm512_loadu_ps(own.start + i * own.start_pitch + col + j * kLanes);
    }
    const BF16 *a = own.a, *b = own.b + col;
    const auto add = [&](auto at, bool half) CUBIST_AVX512_BF16 {
      if (kAsks) __builtin_prefetch(b + kAhead), __builtin_prefetch(b + own.b_pair + kAhead);
      __m512i one = _mm512_loadu_si512(b),
              two = half ? _mm512_setzero_si512() : _mm512_loadu_si512(b + own.b_pair);
      asm("" : "+v"(one), "+v"(two));  // Each is loaded once.
      const __m512bh columns[] = {(__m512bh)_mm512_permutex2var_epi16(one, InterleaveOrder<0>(), two),
                                  (__m512bh)_mm512_permutex2var_epi16(one, InterleaveOrder<16>(), two)};
#pragma GCC unroll 3
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
          sum[i][j] = _mm512_dpbf16_ps(sum[i][j], Spread(at(a + i * own.a_pitch)), columns[j]);
      }
      a += 2, b += own.b_step;
    };
    if (own.words == kFewWords) {
#pragma GCC unroll 8
      for (std::int64_t word = 0; word < kFewWords; ++word) add(PairAt, /*half=*/false);
    } else {
      for (std::int64_t word = 0; word < own.words; ++word) add(PairAt, /*half=*/false);
    }
    if (own.half) add(OneAt, /*half=*/true);
#pragma GCC unroll 3
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) _mm512_storeu_ps(own.c + i * own.c_pitch + col + j * kLanes, sum[i][j]);
    }
  }
}
// With one row a core sees far enough ahead to find long rows for itself; otherwise it is quicker asked. Zen 5, 7168 columns of
// 2048 from memory: 1.25, 1.3 and 1.1 times what panels of it give; four rows are as quick by those.
constexpr FewRowTile<BF16> kFew[] = {{&FewTile<1, false>, 2, kFewWords, kShortestRow},
                                     {&FewTile<2, true>, 2, kFewWords},
                                     {&FewTile<3, true>, 2, kFewWords}};

// See few_in_columns-inl.h, here and below. Of a line of sixteen columns, columns q, q + 4, q + 8 and q + 12: blocks of four
// words, the first of all four columns to words[q], the next to words[q + 4].
CUBIST_AVX512_BF16 inline void TakeLines(const BF16* b, std::int64_t b_col, __mmask32 mask, int q,
                                         __m512i* words) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = _mm512_maskz_loadu_epi16(mask, b + (q + 4 * i) * b_col);
  constexpr int kEven = 0x88, kOdd = 0xdd;  // Blocks of 128 bits of either operand.
  const __m512i ab = _mm512_shuffle_i32x4(v[0], v[1], kEven), ab_odd = _mm512_shuffle_i32x4(v[0], v[1], kOdd);
  const __m512i ce = _mm512_shuffle_i32x4(v[2], v[3], kEven), ce_odd = _mm512_shuffle_i32x4(v[2], v[3], kOdd);
  words[q] = _mm512_shuffle_i32x4(ab, ce, kEven), words[q + 8] = _mm512_shuffle_i32x4(ab, ce, kOdd);
  words[q + 4] = _mm512_shuffle_i32x4(ab_odd, ce_odd, kEven);
  words[q + 12] = _mm512_shuffle_i32x4(ab_odd, ce_odd, kOdd);
}

// Four words of sixteen columns, each a vector, from blocks as TakeLines leaves them.
CUBIST_AVX512_BF16 inline void TurnBlocks(const __m512i* blocks, __m512bh* words) {
  const __m512i ab = _mm512_unpacklo_epi32(blocks[0], blocks[1]),
                ab_high = _mm512_unpackhi_epi32(blocks[0], blocks[1]);
  const __m512i ce = _mm512_unpacklo_epi32(blocks[2], blocks[3]),
                ce_high = _mm512_unpackhi_epi32(blocks[2], blocks[3]);
  words[0] = (__m512bh)_mm512_unpacklo_epi64(ab, ce), words[1] = (__m512bh)_mm512_unpackhi_epi64(ab, ce);
  words[2] = (__m512bh)_mm512_unpacklo_epi64(ab_high, ce_high);
  words[3] = (__m512bh)_mm512_unpackhi_epi64(ab_high, ce_high);
}

constexpr std::int64_t kLine = 2 * kLanes;  // Elements of a line of the cache.

template <int kRows>
CUBIST_AVX512_BF16 void TurnedTile(const MmadTile<BF16>& tile) {
  alignas(64) __m512i taken[2][kLanes];
  const std::int64_t b_col = tile.b_step, blocks = tile.words / kLanes, left = tile.words % kLanes;
  constexpr __mmask32 kAll = ~__mmask32{0};
  const __mmask32 some = _cvtu32_mask32((std::uint32_t{1} << (2 * left + tile.half)) - 1);
  std::int64_t turn = 0;
  if (blocks > 0) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) TakeLines(tile.b, b_col, kAll, q, taken[0]);
  }
  for (std::int64_t col = 0; col < tile.cols; col += kLanes) {
    const BF16 *a = tile.a, *b = tile.b + col * b_col;
    const BF16* const next =
        col + kLanes < tile.cols ? b + kLanes * b_col : b;       // Or what is there once more.
    ColumnsAhead<BF16> ahead(b + kLanes * b_col, b_col, blocks,  // Often also where another call goes on.
                             tile.prefetch_near);
    __m512 sum[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      sum[i] = tile.start == nullptr ? _mm512_setzero_ps()
                                     : _mm512_loadu_ps(tile.start + i * tile.start_pitch + col);
    for (std::int64_t block = 0; block < blocks; ++block, ++turn, a += kRows * kLine) {
      b += kLine;
      const BF16* const from = block + 1 < blocks ? b : next;
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        ahead.Ask<4>();
        TakeLines(from, b_col, kAll, q, taken[(turn + 1) % 2]);
        __m512bh words[4];
        TurnBlocks(taken[turn % 2] + 4 * q, words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i)
            sum[i] = _mm512_dpbf16_ps(sum[i], Spread(PairAt(a + i * kLine + 2 * (4 * q + w))), words[w]);
        }
      }
    }
    if (some != 0) {
      __m512i lines[kLanes];
      __m512bh words[kLanes];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) TakeLines(b, b_col, some, q, lines);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) TurnBlocks(lines + 4 * q, words + 4 * q);
      const auto add = [&](auto at, std::int64_t w) CUBIST_AVX512_BF16 {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i)
          sum[i] = _mm512_dpbf16_ps(sum[i], Spread(at(a + i * kLine + 2 * w)), words[w]);
      };
      for (std::int64_t w = 0; w < left; ++w) add(PairAt, w);
      if (tile.half) add(OneAt, left);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) _mm512_storeu_ps(tile.c + i * tile.c_pitch + col, sum[i]);
  }
}
constexpr MmadTileFunction<BF16> kTurned[] = {
    &TurnedTile<1>,  &TurnedTile<2>,  &TurnedTile<3>,  &TurnedTile<4>,  &TurnedTile<5>,  &TurnedTile<6>,
    &TurnedTile<7>,  &TurnedTile<8>,  &TurnedTile<9>,  &TurnedTile<10>, &TurnedTile<11>, &TurnedTile<12>,
    &TurnedTile<13>, &TurnedTile<14>, &TurnedTile<15>, &TurnedTile<16>};

CUBIST_AVX512_BF16 void MultiplyColumns(const ColumnTile<BF16>& tile) {
  constexpr int kColumns = 8, kVectors = 2;
  constexpr std::int64_t kRows = ColumnTile<BF16>::kRows;
  static_assert(kRows == kVectors * kLanes);
  const std::int64_t b_col = tile.b_col, blocks = tile.words / kLanes;
  for (std::int64_t first = 0; first < ColumnTile<BF16>::kColumns; first += kColumns) {
    float* const sums = tile.sums + first * kRows;
    __m512 sum[kColumns][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = _mm512_load_ps(sums + c * kRows + v * kLanes);
    }
    const BF16 *a = tile.a, *b = tile.b + first * b_col;
    const auto add = [&](auto at) CUBIST_AVX512_BF16 {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const __m512bh words = Spread(at(b + c * b_col));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          sum[c][v] = _mm512_dpbf16_ps(sum[c][v], Full::LoadPairs(a + v * 2 * kLanes), words);
      }
      a += 2 * kRows, b += 2;
    };
    ColumnsAhead<BF16> ahead(tile.next == nullptr ? nullptr : tile.next + first * b_col, b_col, blocks,
                             tile.near);
    for (std::int64_t block = 0; block < blocks; ++block) {
      ahead.Ask<kColumns>();
      for (int w = 0; w < kLanes; ++w) add(PairAt);
    }
    for (std::int64_t word = blocks * kLanes; word < tile.words; ++word) add(PairAt);
    if (tile.half) add(OneAt);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) _mm512_store_ps(sums + c * kRows + v * kLanes, sum[c][v]);
    }
  }
}

}  // namespace

const MmadTiles<BF16, kMr> kBF16TilesAvx512{
    .panel = {kTiles<2, Source::kPanel>, kTiles<1, Source::kPanel>, kTiles<1, Source::kPanel, Half>},
    .in_rows = kTiles<2, Source::kRows>,
    .some_of_rows = {kTiles<2, Source::kSomeOfRows>, kTiles<1, Source::kSomeOfRows>}};
const FewRowTiles<BF16> kFewRowsBF16Avx512{.turned = kTurned, .in_columns = &MultiplyColumns};
const FewRowTiles<BF16> kFewRowsBF16Zen5{
    .in_rows = kFew, .most_in_rows = std::size(kFew), .turned = kTurned, .in_columns = &MultiplyColumns};

CUBIST_AVX512_BF16 std::int64_t PeakDotBF16Avx512(std::int64_t rounds) {
  constexpr int kChains = 2 * kMr;  // As many as a Mmad has, several times what the latency asks for.
  volatile int half_and_zero =
      0x00003f00;  // Volatile, so that the compiler can neither fold nor drop the sums.
  const __m512bh x = Spread(half_and_zero);
  const __m512bh y = Spread(half_and_zero);
  __m512 sum[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i)
    sum[i] = _mm512_set1_ps(static_cast<float>(i));  // Equal chains would merge.
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], x, y);
  }
  __m512 total = sum[0];
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) total = _mm512_add_ps(total, sum[i]);
  volatile float sink = _mm512_cvtss_f32(total);
  (void)sink;
  return rounds * kChains * 2 * kLanes;
}

}  // namespace cubist

#endif  // __x86_64__
