#include "npu_model/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

// A chip of round buffers.
ChipSpec SmallChip() {
  ChipSpec chip = Ascend910B1();
  chip.name = "small";
  const auto set = [&](Buffer buffer, std::int64_t capacity, std::int64_t alignment) {
    chip.buffers[static_cast<std::size_t>(buffer)] = {capacity, capacity, alignment};
  };
  set(Buffer::kL1, 8192, 32);
  set(Buffer::kL0A, 2048, 512);
  set(Buffer::kL0B, 2048, 512);
  set(Buffer::kL0C, 4096, 64);
  set(Buffer::kBT, 256, 64);
  set(Buffer::kUB, 1024, 32);
  return chip;
}

std::vector<Slot> Place(Arena& arena, const char* owner, Buffer buffer, DType dtype, std::int64_t rows,
                        std::int64_t cols, int stages, int lane = -1) {
  std::vector<Slot> slots(static_cast<std::size_t>(stages));
  arena.Place({buffer, Role::kRows, dtype, owner, rows, cols, stages}, lane, slots.data());
  return slots;
}

TEST(ArenaTest, SlotsFollowOneAnotherAligned) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  // A row of 9 floats is two blocks of 32 bytes; three rows are 192 bytes.
  const auto first = Place(arena, "first", Buffer::kUB, DType::kF32, 3, 9, 2, 0);
  const auto second = Place(arena, "second", Buffer::kUB, DType::kBF16, 1, 1, 3, 0);
  EXPECT_EQ(first[0].address, 0);
  EXPECT_EQ(first[0].bytes, 192);
  EXPECT_EQ(first[1].address, 192);
  EXPECT_EQ(second[0].address, 384);
  EXPECT_EQ(second[0].bytes, 32);
  EXPECT_EQ(second[2].address, 448);
  EXPECT_EQ(arena.finding(), "");
}

TEST(ArenaTest, EverySlotIsAlignedInEveryBufferOfEveryChip) {
  for (const ChipSpec* chip : {&Ascend910B1(), &Ascend910B4(), &HostChip()}) {
    Arena arena(*chip);
    for (Buffer buffer : {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kBT, Buffer::kUB}) {
      const int lane = buffer == Buffer::kUB ? 0 : -1;
      std::int64_t end = 0;
      for (std::int64_t cols : {1, 7, 16, 33}) {
        for (const Slot& slot : Place(arena, "x", buffer, DType::kF32, 1, cols, 2, lane)) {
          EXPECT_EQ(slot.address % chip->buffer(buffer).alignment, 0) << chip->name << " " << NameOf(buffer);
          EXPECT_EQ(slot.address, end) << chip->name << " " << NameOf(buffer);
          EXPECT_GE(slot.bytes, cols * 4);
          end = slot.address + slot.bytes;
        }
      }
    }
    EXPECT_EQ(arena.finding(), "");
  }
}

TEST(ArenaTest, SlotsAreNumberedAcrossBuffers) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  const auto l1 = Place(arena, "l1", Buffer::kL1, DType::kBF16, 16, 16, 2);
  const auto ub = Place(arena, "ub", Buffer::kUB, DType::kF32, 1, 8, 1, 1);
  EXPECT_EQ(l1[0].id, 0);
  EXPECT_EQ(l1[1].id, 1);
  EXPECT_EQ(ub[0].id, 2);
  EXPECT_EQ(l1[0].lane, -1);
  EXPECT_EQ(ub[0].lane, 1);
  EXPECT_EQ(ub[0].address, 0);  // Buffers are filled independently.
}

TEST(ArenaTest, AnExactFitPasses) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  Place(arena, "half", Buffer::kUB, DType::kF32, 4, 32, 1, 0);   // 512 bytes.
  Place(arena, "rest", Buffer::kUB, DType::kF32, 1, 128, 1, 0);  // 512 more.
  Place(arena, "acc", Buffer::kL0C, DType::kF32, 32, 32, 1);     // All of L0C.
  Place(arena, "none", Buffer::kUB, DType::kF32, 0, 128, 2, 0);  // No bytes fit a full buffer.
  EXPECT_EQ(arena.finding(), "");
}

TEST(ArenaTest, OneByteBeyondIsAFinding) {
  ChipSpec chip = SmallChip();
  chip.buffers[static_cast<std::size_t>(Buffer::kUB)].capacity = 1023;
  Arena arena(chip);
  Place(arena, "half", Buffer::kUB, DType::kF32, 4, 32, 1, 0);
  EXPECT_EQ(arena.finding(), "");
  Place(arena, "rest", Buffer::kUB, DType::kF32, 1, 128, 1, 0);
  EXPECT_NE(arena.finding().find("ends 1 bytes beyond UB (1023 bytes) of small"), std::string::npos)
      << arena.finding();
}

TEST(ArenaTest, TheFindingIsAMapOfTheBuffer) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  Place(arena, "elsewhere", Buffer::kL1, DType::kF32, 16, 16, 1);
  Place(arena, "other_lane", Buffer::kUB, DType::kF32, 1, 64, 1, 1);
  Place(arena, "scores", Buffer::kUB, DType::kF32, 2, 64, 1, 0);
  Place(arena, "weights", Buffer::kUB, DType::kBF16, 3, 64, 2, 0);
  EXPECT_EQ(
      arena.finding(),
      "ring 'weights' needs 768 bytes (2 x 3 x 64 bf16), which ends 256 bytes beyond UB (1024 bytes) of "
      "small\n"
      "  UB map, bytes:\n"
      "  [        0,      512)  scores, 1 slot\n"
      "  [      512,     1280)  weights, 2 slots\n");
}

