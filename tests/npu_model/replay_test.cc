#include "npu_model/trace/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"

namespace cubist {
namespace {

using testing::AddPhase;
using testing::RecordOf;
using testing::RoundChip;
using testing::TensorOf;
using trace::Record;
using trace::Replay;

Constant Value(double value) { return {value, "", Basis::kGuessed, 0, "chosen for the test"}; }

// Timelines drawn by hand: constants of RoundChip.

// A core with one block of (m, n) of a product, (m, k) * (k, n), in bf16.
template <class Core>
void OneProduct(Core& core, std::int64_t m, std::int64_t k, std::int64_t n) {
  const GmTensor a = TensorOf(0, DType::kBF16, m, k), b = TensorOf(1, DType::kBF16, k, n);
  Ring<Buffer::kL1, BF16> a_l1(core, "a1", m, k, 1, Role::kA), b_l1(core, "b1", k, n, 1, Role::kB);
  Ring<Buffer::kL0A, BF16> a_l0(core, "a0", m, k, 1, Role::kA);
  Ring<Buffer::kL0B, BF16> b_l0(core, "b0", k, n, 1, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c0", m, n, 1);
  const auto a1 = a_l1.Next(m, k);
  const auto b1 = b_l1.Next(k, n);
  const auto a0 = a_l0.Next(m, k);
  const auto b0 = b_l0.Next(k, n);
  core.Load(a1, MatrixOf(a));
  core.Load(b1, MatrixOf(b));
  core.Load(a0, a1);
  core.Load(b0, b1);
  core.Mmad(c_l0.Next(m, n), a0, b0, Accumulate::kNo);
}

TEST(ReplayTest, FiveInstructionsInAChain) {
  const Profile p =
      Replay(RecordOf<TraceAiCore>(RoundChip(), 1, [](auto& core) { OneProduct(core, 16, 16, 16); }), true);
  // Issue takes a cycle each; each transfer is 512 bytes: 10 + 8 cycles, and startups overlap; a flag takes 5.
  //   MTE2: [1, 19] and, its startup hidden, [19, 27];  MTE1: from 19 + 5, complete at 42, and from 33 (the gap is
  //   1) complete at 51;  M: from 51 + 5, one step, the next may follow at 59, complete at 56 + 4 + 1.
  ASSERT_EQ(p.timeline->size(), 5u);
  const std::vector<std::pair<double, double>> expected = {{1, 19}, {24, 33}, {19, 27}, {33, 42}, {56, 59}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR((*p.timeline)[i].start_us * 1e3, expected[i].first, 1e-9) << i;
    EXPECT_NEAR((*p.timeline)[i].end_us * 1e3, expected[i].second, 1e-9) << i;
  }
  EXPECT_DOUBLE_EQ(p.cycles, 61);
  EXPECT_DOUBLE_EQ(p.time_s, 61e-9);
  EXPECT_EQ(p.instructions, 5);
  EXPECT_EQ(p.cores_used, 1);
  EXPECT_EQ(p.macs, 16 * 16 * 16);
}

// Loads three tiles of 4096 bytes through a ring and works on each.
double LoadAndWork(int stages) {
  const GmTensor source = TensorOf(0, DType::kF32, 3, 1024);
  return Replay(RecordOf<TraceVectorCore>(RoundChip(), 1,
                                          [&](auto& core) {
                                            Ring<Buffer::kUB, float> ring(core, "x", 1, 1024, stages);
                                            for (Range row : Split(3, 1)) {
                                              const auto x = ring.Next(1, 1024);
                                              core.Load(x, MatrixOf(source).Rows(row));
                                              core.MulScalar(x, x, 2.0f);
                                            }
                                          }),
                false)
      .cycles;
}

TEST(ReplayTest, OneStageStallsAndTwoOverlap) {
  // A load takes 10 + 64 cycles, the work 16 * 4 and is complete 6 later, a flag 5.
  // One stage:  load [1, 75], work [80, 150], load [155, 229], work [234, 304], load [309, 383], work [388,
  // 458].
  EXPECT_DOUBLE_EQ(LoadAndWork(1), 458);
  // Two stages: loads [1, 75] [75, 139], work [80, 144]; the third load waits for it: [155, 229]. Work [144,
  // 208], [234, 298], complete at 304.
  EXPECT_DOUBLE_EQ(LoadAndWork(2), 304);
  // Three:      loads [1, 75] [75, 139] [139, 203], work [80, 144] [144, 208] [208, 272], complete at 278.
  EXPECT_DOUBLE_EQ(LoadAndWork(3), 278);
}

TEST(ReplayTest, MmadsBehindEachOtherHaveAShortHead) {
  const ChipSpec chip = RoundChip();
  const auto cycles = [&](int count) {
    return Replay(RecordOf<TraceAiCore>(chip, 1,
                                        [&](auto& core) {
                                          Ring<Buffer::kL0A, BF16> a(core, "a0", 128, 64, 1, Role::kA);
                                          Ring<Buffer::kL0B, BF16> b(core, "b0", 64, 256, 1, Role::kB);
                                          Ring<Buffer::kL0C, float> c(core, "c0", 128, 256, 1);
                                          const auto a0 = a.Next(128, 64);
                                          const auto b0 = b.Next(64, 256);
                                          const auto c0 = c.Next(128, 256);
                                          for (int i = 0; i < count; ++i)
                                            core.Mmad(c0, a0, b0, Accumulate::kYes);
                                        }),
                  false)
        .cycles;
  };
  EXPECT_DOUBLE_EQ(cycles(1), 1 + 4 + 8 * 4 * 16);
  EXPECT_DOUBLE_EQ(cycles(3), 1 + 4 + 2 * 2 + 3 * 8 * 4 * 16);
}

TEST(ReplayTest, VectorWorkIsCountedInRepeats) {
  const auto cycles = [](auto&& kernel) {
    return Replay(RecordOf<TraceVectorCore>(RoundChip(), 1, kernel), false).cycles - 1;  // less the issue
  };
  // A tile as wide as its slot is one stretch of bytes: 4 rows of 24 floats are 384 bytes, 2 repeats.
  EXPECT_DOUBLE_EQ(cycles([](auto& core) {
                     Ring<Buffer::kUB, float> ring(core, "x", 4, 24, 1);
                     core.Fill(ring.Next(4, 24), 0.0f);
                   }),
                   6 + 2 * 4);
  // A narrower one goes row by row,
  EXPECT_DOUBLE_EQ(cycles([](auto& core) {
                     Ring<Buffer::kUB, float> ring(core, "x", 4, 64, 1);
                     core.Fill(ring.Next(4, 24), 0.0f);
                   }),
                   6 + 4 * 4);
  // or eight rows at a time where a row is one block.
  EXPECT_DOUBLE_EQ(cycles([](auto& core) {
                     Ring<Buffer::kUB, float> ring(core, "x", 16, 64, 1);
                     core.Fill(ring.Next(16, 1), 0.0f);
                   }),
                   6 + 2 * 4);
  // A column is spread to blocks before it meets a tile: 16 rows are 2 repeats more, and a head.
  EXPECT_DOUBLE_EQ(cycles([](auto& core) {
                     Ring<Buffer::kUB, float> ring(core, "x", 16, 64, 1), columns(core, "c", 16, 1, 1);
                     const auto x = ring.Next(16, 64);
                     core.Mul(x, x, columns.Next(16, 1));
                   }),
                   6 + 16 * 4 + 6 + 2 * 4);
  // A row sum goes from 64 columns to 8 to 1: 16 repeats, then 16 rows of one block.
  EXPECT_DOUBLE_EQ(cycles([](auto& core) {
                     Ring<Buffer::kUB, float> ring(core, "x", 16, 64, 1), columns(core, "c", 16, 1, 1);
                     core.RowSum(columns.Next(16, 1), ring.Next(16, 64));
                   }),
                   (6 + 16 * 4) + (6 + 2 * 4));
}

TEST(ReplayTest, VectorInstructionsOverlapUnlessABarrierStandsBetween) {
  const auto cycles = [](bool dependent) {
    return Replay(RecordOf<TraceVectorCore>(RoundChip(), 1,
                                            [&](auto& core) {
                                              Ring<Buffer::kUB, float> ring(core, "x", 1, 64, 2);
                                              const auto x = ring.Next(1, 64), y = ring.Next(1, 64);
                                              core.Fill(x, 0.0f);
                                              core.Fill(dependent ? x : y, 0.0f);
                                            }),
                  false)
        .cycles;
  };
  EXPECT_DOUBLE_EQ(cycles(false), 1 + 4 + 6 + 4);  // A repeat is 4 cycles, and the result is there 6 later.
  EXPECT_DOUBLE_EQ(cycles(true), 1 + 6 + 4 + 6 + 4);
}

TEST(ReplayTest, TheScalarUnitStandsStillInFrontOfAFullQueue) {
  // Three fills of 64 cycles, then the start of a load. With room for one instruction in front of V the third
  // fill is issued when the second one has left the queue, at 1 + 64, and the load a cycle later.
  const GmTensor source = TensorOf(0, DType::kF32, 1, 64);
  const auto load_starts = [&](int depth) {
    ChipSpec chip = RoundChip();
    chip.scalar.queue_depth = depth;
    const Profile p = Replay(RecordOf<TraceVectorCore>(chip, 1,
                                                       [&](auto& core) {
                                                         Ring<Buffer::kUB, float> x(core, "x", 1, 1024, 3),
                                                             y(core, "y", 1, 64, 1);
                                                         for (int i = 0; i < 3; ++i)
                                                           core.Fill(x.Next(1, 1024), 0.0f);
                                                         core.Load(y.Next(1, 64), MatrixOf(source));
                                                       }),
                             true);
    return p.timeline->back().start_us * 1e3;
  };
  EXPECT_NEAR(load_starts(32), 4, 1e-9);
  EXPECT_NEAR(load_starts(1), 1 + 64 + 1 + 1, 1e-9);
}

// The record of LoadAndWork with a ring of one stage, and its plan without the k-th WaitFlag.
TEST(ReplayTest, AWaitLeftOutIsATimeSaved) {
  const GmTensor source = TensorOf(0, DType::kF32, 3, 1024);
  const Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 1, 1024, 1);
    for (Range row : Split(3, 1)) {
      const auto x = ring.Next(1, 1024);
      core.Load(x, MatrixOf(source).Rows(row));
      core.MulScalar(x, x, 2.0f);
    }
  });
  const sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
  EXPECT_DOUBLE_EQ(Replay(record, plan).cycles, 458);
  // Load, work, load, ..: without the first wait of MTE2 for V, the second load follows the first: [75, 139].
  // Work [144, 208], load 3 from 214 + 5, complete at 293; work from 298, complete at 368.
  sync::Plan without = plan;
  auto& ops = without.phases[0].cores[0].ops;
  const auto wait = std::find_if(ops.begin(), ops.end(), [](const sync::SyncOp& op) {
    return op.kind == sync::Kind::kWaitFlag && op.pipe == Pipe::kMte2;
  });
  ASSERT_NE(wait, ops.end());
  const std::uint8_t id = wait->id;
  ops.erase(wait);
  ops.erase(std::find_if(ops.begin(), ops.end(), [&](const sync::SyncOp& op) {
    return op.kind == sync::Kind::kSetFlag && op.pipe == Pipe::kV && op.id == id;
  }));
  EXPECT_DOUBLE_EQ(Replay(record, without).cycles, 368);
}

