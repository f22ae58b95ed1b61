// The instruction bodies against their definitions, on every SIMD target that this CPU can run.
//
// Every operand ends at the end of a page with an inaccessible page behind it, so that a read or write beyond
// it crashes, and everything between and before its rows holds NaN bits, which must neither change nor reach
// a result.
#include "npu_model/host/tile_ops.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

// The targets that cube_ops.cc and vector_ops.cc are compiled for.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)
#include "hwy/targets.h"
#include "npu_model/host/attention_ops.h"

namespace cubist {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kEps = 0x1p-24;  // Unit roundoff of fp32.

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A row-major matrix between guards. `room`: how many elements of a row may be written, at least `cols`.
template <class T>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, std::int64_t pitch, std::int64_t room = 0)
      : rows_(rows), cols_(cols), pitch_(pitch), room_(std::max(cols, room)) {
    const std::size_t page = Index(sysconf(_SC_PAGESIZE));
    const std::size_t extent = Index(rows == 0 ? 0 : (rows - 1) * pitch + room_) * sizeof(T);
    body_ = (extent / page + 2) * page;  // At least one page of guard in front.
    memory_ = static_cast<std::uint8_t*>(
        mmap(nullptr, body_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(memory_, MAP_FAILED);
    std::memset(memory_, 0xff, body_);
    EXPECT_EQ(mprotect(memory_ + body_, page, PROT_NONE), 0);
    data_ = reinterpret_cast<T*>(memory_ + body_ - extent);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  ~Matrix() {
    ExpectGuards();
    munmap(memory_, body_ + Index(sysconf(_SC_PAGESIZE)));
  }

  T* data() const { return data_; }
  T& operator()(std::int64_t i, std::int64_t j) const { return data_[i * pitch_ + j]; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  Rows view() const { return {.data = data_, .pitch = pitch_, .rows = rows_, .cols = cols_}; }

  template <class Generator>
  void Fill(Generator generate) const {
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (std::int64_t j = 0; j < cols_; ++j) (*this)(i, j) = T(generate());
    }
  }

 private:
  void ExpectGuards() const {
    const auto untouched = [](const std::uint8_t* begin, const std::uint8_t* end) {
      return std::all_of(begin, end, [](std::uint8_t byte) { return byte == 0xff; });
    };
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(data_);
    EXPECT_TRUE(untouched(memory_, bytes)) << "written before the matrix";
    for (std::int64_t i = 0; i + 1 < rows_; ++i) {
      EXPECT_TRUE(untouched(reinterpret_cast<const std::uint8_t*>(data_ + i * pitch_ + room_),
                            reinterpret_cast<const std::uint8_t*>(data_ + (i + 1) * pitch_)))
          << "written between rows " << i << " and " << i + 1;
    }
  }

  std::int64_t rows_, cols_, pitch_, room_;
  std::size_t body_ = 0;
  std::uint8_t* memory_ = nullptr;
  T* data_ = nullptr;
};

// Random operands: small integers, which are exact everywhere, or reals.
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float Small() { return static_cast<float>(std::uniform_int_distribution<int>(-4, 4)(engine_)); }
  float Real(float low = -1.0f, float high = 1.0f) {
    return std::uniform_real_distribution<float>(low, high)(engine_);
  }

 private:
  std::mt19937 engine_;
};

std::uint32_t BitsOf(float value) { return std::bit_cast<std::uint32_t>(value); }
std::uint32_t BitsOf(BF16 value) { return value.bits; }
std::uint32_t BitsOf(F16 value) { return value.bits; }

class TileOpsTest : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    cube_ = &BestCubeOps();
    vector_ = &BestVectorOps();
    ASSERT_STREQ(cube_->target, hwy::TargetName(GetParam()));
    ASSERT_STREQ(vector_->target, hwy::TargetName(GetParam()));
    lanes_ = cube_->nr / 2;
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  // Column counts around every loop bound of a body that takes up to four vectors at a time.
  std::vector<std::int64_t> Columns() const {
    std::vector<std::int64_t> columns;
    for (std::int64_t n = 1; n <= 3 * lanes_ + 1; ++n) columns.push_back(n);
    for (std::int64_t n : {4 * lanes_, 4 * lanes_ + 1, 7 * lanes_ + 3, 9 * lanes_ - 1}) columns.push_back(n);
    return columns;
  }

  const CubeOps* cube_ = nullptr;
  const VectorOps* vector_ = nullptr;
  std::int64_t lanes_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Targets, TileOpsTest, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST(TileOps, UsesTheBestTargetByDefault) {
  const std::int64_t best = hwy::SupportedAndGeneratedTargets().front();
  EXPECT_STREQ(BestCubeOps().target, hwy::TargetName(best));
  EXPECT_STREQ(BestVectorOps().target, hwy::TargetName(best));
#if defined(__x86_64__)
  if (best <= HWY_AVX3) {
    EXPECT_EQ(BestCubeOps().native_bf16, __builtin_cpu_supports("avx512bf16") != 0);
  }
#endif
}

// ---- Mmad

// The operands of one Mmad in the layouts of MmadArgs, written from the header's formula.
template <class T>
struct MmadOperands {
  static constexpr std::int64_t kPerWord = 4 / static_cast<std::int64_t>(sizeof(T));

  MmadOperands(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t nr)
      : nr(nr),
        a(m, RoundUp(k, kPerWord), k + 5),
        panels(CeilDiv(n, nr), RoundUp(k, kPerWord) * nr, k * nr + 3 * nr + 1),
        bias(1, n, n),
        c(m, n, RoundUp(n, nr) + 3, RoundUp(n, nr)) {
    args = {.m = m,
            .n = n,
            .k = k,
            .a = a.data(),
            .a_pitch = k + 5,
            .b = panels.data(),
            .b_panel_stride = k * nr + 3 * nr + 1,
            .c = c.data(),
            .c_pitch = RoundUp(n, nr) + 3};
  }
  template <class Generator>
  void Fill(Generator generate) {
    a.Fill([] { return 0.0f; });
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

TEST_P(TileOpsTest, MmadF32) { CheckMmadShapes<float>(cube_->mmad_f32, cube_->mr, cube_->nr); }

TEST_P(TileOpsTest, MmadBF16) {
  ASSERT_EQ(cube_->native_bf16, cube_->mmad_bf16 != nullptr);
  ASSERT_EQ(cube_->native_bf16, cube_->peak_dot_bf16 != nullptr);
  if (!cube_->native_bf16) GTEST_SKIP() << "bf16 is widened on this target";
  CheckMmadShapes<BF16>(cube_->mmad_bf16, cube_->mr, cube_->nr);
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
  const std::int64_t k_padded = RoundUp(k, 4 / static_cast<std::int64_t>(sizeof(To)));
  Matrix<To> packed(m, k_padded, k_padded + 3);
  cube.pack_a(DTypeOf<From>(), m, k, source.view, packed.data(), k_padded + 3);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k_padded; ++p) {
      const To expected = p < k ? To(static_cast<float>(source.At(i, p))) : To(0.0f);
      ASSERT_EQ(BitsOf(packed(i, p)), BitsOf(expected)) << "at " << i << ", " << p;
    }
  }
}

template <class From, class To>
void CheckPackB(const CubeOps& cube, std::int64_t k, std::int64_t n, typename Source<From>::Layout layout) {
  SCOPED_TRACE(std::to_string(k) + "x" + std::to_string(n) + " layout " +
               std::to_string(static_cast<int>(layout)));
  const Source<From> source(k, n, layout);
  const std::int64_t per_word = 4 / static_cast<std::int64_t>(sizeof(To)), nr = cube.nr;
  const std::int64_t panel = RoundUp(k, per_word) * nr;
  Matrix<To> packed(CeilDiv(n, nr), panel, panel + 3);
  cube.pack_b(DTypeOf<From>(), k, n, source.view, packed.data(), panel + 3);
  for (std::int64_t p = 0; p < RoundUp(k, per_word); ++p) {
    for (std::int64_t j = 0; j < RoundUp(n, nr); ++j) {
      const std::int64_t at = per_word == 1 ? p * nr + j % nr : p / 2 * 2 * nr + 2 * (j % nr) + p % 2;
      const To expected = p < k && j < n ? To(static_cast<float>(source.At(p, j))) : To(0.0f);
      ASSERT_EQ(BitsOf(packed(j / nr, at)), BitsOf(expected)) << "at " << p << ", " << j;
    }
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

// ---- Element-wise instructions

bool SameFloat(float a, float b) { return (std::isnan(a) && std::isnan(b)) || BitsOf(a) == BitsOf(b); }

// Reals, with special values strewn in.
void FillSpecial(const Matrix<float>& x, unsigned seed) {
  Random random(seed);
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, 1.0f, 0x1p-140f, 0x1p127f};
  std::size_t at = seed;
  x.Fill([&] { return ++at % 5 == 0 ? special[at / 5 % std::size(special)] : random.Real(-3.0f, 3.0f); });
}

float MaxOf(float a, float b) { return std::isnan(a) || std::isnan(b) ? kNaN : std::max(a, b); }
float BinaryOf(BinaryOp op, float a, float b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSub:
      return a - b;
    case BinaryOp::kMul:
      return a * b;
    case BinaryOp::kDiv:
      return a / b;
    case BinaryOp::kMax:
      return MaxOf(a, b);
  }
  return kNaN;
}
// The maximum of zeros of either sign may have either sign.
bool SameResult(float a, float b) { return SameFloat(a, b) || (a == 0.0f && b == 0.0f); }

TEST_P(TileOpsTest, Fill) {
  for (const std::int64_t cols : Columns()) {
    for (const std::int64_t gap : {0, 3}) {
      Matrix<float> x(3, cols, cols + gap);
      vector_->fill(x.view(), 2.5f);
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) ASSERT_EQ(x(i, j), 2.5f);
      }
    }
  }
}

