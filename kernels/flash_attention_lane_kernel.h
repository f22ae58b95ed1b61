// The tensors of attention's forward pass, and what Vector cores do to their rows of scores and outputs.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention_scores_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {

// Rows of a block of queries that lie one behind the other in a (b, n, s, d) tensor: positions of a head, or, where heads
// are folded (see AttentionBand), heads of a position.
struct QueryRun {
  Range part;  // Among the rows asked for.
  Range heads, positions;

  // `first` is the tensor's row of position 0.
  Gm Of(const GmTensor& t, std::int64_t b, std::int64_t first = 0) const {
    const std::int64_t offset =
        b * t.strides[0] + heads.begin * t.strides[1] + (first + positions.begin) * t.strides[2];
    return {&t, offset, part.size(), t.sizes[3], t.strides[heads.size() > 1 ? 1 : 2], t.strides[3]};
  }
};

// body(run) for the runs that `rows` of a head of a sequence consist of.
template <class Body>
void ForEachRun(const AttentionSequence& sequence, std::int64_t head, Range rows, Body&& body) {
  const std::int64_t fold = sequence.band.fold;
  if (fold == 1) {
    if (!rows.empty()) body(QueryRun{{0, rows.size()}, {head, head + 1}, rows});
    return;
  }
  for (std::int64_t begin = rows.begin; begin < rows.end;) {
    const std::int64_t position = begin / fold, end = std::min((position + 1) * fold, rows.end);
    const Range heads = Range{begin, end}.From((position - head) * fold);
    body(QueryRun{Range{begin, end}.From(rows.begin), heads, {position, position + 1}});
    begin = end;
  }
}
template <class Body>
void ForEachRun(const FlashAttentionStep& step, Range rows, Body&& body) {
  ForEachRun(step.sequence, step.task.head, rows, body);
}

// The (b, n, s, d) tensors of a call. K and V are read as Mmad operands: K^T (d, Skv) and V (Skv, d).
struct FlashAttentionOperands : ScoreOperands {
  const GmTensor *q = nullptr, *q_rope = nullptr;
  const GmTensor *k = nullptr, *k_rope = nullptr, *v = nullptr;
  PackedGm k_packed, k_rope_packed, v_packed;  // One matrix per (b, KV head), where t.pack_kv.
  const GmTensor *out = nullptr, *lse = nullptr;
  // Where keys are split, (1, head, rows of all parts, d) and (.., 1): outputs of the parts, to be combined.
  const GmTensor *part_out = nullptr, *part_lse = nullptr;
  const GmTensor* sinks = nullptr;  // (1, 1, 1, n)
  // Keys `kv` of the step's sequence, transposed, and their values, of one KV head.
  Operand KeysTransposed(bool is_packed, const AttentionSequence& q, std::int64_t h, Range kv) const {
    return Transposed(is_packed, k, k_packed, q, h, kv);
  }
  Operand RopeKeysTransposed(bool is_packed, const AttentionSequence& q, std::int64_t h, Range kv) const {
    return Transposed(is_packed, k_rope, k_rope_packed, q, h, kv);
  }
  Operand Values(bool is_packed, const AttentionSequence& q, std::int64_t h, Range kv) const {
    if (!is_packed) return {MatrixOf(*v, q.batch, h).Rows(kv.From(-q.kv_begin)), {}, false};
    const Range packed = kv.From(-q.packed_begin);
    return {{}, v_packed.Matrix(q.batch * v->sizes[1] + h).Block(packed, {0, v->sizes[3]}), true};
  }

