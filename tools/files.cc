#include "tools/files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

namespace cubist {

namespace {

// The standard output since printed text goes elsewhere.
int only_stdout = -1;

// Files that options have, by their full names.
struct Use {
  std::string option;
  bool reads = false;
};
std::map<std::filesystem::path, Use> uses;

// Each file is one option's. Devices take whatever is written to them.
Status Take(const Use& use, const std::string& file) {
  std::error_code error;
  // (Of a relative name that is not there yet, weakly_canonical alone makes no whole one.)
  const std::filesystem::path name =
      std::filesystem::weakly_canonical(std::filesystem::absolute(file), error);
  if (error || (std::filesystem::exists(name, error) && !std::filesystem::is_regular_file(name, error)))
    return {};
  const auto [first, is_new] = uses.emplace(name, use);
  const Use& other = first->second;
  if (is_new || other.option == use.option) return {};
  return InvalidArgument(fmt::format("{} {}: {} {} this file", use.option, file, other.option,
                                     other.reads ? "reads" : "writes to"));
}

// Keeps the standard output for one file.
Status ReserveStdout(const char* option) {
  if (only_stdout >= 0)
    return InvalidArgument(fmt::format("{} -: another option writes to the standard output", option));
  only_stdout = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return {};
}

Status WriteStdout(std::string_view text) {
  const int to = only_stdout >= 0 ? only_stdout : STDOUT_FILENO;
  while (!text.empty()) {
    const ssize_t written = write(to, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return InvalidArgument("cannot write to the standard output");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace

std::vector<std::string> FoldersOf(const char* from_prefix, const char* in_source, const char* installed) {
  std::vector<std::string> folders;
  std::error_code error;
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) folders.push_back((executable.parent_path().parent_path() / from_prefix).string());
  folders.emplace_back(in_source);
  folders.emplace_back(installed);
  return folders;
}

void NoteInput(const std::string& option, const std::string& file) {
  static_cast<void>(Take({option, /*reads=*/true}, file));  // Two options may well read one file.
}

Status PrepareOutput(const char* option, const std::string& file) {
  return file == "-" ? ReserveStdout(option) : PrepareFile(option, file);
}

Status PrepareFile(const char* option, const std::string& file) {
  if (file.empty()) return {};
  if (file == "-") return InvalidArgument(fmt::format("{} -: takes the name of a file only", option));
  std::error_code error;
  std::filesystem::path folder = std::filesystem::path(file).parent_path();
  if (folder.empty()) folder = ".";
  if (!std::filesystem::is_directory(folder, error)) {
    return InvalidArgument(fmt::format("{} {}: there is no folder {}", option, file, folder.string()));
  }
  if (std::filesystem::is_directory(file, error)) {
    return InvalidArgument(fmt::format("{} {}: is a folder, expected a file", option, file));
  }
  const bool exists = std::filesystem::exists(file, error);
  if (access(exists ? file.c_str() : folder.c_str(), W_OK) != 0) {
    return InvalidArgument(fmt::format("{} {}: may not be written", option, file));
  }
  return Take({option}, file);
}

Status WriteFile(const std::string& file, std::string_view text) {
  if (file == "-") return WriteStdout(text);
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  stream.close();
  return stream ? Status() : InvalidArgument(file + ": cannot be written");
}

}  // namespace cubist
