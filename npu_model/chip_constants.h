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
  Constant constant;           // sizes and counts have an empty source and are `documented`
  double least = 0, most = 0;  // what may be set
  bool or_zero = false;        // and 0, for none
  bool whole = false;          // only whole numbers
};

// All of them, in the order of the table.
CUBIST_EXPORT std::vector<NamedConstant> ConstantsOf(const ChipSpec& chip);

// Whether each is one that could be set: a chip that somebody else has made is checked before it is modelled.
CUBIST_EXPORT Status CheckChip(const ChipSpec& chip);

// Sets one. An unknown name is an error that tells the nearest one, an impossible value one that tells the limits.
// cube_cores sets how many run side by side, too. The constant becomes a guess whose source is "set by the user".
CUBIST_EXPORT Status SetConstant(ChipSpec* chip, std::string_view name, double value);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CHIP_CONSTANTS_H_
