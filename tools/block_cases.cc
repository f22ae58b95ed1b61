#include "tools/block_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "npu_model/parallel.h"
#include "tools/case_checks.h"

namespace cubist {
namespace {

using Fill = TensorSpec::Fill;

constexpr DType kType = DType::kBF16;
constexpr double kUnit = 0x1p-9;  // Of the type's roundings.
// How many standard deviations a result may be off.
constexpr double kDeviations = 8;

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Numbers in double and the variances of what a block in bf16 makes of them: every rounding of an intermediate result errs
// by up to the unit, in a way that has nothing to do with the others.
struct Noisy {
  explicit Noisy(std::int64_t n) : value(Index(n)), variance(Index(n)) {}
  std::int64_t size() const { return static_cast<std::int64_t>(value.size()); }

  void Round() {
    for (std::size_t i = 0; i < value.size(); ++i) variance[i] += std::pow(kUnit * value[i], 2);
  }
  void Add(const Noisy& x, double factor = 1) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      value[i] += factor * x.value[i], variance[i] += factor * factor * x.variance[i];
    }
  }
  Noisy Part(Range part) const {
    Noisy x(part.size());
    std::copy_n(value.begin() + part.begin, part.size(), x.value.begin());
    std::copy_n(variance.begin() + part.begin, part.size(), x.variance.begin());
    return x;
  }

  std::vector<double> value, variance;
};

Noisy RowOf(const ConstTensor& x, std::int64_t row) {
  Noisy values(x.size(1));
  for (std::int64_t j = 0; j < x.size(1); ++j) values.value[Index(j)] = At(x, row, j);
  return values;
}

// RmsNorm, rounded.
Noisy Normed(const Noisy& x, const ConstTensor& gamma) {
  double squares = 0;
  for (double v : x.value) squares += v * v;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
  Noisy y(x.size());
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const double scale = factor * At(gamma, i);
    y.value[Index(i)] = scale * x.value[Index(i)],
    y.variance[Index(i)] = scale * scale * x.variance[Index(i)];
  }
  y.Round();
  return y;
}

// x * weights (K, N), not yet rounded.
Noisy Times(const Noisy& x, const ConstTensor& weights) {
  Noisy y(weights.size(1));
  for (std::int64_t k = 0; k < x.size(); ++k) {
    for (std::int64_t j = 0; j < y.size(); ++j) {
      const double w = At(weights, k, j);
      y.value[Index(j)] += x.value[Index(k)] * w, y.variance[Index(j)] += x.variance[Index(k)] * w * w;
    }
  }
  return y;
}
Noisy RoundedTimes(const Noisy& x, const ConstTensor& weights) {
  Noisy y = Times(x, weights);
  y.Round();
  return y;
}

// down(silu(gate) * up), of gate and up side by side.
Noisy Expert(const Noisy& x, const ConstTensor& gate_up, const ConstTensor& down) {
  const Noisy both = RoundedTimes(x, gate_up);
  Noisy act(down.size(0));
  for (std::int64_t f = 0; f < act.size(); ++f) {
    const double gate = both.value[Index(f)], up = both.value[Index(f + act.size())];
    const double sigmoid = 1 / (1 + std::exp(-gate)), silu = gate * sigmoid;
    const double slope = sigmoid * (1 + gate * (1 - sigmoid));
    act.value[Index(f)] = silu * up;
    act.variance[Index(f)] = std::pow(slope * up, 2) * both.variance[Index(f)] +
                             silu * silu * both.variance[Index(f + act.size())];
  }
  act.Round();
  return RoundedTimes(act, down);
}

void Compare(const Noisy& expected, const ConstTensor& out, std::int64_t row, Comparison* all) {
  for (std::int64_t j = 0; j < expected.size(); ++j) {
    all->Add(At(out, row, j), expected.value[Index(j)], kDeviations * std::sqrt(expected.variance[Index(j)]),
             out.dtype, row, j);
  }
}

