// Bodies of the Vector instructions that only attention needs: the third table beside those of tile_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_

#include <cstdint>

#include "npu_model/host/tile_ops.h"

namespace cubist {

struct AttentionOps {
  const char* target = "";
  // x(i, j) = value unless lowest <= j - i <= highest. Touches no other element.
  void (*mask_outside)(const Rows& x, std::int64_t lowest, std::int64_t highest, float value);
};

// The table of the best target that the CPU has (or that hwy::SetSupportedTargetsForTest left). Cheap, not cached.
const AttentionOps& BestAttentionOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_
