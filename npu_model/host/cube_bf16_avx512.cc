#include "npu_model/host/cube_bf16_avx512.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// A pair of A may stand at any even address.
CUBIST_AVX512_BF16 inline __m512bh BroadcastPair(const BF16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

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

template <int kRows, bool kInRows>
CUBIST_AVX512_BF16 void Tile(const MmadTile<BF16>& tile) {
  constexpr int kPointers = (kRows + kRowsPerPointer - 1) / kRowsPerPointer;
  const std::int64_t a_pitch = tile.a_pitch;
  const BF16* row[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    row[i] = tile.a + i * kRowsPerPointer * a_pitch;
    asm("" : "+r"(row[i]));
  }
  __m512 sum[kRows][2];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    const float* start = tile.start + i * tile.start_pitch;
    sum[i][0] = tile.start == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(start);
    sum[i][1] = tile.start == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(start + kLanes);
  }
  const BF16* b = tile.b;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  const std::int64_t b_step = tile.b_step, b_pair = tile.b_pair;
  const std::int64_t prefetch_step = tile.prefetch_step, prefetch_pair = tile.prefetch_pair;
  const __m512i low = InterleaveOrder<0>(), high = InterleaveOrder<16>();
  alignas(64) static constexpr std::uint16_t kZeros[2 * kLanes] = {};
  const bool half = kInRows && tile.half;
  for (std::int64_t word = tile.words + half; word > 0; --word) {
    __m512bh b0, b1;
    if constexpr (kInRows) {
      const __m512i first = _mm512_loadu_si512(b);
      const void* const pair = half && word == 1 ? static_cast<const void*>(kZeros) : b + b_pair;
      const __m512i second = _mm512_loadu_si512(pair);
      b0 = (__m512bh)_mm512_permutex2var_epi16(first, low, second);
      b1 = (__m512bh)_mm512_permutex2var_epi16(first, high, second);
    } else {
      b0 = LoadPairs(b), b1 = LoadPairs(b + kNr);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512bh ai = BroadcastPair(row[i / kRowsPerPointer] + i % kRowsPerPointer * a_pitch);
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], ai, b0);
      sum[i][1] = _mm512_dpbf16_ps(sum[i][1], ai, b1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) row[i] += 2;
    b += b_step;
    __builtin_prefetch(prefetch, 0, 2);
    __builtin_prefetch(prefetch + prefetch_pair, 0, 2);
    prefetch += prefetch_step;
  }
  float* c = tile.c;
  const std::int64_t c_pitch = tile.c_pitch;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    _mm512_storeu_ps(c + i * c_pitch, sum[i][0]);
    _mm512_storeu_ps(c + i * c_pitch + kLanes, sum[i][1]);
  }
}

}  // namespace

bool HasBF16Avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

#define CUBIST_TILES(in_rows)                                                                           \
  {                                                                                                     \
    &Tile<1, in_rows>, &Tile<2, in_rows>, &Tile<3, in_rows>, &Tile<4, in_rows>, &Tile<5, in_rows>,      \
        &Tile<6, in_rows>, &Tile<7, in_rows>, &Tile<8, in_rows>, &Tile<9, in_rows>, &Tile<10, in_rows>, \
        &Tile<11, in_rows>, &Tile<12, in_rows>                                                          \
  }
const MmadTileFunction<BF16> kBF16TilesAvx512[kMr] = CUBIST_TILES(false);
const MmadTileFunction<BF16> kBF16RowTilesAvx512[kMr] = CUBIST_TILES(true);
#undef CUBIST_TILES

CUBIST_AVX512_BF16 std::int64_t PeakDotBF16Avx512(std::int64_t rounds) {
  constexpr int kChains = 2 * kMr;  // As many as a Mmad has, several times what the latency asks for.
  volatile int half_and_zero =
      0x00003f00;  // Volatile, so that the compiler can neither fold nor drop the sums.
  const __m512bh x = (__m512bh)_mm512_set1_epi32(half_and_zero);
  const __m512bh y = (__m512bh)_mm512_set1_epi32(half_and_zero);
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
