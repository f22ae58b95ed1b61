#include "tools/generate.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "npu_model/parallel.h"

namespace cubist {
namespace {

// The finaliser of splitmix64.
std::uint64_t Mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A number below `limit`; the bias is below limit / 2^32.
std::int64_t RandomBelow(std::int64_t limit, std::uint64_t key, std::uint64_t index) {
  return static_cast<std::int64_t>((Random(key, index) >> 32) * static_cast<std::uint64_t>(limit) >> 32);
}

template <class Float>
void FillNormalAs(Float* x, std::int64_t count, float scale, std::uint64_t key) {
  ForEachPart(count, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint64_t r = Random(key, static_cast<std::uint64_t>(i));
      const auto sum =
          static_cast<std::int32_t>((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48));
      x[i] = Float(static_cast<float>(sum - 2 * 0xffff) * scale);
    }
  });
}

// Shuffles in place (Fisher and Yates).
void Shuffle(std::vector<std::int64_t>& items, std::uint64_t key, std::uint64_t first_index) {
  for (std::size_t i = items.size(); i > 1; --i) {
    std::swap(
        items[i - 1],
        items[static_cast<std::size_t>(RandomBelow(static_cast<std::int64_t>(i), key, first_index + i))]);
  }
}

// Systematic sampling (Madow 1949): the loads lie end to end on a line, and K points at equal distance W / K,
// all moved by one random offset, hit K experts, each with probability K * load / W. Distances are in units
// of 1 / K.
class RouteSampler {
 public:
  RouteSampler(std::vector<std::int64_t> loads, std::int64_t k) : loads_(std::move(loads)), points_(k) {
    // An expert longer than the distance would be hit twice: it is always chosen, and leaves the line. That
    // shortens the distance between the remaining points, so others may follow.
    for (bool changed = true; changed;) {
      changed = false;
      total_ = std::accumulate(loads_.begin(), loads_.end(), std::int64_t{0});
      const std::int64_t points = points_;
      for (std::size_t e = 0; e < loads_.size(); ++e) {
        if (loads_[e] * points <= total_) continue;
        always_.push_back(static_cast<std::int64_t>(e));
        loads_[e] = 0;
        --points_;
        changed = true;
      }
    }
  }

  // The experts of one token; `random` is a uniform 64-bit number.
  std::vector<std::int64_t> Sample(std::uint64_t random) const {
    std::vector<std::int64_t> chosen = always_;
    if (points_ == 0) return chosen;
    const auto offset = static_cast<std::int64_t>((random >> 32) * static_cast<std::uint64_t>(total_) >> 32);
    std::int64_t point = offset, reached = 0;
    for (std::size_t e = 0; e < loads_.size(); ++e) {
      reached += loads_[e] * points_;
      if (point < reached) {
        chosen.push_back(static_cast<std::int64_t>(e));
        point += total_;
      }
    }
    return chosen;
  }

 private:
  std::vector<std::int64_t> loads_, always_;
  std::int64_t points_, total_ = 0;
};

template <class Int>
void FillTopkIdsAs(Int* ids, std::int64_t tokens, std::int64_t k, const RouteSampler& sampler,
                   const std::vector<std::int64_t>& expert_of_rank, std::uint64_t key) {
  ForEachPart(tokens, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::uint64_t token_key = Random(key, static_cast<std::uint64_t>(t));
      std::vector<std::int64_t> chosen = sampler.Sample(Random(token_key, 0));
      Shuffle(chosen, token_key, 1);
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t rank = chosen[static_cast<std::size_t>(j)];
        ids[t * k + j] = static_cast<Int>(expert_of_rank[static_cast<std::size_t>(rank)]);
      }
    }
  });
}

}  // namespace

std::uint64_t StreamKey(std::uint64_t seed, std::string_view tensor_name) {
  std::uint64_t key = Mix(seed + 0x9e3779b97f4a7c15u);
  for (char c : tensor_name) key = Mix(key ^ static_cast<unsigned char>(c)) + 0x9e3779b97f4a7c15u;
  return key;
}

std::uint64_t Random(std::uint64_t key, std::uint64_t index) {
  return Mix(key + (index + 1) * 0x9e3779b97f4a7c15u);
}

