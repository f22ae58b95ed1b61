// StoreActivated: the host's body against its expansion into primitive instructions, on every SIMD target, and against
// the formulas; and what FIX does on the way from L0C.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu, Activation::kSilu,
                                       Activation::kGelu, Activation::kGeluTanh};

double Formula(Activation activation, double x) {
  const double u = 2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x <= 0 ? 0 : x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * std::erfc(-x / std::sqrt(2)) / 2;
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-u));
  }
  return x;
}

GmTensor TensorOf(const Matrix& x) {
  GmTensor t;
  t.data = static_cast<std::byte*>(const_cast<void*>(x.view().data)), t.dtype = x.dtype(), t.name = "matrix",
  t.writable = true;
  t.sizes = {1, 1, x.size(0), x.size(1)}, t.strides = {0, 0, x.view().stride(0), x.view().stride(1)};
  return t;
}

struct Rig {
  UbTile<float> Tile(std::int64_t rows, std::int64_t cols) {
    return Ring<Buffer::kUB, float>(vector, "tile", rows, cols, 1).Next(rows, cols);
  }
  UbTile<float> Of(const Matrix& x) {
    const GmTensor t = TensorOf(x);
    const UbTile<float> tile = Tile(x.size(0), x.size(1));
    vector.Load(tile, MatrixOf(t));
    return tile;
  }

  Scratch scratch;
  HostContext context{HostChip(), scratch, 0, 1};
  HostAiCore core{context};
  HostVectorCore& vector{core.vectors()[0]};
  HostVector executor{context, 0};
};

class EpilogueOpsTest : public SimdTargetTest {};

TEST_P(EpilogueOpsTest, StoreActivatedIsItsExpansion) {
  Random random;
  for (const Activation activation : kActivations) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const std::int64_t cols : {1, 7, 31, 64, 300}) {
        for (int given = 0; given < 8; ++given) {
          SCOPED_TRACE(::testing::Message() << static_cast<int>(activation) << " " << NameOf(dtype) << " "
                                            << cols << " " << given);
          const Layout layout = given % 3 == 2 ? Layout{.gap = 3, .offset = 1, .step = 2} : Layout{};
          Rig rig;
          Matrix x(DType::kF32, {3, cols}), bias(DType::kF32, {1, cols}), residual(DType::kF32, {3, cols}),
              body(dtype, {3, cols}, layout), expansion(dtype, {3, cols}, layout);
          x.FillNormal(random, 0, 3), bias.FillNormal(random), residual.FillNormal(random);
          GmTensor to[] = {TensorOf(body), TensorOf(expansion)};
          to[0].stream = given >= 4;
          const EpilogueScalars e{given % 2 == 0 ? 1.0f : 0.37f, given % 2 == 0 ? -1.25f : 1.0f, activation};
          EpilogueTiles t{.x = rig.Of(x), .bias = {}, .residual = {}, .scratch = {}};
          if ((given & 1) != 0) t.bias = rig.Of(bias);
          if ((given & 2) != 0) t.residual = rig.Of(residual);
          for (auto& scratch : t.scratch) scratch = rig.Tile(3, cols);
          rig.vector.StoreActivated(MatrixOf(to[0]), t, e);
          EpilogueRefs refs{t.x, {}, {}, {t.scratch[0], t.scratch[1], t.scratch[2]}};
          if ((given & 1) != 0) refs.bias = t.bias;
          if ((given & 2) != 0) refs.residual = t.residual;
          ExpandStoreActivated(rig.executor, MatrixOf(to[1]), refs, e, Loc::current());
          FlushStreams();
          for (std::int64_t i = 0; i < 3; ++i) {
            for (std::int64_t j = 0; j < cols; ++j) {
              const double sum = e.alpha * x.at({i, j}) + ((given & 1) != 0 ? bias.at({0, j}) : 0.0) +
                                 ((given & 2) != 0 ? e.beta * residual.at({i, j}) : 0.0);
              const double expected = Formula(activation, sum);
              const double bound = 0x1p-19 + UnitRoundoff(dtype) * (std::abs(expected) + 0x1p-19) +
                                   (dtype == DType::kF16 ? 0x1p-25 : 0);
              ASSERT_NEAR(body.at({i, j}), expected, bound);
              ASSERT_NEAR(expansion.at({i, j}), expected, bound);
            }
          }
          ASSERT_TRUE(body.CheckGuards()) << "guards";
        }
      }
    }
  }
}

