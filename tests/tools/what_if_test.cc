#include "tools/what_if.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "npu_model/chip_constants.h"
#include "npu_model/device.h"
#include "tools/kernel_call.h"

namespace cubist {
namespace {

// A file of the test's own: tests run side by side.
std::string FileWith(const std::string& text) {
  const std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::string path = ::testing::TempDir() + test + "_cubist_what_if_test.json";
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
  EXPECT_EQ(chip.changes, "cube_cores=30,memory.hbm_bytes_per_s=3200000000000");
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
  refused({.sets = {"clock_hz=-1"}}, "--set: clock_hz is -1, needs a number from 1e+06 to 1e+12");
  refused({.chip = "/nonexistent.json"}, "/nonexistent.json: cannot be read");
  refused({.chip = FileWith("{")}, "cubist_what_if_test.json: is not JSON: parse error at line 1, column 2");
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
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b2", "base": "ascend910b4"})")},
          "cubist_what_if_test.json: has the key 'base' twice in one object");
  refused({.chip = FileWith(
               R"({"name": "x", "base": "ascend910b2", "set": {"clock_hz": 1e9, "clock_hz": 2e9}})")},
          "has the key 'clock_hz' twice in one object");
  refused({.chip = FileWith(R"({"name": "x", "base": "ascend910b2", "set": {"clock_hz": 1e999}})")},
          "is not JSON: number overflow");
}

// Calls that a chip is asked about.
std::vector<KernelCall> Calls(const std::vector<std::pair<const char*, const char*>>& kernels) {
  std::vector<KernelCall> calls;
  for (const auto& [kernel, shape] : kernels) {
    KernelCallOptions options;
    options.kernel = kernel, options.shape = shape;
    EXPECT_TRUE(MakeKernelCall(options, &calls.emplace_back()).ok()) << kernel;
  }
  return calls;
}

// A time, or an error that says what does not fit.
TEST(WhatIfTest, WhatMayBeSetHasAnAnswer) {
  const std::vector<KernelCall> calls = Calls({{"matmul", "64x64x64"},
                                               {"grouped_matmul", "24x32x48x2"},
                                               {"flash_attention", "2x20x16x16x0"},
                                               {"token_permute", "24x32x2x4"},
                                               {"swiglu", "24x32"}});
  const auto ask = [&](const ChipSpec& chip) {
    for (const KernelCall& call : calls) {
      Profile profile;
      const Status status = call(Npu(chip, {.with_data = false}), &profile);
      if (status.ok()) {
        EXPECT_TRUE(std::isfinite(profile.time_s) && profile.time_s > 0) << profile.time_s;
      } else {
        EXPECT_NE(status.message().find(chip.name), std::string::npos) << status.message();
      }
    }
  };
  ChipSpec slowest = Ascend910B2(), quickest = Ascend910B2();
  for (const NamedConstant& c : ConstantsOf(Ascend910B2())) {
    std::vector<double> values = {c.least, c.most};
    if (c.or_zero) values.push_back(0);
    for (const double value : values) {
      SCOPED_TRACE(c.name + "=" + std::to_string(value));
      ChipSpec chip = Ascend910B2();
      ASSERT_TRUE(SetConstant(&chip, c.name, value).ok());
      ask(chip);
    }
    if (c.whole) continue;
    const bool rate = c.name == "clock_hz" || std::string_view(c.constant.unit).starts_with("bytes");
    ASSERT_TRUE(SetConstant(&slowest, c.name, rate ? c.least : c.most).ok());
    ASSERT_TRUE(SetConstant(&quickest, c.name, rate ? c.most : c.least).ok());
  }
  ask(slowest), ask(quickest);
}

// Its own table is no way around the limits.
TEST(WhatIfTest, AChipThatCannotBeIsRefusedByEveryKernel) {
  std::vector<std::pair<const char*, const char*>> kernels;
  for (const KernelForm& form : KernelForms()) kernels.emplace_back(form.name, form.small);
  const std::vector<KernelCall> calls = Calls(kernels);
  const auto refused = [&](const std::string& message, const std::function<void(ChipSpec&)>& change) {
    ChipSpec chip = Ascend910B2();
    change(chip);
    const Device device = Npu(chip, {.with_data = false});
    EXPECT_NE(device.status().message().find(message), std::string::npos) << device.status().message();
    for (const KernelCall& call : calls) {
      Profile profile;
      EXPECT_EQ(call(device, &profile).message(), device.status().message());
    }
  };
  refused("cube_cores is 0, needs a whole number from 1 to 4096", [](ChipSpec& c) { c.cube_cores = 0; });
  refused("cube_cores is -3", [](ChipSpec& c) { c.cube_cores = -3; });
  refused("vector_per_cube is 0", [](ChipSpec& c) { c.vector_per_cube = 0; });
  refused("hbm_bytes_per_s is 0", [](ChipSpec& c) { c.memory.hbm_bytes_per_s.value = 0; });
  refused("clock_hz is nan", [](ChipSpec& c) { c.clock_hz.value = std::nan(""); });
  refused("sync.flag is inf", [](ChipSpec& c) { c.sync.flag.value = INFINITY; });
  refused("mmad.m_step is 0", [](ChipSpec& c) { c.mmad.m_step = 0; });
  refused("memory.l2_line is 100, needs a power of two", [](ChipSpec& c) { c.memory.l2_line = 100; });
  refused("packing.b_width_bytes is 0", [](ChipSpec& c) { c.packing.b_width_bytes = 0; });
}

}  // namespace
}  // namespace cubist
