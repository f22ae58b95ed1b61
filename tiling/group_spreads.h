// GroupSpreads: the ways in which a batch's rows may be spread over its groups, for which a grouped product has a tiling each.
#ifndef CUBIST_TILING_GROUP_SPREADS_H_
#define CUBIST_TILING_GROUP_SPREADS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/types.h"

namespace cubist {

// Who launches a grouped product knows the sum of its groups' rows, and its cores what each of them has. So a tiling is chosen for
// every spread, and the cores take that of their batch. A spread is of batches that are about as uneven, by the sum of the squares of
// their rows, whatever the order of their groups; one of each law stands for it.
class GroupSpreads {
 public:
  // In the first spread all groups have as many rows. In the others the n-th in size has n^-power of what the largest has, or always
  // the same part of what the one before it has, such that the batch is as uneven.
  static constexpr std::array<double, 9> kPowers{0, 0.1, 0.25, 0.5, 0.75, 1, 1.3, 1.7, 2.5};
  enum class Law { kPower, kDecay };
  static constexpr std::size_t kCount = kPowers.size();

  explicit GroupSpreads(std::int64_t groups) : groups_(groups) {
    std::array<double, kCount> unevenness;
    for (std::size_t spread = 0; spread < kCount; ++spread) unevenness[spread] = UnevennessOf(spread);
    std::int64_t bound = 0;
    for (std::size_t i = 0; i < bounds_.size(); ++i) {
      const double between = i == 0 ? kEven : std::sqrt(unevenness[i] * unevenness[i + 1]);
      bounds_[i] = bound = std::max<std::int64_t>(bound, std::llround(kOne * between));
    }
  }

  // Of `all` rows those of each group, large and small ones mixed.
  std::vector<std::int64_t> RowsOf(std::size_t spread, Law law, std::int64_t all) const {
    const bool decays = law == Law::kDecay && spread > 0;
    const double decay = decays ? DecayOf(UnevennessOf(spread)) : 0;
    const auto share_of = [&](std::int64_t rank) {
      return decays ? std::exp(-decay * static_cast<double>(rank)) : PowerShare(spread, rank);
    };
    double shares = 0;
    for (std::int64_t i = 0; i < groups_; ++i) shares += share_of(i);
    std::vector<std::int64_t> rows(static_cast<std::size_t>(groups_));
    std::int64_t left = all;
    for (std::int64_t i = 0; i < groups_; ++i) {
      const double part = static_cast<double>(all) * share_of(i) / shares;
      left -= rows[PlaceOf(i)] = std::min(static_cast<std::int64_t>(part), left);
    }
    for (std::int64_t i = 0; i < std::min(left, groups_); ++i) ++rows[PlaceOf(i)];
    return rows;
  }

  // The spread of a batch, in integers, as a scalar unit has them. Call Add for every group's rows before.
  class Meter {
   public:
    // `all`: at least the sum of what will be added.
    explicit Meter(std::int64_t all) {
      while (all >> shift_ > kMostSum) ++shift_;
    }
    void Add(std::int64_t rows) {
      const std::int64_t part = rows >> shift_;
      sum_ += part, squares_ += part * part;
    }
    std::size_t SpreadBy(const GroupSpreads& spreads) const {
      const std::int64_t square = std::max<std::int64_t>(sum_ * sum_, 1),
                         squares = std::min(spreads.groups_, kMostSum) * squares_,
                         unevenness = squares / square * kOne + squares % square * kOne / square;
      return static_cast<std::size_t>(
          std::upper_bound(spreads.bounds_.begin(), spreads.bounds_.end(), unevenness) -
          spreads.bounds_.begin());
    }

   private:
    std::int64_t sum_ = 0, squares_ = 0;
    int shift_ = 0;
  };

 private:
  static constexpr std::int64_t kOne = 1024, kMostSum = 1 << 20;  // Of which products do not overflow.
  static constexpr double kEven = 1.001;                          // A standard deviation of 3 % of the mean.

  static double PowerShare(std::size_t spread, std::int64_t rank) {
    return std::pow(static_cast<double>(rank + 1), -kPowers[spread]);
  }
  // Groups times the sum of their rows' squares over that of their rows, squared: 1 for even ones.
  double UnevennessOf(std::size_t spread) const {
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < groups_; ++i) {
      const double share = PowerShare(spread, i);
      sum += share, squares += share * share;
    }
    return groups_ == 0 ? 1 : static_cast<double>(groups_) * squares / (sum * sum);
  }
  // The d of shares e^(-d rank) that are so uneven: groups * tanh(d / 2) / tanh(groups * d / 2), which grows with d.
  double DecayOf(double unevenness) const {
    const auto groups = static_cast<double>(groups_);
    double low = 1e-9, high = 64;
    for (int i = 0; i < 64; ++i) {
      const double middle = std::sqrt(low * high);
      const double met = groups * std::tanh(middle / 2) / std::tanh(groups * middle / 2);
      (met < unevenness ? low : high) = middle;
    }
    return low;
  }
  // Of the group that is `rank`-th in size: first the odd places, then the even ones backwards.
  std::size_t PlaceOf(std::int64_t rank) const {
    const std::int64_t first = CeilDiv(groups_, 2);
    return static_cast<std::size_t>(rank < first ? 2 * rank : 2 * (groups_ - 1 - rank) + 1);
  }

  std::int64_t groups_;
  std::array<std::int64_t, kCount - 1> bounds_{};
};

}  // namespace cubist

#endif  // CUBIST_TILING_GROUP_SPREADS_H_
