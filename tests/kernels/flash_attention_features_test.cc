// What FlashAttention does to scores, rows and keys besides masking: against the reference, on the host and on the model.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "reference/attention.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// What a call asks for.
struct Features {
  AttentionShape shape;
  DType in = DType::kF32;
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  std::optional<float> scale = {}, soft_cap = {};
  std::vector<std::int64_t> bias = {};  // Sizes; none where empty.
  bool sinks = false;
  std::int64_t turned = 0;  // Columns; those of the rope parts, or the first of q and k.
  RopeLayout rope_layout = RopeLayout::kHalf;
  std::int64_t q_offset = 0, k_offset = 0;
  std::vector<std::int64_t> q_ends = {}, kv_ends = {};
  Layout layout = {};

  std::string Name() const {
    return Join(shape.Name(), " ", NameOf(in), " causal ", static_cast<int>(causal), window ? " window" : "",
                soft_cap ? Join(" cap ", *soft_cap) : "", bias.empty() ? "" : " bias", sinks ? " sinks" : "",
                " turned ", turned, " layout ", static_cast<int>(rope_layout), " sequences ", q_ends.size());
  }
};

class Call {
 public:
  Call(const Features& f, Random& random)
      : f_(f),
        q(f.in, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dqk}, f.layout),
        k(f.in, {f.shape.batch, f.shape.kv_heads, f.shape.skv, f.shape.dqk}, f.layout),
        v(f.in, {f.shape.batch, f.shape.kv_heads, f.shape.skv, f.shape.dv}, f.layout),
        q_rope(f.in, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dr}, f.layout),
        k_rope(f.in, {f.shape.batch, 1, f.shape.skv, f.shape.dr}, f.layout),
        bias(f.in, {Size(0), Size(1), Size(2), Size(3)}, f.layout),
        sinks(DType::kF32, {f.shape.q_heads}),
        cos(DType::kF32, {Positions(), f.turned / 2}, f.layout),
        sin(DType::kF32, {Positions(), f.turned / 2}, f.layout),
        out(DType::kF32, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dv}, f.layout),
        lse(DType::kF32, {f.shape.batch, f.shape.q_heads, f.shape.sq}) {
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &bias, &sinks}) x->FillNormal(random);
    for (std::int64_t p = 0; p < Positions(); ++p) {
      for (std::int64_t i = 0; i < f.turned / 2; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(100, -2.0 * static_cast<double>(i) / static_cast<double>(f.turned));
        cos.set({p, i}, std::cos(angle)), sin.set({p, i}, std::sin(angle));
      }
    }
  }

  FlashAttentionArgs args() {
    FlashAttentionArgs args{
        .q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.view()};
    if (f_.shape.dr > 0) args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
    args.scale = f_.scale, args.causal = f_.causal, args.window = f_.window, args.soft_cap = f_.soft_cap;
    if (!f_.bias.empty()) args.bias = bias.view();
    if (f_.sinks) args.sinks = sinks.view();
    if (f_.turned > 0) args.rope = {cos.view(), sin.view(), f_.rope_layout, f_.q_offset, f_.k_offset};
    args.lengths = {f_.q_ends, f_.kv_ends};
    return args;
  }

  // Every sequence by itself.
  void ExpectRight() {
    const std::size_t count = std::max<std::size_t>(f_.q_ends.size(), 1);
    Range rows{0, f_.shape.sq}, keys{0, f_.shape.skv};
    for (std::size_t i = 0; i < count; ++i) {
      if (!f_.q_ends.empty()) {
        rows = {i == 0 ? 0 : f_.q_ends[i - 1], f_.q_ends[i]},
        keys = {i == 0 ? 0 : f_.kv_ends[i - 1], f_.kv_ends[i]};
      }
      reference::AttentionArgs args = ReferenceArgs(rows, keys);
      const auto result = reference::Attention(args, reference::AllRows(args));
      ExpectClose(Part(out.view(), rows), result.out, reference::OutBounds(args, result, DType::kF32));
      ExpectClose(Part(lse.view(), rows), result.lse, reference::LseBounds(args, result));
    }
    for (const Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &bias, &sinks, &cos, &sin, &out, &lse}) {
      EXPECT_TRUE(x->CheckGuards());
    }
  }

 private:
  std::int64_t Size(std::size_t d) const { return f_.bias.empty() ? 0 : f_.bias[d]; }
  std::int64_t Positions() const {
    return f_.turned == 0 ? 0 : std::max(f_.shape.sq + f_.q_offset, f_.shape.skv + f_.k_offset);
  }
  template <class T>
  static T Part(T x, Range rows) {
    using Byte = std::conditional_t<std::is_same_v<T, Tensor>, char, const char>;
    x.data = static_cast<Byte*>(x.data) + rows.begin * x.stride(2) * SizeOf(x.dtype);
    x.sizes[2] = rows.size();
    return x;
  }
  reference::AttentionArgs ReferenceArgs(Range rows, Range keys) {
    reference::AttentionArgs args{.q = Part(ConstTensor(q.view()), rows),
                                  .k = Part(ConstTensor(k.view()), keys),
                                  .v = Part(ConstTensor(v.view()), keys)};
    if (f_.shape.dr > 0) {
      args.q_rope = Part(ConstTensor(q_rope.view()), rows),
      args.k_rope = Part(ConstTensor(k_rope.view()), keys);
    }
    args.scale = f_.scale, args.mask = static_cast<reference::Mask>(f_.causal);
    if (f_.window) {
      args.left = f_.window->left, args.right = f_.window->right;
      args.window_anchor = static_cast<reference::Mask>(f_.window->anchor);
    }
    args.soft_cap = f_.soft_cap.value_or(0);
    if (!f_.bias.empty()) args.bias = bias.view();
    if (f_.sinks) args.sinks = sinks.view();
    if (f_.turned > 0) {
      args.cos = cos.view(), args.sin = sin.view();
      args.interleaved = f_.rope_layout != RopeLayout::kHalf;
      args.q_offset = f_.q_offset, args.k_offset = f_.k_offset;
    }
    return args;
  }

  Features f_;

 public:
  Matrix q, k, v, q_rope, k_rope, bias, sinks, cos, sin, out, lse;
};

