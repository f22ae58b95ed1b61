// A Mmad operand in GM as a kernel loads it: the caller's matrix, or its packed copy.
#ifndef CUBIST_KERNELS_OPERAND_KERNEL_H_
#define CUBIST_KERNELS_OPERAND_KERNEL_H_

#include <array>
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

// The operand of each product of a batch, by two indices. A size of 1 serves them all.
struct OperandStack {
  const GmTensor* plain = nullptr;  // (b0, b1, rows, cols), or
  PackedGm packed;                  // so many of packed_sizes, one after the other.
  std::array<std::int64_t, 2> packed_sizes{1, 1};

  bool is_packed() const { return packed.tensor != nullptr; }
  std::int64_t rows() const { return is_packed() ? packed.row_part.size() : plain->sizes[2]; }
  std::int64_t cols() const { return is_packed() ? packed.col_part.size() : plain->sizes[3]; }
  Operand At(std::int64_t i, std::int64_t j) const {
    const auto index = [](std::int64_t size, std::int64_t at) { return size == 1 ? 0 : at; };
    if (!is_packed())
      return {MatrixOf(*plain, index(plain->sizes[0], i), index(plain->sizes[1], j)), {}, false};
    const std::int64_t matrix = index(packed_sizes[0], i) * packed_sizes[1] + index(packed_sizes[1], j);
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
