#include "npu_model/trace/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <tuple>
#include <utility>

#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/flows.h"
#include "npu_model/trace/l2_cache.h"

namespace cubist::trace {
namespace {

constexpr std::int64_t kBlock = 32;  // bytes, the unit of UB and of L1 rows

VectorOp CostOf(Op op) {
  switch (op) {
    case Op::kCast:
      return VectorOp::kCast;
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMax:
      return VectorOp::kBinary;
    case Op::kDiv:
      return VectorOp::kDiv;
    case Op::kExp:
      return VectorOp::kExp;
    case Op::kLn:
      return VectorOp::kLn;
    case Op::kRowMax:
    case Op::kRowSum:
      return VectorOp::kReduce;
    case Op::kMaskAbove:
      return VectorOp::kSelect;
    case Op::kAddInt:
    case Op::kColumnSum:
    case Op::kExclusiveScan:
      return VectorOp::kInteger;
    default:
      return VectorOp::kUnary;
  }
}

// Repeats of a Vector instruction on a tile of `rows` x `cols`: all blocks in a row where the tile fills its
// slot's rows, eight rows at a time where a row is one block, and row by row otherwise.
std::int64_t Repeats(const ChipSpec& chip, std::int64_t rows, std::int64_t cols, std::int64_t element,
                     std::int64_t slot_cols) {
  const std::int64_t row_bytes = RoundUp(cols * element, kBlock);
  const std::int64_t per_repeat = chip.vector.repeat_bytes;
  if (rows == 1 || row_bytes == RoundUp(slot_cols * element, kBlock) || row_bytes == kBlock) {
    return CeilDiv(rows * row_bytes, per_repeat);
  }
  return rows * CeilDiv(row_bytes, per_repeat);
}

// Cycles that a V, M, MTE1 or S instruction keeps its pipe busy.
class Costs {
 public:
  explicit Costs(const ChipSpec& chip) : chip_(&chip) {}

  double Of(const CoreRecord& record, const Instr& instr, bool pipe_was_drained) const {
    switch (instr.pipe) {
      case Pipe::kM:
        return Mmad(instr, pipe_was_drained);
      case Pipe::kV:
        return Vector(record, instr);
      case Pipe::kS:
        return Scalar(instr);
      default:
        return Load(instr);
    }
  }

  // Bytes that an L1 load moves: whole fractals.
  std::int64_t FractalBytes(const Instr& instr) const {
    if (instr.op == Op::kLoadBT) return instr.dims[1] * SizeOf(instr.dtype);
    return RoundUp(instr.dims[0], chip_->packing.row_multiple) *
           RoundUp(instr.dims[1] * chip_->OperandBytes(instr.dtype), kBlock);
  }
  static Path PathOf(Op op) {
    return op == Op::kLoadL0A ? Path::kL1ToL0A : op == Op::kLoadL0B ? Path::kL1ToL0B : Path::kL1ToBT;
  }

 private:
  double Mmad(const Instr& instr, bool pipe_was_drained) const {
    const auto& mmad = chip_->mmad;
    const std::int64_t element = chip_->OperandBytes(instr.dtype);
    const std::int64_t steps = CeilDiv(instr.dims[0], mmad.m_step) * CeilDiv(instr.dims[1], mmad.n_step) *
                               CeilDiv(instr.dims[2], mmad.k_bytes / element);
    const double passes = element == 4 ? mmad.fp32_passes : mmad.narrow_passes;
    return (pipe_was_drained ? mmad.head_idle : mmad.head_busy) + static_cast<double>(steps) * passes;
  }

