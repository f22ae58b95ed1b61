// What FlashAttention does to scores, rows and keys besides masking: against the reference, on the host and on the model.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "tests/kernels/attention_features_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

std::vector<Device> Both() { return {Host(), NpuWithData(Ascend910B2())}; }

TEST(FlashAttentionFeaturesTest, RotaryPositions) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (RopeLayout layout :
           {RopeLayout::kHalf, RopeLayout::kInterleaved, RopeLayout::kInterleavedToHalf}) {
        for (Causal causal : {Causal::kNone, Causal::kBottomRight}) {
          // Rope parts of their own; part of q and k; all of q and k; a context behind the queries.
          ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 16, 24},
                               .in = in,
                               .causal = causal,
                               .turned = 16,
                               .rope_layout = layout,
                               .q_offset = 33});
          ExpectRight(device, {.shape = {1, 4, 2, 70, 37, 40, 0, 8},
                               .in = in,
                               .causal = causal,
                               .turned = 6,
                               .rope_layout = layout,
                               .k_offset = 2,
                               .layout = kBsnd});
          ExpectRight(device, {.shape = {1, 2, 2, 33, 35, 18, 0, 8},
                               .in = in,
                               .causal = causal,
                               .turned = 18,
                               .rope_layout = layout});
        }
      }
    }
  }
}

// What is not looped over is drawn, so that nothing comes only together with something else.
TEST(FlashAttentionFeaturesTest, BiasSoftCapAndSinks) {
  const std::vector<std::vector<std::int64_t>> biases = {
      {}, {2, 4, 37, 70}, {1, 4, 1, 70}, {1, 1, 37, 70}, {2, 1, 37, 1}};
  Random random;
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (const auto& bias : biases) {
        for (const std::optional<float> cap : {std::optional<float>(), std::optional<float>(2.5f)}) {
          for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
            ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 0, 16},
                                 .in = in,
                                 .causal = causal,
                                 .scale = random.Integer(0, 2) == 0 ? std::optional(-0.7f) : std::nullopt,
                                 .soft_cap = cap,
                                 .bias = bias,
                                 .sinks = random.Integer(0, 1) == 1});
          }
        }
      }
    }
  }
}

TEST(FlashAttentionFeaturesTest, BooleanMasks) {
  const std::vector<std::vector<std::int64_t>> masks = {{2, 4, 37, 70}, {1, 4, 37, 70}, {2, 1, 37, 70},
                                                        {1, 1, 37, 70}, {2, 1, 1, 70},  {1, 4, 37, 1}};
  const std::optional<float> scales[] = {{}, {}, -0.7f, 0.0f};
  Random random;
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (const auto& mask : masks) {
        for (const double masked : {0.3, 0.97}) {
          for (const Layout& layout : {Layout{}, kBsnd}) {
            ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 0, 16},
                                 .in = in,
                                 .causal = kMasks[random.Integer(0, 2)],
                                 .scale = scales[random.Integer(0, 3)],
                                 .soft_cap = random.Integer(0, 2) == 0 ? std::optional(2.5f) : std::nullopt,
                                 .sinks = random.Integer(0, 2) == 0,
                                 .layout = layout,
                                 .mask = mask,
                                 .masked = masked});
          }
        }
      }
    }
  }
}

