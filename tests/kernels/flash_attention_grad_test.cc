// FlashAttentionGrad against the reference, through the public call alone: on the host, on its SIMD targets, and on the
// model.
#include "kernels/flash_attention_grad.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reference/attention.h"
#include "reference/attention_grad.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr Causal kMasks[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
constexpr Layout kApart{.order = {0, 2, 1, 3}, .gap = 5, .offset = 3, .step = 2};

// What a call asks for, besides its sizes.
struct Options {
  DType in = DType::kF32, out = DType::kF32;  // `out` is the dtype of the gradients.
  Causal causal = Causal::kNone;
  bool shared_rope = false;  // One rope head of k serves all.
  std::optional<float> scale = {};
  Layout layout = {};
  DType forward_out = DType::kF32;
  std::optional<AttentionWindow> window = {};
  std::vector<std::int64_t> prefix = {};

  std::string Name() const {
    constexpr const char* kNames[] = {"full", "top-left", "bottom-right"};
    return Join(NameOf(in), " to ", NameOf(out), " ", kNames[static_cast<int>(causal)],
                shared_rope ? " one rope head" : "", scale ? Join(" scale ", *scale) : "");
  }
};

// Tensors of one call, each between guards. `out` and `lse` are the reference's, rounded.
struct Call {
  Call(const AttentionShape& s, const Options& o)
      : options(o),
        shape(s),
        q(o.in, {s.batch, s.q_heads, s.sq, s.dqk}, o.layout),
        k(o.in, {s.batch, s.kv_heads, s.skv, s.dqk}, o.layout),
        v(o.in, {s.batch, s.kv_heads, s.skv, s.dv}, o.layout),
        q_rope(o.in, {s.batch, s.q_heads, s.sq, s.dr}, o.layout),
        k_rope(o.in, {s.batch, o.shared_rope ? 1 : s.kv_heads, s.skv, s.dr}, o.layout),
        out(o.forward_out, {s.batch, s.q_heads, s.sq, s.dv}, o.layout),
        lse(DType::kF32, {s.batch, s.q_heads, s.sq}, o.layout),
        dout(o.in, {s.batch, s.q_heads, s.sq, s.dv}, o.layout),
        dq(o.out, {s.batch, s.q_heads, s.sq, s.dqk}, o.layout),
        dk(o.out, {s.batch, s.kv_heads, s.skv, s.dqk}, o.layout),
        dv(o.out, {s.batch, s.kv_heads, s.skv, s.dv}, o.layout),
        dq_rope(o.out, {s.batch, s.q_heads, s.sq, s.dr}, o.layout),
        dk_rope(o.out, {s.batch, o.shared_rope ? 1 : s.kv_heads, s.skv, s.dr}, o.layout) {}

  std::vector<Matrix*> inputs() { return {&q, &k, &v, &q_rope, &k_rope, &dout}; }
  std::vector<Matrix*> outputs() { return {&dq, &dk, &dv, &dq_rope, &dk_rope}; }

  void FillNormal(double stddev = 1) {
    Random random;
    for (Matrix* x : {&q, &k, &q_rope, &k_rope}) x->FillNormal(random, 0, stddev);
    v.FillNormal(random), dout.FillNormal(random);
    Forward();
  }
  void Forward() {
    const reference::AttentionArgs args = reference_args();
    const auto result = reference::Attention(args, reference::AllRows(args));
    Assign(out.view(), result.out), Assign(lse.view(), result.lse);
  }
  void CopyInputs(Call& from) {
    const auto to = inputs(), of = from.inputs();
    for (std::size_t i = 0; i < to.size(); ++i) Assign(to[i]->view(), of[i]->ToDoubles());
    Assign(out.view(), from.out.ToDoubles()), Assign(lse.view(), from.lse.ToDoubles());
  }

  FlashAttentionGradArgs args() {
    FlashAttentionGradArgs args{.q = q.view(),
                                .k = k.view(),
                                .v = v.view(),
                                .out = out.view(),
                                .lse = lse.view(),
                                .dout = dout.view(),
                                .dq = dq.view(),
                                .dk = dk.view(),
                                .dv = dv.view(),
                                .scale = options.scale,
                                .causal = options.causal,
                                .window = options.window,
                                .prefix = options.prefix};
    if (shape.dr > 0) {
      args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
      args.dq_rope = dq_rope.view(), args.dk_rope = dk_rope.view();
    }
    return args;
  }
  reference::AttentionArgs reference_args() {
    const FlashAttentionGradArgs x = args();
    reference::AttentionArgs args{.q = x.q,
                                  .k = x.k,
                                  .v = x.v,
                                  .q_rope = x.q_rope,
                                  .k_rope = x.k_rope,
                                  .scale = x.scale,
                                  .mask = static_cast<reference::Mask>(x.causal)};
    if (x.window) {
      args.left = x.window->left, args.right = x.window->right;
      args.window_anchor = static_cast<reference::Mask>(x.window->anchor);
    }
    args.prefix = options.prefix;
    return args;
  }

