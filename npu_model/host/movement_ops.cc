// Bodies of the weighted movements, compiled once per Highway target.
#include "npu_model/host/movement_ops.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/movement_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                              // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

template <Narrowing kNarrowing, class T, class X>
HWY_INLINE void ScalePart(T* dst, const X* x, Vec weight, std::int64_t n) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T, X>;
  std::int64_t j = 0;
  for (Vec v0, v1; j + 2 * kLanes <= n; j += 2 * kLanes) {
    LoadTwo<kOrder>(x + j, v0, v1);
    StoreTwo<kNarrowing, kOrder>(hn::Mul(weight, v0), hn::Mul(weight, v1), dst + j);
  }
  for (; j < n; j += kLanes) {
    const std::int64_t count = Min(n - j, kLanes);
    StoreSome<kNarrowing>(hn::Mul(weight, count == kLanes ? Load(x + j) : Load(x + j, count)), dst + j,
                          count);
  }
}

template <Narrowing kNarrowing, class T, class X>
void ScaleAs(T* dst, const X* x, float weight, std::int64_t n, bool stream, const T* next) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T, X>;
  const Vec w = Set(weight);
  if (!stream) return ScalePart<kNarrowing>(dst, x, w, n);
  const std::int64_t begin = BeforeLine(dst, n), end = begin + RoundDown(n - begin, 2 * kLanes);
  ScalePart<kNarrowing>(dst, x, w, begin);
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    if (next != nullptr) PrefetchTwo(next + j);
    Vec v0, v1;
    LoadTwo<kOrder>(x + j, v0, v1);
    StreamTwo<kNarrowing, kOrder>(hn::Mul(w, v0), hn::Mul(w, v1), dst + j);
  }
  ScalePart<kNarrowing>(dst + end, x + end, w, n - end);
}

void Scale(void* dst, DType dtype, const float* x, float weight, std::int64_t n, bool stream,
           const void* next) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    ScaleAs<kHow>(static_cast<T*>(dst), x, weight, n, stream, static_cast<const T*>(next));
  });
}

void CopyRow(void* to, const void* from, std::int64_t bytes, const void* next) {
  const ByteTag d;
  constexpr auto kLine = static_cast<std::int64_t>(kLineBytes);
  auto* const dst = static_cast<std::uint8_t*>(to);
  const auto* const src = static_cast<const std::uint8_t*>(from);
  const auto* const fetched = static_cast<const std::uint8_t*>(next);
  const std::int64_t begin = BeforeLine(dst, bytes), end = begin + RoundDown(bytes - begin, kLine);
  std::memcpy(dst, src, static_cast<std::size_t>(begin));
  for (std::int64_t i = begin; i < end; i += kLine) {
    __builtin_prefetch(fetched + i, 0, 2);
    for (std::int64_t v = 0; v < kLine; v += kByteLanes)
      hn::Stream(hn::LoadU(d, src + i + v), d, dst + i + v);
  }
  std::memcpy(dst + end, src + end, static_cast<std::size_t>(bytes - end));
}

// ---- Weighted sums

// Rows that one pass adds, and what they are followed by.
constexpr std::int64_t kRowsPerPass = 8;
struct Upcoming {
  const void* const* rows = nullptr;
  std::int64_t count = 0;
};
Upcoming After(const WeightedRows& x, const Range& r) {
  if (r.end < x.count) return {x.rows + r.end, x.count - r.end};
  return {x.upcoming, x.upcoming_count};
}

// How far ahead lines are asked for. A row of a few pages is too short for the CPU to notice how it is walked, and eight
// of them at once are too many. Into the second-level cache, which takes more of them at once than the first: past it, and
// half as far ahead, a Zen 4 took 1.1 to 1.3 times as long.
constexpr std::int64_t kAheadBytes = 2048;
template <class T>
HWY_INLINE void PrefetchTwoFar(const T* p) {
  constexpr auto kLine = static_cast<std::int64_t>(kLineBytes / sizeof(T));
  for (std::int64_t j = 0; j < 2 * kLanes; j += kLine) __builtin_prefetch(p + j, 0, 2);
}