TEST(ArenaTest, TheFirstRingBeyondIsTheFinding) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  Place(arena, "large", Buffer::kL0A, DType::kBF16, 64, 64, 1);
  const std::string finding = arena.finding();
  EXPECT_NE(finding.find("'large'"), std::string::npos) << finding;
  const auto later = Place(arena, "later", Buffer::kL0A, DType::kBF16, 16, 16, 1);
  Place(arena, "another", Buffer::kUB, DType::kF32, 100, 100, 1, 0);
  EXPECT_EQ(arena.finding(), finding);
  EXPECT_EQ(later[0].address, 8192);  // Beyond the buffer, and apart from every other slot.
}

TEST(ArenaTest, EachVectorCoreHasItsOwnUb) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  for (int lane = 0; lane < 2; ++lane) {
    EXPECT_EQ(Place(arena, "all", Buffer::kUB, DType::kF32, 8, 32, 1, lane)[0].address, 0);
    EXPECT_EQ(arena.finding(), "") << "lane " << lane;
  }
  Place(arena, "more", Buffer::kUB, DType::kF32, 1, 1, 1, 1);
  EXPECT_NE(arena.finding().find("[     1024,     1056)  more"), std::string::npos) << arena.finding();
}

TEST(ArenaTest, TheFindingNamesEveryOwnerOfALongList) {
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  for (int i = 0; i < 20; ++i)
    Place(arena, i % 2 == 0 ? "even" : "odd", Buffer::kUB, DType::kF32, 1, 8, 1, 0);
  Place(arena, "last", Buffer::kUB, DType::kF32, 1, 256, 1, 0);
  EXPECT_NE(arena.finding().find("[      608,      640)  odd"), std::string::npos) << arena.finding();
  EXPECT_NE(arena.finding().find("[      640,     1664)  last"), std::string::npos) << arena.finding();
}

TEST(ArenaDeathTest, ARingNeedsStagesAndASize) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const ChipSpec chip = SmallChip();
  Arena arena(chip);
  EXPECT_DEATH(Place(arena, "x", Buffer::kL1, DType::kF32, 1, 1, 0), "no stages");
  EXPECT_DEATH(Place(arena, "x", Buffer::kL1, DType::kF32, -1, 1, 1), "negative size");
}

// ---- Through a launch: a kernel whose rings take `rows` and `cols`, in UB and in L0A.

template <AiCore Core>
void TakeBuffers(Core& core, std::int64_t ub_rows, std::int64_t l0a_rows) {
  [[maybe_unused]] const Ring<Buffer::kL0A, BF16> left(core, "left_l0", l0a_rows, 64, 2, Role::kA);
  [[maybe_unused]] const Ring<Buffer::kUB, float> rows(core.vectors()[0], "rows_ub", ub_rows, 64, 2);
}

Status LaunchOn(const Device& device, std::int64_t ub_rows, std::int64_t l0a_rows) {
  Launch launch(device, "take");
  launch.OnAiCores(2, [&](auto& core) { TakeBuffers(core, ub_rows, l0a_rows); });
  Profile profile;
  return launch.Finish(&profile);
}

TEST(ArenaLaunchTest, AKernelThatFitsTheChipRuns) {
  EXPECT_TRUE(LaunchOn(Npu(Ascend910B4()), 384, 256).ok());  // Both buffers exactly full.
  EXPECT_TRUE(LaunchOn(Host(), 384, 256).ok());
}

TEST(ArenaLaunchTest, AKernelThatOverflowsTheChipIsAnError) {
  for (bool with_data : {true, false}) {
    const Device npu = Npu(Ascend910B4(), {.with_data = with_data});
    const Status ub = LaunchOn(npu, 385, 256);
    EXPECT_EQ(ub.code(), StatusCode::kUnsupported);
    EXPECT_NE(ub.message().find("ring 'rows_ub' needs 197120 bytes"), std::string::npos) << ub.message();
    EXPECT_NE(ub.message().find("512 bytes beyond UB (196608 bytes) of ascend910b4"), std::string::npos)
        << ub.message();
    EXPECT_NE(ub.message().find("[        0,   197120)  rows_ub, 2 slots"), std::string::npos)
        << ub.message();

    const Status l0a = LaunchOn(npu, 384, 272);
    EXPECT_EQ(l0a.code(), StatusCode::kUnsupported);
    EXPECT_NE(l0a.message().find("left_l0"), std::string::npos) << l0a.message();
  }
  // The host has plain memory where the NPU has L0A, but not without end.
  const Status host = LaunchOn(Host(), 1, std::int64_t{1} << 40);
  EXPECT_EQ(host.code(), StatusCode::kUnsupported);
  EXPECT_NE(host.message().find("left_l0"), std::string::npos) << host.message();
  EXPECT_NE(host.message().find("of host"), std::string::npos) << host.message();
}

TEST(ArenaLaunchTest, NoPhaseFollowsAnError) {
  for (const Device& device : {Npu(Ascend910B4()), Host()}) {
    Launch launch(device, "take");
    launch.OnAiCores(1, [&](auto& core) { TakeBuffers(core, 1, std::int64_t{1} << 40); });
    bool ran = false;
    launch.OnAiCores(1, [&](auto&) { ran = true; });
    launch.OnVectorCores(1, [&](auto&) { ran = true; });
    Profile profile;
    profile.kernel = "untouched";
    EXPECT_FALSE(launch.Finish(&profile).ok());
    EXPECT_EQ(profile.kernel, "untouched");
    EXPECT_FALSE(ran);
  }
}

}  // namespace
}  // namespace cubist
