#include "npu_model/sync/core_checker.h"

namespace cubist::sync {

CoreChecker::FlagKey CoreChecker::KeyOf(const SyncOp& op) {
  if (op.kind == Kind::kSetFlag || op.kind == Kind::kWaitFlag) {
    const Pipe from = op.kind == Kind::kSetFlag ? op.pipe : op.peer;
    const Pipe to = op.kind == Kind::kSetFlag ? op.peer : op.pipe;
    return (static_cast<FlagKey>(op.lane + 1) * 8 + static_cast<FlagKey>(from)) * 8 * 256 +
           static_cast<FlagKey>(to) * 256 + op.id;
  }
  return 0;
}
// A cross-core counter lives on the waiting side: side 0 is the Cube core.
CoreChecker::FlagKey CoreChecker::CrossKey(std::size_t side, std::uint8_t id) {
  return (FlagKey{1} << 24) + static_cast<FlagKey>(side) * 256 + id;
}

CoreChecker::Flag& CoreChecker::FlagOf(FlagKey key) {
  auto& [known, flag] = recent_[(key * 0x9e3779b1u) >> 26];
  if (flag == nullptr || known != key) known = key, flag = &flags_[key];
  return *flag;
}

bool CoreChecker::Acceptable(const SyncOp& op) {
  std::string wrong = WhatIsWrong(op);
  if (wrong.empty()) return true;
  Finding f = Start(Fault::kBadOp);
  f.second = PlaceOf(op);
  f.cure = std::move(wrong);
  findings_.Add(std::move(f));
  return false;
}

std::string CoreChecker::WhatIsWrong(const SyncOp& op) const {
  const bool cross = op.kind == Kind::kCrossSet || op.kind == Kind::kCrossWait;
  const bool barrier = op.kind == Kind::kPipeBarrier;
  const int ids = cross ? chip_.sync.cross_core_ids : chip_.sync.event_ids;
  const auto exists = [&](Pipe pipe) {
    if (op.lane < 0) return pipe != Pipe::kV;
    return pipe == Pipe::kS || pipe == Pipe::kMte2 || pipe == Pipe::kMte3 || pipe == Pipe::kV;
  };
  if (op.instr >= from_.instrs.size())
    return "stands at instruction " + std::to_string(op.instr) + " of " + std::to_string(from_.instrs.size());
  if (op.lane >= lanes_)
    return "is on Vector core " + std::to_string(op.lane) + " of " + std::to_string(lanes_);
  if (!exists(op.pipe) || (!cross && !exists(op.peer)))
    return std::string("names pipe ") + NameOf(exists(op.pipe) ? op.peer : op.pipe) +
           ", which this side of the core does not have";
  if (barrier) return op.pipe == Pipe::kS ? "PipeBarrier does not take pipe S" : "";
  if (!cross && op.pipe == op.peer) return std::string("is from pipe ") + NameOf(op.pipe) + " to itself";
  if (op.id >= ids)
    return "has id " + std::to_string(op.id) + ", the chip has 0 to " + std::to_string(ids - 1);
  return "";
}

// Whether a wait can go on; otherwise its pipe is noted at the flag.
bool CoreChecker::Down(const SyncOp& op, std::size_t agent) {
  Flag& flag = FlagOf(op.kind == Kind::kWaitFlag ? KeyOf(op) : CrossKey(SideOf(agent), op.id));
  if (!flag.up.empty()) return true;
  if (std::find(flag.blocked.begin(), flag.blocked.end(), agent) == flag.blocked.end())
    flag.blocked.push_back(agent);
  return false;
}

void CoreChecker::RunOp(const SyncOp& op, std::size_t agent, std::uint32_t count) {
  VectorClock& clock = clocks_[agent];
  switch (op.kind) {
    case Kind::kPipeBarrier:
      clock.at[agent] = count;
      break;
    case Kind::kSetFlag:
      Raise(FlagOf(KeyOf(op)), op, SetClock(agent, count), 1);
      break;
    case Kind::kCrossSet:
      if (op.lane < 0) {
        for (int lane = 0; lane < lanes_; ++lane)
          Raise(FlagOf(CrossKey(static_cast<std::size_t>(lane) + 1, op.id)), op, SetClock(agent, count),
                chip_.sync.cross_core_limit);
      } else {
        RaisePart(FlagOf(CrossKey(0, op.id)), op, SetClock(agent, count));
      }
      break;
    case Kind::kWaitFlag:
      Lower(FlagOf(KeyOf(op)), op, agent, count);
      break;
    case Kind::kCrossWait:
      Lower(FlagOf(CrossKey(SideOf(agent), op.id)), op, agent, count);
      break;
  }
}
// A set stands for everything before it on its pipe, complete.
VectorClock CoreChecker::SetClock(std::size_t agent, std::uint32_t count) const {
  VectorClock clock = clocks_[agent];
  clock.at[agent] = count;
  if (IsScalar(agent)) clock.at[agent + kScalarWrites] = count;
  return clock;
}

void CoreChecker::Raise(Flag& flag, const SyncOp& op, const VectorClock& clock, int limit) {
  ExpectOver(flag, flag.sets, op, clock, limit);
  NoteSetter(flag, op);
  ++flag.sets;
  Deliver(flag, op, clock);
}

void CoreChecker::RaisePart(Flag& flag, const SyncOp& op, const VectorClock& clock) {
  const auto lane = static_cast<std::size_t>(op.lane);
  ExpectOver(flag, flag.part_sets[lane], op, clock, chip_.sync.cross_core_limit);
  NoteSetter(flag, op);
  ++flag.part_sets[lane];
  flag.parts[lane].push_back(clock);
  VectorClock all;
  for (int l = 0; l < lanes_; ++l) {
    auto& part = flag.parts[static_cast<std::size_t>(l)];
    if (part.empty()) return;
  }
  for (int l = 0; l < lanes_; ++l) {
    auto& part = flag.parts[static_cast<std::size_t>(l)];
    all.Join(part.front(), first_side_, sides());
    part.pop_front();
  }
  ++flag.sets;
  Deliver(flag, op, all);
}

// Which of two pipes comes first is anybody's guess, and so is which set ends which wait.
void CoreChecker::AddTwoPipes(const SyncOp& op, const char* what) {
  Finding f = Start(Fault::kBadOp);
  f.second = PlaceOf(op);
  f.memory = FlagName(op);
  f.cure = std::string("two pipes of a core ") + what + " the same flag; take another id";
  findings_.Add(std::move(f));
}

void CoreChecker::NoteSetter(Flag& flag, const SyncOp& op) {
  const std::size_t agent = AgentAt(op.pipe, op.lane);
  std::size_t& setter = flag.setter[SideOf(agent)];
  if (setter != kComponents && setter != agent) AddTwoPipes(op, "set");
  setter = agent;
}

void CoreChecker::Deliver(Flag& flag, const SyncOp& op, const VectorClock& clock) {
  flag.up.push_back({clock, op});
  woken_.insert(woken_.end(), flag.blocked.begin(), flag.blocked.end());
  flag.blocked.clear();
}

// The set that makes one more than the limit must know that the wait which makes room is over.
void CoreChecker::ExpectOver(const Flag& flag, std::int64_t sets, const SyncOp& op, const VectorClock& clock,
                             int limit) {
  const std::int64_t freed = sets - limit;  // this wait, counted from 0
  if (freed < 0) return;
  const auto at = static_cast<std::size_t>(freed);
  if (at < flag.waits.size() && clock.at[flag.waits[at].component] >= flag.waits[at].count) return;
  Finding f = Start(Fault::kSetTwice);
  f.second = PlaceOf(op);
  f.memory = FlagName(op);
  f.cure = limit == 1
               ? "the flag may still be up; order its last wait before this set, or take another id"
               : "the counter may pass " + std::to_string(limit) + "; order an earlier wait before this set";
  findings_.Add(std::move(f));
}

void CoreChecker::Lower(Flag& flag, const SyncOp& op, std::size_t agent, std::uint32_t count) {
  if (!flag.waits.empty() && flag.waits.back().component != agent) AddTwoPipes(op, "wait for");
  clocks_[agent].Join(flag.up.front().clock, first_side_, sides());
  flag.up.pop_front();
  flag.waits.push_back({count, 0, static_cast<std::uint8_t>(agent)});
  if (IsScalar(agent)) issue_versions_[SideOf(agent)].push_back(clocks_[agent]);
}

}  // namespace cubist::sync
