// The router: scores of experts, group-limited top-k, weights; and its gradient. A token is a row, and here rows are not
// cut; route_parts_kernel.h has those that do not fit.
#ifndef CUBIST_KERNELS_ROUTE_KERNEL_H_
#define CUBIST_KERNELS_ROUTE_KERNEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

struct RouteOperands {
  Gm logits, weights, ids;           // (T, E), (T, K), (T, K)
  const GmTensor* bias = nullptr;    // (E)
  const GmTensor* valid = nullptr;   // (T, 1)
  const GmTensor* scores = nullptr;  // (T, E)
  const GmTensor* bad = nullptr;     // (T, 1)
  Gm chunk_counts, chunk_shares;     // Workspaces (chunks, E); no columns where not wanted.
  Gm row_scores;  // Where rows are cut and `scores` is null: workspace (chunks * rows of a tile, E).

  ScoreFunction score = ScoreFunction::kSoftmax;
  bool renormalise = false, mean_for_bad = false;
  bool leaves_out = false;  // Experts, by expert_dropout or by a bias of -inf.
  float eps = 0, scale = 1, temperature = 0, dropout = 0, expert_dropout = 0, limit = 0;
  std::int64_t groups = 1, top_groups = 1, group_top = 1;
  std::uint64_t seed = 0;
  const RouteFunction* weighting = nullptr;
};

// A token's sum of scores that its shares are of, where all of them have underflowed: the shares are 0 then.
inline constexpr float kLeastSum = std::numeric_limits<float>::min();

// Streams of random numbers.
inline constexpr std::uint32_t kGumbelStream = 0, kDropoutStream = 1, kExpertStream = 2;

// x = (x + g) / temperature with g = -ln(-ln(u)), u the numbers of rows `rows`, of experts `first` on.
template <VectorCore V>
void AddGumbelNoise(V& core, const RouteOperands& g, Range rows, std::int64_t first, UbTile<float> x,
                    UbTile<float> u) {
  core.Random(u, RandomStream{g.seed, kGumbelStream}, rows.begin * g.logits.cols + first, g.logits.cols);
  core.Ln(u, u);
  core.MulScalar(u, u, -1.0f);
  core.Ln(u, u);
  core.Sub(x, x, u);
  core.MulScalar(x, x, 1.0f / g.temperature);
}

// bias (1, experts from `first` on) = -inf where an expert is left out of the call.
template <VectorCore V>
void DropExperts(V& core, const RouteOperands& g, std::int64_t first, UbTile<float> bias, UbTile<float> u,
                 UbTile<float> lowest) {
  core.Random(u, RandomStream{g.seed, kExpertStream}, first, u.cols());
  core.Fill(lowest, -std::numeric_limits<float>::infinity());
  core.SelectLe(bias, u, g.expert_dropout, lowest, bias);
}

// Experts that are left out are chosen by this or less, others by more: by -inf, or by the lowest number where experts pass
// part by part.
inline constexpr float kLeftOut = std::numeric_limits<float>::lowest();

// Tokens of a tile that are left out, where there is a mask: their logits count as 0, so that whatever they were their
// scores are numbers, and these become 0. Of such rows all that follows is 0: what is selected from them, their shares of
// the loss, and what the gradient makes of them.
template <VectorCore V>
class ValidRows {
 public:
  ValidRows(V& core, const GmTensor* valid, const RowwiseTiling& t)
      : core_(core),
        valid_(valid),
        flags_ub_(core, "flags_ub", t.rows, given() ? 1 : 0, t.stages),
        counts_ub_(core, "valid_ub", t.rows, given() ? 1 : 0, 1),
        factors_ub_(core, "factors_ub", t.rows, given() ? 1 : 0, 1) {}

  void Load(Range rows) {
    if (!given()) return;
    const UbTile<std::uint8_t> flags = flags_ub_.Next(rows.size(), 1);
    counts_ = counts_ub_.Next(rows.size(), 1), factors_ = factors_ub_.Next(rows.size(), 1);
    core_.Load(flags, MatrixOf(*valid_).Rows(rows));
    core_.Cast(counts_, flags);
    core_.Cast(factors_, flags);
  }

