// The model's counts of permutes against closed forms of the kernels' loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/traffic.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tiling/token_permute_tiling.h"

namespace cubist::testing {
namespace {

struct PermuteCase {
  std::int64_t tokens, topk, experts, hidden;
  DType dtype, ids;
  std::int64_t num_out_tokens = 0;
  bool counts = true;

  std::int64_t slots() const { return tokens * topk; }
  std::int64_t rows() const {
    return num_out_tokens > 0 ? std::min(num_out_tokens, slots())
                              : std::max<std::int64_t>(slots() + num_out_tokens, 0);
  }
  // Float tensors without data, ids of the caller's.
  TokenPermuteArgs args(const Matrix& topk_ids) const {
    TokenPermuteArgs args;
    args.tokens = ConstTensor(nullptr, dtype, {tokens, hidden});
    args.topk_ids = topk_ids.view();
    args.num_experts = experts, args.num_out_tokens = num_out_tokens;
    args.permuted = Tensor(nullptr, dtype, {rows(), hidden});
    args.sorted_indices = Tensor(nullptr, DType::kI32, {slots()});
    if (counts) args.expert_counts = Tensor(nullptr, DType::kI32, {experts});
    return args;
  }
  // Tokens of which a slot has a row that is kept, ranked with std::stable_sort.
  std::int64_t KeptTokens(const Matrix& topk_ids) const {
    const std::vector<double> expert = topk_ids.ToDoubles();
    std::vector<std::size_t> order(expert.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return expert[a] < expert[b]; });
    std::set<std::int64_t> kept;
    for (std::int64_t r = 0; r < rows(); ++r)
      kept.insert(static_cast<std::int64_t>(order[static_cast<std::size_t>(r)]) / topk);
    return static_cast<std::int64_t>(kept.size());
  }
  TokenPermuteShape shape() const {
    TokenPermuteShape s;
    s.tokens = tokens, s.hidden = hidden, s.top_k = topk, s.experts = experts, s.dtype = dtype;
    s.wide_ids = ids == DType::kI64;
    return s;
  }
  std::string Name() const {
    return Join("t", tokens, " k", topk, " e", experts, " h", hidden, " ", NameOf(dtype));
  }
};

std::vector<PermuteCase> PermuteCases() {
  return {{1024, 8, 256, 7168, DType::kBF16, DType::kI32},
          {501, 3, 17, 1001, DType::kF32, DType::kI64, 700},
          {77, 2, 5, 20011, DType::kF16, DType::kI32, -50, false},
          {300, 4, 100'000, 64, DType::kBF16, DType::kI64},
          {1, 1, 1, 1, DType::kF32, DType::kI32}};
}

// Bytes of a call whose experts one table holds; each token with a row is read once, and goes to every place that is kept.
Traffic OneTableTraffic(const PermuteCase& x, const TokenPermuteTiling& t, std::int64_t kept_tokens) {
  const std::int64_t counts = t.chunks * x.experts * 4, row = x.hidden * SizeOf(x.dtype);
  // Sums over the chunks before each, and over all, where they are made once for all chunks.
  const std::int64_t sums = t.sums_chunks ? counts + x.experts * 4 : 0;
  Traffic traffic;
  // Ids once to count and once to rank; all chunks' counts by every chunk, or once and two sums by every chunk.
  traffic[Path::kGmToUb] =
      2 * x.slots() * SizeOf(x.ids) + (t.sums_chunks ? 3 : t.chunks) * counts + kept_tokens * row;
  traffic[Path::kUbToGm] = counts + sums + x.slots() * 4 + x.rows() * row + (x.counts ? x.experts * 4 : 0);
  return traffic;
}

// Likewise with digits, but for the searches among the sorted routes.
Traffic DigitsTraffic(const PermuteCase& x, const TokenPermuteTiling& t, std::int64_t kept_tokens) {
  const std::int64_t counts = t.chunks * t.Bins(x.experts) * 4, sums = counts + t.Bins(x.experts) * 4,
                     passes = t.Passes(x.experts), row = x.hidden * SizeOf(x.dtype), slots = x.slots() * 4;
  Traffic traffic;
  // The ids as given, then twice in each pass, with slots the second time; the ids of ranges of experts; all indices.
  traffic[Path::kGmToUb] = 2 * x.slots() * SizeOf(x.ids) + 3 * (passes - 1) * slots + 3 * passes * counts +
                           (x.counts ? slots : 0) + slots + kept_tokens * row;
  traffic[Path::kUbToGm] =
      passes * (counts + sums + 2 * slots) + slots + x.rows() * row + (x.counts ? x.experts * 4 : 0);
  return traffic;
}

TEST(TrafficTest, TokenPermute) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const PermuteCase& x : PermuteCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      Random random;
      Matrix ids(x.ids, {x.tokens, x.topk}, kContiguous);
      ids.FillIntegers(random, 0, x.experts - 1);
      TokenPermuteTiling t;
      ASSERT_TRUE(IsOk(Choose(*chip, x.shape(), &t)));
      Profile profile;
      ASSERT_TRUE(IsOk(TokenPermute(NpuWithoutData(*chip), x.args(ids), &profile)));
      ExpectSane(*chip, profile);
      EXPECT_EQ(profile.macs, 0);
      const std::int64_t bins = t.Bins(x.experts) * 4,
                         tables = (t.sums_chunks ? 2 * t.chunks + 1 : t.chunks) * bins;
      if (t.digit_bits == 0) {
        ExpectTraffic(profile, OneTableTraffic(x, t, x.KeptTokens(ids)));
        EXPECT_EQ(profile.workspace_bytes, tables);
        continue;
      }
      Traffic traffic = DigitsTraffic(x, t, x.KeptTokens(ids));
      const std::int64_t searched = Bytes(profile, Path::kGmToUb) - traffic[Path::kGmToUb],
                         searches = 2 * CeilDiv(x.experts, t.range_experts) + t.chunks;
      EXPECT_GT(searched, 0);
      EXPECT_LE(
          searched,
          searches * 4 * static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(x.slots()))));
      traffic[Path::kGmToUb] += searched;
      ExpectTraffic(profile, traffic);
      EXPECT_EQ(profile.workspace_bytes, tables + 4 * x.slots() * 4);
    }
  }
  // One of the cases is for the digits.
  TokenPermuteTiling t;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), PermuteCases()[3].shape(), &t)));
  EXPECT_GT(t.digit_bits, 0);
}

