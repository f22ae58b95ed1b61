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
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

using Ints = hn::Vec<IntTag>;

HWY_INLINE float* RowOf(const Rows& x, std::int64_t i) { return RowAs<float>(x, i); }

// function(vector, count): loads of a row, `count` < kLanes elements in the last one; the others are `rest`.
template <class Function>
HWY_INLINE void ForEachVector(const float* a, std::int64_t n, float rest, Function function) {
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) function(Load(a + j), j, kLanes);
  if (j < n) {
    const auto valid = hn::FirstN(FloatTag(), static_cast<std::size_t>(n - j));
    function(hn::IfThenElse(valid, Load(a + j, n - j), Set(rest)), j, n - j);
  }
}
HWY_INLINE void StoreCount(Vec v, float* p, std::int64_t count) {
  if (count == kLanes) return Store(v, p);
  Store(v, p, count);
}

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

// ---- TopK

// Up to kLanes elements, descending, in one register, with their columns.
struct Sorted {
  Vec values;  // -inf at first
  Ints ids;

  // x and its column go behind the elements that are not less. Lanes at and above move up.
  HWY_INLINE void Insert(float x, std::int64_t id) {
    HWY_ALIGN static constexpr auto kUp = [] {
      struct {
        std::int32_t lanes[kLanes];
      } up{};
      for (std::int64_t l = 1; l < kLanes; ++l) up.lanes[l] = static_cast<std::int32_t>(l - 1);
      return up;
    }();
    const FloatTag d;
    const IntTag di;
    const auto first = hn::FirstN(d, 1);
    const Vec value = Set(x), shifted_up = Up(values, kUp.lanes);
    const Vec shifted = hn::IfThenElse(first, Set(kInfinity), shifted_up);
    const Ints shifted_ids = Up(ids, kUp.lanes);
    const auto stays = hn::Ge(values, value), behind = hn::Ge(shifted, value);
    values = hn::IfThenElse(stays, values, MinOrSecond(shifted, value));
    const Ints here =
        hn::IfThenElse(hn::RebindMask(di, behind), hn::Set(di, static_cast<std::int32_t>(id)), shifted_ids);
    ids = hn::IfThenElse(hn::RebindMask(di, stays), ids, here);
  }

  template <class V>
  static HWY_INLINE V Up(V v, const std::int32_t* lanes) {
#if HWY_TARGET == HWY_SCALAR
    (void)lanes;
    return v;
#else
    const hn::DFromV<V> d;
    return hn::TableLookupLanes(v, hn::SetTableIndices(d, lanes));
#endif
  }
};

// k <= kLanes. A vector whose elements are all at most the k-th so far is passed over by one comparison.
HWY_INLINE void TopFew(const float* a, std::int64_t n, std::int64_t k, float* values, std::int32_t* ids) {
  Sorted top{Set(-kInfinity), hn::Zero(IntTag())};
  const FloatTag d;
  HWY_ALIGN float sorted[kLanes];
  float least = -kInfinity;
  const auto visit = [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    const bool fills =
        j < k;  // The first k columns are taken whatever they hold, so that ids are always distinct.
    if (!fills && hn::AllFalse(d, hn::Gt(v, Set(least)))) return;
    if (fills) {
      for (std::int64_t l = 0; l < count; ++l)
        top.Insert(a[j + l] == a[j + l] ? a[j + l] : -kInfinity, j + l);
    } else {
      std::uint8_t bits[8] = {};
      hn::StoreMaskBits(d, hn::Gt(v, Set(least)), bits);
      std::uint32_t rest = bits[0] | static_cast<std::uint32_t>(bits[1]) << 8;
      for (; rest != 0; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        top.Insert(a[j + l], j + l);
      }
    }
    hn::Store(top.values, d, sorted);
    least = sorted[Max(Min(k, kLanes) - 1, 0)];
  };
  ForEachVector(a, n, -kInfinity, visit);
  StoreFirst(top.ids, IntTag(), ids, Min(k, kLanes));
  Store(top.values, values, Min(k, kLanes));
}

#if HWY_TARGET <= HWY_AVX3

// Candidates of a row for its highest: up to kLanes in memory, in ascending column order, the others -inf.
struct Candidates {
  HWY_ALIGN float values[kLanes];
  HWY_ALIGN std::int32_t ids[kLanes];
};

