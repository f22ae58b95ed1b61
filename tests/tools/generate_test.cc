#include "tools/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

namespace cubist {
namespace {

// Golden values: inputs are the same on every machine and in every version.
TEST(GenerateTest, StreamsAreFixed) {
  EXPECT_EQ(Random(0, 0), 0xe220a8397b1dcdafu) << "the first output of splitmix64 with seed 0";
  EXPECT_EQ(Random(0, 1), 0x6e789e6aa1b965f4u);
  EXPECT_NE(StreamKey(1, "q"), StreamKey(1, "k"));
  EXPECT_NE(StreamKey(1, "q"), StreamKey(2, "q"));
  EXPECT_NE(StreamKey(1, "ab"), StreamKey(1, "ba"));
}

TEST(GenerateTest, NormalHasItsMomentsInEveryDType) {
  constexpr std::int64_t kCount = 200000;
  std::vector<float> f32(kCount);
  std::vector<BF16> bf16(kCount);
  std::vector<F16> f16(kCount);
  const std::uint64_t key = StreamKey(7, "x");
  FillNormal(Tensor(f32.data(), {kCount}), 0.5, key);
  FillNormal(Tensor(bf16.data(), {kCount}), 0.5, key);
  FillNormal(Tensor(f16.data(), {kCount}), 0.5, key);

  double sum = 0, squares = 0;
  for (float x : f32) sum += x, squares += static_cast<double>(x) * x;
  // Standard errors: 0.5 / sqrt(n) of the mean, about 1 / sqrt(2 n) of the deviation, relative. Five of each.
  EXPECT_NEAR(sum / kCount, 0, 5 * 0.5 / std::sqrt(kCount));
  EXPECT_NEAR(std::sqrt(squares / kCount), 0.5, 5 * 0.5 / std::sqrt(2.0 * kCount));
  EXPECT_LT(*std::max_element(f32.begin(), f32.end()), 0.5 * 3.4642);
  for (std::size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(bf16[i].bits, BF16(f32[i]).bits);
    ASSERT_EQ(f16[i].bits, F16(f32[i]).bits);
  }
}

TEST(GenerateTest, ProbabilitiesArePositiveAndAddUp) {
  std::vector<float> probs(100 * 8);
  FillProbabilities(Tensor(probs.data(), {100, 8}), 2.5, 3);
  for (std::size_t t = 0; t < 100; ++t) {
    double sum = 0;
    for (std::size_t j = 0; j < 8; ++j) {
      EXPECT_GT(probs[t * 8 + j], 0);
      sum += probs[t * 8 + j];
    }
    EXPECT_NEAR(sum, 2.5, 8 * 2.5 * 0x1p-24);
  }
}

double Share(const std::vector<std::int64_t>& loads, std::size_t begin, std::size_t end) {
  const auto total = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  const auto part = std::accumulate(loads.begin() + static_cast<std::ptrdiff_t>(begin),
                                    loads.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{0});
  return static_cast<double>(part) / static_cast<double>(total);
}

TEST(ExpertLoadsTest, OfSixteenTheTopThreeTake60PercentAndTheBottomFiveTake10) {
  const auto loads = ExpertLoads(Skew::kSkewed, 16);
  EXPECT_DOUBLE_EQ(Share(loads, 0, 3), 0.6);
  EXPECT_DOUBLE_EQ(Share(loads, 11, 16), 0.1);
  EXPECT_TRUE(std::is_sorted(loads.rbegin(), loads.rend()));
}

TEST(ExpertLoadsTest, OtherCountsHaveTheSameShares) {
  const auto loads256 = ExpertLoads(Skew::kSkewed, 256);
  EXPECT_DOUBLE_EQ(Share(loads256, 0, 48), 0.6);
  EXPECT_DOUBLE_EQ(Share(loads256, 176, 256), 0.1);
  // Of 8 experts, number 1 lies half in the top part, number 5 half in the bottom one.
  const auto loads8 = ExpertLoads(Skew::kSkewed, 8);
  EXPECT_DOUBLE_EQ(Share(loads8, 0, 1), 0.4);
  EXPECT_DOUBLE_EQ(Share(loads8, 1, 2), 0.2 + 0.0375);
  EXPECT_DOUBLE_EQ(Share(loads8, 5, 6), 0.0375 + 0.02);
  EXPECT_DOUBLE_EQ(Share(loads8, 6, 8), 0.08);
  EXPECT_EQ(ExpertLoads(Skew::kSkewed, 1).size(), 1u);
  EXPECT_DOUBLE_EQ(Share(ExpertLoads(Skew::kUniform, 10), 0, 3), 0.3);
}

TEST(ExpertLoadsTest, SplitRowsGivesEachItsShareToWithinARow) {
  for (std::int64_t rows : {0, 1, 7, 1000, 8192}) {
    const auto loads = ExpertLoads(Skew::kSkewed, 16);
    const auto split = SplitRows(loads, rows);
    EXPECT_EQ(std::accumulate(split.begin(), split.end(), std::int64_t{0}), rows);
    for (std::size_t e = 0; e < 16; ++e) {
      EXPECT_NEAR(static_cast<double>(split[e]), static_cast<double>(rows) * Share(loads, e, e + 1), 1);
    }
  }
}

std::vector<std::int32_t> TopkIds(Skew skew, std::int64_t tokens, std::int64_t k, std::int64_t experts,
                                  std::uint64_t key) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * k));
  FillTopkIds(Tensor(ids.data(), {tokens, k}), skew, experts, key);
  return ids;
}

