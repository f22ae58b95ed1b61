// Route and its gradient against the reference, and the properties that routing must have.
#include "kernels/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/interpret.h"
#include "npu_model/trace/record.h"
#include "reference/route.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/route_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

class RouteTest : public ::testing::TestWithParam<RouteCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, RouteTest, ::testing::ValuesIn(RouteCases()), ShapeName());

TEST_P(RouteTest, OnTheHost) { ExpectRoutes(Host(), GetParam()); }
TEST_P(RouteTest, OnTheModel) { ExpectRoutes(NpuWithData(Ascend910B2()), GetParam()); }

class RouteSimdTest : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Simd, RouteSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);
TEST_P(RouteSimdTest, EveryCase) {
  const ScopedSimdTarget target(GetParam());
  for (const RouteCase& c : RouteCases()) ExpectRoutes(Host(), c);
}

// Equal scores: the lower expert first, group by group as well.
TEST(RoutePropertiesTest, TiesGoToTheLowerExpert) {
  for (std::int64_t top_k : {1, 5, 16, 17, 40}) {
    RouteCall call({"ties", 3, 40, top_k, {}});
    call.logits.Fill(0.25);
    call.logits.set({1, 33}, 1);
    ASSERT_TRUE(IsOk(Route(Host(), call.args())));
    for (std::int64_t j = 0; j < top_k; ++j) {
      EXPECT_EQ(call.ids.at({0, j}), j);
      EXPECT_EQ(call.ids.at({1, j}), j == 0 ? 33 : j - 1 < 33 ? j - 1 : j);
    }
  }
}

TEST(RoutePropertiesTest, ExpertsAreDistinctAndGroupsLimited) {
  RouteOptions options = {.score = ScoreFunction::kSigmoid, .groups = 8, .top_groups = 3};
  RouteCall call({"groups", 500, 256, 8, options});
  ASSERT_TRUE(IsOk(Route(Host(), call.args())));
  for (std::int64_t t = 0; t < 500; ++t) {
    std::set<double> ids, groups;
    for (std::int64_t j = 0; j < 8; ++j) {
      ids.insert(call.ids.at({t, j}));
      groups.insert(std::floor(call.ids.at({t, j}) / 32));
    }
    ASSERT_EQ(ids.size(), 8u);
    ASSERT_LE(groups.size(), 3u);
  }
}

// Gumbel's maximum: whatever divides the noisy logits, expert e is the first with probability p(e) = softmax(logits)(e),
// and the next is drawn likewise among the others. Chi-square with 15 degrees of freedom is beyond 37.7 once in a thousand, and
// as often below 3.5: too even.
TEST(RoutePropertiesTest, SampledFrequenciesFollowTheSoftmax) {
  constexpr std::int64_t kTokens = 20000, kExperts = 16, kTopK = 2;
  std::vector<double> p;
  for (std::int64_t e = 0; e < kExperts; ++e) p.push_back(std::exp(0.1 * static_cast<double>(e)));
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& v : p) v /= total;
  std::vector<double> next(p.size());
  for (std::size_t first = 0; first < p.size(); ++first) {
    for (std::size_t e = 0; e < p.size(); ++e) next[e] += e == first ? 0 : p[first] * p[e] / (1 - p[first]);
  }
  std::uint64_t seed = 12;
  for (const float temperature : {0.1f, 1.0f, 10.0f}) {
    RouteCall call({"gumbel", kTokens, kExperts, kTopK, {.temperature = temperature, .seed = seed++}});
    for (std::int64_t e = 0; e < kExperts; ++e) {
      for (std::int64_t t = 0; t < kTokens; ++t) call.logits.set({t, e}, 0.1 * static_cast<double>(e));
    }
    ASSERT_TRUE(IsOk(Route(Host(), call.args())));
    for (std::int64_t j = 0; j < kTopK; ++j) {
      SCOPED_TRACE(Join("route ", j, " at temperature ", temperature));
      std::vector<double> drawn(p.size());
      for (std::int64_t t = 0; t < kTokens; ++t) ++drawn[static_cast<std::size_t>(call.ids.at({t, j}))];
      double chi_square = 0;
      for (std::size_t e = 0; e < p.size(); ++e) {
        const double expected = kTokens * (j == 0 ? p : next)[e];
        chi_square += std::pow(drawn[e] - expected, 2) / expected;
      }
      EXPECT_LT(chi_square, 37.7);
      EXPECT_GT(chi_square, 3.5);
    }
  }
}

