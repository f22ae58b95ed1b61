#include "npu_model/trace/record_room.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace cubist::trace {
namespace {

constexpr std::int64_t kUnknown = std::int64_t{1} << 62;

std::string Mib(std::int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// What MemAvailable says.
std::int64_t FreeInAll(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return std::int64_t{kib} << 10;
  }
  return kUnknown;
}

// The files of a control group, by the version of the interface.
struct GroupFiles {
  const char *folder, *limit, *used,
      *cache;  // cache: the word in memory.stat for what a group gives back when asked
};
constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                  "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file"};

// kUnknown where there is no such group, or no limit.
std::int64_t FreeInGroup(const std::string& folder, const GroupFiles& names) {
  std::int64_t limit = 0, used = 0;
  std::ifstream limit_file(folder + names.limit), used_file(folder + names.used),
      stat(folder + "/memory.stat");
  if (!(limit_file >> limit) || !(used_file >> used)) return kUnknown;
  std::string word;
  std::int64_t cache = 0;
  for (std::int64_t bytes = 0; stat >> word >> bytes;) {
    if (word == names.cache) cache = bytes;
  }
  return std::clamp(std::min(limit, kUnknown) - used + cache, std::int64_t{0}, kUnknown);
}

// Of names with commas between them.
bool Lists(const std::string& names, const std::string& wanted) {
  std::istringstream parts(names);
  for (std::string name; std::getline(parts, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

// Of the groups that this process is in, each with those above it; a container may see its own as the highest.
std::int64_t FreeInGroups(const std::string& root) {
  std::int64_t free = kUnknown;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::istringstream parts(line);
    std::string number, controllers, path;
    std::getline(parts, number, ':'), std::getline(parts, controllers, ':'), std::getline(parts, path);
    const bool of_memory = Lists(controllers, "memory");
    if (!of_memory && !controllers.empty()) continue;
    const GroupFiles& names = of_memory ? kVersion1 : kVersion2;
    if (path == "/") path.clear();
    std::string folder = root;
    folder += names.folder;
    const std::size_t highest = folder.size();
    folder += path;
    for (;; folder.erase(folder.rfind('/'))) {
      free = std::min(free, FreeInGroup(folder, names));
      if (folder.size() <= highest) break;
    }
  }
  return free;
}

}  // namespace

NoRoomForRecord::NoRoomForRecord(std::int64_t instructions, std::int64_t needed, std::int64_t free)
    : message_("a record of " + std::to_string(instructions) + " instructions and more needs " + Mib(needed) +
               " beside what it has, " + Mib(free) +
               " are free: model a smaller shape, such as fewer heads or rows") {}

std::int64_t FreeBytes(const std::string& root) { return std::min(FreeInAll(root), FreeInGroups(root)); }

void CheckRoom(std::int64_t instructions, std::int64_t needed) {
  constexpr std::int64_t kSmall = std::int64_t{64} << 20;
  if (needed > kSmall) CheckRoom(instructions, needed, FreeBytes());
}

void CheckRoom(std::int64_t instructions, std::int64_t needed, std::int64_t free) {
  if (needed > free) throw NoRoomForRecord(instructions, needed, free);
}

}  // namespace cubist::trace
