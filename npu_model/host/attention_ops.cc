// Attention's own instruction bodies, compiled once per Highway target.
#include "npu_model/host/attention_ops.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "npu_model/host/simd_targets.h"
#include "npu_model/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/attention_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                               // IWYU pragma: keep
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// ---- Masks

constexpr std::int64_t Clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

HWY_INLINE void FillRow(float* row, std::int64_t begin, std::int64_t end, float value) {
  std::int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) Store(Set(value), row + j);
  for (; j < end; ++j) row[j] = value;
}

void MaskOutside(const Rows& x, std::int64_t lowest, std::int64_t highest, float value) {
  // The band, as far as it matters to the tile: sums with i stay small.
  const std::int64_t low = Clamp(lowest, -x.rows, x.cols), high = Clamp(highest, -x.rows - 1, x.cols);
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const std::int64_t begin = Clamp(i + low, 0, x.cols), end = Clamp(i + high + 1, begin, x.cols);
    FillRow(RowAs<float>(x, i), 0, begin, value);
    FillRow(RowAs<float>(x, i), end, x.cols, value);
  }
}

// As many flags as a vector has floats; elements of D as wide as theirs.
using FlagTag = hn::Rebind<std::uint8_t, FloatTag>;

// Elements as plain bits: words of floats, halves of the 16-bit types.
template <class D>
void MaskBitsWhere(D d, const Rows& x, const Rows& flags, hn::TFromD<D> value) {
  using Bits = hn::TFromD<D>;
  for (std::int64_t i = 0; i < x.rows; ++i) {
    auto* const row = RowAs<Bits>(x, i);
    const auto* const flag = RowAs<std::uint8_t>(flags, i);
    std::int64_t j = 0;
    for (; j + kLanes <= x.cols; j += kLanes) {
      const auto masked = hn::Ne(hn::PromoteTo(d, hn::LoadU(FlagTag(), flag + j)), hn::Zero(d));
      hn::StoreU(hn::IfThenElse(masked, hn::Set(d, value), hn::LoadU(d, row + j)), d, row + j);
    }
    for (; j < x.cols; ++j) row[j] = flag[j] != 0 ? value : row[j];
  }
}

void MaskWhere(DType type, const Rows& x, const Rows& flags, float value) {
  switch (type) {
    case DType::kBF16:
      return MaskBitsWhere(HalfTag(), x, flags, BF16(value).bits);
    case DType::kF16:
      return MaskBitsWhere(HalfTag(), x, flags, F16(value).bits);
    default:
      return MaskBitsWhere(WordTag(), x, flags, std::bit_cast<std::uint32_t>(value));
  }
}

// ---- Distances between rows and keys

// update(where, |first + i - j|, how many) for every row and kLanes keys of it at a time.
template <class Update>
HWY_INLINE void ForEachDistance(const Rows& x, std::int64_t first, Update update) {
  for (std::int64_t i = 0; i < x.rows; ++i) {
    float* const row = RowAs<float>(x, i);
    for (std::int64_t j = 0; j < x.cols; j += kLanes) {
      const Vec distance =
          hn::Abs(hn::Sub(Set(static_cast<float>(first + i - j)), hn::Iota(FloatTag(), 0.0f)));
      update(row + j, distance, Min(kLanes, x.cols - j));
    }
  }
}

void Distances(const Rows& x, std::int64_t first) {
  ForEachDistance(x, first, [](float* p, Vec distance, std::int64_t count) HWY_ATTR {
    if (count == kLanes) return Store(distance, p);
    Store(distance, p, count);
  });
}

template <bool kRoot>
void AddAlibiOf(const Rows& s, float scale, float slope, std::int64_t first) {
  ForEachDistance(s, first, [=](float* p, Vec distance, std::int64_t count) HWY_ATTR {
    if constexpr (kRoot) distance = hn::Sqrt(distance);
    const Vec bias = hn::Mul(distance, Set(-slope));
    if (count == kLanes) return Store(hn::Add(hn::Mul(Load(p), Set(scale)), bias), p);
    Store(hn::Add(hn::Mul(Load(p, count), Set(scale)), bias), p, count);
  });
}

