// The bounds hold for computations that round as a kernel may, and catch what a kernel must not do.
#include "reference/bounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/attention.h"
#include "reference/matmul.h"
#include "reference/token_permute.h"
#include "tests/support/double_benchmark.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"

namespace cubist::reference {
namespace {

using cubist::testing::IsClose;
using cubist::testing::kContiguous;
using cubist::testing::Matrix;
using cubist::testing::NaiveMatmul;
using cubist::testing::Random;
using cubist::testing::RoundTo;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

Values Scaled(Values values, double factor) {
  for (double& x : values) x *= factor;
  return values;
}

Matrix FromValues(DType dtype, std::int64_t rows, std::int64_t cols, const Values& values) {
  Matrix x(dtype, {rows, cols});
  for (std::int64_t i = 0; i < rows * cols; ++i)
    x.set({i / cols, i % cols}, values[static_cast<std::size_t>(i)]);
  return x;
}

TEST(BoundsTest, GammaGrowsAndEnds) {
  EXPECT_EQ(Gamma(0, 0x1p-24), 0);
  EXPECT_EQ(Gamma(1, 0.5), 1);
  EXPECT_EQ(Gamma(2, 0.5), kInfinity);
  EXPECT_LT(Gamma(10, 0x1p-24), Gamma(11, 0x1p-24));
}

TEST(BoundsTest, OneRoundingOnOutput) {
  EXPECT_EQ(OutputRounding(DType::kF32, 5, 1), 0);
  EXPECT_NEAR(OutputRounding(DType::kBF16, -3, 1), 4 * 0x1p-8, 1e-30);
  EXPECT_NEAR(OutputRounding(DType::kF16, 0, 0), 0x1p-25, 1e-30);  // half the spacing of subnormals
}

TEST(BoundsTest, NothingSummedIsAlmostExact) {
  EXPECT_EQ(MatmulBound(0, DType::kF32, DType::kF32, 0, 0), 0);
  EXPECT_LT(MatmulBound(100, DType::kBF16, DType::kF32, 0, 0), 1e-30);
}

// fp32 sums of K products in three orders: ascending, pairs first (as native dot products do), and halves.
float SumInOrder(const std::vector<float>& products, int order) {
  float sum = 0;
  if (order == 0) {
    for (float x : products) sum += x;
  } else if (order == 1) {
    for (std::size_t p = 0; p + 1 < products.size(); p += 2) sum += products[p] + products[p + 1];
    if (products.size() % 2 == 1) sum += products.back();
  } else {
    std::vector<float> level = products;
    while (level.size() > 1) {
      std::vector<float> next;
      for (std::size_t p = 0; p + 1 < level.size(); p += 2) next.push_back(level[p] + level[p + 1]);
      if (level.size() % 2 == 1) next.push_back(level.back());
      level = next;
    }
    sum = level.empty() ? 0 : level[0];
  }
  return sum;
}

TEST(MatmulBoundTest, HoldsInAnyOrderOfSummation) {
  for (DType dtype : kFloats) {
    for (std::int64_t k : {1, 2, 3, 17, 64, 255, 1000}) {
      Random random;
      Matrix a(dtype, {6, k}), b(dtype, {k, 5});
      a.FillNormal(random), b.FillNormal(random);
      const MatmulResult exact = Matmul(a.view(), false, b.view(), false, {});
      for (int order : {0, 1, 2}) {
        Values c;
        for (std::int64_t i = 0; i < 30; ++i) {
          std::vector<float> products;
          for (std::int64_t p = 0; p < k; ++p) {
            products.push_back(static_cast<float>(a.at({i / 5, p})) * static_cast<float>(b.at({p, i % 5})));
          }
          c.push_back(SumInOrder(products, order));
        }
        for (DType output : {DType::kF32, dtype}) {
          EXPECT_TRUE(
              IsClose(FromValues(output, 6, 5, c).view(), exact.c, MatmulBounds(exact, k, dtype, output)))
              << NameOf(dtype) << " to " << NameOf(output) << ", k = " << k << ", order " << order;
        }
      }
    }
  }
}

TEST(MatmulBoundTest, HoldsForCancellationWhereRelativeErrorIsLarge) {
  const std::int64_t k = 256;
  Matrix a(DType::kF32, {1, k}), b(DType::kF32, {k, 1});
  Random random;
  for (std::int64_t p = 0; p < k; p += 2) {
    a.set({0, p}, random.Uniform(1, 1000)), a.set({0, p + 1}, -a.at({0, p}) + 1e-4);
  }
  b.FillUniform(random, 0.9999, 1.0001);
  const MatmulResult exact = Matmul(a.view(), false, b.view(), false, {});
  const Matrix c =
      FromValues(DType::kF32, 1, 1, NaiveMatmul(a.view(), false, b.view(), false, {}, DType::kF32));
  EXPECT_TRUE(IsClose(c.view(), exact.c, MatmulBounds(exact, k, DType::kF32, DType::kF32)));
}

TEST(MatmulBoundTest, CatchesAMissingTermAndASecondRounding) {
  for (DType dtype : kFloats) {
    const std::int64_t k = 300;
    Random random;
    Matrix a(dtype, {8, k}), b(dtype, {k, 8}), shorter(dtype, {8, k});
    a.FillNormal(random), b.FillNormal(random);
    shorter = a;
    for (std::int64_t i = 0; i < 8; ++i) shorter.set({i, k - 1}, 0);
    const MatmulResult exact = Matmul(a.view(), false, b.view(), false, {});
    const Values bounds = MatmulBounds(exact, k, dtype, DType::kF32);
    const Values c = NaiveMatmul(a.view(), false, b.view(), false, {}, DType::kF32);
    const Values without_last = NaiveMatmul(shorter.view(), false, b.view(), false, {}, DType::kF32);
    EXPECT_TRUE(IsClose(FromValues(DType::kF32, 8, 8, c).view(), exact.c, bounds));
    EXPECT_FALSE(IsClose(FromValues(DType::kF32, 8, 8, without_last).view(), exact.c, bounds));
    // An fp32 output that passed through a 16-bit type on its way.
    const Values through_bf16 = NaiveMatmul(a.view(), false, b.view(), false, {}, DType::kBF16);
    EXPECT_FALSE(IsClose(FromValues(DType::kF32, 8, 8, through_bf16).view(), exact.c, bounds));
    // A bound that is too small by four orders must fail, or the comparison compares nothing.
    EXPECT_FALSE(IsClose(FromValues(DType::kF32, 8, 8, c).view(), exact.c, Scaled(bounds, 1e-4)));
  }
}

TEST(MatmulBoundTest, CatchesSixteenBitAccumulation) {
  const std::int64_t k = 512;
  Random random;
  Matrix a(DType::kBF16, {1, k}), b(DType::kBF16, {k, 1});
  a.FillUniform(random, 0.5, 1), b.FillUniform(random, 0.5, 1);
  double sum = 0;
  for (std::int64_t p = 0; p < k; ++p) sum = RoundTo(DType::kBF16, sum + a.at({0, p}) * b.at({p, 0}));
  const MatmulResult exact = Matmul(a.view(), false, b.view(), false, {});
  EXPECT_FALSE(IsClose(FromValues(DType::kBF16, 1, 1, {sum}).view(), exact.c,
                       MatmulBounds(exact, k, DType::kBF16, DType::kBF16)));
}

TEST(MatmulBoundTest, AllowsFlushedDenormalsInBF16Alone) {
  const double denormal = 0x1p-130, large = 100;
  EXPECT_GE(MatmulBound(1, DType::kBF16, DType::kF32, denormal * large, denormal * large, large),
            denormal * large);
  EXPECT_LT(MatmulBound(1, DType::kF32, DType::kF32, denormal * large, denormal * large, large), denormal);
}

// What separates one right computation of attention from another.
struct Variant {
  std::int64_t block = 16;        // keys per step
  bool round_p = true;            // P is rounded to the input dtype before it meets v, as the contract says
  bool rescale_o = true;          // wrong if not
  bool round_before_sum = false;  // l sums the rounded P: not in the contract
};

struct Answer {
  Values out, lse;
};

// Online softmax over blocks of keys, in fp32 throughout, for one head: as a kernel does it.
Answer OnlineSoftmax(const Matrix& q, const Matrix& k, const Matrix& v, float scale, DType output,
                     const Variant& variant) {
  Answer answer;
  const std::int64_t skv = k.size(2), dv = v.size(3);
  for (std::int64_t i = 0; i < q.size(2); ++i) {
    float m = std::numeric_limits<float>::lowest(), l = 0;
    std::vector<float> o(static_cast<std::size_t>(dv));
    for (Range block : Split(skv, variant.block)) {
      std::vector<float> s;
      float m_new = m;
      for (std::int64_t j = block.begin; j < block.end; ++j) {
        float sum = 0;
        for (std::int64_t d = 0; d < q.size(3); ++d) {
          sum += static_cast<float>(q.at({0, 0, i, d})) * static_cast<float>(k.at({0, 0, j, d}));
        }
        s.push_back(sum * scale);
        m_new = std::max(m_new, s.back());
      }
      const float alpha = std::exp(m - m_new);
      m = m_new;
      l *= alpha;
      for (float& x : o) x *= variant.rescale_o ? alpha : 1.0f;
      for (std::int64_t j = block.begin; j < block.end; ++j) {
        float p = std::exp(s[static_cast<std::size_t>(j - block.begin)] - m);
        if (!variant.round_before_sum) l += p;
        if (variant.round_p) p = static_cast<float>(RoundTo(q.dtype(), p));
        if (variant.round_before_sum) l += p;
        for (std::int64_t d = 0; d < dv; ++d) {
          o[static_cast<std::size_t>(d)] += p * static_cast<float>(v.at({0, 0, j, d}));
        }
      }
    }
    for (float x : o) answer.out.push_back(RoundTo(output, x / l));
    answer.lse.push_back(m + std::log(l));
  }
  return answer;
}

class AttentionBoundTest : public ::testing::TestWithParam<DType> {
 protected:
  void Fill(double q_scale) {
    Random random;
    q.FillNormal(random, 0, q_scale), k.FillNormal(random), v.FillNormal(random);
    args = {.q = q.view(), .k = k.view(), .v = v.view(), .scale = 0.125};
    exact = Attention(args, AllRows(args));
  }
  bool OutIsClose(const Values& out, DType output, double bound_factor = 1) const {
    const Values bounds = Scaled(OutBounds(args, exact, output), bound_factor);
    return IsClose(FromValues(output, 24, 20, out).view(), exact.out, bounds);
  }
  bool LseIsClose(const Values& lse, double bound_factor = 1) const {
    const Values bounds = Scaled(LseBounds(args, exact), bound_factor);
    return IsClose(FromValues(DType::kF32, 24, 1, lse).view(), exact.lse, bounds);
  }

