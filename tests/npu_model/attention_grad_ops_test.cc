// What attention's backward pass asks of the machine: its composite beside the expansion, and tiles in L1 that play two
// roles, on every SIMD target and float type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

class AttentionGradOpsTest : public SimdTargetTest {
 protected:
  Scratch scratch_;
  HostContext context_{HostChip(), scratch_, 0, 1};
  HostAiCore core_{context_};
  HostVectorCore& vector_{core_.vectors()[0]};
  Random random_;

  template <Buffer kBuffer, class T, class Core>
  static Tile<kBuffer, T> NewTile(Core& core, std::int64_t rows, std::int64_t cols, Role role = Role::kRows,
                                  Role second = Role::kRows) {
    return Ring<kBuffer, T>(core, "tile", rows, cols, 1, role, second).Next(rows, cols);
  }
  template <class T>
  static float At(UbTile<T> tile, std::int64_t i, std::int64_t j) {
    return LoadFloat(tile.slot()->shows.data, DTypeOf<T>(), i * tile.slot()->shows.pitch + j);
  }
  UbTile<float> NewUb(std::int64_t rows, std::int64_t cols, double mean, double stddev) {
    const auto tile = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j)
        StoreFloat(tile.slot()->shows.data, DType::kF32, i * tile.slot()->shows.pitch + j,
                   static_cast<float>(mean + stddev * random_.Normal()));
    }
    return tile;
  }
  UbTile<float> Copy(UbTile<float> from) {
    const auto to = NewTile<Buffer::kUB, float>(vector_, from.rows(), from.cols());
    vector_.Cast(to, from);
    return to;
  }
};
INSTANTIATE_TEST_SUITE_P(Simd, AttentionGradOpsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

template <class F>
void ForEachFloatType(F f) {
  f(float{}), f(BF16{}), f(F16{});
}

struct TileShape {
  std::int64_t rows, cols;
};

TEST_P(AttentionGradOpsTest, StepIsItsExpansion) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] :
         {TileShape{1, 1}, TileShape{3, 33}, TileShape{2, 64}, TileShape{5, 131}}) {
      for (const bool with_nan : {false, true}) {
        const auto s = NewUb(rows, cols, 0, 3), dp = NewUb(rows, cols, 0, 1);
        const auto lse = NewUb(1, cols, 4, 1), delta = NewUb(1, cols, 0, 1);
        StoreFloat(s.slot()->shows.data, DType::kF32, cols - 1, -kInfinity);  // Masked.
        if (with_nan)
          StoreFloat(dp.slot()->shows.data, DType::kF32, 0, std::numeric_limits<float>::quiet_NaN());
        const auto s2 = Copy(s), dp2 = Copy(dp), s0 = Copy(s), dp0 = Copy(dp);
        const auto p = NewTile<Buffer::kUB, T>(vector_, rows, cols),
                   ds = NewTile<Buffer::kUB, T>(vector_, rows, cols);
        const auto p2 = NewTile<Buffer::kUB, T>(vector_, rows, cols),
                   ds2 = NewTile<Buffer::kUB, T>(vector_, rows, cols);
        constexpr float kScale = 0.4f;
        vector_.AttentionGradStep(p, ds, s, dp, lse, delta, kScale);
        HostVector executor(context_, 0);
        ExpandAttentionGradStep(executor, p2, ds2, s2, dp2, lse, delta, kScale, Loc::current());
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const double weight = std::exp(static_cast<double>(At(s0, i, j)) * kScale - At(lse, 0, j));
            const double gradient = weight * (static_cast<double>(At(dp0, i, j)) - At(delta, 0, j));
            const double unit = DTypeOf<T>() == DType::kF32 ? 0 : UnitRoundoff(DTypeOf<T>());
            const double tiny = DTypeOf<T>() == DType::kF16 ? 0x1p-25 : 0x1p-126;
            for (const auto& [w, g] : {std::pair(p, ds), std::pair(p2, ds2)}) {
              ASSERT_NEAR(At(w, i, j), weight, (0x1p-20 + unit) * weight + tiny);
              if (std::isnan(gradient)) {
                ASSERT_TRUE(std::isnan(At(g, i, j)));
              } else {
                ASSERT_NEAR(At(g, i, j), gradient, (0x1p-20 + unit) * (std::abs(gradient) + weight) + tiny);
              }
            }
          }
        }
      }
    }
  });
}

