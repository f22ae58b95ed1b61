// Whether memory has room for what a record still asks for: an operating system gives out more than it has, and ends a
// program that uses it.
#ifndef CUBIST_NPU_MODEL_TRACE_RECORD_ROOM_H_
#define CUBIST_NPU_MODEL_TRACE_RECORD_ROOM_H_

#include <cstdint>
#include <new>
#include <string>

namespace cubist::trace {

// Tells what is recorded, what it needs and what there is.
class NoRoomForRecord : public std::bad_alloc {
 public:
  NoRoomForRecord(std::int64_t instructions, std::int64_t needed, std::int64_t free);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Bytes that this machine could give to a program now, and its control groups (a container's limit) would let it have;
// 2^62 where nothing says. The files that say so are below `root`.
std::int64_t FreeBytes(const std::string& root = "");

// Throws NoRoomForRecord where so many bytes, beside those of `instructions` that are recorded, are not free. What is
// small is not looked at.
void CheckRoom(std::int64_t instructions, std::int64_t needed);
void CheckRoom(std::int64_t instructions, std::int64_t needed, std::int64_t free);

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_RECORD_ROOM_H_
