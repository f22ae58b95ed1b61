// The host executor through the typed front, against plain loops, on every SIMD target that this CPU can run: loads,
// stores and hand-overs.
#include "tests/npu_model/host_rig.h"

namespace cubist::host_test {
namespace {

class HostCoreTest : public SimdTargetTest {};
INSTANTIATE_TEST_SUITE_P(Simd, HostCoreTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// ---- Load and Store of a Vector core

constexpr Shape kShapes[] = {{1, 1}, {5, 1}, {1, 17}, {3, 64}, {7, 33}, {0, 4}, {3, 0}};

TEST_P(HostCoreTest, LoadAndStoreKeepEveryElement) {
  Random random;
  ForEachType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& from : kLayouts) {
      HostRig rig;
      for (const Layout& to : kLayouts) {
        for (const auto& [rows, cols] : kShapes) {
          GmMatrix src(DTypeOf<T>(), rows, cols, from), dst(DTypeOf<T>(), rows, cols, to);
          src->FillIntegers(random, -99, 99);
          for (Role role : {Role::kRows, Role::kRelay}) {
            dst->Fill(100);
            const auto tile = NewTile<Buffer::kUB, T>(rig.vector, rows, cols, role);
            rig.vector.Load(tile, src.gm());
            rig.vector.Store(dst.gm(), tile);
            ExpectExactly(dst->view(), src->ToDoubles());
          }
        }
      }
    }
  });
}

TEST_P(HostCoreTest, LoadAndStoreOfATransposedView) {
  Random random;
  HostRig rig;
  GmMatrix src(DType::kF32, 9, 21), dst(DType::kF32, 9, 21);
  src->FillUniform(random);
  const auto tile = NewTile<Buffer::kUB, float>(rig.vector, 21, 9);
  rig.vector.Load(tile, src.gm().Transposed());
  rig.vector.Store(dst.gm().Transposed(), tile);
  ExpectExactly(dst->view(), src->ToDoubles());
}

TEST_P(HostCoreTest, LoadWidensAndStoreNarrows) {
  Random random;
  for (DType narrow : {DType::kBF16, DType::kF16}) {
    for (const Layout& layout : kLayouts) {
      HostRig rig;
      for (const auto& [rows, cols] : kShapes) {
        GmMatrix src(narrow, rows, cols, layout), wide(DType::kF32, rows, cols);
        src->FillNormal(random);
        const auto tile = NewTile<Buffer::kUB, float>(rig.vector, rows, cols);
        rig.vector.Load(tile, src.gm());
        rig.vector.Store(wide.gm(), tile);
        ExpectExactly(wide->view(), src->ToDoubles());

        GmMatrix real(DType::kF32, rows, cols), dst(narrow, rows, cols, layout);
        real->FillNormal(random);
        rig.vector.Load(tile, real.gm());
        rig.vector.Store(dst.gm(), tile);
        Values rounded = real->ToDoubles();
        for (double& value : rounded) value = RoundTo(narrow, value);
        ExpectExactly(dst->view(), rounded);
      }
    }
  }
}

// Stores that bypass the caches write the same.
TEST_P(HostCoreTest, StoreToAStreamedTensor) {
  Random random;
  for (DType to : {DType::kF32, DType::kBF16}) {
    for (std::int64_t cols : {1, 31, 64, 259}) {
      HostRig rig;
      GmMatrix src(DType::kF32, 5, cols), dst(to, 5, cols);
      src->FillIntegers(random);
      dst.tensor().stream = true;
      const auto tile = NewTile<Buffer::kUB, float>(rig.vector, 5, cols);
      rig.vector.Load(tile, src.gm());
      rig.vector.Store(dst.gm(), tile);
      ExpectExactly(dst->view(), src->ToDoubles());
    }
  }
}

