// Matmul: C = activation(alpha op(A) op(B) + bias + beta R), alone or in batches.
#ifndef CUBIST_KERNELS_MATMUL_H_
#define CUBIST_KERNELS_MATMUL_H_

#include "kernels/pack_operand.h"
#include "npu_model/device.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// c(i, j) = activation(alpha * (sum over p of a(i, p) * b(p, j)) + bias(j) + beta * residual(i, j))
//
//   a         (.., M, K), or (.., K, M) with transpose_a     fp32, bf16 or fp16
//   b         (.., K, N), or (.., N, K) with transpose_b     the dtype of a
//   bias      (N), optional                                  fp32, bf16 or fp16
//   residual  (.., M, N), optional                           fp32, bf16 or fp16
//   c         (.., M, N)                                     fp32, bf16 or fp16
//
// Up to four dimensions in front make a batch: c has its sizes; those of a, b and residual are c's, or 1, or missing,
// and such an operand serves all of them (as does one with a stride of 0).
//
// a of one dimension, (K), is a row, and b a column; c and residual then have no dimension for it: (.., N) or (.., M), and
// (1) for two vectors. Vectors are not transposed.
//
// In place of a or b, packed_a or packed_b may be given (see PackOperand): one matrix, or one per product of the batch,
// (M, K) or (K, N) as packed; transpose_a or transpose_b then has no meaning and must be false. The result has the same
// bits.
//
// residual may be c itself, the same view (dimensions of one element may be missing in front): BLAS's beta * c. With
// alpha = 0 a and b are not read, packed or not: their shapes count, their data may be null or overlap c; the same goes for
// residual with beta = 0. With accumulate the result is added to what c holds, in one fp32 addition per element; c is fp32,
// and there is neither residual nor activation.
//
// Sums are fp32 in ascending p, in an order that depends on shape, dtype and SIMD target alone (where M N is small
// against K, parts of the sum are added up in ascending order, of the rows of the whole batch where b is one matrix, and not
// one repeated by a stride of 0); the epilogue is fp32, with one rounding to c's dtype.
// M, N, K >= 0; K = 0 is an empty sum. Strides are free (of inputs 0 repeats, negative ones step down); c's elements may
// not overlap each other, nor an input.
struct MatmulArgs {
  ConstTensor a = {}, b = {};
  ConstTensor bias = {};
  Tensor c = {};
  bool transpose_a = false, transpose_b = false;
  PackedOperand packed_a = {}, packed_b = {};
  bool accumulate = false;
  // Blocks of C may begin anywhere along k (K-staggering, on chips that gain by it): an order of sums that depends on
  // the tiling, and so bits that differ from those of packed operands or of other shapes.
  bool any_order = false;
  float alpha = 1, beta = 1;
  ConstTensor residual = {};
  Activation activation = Activation::kNone;
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status Matmul(const Device& device, const MatmulArgs& args, Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_H_
