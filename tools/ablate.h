// `cubist ablate`: what each idea of a kernel is worth on the model.
#ifndef CUBIST_TOOLS_ABLATE_H_
#define CUBIST_TOOLS_ABLATE_H_

#include <string>
#include <vector>

#include "tools/what_if.h"

namespace cubist {

struct AblateOptions {
  std::string kernel;
  ChipOptions chip;
  std::string workload = "deepseek_v3";
  std::vector<std::string> only;  // cases whose name contains one of these; all when empty
  std::string json;               // file for the cases
  int budget = 32;                // replays per step at most
  bool tilings = false;           // print the tiling of each step
  bool list = false;              // list the cases, run nothing
};

std::vector<std::string> AblationNames();

// What --only may be given to leave some cases of an ablation out: words of their names that not all of them have.
std::vector<std::string> AblationWords(const std::string& kernel);

// Lines of name and description, aligned.
std::string AblationsText();

// Exit status: 0, or 2 for bad input.
int AblateCommand(const AblateOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_ABLATE_H_
