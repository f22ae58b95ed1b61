#include "tests/support/double_benchmark.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "tests/support/matrix.h"

namespace cubist::testing {
namespace {

float At(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}

float At(const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
  return LoadFloat(x.data, x.dtype, b * x.stride(0) + n * x.stride(1) + s * x.stride(2) + d * x.stride(3));
}

float Round(DType dtype, float value) { return static_cast<float>(RoundTo(dtype, value)); }

// Below this, errors are those of one rounding and tell nothing.
double Floor(DType dtype) { return dtype == DType::kF32 ? 0x1p-14 : UnitRoundoff(dtype); }

std::vector<float> NaiveSoftmax(std::vector<float> s, DType dtype) {
  float m = -std::numeric_limits<float>::infinity(), l = 0;
  for (float x : s) m = std::max(m, x);
  for (float& x : s) l += x = std::exp(x - m);
  for (float& x : s) x = Round(dtype, x / l);
  return s;
}

}  // namespace

ErrorMetrics Measure(std::span<const double> values, std::span<const double> golden) {
  ErrorMetrics metrics;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double error = std::abs(values[i] - golden[i]), rel = error / (std::abs(golden[i]) + 1e-7);
    metrics.max_rel = std::max(metrics.max_rel, rel);
    metrics.mean_rel += rel / static_cast<double>(values.size());
    metrics.rmse += error * error / static_cast<double>(values.size());
  }
  metrics.rmse = std::sqrt(metrics.rmse);
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
  const ErrorMetrics a = Measure(ours, truth), b = Measure(theirs, truth);
  const double floor = Floor(actual.dtype);
  const auto ratio = [floor](double kernel, double benchmark) { return kernel / std::max(benchmark, floor); };
  const double max_rel = ratio(a.max_rel, b.max_rel), mean_rel = ratio(a.mean_rel, b.mean_rel);
  const double rmse = ratio(a.rmse, b.rmse);
  if (max_rel <= limits.max_rel && mean_rel <= limits.mean_rel && rmse <= limits.rmse) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << "ratios to the naive computation: max_rel " << max_rel << " (limit " << limits.max_rel
         << "), mean_rel " << mean_rel << " (limit " << limits.mean_rel << "), rmse " << rmse << " (limit "
         << limits.rmse << ")";
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

namespace {

// The weights of query i for the keys that it sees.
std::vector<float> NaiveWeights(const ConstTensor& q, const ConstTensor& k, float scale,
                                std::int64_t diagonal, std::int64_t b, std::int64_t n, std::int64_t i) {
  std::vector<float> s;
  for (std::int64_t j = 0; j < k.size(2) && j <= i + diagonal; ++j) {
    float sum = 0;
    for (std::int64_t d = 0; d < q.size(3); ++d) sum += At(q, b, n, i, d) * At(k, b, n, j, d);
    s.push_back(Round(q.dtype, Round(q.dtype, sum) * scale));
  }
  return NaiveSoftmax(std::move(s), q.dtype);
}

// Sums of one head's rows, (rows, cols), rounded to the dtype at the end of `all`.
void AppendRounded(const std::vector<float>& sums, DType dtype, std::vector<double>* all) {
  for (const float sum : sums) all->push_back(Round(dtype, sum));
}

}  // namespace

std::vector<double> NaiveAttention(ConstTensor q, ConstTensor k, ConstTensor v, float scale,
                                   std::int64_t diagonal) {
  std::vector<double> out;
  for (std::int64_t b = 0; b < q.size(0); ++b) {
    for (std::int64_t n = 0; n < q.size(1); ++n) {
      for (std::int64_t i = 0; i < q.size(2); ++i) {
        const std::vector<float> p = NaiveWeights(q, k, scale, diagonal, b, n, i);
        for (std::int64_t d = 0; d < v.size(3); ++d) {
          float sum = 0;
          for (std::size_t j = 0; j < p.size(); ++j)
            sum += p[j] * At(v, b, n, static_cast<std::int64_t>(j), d);
          out.push_back(Round(q.dtype, sum));
        }
      }
    }
  }
  return out;
}

NaiveAttentionGradients NaiveAttentionGrad(ConstTensor q, ConstTensor k, ConstTensor v, ConstTensor out,
                                           ConstTensor dout, float scale, std::int64_t diagonal) {
  const auto sums = [](const ConstTensor& x) {
    return std::vector<float>(static_cast<std::size_t>(x.size(2) * x.size(3)));
  };
  NaiveAttentionGradients all;
  for (std::int64_t b = 0; b < q.size(0); ++b) {
    for (std::int64_t n = 0; n < q.size(1); ++n) {
      std::vector<float> dq = sums(q), dk = sums(k), dv = sums(v);
      // to(row) += factor * x(x_row)
      const auto add = [&](std::vector<float>& to, std::int64_t row, float factor, const ConstTensor& x,
                           std::int64_t x_row) {
        for (std::int64_t d = 0; d < x.size(3); ++d)
          to[static_cast<std::size_t>(row * x.size(3) + d)] += factor * At(x, b, n, x_row, d);
      };
      for (std::int64_t i = 0; i < q.size(2); ++i) {
        const std::vector<float> p = NaiveWeights(q, k, scale, diagonal, b, n, i);
        std::vector<float> dp;
        float delta = 0;
        for (std::int64_t d = 0; d < v.size(3); ++d) delta += At(dout, b, n, i, d) * At(out, b, n, i, d);
        for (std::size_t j = 0; j < p.size(); ++j) {
          float sum = 0;
          for (std::int64_t d = 0; d < v.size(3); ++d)
            sum += At(dout, b, n, i, d) * At(v, b, n, static_cast<std::int64_t>(j), d);
          dp.push_back(Round(q.dtype, sum));
        }
        for (std::size_t j = 0; j < p.size(); ++j) {
          const auto key = static_cast<std::int64_t>(j);
          const float ds = Round(q.dtype, Round(q.dtype, p[j] * (dp[j] - delta)) * scale);
          add(dq, i, ds, k, key), add(dk, key, ds, q, i), add(dv, key, p[j], dout, i);
        }
      }
      AppendRounded(dq, q.dtype, &all.dq), AppendRounded(dk, q.dtype, &all.dk),
          AppendRounded(dv, q.dtype, &all.dv);
    }
  }
  return all;
}

}  // namespace cubist::testing