TEST_P(TileOpsTest, Scalar) {
  for (const std::int64_t cols : Columns()) {
    for (const ScalarOp op : {ScalarOp::kMul, ScalarOp::kMax}) {
      for (const float value : {0.75f, -kInfinity, kNaN}) {
        Matrix<float> a(3, cols, cols + 5), dst(3, cols, cols + 2);
        FillSpecial(a, 4);
        vector_->scalar(op, dst.view(), a.view(), value);
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const float expected = op == ScalarOp::kMul ? a(i, j) * value : MaxOf(a(i, j), value);
            ASSERT_TRUE(SameResult(dst(i, j), expected)) << dst(i, j) << " for " << a(i, j) << ", " << value;
          }
        }
        vector_->scalar(op, a.view(), a.view(), value);  // In place.
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) ASSERT_TRUE(SameFloat(a(i, j), dst(i, j)));
        }
      }
    }
  }
}

constexpr BinaryOp kBinaryOps[] = {BinaryOp::kAdd, BinaryOp::kSub, BinaryOp::kMul, BinaryOp::kDiv,
                                   BinaryOp::kMax};

TEST_P(TileOpsTest, Binary) {
  for (const std::int64_t cols : Columns()) {
    for (const std::int64_t gap : {0, 3}) {
      for (const bool broadcast : {false, true}) {
        for (const BinaryOp op : kBinaryOps) {
          const std::int64_t b_cols = broadcast ? 1 : cols;
          Matrix<float> a(4, cols, cols + gap), b(4, b_cols, b_cols + gap), dst(4, cols, cols + gap);
          FillSpecial(a, 5);
          FillSpecial(b, 8);
          vector_->binary(op, dst.view(), a.view(), b.view());
          for (std::int64_t i = 0; i < 4; ++i) {
            for (std::int64_t j = 0; j < cols; ++j) {
              const float expected = BinaryOf(op, a(i, j), b(i, broadcast ? 0 : j));
              ASSERT_TRUE(SameResult(dst(i, j), expected))
                  << dst(i, j) << " for " << a(i, j) << ", " << b(i, broadcast ? 0 : j) << " op "
                  << static_cast<int>(op);
            }
          }
          vector_->binary(op, a.view(), a.view(), b.view());  // In place.
          for (std::int64_t i = 0; i < 4; ++i) {
            for (std::int64_t j = 0; j < cols; ++j) ASSERT_TRUE(SameFloat(a(i, j), dst(i, j)));
          }
        }
      }
    }
  }
}

