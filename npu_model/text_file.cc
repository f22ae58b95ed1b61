#include "npu_model/text_file.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace cubist {

namespace {

// The standard input, a shell's <(..): what this process holds open is read without waiting for another to open it.
bool IsHeldOpen(const std::string& path) {
  return path == "/dev/stdin" || path.starts_with("/dev/fd/") || path.starts_with("/proc/self/fd/");
}

}  // namespace

Status ReadTextFile(const std::string& path, std::string* text) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return InvalidArgument(path + ": is a folder, expected a file");
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error) &&
      !IsHeldOpen(path))
    return InvalidArgument(path + ": is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return InvalidArgument(path + ": cannot be read: " + std::strerror(errno));
  text->clear();
  for (std::array<char, 1 << 16> part; file;) {
    file.read(part.data(), part.size());
    text->append(part.data(), static_cast<std::size_t>(file.gcount()));
    if (text->size() > kMostTextBytes)
      return InvalidArgument(path + ": has more than " + std::to_string(kMostTextBytes) +
                             " bytes, the most that is read");
  }
  return file.bad() ? InvalidArgument(path + ": cannot be read to its end") : Status();
}

}  // namespace cubist
