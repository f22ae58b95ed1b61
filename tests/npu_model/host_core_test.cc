// The host executor through the typed front, instruction by instruction, against plain loops, on every SIMD
// target that this CPU can run.
#include "npu_model/host/host_core.h"

// Before any header of Highway: its AVX3_DL target is one of ours.
#define HWY_WANT_AVX3_DL
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/composites.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist {
namespace {

using testing::ExpectClose;
using testing::ExpectExactly;
using testing::ExpectGuards;
using testing::ExpectSameBits;
using testing::kColumnMajor;
using testing::kContiguous;
using testing::Layout;
using testing::Matrix;
using testing::Random;
using testing::RoundTo;
using testing::SimdTargetName;
using testing::SimdTargets;
using testing::SimdTargetTest;
using Values = std::vector<double>;

constexpr double kEps = 0x1p-24;       // Unit roundoff of fp32.
constexpr double kSecondOrder = 1.01;  // Products of roundings, which first-order bounds leave out.
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rows without gaps; with gaps and unaligned; columns one after the other; both strides above 1.
const Layout kLayouts[] = {kContiguous, {}, kColumnMajor, {.step = 3}, {.order = {1, 0, 2, 3}, .step = 2}};

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A matrix in GM.
class GmMatrix {
 public:
  GmMatrix(DType dtype, std::int64_t rows, std::int64_t cols, const Layout& layout = {})
      : matrix_(dtype, {rows, cols}, layout) {
    const Tensor view = matrix_.view();
    tensor_.data = static_cast<std::byte*>(view.data);
    tensor_.dtype = dtype;
    tensor_.writable = true;
    tensor_.name = "matrix";
    tensor_.sizes = {1, 1, rows, cols};
    tensor_.strides = {0, 0, view.stride(0), view.stride(1)};
  }
  GmMatrix(const GmMatrix&) = delete;
  GmMatrix& operator=(const GmMatrix&) = delete;
  ~GmMatrix() { ExpectGuards(matrix_); }

  Matrix* operator->() { return &matrix_; }
  const Matrix* operator->() const { return &matrix_; }
  GmTensor& tensor() { return tensor_; }
  Gm gm() const { return MatrixOf(tensor_); }

 private:
  Matrix matrix_;
  GmTensor tensor_;
};

// One virtual AI core, on memory that reads as NaN where nothing was written.
struct HostRig {
  HostRig() {
    constexpr std::int64_t kBytes = 2 << 20;
    std::memset(scratch.Take(kBytes), 0xff, kBytes);
    scratch.Reset();
  }

  Scratch scratch;
  HostContext context{HostChip(), scratch, 0, 1};
  HostAiCore core{context};
  HostVectorCore& vector{core.vectors()[0]};
};

// A ring of one use.
template <Buffer kBuffer, class T, class Core>
Tile<kBuffer, T> NewTile(Core& core, std::int64_t rows, std::int64_t cols, Role role = Role::kRows) {
  return Ring<kBuffer, T>(core, "tile", rows, cols, 1, role).Next(rows, cols);
}

template <class F>
void ForEachFloatType(F f) {
  f(float{}), f(BF16{}), f(F16{});
}
template <class F>
void ForEachType(F f) {
  ForEachFloatType(f);
  f(std::int32_t{}), f(std::int64_t{}), f(std::uint8_t{});
}

class HostCoreTest : public SimdTargetTest {};
INSTANTIATE_TEST_SUITE_P(Simd, HostCoreTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// ---- Load and Store of a Vector core

struct Shape {
  std::int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1}, {5, 1}, {1, 17}, {3, 64}, {7, 33}, {0, 4}, {3, 0}};

TEST_P(HostCoreTest, LoadAndStoreKeepEveryElement) {
  Random random;
  ForEachType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& from : kLayouts) {
      HostRig rig;
      for (const Layout& to : kLayouts) {
        for (const auto& [rows, cols] : kShapes) {
          GmMatrix src(DTypeOf<T>(), rows, cols, from), dst(DTypeOf<T>(), rows, cols, to);
          src->FillIntegers(random, -99, 99);
          for (Role role : {Role::kRows, Role::kRelay}) {
            dst->Fill(100);
            const auto tile = NewTile<Buffer::kUB, T>(rig.vector, rows, cols, role);
            rig.vector.Load(tile, src.gm());
            rig.vector.Store(dst.gm(), tile);
            ExpectExactly(dst->view(), src->ToDoubles());
          }
        }
      }
    }
  });
}

TEST_P(HostCoreTest, LoadAndStoreOfATransposedView) {
  Random random;
  HostRig rig;
  GmMatrix src(DType::kF32, 9, 21), dst(DType::kF32, 9, 21);
  src->FillUniform(random);
  const auto tile = NewTile<Buffer::kUB, float>(rig.vector, 21, 9);
  rig.vector.Load(tile, src.gm().Transposed());
  rig.vector.Store(dst.gm().Transposed(), tile);
  ExpectExactly(dst->view(), src->ToDoubles());
}

TEST_P(HostCoreTest, LoadWidensAndStoreNarrows) {
  Random random;
  for (DType narrow : {DType::kBF16, DType::kF16}) {
    for (const Layout& layout : kLayouts) {
      HostRig rig;
      for (const auto& [rows, cols] : kShapes) {
        GmMatrix src(narrow, rows, cols, layout), wide(DType::kF32, rows, cols);
        src->FillNormal(random);
        const auto tile = NewTile<Buffer::kUB, float>(rig.vector, rows, cols);
        rig.vector.Load(tile, src.gm());
        rig.vector.Store(wide.gm(), tile);
        ExpectExactly(wide->view(), src->ToDoubles());

        GmMatrix real(DType::kF32, rows, cols), dst(narrow, rows, cols, layout);
        real->FillNormal(random);
        rig.vector.Load(tile, real.gm());
        rig.vector.Store(dst.gm(), tile);
        Values rounded = real->ToDoubles();
        for (double& value : rounded) value = RoundTo(narrow, value);
        ExpectExactly(dst->view(), rounded);
      }
    }
  }
}

// Stores that bypass the caches write the same.
TEST_P(HostCoreTest, StoreToAStreamedTensor) {
  Random random;
  for (DType to : {DType::kF32, DType::kBF16}) {
    for (std::int64_t cols : {1, 31, 64, 259}) {
      HostRig rig;
      GmMatrix src(DType::kF32, 5, cols), dst(to, 5, cols);
      src->FillIntegers(random);
      dst.tensor().stream = true;
      const auto tile = NewTile<Buffer::kUB, float>(rig.vector, 5, cols);
      rig.vector.Load(tile, src.gm());
      rig.vector.Store(dst.gm(), tile);
      ExpectExactly(dst->view(), src->ToDoubles());
    }
  }
}

TEST_P(HostCoreTest, LoadAndStoreOfParts) {
  Random random;
  ForEachType([&](auto zero) {
    using T = decltype(zero);
    HostRig rig;
    GmMatrix whole(DTypeOf<T>(), 8, 40), part(DTypeOf<T>(), 3, 17), out(DTypeOf<T>(), 8, 40),
        out_part(DTypeOf<T>(), 4, 9);
    whole->FillIntegers(random, 0, 50), part->FillIntegers(random, 51, 99);
    const auto tile = NewTile<Buffer::kUB, T>(rig.vector, 8, 40);
    rig.vector.Load(tile, whole.gm());
    rig.vector.Load(tile.Part({2, 5}, {5, 22}), part.gm());
    rig.vector.Store(out.gm(), tile);
    rig.vector.Store(out_part.gm(), tile.Rows({1, 5}).Cols({13, 22}));
    for (std::int64_t i = 0; i < 8; ++i) {
      for (std::int64_t j = 0; j < 40; ++j) {
        const bool in_part = i >= 2 && i < 5 && j >= 5 && j < 22;
        ASSERT_EQ(out->at({i, j}), in_part ? part->at({i - 2, j - 5}) : whole->at({i, j}));
        if (i < 1 || i >= 5 || j < 13 || j >= 22) continue;
        ASSERT_EQ(out_part->at({i - 1, j - 13}), out->at({i, j}));
      }
    }
  });
}

TEST_P(HostCoreTest, ARelayTileShowsItsSourceAndIsStoredManyTimes) {
  Random random;
  HostRig rig;
  GmMatrix src(DType::kBF16, 2, 65), dst(DType::kBF16, 4, 65);
  src->FillNormal(random);
  Ring<Buffer::kUB, BF16> ring(rig.vector, "row", 1, 80, 2, Role::kRelay);
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto row = ring.Next(1, 65);
    rig.vector.Load(row, src.gm().Rows({i, i + 1}));
    EXPECT_EQ(row.slot->shows.data, src.gm().Rows({i, i + 1}).data());
    rig.vector.Store(dst.gm().Rows({i, i + 1}), row);
    rig.vector.Store(dst.gm().Rows({i + 2, i + 3}), row);
  }
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 65; ++j) ASSERT_EQ(dst->at({i, j}), src->at({i % 2, j}));
  }
}

// ---- Products

// start + a b by plain loops; exact for small integers.
Values ProductOf(const GmMatrix& a, const GmMatrix& b, const Values& start = {}) {
  const std::int64_t m = a->size(0), k = a->size(1), n = b->size(1);
  Values c;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = start.empty() ? 0.0 : start[Index(i * n + j)];
      for (std::int64_t p = 0; p < k; ++p) sum += a->at({i, p}) * b->at({p, j});
      c.push_back(sum);
    }
  }
  return c;
}

