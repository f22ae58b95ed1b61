// Products of few rows with a B whose rows lie in runs, where there are 32 registers.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"

#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Few rows of A, whose sums cost little to keep in C: a few rows of B pass at a time, each as long as it is, a run of 256
// bytes beside those of the others. A core follows so many rows that way: on a Zen 4 four or eight give what memory gives, sixteen
// 0.8 of it, and the 32 of a panel half. There the next run is asked for meanwhile; a Zen 5 is quicker at finding it for
// itself, 1.1 to 1.2 times.

// Vectors of a run of 256 bytes of floats, as far as the registers hold their sums of so many rows of A.
constexpr int FewVectors(int rows) {
  constexpr int kRun = static_cast<int>(64 / kLanes);
  const int held = rows == 1 ? 16 : rows == 2 ? 8 : 4;
  return kRun < held ? kRun : held;
}

template <class E, int kRows, int kVectors, bool kAsks>
void FewTile(const MmadTile<float>& tile) {
  const FloatTag d;
  constexpr int kOfLine = static_cast<int>(64 / (kLanes * sizeof(E)));  // Vectors.
  const std::int64_t a_pitch = tile.a_pitch, b_step = tile.b_step;
  for (std::int64_t col = 0; col < tile.cols; col += kVectors * kLanes) {
    hn::Vec<FloatTag> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = tile.start == nullptr
                        ? hn::Zero(d)
                        : hn::LoadU(d, tile.start + i * tile.start_pitch + col + j * kLanes);
      }
    }
    const float* a = tile.a;
    const E* b = SourceOf<E>(tile) + col;
    const auto add = [&]() HWY_ATTR {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        const auto columns = LoadFew(b + j * kLanes);
        if (j % kOfLine == 0 && kAsks) __builtin_prefetch(b + (kVectors + j) * kLanes, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          sum[i][j] = hn::MulAdd(hn::Set(d, a[i * a_pitch]), columns, sum[i][j]);
      }
      ++a, b += b_step;
    };
    if (tile.words == kFewWords) {  // Nearly always: as far as a core looks ahead, less of it is loops.
#pragma GCC unroll 8
      for (std::int64_t word = 0; word < kFewWords; ++word) add();
    } else {
      for (std::int64_t word = 0; word < tile.words; ++word) add();
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j)
        hn::StoreU(sum[i][j], d, tile.c + i * tile.c_pitch + col + j * kLanes);
    }
  }
}

template <class E, int kRows, bool kAsks>
constexpr FewRowTile<float> kFewOf = {&FewTile<E, kRows, FewVectors(kRows), kAsks>, FewVectors(kRows),
                                      kRows > 2 && !std::is_same_v<E, float> ? kShortestRow : 0};
template <class E, bool kAsks = true>
constexpr FewRowTile<float> kFewF32[] = {kFewOf<E, 1, kAsks>, kFewOf<E, 2, kAsks>, kFewOf<E, 3, kAsks>,
                                         kFewOf<E, 4, kAsks>};
// Where runs are asked for, panels of floats are as quick of three rows and more; elements that are to be widened would be packed.
template <class E, bool kAsks = true>
constexpr std::int64_t kMostInRows = !kAsks || !std::is_same_v<E, float> ? std::size(kFewF32<E, kAsks>) : 2;

// The columns that whole tiles make; of a B in rows.
template <class T, class E>
void MmadFew(const MmadArgs& args, const FewRowTile<T>& few, std::int64_t cols) {
  constexpr std::int64_t kMostRows = 4, kPerWord = static_cast<std::int64_t>(4 / sizeof(T)),
                         kFewK = kFewWords * kPerWord;
  alignas(64) T rows[kMostRows * kFewK];
  const auto* const a = static_cast<const T*>(args.a);
  const auto* const b = static_cast<const E*>(args.b_source.data);
  const std::int64_t b_row = args.b_source.row_stride;
  MmadTile<T> tile{.a = rows,
                   .a_pitch = kFewK,
                   .b_step = kPerWord * b_row,
                   .b_pair = b_row,
                   .cols = cols,
                   .c = args.c,
                   .c_pitch = args.c_pitch};
  for (const Range k : AtLeastOnce(Split(args.k, kFewK))) {
    for (std::int64_t i = 0; i < args.m; ++i)
      std::copy_n(a + i * args.a_pitch + k.begin, k.size(), rows + i * kFewK);
    tile.words = k.size() / kPerWord, tile.half = k.size() % kPerWord != 0;
    tile.b = reinterpret_cast<const T*>(b + k.begin * b_row);
    StartAt(args, 0, k.begin == 0, &tile);
    few.function(tile);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif

#endif  // CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
