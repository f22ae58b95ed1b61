// The Vector's instruction bodies, compiled once per Highway target.
#include <cstdint>
#include <cstring>
#include <limits>

#include "npu_model/host/tile_ops.h"

// All of Highway's x86 targets; of Arm's, NEON: arrays of vectors need vectors of a known size.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/vector_ops.cc"  // NOLINT
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
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

// To nearest even by adding half of the last place kept, less one when that is even. The result stands in the
// upper half of each word. A NaN would carry over into zero: it is made quiet and keeps its upper half,
// unless kNoNaN promises none.
template <bool kNoNaN = false>
HWY_INLINE Words RoundBF16(Vec v) {
  const WordTag d;
  const Words u = WordsOf(v);
#if HWY_TARGET <= HWY_AVX3  // A test into a mask is one instruction, a shift and a mask are two.
  const Words half =
      hn::IfThenElse(hn::TestBit(u, hn::Set(d, 0x10000u)), hn::Set(d, 0x8000u), hn::Set(d, 0x7fffu));
#else
  const Words half = hn::Add(hn::And(hn::ShiftRight<16>(u), hn::Set(d, 1u)), hn::Set(d, 0x7fffu));
#endif
  const Words rounded = hn::Add(u, half);
  if constexpr (kNoNaN) return rounded;
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
// zero. `kAtMostZero`: x is at most 0, or NaN.
template <bool kAtMostZero>
HWY_INLINE Vec Exp(Vec x) {
  constexpr float kMagic =
      0x1.8p23f;  // Added to a small float it leaves the nearest integer in the low bits.
  x = MaxOrSecond(Set(-105.0f), x);
  if constexpr (!kAtMostZero) x = MinOrSecond(Set(89.0f), x);
  const Vec shifted = hn::MulAdd(x, Set(0x1.715476p0f), Set(kMagic));
  const Vec n = hn::Sub(shifted, Set(kMagic));
  const Vec r = hn::NegMulAdd(n, Set(kLn2Low), hn::NegMulAdd(n, Set(kLn2High), x));
  Vec y = hn::MulAdd(Set(1.38144639e-3f), r, Set(8.36878038e-3f));
  y = hn::MulAdd(y, r, Set(4.16683943e-2f));
  y = hn::MulAdd(y, r, Set(1.66665201e-1f));
  y = hn::MulAdd(y, r, Set(4.99999934e-1f));
  y = hn::MulAdd(y, r, Set(1.0f));
  y = hn::MulAdd(y, r, Set(1.0f));
#if HWY_TARGET <= HWY_AVX3
  return Vec{_mm512_scalef_ps(y.raw, n.raw)};
#else
  // In two steps, because 2^n itself may lie outside the normal range. Both halves of n are below 2^7 in
  // magnitude.
  const IntTag d;
  const auto exponent = hn::Sub(hn::BitCast(d, shifted), hn::BitCast(d, Set(kMagic)));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(d, 127);
  const Vec scale0 = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::Add(half, bias)));
  const Vec scale1 = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  return hn::Mul(hn::Mul(y, scale0), scale1);
#endif
}

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

// ---- Element-wise instructions

HWY_INLINE float* RowOf(const Rows& x, std::int64_t i) { return static_cast<float*>(x.data) + i * x.pitch; }

// Rows that lie back to back in every operand are one long row.
template <class... Operands>
HWY_INLINE void JoinRows(Rows& x, Operands&... operands) {
  const bool joined = x.pitch == x.cols && ((operands.pitch == x.cols && operands.cols == x.cols) && ...);
  if (!joined) return;
  const auto join = [](Rows& rows) HWY_ATTR {
    rows.cols *= rows.rows, rows.pitch = rows.cols, rows.rows = Min(rows.rows, 1);
  };
  join(x);
  (join(operands), ...);
}

// dst[j] = function(a[j]...) for j < n.
template <class Function, class... Sources>
HWY_INLINE void MapRow(Function function, std::int64_t n, float* dst, const Sources*... a) {
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) Store(function(Load(a + j)...), dst + j);
  if (j < n) Store(function(Load(a + j, n - j)...), dst + j, n - j);
}

