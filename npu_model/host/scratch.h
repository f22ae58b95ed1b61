// Scratch: a thread's bump memory for slots. It is reset, not freed, between cores,
// so that it stays in the caches.
#ifndef CUBIST_NPU_MODEL_HOST_SCRATCH_H_
#define CUBIST_NPU_MODEL_HOST_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/export.h"

namespace cubist {

class CUBIST_EXPORT Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // 128-byte aligned, uninitialised. Throws std::bad_alloc when the machine has no memory left.
  std::byte* Take(std::int64_t bytes);
  // Everything taken is gone. Several chunks are merged into one of their total size.
  void Reset();

  // Bytes taken since, and whether they follow each other.
  std::int64_t used() const { return used_; }
  bool in_one_piece() const { return chunks_.size() <= 1; }
  // How far behind the beginning of that piece a pointer into it stands; of others -1.
  std::int64_t OffsetOf(const void* pointer) const {
    if (chunks_.empty()) return -1;
    const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) -
                                                  reinterpret_cast<std::uintptr_t>(chunks_.back().data));
    return offset >= 0 && offset < chunks_.back().size ? offset : -1;
  }

 private:
  struct Chunk {
    std::byte* data;
    std::int64_t size;
  };
  void AddChunk(std::int64_t size);

  std::vector<Chunk> chunks_;
  std::int64_t used_ = 0;  // Of the last chunk.
};

// The calling thread's own.
CUBIST_EXPORT Scratch& ThreadScratch();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_SCRATCH_H_