TEST(RoutePropertiesTest, RoutesAreDroppedAtTheirRate) {
  constexpr std::int64_t kTokens = 5000, kTopK = 4;
  for (float rate : {0.1f, 0.5f}) {
    RouteCall call({"drop", kTokens, 32, kTopK, {.dropout = rate, .seed = 3}});
    ASSERT_TRUE(IsOk(Route(Host(), call.args())));
    double dropped = 0;
    for (double id : call.ids.ToDoubles()) dropped += id < 0 ? 1 : 0;
    const double routes = static_cast<double>(kTokens * kTopK);
    EXPECT_NEAR(dropped, rate * routes, 4 * std::sqrt(routes * rate * (1 - rate)));
  }
}

// With as many routes as experts, those that no route goes to are left out.
TEST(RoutePropertiesTest, ExpertsAreLeftOutAtTheirRateAndForEveryToken) {
  constexpr std::int64_t kTokens = 3, kExperts = 512;
  constexpr int kSeeds = 16;
  for (float rate : {0.1f, 0.5f}) {
    double left_out = 0;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      RouteCall call({"left_out", kTokens, kExperts, kExperts, {.expert_dropout = rate, .seed = seed}});
      ASSERT_TRUE(IsOk(Route(Host(), call.args())));
      std::set<double> kept;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        std::set<double> ids;
        for (std::int64_t j = 0; j < kExperts; ++j) {
          const double id = call.ids.at({t, j});
          if (id < 0) continue;
          EXPECT_TRUE(ids.insert(id).second) << id << " is there twice";
        }
        if (t == 0) kept = ids;
        EXPECT_EQ(ids, kept);
      }
      for (std::uint64_t e = 0; e < kExperts; ++e)
        EXPECT_EQ(kept.count(static_cast<double>(e)) == 0, reference::UniformNumber(seed, 2, e) <= rate);
      left_out += static_cast<double>(kExperts) - static_cast<double>(kept.size());
    }
    EXPECT_NEAR(left_out, rate * kSeeds * kExperts, 4 * std::sqrt(kSeeds * kExperts * rate * (1 - rate)));
  }
}

TEST(RoutePropertiesTest, RoutesWithoutAnExpertAreMinusOne) {
  constexpr std::int64_t kTokens = 9, kExperts = 12;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    RouteCall call({"all", kTokens, kExperts, kExperts, {.expert_dropout = 0.5f, .seed = 2}});
    ASSERT_TRUE(IsOk(Route(device, call.args())));
    std::int64_t kept = 0;
    for (std::uint64_t e = 0; e < kExperts; ++e) kept += reference::UniformNumber(2, 2, e) <= 0.5 ? 0 : 1;
    ASSERT_LT(kept, kExperts);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t j = 0; j < kExperts; ++j) {
        EXPECT_EQ(call.ids.at({t, j}) < 0, j >= kept);
        EXPECT_EQ(call.weights.at({t, j}) == 0, j >= kept);
      }
    }
  }
}

