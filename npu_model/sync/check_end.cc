#include "npu_model/sync/core_checker.h"

namespace cubist::sync {

// The item that a pipe cannot get past; null if it has nothing left. Behind a scalar unit that waits, that is
// the scalar unit's.
const CoreChecker::Item* CoreChecker::BlockedAt(std::size_t agent) const {
  if (IsScalar(agent)) {
    const auto& waiting = unissued_[SideOf(agent)];
    return waiting.empty() ? nullptr : &waiting.front();
  }
  return queues_[agent].empty() ? nullptr : &queues_[agent].front();
}

// A pipe with a set of this flag still to come, and whether it waits for its own queue or to be issued.
// Looks for the set by Vector core `lane` where the wait is for all of them.
std::size_t CoreChecker::SetterOf(const SyncOp& wait) const {
  const auto is_setter = [&](const Item& item) {
    if (!item.is_op) return false;
    const SyncOp& op = plan_.ops[item.index];
    if (wait.kind == Kind::kWaitFlag) return op.kind == Kind::kSetFlag && KeyOf(op) == KeyOf(wait);
    if (op.kind != Kind::kCrossSet || op.id != wait.id) return false;
    if (wait.lane >= 0) return op.lane < 0;
    const auto& flag = flags_.find(CrossKey(0, wait.id));
    return op.lane >= 0 &&
           (flag == flags_.end() || flag->second.parts[static_cast<std::size_t>(op.lane)].empty());
  };
  for (std::size_t agent = 0; agent < components_; ++agent) {
    const auto& queue = queues_[agent];
    if (std::any_of(queue.begin(), queue.end(), is_setter)) return agent;
  }
  for (std::size_t side = 0; side < kSides; ++side) {
    const auto& waiting = unissued_[side];
    if (std::any_of(waiting.begin(), waiting.end(), is_setter)) return side * kPipes;
  }
  return kComponents;
}

void CoreChecker::FindStuck() {
  std::set<std::size_t> reported;
  for (std::size_t start = 0; start < components_; ++start) {
    if (start % kPipes == kScalarWrites || BlockedAt(start) == nullptr || reported.contains(start)) continue;
    Explain(start, reported);
  }
}

// Tells what holds `agent` up, and returns who could end that: kComponents if nobody will.
std::size_t CoreChecker::ExplainWait(std::size_t agent, Finding& f, std::string& edges) const {
  const std::string edge = "  \"" + AgentName(agent) + "\" -> ";
  const Item& blocked = *BlockedAt(agent);
  if (blocked.agent != agent) {  // A scalar unit in front of a pipe's full queue.
    const std::string pipe = AgentName(blocked.agent);
    f.chain.push_back(AgentName(agent) + " cannot issue to " + pipe + ", whose queue holds " +
                      std::to_string(queue_depth_) + " already");
    edges += edge + "\"" + pipe + "\" [label=\"queue full\"];\n";
    return blocked.agent;
  }
  const SyncOp& wait = plan_.ops[blocked.index];
  const auto flag =
      flags_.find(wait.kind == Kind::kWaitFlag ? KeyOf(wait) : CrossKey(SideOf(agent), wait.id));
  const std::int64_t sets = flag == flags_.end() ? 0 : flag->second.sets;
  const Place place = PlaceOf(wait);
  f.chain.push_back(AgentName(agent) + " waits at " + FlagName(wait) + " " + Near(place) +
                    ", for set number " + std::to_string(sets + 1));
  const std::size_t setter = SetterOf(wait);
  if (f.memory.empty() || setter == kComponents) f.second = place, f.memory = FlagName(wait);
  if (setter == kComponents) {
    f.chain.push_back("which nothing sets: the plan sets it " + std::to_string(sets) + " times");
    edges += edge + "\"never set\" [label=\"" + FlagName(wait) + "\"];\n" +
             "  \"never set\" [color=red, fontcolor=red];\n";
    f.fault = Fault::kNeverSet;
    return kComponents;
  }
  edges += edge + "\"" + AgentName(setter) + "\" [label=\"" + FlagName(wait) + " before line " +
           std::to_string(place.line.line) + "\"];\n";
  return setter;
}

// Follows who waits for whom from a stuck pipe to a cycle, or to a flag that nobody sets.
void CoreChecker::Explain(std::size_t start, std::set<std::size_t>& reported) {
  Finding f = Start(Fault::kDeadlock);
  std::vector<std::size_t> path;
  std::string edges;
  std::size_t agent = start;
  while (true) {
    const auto seen = std::find(path.begin(), path.end(), agent);
    if (seen != path.end()) {
      f.chain.push_back("which is where the cycle closes: " + AgentName(agent));
      for (auto at = seen; at != path.end(); ++at)
        edges += "  \"" + AgentName(*at) + "\" [color=red, fontcolor=red];\n";
      break;
    }
    if (reported.contains(agent)) return;  // Its cause has been told.
    path.push_back(agent);
    const std::size_t next = ExplainWait(agent, f, edges);
    if (next == kComponents) break;
    agent = next;
  }
  for (const std::size_t a : path) reported.insert(a);
  f.cure = f.fault == Fault::kNeverSet ? "add the set, or drop the wait"
                                       : "move one of these waits behind its set";
  if (dot_.empty()) dot_ = "digraph deadlock {\n" + edges + "}\n";
  findings_.Add(std::move(f));
}

std::string CoreChecker::Near(const Place& place) {
  return std::string("near ") + place.line.file + ":" + std::to_string(place.line.line);
}

void CoreChecker::FindLeftSet() {
  for (const auto& [key, flag] : flags_) {
    for (const Set& set : flag.up) AddLeftSet(set.by);
    const bool part =
        std::any_of(flag.parts.begin(), flag.parts.end(), [](const auto& p) { return !p.empty(); });
    if (!part) continue;
    SyncOp op;  // Which of the sets is missing cannot be told; the flag can.
    op.kind = Kind::kCrossSet, op.lane = 0, op.id = static_cast<std::uint8_t>(key % 256);
    for (std::size_t lane = 0; lane < flag.parts.size(); ++lane) {
      if (!flag.parts[lane].empty()) op.lane = static_cast<std::int8_t>(lane);
    }
    AddLeftSet(op);
  }
}
void CoreChecker::AddLeftSet(const SyncOp& op) {
  Finding f = Start(Fault::kLeftSet);
  f.second = PlaceOf(op);
  f.memory = FlagName(op);
  f.cure = "add the wait, or drop the set";
  findings_.Add(std::move(f));
}

}  // namespace cubist::sync
