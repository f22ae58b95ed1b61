#include "tools/table.h"

#include <gtest/gtest.h>

#include <limits>

#include "tools/comparison.h"

namespace cubist {
namespace {

TEST(TableTest, AlignsCellsUnderTitlesAndUnits) {
  const Table table({{"case", "", 6, Column::Align::kLeft}, {"time", "ms", 5}, {"verdict", ""}});
  EXPECT_EQ(table.width(), 6 + 2 + 5 + 2 + 7);
  EXPECT_EQ(table.Header(),
            "case     time  verdict\n"
            "           ms\n"
            "----------------------");
  EXPECT_EQ(table.Row({"q_up", "1.23", "ok"}), "q_up     1.23       ok");
  EXPECT_EQ(table.Row({"q_up"}), "q_up");
}

TEST(TableTest, WideCellsUseTheBlanksBesideThem) {
  const Table table({{"a", "", 4, Column::Align::kLeft}, {"b", "", 6}, {"c", "", 4}});
  EXPECT_EQ(table.Row({"abcdefgh", "1", "2"}), "abcdefgh   1     2");
  EXPECT_EQ(table.Row({"a", "123456789", "2"}), "a  123456789     2");
  EXPECT_EQ(table.Row({"abcdefgh", "1234567890", "2"}), "abcdefgh 1234567890 2")
      << "moves what it has no blanks for";
}

TEST(FormatTest, SecondsHaveThreeDigitsAndAUnit) {
  EXPECT_EQ(FormatSeconds(0), "0 s");
  EXPECT_EQ(FormatSeconds(1.5e-7), "0.150 us");
  EXPECT_EQ(FormatSeconds(12.34e-6), "12.3 us");
  EXPECT_EQ(FormatSeconds(999.4e-6), "999 us");
  EXPECT_EQ(FormatSeconds(999.6e-6), "1.00 ms");
  EXPECT_EQ(FormatSeconds(0.1234), "123 ms");
  EXPECT_EQ(FormatSeconds(12.3), "12.3 s");
  EXPECT_EQ(FormatSeconds(1234), "1234 s");
}

TEST(FormatTest, RatesAndErrors) {
  EXPECT_EQ(FormatPerSecond(451.2e9, "FLOP/s"), "451 GFLOP/s");
  EXPECT_EQ(FormatPerSecond(1.512e12, "B/s"), "1.51 TB/s");
  EXPECT_EQ(FormatPerSecond(27.34e9, "B/s"), "27.3 GB/s");
  EXPECT_EQ(FormatPerSecond(12, "B/s"), "0.0120 kB/s");
  EXPECT_EQ(FormatError(0), "0");
  EXPECT_EQ(FormatError(0.00312), "3.1e-03");
  EXPECT_EQ(FormatError(std::numeric_limits<double>::infinity()), "inf");
}

TEST(ComparisonTest, KeepsTheElementNearestToItsBound) {
  Comparison c;
  c.Add(1.001, 1, 0.01, DType::kF32, 0, 0);
  c.Add(2.0005, 2, 0.001, DType::kF32, 0, 1);
  c.Add(3, 3, 0, DType::kF32, 0, 2);
  EXPECT_TRUE(c.ok());
  EXPECT_EQ(c.elements, 3);
  EXPECT_NEAR(c.ratio, 0.5, 1e-9);
  EXPECT_NEAR(c.error, 0.0005, 1e-12);
  EXPECT_EQ(c.bound, 0.001);
}

TEST(ComparisonTest, CountsElementsBeyondTheirBounds) {
  Comparison c;
  c.Add(1.5, 1, 0.25, DType::kF32, 3, 17);
  c.Add(2, 2, 0, DType::kF32, 3, 18);
  c.Add(2.0000001, 2, 0, DType::kF32, 3, 19);
  EXPECT_FALSE(c.ok());
  EXPECT_EQ(c.beyond, 2);
  EXPECT_EQ(c.first_beyond, "element 17 of row 3 is 1.5, expected 1 +- 0.25");

  Comparison good, merged;
  good.Add(1, 1, 0, DType::kF32, 0, 0);
  merged.Merge(good);
  merged.Merge(c);
  EXPECT_EQ(merged.elements, 4);
  EXPECT_EQ(merged.beyond, 2);
  EXPECT_EQ(merged.first_beyond, c.first_beyond);
}

TEST(ComparisonTest, NaNMatchesOnlyNaNAndInfinityOnlyItself) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const auto ok = [](double actual, double expected, double bound, DType dtype = DType::kF32) {
    Comparison c;
    c.Add(actual, expected, bound, dtype, 0, 0);
    return c.ok();
  };
  EXPECT_TRUE(ok(nan, nan, nan));
  EXPECT_FALSE(ok(nan, 1, 10));
  EXPECT_FALSE(ok(1, nan, nan));
  EXPECT_FALSE(ok(1, 1.5, nan)) << "a bound that is no number excuses nothing";
  EXPECT_TRUE(ok(inf, inf, nan));
  EXPECT_FALSE(ok(-inf, inf, nan));
  EXPECT_FALSE(ok(1, inf, inf));
  EXPECT_FALSE(ok(inf, 1, 10));
  EXPECT_TRUE(ok(inf, 65519, 2, DType::kF16)) << "rounds up to infinity within its bound";
  EXPECT_FALSE(ok(-inf, 65519, 2, DType::kF16));
  EXPECT_FALSE(ok(inf, 60000, 2, DType::kF16));
}

TEST(SampleRowsTest, DrawsDifferentRowsInOrderWithTheEnds) {
  EXPECT_EQ(SampleRows(5, 9, 1), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(SampleRows(0, 3, 1).empty());
  EXPECT_EQ(SampleRows(100, 1, 1).size(), 1u);
  const auto rows = SampleRows(1000, 20, 1);
  EXPECT_EQ(rows.size(), 20u);
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 999);
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
  EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end());
  EXPECT_NE(SampleRows(1000, 20, 2), rows);
}

}  // namespace
}  // namespace cubist