TEST_P(HostCoreTest, LoadAndStoreOfParts) {
  Random random;
  ForEachType([&](auto zero) {
    using T = decltype(zero);
    HostRig rig;
    GmMatrix whole(DTypeOf<T>(), 8, 40), part(DTypeOf<T>(), 3, 17), out(DTypeOf<T>(), 8, 40),
        out_part(DTypeOf<T>(), 4, 9);
    whole->FillIntegers(random, 0, 50), part->FillIntegers(random, 51, 99);
    const auto tile = NewTile<Buffer::kUB, T>(rig.vector, 8, 40);
    rig.vector.Load(tile, whole.gm());
    rig.vector.Load(tile.Part({2, 5}, {5, 22}), part.gm());
    rig.vector.Store(out.gm(), tile);
    rig.vector.Store(out_part.gm(), tile.Rows({1, 5}).Cols({13, 22}));
    for (std::int64_t i = 0; i < 8; ++i) {
      for (std::int64_t j = 0; j < 40; ++j) {
        const bool in_part = i >= 2 && i < 5 && j >= 5 && j < 22;
        ASSERT_EQ(out->at({i, j}), in_part ? part->at({i - 2, j - 5}) : whole->at({i, j}));
        if (i < 1 || i >= 5 || j < 13 || j >= 22) continue;
        ASSERT_EQ(out_part->at({i - 1, j - 13}), out->at({i, j}));
      }
    }
  });
}

TEST_P(HostCoreTest, ARelayTileShowsItsSourceAndIsStoredManyTimes) {
  Random random;
  HostRig rig;
  GmMatrix src(DType::kBF16, 2, 65), dst(DType::kBF16, 4, 65);
  src->FillNormal(random);
  Ring<Buffer::kUB, BF16> ring(rig.vector, "row", 1, 80, 2, Role::kRelay);
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto row = ring.Next(1, 65);
    rig.vector.Load(row, src.gm().Rows({i, i + 1}));
    EXPECT_EQ(row.slot()->shows.data, src.gm().Rows({i, i + 1}).data());
    rig.vector.Store(dst.gm().Rows({i, i + 1}), row);
    rig.vector.Store(dst.gm().Rows({i + 2, i + 3}), row);
  }
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 65; ++j) ASSERT_EQ(dst->at({i, j}), src->at({i % 2, j}));
  }
}

// ---- Hand-overs

// Fills `acc` with value + i * 100 + j, by a product.
void FillAccumulator(HostAiCore& core, L0CTile<float> acc, double value) {
  const std::int64_t m = acc.rows(), n = acc.cols();
  GmMatrix a(DType::kF32, m, 2), b(DType::kF32, 2, n);
  for (std::int64_t i = 0; i < m; ++i)
    a->set({i, 0}, value + static_cast<double>(i * 100)), a->set({i, 1}, 1);
  for (std::int64_t j = 0; j < n; ++j) b->set({0, j}, 1), b->set({1, j}, static_cast<double>(j));
  const Operands<float> operands(core, a.gm(), b.gm());
  core.Mmad(acc, ToL0A(core, operands.a1), ToL0B(core, operands.b1), Accumulate::kNo);
}
Values Filled(std::int64_t rows, std::int64_t cols, double value) {
  Values values;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) values.push_back(value + static_cast<double>(i * 100 + j));
  }
  return values;
}

TEST_P(HostCoreTest, AnAccumulatorChangesHands) {
  struct Case {
    std::int64_t rows, cols, l0c_rows, l0c_cols, ub_rows, ub_cols;
    bool swaps;
  };
  for (const Case& at :
       {Case{16, 32, 16, 32, 16, 32, true}, Case{7, 33, 16, 64, 16, 64, true},
        Case{7, 33, 16, 64, 7, 33, false}, Case{7, 33, 16, 40, 20, 40, false}, Case{5, 1, 16, 1, 5, 1, false},
        Case{1, 1, 1, 1, 8, 1, false}, Case{3, 0, 3, 8, 3, 8, true}}) {
    SCOPED_TRACE(std::to_string(at.rows) + "x" + std::to_string(at.cols));
    HostRig rig;
    Ring<Buffer::kL0C, float> acc_ring(rig.core, "acc", at.l0c_rows, at.l0c_cols, 1);
    Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", at.ub_rows, at.ub_cols, 1);
    GmMatrix out(DType::kF32, at.rows, at.cols);
    for (int round = 0; round < 3; ++round) {
      const auto acc = acc_ring.Next(at.rows, at.cols);
      FillAccumulator(rig.core, acc, 7 + round);
      const auto ub = ub_ring.Next(at.rows, at.cols);
      const std::byte* given = acc.slot()->storage;
      rig.vector.Move(ub, acc);
      EXPECT_EQ(ub.slot()->storage == given, at.swaps);
      FillAccumulator(rig.core, acc_ring.Next(at.l0c_rows, at.l0c_cols),
                      -1);  // The giver is used again at once.
      rig.vector.Store(out.gm(), ub);
      ExpectExactly(out->view(), Filled(at.rows, at.cols, 7 + round));
    }
  }
}

