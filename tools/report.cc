#include "tools/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>

#include "npu_model/host/tile_ops.h"
#include "tools/files.h"
#include "tools/info.h"
#include "tools/table.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

Table RunTable() {
  using Align = Column::Align;
  return Table({{"case", "", 19, Align::kLeft},
                {"shape", "", 24, Align::kLeft},
                {"dtype", "", 5, Align::kLeft},
                {"host", "median", 7},
                {"rate", "", 11},
                {"share of", "ceiling", 7},
                {"error", "", 7},
                {"bound", "", 7},
                {"rows", "checked", 10},
                {"chip", "modelled", 7},
                {"Cube", "%", 4},
                {"Vec", "%", 3},
                {"MTE", "%", 3},
                {"verdict", "", 7, Align::kLeft}});
}

std::string Percent(double share) { return fmt::format("{:.0f}", 100 * share); }

std::string RateOf(const RunRow& row) {
  const Case& c = *row.kernel_case;
  const double seconds = row.trial.median();
  return row.memory_bound ? FormatPerSecond((c.bytes_read + c.bytes_written) / seconds, "B/s")
                          : FormatPerSecond(c.flops / seconds, "FLOP/s");
}

std::string CheckedOf(const Comparison& comparison) {
  return comparison.rows == comparison.all_rows ? fmt::format("all {}", comparison.rows)
                                                : fmt::format("{}/{}", comparison.rows, comparison.all_rows);
}

std::int64_t CountFailed(const std::vector<RunRow>& rows) {
  return std::count_if(rows.begin(), rows.end(), [](const RunRow& row) { return !row.ok(); });
}

// Not by profile_fields.h: units and names go with those of the host's numbers beside them.
Json ToJson(const Profile& p) {
  return {{"chip", p.chip},
          {"seconds", p.time_s},
          {"cycles", p.cycles},
          {"cube_utilisation", p.cube_utilisation},
          {"vector_utilisation", p.vector_utilisation},
          {"mte_utilisation", p.mte_utilisation},
          {"bound", p.bound},
          {"instructions", p.instructions},
          {"gm_read_bytes", p.gm_read},
          {"gm_written_bytes", p.gm_written},
          {"workspace_bytes", p.workspace_bytes},
          {"l2_hit_rate", p.l2_hit_rate}};
}

Json ToJson(const RunRow& row) {
  const Case& c = *row.kernel_case;
  const Comparison& comparison = row.trial.comparison;
  return {{"case", c.name},
          {"kernel", c.kernel},
          {"shape", c.shape},
          {"dtype", NameOf(c.dtype)},
          {"host_seconds_median", row.trial.median()},
          {"host_seconds_best", row.trial.seconds.front()},
          {"host_runs", row.trial.seconds.size()},
          {"flops", c.flops},
          {"bytes_read", c.bytes_read},
          {"bytes_written", c.bytes_written},
          {"limit", row.memory_bound ? "memory" : "compute"},
          {"floor_seconds", row.floor_s},
          {"share_of_ceiling", row.share()},
          {"error", comparison.error},
          {"bound", comparison.bound},
          {"error_over_bound", comparison.ratio},
          {"rows_checked", comparison.rows},
          {"rows", comparison.all_rows},
          {"check_seed", row.check_seed},
          {"modelled", ToJson(row.profile)},
          {"passed", row.ok()},
          {"problems", row.trial.problems}};
}

}  // namespace

