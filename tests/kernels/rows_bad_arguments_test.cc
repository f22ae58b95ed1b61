// What a caller of RmsNorm, SwiGlu and their gradients can get wrong comes back as an error that names the argument, its
// value and the limit, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/call_fixtures.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/rows_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

constexpr RowsShape kShape{4, 6};

struct RmsNormFixture : NormCall {
  RmsNormFixture() : NormCall(DType::kBF16, kShape) {}
  RmsNormArgs args() {
    RmsNormArgs args = NormCall::args();
    args.residual = residual.view(), args.sum = sum.view();
    return args;
  }
  std::vector<const Matrix*> all() const { return {&x, &residual, &gamma, &out, &sum, &rstd}; }
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
      {"x of no dtype",
       [](auto& x) { x.x.dtype = kNoDType; },
       {who + "x is of no known dtype", "fp32 or bf16 or fp16"}},
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

struct RmsNormGradFixture : NormCall {
  RmsNormGradFixture() : NormCall(DType::kF32, kShape) {
    Random random;
    rstd.FillUniform(random);
  }
  RmsNormGradArgs args() {
    RmsNormGradArgs args = grad_args();
    args.d_sum = d_sum.view();
    return args;
  }
  std::vector<const Matrix*> all() const { return {&d_out, &x, &rstd, &gamma, &d_sum, &d_x, &d_gamma}; }
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

struct SwiGluFixture : GluCall {
  SwiGluFixture() : GluCall(DType::kF16, kShape) {
    Random random;
    probs = Matrix(DType::kBF16, {kShape.rows});
    probs.FillUniform(random);
  }
  std::vector<const Matrix*> all() const { return {&gate, &up, &probs, &out}; }
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

struct SwiGluGradFixture : GluCall {
  SwiGluGradFixture() : GluCall(DType::kF32, kShape) {}
  SwiGluGradArgs args() { return grad_args(); }
  std::vector<const Matrix*> all() const { return {&d_out, &gate, &up, &probs, &d_gate, &d_up, &d_probs}; }
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
