// TokenPermuteGrad and TokenUnpermuteGrad against the reference and against finite differences, on both executors.
#include "kernels/token_permute_grad.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels/token_permute.h"
#include "reference/bounds.h"
#include "reference/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr Layout kApart{.gap = 5, .offset = 3, .step = 2};

// What a call asks for, besides its sizes: the rows of a window [first, first + rows) of the global order.
struct Options {
  DType dtype = DType::kF32, probs = DType::kF32;
  std::int64_t first = 0;
  std::optional<std::int64_t> rows = {};  // All slots have one.
  bool with_probs = true, with_probs_grad = true;
  Layout layout = {};

  std::int64_t Rows(const PermuteShape& s) const { return rows.value_or(s.tokens * s.topk - first); }
  std::optional<Range> Window(const PermuteShape& s) const {
    if (first == 0 && !rows.has_value()) return {};
    return Range{first, first + Rows(s)};
  }
};

// Distinct rows for the slots, in random order; every seventh slot dropped.
void FillIndices(Random& random, Matrix& indices) {
  std::vector<double> rows(static_cast<std::size_t>(indices.count()));
  std::iota(rows.begin(), rows.end(), 0.0);
  for (std::size_t i = rows.size(); i > 1; --i) {
    std::swap(rows[i - 1],
              rows[static_cast<std::size_t>(random.Integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  for (std::size_t i = 3; i < rows.size(); i += 7) rows[i] = -1;
  Assign(indices.view(), rows);
}

// Tensors of both gradients, between guards; outputs start as NaN.
struct GradCall {
  GradCall(const PermuteShape& s, const Options& o)
      : shape(s),
        options(o),
        token_rows(o.dtype, {s.tokens, s.hidden}, o.layout),
        permuted(o.dtype, {o.Rows(s), s.hidden}, o.layout),
        indices(DType::kI32, {s.tokens * s.topk}, o.layout),
        probs(o.probs, {s.tokens, s.topk}, o.layout),
        row_values(o.probs, {o.Rows(s)}, o.layout),
        rows_out(o.dtype, {o.Rows(s), s.hidden}, o.layout),
        tokens_out(o.dtype, {s.tokens, s.hidden}, o.layout),
        probs_out(o.probs, {s.tokens, s.topk}, o.layout) {
    Random random;
    token_rows.FillNormal(random), permuted.FillNormal(random);
    probs.FillUniform(random), row_values.FillNormal(random);
    FillIndices(random, indices);
    for (Matrix* out : {&rows_out, &tokens_out, &probs_out}) out->FillNaN();
  }

  TokenPermuteGradArgs permute_args() {
    TokenPermuteGradArgs args{.permuted_grad = permuted.view(),
                              .sorted_indices = indices.view(),
                              .top_k = shape.topk,
                              .rows = options.Window(shape),
                              .tokens_grad = tokens_out.view()};
    if (options.with_probs_grad)
      args.permuted_probs_grad = row_values.view(), args.probs_grad = probs_out.view();
    return args;
  }
  TokenUnpermuteGradArgs unpermute_args() {
    TokenUnpermuteGradArgs args{.out_grad = token_rows.view(),
                                .sorted_indices = indices.view(),
                                .top_k = shape.topk,
                                .rows = options.Window(shape),
                                .permuted_grad = rows_out.view()};
    if (options.with_probs) args.probs = probs.view();
    if (options.with_probs_grad) args.permuted = permuted.view(), args.probs_grad = probs_out.view();
    return args;
  }
  void ExpectAllGuards() {
    for (const Matrix* x :
         {&token_rows, &permuted, &indices, &probs, &row_values, &rows_out, &tokens_out, &probs_out})
      ExpectGuards(*x);
  }

  PermuteShape shape;
  Options options;
  Matrix token_rows, permuted, indices, probs, row_values;
  Matrix rows_out, tokens_out, probs_out;
};

void ExpectPermuteGrad(const Device& device, GradCall& call) {
  const TokenPermuteGradArgs args = call.permute_args();
  ASSERT_TRUE(IsOk(TokenPermuteGrad(device, args)));
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(call.shape.tokens));
  std::iota(tokens.begin(), tokens.end(), std::int64_t{0});
  const auto expected = reference::Unpermute(args.permuted_grad, args.sorted_indices, {}, tokens, args.top_k,
                                             call.options.first);
  ExpectClose(call.tokens_out.view(), expected.out,
              reference::UnpermuteBounds(expected, {}, call.options.dtype, args.top_k));
  if (call.options.with_probs_grad) {
    ExpectExactly(call.probs_out.view(),
                  reference::GatherBySlot(args.permuted_probs_grad, args.sorted_indices, call.options.first));
  }
  call.ExpectAllGuards();
}

void ExpectUnpermuteGrad(const Device& device, GradCall& call) {
  const TokenUnpermuteGradArgs args = call.unpermute_args();
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, args)));
  const auto expected =
      reference::UnpermuteGrad(args.out_grad, args.permuted, args.sorted_indices, args.probs,
                               args.permuted_grad.size(0), call.shape.topk, call.options.first);
  std::vector<double> row_bounds, prob_bounds;
  for (double x : expected.permuted_grad)
    row_bounds.push_back(reference::WeightedSumBound(1, call.options.dtype, x, std::abs(x)));
  ExpectClose(call.rows_out.view(), expected.permuted_grad, row_bounds);
  for (std::size_t i = 0; i < expected.probs_grad.size(); ++i) {
    prob_bounds.push_back(reference::WeightedSumBound(
        call.shape.hidden, call.options.probs, expected.probs_grad[i], expected.probs_grad_magnitude[i]));
  }
  if (call.options.with_probs_grad) ExpectClose(call.probs_out.view(), expected.probs_grad, prob_bounds);
  call.ExpectAllGuards();
}

