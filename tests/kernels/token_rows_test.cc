// TokenUnpermute and both gradients where row_tokens say whose the rows of experts with a capacity are, rows of
// padding by tokens among them. Against the reference, finite differences and each other, on both executors.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "reference/bounds.h"
#include "reference/token_routes.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

constexpr Layout kApart{.gap = 5, .offset = 3, .step = 2};

// Of an expert `capacity` rows, of which about `filled` of eight are a token's.
struct RowsShape {
  std::int64_t tokens = 0, experts = 0, capacity = 0, hidden = 0;
  int filled = 7;

  std::string Name() const {
    return Join(tokens, "x", experts, "x", capacity, "x", hidden, " ", filled, "/8");
  }
};

struct Options {
  DType dtype = DType::kF32, probs = DType::kF32;
  std::optional<Range> window = {};  // Of all rows.
  bool with_probs = true, with_probs_grad = true, with_residual = false;
  Layout layout = {};
};

// A call of each kernel, its tensors between guards; outputs start as NaN.
struct RowsCall {
  RowsCall(const RowsShape& s, const Options& o)
      : shape(s),
        options(o),
        here(o.window.value_or(Range{0, s.experts * s.capacity})),
        token_rows(o.dtype, {s.tokens, s.hidden}, o.layout),
        permuted(o.dtype, {here.size(), s.hidden}, o.layout),
        row_tokens(DType::kI32, {here.size()}, o.layout),
        probs(o.probs, {s.tokens, s.experts}, o.layout),
        row_values(o.probs, {here.size()}, o.layout),
        out(o.dtype, {s.tokens, s.hidden}, o.layout),
        rows_out(o.dtype, {here.size(), s.hidden}, o.layout),
        tokens_out(o.dtype, {s.tokens, s.hidden}, o.layout),
        probs_out(o.probs, {s.tokens, s.experts}, o.layout) {
    Random random;
    token_rows.FillNormal(random), permuted.FillNormal(random);
    probs.FillUniform(random), row_values.FillNormal(random);
    FillTokens(random);
    for (Matrix* x : {&out, &rows_out, &tokens_out, &probs_out}) x->FillNaN();
  }

  // Every expert's rows are different tokens, in random order.
  void FillTokens(Random& random) {
    std::vector<double> all;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      std::vector<double> tokens(static_cast<std::size_t>(std::max(shape.tokens, shape.capacity)), -1.0);
      for (std::int64_t t = 0; t < shape.tokens; ++t) {
        if (random.Integer(1, 8) <= shape.filled)
          tokens[static_cast<std::size_t>(t)] = static_cast<double>(t);
      }
      for (std::size_t i = tokens.size(); i > 1; --i)
        std::swap(tokens[i - 1],
                  tokens[static_cast<std::size_t>(random.Integer(0, static_cast<std::int64_t>(i) - 1))]);
      all.insert(all.end(), tokens.begin(), tokens.begin() + shape.capacity);
    }
    Assign(row_tokens.view(), {all.begin() + here.begin, all.begin() + here.end});
  }

  TokenUnpermuteArgs unpermute_args() {
    TokenUnpermuteArgs args{.permuted = permuted.view(),
                            .row_tokens = row_tokens.view(),
                            .capacity = shape.capacity,
                            .rows = options.window,
                            .out = out.view()};
    if (options.with_probs) args.probs = probs.view();
    if (options.with_residual) args.residual = token_rows.view();
    return args;
  }
  TokenPermuteGradArgs permute_grad_args() {
    TokenPermuteGradArgs args{.permuted_grad = permuted.view(),
                              .row_tokens = row_tokens.view(),
                              .capacity = shape.capacity,
                              .rows = options.window,
                              .tokens_grad = tokens_out.view()};
    if (options.with_probs_grad)
      args.permuted_probs_grad = row_values.view(), args.probs_grad = probs_out.view();
    return args;
  }
  TokenUnpermuteGradArgs unpermute_grad_args() {
    TokenUnpermuteGradArgs args{.out_grad = token_rows.view(),
                                .row_tokens = row_tokens.view(),
                                .capacity = shape.capacity,
                                .rows = options.window,
                                .permuted_grad = rows_out.view()};
    if (options.with_probs) args.probs = probs.view();
    if (options.with_probs_grad) args.permuted = permuted.view(), args.probs_grad = probs_out.view();
    return args;
  }
  reference::TokensOfRows reference_rows() { return {row_tokens.view(), shape.capacity, here.begin}; }
  std::vector<const Matrix*> all() const {
    return {&token_rows, &permuted, &row_tokens, &probs,    &row_values,
            &out,        &rows_out, &tokens_out, &probs_out};
  }

  RowsShape shape;
  Options options;
  Range here;
  Matrix token_rows, permuted, row_tokens, probs, row_values;
  Matrix out, rows_out, tokens_out, probs_out;
};

