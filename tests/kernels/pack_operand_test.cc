// Pre-packed operands: a product of them has the bits of the plain product, wherever their memory moved; a use
// that they were not packed for is refused.
#include "kernels/pack_operand.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

// Memory for packed operands between guards: just as many bytes as asked for.
class Memory {
 public:
  explicit Memory(std::int64_t bytes, std::int64_t lines_before = 1)
      : bytes_(bytes),
        before_(64 * lines_before),
        storage_(static_cast<std::size_t>(before_ + bytes + 64 + 63), kGuard) {}

  std::byte* data() {
    const auto start = reinterpret_cast<std::uintptr_t>(storage_.data()) + 63;
    return reinterpret_cast<std::byte*>(start / 64 * 64) + before_;
  }
  std::int64_t bytes() const { return bytes_; }
  void ExpectGuards() {
    for (std::byte* p = storage_.data(); p < data(); ++p) ASSERT_EQ(*p, kGuard) << "before the memory";
    for (std::byte* p = data() + bytes_; p < storage_.data() + storage_.size(); ++p) {
      ASSERT_EQ(*p, kGuard) << "behind the memory";
    }
  }

 private:
  static constexpr std::byte kGuard{0xa5};
  std::int64_t bytes_, before_;
  std::vector<std::byte> storage_;
};

// An operand, packed; its memory moves with it.
struct Packed {
  Packed(const Device& device, const ConstTensor& source, Side side, bool transpose) {
    const auto size = [&](int d) { return source.size(transpose ? source.rank - d : source.rank + d - 3); };
    memory.emplace(PackedOperandBytes(device, side, source.dtype, size(1), size(2),
                                      source.rank == 3 ? source.size(0) : 1));
    status = PackOperand(device,
                         {.source = source,
                          .side = side,
                          .transpose = transpose,
                          .data = memory->data(),
                          .bytes = memory->bytes()},
                         &operand);
    memory->ExpectGuards();
  }

  std::optional<Memory> memory;
  PackedOperand operand;
  Status status;
};

std::vector<MatmulShape> Shapes() {
  return {{1, 1, 1}, {7, 19, 13},   {33, 65, 47},  {5, 35, 257},    {129, 97, 66},  {65, 63, 0}, {0, 5, 3},
          {4, 0, 3}, {3, 1031, 17}, {1031, 3, 18}, {130, 259, 131}, {70, 40, 1030}, {64, 64, 64}};
}

// Plain, a packed, b packed, and both: four times the same bits.
void ExpectSameBitsPacked(const Device& device, const MatmulShape& s, DType in, bool transpose_a,
                          bool transpose_b, bool with_bias = true) {
  SCOPED_TRACE(Join(s.Name(), " ", NameOf(in), transpose_a ? " T" : " N", transpose_b ? "T" : "N"));
  Random random;
  Matrix a(in, {s.m, s.k}), b(in, {s.k, s.n}), a_t(in, {s.k, s.m}), b_t(in, {s.n, s.k});
  Matrix bias(DType::kF32, {s.n}), expected(DType::kF32, {s.m, s.n}), c(DType::kF32, {s.m, s.n});
  a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random);
  Assign(a_t.transposed(), a.ToDoubles()), Assign(b_t.transposed(), b.ToDoubles());
  MatmulArgs args{.a = transpose_a ? a_t.view() : a.view(),
                  .b = transpose_b ? b_t.view() : b.view(),
                  .c = expected.view(),
                  .transpose_a = transpose_a,
                  .transpose_b = transpose_b};
  if (with_bias) args.bias = bias.view();
  ASSERT_TRUE(IsOk(Matmul(device, args)));

  Packed packed_a(device, transpose_a ? a_t.view() : a.view(), Side::kA, transpose_a);
  Packed packed_b(device, transpose_b ? b_t.view() : b.view(), Side::kB, transpose_b);
  ASSERT_TRUE(IsOk(packed_a.status));
  ASSERT_TRUE(IsOk(packed_b.status));
  for (int packed = 1; packed < 4; ++packed) {
    MatmulArgs with = args;
    if ((packed & 1) != 0) with.a = {}, with.packed_a = packed_a.operand, with.transpose_a = false;
    if ((packed & 2) != 0) with.b = {}, with.packed_b = packed_b.operand, with.transpose_b = false;
    with.c = c.view();
    c.FillNaN();
    ASSERT_TRUE(IsOk(Matmul(device, with)));
    ExpectSameBits(c.view(), expected.view());
    ExpectGuards(c);
  }
}