Values Rounded(Values values, DType dtype) {
  for (double& value : values) value = RoundTo(dtype, value);
  return values;
}

// Loads both operands whole, into slots that are larger than they are.
template <class T>
struct Operands {
  Operands(HostAiCore& core, const Gm& a, const Gm& b)
      : a1(Ring<Buffer::kL1, T>(core, "a1", a.rows + 3, a.cols + 6, 1, Role::kA).Next(a.rows, a.cols)),
        b1(Ring<Buffer::kL1, T>(core, "b1", b.rows + 4, b.cols + 5, 1, Role::kB).Next(b.rows, b.cols)) {
    core.Load(a1, a);
    core.Load(b1, b);
  }
  L1Tile<T> a1, b1;
};

template <class T>
L0ATile<T> ToL0A(HostAiCore& core, L1Tile<T> a1) {
  const auto a0 = NewTile<Buffer::kL0A, T>(core, a1.rows(), a1.cols(), Role::kA);
  core.Load(a0, a1);
  return a0;
}
template <class T>
L0BTile<T> ToL0B(HostAiCore& core, L1Tile<T> b1) {
  const auto b0 = NewTile<Buffer::kL0B, T>(core, b1.rows(), b1.cols(), Role::kB);
  core.Load(b0, b1);
  return b0;
}

// c = a b in one Mmad.
template <class T>
void Multiply(HostAiCore& core, const Gm& a, const Gm& b, const Gm& c) {
  const Operands<T> operands(core, a, b);
  const auto acc = NewTile<Buffer::kL0C, float>(core, c.rows, c.cols);
  core.Mmad(acc, ToL0A(core, operands.a1), ToL0B(core, operands.b1), Accumulate::kNo);
  core.Store(c, acc);
}

struct MmadShape {
  std::int64_t m, n, k;
};
constexpr MmadShape kMmadShapes[] = {{1, 1, 1},    {3, 5, 7},  {16, 16, 16}, {13, 33, 9}, {12, 64, 31},
                                     {30, 70, 40}, {5, 37, 0}, {0, 4, 3},    {4, 0, 3}};

TEST_P(HostCoreTest, MmadOfOperandsInEveryLayout) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& a_layout : kLayouts) {
      for (const Layout& b_layout : kLayouts) {
        HostRig rig;
        for (const auto& [m, n, k] : kMmadShapes) {
          GmMatrix a(DTypeOf<T>(), m, k, a_layout), b(DTypeOf<T>(), k, n, b_layout), c(DType::kF32, m, n);
          a->FillIntegers(random), b->FillIntegers(random);
          Multiply<T>(rig.core, a.gm(), b.gm(), c.gm());
          ExpectExactly(c->view(), ProductOf(a, b));
        }
      }
    }
  });
}

TEST_P(HostCoreTest, StoreOfAnAccumulatorInEveryLayoutAndType) {
  Random random;
  for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Layout& layout : kLayouts) {
      HostRig rig;
      for (const auto& [m, n, k] : kMmadShapes) {
        GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(out, m, n, layout);
        a->FillIntegers(random, -20, 20), b->FillIntegers(random, -20, 20);
        Multiply<float>(rig.core, a.gm(), b.gm(), c.gm());
        ExpectExactly(c->view(), Rounded(ProductOf(a, b), out));
      }
    }
  }
}

// A B tile that few rows use is read where it lies, whole or in parts, whatever its layout.
TEST_P(HostCoreTest, MmadOfAnOperandUsedOnce) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : kLayouts) {
      for (const auto& [m, n, k] : {MmadShape{1, 70, 41}, MmadShape{5, 33, 96}, MmadShape{40, 64, 130}}) {
        HostRig rig;
        GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n, layout), c(DType::kF32, m, n);
        a->FillIntegers(random), b->FillIntegers(random);
        Ring<Buffer::kL1, T> a_l1(rig.core, "a1", m, k, 1, Role::kA),
            b_l1(rig.core, "b1", k, n, 1, Role::kBOnce);
        const auto a1 = a_l1.Next(m, k), b1 = b_l1.Next(k, n);
        rig.core.Load(a1, a.gm());
        rig.core.Load(b1, b.gm());
        const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
        for (const Range k0 : Split(k, 32)) {
          rig.core.Mmad(acc, ToL0A(rig.core, a1.Cols(k0)), ToL0B(rig.core, b1.Rows(k0)),
                        k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
        }
        rig.core.Store(c.gm(), acc);
        ExpectExactly(c->view(), ProductOf(a, b));
      }
    }
  });
}

// GM += L0C: what stood there counts, and what stands between rows and columns stays.
TEST_P(HostCoreTest, StoreOfAnAccumulatorAdds) {
  Random random;
  for (const Layout& layout : kLayouts) {
    HostRig rig;
    for (const auto& [m, n, k] : kMmadShapes) {
      GmMatrix a(DType::kBF16, m, k), b(DType::kBF16, k, n), c(DType::kF32, m, n, layout);
      a->FillIntegers(random), b->FillIntegers(random), c->FillIntegers(random);
      const Values expected = ProductOf(a, b, c->ToDoubles());
      const Operands<BF16> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc, Accumulate::kYes);
      ExpectExactly(c->view(), expected);
    }
  }
}

// Random reals: k + 1 roundings of the sum of magnitudes.
TEST_P(HostCoreTest, MmadOfRealsIsWithinItsBound) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    HostRig rig;
    const std::int64_t m = 17, n = 45, k = 301;
    GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
    a->FillNormal(random), b->FillNormal(random);
    Multiply<T>(rig.core, a.gm(), b.gm(), c.gm());
    Values bound;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        double magnitude = 0;
        for (std::int64_t p = 0; p < k; ++p) magnitude += std::abs(a->at({i, p}) * b->at({p, j}));
        bound.push_back(2 * static_cast<double>(k + 1) * kEps * magnitude);
      }
    }
    ExpectClose(c->view(), ProductOf(a, b), bound);
  });
}

// Where an A operand lies after its load: in GM where Mmad can read it there, else in the slot. Whichever it
// is, the product is right.
template <class T>
void CheckPlaceOfA(std::int64_t m, std::int64_t k, const Layout& layout, bool in_place) {
  SCOPED_TRACE(std::string(NameOf(DTypeOf<T>())) + " " + std::to_string(m) + "x" + std::to_string(k));
  Random random;
  HostRig rig;
  GmMatrix a(DTypeOf<T>(), m, k, layout), b(DTypeOf<T>(), k, 9), c(DType::kF32, m, 9);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<T> operands(rig.core, a.gm(), b.gm());
  EXPECT_EQ(operands.a1.slot->shows.data == a.gm().data(), in_place);
  EXPECT_EQ(operands.a1.slot->shows.data == operands.a1.slot->storage, !in_place);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, 9);
  rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1), Accumulate::kNo);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
}

TEST_P(HostCoreTest, AnAOperandIsReadInPlaceOrCopied) {
  const std::int64_t mr = BestCubeOps().mr;
  const bool native = BestCubeOps().native_bf16;
  CheckPlaceOfA<float>(2 * mr + 1, 20, {}, true);
  CheckPlaceOfA<float>(2 * mr + 1, 21, {}, true);
  CheckPlaceOfA<float>(mr, 20, {.gap = 2000}, true);       // Long rows, but few of them.
  CheckPlaceOfA<float>(mr + 1, 20, {.gap = 2000}, false);  // Long rows.
  CheckPlaceOfA<float>(mr, 20, kColumnMajor, false);
  CheckPlaceOfA<float>(mr, 20, {.step = 2}, false);
  CheckPlaceOfA<BF16>(2 * mr + 1, 20, {}, native);
  CheckPlaceOfA<BF16>(2 * mr + 1, 21, {}, false);  // An odd k needs its padding.
  CheckPlaceOfA<F16>(2 * mr + 1, 20, {}, false);   // Widened.
}

// Loads into L1 cut towards the size of L0: parts of A anywhere, parts of B at panels and pairs of k.
TEST_P(HostCoreTest, OperandsLoadedInParts) {
  Random random;
  const std::int64_t nr = BestCubeOps().nr;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t k : {48, 47}) {
      HostRig rig;
      const std::int64_t m = 20, n = 2 * nr + 5;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const auto a1 = NewTile<Buffer::kL1, T>(rig.core, m, k, Role::kA);
      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, k, n, Role::kB);
      for (Range k0 : Split(k, 10)) {
        for (Range rows : Split(m, 7)) rig.core.Load(a1.Part(rows, k0), a.gm().Block(rows, k0));
        for (Range cols : Split(n, nr)) rig.core.Load(b1.Part(k0, cols), b.gm().Block(k0, cols));
      }
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

TEST_P(HostCoreTest, PartsOfL1GoToL0) {
  Random random;
  const std::int64_t nr = BestCubeOps().nr;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : {Layout{}, kColumnMajor}) {  // A in place, and packed.
      HostRig rig;
      const std::int64_t m = 21, k = 50, n = 3 * nr + 3;
      const Range rows{5, 18}, inner{16, 38}, cols{nr, 2 * nr + 3};
      GmMatrix a(DTypeOf<T>(), m, k, layout), b(DTypeOf<T>(), k, n), c(DType::kF32, rows.size(), cols.size());
      a->FillIntegers(random), b->FillIntegers(random);
      const Operands<T> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, rows.size(), cols.size());
      rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Part(rows, inner)),
                    ToL0B(rig.core, operands.b1.Part(inner, cols)), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        for (std::int64_t j = cols.begin; j < cols.end; ++j) {
          double sum = 0;
          for (std::int64_t p = inner.begin; p < inner.end; ++p) sum += a->at({i, p}) * b->at({p, j});
          ASSERT_EQ(c->at({i - rows.begin, j - cols.begin}), sum) << i << ", " << j;
        }
      }
    }
  });
}

