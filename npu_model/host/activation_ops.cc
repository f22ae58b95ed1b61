// Normalisation and activation composites, compiled once per Highway target.
#include "npu_model/host/activation_ops.h"

#include <cstdint>

#include "npu_model/host/simd_targets.h"

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

// Vectors on which one chain of operations runs side by side: the next one would wait for too many steps of the first.
template <int kCount>
struct Several {
  HWY_ATTR Several() {}  // Of the target, as on NEON a vector's own constructor is.
  Vec v[kCount];
};
constexpr int kSideBySide = 4;

template <int kCount, class T>
HWY_INLINE Several<kCount> LoadSeveral(const T* p) {
  Several<kCount> x;
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) x.v[c] = Load(p + c * kLanes);
  return x;
}
template <class T>
HWY_INLINE Several<1> LoadSome(const T* p, std::int64_t count) {
  Several<1> x;
  x.v[0] = count == kLanes ? Load(p) : Load(p, count);
  return x;
}
template <Narrowing kNarrowing, bool kStream, int kCount, class T>
HWY_INLINE void StoreSeveral(const Several<kCount>& x, T* p) {
#pragma GCC unroll 4
  for (int c = 0; c < kCount; c += 2) {
    if constexpr (kStream) {
      StreamTwo<kNarrowing>(x.v[c], x.v[c + 1], p + c * kLanes);
    } else {
      StoreTwo<kNarrowing>(x.v[c], x.v[c + 1], p + c * kLanes);
    }
  }
}

// What is prefetched for: to be read twice, which the second-level cache keeps; likewise but soon, which the first one
// keeps; or once, which nothing should keep (what a cache drops goes to the next, at the cost of others' reads).
enum class Uses { kOnce, kTwice, kSoon };

// Asks for what stands `bytes` behind the kSideBySide vectors at `p`, which may lie beyond any tensor.
template <Uses kUses, class T>
HWY_INLINE void PrefetchSeveral(const T* p, std::int64_t bytes) {
  constexpr std::int64_t kBytes = kSideBySide * kLanes * static_cast<std::int64_t>(sizeof(T));
  const auto* from = reinterpret_cast<const char*>(p) + bytes;
  for (std::int64_t b = 0; b < kBytes; b += static_cast<std::int64_t>(kLineBytes)) {
    __builtin_prefetch(from + b, 0, kUses == Uses::kOnce ? 0 : kUses == Uses::kTwice ? 2 : 3);
  }
}

// Calls several<stream>(j) for the whole kSideBySide vectors of n elements, and some(j, count) for what is before the
// first line of the output, where that is streamed, and behind the last ones.
template <class Out, class Several, class Some>
HWY_INLINE void ForRow(std::int64_t n, bool stream, const Out* out, Several several, Some some) {
  std::int64_t j = 0;
  for (const std::int64_t begin = stream ? BeforeLine(out, n) : 0; j < begin;) {
    const std::int64_t count = Min(begin - j, kLanes);
    some(j, count);
    j += count;
  }
  constexpr std::int64_t kStep = kSideBySide * kLanes;
  if (stream) {
    for (; j + kStep <= n; j += kStep) several.template operator()<true>(j);
  } else {
    for (; j + kStep <= n; j += kStep) several.template operator()<false>(j);
  }
  for (; j < n; j += kLanes) some(j, Min(n - j, kLanes));
}

