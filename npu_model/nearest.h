// Nearest: the known name that a misspelt one most likely meant.
#ifndef CUBIST_NPU_MODEL_NEAREST_H_
#define CUBIST_NPU_MODEL_NEAREST_H_

#include <string>
#include <string_view>
#include <vector>

#include "npu_model/export.h"

namespace cubist {

// One that goes on where the wanted one ends, else by Levenshtein distance; of several the nearest, the first of equals.
// `names` has at least one.
CUBIST_COMMAND_EXPORT const std::string& Nearest(std::string_view wanted,
                                                 const std::vector<std::string>& names);

// What an error says of an unknown name: "known are a, b, c; the nearest is b", or "none is known" without names.
CUBIST_COMMAND_EXPORT std::string KnownAndNearest(std::string_view wanted,
                                                  const std::vector<std::string>& names);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_NEAREST_H_
