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
  EXPECT_LE(first.tried, 30);
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

// However many choices a call meets; the replay of what it takes itself is not counted.
TEST(TilingSearchTest, KeepsToTheBudget) {
  const Call twice = [](const Device& device, Profile* profile) {
    Profile first;
    for (const char* shape : {"300x520x400", "64x64x64"}) {
      KernelCallOptions options;
      options.kernel = "matmul", options.shape = shape;
      KernelCall call;
      CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
      CUBIST_RETURN_IF_ERROR(call(device, profile == nullptr ? nullptr : &first));
      if (profile != nullptr) profile->Append(first);
    }
    return Status();
  };
  for (const int budget : {1, 2, 7, 20}) {
    int told = 0;
    SearchOptions options;
    options.budget = budget;
    options.on_progress = [&](int tried, int of, double best_s) {
      EXPECT_EQ(tried, ++told);
      EXPECT_EQ(of, budget);
      EXPECT_GT(best_s, 0);
    };
    SearchResult result;
    ASSERT_TRUE(SearchTilings(twice, Ascend910B2(), options, &result).ok());
    EXPECT_EQ(result.choices.size(), 2u);
    EXPECT_EQ(result.tried, budget);
    EXPECT_EQ(told, budget);
    // A tiling that was given up in the first launch is no quicker one.
    Profile best;
    const auto tuning = std::make_shared<const Tuning>(result.tuning);
    ASSERT_TRUE(twice(Npu(Ascend910B2(), {.with_data = false, .tuning = tuning}), &best).ok());
    EXPECT_EQ(result.best.launches, 2);
    EXPECT_EQ(result.best.time_s, best.time_s);
  }
}

// Parts of 16 columns would be a hundred times as many instructions as what the call takes.
TEST(TilingSearchTest, HopelessTilingsAreNotReplayed) {
  const Call norm = [](const Device& device, Profile* profile) {
    KernelCallOptions options;
    options.kernel = "rms_norm", options.shape = "16x262144";
    KernelCall call;
    CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
    return call(device, profile);
  };
  SearchOptions options;
  options.budget = 200;
  SearchResult result;
  ASSERT_TRUE(SearchTilings(norm, Ascend910B2(), options, &result).ok());
  EXPECT_GT(result.choices[0].candidates.size(), 80u);
  EXPECT_GT(result.tried, 3);
  EXPECT_LT(result.tried, 40);
}

TEST(TilingSearchTest, CallsOfManyInstructionsHaveFewerReplays) {
  SearchOptions options;
  options.budget = 20;
  SearchResult all, few, none;
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), options, &all).ok());
  EXPECT_EQ(all.budget, 20);
  options.most_instructions = 3 * all.untuned.instructions;
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), options, &few).ok());
  EXPECT_EQ(few.budget, 3);
  EXPECT_EQ(few.tried, 3);
  options.most_instructions = 1;
  ASSERT_TRUE(SearchTilings(SmallMatmul(), Ascend910B2(), options, &none).ok());
  EXPECT_EQ(none.tried, 0);
  EXPECT_EQ(none.best.time_s, none.untuned.time_s);
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
