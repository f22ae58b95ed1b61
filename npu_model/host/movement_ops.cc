// Bodies of the weighted movements, compiled once per Highway target.
#include "npu_model/host/movement_ops.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "npu_model/host/cpu.h"
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
void ScaleAs(T* dst, const X* x, float weight, std::int64_t n, bool stream) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T, X>;
  const Vec w = Set(weight);
  if (!stream) return ScalePart<kNarrowing>(dst, x, w, n);
  const std::int64_t begin = BeforeLine(dst, n), end = begin + RoundDown(n - begin, 2 * kLanes);
  ScalePart<kNarrowing>(dst, x, w, begin);
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    Vec v0, v1;
    LoadTwo<kOrder>(x + j, v0, v1);
    StreamTwo<kNarrowing, kOrder>(hn::Mul(w, v0), hn::Mul(w, v1), dst + j);
  }
  ScalePart<kNarrowing>(dst + end, x + end, w, n - end);
}

// How rows that lie anywhere are met side by side: their pages are looked up and opened at the same time. A row of a few pages is
// too short for the CPU to notice how it is walked, and eight of them at once are too many: so many bytes ahead of their use
// lines are asked for, into the first-level cache (a locality of 3, as __builtin_prefetch has it) or into the second (2). Rows of
// products, which are written besides, are walked by pieces, and so are rows that are written alone. Constants, for what a loop
// does besides its loads leaves room for fewer of them: with these in variables sums of floats took 1.1 times as long.
struct SumPace {
  std::int64_t ahead;
  int locality;
};
struct ProductPace {
  std::int64_t ahead, piece;
  int locality;
};
// Zen 4: into the first cache, past both, or half as far ahead sums took 1.1 to 1.3 times as long; by pieces of 64 bytes products
// took 1.2 times, of 1024 bytes 1.5 times as long; rows of 14 KiB that were written one after the other 1.4 times.
constexpr SumPace kUsualSums{2048, 2};
constexpr ProductPace kUsualProducts{4096, 256, 2};
constexpr std::int64_t kUsualPieces = 256;  // Of rows that are written alone.
#if HWY_TARGET <= HWY_AVX3
// Zen 5, whose first cache is larger: as on a Zen 4 sums of bf16 took 1.07 to 1.1 times as long, products 1.1 to 1.24 times. Sums
// on an Emerald Rapids 1.03 to 1.08 times, but products are quicker there as on a Zen 4, up to 1.08 times.
constexpr SumPace kNearSums{1024, 3};
constexpr ProductPace kProductsOfZen5{2048, 128, 3};
#elif HWY_TARGET == HWY_AVX2
// Zen 3, rows of 4 to 30 KiB: as on a Zen 4 rows that are written took 1.1 to 1.5 times as long, of 16 KiB 2.5 times, products of
// bf16 1.1 to 1.5 times, of floats 1.3 to 2 times, sums up to 1.2 times.
constexpr SumPace kSumsOfZen3{256, 3};
constexpr ProductPace kProductsOfZen3{512, 512, 3};
constexpr std::int64_t kPiecesOfZen3 = 1024;
#endif

template <std::int64_t kPiece>
void CopyRows(void* const* to, std::int64_t count, const void* from, std::int64_t bytes, const void* next) {
  const ByteTag d;
  constexpr auto kLine = static_cast<std::int64_t>(kLineBytes);
  const auto* const src = static_cast<const std::uint8_t*>(from);
  const auto* const fetched = static_cast<const std::uint8_t*>(next);
  // A row's pieces begin at its own lines.
  for (std::int64_t piece = 0; piece < bytes; piece += kPiece) {
    if (fetched != nullptr) {
      for (std::int64_t i = piece; i < Min(piece + kPiece, bytes); i += kLine)
        __builtin_prefetch(fetched + i, 0, 2);
    }
    for (std::int64_t r = 0; r < count; ++r) {
      auto* const dst = static_cast<std::uint8_t*>(to[r]);
      const std::int64_t first = BeforeLine(dst, bytes), begin = Min(piece + first, bytes),
                         end = Min(begin + kPiece, bytes), last = begin + RoundDown(end - begin, kLine);
      if (piece == 0 && first > 0) std::memcpy(dst, src, static_cast<std::size_t>(first));
      for (std::int64_t i = begin; i < last; i += kByteLanes) hn::Stream(hn::LoadU(d, src + i), d, dst + i);
      if (last < end) std::memcpy(dst + last, src + last, static_cast<std::size_t>(end - last));
    }
  }
}

// ---- Weighted sums

