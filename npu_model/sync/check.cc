#include "npu_model/sync/check.h"

#include <utility>

#include "npu_model/parallel.h"
#include "npu_model/sync/core_checker.h"
#include "npu_model/sync/same_proof.h"
#include "npu_model/sync/shared_gm.h"

namespace cubist::sync {
namespace {

// Of a core.
struct Outcome {
  std::vector<Finding> findings;
  std::string dot;
  std::int64_t accesses = 0;
  std::vector<char> asked;
};

}  // namespace

CheckResult Check(const trace::Record& record, const Plan& plan) {
  CheckResult result;
  Findings findings;
  GmState gm(record);
  const std::vector<char> watched = WatchedTensors(record, gm);
  const CorePlan no_flags;
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const trace::Phase& phase = record.phases[p];
    const auto plan_of = [&](std::size_t c) -> const CorePlan& {
      if (p >= plan.phases.size() || c >= plan.phases[p].cores.size()) return no_flags;
      return plan.phases[p].cores[c];
    };
    std::vector<const CorePlan*> plans;
    for (std::size_t c = 0; c < phase.cores.size(); ++c) plans.push_back(&plan_of(c));
    Findings shared;
    const std::vector<Tensors> written_twice = FindSharedGm(record, p, shared);
    std::vector<GmWatch> watches;
    const std::vector<std::size_t> first =
        FirstWithProof(record.chip, phase, plans, written_twice, gm, &watches);
    std::vector<Outcome> outcomes(phase.cores.size());
    const auto run = [&](std::size_t c, const GmWatch& watch) {
      CoreChecker checker(record, gm, watch, p, c, *plans[c]);
      checker.Run();
      outcomes[c] = {checker.TakeFindings(), checker.TakeDot(), checker.accesses(), checker.asked()};
    };
    ForEach(first.size(), [&](std::size_t c) {
      if (first[c] == c) run(c, watches[c]);
    });
    // What is found is found in each, where it stands.
    ForEach(first.size(), [&](std::size_t c) {
      if (first[c] == c) return;
      const Outcome& like = outcomes[first[c]];
      outcomes[c].accesses = like.accesses;
      if (!like.findings.empty() || !HoldsReads(phase.cores[c], like.asked, gm)) run(c, watches[first[c]]);
    });
    for (std::size_t c = 0; c < outcomes.size(); ++c) {
      for (Finding& f : outcomes[c].findings) findings.Add(std::move(f));
      if (result.deadlock_dot.empty()) result.deadlock_dot = std::move(outcomes[c].dot);
      result.instructions += static_cast<std::int64_t>(phase.cores[c].instrs.size());
      result.flags += static_cast<std::int64_t>(plans[c]->ops.size());
      result.accesses += outcomes[c].accesses;
    }
    for (Finding& f : shared.Take()) findings.Add(std::move(f));
    AddWritten(phase, watched, gm);
  }
  result.findings = findings.Take();
  return result;
}

}  // namespace cubist::sync