void AddAlibi(const Rows& s, float scale, float slope, std::int64_t first, bool root) {
  root ? AddAlibiOf<true>(s, scale, slope, first) : AddAlibiOf<false>(s, scale, slope, first);
}

// ---- Dropout

// Both halves of the product of each word and a constant.
HWY_INLINE void Multiply(Words a, std::uint32_t factor, Words& high, Words& low) {
  const WordTag d;
#if HWY_TARGET == HWY_SCALAR
  const std::uint64_t product = std::uint64_t{hn::GetLane(a)} * factor;
  high = hn::Set(d, static_cast<std::uint32_t>(product >> 32));
  low = hn::Set(d, static_cast<std::uint32_t>(product));
#else
  const Words even = hn::BitCast(d, hn::MulEven(a, hn::Set(d, factor)));
  const Words odd = hn::BitCast(d, hn::MulEven(hn::Shuffle2301(a), hn::Set(d, factor)));
  low = hn::OddEven(hn::Shuffle2301(odd), even);
  high = hn::OddEven(odd, hn::Shuffle2301(even));
#endif
}

// kLanes blocks of Philox4x32-10, one to a lane (philox.h has it lane by lane).
struct PhiloxLanes {
  PhiloxLanes(const DropoutStream& stream, const std::array<std::uint64_t, kLanes>& blocks) {
    const WordTag d;
    HWY_ALIGN std::uint32_t low[kLanes], high[kLanes];
    for (std::size_t lane = 0; lane < blocks.size(); ++lane) {
      low[lane] = static_cast<std::uint32_t>(blocks[lane]);
      high[lane] = static_cast<std::uint32_t>(blocks[lane] >> 32);
    }
    x0 = hn::Load(d, low), x1 = hn::Load(d, high);
    x2 = hn::Set(d, static_cast<std::uint32_t>(stream.offset));
    x3 = hn::Set(d, static_cast<std::uint32_t>(stream.offset >> 32));
    auto key0 = static_cast<std::uint32_t>(stream.seed), key1 = static_cast<std::uint32_t>(stream.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      Words high0, low0, high1, low1;
      Multiply(x0, kPhiloxFactors[0], high0, low0);
      Multiply(x2, kPhiloxFactors[1], high1, low1);
      x0 = hn::Xor(hn::Xor(high1, x1), hn::Set(d, key0)), x1 = low1;
      x2 = hn::Xor(hn::Xor(high0, x3), hn::Set(d, key1)), x3 = low0;
      key0 += kPhiloxSteps[0], key1 += kPhiloxSteps[1];
    }
  }

  Words x0, x1, x2, x3;
};

// `one` in each lane whose lower (or upper) half is not below `kept`.
template <bool kUpper>
HWY_INLINE Words DroppedHalves(Words x, std::uint32_t kept, std::uint32_t one) {
  const WordTag d;
  const Words number = kUpper ? hn::ShiftRight<16>(x) : hn::And(x, hn::Set(d, 0xffffu));
  const auto above =
      hn::Gt(hn::BitCast(IntTag(), number), hn::Set(IntTag(), static_cast<std::int32_t>(kept) - 1));
  return hn::IfThenElseZero(hn::RebindMask(d, above), hn::Set(d, one));
}

// Four flags, a byte each, of the four halves of two words.
HWY_INLINE Words FourFlags(Words x, Words y, std::uint32_t kept) {
  return hn::Or(hn::Or(DroppedHalves<false>(x, kept, 1u), DroppedHalves<true>(x, kept, 1u << 8)),
                hn::Or(DroppedHalves<false>(y, kept, 1u << 16), DroppedHalves<true>(y, kept, 1u << 24)));
}

