#include "reference/token_permute.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/matrix.h"

namespace cubist::reference {
namespace {

using cubist::testing::kColumnMajor;
using cubist::testing::Matrix;
using cubist::testing::Random;
using Values = std::vector<double>;

TEST(ReferenceTokenPermuteTest, ByHand) {
  const std::int32_t ids[] = {2, 0, 1, 2, 0, 2};  // (3, 2)
  const float tokens[] = {10, 11, 20, 21, 30, 31};
  const Routing r = Route(ConstTensor(ids, {3, 2}), 4, 0);
  EXPECT_EQ(r.slot_of_row, (std::vector<std::int64_t>{1, 4, 2, 0, 3, 5}));
  EXPECT_EQ(r.sorted_indices, (std::vector<std::int32_t>{3, 0, 2, 4, 1, 5}));
  EXPECT_EQ(r.expert_counts, (std::vector<std::int32_t>{2, 1, 3, 0}));
  EXPECT_EQ(r.rows, 6);
  EXPECT_EQ(Permute(ConstTensor(tokens, {3, 2}), r),
            (Values{10, 11, 30, 31, 20, 21, 10, 11, 20, 21, 30, 31}));
  const std::int64_t rows[] = {2};
  EXPECT_EQ(Permute(ConstTensor(tokens, {3, 2}), r, rows), (Values{20, 21}));
}

TEST(ReferenceTokenPermuteTest, NumOutTokens) {
  const std::int64_t ids[] = {1, 0, 1, 0, 1, 0};
  const ConstTensor topk_ids(ids, {3, 2});
  EXPECT_EQ(Route(topk_ids, 2, 0).rows, 6);
  EXPECT_EQ(Route(topk_ids, 2, 4).rows, 4);
  EXPECT_EQ(Route(topk_ids, 2, 100).rows, 6);
  EXPECT_EQ(Route(topk_ids, 2, -2).rows, 4);
  EXPECT_EQ(Route(topk_ids, 2, -6).rows, 0);
  EXPECT_EQ(Route(topk_ids, 2, -100).rows, 0);
  EXPECT_EQ(Route(topk_ids, 2, 4).sorted_indices, Route(topk_ids, 2, 0).sorted_indices);
  EXPECT_EQ(Route(topk_ids, 2, 4).expert_counts, Route(topk_ids, 2, 0).expert_counts);
}

TEST(ReferenceTokenPermuteTest, SortsStablyAndInvertsItself) {
  Random random;
  Matrix ids(DType::kI64, {57, 6}, kColumnMajor);
  ids.FillIntegers(random, 0, 8);
  const Routing r = Route(ids.view(), 9, 0);
  const auto expert = [&](std::int64_t slot) { return ids.at({slot / 6, slot % 6}); };
  for (std::size_t row = 0; row < r.slot_of_row.size(); ++row) {
    EXPECT_EQ(r.sorted_indices[static_cast<std::size_t>(r.slot_of_row[row])], static_cast<std::int32_t>(row));
    if (row == 0) continue;
    const std::int64_t before = r.slot_of_row[row - 1], slot = r.slot_of_row[row];
    EXPECT_TRUE(expert(before) < expert(slot) || (expert(before) == expert(slot) && before < slot)) << row;
  }
  std::int64_t total = 0;
  for (std::int32_t count : r.expert_counts) total += count;
  EXPECT_EQ(total, 57 * 6);
}

TEST(ReferenceTokenPermuteTest, OneRouteMayComeWithoutItsDimension) {
  const std::int32_t ids[] = {2, 0, 1};
  EXPECT_EQ(Route(ConstTensor(ids, {3}), 3, 0).sorted_indices,
            Route(ConstTensor(ids, {3, 1}), 3, 0).sorted_indices);
}

TEST(ReferenceTokenPermuteTest, NothingToPermute) {
  const std::int32_t ids[] = {0};
  const Routing r = Route(ConstTensor(ids, {0, 4}), 3, 0);
  EXPECT_EQ(r.rows, 0);
  EXPECT_EQ(r.expert_counts, (std::vector<std::int32_t>{0, 0, 0}));
  EXPECT_TRUE(Route(ConstTensor(ids, {4, 0}), 0, 0).sorted_indices.empty());
}

// Probabilities that add up to one bring the tokens back, whatever the routes.
TEST(ReferenceTokenUnpermuteTest, RoundTrip) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Random random;
    Matrix tokens(dtype, {31, 5}), ids(DType::kI32, {31, 4}), probs(DType::kF32, {31, 4}, kColumnMajor);
    tokens.FillNormal(random), ids.FillIntegers(random, 0, 6), probs.Fill(0.25);
    const Routing r = Route(ids.view(), 7, 0);
    Matrix permuted(dtype, {r.rows, 5});
    const Values rows = Permute(tokens.view(), r);
    testing::ForEachElement(permuted.view(), [&](const auto& i, std::int64_t) {
      permuted.set({i[0], i[1]}, rows[static_cast<std::size_t>(i[0] * 5 + i[1])]);
    });
    const ConstTensor sorted(r.sorted_indices.data(), {31 * 4});
    EXPECT_EQ(Unpermute(permuted.view(), sorted, probs.view()).out, tokens.ToDoubles());
  }
}

