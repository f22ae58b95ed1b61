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

#include "tests/kernels/bad_call.h"
#include "tests/kernels/block_test.h"
#include "tests/kernels/kernel_test.h"
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
  std::string Name() const { return name; }
};

std::vector<BlockCase> Cases() {
  const RouteOptions sigmoid = {.score = ScoreFunction::kSigmoid,
                                .renormalise = true,
                                .scale = 2.5f,
                                .groups = 4,
                                .top_groups = 2,
                                .group_top = 2};
  return {
      {"softmax_without_shared", false, false, {.aux_coefficient = 0.5f}},
      {"deepseek", true, false, sigmoid},
      {"pangu_sandwich", true, true, {.score = ScoreFunction::kSigmoid, .renormalise = true, .scale = 2.5f}},
      {"sandwich_without_shared", false, true, {}},
      {"weights_before_down", true, false, sigmoid, true},
      {"dropped_weights_before_down",
       false,
       true,
       {.score = ScoreFunction::kSigmoid, .renormalise = true, .dropout = 0.3f, .seed = 8},
       true}};
}

struct Block {
  Block(const BlockCase& c, DType dtype)
      : what(c),
        x(dtype, {kTokens, kHidden}),
        norm(DType::kF32, {kHidden}),
        router(dtype, {kHidden, kExperts}),
        bias(DType::kF32, {kExperts}),
        gate_up(dtype, {kExperts, kHidden, 2 * kWidth}),
        down(dtype, {kExperts, kWidth, kHidden}),
        shared_gate_up(dtype, {kHidden, 2 * kShared}),
        shared_down(dtype, {kShared, kHidden}),
        post_norm(DType::kF32, {kHidden}),
        out(dtype, {kTokens, kHidden}),
        d_out(dtype, {kTokens, kHidden}),
        aux_loss(DType::kF32, {1}) {
    Random random;
    x.FillNormal(random), d_out.FillNormal(random);
    norm.FillUniform(random, 0.5, 1.5), post_norm.FillUniform(random, 0.5, 1.5);
    router.FillNormal(random, 0, 0.3), bias.FillNormal(random, 0, 0.05);
    gate_up.FillNormal(random, 0, 0.3), down.FillNormal(random, 0, 0.3);
    shared_gate_up.FillNormal(random, 0, 0.3), shared_down.FillNormal(random, 0, 0.3);
  }
  MoeBlockArgs args() {
    MoeBlockArgs a;
    a.x = x.view(), a.route = what.route, a.top_k = kTopK, a.out = out.view(), a.aux_loss = aux_loss.view();
    a.weights = {.norm = norm.view(),
                 .router = router.view(),
                 .router_bias = bias.view(),
                 .gate_up = gate_up.view(),
                 .down = down.view()};
    if (what.shared)
      a.weights.shared_gate_up = shared_gate_up.view(), a.weights.shared_down = shared_down.view();
    if (what.post_norm) a.weights.post_norm = post_norm.view();
    a.weighs_activation = what.weighs_activation;
    return a;
  }

  // What a lower precision rounds.
  std::vector<Matrix*> Rounded() {
    return {&x, &router, &gate_up, &down, &shared_gate_up, &shared_down, &d_out};
  }

