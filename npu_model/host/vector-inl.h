// What the Vector's SIMD bodies are made of: loads and stores of any float type, casts, elementary functions. Included
// once per Highway target by each *_ops.cc that needs it, after foreach_target.h.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_VECTOR_INL_H_
#undef CUBIST_NPU_MODEL_HOST_VECTOR_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_VECTOR_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = HWY_FULL(float);
using WordTag = hn::Rebind<std::uint32_t, FloatTag>;
using IntTag = hn::Rebind<std::int32_t, FloatTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;  // As many 16-bit lanes as a vector has floats.
using ByteTag = HWY_FULL(std::uint8_t);
using Vec = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;
using Halves = hn::Vec<HalfTag>;

constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));
constexpr std::int64_t kByteLanes = static_cast<std::int64_t>(hn::MaxLanes(ByteTag()));
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr std::int64_t Min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t Max(std::int64_t a, std::int64_t b) { return a < b ? b : a; }
constexpr std::int64_t RoundDown(std::int64_t a, std::int64_t b) { return a / b * b; }
HWY_INLINE Vec Set(float value) { return hn::Set(FloatTag(), value); }

// ---- Loads and stores: kLanes elements, or the first `count` < kLanes of them and nothing beyond

template <class Tag>
HWY_INLINE hn::Vec<Tag> LoadFirst(Tag d, const hn::TFromD<Tag>* p, std::int64_t count) {
#if HWY_TARGET <= HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(count)), d, p);
#else
  HWY_ALIGN hn::TFromD<Tag> lanes[hn::MaxLanes(d)] = {};
  std::memcpy(lanes, p, static_cast<std::size_t>(count) * sizeof(lanes[0]));
  return hn::Load(d, lanes);
#endif
}
template <class Tag>
HWY_INLINE void StoreFirst(hn::Vec<Tag> v, Tag d, hn::TFromD<Tag>* p, std::int64_t count) {
#if HWY_TARGET <= HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, static_cast<std::size_t>(count)), d, p);
#else
  HWY_ALIGN hn::TFromD<Tag> lanes[hn::MaxLanes(d)];
  hn::Store(v, d, lanes);
  std::memcpy(p, lanes, static_cast<std::size_t>(count) * sizeof(lanes[0]));
#endif
}

HWY_INLINE Vec FloatOf(Words words) { return hn::BitCast(FloatTag(), words); }
HWY_INLINE Words WordsOf(Vec v) { return hn::BitCast(WordTag(), v); }

HWY_INLINE Vec WidenBF16(Halves h) { return FloatOf(hn::ShiftLeft<16>(hn::PromoteTo(WordTag(), h))); }

// How two vectors become 16-bit floats: any values; results of arithmetic, whose NaNs are quiet; values of which the caller
// knows none to be NaN, or will see that one is and store again; by the CPU's own instruction for bf16, which takes denormals
// for zero (where HasBF16Avx512()).
enum class Narrowing { kAny, kQuiet, kNoNaN, kNative };

// To nearest even by adding half of the last place kept, less one when that is even. The result stands in the
// upper half of each word. A NaN would carry over into zero: it keeps its upper half, made quiet.
template <Narrowing kNarrowing = Narrowing::kAny>
HWY_INLINE Words RoundBF16(Vec v) {
  const WordTag d;
  const Words u = WordsOf(v);
#if HWY_TARGET <= HWY_AVX3  // A test into a mask is one instruction, a shift and a mask are two.
  const Words half =
      hn::IfThenElse(hn::TestBit(u, hn::Set(d, 0x10000u)), hn::Set(d, 0x8000u), hn::Set(d, 0x7fffu));
#else
  const Words half = hn::Add(hn::And(hn::ShiftRight<16>(u), hn::Set(d, 1u)), hn::Set(d, 0x7fffu));
#endif
  if constexpr (kNarrowing == Narrowing::kQuiet)
    return hn::Add(u, hn::IfThenElseZero(hn::RebindMask(d, hn::Eq(v, v)), half));
  const Words rounded = hn::Add(u, half);
  if constexpr (kNarrowing == Narrowing::kNoNaN) return rounded;
  return hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(v)), hn::Or(u, hn::Set(d, 0x400000u)), rounded);
}
HWY_INLINE Halves NarrowBF16(Vec v) { return hn::TruncateTo(HalfTag(), hn::ShiftRight<16>(RoundBF16(v))); }

