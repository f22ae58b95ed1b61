#include "npu_model/sync/check.h"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "npu_model/status.h"

namespace cubist::sync {
namespace {

using trace::CoreRecord;
using trace::GmAccess;
using trace::Instr;
using trace::Operand;
using trace::OperandUse;
using trace::Record;
using trace::SlotInfo;

constexpr int kMaxVectorCores = 4;
constexpr std::size_t kSides = kMaxVectorCores + 1;  // the Cube core, then the Vector cores
constexpr std::size_t kPipes = kPipeCount + 1;       // of a side; the last one stands for
constexpr std::size_t kScalarWrites = kPipeCount;    // the completed writes of its scalar unit
constexpr std::size_t kComponents = kSides * kPipes;
constexpr std::uint8_t kNobody = 0xff;

std::size_t AgentAt(Pipe pipe, int lane) {
  return static_cast<std::size_t>(lane + 1) * kPipes + static_cast<std::size_t>(pipe);
}
std::size_t SideOf(std::size_t agent) { return agent / kPipes; }
std::size_t ScalarOf(std::size_t agent) { return SideOf(agent) * kPipes; }
bool IsScalar(std::size_t agent) { return agent % kPipes == 0; }

struct VectorClock {
  std::array<std::uint32_t, kComponents> at{};

  void Join(const VectorClock& o, std::size_t components) {
    for (std::size_t c = 0; c < components; ++c) at[c] = std::max(at[c], o.at[c]);
  }
};

// One access: component and its count, and which instruction that was.
struct Epoch {
  std::uint32_t count = 0, instr = 0;
  std::uint8_t component = kNobody;
};

// Bytes with one history.
struct Interval {
  static constexpr std::size_t kMaxReaders = 6;
  std::int64_t begin = 0, end = 0;
  Epoch write;
  std::int32_t slot = -1;  // that the write went through
  std::uint8_t reader_count = 0;
  std::array<Epoch, kMaxReaders> readers;  // since the write, the last of each pipe
};

// Intervals by address, in pages so that inserting stays cheap. They do not overlap; what is not listed was
// never touched.
class Shadow {
 public:
  explicit Shadow(int page_bits) : page_bits_(page_bits) {}

  // Calls visit(interval) for every part of [begin, end), cut to that range; untouched parts come as new
  // intervals. The part may be changed, not its bounds. With `replace`, all parts of a page become one after
  // the visits, a copy of what `visit` left in the last one.
  template <class Visit>
  void Walk(std::int64_t begin, std::int64_t end, bool replace, Visit visit) {
    while (begin < end) {
      const auto page = static_cast<std::size_t>(begin >> page_bits_);
      const std::int64_t stop = std::min(end, static_cast<std::int64_t>(page + 1) << page_bits_);
      if (pages_.size() <= page) pages_.resize(page + 1);
      WalkPage(pages_[page], begin, stop, replace, visit);
      begin = stop;
    }
  }

 private:
  using Page = std::vector<Interval>;

  template <class Visit>
  static void WalkPage(Page& page, std::int64_t begin, std::int64_t end, bool replace, Visit& visit) {
    auto at =
        std::partition_point(page.begin(), page.end(), [&](const Interval& i) { return i.end <= begin; });
    if (at != page.end() && at->begin == begin && at->end == end) return visit(*at);
    if (at == page.end() || at->begin >= end) {
      Interval fresh;
      fresh.begin = begin, fresh.end = end;
      visit(fresh);
      page.insert(at, fresh);
      return;
    }
    // The general case: the parts are made aside and put in place of what they came from.
    thread_local Page parts;
    parts.clear();
    auto last = at;
    if (at->begin < begin) {
      parts.push_back(*at);
      parts.back().end = begin;
    }
    const std::size_t inside = parts.size();
    std::int64_t from = begin;
    for (; last != page.end() && last->begin < end; ++last) {
      if (last->begin > from) AddFresh(parts, from, last->begin);
      parts.push_back(*last);
      parts.back().begin = std::max(last->begin, from);
      parts.back().end = std::min(last->end, end);
      from = parts.back().end;
    }
    if (from < end) AddFresh(parts, from, end);
    for (std::size_t p = inside; p < parts.size(); ++p) visit(parts[p]);
    if (replace) {
      parts[inside] = parts.back();
      parts[inside].begin = begin, parts[inside].end = end;
      parts.resize(inside + 1);
    }
    if (std::prev(last)->end > end) {
      parts.push_back(*std::prev(last));
      parts.back().begin = end;
    }
    const auto old = static_cast<std::size_t>(last - at);
    const std::size_t common = std::min(old, parts.size());
    at = std::copy_n(parts.begin(), common, at);
    if (parts.size() > old) {
      page.insert(at, parts.begin() + static_cast<std::ptrdiff_t>(common), parts.end());
    } else {
      page.erase(at, last);
    }
  }
  static void AddFresh(Page& parts, std::int64_t begin, std::int64_t end) {
    Interval& fresh = parts.emplace_back();
    fresh.begin = begin, fresh.end = end;
  }

