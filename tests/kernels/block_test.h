// What the tests of a layer's blocks share: a norm in double, and gradients against finite differences.
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

// x / sqrt(mean of squares + 1e-6) * gamma
inline Values Norm(const Values& x, const Matrix& gamma) {
  double squares = 1e-6 * static_cast<double>(x.size());
  for (double v : x) squares += v * v;
  Values y;
  for (std::size_t h = 0; h < x.size(); ++h)
    y.push_back(x[h] / std::sqrt(squares / static_cast<double>(x.size())) *
                gamma.at({static_cast<std::int64_t>(h)}));
  return y;
}

// In the mean: the errors' root of squares over the values', for results of many independent roundings.
inline void ExpectCloseInTheMean(const Values& values, const Values& exact, double bound) {
  ASSERT_EQ(values.size(), exact.size());
  double size = 0, error = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    size += exact[i] * exact[i];
    error += std::pow(values[i] - exact[i], 2);
  }
  EXPECT_LT(std::sqrt(error / size), bound);
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
    for (int trial = 0; trial < 12; ++trial) {
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
