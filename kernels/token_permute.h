// TokenPermute and TokenUnpermute (VectorSort), forward: MoE tokens to expert-sorted rows and back.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_H_

#include <cstdint>
#include <optional>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Slot s = t * K + j is token t's j-th route. Slots are ranked by expert, stably; the row of a slot is its rank:
//   sorted_indices[s] = rank of s;   permuted[rank of s] = tokens[t]   for ranks below M
//
//   tokens          (T, H)          fp32, bf16 or fp16
//   topk_ids        (T, K) or (T)   int32 or int64, each in [0, num_experts)
//   permuted        (M, H)          the dtype of tokens. With L = T * K: M = L where num_out_tokens is 0,
//                                   min(num_out_tokens, L) where positive, max(L + num_out_tokens, 0) where negative
//   sorted_indices  (T * K)         int32; rows >= M were dropped
//   expert_counts   (num_experts)   optional, int32: slots routed to each expert, dropped ones included
//
// Movement only: rows arrive bit for bit. Semantics of aclnnMoeTokenPermute; note that sorted_indices maps slot
// to row (the inverse of an argsort). L < 2^31. Any H, K, num_experts >= 0 (K on an NPU as
// far as the ids of one token fit its UB). Outputs may not overlap anything.
struct TokenPermuteArgs {
  ConstTensor tokens, topk_ids;
  std::int64_t num_experts = 0;
  std::int64_t num_out_tokens = 0;
  Tensor permuted, sorted_indices;
  Tensor expert_counts = {};
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
