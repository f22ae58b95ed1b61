// GroupedMatmul against the reference and against single products, through the public calls alone.
#include "kernels/grouped_matmul.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "tests/kernels/grouped_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

void ExpectExactForward(const Device& device, const Groups& groups, std::int64_t n, std::int64_t k,
                        const GroupedOptions& options) {
  SCOPED_TRACE(Join(groups.Name(), " n ", n, " k ", k, " ", options.Name()));
  GroupedCall call(groups, n, k, options);
  FillIntegers(call);
  ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
  ExpectExactly(call.out.view(), RoundTo(options.out, call.Reference().c));
  call.ExpectGuards();
}

TEST(GroupedMatmulTest, SmallIntegersAreExact) {
  for (const Groups& groups : SomeGroups()) {
    for (const GroupedOptions& options : AllOptions()) ExpectExactForward(Host(), groups, 35, 21, options);
  }
}

TEST(GroupedMatmulTest, SmallIntegersAreExactOverEdges) {
  const std::vector<GroupedOptions> options = AllOptions();
  std::size_t turn = 0;
  for (std::int64_t edge : EdgeSizes()) {
    const Groups groups{{edge, 0, 1, edge / 2 + 3}, edge % 5};
    ExpectExactForward(Host(), groups, 19, 13, options[turn++ % options.size()]);
    ExpectExactForward(Host(), {{5, 0, 14}, 1}, edge, 21, options[turn++ % options.size()]);
    ExpectExactForward(Host(), {{5, 0, 14}, 1}, 37, edge, options[turn++ % options.size()]);
  }
  ExpectExactForward(Host(), {{700, 5, 1100}, 30}, 517, 259, {.in = DType::kBF16});
  ExpectExactForward(Host(), {{700, 5, 1100}, 30}, 259, 517, {.transpose = true});
}

TEST(GroupedMatmulTest, RandomRealsAreWithinBounds) {
  const std::vector<GroupedOptions> options = AllOptions();
  std::size_t turn = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : SomeGroups()) {
      for (int i = 0; i < 3; ++i) {
        const GroupedOptions& o = options[(turn += 11) % options.size()];
        SCOPED_TRACE(Join(groups.Name(), " ", o.Name()));
        GroupedCall call(groups, 67, 129, o);
        FillUniform(call);
        ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
        const reference::MatmulResult expected = call.Reference();
        ExpectClose(call.out.view(), expected.c, reference::MatmulBounds(expected, call.k, o.in, o.out));
        call.ExpectGuards();
      }
    }
  }
}

class GroupedMatmulSimdTest : public SimdTargetTest {};

