#include "tools/files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

namespace cubist {

Status CheckWritable(const char* option, const std::string& file) {
  if (file.empty()) return {};
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
  return {};
}

Status WriteFile(const std::string& file, std::string_view text) {
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  stream.close();
  return stream ? Status() : InvalidArgument(file + ": cannot be written");
}

}  // namespace cubist
