// The same for Vector instructions and composites.
#include <functional>

#include "tests/npu_model/host_rig.h"

namespace cubist::host_test {
namespace {

class HostVectorTest : public SimdTargetTest {
 protected:
  // A tile of the matrix's values, three columns and one row into a larger tile.
  UbTile<float> TileOf(const GmMatrix& values) {
    const Gm gm = values.gm();
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, gm.rows + 2, gm.cols + 5)
                          .Part({1, gm.rows + 1}, {3, gm.cols + 3});
    rig_.vector.Load(tile, gm);
    return tile;
  }
  // A column in a ring of columns, as kernels keep row statistics.
  UbTile<float> ColumnOf(const GmMatrix& values) {
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, values.gm().rows, 1);
    rig_.vector.Load(tile, values.gm());
    return tile;
  }
  template <class T>
  Values ValuesOf(UbTile<T> tile) {
    GmMatrix out(DTypeOf<T>(), tile.rows(), tile.cols());
    rig_.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  }
  template <class T>
  UbTile<T> IntsOf(const std::vector<T>& values, std::int64_t rows = 1) {
    const std::int64_t cols = rows == 0 ? 0 : static_cast<std::int64_t>(values.size()) / rows;
    GmMatrix in(DTypeOf<T>(), rows, cols);
    for (std::size_t i = 0; i < values.size(); ++i) {
      in->set({static_cast<std::int64_t>(i) / cols, static_cast<std::int64_t>(i) % cols},
              static_cast<double>(values[i]));
    }
    const auto tile = NewTile<Buffer::kUB, T>(rig_.vector, rows + 1, cols + 3).Part({0, rows}, {0, cols});
    rig_.vector.Load(tile, in.gm());
    return tile;
  }

  HostRig rig_;
  HostVectorCore& vector_ = rig_.vector;
  Random random_;
};
INSTANTIATE_TEST_SUITE_P(Simd, HostVectorTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

constexpr Shape kVectorShapes[] = {{1, 1}, {4, 1}, {1, 40}, {5, 17}, {3, 64}, {7, 33}};

// What writes all of a relay tile that shows GM leaves GM as it is.
TEST_P(HostVectorTest, RelayTilesAreWrittenBesideGm) {
  using Tile = UbTile<float>;
  const std::int64_t rows = 3, cols = 40;
  const auto tile_of = [&](const GmMatrix& x, Role role) {
    const auto tile = NewTile<Buffer::kUB, float>(vector_, rows, cols, role);
    vector_.Load(tile, x.gm());
    return tile;
  };
  const Tile s0 = NewTile<Buffer::kUB, float>(vector_, rows, cols),
             s1 = NewTile<Buffer::kUB, float>(vector_, rows, cols),
             column = NewTile<Buffer::kUB, float>(vector_, rows, 1),
             bad = NewTile<Buffer::kUB, float>(vector_, rows, 1);
  const auto scores = [&](ScoreFunction function) {
    return [&, function](Tile x) { vector_.Scores(function, x, s0, s1, column); };
  };
  const auto repair = [&](float limit, bool by_mean) {
    return [&, limit, by_mean](Tile x) { vector_.Repair(x, bad, s0, s1, column, limit, by_mean); };
  };
  const std::function<void(Tile)> kWrites[] = {
      [&](Tile x) { vector_.Add(x, x, x); }, scores(ScoreFunction::kSoftmax), scores(ScoreFunction::kSigmoid),
      scores(ScoreFunction::kSqrtSoftplus),  repair(1.0f, /*by_mean=*/false), repair(1.0f, /*by_mean=*/true),
      repair(1e9f, /*by_mean=*/false)};
  vector_.Fill(bad, 0.0f);
  for (const auto& write : kWrites) {
    GmMatrix x(DType::kF32, rows, cols);
    x->FillNormal(random_);
    x->set({1, 7}, 3.0);  // Beyond a limit of 1, as others are.
    const Values before = x->ToDoubles();
    const Tile shown = tile_of(x, Role::kRelay), copied = tile_of(x, Role::kRows);
    write(copied);
    const Values bad_of_copied = ValuesOf(bad);
    write(shown);
    EXPECT_EQ(ValuesOf(shown), ValuesOf(copied));
    EXPECT_EQ(ValuesOf(bad), bad_of_copied);
    EXPECT_EQ(x->ToDoubles(), before);
  }
}

TEST_P(HostVectorTest, BinaryInstructions) {
  using Tile = UbTile<float>;
  struct Instruction {
    void (*run)(HostVectorCore& core, Tile dst, Tile a, Tile b);
    float (*plain)(float a, float b);
  };
  const Instruction kInstructions[] = {
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Add(dst, a, b); },
       [](float a, float b) { return a + b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Sub(dst, a, b); },
       [](float a, float b) { return a - b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Mul(dst, a, b); },
       [](float a, float b) { return a * b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Div(dst, a, b); },
       [](float a, float b) { return a / b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Max(dst, a, b); },
       [](float a, float b) { return std::max(a, b); }}};
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols), b(DType::kF32, rows, cols), column(DType::kF32, rows, 1);
    a->FillNormal(random_), b->FillNormal(random_), column->FillNormal(random_);
    for (const auto& [run, plain] : kInstructions) {
      Values whole, spread;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          const auto left = static_cast<float>(a->at({i, j}));
          whole.push_back(plain(left, static_cast<float>(b->at({i, j}))));
          spread.push_back(plain(left, static_cast<float>(column->at({i, 0}))));
        }
      }
      const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
      run(vector_, dst, TileOf(a), TileOf(b));
      EXPECT_EQ(ValuesOf(dst), whole);
      const auto in_place = TileOf(a), right = TileOf(b);
      run(vector_, in_place, in_place, right);
      EXPECT_EQ(ValuesOf(in_place), whole);
      EXPECT_EQ(ValuesOf(right), b->ToDoubles());
      const auto broadcast = TileOf(a);
      run(vector_, broadcast, broadcast, ColumnOf(column));
      EXPECT_EQ(ValuesOf(broadcast), spread);
    }
  }
}

