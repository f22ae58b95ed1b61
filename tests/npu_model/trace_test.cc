#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <new>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "npu_model/trace/dependencies.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/record_room.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"

namespace cubist {
namespace {

using testing::RecordOf;
using testing::RoundChip;
using testing::TensorOf;
using trace::CoreRecord;
using trace::Dependencies;
using trace::GmAccess;
using trace::Op;

std::vector<Op> OpsOf(const CoreRecord& core) {
  std::vector<Op> ops;
  for (const trace::Instr& instr : core.instrs) ops.push_back(instr.op);
  return ops;
}

// The instructions that instruction `i` waits for, ascending by agent.
std::vector<std::uint32_t> WaitsOf(const Dependencies& dependencies, std::size_t i) {
  std::vector<std::uint32_t> waits;
  for (const trace::Dependency& d : dependencies.Of(i)) waits.push_back(d.instr);
  return waits;
}

using Waits = std::vector<std::uint32_t>;

// ---- Room ----

TEST(RecordRoomTest, TellsWhatARecordNeedsAndWhatIsFree) {
  constexpr std::int64_t kMib = 1 << 20;
  trace::CheckRoom(1000, 3 * kMib, 3 * kMib);
  try {
    trace::CheckRoom(1000, 3 * kMib, 2 * kMib);
    FAIL() << "there is no room";
  } catch (const std::bad_alloc& error) {
    EXPECT_NE(std::string(error.what()).find("1000 instructions and more needs 3 MiB"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("2 MiB are free"), std::string::npos) << error.what();
  }
  trace::CheckRoom(1000, 64 * kMib);  // Not looked at.
  EXPECT_THROW(trace::CheckRoom(1000, std::int64_t{1} << 61), std::bad_alloc);
  EXPECT_GT(trace::FreeBytes(), 0);
  EXPECT_LT(trace::FreeBytes(), std::int64_t{1} << 60) << "what the machine says was not understood";
}

// A machine's files, as they would lie below "/".
class FakeRoot {
 public:
  explicit FakeRoot(const char* name) : root_(::testing::TempDir() + "/cubist_root_" + name) {
    std::filesystem::remove_all(root_);
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  ~FakeRoot() { std::filesystem::remove_all(root_); }
  FakeRoot& With(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
    return *this;
  }
  std::int64_t free() const { return trace::FreeBytes(root_); }

 private:
  std::string root_;
};

constexpr const char* kMemInfo = "MemTotal:  9 kB\nMemFree: 1 kB\nMemAvailable:  8000 kB\n";
constexpr std::int64_t kAvailable = 8000 << 10;

TEST(RecordRoomTest, KnowsTheMachinesMemory) {
  FakeRoot root("machine");
  EXPECT_EQ(root.free(), std::int64_t{1} << 62) << "no file says anything";
  EXPECT_EQ(root.With("/proc/meminfo", kMemInfo).free(), kAvailable);
  EXPECT_EQ(root.With("/proc/self/cgroup", "0::/\n").free(), kAvailable) << "the group's files are not there";
}

TEST(RecordRoomTest, KeepsToTheLimitsOfContainers) {
  FakeRoot root("v2");
  root.With("/proc/meminfo", kMemInfo).With("/proc/self/cgroup", "0::/jobs/one\n");
  root.With("/sys/fs/cgroup/jobs/one/memory.max", "max\n")
      .With("/sys/fs/cgroup/jobs/one/memory.current", "500\n");
  EXPECT_EQ(root.free(), kAvailable) << "a group without a limit";
  root.With("/sys/fs/cgroup/jobs/memory.max", "3000\n").With("/sys/fs/cgroup/jobs/memory.current", "1000\n");
  EXPECT_EQ(root.free(), 2000) << "the limit of the group above it";
  root.With("/sys/fs/cgroup/jobs/memory.stat", "anon 100\ninactive_file 300\nactive_file 50\n");
  EXPECT_EQ(root.free(), 2300) << "what the group would give back";
  root.With("/sys/fs/cgroup/jobs/one/memory.max", "700\n");
  EXPECT_EQ(root.free(), 200);
  root.With("/sys/fs/cgroup/jobs/one/memory.current", "800\n");
  EXPECT_EQ(root.free(), 0) << "beyond its limit";
}

// The path is that on the host, of which the container sees the last folder alone, as the highest.
TEST(RecordRoomTest, KeepsToTheLimitsOfTheOlderInterface) {
  FakeRoot root("v1");
  root.With("/proc/meminfo", kMemInfo)
      .With("/proc/self/cgroup", "5:cpu,memory:/docker/abc\n2:cpuset:/\n0::/\n");
  const std::string group = "/sys/fs/cgroup/memory/memory";
  root.With(group + ".limit_in_bytes", "9223372036854771712\n").With(group + ".usage_in_bytes", "1000\n");
  EXPECT_EQ(root.free(), kAvailable) << "a group without a limit";
  root.With(group + ".limit_in_bytes", "6000\n")
      .With(group + ".stat", "inactive_file 7\ntotal_inactive_file 30\n");
  EXPECT_EQ(root.free(), 5030);
}

// ---- What an access touches ----

void ExpectAccess(const GmAccess& access, std::int64_t offset, std::int64_t rows, std::int64_t row_stride,
                  std::int64_t bursts, std::int64_t burst_stride, std::int64_t burst_bytes) {
  EXPECT_EQ(access.offset, offset);
  EXPECT_EQ(access.rows, rows);
  EXPECT_EQ(access.rows > 1 ? access.row_stride : 0, rows > 1 ? row_stride : 0);
  EXPECT_EQ(access.bursts, bursts);
  EXPECT_EQ(access.bursts > 1 ? access.burst_stride : 0, bursts > 1 ? burst_stride : 0);
  EXPECT_EQ(access.burst_bytes, burst_bytes);
}

TEST(AccessTest, IsDescribedAsItIsStored) {
  const GmTensor tensor = TensorOf(3, DType::kBF16, 64, 100);
  const Gm whole = MatrixOf(tensor);
  const auto access_of = [](const Gm& gm) { return trace::AccessOf(gm, Path::kGmToUb, false); };

  ExpectAccess(access_of(whole.Block({2, 10}, {5, 25})), (2 * 100 + 5) * 2, 8, 200, 1, 0, 40);
  ExpectAccess(access_of(whole.Block({2, 10}, {5, 25}).Transposed()), (2 * 100 + 5) * 2, 8, 200, 1, 0, 40);
  ExpectAccess(access_of(whole.Rows({2, 10})), 400, 1, 0, 1, 0, 8 * 200);  // Contiguous.
  ExpectAccess(access_of(whole.Cols({7, 8})), 14, 64, 200, 1, 0, 2);       // A column.
  ExpectAccess(access_of(whole.Block({4, 5}, {0, 100})), 800, 1, 0, 1, 0, 200);
  EXPECT_EQ(access_of(whole).tensor, 3);
  EXPECT_EQ(access_of(whole).end(), tensor.bytes);

  const Gm scattered{&tensor, 0, 4, 5, 200, 3};  // Neither stride is 1: a burst per element.
  ExpectAccess(access_of(scattered), 0, 4, 400, 5, 6, 2);
  EXPECT_EQ(access_of(scattered).bytes(), 4 * 5 * 2);
  EXPECT_EQ(access_of(scattered).end(), 3 * 400 + 4 * 6 + 2);
}

// The stride of a move that changes the layout has 16 bits.
TEST(AccessTest, RowsTooFarApartAreAMoveEach) {
  const GmTensor tensor = TensorOf(0, DType::kBF16, 64, 100);
  const auto moves = [&](std::int64_t row_stride, Path path) {
    return trace::AccessOf(Gm{&tensor, 0, 8, 32, row_stride, 1}, path, false).moves();
  };
  EXPECT_EQ(moves(kMostNd2NzStride, Path::kGmToL1Nd2Nz), 1);
  EXPECT_EQ(moves(kMostNd2NzStride + 1, Path::kGmToL1Nd2Nz), 8);
  EXPECT_EQ(moves(kMostNd2NzStride + 1, Path::kGmToUb), 1);
  EXPECT_EQ(trace::AccessOf(Gm{&tensor, 0, 1, 32, 1 << 20, 1}, Path::kGmToL1Nd2Nz, false).moves(), 1);
}

TEST(AccessTest, PackedBlocksAreWholePanels) {
  const ChipSpec chip = RoundChip();
  const GmTensor tensor = TensorOf(0, DType::kF32, 1, 1 << 16);
  PackedGm packed;
  packed.tensor = &tensor;
  packed.byte_offset = 1024;
  packed.dtype = DType::kBF16;
  packed.rows = 40, packed.cols = 50;  // Four panels of 16 columns and 48 rows.
  packed.row_part = {0, 40}, packed.col_part = {0, 50};
  const auto access_of = [&](const PackedGm& p) { return trace::AccessOf(chip, p, Path::kGmToL1, false); };
  ExpectAccess(access_of(packed), 1024, 1, 0, 1, 0, 4 * 48 * 32);
  const PackedGm block = packed.Block({16, 40}, {32, 50});
  ExpectAccess(access_of(block), 1024 + (2 * 48 + 16) * 32, 2, 48 * 32, 1, 0, 32 * 32);
}

// ---- What is recorded ----

TEST(TraceTest, InstructionsAreSmallAndNameTheirSource) {
  static_assert(sizeof(trace::Instr) <= 64);
  const GmTensor source = TensorOf(0, DType::kF32, 4, 8);
  std::uint_least32_t line = 0;
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 4, 8, 1);
    core.Load(ring.Next(4, 8), MatrixOf(source)), line = Loc::current().line();
  });
  const CoreRecord& core = record.phases[0].cores[0];
  ASSERT_EQ(OpsOf(core), std::vector<Op>{Op::kLoadUb});
  const trace::SourceLine& from = core.lines[core.instrs[0].line];
  EXPECT_EQ(from.line, line);
  EXPECT_NE(std::string(from.file).find("trace_test.cc"), std::string::npos);
  EXPECT_STREQ(core.slots[0].owner, "x");
}

TEST(TraceTest, ConversionsAreSteps) {
  const GmTensor narrow = TensorOf(0, DType::kBF16, 4, 8);
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 4, 8, 1);
    const auto x = ring.Next(4, 8);
    core.Load(x, MatrixOf(narrow));
    core.Store(MatrixOf(narrow), x);
  });
  const CoreRecord& core = record.phases[0].cores[0];
  EXPECT_EQ(OpsOf(core), (std::vector<Op>{Op::kLoadUb, Op::kCast, Op::kCast, Op::kStoreUb}));
  EXPECT_EQ(core.accesses[0].bytes(), 4 * 8 * 2);
  EXPECT_EQ(core.accesses[1].bytes(), 4 * 8 * 2);
}

