// Route and its gradient against the reference, and the properties that routing must have.
#include "kernels/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/interpret.h"
#include "npu_model/trace/record.h"
#include "npu_model/tuning.h"
#include "reference/route.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

struct RouteCase {
  std::string name;
  std::int64_t tokens, experts, top_k;
  RouteOptions options = {};
  bool bias = false;
  DType dtype = DType::kF32;
  std::string Name() const { return name; }
};

constexpr ScoreFunction kScoreFunctions[] = {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid,
                                             ScoreFunction::kSqrtSoftplus};

// weight(j) = a(ids(j)) * n(j)^2 + sum of n / 4, a(e) = 1 + (e % 5) / 8: of the score, of the expert and of the others. Of
// dropped routes, which must not count, it says nonsense.
double ExpertFactor(std::int32_t id) { return 1 + id % 5 / 8.0; }
std::vector<double> OwnWeights(const std::vector<std::int32_t>& ids, const std::vector<double>& n) {
  const double sum = std::accumulate(n.begin(), n.end(), 0.0);
  std::vector<double> weights;
  for (std::size_t j = 0; j < ids.size(); ++j)
    weights.push_back(ids[j] < 0 ? 777 : ExpertFactor(ids[j]) * n[j] * n[j] + sum / 4);
  return weights;
}
std::vector<double> OwnWeightsGrad(const std::vector<std::int32_t>& ids, const std::vector<double>& n,
                                   const std::vector<double>& d) {
  const double sum = std::accumulate(d.begin(), d.end(), 0.0);
  std::vector<double> d_n;
  for (std::size_t j = 0; j < ids.size(); ++j)
    d_n.push_back(ids[j] < 0 ? 777 : 2 * ExpertFactor(ids[j]) * n[j] * d[j] + sum / 4);
  return d_n;
}
RouteWeighting OwnWeighting() {
  const auto copy = [](const std::vector<double>& from, std::span<float> to) {
    std::transform(from.begin(), from.end(), to.begin(), [](double v) { return static_cast<float>(v); });
  };
  return {
      .forward =
          [copy](auto ids, auto n, auto weights) {
            copy(OwnWeights({ids.begin(), ids.end()}, {n.begin(), n.end()}), weights);
          },
      .backward =
          [copy](auto ids, auto n, auto d, auto d_n) {
            copy(OwnWeightsGrad({ids.begin(), ids.end()}, {n.begin(), n.end()}, {d.begin(), d.end()}), d_n);
          }};
}

std::vector<RouteCase> Cases() {
  std::vector<RouteCase> cases = {
      {"deepseek_v3",
       70,
       256,
       8,
       {.score = ScoreFunction::kSigmoid,
        .renormalise = true,
        .scale = 2.5f,
        .groups = 8,
        .top_groups = 4,
        .group_top = 2},
       true},
      {"softmax_top2_of_8", 33, 8, 2, {}},
      {"max_of_groups", 40, 24, 3, {.groups = 6, .top_groups = 2, .group_top = 1}},
      {"top3_of_groups",
       40,
       35,
       4,
       {.score = ScoreFunction::kSqrtSoftplus,
        .renormalise = true,
        .groups = 5,
        .top_groups = 3,
        .group_top = 3},
       true},
      {"all_experts", 9, 37, 37, {.score = ScoreFunction::kSigmoid, .renormalise = true}},
      {"many_of_many", 5, 1031, 100, {.score = ScoreFunction::kSoftmax, .scale = 3}},
      {"sampled", 50, 64, 6, {.renormalise = true, .temperature = 0.7f, .seed = 99}},
      {"dropped",
       60,
       20,
       5,
       {.score = ScoreFunction::kSigmoid, .renormalise = true, .dropout = 0.3f, .seed = 5},
       true},
      {"load_balanced", 45, 33, 4, {.score = ScoreFunction::kSigmoid, .aux_coefficient = 0.3f}},
      {"bf16_logits",
       21,
       130,
       8,
       {.score = ScoreFunction::kSigmoid, .aux_coefficient = 2},
       true,
       DType::kBF16},
      {"experts_left_out",
       50,
       24,
       4,
       {.score = ScoreFunction::kSigmoid, .renormalise = true, .expert_dropout = 0.4f, .seed = 21}},
      {"experts_left_out_of_groups",
       50,
       32,
       6,
       {.groups = 8,
        .top_groups = 3,
        .group_top = 3,
        .expert_dropout = 0.5f,
        .seed = 4,
        .aux_coefficient = 1},
       true},
      {"own_weights",
       40,
       24,
       5,
       {.score = ScoreFunction::kSigmoid, .scale = 1.5f, .weighting = OwnWeighting()}},
      {"own_weights_renormalised",
       40,
       33,
       6,
       {.renormalise = true, .dropout = 0.3f, .seed = 11, .weighting = OwnWeighting()},
       true},
      {"one_expert", 7, 1, 1, {.renormalise = true}},
      {"no_tokens", 0, 16, 4, {.aux_coefficient = 1}}};
  for (std::int64_t experts : {2, 15, 16, 17, 31, 32, 33, 63, 65, 129}) {
    for (ScoreFunction score : kScoreFunctions) {
      cases.push_back({Join("score", static_cast<int>(score), "_of_", experts),
                       6,
                       experts,
                       std::min<std::int64_t>(experts, 7),
                       {.score = score, .renormalise = true}});
    }
  }
  return cases;
}

