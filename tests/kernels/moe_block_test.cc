// MoeBlock against a plain evaluation in double that follows the routes taken, and its gradients against finite differences
// of that evaluation.
#include "kernels/moe_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "reference/route.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/block_test.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/route_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

constexpr std::int64_t kTokens = 11, kHidden = 20, kExperts = 8, kTopK = 3, kWidth = 10, kShared = 6;

struct BlockCase {
  std::string name;
  bool shared = true, post_norm = false;
  RouteOptions route = {};
  bool weighs_activation = false;
  std::int64_t tokens = kTokens, top_k = kTopK;
  bool one_expert = false;  // Selected by all tokens, whatever the scores.
  bool masked = false;      // Some tokens are not valid.
  std::string Name() const { return name; }
};

std::vector<BlockCase> Cases() {
  const RouteOptions plain = {.score = ScoreFunction::kSigmoid, .renormalise = true, .scale = 2.5f};
  RouteOptions sigmoid = plain, dropped = plain, nowhere = plain, few = plain, sampled, zeros = plain, means;
  sigmoid.groups = 4, sigmoid.top_groups = 2;
  dropped.dropout = 0.3f, dropped.seed = 8;
  nowhere.dropout = 1;
  few.expert_dropout = 0.5f, few.seed = 4;
  sampled.temperature = 0.7f, sampled.seed = 3, sampled.aux_coefficient = 0.5f;
  zeros.bad_logits = BadLogits::kZero, zeros.limit = 1.5f;
  means.bad_logits = BadLogits::kMean, means.limit = 1.5f;
  return {{"softmax_without_shared", false, false, {.aux_coefficient = 0.5f}},
          {"deepseek", true, false, sigmoid},
          {"pangu_sandwich", true, true, plain},
          {"sandwich_without_shared", false, true, {}},
          {"weights_before_down", true, false, sigmoid, true},
          {"dropped", true, false, dropped},
          {"dropped_weights_before_down", false, true, dropped, true},
          {"all_dropped", true, false, nowhere},
          {"all_dropped_weights_before_down", false, false, nowhere, true},
          {"experts_left_out", true, false, few, false, kTokens, 6},
          {"sampled", false, false, sampled},
          {"bad_logits_are_0", true, false, zeros},
          {"bad_logits_are_means", false, false, means, true},
          {.name = "no_tokens", .route = {.aux_coefficient = 1}, .tokens = 0},
          {.name = "one_token", .post_norm = true, .route = sigmoid, .tokens = 1},
          {.name = "one_route", .route = sigmoid, .top_k = 1},
          {.name = "all_experts", .shared = false, .route = {.aux_coefficient = 0.5f}, .top_k = kExperts},
          {.name = "one_expert", .route = plain, .top_k = 1, .one_expert = true},
          {.name = "one_expert_weights_before_down",
           .route = {},
           .weighs_activation = true,
           .top_k = 1,
           .one_expert = true},
          {.name = "padded", .route = sigmoid, .masked = true},
          {.name = "padded_loss", .shared = false, .route = {.aux_coefficient = 0.5f}, .masked = true},
          {.name = "padded_sandwich",
           .post_norm = true,
           .route = sampled,
           .weighs_activation = true,
           .masked = true},
          {.name = "padded_and_dropped", .route = dropped, .masked = true}};
}
const BlockCase& CaseOf(const std::string& name) {
  static const std::vector<BlockCase> cases = Cases();
  return *std::find_if(cases.begin(), cases.end(), [&](const BlockCase& c) { return c.name == name; });
}