// Every mask, layout and dtype where sizes begin, end and meet the edges of tiles: each on the host and on the model,
// at some of the lengths.
TEST(FlashAttentionFeaturesTest, EveryMaskAndLayoutAtTheEdges) {
  constexpr std::int64_t kLengths[][2] = {{1, 1},  {1, 33},   {16, 16},  {17, 15},
                                          {64, 1}, {97, 129}, {130, 127}};
  int i = 0;
  for (const auto& [sq, skv] : kLengths) {
    for (const char* mask : {"none", "top left", "bottom right", "window", "band", "prefix", "boolean"}) {
      for (const char* layout : {"BNSD", "BSND", "packed"}) {
        for (DType in : kFloatTypes) {
          const std::string of = mask;
          const std::int64_t columns[] = {1, 16, 17, 72};
          Features f{.shape = {2, 2, 1, sq, skv, columns[i % 4], 0, columns[i / 4 % 4]}, .in = in};
          if (of == "top left") f.causal = Causal::kTopLeft;
          if (of == "bottom right") f.causal = Causal::kBottomRight;
          if (of == "window") f.window = AttentionWindow{.left = 5, .anchor = Causal::kTopLeft};
          if (of == "band") f.window = AttentionWindow{.left = 16, .right = -1};
          if (of == "prefix") f.causal = Causal::kTopLeft, f.prefix = {skv / 2, skv};
          if (of == "boolean") f.mask = {i % 2 == 0 ? 2 : 1, 1, sq, skv};
          if (layout == std::string("BSND")) f.layout = kBsnd;
          if (layout == std::string("packed")) {  // Two sequences, the first one of a row and a key.
            f.shape.batch = 1;
            f.q_ends = {1, sq}, f.kv_ends = {1, skv};
            if (of == "prefix") f.prefix = {1, skv / 2};
          }
          SCOPED_TRACE(Join(mask, " ", layout));
          // 5 has no factor in common with the columns, nor with what the loops inside of the lengths come to.
          ExpectRight(i++ % 5 < 2 ? NpuWithData(Ascend910B2()) : Host(), f);
        }
      }
    }
  }
}

// Rows whose keys are all hidden give 0 and -inf, and no NaN, whatever is behind the mask.
TEST(FlashAttentionFeaturesTest, AFullyMaskedRowGivesZero) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      Random random;
      Features features{.shape = {1, 2, 1, 50, 90, 16, 0, 24}, .in = in, .mask = {1, 1, 50, 90}, .masked = 1};
      FeaturesCall call(features, random);
      for (std::int64_t j = 0; j < 90; ++j) call.mask.set({0, 0, 7, j}, j == 80 ? 0 : 1);
      for (std::int64_t j = 0; j < 90; j += 7) call.k.set({0, 0, j, 3}, kNaN);
      ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
      call.ExpectRight();
      EXPECT_EQ(call.out.at({0, 1, 6, 5}), 0);
      EXPECT_EQ(call.lse.at({0, 1, 6}), -kInfinity);
      EXPECT_EQ(call.out.at({0, 1, 7, 5}), call.v.at({0, 0, 80, 5}));
    }
  }
}

// Values of NaN behind windows, prefixes and masks reach no row that does not see them, of packed keys or not.
TEST(FlashAttentionFeaturesTest, HiddenValuesReachNoRow) {
  const AttentionWindow around{.left = 9, .right = 14};
  const Features calls[] = {
      {.shape = {1, 2, 2, 300, 290, 24, 0, 16}, .window = around},
      {.shape = {1, 2, 1, 300, 290, 24, 8, 16}, .causal = Causal::kBottomRight, .mask = {1, 1, 300, 290}},
      {.shape = {2, 2, 1, 300, 300, 24, 0, 16},
       .sinks = true,
       .turned = 8,
       .mask = {2, 1, 1, 300},
       .keep = 0.5f},
      {.shape = {1, 2, 2, 210, 260, 24, 0, 16},
       .causal = Causal::kTopLeft,
       .q_ends = {50, 210},
       .kv_ends = {100, 260},
       .mask = {1, 2, 160, 160},
       .masked = 0.9,
       .slopes = 1},
      {.shape = {1, 1, 1, 5, 4100, 24, 0, 16}, .window = around, .soft_cap = 3.0f}};
  for (const Device& device : Both()) {
    for (Features features : calls) {
      for (DType in : kFloatTypes) {
        features.in = in;
        SCOPED_TRACE(features.Name());
        Random random;
        FeaturesCall call(features, random);
        for (std::int64_t j = 3; j < features.shape.skv; j += 61) {
          call.v.set({0, 0, j, 5}, j % 2 == 0 ? kNaN : kInfinity);
          if (features.mask.size() > 2 && features.mask[2] == 1) call.mask.set({0, 0, 0, j}, 1);
        }
        ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
        call.ExpectRight();
      }
    }
  }
}

