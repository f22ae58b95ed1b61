// The gradients of GroupedMatmul against the reference, through the public calls alone.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/pack_operand.h"
#include "reference/grouped_matmul.h"
#include "tests/kernels/grouped_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

struct GradCall {
  // `o.out` is the dtype of dx.
  GradCall(const Groups& g, std::int64_t n, std::int64_t k, const GroupedOptions& o, DType dw_type)
      : forward(g, n, k, o),
        dy(o.in, {g.rows(), n}),
        dx(o.out, {g.rows(), k}),
        dw(dw_type, g.count(), k, n, o.transpose, o.list),
        dw_list(dw.list()) {}

  void Fill(bool integers) {
    Random random;
    const auto fill = [&](Matrix& m) { integers ? m.FillIntegers(random) : m.FillUniform(random); };
    forward.FillWith(fill);
    fill(dy), dw.Each(fill);
  }
  GroupedMatmulGradArgs args(bool accumulate) {
    const GroupedMatmulArgs f = forward.args();
    return {.dy = dy.view(),
            .groups = f.groups,
            .group_list = f.group_list,
            .weights = f.weights,
            .weight_list = f.weight_list,
            .dx = dx.view(),
            .x = f.x,
            .dw = dw.stack(),
            .dw_list = dw_list,
            .accumulate_dw = accumulate,
            .transpose_weights = f.transpose_weights};
  }
  reference::MatmulResult Dx() {
    return reference::GroupedMatmul(dy.view(), forward.ranges(),
                                    [&](std::int64_t g) { return forward.weights.Stored(g); },
                                    !forward.options.transpose, forward.k, {});
  }
  reference::MatmulResult Dw(std::int64_t g, bool accumulate) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(forward.k));
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    return reference::GroupedMatmulGradWeights(forward.x.view(), dy.view(),
                                               forward.ranges()[static_cast<std::size_t>(g)],
                                               accumulate ? ConstTensor(dw.Plain(g)) : ConstTensor(), rows);
  }
  void ExpectGuards() {
    forward.ExpectGuards();
    testing::ExpectGuards(dy), testing::ExpectGuards(dx);
    dw.Each([](const Matrix& m) { testing::ExpectGuards(m); });
  }

  GroupedCall forward;
  Matrix dy, dx;
  GroupedStack dw;
  std::vector<Tensor> dw_list;
};

void ExpectGrad(const Device& device, const Groups& groups, std::int64_t n, std::int64_t k,
                const GroupedOptions& o, bool accumulate, bool integers) {
  const DType dw_type = accumulate ? DType::kF32 : o.out;
  SCOPED_TRACE(Join(groups.Name(), " n ", n, " k ", k, " ", o.Name(), accumulate ? " accumulated" : ""));
  GradCall call(groups, n, k, o, dw_type);
  call.Fill(integers);
  std::vector<reference::MatmulResult> dw;
  for (std::int64_t g = 0; g < groups.count(); ++g) dw.push_back(call.Dw(g, accumulate));
  ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, call.args(accumulate))));
  const reference::MatmulResult dx = call.Dx();
  ExpectClose(call.dx.view(), dx.c, reference::MatmulBounds(dx, n, o.in, o.out));
  if (integers) ExpectExactly(call.dx.view(), RoundTo(o.out, dx.c));
  for (std::int64_t g = 0; g < groups.count(); ++g) {
    SCOPED_TRACE(Join("group ", g));
    const reference::MatmulResult& expected = dw[static_cast<std::size_t>(g)];
    if (integers) {
      ExpectExactly(call.dw.Plain(g), RoundTo(dw_type, expected.c));
    } else {
      // What it is accumulated onto is one more term of the sum.
      const std::int64_t rows = groups.counts[static_cast<std::size_t>(g)];
      ExpectClose(call.dw.Plain(g), expected.c, reference::MatmulBounds(expected, rows + 1, o.in, dw_type));
    }
  }
  call.ExpectGuards();
}

TEST(GroupedMatmulGradTest, SmallIntegersAreExact) {
  const std::vector<GroupedOptions> options = AllOptions();
  std::size_t turn = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : SomeGroups()) {
      for (int i = 0; i < 6; ++i) {
        GroupedOptions o = options[(turn += 7) % options.size()];
        o.bias = {};
        ExpectGrad(device, groups, 35, 51, o, i % 2 == 0, /*integers=*/true);
      }
    }
  }
  ExpectGrad(Host(), {{300, 0, 70}, 5}, 517, 259, {.in = DType::kBF16}, true, true);
}

TEST(GroupedMatmulGradTest, RandomRealsAreWithinBounds) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      for (bool accumulate : {false, true}) {
        ExpectGrad(device, {{130, 1, 0, 127, 2}, 70}, 67, 45, {.in = in, .out = in}, accumulate, false);
        ExpectGrad(device, {{130, 1, 0, 127, 2}, 70}, 67, 45, {.in = in, .transpose = true, .list = true},
                   accumulate, false);
      }
    }
  }
}