// By a bias of -inf experts are left out as by expert_dropout, with it and without.
TEST(RoutePropertiesTest, BiasesOfMinusInfinityLeaveExpertsOut) {
  constexpr std::int64_t kTokens = 9, kExperts = 12, kTopK = 8;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const RouteOptions& options :
         {RouteOptions{.renormalise = true}, RouteOptions{.expert_dropout = 0.3f, .seed = 6},
          RouteOptions{.score = ScoreFunction::kSigmoid, .groups = 3, .top_groups = 2, .group_top = 1}}) {
      RouteCall call({"minus_infinity", kTokens, kExperts, kTopK, options, /*bias=*/true});
      for (const std::int64_t e : {0, 2, 3, 5, 6, 8, 9}) call.bias.set({e}, -kInfinity);
      ASSERT_TRUE(IsOk(Route(device, call.args())));
      const auto expected =
          reference::Route(call.logits.view(), call.bias.view(), kTopK, PlainOptions(options));
      ExpectExactly(call.ids.view(), std::vector<double>(expected.ids.begin(), expected.ids.end()));
      EXPECT_LT(call.ids.at({0, kTopK - 1}), 0);
      for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
        const std::int64_t t = i / kTopK, j = i % kTopK;
        EXPECT_NEAR(call.weights.at({t, j}), expected.weights[static_cast<std::size_t>(i)], 0x1p-20);
      }
      ExpectExactly(call.counts.view(), std::vector<double>(expected.counts.begin(), expected.counts.end()));
    }
  }
}

// Sums of such logits are beyond any number, their mean is not: by rounding neither.
TEST(RoutePropertiesTest, MeansOfTheLargestLogitsAreNumbers) {
  const RouteOptions options{.score = ScoreFunction::kSqrtSoftplus, .bad_logits = BadLogits::kMean};
  for (const Device& device :
       {Host(), NpuWithData(Ascend910B2()), NpuWithData(WithCapacity(Buffer::kUB, 4 << 10))}) {
    for (const std::int64_t experts : {3, 40, 64, 301}) {
      RouteCall call({"largest", 4, experts, 2, options});
      for (std::int64_t e = 0; e < experts; ++e) {
        call.logits.set({0, e}, std::numeric_limits<float>::max());
        call.logits.set({1, e}, std::numeric_limits<float>::lowest());
        call.logits.set({2, e}, 3.0e38 - static_cast<double>(e % 3) * 1e38);
      }
      for (std::int64_t t = 0; t < 4; ++t) call.logits.set({t, t % 3}, kNaN);
      ASSERT_TRUE(IsOk(Route(device, call.args())));
      const auto expected = reference::Route(call.logits.view(), {}, 2, PlainOptions(options));
      ExpectNear(call.scores, expected.scores, 0x1p-18, 1e-30);
      ExpectExactly(call.bad.view(), std::vector<double>(4, 1.0));
    }
  }
}

TEST(RoutePropertiesTest, BiasesThatAreNoNumbersAreNamed) {
  for (const double value : {kNaN, kInfinity}) {
    RouteCall call({"bias", 3, 8, 2, {}, /*bias=*/true});
    call.bias.set({5}, value);
    const Status status = Route(Host(), call.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), Join("route: bias has ", value > 0 ? "inf" : "nan",
                                     " at (5), needs finite values, or -inf for experts that are left out"));
    EXPECT_TRUE(std::isnan(call.weights.at({0, 0})));
  }
}

TEST(RoutePropertiesTest, BadOptionsAreNamed) {
  const auto says = [](const RouteOptions& options, const std::string& what) {
    RouteCall call({"options", 3, 8, 2, options});
    const Status status = Route(Host(), call.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(call.weights.at({0, 0})));
  };
  says({.expert_dropout = 0.6f}, "route: expert_dropout is 0.6");
  says({.score = static_cast<ScoreFunction>(9)}, "route: score is 9, the last is 2");
  says({.bad_logits = static_cast<BadLogits>(3)}, "route: bad_logits is 3, the last is 2");
  says({.temperature = -1}, "route: temperature is -1, needs 0, or");
  says({.temperature = 1e-9f},
       "route: temperature is 1e-09, needs 0, or a finite value from 9.536743e-07 on");
  says({.dropout = -1}, "route: dropout is -1");
  says({.weighting = {.backward = OwnWeighting().backward}}, "route: weighting has no forward function");
  RouteOptions forward_only;
  forward_only.weighting.forward = OwnWeighting().forward;
  RouteCall call({"options", 3, 8, 2, forward_only});
  ASSERT_TRUE(IsOk(Route(Host(), call.args())));
  const Status status = RouteGrad(Host(), call.grad_args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "route_grad: weighting has no backward function");
}

