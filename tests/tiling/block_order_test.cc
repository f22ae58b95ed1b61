#include "tiling/block_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cubist {
namespace {

constexpr BlockOrder kOrders[] = {BlockOrder::kRowMajor, BlockOrder::kSwizzled, BlockOrder::kDiagonal};

std::vector<BlockCoord> Walk(const BlockGrid& grid) {
  std::vector<BlockCoord> walk;
  for (std::int64_t i = 0; i < grid.count(); ++i) walk.push_back(grid.At(i));
  return walk;
}

std::string NameOf(const BlockGrid& grid) {
  return std::to_string(grid.rows) + "x" + std::to_string(grid.cols) + " " + NameOf(grid.order) + " width " +
         std::to_string(grid.width);
}

// A core of a launch, for MyBlocks.
struct Core {
  int number, cores;
  int index() const { return number; }
  int count() const { return cores; }
};

TEST(BlockOrderTest, EveryOrderVisitsEveryBlockOnce) {
  for (BlockOrder order : kOrders) {
    for (std::int64_t rows : {0, 1, 2, 3, 5, 7, 8, 13, 24}) {
      for (std::int64_t cols : {0, 1, 2, 3, 4, 7, 8, 9, 17, 24}) {
        for (std::int64_t width : {1, 2, 3, 4, 8, 16, 64, 1000}) {
          const BlockGrid grid{rows, cols, order, width};
          std::vector<int> visits(static_cast<std::size_t>(grid.count()));
          for (const BlockCoord block : Walk(grid)) {
            ASSERT_TRUE(block.row >= 0 && block.row < rows && block.col >= 0 && block.col < cols)
                << NameOf(grid) << ": (" << block.row << ", " << block.col << ")";
            ++visits[static_cast<std::size_t>(block.row * cols + block.col)];
          }
          for (int count : visits) ASSERT_EQ(count, 1) << NameOf(grid);
        }
      }
    }
  }
}

TEST(BlockOrderTest, RowMajorGoesAlongTheRows) {
  EXPECT_EQ(Walk({2, 3, BlockOrder::kRowMajor, 1}),
            (std::vector<BlockCoord>{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}}));
}

TEST(BlockOrderTest, SwizzledGoesDownAndUpBandsOfColumns) {
  EXPECT_EQ(Walk({3, 5, BlockOrder::kSwizzled, 2}), (std::vector<BlockCoord>{{0, 0},
                                                                             {0, 1},
                                                                             {1, 0},
                                                                             {1, 1},
                                                                             {2, 0},
                                                                             {2, 1},  // Down,
                                                                             {2, 2},
                                                                             {2, 3},
                                                                             {1, 2},
                                                                             {1, 3},
                                                                             {0, 2},
                                                                             {0, 3},  // up,
                                                                             {0, 4},
                                                                             {1, 4},
                                                                             {2, 4}}));  // down.
}

TEST(BlockOrderTest, DiagonalGoesAlongTheDiagonalsOfBandsOfRows) {
  EXPECT_EQ(
      Walk({3, 4, BlockOrder::kDiagonal, 2}),
      (std::vector<BlockCoord>{
          {0, 0}, {1, 1}, {0, 1}, {1, 2}, {0, 2}, {1, 3}, {0, 3}, {1, 0}, {2, 0}, {2, 1}, {2, 2}, {2, 3}}));
}

// Neighbours in a swizzled walk: along a row of the band, or to the next row, or, at the end of a band, on in
// the same row. So a band of `width` columns of B and a row of A are what L2 must hold.
TEST(BlockOrderTest, SwizzledNeighboursAreClose) {
  for (std::int64_t rows : {1, 2, 5, 16}) {
    for (std::int64_t cols : {1, 3, 8, 11}) {
      for (std::int64_t width : {1, 2, 4, 20}) {
        const BlockGrid grid{rows, cols, BlockOrder::kSwizzled, width};
        const std::vector<BlockCoord> walk = Walk(grid);
        for (std::size_t i = 1; i < walk.size(); ++i) {
          const BlockCoord from = walk[i - 1], to = walk[i];
          if (from.col / width != to.col / width) {
            ASSERT_EQ(to.row, from.row) << NameOf(grid) << " at " << i;
            ASSERT_EQ(to.col / width, from.col / width + 1) << NameOf(grid) << " at " << i;
          } else if (from.row == to.row) {
            ASSERT_EQ(to.col, from.col + 1) << NameOf(grid) << " at " << i;
          } else {
            ASSERT_EQ(std::abs(to.row - from.row), 1) << NameOf(grid) << " at " << i;
          }
        }
      }
    }
  }
}

