#include "tiling/grouped_matmul_tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tiling/fields.h"

namespace cubist {
namespace {

GroupedMatmulShape Shape(std::int64_t rows, std::int64_t groups, std::int64_t n, std::int64_t k,
                         GroupedAxis axis = GroupedAxis::kM) {
  GroupedMatmulShape shape;
  shape.groups = groups, shape.axis = axis;
  shape.product.m = rows, shape.product.n = n, shape.product.k = k;
  if (axis == GroupedAxis::kK) shape.product.m = k, shape.product.k = rows;
  shape.product.in = shape.product.out = DType::kBF16;
  if (axis == GroupedAxis::kM) shape.product.a_row_bytes = 2 * k, shape.product.b_row_bytes = 2 * n;
  return shape;
}

std::vector<GroupedMatmulShape> Shapes() {
  return {Shape(4096, 32, 2048, 7168),
          Shape(512, 64, 1024, 2048),
          Shape(1, 1, 1, 1),
          Shape(1024, 8, 4096, 7168),
          Shape(7, 1024, 40, 33),
          Shape(0, 0, 5, 0),
          Shape(100, 3, 70, 0),
          Shape(4096, 8, 2048, 2048, GroupedAxis::kK),
          Shape(0, 4, 30, 50, GroupedAxis::kK)};
}

TEST(GroupedMatmulTilingTest, TheCheapestCandidateIsChosenAndFits) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4(), &HostChip()}) {
    for (const GroupedMatmulShape& shape : Shapes()) {
      SCOPED_TRACE(chip->name + " " + ShapeText(shape));
      const std::vector<GroupedMatmulTiling> candidates = Candidates(*chip, shape);
      ASSERT_FALSE(candidates.empty());
      GroupedMatmulTiling chosen;
      ASSERT_TRUE(Choose(*chip, shape, &chosen).ok());
      EXPECT_TRUE(Fits(*chip, shape, chosen));
      EXPECT_NE(std::find(candidates.begin(), candidates.end(), chosen), candidates.end());
      const double price = Price(*chip, shape, chosen);
      for (const GroupedMatmulTiling& candidate : candidates) {
        EXPECT_TRUE(Fits(*chip, shape, candidate));
        EXPECT_GE(Price(*chip, shape, candidate), price);
      }
      GroupedMatmulTiling again;
      ASSERT_TRUE(Choose(*chip, shape, &again).ok());
      EXPECT_EQ(again, chosen);
    }
  }
}

// Rows of an odd length are packed first or not whatever the batch, which the cores alone know.
TEST(GroupedMatmulTilingTest, SpreadsAreAtOneWhetherRowsArePacked) {
  int packing = 0;
  for (const std::int64_t n : {256, 1000, 7168}) {
    for (const std::int64_t k : {576, 2045}) {
      GroupedMatmulShape shape = Shape(1024, 8, n, k);
      const auto packs = [](const GroupedMatmulTiling& t) { return t.block.pack_a; };
      std::vector<std::int64_t> packed;
      for (std::size_t spread = 0; spread < GroupSpreads::kCount; ++spread) {
        shape.rows = GroupSpreads(8).RowsOf(spread, GroupSpreads::Law::kPower, 1024);
        const std::vector<GroupedMatmulTiling> candidates = Candidates(Ascend910B2(), shape);
        ASSERT_FALSE(candidates.empty());
        packed.push_back(std::count_if(candidates.begin(), candidates.end(), packs));
        EXPECT_TRUE(packed.back() == 0 || packed.back() == std::ssize(candidates));
        EXPECT_EQ(packed.back(), packed.front());
      }
      packing += packed.front() > 0;
    }
  }
  EXPECT_GT(packing, 0);
  EXPECT_LT(packing, 6);
}

TEST(GroupedMatmulTilingTest, NothingPackedThatCannotBe) {
  GroupedMatmulTiling tiling;
  const GroupedMatmulShape rows = Shape(4096, 8, 2048, 2048),
                           sum = Shape(4096, 8, 2048, 2048, GroupedAxis::kK);
  ASSERT_TRUE(Choose(Ascend910B2(), rows, &tiling).ok());
  tiling.block.pack_a = true;
  EXPECT_TRUE(Fits(Ascend910B2(), rows, tiling));
  tiling.block.pack_b = true;
  EXPECT_FALSE(Fits(Ascend910B2(), rows, tiling));
  tiling.block.pack_b = false;
  EXPECT_FALSE(Fits(Ascend910B2(), sum, tiling));
}

TEST(GroupedMatmulTilingTest, TextNamesEveryField) {
  const GroupedMatmulShape shape = Shape(4096, 8, 2048, 2048);
  GroupedMatmulTiling tiling;
  ASSERT_TRUE(Choose(Ascend910B2(), shape, &tiling).ok());
  const std::string text = TilingText(Ascend910B2(), shape, tiling);
  EXPECT_NE(text.find("dealing=turns"), std::string::npos) << text;
  GroupedMatmulTiling parsed;
  ASSERT_TRUE(ParseTiling(Ascend910B2(), shape, text, &parsed).ok());
  EXPECT_EQ(parsed, tiling);
  EXPECT_EQ(parsed.fixed_work, tiling.fixed_work);
  EXPECT_EQ(parsed.column_work, tiling.column_work);
}

// Work is dealt by what a block costs: on a chip a block of few rows costs nearly what one of many does, as it loads the
// same weights.
TEST(GroupedMatmulTilingTest, BlocksOfFewRowsAreNotCheap) {
  GroupedMatmulTiling tiling;
  GroupedMatmulShape shape = Shape(4096, 32, 4096, 7168);
  ASSERT_TRUE(Choose(Ascend910B2(), shape, &tiling).ok());
  EXPECT_GT(tiling.fixed_work, 64);
  EXPECT_LT(tiling.fixed_work, 4096);
  // Where Vector cores have work of their own, they bring no weights in time: the first block of a column waits for HBM.
  shape.product.epilogue.vector = true;
  ASSERT_TRUE(Choose(Ascend910B2(), shape, &tiling).ok());
  EXPECT_EQ(tiling.block.prefetch, 0);
  EXPECT_GT(tiling.fixed_work, 64);
  EXPECT_GT(tiling.column_work, 64);
  EXPECT_LT(tiling.fixed_work + tiling.column_work, 4096);
}

}  // namespace
}  // namespace cubist