// Columns: adjacent, and one element of each row of something wider.
TEST_P(TileOpsTest, ColumnTiles) {
  for (std::int64_t rows = 1; rows <= 3 * lanes_ + 1; ++rows) {
    for (const std::int64_t pitch : {1, 7}) {
      Matrix<float> a(rows, 1, pitch), b(rows, 1, 1), dst(rows, 1, pitch);
      FillSpecial(a, 6);
      FillSpecial(b, 7);
      for (const BinaryOp op : kBinaryOps) {
        vector_->binary(op, dst.view(), a.view(), b.view());
        for (std::int64_t i = 0; i < rows; ++i) {
          ASSERT_TRUE(SameResult(dst(i, 0), BinaryOf(op, a(i, 0), b(i, 0)))) << rows << " rows, at " << i;
        }
      }
      vector_->mul_add(dst.view(), b.view(), b.view());
      vector_->fill(dst.view(), 1.5f);
      vector_->scalar(ScalarOp::kMul, dst.view(), dst.view(), 2.0f);
      for (std::int64_t i = 0; i < rows; ++i) ASSERT_EQ(dst(i, 0), 3.0f);
    }
  }
}

TEST_P(TileOpsTest, MulAdd) {
  for (const std::int64_t cols : Columns()) {
    for (const bool broadcast : {false, true}) {
      for (const std::int64_t gap : {0, 3}) {
        const std::int64_t factor_cols = broadcast ? 1 : cols;
        Matrix<float> acc(3, cols, cols + gap), factor(3, factor_cols, factor_cols + gap),
            x(3, cols, cols + gap);
        Random random(9);
        const auto real = [&] { return random.Real(); };
        acc.Fill(real), factor.Fill(real), x.Fill(real);
        std::vector<double> expected, bound;
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const double product =
                static_cast<double>(acc(i, j)) * static_cast<double>(factor(i, broadcast ? 0 : j));
            expected.push_back(product + x(i, j));
            bound.push_back(2.0 * kEps * (std::abs(product) + std::abs(x(i, j))));  // Two roundings at most.
          }
        }
        vector_->mul_add(acc.view(), factor.view(), x.view());
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            ASSERT_LE(std::abs(acc(i, j) - expected[Index(i * cols + j)]), bound[Index(i * cols + j)]);
          }
        }
      }
    }
  }
}

