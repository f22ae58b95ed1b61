// The highest elements of rows, with their columns. Included once per Highway target by routing_ops.cc, after vector-inl.h.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_TOP_K_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_TOP_K_INL_H_
#undef CUBIST_NPU_MODEL_HOST_TOP_K_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_TOP_K_INL_H_
#endif

#include "npu_model/host/transpose-inl.h"
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

using Ints = hn::Vec<IntTag>;

// As many of a row are sorted, in so many vectors of elements.
constexpr std::int64_t kFew = 16, kFewVectors = kFew / kLanes;

HWY_INLINE float* RowOf(const Rows& x, std::int64_t i) { return RowAs<float>(x, i); }

// The elements of a row: its own numbers or, kBiased, their sums with those of another row.
template <bool kBiased>
struct Elements {
  const float *a = nullptr, *bias = nullptr;

  HWY_INLINE Vec At(std::int64_t j) const {
    if constexpr (kBiased) return hn::Add(Load(a + j), Load(bias + j));
    return Load(a + j);
  }
  // The first `some` of kLanes elements, and -inf.
  HWY_INLINE Vec At(std::int64_t j, std::int64_t some) const {
    if (some >= kLanes) return At(j);
    if (some <= 0) return Set(-kInfinity);
    Vec v = Load(a + j, some);
    if constexpr (kBiased) v = hn::Add(v, Load(bias + j, some));
    return hn::IfThenElse(hn::FirstN(FloatTag(), static_cast<std::size_t>(some)), v, Set(-kInfinity));
  }
};

// ---- Few of a row

// Up to kLanes elements, descending, in one register, with their columns.
struct Sorted {
  Vec values;  // NaN at first, which is less than -inf here.
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
    const Vec value = Set(x), shifted = hn::IfThenElse(first, Set(kInfinity), Up(values, kUp.lanes));
    const Ints shifted_ids = Up(ids, kUp.lanes);
    const auto stays = hn::Ge(values, value), behind = hn::Ge(shifted, value);
    values = hn::IfThenElse(stays, values, hn::IfThenElse(behind, value, shifted));
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

// A number that at least kLanes elements of a row reach, or -inf: the least of its lanes' highest, of which NaN is none.
HWY_INLINE float ReachedByLanes(const float* a, std::int64_t n) {
  Vec high[2] = {Set(-kInfinity), Set(-kInfinity)};
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    high[0] = MaxOrSecond(Load(a + j), high[0]);
    high[1] = MaxOrSecond(Load(a + j + kLanes), high[1]);
  }
  ForEachVector(a + j, n - j, -kInfinity,
                [&](Vec v, std::int64_t, std::int64_t) HWY_ATTR { high[0] = MaxOrSecond(v, high[0]); });
  return ExtremeLane</*kMinimum=*/true>(hn::Max(high[0], high[1]));
}

// k <= kLanes. A vector whose elements are all below what enough others reach, or at most the k-th so far, is passed over by
// one comparison.
void TopFew(const float* a, std::int64_t n, std::int64_t k, float* values, std::int32_t* ids) {
  Sorted top{Set(kNaN), hn::Zero(IntTag())};
  const FloatTag d;
  HWY_ALIGN float sorted[kLanes];
  float least = ReachedByLanes(a, n);
  const bool bounded = least > -kInfinity;
  std::int64_t found = 0;
  const auto visit = [&](Vec v, std::int64_t j, std::int64_t count) HWY_ATTR {
    if (!bounded && found < k) {  // Whatever they hold, so that ids are always distinct.
      for (std::int64_t l = 0; l < count; ++l)
        top.Insert(a[j + l] == a[j + l] ? a[j + l] : -kInfinity, j + l);
      found += count;
    } else {
      const auto reach = found < k ? hn::Ge(v, Set(least)) : hn::Gt(v, Set(least));
      if (hn::AllFalse(d, reach)) return;
      std::uint8_t bits[8] = {};
      hn::StoreMaskBits(d, reach, bits);
      std::uint32_t rest = bits[0] | static_cast<std::uint32_t>(bits[1]) << 8;
      found += __builtin_popcount(rest);
      for (; rest != 0; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        top.Insert(a[j + l], j + l);
      }
    }
    if (found < k) return;
    hn::Store(top.values, d, sorted);
    least = sorted[k - 1];
  };
  ForEachVector(a, n, -kInfinity, visit);
  StoreFirst(top.ids, IntTag(), ids, k);
  Store(top.values, values, k);
}

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

