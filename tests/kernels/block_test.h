// What the tests of a layer's blocks share: their formulas in double, with the variances of what roundings make of them,
// and gradients against finite differences.
#ifndef CUBIST_TESTS_KERNELS_BLOCK_TEST_H_
#define CUBIST_TESTS_KERNELS_BLOCK_TEST_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {

using Values = std::vector<double>;

// A number, and the variance of what a block makes of it. Roundings have nothing to do with each other, and err by up to
// `unit` of the value: in the mean the square of that is a third of the largest one's.
struct Noisy {
  double value = 0, variance = 0;
};
using NoisyRow = std::vector<Noisy>;

inline constexpr double kFp32 = 0x1p-24;
// How many standard deviations a result may be off: one of 10^8 is by so many. Of thousands the worst are off by 3.
inline constexpr double kDeviations = 6;

inline Noisy Rounded(Noisy x, double unit) { return {x.value, x.variance + std::pow(unit * x.value, 2) / 3}; }
inline Noisy operator+(Noisy a, Noisy b) { return {a.value + b.value, a.variance + b.variance}; }
inline Noisy operator*(Noisy a, Noisy b) {
  return {a.value * b.value, a.value * a.value * b.variance + b.value * b.value * a.variance};
}
inline Noisy operator*(double a, Noisy b) { return Noisy{a} * b; }
// f(x) by its value and its slope.
inline Noisy Mapped(Noisy x, double value, double slope) { return {value, slope * slope * x.variance}; }

inline NoisyRow Exactly(const Matrix& x, std::int64_t row) {
  NoisyRow values;
  for (std::int64_t h = 0; h < x.size(1); ++h) values.push_back({x.at({row, h})});
  return values;
}

// x / sqrt(mean of squares + 1e-6) * gamma, rounded
inline NoisyRow Norm(const NoisyRow& x, const Matrix& gamma, double unit) {
  const auto count = static_cast<double>(x.size());
  double squares = 1e-6 * count, variance = 0;
  for (const Noisy& v : x) squares += v.value * v.value, variance += v.value * v.value * v.variance;
  const Noisy factor =
      Rounded({1 / std::sqrt(squares / count), variance * count / std::pow(squares, 3)}, count * kFp32);
  NoisyRow y;
  for (std::size_t h = 0; h < x.size(); ++h)
    y.push_back(Rounded(gamma.at({static_cast<std::int64_t>(h)}) * (factor * x[h]), unit));
  return y;
}

// x * weights, rounded: element (i, j) of the weights, of which there are `cols` columns, by function. Each of the sum's
// terms is rounded in fp32 as it is added.
template <class Weight>
NoisyRow Times(const NoisyRow& x, std::int64_t cols, Weight weight, double unit) {
  NoisyRow y;
  for (std::int64_t j = 0; j < cols; ++j) {
    Noisy sum;
    double size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const Noisy term = weight(static_cast<std::int64_t>(i), j) * x[i];
      sum = sum + term, size += std::abs(term.value);
    }
    sum.variance += static_cast<double>(x.size()) * std::pow(kFp32 * size, 2) / 3;
    y.push_back(Rounded(sum, unit));
  }
  return y;
}
inline NoisyRow Times(const NoisyRow& x, const Matrix& w, double unit) {
  return Times(
      x, w.size(1),
      [&](std::int64_t i, std::int64_t j) {
        return w.at({i, j});
      },
      unit);
}

inline void ExpectWithinNoise(const Matrix& actual, const NoisyRow& expected) {
  Values values, bounds;
  for (const Noisy& v : expected) {
    values.push_back(v.value);
    bounds.push_back(kDeviations * std::sqrt(v.variance));
  }
  ExpectClose(actual.view(), values, bounds);
  ExpectGuards(actual);
}

// In the mean: the errors' root of squares over the values', for results of many independent roundings.
inline void ExpectCloseInTheMean(const Values& values, const Values& exact, double bound) {
  ASSERT_EQ(values.size(), exact.size());
  double size = 0, error = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    size += exact[i] * exact[i];
    error += std::pow(values[i] - exact[i], 2);
  }
  EXPECT_LE(std::sqrt(error), bound * std::sqrt(size));
}

// Moves elements of the first of each pair, fp32, and compares how `value` changes with the second.
inline void ExpectFiniteDifferences(const std::vector<std::pair<Matrix*, const Matrix*>>& pairs,
                                    const std::function<double()>& value) {
  Random random;
  for (std::size_t p = 0; p < pairs.size(); ++p) {
    SCOPED_TRACE(p);
    const Tensor moved = pairs[p].first->view();
    const ConstTensor gradient = pairs[p].second->view();
    std::vector<std::int64_t> offsets, places;
    ForEachElement(moved, [&](const auto&, std::int64_t offset) { offsets.push_back(offset); });
    ForEachElement(gradient, [&](const auto&, std::int64_t offset) { places.push_back(offset); });
    for (int trial = 0; trial < 12 && !offsets.empty(); ++trial) {
      const auto i =
          static_cast<std::size_t>(random.Integer(0, static_cast<std::int64_t>(offsets.size()) - 1));
      float& element = static_cast<float*>(moved.data)[offsets[i]];
      const float kept = element;
      element = kept + 0x1p-9f;
      const double above = value(), high = element;
      element = kept - 0x1p-9f;
      const double below = value(), low = element;
      element = kept;
      const double expected = (above - below) / (high - low);
      EXPECT_NEAR(static_cast<const float*>(gradient.data)[places[i]], expected,
                  2e-3 * (1 + std::abs(expected)))
          << i;
    }
    ExpectGuards(*pairs[p].second);
  }
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_BLOCK_TEST_H_