  int page_bits_;
  std::vector<Page> pages_;
};

// Calls visit(begin, end) for the bytes of a rectangle of a slot, adjacent ones joined. UB, BT and hand-over
// slots are row-major, exact to the byte; the Cube's buffers hold panels of 32 bytes (L0C: 16 columns), row after
// row, and are moved by whole panels. Padding at a slot's edges belongs to its last row and column.
template <class Visit>
void ForEachByteRange(const ChipSpec& chip, const SlotInfo& slot, bool in_gm, const Operand& o, Visit visit) {
  std::int64_t from = 0, to = 0;
  const auto add = [&](std::int64_t begin, std::int64_t bytes) {
    if (begin == to && from != to) {
      to += bytes;
      return;
    }
    if (from != to) visit(slot.address + from, slot.address + to);
    from = begin, to = begin + bytes;
  };
  if (in_gm || slot.buffer == Buffer::kUB || slot.buffer == Buffer::kBT) {
    const std::int64_t element = slot.buffer == Buffer::kBT ? 4 : SizeOf(slot.dtype);
    const std::int64_t pitch = in_gm ? slot.cols * element : RoundUp(slot.cols * element, 32);
    const std::int64_t stop = o.col_end == slot.cols ? pitch : o.col_end * element;
    for (std::int64_t r = o.row_begin; r < o.row_end; ++r)
      add(r * pitch + o.col_begin * element, stop - o.col_begin * element);
  } else {
    const bool sums = slot.buffer == Buffer::kL0C;
    const std::int64_t element = sums                  ? 4
                                 : IsFloat(slot.dtype) ? chip.OperandBytes(slot.dtype)
                                                       : SizeOf(slot.dtype);
    const std::int64_t width = sums ? chip.mmad.n_step : std::max<std::int64_t>(32 / element, 1);
    const std::int64_t rows = RoundUp(slot.rows, sums ? chip.mmad.m_step : chip.packing.row_multiple);
    const std::int64_t row_end = o.row_end == slot.rows ? rows : o.row_end;
    const std::int64_t pitch = width * element;
    for (std::int64_t panel = o.col_begin / width; panel * width < o.col_end; ++panel)
      add((panel * rows + o.row_begin) * pitch, (row_end - o.row_begin) * pitch);
  }
  if (from != to) visit(slot.address + from, slot.address + to);
}

template <class Visit>
void ForEachByteRange(const GmAccess& gm, Visit visit) {
  for (std::int64_t row = 0; row < gm.rows; ++row) {
    for (std::int64_t burst = 0; burst < gm.bursts; ++burst) {
      const std::int64_t begin = gm.offset + row * gm.row_stride + burst * gm.burst_stride;
      visit(begin, begin + gm.burst_bytes);
    }
  }
}

// Bytes of a tensor as disjoint, sorted intervals.
class ByteSet {
 public:
  void Add(std::int64_t begin, std::int64_t end) {
    if (!ranges_.empty() && ranges_.back().second == begin) {
      ranges_.back().second = end;
    } else {
      ranges_.emplace_back(begin, end);
    }
  }
  void Merge() {
    std::sort(ranges_.begin(), ranges_.end());
    std::size_t kept = 0;
    for (const auto& range : ranges_) {
      if (kept > 0 && range.first <= ranges_[kept - 1].second) {
        ranges_[kept - 1].second = std::max(ranges_[kept - 1].second, range.second);
      } else {
        ranges_[kept++] = range;
      }
    }
    ranges_.resize(kept);
  }
  // Only after Merge.
  bool Contains(std::int64_t begin, std::int64_t end) const {
    const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), std::pair(begin, INT64_MAX));
    return next != ranges_.begin() && std::prev(next)->second >= end;
  }
  const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;
};

// What the launch has put into GM before the phase.
struct GmState {
  explicit GmState(const Record& record) : record(&record) {}
  bool IsInput(std::size_t tensor) const {
    return tensor >= record->tensors.size() || record->tensors[tensor].input;
  }
  bool Holds(std::size_t tensor, std::int64_t begin, std::int64_t end) const {
    return IsInput(tensor) || (tensor < written.size() && written[tensor].Contains(begin, end));
  }

  const Record* record;
  std::vector<ByteSet> written;  // by tensor
};

std::string TensorName(const Record& record, std::size_t tensor) {
  if (tensor < record.tensors.size()) return "GM '" + record.tensors[tensor].name + "'";
  return "GM tensor " + std::to_string(tensor);
}

// Findings of one kind between the same lines are one finding with a count.
class Findings {
 public:
  void Add(Finding finding) {
    const auto key =
        std::tuple(finding.fault, finding.first.line.file, finding.first.line.line, finding.first.pipe,
                   finding.first.what, finding.second.line.file, finding.second.line.line,
                   finding.second.pipe, finding.second.what, finding.memory);
    const auto [at, is_new] = index_.try_emplace(key, all_.size());
    if (is_new) {
      all_.push_back(std::move(finding));
    } else {
      all_[at->second].count += finding.count;
    }
  }
  std::vector<Finding> Take() { return std::move(all_); }

 private:
  std::map<std::tuple<Fault, std::string, std::uint32_t, Pipe, std::string, std::string, std::uint32_t, Pipe,
                      std::string, std::string>,
           std::size_t>
      index_;
  std::vector<Finding> all_;
};

class CoreChecker {
 public:
  CoreChecker(const Record& record, const GmState& gm, std::size_t phase, std::size_t core,
              const CorePlan& plan)
      : record_(record),
        chip_(record.chip),
        gm_(gm),
        phase_(phase),
        core_(core),
        from_(record.phases[phase].cores[core]),
        plan_(InOrder(plan)),
        lanes_(record.phases[phase].vector_only ? 1 : record.chip.vector_per_cube),
        components_(static_cast<std::size_t>(lanes_ + 1) * kPipes) {
    CUBIST_CHECK(lanes_ <= kMaxVectorCores, "more Vector cores per Cube core than a check holds");
    for (int b = 0; b < kBufferCount; ++b) {
      for (std::size_t side = 0; side < kSides; ++side) on_chip_.emplace_back(/*page_bits=*/20);
    }
    FindSharedTensors();
    for (auto& versions : issue_versions_) versions.emplace_back();
  }

  // Runs every pipe as far as flags let it go.
  void Run() {
    std::size_t op = 0;
    const std::size_t ops = plan_.ops.size();
    for (std::uint32_t i = 0; i < from_.instrs.size(); ++i) {
      for (; op < ops && plan_.ops[op].position() <= 2 * std::uint64_t{i}; ++op) Issue(OpItem(op));
      const Instr& instr = from_.instrs[i];
      Issue({i, AgentAt(instr.pipe, instr.lane), false});
    }
    for (; op < ops; ++op) Issue(OpItem(op));
    FindStuck();
    FindLeftSet();
  }

