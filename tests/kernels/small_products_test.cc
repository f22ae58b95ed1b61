// Small products that come again: what a thread remembers of a call gives other tensors of the same shapes the bits that
// a first call gives them, and takes nothing that a first call refuses.
#include "kernels/small_products.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

struct Kind {
  DType in = DType::kF32;
  bool transpose_a = false, transpose_b = false, packed = false, accumulate = false;
  DType out = DType::kF32;

  std::string Name() const {
    return Join(NameOf(in), " to ", NameOf(out), transpose_a ? " T" : " N", transpose_b ? "T" : "N",
                packed ? ", packed" : "", accumulate ? ", accumulates" : "");
  }
};

std::vector<Kind> AllKinds() {
  std::vector<Kind> all;
  for (DType in : kFloatTypes) {
    for (int bits = 0; bits < 16; ++bits) {
      const Kind kind{in, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
      if (kind.packed && kind.transpose_b) continue;
      all.push_back(kind);
      if (kind.accumulate || in == DType::kF32) continue;
      all.push_back(kind);
      all.back().out = in;
    }
  }
  return all;
}

// Those of few columns are turned around where rows are long enough.
const std::vector<MatmulShape> kShapes = {{1, 7, 5},      {5, 100, 64},  {64, 64, 64}, {13, 37, 65},
                                          {128, 96, 200}, {70, 33, 300}, {64, 1, 150}, {70, 3, 260}};

// A call's tensors in memory of its own.
struct Call {
  Call(const MatmulShape& s, const Kind& kind, std::uint64_t seed, const Layout& layout = {})
      : kind(kind),
        a(kind.in, {kind.transpose_a ? s.k : s.m, kind.transpose_a ? s.m : s.k}, layout),
        b(kind.in, {kind.transpose_b ? s.n : s.k, kind.transpose_b ? s.k : s.n}, layout),
        c(kind.out, {s.m, s.n}, layout) {
    Random random(seed);
    a.FillNormal(random), b.FillNormal(random), c.FillNormal(random);
    if (!kind.packed) return;
    const Device host = Host();
    const std::int64_t bytes = PackedOperandBytes(host, Side::kB, kind.in, s.k, s.n);
    packed_memory.resize(static_cast<std::size_t>(bytes / kPackedAlignment + 1));
    const PackOperandArgs args{.source = b.view(), .data = packed_memory.data(), .bytes = bytes};
    EXPECT_TRUE(IsOk(PackOperand(host, args, &packed)));
  }

  MatmulArgs args() {
    return {.a = a.view(),
            .b = kind.packed ? ConstTensor() : ConstTensor(b.view()),
            .c = c.view(),
            .transpose_a = kind.transpose_a,
            .transpose_b = kind.transpose_b,
            .packed_b = packed,
            .accumulate = kind.accumulate};
  }

  struct alignas(kPackedAlignment) Line {
    std::byte bytes[kPackedAlignment];
  };
  Kind kind;
  Matrix a, b, c;
  std::vector<Line> packed_memory;
  PackedOperand packed;
};

// The call from a thread that remembers nothing.
Status FirstCall(const Device& device, const MatmulArgs& args) {
  Status status;
  std::thread([&] { status = Matmul(device, args); }).join();
  return status;
}

bool IsRemembered(const Device& device, const MatmulArgs& args) {
  return FindSmallProduct(device, args).tape != nullptr;
}

class SmallProductsTest : public SimdTargetTest {};
INSTANTIATE_TEST_SUITE_P(Simd, SmallProductsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST_P(SmallProductsTest, OtherTensorsHaveTheBitsOfAFirstCall) {
  for (const int threads : {1, 2}) {
    const Device device = Host({.threads = threads});
    for (const MatmulShape& shape : kShapes) {
      for (const Kind& kind : AllKinds()) {
        SCOPED_TRACE(shape.Name() + " " + kind.Name());
        Call one(shape, kind, 1), other(shape, kind, 2), expected(shape, kind, 2);
        ASSERT_TRUE(IsOk(Matmul(device, one.args())));
        // A sum that is added to C where few rows read B in place takes another instruction, and the longest of these may
        // pack operands first where C is narrow.
        const bool takes_more = kind.accumulate || (kind.out != DType::kF32 && shape.k >= 300);
        ASSERT_TRUE(takes_more || IsRemembered(device, other.args()));
        ASSERT_TRUE(IsOk(Matmul(device, other.args())));
        ASSERT_TRUE(IsOk(FirstCall(device, expected.args())));
        EXPECT_EQ(other.c.ToDoubles(), expected.c.ToDoubles());
        EXPECT_TRUE(other.a.CheckGuards() && other.b.CheckGuards() && other.c.CheckGuards());
      }
    }
  }
}

// Products that are packed whole by a phase before, or cut along k, are not remembered, and right when they come again.
TEST(SmallProducts, WhatTakesAWorkspaceIsRightTwice) {
  for (const MatmulShape& shape :
       {MatmulShape{200, 131, 1027}, {8, 9, 8192}, {300, 260, 400}, {250, 500, 260}}) {
    for (const Kind& kind : AllKinds()) {
      if (kind.accumulate) continue;
      SCOPED_TRACE(shape.Name() + " " + kind.Name());
      Call one(shape, kind, 1), other(shape, kind, 2), expected(shape, kind, 2);
      ASSERT_TRUE(IsOk(Matmul(Host(), one.args())));
      ASSERT_TRUE(IsOk(Matmul(Host(), other.args())));
      ASSERT_TRUE(IsOk(FirstCall(Host(), expected.args())));
      EXPECT_EQ(other.c.ToDoubles(), expected.c.ToDoubles());
    }
  }
}

TEST_P(SmallProductsTest, OneMatrixForBothOperandsTellsNothingOfTwo) {
  const MatmulShape shape{64, 64, 64};
  Call one(shape, {}, 1), other(shape, {}, 2), expected(shape, {}, 2);
  MatmulArgs square = one.args();
  square.b = square.a;
  ASSERT_TRUE(IsOk(Matmul(Host(), square)));
  ASSERT_TRUE(IsOk(Matmul(Host(), other.args())));
  ASSERT_TRUE(IsOk(FirstCall(Host(), expected.args())));
  EXPECT_EQ(other.c.ToDoubles(), expected.c.ToDoubles());
}

// What is remembered of a plain product serves no other.
TEST(SmallProducts, ArgumentsThatChangeTheResultAreAskedFor) {
  const MatmulShape shape{24, 40, 33};
  Random random(3);
  Call call(shape, {}, 1);
  call.a.FillIntegers(random), call.b.FillIntegers(random);
  Matrix bias(DType::kF32, {shape.n}), residual(DType::kF32, {shape.m, shape.n}),
      narrow(DType::kBF16, {shape.m, shape.n});
  bias.FillIntegers(random), residual.FillIntegers(random);
  const std::vector<double> product = reference::Matmul(call.a.view(), false, call.b.view(), false, {}).c;
  const MatmulArgs plain = call.args();
  ASSERT_TRUE(IsOk(Matmul(Host(), plain)));
  ASSERT_TRUE(IsRemembered(Host(), plain));
  MatmulArgs anywhere = plain;
  anywhere.any_order = true;  // Its sums may begin elsewhere, and have other bits.
  EXPECT_FALSE(IsRemembered(Host(), anywhere));

  const auto expect = [&](const MatmulArgs& args, const Matrix& c, auto&& value) {
    ASSERT_TRUE(IsOk(Matmul(Host(), args)));
    const std::vector<double> got = c.ToDoubles();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], RoundTo(c.dtype(), value(product[i], i))) << "at " << i;
  };
  const auto width = static_cast<std::size_t>(shape.n);
  MatmulArgs args = plain;
  args.bias = bias.view();
  expect(args, call.c, [&](double x, std::size_t i) { return x + bias.ToDoubles()[i % width]; });
  args = plain, args.residual = residual.view(), args.beta = 2;
  expect(args, call.c, [&](double x, std::size_t i) { return x + 2 * residual.ToDoubles()[i]; });
  args = plain, args.alpha = 3;
  expect(args, call.c, [&](double x, std::size_t) { return 3 * x; });
  args = plain, args.activation = Activation::kRelu;
  expect(args, call.c, [&](double x, std::size_t) { return x > 0 ? x : 0; });
  args = plain, args.c = narrow.view();
  expect(args, narrow, [&](double x, std::size_t) { return x; });
  call.c.Fill(7);
  args = plain, args.accumulate = true;
  expect(args, call.c, [&](double x, std::size_t) { return x + 7; });
  expect(plain, call.c, [&](double x, std::size_t) { return x; });
}

