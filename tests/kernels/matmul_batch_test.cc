// Batches of products, and products of vectors, through the public call alone, on both executors.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "kernels/pack_operand.h"
#include "npu_model/tuning.h"
#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

const std::vector<Device>& BothExecutors() {
  static const std::vector<Device> devices = {Host(), NpuWithData(Ascend910B2())};
  return devices;
}

// The matrix of t at a place of a batch of so many dimensions; those of t are the batch's, or 1, or missing.
template <class AnyTensor>
AnyTensor At(AnyTensor t, const Index& place, int batch) {
  AnyTensor one = t;
  std::int64_t offset = 0;
  for (int d = 0; d < t.rank - 2; ++d) {
    if (t.size(d) > 1) offset += place[static_cast<std::size_t>(d + 2 + batch - t.rank)] * t.stride(d);
  }
  using Bytes = std::conditional_t<std::is_same_v<AnyTensor, Tensor>, char, const char>;
  one.data = static_cast<Bytes*>(t.data) + offset * SizeOf(t.dtype);
  one.rank = 2;
  one.sizes = {t.size(t.rank - 2), t.size(t.rank - 1)},
  one.strides = {t.stride(t.rank - 2), t.stride(t.rank - 1)};
  return one;
}

// A matrix, or a stack of them, packed for a device.
class Packed {
 public:
  Packed(const Device& device, Side side, const ConstTensor& source) {
    const int batch = source.rank - 2;
    const std::int64_t matrices = batch == 0 ? 1 : source.size(0),
                       bytes = PackedOperandBytes(device, side, source.dtype, source.size(batch),
                                                  source.size(batch + 1), matrices);
    memory_.resize(static_cast<std::size_t>(bytes + kPackedAlignment));
    void* data = memory_.data();
    std::size_t space = memory_.size();
    std::align(kPackedAlignment, static_cast<std::size_t>(bytes), data, space);
    EXPECT_TRUE(
        IsOk(PackOperand(device, {.source = source, .side = side, .data = data, .bytes = bytes}, &operand_)));
  }
  const PackedOperand& operand() const { return operand_; }

 private:
  std::vector<std::byte> memory_;
  PackedOperand operand_;
};

// A batch is its products one by one, bit for bit.
void ExpectBatchIsItsProducts(const Device& device, const MatmulArgs& args, Matrix* c) {
  ASSERT_TRUE(IsOk(Matmul(device, args)));
  const int batch = args.c.rank - 2;
  ConstTensor places = args.c;
  places.rank = batch;
  ForEachElement(places, [&](const Index& place, std::int64_t offset) {
    SCOPED_TRACE(Join("matrix at ", offset));
    Matrix single(args.c.dtype, {args.c.size(batch), args.c.size(batch + 1)});
    MatmulArgs one = args;
    one.a = At(args.a, place, batch), one.b = At(args.b, place, batch), one.c = single.view();
    if (args.residual.given()) one.residual = At(args.residual, place, batch);
    ASSERT_TRUE(IsOk(Matmul(device, one)));
    ExpectSameBits(At(args.c, place, batch), single.view());
  });
  ExpectGuards(*c);
}

