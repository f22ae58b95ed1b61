#include "npu_model/tuning.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <utility>

#include "npu_model/text_file.h"

namespace cubist {

void Tuning::Set(const std::string& kernel, const std::string& chip, const std::string& shape,
                 const std::string& tiling) {
  entries_[{kernel, chip, shape}] = tiling;
}

const std::string* Tuning::Find(const std::string& kernel, const std::string& chip,
                                const std::string& shape) const {
  const auto found = entries_.find({kernel, chip, shape});
  return found == entries_.end() ? nullptr : &found->second;
}

Status Tuning::Parse(std::string_view text, const std::string& origin) {
  auto entries = entries_;
  std::map<Key, int> line_of;
  std::istringstream lines{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream stream(line.substr(0, line.find('#')));
    const std::vector<std::string> words(std::istream_iterator<std::string>(stream), {});
    if (words.empty()) continue;
    const std::string where = origin + ":" + std::to_string(number) + ": ";
    if (words.size() != 4) {
      return InvalidArgument(where + "has " + std::to_string(words.size()) +
                             " words, needs kernel, chip, shape and tiling");
    }
    for (const std::string& word : {words[2], words[3]}) {
      if (word.find('=') == std::string::npos)
        return InvalidArgument(where + "'" + word + "' is not name=value,..");
    }
    const Key key{words[0], words[1], words[2]};
    if (const auto [first, is_new] = line_of.emplace(key, number); !is_new)
      return InvalidArgument(where + "the call of line " + std::to_string(first->second) + " again");
    entries[key] = words[3];
  }
  entries_ = std::move(entries);
  return {};
}

Status Tuning::Read(const std::string& path) {
  std::string text;
  CUBIST_RETURN_IF_ERROR(ReadTextFile(path, &text));
  return Parse(text, path);
}

std::string Tuning::Text() const {
  std::string text = "# kernel chip shape tiling\n";
  for (const auto& [key, tiling] : entries_) {
    const auto& [kernel, chip, shape] = key;
    text += kernel + " " + chip + " " + shape + " " + tiling + "\n";
  }
  return text;
}

Status Tuning::Write(const std::string& path) const {
  std::ofstream file(path);
  file << Text();
  file.close();
  return file ? Status() : InvalidArgument(path + ": cannot be written: " + std::strerror(errno));
}

}  // namespace cubist
