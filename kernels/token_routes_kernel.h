// What comes before and after the movement of MoE tokens where routes are not simply (T, K) expert ids: routing maps,
// tokens that do not count, experts placed elsewhere, capacities that keep the likeliest routes, padding by tokens.
#ifndef CUBIST_KERNELS_TOKEN_ROUTES_KERNEL_H_
#define CUBIST_KERNELS_TOKEN_ROUTES_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/running_top_kernel.h"
#include "kernels/token_permute_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/token_routes_tiling.h"

namespace cubist {

struct TokenRoutesOperands {
  // One of the two: expert ids (T, K), or a map (T, E).
  const GmTensor* topk_ids = nullptr;
  const GmTensor* routing_map = nullptr;
  const GmTensor* valid = nullptr;          // (T, 1)
  const GmTensor* expert_places = nullptr;  // (1, E)
  Gm ids;  // Workspace (T, K), int32: where the routes of each token go, or -1.
  // By expert and by slot: (T, E) and workspace (T, K).
  const GmTensor* map_probs = nullptr;
  const GmTensor* slot_probs = nullptr;
};

// body(piece) for the pieces of all tokens that are this core's; tokens alone where their routes or maps are cut.
template <VectorCore V, class Body>
void ForMyPieces(V& core, std::int64_t tokens, const TokenRoutesTiling& t, Body body) {
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range piece : Split(AtLeastOnce(Split(tokens, t.chunk_tokens))[c], t.piece_tokens))
      body(piece);
  }
}

// body(piece, slots) for them and `routes` of the slots (T, K) at a time, all of them where there are none.
template <VectorCore V, class Body>
void ForMyRoutes(V& core, const Gm& slots, const TokenRoutesTiling& t, std::int64_t routes, Body body) {
  ForMyPieces(core, slots.rows, t, [&](Range piece) {
    for (const Range some : AtLeastOnce(Split(slots.cols, routes))) body(piece, some);
  });
}

// Ids of experts as their places in the order of rows, a range of the table at a time.
template <VectorCore V>
class PlacesOfExperts {
 public:
  PlacesOfExperts(V& core, const GmTensor* table, const TokenRoutesTiling& t, std::int64_t routes)
      : core_(core),
        table_(table),
        step_(t.table_cols),
        table_ub_(core, "table_ub", 1, table == nullptr ? 1 : step_, 2),
        placed_ub_(core, "placed_ub", table == nullptr ? 1 : t.piece_tokens, table == nullptr ? 1 : routes,
                   1) {}

  UbTile<std::int32_t> operator()(UbTile<std::int32_t> ids) {
    if (table_ == nullptr) return ids;
    const UbTile<std::int32_t> placed = placed_ub_.Next(ids.rows(), ids.cols());
    core_.Fill(placed, -1);
    for (const Range experts : Split(table_->sizes[3], step_)) {
      const UbTile<std::int32_t> table = table_ub_.Next(1, experts.size());
      core_.Load(table, MatrixOf(*table_).Cols(experts));
      core_.Lookup(placed, ids, table, static_cast<std::int32_t>(experts.begin));
    }
    return placed;
  }

 private:
  V& core_;
  const GmTensor* table_;
  std::int64_t step_;
  Ring<Buffer::kUB, std::int32_t> table_ub_, placed_ub_;
};

// Routes of tokens that do not count become -1.
template <VectorCore V>
class ValidTokens {
 public:
  ValidTokens(V& core, const GmTensor* valid, const TokenRoutesTiling& t)
      : core_(core),
        valid_(valid),
        valid_ub_(core, "valid_ub", t.piece_tokens, 1, 2),
        counts_ub_(core, "counts_ub", t.piece_tokens, 1, 1) {}

  void Keep(Range tokens, UbTile<std::int32_t> ids) {
    if (valid_ == nullptr) return;
    const UbTile<std::uint8_t> valid = valid_ub_.Next(tokens.size(), 1);
    const UbTile<std::int32_t> counts = counts_ub_.Next(tokens.size(), 1);
    core_.Load(valid, MatrixOf(*valid_).Rows(tokens));
    core_.Cast(counts, valid);
    core_.KeepWhere(ids, ids, counts);
  }

 private:
  V& core_;
  const GmTensor* valid_;
  Ring<Buffer::kUB, std::uint8_t> valid_ub_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
};

