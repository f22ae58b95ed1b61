// The same for products: operands in every layout, and parts.
#include "tests/npu_model/host_rig.h"

namespace cubist::host_test {
namespace {

class HostProductsTest : public SimdTargetTest {};
INSTANTIATE_TEST_SUITE_P(Simd, HostProductsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

struct MmadShape {
  std::int64_t m, n, k;
};
constexpr MmadShape kMmadShapes[] = {{1, 1, 1},    {3, 5, 7},  {16, 16, 16}, {13, 33, 9}, {12, 64, 31},
                                     {30, 70, 40}, {5, 37, 0}, {0, 4, 3},    {4, 0, 3}};

TEST_P(HostProductsTest, MmadOfOperandsInEveryLayout) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& a_layout : kLayouts) {
      for (const Layout& b_layout : kLayouts) {
        HostRig rig;
        for (const auto& [m, n, k] : kMmadShapes) {
          GmMatrix a(DTypeOf<T>(), m, k, a_layout), b(DTypeOf<T>(), k, n, b_layout), c(DType::kF32, m, n);
          a->FillIntegers(random), b->FillIntegers(random);
          Multiply<T>(rig.core, a.gm(), b.gm(), c.gm());
          ExpectExactly(c->view(), ProductOf(a, b));
        }
      }
    }
  });
}

TEST_P(HostProductsTest, StoreOfAnAccumulatorInEveryLayoutAndType) {
  Random random;
  for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Layout& layout : kLayouts) {
      HostRig rig;
      for (const auto& [m, n, k] : kMmadShapes) {
        GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(out, m, n, layout);
        a->FillIntegers(random, -20, 20), b->FillIntegers(random, -20, 20);
        Multiply<float>(rig.core, a.gm(), b.gm(), c.gm());
        ExpectExactly(c->view(), Rounded(ProductOf(a, b), out));
      }
    }
  }
}

// A B tile that few rows use is read where it lies, whole or in parts, whatever its layout.
TEST_P(HostProductsTest, MmadOfAnOperandUsedOnce) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : kLayouts) {
      for (const auto& [m, n, k] :
           {MmadShape{1, 70, 41}, MmadShape{1, 600, 75}, MmadShape{2, 300, 33}, MmadShape{3, 260, 70},
            MmadShape{4, 200, 65}, MmadShape{5, 33, 96}, MmadShape{40, 64, 530}}) {
        HostRig rig;
        GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n, layout), c(DType::kF32, m, n);
        a->FillIntegers(random), b->FillIntegers(random);
        Ring<Buffer::kL1, T> a_l1(rig.core, "a1", m, k, 1, Role::kA),
            b_l1(rig.core, "b1", k, n, 1, Role::kBOnce);
        const auto a1 = a_l1.Next(m, k), b1 = b_l1.Next(k, n);
        rig.core.Load(a1, a.gm());
        rig.core.Load(b1, b.gm());
        const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
        for (const Range k0 : Split(k, k > 500 ? 450 : 32)) {  // More than a panel of it, and less.
          rig.core.Mmad(acc, ToL0A(rig.core, a1.Cols(k0)), ToL0B(rig.core, b1.Rows(k0)),
                        k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
        }
        rig.core.Store(c.gm(), acc);
        ExpectExactly(c->view(), ProductOf(a, b));
      }
    }
  });
}