void ExpectGrads(const Device& device, const PermuteShape& shape) {
  const std::int64_t slots = shape.tokens * shape.topk;
  const Options all[] = {
      {},
      {.dtype = DType::kBF16, .first = slots / 3, .rows = slots / 2},
      {.dtype = DType::kF16, .probs = DType::kBF16, .layout = kApart},
      {.dtype = DType::kBF16, .probs = DType::kF16, .rows = slots + 5, .with_probs = false},
      {.dtype = DType::kBF16, .with_probs_grad = false, .layout = kContiguous},
      {.dtype = DType::kF32, .first = slots / 2, .rows = 0}};  // An empty window is empty.
  int number = 0;
  for (const Options& options : all) {
    SCOPED_TRACE(Join(shape.Name(), " options ", number++));
    GradCall call(shape, options);
    ExpectPermuteGrad(device, call);
    call.probs_out.FillNaN();
    ExpectUnpermuteGrad(device, call);
  }
}

class TokenPermuteGradShapeTest : public ::testing::TestWithParam<PermuteShape> {};
TEST_P(TokenPermuteGradShapeTest, WithinBounds) { ExpectGrads(Host(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Shapes, TokenPermuteGradShapeTest, ::testing::ValuesIn(PermuteShapes()),
                         ShapeName());

std::vector<PermuteShape> FewShapes() {
  return {{1, 1, 1, 1}, {13, 3, 7, 65},  {29, 2, 255, 5},    {4, 0, 3, 5},     {3, 2, 4, 0},
          {0, 2, 5, 9}, {1, 8, 9, 7168}, {300, 8, 256, 129}, {3, 2, 2, 20011}, {5, 70, 100, 33}};
}

class TokenPermuteGradSimdTest : public SimdTargetTest {};
TEST_P(TokenPermuteGradSimdTest, WithinBounds) {
  for (const PermuteShape& shape : FewShapes()) ExpectGrads(Host(), shape);
}
INSTANTIATE_TEST_SUITE_P(Simd, TokenPermuteGradSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(TokenPermuteGradOnNpuTest, WithinBounds) {
  for (const PermuteShape& shape : FewShapes()) {
    ExpectGrads(NpuWithData(Ascend910B2()), shape);
    ExpectGrads(NpuWithData(Ascend910B4()), shape);
  }
}

// Of a token whose routes do not fit, parts of them.
TEST(TokenPermuteGradOnNpuTest, RoutesInParts) {
  for (const PermuteShape& shape : {PermuteShape{9, 100, 1, 5}, PermuteShape{3, 700, 1, 130}}) {
    const TokenPermuteShape tiled{.tokens = shape.tokens, .hidden = shape.hidden, .top_k = shape.topk};
    auto chips = ChipsThatCutRoutes<TokenUnpermuteGradTiling>(tiled);
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) ExpectGrads(NpuWithData(chip), shape);
    // The gradient of permute is an unpermute.
    chips = ChipsThatCutRoutes<TokenUnpermuteTiling>(tiled);
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) {
      for (const std::int64_t first : {0, 40}) {
        GradCall call(shape, {.first = first});
        ExpectPermuteGrad(NpuWithData(chip), call);
      }
    }
  }
}

// The loss is the sum of weights(t, h) * out(t, h). Its slopes by central differences, in every
// permuted element and every probability of a small problem.
TEST(TokenPermuteGradTest, UnpermuteGradIsTheSlope) {
  const PermuteShape shape{4, 3, 5, 6};
  GradCall call(shape, {});
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(Host(), call.unpermute_args())));
  Matrix out(DType::kF32, {4, 6});
  const auto loss = [&] {
    EXPECT_TRUE(IsOk(TokenUnpermute(Host(), {.permuted = call.permuted.view(),
                                             .sorted_indices = call.indices.view(),
                                             .probs = call.probs.view(),
                                             .out = out.view()})));
    const std::vector<double> y = out.ToDoubles(), g = call.token_rows.ToDoubles();
    return std::inner_product(y.begin(), y.end(), g.begin(), 0.0);
  };
  const auto expect_slope = [&](Matrix& x, const Matrix& grad) {
    for (std::int64_t i = 0; i < x.size(0); ++i) {
      for (std::int64_t j = 0; j < x.size(1); ++j) {
        constexpr double kStep = 0x1p-5;  // The loss is linear in either: a large step costs nothing.
        const double at = x.at({i, j});
        x.set({i, j}, at + kStep);
        const double above = loss();
        x.set({i, j}, at - kStep);
        const double below = loss();
        x.set({i, j}, at);
        EXPECT_NEAR(grad.at({i, j}), (above - below) / (2 * kStep), 2e-4) << i << ", " << j;
      }
    }
  };
  expect_slope(call.permuted, call.rows_out);
  expect_slope(call.probs, call.probs_out);
}

