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
#include "tools/comparison.h"

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

// RmsNorm, rounded. With m = sum of x^2 + N eps the derivative of y(i) by x(j) is gamma(i) rstd (1 if i = j - x(i) x(j) / m).
Noisy Normed(const Noisy& x, const ConstTensor& gamma, double eps) {
  const auto n = static_cast<double>(x.size());
  double m = n * eps, weighted = 0;
  for (std::size_t i = 0; i < x.value.size(); ++i)
    m += x.value[i] * x.value[i], weighted += x.value[i] * x.value[i] * x.variance[i];
  const double rstd = std::sqrt(n / m);
  Noisy y(x.size());
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const double scale = rstd * At(gamma, i), v = x.value[Index(i)], share = v * v / m;
    y.value[Index(i)] = scale * v;
    y.variance[Index(i)] =
        scale * scale * std::max(x.variance[Index(i)] * (1 - 2 * share) + share * weighted / m, 0.0);
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

  Workload workload;
  std::int64_t batch, sequence, heads, hidden, q_rank, kv_rank, nope, rope, v;
};

// The inputs in the order of MlaBlockCase.
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

// The rotary columns of a row, turned to its position in the sequence and rounded.
Noisy Turned(const MlaSizes& s, const AttentionRope& rope, const Noisy& x, std::int64_t position) {
  Noisy y(x.size());
  for (std::int64_t i = 0; i < s.rope / 2; ++i) {
    const bool halves = rope.layout == RopeLayout::kHalf;
    const std::size_t a = Index(halves ? i : 2 * i), b = Index(halves ? i + s.rope / 2 : 2 * i + 1);
    const double cos = At(rope.cos, position, i), sin = At(rope.sin, position, i);
    y.value[a] = x.value[a] * cos - x.value[b] * sin, y.value[b] = x.value[b] * cos + x.value[a] * sin;
    y.variance[a] = cos * cos * x.variance[a] + sin * sin * x.variance[b];
    y.variance[b] = cos * cos * x.variance[b] + sin * sin * x.variance[a];
  }
  y.Round();
  return y;
}

// What a position shows to the queries behind it: of each head the key, then the value; and the rotary key of all, turned.
struct Shown {
  Noisy kv{0}, rope{0};
};

