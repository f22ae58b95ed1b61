// Packs Mmad operands whole into the core's own layout, tile by tile, so that no
// later load changes their layout again.
#ifndef CUBIST_KERNELS_PACK_KERNEL_H_
#define CUBIST_KERNELS_PACK_KERNEL_H_

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"

namespace cubist {

// Every matrix is cut into tiles of (rows, cols): `rows` even, `cols` a multiple of the layout's panel;
// `rows` too where the transpose is packed as well.
struct PackTiling {
  std::int64_t rows = 0, cols = 0;
  std::int64_t matrices = 0;
  BlockGrid grid;  // Of one matrix.

  std::int64_t tasks() const { return matrices * grid.count(); }
};

// packed.Matrix(i) = the i-th matrix of the source (b, n, rows, cols), transposed
// where asked. Each element is read once and written once.
template <class T, CubeCore Core>
void PackKernel(Core& core, const GmTensor& source, bool transposed, const PackedGm& packed,
                const PackTiling& t) {
  Ring<Buffer::kL1, T> tiles(core, "pack_l1", t.rows, t.cols, 2, packed.role, packed.second_role);
  for (std::int64_t task = core.index(); task < t.tasks(); task += core.count()) {
    const std::int64_t matrix = task / t.grid.count();
    const BlockCoord block = t.grid.At(task % t.grid.count());
    const Gm stored = MatrixOf(source, matrix / source.sizes[1], matrix % source.sizes[1]);
    const Gm plain = transposed ? stored.Transposed() : stored;
    const Range rows = Split(plain.rows, t.rows)[block.row], cols = Split(plain.cols, t.cols)[block.col];
    const L1Tile<T> tile = tiles.Next(rows.size(), cols.size());
    core.Load(tile, plain.Block(rows, cols));
    core.Store(packed.Matrix(matrix).Block(rows, cols), tile);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACK_KERNEL_H_
