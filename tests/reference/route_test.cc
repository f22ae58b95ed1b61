// The reference's router: known choices, and its gradient against finite differences of its own forward.
#include "reference/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

// What else a router may do, under any score.
struct Features {
  const char* name;
  bool bias = false, weighs = false;
  reference::RouterOptions options = {};
};

// weight(j) = n(j)^2 (1 + ids(j)) + the sum of n, of routes that are kept; and its gradient.
std::vector<double> Weights(const std::vector<std::int32_t>& ids, const std::vector<double>& n) {
  double sum = 0;
  for (std::size_t j = 0; j < n.size(); ++j) sum += ids[j] < 0 ? 0 : n[j];
  std::vector<double> weights;
  for (std::size_t j = 0; j < n.size(); ++j) weights.push_back(n[j] * n[j] * (1 + ids[j]) + sum);
  return weights;
}
std::vector<double> WeightsGrad(const std::vector<std::int32_t>& ids, const std::vector<double>& n,
                                const std::vector<double>& d) {
  double sum = 0;
  for (std::size_t j = 0; j < n.size(); ++j) sum += ids[j] < 0 ? 0 : d[j];
  std::vector<double> d_n;
  for (std::size_t j = 0; j < n.size(); ++j) d_n.push_back(2 * n[j] * (1 + ids[j]) * d[j] + sum);
  return d_n;
}

// Of d_weights * weights and twice the loss, at every logit.
void ExpectGradientsAreFiniteDifferences(const reference::RouterOptions& options, bool biased) {
  constexpr std::int64_t kTokens = 4, kExperts = 8, kTopK = 3;
  Random random;
  Matrix logits(DType::kF32, {kTokens, kExperts}), d_weights(DType::kF32, {kTokens, kTopK}),
      bias(DType::kF32, {kExperts});
  logits.FillNormal(random, 0, 2), d_weights.FillNormal(random), bias.FillNormal(random, 0, 0.3);
  const ConstTensor given = biased ? ConstTensor(bias.view()) : ConstTensor();
  const auto forward = reference::Route(logits.view(), given, kTopK, options);
  const auto gradient =
      reference::RouteGrad(d_weights.ToDoubles(), forward, kTokens, kExperts, kTopK, 2, options);
  const std::vector<double> weights_of = d_weights.ToDoubles();
  int crossed = 0;
  for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
    const std::int64_t t = i / kExperts, e = i % kExperts;
    const double kept = logits.at({t, e});
    double value[2], at[2];
    bool crosses = false;
    for (int side = 0; side < 2; ++side) {
      logits.set({t, e}, kept + (side == 0 ? 0x1p-8 : -0x1p-8));
      at[side] = logits.at({t, e});
      const auto moved = reference::Route(logits.view(), given, kTopK, options);
      crosses |= moved.ids != forward.ids;
      value[side] = 2 * moved.aux_loss;
      for (std::size_t j = 0; j < moved.weights.size(); ++j) value[side] += weights_of[j] * moved.weights[j];
    }
    logits.set({t, e}, kept);
    if (crosses) {
      ++crossed;
      continue;
    }
    EXPECT_NEAR((value[0] - value[1]) / (at[0] - at[1]), gradient[static_cast<std::size_t>(i)], 1e-4);
  }
  EXPECT_LE(crossed, 4) << "steps across a choice: another seed is needed";
}