  // x of the others = 0; x is finite.
  void Keep(UbTile<float> x) {
    if (given()) core_.Mul(x, x, factors_);
  }
  // Ids of the others = -1.
  void Keep(UbTile<std::int32_t> ids) {
    if (given()) core_.KeepWhere(ids, ids, counts_);
  }
  // Sums of the others' weights, which are 0, = 1: they are divided by, and eps may be 0. No Keep of numbers may follow.
  void FillSums(UbTile<float> sums) {
    if (!given()) return;
    core_.MulScalar(factors_, factors_, -1.0f);
    core_.AddScalar(factors_, factors_, 1.0f);
    core_.Add(sums, sums, factors_);
  }

 private:
  bool given() const { return valid_ != nullptr; }

  V& core_;
  const GmTensor* valid_;
  Ring<Buffer::kUB, std::uint8_t> flags_ub_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
  Ring<Buffer::kUB, float> factors_ub_;
  UbTile<std::int32_t> counts_;
  UbTile<float> factors_;
};

// The weights of selected routes from their scores, in place: `chosen` is what selected them, chances a scratch tile that
// may be the same one. Ids of dropped routes become -1.
template <VectorCore V>
void WeighRoutes(V& core, const RouteOperands& g, Range rows, ValidRows<V>& valid, UbTile<std::int32_t> ids,
                 UbTile<float> weights, UbTile<float> chosen, UbTile<float> chances, UbTile<float> column) {
  valid.Keep(ids);
  // Experts that are left out are chosen where no others are left.
  if (g.leaves_out) core.DropRoutes(ids, weights, chosen, std::nextafter(kLeftOut, 0.0f));
  if (g.dropout > 0) {
    core.Random(chances, RandomStream{g.seed, kDropoutStream}, rows.begin * ids.cols(), ids.cols());
    core.DropRoutes(ids, weights, chances, g.dropout);
  }
  if (g.weighting != nullptr) core.MapRoutes(weights, ids, weights, {}, *g.weighting);
  if (g.renormalise) {
    core.RowSum(column, weights);
    core.AddScalar(column, column, g.eps);
    valid.FillSums(column);
    core.Div(weights, weights, column);
  }
  core.MulScalar(weights, weights, g.scale);
}

