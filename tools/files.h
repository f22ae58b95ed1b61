// Files that a command is asked to write.
#ifndef CUBIST_TOOLS_FILES_H_
#define CUBIST_TOOLS_FILES_H_

#include <string>
#include <string_view>
#include <vector>

#include "npu_model/status.h"

namespace cubist {

// Whether a file can be made or replaced, before any work. An empty name is fine. `option` is named in errors.
Status CheckWritable(const char* option, const std::string& file);

Status WriteFile(const std::string& file, std::string_view text);

// Folders of what comes with the command, in the order in which they are looked through: beside the installed command
// (`from_prefix`), in the source tree, where the build was to be installed.
std::vector<std::string> FoldersOf(const char* from_prefix, const char* in_source, const char* installed);

// Where `file` is "-", which stands for the standard output: all that is printed from now on goes to the standard error,
// so that WriteFile("-", ..) has the output for itself. Else nothing.
void LeaveStdoutTo(const std::string& file);

}  // namespace cubist

#endif  // CUBIST_TOOLS_FILES_H_
