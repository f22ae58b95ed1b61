// `cubist run`: every kernel at a workload's shapes, computed, checked, timed, and modelled on a chip.
#ifndef CUBIST_TOOLS_RUN_H_
#define CUBIST_TOOLS_RUN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/what_if.h"

namespace cubist {

struct RunOptions {
  std::string workload = "deepseek_v3";
  ChipOptions chip;
  int threads = 0;  // 0: all
  std::uint64_t seed = 1;
  std::optional<std::int64_t> token_scale, head_scale;  // instead of the workload's
  std::string routing = "both";                         // skewed, uniform or both
  std::vector<std::string> only;                        // cases; all when empty
  std::vector<std::string> inputs;                      // name=file.npy
  std::vector<std::string> timelines;                   // case=file.json
  std::string output;                                   // folder for results
  std::string json;                                     // file for rows
  std::optional<std::uint64_t> check_seed;              // draws the sampled rows
  bool quick = false;
  bool list = false;
};

// Of the default workload.
std::vector<std::string> RunCaseNames();

// Exit status: 0 every check passed, 1 one failed, 2 bad input; then nothing was run or written.
int RunCommand(const RunOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_RUN_H_
