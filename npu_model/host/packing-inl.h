// Packing of the Cube's operands into the layouts of MmadArgs. Included once per Highway target by cube_ops.cc, after
// foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "npu_model/host/cpu.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_PACKING_INL_H_
#undef CUBIST_NPU_MODEL_HOST_PACKING_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_PACKING_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "npu_model/host/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = HWY_FULL(float);
using WordTag = hn::Rebind<std::uint32_t, FloatTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;  // As many 16-bit lanes as a vector has floats.
using Words = hn::Vec<WordTag>;

constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));
constexpr std::int64_t kNr = 2 * kLanes;  // Columns of a panel.

constexpr std::int64_t Min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t RoundDown(std::int64_t a, std::int64_t b) { return a / b * b; }

// ---- Elements of the source type to words of the operand type

// How source elements become operand elements, one by one and a vector at a time.
template <class Source>
struct Widen {
  using From = Source;
  using To = float;
  static float One(Source value) { return static_cast<float>(value); }
};
// Calls pack(convert) with what widens elements of `dtype`.
template <class Pack>
void WithWidening(DType dtype, Pack&& pack) {
  switch (dtype) {
    case DType::kBF16:
      return pack(Widen<BF16>());
    case DType::kF16:
      return pack(Widen<F16>());
    default:
      return pack(Widen<float>());
  }
}
struct KeepBF16 {
  using From = BF16;
  using To = BF16;
  static BF16 One(BF16 value) { return value; }
};

// kLanes elements as floats, in the bits of words.
HWY_INLINE Words LoadWords(const float* p) { return hn::BitCast(WordTag(), hn::LoadU(FloatTag(), p)); }
HWY_INLINE Words LoadHalves(const void* p) {
  return hn::PromoteTo(WordTag(), hn::LoadU(HalfTag(), static_cast<const std::uint16_t*>(p)));
}
HWY_INLINE Words LoadWords(const BF16* p) { return hn::ShiftLeft<16>(LoadHalves(p)); }
HWY_INLINE Words LoadWords(const F16* p) {
#if HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
  const hn::Rebind<hwy::float16_t, FloatTag> d16;
  const auto half = hn::BitCast(d16, hn::LoadU(HalfTag(), reinterpret_cast<const std::uint16_t*>(p)));
  return hn::BitCast(WordTag(), hn::PromoteTo(FloatTag(), half));
#else
  // Exponent and mantissa of the half, read as a float, are its value times 2^-112, subnormals included.
  const FloatTag d;
  const WordTag du;
  const Words h = LoadHalves(p);
  const Words shifted = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7fffu)));
  const Words finite = hn::BitCast(du, hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f)));
  const Words special = hn::Or(shifted, hn::Set(du, 0x7f800000u));
  const auto is_special = hn::Gt(hn::BitCast(hn::Rebind<std::int32_t, FloatTag>(), shifted),
                                 hn::Set(hn::Rebind<std::int32_t, FloatTag>(), 0x0f7fffff));
  const Words magnitude = hn::IfThenElse(hn::RebindMask(du, is_special), special, finite);
  return hn::Or(magnitude, hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000u))));
#endif
}
HWY_INLINE void StoreWords(Words words, void* p) {
  hn::StoreU(words, WordTag(), static_cast<std::uint32_t*>(p));
}

