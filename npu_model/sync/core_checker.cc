#include "npu_model/sync/core_checker.h"

#include <array>

#include "npu_model/status.h"

namespace cubist::sync {

using trace::Instr;
using trace::OperandUse;

CoreChecker::CoreChecker(const trace::Record& record, const GmState& gm, const GmWatch& watch,
                         std::size_t phase, std::size_t core, const CorePlan& plan)
    : record_(record),
      chip_(record.chip),
      gm_(gm),
      phase_(phase),
      core_(core),
      from_(record.phases[phase].cores[core]),
      plan_(InOrder(plan)),
      lanes_(record.phases[phase].vector_only ? 1 : record.chip.vector_per_cube),
      components_(static_cast<std::size_t>(lanes_ + 1) * kPipes),
      first_side_(record.phases[phase].vector_only ? 1 : 0),
      queue_depth_(static_cast<std::size_t>(std::max(record.chip.scalar.queue_depth, 1))),
      watch_(watch),
      tensors_(watch.in_order.size(), Shadow(/*page_bits=*/14)),
      asked_(watch.in_order.size()) {
  CUBIST_CHECK(lanes_ <= kMaxVectorPerCube, "more Vector cores per Cube core than a check holds");
  on_chip_.assign(kBufferCount * kSides, Shadow(/*page_bits=*/20));
  where_.resize(from_.operands.size());
  for (auto& versions : issue_versions_) versions.emplace_back();
}

void CoreChecker::Run() {
  std::size_t op = 0;
  const std::size_t ops = plan_.ops.size();
  for (std::uint32_t i = 0; i < from_.instrs.size(); ++i) {
    for (; op < ops && plan_.ops[op].position() <= 2 * std::uint64_t{i}; ++op) Issue(OpItem(op));
    const Instr& instr = from_.instrs[i];
    Issue({i, static_cast<std::uint8_t>(AgentAt(instr.pipe, instr.lane)), false});
  }
  for (; op < ops; ++op) Issue(OpItem(op));
  FindStuck();
  FindLeftSet();
}

CorePlan CoreChecker::InOrder(CorePlan plan) {
  const auto before = [](const SyncOp& x, const SyncOp& y) { return x.position() < y.position(); };
  if (!std::is_sorted(plan.ops.begin(), plan.ops.end(), before))
    std::stable_sort(plan.ops.begin(), plan.ops.end(), before);
  return plan;
}

CoreChecker::Item CoreChecker::OpItem(std::size_t index) const {
  const SyncOp& op = plan_.ops[index];
  return {static_cast<std::uint32_t>(index), static_cast<std::uint8_t>(AgentAt(op.pipe, op.lane)), true};
}

void CoreChecker::Issue(const Item& item) {
  if (item.is_op && !Acceptable(plan_.ops[item.index])) return;
  const std::size_t side = SideOf(item.agent);
  if (!unissued_[side].empty() || !TryIssue(item)) unissued_[side].push_back(item);
  if (!woken_.empty()) Wake();
}

// Hands an item to its pipe; false if the scalar unit itself has to wait, for a flag or for room in the pipe's queue.
bool CoreChecker::TryIssue(Item item) {
  const std::size_t side = SideOf(item.agent);
  if (IsScalar(item.agent)) return Execute(item);
  if (queues_[item.agent].size() >= queue_depth_) return false;
  item.issue_version = static_cast<std::uint32_t>(issue_versions_[side].size() - 1);
  item.issue_count = counts_[ScalarOf(item.agent)];
  if (!queues_[item.agent].empty() || !Execute(item)) queues_[item.agent].push_back(item);
  return true;
}

// Goes on with pipes whose flag was set meanwhile.
void CoreChecker::Wake() {
  while (!woken_.empty()) {
    const std::size_t agent = woken_.back();
    woken_.pop_back();
    if (!IsScalar(agent)) {
      auto& queue = queues_[agent];
      const bool was_full = queue.size() >= queue_depth_;
      while (!queue.empty() && Execute(queue.front())) queue.pop_front();
      if (was_full && queue.size() < queue_depth_) woken_.push_back(ScalarOf(agent));
      continue;
    }
    auto& waiting = unissued_[SideOf(agent)];
    while (!waiting.empty() && TryIssue(waiting.front())) waiting.pop_front();
  }
}

// False if it has to wait.
bool CoreChecker::Execute(const Item& item) {
  const std::size_t agent = item.agent;
  if (item.is_op) {
    const SyncOp& op = plan_.ops[item.index];
    if ((op.kind == Kind::kWaitFlag || op.kind == Kind::kCrossWait) && !Down(op, agent)) return false;
  }
  if (!IsScalar(agent)) JoinIssue(agent, item);
  const std::uint32_t count = ++counts_[agent];
  if (item.is_op) {
    RunOp(plan_.ops[item.index], agent, count);
  } else {
    RunInstr(static_cast<std::uint32_t>(item.index), agent, count);
  }
  return true;
}

void CoreChecker::JoinIssue(std::size_t agent, const Item& item) {
  VectorClock& clock = clocks_[agent];
  const std::size_t side = SideOf(agent);
  if (seen_version_[agent] != item.issue_version) {
    seen_version_[agent] = item.issue_version;
    clock.Join(issue_versions_[side][item.issue_version], first_side_, sides());
  }
  std::uint32_t& scalar = clock.at[ScalarOf(agent)];
  scalar = std::max(scalar, item.issue_count);
}

void CoreChecker::RunInstr(std::uint32_t i, std::size_t agent, std::uint32_t count) {
  const Instr& instr = from_.instrs[i];
  std::array<std::uint32_t, trace::kMaxOperands> reads, writes;
  std::size_t read = 0, written = 0;
  for (const OperandUse use : instr.uses) {
    if (use.used()) (use.writes() ? writes[written++] : reads[read++]) = use.operand();
  }
  const auto is_among = [](std::uint32_t operand, const auto& all, std::size_t size) {
    return std::find(all.begin(), all.begin() + size, operand) != all.begin() + size;
  };
  std::array<std::uint32_t, trace::kMaxOperands> notes;
  std::size_t noted = 0;
  for (std::size_t r = 0; r < read; ++r) {
    if (is_among(reads[r], writes, written)) continue;
    const bool meets = written > 0 && WritesInto(instr, reads[r]);
    if (meets) notes[noted++] = reads[r];
    TouchOperand(reads[r], i, agent, count, meets ? Touched::kCheckRead : Touched::kRead);
  }
  for (std::size_t w = 0; w < written; ++w) {
    const bool updates =
        is_among(writes[w], reads, read) || (instr.accumulates && instr.uses[0].operand() == writes[w]);
    TouchOperand(writes[w], i, agent, count, updates ? Touched::kUpdate : Touched::kWrite);
  }
  for (std::size_t n = 0; n < noted; ++n) TouchOperand(notes[n], i, agent, count, Touched::kNoteRead);
  if (instr.pipe != Pipe::kS && instr.lane >= 0) CheckBlocks(i, agent, count);
  if (instr.access >= 0) TouchGm(from_.accesses[static_cast<std::size_t>(instr.access)], i, agent, count);
  if (EndsInOrder(instr)) clocks_[agent].at[agent] = count;
}

bool CoreChecker::EndsInOrder(const Instr& instr) const {
  if (instr.pipe == Pipe::kV) return !chip_.sync.vector_needs_barrier;
  if (instr.pipe == Pipe::kS) return true;
  if (instr.pipe != Pipe::kM) return !chip_.sync.moves_need_barrier;
  const std::int64_t m = CeilDiv(instr.dims[0], chip_.mmad.m_step);
  const std::int64_t n = CeilDiv(instr.dims[1], chip_.mmad.n_step);
  return m * n >= chip_.sync.mmad_barrier_below;
}

}  // namespace cubist::sync