// Parts of tiles, and columns.
TEST_P(AttentionGradOpsTest, TransposeTurnsTiles) {
  for (const auto& [rows, cols] :
       {TileShape{1, 1}, TileShape{1, 40}, TileShape{37, 1}, TileShape{16, 16}, TileShape{21, 67}}) {
    const auto a = NewUb(rows + 2, cols + 3, 0, 1);
    const auto turned = NewUb(cols + 1, rows + 4, 0, 1), before = Copy(turned);
    vector_.Transpose(turned.Part({1, cols + 1}, {4, rows + 4}), a.Part({2, rows + 2}, {0, cols}));
    for (std::int64_t i = 0; i <= cols; ++i) {
      for (std::int64_t j = 0; j < rows + 4; ++j) {
        ASSERT_EQ(At(turned, i, j), i < 1 || j < 4 ? At(before, i, j) : At(a, j - 4 + 2, i - 1));
      }
    }
  }
}

// Pairs that are neighbours come apart and together, in parts of tiles; narrow ones come apart too.
TEST_P(AttentionGradOpsTest, UnzipAndZipAreInverse) {
  for (const auto& [rows, half] : {TileShape{1, 1}, TileShape{3, 20}, TileShape{16, 32}, TileShape{21, 37}}) {
    const auto pairs = NewUb(rows + 2, 2 * half + 3, 0, 1);
    const auto halves = NewUb(rows + 1, 2 * half + 5, 0, 1), before = Copy(halves);
    const auto first = halves.Part({1, rows + 1}, {0, half}),
               second = halves.Part({1, rows + 1}, {half + 4, 2 * half + 4});
    const auto some = pairs.Part({2, rows + 2}, {0, 2 * half});
    vector_.Unzip(first, some, 0), vector_.Unzip(second, some, 1);
    const auto zipped = NewUb(rows, 2 * half, 0, 1);
    vector_.Zip(zipped, first, second);
    const auto narrow = NewTile<Buffer::kUB, BF16>(vector_, rows, 2 * half);
    const auto odd = NewTile<Buffer::kUB, BF16>(vector_, rows, half);
    vector_.Cast(narrow, zipped);
    vector_.Unzip(odd, narrow, 1);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < half; ++j) {
        ASSERT_EQ(At(halves, i + 1, j), At(pairs, i + 2, 2 * j));
        ASSERT_EQ(At(halves, i + 1, half + 4 + j), At(pairs, i + 2, 2 * j + 1));
        ASSERT_EQ(At(odd, i, j), At(narrow, i, 2 * j + 1));
      }
      for (std::int64_t j = 0; j < 2 * half; ++j) ASSERT_EQ(At(zipped, i, j), At(pairs, i + 2, j));
      for (std::int64_t j = half; j < half + 4; ++j) ASSERT_EQ(At(halves, i + 1, j), At(before, i + 1, j));
    }
    for (std::int64_t j = 0; j < 2 * half + 5; ++j) ASSERT_EQ(At(halves, 0, j), At(before, 0, j));
  }
}

// A matrix of small integers, whose products are exact.
struct Integers {
  Integers(DType dtype, std::int64_t rows, std::int64_t cols, Random& random) : matrix(dtype, {rows, cols}) {
    matrix.FillIntegers(random);
    const Tensor view = matrix.view();
    tensor.data = static_cast<std::byte*>(view.data);
    tensor.dtype = dtype, tensor.writable = true, tensor.name = "integers";
    tensor.sizes = {1, 1, rows, cols}, tensor.strides = {0, 0, view.stride(0), view.stride(1)};
  }
  Gm gm() const { return MatrixOf(tensor); }
  double at(std::int64_t i, std::int64_t j, Transpose transpose) const {
    return transpose == Transpose::kYes ? matrix.at({j, i}) : matrix.at({i, j});
  }

  Matrix matrix;
  GmTensor tensor;
};

// One tile on the left, another on the right, each as it stands or turned, whole and in parts along k.
TEST_P(AttentionGradOpsTest, TilesPlayTwoRoles) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    constexpr DType kType = DTypeOf<T>();
    for (const auto& [m, n, k] :
         {std::array<std::int64_t, 3>{5, 7, 6}, {33, 37, 41}, {16, 64, 32}, {70, 35, 18}}) {
      for (const Transpose left : {Transpose::kNo, Transpose::kYes}) {
        for (const Transpose right : {Transpose::kNo, Transpose::kYes}) {
          const bool a_turned = left == Transpose::kYes, b_turned = right == Transpose::kYes;
          Integers a(kType, a_turned ? k : m, a_turned ? m : k, random_);
          Integers b(kType, b_turned ? n : k, b_turned ? k : n, random_);
          const auto a1 =
              NewTile<Buffer::kL1, T>(core_, a.gm().rows, a.gm().cols, Role::kA, Role::kATransposed);
          const auto b1 =
              NewTile<Buffer::kL1, T>(core_, b.gm().rows, b.gm().cols, Role::kB, Role::kBTransposed);
          core_.Load(a1, a.gm()), core_.Load(b1, b.gm());
          const auto c = NewTile<Buffer::kL0C, float>(core_, m, n);
          Accumulate accumulate = Accumulate::kNo;
          for (const Range part : Split(k, RoundUp(CeilDiv(k, 2), 2))) {
            const auto a0 = NewTile<Buffer::kL0A, T>(core_, m, part.size(), Role::kA);
            const auto b0 = NewTile<Buffer::kL0B, T>(core_, part.size(), n, Role::kB);
            core_.Load(a0, a_turned ? a1.Rows(part) : a1.Cols(part), left);
            core_.Load(b0, b_turned ? b1.Cols(part) : b1.Rows(part), right);
            core_.Mmad(c, a0, b0, accumulate);
            accumulate = Accumulate::kYes;
          }
          Integers out(DType::kF32, m, n, random_);
          core_.Store(out.gm(), c);
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = 0;
              for (std::int64_t p = 0; p < k; ++p) sum += a.at(i, p, left) * b.at(p, j, right);
              ASSERT_EQ(out.matrix.at({i, j}), sum)
                  << m << "x" << n << "x" << k << " " << a_turned << b_turned;
            }
          }
        }
      }
    }
  });
}

