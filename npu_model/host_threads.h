// Threads of ours, for calls that say how many they want or that threads stay on their processors.
#ifndef CUBIST_NPU_MODEL_HOST_THREADS_H_
#define CUBIST_NPU_MODEL_HOST_THREADS_H_

#include <tbb/task_arena.h>

namespace cubist {

// An arena of so many threads. With `pin` each stays on a processor of its own while it is there.
tbb::task_arena& ArenaOf(int threads, bool pin);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_THREADS_H_
