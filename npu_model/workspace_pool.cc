#include "npu_model/workspace_pool.h"

#include <algorithm>

#include "npu_model/types.h"

namespace cubist {

std::byte* WorkspacePool::Take(std::int64_t bytes, std::int64_t* capacity) {
  const std::scoped_lock lock(mutex_);
  const auto fits = free_.lower_bound(bytes);
  // Not a small workspace in a huge block, which the next large call would miss.
  if (fits != free_.end() && fits->first <= 4 * std::max<std::int64_t>(bytes, kPage)) {
    std::byte* data = fits->second;
    *capacity = fits->first;
    free_.erase(fits);
    kept_ -= *capacity;
    return data;
  }
  *capacity = RoundUp(std::max<std::int64_t>(bytes, 1), bytes < kHugePage ? kPage : kHugePage);
  void* data = ::operator new(static_cast<std::size_t>(*capacity), kAlignment);
  AskForHugePages(data, *capacity);
  return static_cast<std::byte*>(data);
}

void WorkspacePool::Give(std::byte* data, std::int64_t capacity) {
  const std::scoped_lock lock(mutex_);
  if (kept_ + capacity > kMaxKept || !Keep(data, capacity)) ::operator delete(data, kAlignment);
}

bool WorkspacePool::Keep(std::byte* data, std::int64_t capacity) try {
  free_.emplace(capacity, data);
  kept_ += capacity;
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

WorkspacePool& Workspaces() {
  static WorkspacePool* pool = new WorkspacePool;  // Never destroyed: calls may outlive static destruction.
  return *pool;
}

}  // namespace cubist