TEST(PackOperandTest, SameBitsAsPlain) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    int turn = 0;
    for (const MatmulShape& shape : Shapes()) {
      for (DType in : kFloatTypes) {
        ++turn;
        ExpectSameBitsPacked(device, shape, in, turn % 2 == 0, turn % 4 < 2);
      }
    }
  }
  ExpectSameBitsPacked(NpuWithData(Ascend910B4()), {130, 259, 131}, DType::kBF16, true, false);
}

class PackOperandSimdTest : public SimdTargetTest {};

// B is no larger than it was, but for the edges: whoever multiplies 16-bit elements as floats widens them as it meets them.
TEST_P(PackOperandSimdTest, ElementsOfBStayAsNarrowAsTheyAre) {
  const std::int64_t rows = 512, cols = 256, none = PackedOperandBytes(Host(), Side::kB, DType::kF32, 0, 0);
  for (DType in : kFloatTypes) {
    EXPECT_EQ(PackedOperandBytes(Host(), Side::kB, in, rows, cols) - none, rows * cols * SizeOf(in))
        << NameOf(in);
  }
}

// All patterns of 16 bits, though of a NaN but a NaN is left; from columns that are adjacent, and that are not.
TEST_P(PackOperandSimdTest, EveryElementOfSixteenBitsComesBack) {
  constexpr std::int64_t kPatterns = 1 << 16, kGap = 3;
  for (DType in : {DType::kBF16, DType::kF16}) {
    Matrix one(in, {1, 1}), expected(DType::kF32, {1, kPatterns}), c(DType::kF32, {1, kPatterns});
    Assign(one.view(), std::vector<double>{1.0});
    for (const std::int64_t stride : {std::int64_t{1}, kGap}) {
      std::vector<std::uint16_t> elements(static_cast<std::size_t>(kPatterns * stride));
      for (std::int64_t i = 0; i < kPatterns; ++i)
        elements[static_cast<std::size_t>(i * stride)] = static_cast<std::uint16_t>(i);
      const ConstTensor b(elements.data(), in, {1, kPatterns}, {kPatterns * stride + 1, stride});
      ASSERT_TRUE(IsOk(Matmul(Host(), {.a = one.view(), .b = b, .c = expected.view()})));
      Packed packed(Host(), b, Side::kB, false);
      ASSERT_TRUE(IsOk(packed.status));
      ASSERT_TRUE(IsOk(Matmul(Host(), {.a = one.view(), .c = c.view(), .packed_b = packed.operand})));
      const std::vector<double> plain = expected.ToDoubles(), through = c.ToDoubles();
      for (std::size_t i = 0; i < plain.size(); ++i) {
        if (std::isnan(plain[i])) {
          EXPECT_TRUE(std::isnan(through[i])) << NameOf(in) << " " << i;
        } else {
          EXPECT_EQ(through[i], plain[i]) << NameOf(in) << " " << i;
        }
      }
    }
  }
}

TEST_P(PackOperandSimdTest, SameBitsAsPlain) {
  for (const MatmulShape& shape : {MatmulShape{33, 65, 47},
                                   {5, 135, 257},
                                   {1, 131, 90},
                                   {3, 70, 301},
                                   {14, 67, 130},
                                   {61, 100, 77},
                                   {50, 40, 270},
                                   {290, 75, 133}}) {
    for (DType in : kFloatTypes) ExpectSameBitsPacked(Host(), shape, in, true, true);
  }
}

