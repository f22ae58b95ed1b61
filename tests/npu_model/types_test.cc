// The 16-bit floats: every code, and rounding against a search for the nearest neighbour.
#include "npu_model/types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/random.h"

namespace cubist {
namespace {

template <class T>
T FromBits(std::uint32_t bits) {
  T x;
  x.bits = static_cast<std::uint16_t>(bits);
  return x;
}

template <class T>
constexpr std::uint32_t kInfinityBits = std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;

// What the code stands for, from the definition of the format.
template <class T>
double ValueOf(std::uint32_t bits) {
  const int mantissa_bits = std::is_same_v<T, BF16> ? 7 : 10;
  const int bias = std::is_same_v<T, BF16> ? 127 : 15;
  const int exponent = static_cast<int>((bits & 0x7fffu) >> mantissa_bits);
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

// The code nearest to x >= 0, ties to the even code. Codes of positive numbers ascend with their values, and
// the code of infinity takes the place of the next power of two, so that rounding up from the largest finite
// number reaches it.
template <class T>
std::uint32_t Nearest(double x) {
  std::uint32_t low = 0, high = kInfinityBits<T>;
  if (x >= ValueOf<T>(high)) return high;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (ValueOf<T>(middle) <= x ? low : high) = middle;
  }
  const double below = x - ValueOf<T>(low), above = ValueOf<T>(high) - x;
  if (below != above) return below < above ? low : high;
  return low % 2 == 0 ? low : high;
}

template <class T>
void ExpectNearest(float x) {
  ASSERT_FALSE(std::isnan(x));
  const std::uint32_t expected =
      Nearest<T>(std::abs(static_cast<double>(x))) | (std::signbit(x) ? 0x8000u : 0u);
  ASSERT_EQ(T(x).bits, expected) << "for " << x << ", bits " << std::bit_cast<std::uint32_t>(x);
}

TEST(DTypeTest, ABooleanIsAByteThatIsTrueUnlessZero) {
  const std::uint8_t bytes[] = {0, 1, 2, 128, 255};
  const ConstTensor tensor(bytes, {5});
  EXPECT_EQ(tensor.dtype, DType::kBool);
  EXPECT_EQ(DTypeOf<bool>(), DType::kBool);
  EXPECT_EQ(SizeOf(DType::kBool), 1);
  EXPECT_STREQ(NameOf(DType::kBool), "bool");
  EXPECT_FALSE(IsFloat(DType::kBool));
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(LoadInt(bytes, DType::kBool, i), i == 0 ? 0 : 1);
}

template <class T>
class Float16Test : public ::testing::Test {};
using Float16Types = ::testing::Types<BF16, F16>;
TYPED_TEST_SUITE(Float16Test, Float16Types);

TYPED_TEST(Float16Test, EveryCodeHasItsValueAndComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<float>(FromBits<TypeParam>(bits));
    const std::uint32_t magnitude = bits & 0x7fffu;
    if (magnitude > kInfinityBits<TypeParam>) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(value)))) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000u) != 0) << bits;
      continue;
    }
    if (magnitude == kInfinityBits<TypeParam>) {
      ASSERT_TRUE(std::isinf(value)) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000u) != 0) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), ValueOf<TypeParam>(bits)) << bits;
    }
    ASSERT_EQ(TypeParam(value).bits, bits);
  }
}

TYPED_TEST(Float16Test, RoundsBetweenNeighboursToNearestEven) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::uint32_t bits = 0; bits < kInfinityBits<TypeParam>; ++bits) {
    // A float holds the middle between two neighbours exactly, subnormal ones included.
    const auto middle = static_cast<float>((ValueOf<TypeParam>(bits) + ValueOf<TypeParam>(bits + 1)) / 2);
    for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, infinity)}) {
      ExpectNearest<TypeParam>(x);
      ExpectNearest<TypeParam>(-x);
    }
  }
}

TYPED_TEST(Float16Test, RoundsAnyFloatToNearestEven) {
  testing::Random random;
  for (int i = 0; i < 1'000'000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random.Bits()));
    if (!std::isnan(x)) ExpectNearest<TypeParam>(x);
  }
}

TYPED_TEST(Float16Test, EveryNaNStaysNaN) {
  for (std::uint32_t mantissa = 1; mantissa < 0x800000u; mantissa += mantissa < 0x4000u ? 1 : 0x3fffu) {
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      const auto x = std::bit_cast<float>(sign | 0x7f800000u | mantissa);
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(x)))) << mantissa;
    }
  }
}

