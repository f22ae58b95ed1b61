// Token permute and unpermute, naively: what the kernels' answers are measured against.
#ifndef CUBIST_REFERENCE_TOKEN_PERMUTE_H_
#define CUBIST_REFERENCE_TOKEN_PERMUTE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/types.h"

namespace cubist::reference {

// Where every slot goes. Slot s = t * K + j is token t's j-th route.
struct Routing {
  std::int64_t topk = 1;                  // K
  std::int64_t rows = 0;                  // M: rows that are kept
  std::vector<std::int64_t> slot_of_row;  // (T * K): slots sorted by expert, stably
  std::vector<std::int32_t>
      sorted_indices;  // (T * K): its inverse, the row of each slot; rows >= M were dropped
  std::vector<std::int32_t> expert_counts;  // (num_experts): slots of each expert, dropped ones included
};

// topk_ids (T, K), or (T) for K = 1. With L = T * K: M = L if num_out_tokens is 0, min(num_out_tokens, L) if
// it is positive, max(L + num_out_tokens, 0) if it is negative.
Routing Route(ConstTensor topk_ids, std::int64_t num_experts, std::int64_t num_out_tokens);

// The same with room for padding: every expert has `capacity` rows and drops what is beyond, or, where that is 0, as many
// as it has slots, rounded up to a multiple. A route of -1 goes nowhere.
struct PaddedRouting {
  std::vector<std::int64_t> slot_of_row;     // -1: padding
  std::vector<std::int32_t> sorted_indices;  // (T * K): -1 for slots without a row
  std::vector<std::int32_t> expert_counts;   // slots of each expert, dropped ones included
  std::vector<std::int32_t> expert_offsets;  // (num_experts + 1)
};
PaddedRouting RoutePadded(ConstTensor topk_ids, std::int64_t num_experts, std::int64_t capacity,
                          std::int64_t row_multiple);

// permuted[r] = tokens[slot_of_row[r] / K] for the given rows r: row-major (rows, H) of tokens (T, H).
std::vector<double> Permute(ConstTensor tokens, const Routing& routing, std::span<const std::int64_t> rows);

// Every row that is kept: (M, H).
std::vector<double> Permute(ConstTensor tokens, const Routing& routing);

// Row-major (tokens, H).
struct UnpermuteResult {
  std::vector<double> out;
  std::vector<double> magnitude;  // sum over j of |probs(t, j)| * |row|, which error bounds are made of
};

// What else goes into a token: a bias (E, H) of the expert ids (T, K) for every row that is added, and residuals (T, H). Each
// may be not given.
struct Additions {
  ConstTensor bias, topk_ids, residual, residual2;
};

// out[t] = sum over j of probs(t, j) * permuted[sorted_indices[t * K + j]], and the additions, in double, for the given
// tokens t.
//   permuted (M, H), sorted_indices (T * K), probs (T, K) or not given: then K = top_k and the weight is 1
// Row 0 of permuted is row first_row of the global order; an index of no row adds nothing, and a row of probability 0
// is not read. With weights of 1 this is the gradient of Permute as well.
UnpermuteResult Unpermute(ConstTensor permuted, ConstTensor sorted_indices, ConstTensor probs,
                          std::span<const std::int64_t> tokens, std::int64_t top_k = 1,
                          std::int64_t first_row = 0, const Additions& more = {});

// Every token: (T, H).
UnpermuteResult Unpermute(ConstTensor permuted, ConstTensor sorted_indices, ConstTensor probs,
                          std::int64_t top_k = 1, std::int64_t first_row = 0, const Additions& more = {});

// How far each element of a kernel's out may be from the reference's; see WeightedSumBound in bounds.h.
// Without probs and with top_k = 1 rows only move, and the bound is 0.
std::vector<double> UnpermuteBounds(const UnpermuteResult& result, ConstTensor probs, DType output,
                                    std::int64_t top_k = 1);

// values[row of slot (t, j)], 0 for slots of no row: (T * K). values is (M).
std::vector<double> GatherBySlot(ConstTensor values, ConstTensor sorted_indices, std::int64_t first_row = 0);

// Gradients of Unpermute.
struct UnpermuteGradResult {
  std::vector<double> permuted_grad;  // (M, H): probs(t, j) * out_grad[t] in the row of slot (t, j), else 0
  // (T, K): out_grad[t] . (permuted[row of slot (t, j)] + its bias), 0 without a row
  std::vector<double> probs_grad;
  std::vector<double> probs_grad_magnitude;  // The same of absolute values.
};
// permuted may be not given: then there is no probs_grad. `rows` is M.
UnpermuteGradResult UnpermuteGrad(ConstTensor out_grad, ConstTensor permuted, ConstTensor sorted_indices,
                                  ConstTensor probs, std::int64_t rows, std::int64_t top_k = 1,
                                  std::int64_t first_row = 0, const Additions& more = {});

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_TOKEN_PERMUTE_H_
