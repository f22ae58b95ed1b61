// Composite instructions as primitive ones: the contract of each, and what the model records and prices for it.
// The host has one body per composite; tests run both and compare. `V` is a Vector executor (see VectorFront).
#ifndef CUBIST_NPU_MODEL_COMPOSITES_H_
#define CUBIST_NPU_MODEL_COMPOSITES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "npu_model/chip.h"
#include "npu_model/core.h"

namespace cubist {

// One step of the online softmax (Milakov and Gimelshein, 2018; FlashAttention-2,
// 2023) over a block of scores s (r, c):
//   m_new = max(m_old, rowmax(scale * s));  alpha = exp(m_old - m_new)
//   p = exp(scale * s - m_new), rounded to p's dtype;  l = l * alpha + rowsum(p before rounding)
// m_new, m_old, l are (r, 1). alpha takes m_old's place; s is lost. Masked scores are -inf; m starts at the
// lowest finite float, so that a row masked so far keeps p = 0 and l = 0 and no NaN arises.
template <class V>
void ExpandSoftmaxStep(V& v, const TileRef& p, const TileRef& s, const TileRef& m_new, const TileRef& m_old,
                       const TileRef& l, float scale, Loc loc) {
  v.Scalar(ScalarOp::kMul, s, s, scale, loc);
  v.Reduce(ReduceOp::kMax, m_new, s, loc);
  v.Binary(BinaryOp::kMax, m_new, m_new, m_old, loc);
  v.Binary(BinaryOp::kSub, s, s, m_new, loc);
  v.Unary(UnaryOp::kExp, s, s, loc);
  v.Cast(p, s, loc);
  v.Binary(BinaryOp::kSub, m_old, m_old, m_new, loc);
  v.Unary(UnaryOp::kExp, m_old, m_old, loc);
  v.Binary(BinaryOp::kMul, l, l, m_old, loc);
  const TileRef row_sum = s.Cols({0, 1});
  v.Reduce(ReduceOp::kSum, row_sum, s, loc);
  v.Binary(BinaryOp::kAdd, l, l, row_sum, loc);
}

// s = s * scale - slope * |first + i - j|, or its square root's: linear biases of scores (Press, Smith and Lewis, Train
// short, test long, 2022). `first` is how far the first row stands behind the first key. scratch has the shape of s.
template <class V>
void ExpandAddAlibi(V& v, const TileRef& s, const TileRef& scratch, float scale, float slope,
                    std::int64_t first, bool root, Loc loc) {
  v.Scalar(ScalarOp::kMul, s, s, scale, loc);
  v.Distances(scratch, first, loc);
  if (root) v.Unary(UnaryOp::kSqrt, scratch, scratch, loc);
  v.Scalar(ScalarOp::kMul, scratch, scratch, -slope, loc);
  v.Binary(BinaryOp::kAdd, s, s, scratch, loc);
}

// The weights of a block of transposed scores s (keys, queries) and the gradient of the scaled scores, from dp = dO V^T
// transposed alike (FlashAttention-2, 2023, algorithm 2):
//   p = exp(scale * s - lse), rounded to p's dtype;   ds = (p before rounding) * (dp - delta), rounded likewise
// lse and delta are (1, queries): log-sum-exp of the query's scores and sum of dO * O. s and dp are lost. Masked scores
// are -inf and give p = 0.
template <class V>
void ExpandAttentionGradStep(V& v, const TileRef& p, const TileRef& ds, const TileRef& s, const TileRef& dp,
                             const TileRef& lse, const TileRef& delta, float scale, Loc loc) {
  v.Scalar(ScalarOp::kMul, s, s, scale, loc);
  v.Binary(BinaryOp::kSub, s, s, lse, loc);
  v.Unary(UnaryOp::kExp, s, s, loc);
  v.Cast(p, s, loc);
  v.Binary(BinaryOp::kSub, dp, dp, delta, loc);
  v.Binary(BinaryOp::kMul, dp, dp, s, loc);
  v.Cast(ds, dp, loc);
}

// acc = acc * factor + x, factor broadcast over the columns where it is (r, 1).
template <class V>
void ExpandMulAdd(V& v, const TileRef& acc, const TileRef& factor, const TileRef& x, Loc loc) {
  v.Binary(BinaryOp::kMul, acc, acc, factor, loc);
  v.Binary(BinaryOp::kAdd, acc, acc, x, loc);
}

// dst (1, c) = how many of each column of flags (r, c) are true; scratch has the shape of flags.
template <class V>
void ExpandCountTrue(V& v, const TileRef& dst, const TileRef& scratch, const TileRef& flags, Loc loc) {
  v.Cast(scratch, flags, loc);
  v.ColumnSum(dst, scratch, loc);
}

// acc (+)= sum over i, ascending, of weights[i] * rows[i], in fp32. acc, scratch and every row are (1, c).
template <class V>
void ExpandWeightedSum(V& v, const TileRef& acc, const TileRef& scratch, std::span<const TileRef> rows,
                       std::span<const float> weights, Accumulate accumulate, Loc loc) {
  if (accumulate == Accumulate::kNo) v.Fill(acc, 0.0f, loc);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    v.Cast(scratch, rows[i], loc);
    v.Scalar(ScalarOp::kMul, scratch, scratch, weights[i], loc);
    v.Binary(BinaryOp::kAdd, acc, acc, scratch, loc);
  }
}

