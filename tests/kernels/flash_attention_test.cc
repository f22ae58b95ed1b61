// FlashAttention against the reference, through the public call alone: on the host, on its SIMD targets, and
// on the model.
#include "kernels/flash_attention.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "reference/attention.h"
#include "tests/kernels/attention_call.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

using Options = AttentionOptions;

class FlashAttentionShapeTest : public ::testing::TestWithParam<AttentionShape> {};

TEST_P(FlashAttentionShapeTest, RandomRealsAreWithinBounds) {
  const AttentionShape& s = GetParam();
  const std::int64_t products = s.batch * s.q_heads * s.sq * s.skv * (s.dqk + s.dr + s.dv);
  for (int i = 0; i < 9; ++i) {
    // The largest shapes see each dtype and each mask once.
    if (products > 1'000'000 && i % 3 != i / 3) continue;
    ExpectWithinBounds(Host(), s, kFloatTypes[i % 3], kMasks[i / 3]);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FlashAttentionShapeTest, ::testing::ValuesIn(AttentionShapes()),
                         ShapeName());

class FlashAttentionSimdTest : public SimdTargetTest {};

TEST_P(FlashAttentionSimdTest, RandomRealsAreWithinBounds) {
  for (const AttentionShape& shape : FewShapes()) {
    for (int i = 0; i < 3; ++i) ExpectWithinBounds(Host(), shape, kFloatTypes[i], kMasks[(i + 2) % 3]);
  }
}

TEST(FlashAttentionOnNpuTest, RandomRealsAreWithinBounds) {
  for (const AttentionShape& shape : FewShapes()) {
    for (int i = 0; i < 3; ++i) {
      ExpectWithinBounds(NpuWithData(Ascend910B2()), shape, kFloatTypes[i], kMasks[i]);
      ExpectWithinBounds(NpuWithData(Ascend910B4()), shape, kFloatTypes[i], kMasks[(i + 1) % 3]);
      ExpectWithinBounds(Host(), shape, kFloatTypes[i], kMasks[i]);
    }
  }
}

// Every query is 100 times one of the keys that it sees, and keys are vectors of +-1: the score of that key is
// 100 D, any other is less by at least 200, whose exponential is zero in fp32. So the answer is that key's
// value, exactly, and its lse 100 D.
void ExpectSelection(const Device& device, const AttentionShape& shape, Options options) {
  options.scale = 1.0f;
  SCOPED_TRACE(shape.Name() + " " + options.Name());
  Random random;
  Call call(shape, options);
  for (Matrix* x : {&call.k, &call.k_rope}) {
    std::vector<double> signs;
    for (std::int64_t i = 0; i < x->count(); ++i) signs.push_back(random.Integer(0, 1) == 0 ? -1 : 1);
    Assign(x->view(), signs);
  }
  call.q.Fill(1), call.q_rope.Fill(1);
  call.v.FillIntegers(random, -100, 100);
  std::vector<double> out, lse;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.q_heads; ++h) {
      const std::int64_t g = h / (shape.q_heads / shape.kv_heads), g_rope = options.shared_rope ? 0 : g;
      for (std::int64_t i = 0; i < shape.sq; ++i) {
        std::int64_t last = shape.skv - 1;
        if (options.causal == Causal::kTopLeft) last = std::min(last, i);
        if (options.causal == Causal::kBottomRight) last = i + shape.skv - shape.sq;
        if (last < 0) {
          out.insert(out.end(), static_cast<std::size_t>(shape.dv), 0.0);
          lse.push_back(-kInfinity);
          continue;
        }
        const std::int64_t j = random.Integer(0, last);
        for (std::int64_t d = 0; d < shape.dqk; ++d) call.q.set({b, h, i, d}, 100 * call.k.at({b, g, j, d}));
        for (std::int64_t d = 0; d < shape.dr; ++d) {
          call.q_rope.set({b, h, i, d}, 100 * call.k_rope.at({b, g_rope, j, d}));
        }
        for (std::int64_t d = 0; d < shape.dv; ++d) out.push_back(call.v.at({b, g, j, d}));
        lse.push_back(static_cast<double>(100 * (shape.dqk + shape.dr)));
      }
    }
  }
  ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
  ExpectExactly(call.out.view(), out);
  if (options.lse) ExpectExactly(call.lse.view(), lse);
  call.ExpectGuards();
}