TEST(RoutePropertiesTest, RandomCallsAgreeWithTheReference) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) ExpectRoutes(Host(), RandomRouteCase(seed));
}

TEST(RoutePropertiesTest, BadLogitsAreFoundCountedAndReplaced) {
  const RouteCase c{"bad", 6, 40, 3, {.score = ScoreFunction::kSigmoid, .limit = 100}};
  const auto spoil = [](RouteCall& call) {
    call.logits.set({1, 3}, kNaN), call.logits.set({1, 9}, kInfinity), call.logits.set({4, 39}, -101);
    for (std::int64_t e = 0; e < 40; ++e) call.logits.set({5, e}, kNaN);
  };
  {
    RouteCall call(c);
    spoil(call);
    const Status status = Route(Host(), call.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(),
              "route: logits has nan at (1, 3), the first of 43, needs values within +-100");
    EXPECT_TRUE(std::isnan(call.weights.at({0, 0})));  // Nothing was written.
  }
  for (BadLogits policy : {BadLogits::kZero, BadLogits::kMean}) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      RouteCall call(c);
      spoil(call);
      call.options.bad_logits = policy;
      ASSERT_TRUE(IsOk(Route(device, call.args())));
      const auto expected = reference::Route(call.logits.view(), {}, 3, ReferenceOptions(call.options));
      ExpectExactly(call.bad.view(), expected.bad);
      EXPECT_EQ(expected.bad, (std::vector<double>{0, 2, 0, 0, 1, 40}));
      ExpectNear(call.scores, expected.scores, 0x1p-19, 1e-30);
    }
  }
}

TEST(RoutePropertiesTest, LogitsFarBelowZeroStillHaveScores) {
  for (const ScoreFunction score : kScoreFunctions) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      RouteCall call({"low", 4, 40, 5, {.score = score, .renormalise = true}});
      for (std::int64_t t = 0; t < 4; ++t) {
        for (std::int64_t e = 0; e < 40; ++e)
          call.logits.set({t, e}, -20.0 - 0.5 * static_cast<double>((e * 7 + t) % 40));
      }
      ASSERT_TRUE(IsOk(Route(device, call.args())));
      const auto expected = reference::Route(call.logits.view(), {}, 5, ReferenceOptions(call.options));
      ExpectNear(call.scores, expected.scores, 0x1p-19, 1e-30);
      ExpectExactly(call.ids.view(), std::vector<double>(expected.ids.begin(), expected.ids.end()));
      ExpectNear(call.weights, expected.weights, 0x1p-18, 1e-30);
    }
  }
}

// What a device computes, instruction by instruction: 1 + e has lost all of e, or some of it.
TEST(RoutePropertiesTest, LogitsFarBelowZeroHaveScoresInTheRecordToo) {
  RouteCall call({"low", 2, 72, 72, {.score = ScoreFunction::kSqrtSoftplus}});
  for (std::int64_t t = 0; t < 2; ++t) {
    for (std::int64_t e = 0; e < 72; ++e) call.logits.set({t, e}, 12.0 - 2.51 * static_cast<double>(e + t));
  }
  trace::Record record;
  ASSERT_TRUE(IsOk(Route(Npu(Ascend910B2(), {.record = &record}), call.args())));
  ASSERT_EQ(trace::UnknownTo(record), nullptr);
  trace::GmImage gm = trace::InitialGm(record, 1);
  ASSERT_TRUE(sync::Execute(record, sync::PlanFlags(record, sync::Policy::kMinimal),
                            sync::Schedule::kProgramOrder, 1, &gm));
  const auto expected = reference::Route(call.logits.view(), {}, 72, ReferenceOptions(call.options));
  int found = 0;
  for (std::size_t t = 0; t < gm.size(); ++t) {
    if (record.tensors[t].name != "scores") continue;
    ++found;
    for (std::int64_t i = 0; i < call.scores.count(); ++i) {
      const Tensor view = call.scores.view();
      const double score =
          LoadFloat(gm[t].data(), DType::kF32, i / 72 * view.stride(0) + i % 72 * view.stride(1));
      const double exact = expected.scores[static_cast<std::size_t>(i)];
      ASSERT_NEAR(score, exact, 0x1p-21 * exact) << "of " << call.logits.at({i / 72, i % 72});
    }
  }
  EXPECT_EQ(found, 1);
}