std::vector<double> SumBounds(std::int64_t terms, DType dtype, const std::vector<double>& values,
                              const std::vector<double>& magnitudes) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < values.size(); ++i)
    bounds.push_back(reference::WeightedSumBound(terms, dtype, values[i], magnitudes[i]));
  return bounds;
}

void ExpectUnpermute(const Device& device, RowsCall& call) {
  const TokenUnpermuteArgs args = call.unpermute_args();
  ASSERT_TRUE(IsOk(TokenUnpermute(device, args)));
  const auto expected = reference::UnpermuteByRow(args.permuted, call.reference_rows(), args.probs,
                                                  call.shape.tokens, args.residual);
  ExpectClose(call.out.view(), expected.out,
              SumBounds(call.shape.experts + 1, call.options.dtype, expected.out, expected.magnitude));
}

void ExpectPermuteGrad(const Device& device, RowsCall& call) {
  const TokenPermuteGradArgs args = call.permute_grad_args();
  ASSERT_TRUE(IsOk(TokenPermuteGrad(device, args)));
  const auto expected =
      reference::UnpermuteByRow(args.permuted_grad, call.reference_rows(), {}, call.shape.tokens);
  ExpectClose(call.tokens_out.view(), expected.out,
              SumBounds(call.shape.experts, call.options.dtype, expected.out, expected.magnitude));
  if (!call.options.with_probs_grad) return;
  ExpectExactly(call.probs_out.view(), reference::SpreadByRow(args.permuted_probs_grad, call.reference_rows(),
                                                              call.shape.tokens, call.shape.experts));
}

void ExpectUnpermuteGrad(const Device& device, RowsCall& call) {
  const TokenUnpermuteGradArgs args = call.unpermute_grad_args();
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, args)));
  const auto expected = reference::UnpermuteGradByRow(args.out_grad, args.permuted, call.reference_rows(),
                                                      args.probs, call.shape.experts);
  std::vector<double> magnitudes;
  for (const double x : expected.permuted_grad) magnitudes.push_back(std::abs(x));
  ExpectClose(call.rows_out.view(), expected.permuted_grad,
              SumBounds(1, call.options.dtype, expected.permuted_grad, magnitudes));
  if (!call.options.with_probs_grad) return;
  ExpectClose(
      call.probs_out.view(), expected.probs_grad,
      SumBounds(call.shape.hidden, call.options.probs, expected.probs_grad, expected.probs_grad_magnitude));
}

void ExpectRows(const Device& device, const RowsShape& shape, const Options& options) {
  RowsCall call(shape, options);
  ExpectUnpermute(device, call);
  ExpectPermuteGrad(device, call);
  call.probs_out.FillNaN();
  ExpectUnpermuteGrad(device, call);
  for (const Matrix* x : call.all()) ExpectGuards(*x);
}

std::vector<Options> AllOptions(const RowsShape& s) {
  const std::int64_t rows = s.experts * s.capacity;
  return {{},
          {.dtype = DType::kBF16, .window = Range{rows / 3, rows - rows / 4}},
          {.dtype = DType::kF16, .probs = DType::kBF16, .with_residual = true, .layout = kApart},
          {.dtype = DType::kBF16, .probs = DType::kF16, .with_probs = false},
          {.with_probs = false, .with_probs_grad = false},
          {.dtype = DType::kBF16, .with_probs_grad = false, .layout = kContiguous},
          {.window = Range{rows / 2, rows / 2}},
          {.window = Range{rows / 2, rows / 2 + 1}, .with_probs = false, .with_probs_grad = false}};
}

