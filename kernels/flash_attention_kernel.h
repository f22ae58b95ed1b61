// The attention algorithm (RECT-FA, forward): out = softmax(scale * (Q K^T + Q_rope
// K_rope^T)) V, block by block of keys.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/attention_scores_kernel.h"
#include "kernels/operand_kernel.h"
#include "kernels/rotate_kernel.h"
#include "npu_model/core.h"
#include "npu_model/pipeline.h"
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

// Each core walks its steps through four stages; `t.depth` sets how far neighbouring steps overlap.
//   scores   Cube    S = Q K^T, then S += Q_rope K_rope^T in the same L0C tile
//   softmax  Vector  P = exp(scale * S - m), m and l updated
//   product  Cube    PV = P V
//   rescale  Vector  O = O * alpha + PV, at first O = PV; after the last block of keys out = O / l and lse = m + ln(l)
template <class T, AiCore Core>
void FlashAttentionKernel(Core& core, const FlashAttentionOperands& g, const FlashAttentionShape& s,
                          const FlashAttentionTiling& t, const FlashAttentionSchedule& schedule) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  constexpr std::size_t kMaxLanes = 2;
  const std::size_t lane_count = core.vectors().size();
  CUBIST_CHECK(lane_count <= kMaxLanes, "more Vector cores per Cube core than the kernel splits rows over");
  const Split lane_rows(t.m, CeilDiv(t.m, static_cast<std::int64_t>(lane_count)));
  const Split v_cols = AtLeastOnce(Split(s.d_v, t.v_cols(s.d_v)));
  const bool rope = s.d_rope > 0;
  const std::int64_t group = s.heads / std::max<std::int64_t>(s.kv_heads, 1);

  Ring<Buffer::kL1, T> q_l1(core, "q_l1", t.m, s.d_qk, t.q_stages, Role::kA);
  Ring<Buffer::kL1, T> q_rope_l1(core, "q_rope_l1", t.m, s.d_rope, t.q_stages, Role::kA);
  Ring<Buffer::kL1, T> k_l1(core, "k_l1", s.d_qk, t.n, t.kv_stages, Role::kB);
  Ring<Buffer::kL1, T> k_rope_l1(core, "k_rope_l1", s.d_rope, t.n, t.kv_stages, Role::kB);
  Ring<Buffer::kL1, T> v_l1(core, "v_l1", t.n, s.d_v, t.kv_stages, Role::kB);
  Ring<Buffer::kL1, T> p_l1(core, "p_l1", t.m, t.n, t.hand_over_stages(), Role::kA);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", t.k0, std::max(t.n, t.v_cols(s.d_v)), t.l0_stages, Role::kB);
  Ring<Buffer::kL0C, float> s_l0(core, "s_l0", t.m, t.n, t.l0c_stages);
  Ring<Buffer::kL0C, float> pv_l0(core, "pv_l0", t.m, t.v_cols(s.d_v), t.l0c_stages);
  Ring<Buffer::kHandOver, float> s_sent(core, "s_sent", t.m, t.n, t.hand_over_stages());
  Ring<Buffer::kHandOver, float> pv_sent(core, "pv_sent", t.m, s.d_v, t.hand_over_stages());
  std::array<std::optional<FlashAttentionLane<T, Vector>>, kMaxLanes> lanes;
  for (std::size_t i = 0; i < lane_count; ++i) lanes[i].emplace(core.vectors()[i], lane_rows[0].size(), s, t);

  struct Step : FlashAttentionStep {
    HandOverTile<float> s, pv;
    L1Tile<T> p;
    struct Rows {
      UbTile<float> m, l, alpha;
    };
    std::array<Rows, kMaxLanes> kept;
  };

  // acc (+)= a b, along k in steps of t.k0.
  const auto multiply = [&](L0CTile<float> acc, L1Tile<T> a1, L1Tile<T> b1, Accumulate accumulate) {
    for (const Range k0 : AtLeastOnce(Split(a1.cols(), t.k0))) {
      const L0ATile<T> a0 = a_l0.Next(a1.rows(), k0.size());
      const L0BTile<T> b0 = b_l0.Next(k0.size(), b1.cols());
      core.Load(a0, a1.Cols(k0));
      core.Load(b0, b1.Rows(k0));
      core.Mmad(acc, a0, b0, accumulate);
      accumulate = Accumulate::kYes;
    }
  };
  // For every Vector core that has some of `rows` of a block of queries: body(its number, those rows as rows of its
  // tiles, those rows as rows of the block).
  const auto for_each_lane = [&](Range rows, auto&& body) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      const Range lane = lane_rows[static_cast<std::int64_t>(i)];
      const Range part{std::max(lane.begin, rows.begin), std::min(lane.end, rows.end)};
      if (!part.empty()) body(i, part.From(lane.begin), part);
    }
  };

  bool packed = t.pack_kv, alone = false;  // Where keys are read, and whether rows are walked again.
  L1Tile<T> q1, q_rope1;
  // The rope part of Q: as it is, or turned to its positions, once for all keys.
  const auto load_rope_queries = [&](Step& step) {
    if (!s.rotate) return core.Load(q_rope1, g.QueryRows(*g.q_rope, step, step.task.q));
    for_each_lane({0, step.task.q.size()}, [&](std::size_t i, Range, Range part) {
      auto& lane = *lanes[i];
      for (const Range rows : Split(part, kRotateRows)) {
        const Range queries = rows.From(-step.task.q.begin);
        const UbTile<float> turned =
            lane.rotator.Rotate(g.rotate, g.QueryRows(*g.q_rope, step, queries),
                                g.rotate.At(step.sequence.batch, queries, step.sequence.q_begin));
        const UbTile<T> narrow = lane.turned_ub.Next(rows.size(), s.d_rope);
        lane.core.Cast(narrow, turned);
        lane.core.Move(q_rope1.Rows(rows), narrow);
      }
    });
  };
  const auto scores = [&](Step& step) {
    const std::int64_t kv_head = step.task.head / group;
    if (step.first) {
      q1 = q_l1.Next(step.task.q.size(), s.d_qk);
      core.Load(q1, g.QueryRows(*g.q, step, step.task.q));
      if (rope) {
        q_rope1 = q_rope_l1.Next(step.task.q.size(), s.d_rope);
        load_rope_queries(step);
      }
    }
    const Range rows = step.rows.From(step.task.q.begin);
    const L1Tile<T> k1 = k_l1.Next(s.d_qk, step.kv.size());
    LoadOperand(core, k1, g.KeysTransposed(packed, step.sequence, kv_head, step.kv));
    const L0CTile<float> scored = s_l0.Next(rows.size(), step.kv.size());
    multiply(scored, q1.Rows(rows), k1, Accumulate::kNo);
    if (rope) {
      const std::int64_t rope_head = s.rope_heads == 1 ? 0 : kv_head;
      const L1Tile<T> k_rope1 = k_rope_l1.Next(s.d_rope, step.kv.size());
      LoadOperand(core, k_rope1, g.RopeKeysTransposed(packed, step.sequence, rope_head, step.kv));
      multiply(scored, q_rope1.Rows(rows), k_rope1, Accumulate::kYes);
    }
    step.s = s_sent.Next(rows.size(), step.kv.size());
    core.Send(step.s, scored);
  };

  // What is done to the scores of `queries` before the softmax; returns the scale that is left for it.
  const auto finish_scores = [&](auto& lane, const Step& step, UbTile<float> scored, Range queries) {
    const std::int64_t rows = scored.rows(), keys = scored.cols();
    float scale = g.scale;
    if (s.soft_cap) {
      SoftCap(lane.core, scored, lane.scratch_ub.Next(rows, keys), scale, g.soft_cap);
      scale = 1;
    }
    if (s.alibi) {
      const std::int64_t first = queries.begin + g.alibi.OffsetOf(step.sequence) - step.kv.begin;
      lane.core.AddAlibi(scored, lane.scratch_ub.Next(rows, keys), scale, lane.slope, first, g.alibi.root);
      scale = 1;
    }
    if (s.bias) {
      const UbTile<float> bias = lane.bias_ub.Next(rows, keys);
      lane.core.Load(bias, MatrixOf(*g.bias, step.task.sequence, step.task.head).Block(queries, step.kv));
      if (scale != 1) lane.core.MulScalar(scored, scored, scale);
      lane.core.Add(scored, scored, bias);
      scale = 1;
    }
    if (s.mask) {
      const UbTile<std::uint8_t> flags = lane.flags_ub.Next(rows, keys);
      lane.core.Load(flags, MatrixOf(*g.mask, step.task.sequence, step.task.head).Block(queries, step.kv));
      scale = ScaleForMask(lane.core, scored, scale);
      lane.core.MaskWhere(scored, flags, MaskedScore(scale));
    }
    return MaskByBand(lane.core, scored, step.sequence, queries, step.kv, scale);
  };

  const auto softmax = [&](Step& step) {
    if (step.first) {
      for_each_lane({0, step.task.q.size()}, [&](std::size_t i, Range rows, Range) {
        auto& lane = *lanes[i];
        if (s.alibi) {
          const UbTile<float> slopes = lane.slopes_ub.Next(1, s.heads);
          const std::int64_t sequence = step.task.sequence;
          lane.core.Load(slopes, MatrixOf(*g.alibi.slopes).Rows({sequence, sequence + 1}));
          lane.slope = lane.core.ReadScalar(slopes, step.task.head);
        }
        lane.taken = 0;
        lane.NewMaximum(0, rows.size());
        lane.l = lane.l_ub.Next(rows.size(), 1);
        // A sink is a key of this score and no value.
        constexpr float kLowest = std::numeric_limits<float>::lowest();
        const bool sunk = s.sinks && step.task.split == 0;
        const float sink = sunk ? lane.core.ReadScalar(lane.sinks, step.task.head) : kLowest;
        lane.core.Fill(lane.m[0], sink < kLowest ? kLowest : sink);
        lane.core.Fill(lane.l, sink <= kLowest ? 0.0f : 1.0f);
      });
    }
    const Range in_block = step.rows.From(step.task.q.begin);
    step.p = p_l1.Next(in_block.size(), step.kv.size());
    for_each_lane(in_block, [&](std::size_t i, Range rows, Range part) {
      auto& lane = *lanes[i];
      const UbTile<float> scored = lane.s_ub.Next(rows.size(), step.kv.size());
      lane.core.Receive(scored, step.s.Rows(part.From(in_block.begin)));
      const Range queries = part.From(-step.task.q.begin);
      const float scale = finish_scores(lane, step, scored, queries);
      const UbTile<T> p = lane.p_ub.Next(rows.size(), step.kv.size());
      lane.NewMaximum(step.round + 1, lane.l.rows());
      const UbTile<float> m = lane.Maximum(step.round, rows), m_new = lane.Maximum(step.round + 1, rows);
      step.kept[i] = {m_new, lane.l.Rows(rows), m};
      lane.core.SoftmaxStep(p, scored, m_new, m, step.kept[i].l, scale);
      if (s.dropout) {
        const UbTile<std::uint8_t> dropped = lane.flags_ub.Next(rows.size(), step.kv.size());
        lane.core.DropFlags(dropped, g.dropout, g.DropoutRow(step, queries), step.kv.begin,
                            /*transposed=*/false);
        lane.core.MaskWhere(p, dropped, 0.0f);
      }
      lane.core.Move(step.p.Rows(part.From(in_block.begin)), p);
    });
  };

  // A hidden key has weight 0, and 0 * NaN is NaN. Rows of o that it may have spoilt are walked again, those that see the
  // same keys together; not those whose weights are NaN.
  std::vector<FlashAttentionSchedule::Task> spoilt;
  const auto see_the_same = [&](const FlashAttentionStep& step, Range queries) {
    const Range keys = schedule.KeysOf(step.task);
    const AttentionBand& band = step.sequence.band;
    return (!s.mask || g.mask->strides[2] == 0) && band.Seen(queries, keys) == band.SeenByAll(queries, keys);
  };
  const auto note_spoilt = [&](auto& lane, UbTile<float> o, UbTile<float> l, const FlashAttentionStep& step,
                               Range queries) {
    const UbTile<float> sums = lane.sums_ub.Next(o.rows(), 1);
    lane.core.RowSum(sums, o);
    if (!AnyNaN(lane.core, sums)) return;
    lane.core.RowSum(sums, o);
    const std::size_t before = spoilt.size();
    for (std::int64_t i = 0; i < o.rows(); ++i) {
      const auto is_nan = [&](UbTile<float> x) {
        return std::isnan(lane.core.ReadScalar(x.Rows({i, i + 1}), 0));
      };
      if (!is_nan(sums) || is_nan(l)) continue;
      const Range row{queries.begin + i, queries.begin + i + 1};
      if (spoilt.size() > before && spoilt.back().q.end == row.begin &&
          see_the_same(step, {spoilt.back().q.begin, row.end})) {
        spoilt.back().q.end = row.end;
        continue;
      }
      spoilt.push_back(step.task);
      spoilt.back().q = row;
    }
  };

  const auto product = [&](Step& step) {
    const L1Tile<T> v1 = v_l1.Next(step.kv.size(), s.d_v);
    LoadOperand(core, v1, g.Values(packed, step.sequence, step.task.head / group, step.kv));
    step.pv = pv_sent.Next(step.rows.size(), s.d_v);
    for (const Range cols : v_cols) {
      const L0CTile<float> pv = pv_l0.Next(step.rows.size(), cols.size());
      multiply(pv, step.p, v1.Cols(cols), Accumulate::kNo);
      core.Send(step.pv.Cols(cols), pv);
    }
  };

  const auto rescale = [&](Step& step) {
    if (step.first) {
      for_each_lane({0, step.task.q.size()}, [&](std::size_t i, Range rows, Range) {
        lanes[i]->o = lanes[i]->o_ub.Next(rows.size(), s.d_v);
      });
    }
    const Range in_block = step.rows.From(step.task.q.begin);
    for_each_lane(in_block, [&](std::size_t i, Range rows, Range part) {
      auto& lane = *lanes[i];
      const auto& kept = step.kept[i];
      const UbTile<float> o = lane.o.Rows(rows);
      const HandOverTile<float> sent = step.pv.Rows(part.From(in_block.begin));
      for (const Range cols : v_cols) {
        if (step.round == 0) {  // As if o had been 0.
          lane.core.Receive(o.Cols(cols), sent.Cols(cols));
          continue;
        }
        const UbTile<float> pv = lane.pv_ub.Next(rows.size(), cols.size());
        lane.core.Receive(pv, sent.Cols(cols));
        lane.core.MulAdd(o.Cols(cols), kept.alpha, pv);
      }
      if (!step.last) return;

      const Range queries = part.From(-step.task.q.begin);
      if (s.hides() && s.d_v > 0 && !alone) note_spoilt(lane, o, kept.l, step, queries);
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
    });
  };

  if (s.sinks) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      lanes[i]->sinks = lanes[i]->sinks_ub.Next(1, s.heads);
      lanes[i]->core.Load(lanes[i]->sinks, MatrixOf(*g.sinks));
    }
  }
  FlashAttentionSteps steps(schedule, t, core.index(), core.count());
  Pipeline<Step>(
      t.depth, [&](Step& step) { return steps.Next(step); }, scores, softmax, product, rescale);
  if (spoilt.empty()) return;

  packed = false, alone = true;
  const auto seen = [&](const FlashAttentionSchedule::Task& task, const AttentionSequence&, Range keys) {
    if (!s.mask) return keys;
    auto& lane = *lanes[0];
    const UbTile<std::uint8_t> flags = lane.flags_ub.Next(1, keys.size());
    const UbTile<float> hidden = lane.s_ub.Next(1, keys.size());
    lane.core.Load(flags,
                   MatrixOf(*g.mask, task.sequence, task.head).Block({task.q.begin, task.q.begin + 1}, keys));
    lane.core.Cast(hidden, flags);
    const auto is_hidden = [&](std::int64_t j) { return lane.core.ReadScalar(hidden, j) != 0; };
    std::int64_t begin = 0, end;
    while (begin < keys.size() && is_hidden(begin)) ++begin;
    for (end = begin; end < keys.size() && !is_hidden(end);) ++end;
    return Range{keys.begin + begin, keys.begin + end};
  };
  FlashAttentionRowSteps rows(schedule, t, spoilt);
  Pipeline<Step>(
      /*depth=*/0, [&](Step& step) { return rows.Next(step, seen); }, scores, softmax, product, rescale);
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_
