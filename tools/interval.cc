#include "tools/interval.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <vector>

#include "npu_model/chip_constants.h"
#include "npu_model/parallel.h"
#include "npu_model/trace/replay.h"

namespace cubist {
namespace {

// Constants that are wrong together, by the beginnings of their names: the first that fits. Those of kFixed add to the
// time what they are, whatever else happens.
struct Prefix {
  std::string_view text;
  std::size_t kind;
};
enum : std::size_t {
  kFlags,
  kHbm,
  kFound,
  kTurns,
  kMiss,
  kL2,
  kLatencies,
  kRates,
  kVector,
  kCube,
  kKinds,
  kFixed,
};
constexpr Prefix kPrefixes[] = {
    {"sync.launch_s", kFixed},
    {"sync.mixed_launch_s", kFixed},
    {"sync.barrier_s", kFixed},
    {"sync.start_spread_s", kFixed},
    {"sync.", kFlags},
    {"scalar.", kFlags},
    {"memory.hbm_", kHbm},
    {"memory.found_dirty", kFound},
    {"memory.turn_around", kTurns},
    {"memory.core_miss_", kMiss},
    {"memory.", kL2},
    {"path.", kLatencies},
    {"vector.", kVector},
    {"mmad.", kCube},
    {"clock_hz", kCube},
};

std::size_t KindOf(std::string_view name) {
  for (const Prefix& prefix : kPrefixes) {
    if (!name.starts_with(prefix.text)) continue;
    return prefix.kind == kLatencies && name.ends_with(".bytes_per_cycle") ? kRates : prefix.kind;
  }
  return kKinds;
}

// With the constants of a kind at the slow end of their spread.
ChipSpec Slowed(const ChipSpec& chip, std::size_t kind) {
  ChipSpec slow = chip;
  for (const NamedConstant& c : ConstantsOf(chip)) {
    if (KindOf(c.name) != kind || c.whole || c.constant.spread <= 0) continue;
    const bool rate = std::string_view(c.constant.unit).find('/') != std::string_view::npos &&
                      std::string_view(c.constant.unit).starts_with("bytes");
    const bool quick = rate || c.name == "clock_hz";
    const double value =
        quick ? c.constant.value / (1 + c.constant.spread) : c.constant.value * (1 + c.constant.spread);
    // What the limits do not allow is left as it is.
    static_cast<void>(SetConstant(&slow, c.name, value));
  }
  return slow;
}

// How much of the time between the starts of all cores a launch waits for its last one.
double StartShare(const trace::Record& record) {
  if (record.phases.empty()) return 0;
  const trace::Phase& first = record.phases.front();
  const int all = record.chip.cube_cores * (first.vector_only ? record.chip.vector_per_cube : 1);
  return static_cast<double>(std::max<std::size_t>(first.cores.size(), 1) - 1) / std::max(all - 1, 1);
}

double BarriersOf(const trace::Record& record) {
  return static_cast<double>(std::max<std::size_t>(record.phases.size(), 1) - 1);
}

// What a launch takes whatever its cores do.
double FixedUs(const trace::Record& record, const ChipSpec& chip) {
  return (trace::LaunchSeconds(record, chip) + BarriersOf(record) * chip.sync.barrier_s) * 1e6;
}

// The same launch, but each core stops early in each phase, so that about so many instructions are left. Waits stand
// behind their sets in program order: none is left without.
RecordedLaunch BeginningOf(const RecordedLaunch& launch, std::int64_t instructions) {
  const trace::Record& whole = launch.record;
  std::int64_t all = 0;
  for (const trace::Phase& phase : whole.phases) {
    for (const trace::CoreRecord& core : phase.cores) all += std::ssize(core.instrs);
  }
  const double share =
      std::min(1.0, static_cast<double>(instructions) / static_cast<double>(std::max<std::int64_t>(all, 1)));
  RecordedLaunch begun;
  begun.before_us = launch.before_us;
  begun.record.chip = whole.chip, begun.record.tensors = whole.tensors;
  begun.plan.policy = launch.plan.policy;
  for (std::size_t p = 0; p < whole.phases.size(); ++p) {
    const trace::Phase& phase = whole.phases[p];
    trace::Phase& cut = begun.record.phases.emplace_back();
    sync::PhasePlan& plan = begun.plan.phases.emplace_back();
    cut.vector_only = phase.vector_only;
    for (std::size_t c = 0; c < phase.cores.size(); ++c) {
      const trace::CoreRecord& core = phase.cores[c];
      const auto count =
          static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(core.instrs.size())));
      trace::CoreRecord& kept = cut.cores.emplace_back();
      kept.instrs.assign(core.instrs.begin(), core.instrs.begin() + count);
      std::int32_t accesses = 0;
      for (const trace::Instr& instr : kept.instrs) accesses = std::max(accesses, instr.access + 1);
      kept.accesses.assign(core.accesses.begin(), core.accesses.begin() + accesses);
      kept.operands = core.operands, kept.slots = core.slots, kept.workspace = core.workspace;
      kept.lines = core.lines, kept.workspace_bytes = core.workspace_bytes;
      const std::vector<sync::SyncOp>& ops = launch.plan.phases[p].cores[c].ops;
      const auto end = std::find_if(ops.begin(), ops.end(),
                                    [&](const sync::SyncOp& op) { return op.instr >= kept.instrs.size(); });
      plan.cores.emplace_back().ops.assign(ops.begin(), end);
    }
  }
  return begun;
}