void ExpectRows(const Device& device, const RowsShape& shape) {
  int number = 0;
  for (const Options& options : AllOptions(shape)) {
    SCOPED_TRACE(Join(shape.Name(), " options ", number++));
    ExpectRows(device, shape, options);
  }
}

std::vector<RowsShape> Shapes() {
  return {{1, 1, 1, 1},    {13, 7, 3, 65, 8}, {40, 5, 40, 33, 8},   {29, 12, 40, 5, 4}, {4, 3, 2, 5, 0},
          {3, 4, 2, 0},    {0, 5, 2, 9},      {300, 16, 150, 129},  {7, 1, 7, 7168},    {3, 40, 1, 20011},
          {90, 600, 2, 9}, {5, 2, 3000, 17},  {2000, 3, 1100, 4, 8}};
}
TEST(TokenRowsTest, OnHost) {
  for (const RowsShape& shape : Shapes()) ExpectRows(Host(), shape);
}
TEST(TokenRowsTest, OnNpu) {
  for (const RowsShape& shape : Shapes()) {
    ExpectRows(NpuWithData(Ascend910B2()), shape);
    ExpectRows(NpuWithData(Ascend910B4()), shape);
  }
}

// Random calls of all three; the seed is part of every failure.
TEST(TokenRowsTest, RandomCallsAgreeWithTheReference) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(Join("seed ", seed));
    Random random(RunSeed() + seed);
    const auto coin = [&] { return random.Integer(0, 1) == 1; };
    const RowsShape shape{random.Integer(0, 50), random.Integer(1, 20), random.Integer(1, 30),
                          random.Integer(0, 200), static_cast<int>(random.Integer(0, 8))};
    Options options{.dtype = kFloatTypes[random.Integer(0, 2)], .probs = kFloatTypes[random.Integer(0, 2)]};
    if (coin()) {
      const std::int64_t rows = shape.experts * shape.capacity, begin = random.Integer(0, rows);
      options.window = Range{begin, random.Integer(begin, rows)};
    }
    options.with_probs = coin(), options.with_probs_grad = coin(), options.with_residual = coin();
    options.layout = {
        .gap = random.Integer(0, 5), .offset = random.Integer(0, 3), .step = random.Integer(1, 2)};
    ExpectRows(seed % 3 == 0 ? NpuWithData(Ascend910B2()) : Host(), shape, options);
  }
}

TEST(TokenRowsTest, SameBitsOnNpuAsOnHost) {
  const RowsShape shape{120, 9, 50, 515};
  for (const DType dtype : kFloatTypes) {
    RowsCall host(shape, {.dtype = dtype}), npu(shape, {.dtype = dtype});
    for (auto [device, call] : {std::pair{Host(), &host}, std::pair{NpuWithData(Ascend910B2()), &npu}}) {
      ASSERT_TRUE(IsOk(TokenUnpermute(device, call->unpermute_args())));
      ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, call->unpermute_grad_args())));
      ASSERT_TRUE(IsOk(TokenPermuteGrad(device, call->permute_grad_args())));
    }
    ExpectSameBits(npu.out.view(), host.out.view());
    ExpectSameBits(npu.rows_out.view(), host.rows_out.view());
    ExpectSameBits(npu.tokens_out.view(), host.tokens_out.view());
    ExpectSameBits(npu.probs_out.view(), host.probs_out.view());
  }
}

// Of a token whose experts do not fit UB, parts of them.
TEST(TokenRowsTest, ExpertsInParts) {
  const RowsShape shape{5, 700, 3, 33};
  const TokenPermuteShape tiled{.tokens = shape.tokens, .hidden = shape.hidden, .top_k = shape.experts};
  for (const auto& chips : {ChipsThatCutRoutes<TokenUnpermuteTiling>(tiled),
                            ChipsThatCutRoutes<TokenUnpermuteGradTiling>(tiled)}) {
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) {
      SCOPED_TRACE(Join(chip.buffer(Buffer::kUB).capacity, " bytes of UB"));
      for (const Options& options : {Options{}, Options{.with_probs_grad = false}}) {
        RowsCall call(shape, options);
        if (TokenUnpermuteGrad(NpuWithData(chip), call.unpermute_grad_args()).ok())
          ExpectRows(NpuWithData(chip), shape, options);
      }
    }
  }
}

