// Bodies of Vector instructions against their definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/host/attention_ops.h"
#include "tests/npu_model/tile_ops_support.h"

namespace cubist::tile_ops {
namespace {

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

}  // namespace
}  // namespace cubist::tile_ops
