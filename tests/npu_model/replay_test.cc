#include "npu_model/trace/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/flows.h"
#include "npu_model/trace/l2_cache.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"

namespace cubist {
namespace {

using testing::AddPhase;
using testing::RecordOf;
using testing::RoundChip;
using testing::TensorOf;
using trace::Flows;
using trace::L2Cache;
using trace::Record;
using trace::Replay;
using trace::Supply;

Constant Value(double value) { return {value, "", Basis::kGuessed, 0, "chosen for the test"}; }

// ---- Timelines drawn by hand (constants of RoundChip) ----

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

TEST(ReplayTest, AnEmptyRecordTakesTheLaunch) {
  Record record;
  record.chip = Ascend910B2();
  const Profile p = Replay(record, true);
  EXPECT_DOUBLE_EQ(p.time_s, record.chip.sync.launch_s);
  EXPECT_EQ(p.instructions, 0);
  EXPECT_EQ(p.bound, "launch");
}

// ---- Memory ----

TEST(FlowsTest, RatesAreMaxMinFair) {
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(30e9);  // 30 bytes per cycle
  chip.memory.l2_read_bytes_per_s = Value(100e9);
  chip.paths[static_cast<std::size_t>(Path::kGmToUb)].bytes_per_cycle = Value(40);
  chip.paths[static_cast<std::size_t>(Path::kGmToL1)].bytes_per_cycle = Value(10);
  Flows flows(chip);
  // Two misses share HBM at 15 each; one slow path has its 10; two hits get 30 each of the 60 that L2 has
  // left.
  flows.Start(Path::kGmToUb, Supply::kHbm, {15 * 100, 0, 0, 0, 0});
  flows.Start(Path::kGmToUb, Supply::kHbm, {15 * 300, 0, 0, 1, 0});
  flows.Start(Path::kGmToL1, Supply::kL2, {10 * 50, 0, 0, 2, 0});
  flows.Start(Path::kGmToUb, Supply::kL2, {30 * 20, 0, 0, 3, 0});
  flows.Start(Path::kGmToUb, Supply::kL2, {30 * 20, 0, 0, 4, 0});
  const auto expect_end = [&](double time, std::uint32_t core) {
    EXPECT_NEAR(flows.NextEnd(), time, 1e-9);
    flows.AdvanceTo(flows.NextEnd());
    Path path;
    EXPECT_EQ(flows.TakeEnded(&path).core, core);
  };
  expect_end(20, 3);
  expect_end(20, 4);
  expect_end(50, 2);
  expect_end(100, 0);
  expect_end(100 + 15 * 200 / 30.0, 1);  // Alone, it has all of HBM, which is less than its path takes.
  EXPECT_TRUE(std::isinf(flows.NextEnd()));
  EXPECT_NEAR(flows.hbm_limited(), 200, 1e-9);
  EXPECT_NEAR(flows.l2_limited(), 20, 1e-9);
}

// Loads of the Cube cores and stores may fill their ways through L2 at once: the time counts once.
TEST(FlowsTest, TwoFullWaysOfL2AreOneLimit) {
  ChipSpec chip = RoundChip();
  chip.memory.cube_read_bytes_per_s = Value(10e9);  // 10 bytes per cycle
  chip.memory.l2_write_bytes_per_s = Value(10e9);
  for (const Path path : {Path::kGmToL1, Path::kUbToGm})
    chip.paths[static_cast<std::size_t>(path)].bytes_per_cycle = Value(100);
  Flows flows(chip);
  flows.Start(Path::kGmToL1, Supply::kL2, {10 * 50, 0, 0, 0, 0});
  flows.Start(Path::kUbToGm, Supply::kL2, {10 * 80, 0, 0, 1, 0});
  for (int flow = 0; flow < 2; ++flow) {
    flows.AdvanceTo(flows.NextEnd());
    Path path;
    EXPECT_EQ(flows.TakeEnded(&path).core, static_cast<std::uint32_t>(flow));
  }
  EXPECT_NEAR(flows.now(), 80, 1e-9);
  EXPECT_NEAR(flows.l2_limited(), 80, 1e-9);
}

TEST(L2CacheTest, KeepsLinesUntilItIsFull) {
  constexpr std::int64_t kLine = 512, kRun = 8 * kLine;
  L2Cache cache(4 * kRun, kLine, 100 * kRun);
  const auto touch = [&](std::int64_t address, std::int64_t bytes, bool write) {
    L2Cache::Tally tally;
    cache.Touch(address, bytes, write, &tally);
    return std::tuple(tally.lines, tally.missed, tally.written_back);
  };
  EXPECT_EQ(touch(0, 1, false), std::tuple(1, 1, 0));
  EXPECT_EQ(touch(511, 2, false), std::tuple(2, 1, 0));         // Across a line's end.
  EXPECT_EQ(touch(0, 3 * kRun, false), std::tuple(24, 22, 0));  // Two lines of it are there.
  EXPECT_EQ(touch(kRun + 100, kRun, false), std::tuple(9, 0, 0));
  EXPECT_EQ(touch(3 * kRun, kRun, true), std::tuple(8, 8, 0));  // Full now; the last run is changed.
  // Runs 0, 1 and 2 were hit since they came and have another round; the changed one has to go.
  EXPECT_EQ(touch(4 * kRun, kLine, false), std::tuple(1, 1, 8));
  EXPECT_EQ(touch(3 * kRun, kLine, false), std::tuple(1, 1, 0));
  EXPECT_EQ(touch(0, 3 * kRun, false), std::tuple(24, 0, 0));
}

// Every Vector core of `cores` loads `bytes` of its own, `times` times.
Profile ReadApart(const ChipSpec& chip, int cores, std::int64_t bytes, int times) {
  const GmTensor source = TensorOf(0, DType::kF32, cores, bytes / 4);
  return Replay(RecordOf<TraceVectorCore>(
                    chip, cores,
                    [&](auto& core) {
                      Ring<Buffer::kUB, float> ring(core, "x", 1, 16384, 1);
                      for (int time = 0; time < times; ++time) {
                        for (Range part : Split(bytes / 4, 16384)) {
                          const auto row = std::int64_t{core.index()};
                          core.Load(ring.Next(1, part.size()), MatrixOf(source).Block({row, row + 1}, part));
                        }
                      }
                    }),
                false);
}

TEST(ReplayTest, CoresShareHbm) {
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(640e9);  // ten cores' paths
  constexpr std::int64_t kBytes = 1 << 20;
  const double alone = ReadApart(chip, 1, kBytes, 1).cycles;
  EXPECT_DOUBLE_EQ(alone, 1 + 10 + 16 * 65536.0 / 64);
  const Profile many = ReadApart(chip, 40, kBytes, 1);
  EXPECT_GE(many.cycles, 40 * kBytes / 640.0);
  EXPECT_LE(many.cycles, 40 * kBytes / 640.0 * 1.02);
  EXPECT_EQ(many.bound, "HBM");
  EXPECT_NE(many.verdict.find("HBM"), std::string::npos);
  EXPECT_EQ(many.gm_read, 40 * kBytes);
  EXPECT_DOUBLE_EQ(many.l2_hit_rate, 0);
}

TEST(ReplayTest, TheSecondReadHitsL2WhereItFits) {
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(64e9);
  constexpr std::int64_t kBytes = 1 << 20;
  const Profile once = ReadApart(chip, 4, kBytes, 1), twice = ReadApart(chip, 4, kBytes, 2);
  EXPECT_DOUBLE_EQ(twice.l2_hit_rate, 0.5);
  EXPECT_LT(twice.cycles, 1.3 * once.cycles);
  chip.memory.l2_bytes = 2 * kBytes;  // Half of what is read: by the time it is read again it is gone.
  const Profile thrashed = ReadApart(chip, 4, kBytes, 2);
  EXPECT_DOUBLE_EQ(thrashed.l2_hit_rate, 0);
  EXPECT_GT(thrashed.cycles, 1.9 * once.cycles);
}

TEST(ReplayTest, WritesBeyondL2CostHbm) {
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(1e9);
  chip.memory.l2_bytes = 1 << 20;
  const auto cycles = [&](std::int64_t bytes) {
    const GmTensor target = TensorOf(0, DType::kF32, 1, bytes / 4);
    return Replay(RecordOf<TraceVectorCore>(chip, 1,
                                            [&](auto& core) {
                                              Ring<Buffer::kUB, float> ring(core, "x", 1, 16384, 1);
                                              const auto x = ring.Next(1, 16384);
                                              for (Range part : Split(bytes / 4, 16384)) {
                                                core.Store(MatrixOf(target).Cols(part), x);
                                              }
                                            }),
                  false)
        .cycles;
  };
  EXPECT_DOUBLE_EQ(cycles(1 << 20), 1 + 10 + 16 * 1024);  // Stays in L2.
  EXPECT_DOUBLE_EQ(cycles(3 << 20),
                   1 + 10 + 16 * 1024 + 32 * 65536);  // Two thirds push out one each.
}

TEST(ReplayTest, ShortAndMisalignedRowsCostWholeLines) {
  const auto cycles = [](std::int64_t first_col, std::int64_t cols, std::int64_t pitch) {
    const GmTensor source = TensorOf(0, DType::kF32, 16, pitch);
    const Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
      Ring<Buffer::kUB, float> ring(core, "x", 16, cols, 1);
      const Gm view = MatrixOf(source).Cols({first_col, first_col + cols});
      core.Load(ring.Next(16, cols), view);
      core.Load(ring.Next(16, cols), view);  // From L2, so that the port alone counts.
    });
    const Profile p = Replay(record, true);
    const TimelineSlice& again = p.timeline->back();
    return again.end_us * 1e3 - again.start_us * 1e3;  // Its startup is hidden behind the first one.
  };
  constexpr double kLine = 512.0 / 64;
  EXPECT_NEAR(cycles(0, 128, 1024), 16 * kLine, 1e-6);       // 512 bytes: one line each.
  EXPECT_NEAR(cycles(0, 32, 1024), 16 * kLine, 1e-6);        // 128 bytes: a line each.
  EXPECT_NEAR(cycles(0, 96, 1024), 16 * 2 * kLine, 1e-6);    // 384 = 256 + 128.
  EXPECT_NEAR(cycles(64, 128, 1024), 16 * 2 * kLine, 1e-6);  // 256 on either side of a line's end.
  EXPECT_NEAR(cycles(1, 128, 1024), 16 * 4 * kLine, 1e-6);   // 508 = 256 + 128 + 124, and 4.
}