TEST_P(GroupedMatmulSimdTest, SmallIntegersAreExact) {
  const std::vector<GroupedOptions> options = AllOptions();
  std::size_t turn = 0;
  for (const Groups& groups : SomeGroups()) {
    for (int i = 0; i < 4; ++i)
      ExpectExactForward(Host(), groups, 67, 45, options[(turn += 7) % options.size()]);
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, GroupedMatmulSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(GroupedMatmulOnNpuTest, SmallIntegersAreExact) {
  const std::vector<GroupedOptions> options = AllOptions();
  std::size_t turn = 0;
  for (const Groups& groups : SomeGroups()) {
    for (int i = 0; i < 6; ++i) {
      const GroupedOptions& o = options[(turn += 5) % options.size()];
      ExpectExactForward(NpuWithData(Ascend910B2()), groups, 67, 45, o);
      ExpectExactForward(NpuWithData(Ascend910B4()), groups, 300, 129, o);
    }
  }
}

// Each group, bit for bit, as one product of its own, those among them whose sums are cut.
TEST(GroupedMatmulTest, SameBitsAsSingleProducts) {
  const Groups all[] = {{{8, 8, 0, 8, 8}, 3}, {{1, 200, 13, 64}, 0}, {{515, 7}, 5}};
  const struct {
    std::int64_t n, k;
  } sizes[] = {{256, 512}, {131, 1027}, {1024, 640}, {256, 4099}, {80, 4200}};
  for (const Groups& groups : all) {
    for (const auto& [n, k] : sizes) {
      for (GroupedOptions o : AllOptions()) {
        if (o.list || o.ends) continue;
        SCOPED_TRACE(Join(groups.Name(), " n ", n, " k ", k, " ", o.Name()));
        GroupedCall call(groups, n, k, o);
        FillUniform(call);
        ASSERT_TRUE(IsOk(GroupedMatmul(Host(), call.args())));
        Matrix single(o.out, {groups.rows(), n});
        single.Fill(0);
        const std::vector<Range> ranges = call.ranges();
        for (std::int64_t g = 0; g < groups.count(); ++g) {
          const Range rows = ranges[static_cast<std::size_t>(g)];
          MatmulArgs args;
          args.a = RowsOf(call.x.view(), rows);
          args.b = call.weights.Stored(g), args.transpose_b = o.transpose;
          args.c = RowsOf(single.view(), rows);
          if (o.bias) {
            Tensor row = RowsOf(call.bias.view(), {g, g + 1});
            args.bias = Tensor(row.data, row.dtype, {n});
          }
          ASSERT_TRUE(IsOk(Matmul(Host(), args)));
        }
        ExpectSameBits(call.out.view(), single.view());
      }
    }
  }
}

// Each group as one product of its own with all that an epilogue has, residual among it; rows after the groups stay 0.
void ExpectSingleProductsWithEpilogues(std::int64_t k, const std::vector<Device>& devices) {
  const std::int64_t n = 150, rows = 160;
  const std::int64_t begins[] = {0, 5, 5, 22, 152};
  const std::vector<std::int32_t> counts{5, 0, 17, 130};
  for (const DType in : kFloatTypes) {
    for (const Activation activation : {Activation::kNone, Activation::kRelu, Activation::kGelu}) {
      for (const float alpha : {1.0f, 0.5f}) {
        for (const bool in_place : {false, true}) {
          for (const Device& device : devices) {
            SCOPED_TRACE(Join(NameOf(in), " k ", k, " ", static_cast<int>(activation), " ", alpha,
                              in_place ? " in place" : ""));
            Random random;
            Matrix x(in, {rows, k}), weights(in, {4, k, n}), bias(DType::kF32, {4, n}),
                residual(in, {rows, n}), out(in, {rows, n}), single(in, {rows, n});
            x.FillNormal(random), weights.FillNormal(random), bias.FillNormal(random),
                residual.FillNormal(random);
            Assign(out.view(), residual.ToDoubles()), single.Fill(0);
            GroupedMatmulArgs args{.x = x.view(),
                                   .groups = ConstTensor(counts.data(), DType::kI32, {4}),
                                   .weights = weights.view(),
                                   .bias = bias.view(),
                                   .out = out.view(),
                                   .alpha = alpha,
                                   .beta = -0.25f,
                                   .residual = in_place ? out.view() : residual.view(),
                                   .activation = activation};
            ASSERT_TRUE(IsOk(GroupedMatmul(device, args)));
            const auto part = [](auto t, std::int64_t first, std::int64_t count, int rank) {
              t.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(t.data))) +
                       first * t.stride(0) * SizeOf(t.dtype);
              if (rank < t.rank) {
                for (int d = 0; d < rank; ++d) {
                  const auto to = static_cast<std::size_t>(d);
                  t.sizes[to] = t.sizes[to + 1], t.strides[to] = t.strides[to + 1];
                }
                t.rank = rank;
              } else {
                t.sizes[0] = count;
              }
              return t;
            };
            for (std::int64_t g = 0; g < 4; ++g) {
              const std::int64_t first = begins[g], count = begins[g + 1] - first;
              ASSERT_TRUE(IsOk(Matmul(device, {.a = part(x.view(), first, count, 2),
                                               .b = part(weights.view(), g, 1, 2),
                                               .bias = part(bias.view(), g, 1, 1),
                                               .c = part(single.view(), first, count, 2),
                                               .alpha = alpha,
                                               .beta = -0.25f,
                                               .residual = part(residual.view(), first, count, 2),
                                               .activation = activation})));
            }
            ExpectSameBits(out.view(), single.view());
            ExpectGuards(out);
          }
        }
      }
    }
  }
}

TEST(GroupedMatmulTest, SameBitsAsSingleProductsWithEpilogues) {
  ExpectSingleProductsWithEpilogues(70, {Host(), NpuWithData(Ascend910B2())});
}

TEST(GroupedMatmulTest, SameBitsAsSingleProductsWithEpiloguesAndCutSums) {
  ExpectSingleProductsWithEpilogues(4200, {Host()});
}

