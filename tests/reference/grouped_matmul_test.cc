#include "reference/grouped_matmul.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/matrix.h"

namespace cubist::reference {
namespace {

using Values = std::vector<double>;

TEST(ReferenceGroupedMatmulTest, GroupRowsOfCountsAndEnds) {
  const std::int32_t counts[] = {2, 0, 3};
  const std::int64_t ends[] = {2, 2, 5};
  const std::vector<Range> expected = {{0, 2}, {2, 2}, {2, 5}};
  EXPECT_EQ(GroupRows(ConstTensor(counts, {3}), false), expected);
  EXPECT_EQ(GroupRows(ConstTensor(ends, {3}), true), expected);
}

TEST(ReferenceGroupedMatmulTest, HandComputed) {
  const float x[] = {1, 2, 3, 4, 5, 6, 7, 8};               // (4, 2)
  const float w[] = {1, 0, 0, 1, 9, 9, 9, 9, 2, 1, 0, -1};  // (3, 2, 2)
  const float bias[] = {10, 20, 7, 7, 100, 200};            // (3, 2)
  const Range groups[] = {{0, 1}, {1, 1}, {1, 3}};
  const auto weights = [&](std::int64_t g) { return ConstTensor(w + 4 * g, {2, 2}); };
  const MatmulResult r =
      GroupedMatmul(ConstTensor(x, {4, 2}), groups, weights, false, 2, ConstTensor(bias, {3, 2}));
  EXPECT_EQ(r.c, (Values{11, 22, 106, 199, 110, 199, 0, 0}));
  EXPECT_EQ(r.magnitude, (Values{11, 22, 106, 207, 110, 211, 0, 0}));
  const MatmulResult transposed = GroupedMatmul(ConstTensor(x, {4, 2}), groups, weights, true, 2, {});
  EXPECT_EQ(transposed.c, (Values{1, 2, 10, -4, 16, -6, 0, 0}));
}

TEST(ReferenceGroupedMatmulTest, GradWeightsHandComputed) {
  const float x[] = {9, 9, 1, 2, 3, 4}, dy[] = {9, 9, 9, 1, 0, -1, 2, 1, 0}, start[] = {1, 1, 1, -1, -1, -1};
  const std::int64_t rows[] = {0, 1};
  const MatmulResult r = GroupedMatmulGradWeights(ConstTensor(x, {3, 2}), ConstTensor(dy, {3, 3}), {1, 3},
                                                  ConstTensor(start, {2, 3}), rows);
  EXPECT_EQ(r.c, (Values{8, 4, 0, 9, 3, -3}));
  EXPECT_EQ(r.magnitude, (Values{8, 4, 2, 11, 5, 3}));
  const MatmulResult empty =
      GroupedMatmulGradWeights(ConstTensor(x, {3, 2}), ConstTensor(dy, {3, 3}), {2, 2}, {}, rows);
  EXPECT_EQ(empty.c, Values(6, 0.0));
}

}  // namespace
}  // namespace cubist::reference