TEST_P(HostVectorTest, ScalarInstructionsAndFill) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillNormal(random_);
    Values products, maxima;
    for (double value : a->ToDoubles()) {
      products.push_back(static_cast<float>(value) * 0.3f);
      maxima.push_back(std::max(static_cast<float>(value), 0.25f));
    }
    const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    vector_.MulScalar(dst, TileOf(a), 0.3f);
    EXPECT_EQ(ValuesOf(dst), products);
    const auto in_place = TileOf(a);
    vector_.MaxScalar(in_place, in_place, 0.25f);
    EXPECT_EQ(ValuesOf(in_place), maxima);
    vector_.Fill(in_place, -2.5f);
    EXPECT_EQ(ValuesOf(in_place), Values(Index(rows * cols), -2.5));
  }
}

// An instruction on a part leaves the rest of the tile alone.
TEST_P(HostVectorTest, PartsAreAllThatIsWritten) {
  const auto tile = NewTile<Buffer::kUB, float>(vector_, 9, 50);
  vector_.Fill(tile, 1);
  vector_.Fill(tile.Part({2, 7}, {3, 40}), 2);
  const auto inner = tile.Part({3, 5}, {10, 31});
  vector_.Add(inner, inner, inner);
  vector_.MaskOutside(tile.Part({6, 7}, {20, 25}), 1, 2, -7);
  const Values values = ValuesOf(tile);
  for (std::int64_t i = 0; i < 9; ++i) {
    for (std::int64_t j = 0; j < 50; ++j) {
      double expected = 1;
      if (i >= 2 && i < 7 && j >= 3 && j < 40) expected = 2;
      if (i >= 3 && i < 5 && j >= 10 && j < 31) expected = 4;
      if (i == 6 && j >= 20 && j < 25 && j != 21 && j != 22) expected = -7;
      ASSERT_EQ(values[Index(i * 50 + j)], expected) << i << ", " << j;
    }
  }
}

TEST_P(HostVectorTest, ExpAndLnAreWithinTwoUlp) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillUniform(random_, -80, 80);
    const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    Values exact, bound;
    const auto expect = [&, rows = rows, cols = cols](double (*plain)(double)) {
      exact.clear(), bound.clear();
      for (double value : a->ToDoubles()) {
        const double result = plain(value);
        exact.push_back(result);
        // Two units in the last place, and half of one for the comparison with an exact result.
        bound.push_back(2.5 * std::ldexp(1.0, std::ilogb(result) - 23));
      }
      GmMatrix out(DType::kF32, rows, cols);
      vector_.Store(out.gm(), dst);
      ExpectClose(out->view(), exact, bound);
    };
    vector_.Exp(dst, TileOf(a));
    expect([](double x) { return std::exp(x); });
    a->FillUniform(random_, 0.01, 1000);
    vector_.Ln(dst, TileOf(a));
    expect([](double x) { return std::log(x); });
  }
}

