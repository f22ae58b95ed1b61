// Slack: what each wait of a plan costs, and what would be saved without it.
#ifndef CUBIST_NPU_MODEL_SYNC_SLACK_H_
#define CUBIST_NPU_MODEL_SYNC_SLACK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

struct SlackRow {
  PlanRow row;
  double waited_us = 0;  // pipes stood still here, mean over the cores that run
  double saved_us =
      0;  // by which the whole kernel would be over sooner without these flags: whoever finds another
          // order of instructions, or more stages, can gain as much
};

struct Slack {
  double time_us = 0;          // of the whole plan
  std::vector<SlackRow> rows;  // by what would be saved, most first
  // By which it would be over sooner if event ids and counters never ran out.
  double shortage_us = 0;
};

// Replays the record without each row of the plan (Fold), one after the other; `progress`, where given, is told how
// many of how many are done.
CUBIST_COMMAND_EXPORT Slack
FindSlack(const trace::Record& record, const Plan& plan,
          const std::function<void(std::size_t done, std::size_t all)>& progress = {});

// By how many us the record would be over sooner if event ids and counters never ran out; 0 where they do not.
CUBIST_COMMAND_EXPORT double ShortageUs(const trace::Record& record, const Plan& plan, double time_us);

// Rows in which a pipe stands still or time could be saved, as a table: the first `most` of them.
CUBIST_COMMAND_EXPORT std::string SlackTable(const Slack& slack, std::size_t most = SIZE_MAX);
// {"time_us", "shortage_us", "rows": [{"core", "flag", "set", "wait", "count", "waited_us", "saved_us"}]}
CUBIST_COMMAND_EXPORT std::string SlackJson(const Slack& slack);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_SLACK_H_
