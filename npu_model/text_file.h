// The whole of a text file.
#ifndef CUBIST_NPU_MODEL_TEXT_FILE_H_
#define CUBIST_NPU_MODEL_TEXT_FILE_H_

#include <cstddef>
#include <string>

#include "npu_model/export.h"
#include "npu_model/status.h"

namespace cubist {

// No text that is read here is nearly as long; a standard input may have no end.
inline constexpr std::size_t kMostTextBytes = std::size_t{1} << 26;

// An error names the file and says why it cannot be read: it is not there, or a folder, may not be, or is longer than that; or
// it is a pipe or a device, on which a call could wait for ever, but for those that are open already (/dev/stdin, /dev/fd/3).
CUBIST_COMMAND_EXPORT Status ReadTextFile(const std::string& path, std::string* text);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TEXT_FILE_H_