// `a` as fp32: itself, or cast to `scratch`.
template <class V>
TileRef Widened(V& v, const TileRef& a, const TileRef& scratch, Loc loc) {
  if (a.dtype() == DType::kF32) return a;
  v.Cast(scratch, a, loc);
  return scratch;
}

// The last fp32 operation of a composite writes here; Narrow then makes it `dst`.
inline TileRef LastOf(const TileRef& dst, const TileRef& scratch) {
  return dst.dtype() == DType::kF32 ? dst : scratch;
}
template <class V>
void Narrow(V& v, const TileRef& dst, const TileRef& scratch, Loc loc) {
  if (dst.dtype() != DType::kF32) v.Cast(dst, scratch, loc);
}

// n = the scores of logits n, row by row (s0, s1 scratch tiles of n's shape, column (r, 1)):
//   softmax; 1 / (1 + exp(-x)); sqrt(ln(1 + exp(x)))
template <class V>
void ExpandScores(V& v, ScoreFunction function, const TileRef& n, const TileRef& s0, const TileRef& s1,
                  const TileRef& column, Loc loc) {
  switch (function) {
    case ScoreFunction::kSoftmax:
      v.Reduce(ReduceOp::kMax, column, n, loc);
      v.Binary(BinaryOp::kSub, n, n, column, loc);
      v.Unary(UnaryOp::kExp, n, n, loc);
      v.Reduce(ReduceOp::kSum, column, n, loc);
      v.Binary(BinaryOp::kDiv, n, n, column, loc);
      return;
    case ScoreFunction::kSigmoid:
      v.Scalar(ScalarOp::kMul, n, n, -1.0f, loc);
      v.Unary(UnaryOp::kExp, n, n, loc);
      v.Scalar(ScalarOp::kAdd, n, n, 1.0f, loc);
      v.Fill(s0, 1.0f, loc);
      v.Binary(BinaryOp::kDiv, n, s0, n, loc);
      return;
    // ln(1 + exp(x)) = max(x, 0) + ln(1 + e), e = exp(-|x|), and ln(1 + e) = ln(1 + d) * e / d (Kahan): d is what 1 + e
    // keeps of e, and where it keeps nothing the least that it would. Of x below -20 the root is exp(x / 2), which is a
    // number long after exp(x) is none.
    case ScoreFunction::kSqrtSoftplus:
      v.Unary(UnaryOp::kAbs, s0, n, loc);
      v.Scalar(ScalarOp::kMul, s0, s0, -1.0f, loc);
      v.Unary(UnaryOp::kExp, s0, s0, loc);
      v.Scalar(ScalarOp::kAdd, s1, s0, 1.0f, loc);
      v.Scalar(ScalarOp::kAdd, s1, s1, -1.0f, loc);
      v.Scalar(ScalarOp::kMax, s1, s1, 0x1p-23f, loc);
      v.Binary(BinaryOp::kDiv, s0, s0, s1, loc);
      v.Scalar(ScalarOp::kAdd, s1, s1, 1.0f, loc);
      v.Unary(UnaryOp::kLn, s1, s1, loc);
      v.Binary(BinaryOp::kMul, s0, s0, s1, loc);
      v.Scalar(ScalarOp::kMax, s1, n, 0.0f, loc);
      v.Binary(BinaryOp::kAdd, s0, s0, s1, loc);
      v.Unary(UnaryOp::kSqrt, s0, s0, loc);
      v.Scalar(ScalarOp::kMul, s1, n, 0.5f, loc);
      v.Unary(UnaryOp::kExp, s1, s1, loc);
      v.SelectLe(n, n, -20.0f, s1, s0, loc);
      return;
  }
}