  std::vector<Finding> TakeFindings() { return findings_.Take(); }
  std::string TakeDot() { return std::move(dot_); }
  std::int64_t accesses() const { return accesses_; }

 private:
  // An instruction, or an entry of the plan.
  struct Item {
    std::size_t index = 0;
    std::size_t agent = 0;
    bool is_op = false;
    std::uint32_t issue_version = 0;  // of its scalar unit's clock,
    std::uint32_t issue_count = 0;    // and how much that unit had executed
  };

  // A flag of a pair of pipes, or a cross-core counter on one side.
  struct Flag {
    std::deque<VectorClock> up;  // clocks of sets not waited for
    std::deque<SyncOp> set_by;   // the same, who
    std::vector<Epoch> waits;    // of every wait so far, the agent that waited
    std::int64_t sets = 0;
    std::vector<std::size_t> blocked;        // agents that wait
    std::array<std::size_t, kSides> setter;  // the pipe of each side that sets it
    Flag() { setter.fill(kComponents); }
    std::array<std::deque<VectorClock>, kMaxVectorCores> parts;  // sets by some Vector cores, not yet by all
    std::array<std::int64_t, kMaxVectorCores> part_sets{};
  };
  using FlagKey = std::uint32_t;

  static CorePlan InOrder(CorePlan plan) {
    const auto before = [](const SyncOp& x, const SyncOp& y) { return x.position() < y.position(); };
    if (!std::is_sorted(plan.ops.begin(), plan.ops.end(), before))
      std::stable_sort(plan.ops.begin(), plan.ops.end(), before);
    return plan;
  }

  Item OpItem(std::size_t index) const {
    return {index, AgentAt(plan_.ops[index].pipe, plan_.ops[index].lane), true};
  }

  // ---- Running ----

  void Issue(Item item) {
    if (item.is_op && !Acceptable(plan_.ops[item.index])) return;
    const std::size_t side = SideOf(item.agent);
    if (!unissued_[side].empty() || !TryIssue(item)) unissued_[side].push_back(item);
    Wake();
  }

  // Hands an item to its pipe; false if the scalar unit itself has to wait.
  bool TryIssue(Item item) {
    const std::size_t side = SideOf(item.agent);
    if (IsScalar(item.agent)) return Execute(item);
    item.issue_version = static_cast<std::uint32_t>(issue_versions_[side].size() - 1);
    item.issue_count = counts_[ScalarOf(item.agent)];
    if (!queues_[item.agent].empty() || !Execute(item)) queues_[item.agent].push_back(item);
    return true;
  }

  // Goes on with pipes whose flag was set meanwhile.
  void Wake() {
    while (!woken_.empty()) {
      const std::size_t agent = woken_.back();
      woken_.pop_back();
      if (!IsScalar(agent)) {
        auto& queue = queues_[agent];
        while (!queue.empty() && Execute(queue.front())) queue.pop_front();
        continue;
      }
      auto& waiting = unissued_[SideOf(agent)];
      while (!waiting.empty() && TryIssue(waiting.front())) waiting.pop_front();
    }
  }

