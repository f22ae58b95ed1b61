#include "npu_model/trace/feeder.h"

#include <algorithm>

namespace cubist::trace {
namespace {

constexpr std::uint32_t kStretch = 256;  // instructions fed at a time

}  // namespace

// In program order: instruction i stands between positions 2 i and 2 i + 1 of the plan.
void Feeder::Feed() {
  const auto end = static_cast<std::uint32_t>(
      std::min<std::size_t>(record_->instrs.size(), std::size_t{next_instr_} + kStretch));
  const auto ops_before = [&](std::uint64_t position) {
    for (; next_op_ < plan_->ops.size() && plan_->ops[next_op_].position() < position; ++next_op_)
      FeedOp(plan_->ops[next_op_]);
  };
  for (; next_instr_ < end; ++next_instr_) {
    ops_before(2 * std::uint64_t{next_instr_} + 1);
    FeedInstr(next_instr_);
  }
  if (end == record_->instrs.size()) ops_before(~std::uint64_t{0});
}

void Feeder::FeedInstr(std::uint32_t i) {
  const Instr& instr = record_->instrs[i];
  Step step;
  step.what = i;
  step.agent = static_cast<std::uint8_t>(AgentOf(instr.pipe, instr.lane));
  if (instr.access >= 0) {
    step.kind = Step::Kind::kTransfer;
    step.op = static_cast<std::uint32_t>(instr.access);
    const GmAccess& access = record_->accesses[static_cast<std::size_t>(instr.access)];
    const Cost cost = costs_->Of(access);
    step.busy = static_cast<float>(cost.busy), step.done = static_cast<float>(cost.done);
  } else {
    const Cost cost = costs_->Of(*record_, instr);
    step.busy = static_cast<float>(cost.busy), step.done = static_cast<float>(cost.done);
  }
  Put(step);
}

void Feeder::FeedOp(const sync::SyncOp& op) {
  const int agent = AgentOf(op.pipe, op.lane);
  Step step;
  step.agent = static_cast<std::uint8_t>(agent);
  step.op = static_cast<std::uint32_t>(&op - plan_->ops.data());
  if (op.kind == sync::Kind::kPipeBarrier) {
    step.kind = Step::Kind::kBarrier;
    Put(step);
    return;
  }
  const bool sets = op.kind == sync::Kind::kSetFlag || op.kind == sync::Kind::kCrossSet;
  step.kind = sets ? Step::Kind::kSet : Step::Kind::kWait;
  if (op.kind == sync::Kind::kSetFlag || op.kind == sync::Kind::kWaitFlag) {
    const int peer = AgentOf(op.peer, op.lane);
    const int from = sets ? agent : peer, to = sets ? peer : agent;
    step.what = FlagOf(static_cast<std::size_t>(from * kMaxAgents + to), op.id, false);
    Put(step);
    return;
  }
  const bool on_cube = op.lane < 0;
  const int from_cube = on_cube == sets ? 1 : 0;
  for (int lane = on_cube ? 0 : op.lane; lane < (on_cube ? lanes_ : op.lane + 1); ++lane) {
    constexpr int kFirst = kMaxAgents * kMaxAgents;
    step.what = FlagOf(static_cast<std::size_t>(kFirst + 2 * lane + from_cube), op.id, true);
    Put(step);
  }
}

std::uint32_t Feeder::FlagOf(std::size_t pair, std::size_t id, bool cross) {
  std::vector<std::uint32_t>& numbers = numbers_[pair];
  if (numbers.size() <= id) numbers.resize(id + 1);
  if (numbers[id] == 0) numbers[id] = ++flag_count_;
  return (numbers[id] - 1) | (cross ? kCross : 0);
}

}  // namespace cubist::trace