TEST(ReplayTest, TrafficEqualsTheClosedForm) {
  // C (384, 512) = A (384, 256) B (256, 512) by blocks of (128, 256), K by 64; two cores.
  constexpr std::int64_t kM = 384, kN = 512, kK = 256, kBm = 128, kBn = 256, kBk = 64;
  const GmTensor a = TensorOf(0, DType::kBF16, kM, kK), b = TensorOf(1, DType::kBF16, kK, kN),
                 c = TensorOf(2, DType::kF32, kM, kN);
  const Profile p = Replay(
      RecordOf<TraceAiCore>(Ascend910B2(), 2,
                            [&](auto& core) {
                              Ring<Buffer::kL1, BF16> a_l1(core, "a1", kBm, kBk, 2, Role::kA);
                              Ring<Buffer::kL1, BF16> b_l1(core, "b1", kBk, kBn, 2, Role::kB);
                              Ring<Buffer::kL0A, BF16> a_l0(core, "a0", kBm, kBk, 2, Role::kA);
                              Ring<Buffer::kL0B, BF16> b_l0(core, "b0", kBk, kBn, 2, Role::kB);
                              Ring<Buffer::kL0C, float> c_l0(core, "c0", kBm, kBn, 1);
                              for (Range m : Split(kM, kBm)) {
                                for (Range n : Split(kN, kBn)) {
                                  if ((m.begin / kBm + n.begin / kBn) % 2 != core.index()) continue;
                                  const auto acc = c_l0.Next(kBm, kBn);
                                  for (Range k : Split(kK, kBk)) {
                                    const auto a1 = a_l1.Next(kBm, kBk);
                                    const auto b1 = b_l1.Next(kBk, kBn);
                                    const auto a0 = a_l0.Next(kBm, kBk);
                                    const auto b0 = b_l0.Next(kBk, kBn);
                                    core.Load(a1, MatrixOf(a).Block(m, k));
                                    core.Load(b1, MatrixOf(b).Block(k, n));
                                    core.Load(a0, a1);
                                    core.Load(b0, b1);
                                    core.Mmad(acc, a0, b0, k.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
                                  }
                                  core.Store(MatrixOf(c).Block(m, n), acc);
                                }
                              }
                            }),
      false);
  const auto bytes = [&](Path path) { return p.path_bytes[static_cast<std::size_t>(path)]; };
  const std::int64_t loaded = 2 * (kM * kK * (kN / kBn) + kK * kN * (kM / kBm));
  EXPECT_EQ(p.gm_read, loaded);
  EXPECT_EQ(p.gm_written, 4 * kM * kN);
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), loaded);
  EXPECT_EQ(bytes(Path::kL1ToL0A), 2 * kM * kK * (kN / kBn));
  EXPECT_EQ(bytes(Path::kL1ToL0B), 2 * kK * kN * (kM / kBm));
  EXPECT_EQ(bytes(Path::kL0CToGm), 4 * kM * kN);
  EXPECT_EQ(bytes(Path::kGmToUb), 0);
  EXPECT_EQ(p.macs, kM * kN * kK);
  EXPECT_EQ(p.cores_used, 2);
  // Every line of A and B misses once. A line of A holds four steps of K, and the first of them brings it.
  EXPECT_NEAR(p.l2_hit_rate, 1 - 2.0 * (kM * kBk + kK * kN) / static_cast<double>(loaded), 1e-12);
}

