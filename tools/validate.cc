#include "tools/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "npu_model/chip.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/progress.h"
#include "tools/table.h"
#include "tools/validation/measured.h"
#include "tools/validation/predict.h"
#include "tools/what_if.h"

namespace cubist {
namespace {

struct Result {
  std::string name, group, skipped;
  double predicted = 0, measured = 0, low = 0, high = 0;

  double error() const { return predicted / measured - 1; }
  bool inside() const { return low <= measured && measured <= high; }
};

std::string DataFile(const char* name) {
  for (const std::string& folder :
       FoldersOf(CUBIST_DATA_FROM_PREFIX, CUBIST_DATA_IN_SOURCE, CUBIST_DATA_INSTALLED)) {
    const std::string file = folder + "/" + name;
    if (std::filesystem::exists(file)) return file;
  }
  return name;
}

// Ranks from 1; equal values share the mean of theirs.
std::vector<double> Ranks(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return values[x] < values[y]; });
  std::vector<double> ranks(values.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t end = i;
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    for (std::size_t j = i; j < end; ++j) ranks[order[j]] = static_cast<double>(i + end + 1) / 2;
    i = end;
  }
  return ranks;
}

double Correlation(const std::vector<double>& x, const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  const double mx = std::accumulate(x.begin(), x.end(), 0.0) / n,
               my = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mx) * (y[i] - my);
    xx += (x[i] - mx) * (x[i] - mx);
    yy += (y[i] - my) * (y[i] - my);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 1;
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The rows of a group, in the order of the groups' first rows.
std::vector<std::pair<std::string, std::vector<const Result*>>> ByGroup(const std::vector<Result>& results) {
  std::vector<std::pair<std::string, std::vector<const Result*>>> groups;
  for (const Result& r : results) {
    if (!r.skipped.empty()) continue;
    auto found =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == r.group; });
    if (found == groups.end()) found = groups.insert(groups.end(), {r.group, {}});
    found->second.push_back(&r);
  }
  return groups;
}

ErrorSummary SummaryOf(const std::vector<const Result*>& rows) {
  std::vector<double> predicted, measured;
  for (const Result* r : rows) predicted.push_back(r->predicted), measured.push_back(r->measured);
  return Summarise(predicted, measured);
}

// `mape` is told of the rows whose schedule is known, where there are any.
std::vector<const Result*> Headline(const std::vector<Result>& results) {
  std::vector<const Result*> known, all;
  for (const Result& r : results) {
    if (!r.skipped.empty()) continue;
    all.push_back(&r);
    if (r.group == kKnownSchedules) known.push_back(&r);
  }
  return known.empty() ? all : known;
}

double WidthOf(const Result* r) { return (r->high - r->low) / 2 / r->predicted; }

struct Coverage {
  double inside = 0, width = 0;  // shares; the width is the median half-width over the prediction
};
Coverage CoverageOf(const std::vector<const Result*>& rows) {
  Coverage c;
  std::vector<double> widths;
  for (const Result* r : rows) {
    c.inside += r->inside() ? 1.0 / static_cast<double>(rows.size()) : 0;
    widths.push_back(WidthOf(r));
  }
  c.width = Median(std::move(widths));
  return c;
}

std::vector<const Result*> Replayed(const std::vector<Result>& results) {
  std::vector<const Result*> all;
  for (const Result& r : results) {
    if (r.skipped.empty()) all.push_back(&r);
  }
  return all;
}

void AddCoverage(const std::vector<const Result*>& rows, nlohmann::json* to) {
  const Coverage c = CoverageOf(rows);
  (*to)["inside_interval"] = c.inside;
  (*to)["median_interval_width"] = c.width;
}

std::string Json(const std::vector<Result>& results, const std::vector<std::string>& bad, bool intervals) {
  using nlohmann::json;
  json rows = json::array(), skipped = json::array(), groups = json::object();
  for (const Result& r : results) {
    if (!r.skipped.empty()) {
      skipped.push_back({{"case", r.name}, {"reason", r.skipped}});
      continue;
    }
    json row = {{"case", r.name},
                {"group", r.group},
                {"predicted_us", r.predicted},
                {"measured_us", r.measured},
                {"error", r.error()}};
    if (intervals) row["low_us"] = r.low, row["high_us"] = r.high;
    rows.push_back(std::move(row));
  }
  for (const auto& [group, of_group] : ByGroup(results)) {
    const ErrorSummary s = SummaryOf(of_group);
    groups[group] = {
        {"rows", s.rows}, {"mape", s.mape}, {"median_error", s.median}, {"spearman", s.spearman}};
    if (intervals) AddCoverage(of_group, &groups[group]);
  }
  const ErrorSummary all = SummaryOf(Headline(results));
  json whole{{"rows", rows},
             {"mape", all.rows > 0 ? json(all.mape) : json()},
             {"spearman", all.rows > 0 ? json(all.spearman) : json()},
             {"skipped", skipped},
             {"bad_lines", bad},
             {"groups", groups}};
  if (intervals) AddCoverage(Replayed(results), &whole);
  return whole.dump(1) + "\n";
}

