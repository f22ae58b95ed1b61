// Each rule of the checker by a plan that breaks it and a twin that keeps it.
#include "npu_model/sync/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "tests/npu_model/trace_support.h"

namespace cubist::testing {
namespace {

using sync::CheckResult;
using sync::Fault;
using sync::Kind;
using sync::SyncOp;
using trace::Record;

constexpr Pipe kS = Pipe::kS, kMte1 = Pipe::kMte1, kMte2 = Pipe::kMte2, kMte3 = Pipe::kMte3, kM = Pipe::kM,
               kV = Pipe::kV, kFix = Pipe::kFix;

// A plan for the first core, written by hand. Instructions are numbered in program order.
class Hand {
 public:
  explicit Hand(int lane) : lane_(lane) {}

  Hand& Flag(std::uint32_t after, Pipe from, std::uint32_t before, Pipe to, int id = 0) {
    return Set(after, from, to, id).Wait(before, to, from, id);
  }
  Hand& Set(std::uint32_t after, Pipe from, Pipe to, int id = 0) {
    return Add(after, true, Kind::kSetFlag, from, to, lane_, id);
  }
  Hand& Wait(std::uint32_t before, Pipe to, Pipe from, int id = 0) {
    return Add(before, false, Kind::kWaitFlag, to, from, lane_, id);
  }
  Hand& Barrier(std::uint32_t before, Pipe pipe) {
    return Add(before, false, Kind::kPipeBarrier, pipe, pipe, lane_, 0);
  }
  Hand& CrossSet(std::uint32_t after, Pipe pipe, int lane, int id = 0) {
    return Add(after, true, Kind::kCrossSet, pipe, pipe, lane, id);
  }
  Hand& CrossWait(std::uint32_t before, Pipe pipe, int lane, int id = 0) {
    return Add(before, false, Kind::kCrossWait, pipe, pipe, lane, id);
  }

  CheckResult Check(const Record& record) const {
    sync::CorePlan core{ops_};
    std::stable_sort(core.ops.begin(), core.ops.end(),
                     [](const SyncOp& x, const SyncOp& y) { return x.position() < y.position(); });
    sync::Plan plan;
    plan.phases.emplace_back().cores.push_back(std::move(core));
    return sync::Check(record, plan);
  }

 private:
  Hand& Add(std::uint32_t instr, bool after, Kind kind, Pipe pipe, Pipe peer, int lane, int id) {
    SyncOp op;
    op.instr = instr, op.after = after, op.kind = kind, op.pipe = pipe, op.peer = peer;
    op.lane = static_cast<std::int8_t>(lane), op.id = static_cast<std::uint8_t>(id);
    ops_.push_back(op);
    return *this;
  }

  int lane_;
  std::vector<SyncOp> ops_;
};

Hand OnVector() { return Hand(0); }
Hand OnCube() { return Hand(-1); }

std::multiset<Fault> FaultsOf(const CheckResult& result) {
  std::multiset<Fault> faults;
  for (const sync::Finding& f : result.findings) faults.insert(f.fault);
  return faults;
}
using Faults = std::multiset<Fault>;

template <class Kernel>
Record OnVectorCore(Kernel&& kernel, int cores = 1) {
  return RecordOf<TraceVectorCore>(RoundChip(), cores, kernel);
}
template <class Kernel>
Record OnAiCore(Kernel&& kernel) {
  return RecordOf<TraceAiCore>(RoundChip(), 1, kernel);
}

const GmTensor kIn = TensorOf(0, DType::kF32, 64, 64), kOut = TensorOf(1, DType::kF32, 64, 64);
const GmTensor kHalf = TensorOf(2, DType::kBF16, 256, 256);
Gm Piece(const GmTensor& t, Range rows, Range cols = {0, 64}) { return MatrixOf(t).Block(rows, cols); }

// ---- Races ----

TEST(CheckTest, ReadAfterWrite) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Load(tile, Piece(kIn, {0, 8}));  // 0
    core.Exp(y.Next(8, 64), tile);        // 1
  });
  const CheckResult race = OnVector().Check(record);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kReadAfterWrite});
  const sync::Finding& f = race.findings[0];
  EXPECT_EQ(f.first.pipe, kMte2);
  EXPECT_EQ(f.second.pipe, kV);
  EXPECT_EQ(f.second.line.line, f.first.line.line + 1);
  EXPECT_EQ(f.memory, "UB 'x'");
  EXPECT_EQ(f.begin, 0);
  EXPECT_EQ(f.end, 8 * 64 * 4);
  EXPECT_NE(f.cure.find("SetFlag<MTE2_V>"), std::string::npos) << f.cure;
  EXPECT_NE(sync::ToString(f).find("check_test.cc:"), std::string::npos);
  EXPECT_TRUE(OnVector().Flag(0, kMte2, 1, kV).Check(record).ok());
}

