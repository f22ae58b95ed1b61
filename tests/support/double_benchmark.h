// The double benchmark: a kernel may be little worse than a naive computation in the same dtypes, both
// measured against the reference in double. A bound says what is allowed at worst; this says what is normal.
#ifndef CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_
#define CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "npu_model/types.h"

namespace cubist::testing {

// Golden values below 2^-14 (fp32), 2^-8 (bf16) or 2^-11 (fp16) are small: of these the errors above 2^-30 (fp32) or
// 2^-16 are counted, as a share of next to nothing says little. With rel = |x - golden| / (|golden| + 1e-7):
struct ErrorMetrics {
  double max_rel = 0, mean_rel = 0;  // of elements that are not small
  double rmse = 0;                   // of all, as is
  double balance = 0;                // |mean of (x - golden) / max(1, |golden|)|
  std::int64_t small_errors = 0;
};
ErrorMetrics Measure(DType dtype, std::span<const double> values, std::span<const double> golden);

// Largest allowed ratio of the kernel's metrics to the naive computation's, and the dtype that both round to: by
// default that of the output.
struct DoubleBenchmarkLimits {
  double max_rel = 10;
  double mean_rel = 2;
  double rmse = 2;
  double small_errors = 2;
  std::optional<DType> dtype = {};
};

// The data of these tests, whatever the run's seed is: with an element near zero, where the naive computation has luck,
// max_rel tells of that element alone.
inline constexpr std::uint64_t kTypicalData = 20240607;

// Whether each metric of `actual` is at most its limit times that of `naive`, where the latter counts as no less than
// one rounding (2^-14 for fp32), or one small error in 1024 elements, as of fewer luck decides; and the balance at most
// 2^-14 (fp32), 2^-7 (bf16) or 2^-10 (fp16). Where the naive computation is not finite nothing is asked; elsewhere
// `actual` must be finite. After cv_fused_double_benchmark of Ascend's test kit, with its cross-check's small values.
::testing::AssertionResult PassesDoubleBenchmark(const ConstTensor& actual, std::span<const double> golden,
                                                 std::span<const double> naive,
                                                 const DoubleBenchmarkLimits& limits = {});

// A naive computation, row-major: c = op(a) op(b) + bias, an fp32 sum in ascending k, rounded to `output`. That of
// attention is tests/kernels/naive_attention.h.
std::vector<double> NaiveMatmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
                                ConstTensor bias, DType output);

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_DOUBLE_BENCHMARK_H_
