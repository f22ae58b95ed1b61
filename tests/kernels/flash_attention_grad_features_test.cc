// What FlashAttentionGrad does to scores, rows and keys besides masking: against the reference, on the host and on the model.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/flash_attention_grad.h"
#include "reference/attention_grad.h"
#include "tests/kernels/attention_grad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

std::vector<Device> Both() { return {Host(), NpuWithData(Ascend910B2())}; }

void ExpectRight(const std::vector<Device>& devices, const AttentionShape& shape,
                 const GradOptions& options) {
  GradCall call(shape, options);
  call.FillNormal();
  ExpectRight(devices, call);
}

TEST(FlashAttentionGradFeaturesTest, RotaryPositions) {
  int i = 0;
  for (DType in : kFloatTypes) {
    for (RopeLayout layout : {RopeLayout::kHalf, RopeLayout::kInterleaved, RopeLayout::kInterleavedToHalf}) {
      const Causal causal = kMasks[(i + i / 3) % 3];  // Of each layout every one.
      ++i;
      // Rope parts of their own, k's shared by the heads; part of q and k; all of q and k; a context behind the queries.
      for (const bool shared : {false, true}) {
        ExpectRight(Both(), {2, 4, 2, 37, 70, 24, 16, 24},
                    {.in = in,
                     .out = in,
                     .causal = causal,
                     .shared_rope = shared,
                     .turned = 16,
                     .rope_layout = layout,
                     .q_offset = 33});
      }
      ExpectRight(
          Both(), {1, 4, 2, 70, 37, 40, 0, 8},
          {.in = in, .causal = causal, .layout = kBsnd, .turned = 6, .rope_layout = layout, .k_offset = 2});
      ExpectRight(Both(), {1, 2, 2, 33, 35, 18, 0, 8},
                  {.in = in, .causal = causal, .layout = kApart, .turned = 18, .rope_layout = layout});
    }
  }
}

// What is not looped over is drawn, so that nothing comes only together with something else.
TEST(FlashAttentionGradFeaturesTest, BiasSoftCapAndSinks) {
  const std::vector<std::vector<std::int64_t>> biases = {{},
                                                         {2, 4, 37, 70},
                                                         {1, 4, 1, 70},
                                                         {1, 1, 37, 70},
                                                         {2, 1, 37, 1},
                                                         {2, 4, 37, 1},
                                                         {2, 2 * 2, 1, 1},
                                                         {1, 1, 1, 1},
                                                         {2, 1, 37, 70}};
  Random random;
  const auto one_of = [&](std::int64_t count) { return random.Integer(1, count) == 1; };
  for (DType in : kFloatTypes) {
    for (const auto& bias : biases) {
      for (const std::optional<float> cap : {std::optional<float>(), std::optional<float>(2.5f)}) {
        ExpectRight(Both(), {2, 4, 2, 37, 70, 24, 0, 16},
                    {.in = in,
                     .out = one_of(3) ? in : DType::kF32,
                     .causal = one_of(2) ? Causal::kNone : Causal::kBottomRight,
                     .scale = one_of(3) ? std::optional(-0.7f) : std::nullopt,
                     .bias = bias,
                     .sinks = one_of(2),
                     .soft_cap = cap,
                     .wants_bias_gradient = !one_of(6)});
      }
    }
  }
}

// Several blocks of keys for each chunk, several chunks, and a bias that all heads of all batch entries share.
TEST(FlashAttentionGradFeaturesTest, SharedBiasOverManyBlocks) {
  for (const std::vector<std::int64_t>& bias :
       {std::vector<std::int64_t>{1, 1, 300, 1400}, {1, 1, 1, 1400}, {1, 2, 300, 1}}) {
    ExpectRight({Host()}, {2, 2, 2, 300, 1400, 8, 0, 8},
                {.causal = Causal::kBottomRight, .bias = bias, .sinks = true});
  }
}

