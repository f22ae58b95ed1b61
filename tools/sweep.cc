#include "tools/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "npu_model/chip_constants.h"
#include "npu_model/nearest.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/plot.h"
#include "tools/profile_fields.h"
#include "tools/progress.h"
#include "tools/table.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

struct Point {
  std::string value;
  Profile profile;
  std::string error;  // why there is no profile

  bool ok() const { return error.empty(); }
};

std::vector<std::string> SplitAtX(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == 'x') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace

std::vector<std::string> SizeNames(const std::string& kernel) {
  for (const KernelForm& form : KernelForms()) {
    if (kernel == form.name) return SplitAtX(form.dims);
  }
  return {};
}

namespace {

constexpr const char* kTilingPrefix = "tiling.";

// What --over names, put into the options of one point.
Status Apply(const SweepOptions& options, const std::string& value, SubjectOptions* subject) {
  const std::vector<std::string> sizes = SizeNames(options.subject.call.kernel);
  const auto size = std::find(sizes.begin(), sizes.end(), options.over);
  if (options.over.starts_with(kTilingPrefix)) {
    if (!subject->tiling.empty()) subject->tiling += ",";
    subject->tiling += options.over.substr(std::string(kTilingPrefix).size()) + "=" + value;
  } else if (size != sizes.end()) {
    std::vector<std::string> shape = SplitAtX(FullShape(options.subject.call));
    const auto at = static_cast<std::size_t>(size - sizes.begin());
    if (at < shape.size()) shape[at] = value;
    subject->call.shape.clear();
    for (const std::string& part : shape)
      subject->call.shape += (subject->call.shape.empty() ? "" : "x") + part;
  } else {
    subject->chip.sets.push_back(options.over + "=" + value);
  }
  return {};
}

Status CheckOver(const SweepOptions& options) {
  std::vector<std::string> names = SizeNames(options.subject.call.kernel);
  if (options.over.starts_with(kTilingPrefix)) return {};
  for (const NamedConstant& constant : ConstantsOf(Ascend910B2())) names.push_back(constant.name);
  if (std::find(names.begin(), names.end(), options.over) != names.end()) return {};
  return InvalidArgument(fmt::format(
      "--over is '{}': neither a size of the kernel's shape, nor tiling.NAME, nor a constant of the chip{}",
      options.over, NearestText(options.over, names)));
}

// Sizes and counts are whole.
bool IsWhole(const SweepOptions& options) {
  const std::vector<std::string> sizes = SizeNames(options.subject.call.kernel);
  if (options.over.starts_with(kTilingPrefix)) return true;
  if (std::find(sizes.begin(), sizes.end(), options.over) != sizes.end()) return true;
  for (const NamedConstant& constant : ConstantsOf(Ascend910B2())) {
    if (constant.name == options.over) return constant.whole;
  }
  return false;
}

Status Values(const SweepOptions& options, std::vector<std::string>* values) {
  *values = options.values;
  if (!values->empty() && (options.from || options.to))
    return InvalidArgument("--values are given, and --from or --to: needs the one or the other");
  if (!values->empty()) return {};
  if (!options.from || !options.to) {
    const bool both = !options.from && !options.to;
    return InvalidArgument(
        fmt::format("{} missing: needs --values, or --from and --to", both           ? "--from and --to are"
                                                                      : options.from ? "--to is"
                                                                                     : "--from is"));
  }
  const double from = *options.from, to = *options.to;
  if (!(to > from) || (options.log && from <= 0)) {
    return InvalidArgument(
        fmt::format("--from is {:g} and --to is {:g}: needs --values, or --from below --to{}", from, to,
                    options.log ? ", both above 0 with --log" : ""));
  }
  for (int i = 0; i < options.points; ++i) {
    const double share = options.points == 1 ? 0 : static_cast<double>(i) / (options.points - 1);
    double value = options.log ? from * std::pow(to / from, share) : from + (to - from) * share;
    if (IsWhole(options)) value = std::round(value);
    const std::string text = IsWhole(options) ? fmt::format("{:.0f}", value) : fmt::format("{:.6g}", value);
    if (values->empty() || values->back() != text) values->push_back(text);
  }
  return {};
}

template <class Writer>
void WriteFields(Writer& out, const Profile& p) {
  WriteBusyFields(out, p);
  out("bound", p.bound);
}

Json ToJson(const SweepOptions& options, const Subject& base, const std::vector<Point>& points) {
  Json json;
  JsonWriter settings{json};
  WriteSettings(settings, options.subject, base);
  settings("over", options.over);
  json["points"] = Json::array();
  for (const Point& point : points) {
    JsonWriter fields{json["points"].emplace_back(Json::object())};
    fields("value", point.value);
    if (point.ok()) {
      WriteFields(fields, point.profile);
    } else {
      fields("error", point.error);
    }
  }
  return json;
}

std::string CsvQuoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string(2, c) : std::string(1, c);
  return quoted + '"';
}