// An instruction that changes a tile in place must follow the pipe's older reads of it, though it reads it too.
TEST(CheckTest, ChangingInPlaceFollowsOlderReads) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1), z(core, "z", 8, 64, 1);
    const auto a = x.Next(8, 64), b = y.Next(8, 64), c = z.Next(8, 64);
    core.Fill(a, 1.0f);  // 0
    core.Fill(b, 2.0f);  // 1
    core.Add(c, a, b);   // 2  reads b
    core.Mul(b, b, a);   // 3  reads b and writes it
    core.Mul(c, c, c);   // 4
  });
  const auto plan = [] { return OnVector().Barrier(2, kV).Barrier(4, kV); };
  EXPECT_EQ(FaultsOf(plan().Check(record)), Faults{Fault::kWriteAfterRead});
  EXPECT_TRUE(plan().Barrier(3, kV).Check(record).ok());
}

TEST(CheckTest, WriteAfterRead) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Load(tile, Piece(kIn, {0, 8}));            // 0
    core.Store(Piece(kOut, {0, 8}), tile);          // 1
    core.Load(x.Next(8, 64), Piece(kIn, {8, 16}));  // 2
  });
  EXPECT_EQ(FaultsOf(OnVector().Flag(0, kMte2, 1, kMte3).Barrier(2, kMte2).Check(record)),
            Faults{Fault::kWriteAfterRead});
  EXPECT_TRUE(OnVector().Flag(0, kMte2, 1, kMte3).Flag(1, kMte3, 2, kMte2).Check(record).ok());
}

TEST(CheckTest, WriteAfterWrite) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Fill(tile, 0.0f);                             // 0
    core.Load(tile.Rows({4, 8}), Piece(kIn, {4, 8}));  // 1
  });
  const CheckResult race = OnVector().Check(record);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kWriteAfterWrite});
  EXPECT_EQ(race.findings[0].begin, 4 * 64 * 4);
  EXPECT_TRUE(OnVector().Flag(0, kV, 1, kMte2).Check(record).ok());
}

TEST(CheckTest, DisjointBytesDoNotRace) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Fill(tile.Cols({0, 16}), 0.0f);
    core.Load(tile.Cols({16, 64}), Piece(kIn, {0, 8}, {16, 64}));
  });
  EXPECT_TRUE(OnVector().Check(record).ok());
}

TEST(CheckTest, OrderAgainstTheProgramIsARace) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Load(tile, Piece(kIn, {0, 8}));  // 0
    core.Exp(y.Next(8, 64), tile);        // 1
  });
  // The load waits for the instruction that was to read it.
  const CheckResult reversed = OnVector().Wait(0, kMte2, kV).Set(1, kV, kMte2).Check(record);
  EXPECT_TRUE(FaultsOf(reversed).contains(Fault::kReadAfterWrite));
}

TEST(CheckTest, GmWrittenAndReadAgainByOneCore) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Fill(tile, 1.0f);                           // 0
    core.Store(Piece(kOut, {0, 8}), tile);           // 1
    core.Load(y.Next(8, 64), Piece(kOut, {4, 12}));  // 2
  });
  const CheckResult race = OnVector().Flag(0, kV, 1, kMte3).Check(record);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kReadAfterWrite});
  EXPECT_EQ(race.findings[0].memory, "GM tensor 1");
  EXPECT_EQ(race.findings[0].begin, 4 * 64 * 4);
  EXPECT_EQ(race.findings[0].end, 8 * 64 * 4);
  EXPECT_TRUE(OnVector().Flag(0, kV, 1, kMte3).Flag(1, kMte3, 2, kMte2).Check(record).ok());
}

// ---- Inside a pipe ----

TEST(CheckTest, VectorAfterVectorNeedsABarrier) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Fill(tile, 1.0f);  // 0
    core.Exp(tile, tile);   // 1
  });
  const CheckResult race = OnVector().Check(record);
  EXPECT_TRUE(FaultsOf(race).contains(Fault::kReadAfterWrite));
  EXPECT_NE(race.findings[0].cure.find("PipeBarrier<V>"), std::string::npos);
  EXPECT_TRUE(OnVector().Barrier(1, kV).Check(record).ok());
  // A round through the scalar unit does as well.
  EXPECT_TRUE(OnVector().Set(0, kV, kS).Wait(1, kS, kV).Check(record).ok());
  Record without = record;
  without.chip.sync.vector_needs_barrier = false;
  EXPECT_TRUE(OnVector().Check(without).ok());
}

TEST(CheckTest, MovesIntoTheSameBytesNeedABarrier) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Load(tile, Piece(kIn, {0, 8}));                // 0
    core.Load(tile.Rows({4, 8}), Piece(kIn, {8, 12}));  // 1
    core.Store(Piece(kOut, {0, 8}), tile);              // 2
  });
  Record out_of_order = record;
  out_of_order.chip.sync.moves_need_barrier = true;
  const Hand flag = OnVector().Flag(1, kMte2, 2, kMte3);
  const CheckResult race = flag.Check(out_of_order);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kWriteAfterWrite});
  EXPECT_EQ(race.findings[0].cure, "PipeBarrier<MTE2> between them");
  EXPECT_EQ(race.findings[0].begin, 4 * 64 * 4);
  EXPECT_TRUE(Hand(flag).Barrier(1, kMte2).Check(out_of_order).ok());
  EXPECT_TRUE(flag.Check(record).ok());
}