// choice = a + bias, or a where none is given; worths = the sums of the `count` highest of each group of choice; kept = the
// groups that are worth most; values and ids = TopK of choice in those.
template <class V>
void ExpandGroupedTopK(V& v, const GroupedTopKRefs& t, std::int64_t count, Loc loc) {
  if (t.bias.given()) {
    v.Binary(BinaryOp::kAdd, t.choice, t.a, t.bias, loc);
  } else {
    v.Scalar(ScalarOp::kMul, t.choice, t.a, 1.0f, loc);
  }
  v.GroupTop(t.worths, t.choice, count, loc);
  v.TopK(t.best, t.kept, t.worths, loc);
  v.KeepGroups(t.choice, t.kept, t.a.cols() / t.worths.cols(), loc);
  v.TopK(t.values, t.ids, t.choice, loc);
}

// Elements of x that are NaN or beyond +-limit become 0, or the mean of their row's others (0 where there are none);
// bad (r, 1) = how many there were. s0, s1 scratch tiles of x's shape, column (r, 1).
template <class V>
void ExpandRepair(V& v, const TileRef& x, const TileRef& bad, const TileRef& s0, const TileRef& s1,
                  const TileRef& column, float limit, bool by_mean, Loc loc) {
  v.Unary(UnaryOp::kAbs, s0, x, loc);
  v.Fill(bad, 1.0f, loc);
  v.Fill(s1, 0.0f, loc);
  v.SelectLe(x, s0, limit, x, s1, loc);     // Bad ones are 0 now.
  v.SelectLe(s1, s0, limit, s1, bad, loc);  // 1 where bad.
  v.Reduce(ReduceOp::kSum, bad, s1, loc);
  if (!by_mean) return;
  v.Scalar(ScalarOp::kMul, column, bad, -1.0f, loc);
  v.Scalar(ScalarOp::kAdd, column, column, static_cast<float>(x.cols()), loc);
  v.Scalar(ScalarOp::kMax, column, column, 1.0f, loc);
  v.Scalar(ScalarOp::kMul, column, column, MeanScale(x.cols()), loc);
  v.Scalar(ScalarOp::kMul, s1, x, MeanScale(x.cols()), loc);
  const TileRef mean = s1.Cols({0, 1});
  v.Reduce(ReduceOp::kSum, mean, s1, loc);
  v.Binary(BinaryOp::kDiv, column, mean, column, loc);
  for (int side = 0; side < 2; ++side) {  // Rounding may take it beyond the limit.
    v.Scalar(ScalarOp::kMul, column, column, -1.0f, loc);
    v.Scalar(ScalarOp::kMax, column, column, -limit, loc);
  }
  v.SelectLe(x, s0, limit, x, column, loc);
}

// sum (r, 1) += rowsum(a * b * weights); a, b (r, c); weights (1, c) or not given, which means 1.
template <class V>
void ExpandRowDot(V& v, const TileRef& sum, const TileRef& s0, const TileRef& s1, const TileRef& a,
                  const TileRef& b, const TileRef& weights, Loc loc) {
  const bool same = a.slot == b.slot && a.row_part == b.row_part && a.col_part == b.col_part;
  const TileRef left = Widened(v, a, s0, loc), right = same ? left : Widened(v, b, s1, loc);
  v.Binary(BinaryOp::kMul, s0, left, right, loc);
  if (weights.given()) v.Binary(BinaryOp::kMul, s0, s0, weights, loc);
  const TileRef row_sum = s0.Cols({0, 1});
  v.Reduce(ReduceOp::kSum, row_sum, s0, loc);
  v.Binary(BinaryOp::kAdd, sum, sum, row_sum, loc);
}

// dst = a * factor * weights, rounded once; factor (r, 1), weights (1, c).
template <class V>
void ExpandScaleRows(V& v, const TileRef& dst, const TileRef& s0, const TileRef& a, const TileRef& factor,
                     const TileRef& weights, Loc loc) {
  v.Binary(BinaryOp::kMul, s0, Widened(v, a, s0, loc), factor, loc);
  v.Binary(BinaryOp::kMul, LastOf(dst, s0), s0, weights, loc);
  Narrow(v, dst, s0, loc);
}

