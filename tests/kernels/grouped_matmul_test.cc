// GroupedMatmul and its gradients against the reference and against single products, through the public calls alone.
#include "kernels/grouped_matmul.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "kernels/matmul.h"
#include "reference/grouped_matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

// Rows of each group, and rows after the last.
struct Groups {
  std::vector<std::int64_t> counts;
  std::int64_t after = 0;

  std::int64_t rows() const { return std::accumulate(counts.begin(), counts.end(), after); }
  std::int64_t count() const { return static_cast<std::int64_t>(counts.size()); }
  std::string Name() const {
    std::string name;
    for (std::int64_t n : counts) name += std::to_string(n) + "_";
    return name + "and" + std::to_string(after);
  }
};

// Empty groups first, last and among others; one row; one below and above the tiles; a group that has nearly all.
std::vector<Groups> SomeGroups() {
  return {{{}, 0},
          {{}, 5},
          {{0}, 0},
          {{0, 0, 0}, 7},
          {{1}, 0},
          {{5, 0, 3}, 2},
          {{0, 12, 13, 0, 1, 24, 0}, 0},
          {{15, 16, 17}, 33},
          {{130, 1, 0, 127, 2}, 70},
          {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 1},
          {{3, 301, 2}, 0}};
}

struct Options {
  DType in = DType::kF32, out = DType::kF32;
  std::optional<DType> bias = {};
  bool transpose = false;  // weights (E, N, K)
  bool list = false;       // each group's weights a matrix of its own
  bool ends = false;
  DType groups = DType::kI64;

  std::string Name() const {
    return Join(NameOf(in), " to ", NameOf(out), transpose ? " transposed" : "", list ? " list" : "",
                ends ? " ends " : " counts ", NameOf(groups), bias ? Join(" bias ", NameOf(*bias)) : "");
  }
};

std::vector<Options> AllOptions() {
  std::vector<Options> all;
  for (int i = 0; i < 48; ++i) {
    Options o;
    o.in = kFloatTypes[i % 3];
    o.out = i / 3 % 2 == 0 ? DType::kF32 : o.in;
    o.transpose = i / 6 % 2 == 1, o.list = i / 12 % 2 == 1, o.ends = i / 24 == 1;
    o.groups = (i + i / 7) % 2 == 0 ? DType::kI64 : DType::kI32;
    if (i % 4 == 1) o.bias = DType::kF32;
    if (i % 4 == 2) o.bias = o.in;
    all.push_back(o);
  }
  return all;
}

// One matrix per group between guards: a stack, or matrices at places of their own.
class Stack {
 public:
  Stack(DType dtype, std::int64_t groups, std::int64_t rows, std::int64_t cols, bool transpose, bool list)
      : transpose_(transpose) {
    const std::int64_t first = transpose ? cols : rows, second = transpose ? rows : cols;
    if (list) {
      // Each with a pitch of its own.
      for (std::int64_t g = 0; g < groups; ++g)
        matrices_.push_back(std::make_unique<Matrix>(dtype,
                                                     std::initializer_list<std::int64_t>{first, second},
                                                     Layout{.gap = 1 + g % 3, .offset = g % 4}));
    } else {
      matrices_.push_back(
          std::make_unique<Matrix>(dtype, std::initializer_list<std::int64_t>{groups, first, second}));
      stacked_ = true;
    }
  }

  Tensor stack() { return stacked_ ? matrices_[0]->view() : Tensor(); }
  std::vector<Tensor> list() {
    std::vector<Tensor> views;
    if (!stacked_) {
      for (const auto& matrix : matrices_) views.push_back(matrix->view());
    }
    return views;
  }
  std::vector<ConstTensor> const_list() {
    const std::vector<Tensor> views = list();
    return {views.begin(), views.end()};
  }
  // As it is stored, (rows, cols) or (cols, rows).
  Tensor Stored(std::int64_t g) {
    if (!stacked_) return matrices_[static_cast<std::size_t>(g)]->view();
    Tensor t = matrices_[0]->view();
    Tensor one = t;
    one.data = static_cast<char*>(t.data) + g * t.stride(0) * SizeOf(t.dtype);
    one.rank = 2, one.sizes = {t.size(1), t.size(2)}, one.strides = {t.stride(1), t.stride(2)};
    return one;
  }
  Tensor Plain(std::int64_t g) {
    Tensor t = Stored(g);
    if (transpose_) std::swap(t.sizes[0], t.sizes[1]), std::swap(t.strides[0], t.strides[1]);
    return t;
  }
  template <class F>
  void Each(F f) {
    for (const auto& matrix : matrices_) f(*matrix);
  }

 private:
  bool transpose_, stacked_ = false;
  std::vector<std::unique_ptr<Matrix>> matrices_;
};

