// What a product is of, and which of its blocks a core computes.
#ifndef CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_

#include <cstdint>

#include "kernels/epilogue_kernel.h"
#include "kernels/multiply_block_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// One product, or one for every matrix of c (.., M, N).
struct MatmulOperands {
  OperandStack a, b;                    // (M, K), (K, N)
  const GmTensor* bias = nullptr;       // (N), added in L0C,
  const GmTensor* late_bias = nullptr;  // or by a Vector core.
  const GmTensor* residual = nullptr;   // (.., M, N), with c's sizes in front, or 1
  const GmTensor* c = nullptr;
  const GmTensor* parts = nullptr;  // (splits, batches, M, N), where k is split
  std::int64_t k = 0;
  Epilogue epilogue;

  std::int64_t batches() const { return c->matrices(); }
  MatmulBlock Block(std::int64_t batch, Range m, Range n, Range k_part) const {
    const BatchIndex at = PlaceIn(BatchOf(*c), batch);
    return {a.At(at).Block(m, k_part),
            b.At(at).Block(k_part, n),
            bias == nullptr ? Gm() : MatrixOf(*bias).Cols(n),
            m.size(),
            n.size(),
            k_part.size()};
  }
  EpilogueBlock Target(std::int64_t batch, Range m, Range n) const {
    const BatchIndex at = PlaceIn(BatchOf(*c), batch);
    EpilogueBlock block;
    block.c = MatrixOf(*c, at).Block(m, n);
    if (late_bias != nullptr) block.bias = MatrixOf(*late_bias).Cols(n);
    if (residual != nullptr) block.residual = MatrixOf(*residual, at).Block(m, n);
    return block;
  }
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_OPERANDS_KERNEL_H_
