// The router and its gradient where the experts of a token do not fit at once: the steps of route_kernel.h by parts of the
// experts, which are walked as often as something must be known of all of them first. Scores pass through GM.
#ifndef CUBIST_KERNELS_ROUTE_PARTS_KERNEL_H_
#define CUBIST_KERNELS_ROUTE_PARTS_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/route_kernel.h"
#include "kernels/running_top_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

// visit(part) for parts of `step` experts at most: each of whole groups, or inside one.
template <class Visit>
void ForExpertParts(std::int64_t experts, std::int64_t groups, std::int64_t step, Visit visit) {
  const std::int64_t width = experts / groups;
  for (const Range whole : Split(experts, width <= step ? step / width * width : width)) {
    for (const Range part : Split(whole, step)) visit(part);
  }
}

// dst(i, j) = scores(i, ids(i, j)), 0 where there is no such expert.
template <VectorCore V>
void GatherScores(V& core, UbTile<float> dst, const Gm& scores, UbTile<std::int32_t> ids,
                  UbTile<float> staging) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const Range row{i, i + 1};
    core.Gather(dst.Rows(row), scores.Rows(row).Transposed(), ids.Rows(row), staging);
  }
}

// What RouteKernel does of a tile of whole rows, for the tiles of a core.
template <VectorCore V>
class RouteInParts {
 public:
  RouteInParts(V& core, const RouteOperands& g, const RowwiseTiling& t)
      : core_(core),
        g_(g),
        t_(t),
        grouped_(g.groups > 1),
        biased_(g.bias != nullptr || g.expert_dropout > 0),
        width_(g.logits.cols / g.groups),
        group_parts_(width_ > t.cols),
        x_ub_(core, "x_ub", t.rows, t.cols, t.stages),
        s0_ub_(core, "s0_ub", t.rows, t.cols, 1),
        s1_ub_(core, "s1_ub", t.rows, t.cols, 1),
        worths_ub_(core, "worths_ub", t.rows, grouped_ ? t.cols : 0, 1),
        bias_ub_(core, "bias_ub", 1, t.cols, 1),
        expert_ub_(core, "expert_ub", 1, g.expert_dropout > 0 ? t.cols : 0, 2),
        shares_ub_(core, "shares_ub", 1, t.cols, 2),
        counts_ub_(core, "counts_ub", 1, t.cols, 2),
        bad_ub_(core, "bad_ub", t.rows, 1, 1),
        part_bad_ub_(core, "part_bad_ub", t.rows, 1, 1),
        column_ub_(core, "column_ub", t.rows, 1, 1),
        mean_ub_(core, "mean_ub", t.rows, 1, 1),
        most_ub_(core, "most_ub", t.rows, 1, 2),
        powers_ub_(core, "powers_ub", t.rows, 1, 1),
        total_ub_(core, "total_ub", t.rows, 1, 1),
        staging_ub_(core, "staging_ub", 2 * t.rows, 1, 1),
        weights_ub_(core, "weights_ub", t.rows, g.ids.cols, 1),
        chances_ub_(core, "chances_ub", t.rows, g.ids.cols, 1),
        kept_ub_(core, "kept_ub", t.rows, grouped_ ? g.top_groups : 0, 1),
        valid_(core, g.valid, t),
        top_(core, "top_ub", "top_ids_ub", t.rows, g.ids.cols, t.cols),
        groups_(core, "groups_ub", "group_ids_ub", t.rows, grouped_ ? g.top_groups : 0, t.cols),
        group_(core, "group_top_ub", "group_top_ids_ub", t.rows, grouped_ && group_parts_ ? g.group_top : 0,
               t.cols) {}

  void Run() {
    for (std::int64_t c = core_.index(); c < t_.chunks; c += core_.count()) {
      bool first = true;
      for (const Range rows :
           AtLeastOnce(Split(AtLeastOnce(Split(g_.logits.rows, t_.chunk_rows))[c], t_.rows))) {
        if (!rows.empty()) Route(rows, ScoresOf(rows, c));
        AddTotals(rows, c, first);
        first = false;
      }
    }
  }

 private:
  template <class Visit>
  void ForParts(Visit visit) {
    ForExpertParts(g_.logits.cols, g_.groups, t_.cols, visit);
  }
  Gm ScoresOf(Range rows, std::int64_t chunk) const {
    if (g_.scores != nullptr) return MatrixOf(*g_.scores).Rows(rows);
    return g_.row_scores.Rows({chunk * t_.rows, chunk * t_.rows + rows.size()});
  }
  UbTile<float> LoadPart(const Gm& from, Range part) {
    const UbTile<float> x = x_ub_.Next(from.rows, part.size());
    core_.Load(x, from.Cols(part));
    return x;
  }

