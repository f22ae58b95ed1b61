// TokenUnpermute against the reference, through the public calls alone: on the host, on its SIMD targets, and on the model.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/token_permute.h"
#include "reference/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/permute_call.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

// Tensors of one unpermute call.
struct UnpermuteCall {
  UnpermuteCall(std::int64_t t, std::int64_t k, std::int64_t h, std::int64_t m, DType dtype,
                std::optional<DType> p, const Layout& layout = {})
      : has_probs(p),
        permuted(dtype, {m, h}, layout),
        sorted_indices(DType::kI32, {t * k}, layout),
        probs(p.value_or(DType::kF32), {t, k}, layout),
        out(dtype, {t, h}, layout) {}

  // A permutation of the slots, of which `m` rows are kept.
  void FillIndices(Random& random) {
    std::vector<double> rows(static_cast<std::size_t>(sorted_indices.count()));
    std::iota(rows.begin(), rows.end(), 0.0);
    for (std::size_t i = rows.size(); i > 1; --i) {
      std::swap(rows[i - 1],
                rows[static_cast<std::size_t>(random.Integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
    Assign(sorted_indices.view(), rows);
  }
  void Fill(Random& random) {
    permuted.FillNormal(random), probs.FillUniform(random);
    FillIndices(random);
  }

  TokenUnpermuteArgs args() {
    TokenUnpermuteArgs args{
        .permuted = permuted.view(), .sorted_indices = sorted_indices.view(), .out = out.view()};
    if (has_probs) args.probs = probs.view();
    return args;
  }

  bool has_probs;
  Matrix permuted, sorted_indices, probs, out;
};

void ExpectUnpermuted(const Device& device, UnpermuteCall& call) {
  const TokenUnpermuteArgs args = call.args();
  ASSERT_TRUE(IsOk(TokenUnpermute(device, args)));
  const auto expected = reference::Unpermute(args.permuted, args.sorted_indices, args.probs);
  ExpectClose(call.out.view(), expected.out,
              reference::UnpermuteBounds(expected, args.probs, call.out.dtype()));
  for (const Matrix* x : {&call.permuted, &call.sorted_indices, &call.probs, &call.out}) ExpectGuards(*x);
}

// Random reals; all rows kept, then a third dropped. Each dtype of rows and probabilities has its turn.
void ExpectUnpermutes(const Device& device, const PermuteShape& s, std::size_t turns) {
  const std::int64_t slots = s.tokens * s.topk;
  for (std::size_t turn = 0; turn < turns; ++turn) {
    const DType dtype = kFloatTypes[turn % 3], probs = kFloatTypes[turn / 3 % 3];
    for (std::int64_t rows : {slots, slots - slots / 3}) {
      for (const Layout& layout : {Layout{}, kApart}) {
        SCOPED_TRACE(Join(s.Name(), " ", NameOf(dtype), " probs ", NameOf(probs), " rows ", rows));
        Random random;
        UnpermuteCall call(s.tokens, s.topk, s.hidden, rows, dtype, probs, layout);
        call.Fill(random);
        ExpectUnpermuted(device, call);
      }
    }
  }
}

class TokenUnpermuteShapeTest : public ::testing::TestWithParam<PermuteShape> {};

TEST_P(TokenUnpermuteShapeTest, RandomRealsAreWithinBounds) { ExpectUnpermutes(Host(), GetParam(), 9); }

// Small integer rows, probabilities that are powers of two: the sum is exact, and rounds once.
TEST_P(TokenUnpermuteShapeTest, ExactSumsRoundOnce) {
  const PermuteShape& s = GetParam();
  for (DType dtype : kFloatTypes) {
    SCOPED_TRACE(NameOf(dtype));
    Random random;
    UnpermuteCall call(s.tokens, s.topk, s.hidden, s.tokens * s.topk, dtype, dtype);
    call.Fill(random);
    call.permuted.FillIntegers(random);
    std::vector<double> powers;
    for (std::int64_t i = 0; i < call.probs.count(); ++i)
      powers.push_back(std::ldexp(1, static_cast<int>(random.Integer(-6, 0))));
    Assign(call.probs.view(), powers);
    const TokenUnpermuteArgs args = call.args();
    ASSERT_TRUE(IsOk(TokenUnpermute(Host(), args)));
    const auto expected = reference::Unpermute(args.permuted, args.sorted_indices, args.probs);
    ExpectExactly(call.out.view(), RoundTo(dtype, expected.out));
    ExpectGuards(call.out);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TokenUnpermuteShapeTest, ::testing::ValuesIn(PermuteShapes()), ShapeName());

class TokenUnpermuteSimdTest : public SimdTargetTest {};

TEST_P(TokenUnpermuteSimdTest, IsWithinBounds) {
  for (const PermuteShape& shape : FewShapes()) ExpectUnpermutes(Host(), shape, 3);
}

INSTANTIATE_TEST_SUITE_P(Simd, TokenUnpermuteSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(TokenUnpermuteOnNpuTest, RandomRealsAreWithinBounds) {
  for (const PermuteShape& shape : FewShapes()) {
    ExpectUnpermutes(NpuWithData(Ascend910B2()), shape, 3);
    ExpectUnpermutes(NpuWithData(Ascend910B4()), shape, 1);
    ExpectUnpermutes(Host(), shape, 1);
  }
}

// Of a token whose routes do not fit, parts of them.
TEST(TokenUnpermuteOnNpuTest, RoutesInParts) {
  for (const PermuteShape& shape : {PermuteShape{9, 100, 1, 5}, PermuteShape{3, 700, 1, 130}}) {
    const auto chips = ChipsThatCutRoutes<TokenUnpermuteTiling>(
        {.tokens = shape.tokens, .hidden = shape.hidden, .top_k = shape.topk});
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) ExpectUnpermutes(NpuWithData(chip), shape, 3);
  }
  Random random;
  UnpermuteCall call(1, 1 << 20, 1, 1000, DType::kF32, DType::kF32);
  call.Fill(random);
  ExpectUnpermuted(NpuWithData(Ascend910B2()), call);
}

// Without probabilities rows only move back, bit for bit but for NaN payloads; dropped ones become zero.
TEST(TokenUnpermuteTest, WithoutProbsRowsMove) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      for (std::int64_t rows : {201, 150, 1, 0}) {
        SCOPED_TRACE(Join(NameOf(dtype), " rows ", rows));
        Random random;
        UnpermuteCall call(201, 1, 37, rows, dtype, {});
        call.Fill(random);
        const TokenUnpermuteArgs args = call.args();
        ASSERT_TRUE(IsOk(TokenUnpermute(device, args)));
        ExpectExactly(call.out.view(), reference::Unpermute(args.permuted, args.sorted_indices, {}).out);
        ExpectGuards(call.out);
      }
    }
  }
}

// -1 and every index from M on are dropped slots; with all of them dropped a token is zero.
TEST(TokenUnpermuteTest, DroppedSlots) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      SCOPED_TRACE(NameOf(dtype));
      Random random;
      UnpermuteCall call(90, 4, 37, 50, dtype, dtype);
      call.Fill(random);
      for (std::int64_t s = 0; s < 360; ++s) {
        constexpr double kIndices[] = {-1, 50, 51, std::numeric_limits<std::int32_t>::max(), 49, 0};
        const auto pick = static_cast<std::size_t>(random.Integer(0, 5));
        call.sorted_indices.set({s}, s < 40 ? kIndices[pick % 4] : kIndices[pick]);
      }
      ExpectUnpermuted(device, call);
      for (std::int64_t h = 0; h < 37; ++h) EXPECT_EQ(call.out.at({3, h}), 0);
    }
  }
}