std::vector<AttentionShape> SelectionShapes() {
  std::vector<AttentionShape> shapes;
  for (std::int64_t edge : {1, 15, 16, 17, 63, 65, 127, 129, 257}) {
    shapes.push_back({1, 1, 1, edge, 70, 64, 0, 19});
    shapes.push_back({1, 2, 1, 35, edge, 40, 24, 33});
  }
  shapes.insert(shapes.end(),
                {{2, 4, 2, 67, 131, 64, 0, 64}, {3, 6, 2, 33, 35, 39, 25, 7}, {1, 2, 2, 1, 1031, 64, 0, 5}});
  return shapes;
}

void ExpectSelections(const Device& device, const std::vector<AttentionShape>& shapes) {
  for (const AttentionShape& shape : shapes) {
    for (int i = 0; i < 9; ++i) {
      const DType in = kFloatTypes[i % 3];
      ExpectSelection(device, shape,
                      {.in = in,
                       .out = i % 2 == 0 ? in : DType::kF32,
                       .causal = kMasks[i / 3],
                       .shared_rope = i % 2 == 0,
                       .layout = i % 3 == 0 ? kBsnd : Layout{}});
    }
  }
}

TEST(FlashAttentionTest, SelectionIsExact) { ExpectSelections(Host(), SelectionShapes()); }

TEST(FlashAttentionOnNpuTest, SelectionIsExact) {
  ExpectSelections(NpuWithData(Ascend910B2()),
                   {{1, 2, 1, 35, 129, 40, 24, 33}, {3, 6, 2, 33, 35, 39, 25, 7}});
  ExpectSelections(NpuWithData(Ascend910B4()), {{2, 4, 2, 67, 131, 64, 0, 64}});
}

TEST_P(FlashAttentionSimdTest, SelectionIsExact) {
  ExpectSelections(
      Host(), {{1, 2, 1, 35, 129, 40, 24, 33}, {2, 4, 2, 67, 131, 64, 0, 64}, {3, 6, 2, 33, 35, 39, 25, 7}});
}

INSTANTIATE_TEST_SUITE_P(Simd, FlashAttentionSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// Equal scores, and as many keys as a power of two: the mean of the values, exactly.
TEST(FlashAttentionTest, EqualScoresGiveTheMean) {
  for (DType in : kFloatTypes) {
    for (const bool zero_scale : {true, false}) {
      for (std::int64_t keys : {1, 2, 64, 256, 1024}) {
        Random random;
        Options options{.in = in, .out = DType::kF32};
        if (zero_scale) options.scale = 0.0f;
        Call call({2, 2, 1, 5, keys, 24, 0, 33}, options);
        SCOPED_TRACE(call.shape.Name() + " " + options.Name());
        call.FillNormal(random);
        if (!zero_scale) call.q.Fill(0);
        call.v.FillIntegers(random);
        ASSERT_TRUE(IsOk(FlashAttention(Host(), call.args())));
        const Answer answer(call);
        ExpectExactly(call.out.view(), answer.result().out);
        answer.Expect(call);
      }
    }
  }
}

TEST(FlashAttentionTest, AnyScale) {
  for (float scale : {0.0f, -0.3f, 1.0f, -1.0f, 1e-30f, 3.5f}) {
    for (DType in : kFloatTypes) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        Random random;
        Call call({1, 2, 1, 35, 150, 24, 8, 16},
                  {.in = in, .out = DType::kF32, .causal = Causal::kTopLeft, .scale = scale});
        call.FillNormal(random);
        ExpectRight(device, call);
      }
    }
  }
}

