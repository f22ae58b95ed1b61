#include "kernels/token_permute_arguments.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace cubist {
namespace {

// Whether all of `count` adjacent values lie in [least, limit).
template <class Int>
bool AllWithin(const void* data, std::int64_t count, std::int64_t least, std::int64_t limit) {
  using Word = std::make_unsigned_t<Int>;
  constexpr std::int64_t kBlock = 4096, kMost = std::numeric_limits<Int>::max();
  const auto* values = static_cast<const Word*>(data);
  if (count > 0 && (least < std::numeric_limits<Int>::min() || least > kMost || limit <= least)) return false;
  // Shifted so that the first is the least of all integers, one comparison tells; of vectors on any CPU, in blocks whose ifs
  // are sums.
  const auto first = static_cast<Word>(least), last = static_cast<Word>(std::min(limit - 1, kMost));
  const Word shift = first - static_cast<Word>(std::numeric_limits<Int>::min());
  const auto most = static_cast<Int>(last - shift);
  for (const Range block : Split(count, kBlock)) {
    Int outside = 0;
    for (std::int64_t i = block.begin; i < block.end; ++i)
      outside |= -static_cast<Int>(static_cast<Int>(values[i] - shift) > most);
    if (outside != 0) return false;
  }
  return true;
}

}  // namespace

ConstTensor AsMatrix(ConstTensor t) { return AsColumn(t); }

Status CheckTopK(const char* kernel, std::int64_t top_k) {
  return top_k >= 0 ? Status() : OptionError(kernel, "top_k", top_k, "0 or more");
}

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
    return OptionError(kernel, "rows",
                       std::string("[") + std::to_string(begin) + ", " + std::to_string(end) + ")",
                       "0 <= begin <= end <= 2^31 - 1");
  }
  return CheckShape(rows, {{"rows, end - begin", window->size()}, {"H"}});
}

Status CheckRoutingMap(const Argument& map, Dim tokens, Dim experts, std::int64_t top_k) {
  CUBIST_RETURN_IF_ERROR(CheckShape(map, {tokens, experts}));
  CUBIST_RETURN_IF_ERROR(CheckDType(map, {DType::kBool}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(map, /*needs_data=*/true));
  const ConstTensor& t = map.tensor;
  if (top_k < 0 || top_k > t.size(1)) {
    return OptionError(map.kernel, "top_k", top_k,
                       "0 to " + std::to_string(t.size(1)) + ", the columns of " + map.name);
  }
  const auto* flags = static_cast<const std::uint8_t*>(t.data);
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    std::int64_t set = 0;
    for (std::int64_t j = 0; j < t.size(1); ++j) set += flags[i * t.stride(0) + j * t.stride(1)] != 0 ? 1 : 0;
    if (set > top_k) {
      return map.Error("has " + std::to_string(set) + " experts set in row " + std::to_string(i) +
                       ", top_k allows " + std::to_string(top_k));
    }
  }
  return {};
}

std::vector<std::int64_t> SlotsOfExperts(const ConstTensor& topk_ids, const ConstTensor& routing_map,
                                         std::int64_t experts) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(experts));
  const bool mapped = routing_map.given();
  const ConstTensor t = mapped ? routing_map : AsMatrix(topk_ids);
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    for (std::int64_t j = 0; j < t.size(1); ++j) {
      const std::int64_t value = LoadInt(t.data, t.dtype, i * t.stride(0) + j * t.stride(1));
      const std::int64_t expert = !mapped ? value : value != 0 ? j : -1;
      if (expert >= 0) ++slots[static_cast<std::size_t>(expert)];
    }
  }
  return slots;
}

Status CheckDistinctRows(const Argument& indices, std::int64_t first, std::int64_t rows,
                         std::int64_t* missing) {
  const ConstTensor& t = indices.tensor;
  *missing = rows;
  std::vector<bool> seen(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    const std::int64_t index = LoadInt(t.data, t.dtype, i * t.stride(0)), row = index - first;
    if (row < 0 || row >= rows) continue;
    if (seen[static_cast<std::size_t>(row)]) {
      return indices.Error("has row " + std::to_string(index) + " a second time at (" + std::to_string(i) +
                           "), every row belongs to one slot");
    }
    seen[static_cast<std::size_t>(row)] = true;
    --*missing;
  }
  return {};
}

Status CheckBias(const Argument& bias, const Argument& topk_ids, const Argument& rows,
                 const Argument& sorted_indices, std::int64_t first_row, const Slots& slots) {
  const ConstTensor &ids = topk_ids.tensor, &sorted = sorted_indices.tensor;
  if (!bias.tensor.given() && !ids.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"E"}, {"H, of the rows", rows.tensor.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(bias, {rows.tensor.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckShape(topk_ids, {{"T", slots.tokens}, {"K", slots.top_k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(topk_ids, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(topk_ids, /*needs_data=*/true));
  const std::int64_t count = bias.tensor.size(0);
  for (std::int64_t t = 0; t < slots.tokens; ++t) {
    for (std::int64_t j = 0; j < slots.top_k; ++j) {
      const std::int64_t row =
          LoadInt(sorted.data, sorted.dtype, (t * slots.top_k + j) * sorted.stride(0)) - first_row;
      if (row < 0 || row >= rows.tensor.size(0)) continue;
      const std::int64_t id = LoadInt(ids.data, ids.dtype, t * ids.stride(0) + j * ids.stride(1));
      if (id >= 0 && id < count) continue;
      return topk_ids.Error("has " + std::to_string(id) + " at (" + std::to_string(t) + ", " +
                            std::to_string(j) + "), a slot with a row needs values in [0, " +
                            std::to_string(count) + "), the rows of bias");
    }
  }
  return {};
}

}  // namespace cubist
