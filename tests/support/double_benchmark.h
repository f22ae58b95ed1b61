// The double benchmark: a kernel may be little worse than a naive computation in the same dtypes, both
// measured against the reference in double. A bound says what is allowed at worst; this says what is normal.
#ifndef CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_
#define CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/types.h"

namespace cubist::testing {

// With rel = |x - golden| / (|golden| + 1e-7) of every element.
struct ErrorMetrics {
  double max_rel = 0;
  double mean_rel = 0;
  double rmse = 0;
};
ErrorMetrics Measure(std::span<const double> values, std::span<const double> golden);

// Largest allowed ratio of the kernel's metrics to the naive computation's.
struct DoubleBenchmarkLimits {
  double max_rel = 10;
  double mean_rel = 2;
  double rmse = 2;
};

// The data of these tests, whatever the run's seed is: with an element near zero, where the naive computation has luck,
// max_rel tells of that element alone.
inline constexpr std::uint64_t kTypicalData = 20240607;

// Whether each metric of `actual` is at most its limit times that of `naive`, where the latter counts as no
// less than one rounding of actual's dtype (2^-14 for fp32). Where the naive computation is
// not finite nothing is asked; elsewhere `actual` must be finite.
::testing::AssertionResult PassesDoubleBenchmark(const ConstTensor& actual, std::span<const double> golden,
                                                 std::span<const double> naive,
                                                 const DoubleBenchmarkLimits& limits = {});

// The naive computations, row-major.

// c = op(a) op(b) + bias: fp32 sum in ascending k, rounded to `output`.
std::vector<double> NaiveMatmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
                                ConstTensor bias, DType output);

// Three steps, each of which rounds its result to the input dtype as separate operators do: scores, softmax,
// output. Heads are equal in number, no rope; query i sees keys j <= i + diagonal.
std::vector<double> NaiveAttention(ConstTensor q, ConstTensor k, ConstTensor v, float scale,
                                   std::int64_t diagonal);

// Its gradients, operator by operator likewise: weights from the scores again, dp = dout v^T, the softmax's gradient
// p (dp - delta) with delta = rowsum(dout * out), the products; fp32 sums over ascending queries or keys.
struct NaiveAttentionGradients {
  std::vector<double> dq, dk, dv;
};
NaiveAttentionGradients NaiveAttentionGrad(ConstTensor q, ConstTensor k, ConstTensor v, ConstTensor out,
                                           ConstTensor dout, float scale, std::int64_t diagonal);

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_
