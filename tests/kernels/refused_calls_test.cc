// Calls of the router, of the gradients of permute and unpermute, of ReorderChunks and of the blocks that are refused: an error
// names what is wrong, and nothing is written. The other kernels' stand in the files of their names.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/mla_block.h"
#include "kernels/reorder_chunks.h"
#include "kernels/route.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

// ---- The router

struct RouteFixture {
  RouteFixture() {
    Random random;
    for (Matrix* x : {&logits, &bias, &d_weights}) x->FillNormal(random);
    valid.Fill(1), valid.set({2}, 0);
  }
  RouteArgs args() {
    return {.logits = logits.view(),
            .bias = bias.view(),
            .valid = valid.view(),
            .options = {.score = ScoreFunction::kSigmoid, .aux_coefficient = 1},
            .weights = weights.view(),
            .ids = ids.view(),
            .scores = scores.view(),
            .counts = counts.view(),
            .aux_loss = aux_loss.view(),
            .bad = bad.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&logits, &bias, &valid, &weights, &ids, &scores, &counts, &aux_loss, &bad};
  }

  Matrix logits{DType::kF32, {5, 8}}, bias{DType::kF32, {8}}, d_weights{DType::kF32, {5, 3}},
      valid{DType::kBool, {5}};
  Matrix weights{DType::kF32, {5, 3}}, ids{DType::kI32, {5, 3}}, scores{DType::kF32, {5, 8}},
      counts{DType::kI32, {8}}, aux_loss{DType::kF32, {1}}, bad{DType::kF32, {5}};
};

// What every call with RouteOptions must refuse. `who` is the kernel and a colon.
template <class Args>
std::vector<BadCall<Args>> BadRouteOptions(const std::string& who) {
  return {
      {"groups", [](auto& x) { x.options.groups = 3; }, {who + "groups is 3, needs a divisor of E, 8"}},
      {"top_groups", [](auto& x) { x.options.top_groups = 2; }, {who + "top_groups is 2, needs 1 to groups"}},
      {"group_top",
       [](auto& x) { x.options.groups = 4, x.options.top_groups = 2, x.options.group_top = 3; },
       {who + "group_top is 3, needs 1 to the experts of a group, 2"}},
      {"K of too few groups",
       [](auto& x) { x.options.groups = 4, x.options.group_top = 1; },
       {who + "K is 3, needs at most the experts of top_groups groups, 2"}},
      {"eps", [](auto& x) { x.options.eps = -1; }, {who + "eps is -1"}},
      {"scale", [](auto& x) { x.options.scale = NAN; }, {who + "scale is nan"}},
      {"temperature", [](auto& x) { x.options.temperature = INFINITY; }, {who + "temperature is inf"}},
      {"dropout", [](auto& x) { x.options.dropout = 1.5f; }, {who + "dropout is 1.5, needs 0 to 1"}},
      {"limit", [](auto& x) { x.options.limit = 0; }, {who + "limit is 0"}},
      {"aux_coefficient",
       [](auto& x) { x.options.aux_coefficient = NAN; },
       {who + "aux_coefficient is nan"}}};
}

