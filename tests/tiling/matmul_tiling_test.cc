#include "tiling/matmul_tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matmul_kernel.h"
#include "npu_model/chip.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"
#include "tests/tiling/tiling_support.h"

namespace cubist {
namespace {

using testing::Chips;
using testing::ExpectChoosingAgainGivesTheSame;
using testing::ExpectErrorsNameTheBuffer;
using testing::TensorOf;
using testing::WithCapacity;

constexpr Buffer kBuffers[] = {Buffer::kL1,  Buffer::kL0A, Buffer::kL0B,
                               Buffer::kL0C, Buffer::kBT,  Buffer::kUB};

std::vector<MatmulShape> Shapes() {
  std::vector<MatmulShape> shapes;
  for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{{1, 1, 1},
                                                                        {0, 7, 5},
                                                                        {7, 0, 5},
                                                                        {7, 5, 0},
                                                                        {16, 16, 16},
                                                                        {257, 383, 97},
                                                                        {1, 4096, 512},
                                                                        {4096, 1, 512},
                                                                        {3, 5, 100000},
                                                                        {512, 512, 512},
                                                                        {4096, 4096, 4096},
                                                                        {128, 7168, 2048},
                                                                        {20480, 7680, 1536}}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      shapes.push_back({m, n, k, dtype, dtype, /*bias=*/(m + n) % 2 == 0, /*a_row_bytes=*/k * SizeOf(dtype)});
      // With all that a Vector core is given.
      if (dtype != DType::kBF16 || m == 0 || n == 0 || k == 100000) continue;
      shapes.push_back(shapes.back());
      shapes.back().bias = false;
      shapes.back().epilogue = {
          .vector = true, .bias = true, .residual = true, .scratch = m % 2 == 0 ? 1 : 3};
    }
  }
  return shapes;
}

std::string NameOf(const MatmulShape& s) {
  return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k) + " " + NameOf(s.in) +
         (s.bias ? " with bias" : "");
}
std::string NameOf(const MatmulTiling& t) {
  return "m " + std::to_string(t.m) + " n " + std::to_string(t.n) + " k1 " + std::to_string(t.k1) + " k0 " +
         std::to_string(t.k0) + " stages " + std::to_string(t.l1_stages) + std::to_string(t.l0_stages) +
         std::to_string(t.l0c_stages) + " pieces " + std::to_string(t.pieces) +
         (t.stagger ? " staggered" : "");
}

// What the kernel of one core says of its buffers: no finding, and the bytes that its rings take.
template <class T>
trace::CoreRecord RecordOneCore(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  const GmTensor a = TensorOf(0, s.in, s.m, s.k), b = TensorOf(1, s.in, s.k, s.n),
                 bias = TensorOf(2, DType::kF32, 1, s.n), c = TensorOf(3, s.out, s.m, s.n);
  const auto packed = [&](const GmTensor& tensor, Role role) {
    PackedGm p;
    p.tensor = &tensor, p.role = role, p.dtype = s.in;
    p.rows = tensor.sizes[2], p.cols = tensor.sizes[3];
    p.row_part = {0, p.rows}, p.col_part = {0, p.cols};
    return p;
  };
  MatmulOperands g;
  g.a.plain = &a, g.b.plain = &b;
  if (t.pack_a) g.a.packed = packed(a, Role::kA);
  if (t.pack_b) g.b.packed = packed(b, Role::kB);
  g.bias = s.bias ? &bias : nullptr;
  g.c = &c;
  g.k = s.k;
  g.epilogue.shape = s.epilogue;
  g.late_bias = s.epilogue.bias ? &bias : nullptr;
  g.residual = s.epilogue.residual ? &c : nullptr;
  g.epilogue.scalars.activation = s.epilogue.scratch == 0   ? Activation::kNone
                                  : s.epilogue.scratch == 1 ? Activation::kSilu
                                                            : Activation::kGelu;
  const GmTensor parts = TensorOf(4, DType::kF32, s.m, s.n);
  g.parts = &parts;
  trace::CoreRecord record;
  Scratch scratch;
  TraceAiCore core(chip, scratch, 0, static_cast<int>(std::max<std::int64_t>(t.grid.count(), 1)),
                   /*with_data=*/false, &record);
  MatmulKernel<T>(core, g, t);
  EXPECT_EQ(core.finding(), "") << chip.name << " " << NameOf(s) << " " << NameOf(t);
  return record;
}
trace::CoreRecord RecordOneCore(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  switch (s.in) {
    case DType::kBF16:
      return RecordOneCore<BF16>(chip, s, t);
    case DType::kF16:
      return RecordOneCore<F16>(chip, s, t);
    default:
      return RecordOneCore<float>(chip, s, t);
  }
}
std::int64_t BytesIn(const trace::CoreRecord& record, Buffer buffer) {
  std::int64_t bytes = 0;
  for (const trace::SlotInfo& slot : record.slots) {
    if (slot.buffer == buffer && slot.lane <= 0) bytes += slot.bytes;  // One Vector core of both.
  }
  return bytes;
}

