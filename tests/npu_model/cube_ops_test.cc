// Bodies of Cube instructions against their definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/host/cpu.h"
#include "npu_model/host/cube_bf16.h"
#include "tests/npu_model/tile_ops_support.h"

namespace cubist::tile_ops {
namespace {

INSTANTIATE_TEST_SUITE_P(Targets, TileOpsTest, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST(TileOps, UsesTheBestTargetByDefault) {
  const std::int64_t best = hwy::SupportedAndGeneratedTargets().front();
  EXPECT_STREQ(BestCubeOps().target, hwy::TargetName(best));
  EXPECT_STREQ(BestVectorOps().target, hwy::TargetName(best));
#if defined(__x86_64__)
  if (best <= HWY_AVX3) {
    const bool dot = __builtin_cpu_supports("avx512bf16") != 0, amx = dot && HasBF16Amx();
    EXPECT_EQ(BestCubeOps().amx, amx);
    EXPECT_EQ(BestCubeOps().native_bf16, amx || (dot && ThisCpu() != Cpu::kIntel));
  }
#endif
}

// ---- Mmad

// The operands of one Mmad in the layouts of MmadArgs, written from the header's formula.
template <class T>
struct MmadOperands {
  static constexpr std::int64_t kPerWord = 4 / static_cast<std::int64_t>(sizeof(T));

  MmadOperands(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t nr)
      : MmadOperands(m, n, k, nr, k + 5) {}
  MmadOperands(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t nr, std::int64_t a_pitch)
      : nr(nr),
        a(m, RoundUp(k, kPerWord), a_pitch),
        panels(CeilDiv(n, nr), RoundUp(k, kPerWord) * nr, k * nr + 3 * nr + 1),
        bias(1, n, n),
        c(m, n, RoundUp(n, nr) + 3, RoundUp(n, nr)) {
    args = {.m = m,
            .n = n,
            .k = k,
            .a = a.data(),
            .a_pitch = a_pitch,
            .b = panels.data(),
            .b_panel_stride = k * nr + 3 * nr + 1,
            .c = c.data(),
            .c_pitch = RoundUp(n, nr) + 3};
  }
  template <class Generator>
  void Fill(Generator generate) {
    a.Fill([] { return std::numeric_limits<float>::quiet_NaN(); });  // Nothing behind a row counts.
    panels.Fill([] { return 0.0f; });
    for (std::int64_t i = 0; i < args.m; ++i) {
      for (std::int64_t p = 0; p < args.k; ++p) a(i, p) = T(generate());
    }
    for (std::int64_t p = 0; p < args.k; ++p) {
      for (std::int64_t j = 0; j < args.n; ++j) B(p, j) = T(generate());
    }
    bias.Fill(generate);
    for (std::int64_t i = 0; i < args.m; ++i) {
      for (std::int64_t j = 0; j < args.n; ++j) c(i, j) = generate();
    }
  }
  T& B(std::int64_t p, std::int64_t j) const {
    const std::int64_t in_panel = kPerWord == 1 ? p * nr + j % nr : p / 2 * 2 * nr + 2 * (j % nr) + p % 2;
    return panels(j / nr, in_panel);
  }
  void SetStart(MmadStart start) {
    args.start = start;
    args.bias = start == MmadStart::kBias ? bias.data() : nullptr;
  }
  // The sum that element (i, j) starts from, and the sum of magnitudes for the error bound.
  double StartOf(std::int64_t i, std::int64_t j) const {
    if (args.start == MmadStart::kZero) return 0.0;
    return args.start == MmadStart::kBias ? bias(0, j) : c(i, j);
  }
  double Expected(std::int64_t i, std::int64_t j, double* magnitude) const {
    double sum = StartOf(i, j);
    *magnitude = std::abs(sum);
    for (std::int64_t p = 0; p < args.k; ++p) {
      const double product =
          static_cast<double>(static_cast<float>(a(i, p))) * static_cast<double>(static_cast<float>(B(p, j)));
      sum += product;
      *magnitude += std::abs(product);
    }
    return sum;
  }

  std::int64_t nr;
  Matrix<T> a, panels;
  Matrix<float> bias, c;
  MmadArgs args;
};

using MmadBody = void (*)(const MmadArgs&);

// A sum of k products and a start has k + 1 additions and k products, each rounded at most once: to first
// order its error is at most (k + 1) eps times the sum of magnitudes with fused steps, twice that with
// separate roundings.
template <class T, class Generator>
void CheckMmad(MmadBody mmad, std::int64_t nr, std::int64_t m, std::int64_t n, std::int64_t k,
               MmadStart start, Generator generate, bool exact) {
  SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " start " +
               std::to_string(static_cast<int>(start)));
  MmadOperands<T> operands(m, n, k, nr);
  operands.Fill(generate);
  operands.SetStart(start);
  std::vector<double> expected, bound;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double magnitude;
      expected.push_back(operands.Expected(i, j, &magnitude));
      bound.push_back(exact ? 0.0 : 2.0 * static_cast<double>(k + 1) * kEps * magnitude);
    }
  }
  mmad(operands.args);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const std::size_t at = Index(i * n + j);
      if (exact) {
        ASSERT_EQ(operands.c(i, j), expected[at]) << "at " << i << ", " << j;
      } else {
        ASSERT_LE(std::abs(operands.c(i, j) - expected[at]), bound[at]) << "at " << i << ", " << j;
      }
    }
  }
}

