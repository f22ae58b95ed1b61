// PhaseReplay: the cores of one phase side by side, from time 0, held back by the flags of a plan.
#ifndef CUBIST_NPU_MODEL_TRACE_PHASE_REPLAY_H_
#define CUBIST_NPU_MODEL_TRACE_PHASE_REPLAY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/costs.h"
#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/feeder.h"
#include "npu_model/trace/flows.h"
#include "npu_model/trace/global_memory.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// Every pipe has a queue of bounded depth, filled by its scalar unit in program order, and takes steps from it in
// order. An instruction keeps the pipe busy for a while and is complete a while later; transfers to and from GM
// overlap their startups and flow one after the other. A SetFlag behind them takes effect once all of them are
// complete, a WaitFlag stops the pipe until then, a PipeBarrier likewise. Times of a core are worked out as far as
// they are known; only the ends of transfers, which depend on all cores, are events.
class PhaseReplay {
 public:
  using OnSlice = std::function<void(std::size_t core, const Instr& instr, double start, double end)>;
  // A pipe stood still at an op of the plan.
  using OnWait = std::function<void(std::size_t core, std::uint32_t op, double cycles)>;

  // `began`: cycle of the launch at which the phase begins; 0 for the first one, whose cores start one by one.
  PhaseReplay(const ChipSpec& chip, const Phase& phase, const sync::PhasePlan& plan, GlobalMemory& memory,
              double began, OnSlice on_slice, OnWait on_wait);

  // False where it is certain that the phase takes more cycles; nothing else is known of it then.
  bool Run(double most_cycles);

  // Cycles of a pipe.
  struct Times {
    double busy = 0;    // with an instruction under way
    double waited = 0;  // standing still at a WaitFlag or barrier, with nothing under way
  };
  std::size_t cores() const { return cores_.size(); }
  const CoreRecord& record(std::size_t core) const { return *cores_[core].record; }
  const Times& times(std::size_t core, Pipe pipe, int lane) const {
    return cores_[core].agents[static_cast<std::size_t>(AgentOf(pipe, lane))].times;
  }
  double end(std::size_t core) const { return cores_[core].end; }
  const Flows& flows() const { return flows_; }

 private:
  struct Queued {
    Step step;
    double issued = 0;   // when it came into the queue,
    double left_at = 0;  // and when it went
  };
  // A transfer, or a SetFlag behind one.
  struct Pending {
    Step step;
    double ready = 0;  // when its startup began, or when the set was executed
  };
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};
  // A pipe, or a scalar unit, whose queue is the program.
  struct Agent {
    std::vector<Queued> queue;           // a ring, of a power of two
    std::uint64_t taken = 0, given = 0;  // steps that left and entered it
    std::vector<Pending> pending;        // transfers under way, in order, from first_pending
    std::size_t first_pending = 0;
    double free_at = 0;                     // when it takes its next step
    double done_at = 0;                     // when all so far is complete
    double flow_began = 0;                  // of the first pending transfer
    bool touched = false;                   // L2 has been asked for it: what is to flow is
    double missed = 0, late = 0, hits = 0;  // bytes that are to flow, in this order, by where they come from
    std::int64_t reads = -1;                // address from which it reads now
    std::uint32_t next_reader = kNobody;    // in its bucket of readers_
    bool transfers = false;                 // a pipe to or from GM
    std::vector<std::pair<double, double>>
        stood;                  // counted as waited, while transfers before it may still flow
    std::uint32_t waiters = 0;  // agents to look at again after progress here, a bit each
    Times times;

    bool idle() const { return first_pending == pending.size(); }
  };
  // Times at which a flag was set and not yet waited for, first in first out. Most flags are up once at a time.
  struct Flag {
    double first = 0;  // of `sets`
    std::uint32_t sets = 0;
    std::uint32_t waiters = 0;
    std::vector<double> others;  // behind it, from `head` on
    std::size_t head = 0;

    void Set(double time);
    double Take();
  };
  struct Core {
    Core(const CoreRecord& record, std::shared_ptr<Steps> steps, std::int64_t workspace)
        : record(&record), feeder(std::move(steps)), workspace(workspace) {}

    const CoreRecord* record;
    Feeder feeder;
    std::array<Agent, kMaxAgents> agents;
    std::vector<Flag> flags;
    std::int64_t workspace;  // first byte of its hand-over slots
    double end = 0;
  };
  struct Start {
    double time;
    std::uint32_t core, agent;
    bool operator>(const Start& o) const {
      return std::tie(time, core, agent) > std::tie(o.time, o.core, o.agent);
    }
  };

  void Wake(std::uint32_t core, std::uint32_t agents);
  std::uint32_t Issue(std::uint32_t core, std::uint32_t agent);
  std::uint32_t Execute(std::uint32_t core, std::uint32_t agent);
  bool Take(std::uint32_t core, std::uint32_t agent, const Step& step, double ready, std::uint32_t* woken);
  bool Wait(std::uint32_t core, std::uint32_t agent, const Step& step, double ready);
  static void NoteWait(Agent& agent, double from, double to);
  static void TakeFlowFromWaits(Agent& agent, double ended);
  std::uint32_t Set(Core& core, std::uint32_t flag, double time);
  static Flag& FlagOf(Core& core, std::uint32_t number);
  const GmAccess& AccessOf(const Core& core, const Step& step) const {
    return core.record->accesses[step.op];
  }
  void ScheduleFlow(std::uint32_t core, std::uint32_t agent);
  double Queueing(const Start& start, const GmAccess& access, double bytes);
  void StartFlow(const Start& start);
  void FlowOn(Path path, Flows::Owner owner);
  std::uint32_t& ReadersOf(std::int64_t address);
  Agent& AgentAt(std::uint32_t number) { return cores_[number / kMaxAgents].agents[number % kMaxAgents]; }
  void StopReading(Flows::Owner owner);
  std::uint32_t EndFlow();
  bool TakesLonger(std::uint32_t core, double cycles) const;
  void Finish();

  const ChipSpec* chip_;
  std::size_t queue_depth_;
  Costs costs_;
  bool rows_cost_;
  GlobalMemory* memory_;
  double began_;
  Flows flows_;
  OnSlice on_slice_;
  OnWait on_wait_;
  std::vector<Core> cores_;
  // Agents whose transfers are under way, by the address they read from: the first of each bucket.
  std::array<std::uint32_t, 256> readers_;
  std::priority_queue<Start, std::vector<Start>, std::greater<>> starts_;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_PHASE_REPLAY_H_