// How many candidates go before each: those that are greater, and equal ones in front of it. They are compared as integers
// in the floats' order, with one less of the later of two, so that equal is greater for it.
HWY_INLINE Ints RankOf(const Candidates& c) {
  const IntTag di;
  HWY_ALIGN static constexpr std::int32_t kOneAmongZeros[31] = {0, 0, 0, 0, 0, 0, 0, 0,
                                                                0, 0, 0, 0, 0, 0, 0, 1};
  const Ints bits = hn::BitCast(di, hn::Load(FloatTag(), c.values));
  const Ints keys = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff)));
  HWY_ALIGN std::int32_t key[kLanes];
  hn::Store(keys, di, key);
  Ints least = hn::Sub(keys, hn::Set(di, 1)), rank[2] = {hn::Zero(di), hn::Zero(di)};
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kLanes; ++j) {
    least = hn::Add(least, hn::LoadU(di, kOneAmongZeros + 15 - j));
    const auto before = hn::Gt(hn::Set(di, key[j]), least);
    rank[j % 2] = hn::IfThenElse(before, hn::Add(rank[j % 2], hn::Set(di, 1)), rank[j % 2]);
  }
  return hn::Add(rank[0], rank[1]);
}

// The k first of the candidates, by rank.
HWY_INLINE void StoreByRank(const Candidates& c, std::int64_t k, float* values, std::int32_t* ids) {
  const IntTag di;
  const Ints rank = RankOf(c);
  for (std::int64_t p = 0; p < k; ++p) {
    const auto here = hn::Eq(rank, hn::Set(di, static_cast<std::int32_t>(p)));
    const auto lane = static_cast<std::size_t>(hn::FindFirstTrue(di, here));
    values[p] = c.values[lane], ids[p] = c.ids[lane];
  }
}

HWY_INLINE Vec WithoutNaN(Vec v) { return MaxOrSecond(v, Set(-kInfinity)); }

// A number that at least k elements of the row reach, and few more do: the k-th highest of the lanes' maxima.
HWY_INLINE float ReachedBy(const float* a, std::int64_t n, std::int64_t k) {
  const FloatTag d;
  const IntTag di;
  Vec most = Set(-kInfinity);
  ForEachVector(a, n, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { most = hn::Max(most, WithoutNaN(v)); });
  HWY_ALIGN float maxima[kLanes];
  hn::Store(most, d, maxima);
  Ints above = hn::Zero(di);
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kLanes; ++j) {
    const auto less = hn::RebindMask(di, hn::Gt(Set(maxima[j]), most));
    above = hn::IfThenElse(less, hn::Add(above, hn::Set(di, 1)), above);
  }
  const auto among = hn::RebindMask(d, hn::Lt(above, hn::Set(di, static_cast<std::int32_t>(k))));
  return ExtremeLane</*kMinimum=*/true>(hn::IfThenElse(among, most, Set(kInfinity)));
}

// The candidates that reach a number as few of the row's do, and their ranks among each other. False where more reach it
// than a vector holds.
HWY_INLINE bool TopReaching(const float* a, std::int64_t n, std::int64_t k, float* values,
                            std::int32_t* ids) {
  const FloatTag d;
  const IntTag di;
  const Vec least = Set(n > kLanes ? ReachedBy(a, n, k) : -kInfinity);
  HWY_ALIGN static constexpr std::int32_t kLaneNumbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                              8, 9, 10, 11, 12, 13, 14, 15};
  const Ints lanes = hn::Load(di, kLaneNumbers);
  // A whole vector is written behind the candidates so far.
  HWY_ALIGN float found[2 * kLanes];
  HWY_ALIGN std::int32_t columns[2 * kLanes];
  std::int64_t count = 0;
  const auto visit = [&](Vec any, std::int64_t j, std::int64_t valid) HWY_ATTR {
    const Vec v = WithoutNaN(any);
    const auto reach = hn::And(hn::Ge(v, least), hn::FirstN(d, static_cast<std::size_t>(valid)));
    const std::int64_t at = Min(count, kLanes);
    hn::StoreU(hn::Compress(v, reach), d, found + at);
    const Ints column = hn::Add(lanes, hn::Set(di, static_cast<std::int32_t>(j)));
    hn::StoreU(hn::Compress(column, hn::RebindMask(di, reach)), di, columns + at);
    count += static_cast<std::int64_t>(hn::CountTrue(d, reach));
  };
  ForEachVector(a, n, -kInfinity, visit);
  if (count > kLanes) return false;
  Candidates c;
  const auto valid = hn::FirstN(d, static_cast<std::size_t>(count));
  const Vec reached = hn::Add(hn::Load(d, found), Set(0.0f));  // Which makes 0 of -0.
  hn::Store(hn::IfThenElse(valid, reached, Set(-kInfinity)), d, c.values);
  hn::Store(hn::Load(di, columns), di, c.ids);
  StoreByRank(c, k, values, ids);
  return true;
}