// Weights packed beforehand give the same bits, on both executors.
TEST(GroupedMatmulTest, SameBitsWithPackedWeights) {
  const Groups all[] = {{{8, 8, 0, 8, 8}, 3}, {{1, 200, 13, 64}, 0}, {{}, 4}};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : all) {
      for (GroupedOptions o : AllOptions()) {
        if (o.list || o.ends) continue;
        SCOPED_TRACE(Join(groups.Name(), " ", o.Name()));
        GroupedCall call(groups, 131, 259, o);
        FillUniform(call);
        ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
        Matrix plain(o.out, {groups.rows(), 131});
        Assign(plain.view(), call.out.ToDoubles());
        call.out.FillNaN();
        GroupedMatmulArgs args = call.args();
        const std::int64_t bytes = PackedOperandBytes(device, Side::kB, o.in, 259, 131, groups.count());
        std::vector<PackedBlock> memory(static_cast<std::size_t>(bytes) / sizeof(PackedBlock) + 1);
        const PackOperandArgs weights{.source = args.weights,
                                      .side = Side::kB,
                                      .transpose = o.transpose,
                                      .data = memory.data(),
                                      .bytes = bytes};
        if (groups.count() > 0) {
          ASSERT_TRUE(IsOk(PackOperand(device, weights, &args.packed_weights)));
          args.weights = {}, args.transpose_weights = false;
        }
        ASSERT_TRUE(IsOk(GroupedMatmul(device, args)));
        ExpectSameBits(call.out.view(), plain.view());
      }
    }
  }
}

// Whatever the number of threads, and however counts are said.
TEST(GroupedMatmulTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const Groups groups{{3, 0, 250, 40, 1, 0, 17, 90}, 9};
  for (DType in : kFloatTypes) {
    GroupedCall first(groups, 259, 513, {.in = in});
    FillUniform(first);
    ASSERT_TRUE(IsOk(GroupedMatmul(Host({.threads = 1}), first.args())));
    for (int threads : kThreadCounts) {
      for (bool ends : {false, true}) {
        SCOPED_TRACE(Join(NameOf(in), " threads ", threads, ends ? " ends" : " counts"));
        GroupedCall call(groups, 259, 513, {.in = in, .list = ends, .ends = ends, .groups = DType::kI32});
        FillUniform(call);
        if (ends) {
          for (std::int64_t g = 0; g < groups.count(); ++g)
            Assign(call.weights.Stored(g), ToDoubles(first.weights.Stored(g)));
          Assign(call.x.view(), first.x.ToDoubles());
        }
        ASSERT_TRUE(IsOk(GroupedMatmul(Host({.threads = threads}), call.args())));
        ExpectSameBits(call.out.view(), first.out.view());
      }
    }
  }
}

// Weights of groups without rows are not looked at: no data, and NaN in a stack, change nothing.
TEST(GroupedMatmulTest, WeightsOfEmptyGroupsAreNotRead) {
  const Groups groups{{4, 0, 9, 0}, 2};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (bool list : {false, true}) {
      GroupedCall call(groups, 40, 33, {.list = list});
      FillIntegers(call);
      if (list) {
        call.weight_list[1].data = call.weight_list[3].data = nullptr;
      } else {
        for (std::int64_t g : {1, 3}) Assign(call.weights.Stored(g), std::vector<double>(40 * 33, kNaN));
      }
      ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
      ExpectExactly(call.out.view(), call.Reference().c);
    }
  }
}

// With alpha 0 neither x nor weights, with beta 0 no residual: no data, NaN, and memory of out change nothing.
TEST(GroupedMatmulTest, WhatCountsForNothingIsNotRead) {
  const Groups groups{{4, 0, 9}, 2};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const bool list : {false, true}) {
      GroupedCall call(groups, 40, 33, {.bias = DType::kF32, .list = list});
      FillIntegers(call);
      GroupedMatmulArgs args = call.args();
      args.alpha = 0, args.residual = args.out, args.beta = 0;
      args.residual.strides[0] = 1;  // Overlaps out, and is not out.
      args.x.data = nullptr, args.weights.data = nullptr;
      for (ConstTensor& w : call.weight_list) w.data = nullptr;
      args.weight_list = call.weight_list;
      ASSERT_TRUE(IsOk(GroupedMatmul(device, args)));
      std::vector<double> expected;
      for (std::size_t g = 0; g < groups.counts.size(); ++g) {
        for (std::int64_t i = 0; i < groups.counts[g]; ++i) {
          for (std::int64_t j = 0; j < 40; ++j)
            expected.push_back(call.bias.at({static_cast<std::int64_t>(g), j}));
        }
      }
      expected.resize(static_cast<std::size_t>(groups.rows() * 40));
      ExpectExactly(call.out.view(), expected);
      ExpectGuards(call.out);

      args.alpha = 1;
      EXPECT_FALSE(GroupedMatmul(device, args).ok());
    }
  }
}

