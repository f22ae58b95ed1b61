// Which tensors count as apart in memory, and how numbers stand in messages.
#include "kernels/validate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
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

TEST(CheckListApartTest, MeetsAllThatReachThatFar) {
  std::vector<float> memory(100);
  const auto columns = [&](std::int64_t begin) { return Tensor(memory.data() + begin, {3, 2}, {10, 1}); };
  // The second lies between the columns of the first and the third, which share two rows.
  const Tensor first = columns(0), between = columns(2), second_row = columns(10), none;
  for (const std::vector<Tensor>& list : {std::vector<Tensor>{first, between, second_row},
                                          {second_row, none, first, between},
                                          {between, second_row, first}}) {
    const std::string message = CheckListApart("test", "list", list).message();
    EXPECT_NE(message.find("overlaps list["), std::string::npos) << message;
  }
  const std::vector<Tensor> apart{columns(4), first, columns(8), none, between, columns(36)};
  EXPECT_TRUE(CheckListApart("test", "list", apart).ok());
}

TEST(TextOfTest, TellsSmallAndLargeNumbersApart) {
  EXPECT_EQ(TextOf(-1e-30f), "-1e-30");
  EXPECT_EQ(TextOf(0.5f), "0.5");
  EXPECT_EQ(TextOf(0), "0");
  EXPECT_EQ(TextOf(3.40282347e+38f), "3.4028235e+38");
  EXPECT_EQ(OptionError("route", "eps", -1e-9f, "more").message(), "route: eps is -1e-09, needs more");
}

}  // namespace
}  // namespace cubist::testing
