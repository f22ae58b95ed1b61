// TokenPermute and TokenUnpermute against the reference, through the public calls alone: on the host, on its
// SIMD targets, and on the model.
#include "kernels/token_permute.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "reference/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr Layout kApart{.gap = 5, .offset = 3, .step = 2};

// What a call asks for, besides its sizes.
struct Options {
  DType dtype = DType::kF32, ids = DType::kI32;
  std::int64_t num_out_tokens = 0;
  bool counts = true;
  bool one_dimensional_ids = false;  // (T), where K = 1.
  Layout layout = {};

  std::string Name() const {
    return Join(NameOf(dtype), " ids ", NameOf(ids), " num_out_tokens ", num_out_tokens,
                counts ? " counts" : "", one_dimensional_ids ? " 1-D" : "", " step ", layout.step);
  }
};

std::int64_t RowsOut(std::int64_t slots, std::int64_t num_out_tokens) {
  return num_out_tokens > 0 ? std::min(num_out_tokens, slots)
                            : std::max<std::int64_t>(slots + num_out_tokens, 0);
}

// Tensors of one call, each between guards. Outputs start as NaN, or as negative numbers.
struct PermuteCall {
  PermuteCall(const PermuteShape& s, const Options& o)
      : options(o),
        shape(s),
        tokens(o.dtype, {s.tokens, s.hidden}, o.layout),
        ids(o.one_dimensional_ids ? Matrix(o.ids, {s.tokens}, o.layout)
                                  : Matrix(o.ids, {s.tokens, s.topk}, o.layout)),
        permuted(o.dtype, {RowsOut(s.tokens * s.topk, o.num_out_tokens), s.hidden}, o.layout),
        sorted_indices(DType::kI32, {s.tokens * s.topk}, o.layout),
        counts(DType::kI32, {s.experts}, o.layout) {}

  // Every bit pattern may stand in a row, signalling NaNs among them: rows only move.
  void FillTokens(Random& random) {
    const Tensor view = tokens.view();
    ForEachElement(view, [&](const auto&, std::int64_t offset) {
      const std::uint64_t bits = random.Bits();
      const auto size = static_cast<std::size_t>(SizeOf(view.dtype));
      std::memcpy(static_cast<std::byte*>(view.data) + static_cast<std::size_t>(offset) * size, &bits, size);
    });
  }
  void FillIds(Random& random) {
    if (shape.experts > 0) ids.FillIntegers(random, 0, shape.experts - 1);
  }

  TokenPermuteArgs args() {
    TokenPermuteArgs args{.tokens = tokens.view(),
                          .topk_ids = ids.view(),
                          .num_experts = shape.experts,
                          .num_out_tokens = options.num_out_tokens,
                          .permuted = permuted.view(),
                          .sorted_indices = sorted_indices.view()};
    if (options.counts) args.expert_counts = counts.view();
    return args;
  }

  Options options;
  PermuteShape shape;
  Matrix tokens, ids, permuted, sorted_indices, counts;
};

