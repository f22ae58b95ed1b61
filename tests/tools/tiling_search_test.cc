#include "tools/tiling_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tools/ablate/ablation.h"
#include "tools/kernel_call.h"

namespace cubist {
namespace {

Call SmallMatmul() {
  return [](const Device& device, Profile* profile) {
    KernelCallOptions options;
    options.kernel = "matmul", options.shape = "300x520x400";
    KernelCall call;
    CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
    return call(device, profile);
  };
}

TEST(TilingSearchTest, FieldsOfATiling) {
  EXPECT_EQ(FieldsOf("m=16,order=row-major,pack"),
            (TilingFields{{"m", "16"}, {"order", "row-major"}, {"pack", ""}}));
  EXPECT_TRUE(FieldsOf("").empty());
}

TEST(TilingSearchTest, FindsNoWorseThanTheCallTakesAndAgainTheSame) {
  SearchResult first, second;
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), {.budget = 30}, &first).ok());
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), {.budget = 30}, &second).ok());
  EXPECT_LE(first.best.time_s, first.untuned.time_s);
  EXPECT_LE(first.tried, 31);
  EXPECT_GT(first.tried, 10);
  ASSERT_EQ(first.choices.size(), 1u);
  EXPECT_EQ(first.choices[0].chosen, second.choices[0].chosen);
  EXPECT_EQ(first.best.time_s, second.best.time_s);
  // The tuning that it found makes the call take that time.
  Profile profile;
  const auto tuning = std::make_shared<const Tuning>(first.tuning);
  ASSERT_TRUE(SmallMatmul()(Npu(Ascend910B2(), {.with_data = false, .tuning = tuning}), &profile).ok());
  EXPECT_EQ(profile.time_s, first.best.time_s);
}

TEST(TilingSearchTest, TakesOnlyWhatIsAllowed) {
  SearchOptions options;
  options.budget = 12;
  options.allow = [](const TilingFields& f) { return f.at("m") == "64" && f.at("order") == "diagonal"; };
  SearchResult result;
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), options, &result).ok());
  EXPECT_EQ(FieldsOf(result.choices[0].chosen).at("m"), "64");
  EXPECT_EQ(FieldsOf(result.choices[0].chosen).at("order"), "diagonal");
  options.allow = [](const TilingFields&) { return false; };
  const Status status = SearchTilings(SmallMatmul(), Ascend910B2(), options, &result);
  EXPECT_NE(status.message().find("matmul: no tiling of this kind fits ascend910b2"), std::string::npos);
}

TEST(AblationTest, EveryStepBeginsWhereTheOneBeforeEnded) {
  const auto row_major = [](const TilingFields& f) { return f.at("order") == "row-major"; };
  const AblationCase c{"300x400x520",
                       "test",
                       {{"per-tile", SmallMatmul(), sync::Policy::kPerTile, row_major},
                        {"minimal", SmallMatmul(), sync::Policy::kMinimal, row_major},
                        {"order", SmallMatmul(), sync::Policy::kMinimal, {}}}};
  CaseResult result;
  ASSERT_TRUE(RunAblation(c, Ascend910B2(), {.budget = 12}, &result).ok());
  ASSERT_EQ(result.steps.size(), 3u);
  EXPECT_EQ(result.steps[0].name, "per-tile");
  EXPECT_LE(result.steps[2].profile.time_s, result.steps[1].profile.time_s);
  EXPECT_DOUBLE_EQ(result.gain(), result.steps[0].profile.time_s / result.steps[2].profile.time_s);
  EXPECT_EQ(result.steps[2].profile.macs, 300 * 400 * 520);
}

}  // namespace
}  // namespace cubist
