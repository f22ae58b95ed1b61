// The reference's router: known choices, and its gradient against finite differences of its own forward.
#include "reference/route.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

// Known answers of Random123 (philox4x32-10, counter and key all zero, then all ones).
TEST(RouterReference, RandomNumbersArePhilox) {
  const auto number = [](std::uint32_t bits) { return (static_cast<double>(bits >> 9) + 0.5) / 8388608.0; };
  EXPECT_EQ(reference::UniformNumber(0, 0, 0), number(0x6627e8d5u));
  EXPECT_EQ(reference::UniformNumber(0, 0, 1), number(0xe169c58du));
  EXPECT_EQ(reference::UniformNumber(0, 0, 2), number(0xbc57ac4cu));
  EXPECT_EQ(reference::UniformNumber(0, 0, 3), number(0x9b00dbd8u));
}

TEST(RouterReference, GroupsAreChosenFirst) {
  Matrix logits(DType::kF32, {1, 6});
  const double values[] = {5, -9, 4,
                           3, -8, -7};  // Parts of two: their maxima 5, 4, -7; their sums -4, 7, -15.
  for (std::int64_t e = 0; e < 6; ++e) logits.set({0, e}, values[e]);
  reference::RouterOptions options{.groups = 3, .top_groups = 1, .group_top = 1};
  EXPECT_EQ(reference::Route(logits.view(), {}, 2, options).ids, (std::vector<std::int32_t>{0, 1}));
  // Softmax scores are positive: the two highest of the first part are about 0.66, of the second 0.34.
  options.group_top = 2;
  EXPECT_EQ(reference::Route(logits.view(), {}, 2, options).ids, (std::vector<std::int32_t>{0, 1}));
}

TEST(RouterReference, GradientsAreFiniteDifferences) {
  constexpr std::int64_t kTokens = 3, kExperts = 5, kTopK = 2;
  for (reference::Score score :
       {reference::Score::kSoftmax, reference::Score::kSigmoid, reference::Score::kSqrtSoftplus}) {
    for (bool renormalise : {false, true}) {
      for (double temperature : {0.0, 1.5}) {
        Random random;
        Matrix logits(DType::kF32, {kTokens, kExperts}), d_weights(DType::kF32, {kTokens, kTopK});
        logits.FillNormal(random, 0, 2), d_weights.FillNormal(random);
        const reference::RouterOptions options{.score = score,
                                               .renormalise = renormalise,
                                               .scale = 1.5,
                                               .temperature = temperature,
                                               .seed = 4,
                                               .aux_coefficient = 0.7};
        const auto forward = reference::Route(logits.view(), {}, kTopK, options);
        const auto gradient =
            reference::RouteGrad(d_weights.ToDoubles(), forward, kTokens, kExperts, kTopK, 2, options);
        const std::vector<double> weights_of = d_weights.ToDoubles();
        for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
          const std::int64_t t = i / kExperts, e = i % kExperts;
          const double kept = logits.at({t, e});
          double value[2], at[2];
          for (int side = 0; side < 2; ++side) {
            logits.set({t, e}, kept + (side == 0 ? 0x1p-8 : -0x1p-8));
            at[side] = logits.at({t, e});
            const auto moved = reference::Route(logits.view(), {}, kTopK, options);
            ASSERT_EQ(moved.ids, forward.ids) << "a step across a choice: another seed is needed";
            value[side] = 2 * moved.aux_loss;
            for (std::size_t j = 0; j < moved.weights.size(); ++j)
              value[side] += weights_of[j] * moved.weights[j];
          }
          logits.set({t, e}, kept);
          EXPECT_NEAR((value[0] - value[1]) / (at[0] - at[1]), gradient[static_cast<std::size_t>(i)], 1e-4);
        }
      }
    }
  }
}

// Scores that vanish before those of fp32 do, and tokens that have none.
TEST(RouterReference, LogitsFarBelowZero) {
  Matrix logits(DType::kF32, {1, 2});
  logits.set({0, 0}, -900), logits.set({0, 1}, -1e4);
  const reference::RouterOptions options{
      .score = reference::Score::kSqrtSoftplus, .renormalise = true, .aux_coefficient = 1};
  const auto forward = reference::Route(logits.view(), {}, 1, options);
  EXPECT_DOUBLE_EQ(forward.scores[0], std::exp(-450.0));
  EXPECT_DOUBLE_EQ(forward.weights[0], 1);
  const auto gradient = reference::RouteGrad({2}, forward, 1, 2, 1, 1, options);
  for (double d : gradient) EXPECT_NEAR(d, 0, 1e-12);
  EXPECT_NEAR(forward.aux_loss, 0, 1e-12);
}

}  // namespace
}  // namespace cubist::testing
