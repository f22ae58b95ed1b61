// Packs Mmad operands whole into the core's own layout, tile by tile, so that no
// later load changes their layout again.
#ifndef CUBIST_KERNELS_PACK_KERNEL_H_
#define CUBIST_KERNELS_PACK_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"
#include "tiling/pack_tiling.h"

namespace cubist {

// Rows of a tensor (.., s, cols) that a phase packs: packed.Matrix(i) has those of its i-th matrix, transposed where asked.
struct PackPart {
  const GmTensor* source = nullptr;
  Range rows;
  bool transposed = false;
  PackedGm packed;
  PackTiling tiling;
};

// Packs the parts of one tensor. Each element is read once and written once.
template <class T, CubeCore Core>
void PackTensor(Core& core, std::span<const PackPart> parts, RoundRobin& dealt) {
  std::int64_t most_rows = 0, most_cols = 0;
  for (const PackPart& part : parts) {
    most_rows = std::max(most_rows, part.tiling.rows), most_cols = std::max(most_cols, part.tiling.cols);
  }
  // The host packs a right operand on its way out, and its transpose likewise. One that stays narrow is packed as it comes, and
  // narrowed on its way out.
  const Role role = parts[0].packed.role, second_role = parts[0].packed.second_role;
  const bool once = role == Role::kB && (second_role == Role::kRows || second_role == Role::kBTransposed) &&
                    !parts[0].packed.narrow;
  Ring<Buffer::kL1, T> tiles(core, "pack_l1", most_rows, most_cols, 2, once ? Role::kBOnce : role,
                             second_role);
  for (const PackPart& part : parts) {
    const PackTiling& t = part.tiling;
    dealt.ForMine(t.tasks(), [&](std::int64_t task) {
      const std::int64_t matrix = task / t.grid.count();
      const BlockCoord block = t.grid.At(task % t.grid.count());
      const Gm stored = MatrixOf(*part.source, PlaceIn(BatchOf(*part.source), matrix)).Rows(part.rows);
      const Gm plain = part.transposed ? stored.Transposed() : stored;
      const Range rows = Split(plain.rows, t.rows)[block.row], cols = Split(plain.cols, t.cols)[block.col];
      const L1Tile<T> tile = tiles.Next(rows.size(), cols.size());
      core.Load(tile, plain.Block(rows, cols));
      core.Store(part.packed.Matrix(matrix).Block(rows, cols), tile);
    });
  }
}

// Packs all parts, those of a tensor one behind the other, whose tasks are dealt as if they were one.
template <class T, CubeCore Core>
void PackKernel(Core& core, std::span<const PackPart> parts) {
  RoundRobin dealt(core.index(), core.count());
  while (!parts.empty()) {
    const auto other = std::find_if(parts.begin(), parts.end(),
                                    [&](const PackPart& p) { return p.source != parts[0].source; });
    const auto count = static_cast<std::size_t>(other - parts.begin());
    PackTensor<T>(core, parts.first(count), dealt);
    parts = parts.subspan(count);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACK_KERNEL_H_