TEST_P(HostVectorTest, RowReductions) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillIntegers(random_, -50, 50);
    Values maxima, sums;
    for (std::int64_t i = 0; i < rows; ++i) {
      maxima.push_back(-1e30), sums.push_back(0);
      for (std::int64_t j = 0; j < cols; ++j) {
        maxima.back() = std::max(maxima.back(), a->at({i, j})), sums.back() += a->at({i, j});
      }
    }
    const auto column = NewTile<Buffer::kUB, float>(vector_, rows, 1);
    vector_.RowMax(column, TileOf(a));
    EXPECT_EQ(ValuesOf(column), maxima);
    vector_.RowSum(column, TileOf(a));
    EXPECT_EQ(ValuesOf(column), sums);
    for (bool is_max : {true, false}) {  // Into the first column of the rows themselves.
      const auto tile = TileOf(a);
      is_max ? vector_.RowMax(tile.Cols({0, 1}), tile) : vector_.RowSum(tile.Cols({0, 1}), tile);
      EXPECT_EQ(ValuesOf(tile.Cols({0, 1})), is_max ? maxima : sums);
    }
  }
}

TEST_P(HostVectorTest, MaskOutsideABand) {
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  for (const auto& [rows, cols] : kVectorShapes) {
    for (std::int64_t highest : {-kFar, std::int64_t{-3}, std::int64_t{0}, std::int64_t{20}, kFar}) {
      for (std::int64_t lowest :
           {-kFar, std::int64_t{-100}, std::int64_t{-2}, std::int64_t{0}, std::int64_t{6}}) {
        GmMatrix a(DType::kF32, rows, cols);
        a->FillNormal(random_);
        const auto tile = TileOf(a);
        vector_.MaskOutside(tile, lowest, highest, -kInfinity);
        Values expected = a->ToDoubles();
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            if (j - i < lowest || j - i > highest) expected[Index(i * cols + j)] = -kInfinity;
          }
        }
        EXPECT_EQ(ValuesOf(tile), expected) << "from " << lowest << " to " << highest;
      }
    }
  }
}

TEST_P(HostVectorTest, CastsBetweenFloatTypes) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillNormal(random_, 0, 1000);
    const auto round_trip = [&, rows = rows, cols = cols](auto zero) {
      using T = decltype(zero);
      const auto narrow = NewTile<Buffer::kUB, T>(vector_, rows, cols);
      vector_.Cast(narrow, TileOf(a));
      const Values rounded = Rounded(a->ToDoubles(), DTypeOf<T>());
      EXPECT_EQ(ValuesOf(narrow), rounded);
      const auto wide = NewTile<Buffer::kUB, float>(vector_, rows, cols);
      vector_.Cast(wide, narrow);
      EXPECT_EQ(ValuesOf(wide), rounded);
    };
    round_trip(BF16{}), round_trip(F16{});
  }
}

TEST_P(HostVectorTest, CastsBooleans) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kBool, rows, cols);
    a->FillIntegers(random_, 0, 1);
    auto* bytes = static_cast<std::uint8_t*>(a->view().data);
    for (std::int64_t j = 0; j < cols && rows > 0; j += 3) bytes[j] = static_cast<std::uint8_t>(200 + j % 50);
    const auto flags = NewTile<Buffer::kUB, std::uint8_t>(vector_, rows, cols);
    vector_.Load(flags, a.gm());
    const auto floats = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    vector_.Cast(floats, flags);
    EXPECT_EQ(ValuesOf(floats), a->ToDoubles());
    const auto ints = NewTile<Buffer::kUB, std::int32_t>(vector_, rows, cols);
    vector_.Cast(ints, flags);
    EXPECT_EQ(ValuesOf(ints), a->ToDoubles());
  }
}

// ---- Integers

TEST_P(HostVectorTest, IntegerInstructions) {
  const auto tile = NewTile<Buffer::kUB, std::int32_t>(vector_, 3, 21);
  vector_.Fill(tile, 7);
  EXPECT_EQ(ValuesOf(tile), Values(63, 7));
  vector_.Fill(tile.Rows({1, 2}), -3);
  vector_.Add(tile, tile, tile);
  Values expected(63, 14);
  std::fill_n(expected.begin() + 21, 21, -6);
  EXPECT_EQ(ValuesOf(tile), expected);

  const auto wide = IntsOf<std::int64_t>({5, -1, 1 << 30, 0, 2, 3}, 2);
  const auto narrow = NewTile<Buffer::kUB, std::int32_t>(vector_, 2, 3);
  vector_.Cast(narrow, wide);
  EXPECT_EQ(ValuesOf(narrow), (Values{5, -1, 1 << 30, 0, 2, 3}));
}