#if HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
using Float16Tag = hn::Rebind<hwy::float16_t, FloatTag>;
HWY_INLINE Vec WidenF16(Halves h) { return hn::PromoteTo(FloatTag(), hn::BitCast(Float16Tag(), h)); }
HWY_INLINE Halves NarrowF16(Vec v) { return hn::BitCast(HalfTag(), hn::DemoteTo(Float16Tag(), v)); }
#else
// Highway's own emulation truncates. Exponent and mantissa of the half, read as a float, are its value times
// 2^-112, subnormals included.
HWY_INLINE Vec WidenF16(Halves halves) {
  const WordTag d;
  const Words h = hn::PromoteTo(d, halves);
  const Words shifted = hn::ShiftLeft<13>(hn::And(h, hn::Set(d, 0x7fffu)));
  const Words finite = WordsOf(hn::Mul(FloatOf(shifted), Set(0x1p112f)));
  const Words special = hn::Or(shifted, hn::Set(d, 0x7f800000u));
  const auto is_special = hn::Gt(hn::BitCast(IntTag(), shifted), hn::Set(IntTag(), 0x0f7fffff));
  const Words magnitude = hn::IfThenElse(hn::RebindMask(d, is_special), special, finite);
  return FloatOf(hn::Or(magnitude, hn::ShiftLeft<16>(hn::And(h, hn::Set(d, 0x8000u)))));
}
// The three cases of F16(float) in types.h, blended.
HWY_INLINE Halves NarrowF16(Vec v) {
  const WordTag d;
  const Words u = WordsOf(v);
  const Words magnitude = hn::And(u, hn::Set(d, 0x7fffffffu));
  const auto above = [](Words words, std::int32_t limit) HWY_ATTR {
    return hn::RebindMask(WordTag(), hn::Gt(hn::BitCast(IntTag(), words), hn::Set(IntTag(), limit)));
  };
  const Words last = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1u));
  const Words normal = hn::ShiftRight<13>(
      hn::Add(hn::Sub(magnitude, hn::Set(d, 0x38000000u)), hn::Add(last, hn::Set(d, 0xfffu))));
  const Words subnormal = hn::Sub(WordsOf(hn::Add(FloatOf(magnitude), Set(0.5f))), hn::Set(d, 0x3f000000u));
  const Words nan = hn::Or(hn::Set(d, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x3ffu)));
  Words half = hn::IfThenElse(above(magnitude, 0x387fffff), normal, subnormal);
  half = hn::IfThenElse(above(magnitude, 0x477fffff), hn::Set(d, 0x7c00u), half);
  half = hn::IfThenElse(above(magnitude, 0x7f800000), nan, half);
  half = hn::Or(half, hn::And(hn::ShiftRight<16>(u), hn::Set(d, 0x8000u)));
  return hn::TruncateTo(HalfTag(), half);
}
#endif

HWY_INLINE Vec Load(const float* p) { return hn::LoadU(FloatTag(), p); }
HWY_INLINE Vec Load(const float* p, std::int64_t count) { return LoadFirst(FloatTag(), p, count); }
HWY_INLINE void Store(Vec v, float* p) { hn::StoreU(v, FloatTag(), p); }
HWY_INLINE void Store(Vec v, float* p, std::int64_t count) { StoreFirst(v, FloatTag(), p, count); }