template <class T>
void CheckMmadShapes(MmadBody mmad, std::int64_t mr, std::int64_t nr) {
  Random random(1);
  const auto small = [&] { return random.Small(); };
  const auto real = [&] { return random.Real(); };
  for (const MmadStart start : {MmadStart::kZero, MmadStart::kAdd, MmadStart::kBias}) {
    for (std::int64_t m = 1; m <= 2 * mr + 1; ++m) {
      CheckMmad<T>(mmad, nr, m, nr + 1, 5, start, small, /*exact=*/true);
    }
    for (std::int64_t n = 1; n <= 2 * nr + 1; ++n) {
      CheckMmad<T>(mmad, nr, mr + 1, n, 6, start, small, /*exact=*/true);
    }
    for (std::int64_t k : {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 127, 300}) {
      CheckMmad<T>(mmad, nr, mr, nr, k, start, small, /*exact=*/true);
      CheckMmad<T>(mmad, nr, mr + 2, 2 * nr - 1, k, start, real, /*exact=*/false);
    }
  }
}

// The bodies of native bf16, and the rows of their register tiles.
std::vector<std::pair<MmadBody, std::int64_t>> NativeBodies(const CubeOps& cube) {
  if (!cube.native_bf16) return {};
  std::vector<std::pair<MmadBody, std::int64_t>> bodies{{cube.mmad_bf16_any_cut, cube.mr}};
  if (cube.amx) bodies.emplace_back(cube.mmad_bf16, 32);
  return bodies;
}

TEST_P(TileOpsTest, MmadF32) { CheckMmadShapes<float>(cube_->mmad_f32, cube_->mr, cube_->nr); }

TEST_P(TileOpsTest, MmadBF16) {
  ASSERT_EQ(cube_->native_bf16, cube_->mmad_bf16 != nullptr);
  ASSERT_EQ(cube_->native_bf16, cube_->peak_dot_bf16 != nullptr);
  if (!cube_->native_bf16) GTEST_SKIP() << "bf16 is widened on this target";
  for (const auto& [mmad, mr] : NativeBodies(*cube_)) CheckMmadShapes<BF16>(mmad, mr, cube_->nr);
}

constexpr MmadWalk kWalks[] = {MmadWalk::kRows, MmadWalk::kColumns, MmadWalk::kPieces};

// Sums that start elsewhere and go to a matrix of exactly n columns, of which none beyond may be touched, in every walk: the
// same bits as into room of their own along rows, for every width of the last panel.
template <class T>
void CheckExactMmad(MmadBody mmad, std::int64_t mr, std::int64_t nr) {
  Random random(4);
  for (const MmadStart start : {MmadStart::kZero, MmadStart::kAdd, MmadStart::kBias}) {
    for (std::int64_t n = 1; n <= 2 * nr + 1; ++n) {
      SCOPED_TRACE(std::to_string(n) + " columns, start " + std::to_string(static_cast<int>(start)));
      const std::int64_t m = n % 5 * mr + n % mr + 1, k = (n % 4 < 2 ? 7 : 300) + n % 2, pitch = n + n % 3;
      MmadOperands<T> operands(m, n, k, nr);
      operands.Fill([&] { return random.Real(); });
      operands.SetStart(start);
      std::deque<Matrix<float>> exact;  // Which stay where they are.
      for (const MmadWalk walk : kWalks) {
        Matrix<float>& c = exact.emplace_back(m, pitch, pitch);
        c.Fill([] { return 77.0f; });
        MmadArgs args = operands.args;
        args.c = c.data(), args.c_pitch = pitch, args.exact = true, args.walk = walk;
        if (start == MmadStart::kAdd) args.sums = operands.c.data(), args.sums_pitch = operands.args.c_pitch;
        mmad(args);
      }
      mmad(operands.args);
      for (const Matrix<float>& c : exact) {
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) ASSERT_EQ(BitsOf(c(i, j)), BitsOf(operands.c(i, j)));
          for (std::int64_t j = n; j < pitch; ++j)
            ASSERT_EQ(c(i, j), 77.0f) << "beyond n, at " << i << ", " << j;
        }
      }
    }
  }
}
TEST_P(TileOpsTest, ExactMmad) {
  CheckExactMmad<float>(cube_->mmad_f32, cube_->mr, cube_->nr);
  for (const auto& [mmad, mr] : NativeBodies(*cube_)) CheckExactMmad<BF16>(mmad, mr, cube_->nr);
}