TEST(MatmulBatchTest, EveryBroadcast) {
  const std::int64_t m = 19, n = 37, k = 23;
  for (const DType in : kFloatTypes) {
    for (int transposes = 0; transposes < 4; ++transposes) {
      const bool ta = (transposes & 1) != 0, tb = (transposes & 2) != 0;
      const std::int64_t am = ta ? k : m, ak = ta ? m : k, bk = tb ? n : k, bn = tb ? k : n;
      std::vector<Matrix> as, bs;
      as.emplace_back(in, std::initializer_list<std::int64_t>{am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{3, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{3, bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{2, 1, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{2, 1, bk, bn});
      as.emplace_back(in, std::initializer_list<std::int64_t>{2, 3, am, ak});
      bs.emplace_back(in, std::initializer_list<std::int64_t>{2, 3, bk, bn});
      Random random;
      for (Matrix& x : as) x.FillNormal(random);
      for (Matrix& x : bs) x.FillNormal(random);
      for (std::size_t i = 0; i < 16; ++i) {
        SCOPED_TRACE(Join(NameOf(in), " ", transposes, " case ", i));
        Matrix c(DType::kF32, {2, 3, m, n});
        ExpectBatchIsItsProducts(BothExecutors()[(i + static_cast<std::size_t>(transposes)) % 2],
                                 {.a = as[i % 4].view(),
                                  .b = bs[i / 4].view(),
                                  .c = c.view(),
                                  .transpose_a = ta,
                                  .transpose_b = tb},
                                 &c);
      }
    }
  }
}

// Rows that go on from matrix to matrix become one product; with bias, residual and activation too.
TEST(MatmulBatchTest, SharedWeights) {
  for (const Layout& layout : {kContiguous, Layout{}}) {
    for (const std::int64_t m : {1, 5, 40}) {
      for (const Device& device : BothExecutors()) {
        Random random;
        Matrix a(DType::kBF16, {2, 3, m, 50}, layout), b(DType::kBF16, {50, 70}), bias(DType::kF32, {70}),
            residual(DType::kBF16, {2, 3, m, 70}, layout), c(DType::kBF16, {2, 3, m, 70}, layout);
        a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random), residual.FillNormal(random);
        ExpectBatchIsItsProducts(device,
                                 {.a = a.view(),
                                  .b = b.view(),
                                  .bias = bias.view(),
                                  .c = c.view(),
                                  .alpha = 0.5f,
                                  .residual = residual.view(),
                                  .activation = Activation::kSilu},
                                 &c);
      }
    }
  }
}

// A stride of 0 repeats a matrix, and packed operands serve a batch, one for all or one each.
TEST(MatmulBatchTest, RepeatedAndPacked) {
  for (const DType in : kFloatTypes) {
    for (const Device& device : BothExecutors()) {
      Random random;
      Matrix a(in, {4, 33, 50}), b(in, {4, 50, 70}), c(DType::kF32, {4, 33, 70}),
          again(DType::kF32, {4, 33, 70});
      a.FillNormal(random), b.FillNormal(random);
      MatmulArgs args{.a = a.view(), .b = b.view(), .c = c.view()};
      args.b.strides[0] = 0;
      ASSERT_TRUE(IsOk(Matmul(device, args)));
      for (const bool each : {false, true}) {
        ConstTensor source = b.view();
        if (each) {
          args.b = b.view();
          ASSERT_TRUE(IsOk(Matmul(device, args)));
        } else {
          source = At(ConstTensor(b.view()), Index{}, 1);
        }
        const Packed packed(device, Side::kB, source);
        ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .c = again.view(), .packed_b = packed.operand()})));
        ExpectSameBits(again.view(), c.view());
      }
    }
  }
}

// Long sums are cut into parts, by the shape alone: rows of a batch that strides let merge, and those that they do not, have
// the same bits, packed operands too.
TEST(MatmulBatchTest, LongSumsHaveTheSameBitsHoweverTheyAreStored) {
  struct Sizes {
    std::int64_t batch, m, n, k;
  };
  for (const Sizes& s : {Sizes{4, 2, 16, 4096}, {8, 1, 8, 4100}, {3, 30, 1, 5000}, {16, 16, 40, 2048}}) {
    for (const DType in : {DType::kF32, DType::kBF16}) {
      Random random;
      Matrix a(in, {s.batch, s.m, s.k}, kContiguous), apart(in, {s.batch, s.m, s.k}),
          in_columns(in, {s.batch, s.m, s.k}, {.order = {0, 2, 1, 3, 4, 5}}), b(in, {s.k, s.n});
      a.FillNormal(random), b.FillNormal(random);
      Assign(apart.view(), a.ToDoubles()), Assign(in_columns.view(), a.ToDoubles());
      for (const Device& device : BothExecutors()) {
        SCOPED_TRACE(
            Join(NameOf(in), " ", s.batch, "x", s.m, "x", s.n, "x", s.k, " on ", device.chip().name));
        const Packed packed_a(device, Side::kA, a.view()), packed_b(device, Side::kB, b.view());
        Matrix expected(DType::kF32, {s.batch, s.m, s.n}, kContiguous), c(DType::kF32, {s.batch, s.m, s.n});
        ASSERT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = expected.view()})));
        const MatmulArgs others[] = {
            {.a = apart.view(), .b = b.view(), .c = c.view()},
            {.a = in_columns.view(), .b = b.view(), .c = c.view()},
            {.b = b.view(), .c = c.view(), .packed_a = packed_a.operand()},
            {.a = a.view(), .c = c.view(), .packed_b = packed_b.operand()},
        };
        for (std::size_t i = 0; i < std::size(others); ++i) {
          SCOPED_TRACE(Join("storage ", i));
          c.FillNaN();
          ASSERT_TRUE(IsOk(Matmul(device, others[i])));
          ExpectSameBits(c.view(), expected.view());
        }
      }
    }
  }
}

