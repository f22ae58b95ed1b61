// What a caller of TokenPermute and TokenUnpermute can get wrong comes back as an error that names the argument, its value
// and the limit, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/call_fixtures.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using BadPermute = BadCall<TokenPermuteArgs>;

void SetId(TokenPermuteArgs& args, std::int64_t t, std::int64_t j, std::int64_t id) {
  auto* ids = static_cast<std::int64_t*>(const_cast<void*>(args.topk_ids.data));
  ids[t * args.topk_ids.stride(0) + j * args.topk_ids.stride(1)] = id;
}

TEST(BadArgumentsTest, TokenPermuteShapesAndDTypes) {
  const std::string who = "token_permute: ";
  const std::vector<BadPermute> calls = {
      {"capacity of no known policy",
       [](auto& x) { x.capacity_keeps = static_cast<CapacityKeeps>(9); },
       {who + "capacity_keeps is 9, the last is 1"}},
      {"tokens missing", [](auto& x) { x.tokens = {}; }, {who + "tokens is not given"}},
      {"ids missing", [](auto& x) { x.topk_ids = {}; }, {who + "topk_ids is not given"}},
      {"permuted missing", [](auto& x) { x.permuted = {}; }, {who + "permuted is not given"}},
      {"sorted_indices missing",
       [](auto& x) { x.sorted_indices = {}; },
       {who + "sorted_indices is not given"}},
      {"tokens of rank 3", [](auto& x) { x.tokens.rank = 3; }, {who + "tokens", "rank 3", "2"}},
      {"ids of rank 3", [](auto& x) { x.topk_ids.rank = 3; }, {who + "topk_ids", "rank 3"}},
      {"permuted of rank 1", [](auto& x) { x.permuted.rank = 1; }, {who + "permuted", "rank 1", "2"}},
      {"sorted_indices of rank 2",
       [](auto& x) { x.sorted_indices.rank = 2; },
       {who + "sorted_indices", "rank 2", "1"}},
      {"counts of rank 2", [](auto& x) { x.expert_counts.rank = 2; }, {who + "expert_counts", "rank 2", "1"}},
      {"T of ids", [](auto& x) { x.topk_ids.sizes[0] = 4; }, {who + "topk_ids", "size 4", "T", "needs 5"}},
      {"ids of one route", [](auto& x) { x.topk_ids.rank = 1; }, {who + "permuted", "size 15", "needs 5"}},
      {"rows of permuted",
       [](auto& x) { x.permuted.sizes[0] = 14; },
       {who + "permuted", "size 14", "needs 15"}},
      {"H of permuted",
       [](auto& x) { x.permuted.sizes[1] = 5; },
       {who + "permuted", "size 5", "H", "needs 6"}},
      {"num_out_tokens", [](auto& x) { x.num_out_tokens = 9; }, {who + "permuted", "size 15", "needs 9"}},
      {"num_out_tokens negative",
       [](auto& x) { x.num_out_tokens = -2; },
       {who + "permuted", "size 15", "needs 13"}},
      {"num_out_tokens least",
       [](auto& x) { x.num_out_tokens = std::numeric_limits<std::int64_t>::min(); },
       {who + "permuted", "size 15", "needs 0"}},
      {"slots",
       [](auto& x) { x.sorted_indices.sizes[0] = 5; },
       {who + "sorted_indices", "size 5", "needs 15"}},
      {"counts", [](auto& x) { x.expert_counts.sizes[0] = 8; }, {who + "expert_counts", "size 8", "needs 7"}},
      {"T negative", [](auto& x) { x.tokens.sizes[0] = -5; }, {who + "tokens", "-5", "T", "0"}},
      {"H negative", [](auto& x) { x.tokens.sizes[1] = -1; }, {who + "tokens", "-1", "H", "0"}},
      {"K negative", [](auto& x) { x.topk_ids.sizes[1] = -3; }, {who + "topk_ids", "-3", "K", "0"}},
      {"experts negative", [](auto& x) { x.num_experts = -1; }, {who + "num_experts", "-1", "0"}},
      {"experts beyond int32",
       [](auto& x) { x.num_experts = std::int64_t{1} << 31; },
       {who + "num_experts", "2147483648", "2^31 - 1"}},
      {"tokens int32",
       [](auto& x) { x.tokens.dtype = DType::kI32; },
       {who + "tokens", "int32", "fp32", "bf16", "fp16"}},
      {"tokens of no dtype",
       [](auto& x) { x.tokens.dtype = kNoDType; },
       {who + "tokens", "no known dtype", "fp32", "bf16"}},
      {"ids of no dtype",
       [](auto& x) { x.topk_ids.dtype = kNoDType; },
       {who + "topk_ids", "no known dtype", "int32 or int64"}},
      {"ids fp32",
       [](auto& x) { x.topk_ids.dtype = DType::kF32; },
       {who + "topk_ids", "fp32", "int32 or int64"}},
      {"permuted bf16",
       [](auto& x) { x.permuted.dtype = DType::kBF16; },
       {who + "permuted", "bf16", "needs fp32"}},
      {"sorted_indices int64",
       [](auto& x) { x.sorted_indices.dtype = DType::kI64; },
       {who + "sorted_indices", "int64", "needs int32"}},
      {"counts int64",
       [](auto& x) { x.expert_counts.dtype = DType::kI64; },
       {who + "expert_counts", "int64", "needs int32"}},
  };
  ExpectErrors<PermuteFixture>(calls, RunPermute);
}

