#include "tests/support/limited_memory.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

constexpr std::int64_t kUnlimited = std::int64_t{1} << 62;
std::atomic<std::int64_t> allocations_left = kUnlimited;

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left.fetch_sub(1) <= 0) throw std::bad_alloc();
  void* memory = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The standard library's array forms call these.
void* operator new(std::size_t bytes) { return Allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept try {
  return operator new(bytes);
} catch (const std::bad_alloc&) {
  return nullptr;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace cubist::testing {

LimitedMemory::LimitedMemory(std::int64_t allocations) { allocations_left = allocations; }
LimitedMemory::~LimitedMemory() { allocations_left = kUnlimited; }

}  // namespace cubist::testing