// Few rows are multiplied by bodies of their own where B's rows or columns lie in runs: with the bits of packed panels,
// wherever the sums start and go.
TEST_P(HostProductsTest, FewRowsHaveTheBitsOfPackedPanels) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    const auto check = [&](std::int64_t m, std::int64_t n, std::int64_t k, const Layout& layout,
                           std::int64_t step = 40) {
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n, layout), bias(DType::kF32, 1, n);
      a->FillNormal(random), b->FillNormal(random), bias->FillNormal(random);
      const auto product = [&](Role role, bool with_bias, const GmMatrix& c) {
        HostRig rig;
        Ring<Buffer::kL1, T> a_l1(rig.core, "a1", m, k, 1, Role::kA), b_l1(rig.core, "b1", k, n, 1, role);
        const auto a1 = a_l1.Next(m, k), b1 = b_l1.Next(k, n);
        rig.core.Load(a1, a.gm());
        rig.core.Load(b1, b.gm());
        const auto row = NewTile<Buffer::kBT, float>(rig.core, 1, n);
        rig.core.Load(row, bias.gm());
        const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n, Role::kRelay);
        for (const Range k0 : Split(k, step)) {
          const auto a0 = ToL0A(rig.core, a1.Cols(k0));
          const auto b0 = ToL0B(rig.core, b1.Rows(k0));
          if (k0.begin == 0 && with_bias) {
            rig.core.Mmad(acc, a0, b0, row);
          } else {
            rig.core.Mmad(acc, a0, b0, k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
          }
        }
        rig.core.Store(c.gm(), acc);
      };
      for (const bool with_bias : {false, true}) {
        GmMatrix in_place(DType::kF32, m, n), packed(DType::kF32, m, n);
        product(Role::kBOnce, with_bias, in_place);
        product(Role::kB, with_bias, packed);
        ExpectSameBits(in_place->view(), packed->view());
      }
    };
    for (const Layout& layout : kLayouts) {
      for (std::int64_t m : {1, 2, 3, 4, 5, 6, 8, 11, 16, 17}) check(m, 301, 77, layout);
      for (std::int64_t m = 1; m <= 6; ++m) check(m, 803, 19, layout);
      check(9, 803, 19, layout), check(16, 803, 45, layout);
      // Columns, and rows of A, 2048 elements apart: they share a set of the cache.
      for (std::int64_t m = 1; m <= 9; ++m) check(m, 19, 2045, layout, 2045);
      check(8, 1100, 41, layout);  // More columns, and more of k, than a body takes at a time.
      check(4, 37, 1100, layout);
      // Every number of parts of rows, and rows that fill none of them, in long columns.
      for (std::int64_t m : {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                             15, 16, 17, 19, 24, 25, 32, 33, 41, 50, 57, 64, 72, 73})
        check(m, 21, 1029, layout, 1029);
      for (std::int64_t m : {1, 7}) check(m, 35, 2331, layout, 1156);  // And sums that go on.
      // Short columns, some of which end between vectors.
      for (std::int64_t k : {16, 33, 47, 64, 127}) check(1, 50, k, layout, k), check(8, 37, k, layout, k);
      // More words than are turned at a time.
      for (std::int64_t k : {15, 515, 1301, 2307}) check(64, 13, k, layout, k), check(20, 13, k, layout, k);
      check(8, 13, 9001, layout, 9001);
      // Columns that fill no tile, of one strip of rows and of several.
      for (std::int64_t n : {1, 8, 9, 16, 17, 31, 40, 63}) {
        for (std::int64_t m : {3, 13, 72}) check(m, n, 133, layout, 133);
      }
      // More of either than is packed at a time, and more rows than a panel of B serves.
      for (std::int64_t m : {3, 40}) check(m, 533, 290, layout, 290), check(m, 77, 2100, layout, 2100);
      for (std::int64_t m : {96, 133}) check(m, 77, 601, layout, 601);
    }
  });
}

// GM += L0C: what stood there counts, and what stands between rows and columns stays.
TEST_P(HostProductsTest, StoreOfAnAccumulatorAdds) {
  Random random;
  for (const Layout& layout : kLayouts) {
    HostRig rig;
    for (const auto& [m, n, k] : kMmadShapes) {
      GmMatrix a(DType::kBF16, m, k), b(DType::kBF16, k, n), c(DType::kF32, m, n, layout);
      a->FillIntegers(random), b->FillIntegers(random), c->FillIntegers(random);
      const Values expected = ProductOf(a, b, c->ToDoubles());
      const Operands<BF16> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc, Accumulate::kYes);
      ExpectExactly(c->view(), expected);
    }
  }
}

