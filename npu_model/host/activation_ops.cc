// SwiGLU and the scores of experts, compiled once per Highway target.
#include "npu_model/host/activation_ops.h"

#include <cstdint>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/activation_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                                // IWYU pragma: keep
#include "npu_model/host/rows-inl.h"
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// ---- SwiGLU

// e = exp(x), x cut from above: the sigmoid of x is e / (1 + e), that of -x is 1 / (1 + e). kNarrow: for results that become
// 16-bit floats.
template <bool kNarrow, int kCount>
HWY_INLINE Several<kCount> ExpCut(const Several<kCount>& x) {
  Several<kCount> e;
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) e.v[c] = MinOrSecond(Set(kLogisticCut), x.v[c]);
  if constexpr (kNarrow) {
    ExpScores</*kNarrow=*/true, /*kBounded=*/true>(e.v);
  } else {
    ExpEach</*kAtMostZero=*/true>(e.v);
  }
  return e;
}

// x / (1 + exp(-x)); where that is to become a 16-bit float, what is below -88.7 gives -0, for -1e-36 at most.
template <bool kNarrow, int kCount>
HWY_INLINE Several<kCount> Silu(const Several<kCount>& x) {
  Several<kCount> out;
  if constexpr (kNarrow) {
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) out.v[c] = hn::Neg(x.v[c]);
    ExpScores</*kNarrow=*/true>(out.v);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) out.v[c] = hn::Div(x.v[c], hn::Add(out.v[c], Set(1.0f)));
  } else {
    out = ExpCut</*kNarrow=*/false>(x);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c)
      out.v[c] = hn::Mul(x.v[c], hn::Div(out.v[c], hn::Add(out.v[c], Set(1.0f))));
  }
  return out;
}

template <bool kNarrow>
struct GatedUp {
  Vec prob;
  template <int kCount>
  HWY_INLINE Several<kCount> operator()(const Several<kCount>& gate, const Several<kCount>& up) const {
    Several<kCount> out = Silu<kNarrow>(gate);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) out.v[c] = hn::Mul(out.v[c], hn::Mul(up.v[c], prob));
    return out;
  }
};
template <Narrowing kNarrowing, class T>
void SwiGluOf(const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  for (std::int64_t i = 0; i < gate.rows; ++i) {
    const Vec prob = Set(probs.data == nullptr ? 1.0f : At(probs, i));
    const PrefetchRows<T> ahead{RowAs<T>(gate, i), RowAs<T>(up, i), kAhead, kAhead};
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
    const Several<kCount> e = ExpCut<kNarrow>(gate);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      const Vec inverse = hn::Div(Set(1.0f), hn::Add(e.v[c], Set(1.0f)));
      const Vec s = hn::Mul(e.v[c], inverse), silu = hn::Mul(gate.v[c], s);
      // Beyond the cut the inverse, 1 - s, stands still: so must what it is multiplied by.
      const Vec cut = MinOrSecond(Set(kLogisticCut), gate.v[c]);
      const Vec slope = hn::Mul(s, hn::MulAdd(cut, inverse, Set(1.0f)));
      const Vec d = hn::Mul(d_out.v[c], prob);
      d_up.v[c] = hn::Mul(d, silu);
      d_gate.v[c] = hn::Mul(d, hn::Mul(up.v[c], slope));
      d_prob.v[c] = hn::Mul(hn::Mul(silu, up.v[c]), d_out.v[c]);
    }
  }
};
template <Narrowing kNarrowing, class T>
float SwiGluGradRow(const SwiGluGradRows& t, std::int64_t i) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T>;
  T *const d_gate = RowAs<T>(t.d_gate, i), *const d_up = RowAs<T>(t.d_up, i);
  const T *const d_out = RowAs<T>(t.d_out, i), *const gate = RowAs<T>(t.gate, i),
                 *const up = RowAs<T>(t.up, i);
  const GateGradient<sizeof(T) == 2> gradient{Set(t.probs.data != nullptr ? At(t.probs, i) : 1.0f)};
  Vec sum = Set(0.0f);
  const auto several = [&]<bool kStream>(std::int64_t j) HWY_ATTR {
    PrefetchSeveral(d_out + j, kAhead), PrefetchSeveral(gate + j, kAhead), PrefetchSeveral(up + j, kAhead);
    Several<kSideBySide> g, u, p;
    gradient(LoadSeveral<kSideBySide, kOrder>(d_out + j), LoadSeveral<kSideBySide, kOrder>(gate + j),
             LoadSeveral<kSideBySide, kOrder>(up + j), g, u, p);
    sum = hn::Add(sum, hn::Add(hn::Add(p.v[0], p.v[1]), hn::Add(p.v[2], p.v[3])));
    StoreSeveral<kNarrowing, kStream, kOrder>(g, d_gate + j),
        StoreSeveral<kNarrowing, kStream, kOrder>(u, d_up + j);
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
    Several<kCount> e = ExpCut</*kNarrow=*/false>(x);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) e.v[c] = hn::Div(e.v[c], hn::Add(e.v[c], Set(1.0f)));
    return e;
  }
};
struct SqrtSoftplus {
  // ln(1 + e) of e in [0, 1]: what 1 + e loses of e comes back by the logarithm's slope, or scores of logits below -17
  // would be 0. Of still lower ones the score is the root of e, which is a number where e is none.
  HWY_INLINE Vec operator()(Vec x) const {
    const Vec root = Exp</*kAtMostZero=*/true>(hn::Mul(hn::Abs(x), Set(-0.5f)));
    const Vec e = hn::Mul(root, root), sum = hn::Add(Set(1.0f), e);
    const Vec lost = hn::Sub(e, hn::Sub(sum, Set(1.0f)));
    const Vec tail = hn::Add(Ln(sum), hn::Div(lost, sum));
    const Vec score = hn::Sqrt(hn::Add(MaxOrNaN(x, Set(0.0f)), tail));
    return hn::IfThenElse(hn::Le(x, Set(-20.0f)), root, score);
  }
};