// A row of probability 0 (or -0) is not read: what it holds, NaN or infinity, stays there. One of any other
// probability is.
TEST(TokenUnpermuteTest, RowsOfProbabilityZeroAreNotRead) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      for (DType probs : kFloatTypes) {
        for (double special : {kNaN, kInfinity}) {
          SCOPED_TRACE(Join(NameOf(dtype), " probs ", NameOf(probs), " ", special));
          Random random;
          UnpermuteCall call(40, 3, 41, 120, dtype, probs);
          call.Fill(random);
          call.probs.FillUniform(random, 0.25, 1);
          for (std::int64_t t = 0; t < 40; ++t) {
            const auto row = static_cast<std::int64_t>(call.sorted_indices.at({t * 3 + t % 3}));
            for (std::int64_t h = 0; h < 41; ++h) call.permuted.set({row, h}, special);
            if (t % 4 != 0) call.probs.set({t, t % 3}, t % 4 == 1 ? -0.0 : 0.0);
          }
          ExpectUnpermuted(device, call);
          for (std::int64_t t = 0; t < 40; ++t) EXPECT_EQ(std::isfinite(call.out.at({t, 40})), t % 4 != 0);
        }
      }
    }
  }
}

// Buffers that an earlier call left full of NaN do not show.
TEST(TokenUnpermuteTest, NothingIsLeftOfEarlierCalls) {
  for (const Device& device : {Host({.threads = 1}), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      Random random;
      UnpermuteCall poison(200, 8, 7168, 1600, dtype, dtype), call(61, 5, 1003, 200, dtype, dtype);
      poison.Fill(random), call.Fill(random);
      poison.permuted.FillNaN(), poison.probs.FillNaN();
      ASSERT_TRUE(IsOk(TokenUnpermute(device, poison.args())));
      ExpectUnpermuted(device, call);
    }
  }
}