TEST_P(TileOpsTest, MaskOutside) {
  const AttentionOps& attention = BestAttentionOps();
  for (const std::int64_t cols : {std::int64_t{1}, lanes_, 2 * lanes_ + 3}) {
    const std::int64_t rows = 7;
    for (std::int64_t highest = -rows - 2; highest <= cols + 2; ++highest) {
      for (std::int64_t lowest : {-rows - 1, highest - 3, highest, highest + 1}) {
        Matrix<float> x(rows, cols, cols + 3);
        x.Fill([] { return 1.0f; });
        attention.mask_outside(x.view(), lowest, highest, 5.0f);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            ASSERT_EQ(x(i, j), j - i < lowest || j - i > highest ? 5.0f : 1.0f);
          }
        }
      }
    }
  }
}

// ---- Exponential and logarithm

std::vector<float> Apply(const VectorOps& vector, UnaryOp op, const std::vector<float>& values) {
  std::vector<float> results(values.size());
  const auto n = static_cast<std::int64_t>(values.size());
  vector.unary(op, {.data = results.data(), .pitch = n, .rows = 1, .cols = n},
               {.data = const_cast<float*>(values.data()), .pitch = n, .rows = 1, .cols = n});
  return results;
}

// In units of the last place of the exact result, which among subnormals is 2^-149.
double UlpError(float actual, double exact) {
  const int exponent = exact == 0.0 ? -126 : std::max(std::ilogb(exact), -126);
  return std::abs(static_cast<double>(actual) - exact) / std::ldexp(1.0, exponent - 23);
}

TEST_P(TileOpsTest, ExpIsWithinTwoUlp) {
  std::vector<float> values;
  for (int i = -104 * 2048; i <= 88 * 2048; ++i) values.push_back(static_cast<float>(i) * 0x1p-11f);
  for (float x = 88.0f; x <= 88.72283f; x += 0x1p-16f)
    values.push_back(x);  // ln of the largest float is 88.722839.
  for (int e = -40; e <= 6; ++e) {
    for (float f = 1.0f; f < 2.0f; f += 0x1.1p-8f) {
      values.push_back(std::ldexp(f, e) <= 88.0f ? std::ldexp(f, e) : 0.0f);
      values.push_back(-std::ldexp(f, e) >= -104.0f ? -std::ldexp(f, e) : 0.0f);
    }
  }
  const std::vector<float> results = Apply(*vector_, UnaryOp::kExp, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_LE(UlpError(results[i], std::exp(static_cast<double>(values[i]))), 2.0)
        << "exp(" << values[i] << ")";
  }
}

TEST_P(TileOpsTest, ExpOfSpecialValues) {
  const float lowest = std::numeric_limits<float>::lowest();
  const std::vector<float> values = {0.0f,  -0.0f,   -kInfinity, kInfinity, 89.0f,
                                     1e30f, -104.5f, lowest,     kNaN,      -kNaN};
  const std::vector<float> results = Apply(*vector_, UnaryOp::kExp, values);
  const float expected[] = {1.0f, 1.0f, 0.0f, kInfinity, kInfinity, kInfinity, 0.0f, 0.0f, kNaN, kNaN};
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(SameFloat(results[i], expected[i])) << "exp(" << values[i] << ") gave " << results[i];
  }
}

TEST_P(TileOpsTest, LnIsWithinTwoUlp) {
  std::vector<float> values;
  for (std::uint32_t bits = 1; bits < 0x7f800000u; bits += 7919) values.push_back(std::bit_cast<float>(bits));
  for (std::uint32_t step = 1; step < 3000;
       ++step) {  // Either side of 1, where the result goes through zero.
    values.push_back(std::bit_cast<float>(0x3f800000u + step * step));
    values.push_back(std::bit_cast<float>(0x3f800000u - step * step));
  }
  const std::vector<float> results = Apply(*vector_, UnaryOp::kLn, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double exact = std::log(static_cast<double>(values[i]));
    ASSERT_LE(UlpError(results[i], exact), 2.0) << "ln(" << values[i] << ")";
  }
}

TEST_P(TileOpsTest, LnOfSpecialValues) {
  const std::vector<float> values = {1.0f, 0.0f, -0.0f, kInfinity, -1.0f, -0x1p-149f, -kInfinity, kNaN};
  const std::vector<float> results = Apply(*vector_, UnaryOp::kLn, values);
  const float expected[] = {0.0f, -kInfinity, -kInfinity, kInfinity, kNaN, kNaN, kNaN, kNaN};
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(SameFloat(results[i], expected[i])) << "ln(" << values[i] << ") gave " << results[i];
  }
}