// Every refusal of a first call is one of a later call, with the same words and nothing written.
TEST(SmallProducts, BadMemoryIsRefusedAsEver) {
  for (const bool packed : {false, true}) {
    const MatmulShape shape{16, 24, 32};
    Call call(shape, {.packed = packed}, 1);
    const MatmulArgs good = call.args();
    ASSERT_TRUE(IsOk(Matmul(Host(), good)));
    ASSERT_TRUE(IsRemembered(Host(), good));
    const std::vector<double> before = call.c.ToDoubles();

    std::vector<MatmulArgs> bad;
    const auto shifted = [](const void* data, std::int64_t bytes) {
      return static_cast<void*>(static_cast<std::byte*>(const_cast<void*>(data)) + bytes);
    };
    bad.emplace_back(good).a.data = nullptr;
    bad.emplace_back(good).c.data = nullptr;
    bad.emplace_back(good).a.data = shifted(good.a.data, 2);
    bad.emplace_back(good).c.data = shifted(good.c.data, 2);
    bad.emplace_back(good).c.data = const_cast<void*>(good.a.data);
    if (packed) {
      bad.emplace_back(good).packed_b.data = nullptr;
      bad.emplace_back(good).packed_b.data = shifted(good.packed_b.data, 4);
      bad.emplace_back(good).packed_b.data = shifted(good.packed_b.data, kPackedAlignment);
      bad.emplace_back(good).packed_b.bytes -= kPackedAlignment;
      bad.emplace_back(good).packed_b.rows -= 1;
    } else {
      bad.emplace_back(good).b.data = nullptr;
      bad.emplace_back(good).b.data = shifted(good.b.data, 1);
      bad.emplace_back(good).c.data = const_cast<void*>(good.b.data);
    }
    for (std::size_t i = 0; i < bad.size(); ++i) {
      SCOPED_TRACE(Join(packed ? "packed, " : "", "case ", i));
      const Status first = FirstCall(Host(), bad[i]), again = Matmul(Host(), bad[i]);
      EXPECT_FALSE(first.ok());
      EXPECT_EQ(again.code(), first.code());
      EXPECT_EQ(again.message(), first.message());
    }
    EXPECT_EQ(call.c.ToDoubles(), before);
  }
}