struct Block {
  Block(const BlockCase& c, DType dtype)
      : what(c),
        x(dtype, {c.tokens, kHidden}),
        norm(DType::kF32, {kHidden}),
        router(dtype, {kHidden, kExperts}),
        bias(DType::kF32, {kExperts}),
        gate_up(dtype, {kExperts, kHidden, 2 * kWidth}),
        down(dtype, {kExperts, kWidth, kHidden}),
        shared_gate_up(dtype, {kHidden, 2 * kShared}),
        shared_down(dtype, {kShared, kHidden}),
        post_norm(DType::kF32, {kHidden}),
        out(dtype, {c.tokens, kHidden}),
        d_out(dtype, {c.tokens, kHidden}),
        aux_loss(DType::kF32, {1}),
        valid(DType::kBool, {c.tokens}) {
    for (std::int64_t t = 0; t < c.tokens; ++t) valid.set({t}, !c.masked || t % 3 != 1 ? 1 : 0);
    Random random;
    x.FillNormal(random), d_out.FillNormal(random);
    norm.FillUniform(random, 0.5, 1.5), post_norm.FillUniform(random, 0.5, 1.5);
    router.FillNormal(random, 0, 0.3), bias.FillNormal(random, 0, 0.05);
    if (c.one_expert) bias.set({5}, 1000);
    gate_up.FillNormal(random, 0, 0.3), down.FillNormal(random, 0, 0.3);
    shared_gate_up.FillNormal(random, 0, 0.3), shared_down.FillNormal(random, 0, 0.3);
  }
  MoeBlockArgs args() {
    MoeBlockArgs a;
    a.x = x.view(), a.route = what.route, a.top_k = what.top_k, a.out = out.view(),
    a.aux_loss = aux_loss.view();
    a.weights = {.norm = norm.view(),
                 .router = router.view(),
                 .router_bias = bias.view(),
                 .gate_up = gate_up.view(),
                 .down = down.view()};
    if (what.shared)
      a.weights.shared_gate_up = shared_gate_up.view(), a.weights.shared_down = shared_down.view();
    if (what.post_norm) a.weights.post_norm = post_norm.view();
    a.weighs_activation = what.weighs_activation;
    if (what.masked) a.valid = valid.view();
    return a;
  }
  bool IsValid(std::int64_t t) const { return valid.at({t}) != 0; }
  std::vector<bool> Valid() const {
    std::vector<bool> flags;
    for (std::int64_t t = 0; t < what.tokens; ++t) flags.push_back(IsValid(t));
    return flags;
  }

  // What a lower precision rounds.
  std::vector<Matrix*> Rounded() {
    return {&x, &router, &gate_up, &down, &shared_gate_up, &shared_down, &d_out};
  }

  BlockCase what;
  Matrix x, norm, router, bias, gate_up, down, shared_gate_up, shared_down, post_norm, out, d_out, aux_loss,
      valid;
};

// The gradients go to the places of `d` that the values have in `b`.
MoeBlockGradArgs GradArgs(Block& b, Block& d) {
  MoeBlockGradArgs args{.forward = b.args(), .d_out = b.d_out.view(), .d_aux_loss = 2, .d_x = d.x.view()};
  args.gradients = {
      .norm = d.norm.view(), .router = d.router.view(), .gate_up = d.gate_up.view(), .down = d.down.view()};
  if (b.what.shared) {
    args.gradients.shared_gate_up = d.shared_gate_up.view();
    args.gradients.shared_down = d.shared_down.view();
  }
  if (b.what.post_norm) args.gradients.post_norm = d.post_norm.view();
  return args;
}

// The values that have gradients.
std::vector<Matrix*> Differentiated(Block& b) {
  std::vector<Matrix*> all = {&b.x, &b.norm, &b.router, &b.gate_up, &b.down};
  if (b.what.shared) all.insert(all.end(), {&b.shared_gate_up, &b.shared_down});
  if (b.what.post_norm) all.push_back(&b.post_norm);
  return all;
}

