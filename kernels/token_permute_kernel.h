// The movement of MoE tokens (VectorSort, forward): to expert-sorted rows, and back with probabilities.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_KERNEL_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {

struct TokenPermuteOperands {
  Gm tokens, topk_ids;                       // (T, H), (T, K)
  Gm permuted, sorted_indices;               // (M, H), (T, K)
  const GmTensor* probs = nullptr;           // (T, K), given with
  const GmTensor* permuted_probs = nullptr;  // (M, 1)
  const GmTensor* row_tokens = nullptr;      // (M, 1), -1 beforehand
  const GmTensor* expert_counts = nullptr;   // (E), slots of each expert
  const GmTensor* expert_offsets = nullptr;  // (E + 1), its first row, padding included
  // Workspaces over B bins: the experts, or with t.digit_bits the values of that many bits of their ids.
  Gm chunk_counts;  // (chunks, B): how often each chunk routes to each.
  Gm chunk_sums;    // (chunks + 1, B), where t.sums_chunks: of the chunks before each, and of all.
  std::int64_t experts = 0;
  std::int64_t capacity = 0;      // Rows of every expert, or 0: as many as it has slots,
  std::int64_t row_multiple = 1;  // rounded up to a multiple.
  std::int64_t first_row = 0;     // Of the global order, which the M rows begin with.

  // Whether experts have other rows than their slots.
  bool pads() const { return capacity > 0 || row_multiple > 1; }
};

// Core `index` of `count`'s share of n things.
inline Range ShareOf(std::int64_t n, std::int64_t index, std::int64_t count) {
  return {n * index / count, n * (index + 1) / count};
}

// Integers of GM as int32, of either width: expert ids of some tokens, counts of some chunks.
template <VectorCore V>
class IntTiles {
 public:
  // Tiles are `rows` by `cols` at most. Those that are only read may be relay tiles.
  IntTiles(V& core, const Gm& source, std::int64_t rows, std::int64_t cols, Role role = Role::kRows)
      : core_(core),
        source_(source),
        wide_(source.dtype() == DType::kI64),
        ids_ub_(core, "ids_ub", rows, cols, 2, role),
        wide_ub_(core, "wide_ids_ub", wide_ ? rows : 1, wide_ ? cols : 1, 1) {}

  UbTile<std::int32_t> Load(Range rows, Range cols) {
    const UbTile<std::int32_t> ids = ids_ub_.Next(rows.size(), cols.size());
    if (wide_) {
      const UbTile<std::int64_t> wide = wide_ub_.Next(rows.size(), cols.size());
      core_.Load(wide, source_.Block(rows, cols));
      core_.Cast(ids, wide);
    } else {
      core_.Load(ids, source_.Block(rows, cols));
    }
    return ids;
  }

 private:
  V& core_;
  Gm source_;
  bool wide_;
  Ring<Buffer::kUB, std::int32_t> ids_ub_;
  Ring<Buffer::kUB, std::int64_t> wide_ub_;
};

// body(piece, slots) for pieces of the tokens of a chunk, and parts of a single token's slots where not all of them fit.
template <class Tiling, class Body>
void ForPiecesOf(Range chunk, const Tiling& t, std::int64_t top_k, Body body) {
  for (const Range piece : Split(chunk, t.piece_tokens)) {
    for (const Range slots : AtLeastOnce(Split(top_k, std::min(top_k, t.routes)))) body(piece, slots);
  }
}