TEST(BF16Test, OverflowsAtHalfAUnitAboveTheLargest) {
  const auto largest = std::bit_cast<float>(0x7f7f0000u);
  EXPECT_EQ(BF16(std::bit_cast<float>(0x7f7f7fffu)).bits, BF16(largest).bits);
  EXPECT_EQ(BF16(std::bit_cast<float>(0x7f7f8000u)).bits, 0x7f80u);
}

TEST(F16Test, OverflowsAtHalfAUnitAboveTheLargest) {
  EXPECT_EQ(F16(65504.0f).bits, 0x7bffu);
  EXPECT_EQ(F16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bffu);
  EXPECT_EQ(F16(65520.0f).bits, 0x7c00u);
  EXPECT_EQ(F16(-65520.0f).bits, 0xfc00u);
}

TEST(TensorTest, ContiguousStrides) {
  float x[24];
  const Tensor t(x, {2, 3, 4});
  EXPECT_EQ(t.dtype, DType::kF32);
  EXPECT_EQ(t.stride(0), 12);
  EXPECT_EQ(t.stride(1), 4);
  EXPECT_EQ(t.stride(2), 1);
  EXPECT_EQ(t.count(), 24);
  EXPECT_TRUE(t.given());
  EXPECT_FALSE(Tensor().given());
}

TEST(TensorTest, EmptyAndAbsurdSizesDoNotOverflow) {
  float x[1];
  EXPECT_EQ(Tensor(x, {0, 5}).count(), 0);
  const Tensor t(x, {std::int64_t{1} << 62, std::int64_t{1} << 62, 8});
  EXPECT_EQ(t.stride(2), 1);
  EXPECT_EQ(t.stride(1), 8);
}

// Their rank is what validation names; they may not be written behind the tensor's own numbers.
TEST(TensorTest, MoreDimensionsThanThereAre) {
  float x[1];
  struct {
    Tensor t;
    std::int64_t behind;
  } guarded{Tensor(x, {2, 3, 4, 5, 6, 7, 8, 9}, {9, 8, 7, 6, 5, 4, 3, 2}), 42};
  EXPECT_EQ(guarded.t.rank, 8);
  EXPECT_EQ(guarded.t.sizes, (Tensor::Sizes{2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(guarded.t.strides, (Tensor::Sizes{9, 8, 7, 6, 5, 4}));
  EXPECT_EQ(guarded.behind, 42);
}

TEST(SplitTest, CoversTheRangeWithoutOverlap) {
  for (std::int64_t size : {0, 1, 5, 6, 7, 12, 13}) {
    for (std::int64_t step : {1, 2, 6, 100}) {
      std::int64_t at = 0, pieces = 0;
      for (Range r : Split(size, step)) {
        EXPECT_EQ(r.begin, at);
        EXPECT_GT(r.size(), 0);
        EXPECT_LE(r.size(), step);
        EXPECT_EQ(r, Split(size, step)[pieces]);
        at = r.end;
        ++pieces;
      }
      EXPECT_EQ(at, size);
      EXPECT_EQ(pieces, Split(size, step).count());
    }
  }
}

// A caller's step or multiple may be as large as an int64.
TEST(SplitTest, HugeSizesAndStepsDoNotOverflow) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t step : {kHuge, kHuge - 1, kHuge / 2 + 1}) {
    for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, step - 1, step}) {
      SCOPED_TRACE(std::to_string(size) + " by " + std::to_string(step));
      EXPECT_EQ(CeilDiv(size, step), size > 0 ? 1 : 0);
      EXPECT_EQ(RoundUp(size, step), size > 0 ? step : 0);
      EXPECT_EQ(Split(size, step).count(), size > 0 ? 1 : 0);
      for (const Range r : Split(size, step)) EXPECT_EQ(r, (Range{0, size}));
      for (const Range r : AtLeastOnce(Split(size, step))) EXPECT_EQ(r, (Range{0, size}));
      const Range shifted{kHuge - size, kHuge};
      for (const Range r : Split(shifted, step)) EXPECT_EQ(r, shifted);
    }
    EXPECT_EQ(CeilDiv(kHuge, step), step == kHuge ? 1 : 2);
    EXPECT_EQ(Split(kHuge, step)[CeilDiv(kHuge, step) - 1].end, kHuge);
  }
  EXPECT_EQ(CeilDiv(kHuge, 1), kHuge);
  EXPECT_EQ(CeilDiv(kHuge, 2), kHuge / 2 + 1);
  static_assert(CeilDiv(kHuge, kHuge - 1) == 2);
}

}  // namespace
}  // namespace cubist