// The 16-bit types. `bits` of the structs below is their only member, so their arrays are arrays of it.
HWY_INLINE Halves Narrow(Vec v, const BF16*) { return NarrowBF16(v); }
HWY_INLINE Halves Narrow(Vec v, const F16*) { return NarrowF16(v); }
HWY_INLINE Vec WidenHalves(Halves h, const BF16*) { return WidenBF16(h); }
HWY_INLINE Vec WidenHalves(Halves h, const F16*) { return WidenF16(h); }
template <class T>
HWY_INLINE Vec Load(const T* p) {
  return WidenHalves(hn::LoadU(HalfTag(), reinterpret_cast<const std::uint16_t*>(p)), p);
}
template <class T>
HWY_INLINE Vec Load(const T* p, std::int64_t count) {
  return WidenHalves(LoadFirst(HalfTag(), reinterpret_cast<const std::uint16_t*>(p), count), p);
}
template <class T>
HWY_INLINE void Store(Vec v, T* p) {
  hn::StoreU(Narrow(v, p), HalfTag(), reinterpret_cast<std::uint16_t*>(p));
}
template <class T>
HWY_INLINE void Store(Vec v, T* p, std::int64_t count) {
  StoreFirst(Narrow(v, p), HalfTag(), reinterpret_cast<std::uint16_t*>(p), count);
}

// ---- Elementary functions

// Highway leaves it to the target what becomes of a NaN; x86 returns the second operand, the others are told
// to.
HWY_INLINE Vec MaxOrSecond(Vec a, Vec b) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Max(a, b);
#else
  return hn::IfThenElse(hn::Gt(a, b), a, b);
#endif
}
HWY_INLINE Vec MinOrSecond(Vec a, Vec b) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Min(a, b);
#else
  return hn::IfThenElse(hn::Lt(a, b), a, b);
#endif
}
// The extreme lane of a vector without NaN.
template <bool kMinimum>
HWY_INLINE float ExtremeLane(Vec v) {
  const FloatTag d;
#if HWY_TARGET == \
    HWY_EMU128  // Highway 1.0.3 starts from the extreme finite float there, which is wrong for infinities.
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, d, lanes);
  for (const float lane : lanes) {
    if (kMinimum ? lane < lanes[0] : lane > lanes[0]) lanes[0] = lane;
  }
  return lanes[0];
#else
  return hn::GetLane(kMinimum ? hn::MinOfLanes(d, v) : hn::MaxOfLanes(d, v));
#endif
}
// The maximum, or NaN where either is.
HWY_INLINE Vec MaxOrNaN(Vec a, Vec b) { return hn::IfThenElse(hn::IsNaN(a), a, MaxOrSecond(a, b)); }

