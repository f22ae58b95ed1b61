// The spreads of rows over groups: what stands for one is of it, and a batch's is found whatever its order.
#include "tiling/group_spreads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/support/random.h"

namespace cubist {
namespace {

using Law = GroupSpreads::Law;

std::int64_t SumOf(const std::vector<std::int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

std::size_t SpreadOf(const std::vector<std::int64_t>& rows) {
  GroupSpreads::Meter meter(SumOf(rows));
  for (const std::int64_t r : rows) meter.Add(r);
  return meter.SpreadBy(GroupSpreads(std::ssize(rows)));
}

TEST(GroupSpreadsTest, BatchesAreOfTheSpreadThatTheyStandFor) {
  for (const std::int64_t groups : {4, 8, 16, 64, 256, 1024}) {
    const GroupSpreads spreads(groups);
    for (const std::int64_t each : {std::int64_t{128}, std::int64_t{1} << 13, std::int64_t{1} << 40}) {
      for (std::size_t spread = 0; spread < GroupSpreads::kCount; ++spread) {
        for (const Law law : {Law::kPower, Law::kDecay}) {
          const std::vector<std::int64_t> rows = spreads.RowsOf(spread, law, groups * each);
          ASSERT_EQ(std::ssize(rows), groups);
          EXPECT_EQ(SumOf(rows), groups * each);
          EXPECT_GE(*std::min_element(rows.begin(), rows.end()), 0);
          EXPECT_EQ(SpreadOf(rows), spread)
              << groups << " groups of " << each << ", law " << static_cast<int>(law);
        }
      }
    }
  }
}

TEST(GroupSpreadsTest, EvenGroupsAreAlike) {
  for (const std::int64_t groups : {1, 7, 8, 100}) {
    const GroupSpreads spreads(groups);
    for (const Law law : {Law::kPower, Law::kDecay}) {
      const std::vector<std::int64_t> rows = spreads.RowsOf(0, law, 100 * groups + groups / 2);
      for (const std::int64_t r : rows) EXPECT_TRUE(r == 100 || r == 101) << r;
      EXPECT_EQ(SpreadOf(rows), 0u);
    }
  }
}

// More uneven, another order, more rows: of a spread that is no less, the same, the same.
TEST(GroupSpreadsTest, FollowTheUnevennessAlone) {
  testing::Random random;
  for (int i = 0; i < 300; ++i) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(random.Integer(2, 300)));
    for (std::int64_t& r : rows) r = random.Integer(0, 1000);
    if (SumOf(rows) == 0) continue;
    const std::size_t spread = SpreadOf(rows);
    std::vector<std::int64_t> sorted = rows;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(SpreadOf(sorted), spread);
    // From the smallest group to the largest.
    sorted.back() += sorted.front(), sorted.front() = 0;
    EXPECT_GE(SpreadOf(sorted), spread);
  }
}

TEST(GroupSpreadsTest, Extremes) {
  EXPECT_EQ(SpreadOf({0, 0, 0}), 0u);
  EXPECT_EQ(SpreadOf({5}), 0u);
  EXPECT_EQ(GroupSpreads(0).RowsOf(0, Law::kPower, 0), std::vector<std::int64_t>());
  std::vector<std::int64_t> one(64);
  one[17] = std::int64_t{1} << 62;
  EXPECT_EQ(SpreadOf(one), GroupSpreads::kCount - 1);
  EXPECT_EQ(SpreadOf(std::vector<std::int64_t>(std::size_t{1} << 21, 3)), 0u);
}

}  // namespace
}  // namespace cubist
