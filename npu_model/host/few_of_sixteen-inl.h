// Products of few rows with a B that lies where the caller has it, where there are sixteen registers.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <cstdint>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"
#include "npu_model/host/transpose-inl.h"

#if HWY_TARGET > HWY_AVX3 && !HWY_ARCH_ARM_A64 && HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif

#endif  // CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
