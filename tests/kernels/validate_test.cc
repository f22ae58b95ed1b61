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

// Downwards from the last of its rows, columns, or both.
TEST(CheckApartTest, FlippedViewsAreApartAsWhatTheyFlip) {
  std::vector<float> memory(200);
  const auto at = [&](std::int64_t first, std::int64_t rows, std::int64_t row, std::int64_t cols,
                      std::int64_t col) {
    return Tensor(memory.data() + first, {rows, cols}, {row, col});
  };
  const Tensor upper = at(0, 4, 10, 6, 1), lower = at(40, 4, 10, 6, 1), beside = at(6, 4, 10, 4, 1);
  const Tensor flips_of_upper[] = {at(30, 4, -10, 6, 1), at(5, 4, 10, 6, -1), at(35, 4, -10, 6, -1)};
  for (const Tensor& flipped : flips_of_upper) {
    EXPECT_FALSE(Apart(flipped, upper));
    EXPECT_TRUE(Apart(flipped, lower));
    EXPECT_TRUE(Apart(flipped, beside));
    EXPECT_TRUE(Apart(flipped, at(39, 4, -10, 4, -1)));
    EXPECT_FALSE(Apart(flipped, at(39, 4, -10, 5, -1)));
    EXPECT_TRUE(CheckWritable({"test", "x", flipped}).ok());
  }
  EXPECT_FALSE(Apart(at(75, 8, -10, 6, -1), upper));  // Begins beyond, reaches down into it.
  EXPECT_FALSE(CheckWritable({"test", "x", at(50, 4, -5, 6, 1)}).ok());
  EXPECT_FALSE(CheckWritable({"test", "x", at(50, 4, -10, 6, -2)}).ok());
}

TEST(CheckStorageTest, CountsWhatLiesBelow) {
  const auto message = [](const Tensor& x, bool needs_data) {
    return CheckStorage({"test", "x", x}, needs_data).message();
  };
  constexpr std::int64_t kFar = std::int64_t{1} << 53, kLeast = INT64_MIN;
  std::vector<float> memory(8);
  float* const end = memory.data() + 7;
  EXPECT_EQ(message(Tensor(end, {8}, {-1}), true), "");
  EXPECT_EQ(message(Tensor(end, {1, 8}, {kLeast, -1}), true), "");  // Nobody steps along one element.
  EXPECT_NE(message(Tensor(end, {8, 2}, {-1, kLeast}), true).find("2^56"), std::string::npos);
  EXPECT_NE(message(Tensor(end, {2, 2}, {kFar, -kFar}), true).find("2^56"), std::string::npos);
  EXPECT_EQ(message(Tensor(end, {2, 2}, {kFar, -kFar}), false), "");
  EXPECT_NE(message(Tensor(end, {2}, {-(kFar >> 1)}), true).find("before its data"), std::string::npos);
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