  // Rows of the step's sequence of q or q_rope, into L1.
  template <class Core, class T>
  static void LoadQueries(Core& core, L1Tile<T> dst, const GmTensor& source, const FlashAttentionStep& step,
                          Range rows) {
    ForEachRun(step, rows, [&](const QueryRun& run) {
      core.Load(dst.Rows(run.part), run.Of(source, step.sequence.batch, step.sequence.q_begin));
    });
  }
  // Stores rows of the output, or of a part's.
  template <VectorCore V>
  void StoreOutput(V& core, const FlashAttentionStep& step, Range rows, UbTile<float> o) const {
    if (step.parts > 1) return core.Store(Part(*part_out, step, rows), o);
    ForEachRun(step, rows, [&](const QueryRun& run) {
      core.Store(run.Of(*out, step.sequence.batch, step.sequence.q_begin), o.Rows(run.part));
    });
  }
  bool wants_statistics(const FlashAttentionStep& step) const { return step.parts > 1 || lse != nullptr; }
  template <VectorCore V>
  void StoreStatistics(V& core, const FlashAttentionStep& step, Range rows, UbTile<float> x) const {
    if (step.parts > 1) return core.Store(Part(*part_lse, step, rows), x);
    ForEachRun(step, rows, [&](const QueryRun& run) {
      core.Store(run.Of(*lse, step.sequence.batch, step.sequence.q_begin), x.Rows(run.part));
    });
  }
  // A position of a head among all rows of weights.
  std::int64_t DropoutRow(const FlashAttentionStep& step, std::int64_t head, std::int64_t position) const {
    return (step.sequence.batch * q->sizes[1] + head) * q->sizes[2] + step.sequence.q_begin + position;
  }

 private:
  static Operand Transposed(bool is_packed, const GmTensor* keys, const PackedGm& packed,
                            const AttentionSequence& q, std::int64_t h, Range kv) {
    const Range d{0, keys->sizes[3]};
    if (!is_packed) {
      return {MatrixOf(*keys, q.batch, h).Rows(kv.From(-q.kv_begin)).Transposed(), {}, false};
    }
    return {{}, packed.Matrix(q.batch * keys->sizes[1] + h).Block(d, kv.From(-q.packed_begin)), true};
  }
  static Gm Part(const GmTensor& parts, const FlashAttentionStep& step, Range rows) {
    return MatrixOf(parts, 0, step.task.head).Rows(rows.From(-step.part_row));
  }
};

// What the softmax stage leaves to the rescale stage: m and l of the step's rows, and the factor alpha of their outputs.
struct StepRows {
  UbTile<float> m, l, alpha;
};

// What a Vector core keeps of its rows of a block of queries: the output o and the denominator l so far, and the
// running maximum. A step reads the maximum of its round and writes that of the next; what it read then holds the
// factor alpha of the rescale stage. Strips of rows go their own number of rounds, over the same tiles.
template <class T, VectorCore V>
struct FlashAttentionLane {
  FlashAttentionLane(V& vector, std::int64_t rows, const FlashAttentionShape& s,
                     const FlashAttentionTiling& t)
      : core(vector),
        rounds(t.rounds_kept()),
        s_ub(core, "s_ub", rows, t.n, t.s_stages),
        p_ub(core, "p_ub", rows, t.n, t.ub_stages),
        pv_ub(core, "pv_ub", rows, t.v_cols(s.d_v), t.ub_stages),
        o_ub(core, "o_ub", rows, s.d_v, t.ub_stages),
        m_ub(core, "m_ub", rows, 1, t.m_stages()),
        l_ub(core, "l_ub", rows, 1, t.l_stages()),
        bias_ub(core, "bias_ub", s.bias ? rows : 0, t.n, t.ub_stages),
        scratch_ub(core, "scratch_ub", s.score_scratch() > 0 ? rows : 0, t.n, std::max(s.score_scratch(), 1)),
        distances_ub(core, "distances_ub", 1, s.alibi && s.folds() ? t.n : 0, 1),
        flags_ub(core, "flags_ub", s.mask || s.dropout ? rows : 0, t.n, t.ub_stages),
        sums_ub(core, "sums_ub", s.hides() ? rows : 0, 1, 1),
        sinks_ub(core, "sinks_ub", s.folds() ? rows : 1, s.sinks ? (s.folds() ? 1 : s.heads) : 0, 1),
        slopes_ub(core, "slopes_ub", s.folds() ? rows : 1, s.alibi ? (s.folds() ? 1 : s.heads) : 0, 1) {}

  // A block of queries of so many rows begins, or ends its round `round`: the tile of its maxima.
  void NewMaximum(std::int64_t round, std::int64_t rows) {
    if (round < rounds && round >= taken) m[static_cast<std::size_t>(taken++)] = m_ub.Next(rows, 1);
  }
  UbTile<float> Maximum(std::int64_t round, Range rows) const {
    return m[static_cast<std::size_t>(round % rounds)].Rows(rows);
  }