TEST_P(TileOpsTest, UnaryTails) {
  for (const UnaryOp op : {UnaryOp::kExp, UnaryOp::kLn}) {
    for (const std::int64_t cols : Columns()) {
      Matrix<float> a(3, cols, cols + 3), dst(3, cols, cols + 1);
      Random random(10);
      a.Fill([&] { return random.Real(0.1f, 5.0f); });
      vector_->unary(op, dst.view(), a.view());
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {  // A tail gives the bits that a whole vector gives.
          ASSERT_EQ(dst(i, j), Apply(*vector_, op, std::vector<float>(Index(lanes_), a(i, j)))[0]);
        }
      }
    }
  }
}

// ---- Reductions

TEST_P(TileOpsTest, Reduce) {
  for (const std::int64_t cols : Columns()) {
    Matrix<float> a(5, cols, cols + 3), dst(5, 1, 2);
    Random random(11);
    a.Fill([&] { return random.Real(-2.0f, -1.0f); });  // All negative: a zero from a tail would win.
    vector_->reduce(ReduceOp::kMax, dst.view(), a.view());
    for (std::int64_t i = 0; i < 5; ++i) ASSERT_EQ(dst(i, 0), *std::max_element(&a(i, 0), &a(i, 0) + cols));
    vector_->reduce(ReduceOp::kSum, dst.view(), a.view());
    for (std::int64_t i = 0; i < 5; ++i) {
      double sum = 0.0;
      for (std::int64_t j = 0; j < cols; ++j) sum += a(i, j);
      ASSERT_LE(std::abs(dst(i, 0) - sum), static_cast<double>(cols - 1) * kEps * std::abs(sum) * 1.001);
    }
    const float last = dst(4, 0);
    for (std::int64_t j = 0; j < cols; ++j) a(0, j) = a(4, j);
    Rows first_column = a.view();
    first_column.cols = 1;
    vector_->reduce(ReduceOp::kSum, first_column, a.view());
    ASSERT_EQ(BitsOf(a(0, 0)), BitsOf(last)) << "the sum depends on where the row lies";
  }
}

TEST_P(TileOpsTest, ReduceOfSpecialValues) {
  for (const std::int64_t cols : Columns()) {
    for (std::int64_t at = 0; at < cols; ++at) {
      Matrix<float> a(1, cols, cols), dst(1, 1, 1);
      a.Fill([] { return -kInfinity; });
      vector_->reduce(ReduceOp::kMax, dst.view(), a.view());
      ASSERT_EQ(dst(0, 0), -kInfinity);
      a(0, at) = kNaN;
      for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kSum}) {
        vector_->reduce(op, dst.view(), a.view());
        ASSERT_TRUE(std::isnan(dst(0, 0))) << cols << " columns, NaN at " << at;
      }
    }
  }
}

// ---- Cast

template <class To, class From>
void CheckCast(const VectorOps& vector, const std::vector<From>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<To> results(values.size());
  vector.cast({.data = results.data(), .pitch = n, .rows = 1, .cols = n}, DTypeOf<To>(),
              {.data = const_cast<From*>(values.data()), .pitch = n, .rows = 1, .cols = n}, DTypeOf<From>(),
              false);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float exact = static_cast<float>(values[i]);
    const To expected = To(exact);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(results[i]))) << "of code " << BitsOf(values[i]);
    } else {
      ASSERT_EQ(BitsOf(results[i]), BitsOf(expected)) << "of " << exact << ", code " << BitsOf(values[i]);
    }
  }
}

template <class T>
std::vector<T> AllCodes() {
  std::vector<T> codes(0x10000);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i].bits = static_cast<std::uint16_t>(i);
  return codes;
}

TEST_P(TileOpsTest, CastFromEveryCode) {
  CheckCast<float>(*vector_, AllCodes<BF16>());
  CheckCast<float>(*vector_, AllCodes<F16>());
  CheckCast<F16>(*vector_, AllCodes<BF16>());
  CheckCast<BF16>(*vector_, AllCodes<F16>());
  CheckCast<BF16>(*vector_, AllCodes<BF16>());
}

// Every upper half with lower halves around the tie; and every binary16 code, the tie above it, and their
// neighbours.
TEST_P(TileOpsTest, CastFromFloatsNearTies) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  CheckCast<BF16>(*vector_, values);
  for (const F16 code : AllCodes<F16>()) {
    const float value = static_cast<float>(code);
    if (!std::isfinite(value)) continue;
    F16 next = code;
    ++next.bits;
    const float above =
        (code.bits & 0x7fffu) == 0x7bffu ? std::copysign(65536.0f, value) : static_cast<float>(next);
    const float tie = 0.5f * (value + above);
    for (const float x : {value, tie}) {
      for (const float toward : {0.0f, 2.0f * above}) values.push_back(std::nextafter(x, toward));
      values.push_back(x);
    }
  }
  CheckCast<F16>(*vector_, values);
}

