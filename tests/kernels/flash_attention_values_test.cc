// FlashAttention of values that are no ordinary numbers: extreme logits, infinities, NaN, rows without keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "reference/attention.h"
#include "tests/kernels/attention_call.h"

namespace cubist::testing {
namespace {

using Options = AttentionOptions;

// Logits around 1e4, of both signs: nothing overflows, and the sum of exponentials is taken relative to the
// largest.
TEST(FlashAttentionTest, ExtremeLogits) {
  for (DType in : kFloatTypes) {
    for (Causal causal : kMasks) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        Random random;
        Call call({1, 2, 2, 66, 131, 16, 0, 24}, {.in = in, .out = DType::kF32, .causal = causal});
        call.FillNormal(random, 100);
        const Answer answer(call);
        ASSERT_GT(*std::max_element(answer.result().max_score.begin(), answer.result().max_score.end()), 2e4);
        ExpectRight(device, call);
      }
    }
  }
}

// All scores far below and far above zero, so that an unscaled exponential would be zero or infinite.
TEST(FlashAttentionTest, ShiftedLogits) {
  for (DType in : kFloatTypes) {
    for (double q : {-100.0, 100.0}) {
      Random random;
      Call call({1, 1, 1, 20, 300, 64, 0, 16}, {.in = in, .out = DType::kF32});
      call.q.Fill(q), call.k.FillUniform(random, 1.0, 1.01), call.v.FillNormal(random);
      ExpectRight(Host(), call);
    }
  }
}

// Rows that see no key: out = 0 and lse = -inf, whatever the outputs held.
TEST(FlashAttentionTest, RowsWithoutKeys) {
  for (DType in : kFloatTypes) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      for (const AttentionShape& shape :
           {AttentionShape{1, 2, 1, 150, 70, 16, 8, 24}, AttentionShape{2, 1, 1, 3, 1, 8, 0, 8},
            AttentionShape{1, 1, 1, 300, 5, 16, 0, 16}}) {
        Random random;
        Call call(shape, {.in = in, .out = in, .causal = Causal::kBottomRight});
        SCOPED_TRACE(shape.Name() + " " + call.options.Name());
        call.FillNormal(random);
        ExpectRight(device, call);
        for (std::int64_t i = 0; i < shape.sq - shape.skv; ++i) {
          ASSERT_EQ(call.lse.at({0, 0, i}), -kInfinity);
          for (std::int64_t d = 0; d < shape.dv; ++d) ASSERT_EQ(call.out.at({0, 0, i, d}), 0);
        }
      }
    }
  }
}

// Buffers that an earlier call left full of NaN: padding does not take from them.
TEST(FlashAttentionTest, NothingIsLeftOfEarlierCalls) {
  for (const Device& device : {Host({.threads = 1}), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      Call poison({1, 2, 1, 300, 530, 192, 64, 128}, {.in = in, .out = in});
      for (Matrix* x : {&poison.q, &poison.k, &poison.v, &poison.q_rope, &poison.k_rope}) x->FillNaN();
      for (const AttentionShape& shape : FewShapes()) {
        ASSERT_TRUE(IsOk(FlashAttention(device, poison.args())));
        Random random;
        Call call(shape, {.in = in, .out = in, .causal = Causal::kBottomRight});
        call.FillNormal(random);
        ExpectRight(device, call);
      }
    }
  }
}

// NaN in a query stays in its row; NaN in a key reaches the rows that see it and no other.
TEST(FlashAttentionTest, NaNScoresStayInTheirRows) {
  const std::int64_t row = 20, key = 25;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (Causal causal : kMasks) {
      for (DType in : kFloatTypes) {
        for (int where = 0; where < 4; ++where) {
          Random random;
          Call call({1, 1, 1, 41, 43, 16, 8, 24}, {.in = in, .out = in, .causal = causal});
          call.FillNormal(random);
          Matrix* inputs[] = {&call.q, &call.q_rope, &call.k, &call.k_rope};
          inputs[where]->set({0, 0, where < 2 ? row : key, 3}, kNaN);
          SCOPED_TRACE(Join("NaN in input ", where));
          ExpectRight(device, call);
        }
      }
    }
  }
}

