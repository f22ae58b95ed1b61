#include "tiling/order_cost.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "tiling/block_order.h"

namespace cubist {
namespace {

using Deal = CoreTasks::Deal;

constexpr std::int64_t kMiB = 1 << 20;

// 16 rows of blocks of 4.5 MiB of A, 28 columns of 9 MiB of B: 324 MiB in all.
OrderShape LongProduct(Deal deal, std::int64_t width, std::int64_t l2_bytes) {
  return {.grid = {.rows = 16, .cols = 28, .order = BlockOrder::kSwizzled, .width = width},
          .deal = deal,
          .cores = 24,
          .row_bytes = 9 * kMiB / 2,
          .col_bytes = 9 * kMiB,
          .block_bytes = 0,
          .l2_bytes = l2_bytes};
}
double FetchedMiB(const OrderShape& shape) {
  double bytes = 0;
  for (const Wave& wave : CostOfOrder(shape).waves) bytes += wave.times * wave.fetched;
  return bytes / kMiB;
}

TEST(OrderCostTest, AllComesOnceWhereAllFits) {
  for (const Deal deal : {Deal::kTurns, Deal::kRuns, Deal::kTurnedRuns})
    EXPECT_EQ(FetchedMiB(LongProduct(deal, 4, 1024 * kMiB)), 324);
}

// Cores that walk strips of their own need all of B all the time; cores that take turns share a strip.
TEST(OrderCostTest, RunsNeedMoreOfL2ThanTurns) {
  const double turns = FetchedMiB(LongProduct(Deal::kTurns, 4, 192 * kMiB)),
               runs = FetchedMiB(LongProduct(Deal::kTurnedRuns, 4, 192 * kMiB));
  EXPECT_LT(turns, 2 * 324);
  EXPECT_GT(runs, 4 * 324);
}

TEST(OrderCostTest, ALargerL2NeverFetchesMore) {
  for (const Deal deal : {Deal::kTurns, Deal::kTurnedRuns}) {
    for (const std::int64_t width : {1, 4, 8}) {
      double before = FetchedMiB(LongProduct(deal, width, 8 * kMiB));
      for (std::int64_t l2_bytes = 16 * kMiB; l2_bytes <= 1024 * kMiB; l2_bytes *= 2) {
        const double now = FetchedMiB(LongProduct(deal, width, l2_bytes));
        EXPECT_LE(now, before) << width << ", " << l2_bytes / kMiB << " MiB";
        before = now;
      }
    }
  }
}

// With no L2 to speak of, a wave reads each of its rows and columns once, and the cores of one share it.
TEST(OrderCostTest, AWaveSharesWhatItReads) {
  OrderShape shape = LongProduct(Deal::kTurns, 4, kMiB);
  shape.grid = {.rows = 6, .cols = 8, .order = BlockOrder::kSwizzled, .width = 4};
  const OrderCost& cost = CostOfOrder(shape);
  ASSERT_EQ(cost.waves.size(), 2U);
  for (const Wave& wave : cost.waves) {
    EXPECT_EQ(wave.fetched, (6 * 4.5 + 4 * 9) * kMiB);
    EXPECT_EQ(wave.cold_rows, 1);
    EXPECT_EQ(wave.cold_cols, 1);
  }
}

}  // namespace
}  // namespace cubist
