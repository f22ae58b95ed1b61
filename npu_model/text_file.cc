#include "npu_model/text_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace cubist {

Status ReadTextFile(const std::string& path, std::string* text) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return InvalidArgument(path + ": is a folder, expected a file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return InvalidArgument(path + ": cannot be read: " + std::strerror(errno));
  text->assign(std::istreambuf_iterator<char>(file), {});
  return file.bad() ? InvalidArgument(path + ": cannot be read to its end") : Status();
}

}  // namespace cubist
