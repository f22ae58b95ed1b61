#include "reference/grouped_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace cubist::reference {

std::vector<Range> GroupRows(ConstTensor groups, bool ends) {
  std::vector<Range> ranges;
  std::int64_t begin = 0;
  for (std::int64_t g = 0; g < groups.size(0); ++g) {
    const std::int64_t value = LoadInt(groups.data, groups.dtype, g * groups.stride(0));
    const std::int64_t end = ends ? value : begin + value;
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

MatmulResult GroupedMatmul(ConstTensor x, std::span<const Range> groups, const WeightsOf& weights,
                           bool transpose_weights, std::int64_t n, ConstTensor bias,
                           std::span<const std::int64_t> rows) {
  MatmulResult result;
  for (std::int64_t row : rows) {
    const auto of_row = std::find_if(groups.begin(), groups.end(),
                                     [&](Range group) { return group.begin <= row && row < group.end; });
    const std::int64_t group = of_row - groups.begin();
    if (of_row == groups.end()) {
      result.c.insert(result.c.end(), static_cast<std::size_t>(n), 0.0);
      result.magnitude.insert(result.magnitude.end(), static_cast<std::size_t>(n), 0.0);
      continue;
    }
    ConstTensor row_bias;
    if (bias.given()) {
      const std::int64_t first = group * bias.stride(0);
      row_bias = bias;
      row_bias.data = static_cast<const char*>(bias.data) + first * SizeOf(bias.dtype);
      row_bias.rank = 1, row_bias.sizes[0] = n, row_bias.strides[0] = bias.stride(1);
    }
    const std::int64_t one[] = {row};
    const MatmulResult product = Matmul(x, false, weights(group), transpose_weights, row_bias, one);
    result.c.insert(result.c.end(), product.c.begin(), product.c.end());
    result.magnitude.insert(result.magnitude.end(), product.magnitude.begin(), product.magnitude.end());
  }
  return result;
}

MatmulResult GroupedMatmul(ConstTensor x, std::span<const Range> groups, const WeightsOf& weights,
                           bool transpose_weights, std::int64_t n, ConstTensor bias) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(x.size(0)));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  return GroupedMatmul(x, groups, weights, transpose_weights, n, bias, rows);
}

MatmulResult GroupedMatmulGradWeights(ConstTensor x, ConstTensor dy, Range group, ConstTensor start,
                                      std::span<const std::int64_t> rows) {
  const std::int64_t n = dy.size(1);
  MatmulResult result;
  for (std::int64_t p : rows) {
    for (std::int64_t j = 0; j < n; ++j) {
      const double first =
          start.given() ? LoadFloat(start.data, start.dtype, p * start.stride(0) + j * start.stride(1)) : 0.0;
      double sum = first, magnitude = std::abs(first);
      for (std::int64_t i = group.begin; i < group.end; ++i) {
        const double product =
            static_cast<double>(LoadFloat(x.data, x.dtype, i * x.stride(0) + p * x.stride(1))) *
            LoadFloat(dy.data, dy.dtype, i * dy.stride(0) + j * dy.stride(1));
        sum += product;
        magnitude += std::abs(product);
      }
      result.c.push_back(sum);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

}  // namespace cubist::reference