// An odd k in the middle of a tile ends there: native bf16 multiplies pairs of k, and the neighbour of the last
// one is another element of the tile.
TEST_P(HostCoreTest, AnOddPartOfKEndsWhereItSays) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Layout& layout : {Layout{}, kColumnMajor}) {  // A in place, and packed.
      for (std::int64_t m : {6, 300}) {
        for (const Range k0 : {Range{0, 7}, Range{4, 5}, Range{2, 19}}) {
          HostRig rig;
          GmMatrix a(DTypeOf<T>(), m, 20, layout), b(DTypeOf<T>(), 20, 9), c(DType::kF32, m, 9);
          a->FillIntegers(random, 1, 4), b->FillIntegers(random, 1, 4);
          const Operands<T> operands(rig.core, a.gm(), b.gm());
          const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, 9);
          rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Cols(k0)), ToL0B(rig.core, operands.b1.Rows(k0)),
                        Accumulate::kNo);
          rig.core.Store(c.gm(), acc);
          Values expected;
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < 9; ++j) {
              expected.push_back(0);
              for (std::int64_t p = k0.begin; p < k0.end; ++p)
                expected.back() += a->at({i, p}) * b->at({p, j});
            }
          }
          ExpectExactly(c->view(), expected);
        }
      }
    }
  });
}

// How k is cut into instructions changes no bit.
TEST_P(HostCoreTest, CuttingKChangesNoBit) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    const std::int64_t m = 19, n = 40, k = 135;
    GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), whole(DType::kF32, m, n);
    a->FillNormal(random), b->FillNormal(random);
    HostRig rig;
    Multiply<T>(rig.core, a.gm(), b.gm(), whole.gm());
    for (std::int64_t step : {2, 16, 64, 134}) {
      GmMatrix c(DType::kF32, m, n);
      const Operands<T> operands(rig.core, a.gm(), b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      for (Range k0 : Split(k, step)) {
        rig.core.Mmad(acc, ToL0A(rig.core, operands.a1.Cols(k0)), ToL0B(rig.core, operands.b1.Rows(k0)),
                      k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
      }
      rig.core.Store(c.gm(), acc);
      ExpectSameBits(c->view(), whole->view());
    }
  });
}

// Parts of an accumulator: rows anywhere, columns at panels.
TEST_P(HostCoreTest, PartsOfAnAccumulator) {
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr, m = 20, n = nr + 7, k = 12;
  GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(DType::kF32, m, n), part(DType::kF32, 9, 5);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  for (Range rows : Split(m, 9)) {
    for (Range cols : Split(n, nr)) {
      rig.core.Mmad(acc.Part(rows, cols), ToL0A(rig.core, operands.a1.Rows(rows)),
                    ToL0B(rig.core, operands.b1.Cols(cols)), Accumulate::kNo);
    }
  }
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
  rig.core.Store(part.gm(), acc.Part({4, 13}, {2, 7}));
  for (std::int64_t i = 0; i < 9; ++i) {
    for (std::int64_t j = 0; j < 5; ++j) ASSERT_EQ(part->at({i, j}), c->at({i + 4, j + 2}));
  }
}

// A Mmad writes whole panels. Where that would reach beyond its part of an accumulator it is refused.
TEST_P(HostCoreTest, PartsOfAnAccumulatorThatSharePanelsAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr;
  GmMatrix a(DType::kF32, 6, 8), b(DType::kF32, 8, 3 * nr);
  a->FillIntegers(random), b->FillIntegers(random);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 6, 3 * nr);
  for (Range cols : {Range{nr + 1, 3 * nr}, Range{nr, 3 * nr - 1}}) {
    const Operands<float> operands(rig.core, a.gm(), b.gm().Cols(cols));
    EXPECT_DEATH(rig.core.Mmad(acc.Cols(cols), ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1),
                               Accumulate::kNo),
                 "panel");
  }
}

// A tile of L0 may be used in parts, too.
TEST_P(HostCoreTest, MmadOfPartsOfL0) {
  Random random;
  HostRig rig;
  const std::int64_t nr = BestCubeOps().nr, m = 20, n = 2 * nr, k = 12;
  GmMatrix a(DType::kF32, m, k), b(DType::kF32, k, n), c(DType::kF32, m, n);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto a0 = ToL0A(rig.core, operands.a1);
  const auto b0 = ToL0B(rig.core, operands.b1);
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  for (Range rows : Split(m, 8)) {
    for (Range cols : Split(n, nr)) {
      for (Range k0 : Split(k, 6)) {
        rig.core.Mmad(acc.Part(rows, cols), a0.Part(rows, k0), b0.Part(k0, cols),
                      k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
      }
    }
  }
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
}

TEST_P(HostCoreTest, BiasStartsTheAccumulator) {
  Random random;
  for (DType bias_type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::int64_t step : {1, 3}) {
      for (std::int64_t k : {0, 1, 26}) {
        HostRig rig;
        const std::int64_t m = 14, n = 41;
        GmMatrix a(DType::kBF16, m, k), b(DType::kBF16, k, n), c(DType::kF32, m, n),
            bias(bias_type, 1, n, {.step = step});
        a->FillIntegers(random), b->FillIntegers(random), bias->FillIntegers(random, -60, 60);
        Values start;
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) start.push_back(bias->at({0, j}));
        }
        const Operands<BF16> operands(rig.core, a.gm(), b.gm());
        const auto row = Ring<Buffer::kBT, float>(rig.core, "bias", 1, n + 9, 1).Next(1, n);
        rig.core.Load(row, bias.gm());
        const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
        const auto a0 = ToL0A(rig.core, operands.a1);
        const auto b0 = ToL0B(rig.core, operands.b1);
        rig.core.Mmad(acc, a0, b0, row);
        rig.core.Store(c.gm(), acc);
        const Values once = ProductOf(a, b, start);
        ExpectExactly(c->view(), once);
        rig.core.Mmad(acc, a0, b0, Accumulate::kYes);
        rig.core.Store(c.gm(), acc);
        ExpectExactly(c->view(), ProductOf(a, b, once));
      }
    }
  }
}

// The columns of a bias row that a block needs.
TEST_P(HostCoreTest, PartsOfABiasRow) {
  Random random;
  HostRig rig;
  GmMatrix a(DType::kF32, 4, 6), b(DType::kF32, 6, 10), bias(DType::kF32, 1, 30), c(DType::kF32, 4, 10);
  a->FillIntegers(random), b->FillIntegers(random), bias->FillIntegers(random, -60, 60);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  const auto row = NewTile<Buffer::kBT, float>(rig.core, 1, 30);
  rig.core.Load(row.Cols({0, 11}), bias.gm().Cols({0, 11}));
  rig.core.Load(row.Cols({11, 30}), bias.gm().Cols({11, 30}));
  for (std::int64_t first : {0, 7, 20}) {
    Values start;
    for (std::int64_t i = 0; i < 40; ++i) start.push_back(bias->at({0, first + i % 10}));
    const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 4, 10);
    rig.core.Mmad(acc, ToL0A(rig.core, operands.a1), ToL0B(rig.core, operands.b1),
                  row.Cols({first, first + 10}));
    rig.core.Store(c.gm(), acc);
    ExpectExactly(c->view(), ProductOf(a, b, start));
  }
}

TEST_P(HostCoreTest, AnEmptyKStartsTheAccumulatorAndAddsNothing) {
  Random random;
  HostRig rig;
  const std::int64_t m = 9, n = 35;
  GmMatrix a(DType::kF32, m, 3), b(DType::kF32, 3, n), c(DType::kF32, m, n);
  a->FillIntegers(random), b->FillIntegers(random);
  const Operands<float> full(rig.core, a.gm(), b.gm());
  const Operands<float> empty(rig.core, a.gm().Cols({3, 3}), b.gm().Rows({3, 3}));
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
  rig.core.Mmad(acc, ToL0A(rig.core, full.a1), ToL0B(rig.core, full.b1), Accumulate::kNo);
  rig.core.Mmad(acc, ToL0A(rig.core, empty.a1), ToL0B(rig.core, empty.b1), Accumulate::kYes);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), ProductOf(a, b));
  rig.core.Mmad(acc, ToL0A(rig.core, empty.a1), ToL0B(rig.core, empty.b1), Accumulate::kNo);
  rig.core.Store(c.gm(), acc);
  ExpectExactly(c->view(), Values(Index(m * n), 0.0));
}

// ---- Packed operands

// Room in GM for packed matrices.
class PackedMatrix {
 public:
  PackedMatrix(Role role, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t matrices)
      : room_(DType::kF32, matrices, CeilDiv(HostChip().PackedBytes(role, dtype, rows, cols), 128) * 32,
              kContiguous) {
    packed_.tensor = &room_.tensor();
    packed_.role = role, packed_.dtype = dtype;
    packed_.rows = rows, packed_.cols = cols;
    packed_.row_part = {0, rows}, packed_.col_part = {0, cols};
  }
  const PackedGm& gm() const { return packed_; }

 private:
  GmMatrix room_;
  PackedGm packed_;
};