// compare(i) for i < count, a row each.
template <class Body>
Comparison CompareRows(std::int64_t count, std::int64_t all_rows, const Body& compare) {
  Comparison all = CompareParts(count, compare);
  all.rows = count, all.all_rows = all_rows;
  return all;
}

// A weight that keeps the size of what it multiplies.
TensorSpec Weight(const char* name, Shape shape, std::int64_t fan_in) {
  return {.name = name,
          .dtype = kType,
          .shape = std::move(shape),
          .fill = Fill::kNormal,
          .deviation = 1 / std::sqrt(static_cast<double>(fan_in))};
}
TensorSpec Normal(const char* name, Shape shape) {
  return {.name = name, .dtype = kType, .shape = std::move(shape), .fill = Fill::kNormal};
}

// The block's kernels one behind the other.
template <class Block, class Args>
Status RunBlock(Block block, const Device& device, const Args& args, BlockState* state, Profile* profile) {
  BlockProfile parts;
  CUBIST_RETURN_IF_ERROR(block(device, args, state, &parts));
  for (const auto& [name, part] : parts.kernels) {
    if (profile != nullptr) profile->Append(part);
  }
  return {};
}

// ---- MlaBlock ----

struct MlaSizes {
  explicit MlaSizes(const ScaledWorkload& s)
      : batch(s.batch),
        sequence(s.sequence),
        heads(s.heads),
        hidden(s.workload.hidden),
        q_rank(s.workload.attention.q_rank),
        kv_rank(s.workload.attention.kv_rank),
        nope(s.workload.attention.nope_dim),
        rope(s.workload.attention.rope_dim),
        v(s.workload.attention.v_dim) {}

  double KeyProducts() const { return d(hidden * (kv_rank + rope)) + d(kv_rank * heads * (nope + v)); }
  double QueryProducts() const {
    return d(hidden * q_rank) + d(q_rank * heads * (nope + rope)) + d(heads * v * hidden);
  }
  // Of all queries with the keys they see.
  double Flops() const {
    const double scores = d(sequence) * (d(sequence) + 1) / 2 * d(heads * (nope + rope + v));
    return 2 * d(batch) * (d(sequence) * (KeyProducts() + QueryProducts()) + scores);
  }
  static double d(std::int64_t value) { return static_cast<double>(value); }

  std::int64_t batch, sequence, heads, hidden, q_rank, kv_rank, nope, rope, v;
};

enum MlaInput { kX, kNorm, kQDown, kQNorm, kQUp, kKvDown, kKvNorm, kKvUp, kOut };

MlaBlockArgs ArgsOf(const MlaSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out) {
  MlaBlockArgs args;
  args.x = in[kX];
  args.weights = {.norm = in[kNorm],
                  .q_down = in[kQDown],
                  .q_norm = in[kQNorm],
                  .q_up = in[kQUp],
                  .kv_down = in[kKvDown],
                  .kv_norm = in[kKvNorm],
                  .kv_up = in[kKvUp],
                  .out = in[kOut]};
  args.heads = s.heads, args.batch = s.batch, args.out = out[0];
  return args;
}

// What a position shows to the queries behind it: of each head the key, then the value; and the rotary key of all.
struct Shown {
  Noisy kv{0}, rope{0};
};

Shown ShownBy(const MlaSizes& s, std::span<const ConstTensor> in, std::int64_t row) {
  const Noisy h = Normed(RowOf(in[kX], row), in[kNorm]);
  const Noisy down = RoundedTimes(h, in[kKvDown]);
  return {RoundedTimes(Normed(down.Part({0, s.kv_rank}), in[kKvNorm]), in[kKvUp]),
          down.Part({s.kv_rank, s.kv_rank + s.rope})};
}

