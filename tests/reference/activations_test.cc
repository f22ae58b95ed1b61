// The reference's norms and activations: known values, and gradients against finite differences of its own forward.
#include "reference/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

// Central difference of sum(d_out * forward()) for every element of x, against `gradient`.
template <class Forward>
void ExpectGradient(Matrix* x, const Matrix& d_out, const std::vector<double>& gradient, Forward forward) {
  constexpr double kStep = 0x1p-8;  // Exact in fp32; the third derivative makes an error of about kStep^2.
  const std::vector<double> weights = d_out.ToDoubles();
  const auto value = [&] {
    const std::vector<double> out = forward();
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * weights[i];
    return sum;
  };
  const Tensor view = x->view();
  std::size_t i = 0;
  ForEachElement(view, [&](const auto&, std::int64_t offset) {
    float& element = static_cast<float*>(view.data)[offset];
    const float kept = element;
    element = kept + static_cast<float>(kStep);
    const double above = value(), x_above = element;
    element = kept - static_cast<float>(kStep);
    const double below = value(), x_below = element;
    element = kept;
    EXPECT_NEAR((above - below) / (x_above - x_below), gradient[i], 2e-4 * (1 + std::abs(gradient[i]))) << i;
    ++i;
  });
  ASSERT_EQ(i, gradient.size());
}

TEST(RmsNormReference, KnownRow) {
  Matrix x(DType::kF32, {1, 4}), gamma(DType::kF32, {4});
  for (std::int64_t j = 0; j < 4; ++j) {
    x.set({0, j}, j == 0 ? 6 : j == 1 ? -2 : 0);  // Mean square 10.
    gamma.set({j}, static_cast<double>(j + 1));
  }
  const auto result = reference::RmsNorm(x.view(), gamma.view(), 6, DType::kF32);
  EXPECT_DOUBLE_EQ(result.rstd.values[0], 0.25);
  EXPECT_DOUBLE_EQ(result.out.values[0], 1.5);
  EXPECT_DOUBLE_EQ(result.out.values[1], -1);
  EXPECT_DOUBLE_EQ(result.out.values[2], 0);
}

TEST(RmsNormReference, GradientsAreFiniteDifferences) {
  Random random;
  Matrix x(DType::kF32, {3, 5}), gamma(DType::kF32, {5}), d_out(DType::kF32, {3, 5}), rstd(DType::kF32, {3});
  x.FillNormal(random), gamma.FillNormal(random), d_out.FillNormal(random);
  const auto forward = [&] { return reference::RmsNorm(x.view(), gamma.view(), 0.5, DType::kF32); };
  const std::vector<double> r = forward().rstd.values;
  for (std::int64_t t = 0; t < 3; ++t) rstd.set({t}, r[static_cast<std::size_t>(t)]);
  const auto gradients =
      reference::RmsNormGrad(d_out.view(), x.view(), rstd.view(), gamma.view(), {}, DType::kF32, DType::kF32);
  ExpectGradient(&x, d_out, gradients.d_x.values, [&] { return forward().out.values; });
  ExpectGradient(&gamma, d_out, gradients.d_gamma.values, [&] { return forward().out.values; });
}

TEST(SwiGluReference, KnownValues) {
  Matrix gate(DType::kF32, {1, 3}), up(DType::kF32, {1, 3}), probs(DType::kF32, {1});
  gate.set({0, 0}, 0), gate.set({0, 1}, 2), gate.set({0, 2}, -200);
  up.Fill(3), probs.Fill(0.5);
  const auto out = reference::SwiGlu(gate.view(), up.view(), probs.view(), DType::kF32).values;
  EXPECT_DOUBLE_EQ(out[0], 0);
  EXPECT_DOUBLE_EQ(out[1], 3 / (1 + std::exp(-2.0)));
  EXPECT_NEAR(out[2], 0, 1e-80);
}

TEST(SwiGluReference, GradientsAreFiniteDifferences) {
  Random random;
  Matrix gate(DType::kF32, {3, 4}), up(DType::kF32, {3, 4}), probs(DType::kF32, {3}),
      d_out(DType::kF32, {3, 4});
  gate.FillNormal(random, 0, 2), up.FillNormal(random), probs.FillUniform(random), d_out.FillNormal(random);
  const auto forward = [&] {
    return reference::SwiGlu(gate.view(), up.view(), probs.view(), DType::kF32).values;
  };
  const auto gradients =
      reference::SwiGluGrad(d_out.view(), gate.view(), up.view(), probs.view(), DType::kF32, DType::kF32);
  ExpectGradient(&gate, d_out, gradients.d_gate.values, forward);
  ExpectGradient(&up, d_out, gradients.d_up.values, forward);
  ExpectGradient(&probs, d_out, gradients.d_probs.values, forward);
}

}  // namespace
}  // namespace cubist::testing
