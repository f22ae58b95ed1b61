// The ablation of attention on one small case, and what it writes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/tools/command.h"

namespace cubist {
namespace {

TEST_F(CommandTest, AblatesAttentionAndWritesTheSteps) {
  const std::string name = "forward 128+64/128 S 2048 x 8 causal";
  const Outcome outcome =
      Cubist("ablate flash_attention --only '" + name + "' --budget 1 --json '" + Path("rows.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = testing::ParseJson(Read("rows.json"));
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["case"], name);
  const Json& steps = json[0]["steps"];
  const std::vector<std::string> names = {"conventional", "rectangular", "no concatenation", "RoPE fused",
                                          "tight stages"};
  ASSERT_EQ(steps.size(), names.size());
  // Q, K, V and O of bf16 at least, of 8 heads.
  constexpr double kLeast = 2.0 * 2048 * 8 * (2 * (128 + 64) + 2 * 128);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const Json& step = steps[i];
    EXPECT_EQ(step["name"], names[i]);
    EXPECT_GT(step["time_us"].get<double>(), 0);
    EXPECT_GT(step["gm_bytes"].get<double>(), kLeast);
    for (const char* busy : {"cube_busy", "vector_busy"}) {
      EXPECT_GT(step[busy].get<double>(), 0);
      EXPECT_LT(step[busy].get<double>(), 1);
    }
    EXPECT_NE(outcome.out.find(names[i]), std::string::npos);
    if (i > 0) {
      EXPECT_LE(step["time_us"].get<double>(), steps[i - 1]["time_us"].get<double>());
    }
  }
  EXPECT_NEAR(json[0]["gain"].get<double>(),
              steps.front()["time_us"].get<double>() / steps.back()["time_us"].get<double>(), 1e-9);
}

}  // namespace
}  // namespace cubist