TEST(TraceTest, NothingOfNoSizeIsRecorded) {
  const GmTensor source = TensorOf(0, DType::kF32, 4, 8);
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 4, 8, 1);
    const auto x = ring.Next(4, 8);
    core.Load(x.Rows({0, 0}), MatrixOf(source).Rows({0, 0}));
    core.Exp(x.Cols({3, 3}), x.Cols({3, 3}));
    core.Store(MatrixOf(source).Cols({8, 8}), x.Cols({8, 8}));
  });
  EXPECT_TRUE(record.phases[0].cores[0].instrs.empty());
}

TEST(TraceTest, CompositesAreRecordedAsTheirExpansion) {
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> scores(core, "s", 4, 32, 1), columns(core, "columns", 4, 1, 3);
    Ring<Buffer::kUB, BF16> p(core, "p", 4, 32, 1);
    const auto m_new = columns.Next(4, 1), m_old = columns.Next(4, 1), l = columns.Next(4, 1);
    core.SoftmaxStep(p.Next(4, 32), scores.Next(4, 32), m_new, m_old, l, 0.5f);
  });
  EXPECT_EQ(OpsOf(record.phases[0].cores[0]),
            (std::vector<Op>{Op::kMulScalar, Op::kRowMax, Op::kMax, Op::kSub, Op::kExp, Op::kCast, Op::kSub,
                             Op::kExp, Op::kMul, Op::kRowSum, Op::kAdd}));
  // The row maximum is spread over the columns of the scores; the other operands have one column each.
  const auto& instrs = record.phases[0].cores[0].instrs;
  EXPECT_TRUE(instrs[3].broadcasts);
  EXPECT_FALSE(instrs[2].broadcasts);
}