  double Vector(const CoreRecord& record, const Instr& instr) const {
    const OperandUse work = instr.uses[1].used() ? instr.uses[1] : instr.uses[0];
    const Operand& operand = record.operands[work.operand()];
    const std::int64_t slot_cols = record.slots[static_cast<std::size_t>(operand.slot)].cols;
    const std::int64_t rows = instr.dims[0], cols = instr.dims[1], element = SizeOf(instr.dtype);
    const auto repeats = static_cast<double>(Repeats(*chip_, rows, cols, element, slot_cols));
    const double head = chip_->vector.head;
    const double cycles = chip_->vector_cycles(CostOf(instr.op));
    switch (instr.op) {
      case Op::kRowMax:
      case Op::kRowSum:
        return Reduction(rows, cols, element, slot_cols, head, cycles);
      case Op::kExclusiveScan:
        return instr.dims[2] * (head + repeats * cycles);
      default:
        break;
    }
    double total = head + repeats * cycles;
    if (instr.broadcasts) {  // The column is first spread to one block per row, eight rows per repeat.
      total += head + static_cast<double>(CeilDiv(rows * kBlock, chip_->vector.repeat_bytes)) *
                          chip_->vector_cycles(VectorOp::kUnary);
    }
    return total;
  }

  // Every pass makes one element of each block.
  double Reduction(std::int64_t rows, std::int64_t cols, std::int64_t element, std::int64_t slot_cols,
                   double head, double cycles) const {
    const std::int64_t per_block = kBlock / element;
    double total = 0;
    do {
      total += head + static_cast<double>(Repeats(*chip_, rows, cols, element, slot_cols)) * cycles;
      cols = CeilDiv(cols, per_block);
      slot_cols = cols;
    } while (cols > 1);
    return total;
  }

  double Scalar(const Instr& instr) const {
    if (instr.op == Op::kReadScalar) return chip_->scalar.read;
    return static_cast<double>(instr.dims[0]) * instr.dims[1] * chip_->scalar.update;
  }

  double Load(const Instr& instr) const {
    const PathSpec& path = chip_->path(PathOf(instr.op));
    return path.startup + static_cast<double>(FractalBytes(instr)) / path.bytes_per_cycle;
  }

  const ChipSpec* chip_;
};

// Slots of a line's size that a burst takes on its way: it is cut at line boundaries, and a piece shorter
// than a line goes in packets of a half, a quarter, and what is left below a quarter, each as dear as a line.
// A line is 1 << shift bytes.
std::int64_t LineSlots(std::int64_t address, std::int64_t bytes, int shift) {
  const std::int64_t line = std::int64_t{1} << shift;
  const auto packets = [shift, line](std::int64_t piece) {
    return (piece >> (shift - 1)) + (piece >> (shift - 2)) % 2 + ((piece & (line / 4 - 1)) != 0);
  };
  const std::int64_t lead = -address & (line - 1);
  if (lead >= bytes) return packets(bytes);
  return packets(lead) + ((bytes - lead) >> shift) + packets((bytes - lead) & (line - 1));
}

// Global memory as the replay sees it: where tensors stand, and what of them is in L2.
class GlobalMemory {
 public:
  struct Transfer {
    double port_bytes = 0;  // line slots through the core's port
    double hbm_bytes = 0;   // missed, or written back to make room
  };

  explicit GlobalMemory(const Record& record) : line_(record.chip.memory.l2_line) {
    std::vector<std::int64_t> extents(record.tensors.size());
    for (std::size_t t = 0; t < extents.size(); ++t) extents[t] = record.tensors[t].bytes;
    for (const Phase& phase : record.phases) {
      std::int64_t workspace = 0;
      for (const CoreRecord& core : phase.cores) {
        workspace += RoundUp(core.workspace_bytes, line_);
        for (const GmAccess& access : core.accesses) {
          if (access.tensor < 0) continue;
          const auto tensor = static_cast<std::size_t>(access.tensor);
          if (extents.size() <= tensor) extents.resize(tensor + 1);
          extents[tensor] = std::max(extents[tensor], access.end());
        }
      }
      workspace_bytes_ = std::max(workspace_bytes_, workspace);
    }
    constexpr std::int64_t kApart = 8;  // lines: tensors share no run of L2
    std::int64_t end = 0;
    for (const std::int64_t extent : extents) {
      tensors_.push_back(end);
      end += RoundUp(extent, kApart * line_);
    }
    workspace_ = end;
    l2_ = std::make_unique<L2Cache>(record.chip.memory.l2_bytes, line_, end + workspace_bytes_);
  }