TEST(RefusedCallsTest, Route) {
  const std::string who = "route: ";
  Matrix spoilt(DType::kF32, {5, 8});
  spoilt.Fill(0), spoilt.set({4, 7}, kNaN);
  std::vector<BadCall<RouteArgs>> calls = {
      {"logits missing", [](auto& x) { x.logits = {}; }, {who + "logits is not given"}},
      {"integer logits", [](auto& x) { x.logits.dtype = DType::kI32; }, {who + "logits is int32"}},
      {"K above E",
       [](auto& x) { x.weights.sizes[1] = x.ids.sizes[1] = 9; },
       {who + "K is 9, needs 1 to E, 8"}},
      {"ids too wide", [](auto& x) { x.ids.sizes[1] = 4; }, {who + "ids has size 4", "K, of weights"}},
      {"wide ids", [](auto& x) { x.ids.dtype = DType::kI64; }, {who + "ids is int64"}},
      {"narrow scores", [](auto& x) { x.scores.dtype = DType::kF16; }, {who + "scores is fp16"}},
      {"a loss without counts",
       [](auto& x) { x.counts = {}; },
       {who + "counts is not given, and aux_loss is"}},
      {"valid too short", [](auto& x) { x.valid.sizes[0] = 4; }, {who + "valid has size 4", "T, of logits"}},
      {"valid of experts",
       [](auto& x) { x.valid.rank = 2, x.valid.sizes[1] = 8, x.valid.strides[1] = 0; },
       {who + "valid has"}},
      {"integer valid", [](auto& x) { x.valid.dtype = DType::kI32; }, {who + "valid is int32"}},
      {"valid without data", [](auto& x) { x.valid.data = nullptr; }, {who + "valid has null data"}},
      {"bad over valid", [](auto& x) { x.valid.data = x.bad.data; }, {who + "bad overlaps valid"}},
      {"bad too short", [](auto& x) { x.bad.sizes[0] = 4; }, {who + "bad has size 4"}},
      {"scores over logits",
       [](auto& x) { x.scores.data = const_cast<void*>(x.logits.data); },
       {who + "scores overlaps logits"}},
      {"a NaN in the last row",
       [&](auto& x) { x.logits = spoilt.view(); },
       {who + "logits has nan at (4, 7)"}}};
  for (const auto& call : BadRouteOptions<RouteArgs>(who)) calls.push_back(call);
  ExpectErrors<RouteFixture>(calls, [](const Device& d, const RouteArgs& a) { return Route(d, a); });
}

struct RouteGradFixture : RouteFixture {
  RouteGradFixture() {
    EXPECT_TRUE(IsOk(Route(Host(), RouteFixture::args())));
    ids.set({2, 1}, -1);
  }
  RouteGradArgs args() {
    return {.d_weights = d_weights.view(),
            .ids = ids.view(),
            .scores = scores.view(),
            .counts = counts.view(),
            .valid = valid.view(),
            .options = RouteFixture::args().options,
            .d_aux_loss = 1,
            .d_logits = d_logits.view()};
  }
  std::vector<const Matrix*> all() const { return {&d_weights, &ids, &scores, &counts, &valid, &d_logits}; }

  Matrix d_logits{DType::kF32, {5, 8}};
};

TEST(RefusedCallsTest, RouteGrad) {
  const std::string who = "route_grad: ";
  Matrix foreign(DType::kI32, {5, 3});
  foreign.Fill(0), foreign.set({4, 2}, 8);
  std::vector<BadCall<RouteGradArgs>> calls = {
      {"scores missing", [](auto& x) { x.scores = {}; }, {who + "scores is not given"}},
      {"d_weights too long", [](auto& x) { x.d_weights.sizes[0] = 6; }, {who + "d_weights has size 6"}},
      {"d_logits too narrow", [](auto& x) { x.d_logits.sizes[1] = 7; }, {who + "d_logits has size 7"}},
      {"an id beyond E", [&](auto& x) { x.ids = foreign.view(); }, {who + "ids has 8 at (4, 2)", "[-1, 8)"}},
      {"counts missing",
       [](auto& x) { x.counts = {}; },
       {who + "counts is not given, and d_aux_loss is not 0"}},
      {"valid too long", [](auto& x) { x.valid.sizes[0] = 6; }, {who + "valid has size 6", "T, of scores"}},
      {"wide valid", [](auto& x) { x.valid.dtype = DType::kI64; }, {who + "valid is int64"}},
      {"d_aux_loss NaN", [](auto& x) { x.d_aux_loss = NAN; }, {who + "d_aux_loss is nan"}},
      {"d_logits over scores",
       [](auto& x) { x.d_logits.data = const_cast<void*>(x.scores.data); },
       {who + "d_logits overlaps scores"}},
      {"null ids", [](auto& x) { x.ids.data = nullptr; }, {who + "ids has null data"}}};
  for (const auto& call : BadRouteOptions<RouteGradArgs>(who)) calls.push_back(call);
  ExpectErrors<RouteGradFixture>(calls,
                                 [](const Device& d, const RouteGradArgs& a) { return RouteGrad(d, a); });
}

// ---- Movement