template <class To, class From>
void CheckCastShapes(const VectorOps& vector, const std::vector<std::int64_t>& columns) {
  for (const std::int64_t cols : columns) {
    for (const std::int64_t gap : {0, 1, 3}) {
      for (const bool stream : {false, true}) {
        Matrix<From> src(3, cols, cols + gap);
        Matrix<To> dst(3, cols, cols + gap);
        Random random(12);
        src.Fill([&] { return random.Real(); });
        vector.cast(dst.view(), DTypeOf<To>(), src.view(), DTypeOf<From>(), stream);
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            ASSERT_EQ(BitsOf(dst(i, j)), BitsOf(To(static_cast<float>(src(i, j)))))
                << cols << " columns, gap " << gap;
          }
        }
      }
    }
  }
}

TEST_P(TileOpsTest, CastShapes) {
  const std::vector<std::int64_t> columns = Columns();
  CheckCastShapes<float, float>(*vector_, columns);
  CheckCastShapes<float, BF16>(*vector_, columns);
  CheckCastShapes<float, F16>(*vector_, columns);
  CheckCastShapes<BF16, float>(*vector_, columns);
  CheckCastShapes<BF16, BF16>(*vector_, columns);
  CheckCastShapes<BF16, F16>(*vector_, columns);
  CheckCastShapes<F16, float>(*vector_, columns);
  CheckCastShapes<F16, BF16>(*vector_, columns);
  CheckCastShapes<F16, F16>(*vector_, columns);
}

// ---- Copy and memory ceilings

TEST_P(TileOpsTest, Copy) {
  const std::int64_t vector_bytes = 4 * lanes_;
  for (std::int64_t bytes = 0; bytes <= 10 * vector_bytes + 1;
       bytes += bytes < 3 * vector_bytes + 2 ? 1 : 5) {
    for (const std::int64_t gap : {0, 1, 13}) {
      for (const bool stream : {false, true}) {
        Matrix<std::uint8_t> src(3, bytes, bytes + gap + 2), dst(3, bytes, bytes + gap);
        std::uint8_t next = 0;
        src.Fill([&] { return next = static_cast<std::uint8_t>(next * 5 + 3); });
        vector_->copy(dst.data(), bytes + gap, src.data(), bytes + gap + 2, 3, bytes, stream);
        for (std::int64_t i = 0; i < 3; ++i) {
          ASSERT_TRUE(std::equal(&dst(i, 0), &dst(i, 0) + bytes, &src(i, 0)))
              << bytes << " bytes, gap " << gap;
        }
      }
    }
  }
}

TEST_P(TileOpsTest, StreamReadSeesEveryByte) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{9}, 4 * lanes_, 67 * lanes_ + 3}) {
    Matrix<std::uint8_t> x(1, bytes, bytes);
    x.Fill([] { return 1; });
    const std::uint64_t checksum = vector_->stream_read(x.data(), bytes);
    for (std::int64_t at = 0; at < bytes; ++at) {
      x(0, at) ^= 0x40;
      ASSERT_NE(vector_->stream_read(x.data(), bytes), checksum) << "byte " << at << " of " << bytes;
      x(0, at) ^= 0x40;
    }
  }
}

TEST_P(TileOpsTest, StreamWriteFillsEveryWord) {
  for (const std::int64_t words : {1, 2, 15, 64, 257}) {
    Matrix<std::uint64_t> x(1, words, words);
    x.Fill([] { return 0; });
    vector_->stream_write(x.data(), 8 * words, 0);
    for (std::int64_t j = 0; j < words; ++j) ASSERT_NE(x(0, j), 0u) << "word " << j << " of " << words;
  }
}

// ---- Composites

// p = exp(x), x = round(round(scale s) - m): x is off by at most eps (|scale s| + |x|), and so, relatively,
// is p; the exponential adds 2 ulp = 4 eps, the type of p half of its last place. Sums of n terms add n eps.
struct SoftmaxExpectation {
  double p, bound;
};
SoftmaxExpectation ExpectedP(float s, float scale, float m, DType p_type) {
  const double scaled = static_cast<double>(scale) * static_cast<double>(s),
               x = scaled - static_cast<double>(m);
  const double p = std::exp(x);
  if (p == 0.0) return {0.0, 0.0};
  const double relative = 1.01 * kEps * (std::abs(scaled) + std::abs(x) + 4.0);
  const double smallest = p_type == DType::kF16 ? 0x1p-24 : p_type == DType::kBF16 ? 0x1p-133 : 0x1p-149;
  const double rounding = p_type == DType::kF32 ? 0.0 : UnitRoundoff(p_type) * (1.0 + relative);
  return {p, p * (relative + rounding) + smallest};
}

