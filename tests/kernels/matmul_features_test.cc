// Matmul's epilogues, batches, mixed types and split sums, through the public call alone, on both executors.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "reference/epilogue.h"
#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu, Activation::kSilu,
                                       Activation::kGelu, Activation::kGeluTanh};
const std::vector<Device>& BothExecutors() {
  static const std::vector<Device> devices = {Host(), NpuWithData(Ascend910B2())};
  return devices;
}

// ---- Epilogues ----

struct EpilogueCase {
  MatmulShape shape;
  DType in = DType::kF32, out = DType::kF32;
  std::optional<DType> bias = {}, residual = {};
  float alpha = 1, beta = 1;
  Activation activation = Activation::kNone;

  std::string Name() const {
    return Join(shape.Name(), " ", NameOf(in), " to ", NameOf(out), bias ? " bias" : "",
                residual ? " residual" : "", " alpha ", alpha, " beta ", beta, " activation ",
                static_cast<int>(activation));
  }
};

// Every activation with every output, bias and residual of every type, and factors.
std::vector<EpilogueCase> EpilogueCases(const MatmulShape& shape) {
  std::vector<EpilogueCase> cases;
  const float factors[] = {1, -0.75f, 0, 2};
  for (std::size_t i = 0; i < 60; ++i) {
    EpilogueCase c{.shape = shape, .in = kFloatTypes[i % 3], .out = kFloatTypes[i / 3 % 3]};
    c.activation = kActivations[i % 5];
    if (i / 5 % 2 == 1) c.bias = kFloatTypes[i / 10 % 3];
    if (i / 2 % 3 != 0) c.residual = kFloatTypes[i / 7 % 3];
    c.alpha = factors[i / 4 % 4], c.beta = factors[i / 9 % 4];
    cases.push_back(c);
  }
  return cases;
}

void ExpectWithinBounds(const Device& device, const EpilogueCase& x) {
  SCOPED_TRACE(x.Name());
  Random random;
  const auto [m, n, k] = std::array{x.shape.m, x.shape.n, x.shape.k};
  Matrix a(x.in, {m, k}), b(x.in, {k, n}), bias(x.bias.value_or(DType::kF32), {n}),
      residual(x.residual.value_or(DType::kF32), {m, n}), c(x.out, {m, n});
  a.FillUniform(random), b.FillUniform(random), bias.FillUniform(random), residual.FillUniform(random, -3, 3);
  MatmulArgs args{.a = a.view(), .b = b.view(), .c = c.view()};
  if (x.bias) args.bias = bias.view();
  if (x.residual) args.residual = residual.view();
  args.alpha = x.alpha, args.beta = x.beta, args.activation = x.activation;
  ASSERT_TRUE(IsOk(Matmul(device, args)));
  const auto expected = reference::ApplyEpilogue(
      reference::Matmul(a.view(), false, b.view(), false, {}), k, x.in, x.out,
      {x.alpha, x.beta, args.bias, args.residual, static_cast<reference::Activation>(x.activation)}, n);
  ExpectClose(c.view(), expected.c, expected.bounds);
  for (const Matrix* matrix : {&a, &b, &bias, &residual, &c}) ExpectGuards(*matrix);
}

TEST(MatmulEpilogueTest, WithinBounds) {
  for (const MatmulShape& shape :
       {MatmulShape{33, 65, 47}, {129, 300, 66}, {300, 70, 0}, {1, 131, 70}, {70, 1, 33}}) {
    for (const EpilogueCase& c : EpilogueCases(shape)) ExpectWithinBounds(Host(), c);
  }
}

TEST(MatmulEpilogueOnNpuTest, WithinBounds) {
  for (const MatmulShape& shape : {MatmulShape{33, 65, 47}, {129, 300, 66}, {40, 70, 0}}) {
    for (const EpilogueCase& c : EpilogueCases(shape)) ExpectWithinBounds(NpuWithData(Ascend910B2()), c);
  }
  for (const EpilogueCase& c : EpilogueCases({30, 20, 10})) ExpectWithinBounds(NpuWithData(Ascend910B4()), c);
}