// Rows that one pass adds, and what they are followed by.
constexpr std::int64_t kRowsPerPass = CUBIST_OLD_CPU ? 2 : 8;
struct Upcoming {
  const void* const* rows = nullptr;
  std::int64_t count = 0;
};
Upcoming After(const WeightedRows& x, const Range& r) {
  if (r.end < x.count) return {x.rows + r.end, x.count - r.end};
  return {x.upcoming, x.upcoming_count};
}

template <SumPace kPace, class T>
HWY_INLINE void AskForTwo(const T* p) {
  constexpr auto kLine = static_cast<std::int64_t>(kLineBytes / sizeof(T));
  for (std::int64_t j = 0; j < 2 * kLanes; j += kLine) __builtin_prefetch(p + j, 0, kPace.locality);
}

// out[begin, end) = start (0 where null) + the weighted sum of kRows rows, ascending. Two vectors at a time, of which each
// row's line `ahead` of them is asked for in `fetched`.
template <SumPace kPace, int kRows, bool kStream, Narrowing kNarrowing, class Out, class T>
HWY_INLINE void WeightedPart(Out* out, const float* start, std::int64_t begin, std::int64_t end,
                             const T* const* row, const Vec* weight, const T* const* fetched,
                             std::int64_t fetched_count, std::int64_t ahead) {
  constexpr Order kOrder = kOrderOf<kNarrowing, Out, T>;
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    for (std::int64_t r = 0; r < fetched_count; ++r) AskForTwo<kPace>(fetched[r] + j + ahead);
    Vec low = hn::Zero(FloatTag()), high = low;
    if (start != nullptr) LoadTwo<kOrder>(start + j, low, high);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vec v0, v1;
      LoadTwo<kOrder>(row[r] + j, v0, v1);
      low = hn::MulAdd(weight[r], v0, low), high = hn::MulAdd(weight[r], v1, high);
    }
    if constexpr (kStream) {
      StreamTwo<kNarrowing, kOrder>(low, high, out + j);
    } else {
      StoreTwo<kNarrowing, kOrder>(low, high, out + j);
    }
  }
}

template <SumPace kPace, int kRows, bool kStream, Narrowing kNarrowing, class Out, class T>
void WeightedPass(Out* out, const float* start, std::int64_t n, const void* const* rows, const float* weights,
                  const Upcoming& upcoming) {
  constexpr auto kAhead = kPace.ahead / static_cast<std::int64_t>(sizeof(T));
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
  WeightedPart<kPace, kRows, kStream, kNarrowing>(out, start, begin, own, row, weight, row, kRows, kAhead);
  WeightedPart<kPace, kRows, kStream, kNarrowing>(out, start, own, end, row, weight, next, next_count, -own);
  ends(end, n);
}

template <SumPace kPace, bool kStream, Narrowing kNarrowing, class Out, class T>
void AddRows(Out* out, const float* start, std::int64_t n, const WeightedRows& x, const Range& r) {
  using Pass = void (*)(Out*, const float*, std::int64_t, const void* const*, const float*, const Upcoming&);
  static constexpr auto kPasses = []<int... kLess>(std::integer_sequence<int, kLess...>) {
    return std::array<Pass, sizeof...(kLess)>{
        &WeightedPass<kPace, kLess + 1, kStream, kNarrowing, Out, T>...};
  }
  (std::make_integer_sequence<int, kRowsPerPass>());
  kPasses[static_cast<std::size_t>(r.size() - 1)](out, start, n, x.rows + r.begin, x.weights + r.begin,
                                                  After(x, r));
}

template <SumPace kPace>
void WeightedSum(float* acc, std::int64_t n, const WeightedRows& x, bool accumulate) {
  if (x.count == 0 && !accumulate) std::memset(acc, 0, static_cast<std::size_t>(n) * sizeof(float));
  for (const Range r : Split(x.count, kRowsPerPass)) {
    const float* start = accumulate || r.begin > 0 ? acc : nullptr;
    switch (x.dtype) {
      case DType::kBF16:
        AddRows<kPace, false, Narrowing::kAny, float, BF16>(acc, start, n, x, r);
        break;
      case DType::kF16:
        AddRows<kPace, false, Narrowing::kAny, float, F16>(acc, start, n, x, r);
        break;
      default:
        AddRows<kPace, false, Narrowing::kAny, float, float>(acc, start, n, x, r);
    }
  }
}

