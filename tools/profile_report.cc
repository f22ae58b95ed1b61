#include "tools/profile_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tools/json_writer.h"
#include "tools/profile_fields.h"
#include "tools/table.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;
using Align = Column::Align;

std::string Percent(double share) { return fmt::format("{:.1f}", 100 * share); }
std::string Bar(double share, std::size_t width) {
  return std::string(
      static_cast<std::size_t>(std::lround(std::clamp(share, 0.0, 1.0) * static_cast<double>(width))), '#');
}
std::string Bytes(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  return bytes < 1e9 ? fmt::format("{:.1f} MB", bytes / 1e6) : fmt::format("{:.2f} GB", bytes / 1e9);
}

std::string IntervalText(const ProfiledCall& call) {
  if (!call.interval.known()) return "";
  return fmt::format(" ({} to {} by the spread of the constants)", FormatSeconds(call.interval.low * 1e-6),
                     FormatSeconds(call.interval.high * 1e-6));
}

std::string PipesText(const Analysis& analysis) {
  const Table table({{"core", "", 6, Align::kLeft},
                     {"pipe", "", 5, Align::kLeft},
                     {"busy", "%", 6},
                     {"waiting", "%", 7},
                     {"idle", "%", 6},
                     {"", "", 32, Align::kLeft}});
  std::string text = fmt::format("{}\n", table.Header());
  for (const auto& p : analysis.pipes)
    text +=
        table.Row({p.core, p.pipe, Percent(p.busy), Percent(p.waiting), Percent(p.idle), Bar(p.busy, 32)}) +
        "\n";
  return text;
}

std::string PathText(const Analysis& analysis, double us) {
  std::string text = "critical path, of the core that ends last\n";
  for (const auto& cause : analysis.critical_path) {
    text += fmt::format("  {:42}  {:>9.2f} us  {:>5} %  {}\n", cause.name, cause.us, Percent(cause.us / us),
                        Bar(cause.us / us, 32));
  }
  return text;
}

std::string TrafficText(const Profile& p) {
  std::string text = "traffic\n";
  for (std::size_t i = 0; i < kPathCount; ++i) {
    if (p.path_bytes[i] == 0) continue;
    text += fmt::format("  {:14} {:>10}\n", NameOf(static_cast<Path>(i)),
                        Bytes(static_cast<double>(p.path_bytes[i])));
  }
  text += fmt::format("  GM read {}, written {}; {} % of what is read is in L2; workspace {}\n",
                      Bytes(static_cast<double>(p.gm_read)), Bytes(static_cast<double>(p.gm_written)),
                      Percent(p.l2_hit_rate), Bytes(static_cast<double>(p.workspace_bytes)));
  return text;
}

std::string LinesText(const Analysis& analysis) {
  constexpr std::size_t kMost = 12;
  const Table table({{"source line", "", 38, Align::kLeft},
                     {"instruction", "", 14, Align::kLeft},
                     {"pipe", "", 4, Align::kLeft},
                     {"count", "", 9},
                     {"busy", "us/core", 9},
                     {"critical", "us", 9}});
  std::string text = fmt::format("{}\n", table.Header());
  for (std::size_t i = 0; i < std::min(kMost, analysis.lines.size()); ++i) {
    const auto& l = analysis.lines[i];
    text += table.Row({fmt::format("{}:{}", l.file, l.line), l.what, l.pipe, fmt::format("{}", l.count),
                       fmt::format("{:.2f}", l.busy_us), fmt::format("{:.2f}", l.critical_us)}) +
            "\n";
  }
  if (analysis.lines.size() > kMost) text += fmt::format("  and {} more\n", analysis.lines.size() - kMost);
  return text;
}

// Of the units that did anything; where none did, what of HBM's bandwidth is used.
std::string RooflineText(const Analysis& analysis) {
  const auto of_memory = [](const Analysis::Roofline& r) {
    return fmt::format("{:.2f} of {:.2f} TB/s", r.attained_bytes_per_s / 1e12, r.peak_bytes_per_s / 1e12);
  };
  std::string text;
  const auto add = [&](const char* units, const char* operations, const char* rate,
                       const Analysis::Roofline& r) {
    if (r.operations <= 0) return;
    text += fmt::format(
        "roofline of the {}: {:.4g} {} per byte of HBM; {:.4g} of {:.4g} {}, {}: {} % of the roof\n", units,
        r.intensity(), operations, r.attained_per_s / 1e12, r.peak_per_s / 1e12, rate, of_memory(r),
        Percent(r.share));
  };
  add("Cubes", "FLOP", "TFLOP/s", analysis.roofline);
  add("Vector cores", "operations", "T operations/s", analysis.vector_roofline);
  if (!text.empty()) return text;
  return fmt::format("roofline: no arithmetic; {} of HBM: {} % of the roof\n", of_memory(analysis.roofline),
                     Percent(analysis.roofline.share));
}

std::string BuffersText(const Analysis& analysis) {
  if (analysis.occupancy.empty()) return "";
  std::string text = "buffers at their fullest, on that core:";
  for (const auto& o : analysis.occupancy) {
    text += fmt::format(" {} {} % of {} KiB;", o.buffer,
                        Percent(static_cast<double>(o.most) / static_cast<double>(o.capacity)),
                        o.capacity / 1024);
  }
  text.back() = '\n';
  return text;
}

}  // namespace

