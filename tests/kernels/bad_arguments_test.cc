// Whatever a caller can get wrong comes back as an error that names the argument, its value and the limit,
// and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/matmul.h"
#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "reference/matmul.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// ---- Matmul ----

struct MatmulFixture {
  MatmulFixture() {
    Random random;
    a.FillUniform(random), b.FillUniform(random), bias.FillUniform(random);
  }
  MatmulArgs args() { return {.a = a.view(), .b = b.view(), .bias = bias.view(), .c = c.view()}; }
  std::vector<const Matrix*> all() const { return {&a, &b, &bias, &c}; }

  Matrix a{DType::kF32, {6, 5}}, b{DType::kF32, {5, 7}}, bias{DType::kF32, {7}}, c{DType::kF32, {6, 7}};
};
using BadMatmul = BadCall<MatmulArgs>;

Status RunMatmul(const Device& device, const MatmulArgs& args) { return Matmul(device, args); }

TEST(BadArgumentsTest, MatmulShapes) {
  const std::vector<BadMatmul> calls = {
      {"a missing", [](auto& x) { x.a = {}; }, {"matmul: a is not given"}},
      {"b missing", [](auto& x) { x.b = {}; }, {"matmul: b is not given"}},
      {"c missing", [](auto& x) { x.c = {}; }, {"matmul: c is not given"}},
      {"a of rank 1", [](auto& x) { x.a.rank = 1; }, {"matmul: a", "rank 1", "2"}},
      {"a of rank 3", [](auto& x) { x.a.rank = 3; }, {"matmul: a", "rank 3", "2"}},
      {"b of rank 4", [](auto& x) { x.b.rank = 4; }, {"matmul: b", "rank 4", "2"}},
      {"c of rank 1", [](auto& x) { x.c.rank = 1; }, {"matmul: c", "rank 1", "2"}},
      {"c of rank 5", [](auto& x) { x.c.rank = 5; }, {"matmul: c", "rank 5", "4"}},
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

TEST(BadArgumentsTest, MatmulDTypes) {
  const std::vector<BadMatmul> calls = {
      {"a int32", [](auto& x) { x.a.dtype = DType::kI32; }, {"matmul: a", "int32", "fp32", "bf16", "fp16"}},
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
      {"a backwards", [](auto& x) { x.a.strides[1] = -1; }, {"matmul: a", "stride -1", "dimension 1", "0"}},
      {"b backwards", [](auto& x) { x.b.strides[0] = -9; }, {"matmul: b", "stride -9", "dimension 0", "0"}},
      {"bias backwards", [](auto& x) { x.bias.strides[0] = -2; }, {"matmul: bias", "stride -2"}},
      {"c backwards", [](auto& x) { x.c.strides[0] = -10; }, {"matmul: c", "stride -10"}},
      {"M huge", [](auto& x) { x.a.sizes[0] = x.c.sizes[0] = kHuge; }, {"matmul: a", "2^62"}},
      {"N huge",
       [](auto& x) { x.b.sizes[1] = x.bias.sizes[0] = x.c.sizes[1] = kHuge; },
       {"matmul: b", "2^62"}},
      {"K huge", [](auto& x) { x.a.sizes[1] = x.b.sizes[0] = kHuge; }, {"matmul: a", "2^62"}},
      {"M and K large",
       [](auto& x) {
         x.a.sizes = {std::int64_t{1} << 31, std::int64_t{1} << 31}, x.a.strides = {std::int64_t{1} << 31, 1};
         x.b.sizes[0] = x.c.sizes[0] = std::int64_t{1} << 31;
       },
       {"matmul: a", "2^62"}},
      {"stride huge", [](auto& x) { x.b.strides[0] = kHuge; }, {"matmul: b", "2^62"}},
      {"largest stride",
       [](auto& x) { x.c.strides[1] = std::numeric_limits<std::int64_t>::max(); },
       {"matmul: c", "2^62"}},
      {"all repeated",
       [](auto& x) {
         x.a.sizes[0] = x.c.sizes[0] = kHuge, x.a.strides = {0, 0};
       },
       {"matmul: a", "2^62"}},
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

// ---- FlashAttention ----

struct AttentionFixture {
  AttentionFixture() {
    Random random;
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope}) x->FillUniform(random);
  }
  FlashAttentionArgs args() {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .q_rope = q_rope.view(),
            .k_rope = k_rope.view(),
            .out = out.view(),
            .lse = lse.view()};
  }
  std::vector<const Matrix*> all() const { return {&q, &k, &v, &q_rope, &k_rope, &out, &lse}; }

  Matrix q{DType::kBF16, {2, 6, 5, 8}}, k{DType::kBF16, {2, 3, 7, 8}}, v{DType::kBF16, {2, 3, 7, 4}};
  Matrix q_rope{DType::kBF16, {2, 6, 5, 2}}, k_rope{DType::kBF16, {2, 3, 7, 2}};
  Matrix out{DType::kBF16, {2, 6, 5, 4}}, lse{DType::kF32, {2, 6, 5}};
};
using BadAttention = BadCall<FlashAttentionArgs>;

Status RunAttention(const Device& device, const FlashAttentionArgs& args) {
  return FlashAttention(device, args);
}

constexpr std::int64_t kPrefixOfOne[] = {3}, kNegativePrefix[] = {0, -1}, kLongPrefix[] = {8, 0},
                       kPrefix[] = {7, 0}, kEnds[] = {3, 5};
constexpr std::int32_t kPositions[] = {0, 3, 3, 1, 7};

TEST(BadArgumentsTest, FlashAttentionShapes) {
  const std::string who = "flash_attention: ";
  const std::vector<BadAttention> calls = {
      {"q missing", [](auto& x) { x.q = {}; }, {who + "q is not given"}},
      {"k missing", [](auto& x) { x.k = {}; }, {who + "k is not given"}},
      {"v missing", [](auto& x) { x.v = {}; }, {who + "v is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"q_rope missing", [](auto& x) { x.q_rope = {}; }, {who + "q_rope is not given"}},
      {"k_rope missing", [](auto& x) { x.k_rope = {}; }, {who + "k_rope is not given"}},
      {"q of rank 3", [](auto& x) { x.q.rank = 3; }, {who + "q", "rank 3", "4"}},
      {"k of rank 3", [](auto& x) { x.k.rank = 3; }, {who + "k", "rank 3", "4"}},
      {"v of rank 2", [](auto& x) { x.v.rank = 2; }, {who + "v", "rank 2", "4"}},
      {"q_rope of rank 3", [](auto& x) { x.q_rope.rank = 3; }, {who + "q_rope", "rank 3", "4"}},
      {"k_rope of rank 3", [](auto& x) { x.k_rope.rank = 3; }, {who + "k_rope", "rank 3", "4"}},
      {"out of rank 3", [](auto& x) { x.out.rank = 3; }, {who + "out", "rank 3", "4"}},
      {"lse of rank 4", [](auto& x) { x.lse.rank = 4; }, {who + "lse", "rank 4", "3"}},
      {"batch of k", [](auto& x) { x.k.sizes[0] = 1; }, {who + "k", "size 1", "dimension 0", "needs 2"}},
      {"batch of v", [](auto& x) { x.v.sizes[0] = 3; }, {who + "v", "size 3", "dimension 0", "needs 2"}},
      {"Dqk of k", [](auto& x) { x.k.sizes[3] = 7; }, {who + "k", "size 7", "Dqk", "needs 8"}},
      {"heads of v", [](auto& x) { x.v.sizes[1] = 2; }, {who + "v", "size 2", "Nkv", "needs 3"}},
      {"Skv of v", [](auto& x) { x.v.sizes[2] = 6; }, {who + "v", "size 6", "Skv", "needs 7"}},
      {"heads no multiple",
       [](auto& x) { x.q.sizes[1] = x.q_rope.sizes[1] = x.out.sizes[1] = x.lse.sizes[1] = 5; },
       {who + "q", "5 heads", "3"}},
      {"fewer heads than k",
       [](auto& x) { x.q.sizes[1] = x.q_rope.sizes[1] = x.out.sizes[1] = x.lse.sizes[1] = 2; },
       {who + "q", "2 heads", "3"}},
      {"no heads of k",
       [](auto& x) { x.k.sizes[1] = x.v.sizes[1] = x.k_rope.sizes[1] = 0; },
       {who + "q", "6 heads", "0"}},
      {"batch of q_rope", [](auto& x) { x.q_rope.sizes[0] = 1; }, {who + "q_rope", "size 1", "needs 2"}},
      {"heads of q_rope",
       [](auto& x) { x.q_rope.sizes[1] = 1; },
       {who + "q_rope", "size 1", "Nq", "needs 6"}},
      {"Sq of q_rope", [](auto& x) { x.q_rope.sizes[2] = 4; }, {who + "q_rope", "size 4", "Sq", "needs 5"}},
      {"Dr of k_rope", [](auto& x) { x.k_rope.sizes[3] = 1; }, {who + "k_rope", "size 1", "Dr", "needs 2"}},
      {"Skv of k_rope", [](auto& x) { x.k_rope.sizes[2] = 5; }, {who + "k_rope", "size 5", "Skv", "needs 7"}},
      {"heads of k_rope", [](auto& x) { x.k_rope.sizes[1] = 2; }, {who + "k_rope", "2 heads", "1", "3"}},
      {"Sq of out", [](auto& x) { x.out.sizes[2] = 7; }, {who + "out", "size 7", "Sq", "needs 5"}},
      {"Dv of out", [](auto& x) { x.out.sizes[3] = 8; }, {who + "out", "size 8", "Dv", "needs 4"}},
      {"heads of lse", [](auto& x) { x.lse.sizes[1] = 3; }, {who + "lse", "size 3", "Nq", "needs 6"}},
      {"Sq of lse", [](auto& x) { x.lse.sizes[2] = 1; }, {who + "lse", "size 1", "Sq", "needs 5"}},
      {"B negative", [](auto& x) { x.q.sizes[0] = -1; }, {who + "q", "-1", "B", "0"}},
      {"Sq negative", [](auto& x) { x.q.sizes[2] = -3; }, {who + "q", "-3", "Sq", "0"}},
      {"Skv negative", [](auto& x) { x.k.sizes[2] = x.v.sizes[2] = -7; }, {who + "k", "-7", "Skv", "0"}},
      {"Dv negative", [](auto& x) { x.v.sizes[3] = -4; }, {who + "v", "-4", "Dv", "0"}},
      {"scale infinite", [](auto& x) { x.scale = INFINITY; }, {who + "scale", "inf", "finite"}},
      {"scale -infinite", [](auto& x) { x.scale = -INFINITY; }, {who + "scale", "-inf", "finite"}},
      {"scale NaN", [](auto& x) { x.scale = NAN; }, {who + "scale", "nan", "finite"}},
      {"lengths of two batch entries",
       [](auto& x) {
         x.lengths = {kEnds, kEnds};
       },
       {who + "lengths", "B = 2"}},
      {"bias of other heads",
       [](auto& x) {
         x.bias = ConstTensor(x.q.data, x.q.dtype, {1, 3, 5, 7});
       },
       {who + "bias", "size 3", "dimension 1", "needs 1 or 6"}},
      {"bias of rank 3",
       [](auto& x) {
         x.bias = ConstTensor(x.q.data, x.q.dtype, {1, 5, 7});
       },
       {who + "bias", "rank 3", "4"}},
      {"sinks of other heads",
       [](auto& x) { x.sinks = ConstTensor(x.q.data, DType::kF32, {5}); },
       {who + "sinks", "size 5", "needs 6"}},
      {"sinks bf16",
       [](auto& x) { x.sinks = ConstTensor(x.q.data, DType::kBF16, {6}); },
       {who + "sinks", "bf16", "needs fp32"}},
      {"soft cap 0", [](auto& x) { x.soft_cap = 0.0f; }, {who + "soft_cap is 0", "above 0"}},
      {"soft cap NaN", [](auto& x) { x.soft_cap = NAN; }, {who + "soft_cap is nan", "above 0"}},
      {"rope without sin",
       [](auto& x) {
         x.rope.cos = ConstTensor(x.q.data, DType::kF32, {7, 1});
       },
       {who + "rope.sin is not given"}},
      {"rope of other columns",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 2});
       },
       {who + "rope.cos", "2 columns", "half the 2 of q_rope"}},
      {"rope of few positions",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {6, 1});
       },
       {who + "rope.k_offset is 0", "6 positions for 7 rows"}},
      {"rope offset negative",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {9, 1});
         x.rope.q_offset = -1;
       },
       {who + "rope.q_offset is -1", "0 to 4"}},
      {"rope positions of other rows",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 1});
         x.rope.q_positions = ConstTensor(kPositions, {4});
       },
       {who + "rope.q_positions", "size 4", "needs 5"}},
      {"rope position beyond the tables",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 1});
         x.rope.q_positions = ConstTensor(kPositions, {5});
       },
       {who + "rope.q_positions has 7 at (4)", "[0, 7)"}},
      {"rope positions beside an offset",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {8, 1});
         x.rope.q_positions = ConstTensor(kPositions, {5}), x.rope.q_offset = 1;
       },
       {who + "rope.q_offset is 1", "needs 0", "q_positions"}},
      {"rope positions without data",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {8, 1});
         x.rope.q_positions = ConstTensor(nullptr, DType::kI32, {5});
       },
       {who + "rope.q_positions", "null"}},
      {"mask of other heads",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBool, {1, 3, 5, 7});
       },
       {who + "mask", "size 3", "dimension 1", "needs 1 or 6"}},
      {"mask of rank 2",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBool, {5, 7});
       },
       {who + "mask", "rank 2", "4"}},
      {"mask bf16",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBF16, {1, 1, 5, 7});
       },
       {who + "mask", "bf16", "needs bool"}},
      {"mask null",
       [](auto& x) {
         x.mask = ConstTensor(nullptr, DType::kBool, {1, 1, 5, 7});
       },
       {who + "mask", "null"}},
      {"slopes of other heads",
       [](auto& x) { x.alibi.slopes = ConstTensor(x.q.data, DType::kF32, {5}); },
       {who + "alibi.slopes", "size 5", "needs 6"}},
      {"slopes of other sequences",
       [](auto& x) {
         x.alibi.slopes = ConstTensor(x.q.data, DType::kF32, {3, 6});
       },
       {who + "alibi.slopes", "size 3", "needs 2"}},
      {"slopes bf16",
       [](auto& x) { x.alibi.slopes = ConstTensor(x.q.data, DType::kBF16, {6}); },
       {who + "alibi.slopes", "bf16", "needs fp32"}},
      {"keep 0", [](auto& x) { x.dropout.keep = 0; }, {who + "dropout.keep is 0", "above 0, up to 1"}},
      {"keep above 1", [](auto& x) { x.dropout.keep = 1.5f; }, {who + "dropout.keep is 1.5", "up to 1"}},
      {"keep NaN", [](auto& x) { x.dropout.keep = NAN; }, {who + "dropout.keep is nan", "up to 1"}},
      {"workspace null",
       [](auto& x) {
         x.workspace = {nullptr, 1 << 30};
       },
       {who + "workspace", "1073741824 bytes", "null"}},
      {"prefix of one", [](auto& x) { x.prefix = kPrefixOfOne; }, {who + "prefix", "1 entries", "2 of B"}},
      {"prefix negative", [](auto& x) { x.prefix = kNegativePrefix; }, {who + "prefix is -1", "0 to the 7"}},
      {"prefix beyond Skv", [](auto& x) { x.prefix = kLongPrefix; }, {who + "prefix is 8", "0 to the 7"}},
      {"prefix with a left side",
       [](auto& x) { x.prefix = kPrefix, x.window = AttentionWindow{.left = 3}; },
       {who + "prefix", "left side", "3"}},
  };
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionDTypes) {
  const std::string who = "flash_attention: ";
  const std::vector<BadAttention> calls = {
      {"q int32", [](auto& x) { x.q.dtype = DType::kI32; }, {who + "q", "int32", "fp32", "bf16", "fp16"}},
      {"k fp16", [](auto& x) { x.k.dtype = DType::kF16; }, {who + "k", "fp16", "needs bf16"}},
      {"v fp32", [](auto& x) { x.v.dtype = DType::kF32; }, {who + "v", "fp32", "needs bf16"}},
      {"q_rope fp32", [](auto& x) { x.q_rope.dtype = DType::kF32; }, {who + "q_rope", "fp32", "needs bf16"}},
      {"k_rope int64",
       [](auto& x) { x.k_rope.dtype = DType::kI64; },
       {who + "k_rope", "int64", "needs bf16"}},
      {"out fp16", [](auto& x) { x.out.dtype = DType::kF16; }, {who + "out", "fp16", "fp32 or bf16"}},
      {"lse bf16", [](auto& x) { x.lse.dtype = DType::kBF16; }, {who + "lse", "bf16", "needs fp32"}},
  };
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionStorage) {
  const std::string who = "flash_attention: ";
  std::vector<BadAttention> calls;
  const auto for_each_tensor = [&](auto&& add) {
    add(
        "q", [](FlashAttentionArgs & x) -> auto& { return x.q; });
    add(
        "k", [](FlashAttentionArgs & x) -> auto& { return x.k; });
    add(
        "v", [](FlashAttentionArgs & x) -> auto& { return x.v; });
    add(
        "q_rope", [](FlashAttentionArgs & x) -> auto& { return x.q_rope; });
    add(
        "k_rope", [](FlashAttentionArgs & x) -> auto& { return x.k_rope; });
    add(
        "out", [](FlashAttentionArgs & x) -> auto& { return x.out; });
    add(
        "lse", [](FlashAttentionArgs & x) -> auto& { return x.lse; });
  };
  for_each_tensor([&](const std::string& name, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back({name + " misaligned",
                     [of](auto& x) { of(x) = Misaligned(of(x)); },
                     {who + name, "aligned", name == "lse" ? "4 bytes" : "2 bytes"}});
    calls.push_back({name + " backwards",
                     [of](auto& x) { of(x).strides[2] = -1; },
                     {who + name, "stride -1", "dimension 2", "0"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[1] = kHuge; }, {who + name, "2^62"}});
  });
  calls.push_back({"Skv huge",
                   [](auto& x) { x.k.sizes[2] = x.v.sizes[2] = x.k_rope.sizes[2] = kHuge; },
                   {who + "k", "2^62"}});
  calls.push_back({"B huge",
                   [](auto& x) {
                     for (ConstTensor* t : {&x.q, &x.k, &x.v, &x.q_rope, &x.k_rope}) t->sizes[0] = kHuge;
                     x.out.sizes[0] = x.lse.sizes[0] = kHuge;
                   },
                   {who + "q", "2^62"}});
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionOverlaps) {
  const std::string who = "flash_attention: ";
  std::vector<BadAttention> calls;
  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"out on " + name,
                     [of](auto& x) { x.out.data = const_cast<void*>(of(x).data); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"out ends in " + name,
                     [of](auto& x) { x.out.data = const_cast<BF16*>(Advanced<BF16>(of(x).data, -16)); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"lse on " + name,
                     [of](auto& x) {
                       // fp32 on bf16: aligned to four bytes.
                       const auto address = reinterpret_cast<std::uintptr_t>(of(x).data);
                       x.lse.data = const_cast<BF16*>(Advanced<BF16>(of(x).data, address % 4 == 0 ? 2 : 1));
                     },
                     {who + "lse", "overlaps " + name}});
  };
  onto("q", [](FlashAttentionArgs& x) { return x.q; });
  onto("k", [](FlashAttentionArgs& x) { return x.k; });
  onto("v", [](FlashAttentionArgs& x) { return x.v; });
  onto("q_rope", [](FlashAttentionArgs& x) { return x.q_rope; });
  onto("k_rope", [](FlashAttentionArgs& x) { return x.k_rope; });
  calls.push_back({"out repeated", [](auto& x) { x.out.strides[1] = 0; }, {who + "out", "overlap", "0"}});
  calls.push_back({"lse repeated", [](auto& x) { x.lse.strides[0] = 0; }, {who + "lse", "overlap", "0"}});
  calls.push_back({"out rows overlap", [](auto& x) { x.out.strides[2] = 3; }, {who + "out", "overlap", "3"}});
  calls.push_back({"lse in out",
                   [](auto& x) {
                     const auto address = reinterpret_cast<std::uintptr_t>(x.out.data);
                     x.lse.data = Advanced<BF16>(x.out.data, address % 4 == 0 ? 0 : 1);
                   },
                   {who, "out", "lse", "overlaps"}});
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

