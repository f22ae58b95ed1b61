// What a caller of Matmul can get wrong comes back as an error that names the argument, its value and the
// limit, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/matmul.h"
#include "reference/matmul.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/call_fixtures.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using BadMatmul = BadCall<MatmulArgs>;

TEST(BadArgumentsTest, MatmulShapes) {
  const std::vector<BadMatmul> calls = {
      {"a missing", [](auto& x) { x.a = {}; }, {"matmul: a is not given"}},
      {"b missing", [](auto& x) { x.b = {}; }, {"matmul: b is not given"}},
      {"c missing", [](auto& x) { x.c = {}; }, {"matmul: c is not given"}},
      {"a of rank 1, its size M", [](auto& x) { x.a.rank = 1; }, {"matmul: b", "size 5", "K", "needs 6"}},
      {"b of rank 1, c of 2", [](auto& x) { x.b.rank = 1; }, {"matmul: c", "size 7", "M, of a", "needs 6"}},
      {"a of rank 3", [](auto& x) { x.a.rank = 3; }, {"matmul: a", "rank 3", "2"}},
      {"b of rank 4", [](auto& x) { x.b.rank = 4; }, {"matmul: b", "rank 4", "2"}},
      {"c of rank 1", [](auto& x) { x.c.rank = 1; }, {"matmul: c", "rank 1", "2"}},
      {"c of rank 7", [](auto& x) { x.c.rank = 7; }, {"matmul: c", "rank 7", "6"}},
      {"a of rank 7", [](auto& x) { x.a.rank = 7; }, {"matmul: a", "rank 7", "2"}},
      {"two batches of c",
       [](auto& x) { x.c.rank = 6, x.c.sizes = {2, 1, 3, 1, 6, 6}, x.c.strides = {}; },
       {"matmul: c", "size 6", "dimension 5", "N", "needs 7"}},
      {"fifth batch of a",
       [](auto& x) {
         x.c.rank = 6, x.c.sizes = {2, 1, 3, 1, 6, 7}, x.c.strides = {};
         x.a.rank = 6, x.a.sizes = {2, 1, 4, 1, 6, 5};
       },
       {"matmul: a", "size 4", "dimension 2", "batch, of c", "needs 3"}},
      {"a of rank 4 for a c of 3",
       [](auto& x) { x.c.rank = 3, x.a.rank = 4; },
       {"matmul: a", "rank 4", "needs 3"}},
      {"batch of a differs",
       [](auto& x) {
         x.c.rank = 3, x.c.sizes = {4, 6, 7}, x.c.strides = {0, 9, 1};
         x.a.rank = 3, x.a.sizes = {3, 6, 5}, x.a.strides = {0, 5, 1};
       },
       {"matmul: a", "size 3", "dimension 0", "batch, of c", "needs 4"}},
      {"residual too low",
       [](auto& x) { x.residual = x.a; },
       {"matmul: residual", "size 5", "dimension 1", "N", "needs 7"}},
      {"activation unknown",
       [](auto& x) { x.activation = static_cast<Activation>(9); },
       {"matmul: activation is 9", "4"}},
      {"activation added",
       [](auto& x) { x.accumulate = true, x.activation = Activation::kSilu; },
       {"matmul: activation", "accumulate"}},
      {"bias of rank 2", [](auto& x) { x.bias.rank = 2; }, {"matmul: bias", "rank 2", "1"}},
      {"K differs",
       [](auto& x) { x.b.sizes[0] = 4; },
       {"matmul: b", "size 4", "dimension 0", "K", "needs 5"}},
      {"a transposed only", [](auto& x) { x.transpose_a = true; }, {"matmul: b", "size 5", "K", "needs 6"}},
      {"b transposed only", [](auto& x) { x.transpose_b = true; }, {"matmul: b", "size 7", "K", "needs 5"}},
      {"M differs",
       [](auto& x) { x.c.sizes[0] = 7; },
       {"matmul: c", "size 7", "dimension 0", "M", "needs 6"}},
      {"N differs",
       [](auto& x) { x.c.sizes[1] = 6; },
       {"matmul: c", "size 6", "dimension 1", "N", "needs 7"}},
      {"bias too short", [](auto& x) { x.bias.sizes[0] = 6; }, {"matmul: bias", "size 6", "N", "needs 7"}},
      {"bias too long", [](auto& x) { x.bias.sizes[0] = 8; }, {"matmul: bias", "size 8", "N", "needs 7"}},
      {"M negative", [](auto& x) { x.a.sizes[0] = x.c.sizes[0] = -1; }, {"matmul: a", "-1", "M", "0"}},
      {"K negative", [](auto& x) { x.a.sizes[1] = x.b.sizes[0] = -5; }, {"matmul: a", "-5", "K", "0"}},
      {"N negative",
       [](auto& x) { x.b.sizes[1] = x.c.sizes[1] = -kHuge; },
       {"matmul: b", std::to_string(-kHuge), "N"}},
  };
  ExpectErrors<MatmulFixture>(calls, RunMatmul);
}