  // False if it has to wait.
  bool Execute(const Item& item) {
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

  void JoinIssue(std::size_t agent, const Item& item) {
    VectorClock& clock = clocks_[agent];
    const std::size_t side = SideOf(agent);
    if (seen_version_[agent] != item.issue_version) {
      seen_version_[agent] = item.issue_version;
      clock.Join(issue_versions_[side][item.issue_version], components_);
    }
    std::uint32_t& scalar = clock.at[ScalarOf(agent)];
    scalar = std::max(scalar, item.issue_count);
  }

  void RunInstr(std::uint32_t i, std::size_t agent, std::uint32_t count) {
    const Instr& instr = from_.instrs[i];
    VectorClock& clock = clocks_[agent];
    if (instr.accumulates) TouchOperand(instr.uses[0].operand(), i, agent, count, false);
    // What it reads comes before what it writes.
    for (const bool writes : {false, true}) {
      for (const OperandUse use : instr.uses) {
        if (use.used() && use.writes() == writes) TouchOperand(use.operand(), i, agent, count, writes);
      }
    }
    if (instr.access >= 0) TouchGm(from_.accesses[static_cast<std::size_t>(instr.access)], i, agent, count);
    if (EndsInOrder(instr)) clock.at[agent] = count;
  }

  bool EndsInOrder(const Instr& instr) const {
    if (instr.pipe == Pipe::kV) return !chip_.sync.vector_needs_barrier;
    if (instr.pipe != Pipe::kM) return true;
    const std::int64_t m = (instr.dims[0] + chip_.mmad.m_step - 1) / chip_.mmad.m_step;
    const std::int64_t n = (instr.dims[1] + chip_.mmad.n_step - 1) / chip_.mmad.n_step;
    return m * n >= chip_.sync.mmad_barrier_below;
  }

  // ---- Flags ----

  static FlagKey KeyOf(const SyncOp& op) {
    if (op.kind == Kind::kSetFlag || op.kind == Kind::kWaitFlag) {
      const Pipe from = op.kind == Kind::kSetFlag ? op.pipe : op.peer;
      const Pipe to = op.kind == Kind::kSetFlag ? op.peer : op.pipe;
      return (static_cast<FlagKey>(op.lane + 1) * 8 + static_cast<FlagKey>(from)) * 8 * 256 +
             static_cast<FlagKey>(to) * 256 + op.id;
    }
    return 0;
  }
  // A cross-core counter lives on the waiting side: side 0 is the Cube core.
  static FlagKey CrossKey(std::size_t side, std::uint8_t id) {
    return (FlagKey{1} << 24) + static_cast<FlagKey>(side) * 256 + id;
  }

  bool Acceptable(const SyncOp& op) {
    const bool cross = op.kind == Kind::kCrossSet || op.kind == Kind::kCrossWait;
    std::string wrong;
    const auto exists = [&](Pipe pipe) {
      if (op.lane < 0) return pipe != Pipe::kV;
      return pipe == Pipe::kS || pipe == Pipe::kMte2 || pipe == Pipe::kMte3 || pipe == Pipe::kV;
    };
    if (op.instr >= from_.instrs.size()) {
      wrong =
          "stands at instruction " + std::to_string(op.instr) + " of " + std::to_string(from_.instrs.size());
    } else if (op.lane >= lanes_) {
      wrong = "is on Vector core " + std::to_string(op.lane) + " of " + std::to_string(lanes_);
    } else if (!exists(op.pipe) || (!cross && !exists(op.peer))) {
      wrong = std::string("names pipe ") + NameOf(exists(op.pipe) ? op.peer : op.pipe) +
              ", which this side of the core does not have";
    } else if (op.kind == Kind::kPipeBarrier && op.pipe == Pipe::kS) {
      wrong = "PipeBarrier does not take pipe S";
    } else if (!cross && op.kind != Kind::kPipeBarrier && op.pipe == op.peer) {
      wrong = std::string("is from pipe ") + NameOf(op.pipe) + " to itself";
    } else if (op.kind != Kind::kPipeBarrier &&
               op.id >= (cross ? chip_.sync.cross_core_ids : chip_.sync.event_ids)) {
      wrong = "has id " + std::to_string(op.id) + ", the chip has 0 to " +
              std::to_string((cross ? chip_.sync.cross_core_ids : chip_.sync.event_ids) - 1);
    }
    if (wrong.empty()) return true;
    Finding f = Start(Fault::kBadOp);
    f.second = PlaceOf(op);
    f.cure = wrong;
    findings_.Add(std::move(f));
    return false;
  }

  // Whether a wait can go on; otherwise its pipe is noted at the flag.
  bool Down(const SyncOp& op, std::size_t agent) {
    Flag& flag = flags_[op.kind == Kind::kWaitFlag ? KeyOf(op) : CrossKey(SideOf(agent), op.id)];
    if (!flag.up.empty()) return true;
    if (std::find(flag.blocked.begin(), flag.blocked.end(), agent) == flag.blocked.end())
      flag.blocked.push_back(agent);
    return false;
  }

  void RunOp(const SyncOp& op, std::size_t agent, std::uint32_t count) {
    VectorClock& clock = clocks_[agent];
    switch (op.kind) {
      case Kind::kPipeBarrier:
        clock.at[agent] = count;
        break;
      case Kind::kSetFlag:
        Raise(flags_[KeyOf(op)], op, SetClock(agent, count), 1);
        break;
      case Kind::kCrossSet:
        if (op.lane < 0) {
          for (int lane = 0; lane < lanes_; ++lane)
            Raise(flags_[CrossKey(static_cast<std::size_t>(lane) + 1, op.id)], op, SetClock(agent, count),
                  chip_.sync.cross_core_limit);
        } else {
          RaisePart(flags_[CrossKey(0, op.id)], op, SetClock(agent, count));
        }
        break;
      case Kind::kWaitFlag:
        Lower(flags_[KeyOf(op)], op, agent, count);
        break;
      case Kind::kCrossWait:
        Lower(flags_[CrossKey(SideOf(agent), op.id)], op, agent, count);
        break;
    }
  }
  // A set stands for everything before it on its pipe, complete.
  VectorClock SetClock(std::size_t agent, std::uint32_t count) const {
    VectorClock clock = clocks_[agent];
    clock.at[agent] = count;
    if (IsScalar(agent)) clock.at[agent + kScalarWrites] = count;
    return clock;
  }

  void Raise(Flag& flag, const SyncOp& op, const VectorClock& clock, int limit) {
    ExpectOver(flag, flag.sets, op, clock, limit);
    NoteSetter(flag, op);
    ++flag.sets;
    Deliver(flag, op, clock);
  }

  void RaisePart(Flag& flag, const SyncOp& op, const VectorClock& clock) {
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
      all.Join(part.front(), components_);
      part.pop_front();
    }
    ++flag.sets;
    Deliver(flag, op, all);
  }

  // Which of two pipes comes first is anybody's guess, and so is which set ends which wait.
  void AddTwoPipes(const SyncOp& op, const char* what) {
    Finding f = Start(Fault::kBadOp);
    f.second = PlaceOf(op);
    f.memory = FlagName(op);
    f.cure = std::string("two pipes of a core ") + what + " the same flag; take another id";
    findings_.Add(std::move(f));
  }

  void NoteSetter(Flag& flag, const SyncOp& op) {
    const std::size_t agent = AgentAt(op.pipe, op.lane);
    std::size_t& setter = flag.setter[SideOf(agent)];
    if (setter != kComponents && setter != agent) AddTwoPipes(op, "set");
    setter = agent;
  }

  void Deliver(Flag& flag, const SyncOp& op, const VectorClock& clock) {
    flag.up.push_back(clock);
    flag.set_by.push_back(op);
    woken_.insert(woken_.end(), flag.blocked.begin(), flag.blocked.end());
    flag.blocked.clear();
  }

  // The set that makes one more than the limit must know that the wait which makes room is over.
  void ExpectOver(const Flag& flag, std::int64_t sets, const SyncOp& op, const VectorClock& clock,
                  int limit) {
    const std::int64_t freed = sets - limit;  // this wait, counted from 0
    if (freed < 0) return;
    const auto at = static_cast<std::size_t>(freed);
    if (at < flag.waits.size() && clock.at[flag.waits[at].component] >= flag.waits[at].count) return;
    Finding f = Start(Fault::kSetTwice);
    f.second = PlaceOf(op);
    f.memory = FlagName(op);
    f.cure = limit == 1 ? "the flag may still be up; order its last wait before this set, or take another id"
                        : "the counter may pass " + std::to_string(limit) +
                              "; order an earlier wait before this set";
    findings_.Add(std::move(f));
  }