// Send frees the accumulator at once: several tiles are on their way while the next ones are computed.
TEST_P(HostCoreTest, TilesWaitInHandOverSlots) {
  for (const std::int64_t ub_cols : {40, 64}) {  // unlike slots: copied; alike: given
    HostRig rig;
    Ring<Buffer::kL0C, float> acc_ring(rig.core, "acc", 16, 64, 1);
    Ring<Buffer::kHandOver, float> between_ring(rig.core, "between", 16, 64, 3);
    Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", 16, ub_cols, 1);
    GmMatrix out(DType::kF32, 9, 33);
    for (int round = 0; round < 4; ++round) {
      std::vector<HandOverTile<float>> sent;
      for (int step = 0; step < 3; ++step) {
        const auto acc = acc_ring.Next(9, 33);
        FillAccumulator(rig.core, acc, 10 * round + step);
        sent.push_back(between_ring.Next(9, 33));
        rig.core.Send(sent.back(), acc);
      }
      for (int step = 0; step < 3; ++step) {
        const auto ub = ub_ring.Next(9, 33);
        const auto tile = sent[static_cast<std::size_t>(step)];
        const std::byte* given = tile.slot()->storage;
        rig.vector.Receive(ub, tile);
        EXPECT_EQ(ub.slot()->storage == given, ub_cols == 64);
        rig.vector.Store(out.gm(), ub);
        ExpectExactly(out->view(), Filled(9, 33, 10 * round + step));
      }
    }
  }
}

TEST_P(HostCoreTest, PartsOfAHandOverSlotAreReceivedApart) {
  HostRig rig;
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 20, 40);
  const auto between = NewTile<Buffer::kHandOver, float>(rig.core, 20, 40);
  FillAccumulator(rig.core, acc, 3);
  rig.core.Send(between, acc);
  GmMatrix out(DType::kF32, 20, 40);
  for (const Range rows : {Range{0, 13}, Range{13, 20}}) {
    const auto part = NewTile<Buffer::kUB, float>(rig.vector, rows.size(), 40);
    rig.vector.Receive(part, between.Rows(rows));
    rig.vector.Store(out.gm().Rows(rows), part);
  }
  ExpectExactly(out->view(), Filled(20, 40, 3));
}

TEST_P(HostCoreTest, PartsOfAnAccumulatorAreCopied) {
  HostRig rig;
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 20, 40);
  FillAccumulator(rig.core, acc, 0);
  Ring<Buffer::kUB, float> ring(rig.vector, "rows", 16, 40, 2);
  const auto top = ring.Next(13, 40), bottom = ring.Next(7, 40);
  rig.vector.Move(top, acc.Rows({0, 13}));
  rig.vector.Move(bottom, acc.Rows({13, 20}));
  GmMatrix out(DType::kF32, 20, 40), all(DType::kF32, 20, 40), corner(DType::kF32, 16, 40);
  rig.vector.Store(out.gm().Rows({0, 13}), top);
  rig.vector.Store(out.gm().Rows({13, 20}), bottom);
  ExpectExactly(out->view(), Filled(20, 40, 0));
  rig.core.Store(all.gm(), acc);
  ExpectExactly(all->view(), Filled(20, 40, 0));

  const auto wide = NewTile<Buffer::kUB, float>(rig.vector, 16, 40);
  rig.vector.Fill(wide, -5);
  rig.vector.Move(wide.Part({3, 8}, {10, 21}), acc.Part({4, 9}, {2, 13}));
  rig.vector.Store(corner.gm(), wide);
  for (std::int64_t i = 0; i < 16; ++i) {
    for (std::int64_t j = 0; j < 40; ++j) {
      const bool moved = i >= 3 && i < 8 && j >= 10 && j < 21;
      ASSERT_EQ(corner->at({i, j}), moved ? static_cast<double>((i + 1) * 100 + j - 8) : -5.0);
    }
  }
}

