// Matmul of operands that lie elsewhere than in rows of their own: apart, by columns, again and again, far away.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matmul.h"
#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/matmul_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// The innermost stride of every tensor is 2 or 3, every other one odd.
TEST(MatmulViewsTest, ElementsApart) {
  for (const MatmulShape& shape :
       {MatmulShape{33, 29, 47}, MatmulShape{130, 67, 259}, MatmulShape{1, 70, 90}}) {
    for (const MatmulOptions& options : AllOptions()) {
      SCOPED_TRACE(shape.Name() + " " + options.Name());
      Random random;
      MatmulCall call(shape, options, {.gap = 5, .offset = 7, .step = 2});
      call.a.FillIntegers(random), call.b.FillIntegers(random), call.bias.FillIntegers(random);
      for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
        call.c.FillNaN();
        ASSERT_TRUE(IsOk(Matmul(device, call.args())));
        ExpectExactly(call.c.view(), RoundTo(options.out, call.Reference().c));
        call.ExpectGuards();
      }
    }
  }
}

// c stored by columns, also into the columns of a wider matrix.
TEST(MatmulViewsTest, OutputByColumns) {
  for (DType out : {DType::kF32, DType::kBF16}) {
    const MatmulShape shape{45, 131, 70};
    Random random;
    MatmulCall call(shape, {.in = DType::kBF16, .out = out});
    Matrix columns(out, {shape.m, shape.n}, {.order = kColumnMajor.order, .gap = 3, .offset = 1, .step = 3});
    call.a.FillIntegers(random), call.b.FillIntegers(random);
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      columns.FillNaN();
      MatmulArgs args = call.args();
      args.c = columns.view();
      ASSERT_TRUE(IsOk(Matmul(device, args)));
      ExpectExactly(columns.view(), RoundTo(out, call.Reference().c));
      ExpectGuards(columns);
    }
  }
}

// Stride 0: one row, one column or one element stands for all.
TEST(MatmulViewsTest, RepeatedElements) {
  const std::int64_t m = 37, n = 67, k = 71;
  const ConstTensor::Sizes strides[] = {{0, 1}, {1, 0}, {0, 0}, {0, 3}};
  for (DType in : kFloatTypes) {
    Random random;
    Matrix values(in, {3 * 71 + 1}, kContiguous), dense(in, {k, n}), c(DType::kF32, {m, n});
    values.FillIntegers(random), dense.FillIntegers(random);
    for (const ConstTensor::Sizes& s : strides) {
      for (bool transpose : {false, true}) {
        SCOPED_TRACE(Join(NameOf(in), " strides ", s[0], ", ", s[1], transpose ? " transposed" : ""));
        ConstTensor a = values.view();
        a.rank = 2, a.sizes = {m, k}, a.strides = s;
        if (transpose) a.sizes = {k, m};
        ConstTensor b = values.view();
        b.rank = 2, b.sizes = {k, n}, b.strides = s;
        if (transpose) b.sizes = {n, k};
        ConstTensor bias = values.view();
        bias.sizes[0] = n, bias.strides[0] = 0;
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          c.FillNaN();
          ASSERT_TRUE(IsOk(Matmul(
              device, {.a = a, .b = dense.view(), .bias = bias, .c = c.view(), .transpose_a = transpose})));
          ExpectExactly(c.view(), reference::Matmul(a, transpose, dense.view(), false, bias).c);
          c.FillNaN();
          ASSERT_TRUE(IsOk(Matmul(device, {.a = a,
                                           .b = b,
                                           .bias = bias,
                                           .c = c.view(),
                                           .transpose_a = transpose,
                                           .transpose_b = transpose})));
          ExpectExactly(c.view(), reference::Matmul(a, transpose, b, transpose, bias).c);
          ExpectGuards(c);
        }
      }
    }
  }
}

// Offsets beyond 2^32 elements: rows and columns gigabytes apart, in memory that is reserved but for the pages
// that hold them.
TEST(MatmulViewsTest, OffsetsBeyond32Bits) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 32) + 5;
  const std::size_t bytes = static_cast<std::size_t>(2 * kStride + 64) * sizeof(BF16);
  std::vector<BF16*> memory;
  for (int i = 0; i < 3; ++i) {
    void* reserved =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) GTEST_SKIP() << "cannot reserve " << bytes << " bytes";
    memory.push_back(static_cast<BF16*>(reserved));
  }
  const ConstTensor::Sizes strides[] = {{kStride, 1}, {1, kStride}, {kStride, 3}};
  for (const ConstTensor::Sizes& s : strides) {
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      Random random;
      Matrix a(DType::kBF16, {3, 3}), b(DType::kBF16, {3, 3});
      a.FillIntegers(random), b.FillIntegers(random);
      Tensor far[3];
      for (std::size_t i = 0; i < 3; ++i) {
        far[i] = Tensor(memory[i], {3, 3});
        far[i].strides = s;
      }
      Assign(far[0], a.ToDoubles()), Assign(far[1], b.ToDoubles());
      ASSERT_TRUE(IsOk(Matmul(device, {.a = far[0], .b = far[1], .c = far[2]})));
      ExpectExactly(far[2], reference::Matmul(a.view(), false, b.view(), false, {}).c);
      Assign(far[2], std::vector<double>(9, kNaN));
    }
  }
  for (BF16* reserved : memory) munmap(reserved, bytes);
}

// The order of a sum depends on shape, dtype and SIMD target alone, not on how the operands are stored.
TEST(MatmulViewsTest, SameBitsForAnyStorage) {
  for (const MatmulShape& shape :
       {MatmulShape{129, 259, 513}, MatmulShape{3, 517, 1025}, MatmulShape{64, 64, 3000}}) {
    for (DType in : kFloatTypes) {
      Random random;
      MatmulCall call(shape, {.in = in, .out = DType::kF32}, kContiguous);
      call.FillNormal(random);
      ASSERT_TRUE(IsOk(Matmul(Host(), call.args())));
      for (int transposes = 0; transposes < 4; ++transposes) {
        for (const Layout& layout : {Layout{}, Layout{.gap = 1, .offset = 3, .step = 2}}) {
          MatmulCall other(
              shape, {.in = in, .transpose_a = (transposes & 1) != 0, .transpose_b = (transposes & 2) != 0},
              layout);
          SCOPED_TRACE(shape.Name() + " " + other.options.Name());
          Assign(other.plain_a(), call.a.ToDoubles()), Assign(other.plain_b(), call.b.ToDoubles());
          ASSERT_TRUE(IsOk(Matmul(Host(), other.args())));
          ExpectSameBits(other.c.view(), call.c.view());
        }
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