// Each chunk of tokens, and its counts of routes and sums of scores per expert.
template <VectorCore V>
void RouteKernel(V& core, const RouteOperands& g, const RowwiseTiling& t) {
  const std::int64_t experts = g.logits.cols, top_k = g.ids.cols;
  const bool counts_routes = g.chunk_counts.cols > 0, sums_scores = g.chunk_shares.cols > 0;
  const bool grouped = g.groups > 1, drops_experts = g.expert_dropout > 0,
             biased = g.bias != nullptr || drops_experts;
  Ring<Buffer::kUB, float> x_ub(core, "x_ub", t.rows, t.cols, t.stages, Role::kRelay),
      s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> bias_ub(core, "bias_ub", 1, t.cols, 1), shares_ub(core, "shares_ub", 1, t.cols, 1);
  Ring<Buffer::kUB, float> expert_ub(core, "expert_ub", 1, drops_experts ? t.cols : 0, 2);
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, t.cols, 1);
  Ring<Buffer::kUB, float> column_ub(core, "column_ub", t.rows, 1, 1),
      bad_ub(core, "bad_ub", t.rows, 1, t.stages);
  Ring<Buffer::kUB, float> weights_ub(core, "weights_ub", t.rows, top_k, t.stages),
      chances_ub(core, "chances_ub", t.rows, top_k, 1);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", t.rows, top_k, t.stages);
  Ring<Buffer::kUB, float> worths_ub(core, "worths_ub", t.rows, g.groups, 1),
      best_ub(core, "best_ub", t.rows, g.top_groups, 1);
  Ring<Buffer::kUB, std::int32_t> groups_ub(core, "groups_ub", t.rows, g.top_groups, 1);
  ValidRows<V> valid(core, g.valid, t);

  const UbTile<float> bias = bias_ub.Next(1, experts), shares = shares_ub.Next(1, experts);
  const UbTile<std::int32_t> counts = counts_ub.Next(1, experts);
  if (g.bias != nullptr) {
    core.Load(bias, MatrixOf(*g.bias));
  } else if (biased) {
    core.Fill(bias, 0.0f);
  }
  if (drops_experts) DropExperts(core, g, 0, bias, expert_ub.Next(1, experts), expert_ub.Next(1, experts));
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    if (counts_routes) core.Fill(counts, 0);
    if (sums_scores) core.Fill(shares, 0.0f);
    UbTile<std::int32_t> uncounted;
    const auto count = [&] {
      if (counts_routes && uncounted.given()) core.Histogram(counts, uncounted, {});
      uncounted = {};
    };
    for (const Range rows : Split(AtLeastOnce(Split(g.logits.rows, t.chunk_rows))[c], t.rows)) {
      const UbTile<float> x = x_ub.Next(rows.size(), experts), s0 = s0_ub.Next(rows.size(), experts),
                          s1 = s1_ub.Next(rows.size(), experts);
      const UbTile<float> column = column_ub.Next(rows.size(), 1), bad = bad_ub.Next(rows.size(), 1);
      const UbTile<float> weights = weights_ub.Next(rows.size(), top_k);
      const UbTile<std::int32_t> ids = ids_ub.Next(rows.size(), top_k);
      core.Load(x, g.logits.Rows(rows));
      valid.Load(rows);
      core.Repair(x, bad, s0, s1, column, g.limit, g.mean_for_bad);
      valid.Keep(x);
      if (g.bad != nullptr) {
        valid.Keep(bad);
        core.Store(MatrixOf(*g.bad).Rows(rows), bad);
      }
      if (g.temperature > 0) AddGumbelNoise(core, g, rows, 0, x, s0);
      core.Scores(g.score, x, s0, s1, column);
      valid.Keep(x);
      if (g.scores != nullptr) core.Store(MatrixOf(*g.scores).Rows(rows), x);

      const UbTile<float> chosen = chances_ub.Next(rows.size(), top_k), values = biased ? chosen : weights;
      if (grouped) {
        core.GroupedTopK({.values = values,
                          .ids = ids,
                          .a = x,
                          .bias = biased ? bias : UbTile<float>(),
                          .choice = s0,
                          .worths = worths_ub.Next(rows.size(), g.groups),
                          .best = best_ub.Next(rows.size(), g.top_groups),
                          .kept = groups_ub.Next(rows.size(), g.top_groups)},
                         g.group_top);
      } else {
        if (biased) core.Add(s0, x, bias);
        core.TopK(values, ids, biased ? s0 : x);
      }
      count();  // The scalar unit does, of the tile before, while the Vector unit chooses.
      if (biased) core.Gather(weights, x, ids);
      WeighRoutes(core, g, rows, valid, ids, weights, chosen, chosen, column);
      core.Store(g.ids.Rows(rows), ids);
      if (sums_scores) {
        core.RowSum(column, x);
        core.MaxScalar(column, column, kLeastSum);
        core.Fill(bad, 1.0f);
        core.Div(column, bad, column);
        core.Fill(s0, 1.0f);
        core.AddColumnDots(shares, s1, s1, x, s0, column);
      }
      core.Store(g.weights.Rows(rows), weights);
      uncounted = ids;
      if (t.stages == 1) count();
    }
    count();
    if (counts_routes) core.Store(g.chunk_counts.Rows({c, c + 1}), counts);
    if (sums_scores) core.Store(g.chunk_shares.Rows({c, c + 1}), shares);
  }
}

// What the loss's sum over the experts is multiplied by: of / T / T, and where tokens are left out of / V / V with V the
// number of the others, which only cores know: 1 at least, and exact up to 2^24. By the same roundings either way.
struct LossFactor {
  float of = 0;                     // aux_coefficient * E / K, and d_aux_loss
  std::int64_t all = 0;             // T
  const GmTensor* valid = nullptr;  // (T, 1)
  std::int64_t tokens = 1;          // whose flags are in UB at once.

  float OfAll() const {
    const float count = std::max(static_cast<float>(all), 1.0f);
    return of / count / count;
  }
};

// As many as there is room for, up to this.
inline constexpr std::int64_t kCountedTokens = 4096;

