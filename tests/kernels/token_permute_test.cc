// TokenPermute against the reference, through the public calls alone: on the host, on its
// SIMD targets, and on the model.
#include "kernels/token_permute.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

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
  const PermuteOptions all[] = {
      {.dtype = DType::kF32},
      {.dtype = DType::kBF16, .ids = DType::kI64, .num_out_tokens = slots / 2, .counts = false},
      {.dtype = DType::kF16, .num_out_tokens = -(slots / 3), .layout = kApart},
      {.dtype = DType::kBF16, .ids = DType::kI64, .num_out_tokens = slots + 7, .layout = kContiguous}};
  for (const PermuteOptions& options : all) {
    Random random;
    PermuteCall call(shape, options);
    call.FillTokens(random), call.FillIds(random);
    ExpectPermuted(device, call);
  }
}

class TokenPermuteShapeTest : public ::testing::TestWithParam<PermuteShape> {};

TEST_P(TokenPermuteShapeTest, RowsArriveBitForBit) { ExpectPermutes(Host(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(Shapes, TokenPermuteShapeTest, ::testing::ValuesIn(PermuteShapes()), ShapeName());

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

// Of a token whose routes do not fit, parts of them.
TEST(TokenPermuteOnNpuTest, RoutesInParts) {
  for (const PermuteShape& shape :
       {PermuteShape{9, 300, 20, 5}, PermuteShape{3, 1000, 7, 33}, PermuteShape{10, 600, 5000, 3}}) {
    const auto chips = ChipsThatCutRoutes<TokenPermuteTiling>({.tokens = shape.tokens,
                                                               .hidden = shape.hidden,
                                                               .top_k = shape.topk,
                                                               .experts = shape.experts,
                                                               .wide_ids = true});
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) ExpectPermutes(NpuWithData(chip), shape);
  }
  for (const std::int64_t experts : {64, 100'000}) {
    Random random;
    PermuteCall call({1, 1 << 20, experts, 1}, {});
    call.FillTokens(random), call.FillIds(random);
    ExpectPermuted(NpuWithData(Ascend910B2()), call);
  }
}

// Experts beyond what UB holds counters for, or a host's table has room for, are ranked digit by digit.
TEST(TokenPermuteTest, ManyExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const PermuteShape& shape : {PermuteShape{37, 3, 100'000, 5}, PermuteShape{700, 2, 100'003, 33},
                                      PermuteShape{37, 3, (1 << 20) + 3, 5}}) {
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

INSTANTIATE_TEST_SUITE_P(Simd, TokenPermuteSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(TokenPermuteTest, ConcurrentCalls) {
  std::vector<PermuteCall> calls;
  Random random;
  for (int i = 0; i < 12; ++i) {
    calls.emplace_back(PermuteShape{200 + 31 * i, 1 + i % 5, 7, 40 + i},
                       PermuteOptions{.dtype = kFloatTypes[i % 3]});
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