// <permute(x), g> = <x, permute_grad(g)>, for tokens and, through the ranks' windows, their sum.
TEST(TokenPermuteGradTest, IsTheAdjointOfPermute) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Random random;
    Matrix tokens(DType::kF32, {90, 33}), ids(DType::kI32, {90, 4}), permuted(DType::kF32, {360, 33}),
        sorted(DType::kI32, {360}), grad(DType::kF32, {360, 33}), back(DType::kF32, {90, 33});
    tokens.FillNormal(random), grad.FillNormal(random), ids.FillIntegers(random, 0, 6);
    ASSERT_TRUE(IsOk(TokenPermute(device, {.tokens = tokens.view(),
                                           .topk_ids = ids.view(),
                                           .num_experts = 7,
                                           .permuted = permuted.view(),
                                           .sorted_indices = sorted.view()})));
    const auto dot = [](const Matrix& x, const Matrix& y) {
      const std::vector<double> a = x.ToDoubles(), b = y.ToDoubles();
      return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    double sum = 0;
    for (const Range rows : {Range{0, 100}, Range{100, 100}, Range{100, 333}, Range{333, 360}}) {
      Tensor part = grad.view();
      part.data = static_cast<float*>(part.data) + rows.begin * part.stride(0);
      part.sizes[0] = rows.size();
      ASSERT_TRUE(IsOk(TokenPermuteGrad(device, {.permuted_grad = part,
                                                 .sorted_indices = sorted.view(),
                                                 .top_k = 4,
                                                 .rows = rows,
                                                 .tokens_grad = back.view()})));
      sum += dot(tokens, back);
    }
    EXPECT_NEAR(sum, dot(permuted, grad), 1e-3);
  }
}

