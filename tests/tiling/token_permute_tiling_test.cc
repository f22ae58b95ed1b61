#include "tiling/token_permute_tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/token_permute_grad_kernel.h"
#include "kernels/token_permute_kernel.h"
#include "kernels/token_rank_kernel.h"
#include "npu_model/chip.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/trace_support.h"
#include "tests/tiling/tiling_support.h"

namespace cubist {
namespace {

using testing::Chips;
using testing::ExpectErrorsNameTheBuffer;
using testing::TensorOf;
using testing::WithCapacity;

std::vector<TokenPermuteShape> Shapes() {
  std::vector<TokenPermuteShape> shapes;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (bool wide : {false, true}) {
      for (const auto& [tokens, hidden, top_k, experts] :
           std::vector<std::array<std::int64_t, 4>>{{0, 8, 2, 4},
                                                    {1, 1, 1, 1},
                                                    {5, 0, 2, 3},
                                                    {7, 9, 0, 3},
                                                    {13, 100, 3, 0},
                                                    {100, 7168, 8, 256},
                                                    {1000, 33, 2, 7},
                                                    {64, 129, 70, 100},
                                                    {37, 20011, 4, 5000},
                                                    {4096, 7168, 8, 256}}) {
        shapes.push_back({tokens, hidden, top_k, experts, dtype, wide});
      }
      TokenPermuteShape drops{300, 200, 8, 256, dtype, wide};
      drops.drops = true;
      shapes.push_back(drops);
    }
  }
  return shapes;
}

std::string NameOf(const TokenPermuteShape& s) {
  return std::to_string(s.tokens) + "x" + std::to_string(s.hidden) + " top " + std::to_string(s.top_k) +
         " of " + std::to_string(s.experts) + " " + NameOf(s.dtype) + (s.wide_ids ? " wide" : "") +
         (s.drops ? " with a capacity" : "");
}
std::string NameOf(const TokenPermuteTiling& t) {
  return std::to_string(t.chunks) + " chunks of " + std::to_string(t.chunk_tokens) + " by " +
         std::to_string(t.piece_tokens) + ", digits of " + std::to_string(t.digit_bits) + " experts " +
         std::to_string(t.range_experts) + " cols " + std::to_string(t.cols) + " stages " +
         std::to_string(t.row_stages) + (t.sums_chunks ? " chunks summed" : "") +
         (t.sorts ? " ids sorted" : "");
}
std::string NameOf(const TokenUnpermuteTiling& t) {
  return std::to_string(t.chunks) + " chunks of " + std::to_string(t.chunk_tokens) + " by " +
         std::to_string(t.piece_tokens) + ", rows " + std::to_string(t.rows) + " cols " +
         std::to_string(t.cols) + " stages " + std::to_string(t.stages);
}
std::string NameOf(const TokenUnpermuteGradTiling& t) {
  return std::to_string(t.chunks) + " chunks of " + std::to_string(t.chunk_tokens) + " by " +
         std::to_string(t.piece_tokens) + ", slots " + std::to_string(t.slots) + " cols " +
         std::to_string(t.cols) + " stages " + std::to_string(t.row_stages);
}

// The tilings, for tests that ask the same of all.
struct Permute {
  using Tiling = TokenPermuteTiling;
  static std::vector<Tiling> Candidates(const ChipSpec& chip, const TokenPermuteShape& s) {
    return PermuteCandidates(chip, s);
  }
};
struct Unpermute {
  using Tiling = TokenUnpermuteTiling;
  static std::vector<Tiling> Candidates(const ChipSpec& chip, const TokenPermuteShape& s) {
    return UnpermuteCandidates(chip, s);
  }
};
template <class Kernel>
class TokenPermuteTilingTest : public ::testing::Test {};
struct UnpermuteGrad {
  using Tiling = TokenUnpermuteGradTiling;
  static std::vector<Tiling> Candidates(const ChipSpec& chip, const TokenPermuteShape& s) {
    return UnpermuteGradCandidates(chip, s);
  }
};
using Kernels = ::testing::Types<Permute, Unpermute, UnpermuteGrad>;
TYPED_TEST_SUITE(TokenPermuteTilingTest, Kernels);

// Runs the kernel of the first of `cores` cores, which must find nothing wrong; the bytes of UB that its rings
// take. Rings are the same on every core.
template <class Kernel>
std::int64_t BytesOfOneCore(const ChipSpec& chip, std::int64_t cores, Kernel kernel) {
  trace::CoreRecord record;
  Scratch scratch;
  TraceVectorCore core(chip, scratch, 0, static_cast<int>(cores), /*with_data=*/false, &record);
  kernel(core);
  EXPECT_EQ(core.finding(), "") << chip.name;
  std::int64_t bytes = 0;
  for (const trace::SlotInfo& slot : record.slots) bytes += slot.bytes;
  return bytes;
}

template <class T>
std::int64_t PermuteBytes(const ChipSpec& chip, const TokenPermuteShape& s, const TokenPermuteTiling& t) {
  const DType id_type = s.wide_ids ? DType::kI64 : DType::kI32;
  std::vector<std::int64_t> ids(static_cast<std::size_t>(s.tokens * s.top_k));  // Room for either type.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<std::int64_t>(i * 7 + i / 3) % std::max<std::int64_t>(s.experts, 1);
    if (s.wide_ids) {
      ids[i] = id;
    } else {
      reinterpret_cast<std::int32_t*>(ids.data())[i] = static_cast<std::int32_t>(id);
    }
  }
  const std::int64_t bins = t.Bins(s.experts), slots = s.tokens * s.top_k,
                     capacity = s.drops ? CeilDiv(slots, s.experts) : 0,
                     rows_out = s.drops ? s.experts * capacity : slots;
  std::vector<std::int32_t> counts(static_cast<std::size_t>(t.chunks * bins)),
      sums(counts.size() + static_cast<std::size_t>(bins)), by_expert(static_cast<std::size_t>(slots)),
      places(by_expert.size()), of_experts(static_cast<std::size_t>(s.experts));
  const GmTensor tokens = TensorOf(0, s.dtype, s.tokens, s.hidden),
                 topk_ids = TensorOf(1, id_type, s.tokens, s.top_k, ids.data()),
                 permuted = TensorOf(2, s.dtype, rows_out, s.hidden),
                 sorted = TensorOf(3, DType::kI32, s.tokens, s.top_k, places.data()),
                 chunk_counts = TensorOf(4, DType::kI32, t.chunks, bins, counts.data()),
                 sorted_ids = TensorOf(5, DType::kI32, slots, 1, by_expert.data()),
                 chunk_sums = TensorOf(6, DType::kI32, t.chunks + 1, bins, sums.data());
  TokenPermuteOperands g;
  g.tokens = MatrixOf(tokens), g.topk_ids = MatrixOf(topk_ids);
  g.permuted = MatrixOf(permuted), g.sorted_indices = MatrixOf(sorted);
  g.chunk_counts = MatrixOf(chunk_counts), g.chunk_sums = MatrixOf(chunk_sums);
  g.experts = s.experts, g.capacity = capacity;
  const auto bytes = [&](auto kernel) { return BytesOfOneCore(chip, t.chunks, kernel); };
  std::int64_t most = std::max(
      bytes([&](auto& core) { CountKernel(core, g.topk_ids, g.chunk_counts, {}, t); }),
      t.sums_chunks ? bytes([&](auto& core) { ScanChunksKernel(core, g.chunk_counts, g.chunk_sums); }) : 0);
  if (t.digit_bits == 0) return std::max(most, bytes([&](auto& core) { RankAndMoveKernel<T>(core, g, t); }));