// SelectRoutesKernel for maps that are read in parts: the experts of each go behind those of the parts before it.
template <VectorCore V>
void SelectFromPartsKernel(V& core, const TokenRoutesOperands& g, const TokenRoutesTiling& t) {
  const Gm map = MatrixOf(*g.routing_map);
  Ring<Buffer::kUB, std::uint8_t> map_ub(core, "map_ub", 1, t.map_cols, 2);
  Ring<Buffer::kUB, std::int32_t> flags_ub(core, "flags_ub", 1, t.map_cols, 1),
      found_ub(core, "found_ub", 1, t.map_cols + 1, 1), ids_ub(core, "map_ids_ub", 1, t.map_cols, 2);
  Ring<Buffer::kUB, float> map_probs_ub(core, "map_probs_ub", 1, t.map_cols, 2),
      slot_probs_ub(core, "slot_probs_ub", 1, t.map_cols, 2);
  ValidTokens<V> valid(core, g.valid, t);
  PlacesOfExperts<V> places(core, g.expert_places, t, t.map_cols);

  const auto select = [&](Range token) {
    std::int64_t found = 0;
    for (const Range part : Split(map.cols, t.map_cols)) {
      const UbTile<std::uint8_t> its_map = map_ub.Next(1, part.size());
      const UbTile<std::int32_t> flags = flags_ub.Next(1, part.size()),
                                 counts = found_ub.Next(1, part.size() + 1);
      core.Load(its_map, map.Block(token, part));
      core.Cast(flags, its_map);
      core.ExclusiveScan(counts, flags, 0);
      const Range slots{found, found + core.ReadScalar(counts, part.size())};
      if (slots.empty()) continue;
      const UbTile<std::int32_t> ids = ids_ub.Next(1, slots.size());
      core.TrueColumns(ids, flags);
      if (g.slot_probs != nullptr) {
        const UbTile<float> probs = map_probs_ub.Next(1, part.size()),
                            slot_probs = slot_probs_ub.Next(1, slots.size());
        core.Load(probs, MatrixOf(*g.map_probs).Block(token, part));
        core.Gather(slot_probs, probs, ids);
        core.Store(MatrixOf(*g.slot_probs).Block(token, slots), slot_probs);
      }
      core.AddScalar(ids, ids, static_cast<std::int32_t>(part.begin));
      const UbTile<std::int32_t> placed = places(ids);
      valid.Keep(token, placed);
      core.Store(g.ids.Block(token, slots), placed);
      found = slots.end;
    }
    return found;
  };
  ForMyPieces(core, g.ids.rows, t, [&](Range token) {
    if (token.empty()) return;
    for (const Range slots : Split(Range{select(token), g.ids.cols}, t.map_cols)) {
      const UbTile<std::int32_t> none = ids_ub.Next(1, slots.size());
      core.Fill(none, -1);
      core.Store(g.ids.Block(token, slots), none);
      if (g.slot_probs == nullptr) continue;
      const UbTile<float> zeros = slot_probs_ub.Next(1, slots.size());
      core.Fill(zeros, 0.0f);
      core.Store(MatrixOf(*g.slot_probs).Block(token, slots), zeros);
    }
  });
}