// BLAS's c = alpha a b + beta c, also where the sum is empty, and into columns.
TEST(MatmulEpilogueTest, ResidualMayBeC) {
  for (const MatmulShape& shape : {MatmulShape{33, 65, 47}, {129, 300, 66}, {35, 70, 0}}) {
    for (const DType dtype : kFloatTypes) {
      for (const auto& [alpha, beta] : {std::pair{1.0f, 1.0f}, {2.0f, 1.0f}, {1.0f, -2.0f}, {0.5f, 0.0f}}) {
        for (const Layout& layout : {Layout{}, kColumnMajor}) {
          for (const Device& device : BothExecutors()) {
            SCOPED_TRACE(Join(shape.Name(), " ", NameOf(dtype), " ", alpha, " ", beta));
            Random random;
            Matrix a(dtype, {shape.m, shape.k}), b(dtype, {shape.k, shape.n}),
                c(dtype, {shape.m, shape.n}, layout);
            a.FillIntegers(random, -2, 2), b.FillIntegers(random, -1, 1), c.FillIntegers(random);
            if (beta == 0) c.FillNaN();  // Not read.
            std::vector<double> expected = reference::Matmul(a.view(), false, b.view(), false, {}).c;
            const std::vector<double> before = c.ToDoubles();
            for (std::size_t i = 0; i < expected.size(); ++i)
              expected[i] = RoundTo(dtype, alpha * expected[i] + (beta == 0 ? 0 : beta * before[i]));
            ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(),
                                             .b = b.view(),
                                             .c = c.view(),
                                             .alpha = alpha,
                                             .beta = beta,
                                             .residual = c.view()})));
            ExpectExactly(c.view(), expected);
            ExpectGuards(c);
          }
        }
      }
    }
  }
}

TEST(MatmulEpilogueTest, AlphaZeroReadsNoOperands) {
  for (const Device& device : BothExecutors()) {
    Random random;
    Matrix a(DType::kBF16, {20, 30}), b(DType::kBF16, {30, 40}), residual(DType::kF32, {20, 40}),
        c(DType::kF32, {20, 40});
    residual.FillIntegers(random);
    ASSERT_TRUE(IsOk(Matmul(
        device,
        {.a = a.view(), .b = b.view(), .c = c.view(), .alpha = 0, .beta = 2, .residual = residual.view()})));
    std::vector<double> expected = residual.ToDoubles();
    for (double& x : expected) x *= 2;
    ExpectExactly(c.view(), expected);
  }
}

TEST(MatmulEpilogueTest, AccumulateScales) {
  for (const bool with_bias : {false, true}) {
    for (const Device& device : BothExecutors()) {
      Random random;
      Matrix a(DType::kF16, {50, 30}), b(DType::kF16, {30, 70}), bias(DType::kF16, {70}),
          c(DType::kF32, {50, 70});
      a.FillIntegers(random), b.FillIntegers(random), bias.FillIntegers(random), c.FillIntegers(random);
      std::vector<double> expected = reference::Matmul(a.view(), false, b.view(), false, {}).c;
      const std::vector<double> before = c.ToDoubles(), shift = bias.ToDoubles();
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] = before[i] - 0.5 * expected[i] + (with_bias ? shift[i % 70] : 0);
      MatmulArgs args{.a = a.view(), .b = b.view(), .c = c.view(), .accumulate = true, .alpha = -0.5f};
      if (with_bias) args.bias = bias.view();
      ASSERT_TRUE(IsOk(Matmul(device, args)));
      ExpectExactly(c.view(), expected);
    }
  }
}