#else

HWY_INLINE bool TopReaching(const float*, std::int64_t, std::int64_t, float*, std::int32_t*) { return false; }

#endif

// Any k: columns by value, the k first of them sorted.
void TopMany(const float* a, std::int64_t n, std::int64_t k, float* values, std::int32_t* ids) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(n));
  for (std::int64_t j = 0; j < n; ++j) order[static_cast<std::size_t>(j)] = static_cast<std::int32_t>(j);
  const auto key = [a](std::int32_t j) { return a[j] == a[j] ? a[j] : -kInfinity; };
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](std::int32_t x, std::int32_t y) {
    return key(x) > key(y) || (key(x) == key(y) && x < y);
  });
  for (std::int64_t j = 0; j < k; ++j) {
    ids[j] = order[static_cast<std::size_t>(j)];
    values[j] = key(ids[j]);
  }
}

void TopK(const Rows& values, const Rows& ids, const Rows& a) {
  const std::int64_t k = values.cols;
  if (k == 0) return;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    const float* from = RowOf(a, i);
    float* highest = RowOf(values, i);
    auto* columns = RowAs<std::int32_t>(ids, i);
    // Many lanes' maxima are among the highest only where k is a part of them.
    const bool few = 2 * k <= kLanes || (a.cols <= kLanes && k < kLanes);
    if (few && TopReaching(from, a.cols, k, highest, columns)) continue;
    if (k < kLanes) {
      TopFew(from, a.cols, k, highest, columns);
    } else {
      TopMany(from, a.cols, k, highest, columns);
    }
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

// The highest of a part, or the sum of its two highest where the second is more than -inf.
HWY_INLINE float TopTwo(const float* a, std::int64_t n, bool both) {
  const FloatTag d;
  TwoHighest lanes{Set(-kInfinity), Set(-kInfinity)};
  ForEachVector(a, n, -kInfinity, [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { lanes.Add(v); });
#if HWY_TARGET <= HWY_AVX3
  lanes.Merge(hn::ReverseBlocks(d, lanes.high), hn::ReverseBlocks(d, lanes.next));
  lanes.Merge(hn::SwapAdjacentBlocks(lanes.high), hn::SwapAdjacentBlocks(lanes.next));
  lanes.Merge(hn::Shuffle1032(lanes.high), hn::Shuffle1032(lanes.next));
  lanes.Merge(hn::Shuffle2301(lanes.high), hn::Shuffle2301(lanes.next));
  const float first = hn::GetLane(lanes.high), second = hn::GetLane(lanes.next);
#else
  const float first = ExtremeLane</*kMinimum=*/false>(lanes.high);
  const auto is_first = hn::Eq(lanes.high, Set(first));
  // The highest stands in one lane or in several; with one, what is second in its lane takes part.
  const float second =
      hn::CountTrue(d, is_first) > 1
          ? first
          : ExtremeLane</*kMinimum=*/false>(hn::IfThenElse(is_first, lanes.next, lanes.high));
#endif
  return both && second > -kInfinity ? first + second : first;
}

void GroupTop(const Rows& sums, const Rows& a, std::int64_t count) {
  const std::int64_t width = a.cols / sums.cols;
  std::vector<float> part(count > 2 ? static_cast<std::size_t>(width) : 0);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t g = 0; g < sums.cols; ++g) {
      const float* from = RowOf(a, i) + g * width;
      float& sum = RowOf(sums, i)[g];
      if (count <= 2) {
        sum = TopTwo(from, width, count == 2);
        continue;
      }
      part.assign(from, from + width);
      std::partial_sort(part.begin(), part.begin() + count, part.end(), std::greater<>());
      sum = part[0];
      for (std::size_t j = 1; j < static_cast<std::size_t>(count) && part[j] > -kInfinity; ++j)
        sum += part[j];
    }
  }
}