TEST(RoutePropertiesTest, LogitsFarBelowZeroStillHaveSlopes) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    RouteCall call({"slopes", 1, 40, 40, {.score = ScoreFunction::kSqrtSoftplus}});
    for (std::int64_t e = 0; e < 40; ++e) call.logits.set({0, e}, 2.0 - static_cast<double>(e));
    ASSERT_TRUE(IsOk(Route(device, call.args())));
    ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
    std::vector<double> slopes;
    for (std::int64_t e = 0; e < 40; ++e) {
      const double x = 2.0 - static_cast<double>(e), y = std::log1p(std::exp(x));
      slopes.push_back(call.d_weights.at({0, e}) * std::exp(x) / (1 + std::exp(x)) / (2 * std::sqrt(y)));
    }
    ExpectNear(call.d_logits, slopes, 0x1p-18, 1e-30);
  }
}

// Every token at another height, from where scores are exact to where they are all 0: nothing is lost on the way, and
// nothing is NaN.
TEST(RoutePropertiesTest, LogitsOfAnyHeightHaveScoresWeightsAndGradients) {
  const std::vector<double> heights = {1e4, 300, 88,  40,    15,  3,    0,    -3,   -15,  -20,
                                       -40, -80, -83, -86.5, -95, -110, -150, -170, -200, -1e4};
  const auto tokens = static_cast<std::int64_t>(heights.size());
  for (const ScoreFunction score : kScoreFunctions) {
    for (const bool renormalise : {false, true}) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        SCOPED_TRACE(Join("score ", static_cast<int>(score), renormalise ? " renormalised" : ""));
        RouteCall call({"heights",
                        tokens,
                        40,
                        8,
                        {.score = score, .renormalise = renormalise, .scale = 1.5f, .aux_coefficient = 20}});
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t e = 0; e < 40; ++e)
            call.logits.set({t, e}, call.logits.at({t, e}) + heights[static_cast<std::size_t>(t)]);
        }
        ASSERT_TRUE(IsOk(Route(device, call.args())));
        const reference::RouterOptions options = ReferenceOptions(call.options);
        const auto expected = reference::Route(call.logits.view(), {}, 8, options);
        // What is below the normal range may be 0, and is divided by eps at least.
        ExpectNear(call.scores, expected.scores, 0x1p-18, 0x1p-126);
        ExpectNear(call.weights, expected.weights, 0x1p-17, 0x1p-124 / (renormalise ? options.eps : 1));
        EXPECT_TRUE(std::isfinite(call.aux_loss.at({0})));

        reference::RouterResult forward;
        forward.scores = call.scores.ToDoubles();
        for (double id : call.ids.ToDoubles()) forward.ids.push_back(static_cast<std::int32_t>(id));
        for (double n : call.counts.ToDoubles()) forward.counts.push_back(static_cast<std::int64_t>(n));
        ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
        const auto d_logits =
            reference::RouteGrad(call.d_weights.ToDoubles(), forward, tokens, 40, 8, 1.5, options);
        // Differences of a row err by as much as their terms.
        std::vector<double> bounds;
        for (std::int64_t t = 0; t < tokens; ++t) {
          double largest = 0, weight = 0, gradient = 0;
          for (std::int64_t e = 0; e < 40; ++e)
            largest = std::max(largest, std::abs(d_logits[static_cast<std::size_t>(t * 40 + e)]));
          for (std::int64_t j = 0; j < 8; ++j) {
            weight = std::max(weight, call.weights.at({t, j}));
            gradient = std::max(gradient, std::abs(call.d_weights.at({t, j})));
          }
          bounds.insert(bounds.end(), 40, 0x1p-18 * (largest + weight * gradient) + 0x1p-120);
        }
        ExpectClose(call.d_logits.view(), d_logits, bounds);
      }
    }
  }
}