// out[begin, end) = start (0 where null) + the weighted sum of kRows rows, ascending. Two vectors at a time, of which each
// row's line `ahead` of them is asked for in `fetched`.
template <int kRows, bool kStream, Narrowing kNarrowing, class Out, class T>
HWY_INLINE void WeightedPart(Out* out, const float* start, std::int64_t begin, std::int64_t end,
                             const T* const* row, const Vec* weight, const T* const* fetched,
                             std::int64_t fetched_count, std::int64_t ahead) {
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    for (std::int64_t r = 0; r < fetched_count; ++r) PrefetchTwoFar(fetched[r] + j + ahead);
    Vec low = start != nullptr ? Load(start + j) : hn::Zero(FloatTag());
    Vec high = start != nullptr ? Load(start + j + kLanes) : hn::Zero(FloatTag());
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      low = hn::MulAdd(weight[r], Load(row[r] + j), low);
      high = hn::MulAdd(weight[r], Load(row[r] + j + kLanes), high);
    }
    if constexpr (kStream) {
      StreamTwo<kNarrowing>(low, high, out + j);
    } else {
      StoreTwo<kNarrowing>(low, high, out + j);
    }
  }
}

template <int kRows, bool kStream, Narrowing kNarrowing, class Out, class T>
void WeightedPass(Out* out, const float* start, std::int64_t n, const void* const* rows, const float* weights,
                  const Upcoming& upcoming) {
  constexpr auto kAhead = static_cast<std::int64_t>(kAheadBytes / sizeof(T));
  const T* row[kRows];
  const T* next[kRowsPerPass];
  Vec weight[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) row[r] = static_cast<const T*>(rows[r]), weight[r] = Set(weights[r]);
  const std::int64_t next_count = Min(upcoming.count, kRowsPerPass);
  for (std::int64_t r = 0; r < next_count; ++r) next[r] = static_cast<const T*>(upcoming.rows[r]);

  const auto ends = [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    for (std::int64_t j = begin; j < end; j += kLanes) {
      const std::int64_t count = Min(end - j, kLanes);
      Vec sum = start != nullptr ? Load(start + j, count) : hn::Zero(FloatTag());
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum = hn::MulAdd(weight[r], Load(row[r] + j, count), sum);
      StoreSome<kNarrowing>(sum, out + j, count);
    }
  };
  const std::int64_t begin = kStream ? BeforeLine(out, n) : 0, end = begin + RoundDown(n - begin, 2 * kLanes),
                     own = begin + RoundDown(Max(n - begin - kAhead, 0), 2 * kLanes);
  ends(0, begin);
  WeightedPart<kRows, kStream, kNarrowing>(out, start, begin, own, row, weight, row, kRows, kAhead);
  WeightedPart<kRows, kStream, kNarrowing>(out, start, own, end, row, weight, next, next_count, -own);
  ends(end, n);
}

template <bool kStream, Narrowing kNarrowing, class Out, class T>
void AddRows(Out* out, const float* start, std::int64_t n, const WeightedRows& x, const Range& r) {
  using Pass = void (*)(Out*, const float*, std::int64_t, const void* const*, const float*, const Upcoming&);
  static constexpr Pass kPasses[kRowsPerPass] = {
      &WeightedPass<1, kStream, kNarrowing, Out, T>, &WeightedPass<2, kStream, kNarrowing, Out, T>,
      &WeightedPass<3, kStream, kNarrowing, Out, T>, &WeightedPass<4, kStream, kNarrowing, Out, T>,
      &WeightedPass<5, kStream, kNarrowing, Out, T>, &WeightedPass<6, kStream, kNarrowing, Out, T>,
      &WeightedPass<7, kStream, kNarrowing, Out, T>, &WeightedPass<8, kStream, kNarrowing, Out, T>};
  kPasses[r.size() - 1](out, start, n, x.rows + r.begin, x.weights + r.begin, After(x, r));
}

void WeightedSum(float* acc, std::int64_t n, const WeightedRows& x, bool accumulate) {
  if (x.count == 0 && !accumulate) std::memset(acc, 0, static_cast<std::size_t>(n) * sizeof(float));
  for (const Range r : Split(x.count, kRowsPerPass)) {
    const float* start = accumulate || r.begin > 0 ? acc : nullptr;
    switch (x.dtype) {
      case DType::kBF16:
        AddRows<false, Narrowing::kAny, float, BF16>(acc, start, n, x, r);
        break;
      case DType::kF16:
        AddRows<false, Narrowing::kAny, float, F16>(acc, start, n, x, r);
        break;
      default:
        AddRows<false, Narrowing::kAny, float, float>(acc, start, n, x, r);
    }
  }
}