// ---- FlashAttentionGrad ----

struct AttentionGradFixture {
  AttentionGradFixture() {
    Random random;
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &out, &lse, &dout, &bias, &sinks, &cos, &sin})
      x->FillUniform(random);
  }
  FlashAttentionGradArgs args() {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .q_rope = q_rope.view(),
            .k_rope = k_rope.view(),
            .out = out.view(),
            .lse = lse.view(),
            .dout = dout.view(),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view(),
            .dq_rope = dq_rope.view(),
            .dk_rope = dk_rope.view(),
            .rope = {cos.view(), sin.view()},
            .bias = bias.view(),
            .sinks = sinks.view(),
            .soft_cap = 3.0f,
            .dbias = dbias.view(),
            .dsinks = dsinks.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&q,  &k,       &v,       &q_rope, &k_rope, &out, &lse, &dout,  &dq,    &dk,
            &dv, &dq_rope, &dk_rope, &bias,   &sinks,  &cos, &sin, &dbias, &dsinks};
  }

  static constexpr DType kIn = DType::kBF16;
  Matrix q{kIn, {2, 6, 5, 8}}, k{kIn, {2, 3, 7, 8}}, v{kIn, {2, 3, 7, 4}}, q_rope{kIn, {2, 6, 5, 2}},
      k_rope{kIn, {2, 1, 7, 2}}, out{kIn, {2, 6, 5, 4}}, lse{DType::kF32, {2, 6, 5}}, dout{kIn, {2, 6, 5, 4}},
      dq{kIn, {2, 6, 5, 8}}, dk{DType::kF32, {2, 3, 7, 8}}, dv{kIn, {2, 3, 7, 4}}, dq_rope{kIn, {2, 6, 5, 2}},
      dk_rope{kIn, {2, 1, 7, 2}};
  Matrix bias{kIn, {2, 1, 5, 7}}, sinks{DType::kF32, {6}}, cos{DType::kF32, {9, 1}}, sin{DType::kF32, {9, 1}},
      dbias{kIn, {2, 1, 5, 7}}, dsinks{DType::kF32, {6}};
};
using BadAttentionGrad = BadCall<FlashAttentionGradArgs>;

