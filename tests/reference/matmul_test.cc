#include "reference/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"

namespace cubist::reference {
namespace {

using cubist::testing::kColumnMajor;
using cubist::testing::Matrix;
using cubist::testing::Random;
using Values = std::vector<double>;

TEST(ReferenceMatmulTest, HandComputed2x2) {
  const float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8};
  const MatmulResult r = Matmul(ConstTensor(a, {2, 2}), false, ConstTensor(b, {2, 2}), false, {});
  EXPECT_EQ(r.c, (Values{19, 22, 43, 50}));
  EXPECT_EQ(r.magnitude, r.c);
}

TEST(ReferenceMatmulTest, HandComputed2x3WithBiasAndSigns) {
  const float a[] = {1, -2, 3, 0, 4, -1};           // (2, 3)
  const float b[] = {2, 1, -1, 0, 3, 5, -2, 4, 1};  // (3, 3)
  const float bias[] = {10, -20, 30};
  const MatmulResult r =
      Matmul(ConstTensor(a, {2, 3}), false, ConstTensor(b, {3, 3}), false, ConstTensor(bias, {3}));
  EXPECT_EQ(r.c, (Values{10 + 2 - 0 - 6, -20 + 1 - 6 + 12, 30 - 1 - 10 + 3,  //
                         10 + 0 + 0 + 2, -20 + 0 + 12 - 4, 30 + 0 + 20 - 1}));
  EXPECT_EQ(r.magnitude, (Values{10 + 2 + 0 + 6, 20 + 1 + 6 + 12, 30 + 1 + 10 + 3,  //
                                 10 + 0 + 0 + 2, 20 + 0 + 12 + 4, 30 + 0 + 20 + 1}));
}

TEST(ReferenceMatmulTest, IdentityReturnsTheOtherOperand) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Random random;
    Matrix identity(dtype, {5, 5}), x(dtype, {5, 7});
    identity.Fill(0);
    for (std::int64_t i = 0; i < 5; ++i) identity.set({i, i}, 1);
    x.FillNormal(random);
    EXPECT_EQ(Matmul(identity.view(), false, x.view(), false, {}).c, x.ToDoubles());
    EXPECT_EQ(Matmul(x.view(), true, identity.view(), false, {}).c, testing::ToDoubles(x.transposed()));
  }
}

TEST(ReferenceMatmulTest, TransposesAndStridesAgree) {
  Random random;
  Matrix a(DType::kF32, {4, 6}), b(DType::kF32, {6, 5}, kColumnMajor), bias(DType::kF16, {5}, {.step = 3});
  a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random);
  const Values c = Matmul(a.view(), false, b.view(), false, bias.view()).c;
  EXPECT_EQ(Matmul(a.transposed(), true, b.view(), false, bias.view()).c, c);
  EXPECT_EQ(Matmul(a.view(), false, b.transposed(), true, bias.view()).c, c);
  EXPECT_EQ(Matmul(a.transposed(), true, b.transposed(), true, bias.view()).c, c);
}

TEST(ReferenceMatmulTest, SelectedRowsAreRowsOfTheWhole) {
  Random random;
  Matrix a(DType::kBF16, {6, 9}), b(DType::kBF16, {9, 4});
  a.FillNormal(random), b.FillNormal(random);
  const MatmulResult whole = Matmul(a.view(), false, b.view(), false, {});
  const std::vector<std::int64_t> rows{5, 0, 3, 3};
  const MatmulResult some = Matmul(a.view(), false, b.view(), false, {}, rows);
  ASSERT_EQ(some.c.size(), 16u);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t j = 0; j < 4; ++j) {
      const std::size_t at = static_cast<std::size_t>(rows[r]) * 4 + j;
      EXPECT_EQ(some.c[r * 4 + j], whole.c[at]);
      EXPECT_EQ(some.magnitude[r * 4 + j], whole.magnitude[at]);
    }
  }
}

TEST(ReferenceMatmulTest, NothingToSumGivesTheBiasOrZero) {
  const float bias[] = {1, 2, 3};
  const ConstTensor a(bias, {2, 0}), b(bias, {0, 3});
  EXPECT_EQ(Matmul(a, false, b, false, {}).c, Values(6, 0.0));
  EXPECT_EQ(Matmul(a, false, b, false, ConstTensor(bias, {3})).c, (Values{1, 2, 3, 1, 2, 3}));
  EXPECT_TRUE(Matmul(ConstTensor(bias, {0, 3}), false, ConstTensor(bias, {3, 1}), false, {}).c.empty());
  EXPECT_TRUE(Matmul(ConstTensor(bias, {1, 3}), false, ConstTensor(bias, {3, 0}), false, {}).c.empty());
}

TEST(ReferenceMatmulTest, AccumulatesInDouble) {
  // 1 + 4096 * 2^-24 is 1 when summed in fp32 in this order.
  std::vector<float> a(4097, 0x1p-12f), b(4097, 0x1p-12f);
  a[0] = b[0] = 1;
  const MatmulResult r =
      Matmul(ConstTensor(a.data(), {1, 4097}), false, ConstTensor(b.data(), {4097, 1}), false, {});
  EXPECT_EQ(r.c[0], 1 + 4096 * 0x1p-24);
}

TEST(ReferenceMatmulTest, NaNAndInfinityPropagate) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float a[] = {0, 1, infinity, 0}, b[] = {infinity, 1, 2, 3};
  const MatmulResult r = Matmul(ConstTensor(a, {2, 2}), false, ConstTensor(b, {2, 2}), false, {});
  EXPECT_TRUE(std::isnan(r.c[0]));
  EXPECT_EQ(r.c[1], 3);
  EXPECT_EQ(r.c[2], infinity);
  EXPECT_EQ(r.c[3], infinity);
}

}  // namespace
}  // namespace cubist::reference
