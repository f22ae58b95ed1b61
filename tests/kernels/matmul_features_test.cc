// Matmul's epilogues, mixed types and split sums, through the public call alone, on both executors.
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
       {MatmulShape{33, 65, 47}, {129, 300, 66}, {300, 70, 0}, {1, 131, 70}, {70, 1, 33}, {300, 7, 66}}) {
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

// With alpha = 0 shapes of a and b are all that counts: they hold NaN, are null, packed into null, or lie on c.
TEST(MatmulEpilogueTest, AlphaZeroReadsNoOperands) {
  for (const Device& device : BothExecutors()) {
    Random random;
    Matrix a(DType::kBF16, {20, 30}), b(DType::kBF16, {30, 40}), residual(DType::kF32, {20, 40}),
        bias(DType::kF32, {40}), c(DType::kF32, {20, 40});
    residual.FillIntegers(random), bias.FillIntegers(random);
    const MatmulArgs args{.a = a.view(),
                          .b = b.view(),
                          .bias = bias.view(),
                          .c = c.view(),
                          .alpha = 0,
                          .beta = 2,
                          .residual = residual.view()};
    std::vector<double> expected = residual.ToDoubles();
    const std::vector<double> shift = bias.ToDoubles();
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = 2 * expected[i] + shift[i % 40];
    const auto expect = [&](auto change) {
      MatmulArgs changed = args;
      change(changed);
      c.FillNaN();
      ASSERT_TRUE(IsOk(Matmul(device, changed)));
      ExpectExactly(c.view(), expected);
    };
    expect([](MatmulArgs&) {});
    expect([](MatmulArgs& x) { x.a.data = x.b.data = nullptr; });
    expect([](MatmulArgs& x) {
      x.transpose_a = x.transpose_b = true;
      x.a.sizes = {30, 20}, x.b.sizes = {40, 30};
    });
    expect([](MatmulArgs& x) { x.a.data = x.b.data = x.c.data; });
    expect([](MatmulArgs& x) {
      const PackedOperand packed{
          .bytes = 1 << 20, .dtype = DType::kBF16, .matrices = 1, .rows = 30, .cols = 40};
      x.b = {}, x.packed_b = packed;
    });
    MatmulArgs wrong = args;
    wrong.b.sizes[0] = 29;
    EXPECT_FALSE(Matmul(device, wrong).ok());
  }
}

TEST(MatmulEpilogueTest, BetaZeroReadsNoResidual) {
  for (const Device& device : BothExecutors()) {
    Random random;
    Matrix a(DType::kF32, {20, 30}), b(DType::kF32, {30, 40}), c(DType::kF32, {20, 40});
    a.FillIntegers(random), b.FillIntegers(random);
    const std::vector<double> expected = reference::Matmul(a.view(), false, b.view(), false, {}).c;
    ConstTensor null(c.view()), one_row(c.view());
    null.data = nullptr, one_row.strides[0] = 0;
    for (const ConstTensor& residual : {null, one_row}) {
      c.FillNaN();
      ASSERT_TRUE(IsOk(
          Matmul(device, {.a = a.view(), .b = b.view(), .c = c.view(), .beta = 0, .residual = residual})));
      ExpectExactly(c.view(), expected);
    }
  }
}

// The same elements by another number of dimensions are c itself all the same.
TEST(MatmulEpilogueTest, ResidualIsCWhateverItsRank) {
  for (const Device& device : BothExecutors()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Random random;
      Matrix a(DType::kF32, {20, 30}), b(DType::kF32, {30, 40}), c(dtype, {20, 40});
      a.FillIntegers(random), b.FillIntegers(random);
      Tensor stack = c.view();
      stack.rank = 4, stack.sizes = {1, 1, 20, 40},
      stack.strides = {7, 7, stack.strides[0], stack.strides[1]};
      const std::vector<double> product = reference::Matmul(a.view(), false, b.view(), false, {}).c;
      c.FillIntegers(random);
      std::vector<double> expected = c.ToDoubles();
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] = RoundTo(dtype, expected[i] + product[i]);
      MatmulArgs args{.a = a.view(), .b = b.view(), .c = stack, .residual = c.view()};
      ASSERT_TRUE(IsOk(Matmul(device, args)));
      ExpectExactly(c.view(), expected);
      ExpectGuards(c);
      args.residual.strides[0] += 1;  // Other elements of it.
      EXPECT_FALSE(Matmul(device, args).ok());
    }
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