// ---- Few of each row, kLanes rows at a time

#if HWY_TARGET <= HWY_AVX2

using KeyTag = HWY_FULL(std::int64_t);
using Keys = hn::Vec<KeyTag>;
constexpr std::int64_t kKeyRows = static_cast<std::int64_t>(hn::MaxLanes(KeyTag()));
constexpr std::int64_t kMostTop = 8, kMostColumns = 1 << 16;

template <class V>
HWY_INLINE void Order(V& high, V& low) {
  const V least = hn::Min(high, low);
  high = hn::Max(high, low), low = least;
}

// Sorts the elements that eight vectors hold in a lane, descending, for every lane.
template <class V>
HWY_INLINE void SortEight(V v[8]) {
  constexpr int kPairs[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6},
                                 {3, 7}, {0, 1}, {2, 3}, {4, 5}, {6, 7}, {2, 4}, {3, 5},
                                 {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma GCC unroll 19
  for (const auto& pair : kPairs) Order(v[pair[0]], v[pair[1]]);
}

// The eight highest of sixteen, descending, in v[0..7]: of two sorted halves, the higher of each one and its counterpart.
template <class V>
HWY_INLINE void TopEight(V v[16]) {
  SortEight(v), SortEight(v + 8);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) v[j] = hn::Max(v[j], v[15 - j]);
#pragma GCC unroll 3
  for (int distance = 4; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      if ((j & distance) == 0) Order(v[j], v[j + distance]);
    }
  }
}

// Where the highest of a row are looked for: in some parts of `width` columns, or in the whole row as one.
template <bool kBiased>
struct PartsOfRow {
  Elements<kBiased> row;
  const std::int32_t* parts = nullptr;
  std::int64_t count = 0, width = 0;
  const float* highest = nullptr;  // [p][l], where known: of part p's columns l modulo kFew; or NaN

  // visit(elements, elements behind them, column of the first): two vectors at a time of every part; what the last ones of
  // a part lack is -inf.
  template <class Visit>
  HWY_INLINE void ForTwoVectors(Visit visit) const {
    for (std::int64_t p = 0; p < count; ++p) {
      std::int64_t j = parts[p] * width;
      const std::int64_t end = j + width;
      for (; j + 2 * kLanes <= end; j += 2 * kLanes) visit(row.At(j), row.At(j + kLanes), j);
      if (j < end) visit(row.At(j, end - j), row.At(j + kLanes, end - j - kLanes), j);
    }
  }

  // The same, a pair for each Next, which returns its column; pairs of -inf behind the last.
  struct Pairs {
    const PartsOfRow& row;
    std::int64_t part = 0, j = row.parts[0] * row.width, end = j + row.width;

    HWY_INLINE bool done() const { return part == row.count; }
    HWY_INLINE std::int64_t Next(Vec& v0, Vec& v1) {
      if (done()) {
        v0 = v1 = Set(-kInfinity);
        return 0;
      }
      const std::int64_t column = j;
      v0 = row.row.At(j, end - j), v1 = row.row.At(j + kLanes, end - j - kLanes);
      j += 2 * kLanes;
      if (j >= end && ++part < row.count) j = row.parts[part] * row.width, end = j + row.width;
      return column;
    }
  };
};
constexpr std::int32_t kWholeRow[] = {0};

