// Intervals: how far a predicted time may be off, by the spread of the chip's constants.
#ifndef CUBIST_TOOLS_INTERVAL_H_
#define CUBIST_TOOLS_INTERVAL_H_

#include <span>
#include <string>

#include "npu_model/chip.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist {

struct RecordedLaunch {
  trace::Record record;
  sync::Plan plan;
};

// Microseconds of all launches on a chip that differs from the recorded one in costs alone.
double PredictedUs(std::span<RecordedLaunch> launches, const ChipSpec& chip);

// `us`, give or take what the spread of the chip's constants implies: each kind of constant (launch, flags and issue,
// HBM, misses, L2, transfers, Vector, Cube) is as slow as its sources allow in turn, and the changes add like independent
// errors. The records are those of `chip` again afterwards.
struct Interval {
  double low = 0, high = 0;  // us
  bool known() const { return high > 0; }
};
Interval IntervalOf(std::span<RecordedLaunch> launches, const ChipSpec& chip, double us);

}  // namespace cubist

#endif  // CUBIST_TOOLS_INTERVAL_H_