void FillRows(const Rows& rows, float value) {
  Rows x = rows;
  JoinRows(x);
  struct Constant {
    Vec value;
    HWY_INLINE Vec operator()() const { return value; }
  };
  for (std::int64_t i = 0; i < x.rows; ++i) MapRow(Constant{Set(value)}, x.cols, RowOf(x, i));
}

template <ScalarOp kOp>
struct WithScalar {
  Vec value;
  HWY_INLINE Vec operator()(Vec a) const {
    if constexpr (kOp == ScalarOp::kMul) return hn::Mul(a, value);
    return MaxOrNaN(value, a);
  }
};
template <ScalarOp kOp>
void ScalarAs(Rows dst, Rows a, float value) {
  JoinRows(dst, a);
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    MapRow(WithScalar<kOp>{Set(value)}, dst.cols, RowOf(dst, i), RowOf(a, i));
  }
}
void Scalar(ScalarOp op, const Rows& dst, const Rows& a, float value) {
  switch (op) {
    case ScalarOp::kMul:
      return ScalarAs<ScalarOp::kMul>(dst, a, value);
    case ScalarOp::kMax:
      return ScalarAs<ScalarOp::kMax>(dst, a, value);
  }
}

template <BinaryOp kOp>
HWY_INLINE Vec Apply(Vec a, Vec b) {
  if constexpr (kOp == BinaryOp::kAdd) return hn::Add(a, b);
  if constexpr (kOp == BinaryOp::kSub) return hn::Sub(a, b);
  if constexpr (kOp == BinaryOp::kMul) return hn::Mul(a, b);
  if constexpr (kOp == BinaryOp::kDiv) return hn::Div(a, b);
  if constexpr (kOp == BinaryOp::kMax) return MaxOrNaN(a, b);
}
template <BinaryOp kOp>
struct WithVector {
  HWY_INLINE Vec operator()(Vec a, Vec b) const { return Apply<kOp>(a, b); }
};
template <BinaryOp kOp>
struct WithBroadcast {
  Vec b;
  HWY_INLINE Vec operator()(Vec a) const { return Apply<kOp>(a, b); }
};
template <BinaryOp kOp>
void BinaryAs(Rows dst, Rows a, Rows b) {
  if (b.cols == 1 && a.cols != 1) {
    for (std::int64_t i = 0; i < dst.rows; ++i) {
      MapRow(WithBroadcast<kOp>{Set(*RowOf(b, i))}, dst.cols, RowOf(dst, i), RowOf(a, i));
    }
    return;
  }
  JoinRows(dst, a, b);
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    MapRow(WithVector<kOp>{}, dst.cols, RowOf(dst, i), RowOf(a, i), RowOf(b, i));
  }
}
void Binary(BinaryOp op, const Rows& dst, const Rows& a, const Rows& b) {
  switch (op) {
    case BinaryOp::kAdd:
      return BinaryAs<BinaryOp::kAdd>(dst, a, b);
    case BinaryOp::kSub:
      return BinaryAs<BinaryOp::kSub>(dst, a, b);
    case BinaryOp::kMul:
      return BinaryAs<BinaryOp::kMul>(dst, a, b);
    case BinaryOp::kDiv:
      return BinaryAs<BinaryOp::kDiv>(dst, a, b);
    case BinaryOp::kMax:
      return BinaryAs<BinaryOp::kMax>(dst, a, b);
  }
}

template <UnaryOp kOp>
struct Function {
  HWY_INLINE Vec operator()(Vec a) const {
    if constexpr (kOp == UnaryOp::kExp) return Exp</*kAtMostZero=*/false>(a);
    if constexpr (kOp == UnaryOp::kLn) return Ln(a);
  }
};
template <UnaryOp kOp>
void UnaryAs(Rows dst, Rows a) {
  JoinRows(dst, a);
  for (std::int64_t i = 0; i < dst.rows; ++i) MapRow(Function<kOp>{}, dst.cols, RowOf(dst, i), RowOf(a, i));
}
void Unary(UnaryOp op, const Rows& dst, const Rows& a) {
  switch (op) {
    case UnaryOp::kExp:
      return UnaryAs<UnaryOp::kExp>(dst, a);
    case UnaryOp::kLn:
      return UnaryAs<UnaryOp::kLn>(dst, a);
  }
}

