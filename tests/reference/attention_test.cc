#include "reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/matrix.h"

namespace cubist::reference {
namespace {

using cubist::testing::kBsnd;
using cubist::testing::Matrix;
using cubist::testing::Random;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionResult AttentionOf(const AttentionArgs& args) { return Attention(args, AllRows(args)); }

void ExpectNear(const Values& actual, const Values& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 1e-13 * (1 + std::abs(expected[i]))) << "element " << i;
  }
}

// The textbook formula, one pass, without subtracting the maximum and with the mask as a predicate of every
// (i, j).
Values TextbookOut(const AttentionArgs& args) {
  const auto at = [](const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
    return static_cast<double>(
        LoadFloat(x.data, x.dtype, b * x.stride(0) + n * x.stride(1) + s * x.stride(2) + d * x.stride(3)));
  };
  const std::int64_t sq = args.q.size(2), skv = args.k.size(2), heads = args.q.size(1),
                     groups = args.k.size(1);
  Values out;
  for (std::int64_t b = 0; b < args.q.size(0); ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < sq; ++i) {
        Values numerator(static_cast<std::size_t>(args.v.size(3)));
        double denominator = 0;
        for (std::int64_t j = 0; j < skv; ++j) {
          if (args.mask == Mask::kTopLeft && j - i > 0) continue;
          if (args.mask == Mask::kBottomRight && j - i > skv - sq) continue;
          double s = 0;
          for (std::int64_t d = 0; d < args.q.size(3); ++d) {
            s += at(args.q, b, h, i, d) * at(args.k, b, h * groups / heads, j, d);
          }
          const double weight = std::exp(*args.scale * s);
          denominator += weight;
          for (std::int64_t d = 0; d < args.v.size(3); ++d) {
            numerator[static_cast<std::size_t>(d)] += weight * at(args.v, b, h * groups / heads, j, d);
          }
        }
        for (double x : numerator) out.push_back(denominator == 0 ? 0 : x / denominator);
      }
    }
  }
  return out;
}

TEST(ReferenceAttentionTest, TwoKeysByHand) {
  const float q[] = {2}, k[] = {0, 1}, v[] = {4, 1, 8, -1};
  const AttentionResult r =
      AttentionOf({.q = ConstTensor(q, {1, 1, 1, 1}),
                   .k = ConstTensor(k, {1, 1, 2, 1}),
                   .v = ConstTensor(v, {1, 1, 2, 2}),
                   .scale = std::log(3.0) / 2});  // scores 0 and ln 3: weights 1/4 and 3/4
  ExpectNear(r.out, {7, -0.5});
  ExpectNear(r.lse, {std::log(4.0)});
  ExpectNear(r.abs_out, {7, 1});
  ExpectNear(r.abs_v, {12, 2});
  ExpectNear(r.max_score, {std::log(3.0)});
  EXPECT_EQ(r.keys, (std::vector<std::int64_t>{2}));
}

TEST(ReferenceAttentionTest, MagnitudesAddAbsoluteValues) {
  const float q[] = {1, 2}, k[] = {3, -1}, q_rope[] = {4}, k_rope[] = {-2}, v[] = {1}, bias[] = {-7};
  AttentionArgs args{.q = ConstTensor(q, {1, 1, 1, 2}),
                     .k = ConstTensor(k, {1, 1, 1, 2}),
                     .v = ConstTensor(v, {1, 1, 1, 1}),
                     .q_rope = ConstTensor(q_rope, {1, 1, 1, 1}),
                     .k_rope = ConstTensor(k_rope, {1, 1, 1, 1}),
                     .scale = -0.5};
  const Values product{0.5 * (3 + 2 + 8)};
  const AttentionResult r = AttentionOf(args);
  EXPECT_EQ(r.lse, (Values{-0.5 * (3 - 2 - 8)}));
  EXPECT_EQ(r.max_product, product);
  EXPECT_EQ(r.max_score, product);
  args.bias = ConstTensor(bias, {1, 1, 1, 1});
  EXPECT_EQ(AttentionOf(args).max_product, product);
  EXPECT_EQ(AttentionOf(args).max_score, (Values{product[0] + 7}));
  EXPECT_EQ(r.out, (Values{1}));
}

TEST(ReferenceAttentionTest, DefaultScaleCountsRope) {
  Random random;
  Matrix q(DType::kF32, {1, 2, 3, 5}), k(DType::kF32, {1, 2, 4, 5}), v(DType::kF32, {1, 2, 4, 2});
  Matrix q_rope(DType::kF32, {1, 2, 3, 4}), k_rope(DType::kF32, {1, 1, 4, 4});
  for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope}) x->FillNormal(random);
  AttentionArgs args{
      .q = q.view(), .k = k.view(), .v = v.view(), .q_rope = q_rope.view(), .k_rope = k_rope.view()};
  const Values by_default = AttentionOf(args).out;
  args.scale = 1 / 3.0;
  EXPECT_EQ(AttentionOf(args).out, by_default);
}