std::string Percent(double share) { return fmt::format("{:+.1f} %", 100 * share); }

// Errors of two halves of the known schedules: constants were fitted on four sizes of M, told on the others.
std::string HeldOut(const std::vector<const Result*>& rows) {
  std::vector<const Result*> fitted, others;
  for (const Result* r : rows) {
    const bool on = r->name.find(" 128x8192x8192") != std::string::npos ||
                    r->name.find(" 640x8192x8192") != std::string::npos ||
                    r->name.find(" 1664x8192x8192") != std::string::npos ||
                    r->name.find(" 3200x8192x8192") != std::string::npos;
    (on ? fitted : others).push_back(r);
  }
  if (fitted.empty() || others.empty()) return "";
  return fmt::format(
      "{}: MAPE {:.1f} % of the {} rows that constants were fitted on, {:.1f} % of the {} others\n",
      kKnownSchedules, 100 * SummaryOf(fitted).mape, fitted.size(), 100 * SummaryOf(others).mape,
      others.size());
}

std::vector<const Result*> Worst(std::vector<const Result*> rows) {
  const auto wrong = [](const Result* r) { return std::abs(std::log(r->predicted / r->measured)); };
  std::stable_sort(rows.begin(), rows.end(), [&](auto* x, auto* y) { return wrong(x) > wrong(y); });
  rows.resize(std::min<std::size_t>(rows.size(), 5));
  return rows;
}

void Print(const std::vector<Result>& results, bool intervals) {
  using Align = Column::Align;
  Table rows({{"case", "", 40, Align::kLeft},
              {"group", "", 16, Align::kLeft},
              {"predicted", "us", 10},
              {"measured", "us", 10},
              {"error", "", 9},
              {intervals ? "from" : "", intervals ? "us" : "", 9},
              {intervals ? "to" : "", intervals ? "us" : "", 9}});
  fmt::print("{}\n", rows.Header());
  for (const Result& r : results) {
    if (!r.skipped.empty()) continue;
    fmt::print("{}\n", rows.Row({r.name, r.group, fmt::format("{:.1f}", r.predicted),
                                 fmt::format("{:.1f}", r.measured), Percent(r.error()),
                                 intervals ? fmt::format("{:.1f}", r.low) : "",
                                 intervals ? fmt::format("{:.1f}", r.high) : ""}));
  }
  fmt::print("\n");
  std::size_t skipped = 0;
  for (const Result& r : results) {
    if (r.skipped.empty()) continue;
    fmt::print("skipped {}: {}\n", r.name, r.skipped);
    ++skipped;
  }
  if (skipped > 0) fmt::print("\n");
  for (const auto& [group, of_group] : ByGroup(results)) {
    const ErrorSummary s = SummaryOf(of_group);
    fmt::print("{}: {} rows, MAPE {:.1f} %, median error {}, Spearman {:.3f}", group, s.rows, 100 * s.mape,
               Percent(s.median), s.spearman);
    if (intervals) {
      const Coverage c = CoverageOf(of_group);
      fmt::print(", {:.0f} % inside an interval of +-{:.0f} %", 100 * c.inside, 100 * c.width);
    }
    fmt::print("\n  worst:");
    for (const Result* r : Worst(of_group)) fmt::print(" {} {};", r->name, Percent(r->error()));
    fmt::print("\n");
    if (group == kKnownSchedules) fmt::print("  {}", HeldOut(of_group));
  }
  if (intervals) {
    const Coverage c = CoverageOf(Replayed(results));
    fmt::print("all: {:.0f} % inside an interval of +-{:.0f} %\n", 100 * c.inside, 100 * c.width);
  }
  if (skipped > 0) fmt::print("skipped {} of {} rows\n", skipped, results.size());
}

