// Normalisation and activation composites, compiled once per Highway target.
#include "npu_model/host/activation_ops.h"

#include <cstdint>

// All of Highway's x86 targets; of Arm's, NEON: arrays of vectors need vectors of a known size.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/activation_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                                // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Tiles are read where they lie in GM. What an instruction reads for the first time it asks for this many bytes ahead,
// which is the same row's rest or, most often, the next row: the machine's own prefetching ends with every page.
constexpr std::int64_t kAhead = 4096;

// Asks for the two vectors `bytes` behind `p`, which may lie beyond any tensor.
template <class T>
HWY_INLINE void PrefetchTwo(const T* p, std::int64_t bytes) {
  constexpr std::int64_t kTwo = 2 * kLanes * static_cast<std::int64_t>(sizeof(T));
  const auto* from = reinterpret_cast<const char*>(p) + bytes;
  for (std::int64_t b = 0; b < kTwo; b += static_cast<std::int64_t>(kLineBytes)) {
    __builtin_prefetch(from + b, 0, 2);
  }
}

// out[j] = function(in[j]...) for j < n, two vectors at a time so that narrow stores are whole ones; prefetch(j) goes
// before each two.
template <class Prefetch, class Function, class Out, class... In>
HWY_INLINE void ZipRow(Prefetch prefetch, Function function, std::int64_t n, Out* out, const In*... in) {
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    prefetch(j);
    StoreTwo(function(Load(in + j)...), function(Load(in + j + kLanes)...), out + j);
  }
  if (j + kLanes <= n) {
    Store(function(Load(in + j)...), out + j);
    j += kLanes;
  }
  if (j < n) Store(function(Load(in + j, n - j)...), out + j, n - j);
}
struct NoPrefetch {
  HWY_INLINE void operator()(std::int64_t) const {}
};
// Of two rows of T, or of one, `bytes` ahead.
template <class T>
struct PrefetchRows {
  const T *a, *b;
  std::int64_t bytes_a, bytes_b;
  HWY_INLINE void operator()(std::int64_t j) const {
    PrefetchTwo(a + j, bytes_a);
    if (b != nullptr) PrefetchTwo(b + j, bytes_b);
  }
};
template <class T>
HWY_INLINE std::int64_t RowBytes(const Rows& rows) {
  return rows.pitch * static_cast<std::int64_t>(sizeof(T));
}

// Sum of function(in[j]...) over j < n: four chains, folded in one order. The function of zeros is zero.
template <class Function, class... In>
HWY_INLINE float SumRow(Function function, std::int64_t n, const In*... in) {
  const FloatTag d;
  Vec chain[4] = {Set(0.0f), Set(0.0f), Set(0.0f), Set(0.0f)};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = function(chain[c], Load(in + j + c * kLanes)...);
  }
  for (; j + kLanes <= n; j += kLanes) chain[0] = function(chain[0], Load(in + j)...);
  if (j < n) chain[1] = function(chain[1], Load(in + j, n - j)...);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(chain[0], chain[1]), hn::Add(chain[2], chain[3]))));
}

// Calls `call` with a null pointer of the type that `dtype` stands for.
template <class Call>
HWY_INLINE void WithType(DType dtype, Call call) {
  switch (dtype) {
    case DType::kBF16:
      return call(static_cast<const BF16*>(nullptr));
    case DType::kF16:
      return call(static_cast<const F16*>(nullptr));
    default:
      return call(static_cast<const float*>(nullptr));
  }
}

HWY_INLINE float& At(const Rows& column, std::int64_t i) { return *RowAs<float>(column, i); }

// ---- Root-mean-square norm

struct AddSquare {
  HWY_INLINE Vec operator()(Vec sum, Vec a) const { return hn::MulAdd(a, a, sum); }
};
struct AddProduct {
  HWY_INLINE Vec operator()(Vec sum, Vec a, Vec b) const { return hn::MulAdd(a, b, sum); }
  HWY_INLINE Vec operator()(Vec sum, Vec a, Vec b, Vec w) const { return hn::MulAdd(hn::Mul(a, b), w, sum); }
};

template <class T>
void RowDotOf(const Rows& sum, const Rows& a, const Rows& b, const Rows& weights) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    const T *left = RowAs<T>(a, i), *right = RowAs<T>(b, i);
    const auto* w = static_cast<const float*>(weights.data);
    At(sum, i) += w != nullptr    ? SumRow(AddProduct{}, a.cols, left, right, w)
                  : left == right ? SumRow(AddSquare{}, a.cols, left)
                                  : SumRow(AddProduct{}, a.cols, left, right);
  }
}