TEST(MatmulEpilogueTest, NaNAndInfinityStayInTheirElement) {
  for (const Activation activation : kActivations) {
    for (const DType out : kFloatTypes) {
      Random random;
      Matrix a(DType::kF32, {20, 9}), b(DType::kF32, {9, 50}), residual(DType::kF32, {20, 50}),
          c(out, {20, 50});
      a.FillUniform(random), b.FillUniform(random), residual.FillUniform(random);
      residual.set({3, 4}, kNaN), residual.set({19, 49}, kInfinity);
      ASSERT_TRUE(IsOk(Matmul(Host(), {.a = a.view(),
                                       .b = b.view(),
                                       .c = c.view(),
                                       .residual = residual.view(),
                                       .activation = activation})));
      for (std::int64_t i = 0; i < 20; ++i) {
        for (std::int64_t j = 0; j < 50; ++j) {
          const double x = c.at({i, j});
          if (i == 3 && j == 4) {
            EXPECT_TRUE(std::isnan(x));
          } else if (i == 19 && j == 49) {
            EXPECT_EQ(x, kInfinity);
          } else {
            EXPECT_TRUE(std::isfinite(x));
          }
        }
      }
    }
  }
}

TEST(MatmulEpilogueTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  Random random;
  Matrix a(DType::kBF16, {200, 80}), b(DType::kBF16, {80, 300}), residual(DType::kBF16, {200, 300}),
      first(DType::kBF16, {200, 300}), c(DType::kBF16, {200, 300});
  a.FillNormal(random), b.FillNormal(random), residual.FillNormal(random);
  MatmulArgs args{.a = a.view(),
                  .b = b.view(),
                  .c = first.view(),
                  .alpha = 0.3f,
                  .residual = residual.view(),
                  .activation = Activation::kGelu};
  ASSERT_TRUE(IsOk(Matmul(Host({.threads = 1}), args)));
  args.c = c.view();
  for (const int threads : kThreadCounts) {
    c.FillNaN();
    ASSERT_TRUE(IsOk(Matmul(Host({.threads = threads}), args)));
    ExpectSameBits(c.view(), first.view());
  }
}

// ---- Types ----

TEST(MatmulTypesTest, AnyOutputHoldsTheSumRoundedOnce) {
  for (const DType in : kFloatTypes) {
    for (const Device& device : BothExecutors()) {
      Random random;
      Matrix a(in, {50, 70}), b(in, {70, 90}), wide(DType::kF32, {50, 90});
      a.FillNormal(random), b.FillNormal(random);
      ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = wide.view()})));
      for (const DType out : kFloatTypes) {
        Matrix c(out, {50, 90});
        ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = c.view()})));
        ExpectExactly(c.view(), RoundTo(out, wide.ToDoubles()));
      }
    }
  }
}

// ---- Batches ----

// Matrix (i, j) of a tensor whose batch dimensions are those of c, or 1, or missing.
template <class AnyTensor>
AnyTensor At(AnyTensor t, std::int64_t i, std::int64_t j) {
  AnyTensor one = t;
  const std::int64_t index[] = {i, j};
  std::int64_t offset = 0;
  for (int d = 0; d < t.rank - 2; ++d) {
    if (t.size(d) > 1) offset += index[d + 4 - t.rank] * t.stride(d);
  }
  using Bytes = std::conditional_t<std::is_same_v<AnyTensor, Tensor>, char, const char>;
  one.data = static_cast<Bytes*>(t.data) + offset * SizeOf(t.dtype);
  one.rank = 2;
  one.sizes = {t.size(t.rank - 2), t.size(t.rank - 1)},
  one.strides = {t.stride(t.rank - 2), t.stride(t.rank - 1)};
  return one;
}

// A batch is its products one by one, bit for bit.
void ExpectBatchIsItsProducts(const Device& device, const MatmulArgs& args, Matrix* c) {
  ASSERT_TRUE(IsOk(Matmul(device, args)));
  const std::int64_t outer = args.c.rank == 4 ? args.c.size(0) : 1, inner = args.c.size(args.c.rank - 3);
  for (std::int64_t i = 0; i < outer; ++i) {
    for (std::int64_t j = 0; j < inner; ++j) {
      SCOPED_TRACE(Join("matrix ", i, ", ", j));
      Matrix single(args.c.dtype, {args.c.size(args.c.rank - 2), args.c.size(args.c.rank - 1)});
      MatmulArgs one = args;
      one.a = At(args.a, i, j), one.b = At(args.b, i, j), one.c = single.view();
      if (args.residual.given()) one.residual = At(args.residual, i, j);
      ASSERT_TRUE(IsOk(Matmul(device, one)));
      ExpectSameBits(At(args.c, i, j), single.view());
    }
  }
  ExpectGuards(*c);
}

