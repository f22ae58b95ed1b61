// The other half of a layer as a case: routes checked as far as scores tell them apart, rows by hand.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "tools/block_cases.h"
#include "tools/block_shapes.h"
#include "tools/noisy.h"
#include "tools/views.h"

namespace cubist {
namespace {

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
    y.push_back(Expert(routed.h, Element(args.weights.gate_up, e), Element(args.weights.down, e)));
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

Case MoeBlockCase(const ScaledWorkload& scaled) {
  const MoeSizes s(scaled);
  Case c{.name = "moe_block", .kernel = "MoeBlock", .shape = s.shape(), .dtype = DType::kBF16};
  c.inputs = InputsOf(s);
  c.outputs = {{.name = "out", .dtype = DType::kBF16, .shape = {s.tokens, s.hidden}}};
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
