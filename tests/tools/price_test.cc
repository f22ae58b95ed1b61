// The closed-form prices of tilings against the replay: they rank alike, and what a call takes is among the best.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "npu_model/parallel.h"
#include "tools/kernel_call.h"
#include "tools/tiling_search.h"
#include "tools/validate.h"

namespace cubist {
namespace {

struct Shape {
  std::int64_t m, n, k;
};
std::string Name(const Shape& s) {
  return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
}

Call CallOf(const KernelCallOptions& options) {
  return [options](const Device& device, Profile* profile) {
    KernelCall call;
    CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
    return call(device, profile);
  };
}

Call CallOf(const Shape& s) {
  KernelCallOptions options;
  options.kernel = "matmul";
  options.shape = Name(s);
  options.any_order = true;
  return CallOf(options);
}

// Mmads that a tiling makes of a shape. Tilings of more than kMostMmads, which take long to replay and are far from the
// best, are not looked at.
constexpr std::int64_t kMostMmads = 50000;
std::int64_t Mmads(const Shape& s, const std::string& tiling) {
  const TilingFields fields = FieldsOf(tiling);
  const auto field = [&](const char* name) { return std::atoll(fields.at(name).c_str()); };
  return CeilDiv(s.m, field("m")) * CeilDiv(s.n, field("n")) * CeilDiv(s.k, field("k0"));
}

struct Ranked {
  double spearman = 0;  // over candidates from the cheapest to the dearest
  double regret = 0;    // of what the call takes, over the best that a search by replay finds
  std::string chosen = {}, best = {};
};

// `spread` candidates evenly by rank of price, and a search of `budget` replays from what the call takes on.
Ranked Rank(const ChipSpec& chip, const Shape& s, std::size_t spread, int budget) {
  const Call call = CallOf(s);
  SearchResult found;
  EXPECT_TRUE(SearchTilings(call, chip, {.budget = budget}, &found).ok());
  EXPECT_EQ(found.choices.size(), 1u);
  if (found.choices.size() != 1) return {};
  TilingChoice& choice = found.choices[0];
  Profile untuned;
  EXPECT_TRUE(call(Npu(chip, {.with_data = false}), &untuned).ok());
  EXPECT_EQ(untuned.time_s, found.untuned.time_s);
  auto& all = choice.candidates;
  std::erase_if(all, [&](const auto& c) { return Mmads(s, c.tiling) > kMostMmads; });
  std::vector<double> prices(spread), times(spread);
  ForEach(spread, [&](std::size_t i) {
    const auto& candidate = all[i * (all.size() - 1) / (spread - 1)];
    auto tuning = std::make_shared<Tuning>();
    tuning->Set(choice.kernel, choice.chip, choice.shape, candidate.tiling);
    Profile profile;
    EXPECT_TRUE(call(Npu(chip, {.with_data = false, .tuning = tuning}), &profile).ok());
    prices[i] = candidate.price, times[i] = profile.time_s;
  });
  return {Summarise(prices, times).spearman, untuned.time_s / found.best.time_s - 1, found.untuned_tilings[0],
          choice.chosen};
}

class ProductPriceTest : public ::testing::TestWithParam<Shape> {};

TEST_P(ProductPriceTest, RanksAsTheReplayDoes) {
  const Ranked ranked = Rank(Ascend910B2(), GetParam(), /*spread=*/16, /*budget=*/32);
  EXPECT_GE(ranked.spearman, 0.9);
  EXPECT_LE(ranked.regret, 0.03) << ranked.chosen << "\nagainst " << ranked.best;
}

INSTANTIATE_TEST_SUITE_P(Shapes, ProductPriceTest,
                         ::testing::ValuesIn<Shape>({{4096, 1536, 7168},
                                                     {4096, 3072, 1536},
                                                     {4096, 7168, 576},
                                                     {4096, 576, 7168},
                                                     {4096, 4096, 512},
                                                     {4096, 7168, 2048},
                                                     {512, 4096, 7168},
                                                     {512, 4096, 4096},
                                                     {640, 8192, 8192},
                                                     {2048, 2048, 2048},
                                                     {1000, 1001, 1003},
                                                     {300, 5000, 700},
                                                     {777, 777, 7777},
                                                     {777, 128, 777},
                                                     {640, 640, 640},
                                                     {3000, 200, 333},
                                                     {127, 4099, 513}}),
                         [](const auto& shape) { return Name(shape.param); });

struct AttentionCase {
  const char* kernel;
  const char* shape;
  bool causal = false;
};

class AttentionPriceTest : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionPriceTest, TakesOneOfTheBest) {
  KernelCallOptions options;
  options.kernel = GetParam().kernel, options.shape = GetParam().shape, options.causal = GetParam().causal;
  SearchResult found;
  ASSERT_TRUE(SearchTilings(CallOf(options), Ascend910B2(), {.budget = 48}, &found).ok());
  EXPECT_LE(found.untuned.time_s, 1.03 * found.best.time_s)
      << found.untuned_tilings[0] << "\nagainst " << found.choices[0].chosen;
}

std::vector<AttentionCase> AttentionCases() {
  std::vector<AttentionCase> cases;
  for (const char* kernel : {"flash_attention", "flash_attention_grad"}) {
    cases.push_back({kernel, "4x1000x80x80", true});
    cases.push_back({kernel, "1x777x72x72"});
    cases.push_back({kernel, "12x333x128x128", true});
    cases.push_back({kernel, "5x640x96x96"});
    cases.push_back({kernel, "3x700x128x128x64", true});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionPriceTest, ::testing::ValuesIn(AttentionCases()),
                         [](const auto& x) { return std::string(x.param.kernel) + "_" + x.param.shape; });

}  // namespace
}  // namespace cubist
