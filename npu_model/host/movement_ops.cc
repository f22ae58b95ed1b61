// Bodies of the weighted movements, compiled once per Highway target.
#include "npu_model/host/movement_ops.h"

#include <cstdint>
#include <cstring>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/movement_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                              // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

template <Narrowing kNarrowing, class T>
HWY_INLINE void ScalePart(T* dst, const float* x, Vec weight, std::int64_t n) {
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    StoreTwo<kNarrowing>(hn::Mul(weight, Load(x + j)), hn::Mul(weight, Load(x + j + kLanes)), dst + j);
  }
  for (; j < n; j += kLanes) {
    const std::int64_t count = Min(n - j, kLanes);
    StoreSome<kNarrowing>(hn::Mul(weight, count == kLanes ? Load(x + j) : Load(x + j, count)), dst + j,
                          count);
  }
}

template <Narrowing kNarrowing, class T>
void ScaleAs(void* out, const float* x, float weight, std::int64_t n, bool stream, const void* upcoming) {
  T* const dst = static_cast<T*>(out);
  const T* const next = static_cast<const T*>(upcoming);
  const Vec w = Set(weight);
  if (!stream) return ScalePart<kNarrowing>(dst, x, w, n);
  const std::int64_t begin = BeforeLine(dst, n), end = begin + RoundDown(n - begin, 2 * kLanes);
  ScalePart<kNarrowing>(dst, x, w, begin);
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    if (next != nullptr) PrefetchTwo(next + j);
    StreamTwo<kNarrowing>(hn::Mul(w, Load(x + j)), hn::Mul(w, Load(x + j + kLanes)), dst + j);
  }
  ScalePart<kNarrowing>(dst + end, x + end, w, n - end);
}

void Scale(void* dst, DType dtype, const float* x, float weight, std::int64_t n, bool stream,
           const void* next) {
  WithType(dtype,
           [&]<Narrowing kHow, class T>() HWY_ATTR { ScaleAs<kHow, T>(dst, x, weight, n, stream, next); });
}

// The dot product. store(j, v0, v1) gets the vectors of x at j on the way, up to *end.
template <class T, class Store>
HWY_INLINE float DotWith(const float* x, const T* row, std::int64_t n, const T* next, std::int64_t* end,
                         Store store) {
  const Vec zero = Set(0.0f);
  Vec chain[4] = {zero, zero, zero, zero};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    if (next != nullptr) PrefetchTwo(next + j), PrefetchTwo(next + j + 2 * kLanes);
    Vec v[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      v[c] = Load(x + j + c * kLanes);
      chain[c] = hn::MulAdd(v[c], Load(row + j + c * kLanes), chain[c]);
    }
    store(j, v[0], v[1]), store(j + 2 * kLanes, v[2], v[3]);
  }
  *end = j;
  for (; j + kLanes <= n; j += kLanes) chain[0] = hn::MulAdd(Load(x + j), Load(row + j), chain[0]);
  if (j < n) chain[1] = hn::MulAdd(Load(x + j, n - j), Load(row + j, n - j), chain[1]);
  const Vec sum = hn::Add(hn::Add(chain[0], chain[1]), hn::Add(chain[2], chain[3]));
  return hn::GetLane(hn::SumOfLanes(FloatTag(), sum));
}

template <class T>
float DotAs(const float* x, const void* data, std::int64_t n, const void* upcoming) {
  std::int64_t end = 0;
  return DotWith(x, static_cast<const T*>(data), n, static_cast<const T*>(upcoming), &end,
                 [](std::int64_t, Vec, Vec) HWY_ATTR {});
}

// Where stores can be streamed from the first element on: the lines of dst go while those of the row come.
template <Narrowing kNarrowing, class T>
float ScaleDotAs(void* out, const float* x, const void* data, float weight, std::int64_t n, bool stream,
                 const void* upcoming) {
  T* const dst = static_cast<T*>(out);
  if (!stream || BeforeLine(dst, n) != 0) {
    ScaleAs<kNarrowing, T>(out, x, weight, n, stream, /*upcoming=*/nullptr);
    return DotAs<T>(x, data, n, upcoming);
  }
  const Vec w = Set(weight);
  std::int64_t end = 0;
  const float dot = DotWith(x, static_cast<const T*>(data), n, static_cast<const T*>(upcoming), &end,
                            [&](std::int64_t j, Vec v0, Vec v1)
                                HWY_ATTR { StreamTwo<kNarrowing>(hn::Mul(w, v0), hn::Mul(w, v1), dst + j); });
  ScalePart<kNarrowing>(dst + end, x + end, w, n - end);
  return dot;
}

float ScaleDot(void* dst, DType dtype, const float* x, const void* row, float weight, std::int64_t n,
               bool stream, const void* next) {
  return WithType(dtype, [&]<Narrowing kHow, class T>()
                             HWY_ATTR { return ScaleDotAs<kHow, T>(dst, x, row, weight, n, stream, next); });
}

float Dot(const float* x, const void* row, DType dtype, std::int64_t n, const void* next) {
  return WithType(dtype, [&]<Narrowing, class T>() HWY_ATTR { return DotAs<T>(x, row, n, next); });
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

}  // namespace

const MovementOps& GetMovementOps() {
  static const MovementOps kOps{.target = hwy::TargetName(HWY_TARGET),
                                .scale = &Scale,
                                .dot = &Dot,
                                .scale_dot = &ScaleDot,
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