// Drawn likewise.
TEST(FlashAttentionGradFeaturesTest, BooleanMasksAlibiAndDropout) {
  const std::vector<std::vector<std::int64_t>> masks = {
      {}, {2, 4, 37, 70}, {1, 4, 37, 1}, {2, 1, 1, 70}, {1, 1, 37, 70}};
  Random random;
  const auto one_of = [&](std::int64_t count) { return random.Integer(1, count) == 1; };
  for (DType in : kFloatTypes) {
    for (const auto& mask : masks) {
      for (const float keep : {1.0f, 0.75f}) {
        ExpectRight(
            Both(), {2, 4, 2, 37, 70, 24, one_of(4) ? 8 : 0, 16},
            {.in = in,
             .causal = kMasks[random.Integer(0, 2)],
             .scale = one_of(4) ? std::optional(-0.7f) : std::nullopt,
             .bias = one_of(2) ? std::vector<std::int64_t>{1, 4, 37, 70} : std::vector<std::int64_t>(),
             .sinks = one_of(3),
             .soft_cap = one_of(3) ? std::optional(5.0f) : std::nullopt,
             .mask = mask,
             .slopes = !one_of(3),
             .root = one_of(2),
             .keep = keep});
      }
    }
  }
}

// Rows whose keys are all hidden neither get nor give a gradient, and no NaN.
TEST(FlashAttentionGradFeaturesTest, FullyMaskedRows) {
  for (DType in : kFloatTypes) {
    GradCall call({1, 2, 1, 50, 90, 16, 0, 24}, {.in = in, .mask = {1, 1, 50, 90}, .keep = 0.5f});
    call.FillNormal();
    for (std::int64_t i = 0; i < 50; i += 2) {
      for (std::int64_t j = 0; j < 90; ++j) call.mask.set({0, 0, i, j}, 1);
    }
    call.Forward();
    ExpectRight(Both(), call);
    for (std::int64_t d = 0; d < 16; ++d) ASSERT_EQ(call.dq.at({0, 1, 4, d}), 0);
  }
}

// By a mask, by a band, by both, by a bias of -inf: what such rows hold reaches no gradient, and they have none.
TEST(FlashAttentionGradFeaturesTest, FullyMaskedRowsMayHoldAnything) {
  for (DType in : kFloatTypes) {
    for (int kind = 0; kind < 6; ++kind) {
      GradOptions options{.in = in};
      AttentionShape shape{1, 4, 2, 150, 120, 24, 8, 16};
      std::vector<std::int64_t> rows{0, 5, 149};
      if (kind == 0) options.mask = {1, 1, 150, 1}, options.keep = 0.5f;
      if (kind == 1) options.causal = Causal::kBottomRight, rows = {0, 11, 29};
      if (kind == 2)
        options.window = AttentionWindow{.left = 3, .anchor = Causal::kTopLeft}, rows = {130, 149};
      if (kind == 3) options.mask = {1, 4, 150, 1}, options.causal = Causal::kBottomRight, rows = {7, 101};
      const bool by_bias = kind > 3;  // Of one column, or of one for each key.
      if (by_bias) options.mask = options.bias = {1, 1, 150, kind == 4 ? 1 : 120};
      if (kind == 5) options.causal = Causal::kTopLeft, options.soft_cap = 20.0f;
      GradCall call(shape, options);
      call.FillNormal();
      if (by_bias) call.mask.Fill(0);  // Hides from the reference alone.
      for (const std::int64_t i : rows) {
        for (std::int64_t h = 0; h < call.mask.size(1); ++h) {
          for (std::int64_t j = 0; j < call.mask.size(3); ++j) {
            call.mask.set({0, h, i, j}, 1);
            if (by_bias) call.bias.set({0, h, i, j}, -kInfinity);
          }
        }
      }
      call.Forward();
      for (const std::int64_t i : rows) {
        call.dout.set({0, 1, i, 5}, i % 2 == 0 ? kNaN : kInfinity);
        call.q.set({0, 2, i, 7}, i % 2 == 0 ? kInfinity : kNaN);
        call.q_rope.set({0, 3, i, 0}, kNaN);
      }
      SCOPED_TRACE(Join("kind ", kind));
      FlashAttentionGradArgs args = call.args();
      if (by_bias) args.mask = {};
      ExpectRight(Both(), call, args);
      for (const std::int64_t i : rows) ASSERT_EQ(call.dq.at({0, 1, i, 3}), 0);
    }
  }
}

