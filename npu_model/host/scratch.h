// Scratch: a thread's bump memory for slots. It is reset, not freed, between cores,
// so that it stays in the caches.
#ifndef CUBIST_NPU_MODEL_HOST_SCRATCH_H_
#define CUBIST_NPU_MODEL_HOST_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cubist {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // 128-byte aligned, uninitialised. Throws std::bad_alloc when the machine has no memory left.
  std::byte* Take(std::int64_t bytes);
  // Everything taken is gone. Several chunks are merged into one of their total size.
  void Reset();

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
Scratch& ThreadScratch();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_SCRATCH_H_