TEST(BadArgumentsTest, TokenPermuteStorage) {
  const std::string who = "token_permute: ";
  std::vector<BadPermute> calls;
  const auto add = [&](const std::string& name, const std::string& bytes, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back(
        {name + " misaligned", [of](auto& x) { of(x) = Misaligned(of(x)); }, {who + name, "aligned", bytes}});
    calls.push_back(
        {name + " far backwards", [of](auto& x) { of(x).strides[0] = -kHuge; }, {who + name, "2^56"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[0] = kHuge; }, {who + name, "2^56"}});
  };
  add(
      "tokens", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.tokens; });
  add(
      "topk_ids", "8 bytes", [](TokenPermuteArgs & x) -> auto& { return x.topk_ids; });
  add(
      "permuted", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.permuted; });
  add(
      "sorted_indices", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.sorted_indices; });
  add(
      "expert_counts", "4 bytes", [](TokenPermuteArgs & x) -> auto& { return x.expert_counts; });
  calls.push_back(
      {"H huge", [](auto& x) { x.tokens.sizes[1] = x.permuted.sizes[1] = kHuge; }, {who + "tokens", "2^56"}});
  calls.push_back({"T huge",
                   [](auto& x) { x.tokens.sizes[0] = x.topk_ids.sizes[0] = kHuge; },
                   {who + "topk_ids", std::to_string(kHuge), "2^31 - 1"}});
  calls.push_back({"K huge",
                   [](auto& x) { x.topk_ids.sizes[1] = kHuge; },
                   {who + "topk_ids", std::to_string(kHuge), "2^31 - 1"}});

  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"permuted on " + name,
                     [of](auto& x) { x.permuted.data = const_cast<void*>(of(x).data); },
                     {who, "permuted", name, "overlaps"}});
    calls.push_back({"sorted_indices on " + name,
                     [of](auto& x) { x.sorted_indices.data = const_cast<void*>(of(x).data); },
                     {who, "sorted_indices", name, "overlaps"}});
    calls.push_back({"expert_counts on " + name,
                     [of](auto& x) { x.expert_counts.data = const_cast<void*>(of(x).data); },
                     {who, "expert_counts", name, "overlaps"}});
  };
  onto("tokens", [](TokenPermuteArgs& x) { return x.tokens; });
  onto("topk_ids", [](TokenPermuteArgs& x) { return x.topk_ids; });
  calls.push_back({"permuted on sorted_indices",
                   [](auto& x) { x.permuted.data = x.sorted_indices.data; },
                   {who, "permuted", "sorted_indices", "overlaps"}});
  calls.push_back({"counts in permuted",
                   [](auto& x) { x.expert_counts.data = Advanced<float>(x.permuted.data, 40); },
                   {who, "expert_counts", "permuted", "overlaps"}});
  calls.push_back({"counts in sorted_indices",
                   [](auto& x) { x.expert_counts.data = Advanced<float>(x.sorted_indices.data, 14); },
                   {who, "expert_counts", "sorted_indices", "overlaps"}});
  calls.push_back(
      {"permuted repeated", [](auto& x) { x.permuted.strides[0] = 0; }, {who + "permuted", "overlap", "0"}});
  calls.push_back({"permuted rows overlap",
                   [](auto& x) { x.permuted.strides[0] = 5; },
                   {who + "permuted", "overlap", "5"}});
  calls.push_back({"sorted_indices repeated",
                   [](auto& x) { x.sorted_indices.strides[0] = 0; },
                   {who + "sorted_indices", "overlap"}});
  calls.push_back({"counts repeated",
                   [](auto& x) { x.expert_counts.strides[0] = 0; },
                   {who + "expert_counts", "overlap"}});
  ExpectErrors<PermuteFixture>(calls, RunPermute);
}