struct PermuteGradFixture {
  PermuteGradFixture() {
    Random random;
    permuted_grad.FillNormal(random), row_probs.FillNormal(random);
    for (std::int64_t s = 0; s < 12; ++s) sorted.set({s}, static_cast<double>((s * 7 + 3) % 12));
  }
  TokenPermuteGradArgs args() {
    return {.permuted_grad = permuted_grad.view(),
            .sorted_indices = sorted.view(),
            .permuted_probs_grad = row_probs.view(),
            .top_k = 3,
            .tokens_grad = tokens_grad.view(),
            .probs_grad = probs_grad.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&permuted_grad, &sorted, &row_probs, &tokens_grad, &probs_grad};
  }

  Matrix permuted_grad{DType::kBF16, {12, 6}}, sorted{DType::kI32, {12}}, row_probs{DType::kF32, {12}};
  Matrix tokens_grad{DType::kBF16, {4, 6}}, probs_grad{DType::kF32, {4, 3}};
};

TEST(RefusedCallsTest, TokenPermuteGrad) {
  const std::string who = "token_permute_grad: ";
  Matrix negative(DType::kI32, {12});
  negative.Fill(-2);
  const std::vector<BadCall<TokenPermuteGradArgs>> calls = {
      {"permuted_grad missing", [](auto& x) { x.permuted_grad = {}; }, {who + "permuted_grad is not given"}},
      {"top_k below 0", [](auto& x) { x.top_k = -1; }, {who + "top_k is -1"}},
      {"another K", [](auto& x) { x.top_k = 2; }, {who + "sorted_indices has size 12", "8"}},
      {"row probs missing",
       [](auto& x) { x.permuted_probs_grad = {}; },
       {who + "permuted_probs_grad is not given"}},
      {"probs_grad too narrow", [](auto& x) { x.probs_grad.sizes[1] = 2; }, {who + "probs_grad has size 2"}},
      {"wide tokens_grad", [](auto& x) { x.tokens_grad.dtype = DType::kF32; }, {who + "tokens_grad is fp32"}},
      {"an index of -2",
       [&](auto& x) { x.sorted_indices = negative.view(); },
       {who + "sorted_indices has -2 at (0)"}},
      {"a window of other rows",
       [](auto& x) {
         x.rows = Range{2, 5};
       },
       {who + "permuted_grad has size 12", "3"}},
      {"a window before 0",
       [](auto& x) {
         x.rows = Range{-1, 11};
       },
       {who + "rows is [-1, 11)"}},
      {"probs_grad over tokens_grad",
       [](auto& x) {
         x.probs_grad = Tensor(x.tokens_grad.data, DType::kBF16, {4, 3});
       },
       {who, "overlaps"}},
      {"null tokens_grad",
       [](auto& x) { x.tokens_grad.data = nullptr; },
       {who + "tokens_grad has null data"}}};
  ExpectErrors<PermuteGradFixture>(
      calls, [](const Device& d, const TokenPermuteGradArgs& a) { return TokenPermuteGrad(d, a); });
}

struct UnpermuteGradFixture : PermuteGradFixture {
  UnpermuteGradFixture() {
    Random random;
    out_grad.FillNormal(random), permuted.FillNormal(random), probs.FillUniform(random);
  }
  TokenUnpermuteGradArgs args() {
    return {.out_grad = out_grad.view(),
            .permuted = permuted.view(),
            .sorted_indices = sorted.view(),
            .probs = probs.view(),
            .permuted_grad = result.view(),
            .probs_grad = probs_grad.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&out_grad, &permuted, &sorted, &probs, &result, &probs_grad};
  }

  Matrix out_grad{DType::kBF16, {4, 6}}, permuted{DType::kBF16, {12, 6}}, probs{DType::kF32, {4, 3}},
      result{DType::kBF16, {12, 6}};
};