// Each group's gradients, bit for bit, as two products of its own, those among them whose sums are cut: dx along n, dw along
// the group's rows.
TEST(GroupedMatmulGradTest, SameBitsAsSingleProducts) {
  const struct {
    Groups groups;
    std::int64_t n, k;
  } shapes[] = {{{{5, 0, 140}, 3}, 4250, 96}, {{{4200, 3, 9000}, 0}, 90, 110}};
  for (const auto& [groups, n, k] : shapes) {
    for (const DType in : kFloatTypes) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(Join(groups.Name(), " n ", n, " ", NameOf(in), accumulate ? " accumulated" : ""));
        GradCall call(groups, n, k, {.in = in, .out = in}, DType::kF32);
        GradCall single(groups, n, k, {.in = in, .out = in}, DType::kF32);
        call.Fill(/*integers=*/false), single.Fill(/*integers=*/false);
        ASSERT_TRUE(IsOk(GroupedMatmulGrad(Host(), call.args(accumulate))));
        const std::vector<Range> ranges = single.forward.ranges();
        for (std::int64_t g = 0; g < groups.count(); ++g) {
          const Range rows = ranges[static_cast<std::size_t>(g)];
          const Tensor dy = RowsOf(single.dy.view(), rows), dx = RowsOf(single.dx.view(), rows);
          ASSERT_TRUE(IsOk(Matmul(
              Host(), {.a = dy, .b = single.forward.weights.Stored(g), .c = dx, .transpose_b = true})));
          if (accumulate && rows.empty()) continue;
          ASSERT_TRUE(IsOk(Matmul(Host(), {.a = RowsOf(single.forward.x.view(), rows),
                                           .b = dy,
                                           .c = single.dw.Plain(g),
                                           .transpose_a = true,
                                           .accumulate = accumulate})));
          ExpectSameBits(RowsOf(call.dx.view(), rows), dx);
          ExpectSameBits(call.dw.Plain(g), single.dw.Plain(g));
        }
        call.ExpectGuards();
      }
    }
  }
}

// Either gradient alone is what both together give; the other's tensors need not be there.
TEST(GroupedMatmulGradTest, EitherAlone) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    GradCall both({{40, 0, 3}, 2}, 33, 65, {.in = DType::kBF16}, DType::kF32);
    both.Fill(/*integers=*/false);
    GradCall alone({{40, 0, 3}, 2}, 33, 65, {.in = DType::kBF16}, DType::kF32);
    alone.Fill(/*integers=*/false);
    ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, both.args(true))));
    GroupedMatmulGradArgs args = alone.args(true);
    args.dw = {}, args.x = {};
    ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, args)));
    args = alone.args(true);
    args.dx = {}, args.weights = {};
    ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, args)));
    ExpectSameBits(alone.dx.view(), both.dx.view());
    for (std::int64_t g = 0; g < 3; ++g) ExpectSameBits(alone.dw.Stored(g), both.dw.Stored(g));
  }
}

// dx from the packed transposes has the bits that it has from plain weights.
TEST(GroupedMatmulGradTest, PackedWeights) {
  const std::int64_t n = 75, k = 131;
  const std::vector<std::int32_t> counts{8, 0, 70, 13};
  for (const DType in : kFloatTypes) {
    for (const bool transposed : {false, true}) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        Random random;
        Matrix dy(in, {95, n}), weights(in, {4, transposed ? n : k, transposed ? k : n}), dx(in, {95, k}),
            again(in, {95, k});
        dy.FillNormal(random), weights.FillNormal(random);
        GroupedMatmulGradArgs args{.dy = dy.view(),
                                   .groups = ConstTensor(counts.data(), DType::kI32, {4}),
                                   .weights = weights.view(),
                                   .dx = dx.view(),
                                   .transpose_weights = transposed};
        ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, args)));
        const std::int64_t bytes = PackedOperandBytes(device, Side::kB, in, n, k, 4);
        std::vector<PackedBlock> memory(static_cast<std::size_t>(bytes) / sizeof(PackedBlock) + 1);
        ASSERT_TRUE(IsOk(PackOperand(
            device,
            {.source = weights.view(), .transpose = !transposed, .data = memory.data(), .bytes = bytes},
            &args.packed_weights)));
        EXPECT_FALSE(GroupedMatmulGrad(device, args).ok());  // Both are given.
        args.weights = {}, args.dx = again.view();
        ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, args)));
        ExpectSameBits(again.view(), dx.view());
        args.packed_weights.rows = k;
        EXPECT_FALSE(GroupedMatmulGrad(device, args).ok());
      }
    }
  }
}

// Empty groups: 0 where dw is written, untouched (NaN stays) where it is accumulated, and then without data in a list.
TEST(GroupedMatmulGradTest, EmptyGroups) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (bool accumulate : {false, true}) {
      GradCall call({{0, 6, 0}, 0}, 35, 40, {.in = DType::kBF16, .list = true}, DType::kF32);
      call.Fill(/*integers=*/true);
      Assign(call.dw.Stored(0), std::vector<double>(35 * 40, kNaN));
      if (accumulate) call.dw_list[2].data = nullptr;
      ASSERT_TRUE(IsOk(GroupedMatmulGrad(device, call.args(accumulate))));
      ExpectExactly(call.dw.Stored(0), std::vector<double>(35 * 40, accumulate ? kNaN : 0));
    }
  }
}

TEST(GroupedMatmulGradTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const Groups groups{{3, 0, 250, 40, 1, 0, 17, 90}, 9};
  for (DType in : kFloatTypes) {
    GradCall first(groups, 131, 259, {.in = in}, DType::kF32);
    first.Fill(/*integers=*/false);
    ASSERT_TRUE(IsOk(GroupedMatmulGrad(Host({.threads = 1}), first.args(true))));
    for (int threads : kThreadCounts) {
      SCOPED_TRACE(Join(NameOf(in), " threads ", threads));
      GradCall call(groups, 131, 259, {.in = in}, DType::kF32);
      call.Fill(/*integers=*/false);
      ASSERT_TRUE(IsOk(GroupedMatmulGrad(Host({.threads = threads}), call.args(true))));
      ExpectSameBits(call.dx.view(), first.dx.view());
      for (std::int64_t g = 0; g < groups.count(); ++g) ExpectSameBits(call.dw.Stored(g), first.dw.Stored(g));
    }
  }
}

}  // namespace
}  // namespace cubist::testing
