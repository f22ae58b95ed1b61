// MultiplyBlock: one block of a product, left in L0C. The part that every kernel of the matmul family shares.
#ifndef CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_
#define CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_

#include <cstdint>
#include <vector>

#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// The rings of a Cube core that multiplies blocks of up to (t.m, t.n).
template <class T>
struct MatmulRings {
  template <CubeCore Core>
  MatmulRings(Core& core, const MatmulTiling& t, bool with_bias, std::int64_t k = 0)
      : a_l1(core, "a_l1", t.m, t.k1, t.a_stages(k), Role::kA),
        b_l1(core, "b_l1", t.k1, t.n, t.l1_stages, t.b_once ? Role::kBOnce : Role::kB),
        a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA),
        b_l0(core, "b_l0", t.k0, t.n, t.l0_stages, Role::kB),
        c_l0(core, "c_l0", t.m, t.n, t.l0c_stages, Role::kRelay),
        bias_bt(core, "bias_bt", 1, with_bias ? t.n : 1, 1) {}

  std::vector<L1Tile<T>> a_kept;  // Of a block that keeps A: its tiles, by their step along k.
  Ring<Buffer::kL1, T> a_l1, b_l1;
  Ring<Buffer::kL0A, T> a_l0;
  Ring<Buffer::kL0B, T> b_l0;
  Ring<Buffer::kL0C, float> c_l0;
  Ring<Buffer::kBT, float> bias_bt;
};

// What one block of C, (m, n), is made of: all of k.
struct MatmulBlock {
  Operand a;  // (m, k)
  Operand b;  // (k, n)
  Gm bias;    // (1, n), added to every row; without a tensor there is none.
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t first_step =
      0;                  // of k, in steps of t.k1: where the walk along k begins. It ends in front of it.
  bool a_stands = false;  // Its rows of A are in rings.a_kept: those of the block before.
};

// a * b + bias in an accumulator that stays in L0C for all of k, in steps of t.k1 from GM to L1 and of t.k0 from
// L1 to L0. An empty k is walked as one empty step, which starts the accumulator.
//
// Two-level pipelining: a tile comes into L1 in pieces of t.piece() along k, so that L0 and the Cube go on with the
// first piece while the others are under way.
template <class T, CubeCore Core>
L0CTile<float> MultiplyBlock(Core& core, MatmulRings<T>& rings, const MatmulBlock& block,
                             const MatmulTiling& t) {
  const bool with_bias = block.bias.tensor != nullptr;
  const L0CTile<float> acc = rings.c_l0.Next(block.m, block.n);
  const BtTile<float> bias = rings.bias_bt.Next(1, with_bias ? block.n : 1);
  if (with_bias) core.Load(bias, block.bias);

  const Split steps = AtLeastOnce(Split(block.k, t.k1));
  if (t.keep_a) rings.a_kept.resize(static_cast<std::size_t>(steps.count()));
  for (std::int64_t i = 0; i < steps.count(); ++i) {
    const std::int64_t step = (block.first_step + i) % steps.count();
    const Range k1 = steps[step];
    const auto kept = static_cast<std::size_t>(step);
    const L1Tile<T> a1 = block.a_stands ? rings.a_kept[kept] : rings.a_l1.Next(block.m, k1.size());
    if (t.keep_a) rings.a_kept[kept] = a1;
    const L1Tile<T> b1 = rings.b_l1.Next(k1.size(), block.n);
    for (const Range piece : AtLeastOnce(Split(k1.size(), t.piece()))) {
      const Range k{k1.begin + piece.begin, k1.begin + piece.end};
      if (!block.a_stands) LoadOperand(core, a1.Cols(piece), block.a.Block({0, block.m}, k));
      LoadOperand(core, b1.Rows(piece), block.b.Block(k, {0, block.n}));
    }

    for (const Range k0 : AtLeastOnce(Split(k1.size(), t.k0))) {
      const L0ATile<T> a0 = rings.a_l0.Next(block.m, k0.size());
      const L0BTile<T> b0 = rings.b_l0.Next(k0.size(), block.n);
      core.Load(a0, a1.Cols(k0));
      core.Load(b0, b1.Rows(k0));

      const bool first = i == 0 && k0.begin == 0;
      if (first && with_bias) {
        core.Mmad(acc, a0, b0, bias);
      } else {
        core.Mmad(acc, a0, b0, first ? Accumulate::kNo : Accumulate::kYes);
      }
    }
  }
  return acc;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_