#if HWY_TARGET <= HWY_AVX3
// The first `count` lanes, zeros behind them: no more is read.
HWY_INLINE hn::Vec<HalfTag> LoadSomeHalves(const void* p, std::int64_t count) {
  return hn::MaskedLoad(hn::FirstN(HalfTag(), static_cast<std::size_t>(count)), HalfTag(),
                        static_cast<const std::uint16_t*>(p));
}
HWY_INLINE Words LoadSome(const float* p, std::int64_t count) {
  const WordTag d;
  return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(count)), d,
                        reinterpret_cast<const std::uint32_t*>(p));
}
template <class Source>
HWY_INLINE Words LoadSome(const Source* p, std::int64_t count) {
  alignas(64) std::byte some[kLanes * sizeof(Source)];
  hn::Store(LoadSomeHalves(p, count), HalfTag(), reinterpret_cast<std::uint16_t*>(some));
  return LoadWords(reinterpret_cast<const Source*>(some));
}
#elif HWY_TARGET != HWY_SCALAR
template <class Source>
HWY_INLINE Words LoadSome(const Source* p, std::int64_t count) {
  alignas(64) std::byte some[kLanes * sizeof(Source)] = {};
  std::memcpy(some, static_cast<const void*>(p), static_cast<std::size_t>(count) * sizeof(Source));
  return LoadWords(reinterpret_cast<const Source*>(some));
}
#endif
// As LoadSome, of as many elements as are left, which may be none or more than a vector has.
template <class Source>
HWY_INLINE Words LoadLeft(const Source* p, std::int64_t left) {
#if HWY_TARGET != HWY_SCALAR
  if (left < kLanes) return left > 0 ? LoadSome(p, left) : hn::Zero(WordTag());
#endif
  return left > 0 ? LoadWords(p) : hn::Zero(WordTag());
}