// What a call has left in its state: the routes taken, and the logits that they were chosen by.
struct Left {
  Left(const Block& b, BlockState* state)
      : logits(state->Take("logits", DType::kF32, {b.what.tokens, kExperts})),
        ids(state->Take("ids", DType::kI32, {b.what.tokens, b.what.top_k})) {}
  std::vector<std::int32_t> Ids() const {
    const auto* first = static_cast<const std::int32_t*>(ids.data);
    return {first, first + ids.count()};
  }
  // (T, E): what replaces each logit, less the logit.
  Values Repairs(const RouteOptions& o) const {
    Values repairs;
    if (o.bad_logits == BadLogits::kError) return Values(static_cast<std::size_t>(logits.count()));
    for (std::int64_t t = 0; t < logits.size(0); ++t) {
      const float* const x = static_cast<const float*>(logits.data) + t * kExperts;
      double sum = 0, good = 0;
      for (std::int64_t e = 0; e < kExperts; ++e) {
        if (std::abs(x[e]) <= o.limit) sum += x[e], ++good;
      }
      const double by = o.bad_logits == BadLogits::kMean && good > 0 ? sum / good : 0;
      for (std::int64_t e = 0; e < kExperts; ++e)
        repairs.push_back(std::abs(x[e]) <= o.limit ? 0 : by - x[e]);
    }
    return repairs;
  }

  Tensor logits, ids;
};

// SwiGlu of gate and up side by side, with a weight, rounded.
NoisyRow Activated(const NoisyRow& both, Noisy weight, double unit) {
  NoisyRow act;
  const std::size_t width = both.size() / 2;
  for (std::size_t f = 0; f < width; ++f) {
    const double gate = both[f].value, sigmoid = 1 / (1 + std::exp(-gate));
    const Noisy silu = Mapped(both[f], gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid)));
    act.push_back(Rounded(weight * Rounded(silu * both[f + width], 8 * kFp32), unit));
  }
  return act;
}

// Scores of a token's logits.
NoisyRow ScoresOf(const RouteOptions& o, const NoisyRow& x) {
  NoisyRow n;
  double sum = 0;
  if (o.score == ScoreFunction::kSoftmax) {
    for (const Noisy& v : x) sum += std::exp(v.value);
  }
  for (std::size_t e = 0; e < x.size(); ++e) {
    const double v = x[e].value;
    if (o.score == ScoreFunction::kSigmoid) {
      const double score = 1 / (1 + std::exp(-v));
      n.push_back(Mapped(x[e], score, score * (1 - score)));
      continue;
    }
    const double score = std::exp(v) / sum;
    Noisy of_softmax{score};
    for (std::size_t other = 0; other < x.size(); ++other) {
      const double slope = score * ((other == e ? 1 : 0) - std::exp(x[other].value) / sum);
      of_softmax.variance += slope * slope * x[other].variance;
    }
    n.push_back(of_softmax);
  }
  for (Noisy& v : n) v = Rounded(v, 16 * kFp32);
  return n;
}

// x / (the sum of `all`, of which it is one)
Noisy PartOfSum(Noisy x, const NoisyRow& all) {
  Noisy sum;
  for (const Noisy& v : all) sum = sum + v;
  const double share = x.value / sum.value;
  const double variance =
      std::pow(1 - share, 2) * x.variance + share * share * std::max(sum.variance - x.variance, 0.0);
  return Rounded({share, variance / (sum.value * sum.value)}, 16 * kFp32);
}

