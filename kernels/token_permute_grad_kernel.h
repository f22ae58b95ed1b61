// The gradient of TokenUnpermute: a token's gradient goes to its rows with their probabilities, and meets the rows that
// were summed in the gradients of those. (The gradient of TokenPermute is TokenUnpermuteKernel with weights of 1.)
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_KERNEL_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_KERNEL_H_

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "kernels/token_permute_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {

struct TokenUnpermuteGradOperands {
  Gm out_grad, sorted_indices;         // (T, H), (T, K)
  const GmTensor* permuted = nullptr;  // (M, H), given with probs_grad
  const GmTensor* probs = nullptr;     // (T, K)
  Gm permuted_grad;                    // (M, H)
  const GmTensor* probs_grad = nullptr;
  const GmTensor *bias = nullptr, *topk_ids = nullptr;  // (E, H) and (T, K), both or none: for probs_grad
  std::int64_t first_row = 0;                           // Of the global order, which the M rows begin with.
  const GmTensor* owned =
      nullptr;  // Workspace (M, 1): whether a row belongs to a slot. Null: every row does.
};

// Phase 1, where there are rows of no slot: owned = 0.
template <VectorCore V>
void ClearOwnedKernel(V& core, const TokenUnpermuteGradOperands& g, const TokenUnpermuteGradTiling& t) {
  Ring<Buffer::kUB, std::int32_t> zeros_ub(core, "zeros_ub", 1, t.owned_rows, 1);
  const UbTile<std::int32_t> zeros = zeros_ub.Next(1, t.owned_rows);
  core.Fill(zeros, 0);
  const Gm owned = MatrixOf(*g.owned);
  for (const Range rows : Split(ShareOf(owned.rows, core.index(), core.count()), t.owned_rows)) {
    core.Store(owned.Rows(rows).Transposed(), zeros.Cols({0, rows.size()}));
  }
}

// Phase 2, likewise: owned = 1 in the rows of slots.
template <VectorCore V>
void MarkOwnedKernel(V& core, const TokenUnpermuteGradOperands& g, const TokenUnpermuteGradTiling& t) {
  const std::int64_t top_k = g.sorted_indices.cols, routes = std::min(top_k, t.routes);
  Ring<Buffer::kUB, std::int32_t> places_ub(core, "places_ub", t.piece_tokens, routes, 2),
      ones_ub(core, "ones_ub", t.piece_tokens, routes, 1),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  const UbTile<std::int32_t> ones = ones_ub.Next(t.piece_tokens, routes),
                             staging = staging_ub.Next(kStagingRows, kBlockWords);
  core.Fill(ones, 1);
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    ForPiecesOf(Split(g.out_grad.rows, t.chunk_tokens)[c], t, top_k, [&](Range piece, Range slots) {
      const UbTile<std::int32_t> places = places_ub.Next(piece.size(), slots.size());
      core.Load(places, g.sorted_indices.Block(piece, slots));
      if (g.first_row != 0) core.AddScalar(places, places, static_cast<std::int32_t>(-g.first_row));
      core.Scatter(MatrixOf(*g.owned), places, ones.Part({0, piece.size()}, {0, slots.size()}), staging);
    });
  }
}

// Writes zeros to the rows of no slot.
template <VectorCore V>
void ClearRowsOfNoSlot(V& core, const TokenUnpermuteGradOperands& g, const TokenUnpermuteGradTiling& t,
                       Ring<Buffer::kUB, float>& zeros_ub) {
  Ring<Buffer::kUB, std::int32_t> owned_ub(core, "owned_ub", 1, t.owned_rows, 2);
  for (const Range rows : Split(ShareOf(g.permuted_grad.rows, core.index(), core.count()), t.owned_rows)) {
    const UbTile<std::int32_t> owned = owned_ub.Next(1, rows.size());
    core.Load(owned, MatrixOf(*g.owned).Rows(rows).Transposed());
    for (std::int64_t r = 0; r < rows.size(); ++r) {
      if (core.ReadScalar(owned, r) != 0) continue;
      for (const Range cols : Split(g.permuted_grad.cols, t.cols)) {
        const UbTile<float> zeros = zeros_ub.Next(1, cols.size());
        core.Fill(zeros, 0.0f);
        core.Store(g.permuted_grad.Block({rows.begin + r, rows.begin + r + 1}, cols), zeros);
      }
    }
  }
}