  V& core;
  std::int64_t rounds, taken = 0;  // Tiles of maxima that a block of queries uses in turn, and has.
  Ring<Buffer::kUB, float> s_ub;
  Ring<Buffer::kUB, T> p_ub;
  Ring<Buffer::kUB, float> pv_ub, o_ub, m_ub, l_ub, bias_ub, scratch_ub, distances_ub;
  Ring<Buffer::kUB, std::uint8_t> flags_ub;
  Ring<Buffer::kUB, float> sums_ub, sinks_ub, slopes_ub;
  UbTile<float> sinks;
  // Of the block of queries in the softmax stage; of each of its rows where heads are folded.
  float slope = 0;
  UbTile<float> slopes;
  // Of the block of queries in the softmax stage (m, l) and in the rescale stage (o).
  std::array<UbTile<float>, 2 * FlashAttentionTiling::kMaxDepth + 2> m;
  UbTile<float> l, o;
};

// The column of `per_head`, (.., n), that rows of folded heads ask for: x(row) = per_head(i, head of row).
template <VectorCore V>
void LoadPerHead(V& core, UbTile<float> x, const GmTensor& per_head, std::int64_t i,
                 const FlashAttentionStep& step, Range queries) {
  ForEachRun(step, queries, [&](const QueryRun& run) {
    core.Load(x.Rows(run.part),
              MatrixOf(per_head).Block({i, i + 1}, {run.heads.begin, run.heads.end}).Transposed());
  });
}

// BeginRows where heads are folded: slopes and sinks are those of each row's head.
template <class T, VectorCore V>
void BeginFoldedRows(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                     const FlashAttentionShape& s, const FlashAttentionStep& step, Range queries, bool sunk) {
  auto& core = lane.core;
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  if (s.alibi) {
    lane.slopes = lane.slopes_ub.Next(queries.size(), 1);
    LoadPerHead(core, lane.slopes, *g.alibi.slopes, step.task.sequence, step, queries);
  }
  core.Fill(lane.l, sunk ? 1.0f : 0.0f);
  if (!sunk) return core.Fill(lane.m[0], kLowest);
  LoadPerHead(core, lane.m[0], *g.sinks, 0, step, queries);
  core.MaxScalar(lane.m[0], lane.m[0], kLowest);
  const UbTile<float> none = lane.sinks_ub.Next(queries.size(), 1);
  core.Fill(none, 0.0f);
  core.SelectLe(lane.l, lane.m[0], kLowest, none, lane.l);
}

// A block of queries begins, of which `queries` are this lane's: no key has been seen yet but a sink, which is a key of
// its score and no value.
template <class T, VectorCore V>
void BeginRows(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g, const FlashAttentionShape& s,
               const FlashAttentionStep& step, Range queries) {
  const std::int64_t rows = queries.size();
  lane.taken = 0;
  lane.NewMaximum(0, rows);
  lane.l = lane.l_ub.Next(rows, 1);
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const bool sunk = s.sinks && step.task.split == 0;
  if (s.folds()) return BeginFoldedRows(lane, g, s, step, queries, sunk);
  if (s.alibi) {
    const UbTile<float> slopes = lane.slopes_ub.Next(1, s.heads);
    const std::int64_t sequence = step.task.sequence;
    lane.core.Load(slopes, MatrixOf(*g.alibi.slopes).Rows({sequence, sequence + 1}));
    lane.slope = lane.core.ReadScalar(slopes, step.task.head);
  }
  const float sink = sunk ? lane.core.ReadScalar(lane.sinks, step.task.head) : kLowest;
  lane.core.Fill(lane.m[0], sink < kLowest ? kLowest : sink);
  lane.core.Fill(lane.l, sink <= kLowest ? 0.0f : 1.0f);
}