// ---- Properties of whatever is recorded ----

// Random work of both sides of an AI core: loads, products, hand-overs, element-wise work, stores, on parts
// of tiles.
template <class Core>
void RandomWork(Core& core, unsigned seed) {
  std::mt19937 random(seed + 977u * static_cast<unsigned>(core.index()));
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(n));
  };
  const auto part = [&](std::int64_t n) {
    const std::int64_t begin = below(n);
    return Range{begin, begin + 1 + below(n - begin)};
  };
  static const GmTensor source = TensorOf(0, DType::kBF16, 512, 512),
                        sums = TensorOf(1, DType::kF32, 512, 512);
  Ring<Buffer::kL1, BF16> a_l1(core, "a1", 64, 64, 2, Role::kA), b_l1(core, "b1", 64, 64, 2, Role::kB);
  Ring<Buffer::kL0A, BF16> a_l0(core, "a0", 64, 64, 2, Role::kA);
  Ring<Buffer::kL0B, BF16> b_l0(core, "b0", 64, 64, 1, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c0", 64, 64, 2);
  auto vectors = core.vectors();
  Ring<Buffer::kUB, float> s0(vectors[0], "s", 32, 64, 2), s1(vectors[1], "s", 32, 64, 1);
  Ring<Buffer::kUB, BF16> p0(vectors[0], "p", 32, 64, 1), p1(vectors[1], "p", 32, 64, 1);
  for (int step = 0; step < 40; ++step) {
    const std::int64_t at = below(448);
    const Range rows{at, at + 64};
    const auto a1 = a_l1.Next(64, 64);
    const auto b1 = b_l1.Next(64, 64);
    core.Load(a1, MatrixOf(source).Block(rows, {0, 64}));
    core.Load(b1, MatrixOf(source).Block({64, 128}, rows));
    const auto acc = c_l0.Next(64, 64);
    for (Range k : Split(64, 16 * (1 + below(3)))) {
      const auto a0 = a_l0.Next(64, k.size());
      const auto b0 = b_l0.Next(k.size(), 64);
      core.Load(a0, a1.Cols(k));
      core.Load(b0, b1.Rows(k));
      core.Mmad(acc, a0, b0, Accumulate::kYes);
    }
    const auto s = below(2) == 0 ? s0.Next(32, 64) : s1.Next(32, 64);
    const int lane = s.slot->lane;
    auto& vector = vectors[static_cast<std::size_t>(lane)];
    vector.Move(s, acc.Rows({32 * lane, 32 * lane + 32}));
    for (int i = 0; i < 4; ++i) {
      const auto piece = s.Part(part(32), part(64));
      vector.Exp(piece, piece);
    }
    const auto p = lane == 0 ? p0.Next(32, 64) : p1.Next(32, 64);
    vector.Cast(p, s);
    if (below(2) == 0) vector.Move(a_l1.Next(32, 64), p);
    if (below(2) == 0) vector.Store(MatrixOf(sums).Block({at, at + 32}, {0, 64}), s);
    if (below(3) == 0) core.Store(MatrixOf(sums).Block(rows, {128, 192}), acc);
  }
}

