#include "npu_model/trace/phase_replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "npu_model/status.h"

namespace cubist::trace {
namespace {

// Of a first-in-first-out list of which `head` are used up.
template <class T>
void DropFront(std::vector<T>& list, std::size_t& head) {
  constexpr std::size_t kMost = 64;
  if (head == list.size()) {
    list.clear();
  } else if (head < kMost) {
    return;
  } else {
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(head));
  }
  head = 0;
}

}  // namespace

PhaseReplay::PhaseReplay(const ChipSpec& chip, const Phase& phase, const sync::PhasePlan& plan,
                         GlobalMemory& memory, double began, OnSlice on_slice, OnWait on_wait)
    : chip_(&chip),
      queue_depth_(static_cast<std::size_t>(std::max(chip.scalar.queue_depth, 1))),
      costs_(chip),
      rows_cost_(costs_.rows_cost()),
      memory_(&memory),
      began_(began),
      flows_(chip),
      on_slice_(std::move(on_slice)),
      on_wait_(std::move(on_wait)) {
  CUBIST_CHECK(plan.cores.size() == phase.cores.size(), "the plan is of another record");
  readers_.fill(kNobody);
  const int lanes = phase.vector_only ? 1 : chip.vector_per_cube;
  std::int64_t workspace = 0;
  std::vector<std::shared_ptr<Steps>> kinds;  // of cores
  cores_.reserve(phase.cores.size());
  for (std::size_t c = 0; c < phase.cores.size(); ++c) {
    const CoreRecord& record = phase.cores[c];
    auto steps = std::find_if(kinds.begin(), kinds.end(),
                              [&](const auto& kind) { return kind->AreThoseOf(record, plan.cores[c]); });
    if (steps == kinds.end())
      steps = kinds.insert(steps, std::make_shared<Steps>(record, plan.cores[c], costs_, lanes));
    Core& core = cores_.emplace_back(record, *steps, workspace);
    workspace += RoundUp(record.workspace_bytes, chip.memory.l2_line);
    const int all = chip.cube_cores * (phase.vector_only ? chip.vector_per_cube : 1);
    const double starts =
        began > 0 ? 0
                  : chip.sync.start_spread_s * chip.clock_hz * static_cast<double>(c) / std::max(all - 1, 1);
    for (Agent& agent : core.agents) agent.free_at = starts;
    for (int a = 0; a < kMaxAgents; ++a) {
      const bool scalar = IssuerOf(a) == a;
      if (!scalar && Steps::SideOf(a) <= lanes)
        core.agents[static_cast<std::size_t>(a)].queue.resize(std::bit_ceil(queue_depth_));
    }
  }
}

