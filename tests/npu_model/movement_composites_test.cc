// The composites that move rows and elements: the host's bodies beside their expansions, on every SIMD target.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr double kEps = 0x1p-24;
constexpr std::int64_t kRows = 9, kMostCols = 4099;  // Of StoreScaledDots.

// One Vector core whose memory is full of NaN.
struct Rig {
  Rig() {
    constexpr std::int64_t kBytes = 1 << 20;
    std::memset(scratch.Take(kBytes), 0xff, kBytes);
    scratch.Reset();
  }
  template <class T>
  UbTile<T> NewTile(std::int64_t rows, std::int64_t cols, Role role = Role::kRows) {
    return Ring<Buffer::kUB, T>(vector, "tile", rows, cols, 1, role).Next(rows, cols);
  }

  Scratch scratch;
  HostContext context{HostChip(), scratch, 0, 1};
  HostAiCore core{context};
  HostVectorCore& vector{core.vectors()[0]};
  HostVector executor{context, 0};
};

GmTensor TensorOf(const Matrix& x) {
  GmTensor t;
  t.data = static_cast<std::byte*>(const_cast<void*>(x.view().data)), t.dtype = x.dtype(), t.name = "matrix",
  t.writable = true;
  t.sizes = {1, 1, x.size(0), x.size(1)}, t.strides = {0, 0, x.view().stride(0), x.view().stride(1)};
  return t;
}

template <class F>
void ForEachFloatType(F f) {
  f(float{}), f(BF16{}), f(F16{});
}

class MovementCompositesTest : public SimdTargetTest {
 protected:
  Random random_;
};

TEST_P(MovementCompositesTest, AddDotIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t cols : {1, 5, 40, 64, 131, 4099}) {
      Rig rig;
      Matrix x(DType::kF32, {1, cols}), row(DTypeOf<T>(), {1, cols});
      x.FillNormal(random_), row.FillNormal(random_);
      const GmTensor left = TensorOf(x), right = TensorOf(row);
      const auto tile = rig.NewTile<float>(1, cols), scratch = rig.NewTile<float>(1, cols),
                 sums = rig.NewTile<float>(2, 8);
      const auto other = rig.NewTile<T>(1, cols, Role::kRelay);
      rig.vector.Load(tile, MatrixOf(left)), rig.vector.Load(other, MatrixOf(right));
      rig.vector.Fill(sums, 3.0f);
      const auto body = sums.Part({0, 1}, {0, 1}), expansion = sums.Part({1, 2}, {0, 1});
      rig.vector.AddDot(body, scratch, tile, other);
      ExpandAddDot(rig.executor, expansion, scratch, tile, other, Loc::current());
      const std::vector<double> a = x.ToDoubles(), b = row.ToDoubles();
      const double dot = std::inner_product(a.begin(), a.end(), b.begin(), 3.0);
      double magnitude = 3;
      for (std::size_t i = 0; i < a.size(); ++i) magnitude += std::abs(a[i] * b[i]);
      const double bound = 1.01 * static_cast<double>(cols + 2) * kEps * magnitude;
      ASSERT_NEAR(rig.vector.ReadScalar(body, 0), dot, bound) << cols;
      ASSERT_NEAR(rig.vector.ReadScalar(expansion, 0), dot, bound) << cols;
    }
  });
}