// Of n logits to x, which may be the same row. Blocks are summed by themselves: the sum of a long row errs by what that of a
// block does.
void SoftmaxRow(float* x, const float* logits, std::int64_t n) {
  constexpr std::int64_t kBlock = 512 * kLanes;
  const FloatTag d;
  Vec most = Set(-kInfinity), sum = Set(0.0f), more = Set(0.0f);
  ForEachVector(logits, n, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { most = MaxOrNaN(most, v); });
  const bool has_nan = !hn::AllFalse(d, hn::IsNaN(most));
  const Vec maximum = Set(has_nan ? kNaN : ExtremeLane</*kMinimum=*/false>(most));
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const float* const from = logits + begin;
    float* const to = x + begin;
    Vec part = Set(0.0f);
    ForRow(
        Min(n - begin, kBlock), /*stream=*/false, to,
        [&]<bool kStream>(std::int64_t j) HWY_ATTR {
          Several<kSideBySide> e = LoadSeveral<kSideBySide>(from + j);
#pragma GCC unroll 4
          for (Vec& v : e.v) v = hn::Sub(v, maximum);
          ExpEach</*kAtMostZero=*/true>(e.v);
          part = hn::Add(part, hn::Add(hn::Add(e.v[0], e.v[1]), hn::Add(e.v[2], e.v[3])));
          StoreSeveral<Narrowing::kAny, kStream>(e, to + j);
        },
        [&](std::int64_t j, std::int64_t count) HWY_ATTR {
          const auto first = hn::FirstN(d, static_cast<std::size_t>(count));
          const Vec e =
              hn::IfThenElseZero(first, Exp</*kAtMostZero=*/true>(hn::Sub(Load(from + j, count), maximum)));
          part = hn::Add(part, e);
          StoreCount(e, to + j, count);
        });
    part = hn::Sub(part, more);
    const Vec next = hn::Add(sum, part);
    more = hn::Sub(hn::Sub(next, sum), part);  // What the sum is above its terms (Kahan).
    sum = next;
  }
  const Vec total = hn::SumOfLanes(d, sum);
  ForEachVector(x, n, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    StoreCount(hn::Div(v, total), x + j, count);
  });
}

// Logits that lie elsewhere are the caller's: the next tile's, which most often follow, come meanwhile.
template <class Function>
HWY_INLINE void ScoresOf(Function function, const Rows& n, const Rows& logits) {
  const bool elsewhere = n.data != logits.data;
  for (std::int64_t i = 0; i < n.rows; ++i) {
    const float* const from = RowAs<float>(logits, i);
    float* const to = RowAs<float>(n, i);
    if (elsewhere) {
      const PrefetchRows<float> ahead{from, nullptr, n.rows * RowBytes<float>(logits), 0};
      ZipRow<Narrowing::kAny>(ahead, function, n.cols, /*stream=*/false, to, from);
    } else {
      ZipRow<Narrowing::kAny>(NoPrefetch(), function, n.cols, /*stream=*/false, to, from);
    }
  }
}

void Scores(ScoreFunction function, const Rows& n, const Rows& logits) {
  switch (function) {
    case ScoreFunction::kSoftmax:
      for (std::int64_t i = 0; i < n.rows; ++i)
        SoftmaxRow(RowAs<float>(n, i), RowAs<float>(logits, i), n.cols);
      return;
    case ScoreFunction::kSigmoid:
      return ScoresOf(Sigmoid{}, n, logits);
    case ScoreFunction::kSqrtSoftplus:
      return ScoresOf(Each<SqrtSoftplus>{}, n, logits);
  }
}

// ---- The table

void SwiGlu(DType dtype, const Rows& out, const Rows& gate, const Rows& up, const Rows& probs) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { SwiGluOf<kHow, T>(out, gate, up, probs); });
}
void SwiGluGrad(DType dtype, const SwiGluGradRows& t) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    for (std::int64_t i = 0; i < t.gate.rows; ++i) {
      const float d_prob = SwiGluGradRow<kHow, T>(t, i);
      if (t.d_probs.data != nullptr) At(t.d_probs, i) += d_prob;
    }
  });
}

}  // namespace

const ActivationOps* GetActivationOps() {
  static constexpr ActivationOps kOps{.swiglu = &SwiGlu, .swiglu_grad = &SwiGluGrad, .scores = &Scores};
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