TEST(BadArgumentsTest, MatmulVectors) {
  const auto row = [](auto& x) {
    x.a.rank = x.c.rank = 1, x.a.sizes[0] = 5, x.a.strides[0] = 1, x.c.sizes[0] = 7;
  };
  const auto column = [](auto& x) { x.b.rank = x.c.rank = 1, x.c.strides[0] = 1, x.bias = {}; };
  const auto both = [&](auto& x) { row(x), column(x), x.c.sizes[0] = 1; };
  const std::vector<BadMatmul> calls = {
      {"c of a row with five batches",
       [&](auto& x) { row(x), x.c.rank = 6, x.c.sizes = {1, 1, 1, 1, 1, 7}; },
       {"matmul: c", "rank 6", "needs 5"}},
      {"N of a row",
       [&](auto& x) { row(x), x.c.sizes[0] = 6; },
       {"matmul: c", "size 6", "dimension 0", "N", "needs 7"}},
      {"M of a column",
       [&](auto& x) { column(x), x.c.sizes[0] = 7; },
       {"matmul: c", "size 7", "dimension 0", "M", "needs 6"}},
      {"K of a column",
       [&](auto& x) { column(x), x.b.sizes[0] = 4; },
       {"matmul: b", "size 4", "dimension 0", "K", "needs 5"}},
      {"more than one number of two vectors",
       [&](auto& x) { both(x), x.c.sizes[0] = 2; },
       {"matmul: c", "size 2", "two vectors", "needs 1"}},
      {"residual of a row",
       [&](auto& x) { row(x), x.residual = x.c, x.residual.sizes[0] = 6; },
       {"matmul: residual", "size 6", "N", "needs 7"}},
      {"bias of a column",
       [&](auto& x) {
         const ConstTensor bias = x.bias;
         column(x), x.bias = bias;
       },
       {"matmul: bias", "size 7", "N", "needs 1"}},
      {"a row transposed",
       [&](auto& x) { row(x), x.transpose_a = true; },
       {"matmul: a", "vector", "never transposed", "transpose_a"}},
      {"a column transposed",
       [&](auto& x) { column(x), x.transpose_b = true; },
       {"matmul: b", "vector", "never transposed", "transpose_b"}},
      {"a row null", [&](auto& x) { row(x), x.a.data = nullptr; }, {"matmul: a", "null"}},
      {"c of a row on it",
       [&](auto& x) { row(x), x.a = x.c, x.a.sizes[0] = 5; },
       {"matmul: c", "overlaps a"}},
  };
  ExpectErrors<MatmulFixture>(calls, RunMatmul);
}