TEST(TokenRowsTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const RowsShape shape{301, 16, 150, 131};
  for (const DType dtype : kFloatTypes) {
    std::vector<Matrix> first;
    for (const int threads : kThreadCounts) {
      SCOPED_TRACE(Join(NameOf(dtype), " threads ", threads));
      RowsCall call(shape, {.dtype = dtype});
      const Device host = Host({.threads = threads});
      ASSERT_TRUE(IsOk(TokenUnpermute(host, call.unpermute_args())));
      ASSERT_TRUE(IsOk(TokenPermuteGrad(host, call.permute_grad_args())));
      std::vector<Matrix> results = {call.out, call.tokens_out, call.probs_out};
      ASSERT_TRUE(IsOk(TokenUnpermuteGrad(host, call.unpermute_grad_args())));
      results.push_back(call.rows_out), results.push_back(call.probs_out);
      if (first.empty()) first = results;
      for (std::size_t i = 0; i < first.size(); ++i) ExpectSameBits(results[i].view(), first[i].view());
    }
  }
}

// 1e8 + 1 is 1e8 in fp32: the sum tells in which order experts are added.
TEST(TokenRowsTest, RowsOfATokenAreAddedByExpert) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const bool one_last : {false, true}) {
      Matrix permuted(DType::kF32, {3, 1}), row_tokens(DType::kI32, {3}), out(DType::kF32, {1, 1});
      Assign(permuted.view(),
             one_last ? std::vector<double>{1e8, -1e8, 1} : std::vector<double>{1e8, 1, -1e8});
      row_tokens.Fill(0), out.FillNaN();
      ASSERT_TRUE(IsOk(TokenUnpermute(
          device,
          {.permuted = permuted.view(), .row_tokens = row_tokens.view(), .capacity = 1, .out = out.view()})));
      EXPECT_EQ(out.at({0, 0}), one_last ? 1 : 0);
    }
  }
}

// Tokens to experts with a capacity and back, rows that pad among them: the loss
//   sum of g * unpermute(permute(x), p) + sum of h * permuted_probs
// is linear in every element of x and of p, so that large steps cost nothing.
struct PaddedLayer {
  static constexpr std::int64_t kTokens = 7, kExperts = 4, kCapacity = 5, kHidden = 3,
                                kRows = kExperts * kCapacity;

  PaddedLayer() {
    Random random;
    for (Matrix* matrix : {&x, &p, &g, &h}) matrix->FillNormal(random);
    map.Fill(0), valid.Fill(1), valid.set({2}, 0);
    for (std::int64_t t = 0; t < kTokens; ++t) map.set({t, t % 3}, 1), map.set({t, (t + 1) % kExperts}, 1);
  }

