// Test tensors that notice what they should not: gaps between rows, guards around the whole, NaN where
// nothing was written.
#ifndef CUBIST_TESTS_SUPPORT_MATRIX_H_
#define CUBIST_TESTS_SUPPORT_MATRIX_H_

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "npu_model/types.h"
#include "tests/support/random.h"

namespace cubist::testing {

// How the elements stand in memory. By default no stride is a round number and no row is aligned.
struct Layout {
  // Dimensions, outermost first; {0, 2, 1, 3} stores (B, N, S, D) as BSND.
  std::array<int, Tensor::kMaxRank> order = {0, 1, 2, 3, 4, 5};
  std::int64_t gap = 3;     // elements after each row, and after each stack of rows
  std::int64_t offset = 1;  // elements from a 64-byte boundary to element 0
  std::int64_t step = 1;    // stride of the innermost dimension
};
inline constexpr Layout kContiguous{.gap = 0, .offset = 0};
inline constexpr Layout kColumnMajor{.order = {1, 0, 2, 3, 4, 5}};
inline constexpr Layout kBsnd{.order = {0, 2, 1, 3, 4, 5}};

// A matrix of any dtype, or a stack of them (up to six dimensions), inside guards. Elements and guards start
// as a pattern that reads as NaN in every float type, and as a negative number in every integer type.
class Matrix {
 public:
  Matrix(DType dtype, std::initializer_list<std::int64_t> sizes, const Layout& layout = {});

  Tensor view();
  ConstTensor view() const;
  // The same with the last two dimensions exchanged.
  Tensor transposed();
  ConstTensor transposed() const;

  DType dtype() const { return shape_.dtype; }
  std::int64_t size(int d) const { return shape_.size(d); }
  std::int64_t count() const { return shape_.count(); }

  // Values are rounded to the dtype, so that a reference that reads this matrix sees what a kernel sees.
  void Fill(double value);
  void FillIntegers(Random& random, std::int64_t low = -4, std::int64_t high = 4);
  void FillUniform(Random& random, double low = -1, double high = 1);
  void FillNormal(Random& random, double mean = 0, double stddev = 1);
  void FillNaN();

  double at(std::initializer_list<std::int64_t> index) const;
  void set(std::initializer_list<std::int64_t> index, double value);
  std::vector<double> ToDoubles() const;  // row-major

  // Whether every byte that belongs to no element is as it was made. Names the first that is not.
  ::testing::AssertionResult CheckGuards() const;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  static constexpr std::int64_t kGuardLines = 4;

  std::byte* data();
  const std::byte* data() const;
  // Calls next() for the value of every element, in row-major order.
  template <class F>
  void FillFrom(F next);

  ConstTensor shape_;  // Sizes and strides; its data is null.
  std::int64_t offset_ = 0;
  std::vector<Line> lines_;
};

using Index = ConstTensor::Sizes;

// Calls f(index, offset) for every element in row-major order: its coordinates, and its place relative to
// x.data.
template <class F>
void ForEachElement(const ConstTensor& x, F f) {
  Index index{};
  const std::int64_t count = x.count();
  for (std::int64_t i = 0, offset = 0; i < count; ++i) {
    f(std::as_const(index), offset);
    for (int d = x.rank - 1; d >= 0; --d) {
      std::int64_t& at = index[static_cast<std::size_t>(d)];
      offset += x.stride(d);
      if (++at < x.size(d)) break;
      offset -= std::exchange(at, 0) * x.stride(d);
    }
  }
}

// Element of any dtype as double.
double LoadElement(const ConstTensor& x, std::int64_t offset);

std::vector<double> ToDoubles(const ConstTensor& x);  // row-major

// `value` as the dtype holds it.
double RoundTo(DType dtype, double value);

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_MATRIX_H_