// Strips of rows whose k passes in pieces, their sums beside C, with more panels than stand side by side, a last one and last rows
// that are not whole, and rows of A that are a multiple of 4 KiB apart.
TEST_P(TileOpsTest, LongSumsOfManyRows) {
  if (!cube_->amx) GTEST_SKIP() << "only tile registers cut k so";
  Random random(6);
  const std::int64_t nr = cube_->nr;
  int turn = 0;
  for (const std::int64_t m : {32, 64, 101, 256, 300}) {
    for (const std::int64_t n : {nr - 1, nr, 2 * nr, 3 * nr + 5, 17 * nr + 3}) {
      for (const std::int64_t k : {600, 641, 1311}) {
        const std::int64_t a_pitch = turn % 2 == 0 ? 2048 : k + 3;
        const auto start = static_cast<MmadStart>(turn % 3);
        SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + ", A's pitch " +
                     std::to_string(a_pitch) + ", start " + std::to_string(turn++ % 3));
        MmadOperands<BF16> operands(m, n, k, nr, a_pitch);
        operands.Fill([&] { return random.Small(); });
        operands.SetStart(start);
        Matrix<float> exact(m, n, n), in_place(m, n, n), expected(m, n, n);
        MmadArgs args = operands.args;
        args.c = in_place.data(), args.c_pitch = n, args.exact = true;
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) in_place(i, j) = operands.c(i, j);
        }
        cube_->mmad_bf16(args);
        args.c = exact.data();
        if (start == MmadStart::kAdd) args.sums = operands.c.data(), args.sums_pitch = operands.args.c_pitch;
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            float sum = static_cast<float>(operands.StartOf(i, j));  // Of small integers: exact.
            for (std::int64_t p = 0; p < k; ++p)
              sum += static_cast<float>(operands.a(i, p)) * static_cast<float>(operands.B(p, j));
            expected(i, j) = sum;
          }
        }
        cube_->mmad_bf16(args);
        cube_->mmad_bf16(operands.args);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            ASSERT_EQ(exact(i, j), expected(i, j)) << "at " << i << ", " << j;
            ASSERT_EQ(in_place(i, j), expected(i, j)) << "in place, at " << i << ", " << j;
            ASSERT_EQ(operands.c(i, j), expected(i, j)) << "with room, at " << i << ", " << j;
          }
        }
      }
    }
  }
}

// Sums that a Mmad casts tile by tile have the bits of VectorOps::cast, whatever they are, and nothing behind a row is touched.
TEST_P(TileOpsTest, SumsAreCastAsTheVectorDoes) {
  if (!cube_->amx) GTEST_SKIP() << "only tile registers hand sums on so";
  constexpr float kSpecial[] = {0x1p-130f,
                                -0x1.8p-149f,
                                std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                -0.0f,
                                0x1.fffffep127f,
                                0x1.ffp-127f,
                                0x1.01p0f,
                                0x1.03p0f};
  Random random(5);
  for (const DType type : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t k : {0, 5, 300, 1300}) {
      for (const auto& [m, n] : {std::pair(1, 1), std::pair(16, 16), std::pair(31, 17), std::pair(32, 32),
                                 std::pair(40, 31), std::pair(300, 70)}) {
        SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k));
        MmadOperands<BF16> operands(m, n, k, cube_->nr);
        std::size_t next = 0;
        operands.Fill([&] { return random.Real(); });
        operands.SetStart(MmadStart::kAdd);
        for (std::int64_t i = 0; i < m; i += 3) {
          for (std::int64_t j = i % 2; j < n; j += 7)
            operands.c(i, j) = kSpecial[next++ % std::size(kSpecial)];
        }
        const std::int64_t pitch = n + 3;
        Matrix<std::uint16_t> c(m, pitch, pitch), expected(m, pitch, pitch);
        for (Matrix<std::uint16_t>* out : {&c, &expected}) out->Fill([] { return 0x5a5a; });
        MmadArgs args = operands.args;
        args.sums = operands.c.data(), args.sums_pitch = operands.args.c_pitch;
        args.c = reinterpret_cast<float*>(c.data()), args.c_pitch = pitch, args.exact = true;
        args.cast = BestVectorOps().cast, args.c_type = type;
        cube_->mmad_bf16(args);
        cube_->mmad_bf16(operands.args);
        BestVectorOps().cast({expected.data(), pitch, m, n}, type,
                             {operands.c.data(), operands.args.c_pitch, m, n}, DType::kF32, /*stream=*/false);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < pitch; ++j)
            ASSERT_EQ(c(i, j), expected(i, j)) << "at " << i << ", " << j;
        }
      }
    }
  }
}

