// TokenPermute and TokenUnpermute (VectorSort), forward: MoE tokens to expert-sorted rows and back.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_H_

#include <cstdint>
#include <optional>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Slot s = t * K + j is token t's j-th route. Slots are ranked by expert, stably; the row of a slot is its rank, where
// the rows of an expert end before those of the next begin:
//   sorted_indices[s] = row of s, or -1;   permuted[row of s] = tokens[t];   permuted_probs[row of s] = probs(t, j)
//
//   tokens          (T, H)          fp32, bf16 or fp16
//   topk_ids        (T, K) or (T)   int32 or int64, each in [0, num_experts), or -1: a route to no expert
//   probs           (T, K)          optional, any float dtype, together with permuted_probs
//   permuted        (M, H)          the dtype of tokens
//   sorted_indices  (T * K)         int32; a slot without a row has -1, or a row >= M that num_out_tokens cut off
//   permuted_probs  (M)             optional, any float dtype
//   expert_counts   (num_experts)   optional, int32: slots routed to each expert, dropped ones included
//   expert_offsets  (num_experts + 1) optional, int32: the first row of each expert, and the end of the last
//   capacity        0, or how many rows every expert has: slots beyond it, by position, are dropped, M = num_experts *
//                   capacity (drop and pad)
//   row_multiple    the rows of every expert are padded to a multiple of it
//   num_out_tokens  how many rows there are room for. With R = T * K, with padding R = T * K + min(T * K, num_experts) *
//                   (row_multiple - 1): M = R where num_out_tokens is 0, min(num_out_tokens, R) where positive, max(R +
//                   num_out_tokens, 0) where negative; rows from M on are dropped. Not with a capacity.
//   rows            optional: only rows [begin, end) of the global order arrive, at row - begin, and M = end - begin (expert
//                   parallelism); an empty range is empty, num_out_tokens is 0. sorted_indices stays global
//
// Movement only: rows arrive bit for bit, and rows of no slot are zero (padding, what -1 leaves over). Semantics of
// aclnnMoeTokenPermute, its WithEp form, and aclnnMoeInitRoutingV2's drop and pad; note that sorted_indices maps slot to
// row (the inverse of an argsort). T * K and all rows < 2^31. Any H, K, num_experts >= 0 (K on an NPU as far as the ids
// of one token fit its UB). Outputs may not overlap anything.
struct TokenPermuteArgs {
  ConstTensor tokens, topk_ids;
  ConstTensor probs = {};
  std::int64_t num_experts = 0;
  std::int64_t num_out_tokens = 0;
  std::int64_t capacity = 0;
  std::int64_t row_multiple = 1;
  std::optional<Range> rows = {};
  Tensor permuted, sorted_indices;
  Tensor permuted_probs = {};
  Tensor expert_counts = {};
  Tensor expert_offsets = {};
};

// out[t] = sum over j of probs(t, j) * permuted[sorted_indices[t * K + j]], j ascending, in fp32, rounded once
//
//   permuted        (M, H)    fp32, bf16 or fp16
//   sorted_indices  (T * K)   int32; an index of -1 or >= M is a dropped slot and adds nothing
//   probs           (T, K)    optional, any float dtype; absent means weight 1 and K = top_k. Rows of probability 0
//                             are not read, so that a NaN there stays there.
//   out             (T, H)    the dtype of permuted
//   rows            optional: the rows of permuted are [begin, end) of the global order (expert parallelism), and slots of
//                   other rows add nothing; the results of all ranks add up to the whole. Absent: [0, M)
//
// Semantics of aclnnMoeTokenUnpermute and its WithEp form; an empty range of rows is empty. Any H, K >= 0. out may
// not overlap anything.
struct TokenUnpermuteArgs {
  ConstTensor permuted, sorted_indices;
  ConstTensor probs = {};
  std::int64_t top_k = 1;
  std::optional<Range> rows = {};
  Tensor out;
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
Status TokenPermute(const Device& device, const TokenPermuteArgs& args, Profile* profile = nullptr);
Status TokenUnpermute(const Device& device, const TokenUnpermuteArgs& args, Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_H_
