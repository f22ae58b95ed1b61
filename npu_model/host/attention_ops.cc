// Attention's own instruction bodies, compiled once per Highway target.
#include "npu_model/host/attention_ops.h"

#include <cstdint>

#include "npu_model/host/tile_ops.h"

// The targets of vector_ops.cc.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/attention_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                               // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = HWY_FULL(float);

constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));

constexpr std::int64_t Clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}
HWY_INLINE float* RowOf(const Rows& x, std::int64_t i) { return static_cast<float*>(x.data) + i * x.pitch; }

HWY_INLINE void FillRow(float* row, std::int64_t begin, std::int64_t end, float value) {
  const FloatTag d;
  std::int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) hn::StoreU(hn::Set(d, value), d, row + j);
  for (; j < end; ++j) row[j] = value;
}

void MaskOutside(const Rows& x, std::int64_t lowest, std::int64_t highest, float value) {
  // The band, as far as it matters to the tile: sums with i stay small.
  const std::int64_t low = Clamp(lowest, -x.rows, x.cols), high = Clamp(highest, -x.rows - 1, x.cols);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const std::int64_t begin = Clamp(i + low, 0, x.cols), end = Clamp(i + high + 1, begin, x.cols);
    FillRow(RowOf(x, i), 0, begin, value);
    FillRow(RowOf(x, i), end, x.cols, value);
  }
}

}  // namespace

const AttentionOps& GetAttentionOps() {
  static const AttentionOps kOps{.target = hwy::TargetName(HWY_TARGET), .mask_outside = &MaskOutside};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetAttentionOps);
const AttentionOps& BestAttentionOps() { return HWY_DYNAMIC_DISPATCH(GetAttentionOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
