// Matmul against the reference, through the public call alone: on the host, on its SIMD targets, and on the
// model.
#include "kernels/matmul.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/matmul_call.h"
#include "tests/support/double_benchmark.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

// Small integers: products and sums are exact in fp32 whatever the dtype, so that a right answer is the exact
// one, rounded once. The product is computed once for all options.
class ExactProduct {
 public:
  explicit ExactProduct(const MatmulShape& shape) : shape_(shape) {
    const Layout contiguous = kContiguous;
    Matrix a(DType::kF32, {shape.m, shape.k}, contiguous), b(DType::kF32, {shape.k, shape.n}, contiguous);
    Matrix bias(DType::kF32, {shape.n}, contiguous);
    a.FillIntegers(random_), b.FillIntegers(random_), bias.FillIntegers(random_);
    a_ = a.ToDoubles(), b_ = b.ToDoubles(), bias_ = bias.ToDoubles();
    product_ = reference::Matmul(a.view(), false, b.view(), false, {}).c;
  }

  void Expect(const Device& device, const MatmulOptions& options) const {
    SCOPED_TRACE(shape_.Name() + " " + options.Name());
    MatmulCall call(shape_, options);
    Assign(call.plain_a(), a_), Assign(call.plain_b(), b_), Assign(call.bias.view(), bias_);
    ASSERT_TRUE(IsOk(Matmul(device, call.args())));
    std::vector<double> expected = product_;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (options.bias) expected[i] += bias_[i % bias_.size()];
      expected[i] = RoundTo(options.out, expected[i]);
    }
    ExpectExactly(call.c.view(), expected);
    call.ExpectGuards();
  }

 private:
  Random random_;
  MatmulShape shape_;
  std::vector<double> a_, b_, bias_, product_;
};

// Random reals: within the bound that the contract's roundings allow.
void ExpectWithinBounds(const Device& device, const MatmulShape& shape, const MatmulOptions& options) {
  SCOPED_TRACE(shape.Name() + " " + options.Name());
  Random random;
  MatmulCall call(shape, options);
  call.FillUniform(random);
  ASSERT_TRUE(IsOk(Matmul(device, call.args())));
  const reference::MatmulResult expected = call.Reference();
  ExpectClose(call.c.view(), expected.c,
              reference::MatmulBounds(expected, call.k(), options.in, options.out));
  call.ExpectGuards();
}

// Shapes that cross tiles in every dimension, small enough for every target and for the model.
std::vector<MatmulShape> FewShapes() {
  return {{1, 1, 1},   {7, 19, 13},   {16, 48, 32},  {33, 65, 47}, {5, 35, 257},   {129, 97, 66},
          {65, 63, 0}, {3, 1031, 17}, {1031, 3, 18}, {2, 3, 4099}, {130, 259, 131}};
}

// Every remainder of each dimension by a step of it, behind `whole` steps; the others are no multiples of anything.
std::vector<MatmulShape> Remainders(const MatmulShape& step, std::int64_t whole) {
  std::vector<MatmulShape> shapes;
  const auto walk = [&](std::int64_t of, auto shape) {
    for (std::int64_t rest = 1; rest < of; ++rest) shapes.push_back(shape(whole * of + rest));
  };
  walk(step.m, [](std::int64_t m) { return MatmulShape{m, 71, 43}; });
  walk(step.n, [](std::int64_t n) { return MatmulShape{41, n, 43}; });
  walk(step.k, [](std::int64_t k) { return MatmulShape{41, 71, k}; });
  return shapes;
}

// Each shape in every dtype, transposes in turn.
void ExpectExactInTurn(const Device& device, const std::vector<MatmulShape>& shapes) {
  int turn = 0;
  for (const MatmulShape& shape : shapes) {
    const ExactProduct product(shape);
    for (const DType in : kFloatTypes) {
      ++turn;
      product.Expect(device, {.in = in, .transpose_a = turn % 2 == 1, .transpose_b = turn % 4 > 1});
    }
  }
}

class MatmulShapeTest : public ::testing::TestWithParam<MatmulShape> {};

TEST_P(MatmulShapeTest, SmallIntegersAreExact) {
  const ExactProduct product(GetParam());
  for (const MatmulOptions& options : AllOptions()) product.Expect(Host(), options);
}