  // Logits, bad ones replaced, with noise; adds up in part_bad how many bad ones there were, unless the mean replaces them.
  UbTile<float> Logits(Range rows, Range part) {
    const UbTile<float> x = LoadPart(g_.logits.Rows(rows), part), s0 = s0_ub_.Next(rows.size(), part.size());
    if (g_.mean_for_bad) {
      core_.Abs(s0, x);
      core_.SelectLe(x, s0, g_.limit, x, mean_);
    } else {
      Repair(x, s0);
    }
    valid_.Keep(x);
    if (g_.temperature > 0) AddGumbelNoise(core_, g_, rows, part.begin, x, s0);
    return x;
  }
  void Repair(UbTile<float> x, UbTile<float> s0) {
    part_bad_ = part_bad_ub_.Next(x.rows(), 1);
    core_.Repair(x, part_bad_, s0, s1_ub_.Next(x.rows(), x.cols()), column_ub_.Next(x.rows(), 1), g_.limit,
                 /*by_mean=*/false);
  }

  // mean_ = the mean of the logits that are not bad.
  void FindMeans(Range rows) {
    const UbTile<float> count = total_ub_.Next(rows.size(), 1);
    mean_ = mean_ub_.Next(rows.size(), 1);
    core_.Fill(mean_, 0.0f);
    ForParts([&](Range part) {
      const UbTile<float> x = LoadPart(g_.logits.Rows(rows), part);
      Repair(x, s0_ub_.Next(rows.size(), part.size()));
      core_.Add(bad_, bad_, part_bad_);
      const UbTile<float> sum = column_ub_.Next(rows.size(), 1);
      core_.MulScalar(x, x, MeanScale(g_.logits.cols));
      core_.RowSum(sum, x);
      core_.Add(mean_, mean_, sum);
    });
    core_.MulScalar(count, bad_, -1.0f);
    core_.AddScalar(count, count, static_cast<float>(g_.logits.cols));
    core_.MaxScalar(count, count, 1.0f);
    core_.MulScalar(count, count, MeanScale(g_.logits.cols));
    core_.Div(mean_, mean_, count);
    for (int side = 0; side < 2; ++side) {  // Rounding may take it beyond the limit.
      core_.MulScalar(mean_, mean_, -1.0f);
      core_.MaxScalar(mean_, mean_, -g_.limit);
    }
  }

  // most_ = the highest logit, powers_ = the sum of exp(logit - most_).
  void FindPowers(Range rows) {
    most_ = most_ub_.Next(rows.size(), 1), powers_ = powers_ub_.Next(rows.size(), 1);
    core_.Fill(most_, std::numeric_limits<float>::lowest());
    core_.Fill(powers_, 0.0f);
    ForParts([&](Range part) {
      const UbTile<float> x = Logits(rows, part), p = s1_ub_.Next(rows.size(), part.size());
      const UbTile<float> before = most_;
      most_ = most_ub_.Next(rows.size(), 1);
      core_.SoftmaxStep(p, x, most_, before, powers_, 1.0f);
    });
  }

  UbTile<float> Scores(Range rows, Range part) {
    const UbTile<float> x = Logits(rows, part);
    if (g_.score == ScoreFunction::kSoftmax) {
      core_.Sub(x, x, most_);
      core_.Exp(x, x);
      core_.Div(x, x, powers_);
    } else {
      core_.Scores(g_.score, x, s0_ub_.Next(x.rows(), x.cols()), s1_ub_.Next(x.rows(), x.cols()),
                   column_ub_.Next(x.rows(), 1));
    }
    valid_.Keep(x);
    return x;
  }

  // What experts are selected by.
  UbTile<float> Choice(UbTile<float> x, Range part) {
    if (!biased_) return x;
    const UbTile<float> choice = s0_ub_.Next(x.rows(), x.cols()), bias = bias_ub_.Next(1, x.cols());
    if (g_.bias != nullptr) {
      core_.Load(bias, MatrixOf(*g_.bias).Cols(part));
    } else {
      core_.Fill(bias, 0.0f);
    }
    if (g_.expert_dropout > 0) {
      DropExperts(core_, g_, part.begin, bias, expert_ub_.Next(1, x.cols()), expert_ub_.Next(1, x.cols()));
    }
    core_.Add(choice, x, bias);
    return choice;
  }