  void Lower(Flag& flag, const SyncOp& op, std::size_t agent, std::uint32_t count) {
    if (!flag.waits.empty() && flag.waits.back().component != agent) AddTwoPipes(op, "wait for");
    clocks_[agent].Join(flag.up.front(), components_);
    flag.up.pop_front();
    flag.set_by.pop_front();
    flag.waits.push_back({count, 0, static_cast<std::uint8_t>(agent)});
    if (IsScalar(agent)) issue_versions_[SideOf(agent)].push_back(clocks_[agent]);
  }

  // ---- Memory ----

  void FindSharedTensors() {
    struct Seen {
      std::uint64_t agents = 0;
      bool reads = false, writes = false;
    };
    std::vector<Seen> seen;
    for (const Instr& instr : from_.instrs) {
      if (instr.access < 0) continue;
      const GmAccess& gm = from_.accesses[static_cast<std::size_t>(instr.access)];
      if (gm.tensor < 0) continue;
      const auto tensor = static_cast<std::size_t>(gm.tensor);
      if (seen.size() <= tensor) seen.resize(tensor + 1);
      seen[tensor].agents |= std::uint64_t{1} << AgentAt(instr.pipe, instr.lane);
      (gm.writes ? seen[tensor].writes : seen[tensor].reads) = true;
    }
    for (std::size_t t = 0; t < seen.size(); ++t) {
      const bool shared = seen[t].writes && (seen[t].agents & (seen[t].agents - 1)) != 0;
      // A tensor without values of its own is watched for reads of what nobody wrote.
      tensors_.push_back(shared ? std::make_unique<Shadow>(14) : nullptr);
      check_reads_.push_back(!gm_.IsInput(t) && seen[t].reads);
    }
  }

  void TouchOperand(std::uint32_t number, std::uint32_t i, std::size_t agent, std::uint32_t count,
                    bool writes) {
    const Operand& o = from_.operands[number];
    const bool in_gm = o.slot < 0;
    const SlotInfo& slot = in_gm ? from_.workspace[static_cast<std::size_t>(~o.slot)]
                                 : from_.slots[static_cast<std::size_t>(o.slot)];
    Shadow& shadow = in_gm ? workspace_
                           : on_chip_[static_cast<std::size_t>(slot.buffer) * kSides +
                                      static_cast<std::size_t>(slot.lane + 1)];
    ForEachByteRange(chip_, slot, in_gm, o, [&](std::int64_t begin, std::int64_t end) {
      Touch(shadow, begin, end, {o.slot, -1, i, agent, count, writes});
    });
  }

  void TouchGm(const GmAccess& gm, std::uint32_t i, std::size_t agent, std::uint32_t count) {
    if (gm.tensor < 0) return;  // The workspace comes as an operand.
    const auto tensor = static_cast<std::size_t>(gm.tensor);
    Shadow* shadow = tensors_[tensor].get();
    if (shadow == nullptr && (gm.writes || !check_reads_[tensor])) return;
    ForEachByteRange(gm, [&](std::int64_t begin, std::int64_t end) {
      const Access access{0, gm.tensor, i, agent, count, gm.writes};
      if (shadow != nullptr) {
        Touch(*shadow, begin, end, access);
      } else if (!gm_.Holds(tensor, begin, end)) {
        Report(Fault::kUninitialised, begin, end, access, nullptr);
      }
    });
  }

  struct Access {
    std::int32_t slot;    // index or ~index, as in an Operand
    std::int32_t tensor;  // -1: a slot
    std::uint32_t instr;
    std::size_t agent;
    std::uint32_t count;
    bool writes;
  };

  void Touch(Shadow& shadow, std::int64_t begin, std::int64_t end, const Access& now) {
    ++accesses_;
    const std::size_t component = now.agent + (IsScalar(now.agent) && now.writes ? kScalarWrites : 0);
    const Epoch mine{now.count, now.instr, static_cast<std::uint8_t>(component)};
    shadow.Walk(begin, end, now.writes, [&](Interval& part) {
      if (part.write.component != kNobody && !Ordered(part.write, now))
        Report(now.writes ? Fault::kWriteAfterWrite : Fault::kReadAfterWrite, part.begin, part.end, now,
               &part.write);
      if (!now.writes) {
        AddRead(part, now, mine);
        return;
      }
      for (std::size_t r = 0; r < part.reader_count; ++r) {
        if (!Ordered(part.readers[r], now))
          Report(Fault::kWriteAfterRead, part.begin, part.end, now, &part.readers[r]);
      }
      part.write = mine;
      part.slot = now.slot;
      part.reader_count = 0;
    });
  }

  void AddRead(Interval& part, const Access& now, const Epoch& mine) {
    if (part.write.component == kNobody) {
      const bool held =
          now.tensor >= 0 && gm_.Holds(static_cast<std::size_t>(now.tensor), part.begin, part.end);
      if (!held) Report(Fault::kUninitialised, part.begin, part.end, now, nullptr);
    } else if (part.slot != now.slot) {
      Report(Fault::kLiveSlot, part.begin, part.end, now, &part.write, part.slot);
    }
    for (std::size_t r = 0; r < part.reader_count; ++r) {
      if (part.readers[r].component == mine.component) {
        part.readers[r] = mine;
        return;
      }
    }
    CUBIST_CHECK(part.reader_count < Interval::kMaxReaders, "more pipes read a byte than a check holds");
    part.readers[part.reader_count++] = mine;
  }