// An accumulator that is sent is free for the next product before the Vector core has taken the tile.
TEST(TraceTest, SentTilesWaitInTheWorkspaceOfTheirHandOverSlot) {
  const trace::Record record = RecordOf<TraceAiCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kL0C, float> acc(core, "acc", 32, 16, 1);
    Ring<Buffer::kHandOver, float> between(core, "between", 32, 16, 2);
    auto& vector = core.vectors()[0];
    Ring<Buffer::kUB, float> scores(vector, "s", 16, 16, 1);
    for (int step = 0; step < 2; ++step) {
      const auto first = between.Next(32, 16), second = between.Next(32, 16);
      core.Send(first, acc.Next(32, 16));
      core.Send(second, acc.Next(32, 16));
      vector.Receive(scores.Next(16, 16), first.Rows({0, 16}));
      vector.Receive(scores.Next(16, 16), second.Rows({0, 16}));
    }
  });
  const CoreRecord& core = record.phases[0].cores[0];
  ASSERT_EQ(core.instrs.size(), 8u);
  EXPECT_EQ(core.workspace.size(), 2u);
  EXPECT_EQ(core.workspace_bytes, 2 * 32 * 16 * 4);
  for (const std::size_t send : {0u, 1u, 4u, 5u}) {
    EXPECT_EQ(core.instrs[send].op, Op::kSendL0C);
    EXPECT_EQ(core.instrs[send].pipe, Pipe::kFix);
  }
  for (const std::size_t receive : {2u, 3u, 6u, 7u}) {
    EXPECT_EQ(core.instrs[receive].op, Op::kReceiveUb);
    EXPECT_EQ(core.instrs[receive].pipe, Pipe::kMte2);
    EXPECT_EQ(core.instrs[receive].lane, 0);
  }
  const Dependencies dependencies(core);
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{0});
  EXPECT_EQ(WaitsOf(dependencies, 3), Waits{1});
  EXPECT_EQ(WaitsOf(dependencies, 4), Waits{2});  // the slot's last tile has been received
}