// What ids are counted and ranked with: tiles to sort them in, where that is what is done, else none.
template <VectorCore V>
class SortScratch {
 public:
  // Of so many routes of a token.
  SortScratch(V& core, bool sorts, const TokenPermuteTiling& t, std::int64_t routes, std::int64_t bins)
      : places_ub_(core, "places_ub", sorts ? t.piece_tokens : 0, routes, 1),
        values_ub_(core, "values_ub", sorts ? t.piece_tokens : 0, routes, 2),
        count_ub_(core, "count_ub", sorts ? 2 : 0, std::max(routes, bins) + 1, 1),
        at_ub_(core, "at_ub", sorts ? 1 : 0, bins + 1, 1),
        keys_ub_(core, "keys_ub", sorts ? t.piece_tokens : 0, routes, 2),
        bins_ub_(core, "bins_ub", sorts ? 1 : 0, bins + 1, 1),
        runs_ub_(core, "runs_ub", sorts ? 1 : 0, bins + 1, 3) {
    if (!sorts) return;
    places_ = places_ub_.Next(t.piece_tokens, routes), bins_ = bins_ub_.Next(1, bins + 1);
    const std::int64_t most = std::max(routes, bins);
    const UbTile<std::int32_t> both = count_ub_.Next(2, most + 1), ones = both.Part({0, 1}, {0, most});
    core.Fill(ones, 1);
    core.ExclusiveScan(both.Rows({1, 2}), ones, 0);
    core.Cast(bins_, both.Part({1, 2}, {0, bins + 1}));
    core.AddScalar(places_.Rows({0, 1}), both.Part({1, 2}, {0, routes}), 0);
    for (std::int64_t made = 1; made < t.piece_tokens;
         made *= 2) {  // As many rows again, with higher numbers.
      const std::int64_t more = std::min(made, t.piece_tokens - made);
      core.AddScalar(places_.Rows({made, made + more}), places_.Rows({0, more}),
                     static_cast<std::int32_t>(made * routes));
    }
  }

  // For so many rows of ids, and columns: all of them but of a single row's last part.
  SortTiles Tiles(std::int64_t rows, std::int64_t cols) {
    if (!places_.given()) return {};
    const std::int64_t bins = bins_.cols();
    return {places_.Part({0, rows}, {0, cols}),
            bins_,
            {keys_ub_.Next(rows, cols), keys_ub_.Next(rows, cols)},
            {values_ub_.Next(rows, cols), values_ub_.Next(rows, cols)},
            runs_ub_.Next(1, bins),
            runs_ub_.Next(1, bins),
            runs_ub_.Next(1, bins),
            at_ub_.Next(1, bins)};
  }

 private:
  Ring<Buffer::kUB, std::int32_t> places_ub_, values_ub_, count_ub_, at_ub_;
  Ring<Buffer::kUB, float> keys_ub_, bins_ub_, runs_ub_;
  UbTile<std::int32_t> places_{};
  UbTile<float> bins_{};
};

// Phase 1: chunk_counts(c, b) = how many ids of chunk c fall into bin b of `bins`.
template <VectorCore V>
void CountKernel(V& core, const Gm& ids, const Gm& chunk_counts, const IdBins& bins,
                 const TokenPermuteTiling& t) {
  const std::int64_t routes = std::min(ids.cols, t.routes);
  IntTiles<V> id_tiles(core, ids, t.piece_tokens, routes, Role::kRelay);
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, chunk_counts.cols, 2);
  SortScratch<V> scratch(core, t.sorts, t, routes, chunk_counts.cols);
  const Split chunks(ids.rows, t.chunk_tokens);
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    const UbTile<std::int32_t> counts = counts_ub.Next(1, chunk_counts.cols);
    core.Fill(counts, 0);
    ForPiecesOf(AtLeastOnce(chunks)[c], t, ids.cols, [&](Range piece, Range slots) {
      const UbTile<std::int32_t> some = id_tiles.Load(piece, slots);
      core.Histogram(counts, some, bins, scratch.Tiles(some.rows(), some.cols()));
    });
    core.Store(chunk_counts.Rows({c, c + 1}), counts);
  }
}

