#include "npu_model/host_threads.h"

#include <sched.h>
#include <tbb/task_scheduler_observer.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cubist {
namespace {

// The processors that this process may run on.
std::vector<int> Processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> processors;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) processors.push_back(i);
  }
  return processors;
}

// Keeps each thread of an arena on a processor of its own while it is there.
class Pinner : public tbb::task_scheduler_observer {
 public:
  explicit Pinner(tbb::task_arena& arena) : task_scheduler_observer(arena), processors_(Processors()) {
    observe(!processors_.empty());
  }
  ~Pinner() override { observe(false); }

  void on_scheduler_entry(bool) override {
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    const auto slot = static_cast<std::size_t>(std::max(tbb::this_task_arena::current_thread_index(), 0));
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<std::size_t>(processors_[slot % processors_.size()]), &set);
    pinned_ = sched_setaffinity(0, sizeof set, &set) == 0;
  }
  void on_scheduler_exit(bool) override {
    if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
    pinned_ = false;
  }

 private:
  std::vector<int> processors_;
  static thread_local cpu_set_t before_;
  static thread_local bool pinned_;
};
thread_local cpu_set_t Pinner::before_;
thread_local bool Pinner::pinned_ = false;

// Threads of ours for calls that name their count.
struct HostThreads {
  HostThreads(int threads, bool pin) : arena(threads) {
    if (pin) pinner.emplace(arena);
  }
  tbb::task_arena arena;
  std::optional<Pinner> pinner;
};

}  // namespace

// Made once: making one costs more than a small product. Never destroyed: calls may outlive static destruction.
tbb::task_arena& ArenaOf(int threads, bool pin) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::pair<int, bool>, std::unique_ptr<HostThreads>>;
  const std::scoped_lock lock(mutex);
  auto& made = (*all)[{threads, pin}];
  if (made == nullptr) made = std::make_unique<HostThreads>(threads, pin);
  return made->arena;
}

}  // namespace cubist