  // Whether an access is over, in program order before `now`, when `now` begins.
  bool Ordered(const Epoch& past, const Access& now) const {
    if (past.instr > now.instr) return false;
    if (past.instr == now.instr) return true;
    // A scalar unit has its own writes in order.
    if (IsScalar(now.agent) && past.component == now.agent + kScalarWrites) return true;
    if (past.component == now.agent && (IsScalar(now.agent))) return true;
    return clocks_[now.agent].at[past.component] >= past.count;
  }

  // ---- Reports ----

  Finding Start(Fault fault) const {
    Finding f;
    f.fault = fault;
    f.phase = phase_, f.core = core_, f.other_core = core_;
    return f;
  }

  Place PlaceOfInstr(std::uint32_t i) const {
    const Instr& instr = from_.instrs[i];
    return {i, instr.pipe, instr.lane, trace::NameOf(instr.op), from_.lines[instr.line]};
  }
  Place PlaceOf(const SyncOp& op) const {
    Place place{op.instr, op.pipe, op.lane, NameOf(op.kind), {}};
    if (op.instr < from_.instrs.size()) place.line = from_.lines[from_.instrs[op.instr].line];
    return place;
  }

  std::string MemoryName(const Access& access) const {
    if (access.tensor >= 0) return TensorName(record_, static_cast<std::size_t>(access.tensor));
    return SlotName(access.slot);
  }
  std::string SlotName(std::int32_t slot) const {
    const bool in_gm = slot < 0;
    const SlotInfo& info = in_gm ? from_.workspace[static_cast<std::size_t>(~slot)]
                                 : from_.slots[static_cast<std::size_t>(slot)];
    return std::string(in_gm ? "hand-over workspace of" : NameOf(info.buffer)) + " '" + info.owner + "'";
  }

  void Report(Fault fault, std::int64_t begin, std::int64_t end, const Access& now, const Epoch* past,
              std::int32_t other_slot = 0) {
    Finding f = Start(fault);
    f.memory = MemoryName(now);
    f.begin = begin, f.end = end;
    f.second = PlaceOfInstr(now.instr);
    if (past != nullptr) {
      f.first = PlaceOfInstr(past->instr);
      if (past->instr > now.instr) {
        std::swap(f.first, f.second);
        if (fault == Fault::kReadAfterWrite) {
          f.fault = Fault::kWriteAfterRead;
        } else if (fault == Fault::kWriteAfterRead) {
          f.fault = Fault::kReadAfterWrite;
        }
      }
      f.cure = fault == Fault::kLiveSlot ? "keep the slots apart: " + SlotName(now.slot) +
                                               " was overwritten through " + SlotName(other_slot)
                                         : MissingEdge(f.first, f.second);
    } else {
      f.cure = "write these bytes before they are read";
    }
    findings_.Add(std::move(f));
  }

  std::string MissingEdge(const Place& first, const Place& second) const {
    if (first.lane == second.lane) {
      if (first.pipe == second.pipe)
        return std::string("PipeBarrier<") + NameOf(first.pipe) + "> between them";
      const std::string pair = std::string(NameOf(first.pipe)) + "_" + NameOf(second.pipe);
      return "SetFlag<" + pair + "> after the first, WaitFlag<" + pair + "> before the second";
    }
    const char* mode = first.lane >= 0 && second.lane >= 0 ? "1" : "2";
    return std::string("CrossCoreSetFlag<") + mode + ", " + NameOf(first.pipe) + "> after the first, " +
           "CrossCoreWaitFlag<" + mode + ", " + NameOf(second.pipe) + "> before the second";
  }

  static std::string FlagName(const SyncOp& op) {
    std::string name = NameOf(op.kind);
    if (op.kind == Kind::kSetFlag) name += std::string("<") + NameOf(op.pipe) + "_" + NameOf(op.peer) + ">";
    if (op.kind == Kind::kWaitFlag) name += std::string("<") + NameOf(op.peer) + "_" + NameOf(op.pipe) + ">";
    if (op.kind == Kind::kPipeBarrier) return name + "<" + NameOf(op.pipe) + ">";
    if (op.kind == Kind::kCrossSet || op.kind == Kind::kCrossWait)
      name += std::string("<2, ") + NameOf(op.pipe) + ">";
    return name + "(" + std::to_string(op.id) + ")";
  }

  static std::string AgentName(std::size_t agent) {
    const std::size_t side = SideOf(agent);
    const char* pipe = NameOf(static_cast<Pipe>(agent % kPipes));
    return side == 0 ? std::string("Cube ") + pipe : "Vector " + std::to_string(side - 1) + " " + pipe;
  }

  // ---- At the end ----

  // The item that a pipe cannot get past; null if it has nothing left. Behind a scalar unit that waits, that is
  // the scalar unit's.
  const Item* BlockedAt(std::size_t agent) const {
    if (IsScalar(agent)) {
      const auto& waiting = unissued_[SideOf(agent)];
      return waiting.empty() ? nullptr : &waiting.front();
    }
    return queues_[agent].empty() ? nullptr : &queues_[agent].front();
  }