std::vector<double> AsDoubles(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

// Row r of `permuted` holds the bits of its token.
void ExpectMoved(PermuteCall& call, const reference::Routing& routing) {
  ASSERT_EQ(call.permuted.size(0), routing.rows);
  std::int64_t wrong = 0;
  for (std::int64_t r = 0; r < routing.rows; ++r) {
    Tensor token = call.tokens.view(), row = call.permuted.view();
    const std::int64_t t = routing.slot_of_row[static_cast<std::size_t>(r)] / routing.topk;
    token.sizes[0] = row.sizes[0] = 1;
    token.data = static_cast<std::byte*>(token.data) + t * token.stride(0) * SizeOf(token.dtype);
    row.data = static_cast<std::byte*>(row.data) + r * row.stride(0) * SizeOf(row.dtype);
    const auto same = HasSameBits(row, token);
    if (!same && wrong++ == 0)
      ADD_FAILURE() << "row " << r << " is not token " << t << ": " << same.message();
  }
  EXPECT_EQ(wrong, 0);
}

void ExpectPermuted(const Device& device, PermuteCall& call) {
  SCOPED_TRACE(call.shape.Name() + " " + call.options.Name());
  ASSERT_TRUE(IsOk(TokenPermute(device, call.args())));
  const reference::Routing routing =
      reference::Route(call.ids.view(), call.shape.experts, call.options.num_out_tokens);
  ExpectExactly(call.sorted_indices.view(), AsDoubles(routing.sorted_indices));
  if (call.options.counts) ExpectExactly(call.counts.view(), AsDoubles(routing.expert_counts));
  ExpectMoved(call, routing);
  for (const Matrix* x : {&call.tokens, &call.ids, &call.permuted, &call.sorted_indices, &call.counts}) {
    ExpectGuards(*x);
  }
}

void ExpectPermutes(const Device& device, const PermuteShape& shape) {
  const std::int64_t slots = shape.tokens * shape.topk;
  const Options all[] = {
      {.dtype = DType::kF32},
      {.dtype = DType::kBF16, .ids = DType::kI64, .num_out_tokens = slots / 2, .counts = false},
      {.dtype = DType::kF16, .num_out_tokens = -(slots / 3), .layout = kApart},
      {.dtype = DType::kBF16, .ids = DType::kI64, .num_out_tokens = slots + 7, .layout = kContiguous}};
  for (const Options& options : all) {
    Random random;
    PermuteCall call(shape, options);
    call.FillTokens(random), call.FillIds(random);
    ExpectPermuted(device, call);
  }
}

class TokenPermuteShapeTest : public ::testing::TestWithParam<PermuteShape> {};

TEST_P(TokenPermuteShapeTest, RowsArriveBitForBit) { ExpectPermutes(Host(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(Shapes, TokenPermuteShapeTest, ::testing::ValuesIn(PermuteShapes()), ShapeName());

std::vector<PermuteShape> FewShapes() {
  return {{1, 1, 1, 1},       {13, 3, 7, 65},   {29, 2, 255, 5}, {5, 17, 11, 3},
          {4, 0, 3, 5},       {3, 2, 4, 0},     {0, 2, 5, 9},    {1, 8, 256, 7168},
          {300, 8, 256, 129}, {3, 2, 2, 20011}, {1021, 8, 64, 3}};
}

class TokenPermuteSimdTest : public SimdTargetTest {};

TEST_P(TokenPermuteSimdTest, RowsArriveBitForBit) {
  for (const PermuteShape& shape : FewShapes()) ExpectPermutes(Host(), shape);
}

TEST(TokenPermuteOnNpuTest, RowsArriveBitForBit) {
  for (const PermuteShape& shape : FewShapes()) {
    ExpectPermutes(NpuWithData(Ascend910B2()), shape);
    ExpectPermutes(NpuWithData(Ascend910B4()), shape);
    ExpectPermutes(Host(), shape);
  }
}

// Experts beyond what UB holds counters for are ranked digit by digit.
TEST(TokenPermuteTest, ManyExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const PermuteShape& shape : {PermuteShape{37, 3, 100'000, 5}, PermuteShape{700, 2, 100'003, 33}}) {
      for (DType ids : {DType::kI32, DType::kI64}) {
        Random random;
        PermuteCall call(shape, {.dtype = DType::kBF16, .ids = ids, .num_out_tokens = shape.tokens});
        call.FillTokens(random), call.FillIds(random);
        // Experts of several slots, at the ends and in between.
        for (std::int64_t t = 0; t < 20; ++t) {
          call.ids.set({t, 0}, t % 2 == 0 ? 0 : static_cast<double>(shape.experts - 1));
          call.ids.set({t, 1}, 50'000);
        }
        ExpectPermuted(device, call);
      }
    }
  }
}

// The ranks are those of a stable sort by expert, said with std::stable_sort.
TEST(TokenPermuteTest, RanksAreThoseOfAStableSort) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B4())}) {
    Random random;
    PermuteCall call({501, 6, 9, 4}, {});
    call.FillTokens(random), call.FillIds(random);
    ASSERT_TRUE(IsOk(TokenPermute(device, call.args())));
    const std::vector<double> ids = call.ids.ToDoubles();
    std::vector<std::size_t> slots(ids.size());
    std::iota(slots.begin(), slots.end(), std::size_t{0});
    std::stable_sort(slots.begin(), slots.end(),
                     [&](std::size_t x, std::size_t y) { return ids[x] < ids[y]; });
    for (std::size_t rank = 0; rank < slots.size(); ++rank) {
      ASSERT_EQ(call.sorted_indices.at({static_cast<std::int64_t>(slots[rank])}), static_cast<double>(rank));
    }
  }
}

// All slots to one expert, each token to all experts, experts in falling order: the extremes of a routing.
TEST(TokenPermuteTest, Routings) {
  const PermuteShape shape{150, 8, 8, 17};
  const std::function<std::int64_t(std::int64_t, std::int64_t)> routings[] = {
      [](auto, auto) { return 0; },           [](auto, auto) { return 7; },
      [](auto, auto j) { return j; },         [](auto, auto j) { return 7 - j; },
      [](auto t, auto) { return 7 - t % 8; }, [](auto t, auto) { return t / 19; }};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const auto& expert : routings) {
      for (std::int64_t num_out_tokens : {0, 1, 700, 1199, 1200, 1201, -1, -600, -1199, -1200, -5000}) {
        Random random;
        PermuteCall call(shape, {.dtype = DType::kF16, .num_out_tokens = num_out_tokens});
        call.FillTokens(random);
        for (std::int64_t t = 0; t < shape.tokens; ++t) {
          for (std::int64_t j = 0; j < shape.topk; ++j)
            call.ids.set({t, j}, static_cast<double>(expert(t, j)));
        }
        ExpectPermuted(device, call);
      }
    }
  }
}

