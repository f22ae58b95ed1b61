#include "tests/support/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace cubist::testing {
namespace {

constexpr DType kAll[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64};
using Values = std::vector<double>;

std::byte* BytesOf(Matrix& x) { return static_cast<std::byte*>(x.view().data); }

// Every byte from a line before the matrix to a line behind it is an element's or is watched.
TEST(MatrixTest, AnyOverwriteOutsideTheElementsIsDetected) {
  for (DType dtype : kAll) {
    for (const Layout& layout : {Layout{}, kColumnMajor, Layout{.step = 2}}) {
      Matrix x(dtype, {3, 5}, layout);
      x.Fill(1);
      ASSERT_TRUE(x.CheckGuards());
      const std::int64_t size = SizeOf(dtype),
                         last = (2 * x.view().stride(0) + 4 * x.view().stride(1) + 1) * size;
      std::int64_t watched = 0;
      for (std::int64_t byte = -64; byte < last + 64; ++byte) {
        const std::byte before = BytesOf(x)[byte];
        BytesOf(x)[byte] ^= std::byte{1};
        if (!x.CheckGuards()) ++watched;
        BytesOf(x)[byte] = before;
      }
      EXPECT_EQ(watched, last + 128 - 15 * size) << NameOf(dtype);
    }
  }
}

TEST(MatrixTest, TheReportSaysWhere) {
  Matrix x(DType::kF32, {2, 3});
  static_cast<float*>(x.view().data)[3] = 7;  // The first element of the gap behind row 0.
  const ::testing::AssertionResult result = x.CheckGuards();
  ASSERT_FALSE(result);
  EXPECT_NE(std::strstr(result.message(), "byte 12 from element 0 (place 3 in elements of fp32)"), nullptr)
      << result.message();
}

TEST(MatrixTest, UnwrittenElementsAndGapsReadAsNaN) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Matrix x(dtype, {7, 9});
    for (std::int64_t i = -20; i < 7 * 12 + 20; ++i) EXPECT_TRUE(std::isnan(LoadElement(x.view(), i)));
  }
  const Matrix ids(DType::kI32, {7, 9});
  for (double x : ids.ToDoubles()) EXPECT_LT(x, 0);
}

TEST(MatrixTest, DefaultLayoutIsOdd) {
  const Matrix x(DType::kF32, {4, 8});
  EXPECT_EQ(x.view().stride(0), 11);
  EXPECT_EQ(x.view().stride(1), 1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.view().data) % 64, 4u);
}

TEST(MatrixTest, ContiguousLayoutIsContiguous) {
  const Matrix x(DType::kBF16, {2, 3, 4, 5}, kContiguous);
  const ConstTensor expected(x.view().data, DType::kBF16, {2, 3, 4, 5});
  EXPECT_EQ(x.view().strides, expected.strides);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.view().data) % 64, 0u);
}

TEST(MatrixTest, BsndStoresHeadsInsideTokens) {
  const Matrix x(DType::kF32, {2, 3, 4, 5}, kBsnd);
  EXPECT_EQ(x.view().stride(3), 1);
  EXPECT_EQ(x.view().stride(1), 5 + 3);
  EXPECT_EQ(x.view().stride(2), 3 * (5 + 3) + 3);
  EXPECT_LT(x.view().stride(2), x.view().stride(0));
}

TEST(MatrixTest, TransposedExchangesTheLastTwo) {
  Matrix x(DType::kI64, {2, 3});
  for (std::int64_t i = 0; i < 6; ++i) x.set({i / 3, i % 3}, static_cast<double>(i));
  EXPECT_EQ(x.ToDoubles(), (Values{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(ToDoubles(x.transposed()), (Values{0, 3, 1, 4, 2, 5}));
}

TEST(MatrixTest, CopiesAreIndependentAndKeepTheirGuards) {
  Matrix x(DType::kF16, {3, 3});
  x.Fill(1);
  Matrix y = x;
  y.Fill(2);
  EXPECT_EQ(x.ToDoubles(), Values(9, 1.0));
  EXPECT_EQ(y.ToDoubles(), Values(9, 2.0));
  EXPECT_TRUE(y.CheckGuards());
}

TEST(MatrixTest, FillsRoundToTheDType) {
  Random random;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Matrix x(dtype, {50, 40});
    x.FillNormal(random);
    const Values values = x.ToDoubles();
    for (double value : values) EXPECT_EQ(RoundTo(dtype, value), value);
    double squares = 0;
    for (double value : values) squares += value * value;
    EXPECT_NEAR(squares / 2000, 1, 0.2);
    x.FillUniform(random, 3, 5);
    for (double value : x.ToDoubles()) EXPECT_TRUE(value >= 3 && value <= 5);
    x.FillNaN();
    for (double value : x.ToDoubles()) EXPECT_TRUE(std::isnan(value));
    EXPECT_TRUE(x.CheckGuards());
  }
}

TEST(MatrixTest, IntegersCoverTheirRange) {
  Random random;
  for (DType dtype : kAll) {
    Matrix x(dtype, {30, 30});
    x.FillIntegers(random);
    std::vector<int> seen(9);
    for (double value : x.ToDoubles()) {
      ASSERT_EQ(value, std::round(value));
      ASSERT_LE(std::abs(value), 4);
      ++seen[static_cast<std::size_t>(value + 4)];
    }
    for (int count : seen) EXPECT_GT(count, 0);
  }
}

TEST(MatrixTest, EmptyOnesHaveGuardsToo) {
  for (const Matrix& x :
       {Matrix(DType::kF32, {0, 5}), Matrix(DType::kF32, {5, 0}), Matrix(DType::kF32, {0})}) {
    EXPECT_TRUE(x.ToDoubles().empty());
    EXPECT_TRUE(x.CheckGuards());
  }
  Matrix x(DType::kF32, {5, 0});
  static_cast<float*>(x.view().data)[0] = 0;
  EXPECT_FALSE(x.CheckGuards());
}

TEST(RandomTest, SameSeedSameNumbers) {
  Random a(5), b(5), c(6);
  const std::uint64_t first = a.Bits();
  EXPECT_EQ(first, b.Bits());
  EXPECT_NE(first, c.Bits());
}

}  // namespace
}  // namespace cubist::testing
