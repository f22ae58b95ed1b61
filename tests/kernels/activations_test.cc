// RmsNorm and SwiGlu with their gradients against the reference, through the public calls: on the host, on its SIMD
// targets, and on the model.
#include "reference/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/rows_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr Layout kApart{.gap = 5, .offset = 3, .step = 2};

// Every edge of rows and columns; the last need several parts of a row on an NPU.
std::vector<RowsShape> Shapes() {
  std::vector<RowsShape> shapes;
  for (std::int64_t edge : EdgeSizes()) {
    shapes.push_back({edge, 19});
    shapes.push_back({5, edge});
  }
  shapes.insert(shapes.end(), {{300, 130}, {2050, 3}, {3, 7168}, {2, 9001}, {19, 20011}});
  return shapes;
}

void Expect(const Matrix& actual, const reference::Bounded& expected) {
  ExpectClose(actual.view(), expected.values, expected.bounds);
  ExpectGuards(actual);
}

void ExpectNorm(const Device& device, DType dtype, const RowsShape& shape, bool residual,
                const Layout& layout) {
  SCOPED_TRACE(Join(shape.Name(), " ", NameOf(dtype), residual ? " residual" : "", " step ", layout.step));
  NormCall call(dtype, shape, layout);
  RmsNormArgs args = call.args();
  if (residual) args.residual = call.residual.view(), args.sum = call.sum.view();
  ASSERT_TRUE(IsOk(RmsNorm(device, args)));
  if (residual) {
    std::vector<double> sum = call.x.ToDoubles(), bound;
    const std::vector<double> more = call.residual.ToDoubles();
    for (std::size_t i = 0; i < sum.size(); ++i) {
      bound.push_back((UnitRoundoff(dtype) + 0x1p-23) * (std::abs(sum[i]) + std::abs(more[i])));
      sum[i] += more[i];
    }
    ExpectClose(call.sum.view(), sum, bound);
    ExpectGuards(call.sum);
  }
  Matrix& z = residual ? call.sum : call.x;
  const auto expected = reference::RmsNorm(z.view(), call.gamma.view(), args.eps, dtype);
  Expect(call.out, expected.out), Expect(call.rstd, expected.rstd);

  RmsNormGradArgs grad = call.grad_args();
  grad.x = z.view();
  if (residual) grad.d_sum = call.d_sum.view();
  ASSERT_TRUE(IsOk(RmsNormGrad(device, grad)));
  const auto gradients =
      reference::RmsNormGrad(grad.d_out, grad.x, grad.rstd, grad.gamma, grad.d_sum, dtype, DType::kF32);
  Expect(call.d_x, gradients.d_x), Expect(call.d_gamma, gradients.d_gamma);
}

void ExpectGlu(const Device& device, DType dtype, const RowsShape& shape, bool probs, const Layout& layout) {
  SCOPED_TRACE(Join(shape.Name(), " ", NameOf(dtype), probs ? " probs" : "", " step ", layout.step));
  GluCall call(dtype, shape, layout);
  SwiGluArgs args = call.args();
  SwiGluGradArgs grad = call.grad_args();
  if (!probs) args.probs = {}, grad.probs = {};
  ASSERT_TRUE(IsOk(SwiGlu(device, args)));
  Expect(call.out, reference::SwiGlu(args.gate, args.up, args.probs, dtype));
  ASSERT_TRUE(IsOk(SwiGluGrad(device, grad)));
  const auto gradients =
      reference::SwiGluGrad(grad.d_out, grad.gate, grad.up, grad.probs, dtype, DType::kF32);
  Expect(call.d_gate, gradients.d_gate), Expect(call.d_up, gradients.d_up),
      Expect(call.d_probs, gradients.d_probs);
  call.d_gate.FillNaN(), call.d_up.FillNaN();
  grad.d_probs = {};
  ASSERT_TRUE(IsOk(SwiGluGrad(device, grad)));
  Expect(call.d_gate, gradients.d_gate), Expect(call.d_up, gradients.d_up);
}

class RowsTest : public ::testing::TestWithParam<RowsShape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, RowsTest, ::testing::ValuesIn(Shapes()), ShapeName());

TEST_P(RowsTest, NormOnTheHost) {
  ExpectNorm(Host(), DType::kF32, GetParam(), false, {});
  ExpectNorm(Host(), DType::kBF16, GetParam(), true, kContiguous);
  ExpectNorm(Host(), DType::kF16, GetParam(), true, kApart);
}
TEST_P(RowsTest, NormOnTheModel) {
  ExpectNorm(NpuWithData(Ascend910B2()), DType::kBF16, GetParam(), GetParam().rows % 2 == 0, {});
  ExpectNorm(NpuWithData(Ascend910B2()), DType::kF32, GetParam(), GetParam().rows % 2 != 0, {});
}
TEST_P(RowsTest, SwiGluOnTheHost) {
  ExpectGlu(Host(), DType::kF32, GetParam(), true, {});
  ExpectGlu(Host(), DType::kBF16, GetParam(), false, kContiguous);
  ExpectGlu(Host(), DType::kF16, GetParam(), true, kApart);
}
TEST_P(RowsTest, SwiGluOnTheModel) {
  ExpectGlu(NpuWithData(Ascend910B3()), DType::kBF16, GetParam(), true, {});
  ExpectGlu(NpuWithData(Ascend910B3()), DType::kF32, GetParam(), false, {});
}