// The default is 1 / sqrt(Dqk + Dr), also where either part is empty.
TEST(FlashAttentionTest, DefaultScale) {
  for (const AttentionShape& shape :
       {AttentionShape{1, 1, 1, 9, 33, 16, 0, 8}, AttentionShape{1, 1, 1, 9, 33, 9, 16, 8}}) {
    Random random;
    Call call(shape, {});
    call.FillNormal(random);
    ASSERT_TRUE(IsOk(FlashAttention(Host(), call.args())));
    Call scaled(shape, {.scale = 1.0f / std::sqrt(static_cast<float>(shape.dqk + shape.dr))});
    scaled.CopyInputs(call);
    ASSERT_TRUE(IsOk(FlashAttention(Host(), scaled.args())));
    ExpectSameBits(scaled.out.view(), call.out.view());
    ExpectSameBits(scaled.lse.view(), call.lse.view());
  }
}

std::vector<Options> Bands() {
  std::vector<Options> bands;
  for (Causal causal : kMasks) {
    for (Causal anchor : {Causal::kTopLeft, Causal::kBottomRight}) {
      for (const auto& [left, right] :
           {std::pair<std::optional<std::int64_t>, std::optional<std::int64_t>>{5, {}},
            {{}, 7},
            {40, 3},
            {0, 0},
            {-3, 20},
            {130, -100},
            {3, -9}}) {
        bands.push_back({.causal = causal, .window = AttentionWindow{left, right, anchor}});
      }
    }
    bands.push_back({.causal = causal, .prefix = {0, 21}});
    bands.push_back(
        {.causal = causal, .window = AttentionWindow{{}, 2, Causal::kTopLeft}, .prefix = {66, 100}});
    bands.push_back(
        {.causal = causal, .window = AttentionWindow{11, {}, Causal::kBottomRight}, .prefix = {17, 0}});
    bands.push_back(
        {.causal = causal, .window = AttentionWindow{-3, 20, Causal::kTopLeft}, .prefix = {32, 101}});
  }
  return bands;
}

// Sliding windows, bands that leave rows without keys, prefixes: on rows and keys around the tiles' edges.
TEST(FlashAttentionTest, WindowsAndPrefixes) {
  const AttentionShape shapes[] = {{2, 2, 1, 70, 131, 24, 8, 16}, {2, 1, 1, 300, 101, 16, 0, 24}};
  const std::optional<float> scales[] = {{}, 0.0f, {}, {}, -0.5f};
  int i = 0;
  for (Options options : Bands()) {
    for (const AttentionShape& shape : shapes) {
      options.in = kFloatTypes[i % 3], options.out = DType::kF32, options.scale = scales[i % 5];
      ++i;
      Random random;
      Call call(shape, options);
      call.FillNormal(random);
      const Answer answer(call);
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        SCOPED_TRACE(shape.Name() + " " + options.Name());
        call.out.FillNaN(), call.lse.FillNaN();
        ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
        answer.Expect(call);
      }
    }
  }
}

// Every dimension may be empty. Without keys, out = 0 and lse = -inf; without d, all scores are 0.
TEST(FlashAttentionTest, EmptyDimensions) {
  const AttentionShape shapes[] = {
      {1, 2, 1, 35, 0, 16, 0, 24}, {1, 2, 1, 35, 0, 16, 8, 24}, {1, 2, 1, 0, 35, 16, 0, 24},
      {1, 2, 1, 0, 0, 16, 0, 24},  {1, 2, 1, 35, 33, 0, 0, 24}, {1, 2, 1, 35, 33, 0, 8, 24},
      {1, 2, 1, 35, 33, 16, 8, 0}, {0, 2, 1, 35, 33, 16, 8, 8}, {1, 0, 1, 35, 33, 16, 8, 8},
      {1, 0, 0, 35, 33, 16, 8, 8}, {1, 1, 1, 0, 33, 0, 0, 0},   {0, 0, 0, 0, 0, 0, 0, 0}};
  for (const AttentionShape& shape : shapes) {
    for (Causal causal : kMasks) {
      for (DType in : kFloatTypes) {
        for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
          Random random;
          Call call(shape, {.in = in, .out = in, .causal = causal});
          SCOPED_TRACE(shape.Name() + " " + call.options.Name());
          call.FillNormal(random);
          if (device.computes()) {
            ExpectRight(device, call);
          } else {
            EXPECT_TRUE(IsOk(FlashAttention(device, call.args())));
          }
        }
      }
    }
  }
}