// The last Mmad of a relay accumulator may write where the Store behind it goes: the same as from L0C, after several
// Mmads, wherever and however it is stored, and where the operands change in between.
TEST_P(HostProductsTest, ARelayAccumulatorIsStoredAsAnyOther) {
  Random random;
  for (const Layout& layout : kLayouts) {
    for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
      for (const bool changes : {false, true}) {
        HostRig rig;
        for (const auto& [m, n, k] : {MmadShape{30, 70, 40}, MmadShape{13, 33, 9}, MmadShape{5, 37, 0}}) {
          GmMatrix a(DType::kBF16, m, k, kColumnMajor), b(DType::kBF16, k, n), c(DType::kF32, m, n, layout),
              other(DType::kBF16, m, k, kColumnMajor);
          a->FillIntegers(random), b->FillIntegers(random), c->FillIntegers(random);
          other->FillIntegers(random);
          const Values expected =
              accumulate == Accumulate::kYes ? ProductOf(a, b, c->ToDoubles()) : ProductOf(a, b);
          const Operands<BF16> operands(rig.core, a.gm(), b.gm());
          const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n, Role::kRelay);
          for (const Range k0 : AtLeastOnce(Split(k, 16))) {
            rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Cols(k0)), ToL0B(rig.core, operands.b1.Rows(k0)),
                          k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
          }
          if (changes) rig.core.Load(operands.a1, other.gm());
          rig.core.Store(c.gm(), acc, accumulate);
          ExpectExactly(c->view(), expected);
        }
      }
    }
  }
}

// Random reals: k + 1 roundings of the sum of magnitudes.
TEST_P(HostProductsTest, MmadOfRealsIsWithinItsBound) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    HostRig rig;
    const std::int64_t m = 17, n = 45, k = 301;
    GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
    a->FillNormal(random), b->FillNormal(random);
    Multiply<T>(rig.core, a.gm(), b.gm(), c.gm());
    Values bound;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        double magnitude = 0;
        for (std::int64_t p = 0; p < k; ++p) magnitude += std::abs(a->at({i, p}) * b->at({p, j}));
        bound.push_back(2 * static_cast<double>(k + 1) * kEps * magnitude);
      }
    }
    ExpectClose(c->view(), ProductOf(a, b), bound);
  });
}

// Where an A operand lies after its load: in GM where Mmad can read it there, else in the slot. Whichever it
// is, the product is right.
template <class T>
void CheckPlaceOfA(std::int64_t m, std::int64_t k, const Layout& layout, bool in_place,
                   Role role = Role::kA) {
  SCOPED_TRACE(std::string(NameOf(DTypeOf<T>())) + " " + std::to_string(m) + "x" + std::to_string(k));
  Random random;
  HostRig rig;
  GmMatrix a(DTypeOf<T>(), m, k, layout), b(DTypeOf<T>(), k, 9), c(DType::kF32, m, 9);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<T> operands(rig.core, a.gm(), b.gm(), role);
  const bool in_lines = reinterpret_cast<std::uintptr_t>(a.gm().data()) % 64 == 0 &&
                        a.gm().row_stride * SizeOf(DTypeOf<T>()) % 64 == 0;
  if (DTypeOf<T>() == DType::kBF16 && BestCubeOps().amx && !in_lines) in_place = false;
  EXPECT_EQ(operands.a1.slot()->shows.data == a.gm().data(), in_place);
  EXPECT_EQ(operands.a1.slot()->shows.data == operands.a1.slot()->storage, !in_place);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, 9);
  rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1), Accumulate::kNo);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
}

