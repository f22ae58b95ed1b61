#include "tools/interval.h"

#include <cmath>
#include <string_view>

#include "npu_model/chip_constants.h"
#include "npu_model/trace/replay.h"

namespace cubist {
namespace {

enum class Kind { kMemory, kTransfers, kArithmetic, kFlags, kLaunch };
constexpr int kKinds = 5;

Kind KindOf(const std::string& name) {
  if (name == "sync.launch_s" || name == "sync.mixed_launch_s" || name == "sync.barrier_s" ||
      name == "sync.start_spread_s")
    return Kind::kLaunch;
  if (name.starts_with("memory.")) return Kind::kMemory;
  if (name.starts_with("path.")) return Kind::kTransfers;
  return name.starts_with("mmad.") || name.starts_with("vector.") || name == "clock_hz" ? Kind::kArithmetic
                                                                                        : Kind::kFlags;
}

// With the constants of a kind at the slow end of their spread.
ChipSpec Slowed(const ChipSpec& chip, Kind kind) {
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

}  // namespace

double PredictedUs(std::span<RecordedLaunch> launches, const ChipSpec& chip) {
  double us = 0;
  for (auto& [record, plan] : launches) {
    record.chip = chip;
    us += trace::Replay(record, plan).time_s * 1e6;
  }
  return us;
}

Interval IntervalOf(std::span<RecordedLaunch> launches, const ChipSpec& chip, double us) {
  double squares = 0;
  for (int kind = 0; kind < kKinds; ++kind) {
    const double change = PredictedUs(launches, Slowed(chip, static_cast<Kind>(kind))) - us;
    squares += change * change;
  }
  for (auto& [record, plan] : launches) record.chip = chip;
  const double error = std::sqrt(squares);
  return {us * us / (us + error), us + error};
}

}  // namespace cubist