// Hidden by the band, by a mask, by both; in keys, in their rope parts and in values.
TEST(FlashAttentionGradFeaturesTest, HiddenValuesReachNoGradient) {
  constexpr std::int64_t kFirst = 3, kStep = 61;
  const AttentionWindow around{.left = 9, .right = 14};
  for (DType in : kFloatTypes) {
    for (int kind = 0; kind < 5; ++kind) {
      GradOptions options{.in = in};
      AttentionShape shape{1, 2, 2, 300, 290, 24, 8, 16};
      if (kind == 0) options.mask = {1, 1, 1, 290};
      if (kind == 1)
        options.mask = {1, 2, 300, 290}, options.causal = Causal::kBottomRight, options.soft_cap = 9;
      if (kind == 2) options.mask = {1, 1, 1, 290}, options.bias = {1, 1, 1, 290}, options.keep = 0.5f;
      if (kind >= 3) options.window = around, shape.sq = 200;  // Behind what the last row sees.
      if (kind == 4) options.soft_cap = 9, options.slopes = true, options.turned = 8;
      GradCall call(shape, options);
      call.FillNormal();
      std::vector<std::int64_t> hidden;
      for (std::int64_t j = kFirst; j < shape.skv; j += kStep) hidden.push_back(j);
      if (kind >= 3) hidden = {2, 60, 61, 80};
      for (const std::int64_t j : hidden) {
        for (std::int64_t i = 0; kind < 3 && i < call.mask.view().size(2); ++i) {
          for (std::int64_t h = 0; h < call.mask.view().size(1); ++h) call.mask.set({0, h, i, j}, 1);
        }
      }
      call.Forward();
      for (const std::int64_t j : hidden) {
        call.v.set({0, 0, j, 5}, j % 2 == 0 ? kNaN : kInfinity);
        call.k.set({0, 1, j, 7}, j % 2 == 0 ? kInfinity : kNaN);
        call.k_rope.set({0, 1, j, 0}, kNaN);
      }
      ExpectRight(Both(), call);
    }
  }
}

// Rows in front of a key with NaN have the gradients that they have without it, and so has the other head; all else
// is as the reference has it.
TEST(FlashAttentionGradFeaturesTest, HiddenKeysOfOtherRows) {
  constexpr std::int64_t kKey = 150;
  const AttentionShape shape{1, 2, 2, 300, 300, 24, 8, 16};
  for (DType in : kFloatTypes) {
    const GradOptions options{.in = in, .causal = Causal::kTopLeft};
    GradCall plain(shape, options), spoilt(shape, options);
    plain.FillNormal();
    spoilt.CopyInputs(plain);
    for (Matrix* x : {&spoilt.k, &spoilt.k_rope, &spoilt.v}) x->set({0, 0, kKey, 3}, kNaN);
    spoilt.Forward();
    for (const Device& device : Both()) {
      SCOPED_TRACE(NameOf(in));
      for (GradCall* call : {&plain, &spoilt}) {
        for (Matrix* x : call->outputs()) x->FillNaN();
        ASSERT_TRUE(IsOk(FlashAttentionGrad(device, call->args())));
      }
      spoilt.ExpectRight();
      for (std::size_t i = 0; i < spoilt.outputs().size(); ++i) {
        const ConstTensor with = spoilt.outputs()[i]->view(), without = plain.outputs()[i]->view();
        if (with.rank < 4 || with.count() == 0) continue;  // Not asked for.
        ExpectSameBits(PartOf(with, 1, {1, 2}), PartOf(without, 1, {1, 2}));
      }
      for (const auto& [with, without] :
           {std::pair(&spoilt.dq, &plain.dq), {&spoilt.dq_rope, &plain.dq_rope}})
        ExpectSameBits(RowsOf(ConstTensor(with->view()), {0, kKey}),
                       RowsOf(ConstTensor(without->view()), {0, kKey}));
    }
  }
}

