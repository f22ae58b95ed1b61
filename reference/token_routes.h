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

// Rows of chunks (n, e), rank-major, in expert-major order: the row that each comes from.
std::vector<std::int64_t> ExpertMajorRows(ConstTensor chunk_counts);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_TOKEN_ROUTES_H_
