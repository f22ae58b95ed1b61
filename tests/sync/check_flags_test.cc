// Each rule of the checker for flags and for what cores share, by a plan that breaks it and a twin that keeps it.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "tests/sync/hand_plan.h"

namespace cubist::testing {
namespace {

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
