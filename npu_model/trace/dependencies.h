// Dependencies between instructions, from the bytes that they read and write.
#ifndef CUBIST_NPU_MODEL_TRACE_DEPENDENCIES_H_
#define CUBIST_NPU_MODEL_TRACE_DEPENDENCIES_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "npu_model/status.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// The in-order queues of an AI core: S, MTE1, MTE2, MTE3, M, FIX of the Cube core, then S, MTE2, MTE3, V of
// each Vector core. A Vector core on its own has the agents of lane 0.
inline constexpr int kCubeAgents = 6, kVectorAgents = 4;
inline constexpr int kMaxAgents = kCubeAgents + kMaxVectorPerCube * kVectorAgents;
inline int AgentOf(Pipe pipe, int lane) {
  // By pipe: S, MTE1, MTE2, MTE3, M, V, FIX.
  constexpr std::int8_t kOfCube[kPipeCount] = {0, 1, 2, 3, 4, -1, 5};
  constexpr std::int8_t kOfVector[kPipeCount] = {0, -1, 1, 2, -1, 3, -1};
  const int on_side = (lane < 0 ? kOfCube : kOfVector)[static_cast<int>(pipe)];
  CUBIST_CHECK(on_side >= 0, std::string("no pipe ") + NameOf(pipe) + " on this side of an AI core");
  return lane < 0 ? on_side : kCubeAgents + lane * kVectorAgents + on_side;
}
// The scalar unit that issues to an agent: the first agent of its side.
constexpr int IssuerOf(int agent) {
  return agent < kCubeAgents ? 0 : agent - (agent - kCubeAgents) % kVectorAgents;
}

struct Dependency {
  std::uint32_t instr;  // waits for this one,
  std::uint32_t agent;  // which runs here
};

// For each instruction of a core the latest one on each other agent that it has to wait
// for: the last writer of bytes that it reads (RAW), and the last readers (WAR) and writer
// (WAW) of bytes that it writes. Waits that an earlier instruction of the same agent
// already has are left out. Order inside an agent is the program's and is not listed.
class CUBIST_COMMAND_EXPORT Dependencies {
 public:
  explicit Dependencies(const CoreRecord& record);

  std::span<const Dependency> Of(std::size_t instr) const {
    return {all_.data() + begin_[instr], all_.data() + begin_[instr + 1]};
  }

 private:
  std::vector<std::uint32_t> begin_;
  std::vector<Dependency> all_;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_DEPENDENCIES_H_
