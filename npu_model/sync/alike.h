// Cores of a phase that the planner cannot tell apart: what they do to their own buffers meets and covers the same things
// of their own, and they differ at most in where they stand in GM, and in buffers.
#ifndef CUBIST_NPU_MODEL_SYNC_ALIKE_H_
#define CUBIST_NPU_MODEL_SYNC_ALIKE_H_

#include <cstddef>
#include <vector>

#include "npu_model/trace/record.h"

namespace cubist::sync {

// For each core the first one like it, itself where there is none. Decided on everything that a plan depends on, not
// on a digest. in_order[c] is TensorsInOrder of core c.
std::vector<std::size_t> FirstAlike(const trace::Phase& phase, const ChipSpec& chip,
                                    const std::vector<std::vector<char>>& in_order);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_ALIKE_H_
