// The router's instructions, compiled once per Highway target.
#include "npu_model/host/routing_ops.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/routing_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                             // IWYU pragma: keep
#include "npu_model/host/top_k-inl.h"
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

void SelectLe(const Rows& dst, const Rows& key, float limit, const Rows& a, const Rows& b) {
  const bool column = b.cols == 1 && a.cols != 1;
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    const float *keys = RowOf(key, i), *first = RowOf(a, i), *second = RowOf(b, i);
    float* out = RowOf(dst, i);
    const float for_all = a.cols > 0 ? *second : 0;  // Read before dst may take its place.
    const auto select = [&](Vec k, Vec x, Vec y)
                            HWY_ATTR { return hn::IfThenElse(hn::Le(k, Set(limit)), x, y); };
    std::int64_t j = 0;
    for (; j + kLanes <= dst.cols; j += kLanes) {
      const Vec other = column ? Set(for_all) : Load(second + j);
      Store(select(Load(keys + j), Load(first + j), other), out + j);
    }
    const std::int64_t rest = dst.cols - j;
    if (rest == 0) continue;
    const Vec other = column ? Set(for_all) : Load(second + j, rest);
    Store(select(Load(keys + j, rest), Load(first + j, rest), other), out + j, rest);
  }
}

// ---- Groups

// The two highest of what a lane, or all of them, stand for.
struct TwoHighest {
  Vec high, next;  // -inf at first

  HWY_INLINE void Add(Vec v) {
    next = hn::Max(next, hn::Min(high, v));
    high = hn::Max(high, v);
  }
  HWY_INLINE void Merge(Vec other_high, Vec other_next) {
    next = hn::Max(hn::Min(high, other_high), hn::Max(next, other_next));
    high = hn::Max(high, other_high);
  }
};

// The two highest of each lane's elements.
HWY_INLINE TwoHighest LanesOf(const float* a, std::int64_t n) {
  if (n < 2 * kLanes) {
    TwoHighest lanes{Set(-kInfinity), Set(-kInfinity)};
    ForEachVector(a, n, -kInfinity, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { lanes.Add(v); });
    return lanes;
  }
  const Vec v0 = Load(a), v1 = Load(a + kLanes);
  TwoHighest lanes{hn::Max(v0, v1), hn::Min(v0, v1)};
  const std::int64_t rest = n - 2 * kLanes;
  ForEachVector(a + 2 * kLanes, rest, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { lanes.Add(v); });
  return lanes;
}

// Walks the parts of a matrix row by row: `parts` of `width` elements in each.
template <class T>
struct Parts {
  T* at;
  std::int64_t width, parts, to_next_row;
  std::int64_t part = 0;

  Parts(const Rows& x, std::int64_t part_width, std::int64_t row_parts)
      : at(RowAs<T>(x, 0)), width(part_width), parts(row_parts), to_next_row(x.pitch - (parts - 1) * width) {}
  HWY_INLINE T* Next() {
    T* const here = at;
    const bool last = ++part == parts;
    at += last ? to_next_row : width;
    if (last) part = 0;
    return here;
  }
};