  // A pipe with a set of this flag still to come, and whether it waits for its own queue or to be issued.
  // Looks for the set by Vector core `lane` where the wait is for all of them.
  std::size_t SetterOf(const SyncOp& wait) const {
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

  void FindStuck() {
    std::set<std::size_t> reported;
    for (std::size_t start = 0; start < components_; ++start) {
      if (start % kPipes == kScalarWrites || BlockedAt(start) == nullptr || reported.contains(start))
        continue;
      Explain(start, reported);
    }
  }

  // Follows who waits for whom from a stuck pipe to a cycle, or to a flag that nobody sets.
  void Explain(std::size_t start, std::set<std::size_t>& reported) {
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
      const SyncOp& wait = plan_.ops[BlockedAt(agent)->index];
      const auto flag =
          flags_.find(wait.kind == Kind::kWaitFlag ? KeyOf(wait) : CrossKey(SideOf(agent), wait.id));
      const std::int64_t sets = flag == flags_.end() ? 0 : flag->second.sets;
      const Place place = PlaceOf(wait);
      f.chain.push_back(AgentName(agent) + " waits at " + FlagName(wait) + " " + Where(place) +
                        ", for set number " + std::to_string(sets + 1));
      const std::size_t setter = SetterOf(wait);
      if (path.size() == 1) f.second = place, f.memory = FlagName(wait);
      if (setter == kComponents) {
        f.chain.push_back("which nothing sets: the plan sets it " + std::to_string(sets) + " times");
        edges += "  \"" + AgentName(agent) + "\" -> \"never set\" [label=\"" + FlagName(wait) + "\"];\n" +
                 "  \"never set\" [color=red, fontcolor=red];\n";
        f.fault = Fault::kNeverSet;
        f.second = place, f.memory = FlagName(wait);
        break;
      }
      edges += "  \"" + AgentName(agent) + "\" -> \"" + AgentName(setter) + "\" [label=\"" + FlagName(wait) +
               " before line " + std::to_string(place.line.line) + "\"];\n";
      agent = setter;
    }
    for (const std::size_t a : path) reported.insert(a);
    f.cure = f.fault == Fault::kNeverSet ? "add the set, or drop the wait"
                                         : "move one of these waits behind its set";
    if (dot_.empty()) dot_ = "digraph deadlock {\n" + edges + "}\n";
    findings_.Add(std::move(f));
  }

  static std::string Where(const Place& place) {
    return std::string("near ") + place.line.file + ":" + std::to_string(place.line.line);
  }

  void FindLeftSet() {
    for (const auto& [key, flag] : flags_) {
      for (const SyncOp& op : flag.set_by) AddLeftSet(op);
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
  void AddLeftSet(const SyncOp& op) {
    Finding f = Start(Fault::kLeftSet);
    f.second = PlaceOf(op);
    f.memory = FlagName(op);
    f.cure = "add the wait, or drop the set";
    findings_.Add(std::move(f));
  }

  const Record& record_;
  const ChipSpec& chip_;
  const GmState& gm_;
  std::size_t phase_, core_;
  const CoreRecord& from_;
  const CorePlan plan_;
  int lanes_;
  std::size_t components_;

  std::array<VectorClock, kComponents> clocks_;
  std::array<std::uint32_t, kComponents> counts_{};  // instructions and flags executed
  std::array<std::vector<VectorClock>, kSides> issue_versions_;
  std::array<std::uint32_t, kComponents> seen_version_{};
  std::array<std::deque<Item>, kComponents> queues_;
  std::array<std::deque<Item>, kSides> unissued_;
  std::vector<std::size_t> woken_;
  std::unordered_map<FlagKey, Flag> flags_;

  std::vector<Shadow> on_chip_;  // by buffer and side
  Shadow workspace_{20};
  std::vector<std::unique_ptr<Shadow>> tensors_;  // those that pipes of this core may quarrel about
  std::vector<char> check_reads_;
  Findings findings_;
  std::string dot_;
  std::int64_t accesses_ = 0;
};

}  // namespace

namespace {

// Bytes of GM that one core touches in a phase.
struct CoreBytes {
  std::int64_t begin, end;
  std::uint32_t core, instr;
};

// Cores of a phase share no bytes of GM that one of them writes.
class SharedGm {
 public:
  SharedGm(const Record& record, std::size_t phase) : record_(record), phase_(phase) {}

  void Find(Findings& findings) {
    const auto& cores = record_.phases[phase_].cores;
    FindCandidates();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const Seen& seen = tensors_[t];
      if (!seen.written || !seen.by_several) continue;
      std::vector<CoreBytes> reads, writes;
      for (std::uint32_t c = 0; c < cores.size(); ++c) Collect(cores[c], c, t, reads, writes);
      const auto by_begin = [](const CoreBytes& x, const CoreBytes& y) { return x.begin < y.begin; };
      std::sort(writes.begin(), writes.end(), by_begin);
      std::vector<CoreBytes> disjoint;
      for (CoreBytes w : writes) {
        if (!disjoint.empty() && disjoint.back().end > w.begin) {
          CoreBytes& last = disjoint.back();
          if (last.core != w.core) {
            Add(findings, t, last, w);
          } else {
            last.end = std::max(last.end, w.end);
            continue;
          }
          w.begin = last.end;
        }
        if (w.begin < w.end) disjoint.push_back(w);
      }
      for (const CoreBytes& r : reads) {
        auto at = std::partition_point(disjoint.begin(), disjoint.end(),
                                       [&](const CoreBytes& w) { return w.end <= r.begin; });
        for (; at != disjoint.end() && at->begin < r.end; ++at) {
          if (at->core != r.core) Add(findings, t, *at, r);
        }
      }
    }
  }

 private:
  struct Seen {
    std::int64_t core = -1;
    bool by_several = false, written = false;
  };

  void FindCandidates() {
    const auto& cores = record_.phases[phase_].cores;
    for (std::size_t c = 0; c < cores.size(); ++c) {
      for (const GmAccess& gm : cores[c].accesses) {
        if (gm.tensor < 0) continue;
        const auto tensor = static_cast<std::size_t>(gm.tensor);
        if (tensors_.size() <= tensor) tensors_.resize(tensor + 1);
        Seen& seen = tensors_[tensor];
        const auto core = static_cast<std::int64_t>(c);
        seen.by_several |= seen.core >= 0 && seen.core != core;
        seen.core = core;
        seen.written |= gm.writes;
      }
    }
  }