TEST(TraceTest, MovesPassThroughAWorkspaceSlotOfTheirDestination) {
  const trace::Record record = RecordOf<TraceAiCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kL0C, float> acc(core, "acc", 32, 16, 2);
    auto& vector = core.vectors()[1];
    Ring<Buffer::kUB, float> scores(vector, "s", 16, 16, 2);
    Ring<Buffer::kUB, BF16> p(vector, "p", 16, 16, 1);
    Ring<Buffer::kL1, BF16> p_l1(core, "p_l1", 32, 16, 1, Role::kA);
    for (int step = 0; step < 4; ++step) vector.Move(scores.Next(16, 16), acc.Next(32, 16).Rows({16, 32}));
    vector.Move(p_l1.Next(32, 16).Rows({16, 32}), p.Next(16, 16));
  });
  const CoreRecord& core = record.phases[0].cores[0];
  ASSERT_EQ(core.instrs.size(), 10u);
  EXPECT_EQ(core.workspace.size(), 3u);  // Two of scores' ring, one of p_l1's.
  EXPECT_EQ(core.workspace_bytes, 2 * 16 * 16 * 4 + 32 * 16 * 2);
  EXPECT_EQ(core.instrs[0].op, Op::kSendL0C);
  EXPECT_EQ(core.instrs[0].lane, -1);
  EXPECT_EQ(core.instrs[0].pipe, Pipe::kFix);
  EXPECT_EQ(core.instrs[1].op, Op::kReceiveUb);
  EXPECT_EQ(core.instrs[1].lane, 1);
  EXPECT_EQ(core.instrs[8].op, Op::kSendUb);
  EXPECT_EQ(core.instrs[8].lane, 1);
  EXPECT_EQ(core.instrs[9].op, Op::kReceiveL1);
  EXPECT_EQ(core.instrs[9].lane, -1);
  // The third Move uses the first workspace slot again: its FIX store waits for the first load out of it
  // (WAR).
  const Dependencies dependencies(core);
  EXPECT_EQ(WaitsOf(dependencies, 1), Waits{0});
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{});
  EXPECT_EQ(WaitsOf(dependencies, 4), Waits{1});
  // Rows 16 to 32 of the L1 tile are the second half of its workspace slot.
  const GmAccess& sent = core.accesses[static_cast<std::size_t>(core.instrs[8].access)];
  EXPECT_EQ(sent.offset, core.workspace[2].address + 16 * 16 * 2);
  EXPECT_EQ(sent.bytes(), 16 * 16 * 2);
}

