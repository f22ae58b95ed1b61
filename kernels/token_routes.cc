#include "kernels/token_routes.h"

#include "kernels/token_rank_kernel.h"
#include "kernels/token_routes_kernel.h"

namespace cubist {

Status CheckMapOfProbs(const Argument& map, const Argument& values, Dim tokens, std::int64_t top_k) {
  CUBIST_RETURN_IF_ERROR(CheckRoutingMap(map, tokens, {"E"}, top_k));
  return CheckShape(values, {tokens, {"E, of routing_map", map.tensor.size(1)}});
}

Status MapOfSlots::Read(Launch& launch, const char* kernel, const ConstTensor& routing_map,
                        std::int64_t tokens, std::int64_t top_k, const GmTensor* map_probs) {
  const TokenRoutesShape shape{.tokens = tokens, .top_k = top_k, .map_cols = routing_map.size(1)};
  CUBIST_RETURN_IF_ERROR(ChooseRoutes(launch.chip(), kernel, shape, &tiling_));
  TokenRoutesOperands routes;
  routes.routing_map = launch.Input("routing_map", routing_map);
  routes.ids = ids_ = MatrixOf(*launch.Workspace("expert_ids", DType::kI32, {tokens, top_k}));
  if (map_probs != nullptr) {
    routes.map_probs = map_probs;
    routes.slot_probs = slot_probs_ = launch.Workspace("slot_probs", DType::kF32, {tokens, top_k});
  }
  launch.OnVectorCores(tiling_.chunks, [&](auto& core) { SelectRoutesKernel(core, routes, tiling_); });
  return {};
}

const GmTensor* MapOfSlots::SlotValues(Launch& launch) {
  return launch.Workspace("slot_values", DType::kF32, {ids_.rows, ids_.cols});
}

void MapOfSlots::Spread(Launch& launch, const GmTensor& slot_values, const GmTensor& map_values) {
  launch.OnVectorCores(tiling_.chunks, [&](auto& core) {
    SpreadSlotsKernel(core, ids_, MatrixOf(slot_values), MatrixOf(map_values), tiling_);
  });
}

Status ReadPlaces(Launch& launch, const Places& places, const Slots& slots, Gm* rows, std::int64_t* first) {
  *first = places.rows_here().begin;
  if (!places.by_row()) {
    const ConstTensor by_slot = AsSlots(places.sorted_indices.tensor, slots.tokens, slots.top_k);
    *rows = MatrixOf(*launch.Input("sorted_indices", by_slot));
    return {};
  }
  TokenRoutesTiling t;
  CUBIST_RETURN_IF_ERROR(ChooseRoutes(launch.chip(), places.rows.kernel, {.tokens = slots.tokens}, &t));
  const Gm row_tokens = MatrixOf(*launch.Input("row_tokens", AsColumn(places.row_tokens.tensor)));
  *rows = MatrixOf(*launch.Workspace("rows_by_expert", DType::kI32, {slots.tokens, slots.top_k}));
  launch.OnVectorCores(t.chunks, [&](auto& core) { FillNoneKernel(core, MatrixAsColumn(*rows), t); });
  launch.OnVectorCores(t.chunks, [&, first_row = *first](auto& core) {
    RowsByExpertKernel(core, row_tokens, *rows, places.capacity, first_row, t);
  });
  *first = 0;  // They are those of the tensor.
  return {};
}

}  // namespace cubist
