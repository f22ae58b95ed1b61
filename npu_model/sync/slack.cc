#include "npu_model/sync/slack.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "npu_model/json_text.h"
#include "npu_model/trace/replay.h"

namespace cubist::sync {
namespace {

using json::List;
using json::Member;

double MicrosecondsOf(const trace::Record& record, const Plan& plan) {
  return trace::Replay(record, plan).time_s * 1e6;
}

Plan Without(Plan plan, const std::vector<OpPlace>& ops) {
  constexpr std::uint32_t kGone = ~std::uint32_t{0};
  for (const OpPlace& o : ops) plan.phases[o.phase].cores[o.core].ops[o.op].instr = kGone;
  for (PhasePlan& phase : plan.phases) {
    for (CorePlan& core : phase.cores)
      std::erase_if(core.ops, [](const SyncOp& op) { return op.instr == kGone; });
  }
  return plan;
}

// A chip on which ids and counters do not run out.
ChipSpec WithManyFlags(ChipSpec chip) {
  chip.sync.event_ids = chip.sync.cross_core_ids = 255;
  chip.sync.cross_core_limit = 1 << 20;
  return chip;
}

std::string Cell(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

Slack FindSlack(const trace::Record& record, const Plan& plan,
                const std::function<void(std::size_t done, std::size_t all)>& progress) {
  Slack slack;
  std::vector<std::vector<OpPlace>> members;
  for (PlanRow& row : Fold(record, plan, &members)) slack.rows.push_back({.row = std::move(row)});

  // By phase, core and op: its row.
  std::vector<std::vector<std::vector<std::size_t>>> row_of(plan.phases.size());
  double cores = 1;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    cores = std::max(cores, static_cast<double>(plan.phases[p].cores.size()));
    for (const CorePlan& core : plan.phases[p].cores)
      row_of[p].emplace_back(core.ops.size(), slack.rows.size());
  }
  for (std::size_t r = 0; r < members.size(); ++r) {
    for (const OpPlace& o : members[r]) row_of[o.phase][o.core][o.op] = r;
  }
  trace::ReplayOptions options;
  options.on_wait = [&](std::size_t phase, std::size_t core, std::uint32_t op, double cycles) {
    const std::size_t row = row_of[phase][core][op];
    if (row < slack.rows.size()) slack.rows[row].waited_us += cycles / record.chip.clock_hz * 1e6 / cores;
  };
  slack.time_us = trace::Replay(record, plan, options).time_s * 1e6;

  for (std::size_t r = 0; r < slack.rows.size(); ++r) {
    // Where nothing stands still nothing can be saved but the instructions themselves.
    slack.rows[r].saved_us = slack.time_us - MicrosecondsOf(record, Without(plan, members[r]));
    if (progress) progress(r + 1, slack.rows.size());
  }
  slack.shortage_us = ShortageUs(record, plan, slack.time_us);
  std::stable_sort(slack.rows.begin(), slack.rows.end(),
                   [](const SlackRow& x, const SlackRow& y) { return x.saved_us > y.saved_us; });
  return slack;
}

double ShortageUs(const trace::Record& record, const Plan& plan, double time_us) {
  if (plan.shortages.empty()) return 0;
  return time_us - MicrosecondsOf(record, PlanFlags(record, plan.policy, WithManyFlags(record.chip)));
}

std::string SlackTable(const Slack& slack, std::size_t most) {
  constexpr double kSeen = 0.01;  // us
  std::string text = "waited us   saved us   count  flag\n";
  for (const SlackRow& s : slack.rows) {
    if (s.waited_us < kSeen && std::abs(s.saved_us) < kSeen) continue;
    if (most-- == 0) break;
    char count[32];
    std::snprintf(count, sizeof count, "%8lld", static_cast<long long>(s.row.count));
    text += Cell("%9.2f", s.waited_us) + Cell("%11.2f", s.saved_us) + count + "  " + SideText(s.row) + " " +
            FlagText(s.row) + "  " + (s.row.barrier ? "" : "after " + LineText(s.row.set) + ", ") +
            "before " + LineText(s.row.wait) + "\n";
  }
  text += "of " + Cell("%.2f", slack.time_us) + " us";
  if (slack.shortage_us != 0) text += "; ids that run out cost " + Cell("%.2f", slack.shortage_us) + " us";
  return text + "\n";
}

std::string SlackJson(const Slack& slack) {
  const auto row = [](const SlackRow& s) {
    return std::string("{") + Member("core", SideText(s.row)) + ", " + Member("flag", FlagText(s.row)) +
           ", " + Member("set", s.row.barrier ? "" : LineText(s.row.set)) + ", " +
           Member("wait", LineText(s.row.wait)) + ", " + Member("count", s.row.count) +
           ", \"waited_us\": " + Cell("%.6g", s.waited_us) + ", \"saved_us\": " + Cell("%.6g", s.saved_us) +
           "}";
  };
  return "{\"time_us\": " + Cell("%.6g", slack.time_us) +
         ", \"shortage_us\": " + Cell("%.6g", slack.shortage_us) + ", \"rows\": " + List(slack.rows, row) +
         "}";
}

}  // namespace cubist::sync