TEST(MatmulTilingTest, WhatTheTilingCountsIsWhatTheRingsTake) {
  for (const ChipSpec* chip : Chips()) {
    for (const MatmulShape& s : Shapes()) {
      if (s.m == 0 || s.n == 0) continue;  // No core, no ring.
      const std::vector<MatmulTiling> candidates = Candidates(*chip, s);
      for (std::size_t i = 0; i < candidates.size(); i += candidates.size() / 6 + 1) {
        const MatmulTiling& t = candidates[i];
        const trace::CoreRecord record = RecordOneCore(*chip, s, t);
        for (Buffer buffer : kBuffers) {
          if (buffer == Buffer::kUB && t.splits > 1) continue;  // That is for the second phase.
          const std::int64_t bytes = BytesIn(record, buffer);
          EXPECT_TRUE(Fits(WithCapacity(*chip, buffer, bytes), s, t))
              << chip->name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes of "
              << NameOf(buffer);
          if (bytes == 0) continue;
          EXPECT_FALSE(Fits(WithCapacity(*chip, buffer, bytes - 1), s, t))
              << chip->name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes of "
              << NameOf(buffer);
        }
      }
    }
  }
}

TEST(MatmulTilingTest, CandidatesFitAndCoverTheirGrid) {
  for (const ChipSpec* chip : Chips()) {
    for (const MatmulShape& s : Shapes()) {
      const std::vector<MatmulTiling> candidates = Candidates(*chip, s);
      ASSERT_FALSE(candidates.empty()) << chip->name << " " << NameOf(s);
      for (const MatmulTiling& t : candidates) {
        SCOPED_TRACE(chip->name + " " + NameOf(s) + " " + NameOf(t));
        ASSERT_TRUE(Fits(*chip, s, t));
        ASSERT_EQ(t.grid.rows, CeilDiv(s.m, t.m));
        ASSERT_EQ(t.grid.cols, CeilDiv(s.n, t.n));
      }
    }
  }
}

// A host with tile registers, as this machine's CPU may not be.
ChipSpec HostWithTileRegisters() {
  ChipSpec chip = HostChip();
  chip.mmad.narrow_m_step = 32, chip.mmad.k_bytes = 64;
  chip.packing.native_bf16 = true;
  return chip;
}

TEST(MatmulTilingTest, AHostHasATilingHoweverOperandsAreStored) {
  const ChipSpec with_registers = HostWithTileRegisters();
  for (const ChipSpec* chip : {&HostChip(), &with_registers}) {
    for (const std::int64_t m : {1, 8, 32, 33, 256}) {
      for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {16, 4096}, {40, 1000}, {1024, 2048}, {1024, 8192}, {4096, 4096}}) {
        for (const bool b_packed : {false, true}) {
          for (const std::int64_t apart : {std::int64_t{0}, k, k + 32}) {  // A by columns, or rows so far.
            MatmulShape s{.m = m, .n = n, .k = k, .in = DType::kBF16, .a_row_bytes = 2 * apart};
            s.b_packed = b_packed, s.b_row_bytes = b_packed ? 0 : 2 * n;
            EXPECT_FALSE(Candidates(*chip, s).empty()) << ShapeText(s);
            EXPECT_FALSE(GroupCandidates(*chip, s).empty()) << ShapeText(s);
          }
        }
      }
    }
  }
}

TEST(MatmulTilingTest, SizesAreMultiplesOfTheChipsSteps) {
  for (const ChipSpec* chip : Chips()) {
    for (const MatmulShape& s : Shapes()) {
      for (const MatmulTiling& t : Candidates(*chip, s)) {
        SCOPED_TRACE(chip->name + " " + NameOf(s) + " " + NameOf(t));
        ASSERT_GT(t.m, 0);
        ASSERT_EQ(t.m % chip->RowStep(s.in), 0);
        ASSERT_EQ(t.n % chip->mmad.n_step, 0);
        ASSERT_EQ(t.n % (t.pack_b ? chip->PackedStep(Role::kB, s.in) : 1), 0);
        ASSERT_EQ(t.k0 % (chip->mmad.k_bytes / chip->OperandBytes(s.in)), 0);
        ASSERT_EQ(t.k0 % 2, 0);
        ASSERT_EQ(t.k1 % t.k0, 0);
      }
    }
  }
}