constexpr float kLn2High = 0x1.63p-1f;  // Nine bits, so that its product with an exponent is exact.
constexpr float kLn2Low = -2.12194440055e-4f;

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. The polynomial is the minimax one of degree 6
// with exp(0) = 1 and slope 1 kept (relative error 3e-9); with rounding the error stays below 0.9 ulp, 1.2
// ulp without FMA. Subnormal results do not flush. NaN stays NaN, above 88.72 is infinity, below -103.97
// zero. `kAtMostZero`: x is at most 0, or NaN; kLogisticCut at most holds as well.
template <bool kAtMostZero, int kVectors>
HWY_INLINE void ExpEach(Vec (&x)[kVectors]) {
  // Added to a small float it leaves the nearest integer in the low bits: n or, where 2^(n + 32) is always a normal number,
  // the exponent of that.
  constexpr bool kOneStep = kAtMostZero && HWY_TARGET > HWY_AVX3;
  constexpr float kMagic = kOneStep ? 0x1.8p23f + 127 + 32 : 0x1.8p23f;
  static constexpr float kPolynomial[] = {
      1.38144639e-3f, 8.36878038e-3f, 4.16683943e-2f, 1.66665201e-1f, 4.99999934e-1f, 1.0f, 1.0f};
  Vec shifted[kVectors], r[kVectors], y[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    x[i] = MaxOrSecond(Set(-105.0f), x[i]);
    if constexpr (!kAtMostZero) x[i] = MinOrSecond(Set(89.0f), x[i]);
    shifted[i] = hn::MulAdd(x[i], Set(0x1.715476p0f), Set(kMagic));
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const Vec n = hn::Sub(shifted[i], Set(kMagic));
    r[i] = hn::NegMulAdd(n, Set(kLn2Low), hn::NegMulAdd(n, Set(kLn2High), x[i]));
    y[i] = Set(kPolynomial[0]);
  }
#pragma GCC unroll 6
  for (int degree = 1; degree <= 6; ++degree) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) y[i] = hn::MulAdd(y[i], r[i], Set(kPolynomial[degree]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#if HWY_TARGET <= HWY_AVX3
    x[i] = Vec{_mm512_scalef_ps(y[i].raw, hn::Sub(shifted[i], Set(kMagic)).raw)};
#else
    // By two factors, because 2^n itself may lie outside the normal range.
    const IntTag d;
    if constexpr (kOneStep) {
      const Vec scale = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::BitCast(d, shifted[i])));
      x[i] = hn::Mul(hn::Mul(y[i], scale), Set(0x1p-32f));
    } else {  // Both halves of n are below 2^7 in magnitude.
      const auto exponent = hn::Sub(hn::BitCast(d, shifted[i]), hn::BitCast(d, Set(kMagic)));
      const auto half = hn::ShiftRight<1>(exponent);
      const auto bias = hn::Set(d, 127);
      const Vec scale0 = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::Add(half, bias)));
      const Vec scale1 = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
      x[i] = hn::Mul(hn::Mul(y[i], scale0), scale1);
    }
#endif
  }
}
template <bool kAtMostZero>
HWY_INLINE Vec Exp(Vec x) {
  Vec one[1] = {x};
  ExpEach<kAtMostZero>(one);
  return one[0];
}

// x = exp(x) of scores that are at most about 0, for as few instructions as there are: 2^n 2^f with t = x log2(e) = n + f, n
// rounded down or to the nearest, f through the minimax polynomial with 2^0 = 1. Its error is about 2 ulp (of degree 5, for
// weights that become 16-bit floats) or below 1.2 ulp (of degree 6), and what t loses when it is rounded besides: |x| 2^-24
// and a quarter of that. NaN stays NaN, -inf gives 0, and so may what is below the normal range; above 88.3 is infinity,
// which kBounded promises not to meet. The vectors go through it step by step: one behind the other they would wait in the
// schedulers for each other's latencies (a chain is 40 cycles long, and worth 4 of throughput).
template <bool kNarrow, bool kBounded = false, int kVectors>
HWY_INLINE void ExpScores(Vec (&x)[kVectors]) {
  constexpr int kDegree = kNarrow ? 5 : 6;
  constexpr float kLog2E = 0x1.715476p0f;
#if HWY_TARGET <= HWY_AVX3
  constexpr float kPolynomial[2][6] = {
      {2.16129149e-4f, 1.2467847e-3f, 9.67545155e-3f, 5.54852821e-2f, 2.40229309e-1f, 6.93147063e-1f},
      {1.86713005e-3f, 9.01703071e-3f, 5.57999127e-2f, 2.40164444e-1f, 6.93151295e-1f}};
#else
  constexpr float kPolynomial[2][6] = {
      {1.53533736e-4f, 1.33988797e-3f, 9.61843692e-3f, 5.55033237e-2f, 2.40226477e-1f, 6.93147182e-1f},
      {1.32646644e-3f, 9.67151206e-3f, 5.55073395e-2f, 2.40222424e-1f, 6.93147004e-1f}};
  // Added to a small float it leaves the nearest integer, with an exponent's bias, in the low bits. Of n = -127 remains 0.
  constexpr float kMagic = 0x1.8p23f + 127.0f;
#endif
  Vec f[kVectors], y[kVectors];  // x becomes t, or n with its bias.
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#if HWY_TARGET <= HWY_AVX3
    x[i] = hn::Mul(x[i], Set(kLog2E));
#else
    x[i] = MaxOrSecond(Set(-127.0f / kLog2E), x[i]);
    if constexpr (!kBounded) x[i] = MinOrSecond(Set(128.0f / kLog2E), x[i]);
#endif
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#if HWY_TARGET <= HWY_AVX3
    f[i] = Vec{_mm512_reduce_ps(x[i].raw, _MM_FROUND_TO_NEG_INF)};
#else
    y[i] = hn::MulAdd(x[i], Set(kLog2E), Set(kMagic));
    f[i] = hn::MulSub(x[i], Set(kLog2E), hn::Sub(y[i], Set(kMagic)));
    x[i] = y[i];
#endif
    y[i] = Set(kPolynomial[kNarrow][0]);
  }