  // What is left out is chosen where no others are left: it counts as the lowest number.
  void Compete(RunningTop<V>& top, UbTile<float> x, std::int64_t first) {
    core_.MaxScalar(x, x, kLeftOut);
    top.Add(x, first);
  }

  // The groups of a part compete; one of several parts does when it ends.
  void AddGroups(UbTile<float> choice, Range part) {
    const std::int64_t group = part.begin / width_;
    if (!group_parts_) {
      const UbTile<float> worths = worths_ub_.Next(choice.rows(), part.size() / width_);
      core_.GroupTop(worths, choice, g_.group_top);
      Compete(groups_, worths, group);
      return;
    }
    if (part.begin % width_ == 0) group_.Clear();
    Compete(group_, choice, part.begin % width_);
    if (part.end % width_ != 0) return;
    const UbTile<float> worth = worths_ub_.Next(choice.rows(), 1);
    core_.GroupTop(worth, group_.values(), g_.group_top);
    Compete(groups_, worth, group);
  }
  void KeepBestGroups(UbTile<float> choice, Range part) {
    const UbTile<std::int32_t> kept = kept_ub_.Next(choice.rows(), g_.top_groups);
    core_.AddScalar(kept, groups_.ids(), static_cast<std::int32_t>(-(part.begin / width_)));
    core_.KeepGroups(choice, kept, std::min(width_, part.size()));
  }

  void Route(Range rows, const Gm& scores) {
    bad_ = bad_ub_.Next(rows.size(), 1);
    core_.Fill(bad_, 0.0f);
    valid_.Load(rows);
    if (g_.mean_for_bad) FindMeans(rows);
    if (g_.score == ScoreFunction::kSoftmax) FindPowers(rows);
    top_.Clear(), groups_.Clear();
    total_ = total_ub_.Next(rows.size(), 1);
    core_.Fill(total_, 0.0f);
    ForParts([&](Range part) {
      const UbTile<float> x = Scores(rows, part);
      if (!g_.mean_for_bad) core_.Add(bad_, bad_, part_bad_);
      core_.Store(scores.Cols(part), x);
      if (sums_scores()) {
        const UbTile<float> sum = column_ub_.Next(rows.size(), 1);
        core_.RowSum(sum, x);
        core_.Add(total_, total_, sum);
      }
      const UbTile<float> choice = Choice(x, part);
      if (grouped_) {
        AddGroups(choice, part);
      } else {
        Compete(top_, choice, part.begin);
      }
    });
    if (g_.bad != nullptr) {
      valid_.Keep(bad_);
      core_.Store(MatrixOf(*g_.bad).Rows(rows), bad_);
    }
    if (grouped_) {
      ForParts([&](Range part) {
        const UbTile<float> choice = Choice(LoadPart(scores, part), part);
        KeepBestGroups(choice, part);
        Compete(top_, choice, part.begin);
      });
    }
    Weigh(rows, scores);
    scores_ = scores;
  }

  void Weigh(Range rows, const Gm& scores) {
    const UbTile<float> chosen = top_.values(), chances = chances_ub_.Next(rows.size(), chosen.cols());
    UbTile<float> weights = chosen;
    ids_ = top_.ids();
    if (biased_) {
      weights = weights_ub_.Next(rows.size(), chosen.cols());
      GatherScores(core_, weights, scores, ids_, staging_ub_.Next(2 * rows.size(), 1));
    }
    WeighRoutes(core_, g_, rows, valid_, ids_, weights, chosen, chances, column_ub_.Next(rows.size(), 1));
    core_.Store(g_.ids.Rows(rows), ids_);
    core_.Store(g_.weights.Rows(rows), weights);
  }

