// The small operators of conventional chains move the bytes that they say, and no more.
#include "tools/ablate/chain_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tools/ablate/ablation.h"

namespace cubist {
namespace {

Device Chip() { return Npu(Ascend910B2(), {.with_data = false}); }

void ExpectTraffic(const Status& status, const Profile& p, std::int64_t read, std::int64_t written) {
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(p.gm_read, read);
  EXPECT_EQ(p.gm_written, written);
  EXPECT_EQ(p.launches, 1);
}

TEST(ChainOpsTest, EveryByteOnce) {
  const std::int64_t rows = 330, cols = 130;
  {
    Profile p;
    // The second part has 33 rows, which repeat.
    const Status status = JoinColumns(Chip(), rows, {{rows, cols}, {33, 64}}, &p);
    ExpectTraffic(status, p, rows * (cols + 64) * 2, rows * (cols + 64) * 2);
  }
  {
    Profile p;
    const Status status = SliceColumns(Chip(), rows, 200, cols, &p);
    ExpectTraffic(status, p, rows * cols * 2, rows * cols * 2);
  }
  {
    Profile p;
    std::vector<std::int32_t> places(static_cast<std::size_t>(rows));
    std::iota(places.rbegin(), places.rend(), 0);
    const Status status = GatherRows(Chip(), rows, cols, places, &p);
    ExpectTraffic(status, p, rows * (cols * 2 + 4), rows * cols * 2);
  }
  {
    Profile p;
    const Status status = MapIndices(Chip(), 5000, &p);
    ExpectTraffic(status, p, 5000 * 4, 5000 * 4);
  }
  {
    Profile p;
    const Status status = ScaleRows(Chip(), rows, cols, &p);
    ExpectTraffic(status, p, rows * (cols * 2 + 4), rows * cols * 4);
  }
  {
    Profile p;
    const Status status = SumRows(Chip(), rows / 3, 3, cols, &p);
    ExpectTraffic(status, p, rows * cols * 4, rows / 3 * cols * 4);
  }
  {
    Profile p;
    const Status status = NarrowRows(Chip(), rows, cols, &p);
    ExpectTraffic(status, p, rows * cols * 4, rows * cols * 2);
  }
}

TEST(ChainOpsTest, EmptyIsFine) {
  Profile p;
  EXPECT_TRUE(JoinColumns(Chip(), 0, {{0, 4}, {0, 4}}, &p).ok());
  EXPECT_TRUE(SliceColumns(Chip(), 0, 8, 4, &p).ok());
  EXPECT_EQ(p.gm_read, 0);
}

// A layer's steps hold the same kernels in the same order; what an idea does not touch takes the same time in all of them.
TEST(AblationTest, ALayerGainsByItsKernels) {
  Workload w;
  w.name = "small", w.hidden = 512, w.layers = 1;
  w.attention = {.heads = 2, .q_rank = 256, .kv_rank = 128, .nope_dim = 64, .rope_dim = 32, .v_dim = 64};
  w.moe = {.experts = 8, .shared_experts = 1, .top_k = 2, .ffn = 256, .dense_ffn = 512};
  w.training = {.tensor_parallel = 1, .expert_shards = 4, .sequence = 256, .micro_batch = 1};
  const std::vector<AblationCase> cases = LayerAblation(w);
  ASSERT_EQ(cases.size(), 2u);
  for (const AblationCase& c : cases) {
    CaseResult result;
    const Status status = RunAblation(c, Ascend910B2(), {.budget = 1}, &result);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(result.steps.size(), 4u);
    for (std::size_t i = 0; i < c.steps.size(); ++i) {
      ASSERT_EQ(c.steps[i].parts.size(), c.steps[0].parts.size());
      for (std::size_t p = 0; p < c.steps[i].parts.size(); ++p)
        EXPECT_EQ(c.steps[i].parts[p].name, c.steps[0].parts[p].name);
      EXPECT_GT(result.steps[i].profile.time_s, 0);
      if (i > 0) {
        EXPECT_LE(result.steps[i].profile.launches, result.steps[i - 1].profile.launches) << c.name;
      }
    }
    EXPECT_GT(result.gain(), 1) << c.name;
    EXPECT_LT(result.steps.back().profile.gm_read + result.steps.back().profile.gm_written,
              result.steps.front().profile.gm_read + result.steps.front().profile.gm_written)
        << c.name;
  }
}

// What the model's blocks have, and no more.
TEST(AblationTest, ALayerHasTheNormsAndGroupsOfItsModel) {
  const auto names = [](const char* model) {
    Workload w;
    EXPECT_TRUE(LoadWorkload(model, WorkloadFolders(), &w).ok());
    std::vector<std::string> found;
    const std::vector<AblationCase> cases = LayerAblation(w);
    for (const AblationStep& part : cases.front().steps.back().parts) found.push_back(part.name);
    return found;
  };
  const std::vector<std::string> deepseek = names("deepseek_v3"), pangu = names("pangu_ultra_moe");
  EXPECT_EQ(std::count(deepseek.begin(), deepseek.end(), "rms_norm 2048 7168"), 2);
  EXPECT_EQ(std::count(deepseek.begin(), deepseek.end(), "route 2048 256 8 8"), 1);
  EXPECT_EQ(std::count(pangu.begin(), pangu.end(), "rms_norm 2048 7680"), 4);
  EXPECT_EQ(std::count(pangu.begin(), pangu.end(), "route 2048 256 8 1"), 1);
}

// Attention's steps differ in how stages overlap, not in how tiles are loaded: by twos in each, of which the last alone is
// free to walk deeper.
TEST(AblationTest, EveryStepOfAttentionLoadsByTwos) {
  Workload workload;
  ASSERT_TRUE(LoadWorkload("deepseek_v3", WorkloadFolders(), &workload).ok());
  for (const AblationCase& c : FlashAttentionAblation(workload)) {
    for (const AblationStep& step : c.steps) {
      SCOPED_TRACE(c.name + ", " + step.name);
      const auto allowed = [&](const char* tiling) { return step.allow(FieldsOf(tiling)); };
      for (const char* tiling : {"depth=0,kv_stages=1", "depth=2,kv_stages=1", "depth=0,load_stages=1"})
        EXPECT_FALSE(allowed(tiling)) << tiling;
      for (const char* tiling : {"depth=0,kv_stages=2", "depth=0,load_stages=2", "of_a_launch_that_joins=1"})
        EXPECT_TRUE(allowed(tiling)) << tiling;
      for (const char* tiling : {"depth=2,kv_stages=2", "depth=1,load_stages=1"})
        EXPECT_EQ(allowed(tiling), &step == &c.steps.back()) << tiling;
    }
  }
}

// Every ablation ends with fewer launches than it began with, or as many, and its names tell cases apart.
TEST(AblationTest, CasesHaveNamesAndSteps) {
  Workload workload;
  ASSERT_TRUE(LoadWorkload("deepseek_v3", WorkloadFolders(), &workload).ok());
  for (const Ablation& ablation : Ablations()) {
    std::vector<std::string> names;
    for (const AblationCase& c : ablation.cases(workload)) {
      EXPECT_GE(c.steps.size(), 3u) << c.name;
      names.push_back(c.name);
    }
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << ablation.kernel;
  }
}

}  // namespace
}  // namespace cubist