TEST(BadArgumentsTest, MatmulDTypes) {
  const std::vector<BadMatmul> calls = {
      {"a int32", [](auto& x) { x.a.dtype = DType::kI32; }, {"matmul: a", "int32", "fp32", "bf16", "fp16"}},
      {"a of no dtype",
       [](auto& x) { x.a.dtype = kNoDType; },
       {"matmul: a", "no known dtype", "fp32", "bf16"}},
      {"c of no dtype", [](auto& x) { x.c.dtype = kNoDType; }, {"matmul: c", "no known dtype", "fp32"}},
      {"a int64", [](auto& x) { x.a.dtype = DType::kI64; }, {"matmul: a", "int64", "fp32", "bf16", "fp16"}},
      {"b bf16", [](auto& x) { x.b.dtype = DType::kBF16; }, {"matmul: b", "bf16", "needs fp32"}},
      {"a bf16", [](auto& x) { x.a.dtype = DType::kBF16; }, {"matmul: b", "fp32", "needs bf16"}},
      {"c int32", [](auto& x) { x.c.dtype = DType::kI32; }, {"matmul: c", "int32", "needs fp32"}},
      {"added to bf16",
       [](auto& x) { x.a.dtype = x.b.dtype = x.bias.dtype = x.c.dtype = DType::kBF16, x.accumulate = true; },
       {"matmul: c", "bf16", "needs fp32"}},
      {"bias int64", [](auto& x) { x.bias.dtype = DType::kI64; }, {"matmul: bias", "int64", "needs fp32"}},
  };
  ExpectErrors<MatmulFixture>(calls, RunMatmul);
}

TEST(BadArgumentsTest, MatmulStorage) {
  const std::vector<BadMatmul> calls = {
      {"a null", [](auto& x) { x.a = WithoutData(x.a); }, {"matmul: a", "null"}},
      {"b null", [](auto& x) { x.b = WithoutData(x.b); }, {"matmul: b", "null"}},
      {"bias null", [](auto& x) { x.bias = WithoutData(x.bias); }, {"matmul: bias", "null"}},
      {"c null", [](auto& x) { x.c = WithoutData(x.c); }, {"matmul: c", "null"}},
      {"c null, K = 0",
       [](auto& x) { x.c = WithoutData(x.c), x.a.sizes[1] = x.b.sizes[0] = 0; },
       {"matmul: c", "null"}},
      {"a misaligned", [](auto& x) { x.a = Misaligned(x.a); }, {"matmul: a", "aligned", "4 bytes"}},
      {"b misaligned", [](auto& x) { x.b = Misaligned(x.b); }, {"matmul: b", "aligned", "4 bytes"}},
      {"bias misaligned", [](auto& x) { x.bias = Misaligned(x.bias); }, {"matmul: bias", "aligned"}},
      {"c misaligned", [](auto& x) { x.c = Misaligned(x.c); }, {"matmul: c", "aligned", "4 bytes"}},
      {"a far backwards", [](auto& x) { x.a.strides[1] = -kHuge; }, {"matmul: a", "2^56"}},
      {"b backwards and forwards",
       [](auto& x) { x.b.strides[0] = -(kHuge >> 9), x.b.strides[1] = kHuge >> 9; },
       {"matmul: b", "2^56"}},
      {"bias below memory",
       [](auto& x) { x.bias.strides[0] = -(kHuge >> 16); },
       {"matmul: bias", "bytes before its data", "0"}},
      {"rows of c overlap backwards", [](auto& x) { x.c.strides[0] = -6; }, {"matmul: c", "overlap", "6"}},
      {"M huge", [](auto& x) { x.a.sizes[0] = x.c.sizes[0] = kHuge; }, {"matmul: a", "2^56"}},
      {"N huge",
       [](auto& x) { x.b.sizes[1] = x.bias.sizes[0] = x.c.sizes[1] = kHuge; },
       {"matmul: b", "2^56"}},
      {"K huge", [](auto& x) { x.a.sizes[1] = x.b.sizes[0] = kHuge; }, {"matmul: a", "2^56"}},
      {"M and K large",
       [](auto& x) {
         x.a.sizes = {std::int64_t{1} << 31, std::int64_t{1} << 31}, x.a.strides = {std::int64_t{1} << 31, 1};
         x.b.sizes[0] = x.c.sizes[0] = std::int64_t{1} << 31;
       },
       {"matmul: a", "2^56"}},
      {"stride huge", [](auto& x) { x.b.strides[0] = kHuge; }, {"matmul: b", "2^56"}},
      {"largest stride",
       [](auto& x) { x.c.strides[1] = std::numeric_limits<std::int64_t>::max(); },
       {"matmul: c", "2^56"}},
      {"all repeated",
       [](auto& x) {
         x.a.sizes[0] = x.c.sizes[0] = kHuge, x.a.strides = {0, 0};
       },
       {"matmul: a", "2^56"}},
  };
  ExpectErrors<MatmulFixture>(calls, RunMatmul);
}