// Rows after the last group may hold anything; what is written there is 0.
TEST(GroupedMatmulTest, RowsAfterTheGroupsAreZero) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      GroupedCall call({{3, 0, 6}, 250}, 70, 37, {.in = in, .out = in, .bias = in});
      FillIntegers(call);
      for (std::int64_t i = 9; i < 259; ++i) {
        for (std::int64_t p = 0; p < 37; ++p) call.x.set({i, p}, kNaN);
      }
      ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
      const std::vector<double> out = call.out.ToDoubles();
      for (std::size_t i = 9 * 70; i < out.size(); ++i) ASSERT_EQ(out[i], 0) << i;
      ExpectExactly(call.out.view(), RoundTo(in, call.Reference().c));
    }
  }
}

// A NaN in a group's weights is seen in that group's rows alone.
TEST(GroupedMatmulTest, SpecialValuesStayInTheirGroup) {
  for (double special : {kNaN, kInfinity}) {
    for (DType in : kFloatTypes) {
      GroupedCall call({{13, 2, 30}, 3}, 45, 50, {.in = in});
      Random random;
      call.FillWith([&](Matrix& m) { m.FillIntegers(random, 1, 3); });
      const Tensor w = call.weights.Stored(1);
      StoreFloat(w.data, w.dtype, 49 * w.stride(0) + 44 * w.stride(1), static_cast<float>(special));
      ASSERT_TRUE(IsOk(GroupedMatmul(Host(), call.args())));
      ExpectExactly(call.out.view(), call.Reference().c);
    }
  }
}

// As many groups as one likes; most of them empty.
TEST(GroupedMatmulTest, ManyGroups) {
  Random random;
  Groups groups;
  for (int g = 0; g < 1024; ++g)
    groups.counts.push_back(random.Integer(0, 9) == 0 ? random.Integer(1, 20) : 0);
  for (bool ends : {false, true}) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      ExpectExactForward(device, groups, 17, 9, {.in = DType::kBF16, .list = ends, .ends = ends});
    }
  }
}

// Weights further than 2^32 elements apart.
TEST(GroupedMatmulTest, OffsetsBeyond32Bits) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 32) + 5;
  const std::size_t bytes = static_cast<std::size_t>(2 * kStride + 64) * sizeof(BF16);
  void* reserved =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) GTEST_SKIP() << "cannot reserve " << bytes << " bytes";
  GroupedCall call({{2, 1, 4}, 0}, 3, 5, {.in = DType::kBF16});
  FillIntegers(call);
  Tensor far(static_cast<BF16*>(reserved), {3, 5, 3}, {kStride, 3, 1});
  for (std::int64_t g = 0; g < 3; ++g) {
    Tensor one = far;
    one.data = static_cast<BF16*>(reserved) + g * kStride;
    one.rank = 2, one.sizes = {5, 3}, one.strides = {3, 1};
    Assign(one, ToDoubles(call.weights.Stored(g)));
  }
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    GroupedMatmulArgs args = call.args();
    args.weights = far;
    call.out.FillNaN();
    ASSERT_TRUE(IsOk(GroupedMatmul(device, args)));
    ExpectExactly(call.out.view(), call.Reference().c);
  }
  munmap(reserved, bytes);
}

// ---- On the model ----

// Recorded without data, bf16.
Profile ProfileOf(const std::vector<std::int64_t>& counts, std::int64_t n, std::int64_t k, bool grad,
                  const ChipSpec& chip = Ascend910B2()) {
  const auto groups = static_cast<std::int64_t>(counts.size());
  const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const ConstTensor list(counts.data(), {groups}), x(nullptr, DType::kBF16, {rows, k});
  const Device device = Npu(chip, {.with_data = false, .timeline = true});
  Profile profile;
  if (grad) {
    EXPECT_TRUE(IsOk(GroupedMatmulGrad(device,
                                       {.dy = ConstTensor(nullptr, DType::kBF16, {rows, n}),
                                        .groups = list,
                                        .x = x,
                                        .dw = Tensor(nullptr, DType::kF32, {groups, k, n})},
                                       &profile)));
  } else {
    EXPECT_TRUE(IsOk(GroupedMatmul(device,
                                   {.x = x,
                                    .groups = list,
                                    .weights = ConstTensor(nullptr, DType::kBF16, {groups, k, n}),
                                    .out = Tensor(nullptr, DType::kBF16, {rows, n})},
                                   &profile)));
  }
  return profile;
}