// Packs `src` tile by tile: an even number of rows and whole panels each.
template <class T>
void PackInTiles(HostAiCore& core, const Gm& src, const PackedGm& packed, std::int64_t rows,
                 std::int64_t panels) {
  const std::int64_t cols = panels * HostChip().PackedStep(packed.role, packed.dtype);
  Ring<Buffer::kL1, T> ring(core, "tile", rows, cols, 2, packed.role);
  for (Range c : Split(src.cols, cols)) {
    for (Range r : Split(src.rows, rows)) {
      const L1Tile<T> tile = ring.Next(r.size(), c.size());
      core.Load(tile, src.Block(r, c));
      core.Store(packed.Block(r, c), tile);
    }
  }
}

// The product of blocks (m, k0) and (k0, n) of operands that are packed or not, accumulated over k0.
template <class T>
void MultiplyBlocks(HostAiCore& core, const Gm& a, const PackedGm* a_packed, const Gm& b,
                    const PackedGm* b_packed, Range m, Range n, std::int64_t k_step, const Gm& c) {
  const auto acc = NewTile<Buffer::kL0C, float>(core, m.size(), n.size());
  for (Range k0 : Split(a.cols, k_step)) {
    const auto a1 = NewTile<Buffer::kL1, T>(core, m.size(), k0.size(), Role::kA);
    const auto b1 = NewTile<Buffer::kL1, T>(core, k0.size(), n.size(), Role::kB);
    if (a_packed != nullptr) {
      core.Load(a1, a_packed->Block(m, k0));
    } else {
      core.Load(a1, a.Block(m, k0));
    }
    if (b_packed != nullptr) {
      core.Load(b1, b_packed->Block(k0, n));
    } else {
      core.Load(b1, b.Block(k0, n));
    }
    core.Mmad(acc, ToL0A(core, a1), ToL0B(core, b1), k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
  }
  core.Store(c, acc);
}

TEST_P(HostCoreTest, PackedOperandsGiveTheSameBits) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    const std::int64_t a_step = HostChip().PackedStep(Role::kA, DTypeOf<T>()), b_step = BestCubeOps().nr;
    for (std::int64_t k : {a_step + 37, std::int64_t{29}, std::int64_t{1}}) {
      HostRig rig;
      const std::int64_t m = 23, n = 2 * b_step + 9;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n, kColumnMajor);
      a->FillNormal(random), b->FillNormal(random);
      const PackedMatrix a_packed(Role::kA, DTypeOf<T>(), m, k, 1), b_packed(Role::kB, DTypeOf<T>(), k, n, 1);
      PackInTiles<T>(rig.core, a.gm(), a_packed.gm(), 8, 1);
      PackInTiles<T>(rig.core, b.gm(), b_packed.gm(), 30, 2);
      // Blocks: rows of A anywhere, columns of B at panels, k at pairs. The last walks k as one block of two
      // panels of A.
      for (const auto& [rows, cols, k_step] : {std::tuple(Range{0, m}, Range{0, n}, std::int64_t{64}),
                                               std::tuple(Range{5, 18}, Range{b_step, n}, std::int64_t{32}),
                                               std::tuple(Range{0, m}, Range{0, n}, k)}) {
        GmMatrix plain(DType::kF32, rows.size(), cols.size());
        MultiplyBlocks<T>(rig.core, a.gm(), nullptr, b.gm(), nullptr, rows, cols, k_step, plain.gm());
        for (int packing = 1; packing < 4; ++packing) {
          GmMatrix c(DType::kF32, rows.size(), cols.size());
          MultiplyBlocks<T>(rig.core, a.gm(), (packing & 1) != 0 ? &a_packed.gm() : nullptr, b.gm(),
                            (packing & 2) != 0 ? &b_packed.gm() : nullptr, rows, cols, k_step, c.gm());
          EXPECT_TRUE(testing::HasSameBits(c->view(), plain->view()))
              << NameOf(DTypeOf<T>()) << ", k " << k << " in steps of " << k_step
              << ", packed: " << ((packing & 1) != 0 ? "A " : "") << ((packing & 2) != 0 ? "B" : "");
        }
      }
    }
  });
}

TEST_P(HostCoreTest, SeveralPackedMatricesStandApart) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (Role role : {Role::kA, Role::kB}) {
      HostRig rig;
      const std::int64_t rows = 17, cols = 39, count = 3;
      const PackedMatrix packed(role, DTypeOf<T>(), rows, cols, count);
      std::array<std::unique_ptr<GmMatrix>, 3> matrices;
      for (std::int64_t i = count - 1; i >= 0; --i) {
        matrices[Index(i)] = std::make_unique<GmMatrix>(DTypeOf<T>(), rows, cols);
        (*matrices[Index(i)])->FillIntegers(random);
        PackInTiles<T>(rig.core, matrices[Index(i)]->gm(), packed.gm().Matrix(i), 6, 1);
      }
      GmMatrix other(DTypeOf<T>(), role == Role::kA ? cols : 11, role == Role::kA ? 11 : rows);
      other->FillIntegers(random);
      for (std::int64_t i = 0; i < count; ++i) {
        const GmMatrix &matrix = *matrices[Index(i)], &a = role == Role::kA ? matrix : other,
                       &b = role == Role::kA ? other : matrix;
        const PackedGm one = packed.gm().Matrix(i);
        GmMatrix c(DType::kF32, a.gm().rows, b.gm().cols);
        MultiplyBlocks<T>(rig.core, a.gm(), role == Role::kA ? &one : nullptr, b.gm(),
                          role == Role::kB ? &one : nullptr, {0, a.gm().rows}, {0, b.gm().cols}, a.gm().cols,
                          c.gm());
        ExpectExactly(c->view(), ProductOf(a, b));
      }
    }
  });
}

// A tile of L1 may be packed in parts.
TEST_P(HostCoreTest, PartsOfL1ArePacked) {
  Random random;
  const std::int64_t step = BestCubeOps().nr;
  HostRig rig;
  GmMatrix a(DType::kF32, 10, 12), b(DType::kF32, 12, 2 * step), c(DType::kF32, 10, 2 * step);
  a->FillIntegers(random), b->FillIntegers(random);
  const PackedMatrix a_packed(Role::kA, DType::kF32, 10, 12, 1),
      b_packed(Role::kB, DType::kF32, 12, 2 * step, 1);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  for (Range rows : Split(10, 4)) rig.core.Store(a_packed.gm().Block(rows, {0, 12}), operands.a1.Rows(rows));
  for (Range cols : Split(2 * step, step)) {
    for (Range rows : Split(12, 6)) {
      rig.core.Store(b_packed.gm().Block(rows, cols), operands.b1.Part(rows, cols));
    }
  }
  MultiplyBlocks<float>(rig.core, a.gm(), &a_packed.gm(), b.gm(), &b_packed.gm(), {0, 10}, {0, 2 * step}, 12,
                        c.gm());
  ExpectExactly(c->view(), ProductOf(a, b));
}

// ---- Hand-overs

// Fills `acc` with value + i * 100 + j, by a product.
void FillAccumulator(HostAiCore& core, L0CTile<float> acc, double value) {
  const std::int64_t m = acc.rows(), n = acc.cols();
  GmMatrix a(DType::kF32, m, 2), b(DType::kF32, 2, n);
  for (std::int64_t i = 0; i < m; ++i)
    a->set({i, 0}, value + static_cast<double>(i * 100)), a->set({i, 1}, 1);
  for (std::int64_t j = 0; j < n; ++j) b->set({0, j}, 1), b->set({1, j}, static_cast<double>(j));
  const Operands<float> operands(core, a.gm(), b.gm());
  core.Mmad(acc, ToL0A(core, operands.a1), ToL0B(core, operands.b1), Accumulate::kNo);
}
Values Filled(std::int64_t rows, std::int64_t cols, double value) {
  Values values;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) values.push_back(value + static_cast<double>(i * 100 + j));
  }
  return values;
}

TEST_P(HostCoreTest, AnAccumulatorChangesHands) {
  struct Case {
    std::int64_t rows, cols, l0c_rows, l0c_cols, ub_rows, ub_cols;
    bool swaps;
  };
  for (const Case& at :
       {Case{16, 32, 16, 32, 16, 32, true}, Case{7, 33, 16, 64, 16, 64, true},
        Case{7, 33, 16, 64, 7, 33, false}, Case{7, 33, 16, 40, 20, 40, false}, Case{5, 1, 16, 1, 5, 1, false},
        Case{1, 1, 1, 1, 8, 1, false}, Case{3, 0, 3, 8, 3, 8, true}}) {
    SCOPED_TRACE(std::to_string(at.rows) + "x" + std::to_string(at.cols));
    HostRig rig;
    Ring<Buffer::kL0C, float> acc_ring(rig.core, "acc", at.l0c_rows, at.l0c_cols, 1);
    Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", at.ub_rows, at.ub_cols, 1);
    GmMatrix out(DType::kF32, at.rows, at.cols);
    for (int round = 0; round < 3; ++round) {
      const auto acc = acc_ring.Next(at.rows, at.cols);
      FillAccumulator(rig.core, acc, 7 + round);
      const auto ub = ub_ring.Next(at.rows, at.cols);
      const std::byte* given = acc.slot->storage;
      rig.vector.Move(ub, acc);
      EXPECT_EQ(ub.slot->storage == given, at.swaps);
      FillAccumulator(rig.core, acc_ring.Next(at.l0c_rows, at.l0c_cols),
                      -1);  // The giver is used again at once.
      rig.vector.Store(out.gm(), ub);
      ExpectExactly(out->view(), Filled(at.rows, at.cols, 7 + round));
    }
  }
}

