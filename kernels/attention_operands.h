// The operands that forward and backward of attention have alike, added to a launch.
#ifndef CUBIST_KERNELS_ATTENTION_OPERANDS_H_
#define CUBIST_KERNELS_ATTENTION_OPERANDS_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/attention_scores_kernel.h"
#include "kernels/rotate_kernel.h"
#include "npu_model/launch.h"

namespace cubist {

// What is done to scores; `shape` is that of the tiling, whose batches are sequences.
template <class Args, class Shape>
ScoreOperands AddScoreOperands(Launch& launch, const Args& args, const Shape& shape) {
  ScoreOperands g;
  g.scale = ScaleOf(args.scale, shape.d_qk + shape.d_rope);
  g.soft_cap = args.soft_cap.value_or(0);
  const std::array<std::int64_t, 4> pairs{shape.batches, args.q.size(1),
                                          LongestOf(args.lengths.q_ends, args.q.size(2)),
                                          LongestOf(args.lengths.kv_ends, args.k.size(2))};
  if (shape.bias) g.bias = launch.Input("bias", Broadcast(args.bias, pairs));
  if (shape.mask) g.mask = launch.Input("mask", Broadcast(args.mask, pairs));
  if (shape.alibi) {
    g.alibi = {launch.Input("slopes", RowForEach(args.alibi.slopes, shape.batches)), args.alibi.offset,
               args.alibi.root};
  }
  if (shape.dropout) {
    g.dropout = {args.dropout.seed, args.dropout.offset, args.dropout.kept(), CeilDiv(args.k.size(2), 8)};
    g.dropout_factor = args.dropout.factor();
  }
  return g;
}

// The pairs that the mask hides, counted by `cell` of its rows.
inline HiddenPairs CountHidden(Launch& launch, const GmTensor& mask, std::int64_t cell) {
  HiddenPairs hidden{&mask, nullptr, cell};
  const std::int64_t batches = hidden.Distinct(0), heads = hidden.Distinct(1),
                     cells = CeilDiv(hidden.Distinct(2), cell);
  hidden.counts = launch.Workspace("hidden", DType::kI32, {batches, heads, cells, mask.sizes[3] + 1});
  launch.OnVectorCores(batches * heads * cells, [&](auto& core) { CountHiddenKernel(core, hidden); });
  return hidden;
}

// How rows of queries and of keys are turned to their positions.
struct Rotations {
  RotateOperands of_queries, of_keys;
};
inline Rotations AddRotations(Launch& launch, const AttentionRope& rope, std::int64_t batches) {
  const RotateOperands tables{launch.Input("cos", rope.cos), launch.Input("sin", rope.sin),
                              rope.layout != RopeLayout::kHalf, /*inverse=*/false,
                              SecondHalfInUb(launch.chip(), rope.cos.size(rope.cos.rank - 1))};
  Rotations r{tables, tables};
  const auto positions = [&](const char* name, const ConstTensor& rows) {
    return rows.given() ? launch.Input(name, RowForEach(rows, batches)) : nullptr;
  };
  r.of_queries.offset = rope.q_offset, r.of_keys.offset = rope.k_offset;
  r.of_queries.positions = positions("q_positions", rope.q_positions);
  r.of_keys.positions = positions("k_positions", rope.k_positions);
  return r;
}

// The query rows of all sequences; of folded ones (AttentionBand::fold) each position once.
template <class Schedule>
std::vector<RowsToTurn> QueriesToTurn(const Schedule& schedule) {
  std::vector<RowsToTurn> rows;
  for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
    const AttentionSequence x = schedule.Sequence(i);
    rows.push_back({x.batch, x.q_begin, {x.q_begin, x.q_begin + x.positions()}});
  }
  return rows;
}

// A phase that turns rows of tensors, all of which have the same number of pairs.
template <class T>
void TurnTensors(Launch& launch, const std::vector<TurnedTensor>& tensors) {
  std::int64_t rows = 0;
  for (const TurnedTensor& x : tensors) rows += x.rows();
  const std::int64_t at_once =
      RowsTurnedAtOnce(launch.chip(), DTypeOf<T>(), tensors[0].angles.ub_cols(), rows);
  launch.OnVectorCores(CeilDiv(rows, at_once), [&](auto& core) {
    RotateKernel<T>(core, std::span<const TurnedTensor>(tensors), at_once);
  });
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_OPERANDS_H_