// out[j] = function(in[j]...) for j < n, function taking Several; prefetch(j) goes before each of those.
template <Narrowing kNarrowing, class Prefetch, class Function, class Out, class... In>
HWY_INLINE void ZipRow(Prefetch prefetch, Function function, std::int64_t n, bool stream, Out* out,
                       const In*... in) {
  ForRow(
      n, stream, out,
      [&]<bool kStream>(std::int64_t j) HWY_ATTR {
        prefetch(j);
        StoreSeveral<kNarrowing, kStream>(function(LoadSeveral<kSideBySide>(in + j)...), out + j);
      },
      [&](std::int64_t j, std::int64_t count)
          HWY_ATTR { StoreSome<kNarrowing>(function(LoadSome(in + j, count)...).v[0], out + j, count); });
}
// A function of single vectors as one of several.
template <class Function>
struct Each {
  Function function;
  template <int kCount, class... In>
  HWY_INLINE Several<kCount> operator()(const Several<kCount>& a, const In&... in) const {
    Several<kCount> out;
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) out.v[c] = function(a.v[c], in.v[c]...);
    return out;
  }
};
struct NoPrefetch {
  HWY_INLINE void operator()(std::int64_t) const {}
};
// Of two rows of T, or of one, `bytes` ahead.
template <Uses kUses, class T>
struct PrefetchRows {
  const T *a, *b;
  std::int64_t bytes_a, bytes_b;
  std::int64_t begin = 0;  // What is in front of it was asked for before.
  HWY_INLINE void operator()(std::int64_t j) const {
    if (j < begin) return;
    PrefetchSeveral<kUses>(a + j, bytes_a);
    if (b != nullptr) PrefetchSeveral<kUses>(b + j, bytes_b);
  }
};
template <class T>
HWY_INLINE std::int64_t RowBytes(const Rows& rows) {
  return rows.pitch * static_cast<std::int64_t>(sizeof(T));
}

// Pairs of rows of which sums are taken are read again when they are scaled. Both steps ask for a part of the rows behind
// them, so that memory is busy all the time: the first, which is shorter, for this many of n columns.
HWY_INLINE std::int64_t AskedForBySums(std::int64_t n) { return n * 3 / 8; }

// Sum of function(in[j]...) over j < n: four chains, folded in one order. The function of zeros is zero. prefetch(j) goes
// before each four vectors of the columns that AskedForBySums.
template <class Prefetch, class Function, class... In>
HWY_INLINE float SumRow(Prefetch prefetch, Function function, std::int64_t n, const In*... in) {
  const std::int64_t asked = AskedForBySums(n);
  const FloatTag d;
  Vec chain[4] = {Set(0.0f), Set(0.0f), Set(0.0f), Set(0.0f)};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    if (j < asked) prefetch(j);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = function(chain[c], Load(in + j + c * kLanes)...);
  }
  for (; j + kLanes <= n; j += kLanes) chain[0] = function(chain[0], Load(in + j)...);
  if (j < n) chain[1] = function(chain[1], Load(in + j, n - j)...);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(chain[0], chain[1]), hn::Add(chain[2], chain[3]))));
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
    const PrefetchRows<Uses::kTwice, T> next{left, right, a.rows * RowBytes<T>(a), b.rows * RowBytes<T>(b)};
    At(sum, i) += w != nullptr    ? SumRow(next, AddProduct{}, a.cols, left, right, w)
                  : left == right ? SumRow(NoPrefetch(), AddSquare{}, a.cols, left)
                                  : SumRow(next, AddProduct{}, a.cols, left, right);
  }
}

struct Scaled {
  Vec factor;
  HWY_INLINE Vec operator()(Vec a, Vec w) const { return hn::Mul(hn::Mul(a, factor), w); }
};
template <Narrowing kNarrowing, class T>
void ScaleRowsOf(const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    // The row itself has been read for its sum: all of the next one, which is read twice too, comes meanwhile.
    const PrefetchRows<Uses::kTwice, T> next{RowAs<T>(a, i), nullptr, a.rows * RowBytes<T>(a), 0};
    ZipRow<kNarrowing>(next, Each<Scaled>{{Set(At(factor, i))}}, a.cols, dst.stream, RowAs<T>(dst, i),
                       RowAs<T>(a, i), RowAs<float>(weights, 0));
  }
}