// Between the phases, where t.sums_chunks: chunk_sums(c) = the counts of the chunks before c, by ranges of bins. Otherwise
// every chunk of the next phase adds up the counts of all chunks for itself, which saves a phase while there are few.
template <VectorCore V>
void ScanChunksKernel(V& core, const Gm& chunk_counts, const Gm& chunk_sums) {
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, kSummedBins, 2),
      sums_ub(core, "sums_ub", 1, kSummedBins, 2);
  const Split ranges(chunk_counts.cols, kSummedBins);
  for (std::int64_t r = core.index(); r < ranges.count(); r += core.count()) {
    const Range bins = ranges[r];
    UbTile<std::int32_t> sum = sums_ub.Next(1, bins.size());
    core.Fill(sum, 0);
    for (std::int64_t c = 0; c <= chunk_counts.rows; ++c) {
      core.Store(chunk_sums.Block({c, c + 1}, bins), sum);
      if (c == chunk_counts.rows) break;
      const UbTile<std::int32_t> counts = counts_ub.Next(1, bins.size()), next = sums_ub.Next(1, bins.size());
      core.Load(counts, chunk_counts.Block({c, c + 1}, bins));
      core.Add(next, sum, counts);
      sum = next;
    }
  }
}

// Writes zeros to rows of the global order, as far as they are here.
template <VectorCore V>
class ZeroRows {
 public:
  ZeroRows(V& core, const TokenPermuteOperands& g)
      : core_(core), g_(g), cols_(ZeroCols(g.permuted.cols)), zeros_ub_(core, "zeros_ub", 1, cols_, 2) {}

  void Fill(Range rows) {
    const Range here{std::max(rows.begin - g_.first_row, std::int64_t{0}),
                     std::min(rows.end - g_.first_row, g_.permuted.rows)};
    for (std::int64_t row = here.begin; row < here.end; ++row) {
      for (const Range cols : Split(g_.permuted.cols, cols_))
        core_.Store(g_.permuted.Block({row, row + 1}, cols), Zeros(cols.size()));
    }
    if (g_.permuted_probs == nullptr || here.empty()) return;
    for (const Range rows : Split(here, cols_))
      core_.Store(MatrixOf(*g_.permuted_probs).Rows(rows).Transposed(), Zeros(rows.size()));
  }

 private:
  // Made again for each store, as one that narrows loses them; in turn with the last ones, which are on their way.
  UbTile<float> Zeros(std::int64_t cols) {
    const UbTile<float> zeros = zeros_ub_.Next(1, cols);
    core_.Fill(zeros, 0.0f);
    return zeros;
  }

  V& core_;
  const TokenPermuteOperands& g_;
  std::int64_t cols_;
  Ring<Buffer::kUB, float> zeros_ub_;
};

// Rows of each expert for which its slots are given.
template <VectorCore V>
UbTile<std::int32_t> RowsOfExperts(V& core, const TokenPermuteOperands& g, UbTile<std::int32_t> slots,
                                   UbTile<std::int32_t> sizes) {
  if (!g.pads()) return slots;
  if (g.capacity > 0) {
    core.Fill(sizes, static_cast<std::int32_t>(g.capacity));
  } else {
    core.RoundUp(sizes, slots, static_cast<std::int32_t>(g.row_multiple));
  }
  return sizes;
}

// Zeros in the share of chunk c of what is left behind the last expert's rows.
template <VectorCore V>
void FillTail(ZeroRows<V>& zero_rows, const TokenPermuteOperands& g, std::int64_t end, std::int64_t c,
              const TokenPermuteTiling& t) {
  const Range tail = ShareOf(std::max(g.first_row + g.permuted.rows - end, std::int64_t{0}), c, t.chunks);
  zero_rows.Fill({end + tail.begin, end + tail.end});
}