// NaN and infinities that rows see, in values and in the gradient of the output, reach what they reach in the
// reference: all of dq and dk of their rows, of dv the column that dout has them in alone, and no other head.
TEST(FlashAttentionGradFeaturesTest, VisibleValuesPropagate) {
  constexpr std::int64_t kS = 70;
  for (DType in : kFloatTypes) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
      for (const double special : {kNaN, kInfinity, -kInfinity}) {
        for (const bool in_v : {false, true}) {
          // An infinite delta times a hidden key's weight of 0 is NaN, where the reference has infinities.
          if (in_v && causal != Causal::kNone && !std::isnan(special)) continue;
          GradCall call({1, 2, 2, kS, kS, 16, 8, 24}, {.in = in, .causal = causal});
          call.FillNormal();
          // The last row sees every key: what it reaches of those near its diagonal is nothing that it does not see.
          (in_v ? call.v : call.dout).set({0, 1, in_v ? 25 : kS - 1, 7}, special);
          call.Forward();
          SCOPED_TRACE(Join(special, in_v ? " in v" : " in dout"));
          ExpectRight(Both(), call);
          ASSERT_TRUE(std::isnan(call.dq.at({0, 1, kS - 1, 3})));
          ASSERT_FALSE(std::isfinite(call.dk.at({0, 1, 5, 3})));
          ASSERT_EQ(std::isfinite(call.dv.at({0, 1, 5, 7})), in_v);
        }
      }
    }
  }
}

// A key that rows see with a score of -inf has weight 0: dv and dk are 0 there, and where some keys are hidden dq is
// that of the other keys. The reference has it behind a mask.
TEST(FlashAttentionGradFeaturesTest, KeysOfWeightZero) {
  constexpr std::int64_t kS = 70, kKey = 11, kColumn = 3;
  std::vector<GradOptions> kinds(5);
  kinds[1].causal = Causal::kTopLeft, kinds[2].causal = Causal::kBottomRight;
  kinds[2].window = AttentionWindow{.left = 40, .anchor = Causal::kBottomRight};
  kinds[3].causal = Causal::kTopLeft, kinds[3].prefix = {20};
  kinds[4].causal = Causal::kTopLeft, kinds[4].keep = 0.5f, kinds[4].slopes = true;
  for (GradOptions options : kinds) {
    for (DType in : kFloatTypes) {
      options.in = in, options.mask = {1, 1, 1, kS};
      GradCall call({1, 2, 1, kS, kS, 16, 8, 24}, options);
      call.FillNormal();
      call.mask.Fill(0), call.mask.set({0, 0, 0, kKey}, 1);
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < kS; ++i) {
          const double q = call.q.at({0, h, i, kColumn});
          call.q.set({0, h, i, kColumn}, std::abs(q) + 0.5);
        }
      }
      call.Forward();
      call.k.set({0, 0, kKey, kColumn}, -kInfinity);
      FlashAttentionGradArgs args = call.args();
      args.mask = {};
      const bool hides = options.causal != Causal::kNone;
      for (const Device& device : Both()) {
        SCOPED_TRACE(options.Name());
        for (Matrix* x : call.outputs()) x->FillNaN();
        ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
        if (hides) {
          call.ExpectRight();
          continue;
        }
        for (const Matrix* x : {&call.dk, &call.dk_rope, &call.dv}) {
          for (std::int64_t d = 0; d < x->size(3); ++d) ASSERT_EQ(x->at({0, 0, kKey, d}), 0);
        }
      }
    }
  }
}

