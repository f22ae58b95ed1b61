#include "kernels/token_permute.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/token_permute_kernel.h"
#include "kernels/token_rank_kernel.h"
#include "kernels/token_routes.h"
#include "kernels/token_routes_kernel.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kPermute = "token_permute";
constexpr const char* kUnpermute = "token_unpermute";

// Rows of the result, M; each argument is valid by itself.
std::int64_t RowsOut(const TokenPermuteArgs& args, std::int64_t slots) {
  if (args.rows.has_value()) return args.rows->size();
  if (args.capacity > 0) return args.num_experts * args.capacity;
  const std::int64_t all = slots + std::min(slots, args.num_experts) * (args.row_multiple - 1);
  const std::int64_t wanted = args.num_out_tokens;
  return wanted > 0 ? std::min(wanted, all) : std::max<std::int64_t>(all + wanted, 0);
}

// The numbers of a call, for `slots` slots: what is asked for, and that all rows can be counted.
Status CheckNumbers(const TokenPermuteArgs& args, std::int64_t slots) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (args.num_experts < 0 || args.num_experts > kMost)
    return OptionError(kPermute, "num_experts", args.num_experts, "0 to 2^31 - 1");
  if (args.capacity < 0 || args.capacity > kMost)
    return OptionError(kPermute, "capacity", args.capacity, "0 to 2^31 - 1");
  if (args.row_multiple < 1 || args.row_multiple > kMost)
    return OptionError(kPermute, "row_multiple", args.row_multiple, "1 to 2^31 - 1");
  if (args.capacity > 0 && args.row_multiple > 1)
    return OptionError(kPermute, "row_multiple", args.row_multiple, "1 where there is a capacity");
  if (args.num_out_tokens != 0 && (args.capacity > 0 || args.rows.has_value()))
    return OptionError(kPermute, "num_out_tokens", args.num_out_tokens, "0 where capacity or rows say it");
  std::int64_t rows = 0;
  const bool overflows = args.capacity > 0 ? __builtin_mul_overflow(args.num_experts, args.capacity, &rows)
                                           : __builtin_mul_overflow(std::min(slots, args.num_experts),
                                                                    args.row_multiple - 1, &rows);
  if (overflows || rows > kMost - slots) {
    return InvalidArgument(std::string(kPermute) + ": capacity " + std::to_string(args.capacity) +
                           " and row_multiple " + std::to_string(args.row_multiple) +
                           " make more than 2^31 - 1 rows and slots");
  }
  return {};
}

// K of a call.
std::int64_t TopKOf(const TokenPermuteArgs& args) {
  return args.routing_map.given() ? args.top_k : AsMatrix(args.topk_ids).size(1);
}

// Where the routes stand: expert ids or a map, and what goes with them.
Status CheckRoutes(const TokenPermuteArgs& args) {
  const Argument ids{kPermute, "topk_ids", args.topk_ids}, map{kPermute, "routing_map", args.routing_map},
      valid{kPermute, "valid", args.valid}, places{kPermute, "expert_places", args.expert_places};
  const Dim tokens{"T, of tokens", args.tokens.size(0)}, experts{"num_experts", args.num_experts};
  if (map.tensor.given()) {
    if (ids.tensor.given()) return map.Error("and topk_ids are both given, needs one of them");
    CUBIST_RETURN_IF_ERROR(CheckRoutingMap(map, tokens, experts, args.top_k));
  } else if (args.topk_ids.rank == 1) {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {tokens}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {tokens, {"K"}}));
  }
  if (valid.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(valid, {tokens}));
    CUBIST_RETURN_IF_ERROR(CheckDType(valid, {DType::kBool}));
    CUBIST_RETURN_IF_ERROR(CheckStorage(valid, /*needs_data=*/true));
  }
  if (places.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(places, {experts}));
    CUBIST_RETURN_IF_ERROR(CheckDType(places, {DType::kI32}));
    CUBIST_RETURN_IF_ERROR(CheckStorage(places, /*needs_data=*/true));
    CUBIST_RETURN_IF_ERROR(CheckValues(places, 0, args.num_experts));
    std::int64_t missing = 0;
    CUBIST_RETURN_IF_ERROR(CheckDistinctRows(places, 0, args.num_experts, &missing));
  }
  return {};
}