TEST(TraceTest, BiasPassesThroughL1) {
  const GmTensor bias = TensorOf(0, DType::kBF16, 1, 40);
  const trace::Record record = RecordOf<TraceAiCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kBT, float> ring(core, "bias", 1, 64, 1);
    EXPECT_TRUE(core.finding().empty());
    core.Load(ring.Next(1, 40), MatrixOf(bias));
  });
  const CoreRecord& core = record.phases[0].cores[0];
  EXPECT_EQ(OpsOf(core), (std::vector<Op>{Op::kLoadBias, Op::kLoadBT}));
  EXPECT_EQ(core.accesses[0].path, Path::kGmToL1);
  EXPECT_EQ(core.accesses[0].bytes(), 80);
  EXPECT_EQ(WaitsOf(Dependencies(core), 1), Waits{0});
}

TEST(TraceTest, ARingBeyondTheCapacityIsAFinding) {
  const ChipSpec chip = RoundChip();
  CoreRecord record;
  Scratch scratch;
  TraceVectorCore core(chip, scratch, 0, 1, /*with_data=*/false, &record);
  Ring<Buffer::kUB, float> fits(core, "fits", 128, 256, 1);
  EXPECT_TRUE(core.finding().empty());
  Ring<Buffer::kUB, float> too_large(core, "too_large", 64, 256, 2);
  EXPECT_NE(core.finding().find("too_large"), std::string::npos) << core.finding();
  EXPECT_NE(core.finding().find("65536 bytes beyond UB"), std::string::npos) << core.finding();
  EXPECT_NE(core.finding().find("131072"), std::string::npos)
      << core.finding();  // The map: where `fits` ends.
}

// ---- With and without data ----

// out[j] = in[j] * (1 + number of ids equal to 3), by Histogram and ReadScalar.
template <class Core>
void ScaleByCount(Core& core, const GmTensor& ids, const GmTensor& in, const GmTensor& out) {
  Ring<Buffer::kUB, std::int64_t> wide_ring(core, "wide", 1, 64, 1);
  Ring<Buffer::kUB, std::int32_t> id_ring(core, "ids", 1, 64, 1), count_ring(core, "counts", 1, 8, 1);
  Ring<Buffer::kUB, float> ring(core, "x", 1, 64, 1);
  const auto wide = wide_ring.Next(1, 64);
  const auto id = id_ring.Next(1, 64), counts = count_ring.Next(1, 8);
  core.Load(wide, MatrixOf(ids));
  core.Cast(id, wide);
  core.Fill(counts, 0);
  core.Histogram(counts, id, {});
  const auto x = ring.Next(1, 64);
  core.Load(x, MatrixOf(in));
  const std::int64_t repeats = core.ReadScalar(counts, 3);
  const float one = core.ReadScalar(x, 0);
  Ring<Buffer::kUB, float> sums(core, "sum", 1, 64, 1);
  const auto sum = sums.Next(1, 64);
  core.MulScalar(sum, x, one);
  for (std::int64_t i = 0; i < repeats; ++i) core.Add(sum, sum, x);
  core.Store(MatrixOf(out), sum);
}