TEST(ReplayTest, TheScalarUnitHoldsUpItsOwnSideOnly) {
  std::vector<std::int32_t> ids(64, 0);
  const GmTensor tensor = TensorOf(0, DType::kI32, 1, 64, ids.data());
  const Profile p =
      Replay(RecordOf<TraceAiCore>(RoundChip(), 1,
                                   [&](auto& core) {
                                     auto& vector = core.vectors()[0];
                                     Ring<Buffer::kUB, std::int32_t> ring(vector, "ids", 1, 64, 1);
                                     Ring<Buffer::kUB, float> x(core.vectors()[0], "x", 1, 64, 1);
                                     const auto id = ring.Next(1, 64);
                                     vector.Load(id, MatrixOf(tensor));
                                     vector.ReadScalar(id, 0);
                                     vector.Fill(x.Next(1, 64), 0.0f);
                                     OneProduct(core, 16, 16, 16);
                                   }),
             true);
  // The load is issued at 1 and takes 10 + 8 (a line for its 256 bytes); the read waits for the flag: [24,
  // 27]; then the fill is issued: [28, 38]. The Cube core has nothing to do with it.
  std::map<std::string, TimelineSlice> slices;
  for (const TimelineSlice& slice : *p.timeline) slices[slice.name] = slice;
  EXPECT_NEAR(slices["Load UB"].end_us * 1e3, 1 + 10 + 256.0 / 64 * 2, 1e-9);
  EXPECT_NEAR(slices["ReadScalar"].start_us * 1e3, 24, 1e-9);
  EXPECT_NEAR(slices["ReadScalar"].end_us * 1e3, 27, 1e-9);
  EXPECT_NEAR(slices["Fill"].start_us * 1e3, 28, 1e-9);
  EXPECT_NEAR(slices["Mmad"].end_us * 1e3, 59, 1e-9);
}