struct FactorVector {
  HWY_INLINE Vec operator()(Vec acc, Vec factor, Vec x) const { return hn::MulAdd(acc, factor, x); }
};
struct FactorBroadcast {
  Vec factor;
  HWY_INLINE Vec operator()(Vec acc, Vec x) const { return hn::MulAdd(acc, factor, x); }
};
void MulAddRows(const Rows& acc_rows, const Rows& factor_rows, const Rows& x_rows) {
  Rows acc = acc_rows, factor = factor_rows, x = x_rows;
  if (factor.cols == 1 && acc.cols != 1) {
    for (std::int64_t i = 0; i < acc.rows; ++i) {
      MapRow(FactorBroadcast{Set(*RowOf(factor, i))}, acc.cols, RowOf(acc, i), RowOf(acc, i), RowOf(x, i));
    }
    return;
  }
  JoinRows(acc, factor, x);
  for (std::int64_t i = 0; i < acc.rows; ++i) {
    MapRow(FactorVector{}, acc.cols, RowOf(acc, i), RowOf(acc, i), RowOf(factor, i), RowOf(x, i));
  }
}

void MaskAbove(const Rows& x, std::int64_t diagonal) {
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const std::int64_t first = Min(Max(i + diagonal + 1, 0), x.cols);
    FillRows({.data = RowOf(x, i) + first, .pitch = x.pitch, .rows = 1, .cols = x.cols - first}, -kInfinity);
  }
}

// ---- Reductions: four chains, folded in one order, so that the result depends on nothing but the columns

template <ReduceOp kOp>
HWY_INLINE Vec Fold(Vec a, Vec b) {
  if constexpr (kOp == ReduceOp::kSum) return hn::Add(a, b);
  return MaxOrNaN(a, b);
}
template <ReduceOp kOp>
HWY_INLINE float ReduceRow(const float* a, std::int64_t n) {
  const FloatTag d;
  const Vec neutral = Set(kOp == ReduceOp::kSum ? 0.0f : -kInfinity);
  Vec chain[4] = {neutral, neutral, neutral, neutral};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = Fold<kOp>(chain[c], Load(a + j + c * kLanes));
  }
  for (; j + kLanes <= n; j += kLanes) chain[0] = Fold<kOp>(chain[0], Load(a + j));
  if (j < n) {
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(n - j));
    chain[1] = Fold<kOp>(chain[1], hn::IfThenElse(valid, Load(a + j, n - j), neutral));
  }
  const Vec all = Fold<kOp>(Fold<kOp>(chain[0], chain[1]), Fold<kOp>(chain[2], chain[3]));
  if constexpr (kOp == ReduceOp::kSum) return hn::GetLane(hn::SumOfLanes(d, all));
  if (!hn::AllFalse(d, hn::IsNaN(all))) return kNaN;
  return ExtremeLane</*kMinimum=*/false>(all);
}
void Reduce(ReduceOp op, const Rows& dst, const Rows& a) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    *RowOf(dst, i) = op == ReduceOp::kSum ? ReduceRow<ReduceOp::kSum>(RowOf(a, i), a.cols)
                                          : ReduceRow<ReduceOp::kMax>(RowOf(a, i), a.cols);
  }
}

// ---- Cast

template <class T>
HWY_INLINE T* RowAs(const Rows& x, std::int64_t i) {
  return static_cast<T*>(x.data) + i * x.pitch;
}