TEST(CheckTest, MovesToTheSameBytesOfGmNeedABarrier) {
  const auto stores = [](Range second) {
    Record record = OnVectorCore([second](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
      const auto tile = x.Next(8, 64);
      core.Load(tile, Piece(kIn, {0, 8}));    // 0
      core.Store(Piece(kOut, {0, 8}), tile);  // 1
      core.Store(Piece(kOut, second), tile);  // 2
    });
    record.chip.sync.moves_need_barrier = true;
    return record;
  };
  const Hand flag = OnVector().Flag(0, kMte2, 1, kMte3);
  const CheckResult race = flag.Check(stores({7, 15}));
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kWriteAfterWrite});
  EXPECT_EQ(race.findings[0].cure, "PipeBarrier<MTE3> between them");
  EXPECT_EQ(race.findings[0].memory, "GM tensor 1");
  EXPECT_EQ(race.findings[0].begin, 7 * 64 * 4);
  EXPECT_EQ(race.findings[0].end, 8 * 64 * 4);
  EXPECT_TRUE(Hand(flag).Barrier(2, kMte3).Check(stores({7, 15})).ok());
  EXPECT_TRUE(flag.Check(stores({8, 16})).ok());
}

Record TwoMmads(std::int64_t size) {
  return OnAiCore([size](auto& core) {
    Ring<Buffer::kL1, BF16> a1(core, "a1", size, size, 1, Role::kA), b1(core, "b1", size, size, 1, Role::kB);
    Ring<Buffer::kL0A, BF16> a0(core, "a0", size, size, 1, Role::kA);
    Ring<Buffer::kL0B, BF16> b0(core, "b0", size, size, 1, Role::kB);
    Ring<Buffer::kL0C, float> c0(core, "c0", size, size, 1);
    const auto a = a1.Next(size, size), b = b1.Next(size, size);
    const auto x = a0.Next(size, size);
    const auto y = b0.Next(size, size);
    const auto c = c0.Next(size, size);
    core.Load(a, Piece(kHalf, {0, size}, {0, size}));  // 0
    core.Load(b, Piece(kHalf, {0, size}, {0, size}));  // 1
    core.Load(x, a);                                   // 2
    core.Load(y, b);                                   // 3
    core.Mmad(c, x, y, Accumulate::kNo);               // 4
    core.Mmad(c, x, y, Accumulate::kYes);              // 5
  });
}

TEST(CheckTest, SmallMmadsOnOneAccumulatorNeedABarrier) {
  const Record small = TwoMmads(48), large = TwoMmads(64);  // 9 and 16 fractals
  const Hand flags = OnCube().Flag(1, kMte2, 2, kMte1).Flag(3, kMte1, 4, kM);
  const CheckResult race = flags.Check(small);
  ASSERT_FALSE(race.ok());
  EXPECT_NE(race.findings[0].cure.find("PipeBarrier<M>"), std::string::npos);
  EXPECT_TRUE(Hand(flags).Barrier(5, kM).Check(small).ok());
  EXPECT_TRUE(flags.Check(large).ok());
}

// ---- The scalar unit ----

TEST(CheckTest, WhatTheScalarUnitWaitedForIsIssuedAfterIt) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 1, 64, 1), y(core, "y", 1, 64, 1);
    const auto tile = x.Next(1, 64);
    core.Load(tile, Piece(kIn, {0, 1}));  // 0
    core.ReadScalar(tile, 3);             // 1
    core.Exp(y.Next(1, 64), tile);        // 2
    core.Load(tile, Piece(kIn, {1, 2}));  // 3
  });
  // Load 3 writes over what 1 read (in order by issue) and 2 reads (not).
  EXPECT_EQ(FaultsOf(OnVector().Flag(0, kMte2, 1, kS).Check(record)), Faults{Fault::kWriteAfterRead});
  EXPECT_TRUE(OnVector().Flag(0, kMte2, 1, kS).Flag(2, kV, 3, kMte2).Check(record).ok());
  const Faults none = FaultsOf(OnVector().Flag(2, kV, 3, kMte2).Check(record));
  EXPECT_EQ(none.count(Fault::kReadAfterWrite), 2u);
}

TEST(CheckTest, ScalarWritesNeedAFlag) {
  const GmTensor ids = TensorOf(0, DType::kI32, 8, 64);
  std::vector<std::int32_t> values(8 * 64, 0);
  GmTensor given = ids;
  given.data = reinterpret_cast<std::byte*>(values.data());
  const Record record = OnVectorCore([&](auto& core) {
    Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids", 1, 64, 1), counts_ub(core, "counts", 1, 8, 1);
    const auto id = ids_ub.Next(1, 64), counts = counts_ub.Next(1, 8);
    core.Load(id, MatrixOf(given).Rows({0, 1}));                                // 0
    core.Fill(counts, 0);                                                       // 1
    core.Histogram(counts, id, {});                                             // 2
    core.Store(MatrixOf(TensorOf(1, DType::kI32, 1, 8)).Rows({0, 1}), counts);  // 3
  });
  const Hand before = OnVector().Flag(0, kMte2, 2, kS).Flag(1, kV, 2, kS);
  const CheckResult race = before.Check(record);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kReadAfterWrite});
  EXPECT_NE(race.findings[0].cure.find("SetFlag<S_MTE3>"), std::string::npos);
  EXPECT_TRUE(Hand(before).Flag(2, kS, 3, kMte3).Check(record).ok());
}