Record RandomRecord(const ChipSpec& chip, unsigned seed) {
  return RecordOf<TraceAiCore>(chip, 3, [&](auto& core) { RandomWork(core, seed); });
}

TEST(ReplayPropertyTest, NothingStartsBeforeWhatItConflictsWithEnds) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const Record record = RandomRecord(Ascend910B2(), seed);
    const Profile p = Replay(record, true);
    // Slices of a track come in program order, so the n-th instruction of a pipe is its n-th slice.
    std::map<std::tuple<int, int, Pipe>, std::vector<TimelineSlice>> tracks;
    for (const TimelineSlice& slice : *p.timeline)
      tracks[{slice.core, slice.lane, slice.pipe}].push_back(slice);
    for (std::size_t c = 0; c < record.phases[0].cores.size(); ++c) {
      const trace::CoreRecord& core = record.phases[0].cores[c];
      std::map<std::tuple<int, int, Pipe>, std::size_t> next;
      std::vector<TimelineSlice> slices;
      for (const trace::Instr& instr : core.instrs) {
        const std::tuple key(static_cast<int>(c), static_cast<int>(instr.lane), instr.pipe);
        ASSERT_LT(next[key], tracks[key].size());
        slices.push_back(tracks[key][next[key]++]);
      }
      const auto conflict = [&](const trace::Instr& x, const trace::Instr& y) {
        for (const trace::OperandUse u : x.uses) {
          for (const trace::OperandUse v : y.uses) {
            if (!u.used() || !v.used() || (!u.writes() && !v.writes())) continue;
            const trace::Operand &a = core.operands[u.operand()], &b = core.operands[v.operand()];
            if (a.slot == b.slot && a.row_begin < b.row_end && b.row_begin < a.row_end &&
                a.col_begin < b.col_end && b.col_begin < a.col_end) {
              return true;
            }
          }
        }
        return false;
      };
      std::size_t conflicts = 0;
      for (std::size_t j = 0; j < core.instrs.size(); ++j) {
        for (std::size_t i = 0; i < j; ++i) {
          if (!conflict(core.instrs[i], core.instrs[j])) continue;
          ++conflicts;
          ASSERT_LE(slices[i].end_us, slices[j].start_us + 1e-9) << i << " and " << j << " of core " << c;
        }
      }
      EXPECT_GT(conflicts, core.instrs.size());
    }
  }
}

