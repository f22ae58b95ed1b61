#include "tools/check.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <fstream>
#include <map>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"

namespace cubist {
namespace {

using Shape = std::vector<std::int64_t>;

// A kernel that can be recorded from a shape alone.
struct Recordable {
  const char* dims;      // what the numbers of a shape mean
  const char* standard;  // the shape where none is given
  std::size_t count;
  Status (*record)(const Device& device, const Shape& shape, DType dtype, bool causal);
};

Status RecordMatmul(const Device& device, const Shape& s, DType dtype, bool) {
  MatmulArgs args;
  args.a = ConstTensor(nullptr, dtype, {s[0], s[2]});
  args.b = ConstTensor(nullptr, dtype, {s[2], s[1]});
  args.c = Tensor(nullptr, dtype, {s[0], s[1]});
  return Matmul(device, args);
}

Status RecordFlashAttention(const Device& device, const Shape& s, DType dtype, bool causal) {
  const std::int64_t heads = s[0], length = s[1], d_qk = s[2], d_v = s[3];
  FlashAttentionArgs args;
  args.q = ConstTensor(nullptr, dtype, {1, heads, length, d_qk});
  args.k = ConstTensor(nullptr, dtype, {1, heads, length, d_qk});
  args.v = ConstTensor(nullptr, dtype, {1, heads, length, d_v});
  args.out = Tensor(nullptr, dtype, {1, heads, length, d_v});
  args.lse = Tensor(nullptr, DType::kF32, {1, heads, length});
  args.causal = causal ? Causal::kBottomRight : Causal::kNone;
  return FlashAttention(device, args);
}

// Every token to K neighbouring experts: control flow that depends on data needs data.
std::vector<std::int32_t> Ids(std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < top_k; ++j) {
      ids.push_back(static_cast<std::int32_t>((t * 7 + j) % std::max<std::int64_t>(experts, 1)));
    }
  }
  return ids;
}

Status RecordTokenPermute(const Device& device, const Shape& s, DType dtype, bool) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], experts = s[3];
  const std::vector<std::int32_t> ids = Ids(tokens, top_k, experts);
  TokenPermuteArgs args;
  args.tokens = ConstTensor(nullptr, dtype, {tokens, hidden});
  args.topk_ids = ConstTensor(ids.data(), {tokens, top_k});
  args.num_experts = experts;
  args.permuted = Tensor(nullptr, dtype, {tokens * top_k, hidden});
  args.sorted_indices = Tensor(nullptr, DType::kI32, {tokens * top_k});
  return TokenPermute(device, args);
}

Status RecordTokenUnpermute(const Device& device, const Shape& s, DType dtype, bool) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], slots = tokens * top_k;
  const std::vector<std::int32_t> places = Ids(slots, 1, slots);
  TokenUnpermuteArgs args;
  args.permuted = ConstTensor(nullptr, dtype, {slots, hidden});
  args.sorted_indices = ConstTensor(places.data(), {slots});
  args.probs = ConstTensor(nullptr, DType::kF32, {tokens, top_k});
  args.out = Tensor(nullptr, dtype, {tokens, hidden});
  return TokenUnpermute(device, args);
}

const std::map<std::string, Recordable>& Recordables() {
  static const std::map<std::string, Recordable> kernels = {
      {"matmul", {"MxNxK", "1024x1024x1024", 3, &RecordMatmul}},
      {"flash_attention", {"HEADSxLENGTHxDQKxDV", "8x1024x192x128", 4, &RecordFlashAttention}},
      {"token_permute", {"TOKENSxHIDDENxTOPKxEXPERTS", "512x7168x8x256", 4, &RecordTokenPermute}},
      {"token_unpermute", {"TOKENSxHIDDENxTOPK", "512x7168x8", 3, &RecordTokenUnpermute}},
  };
  return kernels;
}

// "4x5x6" as numbers, each from 0 to 2^24; empty where it is anything else.
Shape ParseShape(const std::string& text) {
  constexpr std::int64_t kLargest = 1 << 24;
  Shape shape;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    std::int64_t size = -1;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < 0 || size > kLargest) return {};
    shape.push_back(size);
    if (next == end) return shape;
    if (*next != 'x') return {};
    at = next + 1;
  }
}

int BadInput(const std::string& what) {
  fmt::print(stderr, "cubist check: {}\n", what);
  return 2;
}

bool Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  return static_cast<bool>(file << text << std::flush);
}

}  // namespace

int CheckCommand(const CheckOptions& options) {
  const auto found = Recordables().find(options.kernel);
  if (found == Recordables().end()) {
    std::string known;
    for (const auto& [name, kernel] : Recordables())
      known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
    return BadInput(fmt::format("no kernel is named '{}'; known are {}", options.kernel, known));
  }
  const Recordable& kernel = found->second;
  const Shape shape = ParseShape(options.shape.empty() ? kernel.standard : options.shape);
  if (shape.size() != kernel.count) {
    return BadInput(fmt::format("shape '{}' of {} needs {}, each from 0 to 2^24, such as {}", options.shape,
                                options.kernel, kernel.dims, kernel.standard));
  }
  const std::map<std::string, DType> dtypes = {
      {"fp32", DType::kF32}, {"bf16", DType::kBF16}, {"fp16", DType::kF16}};
  if (!dtypes.contains(options.dtype)) {
    return BadInput(fmt::format("dtype '{}' is not fp32, bf16 or fp16", options.dtype));
  }
  if (options.policy != "minimal" && options.policy != "per-tile") {
    return BadInput(fmt::format("policy '{}' is not minimal or per-tile", options.policy));
  }
  ChipSpec chip;
  if (const Status status = FindChip(options.chip, &chip); !status.ok()) return BadInput(status.message());

  trace::Record record;
  const Device device = Npu(chip, {.with_data = false, .record = &record});
  if (const Status status = kernel.record(device, shape, dtypes.at(options.dtype), options.causal);
      !status.ok()) {
    return BadInput(status.message());
  }
  const sync::Plan plan =
      sync::PlanFlags(record, options.policy == "minimal" ? sync::Policy::kMinimal : sync::Policy::kPerTile);
  const sync::CheckResult result = sync::Check(record, plan);

  if (options.plan) fmt::print("{}\n", sync::PlanTable(record, plan));
  fmt::print("{}", sync::CheckText(result));
  if (!options.json.empty() &&
      !Write(options.json, fmt::format("{{\"plan\": {},\n \"check\": {}}}\n", sync::PlanJson(record, plan),
                                       sync::CheckJson(result)))) {
    return BadInput(fmt::format("cannot write '{}'", options.json));
  }
  if (!options.dot.empty() && !Write(options.dot, result.deadlock_dot)) {
    return BadInput(fmt::format("cannot write '{}'", options.dot));
  }
  return result.ok() ? 0 : 1;
}

}  // namespace cubist
