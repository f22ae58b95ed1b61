// Feeder: a core's instructions and the flags of its plan as the replay takes them, a stretch at a time.
#ifndef CUBIST_NPU_MODEL_TRACE_FEEDER_H_
#define CUBIST_NPU_MODEL_TRACE_FEEDER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/costs.h"
#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// What a scalar unit issues: an instruction of the record or of the plan.
struct Step {
  enum class Kind : std::uint8_t { kInstr, kTransfer, kSet, kWait, kBarrier };
  std::uint32_t what = 0;  // an instruction of the record, or a flag
  float busy = 0,
        done =
            0;  // cycles: of a kInstr as in Cost; of a kTransfer until the next may begin, and its bytes flow
  std::uint8_t agent = 0;  // that executes it
  Kind kind = Kind::kInstr;
  std::uint32_t op = 0;  // of a kWait or kBarrier: its number in CorePlan::ops; of a kTransfer: of its access
};

// Flags are numbered. Between pipes of one side of an AI core: one number per pair of pipes and id. Between the
// sides: one per direction, id and Vector core, so that a set by the Cube core is a Step per Vector core, and so is
// a wait for all of them.
class Feeder {
 public:
  static constexpr int kSides = 1 + kMaxLanes;
  static int SideOf(int agent) { return agent < kCubeAgents ? 0 : 1 + (agent - kCubeAgents) / kVectorAgents; }

  Feeder(const CoreRecord& record, const sync::CorePlan& plan, const Costs& costs, int lanes)
      : record_(&record), plan_(&plan), costs_(&costs), lanes_(lanes) {}

  // The next step of a side; null at its end. Valid until the next call for that side.
  const Step* Peek(int side) {
    Stream& stream = streams_[static_cast<std::size_t>(side)];
    while (stream.head == stream.steps.size()) {
      if (next_instr_ == record_->instrs.size() && next_op_ == plan_->ops.size()) return nullptr;
      stream.steps.clear();
      stream.head = 0;
      Feed();
    }
    return &stream.steps[stream.head];
  }
  void Pop(int side) { ++streams_[static_cast<std::size_t>(side)].head; }

  std::size_t flags() const { return flag_count_; }
  // Whether a flag goes from one side of the AI core to the other.
  static constexpr std::uint32_t kCross = std::uint32_t{1} << 31;

 private:
  struct Stream {
    std::vector<Step> steps;
    std::size_t head = 0;
  };
  void Feed();
  void FeedOp(const sync::SyncOp& op);
  void FeedInstr(std::uint32_t i);
  std::uint32_t FlagOf(std::size_t pair, std::size_t id, bool cross);
  void Put(const Step& step) { streams_[static_cast<std::size_t>(SideOf(step.agent))].steps.push_back(step); }

  const CoreRecord* record_;
  const sync::CorePlan* plan_;
  const Costs* costs_;
  int lanes_;
  std::uint32_t next_instr_ = 0;
  std::size_t next_op_ = 0;
  std::array<Stream, kSides> streams_;
  // Of flags, by their pair of agents and id; 0 for none yet. Behind the pairs of one side: a way from each side to the other.
  std::array<std::vector<std::uint32_t>, kMaxAgents * kMaxAgents + 2 * kMaxLanes> numbers_;
  std::uint32_t flag_count_ = 0;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_FEEDER_H_