// out = z * rstd * gamma, rounded once, with rstd = 1 / sqrt(scale * rowsum(z^2) + eps), and z = x or, with a residual,
// z = sum = x + residual, rounded.
template <class V>
void ExpandNormRows(V& v, const NormRefs& t, float scale, float eps, Loc loc) {
  if (t.residual.given()) {
    v.Binary(BinaryOp::kAdd, LastOf(t.sum, t.s0), Widened(v, t.x, t.s0, loc),
             Widened(v, t.residual, t.s1, loc), loc);
    Narrow(v, t.sum, t.s0, loc);
  }
  const TileRef z = Widened(v, t.residual.given() ? t.sum : t.x, t.s0, loc);
  v.Binary(BinaryOp::kMul, t.s1, z, z, loc);
  v.Reduce(ReduceOp::kSum, t.rstd, t.s1, loc);
  v.Scalar(ScalarOp::kMul, t.rstd, t.rstd, scale, loc);
  v.Scalar(ScalarOp::kAdd, t.rstd, t.rstd, eps, loc);
  v.Unary(UnaryOp::kSqrt, t.rstd, t.rstd, loc);
  v.Fill(t.one, 1.0f, loc);
  v.Binary(BinaryOp::kDiv, t.rstd, t.one, t.rstd, loc);
  ExpandScaleRows(v, t.out, t.s0, z, t.rstd, t.gamma, loc);
}

// d_x = d_out * gamma * rstd - x * shift (+ more), rounded once.
template <class V>
void ExpandNormGrad(V& v, const NormGradRefs& t, Loc loc) {
  v.Binary(BinaryOp::kMul, t.s0, Widened(v, t.d_out, t.s0, loc), t.gamma, loc);
  v.Binary(BinaryOp::kMul, t.s0, t.s0, t.rstd, loc);
  v.Binary(BinaryOp::kMul, t.s1, Widened(v, t.x, t.s1, loc), t.shift, loc);
  v.Binary(BinaryOp::kSub, t.more.given() ? t.s0 : LastOf(t.d_x, t.s0), t.s0, t.s1, loc);
  if (t.more.given()) v.Binary(BinaryOp::kAdd, LastOf(t.d_x, t.s0), t.s0, Widened(v, t.more, t.s1, loc), loc);
  Narrow(v, t.d_x, t.s0, loc);
}

// acc (1, c) += each row of a, ascending.
template <class V>
void AddRows(V& v, const TileRef& acc, const TileRef& a, Loc loc) {
  for (std::int64_t i = 0; i < a.rows(); ++i) v.Binary(BinaryOp::kAdd, acc, acc, a.Row(i), loc);
}

// acc (1, c) += sum over the rows, ascending, of a * b * factor; factor (r, 1).
template <class V>
void ExpandAddColumnDots(V& v, const TileRef& acc, const TileRef& s0, const TileRef& s1, const TileRef& a,
                         const TileRef& b, const TileRef& factor, Loc loc) {
  v.Binary(BinaryOp::kMul, s0, Widened(v, a, s0, loc), Widened(v, b, s1, loc), loc);
  v.Binary(BinaryOp::kMul, s0, s0, factor, loc);
  AddRows(v, acc, s0, loc);
}

// d_gamma += colsum(d_out * x * rstd), rows ascending, where it is given, and
// d_x = d_out * gamma * rstd - x * rstd^3 * scale * rowsum(d_out * x * gamma) (+ more), rounded once.
template <class V>
void ExpandNormRowsGrad(V& v, const NormGradRefs& t, float scale, Loc loc) {
  v.Binary(BinaryOp::kMul, t.s0, Widened(v, t.d_out, t.s0, loc), Widened(v, t.x, t.s1, loc), loc);
  v.Binary(BinaryOp::kMul, t.s1, t.s0, t.gamma, loc);
  v.Reduce(ReduceOp::kSum, t.shift, t.s1, loc);
  v.Scalar(ScalarOp::kMul, t.shift, t.shift, scale, loc);
  for (int i = 0; i < 3; ++i) v.Binary(BinaryOp::kMul, t.shift, t.shift, t.rstd, loc);
  if (t.d_gamma.given()) {
    v.Binary(BinaryOp::kMul, t.s0, t.s0, t.rstd, loc);
    AddRows(v, t.d_gamma, t.s0, loc);
  }
  ExpandNormGrad(v, t, loc);
}