// An id is at fault after everything else was found right; the fixture then differs in that id alone.
TEST(BadArgumentsTest, TokenPermuteIds) {
  struct Case {
    std::int64_t t, j, id;
  };
  for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
    for (const Case& bad : {Case{0, 0, 7}, Case{2, 1, -2}, Case{4, 2, 8}, Case{1, 1, std::int64_t{1} << 32},
                            Case{3, 0, std::numeric_limits<std::int64_t>::min()},
                            Case{0, 1, std::numeric_limits<std::int64_t>::max()}}) {
      PermuteFixture fixture;
      const TokenPermuteArgs valid = fixture.args();
      TokenPermuteArgs args = valid;
      SetId(args, bad.t, bad.j, bad.id);
      const PermuteFixture before = fixture;
      const Status status = TokenPermute(device, args);
      EXPECT_TRUE(Says(status, {"token_permute: topk_ids", "has " + std::to_string(bad.id),
                                Join("(", bad.t, ", ", bad.j, ")"), "[-1, 7)"}));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      for (std::size_t i = 0; i < fixture.all().size(); ++i) {
        ExpectSameBits(fixture.all()[i]->view(), before.all()[i]->view());
      }
    }
    // No experts: no id but -1 is right.
    PermuteFixture fixture;
    TokenPermuteArgs args = fixture.args();
    args.num_experts = 0, args.expert_counts = {};
    EXPECT_TRUE(Says(TokenPermute(device, args), {"token_permute: topk_ids", "(0, 0)", "[-1, 0)"}));
  }
}

using BadUnpermute = BadCall<TokenUnpermuteArgs>;

TEST(BadArgumentsTest, TokenUnpermuteShapesAndDTypes) {
  const std::string who = "token_unpermute: ";
  const std::vector<BadUnpermute> calls = {
      {"permuted missing", [](auto& x) { x.permuted = {}; }, {who + "permuted is not given"}},
      {"sorted_indices missing",
       [](auto& x) { x.sorted_indices = {}; },
       {who + "sorted_indices is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"permuted of rank 1", [](auto& x) { x.permuted.rank = 1; }, {who + "permuted", "rank 1", "2"}},
      {"sorted_indices of rank 2",
       [](auto& x) { x.sorted_indices.rank = 2; },
       {who + "sorted_indices", "rank 2", "1"}},
      {"probs of rank 1", [](auto& x) { x.probs.rank = 1; }, {who + "probs", "rank 1", "2"}},
      {"out of rank 3", [](auto& x) { x.out.rank = 3; }, {who + "out", "rank 3", "2"}},
      {"H of out", [](auto& x) { x.out.sizes[1] = 5; }, {who + "out", "size 5", "H", "needs 6"}},
      {"T of probs", [](auto& x) { x.probs.sizes[0] = 4; }, {who + "probs", "size 4", "T", "needs 5"}},
      {"K of probs", [](auto& x) { x.probs.sizes[1] = 2; }, {who + "sorted_indices", "size 15", "needs 10"}},
      {"probs missing", [](auto& x) { x.probs = {}; }, {who + "sorted_indices", "size 15", "needs 5"}},
      {"slots",
       [](auto& x) { x.sorted_indices.sizes[0] = 14; },
       {who + "sorted_indices", "size 14", "needs 15"}},
      {"M negative", [](auto& x) { x.permuted.sizes[0] = -1; }, {who + "permuted", "-1", "M", "0"}},
      {"T negative", [](auto& x) { x.out.sizes[0] = -1; }, {who + "out", "-1", "T", "0"}},
      {"K negative", [](auto& x) { x.probs.sizes[1] = -1; }, {who + "probs", "-1", "K", "0"}},
      {"permuted int32",
       [](auto& x) { x.permuted.dtype = DType::kI32; },
       {who + "permuted", "int32", "fp32", "bf16", "fp16"}},
      {"out fp32", [](auto& x) { x.out.dtype = DType::kF32; }, {who + "out", "fp32", "needs fp16"}},
      {"sorted_indices int64",
       [](auto& x) { x.sorted_indices.dtype = DType::kI64; },
       {who + "sorted_indices", "int64", "needs int32"}},
      {"probs int32",
       [](auto& x) { x.probs.dtype = DType::kI32; },
       {who + "probs", "int32", "fp32", "bf16", "fp16"}},
  };
  ExpectErrors<UnpermuteFixture>(calls, RunUnpermute);
}

TEST(BadArgumentsTest, TokenUnpermuteStorage) {
  const std::string who = "token_unpermute: ";
  std::vector<BadUnpermute> calls;
  const auto add = [&](const std::string& name, const std::string& bytes, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back(
        {name + " misaligned", [of](auto& x) { of(x) = Misaligned(of(x)); }, {who + name, "aligned", bytes}});
    calls.push_back(
        {name + " far backwards", [of](auto& x) { of(x).strides[0] = -kHuge; }, {who + name, "2^56"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[0] = kHuge; }, {who + name, "2^56"}});
  };
  add(
      "permuted", "2 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.permuted; });
  add(
      "sorted_indices", "4 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.sorted_indices; });
  add(
      "probs", "4 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.probs; });
  add(
      "out", "2 bytes", [](TokenUnpermuteArgs & x) -> auto& { return x.out; });
  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"out on " + name,
                     [of](auto& x) { x.out.data = const_cast<void*>(of(x).data); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"out ends in " + name,
                     [of](auto& x) { x.out.data = const_cast<F16*>(Advanced<F16>(of(x).data, -30)); },
                     {who + "out", "overlaps " + name}});
  };
  onto("permuted", [](TokenUnpermuteArgs& x) { return x.permuted; });
  onto("sorted_indices", [](TokenUnpermuteArgs& x) { return x.sorted_indices; });
  onto("probs", [](TokenUnpermuteArgs& x) { return x.probs; });
  calls.push_back({"out repeated", [](auto& x) { x.out.strides[0] = 0; }, {who + "out", "overlap", "0"}});
  calls.push_back({"out columns overlap",
                   [](auto& x) {
                     x.out.strides = {1, 4};
                   },
                   {who + "out", "overlap", "4"}});
  calls.push_back({"M huge", [](auto& x) { x.permuted.sizes[0] = kHuge; }, {who + "permuted", "2^56"}});
  calls.push_back({"T huge",
                   [](auto& x) { x.out.sizes[0] = x.probs.sizes[0] = kHuge; },
                   {who + "out", std::to_string(kHuge), "2^31 - 1"}});
  ExpectErrors<UnpermuteFixture>(calls, RunUnpermute);
}

TEST(BadArgumentsTest, TokenUnpermuteIndices) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2()), NpuWithoutData(Ascend910B2())}) {
    for (std::int64_t bad : {std::int64_t{-2}, std::int64_t{std::numeric_limits<std::int32_t>::min()}}) {
      UnpermuteFixture fixture;
      fixture.sorted_indices.set({11}, static_cast<double>(bad));
      const UnpermuteFixture before = fixture;
      const Status status = TokenUnpermute(device, fixture.args());
      EXPECT_TRUE(
          Says(status, {"token_unpermute: sorted_indices", "has " + std::to_string(bad), "(11)", "[-1, "}));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      ExpectSameBits(fixture.out.view(), before.out.view());
    }
  }
}