TEST(MatmulBatchTest, EveryBroadcast) {
  const std::int64_t m = 19, n = 37, k = 23;
  for (const DType in : kFloatTypes) {
    for (int transposes = 0; transposes < 4; ++transposes) {
      const bool ta = (transposes & 1) != 0, tb = (transposes & 2) != 0;
      const std::int64_t am = ta ? k : m, ak = ta ? m : k, bk = tb ? n : k, bn = tb ? k : n;
      std::vector<Matrix> as, bs;
      as.emplace_back(in, std::initializer_list<std::int64_t>{am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{3, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{3, bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{2, 1, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{2, 1, bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{2, 3, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{2, 3, bk, bn});
      Random random;
      for (Matrix& x : as) x.FillNormal(random);
      for (Matrix& x : bs) x.FillNormal(random);
      for (std::size_t i = 0; i < 16; ++i) {
        SCOPED_TRACE(Join(NameOf(in), " ", transposes, " case ", i));
        Matrix c(DType::kF32, {2, 3, m, n});
        ExpectBatchIsItsProducts(BothExecutors()[(i + static_cast<std::size_t>(transposes)) % 2],
                                 {.a = as[i % 4].view(),
                                  .b = bs[i / 4].view(),
                                  .c = c.view(),
                                  .transpose_a = ta,
                                  .transpose_b = tb},
                                 &c);
      }
    }
  }
}

// Rows that go on from matrix to matrix become one product; with bias, residual and activation too.
TEST(MatmulBatchTest, SharedWeights) {
  for (const Layout& layout : {kContiguous, Layout{}}) {
    for (const std::int64_t m : {1, 5, 40}) {
      for (const Device& device : BothExecutors()) {
        Random random;
        Matrix a(DType::kBF16, {2, 3, m, 50}, layout), b(DType::kBF16, {50, 70}), bias(DType::kF32, {70}),
            residual(DType::kBF16, {2, 3, m, 70}, layout), c(DType::kBF16, {2, 3, m, 70}, layout);
        a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random), residual.FillNormal(random);
        ExpectBatchIsItsProducts(device,
                                 {.a = a.view(),
                                  .b = b.view(),
                                  .bias = bias.view(),
                                  .c = c.view(),
                                  .alpha = 0.5f,
                                  .residual = residual.view(),
                                  .activation = Activation::kSilu},
                                 &c);
      }
    }
  }
}

// A stride of 0 repeats a matrix, and packed operands serve a batch, one for all or one each.
TEST(MatmulBatchTest, RepeatedAndPacked) {
  for (const DType in : kFloatTypes) {
    for (const Device& device : BothExecutors()) {
      Random random;
      Matrix a(in, {4, 33, 50}), b(in, {4, 50, 70}), c(DType::kF32, {4, 33, 70}),
          again(DType::kF32, {4, 33, 70});
      a.FillNormal(random), b.FillNormal(random);
      MatmulArgs args{.a = a.view(), .b = b.view(), .c = c.view()};
      args.b.strides[0] = 0;
      ASSERT_TRUE(IsOk(Matmul(device, args)));
      for (const bool each : {false, true}) {
        ConstTensor source = b.view();
        if (each) {
          args.b = b.view();
          ASSERT_TRUE(IsOk(Matmul(device, args)));
        } else {
          source = At(ConstTensor(b.view()), 0, 0);
        }
        const std::int64_t bytes = PackedOperandBytes(device, Side::kB, in, 50, 70, each ? 4 : 1);
        std::vector<std::byte> memory(static_cast<std::size_t>(bytes + kPackedAlignment));
        void* data = memory.data();
        std::size_t space = memory.size();
        std::align(kPackedAlignment, static_cast<std::size_t>(bytes), data, space);
        PackedOperand packed;
        ASSERT_TRUE(IsOk(PackOperand(device, {.source = source, .data = data, .bytes = bytes}, &packed)));
        ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .c = again.view(), .packed_b = packed})));
        ExpectSameBits(again.view(), c.view());
      }
    }
  }
}

TEST(MatmulBatchTest, EmptyBatches) {
  for (const Device& device : BothExecutors()) {
    Matrix a(DType::kF32, {0, 3, 4}), b(DType::kF32, {4, 5}), c(DType::kF32, {0, 3, 5});
    EXPECT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = c.view()})));
    Matrix one(DType::kF32, {1, 1, 3, 4}), result(DType::kF32, {1, 1, 3, 5});
    Random random;
    one.FillIntegers(random), b.FillIntegers(random);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = one.view(), .b = b.view(), .c = result.view()})));
    ExpectExactly(result.view(), reference::Matmul(At(one.view(), 0, 0), false, b.view(), false, {}).c);
  }
}