// ---- What is read ----

TEST(CheckTest, UninitialisedReads) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
    const auto tile = x.Next(8, 64);
    core.Fill(tile.Rows({0, 4}), 0.0f);  // 0
    core.Exp(y.Next(8, 64), tile);       // 1
  });
  const CheckResult found = OnVector().Barrier(1, kV).Check(record);
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kUninitialised});
  EXPECT_EQ(found.findings[0].begin, 4 * 64 * 4);
  EXPECT_EQ(found.findings[0].end, 8 * 64 * 4);
  const Record whole = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 60, 1), y(core, "y", 8, 60, 1);
    const auto tile = x.Next(8, 60);
    for (std::int64_t r = 0; r < 8; ++r) core.Fill(tile.Rows({r, r + 1}), 0.0f);  // 0 .. 7, rows padded to 64
    core.Exp(y.Next(8, 60), tile);                                                // 8
  });
  EXPECT_TRUE(OnVector().Barrier(8, kV).Check(whole).ok());
}

TEST(CheckTest, AnAccumulatorMustHoldSomething) {
  Record record = TwoMmads(64);
  const Hand flags = OnCube().Flag(1, kMte2, 2, kMte1).Flag(3, kMte1, 4, kM);
  ASSERT_TRUE(flags.Check(record).ok());
  record.phases[0].cores[0].instrs[4].accumulates = true;
  EXPECT_EQ(FaultsOf(flags.Check(record)), Faults{Fault::kUninitialised});
}

// A store that adds reads what it adds to: written before by the core, in a phase before, or by the caller.
TEST(CheckTest, GmThatIsAddedToMustHoldSomething) {
  const auto store = [](auto& core, Accumulate accumulate) {
    Ring<Buffer::kL0C, float> c0(core, "c0", 64, 64, 1);
    Ring<Buffer::kL0A, BF16> a0(core, "a0", 64, 64, 1, Role::kA);
    Ring<Buffer::kL0B, BF16> b0(core, "b0", 64, 64, 1, Role::kB);
    const auto acc = c0.Next(64, 64);
    core.Mmad(acc, a0.Next(64, 64).Cols({0, 0}), b0.Next(64, 64).Rows({0, 0}), Accumulate::kNo);
    core.Store(MatrixOf(kOut), acc, accumulate);
  };
  const auto faults = [](Record& record, bool input) {
    record.tensors = {{"in", 0, kIn.bytes, true}, {"out", 1 << 20, kOut.bytes, input}};
    return FaultsOf(sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal)));
  };
  Record adds = OnAiCore([&](auto& core) { store(core, Accumulate::kYes); });
  EXPECT_EQ(faults(adds, /*input=*/false), Faults{Fault::kUninitialised});
  EXPECT_EQ(faults(adds, /*input=*/true), Faults{});
  Record twice = OnAiCore([&](auto& core) {
    store(core, Accumulate::kNo);
    store(core, Accumulate::kYes);
  });
  EXPECT_EQ(faults(twice, /*input=*/false), Faults{});
  Record phases = OnAiCore([&](auto& core) { store(core, Accumulate::kNo); });
  AddPhase<TraceAiCore>(phases, 1, [&](auto& core) { store(core, Accumulate::kYes); });
  EXPECT_EQ(faults(phases, /*input=*/false), Faults{});
}

TEST(CheckTest, WorkspaceReadBeforeAnyPhaseWroteIt) {
  const auto make = [](bool written) {
    Record record = RecordOf<TraceVectorCore>(RoundChip(), 1, [&](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
      const auto tile = x.Next(8, 64);
      core.Fill(tile, 1.0f);
      core.Store(Piece(kOut, written ? Range{0, 8} : Range{8, 16}), tile);
    });
    AddPhase<TraceVectorCore>(record, 1, [](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 4, 64, 1);
      core.Load(x.Next(4, 64), Piece(kOut, {2, 6}));
    });
    record.tensors = {{"in", 0, kIn.bytes, true}, {"scratch", 1 << 20, kOut.bytes, false}};
    return record;
  };
  EXPECT_TRUE(OnVector().Flag(0, kV, 1, kMte3).Check(make(true)).ok());
  const CheckResult found = OnVector().Flag(0, kV, 1, kMte3).Check(make(false));
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kUninitialised});
  EXPECT_EQ(found.findings[0].memory, "GM 'scratch'");
  EXPECT_EQ(found.findings[0].phase, 1u);
}

