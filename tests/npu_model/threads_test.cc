// Where a host's calls run: in arenas of the caller, on threads that stay or not, inside each other.
#include <gtest/gtest.h>
#include <sched.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/host_threads.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

// Runs body() on every core of a launch; many cores, so that every thread takes part.
template <class Body>
void OnCores(const Device& device, Body body) {
  Launch launch(device, "threads_test");
  launch.OnVectorCores(64, [&](auto&) { body(); });
  EXPECT_TRUE(launch.Finish(nullptr).ok());
}

// The threads that a call meets, each kept busy for a while.
std::set<std::thread::id> ThreadsOf(const Device& device) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  OnCores(device, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::scoped_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return threads;
}

int ProcessorsAllowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  return CPU_COUNT(&set);
}

TEST(ThreadsTest, ACallTakesAsManyThreadsAsItIsGiven) {
  EXPECT_EQ(ThreadsOf(Host({.threads = 1})), std::set{std::this_thread::get_id()});
  EXPECT_LE(ThreadsOf(Host({.threads = 2})).size(), 2u);
  EXPECT_EQ(Host({.threads = 3}).concurrency(), 3);
}

TEST(ThreadsTest, MoreThreadsThanAMachineHasAreRefused) {
  EXPECT_TRUE(Host({.threads = kMostThreads}).status().ok());
  const Device host = Host({.threads = kMostThreads + 1});
  Launch launch(host, "threads_test");
  launch.OnVectorCores(64, [](auto&) { ADD_FAILURE(); });
  EXPECT_EQ(launch.Finish(nullptr).message(), "host: threads is 1025, needs 0 to 1024");
}

TEST(ThreadsTest, ACallersArenaIsNotLeft) {
  tbb::global_control more(tbb::global_control::max_allowed_parallelism, 4);
  tbb::task_arena arena(2);
  for (const int threads : {0, 2, 3, 4}) {
    std::set<std::thread::id> seen;
    int concurrency = 0;
    arena.execute([&] {
      seen = ThreadsOf(Host({.threads = threads}));
      concurrency = Host().concurrency();
    });
    EXPECT_LE(seen.size(), 2u) << threads << " threads asked for";
    EXPECT_EQ(concurrency, 2);
  }
  tbb::task_arena alone(1);
  alone.execute([] { EXPECT_EQ(ThreadsOf(Host({.threads = 4})), std::set{std::this_thread::get_id()}); });
}

// A task that waits for its call must not begin another of the caller's tasks, whose locks may be those that it holds.
TEST(ThreadsTest, ACallInsideATaskTakesNoOtherTask) {
  tbb::global_control more(tbb::global_control::max_allowed_parallelism, 4);
  thread_local int depth = 0;
  std::atomic<int> nested = 0;
  tbb::task_arena arena(4);
  arena.execute([&] {
    tbb::parallel_for(0, 64, [&](int) {
      if (++depth > 1) ++nested;
      OnCores(Host(), [] { std::this_thread::sleep_for(std::chrono::microseconds(20)); });
      --depth;
    });
  });
  EXPECT_EQ(nested, 0);
}

TEST(ThreadsTest, PinnedThreadsStayOnOneProcessorForTheCall) {
  const int before = ProcessorsAllowed();
  for (const int threads : {0, 1, 2}) {
    std::atomic<int> loose = 0;
    OnCores(Host({.threads = threads, .pin = true}), [&] { loose += ProcessorsAllowed() != 1; });
    EXPECT_EQ(loose, 0) << threads << " threads";
    EXPECT_EQ(ProcessorsAllowed(), before);
  }
  OnCores(Host({.threads = 2}), [&] { EXPECT_EQ(ProcessorsAllowed(), before); });
}

// Each has threads of its own: all are inside at once.
TEST(ThreadsTest, CallersDoNotWaitForEachOther) {
  constexpr int kCallers = 4;
  std::atomic<int> inside = 0;
  std::atomic<bool> all_met = true;
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&] {
      std::atomic<bool> entered = false;
      OnCores(Host({.threads = 2}), [&] {
        if (!entered.exchange(true)) ++inside;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (inside < kCallers && all_met) {
          std::this_thread::yield();
          if (std::chrono::steady_clock::now() > end) all_met = false;
        }
      });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(all_met);
}

TEST(ThreadsTest, AnArenaIsLentToOneCallAtATime) {
  const tbb::task_arena* first = nullptr;
  {
    const LentArena one(2, false), other(2, false), wider(3, false), pinned(2, true);
    EXPECT_EQ((std::set{&*one, &*other, &*wider, &*pinned}.size()), 4u);
    first = &*one;
  }
  EXPECT_EQ(&*LentArena(2, false), first);
}

TEST(ThreadsTest, CallsFromManyThreadsMeetAllTheirCores) {
  std::vector<std::thread> callers;
  std::atomic<int> cores = 0;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&, i] {
      for (int call = 0; call < 20; ++call)
        OnCores(Host({.threads = i % 3, .pin = i == 5}), [&] { ++cores; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  int each = 0;
  OnCores(Host({.threads = 1}), [&] { ++each; });
  EXPECT_EQ(cores, 6 * 20 * each);
}

}  // namespace
}  // namespace cubist