// Send frees the accumulator at once: several tiles are on their way while the next ones are computed.
TEST_P(HostCoreTest, TilesWaitInHandOverSlots) {
  for (const std::int64_t ub_cols : {40, 64}) {  // unlike slots: copied; alike: given
    HostRig rig;
    Ring<Buffer::kL0C, float> acc_ring(rig.core, "acc", 16, 64, 1);
    Ring<Buffer::kHandOver, float> between_ring(rig.core, "between", 16, 64, 3);
    Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", 16, ub_cols, 1);
    GmMatrix out(DType::kF32, 9, 33);
    for (int round = 0; round < 4; ++round) {
      std::vector<HandOverTile<float>> sent;
      for (int step = 0; step < 3; ++step) {
        const auto acc = acc_ring.Next(9, 33);
        FillAccumulator(rig.core, acc, 10 * round + step);
        sent.push_back(between_ring.Next(9, 33));
        rig.core.Send(sent.back(), acc);
      }
      for (int step = 0; step < 3; ++step) {
        const auto ub = ub_ring.Next(9, 33);
        const auto tile = sent[static_cast<std::size_t>(step)];
        const std::byte* given = tile.slot->storage;
        rig.vector.Receive(ub, tile);
        EXPECT_EQ(ub.slot->storage == given, ub_cols == 64);
        rig.vector.Store(out.gm(), ub);
        ExpectExactly(out->view(), Filled(9, 33, 10 * round + step));
      }
    }
  }
}

TEST_P(HostCoreTest, PartsOfAHandOverSlotAreReceivedApart) {
  HostRig rig;
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 20, 40);
  const auto between = NewTile<Buffer::kHandOver, float>(rig.core, 20, 40);
  FillAccumulator(rig.core, acc, 3);
  rig.core.Send(between, acc);
  GmMatrix out(DType::kF32, 20, 40);
  for (const Range rows : {Range{0, 13}, Range{13, 20}}) {
    const auto part = NewTile<Buffer::kUB, float>(rig.vector, rows.size(), 40);
    rig.vector.Receive(part, between.Rows(rows));
    rig.vector.Store(out.gm().Rows(rows), part);
  }
  ExpectExactly(out->view(), Filled(20, 40, 3));
}

TEST_P(HostCoreTest, PartsOfAnAccumulatorAreCopied) {
  HostRig rig;
  const auto acc = NewTile<Buffer::kL0C, float>(rig.core, 20, 40);
  FillAccumulator(rig.core, acc, 0);
  Ring<Buffer::kUB, float> ring(rig.vector, "rows", 16, 40, 2);
  const auto top = ring.Next(13, 40), bottom = ring.Next(7, 40);
  rig.vector.Move(top, acc.Rows({0, 13}));
  rig.vector.Move(bottom, acc.Rows({13, 20}));
  GmMatrix out(DType::kF32, 20, 40), all(DType::kF32, 20, 40), corner(DType::kF32, 16, 40);
  rig.vector.Store(out.gm().Rows({0, 13}), top);
  rig.vector.Store(out.gm().Rows({13, 20}), bottom);
  ExpectExactly(out->view(), Filled(20, 40, 0));
  rig.core.Store(all.gm(), acc);
  ExpectExactly(all->view(), Filled(20, 40, 0));

  const auto wide = NewTile<Buffer::kUB, float>(rig.vector, 16, 40);
  rig.vector.Fill(wide, -5);
  rig.vector.Move(wide.Part({3, 8}, {10, 21}), acc.Part({4, 9}, {2, 13}));
  rig.vector.Store(corner.gm(), wide);
  for (std::int64_t i = 0; i < 16; ++i) {
    for (std::int64_t j = 0; j < 40; ++j) {
      const bool moved = i >= 3 && i < 8 && j >= 10 && j < 21;
      ASSERT_EQ(corner->at({i, j}), moved ? static_cast<double>((i + 1) * 100 + j - 8) : -5.0);
    }
  }
}

template <class T>
UbTile<T> LoadRows(HostVectorCore& vector, const Gm& src, std::int64_t rows, std::int64_t cols) {
  const auto tile = Ring<Buffer::kUB, T>(vector, "rows", rows, cols, 1).Next(src.rows, src.cols);
  vector.Load(tile, src);
  return tile;
}

// Rows of UB become an A operand; columns beyond them must not reach the product (the memory holds NaN).
TEST_P(HostCoreTest, RowsChangeHandsAndAreMultiplied) {
  Random random;
  struct Case {
    std::int64_t m, k, ub_rows, ub_cols, l1_rows, l1_cols;
    bool alike;
  };
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const Case& at :
         {Case{16, 32, 16, 32, 16, 32, true}, Case{7, 33, 16, 64, 16, 64, true},
          Case{7, 33, 7, 33, 7, 33, true}, Case{13, 15, 13, 15, 20, 24, false}, Case{1, 1, 4, 1, 4, 1, false},
          Case{5, 1, 5, 1, 5, 1, false}, Case{3, 31, 9, 40, 8, 40, false}}) {
      SCOPED_TRACE(std::string(NameOf(DTypeOf<T>())) + " " + std::to_string(at.m) + "x" +
                   std::to_string(at.k));
      HostRig rig;
      const std::int64_t n = 35;
      GmMatrix a(DTypeOf<T>(), at.m, at.k), b(DTypeOf<T>(), at.k, n), c(DType::kF32, at.m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const UbTile<T> rows = LoadRows<T>(rig.vector, a.gm(), at.ub_rows, at.ub_cols);
      const auto a1 =
          Ring<Buffer::kL1, T>(rig.core, "a1", at.l1_rows, at.l1_cols, 1, Role::kA).Next(at.m, at.k);
      const std::byte* given = rows.slot->storage;
      rig.vector.Move(a1, rows);
      const bool widened = HostChip().OperandBytes(DTypeOf<T>()) != SizeOf(DTypeOf<T>());
      EXPECT_EQ(a1.slot->storage == given, at.alike && !widened);
      GmMatrix other(DTypeOf<T>(), at.m, at.k);
      other->Fill(99);
      rig.vector.Load(rows, other.gm());  // The giver is used again at once.

      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, at.k, n, Role::kB);
      rig.core.Load(b1, b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, at.m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

// Two Vector cores give their rows to one operand.
TEST_P(HostCoreTest, PartsOfRowsMeetInOneOperand) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t k : {24, 33}) {
      HostRig rig;
      const std::int64_t m = 19, n = 20;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n), c(DType::kF32, m, n);
      a->FillIntegers(random), b->FillIntegers(random);
      const auto a1 = NewTile<Buffer::kL1, T>(rig.core, m, k, Role::kA);
      for (Range rows : Split(m, 10)) {
        rig.vector.Move(a1.Rows(rows), LoadRows<T>(rig.vector, a.gm().Rows(rows), 10, k));
      }
      const auto b1 = NewTile<Buffer::kL1, T>(rig.core, k, n, Role::kB);
      rig.core.Load(b1, b.gm());
      const auto acc = NewTile<Buffer::kL0C, float>(rig.core, m, n);
      rig.core.Mmad(acc, ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
      rig.core.Store(c.gm(), acc);
      ExpectExactly(c->view(), ProductOf(a, b));
    }
  });
}

// Steps in flight: scores of the next step are made before the last one's rows are used, and storage changes
// hands both ways. out_s = (a_s b) d, with the scores passing through UB.
TEST_P(HostCoreTest, HandOversOfStepsInFlightDoNotMix) {
  Random random;
  HostRig rig;
  constexpr std::int64_t kSteps = 7, kM = 10, kK = 6, kN = 17;
  GmMatrix b(DType::kF32, kK, kN), d(DType::kF32, kN, 9);
  b->FillIntegers(random), d->FillIntegers(random);
  const auto b1 = NewTile<Buffer::kL1, float>(rig.core, kK, kN, Role::kB);
  const auto d1 = NewTile<Buffer::kL1, float>(rig.core, kN, 9, Role::kB);
  rig.core.Load(b1, b.gm()), rig.core.Load(d1, d.gm());
  Ring<Buffer::kL1, float> a_ring(rig.core, "a", kM, kK, 2, Role::kA),
      p_ring(rig.core, "p", kM, kN, 2, Role::kA);
  Ring<Buffer::kL0C, float> s_ring(rig.core, "s", kM, kN, 2), o_ring(rig.core, "o", kM, 9, 2);
  Ring<Buffer::kUB, float> ub_ring(rig.vector, "ub", kM, kN, 2);
  std::vector<std::unique_ptr<GmMatrix>> inputs;
  L0CTile<float> scores[kSteps + 1];
  const auto make_scores = [&](std::int64_t step) {
    inputs.push_back(std::make_unique<GmMatrix>(DType::kF32, kM, kK));
    (*inputs.back())->FillIntegers(random);
    const auto a1 = a_ring.Next(kM, kK);
    rig.core.Load(a1, inputs.back()->gm());
    scores[step] = s_ring.Next(kM, kN);
    rig.core.Mmad(scores[step], ToL0A(rig.core, a1), ToL0B(rig.core, b1), Accumulate::kNo);
  };
  make_scores(0);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    make_scores(step + 1);
    const auto rows = ub_ring.Next(kM, kN);
    rig.vector.Move(rows, scores[step]);
    const auto p1 = p_ring.Next(kM, kN);
    rig.vector.Move(p1, rows);
    const auto out = o_ring.Next(kM, 9);
    rig.core.Mmad(out, ToL0A(rig.core, p1), ToL0B(rig.core, d1), Accumulate::kNo);
    GmMatrix c(DType::kF32, kM, 9), s(DType::kF32, kM, kN);
    rig.core.Store(c.gm(), out);
    const Values exact = ProductOf(*inputs[Index(step)], b);
    for (std::int64_t i = 0; i < kM * kN; ++i) s->set({i / kN, i % kN}, exact[Index(i)]);
    ExpectExactly(c->view(), ProductOf(s, d));
  }
}