// Vector cores that have buffers run the text of the kernel, too; others do not.
TEST(TraceTest, StepsAndReadsForControlAreOfEverySideThatWorks) {
  std::vector<std::int32_t> ids(64);
  GmTensor input = TensorOf(0, DType::kI32, 1, 64, ids.data());
  input.writable = false;
  const trace::Record record = RecordOf<TraceAiCore>(RoundChip(), 1, [&](auto& core) {
    core.Spend(1);
    [[maybe_unused]] const Ring<Buffer::kUB, float> ring(core.vectors()[1], "x", 1, 64, 1);
    core.Spend(2);
    core.ReadScalar(MatrixOf(input), 0);
    core.vectors()[0].Spend(3);
  });
  std::vector<std::tuple<trace::Op, int, int>> seen;
  for (const trace::Instr& instr : record.phases[0].cores[0].instrs) {
    EXPECT_EQ(instr.pipe, Pipe::kS);
    seen.emplace_back(instr.op, instr.lane, instr.dims[0]);
  }
  const std::vector<std::tuple<trace::Op, int, int>> expected = {
      {trace::Op::kSpend, -1, 1},      {trace::Op::kSpend, -1, 2},     {trace::Op::kSpend, 1, 2},
      {trace::Op::kReadScalar, -1, 1}, {trace::Op::kReadScalar, 1, 1}, {trace::Op::kSpend, 0, 3}};
  EXPECT_EQ(seen, expected);
}

TEST(TraceTest, ControlIsComputedWithoutData) {
  std::vector<std::int64_t> ids(64);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 8);
  std::vector<float> in(64), out(64, -1);
  std::iota(in.begin(), in.end(), 1.0f);
  const GmTensor id_tensor = TensorOf(0, DType::kI64, 1, 64, ids.data());

  const trace::Record with = RecordOf<TraceVectorCore>(
      RoundChip(), 1,
      [&](auto& core) {
        ScaleByCount(core, id_tensor, TensorOf(1, DType::kF32, 1, 64, in.data()),
                     TensorOf(2, DType::kF32, 1, 64, out.data()));
      },
      /*with_data=*/true);
  for (std::size_t j = 0; j < out.size(); ++j) EXPECT_EQ(out[j], 9 * in[j]);

  const trace::Record without = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    ScaleByCount(core, id_tensor, TensorOf(1, DType::kF32, 1, 64), TensorOf(2, DType::kF32, 1, 64));
  });
  EXPECT_EQ(OpsOf(with.phases[0].cores[0]), OpsOf(without.phases[0].cores[0]));
  EXPECT_EQ(with.phases[0].cores[0].instrs.size(), 17u);
}

TEST(TraceTest, WhatIsPackedComesBack) {
  trace::Instr instr;
  for (const IdBins& bins : {IdBins{}, IdBins{.first = -3}, IdBins{.first = 256, .shift = 0, .bits = 8},
                             IdBins{.first = 7, .shift = 24, .bits = 8}}) {
    trace::SetBins(instr, bins);
    const IdBins back = trace::BinsOf(instr);
    EXPECT_EQ(back.first, bins.first);
    EXPECT_EQ(back.shift, bins.shift);
    EXPECT_EQ(back.bits, bins.bits);
  }
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
    trace::SetFirstDistance(instr, first);
    EXPECT_EQ(trace::FirstDistanceOf(instr), first);
  }
}