// out = gate / (1 + exp(-gate)) * up (* probs), rounded once (Shazeer, GLU variants, 2020); probs (r, 1).
template <class V>
void ExpandSwiGlu(V& v, const TileRef& out, const TileRef& s0, const TileRef& s1, const TileRef& gate,
                  const TileRef& up, const TileRef& probs, Loc loc) {
  const TileRef g = Widened(v, gate, s0, loc);
  v.Scalar(ScalarOp::kMul, s1, g, -1.0f, loc);
  v.Unary(UnaryOp::kExp, s1, s1, loc);
  v.Scalar(ScalarOp::kAdd, s1, s1, 1.0f, loc);
  v.Binary(BinaryOp::kDiv, s0, g, s1, loc);
  v.Binary(BinaryOp::kMul, probs.given() ? s0 : LastOf(out, s0), s0, Widened(v, up, s1, loc), loc);
  if (probs.given()) v.Binary(BinaryOp::kMul, LastOf(out, s0), s0, probs, loc);
  Narrow(v, out, s0, loc);
}

// With s = 1 / (1 + exp(-gate)), d = d_out * probs, and 1 for probs that are not given:
//   d_probs (r, 1) += rowsum(d_out * gate * s * up), where it is given;  d_up = d * gate * s;
//   d_gate = d * up * s * (1 + gate * (1 - s))
template <class V>
void ExpandSwiGluGrad(V& v, const SwiGluGradTiles& t, Loc loc) {
  const TileRef g = Widened(v, t.gate, t.s0, loc);
  v.Scalar(ScalarOp::kMul, t.s1, g, -1.0f, loc);
  v.Unary(UnaryOp::kExp, t.s1, t.s1, loc);
  v.Scalar(ScalarOp::kAdd, t.s1, t.s1, 1.0f, loc);
  v.Fill(t.s2, 1.0f, loc);
  v.Binary(BinaryOp::kDiv, t.s1, t.s2, t.s1, loc);  // s1 = s
  v.Binary(BinaryOp::kSub, t.s2, t.s2, t.s1, loc);  // s2 = 1 - s
  v.Binary(BinaryOp::kMul, t.s2, t.s2, g, loc);     //
  v.Scalar(ScalarOp::kAdd, t.s2, t.s2, 1.0f, loc);  //
  v.Binary(BinaryOp::kMul, t.s2, t.s2, t.s1, loc);  // s2 = s (1 + gate (1 - s))
  v.Binary(BinaryOp::kMul, t.s0, g, t.s1, loc);     // s0 = gate s
  const TileRef up = Widened(v, t.up, t.s3, loc);
  v.Binary(BinaryOp::kMul, t.s2, t.s2, up, loc);                         // s2 = up s (1 + gate (1 - s))
  if (t.d_probs.given()) v.Binary(BinaryOp::kMul, t.s1, t.s0, up, loc);  // s1 = gate s up
  TileRef d = Widened(v, t.d_out, t.s3, loc);
  if (t.d_probs.given()) {
    v.Binary(BinaryOp::kMul, t.s1, t.s1, d, loc);
    const TileRef row_sum = t.s1.Cols({0, 1});
    v.Reduce(ReduceOp::kSum, row_sum, t.s1, loc);
    v.Binary(BinaryOp::kAdd, t.d_probs, t.d_probs, row_sum, loc);
  }
  if (t.probs.given()) {
    v.Binary(BinaryOp::kMul, t.s3, d, t.probs, loc);
    d = t.s3;
  }
  v.Binary(BinaryOp::kMul, LastOf(t.d_up, t.s0), t.s0, d, loc);
  Narrow(v, t.d_up, t.s0, loc);
  v.Binary(BinaryOp::kMul, LastOf(t.d_gate, t.s2), t.s2, d, loc);
  Narrow(v, t.d_gate, t.s2, loc);
}

// ln(erfc(z)) + z^2 - ln(t) as a polynomial in t = 1 / (1 + z / 2), lowest power first: the interpolant at Chebyshev's
// points of (0, 1], 2e-7 from it. With it erfc(z) = t exp(poly - z^2) keeps its relative precision for all z >= 0.
inline constexpr float kErfcTerms[] = {-1.265512311f,  1.000037772f,  0.3737148406f, 0.1006541982f,
                                       -0.2061395609f, 0.3360064747f, -1.231761466f, 1.583596735f,
                                       -0.8726416533f, 0.1820451054f};
