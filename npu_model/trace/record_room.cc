#include "npu_model/trace/record_room.h"

#include <cstdio>
#include <fstream>

namespace cubist::trace {
namespace {

std::string Mib(std::int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

NoRoomForRecord::NoRoomForRecord(std::int64_t instructions, std::int64_t needed, std::int64_t free)
    : message_("a record of " + std::to_string(instructions) + " instructions and more needs " + Mib(needed) +
               " beside what it has, " + Mib(free) +
               " are free: model a smaller shape, such as fewer heads or rows") {}

std::int64_t FreeBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return std::int64_t{kib} << 10;
  }
  return std::int64_t{1} << 62;
}

void CheckRoom(std::int64_t instructions, std::int64_t needed) {
  constexpr std::int64_t kSmall = std::int64_t{64} << 20;
  if (needed > kSmall) CheckRoom(instructions, needed, FreeBytes());
}

void CheckRoom(std::int64_t instructions, std::int64_t needed, std::int64_t free) {
  if (needed > free) throw NoRoomForRecord(instructions, needed, free);
}

}  // namespace cubist::trace
