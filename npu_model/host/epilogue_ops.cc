// The bodies of a product's epilogue, compiled once per Highway target.
#include "npu_model/host/epilogue_ops.h"

#include <cstdint>
#include <iterator>

#include "npu_model/composites.h"
#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/epilogue_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                              // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// The formulas of ExpandActivation.
template <Activation kActivation>
HWY_INLINE Vec Activate(Vec x) {
  const auto gated = [&](Vec minus_u) HWY_ATTR {  // x / (1 + exp(-u))
    return hn::Div(x, hn::Add(Exp</*kAtMostZero=*/false>(minus_u), Set(1.0f)));
  };
  if constexpr (kActivation == Activation::kRelu) {
    return hn::IfThenElse(hn::Le(x, Set(0.0f)), Set(0.0f), x);
  } else if constexpr (kActivation == Activation::kSilu) {
    return gated(hn::Neg(x));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const Vec cubic = hn::MulAdd(hn::Mul(x, x), Set(kGeluCubic), Set(1.0f));
    return gated(hn::Mul(hn::Mul(cubic, x), Set(-kTwoSqrtTwoOverPi)));
  } else if constexpr (kActivation == Activation::kGelu) {
    const Vec z = hn::Mul(hn::Abs(x), Set(kSqrtHalf));
    const Vec t = hn::Div(Set(1.0f), hn::MulAdd(z, Set(0.5f), Set(1.0f)));
    constexpr std::size_t kTerms = std::size(kErfcTerms);
    Vec y = Set(kErfcTerms[kTerms - 1]);
    for (std::size_t i = kTerms - 1; i-- > 0;) y = hn::MulAdd(y, t, Set(kErfcTerms[i]));
    const Vec half = hn::Mul(hn::Mul(t, Exp</*kAtMostZero=*/true>(hn::NegMulAdd(z, z, y))), Set(0.5f));
    return hn::Mul(x, hn::IfThenElse(hn::Le(x, Set(0.0f)), half, hn::Sub(Set(1.0f), half)));
  } else {
    return x;
  }
}

template <Activation kActivation, class T>
void StoreRowsAs(const Rows& dst, const EpilogueRows& rows, const EpilogueScalars& e, bool stream) {
  const Vec alpha = Set(e.alpha), beta = Set(e.beta);
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    T* const out = RowAs<T>(dst, i);
    const float* const x = RowAs<const float>(rows.x, i);
    const float* const residual =
        rows.residual.data == nullptr ? nullptr : RowAs<const float>(rows.residual, i);
    const auto value = [&](std::int64_t j, auto... count) HWY_ATTR {
      Vec y = hn::Mul(Load(x + j, count...), alpha);
      if (rows.bias != nullptr) y = hn::Add(y, Load(rows.bias + j, count...));
      if (residual != nullptr) y = hn::MulAdd(beta, Load(residual + j, count...), y);
      return Activate<kActivation>(y);
    };
    const auto store_first = [&](std::int64_t j, std::int64_t end) HWY_ATTR {
      for (; j < end; j += kLanes) {
        const std::int64_t count = Min(kLanes, end - j);
        if (count == kLanes) {
          Store(value(j), out + j);
        } else {
          Store(value(j, count), out + j, count);
        }
      }
    };
    std::int64_t j = stream ? BeforeLine(out, dst.cols) : 0;
    store_first(0, j);
    if (stream) {
      for (; j + 2 * kLanes <= dst.cols; j += 2 * kLanes) StreamTwo(value(j), value(j + kLanes), out + j);
    } else {
      for (; j + 2 * kLanes <= dst.cols; j += 2 * kLanes) StoreTwo(value(j), value(j + kLanes), out + j);
    }
    store_first(j, dst.cols);
  }
}

template <Activation kActivation>
void StoreAs(const Rows& dst, DType type, const EpilogueRows& rows, const EpilogueScalars& e, bool stream) {
  switch (type) {
    case DType::kBF16:
      return StoreRowsAs<kActivation, BF16>(dst, rows, e, stream);
    case DType::kF16:
      return StoreRowsAs<kActivation, F16>(dst, rows, e, stream);
    default:
      return StoreRowsAs<kActivation, float>(dst, rows, e, stream);
  }
}

void StoreEpilogue(const Rows& dst, DType type, const EpilogueRows& rows, const EpilogueScalars& e,
                   bool stream) {
  switch (e.activation) {
    case Activation::kRelu:
      return StoreAs<Activation::kRelu>(dst, type, rows, e, stream);
    case Activation::kSilu:
      return StoreAs<Activation::kSilu>(dst, type, rows, e, stream);
    case Activation::kGelu:
      return StoreAs<Activation::kGelu>(dst, type, rows, e, stream);
    case Activation::kGeluTanh:
      return StoreAs<Activation::kGeluTanh>(dst, type, rows, e, stream);
    case Activation::kNone:
      return StoreAs<Activation::kNone>(dst, type, rows, e, stream);
  }
}

}  // namespace

const EpilogueOps& GetEpilogueOps() {
  static constexpr EpilogueOps kOps{.store = &StoreEpilogue};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetEpilogueOps);
const EpilogueOps& BestEpilogueOps() { return HWY_DYNAMIC_DISPATCH(GetEpilogueOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
