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
  template <class Shape>
  PricedTilings(const ChipSpec& chip, const Shape& shape, std::vector<Tiling> tilings)
      : tilings_(std::move(tilings)) {
    order_.reserve(tilings_.size());
    for (std::size_t i = 0; i < tilings_.size(); ++i) order_.emplace_back(Price(chip, shape, tilings_[i]), i);
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
