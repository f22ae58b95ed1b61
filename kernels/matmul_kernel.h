// The matmul algorithm: C = A B (+ bias). A is (M, K), B is (K, N), as views; transposes are in their strides.
#ifndef CUBIST_KERNELS_MATMUL_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_KERNEL_H_

#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

struct MatmulOperands {
  Operand a, b;
  const GmTensor* bias = nullptr;
  Gm c;
  std::int64_t k = 0;
};

// Each core takes blocks of C in the order of the tiling. A block stays in L0C for
// all of K: C is written once, A is read ceil(N / t.n) times and B ceil(M / t.m)
// times. An empty K is walked as one empty step, which starts the accumulator.
template <class T, CubeCore Core>
void MatmulKernel(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  Ring<Buffer::kL1, T> a_l1(core, "a_l1", t.m, t.k1, t.l1_stages, Role::kA);
  Ring<Buffer::kL1, T> b_l1(core, "b_l1", t.k1, t.n, t.l1_stages, Role::kB);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", t.k0, t.n, t.l0_stages, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c_l0", t.m, t.n, t.l0c_stages);
  Ring<Buffer::kBT, float> bias_bt(core, "bias_bt", 1, g.bias != nullptr ? t.n : 1, 1);

  for (const BlockCoord block : MyBlocks(t.grid, core)) {
    const Range m = Split(g.c.rows, t.m)[block.row], n = Split(g.c.cols, t.n)[block.col];
    const L0CTile<float> acc = c_l0.Next(m.size(), n.size());
    const BtTile<float> bias = bias_bt.Next(1, g.bias != nullptr ? n.size() : 1);
    if (g.bias != nullptr) core.Load(bias, MatrixOf(*g.bias).Cols(n));

    for (const Range k1 : AtLeastOnce(Split(g.k, t.k1))) {
      const L1Tile<T> a1 = a_l1.Next(m.size(), k1.size());
      const L1Tile<T> b1 = b_l1.Next(k1.size(), n.size());
      LoadOperand(core, a1, g.a.Block(m, k1));
      LoadOperand(core, b1, g.b.Block(k1, n));

      for (const Range k0 : AtLeastOnce(Split(k1.size(), t.k0))) {
        const L0ATile<T> a0 = a_l0.Next(m.size(), k0.size());
        const L0BTile<T> b0 = b_l0.Next(k0.size(), n.size());
        core.Load(a0, a1.Cols(k0));
        core.Load(b0, b1.Rows(k0));

        const bool first = k1.begin == 0 && k0.begin == 0;
        if (first && g.bias != nullptr) {
          core.Mmad(acc, a0, b0, bias);
        } else {
          core.Mmad(acc, a0, b0, first ? Accumulate::kNo : Accumulate::kYes);
        }
      }
    }
    core.Store(g.c.Block(m, n), acc);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_KERNEL_H_