template <class T>
void CheckSoftmaxStep(const VectorOps& vector, std::int64_t rows, std::int64_t cols, float scale) {
  SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(cols));
  Matrix<float> s(rows, cols, cols + 3), m_new(rows, 1, 1), m_old(rows, 1, 2), l(rows, 1, 3);
  Matrix<T> p(rows, cols, cols + 1);
  Random random(13);
  s.Fill([&] { return random.Real(-20.0f, 20.0f); });
  s(rows - 1, cols / 2) = scale > 0.0f ? -kInfinity : 20.0f;  // Masked: its score times scale is -inf.
  m_old.Fill([&] { return random.Real(-20.0f, 20.0f); });
  l.Fill([&] { return random.Real(0.5f, 9.0f); });
  std::vector<float> old_max, old_l;
  for (std::int64_t i = 0; i < rows; ++i) old_max.push_back(m_old(i, 0)), old_l.push_back(l(i, 0));

  vector.softmax_step(p.view(), DTypeOf<T>(), s.view(), m_new.view(), m_old.view(), l.view(), scale);
  for (std::int64_t i = 0; i < rows; ++i) {
    float maximum = old_max[Index(i)];
    for (std::int64_t j = 0; j < cols; ++j) maximum = std::max(maximum, scale * s(i, j));
    ASSERT_EQ(m_new(i, 0), maximum) << "row " << i;
    double sum = 0.0, sum_bound = 0.0;
    for (std::int64_t j = 0; j < cols; ++j) {
      const SoftmaxExpectation expected = ExpectedP(s(i, j), scale, maximum, DTypeOf<T>());
      ASSERT_LE(std::abs(static_cast<float>(p(i, j)) - expected.p), expected.bound)
          << "at " << i << ", " << j;
      sum += expected.p;
      sum_bound += ExpectedP(s(i, j), scale, maximum, DType::kF32).bound;
    }
    const double alpha = std::exp(static_cast<double>(old_max[Index(i)]) - static_cast<double>(maximum));
    const double alpha_bound =
        alpha * 1.01 * kEps * (std::abs(old_max[Index(i)]) + std::abs(maximum) + 4.0) + 0x1p-149;
    ASSERT_LE(std::abs(m_old(i, 0) - alpha), alpha_bound);
    const double total = old_l[Index(i)] * alpha + sum;
    const double total_bound =
        sum_bound + old_l[Index(i)] * alpha_bound + static_cast<double>(cols + 2) * kEps * total;
    ASSERT_LE(std::abs(l(i, 0) - total), total_bound);
  }
}

TEST_P(TileOpsTest, SoftmaxStep) {
  for (const std::int64_t cols : Columns()) {
    CheckSoftmaxStep<float>(*vector_, 3, cols, 0.25f);
    CheckSoftmaxStep<BF16>(*vector_, 3, cols, 0.3f);
    CheckSoftmaxStep<F16>(*vector_, 3, cols, 0.3f);
  }
  for (std::int64_t rows = 1; rows <= 2 * lanes_ + 1; ++rows) CheckSoftmaxStep<BF16>(*vector_, rows, 5, 0.7f);
  CheckSoftmaxStep<float>(*vector_, 5, 300, -0.7f);
  CheckSoftmaxStep<BF16>(*vector_, 5, 300, 6.0f);  // Far below the maximum: underflow.
}

TEST_P(TileOpsTest, SoftmaxStepOfMaskedRows) {
  const float lowest = std::numeric_limits<float>::lowest();
  for (const std::int64_t cols : Columns()) {
    Matrix<float> s(2, cols, cols), m_new(2, 1, 1), m_old(2, 1, 1), l(2, 1, 1);
    Matrix<BF16> p(2, cols, cols);
    s.Fill([] { return -kInfinity; });
    s(1, cols - 1) = 3.1f;  // The second row has one score left, which must get all of the weight, exactly.
    m_old.Fill([=] { return lowest; });
    l.Fill([] { return 0.0f; });
    vector_->softmax_step(p.view(), DType::kBF16, s.view(), m_new.view(), m_old.view(), l.view(), 0.7f);
    for (std::int64_t j = 0; j < cols; ++j) {
      ASSERT_EQ(static_cast<float>(p(0, j)), 0.0f);
      ASSERT_EQ(static_cast<float>(p(1, j)), j + 1 == cols ? 1.0f : 0.0f);
    }
    ASSERT_EQ(m_new(0, 0), lowest);
    ASSERT_EQ(m_old(0, 0), 1.0f);
    ASSERT_EQ(l(0, 0), 0.0f);
    ASSERT_EQ(m_new(1, 0), 0.7f * 3.1f);
    ASSERT_EQ(m_old(1, 0), 0.0f);
    ASSERT_EQ(l(1, 0), 1.0f);
  }
}