  Matrix q{GetParam(), {1, 1, 24, 64}}, k{GetParam(), {1, 1, 300, 64}}, v{GetParam(), {1, 1, 300, 20}};
  AttentionArgs args;
  AttentionResult exact;
};

TEST_P(AttentionBoundTest, HoldsForTheOnlineSoftmax) {
  for (double q_scale : {0.01, 1.0, 10.0}) {
    Fill(q_scale);
    for (std::int64_t block : {16, 64, 512}) {
      for (DType output : {DType::kF32, GetParam()}) {
        const Answer answer = OnlineSoftmax(q, k, v, 0.125f, output, {.block = block});
        EXPECT_TRUE(OutIsClose(answer.out, output))
            << "scores of size " << q_scale << ", blocks of " << block;
        EXPECT_TRUE(LseIsClose(answer.lse)) << "scores of size " << q_scale << ", blocks of " << block;
      }
    }
  }
}

TEST_P(AttentionBoundTest, CatchesMistakes) {
  Fill(1);
  const auto answer_of = [&](float scale, const Variant& variant) {
    return OnlineSoftmax(q, k, v, scale, DType::kF32, variant);
  };
  const Answer right = answer_of(0.125f, {});
  EXPECT_FALSE(OutIsClose(right.out, DType::kF32, 1e-4)) << "with a bound that is too small";
  EXPECT_FALSE(LseIsClose(right.lse, 1e-4)) << "with a bound that is too small";
  EXPECT_FALSE(OutIsClose(answer_of(0.125f, {.rescale_o = false}).out, DType::kF32));
  const Answer other_scale = answer_of(0.13f, {});
  EXPECT_FALSE(OutIsClose(other_scale.out, DType::kF32));
  EXPECT_FALSE(LseIsClose(other_scale.lse));
  if (GetParam() != DType::kBF16) return;  // In fp16 it drowns: roundings of 300 p average out to 2^-15.
  EXPECT_FALSE(LseIsClose(answer_of(0.125f, {.round_before_sum = true}).lse))
      << "l sums what was not rounded";
}

TEST_P(AttentionBoundTest, CatchesOneForgottenKey) {
  Fill(1);
  const Answer right = OnlineSoftmax(q, k, v, 0.125f, DType::kF32, {});
  for (std::int64_t d = 0; d < 64; ++d) k.set({0, 0, 299, d}, 0);
  const Answer wrong = OnlineSoftmax(q, k, v, 0.125f, DType::kF32, {});
  EXPECT_TRUE(LseIsClose(right.lse));
  EXPECT_FALSE(LseIsClose(wrong.lse));
}

INSTANTIATE_TEST_SUITE_P(DTypes, AttentionBoundTest, ::testing::ValuesIn(kFloats),
                         [](const auto& info) { return NameOf(info.param); });

TEST(AttentionRowBoundTest, RowsWithoutKeysAreExact) {
  EXPECT_EQ(AttentionRowBound{}.Out(DType::kF16, 0, 0, 0), 0);
  EXPECT_EQ(AttentionRowBound{}.Lse(-kInfinity), 0);
}

TEST(AttentionRowBoundTest, SaysNothingWhereNothingCanBeSaid) {
  const AttentionRowBound row{.score_terms = 128, .keys = 10, .input = DType::kF32, .max_score = 1e6};
  EXPECT_EQ(row.Out(DType::kF32, 1, 1, 10), kInfinity);
}

TEST(WeightedSumBoundTest, HoldsAndCatchesAMissingRow) {
  for (DType dtype : kFloats) {
    Random random;
    Matrix permuted(dtype, {40, 6}), probs(dtype, {5, 8});
    Matrix sorted(DType::kI32, {40}, kContiguous);
    permuted.FillNormal(random), probs.FillUniform(random, 0.01, 1);
    for (std::int64_t s = 0; s < 40; ++s) sorted.set({s}, static_cast<double>((s * 7) % 40));
    const UnpermuteResult exact = Unpermute(permuted.view(), sorted.view(), probs.view());
    const Values bounds = UnpermuteBounds(exact, probs.view(), dtype);
    for (std::int64_t routes : {8, 7}) {
      Values out;
      for (std::int64_t i = 0; i < 30; ++i) {
        float sum = 0;
        for (std::int64_t j = 0; j < routes; ++j) {
          const std::int64_t row = (i / 6 * 8 + j) * 7 % 40;
          sum += static_cast<float>(probs.at({i / 6, j})) * static_cast<float>(permuted.at({row, i % 6}));
        }
        out.push_back(sum);
      }
      EXPECT_EQ(static_cast<bool>(IsClose(FromValues(dtype, 5, 6, out).view(), exact.out, bounds)),
                routes == 8);
    }
  }
}

}  // namespace
}  // namespace cubist::reference
