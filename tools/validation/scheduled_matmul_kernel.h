// A matrix product by a schedule that somebody measured: C = A B^T, fp16, as the pto-dsl guide's four steps walk it, or
// asc-devkit's matrix products, whose cores have rectangles of blocks.
#ifndef CUBIST_TOOLS_VALIDATION_SCHEDULED_MATMUL_KERNEL_H_
#define CUBIST_TOOLS_VALIDATION_SCHEDULED_MATMUL_KERNEL_H_

#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"

namespace cubist {

// A block of C, (m, n), stays in L0C. K is walked in blocks of k1: one load of A, (m, k1), and two of B, which
// are halves of k1 deep. L0 is walked in steps of k0.
struct MatmulSchedule {
  std::int64_t m = 128, n = 256, k1 = 512, k0 = 64;
  int stages = 2;  // of A in L1, of halves of B in L1, and of L0: 1 or 2
  BlockGrid grid;
  // Blocks of a core's rectangle, which it goes down column by column, as the rectangles go to cores; 0: the grid's blocks are
  // dealt one by one.
  std::int64_t core_rows = 0, core_cols = 0;
  bool stagger = false;  // Cores begin at different blocks of k.

  std::int64_t tasks() const { return core_rows > 0 ? grid.count() / (core_rows * core_cols) : grid.count(); }
};

template <class Core>
std::vector<BlockCoord> BlocksOf(const MatmulSchedule& s, const Core& core) {
  std::vector<BlockCoord> blocks;
  if (s.core_rows == 0) {
    for (const BlockCoord block : MyBlocks(s.grid, core)) blocks.push_back(block);
    return blocks;
  }
  const std::int64_t down = s.grid.rows / s.core_rows;
  const std::int64_t row = core.index() % down * s.core_rows, col = core.index() / down * s.core_cols;
  for (std::int64_t j = 0; j < s.core_cols; ++j) {
    for (std::int64_t i = 0; i < s.core_rows; ++i) blocks.push_back({row + i, col + j});
  }
  return blocks;
}

// Loads run ahead: A of the next K block is issued before this one is multiplied.
template <CubeCore Core>
void ScheduledMatmul(Core& core, const Gm& a, const Gm& b, const Gm& c, const MatmulSchedule& s) {
  const std::int64_t half = s.k1 / 2;
  Ring<Buffer::kL1, F16> a_l1(core, "a_l1", s.m, s.k1, s.stages, Role::kA);
  Ring<Buffer::kL1, F16> b_l1(core, "b_l1", half, s.n, s.stages, Role::kB);
  Ring<Buffer::kL0A, F16> a_l0(core, "a_l0", s.m, s.k0, s.stages, Role::kA);
  Ring<Buffer::kL0B, F16> b_l0(core, "b_l0", s.k0, s.n, s.stages, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c_l0", s.m, s.n, 1);

  for (const BlockCoord block : BlocksOf(s, core)) {
    const Range m = Split(a.rows, s.m)[block.row], n = Split(b.cols, s.n)[block.col];
    const L0CTile<float> acc = c_l0.Next(m.size(), n.size());
    const auto load_a = [&](Range k) {
      const L1Tile<F16> a1 = a_l1.Next(m.size(), k.size());
      core.Load(a1, a.Block(m, k));
      return a1;
    };
    const auto load_b = [&](Range k) {
      const L1Tile<F16> b1 = b_l1.Next(k.size(), n.size());
      core.Load(b1, b.Block(k, n));
      return b1;
    };
    const auto multiply = [&](L1Tile<F16> a1, L1Tile<F16> b1, bool first) {
      for (const Range k0 : Split(b1.rows(), s.k0)) {
        const L0ATile<F16> a0 = a_l0.Next(m.size(), k0.size());
        const L0BTile<F16> b0 = b_l0.Next(k0.size(), n.size());
        core.Load(a0, a1.Cols(k0));
        core.Load(b0, b1.Rows(k0));
        core.Mmad(acc, a0, b0, first && k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
      }
    };

    const auto blocks = Split(a.cols, s.k1);
    const std::int64_t start = s.stagger ? core.index() % blocks.count() : 0;
    const auto block_of_k = [&](std::int64_t i) { return blocks[(start + i) % blocks.count()]; };
    L1Tile<F16> a1 = load_a(block_of_k(0));
    for (std::int64_t i = 0; i < blocks.count(); ++i) {
      const Range k1 = block_of_k(i);
      const bool last = i + 1 == blocks.count();
      const auto halves = Split(k1.size(), half);
      const Range first{k1.begin, k1.begin + halves[0].size()}, second{first.end, k1.end};
      const L1Tile<F16> b1 = load_b(first);
      if (s.stages == 1) {  // One buffer: the second half takes the first one's place.
        multiply(a1.Cols({0, first.size()}), b1, i == 0);
        if (second.size() > 0) multiply(a1.Cols({first.size(), k1.size()}), load_b(second), false);
        if (!last) a1 = load_a(block_of_k(i + 1));
        continue;
      }
      L1Tile<F16> b2 = b1, next = a1;
      if (second.size() > 0) b2 = load_b(second);
      if (!last) next = load_a(block_of_k(i + 1));
      multiply(a1.Cols({0, first.size()}), b1, i == 0);
      if (second.size() > 0) multiply(a1.Cols({first.size(), k1.size()}), b2, false);
      a1 = next;
    }
    core.Store(c.Block(m, n), acc);
  }
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_SCHEDULED_MATMUL_KERNEL_H_