void FillNormal(const Tensor& x, double deviation, std::uint64_t key) {
  // One uniform number on 0 .. 2^16 - 1 has the variance (2^32 - 1) / 12; the sum of four has four times that.
  const auto scale = static_cast<float>(deviation / std::sqrt((0x1p32 - 1) / 3));
  switch (x.dtype) {
    case DType::kBF16:
      return FillNormalAs(static_cast<BF16*>(x.data), x.count(), scale, key);
    case DType::kF16:
      return FillNormalAs(static_cast<F16*>(x.data), x.count(), scale, key);
    default:
      return FillNormalAs(static_cast<float*>(x.data), x.count(), scale, key);
  }
}

void FillProbabilities(const Tensor& probs, double sum, std::uint64_t key) {
  const std::int64_t k = probs.size(1);
  auto* p = static_cast<float*>(probs.data);
  for (std::int64_t t = 0; t < probs.size(0); ++t) {
    const auto weight = [&](std::int64_t j) {
      return static_cast<double>((Random(key, static_cast<std::uint64_t>(t * k + j)) >> 40) + 1);
    };
    double total = 0;
    for (std::int64_t j = 0; j < k; ++j) total += weight(j);
    for (std::int64_t j = 0; j < k; ++j) p[t * k + j] = static_cast<float>(sum * weight(j) / total);
  }
}

void FillRotary(const Tensor& table, double theta, bool sine) {
  const std::int64_t pairs = table.size(1);
  auto* const to = static_cast<float*>(table.data);
  ForEachPart(table.size(0), 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double frequency = std::pow(theta, -static_cast<double>(i) / static_cast<double>(pairs));
      for (std::int64_t p = begin; p < end; ++p) {
        const double angle = static_cast<double>(p) * frequency;
        to[p * pairs + i] = static_cast<float>(sine ? std::sin(angle) : std::cos(angle));
      }
    }
  });
}

std::vector<std::int64_t> ExpertLoads(Skew skew, std::int64_t experts) {
  // On a line of 16 E units, expert e is [16 e, 16 e + 16), and the parts end at 3 E, 11 E and 16 E. Loads
  // per unit are 0.60 / 3 : 0.30 / 8 : 0.10 / 5 = 80 : 15 : 8.
  const auto overlap = [](std::int64_t begin, std::int64_t end, std::int64_t from, std::int64_t to) {
    return std::max<std::int64_t>(std::min(end, to) - std::max(begin, from), 0);
  };
  std::vector<std::int64_t> loads;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t begin = 16 * e, end = begin + 16;
    loads.push_back(skew == Skew::kUniform ? 400
                                           : 80 * overlap(begin, end, 0, 3 * experts) +
                                                 15 * overlap(begin, end, 3 * experts, 11 * experts) +
                                                 8 * overlap(begin, end, 11 * experts, 16 * experts));
  }
  return loads;
}

std::vector<std::int64_t> SplitRows(const std::vector<std::int64_t>& loads, std::int64_t rows) {
  const std::int64_t total = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  std::vector<std::int64_t> split;
  std::int64_t reached = 0, given = 0;
  for (std::int64_t load : loads) {
    reached += load;
    // rows * reached / total, rounded down, in parts that do not overflow.
    const std::int64_t end = rows / total * reached + rows % total * reached / total;
    split.push_back(end - given);
    given = end;
  }
  return split;
}

void FillTopkIds(const Tensor& ids, Skew skew, std::int64_t experts, std::uint64_t key) {
  const std::int64_t tokens = ids.size(0), k = ids.size(1);
  const RouteSampler sampler(ExpertLoads(skew, experts), k);
  std::vector<std::int64_t> expert_of_rank(static_cast<std::size_t>(experts));
  std::iota(expert_of_rank.begin(), expert_of_rank.end(), std::int64_t{0});
  Shuffle(expert_of_rank, Random(key, ~std::uint64_t{0}), 0);
  if (ids.dtype == DType::kI64) {
    FillTopkIdsAs(static_cast<std::int64_t*>(ids.data), tokens, k, sampler, expert_of_rank, key);
  } else {
    FillTopkIdsAs(static_cast<std::int32_t*>(ids.data), tokens, k, sampler, expert_of_rank, key);
  }
}

}  // namespace cubist