// The two highest of each of the next `count` <= kLanes parts, a part in each lane.
HWY_INLINE TwoHighest TwoHighestOf(Parts<const float>& parts, std::int64_t count) {
#if HWY_TARGET <= HWY_AVX3
  const FloatTag d;
  const hn::Repartition<double, FloatTag> d64;
  TwoHighest t[kLanes];
#pragma GCC unroll 1
  for (std::int64_t p = 0; p < kLanes; ++p) t[p] = p < count ? LanesOf(parts.Next(), parts.width) : t[0];
  // Half of the lanes of two, and the other half of them, until one has a lane of each part.
  const auto merge = [](const TwoHighest& x, const TwoHighest& y, auto some, auto others) HWY_ATTR {
    TwoHighest both{some(x.high, y.high), some(x.next, y.next)};
    both.Merge(others(x.high, y.high), others(x.next, y.next));
    return both;
  };
  const auto wide = [&](Vec v) HWY_ATTR { return hn::BitCast(d64, v); };
#pragma GCC unroll 8
  for (int p = 0; p < 8; ++p) {
    t[p] = merge(
        t[2 * p], t[2 * p + 1], [&](Vec x, Vec y) HWY_ATTR { return hn::InterleaveLower(d, x, y); },
        [&](Vec x, Vec y) HWY_ATTR { return hn::InterleaveUpper(d, x, y); });
  }
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p) {
    t[p] = merge(
        t[2 * p], t[2 * p + 1],
        [&](Vec x, Vec y) HWY_ATTR { return hn::BitCast(d, hn::InterleaveLower(d64, wide(x), wide(y))); },
        [&](Vec x, Vec y) HWY_ATTR { return hn::BitCast(d, hn::InterleaveUpper(d64, wide(x), wide(y))); });
  }
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    t[p] = merge(
        t[p], t[p + 2], [&](Vec x, Vec y) HWY_ATTR { return hn::ConcatLowerLower(d, y, x); },
        [&](Vec x, Vec y) HWY_ATTR { return hn::ConcatUpperUpper(d, y, x); });
  }
  return merge(
      t[0], t[1], [&](Vec x, Vec y) HWY_ATTR { return hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y), x); },
      [&](Vec x, Vec y) HWY_ATTR { return hn::OddEvenBlocks(y, hn::SwapAdjacentBlocks(x)); });
#else
  const FloatTag d;
  HWY_ALIGN float high[kLanes] = {}, next[kLanes] = {};
  for (std::int64_t p = 0; p < count; ++p) {
    const TwoHighest lanes = LanesOf(parts.Next(), parts.width);
    high[p] = ExtremeLane</*kMinimum=*/false>(lanes.high);
    const auto is_first = hn::Eq(lanes.high, Set(high[p]));
    // The highest stands in one lane or in several; with one, what is second in its lane takes part.
    next[p] = hn::CountTrue(d, is_first) > 1
                  ? high[p]
                  : ExtremeLane</*kMinimum=*/false>(hn::IfThenElse(is_first, lanes.next, lanes.high));
  }
  return {hn::Load(d, high), hn::Load(d, next)};
#endif
}

// The highest of each part, or the sum of its two highest where the second is more than -inf.
void TopTwoOfGroups(const Rows& sums, const Rows& a, bool both) {
  const Vec none = Set(both ? -kInfinity : kInfinity);
  const std::int64_t groups = sums.cols, all = a.rows * groups;
  Parts<const float> parts(a, a.cols / groups, groups);
  Parts<float> worths(sums, 1, groups);
  HWY_ALIGN float lanes[kLanes];
  for (std::int64_t p = 0; p < all; p += kLanes) {
    const std::int64_t count = Min(all - p, kLanes);
    const TwoHighest t = TwoHighestOf(parts, count);
    Store(hn::IfThenElse(hn::Gt(t.next, none), hn::Add(t.high, t.next), t.high), lanes);
    for (std::int64_t l = 0; l < count; ++l) *worths.Next() = lanes[l];
  }
}

void GroupTop(const Rows& sums, const Rows& a, std::int64_t count) {
  if (count <= 2) return TopTwoOfGroups(sums, a, count == 2);
  const std::int64_t width = a.cols / sums.cols;
  std::vector<float> part(static_cast<std::size_t>(width));
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t g = 0; g < sums.cols; ++g) {
      const float* from = RowOf(a, i) + g * width;
      float& sum = RowOf(sums, i)[g];
      part.assign(from, from + width);
      std::partial_sort(part.begin(), part.begin() + count, part.end(), std::greater<>());
      sum = part[0];
      for (std::size_t j = 1; j < static_cast<std::size_t>(count) && part[j] > -kInfinity; ++j)
        sum += part[j];
    }
  }
}