// Of scores of 1e-21 the least sum, eps, is a part: weights and slopes in closed form.
TEST(RoutePropertiesTest, SlopesOfRenormalisedScoresNearEps) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    RouteCall call({"eps", 1, 8, 8, {.score = ScoreFunction::kSqrtSoftplus, .renormalise = true}});
    call.logits.Fill(-95), call.d_weights.Fill(1);
    ASSERT_TRUE(IsOk(Route(device, call.args())));
    ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
    const double n = std::exp(-47.5), sum = 8 * n + 1e-20, slope = n / 2 * 1e-20 / (sum * sum);
    ExpectNear(call.weights, std::vector<double>(8, n / sum), 0x1p-20, 0);
    ExpectNear(call.d_logits, std::vector<double>(8, slope), 0x1p-18, 0);
  }
}

// Sums of scores that are no numbers any more, 1 / sum not even a float.
TEST(RoutePropertiesTest, TheLossOfTokensWithoutScores) {
  for (const ScoreFunction score : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      RouteCall call({"none", 2, 4, 2, {.score = score, .aux_coefficient = 1000}});
      call.logits.Fill(-1e4);
      for (std::int64_t e = 0; e < 4; ++e) call.logits.set({1, e}, static_cast<double>(e));
      ASSERT_TRUE(IsOk(Route(device, call.args())));
      const auto expected = reference::Route(call.logits.view(), {}, 2, ReferenceOptions(call.options));
      ExpectNear(call.aux_loss, {expected.aux_loss}, 0x1p-18, 0);
      ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
      for (std::int64_t e = 0; e < 4; ++e) {
        EXPECT_EQ(call.d_logits.at({0, e}), 0);
        EXPECT_TRUE(std::isfinite(call.d_logits.at({1, e})));
      }
    }
  }
}

// A call of `c` and its gradient.
RouteCall Routed(const Device& device, const RouteCase& c, const std::function<void(RouteCall&)>& change) {
  RouteCall call(c);
  change(call);
  EXPECT_TRUE(IsOk(Route(device, call.args())));
  EXPECT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
  return call;
}

std::vector<RouteCase> MaskedCases() {
  const RouteOptions sampled{
      .renormalise = true, .temperature = 2, .dropout = 0.2f, .seed = 8, .aux_coefficient = 1};
  const RouteOptions grouped{.score = ScoreFunction::kSqrtSoftplus,
                             .groups = 8,
                             .top_groups = 3,
                             .expert_dropout = 0.2f,
                             .seed = 9,
                             .aux_coefficient = 2};
  return {{"sampled", 300, 64, 6, sampled, true, DType::kF32, true},
          {"grouped", 77, 64, 6, grouped, false, DType::kBF16, true}};
}

std::vector<Device> MaskedDevices() {
  return {Host(), NpuWithData(Ascend910B2()), NpuWithData(WithCapacity(Buffer::kUB, 4 << 10))};
}

TEST(RoutePropertiesTest, AMaskOfAllTokensChangesNoBit) {
  for (const Device& device : MaskedDevices()) {
    for (RouteCase c : MaskedCases()) {
      SCOPED_TRACE(c.name);
      const RouteCall with = Routed(device, c, [](RouteCall& call) {
        Random random;
        call.valid.Fill(2), call.logits.FillNormal(random);
      });
      c.masked = false;
      const RouteCall without = Routed(device, c, [&](RouteCall& call) { call.logits = with.logits; });
      for (const auto member : {&RouteCall::weights, &RouteCall::ids, &RouteCall::scores, &RouteCall::counts,
                                &RouteCall::aux_loss, &RouteCall::bad, &RouteCall::d_logits})
        ExpectSameBits((with.*member).view(), (without.*member).view());
    }
  }
}

