// The checker's agents: the pipes of an AI core, numbered by side and pipe.
#ifndef CUBIST_NPU_MODEL_SYNC_AGENTS_H_
#define CUBIST_NPU_MODEL_SYNC_AGENTS_H_

#include <cstddef>

#include "npu_model/chip.h"

namespace cubist::sync {

inline constexpr std::size_t kSides = kMaxVectorPerCube + 1;  // the Cube core, then the Vector cores
inline constexpr std::size_t kPipes = kPipeCount + 1;         // of a side; the last one stands for
inline constexpr std::size_t kScalarWrites = kPipeCount;      // the completed writes of its scalar unit
inline constexpr std::size_t kComponents = kSides * kPipes;

inline std::size_t AgentAt(Pipe pipe, int lane) {
  return static_cast<std::size_t>(lane + 1) * kPipes + static_cast<std::size_t>(pipe);
}
inline std::size_t SideOf(std::size_t agent) { return agent / kPipes; }
inline std::size_t ScalarOf(std::size_t agent) { return SideOf(agent) * kPipes; }
inline bool IsScalar(std::size_t agent) { return agent % kPipes == 0; }

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_AGENTS_H_