  bool sums_scores() const { return g_.chunk_shares.cols > 0; }
  // A chunk's totals pass by with each of its tiles of rows.
  void AddTotals(Range rows, std::int64_t c, bool first) {
    const Range chunk{c, c + 1};
    if (sums_scores() && !rows.empty()) {
      const UbTile<float> ones = column_ub_.Next(rows.size(), 1);
      core_.MaxScalar(total_, total_, kLeastSum);
      core_.Fill(ones, 1.0f);
      core_.Div(total_, ones, total_);
    }
    ForParts([&](Range part) {
      if (g_.chunk_counts.cols > 0) {
        const UbTile<std::int32_t> counts = counts_ub_.Next(1, part.size());
        if (first) {
          core_.Fill(counts, 0);
        } else {
          core_.Load(counts, g_.chunk_counts.Block(chunk, part));
        }
        if (!rows.empty()) core_.Histogram(counts, ids_, {.first = static_cast<std::int32_t>(part.begin)});
        core_.Store(g_.chunk_counts.Block(chunk, part), counts);
      }
      if (sums_scores()) AddShares(chunk, part, rows, first);
    });
  }
  void AddShares(Range chunk, Range part, Range rows, bool first) {
    const UbTile<float> shares = shares_ub_.Next(1, part.size());
    if (first) {
      core_.Fill(shares, 0.0f);
    } else {
      core_.Load(shares, g_.chunk_shares.Block(chunk, part));
    }
    if (!rows.empty()) {
      const UbTile<float> x = LoadPart(scores_, part), ones = s0_ub_.Next(rows.size(), part.size()),
                          scratch = s1_ub_.Next(rows.size(), part.size());
      core_.Fill(ones, 1.0f);
      core_.AddColumnDots(shares, scratch, scratch, x, ones, total_);
    }
    core_.Store(g_.chunk_shares.Block(chunk, part), shares);
  }

  V& core_;
  const RouteOperands& g_;
  const RowwiseTiling& t_;
  bool grouped_, biased_;
  std::int64_t width_;  // Experts of a group.
  bool group_parts_;    // A group is more than a part.
  Ring<Buffer::kUB, float> x_ub_, s0_ub_, s1_ub_, worths_ub_;
  Ring<Buffer::kUB, float> bias_ub_, expert_ub_, shares_ub_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
  Ring<Buffer::kUB, float> bad_ub_, part_bad_ub_, column_ub_, mean_ub_, most_ub_, powers_ub_, total_ub_,
      staging_ub_;
  Ring<Buffer::kUB, float> weights_ub_, chances_ub_;
  Ring<Buffer::kUB, std::int32_t> kept_ub_;
  ValidRows<V> valid_;
  RunningTop<V> top_, groups_, group_;
  // Of the rows at hand.
  UbTile<float> bad_, part_bad_, mean_, most_, powers_, total_;
  UbTile<std::int32_t> ids_;
  Gm scores_;
};

template <VectorCore V>
void RoutePartsKernel(V& core, const RouteOperands& g, const RowwiseTiling& t) {
  RouteInParts<V>(core, g, t).Run();
}

// What RouteGradKernel does, the gradient of each part as often as something must be known of all: for a softmax, whose
// gradient has a row's sum of u, twice.
template <VectorCore V>
class RouteGradInParts {
 public:
  RouteGradInParts(V& core, const RouteGradOperands& g, const RowwiseTiling& t)
      : core_(core),
        g_(g),
        t_(t),
        n_ub_(core, "n_ub", t.rows, t.cols, t.stages),
        d_ub_(core, "d_ub", t.rows, t.cols, t.stages),
        s_ub_(core, "s_ub", t.rows, t.cols, 1),
        s1_ub_(core, "s1_ub", t.rows, t.cols, 1),
        c_ub_(core, "c_ub", 1, t.cols, 1),
        counts_ub_(core, "counts_ub", 1, t.cols, 1),
        column_ub_(core, "column_ub", t.rows, 1, 1),
        sum_ub_(core, "sum_ub", t.rows, 1, 1),
        total_ub_(core, "total_ub", t.rows, 1, 1),
        mean_ub_(core, "mean_ub", t.rows, 1, 1),
        staging_ub_(core, "staging_ub", 2 * t.rows, 1, 1),
        e_ub_(core, "e_ub", t.rows, g.ids.cols, 1),
        w_ub_(core, "w_ub", t.rows, g.ids.cols, 1),
        v_ub_(core, "v_ub", t.rows, g.ids.cols, 1),
        ids_ub_(core, "ids_ub", t.rows, g.ids.cols, 1),
        part_ids_ub_(core, "part_ids_ub", t.rows, g.ids.cols, 1),
        factors_(core, g) {}

  void Run() {
    for (std::int64_t c = core_.index(); c < t_.chunks; c += core_.count()) {
      for (const Range rows : Split(AtLeastOnce(Split(g_.scores.rows, t_.chunk_rows))[c], t_.rows))
        Differentiate(rows);
    }
  }

