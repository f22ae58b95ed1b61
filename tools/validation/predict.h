// Predictions of measured rows: which kernel stands for which row, and what the model says of it.
#ifndef CUBIST_TOOLS_VALIDATION_PREDICT_H_
#define CUBIST_TOOLS_VALIDATION_PREDICT_H_

#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tools/interval.h"
#include "tools/validation/measured.h"

namespace cubist {

// Rows that one summary takes together.
inline constexpr const char* kKnownSchedules = "known schedules";
inline constexpr const char* kMemoryBound = "memory-bound";

// The launches of a row, recorded and planned: replayed with other constants as often as one likes.
struct Recorded {
  std::string group;
  std::string skipped;  // why there is nothing to replay; empty otherwise
  std::vector<RecordedLaunch> launches;
};

Recorded RecordRow(const MeasuredRow& row, const ChipSpec& chip);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_PREDICT_H_
