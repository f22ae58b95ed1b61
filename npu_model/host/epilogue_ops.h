// Bodies of what becomes of a product on its way to memory: a table like those of tile_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_EPILOGUE_OPS_H_
#define CUBIST_NPU_MODEL_HOST_EPILOGUE_OPS_H_

#include "npu_model/host/tile_ops.h"

namespace cubist {

// Floats. Null data: not given.
struct EpilogueRows {
  Rows x;
  const float* bias = nullptr;  // One row.
  Rows residual;
};

struct EpilogueOps {
  // dst = activation(alpha * x + bias + beta * residual); see ExpandStoreActivated in composites.h. dst has dtype `type`
  // and says how many rows and columns there are; residual may be dst. `stream` as VectorOps::cast has it.
  void (*store)(const Rows& dst, DType type, const EpilogueRows& rows, const EpilogueScalars& e, bool stream);
};

// The table of the best target that the CPU has (or that hwy::SetSupportedTargetsForTest left). Cheap, not cached.
const EpilogueOps& BestEpilogueOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_EPILOGUE_OPS_H_