// ids(t, j) = the j-th expert of token t: as given, or by its map, ascending; then as the place of that expert, and -1
// for tokens that do not count. slot_probs(t, j) = map_probs(t, that expert), 0 where there is none.
template <VectorCore V>
void SelectRoutesKernel(V& core, const TokenRoutesOperands& g, const TokenRoutesTiling& t) {
  if (g.routing_map != nullptr && g.routing_map->sizes[3] > t.map_cols)
    return SelectFromPartsKernel(core, g, t);
  const std::int64_t mapped = g.routing_map == nullptr ? 0 : g.routing_map->sizes[3];
  const std::int64_t top_k = g.ids.cols,
                     routes = g.routing_map == nullptr ? std::min(top_k, t.routes) : top_k;
  const std::int64_t map_rows = mapped > 0 ? t.piece_tokens : 1, map_cols = std::max<std::int64_t>(mapped, 1);
  Ring<Buffer::kUB, std::uint8_t> map_ub(core, "map_ub", map_rows, map_cols, 2);
  Ring<Buffer::kUB, std::int32_t> flags_ub(core, "flags_ub", map_rows, map_cols, 1),
      map_ids_ub(core, "map_ids_ub", g.routing_map == nullptr ? 1 : t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> map_probs_ub(core, "map_probs_ub", map_rows, map_cols, 2),
      slot_probs_ub(core, "slot_probs_ub", t.piece_tokens, routes, 2);
  IntTiles<V> expert_ids(core, g.topk_ids == nullptr ? g.ids : MatrixOf(*g.topk_ids), t.piece_tokens, routes);
  ValidTokens<V> valid(core, g.valid, t);
  PlacesOfExperts<V> places(core, g.expert_places, t, routes);

  const auto ids_of = [&](Range piece, Range slots) {
    if (g.routing_map == nullptr) return expert_ids.Load(piece, slots);
    const UbTile<std::int32_t> ids = map_ids_ub.Next(piece.size(), top_k);
    if (mapped == 0) {
      core.Fill(ids, -1);
      return ids;
    }
    const UbTile<std::uint8_t> map = map_ub.Next(piece.size(), mapped);
    const UbTile<std::int32_t> flags = flags_ub.Next(piece.size(), mapped);
    core.Load(map, MatrixOf(*g.routing_map).Rows(piece));
    core.Cast(flags, map);
    core.TrueColumns(ids, flags);
    return ids;
  };
  ForMyRoutes(core, g.ids, t, routes, [&](Range piece, Range slots) {
    const UbTile<std::int32_t> ids = ids_of(piece, slots);
    if (g.slot_probs != nullptr && mapped > 0) {
      const UbTile<float> probs = map_probs_ub.Next(piece.size(), mapped);
      const UbTile<float> slot_probs = slot_probs_ub.Next(piece.size(), top_k);
      core.Load(probs, MatrixOf(*g.map_probs).Rows(piece));
      core.Gather(slot_probs, probs, ids);
      core.Store(MatrixOf(*g.slot_probs).Rows(piece), slot_probs);
    }
    const UbTile<std::int32_t> placed = places(ids);
    valid.Keep(piece, placed);
    core.Store(g.ids.Block(piece, slots), placed);
  });
}

// map_values(t, e) = slot_values(t, j) where ids(t, j) is e, 0 for experts that the token does not go to.
template <VectorCore V>
void SpreadSlotsKernel(V& core, const Gm& ids, const Gm& slot_values, const Gm& map_values,
                       const TokenRoutesTiling& t) {
  const std::int64_t routes = std::min(ids.cols, t.routes), map_cols = std::min(map_values.cols, t.map_cols);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> slots_ub(core, "slots_ub", t.piece_tokens, routes, 2),
      map_ub(core, "map_ub", t.piece_tokens, map_cols, 2);
  const auto spread = [&](Range piece, Range part) {
    const UbTile<float> map = map_ub.Next(piece.size(), part.size());
    for (const Range slots : AtLeastOnce(Split(ids.cols, routes))) {
      const UbTile<std::int32_t> experts = ids_ub.Next(piece.size(), slots.size());
      const UbTile<float> values = slots_ub.Next(piece.size(), slots.size());
      core.Load(experts, ids.Block(piece, slots));
      core.Load(values, slot_values.Block(piece, slots));
      if (part.begin != 0) core.AddScalar(experts, experts, static_cast<std::int32_t>(-part.begin));
      if (slots.begin == 0) core.Fill(map, 0.0f);
      core.Scatter(map, experts, values);
    }
    core.Store(map_values.Block(piece, part), map);
  };
  ForMyPieces(core, ids.rows, t, [&](Range piece) {
    for (const Range part : AtLeastOnce(Split(map_values.cols, map_cols))) spread(piece, part);
  });
}

// Routes that a capacity keeps by probability. Slots have been ranked without one: those of expert e stand in the rows
// [offsets(e), offsets(e + 1)).
struct HighestRoutesOperands {
  Gm ranks;            // Workspace (T, K): the row of each slot.
  Gm row_probs, kept;  // Workspaces (R, 1), by row; kept is 1 for slots that stay, else 0.
  Gm offsets;          // (1, E + 1)
  Gm kept_ids;         // Workspace (T, K): ids, -1 for the slots that do not stay.
  std::int64_t experts = 0, capacity = 0;
};

// kept = 1 for the `capacity` slots of an expert with the highest probabilities, of equals the earlier ones, else 0. Where not
// all of them fit they pass in parts, as often as `kept_slots` more are found among those that have not been yet.
template <VectorCore V>
class LikeliestSlots {
 public:
  LikeliestSlots(V& core, const HighestRoutesOperands& g, const TokenRoutesTiling& t)
      : core_(core),
        g_(g),
        part_(t.expert_slots),
        most_(t.kept_slots),
        probs_ub_(core, "probs_ub", 1, part_, 1),
        kept_ub_(core, "kept_ub", 1, part_, 1),
        none_ub_(core, "none_ub", 1, 1, 1),
        lowest_ub_(core, "lowest_ub", 1, 1, 1),
        ones_ub_(core, "ones_ub", 1, most_, 1),
        at_ub_(core, "at_ub", 1, most_, 1),
        top_(core, "best_ub", "best_ids_ub", 1, most_, part_),
        none_(none_ub_.Next(1, 1)),
        lowest_(lowest_ub_.Next(1, 1)),
        ones_(ones_ub_.Next(1, most_)) {
    core.Fill(none_, -std::numeric_limits<float>::infinity());
    core.Fill(lowest_, std::numeric_limits<float>::lowest());
    core.Fill(ones_, 1.0f);
  }

  // Of the slots in these rows.
  void Keep(Range rows) {
    if (rows.size() <= g_.capacity) return KeepAll(rows);
    for (std::int64_t found = 0; found < g_.capacity; found += most_) {
      Find(rows, found == 0);
      Mark(rows, top_.ids().Cols({0, std::min(most_, g_.capacity - found)}), found == 0);
    }
  }

 private:
  static Gm RowOf(const Gm& column, Range rows) { return column.Rows(rows).Transposed(); }

  void KeepAll(Range rows) {
    for (const Range part : Split(rows, part_)) {
      const UbTile<float> kept = kept_ub_.Next(1, part.size());
      core_.Fill(kept, 1.0f);
      core_.Store(RowOf(g_.kept, part), kept);
    }
  }
  void Find(Range rows, bool first) {
    top_.Clear();
    for (const Range part : Split(rows, part_)) {
      const UbTile<float> probs = probs_ub_.Next(1, part.size());
      core_.Load(probs, RowOf(g_.row_probs, part));
      // -inf is no slot: it has been found, or fills up those of a part. Neither -inf nor NaN of a slot is taken for it.
      core_.SelectLe(probs, probs, std::numeric_limits<float>::infinity(), probs, lowest_);
      core_.MaxScalar(probs, probs, std::numeric_limits<float>::lowest());
      if (!first) {
        const UbTile<float> kept = kept_ub_.Next(1, part.size());
        core_.Load(kept, RowOf(g_.kept, part));
        core_.SelectLe(probs, kept, 0.5f, probs, none_);
      }
      top_.Add(probs, part.begin - rows.begin);
    }
  }
  void Mark(Range rows, UbTile<std::int32_t> slots, bool first) {
    for (const Range part : Split(rows, part_)) {
      const UbTile<float> kept = kept_ub_.Next(1, part.size());
      const UbTile<std::int32_t> at = at_ub_.Next(1, slots.cols());
      if (first) {
        core_.Fill(kept, 0.0f);
      } else {
        core_.Load(kept, RowOf(g_.kept, part));
      }
      core_.AddScalar(at, slots, static_cast<std::int32_t>(rows.begin - part.begin));
      core_.Scatter(kept, at, ones_.Cols({0, slots.cols()}));
      core_.Store(RowOf(g_.kept, part), kept);
    }
  }

  V& core_;
  const HighestRoutesOperands& g_;
  std::int64_t part_, most_;
  Ring<Buffer::kUB, float> probs_ub_, kept_ub_, none_ub_, lowest_ub_, ones_ub_;
  Ring<Buffer::kUB, std::int32_t> at_ub_;
  RunningTop<V> top_;
  UbTile<float> none_, lowest_, ones_;
};

template <VectorCore V>
void KeepHighestKernel(V& core, const HighestRoutesOperands& g, const TokenRoutesTiling& t) {
  Ring<Buffer::kUB, std::int32_t> ends_ub(core, "ends_ub", 1, 2, 2);
  LikeliestSlots<V> slots(core, g, t);
  const Range mine = ShareOf(g.experts, core.index(), core.count());
  for (std::int64_t e = mine.begin; e < mine.end; ++e) {
    const UbTile<std::int32_t> ends = ends_ub.Next(1, 2);
    core.Load(ends, g.offsets.Cols({e, e + 2}));
    const Range rows{core.ReadScalar(ends, 0), core.ReadScalar(ends, 1)};
    if (!rows.empty()) slots.Keep(rows);
  }
}

// kept_ids = the ids of slots that stay, -1 for the others.
template <VectorCore V>
void DropLowestKernel(V& core, const HighestRoutesOperands& g, const Gm& topk_ids,
                      const TokenRoutesTiling& t) {
  const std::int64_t routes = std::min(topk_ids.cols, t.routes);
  IntTiles<V> expert_ids(core, topk_ids, t.piece_tokens, routes);
  Ring<Buffer::kUB, std::int32_t> ranks_ub(core, "ranks_ub", t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> kept_ub(core, "kept_ub", t.piece_tokens, routes, 2),
      weights_ub(core, "weights_ub", t.piece_tokens, routes, 1),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  ForMyRoutes(core, topk_ids, t, routes, [&](Range piece, Range slots) {
    const UbTile<std::int32_t> ids = expert_ids.Load(piece, slots),
                               ranks = ranks_ub.Next(piece.size(), slots.size());
    const UbTile<float> kept = kept_ub.Next(piece.size(), slots.size());
    core.Load(ranks, g.ranks.Block(piece, slots));
    core.Gather(kept, g.kept, ranks, staging_ub.Next(kStagingRows, kBlockWords));
    core.DropRoutes(ids, weights_ub.Next(piece.size(), slots.size()), kept, 0.5f);
    core.Store(g.kept_ids.Block(piece, slots), ids);
  });
}

// Rows of an expert beyond its routes, filled with tokens that are not routed to it, in order.
struct PadWithTokensOperands {
  Gm tokens, permuted;                       // (T, H), (M, H)
  Gm routing_map;                            // (T, E)
  const GmTensor* valid = nullptr;           // (T, 1): a token that is not is routed nowhere.
  Gm expert_counts;                          // (1, E)
  const GmTensor* map_probs = nullptr;       // (T, E), given with
  const GmTensor* permuted_probs = nullptr;  // (M, 1)
  const GmTensor* row_tokens = nullptr;      // (M, 1)
  std::int64_t capacity = 0, first_row = 0;
};

template <class T, VectorCore V>
void PadWithTokensKernel(V& core, const PadWithTokensOperands& g, const TokenRoutesTiling& t) {
  const std::int64_t valid_tokens = g.valid == nullptr ? 0 : t.pad_tokens;
  Ring<Buffer::kUB, std::int32_t> count_ub(core, "count_ub", 1, 1, 2),
      flags_ub(core, "flags_ub", 1, t.pad_tokens, 1), valid_ub(core, "valid_ub", 1, valid_tokens, 1),
      number_ub(core, "number_ub", 1, 1, 2);
  Ring<Buffer::kUB, std::uint8_t> map_ub(core, "map_ub", 1, t.pad_tokens, 2),
      valid_map_ub(core, "valid_map_ub", 1, valid_tokens, 2);
  Ring<Buffer::kUB, float> prob_ub(core, "prob_ub", 1, 1, 2);
  Ring<Buffer::kUB, T> row_ub(core, "row_ub", 1, t.pad_cols, 4, Role::kRelay);
  const auto pad = [&](std::int64_t row, std::int64_t token, std::int64_t expert) {
    if (row < 0 || row >= g.permuted.rows) return;
    for (const Range cols : Split(g.tokens.cols, t.pad_cols)) {
      const UbTile<T> part = row_ub.Next(1, cols.size());
      core.Load(part, g.tokens.Block({token, token + 1}, cols));
      core.Store(g.permuted.Block({row, row + 1}, cols), part);
    }
    if (g.permuted_probs != nullptr) {
      const UbTile<float> prob = prob_ub.Next(1, 1);
      core.Load(prob, MatrixOf(*g.map_probs).Block({token, token + 1}, {expert, expert + 1}));
      core.Store(MatrixOf(*g.permuted_probs).Rows({row, row + 1}), prob);
    }
    if (g.row_tokens != nullptr) {
      const UbTile<std::int32_t> number = number_ub.Next(1, 1);
      core.Fill(number, static_cast<std::int32_t>(token));
      core.Store(MatrixOf(*g.row_tokens).Rows({row, row + 1}), number);
    }
  };
  const Range mine = ShareOf(g.expert_counts.cols, core.index(), core.count());
  for (std::int64_t e = mine.begin; e < mine.end; ++e) {
    const UbTile<std::int32_t> count = count_ub.Next(1, 1);
    core.Load(count, g.expert_counts.Cols({e, e + 1}));
    std::int64_t row = e * g.capacity - g.first_row + core.ReadScalar(count, 0);
    const std::int64_t end = (e + 1) * g.capacity - g.first_row;
    for (const Range piece : Split(g.tokens.rows, t.pad_tokens)) {
      if (row >= end) break;
      const UbTile<std::uint8_t> map = map_ub.Next(1, piece.size());
      const UbTile<std::int32_t> flags = flags_ub.Next(1, piece.size());
      core.Load(map, g.routing_map.Block(piece, {e, e + 1}).Transposed());
      core.Cast(flags, map);
      UbTile<std::int32_t> valid = flags;
      if (g.valid != nullptr) {
        const UbTile<std::uint8_t> valid_map = valid_map_ub.Next(1, piece.size());
        valid = valid_ub.Next(1, piece.size());
        core.Load(valid_map, MatrixOf(*g.valid).Rows(piece).Transposed());
        core.Cast(valid, valid_map);
      }
      for (std::int64_t i = 0; i < piece.size() && row < end; ++i) {
        if (core.ReadScalar(flags, i) == 0 || core.ReadScalar(valid, i) == 0) pad(row++, piece.begin + i, e);
      }
    }
  }
}

// column = -1, before other kernels fill in what there is.
template <VectorCore V>
void FillNoneKernel(V& core, const Gm& column, const TokenRoutesTiling& t) {
  Ring<Buffer::kUB, std::int32_t> none_ub(core, "none_ub", 1, t.pad_tokens, 1);
  const UbTile<std::int32_t> none = none_ub.Next(1, t.pad_tokens);
  core.Fill(none, -1);
  for (const Range rows : Split(ShareOf(column.rows, core.index(), core.count()), t.pad_tokens))
    core.Store(column.Rows(rows).Transposed(), none.Cols({0, rows.size()}));
}

// rows(row_tokens(r), (first_row + r) / capacity) = r: where each token's row of each expert is. A token has at most
// one row of an expert, so that no two cores write one place.
template <VectorCore V>
void RowsByExpertKernel(V& core, const Gm& row_tokens, const Gm& rows, std::int64_t capacity,
                        std::int64_t first_row, const TokenRoutesTiling& t) {
  Ring<Buffer::kUB, std::int32_t> tokens_ub(core, "tokens_ub", 1, t.pad_tokens, 2),
      numbers_ub(core, "numbers_ub", 1, t.pad_tokens + 1, 2), ones_ub(core, "ones_ub", 1, t.pad_tokens, 1),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  const UbTile<std::int32_t> ones = ones_ub.Next(1, t.pad_tokens),
                             staging = staging_ub.Next(kStagingRows, kBlockWords);
  core.Fill(ones, 1);
  const Range mine = ShareOf(row_tokens.rows, core.index(), core.count());
  for (std::int64_t begin = mine.begin, end = 0; begin < mine.end; begin = end) {
    const std::int64_t expert = (first_row + begin) / capacity;
    end = std::min({mine.end, begin + t.pad_tokens, (expert + 1) * capacity - first_row});
    const Range some{0, end - begin};
    const UbTile<std::int32_t> tokens = tokens_ub.Next(1, some.end),
                               numbers = numbers_ub.Next(1, some.end + 1);
    core.Load(tokens, row_tokens.Rows({begin, end}).Transposed());
    core.ExclusiveScan(numbers, ones.Cols(some), static_cast<std::int32_t>(begin));
    core.Scatter(rows.Cols({expert, expert + 1}), tokens, numbers.Cols(some), staging);
  }
}

// sums(0, g) = the sum of the g-th of equal parts of counts (1, n). One core does it.
template <VectorCore V>
void SumPartsKernel(V& core, const Gm& counts, const Gm& sums, const TokenRoutesTiling& t) {
  if (sums.cols == 0) return;
  const std::int64_t width = counts.cols / sums.cols;
  Gm by_part = counts;  // (width, parts)
  by_part.rows = width, by_part.cols = sums.cols;
  by_part.row_stride = counts.col_stride, by_part.col_stride = width * counts.col_stride;
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", t.sum_rows, t.sum_cols, 2),
      sums_ub(core, "sums_ub", 1, t.sum_cols, 2), part_ub(core, "part_ub", 1, t.sum_cols, 1);
  for (const Range cols : Split(sums.cols, t.sum_cols)) {
    const UbTile<std::int32_t> sum = sums_ub.Next(1, cols.size()), part = part_ub.Next(1, cols.size());
    core.Fill(sum, 0);
    for (const Range rows : Split(width, t.sum_rows)) {
      const UbTile<std::int32_t> some = counts_ub.Next(rows.size(), cols.size());
      core.Load(some, by_part.Block(rows, cols));
      core.ColumnSum(part, some);
      core.Add(sum, sum, part);
    }
    core.Store(sums.Cols(cols), sum);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_ROUTES_KERNEL_H_
