// The model's counts of products against closed forms of the kernels' loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/traffic.h"
#include "tests/support/shapes.h"
#include "tiling/matmul_tiling.h"

namespace cubist::testing {
namespace {

struct MatmulCase {
  std::int64_t m, n, k;
  DType in, out;
  std::optional<DType> bias = {};
  bool transpose_a = false, transpose_b = false;

  MatmulArgs args() const {
    MatmulArgs args;
    args.a = transpose_a ? ConstTensor(nullptr, in, {k, m}) : ConstTensor(nullptr, in, {m, k});
    args.b = transpose_b ? ConstTensor(nullptr, in, {n, k}) : ConstTensor(nullptr, in, {k, n});
    if (bias) args.bias = ConstTensor(nullptr, *bias, {n});
    args.c = Tensor(nullptr, out, {m, n});
    args.transpose_a = transpose_a, args.transpose_b = transpose_b;
    return args;
  }
  std::string Name() const { return Join(m, "x", n, "x", k, " ", NameOf(in), bias ? " bias" : ""); }
};

// The shape that the call gives to the tiling.
cubist::MatmulShape ShapeOf(const MatmulCase& x) {
  cubist::MatmulShape shape;
  shape.m = x.m, shape.n = x.n, shape.k = x.k, shape.in = x.in, shape.out = x.out,
  shape.bias = x.bias.has_value();
  shape.a_row_bytes = x.transpose_a ? (x.m == 1 ? SizeOf(x.in) : 0) : x.k * SizeOf(x.in);
  shape.b_row_bytes = x.transpose_b ? (x.k == 1 ? SizeOf(x.in) : 0) : x.n * SizeOf(x.in);
  shape.b_col_bytes = x.transpose_b && x.k != 1 ? x.k * SizeOf(x.in) : 0;
  return shape;
}

std::vector<MatmulCase> MatmulCases() {
  return {{1024, 1024, 1024, DType::kBF16, DType::kBF16},
          {1000, 1010, 1020, DType::kBF16, DType::kF32, DType::kF32},
          {1500, 1530, 1540, DType::kBF16, DType::kBF16},
          {2056, 1032, 1032, DType::kBF16, DType::kF32},
          {1040, 1600, 1032, DType::kBF16, DType::kF32, {}, false, true},
          {129, 257, 300, DType::kF32, DType::kF32, DType::kF32},
          {517, 771, 333, DType::kF16, DType::kF16, DType::kF16},
          {2048, 384, 700, DType::kBF16, DType::kBF16, {}, true, false},
          {384, 1536, 512, DType::kF32, DType::kF32, {}, false, true},
          {7, 4099, 129, DType::kF16, DType::kF32, {}, true, true},
          {1, 1, 1, DType::kF32, DType::kF32},
          {65, 63, 0, DType::kBF16, DType::kF32, DType::kBF16}};
}

TEST(TrafficTest, Matmul) {
  int packed_one = 0, packed_both = 0;
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const MatmulCase& x : MatmulCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      MatmulTiling t;
      Profile profile;
      ASSERT_TRUE(IsOk(Matmul(NpuThatTells(*chip, ShapeOf(x), &t), x.args(), &profile)));
      ExpectSane(*chip, profile);

      const std::int64_t rows = CeilDiv(x.m, t.m), cols = CeilDiv(x.n, t.n);
      EXPECT_EQ(profile.macs, x.m * x.n * x.k);
      EXPECT_EQ(profile.cores_used, std::min<std::int64_t>(rows * cols, chip->cube_cores));
      EXPECT_EQ(profile.workspace_bytes > 0, t.pack_a || t.pack_b);
      packed_one += t.pack_a != t.pack_b ? 1 : 0, packed_both += t.pack_a && t.pack_b ? 1 : 0;
      Traffic traffic;
      // A is read once for every column of blocks, but for what a core keeps from one block to the next; B once for every
      // row. Each from its packed copy where there is one, in whole fractals.
      const auto of_a = [&](std::int64_t m, std::int64_t k) {
        return t.pack_a ? FractalBytes(m, k, x.in) : m * k * SizeOf(x.in);
      };
      std::int64_t loads_a = cols * of_a(x.m, x.k);
      for (std::int64_t core = 0; t.keep_a > 0 && core < chip->cube_cores; ++core) {
        const CoreTasks tasks(t.grid, t.deal(), rows * cols, core, chip->cube_cores);
        for (std::int64_t i = 1; i < tasks.count(); ++i) {
          const std::int64_t row = t.grid.At(tasks[i]).row;
          if (row == t.grid.At(tasks[i - 1]).row)
            loads_a -= of_a(Split(x.m, t.m)[row].size(), std::min(x.k, t.keep_a * t.a_k1()));
        }
      }
      const std::int64_t once_a = x.m * x.k * SizeOf(x.in), once_b = x.k * x.n * SizeOf(x.in);
      traffic[Path::kGmToL1Nd2Nz] = (t.pack_a ? once_a : loads_a) + (t.pack_b ? 1 : rows) * once_b;
      if (t.pack_a) {
        traffic[Path::kL1ToGm] += chip->PackedBytes(Role::kA, x.in, x.m, x.k);
        traffic[Path::kGmToL1] += loads_a;
      }
      if (t.pack_b) {
        const std::int64_t packed_b = chip->PackedBytes(Role::kB, x.in, x.k, x.n);
        traffic[Path::kL1ToGm] += packed_b;
        traffic[Path::kGmToL1] += rows * packed_b;
      }
      // All of such small operands fits L2: what is read ahead at all is read once.
      if (t.prefetch > 0) {
        EXPECT_GE(t.prefetch, CeilDiv(rows * cols, chip->cube_cores));
        traffic[Path::kGmToUb] = once_a + (t.pack_b ? 0 : once_b);
      }
      traffic[Path::kL0CToGm] = x.m * x.n * SizeOf(x.out);
      std::int64_t parts = 0;  // of all columns of blocks; A comes into L0 for each
      for (const Range n : Split(x.n, t.n)) parts += Split(n, t.part_n()).count();
      for (const Range k1 : Split(x.k, t.k1)) {
        for (const Range k0 : Split(k1.size(), t.k0)) {
          for (const Range m : Split(x.m, t.m))
            traffic[Path::kL1ToL0A] += parts * FractalBytes(m.size(), k0.size(), x.in);
          for (const Range n : Split(x.n, t.n)) {
            for (const Range part : Split(n, t.part_n()))
              traffic[Path::kL1ToL0B] += rows * FractalBytes(k0.size(), part.size(), x.in);
          }
        }
      }
      if (x.bias) {
        traffic[Path::kL1ToBT] = rows * x.n * SizeOf(*x.bias);
        traffic[Path::kGmToL1] += traffic[Path::kL1ToBT];
      }
      ExpectTraffic(profile, traffic);
    }
  }
  EXPECT_GT(packed_one, 0);
  EXPECT_GT(packed_both, 0);
}

// Where all sizes are multiples of the fractals, operands in L0 are the operands, nothing more.
TEST(TrafficTest, MatmulWithoutPadding) {
  const MatmulCase x{1024, 2048, 512, DType::kBF16, DType::kF32};
  MatmulTiling t;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), ShapeOf(x), &t)));
  Profile profile;
  ASSERT_TRUE(IsOk(Matmul(NpuWithoutData(Ascend910B2()), x.args(), &profile)));
  EXPECT_EQ(Bytes(profile, Path::kL1ToL0A), 2 * CeilDiv(x.n, t.n) * t.c_parts * x.m * x.k);
  EXPECT_EQ(Bytes(profile, Path::kL1ToL0B), 2 * CeilDiv(x.m, t.m) * x.k * x.n);
}

}  // namespace
}  // namespace cubist::testing
