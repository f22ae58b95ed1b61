// Report: what `cubist run` prints and writes of its rows.
#ifndef CUBIST_TOOLS_REPORT_H_
#define CUBIST_TOOLS_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "tools/cases.h"
#include "tools/trial.h"

namespace cubist {

// One case: on the host and on the modelled chip.
struct RunRow {
  const Case* kernel_case = nullptr;
  Trial trial;
  double floor_s = 0;         // the least time that the machine's ceilings allow
  bool memory_bound = false;  // which of them says so
  std::uint64_t check_seed = 0;
  Profile profile;

  double share() const { return floor_s / trial.median(); }
  bool ok() const { return trial.problems.empty(); }
};

struct RunSettings {
  ScaledWorkload scaled;
  ChipSpec chip;
  int threads = 1;
  std::uint64_t seed = 0;
};

// Lines of at most 150 columns, each ending in a newline: what is run where, and the head of the table; a
// row, and its problems; the foot.
std::string HeaderText(const RunSettings& settings, const Ceilings& ceilings);
std::string RowText(const RunRow& row);
std::string SummaryText(const std::vector<RunRow>& rows, double seconds);

// All of it as JSON.
Status WriteReport(const std::string& path, const RunSettings& settings, const Ceilings& ceilings,
                   const std::vector<RunRow>& rows, double seconds);

}  // namespace cubist

#endif  // CUBIST_TOOLS_REPORT_H_
