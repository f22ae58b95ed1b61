// What tests of the host executor share: one virtual AI core, matrices in GM, and products by plain loops.
#ifndef CUBIST_TESTS_NPU_MODEL_HOST_RIG_H_
#define CUBIST_TESTS_NPU_MODEL_HOST_RIG_H_

#include "npu_model/host/simd_targets.h"
// Headers of Highway behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::host_test {

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
const Layout kLayouts[] = {
    kContiguous, {}, kColumnMajor, {.step = 3}, {.order = kColumnMajor.order, .step = 2}};

inline std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

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

struct Shape {
  std::int64_t rows, cols;
};

// start + a b by plain loops; exact for small integers.
inline Values ProductOf(const GmMatrix& a, const GmMatrix& b, const Values& start = {}) {
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

inline Values Rounded(Values values, DType dtype) {
  for (double& value : values) value = RoundTo(dtype, value);
  return values;
}

// Loads both operands whole, into slots that are larger than they are.
template <class T>
struct Operands {
  Operands(HostAiCore& core, const Gm& a, const Gm& b, Role a_role = Role::kA)
      : a1(Ring<Buffer::kL1, T>(core, "a1", a.rows + 3, a.cols + 6, 1, a_role).Next(a.rows, a.cols)),
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

template <class T>
UbTile<T> LoadRows(HostVectorCore& vector, const Gm& src, std::int64_t rows, std::int64_t cols) {
  const auto tile = Ring<Buffer::kUB, T>(vector, "rows", rows, cols, 1).Next(src.rows, src.cols);
  vector.Load(tile, src);
  return tile;
}

}  // namespace cubist::host_test

#endif  // CUBIST_TESTS_NPU_MODEL_HOST_RIG_H_
