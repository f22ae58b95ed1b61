// What the tests of tilings have in common.
#ifndef CUBIST_TESTS_TILING_TILING_SUPPORT_H_
#define CUBIST_TESTS_TILING_TILING_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/fields.h"

namespace cubist::testing {

inline std::vector<const ChipSpec*> Chips() {
  return {&Ascend910B1(), &Ascend910B2(), &Ascend910B3(), &Ascend910B4(), &HostChip()};
}

inline ChipSpec WithCapacity(ChipSpec chip, Buffer buffer, std::int64_t capacity) {
  chip.buffers[static_cast<std::size_t>(buffer)].capacity = capacity;
  return chip;
}

// Of every chip, in another order, with more shapes than a memo holds.
template <class Tiling, class Shape>
void ExpectChoosingAgainGivesTheSame(const std::vector<Shape>& shapes) {
  for (const ChipSpec* chip : Chips()) {
    std::vector<Tiling> first;
    for (const Shape& s : shapes) ASSERT_TRUE(Choose(*chip, s, &first.emplace_back()).ok());
    for (std::size_t i = shapes.size(); i-- > 0;) {
      Tiling again;
      ASSERT_TRUE(Choose(*chip, shapes[i], &again).ok());
      EXPECT_TRUE(again == first[i]) << chip->name << " " << ShapeText(shapes[i]);
    }
  }
}

// Each buffer shrinks until nothing fits: up to there every choice fits, from there the error names the buffer, its
// capacity, and a need beyond it.
template <class Tiling, class Shape>
void ExpectErrorsNameTheBuffer(const Shape& shape, std::span<const Buffer> buffers) {
  for (Buffer buffer : buffers) {
    bool failed = false;
    for (std::int64_t capacity = Ascend910B1().buffer(buffer).capacity; capacity > 0; capacity /= 2) {
      const ChipSpec chip = WithCapacity(Ascend910B1(), buffer, capacity);
      Tiling t;
      const Status status = Choose(chip, shape, &t);
      if (status.ok()) {
        EXPECT_FALSE(failed);
        EXPECT_TRUE(Fits(chip, shape, t));
        continue;
      }
      failed = true;
      SCOPED_TRACE(ShapeText(shape) + ", " + std::to_string(capacity) + " bytes: " + status.message());
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);
      const std::string limit = " bytes of " + std::string(NameOf(buffer)) + ", ascend910b1 has ";
      EXPECT_NE(status.message().find(limit + std::to_string(capacity)), std::string::npos);
      EXPECT_GT(std::stoll(status.message().substr(status.message().find("need ") + 5)), capacity);
    }
    EXPECT_TRUE(failed) << NameOf(buffer);
  }
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_TILING_TILING_SUPPORT_H_
