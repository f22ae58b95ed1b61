// Bodies of the normalisation and activation composites of core.h: what tile_ops.h is to the other instructions.
#ifndef CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_

#include "npu_model/host/tile_ops.h"

namespace cubist {

// Operands of ActivationOps::swiglu_grad, as SwiGluGradTiles names them; float where not of the call's dtype.
struct SwiGluGradRows {
  Rows d_gate, d_up, d_probs;
  Rows d_out, gate, up, probs;
};

// Formulas: composites.h. Operands are floats but those named in the comment, which have the dtype given. (1, c) and
// (r, 1) operands are told by their names: weights and acc, factor, shift, sum and probs. Not given: null data. What they
// write may be streamed. Where the CPU narrows to bf16 itself, denormal results are zero.
struct ActivationOps {
  void (*row_dot)(const Rows& sum, DType dtype, const Rows& a, const Rows& b, const Rows& weights);  // a, b
  void (*scale_rows)(DType dtype, const Rows& dst, const Rows& a, const Rows& factor,
                     const Rows& weights);  // dst, a
  void (*norm_rows)(DType dtype, const Rows& dst, const Rows& factor, const Rows& a, const Rows& weights,
                    float scale, float eps);  // dst, a
  void (*norm_grad)(DType dtype, const Rows& dx, const Rows& dy, const Rows& x, const Rows& weights,
                    const Rows& factor, const Rows& shift, const Rows& more);  // dx, dy, x, more
  void (*add_column_dots)(const Rows& acc, DType dtype, const Rows& a, const Rows& b,
                          const Rows& factor);  // a, b
  void (*swiglu)(DType dtype, const Rows& out, const Rows& gate, const Rows& up,
                 const Rows& probs);                                 // out, gate, up
  void (*swiglu_grad)(DType dtype, const SwiGluGradRows& operands);  // d_gate, d_up, d_out, gate, up
  void (*scores)(ScoreFunction function, const Rows& n);             // ExpandScores
};

// The table of the best target that the CPU has; see BestVectorOps.
const ActivationOps& BestActivationOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_