// a . b of parts that begin at i and j.
std::pair<double, double> Dot(const Noisy& a, std::int64_t i, const Noisy& b, std::int64_t j,
                              std::int64_t n) {
  double sum = 0, variance = 0;
  for (std::int64_t d = 0; d < n; ++d) {
    const std::size_t p = Index(i + d), q = Index(j + d);
    sum += a.value[p] * b.value[q];
    variance += std::pow(a.value[p], 2) * b.variance[q] + std::pow(b.value[q], 2) * a.variance[p];
  }
  return {sum, variance};
}

// Attention of one head's query over what is shown, added to `out` from its column on.
void Attend(const MlaSizes& s, std::int64_t head, const Noisy& q, std::span<const Shown> shown, Noisy* out) {
  const double scale = 1 / std::sqrt(MlaSizes::d(s.nope + s.rope));
  const std::int64_t q_at = head * (s.nope + s.rope), kv_at = head * (s.nope + s.v);
  std::vector<double> weights, variances;
  double most = -1e300, total = 0;
  for (const Shown& x : shown) {
    const auto [nope, nope_variance] = Dot(q, q_at, x.kv, kv_at, s.nope);
    const auto [rope, rope_variance] = Dot(q, q_at + s.nope, x.rope, 0, s.rope);
    weights.push_back(scale * (nope + rope));
    variances.push_back(scale * scale * (nope_variance + rope_variance));
    most = std::max(most, weights.back());
  }
  for (double& w : weights) w = std::exp(w - most), total += w;
  for (std::int64_t d = 0; d < s.v; ++d) {
    const auto value = [&](std::size_t j) { return shown[j].kv.value[Index(kv_at + s.nope + d)]; };
    double sum = 0, variance = 0;
    for (std::size_t j = 0; j < shown.size(); ++j) sum += weights[j] / total * value(j);
    for (std::size_t j = 0; j < shown.size(); ++j) {
      const double p = weights[j] / total;
      variance += p * p *
                  (shown[j].kv.variance[Index(kv_at + s.nope + d)] +
                   std::pow(value(j) - sum, 2) * variances[j] + std::pow(kUnit * value(j), 2));
    }
    out->value[Index(head * s.v + d)] = sum, out->variance[Index(head * s.v + d)] = variance;
  }
}

// The first rows, as far as the products pay: a row needs the keys of all before it.
Comparison CheckMla(const MlaSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out,
                    double products) {
  const std::int64_t all = s.batch * s.sequence;
  const auto rows = static_cast<std::int64_t>(
      std::clamp(products / (2 * (s.KeyProducts() + s.QueryProducts())), 1.0, MlaSizes::d(all)));
  std::vector<Shown> shown(Index(rows));
  ForEach(Index(rows), [&](std::size_t row) { shown[row] = ShownBy(s, in, static_cast<std::int64_t>(row)); });
  return CompareRows(rows, all, [&](std::int64_t row) {
    const std::int64_t first = row / s.sequence * s.sequence;
    const Noisy x = RowOf(in[kX], row), h = Normed(x, in[kNorm]);
    const Noisy q = RoundedTimes(Normed(RoundedTimes(h, in[kQDown]), in[kQNorm]), in[kQUp]);
    Noisy heads(s.heads * s.v);
    for (std::int64_t head = 0; head < s.heads; ++head)
      Attend(s, head, q, std::span(shown).subspan(Index(first), Index(row + 1 - first)), &heads);
    heads.Round();
    Noisy result = RoundedTimes(heads, in[kOut]);
    result.Add(x);
    result.Round();
    Comparison part;
    Compare(result, out[0], row, &part);
    return part;
  });
}

// ---- MoeBlock ----

struct MoeSizes {
  explicit MoeSizes(const ScaledWorkload& s)
      : tokens(s.tokens()),
        hidden(s.workload.hidden),
        experts(s.local_experts()),
        top_k(
            std::clamp<std::int64_t>(s.workload.moe.top_k / s.workload.training.tensor_parallel, 1, experts)),
        width(s.workload.moe.ffn),
        shared(s.workload.moe.shared_experts * s.workload.moe.ffn),
        scale(static_cast<float>(s.workload.moe.routed_scale)) {}