TEST(ReplayPropertyTest, TimeCoversTheWorkOfEveryPipeAndEveryByte) {
  const ChipSpec& chip = Ascend910B2();
  const Record record = RandomRecord(chip, 7);
  const Profile p = Replay(record, true);
  std::map<std::tuple<int, int, Pipe>, double> busy_us;
  for (const TimelineSlice& slice : *p.timeline) {
    busy_us[{slice.core, slice.lane, slice.pipe}] += slice.end_us - slice.start_us;
  }
  for (const auto& [track, us] : busy_us) EXPECT_LE(us, p.time_s * 1e6);
  for (std::size_t pipe = 0; pipe < kPipeCount; ++pipe) {
    const Profile::Busy &busy = p.busy[pipe], &waiting = p.waiting[pipe];
    EXPECT_GE(busy.cube_side, 0);
    EXPECT_GE(waiting.cube_side, 0);
    EXPECT_GE(waiting.vector_side, 0);
    EXPECT_LE(busy.cube_side + waiting.cube_side, 1 + 1e-9) << NameOf(static_cast<Pipe>(pipe));
    EXPECT_LE(busy.vector_side + waiting.vector_side, 1 + 1e-9) << NameOf(static_cast<Pipe>(pipe));
  }
  const double missed = static_cast<double>(p.gm_read) * (1 - p.l2_hit_rate);
  EXPECT_GE(p.time_s, missed / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s, static_cast<double>(p.gm_read) / chip.memory.l2_read_bytes_per_s);
  EXPECT_GE(p.time_s, static_cast<double>(p.gm_written) / chip.memory.l2_write_bytes_per_s);
  EXPECT_GT(p.busy[static_cast<std::size_t>(Pipe::kM)].cube_side, 0);
  EXPECT_EQ(p.cube_utilisation, p.busy[static_cast<std::size_t>(Pipe::kM)].cube_side);
  EXPECT_EQ(p.vector_utilisation, p.busy[static_cast<std::size_t>(Pipe::kV)].vector_side);
  EXPECT_FALSE(p.verdict.empty());
}