std::string HeaderText(const RunSettings& settings, const Ceilings& ceilings) {
  const ScaledWorkload& s = settings.scaled;
  const Workload& w = s.workload;
  const CubeOps& cube = BestCubeOps();
  std::string text;
  const auto line = [&]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    text += fmt::format(format, std::forward<Args>(args)...) + "\n";
  };
  line("{}: {} layers ({} dense), hidden {}, {} heads of {}+{}/{}, {} experts, top {}, FFN {}", w.name,
       w.layers, w.dense_layers, w.hidden, w.attention.heads, w.attention.nope_dim, w.attention.rope_dim,
       w.attention.v_dim, w.moe.experts, w.moe.top_k, w.moe.ffn);
  line("scaled:  sequence {} / {} = {}, batch {}: {} tokens; heads {} / {} (tensor parallel) / {} = {}",
       w.training.sequence, s.token_scale, s.sequence, s.batch, s.tokens(), w.attention.heads,
       w.training.tensor_parallel, s.head_scale, s.heads);
  line(
      "         every other dimension is true; {} of {} experts on this device, {} rows ({} tokens x {} / "
      "{})",
      s.local_experts(), w.moe.experts, s.expert_rows(), s.tokens(), w.moe.top_k, w.training.tensor_parallel);
  line("host:    {}, {} thread{}; peak fp32 {}, bf16 {}; memory read {}, write {}, copy {}", TargetText(cube),
       settings.threads, settings.threads == 1 ? "" : "s", FormatPerSecond(ceilings.fma_flops, "FLOP/s"),
       FormatPerSecond(ceilings.bf16_flops(), "FLOP/s"), FormatPerSecond(ceilings.read_bytes_per_s, "B/s"),
       FormatPerSecond(ceilings.write_bytes_per_s, "B/s"), FormatPerSecond(ceilings.copy_bytes_per_s, "B/s"));
  line("chip:    {}, {} Cube and {} Vector cores at {:.2f} GHz; its times are predicted, not measured",
       settings.chip.name, settings.chip.cube_cores, settings.chip.cube_cores * settings.chip.vector_per_cube,
       settings.chip.clock_hz.value / 1e9);
  line("inputs:  seed {}", settings.seed);
  line(
      "shapes:  Matmul MxNxK (in E: the rows of E experts by one GroupedMatmul); "
      "attention batch x heads x length nope+rope/v, causal;");
  line("         permute tokens x hidden, experts per token of all experts");
  return text + "\n" + RunTable().Header() + "\n";
}

std::string RowText(const RunRow& row) {
  const Case& c = *row.kernel_case;
  std::string text =
      RunTable().Row({c.name, c.shape, NameOf(c.dtype), FormatSeconds(row.trial.median()), RateOf(row),
                      fmt::format("{} % {}", Percent(row.share()), row.memory_bound ? "M" : "C"),
                      FormatError(row.trial.comparison.error), FormatError(row.trial.comparison.bound),
                      CheckedOf(row.trial.comparison), FormatSeconds(row.profile.time_s),
                      Percent(row.profile.cube_utilisation), Percent(row.profile.vector_utilisation),
                      Percent(row.profile.mte_utilisation), row.ok() ? "ok" : "FAILED"}) +
      "\n";
  for (const std::string& problem : row.trial.problems) text += fmt::format("  FAILED: {}\n", problem);
  return text;
}

std::string SummaryText(const std::vector<RunRow>& rows, double seconds) {
  const std::int64_t failed = CountFailed(rows);
  return fmt::format(
      "{}\n"
      "share of ceiling: of the peak of arithmetic (C) or of memory (M), whichever allows less. error: of "
      "the "
      "element nearest to its bound.\n"
      "rows checked against the reference: all, or as many as said, drawn after the run. Outputs were marked "
      "before it "
      "and no mark may be left.\n"
      "{} of {} cases passed in {:.0f} s{}\n",
      RunTable().Rule(), static_cast<std::int64_t>(rows.size()) - failed, rows.size(), seconds,
      failed > 0 ? fmt::format("; {} FAILED", failed) : "");
}

Status WriteReport(const std::string& path, const RunSettings& settings, const Ceilings& ceilings,
                   const std::vector<RunRow>& rows, double seconds) {
  const ScaledWorkload& s = settings.scaled;
  Json json = {{"workload", s.workload.name},
               {"token_scale", s.token_scale},
               {"head_scale", s.head_scale},
               {"batch", s.batch},
               {"sequence", s.sequence},
               {"heads", s.heads},
               {"seed", settings.seed},
               {"simd_target", BestCubeOps().target},
               {"threads", settings.threads},
               {"ceilings",
                {{"fma_flops", ceilings.fma_flops},
                 {"dot_bf16_flops", ceilings.bf16_flops()},
                 {"read_bytes_per_s", ceilings.read_bytes_per_s},
                 {"write_bytes_per_s", ceilings.write_bytes_per_s},
                 {"copy_bytes_per_s", ceilings.copy_bytes_per_s}}},
               {"seconds", seconds},
               {"passed", CountFailed(rows) == 0},
               {"rows", Json::array()}};
  for (const RunRow& row : rows) json["rows"].push_back(ToJson(row));
  return WriteFile(path, json.dump(2, ' ', true, Json::error_handler_t::replace) + "\n");
}

}  // namespace cubist
