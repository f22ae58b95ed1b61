#include "tests/support/expect_close.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "tests/support/double_benchmark.h"

namespace cubist::testing {
namespace {

using Values = std::vector<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Matrix Row(DType dtype, const Values& values) {
  Matrix x(dtype, {1, static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) x.set({0, static_cast<std::int64_t>(i)}, values[i]);
  return x;
}

bool Close(DType dtype, double actual, double expected, double bound) {
  return IsClose(Row(dtype, {actual}).view(), Values{expected}, Values{bound});
}

TEST(IsCloseTest, TheBoundDecides) {
  EXPECT_TRUE(Close(DType::kF32, 1.5, 1, 0.5));
  EXPECT_FALSE(Close(DType::kF32, 1.5, 1, 0.49));
  EXPECT_FALSE(Close(DType::kF32, 0.5, 1, 0.49));
  EXPECT_TRUE(Close(DType::kF32, 1, 1, 0));
  EXPECT_FALSE(Close(DType::kF32, 1, 1 + 1e-12, 0));
  EXPECT_TRUE(Close(DType::kF32, -0.0, 0, 0));
}

TEST(IsCloseTest, NaNStandsWhereItIsExpected) {
  EXPECT_TRUE(Close(DType::kF32, kNaN, kNaN, 0));
  EXPECT_FALSE(Close(DType::kF32, kNaN, 1, 1e9));
  EXPECT_FALSE(Close(DType::kF32, 1, kNaN, 1e9));
  EXPECT_FALSE(Close(DType::kF32, kInfinity, kNaN, 1e9));
}

TEST(IsCloseTest, InfinityStandsWhereItIsExpected) {
  EXPECT_TRUE(Close(DType::kF32, kInfinity, kInfinity, 0));
  EXPECT_FALSE(Close(DType::kF32, -kInfinity, kInfinity, 1e9));
  EXPECT_FALSE(Close(DType::kF32, 1, kInfinity, 1e9));
  EXPECT_FALSE(Close(DType::kF32, kInfinity, 1, 1e9));
}

TEST(IsCloseTest, OverflowIsAllowedWhereTheDTypeOverflows) {
  EXPECT_TRUE(Close(DType::kF16, kInfinity, 65519, 1));
  EXPECT_TRUE(Close(DType::kF16, kInfinity, 70000, 0));
  EXPECT_FALSE(Close(DType::kF16, kInfinity, 65519, 0.5));
  EXPECT_FALSE(Close(DType::kF16, -kInfinity, 70000, 1));
  EXPECT_TRUE(Close(DType::kF16, 65504, 65519, 16));
  EXPECT_FALSE(Close(DType::kBF16, kInfinity, 70000, 1));
  EXPECT_TRUE(Close(DType::kBF16, kInfinity, 0x1.ffp127, 0));
  EXPECT_TRUE(Close(DType::kF32, kInfinity, 1e39, 0));
}

TEST(IsCloseTest, ABoundThatIsNoNumberAcceptsNothing) {
  EXPECT_FALSE(Close(DType::kF32, 1, 2, kInfinity));
  EXPECT_FALSE(Close(DType::kF32, 1, 2, kNaN));
  EXPECT_TRUE(Close(DType::kF32, 2, 2, kNaN));
}

TEST(IsCloseTest, ReportsTheWorstElement) {
  const Matrix x = Row(DType::kF32, {1, 2.5, 3, 9});
  const ::testing::AssertionResult result = IsClose(x.view(), Values{1, 2, 2, 4}, Values{1, 0.25, 0.25, 5});
  ASSERT_FALSE(result);
  for (const char* part :
       {"2 of 4 elements (fp32)", "worst at (0, 2)", "expected 2,", "actual 3,", "bound 0.25"}) {
    EXPECT_NE(std::strstr(result.message(), part), nullptr) << part << " not in: " << result.message();
  }
}

TEST(IsCloseTest, NaNIsTheWorstOfAll) {
  const Matrix x = Row(DType::kF32, {1e30, kNaN});
  const ::testing::AssertionResult result = IsClose(x.view(), Values{1, 1}, Values{1, 1});
  EXPECT_NE(std::strstr(result.message(), "worst at (0, 1)"), nullptr) << result.message();
}

TEST(IsCloseTest, SizesMustMatch) {
  const Matrix x = Row(DType::kF32, {1, 2});
  EXPECT_FALSE(IsClose(x.view(), Values{1}, Values{1}));
  EXPECT_FALSE(IsClose(x.view(), Values{1, 2}, Values{1}));
  EXPECT_FALSE(IsExactly(x.view(), Values{1, 2, 3}));
}

TEST(ExpectCloseTest, FailsTheTest) {
  EXPECT_NONFATAL_FAILURE(ExpectClose(Row(DType::kF32, {1}).view(), Values{2}, Values{0.5}),
                          "worst at (0, 0)");
  EXPECT_NONFATAL_FAILURE(ExpectExactly(Row(DType::kI32, {1}).view(), Values{2}), "expected 2, actual 1");
  EXPECT_NONFATAL_FAILURE(ExpectSameBits(Row(DType::kF32, {0}).view(), Row(DType::kF32, {-0.0}).view()),
                          "bits");
  Matrix x(DType::kF32, {1, 1});
  static_cast<float*>(x.view().data)[1] = 0;
  EXPECT_NONFATAL_FAILURE(ExpectGuards(x), "a guard was overwritten");
}

TEST(ExpectCloseTest, NamesTheSeed) {
  EXPECT_NONFATAL_FAILURE(
      {
        Random random(77);
        ExpectExactly(Row(DType::kF32, {1}).view(), Values{2});
      },
      "seed 77");
}

TEST(HasSameBitsTest, ComparesBitsWhateverTheStrides) {
  Random random;
  Matrix x(DType::kBF16, {5, 4}), y(DType::kBF16, {5, 4}, kColumnMajor);
  x.FillNormal(random);
  ForEachElement(x.view(), [&](const auto& i, std::int64_t) { y.set({i[0], i[1]}, x.at({i[0], i[1]})); });
  EXPECT_TRUE(HasSameBits(x.view(), y.view()));
  x.set({2, 3}, kNaN), y.set({2, 3}, kNaN);
  EXPECT_TRUE(HasSameBits(x.view(), y.view()));
  y.set({4, 1}, 100);
  const ::testing::AssertionResult result = HasSameBits(x.view(), y.view());
  ASSERT_FALSE(result);
  EXPECT_NE(std::strstr(result.message(), "(4, 1)"), nullptr) << result.message();
  EXPECT_FALSE(HasSameBits(x.view(), x.transposed()));
}

TEST(DoubleBenchmarkTest, MetricsByHand) {
  const ErrorMetrics m = Measure(DType::kF32, Values{1, 2, 5}, Values{1, 4, 4});
  EXPECT_NEAR(m.max_rel, 0.5, 1e-6);
  EXPECT_NEAR(m.mean_rel, 0.25, 1e-6);
  EXPECT_NEAR(m.rmse * m.rmse, 5.0 / 3, 1e-12);
  EXPECT_NEAR(m.balance, 0.25 / 3, 1e-12);
  EXPECT_EQ(m.small_errors, 0);
}

TEST(DoubleBenchmarkTest, AllowsAMultipleOfTheNaiveError) {
  const Values golden{1, 1, 1, 1}, naive{1.01, 0.99, 1.01, 0.99};
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kF32, {1.019, 0.981, 0.981, 1.019}).view(), golden, naive));
  EXPECT_FALSE(PassesDoubleBenchmark(Row(DType::kF32, {1.03, 0.97, 0.97, 1.03}).view(), golden, naive));
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kF32, {1.025, 0.975, 1, 1}).view(), golden, naive));
  EXPECT_FALSE(
      PassesDoubleBenchmark(Row(DType::kF32, {1.025, 0.975, 1, 1}).view(), golden, naive, {.max_rel = 2}));
}