TEST(MatmulBatchTest, EmptyBatches) {
  for (const Device& device : BothExecutors()) {
    Matrix a(DType::kF32, {0, 3, 4}), b(DType::kF32, {4, 5}), c(DType::kF32, {0, 3, 5});
    EXPECT_TRUE(IsOk(Matmul(device, {.a = a.view(), .b = b.view(), .c = c.view()})));
    Matrix one(DType::kF32, {1, 1, 3, 4}), result(DType::kF32, {1, 1, 3, 5});
    Random random;
    one.FillIntegers(random), b.FillIntegers(random);
    EXPECT_TRUE(IsOk(Matmul(device, {.a = one.view(), .b = b.view(), .c = result.view()})));
    ExpectExactly(result.view(), reference::Matmul(At(one.view(), Index{}, 2), false, b.view(), false, {}).c);
  }
}

// Four dimensions that no operand lets be put together.
struct ManyDimensions {
  explicit ManyDimensions(DType in, const Layout& layout = {}, std::int64_t m = 19)
      : a(in, {2, 1, 2, 1, m, 23}, layout),
        b(in, {3, 1, 4, 23, 37}, layout),
        residual(DType::kF32, {3, 2, 1, m, 37}, layout),
        c(DType::kF32, {2, 3, 2, 4, m, 37}, layout) {
    Random random;
    a.FillNormal(random), b.FillNormal(random), residual.FillNormal(random);
  }
  MatmulArgs args() { return {.a = a.view(), .b = b.view(), .c = c.view(), .residual = residual.view()}; }

  Matrix a, b, residual, c;
};

TEST(MatmulBatchTest, FourDimensions) {
  const Layout turned{.order = {5, 2, 0, 4, 1, 3}};
  for (const DType in : kFloatTypes) {
    for (const Device& device : BothExecutors()) {
      for (const Layout& layout : {Layout{}, turned}) {
        ManyDimensions x(in, layout);
        ExpectBatchIsItsProducts(device, x.args(), &x.c);
      }
      Random random;
      Matrix a(in, {3, 2, 4, 9, 21}), b(in, {21, 35}), c(in, {3, 2, 4, 9, 35});  // One product of 216 rows.
      a.FillNormal(random), b.FillNormal(random);
      ExpectBatchIsItsProducts(device, {.a = a.view(), .b = b.view(), .c = c.view()}, &c);
    }
  }
}

// Copies that a call packs for itself, and ones that its caller packed, are of every matrix.
TEST(MatmulBatchTest, FourDimensionsPacked) {
  for (const Device& device : BothExecutors()) {
    ManyDimensions x(DType::kBF16, {}, /*m=*/300);  // More than a block of rows, or nothing would be packed.
    ASSERT_TRUE(IsOk(Matmul(device, x.args())));
    const Matrix expected = x.c;
    auto tuning = std::make_shared<Tuning>();
    Tuning listening;
    listening.on_choice = [&](const TilingChoice& choice) {
      std::string packs = "pack_a=1,pack_b=1";
      if (device.kind() ==
          Device::Kind::kHost) {  // Which takes a tiling of its own alone, and reads A in place.
        const auto found = std::find_if(
            choice.candidates.begin(), choice.candidates.end(),
            [](const TilingChoice::Candidate& c) { return c.tiling.find("pack_b=1") != std::string::npos; });
        ASSERT_NE(found, choice.candidates.end());
        packs = found->tiling;
      }
      tuning->Set(choice.kernel, choice.chip, choice.shape, packs);
    };
    const auto with = [&](std::shared_ptr<const Tuning> of) {
      return device.kind() == Device::Kind::kHost ? Host({.tuning = of})
                                                  : Npu(Ascend910B2(), {.with_data = true, .tuning = of});
    };
    ASSERT_TRUE(IsOk(Matmul(with(std::make_shared<const Tuning>(listening)), x.args())));
    x.c.FillNaN();
    ASSERT_TRUE(IsOk(Matmul(with(tuning), x.args())));
    ExpectSameBits(x.c.view(), expected.view());

    // All that c's batch has, in its order: b's, each as often as it serves.
    Matrix all(DType::kBF16, {48, 23, 37});
    for (std::int64_t i = 0; i < 48; ++i) {
      Tensor one = all.view();
      one.data = static_cast<BF16*>(one.data) + i * one.stride(0);
      one.rank = 2, one.sizes = {23, 37}, one.strides = {one.stride(1), one.stride(2)};
      const ConstTensor from = At(ConstTensor(x.b.view()), {i / 24, i / 8 % 3, i / 4 % 2, i % 4}, 4);
      Assign(one, ToDoubles(from));
    }
    const Packed packed(device, Side::kB, all.view());
    MatmulArgs args = x.args();
    args.b = {}, args.packed_b = packed.operand();
    x.c.FillNaN();
    ASSERT_TRUE(IsOk(Matmul(device, args)));
    ExpectSameBits(x.c.view(), expected.view());
  }
}