Shown ShownBy(const MlaSizes& s, const MlaBlockArgs& args, std::int64_t row) {
  const MlaBlockWeights& w = args.weights;
  const double eps = s.workload.norm_eps;
  const Noisy down = RoundedTimes(Normed(RowOf(args.x, row), w.norm, eps), w.kv_down);
  return {RoundedTimes(Normed(down.Part({0, s.kv_rank}), w.kv_norm, eps), w.kv_up),
          Turned(s, args.rope, down.Part({s.kv_rank, s.kv_rank + s.rope}), row % s.sequence)};
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

// Attention of one head's query, its rotary part turned, over what is shown: that head's columns of `out`.
void Attend(const MlaSizes& s, std::int64_t head, const Noisy& q, const Noisy& q_rope,
            std::span<const Shown> shown, Noisy* out) {
  const double scale = 1 / std::sqrt(MlaSizes::d(s.nope + s.rope));
  const std::int64_t q_at = head * (s.nope + s.rope), kv_at = head * (s.nope + s.v);
  std::vector<double> weights, variances;
  double most = -1e300, total = 0;
  for (const Shown& x : shown) {
    const auto [nope, nope_variance] = Dot(q, q_at, x.kv, kv_at, s.nope);
    const auto [rope, rope_variance] = Dot(q_rope, 0, x.rope, 0, s.rope);
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

// Whatever the products pay for: the first row of a sequence has one key, and nothing turns it.
constexpr std::int64_t kLeastMlaRows = 4;

// The first rows, as far as the products pay: a row needs the keys of all before it.
Comparison CheckMla(const MlaSizes& s, const MlaBlockArgs& args, double products) {
  const MlaBlockWeights& w = args.weights;
  const double eps = s.workload.norm_eps;
  const std::int64_t all = s.batch * s.sequence;
  const double affordable = products / (2 * (s.KeyProducts() + s.QueryProducts()));
  const auto rows = std::min(
      all, std::max(kLeastMlaRows, static_cast<std::int64_t>(std::min(affordable, MlaSizes::d(all)))));
  std::vector<Shown> shown(Index(rows));
  ForEach(Index(rows),
          [&](std::size_t row) { shown[row] = ShownBy(s, args, static_cast<std::int64_t>(row)); });
  return CompareRows(rows, all, [&](std::int64_t row) {
    const std::int64_t position = row % s.sequence, first = row - position;
    const Noisy x = RowOf(args.x, row), h = Normed(x, w.norm, eps);
    const Noisy q = RoundedTimes(Normed(RoundedTimes(h, w.q_down), w.q_norm, eps), w.q_up);
    Noisy heads(s.heads * s.v);
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const std::int64_t end = (head + 1) * (s.nope + s.rope);
      Attend(s, head, q, Turned(s, args.rope, q.Part({end - s.rope, end}), position),
             std::span(shown).subspan(Index(first), Index(position + 1)), &heads);
    }
    heads.Round();
    Noisy result = RoundedTimes(heads, w.out);
    if (w.post_norm.given()) result = Normed(result, w.post_norm, eps);
    result.Add(x);
    result.Round();
    Comparison part;
    Compare(result, args.out, row, &part);
    return part;
  });
}

// ---- MoeBlock ----

// What the sum of a group's scores that ranks it is made of.
constexpr std::int64_t kGroupTop = 2;

struct MoeSizes {
  explicit MoeSizes(const ScaledWorkload& s)
      : workload(s.workload),
        tokens(s.tokens()),
        hidden(s.workload.hidden),
        experts(s.local_experts()),
        top_k(
            std::clamp<std::int64_t>(s.workload.moe.top_k / s.workload.training.tensor_parallel, 1, experts)),
        width(s.workload.moe.ffn),
        shared(s.workload.moe.shared_experts * s.workload.moe.ffn) {
    // As many of the model's groups as the device's experts fill, and the model's share of them.
    const Workload::Moe& moe = s.workload.moe;
    groups = std::clamp<std::int64_t>(experts / kGroupTop, 1, moe.groups);
    while (experts % groups != 0) --groups;
    top_groups = CeilDiv(groups * moe.top_groups, moe.groups);
    top_groups = std::max(top_groups, CeilDiv(top_k, experts / groups));
  }

  double ProductsOfRouter() const { return static_cast<double>(hidden * experts); }
  double ProductsOfToken() const {
    return ProductsOfRouter() + 3.0 * static_cast<double>(hidden * (top_k * width + shared));
  }

  Workload workload;
  std::int64_t tokens, hidden, experts, top_k, width, shared, groups = 1, top_groups = 1;
};

// The inputs in the order of MoeBlockCase.
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

ConstTensor MatrixOf(ConstTensor stack, std::int64_t i) {
  stack.data = static_cast<const char*>(stack.data) + i * stack.stride(0) * SizeOf(stack.dtype);
  stack.rank = 2;
  stack.sizes = {stack.size(1), stack.size(2)}, stack.strides = {stack.stride(1), stack.stride(2)};
  return stack;
}

// Scores of a token's experts, and how renormalised weights answer to their logits: what all scores of a softmax have in
// common is no part of those.
struct Scores {
  Noisy value{0};
  std::vector<double> slope;
};

Scores ScoresOf(ScoreFunction function, const Noisy& logits) {
  Scores scores{Noisy(logits.size()), std::vector<double>(logits.value.size())};
  std::vector<double>&n = scores.value.value, &variance = scores.value.variance, &slope = scores.slope;
  const std::vector<double>& x = logits.value;
  const bool softmax = function == ScoreFunction::kSoftmax;
  const double most = softmax ? *std::max_element(x.begin(), x.end()) : 0;
  double sum = 0, weighted = 0;
  for (std::size_t e = 0; e < x.size(); ++e) {
    const double sigmoid = 1 / (1 + std::exp(-x[e]));
    if (function == ScoreFunction::kSigmoid) {
      n[e] = sigmoid, slope[e] = sigmoid * (1 - sigmoid);
    } else if (function == ScoreFunction::kSqrtSoftplus) {
      n[e] = std::sqrt(std::log1p(std::exp(x[e]))), slope[e] = sigmoid / (2 * n[e]);
    } else {
      sum += n[e] = std::exp(x[e] - most);
    }
    variance[e] = slope[e] * slope[e] * logits.variance[e];
  }
  if (!softmax) return scores;
  // The derivative of n(e) by x(f) is n(e) (1 if e = f - n(f)).
  for (std::size_t e = 0; e < x.size(); ++e)
    n[e] /= sum, slope[e] = n[e], weighted += n[e] * n[e] * logits.variance[e];
  for (std::size_t e = 0; e < x.size(); ++e)
    variance[e] = n[e] * n[e] * ((1 - 2 * n[e]) * logits.variance[e] + weighted);
  return scores;
}

// What ranks experts or groups, with how far it may be off.
struct Rank {
  double value = 0, variance = 0;
};
// By how much two may change places.
double Margin(const Rank& a, const Rank& b) { return kDeviations * std::sqrt(a.variance + b.variance); }
bool IsBehind(const Rank& a, const Rank& b) { return a.value < b.value - Margin(a, b); }

// Whether `ids` name experts, each once. Where a token went elsewhere than to the best experts of the best groups, by more
// than rounding excuses, `part` has numbers that are off, of an element behind the row. A group that may or may not be
// among the best is asked for nothing but that.
bool CheckRoutes(const MoeSizes& s, const Noisy& choice, std::span<const std::int32_t> ids, std::int64_t row,
                 Comparison* part) {
  std::vector<bool> chosen(Index(s.experts));
  for (const std::int32_t id : ids) {
    if (id >= 0 && id < s.experts && !chosen[Index(id)]) {
      chosen[Index(id)] = true;
      continue;
    }
    part->Add(id, std::nan(""), 0, DType::kI32, row, s.hidden);
    return false;
  }
  const auto rank = [&](std::int64_t e) { return Rank{choice.value[Index(e)], choice.variance[Index(e)]}; };
  const auto demand = [&](const Rank& taken, const Rank& left) {
    if (IsBehind(taken, left))
      part->Add(taken.value, left.value, Margin(taken, left), DType::kF32, row, s.hidden);
  };

  const std::int64_t width = s.experts / s.groups;
  std::vector<Rank> worth;
  for (std::int64_t g = 0; g < s.groups && s.groups > 1; ++g) {
    std::vector<Rank> ranks;
    for (std::int64_t e = g * width; e < (g + 1) * width; ++e) ranks.push_back(rank(e));
    std::sort(ranks.begin(), ranks.end(), [](const Rank& a, const Rank& b) { return a.value > b.value; });
    Rank sum;
    for (std::size_t j = 0; j < Index(kGroupTop); ++j)
      sum.value += ranks[j].value, sum.variance += ranks[j].variance;
    worth.push_back(sum);
  }
  for (std::int64_t g = 0; g < s.groups; ++g) {
    const auto of_group = [&](const std::vector<bool>& flags) { return flags.begin() + g * width; };
    const bool taken =
        std::find(of_group(chosen), of_group(chosen) + width, true) != of_group(chosen) + width;
    bool open = taken || s.groups == 1;
    if (s.groups > 1) {
      const Rank& own = worth[Index(g)];
      std::vector<Rank> ahead;
      std::int64_t perhaps_ahead = -1;  // The group itself is not behind itself.
      for (const Rank& other : worth) {
        if (IsBehind(own, other)) ahead.push_back(other);
        perhaps_ahead += IsBehind(other, own) ? 0 : 1;
      }
      open = taken || perhaps_ahead < s.top_groups;
      if (taken && std::ssize(ahead) >= s.top_groups) {
        demand(own, *std::min_element(ahead.begin(), ahead.end(),
                                      [](const Rank& a, const Rank& b) { return a.value < b.value; }));
      }
    }
    // Experts of a group that takes part for certain.
    for (std::int64_t e = g * width; open && e < (g + 1) * width; ++e) {
      for (std::size_t j = 0; j < ids.size() && !chosen[Index(e)]; ++j) demand(rank(ids[j]), rank(e));
    }
  }
  return true;
}

// A row up to its routes.
struct Routed {
  Routed(const MoeSizes& s, const MoeBlockArgs& args, std::span<const std::int32_t> ids, std::int64_t row,
         Comparison* part)
      : x(RowOf(args.x, row)),
        h(Normed(x, args.weights.norm, s.workload.norm_eps)),
        logits(Times(h, args.weights.router)),
        scores(ScoresOf(args.route.score, logits)) {
    Noisy choice = scores.value;
    for (std::int64_t e = 0; e < s.experts && args.weights.router_bias.given(); ++e)
      choice.value[Index(e)] += At(args.weights.router_bias, e);
    ok = CheckRoutes(s, choice, ids, row, part);
  }

  Noisy x, h, logits;
  Scores scores;
  bool ok = true;
};

// scale * sum of n(j) y(j) / sum of n(j) over a row's experts j, rounded. Its derivative by a logit of j is
// scale * slope(j) (y(j) - mean) / sum of n(j), mean the same without the scale.
Noisy WeighedExperts(const MoeBlockArgs& args, const Routed& routed, std::span<const std::int32_t> ids) {
  const double scale = static_cast<double>(args.route.scale);
  std::vector<Noisy> y;
  double sum = 0;
  for (const std::int32_t e : ids) {
    y.push_back(Expert(routed.h, MatrixOf(args.weights.gate_up, e), MatrixOf(args.weights.down, e)));
    sum += routed.scores.value.value[Index(e)];
  }
  Noisy result(routed.x.size());
  for (std::size_t j = 0; j < ids.size(); ++j)
    result.Add(y[j], scale * routed.scores.value.value[Index(ids[j])] / sum);
  for (std::size_t c = 0; c < result.value.size(); ++c) {
    const double mean = result.value[c] / scale;
    for (std::size_t j = 0; j < ids.size(); ++j) {
      const double slope = routed.scores.slope[Index(ids[j])];
      result.variance[c] +=
          std::pow(scale * slope * (y[j].value[c] - mean) / sum, 2) * routed.logits.variance[Index(ids[j])];
    }
  }
  result.Round();
  return result;
}

// Some rows, and the routes of as many more as that pays for.
Comparison CheckMoe(const MoeSizes& s, const MoeBlockArgs& args, double products, std::uint64_t key,
                    BlockState* state) {
  const auto* ids =
      static_cast<const std::int32_t*>(state->Take("ids", DType::kI32, {s.tokens, s.top_k}).data);
  const auto ids_of = [&](std::int64_t row) { return std::span(ids + row * s.top_k, Index(s.top_k)); };
  const auto sample = [&](double of_row) {
    return SampleRows(
        s.tokens,
        static_cast<std::int64_t>(std::clamp(products / of_row, 1.0, static_cast<double>(s.tokens))), key);
  };
  const std::vector<std::int64_t> rows = sample(2 * s.ProductsOfToken()),
                                  routes = sample(s.ProductsOfRouter());
  Comparison all = CompareRows(std::ssize(rows), s.tokens, [&](std::int64_t i) {
    const std::int64_t row = rows[Index(i)];
    const MoeBlockWeights& w = args.weights;
    Comparison part;
    const Routed routed(s, args, ids_of(row), row, &part);
    if (!routed.ok) return part;
    Noisy result = WeighedExperts(args, routed, ids_of(row));
    if (w.shared_down.given()) result.Add(Expert(routed.h, w.shared_gate_up, w.shared_down));
    if (w.post_norm.given()) {
      if (w.shared_down.given()) result.Round();
      result = Normed(result, w.post_norm, s.workload.norm_eps);
    }
    result.Add(routed.x);
    result.Round();
    Compare(result, args.out, row, &part);
    return part;
  });
  all.Merge(CompareParts(std::ssize(routes), [&](std::int64_t i) {
    const std::int64_t row = routes[Index(i)];
    Comparison part;
    if (!std::binary_search(rows.begin(), rows.end(), row)) Routed(s, args, ids_of(row), row, &part);
    return part;
  }));
  return all;
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
              Weight("mla_block.out", {s.heads * s.v, s.hidden}, s.heads * s.v),
              {.name = "mla_block.cos", .shape = {s.sequence, s.rope / 2}, .fill = Fill::kCosines},
              {.name = "mla_block.sin", .shape = {s.sequence, s.rope / 2}, .fill = Fill::kSines}};
  if (scaled.workload.sandwich_norm) c.inputs.push_back(Normal("mla_block.post_norm", {s.hidden}));
  c.outputs = {{.name = "out", .dtype = kType, .shape = {rows, s.hidden}}};
  c.flops = s.Flops();
  const auto state = std::make_shared<BlockState>();
  c.run = [s, state](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                     Profile* profile) {
    return RunBlock(&MlaBlock, device, ArgsOf(s, in, out[0]), state.get(), profile);
  };
  c.check = [s](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                std::uint64_t) { return CheckMla(s, ArgsOf(s, in, out[0]), products); };
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
  if (scaled.workload.moe.router_bias) {
    // Half of what sigmoid scores of normal logits deviate by: it decides often, and not alone.
    c.inputs.push_back(
        {.name = "moe_block.router_bias", .shape = {s.experts}, .fill = Fill::kNormal, .deviation = 0.1});
  }
  if (s.shared > 0) {
    c.inputs.push_back(Weight("moe_block.shared_gate_up", {s.hidden, 2 * s.shared}, s.hidden));
    c.inputs.push_back(Weight("moe_block.shared_down", {s.shared, s.hidden}, s.shared));
  }
  if (scaled.workload.sandwich_norm) c.inputs.push_back(Normal("moe_block.post_norm", {s.hidden}));
  c.outputs = {{.name = "out", .dtype = kType, .shape = {s.tokens, s.hidden}}};
  c.flops = 2 * static_cast<double>(s.tokens) * s.ProductsOfToken();
  const auto state = std::make_shared<BlockState>();
  c.run = [s, state](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                     Profile* profile) {
    return RunBlock(&MoeBlock, device, ArgsOf(s, in, out[0]), state.get(), profile);
  };
  c.check = [s, state](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                       std::uint64_t key) {
    return CheckMoe(s, ArgsOf(s, in, out[0]), products, key, state.get());
  };
  return WithTraffic(std::move(c));
}

}  // namespace cubist