// A copy without gaps is made of what lies askew in lines of L2 and is read often, and of nothing else.
TEST(MatmulTilingTest, PacksWhatLiesAskew) {
  const auto packs = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    MatmulShape s{.m = m, .n = n, .k = k, .in = DType::kBF16, .out = DType::kBF16};
    s.a_row_bytes = 2 * k, s.b_row_bytes = 2 * n;
    std::set<std::pair<bool, bool>> packed;
    for (const MatmulTiling& t : Candidates(Ascend910B2(), s)) packed.emplace(t.pack_a, t.pack_b);
    return packed;
  };
  using Packed = std::set<std::pair<bool, bool>>;
  EXPECT_EQ(packs(4096, 4096, 4096), (Packed{{false, false}}));
  EXPECT_EQ(packs(4096, 4096, 4104), (Packed{{false, false}, {true, false}}));
  EXPECT_EQ(packs(4096, 4104, 4096), (Packed{{false, false}, {false, true}}));
  EXPECT_EQ(packs(4112, 4112, 4112), (Packed{{false, false}, {false, true}, {true, true}}));
  EXPECT_EQ(packs(128, 4104, 4104), (Packed{{false, false}, {true, false}}));
}

TEST(MatmulTilingTest, ChooseTakesACandidateOfLeastPrice) {
  for (const ChipSpec* chip : Chips()) {
    for (const MatmulShape& s : Shapes()) {
      SCOPED_TRACE(chip->name + " " + NameOf(s));
      MatmulTiling chosen;
      ASSERT_TRUE(Choose(*chip, s, &chosen).ok());
      const std::vector<MatmulTiling> candidates = Candidates(*chip, s);
      double least = std::numeric_limits<double>::infinity();
      for (const MatmulTiling& t : candidates) {
        const double price = Price(*chip, s, t);
        ASSERT_TRUE(std::isfinite(price)) << NameOf(t);
        ASSERT_GE(price, 0) << NameOf(t);
        ASSERT_TRUE(price > 0 || s.m == 0 || s.n == 0) << NameOf(t);
        least = std::min(least, price);
      }
      EXPECT_EQ(Price(*chip, s, chosen), least);
      EXPECT_EQ(std::count_if(candidates.begin(), candidates.end(),
                              [&](const MatmulTiling& t) { return t == chosen; }),
                1);
    }
  }
}

double BestPrice(const ChipSpec& chip, const MatmulShape& s) {
  MatmulTiling t;
  EXPECT_TRUE(Choose(chip, s, &t).ok());
  return Price(chip, s, t);
}

TEST(MatmulTilingTest, MoreWorkIsNotCheaper) {
  for (const ChipSpec* chip : Chips()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (std::int64_t size : {16, 100, 512, 3000}) {
        const double price = BestPrice(*chip, {size, size, size, dtype, dtype});
        SCOPED_TRACE(chip->name + " " + std::to_string(size) + " " + NameOf(dtype));
        EXPECT_GE(BestPrice(*chip, {2 * size, size, size, dtype, dtype}), price);
        EXPECT_GE(BestPrice(*chip, {size, 2 * size, size, dtype, dtype}), price);
        EXPECT_GE(BestPrice(*chip, {size, size, 2 * size, dtype, dtype}), price);
      }
      // Large enough, work and price grow together.
      const double one = BestPrice(*chip, {4096, 4096, 4096, dtype, dtype});
      const double eight = BestPrice(*chip, {8192, 8192, 8192, dtype, dtype});
      EXPECT_GT(eight, 6 * one) << chip->name;
      EXPECT_LT(eight, 10 * one) << chip->name;
    }
  }
}

// What L2 takes at least to feed the Cube cores of a chip with blocks that fill L0C: of all such blocks square ones read
// the least.
double L2Floor(const ChipSpec& chip, const MatmulShape& s) {
  if (!chip.pipes_overlap) return 0;
  const double side = std::sqrt(static_cast<double>(chip.buffer(Buffer::kL0C).capacity) / 4);
  const double macs = static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  const double bytes = 2 * macs / side * static_cast<double>(chip.OperandBytes(s.in));
  return bytes / chip.memory.cube_read_bytes_per_s * chip.clock_hz;
}

