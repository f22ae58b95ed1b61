// ReorderChunks against the order that its definition says, and against a stable sort by expert, on both executors.
#include "kernels/reorder_chunks.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "reference/token_routes.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

struct Shape {
  std::int64_t ranks, experts, most, hidden;  // Up to `most` rows in a chunk.
  DType dtype = DType::kBF16, counts = DType::kI32, probs = DType::kF32;
  Layout layout = {};
  std::uint64_t seed = 0;
};

struct Call {
  explicit Call(const Shape& s, bool inverse = false)
      : random(RunSeed() + s.seed),
        counts(s.counts, {s.ranks, s.experts}, s.layout),
        rows(FillCounts(s)),
        tokens(s.dtype, {rows, s.hidden}, s.layout),
        probs(s.probs, {rows}, s.layout),
        out(s.dtype, {rows, s.hidden}, s.layout),
        out_probs(s.probs, {rows}, s.layout),
        row_ids(DType::kI32, {rows}, s.layout),
        expert_counts(DType::kI32, {s.experts}, s.layout) {
    tokens.FillNormal(random), probs.FillNormal(random);
    out.FillNaN(), out_probs.FillNaN(), row_ids.Fill(-1), expert_counts.Fill(-1);
    args = {.tokens = tokens.view(),
            .chunk_counts = counts.view(),
            .probs = probs.view(),
            .inverse = inverse,
            .out = out.view(),
            .out_probs = out_probs.view(),
            .row_ids = row_ids.view(),
            .expert_counts = expert_counts.view()};
  }
  std::int64_t FillCounts(const Shape& s) {
    std::int64_t sum = 0;
    for (std::int64_t n = 0; n < s.ranks; ++n) {
      for (std::int64_t e = 0; e < s.experts; ++e) {
        const std::int64_t count = random.Integer(0, 2) == 0 ? 0 : random.Integer(0, s.most);
        counts.set({n, e}, static_cast<double>(count));
        sum += count;
      }
    }
    return sum;
  }

  Random random;
  Matrix counts;
  std::int64_t rows;
  Matrix tokens, probs, out, out_probs, row_ids, expert_counts;
  ReorderChunksArgs args;
};

void ExpectReordered(const Device& device, const Shape& s) {
  SCOPED_TRACE(
      Join(s.ranks, " ranks ", s.experts, " experts ", s.most, " x ", s.hidden, " ", NameOf(s.dtype)));
  for (const bool inverse : {false, true}) {
    Call call(s, inverse);
    ASSERT_TRUE(IsOk(ReorderChunks(device, call.args)));
    std::vector<std::int64_t> source = reference::ExpertMajorRows(call.counts.view());
    if (inverse) {
      std::vector<std::int64_t> back(source.size());
      for (std::size_t r = 0; r < source.size(); ++r)
        back[static_cast<std::size_t>(source[r])] = static_cast<std::int64_t>(r);
      source = back;
    }
    std::vector<double> rows, probs, ids, sums(static_cast<std::size_t>(s.experts), 0.0);
    for (const std::int64_t r : source) {
      for (std::int64_t h = 0; h < s.hidden; ++h) rows.push_back(call.tokens.at({r, h}));
      probs.push_back(call.probs.at({r})), ids.push_back(static_cast<double>(r));
    }
    for (std::int64_t i = 0; i < s.ranks * s.experts; ++i)
      sums[static_cast<std::size_t>(i % s.experts)] += call.counts.at({i / s.experts, i % s.experts});
    ExpectExactly(call.out.view(), rows);
    ExpectExactly(call.out_probs.view(), probs);
    ExpectExactly(call.row_ids.view(), ids);
    ExpectExactly(call.expert_counts.view(), sums);
    for (const Matrix* x : {&call.counts, &call.tokens, &call.probs, &call.out, &call.out_probs,
                            &call.row_ids, &call.expert_counts})
      ExpectGuards(*x);
  }
}

std::vector<Shape> Shapes() {
  return {{1, 1, 1, 1},
          {4, 3, 9, 33, DType::kF32},
          {3, 8, 40, 130, DType::kF16, DType::kI64, DType::kBF16},
          {7, 5, 3, 1, DType::kBF16, DType::kI32, DType::kF32, Layout{.gap = 5, .offset = 3, .step = 2}},
          {2, 2, 0, 5},
          {3, 4, 6, 0},
          {1, 600, 2, 7},
          {90, 40, 2, 5, DType::kBF16, DType::kI64, DType::kF32, kContiguous},
          {2, 3, 130, 7168}};
}

TEST(ReorderChunksTest, OnHost) {
  for (const Shape& shape : Shapes()) ExpectReordered(Host(), shape);
}

