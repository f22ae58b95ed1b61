// `cubist info`: what the library makes of this machine, and the chips it knows; or the constants of one of them.
#ifndef CUBIST_TOOLS_INFO_H_
#define CUBIST_TOOLS_INFO_H_

#include <string>

#include "npu_model/host/tile_ops.h"
#include "tools/what_if.h"

namespace cubist {

struct InfoOptions {
  int threads = 0;               // to measure with; 0: all
  bool measure = true;           // peaks of arithmetic and memory
  ChipOptions chip{.chip = ""};  // empty: this machine
  std::string json;
};

// The SIMD target, and what else of the CPU multiplies bf16: "AVX3 with AMX".
std::string TargetText(const CubeOps& cube);

// The exit status: 0, or 2 where the input is bad.
int InfoCommand(const InfoOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_INFO_H_
