// The ranking of MoE routes where a table of all experts is too much: a stable radix sort by the digits of the expert ids,
// and the experts' counts and rows from its result.
#ifndef CUBIST_KERNELS_TOKEN_RANK_KERNEL_H_
#define CUBIST_KERNELS_TOKEN_RANK_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "kernels/token_permute_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {

// Routes (ids and slots) in the order of the digits so far.
struct OrderedRoutes {
  Gm ids, slots;  // (S, 1), S = T * K
};

// The elements of a column as a matrix, row by row.
inline Gm ColumnAsMatrix(const Gm& column, std::int64_t rows, std::int64_t cols) {
  return {column.tensor, column.offset, rows, cols, cols * column.row_stride, column.row_stride};
}
inline Gm MatrixAsColumn(const Gm& m) {  // Of adjacent rows.
  return {m.tensor, m.offset, m.rows * m.cols, 1, m.col_stride, 1};
}

struct RadixPassOperands {
  Gm ids;                         // (T, K): in the order so far
  const Gm* slots = nullptr;      // (T, K): likewise; null in the first pass, where slots are in order
  OrderedRoutes sorted;           // By this digit too.
  const Gm* slot_rows = nullptr;  // (S, 1), in the last pass: the rank of each slot, -1 for ids below 0
  Gm chunk_sums;
  IdBins digit;
};

// Routes to their ranks by a digit. Ids below 0 are the highest of all: a last digit holds one more bit than the experts.
template <VectorCore V>
void RadixPassKernel(V& core, const RadixPassOperands& p, const TokenPermuteTiling& t) {
  const std::int64_t top_k = p.ids.cols, routes = std::min(top_k, t.routes), bins = p.chunk_sums.cols;
  IntTiles<V> id_tiles(core, p.ids, t.piece_tokens, routes);
  Ring<Buffer::kUB, std::int32_t> slots_ub(core, "slots_ub", t.piece_tokens, routes, 2),
      ranks_ub(core, "ranks_ub", t.piece_tokens, routes, 2),
      flags_ub(core, "flags_ub", t.piece_tokens, routes, 1),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  Ring<Buffer::kUB, std::int32_t> ones_ub(core, "ones_ub", 1, routes, 1),
      count_ub(core, "count_ub", 1, routes + 1, 1);
  Ring<Buffer::kUB, std::int32_t> total_ub(core, "total_ub", 1, bins, 1),
      before_ub(core, "before_ub", 1, bins, 1), first_ub(core, "first_ub", 1, bins + 1, 1),
      next_ub(core, "next_ub", 1, bins, 1);
  const UbTile<std::int32_t> ones = ones_ub.Next(1, routes), count = count_ub.Next(1, routes + 1);
  core.Fill(ones, 1);
  core.ExclusiveScan(count, ones, 0);
  const auto slots_of = [&](Range piece, Range part) {
    const UbTile<std::int32_t> slots = slots_ub.Next(piece.size(), part.size());
    if (p.slots != nullptr) {
      core.Load(slots, p.slots->Block(piece, part));
    } else {
      for (std::int64_t i = 0; i < piece.size(); ++i) {
        core.AddScalar(slots.Rows({i, i + 1}), count.Cols({0, part.size()}),
                       static_cast<std::int32_t>((piece.begin + i) * top_k + part.begin));
      }
    }
    return slots;
  };
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    const UbTile<std::int32_t> total = total_ub.Next(1, bins), before = before_ub.Next(1, bins),
                               first = first_ub.Next(1, bins + 1), next = next_ub.Next(1, bins);
    core.Load(total, p.chunk_sums.Rows({t.chunks, t.chunks + 1}));
    core.Load(before, p.chunk_sums.Rows({c, c + 1}));
    core.ExclusiveScan(first, total, 0);
    core.Add(next, first.Cols({0, bins}), before);
    const Range chunk = AtLeastOnce(Split(p.ids.rows, t.chunk_tokens))[c];
    ForPiecesOf(chunk, t, top_k, [&](Range piece, Range part) {
      const UbTile<std::int32_t> ids = id_tiles.Load(piece, part), slots = slots_of(piece, part),
                                 ranks = ranks_ub.Next(piece.size(), part.size());
      core.Rank(ranks, next, ids, p.digit);
      core.Scatter(p.sorted.ids, ranks, ids, staging_ub.Next(kStagingRows, kBlockWords));
      core.Scatter(p.sorted.slots, ranks, slots, staging_ub.Next(kStagingRows, kBlockWords));
      if (p.slot_rows == nullptr) return;
      const UbTile<std::int32_t> flags = flags_ub.Next(piece.size(), part.size());
      core.AddScalar(flags, ids, 1);
      core.KeepWhere(ranks, ranks, flags);
      core.Scatter(*p.slot_rows, slots, ranks, staging_ub.Next(kStagingRows, kBlockWords));
    });
  }
}

