// Workload: the dimensions of a model and of its training split, from a JSON file.
#ifndef CUBIST_TOOLS_WORKLOAD_H_
#define CUBIST_TOOLS_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention_options.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"

namespace cubist {

struct Workload {
  std::string name;
  std::int64_t hidden = 0, layers = 0, dense_layers = 0;
  double norm_eps = 1e-6;
  bool sandwich_norm = false;  // what a block adds to the residual stream is normed, too

  // Multi-head latent attention.
  struct Attention {
    std::int64_t heads = 0, q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
    double rope_theta = 10000;
    RopeLayout rope_layout = RopeLayout::kHalf;
    std::int64_t qk_dim() const { return nope_dim + rope_dim; }
  } attention;

  struct Moe {
    std::int64_t experts = 0, shared_experts = 0, top_k = 0, ffn = 0, dense_ffn = 0;
    ScoreFunction score = ScoreFunction::kSigmoid;
    bool router_bias = false;                 // selects, does not weigh
    std::int64_t groups = 1, top_groups = 1;  // of experts, by the sum of the two best of each
    double routed_scale = 1;                  // probabilities of a token's experts add up to it
  } moe;

  // Heads are split over tensor_parallel devices, experts over expert_shards.
  struct Training {
    std::int64_t tensor_parallel = 1, expert_shards = 1, sequence = 0, micro_batch = 1;
  } training;

  // What `cubist run` divides by unless told otherwise.
  struct Run {
    std::int64_t token_scale = 1, head_scale = 1;
  } run;
};

// `origin` names the text in errors, which also name the field, its value and the limit. Unknown, missing and
// repeated keys are errors; those of norms, rotary angles and the router may be missing, and are as above then.
Status ParseWorkload(std::string_view json, const std::string& origin, Workload* workload);

// Folders where a workload named X is looked for as X.json: beside the installed executable, in the source
// tree, in the install prefix.
std::vector<std::string> WorkloadFolders();

// Those that are there, by the alphabet.
std::vector<std::string> WorkloadNames(const std::vector<std::string>& folders);

// A name, or a path where it has a slash or ends in ".json". For an unknown name the error lists the known ones.
Status LoadWorkload(const std::string& name_or_path, const std::vector<std::string>& folders,
                    Workload* workload);

}  // namespace cubist

#endif  // CUBIST_TOOLS_WORKLOAD_H_
