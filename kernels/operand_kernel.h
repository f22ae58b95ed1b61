// A Mmad operand in GM as a kernel loads it: the caller's matrix, or its packed copy.
#ifndef CUBIST_KERNELS_OPERAND_KERNEL_H_
#define CUBIST_KERNELS_OPERAND_KERNEL_H_

#include <cstdint>

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

// The operand of each product of a batch. A size of 1 serves them all.
struct OperandStack {
  const GmTensor* plain = nullptr;  // (.., rows, cols), or
  PackedGm packed;                  // so many of packed_sizes, one after the other.
  BatchIndex packed_sizes{1, 1, 1, 1};

  bool is_packed() const { return packed.tensor != nullptr; }
  std::int64_t rows() const { return is_packed() ? packed.row_part.size() : plain->sizes[2]; }
  std::int64_t cols() const { return is_packed() ? packed.col_part.size() : plain->sizes[3]; }
  Operand At(const BatchIndex& at) const {
    if (!is_packed()) return {MatrixOf(*plain, at), {}, false};
    std::int64_t matrix = 0;
    for (std::size_t d = 0; d < at.size(); ++d)
      matrix = matrix * packed_sizes[d] + (packed_sizes[d] == 1 ? 0 : at[d]);
    return {{}, packed.Matrix(matrix), true};
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