TEST(FlashAttentionGradFeaturesTest, PositionsByIndex) {
  for (DType in : kFloatTypes) {
    ExpectRight(
        Both(), {2, 4, 2, 37, 70, 24, 16, 24},
        {.in = in, .causal = Causal::kBottomRight, .shared_rope = true, .turned = 16, .positions = true});
    GradOptions options{
        .in = in, .turned = 8, .rope_layout = RopeLayout::kInterleaved, .keep = 0.9f, .positions = true};
    options.q_ends = {30, 70}, options.kv_ends = {37, 40}, options.slopes = true;
    ExpectRight(Both(), {1, 2, 2, 70, 41, 20, 0, 8}, options);
  }
}

// A workspace of the caller's gives the same bits; one byte less is refused.
TEST(FlashAttentionGradFeaturesTest, WorkspaceOfTheCaller) {
  GradCall call({2, 4, 2, 131, 259, 24, 8, 16},
                {.in = DType::kBF16, .turned = 8, .bias = {1, 1, 131, 259}, .sinks = true});
  call.FillNormal();
  FlashAttentionGradArgs args = call.args();
  ASSERT_TRUE(IsOk(FlashAttentionGrad(Host(), args)));
  std::vector<std::vector<double>> expected;
  for (Matrix* x : call.outputs()) {
    expected.push_back(x->ToDoubles());
    x->FillNaN();
  }
  std::int64_t bytes = 0;
  ASSERT_TRUE(IsOk(FlashAttentionGradWorkspace(Host(), args, &bytes)));
  EXPECT_NE(FlashAttentionGradWorkspace(Host(), args, nullptr).message().find("bytes is null"),
            std::string::npos);
  std::vector<char> memory(static_cast<std::size_t>(bytes + 1));
  args.workspace = {memory.data() + 1, bytes};
  ASSERT_TRUE(IsOk(FlashAttentionGrad(Host(), args)));
  const auto outputs = call.outputs();
  for (std::size_t i = 0; i < outputs.size(); ++i) ExpectExactly(outputs[i]->view(), expected[i]);
  args.workspace.bytes = bytes - 1;
  const Status status = FlashAttentionGrad(Host(), args);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(std::to_string(bytes)), std::string::npos) << status.message();
}

// Keys that no query sees are not turned: memory full of NaN where they would stand reaches nothing.
TEST(FlashAttentionGradFeaturesTest, UnwrittenMemoryReachesNothing) {
  for (const Device& device : Both()) {
    for (const DType in : kFloatTypes) {
      GradOptions options{.in = in, .window = AttentionWindow{.left = 20, .right = -7}, .turned = 8};
      std::vector<std::pair<AttentionShape, GradOptions>> calls = {{{2, 4, 2, 40, 500, 24, 8, 16}, options}};
      options.q_ends = {1, 1, 35}, options.kv_ends = {60, 90, 400};
      calls.push_back({{1, 2, 1, 40, 500, 24, 0, 16}, options});
      options = {.in = in, .causal = Causal::kTopLeft, .prefix = {3, 170}, .turned = 8};
      calls.push_back({{2, 2, 1, 40, 500, 24, 0, 16}, options});
      for (const auto& [shape, of_call] : calls) {
        GradCall call(shape, of_call);
        call.FillNormal();
        call.Forward();
        FlashAttentionGradArgs args = call.args();
        std::int64_t bytes = 0;
        ASSERT_TRUE(IsOk(FlashAttentionGradWorkspace(device, args, &bytes)));
        std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes), 0xff);  // NaN, of any dtype.
        args.workspace = {memory.data(), bytes};
        ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
        call.ExpectRight();
        std::vector<std::vector<double>> first;
        for (const Matrix* x : call.outputs()) first.push_back(x->ToDoubles());
        std::fill(memory.begin(), memory.end(), std::uint8_t{0});
        ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
        const auto outputs = call.outputs();
        for (std::size_t i = 0; i < outputs.size(); ++i) ExpectExactly(outputs[i]->view(), first[i]);
      }
    }
  }
}

