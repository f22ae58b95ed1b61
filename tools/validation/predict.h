// Predictions of measured rows: which kernel stands for which row, and what the model says of it.
#ifndef CUBIST_TOOLS_VALIDATION_PREDICT_H_
#define CUBIST_TOOLS_VALIDATION_PREDICT_H_

#include <string>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "tools/validation/measured.h"

namespace cubist {

// Rows that one summary takes together.
inline constexpr const char* kKnownSchedules = "known schedules";
inline constexpr const char* kMemoryBound = "memory-bound";

// The launches of a row, recorded and planned: replayed with other constants as often as one likes.
struct Recorded {
  std::string group;
  std::string skipped;  // why there is nothing to replay; empty otherwise
  std::vector<std::pair<trace::Record, sync::Plan>> launches;
};

Recorded RecordRow(const MeasuredRow& row, const ChipSpec& chip);

// Microseconds of all launches on a chip that differs from the recorded one in costs alone.
double PredictedUs(Recorded& recorded, const ChipSpec& chip);

// `us`, give or take what the spread of the chip's constants implies: each kind of constant (memory, transfers,
// arithmetic, flags and issue, launch) is as slow as its sources allow in turn, and the changes add like independent errors.
struct Interval {
  double low = 0, high = 0;
};
Interval IntervalOf(Recorded& recorded, const ChipSpec& chip, double us);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_PREDICT_H_
