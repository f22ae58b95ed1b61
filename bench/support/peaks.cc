#include "bench/support/peaks.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <utility>

#include "bench/support/random_data.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/host/tile_ops.h"

namespace cubist::bench {
namespace {

constexpr std::int64_t kChunk = std::int64_t{1} << 20;

// Two buffers that live as long as the process, so that measuring again costs no page faults.
struct StreamBuffers {
  const std::int64_t bytes = BeyondLastCache(4);
  Bytes source = RandomBits(bytes, 1), target = RandomBits(bytes, 2);
};

StreamBuffers& Buffers() {
  static StreamBuffers buffers;
  return buffers;
}

// Best rate of three passes of body(offset) over all chunks.
template <class Body>
double BestRate(int threads, std::int64_t bytes, const Body& body) {
  oneapi::tbb::task_arena arena(threads);
  double best = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    arena.execute([&] {
      oneapi::tbb::parallel_for(
          oneapi::tbb::blocked_range<std::int64_t>(0, bytes / kChunk),
          [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
            for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i * kChunk);
          },
          oneapi::tbb::simple_partitioner());
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / seconds.count());
  }
  return best;
}

}  // namespace

std::int64_t BeyondLastCache(std::int64_t times) {
  const std::int64_t last_level = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1 where the system does not say
  return std::clamp<std::int64_t>(times * last_level, 256 << 20, std::int64_t{1} << 30) / kChunk * kChunk;
}

Arithmetic ArithmeticOf(DType dtype) {
  return dtype == DType::kBF16 && BestCubeOps().native_bf16 ? Arithmetic::kDotBf16 : Arithmetic::kFma;
}

double HighestPeak(Arithmetic arithmetic, int threads) {
  static std::map<std::pair<Arithmetic, int>, double> highest;
  const auto measure = arithmetic == Arithmetic::kFma ? MeasurePeakFma : MeasurePeakDotBf16;
  double& peak = highest[{arithmetic, threads}];
  for (int times = peak == 0 ? 4 : 1; times > 0; --times) peak = std::max(peak, measure(threads));
  return peak;
}

double MeasureReadBandwidth(int threads) {
  StreamBuffers& buffers = Buffers();
  const VectorOps& ops = BestVectorOps();
  std::atomic<std::uint64_t> checksum = 0;  // Keeps the reads alive.
  return BestRate(threads, buffers.bytes, [&](std::int64_t at) {
    checksum.fetch_xor(ops.stream_read(buffers.source.data() + at, kChunk), std::memory_order_relaxed);
  });
}

Bandwidth MeasureBandwidth(int threads) {
  StreamBuffers& buffers = Buffers();
  const VectorOps& ops = BestVectorOps();
  char* const source = buffers.source.data();
  char* const target = buffers.target.data();
  Bandwidth rate;
  rate.read = MeasureReadBandwidth(threads);
  rate.write = BestRate(threads, buffers.bytes, [&](std::int64_t at) {
    ops.stream_write(target + at, kChunk, 0x3c6ef372fe94f82bu + static_cast<std::uint64_t>(at));
  });
  rate.copy = 2 * BestRate(threads, buffers.bytes, [&](std::int64_t at) {
                ops.copy(target + at, kChunk, source + at, kChunk, 1, kChunk, /*stream=*/true);
              });
  return rate;
}

}  // namespace cubist::bench
