// What a product is of, and which of its blocks a core computes.
#ifndef CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "kernels/epilogue_kernel.h"
#include "kernels/multiply_block_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// One product, or one for every matrix of c (b0, b1, M, N).
struct MatmulOperands {
  OperandStack a, b;                    // (M, K), (K, N)
  const GmTensor* bias = nullptr;       // (N), added in L0C,
  const GmTensor* late_bias = nullptr;  // or by a Vector core.
  const GmTensor* residual = nullptr;   // (b0, b1, M, N), or 1 for b0 or b1
  const GmTensor* c = nullptr;
  const GmTensor* parts = nullptr;  // (splits, b0 * b1, M, N), where k is split
  std::int64_t k = 0;
  Epilogue epilogue;

  std::int64_t batches() const { return c->sizes[0] * c->sizes[1]; }
  MatmulBlock Block(std::int64_t batch, Range m, Range n, Range k_part) const {
    const std::int64_t i = batch / c->sizes[1], j = batch % c->sizes[1];
    return {a.At(i, j).Block(m, k_part),
            b.At(i, j).Block(k_part, n),
            bias == nullptr ? Gm() : MatrixOf(*bias).Cols(n),
            m.size(),
            n.size(),
            k_part.size()};
  }
  EpilogueBlock Target(std::int64_t batch, Range m, Range n) const {
    const std::int64_t i = batch / c->sizes[1], j = batch % c->sizes[1];
    EpilogueBlock block;
    block.c = MatrixOf(*c, i, j).Block(m, n);
    if (late_bias != nullptr) block.bias = MatrixOf(*late_bias).Cols(n);
    if (residual != nullptr) {
      block.residual =
          MatrixOf(*residual, residual->sizes[0] == 1 ? 0 : i, residual->sizes[1] == 1 ? 0 : j).Block(m, n);
    }
    return block;
  }
};

// The tasks of core `index` of `cores`, in its order: every cores-th, or a run of neighbours. Where A is kept, the run is
// one row of blocks after the other; each core begins a row at a place of its own, so that they do not queue for the same
// lines of B.
class CoreTasks {
 public:
  CoreTasks(const MatmulTiling& t, std::int64_t tasks, std::int64_t index, std::int64_t cores)
      : in_runs_(t.in_runs || t.keep_a),
        turned_(t.keep_a),
        cols_(std::max<std::int64_t>(t.grid.cols, 1)),
        index_(index),
        cores_(cores) {
    const std::int64_t share = tasks / cores, rest = tasks % cores;
    begin_ = in_runs_ ? index * share + std::min(index, rest) : index;
    count_ = share + (index < rest ? 1 : 0);
  }
  std::int64_t count() const { return count_; }
  std::int64_t operator[](std::int64_t i) const {
    if (!in_runs_) return begin_ + i * cores_;
    if (!turned_) return begin_ + i;
    const std::int64_t at = begin_ + i, end = begin_ + count_;
    const std::int64_t row = std::max(begin_, at / cols_ * cols_),
                       length = std::min(end, (at / cols_ + 1) * cols_) - row;
    return row + (at - row + length * index_ / cores_) % length;
  }

 private:
  bool in_runs_, turned_;
  std::int64_t cols_, index_, cores_, begin_ = 0, count_ = 0;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_
