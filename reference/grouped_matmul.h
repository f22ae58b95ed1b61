// GroupedMatmul, naively: what the kernel's answer is measured against.
#ifndef CUBIST_REFERENCE_GROUPED_MATMUL_H_
#define CUBIST_REFERENCE_GROUPED_MATMUL_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "npu_model/types.h"
#include "reference/matmul.h"

namespace cubist::reference {

// The rows of each group. `groups` (E) holds how many rows each has, or with `ends` the row after its last; a group
// begins where the one before it ends, the first at row 0.
std::vector<Range> GroupRows(ConstTensor groups, bool ends);

// The weights of group g as a matrix.
using WeightsOf = std::function<ConstTensor(std::int64_t group)>;

// out(i, j) = bias(g, j) + sum over p of x(i, p) * w_g(p, j), g the group of row i, in double, for the given rows i;
// 0 in rows of no group.
//   x (M, K);  w_g (K, N), or (N, K) with transpose_weights;  bias (E, N), or not given
MatmulResult GroupedMatmul(ConstTensor x, std::span<const Range> groups, const WeightsOf& weights,
                           bool transpose_weights, std::int64_t n, ConstTensor bias,
                           std::span<const std::int64_t> rows);

// The same for every row.
MatmulResult GroupedMatmul(ConstTensor x, std::span<const Range> groups, const WeightsOf& weights,
                           bool transpose_weights, std::int64_t n, ConstTensor bias);

// dw(p, j) = start(p, j) + sum over the rows i of the group of x(i, p) * dy(i, j): (K, N), for the given rows p of dw.
// `start` (K, N) is what is accumulated onto, or not given.
MatmulResult GroupedMatmulGradWeights(ConstTensor x, ConstTensor dy, Range group, ConstTensor start,
                                      std::span<const std::int64_t> rows);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_GROUPED_MATMUL_H_
