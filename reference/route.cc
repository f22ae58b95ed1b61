#include "reference/route.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>

#include "reference/philox.h"

namespace cubist::reference {
namespace {

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

double ScoreOf(Score score, double x) {
  if (score == Score::kSigmoid) return 1 / (1 + std::exp(-x));
  if (x < -40) return std::exp(x / 2);  // To all digits, and where exp(x) is 0.
  return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
}

std::vector<double> ScoresOf(Score score, std::vector<double> x) {
  if (score != Score::kSoftmax) {
    for (double& v : x) v = ScoreOf(score, v);
    return x;
  }
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - most);
  for (double& v : x) v /= sum;
  return x;
}

// The derivative of an elementwise score, from the score.
double SlopeOf(Score score, double n) {
  if (score == Score::kSigmoid) return n * (1 - n);
  return n < 1e-9 ? n / 2 : -std::expm1(-n * n) / (2 * n);
}

// S of RouterOptions::aux_coefficient.
double SumOf(const double* n, std::int64_t experts) {
  return std::max(std::accumulate(n, n + experts, 0.0), 0x1p-126);
}

bool IsValid(const RouterOptions& o, std::int64_t t) { return o.valid.empty() || o.valid[Index(t)]; }

// Tokens that the loss is a mean of.
double ValidTokens(const RouterOptions& o, std::int64_t tokens) {
  double count = 0;
  for (std::int64_t t = 0; t < tokens; ++t) count += IsValid(o, t) ? 1 : 0;
  return count;
}

// Columns by value, descending, of equals the lower first.
std::vector<std::int64_t> Order(const std::vector<double>& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return values[Index(a)] > values[Index(b)]; });
  return order;
}

// The least difference of neighbours among the first `count` + 1 of `order`.
double Gap(const std::vector<double>& values, const std::vector<std::int64_t>& order, std::int64_t count) {
  double gap = std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j + 1 < order.size() && j < Index(count); ++j) {
    const double next = values[Index(order[j + 1])];
    if (std::isfinite(next)) gap = std::min(gap, values[Index(order[j])] - next);
  }
  return gap;
}

// -inf outside the best groups.
void LimitToGroups(const RouterOptions& o, std::vector<double>* choice, double* gap) {
  const std::size_t width = choice->size() / Index(o.groups);
  std::vector<double> worth;
  for (std::size_t g = 0; g < Index(o.groups); ++g) {
    std::vector<double> part(choice->begin() + static_cast<std::ptrdiff_t>(g * width),
                             choice->begin() + static_cast<std::ptrdiff_t>((g + 1) * width));
    std::sort(part.begin(), part.end(), std::greater<>());
    double sum = part[0];
    for (std::size_t j = 1; j < Index(o.group_top); ++j) sum += std::isfinite(part[j]) ? part[j] : 0;
    worth.push_back(sum);
  }
  const std::vector<std::int64_t> order = Order(worth);
  *gap = std::min(*gap, Gap(worth, order, o.top_groups));
  for (std::size_t g = Index(o.top_groups); g < order.size(); ++g) {
    const auto first = choice->begin() + order[g] * static_cast<std::ptrdiff_t>(width);
    std::fill(first, first + static_cast<std::ptrdiff_t>(width), -std::numeric_limits<double>::infinity());
  }
}

void Repair(const RouterOptions& o, std::vector<double>* x, double* bad) {
  double sum = 0, good = 0;
  for (double v : *x) {
    if (std::abs(v) <= o.limit) sum += v, ++good;
  }
  *bad = static_cast<double>(x->size()) - good;
  for (double& v : *x) {
    if (!(std::abs(v) <= o.limit)) v = o.mean_for_bad && good > 0 ? sum / good : 0;
  }
}

}  // namespace

double UniformNumber(std::uint64_t seed, std::uint32_t stream, std::uint64_t element) {
  const std::uint32_t word = PhiloxWords(seed, element / 4, stream)[element % 4];
  return (static_cast<double>(word >> 9) + 0.5) / 8388608.0;
}