// Two vectors, narrowed into one register where the type is narrower, so that stores are whole vectors.
template <bool = false>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, float* p) {
  Store(v0, p);
  Store(v1, p + kLanes);
}
HWY_INLINE void StreamTwo(Vec v0, Vec v1, float* p) {
  hn::Stream(v0, FloatTag(), p);
  hn::Stream(v1, FloatTag(), p + kLanes);
}
#if HWY_TARGET == HWY_SCALAR
template <bool = false, class T>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, T* p) {
  Store(v0, p);
  Store(v1, p + kLanes);
}
template <class T>
HWY_INLINE void StreamTwo(Vec v0, Vec v1, T* p) {
  StoreTwo(v0, v1, p);
}
#else
using TwoHalvesTag = hn::Repartition<std::uint16_t, FloatTag>;
using TwoHalves = hn::Vec<TwoHalvesTag>;
template <bool kNoNaN>
HWY_INLINE TwoHalves NarrowTwo(Vec v0, Vec v1, const BF16*) {
  const TwoHalvesTag d;
  return hn::ConcatOdd(d, hn::BitCast(d, RoundBF16<kNoNaN>(v1)), hn::BitCast(d, RoundBF16<kNoNaN>(v0)));
}
template <bool>
HWY_INLINE TwoHalves NarrowTwo(Vec v0, Vec v1, const F16*) {
  return hn::Combine(TwoHalvesTag(), NarrowF16(v1), NarrowF16(v0));
}
template <bool kNoNaN = false, class T>
HWY_INLINE void StoreTwo(Vec v0, Vec v1, T* p) {
  hn::StoreU(NarrowTwo<kNoNaN>(v0, v1, p), TwoHalvesTag(), reinterpret_cast<std::uint16_t*>(p));
}
template <class T>
HWY_INLINE void StreamTwo(Vec v0, Vec v1, T* p) {
  hn::Stream(NarrowTwo</*kNoNaN=*/false>(v0, v1, p), TwoHalvesTag(), reinterpret_cast<std::uint16_t*>(p));
}
#endif

constexpr std::uintptr_t kLineBytes = 64;

// Elements before the first at the start of a cache line, which is aligned enough for any vector.
template <class T>
HWY_INLINE std::int64_t BeforeLine(const T* p, std::int64_t n) {
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(p) % kLineBytes;
  return past == 0 ? 0 : Min(n, static_cast<std::int64_t>((kLineBytes - past) / sizeof(T)));
}

template <class To, class From>
HWY_INLINE void CastRow(To* dst, const From* src, std::int64_t n) {
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) StoreTwo(Load(src + j), Load(src + j + kLanes), dst + j);
  if (j + kLanes <= n) {
    Store(Load(src + j), dst + j);
    j += kLanes;
  }
  if (j < n) Store(Load(src + j, n - j), dst + j, n - j);
}
template <class To, class From>
HWY_INLINE void StreamRow(To* dst, const From* src, std::int64_t n) {
  const std::int64_t begin = BeforeLine(dst, n), end = begin + RoundDown(n - begin, 2 * kLanes);
  CastRow(dst, src, begin);
  for (std::int64_t j = begin; j < end; j += 2 * kLanes) {
    StreamTwo(Load(src + j), Load(src + j + kLanes), dst + j);
  }
  CastRow(dst + end, src + end, n - end);
}

template <class To, class From>
void CastAs(Rows dst, Rows src, bool stream) {
  JoinRows(dst, src);
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    if (stream) {
      StreamRow(RowAs<To>(dst, i), RowAs<From>(src, i), dst.cols);
    } else {
      CastRow(RowAs<To>(dst, i), RowAs<From>(src, i), dst.cols);
    }
  }
}
template <class To>
void CastTo(const Rows& dst, const Rows& src, DType src_type, bool stream) {
  switch (src_type) {
    case DType::kBF16:
      return CastAs<To, BF16>(dst, src, stream);
    case DType::kF16:
      return CastAs<To, F16>(dst, src, stream);
    default:
      return CastAs<To, float>(dst, src, stream);
  }
}

void Copy(void* dst, std::int64_t dst_stride_bytes, const void* src, std::int64_t src_stride_bytes,
          std::int64_t rows, std::int64_t bytes, bool stream);

void Cast(const Rows& dst, DType dst_type, const Rows& src, DType src_type, bool stream) {
  if (dst_type == src_type) {
    const std::int64_t size = SizeOf(dst_type);
    return Copy(dst.data, dst.pitch * size, src.data, src.pitch * size, dst.rows, dst.cols * size, stream);
  }
  switch (dst_type) {
    case DType::kBF16:
      return CastTo<BF16>(dst, src, src_type, stream);
    case DType::kF16:
      return CastTo<F16>(dst, src, src_type, stream);
    default:
      return CastTo<float>(dst, src, src_type, stream);
  }
}