// A rope part of zero columns is as good as none.
TEST(FlashAttentionTest, RopeWithoutColumns) {
  for (DType in : kFloatTypes) {
    Random random;
    Call call({1, 2, 1, 35, 33, 16, 0, 24}, {.in = in});
    call.FillNormal(random);
    FlashAttentionArgs args = call.args();
    args.q_rope = call.q_rope.view(), args.k_rope = call.k_rope.view();
    ASSERT_TRUE(IsOk(FlashAttention(Host(), args)));
    Answer(call).Expect(call);
  }
}

// One rope head for all KV heads, or one for each; the same rope columns as part of q and k give the same
// scores but for rounding.
TEST(FlashAttentionTest, RopeHeads) {
  for (bool shared : {false, true}) {
    for (Causal causal : kMasks) {
      for (DType in : kFloatTypes) {
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          Random random;
          Call call({2, 6, 3, 40, 37, 24, 16, 16},
                    {.in = in, .out = DType::kF32, .causal = causal, .shared_rope = shared});
          call.FillNormal(random);
          ExpectRight(device, call);
        }
      }
    }
  }
}

// KV heads that stride 0 repeats are grouped heads: the same answer, bit for bit where the tiling is the same.
TEST(FlashAttentionTest, RepeatedHeads) {
  Random random;
  Call grouped({2, 6, 2, 35, 70, 16, 0, 24}, {.layout = kBsnd});
  grouped.FillNormal(random);
  const Answer answer(grouped);
  FlashAttentionArgs args = grouped.args();
  for (std::int64_t g : {0, 1}) {  // Three query heads at a time, each with a KV head of its own.
    for (ConstTensor* x : {&args.q, &args.k, &args.v}) {
      const ConstTensor& whole = x == &args.q   ? ConstTensor(grouped.q.view())
                                 : x == &args.k ? ConstTensor(grouped.k.view())
                                                : ConstTensor(grouped.v.view());
      *x = whole;
      x->sizes[1] = 3;
      const std::int64_t heads = x == &args.q ? 3 : 1;
      x->data = static_cast<const float*>(whole.data) + g * heads * whole.stride(1);
      if (x != &args.q) x->strides[1] = 0;
    }
    args.out = grouped.out.view(), args.lse = grouped.lse.view();
    args.out.sizes[1] = args.lse.sizes[1] = 3;
    args.out.data = static_cast<float*>(args.out.data) + g * 3 * args.out.stride(1);
    args.lse.data = static_cast<float*>(args.lse.data) + g * 3 * args.lse.stride(1);
    ASSERT_TRUE(IsOk(FlashAttention(Host(), args)));
  }
  answer.Expect(grouped);
}

