// `cubist sweep`: a kernel's modelled time over a constant of the chip, a size of its shape, or a field of its tiling.
#ifndef CUBIST_TOOLS_SWEEP_H_
#define CUBIST_TOOLS_SWEEP_H_

#include <optional>
#include <string>
#include <vector>

#include "tools/subject.h"

namespace cubist {

struct SweepOptions {
  SubjectOptions subject;
  // A constant ("memory.hbm_bytes_per_s"), a size by its name in the kernel's form ("M"), or "tiling.NAME".
  std::string over;
  std::vector<std::string> values;  // or from, to and points
  std::optional<double> from, to;
  int points = 9;
  bool log = false;  // points evenly in the logarithm
  std::string json, csv, svg;
};

// Names of the sizes of a kernel's shape, which may be varied.
std::vector<std::string> SizeNames(const std::string& kernel);

// A point that the kernel cannot do, as where no tiling fits the buffers, is listed with the reason, and the others are modelled
// all the same. Exit status: 0, or 2 for bad input and where no point can be done.
int SweepCommand(const SweepOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_SWEEP_H_
