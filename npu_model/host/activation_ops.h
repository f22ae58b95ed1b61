// Bodies of the activation composites of core.h: what tile_ops.h is to the other instructions.
#ifndef CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_

#include "npu_model/host/tile_ops.h"

namespace cubist {

// Operands of ActivationOps::swiglu_grad, as SwiGluGradTiles names them; float where not of the call's dtype.
struct SwiGluGradRows {
  Rows d_gate, d_up, d_probs;
  Rows d_out, gate, up, probs;
};

// Formulas: composites.h. Operands are floats but those named in the comment, which have the dtype given. probs and
// d_probs are (r, 1). Not given: null data. What they write may be streamed. Where the CPU narrows to bf16 itself, denormal results are
// zero.
struct ActivationOps {
  void (*swiglu)(DType dtype, const Rows& out, const Rows& gate, const Rows& up,
                 const Rows& probs);                                          // out, gate, up
  void (*swiglu_grad)(DType dtype, const SwiGluGradRows& operands);           // d_gate, d_up, d_out, gate, up
  void (*scores)(ScoreFunction function, const Rows& n, const Rows& logits);  // ExpandScores; maybe in place
};

// The table of the best target that the CPU has; see BestVectorOps.
const ActivationOps& BestActivationOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ACTIVATION_OPS_H_