// What is stored has the bits of the expansion, and dot products those of AddDot: from the start of a cache line on and
// elsewhere, side by side and apart, with and without rows, and only rows.
TEST_P(MovementCompositesTest, StoreScaledDotsAreTheirExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t cols : {1, 5, 40, 64, 131, 1030, 4099}) {
      for (int form = 0; form < 6; ++form) {
        const bool stream = form % 2 == 0, apart = form == 5;
        const std::int64_t count = std::array{0, 1, 3, 4, 9, 9}[static_cast<std::size_t>(form)];
        for (std::int64_t offset : {0, 1}) {
          Rig rig;
          Matrix x(DTypeOf<T>(), {1, cols}), wide_x(DType::kF32, {1, cols}),
              rows(DTypeOf<T>(), {kRows, cols});
          x.FillNormal(random_), rows.FillNormal(random_);
          for (std::int64_t j = 0; j < cols; ++j) wide_x.set({0, j}, x.at({0, j}));
          alignas(64) static std::byte memory[2][kRows][2 * (kMostCols + 61) * sizeof(float)];
          static_assert(sizeof(memory[0][0]) % 64 == 0);
          std::memset(memory, 0xff, sizeof(memory));
          const GmTensor left = TensorOf(x), wide_left = TensorOf(wide_x), right = TensorOf(rows);
          const auto tile = rig.NewTile<T>(1, cols, Role::kRelay);
          const auto wide = rig.NewTile<float>(1, cols), s0 = rig.NewTile<float>(1, cols),
                     s1 = rig.NewTile<float>(1, cols), sums = rig.NewTile<float>(2 * kRows, 8),
                     same_x = rig.NewTile<float>(1, cols);
          rig.vector.Load(tile, MatrixOf(left)), rig.vector.Load(same_x, MatrixOf(wide_left));
          rig.vector.Fill(sums, 3.0f);
          std::vector<GmTensor> to(2 * kRows, right);
          std::vector<ScaledDot<T>> dots;
          std::vector<ScaledDotRef> refs;
          for (std::int64_t r = 0; r < count; ++r) {
            for (std::int64_t half : {0, 1}) {
              GmTensor& t = to[static_cast<std::size_t>(2 * r + half)];
              t.data = memory[half][r] + offset * SizeOf(DTypeOf<T>());
              t.sizes = {1, 1, 1, cols}, t.strides = {0, 0, cols, apart ? 2 : 1}, t.stream = stream;
            }
            const auto row = rig.NewTile<T>(1, cols, Role::kRelay);
            rig.vector.Load(row, MatrixOf(right).Rows({r, r + 1}));
            ScaledDot<T> dot{.weight = 0.37f - 0.1f * static_cast<float>(r)};
            ScaledDotRef ref{.weight = dot.weight};
            if (count < kRows || r % 3 != 1) {
              dot.dst = MatrixOf(to[static_cast<std::size_t>(2 * r)]);
              ref.dst = MatrixOf(to[static_cast<std::size_t>(2 * r + 1)]);
            }
            if (count < kRows || r % 3 != 2) {
              dot.sum = sums.Part({r, r + 1}, {0, 1}), dot.row = row;
              rig.vector.AddDot(sums.Part({r + kRows, r + kRows + 1}, {0, 1}), s1, same_x, row);
            }
            dots.push_back(dot), refs.push_back(ref);
          }
          rig.vector.StoreScaledDots(wide, s0, s1, tile, true, std::span<const ScaledDot<T>>(dots));
          ExpandStoreScaledDots(rig.executor, wide, s0, s1, tile, true, std::span<const ScaledDotRef>(refs),
                                Loc::current());
          FlushStreams();
          for (std::int64_t r = 0; r < kRows; ++r) {
            ASSERT_EQ(rig.vector.ReadScalar(sums.Rows({r, r + 1}), 0),
                      rig.vector.ReadScalar(sums.Rows({r + kRows, r + kRows + 1}), 0))
                << cols << " row " << r << " of " << count;
          }
          ASSERT_EQ(std::memcmp(memory[0], memory[1], sizeof(memory[0])), 0) << cols << " " << form;
        }
      }
    }
  });
}

