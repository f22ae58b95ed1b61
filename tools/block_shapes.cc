#include "tools/block_shapes.h"

#include <fmt/format.h>

#include <algorithm>

namespace cubist {
namespace {

double Product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

}  // namespace

MlaSizes::MlaSizes(const ScaledWorkload& s)
    : workload(s.workload),
      batch(s.batch),
      sequence(s.sequence),
      heads(s.heads),
      hidden(s.workload.hidden),
      q_rank(s.workload.attention.q_rank),
      kv_rank(s.workload.attention.kv_rank),
      nope(s.workload.attention.nope_dim),
      rope(s.workload.attention.rope_dim),
      v(s.workload.attention.v_dim) {}

double MlaSizes::KeyProducts() const {
  return Product(hidden, kv_rank + rope) + Product(kv_rank, heads * (nope + v));
}
double MlaSizes::QueryProducts() const {
  return Product(hidden, q_rank) + Product(q_rank, heads * (nope + rope)) + Product(heads * v, hidden);
}
double MlaSizes::ProductsOfProjections() const {
  return static_cast<double>(rows()) * (KeyProducts() + QueryProducts());
}
double MlaSizes::ProductsOfScores() const { return Product(batch * heads, sequence * (sequence + 1) / 2); }
std::string MlaSizes::shape() const { return fmt::format("{}x{} {} heads", rows(), hidden, heads); }

MoeSizes::MoeSizes(const ScaledWorkload& s)
    : workload(s.workload),
      tokens(s.tokens()),
      hidden(s.workload.hidden),
      experts(s.local_experts()),
      top_k(std::clamp<std::int64_t>(s.workload.moe.top_k / s.workload.training.tensor_parallel, 1, experts)),
      width(s.workload.moe.ffn),
      shared(s.workload.moe.shared_experts * s.workload.moe.ffn) {
  // As many of the model's groups as the device's experts fill, and the model's share of them.
  const Workload::Moe& moe = s.workload.moe;
  groups = std::clamp<std::int64_t>(experts / kGroupTop, 1, moe.groups);
  while (experts % groups != 0) --groups;
  top_groups = CeilDiv(groups * moe.top_groups, moe.groups);
  top_groups = std::max(top_groups, CeilDiv(top_k, experts / groups));
}

std::string MoeSizes::shape() const { return fmt::format("{}x{} {} of {}", tokens, hidden, top_k, experts); }

std::vector<TensorSpec> InputsOf(const MlaSizes& s) {
  std::vector<TensorSpec> inputs = {
      Normal("mla_block.x", {s.rows(), s.hidden}),
      Normal("mla_block.norm", {s.hidden}),
      Weight("mla_block.q_down", {s.hidden, s.q_rank}, s.hidden),
      Normal("mla_block.q_norm", {s.q_rank}),
      Weight("mla_block.q_up", {s.q_rank, s.heads * (s.nope + s.rope)}, s.q_rank),
      Weight("mla_block.kv_down", {s.hidden, s.kv_rank + s.rope}, s.hidden),
      Normal("mla_block.kv_norm", {s.kv_rank}),
      Weight("mla_block.kv_up", {s.kv_rank, s.heads * (s.nope + s.v)}, s.kv_rank),
      Weight("mla_block.out", {s.heads * s.v, s.hidden}, s.heads * s.v),
      {.name = "mla_block.cos", .shape = {s.sequence, s.rope / 2}, .fill = TensorSpec::Fill::kCosines},
      {.name = "mla_block.sin", .shape = {s.sequence, s.rope / 2}, .fill = TensorSpec::Fill::kSines}};
  if (s.workload.sandwich_norm) inputs.push_back(Normal("mla_block.post_norm", {s.hidden}));
  return inputs;
}

MlaBlockArgs ArgsOf(const MlaSizes& s, std::span<const ConstTensor> in, Tensor out) {
  std::size_t at = 0;
  const auto next = [&] { return in[at++]; };
  MlaBlockArgs args;
  args.x = next();
  args.weights = {.norm = next(),
                  .q_down = next(),
                  .q_norm = next(),
                  .q_up = next(),
                  .kv_down = next(),
                  .kv_norm = next(),
                  .kv_up = next(),
                  .out = next()};
  args.rope = {.cos = next(), .sin = next(), .layout = s.workload.attention.rope_layout};
  if (s.workload.sandwich_norm) args.weights.post_norm = next();
  args.heads = s.heads, args.batch = s.batch, args.out = out;
  args.eps = static_cast<float>(s.workload.norm_eps);
  return args;
}

std::vector<TensorSpec> InputsOf(const MoeSizes& s) {
  std::vector<TensorSpec> inputs = {Normal("moe_block.x", {s.tokens, s.hidden}),
                                    Normal("moe_block.norm", {s.hidden}),
                                    Weight("moe_block.router", {s.hidden, s.experts}, s.hidden),
                                    Weight("moe_block.gate_up", {s.experts, s.hidden, 2 * s.width}, s.hidden),
                                    Weight("moe_block.down", {s.experts, s.width, s.hidden}, s.width)};
  if (s.workload.moe.router_bias) {
    // Half of what sigmoid scores of normal logits deviate by: it decides often, and not alone.
    inputs.push_back({.name = "moe_block.router_bias",
                      .shape = {s.experts},
                      .fill = TensorSpec::Fill::kNormal,
                      .deviation = 0.1});
  }
  if (s.shared > 0) {
    inputs.push_back(Weight("moe_block.shared_gate_up", {s.hidden, 2 * s.shared}, s.hidden));
    inputs.push_back(Weight("moe_block.shared_down", {s.shared, s.hidden}, s.shared));
  }
  if (s.workload.sandwich_norm) inputs.push_back(Normal("moe_block.post_norm", {s.hidden}));
  return inputs;
}

MoeBlockArgs ArgsOf(const MoeSizes& s, std::span<const ConstTensor> in, Tensor out) {
  std::size_t at = 0;
  const auto next = [&] { return in[at++]; };
  const Workload::Moe& moe = s.workload.moe;
  MoeBlockArgs args;
  args.x = next();
  MoeBlockWeights& w = args.weights;
  w.norm = next(), w.router = next(), w.gate_up = next(), w.down = next();
  if (moe.router_bias) w.router_bias = next();
  if (s.shared > 0) w.shared_gate_up = next(), w.shared_down = next();
  if (s.workload.sandwich_norm) w.post_norm = next();
  args.route = {.score = moe.score,
                .renormalise = true,
                .scale = static_cast<float>(moe.routed_scale),
                .groups = s.groups,
                .top_groups = s.top_groups,
                .group_top = kGroupTop};
  args.eps = static_cast<float>(s.workload.norm_eps);
  args.top_k = s.top_k, args.out = out;
  return args;
}

}  // namespace cubist
