// The forms of TokenPermute beyond a plain sort, against the reference: capacities, padded experts, routes to no expert,
// the rows of one rank, and probabilities that go along. On both executors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "reference/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

struct Form {
  std::int64_t capacity = 0, row_multiple = 1, num_out_tokens = 0;
  std::optional<Range> rows = {};
  int dropped = 20;  // Percent of routes to no expert.
  DType dtype = DType::kBF16, probs = DType::kF32, ids = DType::kI32;
  bool one_expert = false;
  bool few_experts = false;  // The first, the last, and those in the middle.

  std::string Name() const {
    return Join("capacity ", capacity, " multiple ", row_multiple, " out ", num_out_tokens, " rows ",
                rows.value_or(Range{-1, -1}).begin, "..", rows.value_or(Range{-1, -1}).end, " ",
                NameOf(dtype));
  }
  std::int64_t Rows(const PermuteShape& s) const {
    if (rows.has_value()) return rows->size();
    if (capacity > 0) return s.experts * capacity;
    const std::int64_t slots = s.tokens * s.topk,
                       all = slots + std::min(slots, s.experts) * (row_multiple - 1);
    return num_out_tokens > 0 ? std::min(num_out_tokens, all)
                              : std::max<std::int64_t>(all + num_out_tokens, 0);
  }
};

std::vector<double> AsDoubles(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

void ExpectForm(const Device& device, const PermuteShape& s, const Form& form) {
  SCOPED_TRACE(s.Name() + " " + form.Name());
  const std::int64_t m = form.Rows(s);
  Random random;
  Matrix tokens(form.dtype, {s.tokens, s.hidden}), ids(form.ids, {s.tokens, s.topk}),
      probs(form.probs, {s.tokens, s.topk}), permuted(form.dtype, {m, s.hidden}),
      sorted(DType::kI32, {s.tokens * s.topk}), row_probs(form.probs, {m}), counts(DType::kI32, {s.experts}),
      offsets(DType::kI32, {s.experts + 1});
  tokens.FillNormal(random), probs.FillUniform(random, 0.1, 1);
  permuted.FillNaN(), row_probs.FillNaN();
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t j = 0; j < s.topk; ++j) {
      const bool nowhere = s.experts == 0 || random.Integer(0, 99) < form.dropped;
      const std::int64_t last = std::max<std::int64_t>(s.experts, 1) - 1;
      const std::int64_t some[] = {0, s.experts / 2, s.experts / 2 + 1, last};
      const std::int64_t expert = form.one_expert    ? s.experts / 2
                                  : form.few_experts ? some[random.Integer(0, 3)]
                                                     : random.Integer(0, last);
      ids.set({t, j}, nowhere ? -1 : static_cast<double>(expert));
    }
  }
  ASSERT_TRUE(IsOk(TokenPermute(device, {.tokens = tokens.view(),
                                         .topk_ids = ids.view(),
                                         .probs = probs.view(),
                                         .num_experts = s.experts,
                                         .num_out_tokens = form.num_out_tokens,
                                         .capacity = form.capacity,
                                         .row_multiple = form.row_multiple,
                                         .rows = form.rows,
                                         .permuted = permuted.view(),
                                         .sorted_indices = sorted.view(),
                                         .permuted_probs = row_probs.view(),
                                         .expert_counts = counts.view(),
                                         .expert_offsets = offsets.view()})));
  const auto routing = reference::RoutePadded(ids.view(), s.experts, form.capacity, form.row_multiple);
  ExpectExactly(sorted.view(), AsDoubles(routing.sorted_indices));
  ExpectExactly(counts.view(), AsDoubles(routing.expert_counts));
  ExpectExactly(offsets.view(), AsDoubles(routing.expert_offsets));
  const std::int64_t first = form.rows.value_or(Range()).begin;
  std::vector<double> expected, expected_probs;
  for (std::int64_t r = 0; r < m; ++r) {
    const auto row = static_cast<std::size_t>(first + r);
    const std::int64_t slot = row < routing.slot_of_row.size() ? routing.slot_of_row[row] : -1;
    for (std::int64_t h = 0; h < s.hidden; ++h)
      expected.push_back(slot < 0 ? 0 : tokens.at({slot / s.topk, h}));
    expected_probs.push_back(slot < 0 ? 0 : probs.at({slot / s.topk, slot % s.topk}));
  }
  ExpectExactly(permuted.view(), expected);
  ExpectExactly(row_probs.view(), expected_probs);
  for (const Matrix* x : {&tokens, &ids, &probs, &permuted, &sorted, &row_probs, &counts, &offsets})
    ExpectGuards(*x);
}

