// CoreChecker: one core of one phase under its plan. Every pipe runs as far as flags let it go; clocks tell what it
// may count on, shadow memory what it touches.
//
//   core_checker.cc  pipes and their queues      check_memory.cc  accesses, races and reports
//   check_flags.cc   flags and barriers          check_end.cc     deadlocks, flags left set
#ifndef CUBIST_NPU_MODEL_SYNC_CORE_CHECKER_H_
#define CUBIST_NPU_MODEL_SYNC_CORE_CHECKER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/agents.h"
#include "npu_model/sync/findings.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/shadow.h"
#include "npu_model/sync/shared_gm.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

struct VectorClock {
  std::array<std::uint32_t, kComponents> at{};

  // Of the sides from the first one on.
  void Join(const VectorClock& o, std::size_t first_side, std::size_t sides) {
    for (std::size_t side = first_side; side < sides; ++side) {
      for (std::size_t c = side * kPipes; c < (side + 1) * kPipes; ++c) at[c] = std::max(at[c], o.at[c]);
    }
  }
};

// First in, first out. Most of a checker's are never used; these hold no memory, as a std::deque would.
template <class T>
class Fifo {
 public:
  bool empty() const { return first_ == items_.size(); }
  std::size_t size() const { return items_.size() - first_; }
  const T& front() const { return items_[first_]; }
  auto begin() const { return items_.begin() + static_cast<std::ptrdiff_t>(first_); }
  auto end() const { return items_.end(); }

  void push_back(const T& item) { items_.push_back(item); }
  void pop_front() {
    ++first_;
    if (first_ == items_.size()) {
      items_.clear();
    } else if (2 * first_ < items_.size()) {
      return;
    } else {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(first_));
    }
    first_ = 0;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;  // those before it are gone
};

class CoreChecker {
 public:
  CoreChecker(const trace::Record& record, const GmState& gm, const GmWatch& watch, std::size_t phase,
              std::size_t core, const CorePlan& plan);

  void Run();

  std::vector<Finding> TakeFindings() { return findings_.Take(); }
  std::string TakeDot() { return std::move(dot_); }
  std::int64_t accesses() const { return accesses_; }
  // Of each tensor: whether it counted on bytes that earlier phases wrote.
  const std::vector<char>& asked() const { return asked_; }

 private:
  // An instruction, or an entry of the plan.
  struct Item {
    std::uint32_t index = 0;
    std::uint8_t agent = 0;
    bool is_op = false;
    std::uint32_t issue_version = 0;  // of its scalar unit's clock,
    std::uint32_t issue_count = 0;    // and how much that unit had executed
  };

  // A flag of a pair of pipes, or a cross-core counter on one side.
  struct Set {
    VectorClock clock;
    SyncOp by;
  };
  struct Flag {
    Fifo<Set> up;              // not waited for
    std::vector<Epoch> waits;  // of every wait so far, the agent that waited
    std::int64_t sets = 0;
    std::vector<std::size_t> blocked;        // agents that wait
    std::array<std::size_t, kSides> setter;  // the pipe of each side that sets it
    Flag() { setter.fill(kComponents); }
    // Sets by some Vector cores, not yet by all.
    std::array<Fifo<VectorClock>, kMaxVectorPerCube> parts;
    std::array<std::int64_t, kMaxVectorPerCube> part_sets{};
  };
  using FlagKey = std::uint32_t;
  static constexpr std::int32_t kPadding = INT32_MIN;  // Interval::slot of what a move wrote beside its bytes
  // An instruction that reads and writes the same bytes checks its reads, then writes, and only then notes reads of
  // bytes that it did not write: noted before, they would stand in for older reads that the write has to follow.
  enum class Touched : std::uint8_t { kRead, kCheckRead, kNoteRead, kWrite, kUpdate, kPad };

  struct Access {
    std::int32_t slot;    // index or ~index, as in an Operand
    std::int32_t tensor;  // -1: a slot
    std::uint32_t instr;
    std::size_t agent;
    std::uint32_t count;
    Touched how;

    bool writes() const { return how >= Touched::kWrite; }
  };

  // Where an operand lies, once it is known.
  struct Where {
    Shadow* shadow = nullptr;
    std::int64_t begin = 0, end = 0;  // if that is all of it
    bool in_one = false;
    std::int8_t lane = -1;  // in UB: elements between the beginning of a block and its own
    std::size_t at = 0;     // of its interval, as far as one can tell
  };

  static CorePlan InOrder(CorePlan plan);
  Item OpItem(std::size_t index) const;

