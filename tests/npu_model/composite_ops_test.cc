// Bodies of composite instructions against their definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/host/movement_ops.h"
#include "tests/npu_model/tile_ops_support.h"

namespace cubist::tile_ops {
namespace {

// p = exp(x), x = round(round(scale s) - m): x is off by at most eps (|scale s| + |x|), and by 1.25 eps |x| more where it is
// multiplied by a rounded log2(e), and so, relatively, is p; the exponential adds 2 ulp = 4 eps, the type of p half of its
// last place, or all of it below the normal range. Sums of n terms add n eps.
struct SoftmaxExpectation {
  double p, bound;
};
SoftmaxExpectation ExpectedP(float s, float scale, float m, DType p_type) {
  const double scaled = static_cast<double>(scale) * static_cast<double>(s),
               x = scaled - static_cast<double>(m);
  const double p = std::exp(x);
  if (p == 0.0) return {0.0, 0.0};
  const double relative = 1.01 * kEps * (std::abs(scaled) + 2.25 * std::abs(x) + 4.0);
  const double smallest = p_type == DType::kF16 ? 0x1p-24 : 0x1p-126;
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
void CheckWeightedSum(std::int64_t n, std::int64_t count, bool accumulate, bool exact) {
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
  const WeightedRows weighted{.dtype = DTypeOf<T>(),
                              .rows = rows.data(),
                              .weights = weights.data(),
                              .count = count,
                              .upcoming = rows.data(),
                              .upcoming_count = count};
  const MovementOps& movement = BestMovementOps();
  movement.weighted_sum(acc.data(), n, weighted, accumulate);
  for (std::int64_t j = 0; j < n; ++j) {
    const double bound = exact ? 0.0 : 2.0 * static_cast<double>(count + 1) * kEps * magnitude[Index(j)];
    ASSERT_LE(std::abs(acc(0, j) - expected[Index(j)]), bound) << "at " << j;
  }
  if (accumulate) return;
  // Streamed: the same sums, rounded; nothing before or behind them.
  for (const std::int64_t first : {0, 1, 5}) {
    Matrix<T> out(1, first + n + 1, first + n + 1);
    Matrix<float> room(1, n, n);
    out.Fill([] { return 3.0f; });
    movement.stream_weighted_sum(&out(0, first), room.data(), n, weighted);
    FlushStreams();
    for (std::int64_t j = 0; j < n; ++j) {
      ASSERT_EQ(static_cast<float>(out(0, first + j)), static_cast<float>(static_cast<T>(acc(0, j))))
          << "at " << j;
    }
    for (std::int64_t j = 0; j < first; ++j) ASSERT_EQ(static_cast<float>(out(0, j)), 3.0f);
    ASSERT_EQ(static_cast<float>(out(0, first + n)), 3.0f);
  }
}

TEST_P(TileOpsTest, WeightedSum) {
  for (const bool exact : {true, false}) {
    for (const bool accumulate : {true, false}) {
      for (std::int64_t count = 0; count <= 18; ++count) {
        CheckWeightedSum<float>(2 * lanes_ + 1, count, accumulate, exact);
        CheckWeightedSum<BF16>(2 * lanes_ + 1, count, accumulate, exact);
        CheckWeightedSum<F16>(2 * lanes_ + 1, count, accumulate, exact);
      }
      for (const std::int64_t n : Columns()) {
        CheckWeightedSum<float>(n, 9, accumulate, exact);
        CheckWeightedSum<BF16>(n, 9, accumulate, exact);
        CheckWeightedSum<F16>(n, 9, accumulate, exact);
      }
    }
  }
}

}  // namespace
}  // namespace cubist::tile_ops