// least[r]: a number that at least k elements of row r reach, and few more do: the k-th highest of the maxima of its columns
// modulo kFew.
template <bool kBiased>
HWY_INLINE void ReachedBy(const PartsOfRow<kBiased> rows[kLanes], std::int64_t k, float* least) {
  Vec most[kFew];
#pragma GCC unroll 1
  for (std::int64_t r = 0; r < kLanes; ++r) {
    Vec high[2] = {Set(-kInfinity), Set(-kInfinity)};
    if (rows[r].highest != nullptr) {
      for (std::int64_t p = 0; p < rows[r].count; ++p) {
        const float* const of_part = rows[r].highest + rows[r].parts[p] * kFew;
        for (std::int64_t v = 0; v < kFewVectors; ++v)
          high[v] = MaxOrSecond(Load(of_part + v * kLanes), high[v]);
      }
    } else {
      rows[r].ForTwoVectors([&](Vec v0, Vec v1, std::int64_t) HWY_ATTR {
        high[0] = MaxOrSecond(v0, high[0]), high[1] = MaxOrSecond(v1, high[1]);  // Not the NaN.
      });
    }
    if constexpr (kFewVectors == 1) {
      most[r] = hn::Max(high[0], high[1]);
    } else {
      most[r] = high[0], most[kLanes + r] = high[1];
    }
  }
  for (std::int64_t v = 0; v < kFewVectors; ++v) Transpose(most + v * kLanes);
  TopEight(most);
  HWY_ALIGN float sorted[kMostTop][kLanes];
#pragma GCC unroll 8
  for (std::int64_t j = 0; j < kMostTop; ++j) Store(most[j], sorted[j]);
  Store(Load(sorted[k - 1]), least);
}

// Columns of a row, with their elements: `count`, or more than there is room for. Whole vectors are written behind those
// found so far.
struct Columns {
  std::uint16_t at[kFew + 2 * kLanes];
  float elements[kFew + 2 * kLanes];  // Which cost less to keep than to gather again.
  std::int64_t count = kFew + 1;
  HWY_INLINE bool fit() const { return count <= kFew; }
  // How many of them vector v of the few holds.
  HWY_INLINE std::size_t CountIn(std::int64_t v) const {
    return static_cast<std::size_t>(fit() ? Min(Max(count - v * kLanes, 0), kLanes) : 0);
  }
};

#if HWY_TARGET <= HWY_AVX3_DL
// Four pairs of vectors, and the columns that each pair begins at.
struct FourPairs {
  Vec v[8];
  std::int32_t at[4];
};
// The first kFew elements that reach a limit, with their columns, and how many do.
struct Reaching {
  __m512 elements;
  __m512i columns;
  std::int64_t count;
};

// The lanes from `count` on.
HWY_INLINE __mmask16 From(std::int64_t count) { return static_cast<__mmask16>(0xffffu << Min(count, kFew)); }

// The bytes that count 128 elements are compressed, and pick the elements out of eight registers.
HWY_INLINE Reaching ReachingOf(const FourPairs& pairs, Vec limit) {
  const auto* v = pairs.v;
  const auto* at = pairs.at;
  __mmask32 reach[4];
  __m512 picked[4];
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p)
    reach[p] = _mm512_kunpackw(hn::Ge(v[2 * p + 1], limit).raw, hn::Ge(v[2 * p], limit).raw);
  const __mmask64 first = _mm512_kunpackd(reach[1], reach[0]), second = _mm512_kunpackd(reach[3], reach[2]);
  const auto bytes = hn::Iota(hn::Repartition<std::uint8_t, FloatTag>(), 0).raw;
  const auto compressed = [](__mmask64 mask, __m512i of) HWY_ATTR {
    return _mm512_castsi512_si128(_mm512_maskz_compress_epi8(mask, of));
  };
  const std::int64_t of_first = __builtin_popcountll(first);
  const __m512i index = _mm512_cvtepu8_epi32(
      _mm_mask_expand_epi8(compressed(first, bytes), From(of_first),
                           compressed(second, _mm512_xor_si512(bytes, _mm512_set1_epi8(64)))));
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p) picked[p] = _mm512_permutex2var_ps(v[2 * p].raw, index, v[2 * p + 1].raw);
  const auto odd = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32)),
             late = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
  const __m512i from = _mm512_castsi128_si512(_mm_setr_epi32(at[0], at[1], at[2], at[3]));
  return {_mm512_mask_blend_ps(late, _mm512_mask_blend_ps(odd, picked[0], picked[1]),
                               _mm512_mask_blend_ps(odd, picked[2], picked[3])),
          _mm512_add_epi32(_mm512_permutexvar_epi32(_mm512_srli_epi32(index, 5), from),
                           _mm512_and_si512(index, _mm512_set1_epi32(31))),
          of_first + __builtin_popcountll(second)};
}

