// The closed-form prices of tilings against the replay: they rank alike, and the cheapest by price is among the best.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tools/kernel_call.h"
#include "tools/tiling_search.h"
#include "tools/validate.h"

namespace cubist {
namespace {

struct Shape {
  std::int64_t m, n, k;
};

Call CallOf(const Shape& s, bool any_order) {
  KernelCallOptions options;
  options.kernel = "matmul";
  options.shape = std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
  options.any_order = any_order;
  return [options](const Device& device, Profile* profile) {
    KernelCall call;
    CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
    return call(device, profile);
  };
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
  double regret = 0;    // of the chosen tiling, over the best of them by replay
  std::string chosen = {}, best = {};
};

// `spread` candidates evenly by rank of price, and the `front` cheapest.
Ranked Rank(const ChipSpec& chip, const Shape& s, std::size_t spread, std::size_t front) {
  const Call call = CallOf(s, /*any_order=*/true);
  std::vector<TilingChoice> choices;
  EXPECT_TRUE(MeetChoices(call, chip, {}, &choices).ok());
  EXPECT_EQ(choices.size(), 1u);
  if (choices.size() != 1) return {};
  TilingChoice& choice = choices[0];
  auto& all = choice.candidates;
  std::erase_if(all, [&](const auto& c) { return Mmads(s, c.tiling) > kMostMmads; });
  std::stable_sort(all.begin(), all.end(), [](const auto& x, const auto& y) { return x.price < y.price; });
  const auto replayed = [&](const std::string& tiling) {
    auto tuning = std::make_shared<Tuning>();
    tuning->Set(choice.kernel, choice.chip, choice.shape, tiling);
    Profile profile;
    EXPECT_TRUE(call(Npu(chip, {.with_data = false, .tuning = tuning}), &profile).ok());
    return profile.time_s;
  };
  std::vector<double> prices, times;
  const double chosen = replayed(choice.chosen);
  double best = chosen;
  std::string best_tiling = choice.chosen;
  const auto note = [&](const std::string& tiling, double time) {
    if (time < best) best = time, best_tiling = tiling;
  };
  for (std::size_t i = 0; i < spread; ++i) {
    const auto& candidate = all[i * (all.size() - 1) / (spread - 1)];
    prices.push_back(candidate.price / chip.clock_hz), times.push_back(replayed(candidate.tiling));
    note(candidate.tiling, times.back());
  }
  for (std::size_t i = 0; i < std::min(front, all.size()); ++i) note(all[i].tiling, replayed(all[i].tiling));
  return {Summarise(prices, times).spearman, chosen / best - 1, choice.chosen, best_tiling};
}

TEST(PriceTest, RanksProductsAsTheReplayDoes) {
  for (const Shape& s : {Shape{4096, 1536, 7168},
                         {4096, 3072, 1536},
                         {4096, 576, 7168},
                         {4096, 4096, 512},
                         {4096, 7168, 2048},
                         {4096, 4096, 7168},
                         {512, 4096, 7168},
                         {2048, 2048, 2048}}) {
    SCOPED_TRACE(std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k));
    const Ranked ranked = Rank(Ascend910B2(), s, /*spread=*/20, /*front=*/6);
    EXPECT_GE(ranked.spearman, 0.9);
    EXPECT_LE(ranked.regret, 0.03) << ranked.chosen << "\nagainst " << ranked.best;
  }
}

}  // namespace
}  // namespace cubist