  std::int64_t workspace_bytes() const { return workspace_bytes_; }

  Transfer Touch(const GmAccess& access, std::int64_t core_workspace) {
    const std::int64_t base =
        access.tensor < 0 ? workspace_ + core_workspace : tensors_[static_cast<std::size_t>(access.tensor)];
    const int shift = std::countr_zero(static_cast<std::uint64_t>(line_));
    std::int64_t slots = 0;
    L2Cache::Tally tally;
    for (std::int64_t row = 0; row < access.rows; ++row) {
      for (std::int64_t burst = 0; burst < access.bursts; ++burst) {
        const std::int64_t address =
            base + access.offset + row * access.row_stride + burst * access.burst_stride;
        slots += LineSlots(address, access.burst_bytes, shift);
        l2_->Touch(address, access.burst_bytes, access.writes, &tally);
      }
    }
    const std::int64_t fetched = access.writes ? 0 : tally.missed;
    if (!access.writes) {
      read_ += access.bytes();
      missed_ += static_cast<double>(access.bytes()) * static_cast<double>(tally.missed) /
                 static_cast<double>(std::max<std::int64_t>(tally.lines, 1));
    }
    return {static_cast<double>(slots * line_), static_cast<double>((fetched + tally.written_back) * line_)};
  }

  // Share of the bytes read that L2 had.
  double hit_rate() const { return read_ == 0 ? 0 : 1 - missed_ / static_cast<double>(read_); }

 private:
  std::int64_t line_;
  std::vector<std::int64_t> tensors_;  // first byte of each
  std::int64_t workspace_ = 0, workspace_bytes_ = 0;
  std::unique_ptr<L2Cache> l2_;
  std::int64_t read_ = 0;
  double missed_ = 0;
};

// A queue of a core. The scalar unit's holds every instruction of its side: it issues them, and executes its
// own.
struct Agent {
  std::vector<std::uint32_t> queue;
  std::size_t head = 0;
  std::uint32_t done = 0;     // last instruction finished + 1, or for a scalar unit last one issued + 1
  std::uint32_t waiters = 0;  // agents to look at again when `done` grows, a bit each
  bool in_flight = false;     // a transfer is under way
  double free_at = 0;
  double started = 0;  // of the transfer under way
  double busy = 0;
};

struct Core {
  Core(const CoreRecord& record, std::int64_t workspace)
      : record(&record), dependencies(record), time(record.instrs.size()), workspace(workspace) {
    for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
      const Instr& instr = record.instrs[i];
      const int agent = AgentOf(instr.pipe, instr.lane);
      agents[static_cast<std::size_t>(IssuerOf(agent))].queue.push_back(i);
      if (instr.pipe != Pipe::kS) agents[static_cast<std::size_t>(agent)].queue.push_back(i);
    }
  }

  const CoreRecord* record;
  Dependencies dependencies;
  std::vector<double> time;  // of each instruction: when it was issued, and once it is done when it ended
  std::array<Agent, kMaxAgents> agents;
  std::int64_t workspace;  // first byte of its hand-over slots
  double end = 0;
};

// One phase: all its cores side by side, from time 0.
class PhaseReplay {
 public:
  using OnSlice = std::function<void(std::size_t core, const Instr& instr, double start, double end)>;

  PhaseReplay(const ChipSpec& chip, const Phase& phase, GlobalMemory& memory, OnSlice on_slice)
      : chip_(&chip), costs_(chip), memory_(&memory), flows_(chip), on_slice_(std::move(on_slice)) {
    std::int64_t workspace = 0;
    cores_.reserve(phase.cores.size());
    for (const CoreRecord& record : phase.cores) {
      cores_.emplace_back(record, workspace);
      workspace += RoundUp(record.workspace_bytes, chip.memory.l2_line);
    }
  }

