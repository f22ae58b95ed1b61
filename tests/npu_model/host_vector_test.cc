// Vector instructions on the host, beside plain loops.
#include <functional>

#include "tests/npu_model/host_vector_rig.h"

namespace cubist::host_test {
namespace {

INSTANTIATE_TEST_SUITE_P(Simd, HostVectorTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

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

}  // namespace
}  // namespace cubist::host_test