TEST(TraceTest, AMmadRecordsWhatItComputes) {
  constexpr std::int64_t kM = 3, kK = 5, kN = 4;
  std::array<float, kM * kK> a;
  std::array<float, kK * kN> b;
  std::array<float, kM * kN> c;
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 4);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 3) - 1;
  const trace::Record record = RecordOf<TraceAiCore>(
      RoundChip(), 1,
      [&](auto& core) {
        const GmTensor ga = TensorOf(0, DType::kF32, kM, kK, a.data()),
                       gb = TensorOf(1, DType::kF32, kK, kN, b.data()),
                       gc = TensorOf(2, DType::kF32, kM, kN, c.data());
        Ring<Buffer::kL1, float> a_l1(core, "a1", kM, kK, 1, Role::kA), b_l1(core, "b1", kK, kN, 1, Role::kB);
        Ring<Buffer::kL0A, float> a_l0(core, "a0", kM, kK, 1, Role::kA);
        Ring<Buffer::kL0B, float> b_l0(core, "b0", kK, kN, 1, Role::kB);
        Ring<Buffer::kL0C, float> c_l0(core, "c0", kM, kN, 1);
        const auto a1 = a_l1.Next(kM, kK);
        const auto b1 = b_l1.Next(kK, kN);
        const auto a0 = a_l0.Next(kM, kK);
        const auto b0 = b_l0.Next(kK, kN);
        const auto c0 = c_l0.Next(kM, kN);
        core.Load(a1, MatrixOf(ga));
        core.Load(b1, MatrixOf(gb));
        core.Load(a0, a1);
        core.Load(b0, b1);
        core.Mmad(c0, a0, b0, Accumulate::kNo);
        core.Store(MatrixOf(gc), c0);
      },
      /*with_data=*/true);
  for (std::size_t i = 0; i < kM; ++i) {
    for (std::size_t j = 0; j < kN; ++j) {
      float sum = 0;
      for (std::size_t k = 0; k < kK; ++k) sum += a[i * kK + k] * b[k * kN + j];
      EXPECT_EQ(c[i * kN + j], sum);
    }
  }
  const CoreRecord& core = record.phases[0].cores[0];
  ASSERT_EQ(core.instrs.size(), 6u);
  EXPECT_EQ(core.instrs[4].dims[0], kM);
  EXPECT_EQ(core.instrs[4].dims[1], kN);
  EXPECT_EQ(core.instrs[4].dims[2], kK);
  const Dependencies dependencies(core);
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{0});
  EXPECT_EQ(WaitsOf(dependencies, 3), Waits{1});
  EXPECT_EQ(WaitsOf(dependencies, 4), Waits{3});  // The later of two on MTE1.
  EXPECT_EQ(WaitsOf(dependencies, 5), Waits{4});
}

// ---- Dependencies ----

TEST(DependenciesTest, FollowOverlappingBytesOfPartialTiles) {
  const GmTensor source = TensorOf(0, DType::kF32, 4, 32), target = TensorOf(1, DType::kF32, 4, 32);
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 4, 32, 2);
    const auto x = ring.Next(4, 32), y = ring.Next(4, 32);
    const Gm from = MatrixOf(source), to = MatrixOf(target);
    core.Load(x.Rows({0, 2}), from.Rows({0, 2}));          // 0 MTE2
    core.Load(x.Rows({2, 4}), from.Rows({2, 4}));          // 1 MTE2
    core.MulScalar(x.Rows({0, 2}), x.Rows({0, 2}), 2.0f);  // 2 V
    core.MulScalar(x.Rows({2, 4}), x.Rows({2, 4}), 2.0f);  // 3 V
    core.Store(to.Rows({0, 2}), x.Rows({0, 2}));           // 4 MTE3
    core.Load(x.Rows({1, 3}), from.Rows({1, 3}));          // 5 MTE2
    core.Load(y, from);                                    // 6 MTE2
    core.Fill(y.Cols({8, 16}), 0.0f);                      // 7 V
    core.Store(to.Cols({0, 8}), y.Cols({0, 8}));           // 8 MTE3
    core.Load(y.Cols({16, 24}), from.Cols({16, 24}));      // 9 MTE2
    core.Load(y.Cols({7, 9}), from.Cols({7, 9}));          // 10 MTE2
  });
  const Dependencies dependencies(record.phases[0].cores[0]);
  EXPECT_EQ(WaitsOf(dependencies, 0), Waits{});
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{0});        // RAW of its rows alone.
  EXPECT_EQ(WaitsOf(dependencies, 3), Waits{1});        // RAW
  EXPECT_EQ(WaitsOf(dependencies, 4), Waits{2});        // RAW
  EXPECT_EQ(WaitsOf(dependencies, 5), (Waits{4, 3}));   // WAR: MTE3 reads row 1; V wrote row 2.
  EXPECT_EQ(WaitsOf(dependencies, 6), Waits{});         // Another slot.
  EXPECT_EQ(WaitsOf(dependencies, 7), Waits{6});        // WAW
  EXPECT_EQ(WaitsOf(dependencies, 8), Waits{6});        // RAW of columns that V left alone.
  EXPECT_EQ(WaitsOf(dependencies, 9), Waits{});         // Columns that nobody else touches.
  EXPECT_EQ(WaitsOf(dependencies, 10), (Waits{8, 7}));  // WAR on column 7, WAW on column 8.
}