// Products that a host turns around: with packed operands it never does.
TEST_P(PackOperandSimdTest, FewColumnsHaveTheSameBits) {
  for (const MatmulShape& shape : {MatmulShape{3, 1, 70},
                                   {90, 1, 19},
                                   {40, 8, 33},
                                   {129, 3, 1031},
                                   {67, 24, 300},
                                   {50, 25, 1100},
                                   {300, 33, 900},
                                   {129, 64, 2100},
                                   {2, 1, 0},
                                   {70, 5, 4200}}) {
    for (DType in : kFloatTypes) {
      for (const bool transpose_a : {false, true})
        ExpectSameBitsPacked(Host(), shape, in, transpose_a, shape.n % 2 == 0, /*with_bias=*/false);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, PackOperandSimdTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// Copied elsewhere, the packed operand is what it was.
TEST(PackOperandTest, MemoryMayMove) {
  Random random;
  Matrix a(DType::kBF16, {37, 129}), b(DType::kBF16, {129, 75});
  Matrix expected(DType::kF32, {37, 75}), c(DType::kF32, {37, 75});
  a.FillNormal(random), b.FillNormal(random);
  ASSERT_TRUE(IsOk(Matmul(Host(), {.a = a.view(), .b = b.view(), .c = expected.view()})));
  Packed packed(Host(), b.view(), Side::kB, false);
  ASSERT_TRUE(IsOk(packed.status));
  Memory elsewhere(packed.memory->bytes(), /*lines_before=*/7);
  std::memcpy(elsewhere.data(), packed.memory->data(), static_cast<std::size_t>(packed.memory->bytes()));
  std::memset(packed.memory->data(), 0xff, static_cast<std::size_t>(packed.memory->bytes()));
  PackedOperand moved = packed.operand;
  moved.data = elsewhere.data();
  ASSERT_TRUE(IsOk(Matmul(Host(), {.a = a.view(), .c = c.view(), .packed_b = moved})));
  ExpectSameBits(c.view(), expected.view());
  elsewhere.ExpectGuards();
}

// Without data nothing is read, and the loads change no layout any more.
TEST(PackOperandTest, ModelledWithoutData) {
  const Device device = NpuWithoutData(Ascend910B2());
  const std::int64_t m = 512, n = 768, k = 1024;
  PackedOperand packed;
  Profile packing, profile;
  const std::int64_t bytes = PackedOperandBytes(device, Side::kB, DType::kBF16, k, n);
  EXPECT_GE(bytes, 2 * k * n);
  ASSERT_TRUE(IsOk(PackOperand(
      device, {.source = ConstTensor(nullptr, DType::kBF16, {n, k}), .transpose = true, .bytes = bytes},
      &packed, &packing)));
  const auto moved = [](const Profile& p, Path path) { return p.path_bytes[static_cast<std::size_t>(path)]; };
  EXPECT_EQ(moved(packing, Path::kGmToL1Nd2Nz), 2 * k * n);
  EXPECT_EQ(moved(packing, Path::kL1ToGm), 2 * k * n);
  ASSERT_TRUE(IsOk(Matmul(device,
                          {.a = ConstTensor(nullptr, DType::kBF16, {m, k}),
                           .c = Tensor(nullptr, DType::kBF16, {m, n}),
                           .packed_b = packed},
                          &profile)));
  EXPECT_EQ(moved(profile, Path::kGmToL1) % (2 * k * n), 0);
  EXPECT_GE(moved(profile, Path::kGmToL1), 2 * k * n);
  EXPECT_EQ(moved(profile, Path::kGmToL1Nd2Nz) % (2 * m * k), 0);
}

::testing::AssertionResult Says(const Status& status, const std::vector<std::string>& fragments) {
  if (status.ok()) return ::testing::AssertionFailure() << "the call was accepted";
  for (const std::string& fragment : fragments) {
    if (status.message().find(fragment) == std::string::npos) {
      return ::testing::AssertionFailure()
             << '"' << status.message() << "\" does not say \"" << fragment << '"';
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(PackOperandTest, BadPacking) {
  Matrix source(DType::kF32, {20, 30});
  Random random;
  source.FillUniform(random);
  const std::int64_t bytes = PackedOperandBytes(Host(), Side::kB, DType::kF32, 20, 30);
  Memory memory(bytes);
  const PackOperandArgs good{.source = source.view(), .data = memory.data(), .bytes = bytes};
  PackedOperand packed;
  const auto expect = [&](auto spoil, const std::vector<std::string>& says) {
    PackOperandArgs args = good;
    spoil(args);
    for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
      if (device.kind() == Device::Kind::kNpu && args.bytes == bytes) args.bytes *= 2;
      EXPECT_TRUE(Says(PackOperand(device, args, &packed), says));
      EXPECT_FALSE(packed.given());
    }
    for (std::int64_t i = 0; i < bytes; ++i) ASSERT_EQ(memory.data()[i], std::byte{0xa5});
  };
  expect([](auto& x) { x.side = static_cast<Side>(7); }, {"pack_operand: side is 7, the last is 1"});
  EXPECT_EQ(PackedOperandBytes(Host(), static_cast<Side>(7), DType::kF32, 20, 30), 0);
  expect([](auto& x) { x.source = {}; }, {"pack_operand: source is not given"});
  expect([](auto& x) { x.source.rank = 1; }, {"source", "rank 1"});
  expect([](auto& x) { x.source.dtype = DType::kI32; }, {"source", "int32", "fp32"});
  expect([](auto& x) { x.source.data = nullptr; }, {"source", "null"});
  expect([](auto& x) { x.source.strides[0] = -(std::int64_t{1} << 60); }, {"source", "2^56"});
  expect([](auto& x) { x.source.sizes[0] = std::int64_t{1} << 60; }, {"source", "2^56"});
  expect([&](auto& x) { x.bytes = 100; }, {"data", "has 100 bytes", "needs"});
  expect([](auto& x) { x.data = nullptr; }, {"data", "null"});
  expect([](auto& x) { x.data = static_cast<std::byte*>(x.data) + 4; }, {"data", "aligned", "64"});
  expect([&](auto& x) { x.source.data = x.data; }, {"data", "overlaps source"});
  EXPECT_TRUE(Says(PackOperand(Host(), good, nullptr), {"pack_operand: packed is a null pointer"}));
  for (std::int64_t i = 0; i < bytes; ++i) ASSERT_EQ(memory.data()[i], std::byte{0xa5});
}

TEST(PackOperandTest, BadUse) {
  Random random;
  Matrix a(DType::kBF16, {6, 20}), b(DType::kBF16, {20, 30}), stack(DType::kBF16, {2, 20, 30});
  Matrix c(DType::kF32, {6, 30});
  a.FillUniform(random), b.FillUniform(random), stack.FillUniform(random);
  Packed right(Host(), b.view(), Side::kB, false), left(Host(), b.view(), Side::kA, false);
  Packed two(Host(), stack.view(), Side::kB, false);
  const MatmulArgs good{.a = a.view(), .c = c.view(), .packed_b = right.operand};
  ASSERT_TRUE(IsOk(Matmul(Host(), good)));
  c.FillNaN();
  const Matrix before = c;
  const auto expect = [&](auto spoil, const std::vector<std::string>& says) {
    MatmulArgs args = good;
    spoil(args);
    EXPECT_TRUE(Says(Matmul(Host(), args), says));
    ExpectSameBits(c.view(), before.view());
  };
  expect([&](auto& x) { x.b = b.view(); }, {"packed_b", "both"});
  expect([&](auto& x) { x.transpose_b = true; }, {"packed_b", "transpose_b"});
  // The side comes before all that cannot fit either then.
  const std::string left_for_right = "matmul: packed_b was packed for side a (c = a b), needs side b";
  expect([&](auto& x) { x.packed_b = left.operand; }, {left_for_right});
  expect([&](auto& x) { x.packed_b = left.operand, x.a.sizes[1] = 19, x.transpose_b = true; },
         {left_for_right});
  expect([&](auto& x) { x.packed_b = left.operand, x.a = {}, x.c.rank = 0; }, {left_for_right});
  expect([&](auto& x) { x.packed_a = right.operand, x.a = {}; },
         {"matmul: packed_a was packed for side b (c = a b), needs side a"});
  expect([&](auto& x) { x.packed_b.side = static_cast<Side>(7); }, {"packed_b.side is 7, the last is 1"});
  expect([&](auto& x) { x.packed_b = two.operand; }, {"packed_b", "2 matrices", "1"});
  expect([&](auto& x) { x.packed_b.rows = 21; }, {"packed_b"});
  expect([&](auto& x) { x.packed_b.cols = 29; }, {"packed_b", "x 30", "29"});
  expect([&](auto& x) { x.packed_b.cols = -1; }, {"packed_b", "negative"});
  expect([&](auto& x) { x.packed_b.dtype = DType::kF16; }, {"packed_b"});
  expect([&](auto& x) { x.packed_b.dtype = DType::kI32, x.alpha = 0; }, {"packed_b is int32", "needs fp32"});
  expect([&](auto& x) { x.packed_b.data = nullptr; }, {"packed_b", "null"});
  expect([&](auto& x) { x.packed_b.bytes -= 64; }, {"packed_b", "bytes", "needs"});
  expect([&](auto& x) { x.a.sizes[1] = 19; }, {"packed_b", "20 rows", "19"});
  Memory garbage(right.memory->bytes());
  expect([&](auto& x) { x.packed_b.data = garbage.data(); }, {"packed_b", "holds no packed operand"});
  // c in the packed memory.
  expect([&](auto& x) { x.c.data = right.memory->data() + 64; }, {"c overlaps packed_b"});
}

// A pack of no matrices is one for batches of none.
TEST(PackOperandTest, NoMatrices) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Random random;
    Matrix source(DType::kBF16, {0, 20, 30}), a(DType::kBF16, {0, 6, 20}), c(DType::kBF16, {0, 6, 30});
    EXPECT_EQ(PackedOperandBytes(device, Side::kB, DType::kBF16, 20, 30, 0), 128);  // A header.
    Packed none(device, source.view(), Side::kB, false);
    ASSERT_TRUE(IsOk(none.status));
    EXPECT_TRUE(none.operand.given());
    EXPECT_EQ(none.operand.matrices, 0);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = a.view(), .c = c.view(), .packed_b = none.operand})));

    Matrix two(DType::kBF16, {2, 6, 20}), of_two(DType::kBF16, {2, 6, 30}), b(DType::kBF16, {20, 30});
    two.FillUniform(random), b.FillUniform(random);
    EXPECT_TRUE(Says(Matmul(device, {.a = two.view(), .c = of_two.view(), .packed_b = none.operand}),
                     {"packed_b holds 0 matrices, needs 1 or 2"}));
    const Packed one(device, b.view(), Side::kB, false);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = a.view(), .c = c.view(), .packed_b = one.operand})));
    Packed left(device, a.view(), Side::kA, false);
    ASSERT_TRUE(IsOk(left.status));
    EXPECT_TRUE(IsOk(Matmul(device, {.b = b.view(), .c = c.view(), .packed_a = left.operand})));
  }
}

// What one SIMD target packed, one with other panels refuses.
TEST(PackOperandTest, AnotherTargetsLayoutIsRefused) {
  const std::vector<std::int64_t> targets = SimdTargets();
  Random random;
  Matrix a(DType::kF32, {6, 20}), b(DType::kF32, {20, 30}), c(DType::kF32, {6, 30});
  a.FillUniform(random), b.FillUniform(random);
  std::optional<Packed> packed;
  std::int64_t panel = 0;
  {
    const ScopedSimdTarget scope(targets.front());
    packed.emplace(Host(), b.view(), Side::kB, false);
    panel = HostChip().PackedStep(Role::kB, DType::kF32);
  }
  const ScopedSimdTarget scope(targets.back());
  if (HostChip().PackedStep(Role::kB, DType::kF32) == panel) GTEST_SKIP() << "one layout on all targets";
  EXPECT_TRUE(
      Says(Matmul(Host(), {.a = a.view(), .c = c.view(), .packed_b = packed->operand}), {"packed_b"}));
}

}  // namespace
}  // namespace cubist::testing
