// Ceilings: what this machine can do at most, measured in this process, to hold timings against.
#ifndef CUBIST_NPU_MODEL_HOST_CEILINGS_H_
#define CUBIST_NPU_MODEL_HOST_CEILINGS_H_

#include <cstdint>
#include <memory>

#include "npu_model/export.h"

namespace cubist {

struct Ceilings {
  double fma_flops = 0;          // fp32 multiply-adds in registers, two operations each, per second
  double dot_bf16_flops = 0;     // the same with native bf16 dot products; 0 where the CPU has none
  double read_bytes_per_s = 0;   // plain loads from memory
  double write_bytes_per_s = 0;  // non-temporal stores to memory
  double copy_bytes_per_s = 0;   // both at once; bytes read plus bytes written

  // What bounds products of bf16, which is widened to fp32 where the CPU cannot multiply it.
  double bf16_flops() const { return dot_bf16_flops > 0 ? dot_bf16_flops : fma_flops; }
};

// Each is the best of several repetitions of some milliseconds, in a oneTBB arena of `threads` threads (0:
// all that the machine has).
CUBIST_COMMAND_EXPORT double MeasurePeakFma(int threads);
CUBIST_COMMAND_EXPORT double MeasurePeakDotBf16(int threads);  // 0 where the CPU has no such product

// Measures the rates of memory likewise, as often as is asked for, over a buffer that it keeps: four times the last-level
// cache, at most 1 GiB, filled with random bits (non-temporal stores of zeros are two to three times as fast as those of
// anything else). To fill it takes longer than to measure.
class CUBIST_COMMAND_EXPORT MemoryCeilings {
 public:
  explicit MemoryCeilings(int threads);
  ~MemoryCeilings();
  MemoryCeilings(const MemoryCeilings&) = delete;
  MemoryCeilings& operator=(const MemoryCeilings&) = delete;

  // Sets read_, write_ and copy_bytes_per_s.
  void Measure(Ceilings* ceilings);

 private:
  class Streams;
  std::unique_ptr<Streams> streams_;
};

// All of them; `memory` is of as many threads.
CUBIST_COMMAND_EXPORT Ceilings MeasureCeilings(int threads, MemoryCeilings& memory);
CUBIST_COMMAND_EXPORT Ceilings MeasureCeilings(int threads);

// The least time that moving these bytes takes: each direction has its ceiling, and both together have one.
CUBIST_COMMAND_EXPORT double MemoryFloorSeconds(const Ceilings& ceilings, double bytes_read,
                                                double bytes_written);

// Bytes of the data or unified cache of a level (1 to 3) that the first core sees, from Linux's sysfs; 0 where
// it does not say. (On some AMD processors sysconf adds up L3 caches that this core does not share.)
CUBIST_COMMAND_EXPORT std::int64_t CacheBytes(int level);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_CEILINGS_H_
