// Permute and unpermute from a framework's chain of small operators to the fused kernels.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/token_permute.h"
#include "tools/ablate/ablation.h"
#include "tools/ablate/chain_ops.h"

namespace cubist {
namespace {

// A device's tokens and where their routes go, drawn once.
struct Routes {
  std::int64_t tokens = 0, hidden = 0, top_k = 0, experts = 0;
  bool skewed = false;
  std::vector<std::int32_t> ids;     // (tokens, top_k)
  std::vector<std::int32_t> rank;    // row of each slot
  std::vector<std::int32_t> source;  // token of each row

  std::int64_t slots() const { return tokens * top_k; }
};

std::uint32_t NextRandom(std::uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// Distinct experts for every token, spread over all.
void DrawEven(Routes* r) {
  const std::int64_t experts = std::max<std::int64_t>(r->experts, 1),
                     stride = std::max<std::int64_t>(experts / std::max<std::int64_t>(r->top_k, 1), 1);
  std::uint32_t state = 12345;
  for (std::int64_t t = 0; t < r->tokens; ++t) {
    const std::int64_t first = NextRandom(state) % experts;
    for (std::int64_t j = 0; j < r->top_k; ++j)
      r->ids.push_back(static_cast<std::int32_t>((first + j * stride) % experts));
  }
}

// Distinct experts for every token, skewed as in practice: of sixteen experts the first three have 60 % of the places on a
// wheel, the last five 10 %. A token turns it until it has enough.
void DrawSkewed(Routes* r) {
  constexpr std::int64_t kOften = 80, kSometimes = 15, kSeldom = 8;  // Of 400 places for sixteen experts.
  std::vector<std::int32_t> wheel;
  for (std::int64_t e = 0; e < r->experts; ++e) {
    const std::int64_t of_sixteen = e % 16, places = of_sixteen < 3    ? kOften
                                                     : of_sixteen < 11 ? kSometimes
                                                                       : kSeldom;
    wheel.insert(wheel.end(), static_cast<std::size_t>(places), static_cast<std::int32_t>(e));
  }
  std::uint32_t state = 12345;
  for (std::int64_t t = 0; t < r->tokens; ++t) {
    const auto of_token = static_cast<std::ptrdiff_t>(r->ids.size());
    while (std::ssize(r->ids) < of_token + r->top_k) {
      const std::int32_t expert = wheel[NextRandom(state) % wheel.size()];
      if (std::find(r->ids.begin() + of_token, r->ids.end(), expert) == r->ids.end())
        r->ids.push_back(expert);
    }
  }
}

std::shared_ptr<const Routes> MakeRoutes(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k,
                                         std::int64_t experts, bool skewed = false) {
  auto r = std::make_shared<Routes>();
  r->tokens = tokens, r->hidden = hidden, r->top_k = top_k, r->experts = experts, r->skewed = skewed;
  if (skewed) {
    DrawSkewed(r.get());
  } else {
    DrawEven(r.get());
  }
  std::vector<std::int32_t> order(r->ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return r->ids[static_cast<std::size_t>(a)] < r->ids[static_cast<std::size_t>(b)];
  });
  r->rank.resize(order.size());
  for (std::size_t row = 0; row < order.size(); ++row) {
    r->rank[static_cast<std::size_t>(order[row])] = static_cast<std::int32_t>(row);
    r->source.push_back(static_cast<std::int32_t>(order[row] / top_k));
  }
  return r;
}

using RoutesPtr = std::shared_ptr<const Routes>;

// Ours; with `hidden` columns of 16 it ranks and moves next to nothing: the sort of the chain.
Status Permute(const Device& device, const Routes& r, std::int64_t hidden, Profile* profile) {
  TokenPermuteArgs args;
  args.tokens = ConstTensor(nullptr, DType::kBF16, {r.tokens, hidden});
  args.topk_ids = ConstTensor(r.ids.data(), {r.tokens, r.top_k});
  args.num_experts = r.experts;
  args.permuted = Tensor(nullptr, DType::kBF16, {r.slots(), hidden});
  args.sorted_indices = Tensor(nullptr, DType::kI32, {r.slots()});
  Profile one;
  CUBIST_RETURN_IF_ERROR(TokenPermute(device, args, profile != nullptr ? &one : nullptr));
  if (profile != nullptr) profile->Append(one);
  return {};
}

Status Unpermute(const Device& device, const Routes& r, const std::vector<std::int32_t>& places,
                 Profile* profile) {
  TokenUnpermuteArgs args;
  args.permuted = ConstTensor(nullptr, DType::kBF16, {r.slots(), r.hidden});
  args.sorted_indices = ConstTensor(places.data(), {r.slots()});
  args.probs = ConstTensor(nullptr, DType::kF32, {r.tokens, r.top_k});
  args.out = Tensor(nullptr, DType::kBF16, {r.tokens, r.hidden});
  Profile one;
  CUBIST_RETURN_IF_ERROR(TokenUnpermute(device, args, profile != nullptr ? &one : nullptr));
  if (profile != nullptr) profile->Append(one);
  return {};
}

constexpr std::int64_t kNextToNothing = 16;

// Sort -> Slice -> FloorDiv -> Gather.
Status PermuteChain(const Device& device, const Routes& r, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Permute(device, r, kNextToNothing, profile));
  CUBIST_RETURN_IF_ERROR(MapIndices(device, r.slots(), profile));
  CUBIST_RETURN_IF_ERROR(MapIndices(device, r.slots(), profile));
  return GatherRows(device, r.tokens, r.hidden, r.source, profile);
}
Status PermuteRanked(const Device& device, const Routes& r, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Permute(device, r, kNextToNothing, profile));
  return GatherRows(device, r.tokens, r.hidden, r.source, profile);
}
// IndexCopy -> Mul in fp32 -> Sum -> Cast.
Status UnpermuteChain(const Device& device, const Routes& r, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(GatherRows(device, r.slots(), r.hidden, r.rank, profile));
  CUBIST_RETURN_IF_ERROR(ScaleRows(device, r.slots(), r.hidden, profile));
  CUBIST_RETURN_IF_ERROR(SumRows(device, r.tokens, r.top_k, r.hidden, profile));
  return NarrowRows(device, r.tokens, r.hidden, profile);
}
// Rows come back to their tokens in memory, then one pass weights and sums them.
Status UnpermuteInOrder(const Device& device, const Routes& r, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(GatherRows(device, r.slots(), r.hidden, r.rank, profile));
  std::vector<std::int32_t> in_order(r.rank.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  return Unpermute(device, r, in_order, profile);
}

std::string ShapeOf(const Routes& r) {
  return fmt::format("{}x{} top {} of {}{}", r.tokens, r.hidden, r.top_k, r.experts,
                     r.skewed ? " skewed" : "");
}

// The parts one after the other, until one fails.
template <class... Parts>
Call CallOf(const RoutesPtr& r, Parts... parts) {
  return [=](const Device& device, Profile* profile) {
    Status status;
    ((status.ok() ? void(status = parts(device, *r, profile)) : void()), ...);
    return status;
  };
}
Status PermuteFused(const Device& device, const Routes& r, Profile* profile) {
  return Permute(device, r, r.hidden, profile);
}
Status UnpermuteFused(const Device& device, const Routes& r, Profile* profile) {
  return Unpermute(device, r, r.rank, profile);
}

using sync::Policy;

AblationCase PairOf(const RoutesPtr& r) {
  return {"pair " + ShapeOf(*r),
          "pair",
          {{"chain", CallOf(r, &PermuteChain, &UnpermuteChain), Policy::kMinimal, {}},
           {"fused permute", CallOf(r, &PermuteFused, &UnpermuteChain), Policy::kMinimal, {}},
           {"fused unpermute", CallOf(r, &PermuteFused, &UnpermuteFused), Policy::kMinimal, {}}}};
}
AblationCase PermuteOf(const RoutesPtr& r) {
  return {"permute " + ShapeOf(*r),
          "permute",
          {{"chain", CallOf(r, &PermuteChain), Policy::kMinimal, {}},
           {"indices from one kernel", CallOf(r, &PermuteRanked), Policy::kMinimal, {}},
           {"each row read once", CallOf(r, &PermuteFused), Policy::kMinimal, {}}}};
}
AblationCase UnpermuteOf(const RoutesPtr& r) {
  return {"unpermute " + ShapeOf(*r),
          "unpermute",
          {{"chain", CallOf(r, &UnpermuteChain), Policy::kMinimal, {}},
           {"weighted and summed at once", CallOf(r, &UnpermuteInOrder), Policy::kMinimal, {}},
           {"rows gathered in it", CallOf(r, &UnpermuteFused), Policy::kMinimal, {}}}};
}

}  // namespace

AblationCase PermuteCase(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k, std::int64_t experts) {
  return PermuteOf(MakeRoutes(tokens, hidden, top_k, experts));
}
AblationCase UnpermuteCase(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k,
                           std::int64_t experts) {
  return UnpermuteOf(MakeRoutes(tokens, hidden, top_k, experts));
}

std::vector<AblationCase> TokenPermuteAblation(const Workload& w) {
  std::vector<AblationCase> cases;
  for (const std::int64_t tokens : {1024, 4096}) {
    const RoutesPtr r = MakeRoutes(tokens, w.hidden, w.moe.top_k, w.moe.experts);
    cases.push_back(PairOf(r));
    cases.push_back(PermuteOf(r));
    cases.push_back(UnpermuteOf(r));
    cases.push_back(PairOf(MakeRoutes(tokens, w.hidden, w.moe.top_k, w.moe.experts, /*skewed=*/true)));
  }
  return cases;
}

}  // namespace cubist