// ---- Sums in parts ----

TEST(MatmulSplitTest, WithinBoundsAndExact) {
  for (const MatmulShape& shape :
       {MatmulShape{3, 5, 100003}, {64, 48, 9001}, {1, 1, 300001}, {16, 500, 8192}}) {
    for (const DType in : kFloatTypes) {
      for (const Device& device : BothExecutors()) {
        SCOPED_TRACE(Join(shape.Name(), " ", NameOf(in)));
        Random random;
        Matrix a(in, {shape.m, shape.k}), b(in, {shape.n, shape.k}), c(DType::kF32, {shape.m, shape.n});
        a.FillIntegers(random, -2, 2), b.FillIntegers(random, -2, 2);
        MatmulArgs args{.a = a.view(), .b = b.view(), .c = c.view(), .transpose_b = true};
        ASSERT_TRUE(IsOk(Matmul(device, args)));
        ExpectExactly(c.view(), reference::Matmul(a.view(), false, b.view(), true, {}).c);
        ExpectGuards(c);
      }
      for (const EpilogueCase& c : {EpilogueCase{.shape = shape,
                                   .in = in,
                                   .out = in,
                                   .bias = DType::kF32,
                                   .residual = DType::kBF16,
                                   .alpha = 0.01f,
                                   .beta = 0.5f,
                                   .activation = Activation::kSilu}}) {
        for (const Device& device : BothExecutors()) ExpectWithinBounds(device, c);
      }
    }
  }
}

TEST(MatmulSplitTest, AddsToC) {
  for (const Device& device : BothExecutors()) {
    Random random;
    Matrix a(DType::kF32, {8, 40000}), b(DType::kF32, {40000, 9}), c(DType::kF32, {8, 9});
    a.FillIntegers(random, -1, 1), b.FillIntegers(random, -1, 1), c.FillIntegers(random);
    std::vector<double> expected = c.ToDoubles();
    const std::vector<double> product = reference::Matmul(a.view(), false, b.view(), false, {}).c;
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
    ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = c.view(), .accumulate = true})));
    ExpectExactly(c.view(), expected);
  }
}

TEST(MatmulSplitTest, SameBitsForAnyThreadsAndStorage) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (const DType in : kFloatTypes) {
    Random random;
    Matrix a(in, {24, 20001}), b(in, {20001, 40}), first(DType::kF32, {24, 40}), c(DType::kF32, {24, 40});
    a.FillNormal(random), b.FillNormal(random);
    MatmulArgs args{.a = a.view(), .b = b.view(), .c = first.view()};
    ASSERT_TRUE(IsOk(Matmul(Host({.threads = 1}), args)));
    args.c = c.view();
    for (const int threads : kThreadCounts) {
      c.FillNaN();
      ASSERT_TRUE(IsOk(Matmul(Host({.threads = threads}), args)));
      ExpectSameBits(c.view(), first.view());
    }
    Matrix turned(in, {40, 20001}, {.gap = 1, .offset = 3, .step = 2});
    Assign(turned.transposed(), b.ToDoubles());
    args.b = turned.view(), args.transpose_b = true;
    ASSERT_TRUE(IsOk(Matmul(Host(), args)));
    ExpectSameBits(c.view(), first.view());
  }
}

}  // namespace
}  // namespace cubist::testing