TEST_P(HostVectorTest, ColumnSums) {
  const auto a = IntsOf<std::int32_t>({1, 2, 3, 4, 50, 60, 70, 80, -9, -9, -9, -9}, 3);
  const auto sums = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, 4);
  vector_.ColumnSum(sums, a);
  EXPECT_EQ(ValuesOf(sums), (Values{42, 53, 64, 75}));
  vector_.ColumnSum(sums, a.Rows({1, 2}));
  EXPECT_EQ(ValuesOf(sums), (Values{50, 60, 70, 80}));
  vector_.ColumnSum(sums, a.Rows({0, 0}));  // No rows.
  EXPECT_EQ(ValuesOf(sums), Values(4, 0));
}

// More rows than a byte counts, strips of columns that end anywhere, and booleans of any bits; part of a tile.
TEST_P(HostVectorTest, CountTrueIsItsExpansion) {
  for (const std::int64_t rows : {0, 1, 5, 255, 256, 600}) {
    for (const std::int64_t cols : {1, 63, 64, 65, 130}) {
      GmMatrix a(DType::kBool, rows + 1, cols + 3);
      auto* bytes = static_cast<std::uint8_t*>(a->view().data);
      const auto strides = a->view().strides;
      Values expected(Index(cols), 0);
      for (std::int64_t i = 0; i <= rows; ++i) {
        for (std::int64_t j = 0; j < cols + 3; ++j) {
          const bool is_true = j == 4 || random_.Integer(0, 2) == 0;
          bytes[i * strides[0] + j * strides[1]] =
              static_cast<std::uint8_t>(is_true ? random_.Integer(1, 255) : 0);
          if (i > 0 && j >= 2 && j < cols + 2) expected[Index(j - 2)] += is_true ? 1 : 0;
        }
      }
      const auto all = NewTile<Buffer::kUB, std::uint8_t>(vector_, rows + 1, cols + 3);
      vector_.Load(all, a.gm());
      const auto flags = all.Part({1, rows + 1}, {2, cols + 2});
      const auto scratch = NewTile<Buffer::kUB, std::int32_t>(vector_, rows, cols);
      const auto body = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, cols),
                 expansion = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, cols);
      vector_.CountTrue(body, scratch, flags);
      EXPECT_EQ(ValuesOf(body), expected) << rows << "x" << cols;
      HostVector executor(rig_.context, 0);
      ExpandCountTrue(executor, expansion, scratch, flags, Loc::current());
      EXPECT_EQ(ValuesOf(expansion), expected) << rows << "x" << cols;
    }
  }
}

TEST_P(HostVectorTest, ExclusiveScans) {
  for (std::int64_t n : {0, 1, 2, 37}) {
    std::vector<std::int32_t> values(Index(n));
    for (std::int32_t& value : values) value = static_cast<std::int32_t>(random_.Integer(0, 9));
    Values expected{100};
    for (std::int32_t value : values) expected.push_back(expected.back() + value);
    const auto sums = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, n + 1);
    vector_.ExclusiveScan(sums, IntsOf(values), 100);
    EXPECT_EQ(ValuesOf(sums), expected);
  }
}

TEST_P(HostVectorTest, ReadScalars) {
  const auto ints = IntsOf<std::int32_t>({4, -8, 15, 16, -23, 42}, 2);
  EXPECT_EQ(vector_.ReadScalar(ints, 1), -8);
  EXPECT_EQ(vector_.ReadScalar(ints.Rows({1, 2}), 2), 42);
  EXPECT_EQ(vector_.ReadScalar(ints.Part({1, 2}, {1, 3}), 0), -23);
  GmMatrix values(DType::kF32, 3, 5);
  values->FillNormal(random_);
  EXPECT_EQ(vector_.ReadScalar(TileOf(values).Rows({2, 3}), 4), static_cast<float>(values->at({2, 4})));
}

TEST_P(HostVectorTest, ScatterPassesOverWhatIsNoColumn) {
  const std::vector<std::int32_t> ids{2, -1, 3, 0, -7, 1, 1 << 30, 2};
  const auto dst = NewTile<Buffer::kUB, float>(vector_, 2, 3);
  GmMatrix values(DType::kF32, 2, 4);
  for (std::int64_t i = 0; i < 8; ++i) values->set({i / 4, i % 4}, static_cast<double>(i + 1));
  vector_.Fill(dst, 0.0f);
  vector_.Scatter(dst, IntsOf(ids, 2), TileOf(values));
  EXPECT_EQ(ValuesOf(dst), (Values{4, 0, 1, 0, 6, 8}));
}

