// Routes of MoE tokens before and after their movement, naively: maps, masks, placed experts, capacities by probability.
#ifndef CUBIST_REFERENCE_TOKEN_ROUTES_H_
#define CUBIST_REFERENCE_TOKEN_ROUTES_H_

#include <cstdint>
#include <vector>

#include "npu_model/types.h"
#include "reference/token_permute.h"

namespace cubist::reference {

// (T, K), by slot: the place of its expert, or -1; its probability, 0 for slots of no expert.
struct RouteSelection {
  std::int64_t top_k = 0;
  std::vector<std::int32_t> ids;
  std::vector<double> probs;
};

// topk_ids (T, K) or routing_map (T, E), the other not given; valid (T), expert_places (E), probs (T, K) or, with a map,
// (T, E), each or not given.
RouteSelection SelectRoutes(ConstTensor topk_ids, ConstTensor routing_map, ConstTensor valid,
                            ConstTensor expert_places, ConstTensor probs, std::int64_t top_k,
                            std::int64_t experts);

// Of every expert the `capacity` slots with the highest probabilities stay, of equals the first; others become -1.
void KeepHighest(std::int64_t experts, std::int64_t capacity, RouteSelection* routes);

// What a row of the result holds: a token with its probability, or nothing.
struct RowSource {
  std::int64_t token = -1;
  double prob = 0;
};

// Of every row. With a map, rows of an expert beyond its slots hold the first tokens that do not go to it.
std::vector<RowSource> RowSources(const PaddedRouting& routing, const RouteSelection& routes,
                                  ConstTensor pad_map, ConstTensor map_probs, std::int64_t capacity);

// Which token each of M rows is of, -1 for none; row r is one of expert (first_row + r) / capacity.
struct TokensOfRows {
  ConstTensor row_tokens;
  std::int64_t capacity = 0, first_row = 0;
};
// (T, H): residual, if given, and out[row_tokens[r]] += probs(that token, that expert) * permuted[r], weights 1 without
// probs.
UnpermuteResult UnpermuteByRow(ConstTensor permuted, const TokensOfRows& rows, ConstTensor probs,
                               std::int64_t tokens, ConstTensor residual = {});
// Its gradients; those of probs are (T, E), 0 where there is no row.
UnpermuteGradResult UnpermuteGradByRow(ConstTensor out_grad, ConstTensor permuted, const TokensOfRows& rows,
                                       ConstTensor probs, std::int64_t experts);
// (T, E): the value of each row, (M), at its token and expert, 0 elsewhere.
std::vector<double> SpreadByRow(ConstTensor values, const TokensOfRows& rows, std::int64_t tokens,
                                std::int64_t experts);

// Rows of chunks (n, e), rank-major, in expert-major order: the row that each comes from.
std::vector<std::int64_t> ExpertMajorRows(ConstTensor chunk_counts);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_TOKEN_ROUTES_H_