// The Cube's own time is a floor of the price, and so is L2's: with 16-bit operands the larger one. A large product comes
// near whichever bounds it.
TEST(MatmulTilingTest, TheCubeIsAFloor) {
  for (const ChipSpec* chip : Chips()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const MatmulShape s{4096, 4096, 4096, dtype, dtype};
      const double steps = 4096.0 / static_cast<double>(chip->RowStep(dtype)) * 4096.0 /
                           static_cast<double>(chip->mmad.n_step) * 4096.0 /
                           static_cast<double>(chip->mmad.k_bytes / chip->OperandBytes(dtype));
      const double passes =
          chip->OperandBytes(dtype) == 4 ? chip->mmad.fp32_passes : chip->mmad.narrow_passes;
      const double floor = steps * passes / chip->concurrent_cores, price = BestPrice(*chip, s);
      const double l2 = L2Floor(*chip, s);
      EXPECT_GE(price, std::max(floor, l2)) << chip->name << " " << NameOf(dtype);
      // Tile registers multiply more quickly than a host copies operands.
      const double above = chip->InTileRegisters(dtype) ? 1.6 : 1.3;
      EXPECT_LE(price, floor > l2 ? above * floor : 1.2 * l2) << chip->name << " " << NameOf(dtype);
    }
  }
}

TEST(MatmulTilingTest, ALargeProductIsDoubleBuffered) {
  const MatmulShape s{4096, 4096, 4096, DType::kF16, DType::kF16};
  MatmulTiling t;
  ASSERT_TRUE(Choose(Ascend910B2(), s, &t).ok());
  EXPECT_EQ(t.l1_stages, 2);
  EXPECT_EQ(t.l0_stages, 2);
  // Two stages of each operand stand in their buffers at once.
  const ChipSpec& chip = Ascend910B2();
  EXPECT_LE(2 * t.m * t.k0 * 2, chip.buffer(Buffer::kL0A).capacity);
  EXPECT_LE(2 * t.k0 * t.n * 2, chip.buffer(Buffer::kL0B).capacity);
  EXPECT_LE(2 * (t.m + t.n) * t.k1 * 2, chip.buffer(Buffer::kL1).capacity);
  // Blocks large enough that loads keep up with the Cube: (1 / m + 1 / n) * 4096 bytes per cycle of 16^3.
  EXPECT_GE(t.m * t.n, 128 * 256);
}

TEST(MatmulTilingTest, ChoosingAgainGivesTheSame) { ExpectChoosingAgainGivesTheSame<MatmulTiling>(Shapes()); }

TEST(MatmulTilingTest, AChangedChipIsChosenForAnew) {
  ChipSpec chip = Ascend910B1();
  const MatmulShape s{4096, 4096, 4096, DType::kBF16, DType::kBF16};
  MatmulTiling large, small;
  ASSERT_TRUE(Choose(chip, s, &large).ok());
  for (Buffer buffer : kBuffers) chip = WithCapacity(chip, buffer, chip.buffer(buffer).capacity / 8);
  ASSERT_TRUE(Choose(chip, s, &small).ok());
  EXPECT_TRUE(Fits(chip, s, small));
  EXPECT_FALSE(Fits(chip, s, large));
}

// Rows of A up to MostRowsOnce meet B where it lies, and more do not; where register tiles are low no copy of all of it is made
// for a few hundred either.
TEST(MatmulTilingTest, FewRowsMeetBWhereItLies) {
  for (const std::int64_t tile_rows : {6, 12}) {
    ChipSpec chip = HostChip();
    chip.mmad.m_step = tile_rows, chip.mmad.narrow_m_step = 0;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool in_rows : {false, true}) {
        MatmulShape s{1, 4096, 2048, dtype, DType::kF32};
        s.a_row_bytes = s.k * SizeOf(dtype);
        (in_rows ? s.b_row_bytes : s.b_col_bytes) = (in_rows ? s.n : s.k) * SizeOf(dtype);
        const std::int64_t most = MostRowsOnce(chip, s);
        EXPECT_GE(most, kRowsThatWait);
        for (const std::int64_t rows :
             {std::int64_t{1}, std::int64_t{4}, most, most + 1, std::int64_t{48}, std::int64_t{264}}) {
          SCOPED_TRACE(NameOf(s) + (in_rows ? ", rows " : ", columns ") + std::to_string(rows));
          s.m = rows;
          MatmulTiling t;
          ASSERT_TRUE(Choose(chip, s, &t).ok());
          EXPECT_TRUE(t.b_once || rows > kRowsThatWait);
          EXPECT_TRUE(!t.b_once || rows <= most);
          EXPECT_TRUE(!t.pack_b || !(t.b_once || HasLowTiles(chip)));
        }
        s.b_packed = true;
        EXPECT_EQ(MostRowsOnce(chip, s) > 0, chip.KeepsNarrow(Role::kB, dtype));
      }
    }
  }
}

