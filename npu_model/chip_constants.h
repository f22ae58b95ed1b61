// The constants of a chip by name, for what-if questions and chip files: "memory.hbm_bytes_per_s", "mmad.head_busy",
// "path.gm_to_l1.startup", "vector.cycles.exp", "buffer.l1", "cube_cores".
#ifndef CUBIST_NPU_MODEL_CHIP_CONSTANTS_H_
#define CUBIST_NPU_MODEL_CHIP_CONSTANTS_H_

#include <string>
#include <string_view>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"

namespace cubist {

struct NamedConstant {
  std::string name;
  Constant constant;   // sizes and counts have an empty source and are `documented`
  double least = 0;    // what may be set: `least` itself too, unless `above`
  bool above = false;  // only values above `least`
  bool whole = false;  // only whole numbers
  double most = 1e18;
};

// All of them, in the order of the table.
std::vector<NamedConstant> ConstantsOf(const ChipSpec& chip);

// Sets one. An unknown name is an error that tells the nearest one, an impossible value one that tells the limits.
// cube_cores sets how many run side by side, too. The constant becomes a guess whose source is "set by the user".
Status SetConstant(ChipSpec* chip, std::string_view name, double value);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CHIP_CONSTANTS_H_