void ExpectRight(const Device& device, const Features& features) {
  SCOPED_TRACE(features.Name());
  Random random;
  Call call(features, random);
  ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
  call.ExpectRight();
}

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

TEST(FlashAttentionFeaturesTest, BiasSoftCapAndSinks) {
  const std::vector<std::vector<std::int64_t>> biases = {
      {}, {2, 4, 37, 70}, {1, 4, 1, 70}, {1, 1, 37, 70}, {2, 1, 37, 1}};
  for (const Device& device : Both()) {
    for (DType in : kFloatTypes) {
      int i = 0;
      for (const auto& bias : biases) {
        for (const std::optional<float> cap : {std::optional<float>(), std::optional<float>(2.5f)}) {
          ++i;
          ExpectRight(device, {.shape = {2, 4, 2, 37, 70, 24, 0, 16},
                               .in = in,
                               .causal = i % 2 == 0 ? Causal::kNone : Causal::kBottomRight,
                               .scale = i % 3 == 0 ? std::optional<float>(-0.7f) : std::nullopt,
                               .soft_cap = cap,
                               .bias = bias,
                               .sinks = i % 4 < 2});
        }
      }
    }
  }
}

// Rows without keys have only their sink: out = 0, and lse is the sink.
TEST(FlashAttentionFeaturesTest, ASinkAloneGivesZero) {
  for (const Device& device : Both()) {
    Random random;
    Features features{.shape = {1, 2, 1, 50, 20, 16, 0, 24}, .causal = Causal::kBottomRight, .sinks = true};
    Call call(features, random);
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
    Call call(features, random);
    call.q.set({0, 0, 4, 0}, kNaN);
    ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
    call.ExpectRight();
    EXPECT_TRUE(std::isnan(call.out.at({0, 0, 4, 0})));
  }
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
          SCOPED_TRACE(features.Name());
          Random random;
          Call call(features, random);
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
                             .kv_ends = {100, 260}}};
  for (const Features& features : calls) {
    Random random;
    Call call(features, random);
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
    if (yes())
      f.window = AttentionWindow{random.Integer(0, 90), {}, static_cast<Causal>(random.Integer(1, 2))};
    if (yes()) f.soft_cap = static_cast<float>(random.Uniform(1, 40));
    if (yes()) f.bias = {1, yes() ? f.shape.q_heads : 1, yes() ? f.shape.sq : 1, f.shape.skv};
    f.sinks = yes();
    f.turned = f.shape.dr > 0 ? (yes() ? f.shape.dr : 0) : f.shape.dqk / 2 * 2 * random.Integer(0, 1);
    f.rope_layout = static_cast<RopeLayout>(random.Integer(0, 2));
    f.q_offset = random.Integer(0, 9), f.k_offset = random.Integer(0, 9);
    if (yes()) f.layout = kBsnd;
    ExpectRight(i % 2 == 0 ? Host() : NpuWithData(Ascend910B2()), f);
  }
}

}  // namespace
}  // namespace cubist::testing