// `count` adjacent elements.
template <class Source>
HWY_INLINE void ConvertRow(Widen<Source>, const Source* src, float* dst, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreWords(LoadWords(src + i), dst + i);
  for (; i < count; ++i) dst[i] = static_cast<float>(src[i]);
}
template <class T>
HWY_INLINE void CopyRow(const T* src, T* dst, std::int64_t count) {
  std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(T));
}
HWY_INLINE void ConvertRow(Widen<float>, const float* src, float* dst, std::int64_t count) {
  CopyRow(src, dst, count);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE void ConvertRow(KeepBF16, const BF16* src, BF16* dst, std::int64_t count) {
  CopyRow(src, dst, count);
}
#endif

// ---- PackA

// Rows [i.begin, i.end), columns [p.begin, p.end), any strides.
template <class Convert>
void PackAElements(Convert, Range rows, Range columns, const StridedSource& src, typename Convert::To* dst,
                   std::int64_t pitch) {
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    for (std::int64_t p = columns.begin; p < columns.end; ++p) {
      dst[i * pitch + p] = Convert::One(data[i * src.row_stride + p * src.col_stride]);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
// One vector of words, of which lane i belongs to row i of A, from the source's columns at `p`, which are
// adjacent in i.
template <class Source>
HWY_INLINE Words LoadColumn(Widen<Source>, const Source* p, std::int64_t) {
  return LoadWords(p);
}
template <class Source>
HWY_INLINE Words LoadSomeOfColumn(Widen<Source>, const Source* p, std::int64_t, std::int64_t count) {
  return LoadSome(p, count);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE Words LoadColumn(KeepBF16, const BF16* p, std::int64_t col_stride) {
  return hn::Or(LoadHalves(p), hn::ShiftLeft<16>(LoadHalves(p + col_stride)));
}
HWY_INLINE Words LoadSomeOfColumn(KeepBF16, const BF16* p, std::int64_t col_stride, std::int64_t count) {
  const WordTag d;
  return hn::Or(hn::PromoteTo(d, LoadSomeHalves(p, count)),
                hn::ShiftLeft<16>(hn::PromoteTo(d, LoadSomeHalves(p + col_stride, count))));
}
#endif

// The source's columns are adjacent in memory: transposes kLanes rows by kLanes words.
template <class Convert>
void PackATransposed(Convert convert, std::int64_t m, std::int64_t k, const StridedSource& src,
                     typename Convert::To* dst, std::int64_t pitch) {
  using To = typename Convert::To;
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  const std::int64_t m_full = RoundDown(m, kLanes), k_full = RoundDown(k, kLanes * kPerWord),
                     some = m - m_full;
  for (std::int64_t p = 0; p < k_full; p += kLanes * kPerWord) {
    for (std::int64_t i = 0; i < m_full; i += kLanes) {
      Words block[kLanes];
      const auto* from = data + p * src.col_stride + i;
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        block[r] = LoadColumn(convert, from + r * kPerWord * src.col_stride, src.col_stride);
      }
      Transpose(block);
      auto* to = dst + i * pitch + p;
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) StoreWords(block[r], to + r * pitch);
    }
    if (some == 0) continue;
    Words block[kLanes];
    const auto* from = data + p * src.col_stride + m_full;
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r)
      block[r] = LoadSomeOfColumn(convert, from + r * kPerWord * src.col_stride, src.col_stride, some);
    Transpose(block);
    for (std::int64_t r = 0; r < some; ++r) StoreWords(block[r], dst + (m_full + r) * pitch + p);
  }
  if (k == k_full) return;
  const std::int64_t whole = (k - k_full) / kPerWord;
  for (std::int64_t i = 0; i < m; i += kLanes) {  // The words that are left, but for half of one.
    Words block[kLanes];
    const auto* from = data + k_full * src.col_stride + i;
    for (std::int64_t word = 0; word < kLanes; ++word) {
      const auto* const column = from + word * kPerWord * src.col_stride;
      block[word] = word >= whole     ? hn::Zero(WordTag())
                    : i + kLanes <= m ? LoadColumn(convert, column, src.col_stride)
                                      : LoadSomeOfColumn(convert, column, src.col_stride, m - i);
    }
    Transpose(block);
    for (std::int64_t r = 0; r < Min(kLanes, m - i); ++r) {
      alignas(64) std::uint32_t words[kLanes];
      hn::Store(block[r], WordTag(), words);
      std::memcpy(static_cast<void*>(dst + (i + r) * pitch + k_full), words,
                  static_cast<std::size_t>(whole) * 4);
    }
  }
  PackAElements(convert, {0, m}, {k_full + whole * kPerWord, k}, src, dst, pitch);
}
#endif

// A row, and the next one asked for meanwhile: line by line it comes when it is wanted, while the machine's own prefetching begins
// anew in every row and every page.
template <class Convert>
HWY_INLINE void PackRow(Convert convert, const typename Convert::From* row,
                        const typename Convert::From* next, typename Convert::To* dst, std::int64_t k) {
  constexpr std::int64_t kLine = static_cast<std::int64_t>(64 / sizeof(typename Convert::From));
  std::int64_t i = 0;
  for (; i + kLine <= k; i += kLine) {
    __builtin_prefetch(next + i, 0, 2);
    ConvertRow(convert, row + i, dst + i, kLine);
  }
  ConvertRow(convert, row + i, dst + i, k - i);
}

template <class Convert>
void PackAs(Convert convert, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst_data,
            std::int64_t pitch) {
  auto* dst = static_cast<typename Convert::To*>(dst_data);
  if (src.col_stride == 1) {
    const auto* data = static_cast<const typename Convert::From*>(src.data);
    for (std::int64_t i = 0; i < m; ++i) {
      const auto* const row = data + i * src.row_stride;
      PackRow(convert, row, i + 1 < m ? row + src.row_stride : data + k, dst + i * pitch, k);
    }
#if HWY_TARGET != HWY_SCALAR
  } else if (src.row_stride == 1) {
    PackATransposed(convert, m, k, src, dst, pitch);
#endif
  } else {
    PackAElements(convert, {0, m}, {0, k}, src, dst, pitch);
  }
}

void PackA(DType dtype, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst,
           std::int64_t pitch) {
  WithWidening(dtype, [&](auto convert) { PackAs(convert, m, k, src, dst, pitch); });
}

// ---- PackB

// Words of a panel. With kStream past the caches, whose stores have to fill each line one right after the other.
constexpr std::int64_t kLineWords = 16;
template <bool kStream>
HWY_INLINE void StorePanel(Words words, void* p) {
  if constexpr (kStream) return hn::Stream(words, WordTag(), static_cast<std::uint32_t*>(p));
  StoreWords(words, p);
}

// Where element (p, j) stands in the panels.
template <class To>
HWY_INLINE std::int64_t PanelOffset(std::int64_t p, std::int64_t j, std::int64_t panel_stride) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  return j / kNr * panel_stride + (p / kPerWord * kNr + j % kNr) * kPerWord + p % kPerWord;
}