// Steps of a kernel's own, and an integer of GM, which no pipe reads: what comes behind them is issued when they are done.
TEST(ReplayTest, TheScalarUnitIsAsLongAtItsOwnWorkAsItTakes) {
  std::vector<std::int32_t> ids(64, 0);
  GmTensor input = TensorOf(2, DType::kI32, 1, 64, ids.data());
  input.writable = false;
  const Profile p = Replay(RecordOf<TraceAiCore>(RoundChip(), 1,
                                                 [&](auto& core) {
                                                   core.Spend(0);
                                                   core.Spend(5);
                                                   core.ReadScalar(MatrixOf(input), 3);
                                                   OneProduct(core, 16, 16, 16);
                                                 }),
                           true);
  std::map<std::string, TimelineSlice> slices;
  for (const TimelineSlice& slice : *p.timeline) slices[slice.name] = slice;
  EXPECT_EQ(p.instructions, 7);
  EXPECT_NEAR(slices["Spend"].start_us * 1e3, 0, 1e-9);
  EXPECT_NEAR(slices["Spend"].end_us * 1e3, 5 * 4, 1e-9);
  EXPECT_NEAR(slices["ReadScalar"].end_us * 1e3, 20 + 7, 1e-9);
  EXPECT_DOUBLE_EQ(p.cycles, 27 + 61);  // A product alone takes 61.
}

