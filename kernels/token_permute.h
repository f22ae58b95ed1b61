// TokenPermute and TokenUnpermute (VectorSort), forward: MoE tokens to expert-sorted rows and back.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_H_

#include <cstdint>
#include <optional>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Which routes stay where an expert has more than its capacity: the first by position, or those of the highest
// probabilities (of equals the first; NaN and -inf are as low as the lowest number). Either way rows keep the order of the
// slots.
enum class CapacityKeeps : std::uint8_t { kFirst, kHighest };

// Slot s = t * K + j is token t's j-th route. Slots are ranked by expert, stably; the row of a slot is its rank, where
// the rows of an expert end before those of the next begin:
//   sorted_indices[s] = row of s, or -1;   permuted[row of s] = tokens[t];   permuted_probs[row of s] = probs(t, j)
//
//   tokens          (T, H)          fp32, bf16 or fp16
//   topk_ids        (T, K) or (T)   int32 or int64, each in [0, num_experts), or -1: a route to no expert
//   routing_map     (T, num_experts) instead of topk_ids: bool or uint8, where a token goes. K is top_k then, no row has
//                   more that are set, and slot (t, j) is the j-th of them, ascending; slots beyond them have no row
//   valid           (T)             optional, bool or uint8: a token that is not valid goes nowhere
//   probs           (T, K)          optional, any float dtype, together with permuted_probs; (T, num_experts) with a map
//   expert_places   (num_experts)   optional, int32, a permutation: the rows of expert e are the expert_places[e]-th in
//                   order (experts placed on devices otherwise than in order); counts and offsets are by place too
//   permuted        (M, H)          the dtype of tokens
//   sorted_indices  (T * K)         int32; a slot without a row has -1, or a row >= M that num_out_tokens cut off
//   permuted_probs  (M)             optional, any float dtype: in the order of rows, 0 in rows of no slot
//   row_tokens      (M)             optional, int32: the token of each row, -1 in rows of no slot
//   expert_counts   (num_experts)   optional, int32: slots routed to each expert, dropped ones included
//   expert_offsets  (num_experts + 1) optional, int32: the first row of each expert, and the end of the last
//   device_counts   (D)   optional, int32: slots routed to each of D devices, which hold num_experts / D experts each, in
//                   order: rows for one device stand together
//   node_counts     (N)   optional, int32, with device_counts: likewise of N nodes of D / N devices (hierarchical sort)
//   capacity        0, or how many rows every expert has: slots beyond it are dropped, as `capacity_keeps` says (probs
//                   are needed for kHighest), M = num_experts * capacity (drop and pad)
//   pad_with_tokens with a map and a capacity of at most T: rows beyond an expert's slots are the first tokens that do not
//                   go to it, those that are not valid among them, with their probs, and not zero
//                   (aclnnMoeTokenPermuteWithRoutingMap's drop_and_pad, whose indices are row_tokens). No slot has these
//                   rows: with row_tokens in place of sorted_indices TokenUnpermute and the gradients have them too
//   row_multiple    the rows of every expert are padded to a multiple of it
//   num_out_tokens  how many rows there are room for. With R = T * K, with padding R = T * K + min(T * K, num_experts) *
//                   (row_multiple - 1): M = R where num_out_tokens is 0, min(num_out_tokens, R) where positive, max(R +
//                   num_out_tokens, 0) where negative; rows from M on are dropped. Not with a capacity.
//   rows            optional: only rows [begin, end) of the global order arrive, at row - begin, and M = end - begin (expert
//                   parallelism); an empty range is empty, num_out_tokens is 0. sorted_indices stays global
//
// Movement only: rows arrive bit for bit, and rows of no slot are zero (padding, what -1 leaves over). Semantics of
// aclnnMoeTokenPermute, its WithEp and WithRoutingMap forms, and aclnnMoeInitRoutingV2's drop and pad; note that
// sorted_indices maps slot to row (the inverse of an argsort). Int32 counts: num_experts, T * K, R and the end of `rows` are
// below 2^31, with a capacity num_experts * capacity + T * K is. Any H, K, num_experts >= 0. Outputs may not overlap anything.
struct TokenPermuteArgs {
  ConstTensor tokens;
  ConstTensor topk_ids = {};
  ConstTensor routing_map = {};
  ConstTensor valid = {};
  ConstTensor probs = {};
  ConstTensor expert_places = {};
  std::int64_t top_k = 0;  // With a routing map alone.
  std::int64_t num_experts = 0;
  std::int64_t num_out_tokens = 0;
  std::int64_t capacity = 0;
  CapacityKeeps capacity_keeps = CapacityKeeps::kFirst;
  bool pad_with_tokens = false;
  std::int64_t row_multiple = 1;
  std::optional<Range> rows = {};
  Tensor permuted, sorted_indices;
  Tensor permuted_probs = {};
  Tensor expert_counts = {};
  Tensor expert_offsets = {};
  Tensor row_tokens = {};
  Tensor device_counts = {};
  Tensor node_counts = {};
};

