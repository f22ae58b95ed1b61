// What a model's profile of a call says of its traffic, and what must hold of any profile.
#ifndef CUBIST_TESTS_KERNELS_TRAFFIC_H_
#define CUBIST_TESTS_KERNELS_TRAFFIC_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/tuning.h"
#include "tests/kernels/kernel_test.h"
#include "tiling/fields.h"

namespace cubist::testing {

// The model without data; a call of `shape` leaves the tiling of its choice in `tiling`.
template <class Shape, class Tiling>
Device NpuThatTells(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  EXPECT_TRUE(IsOk(Choose(chip, shape, tiling)));
  auto listening = std::make_shared<Tuning>();
  listening->on_choice = [chip, shape, tiling](const TilingChoice& met) {
    EXPECT_TRUE(IsOk(ParseTiling(chip, shape, met.chosen, tiling)));
  };
  return Npu(chip, {.with_data = false, .tuning = std::move(listening)});
}

inline std::int64_t Bytes(const Profile& profile, Path path) {
  return profile.path_bytes[static_cast<std::size_t>(path)];
}

using Traffic = std::map<Path, std::int64_t>;

// Every path carries what is expected, those that are not named nothing.
inline void ExpectTraffic(const Profile& profile, const Traffic& expected) {
  std::int64_t read = 0, written = 0;
  for (int p = 0; p < kPathCount; ++p) {
    const Path path = static_cast<Path>(p);
    const auto found = expected.find(path);
    const std::int64_t bytes = found == expected.end() ? 0 : found->second;
    EXPECT_EQ(Bytes(profile, path), bytes) << NameOf(path);
    if (path == Path::kGmToL1 || path == Path::kGmToL1Nd2Nz || path == Path::kGmToUb) read += bytes;
    if (path == Path::kL0CToGm || path == Path::kL1ToGm || path == Path::kUbToGm) written += bytes;
  }
  EXPECT_EQ(profile.gm_read, read);
  EXPECT_EQ(profile.gm_written, written);
}

// Bytes of an operand tile: fractals of 16 rows by 32 bytes.
inline std::int64_t FractalBytes(std::int64_t rows, std::int64_t cols, DType dtype) {
  return RoundUp(rows, 16) * RoundUp(cols * SizeOf(dtype), 32);
}

// What must hold of a profile whatever the kernel.
inline void ExpectSane(const ChipSpec& chip, const Profile& p) {
  EXPECT_EQ(p.chip, chip.name);
  EXPECT_GT(p.instructions, 0);
  EXPECT_GE(p.cores_used, 1);
  EXPECT_GT(p.time_s, chip.sync.launch_s);
  EXPECT_NEAR(p.cycles, p.time_s * chip.clock_hz, 1e-6 * p.cycles);
  for (int i = 0; i < kPipeCount; ++i) {
    const auto& busy = p.busy[static_cast<std::size_t>(i)];
    for (double share : {busy.cube_side, busy.vector_side}) {
      EXPECT_GE(share, 0) << NameOf(static_cast<Pipe>(i));
      EXPECT_LE(share, 1) << NameOf(static_cast<Pipe>(i));
    }
  }
  for (double share : {p.cube_utilisation, p.vector_utilisation, p.mte_utilisation, p.l2_hit_rate}) {
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
  }
  EXPECT_GT(p.mte_utilisation, 0);
  if (p.macs > 0) {
    EXPECT_GT(p.cube_utilisation, 0);
  }
  // No faster than the chip: every byte passes L2, every product the Cubes.
  const auto d = [](std::int64_t x) { return static_cast<double>(x); };
  EXPECT_GE(p.time_s, d(p.gm_read) / chip.memory.l2_read_bytes_per_s);
  EXPECT_GE(p.time_s, d(p.gm_written) / chip.memory.l2_write_bytes_per_s);
  EXPECT_GE(p.time_s, d(p.gm_read) * (1 - p.l2_hit_rate) / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s * (1 + 1e-9), p.hbm_bytes / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s * chip.clock_hz * chip.cube_cores, d(p.macs) / (16 * 16 * 16));
  EXPECT_FALSE(p.bound.empty());
  EXPECT_FALSE(p.verdict.empty());
  EXPECT_EQ(p.timeline, nullptr);
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_TRAFFIC_H_