TEST(ReferenceAttentionTest, EqualScoresAverage) {
  Random random;
  Matrix q(DType::kBF16, {1, 1, 2, 3}), k(DType::kBF16, {1, 1, 5, 3}), v(DType::kBF16, {1, 1, 5, 1});
  q.Fill(0), k.FillNormal(random);
  for (std::int64_t j = 0; j < 5; ++j) v.set({0, 0, j, 0}, static_cast<double>(j * j));
  const AttentionResult r = AttentionOf({.q = q.view(), .k = k.view(), .v = v.view()});
  ExpectNear(r.out, {6, 6});  // (0 + 1 + 4 + 9 + 16) / 5
  ExpectNear(r.lse, {std::log(5.0), std::log(5.0)});
}

TEST(ReferenceAttentionTest, ShiftOfAllKeysShiftsOnlyTheLse) {
  Random random;
  Matrix q(DType::kF32, {1, 1, 4, 3}), k(DType::kF32, {1, 1, 6, 3}), v(DType::kF32, {1, 1, 6, 2});
  q.FillIntegers(random), k.FillIntegers(random), v.FillNormal(random);
  const AttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .scale = 0.25};
  const AttentionResult before = AttentionOf(args);
  const double shift[] = {100, -3, 200};
  for (std::int64_t j = 0; j < 6; ++j) {
    for (std::int64_t d = 0; d < 3; ++d) k.set({0, 0, j, d}, k.at({0, 0, j, d}) + shift[d]);
  }
  const AttentionResult after = AttentionOf(args);
  ExpectNear(after.out, before.out);
  for (std::int64_t i = 0; i < 4; ++i) {
    double score_shift = 0;
    for (std::int64_t d = 0; d < 3; ++d) score_shift += 0.25 * q.at({0, 0, i, d}) * shift[d];
    const auto row = static_cast<std::size_t>(i);
    EXPECT_NEAR(after.lse[row], before.lse[row] + score_shift, 1e-11);
  }
}

TEST(ReferenceAttentionTest, ScoresBeyondTheRangeOfExpAreFine) {
  const float q[] = {1}, k[] = {5000, 5001}, v[] = {0, 1};
  const AttentionResult r = AttentionOf({.q = ConstTensor(q, {1, 1, 1, 1}),
                                         .k = ConstTensor(k, {1, 1, 2, 1}),
                                         .v = ConstTensor(v, {1, 1, 2, 1}),
                                         .scale = 1.0});
  ExpectNear(r.out, {1 / (1 + std::exp(-1.0))});
  ExpectNear(r.lse, {5001 + std::log1p(std::exp(-1.0))});
}

TEST(ReferenceAttentionTest, MasksAndGroupsAgreeWithTheTextbook) {
  struct Lengths {
    std::int64_t sq, skv;
  };
  for (Lengths s : {Lengths{4, 4}, {3, 7}, {7, 3}, {1, 5}, {5, 1}}) {
    for (Mask mask : {Mask::kNone, Mask::kTopLeft, Mask::kBottomRight}) {
      Random random;
      Matrix q(DType::kF32, {2, 6, s.sq, 5}, kBsnd), k(DType::kF32, {2, 2, s.skv, 5}),
          v(DType::kF32, {2, 2, s.skv, 3});
      for (Matrix* x : {&q, &k, &v}) x->FillNormal(random);
      const AttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .scale = 0.4, .mask = mask};
      ExpectNear(AttentionOf(args).out, TextbookOut(args));
    }
  }
}

TEST(ReferenceAttentionTest, RopeIsAsIfConcatenated) {
  for (std::int64_t rope_heads : {1, 2}) {
    Random random;
    Matrix q(DType::kF16, {2, 4, 3, 7}), k(DType::kF16, {2, 2, 5, 7}), v(DType::kF16, {2, 2, 5, 3});
    Matrix q_rope(DType::kF16, {2, 4, 3, 2}), k_rope(DType::kF16, {2, rope_heads, 5, 2});
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope}) x->FillNormal(random);
    Matrix q_all(DType::kF16, {2, 4, 3, 9}), k_all(DType::kF16, {2, 2, 5, 9});
    testing::ForEachElement(q_all.view(), [&](const auto& i, std::int64_t) {
      q_all.set({i[0], i[1], i[2], i[3]},
                i[3] < 7 ? q.at({i[0], i[1], i[2], i[3]}) : q_rope.at({i[0], i[1], i[2], i[3] - 7}));
    });
    testing::ForEachElement(k_all.view(), [&](const auto& i, std::int64_t) {
      k_all.set({i[0], i[1], i[2], i[3]}, i[3] < 7 ? k.at({i[0], i[1], i[2], i[3]})
                                                   : k_rope.at({i[0], i[1] % rope_heads, i[2], i[3] - 7}));
    });
    const AttentionResult separate = AttentionOf(
        {.q = q.view(), .k = k.view(), .v = v.view(), .q_rope = q_rope.view(), .k_rope = k_rope.view()});
    const AttentionResult whole = AttentionOf({.q = q_all.view(), .k = k_all.view(), .v = v.view()});
    ExpectNear(separate.out, whole.out);
    ExpectNear(separate.lse, whole.lse);
    ExpectNear(separate.max_score, whole.max_score);
  }
}

