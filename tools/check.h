// `cubist check`: plans the synchronisation of a kernel on a chip, and proves it.
#ifndef CUBIST_TOOLS_CHECK_H_
#define CUBIST_TOOLS_CHECK_H_

#include <string>

#include "tools/subject.h"

namespace cubist {

struct CheckOptions {
  SubjectOptions subject;
  std::string json;    // file for settings, plan and findings
  std::string dot;     // file for the graph of a deadlock
  bool plan = false;   // print the plan
  bool slack = false;  // print what each wait costs
  int execute = 0;     // run the record in this many random orders, and in three others
};

// Prints the verdict and every finding. Exit status 0: proved; 1: findings; 2: bad input.
int CheckCommand(const CheckOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_CHECK_H_