TEST(CheckTest, ASlotOverwrittenWhileLive) {
  const auto make = [](bool alias) {
    Record record = OnVectorCore([](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 2);
      const auto first = x.Next(8, 64), second = x.Next(8, 64);
      core.Load(first, Piece(kIn, {0, 8}));    // 0
      core.Load(second, Piece(kIn, {8, 16}));  // 1
      core.Store(Piece(kOut, {0, 8}), first);  // 2
    });
    auto& slots = record.phases[0].cores[0].slots;
    if (alias) slots[1].address = slots[0].address + 512;
    return record;
  };
  const Hand plan = OnVector().Barrier(1, kMte2).Flag(1, kMte2, 2, kMte3);
  EXPECT_TRUE(plan.Check(make(false)).ok());
  const CheckResult found = plan.Check(make(true));
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kLiveSlot});
  EXPECT_EQ(found.findings[0].begin, 512);
  EXPECT_EQ(found.findings[0].end, 8 * 64 * 4);
}

// ---- Whole blocks ----

TEST(CheckTest, OperandsInUbBeginAtBlocks) {
  const auto make = [](std::int64_t col) {
    return OnVectorCore([col](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
      const auto tile = x.Next(8, 64), other = y.Next(8, 64);
      const Range cols{col, col + 8}, first{0, 8};
      core.Load(tile.Cols(cols), Piece(kIn, {0, 8}, cols));     // 0
      core.Exp(other.Cols(cols), tile.Cols(cols));              // 1  both at one lane
      core.Store(Piece(kOut, {0, 8}, cols), other.Cols(cols));  // 2
      core.Exp(tile.Cols(first), other.Cols(cols));             // 3
      core.ReadScalar(other.Rows({0, 1}), 3 + col);             // 4  one element, wherever it is
    });
  };
  const Hand flags =
      OnVector().Flag(0, kMte2, 1, kV).Flag(1, kV, 2, kMte3).Barrier(3, kV).Flag(1, kV, 4, kS, 0);
  EXPECT_TRUE(flags.Check(make(16)).ok()) << sync::CheckText(flags.Check(make(16)));
  const CheckResult found = flags.Check(make(12));
  EXPECT_EQ(FaultsOf(found), (Faults{Fault::kMisaligned, Fault::kMisaligned, Fault::kMisaligned}));
  EXPECT_EQ(found.findings[0].memory, "UB 'x'");  // The load; then the store and the second Exp, both of y.
  EXPECT_EQ(found.findings[0].begin, 12 * 4);
  EXPECT_EQ(found.findings[0].cure, "begin at a multiple of 32 bytes");
}

// A move of 10 columns writes 16: what stands in the others is lost, unless it is written later.
TEST(CheckTest, MovesIntoUbWriteWholeBlocks) {
  const auto make = [](bool fill_first, std::int64_t read) {
    return OnVectorCore([=](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
      const auto tile = x.Next(8, 64);
      const auto load = [&] { core.Load(tile.Cols({0, 10}), Piece(kIn, {0, 8}, {0, 10})); };
      if (!fill_first) load();
      core.Fill(tile, 0.0f);
      if (fill_first) load();
      core.Exp(y.Next(8, 64).Cols({0, read}), tile.Cols({0, read}));  // 2
    });
  };
  const Hand loaded_last = OnVector().Flag(0, kV, 1, kMte2).Flag(1, kMte2, 2, kV);
  EXPECT_TRUE(loaded_last.Check(make(true, 10)).ok());
  const CheckResult found = loaded_last.Check(make(true, 64));
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kPadding});
  EXPECT_EQ(found.findings[0].begin, 10 * 4);
  EXPECT_EQ(found.findings[0].end, 16 * 4);
  EXPECT_STREQ(found.findings[0].first.what, "Load UB");
  EXPECT_TRUE(OnVector().Flag(0, kMte2, 1, kV).Barrier(2, kV).Check(make(false, 64)).ok());
  // Without a flag the two race in the move's blocks, and only there.
  const CheckResult race = OnVector().Barrier(2, kV).Check(make(false, 64));
  ASSERT_EQ(FaultsOf(race), (Faults{Fault::kWriteAfterWrite}));
}

// ---- Between cores ----

TEST(CheckTest, CoresShareNoBytesThatOneWrites) {
  const auto stores = [](auto&& rows, auto&& cols) {
    return OnVectorCore(
        [&](auto& core) {
          Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
          const auto tile = x.Next(8, cols(core.index()).size());
          core.Load(tile, Piece(kIn, {0, 8}, cols(core.index())));
          core.Store(Piece(kOut, rows(core.index()), cols(core.index())), tile);
        },
        2);
  };
  const auto check = [](const Record& record) {
    sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
    return sync::Check(record, plan);
  };
  const auto all = [](int) { return Range{0, 64}; };
  EXPECT_TRUE(check(stores([](int c) { return Range{8 * c, 8 * c + 8}; }, all)).ok());
  const CheckResult shared = check(stores([](int c) { return Range{7 * c, 7 * c + 8}; }, all));
  ASSERT_EQ(FaultsOf(shared), Faults{Fault::kSharedGm});
  EXPECT_EQ(shared.findings[0].begin, 7 * 64 * 4);
  EXPECT_EQ(shared.findings[0].end, 8 * 64 * 4);
  EXPECT_NE(shared.findings[0].core, shared.findings[0].other_core);
  // Columns side by side: the rows interleave in GM and share nothing.
  const auto top = [](int) { return Range{0, 8}; };
  EXPECT_TRUE(check(stores(top, [](int c) { return Range{32 * c, 32 * c + 32}; })).ok());
  EXPECT_FALSE(check(stores(top, [](int c) { return Range{31 * c, 31 * c + 32}; })).ok());
}

