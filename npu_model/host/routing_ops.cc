// The router's instructions, compiled once per Highway target.
#include "npu_model/host/routing_ops.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#define HWY_WANT_AVX3_DL
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

// The two highest of each lane's elements, of columns [begin, begin + n). highest, where not null: of the columns modulo
// kFew.
template <bool kBiased>
HWY_INLINE TwoHighest LanesOf(const Elements<kBiased>& row, std::int64_t begin, std::int64_t n,
                              float* highest) {
  TwoHighest few[kFewVectors];
  std::int64_t j = n >= 2 * kFew ? 2 * kFew : 0;
#pragma GCC unroll 4
  for (std::int64_t v = 0; v < kFewVectors; ++v) {
    few[v] = {Set(-kInfinity), Set(-kInfinity)};
    if (j == 0) continue;
    const Vec v0 = row.At(begin + v * kLanes), v1 = row.At(begin + kFew + v * kLanes);
    few[v] = {hn::Max(v0, v1), hn::Min(v0, v1)};
  }
  for (; j < n; j += kFew) {
#pragma GCC unroll 4
    for (std::int64_t v = 0; v < kFewVectors; ++v)
      few[v].Add(row.At(begin + j + v * kLanes, n - j - v * kLanes));
  }
  if (highest != nullptr) {
    for (std::int64_t v = 0; v < kFewVectors; ++v) Store(few[v].high, highest + v * kLanes);
  }
#pragma GCC unroll 4
  for (std::int64_t v = 1; v < kFewVectors; ++v) few[0].Merge(few[v].high, few[v].next);
  return few[0];
}

// Walks the groups of `width` columns of rows, group by group and row by row.
template <bool kBiased>
struct Groups {
  Elements<kBiased> row;
  std::int64_t width, groups, pitch;
  float* highest;  // Where not null, each group's highest of its columns modulo kFew are written there.
  std::int64_t group = 0;

  Groups(const Rows& a, const float* bias, std::int64_t groups, float* highest = nullptr)
      : row{RowOf(a, 0), bias}, width(a.cols / groups), groups(groups), pitch(a.pitch), highest(highest) {}
  HWY_INLINE TwoHighest Next() {
    const TwoHighest lanes = LanesOf(row, group * width, width, highest);
    if (highest != nullptr) highest += kFew;
    if (++group == groups) group = 0, row.a += pitch;
    return lanes;
  }
};

#if HWY_TARGET <= HWY_AVX2
// What stands in some lanes of two, and in the others: of each one half.
template <class Some, class Others>
HWY_INLINE TwoHighest Merged(const TwoHighest& x, const TwoHighest& y, Some some, Others others) {
  TwoHighest both{some(x.high, y.high), some(x.next, y.next)};
  both.Merge(others(x.high, y.high), others(x.next, y.next));
  return both;
}
#endif