TEST_P(HostVectorTest, HistogramCountsItsRange) {
  const std::vector<std::int32_t> ids{3, 1, 3, 9, -1, 7, 3, 4, 8, 2, 5, 7};
  const auto counts = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, 5);
  vector_.Fill(counts, 10);
  vector_.Histogram(counts, IntsOf(ids, 3), {.first = 3});  // Ids 3 to 7.
  EXPECT_EQ(ValuesOf(counts), (Values{13, 11, 11, 10, 12}));
}

// Digits of ids, which are unsigned: -1 has the highest digits.
TEST_P(HostVectorTest, BinsByDigit) {
  const std::vector<std::int32_t> ids{0x12345, 0x00346, 0x12f45, -1, 0x7ffff3ff, 0};
  const auto counts = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, 16);
  vector_.Fill(counts, 0);
  vector_.Histogram(counts, IntsOf(ids, 2), {.shift = 8, .bits = 4});
  Values expected(16, 0);
  expected[3] = 3, expected[15] = 2, expected[0] = 1;
  EXPECT_EQ(ValuesOf(counts), expected);
  std::vector<std::int32_t> next(8, 0);
  next[3] = 10;  // Digit 4, of bins from 1 on.
  const auto ranks = NewTile<Buffer::kUB, std::int32_t>(vector_, 2, 3);
  vector_.Fill(ranks, 7);
  vector_.Rank(ranks, IntsOf(next), IntsOf(ids, 2), {.first = 1, .shift = 4, .bits = 3});
  EXPECT_EQ(ValuesOf(ranks), (Values{10, 11, 12, 0, 1, -1}));
}

TEST_P(HostVectorTest, RankCountsRowByRow) {
  const std::int64_t rows = 6, cols = 7, bins = 5, first = 2;
  std::vector<std::int32_t> ids(Index(rows * cols));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random_.Integer(0, 9));
  std::vector<std::int32_t> next{100, 0, 50, 7, 1000};
  const auto ranks = NewTile<Buffer::kUB, std::int32_t>(vector_, rows, cols);
  vector_.Fill(ranks, 7);
  const auto next_tile = IntsOf(next);
  vector_.Rank(ranks, next_tile, IntsOf(ids, rows), {.first = static_cast<std::int32_t>(first)});
  Values expected;
  for (std::int32_t id : ids) {
    const std::int64_t bin = id - first;
    expected.push_back(bin < 0 || bin >= bins ? -1 : next[Index(bin)]++);
  }
  EXPECT_EQ(ValuesOf(ranks), expected);
  EXPECT_EQ(ValuesOf(next_tile), Values(next.begin(), next.end()));
}

// ---- Composites: the host's body and the expansion on equal inputs

// exp(x) in fp32 where x carries an absolute error: |e^(x + error) - e^x| and 2 ulp (4 eps) of Exp.
// Results below the normal range may flush to zero.
double ExpBound(double exact, double argument_error) {
  if (exact == 0.0) return 0x1p-126;
  return exact * (std::expm1(argument_error) + 4 * kEps) * kSecondOrder + 0x1p-126;
}

struct SoftmaxValues {
  Values p, m_new, alpha, l;
};

template <class T, class Run>
SoftmaxValues RunSoftmax(HostRig& rig, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l, Run run) {
  const Gm gm = s.gm();
  const auto scores = LoadRows<float>(rig.vector, gm, gm.rows, gm.cols);
  const auto old = LoadRows<float>(rig.vector, m_old.gm(), gm.rows, 1);
  const auto sums = LoadRows<float>(rig.vector, l.gm(), gm.rows, 1);
  const auto m_new = NewTile<Buffer::kUB, float>(rig.vector, gm.rows, 1);
  const auto p = NewTile<Buffer::kUB, T>(rig.vector, gm.rows, gm.cols);
  run(p, scores, m_new, old, sums);
  const auto values = [&](auto tile) {
    GmMatrix out(tile.slot()->dtype, tile.rows(), tile.cols());
    rig.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  };
  return {values(p), values(m_new), values(old), values(sums)};
}