// Whatever waits, taken out of a plan together with its set, the rest comes no later.
TEST(ReplayPropertyTest, ALeftOutFlagIsNeverSlower) {
  for (const sync::Policy policy : {sync::Policy::kMinimal, sync::Policy::kPerTile}) {
    Record record = RandomRecord(Ascend910B2(), 5);
    const sync::Plan plan = sync::PlanFlags(record, policy);
    const double before = Replay(record, plan).cycles;
    std::mt19937 random(9);
    for (int trial = 0; trial < 40; ++trial) {
      sync::Plan without = plan;
      auto& ops = without.phases[0].cores[random() % 3].ops;
      // The n-th set of a flag belongs to its n-th wait.
      const auto is_wait = [](const sync::SyncOp& op) { return op.kind == sync::Kind::kWaitFlag; };
      std::size_t at = random() % ops.size();
      while (!is_wait(ops[at])) at = (at + 1) % ops.size();
      const sync::SyncOp wait = ops[at];
      const auto nth =
          std::count_if(ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(at), [&](const auto& op) {
            return is_wait(op) && op.pipe == wait.pipe && op.lane == wait.lane && op.peer == wait.peer &&
                   op.id == wait.id;
          });
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
      auto set = ops.begin();
      for (std::ptrdiff_t seen = 0;; ++set) {
        if (set->kind == sync::Kind::kSetFlag && set->pipe == wait.peer && set->lane == wait.lane &&
            set->peer == wait.pipe && set->id == wait.id && seen++ == nth) {
          break;
        }
      }
      ops.erase(set);
      // Within 1 %: a transfer that starts earlier shares memory with others.
      EXPECT_LE(Replay(record, without).cycles, before * 1.01) << trial;
    }
  }
}