TEST(BadArgumentsTest, FlashAttentionGrad) {
  const std::string who = "flash_attention_grad: ";
  const std::vector<BadAttentionGrad> calls = {
      {"q missing", [](auto& x) { x.q = {}; }, {who + "q is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"lse missing", [](auto& x) { x.lse = {}; }, {who + "lse is not given"}},
      {"dout missing", [](auto& x) { x.dout = {}; }, {who + "dout is not given"}},
      {"dq missing", [](auto& x) { x.dq = {}; }, {who + "dq is not given"}},
      {"dv missing", [](auto& x) { x.dv = {}; }, {who + "dv is not given"}},
      {"k_rope missing", [](auto& x) { x.k_rope = {}; }, {who + "k_rope is not given"}},
      {"dk_rope missing", [](auto& x) { x.dk_rope = {}; }, {who + "dk_rope is not given"}},
      {"dq_rope without q_rope",
       [](auto& x) { x.q_rope = x.k_rope = {}; },
       {who + "dq_rope is given, but q_rope is not"}},
      {"dk of rank 3", [](auto& x) { x.dk.rank = 3; }, {who + "dk", "rank 3", "4"}},
      {"heads no multiple", [](auto& x) { x.q.sizes[1] = 5; }, {who + "q", "5 heads", "3"}},
      {"heads of k_rope", [](auto& x) { x.k_rope.sizes[1] = 2; }, {who + "k_rope", "2 heads", "1", "3"}},
      {"Dv of dout", [](auto& x) { x.dout.sizes[3] = 3; }, {who + "dout", "size 3", "Dv", "needs 4"}},
      {"Sq of lse", [](auto& x) { x.lse.sizes[2] = 1; }, {who + "lse", "size 1", "Sq", "needs 5"}},
      {"columns of dq", [](auto& x) { x.dq.sizes[3] = 7; }, {who + "dq", "size 7", "of q", "needs 8"}},
      {"rows of dv", [](auto& x) { x.dv.sizes[2] = 6; }, {who + "dv", "size 6", "of v", "needs 7"}},
      {"heads of dk_rope", [](auto& x) { x.dk_rope.sizes[1] = 3; }, {who + "dk_rope", "size 3", "needs 1"}},
      {"scale NaN", [](auto& x) { x.scale = NAN; }, {who + "scale", "nan", "finite"}},
      {"dout fp32", [](auto& x) { x.dout.dtype = DType::kF32; }, {who + "dout", "fp32", "needs bf16"}},
      {"lse bf16", [](auto& x) { x.lse.dtype = DType::kBF16; }, {who + "lse", "bf16", "needs fp32"}},
      {"dv fp16", [](auto& x) { x.dv.dtype = DType::kF16; }, {who + "dv", "fp16", "fp32 or bf16"}},
      {"prefix of one", [](auto& x) { x.prefix = kPrefixOfOne; }, {who + "prefix", "1 entries", "2 of B"}},
      {"prefix beyond Skv", [](auto& x) { x.prefix = kLongPrefix; }, {who + "prefix is 8", "0 to the 7"}},
      {"prefix with a left side",
       [](auto& x) { x.prefix = kPrefix, x.window = AttentionWindow{.left = 3}; },
       {who + "prefix", "left side", "3"}},
      {"bias of six keys", [](auto& x) { x.bias.sizes[3] = 6; }, {who + "bias", "size 6", "1 or 7"}},
      {"dbias of one row", [](auto& x) { x.dbias.sizes[2] = 1; }, {who + "dbias", "size 1", "of bias", "5"}},
      {"dbias without bias", [](auto& x) { x.bias = {}; }, {who + "dbias is given, but bias is not"}},
      {"dbias fp16", [](auto& x) { x.dbias.dtype = DType::kF16; }, {who + "dbias", "fp16", "fp32 or bf16"}},
      {"dsinks of five", [](auto& x) { x.dsinks.sizes[0] = 5; }, {who + "dsinks", "size 5", "of sinks", "6"}},
      {"dsinks without sinks", [](auto& x) { x.sinks = {}; }, {who + "dsinks is given, but sinks is not"}},
      {"dsinks bf16", [](auto& x) { x.dsinks.dtype = DType::kBF16; }, {who + "dsinks", "bf16", "fp32"}},
      {"soft_cap 0", [](auto& x) { x.soft_cap = 0.0f; }, {who + "soft_cap", "0", "above 0"}},
      {"rope of two pairs",
       [](auto& x) { x.rope.cos.sizes[1] = x.rope.sin.sizes[1] = 2; },
       {who + "rope.cos", "2 columns", "half the 2 of q_rope"}},
      {"k_offset", [](auto& x) { x.rope.k_offset = 3; }, {who + "rope.k_offset is 3", "0 to 2"}},
      {"lengths of two entries",
       [](auto& x) {
         x.lengths = {kPrefix, kPrefix};
       },
       {who + "lengths", "B = 2"}},
      {"dbias over bias",
       [](auto& x) { x.dbias.data = const_cast<void*>(x.bias.data); },
       {who + "dbias", "bias"}},
      {"dsinks null", [](auto& x) { x.dsinks = WithoutData(x.dsinks); }, {who + "dsinks", "null"}},
      {"dq null", [](auto& x) { x.dq = WithoutData(x.dq); }, {who + "dq", "null"}},
      {"out null", [](auto& x) { x.out = WithoutData(x.out); }, {who + "out", "null"}},
      {"dk misaligned", [](auto& x) { x.dk = Misaligned(x.dk); }, {who + "dk", "aligned", "4 bytes"}},
      {"dq over q", [](auto& x) { x.dq.data = const_cast<void*>(x.q.data); }, {who + "dq", "q"}},
      {"dv over dk", [](auto& x) { x.dv.data = x.dk.data; }, {who, "dk", "dv"}},
      {"dq in one row", [](auto& x) { x.dq.strides[2] = 0; }, {who + "dq"}},
  };
  ExpectErrors<AttentionGradFixture>(calls, [](const Device& device, const FlashAttentionGradArgs& args) {
    return FlashAttentionGrad(device, args);
  });
}

// ---- TokenPermute ----

struct PermuteFixture {
  PermuteFixture() {
    Random random;
    tokens.FillUniform(random), topk_ids.FillIntegers(random, 0, 6);
  }
  TokenPermuteArgs args() {
    return {.tokens = tokens.view(),
            .topk_ids = topk_ids.view(),
            .num_experts = 7,
            .permuted = permuted.view(),
            .sorted_indices = sorted_indices.view(),
            .expert_counts = counts.view()};
  }
  std::vector<const Matrix*> all() const { return {&tokens, &topk_ids, &permuted, &sorted_indices, &counts}; }

  Matrix tokens{DType::kF32, {5, 6}}, topk_ids{DType::kI64, {5, 3}};
  Matrix permuted{DType::kF32, {15, 6}}, sorted_indices{DType::kI32, {15}}, counts{DType::kI32, {7}};
};
using BadPermute = BadCall<TokenPermuteArgs>;

Status RunPermute(const Device& device, const TokenPermuteArgs& args) { return TokenPermute(device, args); }

void SetId(TokenPermuteArgs& args, std::int64_t t, std::int64_t j, std::int64_t id) {
  auto* ids = static_cast<std::int64_t*>(const_cast<void*>(args.topk_ids.data));
  ids[t * args.topk_ids.stride(0) + j * args.topk_ids.stride(1)] = id;
}

TEST(BadArgumentsTest, TokenPermuteShapesAndDTypes) {
  const std::string who = "token_permute: ";
  const std::vector<BadPermute> calls = {
      {"tokens missing", [](auto& x) { x.tokens = {}; }, {who + "tokens is not given"}},
      {"ids missing", [](auto& x) { x.topk_ids = {}; }, {who + "topk_ids is not given"}},
      {"permuted missing", [](auto& x) { x.permuted = {}; }, {who + "permuted is not given"}},
      {"sorted_indices missing",
       [](auto& x) { x.sorted_indices = {}; },
       {who + "sorted_indices is not given"}},
      {"tokens of rank 3", [](auto& x) { x.tokens.rank = 3; }, {who + "tokens", "rank 3", "2"}},
      {"ids of rank 3", [](auto& x) { x.topk_ids.rank = 3; }, {who + "topk_ids", "rank 3"}},
      {"permuted of rank 1", [](auto& x) { x.permuted.rank = 1; }, {who + "permuted", "rank 1", "2"}},
      {"sorted_indices of rank 2",
       [](auto& x) { x.sorted_indices.rank = 2; },
       {who + "sorted_indices", "rank 2", "1"}},
      {"counts of rank 2", [](auto& x) { x.expert_counts.rank = 2; }, {who + "expert_counts", "rank 2", "1"}},
      {"T of ids", [](auto& x) { x.topk_ids.sizes[0] = 4; }, {who + "topk_ids", "size 4", "T", "needs 5"}},
      {"ids of one route", [](auto& x) { x.topk_ids.rank = 1; }, {who + "permuted", "size 15", "needs 5"}},
      {"rows of permuted",
       [](auto& x) { x.permuted.sizes[0] = 14; },
       {who + "permuted", "size 14", "needs 15"}},
      {"H of permuted",
       [](auto& x) { x.permuted.sizes[1] = 5; },
       {who + "permuted", "size 5", "H", "needs 6"}},
      {"num_out_tokens", [](auto& x) { x.num_out_tokens = 9; }, {who + "permuted", "size 15", "needs 9"}},
      {"num_out_tokens negative",
       [](auto& x) { x.num_out_tokens = -2; },
       {who + "permuted", "size 15", "needs 13"}},
      {"num_out_tokens least",
       [](auto& x) { x.num_out_tokens = std::numeric_limits<std::int64_t>::min(); },
       {who + "permuted", "size 15", "needs 0"}},
      {"slots",
       [](auto& x) { x.sorted_indices.sizes[0] = 5; },
       {who + "sorted_indices", "size 5", "needs 15"}},
      {"counts", [](auto& x) { x.expert_counts.sizes[0] = 8; }, {who + "expert_counts", "size 8", "needs 7"}},
      {"T negative", [](auto& x) { x.tokens.sizes[0] = -5; }, {who + "tokens", "-5", "T", "0"}},
      {"H negative", [](auto& x) { x.tokens.sizes[1] = -1; }, {who + "tokens", "-1", "H", "0"}},
      {"K negative", [](auto& x) { x.topk_ids.sizes[1] = -3; }, {who + "topk_ids", "-3", "K", "0"}},
      {"experts negative", [](auto& x) { x.num_experts = -1; }, {who + "num_experts", "-1", "0"}},
      {"experts beyond int32",
       [](auto& x) { x.num_experts = std::int64_t{1} << 31; },
       {who + "num_experts", "2147483648", "2^31 - 1"}},
      {"tokens int32",
       [](auto& x) { x.tokens.dtype = DType::kI32; },
       {who + "tokens", "int32", "fp32", "bf16", "fp16"}},
      {"ids fp32",
       [](auto& x) { x.topk_ids.dtype = DType::kF32; },
       {who + "topk_ids", "fp32", "int32 or int64"}},
      {"permuted bf16",
       [](auto& x) { x.permuted.dtype = DType::kBF16; },
       {who + "permuted", "bf16", "needs fp32"}},
      {"sorted_indices int64",
       [](auto& x) { x.sorted_indices.dtype = DType::kI64; },
       {who + "sorted_indices", "int64", "needs int32"}},
      {"counts int64",
       [](auto& x) { x.expert_counts.dtype = DType::kI64; },
       {who + "expert_counts", "int64", "needs int32"}},
  };
  ExpectErrors<PermuteFixture>(calls, RunPermute);
}

TEST(BadArgumentsTest, TokenPermuteStorage) {
  const std::string who = "token_permute: ";
  std::vector<BadPermute> calls;
  const auto add = [&](const std::string& name, const std::string& bytes, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back(
        {name + " misaligned", [of](auto& x) { of(x) = Misaligned(of(x)); }, {who + name, "aligned", bytes}});
    calls.push_back(
        {name + " backwards", [of](auto& x) { of(x).strides[0] = -1; }, {who + name, "stride -1", "0"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[0] = kHuge; }, {who + name, "2^62"}});
  };
  add(
      "tokens", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.tokens; });
  add(
      "topk_ids", "8 bytes", [](TokenPermuteArgs & x) -> auto& { return x.topk_ids; });
  add(
      "permuted", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.permuted; });
  add(
      "sorted_indices", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.sorted_indices; });
  add(
      "expert_counts", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.expert_counts; });
  calls.push_back(
      {"H huge", [](auto& x) { x.tokens.sizes[1] = x.permuted.sizes[1] = kHuge; }, {who + "tokens", "2^62"}});
  calls.push_back({"T huge",
                   [](auto& x) { x.tokens.sizes[0] = x.topk_ids.sizes[0] = kHuge; },
                   {who + "topk_ids", std::to_string(kHuge), "2^31 - 1"}});
  calls.push_back({"K huge",
                   [](auto& x) { x.topk_ids.sizes[1] = kHuge; },
                   {who + "topk_ids", std::to_string(kHuge), "2^31 - 1"}});

  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"permuted on " + name,
                     [of](auto& x) { x.permuted.data = const_cast<void*>(of(x).data); },
                     {who, "permuted", name, "overlaps"}});
    calls.push_back({"sorted_indices on " + name,
                     [of](auto& x) { x.sorted_indices.data = const_cast<void*>(of(x).data); },
                     {who, "sorted_indices", name, "overlaps"}});
    calls.push_back({"expert_counts on " + name,
                     [of](auto& x) { x.expert_counts.data = const_cast<void*>(of(x).data); },
                     {who, "expert_counts", name, "overlaps"}});
  };
  onto("tokens", [](TokenPermuteArgs& x) { return x.tokens; });
  onto("topk_ids", [](TokenPermuteArgs& x) { return x.topk_ids; });
  calls.push_back({"permuted on sorted_indices",
                   [](auto& x) { x.permuted.data = x.sorted_indices.data; },
                   {who, "permuted", "sorted_indices", "overlaps"}});
  calls.push_back({"counts in permuted",
                   [](auto& x) { x.expert_counts.data = Advanced<float>(x.permuted.data, 40); },
                   {who, "expert_counts", "permuted", "overlaps"}});
  calls.push_back({"counts in sorted_indices",
                   [](auto& x) { x.expert_counts.data = Advanced<float>(x.sorted_indices.data, 14); },
                   {who, "expert_counts", "sorted_indices", "overlaps"}});
  calls.push_back(
      {"permuted repeated", [](auto& x) { x.permuted.strides[0] = 0; }, {who + "permuted", "overlap", "0"}});
  calls.push_back({"permuted rows overlap",
                   [](auto& x) { x.permuted.strides[0] = 5; },
                   {who + "permuted", "overlap", "5"}});
  calls.push_back({"sorted_indices repeated",
                   [](auto& x) { x.sorted_indices.strides[0] = 0; },
                   {who + "sorted_indices", "overlap"}});
  calls.push_back({"counts repeated",
                   [](auto& x) { x.expert_counts.strides[0] = 0; },
                   {who + "expert_counts", "overlap"}});
  ExpectErrors<PermuteFixture>(calls, RunPermute);
}