// Row by row: each is read for its sum and, from the first-level cache, to be scaled, while the next one comes there. No
// other store stands between the last ones of a row, which take their time to leave, and the next row's first.
template <Narrowing kNarrowing, class T>
void NormRowsOf(const Rows& dst, const Rows& factor, const Rows& a, const Rows& weights, float scale,
                float eps) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    const T* const row = RowAs<T>(a, i);
    const float square = SumRow(NoPrefetch(), AddSquare{}, a.cols, row);
    const Vec root = hn::Sqrt(hn::MulAdd(Set(square), Set(scale), Set(eps)));
    const Vec by = hn::Div(Set(1.0f), root);
    At(factor, i) = hn::GetLane(by);
    const PrefetchRows<Uses::kSoon, T> next{row, nullptr, RowBytes<T>(a), 0};
    ZipRow<kNarrowing>(next, Each<Scaled>{{by}}, a.cols, dst.stream, RowAs<T>(dst, i), row,
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
// Several rows are walked in strips of columns, so that what is (1, c) is read from memory once for all of them.
constexpr std::int64_t kStripCols = 1024;

template <Narrowing kNarrowing, class T>
void NormGradOf(const Rows& dx, const Rows& dy, const Rows& x, const Rows& weights, const Rows& factor,
                const Rows& shift, const Rows& more) {
  for (const Range cols : Split(x.cols, x.rows > 1 ? kStripCols : x.cols)) {
    const float* w = RowAs<float>(weights, 0) + cols.begin;
    for (std::int64_t i = 0; i < x.rows; ++i) {
      const Each<NormGradient> gradient{{Set(At(factor, i)), Set(At(shift, i))}};
      const auto row = [&](const Rows& rows) HWY_ATTR { return RowAs<T>(rows, i) + cols.begin; };
      const T *const d = row(dy), *const from = row(x);
      // The rows themselves have been read for their sums: those behind them come meanwhile.
      const PrefetchRows<Uses::kTwice, T> next{d, from, dy.rows * RowBytes<T>(dy), x.rows * RowBytes<T>(x),
                                               AskedForBySums(x.cols) - cols.begin};
      if (more.data == nullptr) {
        ZipRow<kNarrowing>(next, gradient, cols.size(), dx.stream, row(dx), d, from, w);
      } else {
        ZipRow<kNarrowing>(next, gradient, cols.size(), dx.stream, row(dx), d, from, w,
                           static_cast<const T*>(row(more)));
      }
    }
  }
}

struct AddScaledProduct {
  Vec factor;
  HWY_INLINE Vec operator()(Vec acc, Vec a, Vec b) const { return hn::MulAdd(hn::Mul(a, b), factor, acc); }
};
template <class T>
void AddColumnDotsOf(const Rows& acc, const Rows& a, const Rows& b, const Rows& factor) {
  for (const Range cols : Split(a.cols, a.rows > 1 ? kStripCols : a.cols)) {
    float* sum = RowAs<float>(acc, 0) + cols.begin;
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const T *const left = RowAs<T>(a, i) + cols.begin, *const right = RowAs<T>(b, i) + cols.begin;
      ZipRow<Narrowing::kAny>(NoPrefetch(), Each<AddScaledProduct>{{Set(At(factor, i))}}, cols.size(),
                              /*stream=*/false, sum, sum, left, right);
    }
  }
}

// ---- SwiGLU

// e = exp(x) and 1 / (1 + e): the sigmoid of x is their product, that of -x the second. kNarrow: for results that become
// 16-bit floats.
template <bool kNarrow, int kCount>
HWY_INLINE void Logistic(const Several<kCount>& x, Several<kCount>& e, Several<kCount>& inverse) {
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) {
    const Vec cut = MinOrSecond(Set(kLogisticCut), x.v[c]);
    e.v[c] = kNarrow ? ExpScore</*kNarrow=*/true>(cut) : Exp</*kAtMostZero=*/true>(cut);
  }
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) inverse.v[c] = hn::Div(Set(1.0f), hn::Add(e.v[c], Set(1.0f)));
}

template <bool kNarrow>
struct GatedUp {
  Vec prob;
  template <int kCount>
  HWY_INLINE Several<kCount> operator()(const Several<kCount>& gate, const Several<kCount>& up) const {
    Several<kCount> e, inverse, out;
    Logistic<kNarrow>(gate, e, inverse);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      const Vec silu = hn::Mul(gate.v[c], hn::Mul(e.v[c], inverse.v[c]));
      out.v[c] = hn::Mul(silu, hn::Mul(up.v[c], prob));
    }
    return out;
  }
};
template <Narrowing kNarrowing, class T>
void SwiGluOf(const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  for (std::int64_t i = 0; i < gate.rows; ++i) {
    const Vec prob = Set(probs.data == nullptr ? 1.0f : At(probs, i));
    const PrefetchRows<Uses::kOnce, T> ahead{RowAs<T>(gate, i), RowAs<T>(up, i), kAhead, kAhead};
    ZipRow<kNarrowing>(ahead, GatedUp<sizeof(T) == 2>{prob}, gate.cols, out.stream, RowAs<T>(out, i),
                       RowAs<T>(gate, i), RowAs<T>(up, i));
  }
}