  void Run() {
    for (std::uint32_t c = 0; c < cores_.size(); ++c) {
      std::uint32_t all = 0;
      for (std::uint32_t a = 0; a < kMaxAgents; ++a) all |= cores_[c].agents[a].queue.empty() ? 0 : 1u << a;
      Wake(c, all);
    }
    while (true) {
      const double next_end = flows_.NextEnd();
      const double next_start =
          starts_.empty() ? std::numeric_limits<double>::infinity() : starts_.top().time;
      if (std::isinf(next_end) && std::isinf(next_start)) break;
      flows_.AdvanceTo(std::min(next_end, next_start));
      if (next_end <= next_start) {
        EndFlow();
      } else {
        const Start start = starts_.top();
        starts_.pop();
        StartFlow(start);
      }
    }
    for (Core& core : cores_) {
      for (const Agent& agent : core.agents) {
        CUBIST_CHECK(agent.head == agent.queue.size(), "an instruction waits for itself");
        core.end = std::max(core.end, agent.free_at);
      }
    }
  }

  const std::vector<Core>& cores() const { return cores_; }
  const Flows& flows() const { return flows_; }

 private:
  struct Start {
    double time;
    std::uint32_t core, agent;
    bool operator>(const Start& o) const {
      return std::tie(time, core, agent) > std::tie(o.time, o.core, o.agent);
    }
  };

  // Lets the agents of `pending` go on as far as they can, and those that waited for them.
  void Wake(std::uint32_t core, std::uint32_t pending) {
    while (pending != 0) {
      const auto agent = static_cast<std::uint32_t>(std::countr_zero(pending));
      pending &= pending - 1;
      pending |= IssuerOf(static_cast<int>(agent)) == static_cast<int>(agent) ? Issue(core, agent)
                                                                              : Execute(core, agent);
    }
  }

  // When `instr` may start, given what it depends on; false, and `agent` waits, while that is not known.
  bool Ready(Core& core, std::uint32_t agent, std::uint32_t instr, double* ready) {
    for (const Dependency& d : core.dependencies.Of(instr)) {
      Agent& other = core.agents[d.agent];
      if (other.done <= d.instr) {
        other.waiters |= 1u << agent;
        return false;
      }
      const bool same_side = IssuerOf(static_cast<int>(d.agent)) == IssuerOf(static_cast<int>(agent));
      const double latency = same_side ? chip_->sync.flag : chip_->sync.cross_core;
      *ready = std::max(*ready, core.time[d.instr] + latency);
    }
    return true;
  }

  // The scalar unit: issues in program order; its own instructions wait for their operands and hold up what
  // follows.
  std::uint32_t Issue(std::uint32_t c, std::uint32_t a) {
    Core& core = cores_[c];
    Agent& agent = core.agents[a];
    const double issue = chip_->scalar.issue;
    bool progress = false;
    for (; agent.head < agent.queue.size(); ++agent.head) {
      const std::uint32_t i = agent.queue[agent.head];
      const Instr& instr = core.record->instrs[i];
      double start = agent.free_at, cycles = issue;
      if (instr.pipe == Pipe::kS) {
        if (!Ready(core, a, i, &start)) break;
        cycles = costs_.Of(*core.record, instr, false);
        if (on_slice_) on_slice_(c, instr, start, start + cycles);
      }
      agent.free_at = core.time[i] = start + cycles;
      agent.busy += cycles;
      agent.done = i + 1;
      progress = true;
    }
    return progress ? std::exchange(agent.waiters, 0) : 0;
  }