// Stride 0 in every input: one row or one element stands for all.
TEST(FlashAttentionTest, RepeatedElements) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int d = 0; d < 4; ++d) {
      SCOPED_TRACE(Join("dimension ", d));
      Random random;
      Call call({2, 2, 2, 33, 35, 16, 8, 24}, {});
      call.FillNormal(random);
      FlashAttentionArgs args = call.args();
      reference::AttentionArgs expected = call.reference_args();
      for (ConstTensor* x : {&args.q, &args.k, &args.v, &args.q_rope, &args.k_rope}) {
        x->strides[static_cast<std::size_t>(d)] = 0;
      }
      expected.q = args.q, expected.k = args.k, expected.v = args.v;
      expected.q_rope = args.q_rope, expected.k_rope = args.k_rope;
      ASSERT_TRUE(IsOk(FlashAttention(device, args)));
      const auto result = reference::Attention(expected, reference::AllRows(expected));
      ExpectClose(call.out.view(), result.out, reference::OutBounds(expected, result, DType::kF32));
      ExpectClose(call.lse.view(), result.lse, reference::LseBounds(expected, result));
      call.ExpectGuards();
    }
  }
}

TEST(FlashAttentionTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (const AttentionShape& shape :
       {AttentionShape{2, 4, 2, 131, 259, 64, 16, 48}, AttentionShape{1, 8, 1, 1, 1030, 40, 0, 72}}) {
    for (int i = 0; i < 3; ++i) {
      const Options options{.in = kFloatTypes[i], .out = DType::kF32, .causal = kMasks[i]};
      Random random;
      Call first(shape, options);
      first.FillNormal(random);
      ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = 1}), first.args())));
      Call call(shape, options);
      call.CopyInputs(first);
      for (int threads : kThreadCounts) {
        SCOPED_TRACE(Join(shape.Name(), " ", options.Name(), " threads ", threads));
        call.out.FillNaN(), call.lse.FillNaN();
        ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = threads}), call.args())));
        ExpectSameBits(call.out.view(), first.out.view());
        ExpectSameBits(call.lse.view(), first.lse.view());
      }
    }
  }
}

// Layouts and a wanted lse change no bit.
TEST(FlashAttentionTest, SameBitsForAnyStorage) {
  const AttentionShape shape{2, 4, 2, 131, 259, 64, 16, 48};
  for (int i = 0; i < 3; ++i) {
    Options options{.in = kFloatTypes[i], .out = DType::kF32, .causal = kMasks[i], .layout = kContiguous};
    Random random;
    Call first(shape, options);
    first.FillNormal(random);
    ASSERT_TRUE(IsOk(FlashAttention(Host(), first.args())));
    for (const Layout& layout : {Layout{}, kBsnd, kApart}) {
      for (bool lse : {false, true}) {
        options.layout = layout, options.lse = lse;
        SCOPED_TRACE(options.Name());
        Call call(shape, options);
        call.CopyInputs(first);
        ASSERT_TRUE(IsOk(FlashAttention(Host(), call.args())));
        ExpectSameBits(call.out.view(), first.out.view());
        if (lse) ExpectSameBits(call.lse.view(), first.lse.view());
      }
    }
  }
}

TEST(FlashAttentionTest, ConcurrentCalls) {
  const AttentionShape shapes[] = {
      {1, 2, 1, 65, 130, 32, 8, 32}, {2, 3, 3, 17, 31, 20, 0, 12}, {1, 1, 1, 1, 515, 64, 0, 64}};
  std::vector<Call> calls;
  Random random;
  for (int i = 0; i < 12; ++i) {
    calls.emplace_back(shapes[i % 3],
                       Options{.in = kFloatTypes[i / 3 % 3], .out = DType::kF32, .causal = kMasks[i % 2]});
    calls.back().FillNormal(random);
  }
  std::vector<Status> statuses(calls.size());
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    callers.emplace_back([&, i] {
      const Device device =
          i % 4 == 3 ? NpuWithData(Ascend910B2()) : Host({.threads = static_cast<int>(i % 4)});
      for (int repeat = 0; repeat < 8 && statuses[i].ok(); ++repeat)
        statuses[i] = FlashAttention(device, calls[i].args());
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(Join("caller ", i, " ", calls[i].options.Name()));
    ASSERT_TRUE(IsOk(statuses[i]));
    Answer(calls[i]).Expect(calls[i]);
  }
}

}  // namespace
}  // namespace cubist::testing
