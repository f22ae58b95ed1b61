#include "tools/what_if.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace cubist {
namespace {

std::string FileWith(const std::string& text) {
  const std::string path = ::testing::TempDir() + "cubist_what_if_test.json";
  std::ofstream(path) << text;
  return path;
}

TEST(WhatIfTest, SetsConstantsAndMarksTheName) {
  ChipSpec chip;
  ASSERT_TRUE(LoadChip({.chip = "ascend910b3"}, &chip).ok());
  EXPECT_EQ(chip.name, "ascend910b3");
  const ChipOptions options{.chip = "ascend910b3",
                            .sets = {"memory.hbm_bytes_per_s=3.2e12", "cube_cores=30"}};
  ASSERT_TRUE(LoadChip(options, &chip).ok());
  EXPECT_EQ(chip.name, "ascend910b3*");
  EXPECT_EQ(chip.memory.hbm_bytes_per_s.value, 3.2e12);
  EXPECT_EQ(chip.cube_cores, 30);
}

TEST(WhatIfTest, ReadsAChipOfOnesOwn) {
  ChipSpec chip;
  const std::string path =
      FileWith(R"({"name": "mine", "base": "ascend910b2", "set": {"buffer.l1": 1048576}})");
  ASSERT_TRUE(LoadChip({.chip = path}, &chip).ok());
  EXPECT_EQ(chip.name, "mine");
  EXPECT_EQ(chip.buffer(Buffer::kL1).capacity, 1048576);
  EXPECT_EQ(chip.clock_hz.value, Ascend910B2().clock_hz.value);
}

TEST(WhatIfTest, ErrorsNameWhatIsWrong) {
  const auto refused = [](const ChipOptions& options, const std::string& message) {
    ChipSpec chip;
    const Status status = LoadChip(options, &chip);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  };
  refused({.chip = "ascend910b"}, "unknown chip 'ascend910b'");
  refused({.sets = {"clock_hz"}}, "--set is 'clock_hz', expected name=value");
  refused({.sets = {"clock_hz=fast"}}, "--set clock_hz=fast: 'fast' is not a number");
  refused({.sets = {"clock_hz=1e9x"}}, "'1e9x' is not a number");
  refused({.sets = {"clock=1e9"}}, "--set: no constant of a chip is named 'clock'; the nearest is clock_hz");
  refused({.sets = {"clock_hz=-1"}}, "--set: clock_hz is -1, needs a number above 0");
  refused({.chip = "/nonexistent.json"}, "/nonexistent.json: cannot be read");
  refused({.chip = FileWith("{")}, "parse error");
  refused({.chip = FileWith("[]")}, "is not an object");
  refused({.chip = FileWith(R"({"name": "x"})")}, "base is missing");
  refused({.chip = FileWith(R"({"name": "a b", "base": "ascend910b2"})")}, "name is 'a b'");
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b9"})")}, "unknown chip 'ascend910b9'");
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b2", "hbm": 1})")},
          "has 'hbm'; known are name");
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b2", "set": {"buffer.l1": -5}})")},
          "buffer.l1 is -5, needs a whole number from 1");
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b2", "set": {"buffer.l1": "big"}})")},
          "buffer.l1 is \"big\", needs a number");
}

}  // namespace
}  // namespace cubist