// ---- Vector instructions

class HostVectorTest : public SimdTargetTest {
 protected:
  // A tile of the matrix's values, three columns and one row into a larger tile.
  UbTile<float> TileOf(const GmMatrix& values) {
    const Gm gm = values.gm();
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, gm.rows + 2, gm.cols + 5)
                          .Part({1, gm.rows + 1}, {3, gm.cols + 3});
    rig_.vector.Load(tile, gm);
    return tile;
  }
  // A column in a ring of columns, as kernels keep row statistics.
  UbTile<float> ColumnOf(const GmMatrix& values) {
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, values.gm().rows, 1);
    rig_.vector.Load(tile, values.gm());
    return tile;
  }
  template <class T>
  Values ValuesOf(UbTile<T> tile) {
    GmMatrix out(DTypeOf<T>(), tile.rows(), tile.cols());
    rig_.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  }
  template <class T>
  UbTile<T> IntsOf(const std::vector<T>& values, std::int64_t rows = 1) {
    const std::int64_t cols = rows == 0 ? 0 : static_cast<std::int64_t>(values.size()) / rows;
    GmMatrix in(DTypeOf<T>(), rows, cols);
    for (std::size_t i = 0; i < values.size(); ++i) {
      in->set({static_cast<std::int64_t>(i) / cols, static_cast<std::int64_t>(i) % cols},
              static_cast<double>(values[i]));
    }
    const auto tile = NewTile<Buffer::kUB, T>(rig_.vector, rows + 1, cols + 3).Part({0, rows}, {0, cols});
    rig_.vector.Load(tile, in.gm());
    return tile;
  }

  HostRig rig_;
  HostVectorCore& vector_ = rig_.vector;
  Random random_;
};
INSTANTIATE_TEST_SUITE_P(Simd, HostVectorTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

constexpr Shape kVectorShapes[] = {{1, 1}, {4, 1}, {1, 40}, {5, 17}, {3, 64}, {7, 33}};

TEST_P(HostVectorTest, BinaryInstructions) {
  using Tile = UbTile<float>;
  struct Instruction {
    void (*run)(HostVectorCore& core, Tile dst, Tile a, Tile b);
    float (*plain)(float a, float b);
  };
  const Instruction kInstructions[] = {
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Add(dst, a, b); },
       [](float a, float b) { return a + b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Sub(dst, a, b); },
       [](float a, float b) { return a - b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Mul(dst, a, b); },
       [](float a, float b) { return a * b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Div(dst, a, b); },
       [](float a, float b) { return a / b; }},
      {[](HostVectorCore& core, Tile dst, Tile a, Tile b) { core.Max(dst, a, b); },
       [](float a, float b) { return std::max(a, b); }}};
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols), b(DType::kF32, rows, cols), column(DType::kF32, rows, 1);
    a->FillNormal(random_), b->FillNormal(random_), column->FillNormal(random_);
    for (const auto& [run, plain] : kInstructions) {
      Values whole, spread;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          const auto left = static_cast<float>(a->at({i, j}));
          whole.push_back(plain(left, static_cast<float>(b->at({i, j}))));
          spread.push_back(plain(left, static_cast<float>(column->at({i, 0}))));
        }
      }
      const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
      run(vector_, dst, TileOf(a), TileOf(b));
      EXPECT_EQ(ValuesOf(dst), whole);
      const auto in_place = TileOf(a), right = TileOf(b);
      run(vector_, in_place, in_place, right);
      EXPECT_EQ(ValuesOf(in_place), whole);
      EXPECT_EQ(ValuesOf(right), b->ToDoubles());
      const auto broadcast = TileOf(a);
      run(vector_, broadcast, broadcast, ColumnOf(column));
      EXPECT_EQ(ValuesOf(broadcast), spread);
    }
  }
}

TEST_P(HostVectorTest, ScalarInstructionsAndFill) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillNormal(random_);
    Values products, maxima;
    for (double value : a->ToDoubles()) {
      products.push_back(static_cast<float>(value) * 0.3f);
      maxima.push_back(std::max(static_cast<float>(value), 0.25f));
    }
    const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    vector_.MulScalar(dst, TileOf(a), 0.3f);
    EXPECT_EQ(ValuesOf(dst), products);
    const auto in_place = TileOf(a);
    vector_.MaxScalar(in_place, in_place, 0.25f);
    EXPECT_EQ(ValuesOf(in_place), maxima);
    vector_.Fill(in_place, -2.5f);
    EXPECT_EQ(ValuesOf(in_place), Values(Index(rows * cols), -2.5));
  }
}

// An instruction on a part leaves the rest of the tile alone.
TEST_P(HostVectorTest, PartsAreAllThatIsWritten) {
  const auto tile = NewTile<Buffer::kUB, float>(vector_, 9, 50);
  vector_.Fill(tile, 1);
  vector_.Fill(tile.Part({2, 7}, {3, 40}), 2);
  const auto inner = tile.Part({3, 5}, {10, 31});
  vector_.Add(inner, inner, inner);
  vector_.MaskOutside(tile.Part({6, 7}, {20, 25}), 1, 2, -7);
  const Values values = ValuesOf(tile);
  for (std::int64_t i = 0; i < 9; ++i) {
    for (std::int64_t j = 0; j < 50; ++j) {
      double expected = 1;
      if (i >= 2 && i < 7 && j >= 3 && j < 40) expected = 2;
      if (i >= 3 && i < 5 && j >= 10 && j < 31) expected = 4;
      if (i == 6 && j >= 20 && j < 25 && j != 21 && j != 22) expected = -7;
      ASSERT_EQ(values[Index(i * 50 + j)], expected) << i << ", " << j;
    }
  }
}

TEST_P(HostVectorTest, ExpAndLnAreWithinTwoUlp) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillUniform(random_, -80, 80);
    const auto dst = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    Values exact, bound;
    const auto expect = [&, rows = rows, cols = cols](double (*plain)(double)) {
      exact.clear(), bound.clear();
      for (double value : a->ToDoubles()) {
        const double result = plain(value);
        exact.push_back(result);
        // Two units in the last place, and half of one for the comparison with an exact result.
        bound.push_back(2.5 * std::ldexp(1.0, std::ilogb(result) - 23));
      }
      GmMatrix out(DType::kF32, rows, cols);
      vector_.Store(out.gm(), dst);
      ExpectClose(out->view(), exact, bound);
    };
    vector_.Exp(dst, TileOf(a));
    expect([](double x) { return std::exp(x); });
    a->FillUniform(random_, 0.01, 1000);
    vector_.Ln(dst, TileOf(a));
    expect([](double x) { return std::log(x); });
  }
}

TEST_P(HostVectorTest, RowReductions) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillIntegers(random_, -50, 50);
    Values maxima, sums;
    for (std::int64_t i = 0; i < rows; ++i) {
      maxima.push_back(-1e30), sums.push_back(0);
      for (std::int64_t j = 0; j < cols; ++j) {
        maxima.back() = std::max(maxima.back(), a->at({i, j})), sums.back() += a->at({i, j});
      }
    }
    const auto column = NewTile<Buffer::kUB, float>(vector_, rows, 1);
    vector_.RowMax(column, TileOf(a));
    EXPECT_EQ(ValuesOf(column), maxima);
    vector_.RowSum(column, TileOf(a));
    EXPECT_EQ(ValuesOf(column), sums);
    for (bool is_max : {true, false}) {  // Into the first column of the rows themselves.
      const auto tile = TileOf(a);
      is_max ? vector_.RowMax(tile.Cols({0, 1}), tile) : vector_.RowSum(tile.Cols({0, 1}), tile);
      EXPECT_EQ(ValuesOf(tile.Cols({0, 1})), is_max ? maxima : sums);
    }
  }
}

TEST_P(HostVectorTest, MaskOutsideABand) {
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  for (const auto& [rows, cols] : kVectorShapes) {
    for (std::int64_t highest : {-kFar, std::int64_t{-3}, std::int64_t{0}, std::int64_t{20}, kFar}) {
      for (std::int64_t lowest :
           {-kFar, std::int64_t{-100}, std::int64_t{-2}, std::int64_t{0}, std::int64_t{6}}) {
        GmMatrix a(DType::kF32, rows, cols);
        a->FillNormal(random_);
        const auto tile = TileOf(a);
        vector_.MaskOutside(tile, lowest, highest, -kInfinity);
        Values expected = a->ToDoubles();
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            if (j - i < lowest || j - i > highest) expected[Index(i * cols + j)] = -kInfinity;
          }
        }
        EXPECT_EQ(ValuesOf(tile), expected) << "from " << lowest << " to " << highest;
      }
    }
  }
}