// scored = scale * scored - slope * |i + offset - j|, the slope that of each row's head, `rows` of the lane's.
template <class T, VectorCore V>
void AddFoldedAlibi(FlashAttentionLane<T, V>& lane, const AlibiOperands& alibi,
                    const FlashAttentionStep& step, UbTile<float> scored, float scale, Range rows,
                    Range queries) {
  auto& core = lane.core;
  const UbTile<float> loss = lane.scratch_ub.Next(scored.rows(), scored.cols());
  core.Fill(loss, 1.0f);
  core.Mul(loss, loss, lane.slopes.Rows(rows));
  ForEachRun(step, queries, [&](const QueryRun& run) {
    const UbTile<float> distances = lane.distances_ub.Next(1, scored.cols());
    core.Distances(distances, run.positions.begin + alibi.OffsetOf(step.sequence) - step.kv.begin);
    if (alibi.root) core.Sqrt(distances, distances);
    core.Mul(loss.Rows(run.part), loss.Rows(run.part), distances);
  });
  core.MulScalar(scored, scored, scale);
  core.Sub(scored, scored, loss);
}

// What a (sequence, n, sq, skv) tensor has for `queries` and the step's keys.
template <class T, VectorCore V>
void LoadPairs(V& core, UbTile<T> x, const GmTensor& pairs, const FlashAttentionStep& step, Range queries) {
  ForEachRun(step, queries, [&](const QueryRun& run) {
    core.Load(x.Rows(run.part), run.Of(pairs, step.task.sequence).Cols(step.kv));
  });
}

// What is done to the scores of `queries`, rows `in_lane` of the lane's, before the softmax; returns the scale that is
// left for it.
template <class T, VectorCore V>
float FinishScores(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                   const FlashAttentionShape& s, const FlashAttentionStep& step, UbTile<float> scored,
                   Range in_lane, Range queries) {
  auto& core = lane.core;
  const std::int64_t rows = scored.rows(), keys = scored.cols();
  float scale = g.scale;
  if (s.soft_cap > 0) {
    const UbTile<float> scratch = lane.scratch_ub.Next(rows, keys);
    if (s.soft_cap == 1) {
      SoftCapCoarsely(core, scored, scratch, scale, g.soft_cap);
    } else {
      SoftCapFinely(core, scored, scratch, lane.scratch_ub.Next(rows, keys), scale, g.soft_cap);
    }
    scale = 1;
  }
  if (s.alibi && s.folds()) {
    AddFoldedAlibi(lane, g.alibi, step, scored, scale, in_lane, queries);
    scale = 1;
  } else if (s.alibi) {
    const std::int64_t first = queries.begin + g.alibi.OffsetOf(step.sequence) - step.kv.begin;
    core.AddAlibi(scored, lane.scratch_ub.Next(rows, keys), scale, lane.slope, first, g.alibi.root);
    scale = 1;
  }
  if (s.bias) {
    const UbTile<float> bias = lane.bias_ub.Next(rows, keys);
    LoadPairs(core, bias, *g.bias, step, queries);
    if (scale != 1) core.MulScalar(scored, scored, scale);
    core.Add(scored, scored, bias);
    scale = 1;
  }
  if (s.mask) {
    const UbTile<std::uint8_t> flags = lane.flags_ub.Next(rows, keys);
    LoadPairs(core, flags, *g.mask, step, queries);
    scale = ScaleForMask(core, scored, scale);
    core.MaskWhere(scored, flags, MaskedScore(scale));
  }
  return MaskByBand(core, scored, step.sequence, queries, step.kv, scale);
}

// Drops weights p of `queries` and the step's keys.
template <class T, VectorCore V>
void DropWeights(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                 const FlashAttentionStep& step, UbTile<T> p, Range queries) {
  const UbTile<std::uint8_t> dropped = lane.flags_ub.Next(p.rows(), p.cols());
  ForEachRun(step, queries, [&](const QueryRun& run) {
    // Rows of several heads follow each other where they are the only ones.
    const std::int64_t at_once = run.heads.size() == 1 || g.q->sizes[2] == 1 ? run.part.size() : 1;
    for (const Range rows : Split(run.part, at_once)) {
      const std::int64_t head = run.heads.begin + (run.heads.size() == 1 ? 0 : rows.begin - run.part.begin);
      lane.core.DropFlags(dropped.Rows(rows), g.dropout, g.DropoutRow(step, head, run.positions.begin),
                          step.kv.begin, /*transposed=*/false);
    }
  });
  lane.core.MaskWhere(p, dropped, 0.0f);
}