void KeepGroups(const Rows& a, const Rows& ids, std::int64_t group_cols) {
  const std::int64_t groups = (a.cols + group_cols - 1) / group_cols;
  std::vector<std::int32_t> kept(static_cast<std::size_t>(groups));
  for (std::int64_t i = 0; i < a.rows; ++i) {
    std::fill(kept.begin(), kept.end(), 0);
    const auto* id = RowAs<std::int32_t>(ids, i);
    for (std::int64_t j = 0; j < ids.cols; ++j) {
      if (id[j] >= 0 && id[j] < groups) kept[static_cast<std::size_t>(id[j])] = 1;
    }
    // Which groups go is any row's guess: blends do not branch on it.
    for (std::int64_t g = 0; g < groups; ++g) {
      const auto keeps = hn::RebindMask(
          FloatTag(), hn::Ne(hn::Set(IntTag(), kept[static_cast<std::size_t>(g)]), hn::Zero(IntTag())));
      float* part = RowOf(a, i) + g * group_cols;
      const auto visit = [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
        StoreCount(hn::IfThenElse(keeps, v, Set(-kInfinity)), part + j, count);
      };
      ForEachVector(part, Min(group_cols, a.cols - g * group_cols), -kInfinity, visit);
    }
  }
}

// ---- Scores

HWY_INLINE Vec SigmoidOf(Vec x) {
  return hn::Div(Set(1.0f), hn::Add(Set(1.0f), Exp</*kAtMostZero=*/false>(hn::Neg(x))));
}
HWY_INLINE Vec SqrtSoftplusOf(Vec x) {
  const Vec tail = Ln(hn::Add(Set(1.0f), Exp</*kAtMostZero=*/true>(hn::Neg(hn::Abs(x)))));
  return hn::Sqrt(hn::Add(MaxOrNaN(x, Set(0.0f)), tail));
}

void SoftmaxRow(float* x, std::int64_t n) {
  const FloatTag d;
  Vec most = Set(-kInfinity), sum = Set(0.0f);
  ForEachVector(x, n, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { most = MaxOrNaN(most, v); });
  const bool has_nan = !hn::AllFalse(d, hn::IsNaN(most));
  const Vec maximum = Set(has_nan ? kNaN : ExtremeLane</*kMinimum=*/false>(most));
  ForEachVector(x, n, -kInfinity, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    const Vec e = Exp</*kAtMostZero=*/true>(hn::Sub(v, maximum));
    sum = hn::Add(sum, e);
    StoreCount(e, x + j, count);
  });
  const Vec total = hn::SumOfLanes(d, sum);
  ForEachVector(x, n, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    StoreCount(hn::Div(v, total), x + j, count);
  });
}

void Scores(ScoreFunction function, const Rows& n) {
  for (std::int64_t i = 0; i < n.rows; ++i) {
    float* x = RowOf(n, i);
    switch (function) {
      case ScoreFunction::kSoftmax:
        SoftmaxRow(x, n.cols);
        break;
      case ScoreFunction::kSigmoid:
        ForEachVector(x, n.cols, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
          StoreCount(SigmoidOf(v), x + j, count);
        });
        break;
      case ScoreFunction::kSqrtSoftplus:
        ForEachVector(x, n.cols, 0.0f, [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
          StoreCount(SqrtSoftplusOf(v), x + j, count);
        });
        break;
    }
  }
}

// ---- Repair

void Repair(const Rows& x, const Rows& bad, float limit, bool by_mean) {
  const FloatTag d;
  const Vec most = Set(limit);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    float* row = RowOf(x, i);
    std::int64_t good = 0;
    ForEachVector(row, x.cols, kInfinity, [&](Vec v, std::int64_t, std::int64_t count) HWY_ATTR {
      const auto valid = hn::And(hn::Le(hn::Abs(v), most), hn::FirstN(d, static_cast<std::size_t>(count)));
      good += static_cast<std::int64_t>(hn::CountTrue(d, valid));
    });
    *RowOf(bad, i) = static_cast<float>(x.cols - good);
    if (good == x.cols) continue;
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
                                   .scores = &Scores,
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