template <SumPace kPace>
void StreamWeightedSum(void* out, float* sum, std::int64_t n, const WeightedRows& x) {
  if (x.count == 0) {
    std::memset(out, 0, static_cast<std::size_t>(n * SizeOf(x.dtype)));
    return;
  }
  const Range last{RoundDown(x.count - 1, kRowsPerPass), x.count};
  WeightedRows before = x;
  before.count = last.begin, before.upcoming = x.rows + last.begin, before.upcoming_count = last.size();
  if (before.count > 0) WeightedSum<kPace>(sum, n, before, /*accumulate=*/false);
  WithType(x.dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    AddRows<kPace, true, kHow, T, T>(static_cast<T*>(out), last.begin > 0 ? sum : nullptr, n, x, last);
  });
}

// ---- Rows that are multiplied with one row, which goes to as many others with a weight

// Rows of one pass, and what one asks for: its rows and x.
constexpr std::int64_t kDotsPerPass = 8, kFetchedPerPass = kDotsPerPass + 1;
template <class T>
struct DotRows {
  std::int64_t count = 0;
  T* dst[kDotsPerPass];
  const T* row[kDotsPerPass];
  float weight[kDotsPerPass];
};

// Columns [begin, end) of a row: even + odd += x * row, and with kStores dst = weight * x by non-temporal stores. Two chains of
// sums, of the first and of the second of each two vectors, whose order does not depend on X.
template <bool kDots, bool kStores, Narrowing kNarrowing, class T, class X>
HWY_INLINE void DotPart(T* dst, const X* x, const T* row, std::int64_t begin, std::int64_t end, float weight,
                        Vec& even, Vec& odd) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T>;
  const Vec w = Set(weight);
  Vec even_sum = even, odd_sum = odd;
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    Vec v0, v1;
    LoadTwo<kOrder>(x + j, v0, v1);
    if constexpr (kDots) {
      Vec r0, r1;
      LoadTwo<kOrder>(row + j, r0, r1);
      even_sum = hn::MulAdd(v0, r0, even_sum), odd_sum = hn::MulAdd(v1, r1, odd_sum);
    }
    if constexpr (kStores) StreamTwo<kNarrowing, kOrder>(hn::Mul(w, v0), hn::Mul(w, v1), dst + j);
  }
  even = even_sum, odd = odd_sum;
}

// sums[i] = the dot product of x and row[i], and with kStores dst[i] = weight[i] * x by non-temporal stores from the first
// element on. The rows go side by side, by pieces, whose lines are asked for ahead of them as by WeightedPart.
template <ProductPace kPace, bool kDots, bool kStores, Narrowing kNarrowing, class T, class X>
void DotsPass(const DotRows<T>& rows, float* sums, const X* x, std::int64_t n, const Upcoming& upcoming) {
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(T));
  constexpr std::int64_t kAhead = kPace.ahead / kElement, kPiece = kPace.piece / kElement,
                         kLine = static_cast<std::int64_t>(kLineBytes) / kElement;
  constexpr bool kFetchesX = std::is_same_v<T, X>;  // Otherwise it is a tile, in the cache.
  Vec evens[kDotsPerPass], odds[kDotsPerPass];
  for (std::int64_t r = 0; r < rows.count; ++r) evens[r] = odds[r] = Set(0.0f);
  const T* own[kFetchedPerPass];
  const T* next[kFetchedPerPass];
  std::int64_t own_count = 0;
  if constexpr (kDots) {
    for (; own_count < rows.count; ++own_count) own[own_count] = rows.row[own_count];
  }
  if constexpr (kFetchesX) own[own_count++] = x;
  const std::int64_t next_count = Min(upcoming.count, kFetchedPerPass);
  for (std::int64_t r = 0; r < next_count; ++r) next[r] = static_cast<const T*>(upcoming.rows[r]);

  const std::int64_t end = RoundDown(n, 2 * kLanes), last_own = RoundDown(Max(n - kAhead, 0), kPiece);
  for (std::int64_t begin = 0; begin < end; begin += kPiece) {
    const std::int64_t stop = Min(begin + kPiece, end);
    const auto fetch = [&](const T* const* from, std::int64_t count, std::int64_t ahead) {
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t j = begin; j < stop; j += kLine)
          __builtin_prefetch(from[r] + j + ahead, 0, kPace.locality);
      }
    };
    if (begin < last_own) {
      fetch(own, own_count, kAhead);
    } else {
      fetch(next, next_count, -last_own);
    }
    const auto multiply = [&](std::int64_t r, std::int64_t until) HWY_ATTR {
      DotPart<kDots, kStores, kNarrowing>(rows.dst[r], x, rows.row[r], begin, until, rows.weight[r], evens[r],
                                          odds[r]);
    };
    // Nearly always: so many rows, and a length, that the compiler knows.
    if (rows.count == kDotsPerPass && stop == begin + kPiece) {
#pragma GCC unroll 8
      for (std::int64_t r = 0; r < kDotsPerPass; ++r) multiply(r, begin + kPiece);
    } else {
      for (std::int64_t r = 0; r < rows.count; ++r) multiply(r, stop);
    }
  }
  for (std::int64_t r = 0; r < rows.count; ++r) {
    if constexpr (kStores) ScalePart<kNarrowing>(rows.dst[r] + end, x + end, Set(rows.weight[r]), n - end);
    if constexpr (!kDots) continue;
    Vec even = evens[r];
    for (std::int64_t j = end; j < n; j += kLanes) {
      const std::int64_t count = Min(n - j, kLanes);
      even = hn::MulAdd(Load(x + j, count), Load(rows.row[r] + j, count), even);
    }
    sums[r] = hn::GetLane(hn::SumOfLanes(FloatTag(), hn::Add(even, odds[r])));
  }
}