std::vector<PermuteShape> FormShapes() {
  return {{1, 1, 1, 1}, {40, 4, 7, 33}, {97, 3, 5, 130}, {300, 8, 64, 65}, {5, 2, 3, 0},
          {0, 2, 5, 9}, {4, 0, 3, 5},   {6, 2, 0, 7},    {20, 3, 9, 1201}, {16, 6, 6, 12}};
}

std::vector<Form> Forms(const PermuteShape& s) {
  const std::int64_t slots = s.tokens * s.topk;
  return {{},
          {.dropped = 100, .dtype = DType::kF32},
          {.capacity = 1},
          {.capacity = std::max<std::int64_t>(slots / 4, 1), .dtype = DType::kF16, .probs = DType::kF16},
          {.capacity = slots + 3, .dtype = DType::kF32, .ids = DType::kI64, .one_expert = true},
          {.capacity = 5, .dropped = 0, .one_expert = true},
          {.row_multiple = 16, .dtype = DType::kF32, .probs = DType::kBF16},
          {.row_multiple = 3, .num_out_tokens = slots, .dropped = 0},
          {.row_multiple = 128, .one_expert = true},
          {.num_out_tokens = -(slots / 3)},
          {.rows = Range{slots / 4, slots / 2}},
          {.rows = Range{slots / 3, slots / 3}},
          {.capacity = 7, .rows = Range{3, 20}, .dtype = DType::kF16},
          {.row_multiple = 8, .rows = Range{2, slots + 30}}};
}

void ExpectForms(const Device& device) {
  for (const PermuteShape& shape : FormShapes()) {
    for (const Form& form : Forms(shape)) ExpectForm(device, shape, form);
  }
}
TEST(TokenPermuteFormsTest, OnHost) { ExpectForms(Host()); }
TEST(TokenPermuteFormsTest, OnNpu) { ExpectForms(NpuWithData(Ascend910B2())); }

TEST(TokenPermuteFormsTest, RoutesInParts) {
  for (const PermuteShape& shape : {PermuteShape{7, 200, 9, 5}, PermuteShape{5, 600, 3000, 4}}) {
    const auto chips = ChipsThatCutRoutes<TokenPermuteTiling>(
        {.tokens = shape.tokens, .hidden = shape.hidden, .top_k = shape.topk, .experts = shape.experts});
    EXPECT_FALSE(chips.empty());
    for (const ChipSpec& chip : chips) {
      for (Form form : Forms(shape)) {
        if (form.ids == DType::kI64) continue;
        if (form.capacity > 1 && !form.rows.has_value()) form.rows = Range{4, form.capacity + 40};
        ExpectForm(NpuWithData(chip), shape, form);
      }
    }
  }
}

// Experts beyond what a table holds are ranked digit by digit: of one expert more or less than the digits tell apart, and
// spread so that routes meet at the ends and in between.
TEST(TokenPermuteFormsTest, ManyExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const PermuteShape& shape : {PermuteShape{30, 3, 50'000, 5}, PermuteShape{300, 2, 65'536, 3}}) {
      for (Form form : Forms(shape)) {
        form.few_experts = !form.one_expert;
        // Rows of padding for every expert would be most of the time.
        if (form.capacity > 1 && !form.rows.has_value()) form.rows = Range{4, form.capacity + 40};
        ExpectForm(device, shape, form);
      }
    }
  }
}

TEST(TokenPermuteFormsTest, AMillionExperts) {
  for (const std::int64_t experts : {(1 << 20) - 1, 1 << 20, (1 << 20) + 1}) {
    ExpectForm(Host({.threads = 2}), {1000, 8, experts, 3}, {.row_multiple = 2});
    ExpectForm(Host({.threads = 2}), {1000, 8, experts, 3}, {.few_experts = true});
  }
}

