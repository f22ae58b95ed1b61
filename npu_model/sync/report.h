// Plans and findings for people and for programs.
#ifndef CUBIST_NPU_MODEL_SYNC_REPORT_H_
#define CUBIST_NPU_MODEL_SYNC_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// What a plan does between two source lines, folded over the loops and the cores that pass there: a flag, or
// (with `set` alone) a barrier, which stands before that line.
struct PlanRow {
  std::size_t phase = 0;
  bool on_cube = true;  // the side that sets
  bool cross_core = false;
  bool barrier = false;
  Pipe from = Pipe::kS, to = Pipe::kS;
  std::vector<int> ids;
  // The instruction that the set stands behind and the one that the wait stands in front of.
  struct Line {
    const char* file = "";
    std::uint32_t line = 0;
    const char* what = "";
  } set, wait;
  std::int64_t count = 0;  // on all cores
  std::int64_t most_on_core = 0;
  // On the first core that has the row. The ids of its flags one after the other: the n-th takes turn[n % size]; none where they
  // do not repeat. And at which execution of the two lines, counted from 1, its first flag stands: a loop may wait from its
  // third round on.
  std::vector<int> turn;
  std::int64_t first_set = 0, first_wait = 0;
};

// An op of a plan.
struct OpPlace {
  std::size_t phase = 0, core = 0, op = 0;
};

// By phase, core, pipes and lines. Flags that do not pair are left out; the checker reports them. `members`, where
// given, gets the ops of every row.
CUBIST_EXPORT std::vector<PlanRow> Fold(const trace::Record& record, const Plan& plan,
                                        std::vector<std::vector<OpPlace>>* members = nullptr);
// "MTE2_MTE1", "PipeBarrier<V>", ..
CUBIST_EXPORT std::string FlagText(const PlanRow& row);
// "Cube", "Vector to Cube", ..
CUBIST_EXPORT const char* SideText(const PlanRow& row);
// "kernels/multiply_block_kernel.h:70 Load L1"
CUBIST_EXPORT std::string LineText(const PlanRow::Line& line);

// A table to carry to the device: pipe pair, event ids in the order in which flags take them, behind which line, in front of
// which, from which execution of the two on, how often; then where ids ran out.
CUBIST_EXPORT std::string PlanTable(const trace::Record& record, const Plan& plan);
// {"kernel", "chip", "policy", "rows": [{"phase", "core", "kind", "from", "to", "ids", "turn", "set", "first_set", "wait",
//  "first_wait", "count"}], "shortages": [..]}
CUBIST_EXPORT std::string PlanJson(const trace::Record& record, const Plan& plan);

// Where ids ran out, a line each; empty where they did not.
CUBIST_EXPORT std::string ShortagesText(const Plan& plan);

// A verdict in a line, then every finding.
CUBIST_EXPORT std::string CheckText(const CheckResult& result);
// {"ok", "instructions", "flags", "findings": [{"fault", "phase", "core", "memory", "begin", "end", "first",
//  "second", "missing", "chain", "count"}]}
CUBIST_EXPORT std::string CheckJson(const CheckResult& result);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_REPORT_H_