reference::RouterOptions PlainOptions(const RouteOptions& o) {
  return {.score = static_cast<reference::Score>(o.score),
          .renormalise = o.renormalise,
          .eps = o.eps,
          .scale = o.scale,
          .groups = o.groups,
          .top_groups = o.top_groups,
          .group_top = o.group_top,
          .temperature = o.temperature,
          .dropout = o.dropout,
          .expert_dropout = o.expert_dropout,
          .seed = o.seed,
          .repairs = o.bad_logits != BadLogits::kError,
          .mean_for_bad = o.bad_logits == BadLogits::kMean,
          .limit = o.limit,
          .aux_coefficient = o.aux_coefficient};
}

reference::RouterOptions ReferenceOptions(const RouteOptions& o) {
  reference::RouterOptions options = PlainOptions(o);
  if (o.weighting.given()) options.weighting = &OwnWeights, options.weighting_grad = &OwnWeightsGrad;
  return options;
}

struct Call {
  explicit Call(const RouteCase& c)
      : logits(c.dtype, {c.tokens, c.experts}),
        bias(DType::kF32, {c.experts}),
        weights(DType::kF32, {c.tokens, c.top_k}),
        ids(DType::kI32, {c.tokens, c.top_k}),
        scores(DType::kF32, {c.tokens, c.experts}),
        counts(DType::kI32, {c.experts}),
        aux_loss(DType::kF32, {1}),
        bad(DType::kF32, {c.tokens}),
        d_weights(DType::kF32, {c.tokens, c.top_k}),
        d_logits(c.dtype, {c.tokens, c.experts}),
        has_bias(c.bias),
        options(c.options) {
    Random random;
    logits.FillNormal(random), bias.FillNormal(random, 0, 0.1), d_weights.FillNormal(random);
  }
  RouteArgs args() {
    return {.logits = logits.view(),
            .bias = has_bias ? ConstTensor(bias.view()) : ConstTensor(),
            .options = options,
            .weights = weights.view(),
            .ids = ids.view(),
            .scores = scores.view(),
            .counts = counts.view(),
            .aux_loss = aux_loss.view(),
            .bad = bad.view()};
  }
  RouteGradArgs grad_args() {
    return {.d_weights = d_weights.view(),
            .ids = ids.view(),
            .scores = scores.view(),
            .counts = counts.view(),
            .options = options,
            .d_aux_loss = 1.5f,
            .d_logits = d_logits.view()};
  }

  Matrix logits, bias, weights, ids, scores, counts, aux_loss, bad, d_weights, d_logits;
  bool has_bias;
  RouteOptions options;
};

