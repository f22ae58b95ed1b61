// The bodies of attention's backward pass, compiled once per Highway target.
#include "npu_model/host/attention_grad_ops.h"

#include <cstdint>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/attention_grad_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// One row: one key's weights for all queries. Returns the sum of ds, which is NaN if any p or ds is.
template <Narrowing kNarrowing, class T>
HWY_INLINE float StepRow(T* p, T* ds, const float* s, const float* dp, const float* lse, const float* delta,
                         std::int64_t n, Vec scale) {
  const FloatTag d;
  constexpr bool kNarrow = sizeof(T) == 2;
  const auto gradient = [&](Vec w, Vec x, Vec shift) HWY_ATTR { return hn::Mul(hn::Sub(x, shift), w); };
  Vec sum = hn::Zero(d);
  std::int64_t j = 0;
  const auto vectors = [&]<int kVectors>() HWY_ATTR {
    Vec w[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const std::int64_t at = j + i * kLanes;
      w[i] = hn::MulSub(Load(s + at), scale, Load(lse + at));
    }
    ExpScores<kNarrow>(w);
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i += 2, j += 2 * kLanes) {
      const Vec g0 = gradient(w[i], Load(dp + j), Load(delta + j));
      const Vec g1 = gradient(w[i + 1], Load(dp + j + kLanes), Load(delta + j + kLanes));
      StoreTwo<kNarrowing>(w[i], w[i + 1], p + j);
      StoreTwo<kNarrowing>(g0, g1, ds + j);
      sum = hn::Add(sum, hn::Add(g0, g1));
    }
  };
  while (j + kScoreVectors * kLanes <= n) vectors.template operator()<kScoreVectors>();
  if constexpr (kScoreVectors > 2) {
    if (j + 2 * kLanes <= n) vectors.template operator()<2>();
  }
  for (; j < n; j += kLanes) {
    const std::int64_t count = Min(kLanes, n - j);
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(count));
    Vec w[1] = {hn::MulSub(Load(s + j, count), scale, Load(lse + j, count))};
    ExpScores<kNarrow>(w);
    const Vec p0 = hn::IfThenElseZero(valid, w[0]);
    const Vec g0 = gradient(p0, Load(dp + j, count), Load(delta + j, count));
    Store(p0, p + j, count);
    Store(g0, ds + j, count);
    sum = hn::Add(sum, g0);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// A NaN shows in the sum, and then costs the row a second pass, as in SoftmaxStep.
template <Narrowing kNarrowing, class T>
void StepAs(const Rows& p, const Rows& ds, const Rows& s, const Rows& dp, const Rows& lse, const Rows& delta,
            float scale) {
  const auto* log_sum = static_cast<const float*>(lse.data);
  const auto* shift = static_cast<const float*>(delta.data);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    T *to_p = RowAs<T>(p, i), *to_ds = RowAs<T>(ds, i);
    const float *from_s = RowAs<float>(s, i), *from_dp = RowAs<float>(dp, i);
    const float sum = StepRow<kNarrowing>(to_p, to_ds, from_s, from_dp, log_sum, shift, s.cols, Set(scale));
    if (sizeof(T) == 2 && kNarrowing == Narrowing::kNoNaN && sum != sum) {
      StepRow<Narrowing::kAny>(to_p, to_ds, from_s, from_dp, log_sum, shift, s.cols, Set(scale));
    }
  }
}

void Step(const Rows& p, const Rows& ds, DType narrow, const Rows& s, const Rows& dp, const Rows& lse,
          const Rows& delta, float scale) {
  ForNarrowType(narrow, [&]<Narrowing kNarrowing, class T>(T)
                            HWY_ATTR { StepAs<kNarrowing, T>(p, ds, s, dp, lse, delta, scale); });
}

}  // namespace

const AttentionGradOps& GetAttentionGradOps() {
  static const AttentionGradOps kOps{.step = &Step};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetAttentionGradOps);
const AttentionGradOps& BestAttentionGradOps() { return HWY_DYNAMIC_DISPATCH(GetAttentionGradOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
