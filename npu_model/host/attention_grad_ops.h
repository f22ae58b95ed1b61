// Bodies of the Vector instructions of attention's backward pass: a table like those of tile_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_ATTENTION_GRAD_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ATTENTION_GRAD_OPS_H_

#include "npu_model/host/tile_ops.h"

namespace cubist {

struct AttentionGradOps {
  // See ExpandAttentionGradStep in composites.h. p and ds have dtype `narrow`; lse and delta are one row each.
  void (*step)(const Rows& p, const Rows& ds, DType narrow, const Rows& s, const Rows& dp, const Rows& lse,
               const Rows& delta, float scale);
};

// The table of the best target that the CPU has (or that hwy::SetSupportedTargetsForTest left). Cheap, not cached.
const AttentionGradOps& BestAttentionGradOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ATTENTION_GRAD_OPS_H_
