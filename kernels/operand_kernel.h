// A Mmad operand in GM as a kernel loads it: the caller's matrix, or its packed copy.
#ifndef CUBIST_KERNELS_OPERAND_KERNEL_H_
#define CUBIST_KERNELS_OPERAND_KERNEL_H_

#include "npu_model/core.h"
#include "npu_model/tile.h"

namespace cubist {

struct Operand {
  Gm plain;
  PackedGm packed;
  bool is_packed = false;

  std::int64_t rows() const { return is_packed ? packed.row_part.size() : plain.rows; }
  std::int64_t cols() const { return is_packed ? packed.col_part.size() : plain.cols; }
  Operand Block(Range rows, Range cols) const {
    if (is_packed) return {{}, packed.Block(rows, cols), true};
    return {plain.Block(rows, cols), {}, false};
  }
};

template <class T, CubeCore Core>
void LoadOperand(Core& core, L1Tile<T> dst, const Operand& src, Loc loc = Loc::current()) {
  if (src.is_packed) {
    core.Load(dst, src.packed, loc);
  } else {
    core.Load(dst, src.plain, loc);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_OPERAND_KERNEL_H_