TEST_P(HostProductsTest, AnAOperandIsReadInPlaceOrCopied) {
  const std::int64_t mr = BestCubeOps().mr;
  const bool native = BestCubeOps().native_bf16;
  CheckPlaceOfA<float>(2 * mr + 1, 20, {}, true);
  CheckPlaceOfA<float>(2 * mr + 1, 21, {}, true);
  CheckPlaceOfA<float>(mr, 20, {.gap = 2000}, true);       // Long rows, but few of them.
  CheckPlaceOfA<float>(mr + 1, 20, {.gap = 2000}, false);  // Long rows.
  const Layout pages{.gap = 2048 - 600};  // Rows that share sets of a first-level cache, of long runs.
  CheckPlaceOfA<float>(mr + 1, 600, pages, false);
  CheckPlaceOfA<float>(mr + 1, 600, pages, HostChip().packing.few_columns_in_place, Role::kAFew);
  CheckPlaceOfA<float>(mr + 1, 600, {.gap = 2000}, true, Role::kAFew);
  CheckPlaceOfA<float>(mr, 20, kColumnMajor, false);
  CheckPlaceOfA<float>(mr, 20, {.step = 2}, false);
  CheckPlaceOfA<BF16>(2 * mr + 1, 32, {}, native);
  CheckPlaceOfA<BF16>(2 * mr + 1, 20, {}, native);
  CheckPlaceOfA<BF16>(2 * mr + 1, 21, {}, native);
  CheckPlaceOfA<F16>(2 * mr + 1, 20, {}, false);  // Widened.
}

// Loads into L1 cut towards the size of L0: parts of A anywhere, parts of B at panels and pairs of k.
TEST_P(HostProductsTest, OperandsLoadedInParts) {
  Random random;
  const std::int64_t nr = BestCubeOps().nr;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t k : {48, 47}) {
      HostRig rig;
      const std::int64_t m = 20, n = 2 * nr + 5;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const auto a1 = NewTile<Buffer::kL1, T>(rig.core, m, k, Role::kA);
      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, k, n, Role::kB);
      for (Range k0 : Split(k, 10)) {
        for (Range rows : Split(m, 7)) rig.core.Load(a1.Part(rows, k0), a.gm().Block(rows, k0));
        for (Range cols : Split(n, nr)) rig.core.Load(b1.Part(k0, cols), b.gm().Block(k0, cols));
      }
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

TEST_P(HostProductsTest, PartsOfL1GoToL0) {
  Random random;
  const std::int64_t nr = BestCubeOps().nr;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : {Layout{}, kColumnMajor}) {  // A in place, and packed.
      HostRig rig;
      const std::int64_t m = 21, k = 50, n = 3 * nr + 3;
      const Range rows{5, 18}, inner{16, 38}, cols{nr, 2 * nr + 3};
      GmMatrix a(DTypeOf<T>(), m, k, layout), b(DTypeOf<T>(), k, n), c(DType::kF32, rows.size(), cols.size());
      a->FillIntegers(random), b->FillIntegers(random);
      const Operands<T> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, rows.size(), cols.size());
      rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Part(rows, inner)),
                    ToL0B(rig.core, operands.b1.Part(inner, cols)), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        for (std::int64_t j = cols.begin; j < cols.end; ++j) {
          double sum = 0;
          for (std::int64_t p = inner.begin; p < inner.end; ++p) sum += a->at({i, p}) * b->at({p, j});
          ASSERT_EQ(c->at({i - rows.begin, j - cols.begin}), sum) << i << ", " << j;
        }
      }
    }
  });
}