 private:
  void Differentiate(Range rows) {
    const std::int64_t top_k = g_.ids.cols;
    const UbTile<float> w = w_ub_.Next(rows.size(), top_k), v = v_ub_.Next(rows.size(), top_k);
    const UbTile<float> sum = sum_ub_.Next(rows.size(), 1), column = column_ub_.Next(rows.size(), 1);
    e_ = e_ub_.Next(rows.size(), top_k), ids_ = ids_ub_.Next(rows.size(), top_k);
    core_.Load(e_, g_.d_weights.Rows(rows));
    core_.Load(ids_, g_.ids.Rows(rows));
    core_.MulScalar(e_, e_, g_.scale);
    GatherScores(core_, w, g_.scores.Rows(rows), ids_, staging_ub_.Next(2 * rows.size(), 1));
    RoutesGradient(core_, g_, ids_, e_, w, v, sum, column);
    if (g_.counts != nullptr) FindLoss(rows, column);
    const bool softmax = g_.score == ScoreFunction::kSoftmax;
    if (softmax) {
      core_.Fill(sum, 0.0f);
      for (const Range part : Split(g_.scores.cols, t_.cols)) {
        LoadScores(rows, part);
        core_.RowSum(column, ScoresTimesGradient(part));
        core_.Add(sum, sum, column);
      }
    }
    for (const Range part : Split(g_.scores.cols, t_.cols)) {
      LoadScores(rows, part);
      const UbTile<float> d = ScoresTimesGradient(part);
      ScoreGradient(core_, g_.score, d, n_, s_, s1_, sum);
      if (g_.temperature > 0) core_.MulScalar(d, d, 1.0f / g_.temperature);
      core_.Store(g_.d_logits.Block(rows, part), d);
    }
  }

  void LoadScores(Range rows, Range part) {
    n_ = n_ub_.Next(rows.size(), part.size());
    s_ = s_ub_.Next(rows.size(), part.size()), s1_ = s1_ub_.Next(rows.size(), part.size());
    core_.Load(n_, g_.scores.Block(rows, part));
  }

  UbTile<float> FactorOfCounts(Range part) {
    const UbTile<std::int32_t> counts = counts_ub_.Next(1, part.size());
    const UbTile<float> c = c_ub_.Next(1, part.size());
    factors_.Find(c, counts, part);
    return c;
  }

  // total_ = S, mean_ = the sum of (c n) / S.
  void FindLoss(Range rows, UbTile<float> column) {
    total_ = total_ub_.Next(rows.size(), 1), mean_ = mean_ub_.Next(rows.size(), 1);
    core_.Fill(total_, 0.0f);
    core_.Fill(mean_, 0.0f);
    for (const Range part : Split(g_.scores.cols, t_.cols)) {
      LoadScores(rows, part);
      core_.RowSum(column, n_);
      core_.Add(total_, total_, column);
      core_.Fill(s1_, 1.0f);
      core_.RowDot(mean_, s_, s1_, n_, s1_, FactorOfCounts(part));
    }
    core_.MaxScalar(total_, total_, kLeastSum);
    core_.Div(mean_, mean_, total_);
  }

  // n d_n of the scores n_ of a part.
  UbTile<float> ScoresTimesGradient(Range part) {
    const UbTile<float> d = d_ub_.Next(n_.rows(), n_.cols());
    const UbTile<std::int32_t> part_ids = part_ids_ub_.Next(ids_.rows(), ids_.cols());
    core_.AddScalar(part_ids, ids_, static_cast<std::int32_t>(-part.begin));
    core_.Fill(d, 0.0f);
    core_.Scatter(d, part_ids, e_);
    if (g_.counts != nullptr) AddLossGradient(core_, d, n_, FactorOfCounts(part), total_, mean_, s_, s1_);
    return d;
  }

  V& core_;
  const RouteGradOperands& g_;
  const RowwiseTiling& t_;
  Ring<Buffer::kUB, float> n_ub_, d_ub_, s_ub_, s1_ub_, c_ub_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
  Ring<Buffer::kUB, float> column_ub_, sum_ub_, total_ub_, mean_ub_, staging_ub_;
  Ring<Buffer::kUB, float> e_ub_, w_ub_, v_ub_;
  Ring<Buffer::kUB, std::int32_t> ids_ub_, part_ids_ub_;
  CountFactors<V> factors_;
  // Of the rows and the part at hand.
  UbTile<float> n_, s_, s1_, e_, total_, mean_;
  UbTile<std::int32_t> ids_;
};

template <VectorCore V>
void RouteGradPartsKernel(V& core, const RouteGradOperands& g, const RowwiseTiling& t) {
  RouteGradInParts<V>(core, g, t).Run();
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROUTE_PARTS_KERNEL_H_