// Values within `relative` of their own size and `absolute`, and a rounding of the dtype.
void ExpectNear(const Matrix& actual, const std::vector<double>& expected, double relative, double absolute) {
  std::vector<double> bounds;
  for (double v : expected)
    bounds.push_back((relative + (actual.dtype() == DType::kF32 ? 0 : UnitRoundoff(actual.dtype()))) *
                         std::abs(v) +
                     absolute);
  ExpectClose(actual.view(), expected, bounds);
  ExpectGuards(actual);
}

void ExpectRoutes(const Device& device, const RouteCase& c) {
  SCOPED_TRACE(c.name);
  Call call(c);
  ASSERT_TRUE(IsOk(Route(device, call.args())));
  const reference::RouterOptions options = ReferenceOptions(c.options);
  const auto expected = reference::Route(call.logits.view(), call.args().bias, c.top_k, options);
  // Scores err by some units in the last place, more after noise is divided by a temperature; the reference decides alike
  // as long as its decisions were by more than that.
  const double error = 0x1p-20 * (c.options.temperature > 0 ? 8 / c.options.temperature : 2);
  ASSERT_GT(expected.smallest_gap, 0) << "a tie of the reference: another seed is needed";
  ExpectNear(call.scores, expected.scores, error, 1e-30);
  if (expected.smallest_gap > 4 * error) {
    ExpectExactly(call.ids.view(), std::vector<double>(expected.ids.begin(), expected.ids.end()));
    ExpectExactly(call.counts.view(), std::vector<double>(expected.counts.begin(), expected.counts.end()));
    ExpectNear(call.weights, expected.weights, 4 * error, 1e-30);
    ExpectNear(call.aux_loss, {expected.aux_loss}, 4 * error, 1e-30);
  }
  ExpectExactly(call.bad.view(), expected.bad);

  // The gradient of what the kernel itself chose.
  reference::RouterResult forward;
  forward.scores = call.scores.ToDoubles();
  for (double id : call.ids.ToDoubles()) forward.ids.push_back(static_cast<std::int32_t>(id));
  for (double count : call.counts.ToDoubles()) forward.counts.push_back(static_cast<std::int64_t>(count));
  ASSERT_TRUE(IsOk(RouteGrad(device, call.grad_args())));
  const auto d_logits = reference::RouteGrad(call.d_weights.ToDoubles(), forward, c.tokens, c.experts,
                                             c.top_k, c.options.aux_coefficient == 0 ? 0 : 1.5, options);
  double largest = 0;
  for (double v : d_logits) largest = std::max(largest, std::abs(v));
  // A renormalised weight passes on the difference of its gradient to the mean; one that is alone in its row passes on
  // nothing, and what is left of the difference is the rounding of its terms.
  if (c.options.renormalise) {
    double most_weight = 0, most_gradient = 0;
    for (double v : call.weights.ToDoubles()) most_weight = std::max(most_weight, std::abs(v));
    for (double v : call.d_weights.ToDoubles()) most_gradient = std::max(most_gradient, std::abs(v));
    largest = std::max(largest, most_weight * most_gradient);
  }
  ExpectNear(call.d_logits, d_logits, 0x1p-18, 0x1p-19 * largest * static_cast<double>(c.top_k));
}

class RouteTest : public ::testing::TestWithParam<RouteCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, RouteTest, ::testing::ValuesIn(Cases()), ShapeName());

TEST_P(RouteTest, OnTheHost) { ExpectRoutes(Host(), GetParam()); }
TEST_P(RouteTest, OnTheModel) { ExpectRoutes(NpuWithData(Ascend910B2()), GetParam()); }

class RouteSimdTest : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Simd, RouteSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);
TEST_P(RouteSimdTest, EveryCase) {
  const ScopedSimdTarget target(GetParam());
  for (const RouteCase& c : Cases()) ExpectRoutes(Host(), c);
}