inline constexpr float kSqrtHalf = 0.707106781f;
inline constexpr float kTwoSqrtTwoOverPi = 1.595769122f, kGeluCubic = 0.044715f;

// x = activation(x); s are scratch tiles of its shape.
//   GELU: x Phi(x) = x (1 - erfc(z) / 2) for x > 0, x erfc(z) / 2 otherwise, z = |x| / sqrt 2
//   by tanh: x / (1 + exp(-u)), u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
template <class V>
void ExpandActivation(V& v, Activation activation, const TileRef& x, const TileRef* s, Loc loc) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      v.Fill(s[0], 0.0f, loc);
      v.SelectLe(x, x, 0.0f, s[0], x, loc);
      return;
    case Activation::kSilu:
      v.Scalar(ScalarOp::kMul, s[0], x, -1.0f, loc);
      break;
    case Activation::kGeluTanh:
      v.Binary(BinaryOp::kMul, s[0], x, x, loc);
      v.Scalar(ScalarOp::kMul, s[0], s[0], kGeluCubic, loc);
      v.Scalar(ScalarOp::kAdd, s[0], s[0], 1.0f, loc);
      v.Binary(BinaryOp::kMul, s[0], s[0], x, loc);
      v.Scalar(ScalarOp::kMul, s[0], s[0], -kTwoSqrtTwoOverPi, loc);
      break;
    case Activation::kGelu: {
      const TileRef z = s[0], t = s[1], y = s[2];
      v.Unary(UnaryOp::kAbs, z, x, loc);
      v.Scalar(ScalarOp::kMul, z, z, kSqrtHalf, loc);
      v.Scalar(ScalarOp::kMul, t, z, 0.5f, loc);
      v.Scalar(ScalarOp::kAdd, t, t, 1.0f, loc);
      v.Fill(y, 1.0f, loc);
      v.Binary(BinaryOp::kDiv, t, y, t, loc);
      constexpr std::size_t kTerms = std::size(kErfcTerms);
      v.Fill(y, kErfcTerms[kTerms - 1], loc);
      for (std::size_t i = kTerms - 1; i-- > 0;) {
        v.Binary(BinaryOp::kMul, y, y, t, loc);
        v.Scalar(ScalarOp::kAdd, y, y, kErfcTerms[i], loc);
      }
      v.Binary(BinaryOp::kMul, z, z, z, loc);
      v.Binary(BinaryOp::kSub, y, y, z, loc);
      v.Unary(UnaryOp::kExp, y, y, loc);
      v.Binary(BinaryOp::kMul, y, y, t, loc);
      v.Scalar(ScalarOp::kMul, y, y, 0.5f, loc);
      v.Scalar(ScalarOp::kMul, t, y, -1.0f, loc);
      v.Scalar(ScalarOp::kAdd, t, t, 1.0f, loc);
      v.SelectLe(y, x, 0.0f, y, t, loc);
      v.Binary(BinaryOp::kMul, x, x, y, loc);
      return;
    }
  }
  v.Unary(UnaryOp::kExp, s[0], s[0], loc);
  v.Scalar(ScalarOp::kAdd, s[0], s[0], 1.0f, loc);
  v.Binary(BinaryOp::kDiv, x, x, s[0], loc);
}

// dst = activation(alpha * x + bias + beta * residual), rounded to the dtype of dst; bias (1, c) and residual (r, c) as far
// as they are given. x and, unless beta is 1, residual are lost.
template <class V>
void ExpandStoreActivated(V& v, const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc loc) {
  if (e.alpha != 1) v.Scalar(ScalarOp::kMul, t.x, t.x, e.alpha, loc);
  if (t.bias.given()) v.Binary(BinaryOp::kAdd, t.x, t.x, t.bias, loc);
  if (t.residual.given()) {
    if (e.beta != 1) v.Scalar(ScalarOp::kMul, t.residual, t.residual, e.beta, loc);
    v.Binary(BinaryOp::kAdd, t.x, t.x, t.residual, loc);
  }
  ExpandActivation(v, e.activation, t.x, t.scratch, loc);
  v.StoreUb(dst, t.x, loc);
}