  // Running.
  void Issue(const Item& item);
  bool TryIssue(Item item);
  void Wake();
  bool Execute(const Item& item);
  void JoinIssue(std::size_t agent, const Item& item);
  void RunInstr(std::uint32_t i, std::size_t agent, std::uint32_t count);
  bool EndsInOrder(const trace::Instr& instr) const;
  std::size_t sides() const { return static_cast<std::size_t>(lanes_) + 1; }

  // Flags.
  static FlagKey KeyOf(const SyncOp& op);
  static FlagKey CrossKey(std::size_t side, std::uint8_t id);
  Flag& FlagOf(FlagKey key);
  bool Acceptable(const SyncOp& op);
  std::string WhatIsWrong(const SyncOp& op) const;
  bool Down(const SyncOp& op, std::size_t agent);
  void RunOp(const SyncOp& op, std::size_t agent, std::uint32_t count);
  VectorClock SetClock(std::size_t agent, std::uint32_t count) const;
  void Raise(Flag& flag, const SyncOp& op, const VectorClock& clock, int limit);
  void RaisePart(Flag& flag, const SyncOp& op, const VectorClock& clock);
  void Lower(Flag& flag, const SyncOp& op, std::size_t agent, std::uint32_t count);
  void Deliver(Flag& flag, const SyncOp& op, const VectorClock& clock);
  void NoteSetter(Flag& flag, const SyncOp& op);
  void ExpectOver(const Flag& flag, std::int64_t sets, const SyncOp& op, const VectorClock& clock, int limit);
  void AddTwoPipes(const SyncOp& op, const char* what);

  // Memory.
  bool Held(std::size_t tensor, std::int64_t begin, std::int64_t end);
  void TouchOperand(std::uint32_t number, std::uint32_t i, std::size_t agent, std::uint32_t count,
                    Touched how);
  bool WritesInto(const trace::Instr& instr, std::uint32_t operand) const;
  void Locate(std::uint32_t operand);
  void CheckBlocks(std::uint32_t i, std::size_t agent, std::uint32_t count);
  void Pad(Shadow& shadow, std::int64_t end, const Access& now);
  const trace::SlotInfo& SlotOf(std::int32_t slot) const;
  void TouchGm(const trace::GmAccess& gm, std::uint32_t i, std::size_t agent, std::uint32_t count);
  void Touch(Shadow& shadow, std::int64_t begin, std::int64_t end, const Access& now, std::size_t* at);
  void CheckRead(const Interval& part, const Access& now);
  static void NoteRead(Interval& part, const Epoch& mine);
  bool Ordered(const Epoch& past, const Access& now) const;

  // Reports.
  Finding Start(Fault fault) const;
  Place PlaceOf(const SyncOp& op) const;
  std::string MemoryName(const Access& access) const;
  std::string SlotName(std::int32_t slot) const;
  void Report(Fault fault, std::int64_t begin, std::int64_t end, const Access& now, const Epoch* past,
              std::int32_t other_slot = 0);
  std::string MissingEdge(const Place& first, const Place& second) const;
  static std::string FlagName(const SyncOp& op);
  static std::string AgentName(std::size_t agent);
  static std::string Near(const Place& place);

  // At the end.
  const Item* BlockedAt(std::size_t agent) const;
  std::size_t SetterOf(const SyncOp& wait) const;
  void FindStuck();
  std::size_t ExplainWait(std::size_t agent, Finding& f, std::string& edges) const;
  void Explain(std::size_t start, std::set<std::size_t>& reported);
  void FindLeftSet();
  void AddLeftSet(const SyncOp& op);

  const trace::Record& record_;
  const ChipSpec& chip_;
  const GmState& gm_;
  std::size_t phase_, core_;
  const trace::CoreRecord& from_;
  const CorePlan plan_;
  int lanes_;
  std::size_t components_, first_side_;
  std::size_t queue_depth_;

  std::array<VectorClock, kComponents> clocks_;
  std::array<std::uint32_t, kComponents> counts_{};  // instructions and flags executed
  std::array<std::vector<VectorClock>, kSides> issue_versions_;
  std::array<std::uint32_t, kComponents> seen_version_{};
  std::array<Fifo<Item>, kComponents> queues_;
  std::array<Fifo<Item>, kSides> unissued_;
  std::vector<std::size_t> woken_;
  std::unordered_map<FlagKey, Flag> flags_;
  std::array<std::pair<FlagKey, Flag*>, 64> recent_{};  // some of them, by key

  std::vector<Shadow> on_chip_;  // by buffer and side
  std::vector<Where> where_;     // by operand
  Shadow workspace_{20};
  const GmWatch& watch_;
  std::vector<Shadow> tensors_;  // by number; only those that are watched in order hold anything
  std::vector<char> asked_;
  Findings findings_;
  std::string dot_;
  std::int64_t accesses_ = 0;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_CORE_CHECKER_H_
