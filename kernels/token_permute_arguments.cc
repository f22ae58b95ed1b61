#include "kernels/token_permute_arguments.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace cubist {
namespace {

// Whether all of `count` adjacent values lie in [least, limit).
template <class Int>
bool AllWithin(const void* data, std::int64_t count, std::int64_t least, std::int64_t limit) {
  const auto* values = static_cast<const Int*>(data);
  Int smallest = std::numeric_limits<Int>::max(), largest = std::numeric_limits<Int>::min();
  for (std::int64_t i = 0; i < count; ++i) {
    smallest = std::min(smallest, values[i]), largest = std::max(largest, values[i]);
  }
  return count == 0 || (smallest >= least && largest < limit);
}

}  // namespace

ConstTensor AsMatrix(ConstTensor t) { return AsColumn(t); }

Status CheckValues(const Argument& arg, std::int64_t least, std::int64_t limit) {
  const ConstTensor t = AsMatrix(arg.tensor);
  const bool adjacent = t.stride(1) == 1 && (t.stride(0) == t.size(1) || t.size(0) <= 1);
  if (adjacent && t.dtype == DType::kI32 && AllWithin<std::int32_t>(t.data, t.count(), least, limit))
    return {};
  if (adjacent && t.dtype == DType::kI64 && AllWithin<std::int64_t>(t.data, t.count(), least, limit))
    return {};
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    for (std::int64_t j = 0; j < t.size(1); ++j) {
      const std::int64_t value = LoadInt(t.data, t.dtype, i * t.stride(0) + j * t.stride(1));
      if (value >= least && value < limit) continue;
      const std::string where =
          arg.tensor.rank == 1 ? std::to_string(i) : std::to_string(i) + ", " + std::to_string(j);
      return arg.Error("has " + std::to_string(value) + " at (" + where + "), needs values in [" +
                       std::to_string(least) + ", " + std::to_string(limit) + ")");
    }
  }
  return {};
}

Status CheckSlots(const Argument& arg, std::int64_t tokens, std::int64_t top_k) {
  std::int64_t slots = 0;
  if (__builtin_mul_overflow(tokens, top_k, &slots) || slots > std::numeric_limits<std::int32_t>::max()) {
    return arg.Error("makes " + std::to_string(tokens) + " x " + std::to_string(top_k) +
                     " slots, the limit is 2^31 - 1");
  }
  return {};
}

Status CheckWindow(const char* kernel, const std::optional<Range>& window, const Argument& rows) {
  if (!window.has_value()) return {};
  constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
  const auto [begin, end] = *window;
  if (begin < 0 || end < begin || end > kLimit) {
    return InvalidArgument(std::string(kernel) + ": rows is [" + std::to_string(begin) + ", " +
                           std::to_string(end) + "), needs 0 <= begin <= end <= 2^31 - 1");
  }
  return CheckShape(rows, {{"rows, end - begin", window->size()}, {"H"}});
}

Status CheckDistinctRows(const Argument& indices, std::int64_t first, std::int64_t rows) {
  const ConstTensor& t = indices.tensor;
  std::vector<bool> seen(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    const std::int64_t index = LoadInt(t.data, t.dtype, i * t.stride(0)), row = index - first;
    if (row < 0 || row >= rows) continue;
    if (seen[static_cast<std::size_t>(row)]) {
      return indices.Error("has row " + std::to_string(index) + " a second time at (" + std::to_string(i) +
                           "), every row belongs to one slot");
    }
    seen[static_cast<std::size_t>(row)] = true;
  }
  return {};
}

}  // namespace cubist
