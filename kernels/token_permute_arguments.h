// What the calls that move MoE tokens share: how their arguments are read and checked.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_ARGUMENTS_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_ARGUMENTS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/rowwise.h"
#include "kernels/validate.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// (T) as (T, 1).
ConstTensor AsMatrix(ConstTensor t);

// (T * K) as (T, K).
template <class AnyTensor>
AnyTensor AsSlots(AnyTensor t, std::int64_t tokens, std::int64_t top_k) {
  if (!t.given()) return t;
  const std::int64_t stride = tokens * top_k > 1 ? t.strides[0] : 1;  // Of one element it may be anything.
  t.rank = 2;
  t.sizes = {tokens, top_k}, t.strides = {top_k * stride, stride};
  return t;
}

// K of a call that has (T, K) probabilities or none; those of a map stand by expert.
template <class Args>
std::int64_t SlotsPerToken(const Args& args) {
  return args.probs.given() && !args.routing_map.given() ? args.probs.size(1) : args.top_k;
}
Status CheckTopK(const char* kernel, std::int64_t top_k);

// The first element outside [least, limit), as an error.
Status CheckValues(const Argument& arg, std::int64_t least, std::int64_t limit);

// At most 2^31 - 1 slots.
Status CheckSlots(const Argument& arg, std::int64_t tokens, std::int64_t top_k);

// Rows [begin, end) of the global order, of which `rows` tensors hold that many.
Status CheckWindow(const char* kernel, const std::optional<Range>& window, const Argument& rows);

// A boolean map (T, E), no row of which has more than `top_k` set; its kernel reads it, so that it needs data.
Status CheckRoutingMap(const Argument& map, Dim tokens, Dim experts, std::int64_t top_k);

// How many slots each of `experts` experts has, by ids (-1 passed over) or by a map.
std::vector<std::int64_t> SlotsOfExperts(const ConstTensor& topk_ids, const ConstTensor& routing_map,
                                         std::int64_t experts);

// No row of [first, first + rows) stands twice in the indices; `missing` is how many of them do not stand there at all.
Status CheckDistinctRows(const Argument& indices, std::int64_t first, std::int64_t rows,
                         std::int64_t* missing);

// bias (E, H), of the dtype of rows (M, H), and the expert ids of T tokens' K slots, both or none: a slot that has one of
// the M rows, from first_row on, has an expert with a bias.
struct Slots {
  std::int64_t tokens = 0, top_k = 0;
};
Status CheckBias(const Argument& bias, const Argument& topk_ids, const Argument& rows,
                 const Argument& sorted_indices, std::int64_t first_row, const Slots& slots);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_ARGUMENTS_H_
