// Which tensors count as apart in memory.
#include "kernels/validate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace cubist::testing {
namespace {

// Columns [begin, end) of every head of a matrix (rows, heads * width), as (1, heads, rows, columns).
Tensor Part(std::vector<float>& matrix, std::int64_t rows, std::int64_t heads, std::int64_t width,
            std::int64_t pitch, std::int64_t begin, std::int64_t end) {
  return Tensor(matrix.data() + begin, {1, heads, rows, end - begin}, {rows * pitch, width, pitch, 1});
}

bool Apart(const Tensor& x, const Tensor& y) {
  const Argument a{"test", "x", x}, b{"test", "y", y};
  const bool apart = CheckApart(a, b).ok();
  EXPECT_EQ(CheckApart(b, a).ok(), apart);
  return apart;
}

TEST(CheckApartTest, PartsOfEveryHeadAreApartWhereTheirColumnsAre) {
  constexpr std::int64_t kRows = 5, kHeads = 3, kWidth = 8, kPitch = kHeads * kWidth;
  std::vector<float> matrix(static_cast<std::size_t>(kRows * kPitch * 2));
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return Part(matrix, kRows, kHeads, kWidth, kPitch, begin, end);
  };
  EXPECT_TRUE(Apart(part(0, 6), part(6, 8)));
  EXPECT_TRUE(Apart(part(0, 1), part(7, 8)));
  EXPECT_FALSE(Apart(part(0, 6), part(5, 8)));
  EXPECT_FALSE(Apart(part(0, 8), part(7, 8)));
  EXPECT_FALSE(Apart(part(3, 4), part(3, 4)));
  // The same columns of other heads.
  EXPECT_FALSE(Apart(part(0, 6), part(kWidth, kWidth + 6)));
}

TEST(CheckApartTest, RowsThatShiftTheHeadsMeet) {
  constexpr std::int64_t kRows = 5, kHeads = 3, kWidth = 8, kPitch = kHeads * kWidth + 2;
  std::vector<float> matrix(static_cast<std::size_t>(kRows * kPitch * 2));
  // Rows alone tell them apart where all heads of one lie before those of the other; here they do not, and steps of rows
  // are no multiples of a head's: not proved, hence refused.
  EXPECT_FALSE(Apart(Part(matrix, kRows, kHeads, kWidth, kPitch, 0, 6),
                     Part(matrix, kRows, kHeads, kWidth, kPitch, 6, 8)));
  // One head: columns of one matrix.
  EXPECT_TRUE(
      Apart(Part(matrix, kRows, 1, kWidth, kPitch, 0, 6), Part(matrix, kRows, 1, kWidth, kPitch, 6, 8)));
}

}  // namespace
}  // namespace cubist::testing