TEST(FlashAttentionFeaturesTest, LinearBiases) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (int slopes : {1, 2}) {
        for (bool root : {false, true}) {
          ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 0, 16},
                               .in = in,
                               .causal = root ? Causal::kNone : Causal::kBottomRight,
                               .slopes = slopes,
                               .root = root});
          ExpectRight(device, {.shape = {2, 4, 2, 70, 37, 24, 8, 16},
                               .in = in,
                               .soft_cap = 5.0f,
                               .bias = {1, 1, 70, 37},
                               .slopes = slopes,
                               .root = root,
                               .alibi_offset = root ? -100 : 3});
        }
      }
    }
  }
}

TEST(FlashAttentionFeaturesTest, Dropout) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (float keep : {0.9f, 0.25f, 1e-9f}) {
        ExpectRight(device, {.shape = {2, 4, 2, 37, 131, 24, 0, 16}, .in = in, .keep = keep});
        ExpectRight(device, {.shape = {1, 2, 2, 150, 150, 16, 8, 24},
                             .in = in,
                             .causal = Causal::kBottomRight,
                             .sinks = true,
                             .keep = keep});
      }
    }
  }
}

// The share of kept weights is what was asked for, and another offset keeps others: v is 1 in one column for each key.
TEST(FlashAttentionFeaturesTest, DropoutKeepsItsShare) {
  constexpr std::int64_t kRows = 300, kKeys = 200;
  Matrix q(DType::kF32, {1, 1, kRows, 1}), k(DType::kF32, {1, 1, kKeys, 1}),
      v(DType::kF32, {1, 1, kKeys, kKeys});
  q.Fill(0), k.Fill(0), v.Fill(0);
  for (std::int64_t j = 0; j < kKeys; ++j) v.set({0, 0, j, j}, 1);
  const auto kept = [&](std::uint64_t seed, std::uint64_t offset) {
    Matrix out(DType::kF32, {1, 1, kRows, kKeys});
    FlashAttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()};
    args.dropout = {0.8f, seed, offset};
    EXPECT_TRUE(IsOk(FlashAttention(Host(), args)));
    return out.ToDoubles();
  };
  const std::vector<double> first = kept(1, 0);
  const auto count =
      static_cast<double>(std::count_if(first.begin(), first.end(), [](double x) { return x > 0; }));
  EXPECT_NEAR(count, 0.8 * kRows * kKeys, 5 * std::sqrt(0.16 * kRows * kKeys));
  EXPECT_EQ(first, kept(1, 0));
  for (const auto& other : {kept(2, 0), kept(1, 1)}) {
    std::int64_t same = 0;
    for (std::size_t e = 0; e < first.size(); ++e) same += (first[e] > 0) == (other[e] > 0) ? 1 : 0;
    EXPECT_NEAR(static_cast<double>(same), 0.68 * kRows * kKeys, 5 * std::sqrt(0.22 * kRows * kKeys));
  }
}

TEST(FlashAttentionFeaturesTest, RotaryPositionsByIndex) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (int positions : {1, 2}) {
        ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 16, 24},
                             .in = in,
                             .causal = Causal::kBottomRight,
                             .turned = 16,
                             .positions = positions});
        ExpectRight(device, {.shape = {1, 2, 1, 90, 90, 24, 0, 16},
                             .in = in,
                             .turned = 10,
                             .rope_layout = RopeLayout::kInterleaved,
                             .q_ends = {20, 20, 81},
                             .kv_ends = {25, 30, 90},
                             .layout = kBsnd,
                             .positions = positions});
      }
    }
  }
}