Record HandOver() {
  return OnAiCore([](auto& core) {
    Ring<Buffer::kL0C, float> c0(core, "c0", 64, 64, 1);
    Ring<Buffer::kL0A, BF16> a0(core, "a0", 64, 64, 1, Role::kA);
    Ring<Buffer::kL0B, BF16> b0(core, "b0", 64, 64, 1, Role::kB);
    const auto acc = c0.Next(64, 64);
    core.Mmad(acc, a0.Next(64, 64).Cols({0, 0}), b0.Next(64, 64).Rows({0, 0}), Accumulate::kNo);  // 0
    auto& vector = core.vectors()[1];
    Ring<Buffer::kUB, float> s(vector, "s", 32, 64, 1);
    vector.Move(s.Next(32, 64), acc.Rows({32, 64}));  // 1 send, 2 receive
  });
}

TEST(CheckTest, HandOversNeedCrossCoreFlags) {
  const Record record = HandOver();
  const CheckResult race = OnCube().Flag(0, kM, 1, kFix).Check(record);
  ASSERT_EQ(FaultsOf(race), Faults{Fault::kReadAfterWrite});
  EXPECT_NE(race.findings[0].cure.find("CrossCoreSetFlag<2, FIX>"), std::string::npos);
  // Mode 2 raises the counter of both Vector cores.
  const Hand half = OnCube().Flag(0, kM, 1, kFix).CrossSet(1, kFix, -1).CrossWait(2, kMte2, 1);
  EXPECT_EQ(FaultsOf(half.Check(record)), Faults{Fault::kLeftSet});
  EXPECT_TRUE(Hand(half).CrossWait(2, kMte2, 0).Check(record).ok());
}

TEST(CheckTest, AFlagIsAFifoOfClocks) {
  const Record record = OnAiCore([](auto& core) {
    Ring<Buffer::kL0C, float> c0(core, "c0", 64, 64, 2);
    Ring<Buffer::kL0A, BF16> a0(core, "a0", 64, 64, 1, Role::kA);
    Ring<Buffer::kL0B, BF16> b0(core, "b0", 64, 64, 1, Role::kB);
    const auto x = c0.Next(64, 64), y = c0.Next(64, 64);
    const auto a = a0.Next(64, 64).Cols({0, 0});
    const auto b = b0.Next(64, 64).Rows({0, 0});
    core.Mmad(x, a, b, Accumulate::kNo);  // 0
    core.Mmad(y, a, b, Accumulate::kNo);  // 1
    auto& vector = core.vectors()[0];
    Ring<Buffer::kUB, float> s(vector, "s", 64, 64, 2);
    const auto s0 = s.Next(64, 64);
    vector.Move(s0, x);              // 2 send, 3 receive
    vector.Move(s.Next(64, 64), y);  // 4 send, 5 receive
  });
  // Both sends set; the second receive may not live on the first set, though both flags are up.
  const Hand sets = OnCube().Flag(1, kM, 2, kFix).CrossSet(2, kFix, -1).CrossSet(4, kFix, -1);
  Hand once = sets;
  once.CrossWait(3, kMte2, 0).CrossWait(3, kMte2, 1).CrossWait(5, kMte2, 1);
  const Faults faults = FaultsOf(once.Check(record));
  EXPECT_TRUE(faults.contains(Fault::kReadAfterWrite));
  EXPECT_TRUE(faults.contains(Fault::kLeftSet));
  EXPECT_TRUE(once.CrossWait(5, kMte2, 0).Check(record).ok());
}

TEST(CheckTest, ACubeCoreWaitsForAllItsVectorCores) {
  const Record record = OnAiCore([](auto& core) {
    Ring<Buffer::kL1, BF16> p1(core, "p1", 32, 64, 1, Role::kA);
    auto& vector = core.vectors()[0];
    Ring<Buffer::kUB, BF16> p(vector, "p", 32, 64, 1);
    const auto tile = p.Next(32, 64);
    vector.Load(tile, Piece(kHalf, {0, 32}, {0, 64}));  // 0
    vector.Move(p1.Next(32, 64), tile);                 // 1 send, 2 receive
  });
  const Hand half = OnVector().Flag(0, kMte2, 1, kMte3).CrossSet(1, kMte3, 0).CrossWait(2, kMte2, -1);
  const CheckResult stuck = half.Check(record);
  EXPECT_TRUE(FaultsOf(stuck).contains(Fault::kNeverSet));
  EXPECT_TRUE(Hand(half).CrossSet(1, kMte3, 1).Check(record).ok());
}

