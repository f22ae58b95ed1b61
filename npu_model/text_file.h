// The whole of a text file.
#ifndef CUBIST_NPU_MODEL_TEXT_FILE_H_
#define CUBIST_NPU_MODEL_TEXT_FILE_H_

#include <string>

#include "npu_model/export.h"
#include "npu_model/status.h"

namespace cubist {

// An error names the file and says why it cannot be read: it is not there, or a folder, or may not be.
CUBIST_COMMAND_EXPORT Status ReadTextFile(const std::string& path, std::string* text);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TEXT_FILE_H_