// 2^31 slots are one more than an int32 counts. No data is needed to say so.
TEST(BadArgumentsTest, TooManySlots) {
  const Device device = NpuWithoutData(Ascend910B2());
  constexpr std::int64_t kTokens = std::int64_t{1} << 20, kRoutes = std::int64_t{1} << 11,
                         kSlots = kTokens * kRoutes;
  TokenPermuteArgs permute;
  permute.tokens = ConstTensor(nullptr, DType::kBF16, {kTokens, 64});
  permute.topk_ids = ConstTensor(nullptr, DType::kI32, {kTokens, kRoutes});
  permute.num_experts = 4;
  permute.permuted = Tensor(nullptr, DType::kBF16, {kSlots, 64});
  permute.sorted_indices = Tensor(nullptr, DType::kI32, {kSlots});
  EXPECT_TRUE(Says(TokenPermute(device, permute), {"token_permute: topk_ids", "1048576 x 2048", "2^31 - 1"}));

  TokenUnpermuteArgs unpermute;
  unpermute.permuted = ConstTensor(nullptr, DType::kBF16, {kSlots, 64});
  unpermute.sorted_indices = ConstTensor(nullptr, DType::kI32, {kSlots});
  unpermute.probs = ConstTensor(nullptr, DType::kF32, {kTokens, kRoutes});
  unpermute.out = Tensor(nullptr, DType::kBF16, {kTokens, 64});
  EXPECT_TRUE(
      Says(TokenUnpermute(device, unpermute), {"token_unpermute: out", "1048576 x 2048", "2^31 - 1"}));
}

// Index tensors steer the kernels: they are read even where nothing is computed.
TEST(BadArgumentsTest, IndicesAreNeededWithoutDataToo) {
  const Device device = NpuWithoutData(Ascend910B2());
  PermuteFixture permute;
  TokenPermuteArgs permute_args = permute.args();
  permute_args.topk_ids = WithoutData(permute_args.topk_ids);
  EXPECT_TRUE(Says(TokenPermute(device, permute_args), {"token_permute: topk_ids", "null"}));
  UnpermuteFixture unpermute;
  TokenUnpermuteArgs unpermute_args = unpermute.args();
  unpermute_args.sorted_indices = WithoutData(unpermute_args.sorted_indices);
  EXPECT_TRUE(Says(TokenUnpermute(device, unpermute_args), {"token_unpermute: sorted_indices", "null"}));
}

}  // namespace
}  // namespace cubist::testing