TEST_P(MatmulShapeTest, RandomRealsAreWithinBounds) {
  // Three options per shape, others for the next shape.
  const std::vector<MatmulOptions> all = AllOptions();
  const MatmulShape& shape = GetParam();
  const auto turn = static_cast<std::size_t>(shape.m + 2 * shape.n + 3 * shape.k);
  for (std::size_t i : {turn, turn + 1 + all.size() / 3, turn + 2 + 2 * all.size() / 3}) {
    ExpectWithinBounds(Host(), shape, all[i % all.size()]);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MatmulShapeTest, ::testing::ValuesIn(MatmulShapes()), ShapeName());

class MatmulSimdTest : public SimdTargetTest {};

TEST_P(MatmulSimdTest, SmallIntegersAreExact) {
  for (const MatmulShape& shape : FewShapes()) {
    const ExactProduct product(shape);
    for (const MatmulOptions& options : SomeOptions()) product.Expect(Host(), options);
  }
}

// Of a register tile alone, and of the last one of several.
TEST_P(MatmulSimdTest, EveryRemainderOfARegisterTile) {
  const ChipSpec::Mmad& mmad = HostChip().mmad;
  const MatmulShape tile{std::max(mmad.m_step, mmad.narrow_m_step), mmad.n_step,
                         std::max<std::int64_t>(mmad.k_bytes, 8)};
  for (const std::int64_t whole : {0, 1, 3}) ExpectExactInTurn(Host(), Remainders(tile, whole));
}

TEST_P(MatmulSimdTest, RandomRealsAreWithinBounds) {
  for (const MatmulShape& shape : FewShapes()) {
    for (DType in : kFloatTypes) {
      ExpectWithinBounds(Host(), shape, {.in = in, .out = in, .bias = DType::kF32, .transpose_a = true});
      ExpectWithinBounds(Host(), shape, {.in = in, .out = DType::kF32, .bias = in, .transpose_b = true});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, MatmulSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// One text, both executors, in one program: what the model computes is what the host computes, where sums are
// exact.
TEST(MatmulOnNpuTest, SmallIntegersAreExact) {
  for (const MatmulShape& shape : FewShapes()) {
    const ExactProduct product(shape);
    for (const MatmulOptions& options : SomeOptions()) {
      product.Expect(NpuWithData(Ascend910B2()), options);
      product.Expect(Host(), options);
    }
  }
  const ExactProduct product({129, 257, 300});
  for (const MatmulOptions& options : SomeOptions()) product.Expect(NpuWithData(Ascend910B4()), options);
}

// Of a fractal alone, and behind whole blocks of 128 and 256, as blocks of L0 and L1 end.
TEST(MatmulOnNpuTest, EveryRemainderOfAFractal) {
  for (const std::int64_t block : {0, 128, 256})
    ExpectExactInTurn(NpuWithData(Ascend910B2()), Remainders({16, 16, 16}, block / 16));
}

TEST(MatmulOnNpuTest, RandomRealsAreWithinBounds) {
  for (const MatmulShape& shape : FewShapes()) {
    for (DType in : kFloatTypes) {
      ExpectWithinBounds(NpuWithData(Ascend910B2()), shape,
                         {.in = in, .out = in, .bias = in, .transpose_b = true});
      ExpectWithinBounds(NpuWithData(Ascend910B4()), shape,
                         {.in = in, .out = DType::kF32, .transpose_a = true});
    }
  }
}

// Bounds allow the worst; beside a naive fp32 sum the kernel is as good as that.
TEST(MatmulTest, DoubleBenchmark) {
  const MatmulShape shapes[] = {
      {64, 64, 64}, {33, 97, 1025}, {128, 128, 512}, {1, 517, 259}, {97, 131, 2049}};
  for (const MatmulShape& shape : shapes) {
    for (DType in : kFloatTypes) {
      for (DType out : {DType::kF32, in}) {
        const MatmulOptions options{.in = in, .out = out, .bias = in};
        SCOPED_TRACE(shape.Name() + " " + options.Name());
        Random random(kTypicalData);
        MatmulCall call(shape, options);
        call.FillNormal(random);
        const MatmulArgs args = call.args();
        ASSERT_TRUE(IsOk(Matmul(Host(), args)));
        EXPECT_TRUE(PassesDoubleBenchmark(call.c.view(), call.Reference().c,
                                          NaiveMatmul(args.a, false, args.b, false, args.bias, out)));
      }
    }
  }
}

// What c holds counts, for every block and with an empty sum too.
TEST(MatmulTest, Accumulates) {
  for (const MatmulShape& shape : FewShapes()) {
    for (DType in : kFloatTypes) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        SCOPED_TRACE(Join(shape.Name(), " ", NameOf(in)));
        Random random;
        MatmulCall call(shape, {.in = in, .out = DType::kF32, .bias = in, .transpose_b = shape.m % 2 == 0});
        call.a.FillIntegers(random), call.b.FillIntegers(random), call.bias.FillIntegers(random);
        call.c.FillIntegers(random);
        std::vector<double> expected = call.c.ToDoubles();
        const std::vector<double> product = call.Reference().c;
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
        MatmulArgs args = call.args();
        args.accumulate = true;
        ASSERT_TRUE(IsOk(Matmul(device, args)));
        ExpectExactly(call.c.view(), expected);
        call.ExpectGuards();
      }
    }
  }
}

// An empty sum is the bias, or zero. Operands without elements need no data.
TEST(MatmulTest, EmptyK) {
  for (DType in : kFloatTypes) {
    for (const MatmulOptions& options : OutputsAndBiases(in)) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        SCOPED_TRACE(options.Name());
        Random random;
        MatmulCall call({35, 70, 0}, options);
        call.bias.FillUniform(random);
        MatmulArgs args = call.args();
        args.a.data = args.b.data = nullptr;
        ASSERT_TRUE(IsOk(Matmul(device, args)));
        std::vector<double> expected(35 * 70);
        if (options.bias) {
          for (std::size_t i = 0; i < expected.size(); ++i) {
            expected[i] = RoundTo(options.out, call.bias.at({static_cast<std::int64_t>(i % 70)}));
          }
        }
        ExpectExactly(call.c.view(), expected);
        call.ExpectGuards();
      }
    }
  }
}