// What a capacity asks for besides its number.
Status CheckCapacity(const TokenPermuteArgs& args) {
  CUBIST_RETURN_IF_ERROR(
      CheckChoice(kPermute, "capacity_keeps", args.capacity_keeps, CapacityKeeps::kHighest));
  if (args.capacity_keeps == CapacityKeeps::kHighest) {
    if (args.capacity == 0)
      return OptionError(kPermute, "capacity", args.capacity, "1 or more to keep the highest probabilities");
    if (!args.probs.given())
      return InvalidArgument(std::string(kPermute) + ": probs are not given, a capacity keeps the highest");
  }
  if (!args.pad_with_tokens) return {};
  if (!args.routing_map.given() || args.expert_places.given())
    return InvalidArgument(std::string(kPermute) +
                           ": pad_with_tokens needs a routing_map and no expert_places");
  if (args.capacity == 0 || args.capacity > args.tokens.size(0)) {
    return OptionError(kPermute, "capacity", args.capacity,
                       "1 to T = " + std::to_string(args.tokens.size(0)) + " with pad_with_tokens");
  }
  return {};
}

// The counts of groups: `parts` of `of`, which has `all` elements, equal in size.
Status CheckParts(const Argument& parts, const char* of, std::int64_t all) {
  CUBIST_RETURN_IF_ERROR(CheckShape(parts, {{"parts"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(parts, {DType::kI32}));
  const std::int64_t count = parts.tensor.size(0);
  if (count >= 1 && all % count == 0) return {};
  return parts.Error("has size " + std::to_string(count) + ", needs a divisor of " + std::to_string(all) +
                     ", " + of);
}

Status Validate(const Device& device, const TokenPermuteArgs& args) {
  const Argument tokens{kPermute, "tokens", args.tokens}, ids{kPermute, "topk_ids", args.topk_ids},
      probs{kPermute, "probs", args.probs};
  const Argument permuted{kPermute, "permuted", args.permuted},
      sorted{kPermute, "sorted_indices", args.sorted_indices},
      row_probs{kPermute, "permuted_probs", args.permuted_probs};
  const Argument counts{kPermute, "expert_counts", args.expert_counts},
      offsets{kPermute, "expert_offsets", args.expert_offsets};
  const Argument map{kPermute, "routing_map", args.routing_map}, valid{kPermute, "valid", args.valid},
      places{kPermute, "expert_places", args.expert_places},
      row_tokens{kPermute, "row_tokens", args.row_tokens},
      devices{kPermute, "device_counts", args.device_counts},
      nodes{kPermute, "node_counts", args.node_counts};
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"T"}, {"H"}}));
  const std::int64_t t = args.tokens.size(0), h = args.tokens.size(1);
  CUBIST_RETURN_IF_ERROR(CheckRoutes(args));
  const std::int64_t k = TopKOf(args);
  CUBIST_RETURN_IF_ERROR(CheckSlots(map.tensor.given() ? map : ids, t, k));
  CUBIST_RETURN_IF_ERROR(CheckNumbers(args, t * k));
  CUBIST_RETURN_IF_ERROR(CheckCapacity(args));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kPermute, args.rows, permuted));
  const std::int64_t m = RowsOut(args, t * k);
  CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"rows out", m}, {"H, of tokens", h}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, kFloatTypes));
  if (ids.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(ids, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {args.tokens.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (probs.tensor.given() || row_probs.tensor.given()) {
    const Dim slots = map.tensor.given() ? Dim{"num_experts", args.num_experts} : Dim{"K, of topk_ids", k};
    CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of tokens", t}, slots}));
    CUBIST_RETURN_IF_ERROR(CheckDType(probs, kFloatTypes));
    if (row_probs.tensor.given() || args.capacity_keeps == CapacityKeeps::kFirst) {
      CUBIST_RETURN_IF_ERROR(CheckShape(row_probs, {{"M, of permuted", m}}));
      CUBIST_RETURN_IF_ERROR(CheckDType(row_probs, kFloatTypes));
    }
  }
  if (counts.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(counts, {{"num_experts", args.num_experts}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(counts, {DType::kI32}));
  }
  if (offsets.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(offsets, {{"num_experts + 1", args.num_experts + 1}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(offsets, {DType::kI32}));
  }
  if (row_tokens.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(row_tokens, {{"M, of permuted", m}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(row_tokens, {DType::kI32}));
  }
  if (devices.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckParts(devices, "num_experts", args.num_experts));
  if (nodes.tensor.given()) {
    if (!devices.tensor.given()) return nodes.Error("is given without device_counts");
    CUBIST_RETURN_IF_ERROR(CheckParts(nodes, "the size of device_counts", args.device_counts.size(0)));
  }
  if (ids.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckStorage(ids, /*needs_data=*/true));
  CUBIST_RETURN_IF_ERROR(
      CheckTensors(device, {&tokens, &ids, &map, &valid, &probs, &places},
                   {&permuted, &sorted, &row_probs, &counts, &offsets, &row_tokens, &devices, &nodes}));
  return ids.tensor.given() ? CheckValues(ids, -1, args.num_experts) : Status();
}

// The phases before the movement that turn routes into expert ids, and leave them in g.
void SelectRoutes(Launch& launch, const TokenPermuteArgs& args, const TokenRoutesTiling& t,
                  TokenPermuteOperands* g) {
  const std::int64_t tokens = args.tokens.size(0), top_k = TopKOf(args);
  TokenRoutesOperands routes;
  routes.topk_ids = launch.Input("topk_ids", AsMatrix(args.topk_ids));
  routes.routing_map = launch.Input("routing_map", args.routing_map);
  routes.valid = launch.Input("valid", AsColumn(args.valid));
  routes.expert_places = launch.Input("expert_places", args.expert_places);
  routes.ids = MatrixOf(*launch.Workspace("expert_ids", DType::kI32, {tokens, top_k}));
  if (args.routing_map.given() && args.probs.given()) {
    routes.map_probs = g->probs;
    routes.slot_probs = launch.Workspace("slot_probs", DType::kF32, {tokens, top_k});
    g->probs = routes.slot_probs;
  }
  launch.OnVectorCores(t.chunks, [&](auto& core) { SelectRoutesKernel(core, routes, t); });
  g->topk_ids = routes.ids;
}

// The phases that leave in chunk_sums or chunk_counts how many ids fall into each bin.
void CountRoutes(Launch& launch, const Gm& ids, const IdBins& bins, const TokenPermuteOperands& g,
                 const TokenPermuteTiling& t) {
  launch.OnVectorCores(t.chunks, [&](auto& core) { CountKernel(core, ids, g.chunk_counts, bins, t); });
  if (!t.sums_chunks) return;
  launch.OnVectorCores(CeilDiv(g.chunk_counts.cols, kSummedBins),
                       [&](auto& core) { ScanChunksKernel(core, g.chunk_counts, g.chunk_sums); });
}

// The phases of a radix sort; slots get their ranks, which are their rows where no expert is padded.
OrderedRoutes SortRoutes(Launch& launch, const TokenPermuteOperands& g, const TokenPermuteTiling& t) {
  const std::int64_t tokens = g.topk_ids.rows, top_k = g.topk_ids.cols, slots = tokens * top_k;
  const auto column = [&](const char* name) {
    return MatrixOf(*launch.Workspace(name, DType::kI32, {slots, 1}));
  };
  OrderedRoutes from{column("sorted_ids_0"), column("sorted_slots_0")},
      to{column("sorted_ids_1"), column("sorted_slots_1")};
  const Gm slot_rows = MatrixAsColumn(g.sorted_indices);
  const int passes = t.Passes(g.experts);
  for (int pass = 0; pass < passes; ++pass) {
    RadixPassOperands p;
    const Gm from_slots = ColumnAsMatrix(from.slots, tokens, top_k);
    p.ids = pass == 0 ? g.topk_ids : ColumnAsMatrix(from.ids, tokens, top_k);
    p.slots = pass == 0 ? nullptr : &from_slots;
    p.sorted = to, p.chunk_sums = g.chunk_sums;
    p.slot_rows = pass + 1 == passes ? &slot_rows : nullptr;
    p.digit = {.shift = pass * t.digit_bits, .bits = t.digit_bits};
    CountRoutes(launch, p.ids, p.digit, g, t);
    launch.OnVectorCores(t.chunks, [&](auto& core) { RadixPassKernel(core, p, t); });
    std::swap(from, to);
  }
  return from;
}

// All phases from expert ids to rows.
template <class T>
void RankAndMove(Launch& launch, const TokenPermuteOperands& g, const TokenPermuteTiling& t) {
  if (t.digit_bits == 0) {
    CountRoutes(launch, g.topk_ids, {}, g, t);
    launch.OnVectorCores(t.chunks, [&](auto& core) { RankAndMoveKernel<T>(core, g, t); });
    return;
  }
  ExpertRangesOperands r;
  r.routes = SortRoutes(launch, g, t);
  const std::int64_t ranges = CeilDiv(g.experts, t.range_experts);
  if (g.pads() || g.expert_counts != nullptr || g.expert_offsets != nullptr) {
    r.expert_counts =
        MatrixOf(g.expert_counts != nullptr ? *g.expert_counts
                                            : *launch.Workspace("range_counts", DType::kI32, {1, g.experts}));
    if (g.pads()) r.range_rows = MatrixOf(*launch.Workspace("range_rows", DType::kI32, {1, ranges}));
    launch.OnVectorCores(ranges, [&](auto& core) { CountRangesKernel(core, g, r, t); });
  }
  if (g.pads()) launch.OnVectorCores(ranges, [&](auto& core) { PlaceRoutesKernel(core, g, r, t); });
  launch.OnVectorCores(t.chunks, [&](auto& core) { MoveKernel<T>(core, g, r, t); });
}

// The phases that leave in g the routes which a capacity keeps by probability: all are ranked without one, and what moves
// with them is their probabilities alone.
template <class T>
void KeepHighest(Launch& launch, const TokenPermuteTiling& tiling, const TokenRoutesTiling& t,
                 TokenPermuteOperands* g) {
  const std::int64_t tokens = g->topk_ids.rows, top_k = g->topk_ids.cols, slots = tokens * top_k;
  TokenPermuteOperands ranked = *g;
  ranked.tokens = g->tokens.Cols({0, 0});
  ranked.permuted = g->permuted.Cols({0, 0}), ranked.permuted.rows = slots;
  ranked.capacity = 0, ranked.first_row = 0;
  ranked.sorted_indices = MatrixOf(*launch.Workspace("ranks", DType::kI32, {tokens, top_k}));
  ranked.permuted_probs = launch.Workspace("row_probs", DType::kF32, {slots, 1});
  ranked.expert_offsets = launch.Workspace("offsets", DType::kI32, {1, g->experts + 1});

  HighestRoutesOperands h;
  h.ranks = ranked.sorted_indices, h.row_probs = MatrixOf(*ranked.permuted_probs);
  h.offsets = MatrixOf(*ranked.expert_offsets);
  h.kept = MatrixOf(*launch.Workspace("kept", DType::kF32, {slots, 1}));
  h.kept_ids = MatrixOf(*launch.Workspace("kept_ids", DType::kI32, {tokens, top_k}));
  h.experts = g->experts, h.capacity = g->capacity;
  RankAndMove<T>(launch, ranked, tiling);
  launch.OnVectorCores(g->experts, [&](auto& core) { KeepHighestKernel(core, h, t); });
  launch.OnVectorCores(t.chunks, [&](auto& core) { DropLowestKernel(core, h, ranked.topk_ids, t); });
  g->topk_ids = h.kept_ids;
  g->expert_counts = nullptr;  // Written: the routes that were dropped count.
}

// Counts of groups of experts.
struct GroupCounts {
  const GmTensor *devices = nullptr, *nodes = nullptr;
};

// The phases after the movement.
template <class T>
void Annotate(Launch& launch, const TokenPermuteArgs& args, const TokenPermuteOperands& g,
              const GmTensor* map_probs, const GmTensor* expert_counts, const GroupCounts& wanted,
              const TokenRoutesTiling& t) {
  if (args.pad_with_tokens) {
    PadWithTokensOperands pad;
    pad.tokens = g.tokens, pad.permuted = g.permuted;
    pad.routing_map = MatrixOf(*launch.Input("routing_map", args.routing_map));
    pad.valid = launch.Input("valid", AsColumn(args.valid));
    pad.expert_counts = MatrixOf(*expert_counts);
    pad.map_probs = map_probs, pad.permuted_probs = g.permuted_probs, pad.row_tokens = g.row_tokens;
    pad.capacity = g.capacity, pad.first_row = g.first_row;
    launch.OnVectorCores(g.experts, [&](auto& core) { PadWithTokensKernel<T>(core, pad, t); });
  }
  if (wanted.devices == nullptr) return;
  launch.OnVectorCores(1, [&](auto& core) {
    SumPartsKernel(core, MatrixOf(*expert_counts), MatrixOf(*wanted.devices), t);
    if (wanted.nodes != nullptr) SumPartsKernel(core, MatrixOf(*wanted.devices), MatrixOf(*wanted.nodes), t);
  });
}

template <class T>
Status Run(const Device& device, const TokenPermuteArgs& args, Profile* profile) {
  Launch launch(device, kPermute);
  const bool selects = args.routing_map.given() || args.valid.given() || args.expert_places.given();
  const bool keeps_highest = args.capacity_keeps == CapacityKeeps::kHighest;
  const bool annotates = args.row_tokens.given() || args.device_counts.given() || args.pad_with_tokens;
  const ConstTensor ids = AsMatrix(args.topk_ids);
  TokenPermuteShape shape;
  shape.tokens = args.tokens.size(0), shape.hidden = args.tokens.size(1), shape.top_k = TopKOf(args);
  shape.experts = args.num_experts, shape.dtype = args.tokens.dtype,
  shape.wide_ids = !selects && ids.dtype == DType::kI64;
  shape.drops = args.capacity > 0 && !keeps_highest;  // By probability, all are ranked without one first.
  TokenPermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kPermute, shape, &PermuteCandidates, &tiling));
  TokenRoutesTiling routes;
  if (selects || keeps_highest || annotates) {
    TokenRoutesShape s{.tokens = shape.tokens, .hidden = shape.hidden, .top_k = shape.top_k};
    if (args.routing_map.given()) s.map_cols = shape.experts;
    if (keeps_highest) {
      const auto slots = SlotsOfExperts(args.topk_ids, args.routing_map, shape.experts);
      s.expert_slots = slots.empty() ? 0 : *std::max_element(slots.begin(), slots.end());
      s.capacity = args.capacity;
    }
    CUBIST_RETURN_IF_ERROR(ChooseRoutes(launch.chip(), kPermute, s, &routes));
  }

  TokenPermuteOperands g;
  g.tokens = MatrixOf(*launch.Input("tokens", args.tokens));
  g.permuted = MatrixOf(*launch.Output("permuted", args.permuted));
  g.sorted_indices =
      MatrixOf(*launch.Output("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.expert_counts = launch.Output("expert_counts", args.expert_counts);
  g.expert_offsets = launch.Output("expert_offsets", args.expert_offsets);
  g.probs = launch.Input("probs", args.probs);
  g.permuted_probs = launch.Output("permuted_probs", AsColumn(args.permuted_probs));
  g.capacity = args.capacity, g.row_multiple = args.row_multiple;
  g.first_row = args.rows.value_or(Range()).begin;
  g.experts = args.num_experts;
  const GmTensor* const row_tokens = launch.Output("row_tokens", AsColumn(args.row_tokens));
  const GroupCounts wanted{launch.Output("device_counts", args.device_counts),
                           launch.Output("node_counts", args.node_counts)};
  if (g.expert_counts == nullptr && annotates)
    g.expert_counts = launch.Workspace("expert_counts", DType::kI32, {1, shape.experts});
  const std::int64_t bins = tiling.Bins(g.experts);
  g.chunk_counts = MatrixOf(*launch.Workspace("chunk_counts", DType::kI32, {tiling.chunks, bins}));
  if (tiling.sums_chunks)
    g.chunk_sums = MatrixOf(*launch.Workspace("chunk_sums", DType::kI32, {tiling.chunks + 1, bins}));
  const GmTensor *const map_probs = g.probs, *const expert_counts = g.expert_counts;
  if (selects) {
    SelectRoutes(launch, args, routes, &g);
  } else {
    g.topk_ids = MatrixOf(*launch.Input("topk_ids", ids));
  }
  if (keeps_highest) KeepHighest<T>(launch, tiling, routes, &g);
  if (row_tokens != nullptr) {  // Not before: routes that are ranked to be chosen from take no rows yet.
    g.row_tokens = row_tokens;
    launch.OnVectorCores(routes.chunks,
                         [&](auto& core) { FillNoneKernel(core, MatrixOf(*row_tokens), routes); });
  }
  RankAndMove<T>(launch, g, tiling);
  if (annotates) Annotate<T>(launch, args, g, map_probs, expert_counts, wanted, routes);
  return launch.Finish(profile);
}

Status Validate(const Device& device, const TokenUnpermuteArgs& args) {
  const Argument permuted{kUnpermute, "permuted", args.permuted}, probs{kUnpermute, "probs", args.probs};
  const Argument out{kUnpermute, "out", args.out};
  const Places places = PlacesOf(kUnpermute, args, args.permuted, "permuted");
  CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"M"}, {"H"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"T"}, {"H, of permuted", args.permuted.size(1)}}));
  const std::int64_t t = args.out.size(0);
  const Argument map{kUnpermute, "routing_map", args.routing_map};
  if (map.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckMapOfProbs(map, probs, {"T, of out", t}, args.top_k));
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of out", t}, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckTopK(kUnpermute, args.top_k));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kUnpermute, args.rows, permuted));
  const Slots slots{t, SlotsPerToken(places, args.probs, args.top_k)};
  CUBIST_RETURN_IF_ERROR(CheckSlots(out, t, slots.top_k));
  CUBIST_RETURN_IF_ERROR(CheckPlaces(places, slots));
  CUBIST_RETURN_IF_ERROR(CheckDType(permuted, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {args.permuted.dtype}));
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(probs, kFloatTypes));
  const Argument bias{kUnpermute, "bias", args.bias}, ids{kUnpermute, "topk_ids", args.topk_ids},
      residual{kUnpermute, "residual", args.residual}, residual2{kUnpermute, "residual2", args.residual2};
  for (const Argument* arg : {&residual, &residual2}) {
    if (!arg->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {{"T, of out", t}, {"H, of permuted", args.permuted.size(1)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.permuted.dtype}));
  }
  CUBIST_RETURN_IF_ERROR(CheckBias(bias, ids, places, slots));
  CUBIST_RETURN_IF_ERROR(CheckTensors(device,
                                      {&permuted, &places.sorted_indices, &places.row_tokens, &probs, &map,
                                       &bias, &ids, &residual, &residual2},
                                      {&out}));
  CUBIST_RETURN_IF_ERROR(CheckValuesOf(places, slots));
  return CheckIdsOfBias(bias, ids, places, slots);
}