void StreamWeightedSum(void* out, float* sum, std::int64_t n, const WeightedRows& x) {
  if (x.count == 0) {
    std::memset(out, 0, static_cast<std::size_t>(n * SizeOf(x.dtype)));
    return;
  }
  const Range last{RoundDown(x.count - 1, kRowsPerPass), x.count};
  WeightedRows before = x;
  before.count = last.begin, before.upcoming = x.rows + last.begin, before.upcoming_count = last.size();
  if (before.count > 0) WeightedSum(sum, n, before, /*accumulate=*/false);
  WithType(x.dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    AddRows<true, kHow, T, T>(static_cast<T*>(out), last.begin > 0 ? sum : nullptr, n, x, last);
  });
}

// ---- Rows that are multiplied with one row, which goes to as many others with a weight

// Rows of one pass: their sums and weights stay in registers, and as few streams come as memory serves well.
constexpr int kDotsPerPass = 4;
// Whether a pass writes as it reads: where a store is a whole line. Parts of the lines of four rows in turn leave the write
// buffers one by one (on AVX2 a gradient took four times as long as with row after row).
constexpr bool kStoresLines = kLanes * 4 == kLineBytes;

// Per row two chains of sums, of the first and of the second of each two vectors, whose order does not depend on X. Lines are
// asked for as by WeightedPart.
template <int kRows, bool kStores, Narrowing kNarrowing, class T, class X>
HWY_INLINE void DotsPart(T* const* dst, const X* x, std::int64_t begin, std::int64_t end, const T* const* row,
                         const Vec* weight, Vec* even, Vec* odd, const T* const* fetched,
                         std::int64_t fetched_count, std::int64_t ahead) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T>;
  Vec e[kRows], o[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) e[r] = even[r], o[r] = odd[r];
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    for (std::int64_t r = 0; r < fetched_count; ++r) PrefetchTwoFar(fetched[r] + j + ahead);
    Vec v0, v1;
    LoadTwo<kOrder>(x + j, v0, v1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Vec r0, r1;
      LoadTwo<kOrder>(row[r] + j, r0, r1);
      e[r] = hn::MulAdd(v0, r0, e[r]), o[r] = hn::MulAdd(v1, r1, o[r]);
      if constexpr (kStores)
        StreamTwo<kNarrowing, kOrder>(hn::Mul(weight[r], v0), hn::Mul(weight[r], v1), dst[r] + j);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) even[r] = e[r], odd[r] = o[r];
}

// sums[i] = the dot product of x and rows[i], and with kStores dst[i] = weights[i] * x by non-temporal stores from the
// first element on.
template <int kRows, bool kStores, Narrowing kNarrowing, class T, class X>
void DotsPass(T* const* dst, float* sums, const X* x, std::int64_t n, const void* const* rows,
              const float* weights, const Upcoming& upcoming) {
  constexpr auto kAhead = static_cast<std::int64_t>(2 * kAheadBytes / sizeof(T));
  constexpr bool kFetchesX = std::is_same_v<T, X>;  // Otherwise it is a tile, in the cache.
  const T* row[kRows + 1];
  const T* next[kDotsPerPass + 1];
  Vec weight[kRows], even[kRows], odd[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    row[r] = static_cast<const T*>(rows[r]), even[r] = odd[r] = Set(0.0f);
    weight[r] = kStores ? Set(weights[r]) : Set(0.0f);
  }
  if constexpr (kFetchesX) row[kRows] = x;
  const std::int64_t next_count = Min(upcoming.count, kDotsPerPass + 1);
  for (std::int64_t r = 0; r < next_count; ++r) next[r] = static_cast<const T*>(upcoming.rows[r]);

  const std::int64_t end = RoundDown(n, 2 * kLanes), own = RoundDown(Max(n - kAhead, 0), 2 * kLanes);
  DotsPart<kRows, kStores, kNarrowing>(dst, x, 0, own, row, weight, even, odd, row, kRows + kFetchesX,
                                       kAhead);
  DotsPart<kRows, kStores, kNarrowing>(dst, x, own, end, row, weight, even, odd, next, next_count, -own);
  for (int r = 0; r < kRows; ++r) {
    for (std::int64_t j = end; j < n; j += kLanes) {
      const std::int64_t count = Min(n - j, kLanes);
      even[r] = hn::MulAdd(Load(x + j, count), Load(row[r] + j, count), even[r]);
    }
    if constexpr (kStores) ScalePart<kNarrowing>(dst[r] + end, x + end, weight[r], n - end);
    sums[r] = hn::GetLane(hn::SumOfLanes(FloatTag(), hn::Add(even[r], odd[r])));
  }
}