  void Permute(const Device& device) {
    ASSERT_TRUE(IsOk(TokenPermute(device, {.tokens = x.view(),
                                           .routing_map = map.view(),
                                           .valid = valid.view(),
                                           .probs = p.view(),
                                           .top_k = 2,
                                           .num_experts = kExperts,
                                           .capacity = kCapacity,
                                           .pad_with_tokens = true,
                                           .permuted = permuted.view(),
                                           .sorted_indices = sorted.view(),
                                           .permuted_probs = row_probs.view(),
                                           .row_tokens = row_tokens.view()})));
  }
  double Loss(const Device& device) {
    Permute(device);
    EXPECT_TRUE(IsOk(TokenUnpermute(device, {.permuted = permuted.view(),
                                             .row_tokens = row_tokens.view(),
                                             .capacity = kCapacity,
                                             .probs = p.view(),
                                             .out = out.view()})));
    return Dot(g, out) + Dot(h, row_probs);
  }
  void Differentiate(const Device& device) {
    Loss(device);
    ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, {.out_grad = g.view(),
                                                 .permuted = permuted.view(),
                                                 .row_tokens = row_tokens.view(),
                                                 .capacity = kCapacity,
                                                 .probs = p.view(),
                                                 .permuted_grad = d_permuted.view(),
                                                 .probs_grad = d_weights.view()})));
    ASSERT_TRUE(IsOk(TokenPermuteGrad(device, {.permuted_grad = d_permuted.view(),
                                               .row_tokens = row_tokens.view(),
                                               .capacity = kCapacity,
                                               .permuted_probs_grad = h.view(),
                                               .tokens_grad = d_x.view(),
                                               .probs_grad = d_probs.view()})));
  }
  static double Dot(const Matrix& a, const Matrix& b) {
    const std::vector<double> x = a.ToDoubles(), y = b.ToDoubles();
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  }
  double Slope(const Device& device, Matrix& of, std::int64_t i, std::int64_t j) {
    constexpr double kStep = 0.5;
    const double at = of.at({i, j});
    of.set({i, j}, at + kStep);
    const double above = Loss(device);
    of.set({i, j}, at - kStep);
    const double below = Loss(device);
    of.set({i, j}, at);
    return (above - below) / (2 * kStep);
  }

  Matrix x{DType::kF32, {kTokens, kHidden}}, p{DType::kF32, {kTokens, kExperts}}, g = x,
                                                                                  h{DType::kF32, {kRows}};
  Matrix map{DType::kBool, {kTokens, kExperts}}, valid{DType::kBool, {kTokens}};
  Matrix permuted{DType::kF32, {kRows, kHidden}}, sorted{DType::kI32, {2 * kTokens}},
      row_probs = h, row_tokens{DType::kI32, {kRows}}, out = x;
  Matrix d_permuted = permuted, d_weights = p, d_x = x, d_probs = p;
};

TEST(TokenRowsTest, GradientsThroughPadsAreSlopes) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    PaddedLayer layer;
    layer.Differentiate(device);
    std::int64_t pads = 0;  // Rows that no slot has.
    for (std::int64_t r = 0; r < PaddedLayer::kRows; ++r) {
      const auto token = static_cast<std::int64_t>(layer.row_tokens.at({r}));
      ASSERT_GE(token, 0);
      const bool routed = layer.map.at({token, r / PaddedLayer::kCapacity}) != 0;
      pads += routed && layer.valid.at({token}) != 0 ? 0 : 1;
    }
    EXPECT_GT(pads, 4);
    for (std::int64_t t = 0; t < PaddedLayer::kTokens; ++t) {
      for (std::int64_t j = 0; j < PaddedLayer::kHidden; ++j)
        EXPECT_NEAR(layer.d_x.at({t, j}), layer.Slope(device, layer.x, t, j), 1e-5) << t << ", " << j;
      for (std::int64_t e = 0; e < PaddedLayer::kExperts; ++e) {
        EXPECT_NEAR(layer.d_weights.at({t, e}) + layer.d_probs.at({t, e}), layer.Slope(device, layer.p, t, e),
                    1e-5)
            << t << ", " << e;
      }
    }
  }
}

// Without rows of padding, by row is by slot.
TEST(TokenRowsTest, BySlotWhereNothingPads) {
  PaddedLayer layer;
  layer.map.Fill(0), layer.valid.Fill(1);
  for (std::int64_t t = 0; t < PaddedLayer::kTokens; ++t)
    layer.map.set({t, t % 4}, 1), layer.map.set({t, 3}, 1);
  TokenPermuteArgs permute{.tokens = layer.x.view(),
                           .routing_map = layer.map.view(),
                           .top_k = 2,
                           .num_experts = PaddedLayer::kExperts,
                           .capacity = PaddedLayer::kCapacity,
                           .permuted = layer.permuted.view(),
                           .sorted_indices = layer.sorted.view(),
                           .row_tokens = layer.row_tokens.view()};
  ASSERT_TRUE(IsOk(TokenPermute(Host(), permute)));
  TokenUnpermuteGradArgs grad{.out_grad = layer.g.view(),
                              .permuted = layer.permuted.view(),
                              .row_tokens = layer.row_tokens.view(),
                              .capacity = PaddedLayer::kCapacity,
                              .probs = layer.p.view(),
                              .permuted_grad = layer.d_permuted.view(),
                              .probs_grad = layer.d_weights.view()};
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(Host(), grad)));
  Matrix rows = layer.permuted, weights = layer.p;
  rows.FillNaN(), weights.FillNaN();
  grad.row_tokens = {}, grad.capacity = 0, grad.permuted_grad = rows.view(), grad.probs_grad = weights.view();
  grad.sorted_indices = layer.sorted.view(), grad.routing_map = layer.map.view(), grad.top_k = 2;
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(Host(), grad)));
  ExpectSameBits(rows.view(), layer.d_permuted.view());
  ExpectSameBits(weights.view(), layer.d_weights.view());
}