// Elements and weights that are not finite reach what they are factors of, and nothing else.
TEST_P(MovementCompositesTest, StoreScaledDotsKeepWhatIsNotFinite) {
  constexpr std::int64_t kCols = 131, kCount = 8;
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::bit_cast<float>(0x7fffffffu);
  const std::array<float, kCount> weights{0.5f, 0.0f, nan, infinity, -2.0f, -infinity, 1.0f, 0.37f};
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const float special : {0.0f, nan, infinity, -infinity}) {
      for (const std::int64_t at : {0, 63, 130}) {
        Rig rig;
        Matrix x(DTypeOf<T>(), {1, kCols}), rows(DTypeOf<T>(), {kCount, kCols});
        x.FillNormal(random_), rows.FillNormal(random_);
        x.set({0, at}, special);
        alignas(64) std::array<std::array<T, 160>, kCount> to{};
        static_assert(sizeof(to[0]) % 64 == 0);
        const GmTensor left = TensorOf(x), right = TensorOf(rows);
        const auto tile = rig.NewTile<T>(1, kCols, Role::kRelay);
        const auto wide = rig.NewTile<float>(1, kCols), s0 = rig.NewTile<float>(1, kCols),
                   s1 = rig.NewTile<float>(1, kCols), sums = rig.NewTile<float>(kCount, 8);
        rig.vector.Load(tile, MatrixOf(left));
        rig.vector.Fill(sums, 0.0f);
        std::array<GmTensor, kCount> tensors;
        std::vector<ScaledDot<T>> dots;
        for (std::int64_t r = 0; r < kCount; ++r) {
          const auto i = static_cast<std::size_t>(r);
          tensors[i] = right, tensors[i].data = reinterpret_cast<std::byte*>(to[i].data());
          tensors[i].sizes = {1, 1, 1, kCols}, tensors[i].strides = {0, 0, kCols, 1},
          tensors[i].stream = true;
          const auto row = rig.NewTile<T>(1, kCols, Role::kRelay);
          rig.vector.Load(row, MatrixOf(right).Rows({r, r + 1}));
          dots.push_back({.dst = MatrixOf(tensors[i]),
                          .weight = weights[i],
                          .sum = sums.Part({r, r + 1}, {0, 1}),
                          .row = row});
        }
        rig.vector.StoreScaledDots(wide, s0, s1, tile, true, std::span<const ScaledDot<T>>(dots));
        FlushStreams();
        for (std::size_t r = 0; r < kCount; ++r) {
          for (std::int64_t j = 0; j < kCols; ++j) {
            const auto expected = static_cast<float>(T(weights[r] * static_cast<float>(x.at({0, j}))));
            const auto got = static_cast<float>(to[r][static_cast<std::size_t>(j)]);
            if (std::isnan(expected)) {
              ASSERT_TRUE(std::isnan(got)) << special << " at " << at << ", row " << r << ", " << j;
            } else {
              ASSERT_EQ(got, expected) << special << " at " << at << ", row " << r << ", " << j;
            }
          }
        }
      }
    }
  });
}

