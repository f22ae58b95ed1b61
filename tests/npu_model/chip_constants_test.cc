#include "npu_model/chip_constants.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>

namespace cubist {
namespace {

TEST(ChipConstantsTest, EveryOneHasANameAndCanBeSetToItsOwnValue) {
  for (const std::string& chip_name : ChipNames()) {
    ChipSpec chip;
    ASSERT_TRUE(FindChip(chip_name, &chip).ok());
    std::set<std::string> names;
    for (const NamedConstant& c : ConstantsOf(chip)) {
      EXPECT_TRUE(names.insert(c.name).second) << c.name;
      ChipSpec same = chip;
      const Status status = SetConstant(&same, c.name, c.constant.value);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    EXPECT_TRUE(names.contains("path.gm_to_l1_nd2nz.startup"));
    EXPECT_TRUE(names.contains("vector.cycles.exp"));
    EXPECT_TRUE(names.contains("buffer.l0c"));
    EXPECT_TRUE(names.contains("scalar.read_gm"));
  }
}

// Setting one changes that one and no other.
TEST(ChipConstantsTest, SetsOneAlone) {
  for (const NamedConstant& c : ConstantsOf(Ascend910B2())) {
    ChipSpec chip = Ascend910B2();
    const double value =
        c.whole ? std::max(1.0, c.constant.value - 1) : std::min(c.most, c.constant.value / 2 + 1);
    ASSERT_TRUE(SetConstant(&chip, c.name, value).ok()) << c.name;
    const auto before = ConstantsOf(Ascend910B2()), after = ConstantsOf(chip);
    ASSERT_EQ(before.size(), after.size());
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(after[i].constant.value, before[i].name == c.name ? value : before[i].constant.value)
          << "set " << c.name << ", see " << before[i].name;
    }
  }
}

TEST(ChipConstantsTest, RefusesWhatCannotBe) {
  const auto refused = [](const char* name, double value, const std::string& message) {
    ChipSpec chip = Ascend910B2();
    const Status status = SetConstant(&chip, name, value);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
    for (std::size_t i = 0; i < ConstantsOf(chip).size(); ++i)
      EXPECT_EQ(ConstantsOf(chip)[i].constant.value, ConstantsOf(Ascend910B2())[i].constant.value);
  };
  refused("clock_hz", 0, "clock_hz is 0, needs a number from 1e+06 to 1e+12");
  refused("clock_hz", std::numeric_limits<double>::quiet_NaN(), "clock_hz is nan");
  refused("sync.flag", -1, "sync.flag is -1, needs a number from 0");
  refused("memory.core_miss_bytes_per_cycle", 1e-300, "needs 0 or a number from 0.001 to 1e+12");
  refused("cube_cores", 2.5, "cube_cores is 2.5, needs a whole number from 1 to 4096");
  refused("cube_cores", 0, "cube_cores is 0");
  refused("memory.hbm_bytes_per_sec", 1e12, "the nearest is memory.hbm_bytes_per_s");
}

TEST(ChipConstantsTest, CoresAndBuffersStayConsistent) {
  ChipSpec chip = Ascend910B2();
  ASSERT_TRUE(SetConstant(&chip, "cube_cores", 10).ok());
  EXPECT_EQ(chip.concurrent_cores, 10);
  ASSERT_TRUE(SetConstant(&chip, "buffer.l1", 1 << 20).ok());
  EXPECT_EQ(chip.buffer(Buffer::kL1).capacity, 1 << 20);
  EXPECT_EQ(chip.buffer(Buffer::kL1).fast, 1 << 20);
}

}  // namespace
}  // namespace cubist