// Of chips with less and less UB, those that a call fits compute what it does, and the others say what is missing.
TEST(TokenRowsTest, SmallChips) {
  const RowsShape shape{9, 4, 5, 40};
  for (std::int64_t bytes = 16 << 10; bytes >= 256; bytes = bytes * 3 / 4 / 32 * 32) {
    SCOPED_TRACE(Join(bytes, " bytes of UB"));
    const Device npu = NpuWithData(WithCapacity(Buffer::kUB, bytes));
    RowsCall call(shape, {});
    const Status status = TokenUnpermuteGrad(npu, call.unpermute_grad_args());
    if (status.ok()) {
      ExpectRows(npu, shape, {});
    } else {
      EXPECT_LT(bytes, 8 << 10);
      EXPECT_TRUE(Says(status, {"token_unpermute_grad", "UB"}));
    }
  }
}

struct Fixture : RowsCall {
  Fixture() : RowsCall({6, 4, 3, 5, 8}, {}) {
    for (std::int64_t r = 0; r < 12; ++r) row_tokens.set({r}, static_cast<double>((r * 5 + r / 3) % 6));
  }
};
struct UnpermuteFixture : Fixture {
  TokenUnpermuteArgs args() { return unpermute_args(); }
};
struct PermuteGradFixture : Fixture {
  TokenPermuteGradArgs args() { return permute_grad_args(); }
};
struct UnpermuteGradFixture : Fixture {
  TokenUnpermuteGradArgs args() { return unpermute_grad_args(); }
};

void SetToken(const ConstTensor& row_tokens, std::int64_t row, std::int32_t token) {
  static_cast<std::int32_t*>(const_cast<void*>(row_tokens.data))[row * row_tokens.stride(0)] = token;
}