// Phase 3. Each part of a token's gradient is read and widened once for up to t.slots rows; each row of `permuted` is
// read once, each row of permuted_grad written once.
template <class T, VectorCore V>
void TokenUnpermuteGradKernel(V& core, const TokenUnpermuteGradOperands& g,
                              const TokenUnpermuteGradTiling& t) {
  const std::int64_t top_k = g.sorted_indices.cols, routes = std::min(top_k, t.routes);
  const bool whole = routes == top_k;  // All slots of a piece of tokens are here at once.
  Ring<Buffer::kUB, std::int32_t> places_ub(core, "places_ub", t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> probs_ub(core, "probs_ub", t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> scaled_ub(core, "scaled_ub", 1, t.cols, 2),
      scratch_ub(core, "scratch_ub", 1, t.cols, 1),
      wide_ub(core, "wide_ub", 1, std::same_as<T, float> ? 1 : t.cols, 1),
      dots_ub(core, "dots_ub", t.slots, kBlockWords, 2);
  Ring<Buffer::kUB, T> grad_ub(core, "grad_ub", 1, t.cols, 2, Role::kRelay),
      row_ub(core, "row_ub", 1, t.cols, t.row_stages * static_cast<int>(t.rows), Role::kRelay);
  const std::int64_t entries = g.bias == nullptr ? 1 : 2;  // Of a slot: its row, and its expert's bias.
  Ring<Buffer::kUB, T> bias_ub(core, "bias_ub", 1, g.bias == nullptr ? 0 : t.cols,
                               2 * static_cast<int>(t.rows), Role::kRelay);
  IntTiles<V> expert_ids = ExpertsOfSlots(core, g.topk_ids, g.sorted_indices, t);
  if (g.owned != nullptr) ClearRowsOfNoSlot(core, g, t, scaled_ub);

  // Rows that meet a part of their token's gradient at once; after the last of them its dot products are stored.
  struct Group {
    std::array<ScaledDot<T>, V::kMaxSummands> rows;
    std::size_t count = 0;
    UbTile<T> grad;
    bool first = true;  // Of the part.
    UbTile<float> dots;
    std::optional<Gm> probs_grad = {};
  };
  // The rows of a group are asked for before those of the one before it are multiplied, and come meanwhile.
  std::array<Group, 2> groups;
  Group *group = &groups[0], *before = &groups[1];
  UbTile<float> wide;
  const auto finish = [&] {
    if (before->count > 0) {
      const std::int64_t cols = before->grad.cols();
      if (before->first) wide = wide_ub.Next(1, std::same_as<T, float> ? 1 : cols);
      core.StoreScaledDots(wide, scaled_ub.Next(1, cols), scratch_ub.Next(1, cols), before->grad,
                           before->first, std::span<const ScaledDot<T>>(before->rows.data(), before->count));
    }
    if (before->probs_grad.has_value()) core.Store(*before->probs_grad, before->dots.Cols({0, 1}));
    before->count = 0, before->probs_grad = {};
  };
  const auto hand_on = [&] {
    finish();
    std::swap(group, before);
    group->grad = before->grad, group->dots = before->dots,
    group->first = before->first && before->count == 0;
  };

  UbTile<std::int32_t> places, experts;
  UbTile<float> probs;
  std::int64_t first_slot = 0;  // Of those.
  const auto load = [&](Range tokens, Range slots) {
    places = places_ub.Next(tokens.size(), slots.size()), probs = probs_ub.Next(tokens.size(), slots.size());
    core.Load(places, g.sorted_indices.Block(tokens, slots));
    if (g.first_row != 0) core.AddScalar(places, places, static_cast<std::int32_t>(-g.first_row));
    if (g.probs != nullptr) core.Load(probs, MatrixOf(*g.probs).Block(tokens, slots));
    if (g.bias != nullptr) experts = expert_ids.Load(tokens, slots);
    first_slot = slots.begin;
  };

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range piece : Split(Split(g.out_grad.rows, t.chunk_tokens)[c], t.piece_tokens)) {
      if (whole) load(piece, {0, top_k});

      for (std::int64_t i = 0; i < piece.size(); ++i) {
        const Range token{piece.begin + i, piece.begin + i + 1}, its = whole ? Range{i, i + 1} : Range{0, 1};
        for (const Range part : Split(top_k, routes)) {
          if (!whole) load(token, part);
          const UbTile<std::int32_t> its_places = places.Rows(its);
          const UbTile<float> its_probs = probs.Rows(its);
          for (const Range slots : Split(part, t.slots)) {
            group->dots = dots_ub.Next(slots.size(), kBlockWords);
            if (g.probs_grad != nullptr) core.Fill(group->dots, 0.0f);
            for (const Range cols : Split(g.out_grad.cols, t.cols)) {
              group->grad = grad_ub.Next(1, cols.size()), group->first = true;
              core.Load(group->grad, g.out_grad.Block(token, cols));
              for (std::int64_t j = slots.begin; j < slots.end; ++j) {
                const std::int64_t at = j - first_slot, place = core.ReadScalar(its_places, at);
                if (place < 0 || place >= g.permuted_grad.rows) continue;
                const Range here{place, place + 1};
                const float weight = g.probs == nullptr ? 1.0f : core.ReadScalar(its_probs, at);
                if (group->count == static_cast<std::size_t>(entries * t.rows)) hand_on();
                ScaledDot<T>& row = group->rows[group->count++];
                row = {g.permuted_grad.Block(here, cols), weight};
                if (g.probs_grad != nullptr) {
                  row.sum = group->dots.Part({j - slots.begin, j - slots.begin + 1}, {0, 1});
                  row.row = row_ub.Next(1, cols.size());
                  core.Load(row.row, MatrixOf(*g.permuted).Block(here, cols));
                }
                if (g.bias == nullptr) continue;
                const std::int64_t expert = core.ReadScalar(experts.Rows(its), at);
                const UbTile<T> bias = bias_ub.Next(1, cols.size());
                core.Load(bias, MatrixOf(*g.bias).Block({expert, expert + 1}, cols));
                group->rows[group->count++] = {.sum = row.sum, .row = bias};
              }
              if (cols.end < g.out_grad.cols || g.probs_grad == nullptr) hand_on();
            }
            if (g.probs_grad == nullptr) continue;
            group->probs_grad = MatrixOf(*g.probs_grad).Block(token, slots).Transposed();
            hand_on();
          }
        }
      }
    }
  }
  finish();
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_KERNEL_H_
