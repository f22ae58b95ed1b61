#include "npu_model/sync/core_planner.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "npu_model/status.h"

namespace cubist::sync {
namespace {

using trace::AgentOf;
using trace::CoreRecord;
using trace::GmAccess;
using trace::Instr;
using trace::IssuerOf;
using trace::kCubeAgents;
using trace::kVectorAgents;
using trace::Operand;
using trace::OperandUse;

constexpr std::array<Pipe, kCubeAgents> kCubePipes = {Pipe::kS,    Pipe::kMte1, Pipe::kMte2,
                                                      Pipe::kMte3, Pipe::kM,    Pipe::kFix};
constexpr std::array<Pipe, kVectorAgents> kVectorPipes = {Pipe::kS, Pipe::kMte2, Pipe::kMte3, Pipe::kV};

std::uint32_t Issuer(std::uint32_t agent) {
  return static_cast<std::uint32_t>(IssuerOf(static_cast<int>(agent)));
}
bool OnCube(std::uint32_t agent) { return agent < static_cast<std::uint32_t>(kCubeAgents); }

std::uint32_t AtLane(std::uint32_t of_lane0, int lane) {
  return of_lane0 + static_cast<std::uint32_t>(lane * kVectorAgents);
}
std::uint32_t AtLane0(std::uint32_t agent) {
  constexpr auto kFirst = static_cast<std::uint32_t>(kCubeAgents);
  return OnCube(agent) ? agent : kFirst + (agent - kFirst) % kVectorAgents;
}

}  // namespace

CorePlanner::CorePlanner(const CoreRecord& record, const ChipSpec& chip, bool vector_only, Policy policy,
                         std::vector<char> in_order, bool relays)
    : record_(record),
      chip_(chip),
      policy_(policy),
      relays_(relays),
      lanes_(vector_only ? 1 : chip.vector_per_cube),
      shared_(std::move(in_order)),
      slots_(record.slots.size()),
      workspace_(record.workspace.size()),
      tensors_(shared_.size()) {
  CUBIST_CHECK(lanes_ <= kMaxVectorPerCube, "more Vector cores per Cube core than a plan holds");
  for (int a = 0; a < kCubeAgents + lanes_ * kVectorAgents; ++a)
    places_[static_cast<std::size_t>(a)] = PlaceOf(a);
  for (auto& clock : clocks_) clock.fill(0);
  stale_.fill(true);
  current_.fill(0);
  seen_issue_.fill(0);
}

CorePlanner::Place CorePlanner::PlaceOf(int agent) {
  if (agent < kCubeAgents) return {kCubePipes[static_cast<std::size_t>(agent)], -1};
  const int at = agent - kCubeAgents;
  return {kVectorPipes[static_cast<std::size_t>(at % kVectorAgents)],
          static_cast<std::int8_t>(at / kVectorAgents)};
}

std::optional<CorePlan> CorePlanner::RunBelow(std::size_t sets) {
  std::size_t counted = 0, placed = 0;  // ops, and sets among them
  for (std::uint32_t i = 0; i < record_.instrs.size(); ++i) {
    const Instr& instr = record_.instrs[i];
    const auto agent = static_cast<std::uint32_t>(AgentOf(instr.pipe, instr.lane));
    JoinIssue(agent);
    FindNeeds(i, agent, instr);
    Settle(i, agent);
    Snapshot(agent, i);
    Complete(i, agent, instr);
    for (; counted < ops_.size(); ++counted) placed += IsSet(ops_[counted].kind);
    if (placed >= sets) return std::nullopt;
  }
  return InOrder();
}

std::vector<Shortage> CorePlanner::Shortages() const {
  std::vector<Shortage> all;
  for (const auto& [key, count] : shortages_) {
    const auto& [from, to, line, remedy] = key;
    all.push_back({places_[from].pipe, places_[to].pipe, OnCube(from) != OnCube(to), remedy,
                   record_.lines[line], count});
  }
  return all;
}

// What the scalar unit has waited for, whatever it issues next has waited for too. Its own component of a
// clock counts completed writes; reads are complete when the next instruction is issued.
void CorePlanner::JoinIssue(std::uint32_t agent) {
  const std::uint32_t issuer = Issuer(agent);
  if (agent == issuer || seen_issue_[agent] == issue_version_[issuer]) return;
  seen_issue_[agent] = issue_version_[issuer];
  Merge(agent, clocks_[issuer]);
}

void CorePlanner::Merge(std::uint32_t agent, const Clock& known) {
  Clock& clock = clocks_[agent];
  std::uint32_t changed = 0;  // bits
  for (std::size_t b = 0; b < clock.size(); ++b) {
    const std::uint32_t newer = std::max(clock[b], known[b]);
    changed |= newer ^ clock[b];
    clock[b] = newer;
  }
  if (changed != 0) stale_[agent] = true;
  if (stale_[agent] && agent == Issuer(agent)) ++issue_version_[agent];
}

// What `agent` knew behind a place in program order; null before its first instruction.
const CorePlanner::Clock* CorePlanner::ClockAt(std::uint32_t agent, std::uint32_t instr) const {
  const std::vector<Known>& known = history_[agent];
  if (known.empty() || known.front().instr > instr) return nullptr;
  // Mostly one of the last.
  auto end = known.end();
  std::ptrdiff_t step = 1;
  for (; end - known.begin() > step && (end - step)->instr > instr; step *= 2) end -= step;
  const auto after = std::upper_bound(end - std::min(step, end - known.begin()), end, instr,
                                      [](std::uint32_t i, const Known& k) { return i < k.instr; });
  return &snapshots_[(after - 1)->snapshot];
}

// `agent` now knows all that is complete once `from` is past `instr`.
void CorePlanner::Join(std::uint32_t agent, std::uint32_t from, std::uint32_t instr, const Clock* known) {
  if (known != nullptr) Merge(agent, *known);
  waited_[agent][from] = std::max(waited_[agent][from], instr + 1);
  std::uint32_t& own = clocks_[agent][from];
  if (own < instr + 1) {
    own = instr + 1;
    stale_[agent] = true;
    if (agent == Issuer(agent)) ++issue_version_[agent];
  }
}

void CorePlanner::Snapshot(std::uint32_t agent, std::uint32_t instr) {
  if (stale_[agent]) {
    stale_[agent] = false;
    current_[agent] = static_cast<std::uint32_t>(snapshots_.size());
    snapshots_.push_back(clocks_[agent]);
  }
  history_[agent].push_back({instr, current_[agent]});
}

// ---- What an instruction has to wait for ----

// What is changed in place is listed as read, too: whoever writes it waits for at least as much, if for the latest of each
// pipe alone.
bool CorePlanner::SaysMore(const Instr& instr, OperandUse use) const {
  if (policy_ != Policy::kMinimal || use.writes() || instr.pipe == Pipe::kMte2) return true;
  return std::find(instr.uses.begin(), instr.uses.end(), OperandUse(use.operand(), /*writes=*/true)) ==
         instr.uses.end();
}

// Puts them in front of touched_, and returns how many.
std::size_t CorePlanner::FindTouched(std::uint32_t i, std::uint32_t agent, const Instr& instr) {
  std::size_t count = 0;
  const auto touch = [&](Past& past, const Area& area, bool writes) {
    touched_[count++] = {&past, {area, i, static_cast<std::uint8_t>(agent), writes}};
  };
  for (const OperandUse use : instr.uses) {
    if (!use.used() || !SaysMore(instr, use)) continue;
    const Operand& o = record_.operands[use.operand()];
    Past& past = o.slot >= 0 ? slots_[static_cast<std::size_t>(o.slot)]
                             : workspace_[static_cast<std::size_t>(~o.slot)];
    touch(past, AreaOf(record_, chip_, o, Pads(instr, use)), use.writes());
  }
  if (instr.access >= 0) {
    const GmAccess& gm = record_.accesses[static_cast<std::size_t>(instr.access)];
    if (gm.tensor >= 0 && shared_[static_cast<std::size_t>(gm.tensor)]) {
      touch(tensors_[static_cast<std::size_t>(gm.tensor)], {0, 1, gm.offset, gm.end(), &gm}, gm.writes);
    }
  }
  return count;
}

void CorePlanner::FindNeeds(std::uint32_t i, std::uint32_t agent, const Instr& instr) {
  needs_.clear();
  const std::span touched(touched_.data(), FindTouched(i, agent, instr));
  for (const auto& [past, now] : touched) {
    const std::size_t of_operand = needs_.size();
    past->ForEachConflict(now, [&](const Touch& old) {
      // Same scalar unit: in order. A scalar read is complete when its unit issues what follows.
      if (old.agent == Issuer(agent) && (old.agent == agent || !old.writes)) return;
      AddNeed({old.agent, old.instr}, of_operand);
    });
  }
  // What a scalar unit reads is read before it issues anything else, so nobody has to wait for it.
  for (const auto& [past, now] : touched) {
    if (agent != Issuer(agent) || now.writes) past->Add(now);
  }
  FindReuse(i, agent);
}

// The latest of each pipe; by kPerTile of each operand and pipe.
void CorePlanner::AddNeed(const Need& need, std::size_t of_operand) {
  const std::size_t first = policy_ == Policy::kPerTile ? of_operand : 0;
  for (std::size_t n = first; n < needs_.size(); ++n) {
    if (needs_[n].agent != need.agent) continue;
    needs_[n].instr = std::max(needs_[n].instr, need.instr);
    return;
  }
  needs_.push_back(need);
}

// A flag must be down before it is set again. Where all ids of a pair may still be up, the setting pipe waits
// for the oldest wait, so that whatever is set behind this instruction has an id.
void CorePlanner::FindReuse(std::uint32_t i, std::uint32_t agent) {
  for (const std::uint32_t to : partners_[agent]) {
    const Pair& pair = pairs_[agent][to];
    if (FreeId(pair, agent, to, clocks_[agent], i) >= 0) continue;
    const std::uint32_t oldest = *std::min_element(pair.wait_before.begin(), pair.wait_before.end());
    needs_.push_back({to, oldest, true});
  }
  for (const Channel& channel : channels_) {
    const std::size_t limit = static_cast<std::size_t>(chip_.sync.cross_core_limit);
    const bool sends = channel.from_cube ? agent == channel.from : AtLane0(agent) == channel.from;
    if (!sends || channel.waits.size() < limit) continue;
    const std::uint32_t oldest = channel.waits[channel.waits.size() - limit];
    for (int lane = 0; lane < (channel.from_cube ? lanes_ : 1); ++lane)
      needs_.push_back({channel.from_cube ? AtLane(channel.to, lane) : channel.to, oldest, true,
                        /*mirrored=*/!channel.from_cube});
  }
}

// ---- Flags ----

void CorePlanner::Settle(std::uint32_t i, std::uint32_t agent) {
  if (needs_.empty()) return;
  std::erase_if(needs_, [&](const Need& n) {
    return policy_ == Policy::kMinimal || n.for_reuse ? IsKnown(agent, n) : IsWaitedFor(agent, n);
  });
  if (needs_.size() > 1) {
    std::sort(needs_.begin(), needs_.end(), [](const Need& x, const Need& y) {
      return std::tie(x.agent, x.instr) < std::tie(y.agent, y.instr);
    });
  }
  const Need* own = nullptr;
  for (std::size_t k = 0; k < needs_.size(); ++k) {
    const Need n = needs_[k];
    if (n.agent == agent) {
      own = &needs_[k];  // The latest comes last.
      continue;
    }
    const bool exact = policy_ == Policy::kPerTile && !n.for_reuse;
    if (exact ? IsWaitedFor(agent, n) : IsKnown(agent, n) || IsImplied(k, agent)) continue;
    if (n.for_reuse) NoteShortage(n.agent, agent, i, Shortage::Remedy::kWaitsForId);
    if (Issuer(agent) == Issuer(n.agent)) {
      PlaceFlag(i, agent, n);
    } else {
      PlaceCross(i, agent, n);
    }
  }
  // A pipe waited for may itself have waited for this one.
  const bool complete = own != nullptr && policy_ == Policy::kMinimal && IsKnown(agent, *own);
  if (own != nullptr && !complete && clocks_[agent][agent] <= history_[agent].back().instr) {
    ops_.push_back(Make(i, false, Kind::kPipeBarrier, agent, agent, 0));
    clocks_[agent][agent] = history_[agent].back().instr + 1;
    stale_[agent] = true;
  }
}

bool CorePlanner::IsKnown(std::uint32_t agent, const Need& n) const {
  if (!n.mirrored) return clocks_[agent][n.agent] > n.instr;
  for (int lane = 0; lane < lanes_; ++lane) {
    if (clocks_[AtLane(AtLane0(agent), lane)][n.agent] <= n.instr) return false;
  }
  return true;
}
bool CorePlanner::IsWaitedFor(std::uint32_t agent, const Need& n) const {
  return (n.agent == agent ? clocks_ : waited_)[agent][n.agent] > n.instr;
}
// Whether another need, still to be placed or placed just now, brings need k with it.
bool CorePlanner::IsImplied(std::size_t k, std::uint32_t agent) const {
  const Need& n = needs_[k];
  if (n.mirrored) return false;
  return std::any_of(needs_.begin(), needs_.end(), [&](const Need& other) {
    if (other.agent == agent) return false;
    if (other.agent == n.agent) return other.instr > n.instr;
    const Clock* known = ClockAt(other.agent, other.instr);
    return known != nullptr && (*known)[n.agent] > n.instr;
  });
}

SyncOp CorePlanner::Make(std::uint32_t instr, bool after, Kind kind, std::uint32_t agent, std::uint32_t peer,
                         int id) const {
  SyncOp op;
  op.instr = instr, op.after = after, op.kind = kind;
  op.pipe = places_[agent].pipe, op.lane = places_[agent].lane, op.peer = places_[peer].pipe;
  op.id = static_cast<std::uint8_t>(id);
  return op;
}

// An id whose last wait is over, as far as `from` knows by `clock` at its instruction `at`; -1 for none.
int CorePlanner::FreeId(const Pair& pair, std::uint32_t from, std::uint32_t to, const Clock& clock,
                        std::uint32_t at) const {
  const int used = static_cast<int>(pair.wait_before.size());
  for (int id = 0; id < used; ++id) {
    const std::uint32_t wait = pair.wait_before[static_cast<std::size_t>(id)];
    if (to == Issuer(from) ? wait < at : clock[to] > wait) return id;
  }
  return used < chip_.sync.event_ids ? used : -1;
}

void CorePlanner::PlaceFlag(std::uint32_t i, std::uint32_t agent, const Need& n) {
  const std::uint32_t from = n.agent;
  Pair& pair = pairs_[from][agent];
  if (!pair.active) {
    pair.active = true;
    partners_[from].push_back(agent);
  }
  const Clock* known = ClockAt(from, n.instr);
  int id = known == nullptr ? -1 : FreeId(pair, from, agent, *known, n.instr);
  if (id < 0 && pair.last_wait > n.instr) {
    // All ids are up between the instruction waited for and the waits before this one: the last of these
    // waits for it too.
    ops_[pair.last_set].instr = std::max(ops_[pair.last_set].instr, n.instr);
    NoteShortage(from, agent, pair.last_wait, Shortage::Remedy::kWaitsForLater);
    Join(agent, from, n.instr, known);
    return;
  }
  id = std::max(id, 0);  // FindReuse has seen to it that there is one.
  pair.wait_before.resize(std::max(pair.wait_before.size(), static_cast<std::size_t>(id) + 1));
  pair.last_set = ops_.size();
  pair.last_wait = i;
  pair.wait_before[static_cast<std::size_t>(id)] = i;
  ops_.push_back(Make(n.instr, true, Kind::kSetFlag, from, agent, id));
  ops_.push_back(Make(i, false, Kind::kWaitFlag, agent, from, id));
  Join(agent, from, n.instr, known);
}

// Null when the chip has no more ids. A counter is the waiting side's, so that both directions may count by one id.
CorePlanner::Channel* CorePlanner::ChannelOf(std::uint32_t from, std::uint32_t to) {
  const std::uint32_t from0 = AtLane0(from), to0 = AtLane0(to);
  for (Channel& c : channels_) {
    if (c.from == from0 && c.to == to0) return &c;
  }
  const int ids = chip_.sync.cross_core_ids - (relays_ ? 1 : 0);
  int id = static_cast<int>(channels_.size());
  const auto is_taken = [&](const Channel& c) { return c.from_cube == OnCube(from) && c.id == id; };
  if (id >= ids) {
    for (id = 0; id < ids && std::any_of(channels_.begin(), channels_.end(), is_taken);) ++id;
  }
  if (id >= ids) return nullptr;
  Channel& c = channels_.emplace_back();
  c.from_cube = OnCube(from);
  c.from = from0, c.to = to0;
  c.id = id;
  return &c;
}

// Mode 2 knows no single Vector core: all of them set, or all of them wait, at the same place in program
// order or behind the like instruction. It does not order Vector cores: of these the checker names the pair.
void CorePlanner::PlaceCross(std::uint32_t i, std::uint32_t agent, const Need& n) {
  if (OnCube(n.agent) == OnCube(agent)) return;
  Channel* const channel = ChannelOf(n.agent, agent);
  if (channel == nullptr) {
    if (relays_) {
      PlaceRelayed(i, agent, n);
    } else {
      lacks_ids_ = true;
    }
    return;
  }
  Channel& c = *channel;
  const std::size_t limit = static_cast<std::size_t>(chip_.sync.cross_core_limit);
  if (c.waits.size() >= limit && c.waits.back() > n.instr &&
      !WaitsOver(c, c.waits[c.waits.size() - limit], n.instr)) {
    // As with flags: an event that is set before this instruction and waited for behind it waits for more.
    NoteShortage(n.agent, agent, c.waits.back(), Shortage::Remedy::kWaitsForLater);
    MoveSets(c, n.agent, n.instr);
  } else {
    c.waits.push_back(i);
    if (c.from_cube) {
      c.last_instr[0] = n.instr;
      c.last_sets[0] = ops_.size();
      ops_.push_back(Make(n.instr, true, Kind::kCrossSet, c.from, c.to, c.id));
      for (int lane = 0; lane < lanes_; ++lane)
        ops_.push_back(Make(i, false, Kind::kCrossWait, AtLane(c.to, lane), c.from, c.id));
    } else {
      for (int lane = 0; lane < lanes_; ++lane) {
        const auto l = static_cast<std::size_t>(lane);
        c.last_instr[l] = SetPlace(c, lane, n, i);
        c.last_sets[l] = ops_.size();
        ops_.push_back(Make(c.last_instr[l], true, Kind::kCrossSet, AtLane(c.from, lane), c.to, c.id));
      }
      ops_.push_back(Make(i, false, Kind::kCrossWait, agent, c.from, c.id));
    }
  }
  for (int lane = 0; lane < lanes_; ++lane) {
    if (!c.from_cube) {
      Join(agent, AtLane(c.from, lane), c.last_instr[static_cast<std::size_t>(lane)]);
      continue;
    }
    const std::uint32_t to = AtLane(c.to, lane);
    Join(to, c.from, n.instr);
    if (to != agent) Snapshot(to, i);
  }
}

// By way of the scalar units: the one waits for the pipe and sets, the other waits and then issues what waits.
void CorePlanner::PlaceRelayed(std::uint32_t i, std::uint32_t agent, const Need& n) {
  const bool from_cube = OnCube(n.agent);
  NoteShortage(n.agent, agent, i, Shortage::Remedy::kRelayed);
  // An event the other way says that all events this way so far are over. None of those that it counts by is up.
  if (relayed_[from_cube ? 0 : 1] >= chip_.sync.cross_core_limit) Relay(i, !from_cube);
  if (n.agent != Issuer(n.agent)) PlaceFlag(i, Issuer(n.agent), n);
  Relay(i, from_cube);
  for (int lane = 0; lane < (from_cube ? lanes_ : 1); ++lane) {
    const std::uint32_t to = from_cube ? AtLane(AtLane0(agent), lane) : agent;
    JoinIssue(to);
    waited_[to][n.agent] = std::max(waited_[to][n.agent], n.instr + 1);
    if (to != agent) Snapshot(to, i);
  }
}

// From the scalar unit of the Cube core to those of its Vector cores, or back, in front of instruction i.
void CorePlanner::Relay(std::uint32_t i, bool from_cube) {
  const int id = chip_.sync.cross_core_ids - 1;
  const int setters = from_cube ? 1 : lanes_, waiters = from_cube ? lanes_ : 1;
  const std::uint32_t cube = Issuer(0), vector = Issuer(kCubeAgents);
  const std::uint32_t from = from_cube ? cube : vector, to = from_cube ? vector : cube;
  for (int lane = 0; lane < setters; ++lane) {
    ops_.push_back(Make(i, false, Kind::kCrossSet, AtLane(from, lane), to, id));
    Snapshot(AtLane(from, lane), i);
  }
  for (int w = 0; w < waiters; ++w) {
    ops_.push_back(Make(i, false, Kind::kCrossWait, AtLane(to, w), from, id));
    for (int s = 0; s < setters; ++s) Join(AtLane(to, w), AtLane(from, s), i);
    Snapshot(AtLane(to, w), i);
  }
  ++relayed_[from_cube ? 0 : 1];
  relayed_[from_cube ? 1 : 0] = 0;
}

// Behind which instruction Vector core `lane` sets its part of an event: the one waited for; on the other
// Vector cores the like one that follows it, if it stands before the wait, and otherwise the same place.
std::uint32_t CorePlanner::SetPlace(const Channel& c, int lane, const Need& n, std::uint32_t wait) const {
  const std::uint32_t from = AtLane(c.from, lane);
  const std::uint32_t at = std::max(c.last_instr[static_cast<std::size_t>(lane)], n.instr);
  if (from == n.agent) return at;
  const std::vector<Known>& all = history_[from];
  const auto next = std::upper_bound(all.begin(), all.end(), n.instr,
                                     [](std::uint32_t i, const Known& k) { return i < k.instr; });
  if (next == all.end() || next->instr >= wait || next->instr < at) return at;
  const Instr &like = record_.instrs[next->instr], &waited = record_.instrs[n.instr];
  return like.line == waited.line && like.op == waited.op ? next->instr : at;
}

void CorePlanner::MoveSets(Channel& c, std::uint32_t from, std::uint32_t instr) {
  for (int lane = 0; lane < (c.from_cube ? 1 : lanes_); ++lane) {
    const auto l = static_cast<std::size_t>(lane);
    if (!c.from_cube && from != AtLane(c.from, lane)) continue;
    c.last_instr[l] = std::max(c.last_instr[l], instr);
    ops_[c.last_sets[l]].instr = c.last_instr[l];
  }
}

// Whether every setter knows, where it sets for `instr`, that the waits before `wait` are over.
bool CorePlanner::WaitsOver(const Channel& c, std::uint32_t wait, std::uint32_t instr) const {
  for (int setter = 0; setter < (c.from_cube ? 1 : lanes_); ++setter) {
    const Clock* known = ClockAt(c.from_cube ? c.from : AtLane(c.from, setter), instr);
    for (int waiter = 0; waiter < (c.from_cube ? lanes_ : 1); ++waiter) {
      if (known == nullptr || (*known)[c.from_cube ? AtLane(c.to, waiter) : c.to] <= wait) return false;
    }
  }
  return true;
}

// ---- Inside a pipe ----

// What the next instruction of the pipe may take for complete.
void CorePlanner::Complete(std::uint32_t i, std::uint32_t agent, const Instr& instr) {
  if (instr.pipe == Pipe::kS) return;
  if (instr.pipe == Pipe::kV && chip_.sync.vector_needs_barrier) return;
  if (instr.pipe == Pipe::kM) {
    const std::int64_t steps =
        CeilDiv(instr.dims[0], chip_.mmad.m_step) * CeilDiv(instr.dims[1], chip_.mmad.n_step);
    if (steps < chip_.sync.mmad_barrier_below) return;
  } else if (instr.pipe != Pipe::kV && chip_.sync.moves_need_barrier) {
    return;
  }
  clocks_[agent][agent] = i + 1;
}

void CorePlanner::NoteShortage(std::uint32_t from, std::uint32_t to, std::uint32_t instr,
                               Shortage::Remedy remedy) {
  ++shortages_[{AtLane0(from), AtLane0(to), record_.instrs[instr].line, remedy}];
}

CorePlan CorePlanner::InOrder() {
  std::vector<std::uint32_t> begin(2 * record_.instrs.size() + 1);
  for (const SyncOp& op : ops_) ++begin[op.position() + 1];
  for (std::size_t p = 1; p < begin.size(); ++p) begin[p] += begin[p - 1];
  CorePlan plan;
  plan.ops.resize(ops_.size());
  for (const SyncOp& op : ops_) plan.ops[begin[op.position()]++] = op;
  return plan;
}

}  // namespace cubist::sync