// Where the routes of experts stand among those sorted by id. Asked for ascending experts.
template <VectorCore V>
class SortedRoutes {
 public:
  SortedRoutes(V& core, const Gm& ids) : core_(core), ids_(ids), id_ub_(core, "id_ub", 1, 1, 2) {}

  // The first route to `expert` or one behind it.
  std::int64_t FirstOf(std::int64_t expert) {
    std::int64_t end = ids_.rows;
    while (begin_ < end) {
      const std::int64_t middle = begin_ + (end - begin_) / 2;
      const UbTile<std::int32_t> id = id_ub_.Next(1, 1);
      core_.Load(id, ids_.Rows({middle, middle + 1}));
      const std::int64_t found = core_.ReadScalar(id, 0);
      if (found >= 0 && found < expert) {
        begin_ = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin_;
  }
  Range Of(Range experts) {
    const std::int64_t begin = FirstOf(experts.begin);
    return {begin, FirstOf(experts.end)};
  }

 private:
  V& core_;
  Gm ids_;
  std::int64_t begin_ = 0;
  Ring<Buffer::kUB, std::int32_t> id_ub_;
};

struct ExpertRangesOperands {
  OrderedRoutes routes;  // By expert.
  Gm expert_counts;      // (1, E)
  Gm range_rows;  // Workspace (1, ranges): rows of each range of t.range_experts, where experts are padded.
};

// The first rows of some experts, and where the last of all ends.
template <VectorCore V>
void StoreOffsets(V& core, const TokenPermuteOperands& g, Range experts, UbTile<std::int32_t> first) {
  const std::int64_t count = experts.size() + (experts.end == g.experts ? 1 : 0);
  core.Store(MatrixOf(*g.expert_offsets).Cols({experts.begin, experts.begin + count}),
             first.Cols({0, count}));
}

// The experts' counts by ranges of experts; where nothing is padded their offsets, else the rows of each range.
template <VectorCore V>
void CountRangesKernel(V& core, const TokenPermuteOperands& g, const ExpertRangesOperands& r,
                       const TokenPermuteTiling& t) {
  SortedRoutes<V> routes(core, r.routes.ids);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", 1, kSortedRoutes, 2),
      counts_ub(core, "counts_ub", 1, t.range_experts, 2), sizes_ub(core, "sizes_ub", 1, t.range_experts, 1),
      first_ub(core, "first_ub", 1, t.range_experts + 1, 2);
  const Split ranges(g.experts, t.range_experts);
  for (std::int64_t i = core.index(); i < ranges.count(); i += core.count()) {
    const Range experts = ranges[i], rows = routes.Of(experts);
    const UbTile<std::int32_t> counts = counts_ub.Next(1, experts.size());
    core.Fill(counts, 0);
    for (const Range piece : Split(rows, kSortedRoutes)) {
      const UbTile<std::int32_t> ids = ids_ub.Next(1, piece.size());
      core.Load(ids, r.routes.ids.Rows(piece).Transposed());
      core.Histogram(counts, ids, {.first = static_cast<std::int32_t>(experts.begin)});
    }
    core.Store(r.expert_counts.Cols(experts), counts);
    const UbTile<std::int32_t> first = first_ub.Next(1, experts.size() + 1),
                               sizes = RowsOfExperts(core, g, counts, sizes_ub.Next(1, experts.size()));
    if (g.pads()) {
      core.ExclusiveScan(first, sizes, 0);
      core.Store(r.range_rows.Cols({i, i + 1}), first.Cols({experts.size(), experts.size() + 1}));
    } else if (g.expert_offsets != nullptr) {
      core.ExclusiveScan(first, sizes, static_cast<std::int32_t>(rows.begin));
      StoreOffsets(core, g, experts, first);
    }
  }
}

// The sum of the first of the ranges' rows.
template <VectorCore V>
class RowsOfRanges {
 public:
  RowsOfRanges(V& core, const Gm& range_rows)
      : core_(core),
        range_rows_(range_rows),
        rows_ub_(core, "range_rows_ub", 1, kSummedRanges, 1),
        sums_ub_(core, "range_sums_ub", 1, kSummedRanges + 1, 1) {}

  std::int64_t Before(std::int64_t range) {
    std::int64_t sum = 0;
    for (const Range part : Split(range, kSummedRanges)) {
      const UbTile<std::int32_t> rows = rows_ub_.Next(1, part.size()),
                                 sums = sums_ub_.Next(1, part.size() + 1);
      core_.Load(rows, range_rows_.Cols(part));
      core_.ExclusiveScan(sums, rows, static_cast<std::int32_t>(sum));
      sum = core_.ReadScalar(sums, part.size());
    }
    return sum;
  }
  std::int64_t All() { return Before(range_rows_.cols); }

 private:
  V& core_;
  Gm range_rows_;
  Ring<Buffer::kUB, std::int32_t> rows_ub_, sums_ub_;
};

// Where experts are padded: the rows of their slots, and zeros in the others.
template <VectorCore V>
void PlaceRoutesKernel(V& core, const TokenPermuteOperands& g, const ExpertRangesOperands& r,
                       const TokenPermuteTiling& t) {
  const Gm slot_rows = MatrixAsColumn(g.sorted_indices);
  SortedRoutes<V> routes(core, r.routes.ids);
  RowsOfRanges<V> range_rows(core, r.range_rows);
  ZeroRows<V> zero_rows(core, g);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", 1, kSortedRoutes, 2),
      slots_ub(core, "slots_ub", 1, kSortedRoutes, 2), ranks_ub(core, "ranks_ub", 1, kSortedRoutes, 2),
      staging_ub(core, "staging_ub", kStagingRows, kBlockWords, 1);
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, t.range_experts, 1),
      sizes_ub(core, "sizes_ub", 1, t.range_experts, 1),
      first_ub(core, "first_ub", 1, t.range_experts + 1, 1), next_ub(core, "next_ub", 1, t.range_experts, 1);
  const Split ranges(g.experts, t.range_experts);
  for (std::int64_t i = core.index(); i < ranges.count(); i += core.count()) {
    const Range experts = ranges[i], rows = routes.Of(experts);
    const std::int64_t n = experts.size();
    const UbTile<std::int32_t> counts = counts_ub.Next(1, n), first = first_ub.Next(1, n + 1),
                               next = next_ub.Next(1, n);
    core.Load(counts, r.expert_counts.Cols(experts));
    core.ExclusiveScan(first, RowsOfExperts(core, g, counts, sizes_ub.Next(1, n)),
                       static_cast<std::int32_t>(range_rows.Before(i)));
    core.AddScalar(next, first.Cols({0, n}), 0);
    if (g.expert_offsets != nullptr) StoreOffsets(core, g, experts, first);
    for (std::int64_t e = 0; e < n; ++e) {
      const std::int64_t begin = core.ReadScalar(first, e) + core.ReadScalar(counts, e);
      zero_rows.Fill({begin, core.ReadScalar(first, e + 1)});
    }
    for (const Range piece : Split(rows, kSortedRoutes)) {
      const UbTile<std::int32_t> ids = ids_ub.Next(1, piece.size()), slots = slots_ub.Next(1, piece.size()),
                                 ranks = ranks_ub.Next(1, piece.size());
      core.Load(ids, r.routes.ids.Rows(piece).Transposed());
      core.Load(slots, r.routes.slots.Rows(piece).Transposed());
      const IdBins bins{.first = static_cast<std::int32_t>(experts.begin)};
      if (g.capacity > 0) {
        core.RankWithin(ranks, next, first.Cols({1, n + 1}), ids, bins);
      } else {
        core.Rank(ranks, next, ids, bins);
      }
      core.Scatter(slot_rows, slots, ranks, staging_ub.Next(kStagingRows, kBlockWords));
    }
  }
}

// The last phase: tokens to the rows that their slots have, and zeros behind the last expert's.
template <class T, VectorCore V>
void MoveKernel(V& core, const TokenPermuteOperands& g, const ExpertRangesOperands& r,
                const TokenPermuteTiling& t) {
  SortedRoutes<V> routes(core, r.routes.ids);
  RowsOfRanges<V> range_rows(core, r.range_rows);
  ZeroRows<V> zero_rows(core, g);
  const std::int64_t top_k = g.sorted_indices.cols;
  Ring<Buffer::kUB, std::int32_t> ranks_ub(core, "ranks_ub", t.piece_tokens, std::min(top_k, t.routes), 2);
  TokenMover<T, V> mover(core, g, t);
  const std::int64_t end = g.pads() ? range_rows.All() : routes.FirstOf(g.experts);
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    FillTail(zero_rows, g, end, c, t);
    const Range chunk = AtLeastOnce(Split(g.tokens.rows, t.chunk_tokens))[c];
    ForPiecesOf(chunk, t, top_k, [&](Range piece, Range slots) {
      const UbTile<std::int32_t> ranks = ranks_ub.Next(piece.size(), slots.size());
      core.Load(ranks, g.sorted_indices.Block(piece, slots));
      mover.Move(piece, slots, ranks);
    });
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_RANK_KERNEL_H_
