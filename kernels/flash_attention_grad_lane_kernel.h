// What Vector cores do to their keys' scores in the products' phase of attention's backward pass.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_GRAD_LANE_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_GRAD_LANE_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/attention_scores_kernel.h"
#include "kernels/flash_attention_grad_rows_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {

// What a Vector core works on: scores of its keys, which are the rows of its tiles, and all queries of a piece.
template <class T, VectorCore V>
struct FlashAttentionGradLane {
  FlashAttentionGradLane(V& vector, std::int64_t rows, const FlashAttentionGradShape& s,
                         const FlashAttentionGradTiling& t)
      : core(vector),
        s_ub(core, "s_ub", rows, t.piece(), t.ub_stages),
        dp_ub(core, "dp_ub", rows, t.piece(), t.ub_stages),
        p_ub(core, "p_ub", rows, t.piece(), t.ub_stages),
        ds_ub(core, "ds_ub", rows, t.piece(), t.ub_stages),
        lse_ub(core, "lse_ub", 1, t.piece(), t.ub_stages),
        delta_ub(core, "delta_ub", 1, t.piece(), t.ub_stages),
        by_query_ub(core, "by_query_ub", s.by_query() ? t.piece() : 0, rows, 1),
        before_ub(core, "before_ub", s.dbias ? t.piece() : 0, rows, 1),
        scratch_ub(core, "scratch_ub", s.scratch() ? rows : 0, t.piece(), 1),
        slope_ub(core, "slope_ub", s.soft_cap > 0 ? rows : 0, t.piece(), 1),
        hidden_ub(core, "hidden_ub", s.mask ? rows : 0, 1, 1),
        flags_ub(core, "flags_ub", s.mask ? t.piece() : 0, rows, 1),
        zeros_ub(core, "zeros_ub", s.mask ? kZeroRows : 0, std::max(s.d_qk, s.d_rope), 1),
        dropped_ub(core, "dropped_ub", s.dropout ? rows : 0, t.piece(), 1),
        slopes_ub(core, "slopes_ub", 1, s.alibi ? s.heads : 0, 1),
        keys_ub(core, "keys_ub", t.keep_sums ? rows : 0, s.d_qk, 1),
        rope_keys_ub(core, "rope_keys_ub", t.keep_sums ? rows : 0, s.d_rope, 1) {}

  V& core;
  Ring<Buffer::kUB, float> s_ub, dp_ub;
  Ring<Buffer::kUB, T> p_ub, ds_ub;
  Ring<Buffer::kUB, float> lse_ub, delta_ub;
  Ring<Buffer::kUB, float> by_query_ub,
      before_ub;  // (queries, keys), as bias, its gradient and masks lie in GM.
  Ring<Buffer::kUB, float> scratch_ub, slope_ub;  // (keys, queries); the latter of the cap.
  Ring<Buffer::kUB, float> hidden_ub;             // A column of what a hidden score becomes.
  Ring<Buffer::kUB, std::uint8_t> flags_ub;       // (queries, keys)
  Ring<Buffer::kUB, float> zeros_ub;              // Rows of dQ.
  Ring<Buffer::kUB, std::uint8_t> dropped_ub;     // (keys, queries)
  Ring<Buffer::kUB, float> slopes_ub;
  Ring<Buffer::kUB, float> keys_ub, rope_keys_ub;  // Finished rows of dK.
  float alibi_slope = 0;                           // Of the block of queries in the weights stage.
};

// Begins a part of dQ that no product has been added to.
template <class Lane>
void StoreZeros(Lane& lane, const Gm& gm) {
  const UbTile<float> zeros = lane.zeros_ub.Next(std::min(gm.rows, kZeroRows), gm.cols);
  lane.core.Fill(zeros, 0.0f);
  for (const Range rows : Split(gm.rows, kZeroRows))
    lane.core.Store(gm.Rows(rows), zeros.Rows({0, rows.size()}));
}

// A tile of a (queries, keys) matrix in GM, turned.
template <class Lane>
UbTile<float> LoadTurned(Lane& lane, const Gm& source) {
  const UbTile<float> lying = lane.by_query_ub.Next(source.rows, source.cols);
  const UbTile<float> turned = lane.scratch_ub.Next(source.cols, source.rows);
  lane.core.Load(lying, source);
  lane.core.Transpose(turned, lying);
  return turned;
}