// The two highest of each of the next `count` <= kLanes groups, a group in each lane. kAll: as many as there are lanes.
template <bool kAll, bool kBiased>
HWY_INLINE TwoHighest TwoHighestOf(Groups<kBiased>& groups, std::int64_t count) {
  const FloatTag d;
#if HWY_TARGET <= HWY_AVX2
  const hn::Repartition<double, FloatTag> d64;
  const auto wide = [&](Vec v) HWY_ATTR { return hn::BitCast(d64, v); };
  TwoHighest t[kLanes / 4], last{Set(-kInfinity), Set(-kInfinity)};
  const auto next = [&]() HWY_ATTR { return kAll || count-- > 0 ? groups.Next() : last; };
  const auto next_two = [&]() HWY_ATTR {
    const TwoHighest x = next(), y = next();
    return Merged(
        x, y, [&](Vec a, Vec b) HWY_ATTR { return hn::InterleaveLower(d, a, b); },
        [&](Vec a, Vec b) HWY_ATTR { return hn::InterleaveUpper(d, a, b); });
  };
#pragma GCC unroll 1
  for (TwoHighest& four : t) {  // Four groups in each block of four lanes.
    const TwoHighest x = next_two(), y = next_two();
    four = Merged(
        x, y,
        [&](Vec a, Vec b) HWY_ATTR { return hn::BitCast(d, hn::InterleaveLower(d64, wide(a), wide(b))); },
        [&](Vec a, Vec b) HWY_ATTR { return hn::BitCast(d, hn::InterleaveUpper(d64, wide(a), wide(b))); });
  }
  const auto halves = [&](const TwoHighest& x, const TwoHighest& y) HWY_ATTR {
    return Merged(
        x, y, [&](Vec a, Vec b) HWY_ATTR { return hn::ConcatLowerLower(d, b, a); },
        [&](Vec a, Vec b) HWY_ATTR { return hn::ConcatUpperUpper(d, b, a); });
  };
#if HWY_TARGET <= HWY_AVX3
  return Merged(
      halves(t[0], t[1]), halves(t[2], t[3]),
      [&](Vec a, Vec b) HWY_ATTR { return Vec{_mm512_shuffle_f32x4(a.raw, b.raw, 0x88)}; },
      [&](Vec a, Vec b) HWY_ATTR { return Vec{_mm512_shuffle_f32x4(a.raw, b.raw, 0xdd)}; });
#else
  return halves(t[0], t[1]);
#endif
#else
  HWY_ALIGN float high[kLanes] = {}, next[kLanes] = {};
  for (std::int64_t p = 0; p < count; ++p) {
    const TwoHighest lanes = groups.Next();
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

// The highest of each group, or the sum of its two highest where the second is more than -inf. store(worths, first, count)
// gets those of groups [first, first + count), counted over the rows.
template <bool kBiased, class Store>
HWY_INLINE void TopTwoOfGroups(Groups<kBiased> groups, std::int64_t rows, bool both, Store store) {
  const Vec none = Set(both ? -kInfinity : kInfinity);
  const std::int64_t all = rows * groups.groups;
  for (std::int64_t p = 0; p < all; p += kLanes) {
    const std::int64_t count = Min(all - p, kLanes);
    const TwoHighest t = count == kLanes ? TwoHighestOf</*kAll=*/true>(groups, count)
                                         : TwoHighestOf</*kAll=*/false>(groups, count);
    store(hn::IfThenElse(hn::Gt(t.next, none), hn::Add(t.high, t.next), t.high), p, count);
  }
}
template <bool kBiased>
void TopTwoOfGroups(const Rows& sums, const Rows& a, const float* bias, bool both) {
  HWY_ALIGN float lanes[kLanes];
  std::int64_t row = 0, group = 0;
  TopTwoOfGroups(Groups<kBiased>(a, bias, sums.cols), a.rows, both,
                 [&](Vec worths, std::int64_t, std::int64_t count) HWY_ATTR {
                   Store(worths, lanes);
                   for (std::int64_t l = 0; l < count; ++l) {
                     RowOf(sums, row)[group] = lanes[l];
                     if (++group == sums.cols) group = 0, ++row;
                   }
                 });
}

void GroupTop(const Rows& sums, const Rows& a, std::int64_t count) {
  if (count <= 2) return TopTwoOfGroups</*kBiased=*/false>(sums, a, nullptr, count == 2);
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

// ---- The highest of some groups

#if HWY_TARGET <= HWY_AVX2

// So many groups at most are sorted with a row in each lane.
constexpr std::int64_t kMostGroups = kMostTop;

// kept[r][..]: the `top` groups of row r that are worth most, of `groups` <= kMostGroups; of equals the lower one. NaN counts
// as -inf. Behind the worths there is a vector more.
HWY_INLINE void KeepBest(const float* worths, std::int64_t groups, std::int64_t top,
                         std::int32_t kept[kLanes][kMostGroups]) {
  const IntTag di;
  Vec w[kLanes], sorted[kMostGroups];
  for (std::int64_t r = 0; r < kLanes; ++r) w[r] = Load(worths + r * groups);
  Transpose(w);
  for (std::int64_t g = 0; g < kMostGroups; ++g) {
    if (g >= groups) w[g] = Set(-kInfinity);
    sorted[g] = w[g] = MaxOrSecond(w[g], Set(-kInfinity));
  }
  SortEight(sorted);
  HWY_ALIGN float bounds[kMostGroups][kLanes];
  for (std::int64_t g = 0; g < kMostGroups; ++g) Store(sorted[g], bounds[g]);
  const Vec bound = Load(bounds[top - 1]);
  // Those above the bound, and as many of those that equal it as there is room for.
  Vec room = Set(static_cast<float>(top));
  for (std::int64_t g = 0; g < groups; ++g)
    room = hn::Sub(room, hn::IfThenElseZero(hn::Gt(w[g], bound), Set(1.0f)));
  Ints bits = hn::Zero(di);
  for (std::int64_t g = 0; g < groups; ++g) {
    const auto equal = hn::And(hn::Eq(w[g], bound), hn::Gt(room, Set(0.0f)));
    room = hn::Sub(room, hn::IfThenElseZero(equal, Set(1.0f)));
    const auto keep = hn::RebindMask(di, hn::Or(equal, hn::Gt(w[g], bound)));
    bits = hn::Or(bits, hn::IfThenElseZero(keep, hn::Set(di, 1 << g)));
  }
  HWY_ALIGN std::int32_t rows[kLanes];
  hn::Store(bits, di, rows);
  for (std::int64_t r = 0; r < kLanes; ++r) {
    auto rest = static_cast<std::uint32_t>(rows[r]);
    for (std::int64_t g = 0; g < top; ++g, rest &= rest - 1) kept[r][g] = __builtin_ctz(rest);
  }
}

// Row i of a sum, -inf outside the groups that it keeps.
template <bool kBiased>
void StoreKept(const PartsOfRow<kBiased>& row, const Rows& choice, std::int64_t i) {
  float* const to = RowOf(choice, i);
  std::fill(to, to + choice.cols, -kInfinity);
  for (std::int64_t p = 0; p < row.count; ++p) {
    const std::int64_t begin = row.parts[p] * row.width;
    for (std::int64_t j = 0; j < row.width; j += kLanes) {
      const Vec v = row.row.At(begin + j, row.width - j);
      StoreCount(v, to + begin + j, Min(row.width - j, kLanes));
    }
  }
}

template <bool kBiased>
void TopOfGroups(const GroupedTopKRows& t, bool both) {
  const std::int64_t groups = t.worths.cols, kept_groups = t.kept.cols, k = t.values.cols;
  const auto* const bias = static_cast<const float*>(t.bias.data);
  HWY_ALIGN float worths[kLanes * (kMostGroups + 1)] = {};
  std::int32_t kept[kLanes][kMostGroups];
  PartsOfRow<kBiased> rows[kLanes];
  HWY_ALIGN float highest[kLanes * kMostGroups * kFew];
  for (std::int64_t i = 0; i < t.a.rows; i += kLanes) {
    const std::int64_t count = Min(t.a.rows - i, kLanes);
    Rows some = t.a;
    some.data = RowOf(t.a, i), some.rows = count;
    TopTwoOfGroups(Groups<kBiased>(some, bias, groups, highest), count, both,
                   [&](Vec v, std::int64_t first, std::int64_t) HWY_ATTR { Store(v, worths + first); });
    KeepBest(worths, groups, kept_groups, kept);
    for (std::int64_t r = 0; r < kLanes; ++r) {
      const std::int64_t row = Min(r, count - 1);
      rows[r] = {{RowOf(t.a, i + row), bias},
                 kept[row],
                 kept_groups,
                 t.a.cols / groups,
                 highest + row * groups * kFew};
    }
    const TopRows top{t.values, t.ids, i, count, k};
    TopOfParts(rows, top, [&](std::int64_t r) HWY_ATTR {
      StoreKept(rows[r], t.choice, i + r);
      TopFew(RowOf(t.choice, i + r), t.a.cols, k, top.ValuesOf(r), top.IdsOf(r));
    });
  }
}

// Whether TopOfGroups serves: a few groups, each of them as wide as bounds what is sorted of a row well.
constexpr bool HasTopOfGroups(std::int64_t cols, std::int64_t groups, std::int64_t k, std::int64_t summed) {
  return HasTopOfRows(cols, k) && groups <= kMostGroups && cols / groups >= kFew && summed <= 2;
}

#endif

void GroupedTopK(const GroupedTopKRows& t, std::int64_t summed) {
  const std::int64_t cols = t.a.cols, groups = t.worths.cols;
  const bool biased = t.bias.data != nullptr;
#if HWY_TARGET <= HWY_AVX2
  if (HasTopOfGroups(cols, groups, t.values.cols, summed)) {
    return biased ? TopOfGroups<true>(t, summed == 2) : TopOfGroups<false>(t, summed == 2);
  }
#endif
  for (std::int64_t i = 0; i < t.a.rows; ++i) {
    const Elements<true> sums{RowOf(t.a, i), RowOf(t.bias, 0)};
    const Elements<false> own{RowOf(t.a, i)};
    for (std::int64_t j = 0; j < cols; j += kLanes)
      StoreCount(biased ? sums.At(j, cols - j) : own.At(j, cols - j), RowOf(t.choice, i) + j,
                 Min(cols - j, kLanes));
  }
  GroupTop(t.worths, t.choice, summed);
  TopK(t.best, t.kept, t.worths);
  KeepGroups(t.choice, t.kept, cols / groups);
  TopK(t.values, t.ids, t.choice);
}

// ---- Repair

// Magnitudes as integers, which are in the order of the numbers, NaN above all.
bool AllWithin(const float* a, std::int64_t n, float limit) {
  if (!(limit >= 0)) return false;
  const IntTag d;
  const auto magnitude = [&](Vec v) HWY_ATTR {
    return hn::And(hn::BitCast(d, v), hn::Set(d, std::numeric_limits<std::int32_t>::max()));
  };
  Ints most[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) most[v] = hn::Max(most[v], magnitude(Load(a + j + v * kLanes)));
  }
  ForEachVector(a + j, n - j, 0.0f, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR {
    most[0] = hn::Max(most[0], magnitude(v));
  });
  const Ints all = hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3]));
  return hn::AllFalse(d, hn::Gt(all, hn::BitCast(d, Set(limit))));
}
bool AllWithin(const Rows& x, float limit) {
  if (x.pitch == x.cols) return x.rows == 0 || AllWithin(RowOf(x, 0), x.rows * x.cols, limit);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    if (!AllWithin(RowOf(x, i), x.cols, limit)) return false;
  }
  return true;
}

