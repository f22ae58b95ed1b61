#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "npu_model/host/cube_bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Per function, so that no inline function of a header is ever compiled with AVX-512.
#define CUBIST_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace cubist {
namespace {

constexpr int kMr = 12;     // 24 of the 32 registers hold sums, two B, one A.
constexpr int kLanes = 16;  // Floats of a vector, and also its pairs of bf16.
constexpr int kNr = 2 * kLanes;
constexpr int kRowsPerPointer = 3;  // As in cube_ops.cc.

CUBIST_AVX512_BF16 inline __m512bh LoadPairs(const BF16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// The pair of bf16 in `bits`, sixteen times.
CUBIST_AVX512_BF16 inline __m512bh Spread(int bits) {
  __m512i pairs = _mm512_set1_epi32(bits);
#ifdef __clang__
  asm("" : "+v"(pairs));  // Clang 16 crashes where it sees through the cast.
#endif
  return (__m512bh)pairs;
}

// A pair may stand at any even address.
inline int PairAt(const BF16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof(pair));
  return pair;
}
CUBIST_AVX512_BF16 inline __m512bh BroadcastPair(const BF16* p) { return Spread(PairAt(p)); }

// The same of the last element of an odd k, whose pair is zero: what stands behind it may be anything.
inline int OneAt(const BF16* p) {
  std::uint16_t one;
  std::memcpy(&one, p, sizeof(one));
  return one;
}
CUBIST_AVX512_BF16 inline __m512bh BroadcastOne(const BF16* p) { return Spread(OneAt(p)); }

// The elements of two rows in turn: those of columns 0 to 15 first, or those of 16 to 31.
template <int kFirst>
CUBIST_AVX512_BF16 inline __m512i InterleaveOrder() {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<std::uint16_t, 32> order{};
    for (std::size_t j = 0; j < 16; ++j) {
      order[2 * j] = static_cast<std::uint16_t>(kFirst + j),
                order[2 * j + 1] = static_cast<std::uint16_t>(kFirst + j + 32);
    }
    return order;
  }();
  return _mm512_load_si512(kOrder.data());
}

// The next word of B: kVectors times sixteen pairs of k. In rows, a half word has no second row.
template <int kVectors, bool kInRows>
CUBIST_AVX512_BF16 inline void LoadWord(const MmadTile<BF16>& tile, const BF16* b, bool half,
                                        __m512bh* columns) {
  if constexpr (kInRows) {
    const __m512i first = _mm512_loadu_si512(b),
                  second = half ? _mm512_setzero_si512() : _mm512_loadu_si512(b + tile.b_pair);
    columns[0] = (__m512bh)_mm512_permutex2var_epi16(first, InterleaveOrder<0>(), second);
    columns[1] = (__m512bh)_mm512_permutex2var_epi16(first, InterleaveOrder<16>(), second);
  } else {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = LoadPairs(b + 2 * j * kLanes);
  }
}

CUBIST_AVX512_BF16 inline void KeepWord(const __m512bh* columns, BF16* panel) {
  _mm512_storeu_si512(panel, (__m512i)columns[0]);
  _mm512_storeu_si512(panel + kNr, (__m512i)columns[1]);
}

template <int kRows, int kVectors, bool kInRows>
CUBIST_AVX512_BF16 void Tile(const MmadTile<BF16>& tile) {
  const std::int64_t a_pitch = tile.a_pitch;
  constexpr int kPointers = (kRows + kRowsPerPointer - 1) / kRowsPerPointer;
  const BF16* row[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    row[i] = tile.a + i * kRowsPerPointer * a_pitch;
    asm("" : "+r"(row[i]));
  }
  __m512 sum[kRows][kVectors] = {};
  if (const float* start = tile.start) {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_loadu_ps(start + j * kLanes);
      NextRow(start, tile.start_pitch);
    }
  }
  const BF16* b = tile.b;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  const std::int64_t b_step = kInRows ? tile.b_step : 2 * kNr;
  [[maybe_unused]] BF16* keep = tile.keep;
  const std::int64_t prefetch_step = tile.prefetch_step, prefetch_pair = tile.prefetch_pair;
  std::int64_t ahead = tile.prefetch_words;
  __m512bh columns[kVectors];
  for (std::int64_t word = tile.words; word > 0; --word) {
    LoadWord<kVectors, kInRows>(tile, b, /*half=*/false, columns);
    if (kInRows && keep != nullptr) KeepWord(columns, keep), keep += kNr * 2;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512bh ai = BroadcastPair(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], ai, columns[j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) row[i] += 2;
    b += b_step;
    if (ahead <= 0) continue;
    --ahead;
    __builtin_prefetch(prefetch, 0, 2);
    __builtin_prefetch(prefetch + prefetch_pair, 0, 2);
    prefetch += prefetch_step;
  }
  if (tile.half) {
    LoadWord<kVectors, kInRows>(tile, b, /*half=*/true, columns);
    if (kInRows && keep != nullptr) KeepWord(columns, keep);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512bh ai = BroadcastOne(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], ai, columns[j]);
    }
  }
  const std::int64_t c_pitch = tile.c_pitch;
  if (tile.adds) {
    const float* c = tile.c;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j)
        sum[i][j] = _mm512_add_ps(_mm512_loadu_ps(c + j * kLanes), sum[i][j]);
      NextRow(c, c_pitch);
    }
  }
  float* c = tile.c;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(c + j * kLanes, sum[i][j]);
    NextRow(c, c_pitch);
  }
}

}  // namespace

bool HasBF16Avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

