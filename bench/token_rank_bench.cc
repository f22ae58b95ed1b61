// Ranking routes by expert: TokenPermute without any columns to move, beside sorts that people reach for.
//
// Rank/<library>/int32/<uniform|skewed>/<routes>of<experts>/threads:<n>. Libraries: cubist; stable_sort sorts the slots by
// expert; vqsort sorts (expert, slot) as 64-bit keys with Highway's vectorised quicksort. All of them leave the row of
// every slot.
#include <hwy/contrib/sort/vqsort.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/support/harness.h"
#include "kernels/token_permute.h"

namespace cubist::bench {
namespace {

constexpr std::int64_t kTokens = 4096, kTopK = 8, kRoutes = kTokens * kTopK;

struct Problem {
  Problem(std::int64_t experts, bool skewed)
      : experts(experts), ids(kRoutes), rows(kRoutes), right(kRoutes), slots(kRoutes), keys(kRoutes) {
    std::mt19937_64 random(static_cast<std::uint64_t>(experts));
    std::uniform_real_distribution<double> share(0, 1);
    for (std::int32_t& id : ids) {
      const double u = share(random);
      id = static_cast<std::int32_t>(static_cast<double>(experts) * (skewed ? u * u * u : u));
    }
    StableSort();
    right = rows;
  }

  void StableSort() {
    std::iota(slots.begin(), slots.end(), 0);
    std::stable_sort(slots.begin(), slots.end(), [&](std::int32_t a, std::int32_t b) {
      return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
    });
    for (std::size_t row = 0; row < slots.size(); ++row)
      rows[static_cast<std::size_t>(slots[row])] = static_cast<std::int32_t>(row);
  }
  void VqSort() {
    for (std::size_t slot = 0; slot < keys.size(); ++slot)
      keys[slot] = static_cast<std::uint64_t>(ids[slot]) << 32 | slot;
    sorter(keys.data(), keys.size(), hwy::SortAscending());
    for (std::size_t row = 0; row < keys.size(); ++row)
      rows[static_cast<std::size_t>(keys[row] & 0xffffffffu)] = static_cast<std::int32_t>(row);
  }
  Status Permute(const Device& device) {
    TokenPermuteArgs args;
    args.tokens = ConstTensor(static_cast<const void*>(ids.data()), DType::kBF16, {kTokens, 0});
    args.topk_ids = ConstTensor(ids.data(), {kTokens, kTopK});
    args.num_experts = experts;
    args.permuted = Tensor(static_cast<void*>(slots.data()), DType::kBF16, {kRoutes, 0});
    args.sorted_indices = Tensor(rows.data(), {kRoutes});
    return TokenPermute(device, args);
  }

  std::int64_t experts;
  std::vector<std::int32_t> ids, rows, right, slots;
  std::vector<std::uint64_t> keys;
  hwy::Sorter sorter;
};

void RegisterRank(const std::shared_ptr<Problem>& x, const std::string& library, const std::string& text,
                  int threads, const std::function<Status()>& run) {
  Register(CaseName("Rank", library, "int32", text, threads), [=](benchmark::State& state) {
    std::fill(x->rows.begin(), x->rows.end(), -1);
    Status status;
    for (auto _ : state) status = run();
    state.counters["routes_per_second"] = benchmark::Counter(
        static_cast<double>(kRoutes) * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
    if (!status.ok()) state.SkipWithError(status.message().c_str());
    if (x->rows != x->right) state.SkipWithError("Incorrect result: not the ranks of a stable sort");
  });
}

void RegisterCases() {
  for (const std::int64_t experts : {64, 256, 1024, 1 << 20}) {
    for (const bool skewed : {false, true}) {
      const auto x = std::make_shared<Problem>(experts, skewed);
      const std::string text = std::string(skewed ? "skewed/" : "uniform/") + std::to_string(kRoutes) + "of" +
                               std::to_string(experts);
      for (const int threads : ThreadCounts()) {
        const auto device = std::make_shared<Device>(Host({.threads = threads}));
        RegisterRank(x, "cubist", text, threads, [=] { return x->Permute(*device); });
      }
      RegisterRank(x, "stable_sort", text, 1, [=] { return x->StableSort(), Status(); });
      RegisterRank(x, "vqsort", text, 1, [=] { return x->VqSort(), Status(); });
    }
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterCases();
  return cubist::bench::Main(argc, argv, "");
}