// A call in its caller's memory: the same bits, nothing written beside it, and an error where it is too small.
TEST(FlashAttentionFeaturesTest, WorkspaceOfTheCaller) {
  for (const Device& device : Both()) {
    Features features{.shape = {1, 2, 1, 300, 260, 24, 16, 16}, .in = DType::kBF16, .turned = 16};
    for (const std::int64_t sq : {300, 2}) {  // Packed and turned keys; parts of the keys.
      features.shape.sq = sq, features.shape.skv = sq == 2 ? 5000 : 260;
      Random random;
      FeaturesCall call(features, random);
      FlashAttentionArgs args = call.args();
      ASSERT_TRUE(IsOk(FlashAttention(device, args)));
      const std::vector<double> out = call.out.ToDoubles(), lse = call.lse.ToDoubles();
      std::int64_t bytes = 0;
      ASSERT_TRUE(IsOk(FlashAttentionWorkspace(device, args, &bytes)));
      EXPECT_NE(FlashAttentionWorkspace(device, args, nullptr).message().find("bytes is null"),
                std::string::npos);
      ASSERT_GT(bytes, 0);
      constexpr std::size_t kGuard = 64;
      for (const std::size_t misaligned : {0u, 1u, 63u}) {
        std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes) + 2 * kGuard, 0xa5);
        args.workspace = {memory.data() + misaligned, bytes - 1};
        call.out.FillNaN(), call.lse.FillNaN();
        const Status status = FlashAttention(device, args);
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
        EXPECT_EQ(status.message(),
                  Join("flash_attention: workspace has ", bytes - 1, " bytes, needs ", bytes));
        EXPECT_TRUE(std::isnan(call.out.at({0, 0, 0, 0})));
        args.workspace.bytes = bytes;
        ASSERT_TRUE(IsOk(FlashAttention(device, args)));
        ExpectExactly(call.out.view(), out);
        ExpectExactly(call.lse.view(), lse);
        for (std::size_t at = 0; at < memory.size(); ++at) {
          if (at < misaligned || at >= misaligned + static_cast<std::size_t>(bytes)) {
            ASSERT_EQ(memory[at], 0xa5) << at;
          }
        }
      }
      args.workspace = {call.out.view().data, bytes};
      EXPECT_FALSE(FlashAttention(device, args).ok());
    }
  }
}

// Rows without keys have only their sink: out = 0, and lse is the sink.
TEST(FlashAttentionFeaturesTest, ASinkAloneGivesZero) {
  for (const Device& device : Both()) {
    Random random;
    Features features{.shape = {1, 2, 1, 50, 20, 16, 0, 24}, .causal = Causal::kBottomRight, .sinks = true};
    FeaturesCall call(features, random);
    call.sinks.set({1}, -kInfinity);
    ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
    call.ExpectRight();
    EXPECT_EQ(call.out.at({0, 0, 3, 5}), 0);
    EXPECT_EQ(call.lse.at({0, 0, 3}), call.sinks.at({0}));
    EXPECT_EQ(call.lse.at({0, 1, 3}), -kInfinity);
  }
}

// A soft cap keeps scores of 1e4 in bounds; NaN stays NaN.
TEST(FlashAttentionFeaturesTest, SoftCapOfExtremeScores) {
  for (const Device& device : Both()) {
    Random random;
    Features features{.shape = {1, 1, 1, 9, 40, 16, 0, 8}, .scale = 1e4f, .soft_cap = 30.0f};
    FeaturesCall call(features, random);
    call.q.set({0, 0, 4, 0}, kNaN);
    ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
    call.ExpectRight();
    EXPECT_TRUE(std::isnan(call.out.at({0, 0, 4, 0})));
  }
}

// Scores far below the cap keep their digits, those about it and above it too.
TEST(FlashAttentionFeaturesTest, SoftCapsOfAnySize) {
  for (const float cap :
       {0x1p-63f, 1e-3f, 0.3f, 1.0f, 3.0f, 30.0f, 1e3f, 1e5f, 1e7f, 1e8f, 1e20f, 1e30f, 0x1p126f}) {
    for (const Device& device : Both()) {
      for (DType in : kFloatTypes) {
        for (const float scale : {0.2f, -3.0f})
          ExpectRight(device,
                      {.shape = {1, 2, 1, 17, 45, 24, 8, 16}, .in = in, .scale = scale, .soft_cap = cap});
      }
    }
  }
}

