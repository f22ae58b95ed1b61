// Feeder: a core's instructions and the flags of its plan as the replay takes them, a stretch at a time.
#ifndef CUBIST_NPU_MODEL_TRACE_FEEDER_H_
#define CUBIST_NPU_MODEL_TRACE_FEEDER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
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

// The steps of cores that do the same, wherever in GM, under the same plan. A stretch is made when the first of them gets
// there and dropped behind the last.
//
// Flags are numbered. Between pipes of one side of an AI core: one number per pair of pipes and id. Between the
// sides: one per direction, id and Vector core, so that a set by the Cube core is a Step per Vector core, and so is
// a wait for all of them.
class Steps {
 public:
  static constexpr int kSides = 1 + kMaxVectorPerCube;
  static int SideOf(int agent) { return agent < kCubeAgents ? 0 : 1 + (agent - kCubeAgents) / kVectorAgents; }
  // Whether a flag goes from one side of the AI core to the other.
  static constexpr std::uint32_t kCross = std::uint32_t{1} << 31;

  Steps(const CoreRecord& record, const sync::CorePlan& plan, const Costs& costs, int lanes);

  // Whether these are the steps of another core, too.
  bool AreThoseOf(const CoreRecord& record, const sync::CorePlan& plan) const;

  // Those of a side in a stretch, until it is left as often as there are readers; null behind the last.
  const std::vector<Step>* Enter(std::size_t stretch, int side);
  void Leave(std::size_t stretch);
  // Readers are there before the first one enters a stretch.
  void AddReader() { readers_ += sides_used_; }
  bool has(int side) const { return used_[static_cast<std::size_t>(side)]; }

  std::size_t flags() const { return flag_count_; }
  // Of all its Mmads.
  double mmad_cycles() const { return mmad_cycles_; }

 private:
  struct Stretch {
    std::array<std::vector<Step>, kSides> sides;
    int readers = 0;  // that did not leave it
  };
  void Feed(Stretch& to);
  void FeedOp(const sync::SyncOp& op, Stretch& to);
  void FeedInstr(std::uint32_t i, Stretch& to);
  Cost CostOf(const Instr& instr);
  std::uint32_t FlagOf(int pair, std::size_t id, bool cross);
  static void Put(const Step& step, Stretch& to) {
    to.sides[static_cast<std::size_t>(SideOf(step.agent))].push_back(step);
  }

  const CoreRecord* record_;
  const sync::CorePlan* plan_;
  const Costs* costs_;
  int lanes_;
  double mmad_cycles_ = 0;
  // By Op, of the Cube's arithmetic and of its loads to L0: mostly the next one is like the last.
  struct Priced {
    const Instr* instr = nullptr;
    Cost cost;
  };
  std::array<Priced, kOpCount> priced_;
  std::array<bool, kSides> used_{};
  int sides_used_ = 0, readers_ = 0;  // a reader per core and side
  std::uint32_t next_instr_ = 0;
  std::size_t next_op_ = 0;
  std::deque<Stretch> stretches_;
  std::size_t dropped_ = 0;     // stretches in front of these,
  std::vector<Stretch> spare_;  // whose memory serves again
  // Of flags, by their pair of agents and id; 0 for none yet. Behind the pairs of one side: a way from each side to the
  // other.
  static constexpr int kPairs = kMaxAgents * kMaxAgents + 2 * kMaxVectorPerCube;
  std::size_t ids_ = 1;
  std::vector<std::uint32_t> numbers_;
  std::uint32_t flag_count_ = 0;
};

// Where a core is in its steps, on each side.
class Feeder {
 public:
  explicit Feeder(std::shared_ptr<Steps> steps) : steps_(std::move(steps)) { steps_->AddReader(); }

  // The next step of a side; null at its end. Valid until the next call for that side.
  const Step* Peek(int side) {
    Place& place = places_[static_cast<std::size_t>(side)];
    return place.next != place.end || Go(side) ? place.next : nullptr;
  }
  void Pop(int side) { ++places_[static_cast<std::size_t>(side)].next; }

  std::size_t flags() const { return steps_->flags(); }
  double mmad_cycles() const { return steps_->mmad_cycles(); }

 private:
  struct Place {
    const Step *next = nullptr, *end = nullptr;
    std::size_t stretches = 0;  // entered
  };
  // To the next stretch that has steps of this side; false if there is none.
  bool Go(int side);

  std::shared_ptr<Steps> steps_;
  std::array<Place, Steps::kSides> places_;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_FEEDER_H_