  // A pipe: in program order, one instruction at a time.
  std::uint32_t Execute(std::uint32_t c, std::uint32_t a) {
    Core& core = cores_[c];
    Agent& agent = core.agents[a];
    Agent& issuer = core.agents[static_cast<std::size_t>(IssuerOf(static_cast<int>(a)))];
    bool progress = false;
    while (!agent.in_flight && agent.head < agent.queue.size()) {
      const std::uint32_t i = agent.queue[agent.head];
      if (issuer.done <= i) {
        issuer.waiters |= 1u << a;
        break;
      }
      double ready = std::max(core.time[i], agent.free_at);
      if (!Ready(core, a, i, &ready)) break;
      const Instr& instr = core.record->instrs[i];
      if (instr.access >= 0) {
        const GmAccess& access = core.record->accesses[static_cast<std::size_t>(instr.access)];
        agent.in_flight = true;
        agent.started = ready;
        starts_.push({ready + chip_->path(access.path).startup, c, a});
        break;
      }
      Finish(c, agent, i, ready, ready + costs_.Of(*core.record, instr, ready > agent.free_at));
      progress = true;
    }
    return progress ? std::exchange(agent.waiters, 0) : 0;
  }

  void Finish(std::uint32_t c, Agent& agent, std::uint32_t i, double start, double end) {
    Core& core = cores_[c];
    core.time[i] = agent.free_at = end;
    agent.busy += end - start;
    agent.done = i + 1;
    ++agent.head;
    if (on_slice_) on_slice_(c, core.record->instrs[i], start, end);
  }

  // Its bytes begin to flow: first what HBM has to do with it, then what L2 serves.
  void StartFlow(const Start& start) {
    const Core& core = cores_[start.core];
    const Agent& agent = core.agents[start.agent];
    const Instr& instr = core.record->instrs[agent.queue[agent.head]];
    const GmAccess& access = core.record->accesses[static_cast<std::size_t>(instr.access)];
    const GlobalMemory::Transfer transfer = memory_->Touch(access, core.workspace);
    const double from_l2 = std::max(transfer.port_bytes - transfer.hbm_bytes, 0.0);
    if (transfer.hbm_bytes > 0) {
      flows_.Start(access.path, /*misses=*/true, {transfer.hbm_bytes, from_l2, start.core, start.agent});
    } else {
      flows_.Start(access.path, /*misses=*/false, {from_l2, 0, start.core, start.agent});
    }
  }

  void EndFlow() {
    Path path;
    Flows::Flow flow = flows_.TakeEnded(&path);
    if (flow.then_hits > 0) {
      flows_.Start(path, /*misses=*/false, {std::exchange(flow.then_hits, 0), 0, flow.core, flow.agent});
      return;
    }
    Agent& agent = cores_[flow.core].agents[flow.agent];
    agent.in_flight = false;
    Finish(flow.core, agent, agent.queue[agent.head], agent.started, flows_.now());
    Wake(flow.core, std::exchange(agent.waiters, 0) | 1u << flow.agent);
  }