// The block in double, of the routes `ids` and with `repairs` of its logits, and its roundings to `unit`. Returns out, and
// the loss last.
NoisyRow Evaluate(const Block& b, const std::vector<std::int32_t>& ids, const Values& repairs, double unit) {
  const RouteOptions& o = b.what.route;
  const std::int64_t tokens = b.what.tokens, top_k = b.what.top_k;
  NoisyRow result, shares(kExperts);
  double counts[kExperts] = {};
  for (std::int64_t t = 0; t < tokens; ++t) {
    const NoisyRow x = Exactly(b.x, t), h = Norm(x, b.norm, unit);
    NoisyRow logits = Times(h, b.router, kFp32);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const std::int64_t at = t * kExperts + e;
      Noisy& v = logits[static_cast<std::size_t>(e)];
      v.value += repairs[static_cast<std::size_t>(at)];
      if (o.temperature == 0) continue;
      const double u = reference::UniformNumber(o.seed, 0, static_cast<std::uint64_t>(at));
      v = 1 / o.temperature * Rounded(v + Noisy{-std::log(-std::log(u))}, 64 * kFp32);
    }
    const NoisyRow n = ScoresOf(o, logits);
    for (std::size_t e = 0; e < n.size() && b.IsValid(t); ++e) shares[e] = shares[e] + PartOfSum(n[e], n);

    NoisyRow kept;
    const std::int32_t* const chosen = ids.data() + t * top_k;
    for (std::int64_t j = 0; j < top_k; ++j) {
      if (chosen[j] >= 0) kept.push_back(n[static_cast<std::size_t>(chosen[j])]), ++counts[chosen[j]];
    }
    NoisyRow y(kHidden);
    const auto add = [&](const NoisyRow& rows, Noisy weight) {
      for (std::size_t i = 0; i < y.size(); ++i) y[i] = y[i] + weight * rows[i];
    };
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t e = chosen[j];
      if (e < 0) continue;
      const Noisy score = n[static_cast<std::size_t>(e)],
                  weight = static_cast<double>(o.scale) * (o.renormalise ? PartOfSum(score, kept) : score);
      const auto gate_up = [&](std::int64_t i, std::int64_t f) { return b.gate_up.at({e, i, f}); };
      const auto down = [&](std::int64_t f, std::int64_t i) { return b.down.at({e, f, i}); };
      const bool early = b.what.weighs_activation;
      const NoisyRow act = Activated(Times(h, 2 * kWidth, gate_up, unit), early ? weight : Noisy{1}, unit);
      add(Times(act, kHidden, down, unit), early ? Noisy{1} : weight);
    }
    const auto round = [&] {
      for (Noisy& v : y) v = Rounded(v, unit);
    };
    round();
    if (b.what.shared) {
      add(Times(Activated(Times(h, b.shared_gate_up, unit), Noisy{1}, unit), b.shared_down, unit), Noisy{1});
      if (b.what.post_norm) round();
    }
    if (b.what.post_norm) y = Norm(y, b.post_norm, unit);
    add(x, Noisy{1}), round();
    result.insert(result.end(), y.begin(), y.end());
  }
  Noisy loss;
  const std::vector<bool> valid = b.Valid();
  const auto count =
      static_cast<double>(std::max<std::int64_t>(std::count(valid.begin(), valid.end(), true), 1));
  for (std::size_t e = 0; e < shares.size(); ++e) {
    loss = loss + o.aux_coefficient * kExperts / (static_cast<double>(top_k) * count * count) * counts[e] *
                      shares[e];
  }
  result.push_back(Rounded(loss, 16 * kFp32));
  return result;
}

class MoeBlockTest : public ::testing::TestWithParam<BlockCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, MoeBlockTest, ::testing::ValuesIn(Cases()), ShapeName());

TEST_P(MoeBlockTest, IsItsFormula) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      SCOPED_TRACE(NameOf(dtype));
      Block b(GetParam(), dtype);
      BlockState state;
      BlockProfile profile;
      ASSERT_TRUE(IsOk(MoeBlock(device, b.args(), &state, &profile)));
      const Left left(b, &state);
      // The routes are those of the logits.
      reference::RouterOptions options = PlainOptions(b.what.route);
      options.valid = b.Valid();
      EXPECT_EQ(left.Ids(), reference::Route(left.logits, b.bias.view(), b.what.top_k, options).ids);
      NoisyRow expected = Evaluate(b, left.Ids(), left.Repairs(b.what.route), UnitRoundoff(dtype));
      ExpectWithinNoise(b.aux_loss, {expected.back()});
      expected.pop_back();
      ExpectWithinNoise(b.out, expected);
      EXPECT_EQ(profile.kernels.empty(), device.kind() == Device::Kind::kHost);
      EXPECT_EQ(profile.time_s() > 0, device.kind() == Device::Kind::kNpu);
    }
  }
}

