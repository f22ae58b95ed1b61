// Composite instructions as primitive ones: the contract of each, and what the model records and prices for it.
// The host has one body per composite; tests run both and compare. `V` is a Vector executor (see VectorFront).
#ifndef CUBIST_NPU_MODEL_COMPOSITES_H_
#define CUBIST_NPU_MODEL_COMPOSITES_H_

#include <cstdint>
#include <span>

#include "npu_model/core.h"

namespace cubist {

// One step of the online softmax (Milakov and Gimelshein, 2018; FlashAttention-2,
// 2023) over a block of scores s (r, c):
//   m_new = max(m_old, rowmax(scale * s));  alpha = exp(m_old - m_new)
//   p = exp(scale * s - m_new), rounded to p's dtype;  l = l * alpha + rowsum(p before rounding)
// m_new, m_old, l are (r, 1). alpha takes m_old's place; s is lost. Masked scores are -inf; m starts at the
// lowest finite float, so that a row masked so far keeps p = 0 and l = 0 and no NaN arises.
template <class V>
void ExpandSoftmaxStep(V& v, TileRef p, TileRef s, TileRef m_new, TileRef m_old, TileRef l, float scale,
                       Loc loc) {
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

// acc = acc * factor + x, factor broadcast over the columns where it is (r, 1).
template <class V>
void ExpandMulAdd(V& v, TileRef acc, TileRef factor, TileRef x, Loc loc) {
  v.Binary(BinaryOp::kMul, acc, acc, factor, loc);
  v.Binary(BinaryOp::kAdd, acc, acc, x, loc);
}

// acc (+)= sum over i, ascending, of weights[i] * rows[i], in fp32. acc, scratch and every row are (1, c).
template <class V>
void ExpandWeightedSum(V& v, TileRef acc, TileRef scratch, std::span<const TileRef> rows,
                       std::span<const float> weights, Accumulate accumulate, Loc loc) {
  if (accumulate == Accumulate::kNo) v.Fill(acc, 0.0f, loc);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    v.Cast(scratch, rows[i], loc);
    v.Scalar(ScalarOp::kMul, scratch, scratch, weights[i], loc);
    v.Binary(BinaryOp::kAdd, acc, acc, scratch, loc);
  }
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_COMPOSITES_H_