  const ChipSpec* chip_;
  Costs costs_;
  GlobalMemory* memory_;
  Flows flows_;
  OnSlice on_slice_;
  std::vector<Core> cores_;
  std::priority_queue<Start, std::vector<Start>, std::greater<>> starts_;
};

std::string Format(const char* format, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Cycles by pipe, of the Cube side and of the busiest Vector core.
struct BusyCycles {
  std::array<double, kPipeCount> cube{}, vector{};
};

// Adds up what the phases did, and draws the conclusion.
class Summary {
 public:
  explicit Summary(const Record& record) : record_(&record), chip_(&record.chip) {}

  void Add(const Phase& phase, const PhaseReplay& replay) {
    const Core* last = nullptr;
    int used = 0;
    for (const Core& core : replay.cores()) {
      used += core.record->instrs.empty() ? 0 : 1;
      if (last == nullptr || core.end > last->end) last = &core;
      Count(*core.record);
      ForEachPipe(core, [&](Pipe pipe, int lane, double busy) {
        auto& side = lane < 0 ? all_.cube : all_.vector;
        side[static_cast<std::size_t>(pipe)] += busy;
      });
    }
    profile_.cores_used = std::max(profile_.cores_used, used);
    if (last != nullptr) {
      BusyCycles critical;
      ForEachPipe(*last, [&](Pipe pipe, int lane, double busy) {
        auto& most = (lane < 0 ? critical.cube : critical.vector)[static_cast<std::size_t>(pipe)];
        most = std::max(most, busy);
      });
      for (std::size_t p = 0; p < kPipeCount; ++p) {
        critical_.cube[p] += critical.cube[p], critical_.vector[p] += critical.vector[p];
      }
      working_ += last->end;
    }
    hbm_limited_ += replay.flows().hbm_limited();
    l2_limited_ += replay.flows().l2_limited();
    if (&phase != &record_->phases.front()) fixed_ += chip_->sync.barrier_s * chip_->clock_hz;
  }

  Profile Finish(const GlobalMemory& memory) {
    fixed_ += chip_->sync.launch_s * chip_->clock_hz;
    const double cycles = fixed_ + working_;
    profile_.kernel = record_->kernel;
    profile_.chip = chip_->name;
    profile_.cycles = cycles;
    profile_.time_s = cycles / chip_->clock_hz;
    profile_.workspace_bytes = record_->workspace_bytes + memory.workspace_bytes();
    profile_.l2_hit_rate = memory.hit_rate();
    const double cube_cycles = cycles * chip_->cube_cores;
    const double vector_cycles = cube_cycles * chip_->vector_per_cube;
    for (std::size_t p = 0; p < kPipeCount; ++p) {
      if (cycles <= 0) break;
      profile_.busy[p] = {all_.cube[p] / cube_cycles, all_.vector[p] / vector_cycles};
      const Pipe pipe = static_cast<Pipe>(p);
      if (pipe == Pipe::kM) profile_.cube_utilisation = profile_.busy[p].cube_side;
      if (pipe == Pipe::kV) profile_.vector_utilisation = profile_.busy[p].vector_side;
      if (pipe == Pipe::kMte1 || pipe == Pipe::kMte2 || pipe == Pipe::kMte3 || pipe == Pipe::kFix) {
        profile_.mte_utilisation =
            std::max({profile_.mte_utilisation, profile_.busy[p].cube_side, profile_.busy[p].vector_side});
      }
    }
    Judge(cycles);
    return std::move(profile_);
  }

 private:
  template <class Visit>
  static void ForEachPipe(const Core& core, Visit visit) {
    for (int p = 0; p < kPipeCount; ++p) {
      const Pipe pipe = static_cast<Pipe>(p);
      const auto busy = [&](int lane) {
        return core.agents[static_cast<std::size_t>(AgentOf(pipe, lane))].busy;
      };
      if (pipe != Pipe::kV) visit(pipe, -1, busy(-1));
      if (pipe == Pipe::kMte1 || pipe == Pipe::kM || pipe == Pipe::kFix) continue;
      for (int lane = 0; lane < kMaxLanes; ++lane) visit(pipe, lane, busy(lane));
    }
  }

  void Count(const CoreRecord& record) {
    const Costs costs(*chip_);
    profile_.instructions += static_cast<std::int64_t>(record.instrs.size());
    for (const Instr& instr : record.instrs) {
      if (instr.pipe == Pipe::kM) {
        profile_.macs += std::int64_t{instr.dims[0]} * instr.dims[1] * instr.dims[2];
      } else if (instr.pipe == Pipe::kMte1) {
        profile_.path_bytes[static_cast<std::size_t>(Costs::PathOf(instr.op))] += costs.FractalBytes(instr);
      }
    }
    for (const GmAccess& access : record.accesses) {
      profile_.path_bytes[static_cast<std::size_t>(access.path)] += access.bytes();
      (access.writes ? profile_.gm_written : profile_.gm_read) += access.bytes();
    }
  }

  // What bounds the time: the fixed costs, or the pipe that is busiest on the cores that finish last, or the
  // memory that such a pipe waits for.
  void Judge(double cycles) {
    double most = 0;
    Pipe pipe = Pipe::kS;
    bool cube_side = true;
    for (std::size_t p = 0; p < kPipeCount; ++p) {
      if (critical_.cube[p] > most) most = critical_.cube[p], pipe = static_cast<Pipe>(p), cube_side = true;
      if (critical_.vector[p] > most)
        most = critical_.vector[p], pipe = static_cast<Pipe>(p), cube_side = false;
    }
    const auto percent = [&](double part) { return cycles > 0 ? 100 * part / cycles : 0; };
    const bool moves = pipe == Pipe::kMte2 || pipe == Pipe::kMte3 || pipe == Pipe::kFix;
    const std::string where =
        std::string(NameOf(pipe)) + (cube_side ? " of the Cube core" : " of the Vector core");
    if (fixed_ >= most) {
      profile_.bound = "launch";
      profile_.verdict = Format("launch and barriers take %.0f %% of the time", percent(fixed_));
    } else if (moves && hbm_limited_ >= most / 2) {
      profile_.bound = "HBM";
      profile_.verdict = Format("HBM gives all of its %.2f TB/s for %.0f %% of the time",
                                chip_->memory.hbm_bytes_per_s / 1e12, percent(hbm_limited_));
    } else if (moves && l2_limited_ >= most / 2) {
      profile_.bound = "L2";
      profile_.verdict =
          Format("L2 gives all of its bandwidth for %.0f %% of the time", percent(l2_limited_));
    } else if (most < cycles / 2) {
      profile_.bound = "latency";
      profile_.verdict =
          Format("instructions wait for each other: the busiest pipe, %s, works %.0f %% of the time",
                 where.c_str(), percent(most));
    } else {
      profile_.bound = NameOf(pipe);
      profile_.verdict =
          Format("%s works %.0f %% of the time on the core that finishes last", where.c_str(), percent(most));
    }
  }

  const Record* record_;
  const ChipSpec* chip_;
  Profile profile_;
  BusyCycles all_, critical_;
  double working_ = 0;  // cycles of the phases
  double fixed_ = 0;    // cycles of launch and barriers
  double hbm_limited_ = 0, l2_limited_ = 0;
};

TimelineSlice SliceOf(const Record& record, const Phase& phase, std::size_t core, const Instr& instr,
                      double start_us, double end_us) {
  const CoreRecord& from = phase.cores[core];
  const int per_cube = record.chip.vector_per_cube;
  const int index = static_cast<int>(core);
  TimelineSlice slice;
  slice.core = phase.vector_only ? index / per_cube : index;
  slice.lane = phase.vector_only ? index % per_cube : instr.lane;
  slice.pipe = instr.pipe;
  slice.name = NameOf(instr.op);
  slice.line = from.lines[instr.line].line;
  slice.file = from.lines[instr.line].file;
  slice.start_us = start_us, slice.end_us = end_us;
  if (instr.access >= 0) slice.bytes = from.accesses[static_cast<std::size_t>(instr.access)].bytes();
  if (instr.pipe == Pipe::kMte1) slice.bytes = Costs(record.chip).FractalBytes(instr);
  return slice;
}

}  // namespace

Profile Replay(const Record& record, bool timeline) {
  const ChipSpec& chip = record.chip;
  GlobalMemory memory(record);
  Summary summary(record);
  auto slices = std::make_shared<std::vector<TimelineSlice>>();
  double phase_start = chip.sync.launch_s * chip.clock_hz;  // cycles
  for (const Phase& phase : record.phases) {
    PhaseReplay::OnSlice on_slice;
    if (timeline) {
      on_slice = [&](std::size_t core, const Instr& instr, double start, double end) {
        const double us_per_cycle = 1e6 / chip.clock_hz;
        slices->push_back(SliceOf(record, phase, core, instr, (phase_start + start) * us_per_cycle,
                                  (phase_start + end) * us_per_cycle));
      };
    }
    PhaseReplay replay(chip, phase, memory, std::move(on_slice));
    replay.Run();
    summary.Add(phase, replay);
    double longest = 0;
    for (const Core& core : replay.cores()) longest = std::max(longest, core.end);
    phase_start += longest + chip.sync.barrier_s * chip.clock_hz;
  }
  Profile profile = summary.Finish(memory);
  if (timeline) profile.timeline = std::move(slices);
  return profile;
}

}  // namespace cubist::trace