// ---- Flags ----

Record LoadExpStore(int times) {
  return OnVectorCore([times](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 8, 64, times);
    for (int i = 0; i < times; ++i) {
      const auto tile = x.Next(8, 64);
      core.Load(tile, Piece(kIn, {0, 8}));                // 2 i
      core.Store(Piece(kOut, {8 * i, 8 * i + 8}), tile);  // 2 i + 1
    }
  });
}

TEST(CheckTest, Deadlock) {
  const Record record = LoadExpStore(1);
  const Hand cycle =
      OnVector().Wait(0, kMte2, kMte3).Set(0, kMte2, kMte3).Wait(1, kMte3, kMte2).Set(1, kMte3, kMte2);
  const CheckResult found = cycle.Check(record);
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kDeadlock});
  ASSERT_EQ(found.findings[0].chain.size(), 3u);
  EXPECT_NE(found.findings[0].chain[0].find("Vector 0 MTE2 waits at WaitFlag<MTE3_MTE2>(0)"),
            std::string::npos)
      << found.findings[0].chain[0];
  EXPECT_NE(found.findings[0].chain[1].find("Vector 0 MTE3 waits"), std::string::npos);
  EXPECT_NE(found.deadlock_dot.find("\"Vector 0 MTE2\" -> \"Vector 0 MTE3\""), std::string::npos);
  EXPECT_NE(found.deadlock_dot.find("color=red"), std::string::npos);
  EXPECT_TRUE(OnVector().Flag(0, kMte2, 1, kMte3).Check(record).deadlock_dot.empty());
}

TEST(CheckTest, AScalarUnitThatWaitsHoldsUpWhatItIssues) {
  const Record record = OnVectorCore([](auto& core) {
    Ring<Buffer::kUB, float> x(core, "x", 1, 64, 1);
    const auto tile = x.Next(1, 64);
    core.Fill(tile, 0.0f);     // 0
    core.ReadScalar(tile, 0);  // 1
    core.Exp(tile, tile);      // 2
  });
  EXPECT_TRUE(OnVector().Flag(0, kV, 1, kS).Check(record).ok());
  // The set that it waits for stands behind an instruction that it has not issued.
  EXPECT_EQ(FaultsOf(OnVector().Wait(1, kS, kV).Set(2, kV, kS).Check(record)), Faults{Fault::kDeadlock});
}

// A wait stands in front of more instructions of its pipe than its queue holds, and its set behind them.
TEST(CheckTest, AFullQueueHoldsUpTheScalarUnit) {
  const int depth = RoundChip().scalar.queue_depth;
  for (const bool fits : {true, false}) {
    const int loads = fits ? depth - 1 : depth;  // The wait stands in the queue, too.
    const Record record = OnVectorCore([&](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, loads), y(core, "y", 8, 64, 1);
      const auto out = y.Next(8, 64);
      for (int i = 0; i < loads; ++i) core.Load(x.Next(8, 64), Piece(kIn, {0, 8}));
      core.Fill(out, 1.0f);
    });
    const auto fill = static_cast<std::uint32_t>(loads);
    const CheckResult found = OnVector().Wait(0, kMte2, kV).Set(fill, kV, kMte2).Check(record);
    if (fits) {
      EXPECT_TRUE(found.ok());
      continue;
    }
    ASSERT_EQ(FaultsOf(found), Faults{Fault::kDeadlock});
    const std::vector<std::string>& chain = found.findings[0].chain;
    ASSERT_EQ(chain.size(), 3u);
    EXPECT_EQ(chain[0], "Vector 0 S cannot issue to Vector 0 MTE2, whose queue holds " +
                            std::to_string(depth) + " already");
    EXPECT_NE(chain[1].find("Vector 0 MTE2 waits at WaitFlag<V_MTE2>(0)"), std::string::npos) << chain[1];
    EXPECT_NE(found.deadlock_dot.find("queue full"), std::string::npos);
  }
}

TEST(CheckTest, AWaitThatNothingEnds) {
  const CheckResult found = OnVector().Wait(1, kMte3, kMte2).Check(LoadExpStore(1));
  ASSERT_EQ(FaultsOf(found), Faults{Fault::kNeverSet});
  EXPECT_NE(found.findings[0].chain.back().find("sets it 0 times"), std::string::npos);
}

TEST(CheckTest, AFlagLeftSet) {
  const Record record = LoadExpStore(1);
  EXPECT_EQ(FaultsOf(OnVector().Flag(0, kMte2, 1, kMte3).Set(1, kMte3, kMte2).Check(record)),
            Faults{Fault::kLeftSet});
}

TEST(CheckTest, AFlagSetTwice) {
  const Record record = LoadExpStore(2);
  const auto plan = [](int second_id) {
    return OnVector().Flag(0, kMte2, 1, kMte3, 0).Flag(2, kMte2, 3, kMte3, second_id);
  };
  EXPECT_EQ(FaultsOf(plan(0).Check(record)), Faults{Fault::kSetTwice});
  EXPECT_TRUE(plan(1).Check(record).ok());
  EXPECT_TRUE(plan(0).Flag(1, kMte3, 2, kMte2).Check(record).ok());
}

