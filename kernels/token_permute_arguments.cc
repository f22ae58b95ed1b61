#include "kernels/token_permute_arguments.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
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

std::string TextOf(const Range& range) {
  return std::string("[") + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
}

// What row_tokens need, but dtype and data.
Status CheckRowTokens(const Places& places, std::int64_t experts) {
  const auto& [sorted, tokens, map, rows, capacity, window] = places;
  if (sorted.tensor.given()) return tokens.Error("and sorted_indices are both given, needs one of them");
  if (map.tensor.given()) return map.Error("is given with row_tokens, which say where tokens go");
  if (capacity < 1 || capacity > std::numeric_limits<std::int32_t>::max())
    return OptionError(tokens.kernel, "capacity", capacity, "1 to 2^31 - 1 with row_tokens");
  CUBIST_RETURN_IF_ERROR(CheckSlots(tokens, experts, capacity));
  const std::int64_t all = experts * capacity;
  if (!window.has_value()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(rows, {{"M, experts * capacity", all}, {"H"}}));
  } else if (window->end > all) {
    return OptionError(tokens.kernel, "rows", TextOf(*window),
                       "an end of at most experts * capacity = " + std::to_string(all));
  }
  return CheckShape(tokens, {{"M", rows.tensor.size(0)}});
}

// A token stands once among the rows of an expert; `missing` is how many rows have none.
Status CheckDistinctTokens(const Places& places, std::int64_t tokens, std::int64_t* missing) {
  const ConstTensor& t = places.row_tokens.tensor;
  std::vector<std::int64_t> last_expert(static_cast<std::size_t>(tokens), -1);
  *missing = 0;
  for (std::int64_t r = 0; r < t.size(0); ++r) {
    const std::int64_t token = LoadInt(t.data, t.dtype, r * t.stride(0)),
                       expert = (places.rows_here().begin + r) / places.capacity;
    if (token < 0) {
      ++*missing;
    } else if (std::exchange(last_expert[static_cast<std::size_t>(token)], expert) == expert) {
      return places.row_tokens.Error("has token " + std::to_string(token) + " a second time at (" +
                                     std::to_string(r) + "), an expert has one row of a token");
    }
  }
  return {};
}

}  // namespace

ConstTensor AsMatrix(ConstTensor t) { return AsColumn(t); }

Status CheckTopK(const char* kernel, std::int64_t top_k) {
  return top_k >= 0 ? Status() : OptionError(kernel, "top_k", top_k, "0 or more");
}

std::int64_t SlotsPerToken(const Places& places, const ConstTensor& values, std::int64_t top_k) {
  if (!places.by_row()) return values.given() && !places.routing_map.tensor.given() ? values.size(1) : top_k;
  if (values.given()) return values.size(1);
  return places.capacity > 0 ? CeilDiv(places.rows_here().end, places.capacity) : 0;
}

Status CheckPlaces(const Places& places, const Slots& slots) {
  const Argument& given = places.by_row() ? places.row_tokens : places.sorted_indices;
  if (places.by_row()) {
    CUBIST_RETURN_IF_ERROR(CheckRowTokens(places, slots.top_k));
  } else if (places.capacity != 0) {
    return OptionError(given.kernel, "capacity", places.capacity, "0 without row_tokens");
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(given, {{"T * K", slots.tokens * slots.top_k}}));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(given, {DType::kI32}));
  return CheckStorage(given, /*needs_data=*/true);
}

Status CheckValuesOf(const Places& places, const Slots& slots, std::int64_t* missing) {
  std::int64_t unused = 0;
  if (places.by_row()) {
    CUBIST_RETURN_IF_ERROR(CheckValues(places.row_tokens, -1, slots.tokens));
    return CheckDistinctTokens(places, slots.tokens, missing != nullptr ? missing : &unused);
  }
  CUBIST_RETURN_IF_ERROR(CheckValues(places.sorted_indices, -1, std::int64_t{1} << 31));
  if (missing == nullptr) return {};
  const Range here = places.rows_here();
  return CheckDistinctRows(places.sorted_indices, here.begin, here.size(), missing);
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
    return OptionError(kernel, "rows", TextOf(*window), "0 <= begin <= end <= 2^31 - 1");
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

Status CheckBias(const Argument& bias, const Argument& topk_ids, const Places& places, const Slots& slots) {
  if (!bias.tensor.given() && !topk_ids.tensor.given()) return {};
  if (places.by_row())
    return (bias.tensor.given() ? bias : topk_ids).Error("is by slot, rows of row_tokens have none");
  const Argument& rows = places.rows;
  CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"E"}, {"H, of the rows", rows.tensor.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(bias, {rows.tensor.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckShape(topk_ids, {{"T", slots.tokens}, {"K", slots.top_k}}));
  return CheckDType(topk_ids, {DType::kI32, DType::kI64});
}

Status CheckIdsOfBias(const Argument& bias, const Argument& topk_ids, const Places& places,
                      const Slots& slots) {
  const ConstTensor &ids = topk_ids.tensor, &sorted = places.sorted_indices.tensor;
  if (!bias.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckStorage(topk_ids, /*needs_data=*/true));
  const Argument& rows = places.rows;
  const std::int64_t count = bias.tensor.size(0);
  for (std::int64_t t = 0; t < slots.tokens; ++t) {
    for (std::int64_t j = 0; j < slots.top_k; ++j) {
      const std::int64_t row = LoadInt(sorted.data, sorted.dtype, (t * slots.top_k + j) * sorted.stride(0)) -
                               places.rows_here().begin;
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