  double ProductsOfToken() const {
    return static_cast<double>(hidden * experts) +
           3.0 * static_cast<double>(hidden * (top_k * width + shared));
  }

  std::int64_t tokens, hidden, experts, top_k, width, shared;
  float scale;
};

enum MoeInput { kMoeX, kMoeNorm, kRouter, kGateUp, kDown, kSharedGateUp, kSharedDown };

MoeBlockArgs ArgsOf(const MoeSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out) {
  MoeBlockArgs args;
  args.x = in[kMoeX];
  args.weights = {.norm = in[kMoeNorm], .router = in[kRouter], .gate_up = in[kGateUp], .down = in[kDown]};
  if (s.shared > 0)
    args.weights.shared_gate_up = in[kSharedGateUp], args.weights.shared_down = in[kSharedDown];
  args.route = {.score = ScoreFunction::kSigmoid, .renormalise = true, .scale = s.scale};
  args.top_k = s.top_k, args.out = out[0];
  return args;
}

ConstTensor MatrixOf(ConstTensor stack, std::int64_t i) {
  stack.data = static_cast<const char*>(stack.data) + i * stack.stride(0) * SizeOf(stack.dtype);
  stack.rank = 2;
  stack.sizes = {stack.size(1), stack.size(2)}, stack.strides = {stack.stride(1), stack.stride(2)};
  return stack;
}

// The scores of a token's experts; where it went elsewhere than to the highest, `part` has a number that is off.
Noisy ScoresOf(const MoeSizes& s, const Noisy& logits, const std::int32_t* ids, std::int64_t row,
               Comparison* part) {
  Noisy scores(s.top_k);
  double least = 1e300, most = -1e300, variance = 0;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    const std::int32_t* const end = ids + s.top_k;
    const std::int32_t* const at = std::find(ids, end, static_cast<std::int32_t>(e));
    const double logit = logits.value[Index(e)], n = 1 / (1 + std::exp(-logit));
    variance = std::max(variance, logits.variance[Index(e)]);
    if (at == end) {
      most = std::max(most, logit);
    } else {
      least = std::min(least, logit);
      scores.value[Index(at - ids)] = n;
      scores.variance[Index(at - ids)] = std::pow(n * (1 - n), 2) * logits.variance[Index(e)];
    }
  }
  const double bound = 2 * kDeviations * std::sqrt(variance);
  if (least < most - bound) part->Add(least, most, bound, DType::kF32, row, s.hidden);
  return scores;
}

Comparison CheckMoe(const MoeSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out,
                    double products, std::uint64_t key, BlockState* state) {
  const auto* ids =
      static_cast<const std::int32_t*>(state->Take("ids", DType::kI32, {s.tokens, s.top_k}).data);
  const auto wanted = static_cast<std::int64_t>(
      std::clamp(products / (2 * s.ProductsOfToken()), 1.0, static_cast<double>(s.tokens)));
  const std::vector<std::int64_t> rows = SampleRows(s.tokens, wanted, key);
  return CompareRows(static_cast<std::int64_t>(rows.size()), s.tokens, [&](std::int64_t i) {
    const std::int64_t row = rows[Index(i)];
    const std::int32_t* const chosen = ids + row * s.top_k;
    Comparison part;
    const Noisy x = RowOf(in[kMoeX], row), h = Normed(x, in[kMoeNorm]);
    const Noisy n = ScoresOf(s, Times(h, in[kRouter]), chosen, row, &part);
    double total = 0, total_variance = 0;
    for (std::size_t j = 0; j < n.value.size(); ++j) total += n.value[j], total_variance += n.variance[j];
    Noisy routed(s.hidden);
    for (std::int64_t j = 0; j < s.top_k; ++j) {
      const Noisy y = Expert(h, MatrixOf(in[kGateUp], chosen[j]), MatrixOf(in[kDown], chosen[j]));
      const double score = n.value[Index(j)], weight = static_cast<double>(s.scale) * score / total;
      const double relative = n.variance[Index(j)] / (score * score) + total_variance / (total * total);
      routed.Add(y, weight);
      for (std::size_t c = 0; c < y.value.size(); ++c)
        routed.variance[c] += std::pow(weight * y.value[c], 2) * relative;
    }
    routed.Round();
    Noisy result = routed;
    if (s.shared > 0) result.Add(Expert(h, in[kSharedGateUp], in[kSharedDown]));
    result.Add(x);
    result.Round();
    Compare(result, out[0], row, &part);
    return part;
  });
}

}  // namespace