// The columns of a row's elements that reach a finite number.
template <bool kBiased>
HWY_INLINE void FindColumns(const PartsOfRow<kBiased>& row, float least, Columns& columns) {
  Reaching all{_mm512_setzero_ps(), _mm512_setzero_si512(), 0};
  for (typename PartsOfRow<kBiased>::Pairs pairs{row}; !pairs.done();) {
    FourPairs four;
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p)
      four.at[p] = static_cast<std::int32_t>(pairs.Next(four.v[2 * p], four.v[2 * p + 1]));
    const Reaching some = ReachingOf(four, Set(least));
    const __mmask16 behind = From(all.count);
    all = {_mm512_mask_expand_ps(all.elements, behind, some.elements),
           _mm512_mask_expand_epi32(all.columns, behind, some.columns), all.count + some.count};
  }
  Store(Vec{all.elements}, columns.elements);
  hn::StoreU(hn::TruncateTo(HalfTag(), Words{all.columns}), HalfTag(), columns.at);
  columns.count = all.count;
}
#else
#if HWY_TARGET > HWY_AVX3
// [b]: the bits that are set in b, ascending.
struct SetBits {
  std::uint8_t of[256][8];
};
constexpr SetBits BitsOfBytes() {
  SetBits bits{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int bit = 0, count = 0; bit < 8; ++bit) {
      if ((byte >> bit & 1) != 0) bits.of[byte][count++] = static_cast<std::uint8_t>(bit);
    }
  }
  return bits;
}
#endif

// The columns of a row's elements that reach a finite number.
template <bool kBiased>
HWY_INLINE void FindColumns(const PartsOfRow<kBiased>& row, float least, Columns& columns) {
  const Vec limit = Set(least);
  std::int64_t count = 0;
#if HWY_TARGET <= HWY_AVX3
  using ColumnTag = hn::Repartition<std::uint16_t, FloatTag>;
  const ColumnTag d;
  const auto iota = hn::Iota(d, 0);
  row.ForTwoVectors([&](Vec v0, Vec v1, std::int64_t j) HWY_ATTR {
    const auto reach0 = hn::Ge(v0, limit), reach1 = hn::Ge(v1, limit);
    const hn::Mask<ColumnTag> reach{_mm512_kunpackw(reach1.raw, reach0.raw)};
    const auto column = hn::Add(iota, hn::Set(d, static_cast<std::uint16_t>(j)));
    const std::int64_t end = Min(count, kFew);
    hn::StoreU(hn::Compress(column, reach), d, columns.at + end);
    Store(hn::Compress(v0, reach0), columns.elements + end);
    Store(hn::Compress(v1, reach1), columns.elements + end + __builtin_popcount(reach0.raw));
    count += __builtin_popcount(reach.raw);
  });
#else
  static constexpr SetBits kBits = BitsOfBytes();
  const IntTag d;
  const hn::Rebind<std::uint8_t, IntTag> bytes;
  const HalfTag dh;
  const hn::Rebind<std::uint8_t, HalfTag> half_bytes;
  // Those of a vector whose first column is `first`, written to `end`; returns how many.
  const auto find = [&](Vec v, Halves first, std::int64_t end) HWY_ATTR {
    std::uint8_t reach[8];
    hn::StoreMaskBits(FloatTag(), hn::Ge(v, limit), reach);
    const std::uint8_t* const set = kBits.of[reach[0]];
    hn::StoreU(hn::Add(hn::PromoteTo(dh, hn::LoadU(half_bytes, set)), first), dh, columns.at + end);
    const Ints lanes = hn::PromoteTo(d, hn::LoadU(bytes, set));
    Store(hn::TableLookupLanes(v, hn::IndicesFromVec(FloatTag(), lanes)), columns.elements + end);
    return __builtin_popcount(reach[0]);
  };
  row.ForTwoVectors([&](Vec v0, Vec v1, std::int64_t j) HWY_ATTR {
    const Halves first = hn::Set(dh, static_cast<std::uint16_t>(j));
    const std::int64_t end = Min(count, kFew), found = find(v0, first, end);
    count += found + find(v1, hn::Add(first, hn::Set(dh, kLanes)), end + found);
  });
#endif
  columns.count = count;
}
#endif