TEST(RoutePropertiesTest, AMaskChangesNoBitOfValidTokens) {
  for (const Device& device : MaskedDevices()) {
    for (RouteCase c : MaskedCases()) {
      SCOPED_TRACE(c.name);
      const RouteCall with = Routed(device, c, [](RouteCall&) {});
      c.masked = false;
      const RouteCall without = Routed(device, c, [&](RouteCall& call) {
        call.logits = with.logits;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          for (std::int64_t e = 0; e < c.experts && with.valid.at({t}) == 0; ++e)
            call.logits.set({t, e}, static_cast<double>(e % 3));
        }
      });
      std::int64_t left_out = 0;
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const bool valid = with.valid.at({t}) != 0;
        left_out += valid ? 0 : 1;
        for (std::int64_t j = 0; j < c.top_k; ++j) {
          ASSERT_EQ(with.ids.at({t, j}), valid ? without.ids.at({t, j}) : -1);
          ASSERT_EQ(with.weights.at({t, j}), valid ? without.weights.at({t, j}) : 0);
        }
        for (std::int64_t e = 0; e < c.experts; ++e) {
          ASSERT_EQ(with.scores.at({t, e}), valid ? without.scores.at({t, e}) : 0);
          ASSERT_TRUE(valid || with.d_logits.at({t, e}) == 0);
        }
        ASSERT_EQ(with.bad.at({t}), 0);
      }
      EXPECT_GT(left_out, 0);
      EXPECT_LT(left_out, c.tokens);
    }
  }
}

// Their weights would be 0 / (0 + eps), and their loss a mean of nothing.
TEST(RoutePropertiesTest, WithoutAValidTokenAllIsZero) {
  for (const Device& device : MaskedDevices()) {
    for (RouteCase c : MaskedCases()) {
      SCOPED_TRACE(c.name);
      c.options.eps = 0, c.options.renormalise = true;
      const RouteCall call = Routed(
          device, c, [](RouteCall& of) { of.valid.Fill(0), of.logits.Fill(kNaN), of.d_weights.Fill(1); });
      for (const Matrix* x :
           {&call.weights, &call.scores, &call.counts, &call.aux_loss, &call.bad, &call.d_logits})
        ExpectExactly(x->view(), std::vector<double>(static_cast<std::size_t>(x->count()), 0.0));
      ExpectExactly(call.ids.view(), std::vector<double>(static_cast<std::size_t>(call.ids.count()), -1.0));
    }
  }
}

// Bad logits of valid tokens are errors, and of these alone.
TEST(RoutePropertiesTest, BadLogitsOfTokensLeftOutAreNone) {
  RouteCall call({"bad", 6, 8, 2, {}, false, DType::kF32, true});
  call.valid.Fill(1), call.logits.Fill(0);
  for (const std::int64_t t : {1, 2, 4}) call.logits.set({t, 3}, kNaN);
  call.valid.set({1}, 0), call.valid.set({2}, 0);
  const Status status = Route(Host(), call.args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "route: logits has nan at (4, 3), the first of 1, needs values within +-3.4028235e+38");
  call.valid.set({4}, 0);
  EXPECT_TRUE(IsOk(Route(Host(), call.args())));
}

