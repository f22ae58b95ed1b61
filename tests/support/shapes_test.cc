#include "tests/support/shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace cubist::testing {
namespace {

TEST(ShapesTest, EdgesSurroundEveryTileMultiple) {
  const std::vector<std::int64_t> sizes = EdgeSizes();
  EXPECT_TRUE(std::is_sorted(sizes.begin(), sizes.end()));
  for (std::int64_t tile : {1, 12, 16, 24, 32, 48, 64, 128, 192, 256}) {
    for (std::int64_t size : {tile - 1, tile, tile + 1}) {
      EXPECT_TRUE(std::binary_search(sizes.begin(), sizes.end(), size)) << size;
    }
  }
}

// GoogleTest refuses to register two cases of one name.
template <class Shape>
void ExpectDistinctNames(const std::vector<Shape>& shapes) {
  std::set<std::string> names;
  for (const Shape& shape : shapes) EXPECT_TRUE(names.insert(shape.Name()).second) << shape.Name();
}

TEST(ShapesTest, NamesAreDistinct) {
  ExpectDistinctNames(MatmulShapes());
  ExpectDistinctNames(AttentionShapes());
  ExpectDistinctNames(PermuteShapes());
}

TEST(ShapesTest, HeadsDivide) {
  for (const AttentionShape& s : AttentionShapes()) EXPECT_EQ(s.q_heads % s.kv_heads, 0) << s.Name();
}

}  // namespace
}  // namespace cubist::testing
