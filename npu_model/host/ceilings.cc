#include "npu_model/host/ceilings.h"

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <new>
#include <string>

#include "npu_model/host/tile_ops.h"
#include "npu_model/parallel.h"

namespace cubist {
namespace {

// The first of several repetitions are slow, and a neighbour may meet a few; where one takes long fewer do.
constexpr int kRepetitions = 8, kFewestRepetitions = 3;
constexpr double kEnoughSeconds = 0.25;
constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;

template <class Body>
double Seconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int ThreadCount(int threads) { return threads > 0 ? threads : oneapi::tbb::info::default_concurrency(); }

// Runs body(0) .. body(count - 1) on the threads of the arena, each as a task of its own, so that a thread
// which starts late or loses its core takes fewer.
template <class Body>
void ForEach(oneapi::tbb::task_arena& arena, std::int64_t count, const Body& body) {
  arena.execute([&] { ForEachPart(count, 1, [&](std::int64_t i, std::int64_t) { body(i); }); });
}

// Operations per second of a loop that does 2 * loop(rounds) of them.
double MeasurePeak(std::int64_t (*loop)(std::int64_t rounds), int threads) {
  std::int64_t rounds = 1024;
  while (Seconds([&] { loop(rounds); }) < 100e-6) rounds *= 2;

  oneapi::tbb::task_arena arena(ThreadCount(threads));
  const std::int64_t chunks = 48 * ThreadCount(threads);
  double best = 0;
  for (int i = 0; i < kRepetitions; ++i) {
    std::atomic<std::int64_t> multiply_adds = 0;
    const double seconds = Seconds([&] {
      ForEach(arena, chunks,
              [&](std::int64_t) { multiply_adds.fetch_add(loop(rounds), std::memory_order_relaxed); });
    });
    best = std::max(best, 2.0 * static_cast<double>(multiply_adds) / seconds);
  }
  return best;
}

std::int64_t StreamBytes() {
  const std::int64_t wanted = std::clamp<std::int64_t>(4 * CacheBytes(3), 128 << 20, std::int64_t{1} << 30);
  return RoundUp(wanted, kChunkBytes);
}

struct AlignedDelete {
  void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{4096}); }
};
using Buffer4K = std::unique_ptr<std::byte[], AlignedDelete>;

// Random bits from splitmix64, written by the threads that will use them.
Buffer4K RandomBuffer(oneapi::tbb::task_arena& arena, std::int64_t bytes) {
  Buffer4K buffer(
      static_cast<std::byte*>(::operator new[](static_cast<std::size_t>(bytes), std::align_val_t{4096})));
  ForEach(arena, bytes / kChunkBytes, [&](std::int64_t chunk) {
    auto* words = reinterpret_cast<std::uint64_t*>(buffer.get() + chunk * kChunkBytes);
    auto state = static_cast<std::uint64_t>(chunk + 1) << 32;
    for (std::int64_t i = 0; i < kChunkBytes / 8; ++i) {
      state += 0x9e3779b97f4a7c15u;
      std::uint64_t z = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      words[i] = z ^ (z >> 31);
    }
  });
  return buffer;
}

}  // namespace

double MeasurePeakFma(int threads) { return MeasurePeak(BestCubeOps().peak_fma, threads); }

double MeasurePeakDotBf16(int threads) {
  const CubeOps& ops = BestCubeOps();
  return ops.native_bf16 ? MeasurePeak(ops.peak_dot_bf16, threads) : 0;
}

class MemoryCeilings::Streams {
 public:
  explicit Streams(int threads) : arena_(ThreadCount(threads)), buffer_(RandomBuffer(arena_, bytes_)) {}

  double Read() {
    std::atomic<std::uint64_t> checksum = 0;
    return BestRate(bytes_, 1, [&](std::int64_t at, std::int64_t size) {
      checksum.fetch_xor(ops_.stream_read(buffer_.get() + at, size), std::memory_order_relaxed);
    });
  }
  // To the second half alone, so that the first stays random for copies.
  double Write() {
    return BestRate(half_, 1, [&](std::int64_t at, std::int64_t size) {
      const auto pattern = 0x3c6ef372fe94f82bu + static_cast<std::uint64_t>(at);
      ops_.stream_write(buffer_.get() + half_ + at, size, pattern);
    });
  }
  // From the first half to the second.
  double Copy() {
    return BestRate(half_, 2, [&](std::int64_t at, std::int64_t size) {
      const std::byte* const source = buffer_.get() + at;
      ops_.copy(buffer_.get() + half_ + at, size, source, size, 1, size, /*stream=*/true);
    });
  }

 private:
  // Best rate of body(first byte, bytes) over the chunks of `bytes` bytes, each byte counting `weight` times.
  template <class Body>
  double BestRate(std::int64_t bytes, double weight, const Body& body) {
    double best = 0, total = 0;
    for (int i = 0; i < kRepetitions && (i < kFewestRepetitions || total < kEnoughSeconds); ++i) {
      const double seconds = Seconds([&] {
        ForEach(arena_, bytes / kChunkBytes,
                [&](std::int64_t chunk) { body(chunk * kChunkBytes, kChunkBytes); });
      });
      total += seconds;
      best = std::max(best, weight * static_cast<double>(bytes) / seconds);
    }
    return best;
  }

  const VectorOps& ops_ = BestVectorOps();
  const std::int64_t bytes_ = StreamBytes(), half_ = bytes_ / 2 / kChunkBytes * kChunkBytes;
  oneapi::tbb::task_arena arena_;
  Buffer4K buffer_;
};

MemoryCeilings::MemoryCeilings(int threads) : streams_(std::make_unique<Streams>(threads)) {}
MemoryCeilings::~MemoryCeilings() = default;

void MemoryCeilings::Measure(Ceilings* ceilings) {
  ceilings->read_bytes_per_s = streams_->Read();
  ceilings->write_bytes_per_s = streams_->Write();
  ceilings->copy_bytes_per_s = streams_->Copy();
}

Ceilings MeasureCeilings(int threads, MemoryCeilings& memory) {
  Ceilings ceilings{.fma_flops = MeasurePeakFma(threads), .dot_bf16_flops = MeasurePeakDotBf16(threads)};
  memory.Measure(&ceilings);
  return ceilings;
}

Ceilings MeasureCeilings(int threads) {
  MemoryCeilings memory(threads);
  return MeasureCeilings(threads, memory);
}

double MemoryFloorSeconds(const Ceilings& ceilings, double bytes_read, double bytes_written) {
  return std::max({bytes_read / ceilings.read_bytes_per_s, bytes_written / ceilings.write_bytes_per_s,
                   (bytes_read + bytes_written) / ceilings.copy_bytes_per_s});
}

std::int64_t CacheBytes(int level) {
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    std::ifstream level_file(folder + "level"), type_file(folder + "type"), size_file(folder + "size");
    int its_level = 0;
    std::int64_t kib = 0;
    std::string type;
    if (!(level_file >> its_level) || !(type_file >> type)) return 0;
    if (its_level == level && type != "Instruction") return size_file >> kib ? kib << 10 : 0;  // "32768K"
  }
}

}  // namespace cubist
