// The attention half of a layer as a case: its rows by hand, from the block's input on.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "npu_model/parallel.h"
#include "tools/block_cases.h"
#include "tools/block_shapes.h"
#include "tools/noisy.h"

namespace cubist {
namespace {

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
  const double scale = 1 / std::sqrt(static_cast<double>(s.nope + s.rope));
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
      all,
      std::max(kLeastMlaRows, static_cast<std::int64_t>(std::min(affordable, static_cast<double>(all)))));
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

}  // namespace

Case MlaBlockCase(const ScaledWorkload& scaled) {
  const MlaSizes s(scaled);
  Case c{.name = "mla_block", .kernel = "MlaBlock", .shape = s.shape(), .dtype = DType::kBF16};
  c.inputs = InputsOf(s);
  c.outputs = {{.name = "out", .dtype = DType::kBF16, .shape = {s.rows(), s.hidden}}};
  c.flops =
      2 * (s.ProductsOfProjections() + s.ProductsOfScores() * static_cast<double>(s.nope + s.rope + s.v));
  const auto state = std::make_shared<BlockState>();
  c.run = [s, state](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                     Profile* profile) {
    return RunBlock(&MlaBlock, device, ArgsOf(s, in, out[0]), state.get(), profile);
  };
  c.check = [s](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                std::uint64_t) { return CheckMla(s, ArgsOf(s, in, out[0]), products); };
  return WithTraffic(std::move(c));
}

}  // namespace cubist