// ---- Copy and the ceilings of memory

HWY_INLINE void CopyRow(std::uint8_t* dst, const std::uint8_t* src, std::int64_t bytes) {
  const ByteTag d;
  std::int64_t i = 0;
  for (; i + 4 * kByteLanes <= bytes; i += 4 * kByteLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      hn::StoreU(hn::LoadU(d, src + i + v * kByteLanes), d, dst + i + v * kByteLanes);
    }
  }
  for (; i + kByteLanes <= bytes; i += kByteLanes) hn::StoreU(hn::LoadU(d, src + i), d, dst + i);
  std::memcpy(dst + i, src + i, static_cast<std::size_t>(bytes - i));
}
HWY_INLINE void StreamRow(std::uint8_t* dst, const std::uint8_t* src, std::int64_t bytes) {
  const ByteTag d;
  const std::int64_t begin = BeforeLine(dst, bytes), end = begin + RoundDown(bytes - begin, kByteLanes);
  std::memcpy(dst, src, static_cast<std::size_t>(begin));
  for (std::int64_t i = begin; i < end; i += kByteLanes) hn::Stream(hn::LoadU(d, src + i), d, dst + i);
  std::memcpy(dst + end, src + end, static_cast<std::size_t>(bytes - end));
}
void Copy(void* dst, std::int64_t dst_stride_bytes, const void* src, std::int64_t src_stride_bytes,
          std::int64_t rows, std::int64_t bytes, bool stream) {
  auto* to = static_cast<std::uint8_t*>(dst);
  const auto* from = static_cast<const std::uint8_t*>(src);
  for (std::int64_t i = 0; i < rows; ++i) {
    if (stream) {
      StreamRow(to + i * dst_stride_bytes, from + i * src_stride_bytes, bytes);
    } else {
      CopyRow(to + i * dst_stride_bytes, from + i * src_stride_bytes, bytes);
    }
  }
}

using LongTag = HWY_FULL(std::uint64_t);
constexpr std::int64_t kLongLanes = static_cast<std::int64_t>(hn::MaxLanes(LongTag()));

std::uint64_t StreamRead(const void* data, std::int64_t bytes) {
  const LongTag d;
  constexpr int kChains = 8;
  const auto* words = static_cast<const std::uint64_t*>(data);
  const std::int64_t count = bytes / 8;
  hn::Vec<LongTag> chain[kChains];
#pragma GCC unroll 8
  for (int c = 0; c < kChains; ++c) chain[c] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kChains * kLongLanes <= count; i += kChains * kLongLanes) {
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) chain[c] = hn::Xor(chain[c], hn::LoadU(d, words + i + c * kLongLanes));
  }
#pragma GCC unroll 8
  for (int c = 1; c < kChains; ++c) chain[0] = hn::Xor(chain[0], chain[c]);
  HWY_ALIGN std::uint64_t lanes[kLongLanes];
  hn::Store(chain[0], d, lanes);
  std::uint64_t checksum = 0;
  for (const std::uint64_t lane : lanes) checksum ^= lane;
  const auto* rest = static_cast<const std::uint8_t*>(data) + i * 8;
  for (std::int64_t left = bytes - i * 8; left > 0; left -= 8, rest += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, rest, static_cast<std::size_t>(Min(left, 8)));
    checksum ^= word;
  }
  return checksum;
}

// Every vector another odd number, which is never zero; the unaligned ends one constant byte.
void StreamWrite(void* data, std::int64_t bytes, std::uint64_t pattern) {
  constexpr int kEnd = 0x5a;
  constexpr std::int64_t kBytes = kLongLanes * 8;
  const LongTag d;
  auto* p = static_cast<std::uint8_t*>(data);
  const std::int64_t begin = BeforeLine(p, bytes), end = begin + RoundDown(bytes - begin, kBytes);
  std::memset(p, kEnd, static_cast<std::size_t>(begin));
  std::uint64_t word = pattern | 1;
  for (std::int64_t i = begin; i < end; i += kBytes, word += 2) {
    hn::Stream(hn::Set(d, word), d, reinterpret_cast<std::uint64_t*>(p + i));
  }
  std::memset(p + end, kEnd, static_cast<std::size_t>(bytes - end));
}