TEST_P(HostVectorTest, CastsBetweenFloatTypes) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kF32, rows, cols);
    a->FillNormal(random_, 0, 1000);
    const auto round_trip = [&, rows = rows, cols = cols](auto zero) {
      using T = decltype(zero);
      const auto narrow = NewTile<Buffer::kUB, T>(vector_, rows, cols);
      vector_.Cast(narrow, TileOf(a));
      const Values rounded = Rounded(a->ToDoubles(), DTypeOf<T>());
      EXPECT_EQ(ValuesOf(narrow), rounded);
      const auto wide = NewTile<Buffer::kUB, float>(vector_, rows, cols);
      vector_.Cast(wide, narrow);
      EXPECT_EQ(ValuesOf(wide), rounded);
    };
    round_trip(BF16{}), round_trip(F16{});
  }
}

TEST_P(HostVectorTest, CastsBooleans) {
  for (const auto& [rows, cols] : kVectorShapes) {
    GmMatrix a(DType::kBool, rows, cols);
    a->FillIntegers(random_, 0, 1);
    auto* bytes = static_cast<std::uint8_t*>(a->view().data);
    for (std::int64_t j = 0; j < cols && rows > 0; j += 3) bytes[j] = static_cast<std::uint8_t>(200 + j % 50);
    const auto flags = NewTile<Buffer::kUB, std::uint8_t>(vector_, rows, cols);
    vector_.Load(flags, a.gm());
    const auto floats = NewTile<Buffer::kUB, float>(vector_, rows, cols);
    vector_.Cast(floats, flags);
    EXPECT_EQ(ValuesOf(floats), a->ToDoubles());
    const auto ints = NewTile<Buffer::kUB, std::int32_t>(vector_, rows, cols);
    vector_.Cast(ints, flags);
    EXPECT_EQ(ValuesOf(ints), a->ToDoubles());
  }
}

// ---- Integers

TEST_P(HostVectorTest, IntegerInstructions) {
  const auto tile = NewTile<Buffer::kUB, std::int32_t>(vector_, 3, 21);
  vector_.Fill(tile, 7);
  EXPECT_EQ(ValuesOf(tile), Values(63, 7));
  vector_.Fill(tile.Rows({1, 2}), -3);
  vector_.Add(tile, tile, tile);
  Values expected(63, 14);
  std::fill_n(expected.begin() + 21, 21, -6);
  EXPECT_EQ(ValuesOf(tile), expected);

  const auto wide = IntsOf<std::int64_t>({5, -1, 1 << 30, 0, 2, 3}, 2);
  const auto narrow = NewTile<Buffer::kUB, std::int32_t>(vector_, 2, 3);
  vector_.Cast(narrow, wide);
  EXPECT_EQ(ValuesOf(narrow), (Values{5, -1, 1 << 30, 0, 2, 3}));
}

TEST_P(HostVectorTest, ColumnSums) {
  const auto a = IntsOf<std::int32_t>({1, 2, 3, 4, 50, 60, 70, 80, -9, -9, -9, -9}, 3);
  const auto sums = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, 4);
  vector_.ColumnSum(sums, a);
  EXPECT_EQ(ValuesOf(sums), (Values{42, 53, 64, 75}));
  vector_.ColumnSum(sums, a.Rows({1, 2}));
  EXPECT_EQ(ValuesOf(sums), (Values{50, 60, 70, 80}));
  vector_.ColumnSum(sums, a.Rows({0, 0}));  // No rows.
  EXPECT_EQ(ValuesOf(sums), Values(4, 0));
}

TEST_P(HostVectorTest, ExclusiveScans) {
  for (std::int64_t n : {0, 1, 2, 37}) {
    std::vector<std::int32_t> values(Index(n));
    for (std::int32_t& value : values) value = static_cast<std::int32_t>(random_.Integer(0, 9));
    Values expected{100};
    for (std::int32_t value : values) expected.push_back(expected.back() + value);
    const auto sums = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, n + 1);
    vector_.ExclusiveScan(sums, IntsOf(values), 100);
    EXPECT_EQ(ValuesOf(sums), expected);
  }
}

TEST_P(HostVectorTest, ReadScalars) {
  const auto ints = IntsOf<std::int32_t>({4, -8, 15, 16, -23, 42}, 2);
  EXPECT_EQ(vector_.ReadScalar(ints, 1), -8);
  EXPECT_EQ(vector_.ReadScalar(ints.Rows({1, 2}), 2), 42);
  EXPECT_EQ(vector_.ReadScalar(ints.Part({1, 2}, {1, 3}), 0), -23);
  GmMatrix values(DType::kF32, 3, 5);
  values->FillNormal(random_);
  EXPECT_EQ(vector_.ReadScalar(TileOf(values).Rows({2, 3}), 4), static_cast<float>(values->at({2, 4})));
}

TEST_P(HostVectorTest, HistogramCountsItsRange) {
  const std::vector<std::int32_t> ids{3, 1, 3, 9, -1, 7, 3, 4, 8, 2, 5, 7};
  const auto counts = NewTile<Buffer::kUB, std::int32_t>(vector_, 1, 5);
  vector_.Fill(counts, 10);
  vector_.Histogram(counts, IntsOf(ids, 3), 3);  // Ids 3 to 7.
  EXPECT_EQ(ValuesOf(counts), (Values{13, 11, 11, 10, 12}));
}

TEST_P(HostVectorTest, RankCountsRowByRow) {
  const std::int64_t rows = 6, cols = 7, bins = 5, first = 2;
  std::vector<std::int32_t> ids(Index(rows * cols));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random_.Integer(0, 9));
  std::vector<std::int32_t> next{100, 0, 50, 7, 1000};
  const auto ranks = NewTile<Buffer::kUB, std::int32_t>(vector_, rows, cols);
  vector_.Fill(ranks, -1);
  const auto next_tile = IntsOf(next);
  vector_.Rank(ranks, next_tile, IntsOf(ids, rows), static_cast<std::int32_t>(first));
  Values expected;
  for (std::int32_t id : ids) {
    const std::int64_t bin = id - first;
    expected.push_back(bin < 0 || bin >= bins ? -1 : next[Index(bin)]++);
  }
  EXPECT_EQ(ValuesOf(ranks), expected);
  EXPECT_EQ(ValuesOf(next_tile), Values(next.begin(), next.end()));
}

// ---- Composites: the host's body and the expansion on equal inputs

// exp(x) in fp32 where x carries an absolute error: |e^(x + error) - e^x| and 2 ulp (4 eps) of Exp.
// Results below the normal range may flush to zero.
double ExpBound(double exact, double argument_error) {
  if (exact == 0.0) return 0x1p-126;
  return exact * (std::expm1(argument_error) + 4 * kEps) * kSecondOrder + 0x1p-126;
}

struct SoftmaxValues {
  Values p, m_new, alpha, l;
};

template <class T, class Run>
SoftmaxValues RunSoftmax(HostRig& rig, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l, Run run) {
  const Gm gm = s.gm();
  const auto scores = LoadRows<float>(rig.vector, gm, gm.rows, gm.cols);
  const auto old = LoadRows<float>(rig.vector, m_old.gm(), gm.rows, 1);
  const auto sums = LoadRows<float>(rig.vector, l.gm(), gm.rows, 1);
  const auto m_new = NewTile<Buffer::kUB, float>(rig.vector, gm.rows, 1);
  const auto p = NewTile<Buffer::kUB, T>(rig.vector, gm.rows, gm.cols);
  run(p, scores, m_new, old, sums);
  const auto values = [&](auto tile) {
    GmMatrix out(tile.slot->dtype, tile.rows(), tile.cols());
    rig.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  };
  return {values(p), values(m_new), values(old), values(sums)};
}

// One rounding each of scale * s and of the difference move the argument by eps (|scale s| + |scale s - m|);
// the fused forms round less. A sum of c terms rounds c + 1 times.
template <class T>
void CheckSoftmax(const SoftmaxValues& got, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l,
                  float scale, const char* what) {
  const std::int64_t rows = s->size(0), cols = s->size(1);
  for (std::int64_t i = 0; i < rows; ++i) {
    SCOPED_TRACE(std::string(what) + ", row " + std::to_string(i));
    double m = m_old->at({i, 0});
    for (std::int64_t j = 0; j < cols; ++j)
      m = std::max<double>(m, static_cast<float>(s->at({i, j})) * scale);
    ASSERT_EQ(got.m_new[Index(i)], m);
    const double old = m_old->at({i, 0}), alpha = std::exp(old - m);
    const double alpha_bound = ExpBound(alpha, kEps * std::abs(old - m));
    ASSERT_NEAR(got.alpha[Index(i)], alpha, alpha_bound);
    double sum = 0, sum_bound = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      const double scaled = s->at({i, j}) * static_cast<double>(scale), exact = std::exp(scaled - m);
      const double bound =
          ExpBound(exact, std::isinf(scaled) ? 0 : kEps * (std::abs(scaled) + std::abs(scaled - m)));
      const double unit = DTypeOf<T>() == DType::kF32 ? 0 : UnitRoundoff(DTypeOf<T>());
      const double subnormal = DTypeOf<T>() == DType::kF16 ? 0x1p-25 : 0;
      ASSERT_NEAR(got.p[Index(i * cols + j)], exact, bound + unit * (exact + bound) + subnormal)
          << "column " << j;
      sum += exact, sum_bound += bound;
    }
    const double total = l->at({i, 0}) * alpha + sum;
    const double bound =
        sum_bound + l->at({i, 0}) * alpha_bound + static_cast<double>(cols + 2) * kEps * total;
    ASSERT_NEAR(got.l[Index(i)], total, kSecondOrder * bound);
  }
}

