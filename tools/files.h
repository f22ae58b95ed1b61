// Files that a command is asked to write.
#ifndef CUBIST_TOOLS_FILES_H_
#define CUBIST_TOOLS_FILES_H_

#include <string>
#include <string_view>

#include "npu_model/status.h"

namespace cubist {

// Whether a file can be made or replaced, before any work. An empty name is fine. `option` is named in errors.
Status CheckWritable(const char* option, const std::string& file);

Status WriteFile(const std::string& file, std::string_view text);

}  // namespace cubist

#endif  // CUBIST_TOOLS_FILES_H_
