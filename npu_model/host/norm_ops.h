// Bodies of the normalisation composites of core.h: what tile_ops.h is to the other instructions.
#ifndef CUBIST_NPU_MODEL_HOST_NORM_OPS_H_
#define CUBIST_NPU_MODEL_HOST_NORM_OPS_H_

#include "npu_model/host/tile_ops.h"

namespace cubist {

// Operands of norm_rows, and of norm_grad and norm_rows_grad, as NormTiles and NormGradTiles name them.
struct NormRowsRows {
  Rows out, rstd, x, gamma, residual, sum;
  Rows row;  // With residual: a row to work in.
};
struct NormRowsGradRows {
  Rows d_x, d_gamma, d_out, x, gamma, rstd, more;
  Rows shift;  // Of norm_grad alone.
};

// Formulas: composites.h. Operands are floats but those named in the comment, which have the dtype given. (1, c) and
// (r, 1) operands are told by their names: weights, gamma and acc, factor, rstd, shift and sum. Not given: null data.
// What they write may be streamed. Where the CPU narrows to bf16 itself, denormal results are zero.
struct NormOps {
  void (*row_dot)(const Rows& sum, DType dtype, const Rows& a, const Rows& b, const Rows& weights);  // a, b
  void (*scale_rows)(DType dtype, const Rows& dst, const Rows& a, const Rows& factor,
                     const Rows& weights);  // dst, a
  void (*norm_rows)(DType dtype, const NormRowsRows& operands, float scale,
                    float eps);  // out, x, residual, sum
  void (*norm_rows_grad)(DType dtype, const NormRowsGradRows& operands, float scale);  // d_x, d_out, x, more
  void (*norm_grad)(DType dtype, const NormRowsGradRows& operands);                    // likewise
  void (*add_column_dots)(const Rows& acc, DType dtype, const Rows& a, const Rows& b,
                          const Rows& factor);  // a, b
};

// The table of the best target that the CPU has; see BestVectorOps.
const NormOps& BestNormOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_NORM_OPS_H_
