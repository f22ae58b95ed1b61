#include "tools/check.h"

#include <fmt/format.h>

#include <utility>

#include "npu_model/sync/check.h"
#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/sync/slack.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/progress.h"

namespace cubist {
namespace {

// Runs the record in program order, eagerly, late, and at random as often as asked for; whether all give the same
// bytes.
bool ExecuteOrders(const trace::Record& record, const sync::Plan& plan, int random_orders) {
  if (const char* unknown = trace::UnknownTo(record); unknown != nullptr) {
    fmt::print("not executed: the interpreter does not know {}\n", unknown);
    return false;
  }
  using sync::Schedule;
  trace::GmImage first;
  int orders = 0;
  const auto run = [&](Schedule schedule, unsigned seed) {
    trace::GmImage gm = trace::InitialGm(record, /*seed=*/1);
    const bool ends = sync::Execute(record, plan, schedule, seed, &gm);
    if (first.empty()) first = gm;
    if (ends && gm == first) return ++orders, true;
    fmt::print("executed {} (seed {}): {}\n", NameOf(schedule), seed,
               ends ? "other bytes than in program order" : "a pipe waits for a flag that never comes");
    return false;
  };
  bool same = run(Schedule::kProgramOrder, 0) && run(Schedule::kEager, 0) && run(Schedule::kLate, 0);
  for (int i = 0; same && i < random_orders; ++i) same = run(Schedule::kRandom, static_cast<unsigned>(i));
  if (same) fmt::print("executed in {} orders: the same bytes in each\n", orders);
  return same;
}

}  // namespace

int CheckCommand(const CheckOptions& options) {
  KernelCallOptions wanted = options.call;
  wanted.with_data = options.execute > 0;
  KernelCall call;
  if (const Status status = MakeKernelCall(wanted, &call); !status.ok())
    return BadInput("cubist check", status.message());
  if (options.policy != "minimal" && options.policy != "per-tile") {
    return BadInput("cubist check", fmt::format("policy '{}' is not minimal or per-tile", options.policy));
  }
  ChipSpec chip;
  Status ready = LoadChip(options.chip, &chip);
  for (const auto& [option, file] : {std::pair("--json", options.json), std::pair("--dot", options.dot)}) {
    if (ready.ok()) ready = PrepareOutput(option, file);
  }
  if (!ready.ok()) return BadInput("cubist check", ready.message());

  trace::Record record;
  const Device device = Npu(chip, {.with_data = wanted.with_data, .record = &record});
  if (const Status status = call(device); !status.ok()) return BadInput("cubist check", status.message());
  const sync::Plan plan =
      sync::PlanFlags(record, options.policy == "minimal" ? sync::Policy::kMinimal : sync::Policy::kPerTile);
  const sync::CheckResult result = sync::Check(record, plan);

  if (options.plan) fmt::print("{}\n", sync::PlanTable(record, plan));
  fmt::print("{}", sync::CheckText(result));
  if (!options.dot.empty()) {
    if (const Status status = WriteFile(options.dot, result.deadlock_dot); !status.ok())
      return BadInput("cubist check", status.message());
  }
  std::string slack_json = "null";
  if (options.slack && result.ok()) {
    Progress progress(stderr);
    const sync::Slack slack = FindSlack(record, plan, [&](std::size_t done, std::size_t all) {
      progress.Show(fmt::format("slack: {} of {} flags left out", done, all));
    });
    progress.Clear();
    fmt::print("{}", sync::SlackTable(slack));
    slack_json = sync::SlackJson(slack);
  }
  const bool same = options.execute == 0 || ExecuteOrders(record, plan, options.execute);
  if (!options.json.empty()) {
    const std::string executed = options.execute == 0 ? "null" : same ? "true" : "false";
    const Status status = WriteFile(
        options.json,
        fmt::format("{{\"plan\": {},\n \"check\": {},\n \"slack\": {},\n \"executed_alike\": {}}}\n",
                    sync::PlanJson(record, plan), sync::CheckJson(result), slack_json, executed));
    if (!status.ok()) return BadInput("cubist check", status.message());
  }
  return result.ok() && same ? 0 : 1;
}

}  // namespace cubist