TEST(RefusedCallsTest, TokenUnpermuteGrad) {
  const std::string who = "token_unpermute_grad: ";
  Matrix twice(DType::kI32, {12}), bias(DType::kBF16, {2, 6});
  for (std::int64_t s = 0; s < 12; ++s) twice.set({s}, static_cast<double>(s % 11));
  const std::vector<BadCall<TokenUnpermuteGradArgs>> calls = {
      {"out_grad missing", [](auto& x) { x.out_grad = {}; }, {who + "out_grad is not given"}},
      {"permuted too wide", [](auto& x) { x.permuted.sizes[1] = 7; }, {who + "permuted has size 7"}},
      {"a row twice",
       [&](auto& x) { x.sorted_indices = twice.view(); },
       {who + "sorted_indices has row 0 a second time at (11)"}},
      {"K of no sum", [](auto& x) { x.probs.sizes[1] = 2; }, {who, "size"}},
      {"a bias without ids", [&](auto& x) { x.bias = bias.view(); }, {who + "topk_ids is not given"}},
      {"integer probs", [](auto& x) { x.probs.dtype = DType::kI32; }, {who + "probs is int32"}},
      {"permuted_grad over permuted",
       [](auto& x) { x.permuted_grad.data = const_cast<void*>(x.permuted.data); },
       {who + "permuted_grad overlaps permuted"}},
      {"null probs_grad", [](auto& x) { x.probs_grad.data = nullptr; }, {who + "probs_grad has null data"}}};
  ExpectErrors<UnpermuteGradFixture>(
      calls, [](const Device& d, const TokenUnpermuteGradArgs& a) { return TokenUnpermuteGrad(d, a); });
}

struct ReorderFixture {
  ReorderFixture() {
    Random random;
    tokens.FillNormal(random), probs.FillNormal(random), chunks.Fill(2);
  }
  ReorderChunksArgs args() {
    return {.tokens = tokens.view(),
            .chunk_counts = chunks.view(),
            .probs = probs.view(),
            .out = out.view(),
            .out_probs = out_probs.view(),
            .row_ids = row_ids.view(),
            .expert_counts = counts.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&tokens, &chunks, &probs, &out, &out_probs, &row_ids, &counts};
  }

  Matrix tokens{DType::kF16, {12, 5}}, chunks{DType::kI64, {2, 3}}, probs{DType::kF32, {12}};
  Matrix out{DType::kF16, {12, 5}}, out_probs{DType::kF32, {12}}, row_ids{DType::kI32, {12}},
      counts{DType::kI32, {3}};
};

TEST(RefusedCallsTest, ReorderChunks) {
  const std::string who = "reorder_chunks: ";
  Matrix many(DType::kI64, {2, 3});
  many.Fill(3);
  const std::vector<BadCall<ReorderChunksArgs>> calls = {
      {"tokens missing", [](auto& x) { x.tokens = {}; }, {who + "tokens is not given"}},
      {"more rows than there are",
       [&](auto& x) { x.chunk_counts = many.view(); },
       {who + "chunk_counts", "18"}},
      {"probs without their place", [](auto& x) { x.out_probs = {}; }, {who + "out_probs is not given"}},
      {"wide row_ids", [](auto& x) { x.row_ids.dtype = DType::kI64; }, {who + "row_ids is int64"}},
      {"expert_counts too short",
       [](auto& x) { x.expert_counts.sizes[0] = 2; },
       {who + "expert_counts has size 2"}},
      {"out over tokens",
       [](auto& x) { x.out.data = const_cast<void*>(x.tokens.data); },
       {who + "out overlaps tokens"}}};
  ExpectErrors<ReorderFixture>(
      calls, [](const Device& d, const ReorderChunksArgs& a) { return ReorderChunks(d, a); });
}

// ---- What a chip has no room for

