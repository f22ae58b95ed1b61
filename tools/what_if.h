// WhatIf: a chip as the command line describes it: a name or a file, and constants that are set.
#ifndef CUBIST_TOOLS_WHAT_IF_H_
#define CUBIST_TOOLS_WHAT_IF_H_

#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"

namespace cubist {

struct ChipOptions {
  std::string chip = "ascend910b2";    // a name, or a path where it has a slash or ends in ".json"
  std::vector<std::string> sets = {};  // "name=value" of npu_model/chip_constants.h
};

// A chip that differs from a known one in anything has a name of its own: that of its file, or "<name>*". A file is
//   {"name": "mine", "base": "ascend910b2", "set": {"memory.hbm_bytes_per_s": 3.2e12, ..}}
// Errors name the option or the file, the constant, its value and the limits, and the nearest known name.
Status LoadChip(const ChipOptions& options, ChipSpec* chip);

// The chip's name and what made it, in the words of such a file.
template <class Writer>
void WriteChip(Writer& out, const ChipOptions& options, const ChipSpec& chip) {
  out("chip", chip.name);
  out("base", options.chip);
  out("set", options.sets);
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_WHAT_IF_H_