TEST(ReferenceAttentionTest, RowsThatSeeNoKeyAreZero) {
  Random random;
  Matrix q(DType::kF32, {1, 1, 5, 2}), k(DType::kF32, {1, 1, 2, 2}), v(DType::kF32, {1, 1, 2, 1});
  q.FillNormal(random), k.FillNormal(random), v.Fill(1);
  const AttentionResult r =
      AttentionOf({.q = q.view(), .k = k.view(), .v = v.view(), .mask = Mask::kBottomRight});
  EXPECT_EQ(r.keys, (std::vector<std::int64_t>{0, 0, 0, 1, 2}));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(r.out[i], 0);
    EXPECT_EQ(r.lse[i], -kInfinity);
  }
  ExpectNear({r.out[3], r.out[4]}, {1, 1});
}

TEST(ReferenceAttentionTest, NoKeysAtAll) {
  const float x[] = {1, 2};
  const AttentionResult r = AttentionOf({.q = ConstTensor(x, {1, 1, 2, 1}),
                                         .k = ConstTensor(x, {1, 1, 0, 1}),
                                         .v = ConstTensor(x, {1, 1, 0, 1})});
  EXPECT_EQ(r.out, (Values{0, 0}));
  EXPECT_EQ(r.lse, (Values{-kInfinity, -kInfinity}));
}

TEST(ReferenceAttentionTest, NoHeadDimsAverage) {
  const float v[] = {1, 2, 6};
  const AttentionResult r = AttentionOf({.q = ConstTensor(v, {1, 1, 1, 0}),
                                         .k = ConstTensor(v, {1, 1, 3, 0}),
                                         .v = ConstTensor(v, {1, 1, 3, 1})});
  ExpectNear(r.out, {3});
  ExpectNear(r.lse, {std::log(3.0)});
}

TEST(ReferenceAttentionTest, OnlyMinusInfinityScoresAreAsNoKey) {
  const auto infinity = static_cast<float>(kInfinity);
  const float q[] = {1, -1}, k[] = {-infinity, -infinity}, v[] = {3, 4};
  const AttentionResult r = AttentionOf({.q = ConstTensor(q, {1, 1, 2, 1}),
                                         .k = ConstTensor(k, {1, 1, 2, 1}),
                                         .v = ConstTensor(v, {1, 1, 2, 1}),
                                         .scale = 1.0});
  EXPECT_EQ(r.out[0], 0);
  EXPECT_EQ(r.lse[0], -kInfinity);
  EXPECT_TRUE(std::isnan(r.out[1]));  // Scores of +inf.
}

TEST(ReferenceAttentionTest, NaNReachesTheRowsThatSeeIt) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const float q[] = {1, 1, 1}, k[] = {0, nan, 0}, v[] = {1, 2, 3};
  AttentionArgs args{.q = ConstTensor(q, {1, 1, 3, 1}),
                     .k = ConstTensor(k, {1, 1, 3, 1}),
                     .v = ConstTensor(v, {1, 1, 3, 1}),
                     .mask = Mask::kTopLeft};
  const AttentionResult r = AttentionOf(args);
  EXPECT_EQ(r.out[0], 1);
  EXPECT_EQ(r.lse[0], 0);
  for (std::size_t i : {1u, 2u}) {
    EXPECT_TRUE(std::isnan(r.out[i]));
    EXPECT_TRUE(std::isnan(r.lse[i]));
  }
}

TEST(ReferenceAttentionTest, SelectedRowsAreRowsOfTheWhole) {
  Random random;
  Matrix q(DType::kF32, {2, 2, 3, 4}), k(DType::kF32, {2, 1, 5, 4}), v(DType::kF32, {2, 1, 5, 2});
  for (Matrix* x : {&q, &k, &v}) x->FillNormal(random);
  const AttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view()};
  const AttentionResult whole = AttentionOf(args);
  const AttentionRow rows[] = {{1, 0, 2}, {0, 1, 0}};
  const AttentionResult some = Attention(args, rows);
  for (std::size_t r = 0; r < 2; ++r) {
    const auto at = static_cast<std::size_t>((rows[r].batch * 2 + rows[r].head) * 3 + rows[r].query);
    EXPECT_EQ(some.lse[r], whole.lse[at]);
    for (std::size_t d = 0; d < 2; ++d) EXPECT_EQ(some.out[r * 2 + d], whole.out[at * 2 + d]);
  }
}

}  // namespace
}  // namespace cubist::reference