// Of bad logits, what replaces them takes the gradient: it moves with them.
TEST_P(MoeBlockTest, GradientsAreFiniteDifferences) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Block b(GetParam(), DType::kF32);
    BlockState state;
    ASSERT_TRUE(IsOk(MoeBlock(device, b.args(), &state)));
    const Left left(b, &state);
    const std::vector<std::int32_t> ids = left.Ids();
    const Values repairs = left.Repairs(b.what.route), weights = b.d_out.ToDoubles();
    Block d(GetParam(), DType::kF32);
    ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(b, d), &state)));

    const auto value = [&] {
      const NoisyRow out = Evaluate(b, ids, repairs, 0);
      double sum = 2 * out.back().value;
      for (std::size_t i = 0; i < weights.size(); ++i) sum += weights[i] * out[i].value;
      return sum;
    };
    std::vector<std::pair<Matrix*, const Matrix*>> pairs;
    const std::vector<Matrix*> moved = Differentiated(b), gradients = Differentiated(d);
    for (std::size_t i = 0; i < moved.size(); ++i) pairs.emplace_back(moved[i], gradients[i]);
    ExpectFiniteDifferences(pairs, value);
  }
}

// In half precision, against the same call in fp32 on the rounded values: some dozen roundings in a row, each of which errs
// by a third of the unit's square in the mean, are 2 units together.
// Where the rounded logits of a token choose other experts than the exact ones, there is nothing to compare.
TEST_P(MoeBlockTest, GradientsInHalfPrecisionAreClose) {
  int compared = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(NameOf(dtype));
      Block half(GetParam(), dtype), exact(GetParam(), DType::kF32);
      const std::vector<Matrix*> from = half.Rounded(), to = exact.Rounded();
      for (std::size_t i = 0; i < from.size(); ++i) Assign(to[i]->view(), from[i]->ToDoubles());
      std::vector<std::vector<std::int32_t>> ids;
      std::vector<Values> gradients;
      for (Block* b : {&exact, &half}) {
        BlockState state;
        ASSERT_TRUE(IsOk(MoeBlock(device, b->args(), &state)));
        ids.push_back(Left(*b, &state).Ids());
        Block d(GetParam(), b->x.view().dtype);
        ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(*b, d), &state)));
        gradients.emplace_back();
        for (const Matrix* gradient : Differentiated(d)) {
          const Values values = gradient->ToDoubles();
          gradients.back().insert(gradients.back().end(), values.begin(), values.end());
        }
      }
      if (ids[0] != ids[1]) continue;
      ExpectCloseInTheMean(gradients[1], gradients[0], 3 * UnitRoundoff(dtype));
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

TEST_P(MoeBlockTest, HasTheSameBitsForAnyThreadCountAndASecondTime) {
  Block first(GetParam(), DType::kBF16), first_d(GetParam(), DType::kBF16);
  BlockState state;
  ASSERT_TRUE(IsOk(MoeBlock(Host(), first.args(), &state)));
  ASSERT_TRUE(IsOk(MoeBlockGrad(Host(), GradArgs(first, first_d), &state)));
  for (int threads : kThreadCounts) {
    SCOPED_TRACE(threads);
    Block again(GetParam(), DType::kBF16), d(GetParam(), DType::kBF16);
    const Device host = Host({.threads = threads});
    ASSERT_TRUE(IsOk(MoeBlock(host, again.args(), &state)));
    ASSERT_TRUE(IsOk(MoeBlockGrad(host, GradArgs(again, d), &state)));
    ExpectSameBits(again.out.view(), first.out.view());
    ExpectSameBits(again.aux_loss.view(), first.aux_loss.view());
    const std::vector<Matrix*> gradients = Differentiated(d), expected = Differentiated(first_d);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      ExpectSameBits(gradients[i]->view(), expected[i]->view());
  }
}