TEST_P(HostVectorTest, SoftmaxStepIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] : {Shape{1, 1}, Shape{3, 33}, Shape{5, 64}, Shape{2, 300}}) {
      HostRig rig;
      GmMatrix s(DType::kF32, rows, cols), m_old(DType::kF32, rows, 1), l(DType::kF32, rows, 1);
      s->FillNormal(random_, 0, 20), m_old->FillNormal(random_, 0, 5), l->FillUniform(random_, 1, 9);
      s->set({0, cols - 1}, -kInfinity);
      if (rows > 1) {  // A first step, all masked.
        m_old->set({1, 0}, std::numeric_limits<float>::lowest()), l->set({1, 0}, 0);
        for (std::int64_t j = 0; j < cols; ++j) s->set({1, j}, -kInfinity);
      }
      if (rows > 2) m_old->set({2, 0}, std::numeric_limits<float>::lowest()), l->set({2, 0}, 0);
      constexpr float kScale = 0.3f;
      const SoftmaxValues body =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            rig.vector.SoftmaxStep(p, x, m_new, m, sum, kScale);
          });
      HostVector executor(rig.context, 0);
      const SoftmaxValues expansion =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            ExpandSoftmaxStep(executor, p, x, m_new, m, sum, kScale, Loc::current());
          });
      CheckSoftmax<T>(body, s, m_old, l, kScale, "body");
      CheckSoftmax<T>(expansion, s, m_old, l, kScale, "expansion");
      EXPECT_EQ(body.m_new, expansion.m_new);
    }
  });
}

TEST_P(HostVectorTest, MulAddIsItsExpansion) {
  for (const auto& [rows, cols] : kVectorShapes) {
    for (bool column : {true, false}) {
      GmMatrix acc(DType::kF32, rows, cols), x(DType::kF32, rows, cols),
          factor(DType::kF32, rows, column ? 1 : cols);
      acc->FillNormal(random_), x->FillNormal(random_), factor->FillNormal(random_);
      const auto factor_tile = [&] { return column ? ColumnOf(factor) : TileOf(factor); };
      const auto body = TileOf(acc), expansion = TileOf(acc);
      vector_.MulAdd(body, factor_tile(), TileOf(x));
      HostVector executor(rig_.context, 0);
      ExpandMulAdd(executor, expansion, factor_tile(), TileOf(x), Loc::current());
      const Values fused = ValuesOf(body), separate = ValuesOf(expansion);
      for (std::int64_t i = 0; i < rows * cols; ++i) {
        const double f = factor->at({i / cols, column ? 0 : i % cols});
        const double product = acc->at({i / cols, i % cols}) * f, sum = product + x->at({i / cols, i % cols});
        ASSERT_NEAR(fused[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
        ASSERT_NEAR(separate[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
      }
    }
  }
}

TEST_P(HostVectorTest, WeightedSumIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t count : {0, 1, 3, 8, 16}) {
      for (std::int64_t cols : {1, 40, 131}) {
        for (Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
          HostRig rig;
          GmMatrix x(DTypeOf<T>(), count, cols), acc(DType::kF32, 1, cols);
          x->FillNormal(random_), acc->FillNormal(random_);
          std::vector<float> weights;
          std::vector<UbTile<T>> rows;
          std::vector<TileRef> refs;
          for (std::int64_t i = 0; i < count; ++i) {
            weights.push_back(static_cast<float>(random_.Normal()));
            const Role role = i % 2 == 0 ? Role::kRelay : Role::kRows;
            rows.push_back(NewTile<Buffer::kUB, T>(rig.vector, 1, cols, role));
            rig.vector.Load(rows.back(), x.gm().Rows({i, i + 1}));
            refs.emplace_back(rows.back());
          }
          const auto run = [&](auto body) {
            const auto sum = LoadRows<float>(rig.vector, acc.gm(), 1, cols);
            body(sum, NewTile<Buffer::kUB, float>(rig.vector, 1, cols));
            GmMatrix out(DType::kF32, 1, cols);
            rig.vector.Store(out.gm(), sum);
            return out->ToDoubles();
          };
          const Values body = run([&](auto sum, auto scratch) {
            rig.vector.WeightedSum(sum, scratch, std::span<const UbTile<T>>(rows),
                                   std::span<const float>(weights), accumulate);
          });
          HostVector executor(rig.context, 0);
          const Values expansion = run([&](auto sum, auto scratch) {
            ExpandWeightedSum(executor, sum, scratch, refs, weights, accumulate, Loc::current());
          });
          for (std::int64_t j = 0; j < cols; ++j) {
            double sum = accumulate == Accumulate::kYes ? acc->at({0, j}) : 0, magnitude = std::abs(sum);
            for (std::int64_t i = 0; i < count; ++i) {
              const double term = static_cast<double>(weights[Index(i)]) * x->at({i, j});
              sum += term, magnitude += std::abs(term);
            }
            // Every term is rounded once as a product and at most count + 1 times in the sum.
            const double bound = kSecondOrder * static_cast<double>(count + 2) * kEps * magnitude;
            ASSERT_NEAR(body[Index(j)], sum, bound) << count << " rows, column " << j;
            ASSERT_NEAR(expansion[Index(j)], sum, bound) << count << " rows, column " << j;
          }
        }
      }
    }
  });
}

// ---- What the typed front refuses

class HostCoreDeathTest : public ::testing::Test {
 protected:
  HostCoreDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  HostRig rig_;
};

TEST_F(HostCoreDeathTest, ATileWhoseSlotWasReusedNamesItsRing) {
  Ring<Buffer::kUB, float> ring(rig_.vector, "scores_ub", 4, 8, 2);
  const auto stale = ring.Next(4, 8);
  ring.Next(4, 8);
  rig_.vector.Fill(stale, 1);  // Two stages: still its own.
  ring.Next(4, 8);
  EXPECT_DEATH(rig_.vector.Fill(stale, 1), "scores_ub: tile used after its slot was reused");
  EXPECT_DEATH(rig_.vector.Exp(ring.Next(2, 2), stale.Part({0, 2}, {0, 2})), "scores_ub: tile used after");
  Ring<Buffer::kL0C, float> acc_ring(rig_.core, "acc_l0", 4, 8, 1);
  const auto acc = acc_ring.Next(4, 8);
  acc_ring.Next(4, 8);
  EXPECT_DEATH(rig_.vector.Move(ring.Next(4, 8), acc), "acc_l0: tile used after its slot was reused");
}

TEST_F(HostCoreDeathTest, ATileLargerThanItsSlotNamesItsRing) {
  Ring<Buffer::kL1, BF16> ring(rig_.core, "a_l1", 4, 8, 1, Role::kA);
  EXPECT_DEATH(ring.Next(5, 8), "a_l1: tile larger than its slot");
  EXPECT_DEATH(ring.Next(4, 9), "a_l1: tile larger than its slot");
}

TEST_F(HostCoreDeathTest, ShapesMustAgree) {
  GmMatrix gm(DType::kF32, 4, 8);
  const auto a = NewTile<Buffer::kUB, float>(rig_.vector, 4, 8),
             b = NewTile<Buffer::kUB, float>(rig_.vector, 4, 7);
  const auto a0 = NewTile<Buffer::kL0A, float>(rig_.core, 4, 8, Role::kA);
  const auto b0 = NewTile<Buffer::kL0B, float>(rig_.core, 7, 5, Role::kB);
  const auto acc = NewTile<Buffer::kL0C, float>(rig_.core, 4, 5);
  EXPECT_DEATH(rig_.vector.Load(b, gm.gm()), "shapes differ");
  EXPECT_DEATH(rig_.vector.Store(gm.gm(), b), "shapes differ");
  EXPECT_DEATH(rig_.vector.Add(a, a, b), "shapes differ");
  EXPECT_DEATH(rig_.vector.RowMax(b.Cols({0, 2}), b), "shapes differ");
  EXPECT_DEATH(rig_.core.Mmad(acc, a0, b0, Accumulate::kNo), "shapes do not multiply");
  EXPECT_DEATH(rig_.vector.Move(a, acc), "shapes differ");
}

TEST_F(HostCoreDeathTest, LoadsDoNotConvertUnasked) {
  GmMatrix narrow(DType::kBF16, 4, 8), wide(DType::kF32, 4, 8), ids(DType::kI64, 4, 8);
  EXPECT_DEATH(rig_.core.Load(NewTile<Buffer::kL1, F16>(rig_.core, 4, 8, Role::kA), narrow.gm()),
               "Load to L1 does not convert");
  EXPECT_DEATH(rig_.vector.Load(NewTile<Buffer::kUB, BF16>(rig_.vector, 4, 8), wide.gm()),
               "widens to float only");
  EXPECT_DEATH(rig_.vector.Load(NewTile<Buffer::kUB, std::int32_t>(rig_.vector, 4, 8), ids.gm()),
               "widens to float only");
  EXPECT_DEATH(rig_.vector.Store(wide.gm(), NewTile<Buffer::kUB, BF16>(rig_.vector, 4, 8)),
               "narrows floats only");
}

TEST_F(HostCoreDeathTest, PackedBlocksBeginAtPanels) {
  const std::int64_t step = BestCubeOps().nr;
  const PackedMatrix packed(Role::kB, DType::kF32, 8, 2 * step, 1);
  EXPECT_DEATH(rig_.core.Load(NewTile<Buffer::kL1, float>(rig_.core, 8, step, Role::kB),
                              packed.gm().Block({0, 8}, {1, step + 1})),
               "begins inside a panel");
}

}  // namespace
}  // namespace cubist