// Tensors of a forward call and of its gradients.
struct Call {
  Call(const Groups& g, std::int64_t n, std::int64_t k, const Options& o)
      : groups(g),
        options(o),
        n(n),
        k(k),
        list(o.groups, {g.count()}, {.step = 3}),
        x(o.in, {g.rows(), k}),
        weights(o.in, g.count(), k, n, o.transpose, o.list),
        bias(o.bias.value_or(DType::kF32), {g.count(), n}),
        out(o.out, {g.rows(), n}),
        weight_list(weights.const_list()) {
    std::vector<double> values(g.counts.begin(), g.counts.end());
    if (o.ends) std::partial_sum(values.begin(), values.end(), values.begin());
    Assign(list.view(), values);
  }

  template <class Fill>
  void FillWith(Fill fill) {
    fill(x), fill(bias), weights.Each(fill);
  }
  GroupedMatmulArgs args() {
    return {.x = x.view(),
            .groups = list.view(),
            .group_list = options.ends ? GroupList::kEnds : GroupList::kCounts,
            .weights = weights.stack(),
            .weight_list = weight_list,
            .bias = options.bias ? ConstTensor(bias.view()) : ConstTensor(),
            .out = out.view(),
            .transpose_weights = options.transpose};
  }
  std::vector<Range> ranges() { return reference::GroupRows(list.view(), options.ends); }
  reference::MatmulResult Reference() {
    const ConstTensor given_bias = options.bias ? ConstTensor(bias.view()) : ConstTensor();
    return reference::GroupedMatmul(
        x.view(), ranges(), [&](std::int64_t g) { return weights.Stored(g); }, options.transpose, n,
        given_bias);
  }
  void ExpectGuards() {
    for (const Matrix* m : {&list, &x, &bias, &out}) testing::ExpectGuards(*m);
    weights.Each([](const Matrix& m) { testing::ExpectGuards(m); });
  }

  Groups groups;
  Options options;
  std::int64_t n, k;
  Matrix list, x;
  Stack weights;
  Matrix bias, out;
  std::vector<ConstTensor> weight_list;
};

struct alignas(kPackedAlignment) PackedBlock {
  std::byte bytes[kPackedAlignment];
};

void FillIntegers(Call& call) {
  Random random;
  call.FillWith([&](Matrix& m) { m.FillIntegers(random); });
}
void FillUniform(Call& call) {
  Random random;
  call.FillWith([&](Matrix& m) { m.FillUniform(random); });
}

void ExpectExactForward(const Device& device, const Groups& groups, std::int64_t n, std::int64_t k,
                        const Options& options) {
  SCOPED_TRACE(Join(groups.Name(), " n ", n, " k ", k, " ", options.Name()));
  Call call(groups, n, k, options);
  FillIntegers(call);
  ASSERT_TRUE(IsOk(GroupedMatmul(device, call.args())));
  ExpectExactly(call.out.view(), RoundTo(options.out, call.Reference().c));
  call.ExpectGuards();
}

TEST(GroupedMatmulTest, SmallIntegersAreExact) {
  for (const Groups& groups : SomeGroups()) {
    for (const Options& options : AllOptions()) ExpectExactForward(Host(), groups, 35, 21, options);
  }
}

