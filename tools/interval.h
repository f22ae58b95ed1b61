// Intervals: how far a predicted time may be off, by the spread of the chip's constants and by what is not known of a
// kernel's schedule.
#ifndef CUBIST_TOOLS_INTERVAL_H_
#define CUBIST_TOOLS_INTERVAL_H_

#include <cstdint>
#include <span>
#include <string>

#include "npu_model/chip.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist {

struct RecordedLaunch {
  trace::Record record;
  sync::Plan plan;
  double before_us = 0;  // what the kernel does before its first transfer, which is not in the record
};

// Microseconds of all launches on a chip that differs from the recorded one in costs alone.
double PredictedUs(std::span<const RecordedLaunch> launches, const ChipSpec& chip);

struct Interval {
  double low = 0, high = 0;  // us
  bool known() const { return high > 0; }
};

// `us`, give or take what the spread of the chip's constants implies: each kind of constant (launch, start, flags and
// issue, HBM, what L2 held, misses, L2, latencies and rates of paths, Vector, Cube) is as slow as its sources allow in
// turn, and the changes add like independent errors.
Interval IntervalOf(std::span<const RecordedLaunch> launches, const ChipSpec& chip, double us);

// The same of a large launch, by the beginnings of its cores alone, about so many instructions: what changes there of their
// time changes of all of it.
Interval IntervalFromBeginning(const RecordedLaunch& launch, const ChipSpec& chip, double us,
                               std::int64_t instructions);

// What the same work takes under any schedule: from launch and busiest pipe alone to all pipes one after the other.
Interval AnySchedule(std::span<const RecordedLaunch> launches, const ChipSpec& chip);

// `us` with the errors of both, as independent ones, on each side.
Interval Together(double us, const Interval& x, const Interval& y);

}  // namespace cubist

#endif  // CUBIST_TOOLS_INTERVAL_H_
