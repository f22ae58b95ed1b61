// The matmul algorithm: C = A B (+ bias), block by block. Transposes are in the operands' strides.
#ifndef CUBIST_KERNELS_MATMUL_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_KERNEL_H_

#include <cstdint>
#include <utility>

#include "kernels/epilogue_kernel.h"
#include "kernels/matmul_operands_kernel.h"
#include "kernels/matmul_prefetch_kernel.h"
#include "kernels/multiply_block_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// Each core takes blocks of C in the order of the tiling. C is written once, A is read ceil(N / t.n) times, what of it is
// kept once for every strip of a core's blocks, and B ceil(M / t.m) times. Where k is split, every block is as many, each a
// part of the sum, to be added by AddParts.
template <class T, AiCore Core>
void MatmulKernel(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  MatmulRings<T> rings(core, t, g.bias != nullptr, g.k);
  if (t.prefetch > 0) Prefetch<T>(core, g, t);
  const Epilogue plain;
  EpilogueStage<Core> stage(core, t, t.splits > 1 ? plain : g.epilogue);
  const std::int64_t blocks = t.grid.count();
  const CoreTasks tasks(t.grid, t.deal(), t.tasks(g.batches()), core.index(), core.count());
  std::pair<std::int64_t, std::int64_t> rows_in_l1{-1, -1};  // of which matrix
  for (std::int64_t i = 0; i < tasks.count(); ++i) {
    const std::int64_t task = tasks[i];
    const BlockCoord block = t.grid.At(task % blocks);
    const std::int64_t split = task / blocks % t.splits, batch = task / blocks / t.splits;
    const Range m = Split(g.c->sizes[2], t.m)[block.row], n = Split(g.c->sizes[3], t.n)[block.col];
    const Range k = t.splits > 1 ? Split(g.k, t.part_k)[split] : Range{0, g.k};
    MatmulBlock product = g.Block(batch, m, n, k);
    // K-staggering: blocks that run side by side read A and B at different places. The start comes from the block, not
    // from the core, so that the bits stay.
    if (t.stagger) product.first_a = (block.row + block.col) % t.a_tiles(g.k);
    const std::pair<std::int64_t, std::int64_t> rows{batch, block.row};
    product.a_stands = t.keep_a > 0 && std::exchange(rows_in_l1, rows) == rows;
    const EpilogueBlock target = t.splits > 1
                                     ? EpilogueBlock{MatrixOf(*g.parts, split, batch).Block(m, n), {}, {}}
                                     : g.Target(batch, m, n);
    MultiplyBlock(core, rings, product, t,
                  [&](L0CTile<float> part, Range cols) { stage.Store(part, target.Cols(cols)); });
  }
}

// C = what the epilogue makes of the parts' sum, in ascending order.
template <VectorCore Core>
void AddParts(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  EpilogueLane<Core> lane(core, t, g.epilogue, t.splits);
  const BlockGrid strips{CeilDiv(g.c->sizes[2], t.ub_rows), t.grid.cols};
  const std::int64_t tasks = g.batches() * strips.count();
  for (std::int64_t task = core.index(); task < tasks; task += core.count()) {
    const BlockCoord at = strips.At(task % strips.count());
    const std::int64_t batch = task / strips.count();
    const Range m = Split(g.c->sizes[2], t.ub_rows)[at.row], n = Split(g.c->sizes[3], t.n)[at.col];
    const UbTile<float> sum = lane.x_ub.Next(m.size(), n.size());
    core.Load(sum, MatrixOf(*g.parts, 0, batch).Block(m, n));
    for (std::int64_t split = 1; split < t.splits; ++split) {
      const UbTile<float> part = lane.part_ub.Next(m.size(), n.size());
      core.Load(part, MatrixOf(*g.parts, split, batch).Block(m, n));
      core.Add(sum, sum, part);
    }
    const EpilogueBlock target = g.Target(batch, m, n);
    lane.LoadBias(target.bias);
    lane.Finish(sum, target);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_KERNEL_H_
