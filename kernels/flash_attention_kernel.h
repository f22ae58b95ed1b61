// The attention algorithm (RECT-FA, forward): out = softmax(scale * (Q K^T + Q_rope
// K_rope^T)) V, block by block of keys.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/attention_mask_kernel.h"
#include "kernels/flash_attention_lane_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/pipeline.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {

// Each core walks its steps through four stages; `t.depth` sets how far neighbouring steps overlap.
//   scores   Cube    S = Q K^T, then S += Q_rope K_rope^T in the same L0C tile
//   softmax  Vector  P = exp(scale * S - m), m and l updated
//   product  Cube    PV = P V
//   rescale  Vector  O = O * alpha + PV, at first O = PV; after the last block of keys out = O / l and lse = m + ln(l)
template <class T, AiCore Core>
void FlashAttentionKernel(Core& core, const FlashAttentionOperands& g, const FlashAttentionShape& s,
                          const FlashAttentionTiling& t, const FlashAttentionSchedule& schedule) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  const std::size_t lane_count = core.vectors().size();
  const Split lane_rows(t.m, CeilDiv(t.m, static_cast<std::int64_t>(lane_count)));
  const Split v_cols = AtLeastOnce(Split(s.d_v, t.v_cols(s.d_v)));
  const bool rope = s.d_rope > 0;
  const std::int64_t group = s.heads / std::max<std::int64_t>(s.kv_heads, 1);

  Ring<Buffer::kL1, T> q_l1(core, "q_l1", t.m, s.d_qk, t.q_stages, Role::kAOnce);
  Ring<Buffer::kL1, T> q_rope_l1(core, "q_rope_l1", t.m, s.d_rope, t.q_stages, Role::kAOnce);
  const Role kv_role = t.kv_once ? Role::kBOnce : Role::kB;
  Ring<Buffer::kL1, T> k_l1(core, "k_l1", s.d_qk, t.n, t.k_stages(), kv_role,
                            t.v_from_k ? Role::kBTransposed : Role::kRows);
  Ring<Buffer::kL1, T> k_rope_l1(core, "k_rope_l1", s.d_rope, t.n, t.kv_stages, kv_role);
  Ring<Buffer::kL1, T> v_l1(core, "v_l1", t.v_from_k ? 0 : t.n, s.d_v, t.kv_stages, kv_role);
  Ring<Buffer::kL1, T> p_l1(core, "p_l1", t.m, t.n, t.hand_over_stages(), Role::kA);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", t.k0, std::max(t.n, t.v_cols(s.d_v)), t.l0_stages, Role::kB);
  Ring<Buffer::kL0C, float> s_l0(core, "s_l0", t.m, t.n, t.l0c_stages);
  Ring<Buffer::kL0C, float> pv_l0(core, "pv_l0", t.m, t.v_cols(s.d_v), t.l0c_stages);
  Ring<Buffer::kHandOver, float> s_sent(core, "s_sent", t.m, t.n, t.hand_over_stages());
  Ring<Buffer::kHandOver, float> pv_sent(core, "pv_sent", t.m, s.d_v, t.hand_over_stages());
  std::array<std::optional<FlashAttentionLane<T, Vector>>, kMaxVectorPerCube> lanes;
  for (std::size_t i = 0; i < lane_count; ++i) lanes[i].emplace(core.vectors()[i], lane_rows[0].size(), s, t);

  struct Step : FlashAttentionStep {
    HandOverTile<float> s, pv;
    L1Tile<T> k, p;
    std::array<StepRows, kMaxVectorPerCube> kept;
  };

  // acc (+)= a op(b), along k in steps of t.k0.
  const auto multiply = [&](L0CTile<float> acc, L1Tile<T> a1, L1Tile<T> b1, Accumulate accumulate,
                            Transpose turn_b = Transpose::kNo) {
    for (const Range k0 : AtLeastOnce(Split(a1.cols(), t.k0))) {
      const L0ATile<T> a0 = a_l0.Next(a1.rows(), k0.size());
      const L0BTile<T> b0 = b_l0.Next(k0.size(), acc.cols());
      core.Load(a0, a1.Cols(k0));
      core.Load(b0, turn_b == Transpose::kYes ? b1.Cols(k0) : b1.Rows(k0), turn_b);
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
  const auto scores = [&](Step& step) {
    const std::int64_t kv_head = step.task.head / group;
    if (step.first) {
      q1 = q_l1.Next(step.task.q.size(), s.d_qk);
      g.LoadQueries(core, q1, *g.q, step, step.task.q);
      if (rope) {
        q_rope1 = q_rope_l1.Next(step.task.q.size(), s.d_rope);
        g.LoadQueries(core, q_rope1, *g.q_rope, step, step.task.q);
      }
    }
    const Range rows = step.rows.From(step.task.q.begin);
    step.k = k_l1.Next(s.d_qk, step.kv.size());
    LoadOperand(core, step.k, g.KeysTransposed(packed, step.sequence, kv_head, step.kv));
    const L0CTile<float> scored = s_l0.Next(rows.size(), step.kv.size());
    multiply(scored, q1.Rows(rows), step.k, Accumulate::kNo);
    if (rope) {
      const std::int64_t rope_head = s.rope_heads == 1 ? 0 : kv_head;
      const L1Tile<T> k_rope1 = k_rope_l1.Next(s.d_rope, step.kv.size());
      LoadOperand(core, k_rope1, g.RopeKeysTransposed(packed, step.sequence, rope_head, step.kv));
      multiply(scored, q_rope1.Rows(rows), k_rope1, Accumulate::kYes);
    }
    step.s = s_sent.Next(rows.size(), step.kv.size());
    core.Send(step.s, scored);
  };

  const auto softmax = [&](Step& step) {
    if (step.first) {
      for_each_lane({0, step.task.q.size()}, [&](std::size_t i, Range, Range part) {
        BeginRows(*lanes[i], g, s, step, part.From(-step.task.q.begin));
      });
    }
    const Range in_block = step.rows.From(step.task.q.begin);
    step.p = p_l1.Next(in_block.size(), step.kv.size());
    for_each_lane(in_block, [&](std::size_t i, Range rows, Range part) {
      auto& lane = *lanes[i];
      const UbTile<float> scored = lane.s_ub.Next(rows.size(), step.kv.size());
      lane.core.Receive(scored, step.s.Rows(part.From(in_block.begin)));
      const Range queries = part.From(-step.task.q.begin);
      const float scale = FinishScores(lane, g, s, step, scored, rows, queries);
      const UbTile<T> p = lane.p_ub.Next(rows.size(), step.kv.size());
      lane.NewMaximum(step.round + 1, lane.l.rows());
      const UbTile<float> m = lane.Maximum(step.round, rows), m_new = lane.Maximum(step.round + 1, rows);
      step.kept[i] = {m_new, lane.l.Rows(rows), m};
      if (step.kv.empty()) {  // As the softmax of nothing has no maximum.
        lane.core.MulScalar(m_new, m, 1.0f);
        lane.core.Fill(m, 1.0f);
      } else {
        lane.core.SoftmaxStep(p, scored, m_new, m, step.kept[i].l, scale);
      }
      if (s.dropout) DropWeights(lane, g, step, p, queries);
      lane.core.Move(step.p.Rows(part.From(in_block.begin)), p);
    });
  };

  std::vector<FlashAttentionSchedule::Task> spoilt;  // Rows to walk again.
  const auto product = [&](Step& step) {
    L1Tile<T> v1;
    if (!t.v_from_k) {
      v1 = v_l1.Next(step.kv.size(), s.d_v);
      LoadOperand(core, v1, g.Values(packed, step.sequence, step.task.head / group, step.kv));
    }
    step.pv = pv_sent.Next(step.rows.size(), s.d_v);
    for (const Range cols : v_cols) {
      const L0CTile<float> pv = pv_l0.Next(step.rows.size(), cols.size());
      if (t.v_from_k) {
        multiply(pv, step.p, step.k.Rows(cols), Accumulate::kNo, Transpose::kYes);
      } else {
        multiply(pv, step.p, v1.Cols(cols), Accumulate::kNo);
      }
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
      if (s.hides() && s.d_v > 0 && !alone)
        NoteSpoilt(lane, g, s, schedule.KeysOf(step.task), step, queries, o, kept.l, spoilt);
      FinishRows(lane, g, s, step, queries, o, kept);
    });
  };

  if (s.sinks && !s.folds()) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      lanes[i]->sinks = lanes[i]->sinks_ub.Next(1, s.heads);
      lanes[i]->core.Load(lanes[i]->sinks, MatrixOf(*g.sinks));
    }
  }
  HiddenKeyBlocks<Vector> hidden(core.vectors()[0], g.hidden, s.skips_hidden() ? t.mask_cells(s) : 0,
                                 t.mask_step);
  const auto first_seen = [&](const FlashAttentionSchedule::Task& task, const AttentionSequence& sequence,
                              Range rows, const Split& blocks, std::int64_t i) {
    const auto for_each_run = [&](auto&& body) {
      ForEachRun(sequence, task.head, rows, [&](const QueryRun& run) { body(run.heads, run.positions); });
    };
    return hidden.FirstSeen(task.sequence, for_each_run, blocks, i);
  };
  FlashAttentionSteps steps(schedule, t, core.index(), core.count());
  Pipeline<Step>(
      t.depth, [&](Step& step) { return steps.Next(step, first_seen); }, scores, softmax, product, rescale);
  if (spoilt.empty()) return;

  packed = false, alone = true;
  const auto seen = [&](const FlashAttentionSchedule::Task& task, const AttentionSequence& sequence,
                        Range keys) {
    return s.mask ? UnmaskedRun(*lanes[0], g, task, sequence, keys) : keys;
  };
  FlashAttentionRowSteps rows(schedule, t, spoilt);
  Pipeline<Step>(
      /*depth=*/0, [&](Step& step) { return rows.Next(step, seen); }, scores, softmax, product, rescale);
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_KERNEL_H_
