// ShortList: the few tilings among which a closed-form price leaves the choice open. It errs by several per cent, but alike
// for tilings of one kind: the cheapest of each stands for all of it.
#ifndef CUBIST_TILING_SHORT_LIST_H_
#define CUBIST_TILING_SHORT_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "npu_model/chip.h"

namespace cubist {

// Tilings by price: the cheapest first, of equals the first in `tilings`.
template <class Tiling>
class PricedTilings {
 public:
  // for_each(count, body) calls body(0) .. body(count - 1), on any threads.
  template <class Shape, class ForEach>
  PricedTilings(const ChipSpec& chip, const Shape& shape, std::vector<Tiling> tilings,
                const ForEach& for_each)
      : tilings_(std::move(tilings)), order_(tilings_.size()) {
    constexpr std::size_t kPart = 1024;  // Neighbours share much of what their prices stand on (memo.h).
    for_each((order_.size() + kPart - 1) / kPart, [&](std::size_t part) {
      const std::size_t end = std::min((part + 1) * kPart, order_.size());
      for (std::size_t i = part * kPart; i < end; ++i) order_[i] = {Price(chip, shape, tilings_[i]), i};
    });
    std::sort(order_.begin(), order_.end());
  }

  std::size_t size() const { return order_.size(); }
  double price(std::size_t i) const { return order_[i].first; }
  const Tiling& operator[](std::size_t i) const { return tilings_[order_[i].second]; }

 private:
  std::vector<Tiling> tilings_;
  std::vector<std::pair<double, std::size_t>> order_;
};

// How many tilings are looked at closely, how much dearer than the cheapest they may be, and how much work in all; the
// cheapest of no more work than `alone` has one beside it all the same.
struct ShortListLimits {
  std::size_t count = 0;
  double dearest = 1.25;
  std::int64_t work = 0, alone = 0;
};

// The cheapest of each kind that `allow` allows, the cheapest kind first. The first is on the list whatever its work.
template <class Tiling, class KindOf, class WorkOf, class Allow>
std::vector<Tiling> ShortList(const PricedTilings<Tiling>& tilings, const ShortListLimits& limits,
                              KindOf kind_of, WorkOf work_of, Allow allow) {
  std::set<std::decay_t<decltype(kind_of(tilings[0]))>> kinds;
  std::vector<Tiling> list;
  std::int64_t work = 0;
  const std::int64_t least = work_of(tilings[0]);
  const std::int64_t most = std::max(limits.work, least <= limits.alone ? 2 * least : 0);
  for (std::size_t i = 0; i < tilings.size() && list.size() < limits.count; ++i) {
    if (tilings.price(i) > limits.dearest * tilings.price(0)) break;
    const Tiling& tiling = tilings[i];
    if (!allow(tiling) || !kinds.insert(kind_of(tiling)).second) continue;
    work += work_of(tiling);
    if (work > most && !list.empty()) break;
    list.push_back(tiling);
  }
  return list;
}

}  // namespace cubist

#endif  // CUBIST_TILING_SHORT_LIST_H_