// Tokens to the rows of their slots, with their probabilities and numbers. They are walked in source order: each row is read
// once, or once for each part of its slots, and written to its K places. What goes with the rows goes token by token: a
// transfer of 4 bytes takes as long as one of some KiB, but leaves HBM to other cores' rows.
template <class T, VectorCore V>
class TokenMover {
 public:
  TokenMover(V& core, const TokenPermuteOperands& g, const TokenPermuteTiling& t)
      : core_(core),
        g_(g),
        part_cols_(t.cols),
        probs_ub_(core, "probs_ub", t.piece_tokens, std::min(g.topk_ids.cols, t.routes), 2),
        number_ub_(core, "number_ub", 1, std::min(g.topk_ids.cols, t.routes), 2),
        number_staging_ub_(core, "number_staging_ub", kStagingRows, kBlockWords, 1),
        staging_ub_(core, "staging_ub", kStagingRows, kBlockWords, 1),
        row_ub_(core, "row_ub", 1, t.cols, t.row_stages, Role::kRelay) {}

  // ranks, of those slots, are global rows, and lost.
  void Move(Range piece, Range slots, UbTile<std::int32_t> ranks) {
    const bool beside = g_.permuted_probs != nullptr || g_.row_tokens != nullptr;
    if (g_.tokens.cols == 0 && !beside) return;  // Ranks alone are asked for.
    if (g_.first_row != 0) core_.AddScalar(ranks, ranks, static_cast<std::int32_t>(-g_.first_row));
    UbTile<float> probs;
    if (g_.permuted_probs != nullptr) {
      probs = probs_ub_.Next(piece.size(), ranks.cols());
      core_.Load(probs, MatrixOf(*g_.probs).Block(piece, slots));
    }
    // One row ahead: the next one comes while the K copies of this one go.
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      here_.clear();
      const UbTile<std::int32_t> places = ranks.Rows({i, i + 1});
      for (std::int64_t j = 0; j < ranks.cols(); ++j) {
        const std::int64_t place = core_.ReadScalar(places, j);
        if (place >= 0 && place < g_.permuted.rows) here_.push_back(place);
      }
      if (here_.empty()) continue;
      for (const Range cols : Split(g_.tokens.cols, part_cols_)) {
        const UbTile<T> next = row_ub_.Next(1, cols.size());
        core_.Load(next, g_.tokens.Block({piece.begin + i, piece.begin + i + 1}, cols));
        Store();
        row_ = next, there_.clear();
        for (const std::int64_t place : here_) there_.push_back(g_.permuted.Block({place, place + 1}, cols));
      }
      if (beside) StoreBeside(piece.begin + i, places, probs.given() ? probs.Rows({i, i + 1}) : probs);
    }
    Store();
    there_.clear();
  }

 private:
  // What goes beside a token's rows.
  void StoreBeside(std::int64_t token, UbTile<std::int32_t> places, UbTile<float> probs) {
    if (probs.given())
      core_.Scatter(MatrixOf(*g_.permuted_probs), places, probs, staging_ub_.Next(kStagingRows, kBlockWords));
    if (g_.row_tokens == nullptr) return;
    const UbTile<std::int32_t> number = number_ub_.Next(1, places.cols());
    core_.Fill(number, static_cast<std::int32_t>(token));
    core_.Scatter(MatrixOf(*g_.row_tokens), places, number,
                  number_staging_ub_.Next(kStagingRows, kBlockWords));
  }

  void Store() {
    const std::span<const Gm> rows(there_);
    for (std::size_t done = 0; done < rows.size(); done += V::kMaxSummands)
      core_.StoreEach(rows.subspan(done, std::min(V::kMaxSummands, rows.size() - done)), row_);
  }

  V& core_;
  const TokenPermuteOperands& g_;
  std::int64_t part_cols_;
  Ring<Buffer::kUB, float> probs_ub_;
  Ring<Buffer::kUB, std::int32_t> number_ub_, number_staging_ub_;
  Ring<Buffer::kUB, float> staging_ub_;
  Ring<Buffer::kUB, T> row_ub_;
  std::vector<std::int64_t> here_;  // Places of the token.
  UbTile<T> row_;                   // The row that goes next, and where to.
  std::vector<Gm> there_;
};

