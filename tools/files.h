// Files that a command is asked to write.
#ifndef CUBIST_TOOLS_FILES_H_
#define CUBIST_TOOLS_FILES_H_

#include <string>
#include <string_view>
#include <vector>

#include "npu_model/status.h"

namespace cubist {

// Notes that an option names a file to be read, which no option may write to then.
void NoteInput(const std::string& option, const std::string& file);

// Whether a file can be made or replaced, before any work, and no other option has it. An empty name is fine.
// `option` is named in errors.
Status PrepareFile(const char* option, const std::string& file);

// The same for what WriteFile writes, where "-" is the standard output: what is printed from now on goes to the standard
// error, so that the file has it for itself. One file may have it.
Status PrepareOutput(const char* option, const std::string& file);

Status WriteFile(const std::string& file, std::string_view text);

// Folders of what comes with the command, in the order in which they are looked through: beside the installed command
// (`from_prefix`), in the source tree, where the build was to be installed.
std::vector<std::string> FoldersOf(const char* from_prefix, const char* in_source, const char* installed);

}  // namespace cubist

#endif  // CUBIST_TOOLS_FILES_H_