// Nothing to compute: nothing is read or written, whatever the other sizes.
TEST(MatmulTest, EmptyOutput) {
  for (const MatmulShape& shape : {MatmulShape{0, 5, 7}, MatmulShape{5, 0, 7}, MatmulShape{0, 0, 7},
                                   MatmulShape{0, 5, 0}, MatmulShape{0, 0, 0}}) {
    for (const MatmulOptions& options : SomeOptions()) {
      for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
        SCOPED_TRACE(shape.Name() + " " + options.Name());
        MatmulCall call(shape, options);
        MatmulArgs args = call.args();
        args.c.data = nullptr;
        Profile profile;
        EXPECT_TRUE(IsOk(Matmul(device, args, &profile)));
        EXPECT_EQ(profile.macs, 0);
        EXPECT_EQ(profile.gm_written, 0);
        call.ExpectGuards();
      }
    }
  }
}

// A NaN or infinity in a(i, p) is seen in row i alone, in b(p, j) in column j alone, in bias(j) likewise; in
// particular zero padding of tiles does not meet it.
TEST(MatmulTest, SpecialValuesStayInTheirRowOrColumn) {
  const MatmulShape shape{67, 83, 45};
  for (double special : {kNaN, kInfinity, -kInfinity}) {
    for (MatmulOptions options : AllOptions()) {
      options.bias = DType::kF32;
      SCOPED_TRACE(Join(special, " ", options.Name()));
      Random random;
      MatmulCall call(shape, options);
      // Positive, so that infinities keep their sign and no product is 0 * inf.
      call.a.FillIntegers(random, 1, 3), call.b.FillIntegers(random, 1, 3),
          call.bias.FillIntegers(random, 1, 3);
      const std::int64_t row = 66, column = 82, p = 44, bias_column = 15, b_column = 64;
      const Tensor a = call.plain_a(), b = call.plain_b();
      StoreFloat(a.data, a.dtype, row * a.stride(0) + p * a.stride(1), static_cast<float>(special));
      StoreFloat(b.data, b.dtype, p * b.stride(0) + b_column * b.stride(1), static_cast<float>(special));
      StoreFloat(b.data, b.dtype, column * b.stride(1), static_cast<float>(special));
      call.bias.set({bias_column}, special);
      ASSERT_TRUE(IsOk(Matmul(Host(), call.args())));
      std::vector<double> expected = call.Reference().c;
      // What the reference says, said again in words.
      for (std::int64_t i = 0; i < shape.m; ++i) {
        for (std::int64_t j = 0; j < shape.n; ++j) {
          const bool hit = i == row || j == column || j == b_column || j == bias_column;
          ASSERT_EQ(std::isfinite(expected[static_cast<std::size_t>(i * shape.n + j)]), !hit);
        }
      }
      ExpectExactly(call.c.view(), RoundTo(options.out, expected));
    }
  }
}

// Buffers that an earlier call left full of NaN: padding does not take from them.
TEST(MatmulTest, NothingIsLeftOfEarlierCalls) {
  for (const Device& device : {Host({.threads = 1}), NpuWithData(Ascend910B2())}) {
    for (DType in : kFloatTypes) {
      MatmulCall poison({300, 530, 310}, {.in = in, .out = DType::kF32, .bias = in});
      poison.a.FillNaN(), poison.b.FillNaN(), poison.bias.FillNaN();
      for (const MatmulShape& shape : FewShapes()) {
        ASSERT_TRUE(IsOk(Matmul(device, poison.args())));
        ExactProduct(shape).Expect(device, {.in = in, .out = DType::kF32, .bias = in, .transpose_b = true});
      }
    }
  }
}

