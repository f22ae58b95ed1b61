// Calls of Route and RouteGrad between guards, and what is expected of them.
#ifndef CUBIST_TESTS_KERNELS_ROUTE_CALL_H_
#define CUBIST_TESTS_KERNELS_ROUTE_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
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
  bool masked = false;  // Some tokens are not valid; their logits are no numbers.
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
      {"padded", 45, 33, 4, {.aux_coefficient = 0.3f}, false, DType::kF32, true},
      {"padded_in_groups",
       70,
       64,
       6,
       {.score = ScoreFunction::kSigmoid,
        .renormalise = true,
        .scale = 2.5f,
        .groups = 8,
        .top_groups = 4,
        .aux_coefficient = 2},
       true,
       DType::kBF16,
       true},
      {"padded_and_dropped",
       50,
       24,
       4,
       {.score = ScoreFunction::kSqrtSoftplus,
        .renormalise = true,
        .temperature = 0.7f,
        .dropout = 0.3f,
        .expert_dropout = 0.3f,
        .seed = 7,
        .aux_coefficient = 1,
        .weighting = OwnWeighting()},
       true,
       DType::kF32,
       true},
      {"padded_no_tokens", 0, 16, 4, {.aux_coefficient = 1}, false, DType::kF32, true},
      {"padded_means",
       30,
       40,
       5,
       {.renormalise = true, .bad_logits = BadLogits::kMean, .limit = 1.5f, .aux_coefficient = 1},
       false,
       DType::kF16,
       true},
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
        valid(DType::kBool, {c.tokens}),
        has_bias(c.bias),
        masked(c.masked),
        options(c.options) {
    Random random;
    logits.FillNormal(random), bias.FillNormal(random, 0, 0.1), d_weights.FillNormal(random);
    valid.Fill(1);
    for (std::int64_t t = 0; t < c.tokens && masked; ++t) {
      constexpr double kFlags[] = {0, 1, 0, 2, 255};
      valid.set({t}, kFlags[random.Integer(0, 4)]);
      for (std::int64_t e = 0; e < c.experts && valid.at({t}) == 0; ++e)
        logits.set({t, e}, std::array{kNaN, kInfinity, -kInfinity, 3e38}[static_cast<std::size_t>(e % 4)]);
    }
  }
  // As the reference takes it.
  std::vector<bool> Valid() const {
    std::vector<bool> flags;
    for (std::int64_t t = 0; t < valid.size(0) && masked; ++t) flags.push_back(valid.at({t}) != 0);
    return flags;
  }
  RouteArgs args() {
    return {.logits = logits.view(),
            .bias = has_bias ? ConstTensor(bias.view()) : ConstTensor(),
            .valid = masked ? ConstTensor(valid.view()) : ConstTensor(),
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
            .valid = masked ? ConstTensor(valid.view()) : ConstTensor(),
            .options = options,
            .d_aux_loss = 1.5f,
            .d_logits = d_logits.view()};
  }

  Matrix logits, bias, weights, ids, scores, counts, aux_loss, bad, d_weights, d_logits, valid;
  bool has_bias, masked;
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

// The routes of a token by their definition, before any are dropped: -1 where no expert is left. `clear` says that no sums
// of two groups' scores are so near each other that their rounding decides.
struct Choice {
  std::vector<std::int32_t> ids;
  bool clear = true;
};