// o = o * (factor / l) row by row, of which l and factor have one element each; l is lost. To divide all of o takes a CPU seven
// times as long as to multiply it, an NPU twice. A row that saw no key has l = 0 and o = 0, any other l of 1 or more.
template <VectorCore V>
void DivideRows(V& core, UbTile<float> o, UbTile<float> l, UbTile<float> factor) {
  constexpr float kBelowAny = 0x1p-64f;
  core.MaxScalar(l, l, kBelowAny);
  core.Div(l, factor, l);
  core.Mul(o, o, l);
}

// All keys of `queries` have been seen: out = o / l, times the factor of weights that dropout keeps, and lse = m + ln(l).
template <class T, VectorCore V>
void FinishRows(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g, const FlashAttentionShape& s,
                const FlashAttentionStep& step, Range queries, UbTile<float> o, const StepRows& kept) {
  if (g.wants_statistics(step)) {  // Matrices of one column.
    lane.core.Ln(kept.alpha, kept.l);
    lane.core.Add(kept.m, kept.m, kept.alpha);
    g.StoreStatistics(lane.core, step, queries, kept.m);
  }
  lane.core.Fill(kept.alpha, s.dropout ? g.dropout_factor : 1.0f);
  DivideRows(lane.core, o, kept.l, kept.alpha);
  g.StoreOutput(lane.core, step, queries, o);
}

// A hidden key has weight 0, and 0 * NaN is NaN. Appends the rows of `o` that one of `keys` may have spoilt, to be walked
// again: those that see the same keys together, and not those whose sums of weights `l` are NaN. `o` are those of
// `queries`, the step is the last of theirs.
template <class T, VectorCore V>
void NoteSpoilt(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g, const FlashAttentionShape& s,
                Range keys, const FlashAttentionStep& step, Range queries, UbTile<float> o, UbTile<float> l,
                std::vector<FlashAttentionSchedule::Task>& spoilt) {
  const UbTile<float> sums = lane.sums_ub.Next(o.rows(), 1);
  lane.core.RowSum(sums, o);
  if (!AnyNaN(lane.core, sums)) return;
  lane.core.RowSum(sums, o);
  const auto is_nan = [&](UbTile<float> x, std::int64_t row) {
    return std::isnan(lane.core.ReadScalar(x.Rows({row, row + 1}), 0));
  };
  const AttentionBand& band = step.sequence.band;
  const bool one_mask = !s.mask || (g.mask->strides[2] == 0 && (!s.folds() || g.mask->strides[1] == 0));
  const auto see_the_same = [&](Range rows) {
    return one_mask && band.Seen(rows, keys) == band.SeenByAll(rows, keys);
  };
  const std::size_t before = spoilt.size();
  for (std::int64_t i = 0; i < o.rows(); ++i) {
    if (!is_nan(sums, i) || is_nan(l, i)) continue;
    const Range row{queries.begin + i, queries.begin + i + 1};
    if (spoilt.size() > before && spoilt.back().q.end == row.begin &&
        see_the_same({spoilt.back().q.begin, row.end})) {
      spoilt.back().q.end = row.end;
      continue;
    }
    spoilt.push_back(step.task);
    spoilt.back().q = row;
  }
}

// The first run of `keys` that the mask leaves to the first query of a task.
template <class T, VectorCore V>
Range UnmaskedRun(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                  const FlashAttentionSchedule::Task& task, const AttentionSequence& sequence, Range keys) {
  const UbTile<std::uint8_t> flags = lane.flags_ub.Next(1, keys.size());
  const UbTile<float> hidden = lane.s_ub.Next(1, keys.size());
  ForEachRun(sequence, task.head, {task.q.begin, task.q.begin + 1},
             [&](const QueryRun& row) { lane.core.Load(flags, row.Of(*g.mask, task.sequence).Cols(keys)); });
  lane.core.Cast(hidden, flags);
  const auto is_hidden = [&](std::int64_t j) { return lane.core.ReadScalar(hidden, j) != 0; };
  std::int64_t begin = 0, end;
  while (begin < keys.size() && is_hidden(begin)) ++begin;
  for (end = begin; end < keys.size() && !is_hidden(end);) ++end;
  return {keys.begin + begin, keys.begin + end};
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_
