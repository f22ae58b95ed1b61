// Threads of ours, for calls that say how many they want or that threads stay on their processors.
#ifndef CUBIST_NPU_MODEL_HOST_THREADS_H_
#define CUBIST_NPU_MODEL_HOST_THREADS_H_

#include <sched.h>
#include <tbb/task_arena.h>

namespace cubist {

// Keeps the thread that makes it on one processor as long as it lives.
class PinnedThread {
 public:
  explicit PinnedThread(int processor = sched_getcpu());
  ~PinnedThread();
  PinnedThread(const PinnedThread&) = delete;
  PinnedThread& operator=(const PinnedThread&) = delete;

 private:
  cpu_set_t before_;
  bool pinned_ = false;
};

struct HostThreads;

// An arena of so many threads, one call's alone as long as this lives: calls from several threads at once share none.
// With `pin` each of its threads stays on a processor of its own while it is there.
class LentArena {
 public:
  LentArena(int threads, bool pin);
  ~LentArena();
  LentArena(const LentArena&) = delete;
  LentArena& operator=(const LentArena&) = delete;

  tbb::task_arena& operator*() const;
  tbb::task_arena* operator->() const { return &**this; }

 private:
  HostThreads* threads_;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_THREADS_H_
