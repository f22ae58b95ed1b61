// `cubist check`: plans the synchronisation of a kernel on a chip, and proves it.
#ifndef CUBIST_TOOLS_CHECK_H_
#define CUBIST_TOOLS_CHECK_H_

#include <string>

namespace cubist {

struct CheckOptions {
  std::string kernel;  // matmul, flash_attention, token_permute or token_unpermute
  std::string shape;   // sizes with 'x' between them, as the kernel's help says; empty: a small default
  std::string dtype = "bf16";
  std::string chip = "ascend910b2";
  std::string policy = "minimal";
  std::string json;  // file for plan and findings
  std::string dot;   // file for the graph of a deadlock
  bool causal = false;
  bool plan = false;  // print the plan
};

// Prints the verdict and every finding. Exit status 0: proved; 1: findings; 2: bad input.
int CheckCommand(const CheckOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_CHECK_H_
