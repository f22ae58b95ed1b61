// Tests that repeat over every SIMD target: those that the CPU can run and the library holds bodies for.
#ifndef CUBIST_TESTS_SUPPORT_SIMD_TARGETS_H_
#define CUBIST_TESTS_SUPPORT_SIMD_TARGETS_H_

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "npu_model/host/tile_ops.h"

namespace cubist::testing {

// Restricts the library to one SIMD target while it lives. Cores made meanwhile use that target.
class ScopedSimdTarget {
 public:
  explicit ScopedSimdTarget(std::int64_t target)
      : trace_(__FILE__, __LINE__, ::testing::Message() << "SIMD target " << hwy::TargetName(target)) {
    hwy::SetSupportedTargetsForTest(target);
  }
  ~ScopedSimdTarget() { hwy::SetSupportedTargetsForTest(0); }
  ScopedSimdTarget(const ScopedSimdTarget&) = delete;
  ScopedSimdTarget& operator=(const ScopedSimdTarget&) = delete;

 private:
  ::testing::ScopedTrace trace_;
};

// The CPU's targets, best first, then the portable one; without those that the library was built without (the
// tables then answer with another name).
inline std::vector<std::int64_t> SimdTargets() {
  const std::int64_t candidates = hwy::SupportedTargets() | HWY_EMU128 | HWY_SCALAR;
  std::vector<std::int64_t> targets;
  for (std::int64_t rest = candidates; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    if (std::strcmp(BestCubeOps().target, hwy::TargetName(target)) == 0) targets.push_back(target);
  }
  hwy::SetSupportedTargetsForTest(0);
  return targets;
}

// Calls f() once per target.
template <class F>
void ForEachSimdTarget(F f) {
  for (std::int64_t target : SimdTargets()) {
    const ScopedSimdTarget scope(target);
    f();
  }
}

inline std::string SimdTargetName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return hwy::TargetName(info.param);
}

// A test suite that runs once per target:
//   class MmadTest : public SimdTargetTest {};
//   TEST_P(MmadTest, ..) { .. }
//   INSTANTIATE_TEST_SUITE_P(Simd, MmadTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);
class SimdTargetTest : public ::testing::TestWithParam<std::int64_t> {
 private:
  ScopedSimdTarget scope_{GetParam()};
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_SIMD_TARGETS_H_