// factor (1, 1), with the tokens counted.
template <VectorCore V>
void FindLossFactor(V& core, const LossFactor& g, UbTile<float> factor) {
  Ring<Buffer::kUB, std::uint8_t> flags_ub(core, "flags_ub", 1, g.tokens, 2);
  Ring<Buffer::kUB, float> ones_ub(core, "ones_ub", 1, g.tokens, 1), some_ub(core, "some_ub", 1, 1, 1),
      count_ub(core, "count_ub", 1, 1, 1);
  const UbTile<float> some = some_ub.Next(1, 1), count = count_ub.Next(1, 1);
  core.Fill(count, 0.0f);
  for (const Range tokens : Split(g.all, g.tokens)) {
    const UbTile<std::uint8_t> flags = flags_ub.Next(1, tokens.size());
    const UbTile<float> ones = ones_ub.Next(1, tokens.size());
    core.Load(flags, MatrixOf(*g.valid).Rows(tokens).Transposed());
    core.Cast(ones, flags);
    core.RowSum(some, ones);
    core.Add(count, count, some);
  }
  core.MaxScalar(count, count, 1.0f);
  core.Fill(factor, g.of);
  core.Div(factor, factor, count);
  core.Div(factor, factor, count);
}

struct RouteTotals {
  Gm chunk_counts, chunk_shares;  // (chunks, E)
  Gm counts;                      // (1, E) int32
  const GmTensor* aux_loss = nullptr;
  LossFactor factor = {};
  std::int64_t experts = 1;  // whose totals are in UB at once, in seven tiles.
};

// As many as there is room for, up to this.
inline constexpr std::int64_t kSummedExperts = 4096;

// counts = the chunks' counts added up; aux_loss = factor * sum over e of counts(e) * (the chunks' shares added up)(e).
template <VectorCore V>
void RouteTotalsKernel(V& core, const RouteTotals& g) {
  const std::int64_t chunks = g.chunk_counts.rows, width = g.experts;
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, width, 1),
      part_ub(core, "part_ub", 1, width, 2);
  Ring<Buffer::kUB, float> shares_ub(core, "shares_ub", 1, width, 1), share_ub(core, "share_ub", 1, width, 2);
  Ring<Buffer::kUB, float> weights_ub(core, "weights_ub", 1, width, 1), loss_ub(core, "loss_ub", 1, 1, 1),
      sum_ub(core, "sum_ub", 1, 1, 1);
  const UbTile<float> loss = loss_ub.Next(1, 1), sum = sum_ub.Next(1, 1);
  for (const Range experts : AtLeastOnce(Split(g.counts.cols, width))) {
    const UbTile<std::int32_t> counts = counts_ub.Next(1, experts.size());
    const UbTile<float> shares = shares_ub.Next(1, experts.size()),
                        weights = weights_ub.Next(1, experts.size());
    core.Fill(counts, 0);
    core.Fill(shares, 0.0f);
    for (std::int64_t c = 0; c < chunks; ++c) {
      const UbTile<std::int32_t> part = part_ub.Next(1, experts.size());
      core.Load(part, g.chunk_counts.Block({c, c + 1}, experts));
      core.Add(counts, counts, part);
      if (g.aux_loss == nullptr) continue;
      const UbTile<float> share = share_ub.Next(1, experts.size());
      core.Load(share, g.chunk_shares.Block({c, c + 1}, experts));
      core.Add(shares, shares, share);
    }
    core.Store(g.counts.Cols(experts), counts);
    if (g.aux_loss == nullptr) continue;
    core.Cast(weights, counts);
    core.Mul(weights, weights, shares);
    const bool first = experts.begin == 0;
    core.RowSum(first ? loss : sum, weights);
    if (!first) core.Add(loss, loss, sum);
  }
  if (g.aux_loss == nullptr) return;
  if (g.factor.valid == nullptr) {
    core.MulScalar(loss, loss, g.factor.OfAll());
  } else {
    FindLossFactor(core, g.factor, sum);
    core.Mul(loss, loss, sum);
  }
  core.Store(MatrixOf(*g.aux_loss), loss);
}

struct RouteGradOperands {
  Gm d_weights, ids, scores, d_logits;    // (T, K), (T, K), (T, E), (T, E)
  const GmTensor* counts = nullptr;       // (E) int32, where there is a gradient of the loss
  const GmTensor* loss_factor = nullptr;  // (1, 1) of LossFactorKernel, in place of aux_factor

  ScoreFunction score = ScoreFunction::kSoftmax;
  bool renormalise = false;
  float eps = 0, scale = 1, temperature = 0;
  float aux_factor = 0;  // See LossFactor.
  const RouteFunction *weighting = nullptr, *weighting_grad = nullptr;
};