void Repair(const Rows& x, const Rows& bad, float limit, bool by_mean) {
  const FloatTag d;
  const Vec most = Set(limit);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    float* row = RowOf(x, i);
    *RowOf(bad, i) = 0;
    if (AllWithin(row, x.cols, limit)) continue;
    std::int64_t good = 0;
    ForEachVector(row, x.cols, kInfinity, [&](Vec v, std::int64_t, std::int64_t count) HWY_ATTR {
      const auto valid = hn::And(hn::Le(hn::Abs(v), most), hn::FirstN(d, static_cast<std::size_t>(count)));
      good += static_cast<std::int64_t>(hn::CountTrue(d, valid));
    });
    *RowOf(bad, i) = static_cast<float>(x.cols - good);
    const float scale = MeanScale(x.cols);
    Vec sum = Set(0.0f);
    ForEachVector(row, x.cols, 0.0f, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR {
      sum = hn::Add(sum, hn::Mul(Set(scale), hn::IfThenElseZero(hn::Le(hn::Abs(v), most), v)));
    });
    const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / (scale * static_cast<float>(Max(good, 1)));
    const Vec instead = Set(by_mean ? std::clamp(mean, -limit, limit) : 0.0f);  // As far as rounding goes.
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
                                   .grouped_top_k = &GroupedTopK,
                                   .all_within = &AllWithin,
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