// The bytes of the expansion and none beside them: from the start of a cache line on and elsewhere, streamed or not, in
// memory or through a tile, while another row is shown and while none is.
TEST_P(MovementCompositesTest, StoreEachIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t cols : {1, 2, 31, 32, 33, 64, 129, 1030, 4099}) {
      for (int form = 0; form < 12; ++form) {
        const bool stream = form % 2 == 0, relay = form / 2 % 2 == 0;
        const std::int64_t count = std::array{1, 3, 9}[static_cast<std::size_t>(form / 4)];
        Rig rig;
        Matrix x(DTypeOf<T>(), {2, cols});
        x.FillNormal(random_);
        const GmTensor rows = TensorOf(x);
        alignas(64) static std::byte memory[2][kRows][2 * (kMostCols + 61) * sizeof(float)];
        std::memset(memory, 0xff, sizeof(memory));
        const Role role = relay ? Role::kRelay : Role::kRows;
        const auto tile = rig.NewTile<T>(1, cols, role), other = rig.NewTile<T>(1, cols, role);
        rig.vector.Load(tile, MatrixOf(rows).Rows({0, 1}));
        if (form < 8) rig.vector.Load(other, MatrixOf(rows).Rows({1, 2}));  // What comes next.
        std::array<GmTensor, 2 * kRows> tensors;
        std::array<std::vector<Gm>, 2> to;
        for (std::int64_t r = 0; r < count; ++r) {
          for (std::size_t half = 0; half < 2; ++half) {
            GmTensor& t = tensors[static_cast<std::size_t>(2 * r) + half];
            t = rows, t.data = memory[half][r] + (form % 3) * r * SizeOf(DTypeOf<T>());
            t.sizes = {1, 1, 1, cols}, t.strides = {0, 0, cols, 1}, t.stream = stream;
            to[half].push_back(MatrixOf(t));
          }
        }
        rig.vector.StoreEach(std::span<const Gm>(to[0]), tile);
        ExpandStoreEach(rig.executor, std::span<const Gm>(to[1]), tile, Loc::current());
        FlushStreams();
        ASSERT_EQ(std::memcmp(memory[0], memory[1], sizeof(memory[0])), 0) << cols << " " << form;
        for (std::int64_t r = 0; r < count; ++r)
          ASSERT_EQ(std::memcmp(to[0][static_cast<std::size_t>(r)].data(), x.view().data,
                                static_cast<std::size_t>(cols * SizeOf(DTypeOf<T>()))),
                    0)
              << cols << " " << form << " row " << r;
      }
    }
  });
}

// Places beyond both ends are passed over.
UbTile<std::int32_t> SomePlaces(Rig& rig, const std::vector<std::int32_t>& places, std::int64_t rows) {
  const auto cols = static_cast<std::int64_t>(places.size()) / rows;
  GmTensor t;
  t.data = reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(places.data()));
  t.dtype = DType::kI32, t.sizes = {1, 1, rows, cols}, t.strides = {0, 0, cols, 1};
  const auto tile = rig.NewTile<std::int32_t>(rows, cols);
  rig.vector.Load(tile, MatrixOf(t));
  return tile;
}

TEST_P(MovementCompositesTest, GatherAndScatterAreTheirExpansions) {
  const std::vector<std::int32_t> places{4, -1, 0, 7, 3, 100, 6, -5, 1, 2, 8, 5};
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32}) {
    Rig rig;
    Matrix column(dtype, {7, 1}, Layout{.gap = 2, .offset = 1, .step = 1}), body(dtype, {7, 1}),
        expansion(dtype, {7, 1});
    column.FillIntegers(random_, -9, 9), body.Fill(-1), expansion.Fill(-1);
    const GmTensor from = TensorOf(column), to[] = {TensorOf(body), TensorOf(expansion)};
    const auto at = SomePlaces(rig, places, 3);
    if (dtype != DType::kI32) {
      const auto staging = rig.NewTile<float>(2, 8), x = rig.NewTile<float>(3, 4),
                 y = rig.NewTile<float>(3, 4);
      rig.vector.Gather(x, MatrixOf(from), at, staging);
      ExpandGather(rig.executor, y, MatrixOf(from), at, staging, Loc::current());
      rig.vector.Scatter(MatrixOf(to[0]), at, x, staging);
      ExpandScatter(rig.executor, MatrixOf(to[1]), at, x, staging, Loc::current());
      for (std::size_t e = 0; e < places.size(); ++e) {
        const auto i = static_cast<std::int64_t>(e) / 4, j = static_cast<std::int64_t>(e) % 4;
        const double expected = places[e] >= 0 && places[e] < 7 ? column.at({places[e], 0}) : 0;
        EXPECT_EQ(rig.vector.ReadScalar(x.Rows({i, i + 1}), j), expected);
        EXPECT_EQ(rig.vector.ReadScalar(y.Rows({i, i + 1}), j), expected);
      }
      EXPECT_EQ(body.ToDoubles(), column.ToDoubles());
    } else {
      const auto staging = rig.NewTile<std::int32_t>(2, 8);
      rig.vector.Scatter(MatrixOf(to[0]), at, at, staging);
      ExpandScatter(rig.executor, MatrixOf(to[1]), at, at, staging, Loc::current());
      EXPECT_EQ(body.ToDoubles(), (std::vector<double>{0, 1, 2, 3, 4, 5, 6}));
    }
    EXPECT_EQ(body.ToDoubles(), expansion.ToDoubles());
  }
}

