#include "tools/ablate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "npu_model/nearest.h"
#include "tools/ablate/ablation.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/profile_fields.h"
#include "tools/progress.h"
#include "tools/table.h"
#include "tools/workload.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

double GmBytes(const Profile& p) { return static_cast<double>(p.gm_read + p.gm_written); }

Table StepTable() {
  using Align = Column::Align;
  return Table({{"step", "", 24, Align::kLeft},
                {"time", "", 8},
                {"faster", "than first", 6},
                {"Cube", "% busy", 6},
                {"Vector", "% busy", 6},
                {"MTE", "% busy", 6},
                {"GM", "MB", 8},
                {"L2 hits", "%", 7},
                {"launches", "", 8},
                {"moves", "of GM", 8},
                {"bound", "", 8, Align::kLeft}});
}

std::string CaseText(const CaseResult& result, bool tilings) {
  const auto percent = [](double share) { return fmt::format("{:.1f}", 100 * share); };
  std::string text = result.name + "\n";
  for (const StepResult& step : result.steps) {
    const Profile& p = step.profile;
    text += StepTable().Row({"  " + step.name, FormatSeconds(p.time_s),
                             fmt::format("{:.3f}x", result.steps.front().profile.time_s / p.time_s),
                             percent(p.cube_utilisation), percent(p.vector_utilisation),
                             percent(p.mte_utilisation), fmt::format("{:.1f}", GmBytes(p) / 1e6),
                             percent(p.l2_hit_rate), fmt::format("{}", p.launches),
                             fmt::format("{}", p.transfers), p.bound}) +
            "\n";
    if (tilings) text += fmt::format("    {}\n", step.tiling);
  }
  return text;
}

Json CaseJson(const AblateOptions& options, const ChipSpec& chip, const CaseResult& result) {
  Json steps = Json::array();
  for (const StepResult& step : result.steps) {
    const Profile& p = step.profile;
    JsonWriter fields{steps.emplace_back(Json::object())};
    fields("name", step.name);
    WriteBusyFields(fields, p);
    fields("launches", p.launches);
    fields("instructions", p.instructions);
    fields("transfers", p.transfers);
    fields("bound", p.bound);
    fields("tiling", step.tiling);
  }
  Json json = {{"case", result.name}, {"group", result.group}, {"steps", steps}, {"gain", result.gain()}};
  JsonWriter settings{json};
  settings("kernel", options.kernel);
  settings("workload", options.workload);
  WriteChip(settings, options.chip, chip);
  settings("budget", options.budget);
  return json;
}

constexpr double kNoise = 1e-3;  // Replays that differ by less say nothing.

// Geometric means over the cases of a group, from each step but the last to the last.
std::string SummaryText(const Ablation& ablation, const std::vector<CaseResult>& results) {
  std::vector<std::string> groups;
  for (const CaseResult& r : results) {
    if (std::find(groups.begin(), groups.end(), r.group) == groups.end()) groups.push_back(r.group);
  }
  std::string text;
  for (const std::string& group : groups) {
    std::string down;  // cases that end slower than they began
    double gain = 0, figure = 0, after_first = 0, least = INFINITY;
    int cases = 0;
    const CaseResult* worst = nullptr;
    for (const CaseResult& r : results) {
      if (r.group != group) continue;
      const auto share = [&](std::size_t step) {
        return std::max(ablation.figure(r.steps[step].profile), 1e-9);
      };
      const std::size_t last = r.steps.size() - 1;
      ++cases;
      gain += std::log(r.gain());
      figure += std::log(share(last) / share(0));
      after_first += std::log(share(last) / share(std::min<std::size_t>(1, last)));
      if (r.gain() < least) least = r.gain(), worst = &r;
      if (r.gain() < 1 - kNoise)
        down += fmt::format("{} {} ({:.3f}x)", down.empty() ? "" : ",", r.name, r.gain());
    }
    const auto mean = [&](double sum) { return std::exp(sum / cases); };
    text += fmt::format(
        "{} ({} cases): {:.3f}x in the geometric mean, least {:.3f}x ({}); {} {:+.1f} % from the first step "
        "to the last, {:+.1f} % from the second; down:{}\n",
        group, cases, mean(gain), least, worst->name, ablation.figure_name, 100 * (mean(figure) - 1),
        100 * (mean(after_first) - 1), down.empty() ? " none" : down);
  }
  return text;
}

