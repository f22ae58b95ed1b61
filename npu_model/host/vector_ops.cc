// The Vector's instruction bodies, compiled once per Highway target.
#include <cstdint>
#include <cstring>
#include <limits>

#include "npu_model/host/simd_targets.h"
#include "npu_model/host/tile_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/vector_ops.cc"  // NOLINT
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

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
    if constexpr (kOp == ScalarOp::kAdd) return hn::Add(a, value);
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
    case ScalarOp::kAdd:
      return ScalarAs<ScalarOp::kAdd>(dst, a, value);
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
  if (b.rows == 1 && dst.rows > 1) b.pitch = 0;  // One row for all.
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
    if constexpr (kOp == UnaryOp::kSqrt) return hn::Sqrt(a);
    if constexpr (kOp == UnaryOp::kAbs) return hn::Abs(a);
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
    case UnaryOp::kSqrt:
      return UnaryAs<UnaryOp::kSqrt>(dst, a);
    case UnaryOp::kAbs:
      return UnaryAs<UnaryOp::kAbs>(dst, a);
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
  if (dst_stride_bytes == bytes && src_stride_bytes == bytes) bytes *= rows, rows = Min(rows, 1);
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

// The maximum of scale * s over a row: scale times the maximum of s, or the minimum where scale is negative, since rounding
// keeps order. NaN is left out: it reaches p and l through the exponentials.
template <bool kMinimum>
struct ScaledExtreme {
  HWY_INLINE ScaledExtreme() { Start(); }  // Its own: an implicit one is compiled for no SIMD target.
  HWY_INLINE void Start() { chain[0] = chain[1] = Set(kNeutral); }
  HWY_INLINE void Add(Vec x0, Vec x1) { chain[0] = Fold(x0, chain[0]), chain[1] = Fold(x1, chain[1]); }
  // What is left of a row behind whole pairs of vectors.
  HWY_INLINE void AddRest(const float* s, std::int64_t n) {
    for (; n > 0; n -= kLanes, s += kLanes) {
      const std::int64_t count = Min(n, kLanes);
      const auto valid = hn::FirstN(FloatTag(), static_cast<std::size_t>(count));
      chain[0] = Fold(hn::IfThenElse(valid, Load(s, count), Set(kNeutral)), chain[0]);
    }
  }
  HWY_INLINE void AddRow(const float* s, std::int64_t n) {
    std::int64_t j = 0;
    for (; j + 2 * kLanes <= n; j += 2 * kLanes) Add(Load(s + j), Load(s + j + kLanes));
    AddRest(s + j, n - j);
  }
  HWY_INLINE float Of(float scale) const { return scale * ExtremeLane<kMinimum>(Fold(chain[0], chain[1])); }

  static constexpr float kNeutral = kMinimum ? kInfinity : -kInfinity;
  static HWY_INLINE Vec Fold(Vec x, Vec chain) {
    return kMinimum ? MinOrSecond(x, chain) : MaxOrSecond(x, chain);
  }
  Vec chain[2];
};

// p = exp(scale * s - m), rounded to T; returns the sum before rounding. Meanwhile `next`, a row that follows, is read
// for its extreme: that waits for the cache where this waits for arithmetic.
template <Narrowing kNarrowing, class Extreme, class T>
HWY_INLINE float ExpRow(T* p, const float* s, const float* next, std::int64_t n, Vec scale, Vec m,
                        Extreme& extreme) {
  const FloatTag d;
  constexpr bool kNarrow = sizeof(T) == 2;
  Vec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  std::int64_t j = 0;
  const auto vectors = [&]<int kVectors>() HWY_ATTR {
    Vec x[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) x[i] = hn::MulSub(Load(s + j + i * kLanes), scale, m);
    ExpScores<kNarrow>(x);
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i += 2, j += 2 * kLanes) {
      extreme.Add(Load(next + j), Load(next + j + kLanes));
      StoreTwo<kNarrowing>(x[i], x[i + 1], p + j);
      sum0 = hn::Add(sum0, x[i]);
      sum1 = hn::Add(sum1, x[i + 1]);
    }
  };
  while (j + kScoreVectors * kLanes <= n) vectors.template operator()<kScoreVectors>();
  if constexpr (kScoreVectors > 2) {
    if (j + 2 * kLanes <= n) vectors.template operator()<2>();
  }
  extreme.AddRest(next + j, n - j);
  for (; j < n; j += kLanes) {
    const std::int64_t count = Min(kLanes, n - j);
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(count));
    Vec x[1] = {hn::MulSub(Load(s + j, count), scale, m)};
    ExpScores<kNarrow>(x);
    x[0] = hn::IfThenElseZero(valid, x[0]);
    Store(x[0], p + j, count);
    sum1 = hn::Add(sum1, x[0]);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

// The (rows, 1) operands follow for as many rows as a vector has lanes. A row's extreme is looked for beside the row two
// before it, and its lanes are folded beside the row before it, so that nothing waits for them. p may lie where s does: a
// row is read for its extreme before p's rows reach it.
template <Narrowing kNarrowing, bool kMinimum, class T>
void SoftmaxStepAs(const Rows& p, const Rows& s, const Rows& m_new, const Rows& m_old, const Rows& l,
                   float scale) {
  using Extreme = ScaledExtreme<kMinimum>;
  const FloatTag d;
  Extreme extreme;  // Of the next row where a row begins, of the one behind that where it ends.
  const auto start = [&](std::int64_t row) HWY_ATTR {
    extreme.Start();
    if (row < s.rows) extreme.AddRow(RowOf(s, row), s.cols);
  };
  start(0);
  float next_max = extreme.Of(scale);
  start(1);
  for (const Range rows : Split(s.rows, kLanes)) {
    HWY_ALIGN float old_max[kLanes] = {}, new_max[kLanes] = {}, sum[kLanes] = {}, total[kLanes] = {};
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t lane = i - rows.begin;
      const float row_max = next_max;
      next_max = extreme.Of(scale);
      old_max[lane] = *RowOf(m_old, i);
      new_max[lane] = row_max > old_max[lane] ? row_max : old_max[lane];
      total[lane] = *RowOf(l, i);
      const auto exp_row = [&]<Narrowing kHow>() HWY_ATTR {
        extreme.Start();
        return ExpRow<kHow>(RowAs<T>(p, i), RowOf(s, i), RowOf(s, Min(i + 2, s.rows - 1)), s.cols, Set(scale),
                            Set(new_max[lane]), extreme);
      };
      sum[lane] = exp_row.template operator()<kNarrowing>();
      // A NaN shows in the sum, and then costs a second pass: to look for it in every element takes a tenth of the whole.
      if constexpr (sizeof(T) == 2 && kNarrowing == Narrowing::kNoNaN) {
        if (sum[lane] != sum[lane]) exp_row.template operator()<Narrowing::kAny>();
      }
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
  ForNarrowType(p_type, [&]<Narrowing kNarrowing, class T>(T) HWY_ATTR {
    const auto step =
        scale < 0.0f ? &SoftmaxStepAs<kNarrowing, true, T> : &SoftmaxStepAs<kNarrowing, false, T>;
    step(p, s, m_new, m_old, l, scale);
  });
}

}  // namespace

const VectorOps& GetVectorOps() {
  static const VectorOps kOps{.target = hwy::TargetName(HWY_TARGET),
                              .fill = &FillRows,
                              .scalar = &Scalar,
                              .binary = &Binary,
                              .unary = &Unary,
                              .reduce = &Reduce,
                              .cast = &Cast,
                              .softmax_step = &SoftmaxStep,
                              .mul_add = &MulAddRows,
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