// Names, values and blanks of a line of CSV, each behind a comma.
struct CsvWriter {
  std::string names, values, blanks;

  template <class Value>
  void operator()(const char* name, const Value& value) {
    names += fmt::format(",{}", name);
    blanks += ',';
    if constexpr (std::is_floating_point_v<Value>) {
      values += fmt::format(",{:.6g}", value);
    } else {
      values += fmt::format(",{}", value);
    }
  }
};

std::string ToCsv(const SweepOptions& options, const std::vector<Point>& points) {
  CsvWriter header;
  WriteFields(header, {});
  std::string csv = options.over + header.names + ",error\n";
  for (const Point& point : points) {
    CsvWriter line;
    WriteFields(line, point.profile);
    csv += point.value + (point.ok() ? line.values + "," : line.blanks + "," + CsvQuoted(point.error)) + "\n";
  }
  return csv;
}

void Print(const SweepOptions& options, const std::vector<Point>& points) {
  using Align = Column::Align;
  const Table table({{options.over, "", 12},
                     {"time", "", 8},
                     {"Cube", "%", 5},
                     {"Vector", "%", 6},
                     {"MTE", "%", 5},
                     {"bound", "", 7, Align::kLeft},
                     {"", "", 40, Align::kLeft}});
  fmt::print("{}\n", table.Header());
  double slowest = 0;
  for (const Point& point : points) slowest = std::max(slowest, point.profile.time_s);
  const auto percent = [](double share) { return fmt::format("{:.1f}", 100 * share); };
  for (const Point& point : points) {
    if (!point.ok()) {
      fmt::print("{}\n", table.Row({point.value, "-", "-", "-", "-", "-", point.error}));
      continue;
    }
    const Profile& p = point.profile;
    const auto length = static_cast<std::size_t>(std::lround(40 * p.time_s / slowest));
    fmt::print("{}\n", table.Row({point.value, FormatSeconds(p.time_s), percent(p.cube_utilisation),
                                  percent(p.vector_utilisation), percent(p.mte_utilisation), p.bound,
                                  std::string(length, '#')}));
  }
}

}  // namespace

int SweepCommand(const SweepOptions& options) {
  Subject base;
  std::vector<std::string> values;
  Status status = MakeSubject(options.subject, &base);
  if (status.ok()) status = CheckOver(options);
  if (status.ok()) status = Values(options, &values);
  for (const auto& [option, file] : {std::pair("--json", options.json), std::pair("--csv", options.csv),
                                     std::pair("--svg", options.svg)}) {
    if (status.ok()) status = PrepareOutput(option, file);
  }
  std::vector<Subject> subjects(values.size());
  std::vector<Point> points(values.size());
  const auto at_point = [&](std::size_t i, const std::string& error) {
    return fmt::format("{} = {}: {}", options.over, values[i], error);
  };
  for (std::size_t i = 0; status.ok() && i < values.size(); ++i) {
    SubjectOptions one = options.subject;
    points[i].value = values[i];
    status = Apply(options, values[i], &one);
    if (status.ok()) status = MakeSubject(one, &subjects[i]);
    if (status.ok()) continue;
    if (status.code() == StatusCode::kInvalidArgument) {
      status = InvalidArgument(at_point(i, status.message()));
    } else {
      points[i].error = std::exchange(status, {}).message();
    }
  }
  if (!status.ok()) return BadInput("cubist sweep", status.message());

  Progress progress(stderr);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!points[i].ok()) continue;
    progress.Show(fmt::format("{}/{}  {} = {}", i + 1, values.size(), options.over, values[i]));
    points[i].error = subjects[i].Run(&points[i].profile).message();
  }
  progress.Clear();
  if (std::none_of(points.begin(), points.end(), [](const Point& point) { return point.ok(); }))
    return BadInput("cubist sweep", at_point(0, points[0].error));
  fmt::print("{}\n", base.Title());
  Print(options, points);
  Plot plot{.title = base.Title(), .x = options.over, .y = "time, us", .log_x = options.log};
  for (const Point& point : points)
    plot.points.push_back({point.value, point.ok() ? point.profile.time_s * 1e6 : std::nan("")});
  if (!options.svg.empty()) status = WriteFile(options.svg, PlotSvg(plot));
  if (status.ok() && !options.json.empty()) status = WriteJson(options.json, ToJson(options, base, points));
  if (status.ok() && !options.csv.empty()) status = WriteFile(options.csv, ToCsv(options, points));
  return status.ok() ? 0 : BadInput("cubist sweep", status.message());
}

}  // namespace cubist
