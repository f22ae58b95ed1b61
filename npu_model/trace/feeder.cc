#include "npu_model/trace/feeder.h"

#include <algorithm>

namespace cubist::trace {
namespace {

constexpr std::uint32_t kStretch = 256;  // instructions fed at a time

// What costs depend on.
bool SamePlace(const SlotInfo& x, const SlotInfo& y) {
  return x.buffer == y.buffer && x.dtype == y.dtype && x.rows == y.rows && x.cols == y.cols &&
         x.address == y.address;
}
bool SameSize(const Instr& x, const Instr& y) {
  return x.dtype == y.dtype && std::ranges::equal(x.dims, y.dims);
}
bool SameMoves(const GmAccess& x, const GmAccess& y) {
  return x.path == y.path && x.moves() == y.moves() && (x.moves() == 1 || x.bytes() == y.bytes());
}

}  // namespace

Steps::Steps(const CoreRecord& record, const sync::CorePlan& plan, const Costs& costs, int lanes)
    : record_(&record), plan_(&plan), costs_(&costs), lanes_(lanes) {
  const auto use = [&](Pipe pipe, int lane) {
    used_[static_cast<std::size_t>(SideOf(AgentOf(pipe, lane)))] = true;
  };
  for (const Instr& instr : record.instrs) {
    use(instr.pipe, instr.lane);
    if (instr.pipe == Pipe::kM) mmad_cycles_ += CostOf(instr).busy;
  }
  for (const sync::SyncOp& op : plan.ops) {
    use(op.pipe, op.lane);
    ids_ = std::max<std::size_t>(ids_, std::size_t{op.id} + 1);
  }
  numbers_.resize(kPairs * ids_);
  sides_used_ = static_cast<int>(std::count(used_.begin(), used_.end(), true));
}

bool Steps::AreThoseOf(const CoreRecord& record, const sync::CorePlan& plan) const {
  const CoreRecord& own = *record_;
  return SameBytes(own.instrs, record.instrs) && SameBytes(own.operands, record.operands) &&
         SameBytes(plan_->ops, plan.ops) && std::ranges::equal(own.slots, record.slots, SamePlace) &&
         std::ranges::equal(own.workspace, record.workspace, SamePlace) &&
         std::ranges::equal(own.accesses, record.accesses, SameMoves);
}

const std::vector<Step>* Steps::Enter(std::size_t stretch, int side) {
  while (stretch == dropped_ + stretches_.size()) {
    if (next_instr_ == record_->instrs.size() && next_op_ == plan_->ops.size()) return nullptr;
    if (spare_.empty()) {
      stretches_.emplace_back();
    } else {
      stretches_.push_back(std::move(spare_.back()));
      spare_.pop_back();
    }
    stretches_.back().readers = readers_;
    Feed(stretches_.back());
  }
  return &stretches_[stretch - dropped_].sides[static_cast<std::size_t>(side)];
}

void Steps::Leave(std::size_t stretch) {
  --stretches_[stretch - dropped_].readers;
  for (; !stretches_.empty() && stretches_.front().readers == 0; ++dropped_) {
    for (std::vector<Step>& side : stretches_.front().sides) side.clear();
    spare_.push_back(std::move(stretches_.front()));
    stretches_.pop_front();
  }
}

bool Feeder::Go(int side) {
  if (!steps_->has(side)) return false;
  Place& place = places_[static_cast<std::size_t>(side)];
  while (place.next == place.end) {
    const std::vector<Step>* steps = steps_->Enter(place.stretches, side);
    if (steps == nullptr) return false;
    if (place.stretches > 0) steps_->Leave(place.stretches - 1);
    ++place.stretches;
    place.next = steps->data(), place.end = place.next + steps->size();
  }
  return true;
}

// In program order: instruction i stands between positions 2 i and 2 i + 1 of the plan.
void Steps::Feed(Stretch& to) {
  const auto end = static_cast<std::uint32_t>(
      std::min<std::size_t>(record_->instrs.size(), std::size_t{next_instr_} + kStretch));
  const auto ops_before = [&](std::uint64_t position) {
    for (; next_op_ < plan_->ops.size() && plan_->ops[next_op_].position() < position; ++next_op_)
      FeedOp(plan_->ops[next_op_], to);
  };
  for (; next_instr_ < end; ++next_instr_) {
    ops_before(2 * std::uint64_t{next_instr_} + 1);
    FeedInstr(next_instr_, to);
  }
  if (end == record_->instrs.size()) ops_before(~std::uint64_t{0});
}

void Steps::FeedInstr(std::uint32_t i, Stretch& to) {
  const Instr& instr = record_->instrs[i];
  Step step;
  step.what = i;
  step.agent = static_cast<std::uint8_t>(AgentOf(instr.pipe, instr.lane));
  if (instr.access >= 0 && instr.pipe != Pipe::kS) {  // A scalar unit waits for what it reads.
    step.kind = Step::Kind::kTransfer;
    step.op = static_cast<std::uint32_t>(instr.access);
    const GmAccess& access = record_->accesses[static_cast<std::size_t>(instr.access)];
    const Cost cost = costs_->Of(access);
    step.busy = static_cast<float>(cost.busy), step.done = static_cast<float>(cost.done);
  } else {
    const Cost cost = CostOf(instr);
    step.busy = static_cast<float>(cost.busy), step.done = static_cast<float>(cost.done);
  }
  Put(step, to);
}

Cost Steps::CostOf(const Instr& instr) {
  if (instr.pipe != Pipe::kM && instr.pipe != Pipe::kMte1) return costs_->Of(*record_, instr);
  Priced& last = priced_[static_cast<std::size_t>(instr.op)];
  if (last.instr == nullptr || !SameSize(*last.instr, instr)) last = {&instr, costs_->Of(*record_, instr)};
  return last.cost;
}

void Steps::FeedOp(const sync::SyncOp& op, Stretch& to) {
  const int agent = AgentOf(op.pipe, op.lane);
  Step step;
  step.agent = static_cast<std::uint8_t>(agent);
  step.op = static_cast<std::uint32_t>(&op - plan_->ops.data());
  if (op.kind == sync::Kind::kPipeBarrier) {
    step.kind = Step::Kind::kBarrier;
    Put(step, to);
    return;
  }
  const bool sets = op.kind == sync::Kind::kSetFlag || op.kind == sync::Kind::kCrossSet;
  step.kind = sets ? Step::Kind::kSet : Step::Kind::kWait;
  if (op.kind == sync::Kind::kSetFlag || op.kind == sync::Kind::kWaitFlag) {
    const int peer = AgentOf(op.peer, op.lane);
    const int from = sets ? agent : peer, onto = sets ? peer : agent;
    step.what = FlagOf(from * kMaxAgents + onto, op.id, false);
    Put(step, to);
    return;
  }
  const bool on_cube = op.lane < 0;
  const int from_cube = on_cube == sets ? 1 : 0;
  for (int lane = on_cube ? 0 : op.lane; lane < (on_cube ? lanes_ : op.lane + 1); ++lane) {
    constexpr int kFirst = kMaxAgents * kMaxAgents;
    step.what = FlagOf(kFirst + 2 * lane + from_cube, op.id, true);
    Put(step, to);
  }
}

std::uint32_t Steps::FlagOf(int pair, std::size_t id, bool cross) {
  std::uint32_t& number = numbers_[static_cast<std::size_t>(pair) * ids_ + id];
  if (number == 0) number = ++flag_count_;
  return (number - 1) | (cross ? kCross : 0);
}

}  // namespace cubist::trace