// Equal scores: the lower expert first, group by group as well.
TEST(RoutePropertiesTest, TiesGoToTheLowerExpert) {
  for (std::int64_t top_k : {1, 5, 16, 17, 40}) {
    Call call({"ties", 3, 40, top_k, {}});
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
  Call call({"groups", 500, 256, 8, options});
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

// Gumbel's maximum: expert e is drawn with probability softmax(logits / 1)(e). Chi-square with 15 degrees of freedom: beyond
// 37.7 once in a thousand.
TEST(RoutePropertiesTest, SampledFrequenciesFollowTheSoftmax) {
  constexpr std::int64_t kTokens = 20000, kExperts = 16;
  Call call({"gumbel", kTokens, kExperts, 1, {.temperature = 1, .seed = 12}});
  double total = 0;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    total += std::exp(0.1 * static_cast<double>(e));
    for (std::int64_t t = 0; t < kTokens; ++t) call.logits.set({t, e}, 0.1 * static_cast<double>(e));
  }
  ASSERT_TRUE(IsOk(Route(Host(), call.args())));
  double chi_square = 0;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const double expected = kTokens * std::exp(0.1 * static_cast<double>(e)) / total;
    chi_square += std::pow(call.counts.at({e}) - expected, 2) / expected;
  }
  EXPECT_LT(chi_square, 37.7);
  EXPECT_GT(chi_square, 3.5);  // Nor too even: below this once in a thousand.
}

TEST(RoutePropertiesTest, RoutesAreDroppedAtTheirRate) {
  constexpr std::int64_t kTokens = 5000, kTopK = 4;
  for (float rate : {0.1f, 0.5f}) {
    Call call({"drop", kTokens, 32, kTopK, {.dropout = rate, .seed = 3}});
    ASSERT_TRUE(IsOk(Route(Host(), call.args())));
    double dropped = 0;
    for (double id : call.ids.ToDoubles()) dropped += id < 0 ? 1 : 0;
    const double routes = static_cast<double>(kTokens * kTopK);
    EXPECT_NEAR(dropped, rate * routes, 4 * std::sqrt(routes * rate * (1 - rate)));
  }
}

TEST(RoutePropertiesTest, ExpertsAreLeftOutAtTheirRateAndForEveryToken) {
  constexpr std::int64_t kTokens = 40, kExperts = 512, kTopK = 6;
  for (float rate : {0.1f, 0.5f}) {
    double left_out = 0;
    constexpr int kSeeds = 16;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Call call({"left_out", kTokens, kExperts, kTopK, {.expert_dropout = rate, .seed = seed}});
      std::vector<bool> out;
      for (std::uint64_t e = 0; e < kExperts; ++e)
        out.push_back(reference::UniformNumber(seed, 2, e) <= rate);
      ASSERT_TRUE(IsOk(Route(Host(), call.args())));
      for (std::int64_t t = 0; t < kTokens; ++t) {
        std::set<double> ids;
        for (std::int64_t j = 0; j < kTopK; ++j) {
          ids.insert(call.ids.at({t, j}));
          EXPECT_FALSE(out[static_cast<std::size_t>(call.ids.at({t, j}))]);
        }
        EXPECT_EQ(ids.size(), static_cast<std::size_t>(kTopK));
      }
      left_out += static_cast<double>(std::count(out.begin(), out.end(), true));
    }
    EXPECT_NEAR(left_out, rate * kSeeds * kExperts, 4 * std::sqrt(kSeeds * kExperts * rate * (1 - rate)));
  }
}