// Of one token with many routes, in every form of a permute that has phases of its own.
struct WidePermute {
  WidePermute(std::int64_t routes, std::int64_t experts, int form)
      : top_k(routes),
        map(form == 1 || form == 2),
        ids(DType::kI64, {1, map ? 0 : routes}),
        flags(DType::kBool, {1, map ? experts : 0}),
        probs(DType::kF32, {1, map ? experts : routes}),
        permuted(DType::kBF16, {form == 2 || form == 3 ? experts : routes, 4}),
        row_probs(DType::kF32, {permuted.size(0)}),
        sorted(DType::kI32, {routes}),
        row_tokens(DType::kI32, {permuted.size(0)}),
        counts(DType::kI32, {experts}),
        devices(DType::kI32, {1}) {
    Random random;
    tokens.FillNormal(random), probs.FillUniform(random);
    flags.Fill(0);
    for (std::int64_t j = 0; j < routes; ++j) {
      if (map) {
        flags.set({0, j}, 1);
      } else {
        ids.set({0, j}, static_cast<double>(form == 3 ? 0 : j % experts));
      }
    }
    args = {.tokens = tokens.view(),
            .topk_ids = map ? ConstTensor() : ConstTensor(ids.view()),
            .routing_map = map ? ConstTensor(flags.view()) : ConstTensor(),
            .probs = probs.view(),
            .top_k = map ? routes : 0,
            .num_experts = experts,
            .capacity = form == 2 || form == 3 ? 1 : 0,
            .capacity_keeps = form == 3 ? CapacityKeeps::kHighest : CapacityKeeps::kFirst,
            .pad_with_tokens = form == 2,
            .permuted = permuted.view(),
            .sorted_indices = sorted.view(),
            .permuted_probs = row_probs.view(),
            .expert_counts = counts.view(),
            .row_tokens = form > 0 ? row_tokens.view() : Tensor(),
            .device_counts = form > 0 ? devices.view() : Tensor()};
  }
  std::vector<const Matrix*> outputs() const {
    return {&permuted, &row_probs, &sorted, &row_tokens, &counts, &devices};
  }

  std::int64_t top_k;
  bool map;
  Matrix tokens{DType::kBF16, {1, 4}};
  Matrix ids, flags, probs, permuted, row_probs, sorted, row_tokens, counts, devices;
  TokenPermuteArgs args;
};

// A 910B2 takes them all, in parts where they do not fit; a chip with next to no UB takes none.
TEST(RefusedCallsTest, WhatDoesNotFitAChipIsRefusedBeforeItWrites) {
  const ChipSpec large = Ascend910B2(), small = WithCapacity(Buffer::kUB, 6 << 10);
  for (int form = 0; form < 4; ++form) {
    for (const std::int64_t routes : {3000, 4500, 5500, 6500, 7500, 8100, 8192, 9000}) {
      for (const std::int64_t experts : {std::int64_t{9000}, std::int64_t{16000}, std::int64_t{17000}}) {
        WidePermute call(routes, experts, form);
        std::vector<Matrix> before;
        for (const Matrix* x : call.outputs()) before.push_back(*x);
        const Status status = TokenPermute(NpuWithData(small), call.args);
        SCOPED_TRACE(status.message());
        EXPECT_FALSE(status.ok());
        EXPECT_NE(status.message().find("token_permute: "), std::string::npos);
        for (std::size_t i = 0; i < before.size(); ++i)
          ExpectSameBits(call.outputs()[i]->view(), before[i].view());
        EXPECT_TRUE(IsOk(TokenPermute(NpuWithData(large), call.args)));
      }
    }
  }
}

// ---- The attention half of a layer

constexpr std::int64_t kTokens = 6, kHidden = 10, kHeads = 2, kNope = 4, kRope = 2, kV = 3, kRank = 5;

struct MlaFixture {
  MlaFixture() {
    Random random;
    for (Matrix* x : {&x, &norm, &q_up, &kv_down, &kv_norm, &kv_up, &out_weights, &d_out})
      x->FillNormal(random, 0, 0.3);
  }
  MlaBlockArgs args() {
    MlaBlockArgs a;
    a.x = x.view(), a.out = out.view(), a.heads = kHeads;
    a.weights = {.norm = norm.view(),
                 .q_up = q_up.view(),
                 .kv_down = kv_down.view(),
                 .kv_norm = kv_norm.view(),
                 .kv_up = kv_up.view(),
                 .out = out_weights.view()};
    return a;
  }
  std::vector<const Matrix*> all() const { return {&x, &out}; }

  Matrix x{DType::kF32, {kTokens, kHidden}}, norm{DType::kF32, {kHidden}},
      q_up{DType::kF32, {kHidden, kHeads*(kNope + kRope)}}, kv_down{DType::kF32, {kHidden, kRank + kRope}},
      kv_norm{DType::kF32, {kRank}}, kv_up{DType::kF32, {kRank, kHeads*(kNope + kV)}},
      out_weights{DType::kF32, {kHeads * kV, kHidden}}, d_out{DType::kF32, {kTokens, kHidden}};
  Matrix out{DType::kF32, {kTokens, kHidden}};
};