TEST(ReferenceTokenUnpermuteTest, WithoutProbsRowsMove) {
  const float permuted[] = {1, 2, 3, 4, 5, 6};
  const std::int32_t sorted[] = {2, 0, 1};
  const UnpermuteResult r = Unpermute(ConstTensor(permuted, {3, 2}), ConstTensor(sorted, {3}), {});
  EXPECT_EQ(r.out, (Values{5, 6, 1, 2, 3, 4}));
  EXPECT_EQ(UnpermuteBounds(r, {}, DType::kBF16), Values(6, 0.0));
}

TEST(ReferenceTokenUnpermuteTest, WeightsDroppedRowsAndMagnitude) {
  const float permuted[] = {1, -2, 10, 20};           // (2, 2)
  const std::int32_t sorted[] = {1, 0, 2, 1, -1, 0};  // (3 tokens, 2 routes); row 2 does not exist
  const float probs[] = {0.5f, 2, 1, -3, 1, 0.25f};
  const ConstTensor probs_view(probs, {3, 2});
  const UnpermuteResult r = Unpermute(ConstTensor(permuted, {2, 2}), ConstTensor(sorted, {6}), probs_view);
  EXPECT_EQ(r.out, (Values{5 + 2, 10 - 4, -30, -60, 0.25, -0.5}));
  EXPECT_EQ(r.magnitude, (Values{5 + 2, 10 + 4, 30, 60, 0.25, 0.5}));
  const std::int64_t tokens[] = {2};
  EXPECT_EQ(Unpermute(ConstTensor(permuted, {2, 2}), ConstTensor(sorted, {6}), probs_view, tokens).out,
            (Values{0.25, -0.5}));
}

TEST(ReferenceTokenUnpermuteTest, RowsOfProbabilityZeroAreNotRead) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const float permuted[] = {nan, 3};
  const std::int32_t sorted[] = {0, 1, 0, 1};
  const float probs[] = {0, 1, -0.0f, 2};
  EXPECT_EQ(
      Unpermute(ConstTensor(permuted, {2, 1}), ConstTensor(sorted, {4}), ConstTensor(probs, {2, 2})).out,
      (Values{3, 6}));
  const float read[] = {1, 1, 0, 2};
  const UnpermuteResult r =
      Unpermute(ConstTensor(permuted, {2, 1}), ConstTensor(sorted, {4}), ConstTensor(read, {2, 2}));
  EXPECT_TRUE(std::isnan(r.out[0]));
  EXPECT_EQ(r.out[1], 6);
}

TEST(ReferenceTokenUnpermuteTest, NoRoutesGiveZero) {
  const float x[] = {1};
  EXPECT_EQ(Unpermute(ConstTensor(x, {0, 3}), ConstTensor(static_cast<const std::int32_t*>(nullptr), {0}),
                      ConstTensor(x, {2, 0}))
                .out,
            Values(6, 0.0));
}

}  // namespace
}  // namespace cubist::reference