#pragma GCC unroll 6
  for (int degree = 1; degree <= kDegree; ++degree) {
    const Vec next = Set(degree == kDegree ? 1.0f : kPolynomial[kNarrow][degree]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) y[i] = hn::MulAdd(y[i], f[i], next);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#if HWY_TARGET <= HWY_AVX3
    x[i] = Vec{_mm512_scalef_ps(y[i].raw, x[i].raw)};
#else
    x[i] = hn::Mul(y[i], hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::BitCast(IntTag(), x[i]))));
#endif
  }
}
// How many at a time; of AVX2's sixteen registers four leave none for constants, which loads bring as quickly.
constexpr int kScoreVectors = HWY_TARGET <= HWY_AVX2 ? 4 : 2;

// ln(x) = e ln 2 + ln(1 + f), x = 2^e (1 + f), 1 + f in [sqrt(1/2), sqrt(2)); ln(1 + f) = f - f^2 / 2 + f^3
// P(f) with P minimax of degree 7 (relative error 6e-9; with rounding below 0.9 ulp). ln(0) = -inf,
// ln(negative) = NaN, ln(inf) = inf.
HWY_INLINE Vec Ln(Vec x) {
  const IntTag d;
  const Vec smallest_normal = Set(std::numeric_limits<float>::min());
  const auto subnormal = hn::Lt(x, smallest_normal);
  const Vec normal = hn::IfThenElse(subnormal, hn::Mul(x, Set(0x1p25f)), x);
  const auto bits = hn::BitCast(d, normal);
  const auto e = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(d, 0x3f3504f3)));
  const Vec f = hn::Sub(hn::BitCast(FloatTag(), hn::Sub(bits, hn::ShiftLeft<23>(e))), Set(1.0f));
  const Vec exponent = hn::Sub(hn::ConvertTo(FloatTag(), e), hn::IfThenElseZero(subnormal, Set(25.0f)));

  Vec y = hn::MulAdd(Set(-7.63458365e-2f), f, Set(1.27616977e-1f));
  y = hn::MulAdd(y, f, Set(-1.31602074e-1f));
  y = hn::MulAdd(y, f, Set(1.42017438e-1f));
  y = hn::MulAdd(y, f, Set(-1.66233535e-1f));
  y = hn::MulAdd(y, f, Set(2.00012272e-1f));
  y = hn::MulAdd(y, f, Set(-2.50008211e-1f));
  y = hn::MulAdd(y, f, Set(3.33333317e-1f));
  const Vec f2 = hn::Mul(f, f);
  y = hn::MulAdd(hn::Mul(f2, f), y, hn::Mul(exponent, Set(kLn2Low)));
  y = hn::NegMulAdd(Set(0.5f), f2, y);
  y = hn::MulAdd(exponent, Set(kLn2High), hn::Add(f, y));

  y = hn::IfThenElse(hn::Eq(x, Set(kInfinity)), x, y);
  y = hn::IfThenElse(hn::Eq(x, Set(0.0f)), Set(-kInfinity), y);
  return hn::IfThenElse(hn::Ge(x, Set(0.0f)), y, Set(kNaN));
}