TEST(RoutePropertiesTest, RoutesWithoutAnExpertAreMinusOne) {
  constexpr std::int64_t kTokens = 9, kExperts = 12;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Call call({"all", kTokens, kExperts, kExperts, {.expert_dropout = 0.5f, .seed = 2}});
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

TEST(RoutePropertiesTest, BadOptionsAreNamed) {
  const auto says = [](const RouteOptions& options, const std::string& what) {
    Call call({"options", 3, 8, 2, options});
    const Status status = Route(Host(), call.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(call.weights.at({0, 0})));
  };
  says({.expert_dropout = 0.6f}, "route: expert_dropout is 0.6");
  says({.dropout = -1}, "route: dropout is -1");
  says({.weighting = {.backward = OwnWeighting().backward}}, "route: weighting has no forward function");
  RouteOptions forward_only;
  forward_only.weighting.forward = OwnWeighting().forward;
  Call call({"options", 3, 8, 2, forward_only});
  ASSERT_TRUE(IsOk(Route(Host(), call.args())));
  const Status status = RouteGrad(Host(), call.grad_args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "route_grad: weighting has no backward function");
}

// Shape and options drawn at random.
RouteCase RandomCase(std::uint64_t seed) {
  Random random(RunSeed() + seed);
  RouteCase c;
  c.name = Join("seed_", seed);
  RouteOptions& o = c.options;
  o.score = kScoreFunctions[random.Integer(0, 2)];
  o.renormalise = random.Integer(0, 1) == 1;
  o.groups = random.Integer(0, 1) == 1 ? random.Integer(2, 9) : 1;
  const std::int64_t width = random.Integer(1, o.groups > 1 ? 40 : 300);
  o.top_groups = random.Integer(1, o.groups),
  o.group_top = random.Integer(1, std::min<std::int64_t>(width, 4));
  c.experts = width * o.groups, c.tokens = random.Integer(1, 40), c.bias = random.Integer(0, 1) == 1;
  c.top_k = random.Integer(1, std::min<std::int64_t>(width * o.top_groups, 20));
  o.dropout = random.Integer(0, 3) == 0 ? 0.25f : 0;
  o.expert_dropout = random.Integer(0, 3) == 0 ? 0.3f : 0;
  o.seed = seed;
  return c;
}

TEST(RoutePropertiesTest, RandomCallsAgreeWithTheReference) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) ExpectRoutes(Host(), RandomCase(seed));
}