// Vectors of a row of SwiGluGrad.
template <bool kNarrow>
struct GateGradient {
  Vec prob;
  template <int kCount>
  HWY_INLINE void operator()(const Several<kCount>& d_out, const Several<kCount>& gate,
                             const Several<kCount>& up, Several<kCount>& d_gate, Several<kCount>& d_up,
                             Several<kCount>& d_prob) const {
    Several<kCount> e, inverse;
    Logistic<kNarrow>(gate, e, inverse);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      const Vec s = hn::Mul(e.v[c], inverse.v[c]), silu = hn::Mul(gate.v[c], s);
      const Vec slope = hn::Mul(s, hn::MulAdd(gate.v[c], inverse.v[c], Set(1.0f)));
      const Vec d = hn::Mul(d_out.v[c], prob);
      d_up.v[c] = hn::Mul(d, silu);
      d_gate.v[c] = hn::Mul(d, hn::Mul(up.v[c], slope));
      d_prob.v[c] = hn::Mul(hn::Mul(silu, up.v[c]), d_out.v[c]);
    }
  }
};
template <Narrowing kNarrowing, class T>
float SwiGluGradRow(const SwiGluGradRows& t, std::int64_t i) {
  T *const d_gate = RowAs<T>(t.d_gate, i), *const d_up = RowAs<T>(t.d_up, i);
  const T *const d_out = RowAs<T>(t.d_out, i), *const gate = RowAs<T>(t.gate, i),
                 *const up = RowAs<T>(t.up, i);
  const GateGradient<sizeof(T) == 2> gradient{Set(At(t.probs, i))};
  Vec sum = Set(0.0f);
  const auto several = [&]<bool kStream>(std::int64_t j) HWY_ATTR {
    PrefetchSeveral<Uses::kOnce>(d_out + j, kAhead), PrefetchSeveral<Uses::kOnce>(gate + j, kAhead),
        PrefetchSeveral<Uses::kOnce>(up + j, kAhead);
    Several<kSideBySide> g, u, p;
    gradient(LoadSeveral<kSideBySide>(d_out + j), LoadSeveral<kSideBySide>(gate + j),
             LoadSeveral<kSideBySide>(up + j), g, u, p);
    sum = hn::Add(sum, hn::Add(hn::Add(p.v[0], p.v[1]), hn::Add(p.v[2], p.v[3])));
    StoreSeveral<kNarrowing, kStream>(g, d_gate + j), StoreSeveral<kNarrowing, kStream>(u, d_up + j);
  };
  const auto some = [&](std::int64_t j, std::int64_t count) HWY_ATTR {
    Several<1> g, u, p;
    gradient(LoadSome(d_out + j, count), LoadSome(gate + j, count), LoadSome(up + j, count), g, u, p);
    sum = hn::Add(sum, p.v[0]);
    StoreSome<kNarrowing>(g.v[0], d_gate + j, count), StoreSome<kNarrowing>(u.v[0], d_up + j, count);
  };
  // Both are streamed where their lines begin together.
  const std::int64_t n = t.gate.cols;
  const bool stream = t.d_gate.stream && t.d_up.stream && BeforeLine(d_gate, n) == BeforeLine(d_up, n);
  ForRow(n, stream, d_gate, several, some);
  return hn::GetLane(hn::SumOfLanes(FloatTag(), sum));
}

// ---- Scores of experts

struct Sigmoid {
  template <int kCount>
  HWY_INLINE Several<kCount> operator()(const Several<kCount>& x) const {
    Several<kCount> e;
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c)
      e.v[c] = Exp</*kAtMostZero=*/true>(MinOrSecond(Set(kLogisticCut), x.v[c]));
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) e.v[c] = hn::Div(e.v[c], hn::Add(e.v[c], Set(1.0f)));
    return e;
  }
};
struct SqrtSoftplus {
  // ln(1 + e) of e in [0, 1]: what 1 + e loses of e comes back by the logarithm's slope, or scores of logits below -17
  // would be 0.
  HWY_INLINE Vec operator()(Vec x) const {
    const Vec e = Exp</*kAtMostZero=*/true>(hn::Neg(hn::Abs(x))), sum = hn::Add(Set(1.0f), e);
    const Vec lost = hn::Sub(e, hn::Sub(sum, Set(1.0f)));
    const Vec tail = hn::Add(Ln(sum), hn::Div(lost, sum));
    return hn::Sqrt(hn::Add(MaxOrNaN(x, Set(0.0f)), tail));
  }
};