// What is done to the scores of `keys` and the step's queries before their exponentials, as the forward pass did it, but to
// keys as rows; returns the scale that is left, and in `slope` that of the cap where there is one. dp and slope become 0 where
// a key is hidden: what it holds may be NaN, and 0 * NaN is NaN.
template <class Lane>
float FinishScores(Lane& lane, const FlashAttentionGradOperands& g, const FlashAttentionGradShape& s,
                   const FlashAttentionGradStep& step, Range keys, UbTile<float> scored, UbTile<float> dp,
                   std::optional<UbTile<float>>& slope) {
  auto& core = lane.core;
  const std::int64_t rows = scored.rows(), queries = scored.cols();
  float scale = g.scale;
  if (s.soft_cap > 0) {
    slope = lane.slope_ub.Next(rows, queries);
    if (s.soft_cap == 1) {
      SoftCapCoarsely(core, scored, *slope, scale, g.soft_cap);
    } else {
      SoftCapFinely(core, scored, *slope, lane.scratch_ub.Next(rows, queries), scale, g.soft_cap);
    }
    scale = 1;
    // 1 - (s / cap)^2, whatever the square of either would be.
    core.MulScalar(*slope, scored, 1 / g.soft_cap);
    core.Mul(*slope, *slope, *slope);
    core.MulScalar(*slope, *slope, -1.0f);
    core.AddScalar(*slope, *slope, 1.0f);
  }
  if (s.alibi) {  // The distance of key and query is that of query and key.
    const std::int64_t first = keys.begin - step.queries.begin - g.alibi.OffsetOf(step.sequence);
    core.AddAlibi(scored, lane.scratch_ub.Next(rows, queries), scale, lane.alibi_slope, first, g.alibi.root);
    scale = 1;
  }
  if (s.bias) {
    const UbTile<float> bias =
        LoadTurned(lane, MatrixOf(*g.bias, step.sequence_index, step.h).Block(step.queries, keys));
    if (scale != 1) core.MulScalar(scored, scored, scale);
    core.Add(scored, scored, bias);
    scale = 1;
  }
  if (s.mask) {
    scale = ScaleForMask(core, scored, scale);
    const UbTile<std::uint8_t> flags = lane.flags_ub.Next(queries, rows);
    const UbTile<float> lying = lane.by_query_ub.Next(queries, rows);
    const UbTile<float> hidden = lane.scratch_ub.Next(rows, queries), value = lane.hidden_ub.Next(rows, 1);
    core.Load(flags, MatrixOf(*g.mask, step.sequence_index, step.h).Block(step.queries, keys));
    core.Cast(lying, flags);
    core.Transpose(hidden, lying);
    core.Fill(value, MaskedScore(scale));
    core.SelectLe(scored, hidden, 0.5f, scored, value);
    core.Fill(value, 0.0f);
    core.SelectLe(dp, hidden, 0.5f, dp, value);
    if (slope) core.SelectLe(*slope, hidden, 0.5f, *slope, value);
  }
  if (!BandCuts(step.sequence, step.queries, keys)) return scale;
  scale = ScaleForMask(core, scored, scale);
  HideKeysByBand(core, scored, step.sequence, step.queries, keys, MaskedScore(scale));
  HideKeysByBand(core, dp, step.sequence, step.queries, keys, 0.0f);
  if (slope) HideKeysByBand(core, *slope, step.sequence, step.queries, keys, 0.0f);
  return scale;
}

// p and ds as AttentionGradStep makes them, with dropout, and with ds times the cap's slope where that is given; dp keeps
// the gradient of the biased score in fp32.
template <class T, class Lane>
void GradStepByParts(Lane& lane, const FlashAttentionGradOperands& g, const FlashAttentionGradShape& s,
                     const FlashAttentionGradStep& step, Range keys, UbTile<T> p, UbTile<T> ds,
                     UbTile<float> scored, UbTile<float> dp, UbTile<float> lse, UbTile<float> delta,
                     float scale, const std::optional<UbTile<float>>& slope) {
  auto& core = lane.core;
  if (scale != 1) core.MulScalar(scored, scored, scale);
  core.Sub(scored, scored, lse);
  core.Exp(scored, scored);
  std::optional<UbTile<std::uint8_t>> dropped;
  const auto drop = [&](UbTile<float> x) {
    core.MaskWhere(x, *dropped, 0.0f);
    core.MulScalar(x, x, g.dropout_factor);
  };
  if (s.dropout) {
    dropped = lane.dropped_ub.Next(scored.rows(), scored.cols());
    core.DropFlags(*dropped, g.dropout, g.DropoutRow(step), keys.begin, /*transposed=*/true);
    drop(dp);
  }
  core.Sub(dp, dp, delta);
  core.Mul(dp, dp, scored);
  if (s.dropout) drop(scored);
  core.Cast(p, scored);
  if (slope) core.Mul(*slope, *slope, dp);
  core.Cast(ds, slope ? *slope : dp);
}

// Adds a tile of the gradients of biased scores, (keys, queries), to dbias or its parts: summed over queries or keys
// where dbias has one row or column for all. dp is lost.
template <class T, VectorCore V>
void AddBiasGradient(FlashAttentionGradLane<T, V>& lane, const FlashAttentionGradOperands& g,
                     const FlashAttentionGradShape& s, const FlashAttentionGradStep& step, std::int64_t part,
                     Range keys, UbTile<float> dp) {
  auto& core = lane.core;
  const auto& sizes = g.dbias->sizes;
  const bool one_row = sizes[2] == 1 && s.sq != 1, one_column = sizes[3] == 1 && s.skv != 1;
  UbTile<float> sum = lane.by_query_ub.Next(one_row ? 1 : dp.cols(), dp.rows());
  if (one_row) {
    core.RowSum(dp.Cols({0, 1}), dp);
    core.Transpose(sum, dp.Cols({0, 1}));
  } else {
    core.Transpose(sum, dp);
  }
  if (one_column) {
    core.RowSum(sum.Cols({0, 1}), sum);
    sum = sum.Cols({0, 1});
  }
  const std::int64_t b = sizes[0] == 1 ? 0 : step.sequence_index, h = sizes[1] == 1 ? 0 : step.h;
  const Range rows = one_row ? Range{0, 1} : step.queries, cols = one_column ? Range{0, 1} : keys;
  if (g.dbias_parts == nullptr) {
    core.Store(MatrixOf(*g.dbias, b, h).Block(rows, cols), sum);
    return;
  }
  const Gm gm = MatrixOf(*g.dbias_parts, one_column ? part : 0, b * sizes[1] + h).Block(rows, cols);
  const UbTile<float> before = lane.before_ub.Next(rows.size(), cols.size());
  core.Load(before, gm);
  core.Add(sum, sum, before);
  core.Store(gm, sum);
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_LANE_KERNEL_H_