// Cores that run together take consecutive blocks: as many as a band has rows differ in row and in column.
TEST(BlockOrderTest, DiagonalKeepsCoresApart) {
  for (std::int64_t rows : {2, 7, 8, 16, 21}) {
    for (std::int64_t cols : {8, 9, 16, 31}) {
      for (std::int64_t width : {2, 3, 8}) {
        const BlockGrid grid{rows, cols, BlockOrder::kDiagonal, width};
        const std::vector<BlockCoord> walk = Walk(grid);
        for (std::int64_t band = 0; band * width < rows; ++band) {
          const std::int64_t height = std::min(width, rows - band * width), first = band * width * cols;
          for (std::int64_t at = first; at < first + height * cols; at += height) {
            std::set<std::int64_t> band_rows, band_cols;
            for (std::int64_t i = at; i < at + height; ++i) {
              const BlockCoord block = walk[static_cast<std::size_t>(i)];
              ASSERT_EQ(block.row / width, band) << NameOf(grid) << " at " << i;
              band_rows.insert(block.row), band_cols.insert(block.col);
            }
            ASSERT_EQ(static_cast<std::int64_t>(band_rows.size()), height) << NameOf(grid) << " at " << at;
            ASSERT_EQ(static_cast<std::int64_t>(band_cols.size()), height) << NameOf(grid) << " at " << at;
          }
        }
      }
    }
  }
}

TEST(BlockOrderTest, CoresShareTheWalk) {
  for (BlockOrder order : kOrders) {
    const BlockGrid grid{5, 7, order, 3};
    for (int cores : {1, 2, 7, 24, 35, 64}) {
      std::vector<int> visits(35);
      for (int index = 0; index < cores; ++index) {
        std::int64_t at = index;
        for (const BlockCoord block : MyBlocks(grid, Core{index, cores})) {
          EXPECT_EQ(block, grid.At(at));
          ++visits[static_cast<std::size_t>(block.row * 7 + block.col)];
          at += cores;
        }
        EXPECT_GE(at, grid.count());
      }
      EXPECT_EQ(visits, std::vector<int>(35, 1)) << NameOf(grid) << ", " << cores << " cores";
    }
  }
}

// A strip is as long as blocks stay in one row, or one block where no neighbours do.
TEST(BlockOrderTest, StripsLieInOneRow) {
  for (BlockOrder order : kOrders) {
    for (std::int64_t rows : {1, 2, 5, 8}) {
      for (std::int64_t cols : {1, 3, 4, 9, 17}) {
        for (std::int64_t width : {1, 3, 4, 64}) {
          const BlockGrid grid{rows, cols, order, width};
          for (std::int64_t i = 0; i < grid.count(); ++i) {
            const Range strip = grid.Strip(i);
            ASSERT_TRUE(strip.begin <= i && i < strip.end && strip.end <= grid.count()) << NameOf(grid);
            const std::int64_t length = order == BlockOrder::kDiagonal   ? 1
                                        : order == BlockOrder::kRowMajor ? cols
                                                                         : std::min(width, cols);
            ASSERT_TRUE(strip.size() == length ||
                        (order == BlockOrder::kSwizzled && strip.size() == cols % width))
                << NameOf(grid) << " at " << i << ": " << strip.size();
            for (std::int64_t j = strip.begin; j < strip.end; ++j) {
              ASSERT_EQ(grid.At(j).row, grid.At(i).row) << NameOf(grid);
              ASSERT_EQ(grid.Strip(j), strip) << NameOf(grid);
            }
          }
        }
      }
    }
  }
}