// Where nothing is random, the rows of valid tokens are those of a call without the others, bit for bit. So are gradients of
// weights of products where the others' d_out is 0; the loss and the gradient of the norm are sums over parts of the tokens,
// which are other parts.
TEST(MoeBlockMaskTest, IsTheBlockOfTheValidTokens) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const DType dtype : kFloatTypes) {
      for (const bool post_norm : {false, true}) {
        SCOPED_TRACE(Join(NameOf(dtype), post_norm ? " with a norm" : ""));
        BlockCase c = CaseOf("padded");
        c.route.aux_coefficient = 0.5f, c.post_norm = post_norm, c.weighs_activation = post_norm;
        Block all(c, dtype), d_all(c, dtype);
        std::vector<std::int64_t> rows;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          if (all.IsValid(t)) rows.push_back(t);
          for (std::int64_t h = 0; h < kHidden && !all.IsValid(t); ++h) all.d_out.set({t, h}, 0);
        }
        c.masked = false, c.tokens = static_cast<std::int64_t>(rows.size());
        ASSERT_LT(c.tokens, kTokens);
        Block some(c, dtype), d_some(c, dtype);
        for (const auto member : {&Block::norm, &Block::router, &Block::bias, &Block::gate_up, &Block::down,
                                  &Block::shared_gate_up, &Block::shared_down, &Block::post_norm})
          some.*member = all.*member;
        const auto of_rows = [&](const Matrix& from, Matrix* to) {
          for (std::int64_t i = 0; i < c.tokens * kHidden; ++i)
            to->set({i / kHidden, i % kHidden},
                    from.at({rows[static_cast<std::size_t>(i / kHidden)], i % kHidden}));
        };
        of_rows(all.x, &some.x), of_rows(all.d_out, &some.d_out);
        BlockState state, some_state;
        ASSERT_TRUE(IsOk(MoeBlock(device, all.args(), &state)));
        ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(all, d_all), &state)));
        ASSERT_TRUE(IsOk(MoeBlock(device, some.args(), &some_state)));
        ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(some, d_some), &some_state)));
        Matrix out(dtype, {c.tokens, kHidden}), d_x(dtype, {c.tokens, kHidden});
        of_rows(all.out, &out), of_rows(d_all.x, &d_x);
        ExpectSameBits(out.view(), some.out.view());
        ExpectSameBits(d_x.view(), d_some.x.view());
        EXPECT_FLOAT_EQ(static_cast<float>(all.aux_loss.at({0})), static_cast<float>(some.aux_loss.at({0})));
        for (const auto member :
             {&Block::router, &Block::gate_up, &Block::down, &Block::shared_gate_up, &Block::shared_down})
          ExpectSameBits((d_all.*member).view(), (d_some.*member).view());
        ExpectCloseInTheMean(d_all.norm.ToDoubles(), d_some.norm.ToDoubles(), 4 * kFp32);
      }
    }
  }
}

// Of a token that is left out: x, and what the shared expert makes of it; NaN stays in its row.
TEST(MoeBlockMaskTest, TokensLeftOutHaveRowsOfTheirOwn) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    BlockCase c = CaseOf("padded_loss");
    Block first(c, DType::kF32), second(c, DType::kF32);
    for (std::int64_t h = 0; h < kHidden; ++h) second.x.set({4, h}, kNaN);
    BlockState state;
    ASSERT_TRUE(IsOk(MoeBlock(device, first.args(), &state)));
    ASSERT_TRUE(IsOk(MoeBlock(device, second.args(), &state)));
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t h = 0; h < kHidden; ++h) {
        EXPECT_TRUE(first.IsValid(t) || first.out.at({t, h}) == first.x.at({t, h}));
        EXPECT_TRUE(t == 4 ? std::isnan(second.out.at({t, h}))
                           : second.out.at({t, h}) == first.out.at({t, h}));
      }
    }
    ExpectSameBits(first.aux_loss.view(), second.aux_loss.view());
  }
}

