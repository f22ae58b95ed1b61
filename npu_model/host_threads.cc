#include "npu_model/host_threads.h"

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

// Keeps each thread of an arena on a processor of its own while it is there, from the process's `first` one on.
class Pinner : public tbb::task_scheduler_observer {
 public:
  Pinner(tbb::task_arena& arena, std::size_t first)
      : task_scheduler_observer(arena), processors_(Processors()), first_(first) {
    observe(!processors_.empty());
  }
  ~Pinner() override { observe(false); }

  void on_scheduler_entry(bool) override {
    const auto slot = static_cast<std::size_t>(std::max(tbb::this_task_arena::current_thread_index(), 0));
    pinned_.emplace(processors_[(first_ + slot) % processors_.size()]);
  }
  void on_scheduler_exit(bool) override { pinned_.reset(); }

 private:
  std::vector<int> processors_;
  std::size_t first_;
  static thread_local std::optional<PinnedThread> pinned_;
};
thread_local std::optional<PinnedThread> Pinner::pinned_;

// Arenas of one kind.
struct Arenas {
  std::vector<std::unique_ptr<HostThreads>> all;
  std::vector<HostThreads*> free;  // Has room for all.
};

std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

struct HostThreads {
  HostThreads(int threads, bool pin, Arenas* home) : arena(threads), home(home) {
    if (pin) pinner.emplace(arena, home->all.size() * static_cast<std::size_t>(threads));
  }
  tbb::task_arena arena;
  Arenas* home;
  std::optional<Pinner> pinner;
};

PinnedThread::PinnedThread(int processor) {
  if (processor < 0 || processor >= CPU_SETSIZE || sched_getaffinity(0, sizeof before_, &before_) != 0)
    return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(processor), &set);
  pinned_ = sched_setaffinity(0, sizeof set, &set) == 0;
}

PinnedThread::~PinnedThread() {
  if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
}

// Kept: making one costs more than a small product. Never destroyed: calls may outlive static destruction.
LentArena::LentArena(int threads, bool pin) {
  static auto* const kinds = new std::map<std::pair<int, bool>, Arenas>;
  const std::scoped_lock lock(Mutex());
  Arenas& arenas = (*kinds)[{threads, pin}];
  if (arenas.free.empty()) {
    arenas.all.reserve(arenas.all.size() + 1);
    arenas.free.reserve(arenas.all.size() + 1);
    arenas.all.push_back(std::make_unique<HostThreads>(threads, pin, &arenas));
    arenas.free.push_back(arenas.all.back().get());
  }
  threads_ = arenas.free.back();
  arenas.free.pop_back();
}

LentArena::~LentArena() {
  const std::scoped_lock lock(Mutex());
  threads_->home->free.push_back(threads_);
}

tbb::task_arena& LentArena::operator*() const { return threads_->arena; }

}  // namespace cubist
