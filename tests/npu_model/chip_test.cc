#include "npu_model/chip.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace cubist {
namespace {

std::vector<const ChipSpec*> AllChips() {
  return {&Ascend910B1(), &Ascend910B2(), &Ascend910B3(), &Ascend910B4()};
}

// Every constant of a chip, with its name.
std::vector<std::pair<std::string, const Constant*>> ConstantsOf(const ChipSpec& chip) {
  std::vector<std::pair<std::string, const Constant*>> all = {
      {"clock_hz", &chip.clock_hz},
      {"mmad.fp32_passes", &chip.mmad.fp32_passes},
      {"mmad.narrow_passes", &chip.mmad.narrow_passes},
      {"mmad.head_idle", &chip.mmad.head_idle},
      {"mmad.head_busy", &chip.mmad.head_busy},
      {"vector.head", &chip.vector.head},
      {"vector.least", &chip.vector.least},
      {"scalar.issue", &chip.scalar.issue},
      {"scalar.issue_flag", &chip.scalar.issue_flag},
      {"scalar.step", &chip.scalar.step},
      {"scalar.read", &chip.scalar.read},
      {"scalar.read_gm", &chip.scalar.read_gm},
      {"scalar.update", &chip.scalar.update},
      {"memory.hbm_bytes_per_s", &chip.memory.hbm_bytes_per_s},
      {"memory.l2_read_bytes_per_s", &chip.memory.l2_read_bytes_per_s},
      {"memory.cube_read_bytes_per_s", &chip.memory.cube_read_bytes_per_s},
      {"memory.found_dirty", &chip.memory.found_dirty},
      {"memory.turn_around", &chip.memory.turn_around},
      {"memory.same_line", &chip.memory.same_line},
      {"memory.l2_write_bytes_per_s", &chip.memory.l2_write_bytes_per_s},
      {"memory.core_read_bytes_per_cycle", &chip.memory.core_read_bytes_per_cycle},
      {"memory.core_write_bytes_per_cycle", &chip.memory.core_write_bytes_per_cycle},
      {"memory.core_miss_bytes_per_cycle", &chip.memory.core_miss_bytes_per_cycle},
      {"sync.flag", &chip.sync.flag},
      {"sync.execute", &chip.sync.execute},
      {"sync.start_spread_s", &chip.sync.start_spread_s},
      {"sync.cross_core", &chip.sync.cross_core},
      {"sync.barrier_s", &chip.sync.barrier_s},
      {"sync.launch_s", &chip.sync.launch_s},
      {"sync.mixed_launch_s", &chip.sync.mixed_launch_s},
  };
  for (int p = 0; p < kPathCount; ++p) {
    const PathSpec& path = chip.path(static_cast<Path>(p));
    all.emplace_back(std::string(NameOf(static_cast<Path>(p))) + " startup", &path.startup);
    all.emplace_back(std::string(NameOf(static_cast<Path>(p))) + " rate", &path.bytes_per_cycle);
    all.emplace_back(std::string(NameOf(static_cast<Path>(p))) + " gap", &path.gap);
  }
  for (int op = 0; op < kVectorOpCount; ++op) {
    all.emplace_back("vector op " + std::to_string(op), &chip.vector_cycles(static_cast<VectorOp>(op)));
  }
  return all;
}

TEST(ChipTest, EveryConstantHasAValueAUnitAndASource) {
  for (const ChipSpec* chip : AllChips()) {
    for (const auto& [name, constant] : ConstantsOf(*chip)) {
      SCOPED_TRACE(chip->name + " " + name);
      EXPECT_GT(constant->value, 0);
      EXPECT_GE(constant->spread, 0);
      EXPECT_GT(std::strlen(constant->unit), 0u);
      EXPECT_GT(std::strlen(constant->source), 0u);
    }
  }
}

TEST(ChipTest, BuffersHaveTheSizesOfTheCore) {
  for (const ChipSpec* chip : AllChips()) {
    SCOPED_TRACE(chip->name);
    EXPECT_EQ(chip->buffer(Buffer::kL1).capacity, 512 * 1024);
    EXPECT_EQ(chip->buffer(Buffer::kL0A).capacity, 64 * 1024);
    EXPECT_EQ(chip->buffer(Buffer::kL0B).capacity, 64 * 1024);
    EXPECT_EQ(chip->buffer(Buffer::kL0C).capacity, 128 * 1024);
    EXPECT_EQ(chip->buffer(Buffer::kBT).capacity, 1024);
    EXPECT_EQ(chip->buffer(Buffer::kUB).capacity, 192 * 1024);
    EXPECT_TRUE(chip->pipes_overlap);
    EXPECT_EQ(chip->vector_per_cube, 2);
    EXPECT_EQ(chip->concurrent_cores, chip->cube_cores);
  }
}

TEST(ChipTest, ChipsDifferInCoresClockL2AndHbm) {
  const auto peak_tflops = [](const ChipSpec& chip) {
    const auto& mmad = chip.mmad;
    const double macs = static_cast<double>(mmad.m_step * mmad.n_step * mmad.k_bytes / 2);
    return 2 * macs * chip.cube_cores * chip.clock_hz / 1e12;
  };
  EXPECT_NEAR(peak_tflops(Ascend910B1()), 363.7, 0.1);
  EXPECT_NEAR(peak_tflops(Ascend910B2()), 353.9, 0.1);
  EXPECT_NEAR(peak_tflops(Ascend910B3()), 294.9, 0.1);
  EXPECT_NEAR(peak_tflops(Ascend910B4()), 245.8, 0.1);
  EXPECT_EQ(Ascend910B3().memory.l2_bytes, std::int64_t{192} << 20);
  EXPECT_EQ(Ascend910B4().memory.l2_bytes, std::int64_t{96} << 20);
  EXPECT_LT(Ascend910B4().memory.hbm_bytes_per_s, 0.6 * Ascend910B3().memory.hbm_bytes_per_s);
}

TEST(ChipTest, SlotsAreWholeFractalsAndBlocks) {
  const ChipSpec& chip = Ascend910B1();
  // L1 and L0: rows to 16, columns to 32 bytes, then the buffer's alignment.
  EXPECT_EQ(chip.SlotBytes(Buffer::kL1, DType::kBF16, 128, 64), 128 * 64 * 2);
  EXPECT_EQ(chip.SlotBytes(Buffer::kL1, DType::kF16, 17, 17), 32 * 32 * 2);
  EXPECT_EQ(chip.SlotBytes(Buffer::kL0A, DType::kF32, 1, 1), 512);
  EXPECT_EQ(chip.SlotBytes(Buffer::kL0B, DType::kF32, 16, 9), 16 * 16 * 4);
  EXPECT_EQ(chip.SlotBytes(Buffer::kL0C, DType::kF32, 17, 3), 32 * 16 * 4);
  EXPECT_EQ(chip.SlotBytes(Buffer::kBT, DType::kF32, 1, 17), 128);
  // UB: every row to 32 bytes.
  EXPECT_EQ(chip.SlotBytes(Buffer::kUB, DType::kF32, 3, 1), 3 * 32);
  EXPECT_EQ(chip.SlotBytes(Buffer::kUB, DType::kBF16, 2, 17), 2 * 64);
  EXPECT_EQ(chip.SlotBytes(Buffer::kUB, DType::kI64, 1, 5), 64);
  EXPECT_EQ(chip.SlotBytes(Buffer::kUB, DType::kF32, 0, 5), 0);
}

TEST(ChipTest, PackedOperandsAreFractalPanels) {
  const ChipSpec& chip = Ascend910B1();
  EXPECT_EQ(chip.PackedStep(Role::kB, DType::kBF16), 16);
  EXPECT_EQ(chip.PackedStep(Role::kA, DType::kF32), 8);
  EXPECT_EQ(chip.PackedBytes(Role::kB, DType::kBF16, 17, 33), 3 * 32 * 32);
}

TEST(ChipTest, EveryNameIsFoundInAnyCase) {
  const std::vector<std::string> names = ChipNames();
  ASSERT_EQ(names.size(), 4u);
  for (const std::string& name : names) {
    ChipSpec chip;
    ASSERT_TRUE(FindChip(name, &chip).ok());
    EXPECT_EQ(chip.name, name);
  }
  ChipSpec chip;
  ASSERT_TRUE(FindChip("Ascend910B3", &chip).ok());
  EXPECT_EQ(chip.name, "ascend910b3");
  EXPECT_EQ(chip.cube_cores, 20);
}

TEST(ChipTest, UnknownNameListsTheKnownAndTheNearest) {
  ChipSpec chip;
  chip.name = "untouched";
  const Status status = FindChip("ascend91b4", &chip);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(chip.name, "untouched");
  EXPECT_NE(status.message().find("'ascend91b4'"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("nearest is ascend910b4"), std::string::npos) << status.message();
  for (const std::string& name : ChipNames()) {
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace cubist
