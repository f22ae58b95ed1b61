// Pipeline: the order in which a kernel issues the stages of neighbouring steps. Pipes run in program order,
// so this order is the schedule: what is issued earlier overlaps what is issued later on other pipes.
#ifndef CUBIST_NPU_MODEL_PIPELINE_H_
#define CUBIST_NPU_MODEL_PIPELINE_H_

#include <array>
#include <cstdint>

#include "npu_model/status.h"

namespace cubist {

inline constexpr std::int64_t kMaxPipelineDepth = 2;

// Runs stage(step) for every stage and every step that `next(step)` produces (it
// returns false after the last). In each round stage s works on the step that is s *
// depth rounds old, so that with depth 1 and stages A, B, C the order is
//   A0 | A1 B0 | A2 B1 C0 | A3 B2 C1 | ..
// and with depth 0 it is A0 B0 C0 | A1 B1 C1 | ..
template <class Step, class Next, class... Stages>
void Pipeline(std::int64_t depth, Next&& next, Stages&&... stages) {
  constexpr std::int64_t kStages = sizeof...(Stages);
  constexpr std::int64_t kInFlight = (kStages - 1) * kMaxPipelineDepth + 1;
  CUBIST_CHECK(depth >= 0 && depth <= kMaxPipelineDepth, "pipeline depth");
  std::array<Step, kInFlight> steps{};
  std::int64_t end = INT64_MAX;
  for (std::int64_t round = 0; round < end || round - end < (kStages - 1) * depth; ++round) {
    if (round < end && !next(steps[static_cast<std::size_t>(round % kInFlight)])) end = round;
    std::int64_t at = round;
    const auto issue = [&](auto& stage) {
      if (at >= 0 && at < end) stage(steps[static_cast<std::size_t>(at % kInFlight)]);
      at -= depth;
    };
    (issue(stages), ...);
  }
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PIPELINE_H_