TEST(ReplayTest, AHandOverWaitsForTheOtherCore) {
  const Profile p =
      Replay(RecordOf<TraceAiCore>(RoundChip(), 1,
                                   [](auto& core) {
                                     Ring<Buffer::kL0C, float> acc(core, "acc", 16, 32, 1);
                                     Ring<Buffer::kUB, float> s(core.vectors()[0], "s", 16, 32, 1);
                                     core.vectors()[0].Move(s.Next(16, 32), acc.Next(16, 32));
                                   }),
             true);
  // FIX [1, 1 + 10 + 2048 / 64]; cross-core flag 100; MTE2 another 42.
  ASSERT_EQ(p.timeline->size(), 2u);
  EXPECT_NEAR((*p.timeline)[0].end_us * 1e3, 43, 1e-9);
  EXPECT_NEAR((*p.timeline)[1].start_us * 1e3, 143, 1e-9);
  EXPECT_DOUBLE_EQ(p.cycles, 185);
  EXPECT_EQ(p.workspace_bytes, 2048);
  EXPECT_DOUBLE_EQ(p.l2_hit_rate, 1);  // What was just written is read from L2.
}

TEST(ReplayTest, PhasesFollowALaunchAndABarrier) {
  ChipSpec chip = RoundChip();
  chip.sync.launch_s = Value(1e-6), chip.sync.barrier_s = Value(2e-6);
  Record record = RecordOf<TraceAiCore>(chip, 1, [](auto& core) { OneProduct(core, 16, 16, 16); });
  AddPhase<TraceAiCore>(record, 2, [](auto& core) { OneProduct(core, 16, 16, 16); });
  const Profile p = Replay(record, true);
  EXPECT_DOUBLE_EQ(p.cycles, 1000 + 61 + 2000 + 61);
  EXPECT_EQ(p.cores_used, 2);
  EXPECT_EQ(p.bound, "launch");
  double first_of_second = 1e9;
  for (const TimelineSlice& slice : *p.timeline) {
    if (slice.core == 1) first_of_second = std::min(first_of_second, slice.start_us);
  }
  EXPECT_NEAR(first_of_second, 3.062, 1e-9);
}

