#include "kernels/token_routes.h"

#include "kernels/token_permute_arguments.h"
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

}  // namespace cubist