// An odd k in the middle of a tile ends there: native bf16 multiplies pairs of k, and the neighbour of the last
// one is another element of the tile.
TEST_P(HostProductsTest, AnOddPartOfKEndsWhereItSays) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : {Layout{}, kColumnMajor}) {  // A in place, and packed.
      for (std::int64_t m : {6, 300}) {
        for (const Range k0 : {Range{0, 7}, Range{4, 5}, Range{2, 19}}) {
          HostRig rig;
          GmMatrix a(DTypeOf<T>(), m, 20, layout), b(DTypeOf<T>(), 20, 9), c(DType::kF32, m, 9);
          a->FillIntegers(random, 1, 4), b->FillIntegers(random, 1, 4);
          const Operands<T> operands(rig.core, a.gm(), b.gm());
          const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, 9);
          rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Cols(k0)), ToL0B(rig.core, operands.b1.Rows(k0)),
                        Accumulate::kNo);
          rig.core.Store(c.gm(), acc);
          Values expected;
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < 9; ++j) {
              expected.push_back(0);
              for (std::int64_t p = k0.begin; p < k0.end; ++p)
                expected.back() += a->at({i, p}) * b->at({p, j});
            }
          }
          ExpectExactly(c->view(), expected);
        }
      }
    }
  });
}

// How k is cut into instructions changes no bit, where it is cut at steps of the Cube.
TEST_P(HostProductsTest, CuttingKChangesNoBit) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    const std::int64_t m = 19, n = 40, k = 135;
    GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), whole(DType::kF32, m, n);
    a->FillNormal(random), b->FillNormal(random);
    HostRig rig;
    Multiply<T>(rig.core, a.gm(), b.gm(), whole.gm());
    const std::int64_t least =
        std::max<std::int64_t>(HostChip().mmad.k_bytes / HostChip().OperandBytes(DTypeOf<T>()), 2);
    for (std::int64_t step : {least, 2 * least, 64L, RoundUp(k, least) - least}) {
      GmMatrix c(DType::kF32, m, n);
      const Operands<T> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      for (Range k0 : Split(k, step)) {
        rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Cols(k0)), ToL0B(rig.core, operands.b1.Rows(k0)),
                      k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
      }
      rig.core.Store(c.gm(), acc);
      ExpectSameBits(c->view(), whole->view());
    }
  });
}

// Parts of an accumulator: rows anywhere, columns at panels.
TEST_P(HostProductsTest, PartsOfAnAccumulator) {
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr, m = 20, n = nr + 7, k = 12;
  GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(DType::kF32, m, n), part(DType::kF32, 9, 5);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  for (Range rows : Split(m, 9)) {
    for (Range cols : Split(n, nr)) {
      rig.core.Mmad(acc.Part(rows, cols), ToL0A(rig.core, operands.a1.Rows(rows)),
                    ToL0B(rig.core, operands.b1.Cols(cols)), Accumulate::kNo);
    }
  }
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
  rig.core.Store(part.gm(), acc.Part({4, 13}, {2, 7}));
  for (std::int64_t i = 0; i < 9; ++i) {
    for (std::int64_t j = 0; j < 5; ++j) ASSERT_EQ(part->at({i, j}), c->at({i + 4, j + 2}));
  }
}

// A Mmad writes whole panels. Where that would reach beyond its part of an accumulator it is refused.
TEST_P(HostProductsTest, PartsOfAnAccumulatorThatSharePanelsAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr;
  GmMatrix a(DType::kF32, 6, 8), b(DType::kF32, 8, 3 * nr);
  a->FillIntegers(random), b->FillIntegers(random);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 6, 3 * nr);
  for (Range cols : {Range{nr + 1, 3 * nr}, Range{nr, 3 * nr - 1}}) {
    const Operands<float> operands(rig.core, a.gm(), b.gm().Cols(cols));
    EXPECT_DEATH(rig.core.Mmad(acc.Cols(cols), ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1),
                               Accumulate::kNo),
                 "panel");
  }
}

