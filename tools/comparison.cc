#include "tools/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "tools/generate.h"

namespace cubist {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Values from here on round to infinity.
double OverflowThreshold(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65520;
    case DType::kBF16:
      return 0x1.ffp127;
    default:
      return 0x1.ffffffp127;
  }
}

// Error over bound; infinite where no bound can excuse the difference.
double Ratio(double actual, double expected, double bound, DType dtype) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return 0;
  if (std::isnan(actual) || std::isnan(expected) || std::isinf(expected)) return kInfinity;
  if (std::isinf(actual)) {
    const double largest = actual > 0 ? expected + bound : bound - expected;
    return largest >= OverflowThreshold(dtype) ? 0 : kInfinity;
  }
  return bound > 0 ? std::abs(actual - expected) / bound : kInfinity;
}

}  // namespace

void Comparison::Add(double actual, double expected, double element_bound, DType dtype, std::int64_t row,
                     std::int64_t element) {
  ++elements;
  const double element_ratio = Ratio(actual, expected, element_bound, dtype);
  if (!(element_ratio <= 1)) {
    if (beyond++ == 0) {
      first_beyond = fmt::format("element {} of row {} is {:.9g}, expected {:.9g} +- {:.2g}", element, row,
                                 actual, expected, element_bound);
    }
  }
  if (element_ratio > ratio || elements == 1) {
    ratio = element_ratio;
    error = std::abs(actual - expected);
    if (element_ratio == 0) error = 0;
    bound = element_bound;
  }
}

void Comparison::Merge(const Comparison& other) {
  if (other.elements > 0 && (other.ratio > ratio || elements == 0)) {
    ratio = other.ratio, error = other.error, bound = other.bound;
  }
  if (beyond == 0) first_beyond = other.first_beyond;
  elements += other.elements;
  beyond += other.beyond;
  rows += other.rows;
  all_rows += other.all_rows;
}

std::vector<std::int64_t> SampleRows(std::int64_t total, std::int64_t wanted, std::uint64_t key) {
  if (wanted >= total) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(std::max<std::int64_t>(total, 0)));
    std::iota(all.begin(), all.end(), std::int64_t{0});
    return all;
  }
  std::set<std::int64_t> rows;
  if (wanted >= 2) rows = {0, total - 1};
  for (std::uint64_t draw = 0; static_cast<std::int64_t>(rows.size()) < wanted; ++draw) {
    rows.insert(static_cast<std::int64_t>(Random(key, draw) % static_cast<std::uint64_t>(total)));
  }
  return {rows.begin(), rows.end()};
}

}  // namespace cubist