struct Scaled {
  Vec factor;
  HWY_INLINE Vec operator()(Vec a, Vec w) const { return hn::Mul(hn::Mul(a, factor), w); }
};
template <class T>
void ScaleRowsOf(const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    // The row itself has been read for its sum: the next one comes meanwhile.
    const PrefetchRows<T> next{RowAs<T>(a, i), nullptr, RowBytes<T>(a), 0};
    ZipRow(next, Scaled{Set(At(factor, i))}, a.cols, RowAs<T>(dst, i), RowAs<T>(a, i),
           RowAs<float>(weights, 0));
  }
}

struct NormGradient {
  Vec factor, shift;
  HWY_INLINE Vec operator()(Vec dy, Vec x, Vec w) const {
    return hn::NegMulAdd(x, shift, hn::Mul(hn::Mul(dy, w), factor));
  }
  HWY_INLINE Vec operator()(Vec dy, Vec x, Vec w, Vec more) const {
    return hn::Add(operator()(dy, x, w), more);
  }
};
template <class T>
void NormGradOf(const Rows& dx, const Rows& dy, const Rows& x, const Rows& weights, const Rows& factor,
                const Rows& shift, const Rows& more) {
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const NormGradient gradient{Set(At(factor, i)), Set(At(shift, i))};
    const float* w = RowAs<float>(weights, 0);
    T* const out = RowAs<T>(dx, i);
    const PrefetchRows<T> next{RowAs<T>(dy, i), RowAs<T>(x, i), RowBytes<T>(dy), RowBytes<T>(x)};
    if (more.data == nullptr) {
      ZipRow(next, gradient, x.cols, out, RowAs<T>(dy, i), RowAs<T>(x, i), w);
    } else {
      ZipRow(next, gradient, x.cols, out, RowAs<T>(dy, i), RowAs<T>(x, i), w, RowAs<T>(more, i));
    }
  }
}

struct AddScaledProduct {
  Vec factor;
  HWY_INLINE Vec operator()(Vec acc, Vec a, Vec b) const { return hn::MulAdd(hn::Mul(a, b), factor, acc); }
};
template <class T>
void AddColumnDotsOf(const Rows& acc, const Rows& a, const Rows& b, const Rows& factor) {
  float* sum = RowAs<float>(acc, 0);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    ZipRow(NoPrefetch(), AddScaledProduct{Set(At(factor, i))}, a.cols, sum, sum, RowAs<T>(a, i),
           RowAs<T>(b, i));
  }
}

// ---- SwiGLU

// 1 / (1 + exp(-x)) from z = exp(-|x|), which neither overflows nor makes the divisor leave [1, 2]: there an estimate and
// one step of Newton's are within 1.5 ulp of the quotient, at less than half its time.
HWY_INLINE Vec Sigmoid(Vec x) {
  const Vec z = Exp</*kAtMostZero=*/true>(hn::Neg(hn::Abs(x))), divisor = hn::Add(Set(1.0f), z);
#if HWY_TARGET <= HWY_AVX3
  const Vec estimate = hn::ApproximateReciprocal(divisor);
  const Vec inverse = hn::MulAdd(hn::NegMulAdd(divisor, estimate, Set(1.0f)), estimate, estimate);
#else
  const Vec inverse = hn::Div(Set(1.0f), divisor);
#endif
  return hn::IfThenElse(hn::Lt(x, Set(0.0f)), hn::Mul(z, inverse), inverse);
}

struct GatedUp {
  Vec prob;
  HWY_INLINE Vec operator()(Vec gate, Vec up) const {
    return hn::Mul(hn::Mul(hn::Mul(gate, Sigmoid(gate)), up), prob);
  }
};
template <class T>
void SwiGluOf(const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  for (std::int64_t i = 0; i < gate.rows; ++i) {
    const Vec prob = Set(probs.data == nullptr ? 1.0f : At(probs, i));
    const PrefetchRows<T> ahead{RowAs<T>(gate, i), RowAs<T>(up, i), kAhead, kAhead};
    ZipRow(ahead, GatedUp{prob}, gate.cols, RowAs<T>(out, i), RowAs<T>(gate, i), RowAs<T>(up, i));
  }
}