// Probabilities that are NaN or infinite reach their token alone.
TEST(TokenUnpermuteTest, SpecialProbabilities) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (double special : {kNaN, kInfinity, -kInfinity}) {
      Random random;
      UnpermuteCall call(20, 3, 41, 60, DType::kBF16, DType::kF32);
      call.Fill(random);
      call.permuted.FillUniform(random, 0.5, 1);
      call.probs.set({7, 1}, special);
      ExpectUnpermuted(device, call);
      for (std::int64_t t = 0; t < 20; ++t) EXPECT_EQ(std::isfinite(call.out.at({t, 3})), t != 7);
    }
  }
}

// There and back with weights of 1/k: the tokens, exactly, where 1/k and the partial sums are exact in fp32, and
// within rounding elsewhere. Both outputs start as NaN.
TEST(TokenUnpermuteTest, UndoesPermute) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (std::int64_t k : {1, 2, 3, 4, 6, 8}) {
      for (DType dtype : kFloatTypes) {
        SCOPED_TRACE(Join("k ", k, " ", NameOf(dtype)));
        Random random;
        PermuteCall there({77, k, 16, 65}, {.dtype = dtype});
        there.FillIds(random);
        there.tokens.FillNormal(random);
        there.permuted.FillNaN();
        ASSERT_TRUE(IsOk(TokenPermute(device, there.args())));
        Matrix probs(DType::kF32, {77, k}), back(dtype, {77, 65});
        probs.Fill(1 / static_cast<double>(k));
        back.FillNaN();
        const TokenUnpermuteArgs args{.permuted = there.permuted.view(),
                                      .sorted_indices = there.sorted_indices.view(),
                                      .probs = probs.view(),
                                      .out = back.view()};
        ASSERT_TRUE(IsOk(TokenUnpermute(device, args)));
        if (k <= 2 || (dtype != DType::kF32 && std::has_single_bit(static_cast<std::uint64_t>(k)))) {
          ExpectExactly(back.view(), there.tokens.ToDoubles());
        } else {
          const auto expected = reference::Unpermute(args.permuted, args.sorted_indices, args.probs);
          ExpectClose(back.view(), expected.out, reference::UnpermuteBounds(expected, args.probs, dtype));
        }
      }
    }
  }
}

// Tokens without slots, rows without columns, no rows at all.
TEST(TokenUnpermuteTest, EmptyDimensions) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
    for (std::int64_t t : {0, 5}) {
      for (std::int64_t k : {0, 3}) {
        for (std::int64_t h : {0, 7}) {
          for (std::int64_t m : {0, 4}) {
            SCOPED_TRACE(Join("t ", t, " k ", k, " h ", h, " m ", m));
            Random random;
            UnpermuteCall call(t, k, h, m, DType::kBF16, DType::kF32);
            call.Fill(random);
            if (device.computes()) {
              ExpectUnpermuted(device, call);
            } else {
              EXPECT_TRUE(IsOk(TokenUnpermute(device, call.args())));
            }
          }
        }
      }
    }
  }
}

TEST(TokenUnpermuteTest, RepeatedElements) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int repeated = 0; repeated < 4; ++repeated) {
      SCOPED_TRACE(Join("repeated ", repeated));
      Random random;
      UnpermuteCall call(40, 4, 33, 160, DType::kF16, DType::kBF16);
      call.Fill(random);
      TokenUnpermuteArgs args = call.args();
      if (repeated < 2) args.probs.strides[static_cast<std::size_t>(repeated)] = 0;
      if (repeated == 2) args.sorted_indices.strides[0] = 0;
      if (repeated == 3) args.permuted.strides[0] = 0;
      ASSERT_TRUE(IsOk(TokenUnpermute(device, args)));
      const auto expected = reference::Unpermute(args.permuted, args.sorted_indices, args.probs);
      ExpectClose(call.out.view(), expected.out,
                  reference::UnpermuteBounds(expected, args.probs, DType::kF16));
    }
  }
}

TEST(TokenUnpermuteTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (DType dtype : kFloatTypes) {
    Random random;
    UnpermuteCall call(501, 8, 515, 3500, dtype, DType::kF32);
    call.Fill(random);
    ASSERT_TRUE(IsOk(TokenUnpermute(Host({.threads = 1}), call.args())));
    Matrix first(dtype, {501, 515});
    Assign(first.view(), call.out.ToDoubles());
    for (int threads : kThreadCounts) {
      SCOPED_TRACE(Join(NameOf(dtype), " threads ", threads));
      call.out.FillNaN();
      ASSERT_TRUE(IsOk(TokenUnpermute(Host({.threads = threads}), call.args())));
      ExpectSameBits(call.out.view(), first.view());
    }
  }
}

}  // namespace
}  // namespace cubist::testing
