// What the calls that take a routing map share: its check beside probabilities, and the phases between values by expert
// and values by slot. And the phases that make the rows of tokens of the tokens of rows.
#ifndef CUBIST_KERNELS_TOKEN_ROUTES_H_
#define CUBIST_KERNELS_TOKEN_ROUTES_H_

#include <cstdint>

#include "kernels/token_permute_arguments.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tiling/token_routes_tiling.h"

namespace cubist {

// A map (T, E) whose values by expert, (T, E) too, are given with it.
Status CheckMapOfProbs(const Argument& map, const Argument& values, Dim tokens, std::int64_t top_k);

class MapOfSlots {
 public:
  // The phase that reads the map: the experts of the slots, and, where given, values by expert as values by slot.
  Status Read(Launch& launch, const char* kernel, const ConstTensor& routing_map, std::int64_t tokens,
              std::int64_t top_k, const GmTensor* map_probs);
  // (T, K), of the map_probs; null without them.
  const GmTensor* slot_probs() const { return slot_probs_; }

  // Room for values by slot, and the phase that spreads them over the experts; other experts get 0.
  const GmTensor* SlotValues(Launch& launch);
  void Spread(Launch& launch, const GmTensor& slot_values, const GmTensor& map_values);

 private:
  TokenRoutesTiling tiling_;
  Gm ids_;
  const GmTensor* slot_probs_ = nullptr;
};

// The rows of slots (T, K), and the first of the global order that is here: sorted_indices as given; or the phases that
// make of row_tokens the rows of each token by expert, -1 where there is none.
Status ReadPlaces(Launch& launch, const Places& places, const Slots& slots, Gm* rows, std::int64_t* first);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_ROUTES_H_
