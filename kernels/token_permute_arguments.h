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

// Where the rows (M, H) of tokens are: sorted_indices say it by slot, or, where every expert has `capacity` rows,
// row_tokens by row. A token's slots are the experts then.
struct Places {
  Argument sorted_indices, row_tokens, routing_map;
  Argument rows;
  std::int64_t capacity = 0;
  std::optional<Range> window = {};

  bool by_row() const { return row_tokens.tensor.given(); }
  Range rows_here() const { return window.value_or(Range{0, rows.tensor.size(0)}); }
};
template <class Args>
Places PlacesOf(const char* kernel, const Args& args, const ConstTensor& rows, const char* rows_name) {
  return {.sorted_indices = {kernel, "sorted_indices", args.sorted_indices},
          .row_tokens = {kernel, "row_tokens", args.row_tokens},
          .routing_map = {kernel, "routing_map", args.routing_map},
          .rows = {kernel, rows_name, rows},
          .capacity = args.capacity,
          .window = args.rows};
}

// K of a call that has (T, K) `values` or none; those of a map stand by expert. With row_tokens it is the experts, those
// of the values or, without any, as many as have the rows up to the last one here.
std::int64_t SlotsPerToken(const Places& places, const ConstTensor& values, std::int64_t top_k);
Status CheckTopK(const char* kernel, std::int64_t top_k);

// The first element outside [least, limit), as an error.
Status CheckValues(const Argument& arg, std::int64_t least, std::int64_t limit);

// At most 2^31 - 1 slots.
Status CheckSlots(const Argument& arg, std::int64_t tokens, std::int64_t top_k);

// Rows [begin, end) of the global order, of which `rows` tensors hold that many.
Status CheckWindow(const char* kernel, const std::optional<Range>& window, const Argument& rows);

// A boolean map (T, E), no row of which has more than `top_k` set; its kernel reads it, so that it needs data.
Status CheckRoutingMap(const Argument& map, Dim tokens, Dim experts, std::int64_t top_k);

// What places need but their values: one of the two, its shape, dtype and data; with row_tokens rows as capacity says.
struct Slots {
  std::int64_t tokens = 0, top_k = 0;
};
Status CheckPlaces(const Places& places, const Slots& slots);
// Their values: rows or none; or tokens, each once for an expert, or -1. `missing`, where asked for, is how many of the
// rows are nobody's, and no row may belong to two slots then.
Status CheckValuesOf(const Places& places, const Slots& slots, std::int64_t* missing = nullptr);

// How many slots each of `experts` experts has, by ids (-1 passed over) or by a map.
std::vector<std::int64_t> SlotsOfExperts(const ConstTensor& topk_ids, const ConstTensor& routing_map,
                                         std::int64_t experts);

// No row of [first, first + rows) stands twice in the indices; `missing` is how many of them do not stand there at all.
Status CheckDistinctRows(const Argument& indices, std::int64_t first, std::int64_t rows,
                         std::int64_t* missing);

// bias (E, H), of the dtype of rows (M, H), and the expert ids of T tokens' K slots, both or none.
Status CheckBias(const Argument& bias, const Argument& topk_ids, const Places& places, const Slots& slots);
// A slot that has one of the M rows has an expert with a bias.
Status CheckIdsOfBias(const Argument& bias, const Argument& topk_ids, const Places& places,
                      const Slots& slots);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_ARGUMENTS_H_