TEST(DependenciesTest, AWaitIsNotRepeated) {
  const GmTensor source = TensorOf(0, DType::kF32, 4, 32);
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 4, 32, 1);
    const auto x = ring.Next(4, 32);
    core.Load(x, MatrixOf(source));
    core.Exp(x, x);
    core.Exp(x, x);  // V has waited for the load already.
    core.Store(MatrixOf(source), x);
  });
  const Dependencies dependencies(record.phases[0].cores[0]);
  EXPECT_EQ(WaitsOf(dependencies, 1), Waits{0});
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{});
  EXPECT_EQ(WaitsOf(dependencies, 3),
            (Waits{0, 2}));  // MTE3 reads x; it also writes the tensor that MTE2 read.
}

TEST(DependenciesTest, GlobalMemoryOrdersACoreThatReadsWhatItWrote) {
  const GmTensor tensor = TensorOf(0, DType::kF32, 4, 32);
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 1, 32, 4);
    const auto x = ring.Next(1, 32), y = ring.Next(1, 32), z = ring.Next(1, 32);
    core.Fill(x, 1.0f);
    core.Store(MatrixOf(tensor).Rows({2, 3}), x);  // 1
    core.Load(y, MatrixOf(tensor).Rows({1, 2}));   // 2: another row
    core.Load(z, MatrixOf(tensor).Rows({2, 3}));   // 3
  });
  const Dependencies dependencies(record.phases[0].cores[0]);
  EXPECT_EQ(WaitsOf(dependencies, 2), Waits{});
  EXPECT_EQ(WaitsOf(dependencies, 3), Waits{1});
}

TEST(DependenciesTest, ManyScatteredReadsStayOrdered) {
  std::vector<std::int32_t> ids(4096);
  const GmTensor tensor = TensorOf(0, DType::kI32, 1, 4096, ids.data());
  const trace::Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
    Ring<Buffer::kUB, std::int32_t> ring(core, "ids", 1, 4096, 1);
    const auto x = ring.Next(1, 4096);
    core.Load(x, MatrixOf(tensor));
    for (std::int64_t j = 0; j < 4096; j += 2) core.ReadScalar(x, j);
    core.Fill(x.Cols({0, 1}), 0);
  });
  const CoreRecord& core = record.phases[0].cores[0];
  const Dependencies dependencies(core);
  // The write waits for a read that is not before the read of its own element.
  ASSERT_EQ(WaitsOf(dependencies, core.instrs.size() - 1).size(), 2u);
  const Waits waits = WaitsOf(dependencies, core.instrs.size() - 1);
  EXPECT_GE(waits[0], 1u);
  EXPECT_EQ(waits[1], 0u);
}

}  // namespace
}  // namespace cubist