// Up to kLanes elements and their columns as integers that are greater for a greater element and, of equal ones, for the
// lower column. NaN counts as -inf; what is not valid is less than anything.
HWY_INLINE void KeysOf(Vec elements, Ints columns, hn::Mask<IntTag> valid, Keys& first, Keys& second) {
  const IntTag d;
  const Vec v = hn::Add(MaxOrSecond(elements, Set(-kInfinity)), Set(0.0f));  // Which makes 0 of -0.
  const Ints bits = hn::BitCast(d, v);
  const Ints ordered = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(d, 0x7fffffff)));
  const Ints high = hn::IfThenElse(valid, ordered, hn::Set(d, std::numeric_limits<std::int32_t>::min()));
  const Ints low = hn::Not(columns);
  first = hn::BitCast(KeyTag(), hn::InterleaveLower(d, low, high));
  second = hn::BitCast(KeyTag(), hn::InterleaveUpper(d, low, high));
}

// The elements and columns of the first k of a vector of keys.
HWY_INLINE void StoreKeys(Keys keys, std::int64_t k, float* values, std::int32_t* ids) {
  const hn::Rebind<std::uint64_t, KeyTag> d64;
  const hn::Rebind<std::uint32_t, KeyTag> du;
  const hn::Rebind<std::int32_t, KeyTag> d;
  const hn::Rebind<float, KeyTag> df;
  const auto words = hn::BitCast(d64, keys);
  const auto ordered = hn::BitCast(d, hn::TruncateTo(du, hn::ShiftRight<32>(words)));
  const auto bits = hn::Xor(ordered, hn::And(hn::ShiftRight<31>(ordered), hn::Set(d, 0x7fffffff)));
  const auto columns = hn::Not(hn::BitCast(d, hn::TruncateTo(du, words)));
  if (k >= kKeyRows) return hn::StoreU(hn::BitCast(df, bits), df, values), hn::StoreU(columns, d, ids);
  hn::BlendedStore(hn::BitCast(df, bits), hn::FirstN(df, static_cast<std::size_t>(k)), df, values);
  hn::BlendedStore(columns, hn::FirstN(d, static_cast<std::size_t>(k)), d, ids);
}

// Where kLanes rows' values and ids go, as far as there are so many.
struct TopRows {
  const Rows& values;
  const Rows& ids;
  std::int64_t begin, count, k;

  HWY_INLINE float* ValuesOf(std::int64_t r) const { return RowOf(values, begin + r); }
  HWY_INLINE std::int32_t* IdsOf(std::int64_t r) const { return RowAs<std::int32_t>(ids, begin + r); }
};

// The k <= kMostTop highest of kFew elements of each row. keys_of(r, v, first, second): the keys of vector v of row r's
// elements; instead(r) sees to the rows that have more than those, and says whether it did.
template <class KeysOfRow, class Instead>
HWY_INLINE void SortFew(const TopRows& top, KeysOfRow keys_of, Instead instead) {
  for (std::int64_t part = 0; part < top.count; part += kKeyRows) {
    Keys keys[kFew];  // [s * kKeyRows + r]: some of row r; transposed, element s * kKeyRows + r of each row.
#pragma GCC unroll 1
    for (std::int64_t r = 0; r < kKeyRows; ++r) {
      for (std::int64_t v = 0; v < kFewVectors; ++v)
        keys_of(part + r, v, keys[2 * v * kKeyRows + r], keys[(2 * v + 1) * kKeyRows + r]);
    }
    for (std::int64_t s = 0; s < kFew; s += kKeyRows) TransposeLong(keys + s);
    TopEight(keys);
    for (std::int64_t s = 0; s < kMostTop; s += kKeyRows) TransposeLong(keys + s);
    HWY_ALIGN std::int64_t sorted[kKeyRows][kMostTop];
#pragma GCC unroll 8
    for (std::int64_t j = 0; j < kMostTop; ++j)
      hn::Store(keys[j], KeyTag(), sorted[j % kKeyRows] + j / kKeyRows * kKeyRows);
    for (std::int64_t r = part; r < Min(part + kKeyRows, top.count); ++r) {
      if (instead(r)) continue;
      for (std::int64_t s = 0; s < top.k; s += kKeyRows) {
        StoreKeys(hn::Load(KeyTag(), sorted[r - part] + s), Min(top.k - s, kKeyRows), top.ValuesOf(r) + s,
                  top.IdsOf(r) + s);
      }
    }
  }
}