// sum (1, 1) += the dot product of x and row, both (1, c), in fp32.
template <class V>
void ExpandAddDot(V& v, const TileRef& sum, const TileRef& scratch, const TileRef& x, const TileRef& row,
                  Loc loc) {
  v.Cast(scratch, row, loc);
  v.Binary(BinaryOp::kMul, scratch, scratch, x, loc);
  const TileRef product = scratch.Cols({0, 1});
  v.Reduce(ReduceOp::kSum, product, scratch, loc);
  v.Binary(BinaryOp::kAdd, sum, sum, product, loc);
}

// For each of the rows: sum += the dot product of x and row, and dst = weight * x, rounded to the dtype of dst, as far as
// they are given. s0 and s1 have the shape of x, and so has widened: x in fp32, made where `widens`, where x is not.
template <class V>
void ExpandStoreScaledDots(V& v, const TileRef& widened, const TileRef& s0, const TileRef& s1,
                           const TileRef& x, bool widens, std::span<const ScaledDotRef> dots, Loc loc) {
  const bool is_wide = x.dtype() == DType::kF32;
  const TileRef& wide = is_wide ? x : widened;
  if (widens && !is_wide) v.Cast(wide, x, loc);
  for (const ScaledDotRef& d : dots) {
    if (d.row.given()) ExpandAddDot(v, d.sum, s1, wide, d.row, loc);
    if (d.dst.tensor == nullptr) continue;
    v.Scalar(ScalarOp::kMul, s0, wide, d.weight, loc);
    v.StoreUb(d.dst, s0, loc);
  }
}

// Each of dsts = src, a row.
template <class V>
void ExpandStoreEach(V& v, std::span<const Gm> dsts, const TileRef& src, Loc loc) {
  for (const Gm& dst : dsts) v.StoreUb(dst, src, loc);
}

// Keys and values in descending order of keys 0, stable: runs, then runs four times as long as those before. Returns
// which tiles hold them.
template <class V>
std::size_t ExpandSort(V& v, const SortRefs& t, const TileRef& values, Loc loc) {
  v.Sort32(t.keys[1], t.values[1], t.keys[0], values, loc);
  std::size_t at = 1;
  for (std::int64_t run = kSortedRun; run < values.rows() * values.cols(); run *= kMergedRuns, at = 1 - at)
    v.MergeSort(t.keys[1 - at], t.values[1 - at], t.keys[at], t.values[at], run, loc);
  return at;
}

// Sorts ids by keys of -id, with their places as values, and finds where each bin's run begins: starts[b] = how many keys
// are above -b. All bins look for theirs at once, by halves of what is left: on a 910B a half takes 20 cycles for 64 bins and
// 110 at least, where the scalar unit takes 34 for every entry of a table. Returns which of the tiles hold the sorted.
template <class V>
std::size_t ExpandSortedRuns(V& v, const TileRef& ids, const SortRefs& t, Loc loc) {
  v.Cast(t.keys[0], ids, loc);
  v.Scalar(ScalarOp::kMul, t.keys[0], t.keys[0], -1.0f, loc);
  const std::size_t sorted = ExpandSort(v, t, t.places, loc);
  v.Fill(t.starts, -1.0f, loc);  // The last place of which it is known.
  for (std::int64_t left = ids.rows() * ids.cols(); left > 0; left /= 2) {
    v.Scalar(ScalarOp::kAdd, t.probes, t.starts, static_cast<float>((left + 1) / 2), loc);
    v.Cast(t.at, t.probes, loc);
    v.Gather(t.found, t.keys[sorted], t.at, loc);
    v.Binary(BinaryOp::kAdd, t.found, t.found, t.bins, loc);  // b - id
    v.SelectLe(t.starts, t.found, 0.0f, t.starts, t.probes, loc);
  }
  v.Scalar(ScalarOp::kAdd, t.starts, t.starts, 1.0f, loc);
  return sorted;
}

// counts[b] += starts[b + 1] - starts[b].
template <class V>
void ExpandAddRuns(V& v, const TileRef& counts, const SortRefs& t, Loc loc) {
  const Range bins{0, counts.cols()};
  const TileRef lengths = t.found.Cols(bins), at = t.at.Cols(bins);
  v.Scalar(ScalarOp::kAdd, t.probes, t.bins, 1.0f, loc);
  v.Cast(at, t.probes.Cols(bins), loc);
  v.Gather(lengths, t.starts, at, loc);
  v.Binary(BinaryOp::kSub, lengths, lengths, t.starts.Cols(bins), loc);
  v.Cast(at, lengths, loc);
  v.AddInt(counts, counts, at, loc);
}

