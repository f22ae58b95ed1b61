// What cases of all kernels share: their traffic, and how parts of a result are compared.
#ifndef CUBIST_TOOLS_CASE_CHECKS_H_
#define CUBIST_TOOLS_CASE_CHECKS_H_

#include <cstdint>
#include <vector>

#include "npu_model/parallel.h"
#include "npu_model/types.h"
#include "tools/cases.h"
#include "tools/comparison.h"

namespace cubist {

inline double At(const ConstTensor& x, std::int64_t i) { return LoadFloat(x.data, x.dtype, i * x.stride(0)); }
inline double At(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}

// Merges compare(0) .. compare(count - 1), in order, over all threads.
template <class Compare>
Comparison CompareParts(std::int64_t count, const Compare& compare) {
  return ReduceParts(
      count, 1, Comparison{}, [&](std::int64_t i, std::int64_t) { return compare(i); },
      [](Comparison a, const Comparison& b) {
        a.Merge(b);
        return a;
      });
}

inline double BytesOf(const std::vector<TensorSpec>& tensors) {
  double bytes = 0;
  for (const TensorSpec& spec : tensors) bytes += static_cast<double>(BytesOf(spec.dtype, spec.shape));
  return bytes;
}

// With every input and output element read or written once.
inline Case WithTraffic(Case c) {
  c.bytes_read = BytesOf(c.inputs);
  c.bytes_written = BytesOf(c.outputs);
  return c;
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_CASE_CHECKS_H_