// ---- Composites

// The maximum of scale * s over a row: scale times the maximum of s, or the minimum where scale is negative,
// since rounding keeps order. NaN is left out: it reaches p and l in the second pass.
template <bool kMinimum>
HWY_INLINE float ScaledExtreme(const float* s, std::int64_t n, float scale) {
  const FloatTag d;
  const auto fold = [](Vec x, Vec chain)
                        HWY_ATTR { return kMinimum ? MinOrSecond(x, chain) : MaxOrSecond(x, chain); };
  const Vec neutral = Set(kMinimum ? kInfinity : -kInfinity);
  Vec chain[4] = {neutral, neutral, neutral, neutral};
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = fold(Load(s + j + c * kLanes), chain[c]);
  }
  for (; j + kLanes <= n; j += kLanes) chain[0] = fold(Load(s + j), chain[0]);
  if (j < n) {
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(n - j));
    chain[1] = fold(hn::IfThenElse(valid, Load(s + j, n - j), neutral), chain[1]);
  }
  const Vec all = fold(fold(chain[0], chain[1]), fold(chain[2], chain[3]));
  return scale * ExtremeLane<kMinimum>(all);
}

// p = exp(scale * s - m), rounded to T; returns the sum before rounding. scale * s is rounded before m is
// taken off it, as the maximum was, so that the largest element gives exactly 1.
template <bool kNoNaN, class T>
HWY_INLINE float ExpRow(T* p, const float* s, std::int64_t n, Vec scale, Vec m) {
  const FloatTag d;
  const auto probability = [&](Vec x)
                               HWY_ATTR { return Exp</*kAtMostZero=*/true>(hn::Sub(hn::Mul(x, scale), m)); };
  Vec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  std::int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    const Vec p0 = probability(Load(s + j)), p1 = probability(Load(s + j + kLanes));
    StoreTwo<kNoNaN>(p0, p1, p + j);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
  }
  if (j + kLanes <= n) {
    const Vec p0 = probability(Load(s + j));
    Store(p0, p + j);
    sum0 = hn::Add(sum0, p0);
    j += kLanes;
  }
  if (j < n) {
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(n - j));
    const Vec p1 = hn::IfThenElseZero(valid, probability(Load(s + j, n - j)));
    Store(p1, p + j, n - j);
    sum1 = hn::Add(sum1, p1);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}
// A NaN shows in the sum, and then costs a second pass: to look for it in every element takes a tenth of the
// whole.
template <class T>
HWY_INLINE float ExpRow(T* p, const float* s, std::int64_t n, Vec scale, Vec m) {
  const float sum = ExpRow</*kNoNaN=*/true>(p, s, n, scale, m);
  if constexpr (sizeof(T) == 2) {
    if (sum != sum) ExpRow</*kNoNaN=*/false>(p, s, n, scale, m);
  }
  return sum;
}

// Two passes over each row; the (rows, 1) operands follow for as many rows as a vector has lanes.
template <class T>
void SoftmaxStepAs(const Rows& p, const Rows& s, const Rows& m_new, const Rows& m_old, const Rows& l,
                   float scale) {
  const FloatTag d;
  for (const Range rows : Split(s.rows, kLanes)) {
    HWY_ALIGN float old_max[kLanes] = {}, new_max[kLanes] = {}, sum[kLanes] = {}, total[kLanes] = {};
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t lane = i - rows.begin;
      const float row_max = scale < 0.0f ? ScaledExtreme</*kMinimum=*/true>(RowOf(s, i), s.cols, scale)
                                         : ScaledExtreme</*kMinimum=*/false>(RowOf(s, i), s.cols, scale);
      old_max[lane] = *RowOf(m_old, i);
      new_max[lane] = row_max > old_max[lane] ? row_max : old_max[lane];
      total[lane] = *RowOf(l, i);
      sum[lane] = ExpRow(RowAs<T>(p, i), RowOf(s, i), s.cols, Set(scale), Set(new_max[lane]));
    }
    const Vec alpha = Exp</*kAtMostZero=*/true>(hn::Sub(hn::Load(d, old_max), hn::Load(d, new_max)));
    hn::Store(hn::MulAdd(hn::Load(d, total), alpha, hn::Load(d, sum)), d, total);
    hn::Store(alpha, d, old_max);
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t lane = i - rows.begin;
      *RowOf(m_new, i) = new_max[lane];
      *RowOf(m_old, i) = old_max[lane];
      *RowOf(l, i) = total[lane];
    }
  }
}
void SoftmaxStep(const Rows& p, DType p_type, const Rows& s, const Rows& m_new, const Rows& m_old,
                 const Rows& l, float scale) {
  switch (p_type) {
    case DType::kBF16:
      return SoftmaxStepAs<BF16>(p, s, m_new, m_old, l, scale);
    case DType::kF16:
      return SoftmaxStepAs<F16>(p, s, m_new, m_old, l, scale);
    default:
      return SoftmaxStepAs<float>(p, s, m_new, m_old, l, scale);
  }
}