TEST_P(MovementCompositesTest, AddScalarAddsToInts) {
  Rig rig;
  const auto at = SomePlaces(rig, {4, -1, 0, 7, 3, 100}, 2), sum = rig.NewTile<std::int32_t>(2, 3);
  rig.vector.AddScalar(sum, at, -3);
  EXPECT_EQ(rig.vector.ReadScalar(sum.Rows({0, 1}), 0), 1);
  EXPECT_EQ(rig.vector.ReadScalar(sum.Rows({0, 1}), 1), -4);
  EXPECT_EQ(rig.vector.ReadScalar(sum.Rows({1, 2}), 2), 97);
}

std::vector<std::int32_t> ValuesOf(Rig& rig, const UbTile<std::int32_t>& tile) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < tile.rows(); ++i) {
    for (std::int64_t j = 0; j < tile.cols(); ++j)
      values.push_back(static_cast<std::int32_t>(rig.vector.ReadScalar(tile.Rows({i, i + 1}), j)));
  }
  return values;
}

TEST_P(MovementCompositesTest, TrueColumnsAreAscending) {
  Rig rig;
  const auto flags = SomePlaces(rig, {0, 1, 0, 1, 7, 0, 0, 0, 0, 0, 1, -1, 1, 1, 1}, 3);
  const auto columns = rig.NewTile<std::int32_t>(3, 3), all = rig.NewTile<std::int32_t>(3, 5);
  rig.vector.TrueColumns(columns, flags);
  EXPECT_EQ(ValuesOf(rig, columns), (std::vector<std::int32_t>{1, 3, 4, -1, -1, -1, 0, 1, 2}));
  rig.vector.TrueColumns(all, flags);
  EXPECT_EQ(ValuesOf(rig, all),
            (std::vector<std::int32_t>{1, 3, 4, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, 4}));
}

TEST_P(MovementCompositesTest, KeepWhereTakesElementsOrRows) {
  Rig rig;
  const auto ids = SomePlaces(rig, {4, -1, 0, 7, 3, 9}, 2), flags = SomePlaces(rig, {1, 1, 0, 0, -2, 0}, 2),
             rows = SomePlaces(rig, {0, 3}, 2), kept = rig.NewTile<std::int32_t>(2, 3);
  rig.vector.KeepWhere(kept, ids, flags);
  EXPECT_EQ(ValuesOf(rig, kept), (std::vector<std::int32_t>{4, -1, -1, -1, 3, -1}));
  rig.vector.KeepWhere(ids, ids, rows);
  EXPECT_EQ(ValuesOf(rig, ids), (std::vector<std::int32_t>{-1, -1, -1, 7, 3, 9}));
}

TEST_P(MovementCompositesTest, LookupLeavesWhatItsRangeDoesNotHold) {
  Rig rig;
  const auto ids = SomePlaces(rig, {10, 13, -1, 9, 12, 11}, 2), table = SomePlaces(rig, {50, 51, 52}, 1),
             found = rig.NewTile<std::int32_t>(2, 3);
  rig.vector.Fill(found, -7);
  rig.vector.Lookup(found, ids, table, 10);
  EXPECT_EQ(ValuesOf(rig, found), (std::vector<std::int32_t>{50, -7, -7, -7, 52, 51}));
}

INSTANTIATE_TEST_SUITE_P(Simd, MovementCompositesTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

}  // namespace
}  // namespace cubist::testing
