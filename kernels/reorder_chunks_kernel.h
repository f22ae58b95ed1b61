// Chunks of rows from rank-major to expert-major order, and back.
#ifndef CUBIST_KERNELS_REORDER_CHUNKS_KERNEL_H_
#define CUBIST_KERNELS_REORDER_CHUNKS_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "kernels/token_permute_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/reorder_chunks_tiling.h"

namespace cubist {

struct ReorderChunksOperands {
  Gm tokens, out;                           // (A, H)
  Gm chunk_counts;                          // (N, E)
  Gm rank_starts;                           // Workspace (1, N * E + 1): first rows of the chunks, rank-major,
  Gm expert_starts;                         // workspace (1, N * E): and expert-major, listed likewise.
  const GmTensor* probs = nullptr;          // (A, 1), given with
  const GmTensor* out_probs = nullptr;      // (A, 1)
  const GmTensor* row_ids = nullptr;        // (A, 1)
  const GmTensor* expert_counts = nullptr;  // (E)
  bool inverse = false;                     // tokens are expert-major, out is rank-major.
};

// A matrix as few long rows: one, where its rows stand end to end.
inline Gm AsLists(Gm m) {
  if (m.col_stride != 1 || m.row_stride != m.cols) return m;
  m.cols *= m.rows, m.rows = 1, m.row_stride = m.cols;
  return m;
}

// Phase 1, on one core: where the chunks begin in either order.
template <VectorCore V>
void ChunkStartsKernel(V& core, const ReorderChunksOperands& g, const ReorderChunksTiling& t) {
  IntTiles<V> counts_of(core, g.chunk_counts, t.piece_ranks, t.experts);
  Ring<Buffer::kUB, std::int32_t> total_ub(core, "total_ub", 1, t.experts, 1),
      part_ub(core, "part_ub", 1, t.experts, 1), next_ub(core, "next_ub", 1, t.experts, 2);
  Ring<Buffer::kUB, std::int32_t> first_ub(core, "first_ub", 1, t.experts + 1, 2),
      scan_ub(core, "scan_ub", 1, t.chunks + 1, 2);
  const Split ranks = Split(g.chunk_counts.rows, t.piece_ranks);
  std::int64_t rows_before = 0;
  for (const Range experts : Split(g.chunk_counts.cols, t.experts)) {
    const UbTile<std::int32_t> total = total_ub.Next(1, experts.size()),
                               part = part_ub.Next(1, experts.size());
    core.Fill(total, 0);
    for (const Range piece : ranks) {
      core.ColumnSum(part, counts_of.Load(piece, experts));
      core.Add(total, total, part);
    }
    const UbTile<std::int32_t> first = first_ub.Next(1, experts.size() + 1);
    core.ExclusiveScan(first, total, static_cast<std::int32_t>(rows_before));
    rows_before = core.ReadScalar(first, experts.size());
    if (g.expert_counts != nullptr) core.Store(MatrixOf(*g.expert_counts).Cols(experts), total);
    UbTile<std::int32_t> at = first.Cols({0, experts.size()});
    for (const Range piece : ranks) {
      const UbTile<std::int32_t> counts = counts_of.Load(piece, experts);
      for (std::int64_t n = 0; n < piece.size(); ++n) {
        const std::int64_t chunk = (piece.begin + n) * g.chunk_counts.cols + experts.begin;
        core.Store(g.expert_starts.Cols({chunk, chunk + experts.size()}), at);
        const UbTile<std::int32_t> next = next_ub.Next(1, experts.size());
        core.Add(next, at, counts.Rows({n, n + 1}));
        at = next;
      }
    }
  }
  rows_before = 0;
  const Gm lists = AsLists(g.chunk_counts);
  IntTiles<V> list_of(core, lists, 1, t.chunks);
  for (std::int64_t n = 0; n < lists.rows; ++n) {
    for (const Range list : Split(lists.cols, t.chunks)) {
      const UbTile<std::int32_t> scan = scan_ub.Next(1, list.size() + 1);
      core.ExclusiveScan(scan, list_of.Load({n, n + 1}, list), static_cast<std::int32_t>(rows_before));
      rows_before = core.ReadScalar(scan, list.size());
      const std::int64_t chunk = n * lists.cols + list.begin;
      core.Store(g.rank_starts.Cols({chunk, chunk + list.size() + 1}), scan);
    }
  }
}

// Phase 2: rows are dealt to cores in equal shares of the rank-major order, and move in tiles inside a chunk.
template <class T, VectorCore V>
void MoveChunksKernel(V& core, const ReorderChunksOperands& g, const ReorderChunksTiling& t) {
  Ring<Buffer::kUB, T> rows_ub(core, "rows_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> probs_ub(core, "probs_ub", 1, t.rows, 2);
  Ring<Buffer::kUB, std::int32_t> ones_ub(core, "ones_ub", 1, t.rows, 1),
      ids_ub(core, "ids_ub", 1, t.rows + 1, 2);
  Ring<Buffer::kUB, std::int32_t> rank_starts_ub(core, "rank_starts_ub", 1, t.chunks + 1, 2),
      expert_starts_ub(core, "expert_starts_ub", 1, t.chunks, 2);
  const UbTile<std::int32_t> ones = ones_ub.Next(1, t.rows);
  if (g.row_ids != nullptr) core.Fill(ones, 1);
  const auto move = [&](Range from, std::int64_t to) {
    const Range dst{to, to + from.size()};
    for (const Range cols : Split(g.tokens.cols, t.cols)) {
      const UbTile<T> tile = rows_ub.Next(from.size(), cols.size());
      core.Load(tile, g.tokens.Block(from, cols));
      core.Store(g.out.Block(dst, cols), tile);
    }
    if (g.out_probs != nullptr) {
      const UbTile<float> probs = probs_ub.Next(1, from.size());
      core.Load(probs, MatrixOf(*g.probs).Rows(from).Transposed());
      core.Store(MatrixOf(*g.out_probs).Rows(dst).Transposed(), probs);
    }
    if (g.row_ids != nullptr) {
      const UbTile<std::int32_t> ids = ids_ub.Next(1, from.size() + 1);
      core.ExclusiveScan(ids, ones.Cols({0, from.size()}), static_cast<std::int32_t>(from.begin));
      core.Store(MatrixOf(*g.row_ids).Rows(dst).Transposed(), ids.Cols({0, from.size()}));
    }
  };
  const Range mine = ShareOf(g.tokens.rows, core.index(), core.count());
  for (const Range chunks : Split(g.expert_starts.cols, t.chunks)) {
    const UbTile<std::int32_t> starts = rank_starts_ub.Next(1, chunks.size() + 1);
    core.Load(starts, g.rank_starts.Cols({chunks.begin, chunks.end + 1}));
    if (core.ReadScalar(starts, 0) >= mine.end) return;
    if (core.ReadScalar(starts, chunks.size()) <= mine.begin) continue;
    const UbTile<std::int32_t> expert_starts = expert_starts_ub.Next(1, chunks.size());
    core.Load(expert_starts, g.expert_starts.Cols(chunks));
    // The first chunk that ends behind the first of my rows.
    std::int64_t c = 0;
    for (std::int64_t end = chunks.size(); c < end;) {
      const std::int64_t middle = (c + end) / 2;
      core.ReadScalar(starts, middle + 1) <= mine.begin ? c = middle + 1 : end = middle;
    }
    for (std::int64_t start = 0; c < chunks.size(); ++c) {
      start = core.ReadScalar(starts, c);
      if (start >= mine.end) return;
      const Range rows{std::max(start, mine.begin), std::min(core.ReadScalar(starts, c + 1), mine.end)};
      if (rows.empty()) continue;
      const std::int64_t offset = core.ReadScalar(expert_starts, c) - start;
      for (const Range part : Split(rows.size(), t.rows)) {
        const Range by_rank{rows.begin + part.begin, rows.begin + part.end};
        const Range by_expert{by_rank.begin + offset, by_rank.end + offset};
        g.inverse ? move(by_expert, by_rank.begin) : move(by_rank, by_expert.begin);
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_REORDER_CHUNKS_KERNEL_H_
