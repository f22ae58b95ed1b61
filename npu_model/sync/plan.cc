#include "npu_model/sync/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "npu_model/parallel.h"
#include "npu_model/sync/alike.h"
#include "npu_model/sync/core_planner.h"
#include "npu_model/sync/touches.h"

namespace cubist::sync {

namespace {

struct Planned {
  CorePlan plan;
  std::vector<Shortage> shortages;
};

std::size_t SetsOf(const CorePlan& plan) {
  return static_cast<std::size_t>(
      std::count_if(plan.ops.begin(), plan.ops.end(), [](const SyncOp& op) { return IsSet(op.kind); }));
}

// Nothing if it takes so many sets or more.
std::optional<Planned> PlanCore(const trace::CoreRecord& core, const ChipSpec& chip, bool vector_only,
                                Policy policy, const std::vector<char>& in_order, std::size_t below) {
  // Without relays a plan that lacks ids has holes, and is no measure of the one with them.
  const auto plan_with = [&](bool relays, bool* lacks) -> std::optional<Planned> {
    CorePlanner planner(core, chip, vector_only, policy, in_order, relays);
    std::optional<CorePlan> plan = planner.RunBelow(relays || vector_only ? below : SIZE_MAX);
    *lacks = planner.LacksIds();
    if (!plan.has_value() || SetsOf(*plan) >= below) return std::nullopt;
    return Planned{std::move(*plan), planner.Shortages()};
  };
  bool lacks = false;
  std::optional<Planned> made = plan_with(/*relays=*/false, &lacks);
  return lacks ? plan_with(/*relays=*/true, &lacks) : std::move(made);
}

}  // namespace

const char* NameOf(Kind kind) {
  constexpr const char* kNames[] = {"SetFlag", "WaitFlag", "PipeBarrier", "CrossCoreSetFlag",
                                    "CrossCoreWaitFlag"};
  return kNames[static_cast<int>(kind)];
}

Plan PlanFlags(const trace::Record& record, Policy policy) { return PlanFlags(record, policy, record.chip); }

Plan PlanFlags(const trace::Record& record, Policy policy, const ChipSpec& chip) {
  Plan plan;
  plan.policy = policy;
  plan.phases.resize(record.phases.size());
  std::vector<Shortage> found;
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const trace::Phase& phase = record.phases[p];
    plan.phases[p].cores.resize(phase.cores.size());
    std::vector<std::vector<Shortage>> shortages(phase.cores.size());
    std::vector<std::vector<char>> in_order(phase.cores.size());
    ForEach(phase.cores.size(), [&](std::size_t c) { in_order[c] = TensorsInOrder(phase.cores[c], chip); });
    const std::vector<std::size_t> first = FirstAlike(phase, chip, in_order);
    ForEach(phase.cores.size(), [&](std::size_t c) {
      if (first[c] != c) return;
      Planned made = *PlanCore(phase.cores[c], chip, phase.vector_only, policy, in_order[c], SIZE_MAX);
      // What stands in for missing ids may cost more flags than were dropped.
      if (policy == Policy::kMinimal && !made.shortages.empty()) {
        std::optional<Planned> per_tile = PlanCore(phase.cores[c], chip, phase.vector_only, Policy::kPerTile,
                                                   in_order[c], SetsOf(made.plan));
        if (per_tile.has_value()) made = std::move(*per_tile);
      }
      plan.phases[p].cores[c] = std::move(made.plan);
      shortages[c] = std::move(made.shortages);
    });
    ForEach(phase.cores.size(), [&](std::size_t c) {
      if (first[c] == c) return;
      plan.phases[p].cores[c] = plan.phases[p].cores[first[c]];
      shortages[c] = shortages[first[c]];
    });
    for (const auto& of_core : shortages) found.insert(found.end(), of_core.begin(), of_core.end());
  }
  for (const Shortage& s : found) {
    const auto same = [&](const Shortage& o) {
      return o.from == s.from && o.to == s.to && o.cross_core == s.cross_core && o.remedy == s.remedy &&
             o.line.line == s.line.line && o.line.file == s.line.file;
    };
    const auto known = std::find_if(plan.shortages.begin(), plan.shortages.end(), same);
    if (known == plan.shortages.end()) {
      plan.shortages.push_back(s);
    } else {
      known->count += s.count;
    }
  }
  return plan;
}

}  // namespace cubist::sync