// An A tile on the right, and columns of a turned B tile that begin inside a panel of the host's.
TEST_P(AttentionGradOpsTest, ALeftTileServesOnTheRight) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    Integers a(DTypeOf<T>(), 9, 6, random_), b(DTypeOf<T>(), 6, 43, random_);
    const auto a1 = NewTile<Buffer::kL1, T>(core_, 9, 6, Role::kA);
    const auto b1 = NewTile<Buffer::kL1, T>(core_, 6, 43, Role::kA, Role::kB);
    core_.Load(a1, a.gm()), core_.Load(b1, b.gm());
    const auto a0 = NewTile<Buffer::kL0A, T>(core_, 9, 6, Role::kA);
    core_.Load(a0, a1);
    for (const Range columns : {Range{0, 43}, Range{3, 24}, Range{20, 43}}) {
      const auto b0 = NewTile<Buffer::kL0B, T>(core_, 6, columns.size(), Role::kB);
      const auto c = NewTile<Buffer::kL0C, float>(core_, 9, columns.size());
      core_.Load(b0, b1.Cols(columns));
      core_.Mmad(c, a0, b0, Accumulate::kNo);
      Integers out(DType::kF32, 9, columns.size(), random_);
      core_.Store(out.gm(), c);
      for (std::int64_t i = 0; i < 9; ++i) {
        for (std::int64_t j = 0; j < columns.size(); ++j) {
          double sum = 0;
          for (std::int64_t p = 0; p < 6; ++p)
            sum += a.matrix.at({i, p}) * b.matrix.at({p, columns.begin + j});
          ASSERT_EQ(out.matrix.at({i, j}), sum);
        }
      }
    }
  });
}

// Rows handed over to L1, in parts, are a left operand as they stand and turned.
TEST_P(AttentionGradOpsTest, HandedOverRowsAreTurned) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] : {TileShape{6, 9}, TileShape{33, 20}, TileShape{4, 32}}) {
      Integers x(DTypeOf<T>(), rows, cols, random_), b(DTypeOf<T>(), rows, 5, random_);
      const auto x1 = NewTile<Buffer::kL1, T>(core_, rows, cols, Role::kA, Role::kATransposed);
      for (const Range part : Split(rows, RoundUp(CeilDiv(rows, 2), 2))) {
        const auto ub = NewTile<Buffer::kUB, T>(vector_, part.size(), cols);
        vector_.Load(ub, x.gm().Rows(part));
        vector_.Move(x1.Rows(part), ub);
      }
      const auto b1 = NewTile<Buffer::kL1, T>(core_, rows, 5, Role::kB);
      core_.Load(b1, b.gm());
      const auto a0 = NewTile<Buffer::kL0A, T>(core_, cols, rows, Role::kA);
      const auto b0 = NewTile<Buffer::kL0B, T>(core_, rows, 5, Role::kB);
      const auto c = NewTile<Buffer::kL0C, float>(core_, cols, 5);
      core_.Load(a0, x1, Transpose::kYes), core_.Load(b0, b1);
      core_.Mmad(c, a0, b0, Accumulate::kNo);
      Integers out(DType::kF32, cols, 5, random_);
      core_.Store(out.gm(), c);
      for (std::int64_t i = 0; i < cols; ++i) {
        for (std::int64_t j = 0; j < 5; ++j) {
          double sum = 0;
          for (std::int64_t p = 0; p < rows; ++p) sum += x.matrix.at({p, i}) * b.matrix.at({p, j});
          ASSERT_EQ(out.matrix.at({i, j}), sum);
        }
      }
    }
  });
}

}  // namespace
}  // namespace cubist::testing
