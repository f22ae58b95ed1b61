// What tests of the instruction bodies share: operands between guards, and the SIMD targets that this CPU can run.
//
// Every operand ends at the end of a page with an inaccessible page behind it, so that a read or write beyond
// it crashes, and everything between and before its rows holds NaN bits, which must neither change nor reach
// a result.
#ifndef CUBIST_TESTS_NPU_MODEL_TILE_OPS_SUPPORT_H_
#define CUBIST_TESTS_NPU_MODEL_TILE_OPS_SUPPORT_H_

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "npu_model/host/simd_targets.h"
// Headers of Highway behind it.
#include "hwy/targets.h"
#include "npu_model/host/tile_ops.h"

namespace cubist::tile_ops {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kEps = 0x1p-24;  // Unit roundoff of fp32.

inline std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

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

inline std::uint32_t BitsOf(float value) { return std::bit_cast<std::uint32_t>(value); }
inline std::uint32_t BitsOf(BF16 value) { return value.bits; }
inline std::uint32_t BitsOf(F16 value) { return value.bits; }

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

}  // namespace cubist::tile_ops

#endif  // CUBIST_TESTS_NPU_MODEL_TILE_OPS_SUPPORT_H_