TEST(FlashAttentionFeaturesTest, SoftCapsOnEverySimdTarget) {
  ForEachSimdTarget([] {
    for (const float cap : {2.0f, 1e8f}) {
      for (DType in : kFloatTypes)
        ExpectRight(Host(), {.shape = {1, 2, 1, 17, 45, 24, 8, 16}, .in = in, .soft_cap = cap});
    }
  });
}

// Packed sequences, with empty ones and rows behind the last: each is as if alone, and nothing else is written.
TEST(FlashAttentionFeaturesTest, PackedSequences) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
        for (std::int64_t turned : {0, 8}) {
          Features features{
              .shape = {1, 4, 2, 210, 260, 24, 8, 16}, .in = in, .causal = causal, .turned = turned};
          features.q_ends = {1, 1, 70, 70, 200}, features.kv_ends = {37, 40, 40, 101, 240};
          if (causal == Causal::kTopLeft) features.window = AttentionWindow{.left = 20};
          if (turned > 0) {
            features.mask = {causal == Causal::kNone ? 5 : 1, 4, 130, 139}, features.slopes = 2;
            features.keep = 0.75f;
          }
          // Of each sequence, larger than any needs; of all.
          if (causal != Causal::kTopLeft) features.bias = {5, 1, 133, 141};
          if (turned > 0) features.bias = {1, 4, 1, 139};
          SCOPED_TRACE(features.Name());
          Random random;
          FeaturesCall call(features, random);
          ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
          call.ExpectRight();
          EXPECT_TRUE(std::isnan(call.out.at({0, 0, 200, 0})));
          EXPECT_TRUE(std::isnan(call.lse.at({0, 3, 209})));
        }
      }
    }
  }
}

// Few query rows and many keys: cores take parts of the keys; heads of a group read them together.
TEST(FlashAttentionFeaturesTest, Decoding) {
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      for (const AttentionShape& shape :
           {AttentionShape{1, 1, 1, 1, 5000, 24, 0, 16}, AttentionShape{1, 4, 2, 1, 4100, 16, 8, 24},
            AttentionShape{1, 2, 2, 7, 3333, 16, 0, 24}, AttentionShape{2, 6, 2, 1, 37, 16, 8, 8},
            AttentionShape{1, 8, 1, 3, 2100, 24, 0, 8}}) {
        for (Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
          ExpectRight(device, {.shape = shape, .in = in, .causal = causal, .layout = kBsnd});
        }
        ExpectRight(device, {.shape = shape, .in = in, .window = AttentionWindow{.left = 2500, .right = -3}});
        ExpectRight(device, {.shape = shape, .in = in, .window = AttentionWindow{.right = -6000}});
        ExpectRight(device, {.shape = shape, .in = in, .soft_cap = 3.0f, .sinks = true});
      }
    }
  }
}

TEST(FlashAttentionFeaturesTest, DecodingReadsSharedKeysOnce) {
  const auto args = [](std::int64_t heads) {
    FlashAttentionArgs args;
    args.q = ConstTensor(nullptr, DType::kBF16, {1, heads, 1, 576});
    args.k = ConstTensor(nullptr, DType::kBF16, {1, 1, 8192, 576});
    args.v = ConstTensor(nullptr, DType::kBF16, {1, 1, 8192, 512});
    args.out = Tensor(nullptr, DType::kBF16, {1, heads, 1, 512});
    return args;
  };
  const std::int64_t keys = 8192 * (576 + 512) * 2;
  Profile one, many;
  ASSERT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args(1), &one)));
  ASSERT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args(16), &many)));
  EXPECT_GE(one.gm_read, keys);
  EXPECT_LT(many.gm_read, 2 * keys);
  EXPECT_GT(one.cores_used, 4);
}

TEST(FlashAttentionFeaturesTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const Features calls[] = {{.shape = {1, 2, 2, 3, 4100, 24, 0, 16}, .in = DType::kBF16, .sinks = true},
                            {.shape = {1, 4, 2, 210, 260, 24, 8, 16},
                             .causal = Causal::kBottomRight,
                             .turned = 8,
                             .q_ends = {50, 210},
                             .kv_ends = {100, 260},
                             .mask = {2, 1, 160, 160},
                             .slopes = 1,
                             .keep = 0.5f}};
  for (const Features& features : calls) {
    Random random;
    FeaturesCall call(features, random);
    ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = 1}), call.args())));
    const std::vector<double> out = call.out.ToDoubles(), lse = call.lse.ToDoubles();
    for (int threads : kThreadCounts) {
      call.out.FillNaN(), call.lse.FillNaN();
      ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = threads}), call.args())));
      ExpectExactly(call.out.view(), out);
      ExpectExactly(call.lse.view(), lse);
    }
  }
}

// Random shapes and features; a failure prints its seed, and CUBIST_TEST_SEED runs it again.
TEST(FlashAttentionFeaturesTest, RandomCalls) {
  Random random;
  for (int i = 0; i < 60; ++i) {
    const auto yes = [&] { return random.Integer(0, 1) == 1; };
    Features f;
    const std::int64_t kv_heads = random.Integer(1, 2), group = random.Integer(1, 3);
    f.shape = {random.Integer(1, 2),
               kv_heads * group,
               kv_heads,
               random.Integer(1, 150),
               random.Integer(0, 300),
               random.Integer(1, 40),
               yes() ? 2 * random.Integer(1, 12) : 0,
               random.Integer(1, 40)};
    f.in = kFloatTypes[i % 3];
    f.causal = static_cast<Causal>(random.Integer(0, 2));
    f.window = RandomWindow(random);
    if (random.Integer(0, 2) == 0) {
      f.shape.batch = 1;
      f.q_ends = RandomEnds(random, f.shape.sq), f.kv_ends = RandomEnds(random, f.shape.skv);
    }
    const auto sequences = f.q_ends.empty() ? f.shape.batch : static_cast<std::int64_t>(f.q_ends.size());
    const bool prefixed = yes();
    for (std::int64_t b = 0; prefixed && b < sequences; ++b)
      f.prefix.push_back(random.Integer(0, f.shape.skv));
    if (yes()) f.soft_cap = static_cast<float>(random.Uniform(1, 40));
    if (yes()) f.bias = {1, yes() ? f.shape.q_heads : 1, yes() ? f.shape.sq : 1, f.shape.skv};
    f.sinks = yes();
    f.turned = f.shape.dr > 0 ? (yes() ? f.shape.dr : 0) : f.shape.dqk / 2 * 2 * random.Integer(0, 1);
    f.rope_layout = static_cast<RopeLayout>(random.Integer(0, 2));
    f.q_offset = random.Integer(0, 9), f.k_offset = random.Integer(0, 9);
    if (yes()) f.layout = kBsnd;
    if (yes()) {
      f.mask = {yes() ? sequences : 1, yes() ? f.shape.q_heads : 1, yes() ? f.shape.sq : 1,
                yes() ? f.shape.skv : 1};
      f.masked = random.Uniform(0, 1);
    }
    f.slopes = static_cast<int>(random.Integer(0, 2)), f.root = yes();
    if (yes()) f.alibi_offset = random.Integer(-50, 50);
    if (yes()) f.keep = static_cast<float>(random.Uniform(0.1, 1));
    if (f.turned > 0 && yes()) {
      f.positions = static_cast<int>(random.Integer(1, 2)), f.q_offset = f.k_offset = 0;
    }
    ExpectRight(i % 2 == 0 ? Host() : NpuWithData(Ascend910B2()), f);
  }
}

}  // namespace
}  // namespace cubist::testing