std::string ProfileText(const ProfiledCall& call) {
  const Profile& p = call.profile;
  std::string text =
      fmt::format("{}, {} flags\n{}{}, {:.0f} cycles, {} core{}, {} instructions: {}\n\n",
                  call.subject.Title(), call.options.policy, FormatSeconds(p.time_s), IntervalText(call),
                  p.cycles, p.cores_used, p.cores_used == 1 ? "" : "s", p.instructions, p.verdict);
  text += PipesText(call.analysis) + "\n";
  if (!call.analysis.critical_path.empty()) text += PathText(call.analysis, p.time_s * 1e6) + "\n";
  text += TrafficText(p) + RooflineText(call.analysis) + BuffersText(call.analysis);
  if (!call.analysis.lines.empty()) text.append("\n").append(LinesText(call.analysis));
  return text;
}

std::string DifferenceText(const ProfiledCall& a, const ProfiledCall& b) {
  const Table table({{"A/B", "", 42, Align::kLeft}, {"A", "", 12}, {"B", "", 12}, {"B / A", "", 8}});
  std::string text = fmt::format("{}\n", table.Header());
  const auto row = [&](const std::string& name, double x, double y) {
    text += table.Row({name, fmt::format("{:.2f}", x), fmt::format("{:.2f}", y),
                       x > 0 ? fmt::format("{:.3f}", y / x) : std::string()}) +
            "\n";
  };
  row("time, us", a.profile.time_s * 1e6, b.profile.time_s * 1e6);
  row("GM, MB", static_cast<double>(a.profile.gm_read + a.profile.gm_written) / 1e6,
      static_cast<double>(b.profile.gm_read + b.profile.gm_written) / 1e6);
  row("L2 hits, %", 100 * a.profile.l2_hit_rate, 100 * b.profile.l2_hit_rate);
  row("Cube busy, %", 100 * a.profile.cube_utilisation, 100 * b.profile.cube_utilisation);
  row("Vector busy, %", 100 * a.profile.vector_utilisation, 100 * b.profile.vector_utilisation);
  std::map<std::string, std::pair<double, double>> causes;
  for (const auto& cause : a.analysis.critical_path) causes[cause.name].first = cause.us;
  for (const auto& cause : b.analysis.critical_path) causes[cause.name].second = cause.us;
  for (const auto& [name, us] : causes) row(fmt::format("critical: {}, us", name), us.first, us.second);
  return text;
}

Json ProfileJson(const ProfiledCall& call) {
  Json json;
  JsonWriter writer{json};
  writer("title", call.subject.Title());
  WriteSettings(writer, call.options, call.subject);
  writer("interval", call.interval_of_all);
  WriteProfileFields(writer, call.profile);
  if (call.interval.known()) json["interval_us"] = {call.interval.low, call.interval.high};
  WriteAnalysisFields(writer, call.profile, call.analysis);
  if (call.slack) json["slack"] = ParseJson(sync::SlackJson(*call.slack));
  return json;
}

namespace {

struct CsvRow {
  std::string name;  // "section,name"
  double value = 0;
};

std::vector<CsvRow> CsvRows(const ProfiledCall& call) {
  const Profile& p = call.profile;
  std::vector<CsvRow> rows;
  const auto row = [&](const char* section, const std::string& name, double value) {
    rows.push_back({fmt::format("{},{}", section, name), value});
  };
  row("total", "time_us", p.time_s * 1e6);
  if (call.interval.known()) {
    row("total", "time_us_low", call.interval.low);
    row("total", "time_us_high", call.interval.high);
  }
  row("total", "instructions", static_cast<double>(p.instructions));
  row("total", "gm_read", static_cast<double>(p.gm_read));
  row("total", "gm_written", static_cast<double>(p.gm_written));
  row("total", "l2_hit_rate", p.l2_hit_rate);
  for (const auto& pipe : call.analysis.pipes) {
    row("busy", fmt::format("{} {}", pipe.core, pipe.pipe), pipe.busy);
    row("waiting", fmt::format("{} {}", pipe.core, pipe.pipe), pipe.waiting);
  }
  for (const auto& cause : call.analysis.critical_path) {
    std::string name = cause.name;
    std::replace(name.begin(), name.end(), ',', ';');
    row("critical_us", name, cause.us);
  }
  for (std::size_t i = 0; i < kPathCount; ++i) {
    if (p.path_bytes[i] > 0) row("bytes", NameOf(static_cast<Path>(i)), static_cast<double>(p.path_bytes[i]));
  }
  for (const auto& l : call.analysis.lines)
    row("line_us", fmt::format("{}:{} {}", l.file, l.line, l.what), l.busy_us);
  return rows;
}

}  // namespace

std::string ProfileCsv(const ProfiledCall& a, const ProfiledCall* b) {
  std::string csv = b == nullptr ? "section,name,value\n" : "section,name,value,value_b\n";
  std::vector<CsvRow> of_b = b == nullptr ? std::vector<CsvRow>() : CsvRows(*b);
  for (const CsvRow& row : CsvRows(a)) {
    csv += fmt::format("{},{:.9g}", row.name, row.value);
    const auto other =
        std::find_if(of_b.begin(), of_b.end(), [&](const CsvRow& r) { return r.name == row.name; });
    if (b != nullptr) csv += ',';
    if (other != of_b.end()) {
      csv += fmt::format("{:.9g}", other->value);
      of_b.erase(other);
    }
    csv += '\n';
  }
  for (const CsvRow& row : of_b) csv += fmt::format("{},,{:.9g}\n", row.name, row.value);
  return csv;
}

std::string LeftOutText(const Profile& profile) {
  const std::size_t events = profile.timeline == nullptr ? 0 : profile.timeline->size();
  if (events <= Profile::kMostEvents) return "";
  return fmt::format("the trace has the first {} of {} events; --window of cubist profile takes others\n",
                     Profile::kMostEvents, events);
}

}  // namespace cubist