// Phase 2: ranks the slots of each chunk and moves its tokens. With size(e) rows for expert e (its slots, these rounded
// up, or the capacity), the first row of expert e in chunk c is
//   sum over e' < e of size(e') + sum over c' < c of the slots of e in chunk c',
// and slots take rows in order from there up to the next expert's first, which makes the ranking stable and drops what
// is beyond the capacity.
template <class T, VectorCore V>
void RankAndMoveKernel(V& core, const TokenPermuteOperands& g, const TokenPermuteTiling& t) {
  const std::int64_t top_k = g.topk_ids.cols, routes = std::min(top_k, t.routes);
  IntTiles<V> expert_ids(core, g.topk_ids, t.piece_tokens, routes, Role::kRelay);
  ZeroRows<V> zero_rows(core, g);
  TokenMover<T, V> mover(core, g, t);
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "chunk_counts_ub", t.sums_chunks ? 1 : t.chunks, g.experts,
                                            1);
  Ring<Buffer::kUB, std::int32_t> total_ub(core, "total_ub", 1, g.experts, 1),
      before_ub(core, "before_ub", 1, g.experts, 1), sizes_ub(core, "sizes_ub", 1, g.experts, 1),
      first_ub(core, "first_ub", 1, g.experts + 1, 1), next_ub(core, "next_ub", 1, g.experts, 1);
  Ring<Buffer::kUB, std::int32_t> ranks_ub(core, "ranks_ub", t.piece_tokens, routes, 2);
  // Only the table stops at a capacity.
  SortScratch<V> scratch(core, t.sorts && g.capacity == 0, t, routes, g.experts);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    const UbTile<std::int32_t> total = total_ub.Next(1, g.experts), before = before_ub.Next(1, g.experts);
    if (t.sums_chunks) {
      core.Load(total, g.chunk_sums.Rows({t.chunks, t.chunks + 1}));
      core.Load(before, g.chunk_sums.Rows({c, c + 1}));
    } else {
      const UbTile<std::int32_t> counts = counts_ub.Next(t.chunks, g.experts);
      core.Load(counts, g.chunk_counts);
      core.ColumnSum(total, counts);
      core.ColumnSum(before, counts.Rows({0, c}));
    }
    const UbTile<std::int32_t> first = first_ub.Next(1, g.experts + 1), next = next_ub.Next(1, g.experts);
    core.ExclusiveScan(first, RowsOfExperts(core, g, total, sizes_ub.Next(1, g.experts)), 0);
    const std::int64_t end = core.ReadScalar(first, g.experts);
    core.Add(next, first.Cols({0, g.experts}), before);
    if (c == 0 && g.expert_counts != nullptr) core.Store(MatrixOf(*g.expert_counts), total);
    if (c == 0 && g.expert_offsets != nullptr) core.Store(MatrixOf(*g.expert_offsets), first);
    if (g.pads()) {
      const Range mine = ShareOf(g.experts, c, t.chunks);
      for (std::int64_t e = mine.begin; e < mine.end; ++e) {
        const std::int64_t begin = core.ReadScalar(first, e) + core.ReadScalar(total, e);
        zero_rows.Fill({begin, core.ReadScalar(first, e + 1)});
      }
    }
    FillTail(zero_rows, g, end, c, t);

    const Range chunk = AtLeastOnce(Split(g.tokens.rows, t.chunk_tokens))[c];
    ForPiecesOf(chunk, t, top_k, [&](Range piece, Range slots) {
      const UbTile<std::int32_t> ids = expert_ids.Load(piece, slots);
      const UbTile<std::int32_t> ranks = ranks_ub.Next(piece.size(), ids.cols());
      if (g.capacity > 0) {
        core.RankWithin(ranks, next, first.Cols({1, g.experts + 1}), ids, {});
      } else {
        core.Rank(ranks, next, ids, {}, scratch.Tiles(ids.rows(), ids.cols()));
      }
      core.Store(g.sorted_indices.Block(piece, slots), ranks);
      mover.Move(piece, slots, ranks);
    });
  }
}

