// The closed-form prices of tilings against the replay: they rank alike, and what a call takes is among the best.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/grouped_matmul.h"
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

// Mmads that a tiling makes of products. Tilings of more than kMostMmads, which take long to replay and are far from the
// best, are not looked at.
constexpr std::int64_t kMostMmads = 50000;
std::int64_t Mmads(const std::vector<Shape>& products, const std::string& tiling) {
  const TilingFields fields = FieldsOf(tiling);
  const auto field = [&](const char* name) { return std::atoll(fields.at(name).c_str()); };
  std::int64_t mmads = 0;
  for (const Shape& s : products)
    mmads += CeilDiv(s.m, field("m")) * CeilDiv(s.n, field("n")) * CeilDiv(s.k, field("k0"));
  return mmads;
}

struct Ranked {
  double spearman = 0;  // over candidates from the cheapest to the dearest
  double regret = 0;    // of what the call takes, over the best that a search by replay finds
  std::string chosen = {}, best = {};
};

// `spread` candidates evenly by rank of price, and a search of `budget` replays from what the call takes on.
Ranked Rank(const ChipSpec& chip, const Call& call, const std::vector<Shape>& products, std::size_t spread,
            int budget) {
  SearchResult found;
  EXPECT_TRUE(SearchTilings(call, chip, {.budget = budget}, &found).ok());
  EXPECT_EQ(found.choices.size(), 1u);
  if (found.choices.size() != 1) return {};
  TilingChoice& choice = found.choices[0];
  Profile untuned;
  EXPECT_TRUE(call(Npu(chip, {.with_data = false}), &untuned).ok());
  EXPECT_EQ(untuned.time_s, found.untuned.time_s);
  auto& all = choice.candidates;
  std::erase_if(all, [&](const auto& c) { return Mmads(products, c.tiling) > kMostMmads; });
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
  const Ranked ranked = Rank(Ascend910B2(), CallOf(GetParam()), {GetParam()}, /*spread=*/16, /*budget=*/32);
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

// Products of eight groups. Their price is the mean of two cases, as many rows in each group and all in one, and what the
// rows are is known to the cores alone: one tiling is for all of these.
struct GroupedCase {
  const char* rows;
  std::vector<std::int32_t> counts;
  std::int64_t n, k;
};
std::string Name(const GroupedCase& c) {
  return std::string(c.rows) + "_" + std::to_string(c.n) + "x" + std::to_string(c.k);
}
std::ostream& operator<<(std::ostream& out, const GroupedCase& c) { return out << Name(c); }

Call CallOf(const GroupedCase& c) {
  return [c](const Device& device, Profile* profile) {
    const std::int64_t rows = std::accumulate(c.counts.begin(), c.counts.end(), std::int64_t{0}),
                       groups = std::ssize(c.counts);
    GroupedMatmulArgs args;
    args.x = ConstTensor(nullptr, DType::kBF16, {rows, c.k});
    args.groups = ConstTensor(c.counts.data(), {groups});
    args.weights = ConstTensor(nullptr, DType::kBF16, {groups, c.k, c.n});
    args.out = Tensor(nullptr, DType::kBF16, {rows, c.n});
    return GroupedMatmul(device, args, profile);
  };
}

std::vector<Shape> ProductsOf(const GroupedCase& c) {
  std::vector<Shape> products;
  for (const std::int32_t rows : c.counts) products.push_back({rows, c.n, c.k});
  return products;
}

// Least rank correlation and most regret.
struct Limits {
  double spearman = 0.9, regret = 0.03;
};
// Misses, each as large as it is. The small ones take 37 and 21 us, 4 of them for the start of Vector cores that read ahead,
// which the price loses where HBM is its bound; with that start it has products that read nothing ahead too cheap, by 0.23 of
// 8x1024_1792x512. The skewed one's groups are of 5 to 412 rows, where the price has 128 or all.
Limits LimitsOf(const std::string& name) {
  static const std::map<std::string, Limits> misses = {{"8x128_1024x1792", {.regret = 0.068}},
                                                       {"8x128_1792x512", {.regret = 0.146}},
                                                       {"8x128_skewed_4096x7168", {.regret = 0.053}},
                                                       {"8x1024_7168x2048", {.spearman = 0.85}},
                                                       {"8x1024_skewed_7168x2048", {.spearman = 0.89}}};
  const auto found = misses.find(name);
  return found == misses.end() ? Limits() : found->second;
}

class GroupedPriceTest : public ::testing::TestWithParam<GroupedCase> {};

TEST_P(GroupedPriceTest, RanksAsTheReplayDoes) {
  const GroupedCase& c = GetParam();
  const Ranked ranked = Rank(Ascend910B2(), CallOf(c), ProductsOf(c), /*spread=*/16, /*budget=*/32);
  const Limits limits = LimitsOf(Name(c));
  EXPECT_GE(ranked.spearman, limits.spearman);
  EXPECT_LE(ranked.regret, limits.regret) << ranked.chosen << "\nagainst " << ranked.best;
}

// DeepSeek-V3's experts, up and down, with so small a part of their columns and rows.
std::vector<GroupedCase> GroupedCases(std::int64_t part) {
  const std::vector<std::int32_t> many(8, 1024), few(8, 128);
  const std::vector<std::int32_t> many_skewed{3300, 1900, 1200, 800, 500, 300, 150, 42};
  const std::vector<std::int32_t> few_skewed{412, 238, 150, 100, 63, 38, 18, 5};
  std::vector<GroupedCase> cases;
  for (const auto& [rows, counts] : {std::pair("8x1024", many), std::pair("8x1024_skewed", many_skewed),
                                     std::pair("8x128", few), std::pair("8x128_skewed", few_skewed)}) {
    cases.push_back({rows, counts, 4096 / part, 7168 / part});
    cases.push_back({rows, counts, 7168 / part, 2048 / part});
  }
  return cases;
}

constexpr auto kGroupedName = [](const auto& x) { return Name(x.param); };
INSTANTIATE_TEST_SUITE_P(Shapes, GroupedPriceTest, ::testing::ValuesIn(GroupedCases(4)), kGroupedName);
// Too long for every change.
INSTANTIATE_TEST_SUITE_P(DISABLED_Workload, GroupedPriceTest, ::testing::ValuesIn(GroupedCases(1)),
                         kGroupedName);

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