void SoftmaxRow(float* x, std::int64_t n) {
  const FloatTag d;
  Vec most = Set(-kInfinity), sum = Set(0.0f);
  ForEachVector(x, n, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { most = MaxOrNaN(most, v); });
  const bool has_nan = !hn::AllFalse(d, hn::IsNaN(most));
  const Vec maximum = Set(has_nan ? kNaN : ExtremeLane</*kMinimum=*/false>(most));
  ForEachVector(x, n, -kInfinity, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    const Vec e = Exp</*kAtMostZero=*/true>(hn::Sub(v, maximum));
    sum = hn::Add(sum, e);
    StoreCount(e, x + j, count);
  });
  const Vec total = hn::SumOfLanes(d, sum);
  ForEachVector(x, n, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    StoreCount(hn::Div(v, total), x + j, count);
  });
}

void Scores(ScoreFunction function, const Rows& n) {
  const auto each = [&](auto of) HWY_ATTR {
    for (std::int64_t i = 0; i < n.rows; ++i) {
      float* const x = RowAs<float>(n, i);
      ZipRow<Narrowing::kAny>(NoPrefetch(), of, n.cols, /*stream=*/false, x, x);
    }
  };
  switch (function) {
    case ScoreFunction::kSoftmax:
      for (std::int64_t i = 0; i < n.rows; ++i) SoftmaxRow(RowAs<float>(n, i), n.cols);
      return;
    case ScoreFunction::kSigmoid:
      return each(Sigmoid{});
    case ScoreFunction::kSqrtSoftplus:
      return each(Each<SqrtSoftplus>{});
  }
}

// ---- The table

void RowDot(const Rows& sum, DType dtype, const Rows& a, const Rows& b, const Rows& weights) {
  WithType(dtype, [&]<Narrowing, class T>() HWY_ATTR { RowDotOf<T>(sum, a, b, weights); });
}
void ScaleRows(DType dtype, const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { ScaleRowsOf<kHow, T>(dst, a, factor, weights); });
}
void NormRows(DType dtype, const Rows& dst, const Rows& factor, const Rows& a, const Rows& weights,
              float scale, float eps) {
  WithType(dtype, [&]<Narrowing kHow, class T>()
                      HWY_ATTR { NormRowsOf<kHow, T>(dst, factor, a, weights, scale, eps); });
}
void NormGrad(DType dtype, const Rows& dx, const Rows& dy, const Rows& x, const Rows& weights,
              const Rows& factor, const Rows& shift, const Rows& more) {
  WithType(dtype, [&]<Narrowing kHow, class T>()
                      HWY_ATTR { NormGradOf<kHow, T>(dx, dy, x, weights, factor, shift, more); });
}
void AddColumnDots(const Rows& acc, DType dtype, const Rows& a, const Rows& b, const Rows& factor) {
  WithType(dtype, [&]<Narrowing, class T>() HWY_ATTR { AddColumnDotsOf<T>(acc, a, b, factor); });
}
void SwiGlu(DType dtype, const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { SwiGluOf<kHow, T>(out, gate, up, probs); });
}
void SwiGluGrad(DType dtype, const SwiGluGradRows& t) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    for (std::int64_t i = 0; i < t.gate.rows; ++i) At(t.d_probs, i) += SwiGluGradRow<kHow, T>(t, i);
  });
}

}  // namespace

const ActivationOps* GetActivationOps() {
  static constexpr ActivationOps kOps{.row_dot = &RowDot,
                                      .scale_rows = &ScaleRows,
                                      .norm_rows = &NormRows,
                                      .norm_grad = &NormGrad,
                                      .add_column_dots = &AddColumnDots,
                                      .swiglu = &SwiGlu,
                                      .swiglu_grad = &SwiGluGrad,
                                      .scores = &Scores};
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
