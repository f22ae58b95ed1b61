// Nearest: the known name that a misspelt one most likely meant.
#ifndef CUBIST_NPU_MODEL_NEAREST_H_
#define CUBIST_NPU_MODEL_NEAREST_H_

#include <string>
#include <string_view>
#include <vector>

#include "npu_model/export.h"

namespace cubist {

// One that goes on where the wanted one ends, or has it inside, else one that is like it: by letters put in, left out,
// changed or turned round, or by the words that both have between dots, dashes and underscores. Capitals count for nothing; of
// equals the first. Null where none is near: more than half of the letters differ, and of the wanted one's words fewer than half
// are there.
CUBIST_COMMAND_EXPORT const std::string* Nearest(std::string_view wanted,
                                                 const std::vector<std::string>& names);

// "; the nearest is b", as the end of an error; empty where none is near.
CUBIST_COMMAND_EXPORT std::string NearestText(std::string_view wanted, const std::vector<std::string>& names);

// What an error says of an unknown name: "known are a, b, c; the nearest is b", or "none is known" without names.
CUBIST_COMMAND_EXPORT std::string KnownAndNearest(std::string_view wanted,
                                                  const std::vector<std::string>& names);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_NEAREST_H_