// The same of a B that lies where the caller has it, in rows or in columns, wherever the body says that it casts.
TEST_P(TileOpsTest, SumsOfABInPlaceAreCast) {
  if (!cube_->amx) GTEST_SKIP() << "only tile registers hand sums on so";
  Random random(6);
  int casts = 0;
  for (const bool in_rows : {true, false}) {
    for (const std::int64_t k : {1, 77, 256, 257, 1024, 1025}) {
      for (const auto& [m, n] :
           {std::pair(3, 40), std::pair(25, 70), std::pair(64, 64), std::pair(70, 1100)}) {
        SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k));
        MmadOperands<BF16> operands(m, n, k, cube_->nr);
        operands.Fill([&] { return random.Real(); });
        Matrix<BF16> b(k, n, n);
        b.Fill([&] { return BF16(static_cast<float>(random.Real())); });
        Matrix<BF16> turned(n, k, k);
        for (std::int64_t i = 0; i < k; ++i)
          for (std::int64_t j = 0; j < n; ++j) turned(j, i) = b(i, j);
        MmadArgs args = operands.args;
        args.b = nullptr, args.b_type = DType::kBF16;
        args.b_source = in_rows ? StridedSource{b.data(), n, 1} : StridedSource{turned.data(), 1, k};
        if (!cube_->casts_bf16(args)) continue;
        ++casts;
        cube_->mmad_bf16(args);
        Matrix<BF16> c(m, n, n), expected(m, n, n);
        BestVectorOps().cast({expected.data(), n, m, n}, DType::kBF16, {args.c, args.c_pitch, m, n},
                             DType::kF32, /*stream=*/false);
        args.c = reinterpret_cast<float*>(c.data()), args.c_pitch = n, args.exact = true;
        args.cast = BestVectorOps().cast, args.c_type = DType::kBF16;
        cube_->mmad_bf16(args);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j)
            ASSERT_EQ(BitsOf(c(i, j)), BitsOf(expected(i, j))) << "at " << i << ", " << j;
        }
      }
    }
  }
  // Rows of one slab, and columns of one element are such; columns that more than 24 rows use.
  EXPECT_EQ(casts, 4 * 4 + 4 * 3);
}

// Rows of A a multiple of 4096 bytes apart, and long sums: whatever the body does about them must not show.
TEST_P(TileOpsTest, MmadWithPowerOfTwoPitches) {
  const std::int64_t m = 2 * cube_->mr + 5, n = 2 * cube_->nr, k = 1000;
  Random random(2);
  for (const std::int64_t pitch : {1024, 2048}) {
    Matrix<float> a(m, k, pitch), b(1, k * n, k * n), c(m, n, n);
    a.Fill([&] { return random.Small(); });
    b.Fill([&] { return random.Small(); });
    c.Fill([] { return 0.0f; });
    cube_->mmad_f32({.m = m,
                     .n = n,
                     .k = k,
                     .a = a.data(),
                     .a_pitch = pitch,
                     .b = b.data(),
                     .b_panel_stride = k * cube_->nr,
                     .c = c.data(),
                     .c_pitch = n});
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        float sum = 0.0f;
        for (std::int64_t p = 0; p < k; ++p) {
          sum += a(i, p) * b(0, j / cube_->nr * k * cube_->nr + p * cube_->nr + j % cube_->nr);
        }
        ASSERT_EQ(c(i, j), sum) << "at " << i << ", " << j;
      }
    }
  }
}

