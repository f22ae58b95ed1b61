#include "reference/matmul.h"

#include <cmath>
#include <cstddef>
#include <numeric>

#include "reference/bounds.h"

namespace cubist::reference {
namespace {

double At(const ConstTensor& x, bool transpose, std::int64_t i, std::int64_t j) {
  const std::int64_t index =
      transpose ? j * x.stride(0) + i * x.stride(1) : i * x.stride(0) + j * x.stride(1);
  return LoadFloat(x.data, x.dtype, index);
}

}  // namespace

// Sums run over p in ascending order. p is the outer loop so that a few sampled rows of a large product read
// b once.
MatmulResult Matmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b, ConstTensor bias,
                    std::span<const std::int64_t> rows) {
  const std::int64_t k = transpose_a ? a.size(0) : a.size(1);
  const std::int64_t n = transpose_b ? b.size(0) : b.size(1);
  const auto m = static_cast<std::int64_t>(rows.size());

  MatmulResult result;
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t j = 0; j < n; ++j) {
      const double start = bias.given() ? LoadFloat(bias.data, bias.dtype, j * bias.stride(0)) : 0.0;
      result.c.push_back(start);
      result.magnitude.push_back(std::abs(start));
    }
  }

  std::vector<double> b_row(static_cast<std::size_t>(n));
  for (std::int64_t p = 0; p < k; ++p) {
    for (std::int64_t j = 0; j < n; ++j) b_row[static_cast<std::size_t>(j)] = At(b, transpose_b, p, j);
    std::size_t element = 0;
    for (const std::int64_t i : rows) {
      const double a_ip = At(a, transpose_a, i, p);
      for (const double b_pj : b_row) {
        result.c[element] += a_ip * b_pj;
        result.magnitude[element++] += std::abs(a_ip) * std::abs(b_pj);
      }
    }
  }
  return result;
}

MatmulResult Matmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b, ConstTensor bias) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(transpose_a ? a.size(1) : a.size(0)));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  return Matmul(a, transpose_a, b, transpose_b, bias, rows);
}

std::vector<double> MatmulBounds(const MatmulResult& result, std::int64_t k, DType input, DType output) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < result.c.size(); ++i) {
    bounds.push_back(MatmulBound(k, input, output, result.c[i], result.magnitude[i]));
  }
  return bounds;
}

}  // namespace cubist::reference