class SimdTest : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Targets, SimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);
TEST_P(SimdTest, NormAndSwiGlu) {
  const ScopedSimdTarget target(GetParam());
  for (DType dtype : kFloatTypes) {
    for (const RowsShape& shape : {RowsShape{3, 1}, RowsShape{7, 67}, RowsShape{2, 1031}}) {
      ExpectNorm(Host(), dtype, shape, true, {});
      ExpectGlu(Host(), dtype, shape, true, {});
    }
  }
}

// Whatever the number of threads, the same bits.
TEST(ActivationsTest, ThreadsDoNotChangeABit) {
  const RowsShape shape{333, 517};
  NormCall norm(DType::kBF16, shape);
  GluCall glu(DType::kBF16, shape);
  const auto run = [&](int threads) {
    const Device device = Host({.threads = threads});
    ASSERT_TRUE(IsOk(RmsNorm(device, norm.args())));
    ASSERT_TRUE(IsOk(RmsNormGrad(device, norm.grad_args())));
    ASSERT_TRUE(IsOk(SwiGlu(device, glu.args())));
    ASSERT_TRUE(IsOk(SwiGluGrad(device, glu.grad_args())));
  };
  run(1);
  const NormCall first_norm = norm;
  const GluCall first_glu = glu;
  for (int threads : kThreadCounts) {
    for (Matrix* m :
         {&norm.out, &norm.rstd, &norm.d_x, &norm.d_gamma, &glu.out, &glu.d_gate, &glu.d_up, &glu.d_probs})
      m->FillNaN();
    norm.rstd = first_norm.rstd;
    run(threads);
    ExpectSameBits(norm.out.view(), first_norm.out.view());
    ExpectSameBits(norm.rstd.view(), first_norm.rstd.view());
    ExpectSameBits(norm.d_x.view(), first_norm.d_x.view());
    ExpectSameBits(norm.d_gamma.view(), first_norm.d_gamma.view());
    ExpectSameBits(glu.out.view(), first_glu.out.view());
    ExpectSameBits(glu.d_gate.view(), first_glu.d_gate.view());
    ExpectSameBits(glu.d_up.view(), first_glu.d_up.view());
    ExpectSameBits(glu.d_probs.view(), first_glu.d_probs.view());
  }
}

// NaN and infinities stay in their rows, and stand where the formula puts them.
TEST(ActivationsTest, NonFiniteValuesStayInTheirRows) {
  NormCall norm(DType::kF32, {4, 40});
  norm.x.set({1, 7}, kNaN), norm.x.set({3, 0}, kInfinity);
  ASSERT_TRUE(IsOk(RmsNorm(Host(), norm.args())));
  for (std::int64_t j = 0; j < 40; ++j) {
    EXPECT_TRUE(std::isfinite(norm.out.at({0, j})) && std::isfinite(norm.out.at({2, j})));
    EXPECT_TRUE(std::isnan(norm.out.at({1, j})));
    EXPECT_EQ(std::isnan(norm.out.at({3, j})), j == 0);  // inf * 0; the others are x * 0.
  }
  GluCall glu(DType::kBF16, {2, 40});
  glu.gate.set({0, 3}, kNaN), glu.gate.set({0, 4}, 1e30), glu.gate.set({0, 5}, -1e30),
      glu.up.set({0, 6}, kInfinity);
  glu.gate.set({0, 6}, 1);
  ASSERT_TRUE(IsOk(SwiGlu(Host(), glu.args())));
  Expect(glu.out, reference::SwiGlu(glu.gate.view(), glu.up.view(), glu.probs.view(), DType::kBF16));
}

// The sigmoid of a gate so large is 1, and what is left of its slope 0 however large the gate.
TEST(ActivationsTest, GradientsOfGatesOfAnySize) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    GluCall glu(dtype, {2, 40});
    for (std::int64_t j = 0; j < 40; ++j)
      glu.gate.set({0, j}, j % 2 == 0 ? std::pow(10.0, static_cast<double>(j - 1)) : -1000.0);
    for (std::int64_t j = 34; j < 40; ++j) glu.gate.set({1, j}, 40.0 + static_cast<double>(j));
    const SwiGluGradArgs args = glu.grad_args();
    ASSERT_TRUE(IsOk(SwiGluGrad(Host(), args)));
    Expect(glu.d_gate,
           reference::SwiGluGrad(args.d_out, args.gate, args.up, args.probs, dtype, DType::kF32).d_gate);
  }
}

// gate and up may be halves of one matrix, as the gate-and-up product leaves them.
TEST(ActivationsTest, HalvesOfOneMatrix) {
  Random random;
  Matrix both(DType::kBF16, {6, 74}), out(DType::kBF16, {6, 37});
  both.FillNormal(random);
  ConstTensor gate = std::as_const(both).view(), up = gate;
  gate.sizes[1] = up.sizes[1] = 37;
  up.data = static_cast<const BF16*>(up.data) + 37;
  ASSERT_TRUE(IsOk(SwiGlu(Host(), {.gate = gate, .up = up, .out = out.view()})));
  Expect(out, reference::SwiGlu(gate, up, {}, DType::kBF16));
}

}  // namespace
}  // namespace cubist::testing