  static void Collect(const CoreRecord& from, std::uint32_t core, std::size_t tensor,
                      std::vector<CoreBytes>& reads, std::vector<CoreBytes>& writes) {
    for (std::uint32_t i = 0; i < from.instrs.size(); ++i) {
      if (from.instrs[i].access < 0) continue;
      const GmAccess& gm = from.accesses[static_cast<std::size_t>(from.instrs[i].access)];
      if (gm.tensor != static_cast<std::int32_t>(tensor)) continue;
      auto& to = gm.writes ? writes : reads;
      ForEachByteRange(gm, [&](std::int64_t begin, std::int64_t end) {
        to.push_back({begin, end, core, i});
      });
    }
  }

  void Add(Findings& findings, std::size_t tensor, const CoreBytes& x, const CoreBytes& y) const {
    Finding f;
    f.fault = Fault::kSharedGm;
    f.phase = phase_;
    f.core = x.core, f.other_core = y.core;
    f.first = PlaceOf(x), f.second = PlaceOf(y);
    f.memory = TensorName(record_, tensor);
    f.begin = std::max(x.begin, y.begin), f.end = std::min(x.end, y.end);
    f.cure = "give the bytes to one core, or to two phases";
    findings.Add(std::move(f));
  }
  Place PlaceOf(const CoreBytes& bytes) const {
    const CoreRecord& from = record_.phases[phase_].cores[bytes.core];
    const Instr& instr = from.instrs[bytes.instr];
    return {bytes.instr, instr.pipe, instr.lane, trace::NameOf(instr.op), from.lines[instr.line]};
  }

  const Record& record_;
  std::size_t phase_;
  std::vector<Seen> tensors_;
};

// Tensors of the launch's own that some phase reads.
std::vector<char> WatchedTensors(const Record& record, const GmState& gm) {
  std::vector<char> watched;
  for (const trace::Phase& phase : record.phases) {
    for (const CoreRecord& core : phase.cores) {
      for (const GmAccess& access : core.accesses) {
        if (access.tensor < 0 || access.writes) continue;
        const auto tensor = static_cast<std::size_t>(access.tensor);
        if (watched.size() <= tensor) watched.resize(tensor + 1, 0);
        watched[tensor] = !gm.IsInput(tensor);
      }
    }
  }
  return watched;
}

void AddWritten(const trace::Phase& phase, const std::vector<char>& watched, GmState& gm) {
  gm.written.resize(watched.size());
  for (const CoreRecord& core : phase.cores) {
    for (const GmAccess& access : core.accesses) {
      const auto tensor = static_cast<std::size_t>(access.tensor);
      if (access.tensor < 0 || !access.writes || tensor >= watched.size() || !watched[tensor]) continue;
      ForEachByteRange(access,
                       [&](std::int64_t begin, std::int64_t end) { gm.written[tensor].Add(begin, end); });
    }
  }
  for (ByteSet& set : gm.written) set.Merge();
}

std::string Describe(const Place& place) {
  std::string text = place.what;
  text += std::string(" on ") + NameOf(place.pipe);
  if (place.lane >= 0) text += " of Vector core " + std::to_string(place.lane);
  return text + ", " + place.line.file + ":" + std::to_string(place.line.line);
}

}  // namespace

const char* NameOf(Fault fault) {
  constexpr const char* kNames[kFaultCount] = {"read after write",
                                               "write after read",
                                               "write after write",
                                               "uninitialised read",
                                               "slot overwritten while live",
                                               "bytes shared by cores",
                                               "deadlock",
                                               "flag never set",
                                               "flag left set",
                                               "flag set twice",
                                               "bad plan entry"};
  return kNames[static_cast<int>(fault)];
}

std::string ToString(const Finding& f) {
  std::string text = std::string(NameOf(f.fault)) + ": ";
  if (f.first.what[0] != '\0') text += Describe(f.first) + ", then ";
  text += Describe(f.second) + "\n  ";
  if (!f.memory.empty()) text += f.memory + ", ";
  if (f.end > f.begin) text += "bytes " + std::to_string(f.begin) + " to " + std::to_string(f.end) + ", ";
  text += "phase " + std::to_string(f.phase) + ", core " + std::to_string(f.core);
  if (f.fault == Fault::kSharedGm) text += " and core " + std::to_string(f.other_core);
  if (f.count > 1) text += ", " + std::to_string(f.count) + " times";
  for (const std::string& link : f.chain) text += "\n  " + link;
  if (!f.cure.empty()) text += "\n  missing: " + f.cure;
  return text;
}

CheckResult Check(const trace::Record& record, const Plan& plan) {
  CheckResult result;
  Findings findings;
  GmState gm(record);
  const std::vector<char> watched = WatchedTensors(record, gm);
  const CorePlan no_flags;
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const trace::Phase& phase = record.phases[p];
    const auto plan_of = [&](std::size_t c) -> const CorePlan& {
      if (p >= plan.phases.size() || c >= plan.phases[p].cores.size()) return no_flags;
      return plan.phases[p].cores[c];
    };
    struct Outcome {
      std::vector<Finding> findings;
      std::string dot;
      std::int64_t accesses = 0;
    };
    std::vector<Outcome> outcomes(phase.cores.size());
    tbb::parallel_for(std::size_t{0}, phase.cores.size(), [&](std::size_t c) {
      CoreChecker checker(record, gm, p, c, plan_of(c));
      checker.Run();
      outcomes[c] = {checker.TakeFindings(), checker.TakeDot(), checker.accesses()};
    });
    for (std::size_t c = 0; c < outcomes.size(); ++c) {
      for (Finding& f : outcomes[c].findings) findings.Add(std::move(f));
      if (result.deadlock_dot.empty()) result.deadlock_dot = std::move(outcomes[c].dot);
      result.instructions += static_cast<std::int64_t>(phase.cores[c].instrs.size());
      result.flags += static_cast<std::int64_t>(plan_of(c).ops.size());
      result.accesses += outcomes[c].accesses;
    }
    SharedGm(record, p).Find(findings);
    AddWritten(phase, watched, gm);
  }
  result.findings = findings.Take();
  return result;
}

}  // namespace cubist::sync