  BlockCase what;
  Matrix x, norm, router, bias, gate_up, down, shared_gate_up, shared_down, post_norm, out, d_out, aux_loss;
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

double Silu(double g) { return g / (1 + std::exp(-g)); }

// y += weight * down(SwiGlu(gate_up(h))); element (i, j) of the matrices by function.
void AddExpert(const Values& h, std::int64_t width, double weight,
               const std::function<double(std::int64_t, std::int64_t)>& gate_up,
               const std::function<double(std::int64_t, std::int64_t)>& down, Values* y) {
  for (std::int64_t f = 0; f < width; ++f) {
    double gate = 0, up = 0;
    for (std::int64_t i = 0; i < kHidden; ++i) {
      gate += h[static_cast<std::size_t>(i)] * gate_up(i, f);
      up += h[static_cast<std::size_t>(i)] * gate_up(i, width + f);
    }
    for (std::int64_t i = 0; i < kHidden; ++i)
      (*y)[static_cast<std::size_t>(i)] += weight * Silu(gate) * up * down(f, i);
  }
}

// The block in double; `ids` are the routes taken. Returns out, and the loss last.
Values Evaluate(const Block& b, const std::vector<std::int32_t>& ids) {
  Values result;
  double counts[kExperts] = {}, shares[kExperts] = {};
  for (std::int64_t t = 0; t < kTokens; ++t) {
    Values x;
    for (std::int64_t h = 0; h < kHidden; ++h) x.push_back(b.x.at({t, h}));
    const Values h = Norm(x, b.norm);
    Values n;
    double sum = 0, most = -1e300;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      double logit = 0;
      for (std::int64_t i = 0; i < kHidden; ++i)
        logit += h[static_cast<std::size_t>(i)] * b.router.at({i, e});
      n.push_back(logit), most = std::max(most, logit);
    }
    for (double& v : n) {
      v = b.what.route.score == ScoreFunction::kSigmoid ? 1 / (1 + std::exp(-v)) : std::exp(v - most);
      sum += v;
    }
    for (std::int64_t e = 0; e < kExperts; ++e) {
      shares[e] += n[static_cast<std::size_t>(e)] / sum;
      if (b.what.route.score == ScoreFunction::kSoftmax) n[static_cast<std::size_t>(e)] /= sum;
    }
    double total = 0;
    const std::int32_t* chosen = ids.data() + t * kTopK;
    for (std::int64_t j = 0; j < kTopK; ++j) {
      if (chosen[j] >= 0) total += n[static_cast<std::size_t>(chosen[j])], ++counts[chosen[j]];
    }
    Values y(kHidden);
    for (std::int64_t j = 0; j < kTopK; ++j) {
      const std::int64_t e = chosen[j];
      if (e < 0) continue;
      const double weight =
          b.what.route.scale * n[static_cast<std::size_t>(e)] / (b.what.route.renormalise ? total : 1);
      AddExpert(
          h, kWidth, weight,
          [&](std::int64_t i, std::int64_t f) {
            return b.gate_up.at({e, i, f});
          },
          [&](std::int64_t f, std::int64_t i) {
            return b.down.at({e, f, i});
          },
          &y);
    }
    if (b.what.shared) {
      AddExpert(
          h, kShared, 1,
          [&](std::int64_t i, std::int64_t f) {
            return b.shared_gate_up.at({i, f});
          },
          [&](std::int64_t f, std::int64_t i) {
            return b.shared_down.at({f, i});
          },
          &y);
    }
    if (b.what.post_norm) y = Norm(y, b.post_norm);
    for (std::size_t i = 0; i < y.size(); ++i) result.push_back(x[i] + y[i]);
  }
  double loss = 0;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    loss += b.what.route.aux_coefficient * kExperts / (static_cast<double>(kTopK) * kTokens) * counts[e] *
            shares[e] / kTokens;
  }
  result.push_back(loss);
  return result;
}

std::vector<std::int32_t> IdsOf(BlockState* state) {
  const Tensor ids = state->Take("ids", DType::kI32, {kTokens, kTopK});
  const auto* first = static_cast<const std::int32_t*>(ids.data);
  return {first, first + kTokens * kTopK};
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
      Values expected = Evaluate(b, IdsOf(&state)), bounds;
      EXPECT_NEAR(b.aux_loss.at({0}), expected.back(), 20 * UnitRoundoff(dtype) * std::abs(expected.back()));
      expected.pop_back();
      // A dozen roundings of intermediate results, of values not much larger than one.
      for (double v : expected) bounds.push_back(24 * UnitRoundoff(dtype) * (2 + std::abs(v)));
      ExpectClose(b.out.view(), expected, bounds);
      ExpectGuards(b.out);
      EXPECT_EQ(profile.kernels.empty(), device.kind() == Device::Kind::kHost);
      EXPECT_EQ(profile.time_s() > 0, device.kind() == Device::Kind::kNpu);
    }
  }
}