// An id is at fault after everything else was found right; the fixture then differs in that id alone.
TEST(BadArgumentsTest, TokenPermuteIds) {
  struct Case {
    std::int64_t t, j, id;
  };
  for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
    for (const Case& bad : {Case{0, 0, 7}, Case{2, 1, -2}, Case{4, 2, 8}, Case{1, 1, std::int64_t{1} << 32},
                            Case{3, 0, std::numeric_limits<std::int64_t>::min()}}) {
      PermuteFixture fixture;
      const TokenPermuteArgs valid = fixture.args();
      TokenPermuteArgs args = valid;
      SetId(args, bad.t, bad.j, bad.id);
      const PermuteFixture before = fixture;
      const Status status = TokenPermute(device, args);
      EXPECT_TRUE(Says(status, {"token_permute: topk_ids", "has " + std::to_string(bad.id),
                                Join("(", bad.t, ", ", bad.j, ")"), "[-1, 7)"}));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      for (std::size_t i = 0; i < fixture.all().size(); ++i) {
        ExpectSameBits(fixture.all()[i]->view(), before.all()[i]->view());
      }
    }
    // No experts: no id but -1 is right.
    PermuteFixture fixture;
    TokenPermuteArgs args = fixture.args();
    args.num_experts = 0, args.expert_counts = {};
    EXPECT_TRUE(Says(TokenPermute(device, args), {"token_permute: topk_ids", "(0, 0)", "[-1, 0)"}));
  }
}

