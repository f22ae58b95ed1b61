// Comparison: how far results are from the reference, against the bound of each element.
#ifndef CUBIST_TOOLS_COMPARISON_H_
#define CUBIST_TOOLS_COMPARISON_H_

#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/types.h"

namespace cubist {

struct Comparison {
  // The element that comes closest to its bound, or exceeds it by most.
  double ratio = 0, error = 0, bound = 0;
  std::int64_t elements = 0, beyond = 0;  // compared; beyond their bounds
  std::int64_t rows = 0, all_rows = 0;    // compared, and there
  std::string first_beyond;               // "element 17 of row 3 is .., expected .. +- .."

  bool ok() const { return beyond == 0; }

  // NaN matches NaN, an infinity itself; a result that overflows the dtype matches where value and bound
  // reach beyond its largest number.
  void Add(double actual, double expected, double element_bound, DType dtype, std::int64_t row,
           std::int64_t element);
  void Merge(const Comparison& other);
};

// `wanted` different rows of `total`, ascending, the first and the last among them from two on; all rows
// where wanted >= total.
std::vector<std::int64_t> SampleRows(std::int64_t total, std::int64_t wanted, std::uint64_t key);

}  // namespace cubist

#endif  // CUBIST_TOOLS_COMPARISON_H_