// counts[id] += how often the id occurs.
template <class V>
void ExpandHistogramBySort(V& v, const TileRef& counts, const TileRef& ids, const SortRefs& t, Loc loc) {
  ExpandSortedRuns(v, ids, t, loc);
  ExpandAddRuns(v, counts, t, loc);
}

// Rank, row by row: rank = next[id]++, or -1 for ids below 0. Sorted by id, an id's routes have ranks in a row; sorted
// back by place, each knows where it stood: rank = next[id] - starts[id] + that place.
template <class V>
void ExpandRankBySort(V& v, const TileRef& ranks, const TileRef& next, const TileRef& ids, const SortRefs& t,
                      Loc loc) {
  const TileRef offsets = t.at.Cols({0, next.cols()});
  const std::size_t sorted = ExpandSortedRuns(v, ids, t, loc);
  v.Cast(t.keys[0], t.values[sorted], loc);
  v.Scalar(ScalarOp::kMul, t.keys[0], t.keys[0], -1.0f, loc);
  const std::size_t back = ExpandSort(v, t, t.places, loc);
  v.Scalar(ScalarOp::kMul, t.probes, t.starts, -1.0f, loc);
  v.Cast(t.at, t.probes, loc);
  v.AddInt(offsets, offsets, next, loc);
  v.Lookup(ranks, ids, offsets, 0, loc);
  v.AddInt(ranks, ranks, t.values[back], loc);
  v.AddScalarInt(t.values[1 - back], ids, 1, loc);
  v.KeepWhere(ranks, ranks, t.values[1 - back], loc);
  ExpandAddRuns(v, next, t, loc);
}

// Calls visit(element of the tile, place, row of staging) for every place in [0, limit). GM moves begin at whole
// blocks of UB, so elements pass through rows of `staging`, a block each, in turn.
template <class V, class Visit>
void ForEachPlace(V& v, const TileRef& places, const TileRef& staging, std::int64_t limit, Loc loc,
                  Visit visit) {
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < places.rows(); ++i) {
    for (std::int64_t j = 0; j < places.cols(); ++j) {
      const std::int64_t place = v.ReadInt(places.Rows({i, i + 1}), j, loc);
      if (place < 0 || place >= limit) continue;
      visit(i, j, place, staging.Rows({row, row + 1}).Cols({0, 1}));
      row = row + 1 == staging.rows() ? 0 : row + 1;
    }
  }
}

// dst(i, j) = column(places(i, j)), or 0 where there is no such row. staging is (r, 1 or more), any r: as many elements are
// on their way before the first of them is copied.
template <class V>
void ExpandGather(V& v, const TileRef& dst, const Gm& column, const TileRef& places, const TileRef& staging,
                  Loc loc) {
  struct Element {
    TileRef to, from;
  };
  std::deque<Element> coming;
  const auto copy = [&] {
    v.CopyElement(coming.front().to, coming.front().from, loc);
    coming.pop_front();
  };
  v.Fill(dst, 0.0f, loc);
  ForEachPlace(v, places, staging, column.rows, loc,
               [&](std::int64_t i, std::int64_t j, std::int64_t place, const TileRef& element) {
                 v.LoadUb(element, column.Rows({place, place + 1}), loc);
                 coming.push_back({dst.Rows({i, i + 1}).Cols({j, j + 1}), element});
                 if (static_cast<std::int64_t>(coming.size()) == staging.rows()) copy();
               });
  while (!coming.empty()) copy();
}

// column(places(i, j)) = src(i, j) where there is such a row.
template <class V>
void ExpandScatter(V& v, const Gm& column, const TileRef& places, const TileRef& src, const TileRef& staging,
                   Loc loc) {
  ForEachPlace(v, places, staging, column.rows, loc,
               [&](std::int64_t i, std::int64_t j, std::int64_t place, const TileRef& element) {
                 v.CopyElement(element, src.Rows({i, i + 1}).Cols({j, j + 1}), loc);
                 v.StoreUb(column.Rows({place, place + 1}), element, loc);
               });
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_COMPOSITES_H_