bool PhaseReplay::Run(double most_cycles) {
  for (std::uint32_t c = 0; c < cores_.size(); ++c) {
    for (std::uint32_t a = 0; a < kMaxAgents; ++a) {
      if (IssuerOf(static_cast<int>(a)) == static_cast<int>(a)) Wake(c, 1u << a);
    }
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  while (true) {
    const double next_end = flows_.NextEnd();
    const double next_start = starts_.empty() ? kNever : starts_.top().time;
    if (std::isinf(next_end) && std::isinf(next_start)) break;
    flows_.AdvanceTo(std::min(next_end, next_start));
    if (next_end <= next_start) {
      if (TakesLonger(EndFlow(), most_cycles)) return false;
    } else {
      const Start start = starts_.top();
      starts_.pop();
      StartFlow(start);
    }
  }
  Finish();
  return true;
}

// What the Cube stood still so far comes on top of all its Mmads.
bool PhaseReplay::TakesLonger(std::uint32_t core, double cycles) const {
  if (flows_.now() > cycles) return true;
  const Agent& cube = cores_[core].agents[static_cast<std::size_t>(AgentOf(Pipe::kM, -1))];
  return cube.free_at - cube.times.busy + cores_[core].feeder.mmad_cycles() > cycles;
}

void PhaseReplay::Finish() {
  for (Core& core : cores_) {
    for (int side = 0; side < Steps::kSides; ++side)
      CUBIST_CHECK(core.feeder.Peek(side) == nullptr, "a WaitFlag waits for a set that does not come");
    for (const Agent& agent : core.agents) {
      CUBIST_CHECK(agent.taken == agent.given && agent.idle(),
                   "a WaitFlag waits for a set that does not come");
      core.end = std::max({core.end, agent.free_at, agent.done_at});
    }
  }
}

// Lets agents go on as far as they can, and those that waited for them.
void PhaseReplay::Wake(std::uint32_t core, std::uint32_t agents) {
  while (agents != 0) {
    const auto agent = static_cast<std::uint32_t>(std::countr_zero(agents));
    agents &= agents - 1;
    agents |= IssuerOf(static_cast<int>(agent)) == static_cast<int>(agent) ? Issue(core, agent)
                                                                           : Execute(core, agent);
  }
}

// A scalar unit: issues in program order; its own instructions and waits hold up what follows.
std::uint32_t PhaseReplay::Issue(std::uint32_t c, std::uint32_t a) {
  Core& core = cores_[c];
  Agent& scalar = core.agents[a];
  const int side = Steps::SideOf(static_cast<int>(a));
  const double issue = chip_->scalar.issue, issue_flag = chip_->scalar.issue_flag;
  std::uint32_t woken = 0;
  while (const Step* next = core.feeder.Peek(side)) {
    const Step step = *next;
    if (step.agent == a) {
      if (!Take(c, a, step, scalar.free_at, &woken)) break;
      core.feeder.Pop(side);
      continue;
    }
    Agent& pipe = core.agents[step.agent];
    const std::size_t in_ring = pipe.queue.size() - 1;
    if (pipe.given - pipe.taken == queue_depth_) {
      pipe.waiters |= 1u << a;
      break;
    }
    Queued& slot = pipe.queue[pipe.given & in_ring];
    const double room_since = pipe.queue[(pipe.given - queue_depth_) & in_ring].left_at;
    const bool instr = step.kind == Step::Kind::kInstr || step.kind == Step::Kind::kTransfer;
    const double cycles = instr ? issue : issue_flag;
    const double start = std::max(scalar.free_at, room_since);
    scalar.free_at = start + cycles;
    scalar.times.busy += cycles;
    slot.step = step;
    slot.issued = scalar.free_at;
    ++pipe.given;
    woken |= 1u << step.agent;
    core.feeder.Pop(side);
  }
  return woken;
}

// A pipe: in order, as far as flags, barriers and its queue let it.
std::uint32_t PhaseReplay::Execute(std::uint32_t c, std::uint32_t a) {
  Agent& agent = cores_[c].agents[a];
  const std::uint64_t before = agent.taken;
  std::uint32_t woken = 0;
  while (agent.taken != agent.given) {
    Queued& head = agent.queue[agent.taken & (agent.queue.size() - 1)];
    const double ready = std::max(head.issued, agent.free_at);
    if (!Take(c, a, head.step, ready, &woken)) break;
    head.left_at = ready;
    ++agent.taken;
  }
  return agent.taken == before ? woken : woken | std::exchange(agent.waiters, 0);
}

// One step, at `ready` at the earliest; false while it cannot be told when.
bool PhaseReplay::Take(std::uint32_t c, std::uint32_t a, const Step& step, double ready,
                       std::uint32_t* woken) {
  Core& core = cores_[c];
  Agent& agent = core.agents[a];
  const double execute = chip_->sync.execute;
  switch (step.kind) {
    case Step::Kind::kTransfer: {
      const bool first = agent.idle();
      const GmAccess& access = AccessOf(core, step);  // Out of the caches since it was fed, if it was there.
      __builtin_prefetch(&access);
      __builtin_prefetch(reinterpret_cast<const std::byte*>(&access) + sizeof access - 1);
      agent.transfers = true;
      agent.pending.push_back({step, ready});
      agent.free_at = ready + step.busy;
      if (first) ScheduleFlow(c, a);
      return true;
    }
    case Step::Kind::kSet:
      agent.free_at = ready + execute;
      if (agent.idle()) {
        agent.times.busy += execute;
        *woken |= Set(core, step.what, std::max(agent.free_at, agent.done_at));
      } else {
        agent.pending.push_back({step, agent.free_at});
      }
      return true;
    case Step::Kind::kWait:
      return Wait(c, a, step, ready);
    default:
      break;
  }
  if (!agent.idle()) return false;  // EndFlow comes back.
  if (step.kind == Step::Kind::kBarrier) {
    const double over = std::max(ready, agent.done_at);
    NoteWait(agent, ready, over);
    if (on_wait_ && over > ready) on_wait_(c, step.op, over - ready);
    agent.times.busy += execute;
    agent.free_at = over + execute;
    return true;
  }
  agent.free_at = ready + step.busy;
  agent.done_at = std::max<double>(agent.done_at, ready + step.done);
  agent.times.busy += step.busy;
  if (on_slice_) on_slice_(c, core.record->instrs[step.what], ready, agent.free_at);
  return true;
}

bool PhaseReplay::Wait(std::uint32_t c, std::uint32_t a, const Step& step, double ready) {
  Core& core = cores_[c];
  Flag& flag = FlagOf(core, step.what);
  if (flag.sets == 0) {
    flag.waiters |= 1u << a;
    return false;
  }
  const double latency = (step.what & Steps::kCross) != 0 ? chip_->sync.cross_core : chip_->sync.flag;
  Agent& agent = core.agents[a];
  const double up = std::max(ready, flag.Take() + latency);
  NoteWait(agent, ready, up);
  if (on_wait_ && up > ready) on_wait_(c, step.op, up - ready);
  if (agent.idle()) agent.times.busy += chip_->sync.execute;  // Else it is, with what flows.
  agent.free_at = up + chip_->sync.execute;
  return true;
}

// A pipe whose transfers still flow while it stands at a flag is busy, not waiting.
void PhaseReplay::NoteWait(Agent& agent, double from, double to) {
  if (agent.transfers) from = std::max(from, agent.done_at);
  if (from >= to) return;
  agent.times.waited += to - from;
  if (!agent.idle()) agent.stood.emplace_back(from, to);
}

// The transfer in front, which flowed from flow_began on, has ended.
void PhaseReplay::TakeFlowFromWaits(Agent& agent, double ended) {
  for (auto& [from, to] : agent.stood) {
    agent.times.waited -= std::max(0.0, std::min(to, ended) - std::max(from, agent.flow_began));
    from = std::max(from, ended);
  }
  std::erase_if(agent.stood, [](const auto& wait) { return wait.first >= wait.second; });
}

PhaseReplay::Flag& PhaseReplay::FlagOf(Core& core, std::uint32_t number) {
  const std::size_t at = number & ~Steps::kCross;
  if (core.flags.size() <= at) core.flags.resize(std::max(core.feeder.flags(), at + 1));
  return core.flags[at];
}

void PhaseReplay::Flag::Set(double time) {
  if (sets++ == 0) {
    first = time;
  } else {
    others.push_back(time);
  }
}

double PhaseReplay::Flag::Take() {
  const double time = first;
  if (--sets > 0) {
    first = others[head++];
    DropFront(others, head);
  }
  return time;
}

std::uint32_t PhaseReplay::Set(Core& core, std::uint32_t number, double time) {
  Flag& flag = FlagOf(core, number);
  flag.Set(time);
  return std::exchange(flag.waiters, 0);
}

// Of the first pending transfer of an agent.
void PhaseReplay::ScheduleFlow(std::uint32_t c, std::uint32_t a) {
  Core& core = cores_[c];
  Agent& agent = core.agents[a];
  const Pending& first = agent.pending[agent.first_pending];
  const GmAccess& access = AccessOf(core, first.step);
  memory_->Prefetch(access, core.workspace);
  agent.flow_began = std::max(first.ready, agent.done_at);
  double begins = std::max<double>(first.ready + first.step.done, agent.done_at);
  if (rows_cost_) begins += costs_.RowsOf(access);
  agent.touched = false;
  starts_.push({std::max(begins, flows_.now()), c, a});
}

// Requests of several cores to one line are served one after the other. A transfer that reads what g - 1 others
// read at this moment waits for them with each line; as many lines are on their way at a time as hide the startup, one
// at least.
double PhaseReplay::Queueing(const Start& start, const GmAccess& access, double bytes) {
  if (access.writes || chip_->memory.same_line <= 0) return 0;
  Core& core = cores_[start.core];
  Agent& agent = core.agents[start.agent];
  agent.reads = memory_->AddressOf(access, core.workspace);
  std::uint32_t& first = ReadersOf(agent.reads);
  int others = 0;
  for (std::uint32_t reader = first; reader != kNobody; reader = AgentAt(reader).next_reader)
    others += AgentAt(reader).reads == agent.reads ? 1 : 0;
  agent.next_reader = std::exchange(first, start.core * kMaxAgents + start.agent);
  const PathSpec& path = chip_->path(access.path);
  const double hidden =
      std::max<double>(path.startup, static_cast<double>(chip_->memory.l2_line) / path.bytes_per_cycle);
  return bytes / path.bytes_per_cycle * chip_->memory.same_line * others / hidden;
}

std::uint32_t& PhaseReplay::ReadersOf(std::int64_t address) {
  constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15u;
  return readers_[static_cast<std::uint64_t>(address) * kSpread >> 56];
}

void PhaseReplay::StopReading(Flows::Owner owner) {
  Agent& agent = cores_[owner.core].agents[owner.agent];
  std::uint32_t* at = &ReadersOf(agent.reads);
  while (*at != owner.core * kMaxAgents + owner.agent) at = &AgentAt(*at).next_reader;
  *at = agent.next_reader;
  agent.reads = -1;
}

// Its bytes begin to flow, once those that wait for others in front of a line have waited.
void PhaseReplay::StartFlow(const Start& start) {
  Core& core = cores_[start.core];
  Agent& agent = core.agents[start.agent];
  const GmAccess& access = AccessOf(core, agent.pending[agent.first_pending].step);
  if (!agent.touched) {
    agent.touched = true;
    const GlobalMemory::Transfer transfer = memory_->Touch(access, core.workspace, began_ + flows_.now());
    agent.missed = transfer.hbm_bytes;
    agent.late = std::min(transfer.late_bytes, std::max(transfer.port_bytes - transfer.hbm_bytes, 0.0));
    agent.hits = std::max(transfer.port_bytes - transfer.hbm_bytes - agent.late, 0.0);
    const double waits = Queueing(start, access, agent.hits);
    if (waits > 0) {
      starts_.push({flows_.now() + waits, start.core, start.agent});
      return;
    }
  }
  FlowOn(access.path, {start.core, start.agent});
}

// What is next of the bytes that are to flow; of none the hits, so that every transfer has an end.
void PhaseReplay::FlowOn(Path path, Flows::Owner owner) {
  Agent& agent = cores_[owner.core].agents[owner.agent];
  if (agent.missed > 0) {
    flows_.Start(path, Supply::kHbm, std::exchange(agent.missed, 0), owner);
  } else if (agent.late > 0) {
    flows_.Start(path, Supply::kLate, std::exchange(agent.late, 0), owner);
  } else {
    flows_.Start(path, Supply::kL2, std::exchange(agent.hits, 0), owner);
  }
}

// Returns the core whose it was.
std::uint32_t PhaseReplay::EndFlow() {
  Path path;
  const Flows::Owner owner = flows_.TakeEnded(&path);
  Core& core = cores_[owner.core];
  Agent& agent = core.agents[owner.agent];
  if (agent.late > 0 || agent.hits > 0) {
    FlowOn(path, owner);
    return owner.core;
  }
  const Pending& ended = agent.pending[agent.first_pending++];
  const double now = std::max(flows_.now(), agent.flow_began + costs_.LeastOf(AccessOf(core, ended.step)));
  agent.times.busy += now - agent.flow_began;
  if (!agent.stood.empty()) TakeFlowFromWaits(agent, now);
  if (on_slice_) on_slice_(owner.core, core.record->instrs[ended.step.what], agent.flow_began, now);
  agent.done_at = now;
  if (agent.reads >= 0) StopReading(owner);
  std::uint32_t woken = 1u << owner.agent;
  while (!agent.idle() && agent.pending[agent.first_pending].step.kind == Step::Kind::kSet) {
    const Pending& set = agent.pending[agent.first_pending++];
    woken |= Set(core, set.step.what, std::max(now, set.ready));
  }
  DropFront(agent.pending, agent.first_pending);
  if (!agent.idle()) ScheduleFlow(owner.core, owner.agent);
  Wake(owner.core, woken);
  return owner.core;
}

}  // namespace cubist::trace