// d_x of x = the logits, from u = n d_n of the scores n, in u's place; of a softmax, column holds the rows' sums of u:
//   softmax u - n sum of u;  sigmoid u (1 - n);  sqrt-softplus u (1 - exp(-y)) / (2 y), y = n^2
// Every slope has the factor n, which is taken early: d_n is a quotient by sums of scores, and may be infinite where
// these are as small as floats can be.
template <VectorCore V>
void ScoreGradient(V& core, ScoreFunction score, UbTile<float> u, UbTile<float> n, UbTile<float> s,
                   UbTile<float> series, UbTile<float> column) {
  switch (score) {
    case ScoreFunction::kSoftmax:
      core.Mul(s, n, column);
      core.Sub(u, u, s);
      return;
    case ScoreFunction::kSigmoid:
      core.MulScalar(s, n, -1.0f);
      core.AddScalar(s, s, 1.0f);
      core.Mul(u, u, s);
      return;
    case ScoreFunction::kSqrtSoftplus:
      core.Mul(s, n, n);
      // (1 - exp(-y)) / y, of small y as 1 - y / 2 (1 - y / 3 (1 - y / 4)): the difference would lose what y has.
      core.MulScalar(series, s, -1.0f / 4);
      for (const float divisor : {3.0f, 2.0f}) {
        core.AddScalar(series, series, 1.0f);
        core.Mul(series, series, s);
        core.MulScalar(series, series, -1.0f / divisor);
      }
      core.AddScalar(series, series, 1.0f);
      core.MulScalar(s, s, -1.0f);
      core.Exp(s, s);
      core.MulScalar(s, s, -1.0f);
      core.AddScalar(s, s, 1.0f);
      core.Div(s, s, n);
      core.Div(s, s, n);
      core.SelectLe(s, n, 0.2f, series, s);
      core.Mul(u, u, s);
      core.MulScalar(u, u, 0.5f);
      return;
  }
}

// e = w d_n of the selected routes, from e = scale * d_weights and their scores w; see RouteGradKernel.
template <VectorCore V>
void RoutesGradient(V& core, const RouteGradOperands& g, UbTile<std::int32_t> ids, UbTile<float> e,
                    UbTile<float> w, UbTile<float> v, UbTile<float> sum, UbTile<float> column) {
  const bool weighs = g.weighting != nullptr;
  if (g.renormalise) {
    if (weighs) core.MapRoutes(v, ids, w, {}, *g.weighting);
    const UbTile<float> weight = weighs ? v : w;
    core.RowSum(sum, weight);
    core.AddScalar(sum, sum, g.eps);
    core.Mul(v, weight, e);
    core.RowSum(column, v);
    core.Div(column, column, sum);
    core.Sub(e, e, column);
    const UbTile<float> divided = weighs ? e : w;
    core.Div(divided, divided, sum);
  }
  if (weighs) core.MapRoutes(e, ids, w, e, *g.weighting_grad);
  core.Mul(e, e, w);
}

// For all cores of the phase after it.
template <VectorCore V>
void LossFactorKernel(V& core, const LossFactor& g, const Gm& factor) {
  Ring<Buffer::kUB, float> factor_ub(core, "factor_ub", 1, 1, 1);
  const UbTile<float> found = factor_ub.Next(1, 1);
  FindLossFactor(core, g, found);
  core.Store(factor, found);
}

// c = factor * counts, of the gradient of the loss.
template <VectorCore V>
class CountFactors {
 public:
  CountFactors(V& core, const RouteGradOperands& g)
      : core_(core), g_(g), factor_ub_(core, "factor_ub", 1, g.loss_factor == nullptr ? 0 : 1, 1) {
    if (g.loss_factor == nullptr) return;
    factor_ = factor_ub_.Next(1, 1);
    core.Load(factor_, MatrixOf(*g.loss_factor));
  }

  void Find(UbTile<float> c, UbTile<std::int32_t> counts, Range experts) {
    core_.Load(counts, MatrixOf(*g_.counts).Cols(experts));
    core_.Cast(c, counts);
    if (g_.loss_factor == nullptr) {
      core_.MulScalar(c, c, g_.aux_factor);
    } else {
      core_.Mul(c, c, factor_);
    }
  }

 private:
  V& core_;
  const RouteGradOperands& g_;
  Ring<Buffer::kUB, float> factor_ub_;
  UbTile<float> factor_;
};

