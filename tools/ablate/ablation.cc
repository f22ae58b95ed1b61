#include "tools/ablate/ablation.h"

#include <fmt/format.h>

#include <algorithm>

namespace cubist {

double CaseResult::gain() const {
  return steps.empty() || steps.back().profile.time_s <= 0
             ? 1
             : steps.front().profile.time_s / steps.back().profile.time_s;
}

Status RunAblation(const AblationCase& c, const ChipSpec& chip, const AblationOptions& options,
                   CaseResult* result) {
  *result = {c.name, c.group, {}};
  Tuning start;
  for (const AblationStep& step : c.steps) {
    SearchOptions search;
    search.policy = step.policy;
    search.budget = options.budget;
    search.allow = step.allow;
    search.start = &start;
    if (options.on_progress) {
      search.on_progress = [&](int tried, int, double best_s) {
        options.on_progress(
            fmt::format("{}, {}: {} tilings, {:.1f} us", c.name, step.name, tried, 1e6 * best_s));
      };
    }
    SearchResult found;
    if (const Status status = SearchTilings(step.call, chip, search, &found); !status.ok())
      return {status.code(), c.name + ", " + step.name + ": " + status.message()};
    std::string tiling;
    for (const TilingChoice& choice : found.choices) tiling += (tiling.empty() ? "" : " ") + choice.chosen;
    result->steps.push_back({step.name, tiling, found.best});
    start = found.tuning;
  }
  return {};
}

const std::vector<Ablation>& Ablations() {
  static const std::vector<Ablation> ablations = {
      {"matmul", "AscendP-MM: flags, block order, two-level pipelining, K-staggering", &MatmulAblation,
       [](const Profile& p) { return p.cube_utilisation; }, "Cube utilisation"},
      {"flash_attention", "RECT-FA: rectangular, rope in place, tight stages; forward and backward",
       &FlashAttentionAblation, [](const Profile& p) { return p.cube_utilisation; }, "Cube utilisation"},
      {"token_permute", "VectorSort: chains of small operators against the fused kernels",
       &TokenPermuteAblation,
       [](const Profile& p) { return std::max(p.vector_utilisation, p.mte_utilisation); },
       "utilisation of the busiest of Vector and MTE"},
  };
  return ablations;
}

}  // namespace cubist