// Sums go in ascending k from where they start, so cutting k into two Mmads changes no bit.
TEST_P(TileOpsTest, MmadCutInKHasTheSameBits) {
  const std::int64_t m = cube_->mr + 3, n = cube_->nr, k = 150, cut = 70;
  Random random(3);
  MmadOperands<float> whole(m, n, k, cube_->nr), parts(m, n, k, cube_->nr);
  whole.Fill([&] { return random.Real(); });
  std::copy_n(whole.a.data(), (m - 1) * (k + 5) + k, parts.a.data());
  cube_->mmad_f32(whole.args);
  MmadArgs first = whole.args, second = whole.args;
  first.k = cut, first.c = parts.c.data();
  second.k = k - cut, second.a = whole.a.data() + cut, second.b = whole.panels.data() + cut * cube_->nr;
  second.c = parts.c.data(), second.start = MmadStart::kAdd;
  cube_->mmad_f32(first);
  cube_->mmad_f32(second);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) ASSERT_EQ(BitsOf(whole.c(i, j)), BitsOf(parts.c(i, j)));
  }
}

// What is added to C is the product that a Mmad from zero gives, in one more addition.
template <class T>
void CheckAddedMmad(MmadBody mmad, std::int64_t nr, std::int64_t m, std::int64_t n, std::int64_t k,
                    bool exact) {
  SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " exact " +
               std::to_string(exact));
  Random random(5);
  MmadOperands<T> operands(m, n, k, nr);
  operands.Fill([&] { return random.Real(); });
  operands.args.exact = exact;
  std::vector<float> before;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) before.push_back(operands.c(i, j));
  }
  mmad(operands.args);
  std::vector<float> expected;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const float start = before[Index(i * n + j)];
      expected.push_back(start + operands.c(i, j));
      operands.c(i, j) = start;
    }
  }
  for (const MmadWalk walk : kWalks) {
    operands.args.adds = true, operands.args.walk = walk;
    mmad(operands.args);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(operands.c(i, j), expected[Index(i * n + j)]) << "at " << i << ", " << j;
        operands.c(i, j) = before[Index(i * n + j)];
      }
    }
  }
}

TEST_P(TileOpsTest, AddedMmad) {
  for (const bool exact : {false, true}) {
    for (const std::int64_t n : {std::int64_t{1}, cube_->nr - 1, cube_->nr, 5 * cube_->nr + 3}) {
      CheckAddedMmad<float>(cube_->mmad_f32, cube_->nr, 2 * cube_->mr + 1, n, 37, exact);
      for (const auto& [mmad, mr] : NativeBodies(*cube_))
        CheckAddedMmad<BF16>(mmad, cube_->nr, 2 * mr + 1, n, 37, exact);
    }
    // Rows of A that would be copied a piece of k at a time.
    CheckAddedMmad<float>(cube_->mmad_f32, cube_->nr, cube_->mr, 3 * cube_->nr, 1024, exact);
  }
}

TEST_P(TileOpsTest, PeakCountsItsMultiplyAdds) {
  EXPECT_GT(cube_->peak_fma(1), 0);
  EXPECT_EQ(cube_->peak_fma(7), 7 * cube_->peak_fma(1));
  EXPECT_EQ(cube_->peak_fma(0), 0);
  if (cube_->native_bf16) {
    EXPECT_EQ(cube_->peak_dot_bf16(7), 7 * cube_->peak_dot_bf16(1));
  }
}

// ---- Packing

// A source block of shape (rows, cols) under the given strides; every element gets another code, none a NaN.
template <class T>
struct Source {
  enum class Layout { kRowMajor, kTransposed, kBothStrided };

  Source(std::int64_t rows, std::int64_t cols, Layout layout)
      : memory(layout == Layout::kTransposed ? cols : rows, SpanOf(rows, cols, layout),
               SpanOf(rows, cols, layout) + 3) {
    const std::int64_t pitch = SpanOf(rows, cols, layout) + 3;
    view = {.data = memory.data(),
            .row_stride = layout == Layout::kTransposed ? 1 : pitch,
            .col_stride = layout == Layout::kTransposed ? pitch
                          : layout == Layout::kRowMajor ? 1
                                                        : 3};
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        const std::int64_t code = (i * 131 + j * 7 + 1) % 0x7bff;  // Finite in all three types.
        T& element = At(i, j);
        if constexpr (sizeof(T) == 4) {
          element = std::bit_cast<float>(static_cast<std::uint32_t>(code << 16 | (i + j)));
        } else {
          element.bits = static_cast<std::uint16_t>(code | (j % 2) << 15);
        }
      }
    }
  }
  static std::int64_t SpanOf(std::int64_t rows, std::int64_t cols, Layout layout) {
    return layout == Layout::kTransposed ? rows : layout == Layout::kRowMajor ? cols : 3 * (cols - 1) + 1;
  }
  T& At(std::int64_t i, std::int64_t j) const {
    return memory.data()[i * view.row_stride + j * view.col_stride];
  }

  Matrix<T> memory;
  StridedSource view;
};

