#include "tools/interval.h"

#include <cmath>
#include <string_view>

#include "npu_model/chip_constants.h"
#include "npu_model/trace/replay.h"

namespace cubist {
namespace {

// Constants that are wrong together, by the beginnings of their names: the first that fits.
struct Prefix {
  std::string_view text;
  std::size_t kind;
};
enum : std::size_t { kLaunch, kFlags, kHbm, kMiss, kL2, kPaths, kVector, kCube, kKinds };
constexpr Prefix kPrefixes[] = {
    {"sync.launch_s", kLaunch},
    {"sync.mixed_launch_s", kLaunch},
    {"sync.start_spread_s", kLaunch},
    {"sync.barrier_s", kLaunch},
    {"sync.", kFlags},
    {"scalar.", kFlags},
    {"memory.hbm_", kHbm},
    {"memory.found_dirty", kHbm},
    {"memory.core_miss_", kMiss},
    {"memory.", kL2},
    {"path.", kPaths},
    {"vector.", kVector},
    {"mmad.", kCube},
    {"clock_hz", kCube},
};

std::size_t KindOf(std::string_view name) {
  for (const Prefix& prefix : kPrefixes) {
    if (name.starts_with(prefix.text)) return prefix.kind;
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
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    const double change = PredictedUs(launches, Slowed(chip, kind)) - us;
    squares += change * change;
  }
  for (auto& [record, plan] : launches) record.chip = chip;
  const double error = std::sqrt(squares);
  return {us * us / (us + error), us + error};
}

}  // namespace cubist