constexpr std::int64_t kBlockKeys = 8;  // Of one Philox block.

void DropFlags(const Rows& flags, const DropoutStream& stream, std::int64_t row, std::int64_t key) {
  const WordTag d;
  HWY_ALIGN std::uint32_t words[2 * kLanes];
  std::array<std::uint64_t, kLanes> blocks;
  for (std::int64_t i = 0; i < flags.rows; ++i) {
    auto* const to = RowAs<std::uint8_t>(flags, i);
    for (std::int64_t at = RoundDown(key, kBlockKeys); at < key + flags.cols; at += kLanes * kBlockKeys) {
      const std::int64_t first = (row + i) * stream.row_blocks + at / kBlockKeys;
      for (std::int64_t lane = 0; lane < kLanes; ++lane)
        blocks[static_cast<std::size_t>(lane)] = static_cast<std::uint64_t>(first + lane);
      const PhiloxLanes x(stream, blocks);
      hn::StoreInterleaved2(FourFlags(x.x0, x.x1, stream.kept), FourFlags(x.x2, x.x3, stream.kept), d, words);
      const std::int64_t begin = Max(at, key), end = Min(at + kLanes * kBlockKeys, key + flags.cols);
      std::memcpy(to + begin - key, reinterpret_cast<const std::uint8_t*>(words) + begin - at,
                  static_cast<std::size_t>(end - begin));
    }
  }
}

// Lanes are rows of weights, which are columns here: each block gives a piece of eight rows of flags.
void DropFlagsTransposed(const Rows& flags, const DropoutStream& stream, std::int64_t row, std::int64_t key) {
  const WordTag d;
  std::array<std::uint64_t, kLanes> blocks;
  HWY_ALIGN std::uint8_t bytes[8][kLanes];
  const auto store = [&](Words x, std::int64_t e) HWY_ATTR {
    const FlagTag to;
    hn::Store(hn::DemoteTo(to, hn::BitCast(IntTag(), hn::And(x, hn::Set(d, 1u)))), to, bytes[e]);
  };
  for (std::int64_t j = 0; j < flags.cols; j += kLanes) {
    const auto count = static_cast<std::size_t>(Min(kLanes, flags.cols - j));
    for (std::int64_t at = RoundDown(key, kBlockKeys); at < key + flags.rows; at += kBlockKeys) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        blocks[static_cast<std::size_t>(lane)] =
            static_cast<std::uint64_t>((row + j + lane) * stream.row_blocks + at / kBlockKeys);
      }
      const PhiloxLanes x(stream, blocks);
      const Words low = FourFlags(x.x0, x.x1, stream.kept), high = FourFlags(x.x2, x.x3, stream.kept);
      store(low, 0), store(hn::ShiftRight<8>(low), 1), store(hn::ShiftRight<16>(low), 2),
          store(hn::ShiftRight<24>(low), 3);
      store(high, 4), store(hn::ShiftRight<8>(high), 5), store(hn::ShiftRight<16>(high), 6),
          store(hn::ShiftRight<24>(high), 7);
      for (std::int64_t e = Max(at, key); e < Min(at + kBlockKeys, key + flags.rows); ++e)
        std::memcpy(RowAs<std::uint8_t>(flags, e - key) + j, bytes[e - at], count);
    }
  }
}

}  // namespace

const AttentionOps& GetAttentionOps() {
  static const AttentionOps kOps{.mask_outside = &MaskOutside,
                                 .mask_where = &MaskWhere,
                                 .distances = &Distances,
                                 .add_alibi = &AddAlibi,
                                 .drop_flags = &DropFlags,
                                 .drop_flags_transposed = &DropFlagsTransposed};
  return kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetAttentionOps);
const AttentionOps& BestAttentionOps() { return HWY_DYNAMIC_DISPATCH(GetAttentionOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