RouterResult Route(ConstTensor logits, ConstTensor bias, std::int64_t top_k, const RouterOptions& o) {
  RouterResult result;
  const std::int64_t tokens = logits.size(0), experts = logits.size(1);
  result.counts.resize(Index(experts));
  result.smallest_gap = std::numeric_limits<double>::infinity();
  std::vector<double> shares(Index(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!IsValid(o, t)) {
      result.scores.insert(result.scores.end(), Index(experts), 0);
      result.ids.insert(result.ids.end(), Index(top_k), -1);
      result.weights.insert(result.weights.end(), Index(top_k), 0);
      result.bad.push_back(0);
      continue;
    }
    std::vector<double> x;
    for (std::int64_t e = 0; e < experts; ++e)
      x.push_back(LoadFloat(logits.data, logits.dtype, t * logits.stride(0) + e * logits.stride(1)));
    double bad = 0;
    if (o.repairs) Repair(o, &x, &bad);
    result.bad.push_back(bad);
    for (std::int64_t e = 0; e < experts && o.temperature > 0; ++e) {
      const double u = UniformNumber(o.seed, 0, static_cast<std::uint64_t>(t * experts + e));
      x[Index(e)] = (x[Index(e)] - std::log(-std::log(u))) / o.temperature;
    }
    const std::vector<double> n = ScoresOf(o.score, x);
    const double sum = SumOf(n.data(), experts);
    std::vector<double> choice = n;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (bias.given()) choice[Index(e)] += LoadFloat(bias.data, bias.dtype, e * bias.stride(0));
      shares[Index(e)] += n[Index(e)] / sum;
      if (o.expert_dropout > 0 && UniformNumber(o.seed, 2, static_cast<std::uint64_t>(e)) <= o.expert_dropout)
        choice[Index(e)] = -std::numeric_limits<double>::infinity();
    }
    if (o.groups > 1) LimitToGroups(o, &choice, &result.smallest_gap);
    const std::vector<std::int64_t> order = Order(choice);
    result.smallest_gap = std::min(result.smallest_gap, Gap(choice, order, top_k));
    double total = o.eps;
    const std::size_t first = result.ids.size();
    for (std::int64_t j = 0; j < top_k; ++j) {
      const bool left_out = !std::isfinite(choice[Index(order[Index(j)])]);
      const bool dropped =
          left_out ||
          (o.dropout > 0 && UniformNumber(o.seed, 1, static_cast<std::uint64_t>(t * top_k + j)) < o.dropout);
      const std::int64_t e = dropped ? -1 : order[Index(j)];
      result.ids.push_back(static_cast<std::int32_t>(e));
      result.weights.push_back(dropped ? 0 : n[Index(e)]);
      if (!dropped) ++result.counts[Index(e)];
    }
    if (o.weighting) {
      const std::vector<std::int32_t> ids(result.ids.begin() + static_cast<std::ptrdiff_t>(first),
                                          result.ids.end());
      const std::vector<double> w = o.weighting(
          ids, {result.weights.begin() + static_cast<std::ptrdiff_t>(first), result.weights.end()});
      for (std::size_t j = 0; j < w.size(); ++j) result.weights[first + j] = ids[j] < 0 ? 0 : w[j];
    }
    total = std::accumulate(result.weights.begin() + static_cast<std::ptrdiff_t>(first), result.weights.end(),
                            total);
    for (auto w = result.weights.end() - top_k; w != result.weights.end(); ++w)
      *w *= o.scale / (o.renormalise ? total : 1);
    result.scores.insert(result.scores.end(), n.begin(), n.end());
  }
  const double count = ValidTokens(o, tokens);
  for (std::int64_t e = 0; e < experts && count > 0; ++e) {
    result.aux_loss += o.aux_coefficient * static_cast<double>(experts) /
                       (static_cast<double>(top_k) * count) * static_cast<double>(result.counts[Index(e)]) *
                       shares[Index(e)] / count;
  }
  return result;
}

std::vector<double> RouteGrad(const std::vector<double>& d_weights, const RouterResult& forward,
                              std::int64_t tokens, std::int64_t experts, std::int64_t top_k, double d_aux,
                              const RouterOptions& o) {
  std::vector<double> d_logits;
  const double count = ValidTokens(o, tokens);
  const double factor =
      d_aux * o.aux_coefficient * static_cast<double>(experts) / (static_cast<double>(top_k) * count * count);
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!IsValid(o, t)) {
      d_logits.insert(d_logits.end(), Index(experts), 0);
      continue;
    }
    const double* n = forward.scores.data() + t * experts;
    std::vector<double> d(Index(experts));
    double total = o.eps, cross = 0;
    std::vector<std::int32_t> ids;
    std::vector<double> selected, d_w;
    for (std::int64_t j = 0; j < top_k; ++j) {
      ids.push_back(forward.ids[Index(t * top_k + j)]);
      selected.push_back(ids.back() < 0 ? 0 : n[ids.back()]);
    }
    const std::vector<double> w = o.weighting ? o.weighting(ids, selected) : selected;
    for (std::size_t j = 0; j < ids.size(); ++j) {
      if (ids[j] >= 0) total += w[j], cross += o.scale * d_weights[Index(t * top_k) + j] * w[j];
    }
    for (std::size_t j = 0; j < ids.size(); ++j) {
      const double g = ids[j] < 0 ? 0 : o.scale * d_weights[Index(t * top_k) + j];
      d_w.push_back(ids[j] >= 0 && o.renormalise ? (g - cross / total) / total : g);
    }
    if (o.weighting_grad) d_w = o.weighting_grad(ids, selected, d_w);
    for (std::size_t j = 0; j < ids.size(); ++j) {
      if (ids[j] >= 0) d[Index(ids[j])] += d_w[j];
    }
    const double sum = SumOf(n, experts);
    double shared = 0;
    for (std::int64_t e = 0; e < experts; ++e)
      shared += factor * static_cast<double>(forward.counts[Index(e)]) * n[e] / sum;
    double mixed = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      d[Index(e)] += (factor * static_cast<double>(forward.counts[Index(e)]) - shared) / sum;
      mixed += d[Index(e)] * n[e];
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      const double dx =
          o.score == Score::kSoftmax ? n[e] * (d[Index(e)] - mixed) : d[Index(e)] * SlopeOf(o.score, n[e]);
      d_logits.push_back(o.temperature > 0 ? dx / o.temperature : dx);
    }
  }
  return d_logits;
}

}  // namespace cubist::reference