TEST(RoutePropertiesTest, BadLogitsAreFoundCountedAndReplaced) {
  const RouteCase c{"bad", 6, 40, 3, {.score = ScoreFunction::kSigmoid, .limit = 100}};
  const auto spoil = [](Call& call) {
    call.logits.set({1, 3}, kNaN), call.logits.set({1, 9}, kInfinity), call.logits.set({4, 39}, -101);
    for (std::int64_t e = 0; e < 40; ++e) call.logits.set({5, e}, kNaN);
  };
  {
    Call call(c);
    spoil(call);
    const Status status = Route(Host(), call.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("route: logits has nan at (1, 3)"), std::string::npos)
        << status.message();
    EXPECT_TRUE(std::isnan(call.weights.at({0, 0})));  // Nothing was written.
  }
  for (BadLogits policy : {BadLogits::kZero, BadLogits::kMean}) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      Call call(c);
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
      Call call({"low", 4, 40, 5, {.score = score, .renormalise = true}});
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
  Call call({"low", 2, 72, 72, {.score = ScoreFunction::kSqrtSoftplus}});
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
    Call call({"slopes", 1, 40, 40, {.score = ScoreFunction::kSqrtSoftplus}});
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
        Call call({"heights",
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
    Call call({"eps", 1, 8, 8, {.score = ScoreFunction::kSqrtSoftplus, .renormalise = true}});
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
      Call call({"none", 2, 4, 2, {.score = score, .aux_coefficient = 1000}});
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

// ---- Experts in parts: chips whose UB holds no whole row

// A chip with so much UB that computes, and the widths of the tiles that Route and RouteGrad last chose.
struct SmallChip {
  explicit SmallChip(std::int64_t bytes) {
    tuning->on_choice = [this](const TilingChoice& met) {
      const std::string field = ",cols=";
      cols[met.kernel] = std::stoll(met.chosen.substr(met.chosen.find(field) + field.size()));
    };
    device = Npu(WithCapacity(Buffer::kUB, bytes), {.with_data = true, .tuning = tuning});
  }
  bool Cuts(const char* kernel, std::int64_t experts) const { return cols.at(kernel) < experts; }

  std::shared_ptr<Tuning> tuning = std::make_shared<Tuning>();
  std::map<std::string, std::int64_t> cols;
  Device device;
};

struct Cuts {
  int forward = 0, backward = 0;
};

// The call on chips with ever less UB, until it fits no more; how often its experts were cut, in another way each time.
Cuts ExpectRoutesInParts(const RouteCase& c) {
  Cuts cuts;
  std::map<std::string, std::int64_t> before;
  for (std::int64_t bytes = 96 << 10; bytes >= 256; bytes = bytes * 2 / 3 / 32 * 32) {
    SmallChip chip(bytes);
    Call call(c);
    const Status status = Route(chip.device, call.args());
    if (!status.ok()) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.message();
      EXPECT_NE(status.message().find(Join("small chip has ", bytes)), std::string::npos) << status.message();
      EXPECT_TRUE(std::isnan(call.aux_loss.at({0})));
      break;
    }
    if (!chip.Cuts("route", c.experts)) continue;
    EXPECT_TRUE(IsOk(RouteGrad(chip.device, call.grad_args())));
    if (chip.cols == before) continue;
    before = chip.cols;
    SCOPED_TRACE(Join("parts of ", chip.cols["route"], " and ", chip.cols["route_grad"]));
    ExpectRoutes(chip.device, c);
    ++cuts.forward;
    cuts.backward += chip.Cuts("route_grad", c.experts) ? 1 : 0;
  }
  return cuts;
}

class RouteInPartsTest : public ::testing::TestWithParam<RouteCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, RouteInPartsTest, ::testing::ValuesIn(Cases()), ShapeName());

TEST_P(RouteInPartsTest, AgreesWithTheReference) {
  const RouteCase& c = GetParam();
  const Cuts cuts = ExpectRoutesInParts(c);
  EXPECT_TRUE(cuts.forward > 0 || c.experts < 60) << c.experts;
  EXPECT_LE(cuts.backward, cuts.forward);
}

TEST(RoutePartsTest, RandomCallsAgreeWithTheReference) {
  Cuts all;
  for (std::uint64_t seed = 101; seed <= 140; ++seed) {
    const Cuts cuts = ExpectRoutesInParts(RandomCase(seed));
    all.forward += cuts.forward, all.backward += cuts.backward;
  }
  EXPECT_GT(all.forward, 40);
  EXPECT_GT(all.backward, 20);
}

// Logits of four values, so that almost every choice is one among equals, within parts and across them, and of groups.
TEST(RoutePartsTest, TiesAreTheHosts) {
  for (const RouteOptions& options :
       {RouteOptions{.score = ScoreFunction::kSigmoid},
        RouteOptions{.score = ScoreFunction::kSigmoid, .groups = 12, .top_groups = 5, .group_top = 2},
        RouteOptions{.score = ScoreFunction::kSigmoid, .groups = 2, .top_groups = 1, .group_top = 7},
        RouteOptions{
            .score = ScoreFunction::kSigmoid, .groups = 3, .top_groups = 2, .expert_dropout = 0.5f}}) {
    for (const std::int64_t top_k : {1, 7, 40}) {
      for (const bool biased : {false, true}) {
        const RouteCase c{"ties", 9, 120, top_k, options, biased};
        Call host(c);
        Random random(RunSeed() + 7);
        for (std::int64_t i = 0; i < 9 * 120; ++i)
          host.logits.set({i / 120, i % 120}, static_cast<double>(random.Integer(0, 3)) / 4);
        host.bias.Fill(0.5);
        ASSERT_TRUE(IsOk(Route(Host(), host.args())));
        int cut = 0;
        for (std::int64_t bytes = 12 << 10; bytes >= 1 << 10; bytes = bytes * 3 / 4 / 32 * 32) {
          SmallChip chip(bytes);
          Call call(c);
          call.logits = host.logits, call.bias = host.bias;
          if (!Route(chip.device, call.args()).ok()) break;
          SCOPED_TRACE(Join("top ", top_k, " of ", options.groups, " groups, parts of ", chip.cols["route"]));
          cut += chip.Cuts("route", 120) ? 1 : 0;
          ExpectSameBits(call.ids.view(), host.ids.view());
          ExpectSameBits(call.scores.view(), host.scores.view());
          ExpectSameBits(call.counts.view(), host.counts.view());
        }
        EXPECT_GT(cut, 0);
      }
    }
  }
}

TEST(RoutePartsTest, BadLogitsAreFoundCountedAndReplaced) {
  for (const BadLogits policy : {BadLogits::kZero, BadLogits::kMean}) {
    for (const ScoreFunction score : kScoreFunctions) {
      const RouteCase c{"bad", 6, 300, 3, {.score = score, .bad_logits = policy, .limit = 100}};
      SmallChip chip(4 << 10);
      Call call(c);
      call.logits.set({1, 3}, kNaN), call.logits.set({1, 9}, kInfinity), call.logits.set({4, 299}, -101);
      for (std::int64_t e = 0; e < 300; ++e) call.logits.set({5, e}, kNaN);
      ASSERT_TRUE(IsOk(Route(chip.device, call.args())));
      ASSERT_TRUE(chip.Cuts("route", 300));
      const auto expected = reference::Route(call.logits.view(), {}, 3, ReferenceOptions(call.options));
      ExpectExactly(call.bad.view(), expected.bad);
      EXPECT_EQ(expected.bad, (std::vector<double>{0, 2, 0, 0, 1, 300}));
      ExpectNear(call.scores, expected.scores, 0x1p-19, 1e-30);
    }
  }
}

// Without outputs that only some callers want, scores pass through a workspace.
TEST(RoutePartsTest, OutputsMayBeLeftOut) {
  const RouteCase c{"few outputs", 30, 300, 4, {.score = ScoreFunction::kSigmoid}, true};
  Call host(c), call(c);
  SmallChip chip(4 << 10);
  ASSERT_TRUE(IsOk(Route(Host(), host.args())));
  RouteArgs args = call.args();
  args.scores = {}, args.counts = {}, args.aux_loss = {}, args.bad = {};
  ASSERT_TRUE(IsOk(Route(chip.device, args)));
  ASSERT_TRUE(chip.Cuts("route", 300));
  ExpectSameBits(call.ids.view(), host.ids.view());
  ExpectSameBits(call.weights.view(), host.weights.view());
}

TEST(RoutePartsTest, ManyExperts) {
  const RouteOptions options = {.score = ScoreFunction::kSigmoid, .renormalise = true, .aux_coefficient = 1};
  for (const std::int64_t experts : {8100, 8176, 8177, 20000}) {
    const RouteCase c{Join(experts, "_experts"), 3, experts, 4, options, true};
    ExpectRoutes(NpuWithData(Ascend910B2()), c);
    ExpectRoutes(Host(), c);
  }
  const std::int64_t million = std::int64_t{1} << 20;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    ExpectRoutes(device, {"a_million_experts", 2, million, 5, options});
    ExpectRoutes(device, {"a_million_in_groups",
                          1,
                          million,
                          300,
                          {.score = ScoreFunction::kSqrtSoftplus, .groups = 1024, .top_groups = 3}});
    ExpectRoutes(device, {"many_by_softmax", 2, 30000, 20, {.groups = 4, .top_groups = 2}});
  }
}

