// Each rule of the checker for one core's instructions, by a plan that breaks it and a twin that keeps it.
#include "npu_model/sync/check.h"

#include <gtest/gtest.h>

#include <string>

#include "npu_model/sync/report.h"
#include "tests/sync/hand_plan.h"

namespace cubist::testing {
namespace {

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

}  // namespace
}  // namespace cubist::testing
