// Calls of MoeBlock with tokens that are not valid, without data, and with arguments that are none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/moe_block.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/block_test.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/moe_block_fixture.h"
#include "tests/kernels/route_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"

namespace cubist::testing {
namespace {

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

// Of every kernel about the time that it takes with data.
void ExpectSameTimes(const BlockProfile& without, const BlockProfile& with) {
  ASSERT_EQ(without.kernels.size(), with.kernels.size());
  for (std::size_t i = 0; i < with.kernels.size(); ++i) {
    EXPECT_EQ(without.kernels[i].first, with.kernels[i].first);
    const double time = with.kernels[i].second.time_s;
    EXPECT_NEAR(without.kernels[i].second.time_s, time, 0.01 * time) << with.kernels[i].first;
  }
}

void TakeData(MoeBlockArgs* args) {
  args->x.data = args->valid.data = nullptr, args->out.data = args->aux_loss.data = nullptr;
  MoeBlockWeights& w = args->weights;
  for (ConstTensor* x : {&w.norm, &w.router, &w.router_bias, &w.gate_up, &w.down, &w.shared_gate_up,
                         &w.shared_down, &w.post_norm})
    x->data = nullptr;
}
void TakeData(MoeBlockGradArgs* args) {
  TakeData(&args->forward);
  args->d_out.data = nullptr, args->d_x.data = nullptr;
  MoeBlockGradients& g = args->gradients;
  for (Tensor* x : {&g.norm, &g.router, &g.gate_up, &g.down, &g.shared_gate_up, &g.shared_down, &g.post_norm})
    x->data = nullptr;
}

// Without data the model follows the routes of an earlier call, and predicts what it does with data. The state stays.
TEST(MoeBlockWithoutDataTest, TakesTheRoutesOfTheState) {
  const Device with_data = NpuWithData(Ascend910B2()), without_data = NpuWithoutData(Ascend910B2());
  for (const char* name : {"padded", "pangu_sandwich", "weights_before_down"}) {
    SCOPED_TRACE(name);
    Block b(CaseOf(name), DType::kBF16), gradients(CaseOf(name), DType::kBF16),
        again(CaseOf(name), DType::kBF16);
    BlockState state;
    MoeBlockArgs args = b.args();
    MoeBlockGradArgs grad = GradArgs(b, gradients);
    const Status status = MoeBlock(without_data, args, &state);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("the state has no routes of these sizes"), std::string::npos);
    EXPECT_EQ(MoeBlockGrad(without_data, grad, &state).code(), StatusCode::kInvalidArgument);
    BlockProfile with, without, grad_with, grad_without;
    ASSERT_TRUE(IsOk(MoeBlock(with_data, args, &state, &with)));
    ASSERT_TRUE(IsOk(MoeBlockGrad(with_data, grad, &state, &grad_with)));
    const std::vector<std::int32_t> ids = Left(b, &state).Ids();
    TakeData(&args), TakeData(&grad);
    ASSERT_TRUE(IsOk(MoeBlock(without_data, args, &state, &without)));
    ASSERT_TRUE(IsOk(MoeBlockGrad(without_data, grad, &state, &grad_without)));
    EXPECT_EQ(Left(b, &state).Ids(), ids);
    ExpectSameTimes(without, with);
    ExpectSameTimes(grad_without, grad_with);
    ASSERT_TRUE(IsOk(MoeBlockGrad(with_data, GradArgs(b, again), &state)));
    ExpectSameBits(again.x.view(), gradients.x.view());
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