// Every bit pattern of a 16-bit type passes through a product with the identity. Signed zeros and NaN payloads
// are not promised, nor bf16 denormals, which native dot products flush.
TEST(MatmulTest, IdentityKeepsEveryValue) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const std::int64_t rows = 1024, cols = 64;
    Matrix a(dtype, {rows, cols}, kContiguous), identity(dtype, {cols, cols}), c(dtype, {rows, cols});
    identity.Fill(0);
    for (std::int64_t i = 0; i < cols; ++i) identity.set({i, i}, 1);
    std::vector<double> expected;
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      double value = dtype == DType::kBF16 ? static_cast<float>(std::bit_cast<BF16>(bits))
                                           : static_cast<float>(std::bit_cast<F16>(bits));
      if (!std::isfinite(value)) value = 0;  // inf * 0 would fill its row.
      if (dtype == DType::kBF16 && std::abs(value) < 0x1p-126) value = 0;
      expected.push_back(value);
    }
    Assign(a.view(), expected);
    ASSERT_TRUE(IsOk(Matmul(Host(), {.a = a.view(), .b = identity.view(), .c = c.view()})));
    ExpectExactly(c.view(), expected);
  }
}

// A bf16 or fp16 c holds the fp32 c, rounded once.
TEST(MatmulTest, OneRoundingToTheOutput) {
  for (DType in : {DType::kBF16, DType::kF16}) {
    for (const MatmulShape& shape : {MatmulShape{129, 131, 257}, MatmulShape{1, 1031, 64}}) {
      Random random;
      MatmulCall call(shape, {.in = in, .out = DType::kF32, .bias = in});
      Matrix narrow(in, {shape.m, shape.n});
      call.FillNormal(random);
      MatmulArgs args = call.args();
      ASSERT_TRUE(IsOk(Matmul(Host(), args)));
      args.c = narrow.view();
      ASSERT_TRUE(IsOk(Matmul(Host(), args)));
      ExpectExactly(narrow.view(), RoundTo(in, call.c.ToDoubles()));
    }
  }
}

TEST(MatmulTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  for (const MatmulShape& shape :
       {MatmulShape{383, 259, 513}, MatmulShape{7, 1031, 517}, MatmulShape{1031, 3, 600}}) {
    for (DType in : kFloatTypes) {
      Random random;
      MatmulCall call(shape, {.in = in, .out = DType::kF32, .bias = in, .transpose_b = true});
      call.FillNormal(random);
      Matrix first(DType::kF32, {shape.m, shape.n});
      MatmulArgs args = call.args();
      args.c = first.view();
      ASSERT_TRUE(IsOk(Matmul(Host({.threads = 1}), args)));
      for (int threads : kThreadCounts) {
        SCOPED_TRACE(Join(shape.Name(), " ", NameOf(in), " threads ", threads));
        call.c.FillNaN();
        ASSERT_TRUE(IsOk(Matmul(Host({.threads = threads}), call.args())));
        ExpectSameBits(call.c.view(), first.view());
      }
    }
  }
}

// Several callers at once, each with its own thread count and shape.
TEST(MatmulTest, ConcurrentCalls) {
  const MatmulShape shapes[] = {{129, 257, 300}, {64, 64, 64}, {7, 517, 259}, {383, 33, 97}, {1, 1, 1025}};
  std::vector<MatmulCall> calls;
  Random random;
  for (int i = 0; i < 15; ++i) {
    const DType in = kFloatTypes[i % 3];
    calls.emplace_back(shapes[i % 5], MatmulOptions{.in = in, .out = DType::kF32, .transpose_a = i % 2 == 0});
    calls.back().a.FillIntegers(random), calls.back().b.FillIntegers(random);
  }
  std::vector<Status> statuses(calls.size());
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    callers.emplace_back([&, i] {
      const Device device =
          i % 5 == 4 ? NpuWithData(Ascend910B2()) : Host({.threads = static_cast<int>(i % 4)});
      for (int repeat = 0; repeat < 8 && statuses[i].ok(); ++repeat)
        statuses[i] = Matmul(device, calls[i].args());
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(Join("caller ", i, " ", calls[i].options.Name()));
    ASSERT_TRUE(IsOk(statuses[i]));
    ExpectExactly(calls[i].c.view(), calls[i].Reference().c);
    calls[i].ExpectGuards();
  }
}

}  // namespace
}  // namespace cubist::testing