// -inf in the parts of `cols` columns of row i that bits of `gone` stand for, the first for the one at column `from`.
HWY_INLINE void DropParts(const Rows& a, std::int64_t i, std::uint64_t gone, std::int64_t from,
                          std::int64_t cols) {
  for (; gone != 0; gone &= gone - 1) {
    const std::int64_t begin = from + __builtin_ctzll(gone) * cols, count = Min(cols, a.cols - begin);
    float* const part = RowOf(a, i) + begin;
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) Store(Set(-kInfinity), part + j);
    if (j < count) Store(Set(-kInfinity), part + j, count - j);
  }
}

// As many groups go from one row as from another, which the processor learns; which ones is any row's guess.
void KeepGroups(const Rows& a, const Rows& ids, std::int64_t group_cols) {
  constexpr std::int64_t kBits = 64;
  const std::int64_t groups = (a.cols + group_cols - 1) / group_cols, words = (groups + kBits - 1) / kBits;
  const std::uint64_t all = ~std::uint64_t{0}, last = all >> (words * kBits - groups);
  std::vector<std::uint64_t> gone(static_cast<std::size_t>(words > 1 ? words : 0));
  for (std::int64_t i = 0; i < a.rows; ++i) {
    const auto* id = RowAs<std::int32_t>(ids, i);
    const auto for_ids = [&](auto visit) {
      for (std::int64_t j = 0; j < ids.cols; ++j) {
        if (id[j] >= 0 && id[j] < groups) visit(id[j] / kBits, std::uint64_t{1} << (id[j] % kBits));
      }
    };
    if (words == 1) {
      std::uint64_t kept = 0;
      for_ids([&](std::int64_t, std::uint64_t bit) { kept |= bit; });
      DropParts(a, i, last & ~kept, 0, group_cols);
      continue;
    }
    std::fill(gone.begin(), gone.end(), all);
    gone.back() = last;
    for_ids([&](std::int64_t word, std::uint64_t bit) { gone[static_cast<std::size_t>(word)] &= ~bit; });
    for (std::int64_t w = 0; w < words; ++w)
      DropParts(a, i, gone[static_cast<std::size_t>(w)], w * kBits * group_cols, group_cols);
  }
}

// ---- Repair

void Repair(const Rows& x, const Rows& bad, float limit, bool by_mean) {
  const FloatTag d;
  const Vec most = Set(limit);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    float* row = RowOf(x, i);
    auto all_good = hn::Le(Set(0.0f), most);
    ForEachVector(row, x.cols, 0.0f, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR {
      all_good = hn::And(all_good, hn::Le(hn::Abs(v), most));
    });
    *RowOf(bad, i) = 0;
    if (hn::AllTrue(d, all_good)) continue;
    std::int64_t good = 0;
    ForEachVector(row, x.cols, kInfinity, [&](Vec v, std::int64_t, std::int64_t count) HWY_ATTR {
      const auto valid = hn::And(hn::Le(hn::Abs(v), most), hn::FirstN(d, static_cast<std::size_t>(count)));
      good += static_cast<std::int64_t>(hn::CountTrue(d, valid));
    });
    *RowOf(bad, i) = static_cast<float>(x.cols - good);
    Vec sum = Set(0.0f);
    ForEachVector(row, x.cols, 0.0f, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR {
      sum = hn::Add(sum, hn::IfThenElseZero(hn::Le(hn::Abs(v), most), v));
    });
    const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(Max(good, 1));
    const Vec instead = Set(by_mean ? mean : 0.0f);
    ForEachVector(row, x.cols, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
      StoreCount(hn::IfThenElse(hn::Le(hn::Abs(v), most), v, instead), row + j, count);
    });
  }
}

}  // namespace

const RoutingOps* GetRoutingOps() {
  static constexpr RoutingOps kOps{.select_le = &SelectLe,
                                   .top_k = &TopK,
                                   .group_top = &GroupTop,
                                   .keep_groups = &KeepGroups,
                                   .repair = &Repair};
  return &kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetRoutingOps);
const RoutingOps& BestRoutingOps() { return *HWY_DYNAMIC_DISPATCH(GetRoutingOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
