#include "npu_model/host/ceilings.h"

#include <gtest/gtest.h>

#include "npu_model/host/tile_ops.h"

namespace cubist {
namespace {

TEST(CeilingsTest, TheMemoryFloorIsTheSlowestOfThreeLimits) {
  const Ceilings ceilings{.read_bytes_per_s = 40, .write_bytes_per_s = 20, .copy_bytes_per_s = 32};
  EXPECT_DOUBLE_EQ(MemoryFloorSeconds(ceilings, 80, 0), 2.5) << "copy: 80 / 32";
  EXPECT_DOUBLE_EQ(MemoryFloorSeconds(ceilings, 10, 100), 5) << "write: 100 / 20";
  EXPECT_DOUBLE_EQ(MemoryFloorSeconds(ceilings, 0, 0), 0);
  const Ceilings slow_reads{.read_bytes_per_s = 10, .write_bytes_per_s = 20, .copy_bytes_per_s = 32};
  EXPECT_DOUBLE_EQ(MemoryFloorSeconds(slow_reads, 80, 10), 8) << "read: 80 / 10";
}

// No machine does less than 100 MFLOP/s or 100 MB/s, and none does 1 PFLOP/s or 10 TB/s on one thread.
TEST(CeilingsTest, MeasuresWhatAMachineCanDo) {
  const Ceilings ceilings = MeasureCeilings(1);
  EXPECT_GT(ceilings.fma_flops, 1e8);
  EXPECT_LT(ceilings.fma_flops, 1e15);
  EXPECT_GT(ceilings.bf16_flops(), 0.5 * ceilings.fma_flops) << "native bf16 is no slower, but for noise";
  EXPECT_LT(ceilings.bf16_flops(), 1e15);
  for (double rate : {ceilings.read_bytes_per_s, ceilings.write_bytes_per_s, ceilings.copy_bytes_per_s}) {
    EXPECT_GT(rate, 1e8);
    EXPECT_LT(rate, 1e13);
  }
}

// One ceiling, not two measurements of it: shares of bf16 and of fp32 would differ by the noise between them.
TEST(CeilingsTest, WidenedBf16HasTheCeilingOfFp32) {
  const Ceilings widened{.fma_flops = 2e11}, native{.fma_flops = 2e11, .dot_bf16_flops = 4e11};
  EXPECT_EQ(widened.bf16_flops(), 2e11);
  EXPECT_EQ(native.bf16_flops(), 4e11);
  EXPECT_EQ(MeasurePeakDotBf16(1) > 0, BestCubeOps().native_bf16);
}

TEST(CacheBytesTest, OuterCachesAreLarger) {
  for (int level : {2, 3}) {
    if (CacheBytes(level) == 0) continue;  // Containers may hide it.
    EXPECT_GT(CacheBytes(level), CacheBytes(level - 1));
  }
  EXPECT_EQ(CacheBytes(9), 0);
}

}  // namespace
}  // namespace cubist