TEST(CheckTest, ACrossCoreCounterHasALimit) {
  Record record = HandOver();
  Hand plan = OnCube().Flag(0, kM, 1, kFix);
  for (int i = 0; i < 3; ++i) plan.CrossSet(1, kFix, -1).CrossWait(2, kMte2, 0).CrossWait(2, kMte2, 1);
  EXPECT_TRUE(plan.Check(record).ok());
  record.chip.sync.cross_core_limit = 2;
  EXPECT_TRUE(FaultsOf(plan.Check(record)).contains(Fault::kSetTwice));
}

TEST(CheckTest, PlanEntriesThatTheChipDoesNotHave) {
  const Record record = LoadExpStore(1);
  const Hand good = OnVector().Flag(0, kMte2, 1, kMte3);
  const auto bad = [&](Hand plan, const char* text) {
    const CheckResult found = plan.Check(record);
    ASSERT_FALSE(found.ok()) << text;
    EXPECT_EQ(found.findings[0].fault, Fault::kBadOp);
    EXPECT_NE(found.findings[0].cure.find(text), std::string::npos) << found.findings[0].cure;
  };
  bad(Hand(good).Flag(0, kMte2, 1, kMte3, 6), "has id 6, the chip has 0 to 5");
  bad(Hand(good).CrossSet(0, kMte2, 0, 11), "has id 11, the chip has 0 to 10");
  bad(Hand(good).Flag(0, kMte1, 1, kMte3), "names pipe MTE1");
  bad(Hand(good).Barrier(0, kS), "does not take pipe S");
  bad(Hand(good).Flag(0, kMte2, 1, kMte2), "to itself");
  bad(Hand(good).CrossSet(0, kMte2, 1), "is on Vector core 1 of 1");
  bad(Hand(good).Flag(0, kMte2, 7, kMte3, 1), "stands at instruction 7 of 2");
}

TEST(CheckTest, TwoPipesOnOneCounter) {
  Record record = HandOver();
  const Hand plan =
      OnCube().Flag(0, kM, 1, kFix).CrossSet(1, kFix, -1).CrossWait(2, kMte2, 0).CrossWait(2, kMte2, 1);
  ASSERT_TRUE(plan.Check(record).ok());
  const Hand twice = Hand(plan).CrossSet(1, kM, -1).CrossWait(2, kMte2, 0).CrossWait(2, kMte2, 1);
  EXPECT_TRUE(FaultsOf(twice.Check(record)).contains(Fault::kBadOp));
}

// Cores alike are proved once; what is wrong in them is counted in each, and what one alone reads is its own.
TEST(CheckTest, CoresAlikeAreProvedAsIfApart) {
  const auto make = [](Range read_by_last) {
    Record record = OnVectorCore(
        [](auto& core) {
          Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1);
          const auto tile = x.Next(8, 64);
          core.Fill(tile, 1.0f);
          core.Store(Piece(kOut, {8 * core.index(), 8 * core.index() + 8}), tile);
        },
        3);
    AddPhase<TraceVectorCore>(record, 3, [&](auto& core) {
      Ring<Buffer::kUB, float> x(core, "x", 8, 64, 1), y(core, "y", 8, 64, 1);
      const auto tile = x.Next(8, 64);
      const Range own{8 * core.index(), 8 * core.index() + 8};
      core.Load(tile, Piece(kOut, core.index() == 2 ? read_by_last : own));  // 0
      core.Exp(y.Next(8, 64), tile);                                         // 1
    });
    record.tensors = {{"in", 0, kIn.bytes, true}, {"scratch", 1 << 20, kOut.bytes, false}};
    return record;
  };
  const auto check = [](const Record& record, bool with_flags) {
    sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
    for (sync::CorePlan& core : plan.phases[1].cores) {
      if (!with_flags) core.ops.clear();
    }
    return sync::Check(record, plan);
  };
  const CheckResult clean = check(make({16, 24}), true);
  EXPECT_TRUE(clean.ok());
  EXPECT_EQ(clean.accesses, 3 * 2 + 3 * 3);
  const CheckResult races = check(make({16, 24}), false);
  ASSERT_EQ(FaultsOf(races), Faults{Fault::kReadAfterWrite});
  EXPECT_EQ(races.findings[0].count, 3);
  const CheckResult unwritten = check(make({20, 28}), true);
  ASSERT_EQ(FaultsOf(unwritten), Faults{Fault::kUninitialised});
  EXPECT_EQ(unwritten.findings[0].core, 2u);
  EXPECT_EQ(unwritten.findings[0].count, 1);
}

TEST(CheckTest, FindingsOfTheSameLinesAreOne) {
  const Record record = LoadExpStore(5);
  const CheckResult found = OnVector().Check(record);
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].count, 5);
  EXPECT_NE(sync::CheckText(found).find("5 times"), std::string::npos);
}

}  // namespace
}  // namespace cubist::testing