// A bias of -inf masks: no weight and no gradient; a row of nothing else gives none and gets none. The reference has
// a mask for it.
TEST(FlashAttentionGradFeaturesTest, BiasOfMinusInfinity) {
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
    for (DType in : kFloatTypes) {
      GradCall call(
          {1, 2, 1, 20, 50, 16, 0, 24},
          {.in = in, .causal = causal, .bias = {1, 1, 20, 50}, .sinks = true, .mask = {1, 1, 20, 50}});
      call.FillNormal();
      call.mask.Fill(0);
      for (std::int64_t j = 0; j < 50; ++j) {
        for (const std::int64_t row : {3, 7}) {
          if (row == 7 && j % 3 != 0) continue;
          call.bias.set({0, 0, row, j}, -kInfinity), call.mask.set({0, 0, row, j}, 1);
        }
      }
      call.sinks.Fill(-kInfinity);
      call.Forward();
      FlashAttentionGradArgs args = call.args();
      args.mask = {};
      ExpectRight(Both(), call, args);
      for (std::int64_t d = 0; d < 16; ++d) ASSERT_EQ(call.dq.at({0, 1, 3, d}), 0);
      for (std::int64_t j = 0; j < 50; ++j) ASSERT_EQ(call.dbias.at({0, 0, 3, j}), 0);
    }
  }
}

// A soft cap flattens scores of 1e4: the gradients of q and k vanish, that of v stays.
TEST(FlashAttentionGradFeaturesTest, SoftCapOfExtremeScores) {
  for (DType in : kFloatTypes)
    ExpectRight(Both(), {1, 1, 1, 9, 40, 16, 0, 8}, {.in = in, .scale = 1e4f, .soft_cap = 30.0f});
}

// The slope of scores far below the cap is 1, and their squares may be no floats.
TEST(FlashAttentionGradFeaturesTest, SoftCapsOfAnySize) {
  for (const float cap : {0x1p-63f, 0.3f, 3.0f, 30.0f, 1e5f, 1e8f, 1e20f, 1e30f, 0x1p126f}) {
    for (DType in : kFloatTypes)
      ExpectRight(Both(), {1, 2, 1, 17, 45, 24, 8, 16}, {.in = in, .scale = 0.7f, .soft_cap = cap});
  }
}

// A head whose sink is -inf is one without.
TEST(FlashAttentionGradFeaturesTest, SinksOfRowsWithoutKeys) {
  for (const Device& device : Both()) {
    GradCall call({1, 2, 1, 50, 20, 16, 0, 24}, {.causal = Causal::kBottomRight, .sinks = true});
    call.FillNormal();
    call.sinks.set({1}, -kInfinity);
    call.Forward();
    ExpectRight(device, call);
    EXPECT_EQ(call.dsinks.at({1}), 0);
    EXPECT_EQ(call.dq.at({0, 0, 3, 5}), 0);
  }
}

// Packed sequences, with empty ones and rows behind the last: each is as if alone, and nothing else is written.
TEST(FlashAttentionGradFeaturesTest, PackedSequences) {
  for (DType in : kFloatTypes) {
    for (Causal causal : kMasks) {
      for (std::int64_t turned : {0, 8}) {
        GradOptions options{
            .in = in, .out = in, .causal = causal, .shared_rope = turned > 0, .turned = turned};
        options.q_ends = {1, 1, 70, 70, 200}, options.kv_ends = {37, 40, 40, 101, 240};
        if (causal == Causal::kTopLeft) options.window = AttentionWindow{.left = 20};
        options.sinks = causal == Causal::kNone;
        // Of each sequence, larger than any needs; of all.
        if (causal != Causal::kTopLeft) options.bias = {5, 1, 133, 141};
        if (turned > 0) options.bias = {1, 4, 1, 139};
        GradCall call({1, 4, 2, 210, 260, 24, 8, 16}, options);
        for (Matrix* x : call.outputs()) x->FillNaN();
        call.FillNormal();
        ExpectRight(Both(), call);
        EXPECT_TRUE(std::isnan(call.dq.at({0, 0, 200, 0})));
        EXPECT_TRUE(std::isnan(call.dk.at({0, 1, 240, 0})));
        EXPECT_TRUE(std::isnan(call.dk_rope.at({0, 0, 259, 0})));
      }
    }
  }
}