TEST(DoubleBenchmarkTest, OneRoundingIsAlwaysAllowed) {
  const Values golden{1, 1}, naive = golden;
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kBF16, {1 - 0x1p-8, 1}).view(), golden, naive));
  EXPECT_FALSE(PassesDoubleBenchmark(Row(DType::kF32, {1 - 0x1p-8, 1}).view(), golden, naive));
}

TEST(DoubleBenchmarkTest, SmallValuesCountByTheSizeOfTheirErrors) {
  const Values golden{1, 0x1p-9, 0, 0}, naive{1, 0x1p-9 + 0x1p-15, 0, 0};
  const ErrorMetrics m = Measure(DType::kBF16, Values{1, 0, 0x1p-17, 0x1p-15}, golden);
  EXPECT_EQ(m.small_errors, 2);
  EXPECT_EQ(m.max_rel, 0);
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kBF16, {1, 0, 0, 0x1p-15}).view(), golden, naive));
  EXPECT_FALSE(PassesDoubleBenchmark(Row(DType::kBF16, {1, 0, 0x1p-15, 0x1p-15}).view(), golden, naive));
}

TEST(DoubleBenchmarkTest, ErrorsMustNotLeanToOneSide) {
  const Values golden{100, 100}, naive{101, 101};
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kF32, {101, 99}).view(), golden, naive));
  EXPECT_FALSE(PassesDoubleBenchmark(Row(DType::kF32, {101, 101}).view(), golden, naive));
}

TEST(DoubleBenchmarkTest, NaNMustNotBeOursAlone) {
  EXPECT_FALSE(PassesDoubleBenchmark(Row(DType::kF32, {kNaN, 1}).view(), Values{1, 1}, Values{1, 1}));
  EXPECT_TRUE(PassesDoubleBenchmark(Row(DType::kF32, {kNaN, 1}).view(), Values{kNaN, 1}, Values{kNaN, 1}));
}

TEST(DoubleBenchmarkTest, NaiveMatmulByHand) {
  const float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8}, bias[] = {1, 0};
  const ConstTensor a_view(a, {2, 2}), b_view(b, {2, 2}), bias_view(bias, {2});
  EXPECT_EQ(NaiveMatmul(a_view, false, b_view, false, bias_view, DType::kF32), (Values{20, 22, 44, 50}));
  EXPECT_EQ(NaiveMatmul(a_view, true, b_view, true, {}, DType::kF32), (Values{23, 31, 34, 46}));
}

}  // namespace
}  // namespace cubist::testing
