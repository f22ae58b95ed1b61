// Ceilings of this machine as this process has seen them.
#ifndef CUBIST_BENCH_SUPPORT_PEAKS_H_
#define CUBIST_BENCH_SUPPORT_PEAKS_H_

#include <cstdint>

#include "npu_model/types.h"

namespace cubist::bench {

enum class Arithmetic { kFma, kDotBf16 };

// What bounds a product of operands of this type: bf16 runs on the dot product where the CPU has one, all
// else is widened to fp32.
Arithmetic ArithmeticOf(DType dtype);

// Measures the ceiling for some tens of milliseconds (longer the first time) and returns the highest value,
// in FLOP/s, that any measurement of this process gave at this thread count.
double HighestPeak(Arithmetic arithmetic, int threads);

// So many times the last-level cache, which may be shared with neighbours: 256 MiB at least and 1 GiB at most, whole MiB.
std::int64_t BeyondLastCache(std::int64_t times);

// Bytes per second to and from memory, random data, buffers larger than the caches.
struct Bandwidth {
  double read = 0;
  double write = 0;  // non-temporal stores
  double copy = 0;   // read and written bytes together
};

// Measures all three now, some tens of milliseconds each.
Bandwidth MeasureBandwidth(int threads);
double MeasureReadBandwidth(int threads);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_PEAKS_H_