TEST(ReorderChunksTest, OnNpu) {
  for (const Shape& shape : Shapes()) {
    ExpectReordered(NpuWithData(Ascend910B2()), shape);
    ExpectReordered(NpuWithData(Ascend910B4()), shape);
  }
}

TEST(ReorderChunksTest, NoRanksNoExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    ExpectReordered(device, {0, 3, 1, 4});
    ExpectReordered(device, {3, 0, 1, 4});
  }
}

// Rank-major chunks are rows whose experts are known: sorted by expert, stably, they are expert-major.
TEST(ReorderChunksTest, IsAStableSortByExpert) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Call call({5, 7, 12, 40});
    ASSERT_TRUE(IsOk(ReorderChunks(device, call.args)));
    Matrix ids(DType::kI32, {call.rows, 1}), sorted(DType::kI32, {call.rows}),
        permuted(DType::kBF16, {call.rows, 40});
    std::int64_t row = 0;
    for (std::int64_t c = 0; c < 35; ++c) {
      for (double i = 0; i < call.counts.at({c / 7, c % 7}); ++i)
        ids.set({row++, 0}, static_cast<double>(c % 7));
    }
    ASSERT_TRUE(IsOk(TokenPermute(device, {.tokens = call.tokens.view(),
                                           .topk_ids = ids.view(),
                                           .num_experts = 7,
                                           .permuted = permuted.view(),
                                           .sorted_indices = sorted.view()})));
    ExpectSameBits(call.out.view(), permuted.view());
  }
}

// Random calls; the seed is part of every failure.
TEST(ReorderChunksTest, RandomCallsAgreeWithTheReference) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(Join("seed ", seed));
    Random random(RunSeed() + seed);
    const auto dtype = [&] { return kFloatTypes[random.Integer(0, 2)]; };
    Shape s{random.Integer(0, 9), random.Integer(0, 20), random.Integer(0, 30), random.Integer(0, 200)};
    s.dtype = dtype(), s.probs = dtype(), s.counts = random.Integer(0, 1) == 1 ? DType::kI64 : DType::kI32;
    s.layout = {.gap = random.Integer(0, 5), .offset = random.Integer(0, 3), .step = random.Integer(1, 2)};
    s.seed = seed;
    ExpectReordered(seed % 3 == 0 ? NpuWithData(Ascend910B2()) : Host(), s);
  }
}

TEST(ReorderChunksTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const Shape shape{7, 30, 20, 131};
  for (const bool inverse : {false, true}) {
    Call first(shape, inverse);
    ASSERT_TRUE(IsOk(ReorderChunks(Host({.threads = 1}), first.args)));
    for (const int threads : kThreadCounts) {
      SCOPED_TRACE(Join("threads ", threads));
      Call call(shape, inverse);
      ASSERT_TRUE(IsOk(ReorderChunks(Host({.threads = threads}), call.args)));
      ExpectSameBits(call.out.view(), first.out.view());
      ExpectSameBits(call.out_probs.view(), first.out_probs.view());
      ExpectSameBits(call.row_ids.view(), first.row_ids.view());
      ExpectSameBits(call.expert_counts.view(), first.expert_counts.view());
    }
  }
}

TEST(ReorderChunksTest, BadArguments) {
  Call call({3, 4, 6, 5});
  const auto expect = [&](auto change, const std::vector<std::string>& words) {
    ReorderChunksArgs args = call.args;
    change(args);
    call.out.Fill(7);
    const Status status = ReorderChunks(Host(), args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (const std::string& word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message() << " lacks " << word;
    EXPECT_EQ(call.out.at({0, 0}), 7);
  };
  Matrix other(DType::kI32, {3, 4});
  other.Fill(1000);
  expect([&](auto& x) { x.chunk_counts = other.view(); },
         {"chunk_counts", "sum up to 12000", "rows of tokens"});
  other.set({1, 2}, -1);
  expect([&](auto& x) { x.chunk_counts = other.view(); }, {"chunk_counts", "-1 at (1, 2)"});
  expect([](auto& x) { x.out_probs = {}; }, {"out_probs", "not given"});
  expect([](auto& x) { x.out = x.row_ids; }, {"out"});
  expect([](auto& x) { x.out.dtype = DType::kF16; }, {"out", "fp16", "bf16"});
  expect([](auto& x) { x.expert_counts.sizes[0] = 3; }, {"expert_counts", "size 3", "needs 4"});
  expect([](auto& x) { x.tokens.data = x.out.data; }, {"out", "tokens"});
  expect([](auto& x) { x.chunk_counts.data = nullptr; }, {"chunk_counts", "null"});
}

}  // namespace
}  // namespace cubist::testing
