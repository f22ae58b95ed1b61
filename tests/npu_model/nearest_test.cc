#include "npu_model/nearest.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "npu_model/chip_constants.h"

namespace cubist {
namespace {

std::vector<std::string> Constants() {
  std::vector<std::string> names;
  for (const NamedConstant& constant : ConstantsOf(Ascend910B2())) names.push_back(constant.name);
  return names;
}

TEST(NearestTest, FindsTheConstantThatWasMeant) {
  const std::vector<std::string> names = Constants();
  for (const auto& [wanted, meant] :
       std::vector<std::pair<std::string, std::string>>{{"memory.hbm", "memory.hbm_bytes_per_s"},
                                                        {"memory.hbm_byte_per_s", "memory.hbm_bytes_per_s"},
                                                        {"hbm_bandwidth", "memory.hbm_bytes_per_s"},
                                                        {"HBM", "memory.hbm_bytes_per_s"},
                                                        {"l1_bytes", "buffer.l1"},
                                                        {"l0a", "buffer.l0a"},
                                                        {"ub_size", "buffer.ub"},
                                                        {"l2_size", "memory.l2_bytes"},
                                                        {"clock", "clock_hz"},
                                                        {"clokc_hz", "clock_hz"},
                                                        {"cores", "cube_cores"},
                                                        {"cube-cores", "cube_cores"},
                                                        {"mmad_head_busy", "mmad.head_busy"},
                                                        {"path.gm_to_l1.start", "path.gm_to_l1.startup"}}) {
    const std::string* nearest = Nearest(wanted, names);
    ASSERT_NE(nearest, nullptr) << wanted;
    EXPECT_EQ(*nearest, meant) << wanted;
  }
  for (const char* far : {"", "m", "x", "price", "tiling", "zzzzzzzz"})
    EXPECT_EQ(Nearest(far, names), nullptr) << far << " " << *Nearest(far, names);
}

TEST(NearestTest, FindsShortNames) {
  std::vector<std::string> names = Constants();
  names.insert(names.begin(), {"M", "N", "K"});
  ASSERT_NE(Nearest("m", names), nullptr);
  EXPECT_EQ(*Nearest("m", names), "M");
}

TEST(NearestTest, TextsEndWithWhatIsNear) {
  const std::vector<std::string> names = {"profile", "check"};
  EXPECT_EQ(NearestText("profle", names), "; the nearest is profile");
  EXPECT_EQ(NearestText("fly", names), "");
  EXPECT_EQ(KnownAndNearest("chek", names), "known are profile, check; the nearest is check");
  EXPECT_EQ(KnownAndNearest("fly", names), "known are profile, check");
  EXPECT_EQ(KnownAndNearest("fly", {}), "none is known");
}

}  // namespace
}  // namespace cubist
