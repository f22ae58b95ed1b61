// `cubist bench`: times one kernel on this machine, against what the machine can do at most.
#ifndef CUBIST_TOOLS_BENCH_H_
#define CUBIST_TOOLS_BENCH_H_

#include <string>

#include "tools/kernel_call.h"

namespace cubist {

struct BenchOptions {
  KernelCallOptions call;
  int threads = 0;   // 0: all
  bool pin = false;  // threads to processors
  double seconds = 1;
  int repetitions = 0;  // 0: as many as the seconds allow, at least 3
  bool ceilings = true;
  std::string json;
};

// The exit status: 0, or 2 where the input is bad.
int BenchCommand(const BenchOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_BENCH_H_
