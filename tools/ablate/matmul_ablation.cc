// Matmul from whole, double-buffered L1 tiles in row-major order under a compiler's flags to AscendP-MM.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "tools/ablate/ablation.h"
#include "tools/kernel_call.h"

namespace cubist {
namespace {

using Sizes = std::array<std::int64_t, 3>;  // m, k, n

Call MatmulCall(const Sizes& mkn, bool any_order) {
  KernelCallOptions options;
  options.kernel = "matmul";
  options.shape = fmt::format("{}x{}x{}", mkn[0], mkn[2], mkn[1]);
  options.any_order = any_order;
  return [options](const Device& device, Profile* profile) {
    KernelCall call;
    CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
    return call(device, profile);
  };
}

// Whether a field has a value, or the kernel no such field.
bool Is(const TilingFields& fields, const char* name, const char* value) {
  const auto field = fields.find(name);
  return field == fields.end() || field->second == value;
}

using Counts = std::vector<std::int32_t>;

// Experts' rows, each group of K x N weights of its own.
Call GroupedCall(std::shared_ptr<const Counts> counts, std::int64_t k, std::int64_t n) {
  return [=](const Device& device, Profile* profile) {
    const auto groups = static_cast<std::int64_t>(counts->size());
    const std::int64_t rows = std::accumulate(counts->begin(), counts->end(), std::int64_t{0});
    GroupedMatmulArgs args;
    args.x = ConstTensor(nullptr, DType::kBF16, {rows, k});
    args.groups = ConstTensor(counts->data(), {groups});
    args.weights = ConstTensor(nullptr, DType::kBF16, {groups, k, n});
    args.out = Tensor(nullptr, DType::kBF16, {rows, n});
    return GroupedMatmul(device, args, profile);
  };
}

// As many rows in all as `groups` of `rows` each; where skewed, in every four groups each has half of the one before.
std::shared_ptr<const Counts> MakeCounts(std::int64_t groups, std::int64_t rows, bool skewed) {
  auto counts = std::make_shared<Counts>();
  for (std::int64_t g = 0; g < groups; ++g)
    counts->push_back(static_cast<std::int32_t>(skewed ? rows * 4 * (8 >> g % 4) / 15 : rows));
  counts->back() += static_cast<std::int32_t>(
      groups * rows - std::accumulate(counts->begin(), counts->end(), std::int64_t{0}));
  return counts;
}

// Tiles of A and B are as long as each other along k, and come into L1 whole.
bool Whole(const TilingFields& f) { return Is(f, "pieces", "1") && Is(f, "a_span", "1"); }
// L0C may be, too, as two tiles or as the halves of one.
bool DoubleBuffered(const TilingFields& f) { return Is(f, "l1_stages", "2") && Is(f, "l0_stages", "2"); }

// `any_order`: the same call where sums may begin anywhere along k. Every step may take the tilings of those before.
std::vector<AblationStep> Steps(const Call& call, const Call& any_order) {
  const auto conventional = [](const TilingFields& f) {
    return DoubleBuffered(f) && Is(f, "order", "row-major") && Is(f, "keep_a", "0") && Whole(f) &&
           Is(f, "stagger", "0") && Is(f, "prefetch", "0");
  };
  // An order in which a core's blocks lie side by side lets it keep some of their rows of A.
  const auto ordered = [](const TilingFields& f) {
    return DoubleBuffered(f) && Whole(f) && Is(f, "stagger", "0") && Is(f, "prefetch", "0");
  };
  const auto pipelined = [](const TilingFields& f) {
    return Is(f, "stagger", "0") && Is(f, "prefetch", "0");
  };
  return {{"conventional", call, sync::Policy::kPerTile, conventional},
          {"minimal flags", call, sync::Policy::kMinimal, conventional},
          {"block order", call, sync::Policy::kMinimal, ordered},
          {"two-level pipelining", call, sync::Policy::kMinimal, pipelined},
          {"K-staggering, prefetch", any_order, sync::Policy::kMinimal, {}}};
}

}  // namespace

AblationCase MatmulCase(const std::string& group, std::int64_t m, std::int64_t n, std::int64_t k) {
  const Sizes mkn = {m, k, n};
  return {fmt::format("{}x{}x{}", m, k, n), group,
          Steps(MatmulCall(mkn, /*any_order=*/false), MatmulCall(mkn, /*any_order=*/true))};
}

std::vector<AblationCase> MatmulAblation(const Workload& w) {
  constexpr std::int64_t kL2Bytes = 192 << 20;
  const std::int64_t tokens = w.training.sequence * w.training.micro_batch;
  const std::int64_t heads = w.attention.heads / w.training.tensor_parallel;
  const std::int64_t shard = w.moe.dense_ffn / w.training.tensor_parallel;
  const std::vector<Sizes> dense = {
      {tokens, w.hidden, w.attention.q_rank},
      {tokens, w.attention.q_rank, heads * w.attention.qk_dim()},
      {tokens, w.hidden, w.attention.kv_rank + w.attention.rope_dim},
      {tokens, w.attention.kv_rank, heads * (w.attention.nope_dim + w.attention.v_dim)},
      {tokens, heads * w.attention.v_dim, w.hidden},
      {tokens, w.hidden, 2 * w.moe.ffn},
      {tokens, w.moe.ffn, w.hidden},
      {tokens / 8, w.hidden, 2 * w.moe.ffn},
      {tokens, w.hidden, 2 * shard},
      {tokens, shard, w.hidden},
      {tokens, w.hidden, w.moe.dense_ffn},
  };
  std::vector<AblationCase> cases;
  std::set<Sizes> seen;
  const auto add = [&](const std::string& group, const Sizes& mkn) {
    if (!seen.insert(mkn).second) return;
    cases.push_back(MatmulCase(group, mkn[0], mkn[2], mkn[1]));
  };
  for (const Sizes& mkn : dense) add(2 * mkn[1] * mkn[2] > kL2Bytes ? "beyond L2" : "workload", mkn);
  // Rows of eight experts, of which a device may have that many: a grouped product's blocks begin at the start of k.
  constexpr std::int64_t kExperts = 8;
  for (const std::int64_t rows : {1024, 128}) {
    for (const bool skewed : {false, true}) {
      const Call call = GroupedCall(MakeCounts(kExperts, rows, skewed), w.hidden, 2 * w.moe.ffn);
      cases.push_back({fmt::format("{} experts x {} rows {} {}x{}", kExperts, rows,
                                   skewed ? "skewed" : "even", w.hidden, 2 * w.moe.ffn),
                       "workload", Steps(call, call)});
    }
  }
  for (std::int64_t size : {1024, 2048, 4096, 8192}) add("squares", {size, size, size});
  return cases;
}

}  // namespace cubist