// Of rows of n <= kFew columns.
HWY_INLINE void TopOfShortRows(const Rows& a, const TopRows& top) {
  const IntTag d;
  const auto keys = [&](std::int64_t r, std::int64_t v, Keys& first, Keys& second) HWY_ATTR {
    const std::int64_t at = Min(v * kLanes, a.cols), some = Min(a.cols - at, kLanes);
    const float* const from = RowOf(a, top.begin + Min(r, top.count - 1)) + at;
    KeysOf(some == kLanes ? Load(from)
           : some == 0    ? Set(0.0f)
                          : Load(from, some),
           hn::Iota(d, static_cast<std::int32_t>(v * kLanes)), hn::FirstN(d, static_cast<std::size_t>(some)),
           first, second);
  };
  SortFew(top, keys, [](std::int64_t) { return false; });
}

// Of rows of at most kMostColumns columns: of each one the few columns that can be among the highest are found; with a row
// in each lane these are sorted. slow(r) where a row has no such few.
template <bool kBiased, class Slow>
HWY_INLINE void TopOfParts(const PartsOfRow<kBiased> rows[kLanes], const TopRows& top, Slow slow) {
  const IntTag d;
  HWY_ALIGN float least[kLanes];
  Columns columns[kLanes];
  ReachedBy(rows, top.k, least);
  for (std::int64_t r = 0; r < kLanes; ++r) {
    if (least[r] > -kInfinity) FindColumns(rows[r], least[r], columns[r]);
  }
  const auto keys = [&](std::int64_t r, std::int64_t v, Keys& first, Keys& second) HWY_ATTR {
    const auto valid = hn::FirstN(d, columns[r].CountIn(v));
    const Ints found = hn::PromoteTo(d, hn::LoadU(HalfTag(), columns[r].at + v * kLanes));
    KeysOf(Load(columns[r].elements + v * kLanes), found, valid, first, second);
  };
  SortFew(top, keys, [&](std::int64_t r) HWY_ATTR {
    if (columns[r].fit()) return false;
    slow(r);
    return true;
  });
}

void TopOfRows(const Rows& values, const Rows& ids, const Rows& a) {
  PartsOfRow<false> rows[kLanes];
  for (std::int64_t i = 0; i < a.rows; i += kLanes) {
    const TopRows top{values, ids, i, Min(a.rows - i, kLanes), values.cols};
    if (a.cols <= kFew) {
      TopOfShortRows(a, top);
      continue;
    }
    for (std::int64_t r = 0; r < kLanes; ++r)
      rows[r] = {{RowOf(a, i + Min(r, top.count - 1))}, kWholeRow, 1, a.cols};
    TopOfParts(rows, top, [&](std::int64_t r) HWY_ATTR {
      TopFew(rows[r].row.a, a.cols, top.k, top.ValuesOf(r), top.IdsOf(r));
    });
  }
}

// Whether TopOfRows serves: the lanes' maxima bound well what only some lanes' elements are among.
constexpr bool HasTopOfRows(std::int64_t n, std::int64_t k) { return k <= kMostTop && n <= kMostColumns; }

#else

constexpr bool HasTopOfRows(std::int64_t, std::int64_t) { return false; }

#endif

void TopK(const Rows& values, const Rows& ids, const Rows& a) {
  const std::int64_t n = a.cols, k = values.cols;
  if (k == 0) return;
#if HWY_TARGET <= HWY_AVX2
  if (HasTopOfRows(n, k)) return TopOfRows(values, ids, a);
#endif
  const auto top = k <= kLanes ? &TopFew : &TopMany;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    top(RowOf(a, i), n, k, RowOf(values, i), RowAs<std::int32_t>(ids, i));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_TOP_K_INL_H_