// The experts of slots, or, where they are not given, tiles of nothing.
template <class Tiling, VectorCore V>
IntTiles<V> ExpertsOfSlots(V& core, const GmTensor* topk_ids, const Gm& sorted_indices, const Tiling& t) {
  const Gm ids = topk_ids == nullptr ? sorted_indices.Cols({0, 0}) : MatrixOf(*topk_ids);
  return IntTiles<V>(core, ids, t.piece_tokens, std::min(ids.cols, t.routes));
}

struct TokenUnpermuteOperands {
  Gm permuted, sorted_indices;                               // (M, H), (T, K)
  const GmTensor* probs = nullptr;                           // (T, K)
  const GmTensor *bias = nullptr, *topk_ids = nullptr;       // (E, H) and (T, K), both or none
  const GmTensor *residual = nullptr, *residual2 = nullptr;  // (T, H)
  Gm out;                                                    // (T, H)
  std::int64_t first_row = 0;  // Of the global order, which the M rows begin with.
  // (M, 1) and (T, K), or null: slot_values(t, j) = row_values(row of the slot), 0 without a row.
  const GmTensor* row_values = nullptr;
  const GmTensor* slot_values = nullptr;
};

// out(t) = the residuals + sum over j of probs(t, j) * (permuted(sorted_indices(t, j)) + bias(topk_ids(t, j))). Each row is
// read once, each token written once; dropped slots and rows of probability 0 are not read.
template <class T, VectorCore V>
void TokenUnpermuteKernel(V& core, const TokenUnpermuteOperands& g, const TokenUnpermuteTiling& t) {
  const std::int64_t top_k = g.sorted_indices.cols, routes = std::min(top_k, t.routes);
  const bool whole = routes == top_k;  // All slots of a piece of tokens are here at once.
  Ring<Buffer::kUB, std::int32_t> places_ub(core, "places_ub", t.piece_tokens, routes, 2);
  Ring<Buffer::kUB, float> probs_ub(core, "probs_ub", t.piece_tokens, routes, 2);
  IntTiles<V> expert_ids = ExpertsOfSlots(core, g.topk_ids, g.sorted_indices, t);
  Ring<Buffer::kUB, T> row_ub(core, "row_ub", 1, t.cols, t.stages * static_cast<int>(t.rows), Role::kRelay);
  Ring<Buffer::kUB, float> sum_ub(core, "sum_ub", 1, t.cols, t.stages, Role::kRelay),
      scratch_ub(core, "scratch_ub", 1, t.cols, 1),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  const std::int64_t residuals = (g.residual != nullptr ? 1 : 0) + (g.residual2 != nullptr ? 1 : 0);
  const bool one_group = residuals + top_k * (g.bias != nullptr ? 2 : 1) <= t.rows;
  // Rows that are summed at once, where their sum stands and, after the last of a token, where it goes.
  struct Group {
    std::array<UbTile<T>, V::kMaxSummands> rows;
    std::array<float, V::kMaxSummands> weights;
    std::size_t count = 0;
    UbTile<float> sum;
    Accumulate accumulate = Accumulate::kNo;
    std::optional<Gm> out = {};
  };
  // With two stages the rows of a group are asked for before those of the one before it are summed.
  std::array<Group, 2> groups;
  Group *group = &groups[0], *before = &groups[1];
  bool waits = false;
  const auto sum_up = [&](const Group& some) {
    if (some.count > 0 || some.accumulate == Accumulate::kNo) {
      core.WeightedSum(some.sum, scratch_ub.Next(1, some.sum.cols()),
                       std::span<const UbTile<T>>(some.rows.data(), some.count),
                       std::span<const float>(some.weights.data(), some.count), some.accumulate);
    }
    if (some.out.has_value()) core.Store(*some.out, some.sum);
  };
  const auto finish = [&] {
    if (waits) sum_up(*before);
    waits = false;
  };
  const auto hand_on = [&] {
    finish();
    if (t.stages == 1) {
      sum_up(*group);
    } else {
      std::swap(group, before);
      group->sum = before->sum, waits = true;
    }
    group->count = 0, group->accumulate = Accumulate::kYes, group->out = {};
  };

  UbTile<std::int32_t> places, experts;
  UbTile<float> probs;
  const auto load_places = [&](Range tokens, Range slots) {
    places = places_ub.Next(tokens.size(), slots.size()), probs = probs_ub.Next(tokens.size(), slots.size());
    core.Load(places, g.sorted_indices.Block(tokens, slots));
    if (g.first_row != 0) core.AddScalar(places, places, static_cast<std::int32_t>(-g.first_row));
  };
  const auto load = [&](Range tokens, Range slots) {
    load_places(tokens, slots);
    if (g.probs != nullptr) core.Load(probs, MatrixOf(*g.probs).Block(tokens, slots));
    if (g.bias != nullptr) experts = expert_ids.Load(tokens, slots);
  };
  const auto gather = [&](Range tokens, Range slots) {
    const UbTile<float> values = probs_ub.Next(tokens.size(), slots.size());
    core.Gather(values, MatrixOf(*g.row_values), places, staging_ub.Next(kStagingRows, kBlockWords));
    core.Store(MatrixOf(*g.slot_values).Block(tokens, slots), values);
  };

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range piece : Split(Split(g.out.rows, t.chunk_tokens)[c], t.piece_tokens)) {
      if (whole) load(piece, {0, top_k});
      if (g.slot_values != nullptr) {
        for (const Range slots : AtLeastOnce(Split(top_k, routes))) {
          if (!whole) load_places(piece, slots);
          gather(piece, slots);
        }
      }

      for (std::int64_t i = 0; i < piece.size(); ++i) {
        const Range token{piece.begin + i, piece.begin + i + 1};
        for (const Range cols : Split(g.out.cols, t.cols)) {
          const Gm destination = g.out.Block(token, cols);
          group->sum = one_group ? sum_ub.Next(destination) : sum_ub.Next(1, cols.size());
          group->accumulate = Accumulate::kNo;
          const auto add = [&](const Gm& rows, std::int64_t index, float weight) {
            if (group->count == static_cast<std::size_t>(t.rows)) hand_on();
            UbTile<T>& row = group->rows[group->count];
            row = row_ub.Next(1, cols.size());
            core.Load(row, rows.Block({index, index + 1}, cols));
            group->weights[group->count++] = weight;
          };
          for (const GmTensor* residual : {g.residual, g.residual2}) {
            if (residual != nullptr) add(MatrixOf(*residual), piece.begin + i, 1.0f);
          }
          for (const Range slots : Split(top_k, routes)) {
            if (!whole) load(token, slots);
            const Range its = whole ? Range{i, i + 1} : Range{0, 1};
            const UbTile<std::int32_t> its_places = places.Rows(its);
            const UbTile<float> its_probs = probs.Rows(its);
            for (std::int64_t j = 0; j < slots.size(); ++j) {
              const std::int64_t place = core.ReadScalar(its_places, j);
              if (place < 0 || place >= g.permuted.rows) continue;
              const float weight = g.probs == nullptr ? 1.0f : core.ReadScalar(its_probs, j);
              if (weight == 0.0f) continue;
              add(g.permuted, place, weight);
              if (g.bias != nullptr) add(MatrixOf(*g.bias), core.ReadScalar(experts.Rows(its), j), weight);
            }
          }
          group->out = destination;
          hand_on();
        }
      }
    }
  }
  finish();
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_KERNEL_H_
