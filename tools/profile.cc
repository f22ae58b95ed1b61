#include "tools/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "npu_model/chip_constants.h"
#include "npu_model/nearest.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/slack.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/interval.h"
#include "tools/json_writer.h"
#include "tools/profile_page.h"
#include "tools/profile_report.h"
#include "tools/progress.h"

namespace cubist {
namespace {

// That a name which is none of Change's own is a constant's.
Status CheckConstant(const std::string& name) {
  std::vector<std::string> names = {"shape", "dtype", "policy", "chip", "tuning", "tiling.NAME"};
  for (const NamedConstant& constant : ConstantsOf(Ascend910B2())) {
    if (name == constant.name) return {};
    names.push_back(constant.name);
  }
  return InvalidArgument(
      fmt::format("--vs is '{}': neither an option of the call nor a constant of the chip{}", name,
                  NearestText(name, names)));
}

// The options of the other configuration.
Status Change(const std::string& text, SubjectOptions* options) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos)
    return InvalidArgument(fmt::format("--vs is '{}', expected name=value", text));
  const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
  constexpr const char* kTiling = "tiling.";
  if (name == "shape") {
    options->call.shape = value;
  } else if (name == "dtype") {
    options->call.dtype = value;
  } else if (name == "policy") {
    options->policy = value;
  } else if (name == "chip") {
    options->chip.chip = value;
  } else if (name == "tuning") {
    options->tuning = value;
  } else if (name.starts_with(kTiling)) {
    if (!options->tiling.empty()) options->tiling += ",";
    options->tiling += text.substr(std::string(kTiling).size());
  } else {
    CUBIST_RETURN_IF_ERROR(CheckConstant(name));
    options->chip.sets.push_back(text);
  }
  return {};
}

// A part of the time, in us.
struct Window {
  double from = 0, to = std::numeric_limits<double>::infinity();
};

Status ParseWindow(const std::string& text, Window* window) {
  if (text.empty()) return {};
  const char* const end = text.data() + text.size();
  const auto [colon, bad_from] = std::from_chars(text.data(), end, window->from);
  const bool has_colon = bad_from == std::errc() && colon != end && *colon == ':';
  const auto [stop, bad_to] = std::from_chars(has_colon ? colon + 1 : end, end, window->to);
  if (!has_colon || bad_to != std::errc() || stop != end || !(window->from >= 0) ||
      !(window->to > window->from))
    return InvalidArgument(fmt::format("--window is '{}', expected FROM:TO in us, 0 <= FROM < TO", text));
  return {};
}

Status BeginsWithin(const Window& window, const Profile& profile) {
  if (window.from == 0 || window.from < profile.time_s * 1e6) return {};
  return InvalidArgument(
      fmt::format("--window begins at {} us, the call ends at {:.3f} us", window.from, profile.time_s * 1e6));
}

// Slices that lie in it, if only in part.
void Cut(const Window& window, Profile* profile) {
  if (profile->timeline == nullptr) return;
  auto inside = std::make_shared<std::vector<TimelineSlice>>();
  std::copy_if(profile->timeline->begin(), profile->timeline->end(), std::back_inserter(*inside),
               [&](const TimelineSlice& s) { return s.end_us > window.from && s.start_us < window.to; });
  profile->timeline = std::move(inside);
}

// Of larger records the beginning is replayed for the interval, about a second's work, if not all is asked for.
constexpr std::int64_t kMostForInterval = 500000;