namespace {

template <int kVectors, bool kInRows>
constexpr MmadTileFunction<BF16> kTiles[kMr] = {
    &Tile<1, kVectors, kInRows>,  &Tile<2, kVectors, kInRows>,  &Tile<3, kVectors, kInRows>,
    &Tile<4, kVectors, kInRows>,  &Tile<5, kVectors, kInRows>,  &Tile<6, kVectors, kInRows>,
    &Tile<7, kVectors, kInRows>,  &Tile<8, kVectors, kInRows>,  &Tile<9, kVectors, kInRows>,
    &Tile<10, kVectors, kInRows>, &Tile<11, kVectors, kInRows>, &Tile<12, kVectors, kInRows>};

// Few rows of many columns, B row after row.
template <int kRows, int kVectors>
CUBIST_AVX512_BF16 void FewTile(const MmadTile<BF16>& tile) {
  __m512 sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = tile.start == nullptr ? _mm512_setzero_ps()
                                        : _mm512_loadu_ps(tile.start + i * tile.start_pitch + j * kLanes);
    }
  }
  const BF16 *a = tile.a, *b = tile.b;
  const std::int64_t a_pitch = tile.a_pitch, b_step = tile.b_step;
  const auto add_word = [&](bool half) CUBIST_AVX512_BF16 {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j += 2) {
      __m512bh columns[2];
      LoadWord<2, true>(tile, b + j * kLanes, half, columns);
      __builtin_prefetch(b + (kVectors + j) * kLanes, 0, 2);
      __builtin_prefetch(b + tile.b_pair + (kVectors + j) * kLanes, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const __m512bh ai = half ? BroadcastOne(a + i * a_pitch) : BroadcastPair(a + i * a_pitch);
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], ai, columns[0]);
        sum[i][j + 1] = _mm512_dpbf16_ps(sum[i][j + 1], ai, columns[1]);
      }
    }
  };
  for (std::int64_t word = tile.words; word > 0; --word, a += 2, b += b_step) add_word(false);
  if (tile.half) add_word(true);
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(tile.c + i * tile.c_pitch + j * kLanes, sum[i][j]);
  }
}

// Three rows and more take as long as panels, or longer.
constexpr FewRowTiles<BF16>::InRows kFew[] = {{&FewTile<1, 8>, 8}, {&FewTile<2, 8>, 8}};

// The vectors of a ColumnTile: eight rows, or sixteen.
struct Half {
  using Sum = __m256;
  static constexpr int kRows = 8;
  CUBIST_AVX512_BF16 static Sum Load(const float* p) { return _mm256_load_ps(p); }
  CUBIST_AVX512_BF16 static void Store(Sum x, float* p) { _mm256_store_ps(p, x); }
  CUBIST_AVX512_BF16 static Sum Add(Sum sum, const BF16* a, int word) {
    __m256i pairs = _mm256_set1_epi32(word);
#ifdef __clang__
    asm("" : "+v"(pairs));  // As in Spread.
#endif
    return _mm256_dpbf16_ps(sum, (__m256bh)_mm256_load_si256(reinterpret_cast<const __m256i*>(a)),
                            (__m256bh)pairs);
  }
};
struct Full {
  using Sum = __m512;
  static constexpr int kRows = 16;
  CUBIST_AVX512_BF16 static Sum Load(const float* p) { return _mm512_load_ps(p); }
  CUBIST_AVX512_BF16 static void Store(Sum x, float* p) { _mm512_store_ps(p, x); }
  CUBIST_AVX512_BF16 static Sum Add(Sum sum, const BF16* a, int word) {
    return _mm512_dpbf16_ps(sum, LoadPairs(a), Spread(word));
  }
};

template <class Vector, int kVectors>
CUBIST_AVX512_BF16 void MultiplyColumns(const ColumnTile<BF16>& tile) {
  constexpr int kColumns = ColumnTile<BF16>::kColumns, kRows = kVectors * Vector::kRows;
  constexpr std::int64_t kRun = ColumnTile<BF16>::kRunBytes / 4, kLine = 32;
  typename Vector::Sum sum[kColumns][kVectors];
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[c][v] = Vector::Load(tile.sums + c * kRows + v * Vector::kRows);
  }
  const BF16 *a = tile.a, *b = tile.b, *next = tile.next;
  const std::int64_t b_col = tile.b_col;
  const auto add = [&](auto at) CUBIST_AVX512_BF16 {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const int word = at(b + c * b_col);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = Vector::Add(sum[c][v], a + v * 2 * Vector::kRows, word);
    }
  };
  for (std::int64_t left = tile.words; left > 0; left -= kRun) {
    if (next != nullptr) {
      for (int c = 0; c < kColumns; ++c) {
        for (std::int64_t line = 0; line < 2 * kRun; line += kLine)
          __builtin_prefetch(next + c * b_col + line, 0, 2);
      }
      next += 2 * kRun;
    }
    for (std::int64_t word = left < kRun ? left : kRun; word > 0; --word, a += 2 * kRows, b += 2) add(PairAt);
  }
  if (tile.half) add(OneAt);
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) Vector::Store(sum[c][v], tile.sums + c * kRows + v * Vector::kRows);
  }
}
constexpr ColumnTiles<BF16> kColumnTiles[] = {
    {32, &MultiplyColumns<Full, 2>}, {16, &MultiplyColumns<Full, 1>}, {8, &MultiplyColumns<Half, 1>}};

}  // namespace

const MmadTiles<BF16, kMr> kBF16TilesAvx512{kTiles<2, false>,
                                            kTiles<1, false>,
                                            kTiles<2, true>,
                                            {kFew, std::size(kFew), kColumnTiles, /*least_in_columns=*/4}};

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
