// Matmul: C = op(A) op(B) + bias.
#ifndef CUBIST_KERNELS_MATMUL_H_
#define CUBIST_KERNELS_MATMUL_H_

#include "kernels/pack_operand.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// c(i, j) = sum over p of a(i, p) * b(p, j), plus bias(j) where given
//
//   a     (M, K), or (K, M) with transpose_a     fp32, bf16 or fp16
//   b     (K, N), or (N, K) with transpose_b     the dtype of a
//   bias  (N), optional                          fp32 or the dtype of a
//   c     (M, N)                                 fp32 or the dtype of a
//
// In place of a or b, packed_a or packed_b may be given (see PackOperand): one matrix, (M, K) or (K, N) as packed;
// transpose_a or transpose_b then has no meaning and must be false. The result has the same bits.
//
// With accumulate the product and the bias are added to what c holds, in one fp32 addition per element; c is fp32.
//
// Sums are fp32 in ascending p, in an order that depends on shape, dtype and SIMD target alone; one rounding
// to c's dtype. M, N, K >= 0; K = 0 gives the bias, or zero. Strides of a, b and bias are free (0 repeats,
// none negative); c's elements may not overlap each other, nor a, b or bias.
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
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
Status Matmul(const Device& device, const MatmulArgs& args, Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_H_