// What x is cut at before e = exp(x) gives its sigmoid, e / (1 + e): that is 1 to the last place there, and e finite.
constexpr float kLogisticCut = 44.0f;

// ---- Rows, and stores of two vectors at a time

template <class T>
HWY_INLINE T* RowAs(const Rows& x, std::int64_t i) {
  return static_cast<T*>(x.data) + i * x.pitch;
}

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

// How a row's elements stand in two vectors: the second behind the first, or the even ones in the first and the odd ones in
// the second. So bf16 takes one instruction each to widen and, once rounded, two for both to narrow (four otherwise); to
// what treats all elements alike it is the same. The CPU's own instruction narrows in the row's order.
enum class Order { kRow, kPairs };
// AVX-512 was not measured so.
constexpr bool kHasPairs = (HWY_TARGET > HWY_AVX3) && (HWY_TARGET != HWY_SCALAR);
template <class T, class... More>
constexpr bool kAreBF16 = (std::is_same_v<T, BF16> && ... && std::is_same_v<More, BF16>);
template <Narrowing kNarrowing, class... T>
constexpr Order kOrderOf = (kHasPairs && (kNarrowing != Narrowing::kNative) && kAreBF16<T...>) ? Order::kPairs
                                                                                               : Order::kRow;

#if HWY_TARGET != HWY_SCALAR
HWY_INLINE void LoadPairs(const BF16* p, Vec& even, Vec& odd) {
  const WordTag d;
  const Words words = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(p));
  even = FloatOf(hn::ShiftLeft<16>(words)), odd = FloatOf(hn::And(words, hn::Set(d, 0xffff0000u)));
}
HWY_INLINE void LoadPairs(const float* p, Vec& even, Vec& odd) {
  const FloatTag d;
  const Vec low = Load(p), high = Load(p + kLanes);
  even = hn::ConcatEven(d, high, low), odd = hn::ConcatOdd(d, high, low);
}
#endif
template <Order kOrder, class T>
HWY_INLINE void LoadTwo(const T* p, Vec& v0, Vec& v1) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kOrder == Order::kPairs) return LoadPairs(p, v0, v1);
#endif
  v0 = Load(p), v1 = Load(p + kLanes);
}

// Two vectors, narrowed into one register where the type is narrower, so that stores are whole vectors.
template <Narrowing = Narrowing::kAny, Order = Order::kRow>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, float* p) {
  Store(v0, p);
  Store(v1, p + kLanes);
}
template <Narrowing = Narrowing::kAny, Order = Order::kRow>
HWY_INLINE void StreamTwo(Vec v0, Vec v1, float* p) {
  hn::Stream(v0, FloatTag(), p);
  hn::Stream(v1, FloatTag(), p + kLanes);
}
#if HWY_TARGET == HWY_SCALAR
template <Narrowing = Narrowing::kAny, Order = Order::kRow, class T>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, T* p) {
  Store(v0, p);
  Store(v1, p + kLanes);
}
template <Narrowing = Narrowing::kAny, Order = Order::kRow, class T>
HWY_INLINE void StreamTwo(Vec v0, Vec v1, T* p) {
  StoreTwo(v0, v1, p);
}
#else
using TwoHalvesTag = hn::Repartition<std::uint16_t, FloatTag>;
using TwoHalves = hn::Vec<TwoHalvesTag>;
template <Narrowing kNarrowing, Order kOrder>
HWY_INLINE TwoHalves NarrowTwo(Vec v0, Vec v1, const BF16*) {
  const TwoHalvesTag d;
#if HWY_TARGET <= HWY_AVX3
  if constexpr (kNarrowing == Narrowing::kNative) {
    TwoHalves halves;  // No target of Highway's has the intrinsic.
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves.raw) : "v"(v1.raw), "v"(v0.raw));
    return halves;
  }
