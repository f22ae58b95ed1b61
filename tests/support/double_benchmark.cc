#include "tests/support/double_benchmark.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "tests/support/matrix.h"

namespace cubist::testing {
namespace {

float At(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}

float Round(DType dtype, float value) { return static_cast<float>(RoundTo(dtype, value)); }

// One rounding: metrics below it tell nothing, and golden values below it are small.
double Floor(DType dtype) { return dtype == DType::kF32 ? 0x1p-14 : UnitRoundoff(dtype); }
double SmallError(DType dtype) { return dtype == DType::kF32 ? 0x1p-30 : 0x1p-16; }
double MostBalance(DType dtype) { return dtype == DType::kF32 ? 0x1p-14 : 2 * UnitRoundoff(dtype); }

struct Ratio {
  const char* name;
  double value, limit;
};

}  // namespace

ErrorMetrics Measure(DType dtype, std::span<const double> values, std::span<const double> golden) {
  ErrorMetrics metrics;
  std::int64_t shares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double difference = values[i] - golden[i], error = std::abs(difference), size = std::abs(golden[i]);
    metrics.rmse += error * error, metrics.balance += difference / std::max(1.0, size);
    if (size < Floor(dtype)) {
      metrics.small_errors += error > SmallError(dtype) ? 1 : 0;
      continue;
    }
    const double rel = error / (size + 1e-7);
    metrics.max_rel = std::max(metrics.max_rel, rel), metrics.mean_rel += rel;
    ++shares;
  }
  const auto count = static_cast<double>(std::max<std::size_t>(values.size(), 1));
  metrics.rmse = std::sqrt(metrics.rmse / count), metrics.balance = std::abs(metrics.balance) / count;
  metrics.mean_rel /= static_cast<double>(std::max<std::int64_t>(shares, 1));
  return metrics;
}

::testing::AssertionResult PassesDoubleBenchmark(const ConstTensor& actual, std::span<const double> golden,
                                                 std::span<const double> naive,
                                                 const DoubleBenchmarkLimits& limits) {
  const std::vector<double> values = ToDoubles(actual);
  if (values.size() != golden.size() || values.size() != naive.size()) {
    return ::testing::AssertionFailure() << values.size() << " elements compared with " << golden.size()
                                         << " golden and " << naive.size() << " naive ones";
  }
  std::vector<double> ours, theirs, truth;  // where the naive computation is finite
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(naive[i])) continue;
    if (!std::isfinite(values[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << " is " << values[i] << ", naive " << naive[i];
    }
    ours.push_back(values[i]), theirs.push_back(naive[i]), truth.push_back(golden[i]);
  }
  const DType dtype = limits.dtype.value_or(actual.dtype);
  const ErrorMetrics a = Measure(dtype, ours, truth), b = Measure(dtype, theirs, truth);
  const auto ratio = [&](double kernel, double benchmark) {
    return kernel / std::max(benchmark, Floor(dtype));
  };
  const std::int64_t least_errors = std::max<std::int64_t>(std::ssize(ours) / 1024, 1);
  const auto small_errors = static_cast<double>(std::max(b.small_errors, least_errors));
  const Ratio ratios[] = {
      {"max_rel", ratio(a.max_rel, b.max_rel), limits.max_rel},
      {"mean_rel", ratio(a.mean_rel, b.mean_rel), limits.mean_rel},
      {"rmse", ratio(a.rmse, b.rmse), limits.rmse},
      {"small errors", static_cast<double>(a.small_errors) / small_errors, limits.small_errors},
      {"balance", a.balance / MostBalance(dtype), 1}};
  ::testing::AssertionResult failure = ::testing::AssertionFailure()
                                       << "ratios to the naive computation (limit):";
  bool passes = true;
  for (const Ratio& r : ratios) {
    failure << " " << r.name << " " << r.value << " (" << r.limit << ")";
    passes = passes && r.value <= r.limit;
  }
  return passes ? ::testing::AssertionSuccess() : failure;
}

std::vector<double> NaiveMatmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
                                ConstTensor bias, DType output) {
  const std::int64_t m = a.size(transpose_a ? 1 : 0), k = a.size(transpose_a ? 0 : 1);
  const std::int64_t n = b.size(transpose_b ? 0 : 1);
  std::vector<double> c;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = bias.given() ? LoadFloat(bias.data, bias.dtype, j * bias.stride(0)) : 0.0f;
      for (std::int64_t p = 0; p < k; ++p) {
        sum += (transpose_a ? At(a, p, i) : At(a, i, p)) * (transpose_b ? At(b, j, p) : At(b, p, j));
      }
      c.push_back(Round(output, sum));
    }
  }
  return c;
}

}  // namespace cubist::testing