// Rows of UB become an A operand; columns beyond them must not reach the product (the memory holds NaN).
TEST_P(HostCoreTest, RowsChangeHandsAndAreMultiplied) {
  Random random;
  struct Case {
    std::int64_t m, k, ub_rows, ub_cols, l1_rows, l1_cols;
    bool alike;
  };
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Case& at :
         {Case{16, 32, 16, 32, 16, 32, true}, Case{7, 33, 16, 64, 16, 64, true},
          Case{7, 33, 7, 33, 7, 33, true}, Case{13, 15, 13, 15, 20, 24, false}, Case{1, 1, 4, 1, 4, 1, false},
          Case{5, 1, 5, 1, 5, 1, false}, Case{3, 31, 9, 40, 8, 40, false}}) {
      SCOPED_TRACE(std::string(NameOf(DTypeOf<T>())) + " " + std::to_string(at.m) + "x" +
                   std::to_string(at.k));
      HostRig rig;
      const std::int64_t n = 35;
      GmMatrix a(DTypeOf<T>(), at.m, at.k), b(DTypeOf<T>(), at.k, n), c(DType::kF32, at.m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const UbTile<T> rows = LoadRows<T>(rig.vector, a.gm(), at.ub_rows, at.ub_cols);
      const auto a1 =
          Ring<Buffer::kL1, T>(rig.core, "a1", at.l1_rows, at.l1_cols, 1, Role::kA).Next(at.m, at.k);
      const std::byte* given = rows.slot()->storage;
      rig.vector.Move(a1, rows);
      const bool widened = HostChip().OperandBytes(DTypeOf<T>()) != SizeOf(DTypeOf<T>());
      EXPECT_EQ(a1.slot()->storage == given, at.alike && !widened);
      GmMatrix other(DTypeOf<T>(), at.m, at.k);
      other->Fill(99);
      rig.vector.Load(rows, other.gm());  // The giver is used again at once.

      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, at.k, n, Role::kB);
      rig.core.Load(b1, b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, at.m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

// Two Vector cores give their rows to one operand.
TEST_P(HostCoreTest, PartsOfRowsMeetInOneOperand) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t k : {24, 33}) {
      HostRig rig;
      const std::int64_t m = 19, n = 20;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const auto a1 = NewTile<Buffer::kL1, T>(rig.core, m, k, Role::kA);
      for (Range rows : Split(m, 10)) {
        rig.vector.Move(a1.Rows(rows), LoadRows<T>(rig.vector, a.gm().Rows(rows), 10, k));
      }
      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, k, n, Role::kB);
      rig.core.Load(b1, b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

// Steps in flight: scores of the next step are made before the last one's rows are used, and storage changes
// hands both ways. out_s = (a_s b) d, with the scores passing through UB.
TEST_P(HostCoreTest, HandOversOfStepsInFlightDoNotMix) {
  Random random;
  HostRig rig;
  constexpr std::int64_t kSteps = 7, kM = 10, kK = 6, kN = 17;
  GmMatrix b(DType::kF32, kK, kN), d(DType::kF32, kN, 9);
  b->FillIntegers(random), d->FillIntegers(random);
  const auto b1 = NewTile<Buffer::kL1, float>(rig.core, kK, kN, Role::kB);
  const auto d1 = NewTile<Buffer::kL1, float>(rig.core, kN, 9, Role::kB);
  rig.core.Load(b1, b.gm()), rig.core.Load(d1, d.gm());
  Ring<Buffer::kL1, float> a_ring(rig.core, "a", kM, kK, 2, Role::kA),
      p_ring(rig.core, "p", kM, kN, 2, Role::kA);
  Ring<Buffer::kL0C, float> s_ring(rig.core, "s", kM, kN, 2), o_ring(rig.core, "o", kM, 9, 2);
  Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", kM, kN, 2);
  std::vector<std::unique_ptr<GmMatrix>> inputs;
  L0CTile<float> scores[kSteps + 1];
  const auto make_scores = [&](std::int64_t step) {
    inputs.push_back(std::make_unique<GmMatrix>(DType::kF32, kM, kK));
    (*inputs.back())->FillIntegers(random);
    const auto a1 = a_ring.Next(kM, kK);
    rig.core.Load(a1, inputs.back()->gm());
    scores[step] = s_ring.Next(kM, kN);
    rig.core.Mmad(scores[step], ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
  };
  make_scores(0);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    make_scores(step + 1);
    const auto rows = ub_ring.Next(kM, kN);
    rig.vector.Move(rows, scores[step]);
    const auto p1 = p_ring.Next(kM, kN);
    rig.vector.Move(p1, rows);
    const auto out = o_ring.Next(kM, 9);
    rig.core.Mmad(out, ToL0A(rig.core, p1), ToL0B(rig.core, d1), Accumulate::kNo);
    GmMatrix c(DType::kF32, kM, 9), s(DType::kF32, kM, kN);
    rig.core.Store(c.gm(), out);
    const Values exact = ProductOf(*inputs[Index(step)], b);
    for (std::int64_t i = 0; i < kM * kN; ++i) s->set({i / kN, i % kN}, exact[Index(i)]);
    ExpectExactly(c->view(), ProductOf(s, d));
  }
}

// ---- What the typed front refuses

class HostCoreDeathTest : public ::testing::Test {
 protected:
  HostCoreDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  HostRig rig_;
};

TEST_F(HostCoreDeathTest, ATileWhoseSlotWasReusedNamesItsRing) {
  Ring<Buffer::kUB, float> ring(rig_.vector, "scores_ub", 4, 8, 2);
  const auto stale = ring.Next(4, 8);
  ring.Next(4, 8);
  rig_.vector.Fill(stale, 1);  // Two stages: still its own.
  ring.Next(4, 8);
  EXPECT_DEATH(rig_.vector.Fill(stale, 1), "scores_ub: tile used after its slot was reused");
  EXPECT_DEATH(rig_.vector.Exp(ring.Next(2, 2), stale.Part({0, 2}, {0, 2})), "scores_ub: tile used after");
  Ring<Buffer::kL0C, float> acc_ring(rig_.core, "acc_l0", 4, 8, 1);
  const auto acc = acc_ring.Next(4, 8);
  acc_ring.Next(4, 8);
  EXPECT_DEATH(rig_.vector.Move(ring.Next(4, 8), acc), "acc_l0: tile used after its slot was reused");
}

TEST_F(HostCoreDeathTest, ATileLargerThanItsSlotNamesItsRing) {
  Ring<Buffer::kL1, BF16> ring(rig_.core, "a_l1", 4, 8, 1, Role::kA);
  EXPECT_DEATH(ring.Next(5, 8), "a_l1: tile larger than its slot");
  EXPECT_DEATH(ring.Next(4, 9), "a_l1: tile larger than its slot");
}

TEST_F(HostCoreDeathTest, ShapesMustAgree) {
  GmMatrix gm(DType::kF32, 4, 8);
  const auto a = NewTile<Buffer::kUB, float>(rig_.vector, 4, 8),
             b = NewTile<Buffer::kUB, float>(rig_.vector, 4, 7);
  const auto a0 = NewTile<Buffer::kL0A, float>(rig_.core, 4, 8, Role::kA);
  const auto b0 = NewTile<Buffer::kL0B, float>(rig_.core, 7, 5, Role::kB);
  const auto acc = NewTile<Buffer::kL0C, float>(rig_.core, 4, 5);
  EXPECT_DEATH(rig_.vector.Load(b, gm.gm()), "shapes differ");
  EXPECT_DEATH(rig_.vector.Store(gm.gm(), b), "shapes differ");
  EXPECT_DEATH(rig_.vector.Add(a, a, b), "shapes differ");
  EXPECT_DEATH(rig_.vector.RowMax(b.Cols({0, 2}), b), "shapes differ");
  EXPECT_DEATH(rig_.core.Mmad(acc, a0, b0, Accumulate::kNo), "shapes do not multiply");
  EXPECT_DEATH(rig_.vector.Move(a, acc), "shapes differ");
}

TEST_F(HostCoreDeathTest, LoadsDoNotConvertUnasked) {
  GmMatrix narrow(DType::kBF16, 4, 8), wide(DType::kF32, 4, 8), ids(DType::kI64, 4, 8);
  EXPECT_DEATH(rig_.core.Load(NewTile<Buffer::kL1, F16>(rig_.core, 4, 8, Role::kA), narrow.gm()),
               "Load to L1 does not convert");
  EXPECT_DEATH(rig_.vector.Load(NewTile<Buffer::kUB, BF16>(rig_.vector, 4, 8), wide.gm()),
               "widens to float only");
  EXPECT_DEATH(rig_.vector.Load(NewTile<Buffer::kUB, std::int32_t>(rig_.vector, 4, 8), ids.gm()),
               "widens to float only");
  EXPECT_DEATH(rig_.vector.Store(wide.gm(), NewTile<Buffer::kUB, BF16>(rig_.vector, 4, 8)),
               "narrows floats only");
}

TEST_F(HostCoreDeathTest, PackedBlocksBeginAtPanels) {
  const std::int64_t step = BestCubeOps().nr;
  const PackedMatrix packed(Role::kB, DType::kF32, 8, 2 * step, 1);
  EXPECT_DEATH(rig_.core.Load(NewTile<Buffer::kL1, float>(rig_.core, 8, step, Role::kB),
                              packed.gm().Block({0, 8}, {1, step + 1})),
               "begins inside a panel");
}

}  // namespace
}  // namespace cubist::host_test