#endif
  const Words first = RoundBF16<kNarrowing>(v0), second = RoundBF16<kNarrowing>(v1);
  if constexpr (kOrder == Order::kPairs)
    return hn::OddEven(hn::BitCast(d, second), hn::BitCast(d, hn::ShiftRight<16>(first)));
  return hn::ConcatOdd(d, hn::BitCast(d, second), hn::BitCast(d, first));
}
template <Narrowing, Order>
HWY_INLINE TwoHalves NarrowTwo(Vec v0, Vec v1, const F16*) {
  return hn::Combine(TwoHalvesTag(), NarrowF16(v1), NarrowF16(v0));
}
template <Narrowing kNarrowing = Narrowing::kAny, Order kOrder = Order::kRow, class T>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, T* p) {
  hn::StoreU(NarrowTwo<kNarrowing, kOrder>(v0, v1, p), TwoHalvesTag(), reinterpret_cast<std::uint16_t*>(p));
}
template <Narrowing kNarrowing = Narrowing::kAny, Order kOrder = Order::kRow, class T>
HWY_INLINE void StreamTwo(Vec v0, Vec v1, T* p) {
  hn::Stream(NarrowTwo<kNarrowing, kOrder>(v0, v1, p), TwoHalvesTag(), reinterpret_cast<std::uint16_t*>(p));
}
#endif

// The first `count` elements of a vector, at most kLanes, narrowed as StoreTwo does.
template <Narrowing kNarrowing, class T>
HWY_INLINE void StoreSome(Vec v, T* p, std::int64_t count) {
#if HWY_TARGET <= HWY_AVX3
  if constexpr (kNarrowing == Narrowing::kNative && sizeof(T) == 2) {
    const Halves halves = hn::LowerHalf(HalfTag(), NarrowTwo<kNarrowing, Order::kRow>(v, v, p));
    return StoreFirst(halves, HalfTag(), reinterpret_cast<std::uint16_t*>(p), count);
  }
#endif
  if (count == kLanes) {
    Store(v, p);
  } else {
    Store(v, p, count);
  }
}

// Calls body.operator()<how>(the type's element) for the type that weights are narrowed to and how its stores narrow.
template <class Body>
HWY_INLINE void ForNarrowType(DType type, Body body) {
  switch (type) {
    case DType::kBF16:
#if HWY_TARGET <= HWY_AVX3
      if (HasBF16Avx512()) return body.template operator()<Narrowing::kNative>(BF16());
#endif
      return body.template operator()<Narrowing::kNoNaN>(BF16());
    case DType::kF16:
      return body.template operator()<Narrowing::kNoNaN>(F16());
    default:
      return body.template operator()<Narrowing::kNoNaN>(0.0f);
  }
}

// call.operator()<how its stores narrow, T>() for the type that `dtype` stands for. What it stores are results of arithmetic,
// or T as it was.
template <class Call>
HWY_INLINE auto WithType(DType dtype, Call call) {
  switch (dtype) {
    case DType::kBF16:
#if HWY_TARGET <= HWY_AVX3
      if (HasBF16Avx512()) return call.template operator()<Narrowing::kNative, BF16>();
#endif
      return call.template operator()<Narrowing::kQuiet, BF16>();
    case DType::kF16:
      return call.template operator()<Narrowing::kAny, F16>();
    default:
      return call.template operator()<Narrowing::kAny, float>();
  }
}

constexpr std::uintptr_t kLineBytes = 64;

// Elements before the first at the start of a cache line, which is aligned enough for any vector.
template <class T>
HWY_INLINE std::int64_t BeforeLine(const T* p, std::int64_t n) {
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(p) % kLineBytes;
  return past == 0 ? 0 : Min(n, static_cast<std::int64_t>((kLineBytes - past) / sizeof(T)));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_VECTOR_INL_H_
