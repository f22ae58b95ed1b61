#include "tools/ablate/ablation.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace cubist {

double CaseResult::gain() const {
  return steps.empty() || steps.back().profile.time_s <= 0
             ? 1
             : steps.front().profile.time_s / steps.back().profile.time_s;
}

namespace {

// What a search left of a part: its time, and where the next form of it begins.
struct FoundPart {
  Profile profile;
  std::vector<TilingChoice> choices;
};
using FoundParts = std::map<std::pair<std::string, int>, FoundPart>;

Status Search(const AblationCase& c, const AblationStep& step, const ChipSpec& chip,
              const AblationOptions& options, const std::vector<TilingChoice>& start, SearchResult* found) {
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
  const Status status = SearchTilings(step.call, chip, search, found);
  return status.ok() ? status : Status(status.code(), c.name + ", " + step.name + ": " + status.message());
}

Status RunParts(const AblationCase& c, const AblationStep& step, const ChipSpec& chip,
                const AblationOptions& options, FoundParts* found, Profile* sum) {
  for (const AblationStep& part : step.parts) {
    if (part.times == 0) continue;
    const auto key = std::pair(part.name, part.idea);
    if (found->find(key) == found->end()) {
      const auto before = found->find({part.name, 0});
      SearchResult result;
      CUBIST_RETURN_IF_ERROR(
          Search(c, part, chip, options,
                 before == found->end() ? std::vector<TilingChoice>() : before->second.choices, &result));
      found->emplace(key, FoundPart{result.best, result.choices});
    }
    for (int i = 0; i < part.times; ++i) sum->Append(found->at(key).profile);
  }
  return {};
}

}  // namespace

Status RunAblation(const AblationCase& c, const ChipSpec& chip, const AblationOptions& options,
                   CaseResult* result) {
  *result = {c.name, c.group, {}};
  std::vector<TilingChoice> start;
  FoundParts parts;
  for (const AblationStep& step : c.steps) {
    if (!step.parts.empty()) {
      Profile sum;
      CUBIST_RETURN_IF_ERROR(RunParts(c, step, chip, options, &parts, &sum));
      result->steps.push_back({step.name, "", sum});
      continue;
    }
    SearchResult found;
    CUBIST_RETURN_IF_ERROR(Search(c, step, chip, options, start, &found));
    std::string tiling;
    for (const TilingChoice& choice : found.choices) tiling += (tiling.empty() ? "" : " ") + choice.chosen;
    result->steps.push_back({step.name, tiling, found.best});
    start = std::move(found.choices);
  }
  return {};
}

const std::vector<Ablation>& Ablations() {
  static const std::vector<Ablation> ablations = {
      {"matmul", "AscendP-MM: flags, block order, two-level pipelining, K-staggering", &MatmulAblation,
       [](const Profile& p) { return p.cube_utilisation; }, "Cube utilisation"},
      {"flash_attention", "RECT-FA: rectangular, rope in place and fused, tight stages; forward and backward",
       &FlashAttentionAblation, [](const Profile& p) { return p.cube_utilisation; }, "Cube utilisation"},
      {"token_permute", "VectorSort: chains of small operators against the fused kernels",
       &TokenPermuteAblation,
       [](const Profile& p) { return std::max(p.vector_utilisation, p.mte_utilisation); },
       "utilisation of the busiest of Vector and MTE"},
      {"layer",
       "a layer's kernels one after the other, forward and backward: matmuls, attention, permutes by turns",
       &LayerAblation, [](const Profile& p) { return p.cube_utilisation; }, "Cube utilisation"},
  };
  return ablations;
}

}  // namespace cubist
