#include "tools/check.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "npu_model/sync/check.h"
#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/sync/slack.h"
#include "npu_model/trace/replay.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/progress.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

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
  Progress progress(stderr);
  const auto run = [&](Schedule schedule, unsigned seed) {
    progress.Show(fmt::format("executing order {} of {}", orders + 1, 3 + random_orders));
    trace::GmImage gm = trace::InitialGm(record, /*seed=*/1);
    const bool ends = sync::Execute(record, plan, schedule, seed, &gm);
    if (first.empty()) first = gm;
    if (ends && gm == first) return ++orders, true;
    progress.Clear();
    fmt::print("executed {} (seed {}): {}\n", NameOf(schedule), seed,
               ends ? "other bytes than in program order" : "a pipe waits for a flag that never comes");
    return false;
  };
  bool same = run(Schedule::kProgramOrder, 0) && run(Schedule::kEager, 0) && run(Schedule::kLate, 0);
  for (int i = 0; same && i < random_orders; ++i) same = run(Schedule::kRandom, static_cast<unsigned>(i));
  progress.Clear();
  if (same) fmt::print("executed in {} orders: the same bytes in each\n", orders);
  return same;
}

Json SettingsJson(const CheckOptions& options, const Subject& subject) {
  Json json;
  JsonWriter settings{json};
  WriteSettings(settings, options.subject, subject);
  settings("execute", options.execute);
  return json;
}

}  // namespace

int CheckCommand(const CheckOptions& options) {
  SubjectOptions wanted = options.subject;
  wanted.call.with_data = options.execute > 0;
  Subject subject;
  Status status = MakeSubject(wanted, &subject);
  for (const auto& [option, file] : {std::pair("--json", options.json), std::pair("--dot", options.dot)}) {
    if (status.ok()) status = PrepareOutput(option, file);
  }
  trace::Record record;
  if (status.ok()) {
    status = subject.call(
        Npu(subject.chip, {.with_data = wanted.call.with_data, .record = &record, .tuning = subject.tuning}),
        nullptr);
  }
  if (!status.ok()) return BadInput("cubist check", status.message());
  const sync::Plan plan = sync::PlanFlags(record, subject.policy);
  const sync::CheckResult result = sync::Check(record, plan);

  if (options.plan) fmt::print("{}\n", sync::PlanTable(record, plan));
  fmt::print("{}", sync::CheckText(result));
  if (!plan.shortages.empty() && !options.plan) fmt::print("{}", sync::ShortagesText(plan));
  if (!plan.shortages.empty() && result.ok()) {
    const double us = trace::Replay(record, plan).time_s * 1e6;
    fmt::print("ids that run out cost {:.2f} us of {:.2f}\n", sync::ShortageUs(record, plan, us), us);
  }
  if (!options.dot.empty() && !result.deadlock_dot.empty()) {
    if (status = WriteFile(options.dot, result.deadlock_dot); !status.ok())
      return BadInput("cubist check", status.message());
  }
  std::optional<sync::Slack> slack;
  if (options.slack && result.ok()) {
    Progress progress(stderr);
    slack = FindSlack(record, plan, [&](std::size_t done, std::size_t all) {
      progress.Show(fmt::format("slack: {} of {} flags left out", done, all));
    });
    progress.Clear();
    fmt::print("{}", sync::SlackTable(*slack));
  }
  const bool same = options.execute == 0 || ExecuteOrders(record, plan, options.execute);
  if (!options.json.empty()) {
    Json json = SettingsJson(options, subject);
    json["plan"] = ParseJson(sync::PlanJson(record, plan));
    json["check"] = ParseJson(sync::CheckJson(result));
    json["slack"] = slack ? ParseJson(sync::SlackJson(*slack)) : Json();
    json["executed_alike"] = options.execute == 0 ? Json() : Json(same);
    if (status = WriteJson(options.json, json); !status.ok())
      return BadInput("cubist check", status.message());
  }
  return result.ok() && same ? 0 : 1;
}

}  // namespace cubist
