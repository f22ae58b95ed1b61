// Runs a record under a plan in any order that pipes and flags allow, on symbols: every element of every slot holds
// a hash of how it came about. A plan that orders all conflicts gives the same symbols in every order, bit for bit.
#ifndef CUBIST_TESTS_SYNC_SCHEDULES_H_
#define CUBIST_TESTS_SYNC_SCHEDULES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::testing {

enum class Schedule {
  kProgramOrder,  // the earliest instruction that can go on, and to its end
  kEager,         // what is under way ends first, then the pipe that lags behind
  kLate,          // results arrive as late as flags allow, and pipes run ahead of each other
  kRandom,
};

class SymbolicRun {
 public:
  SymbolicRun(const ChipSpec& chip, const trace::CoreRecord& record, const sync::CorePlan& plan, int lanes)
      : chip_(chip),
        record_(record),
        lanes_(lanes),
        slots_(record.slots.size()),
        workspace_(record.workspace.size()) {
    for (std::size_t s = 0; s < slots_.size(); ++s) slots_[s].assign(Elements(record.slots[s]), s + 1);
    for (std::size_t s = 0; s < workspace_.size(); ++s)
      workspace_[s].assign(Elements(record.workspace[s]), s + 99);
    std::size_t op = 0;
    for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
      for (; op < plan.ops.size() && plan.ops[op].position() <= 2 * std::uint64_t{i}; ++op)
        AddOp(plan.ops[op]);
      Add({record.instrs[i].pipe, record.instrs[i].lane, i, nullptr});
    }
    for (; op < plan.ops.size(); ++op) AddOp(plan.ops[op]);
  }

  // A hash of everything on chip and of everything stored; nothing if the run gets stuck.
  std::optional<std::uint64_t> Run(Schedule schedule, unsigned seed) {
    std::mt19937 random(seed);
    while (true) {
      const std::vector<Action> actions = Possible();
      if (actions.empty()) break;
      Do(Choose(actions, schedule, random));
    }
    for (const auto& [key, pipe] : pipes_) {
      if (pipe.at != pipe.queue.size()) return std::nullopt;
    }
    std::uint64_t hash = 0;
    for (const auto* buffers : {&slots_, &workspace_}) {
      for (const auto& buffer : *buffers) {
        for (const std::uint64_t symbol : buffer) hash = Mix(hash, symbol);
      }
    }
    for (const auto& [key, symbol] : stored_) hash = Mix(hash, symbol);
    return hash;
  }

 private:
  struct Item {
    Pipe pipe;
    std::int8_t lane;
    std::uint32_t instr;
    const sync::SyncOp* op;
    std::size_t issue = 0;  // number among the items of its side
  };
  struct Pending {
    std::uint32_t instr;
    std::uint64_t inputs;
  };
  struct Unit {
    std::vector<Item> queue;
    std::size_t at = 0;
    std::vector<Pending> pending;  // started, results not there yet
    bool last_in_order = true;     // the last instruction started must end before the next starts
  };
  using PipeKey = std::pair<int, Pipe>;
  struct Action {
    PipeKey pipe;
    bool ends;  // a pending instruction, by number; otherwise the next item starts
    std::size_t which;
    std::uint32_t instr;
  };

  static std::size_t Elements(const trace::SlotInfo& slot) {
    return static_cast<std::size_t>(slot.rows * slot.cols);
  }
  static std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    return h ^ h >> 29;
  }

  void AddOp(const sync::SyncOp& op) { Add({op.pipe, op.lane, op.instr, &op}); }
  void Add(Item item) {
    item.issue = sides_[item.lane].items++;
    pipes_[{item.lane, item.pipe}].queue.push_back(item);
  }

  std::vector<Action> Possible() const {
    std::vector<Action> actions;
    for (const auto& [key, unit] : pipes_) {
      for (std::size_t p = 0; p < unit.pending.size(); ++p)
        actions.push_back({key, true, p, unit.pending[p].instr});
      if (unit.at < unit.queue.size() && MayStart(key, unit))
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

  bool MayStart(const PipeKey&, const Unit& unit) const {
    const Item& item = unit.queue[unit.at];
    if (!Issued(item)) return false;
    if (item.op == nullptr) return unit.pending.empty() || !unit.last_in_order;
    switch (item.op->kind) {
      case sync::Kind::kSetFlag:
      case sync::Kind::kCrossSet:
      case sync::Kind::kPipeBarrier:
        return unit.pending.empty();
      case sync::Kind::kWaitFlag: {
        const auto flag = flags_.find({item.lane, item.op->peer, item.pipe, item.op->id});
        return flag != flags_.end() && flag->second > 0;
      }
      case sync::Kind::kCrossWait:
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
      const Pending done = unit.pending[action.which];
      unit.pending.erase(unit.pending.begin() + static_cast<std::ptrdiff_t>(action.which));
      Write(done);
      return;
    }
    const Item& item = unit.queue[unit.at++];
    if (item.op != nullptr) return Synchronise(*item.op);
    unit.pending.push_back({item.instr, Read(item.instr)});
    unit.last_in_order = InOrder(record_.instrs[item.instr]);
    // A scalar read is over when the unit goes on; only its writes come late.
    if (item.pipe == Pipe::kS && !Writes(record_.instrs[item.instr])) unit.pending.pop_back();
  }

  bool InOrder(const trace::Instr& instr) const {
    if (instr.pipe == Pipe::kS) return true;  // for itself; what it issues may overtake its writes
    if (instr.pipe == Pipe::kV) return !chip_.sync.vector_needs_barrier;
    if (instr.pipe != Pipe::kM) return true;
    return ((instr.dims[0] + 15) / 16) * ((instr.dims[1] + 15) / 16) >= chip_.sync.mmad_barrier_below;
  }
  static bool Writes(const trace::Instr& instr) {
    return std::any_of(instr.uses.begin(), instr.uses.end(),
                       [](trace::OperandUse use) { return use.used() && use.writes(); });
  }

  void Synchronise(const sync::SyncOp& op) {
    switch (op.kind) {
      case sync::Kind::kSetFlag:
        ++flags_[{op.lane, op.pipe, op.peer, op.id}];
        break;
      case sync::Kind::kWaitFlag:
        --flags_[{op.lane, op.peer, op.pipe, op.id}];
        break;
      case sync::Kind::kPipeBarrier:
        break;
      case sync::Kind::kCrossSet:
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
      case sync::Kind::kCrossWait:
        --counters_[{op.lane, op.id}];
        break;
    }
  }

  template <class Visit>
  void ForEachElement(trace::OperandUse use, Visit visit) {
    const trace::Operand& o = record_.operands[use.operand()];
    const auto number = static_cast<std::size_t>(o.slot >= 0 ? o.slot : ~o.slot);
    const trace::SlotInfo& info = o.slot >= 0 ? record_.slots[number] : record_.workspace[number];
    auto& symbols = o.slot >= 0 ? slots_[number] : workspace_[number];
    for (std::int64_t r = o.row_begin; r < o.row_end; ++r) {
      for (std::int64_t c = o.col_begin; c < o.col_end; ++c)
        visit(symbols[static_cast<std::size_t>(r * info.cols + c)]);
    }
  }

  std::uint64_t Read(std::uint32_t i) {
    std::uint64_t hash = i;
    for (const trace::OperandUse use : record_.instrs[i].uses) {
      if (use.used()) ForEachElement(use, [&](const std::uint64_t& symbol) { hash = Mix(hash, symbol); });
    }
    return hash;
  }

  void Write(const Pending& done) {
    const trace::Instr& instr = record_.instrs[done.instr];
    std::uint64_t symbol = done.inputs;
    for (const trace::OperandUse use : instr.uses) {
      if (use.used() && use.writes())
        ForEachElement(use, [&](std::uint64_t& to) { to = symbol = Mix(symbol, 1); });
    }
    if (instr.access < 0) return;
    const trace::GmAccess& gm = record_.accesses[static_cast<std::size_t>(instr.access)];
    if (gm.writes && gm.tensor >= 0) stored_[{gm.tensor, gm.offset}] = done.inputs;
  }

  struct Side {
    std::size_t items = 0;
  };
  const ChipSpec& chip_;
  const trace::CoreRecord& record_;
  int lanes_;
  std::vector<std::vector<std::uint64_t>> slots_, workspace_;
  std::map<int, Side> sides_;
  std::map<PipeKey, Unit> pipes_;
  std::map<std::tuple<int, Pipe, Pipe, int>, int> flags_;
  std::map<std::pair<int, int>, int> counters_;
  std::map<int, std::vector<int>> parts_;
  std::map<std::pair<std::int32_t, std::int64_t>, std::uint64_t> stored_;
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_SCHEDULES_H_