// Without data the model follows the routes of an earlier call, and predicts what it does with data.
TEST(MoeBlockWithoutDataTest, TakesTheRoutesOfTheState) {
  Block b(CaseOf("padded"), DType::kBF16);
  BlockState state;
  MoeBlockArgs args = b.args();
  const Status status = MoeBlock(NpuWithoutData(Ascend910B2()), args, &state);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("the state has no routes of these sizes"), std::string::npos);
  BlockProfile with, without;
  ASSERT_TRUE(IsOk(MoeBlock(NpuWithData(Ascend910B2()), args, &state, &with)));
  const std::vector<std::int32_t> ids = Left(b, &state).Ids();
  args.x.data = args.valid.data = nullptr, args.out.data = args.aux_loss.data = nullptr;
  for (ConstTensor* w :
       {&args.weights.norm, &args.weights.router, &args.weights.router_bias, &args.weights.gate_up,
        &args.weights.down, &args.weights.shared_gate_up, &args.weights.shared_down})
    w->data = nullptr;
  ASSERT_TRUE(IsOk(MoeBlock(NpuWithoutData(Ascend910B2()), args, &state, &without)));
  EXPECT_EQ(Left(b, &state).Ids(), ids);
  ASSERT_EQ(without.kernels.size(), with.kernels.size());
  for (std::size_t i = 0; i < with.kernels.size(); ++i) {
    EXPECT_EQ(without.kernels[i].first, with.kernels[i].first);
    const double time = with.kernels[i].second.time_s;
    EXPECT_NEAR(without.kernels[i].second.time_s, time, 0.01 * time) << with.kernels[i].first;
  }
}

TEST(MoeBlockArgumentsTest, AreNamed) {
  BlockState state;
  const auto says = [&](const std::function<void(MoeBlockArgs&)>& spoil, const std::string& what) {
    Block b(CaseOf("deepseek"), DType::kF32);
    MoeBlockArgs args = b.args();
    spoil(args);
    const Status status = MoeBlock(Host(), args, &state);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(b.out.at({0, 0})));
  };
  says([](auto& a) { a.x = {}; }, "moe_block: x is not given");
  says([](auto& a) { a.top_k = 9; }, "moe_block: top_k is 9, needs 1 to E, 8");
  says([](auto& a) { a.weights.down.sizes[1] = 9; }, "moe_block: gate_up has size 20");
  says([](auto& a) { a.weights.shared_down = {}; }, "moe_block: shared_down is not given");
  says([](auto& a) { a.weights.router.dtype = DType::kBF16; }, "moe_block: router is bf16");
  says([](auto& a) { a.out.data = const_cast<void*>(a.x.data); }, "moe_block: out overlaps x");
  says([](auto& a) { a.weights.router_bias.sizes[0] = 7; }, "moe_block: router_bias has size 7");
  says([](auto& a) { a.weights.norm.dtype = DType::kI32; }, "moe_block: norm is int32");
  says([](auto& a) { a.aux_loss.dtype = DType::kBF16; }, "moe_block: aux_loss is bf16");
  Matrix flags(DType::kBool, {kTokens + 1});
  says([&](auto& a) { a.valid = flags.view(); }, "moe_block: valid has size 12");
  says(
      [&](auto& a) {
        a.valid = ConstTensor(flags.view()), a.valid.sizes[0] = kTokens, a.valid.dtype = DType::kI32;
      },
      "moe_block: valid is int32");
  says([](auto& a) { a.valid = ConstTensor(a.out.data, DType::kBool, {kTokens}); },
       "moe_block: out overlaps valid");
  says([](auto& a) { a.route.scale = kInfinity; }, "moe_block: scale is inf");
  says([](auto& a) { a.route.dropout = 2; }, "moe_block: dropout is 2, needs 0 to 1");
  says([](auto& a) { a.eps = -1; }, "moe_block: eps is -1");
  Block b(CaseOf("deepseek"), DType::kF32);
  EXPECT_EQ(MoeBlock(Host(), b.args(), nullptr).message(), "moe_block: state is a null pointer");
  b.bias.set({3}, kNaN);
  EXPECT_EQ(
      MoeBlock(Host(), b.args(), &state).message(),
      "moe_block: router_bias has nan at (3), needs finite values, or -inf for experts that are left out");
  EXPECT_TRUE(std::isnan(b.out.at({0, 0})));
}