TEST(TrafficTest, TokenUnpermute) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const PermuteCase& x : PermuteCases()) {
      for (DType probs : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(x.Name() + " " + chip->name);
        std::vector<std::int32_t> indices(static_cast<std::size_t>(x.slots()));
        std::int64_t kept = 0;
        for (std::size_t s = 0; s < indices.size(); ++s) {
          indices[s] = s % 11 == 7 ? -1 : static_cast<std::int32_t>(s);
          kept += indices[s] >= 0 && indices[s] < x.rows();
        }
        TokenUnpermuteArgs args;
        args.permuted = ConstTensor(nullptr, x.dtype, {x.rows(), x.hidden});
        args.sorted_indices = ConstTensor(indices.data(), {x.slots()});
        args.probs = ConstTensor(nullptr, probs, {x.tokens, x.topk});
        args.out = Tensor(nullptr, x.dtype, {x.tokens, x.hidden});
        Profile profile;
        ASSERT_TRUE(IsOk(TokenUnpermute(NpuWithoutData(*chip), args, &profile)));
        ExpectSane(*chip, profile);
        // Each kept row once, each token once.
        const std::int64_t row = x.hidden * SizeOf(x.dtype);
        ExpectTraffic(profile, {{Path::kGmToUb, x.slots() * (4 + SizeOf(probs)) + kept * row},
                                {Path::kUbToGm, x.tokens * row}});
        EXPECT_EQ(profile.workspace_bytes, 0);
        EXPECT_EQ(profile.macs, 0);
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