// How much of the time the mean core is at work until its last block.
double Balance(const Profile& profile, int cores) {
  std::vector<double> ends(static_cast<std::size_t>(cores));
  for (const TimelineSlice& slice : *profile.timeline) {
    double& end = ends[static_cast<std::size_t>(slice.core)];
    end = std::max(end, slice.end_us);
  }
  const double last = *std::max_element(ends.begin(), ends.end());
  return std::accumulate(ends.begin(), ends.end(), 0.0) / (cores * last);
}

TEST(GroupedMatmulOnNpuTest, CoresEndTogetherWhateverTheGroups) {
  Random random;
  for (std::int64_t experts : {8, 16, 32, 64, 128}) {
    std::vector<std::int64_t> uneven;
    for (std::int64_t e = 0; e < experts; ++e) {
      const double u = random.Uniform();
      uneven.push_back(static_cast<std::int64_t>(u * u * u * 512));  // Mean 128; most have few.
    }
    const std::vector<std::int64_t> even(static_cast<std::size_t>(experts), 128);
    const int cores = Ascend910B2().cube_cores;
    for (bool grad : {false, true}) {
      SCOPED_TRACE(Join(experts, grad ? " experts, gradient of weights" : " experts"));
      EXPECT_GT(Balance(ProfileOf(even, 4096, 1024, grad), cores), 0.9);
      EXPECT_GT(Balance(ProfileOf(uneven, 4096, 1024, grad), cores), 0.9);
    }
  }
}

// HBM, which gives each expert's weights once, never waits for the Cube cores, wherever in the list the large groups are.
TEST(GroupedMatmulOnNpuTest, HbmIsBusyWhateverTheOrderOfTheGroups) {
  const double floor =
      8.0 * 4096 * 7168 * sizeof(BF16) / static_cast<double>(Ascend910B2().memory.hbm_bytes_per_s);
  Random random;
  for (std::vector<std::int64_t> counts :
       {std::vector<std::int64_t>{412, 238, 150, 100, 63, 38, 18, 5}, {273, 136, 68, 34, 273, 136, 68, 36}}) {
    for (int order = 0; order < 6; ++order) {
      SCOPED_TRACE(::testing::PrintToString(counts));
      const double time = ProfileOf(counts, 4096, 7168, false).time_s;
      EXPECT_GT(time, floor);
      EXPECT_LT(time, 1.2 * floor);
      if (order == 0) {
        std::reverse(counts.begin(), counts.end());
      } else {
        for (std::size_t i = counts.size(); i-- > 1;)
          std::swap(counts[i], counts[static_cast<std::size_t>(random.Integer(0, static_cast<int>(i)))]);
      }
    }
  }
}

// Where L2 holds little more than what the cores are at, a group's waves are of one width: 14 and 14 columns of blocks, as 24 and 4
// take 1.21 times what HBM does.
TEST(GroupedMatmulOnNpuTest, HbmIsBusyWhereL2HoldsLittle) {
  constexpr std::int64_t kN = 7168, kK = 7168;
  ChipSpec chip = Ascend910B2();
  chip.memory.l2_bytes = chip.memory.l2_bytes * 11 / 20;
  const double floor = 8.0 * kN * kK * sizeof(BF16) / static_cast<double>(chip.memory.hbm_bytes_per_s);
  const double time = ProfileOf(std::vector<std::int64_t>(8, 128), kN, kK, false, chip).time_s;
  EXPECT_GT(time, floor);
  EXPECT_LT(time, 1.17 * floor);
}

TEST(GroupedMatmulOnNpuTest, TimeIsLinearInTheGroups) {
  const auto time = [](std::size_t experts) {
    return ProfileOf(std::vector<std::int64_t>(experts, 4), 1024, 512, false).time_s;
  };
  const double few = time(128);
  EXPECT_LT(time(512), 4.4 * few);
  EXPECT_LT(time(1024), 8.8 * few);
}

// What Vector cores read ahead is still in L2 when it is needed: with room for two groups and a half, HBM gives every
// operand once, but for a tenth.
TEST(GroupedMatmulOnNpuTest, WhatIsReadAheadIsReadOnce) {
  constexpr std::int64_t kGroups = 12, kRows = 1024, kN = 1024, kK = 2048, kBytes = 2;
  ChipSpec chip = Ascend910B2();
  chip.memory.l2_bytes = 20 << 20;
  const Profile profile = ProfileOf(std::vector<std::int64_t>(kGroups, kRows), kN, kK, false, chip);
  ASSERT_GT(profile.gm_read, 0);
  EXPECT_LT(profile.hbm_bytes, 1.1 * kGroups * kBytes * (kRows * kK + kK * kN + kRows * kN));
}

}  // namespace
}  // namespace cubist::testing