// The gradients go to tensors that hold random numbers.
struct BlockGradFixture {
  MoeBlockGradArgs args() { return GradArgs(block, gradients); }
  std::vector<const Matrix*> all() const {
    const Block& d = gradients;
    return {&d.x, &d.norm, &d.router, &d.gate_up, &d.down, &d.shared_gate_up, &d.shared_down, &d.post_norm};
  }

  Block block{CaseOf("pangu_sandwich"), DType::kF32}, gradients{CaseOf("pangu_sandwich"), DType::kF32};
};

TEST(MoeBlockArgumentsTest, OfGradientsAreNamed) {
  const std::string who = "moe_block: ";
  RouteWeighting forward_only;
  forward_only.forward = [](auto, auto scores, auto weights) {
    std::copy(scores.begin(), scores.end(), weights.begin());
  };
  const std::vector<BadCall<MoeBlockGradArgs>> calls = {
      {"d_out missing", [](auto& a) { a.d_out = {}; }, {who + "d_out is not given"}},
      {"router's gradient of flags",
       [](auto& a) { a.gradients.router.dtype = DType::kBool; },
       {who + "gradients.router is bool"}},
      {"gate_up's gradient too narrow",
       [](auto& a) { a.gradients.gate_up.sizes[2] = 3; },
       {who + "gradients.gate_up has size 3"}},
      {"gradient of no weight",
       [](auto& a) { a.forward.weights.post_norm = {}; },
       {who + "gradients.post_norm is given, and its weight is not"}},
      {"norm's gradient in d_x",
       [](auto& a) { a.gradients.norm = Tensor(a.d_x.data, DType::kF32, {kHidden}); },
       {who + "d_x overlaps gradients.norm"}},
      {"d_aux_loss NaN", [](auto& a) { a.d_aux_loss = NAN; }, {who + "d_aux_loss is nan"}},
      {"d_aux_loss infinite", [](auto& a) { a.d_aux_loss = INFINITY; }, {who + "d_aux_loss is inf"}},
      {"weights without a gradient",
       [&](auto& a) { a.forward.route.weighting = forward_only; },
       {who + "weighting has no backward function"}},
      {"an option out of bounds",
       [](auto& a) { a.forward.route.temperature = -1; },
       {who + "temperature is -1"}},
      {"another number of tokens than the state has",
       [](auto& a) {
         for (ConstTensor* x : {&a.forward.x, &a.d_out}) x->sizes[0] = kTokens - 1;
         for (Tensor* x : {&a.forward.out, &a.d_x}) x->sizes[0] = kTokens - 1;
       },
       {who + "the state has no routes of these sizes, needs a call of moe_block before"}}};
  ExpectErrors<BlockGradFixture>(calls, [](const Device& device, const MoeBlockGradArgs& args) {
    Block forward(CaseOf("pangu_sandwich"), DType::kF32);
    BlockState state;
    EXPECT_TRUE(IsOk(MoeBlock(device, forward.args(), &state)));
    return MoeBlockGrad(device, args, &state);
  });
  BlockGradFixture fixture;
  BlockState fresh;
  EXPECT_TRUE(Says(MoeBlockGrad(Host(), fixture.args(), &fresh), {who + "the state has no routes"}));
  EXPECT_TRUE(Says(MoeBlockGrad(Host(), fixture.args(), nullptr), {who + "state is a null pointer"}));
  const BlockGradFixture before;
  for (std::size_t i = 0; i < before.all().size(); ++i)
    ExpectSameBits(fixture.all()[i]->view(), before.all()[i]->view());
}

}  // namespace
}  // namespace cubist::testing
