// Chips whose UB holds only parts of a token's routes, or of its routing map.
#ifndef CUBIST_TESTS_KERNELS_ROUTES_IN_PARTS_H_
#define CUBIST_TESTS_KERNELS_ROUTES_IN_PARTS_H_

#include <cstdint>
#include <vector>

#include "npu_model/chip.h"
#include "tests/kernels/kernel_test.h"
#include "tiling/token_permute_tiling.h"
#include "tiling/token_routes_tiling.h"

namespace cubist::testing {

// cut(chip) is a size of the parts, 0 where none are made and negative where nothing fits: one chip for each size.
template <class Cut>
std::vector<ChipSpec> ChipsThatCut(Cut cut) {
  std::vector<ChipSpec> chips;
  std::int64_t last = 0;
  for (std::int64_t bytes = 192 << 10; bytes >= 512; bytes = bytes * 3 / 4 / 32 * 32) {
    const ChipSpec chip = WithCapacity(Buffer::kUB, bytes);
    const std::int64_t size = cut(chip);
    if (size < 0) break;
    if (size > 0 && size != last) chips.push_back(chip), last = size;
  }
  return chips;
}

// Of routes, by a call with such a tiling.
template <class Tiling>
std::vector<ChipSpec> ChipsThatCutRoutes(const TokenPermuteShape& shape) {
  return ChipsThatCut([&](const ChipSpec& chip) -> std::int64_t {
    Tiling t;
    if (!Choose(chip, shape, &t).ok()) return -1;
    return t.routes < shape.top_k ? t.routes : 0;
  });
}

// Of routes or maps on their way to a movement.
inline std::vector<ChipSpec> ChipsThatCutSelections(const TokenRoutesShape& shape) {
  return ChipsThatCut([&](const ChipSpec& chip) -> std::int64_t {
    TokenRoutesTiling t;
    if (!ChooseRoutes(chip, "token_permute", shape, &t).ok()) return -1;
    return t.routes < shape.top_k ? t.routes : t.map_cols < shape.map_cols ? t.map_cols : 0;
  });
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ROUTES_IN_PARTS_H_
