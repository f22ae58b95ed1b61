// WorkspacePool: workspaces are kept for the next call, as fresh pages cost more than what is done with them.
#ifndef CUBIST_NPU_MODEL_WORKSPACE_POOL_H_
#define CUBIST_NPU_MODEL_WORKSPACE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>

#include "npu_model/pages.h"

namespace cubist {

class WorkspacePool {
 public:
  // Room for `bytes`, *capacity bytes in all. Throws std::bad_alloc.
  std::byte* Take(std::int64_t bytes, std::int64_t* capacity);
  // What was taken, with its capacity.
  void Give(std::byte* data, std::int64_t capacity);

 private:
  // Whether there was memory to remember it.
  bool Keep(std::byte* data, std::int64_t capacity);

  static constexpr std::int64_t kPage = 4096;
  static constexpr std::align_val_t kAlignment{kHugePage};  // Large workspaces stand on huge pages.
  static constexpr std::int64_t kMaxKept = std::int64_t{1} << 30;
  std::mutex mutex_;
  std::multimap<std::int64_t, std::byte*> free_;
  std::int64_t kept_ = 0;
};

// Of all calls.
WorkspacePool& Workspaces();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_WORKSPACE_POOL_H_