template <class T>
void CheckSoftmaxStepOfNaN(const VectorOps& vector, std::int64_t cols, std::uint32_t nan_bits) {
  for (std::int64_t at = 0; at < cols; ++at) {
    Matrix<float> s(1, cols, cols), m_new(1, 1, 1), m_old(1, 1, 1), l(1, 1, 1);
    Matrix<T> p(1, cols, cols);
    s.Fill([] { return 0.5f; });
    s(0, at) = std::bit_cast<float>(nan_bits);
    m_old(0, 0) = 0.0f, l(0, 0) = 1.0f;
    vector.softmax_step(p.view(), DTypeOf<T>(), s.view(), m_new.view(), m_old.view(), l.view(), 1.0f);
    ASSERT_TRUE(std::isnan(static_cast<float>(p(0, at)))) << cols << " columns, NaN at " << at;
    ASSERT_TRUE(std::isnan(l(0, 0))) << cols << " columns, NaN at " << at;
  }
}

TEST_P(TileOpsTest, SoftmaxStepOfNaN) {
  for (const std::int64_t cols : Columns()) {
    for (const std::uint32_t nan_bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
      CheckSoftmaxStepOfNaN<float>(*vector_, cols, nan_bits);
      CheckSoftmaxStepOfNaN<BF16>(*vector_, cols, nan_bits);
      CheckSoftmaxStepOfNaN<F16>(*vector_, cols, nan_bits);
    }
  }
}

// p may take the place of s where both are floats.
TEST_P(TileOpsTest, SoftmaxStepInPlace) {
  for (const std::int64_t cols : Columns()) {
    Matrix<float> s(2, cols, cols + 3), p(2, cols, cols + 3), m_new(2, 1, 1), m_old(2, 1, 1), l(2, 1, 1);
    Random random(15);
    s.Fill([&] { return random.Real(-9.0f, 9.0f); });
    m_old.Fill([] { return 0.0f; });
    l.Fill([] { return 0.0f; });
    vector_->softmax_step(p.view(), DType::kF32, s.view(), m_new.view(), m_old.view(), l.view(), 0.5f);
    m_old.Fill([] { return 0.0f; });
    vector_->softmax_step(s.view(), DType::kF32, s.view(), m_new.view(), m_old.view(), l.view(), 0.5f);
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) ASSERT_EQ(BitsOf(s(i, j)), BitsOf(p(i, j)));
    }
  }
}

// count + 1 additions and count products: 2 (count + 1) eps times the sum of magnitudes.
template <class T>
void CheckWeightedSum(const VectorOps& vector, std::int64_t n, std::int64_t count, bool accumulate,
                      bool exact) {
  SCOPED_TRACE(std::to_string(count) + " rows of " + std::to_string(n));
  Random random(14);
  const auto generate = [&] { return exact ? random.Small() : random.Real(); };
  Matrix<T> x(count, n, n + 3);
  Matrix<float> acc(1, n, n), weights(1, count, count);
  x.Fill(generate), acc.Fill(generate), weights.Fill(generate);
  std::vector<const void*> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(&x(i, 0));
  std::vector<double> expected(Index(n)), magnitude(Index(n));
  for (std::int64_t j = 0; j < n; ++j) {
    double sum = accumulate ? acc(0, j) : 0.0, size = std::abs(sum);
    for (std::int64_t i = 0; i < count; ++i) {
      const double term =
          static_cast<double>(weights(0, i)) * static_cast<double>(static_cast<float>(x(i, j)));
      sum += term, size += std::abs(term);
    }
    expected[Index(j)] = sum, magnitude[Index(j)] = size;
  }
  vector.weighted_sum(acc.data(), n, DTypeOf<T>(), rows.data(), weights.data(), count, accumulate,
                      rows.data(), count);
  for (std::int64_t j = 0; j < n; ++j) {
    const double bound = exact ? 0.0 : 2.0 * static_cast<double>(count + 1) * kEps * magnitude[Index(j)];
    ASSERT_LE(std::abs(acc(0, j) - expected[Index(j)]), bound) << "at " << j;
  }
}

TEST_P(TileOpsTest, WeightedSum) {
  for (const bool exact : {true, false}) {
    for (const bool accumulate : {true, false}) {
      for (std::int64_t count = 0; count <= 18; ++count) {
        CheckWeightedSum<float>(*vector_, 2 * lanes_ + 1, count, accumulate, exact);
        CheckWeightedSum<BF16>(*vector_, 2 * lanes_ + 1, count, accumulate, exact);
        CheckWeightedSum<F16>(*vector_, 2 * lanes_ + 1, count, accumulate, exact);
      }
      for (const std::int64_t n : Columns()) {
        CheckWeightedSum<float>(*vector_, n, 9, accumulate, exact);
        CheckWeightedSum<BF16>(*vector_, n, 9, accumulate, exact);
        CheckWeightedSum<F16>(*vector_, n, 9, accumulate, exact);
      }
    }
  }
}

}  // namespace
}  // namespace cubist
