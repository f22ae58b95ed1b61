// The backward pass of attention (RECT-FA): dQ, dK and dV from dO, with the weights computed again from the
// log-sum-exp. Three phases: what each query row needs; the products; the sums of their parts.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "kernels/flash_attention_grad_lane_kernel.h"
#include "kernels/flash_attention_grad_rows_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/pipeline.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {

// Second phase. Each core walks its steps through three stages; `t.depth` sets how far neighbouring steps overlap.
//   scores    Cube    S^T = K Q^T, then S^T += K_rope Q_rope^T in the same L0C tile;  dP^T = V dO^T
//   weights   Vector  P^T = exp(scale * S^T - lse),  dS^T = P^T * (dP^T - delta);  S^T capped, biased and masked first,
//                     dS^T then times the cap's slope
//   products  Cube    dQ = dS K, added to the chunk's part in GM;  behind a block's last piece dV += P^T dO,
//                     dK += dS^T Q
// Cube and Vector hand over at once, so that L0C is free again long before the Vector gets to a tile.
// Keys run along the rows, so that P^T and dS^T are left operands as they stand and lse and delta are rows; dQ alone
// takes dS^T turned. dS lacks the factor `scale`, which dQ and dK get at the end.
template <class T, AiCore Core>
void FlashAttentionGradKernel(Core& core, const FlashAttentionGradOperands& g,
                              const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t,
                              const FlashAttentionGradSchedule& schedule) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  const std::size_t lane_count = core.vectors().size();
  const Split lane_rows(t.n, CeilDiv(t.n, static_cast<std::int64_t>(lane_count)));
  const bool rope = s.d_rope > 0;
  const int kept = t.operand_stages(), handed = t.hand_over_stages();
  const std::int64_t sum_rows = t.keep_sums ? t.n : 0;
  const std::int64_t widest = t.cols_at_once(std::max({s.d_qk, s.d_rope, s.d_v}));
  const std::int64_t widest_part = t.cols_at_once(std::max({s.d_qk, s.d_rope, t.keep_sums ? 0 : s.d_v}));

  // Where keys may be hidden, dS meets a copy of them: what a hidden one holds may be NaN, and 0 * NaN is NaN.
  const bool apart = s.hides();
  const Role right = apart ? Role::kRows : Role::kB;
  Ring<Buffer::kL1, T> k_l1(core, "k_l1", t.n, s.d_qk, kept, Role::kA, right);
  Ring<Buffer::kL1, T> k_rope_l1(core, "k_rope_l1", t.n, s.d_rope, kept, Role::kA, right);
  Ring<Buffer::kL1, T> k_finite_l1(core, "k_finite_l1", apart ? t.n : 0, s.d_qk, kept, Role::kB);
  Ring<Buffer::kL1, T> k_rope_finite_l1(core, "k_rope_finite_l1", apart ? t.n : 0, s.d_rope, kept, Role::kB);
  Ring<Buffer::kL1, T> v_l1(core, "v_l1", t.n, s.d_v, kept, Role::kA);
  Ring<Buffer::kL1, T> q_l1(core, "q_l1", t.m(), s.d_qk, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> q_rope_l1(core, "q_rope_l1", t.m(), s.d_rope, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> dout_l1(core, "dout_l1", t.m(), s.d_v, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> p_l1(core, "p_l1", t.n, t.m(), handed, Role::kA);
  Ring<Buffer::kL1, T> ds_l1(core, "ds_l1", t.n, t.m(), handed, Role::kA, Role::kATransposed);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", std::max(t.piece(), t.n), t.k0, t.l0_stages, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", t.k0, std::max(t.piece(), widest), t.l0_stages, Role::kB);
  Ring<Buffer::kL0C, float> score_l0(core, "score_l0", t.n, t.piece(), 2);
  Ring<Buffer::kL0C, float> dv_l0(core, "dv_l0", sum_rows, s.d_v, 1);
  Ring<Buffer::kL0C, float> dk_l0(core, "dk_l0", sum_rows, s.d_qk, 1);
  Ring<Buffer::kL0C, float> dk_rope_l0(core, "dk_rope_l0", sum_rows, s.d_rope, 1);
  Ring<Buffer::kL0C, float> part_l0(core, "part_l0", t.keep_sums ? t.piece() : std::max(t.piece(), t.n),
                                    widest_part, t.sum_stages, Role::kRelay);

  Ring<Buffer::kHandOver, float> s_sent(core, "s_sent", t.n, t.piece(), handed);
  Ring<Buffer::kHandOver, float> dp_sent(core, "dp_sent", t.n, t.piece(), handed);
  Ring<Buffer::kHandOver, float> dk_sent(core, "dk_sent", sum_rows, s.d_qk, 1);
  Ring<Buffer::kHandOver, float> dk_rope_sent(core, "dk_rope_sent", sum_rows, s.d_rope, 1);
  using Lane = FlashAttentionGradLane<T, Vector>;
  std::array<std::optional<Lane>, kMaxVectorPerCube> lanes;
  for (std::size_t i = 0; i < lane_count; ++i) lanes[i].emplace(core.vectors()[i], lane_rows[0].size(), s, t);

  struct Step : FlashAttentionGradStep {
    L1Tile<T> k, v, k_rope;       // Of `keys`,
    L1Tile<T> right, right_rope;  // the same as dS meets them,
    L1Tile<T> all_k;              // and of `key_block`.
    L1Tile<T> q, q_rope, dout;    // Of `block`.
    L1Tile<T> p, ds;              // (keys, block)
    HandOverTile<float> s, dp;    // (keys, queries)
  };

  // acc (+)= op(a) op(b), along what is summed over in steps of t.k0.
  const auto multiply = [&](L0CTile<float> acc, L1Tile<T> a1, Transpose turn_a, L1Tile<T> b1,
                            Transpose turn_b, Accumulate accumulate) {
    const bool a_turned = turn_a == Transpose::kYes, b_turned = turn_b == Transpose::kYes;
    for (const Range k0 : AtLeastOnce(Split(a_turned ? a1.rows() : a1.cols(), t.k0))) {
      const L0ATile<T> a0 = a_l0.Next(acc.rows(), k0.size());
      const L0BTile<T> b0 = b_l0.Next(k0.size(), acc.cols());
      core.Load(a0, a_turned ? a1.Rows(k0) : a1.Cols(k0), turn_a);
      core.Load(b0, b_turned ? b1.Cols(k0) : b1.Rows(k0), turn_b);
      core.Mmad(acc, a0, b0, accumulate);
      accumulate = Accumulate::kYes;
    }
  };
  const auto load = [&](Ring<Buffer::kL1, T>& ring, const Operand& source) {
    const L1Tile<T> tile = ring.Next(source.rows(), source.cols());
    LoadOperand(core, tile, source);
    return tile;
  };
  const auto load_keys = [&](Ring<Buffer::kL1, T>& ring, const GmTensor& keys, const Step& step) {
    const std::int64_t head = keys.sizes[1] == 1 ? 0 : step.kv_head;
    return load(ring,
                {MatrixOf(keys, step.sequence.batch, head).Rows(step.KeyRows(step.key_block)), {}, false});
  };
  // For every Vector core with some of `count` keys its lane, its number and its rows of them.
  const auto for_each_lane = [&](std::int64_t count, auto&& body) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      const Range all = lane_rows[static_cast<std::int64_t>(i)];
      const Range rows{std::min(all.begin, count), std::min(all.end, count)};
      if (!rows.empty()) body(*lanes[i], static_cast<std::int64_t>(i), rows);
    }
  };

  // Of the block of keys and of queries in the scores stage.
  L1Tile<T> k1, k_rope1, right1, right_rope1, v1, q1, q_rope1, dout1;
  const auto scores = [&](Step& step) {
    if (step.hidden) return;
    if (step.first_of_keys()) {
      k1 = load_keys(k_l1, *g.k, step), v1 = load_keys(v_l1, *g.v, step);
      if (rope) k_rope1 = load_keys(k_rope_l1, step.block.empty() ? *g.k_rope_unseen : *g.k_rope, step);
      right1 = k1, right_rope1 = k_rope1;
      if (apart && !step.block.empty()) {
        right1 = load_keys(k_finite_l1, *g.k_finite, step);
        if (rope) right_rope1 = load_keys(k_rope_finite_l1, *g.k_rope_finite, step);
      }
    }
    if (step.first_of_block()) {
      q1 = load(q_l1, g.QueriesOf(*g.q, g.q_packed, t, step, s.d_qk));
      dout1 = load(dout_l1, g.QueriesOf(*g.dout, g.dout_packed, t, step, s.d_v));
      if (rope) q_rope1 = load(q_rope_l1, g.QueriesOf(*g.q_rope, g.q_rope_packed, t, step, s.d_rope));
    }
    const Range keys = step.KeysInBlock();
    step.all_k = k1, step.k = k1.Rows(keys), step.v = v1.Rows(keys), step.q = q1, step.dout = dout1;
    step.right = right1.Rows(keys);
    if (rope)
      step.k_rope = k_rope1.Rows(keys), step.right_rope = right_rope1.Rows(keys), step.q_rope = q_rope1;

    const L0CTile<float> score = score_l0.Next(keys.size(), step.queries.size());
    multiply(score, step.k, Transpose::kNo, step.q.Rows(step.Piece()), Transpose::kYes, Accumulate::kNo);
    if (rope) {
      multiply(score, step.k_rope, Transpose::kNo, step.q_rope.Rows(step.Piece()), Transpose::kYes,
               Accumulate::kYes);
    }
    step.s = s_sent.Next(keys.size(), step.queries.size());
    core.Send(step.s, score);
    const L0CTile<float> dp = score_l0.Next(keys.size(), step.queries.size());
    multiply(dp, step.v, Transpose::kNo, step.dout.Rows(step.Piece()), Transpose::kYes, Accumulate::kNo);
    step.dp = dp_sent.Next(keys.size(), step.queries.size());
    core.Send(step.dp, dp);
  };

  L1Tile<T> p1, ds1;  // Of the block of queries in the weights stage.
  const auto weights = [&](Step& step) {
    if (step.hidden) return;
    if (step.first_of_block()) {
      p1 = p_l1.Next(step.keys.size(), step.block.size());
      ds1 = ds_l1.Next(step.keys.size(), step.block.size());
    }
    step.p = p1, step.ds = ds1;
    for_each_lane(step.keys.size(), [&](Lane& lane, std::int64_t i, Range rows) {
      auto& vector = lane.core;
      const std::int64_t queries = step.queries.size(), b = step.sequence.batch;
      const Range keys = rows.From(-step.keys.begin);
      const UbTile<float> scored = lane.s_ub.Next(rows.size(), queries),
                          dp = lane.dp_ub.Next(rows.size(), queries);
      vector.Receive(scored, step.s.Rows(rows));
      vector.Receive(dp, step.dp.Rows(rows));
      const UbTile<float> lse = lane.lse_ub.Next(1, queries), delta = lane.delta_ub.Next(1, queries);
      const Range gm_rows = step.QueryRows(step.queries);
      vector.Load(lse, MatrixOf(*g.row_lse, b, step.h).Rows(gm_rows).Transposed());
      vector.Load(delta, MatrixOf(*g.delta, b, step.h).Rows(gm_rows).Transposed());

      if (s.alibi && step.first_of_block()) {
        const UbTile<float> slopes = lane.slopes_ub.Next(1, s.heads);
        const std::int64_t sequence = step.sequence_index;
        vector.Load(slopes, MatrixOf(*g.alibi.slopes).Rows({sequence, sequence + 1}));
        lane.alibi_slope = vector.ReadScalar(slopes, step.h);
      }
      std::optional<UbTile<float>> slope;
      const float scale = FinishScores(lane, g, s, step, keys, scored, dp, slope);
      const UbTile<T> p = lane.p_ub.Next(rows.size(), queries), ds = lane.ds_ub.Next(rows.size(), queries);
      if (s.soft_cap > 0 || s.dbias || s.dropout) {
        GradStepByParts(lane, g, s, step, keys, p, ds, scored, dp, lse, delta, scale, slope);
      } else {
        vector.AttentionGradStep(p, ds, scored, dp, lse, delta, scale);
      }
      vector.Move(step.p.Part(rows, step.Piece()), p);
      vector.Move(step.ds.Part(rows, step.Piece()), ds);
      if (s.dbias && queries > 0) {
        const auto lanes_of_chunk = static_cast<std::int64_t>(lane_count);
        AddBiasGradient(lane, g, s, step, step.chunk * lanes_of_chunk + i, keys, dp);
      }
    });
  };

  L0CTile<float> dv, dk, dk_rope;  // Of the block of keys in the products stage, where they are kept.
  // A sum over all queries of a block of keys: kept in L0C until the last step, or added up in GM by every step. What
  // is kept goes to `sums`; where there are none it is finished: as it stands, or sent to the Vector for the scale.
  struct KeySum {
    Ring<Buffer::kL0C, float>& ring;
    L0CTile<float>& kept;
    const GmTensor *sums, *gradient;
    Ring<Buffer::kHandOver, float>* sent;
    Ring<Buffer::kUB, float> Lane::*received;
  };
  const auto finish = [&](const Step& step, const KeySum& sum) {
    const Range keys = step.key_block;
    const GmTensor& to = sum.sums != nullptr ? *sum.sums : *sum.gradient;
    const Gm gm = MatrixOf(to, step.sequence.batch, step.kv_head).Rows(step.KeyRows(keys));
    if (sum.sums != nullptr || sum.sent == nullptr) return core.Store(gm, sum.kept);
    const HandOverTile<float> sent = sum.sent->Next(sum.kept.rows(), sum.kept.cols());
    core.Send(sent, sum.kept);
    for_each_lane(keys.size(), [&](Lane& lane, std::int64_t, Range rows) {
      const UbTile<float> x = (lane.*sum.received).Next(rows.size(), sent.cols());
      lane.core.Receive(x, sent.Rows(rows));
      lane.core.MulScalar(x, x, g.scale);
      lane.core.Store(gm.Rows(rows), x);
    });
  };
  // gm (+)= op(left) right.
  const auto add_in_gm = [&](Gm gm, L1Tile<T> left, Transpose turn, L1Tile<T> right, Accumulate accumulate) {
    for (const Range cols : AtLeastOnce(Split(right.cols(), t.cols_at_once(right.cols())))) {
      const L0CTile<float> part = part_l0.Next(gm.rows, cols.size());
      multiply(part, left, turn, right.Cols(cols), Transpose::kNo, Accumulate::kNo);
      core.Store(gm.Cols(cols), part, accumulate);
    }
  };
  const auto add_keys = [&](const Step& step, const KeySum& sum, L1Tile<T> left, L1Tile<T> right) {
    Accumulate accumulate = step.first_block ? Accumulate::kNo : Accumulate::kYes;
    if (!t.keep_sums) {
      const Gm all = MatrixOf(*sum.sums, step.sequence.batch, step.kv_head);
      return add_in_gm(all.Rows(step.KeyRows(step.keys)), left, Transpose::kNo, right, accumulate);
    }
    if (step.first_block) sum.kept = sum.ring.Next(step.key_block.size(), right.cols());
    if (step.first_block && step.keys != step.key_block) {  // The others' sums start from nothing.
      multiply(sum.kept, step.all_k.Cols({0, 0}), Transpose::kNo, right.Rows({0, 0}), Transpose::kNo,
               accumulate);
      accumulate = Accumulate::kYes;
    }
    multiply(sum.kept.Rows(step.KeysInBlock()), left, Transpose::kNo, right, Transpose::kNo, accumulate);
    if (step.last_block) finish(step, sum);
  };
  const auto add_queries = [&](const Step& step, const GmTensor& parts, L1Tile<T> right) {
    const Gm all = MatrixOf(parts, step.chunk, step.sequence.batch * s.heads + step.h);
    const Gm gm = all.Rows(step.QueryRows(step.queries));
    if (step.hidden) return StoreZeros(*lanes[0], gm);
    add_in_gm(gm, step.ds.Cols(step.Piece()), Transpose::kYes, right,
              step.adds ? Accumulate::kYes : Accumulate::kNo);
  };
  const auto products = [&](Step& step) {
    if (!step.queries.empty()) {
      add_queries(step, *g.dq_parts, step.right);
      if (rope) add_queries(step, *g.dq_rope_parts, step.right_rope);
    }
    if (step.hidden || !step.last_of_block()) return;
    add_keys(step, {dv_l0, dv, g.dv_sums, g.dv, nullptr, nullptr}, step.p, step.dout);
    add_keys(step, {dk_l0, dk, g.dk_sums, g.dk, &dk_sent, &Lane::keys_ub}, step.ds, step.q);
    if (rope) {
      add_keys(step, {dk_rope_l0, dk_rope, g.dk_rope_sums, g.dk_rope, &dk_rope_sent, &Lane::rope_keys_ub},
               step.ds, step.q_rope);
    }
  };

  HiddenQueryBlocks<Vector> hidden(core.vectors()[0], g.hidden, s.mask ? t.mask_cells(s) : 0, t.mask_step);
  const auto seen_of = [&](std::int64_t sequence, std::int64_t head, Range queries, Range keys) {
    return hidden.SeenOf(sequence, head, queries, keys);
  };
  FlashAttentionGradSteps steps(schedule, s, t, core.index(), core.count());
  Pipeline<Step>(
      t.depth, [&](Step& step) { return steps.Next(step, seen_of); }, scores, weights, products);
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_
