// The tensors of attention's forward pass, and what Vector cores do to their rows of scores and outputs.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention_scores_kernel.h"
#include "kernels/operand_kernel.h"
#include "kernels/rotate_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {

// The (b, n, s, d) tensors of a call. K and V are read as Mmad operands: K^T (d, Skv) and V (Skv, d).
struct FlashAttentionOperands : ScoreOperands {
  const GmTensor *q = nullptr, *q_rope = nullptr;
  const GmTensor *k = nullptr, *k_rope = nullptr, *v = nullptr;
  PackedGm k_packed, k_rope_packed, v_packed;  // One matrix per (b, KV head), where t.pack_kv.
  const GmTensor *out = nullptr, *lse = nullptr;
  // Where keys are split, (split, b * n, s, d) and (split, b * n, s, 1): outputs of the parts, to be combined.
  const GmTensor *part_out = nullptr, *part_lse = nullptr;
  const GmTensor* sinks = nullptr;  // (1, 1, 1, n)
  RotateOperands rotate;            // Of the queries' rope part; k_rope is turned already. Where s.rotate.
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

  // Rows of the output, or of a part's.
  Gm Output(const FlashAttentionStep& step, Range rows) const {
    return part_out != nullptr ? Part(*part_out, step).Rows(rows) : QueryRows(*out, step, rows);
  }
  Gm Statistics(const FlashAttentionStep& step, Range rows) const {
    return part_lse != nullptr ? Part(*part_lse, step).Rows(rows) : QueryRows(*lse, step, rows);
  }
  // The first of `rows` among all rows of weights.
  std::int64_t DropoutRow(const FlashAttentionStep& step, Range rows) const {
    return (step.sequence.batch * q->sizes[1] + step.task.head) * q->sizes[2] + step.sequence.q_begin +
           rows.begin;
  }
  // Rows of the step's sequence.
  static Gm QueryRows(const GmTensor& tensor, const FlashAttentionStep& step, Range rows) {
    return MatrixOf(tensor, step.sequence.batch, step.task.head).Rows(rows.From(-step.sequence.q_begin));
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
  Gm Part(const GmTensor& parts, const FlashAttentionStep& step) const {
    return MatrixOf(parts, step.task.split, step.task.sequence * q->sizes[1] + step.task.head);
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
        scratch_ub(core, "scratch_ub", s.soft_cap || s.alibi ? rows : 0, t.n, 1),
        flags_ub(core, "flags_ub", s.mask || s.dropout ? rows : 0, t.n, t.ub_stages),
        sums_ub(core, "sums_ub", s.hides() ? rows : 0, 1, 1),
        sinks_ub(core, "sinks_ub", 1, s.sinks ? s.heads : 0, 1),
        slopes_ub(core, "slopes_ub", 1, s.alibi ? s.heads : 0, 1),
        rotator(core, s.rotate ? s.d_rope : 0),
        turned_ub(core, "turned_ub", kRotateRows, s.rotate ? s.d_rope : 0, 1) {}

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
  Ring<Buffer::kUB, float> pv_ub, o_ub, m_ub, l_ub, bias_ub, scratch_ub;
  Ring<Buffer::kUB, std::uint8_t> flags_ub;
  Ring<Buffer::kUB, float> sums_ub, sinks_ub, slopes_ub;
  Rotator<V> rotator;
  Ring<Buffer::kUB, T> turned_ub;
  UbTile<float> sinks;
  float slope = 0;  // Of the block of queries in the softmax stage.
  // Of the block of queries in the softmax stage (m, l) and in the rescale stage (o).
  std::array<UbTile<float>, 2 * FlashAttentionTiling::kMaxDepth + 2> m;
  UbTile<float> l, o;
};

// The rope parts of rows `part` of a block of queries, turned to their positions, into those rows of `q_rope`: once for all
// keys.
template <class T, VectorCore V>
void RotateQueries(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                   const FlashAttentionStep& step, Range part, L1Tile<T> q_rope) {
  for (const Range rows : Split(part, kRotateRows)) {
    const Range queries = rows.From(-step.task.q.begin);
    const UbTile<float> turned =
        lane.rotator.Rotate(g.rotate, g.QueryRows(*g.q_rope, step, queries),
                            g.rotate.At(step.sequence.batch, queries, step.sequence.q_begin));
    const UbTile<T> narrow = lane.turned_ub.Next(rows.size(), q_rope.cols());
    lane.core.Cast(narrow, turned);
    lane.core.Move(q_rope.Rows(rows), narrow);
  }
}

// A block of `rows` queries begins: no key has been seen yet but a sink, which is a key of its score and no value.
template <class T, VectorCore V>
void BeginRows(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g, const FlashAttentionShape& s,
               const FlashAttentionStep& step, std::int64_t rows) {
  if (s.alibi) {
    const UbTile<float> slopes = lane.slopes_ub.Next(1, s.heads);
    const std::int64_t sequence = step.task.sequence;
    lane.core.Load(slopes, MatrixOf(*g.alibi.slopes).Rows({sequence, sequence + 1}));
    lane.slope = lane.core.ReadScalar(slopes, step.task.head);
  }
  lane.taken = 0;
  lane.NewMaximum(0, rows);
  lane.l = lane.l_ub.Next(rows, 1);
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const bool sunk = s.sinks && step.task.split == 0;
  const float sink = sunk ? lane.core.ReadScalar(lane.sinks, step.task.head) : kLowest;
  lane.core.Fill(lane.m[0], sink < kLowest ? kLowest : sink);
  lane.core.Fill(lane.l, sink <= kLowest ? 0.0f : 1.0f);
}

// What is done to the scores of `queries` before the softmax; returns the scale that is left for it.
template <class T, VectorCore V>
float FinishScores(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g,
                   const FlashAttentionShape& s, const FlashAttentionStep& step, UbTile<float> scored,
                   Range queries) {
  auto& core = lane.core;
  const std::int64_t rows = scored.rows(), keys = scored.cols();
  float scale = g.scale;
  if (s.soft_cap) {
    SoftCap(core, scored, lane.scratch_ub.Next(rows, keys), scale, g.soft_cap);
    scale = 1;
  }
  if (s.alibi) {
    const std::int64_t first = queries.begin + g.alibi.OffsetOf(step.sequence) - step.kv.begin;
    core.AddAlibi(scored, lane.scratch_ub.Next(rows, keys), scale, lane.slope, first, g.alibi.root);
    scale = 1;
  }
  if (s.bias) {
    const UbTile<float> bias = lane.bias_ub.Next(rows, keys);
    core.Load(bias, MatrixOf(*g.bias, step.task.sequence, step.task.head).Block(queries, step.kv));
    if (scale != 1) core.MulScalar(scored, scored, scale);
    core.Add(scored, scored, bias);
    scale = 1;
  }
  if (s.mask) {
    const UbTile<std::uint8_t> flags = lane.flags_ub.Next(rows, keys);
    core.Load(flags, MatrixOf(*g.mask, step.task.sequence, step.task.head).Block(queries, step.kv));
    scale = ScaleForMask(core, scored, scale);
    core.MaskWhere(scored, flags, MaskedScore(scale));
  }
  return MaskByBand(core, scored, step.sequence, queries, step.kv, scale);
}

// All keys of `queries` have been seen: out = o / l and lse = m + ln(l).
template <class T, VectorCore V>
void FinishRows(FlashAttentionLane<T, V>& lane, const FlashAttentionOperands& g, const FlashAttentionShape& s,
                const FlashAttentionStep& step, Range queries, UbTile<float> o, const StepRows& kept) {
  if (g.lse != nullptr || g.part_lse != nullptr) {  // Matrices of one column.
    lane.core.Ln(kept.alpha, kept.l);
    lane.core.Add(kept.m, kept.m, kept.alpha);
    lane.core.Store(g.Statistics(step, queries), kept.m);
  }
  // A row that saw no key has l = 0 and o = 0; any other has l >= 1.
  lane.core.MaxScalar(kept.l, kept.l, std::numeric_limits<float>::min());
  lane.core.Div(o, o, kept.l);
  if (s.dropout) lane.core.MulScalar(o, o, g.dropout_factor);
  lane.core.Store(g.Output(step, queries), o);
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
  const auto see_the_same = [&](Range rows) {
    return (!s.mask || g.mask->strides[2] == 0) && band.Seen(rows, keys) == band.SeenByAll(rows, keys);
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
                  const FlashAttentionSchedule::Task& task, Range keys) {
  const UbTile<std::uint8_t> flags = lane.flags_ub.Next(1, keys.size());
  const UbTile<float> hidden = lane.s_ub.Next(1, keys.size());
  lane.core.Load(flags,
                 MatrixOf(*g.mask, task.sequence, task.head).Block({task.q.begin, task.q.begin + 1}, keys));
  lane.core.Cast(hidden, flags);
  const auto is_hidden = [&](std::int64_t j) { return lane.core.ReadScalar(hidden, j) != 0; };
  std::int64_t begin = 0, end;
  while (begin < keys.size() && is_hidden(begin)) ++begin;
  for (end = begin; end < keys.size() && !is_hidden(end);) ++end;
  return {keys.begin + begin, keys.begin + end};
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_LANE_KERNEL_H_