Status Run(const SubjectOptions& options, bool interval_of_all, ProfiledCall* call) {
  call->options = options, call->interval_of_all = interval_of_all;
  Progress progress(stderr);
  progress.Show(fmt::format("{}: choosing a tiling, recording, replaying", call->subject.kernel));
  CUBIST_RETURN_IF_ERROR(call->subject.Run(&call->profile, /*timeline=*/true, &call->record));
  if (call->profile.launches == 1) {
    RecordedLaunch launch;
    launch.plan = sync::PlanFlags(call->record, call->subject.policy);
    launch.record = std::move(call->record);
    const bool all = interval_of_all || call->profile.instructions <= kMostForInterval;
    const ChipSpec& chip = call->subject.chip;
    const double us = call->profile.time_s * 1e6;
    progress.Show(fmt::format("{}: interval, from {} instructions replayed with other constants",
                              call->subject.kernel, all ? call->profile.instructions : kMostForInterval));
    call->interval =
        all ? IntervalOf({&launch, 1}, chip, us) : IntervalFromBeginning(launch, chip, us, kMostForInterval);
    call->record = std::move(launch.record);
  }
  call->analysis = Analyse(call->subject.chip, call->record, call->profile);
  return {};
}

// By a replay for each row of the plan; where it is not asked for, only what takes no longer than a tenth of a second.
std::optional<sync::Slack> SlackOf(const ProfiledCall& call, bool asked) {
  constexpr std::int64_t kMostInstructions = 500000;
  const std::int64_t instructions = call.profile.instructions;
  if (!asked && instructions > kMostInstructions) return {};
  const sync::Plan plan = sync::PlanFlags(call.record, call.subject.policy);
  if (!asked && instructions * std::ssize(sync::Fold(call.record, plan)) > kMostInstructions) return {};
  Progress progress(stderr);
  return sync::FindSlack(call.record, plan, [&](std::size_t done, std::size_t all) {
    progress.Show(fmt::format("slack: {} of {} flags left out", done, all));
  });
}

}  // namespace

int ProfileCommand(const ProfileOptions& options) {
  ProfiledCall a, b;
  Window window;
  SubjectOptions other = options.subject;
  const bool compares = !options.vs.empty();
  Status status = ParseWindow(options.window, &window);
  if (status.ok()) status = MakeSubject(options.subject, &a.subject);
  for (const std::string& vs : options.vs) {
    if (status.ok()) status = Change(vs, &other);
  }
  if (status.ok() && compares) {
    status = MakeSubject(other, &b.subject);
    if (!status.ok()) status = InvalidArgument("--vs: " + status.message());
  }
  for (const auto& [option, file] : {std::pair("--json", options.json), std::pair("--csv", options.csv),
                                     std::pair("--html", options.html)}) {
    if (status.ok()) status = PrepareOutput(option, file);
  }
  if (status.ok()) status = PrepareFile("--trace", options.trace);
  if (status.ok()) status = Run(options.subject, options.interval, &a);
  if (status.ok()) status = BeginsWithin(window, a.profile);
  if (status.ok() && compares) status = Run(other, options.interval, &b);
  if (status.ok() && compares) status = BeginsWithin(window, b.profile);
  if (!status.ok()) return BadInput("cubist profile", status.message());

  fmt::print("{}", ProfileText(a));
  if (compares)
    fmt::print("\nB: {}, {} flags\n{}", b.subject.Title(), b.options.policy, DifferenceText(a, b));
  a.slack = SlackOf(a, options.slack);
  if (a.slack) {
    constexpr std::size_t kUnasked = 5;
    fmt::print("\n{}", options.slack ? sync::SlackTable(*a.slack) : sync::SlackTable(*a.slack, kUnasked));
  }
  nlohmann::ordered_json json = ProfileJson(a);
  if (compares) json["vs"] = ProfileJson(b);
  if (!options.window.empty()) {
    Cut(window, &a.profile);
    if (compares) Cut(window, &b.profile);
  }
  if (status.ok() && !options.json.empty()) status = WriteJson(options.json, json);
  if (status.ok() && !options.csv.empty())
    status = WriteFile(options.csv, ProfileCsv(a, compares ? &b : nullptr));
  if (status.ok() && !options.html.empty())
    status = WriteFile(options.html, ProfilePage(a, compares ? &b : nullptr));
  if (status.ok() && !options.trace.empty()) {
    status = a.profile.WriteTimeline(options.trace);
    fmt::print("{}", LeftOutText(a.profile));
  }
  return status.ok() ? 0 : BadInput("cubist profile", status.message());
}

}  // namespace cubist
