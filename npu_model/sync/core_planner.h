// CorePlanner: places the flags of one core.
#ifndef CUBIST_NPU_MODEL_SYNC_CORE_PLANNER_H_
#define CUBIST_NPU_MODEL_SYNC_CORE_PLANNER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/touches.h"
#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// Plans one core. Instructions are walked in program order; waits are placed before the present one, and the
// set that a wait needs is placed back behind the instruction that it waits for.
class CorePlanner {
 public:
  // `in_order` is TensorsInOrder of the core. With `relays` the last cross-core id of each direction goes from scalar unit
  // to scalar unit, for all pairs of pipes that have none of their own.
  CorePlanner(const trace::CoreRecord& record, const ChipSpec& chip, bool vector_only, Policy policy,
              std::vector<char> in_order, bool relays = false);

  CorePlan Run() { return *RunBelow(SIZE_MAX); }
  // Gives up, and returns nothing, once there are so many sets.
  std::optional<CorePlan> RunBelow(std::size_t sets);
  // Whether cross-core ids did not suffice: the plan has holes, the one with `relays` has none.
  bool LacksIds() const { return lacks_ids_; }
  std::vector<Shortage> Shortages() const;

 private:
  // Complete before what follows: all that `agent` has up to and including a place in program order.
  struct Need {
    std::uint32_t agent, instr;
    bool for_reuse = false;  // asked for by an id, not by bytes,
    bool mirrored = false;   // on every Vector core
  };

  // By agent: everything that it has in front of this place in program order is known to be complete.
  using Clock = std::array<std::uint32_t, trace::kMaxAgents>;

  struct Place {
    Pipe pipe;
    std::int8_t lane;
  };
  // Flags from one pipe to another: for each id, the instruction that its last wait stands before.
  struct Pair {
    std::vector<std::uint32_t> wait_before;
    std::uint32_t last_wait = 0;  // of the pair's last flag: the instruction it stands before,
    std::size_t last_set = 0;     // and its set, in ops_
    bool active = false;
  };
  // Cross-core flags of one id: from a pipe of the Cube core to one of all Vector cores, or back.
  struct Channel {
    bool from_cube = false;
    std::uint32_t from = 0, to = 0;  // agents, of lane 0 on the Vector side
    int id = -1;
    std::vector<std::uint32_t> waits;  // of each event: the instruction that it stands before
    std::array<std::uint32_t, kMaxVectorPerCube> last_instr{};  // that the last set stands behind, by lane
    std::array<std::size_t, kMaxVectorPerCube> last_sets{};     // of the last event, in ops_
  };

  static Place PlaceOf(int agent);
  void JoinIssue(std::uint32_t agent);
  void Merge(std::uint32_t agent, const Clock& known);
  const Clock* ClockAt(std::uint32_t agent, std::uint32_t instr) const;
  void Join(std::uint32_t agent, std::uint32_t from, std::uint32_t instr) {
    Join(agent, from, instr, ClockAt(from, instr));
  }
  void Join(std::uint32_t agent, std::uint32_t from, std::uint32_t instr, const Clock* known);
  void Snapshot(std::uint32_t agent, std::uint32_t instr);

  // What an instruction has to wait for.
  void FindNeeds(std::uint32_t i, std::uint32_t agent, const trace::Instr& instr);
  std::size_t FindTouched(std::uint32_t i, std::uint32_t agent, const trace::Instr& instr);
  bool SaysMore(const trace::Instr& instr, trace::OperandUse use) const;
  void AddNeed(const Need& need, std::size_t of_operand);
  void FindReuse(std::uint32_t i, std::uint32_t agent);

  // Flags.
  void Settle(std::uint32_t i, std::uint32_t agent);
  bool IsKnown(std::uint32_t agent, const Need& n) const;
  bool IsWaitedFor(std::uint32_t agent, const Need& n) const;
  bool IsImplied(std::size_t k, std::uint32_t agent) const;
  SyncOp Make(std::uint32_t instr, bool after, Kind kind, std::uint32_t agent, std::uint32_t peer,
              int id) const;
  int FreeId(const Pair& pair, std::uint32_t from, std::uint32_t to, const Clock& clock,
             std::uint32_t at) const;
  void PlaceFlag(std::uint32_t i, std::uint32_t agent, const Need& n);
  Channel* ChannelOf(std::uint32_t from, std::uint32_t to);
  void PlaceCross(std::uint32_t i, std::uint32_t agent, const Need& n);
  void PlaceRelayed(std::uint32_t i, std::uint32_t agent, const Need& n);
  void Relay(std::uint32_t i, bool from_cube);
  std::uint32_t SetPlace(const Channel& c, int lane, const Need& n, std::uint32_t wait) const;
  void MoveSets(Channel& c, std::uint32_t from, std::uint32_t instr);
  bool WaitsOver(const Channel& c, std::uint32_t wait, std::uint32_t instr) const;

  // Inside a pipe.
  void Complete(std::uint32_t i, std::uint32_t agent, const trace::Instr& instr);
  void NoteShortage(std::uint32_t from, std::uint32_t to, std::uint32_t instr, Shortage::Remedy remedy);
  CorePlan InOrder();

  const trace::CoreRecord& record_;
  const ChipSpec& chip_;
  Policy policy_;
  bool relays_, lacks_ids_ = false;
  int lanes_;
  std::vector<char> shared_;  // tensors that make the core wait for itself
  std::vector<Past> slots_, workspace_, tensors_;
  std::array<Place, trace::kMaxAgents> places_{};

  std::array<Clock, trace::kMaxAgents> clocks_;
  std::array<Clock, trace::kMaxAgents> waited_{};  // by flags of its own: kPerTile looks at nothing else
  std::array<bool, trace::kMaxAgents> stale_;      // the clock has grown since its last snapshot
  std::array<std::uint32_t, trace::kMaxAgents> current_;
  std::array<std::uint32_t, trace::kMaxAgents> seen_issue_;
  std::array<std::uint32_t, trace::kMaxAgents> issue_version_{};
  std::vector<Clock> snapshots_;
  struct Known {
    std::uint32_t instr, snapshot;
  };
  std::array<std::vector<Known>, trace::kMaxAgents>
      history_;  // at each instruction, and where it waits without one

  // By the present instruction: its operands, and GM.
  std::array<std::pair<Past*, Touch>, trace::kMaxOperands + 1> touched_;
  std::vector<Need> needs_;
  std::array<std::array<Pair, trace::kMaxAgents>, trace::kMaxAgents> pairs_{};
  std::array<std::vector<std::uint32_t>, trace::kMaxAgents> partners_;
  std::vector<Channel> channels_;
  std::array<int, 2> relayed_{};  // to Vector cores, to the Cube core: since the last event the other way
  std::vector<SyncOp> ops_;
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, Shortage::Remedy>, std::int64_t>
      shortages_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_CORE_PLANNER_H_