TEST(ReplayTest, CubeAndVectorCoresTogetherAreLaunchedLater) {
  ChipSpec chip = RoundChip();
  chip.sync.launch_s = Value(1e-6), chip.sync.mixed_launch_s = Value(4e-6);
  const auto product = [](auto& core) { OneProduct(core, 16, 16, 16); };
  const auto load = [](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 1, 16, 1);
    core.Load(x.Next(1, 16), MatrixOf(TensorOf(0, DType::kF32, 1, 16)));
  };
  const double alone = Replay(RecordOf<TraceAiCore>(chip, 1, product), false).cycles;
  EXPECT_DOUBLE_EQ(alone, 1000 + 61);
  EXPECT_LT(Replay(RecordOf<TraceVectorCore>(chip, 1, load), false).cycles, 2000);
  Record phases = RecordOf<TraceAiCore>(chip, 1, product);
  AddPhase<TraceVectorCore>(phases, 1, load);
  EXPECT_GT(Replay(phases, false).cycles, alone + 4000);
  const Profile p = Replay(RecordOf<TraceAiCore>(chip, 1,
                                                 [&](auto& core) {
                                                   product(core);
                                                   load(core.vectors()[0]);
                                                 }),
                           true);
  EXPECT_DOUBLE_EQ(p.cycles, 5000 + 61);
  for (const TimelineSlice& slice : *p.timeline) EXPECT_GE(slice.start_us, 5);
}

// Whatever time is allowed, a replay tells the time or that it is more.
TEST(ReplayTest, GivesUpOnlyWhatTakesLonger) {
  const GmTensor a = TensorOf(0, DType::kBF16, 64, 512), b = TensorOf(1, DType::kBF16, 512, 64);
  const Record record = RecordOf<TraceAiCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kL1, BF16> a1(core, "a1", 64, 64, 2, Role::kA), b1(core, "b1", 64, 64, 2, Role::kB);
    Ring<Buffer::kL0A, BF16> l0a(core, "a0", 64, 64, 2, Role::kA);
    Ring<Buffer::kL0B, BF16> l0b(core, "b0", 64, 64, 2, Role::kB);
    Ring<Buffer::kL0C, float> l0c(core, "c0", 64, 64, 1);
    const auto sum = l0c.Next(64, 64);
    for (Range part : Split(512, 64)) {
      const auto x = a1.Next(64, 64), y = b1.Next(64, 64);
      core.Load(x, MatrixOf(a).Cols(part)), core.Load(y, MatrixOf(b).Rows(part));
      const auto to_a = l0a.Next(64, 64);
      const auto to_b = l0b.Next(64, 64);
      core.Load(to_a, x), core.Load(to_b, y);
      core.Mmad(sum, to_a, to_b, part.begin > 0 ? Accumulate::kYes : Accumulate::kNo);
    }
  });
  const sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
  const double time_s = Replay(record, plan).time_s;
  for (const double share : {0.0, 0.3, 0.9, 0.999}) {
    EXPECT_TRUE(std::isinf(Replay(record, plan, {.give_up_s = share * time_s}).time_s)) << share;
  }
  for (const double share : {1.0, 1.001, 3.0}) {
    EXPECT_EQ(Replay(record, plan, {.give_up_s = share * time_s}).time_s, time_s) << share;
  }
}

TEST(ReplayTest, AnEmptyRecordTakesTheLaunch) {
  Record record;
  record.chip = Ascend910B2();
  const Profile p = Replay(record, true);
  EXPECT_DOUBLE_EQ(p.time_s, record.chip.sync.launch_s);
  EXPECT_EQ(p.instructions, 0);
  EXPECT_EQ(p.bound, "launch");
}

}  // namespace
}  // namespace cubist