// What all three refuse, in the kernel's name; rows_name is that of (M, H).
template <class Args>
std::vector<BadCall<Args>> BadRows(const std::string& who, const std::string& rows_name) {
  static const std::int32_t kIndices[24] = {};
  static const std::uint8_t kFlags[24] = {};
  return {
      {"both",
       [](auto& x) { x.sorted_indices = ConstTensor(kIndices, {24}); },
       {who, "row_tokens and sorted_indices are both given"}},
      {"neither", [](auto& x) { x.row_tokens = {}, x.capacity = 0; }, {who, "sorted_indices is not given"}},
      {"a map",
       [](auto& x) {
         x.routing_map = ConstTensor(kFlags, DType::kBool, {6, 4}), x.top_k = 4;
       },
       {who, "routing_map is given with row_tokens"}},
      {"no capacity", [](auto& x) { x.capacity = 0; }, {who, "capacity is 0", "1 to 2^31 - 1"}},
      {"negative capacity", [](auto& x) { x.capacity = -3; }, {who, "capacity is -3", "1 to 2^31 - 1"}},
      {"huge capacity", [](auto& x) { x.capacity = kHuge; }, {who, "capacity is 4611686018427387904"}},
      {"many rows",
       [](auto& x) { x.capacity = 1 << 30; },
       {who, "row_tokens makes 4 x 1073741824", "2^31 - 1"}},
      {"rows of another capacity", [](auto& x) { x.capacity = 4; }, {who, rows_name, "size 12", "needs 16"}},
      {"capacity by slot",
       [](auto& x) { x.sorted_indices = ConstTensor(kIndices, {24}), x.row_tokens = {}, x.top_k = 4; },
       {who, "capacity is 3, needs 0 without row_tokens"}},
      {"window beyond",
       [](auto& x) {
         x.rows = Range{1, 13};
       },
       {who, "rows is [1, 13)", "at most experts * capacity = 12"}},
      {"row_tokens of another M",
       [](auto& x) { x.row_tokens.sizes[0] = 11; },
       {who, "row_tokens", "size 11", "needs 12"}},
      {"row_tokens int64",
       [](auto& x) { x.row_tokens.dtype = DType::kI64; },
       {who, "row_tokens", "int64", "int32"}},
      {"row_tokens null", [](auto& x) { x.row_tokens.data = nullptr; }, {who, "row_tokens", "null"}},
  };
}
// Those that spoil the values, which the call may not touch either.
template <class Kernel>
void ExpectBadTokens(Kernel kernel) {
  for (const auto& [row, token, says] : std::vector<std::tuple<std::int64_t, std::int32_t, std::string>>{
           {7, 6, "row_tokens has 6 at (7), needs values in [-1, 6)"},
           {4, -2, "row_tokens has -2 at (4), needs values in [-1, 6)"}}) {
    Fixture call;
    SetToken(call.row_tokens.view(), row, token);
    const Fixture before = call;
    const Status status = kernel(call);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Says(status, {says}));
    for (std::size_t i = 0; i < call.all().size(); ++i)
      ExpectSameBits(call.all()[i]->view(), before.all()[i]->view());
  }
  Fixture call;
  SetToken(call.row_tokens.view(), 8, static_cast<std::int32_t>(call.row_tokens.at({6})));
  EXPECT_TRUE(Says(kernel(call), {Join("row_tokens has token ", call.row_tokens.at({6}),
                                       " a second time at (8), an expert has one row of a token")}));
  EXPECT_TRUE(std::isnan(call.out.at({0, 0})) && std::isnan(call.rows_out.at({0, 0})));
  SetToken(call.row_tokens.view(), 8, -1);
  EXPECT_TRUE(IsOk(kernel(call)));
}

TEST(TokenRowsTest, BadUnpermute) {
  auto calls = BadRows<TokenUnpermuteArgs>("token_unpermute: ", "permuted");
  calls.push_back({"a bias",
                   [](auto& x) { x.bias = x.permuted, x.topk_ids = x.row_tokens; },
                   {"token_unpermute: bias is by slot"}});
  calls.push_back(
      {"ids", [](auto& x) { x.topk_ids = x.row_tokens; }, {"token_unpermute: topk_ids is by slot"}});
  calls.push_back({"out on row_tokens",
                   [](auto& x) { x.out.data = const_cast<void*>(x.row_tokens.data); },
                   {"token_unpermute: out", "row_tokens", "overlaps"}});
  const auto run = [](const Device& device, const TokenUnpermuteArgs& args) {
    return TokenUnpermute(device, args);
  };
  ExpectErrors<UnpermuteFixture>(calls, run);
  ExpectBadTokens([&](Fixture& call) { return run(Host(), call.unpermute_args()); });
}

TEST(TokenRowsTest, BadPermuteGrad) {
  const auto run = [](const Device& device, const TokenPermuteGradArgs& args) {
    return TokenPermuteGrad(device, args);
  };
  ExpectErrors<PermuteGradFixture>(BadRows<TokenPermuteGradArgs>("token_permute_grad: ", "permuted_grad"),
                                   run);
  ExpectBadTokens([&](Fixture& call) { return run(Host(), call.permute_grad_args()); });
}

TEST(TokenRowsTest, BadUnpermuteGrad) {
  const auto run = [](const Device& device, const TokenUnpermuteGradArgs& args) {
    return TokenUnpermuteGrad(device, args);
  };
  ExpectErrors<UnpermuteGradFixture>(
      BadRows<TokenUnpermuteGradArgs>("token_unpermute_grad: ", "permuted_grad"), run);
  ExpectBadTokens([&](Fixture& call) { return run(Host(), call.unpermute_grad_args()); });
}

}  // namespace
}  // namespace cubist::testing