// One rounding each of scale * s and of the difference move the argument by eps (|scale s| + |scale s - m|), the product
// with a rounded log2(e) by 1.25 eps |scale s - m| more; the fused forms round less. A sum of c terms rounds c + 1 times.
template <class T>
void CheckSoftmax(const SoftmaxValues& got, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l,
                  float scale, const char* what) {
  const std::int64_t rows = s->size(0), cols = s->size(1);
  for (std::int64_t i = 0; i < rows; ++i) {
    SCOPED_TRACE(std::string(what) + ", row " + std::to_string(i));
    double m = m_old->at({i, 0});
    for (std::int64_t j = 0; j < cols; ++j)
      m = std::max<double>(m, static_cast<float>(s->at({i, j})) * scale);
    ASSERT_EQ(got.m_new[Index(i)], m);
    const double old = m_old->at({i, 0}), alpha = std::exp(old - m);
    const double alpha_bound = ExpBound(alpha, kEps * std::abs(old - m));
    ASSERT_NEAR(got.alpha[Index(i)], alpha, alpha_bound);
    double sum = 0, sum_bound = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      const double scaled = s->at({i, j}) * static_cast<double>(scale), exact = std::exp(scaled - m);
      const double bound =
          ExpBound(exact, std::isinf(scaled) ? 0 : kEps * (std::abs(scaled) + 2.25 * std::abs(scaled - m)));
      const double unit = DTypeOf<T>() == DType::kF32 ? 0 : UnitRoundoff(DTypeOf<T>());
      const double subnormal = DTypeOf<T>() == DType::kF16 ? 0x1p-25 : 0;
      ASSERT_NEAR(got.p[Index(i * cols + j)], exact, bound + unit * (exact + bound) + subnormal)
          << "column " << j;
      sum += exact, sum_bound += bound;
    }
    const double total = l->at({i, 0}) * alpha + sum;
    const double bound =
        sum_bound + l->at({i, 0}) * alpha_bound + static_cast<double>(cols + 2) * kEps * total;
    ASSERT_NEAR(got.l[Index(i)], total, kSecondOrder * bound);
  }
}

TEST_P(HostVectorTest, SoftmaxStepIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] : {Shape{1, 1}, Shape{3, 33}, Shape{5, 64}, Shape{2, 300}}) {
      HostRig rig;
      GmMatrix s(DType::kF32, rows, cols), m_old(DType::kF32, rows, 1), l(DType::kF32, rows, 1);
      s->FillNormal(random_, 0, 20), m_old->FillNormal(random_, 0, 5), l->FillUniform(random_, 1, 9);
      s->set({0, cols - 1}, -kInfinity);
      if (rows > 1) {  // A first step, all masked.
        m_old->set({1, 0}, std::numeric_limits<float>::lowest()), l->set({1, 0}, 0);
        for (std::int64_t j = 0; j < cols; ++j) s->set({1, j}, -kInfinity);
      }
      if (rows > 2) m_old->set({2, 0}, std::numeric_limits<float>::lowest()), l->set({2, 0}, 0);
      constexpr float kScale = 0.3f;
      const SoftmaxValues body =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            rig.vector.SoftmaxStep(p, x, m_new, m, sum, kScale);
          });
      HostVector executor(rig.context, 0);
      const SoftmaxValues expansion =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            ExpandSoftmaxStep(executor, p, x, m_new, m, sum, kScale, Loc::current());
          });
      CheckSoftmax<T>(body, s, m_old, l, kScale, "body");
      CheckSoftmax<T>(expansion, s, m_old, l, kScale, "expansion");
      EXPECT_EQ(body.m_new, expansion.m_new);
    }
  });
}