  const GmTensor row_counts = TensorOf(7, DType::kI32, 1, s.experts, of_experts.data()),
                 rows = TensorOf(8, DType::kI32, 1, CeilDiv(s.experts, t.range_experts), of_experts.data());
  const ExpertRangesOperands r{
      {MatrixOf(sorted_ids), MatrixOf(sorted_ids)}, MatrixOf(row_counts), MatrixOf(rows)};
  const Gm slot_rows = MatrixAsColumn(g.sorted_indices);
  const RadixPassOperands p{.ids = g.topk_ids,
                            .sorted = r.routes,
                            .slot_rows = &slot_rows,
                            .chunk_sums = g.chunk_sums,
                            .digit = {.bits = t.digit_bits}};
  if (!s.drops) g.row_multiple = 2;
  return std::max({most, bytes([&](auto& core) { RadixPassKernel(core, p, t); }),
                   bytes([&](auto& core) { CountRangesKernel(core, g, r, t); }),
                   bytes([&](auto& core) { PlaceRoutesKernel(core, g, r, t); }),
                   bytes([&](auto& core) { MoveKernel<T>(core, g, r, t); })});
}

template <class T>
std::int64_t UnpermuteBytes(const ChipSpec& chip, const TokenPermuteShape& s, const TokenUnpermuteTiling& t) {
  std::vector<std::int32_t> places(static_cast<std::size_t>(s.tokens * s.top_k));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int32_t>(i);
  const GmTensor permuted = TensorOf(0, s.dtype, s.tokens * s.top_k, s.hidden),
                 sorted = TensorOf(1, DType::kI32, s.tokens, s.top_k, places.data()),
                 probs = TensorOf(2, DType::kF32, s.tokens, s.top_k),
                 out = TensorOf(3, s.dtype, s.tokens, s.hidden);
  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(permuted), g.sorted_indices = MatrixOf(sorted);
  g.probs = &probs;
  g.out = MatrixOf(out);
  return BytesOfOneCore(chip, t.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, t); });
}