// But few columns are packed for more than a strip of rows, on CPUs where that is quicker.
TEST(MatmulTilingTest, FewColumnsArePackedForManyRows) {
  ChipSpec chip = HostChip();
  chip.mmad.m_step = 12, chip.mmad.narrow_m_step = 0;
  for (const bool quicker : {false, true}) {
    chip.packing.packs_few_columns = quicker;
    for (const std::int64_t rows : {8, 48}) {
      MatmulShape s{rows, 16, 2048};
      s.a_row_bytes = s.b_col_bytes = s.k * SizeOf(s.in);
      EXPECT_EQ(MostRowsOnce(chip, s) >= rows, rows == 8 || !quicker) << rows;
      MatmulTiling t;
      ASSERT_TRUE(Choose(chip, s, &t).ok());
      EXPECT_TRUE(!t.b_once || rows == 8 || !quicker) << rows;
    }
  }
}

// And are multiplied as rows there although A is near, unless they are many, A's rows short, or B is read where it lies.
TEST(MatmulTilingTest, FewColumnsOfNearRowsAreTurned) {
  ChipSpec chip = HostChip();
  chip.mmad.m_step = 12, chip.mmad.narrow_m_step = 0;
  const auto most = [&](std::int64_t m, std::int64_t k, bool b_in_rows) {
    std::int64_t turned = 0;
    for (std::int64_t n = 1; n <= 16; ++n) {
      MatmulShape s{m, n, k};
      s.a_row_bytes = k * SizeOf(s.in);
      if (b_in_rows) s.b_row_bytes = n * SizeOf(s.in);
      if (IsBetterTurned(chip, s)) turned = n;
    }
    return turned;
  };
  for (const bool b_in_rows : {false, true}) {
    for (const std::int64_t m : {48, 200}) {
      chip.packing.turns_near = false;
      EXPECT_EQ(most(m, 1500, b_in_rows), 4);
      chip.packing.turns_near = true;
      EXPECT_EQ(most(m, 64, b_in_rows), 1);  // C's turning costs more.
      EXPECT_EQ(most(m, 500, b_in_rows), b_in_rows && m == 48 ? 4 : 6);
      EXPECT_EQ(most(m, 1500, b_in_rows), !b_in_rows ? 12 : m == 48 ? 4 : 8);
      EXPECT_EQ(most(m, 2048, b_in_rows), 12);  // Rows that share sets.
    }
  }
}

TEST(MatmulTilingTest, HugeSizesAreChosenAtOnce) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  for (const ChipSpec* chip : Chips()) {
    for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{{kHuge, 1, 1},
                                                                          {1, kHuge, 1},
                                                                          {1, 1, kHuge},
                                                                          {kHuge, 1024, 1024},
                                                                          {1024, kHuge, 64},
                                                                          {16, 16, kHuge}}) {
      const MatmulShape s{m, n, k, DType::kF32, DType::kF32, true};
      MatmulTiling t;
      ASSERT_TRUE(Choose(*chip, s, &t).ok()) << chip->name << " " << NameOf(s);
      EXPECT_TRUE(Fits(*chip, s, t));
      const double price = Price(*chip, s, t);
      EXPECT_TRUE(std::isfinite(price) && price > 0) << chip->name << " " << NameOf(s) << ": " << price;
      // No faster than the Cube.
      EXPECT_GE(price * static_cast<double>(chip->concurrent_cores) * 4096 * 1024,
                static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
    }
  }
}

TEST(MatmulTilingTest, AnErrorNamesTheBufferThatIsTooSmall) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    MatmulShape s{300, 300, 300, dtype, dtype, /*bias=*/true};
    s.epilogue.vector = true;
    ExpectErrorsNameTheBuffer<MatmulTiling>(s, kBuffers);
  }
}

}  // namespace
}  // namespace cubist
