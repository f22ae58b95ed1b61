// What every benchmark binary shares: case names, the timed loop, counters, and main().
#ifndef CUBIST_BENCH_SUPPORT_HARNESS_H_
#define CUBIST_BENCH_SUPPORT_HARNESS_H_

#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/support/peaks.h"

namespace cubist::bench {

// The thread counts that every case is registered for: 1, 2 and all that the machine has.
std::vector<int> ThreadCounts();

// Kernel/library/dtype/case/threads:N
std::string CaseName(const std::string& kernel, const std::string& library, const std::string& dtype,
                     const std::string& text, int threads);

// One call of a library on one problem, ready to be timed.
struct Call {
  std::function<void()> run;
  // After the timed loop: empty, or what is wrong with the answer.
  std::function<std::string()> check;
  // After everything: puts the library's waiting threads to sleep, so that they take no time from the next
  // case.
  std::function<void()> rest = {};
};

// Times `call` and reports FLOPS (`flops` per run, unpadded) and of_peak, the share of the highest ceiling of
// `arithmetic` that this process has seen at this thread count; it is measured again, shortly, beside every
// run.
void TimeCompute(benchmark::State& state, int threads, Arithmetic arithmetic, double flops, const Call& call);

// The same where memory bounds the speed at small sizes: of_roofline in addition, the share of
// min(peak, read bandwidth * flops / bytes_read), bandwidth measured beside the run.
void TimeRoofline(benchmark::State& state, int threads, Arithmetic arithmetic, double flops,
                  double bytes_read, const Call& call);

// Times `call` and reports bytes_per_second and of_floor, the share that
//   max(read / read bandwidth, written / write bandwidth, (read + written) / copy bandwidth)
// has of the time; bandwidths are measured just before and just after the loop, and the better ones count.
void TimeMovement(benchmark::State& state, int threads, double bytes_read, double bytes_written,
                  const Call& call);

// Registers one case, timed by the wall clock; the CPU column is the time of all threads together.
void Register(const std::string& name, std::function<void(benchmark::State&)> body);

// Peak/fma/fp32, Peak/dot/bf16, Peak/stream_write, Peak/stream_read and Peak/stream_copy at every thread
// count.
void RegisterPeaks();

// Parses Google Benchmark's flags and runs what is registered. `skip` is a regular expression of cases that
// run only when a filter asks for them; empty for none. Exit status 1 if a case fails or none runs.
int Main(int argc, char** argv, const std::string& skip);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_HARNESS_H_