// However they are dealt: every task is one core's, cores have as many as each other, and turned runs stay in their strips.
TEST(BlockOrderTest, CoresShareTheTasks) {
  using Deal = CoreTasks::Deal;
  for (const Deal deal : {Deal::kTurns, Deal::kRuns, Deal::kTurnedRuns}) {
    for (const BlockGrid& grid : {BlockGrid{5, 7}, BlockGrid{8, 17, BlockOrder::kSwizzled, 4},
                                  BlockGrid{3, 4, BlockOrder::kDiagonal, 2}}) {
      for (std::int64_t grids : {1, 3}) {
        for (std::int64_t cores : {1, 2, 24, 200}) {
          SCOPED_TRACE(NameOf(grid) + " on " + std::to_string(cores));
          const std::int64_t count = grids * grid.count();
          std::vector<int> visits(static_cast<std::size_t>(count));
          for (std::int64_t core = 0; core < cores; ++core) {
            const CoreTasks tasks(grid, deal, count, core, cores);
            ASSERT_GE(tasks.count(), count / cores);
            ASSERT_LE(tasks.count(), CeilDiv(count, cores));
            const CoreTasks in_order(grid, Deal::kRuns, count, core, cores);
            for (std::int64_t i = 0; i < tasks.count(); ++i) {
              ASSERT_TRUE(tasks[i] >= 0 && tasks[i] < count);
              ++visits[static_cast<std::size_t>(tasks[i])];
              if (deal != Deal::kTurnedRuns) continue;
              const std::int64_t at = in_order[i];
              ASSERT_EQ(tasks[i] / grid.count(), at / grid.count());
              ASSERT_EQ(grid.Strip(tasks[i] % grid.count()), grid.Strip(at % grid.count()));
            }
          }
          for (int visit : visits) ASSERT_EQ(visit, 1);
        }
      }
    }
  }
}

TEST(BlockOrderTest, ListsAreDealtRoundRobinAsOne) {
  const std::vector<std::int64_t> lists = {5, 0, 1, 1, 0, 24, 3, 100, 2, 7};
  for (std::int64_t cores : {1, 2, 3, 7, 24, 200}) {
    for (std::int64_t index = 0; index < cores; ++index) {
      RoundRobin dealt(index, cores);
      std::int64_t before = 0;
      for (std::int64_t count : lists) {
        std::vector<std::int64_t> mine, expected;
        dealt.ForMine(count, [&](std::int64_t i) { mine.push_back(i); });
        for (std::int64_t i = 0; i < count; ++i)
          if ((before + i) % cores == index) expected.push_back(i);
        ASSERT_EQ(mine, expected) << "core " << index << " of " << cores << " behind " << before;
        before += count;
      }
    }
  }
}

TEST(BlockOrderTest, AnEmptyGridHasNoBlocks) {
  for (BlockOrder order : kOrders) {
    for (const BlockGrid& grid : {BlockGrid{0, 4, order, 2}, BlockGrid{4, 0, order, 2}}) {
      for (const BlockCoord block : MyBlocks(grid, Core{0, 1})) FAIL() << block.row << ", " << block.col;
    }
  }
}

TEST(BlockOrderTest, HugeGridsDoNotOverflow) {
  const std::int64_t side = std::int64_t{1} << 30;
  for (BlockOrder order : kOrders) {
    const BlockGrid grid{side, side, order, 8};
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (std::int64_t i : {std::int64_t{0}, std::int64_t{1}, side, side * 8 - 1, side * 8,
                           side * side / 2 + 1, side * side - 1}) {
      const BlockCoord block = grid.At(i);
      EXPECT_TRUE(block.row >= 0 && block.row < side && block.col >= 0 && block.col < side) << NameOf(grid);
      EXPECT_TRUE(seen.emplace(block.row, block.col).second) << NameOf(grid) << " at " << i;
    }
  }
}

}  // namespace
}  // namespace cubist
