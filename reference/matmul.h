// Matmul, naively: what the kernel's answer is measured against.
#ifndef CUBIST_REFERENCE_MATMUL_H_
#define CUBIST_REFERENCE_MATMUL_H_

#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/types.h"

namespace cubist::reference {

// Row-major (rows, N).
struct MatmulResult {
  std::vector<double> c;
  std::vector<double>
      magnitude;  // |bias(j)| + sum over p of |a(i, p)| * |b(p, j)|, which error bounds are made of
};

// c(i, j) = bias(j) + sum over p of a(i, p) * b(p, j), in double, for the given rows i.
//   a (M, K), or (K, M) with transpose_a;  b (K, N), or (N, K) with transpose_b;  bias (N), or not given
MatmulResult Matmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b, ConstTensor bias,
                    std::span<const std::int64_t> rows);

// The same for every row.
MatmulResult Matmul(ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b, ConstTensor bias);

// How far each element of a kernel's c may be from the reference's; see MatmulBound in bounds.h.
std::vector<double> MatmulBounds(const MatmulResult& result, std::int64_t k, DType input, DType output);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_MATMUL_H_
