// Sorting, searching and comparing many small things: digit by digit, from where the last search ended, and as bytes.
#ifndef CUBIST_NPU_MODEL_SYNC_ORDERED_H_
#define CUBIST_NPU_MODEL_SYNC_ORDERED_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace cubist::sync {

// std::stable_sort by key(item), an int64: in time that grows with their number, and with the digits in which keys differ.
template <class T, class Key>
void SortBy(std::vector<T>& items, const Key& key) {
  constexpr std::size_t kFew = 256;
  constexpr int kDigit = 8;  // bits
  const auto before = [&](const T& x, const T& y) { return key(x) < key(y); };
  if (std::is_sorted(items.begin(), items.end(), before)) return;
  if (items.size() < kFew) return std::stable_sort(items.begin(), items.end(), before);
  const auto [first, last] = std::minmax_element(items.begin(), items.end(), before);
  const auto least = static_cast<std::uint64_t>(key(*first));
  const auto bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(key(*last)) - least));
  std::vector<T> others(items.size());
  for (int shift = 0; shift < bits; shift += kDigit) {
    const auto digit = [&](const T& item) {
      return (static_cast<std::uint64_t>(key(item)) - least) >> shift & ((1u << kDigit) - 1);
    };
    std::array<std::size_t, (1u << kDigit) + 1> begin{};
    for (const T& item : items) ++begin[digit(item) + 1];
    for (std::size_t d = 1; d < begin.size(); ++d) begin[d] += begin[d - 1];
    for (const T& item : items) others[begin[digit(item)]++] = item;
    items.swap(others);
  }
}

// Whether same(x[i], y[i]) for all i. It must be true of like bytes: only where these differ it is asked.
template <class T, class Same>
bool AllSame(const std::vector<T>& x, const std::vector<T>& y, const Same& same) {
  static_assert(std::has_unique_object_representations_v<T>);
  constexpr std::size_t kStretch = 16;
  if (x.size() != y.size()) return false;
  for (std::size_t begin = 0; begin < x.size(); begin += kStretch) {
    const std::size_t end = std::min(begin + kStretch, x.size());
    if (std::memcmp(x.data() + begin, y.data() + begin, (end - begin) * sizeof(T)) == 0) continue;
    for (std::size_t i = begin; i < end; ++i) {
      if (!same(x[i], y[i])) return false;
    }
  }
  return true;
}

// Ascending numbers, of which many are looked for, mostly near each other.
class Ascending {
 public:
  Ascending() = default;
  // Any, which are sorted, once each.
  explicit Ascending(std::vector<std::int64_t> numbers) : numbers_(std::move(numbers)) {
    SortBy(numbers_, [](std::int64_t number) { return number; });
    numbers_.erase(std::unique(numbers_.begin(), numbers_.end()), numbers_.end());
  }

  // Twice as many as are less, and 1; of one of them twice as many as are no greater.
  std::uint64_t PlaceOf(std::int64_t number) {
    constexpr std::size_t kNear = 4;
    std::size_t at = last_;
    if (at > 0 && numbers_[at - 1] >= number) at = 0;
    std::size_t end = std::min(numbers_.size(), at + kNear);
    while (at < end && numbers_[at] < number) ++at;
    if (at == end && end < numbers_.size())
      at = static_cast<std::size_t>(
          std::lower_bound(numbers_.begin() + static_cast<std::ptrdiff_t>(end), numbers_.end(), number) -
          numbers_.begin());
    last_ = at;
    return 2 * at + (at < numbers_.size() && numbers_[at] == number ? 2 : 1);
  }

 private:
  std::vector<std::int64_t> numbers_;
  std::size_t last_ = 0;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_ORDERED_H_
