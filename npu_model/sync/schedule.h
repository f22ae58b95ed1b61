// Runs a core's instructions under a plan in any order that its pipes and flags allow. A plan that orders every
// conflict gives the same bytes in each; one with a hole gives itself away in some.
#ifndef CUBIST_NPU_MODEL_SYNC_SCHEDULE_H_
#define CUBIST_NPU_MODEL_SYNC_SCHEDULE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

enum class Schedule : std::uint8_t {
  kProgramOrder,  // the earliest instruction that can go on, and to its end
  kEager,         // what is under way ends first, then the pipe that lags behind
  kLate,          // results arrive as late as flags allow, and pipes run ahead of each other
  kRandom,
};
constexpr const char* NameOf(Schedule schedule) {
  constexpr const char* kNames[] = {"program order", "eager", "late", "random"};
  return kNames[static_cast<int>(schedule)];
}

// `Machine` gives instructions their meaning: Result Start(std::uint32_t instr) reads its sources, and
// Finish(const Result&) writes its destinations, later. Result has the member `instr`.
template <class Machine>
class Scheduler {
 public:
  Scheduler(const ChipSpec& chip, const trace::CoreRecord& record, const CorePlan& plan, int lanes,
            Machine& machine)
      : chip_(chip), record_(record), lanes_(lanes), machine_(machine) {
    std::size_t op = 0;
    for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
      for (; op < plan.ops.size() && plan.ops[op].position() <= 2 * std::uint64_t{i}; ++op)
        AddOp(plan.ops[op]);
      Add({record.instrs[i].pipe, record.instrs[i].lane, i, nullptr});
    }
    for (; op < plan.ops.size(); ++op) AddOp(plan.ops[op]);
  }

  // Whether everything could run; otherwise pipes wait for flags that never come.
  bool Run(Schedule schedule, unsigned seed) {
    std::mt19937 random(seed);
    while (true) {
      const std::vector<Action> actions = Possible();
      if (actions.empty()) break;
      Do(Choose(actions, schedule, random));
    }
    return std::all_of(pipes_.begin(), pipes_.end(),
                       [](const auto& pipe) { return pipe.second.at == pipe.second.queue.size(); });
  }

 private:
  struct Item {
    Pipe pipe;
    std::int8_t lane;
    std::uint32_t instr;
    const SyncOp* op;
    std::size_t issue = 0;  // number among the items of its side
  };
  struct Unit {
    std::vector<Item> queue;
    std::size_t at = 0;
    std::vector<typename Machine::Result> pending;  // started, results not there yet
    bool last_in_order = true;  // the last instruction started must end before the next starts
  };
  using PipeKey = std::pair<int, Pipe>;
  struct Action {
    PipeKey pipe;
    bool ends;  // a pending instruction, by number; otherwise the next item starts
    std::size_t which;
    std::uint32_t instr;
  };

  void AddOp(const SyncOp& op) { Add({op.pipe, op.lane, op.instr, &op}); }
  void Add(Item item) {
    item.issue = items_[item.lane]++;
    pipes_[{item.lane, item.pipe}].queue.push_back(item);
  }

  std::vector<Action> Possible() const {
    std::vector<Action> actions;
    for (const auto& [key, unit] : pipes_) {
      for (std::size_t p = 0; p < unit.pending.size(); ++p)
        actions.push_back({key, true, p, unit.pending[p].instr});
      if (unit.at < unit.queue.size() && MayStart(unit))
        actions.push_back({key, false, 0, unit.queue[unit.at].instr});
    }
    return actions;
  }

  // The scalar unit has issued all that stands in front of its own next item.
  bool Issued(const Item& item) const {
    const auto scalar = pipes_.find({item.lane, Pipe::kS});
    if (item.pipe == Pipe::kS || scalar == pipes_.end() || scalar->second.at == scalar->second.queue.size())
      return true;
    return item.issue < scalar->second.queue[scalar->second.at].issue;
  }

  bool MayStart(const Unit& unit) const {
    const Item& item = unit.queue[unit.at];
    if (!Issued(item)) return false;
    if (item.op == nullptr) return unit.pending.empty() || !unit.last_in_order;
    switch (item.op->kind) {
      case Kind::kSetFlag:
      case Kind::kCrossSet:
      case Kind::kPipeBarrier:
        return unit.pending.empty();
      case Kind::kWaitFlag: {
        const auto flag = flags_.find({item.lane, item.op->peer, item.pipe, item.op->id});
        return flag != flags_.end() && flag->second > 0;
      }
      case Kind::kCrossWait:
        break;
    }
    const auto counter = counters_.find({item.lane, item.op->id});
    return counter != counters_.end() && counter->second > 0;
  }

  Action Choose(const std::vector<Action>& actions, Schedule schedule, std::mt19937& random) const {
    const auto rank = [&](const Action& a) -> std::pair<std::int64_t, std::int64_t> {
      const auto instr = static_cast<std::int64_t>(a.instr);
      switch (schedule) {
        case Schedule::kProgramOrder:
          return {instr, a.ends ? 0 : 1};
        case Schedule::kEager:
          return {a.ends ? 0 : 1, instr};
        case Schedule::kLate:
          return {a.ends ? 1 : 0, -instr};
        case Schedule::kRandom:
          break;
      }
      return {0, 0};
    };
    if (schedule == Schedule::kRandom) return actions[random() % actions.size()];
    return *std::min_element(actions.begin(), actions.end(),
                             [&](const Action& x, const Action& y) { return rank(x) < rank(y); });
  }

  void Do(const Action& action) {
    Unit& unit = pipes_[action.pipe];
    if (action.ends) {
      const auto done = unit.pending.begin() + static_cast<std::ptrdiff_t>(action.which);
      machine_.Finish(*done);
      unit.pending.erase(done);
      return;
    }
    const Item& item = unit.queue[unit.at++];
    if (item.op != nullptr) return Synchronise(*item.op);
    unit.pending.push_back(machine_.Start(item.instr));
    unit.last_in_order = InOrder(record_.instrs[item.instr]);
    // A scalar read is over when the unit goes on; only its writes come late.
    if (item.pipe == Pipe::kS && !Writes(record_.instrs[item.instr])) unit.pending.pop_back();
  }

  bool InOrder(const trace::Instr& instr) const {
    if (instr.pipe == Pipe::kS) return true;  // for itself; what it issues may overtake its writes
    if (instr.pipe == Pipe::kV) return !chip_.sync.vector_needs_barrier;
    if (instr.pipe != Pipe::kM) return !chip_.sync.moves_need_barrier;
    const std::int64_t steps =
        CeilDiv(instr.dims[0], chip_.mmad.m_step) * CeilDiv(instr.dims[1], chip_.mmad.n_step);
    return steps >= chip_.sync.mmad_barrier_below;
  }
  static bool Writes(const trace::Instr& instr) {
    return std::any_of(instr.uses.begin(), instr.uses.end(),
                       [](trace::OperandUse use) { return use.used() && use.writes(); });
  }

  void Synchronise(const SyncOp& op) {
    switch (op.kind) {
      case Kind::kSetFlag:
        ++flags_[{op.lane, op.pipe, op.peer, op.id}];
        break;
      case Kind::kWaitFlag:
        --flags_[{op.lane, op.peer, op.pipe, op.id}];
        break;
      case Kind::kPipeBarrier:
        break;
      case Kind::kCrossSet:
        if (op.lane < 0) {
          for (int lane = 0; lane < lanes_; ++lane) ++counters_[{lane, op.id}];
        } else {
          auto& parts = parts_[op.id];
          parts.resize(static_cast<std::size_t>(lanes_));
          ++parts[static_cast<std::size_t>(op.lane)];
          if (*std::min_element(parts.begin(), parts.end()) == 0) break;
          for (int& part : parts) --part;
          ++counters_[{-1, op.id}];
        }
        break;
      case Kind::kCrossWait:
        --counters_[{op.lane, op.id}];
        break;
    }
  }

  const ChipSpec& chip_;
  const trace::CoreRecord& record_;
  int lanes_;
  Machine& machine_;
  std::map<int, std::size_t> items_;  // how many, by side
  std::map<PipeKey, Unit> pipes_;
  std::map<std::tuple<int, Pipe, Pipe, int>, int> flags_;
  std::map<std::pair<int, int>, int> counters_;
  std::map<int, std::vector<int>> parts_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_SCHEDULE_H_