// ---- TokenUnpermute ----

struct UnpermuteFixture {
  UnpermuteFixture() {
    Random random;
    permuted.FillUniform(random), probs.FillUniform(random), sorted_indices.FillIntegers(random, 0, 14);
  }
  TokenUnpermuteArgs args() {
    return {.permuted = permuted.view(),
            .sorted_indices = sorted_indices.view(),
            .probs = probs.view(),
            .out = out.view()};
  }
  std::vector<const Matrix*> all() const { return {&permuted, &sorted_indices, &probs, &out}; }

  Matrix permuted{DType::kF16, {15, 6}}, sorted_indices{DType::kI32, {15}};
  Matrix probs{DType::kF32, {5, 3}}, out{DType::kF16, {5, 6}};
};
using BadUnpermute = BadCall<TokenUnpermuteArgs>;

Status RunUnpermute(const Device& device, const TokenUnpermuteArgs& args) {
  return TokenUnpermute(device, args);
}

TEST(BadArgumentsTest, TokenUnpermuteShapesAndDTypes) {
  const std::string who = "token_unpermute: ";
  const std::vector<BadUnpermute> calls = {
      {"permuted missing", [](auto& x) { x.permuted = {}; }, {who + "permuted is not given"}},
      {"sorted_indices missing",
       [](auto& x) { x.sorted_indices = {}; },
       {who + "sorted_indices is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"permuted of rank 1", [](auto& x) { x.permuted.rank = 1; }, {who + "permuted", "rank 1", "2"}},
      {"sorted_indices of rank 2",
       [](auto& x) { x.sorted_indices.rank = 2; },
       {who + "sorted_indices", "rank 2", "1"}},
      {"probs of rank 1", [](auto& x) { x.probs.rank = 1; }, {who + "probs", "rank 1", "2"}},
      {"out of rank 3", [](auto& x) { x.out.rank = 3; }, {who + "out", "rank 3", "2"}},
      {"H of out", [](auto& x) { x.out.sizes[1] = 5; }, {who + "out", "size 5", "H", "needs 6"}},
      {"T of probs", [](auto& x) { x.probs.sizes[0] = 4; }, {who + "probs", "size 4", "T", "needs 5"}},
      {"K of probs", [](auto& x) { x.probs.sizes[1] = 2; }, {who + "sorted_indices", "size 15", "needs 10"}},
      {"probs missing", [](auto& x) { x.probs = {}; }, {who + "sorted_indices", "size 15", "needs 5"}},
      {"slots",
       [](auto& x) { x.sorted_indices.sizes[0] = 14; },
       {who + "sorted_indices", "size 14", "needs 15"}},
      {"M negative", [](auto& x) { x.permuted.sizes[0] = -1; }, {who + "permuted", "-1", "M", "0"}},
      {"T negative", [](auto& x) { x.out.sizes[0] = -1; }, {who + "out", "-1", "T", "0"}},
      {"K negative", [](auto& x) { x.probs.sizes[1] = -1; }, {who + "probs", "-1", "K", "0"}},
      {"permuted int32",
       [](auto& x) { x.permuted.dtype = DType::kI32; },
       {who + "permuted", "int32", "fp32", "bf16", "fp16"}},
      {"out fp32", [](auto& x) { x.out.dtype = DType::kF32; }, {who + "out", "fp32", "needs fp16"}},
      {"sorted_indices int64",
       [](auto& x) { x.sorted_indices.dtype = DType::kI64; },
       {who + "sorted_indices", "int64", "needs int32"}},
      {"probs int32",
       [](auto& x) { x.probs.dtype = DType::kI32; },
       {who + "probs", "int32", "fp32", "bf16", "fp16"}},
  };
  ExpectErrors<UnpermuteFixture>(calls, RunUnpermute);
}

TEST(BadArgumentsTest, TokenUnpermuteStorage) {
  const std::string who = "token_unpermute: ";
  std::vector<BadUnpermute> calls;
  const auto add = [&](const std::string& name, const std::string& bytes, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back(
        {name + " misaligned", [of](auto& x) { of(x) = Misaligned(of(x)); }, {who + name, "aligned", bytes}});
    calls.push_back(
        {name + " backwards", [of](auto& x) { of(x).strides[0] = -2; }, {who + name, "stride -2", "0"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[0] = kHuge; }, {who + name, "2^62"}});
  };
  add(
      "permuted", "2 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.permuted; });
  add(
      "sorted_indices", "4 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.sorted_indices; });
  add(
      "probs", "4 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.probs; });
  add(
      "out", "2 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.out; });
  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"out on " + name,
                     [of](auto& x) { x.out.data = const_cast<void*>(of(x).data); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"out ends in " + name,
                     [of](auto& x) { x.out.data = const_cast<F16*>(Advanced<F16>(of(x).data, -30)); },
                     {who + "out", "overlaps " + name}});
  };
  onto("permuted", [](TokenUnpermuteArgs& x) { return x.permuted; });
  onto("sorted_indices", [](TokenUnpermuteArgs& x) { return x.sorted_indices; });
  onto("probs", [](TokenUnpermuteArgs& x) { return x.probs; });
  calls.push_back({"out repeated", [](auto& x) { x.out.strides[0] = 0; }, {who + "out", "overlap", "0"}});
  calls.push_back({"out columns overlap",
                   [](auto& x) {
                     x.out.strides = {1, 4};
                   },
                   {who + "out", "overlap", "4"}});
  calls.push_back({"M huge", [](auto& x) { x.permuted.sizes[0] = kHuge; }, {who + "permuted", "2^62"}});
  calls.push_back({"T huge",
                   [](auto& x) { x.out.sizes[0] = x.probs.sizes[0] = kHuge; },
                   {who + "out", std::to_string(kHuge), "2^31 - 1"}});
  ExpectErrors<UnpermuteFixture>(calls, RunUnpermute);
}

TEST(BadArgumentsTest, TokenUnpermuteIndices) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
    for (std::int64_t bad : {std::int64_t{-2}, std::int64_t{std::numeric_limits<std::int32_t>::min()}}) {
      UnpermuteFixture fixture;
      fixture.sorted_indices.set({11}, static_cast<double>(bad));
      const UnpermuteFixture before = fixture;
      const Status status = TokenUnpermute(device, fixture.args());
      EXPECT_TRUE(
          Says(status, {"token_unpermute: sorted_indices", "has " + std::to_string(bad), "(11)", "[-1, "}));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      ExpectSameBits(fixture.out.view(), before.out.view());
    }
  }
}

// ---- Limits of sizes, and of chips ----

// 2^31 slots are one more than an int32 counts. No data is needed to say so.
TEST(BadArgumentsTest, TooManySlots) {
  const Device device = NpuWithoutData(Ascend910B2());
  constexpr std::int64_t kTokens = std::int64_t{1} << 20, kRoutes = std::int64_t{1} << 11,
                         kSlots = kTokens * kRoutes;
  TokenPermuteArgs permute;
  permute.tokens = ConstTensor(nullptr, DType::kBF16, {kTokens, 64});
  permute.topk_ids = ConstTensor(nullptr, DType::kI32, {kTokens, kRoutes});
  permute.num_experts = 4;
  permute.permuted = Tensor(nullptr, DType::kBF16, {kSlots, 64});
  permute.sorted_indices = Tensor(nullptr, DType::kI32, {kSlots});
  EXPECT_TRUE(Says(TokenPermute(device, permute), {"token_permute: topk_ids", "1048576 x 2048", "2^31 - 1"}));

  TokenUnpermuteArgs unpermute;
  unpermute.permuted = ConstTensor(nullptr, DType::kBF16, {kSlots, 64});
  unpermute.sorted_indices = ConstTensor(nullptr, DType::kI32, {kSlots});
  unpermute.probs = ConstTensor(nullptr, DType::kF32, {kTokens, kRoutes});
  unpermute.out = Tensor(nullptr, DType::kBF16, {kTokens, 64});
  EXPECT_TRUE(
      Says(TokenUnpermute(device, unpermute), {"token_unpermute: out", "1048576 x 2048", "2^31 - 1"}));
}

// Index tensors steer the kernels: they are read even where nothing is computed.
TEST(BadArgumentsTest, IndicesAreNeededWithoutDataToo) {
  const Device device = NpuWithoutData(Ascend910B2());
  PermuteFixture permute;
  TokenPermuteArgs permute_args = permute.args();
  permute_args.topk_ids = WithoutData(permute_args.topk_ids);
  EXPECT_TRUE(Says(TokenPermute(device, permute_args), {"token_permute: topk_ids", "null"}));
  UnpermuteFixture unpermute;
  TokenUnpermuteArgs unpermute_args = unpermute.args();
  unpermute_args.sorted_indices = WithoutData(unpermute_args.sorted_indices);
  EXPECT_TRUE(Says(TokenUnpermute(device, unpermute_args), {"token_unpermute: sorted_indices", "null"}));
}

ChipSpec WithCapacity(Buffer buffer, std::int64_t bytes) {
  ChipSpec chip = Ascend910B2();
  BufferSpec& spec = chip.buffers[static_cast<std::size_t>(buffer)];
  spec.capacity = spec.fast = bytes;
  chip.name = "small chip";
  return chip;
}

// Grows a buffer from next to nothing. While a call does not fit, its error names the buffer and how much of
// it there is, and nothing is written; from some size on it fits, and the answer is right.
template <class Fixture, class Run, class Check>
void ExpectNamesBufferUntilItFits(const std::string& kernel, const std::vector<Buffer>& buffers, Run run,
                                  Check check) {
  for (Buffer buffer : buffers) {
    bool fits = false;
    const std::int64_t whole = Ascend910B2().buffer(buffer).capacity;
    for (std::int64_t bytes = 32; bytes <= whole;
         bytes += RoundUp(std::max<std::int64_t>(bytes / 4, 1), 32)) {
      SCOPED_TRACE(Join(kernel, " with ", bytes, " bytes of ", NameOf(buffer)));
      const Device device = NpuWithData(WithCapacity(buffer, bytes));
      Fixture fixture;
      const Fixture before = fixture;
      const Status status = run(device, fixture.args());
      if (status.ok()) {
        fits = true;
        check(fixture);
        continue;
      }
      EXPECT_FALSE(fits) << "fitted in less: " << status.message();
      EXPECT_TRUE(Says(status, {kernel, NameOf(buffer), "small chip has " + std::to_string(bytes)}));
      EXPECT_NE(status.code(), StatusCode::kInvalidArgument);
      for (std::size_t i = 0; i < fixture.all().size(); ++i) {
        ExpectSameBits(fixture.all()[i]->view(), before.all()[i]->view());
      }
      EXPECT_TRUE(Says(run(NpuWithoutData(WithCapacity(buffer, bytes)), fixture.args()), {NameOf(buffer)}));
    }
    EXPECT_TRUE(fits) << kernel << " never fitted " << NameOf(buffer);
  }
}

struct LargerMatmul : MatmulFixture {
  LargerMatmul() {
    Random random;
    a = Matrix(DType::kF32, {70, 90}), b = Matrix(DType::kF32, {90, 110}), bias = Matrix(DType::kF32, {110});
    c = Matrix(DType::kF32, {70, 110});
    a.FillIntegers(random), b.FillIntegers(random), bias.FillIntegers(random);
  }
};

TEST(SmallChipsTest, Matmul) {
  ExpectNamesBufferUntilItFits<LargerMatmul>(
      "matmul", {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kBT}, RunMatmul,
      [](LargerMatmul& x) {
        ExpectExactly(x.c.view(), reference::Matmul(x.a.view(), false, x.b.view(), false, x.bias.view()).c);
      });
}

TEST(SmallChipsTest, FlashAttention) {
  // Equal scores, four keys: the mean, exactly.
  struct Fixture : AttentionFixture {
    Fixture() {
      Random random;
      k = Matrix(DType::kBF16, {2, 3, 64, 8}), v = Matrix(DType::kBF16, {2, 3, 64, 4});
      k_rope = Matrix(DType::kBF16, {2, 3, 64, 2});
      k.FillUniform(random), v.FillIntegers(random), k_rope.FillUniform(random);
      q.Fill(0), q_rope.Fill(0);
    }
  };
  ExpectNamesBufferUntilItFits<Fixture>(
      "flash_attention", {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB}, RunAttention,
      [](Fixture& x) {
        for (std::int64_t h = 0; h < 6; ++h) {
          double sum = 0;
          for (std::int64_t j = 0; j < 64; ++j) sum += x.v.at({1, h / 2, j, 3});
          ASSERT_EQ(x.out.at({1, h, 4, 3}), RoundTo(DType::kBF16, sum / 64));
        }
      });
}

// The same for other shapes, without data.
TEST(SmallChipsTest, MessagesNameTheBuffer) {
  const auto expect = [](const std::string& name, Buffer buffer, std::int64_t bytes, const Status& status) {
    if (status.ok()) return;
    EXPECT_TRUE(Says(status, {NameOf(buffer), "small chip has " + std::to_string(bytes)}))
        << name << " in " << bytes << " bytes of " << NameOf(buffer);
  };
  for (Buffer buffer : {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB}) {
    for (std::int64_t bytes = 256; bytes <= 64 << 10; bytes += bytes / 2) {
      const Device device = NpuWithoutData(WithCapacity(buffer, bytes));
      for (DType in : kFloatTypes) {
        for (std::int64_t size : {1, 33, 256}) {
          const ConstTensor square(nullptr, in, {size, size});
          expect(Join("matmul ", NameOf(in), " ", size), buffer, bytes,
                 Matmul(device, {.a = square, .b = square, .c = Tensor(nullptr, in, {size, size})}));
        }
        for (std::int64_t d : {1, 64, 192}) {
          expect(Join("flash_attention ", NameOf(in), " ", d), buffer, bytes,
                 FlashAttention(device, {.q = ConstTensor(nullptr, in, {1, 1, 33, d}),
                                         .k = ConstTensor(nullptr, in, {1, 1, 65, d}),
                                         .v = ConstTensor(nullptr, in, {1, 1, 65, 128}),
                                         .out = Tensor(nullptr, in, {1, 1, 33, 128})}));
        }
      }
    }
  }
}

TEST(SmallChipsTest, TokenPermute) {
  ExpectNamesBufferUntilItFits<PermuteFixture>(
      "token_permute", {Buffer::kUB}, RunPermute, [](PermuteFixture& x) {
        for (std::int64_t s = 0; s < 15; ++s) {
          const auto row = static_cast<std::int64_t>(x.sorted_indices.at({s}));
          for (std::int64_t h = 0; h < 6; ++h) ASSERT_EQ(x.permuted.at({row, h}), x.tokens.at({s / 3, h}));
        }
      });
}

TEST(SmallChipsTest, TokenUnpermute) {
  ExpectNamesBufferUntilItFits<UnpermuteFixture>("token_unpermute", {Buffer::kUB}, RunUnpermute,
                                                 [](UnpermuteFixture& x) {
                                                   EXPECT_TRUE(std::isfinite(x.out.at({4, 5})));
                                                 });
}

// ---- RmsNorm, SwiGlu and their gradients ----

struct RmsNormFixture {
  RmsNormFixture()
      : x(DType::kBF16, {4, 6}),
        residual(DType::kBF16, {4, 6}),
        gamma(DType::kF32, {6}),
        out(DType::kBF16, {4, 6}),
        sum(DType::kBF16, {4, 6}),
        rstd(DType::kF32, {4}) {
    Random random;
    x.FillUniform(random), residual.FillUniform(random), gamma.FillUniform(random);
  }
  RmsNormArgs args() {
    return {.x = x.view(),
            .residual = residual.view(),
            .gamma = gamma.view(),
            .out = out.view(),
            .sum = sum.view(),
            .rstd = rstd.view()};
  }
  std::vector<const Matrix*> all() const { return {&x, &residual, &gamma, &out, &sum, &rstd}; }

  Matrix x, residual, gamma, out, sum, rstd;
};

TEST(BadArgumentsTest, RmsNorm) {
  const std::string who = "rms_norm: ";
  const std::vector<BadCall<RmsNormArgs>> calls = {
      {"x missing", [](auto& x) { x.x = {}; }, {who + "x is not given"}},
      {"x of rank 3", [](auto& x) { x.x.rank = 3; }, {who + "x", "rank 3", "2"}},
      {"out too wide", [](auto& x) { x.out.sizes[1] = 7; }, {who + "out", "size 7", "H, of x", "6"}},
      {"gamma too short", [](auto& x) { x.gamma.sizes[0] = 5; }, {who + "gamma", "size 5", "6"}},
      {"rstd too long", [](auto& x) { x.rstd.sizes[0] = 5; }, {who + "rstd", "size 5", "4"}},
      {"sum without residual", [](auto& x) { x.residual = {}; }, {who + "sum is given without residual"}},
      {"residual without sum", [](auto& x) { x.sum = {}; }, {who + "sum is not given"}},
      {"integer x", [](auto& x) { x.x.dtype = DType::kI32; }, {who + "x is int32", "fp32 or bf16 or fp16"}},
      {"wide out", [](auto& x) { x.out.dtype = DType::kF32; }, {who + "out is fp32", "bf16"}},
      {"narrow rstd", [](auto& x) { x.rstd.dtype = DType::kBF16; }, {who + "rstd is bf16", "fp32"}},
      {"eps below 0", [](auto& x) { x.eps = -1; }, {who + "eps is -1", ">= 0"}},
      {"eps not a number", [](auto& x) { x.eps = std::nanf(""); }, {who + "eps is", ">= 0"}},
      {"null out", [](auto& x) { x.out.data = nullptr; }, {who + "out has null data"}},
      {"out over x", [](auto& x) { x.out.data = const_cast<void*>(x.x.data); }, {who + "out overlaps x"}},
      {"sum over out", [](auto& x) { x.sum.data = x.out.data; }, {who, "overlaps"}},
      {"out writes one place twice",
       [](auto& x) { x.out.strides[0] = 0; },
       {who + "out is written", "stride of 0"}}};
  ExpectErrors<RmsNormFixture>(calls, [](const Device& d, const RmsNormArgs& a) { return RmsNorm(d, a); });
}

struct RmsNormGradFixture {
  RmsNormGradFixture()
      : d_out(DType::kF32, {4, 6}),
        x(DType::kF32, {4, 6}),
        d_sum(DType::kF32, {4, 6}),
        d_x(DType::kF32, {4, 6}),
        rstd(DType::kF32, {4}),
        gamma(DType::kF32, {6}),
        d_gamma(DType::kF32, {6}) {
    Random random;
    d_out.FillUniform(random), x.FillUniform(random), rstd.FillUniform(random), gamma.FillUniform(random),
        d_sum.FillUniform(random);
  }
  RmsNormGradArgs args() {
    return {.d_out = d_out.view(),
            .x = x.view(),
            .rstd = rstd.view(),
            .gamma = gamma.view(),
            .d_sum = d_sum.view(),
            .d_x = d_x.view(),
            .d_gamma = d_gamma.view()};
  }
  std::vector<const Matrix*> all() const { return {&d_out, &x, &rstd, &gamma, &d_sum, &d_x, &d_gamma}; }

  Matrix d_out, x, d_sum, d_x, rstd, gamma, d_gamma;
};

TEST(BadArgumentsTest, RmsNormGrad) {
  const std::string who = "rms_norm_grad: ";
  const std::vector<BadCall<RmsNormGradArgs>> calls = {
      {"x missing", [](auto& x) { x.x = {}; }, {who + "x is not given"}},
      {"rstd missing", [](auto& x) { x.rstd = {}; }, {who + "rstd is not given"}},
      {"d_out too long", [](auto& x) { x.d_out.sizes[0] = 5; }, {who + "d_out", "size 5", "4"}},
      {"d_sum too long", [](auto& x) { x.d_sum.sizes[0] = 5; }, {who + "d_sum", "size 5", "4"}},
      {"d_gamma too short", [](auto& x) { x.d_gamma.sizes[0] = 5; }, {who + "d_gamma", "size 5", "6"}},
      {"narrow d_x", [](auto& x) { x.d_x.dtype = DType::kF16; }, {who + "d_x is fp16", "fp32"}},
      {"integer gamma", [](auto& x) { x.gamma.dtype = DType::kI32; }, {who + "gamma is int32"}},
      {"d_x over d_out",
       [](auto& x) { x.d_x.data = const_cast<void*>(x.d_out.data); },
       {who + "d_x overlaps d_out"}},
      {"null x", [](auto& x) { x.x.data = nullptr; }, {who + "x has null data"}}};
  ExpectErrors<RmsNormGradFixture>(
      calls, [](const Device& d, const RmsNormGradArgs& a) { return RmsNormGrad(d, a); });
}

struct SwiGluFixture {
  SwiGluFixture()
      : gate(DType::kF16, {4, 6}),
        up(DType::kF16, {4, 6}),
        out(DType::kF16, {4, 6}),
        probs(DType::kBF16, {4}) {
    Random random;
    gate.FillUniform(random), up.FillUniform(random), probs.FillUniform(random);
  }
  SwiGluArgs args() {
    return {.gate = gate.view(), .up = up.view(), .probs = probs.view(), .out = out.view()};
  }
  std::vector<const Matrix*> all() const { return {&gate, &up, &probs, &out}; }

  Matrix gate, up, out, probs;
};

TEST(BadArgumentsTest, SwiGlu) {
  const std::string who = "swiglu: ";
  const std::vector<BadCall<SwiGluArgs>> calls = {
      {"gate missing", [](auto& x) { x.gate = {}; }, {who + "gate is not given"}},
      {"up too wide", [](auto& x) { x.up.sizes[1] = 12; }, {who + "up", "size 12", "N, of gate", "6"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"probs of rank 2", [](auto& x) { x.probs.rank = 2; }, {who + "probs", "rank 2", "1"}},
      {"integer probs", [](auto& x) { x.probs.dtype = DType::kI32; }, {who + "probs is int32"}},
      {"mixed dtypes", [](auto& x) { x.up.dtype = DType::kBF16; }, {who + "up is bf16", "fp16"}},
      {"out over gate",
       [](auto& x) { x.out.data = const_cast<void*>(x.gate.data); },
       {who + "out overlaps gate"}}};
  ExpectErrors<SwiGluFixture>(calls, [](const Device& d, const SwiGluArgs& a) { return SwiGlu(d, a); });
}

struct SwiGluGradFixture {
  SwiGluGradFixture()
      : d_out(DType::kF32, {4, 6}),
        gate(DType::kF32, {4, 6}),
        up(DType::kF32, {4, 6}),
        d_gate(DType::kF32, {4, 6}),
        d_up(DType::kF32, {4, 6}),
        probs(DType::kF32, {4}),
        d_probs(DType::kF32, {4}) {
    Random random;
    d_out.FillUniform(random), gate.FillUniform(random), up.FillUniform(random), probs.FillUniform(random);
  }
  SwiGluGradArgs args() {
    return {.d_out = d_out.view(),
            .gate = gate.view(),
            .up = up.view(),
            .probs = probs.view(),
            .d_gate = d_gate.view(),
            .d_up = d_up.view(),
            .d_probs = d_probs.view()};
  }
  std::vector<const Matrix*> all() const { return {&d_out, &gate, &up, &probs, &d_gate, &d_up, &d_probs}; }

  Matrix d_out, gate, up, d_gate, d_up, probs, d_probs;
};

TEST(BadArgumentsTest, SwiGluGrad) {
  const std::string who = "swiglu_grad: ";
  const std::vector<BadCall<SwiGluGradArgs>> calls = {
      {"d_out missing", [](auto& x) { x.d_out = {}; }, {who + "d_out is not given"}},
      {"d_up missing", [](auto& x) { x.d_up = {}; }, {who + "d_up is not given"}},
      {"d_gate too long", [](auto& x) { x.d_gate.sizes[0] = 5; }, {who + "d_gate", "size 5", "4"}},
      {"d_probs too long", [](auto& x) { x.d_probs.sizes[0] = 5; }, {who + "d_probs", "size 5", "4"}},
      {"narrow d_up", [](auto& x) { x.d_up.dtype = DType::kF16; }, {who + "d_up is fp16", "fp32"}},
      {"d_up over d_gate", [](auto& x) { x.d_up.data = x.d_gate.data; }, {who, "overlaps"}},
      {"null gate", [](auto& x) { x.gate.data = nullptr; }, {who + "gate has null data"}}};
  ExpectErrors<SwiGluGradFixture>(calls,
                                  [](const Device& d, const SwiGluGradArgs& a) { return SwiGluGrad(d, a); });
}

}  // namespace
}  // namespace cubist::testing