Case MlaBlockCase(const ScaledWorkload& scaled) {
  const MlaSizes s(scaled);
  const std::int64_t rows = s.batch * s.sequence;
  Case c{.name = "mla_block",
         .kernel = "MlaBlock",
         .shape = fmt::format("{}x{} {} heads", rows, s.hidden, s.heads),
         .dtype = kType};
  c.inputs = {Normal("mla_block.x", {rows, s.hidden}),
              Normal("mla_block.norm", {s.hidden}),
              Weight("mla_block.q_down", {s.hidden, s.q_rank}, s.hidden),
              Normal("mla_block.q_norm", {s.q_rank}),
              Weight("mla_block.q_up", {s.q_rank, s.heads * (s.nope + s.rope)}, s.q_rank),
              Weight("mla_block.kv_down", {s.hidden, s.kv_rank + s.rope}, s.hidden),
              Normal("mla_block.kv_norm", {s.kv_rank}),
              Weight("mla_block.kv_up", {s.kv_rank, s.heads * (s.nope + s.v)}, s.kv_rank),
              Weight("mla_block.out", {s.heads * s.v, s.hidden}, s.heads * s.v)};
  c.outputs = {{.name = "out", .dtype = kType, .shape = {rows, s.hidden}}};
  c.flops = s.Flops();
  const auto state = std::make_shared<BlockState>();
  c.run = [s, state](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                     Profile* profile) {
    return RunBlock(&MlaBlock, device, ArgsOf(s, in, out), state.get(), profile);
  };
  c.check = [s](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                std::uint64_t) { return CheckMla(s, in, out, products); };
  return WithTraffic(std::move(c));
}

Case MoeBlockCase(const ScaledWorkload& scaled) {
  const MoeSizes s(scaled);
  Case c{.name = "moe_block",
         .kernel = "MoeBlock",
         .shape = fmt::format("{}x{} {} of {}", s.tokens, s.hidden, s.top_k, s.experts),
         .dtype = kType};
  c.inputs = {Normal("moe_block.x", {s.tokens, s.hidden}), Normal("moe_block.norm", {s.hidden}),
              Weight("moe_block.router", {s.hidden, s.experts}, s.hidden),
              Weight("moe_block.gate_up", {s.experts, s.hidden, 2 * s.width}, s.hidden),
              Weight("moe_block.down", {s.experts, s.width, s.hidden}, s.width)};
  if (s.shared > 0) {
    c.inputs.push_back(Weight("moe_block.shared_gate_up", {s.hidden, 2 * s.shared}, s.hidden));
    c.inputs.push_back(Weight("moe_block.shared_down", {s.shared, s.hidden}, s.shared));
  }
  c.outputs = {{.name = "out", .dtype = kType, .shape = {s.tokens, s.hidden}}};
  c.flops = 2 * static_cast<double>(s.tokens) * s.ProductsOfToken();
  const auto state = std::make_shared<BlockState>();
  c.run = [s, state](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                     Profile* profile) {
    return RunBlock(&MoeBlock, device, ArgsOf(s, in, out), state.get(), profile);
  };
  c.check = [s, state](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                       std::uint64_t key) { return CheckMoe(s, in, out, products, key, state.get()); };
  return WithTraffic(std::move(c));
}

}  // namespace cubist