// What does not fit is refused before anything is written.
TEST(RoutePartsTest, TooManyRoutesForAChip) {
  Call call({"too_many", 2, 20000, 15000, {.aux_coefficient = 1}});
  const Status status = Route(NpuWithData(Ascend910B2()), call.args());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(
      status.message(),
      "route: K is 15000, needs at most 4095 where 20000 experts do not fit UB, of which ascend910b2 has "
      "196608 bytes");
  for (const Matrix* x : {&call.weights, &call.scores, &call.aux_loss, &call.bad})
    EXPECT_TRUE(std::isnan(x->ToDoubles()[0]));
}

TEST(RoutePropertiesTest, ThreadsAndChipsDoNotChangeABit) {
  const RouteCase c{
      "bits",
      300,
      64,
      6,
      {.renormalise = true, .temperature = 2, .dropout = 0.2f, .seed = 8, .aux_coefficient = 1}};
  Call first(c);
  ASSERT_TRUE(IsOk(Route(Host({.threads = 1}), first.args())));
  for (int threads : kThreadCounts) {
    Call call(c);
    ASSERT_TRUE(IsOk(Route(Host({.threads = threads}), call.args())));
    ExpectSameBits(call.weights.view(), first.weights.view());
    ExpectSameBits(call.ids.view(), first.ids.view());
    ExpectSameBits(call.aux_loss.view(), first.aux_loss.view());
  }
}

}  // namespace
}  // namespace cubist::testing