// From the scores of all experts. In fp32 the sum with a bias rounds, as the kernel's does, which leaves nothing open.
inline Choice ChoiceOf(std::span<const double> scores, const RouteCall& call, bool in_fp32) {
  const RouteOptions& o = call.options;
  std::vector<double> by(scores.begin(), scores.end());
  for (std::size_t e = 0; e < by.size(); ++e) {
    if (call.has_bias) by[e] += call.bias.at({static_cast<std::int64_t>(e)});
    if (in_fp32) by[e] = static_cast<float>(by[e]);
    if (o.expert_dropout > 0 && reference::UniformNumber(o.seed, 2, e) <= o.expert_dropout)
      by[e] = -kInfinity;
  }
  // The `count` highest, descending, of equals the lower first.
  const auto highest = [](const std::vector<double>& values, std::int64_t count) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](std::size_t a, std::size_t b) {
      return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    order.resize(static_cast<std::size_t>(count));
    return order;
  };
  Choice choice;
  if (o.groups > 1 && o.top_groups < o.groups) {
    const auto width = static_cast<std::ptrdiff_t>(by.size()) / o.groups;
    std::vector<double> worths;
    double most = 0;
    for (auto first = by.begin(); first != by.end(); first += width) {
      std::vector<double> top(static_cast<std::size_t>(o.group_top));
      std::partial_sort_copy(first, first + width, top.begin(), top.end(), std::greater<>());
      double worth = top[0], size = std::abs(top[0]);
      for (std::size_t j = 1; j < top.size() && std::isfinite(top[j]); ++j)
        worth += top[j], size += std::abs(top[j]);
      worths.push_back(worth);
      if (std::isfinite(size)) most = std::max(most, size);
    }
    const std::vector<std::size_t> order = highest(worths, o.top_groups + 1);
    const double gap = worths[order.end()[-2]] - worths[order.back()];
    choice.clear = !(gap < 0x1p-23 * static_cast<double>(o.group_top - 1) * most);
    for (std::size_t g = 0; g < worths.size(); ++g) {
      if (std::find(order.begin(), order.end() - 1, g) != order.end() - 1) continue;
      std::fill_n(by.begin() + static_cast<std::ptrdiff_t>(g) * width, width, -kInfinity);
    }
  }
  for (const std::size_t e : highest(by, call.ids.size(1)))
    choice.ids.push_back(std::isfinite(by[e]) ? static_cast<std::int32_t>(e) : -1);
  return choice;
}

// Routes that could be others than they are, were groups chosen otherwise: of distinct experts that are not left out, of
// few enough groups.
inline void ExpectAllowed(const std::vector<std::int32_t>& ids, const RouteCall& call) {
  const RouteOptions& o = call.options;
  const std::int64_t experts = call.logits.size(1);
  std::set<std::int32_t> distinct, groups;
  for (const std::int32_t id : ids) {
    ASSERT_TRUE(id >= -1 && id < experts) << id;
    if (id < 0) continue;
    EXPECT_TRUE(distinct.insert(id).second) << id << " is there twice";
    EXPECT_FALSE(o.expert_dropout > 0 &&
                 reference::UniformNumber(o.seed, 2, static_cast<std::uint64_t>(id)) <= o.expert_dropout);
    groups.insert(static_cast<std::int32_t>(id / (experts / o.groups)));
  }
  EXPECT_LE(static_cast<std::int64_t>(groups.size()), o.top_groups);
}