TEST(GroupedMatmulTest, SmallIntegersAreExactOverEdges) {
  const std::vector<Options> options = AllOptions();
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
  const std::vector<Options> options = AllOptions();
  std::size_t turn = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : SomeGroups()) {
      for (int i = 0; i < 3; ++i) {
        const Options& o = options[(turn += 11) % options.size()];
        SCOPED_TRACE(Join(groups.Name(), " ", o.Name()));
        Call call(groups, 67, 129, o);
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
  const std::vector<Options> options = AllOptions();
  std::size_t turn = 0;
  for (const Groups& groups : SomeGroups()) {
    for (int i = 0; i < 4; ++i)
      ExpectExactForward(Host(), groups, 67, 45, options[(turn += 7) % options.size()]);
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, GroupedMatmulSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(GroupedMatmulOnNpuTest, SmallIntegersAreExact) {
  const std::vector<Options> options = AllOptions();
  std::size_t turn = 0;
  for (const Groups& groups : SomeGroups()) {
    for (int i = 0; i < 6; ++i) {
      const Options& o = options[(turn += 5) % options.size()];
      ExpectExactForward(NpuWithData(Ascend910B2()), groups, 67, 45, o);
      ExpectExactForward(NpuWithData(Ascend910B4()), groups, 300, 129, o);
    }
  }
}

// Each group, bit for bit, as one product of its own.
TEST(GroupedMatmulTest, SameBitsAsSingleProducts) {
  const Groups all[] = {{{8, 8, 0, 8, 8}, 3}, {{1, 200, 13, 64}, 0}, {{515, 7}, 5}};
  const struct { std::int64_t n, k; } sizes[] = {{256, 512}, {131, 1027}, {1024, 640}};
  for (const Groups& groups : all) {
    for (const auto& [n, k] : sizes) {
      for (Options o : AllOptions()) {
        if (o.list || o.ends) continue;
        SCOPED_TRACE(Join(groups.Name(), " n ", n, " k ", k, " ", o.Name()));
        Call call(groups, n, k, o);
        FillUniform(call);
        ASSERT_TRUE(IsOk(GroupedMatmul(Host(), call.args())));
        Matrix single(o.out, {groups.rows(), n});
        single.Fill(0);
        const std::vector<Range> ranges = call.ranges();
        for (std::int64_t g = 0; g < groups.count(); ++g) {
          const Range rows = ranges[static_cast<std::size_t>(g)];
          const auto part = [&](Tensor t, std::int64_t row, std::int64_t count) {
            t.data = static_cast<char*>(t.data) + row * t.stride(0) * SizeOf(t.dtype);
            t.sizes[0] = count;
            return t;
          };
          MatmulArgs args;
          args.a = part(call.x.view(), rows.begin, rows.size());
          args.b = call.weights.Stored(g), args.transpose_b = o.transpose;
          args.c = part(single.view(), rows.begin, rows.size());
          if (o.bias) {
            Tensor row = part(call.bias.view(), g, 1);
            args.bias = Tensor(row.data, row.dtype, {n});
          }
          ASSERT_TRUE(IsOk(Matmul(Host(), args)));
        }
        ExpectSameBits(call.out.view(), single.view());
      }
    }
  }
}

// Weights packed beforehand give the same bits, on both executors.
// The same with all that an epilogue has, residual among it; rows after the groups stay 0.
TEST(GroupedMatmulTest, SameBitsAsSingleProductsWithEpilogues) {
  const std::int64_t n = 150, k = 70, rows = 160;
  const std::int64_t begins[] = {0, 5, 5, 22, 152};
  const std::vector<std::int32_t> counts{5, 0, 17, 130};
  for (const DType in : kFloatTypes) {
    for (const Activation activation : {Activation::kNone, Activation::kRelu, Activation::kGelu}) {
      for (const float alpha : {1.0f, 0.5f}) {
        for (const bool in_place : {false, true}) {
          for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
            SCOPED_TRACE(
                Join(NameOf(in), " ", static_cast<int>(activation), " ", alpha, in_place ? " in place" : ""));
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

TEST(GroupedMatmulTest, SameBitsWithPackedWeights) {
  const Groups all[] = {{{8, 8, 0, 8, 8}, 3}, {{1, 200, 13, 64}, 0}, {{}, 4}};
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : all) {
      for (Options o : AllOptions()) {
        if (o.list || o.ends) continue;
        SCOPED_TRACE(Join(groups.Name(), " ", o.Name()));
        Call call(groups, 131, 259, o);
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
    Call first(groups, 259, 513, {.in = in});
    FillUniform(first);
    ASSERT_TRUE(IsOk(GroupedMatmul(Host({.threads = 1}), first.args())));
    for (int threads : kThreadCounts) {
      for (bool ends : {false, true}) {
        SCOPED_TRACE(Join(NameOf(in), " threads ", threads, ends ? " ends" : " counts"));
        Call call(groups, 259, 513, {.in = in, .list = ends, .ends = ends, .groups = DType::kI32});
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
      Call call(groups, 40, 33, {.list = list});
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

// Rows after the last group may hold anything; what is written there is 0.
TEST(GroupedMatmulTest, RowsAfterTheGroupsAreZero) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      Call call({{3, 0, 6}, 250}, 70, 37, {.in = in, .out = in, .bias = in});
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
      Call call({{13, 2, 30}, 3}, 45, 50, {.in = in});
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
  Call call({{2, 1, 4}, 0}, 3, 5, {.in = DType::kBF16});
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
Profile ProfileOf(const std::vector<std::int64_t>& counts, std::int64_t n, std::int64_t k, bool grad) {
  const auto groups = static_cast<std::int64_t>(counts.size());
  const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const ConstTensor list(counts.data(), {groups}), x(nullptr, DType::kBF16, {rows, k});
  const Device device = Npu(Ascend910B2(), {.with_data = false, .timeline = true});
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

TEST(GroupedMatmulOnNpuTest, TimeIsLinearInTheGroups) {
  const auto time = [](std::size_t experts) {
    return ProfileOf(std::vector<std::int64_t>(experts, 4), 1024, 512, false).time_s;
  };
  const double few = time(128);
  EXPECT_LT(time(512), 4.4 * few);
  EXPECT_LT(time(1024), 8.8 * few);
}

// ---- Gradients ----

struct GradCall {
  // `o.out` is the dtype of dx.
  GradCall(const Groups& g, std::int64_t n, std::int64_t k, const Options& o, DType dw_type)
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

  Call forward;
  Matrix dy, dx;
  Stack dw;
  std::vector<Tensor> dw_list;
};

void ExpectGrad(const Device& device, const Groups& groups, std::int64_t n, std::int64_t k, const Options& o,
                bool accumulate, bool integers) {
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
  const std::vector<Options> options = AllOptions();
  std::size_t turn = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Groups& groups : SomeGroups()) {
      for (int i = 0; i < 6; ++i) {
        Options o = options[(turn += 7) % options.size()];
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

// Empty groups: 0 where dw is written, untouched (NaN stays) where it is accumulated, and then without data in a list.
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