// d += n times the loss's gradient for n; sum holds S and mean the sum of (c n) / S.
template <VectorCore V>
void AddLossGradient(V& core, UbTile<float> d, UbTile<float> n, UbTile<float> c, UbTile<float> sum,
                     UbTile<float> mean, UbTile<float> s, UbTile<float> s1) {
  core.Fill(s, 0.0f);
  core.Add(s, s, c);
  core.Sub(s, s, mean);
  core.Div(s1, n, sum);
  core.Mul(s, s, s1);
  core.Add(d, d, s);
}

// With w = n of the selected routes (or the weighting of these), D = sum of w + eps and e = scale * d_weights:
//   d_w = (e - sum of (e w) / D) / D with renormalisation, e without
//   d_n of the selected = d_w (or the weighting's gradient for it); 0 elsewhere
//   plus for the loss, with c = aux_factor * counts and S = sum of n, at least kLeastSum: (c - sum of (c n) / S) / S
template <VectorCore V>
void RouteGradKernel(V& core, const RouteGradOperands& g, const RowwiseTiling& t) {
  const std::int64_t experts = g.scores.cols, top_k = g.ids.cols;
  Ring<Buffer::kUB, float> n_ub(core, "n_ub", t.rows, t.cols, t.stages),
      d_ub(core, "d_ub", t.rows, t.cols, t.stages), s_ub(core, "s_ub", t.rows, t.cols, 1),
      s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> c_ub(core, "c_ub", 1, t.cols, 1);
  Ring<Buffer::kUB, std::int32_t> counts_ub(core, "counts_ub", 1, t.cols, 1);
  Ring<Buffer::kUB, float> column_ub(core, "column_ub", t.rows, 1, 1), sum_ub(core, "sum_ub", t.rows, 1, 1);
  Ring<Buffer::kUB, float> e_ub(core, "e_ub", t.rows, top_k, t.stages), w_ub(core, "w_ub", t.rows, top_k, 1),
      v_ub(core, "v_ub", t.rows, top_k, 1);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", t.rows, top_k, t.stages);

  CountFactors<V> factors(core, g);

  const UbTile<float> c = c_ub.Next(1, experts);
  if (g.counts != nullptr) factors.Find(c, counts_ub.Next(1, experts), {0, experts});
  for (std::int64_t chunk = core.index(); chunk < t.chunks; chunk += core.count()) {
    for (const Range rows : Split(AtLeastOnce(Split(g.scores.rows, t.chunk_rows))[chunk], t.rows)) {
      const UbTile<float> n = n_ub.Next(rows.size(), experts), d = d_ub.Next(rows.size(), experts),
                          s = s_ub.Next(rows.size(), experts), s1 = s1_ub.Next(rows.size(), experts);
      const UbTile<float> column = column_ub.Next(rows.size(), 1), sum = sum_ub.Next(rows.size(), 1);
      const UbTile<float> e = e_ub.Next(rows.size(), top_k), w = w_ub.Next(rows.size(), top_k),
                          v = v_ub.Next(rows.size(), top_k);
      const UbTile<std::int32_t> ids = ids_ub.Next(rows.size(), top_k);
      core.Load(n, g.scores.Rows(rows));
      core.Load(e, g.d_weights.Rows(rows));
      core.Load(ids, g.ids.Rows(rows));
      core.MulScalar(e, e, g.scale);
      core.Gather(w, n, ids);
      core.Fill(d, 0.0f);
      RoutesGradient(core, g, ids, e, w, v, sum, column);
      if (g.counts != nullptr) {
        core.RowSum(sum, n);
        core.MaxScalar(sum, sum, kLeastSum);
        core.Fill(column, 0.0f);
        core.Fill(s1, 1.0f);
        core.RowDot(column, s, s1, n, s1, c);
        core.Div(column, column, sum);
      }
      core.Scatter(d, ids, e);  // By the scalar unit, while the Vector unit makes the sums above.
      if (g.counts != nullptr) AddLossGradient(core, d, n, c, sum, column, s, s1);
      if (g.score == ScoreFunction::kSoftmax) core.RowSum(column, d);
      ScoreGradient(core, g.score, d, n, s, s1, column);
      if (g.temperature > 0) core.MulScalar(d, d, 1.0f / g.temperature);
      core.Store(g.d_logits.Rows(rows), d);
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROUTE_KERNEL_H_