template <class T>
std::int64_t UnpermuteGradBytes(const ChipSpec& chip, const TokenPermuteShape& s,
                                const TokenUnpermuteGradTiling& t) {
  std::vector<std::int32_t> places(static_cast<std::size_t>(s.tokens * s.top_k)), owned(places.size(), 1);
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int32_t>(i);
  const std::int64_t rows = s.tokens * s.top_k;
  const GmTensor permuted = TensorOf(0, s.dtype, rows, s.hidden),
                 sorted = TensorOf(1, DType::kI32, s.tokens, s.top_k, places.data()),
                 probs = TensorOf(2, DType::kF32, s.tokens, s.top_k),
                 out = TensorOf(3, s.dtype, s.tokens, s.hidden),
                 marks = TensorOf(4, DType::kI32, rows, 1, owned.data());
  TokenUnpermuteGradOperands g;
  g.out_grad = MatrixOf(out), g.sorted_indices = MatrixOf(sorted);
  g.permuted = &permuted, g.probs = &probs, g.permuted_grad = MatrixOf(permuted), g.probs_grad = &probs;
  g.owned = &marks;
  return std::max(
      {BytesOfOneCore(chip, t.chunks, [&](auto& core) { ClearOwnedKernel(core, g, t); }),
       BytesOfOneCore(chip, t.chunks, [&](auto& core) { MarkOwnedKernel(core, g, t); }),
       BytesOfOneCore(chip, t.chunks, [&](auto& core) { TokenUnpermuteGradKernel<T>(core, g, t); })});
}

// Bytes of UB; of the kernels of one call, the greatest.
std::int64_t RingBytes(const ChipSpec& chip, const TokenPermuteShape& s, const TokenPermuteTiling& t) {
  SCOPED_TRACE(NameOf(s) + " " + NameOf(t));
  return s.dtype == DType::kBF16 ? PermuteBytes<BF16>(chip, s, t) : PermuteBytes<float>(chip, s, t);
}
std::int64_t RingBytes(const ChipSpec& chip, const TokenPermuteShape& s, const TokenUnpermuteTiling& t) {
  SCOPED_TRACE(NameOf(s) + " " + NameOf(t));
  return s.dtype == DType::kBF16 ? UnpermuteBytes<BF16>(chip, s, t) : UnpermuteBytes<float>(chip, s, t);
}