// Columns of one matrix are apart, though the bytes between their ends are not.
TEST(SmallProducts, TensorsThatInterleaveAreComputed) {
  const std::int64_t size = 24;
  std::vector<float> memory(static_cast<std::size_t>(2 * size * size), 1.0f),
      apart(static_cast<std::size_t>(2 * size * size)), b(static_cast<std::size_t>(size * size), 1.0f);
  MatmulArgs args{.a = ConstTensor(memory.data(), {size, size}, {2 * size, 1}),
                  .b = ConstTensor(b.data(), {size, size}),
                  .c = Tensor(apart.data(), {size, size}, {2 * size, 1})};
  ASSERT_TRUE(IsOk(Matmul(Host(), args)));
  ASSERT_TRUE(IsRemembered(Host(), args));
  args.c.data = memory.data() + size;
  EXPECT_FALSE(IsRemembered(Host(), args));
  ASSERT_TRUE(IsOk(Matmul(Host(), args)));
  for (std::int64_t i = 0; i < size; ++i) {
    for (std::int64_t j = 0; j < 2 * size; ++j)
      ASSERT_EQ(memory[static_cast<std::size_t>(i * 2 * size + j)], j < size ? 1 : static_cast<float>(size));
  }
}

// More shapes than are remembered, twice over, from several threads at once.
TEST(SmallProducts, ManyShapesFromManyThreads) {
  const auto all = [] {
    for (int round = 0; round < 2; ++round) {
      for (std::int64_t size = 1; size < 60; size += 2) {
        Call call({size, size + 1, size + 2}, {}, 1);
        call.a.Fill(1), call.b.Fill(2);
        ASSERT_TRUE(IsOk(Matmul(Host({.threads = 2}), call.args())));
        for (const double x : call.c.ToDoubles()) ASSERT_EQ(x, 2 * static_cast<double>(size + 2));
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(all);
  for (std::thread& thread : threads) thread.join();
}

TEST(SmallProducts, WhatIsLargeOrComputedElsewhereIsNotRemembered) {
  Call call({16, 16, 16}, {}, 1);
  Profile profile;
  ASSERT_TRUE(IsOk(Matmul(Npu(Ascend910B2()), call.args(), &profile)));
  EXPECT_FALSE(IsRemembered(Npu(Ascend910B2()), call.args()));
  Call large({512, 512, 512}, {}, 1);
  ASSERT_TRUE(IsOk(Matmul(Host(), large.args())));
  EXPECT_FALSE(IsRemembered(Host(), large.args()));
}

}  // namespace
}  // namespace cubist::testing
