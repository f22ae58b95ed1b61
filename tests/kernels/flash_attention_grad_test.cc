// FlashAttentionGrad against the reference, through the public call alone: on the host, on its SIMD targets, and on the
// model.
#include "kernels/flash_attention_grad.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/kernels/attention_grad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

void ExpectWithinBounds(const Device& device, const AttentionShape& shape, DType in, Causal causal) {
  GradCall first(shape, {.in = in, .out = in, .causal = causal, .forward_out = in});
  first.FillNormal();
  ExpectRight(device, first);
  GradCall apart(shape,
                 {.in = in, .out = DType::kF32, .causal = causal, .layout = kApart, .forward_out = in});
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

// Of two answers, beside the size of the second; what is not a number was not asked for.
double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  double apart = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    apart += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
  }
  return size == 0 ? apart : std::sqrt(apart / size);
}

// Rows of K that L0B cannot hold twice: dQ, dK and dV are made by columns. The host makes them whole.
TEST(FlashAttentionGradOnNpuTest, WideHeads) {
  for (const AttentionShape& shape : {AttentionShape{1, 4, 2, 40, 70, 576, 0, 512},
                                      {2, 1, 1, 33, 50, 768, 0, 768},
                                      {1, 2, 1, 20, 37, 521, 40, 600}}) {
    for (int i = 0; i < 3; ++i) {
      GradCall call(shape, {.in = kFloatTypes[i], .causal = kMasks[i]}), host(shape, call.options);
      call.FillNormal(), host.CopyInputs(call);
      for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) ExpectRight(NpuWithData(*chip), call);
      ExpectRight(Host(), host);
      // Sums of the same products in another order of blocks.
      const std::vector<Matrix*> of_npu = call.outputs(), of_host = host.outputs();
      const double most = i == 0 ? 0x1p-18 : UnitRoundoff(call.options.in);
      for (std::size_t j = 0; j < of_npu.size(); ++j)
        EXPECT_LE(Distance(of_npu[j]->ToDoubles(), of_host[j]->ToDoubles()), most) << "output " << j;
    }
  }
}

TEST(FlashAttentionGradTest, OneRopeHeadForAll) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int i = 0; i < 3; ++i) {
      GradCall call({2, 6, 3, 35, 70, 24, 8, 16},
                    {.in = kFloatTypes[i], .causal = kMasks[i], .shared_rope = true, .layout = kBsnd});
      call.FillNormal();
      ExpectRight(device, call);
    }
  }
}

TEST(FlashAttentionGradTest, AnyScale) {
  for (float scale : {0.0f, -0.3f, 1.0f, 1e-30f, 1.5f}) {
    for (DType in : kFloatTypes) {
      GradCall call({1, 2, 1, 35, 150, 24, 8, 16}, {.in = in, .causal = Causal::kTopLeft, .scale = scale});
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
        GradCall call({1, 2, 1, 37, 70, 16, 0, 24}, {.in = in, .causal = causal, .scale = 1.0f});
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
      GradCall call({1, 2, 1, 70, 21, 16, 8, 24}, {.in = in, .causal = Causal::kBottomRight});
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
  Random random;
  for (const AttentionShape& shape :
       {AttentionShape{2, 4, 2, 70, 45, 16, 8, 12}, AttentionShape{1, 1, 1, 140, 300, 16, 0, 24},
        AttentionShape{1, 1, 1, 1100, 1000, 8, 0, 8}}) {
    for (const Sides& sides :
         {Sides{0, 0}, Sides{5, {}}, Sides{{}, 7}, Sides{20, 3}, Sides{100, -30}, Sides{-9, 40}}) {
      for (Causal anchor : {Causal::kTopLeft, Causal::kBottomRight}) {
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          const bool large = shape.sq > 1000;
          if (large && (device.kind() != Device::Kind::kHost || (sides.right && sides.left != 20))) continue;
          GradCall call(shape, {.in = kFloatTypes[random.Integer(0, 2)],
                                .causal = random.Integer(0, 1) == 0 ? Causal::kNone : anchor,
                                .shared_rope = random.Integer(0, 2) == 0,
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
        GradCall call({3, 2, 1, 90, 130, 24, 0, 16},
                      {.in = kFloatTypes[i],
                       .causal = i == 1 ? Causal::kTopLeft : Causal::kBottomRight,
                       .prefix = prefix});
        call.FillNormal();
        ExpectRight(device, call);
      }
    }
  }
}

// Keys of a prefix and of a window, and none between: several blocks of keys in every chunk.
TEST(FlashAttentionGradTest, PrefixesWithWindows) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int i = 0; i < 3; ++i) {
      GradCall call({1, 2, 1, 800, 1100, 16, 0, 16},
                    {.in = kFloatTypes[i],
                     .causal = i == 1 ? Causal::kTopLeft : Causal::kBottomRight,
                     .window = AttentionWindow{.left = 40, .anchor = Causal::kBottomRight},
                     .prefix = {70 + 200 * i}});
      call.FillNormal();
      ExpectRight(device, call);
    }
  }
}

// In UB of the last phase: sums of any width, what turns them back by tables that have each angle twice, and the sinks'.
TEST(FlashAttentionGradTest, SinksFitBesideGradientsThatAreTurned) {
  constexpr std::int64_t kRows = 70, kHeads = 4;
  const Device model = Npu(Ascend910B2(), {.with_data = false});
  for (const std::int64_t d : {64, 120, 128, 184, 192, 256}) {
    for (const std::int64_t rope : {56, 64, 96, 104, 192}) {
      FlashAttentionGradArgs args;
      const auto in = [&](std::int64_t heads, std::int64_t cols) {
        return ConstTensor(nullptr, DType::kBF16, {1, heads, kRows, cols});
      };
      const auto out = [&](std::int64_t heads, std::int64_t cols) {
        return Tensor(nullptr, DType::kBF16, {1, heads, kRows, cols});
      };
      args.q = in(kHeads, d), args.k = in(2, d), args.v = in(2, d), args.out = args.dout = in(kHeads, d);
      args.q_rope = in(kHeads, rope), args.k_rope = in(1, rope);
      args.lse = ConstTensor(nullptr, DType::kF32, {1, kHeads, kRows});
      args.sinks = ConstTensor(nullptr, DType::kF32, {kHeads});
      args.dq = out(kHeads, d), args.dk = out(2, d), args.dv = out(2, d);
      args.dq_rope = out(kHeads, rope), args.dk_rope = out(1, rope);
      args.dsinks = Tensor(nullptr, DType::kF32, {kHeads});
      args.rope.cos = args.rope.sin = ConstTensor(nullptr, DType::kF32, {kRows, rope / 2}, {rope, 2});
      args.rope.layout = RopeLayout::kInterleaved;
      EXPECT_TRUE(IsOk(FlashAttentionGrad(model, args))) << d << " and " << rope;
    }
  }
}

TEST(FlashAttentionGradTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (int i = 0; i < 3; ++i) {
    const GradOptions options{.in = kFloatTypes[i], .causal = kMasks[i], .shared_rope = true};
    const AttentionShape shape{2, 4, 2, 131, 259, 64, 16, 48};
    GradCall first(shape, options);
    first.FillNormal();
    for (Matrix* x : first.outputs()) x->FillNaN();  // Not all are asked for.
    ASSERT_TRUE(IsOk(FlashAttentionGrad(Host({.threads = 1}), first.args())));
    GradCall call(shape, options);
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