bool Wanted(const std::vector<std::string>& only, const std::string& name) {
  return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& part) {
           return name.find(part) != std::string::npos;
         });
}

}  // namespace

std::vector<std::string> AblationNames() {
  std::vector<std::string> names;
  for (const Ablation& ablation : Ablations()) names.emplace_back(ablation.kernel);
  return names;
}

std::vector<std::string> AblationWords(const std::string& kernel) {
  constexpr std::size_t kLeastLetters = 3;
  Workload workload;
  if (!LoadWorkload(AblateOptions().workload, WorkloadFolders(), &workload).ok()) return {};
  std::map<std::string, std::size_t> counts;
  std::size_t cases = 0;
  for (const Ablation& ablation : Ablations()) {
    if (kernel != ablation.kernel) continue;
    for (const AblationCase& c : ablation.cases(workload)) {
      ++cases;
      std::istringstream stream(c.name);
      const std::set<std::string> words(std::istream_iterator<std::string>(stream), {});
      for (const std::string& word : words) ++counts[word];
    }
  }
  std::vector<std::string> words;
  for (const auto& [word, count] : counts) {
    if (count < cases && word.size() >= kLeastLetters) words.push_back(word);
  }
  return words;
}

std::string AblationsText() {
  std::string text;
  for (const Ablation& ablation : Ablations()) {
    text += fmt::format("  {:<20}{}\n", ablation.kernel, ablation.what);
  }
  return text;
}

int AblateCommand(const AblateOptions& options) {
  const auto& all = Ablations();
  const auto ablation =
      std::find_if(all.begin(), all.end(), [&](const Ablation& a) { return options.kernel == a.kernel; });
  if (ablation == all.end()) {
    return BadInput("cubist ablate", fmt::format("no ablation is named '{}'; {}", options.kernel,
                                                 KnownAndNearest(options.kernel, AblationNames())));
  }
  ChipSpec chip;
  Workload workload;
  for (const Status& status : {LoadChip(options.chip, &chip), PrepareOutput("--json", options.json),
                               LoadWorkload(options.workload, WorkloadFolders(), &workload)}) {
    if (!status.ok()) return BadInput("cubist ablate", status.message());
  }
  std::vector<AblationCase> cases = ablation->cases(workload);
  std::erase_if(cases, [&](const AblationCase& c) { return !Wanted(options.only, c.name); });
  if (cases.empty()) return BadInput("cubist ablate", "--only: no case has such a name; --list shows them");
  if (options.list) {
    Json list = Json::array();
    for (const AblationCase& c : cases) {
      fmt::print("{:40} {}\n", c.name, c.group);
      list.push_back({{"case", c.name}, {"group", c.group}});
    }
    const Status status = options.json.empty() ? Status() : WriteJson(options.json, list);
    return status.ok() ? 0 : BadInput("cubist ablate", status.message());
  }

  Progress progress(stderr);
  std::vector<CaseResult> results;
  Json json = Json::array();
  fmt::print("{} on {}, {}\n{}\n", ablation->kernel, chip.name, workload.name, StepTable().Header());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    AblationOptions run;
    run.budget = options.budget;
    run.on_progress = [&](const std::string& what) {
      progress.Show(fmt::format("{}/{}  {}", i + 1, cases.size(), what));
    };
    const Status status = RunAblation(cases[i], chip, run, &results.emplace_back());
    progress.Clear();
    if (!status.ok()) return BadInput("cubist ablate", status.message());
    fmt::print("{}", CaseText(results.back(), options.tilings));
    std::fflush(stdout);
    json.push_back(CaseJson(options, chip, results.back()));
  }
  fmt::print("{}\n{}", StepTable().Rule(), SummaryText(*ablation, results));
  if (options.json.empty()) return 0;
  const Status status = WriteJson(options.json, json);
  return status.ok() ? 0 : BadInput("cubist ablate", status.message());
}

}  // namespace cubist