TEST(TokenPermuteTest, OneDimensionalIds) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType ids : {DType::kI32, DType::kI64}) {
      for (const Layout& layout : {Layout{}, kApart, kContiguous}) {
        Random random;
        PermuteCall call({131, 1, 6, 20}, {.ids = ids, .one_dimensional_ids = true, .layout = layout});
        call.FillTokens(random), call.FillIds(random);
        ExpectPermuted(device, call);
      }
    }
  }
}

// Ids and tokens that stride 0 repeats; ids stored by columns.
TEST(TokenPermuteTest, RepeatedElements) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int repeated = 0; repeated < 4; ++repeated) {
      Random random;
      PermuteCall call({60, 4, 5, 33}, {});
      call.FillTokens(random), call.FillIds(random);
      TokenPermuteArgs args = call.args();
      if (repeated < 2) args.topk_ids.strides[static_cast<std::size_t>(repeated)] = 0;
      if (repeated == 2) args.tokens.strides[0] = 0;
      Matrix by_columns(DType::kI32, {60, 4}, kColumnMajor);
      by_columns.FillIntegers(random, 0, 4);
      if (repeated == 3) args.topk_ids = by_columns.view();
      SCOPED_TRACE(Join("repeated ", repeated));
      ASSERT_TRUE(IsOk(TokenPermute(device, args)));
      const reference::Routing routing = reference::Route(args.topk_ids, 5, 0);
      ExpectExactly(call.sorted_indices.view(), AsDoubles(routing.sorted_indices));
      if (repeated == 2) {
        for (std::int64_t r = 0; r < 240; ++r) {
          Tensor row = call.permuted.view(), token = call.tokens.view();
          row.data = static_cast<float*>(row.data) + r * row.stride(0);
          row.sizes[0] = token.sizes[0] = 1;
          ExpectSameBits(row, token);
        }
      } else {
        ExpectMoved(call, routing);
      }
    }
  }
}

// permuted wide apart, or stored by columns.
TEST(TokenPermuteTest, OutputByColumns) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      Random random;
      PermuteCall call({70, 2, 5, 37}, {.dtype = dtype, .layout = kColumnMajor});
      call.FillTokens(random), call.FillIds(random);
      ExpectPermuted(device, call);
    }
  }
}

TEST(TokenPermuteTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (int threads : kThreadCounts) {
    Random random;
    PermuteCall call({1021, 8, 64, 130}, {.dtype = DType::kBF16, .num_out_tokens = 8000});
    call.FillTokens(random), call.FillIds(random);
    SCOPED_TRACE(Join("threads ", threads));
    ExpectPermuted(Host({.threads = threads}), call);
  }
}

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

TEST_P(TokenPermuteSimdTest, UnpermuteIsWithinBounds) {
  for (const PermuteShape& shape : FewShapes()) ExpectUnpermutes(Host(), shape, 3);
}

INSTANTIATE_TEST_SUITE_P(Simd, TokenPermuteSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(TokenUnpermuteOnNpuTest, RandomRealsAreWithinBounds) {
  for (const PermuteShape& shape : FewShapes()) {
    ExpectUnpermutes(NpuWithData(Ascend910B2()), shape, 3);
    ExpectUnpermutes(NpuWithData(Ascend910B4()), shape, 1);
    ExpectUnpermutes(Host(), shape, 1);
  }
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

TEST(TokenPermuteTest, ConcurrentCalls) {
  std::vector<PermuteCall> calls;
  Random random;
  for (int i = 0; i < 12; ++i) {
    calls.emplace_back(PermuteShape{200 + 31 * i, 1 + i % 5, 7, 40 + i},
                       Options{.dtype = kFloatTypes[i % 3]});
    calls.back().tokens.FillNormal(random), calls.back().FillIds(random);
  }
  std::vector<Status> statuses(calls.size());
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    callers.emplace_back([&, i] {
      const Device device =
          i % 4 == 3 ? NpuWithData(Ascend910B2()) : Host({.threads = static_cast<int>(i % 4)});
      PermuteCall& call = calls[i];
      for (int repeat = 0; repeat < 8 && statuses[i].ok(); ++repeat) {
        statuses[i] = TokenPermute(device, call.args());
        if (!statuses[i].ok()) break;
        // Back over the tokens themselves, one slot each: it leaves them as they were.
        std::vector<std::int32_t> first(static_cast<std::size_t>(call.shape.tokens));
        for (std::size_t t = 0; t < first.size(); ++t) {
          first[t] = static_cast<std::int32_t>(
              call.sorted_indices.at({static_cast<std::int64_t>(t) * call.shape.topk}));
        }
        statuses[i] =
            TokenUnpermute(device, {.permuted = call.permuted.view(),
                                    .sorted_indices = ConstTensor(first.data(), {call.shape.tokens}),
                                    .out = call.tokens.view()});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(Join("caller ", i));
    ASSERT_TRUE(IsOk(statuses[i]));
    ExpectMoved(calls[i], reference::Route(calls[i].ids.view(), calls[i].shape.experts, 0));
  }
}

}  // namespace
}  // namespace cubist::testing