float Dot(const float* x, const void* row, DType dtype, std::int64_t n) {
  float sum = 0;
  WithType(dtype, [&]<Narrowing kHow, class T>()
                      HWY_ATTR { DotsPass<1, false, kHow, T>(nullptr, &sum, x, n, &row, nullptr, {}); });
  return sum;
}

// dst[i] = weights[i] * x and sums[i] = the dot product of x and rows[i] for i of r, every one given and all rows of dst
// from the start of a line on.
template <Narrowing kNarrowing, class T>
void ScaleDotsOf(T* const* dst, float* sums, const T* x, std::int64_t n, const WeightedRows& rows,
                 const Range& r) {
  using Pass =
      void (*)(T* const*, float*, const T*, std::int64_t, const void* const*, const float*, const Upcoming&);
  static constexpr Pass kPasses[kDotsPerPass] = {
      &DotsPass<1, kStoresLines, kNarrowing, T, T>, &DotsPass<2, kStoresLines, kNarrowing, T, T>,
      &DotsPass<3, kStoresLines, kNarrowing, T, T>, &DotsPass<4, kStoresLines, kNarrowing, T, T>};
  kPasses[r.size() - 1](dst, sums + r.begin, x, n, rows.rows + r.begin, rows.weights + r.begin,
                        After(rows, r));
  if constexpr (!kStoresLines) {
    // While these are written the rows of the next pass are read.
    const Upcoming next = After(rows, r);
    for (std::int64_t i = 0; i < r.size(); ++i)
      ScaleAs<kNarrowing>(dst[i], x, rows.weights[r.begin + i], n, /*stream=*/true,
                          i < next.count ? static_cast<const T*>(next.rows[i]) : nullptr);
  }
}

void ScaleDots(void* const* out, float* sums, const void* data, std::int64_t n, const WeightedRows& rows,
               bool stream) {
  WithType(rows.dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    const T* const x = static_cast<const T*>(data);
    for (const Range r : Split(rows.count, kDotsPerPass)) {
      T* dst[kDotsPerPass];
      bool at_once = stream;
      for (std::int64_t i = r.begin; i < r.end; ++i) {
        T* const to = dst[i - r.begin] = static_cast<T*>(out[i]);
        at_once = at_once && to != nullptr && rows.rows[i] != nullptr && BeforeLine(to, n) == 0;
      }
      if (at_once) {
        ScaleDotsOf<kHow, T>(dst, sums, x, n, rows, r);
        continue;
      }
      for (std::int64_t i = r.begin; i < r.end; ++i) {
        T* const to = dst[i - r.begin];
        if (to != nullptr) ScaleAs<kHow, T>(to, x, rows.weights[i], n, stream, /*next=*/nullptr);
        if (rows.rows[i] != nullptr)
          DotsPass<1, false, kHow, T>(nullptr, sums + i, x, n, rows.rows + i, nullptr, {});
      }
    }
  });
}

}  // namespace

const MovementOps& GetMovementOps() {
  static const MovementOps kOps{.scale = &Scale,
                                .dot = &Dot,
                                .scale_dots = &ScaleDots,
                                .weighted_sum = &WeightedSum,
                                .stream_weighted_sum = &StreamWeightedSum,
                                .copy_row = &CopyRow};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetMovementOps);
const MovementOps& BestMovementOps() { return HWY_DYNAMIC_DISPATCH(GetMovementOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