std::int64_t RingBytes(const ChipSpec& chip, const TokenPermuteShape& s, const TokenUnpermuteGradTiling& t) {
  SCOPED_TRACE(NameOf(s) + " " + NameOf(t));
  return s.dtype == DType::kBF16 ? UnpermuteGradBytes<BF16>(chip, s, t)
                                 : UnpermuteGradBytes<float>(chip, s, t);
}

template <class Tiling>
void ExpectTakes(const ChipSpec& chip, const TokenPermuteShape& s, const Tiling& t) {
  const std::int64_t bytes = RingBytes(chip, s, t);
  EXPECT_TRUE(Fits(WithCapacity(chip, Buffer::kUB, bytes), s, t))
      << chip.name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes";
  EXPECT_FALSE(Fits(WithCapacity(chip, Buffer::kUB, bytes - 1), s, t))
      << chip.name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes";
}

TYPED_TEST(TokenPermuteTilingTest, WhatTheTilingCountsIsWhatTheRingsTake) {
  for (const ChipSpec* chip : Chips()) {
    for (const TokenPermuteShape& s : Shapes()) {
      if (s.tokens == 4096 || s.tokens == 0 || s.top_k == 0 || s.hidden == 0) continue;
      const auto candidates = TypeParam::Candidates(*chip, s);
      for (std::size_t i = 0; i < candidates.size(); i += candidates.size() / 3 + 1)
        ExpectTakes(*chip, s, candidates[i]);
    }
  }
}

// With a capacity only the first phase sorts: in some tilings that takes more than the last one, in some less.
TEST(PermuteWithCapacityTest, WhereACapacityRanksByATableTheCountAloneSorts) {
  std::array<int, 2> met{};
  for (const bool wide : {false, true}) {
    TokenPermuteShape s{.tokens = 300, .hidden = 200, .top_k = 8, .experts = 256, .wide_ids = wide};
    s.drops = true;
    for (TokenPermuteTiling t : PermuteCandidates(Ascend910B2(), s)) {
      if (!t.sorts || t.row_stages != 2) continue;
      ExpectTakes(Ascend910B2(), s, t);
      const std::int64_t bytes = BufferBytes(Ascend910B2(), s, t, Buffer::kUB);
      t.sorts = false;
      ++met[BufferBytes(Ascend910B2(), s, t, Buffer::kUB) < bytes ? 1 : 0];
    }
  }
  EXPECT_GT(met[0], 0);
  EXPECT_GT(met[1], 0);
}

// Sizes of 0 run as well, and within what the tiling counts.
TYPED_TEST(TokenPermuteTilingTest, EmptySizesFit) {
  for (const ChipSpec* chip : Chips()) {
    for (const TokenPermuteShape& s : Shapes()) {
      if (s.tokens != 0 && s.top_k != 0 && s.hidden != 0 && s.experts != 0) continue;
      typename TypeParam::Tiling t;
      ASSERT_TRUE(Choose(*chip, s, &t).ok()) << chip->name << " " << NameOf(s);
      EXPECT_LE(RingBytes(*chip, s, t), chip->buffer(Buffer::kUB).capacity);
    }
  }
}

TYPED_TEST(TokenPermuteTilingTest, CandidatesFitAndCoverTheTokens) {
  for (const ChipSpec* chip : Chips()) {
    for (const TokenPermuteShape& s : Shapes()) {
      const auto candidates = TypeParam::Candidates(*chip, s);
      ASSERT_FALSE(candidates.empty()) << chip->name << " " << NameOf(s);
      for (const auto& t : candidates) {
        SCOPED_TRACE(chip->name + " " + NameOf(s) + " " + NameOf(t));
        ASSERT_TRUE(Fits(*chip, s, t));
        ASSERT_TRUE(t.chunks > 0 && t.chunk_tokens > 0 && t.piece_tokens > 0 && t.cols > 0);
        ASSERT_GE(t.chunks * t.chunk_tokens, s.tokens);
        ASSERT_LT((t.chunks - 1) * t.chunk_tokens, std::max<std::int64_t>(s.tokens, 1));  // None is empty.
        ASSERT_LE(t.chunks, chip->cube_cores * chip->vector_per_cube);
        ASSERT_EQ(t.cols % 32, 0);  // Whole blocks of UB for any type.
      }
    }
  }
}