// The number of valid tokens is counted in pieces of a mask that lies anywhere.
TEST(RoutePropertiesTest, TheLossOfManyTokensOfAStridedMask) {
  constexpr std::int64_t kTokens = 9001, kExperts = 4;
  for (const Device& device : MaskedDevices()) {
    RouteCall call({"many", kTokens, kExperts, 1, {.aux_coefficient = 1}, false, DType::kF32, true});
    Matrix mask(DType::kBool, {kTokens}, {.offset = 3, .step = 5});
    Random random;
    call.logits.FillNormal(random);
    std::vector<bool> valid;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      valid.push_back(random.Integer(0, 9) != 0);
      mask.set({t}, valid.back() ? 1 : 0);
    }
    RouteArgs args = call.args();
    args.valid = mask.view();
    ASSERT_TRUE(IsOk(Route(device, args)));
    reference::RouterOptions options = ReferenceOptions(call.options);
    options.valid = valid;
    const auto expected = reference::Route(call.logits.view(), {}, 1, options);
    ExpectNear(call.aux_loss, {expected.aux_loss}, 0x1p-14, 0);
  }
}

// A model without data takes the mask's shape, and predicts what it does with data.
TEST(RoutePropertiesTest, AMaskWithoutDataIsModelled) {
  for (const RouteCase& c : MaskedCases()) {
    RouteCall call(c);
    Profile with, without, with_grad, without_grad;
    ASSERT_TRUE(IsOk(Route(NpuWithData(Ascend910B2()), call.args(), &with)));
    ASSERT_TRUE(IsOk(RouteGrad(NpuWithData(Ascend910B2()), call.grad_args(), &with_grad)));
    RouteArgs args = call.args();
    RouteGradArgs grad = call.grad_args();
    grad.valid.data = nullptr;
    for (ConstTensor* x : {&args.logits, &args.bias, &args.valid}) x->data = nullptr;
    for (Tensor* x : {&args.weights, &args.ids, &args.scores, &args.counts, &args.aux_loss, &args.bad})
      x->data = nullptr;
    ASSERT_TRUE(IsOk(Route(NpuWithoutData(Ascend910B2()), args, &without)));
    ASSERT_TRUE(IsOk(RouteGrad(NpuWithoutData(Ascend910B2()), grad, &without_grad)));
    EXPECT_NEAR(without.time_s, with.time_s, 0.01 * with.time_s);
    EXPECT_NEAR(without_grad.time_s, with_grad.time_s, 0.01 * with_grad.time_s);
  }
}

// Of a token, that is: a chip adds up the loss of all tokens in the order of its own cores.
TEST(RoutePropertiesTest, ThreadsAndChipsDoNotChangeABit) {
  const RouteOptions sampled{
      .renormalise = true, .temperature = 2, .dropout = 0.2f, .seed = 8, .aux_coefficient = 1};
  const RouteOptions grouped{
      .score = ScoreFunction::kSqrtSoftplus, .groups = 8, .top_groups = 3, .expert_dropout = 0.2f, .seed = 9};
  for (const RouteOptions& options : {sampled, grouped}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const RouteCase c{"bits", 300, 64, 6, options, /*bias=*/true, dtype, /*masked=*/dtype == DType::kBF16};
      RouteCall first(c);
      ASSERT_TRUE(IsOk(Route(Host({.threads = 1}), first.args())));
      ASSERT_TRUE(IsOk(RouteGrad(Host({.threads = 1}), first.grad_args())));
      std::vector<Device> devices = {NpuWithData(Ascend910B2()), NpuWithData(Ascend910B4())};
      for (const int threads : kThreadCounts) devices.push_back(Host({.threads = threads}));
      for (const Device& device : devices) {
        RouteCall call(c);
        ASSERT_TRUE(IsOk(Route(device, call.args())));
        ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
        for (const auto& [x, y] :
             {std::pair(&call.weights, &first.weights), std::pair(&call.ids, &first.ids),
              std::pair(&call.scores, &first.scores), std::pair(&call.counts, &first.counts),
              std::pair(&call.d_logits, &first.d_logits)})
          ExpectSameBits(x->view(), y->view());
        if (device.kind() == Device::Kind::kHost) ExpectSameBits(call.aux_loss.view(), first.aux_loss.view());
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