TEST(RouterReference, GradientsAreFiniteDifferences) {
  const Features all[] = {{"plain"},
                          {"bias", true},
                          {"groups", true, false, {.groups = 4, .top_groups = 2, .group_top = 2}},
                          {"temperature", false, false, {.temperature = 1.5, .seed = 4}},
                          {"dropout", false, false, {.dropout = 0.4, .seed = 3}},
                          {"expert dropout", false, false, {.expert_dropout = 0.4, .seed = 2}},
                          {"weighting", true, true},
                          {"mask", true, false, {.valid = {true, false, true, true}}},
                          {"everything",
                           true,
                           true,
                           {.groups = 2,
                            .top_groups = 1,
                            .group_top = 1,
                            .temperature = 2,
                            .dropout = 0.3,
                            .expert_dropout = 0.3,
                            .seed = 6,
                            .valid = {true, true, false, true}}},
                          {"none valid", false, false, {.valid = {false, false, false, false}}}};
  for (const Features& f : all) {
    for (reference::Score score :
         {reference::Score::kSoftmax, reference::Score::kSigmoid, reference::Score::kSqrtSoftplus}) {
      for (bool renormalise : {false, true}) {
        SCOPED_TRACE(::testing::Message() << f.name << ", score " << static_cast<int>(score)
                                          << (renormalise ? ", renormalised" : ""));
        reference::RouterOptions options = f.options;
        options.score = score, options.renormalise = renormalise, options.eps = 0.25, options.scale = 1.5;
        options.aux_coefficient = 0.7;
        if (f.weighs) options.weighting = &Weights, options.weighting_grad = &WeightsGrad;
        ExpectGradientsAreFiniteDifferences(options, f.bias);
      }
    }
  }
}

// By their options, routes are dropped and experts left out in what is differentiated above.
TEST(RouterReference, RoutesAreDroppedAndExpertsLeftOut) {
  Matrix logits(DType::kF32, {4, 8});
  Random random;
  logits.FillNormal(random);
  const auto routes = [&](const reference::RouterOptions& options) {
    return reference::Route(logits.view(), {}, 8, options).ids;
  };
  const std::vector<std::int32_t> dropped = routes({.dropout = 0.4, .seed = 3}),
                                  left_out = routes({.expert_dropout = 0.4, .seed = 2});
  std::int64_t out = 0;
  for (std::uint64_t e = 0; e < 8; ++e) out += reference::UniformNumber(2, 2, e) <= 0.4 ? 1 : 0;
  EXPECT_GT(out, 0);
  EXPECT_EQ(std::count(left_out.begin(), left_out.end(), -1), 4 * out);
  std::int64_t routes_out = 0;
  for (std::uint64_t r = 0; r < 32; ++r) routes_out += reference::UniformNumber(3, 1, r) < 0.4 ? 1 : 0;
  EXPECT_GT(routes_out, 0);
  EXPECT_EQ(std::count(dropped.begin(), dropped.end(), -1), routes_out);
}

// With tokens left out, the others are as without them; the loss is theirs alone.
TEST(RouterReference, TokensThatAreNotValidAreNoPart) {
  constexpr std::int64_t kExperts = 8, kTopK = 3;
  Matrix logits(DType::kF32, {5, kExperts}), without(DType::kF32, {3, kExperts});
  Random random;
  logits.FillNormal(random);
  const std::vector<std::int64_t> rows = {0, 2, 3};
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t e = 0; e < kExperts; ++e)
      without.set({i, e}, logits.at({rows[static_cast<std::size_t>(i)], e}));
  }
  reference::RouterOptions options{.aux_coefficient = 0.7};
  const auto expected = reference::Route(without.view(), {}, kTopK, options);
  options.valid = {true, false, true, true, false};
  const auto given = reference::Route(logits.view(), {}, kTopK, options);
  EXPECT_EQ(given.counts, expected.counts);
  EXPECT_DOUBLE_EQ(given.aux_loss, expected.aux_loss);
  EXPECT_GT(given.aux_loss, 0);
  for (std::int64_t i = 0; i < 3 * kTopK; ++i) {
    const auto at = static_cast<std::size_t>(rows[static_cast<std::size_t>(i / kTopK)] * kTopK + i % kTopK);
    EXPECT_EQ(given.ids[at], expected.ids[static_cast<std::size_t>(i)]);
    EXPECT_EQ(given.weights[at], expected.weights[static_cast<std::size_t>(i)]);
  }
  for (const std::size_t token : {1u, 4u}) {
    for (std::size_t j = 0; j < kTopK; ++j) {
      EXPECT_EQ(given.ids[token * kTopK + j], -1);
      EXPECT_EQ(given.weights[token * kTopK + j], 0);
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
