// Loops whose turns are independent, on the threads of the caller's arena.
#ifndef CUBIST_NPU_MODEL_PARALLEL_H_
#define CUBIST_NPU_MODEL_PARALLEL_H_

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace cubist {

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer takes all that a oneTBB built without it orders for races. So it is shown threads that it knows.
template <class Body>
void ForEachPart(std::int64_t count, std::int64_t grain, const Body& body) {
  const std::int64_t parts = count / grain + (count % grain != 0);
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto work = [&] {
    try {
      for (std::int64_t part = next++; part < parts; part = next++)
        body(part * grain, std::min((part + 1) * grain, count));
    } catch (...) {
      const std::scoped_lock lock(mutex);
      thrown = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;  // They join, also where there is no memory for one more.
    for (std::int64_t t = 1; t < std::min<std::int64_t>(parts, 3); ++t) others.emplace_back(work);
    work();
  }
  if (thrown) std::rethrow_exception(thrown);
}

// Not by oneTBB: what it keeps of a thread is freed when the thread ends and given to the next that comes to it, in an order
// that ThreadSanitizer is not shown either. The threads above take no tasks but their own.
template <class Body>
void Isolated(const Body& body) {
  body();
}
#else
// body(begin, end) for parts of [0, count), each of `grain` but for the last, and each a task: a thread that starts late
// or loses its core takes fewer.
template <class Body>
void ForEachPart(std::int64_t count, std::int64_t grain, const Body& body) {
  using Parts = oneapi::tbb::blocked_range<std::int64_t>;
  oneapi::tbb::parallel_for(
      Parts(0, count / grain + (count % grain != 0)),
      [&](const Parts& parts) {
        for (std::int64_t part = parts.begin(); part < parts.end(); ++part)
          body(part * grain, std::min((part + 1) * grain, count));
      },
      oneapi::tbb::simple_partitioner());
}

// body(), in which a thread that waits for others takes none of the caller's tasks: they may hold the caller's locks.
template <class Body>
void Isolated(const Body& body) {
  oneapi::tbb::this_task_arena::isolate(body);
}
#endif

// body(0) .. body(count - 1).
template <class Body>
void ForEach(std::size_t count, const Body& body) {
  ForEachPart(static_cast<std::int64_t>(count), 1,
              [&](std::int64_t i, std::int64_t) { body(static_cast<std::size_t>(i)); });
}

// merge(.. merge(first, part(0, grain)) .., part(.., count)): in order, so that any number of threads gives one result.
template <class T, class Part, class Merge>
T ReduceParts(std::int64_t count, std::int64_t grain, T first, const Part& part, const Merge& merge) {
  std::vector<T> results(static_cast<std::size_t>(count / grain + (count % grain != 0)));
  ForEachPart(count, grain, [&](std::int64_t begin, std::int64_t end) {
    results[static_cast<std::size_t>(begin / grain)] = part(begin, end);
  });
  for (T& result : results) first = merge(std::move(first), std::move(result));
  return first;
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PARALLEL_H_