  Options options;
  AttentionShape shape;
  Matrix q, k, v, q_rope, k_rope, out, lse, dout, dq, dk, dv, dq_rope, dk_rope;
};

void ExpectAnswer(Call& call, const reference::AttentionGradResult& expected) {
  const auto expect = [&](const Matrix& actual, const reference::Gradient& gradient, const char* name) {
    SCOPED_TRACE(name);
    ExpectClose(actual.view(), gradient.value, gradient.Bounds(call.options.out));
  };
  expect(call.dq, expected.dq, "dq"), expect(call.dk, expected.dk, "dk"), expect(call.dv, expected.dv, "dv");
  if (call.shape.dr > 0) {
    expect(call.dq_rope, expected.dq_rope, "dq_rope"), expect(call.dk_rope, expected.dk_rope, "dk_rope");
  }
  for (const Matrix* x : call.inputs()) ExpectGuards(*x);
  for (const Matrix* x : call.outputs()) ExpectGuards(*x);
}

void ExpectRight(const Device& device, Call& call) {
  SCOPED_TRACE(call.shape.Name() + " " + call.options.Name());
  ASSERT_TRUE(IsOk(FlashAttentionGrad(device, call.args())));
  ExpectAnswer(call,
               reference::AttentionGrad(call.reference_args(), call.dout.view(), call.options.forward_out));
}

void ExpectWithinBounds(const Device& device, const AttentionShape& shape, DType in, Causal causal) {
  Call first(shape, {.in = in, .out = in, .causal = causal, .forward_out = in});
  first.FillNormal();
  ExpectRight(device, first);
  Call apart(shape, {.in = in, .out = DType::kF32, .causal = causal, .layout = kApart, .forward_out = in});
  apart.CopyInputs(first);
  ExpectRight(device, apart);
}

class FlashAttentionGradShapeTest : public ::testing::TestWithParam<AttentionShape> {};

TEST_P(FlashAttentionGradShapeTest, RandomRealsAreWithinBounds) {
  const AttentionShape& s = GetParam();
  const std::int64_t products = s.batch * s.q_heads * s.sq * s.skv * (s.dqk + s.dr + s.dv);
  for (int i = 0; i < 9; ++i) {
    // Large shapes see each dtype and each mask once.
    if (products > 100'000 && i % 3 != i / 3) continue;
    ExpectWithinBounds(Host(), s, kFloatTypes[i % 3], kMasks[i / 3]);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FlashAttentionGradShapeTest, ::testing::ValuesIn(AttentionShapes()),
                         ShapeName());

// Shapes that cross tiles, small enough for every target and for the model.
std::vector<AttentionShape> FewShapes() {
  return {{1, 1, 1, 1, 1, 1, 0, 1},       {1, 1, 1, 33, 37, 16, 0, 24}, {1, 2, 1, 17, 65, 13, 5, 11},
          {2, 3, 1, 17, 31, 20, 0, 12},   {3, 4, 2, 33, 29, 24, 8, 16}, {1, 2, 2, 129, 140, 64, 0, 33},
          {1, 2, 1, 130, 67, 40, 24, 48}, {1, 1, 1, 1, 1030, 64, 0, 64}};
}

class FlashAttentionGradSimdTest : public SimdTargetTest {};

TEST_P(FlashAttentionGradSimdTest, RandomRealsAreWithinBounds) {
  for (const AttentionShape& shape : FewShapes()) {
    for (int i = 0; i < 3; ++i) ExpectWithinBounds(Host(), shape, kFloatTypes[i], kMasks[(i + 2) % 3]);
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, FlashAttentionGradSimdTest, ::testing::ValuesIn(SimdTargets()),
                         SimdTargetName);

TEST(FlashAttentionGradOnNpuTest, RandomRealsAreWithinBounds) {
  for (const AttentionShape& shape : FewShapes()) {
    for (int i = 0; i < 3; ++i) {
      ExpectWithinBounds(NpuWithData(Ascend910B2()), shape, kFloatTypes[i], kMasks[i]);
      ExpectWithinBounds(NpuWithData(Ascend910B4()), shape, kFloatTypes[i], kMasks[(i + 1) % 3]);
    }
  }
}

TEST(FlashAttentionGradTest, OneRopeHeadForAll) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int i = 0; i < 3; ++i) {
      Call call({2, 6, 3, 35, 70, 24, 8, 16},
                {.in = kFloatTypes[i], .causal = kMasks[i], .shared_rope = true, .layout = kBsnd});
      call.FillNormal();
      ExpectRight(device, call);
    }
  }
}