// NaN or infinity in a value reaches that column of the rows that see its key, and no other column.
TEST(FlashAttentionTest, SpecialValuesStayInTheirColumn) {
  const std::int64_t key = 25, column = 7;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      for (double special : {kNaN, kInfinity, -kInfinity}) {
        SCOPED_TRACE(Join(NameOf(in), " ", special));
        Random random;
        Call call({1, 1, 1, 41, 43, 16, 8, 24}, {.in = in, .out = in});
        call.FillNormal(random);
        call.v.set({0, 0, key, column}, special);
        ExpectRight(device, call);
      }
    }
  }
}

// A hidden value has weight 0, and 0 * NaN is NaN; it reaches no row all the same.
TEST(FlashAttentionTest, HiddenValuesReachNoRow) {
  constexpr std::int64_t kColumn = 7;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      for (Causal causal : {Causal::kTopLeft, Causal::kBottomRight}) {
        for (const double special : {kNaN, kInfinity}) {
          SCOPED_TRACE(Join(NameOf(in), " ", special));
          Random random;
          Call call({1, 2, 1, 600, 610, 16, 8, 24}, {.in = in, .out = in, .causal = causal});
          call.FillNormal(random);
          for (const std::int64_t key : {601, 590, 40})  // The last one is seen by most rows.
            call.v.set({0, 0, key, kColumn}, key == 40 ? -special : special);
          ExpectRight(device, call);
        }
      }
    }
  }
}

// All scores of a row infinite: -inf is as if it saw no key, +inf gives NaN.
TEST(FlashAttentionTest, RowsOfInfiniteScores) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      Random random;
      Call call({1, 1, 1, 7, 40, 1, 0, 8}, {.in = in, .out = in, .scale = 1.0f});
      call.k.FillUniform(random, 0.5, 1.5), call.q.FillUniform(random), call.v.FillNormal(random);
      call.q.set({0, 0, 2, 0}, -kInfinity);
      call.q.set({0, 0, 4, 0}, kInfinity);
      ExpectRight(device, call);
      EXPECT_EQ(call.lse.at({0, 0, 2}), -kInfinity);
      EXPECT_EQ(call.out.at({0, 0, 2, 0}), 0);
      EXPECT_TRUE(std::isnan(call.out.at({0, 0, 4, 0})));
    }
  }
}

// A score of -inf has weight 0: the answer is that to the other keys.
TEST(FlashAttentionTest, KeysOfWeightZero) {
  const std::vector<std::int64_t> hidden = {0, 1, 17, 39};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      Random random;
      const Options options{.in = in, .out = in, .scale = 1.0f};
      Call call({1, 1, 1, 7, 40, 1, 0, 8}, options), seen({1, 1, 1, 7, 36, 1, 0, 8}, options);
      SCOPED_TRACE(options.Name());
      call.q.FillUniform(random, 0.5, 1.5), call.k.FillUniform(random), call.v.FillNormal(random);
      Assign(seen.q.view(), call.q.ToDoubles());
      for (std::int64_t j = 0, to = 0; j < 40; ++j) {
        if (std::find(hidden.begin(), hidden.end(), j) != hidden.end()) {
          call.k.set({0, 0, j, 0}, -kInfinity);
          continue;
        }
        seen.k.set({0, 0, to, 0}, call.k.at({0, 0, j, 0}));
        for (std::int64_t d = 0; d < 8; ++d) seen.v.set({0, 0, to, d}, call.v.at({0, 0, j, d}));
        ++to;
      }
      ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
      Answer(seen).Expect(call);
    }
  }
}

}  // namespace
}  // namespace cubist::testing
