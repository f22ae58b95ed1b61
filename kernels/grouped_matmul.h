// GroupedMatmul: one product per group of rows (the experts of a Mixture-of-Experts layer), and its gradients.
#ifndef CUBIST_KERNELS_GROUPED_MATMUL_H_
#define CUBIST_KERNELS_GROUPED_MATMUL_H_

#include <cstdint>
#include <span>

#include "kernels/pack_operand.h"
#include "npu_model/device.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// What `groups` (E), int32 or int64, says. A group begins where the one before it ends, the first at row 0.
enum class GroupList : std::uint8_t {
  kCounts,  // how many rows each group has
  kEnds,    // the row after the last of each group: the cumulative sum of the counts
};

// For every group g and every row i of it
//   out(i, j) = activation(alpha * (sum over p of x(i, p) * w_g(p, j)) + bias(g, j) + beta * residual(i, j))
// as far as they are given, and out(i, j) = 0 in the rows after the last group.
//
//   x        (M, K)                                             fp32, bf16 or fp16
//   groups   (E), each >= 0, together <= M; ends not descending int32 or int64
//   weights  (E, K, N), or (E, N, K) with transpose_weights     the dtype of x
//   weight_list  in place of weights: E matrices (K, N), or (N, K), anywhere; those of empty groups need no data
//   packed_weights  in place of weights: E matrices (K, N) as PackOperand made them of Side::kB; the same bits come out.
//            transpose_weights has no meaning then and must be false.
//   bias     (E, N), optional                                   fp32, bf16 or fp16
//   residual (M, N), optional; may be out itself, the same view fp32, bf16 or fp16
//   out      (M, N)                                             fp32, bf16 or fp16
//
// With alpha = 0 x and the weights are not read, with beta = 0 residual is not: their shapes count, their data may be null or
// overlap out.
//
// Groups are read by the kernel from global memory: nothing waits for their sizes, and the tiling does not depend on
// them. Blocks of all groups form one list, dealt to the cores in runs of equal work; empty groups cost nothing.
// Sums are fp32 in ascending p, in an order that depends on N, K, dtype and SIMD target alone: each group is, bit for
// bit, what Matmul gives for its rows (on an NPU where that does not split K). Strides of the inputs are free; out's elements may
// not overlap each other, nor an input. M, N, K, E >= 0.
//
// CANN's aclnnGroupedMatmul with groupType 0, except that it leaves the rows after the last group unwritten.
struct GroupedMatmulArgs {
  ConstTensor x;
  ConstTensor groups;
  GroupList group_list = GroupList::kCounts;
  ConstTensor weights = {};
  std::span<const ConstTensor> weight_list = {};
  PackedOperand packed_weights = {};
  ConstTensor bias = {};
  Tensor out;
  bool transpose_weights = false;
  float alpha = 1, beta = 1;
  ConstTensor residual = {};
  Activation activation = Activation::kNone;
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled; groups
// are read there too, with or without data.
CUBIST_EXPORT Status GroupedMatmul(const Device& device, const GroupedMatmulArgs& args,
                                   Profile* profile = nullptr);

// The gradients of out with respect to x and to the weights, given dy = d out; either, or both in one launch:
//   dx(i, p)   = sum over j of dy(i, j) * w_g(p, j) for the rows i of group g; 0 in the rows after the last group
//   dw_g(p, j) = sum over the rows i of group g of x(i, p) * dy(i, j); 0 for an empty group
// With accumulate_dw the sum is added to dw_g in place, a "main gradient" that stays fp32; empty groups are not touched.
//
//   dy       (M, N)                                             fp32, bf16 or fp16
//   groups   as above
//   weights, weight_list, transpose_weights                     as above; for dx
//   packed_weights  in place of weights: E matrices (N, K), the transposes, as PackOperand made them of Side::kB
//   dx       (M, K), optional                                   fp32 or the dtype of dy
//   x        (M, K); for dw                                     the dtype of dy
//   dw       (E, K, N), or (E, N, K) with transpose_weights     fp32, or the dtype of dy unless accumulated
//   dw_list  in place of dw: E matrices
//
// dx is GroupedMatmul with the weights transposed. In dw the sum over a group's rows is fp32, rounded or added once; each
// group's is, bit for bit, what Matmul gives, as above. CANN's aclnnGroupedMatmul with groupType 2, and
// aclnnGroupedMatmulAdd.
struct GroupedMatmulGradArgs {
  ConstTensor dy;
  ConstTensor groups;
  GroupList group_list = GroupList::kCounts;
  ConstTensor weights = {};
  std::span<const ConstTensor> weight_list = {};
  PackedOperand packed_weights = {};
  Tensor dx = {};
  ConstTensor x = {};
  Tensor dw = {};
  std::span<const Tensor> dw_list = {};
  bool accumulate_dw = false;
  bool transpose_weights = false;
};

CUBIST_EXPORT Status GroupedMatmulGrad(const Device& device, const GroupedMatmulGradArgs& args,
                                       Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUPED_MATMUL_H_