TYPED_TEST(TokenPermuteTilingTest, ChooseTakesACandidateOfLeastPrice) {
  for (const ChipSpec* chip : Chips()) {
    for (const TokenPermuteShape& s : Shapes()) {
      SCOPED_TRACE(chip->name + " " + NameOf(s));
      typename TypeParam::Tiling chosen;
      ASSERT_TRUE(Choose(*chip, s, &chosen).ok());
      double least = std::numeric_limits<double>::infinity();
      std::vector<std::string> names;
      for (const auto& t : TypeParam::Candidates(*chip, s)) {
        const double price = Price(*chip, s, t);
        ASSERT_TRUE(std::isfinite(price) && price > 0) << NameOf(t) << ": " << price;
        least = std::min(least, price);
        names.push_back(NameOf(t));
      }
      EXPECT_EQ(Price(*chip, s, chosen), least);
      EXPECT_EQ(std::count(names.begin(), names.end(), NameOf(chosen)), 1) << NameOf(chosen);
      typename TypeParam::Tiling again;
      ASSERT_TRUE(Choose(*chip, s, &again).ok());
      EXPECT_EQ(NameOf(again), NameOf(chosen));
    }
  }
}

TYPED_TEST(TokenPermuteTilingTest, MoreWorkIsNotCheaper) {
  const auto best = [](const ChipSpec& chip, const TokenPermuteShape& s) {
    typename TypeParam::Tiling t;
    EXPECT_TRUE(Choose(chip, s, &t).ok());
    return Price(chip, s, t);
  };
  for (const ChipSpec* chip : Chips()) {
    for (std::int64_t size : {100, 1000, 5000}) {
      const TokenPermuteShape s{size, 1024, 4, 64, DType::kBF16, false};
      SCOPED_TRACE(chip->name + " " + NameOf(s));
      const double price = best(*chip, s);
      EXPECT_GE(best(*chip, {2 * size, 1024, 4, 64, DType::kBF16, false}), price);
      EXPECT_GE(best(*chip, {size, 2048, 4, 64, DType::kBF16, false}), price);
      EXPECT_GE(best(*chip, {size, 1024, 8, 64, DType::kBF16, false}), price);
      EXPECT_GE(best(*chip, {size, 1024, 4, 64, DType::kF32, false}), price);
      EXPECT_GE(best(*chip, {size, 1024, 4, 128, DType::kBF16, false}), price);
    }
    // Movement of many rows grows with them.
    const double one = best(*chip, {1 << 16, 7168, 8, 64, DType::kBF16, false});
    const double two = best(*chip, {1 << 17, 7168, 8, 64, DType::kBF16, false});
    EXPECT_NEAR(two / one, 2, 0.1) << chip->name;
  }
}

TYPED_TEST(TokenPermuteTilingTest, HugeSizesAreChosenAtOnce) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  for (const ChipSpec* chip : Chips()) {
    for (const TokenPermuteShape& s :
         {TokenPermuteShape{kHuge, 64, 1, 8, DType::kBF16, true},
          TokenPermuteShape{4, kHuge, 2, 8, DType::kF32, false},
          TokenPermuteShape{1000, 64, 2, (std::int64_t{1} << 31) - 1, DType::kBF16}}) {
      typename TypeParam::Tiling t;
      ASSERT_TRUE(Choose(*chip, s, &t).ok()) << chip->name << " " << NameOf(s);
      EXPECT_TRUE(Fits(*chip, s, t));
      const double price = Price(*chip, s, t);
      EXPECT_TRUE(std::isfinite(price) && price > 0) << chip->name << " " << NameOf(s) << ": " << price;
    }
  }
}

TYPED_TEST(TokenPermuteTilingTest, AnErrorNamesUbAndItsCapacity) {
  ExpectErrorsNameTheBuffer<typename TypeParam::Tiling>(
      TokenPermuteShape{1000, 512, 8, 64, DType::kBF16, true}, std::array{Buffer::kUB});
}

}  // namespace
}  // namespace cubist