// The ranks of expert parallelism: each gets its rows, and the results of unpermuting them add up to the whole.
TEST(TokenPermuteFormsTest, RanksAddUpToTheWhole) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    constexpr std::int64_t kTokens = 60, kTopK = 4, kHidden = 33, kRows = kTokens * kTopK;
    Random random;
    Matrix tokens(DType::kF32, {kTokens, kHidden}), ids(DType::kI32, {kTokens, kTopK}),
        probs(DType::kF32, {kTokens, kTopK}), sorted(DType::kI32, {kRows}),
        part(DType::kF32, {kTokens, kHidden}), row(DType::kF32, {kRows, kHidden});
    tokens.FillIntegers(random, -9, 9), ids.FillIntegers(random, 0, 7), probs.Fill(0.25);
    std::vector<double> sum(kTokens * kHidden, 0.0);
    for (const Range rows : {Range{0, 90}, Range{90, 90}, Range{90, 200}, Range{200, kRows}}) {
      Tensor local = row.view();
      local.sizes[0] = rows.size();
      ASSERT_TRUE(IsOk(TokenPermute(device, {.tokens = tokens.view(),
                                             .topk_ids = ids.view(),
                                             .num_experts = 8,
                                             .rows = rows,
                                             .permuted = local,
                                             .sorted_indices = sorted.view()})));
      ASSERT_TRUE(IsOk(TokenUnpermute(device, {.permuted = local,
                                               .sorted_indices = sorted.view(),
                                               .probs = probs.view(),
                                               .rows = rows,
                                               .out = part.view()})));
      const std::vector<double> values = part.ToDoubles();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    }
    EXPECT_EQ(sum, tokens.ToDoubles());
  }
}

TEST(TokenPermuteFormsTest, NumbersThatMakeNoSense) {
  Matrix tokens(DType::kF32, {5, 6}), ids(DType::kI32, {5, 3}), permuted(DType::kF32, {15, 6}),
      sorted(DType::kI32, {15});
  tokens.Fill(1), ids.Fill(0);
  const TokenPermuteArgs valid{.tokens = tokens.view(),
                               .topk_ids = ids.view(),
                               .num_experts = 2,
                               .permuted = permuted.view(),
                               .sorted_indices = sorted.view()};
  ASSERT_TRUE(IsOk(TokenPermute(Host(), valid)));
  const auto expect = [&](auto change, const std::vector<std::string>& words) {
    TokenPermuteArgs args = valid;
    change(args);
    permuted.Fill(7);
    const Status status = TokenPermute(Host(), args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (const std::string& word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message() << " lacks " << word;
    EXPECT_EQ(permuted.at({0, 0}), 7);
  };
  expect([](auto& x) { x.capacity = -1; }, {"capacity is -1", "0 to 2^31 - 1"});
  expect([](auto& x) { x.capacity = 9; }, {"permuted", "size 15", "needs 18"});
  expect([](auto& x) { x.capacity = std::int64_t{1} << 31; }, {"capacity is 2147483648"});
  expect([](auto& x) { x.capacity = (std::int64_t{1} << 31) - 1; }, {"more than 2^31 - 1 rows"});
  expect([](auto& x) { x.row_multiple = 0; }, {"row_multiple is 0", "1 to 2^31 - 1"});
  expect([](auto& x) { x.row_multiple = 4; }, {"permuted", "size 15", "needs 21"});
  expect([](auto& x) { x.capacity = 2, x.row_multiple = 4; },
         {"row_multiple is 4", "1 where there is a capacity"});
  expect([](auto& x) { x.capacity = 2, x.num_out_tokens = 4; }, {"num_out_tokens is 4", "needs 0"});
  expect([](auto& x) { x.rows = Range{3, 2}; }, {"rows is [3, 2)", "begin <= end"});
  expect([](auto& x) { x.rows = Range{-3, 2}; }, {"rows is [-3, 2)", "0 <= begin"});
  expect([](auto& x) { x.rows = Range{3, 17}; }, {"permuted", "size 15", "needs 14"});
  expect([&](auto& x) { x.probs = x.tokens; }, {"probs", "size 6", "needs 3"});
}

}  // namespace
}  // namespace cubist::testing