TEST(ReplayPropertyTest, MoreFlagsAreNeverQuicker) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const Record record = RandomRecord(Ascend910B2(), seed);
    EXPECT_LE(Replay(record, sync::PlanFlags(record, sync::Policy::kMinimal)).cycles,
              Replay(record, sync::PlanFlags(record, sync::Policy::kPerTile)).cycles * 1.01);
  }
}

TEST(ReplayPropertyTest, IsDeterministic) {
  const Record record = RandomRecord(Ascend910B1(), 11);
  const Profile first = Replay(record, true), second = Replay(record, true);
  EXPECT_EQ(first.cycles, second.cycles);
  EXPECT_EQ(first.l2_hit_rate, second.l2_hit_rate);
  ASSERT_EQ(first.timeline->size(), second.timeline->size());
  for (std::size_t i = 0; i < first.timeline->size(); ++i) {
    ASSERT_EQ((*first.timeline)[i].start_us, (*second.timeline)[i].start_us) << i;
    ASSERT_EQ((*first.timeline)[i].end_us, (*second.timeline)[i].end_us) << i;
  }
}

// The same rows, dealt to more and more Vector cores of a real chip, in pieces of 16 KiB.
TEST(ReplayPropertyTest, MoreCoresNeverSlowIndependentWork) {
  constexpr std::int64_t kPieces = 240, kPiece = 4096;
  const GmTensor from = TensorOf(0, DType::kF32, kPieces, kPiece),
                 to = TensorOf(1, DType::kF32, kPieces, kPiece);
  const auto cycles = [&](int cores) {
    return Replay(RecordOf<TraceVectorCore>(Ascend910B2(), cores,
                                            [&](auto& core) {
                                              Ring<Buffer::kUB, float> ring(core, "x", 1, kPiece, 2);
                                              for (std::int64_t p = core.index(); p < kPieces; p += cores) {
                                                const auto x = ring.Next(1, kPiece);
                                                core.Load(x, MatrixOf(from).Rows({p, p + 1}));
                                                core.Exp(x, x);
                                                core.Store(MatrixOf(to).Rows({p, p + 1}), x);
                                              }
                                            }),
                  false)
        .cycles;
  };
  double before = cycles(1);
  for (const int cores : {2, 3, 5, 8, 12, 16, 24, 40, 48}) {
    const double now = cycles(cores);
    EXPECT_LE(now, before * 1.01) << cores;  // 1 %: the last core starts later.
    before = now;
  }
}

TEST(ReplayPropertyTest, MoreBandwidthIsNeverSlower) {
  Record record = RandomRecord(Ascend910B2(), 3);
  const double before = Replay(record, false).cycles;
  const auto faster = [&](auto&& change) {
    Record changed = record;
    change(changed.chip);
    return Replay(changed, false).cycles;
  };
  // Within 1 %: what is loaded earlier may push other lines out of L2.
  EXPECT_LE(faster([](ChipSpec& c) { c.memory.hbm_bytes_per_s.value *= 2; }), before * 1.01);
  EXPECT_LE(faster([](ChipSpec& c) { c.memory.l2_read_bytes_per_s.value *= 2; }), before * 1.01);
  EXPECT_LE(faster([](ChipSpec& c) { c.memory.l2_write_bytes_per_s.value *= 2; }), before * 1.01);
  EXPECT_LE(faster([](ChipSpec& c) { c.memory.core_miss_bytes_per_cycle.value *= 2; }), before * 1.01);
  for (int path = 0; path < kPathCount; ++path) {
    EXPECT_LE(
        faster([&](ChipSpec& c) { c.paths[static_cast<std::size_t>(path)].bytes_per_cycle.value *= 2; }),
        before * 1.01)
        << NameOf(static_cast<Path>(path));
  }
  EXPECT_LT(faster([](ChipSpec& c) {
              for (PathSpec& path : c.paths) path.startup.value /= 2, path.bytes_per_cycle.value *= 2;
              c.sync.cross_core.value /= 2;
            }),
            before);
}