// A tile of L0 may be used in parts, too.
TEST_P(HostProductsTest, MmadOfPartsOfL0) {
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr, m = 20, n = 2 * nr, k = 12;
  GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(DType::kF32, m, n);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto a0 = ToL0A(rig.core, operands.a1);
  const auto b0 = ToL0B(rig.core, operands.b1);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  for (Range rows : Split(m, 8)) {
    for (Range cols : Split(n, nr)) {
      for (Range k0 : Split(k, 6)) {
        rig.core.Mmad(acc.Part(rows, cols), a0.Part(rows, k0), b0.Part(k0, cols),
                      k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
      }
    }
  }
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
}

TEST_P(HostProductsTest, BiasStartsTheAccumulator) {
  Random random;
  for (DType bias_type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::int64_t step : {1, 3}) {
      for (std::int64_t k : {0, 1, 26}) {
        HostRig rig;
        const std::int64_t m = 14, n = 41;
        GmMatrix a(DType::kBF16, m, k), b(DType::kBF16, k, n), c(DType::kF32, m, n),
            bias(bias_type, 1, n, {.step = step});
        a->FillIntegers(random), b->FillIntegers(random), bias->FillIntegers(random, -60, 60);
        Values start;
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) start.push_back(bias->at({0, j}));
        }
        const Operands<BF16> operands(rig.core, a.gm(), b.gm());
        const auto row = Ring<Buffer::kBT, float>(rig.core, "bias", 1, n + 9, 1).Next(1, n);
        rig.core.Load(row, bias.gm());
        const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
        const auto a0 = ToL0A(rig.core, operands.a1);
        const auto b0 = ToL0B(rig.core, operands.b1);
        rig.core.Mmad(acc, a0, b0, row);
        rig.core.Store(c.gm(), acc);
        const Values once = ProductOf(a, b, start);
        ExpectExactly(c->view(), once);
        rig.core.Mmad(acc, a0, b0, Accumulate::kYes);
        rig.core.Store(c.gm(), acc);
        ExpectExactly(c->view(), ProductOf(a, b, once));
      }
    }
  }
}

// The columns of a bias row that a block needs.
TEST_P(HostProductsTest, PartsOfABiasRow) {
  Random random;
  HostRig rig;
  GmMatrix a(DType::kF32, 4, 6), b(DType::kF32, 6, 10), bias(DType::kF32, 1, 30), c(DType::kF32, 4, 10);
  a->FillIntegers(random), b->FillIntegers(random), bias->FillIntegers(random, -60, 60);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto row = NewTile<Buffer::kBT, float>(rig.core, 1, 30);
  rig.core.Load(row.Cols({0, 11}), bias.gm().Cols({0, 11}));
  rig.core.Load(row.Cols({11, 30}), bias.gm().Cols({11, 30}));
  for (std::int64_t first : {0, 7, 20}) {
    Values start;
    for (std::int64_t i = 0; i < 40; ++i) start.push_back(bias->at({0, first + i % 10}));
    const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 4, 10);
    rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1),
                  row.Cols({first, first + 10}));
    rig.core.Store(c.gm(), acc);
    ExpectExactly(c->view(), ProductOf(a, b, start));
  }
}

TEST_P(HostProductsTest, AnEmptyKStartsTheAccumulatorAndAddsNothing) {
  Random random;
  HostRig rig;
  const std::int64_t m = 9, n = 35;
  GmMatrix a(DType::kF32, m, 3), b(DType::kF32, 3, n), c(DType::kF32, m, n);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> full(rig.core, a.gm(), b.gm());
  const Operands<float> empty(rig.core, a.gm().Cols({3, 3}), b.gm().Rows({3, 3}));
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  rig.core.Mmad(acc, ToL0A(rig.core, full.a1), ToL0B(rig.core, full.b1), Accumulate::kNo);
  rig.core.Mmad(acc, ToL0A(rig.core, empty.a1), ToL0B(rig.core, empty.b1), Accumulate::kYes);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
  rig.core.Mmad(acc, ToL0A(rig.core, empty.a1), ToL0B(rig.core, empty.b1), Accumulate::kNo);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), Values(Index(m * n), 0.0));
}

}  // namespace
}  // namespace cubist::host_test