TEST(BadArgumentsTest, MatmulOverlaps) {
  const auto place = [](Tensor& c, const void* data, std::int64_t elements) {
    c.data = const_cast<float*>(Advanced<float>(data, elements));
  };
  const std::vector<BadMatmul> calls = {
      {"c repeated",
       [](auto& x) {
         x.c.strides = {0, 1};
       },
       {"matmul: c", "overlap", "0"}},
      {"c one element",
       [](auto& x) {
         x.c.strides = {0, 0};
       },
       {"matmul: c", "overlap"}},
      {"c rows overlap",
       [](auto& x) {
         x.c.strides = {6, 1};
       },
       {"matmul: c", "overlap", "6"}},
      {"c on diagonals",
       [](auto& x) {
         x.c.strides = {1, 1};
       },
       {"matmul: c", "overlap", "1"}},
      {"c columns overlap",
       [](auto& x) {
         x.c.strides = {1, 5};
       },
       {"matmul: c", "overlap", "5"}},
      {"c on a", [&](auto& x) { place(x.c, x.a.data, 0); }, {"matmul: c", "overlaps a"}},
      {"c within a", [&](auto& x) { place(x.c, x.a.data, 3); }, {"matmul: c", "overlaps a"}},
      {"c before b", [&](auto& x) { place(x.c, x.b.data, -20); }, {"matmul: c", "overlaps b"}},
      {"c ends in b",
       [&](auto& x) { place(x.c, x.b.data, -(5 * x.c.stride(0) + 6)); },
       {"matmul: c", "overlaps b"}},
      {"c begins in a's last element",
       [&](auto& x) { place(x.c, x.a.data, 5 * x.a.stride(0) + 4); },
       {"matmul: c", "overlaps a"}},
      {"c on bias", [&](auto& x) { place(x.c, x.bias.data, 6); }, {"matmul: c", "overlaps bias"}},
      {"residual in part c",
       [](auto& x) { x.residual = x.c, x.residual.strides[0] = 0; },
       {"matmul: c", "overlaps residual"}},
      {"residual beside accumulate",
       [](auto& x) { x.residual = x.c, x.accumulate = true; },
       {"matmul: residual", "accumulate"}},
  };
  ExpectErrors<MatmulFixture>(calls, RunMatmul);
}

// Tensors that lie in different columns of one matrix share no element.
TEST(BadArgumentsTest, InterleavedTensorsAreAccepted) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Random random;
    Matrix both(DType::kF32, {6, 20}), b(DType::kF32, {5, 7});
    both.FillIntegers(random), b.FillIntegers(random);
    Tensor a = both.view(), c = both.view();
    a.sizes[1] = 5, c.sizes[1] = 7;
    c.data = Advanced<float>(c.data, 5);
    const std::vector<double> expected = reference::Matmul(a, false, b.view(), false, {}).c;
    ASSERT_TRUE(IsOk(Matmul(device, {.a = a, .b = b.view(), .c = c})));
    ExpectExactly(c, expected);
    ExpectGuards(both);
    // One column further left, and c covers the last column of a.
    c.data = Advanced<float>(c.data, -1);
    EXPECT_TRUE(Says(Matmul(device, {.a = a, .b = b.view(), .c = c}), {"matmul: c", "overlaps a"}));
    // c begins where a ends; and ends where it begins.
    Matrix line(DType::kF32, {200});
    line.FillIntegers(random);
    Tensor before = line.view();
    before.rank = 2, before.sizes = {6, 5}, before.strides = {5, 1};
    Tensor after = before;
    after.sizes[1] = after.strides[0] = 7;
    after.data = Advanced<float>(before.data, 30);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = before, .b = b.view(), .c = after})));
    after.data = before.data;
    before.data = Advanced<float>(after.data, 42);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = before, .b = b.view(), .c = after})));
  }
}

}  // namespace
}  // namespace cubist::testing
