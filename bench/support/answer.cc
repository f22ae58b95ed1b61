#include "bench/support/answer.h"

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>

namespace cubist::bench {

std::string Mismatch(const std::string& where, const void* actual, DType dtype, std::int64_t stride,
                     std::span<const double> expected, std::span<const double> bounds) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double value = LoadFloat(actual, dtype, static_cast<std::int64_t>(i) * stride);
    if (std::abs(value - expected[i]) <= bounds[i]) continue;
    char text[160];
    std::snprintf(text, sizeof text, " column %zu is %.9g, expected %.9g within %.3g", i, value, expected[i],
                  bounds[i]);
    return where + text;
  }
  return {};
}

void Spoil(void* data, DType dtype, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    StoreFloat(data, dtype, i, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace cubist::bench