template <class Convert>
void PackBElements(Convert, Range rows, Range columns, const StridedSource& src, typename Convert::To* dst,
                   std::int64_t panel_stride) {
  using To = typename Convert::To;
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  for (std::int64_t p = rows.begin; p < rows.end; ++p) {
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
      dst[PanelOffset<To>(p, j, panel_stride)] = Convert::One(data[p * src.row_stride + j * src.col_stride]);
    }
  }
}

// Zeros where panels reach beyond the rows `k` of a block, whole words of which begin with the first: behind an odd last one, and
// in the last panel's missing columns.
template <class To>
void ZeroPanelEdges(Range k, std::int64_t n, To* dst, std::int64_t panel_stride) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  const std::int64_t k_padded = RoundUp(k.end, kPerWord), n_padded = RoundUp(n, kNr);
  for (std::int64_t p = k.end; p < k_padded; ++p) {
    for (std::int64_t j = 0; j < n; ++j) dst[PanelOffset<To>(p, j, panel_stride)] = To(0.0f);
  }
  if (n == n_padded) return;
  for (std::int64_t p = k.begin; p < k_padded; p += kPerWord) {
    To* to = dst + PanelOffset<To>(p, n, panel_stride);
    std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>((n_padded - n) * kPerWord) * sizeof(To));
  }
}

// Rows of the source are adjacent in memory. A few words of k are packed for one panel after the other: their rows are
// read side by side, and each panel is written a few lines at a time. Word by word the lines that are under way would
// lie a panel apart, in one set of the caches where that is a power of two: a third of the speed.
constexpr std::int64_t kWordsAtATime = 4;
constexpr std::int64_t kBytesAhead = 256;

// What is packed so many elements after column j of row p: in the row, or in the one that follows it a group of rows on,
// which nothing else asks for in time where rows are far apart.
template <class T>
HWY_INLINE const T* AheadOf(const T* data, std::int64_t row_stride, std::int64_t p, std::int64_t j,
                            std::int64_t n, std::int64_t group) {
  constexpr std::int64_t kAhead = kBytesAhead / static_cast<std::int64_t>(sizeof(T));
  return j + kAhead < n ? data + p * row_stride + j + kAhead
                        : data + (p + group) * row_stride + (j + kAhead - n);
}