// Ids are the choice by the scores that the call gave, which is one without tolerance; weights are made of these scores,
// and counts and loss of these ids. Of `expected` come the ids only, which test the choice.
inline void ExpectChosen(const RouteCall& call, const reference::RouterResult& expected,
                         const reference::RouterOptions& o) {
  constexpr double kUnit = 0x1p-24;
  const std::int64_t tokens = call.ids.size(0), top_k = call.ids.size(1), experts = call.logits.size(1);
  const std::vector<double> scores = call.scores.ToDoubles(), given = call.ids.ToDoubles();
  std::vector<double> ids, weights, counts(static_cast<std::size_t>(experts)), shares = counts;
  std::int64_t unclear = 0;
  double count = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!o.valid.empty() && !o.valid[static_cast<std::size_t>(t)]) {
      ids.insert(ids.end(), static_cast<std::size_t>(top_k), -1);
      weights.insert(weights.end(), static_cast<std::size_t>(top_k), 0);
      continue;
    }
    ++count;
    const auto row = std::span(scores).subspan(static_cast<std::size_t>(t * experts), counts.size());
    const auto drop = [&](std::vector<std::int32_t> of_token) {
      for (std::int64_t j = 0; j < top_k; ++j) {
        if (o.dropout > 0 &&
            reference::UniformNumber(o.seed, 1, static_cast<std::uint64_t>(t * top_k + j)) < o.dropout)
          of_token[static_cast<std::size_t>(j)] = -1;
      }
      return of_token;
    };
    const auto first = t * top_k;
    ASSERT_EQ(
        drop(
            ChoiceOf(std::span(expected.scores).subspan(static_cast<std::size_t>(t * experts), counts.size()),
                     call, /*in_fp32=*/false)
                .ids),
        std::vector<std::int32_t>(expected.ids.begin() + first, expected.ids.begin() + first + top_k));

    Choice choice = ChoiceOf(row, call, /*in_fp32=*/true);
    const std::vector<std::int32_t> taken(given.begin() + first, given.begin() + first + top_k);
    if (!choice.clear) {
      ++unclear;
      ExpectAllowed(taken, call);
      choice.ids = taken;
    }
    choice.ids = drop(choice.ids);
    ids.insert(ids.end(), choice.ids.begin(), choice.ids.end());

    std::vector<double> w;
    for (const std::int32_t id : choice.ids) {
      w.push_back(id < 0 ? 0 : row[static_cast<std::size_t>(id)]);
      if (id >= 0) ++counts[static_cast<std::size_t>(id)];
    }
    if (o.weighting) w = o.weighting(choice.ids, w);
    double total = o.eps;
    for (std::size_t j = 0; j < w.size(); ++j) total += w[j] = choice.ids[j] < 0 ? 0 : w[j];
    for (const double v : w) weights.push_back(v * o.scale / (o.renormalise ? total : 1));
    const double sum = std::max(std::accumulate(row.begin(), row.end(), 0.0), 0x1p-126);
    for (std::size_t e = 0; e < row.size(); ++e) shares[e] += row[e] / sum;
  }
  EXPECT_LE(20 * unclear, tokens) << "tokens whose groups were not compared";
  ExpectExactly(call.ids.view(), ids);
  ExpectExactly(call.counts.view(), counts);
  // The sum of K and eps, the quotient, the product, and a weighting's own rounding, of numbers above 0.
  ExpectNear(call.weights, weights, static_cast<double>(top_k + 6) * kUnit, 1e-30);
  double loss = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) loss += counts[e] * shares[e];
  loss *= count == 0 ? 0
                     : o.aux_coefficient * static_cast<double>(experts) /
                           (static_cast<double>(top_k) * count * count);
  // Sums over the experts, twice, and over the tokens: their roundings are as often up as down.
  const double roundings = 4 * std::sqrt(2 * static_cast<double>(experts) + count) + 16;
  ExpectNear(call.aux_loss, {loss}, roundings * kUnit, 1e-30);
}

inline void ExpectRoutes(const Device& device, const RouteCase& c) {
  SCOPED_TRACE(c.name);
  RouteCall call(c);
  ASSERT_TRUE(IsOk(Route(device, call.args())));
  reference::RouterOptions options = ReferenceOptions(c.options);
  options.valid = call.Valid();
  const auto expected = reference::Route(call.logits.view(), call.args().bias, c.top_k, options);
  // Some units in the last place, more after noise is divided by a temperature.
  const double error = 0x1p-20 * (c.options.temperature > 0 ? 8 / c.options.temperature : 2);
  ExpectNear(call.scores, expected.scores, error, 1e-30);
  ExpectChosen(call, expected, options);
  ExpectExactly(call.bad.view(), expected.bad);
  for (const Matrix* x : {&call.logits, &call.bias, &call.ids, &call.counts, &call.bad, &call.valid})
    ExpectGuards(*x);

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
  o.scale = random.Integer(0, 1) == 1 ? 2.5f : 1;
  o.aux_coefficient = random.Integer(0, 1) == 1 ? 0.5f : 0;
  o.temperature = random.Integer(0, 3) == 0 ? 1.5f : 0;
  if (random.Integer(0, 3) == 0) o.weighting = OwnWeighting();
  c.dtype = kFloatTypes[random.Integer(0, 2)];
  c.masked = random.Integer(0, 2) == 0;
  return c;
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ROUTE_CALL_H_
