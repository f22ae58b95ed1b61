#include "npu_model/trace/replay.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <utility>

#include "npu_model/status.h"
#include "npu_model/trace/costs.h"
#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/global_memory.h"
#include "npu_model/trace/phase_replay.h"

namespace cubist::trace {
namespace {

std::string Format(const char* format, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Cycles by pipe, of the Cube side and of the busiest Vector core.
struct Cycles {
  std::array<double, kPipeCount> cube{}, vector{};
};

// Adds up what the phases did, and draws the conclusion.
class Summary {
 public:
  // `launched`: cycles until the first phase begins.
  Summary(const Record& record, const ChipSpec& chip, double launched)
      : record_(&record), chip_(&chip), launched_(launched) {}

  void Add(const Phase& phase, const PhaseReplay& replay) {
    std::size_t last = 0;
    int used = 0;
    for (std::size_t c = 0; c < replay.cores(); ++c) {
      used += replay.record(c).instrs.empty() ? 0 : 1;
      if (replay.end(c) > replay.end(last)) last = c;
      Count(replay.record(c));
      ForEachPipe(replay, c, [&](Pipe pipe, int lane, const PhaseReplay::Times& times) {
        const auto p = static_cast<std::size_t>(pipe);
        (lane < 0 ? all_.cube : all_.vector)[p] += times.busy;
        (lane < 0 ? waited_.cube : waited_.vector)[p] += times.waited;
      });
    }
    profile_.cores_used = std::max(profile_.cores_used, used);
    if (replay.cores() > 0) {
      Cycles critical;
      ForEachPipe(replay, last, [&](Pipe pipe, int lane, const PhaseReplay::Times& times) {
        auto& most = (lane < 0 ? critical.cube : critical.vector)[static_cast<std::size_t>(pipe)];
        most = std::max(most, times.busy);
      });
      for (std::size_t p = 0; p < kPipeCount; ++p) {
        critical_.cube[p] += critical.cube[p], critical_.vector[p] += critical.vector[p];
      }
      working_ += replay.end(last);
    }
    hbm_limited_ += replay.flows().hbm_limited();
    l2_limited_ += replay.flows().l2_limited();
    if (&phase != &record_->phases.front()) fixed_ += chip_->sync.barrier_s * chip_->clock_hz;
  }

  Profile Finish(const GlobalMemory& memory) {
    fixed_ += launched_;
    const double cycles = fixed_ + working_;
    profile_.kernel = record_->kernel;
    profile_.launches = 1;
    profile_.chip = chip_->name;
    profile_.cycles = cycles;
    profile_.time_s = cycles / chip_->clock_hz;
    profile_.workspace_bytes = record_->workspace_bytes + memory.workspace_bytes();
    profile_.l2_hit_rate = memory.hit_rate();
    profile_.hbm_bytes = memory.hbm_bytes();
    const double cube_cycles = cycles * chip_->cube_cores;
    const double vector_cycles = cube_cycles * chip_->vector_per_cube;
    for (std::size_t p = 0; p < kPipeCount; ++p) {
      if (cycles <= 0) break;
      profile_.busy[p] = {all_.cube[p] / cube_cycles, all_.vector[p] / vector_cycles};
      profile_.waiting[p] = {waited_.cube[p] / cube_cycles, waited_.vector[p] / vector_cycles};
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
  static void ForEachPipe(const PhaseReplay& replay, std::size_t core, Visit visit) {
    for (int p = 0; p < kPipeCount; ++p) {
      const Pipe pipe = static_cast<Pipe>(p);
      if (pipe != Pipe::kV) visit(pipe, -1, replay.times(core, pipe, -1));
      if (pipe == Pipe::kMte1 || pipe == Pipe::kM || pipe == Pipe::kFix) continue;
      for (int lane = 0; lane < kMaxVectorPerCube; ++lane) visit(pipe, lane, replay.times(core, pipe, lane));
    }
  }

  void Count(const CoreRecord& record) {
    const Costs costs(*chip_);
    profile_.instructions += static_cast<std::int64_t>(record.instrs.size());
    for (const Instr& instr : record.instrs) {
      if (instr.access >= 0) ++profile_.transfers;
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
  double launched_;
  Profile profile_;
  Cycles all_, waited_, critical_;
  double working_ = 0;  // cycles of the phases
  double fixed_ = 0;    // cycles of launch and barriers
  double hbm_limited_ = 0, l2_limited_ = 0;
};

TimelineSlice SliceOf(const Record& record, const ChipSpec& chip, const Phase& phase, std::size_t core,
                      const Instr& instr, double start_us, double end_us) {
  const CoreRecord& from = phase.cores[core];
  const int per_cube = chip.vector_per_cube;
  const int index = static_cast<int>(core);
  TimelineSlice slice;
  slice.core = phase.vector_only ? index / per_cube : index;
  slice.lane = phase.vector_only ? index % per_cube : instr.lane;
  slice.pipe = instr.pipe;
  slice.phase = static_cast<std::uint32_t>(&phase - record.phases.data());
  slice.instr = static_cast<std::uint32_t>(&instr - from.instrs.data());
  slice.name = NameOf(instr.op);
  slice.line = from.lines[instr.line].line;
  slice.file = from.lines[instr.line].file;
  slice.start_us = start_us, slice.end_us = end_us;
  if (instr.access >= 0) slice.bytes = from.accesses[static_cast<std::size_t>(instr.access)].bytes();
  if (instr.pipe == Pipe::kMte1) slice.bytes = Costs(chip).FractalBytes(instr);
  return slice;
}

Profile GivenUp() {
  Profile profile;
  profile.time_s = profile.cycles = std::numeric_limits<double>::infinity();
  return profile;
}

}  // namespace

Profile Replay(const Record& record, const sync::Plan& plan, const ReplayOptions& options) {
  CUBIST_CHECK(plan.phases.size() == record.phases.size(), "the plan is of another record");
  const ChipSpec& chip = options.chip == nullptr ? record.chip : *options.chip;
  const double launched = LaunchSeconds(record, chip) * chip.clock_hz;
  GlobalMemory memory(record, chip);
  Summary summary(record, chip, launched);
  auto slices = std::make_shared<std::vector<TimelineSlice>>();
  if (options.timeline) {  // A slice for every instruction.
    std::size_t count = 0;
    for (const Phase& phase : record.phases) {
      for (const CoreRecord& core : phase.cores) count += core.instrs.size();
    }
    slices->reserve(count);
  }
  // Sums are rounded; what is cut short is longer beyond that.
  const double most_cycles = options.give_up_s * chip.clock_hz * (1 + 1e-9);
  double phase_start = launched;  // cycles
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const Phase& phase = record.phases[p];
    PhaseReplay::OnSlice on_slice;
    if (options.timeline) {
      on_slice = [&](std::size_t core, const Instr& instr, double start, double end) {
        const double us_per_cycle = 1e6 / chip.clock_hz;
        slices->push_back(SliceOf(record, chip, phase, core, instr, (phase_start + start) * us_per_cycle,
                                  (phase_start + end) * us_per_cycle));
      };
    }
    PhaseReplay::OnWait on_wait;
    if (options.on_wait) {
      on_wait = [&](std::size_t core, std::uint32_t op, double cycles) {
        options.on_wait(p, core, op, cycles);
      };
    }
    const double began = p == 0 ? 0 : phase_start;
    PhaseReplay replay(chip, phase, plan.phases[p], memory, began, std::move(on_slice), std::move(on_wait));
    if (!replay.Run(most_cycles - phase_start)) return GivenUp();
    summary.Add(phase, replay);
    double longest = 0;
    for (std::size_t core = 0; core < replay.cores(); ++core) longest = std::max(longest, replay.end(core));
    phase_start += longest + chip.sync.barrier_s * chip.clock_hz;
  }
  Profile profile = summary.Finish(memory);
  if (profile.time_s > options.give_up_s) return GivenUp();
  if (options.timeline) profile.timeline = std::move(slices);
  return profile;
}

Profile Replay(const Record& record, bool timeline) {
  return Replay(record, sync::PlanFlags(record, sync::Policy::kMinimal), {.timeline = timeline});
}

}  // namespace cubist::trace