// ---- Vectors ----

// A view without the dimension `d`, which has one element.
template <class AnyTensor>
AnyTensor Without(AnyTensor t, int d) {
  for (auto at = static_cast<std::size_t>(d); at + 1 < t.sizes.size(); ++at)
    t.sizes[at] = t.sizes[at + 1], t.strides[at] = t.strides[at + 1];
  --t.rank;
  return t;
}

// A call of matrices of one row or column has the bits of that with vectors in their places, the first time and again.
void ExpectVectorsAreMatrices(const Device& device, const MatmulArgs& matrices, bool row, bool column,
                              Matrix* c) {
  ASSERT_TRUE(IsOk(Matmul(device, matrices)));
  const Matrix expected = *c;
  MatmulArgs vectors = matrices;
  const auto squeeze = [&](auto* t) {
    if (!t->given()) return;
    if (row) *t = Without(*t, t->rank - 2);
    if (column && t->rank > 1) *t = Without(*t, t->rank - 1);
  };
  squeeze(&vectors.c), squeeze(&vectors.residual);
  if (row) vectors.a = Without(vectors.a, 0);
  if (column) vectors.b = Without(vectors.b, 1);
  for (int call = 0; call < 2; ++call) {
    c->FillNaN();
    ASSERT_TRUE(IsOk(Matmul(device, vectors)));
    ExpectSameBits(c->view(), expected.view());
    ExpectGuards(*c);
  }
}

TEST(MatmulVectorTest, AreMatricesOfOneRowOrColumn) {
  for (const Device& device : BothExecutors()) {
    for (const DType in : kFloatTypes) {
      for (const Layout& layout : {kContiguous, Layout{}, Layout{.gap = 5, .step = 3}}) {
        SCOPED_TRACE(NameOf(in));
        Random random;
        Matrix row(in, {1, 65}, layout), column(in, {65, 1}, layout), a(in, {37, 65}, layout),
            b(in, {65, 70}, layout);
        Matrix of_row(DType::kF32, {1, 70}), of_column(in, {37, 1}, layout), of_both(DType::kF32, {1, 1});
        for (Matrix* x : {&row, &column, &a, &b}) x->FillNormal(random);
        ExpectVectorsAreMatrices(device, {.a = row.view(), .b = b.view(), .c = of_row.view()}, true, false,
                                 &of_row);
        ExpectVectorsAreMatrices(device, {.a = a.view(), .b = column.view(), .c = of_column.view()}, false,
                                 true, &of_column);
        ExpectVectorsAreMatrices(device, {.a = row.view(), .b = column.view(), .c = of_both.view()}, true,
                                 true, &of_both);
      }
    }
  }
}

// A vector serves a batch of matrices; epilogues go as they do.
TEST(MatmulVectorTest, ServeABatch) {
  for (const Device& device : BothExecutors()) {
    Random random;
    Matrix row(DType::kBF16, {1, 33}), column(DType::kBF16, {33, 1}), a(DType::kBF16, {3, 2, 2, 2, 20, 33}),
        b(DType::kBF16, {4, 3, 33, 50}), bias(DType::kF32, {50});
    Matrix rows(DType::kF32, {4, 3, 1, 50}), residual(DType::kF32, {4, 1, 1, 50}),
        columns(DType::kF32, {3, 2, 2, 2, 20, 1});
    for (Matrix* x : {&row, &column, &a, &b, &bias, &residual}) x->FillNormal(random);
    ExpectVectorsAreMatrices(device,
                             {.a = row.view(),
                              .b = b.view(),
                              .bias = bias.view(),
                              .c = rows.view(),
                              .alpha = 0.5f,
                              .residual = residual.view(),
                              .activation = Activation::kSilu},
                             true, false, &rows);
    ExpectVectorsAreMatrices(device, {.a = a.view(), .b = column.view(), .c = columns.view()}, false, true,
                             &columns);
  }
}

TEST(MatmulVectorTest, OfNothing) {
  for (const Device& device : BothExecutors()) {
    Matrix row(DType::kF32, {0}), b(DType::kF32, {0, 5}), c(DType::kF32, {5}), number(DType::kF32, {1});
    EXPECT_TRUE(IsOk(Matmul(device, {.a = row.view(), .b = b.view(), .c = c.view()})));
    ExpectExactly(c.view(), std::vector<double>(5, 0.0));
    EXPECT_TRUE(IsOk(Matmul(device, {.a = row.view(), .b = row.view(), .c = number.view()})));
    ExpectExactly(number.view(), std::vector<double>(1, 0.0));
  }
}

}  // namespace
}  // namespace cubist::testing