template <bool kStream, class Source>
void PackBPlain(Widen<Source>, std::int64_t k, std::int64_t n, const StridedSource& src, float* dst,
                std::int64_t panel_stride) {
  const auto* data = static_cast<const Source*>(src.data);
  for (std::int64_t first = 0; first < k; first += kWordsAtATime) {
    for (std::int64_t j = 0; j < n; j += kNr) {
      for (std::int64_t p = first; p < Min(first + kWordsAtATime, k); ++p) {
        const Source* from = data + p * src.row_stride + j;
        float* to = dst + PanelOffset<float>(p, j, panel_stride);
        if (n - j < kNr) {  // And zeros.
          StorePanel<kStream>(LoadLeft(from, n - j), to);
          StorePanel<kStream>(LoadLeft(from + kLanes, n - j - kLanes), to + kLanes);
          continue;
        }
        const Source* ahead = AheadOf(data, src.row_stride, p, j, n, kWordsAtATime);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + kLanes);
        StorePanel<kStream>(LoadWords(from), to);
        StorePanel<kStream>(LoadWords(from + kLanes), to + kLanes);
      }
    }
  }
}
#if HWY_TARGET <= HWY_AVX3
// Two rows at a time, interleaved. An Emerald Rapids follows eight pairs of them better, 1.03 to 1.08 times as fast.
inline std::int64_t PairsAtATime() { return ThisCpu() == Cpu::kIntel ? 8 : kWordsAtATime; }
template <bool kStream>
void PackBPlain(KeepBF16 convert, std::int64_t k, std::int64_t n, const StridedSource& src, BF16* dst,
                std::int64_t panel_stride) {
  const WordTag d;
  const auto* data = static_cast<const BF16*>(src.data);
  const std::int64_t k_full = RoundDown(k, 2), step = 2 * PairsAtATime();
  for (std::int64_t first = 0; first < k_full; first += step) {
    for (std::int64_t panel = 0; panel < n; panel += kNr) {
      for (std::int64_t p = first; p < Min(first + step, k_full); p += 2) {
        const BF16* from = data + p * src.row_stride + panel;
        const BF16* ahead = AheadOf(data, src.row_stride, p, panel, n, step);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + src.row_stride);
        BF16* to = dst + PanelOffset<BF16>(p, panel, panel_stride);
        const auto pack = [&](std::int64_t j) HWY_ATTR {
          const std::int64_t left = n - panel - j;
          Words even, odd;
          if (left >= kLanes) {
            even = LoadHalves(from + j), odd = LoadHalves(from + src.row_stride + j);
          } else {
            const std::int64_t some = std::max<std::int64_t>(left, 0);
            even = hn::PromoteTo(d, LoadSomeHalves(from + j, some)),
            odd = hn::PromoteTo(d, LoadSomeHalves(from + src.row_stride + j, some));
          }
          StorePanel<kStream>(hn::Or(even, hn::ShiftLeft<16>(odd)), to + 2 * j);
        };
        pack(0);
        pack(kLanes);
      }
    }
  }
  PackBElements(convert, {k_full, k}, {0, n}, src, dst, panel_stride);
  ZeroPanelEdges({k_full, k}, n, dst, panel_stride);
}
#endif

#if HWY_TARGET != HWY_SCALAR
// One vector of words, adjacent in p; or those of the first `count` elements, zeros behind them.
template <class Source>
HWY_INLINE Words LoadRun(Widen<Source>, const Source* p) {
  return LoadWords(p);
}
template <class Source>
HWY_INLINE Words LoadSomeOfRun(Widen<Source>, const Source* p, std::int64_t count) {
  return LoadSome(p, count);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE Words LoadRun(KeepBF16, const BF16* p) {  // Pairs of k are adjacent in the source already.
  return hn::LoadU(WordTag(), reinterpret_cast<const std::uint32_t*>(p));
}
HWY_INLINE Words LoadSomeOfRun(KeepBF16, const BF16* p, std::int64_t count) {
  const hn::Repartition<std::uint16_t, WordTag> d;
  return hn::BitCast(WordTag(), hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(count)), d,
                                               reinterpret_cast<const std::uint16_t*>(p)));
}
#endif