TEST(FlashAttentionGradTest, AnyScale) {
  for (float scale : {0.0f, -0.3f, 1.0f, 1e-30f, 1.5f}) {
    for (DType in : kFloatTypes) {
      Call call({1, 2, 1, 35, 150, 24, 8, 16}, {.in = in, .causal = Causal::kTopLeft, .scale = scale});
      call.FillNormal();
      ExpectRight(Host(), call);
    }
  }
}

// Logits around 1e4: weights are 0 and 1, nothing overflows.
TEST(FlashAttentionGradTest, ExtremeLogits) {
  for (DType in : kFloatTypes) {
    for (Causal causal : kMasks) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        Call call({1, 2, 1, 37, 70, 16, 0, 24}, {.in = in, .causal = causal, .scale = 1.0f});
        call.FillNormal(/*stddev=*/40);
        ExpectRight(device, call);
      }
    }
  }
}

// Rows that see no key neither get nor give a gradient, whatever they hold.
TEST(FlashAttentionGradTest, RowsWithoutKeys) {
  for (DType in : kFloatTypes) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      Call call({1, 2, 1, 70, 21, 16, 8, 24}, {.in = in, .causal = Causal::kBottomRight});
      call.FillNormal();
      ExpectRight(device, call);
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < 49; ++i) {
          ASSERT_EQ(call.lse.at({0, h, i}), -kInfinity);
          for (std::int64_t d = 0; d < 16; ++d) ASSERT_EQ(call.dq.at({0, h, i, d}), 0);
        }
      }
    }
  }
}

// Bands narrower and wider than a block, that leave rows or keys alone or meet none; several blocks of keys per chunk.
TEST(FlashAttentionGradTest, Windows) {
  struct Sides {
    std::optional<std::int64_t> left, right;
  };
  int i = 0;
  for (const AttentionShape& shape :
       {AttentionShape{2, 4, 2, 70, 45, 16, 8, 12}, AttentionShape{1, 1, 1, 140, 300, 16, 0, 24},
        AttentionShape{1, 1, 1, 1100, 1000, 8, 0, 8}}) {
    for (const Sides& sides :
         {Sides{0, 0}, Sides{5, {}}, Sides{{}, 7}, Sides{20, 3}, Sides{100, -30}, Sides{-9, 40}}) {
      for (Causal anchor : {Causal::kTopLeft, Causal::kBottomRight}) {
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          const bool large = shape.sq > 1000;
          if (large && (device.kind() != Device::Kind::kHost || (sides.right && sides.left != 20))) continue;
          Call call(shape, {.in = kFloatTypes[++i % 3],
                            .causal = i % 2 == 0 ? Causal::kNone : anchor,
                            .shared_rope = i % 4 == 0,
                            .window = AttentionWindow{sides.left, sides.right, anchor}});
          SCOPED_TRACE(Join("left ", sides.left.value_or(-99), " right ", sides.right.value_or(-99)));
          call.FillNormal();
          ExpectRight(device, call);
        }
      }
    }
  }
}

TEST(FlashAttentionGradTest, Prefixes) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int i = 0; i < 3; ++i) {
      for (const std::vector<std::int64_t>& prefix :
           {std::vector<std::int64_t>{0, 70, 33}, std::vector<std::int64_t>{128, 1, 100}}) {
        Call call({3, 2, 1, 90, 130, 24, 0, 16}, {.in = kFloatTypes[i],
                                                  .causal = i == 1 ? Causal::kTopLeft : Causal::kBottomRight,
                                                  .prefix = prefix});
        call.FillNormal();
        ExpectRight(device, call);
      }
    }
  }
}

TEST(FlashAttentionGradTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (int i = 0; i < 3; ++i) {
    const Options options{.in = kFloatTypes[i], .causal = kMasks[i], .shared_rope = true};
    const AttentionShape shape{2, 4, 2, 131, 259, 64, 16, 48};
    Call first(shape, options);
    first.FillNormal();
    ASSERT_TRUE(IsOk(FlashAttentionGrad(Host({.threads = 1}), first.args())));
    Call call(shape, options);
    call.CopyInputs(first);
    for (int threads : kThreadCounts) {
      SCOPED_TRACE(Join(options.Name(), " threads ", threads));
      for (Matrix* x : call.outputs()) x->FillNaN();
      ASSERT_TRUE(IsOk(FlashAttentionGrad(Host({.threads = threads}), call.args())));
      const auto outputs = call.outputs(), expected = first.outputs();
      for (std::size_t j = 0; j < outputs.size(); ++j)
        ExpectSameBits(outputs[j]->view(), expected[j]->view());
    }
  }
}

}  // namespace
}  // namespace cubist::testing