// What makes a call of MlaBlock wrong.
template <class Args, class Forward>
std::vector<BadCall<Args>> BadMla(Forward forward) {
  const std::string who = "mla_block: ";
  const auto with = [&](auto spoil) { return [=](Args& a) { spoil(forward(a)); }; };
  return {{"x missing", with([](auto& a) { a.x = {}; }), {who + "x is not given"}},
          {"heads that do not divide", with([](auto& a) { a.heads = 5; }), {who + "q_up has size 12"}},
          {"batch", with([](auto& a) { a.batch = 4; }), {who + "batch is 4, needs a divisor of T, 6"}},
          {"scale", with([](auto& a) { a.scale = NAN; }), {who + "scale is nan"}},
          {"eps", with([](auto& a) { a.eps = -1; }), {who + "eps is -1"}},
          {"half of the low rank",
           with([](auto& a) { a.weights.q_down = a.weights.q_up; }),
           {who + "q_norm is not given"}},
          {"another dtype",
           with([](auto& a) { a.weights.kv_up.dtype = DType::kBF16; }),
           {who + "kv_up is bf16"}}};
}

TEST(RefusedCallsTest, MlaBlock) {
  const auto calls = BadMla<MlaBlockArgs>([](MlaBlockArgs& a) -> MlaBlockArgs& { return a; });
  ExpectErrors<MlaFixture>(calls, [](const Device& d, const MlaBlockArgs& a) {
    BlockState state;
    return MlaBlock(d, a, &state);
  });
  MlaFixture fixture;
  EXPECT_TRUE(Says(MlaBlock(Host(), fixture.args(), nullptr), {"mla_block: state is a null pointer"}));
}

struct MlaGradFixture : MlaFixture {
  MlaBlockGradArgs args() {
    return {.forward = MlaFixture::args(),
            .d_out = d_out.view(),
            .d_x = d_x.view(),
            .gradients = {.norm = d_norm.view(),
                          .q_up = d_q_up.view(),
                          .kv_down = d_kv_down.view(),
                          .kv_norm = d_kv_norm.view(),
                          .kv_up = d_kv_up.view(),
                          .out = d_out_weights.view()}};
  }
  std::vector<const Matrix*> all() const {
    return {&d_x, &d_norm, &d_q_up, &d_kv_down, &d_kv_norm, &d_kv_up, &d_out_weights};
  }

  Matrix d_x{x}, d_norm{norm}, d_q_up{q_up}, d_kv_down{kv_down}, d_kv_norm{kv_norm}, d_kv_up{kv_up},
      d_out_weights{out_weights};
};

TEST(RefusedCallsTest, MlaBlockGrad) {
  const std::string who = "mla_block: ";
  auto calls = BadMla<MlaBlockGradArgs>([](MlaBlockGradArgs& a) -> MlaBlockArgs& { return a.forward; });
  calls.push_back({"d_out missing", [](auto& a) { a.d_out = {}; }, {who + "d_out is not given"}});
  calls.push_back({"a gradient too wide",
                   [](auto& a) { a.gradients.kv_up.sizes[1] = 15; },
                   {who + "gradients.kv_up has size 15"}});
  calls.push_back({"a gradient of no weight",
                   [](auto& a) { a.gradients.post_norm = a.gradients.norm; },
                   {who + "gradients.post_norm is given, and its weight is not"}});
  calls.push_back({"d_x over d_out",
                   [](auto& a) { a.d_x.data = const_cast<void*>(a.d_out.data); },
                   {who + "d_x overlaps d_out"}});
  ExpectErrors<MlaGradFixture>(calls, [](const Device& d, const MlaBlockGradArgs& a) {
    MlaFixture forward;
    BlockState state;
    EXPECT_TRUE(IsOk(MlaBlock(d, forward.args(), &state)));
    return MlaBlockGrad(d, a, &state);
  });
}

}  // namespace
}  // namespace cubist::testing