std::string Markdown(const std::vector<Result>& results, bool intervals) {
  std::string text = fmt::format(
      "| group | rows | MAPE | median error | Spearman |{} worst rows |\n|---|---|---|---|---|{}---|\n",
      intervals ? " inside interval | median width |" : "", intervals ? "---|---|" : "");
  const auto coverage = [&](const std::vector<const Result*>& rows) {
    if (!intervals) return std::string();
    const Coverage c = CoverageOf(rows);
    return fmt::format(" {:.0f} % | +-{:.0f} % |", 100 * c.inside, 100 * c.width);
  };
  for (const auto& [group, of_group] : ByGroup(results)) {
    const ErrorSummary s = SummaryOf(of_group);
    std::string worst;
    for (const Result* r : Worst(of_group))
      worst += fmt::format("{}{} {}", worst.empty() ? "" : "; ", r->name, Percent(r->error()));
    text += fmt::format("| {} | {} | {:.1f} % | {} | {:.3f} |{} {} |\n", group, s.rows, 100 * s.mape,
                        Percent(s.median), s.spearman, coverage(of_group), worst);
  }
  text += fmt::format("| all | {} |  |  |  |{}  |\n", Replayed(results).size(), coverage(Replayed(results)));
  for (const auto& [group, of_group] : ByGroup(results)) {
    if (group == kKnownSchedules) text.append("\n").append(HeldOut(of_group));
  }
  text += fmt::format(
      "\n## Rows\n\n| case | group | predicted, us | measured, us | error |{}\n|---|---|---|---|---|{}\n",
      intervals ? " interval, us |" : "", intervals ? "---|" : "");
  for (const Result& r : results) {
    if (!r.skipped.empty()) continue;
    text +=
        fmt::format("| {} | {} | {:.1f} | {:.1f} | {} |{}\n", r.name, r.group, r.predicted, r.measured,
                    Percent(r.error()), intervals ? fmt::format(" {:.1f} .. {:.1f} |", r.low, r.high) : "");
  }
  std::string skipped;
  for (const Result& r : results) {
    if (!r.skipped.empty()) skipped += fmt::format("- {}: {}\n", r.name, r.skipped);
  }
  return skipped.empty() ? text : text + "\n## Skipped\n\n" + skipped;
}

}  // namespace

ErrorSummary Summarise(const std::vector<double>& predicted, const std::vector<double>& measured) {
  ErrorSummary s;
  s.rows = predicted.size();
  if (s.rows == 0) return s;
  std::vector<double> errors;
  for (std::size_t i = 0; i < s.rows; ++i) {
    errors.push_back(predicted[i] / measured[i] - 1);
    s.mape += std::abs(errors.back()) / static_cast<double>(s.rows);
  }
  s.median = Median(errors);
  s.spearman = Correlation(Ranks(predicted), Ranks(measured));
  return s;
}

int ValidateCommand(const ValidateOptions& options) {
  for (const auto& [option, file] :
       {std::pair("--json", options.json), std::pair("--markdown", options.markdown)}) {
    if (const Status status = PrepareOutput(option, file); !status.ok())
      return BadInput("cubist validate", status.message());
  }
  ChipSpec any;
  if (const Status status = LoadChip({.sets = options.sets}, &any); !status.ok())
    return BadInput("cubist validate", status.message());
  std::vector<std::string> files = {options.file};
  if (options.file.empty())
    files = {DataFile("measured_matmul_schedules_910b2.csv"), DataFile("measured_ops_910b.csv")};
  MeasuredRows measured;
  for (const std::string& file : files) {
    const std::size_t bad = measured.bad.size();
    if (const Status status = ReadMeasured(file, &measured); !status.ok())
      return BadInput("cubist validate", status.message());
    for (std::size_t i = bad; i < measured.bad.size(); ++i)
      fmt::print(stderr, "cubist validate: {}, left out: {}\n", file, measured.bad[i]);
  }
  if (measured.rows.empty())
    return BadInput("cubist validate", fmt::format("{} has no row that could be replayed", files.front()));
  std::map<std::string, ChipSpec> chips;
  std::vector<Result> results;
  Progress progress(stderr);
  for (const MeasuredRow& row : measured.rows) {
    Result& result = results.emplace_back();
    result.name = row.name;
    result.measured = row.us;
    progress.Show(fmt::format("{} of {}: {}", results.size(), measured.rows.size(), row.name));
    if (!chips.contains(row.chip)) {
      ChipSpec chip;
      const Status status = LoadChip({row.chip, options.sets}, &chip);
      if (!status.ok() && row.schedule) return BadInput("cubist validate", status.message());
      if (!status.ok()) {
        result.skipped = status.message();
        continue;
      }
      chips.emplace(row.chip, chip);
    }
    const ChipSpec& chip = chips.at(row.chip);
    Recorded recorded = RecordRow(row, chip);
    result.group = recorded.group;
    result.skipped = recorded.skipped;
    if (!result.skipped.empty()) continue;
    result.predicted = PredictedUs(recorded.launches, chip);
    if (!options.intervals) continue;
    const Interval interval = IntervalOf(recorded, chip, result.predicted);
    result.low = interval.low, result.high = interval.high;
  }
  progress.Clear();
  Print(results, options.intervals);
  if (!options.json.empty()) {
    if (const Status status = WriteFile(options.json, Json(results, measured.bad, options.intervals));
        !status.ok())
      return BadInput("cubist validate", status.message());
  }
  if (!options.markdown.empty()) {
    if (const Status status = WriteFile(options.markdown, Markdown(results, options.intervals)); !status.ok())
      return BadInput("cubist validate", status.message());
  }
  // Bad lines were named; what is told is of the others.
  return measured.bad.empty() ? 0 : kBadInput;
}

}  // namespace cubist