template <class From, class To>
void CheckPackA(const CubeOps& cube, std::int64_t m, std::int64_t k, typename Source<From>::Layout layout) {
  SCOPED_TRACE(std::to_string(m) + "x" + std::to_string(k) + " layout " +
               std::to_string(static_cast<int>(layout)));
  const Source<From> source(m, k, layout);
  Matrix<To> packed(m, k, k + 3);
  cube.pack_a(DTypeOf<From>(), m, k, source.view, packed.data(), k + 3);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p) {
      const To expected = To(static_cast<float>(source.At(i, p)));
      ASSERT_EQ(BitsOf(packed(i, p)), BitsOf(expected)) << "at " << i << ", " << p;
    }
  }
}

// Panels `gap` elements apart from each other.
template <class From, class To>
void CheckPackB(const CubeOps& cube, decltype(CubeOps::pack_b) pack, std::int64_t gap, std::int64_t k,
                std::int64_t n, const Source<From>& source) {
  const std::int64_t per_word = 4 / static_cast<std::int64_t>(sizeof(To)), nr = cube.nr;
  const std::int64_t panel = RoundUp(k, per_word) * nr;
  Matrix<To> packed(CeilDiv(n, nr), panel, panel + gap);
  pack(DTypeOf<From>(), k, n, source.view, packed.data(), panel + gap);
  FlushStreams();
  for (std::int64_t p = 0; p < RoundUp(k, per_word); ++p) {
    for (std::int64_t j = 0; j < RoundUp(n, nr); ++j) {
      const std::int64_t at = per_word == 1 ? p * nr + j % nr : p / 2 * 2 * nr + 2 * (j % nr) + p % 2;
      const To expected = p < k && j < n ? To(static_cast<float>(source.At(p, j))) : To(0.0f);
      ASSERT_EQ(BitsOf(packed(j / nr, at)), BitsOf(expected)) << "at " << p << ", " << j;
    }
  }
}

// A gap of 3 leaves panels that begin inside lines, which are not streamed.
template <class From, class To>
void CheckPackB(const CubeOps& cube, std::int64_t k, std::int64_t n, typename Source<From>::Layout layout) {
  SCOPED_TRACE(std::to_string(k) + "x" + std::to_string(n) + " layout " +
               std::to_string(static_cast<int>(layout)));
  const Source<From> source(k, n, layout);
  for (const std::int64_t gap : {0, 3}) {
    CheckPackB<From, To>(cube, cube.pack_b, gap, k, n, source);
    CheckPackB<From, To>(cube, cube.stream_pack_b, gap, k, n, source);
  }
}

template <class From, class To>
void CheckPacking(const CubeOps& cube) {
  using Layout = typename Source<From>::Layout;
  const std::int64_t lanes = cube.nr / 2;
  for (const Layout layout : {Layout::kRowMajor, Layout::kTransposed, Layout::kBothStrided}) {
    for (const std::int64_t rows : {std::int64_t{1}, lanes - 1, lanes, lanes + 1, 2 * lanes, 4 * lanes + 3}) {
      for (const std::int64_t cols : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, lanes, lanes + 1,
                                      2 * lanes - 1, 2 * lanes, 3 * lanes + 2, 6 * lanes + 5}) {
        if (rows == 0) continue;
        CheckPackA<From, To>(cube, rows, cols, layout);
        CheckPackB<From, To>(cube, rows, cols, layout);
        CheckPackB<From, To>(cube, cols, rows, layout);
      }
    }
  }
}

TEST_P(TileOpsTest, PackF32) { CheckPacking<float, float>(*cube_); }
TEST_P(TileOpsTest, PackF16) { CheckPacking<F16, float>(*cube_); }
TEST_P(TileOpsTest, PackBF16) {
  cube_->native_bf16 ? CheckPacking<BF16, BF16>(*cube_) : CheckPacking<BF16, float>(*cube_);
}

}  // namespace
}  // namespace cubist::tile_ops
