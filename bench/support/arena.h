// Work of a peer on a number of threads.
#ifndef CUBIST_BENCH_SUPPORT_ARENA_H_
#define CUBIST_BENCH_SUPPORT_ARENA_H_

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <cstdint>

namespace cubist::bench {

// body(i) for i < count, side by side.
template <class Body>
void ForEach(oneapi::tbb::task_arena& arena, std::int64_t count, const Body& body) {
  arena.execute([&] {
    oneapi::tbb::parallel_for(oneapi::tbb::blocked_range<std::int64_t>(0, count, 32),
                              [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
                                for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i);
                              });
  });
}

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_ARENA_H_
