// Memory as the replay sees it: flows that share it, L2, and what crosses each path.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <tuple>

#include "npu_model/trace/flows.h"
#include "npu_model/trace/l2_cache.h"
#include "npu_model/trace/replay.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"

namespace cubist {
namespace {

using testing::RecordOf;
using testing::RoundChip;
using testing::TensorOf;
using trace::Flows;
using trace::L2Cache;
using trace::Record;
using trace::Replay;
using trace::Supply;

Constant Value(double value) { return {value, "", Basis::kGuessed, 0, "chosen for the test"}; }

TEST(FlowsTest, RatesAreMaxMinFair) {
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(30e9);  // 30 bytes per cycle
  chip.memory.l2_read_bytes_per_s = Value(100e9);
  chip.paths[static_cast<std::size_t>(Path::kGmToUb)].bytes_per_cycle = Value(40);
  chip.paths[static_cast<std::size_t>(Path::kGmToL1)].bytes_per_cycle = Value(10);
  Flows flows(chip);
  // Two misses share HBM at 15 each; one slow path has its 10; two hits get 30 each of the 60 that L2 has
  // left.
  flows.Start(Path::kGmToUb, Supply::kHbm, 15 * 100, {0, 0});
  flows.Start(Path::kGmToUb, Supply::kHbm, 15 * 300, {1, 0});
  flows.Start(Path::kGmToL1, Supply::kL2, 10 * 50, {2, 0});
  flows.Start(Path::kGmToUb, Supply::kL2, 30 * 20, {3, 0});
  flows.Start(Path::kGmToUb, Supply::kL2, 30 * 20, {4, 0});
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
  flows.Start(Path::kGmToL1, Supply::kL2, 10 * 50, {0, 0});
  flows.Start(Path::kUbToGm, Supply::kL2, 10 * 80, {1, 0});
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

// Blocks that are read again and again, writes between them, in a cache that most of them fit into: a read of many rows tells
// what reads of its rows one by one tell.
TEST(L2CacheTest, ABlockReadAgainIsItsRows) {
  constexpr std::int64_t kLine = 512, kRun = 8 * kLine, kMost = 600 * kRun;
  constexpr std::int64_t kPitches[] = {kRun, 2 * kRun, 3 * kRun + 100};
  for (const std::int64_t capacity : {64 * kRun, 500 * kRun, 2 * kMost}) {
    L2Cache by_block(capacity, kLine, kMost, 0.5), by_row(capacity, kLine, kMost, 0.5);
    std::mt19937 random(7);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % n; };
    std::int64_t missed = 0, found = 0;
    for (int touch = 0; touch < 4000; ++touch) {
      const std::int64_t pitch = kPitches[below(3)], rows = 8 + 8 * below(9);
      const std::int64_t bytes = below(2) == 0 ? kLine : 2000, first = below(8) * 40 * kRun;
      const bool write = below(16) == 0;
      const double now = 100.0 * touch, there = now + 150 * static_cast<double>(below(2));
      L2Cache::Tally block, row;
      by_block.TouchRows(first, bytes, rows, pitch, write, &block, now, there);
      for (std::int64_t r = 0; r < rows; ++r) by_row.Touch(first + r * pitch, bytes, write, &row, now, there);
      const auto fields = [](const L2Cache::Tally& t) {
        return std::tuple(t.lines, t.missed, t.on_the_way, t.written_back);
      };
      ASSERT_EQ(fields(block), fields(row)) << "capacity " << capacity << ", touch " << touch;
      missed += block.missed, found += block.lines - block.missed;
    }
    EXPECT_GT(missed, 0);
    EXPECT_GT(found, 0);
  }
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

TEST(ReplayTest, StoresThatAddFetchWhatL2Lacks) {
  constexpr std::int64_t kRows = 64, kCols = 128, kBytes = kRows * kCols * 4;
  ChipSpec chip = RoundChip();
  chip.memory.hbm_bytes_per_s = Value(32e9);  // Half of what the path carries.
  const GmTensor target = TensorOf(0, DType::kF32, kRows, kCols);
  const auto profile = [&](std::initializer_list<Accumulate> stores) {
    return Replay(RecordOf<TraceAiCore>(chip, 1,
                                        [&](auto& core) {
                                          Ring<Buffer::kL0C, float> ring(core, "c", kRows, kCols, 1);
                                          const auto c = ring.Next(kRows, kCols);
                                          for (const Accumulate how : stores)
                                            core.Store(MatrixOf(target), c, how);
                                        }),
                  false);
  };
  constexpr auto kAdds = Accumulate::kYes, kWrites = Accumulate::kNo;
  EXPECT_EQ(profile({kWrites}).hbm_bytes, 0);
  EXPECT_EQ(profile({kAdds}).hbm_bytes, kBytes);
  EXPECT_EQ(profile({kAdds, kAdds}).hbm_bytes, kBytes);
  EXPECT_EQ(profile({kWrites, kAdds}).hbm_bytes, 0);
  EXPECT_NEAR(profile({kAdds}).cycles - profile({kWrites}).cycles, kBytes / 32.0 - kBytes / 64.0, 1e-6);
}

// A copy past an L2 that holds next to nothing: each line read drives out one that was written. HBM turns around for
// those, but not for what is only read or only written.
TEST(ReplayTest, WritingBackBetweenReadsTurnsHbmAround) {
  constexpr std::int64_t kBytes = 4 << 20, kL2 = 1 << 16;
  const auto cycles = [&](bool reads, bool writes, double turn_around) {
    ChipSpec chip = RoundChip();
    chip.memory.hbm_bytes_per_s = Value(1e9);
    chip.memory.l2_bytes = kL2;
    chip.memory.turn_around = Value(turn_around);
    const GmTensor from = TensorOf(0, DType::kF32, 1, kBytes / 4),
                   to = TensorOf(1, DType::kF32, 1, kBytes / 4);
    const Record record = RecordOf<TraceVectorCore>(chip, 1, [&](auto& core) {
      Ring<Buffer::kUB, float> ring(core, "x", 1, 2048, 2);
      for (Range part : Split(kBytes / 4, 2048)) {
        const auto x = ring.Next(1, part.size());
        if (reads) core.Load(x, MatrixOf(from).Cols(part));
        if (writes) core.Store(MatrixOf(to).Cols(part), x);
      }
    });
    const Profile profile = Replay(record, false);
    EXPECT_NEAR(profile.hbm_bytes, static_cast<double>((reads ? kBytes : 0) + (writes ? kBytes : 0)),
                2.0 * kL2);
    return profile.cycles;
  };
  EXPECT_DOUBLE_EQ(cycles(true, false, 0.5), cycles(true, false, 0));
  EXPECT_DOUBLE_EQ(cycles(false, true, 0.5), cycles(false, true, 0));
  const double straight = cycles(true, true, 0);
  EXPECT_NEAR(cycles(true, true, 0.5) - straight, 0.5 * kBytes, 0.03 * kBytes);
  EXPECT_NEAR(cycles(true, true, 0.25) - straight, 0.25 * kBytes, 0.03 * kBytes);
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

// Each of the cores that read the same lines at a time waits for those before it; without same_line nobody does.
TEST(ReplayTest, CoresOnTheSameAddressQueue) {
  constexpr std::int64_t kBytes = 64 * 512;
  constexpr double kStartup = 40, kRate = 64, kPerLine = 3;
  const auto cycles = [&](int cores, bool same, double same_line) {
    ChipSpec chip = RoundChip();
    chip.memory.same_line = Value(same_line);
    chip.paths[static_cast<std::size_t>(Path::kGmToUb)].startup = Value(kStartup);
    const GmTensor source = TensorOf(0, DType::kF32, cores, kBytes / 4);
    return Replay(RecordOf<TraceVectorCore>(
                      chip, cores,
                      [&](auto& core) {
                        Ring<Buffer::kUB, float> ring(core, "x", 1, kBytes / 4, 1);
                        const std::int64_t row = same ? 0 : core.index();
                        core.Load(ring.Next(1, kBytes / 4), MatrixOf(source).Rows({row, row + 1}));
                      }),
                  false)
        .cycles;
  };
  const double alone = cycles(1, true, kPerLine);
  for (const int cores : {2, 5, 8}) {
    // As many lines are on their way at a time as hide the startup.
    const double waits = (cores - 1) * kPerLine * (kBytes / kRate) / kStartup;
    EXPECT_NEAR(cycles(cores, true, kPerLine), alone + waits, 1e-6) << cores;
    EXPECT_NEAR(cycles(cores, false, kPerLine), alone, 1e-6) << cores;
    EXPECT_NEAR(cycles(cores, true, 0), alone, 1e-6) << cores;
  }
}

// Rows that step down are a move each, also where another core does the same upwards.
TEST(ReplayTest, EveryCorePaysForItsOwnMoves) {
  const GmTensor source = TensorOf(0, DType::kF32, 32, 4);
  const auto cycles = [&](bool first_down, bool second_down) {
    Record record = RecordOf<TraceVectorCore>(RoundChip(), 2, [&](auto& core) {
      Ring<Buffer::kUB, float> ring(core, "x", 16, 2, 1);
      core.Load(ring.Next(16, 2),
                MatrixOf(source).Rows({16 * core.index(), 16 * core.index() + 16}).Cols({0, 2}));
    });
    auto& cores = record.phases[0].cores;
    cores[0].accesses[0].rows_down = first_down, cores[1].accesses[0].rows_down = second_down;
    return Replay(record, false).cycles;
  };
  const double up = cycles(false, false);
  EXPECT_GT(cycles(true, true), up + 10);
  EXPECT_GT(cycles(true, false), up + 10);
  EXPECT_GT(cycles(false, true), up + 10);
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

}  // namespace
}  // namespace cubist