template <class T>
Status Run(const Device& device, const TokenUnpermuteArgs& args, Profile* profile) {
  Launch launch(device, kUnpermute);
  TokenPermuteShape shape;
  shape.tokens = args.out.size(0), shape.hidden = args.out.size(1);
  const Places places = PlacesOf(kUnpermute, args, args.permuted, "permuted");
  shape.top_k = SlotsPerToken(places, args.probs, args.top_k);
  shape.dtype = args.permuted.dtype;
  if (args.bias.given()) shape.reads_ids = true, shape.wide_ids = args.topk_ids.dtype == DType::kI64;
  TokenUnpermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kUnpermute, shape, &UnpermuteCandidates, &tiling));

  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(*launch.Input("permuted", args.permuted));
  g.probs = launch.Input("probs", args.probs);
  g.bias = launch.Input("bias", args.bias), g.topk_ids = launch.Input("topk_ids", args.topk_ids);
  g.residual = launch.Input("residual", args.residual),
  g.residual2 = launch.Input("residual2", args.residual2);
  g.out = MatrixOf(*launch.Output("out", args.out));
  CUBIST_RETURN_IF_ERROR(
      ReadPlaces(launch, places, {shape.tokens, shape.top_k}, &g.sorted_indices, &g.first_row));
  if (args.routing_map.given()) {
    MapOfSlots map;
    CUBIST_RETURN_IF_ERROR(
        map.Read(launch, kUnpermute, args.routing_map, shape.tokens, shape.top_k, g.probs));
    g.probs = map.slot_probs();
  }
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status TokenPermute(const Device& device, const TokenPermuteArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.tokens.dtype,
                       [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status TokenUnpermute(const Device& device, const TokenUnpermuteArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.permuted.dtype,
                       [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