// One vector of a row of SwiGluGrad.
struct GateGradient {
  Vec prob;
  HWY_INLINE void operator()(Vec d_out, Vec gate, Vec up, Vec& d_gate, Vec& d_up, Vec& sum) const {
    const Vec one = Set(1.0f);
    const Vec s = Sigmoid(gate), silu = hn::Mul(gate, s);
    const Vec slope = hn::Mul(s, hn::MulAdd(gate, hn::Sub(one, s), one));
    const Vec d = hn::Mul(d_out, prob);
    d_up = hn::Mul(d, silu);
    d_gate = hn::Mul(d, hn::Mul(up, slope));
    sum = hn::MulAdd(hn::Mul(silu, up), d_out, sum);
  }
};
template <class T>
float SwiGluGradRow(T* d_gate, T* d_up, const T* d_out, const T* gate, const T* up, float prob,
                    std::int64_t n) {
  const GateGradient gradient{Set(prob)};
  Vec sum[2] = {Set(0.0f), Set(0.0f)}, g[2], u[2];
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    PrefetchTwo(d_out + j, kAhead), PrefetchTwo(gate + j, kAhead), PrefetchTwo(up + j, kAhead);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const std::int64_t at = j + c * kLanes;
      gradient(Load(d_out + at), Load(gate + at), Load(up + at), g[c], u[c], sum[c]);
    }
    StoreTwo(g[0], g[1], d_gate + j);
    StoreTwo(u[0], u[1], d_up + j);
  }
  for (; j < n; j += kLanes) {
    const std::int64_t count = Min(n - j, kLanes);
    const auto load = [&](const T* p) HWY_ATTR { return count == kLanes ? Load(p + j) : Load(p + j, count); };
    gradient(load(d_out), load(gate), load(up), g[0], u[0], sum[0]);
    if (count == kLanes) {
      Store(g[0], d_gate + j), Store(u[0], d_up + j);
    } else {
      Store(g[0], d_gate + j, count), Store(u[0], d_up + j, count);
    }
  }
  return hn::GetLane(hn::SumOfLanes(FloatTag(), hn::Add(sum[0], sum[1])));
}

// ---- The table

void RowDot(const Rows& sum, DType dtype, const Rows& a, const Rows& b, const Rows& weights) {
  WithType(dtype, [&]<class T>(const T*) HWY_ATTR { RowDotOf<T>(sum, a, b, weights); });
}
void ScaleRows(DType dtype, const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  WithType(dtype, [&]<class T>(const T*) HWY_ATTR { ScaleRowsOf<T>(dst, a, factor, weights); });
}
void NormGrad(DType dtype, const Rows& dx, const Rows& dy, const Rows& x, const Rows& weights,
              const Rows& factor, const Rows& shift, const Rows& more) {
  WithType(dtype,
           [&]<class T>(const T*) HWY_ATTR { NormGradOf<T>(dx, dy, x, weights, factor, shift, more); });
}
void AddColumnDots(const Rows& acc, DType dtype, const Rows& a, const Rows& b, const Rows& factor) {
  WithType(dtype, [&]<class T>(const T*) HWY_ATTR { AddColumnDotsOf<T>(acc, a, b, factor); });
}
void SwiGlu(DType dtype, const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  WithType(dtype, [&]<class T>(const T*) HWY_ATTR { SwiGluOf<T>(out, gate, up, probs); });
}
void SwiGluGrad(DType dtype, const SwiGluGradRows& t) {
  WithType(dtype, [&]<class T>(const T*) HWY_ATTR {
    for (std::int64_t i = 0; i < t.gate.rows; ++i) {
      At(t.d_probs, i) += SwiGluGradRow(RowAs<T>(t.d_gate, i), RowAs<T>(t.d_up, i), RowAs<T>(t.d_out, i),
                                        RowAs<T>(t.gate, i), RowAs<T>(t.up, i), At(t.probs, i), t.gate.cols);
    }
  });
}

}  // namespace

const ActivationOps* GetActivationOps() {
  static constexpr ActivationOps kOps{.row_dot = &RowDot,
                                      .scale_rows = &ScaleRows,
                                      .norm_grad = &NormGrad,
                                      .add_column_dots = &AddColumnDots,
                                      .swiglu = &SwiGlu,
                                      .swiglu_grad = &SwiGluGrad};
  return &kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetActivationOps);
const ActivationOps& BestActivationOps() { return *HWY_DYNAMIC_DISPATCH(GetActivationOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
