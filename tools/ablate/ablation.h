// Ablation: a kernel from its conventional form to ours, one idea at a time, each step on the model with its own best
// tiling.
#ifndef CUBIST_TOOLS_ABLATE_ABLATION_H_
#define CUBIST_TOOLS_ABLATE_ABLATION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/sync/policy.h"
#include "npu_model/tuning.h"
#include "tools/tiling_search.h"
#include "tools/workload.h"

namespace cubist {

// One idea more than the step before.
struct AblationStep {
  std::string name = {};
  // What runs. Several kernels one after the other are one call that adds their profiles.
  Call call = {};
  sync::Policy policy = sync::Policy::kMinimal;
  std::function<bool(const TilingFields&)> allow = {};  // tilings of this step; all where empty
  // Instead of a call: kernels one after the other, each with its own search, which is made once for all the steps that
  // it is part of by this name. `idea` sets a part's forms apart: each begins where the form before ended.
  std::vector<AblationStep> parts = {};
  int idea = 0, times = 1;
};

struct AblationCase {
  std::string name;   // says shape and direction
  std::string group;  // cases that one summary line takes together
  std::vector<AblationStep> steps;
};

struct StepResult {
  std::string name, tiling;
  Profile profile;
};

struct CaseResult {
  std::string name, group;
  std::vector<StepResult> steps;

  // Time of the first step over that of the last.
  double gain() const;
};

struct AblationOptions {
  int budget = 32;  // replays per step at most
  std::function<void(const std::string& what)> on_progress = {};
};

// Every step begins where the one before ended, so that an idea that does not pay is not taken where it is a choice.
Status RunAblation(const AblationCase& c, const ChipSpec& chip, const AblationOptions& options,
                   CaseResult* result);

// The ablations that there are, by kernel.
struct Ablation {
  const char* kernel;
  const char* what;  // a line for people
  std::vector<AblationCase> (*cases)(const Workload& workload);
  // The figure of a group that its summary speaks of, of a step.
  double (*figure)(const Profile& profile);
  const char* figure_name;
};
const std::vector<Ablation>& Ablations();

// One kernel, from its conventional form in the first step to ours in the last.
AblationCase MatmulCase(const std::string& group, std::int64_t m, std::int64_t n, std::int64_t k);
AblationCase FlashAttentionCase(std::int64_t heads, std::int64_t length, const Workload::Attention& dims,
                                bool causal, bool backward);
AblationCase PermuteCase(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k, std::int64_t experts);
AblationCase UnpermuteCase(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k,
                           std::int64_t experts);

std::vector<AblationCase> LayerAblation(const Workload& workload);
std::vector<AblationCase> MatmulAblation(const Workload& workload);
std::vector<AblationCase> FlashAttentionAblation(const Workload& workload);
std::vector<AblationCase> TokenPermuteAblation(const Workload& workload);

}  // namespace cubist

#endif  // CUBIST_TOOLS_ABLATE_ABLATION_H_