// out[t] = residual[t] + residual2[t]
//          + sum over j of probs(t, j) * (permuted[sorted_indices[t * K + j]] + bias[topk_ids(t, j)]),
// in this order, j ascending, in fp32, rounded once
//
//   permuted        (M, H)    fp32, bf16 or fp16
//   sorted_indices  (T * K)   int32; an index of -1 or >= M is a dropped slot and adds nothing
//   probs           (T, K)    optional, any float dtype; absent means weight 1 and K = top_k. Rows of probability 0
//                             are not read, so that a NaN there stays there.
//   row_tokens      (M)       int32, in place of sorted_indices, as TokenPermute wrote them with this `capacity`:
//                       out[row_tokens[r]] += probs(row_tokens[r], r / capacity) * permuted[r], r ascending
//                   M = E * capacity, and probs are (T, E). A row of -1 adds nothing, an expert has at most one row of
//                   a token, and there is no routing_map and no bias
//   routing_map     (T, E)    optional, bool or uint8, with probs: they are (T, E) then, K = top_k, and slot (t, j) is the
//                   j-th expert that is set, ascending, as for TokenPermute
//   bias            (E, H)    optional, the dtype of permuted, together with topk_ids (T, K), int32 or int64: what an expert
//                             adds to each of its rows. A slot that adds no row adds no bias
//   residual        (T, H)    optional, the dtype of permuted: what the result is added to; residual2 likewise
//   out             (T, H)    the dtype of permuted; T is whatever tokens there were (restore shape)
//   rows            optional: the rows of permuted and of row_tokens are [begin, end) of the global order (expert
//                   parallelism), and slots of other rows add nothing; the results of all ranks add up to the whole.
//                   Absent: [0, M)
//
// Semantics of aclnnMoeTokenUnpermute, its WithEp and WithRoutingMap forms (padded with row_tokens), and of
// aclnnMoeFinalizeRoutingV2 (row-major indices, dropped slots without their bias); an empty range of rows is empty.
// With ranges of rows on several ranks the residuals are one rank's to give. Below 2^31 are T * K and the end of `rows`,
// with row_tokens T * E and E * capacity; for the gradients too. Any H, K >= 0. out may not overlap anything.
struct TokenUnpermuteArgs {
  ConstTensor permuted, sorted_indices = {};
  ConstTensor row_tokens = {};
  std::int64_t capacity = 0;  // With row_tokens alone.
  ConstTensor routing_map = {};
  ConstTensor probs = {};
  ConstTensor bias = {}, topk_ids = {};
  ConstTensor residual = {}, residual2 = {};
  std::int64_t top_k = 1;
  std::optional<Range> rows = {};
  Tensor out;
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status TokenPermute(const Device& device, const TokenPermuteArgs& args,
                                  Profile* profile = nullptr);
CUBIST_EXPORT Status TokenUnpermute(const Device& device, const TokenUnpermuteArgs& args,
                                    Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_H_
