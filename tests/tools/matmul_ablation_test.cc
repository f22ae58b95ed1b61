// What the ablation of products claims, on the shapes of the workload that are quick to replay, and the L2 hits that orders of
// blocks were measured to have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/matmul.h"
#include "npu_model/device.h"
#include "npu_model/tuning.h"
#include "tools/ablate/ablation.h"
#include "tools/tiling_search.h"
#include "tools/workload.h"

namespace cubist {
namespace {

// Each step changes one idea; the Cube works a tenth more of the time by all of them.
TEST(MatmulAblationTest, TheCubeWorksATenthMoreOfTheTime) {
  Workload workload;
  ASSERT_TRUE(LoadWorkload("deepseek_v3", WorkloadFolders(), &workload).ok());
  // The one that gains least is among them. Here so few replays find what thirty-two do.
  const std::vector<std::string> wanted = {"4096x7168x576", "4096x512x16384", "512x7168x4096"};
  double gain = 0;
  std::size_t cases = 0;
  for (const AblationCase& c : MatmulAblation(workload)) {
    if (std::find(wanted.begin(), wanted.end(), c.name) == wanted.end()) continue;
    CaseResult result;
    ASSERT_TRUE(RunAblation(c, Ascend910B2(), {.budget = 2}, &result).ok());
    ASSERT_EQ(result.steps.size(), 5u);
    for (std::size_t i = 0; i < result.steps.size(); ++i) {
      const StepResult& step = result.steps[i];
      EXPECT_GT(step.profile.l2_hit_rate, 0) << c.name << ", " << step.name;
      EXPECT_LT(step.profile.l2_hit_rate, 1) << c.name << ", " << step.name;
      TilingFields fields = FieldsOf(step.tiling);
      if (i < 3) {
        EXPECT_EQ(fields["pieces"] + fields["a_span"], "11") << c.name << ", " << step.name;
      }
      if (i < 4) {
        EXPECT_EQ(fields["stagger"] + fields["prefetch"], "00") << c.name << ", " << step.name;
      }
    }
    EXPECT_GE(result.gain(), 1) << c.name;
    gain += std::log(result.steps.back().profile.cube_utilisation / result.steps[0].profile.cube_utilisation);
    ++cases;
  }
  ASSERT_EQ(cases, wanted.size());
  EXPECT_GE(std::exp(gain / static_cast<double>(cases)), 1.10);
}

// Products of N = K = 16384 in blocks of 128 x 256: 30.9 % in row order, 93.7 % by a swizzle of five columns. Of how many rows is
// not said; from 4096 on they make no difference here.
TEST(BlockOrderHitsTest, AreThoseThatWereMeasured) {
  constexpr std::int64_t kRows = 4096, kSize = 16384;
  MatmulArgs args;
  args.a = ConstTensor(nullptr, DType::kF16, {kRows, kSize});
  args.b = ConstTensor(nullptr, DType::kF16, {kSize, kSize}), args.transpose_b = true;
  args.c = Tensor(nullptr, DType::kF16, {kRows, kSize});
  const auto hits = [&](const std::string& order) {
    TilingChoice met;
    auto tuning = std::make_shared<Tuning>();
    tuning->on_choice = [&](const TilingChoice& choice) { met = choice; };
    EXPECT_TRUE(
        Matmul(Npu(Ascend910B2(), {.with_data = false, .tuning = tuning, .give_up_s = 1e-9}), args).ok());
    tuning = std::make_shared<Tuning>();
    tuning->Set(met.kernel, met.chip, met.shape,
                "m=128,n=256,k1=256,k0=64,l1_stages=2,l0_stages=2,l0c_stages=1,pack_a=0,pack_b=0,b_once=0,"
                "pieces=1,stagger=0,keep_a=0,a_span=1,c_parts=1,prefetch=0," +
                    order);
    Profile profile;
    EXPECT_TRUE(Matmul(Npu(Ascend910B2(), {.with_data = false, .tuning = tuning}), args, &profile).ok());
    return 100 * profile.l2_hit_rate;
  };
  EXPECT_NEAR(hits("order=row-major,width=1"), 30.9, 3);
  EXPECT_NEAR(hits("order=swizzled,width=5"), 93.7, 1);
}

}  // namespace
}  // namespace cubist