constexpr int kRowsPerPass = 8;

// acc (+)= the weighted sum of kRows rows, ascending.
template <int kRows, class T>
void WeightedPass(float* acc, std::int64_t n, const void* const* rows, const float* weights,
                  bool accumulate) {
  const T* row[kRows];
  Vec weight[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) row[r] = static_cast<const T*>(rows[r]), weight[r] = Set(weights[r]);
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    Vec sum = accumulate ? Load(acc + j) : hn::Zero(FloatTag());
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum = hn::MulAdd(weight[r], Load(row[r] + j), sum);
    Store(sum, acc + j);
  }
  if (j < n) {
    Vec sum = accumulate ? Load(acc + j, n - j) : hn::Zero(FloatTag());
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum = hn::MulAdd(weight[r], Load(row[r] + j, n - j), sum);
    Store(sum, acc + j, n - j);
  }
}
template <class T>
void WeightedSumAs(float* acc, std::int64_t n, const void* const* rows, const float* weights,
                   std::int64_t count, bool accumulate) {
  using Pass = void (*)(float*, std::int64_t, const void* const*, const float*, bool);
  static constexpr Pass kPasses[kRowsPerPass] = {
      &WeightedPass<1, T>, &WeightedPass<2, T>, &WeightedPass<3, T>, &WeightedPass<4, T>,
      &WeightedPass<5, T>, &WeightedPass<6, T>, &WeightedPass<7, T>, &WeightedPass<8, T>};
  for (const Range r : Split(count, kRowsPerPass)) {
    kPasses[r.size() - 1](acc, n, rows + r.begin, weights + r.begin, accumulate || r.begin > 0);
  }
}
void WeightedSum(float* acc, std::int64_t n, DType dtype, const void* const* rows, const float* weights,
                 std::int64_t count, bool accumulate) {
  if (count == 0 && !accumulate) return FillRows({.data = acc, .pitch = n, .rows = 1, .cols = n}, 0.0f);
  switch (dtype) {
    case DType::kBF16:
      return WeightedSumAs<BF16>(acc, n, rows, weights, count, accumulate);
    case DType::kF16:
      return WeightedSumAs<F16>(acc, n, rows, weights, count, accumulate);
    default:
      return WeightedSumAs<float>(acc, n, rows, weights, count, accumulate);
  }
}

}  // namespace

const VectorOps& GetVectorOps() {
  static const VectorOps kOps{.target = hwy::TargetName(HWY_TARGET),
                              .fill = &FillRows,
                              .scalar = &Scalar,
                              .binary = &Binary,
                              .unary = &Unary,
                              .reduce = &Reduce,
                              .mask_above = &MaskAbove,
                              .cast = &Cast,
                              .softmax_step = &SoftmaxStep,
                              .mul_add = &MulAddRows,
                              .weighted_sum = &WeightedSum,
                              .copy = &Copy,
                              .stream_read = &StreamRead,
                              .stream_write = &StreamWrite};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetVectorOps);
void FlushStreams() { hwy::FlushStream(); }

const VectorOps& BestVectorOps() { return HWY_DYNAMIC_DISPATCH(GetVectorOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
