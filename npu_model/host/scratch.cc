#include "npu_model/host/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "npu_model/types.h"

namespace cubist {
namespace {

constexpr std::int64_t kAlignment = 128;  // Two cache lines: the widest row of a register tile.
constexpr std::int64_t kHugePage =
    2 << 20;  // Chunks are whole huge pages: a Mmad's operands need few TLB entries.

std::byte* AllocateChunk(std::int64_t bytes) {
  void* memory = std::aligned_alloc(static_cast<std::size_t>(kHugePage), static_cast<std::size_t>(bytes));
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, static_cast<std::size_t>(bytes),
          MADV_HUGEPAGE);  // A wish: failure changes nothing but speed.
  return static_cast<std::byte*>(memory);
}

}  // namespace

Scratch::~Scratch() {
  for (const Chunk& chunk : chunks_) std::free(chunk.data);
}

std::byte* Scratch::Take(std::int64_t bytes) {
  bytes = RoundUp(std::max<std::int64_t>(bytes, 1), kAlignment);
  if (chunks_.empty() || used_ + bytes > chunks_.back().size) {
    const std::int64_t last = chunks_.empty() ? 0 : chunks_.back().size;
    const std::int64_t size = RoundUp(std::max(bytes, last), kHugePage);
    chunks_.push_back({nullptr, size});
    chunks_.back().data = AllocateChunk(size);
    used_ = 0;
  }
  std::byte* memory = chunks_.back().data + used_;
  used_ += bytes;
  return memory;
}

void Scratch::Reset() {
  used_ = 0;
  if (chunks_.size() <= 1) return;
  std::int64_t total = 0;
  for (const Chunk& chunk : chunks_) {
    total += chunk.size;
    std::free(chunk.data);
  }
  chunks_.clear();
  chunks_.push_back({AllocateChunk(total), total});
}

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace cubist
