#include "npu_model/host/simd_targets.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

TEST(SimdTargetsTest, HoldTheBest) {
  const std::vector<std::int64_t> targets = SimdTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_STREQ(hwy::TargetName(targets.front()), BestCubeOps().target);
}

#if HWY_ARCH_X86 && !defined(HWY_COMPILE_ONLY_STATIC)
TEST(SimdTargetsTest, EndWithThePortableOne) {
  const std::int64_t last = SimdTargets().back();
  EXPECT_TRUE(last == HWY_EMU128 || last == HWY_SCALAR) << hwy::TargetName(last);
}
#endif

TEST(SimdTargetsTest, HoldEveryTargetOfTheCpu) {
  const std::vector<std::int64_t> targets = SimdTargets();
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    EXPECT_EQ(std::count(targets.begin(), targets.end(), rest & -rest), 1) << hwy::TargetName(rest & -rest);
  }
}

TEST(SimdTargetsTest, TheTablesFollowAndAreRestored) {
  const std::string best = BestCubeOps().target;
  std::size_t calls = 0;
  for (std::int64_t target : SimdTargets()) {
    const ScopedSimdTarget scope(target);
    EXPECT_STREQ(BestCubeOps().target, hwy::TargetName(target));
    EXPECT_STREQ(BestVectorOps().target, hwy::TargetName(target));
    ++calls;
  }
  EXPECT_EQ(BestCubeOps().target, best);
  ForEachSimdTarget([&] { --calls; });
  EXPECT_EQ(calls, 0u);
  EXPECT_EQ(BestCubeOps().target, best);
}

TEST(SimdTargetsTest, FailuresNameTheTarget) {
  EXPECT_NONFATAL_FAILURE(
      {
        const ScopedSimdTarget scope(SimdTargets().back());
        ADD_FAILURE();
      },
      "SIMD target ");
}

class EachTargetTest : public SimdTargetTest {};

TEST_P(EachTargetTest, RunsOnItsTarget) { EXPECT_STREQ(BestCubeOps().target, hwy::TargetName(GetParam())); }

INSTANTIATE_TEST_SUITE_P(Simd, EachTargetTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

}  // namespace
}  // namespace cubist::testing