// The source's columns are adjacent in memory: transposes kLanes columns by kLanes words. The next columns are asked for
// meanwhile: their lines lie in no order that the machine would foresee. Into the second-level cache: the first has too few
// fill buffers, which would take a third longer.
template <bool kStream, class Convert>
void PackBTransposed(Convert convert, std::int64_t k, std::int64_t n, const StridedSource& src,
                     typename Convert::To* dst, std::int64_t panel_stride) {
  using To = typename Convert::To;
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  constexpr std::int64_t kStep =
      kStream ? std::max<std::int64_t>(kLanes, kLineWords) : kLanes;  // Columns of whole lines.
  const std::int64_t n_full = RoundDown(n, kLanes), n_padded = RoundUp(n, kNr),
                     k_full = RoundDown(k, kLanes * kPerWord);
  const auto turn = [&](std::int64_t p, std::int64_t j) HWY_ATTR {
    Words block[kLanes];
    const auto* from = data + j * src.col_stride + p;
    const auto* ahead = j + kStep < n_full ? from + kStep * src.col_stride : from;
    if (j < n_full) {
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        block[r] = LoadRun(convert, from + r * src.col_stride);
        __builtin_prefetch(ahead + r * src.col_stride, 0, 2);
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r)
        block[r] = j + r < n ? LoadRun(convert, from + r * src.col_stride) : hn::Zero(WordTag());
    }
    Transpose(block);
    To* to = dst + PanelOffset<To>(p, j, panel_stride);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) StorePanel<kStream>(block[r], to + r * kNr * kPerWord);
  };
  for (std::int64_t first = 0; first < n_padded; first += kStep) {
    for (std::int64_t p = 0; p < k_full; p += kLanes * kPerWord) {
      for (std::int64_t j = first; j < Min(first + kStep, n_padded); j += kLanes) turn(p, j);
    }
  }
  if (k == k_full) return;
  for (std::int64_t j = 0; j < n_padded; j += kLanes) {  // The words that are left.
    Words block[kLanes];
    const auto* from = data + j * src.col_stride + k_full;
    for (std::int64_t r = 0; r < kLanes; ++r)
      block[r] =
          j + r < n ? LoadSomeOfRun(convert, from + r * src.col_stride, k - k_full) : hn::Zero(WordTag());
    Transpose(block);
    To* const to = dst + PanelOffset<To>(k_full, j, panel_stride);
    for (std::int64_t word = 0; word < CeilDiv(k - k_full, kPerWord); ++word)
      StorePanel<kStream>(block[word], to + word * kNr * kPerWord);
  }
}
#endif

template <bool kStream, class Convert>
void PackBs(Convert convert, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst_data,
            std::int64_t panel_stride) {
  auto* dst = static_cast<typename Convert::To*>(dst_data);
  if (src.col_stride == 1) {
    PackBPlain<kStream>(convert, k, n, src, dst, panel_stride);
#if HWY_TARGET != HWY_SCALAR
  } else if (src.row_stride == 1) {
    PackBTransposed<kStream>(convert, k, n, src, dst, panel_stride);
#endif
  } else {
    PackBElements(convert, {0, k}, {0, n}, src, dst, panel_stride);
    ZeroPanelEdges({0, k}, n, dst, panel_stride);
  }
}

// Where a panel's words of one step of k are whole lines.
template <class To>
bool StreamsPanels(const void* dst, std::int64_t panel_stride) {
  constexpr std::int64_t kLine = 64;
  return kNr % kLineWords == 0 && reinterpret_cast<std::uintptr_t>(dst) % kLine == 0 &&
         panel_stride * static_cast<std::int64_t>(sizeof(To)) % kLine == 0;
}

template <class Convert>
void PackBAs(Convert convert, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
             std::int64_t panel_stride, bool stream) {
  if (stream && StreamsPanels<typename Convert::To>(dst, panel_stride))
    return PackBs<true>(convert, k, n, src, dst, panel_stride);
  PackBs<false>(convert, k, n, src, dst, panel_stride);
}

template <bool kStream>
void PackB(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
           std::int64_t panel_stride) {
  WithWidening(dtype, [&](auto convert) { PackBAs(convert, k, n, src, dst, panel_stride, kStream); });
}

#if HWY_TARGET <= HWY_AVX3
void PackANative(DType dtype, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst,
                 std::int64_t pitch) {
  if (dtype != DType::kBF16) return PackA(dtype, m, k, src, dst, pitch);
  PackAs(KeepBF16(), m, k, src, dst, pitch);
}

template <bool kStream>
void PackBNative(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
                 std::int64_t panel_stride) {
  if (dtype != DType::kBF16) return PackB<kStream>(dtype, k, n, src, dst, panel_stride);
  PackBAs(KeepBF16(), k, n, src, dst, panel_stride, kStream);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_PACKING_INL_H_