// Long enough for packed queries and several blocks of keys.
TEST(FlashAttentionGradFeaturesTest, LongPackedSequences) {
  for (DType in : kFloatTypes) {
    GradOptions options{.in = in, .causal = Causal::kBottomRight};
    options.q_ends = {333, 350, 1050}, options.kv_ends = {340, 700, 1400};
    ExpectRight({Host()}, {1, 2, 1, 1050, 1400, 8, 0, 8}, options);
  }
}

// One latent serves as keys and values of all heads.
TEST(FlashAttentionGradFeaturesTest, SharedLatentOfKeysAndValues) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      GradCall call({1, 8, 1, 35, 70, 48, 8, 48}, {.in = in, .causal = Causal::kBottomRight});
      call.FillNormal();
      Assign(call.v.view(), call.k.ToDoubles());
      call.Forward();
      FlashAttentionGradArgs args = call.args();
      args.v = args.k;
      ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
      call.ExpectRight();
    }
  }
}

// A packed batch without sequences has ends of 0, forward and backward: rows of no sequence stay as they are.
TEST(FlashAttentionGradFeaturesTest, NoSequences) {
  for (const Device& device : Both()) {
    for (const auto& [sq, skv] : {std::pair(0, 0), {5, 7}, {0, 7}, {5, 0}}) {
      for (const bool features : {false, true}) {
        GradOptions options{.causal = Causal::kBottomRight, .q_ends = {0}, .kv_ends = {0}};
        if (features) {
          options.turned = 4, options.bias = {1, 4, sq, skv}, options.sinks = options.slopes = true;
          options.mask = {1, 1, sq, skv}, options.soft_cap = 5.0f, options.keep = 0.5f;
        }
        GradCall call({1, 4, 2, sq, skv, 24, 0, 16}, options);
        SCOPED_TRACE(call.shape.Name() + " " + call.options.Name());
        call.FillNormal();
        for (Matrix* x : {&call.out, &call.lse}) x->FillNaN();  // Of rows of no sequence nothing is read.
        const FlashAttentionGradArgs args = call.args();
        Matrix out(DType::kF32, {1, 4, sq, 16}), lse(DType::kF32, {1, 4, sq});
        ASSERT_TRUE(IsOk(FlashAttention(device, ForwardOf(args, out.view(), lse.view()))));
        ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
        for (const Matrix* x : {&out, &lse, &call.dq, &call.dk, &call.dv}) {
          for (const double value : x->ToDoubles()) ASSERT_TRUE(std::isnan(value));
          ExpectGuards(*x);
        }
        if (!features) continue;
        for (const Matrix* x : {&call.dbias, &call.dsinks}) {  // Sums of nothing.
          for (const double value : x->ToDoubles()) ASSERT_EQ(value, 0);
        }
      }
    }
  }
}

TEST(FlashAttentionGradFeaturesTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  struct Case {
    AttentionShape shape;
    GradOptions options;
  };
  const Case cases[] = {
      {{1, 4, 2, 210, 260, 24, 8, 16},
       {.causal = Causal::kBottomRight, .q_ends = {50, 210}, .kv_ends = {100, 260}, .turned = 8}},
      {{2, 4, 2, 131, 700, 24, 0, 16},
       {.in = DType::kBF16, .bias = {1, 1, 131, 1}, .sinks = true, .soft_cap = 5.0f}},
      {{2, 4, 2, 131, 259, 24, 0, 16}, {.in = DType::kF16, .bias = {1, 4, 1, 259}}},
      {{2, 4, 2, 131, 700, 24, 0, 16},
       {.in = DType::kF16,
        .causal = Causal::kBottomRight,
        .window = AttentionWindow{.left = 90},
        .prefix = {40, 300},
        .slopes = true}},
      {{2, 4, 2, 131, 259, 24, 8, 16},
       {.in = DType::kBF16, .mask = {2, 1, 131, 259}, .slopes = true, .root = true, .keep = 0.75f}},
      {{1, 4, 2, 210, 500, 24, 0, 16},
       {.window = AttentionWindow{.left = 30, .right = 5, .anchor = Causal::kTopLeft},
        .prefix = {17, 90},
        .q_ends = {50, 210},
        .kv_ends = {200, 500},
        .mask = {2, 4, 160, 300},
        .keep = 0.5f}}};
  for (const Case& c : cases) {
    GradCall first(c.shape, c.options), call(c.shape, c.options);
    first.FillNormal();
    for (Matrix* x : first.outputs()) x->FillNaN();  // Not all are asked for.
    ASSERT_TRUE(IsOk(FlashAttentionGrad(Host({.threads = 1}), first.args())));
    call.CopyInputs(first);
    for (int threads : kThreadCounts) {
      for (Matrix* x : call.outputs()) x->FillNaN();
      ASSERT_TRUE(IsOk(FlashAttentionGrad(Host({.threads = threads}), call.args())));
      const auto outputs = call.outputs(), expected = first.outputs();
      for (std::size_t j = 0; j < outputs.size(); ++j)
        ExpectSameBits(outputs[j]->view(), expected[j]->view());
    }
  }
}

// Random shapes and features; a failure prints its seed, and CUBIST_TEST_SEED runs it again.
TEST(FlashAttentionGradFeaturesTest, RandomCalls) {
  Random random;
  for (int i = 0; i < 60; ++i) {
    const auto yes = [&] { return random.Integer(0, 1) == 1; };
    const std::int64_t kv_heads = random.Integer(1, 2), group = random.Integer(1, 3);
    const AttentionShape shape = {random.Integer(1, 2),
                                  kv_heads * group,
                                  kv_heads,
                                  random.Integer(1, 150),
                                  random.Integer(0, 300),
                                  random.Integer(1, 40),
                                  yes() ? 2 * random.Integer(1, 12) : 0,
                                  random.Integer(1, 40)};
    GradOptions o;
    o.in = kFloatTypes[i % 3];
    if (yes()) o.out = o.in;
    if (yes()) o.forward_out = o.in;
    o.causal = static_cast<Causal>(random.Integer(0, 2));
    o.window = RandomWindow(random);
    if (yes()) o.soft_cap = static_cast<float>(random.Uniform(1, 40));
    if (yes()) {
      o.bias = {yes() ? shape.batch : 1, yes() ? shape.q_heads : 1, yes() ? shape.sq : 1,
                yes() ? shape.skv : 1};
    }
    o.sinks = yes(), o.shared_rope = yes();
    o.turned = shape.dr > 0 ? (yes() ? shape.dr : 0) : shape.dqk / 2 * 2 * random.Integer(0, 1);
    o.rope_layout = static_cast<RopeLayout>(random.Integer(0, 2));
    if (yes()) o.layout = kBsnd;
    if (yes()) o.keep = static_cast<float>(random.Uniform(0.3, 0.95));
    o.slopes = yes(), o.root = yes(), o.positions = yes();
    if (!o.positions) o.q_offset = random.Integer(0, 9), o.k_offset = random.Integer(0, 9);
    if (yes()) o.mask = {yes() ? shape.batch : 1, yes() ? shape.q_heads : 1, shape.sq, yes() ? shape.skv : 1};
    if (shape.batch == 1 && o.bias.empty() && o.mask.empty() && yes())
      o.q_ends = RandomEnds(random, shape.sq), o.kv_ends = RandomEnds(random, shape.skv);
    const auto sequences = o.q_ends.empty() ? shape.batch : static_cast<std::int64_t>(o.q_ends.size());
    const bool prefixed = yes();
    for (std::int64_t b = 0; prefixed && b < sequences; ++b) o.prefix.push_back(random.Integer(0, shape.skv));
    GradCall call(shape, o);
    call.FillNormal(random);
    ExpectRight(i % 2 == 0 ? Host() : NpuWithData(Ascend910B2()), call);
  }
}

}  // namespace
}  // namespace cubist::testing
