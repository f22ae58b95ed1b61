// Calls of Route and RouteGrad between guards, and what is expected of them.
#ifndef CUBIST_TESTS_KERNELS_ROUTE_CALL_H_
#define CUBIST_TESTS_KERNELS_ROUTE_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "kernels/route.h"
#include "reference/route.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

struct RouteCase {
  std::string name;
  std::int64_t tokens, experts, top_k;
  RouteOptions options = {};
  bool bias = false;
  DType dtype = DType::kF32;
  std::string Name() const { return name; }
};

inline constexpr ScoreFunction kScoreFunctions[] = {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid,
                                                    ScoreFunction::kSqrtSoftplus};

// weight(j) = a(ids(j)) * n(j)^2 + sum of n / 4, a(e) = 1 + (e % 5) / 8: of the score, of the expert and of the others. Of
// dropped routes, which must not count, it says nonsense.
inline double ExpertFactor(std::int32_t id) { return 1 + id % 5 / 8.0; }
inline std::vector<double> OwnWeights(const std::vector<std::int32_t>& ids, const std::vector<double>& n) {
  const double sum = std::accumulate(n.begin(), n.end(), 0.0);
  std::vector<double> weights;
  for (std::size_t j = 0; j < ids.size(); ++j)
    weights.push_back(ids[j] < 0 ? 777 : ExpertFactor(ids[j]) * n[j] * n[j] + sum / 4);
  return weights;
}
inline std::vector<double> OwnWeightsGrad(const std::vector<std::int32_t>& ids, const std::vector<double>& n,
                                          const std::vector<double>& d) {
  const double sum = std::accumulate(d.begin(), d.end(), 0.0);
  std::vector<double> d_n;
  for (std::size_t j = 0; j < ids.size(); ++j)
    d_n.push_back(ids[j] < 0 ? 777 : 2 * ExpertFactor(ids[j]) * n[j] * d[j] + sum / 4);
  return d_n;
}
inline RouteWeighting OwnWeighting() {
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

inline std::vector<RouteCase> RouteCases() {
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

inline reference::RouterOptions PlainOptions(const RouteOptions& o) {
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

inline reference::RouterOptions ReferenceOptions(const RouteOptions& o) {
  reference::RouterOptions options = PlainOptions(o);
  if (o.weighting.given()) options.weighting = &OwnWeights, options.weighting_grad = &OwnWeightsGrad;
  return options;
}

struct RouteCall {
  explicit RouteCall(const RouteCase& c)
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
inline void ExpectNear(const Matrix& actual, const std::vector<double>& expected, double relative,
                       double absolute) {
  std::vector<double> bounds;
  for (double v : expected)
    bounds.push_back((relative + (actual.dtype() == DType::kF32 ? 0 : UnitRoundoff(actual.dtype()))) *
                         std::abs(v) +
                     absolute);
  ExpectClose(actual.view(), expected, bounds);
  ExpectGuards(actual);
}

inline void ExpectRoutes(const Device& device, const RouteCase& c) {
  SCOPED_TRACE(c.name);
  RouteCall call(c);
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

// Shape and options drawn at random.
inline RouteCase RandomRouteCase(std::uint64_t seed) {
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

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ROUTE_CALL_H_