TEST(TopkIdsTest, EachTokenGetsDifferentExpertsInRange) {
  struct {
    std::int64_t k, experts;
  } const cases[] = {{8, 256}, {2, 16}, {1, 1}, {8, 16}, {5, 5}, {3, 7}};
  for (const auto& [k, experts] : cases) {
    for (Skew skew : {Skew::kSkewed, Skew::kUniform}) {
      const auto ids = TopkIds(skew, 500, k, experts, 11);
      for (std::size_t t = 0; t < 500; ++t) {
        const auto first = ids.begin() + static_cast<std::ptrdiff_t>(t) * k;
        const std::set<std::int32_t> chosen(first, first + k);
        ASSERT_EQ(static_cast<std::int64_t>(chosen.size()), k) << k << " of " << experts;
        ASSERT_GE(*chosen.begin(), 0);
        ASSERT_LT(*chosen.rbegin(), experts);
      }
    }
  }
}

// Loads of the experts, the heaviest first.
std::vector<std::int64_t> SortedCounts(const std::vector<std::int32_t>& ids, std::size_t experts) {
  std::vector<std::int64_t> counts(experts);
  for (std::int32_t id : ids) ++counts[static_cast<std::size_t>(id)];
  std::sort(counts.rbegin(), counts.rend());
  return counts;
}

TEST(TopkIdsTest, RoutesFollowTheLoads) {
  const auto skewed = SortedCounts(TopkIds(Skew::kSkewed, 4096, 8, 256, 5), 256);
  EXPECT_NEAR(Share(skewed, 0, 48), 0.6, 0.01);
  EXPECT_NEAR(Share(skewed, 176, 256), 0.1, 0.01);
  const auto of16 = SortedCounts(TopkIds(Skew::kSkewed, 20000, 2, 16, 5), 16);
  EXPECT_NEAR(Share(of16, 0, 3), 0.6, 0.01);
  EXPECT_NEAR(Share(of16, 11, 16), 0.1, 0.01);
  const auto uniform = SortedCounts(TopkIds(Skew::kUniform, 4096, 8, 256, 5), 256);
  EXPECT_NEAR(Share(uniform, 0, 128), 0.5, 0.05);
}

// With 8 of 16 chosen, a share of 20 % is more than the 1/8 that a token can give: such experts are always chosen.
TEST(TopkIdsTest, SharesBeyondOnePerTokenAreCapped) {
  const auto counts = SortedCounts(TopkIds(Skew::kSkewed, 1000, 8, 16, 5), 16);
  for (std::size_t e = 0; e < 3; ++e) EXPECT_EQ(counts[e], 1000);
  EXPECT_GT(counts[15], 0);
}

TEST(RotaryTest, AnglesGrowWithPositionsAndShrinkWithPairs) {
  std::vector<float> cos(3000 * 2), sin(3000 * 2);
  FillRotary(Tensor(cos.data(), {3000, 2}), 100, /*sine=*/false);
  FillRotary(Tensor(sin.data(), {3000, 2}), 100, /*sine=*/true);
  for (std::size_t p = 0; p < 3000; ++p) {
    const auto position = static_cast<double>(p);
    EXPECT_EQ(cos[2 * p], static_cast<float>(std::cos(position)));
    EXPECT_EQ(sin[2 * p], static_cast<float>(std::sin(position)));
    EXPECT_NEAR(cos[2 * p + 1], std::cos(position / 10), 1e-6);
    EXPECT_NEAR(sin[2 * p + 1], std::sin(position / 10), 1e-6);
  }
}

TEST(TopkIdsTest, HotExpertsDependOnTheKeyAndIdsOnTheirWidthDoNot) {
  EXPECT_NE(TopkIds(Skew::kSkewed, 10, 8, 256, 1), TopkIds(Skew::kSkewed, 10, 8, 256, 2));
  std::vector<std::int64_t> wide(80);
  FillTopkIds(Tensor(wide.data(), {10, 8}), Skew::kSkewed, 256, 1);
  const auto narrow = TopkIds(Skew::kSkewed, 10, 8, 256, 1);
  EXPECT_TRUE(std::equal(wide.begin(), wide.end(), narrow.begin(), narrow.end()));
}

}  // namespace
}  // namespace cubist