TEST_P(MoeBlockTest, GradientsAreFiniteDifferences) {
  Block b(GetParam(), DType::kF32);
  BlockState state;
  ASSERT_TRUE(IsOk(MoeBlock(Host(), b.args(), &state)));
  const std::vector<std::int32_t> ids = IdsOf(&state);
  Block d(GetParam(), DType::kF32);
  ASSERT_TRUE(IsOk(MoeBlockGrad(Host(), GradArgs(b, d), &state)));

  const Values weights = b.d_out.ToDoubles();
  const auto value = [&] {
    const Values out = Evaluate(b, ids);
    double sum = 2 * out.back();
    for (std::size_t i = 0; i < weights.size(); ++i) sum += weights[i] * out[i];
    return sum;
  };
  std::vector<std::pair<Matrix*, const Matrix*>> pairs;
  const std::vector<Matrix*> moved = Differentiated(b), gradients = Differentiated(d);
  for (std::size_t i = 0; i < moved.size(); ++i) pairs.emplace_back(moved[i], gradients[i]);
  ExpectFiniteDifferences(pairs, value);
}

// In half precision, against the same call in fp32 on the rounded values: some dozen independent roundings in a row. Where
// the rounded logits of a token choose other experts than the exact ones, there is nothing to compare.
TEST_P(MoeBlockTest, GradientsInHalfPrecisionAreClose) {
  int compared = 0;
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(dtype));
    Block half(GetParam(), dtype), exact(GetParam(), DType::kF32);
    const std::vector<Matrix*> from = half.Rounded(), to = exact.Rounded();
    for (std::size_t i = 0; i < from.size(); ++i) Assign(to[i]->view(), from[i]->ToDoubles());
    std::vector<std::vector<std::int32_t>> ids;
    std::vector<Values> gradients;
    for (Block* b : {&exact, &half}) {
      BlockState state;
      ASSERT_TRUE(IsOk(MoeBlock(Host(), b->args(), &state)));
      ids.push_back(IdsOf(&state));
      Block d(GetParam(), b->x.view().dtype);
      ASSERT_TRUE(IsOk(MoeBlockGrad(Host(), GradArgs(*b, d), &state)));
      gradients.emplace_back();
      for (const Matrix* gradient : Differentiated(d)) {
        const Values values = gradient->ToDoubles();
        gradients.back().insert(gradients.back().end(), values.begin(), values.end());
      }
    }
    if (ids[0] != ids[1]) continue;
    ExpectCloseInTheMean(gradients[1], gradients[0], 8 * UnitRoundoff(dtype));
    ++compared;
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

// Without data the model follows the routes of an earlier call, and predicts what it does with data.
TEST(MoeBlockWithoutDataTest, TakesTheRoutesOfTheState) {
  Block b(Cases()[1], DType::kBF16);
  BlockState state;
  MoeBlockArgs args = b.args();
  const Status status = MoeBlock(NpuWithoutData(Ascend910B2()), args, &state);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("the state has no routes of these sizes"), std::string::npos);
  BlockProfile with, without;
  ASSERT_TRUE(IsOk(MoeBlock(NpuWithData(Ascend910B2()), args, &state, &with)));
  const std::vector<std::int32_t> ids = IdsOf(&state);
  args.x.data = nullptr, args.out.data = nullptr, args.aux_loss.data = nullptr;
  for (ConstTensor* w :
       {&args.weights.norm, &args.weights.router, &args.weights.router_bias, &args.weights.gate_up,
        &args.weights.down, &args.weights.shared_gate_up, &args.weights.shared_down})
    w->data = nullptr;
  ASSERT_TRUE(IsOk(MoeBlock(NpuWithoutData(Ascend910B2()), args, &state, &without)));
  EXPECT_EQ(IdsOf(&state), ids);
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
    Block b(Cases()[1], DType::kF32);
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
  says([](auto& a) { a.route.scale = kInfinity; }, "moe_block: scale is inf");
  says([](auto& a) { a.route.dropout = 2; }, "moe_block: dropout is 2, needs 0 to 1");
  says([](auto& a) { a.eps = -1; }, "moe_block: eps is -1");
  Block b(Cases()[1], DType::kF32);
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

  Block block{Cases()[2], DType::kF32}, gradients{Cases()[2], DType::kF32};
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
    Block forward(Cases()[2], DType::kF32);
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