template <Narrowing kNarrowing, class T, class X>
float DotOf(const X* x, const T* row, std::int64_t n) {
  float sum = 0;
  DotRows<T> rows;
  rows.count = 1, rows.dst[0] = nullptr, rows.row[0] = row, rows.weight[0] = 0;
  DotsPass<kUsualProducts, true, false, kNarrowing>(rows, &sum, x, n, {});
  return sum;
}

float Dot(const float* x, const void* row, DType dtype, std::int64_t n) {
  float sum = 0;
  WithType(dtype,
           [&]<Narrowing kHow, class T>() HWY_ATTR { sum = DotOf<kHow>(x, static_cast<const T*>(row), n); });
  return sum;
}

template <ProductPace kPace>
void ScaleDots(void* const* out, float* sums, const void* data, std::int64_t n, const WeightedRows& x_rows,
               bool stream) {
  WithType(x_rows.dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    // A NaN is rounded to a number only where its low half is set: a weight's may be, no other's is.
    constexpr bool kRounds = kHow == Narrowing::kQuiet;
    constexpr Narrowing kOfNumbers = kRounds ? Narrowing::kNoNaN : kHow;
    const T* const x = static_cast<const T*>(data);
    for (const Range range : Split(x_rows.count, kDotsPerPass)) {
      DotRows<T> rows;
      rows.count = range.size();
      bool stores = stream, dots = true, no_dots = true;  // All of them.
      for (std::int64_t r = 0; r < rows.count; ++r) {
        rows.dst[r] = static_cast<T*>(out[range.begin + r]);
        rows.row[r] = static_cast<const T*>(x_rows.rows[range.begin + r]);
        rows.weight[r] = x_rows.weights[range.begin + r];
        stores = stores && rows.dst[r] != nullptr && BeforeLine(rows.dst[r], n) == 0 &&
                 !(kRounds && std::isnan(rows.weight[r]));
        dots = dots && rows.row[r] != nullptr, no_dots = no_dots && rows.row[r] == nullptr;
      }
      if (stores && dots) {
        DotsPass<kPace, true, true, kOfNumbers>(rows, sums + range.begin, x, n, After(x_rows, range));
        continue;
      }
      if (stores && no_dots) {
        DotsPass<kPace, false, true, kOfNumbers>(rows, sums + range.begin, x, n, After(x_rows, range));
        continue;
      }
      for (std::int64_t r = 0; r < rows.count; ++r) {
        if (rows.dst[r] != nullptr) ScaleAs<kHow>(rows.dst[r], x, rows.weight[r], n, stream);
        if (rows.row[r] != nullptr) sums[range.begin + r] = DotOf<kHow>(x, rows.row[r], n);
      }
    }
  });
}

template <SumPace kSums, ProductPace kProducts, std::int64_t kPiece>
constexpr MovementOps kOps{.dot = &Dot,
                           .scale_dots = &ScaleDots<kProducts>,
                           .weighted_sum = &WeightedSum<kSums>,
                           .stream_weighted_sum = &StreamWeightedSum<kSums>,
                           .copy_rows = &CopyRows<kPiece>};

}  // namespace

const MovementOps& GetMovementOps() {
#if HWY_TARGET <= HWY_AVX3
  if (ThisCpu() == Cpu::kZen5) return kOps<kNearSums, kProductsOfZen5, kUsualPieces>;
  if (ThisCpu() == Cpu::kIntel) return kOps<kNearSums, kUsualProducts, kUsualPieces>;
#elif HWY_TARGET == HWY_AVX2
  if (ThisCpu() == Cpu::kZen3) return kOps<kSumsOfZen3, kProductsOfZen3, kPiecesOfZen3>;
#endif
  return kOps<kUsualSums, kUsualProducts, kUsualPieces>;
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
