// Cores of a phase that the planner cannot tell apart: they do the same to the same places of their own buffers, and
// differ at most in where they stand in GM.
#ifndef CUBIST_NPU_MODEL_SYNC_ALIKE_H_
#define CUBIST_NPU_MODEL_SYNC_ALIKE_H_

#include <cstddef>
#include <vector>

#include "npu_model/trace/record.h"

namespace cubist::sync {

// For each core the first one like it, itself where there is none. Decided on everything that a plan depends on, not
// on a digest.
std::vector<std::size_t> FirstAlike(const trace::Phase& phase, const ChipSpec& chip);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_ALIKE_H_