// Far from zero activations are x or nothing; NaN stays NaN.
TEST_P(EpilogueOpsTest, SpecialValues) {
  const double infinity = HUGE_VAL, nan = std::nan("");
  for (const Activation activation : kActivations) {
    Rig rig;
    Matrix x(DType::kF32, {1, 40}), c(DType::kF32, {1, 40});
    x.Fill(0);
    const double values[] = {1e30, -1e30, infinity, nan, -0.0, 88.0, -88.0, -1e-38, 3e-39, -20.0};
    for (std::int64_t j = 0; j < 10; ++j) x.set({0, 3 * j}, values[j]);
    const GmTensor to = TensorOf(c);
    EpilogueTiles t{.x = rig.Of(x), .bias = {}, .residual = {}, .scratch = {}};
    for (auto& scratch : t.scratch) scratch = rig.Tile(1, 40);
    rig.vector.StoreActivated(MatrixOf(to), t, {1, 1, activation});
    for (std::int64_t j = 0; j < 40; ++j) {
      const double in = x.at({0, j}), out = c.at({0, j});
      if (std::isnan(in)) {
        EXPECT_TRUE(std::isnan(out)) << static_cast<int>(activation);
      } else if (in == infinity) {
        EXPECT_EQ(out, in) << static_cast<int>(activation);
      } else {
        const double expected = in < -1e20 && activation != Activation::kNone ? 0 : Formula(activation, in);
        EXPECT_NEAR(out, expected, 2e-6 * std::abs(expected) + 1e-30)
            << static_cast<int>(activation) << " " << in;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Simd, EpilogueOpsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST(FixTest, ScalesKeepsAboveZeroAndAdds) {
  Random random;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool relu : {false, true}) {
      for (const bool adds : {false, true}) {
        if (adds && dtype != DType::kF32) continue;
        for (const std::int64_t step : {1, 2}) {
          Rig rig;
          Matrix a(DType::kF32, {5, 3}), b(DType::kF32, {3, 70}), c(dtype, {5, 70}, {.step = step});
          a.FillIntegers(random), b.FillIntegers(random), c.FillIntegers(random);
          const std::vector<double> before = c.ToDoubles();
          const GmTensor gm_a = TensorOf(a), gm_b = TensorOf(b), gm_c = TensorOf(c);
          const auto a1 = Ring<Buffer::kL1, float>(rig.core, "a1", 5, 3, 1, Role::kA).Next(5, 3);
          const auto b1 = Ring<Buffer::kL1, float>(rig.core, "b1", 3, 70, 1, Role::kB).Next(3, 70);
          const auto a0 = Ring<Buffer::kL0A, float>(rig.core, "a0", 5, 3, 1, Role::kA).Next(5, 3);
          const auto b0 = Ring<Buffer::kL0B, float>(rig.core, "b0", 3, 70, 1, Role::kB).Next(3, 70);
          const auto acc = Ring<Buffer::kL0C, float>(rig.core, "acc", 5, 70, 1).Next(5, 70);
          rig.core.Load(a1, MatrixOf(gm_a)), rig.core.Load(b1, MatrixOf(gm_b));
          rig.core.Load(a0, a1), rig.core.Load(b0, b1);
          rig.core.Mmad(acc, a0, b0, Accumulate::kNo);
          rig.core.Store(MatrixOf(gm_c), acc,
                         FixOptions{adds ? Accumulate::kYes : Accumulate::kNo, 0.5f, relu});
          for (std::int64_t i = 0; i < 5; ++i) {
            for (std::int64_t j = 0; j < 70; ++j) {
              double sum = 0;
              for (std::int64_t p = 0; p < 3; ++p) sum += a.at({i, p}) * b.at({p, j});
              sum = relu ? std::max(sum / 2, 0.0) : sum / 2;
              ASSERT_EQ(c.at({i, j}), sum + (adds ? before[static_cast<std::size_t>(i * 70 + j)] : 0.0));
            }
          }
          ASSERT_TRUE(c.CheckGuards());
        }
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