// `us` by the changes of the replayed launches, each `scale` times, and what the launches themselves are not known by.
Interval WithChanges(std::span<const RecordedLaunch> launches, const ChipSpec& chip, double us,
                     std::span<const RecordedLaunch> replayed, double replayed_us, double scale) {
  std::array<double, kKinds> slowed;
  ForEach(kKinds, [&](std::size_t kind) { slowed[kind] = PredictedUs(replayed, Slowed(chip, kind)); });
  double squares = 0;
  const auto add = [&](double change) { squares += change * change; };
  for (const double slow_us : slowed) add((slow_us - replayed_us) * scale);
  double launched = 0, mixed = 0, barriers = 0, started = 0;
  for (const auto& [record, plan, before_us] : launches) {
    launched += 1;
    mixed += trace::IsMixed(record) ? 1 : 0;
    started += StartShare(record);
    barriers += BarriersOf(record);
  }
  const auto spread = [](const Constant& c) { return c.value * c.spread * 1e6; };
  add(launched * spread(chip.sync.launch_s));
  add(mixed * spread(chip.sync.mixed_launch_s));
  add(barriers * spread(chip.sync.barrier_s));
  // A later start of the last cores may also bring them out of step and save time: that is chance.
  add(started * spread(chip.sync.start_spread_s));
  const double error = std::sqrt(squares);
  return {us * us / (us + error), us + error};
}

}  // namespace

double PredictedUs(std::span<const RecordedLaunch> launches, const ChipSpec& chip) {
  double us = 0;
  for (const auto& [record, plan, before_us] : launches)
    us += before_us + trace::Replay(record, plan, {.chip = &chip}).time_s * 1e6;
  return us;
}

Interval IntervalOf(std::span<const RecordedLaunch> launches, const ChipSpec& chip, double us) {
  return WithChanges(launches, chip, us, launches, us, 1);
}

Interval IntervalFromBeginning(const RecordedLaunch& launch, const ChipSpec& chip, double us,
                               std::int64_t instructions) {
  const RecordedLaunch begun = BeginningOf(launch, instructions);
  const double begun_us = PredictedUs({&begun, 1}, chip);
  const double fixed = launch.before_us + FixedUs(launch.record, chip);
  return WithChanges({&launch, 1}, chip, us, {&begun, 1}, begun_us, (us - fixed) / (begun_us - fixed));
}

Interval AnySchedule(std::span<const RecordedLaunch> launches, const ChipSpec& chip) {
  Interval all;
  for (const auto& [record, plan, before_us] : launches) {
    const Profile profile = trace::Replay(record, plan, {.chip = &chip});
    const double us = profile.time_s * 1e6;
    const double fixed = before_us + FixedUs(record, chip);
    // Shares are of all cores of the chip; those that have nothing to do hold nothing up.
    const bool vector_only = std::all_of(record.phases.begin(), record.phases.end(),
                                         [](const trace::Phase& phase) { return phase.vector_only; });
    const double cores = chip.cube_cores * (vector_only ? chip.vector_per_cube : 1.0);
    const double idle = std::max(cores / std::max(profile.cores_used, 1), 1.0);  // Phases count Vector cores.
    double busiest = 0, sum = 0;
    for (const Profile::Busy& busy : profile.busy) {
      busiest = std::max({busiest, busy.cube_side, busy.vector_side});
      sum += busy.cube_side + busy.vector_side;
    }
    const double quickest = fixed + busiest * idle * us, slowest = fixed + sum * idle * us;
    all.low += std::min(quickest, before_us + us), all.high += std::max(slowest, before_us + us);
  }
  return all;
}

Interval Together(double us, const Interval& x, const Interval& y) {
  return {us - std::min(std::hypot(us - x.low, us - y.low), us), us + std::hypot(x.high - us, y.high - us)};
}

}  // namespace cubist