TEST(TokenPermuteGradTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const PermuteShape shape{301, 8, 64, 259};
  for (DType dtype : kFloatTypes) {
    std::vector<Matrix> first;
    for (int threads : kThreadCounts) {
      SCOPED_TRACE(Join(NameOf(dtype), " threads ", threads));
      GradCall call(shape, {.dtype = dtype, .rows = 2100});
      const Device host = Host({.threads = threads});
      ASSERT_TRUE(IsOk(TokenUnpermuteGrad(host, call.unpermute_args())));
      std::vector<Matrix> results = {call.rows_out, call.probs_out};
      call.probs_out.FillNaN();
      ASSERT_TRUE(IsOk(TokenPermuteGrad(host, call.permute_args())));
      results.push_back(call.tokens_out), results.push_back(call.probs_out);
      if (first.empty()) first = results;
      for (std::size_t i = 0; i < first.size(); ++i) ExpectSameBits(results[i].view(), first[i].view());
    }
  }
}

// Random calls; the seed is part of every failure.
template <class Expect>
void ExpectRandomCalls(std::uint64_t first_seed, Expect expect) {
  for (std::uint64_t seed = first_seed; seed < first_seed + 60; ++seed) {
    SCOPED_TRACE(Join("seed ", seed));
    Random random(RunSeed() + seed);
    const auto coin = [&] { return random.Integer(0, 1) == 1; };
    const PermuteShape shape{random.Integer(0, 50), random.Integer(0, 12), 1, random.Integer(0, 200)};
    const std::int64_t slots = shape.tokens * shape.topk;
    Options options{.dtype = kFloatTypes[random.Integer(0, 2)],
                    .probs = kFloatTypes[random.Integer(0, 2)],
                    .first = coin() ? random.Integer(0, slots) : 0};
    if (coin()) options.rows = random.Integer(0, slots - options.first + 5);
    options.with_probs = coin(), options.with_probs_grad = coin();
    options.layout = {
        .gap = random.Integer(0, 5), .offset = random.Integer(0, 3), .step = random.Integer(1, 2)};
    GradCall call(shape, options);
    FillIndices(random, call.indices);
    expect(seed % 3 == 0 ? NpuWithData(Ascend910B2()) : Host(), call);
  }
}
TEST(TokenPermuteGradTest, RandomCallsAgreeWithTheReference) { ExpectRandomCalls(1, &ExpectPermuteGrad); }
TEST(TokenPermuteGradTest, RandomUnpermutesAgreeWithTheReference) {
  ExpectRandomCalls(101, &ExpectUnpermuteGrad);
}

// A row that two slots claim would be written twice: an error that names it.
TEST(TokenPermuteGradTest, RowsOfTwoSlotsAreAnError) {
  GradCall call({5, 3, 4, 8}, {});
  call.indices.set({2}, 4), call.indices.set({11}, 4);
  std::int64_t others = 0;
  for (std::int64_t s = 0; s < 15; ++s) {
    if (s != 2 && s != 11) call.indices.set({s}, static_cast<double>(20 + others++));
  }
  const Status status = TokenUnpermuteGrad(Host(), call.unpermute_args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("sorted_indices has row 4 a second time at (11)"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace cubist::testing
