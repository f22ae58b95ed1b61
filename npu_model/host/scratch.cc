#include "npu_model/host/scratch.h"

#include <algorithm>
#include <new>

#include "npu_model/pages.h"
#include "npu_model/types.h"

namespace cubist {
namespace {

constexpr std::int64_t kAlignment = 128;                // Two cache lines: the widest row of a register tile.
constexpr std::align_val_t kChunkAlignment{kHugePage};  // Chunks are whole huge pages.

std::byte* AllocateChunk(std::int64_t bytes) {
  void* memory = ::operator new(static_cast<std::size_t>(bytes), kChunkAlignment);
  AskForHugePages(memory, bytes);
  return static_cast<std::byte*>(memory);
}

void FreeChunk(std::byte* data) { ::operator delete(data, kChunkAlignment); }

}  // namespace

Scratch::~Scratch() {
  for (const Chunk& chunk : chunks_) FreeChunk(chunk.data);
}

std::byte* Scratch::Take(std::int64_t bytes) {
  bytes = RoundUp(std::max<std::int64_t>(bytes, 1), kAlignment);
  if (chunks_.empty() || used_ + bytes > chunks_.back().size) {
    const std::int64_t last = chunks_.empty() ? 0 : chunks_.back().size;
    const std::int64_t size = RoundUp(std::max(bytes, last), kHugePage);
    AddChunk(size);
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
    FreeChunk(chunk.data);
  }
  chunks_.clear();
  AddChunk(total);
}

// Nothing has changed where it throws.
void Scratch::AddChunk(std::int64_t size) {
  chunks_.reserve(chunks_.size() + 1);
  chunks_.push_back({AllocateChunk(size), size});
  used_ = 0;
}

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace cubist