TEST_P(HostVectorTest, MulAddIsItsExpansion) {
  for (const auto& [rows, cols] : kVectorShapes) {
    for (bool column : {true, false}) {
      GmMatrix acc(DType::kF32, rows, cols), x(DType::kF32, rows, cols),
          factor(DType::kF32, rows, column ? 1 : cols);
      acc->FillNormal(random_), x->FillNormal(random_), factor->FillNormal(random_);
      const auto factor_tile = [&] { return column ? ColumnOf(factor) : TileOf(factor); };
      const auto body = TileOf(acc), expansion = TileOf(acc);
      vector_.MulAdd(body, factor_tile(), TileOf(x));
      HostVector executor(rig_.context, 0);
      ExpandMulAdd(executor, expansion, factor_tile(), TileOf(x), Loc::current());
      const Values fused = ValuesOf(body), separate = ValuesOf(expansion);
      for (std::int64_t i = 0; i < rows * cols; ++i) {
        const double f = factor->at({i / cols, column ? 0 : i % cols});
        const double product = acc->at({i / cols, i % cols}) * f, sum = product + x->at({i / cols, i % cols});
        ASSERT_NEAR(fused[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
        ASSERT_NEAR(separate[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
      }
    }
  }
}

TEST_P(HostVectorTest, WeightedSumIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t count : {0, 1, 3, 8, 16}) {
      for (std::int64_t cols : {1, 40, 131}) {
        for (Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
          HostRig rig;
          GmMatrix x(DTypeOf<T>(), count, cols), acc(DType::kF32, 1, cols);
          x->FillNormal(random_), acc->FillNormal(random_);
          std::vector<float> weights;
          std::vector<UbTile<T>> rows;
          std::vector<TileRef> refs;
          for (std::int64_t i = 0; i < count; ++i) {
            weights.push_back(static_cast<float>(random_.Normal()));
            const Role role = i % 2 == 0 ? Role::kRelay : Role::kRows;
            rows.push_back(NewTile<Buffer::kUB, T>(rig.vector, 1, cols, role));
            rig.vector.Load(rows.back(), x.gm().Rows({i, i + 1}));
            refs.emplace_back(rows.back());
          }
          const auto run = [&](auto body) {
            const auto sum = LoadRows<float>(rig.vector, acc.gm(), 1, cols);
            body(sum, NewTile<Buffer::kUB, float>(rig.vector, 1, cols));
            GmMatrix out(DType::kF32, 1, cols);
            rig.vector.Store(out.gm(), sum);
            return out->ToDoubles();
          };
          const Values body = run([&](auto sum, auto scratch) {
            rig.vector.WeightedSum(sum, scratch, std::span<const UbTile<T>>(rows),
                                   std::span<const float>(weights), accumulate);
          });
          HostVector executor(rig.context, 0);
          const Values expansion = run([&](auto sum, auto scratch) {
            ExpandWeightedSum(executor, sum, scratch, refs, weights, accumulate, Loc::current());
          });
          for (std::int64_t j = 0; j < cols; ++j) {
            double sum = accumulate == Accumulate::kYes ? acc->at({0, j}) : 0, magnitude = std::abs(sum);
            for (std::int64_t i = 0; i < count; ++i) {
              const double term = static_cast<double>(weights[Index(i)]) * x->at({i, j});
              sum += term, magnitude += std::abs(term);
            }
            // Every term is rounded once as a product and at most count + 1 times in the sum.
            const double bound = kSecondOrder * static_cast<double>(count + 2) * kEps * magnitude;
            ASSERT_NEAR(body[Index(j)], sum, bound) << count << " rows, column " << j;
            ASSERT_NEAR(expansion[Index(j)], sum, bound) << count << " rows, column " << j;
          }
        }
      }
    }
  });
}

// A relay tile that was given for a block of GM: what is written there is what a plain tile stores.
TEST_P(HostVectorTest, RelayTilesAreWrittenWhereTheyGo) {
  using Ubs = UbTile<float>;
  ForEachFloatType([&]<class T>(T) {
    for (const auto& [rows, cols] : {Shape{1, 5}, {3, 64}, {2, 130}, {4, 2101}}) {
      GmMatrix gate(DTypeOf<T>(), rows, cols), up(DTypeOf<T>(), rows, cols), d_out(DTypeOf<T>(), rows, cols);
      GmMatrix of_rows(DType::kF32, rows, 1), of_cols(DType::kF32, 1, cols);
      for (GmMatrix* x : {&gate, &up, &d_out, &of_rows, &of_cols}) (*x)->FillNormal(random_);
      const auto load = [&]<class U>(U, const GmMatrix& from) {
        const auto tile = NewTile<Buffer::kUB, U>(vector_, from.gm().rows, from.gm().cols);
        vector_.Load(tile, from.gm());
        return tile;
      };
      const auto scratch = [&, rows = rows, cols = cols] {
        return NewTile<Buffer::kUB, float>(vector_, rows, cols);
      };
      const UbTile<T> g = load(T(), gate), u = load(T(), up), d = load(T(), d_out);
      const Ubs column = load(0.0f, of_rows), weights = load(0.0f, of_cols);
      // The two outputs of each instruction, the second one not written by most.
      const std::function<void(UbTile<T>, UbTile<T>)> instructions[] = {
          [&](UbTile<T> out, UbTile<T>) { vector_.SwiGlu(out, scratch(), scratch(), g, u, column); },
          [&](UbTile<T> out, UbTile<T>) { vector_.ScaleRows(out, scratch(), g, column, weights); },
          [&](UbTile<T> out, UbTile<T>) {
            vector_.NormGrad(
                NormGradTiles<T>{out, {}, column, scratch(), scratch(), g, u, weights, column, d});
          },
          [&](UbTile<T> out, UbTile<T> more) {
            const Ubs sums = load(0.0f, of_rows);
            vector_.SwiGluGrad(out, more, sums, scratch(), scratch(), scratch(), scratch(), d, g, u, column);
          },
          [&](UbTile<T> out, UbTile<T>) {
            const Ubs factor = load(0.0f, of_rows), one = load(0.0f, of_rows);
            vector_.NormRows(NormTiles<T>{out, factor, one, scratch(), scratch(), g, weights}, 0.5f, 0.25f);
          },
          [&](UbTile<T> out, UbTile<T> sum) {
            const Ubs factor = load(0.0f, of_rows), one = load(0.0f, of_rows);
            vector_.NormRows(NormTiles<T>{out, factor, one, scratch(), scratch(), g, weights, u, sum}, 0.5f,
                             0.25f);
          },
          [&](UbTile<T> out, UbTile<T>) {
            const Ubs shift = load(0.0f, of_rows), sum = load(0.0f, of_cols);
            vector_.NormRowsGrad(
                NormGradTiles<T>{out, sum, shift, scratch(), scratch(), g, u, weights, column, d}, 0.5f);
          }};
      const auto two = [](std::size_t k) { return k == 3 || k == 5; };
      for (std::size_t k = 0; k < std::size(instructions); ++k) {
        GmMatrix plain(DTypeOf<T>(), rows, cols), more_plain(DTypeOf<T>(), rows, cols);
        const auto out = NewTile<Buffer::kUB, T>(vector_, rows, cols),
                   more = NewTile<Buffer::kUB, T>(vector_, rows, cols);
        instructions[k](out, more);
        vector_.Store(plain.gm(), out);
        if (two(k)) vector_.Store(more_plain.gm(), more);
        for (const Layout& layout : kLayouts) {
          for (bool stream : {false, true}) {
            GmMatrix to(DTypeOf<T>(), rows, cols, layout), more_to(DTypeOf<T>(), rows, cols, layout);
            to.tensor().stream = more_to.tensor().stream = stream;
            Ring<Buffer::kUB, T> ring(vector_, "relay", rows + 1, cols + 2, 2, Role::kRelay);
            const UbTile<T> there = ring.Next(to.gm()), more_there = ring.Next(more_to.gm());
            instructions[k](there, more_there);
            vector_.Store(to.gm(), there);
            if (two(k)) vector_.Store(more_to.gm(), more_there);
            FlushStreams();
            ASSERT_EQ(to->ToDoubles(), plain->ToDoubles())
                << "instruction " << k << ", " << rows << " x " << cols;
            if (two(k)) {
              ASSERT_EQ(more_to->ToDoubles(), more_plain->ToDoubles()) << rows << " x " << cols;
            }
          }
        }
      }
    }
  });
}

// The same of a weighted sum, which is rounded on its way; and where it has two parts, the first stays in the tile.
TEST_P(HostVectorTest, WeightedSumsAreWrittenWhereTheyGo) {
  ForEachFloatType([&]<class T>(T) {
    for (std::int64_t cols : {1, 40, 2048, 5003}) {
      GmMatrix x(DTypeOf<T>(), 3, cols);
      x->FillNormal(random_);
      std::vector<UbTile<T>> rows;
      for (std::int64_t i = 0; i < 3; ++i) {
        rows.push_back(NewTile<Buffer::kUB, T>(vector_, 1, cols));
        vector_.Load(rows.back(), x.gm().Rows({i, i + 1}));
      }
      const std::vector<float> weights{0.5f, -2.25f, 1.125f};
      const auto add = [&](UbTile<float> sum, std::size_t first, std::size_t count, Accumulate accumulate) {
        vector_.WeightedSum(sum, NewTile<Buffer::kUB, float>(vector_, 1, cols),
                            std::span<const UbTile<T>>(rows).subspan(first, count),
                            std::span<const float>(weights).subspan(first, count), accumulate);
      };
      for (std::size_t count : {std::size_t{0}, std::size_t{3}}) {
        GmMatrix plain(DTypeOf<T>(), 1, cols);
        const auto sum = NewTile<Buffer::kUB, float>(vector_, 1, cols);
        add(sum, 0, count, Accumulate::kNo);
        vector_.Store(plain.gm(), sum);
        for (const Layout& layout : kLayouts) {
          GmMatrix to(DTypeOf<T>(), 1, cols, layout), in_parts(DTypeOf<T>(), 1, cols, layout);
          to.tensor().stream = true;
          Ring<Buffer::kUB, float> ring(vector_, "relay", 1, cols, 1, Role::kRelay);
          const auto there = ring.Next(to.gm());
          add(there, 0, count, Accumulate::kNo);
          vector_.Store(to.gm(), there);
          FlushStreams();
          ASSERT_EQ(to->ToDoubles(), plain->ToDoubles()) << cols << " columns";
          if (count == 0) continue;
          const auto again = ring.Next(1, cols);
          add(again, 0, 1, Accumulate::kNo), add(again, 1, 2, Accumulate::kYes);
          vector_.Store(in_parts.gm(), again);
          ASSERT_EQ(in_parts->ToDoubles(), plain->ToDoubles()) << cols << " columns";
        }
      }
    }
  });
}

}  // namespace
}  // namespace cubist::host_test
