// MultiplyBlock: one block of a product, in L0C. The part that every kernel of the matmul family shares.
#ifndef CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_
#define CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
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
      : a_l1(core, "a_l1", t.a_tiles(k) > t.keep_a ? t.m : 0, t.a_k1(), t.l1_stages,
             t.n <= kFewColumns ? Role::kAFew : Role::kA),
        b_l1(core, "b_l1", t.k1, t.n, t.l1_stages, t.b_once ? Role::kBOnce : Role::kB),
        a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA),
        b_l0(core, "b_l0", t.k0, t.part_n(), t.l0_stages, Role::kB),
        c_l0(core, "c_l0", t.m, t.part_n(), t.c_parts * t.l0c_stages, Role::kRelay),
        bias_bt(core, "bias_bt", 1, with_bias ? t.n : 1, 1) {
    if (t.keep_a == 0) return;
    kept_l1.emplace(core, "kept_l1", t.m, t.a_k1(), t.keep_a, Role::kA);
    kept.resize(static_cast<std::size_t>(t.keep_a));
  }

  std::optional<Ring<Buffer::kL1, T>> kept_l1;
  std::vector<L1Tile<T>> kept;  // The first tiles along k of a block's rows of A.
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
  std::int64_t first_a = 0;  // Tile of A where the walk along k begins. It ends in front of it.
  bool a_stands = false;     // What is kept of its rows of A is that of the block before.

  // Its sum over some of k alone, without the bias.
  MatmulBlock Part(Range part) const {
    MatmulBlock block;
    block.a = a.Block({0, m}, part), block.b = b.Block(part, {0, n});
    block.m = m, block.n = n, block.k = part.size();
    return block;
  }
};

// A block's tile of A in L1, and whether it is yet to be loaded.
template <class T>
struct BlockTile {
  L1Tile<T> tile;
  bool load = true;
};
template <class T>
BlockTile<T> NextA(MatmulRings<T>& rings, const MatmulBlock& block, std::int64_t number, std::int64_t cols) {
  const auto at = static_cast<std::size_t>(number);
  if (at >= rings.kept.size()) return {rings.a_l1.Next(block.m, cols)};
  if (!block.a_stands) rings.kept[at] = rings.kept_l1->Next(block.m, cols);
  return {rings.kept[at], !block.a_stands};
}

// Brings a step of k, `k1`, into L1 piece by piece: two-level pipelining, so that L0 and the Cube go on with the first
// piece while the others are under way. A tile of A that is longer than a step, `of_a`, comes whole with the first.
template <class T, CubeCore Core>
void LoadStep(Core& core, const MatmulBlock& block, const BlockTile<T>& a1, Range of_a, L1Tile<T> b1,
              Range k1, const MatmulTiling& t) {
  const bool whole = t.a_span > 1, loads_a = a1.load && (!whole || k1.begin == of_a.begin);
  for (const Range piece : AtLeastOnce(Split(k1, t.piece()))) {
    const Range a = whole ? of_a : piece;
    if (loads_a) LoadOperand(core, a1.tile.Cols(a.From(of_a.begin)), block.a.Block({0, block.m}, a));
    LoadOperand(core, b1.Rows(piece.From(k1.begin)), block.b.Block(piece, {0, block.n}));
  }
}

// acc (+)= a1 * b1 (+ bias) through L0. The first step of k starts the accumulator.
template <class T, CubeCore Core>
void MultiplyStep(Core& core, MatmulRings<T>& rings, L0CTile<float> acc, L1Tile<T> a1, L1Tile<T> b1,
                  const BtTile<float>* bias, bool first, const MatmulTiling& t) {
  for (const Range k0 : AtLeastOnce(Split(b1.rows(), t.k0))) {
    const L0ATile<T> a0 = rings.a_l0.Next(a1.rows(), k0.size());
    const L0BTile<T> b0 = rings.b_l0.Next(k0.size(), b1.cols());
    core.Load(a0, a1.Cols(k0));
    core.Load(b0, b1.Rows(k0));
    const bool starts = first && k0.begin == 0;
    if (starts && bias != nullptr) {
      core.Mmad(acc, a0, b0, *bias);
    } else {
      core.Mmad(acc, a0, b0, starts ? Accumulate::kNo : Accumulate::kYes);
    }
  }
}

// a * b + bias in accumulators that stay in L0C for all of k, in steps of t.k1 from GM to L1 and of t.k0 from
// L1 to L0. An empty k is walked as one empty step, which starts them. The block's columns are computed in t.c_parts
// parts, each of which finished(part, cols) takes away as soon as it is complete: FIX is at one while the Cube is at the
// next.
template <class T, CubeCore Core, class Finished>
void MultiplyBlock(Core& core, MatmulRings<T>& rings, const MatmulBlock& block, const MatmulTiling& t,
                   Finished&& finished) {
  const bool with_bias = block.bias.tensor != nullptr;
  const Split parts = AtLeastOnce(Split(block.n, t.part_n()));
  std::array<L0CTile<float>, MatmulTiling::kMostParts> acc;
  for (std::int64_t p = 0; p < parts.count(); ++p)
    acc[static_cast<std::size_t>(p)] = rings.c_l0.Next(block.m, parts[p].size());
  const BtTile<float> bias = rings.bias_bt.Next(1, with_bias ? block.n : 1);
  if (with_bias) core.Load(bias, block.bias);

  const Split tiles = AtLeastOnce(Split(block.k, t.a_k1()));
  for (std::int64_t i = 0; i < tiles.count(); ++i) {
    const std::int64_t number = (block.first_a + i) % tiles.count();
    const Range of_a = tiles[number];
    const BlockTile<T> a1 = NextA(rings, block, number, of_a.size());
    for (const Range k1 : AtLeastOnce(Split(of_a, t.k1))) {
      const L1Tile<T> b1 = rings.b_l1.Next(k1.size(), block.n);
      LoadStep(core, block, a1, of_a, b1, k1, t);
      const bool first = i == 0 && k1.begin == of_a.begin,
                 last = i + 1 == tiles.count() && k1.end == of_a.end;
      for (std::int64_t p = 0; p < parts.count(); ++p) {
        const Range cols = parts[p];
        const BtTile<float> part_bias = bias.Cols(with_bias ? cols : Range{0, 1});
        MultiplyStep(core, rings, acc[static_cast<std::size_t>(p)], a1.tile.Cols(k1.From(of_a.begin)),
                     b1.Cols(cols), with_bias ? &part_bias : nullptr, first, t);
        if (last) finished(acc[static_cast<std::size_t>(p)], cols);
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MULTIPLY_BLOCK_KERNEL_H_