// ---- Timeline ----

std::string TemporaryFile(const char* name) { return ::testing::TempDir() + "/cubist_" + name; }

TEST(TimelineTest, IsValidJsonWithoutOverlaps) {
  Record record = RandomRecord(Ascend910B2(), 5);
  AddPhase<TraceVectorCore>(record, 3, [](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 8, 64, 1);
    core.Fill(ring.Next(8, 64), 1.0f);
  });
  const Profile p = Replay(record, true);
  const std::string path = TemporaryFile("timeline.json");
  ASSERT_TRUE(p.WriteTimeline(path).ok());

  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_LT(text.find("\"profilingType\":\"op\""), text.find('['));
  const nlohmann::json json = nlohmann::json::parse(text);

  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::size_t slices = 0;
  std::int64_t bytes = 0;
  for (const auto& event : json.at("traceEvents")) {
    const int pid = event.at("pid"), tid = event.at("tid");
    if (event.at("ph") == "X") {
      ++slices;
      const double start = event.at("ts"), end = start + event.at("dur").get<double>();
      EXPECT_LE(start, end);
      tracks[{pid, tid}].emplace_back(start, end);
      bytes += event.at("args").at("bytes").get<std::int64_t>();
      EXPECT_NE(event.at("args").at("source").get<std::string>().find("replay_test.cc:"), std::string::npos);
    } else if (event.at("name") == "process_name") {
      processes[pid] = event.at("args").at("name");
    } else if (event.at("name") == "thread_name") {
      threads[{pid, tid}] = event.at("args").at("name");
    }
  }
  EXPECT_EQ(slices, static_cast<std::size_t>(p.instructions));
  std::int64_t moved = 0;
  for (const std::int64_t b : p.path_bytes) moved += b;
  EXPECT_EQ(bytes, moved);
  std::vector<std::string> names;
  for (const auto& [pid, name] : processes) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"AIC0", "AIV0-0", "AIV0-1", "AIC1", "AIV1-0", "AIV1-1", "AIC2",
                                             "AIV2-0", "AIV2-1"}));
  for (auto& [track, intervals] : tracks) {
    EXPECT_FALSE(threads[track].empty());
    std::sort(intervals.begin(), intervals.end());
    for (std::size_t i = 1; i < intervals.size(); ++i) {
      EXPECT_LE(intervals[i - 1].second, intervals[i].first + 1e-9) << threads[track];
    }
  }
  std::remove(path.c_str());
}

TEST(TimelineTest, StringsAreEscaped) {
  Profile p;
  auto slices = std::make_shared<std::vector<TimelineSlice>>(1);
  (*slices)[0].name = "a \"name\"";
  (*slices)[0].file = "C:\\kernels\tx.h";
  p.timeline = slices;
  const std::string path = TemporaryFile("escaped.json");
  ASSERT_TRUE(p.WriteTimeline(path).ok());
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  EXPECT_EQ(json.at("traceEvents").back().at("name"), "a \"name\"");
  EXPECT_EQ(json.at("traceEvents").back().at("args").at("source"), "C:\\kernels\tx.h:0");
  std::remove(path.c_str());
}

TEST(TimelineTest, WhatCannotBeWrittenIsAnError) {
  Profile p;
  EXPECT_EQ(p.WriteTimeline("anywhere.json").code(), StatusCode::kInvalidArgument);
  p.timeline = std::make_shared<std::vector<TimelineSlice>>();
  const Status status = p.WriteTimeline("/no/such/folder/timeline.json");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("/no/such/folder/timeline.json"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace cubist
