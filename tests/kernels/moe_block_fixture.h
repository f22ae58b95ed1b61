// Calls of MoeBlock: what they have on and off, their tensors, and what they leave in the state.
#ifndef CUBIST_TESTS_KERNELS_MOE_BLOCK_FIXTURE_H_
#define CUBIST_TESTS_KERNELS_MOE_BLOCK_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/moe_block.h"
#include "tests/kernels/block_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {

inline constexpr std::int64_t kTokens = 11, kHidden = 20, kExperts = 8, kTopK = 3, kWidth = 10, kShared = 6;

struct BlockCase {
  std::string name;
  bool shared = true, post_norm = false;
  RouteOptions route = {};
  bool weighs_activation = false;
  std::int64_t tokens = kTokens, top_k = kTopK;
  bool one_expert = false;  // Selected by all tokens, whatever the scores.
  bool masked = false;      // Some tokens are not valid.
  bool router_of_floats = false;
  std::string Name() const { return name; }
};

inline std::vector<BlockCase> Cases() {
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
          {.name = "padded_and_dropped", .route = dropped, .masked = true},
          {.name = "router_of_floats", .route = sigmoid, .router_of_floats = true},
          {.name = "router_of_floats_padded_loss",
           .shared = false,
           .post_norm = true,
           .route = {.aux_coefficient = 0.5f},
           .masked = true,
           .router_of_floats = true}};
}
inline const BlockCase& CaseOf(const std::string& name) {
  static const std::vector<BlockCase> cases = Cases();
  return *std::find_if(cases.begin(), cases.end(), [&](const BlockCase& c) { return c.name == name; });
}

struct Block {
  Block(const BlockCase& c, DType dtype)
      : what(c),
        x(dtype, {c.tokens, kHidden}),
        norm(DType::kF32, {kHidden}),
        router(c.router_of_floats ? DType::kF32 : dtype, {kHidden, kExperts}),
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
inline MoeBlockGradArgs GradArgs(Block& b, Block& d) {
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
inline std::vector<Matrix*> Differentiated(Block& b) {
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

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_MOE_BLOCK_FIXTURE_H_
