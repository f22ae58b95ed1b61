#include "kernels/flash_attention.h"

#include <algorithm>
#include <new>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/attention_choice.h"
#include "kernels/attention_combine_kernel.h"
#include "kernels/attention_operands.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_sequences.h"
#include "kernels/element_type.h"
#include "kernels/flash_attention_kernel.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kName = "flash_attention";

FlashAttentionShape ShapeOf(const FlashAttentionArgs& args) {
  FlashAttentionShape s;
  s.batches = args.q.size(0), s.heads = args.q.size(1), s.sq = args.q.size(2), s.d_qk = args.q.size(3);
  s.kv_heads = args.k.size(1), s.skv = args.k.size(2), s.d_v = args.v.size(3);
  if (args.q_rope.given()) s.d_rope = args.q_rope.size(3), s.rope_heads = args.k_rope.size(1);
  s.in = args.q.dtype, s.out = args.out.dtype;
  s.rotate = args.rope.given() && s.d_rope > 0;
  s.bias = args.bias.given(), s.soft_cap = args.soft_cap.has_value(), s.sinks = args.sinks.given();
  s.mask = args.mask.given(), s.alibi = args.alibi.given(), s.dropout = args.dropout.given();
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

Status Validate(const Device& device, const FlashAttentionArgs& args) {
  const AttentionArguments x(kName, args);
  const Argument out{kName, "out", args.out}, lse{kName, "lse", args.lse};
  const Argument workspace = AsArgument(kName, args.workspace);
  CUBIST_RETURN_IF_ERROR(x.Check());
  CUBIST_RETURN_IF_ERROR(x.CheckOutputShape(out));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {DType::kF32, args.q.dtype}));
  if (args.lse.given()) {
    CUBIST_RETURN_IF_ERROR(x.CheckStatisticsShape(lse));
    CUBIST_RETURN_IF_ERROR(CheckDType(lse, {DType::kF32}));
  }
  return x.CheckMemory(device.computes(), {}, {&out, &lse, &workspace});
}

// (b, n, 1, d) as (b, n / group, group, d): heads of a group become rows.
template <class Tensor>
Tensor HeadsAsRows(Tensor x, std::int64_t group) {
  if (!x.given()) return x;
  x.sizes[1] /= group, x.sizes[2] = group;
  x.strides[2] = x.strides[1], x.strides[1] *= group;
  return x;
}

// One query row per head: the heads of a group see the same keys, and read them once if they are rows of one matrix.
void FoldGroups(FlashAttentionArgs& args) {
  const bool whole = !args.mask.given() && !args.alibi.given() && !args.dropout.given();
  const bool alone = whole && args.prefix.empty() && !args.lengths.given() && !args.rope.given() &&
                     !args.bias.given() && !args.sinks.given();
  if (!alone || args.q.size(2) != 1 || args.k.size(1) == 0 || args.q.size(1) == args.k.size(1)) return;
  const std::int64_t group = args.q.size(1) / args.k.size(1), skv = args.k.size(2);
  const Range seen = BandOf(args.causal, args.window, 1, skv).Seen({0, 1}, {0, skv});
  args.causal = Causal::kNone, args.window = {};
  args.k = PartOf(args.k, 2, seen), args.v = PartOf(args.v, 2, seen);
  if (args.k_rope.given()) args.k_rope = PartOf(args.k_rope, 2, seen);
  args.q = HeadsAsRows(args.q, group), args.q_rope = HeadsAsRows(args.q_rope, group);
  args.out = HeadsAsRows(args.out, group);
  args.lse = HeadsAsRows(args.lse, group);
}

// The keys of sequences in one batch entry, as packed operands hold them.
std::vector<PackedRows> KeysToPack(const std::vector<AttentionSequence>& sequences) {
  std::vector<PackedRows> keys;
  if (sequences.empty() || sequences.back().batch > 0) return keys;
  for (const AttentionSequence& s : sequences)
    keys.push_back({{s.kv_begin, s.kv_begin + s.skv}, s.packed_begin});
  return keys;
}

// With `forced` in place of the tiling of its choice, where that is given.
template <class T>
Status Run(const Device& device, FlashAttentionArgs args, Launch& launch,
           const FlashAttentionTiling* forced = nullptr) {
  SplitRotaryColumns(args);
  FoldGroups(args);
  FlashAttentionShape shape = ShapeOf(args);
  const std::int64_t step = std::max(launch.chip().PackedStep(Role::kB, shape.in), launch.chip().mmad.n_step);
  const std::vector<AttentionSequence> sequences =
      SequencesOf(args.causal, args.window, args.prefix, args.lengths, shape.sq, shape.skv, step);
  if (args.lengths.given()) {  // Tiles are chosen for as many sequences as long as the longest.
    shape.batches = static_cast<std::int64_t>(sequences.size());
    shape.sq = LongestOf(args.lengths.q_ends, 0), shape.skv = LongestOf(args.lengths.kv_ends, 0);
    shape.band = BandOf(args.causal, args.window, shape.sq, shape.skv, shape.band.prefix);
  }
  FlashAttentionTiling tiling;
  if (forced != nullptr) {
    tiling = *forced;
  } else {
    const auto with = [&](const Device& model, Launch& other, const FlashAttentionTiling& t) {
      return Run<T>(model, args, other, &t);
    };
    CUBIST_RETURN_IF_ERROR(ChooseAttention(device, kName, shape, &Candidates, &tiling, args, with));
  }
  if (!sequences.empty()) tiling.kv_splits = 1;

  FlashAttentionOperands g;
  static_cast<ScoreOperands&>(g) = AddScoreOperands(launch, args, shape);
  g.q = launch.Input("q", args.q), g.q_rope = launch.Input("q_rope", args.q_rope);
  g.k = launch.Input("k", args.k), g.k_rope = launch.Input("k_rope", args.k_rope);
  g.v = launch.Input("v", args.v), g.sinks = launch.Input("sinks", args.sinks);
  g.out = launch.Output("out", args.out), g.lse = launch.Output("lse", AsColumns(args.lse));
  if (shape.rotate) {
    const Rotations rotations = AddRotations(launch, args.rope, args.q.size(0));
    g.rotate = rotations.of_queries;
    const GmTensor& plain = *g.k_rope;
    g.k_rope = launch.Workspace("k_turned", shape.in,
                                {plain.sizes[0], plain.sizes[1], plain.sizes[2], plain.sizes[3]});
    const std::int64_t rows = plain.sizes[0] * plain.sizes[1] * plain.sizes[2];
    launch.OnVectorCores(CeilDiv(rows, kRotateRows), [&](auto& core) {
      RotateKernel(core, rotations.of_keys, plain, *g.k_rope, sequences);
    });
  }
  if (tiling.pack_kv) {
    const auto pack = [&](const char* name, const GmTensor* source, bool transposed) {
      return PackSequences<T>(launch, name, *source, transposed, Role::kRows, KeysToPack(sequences), step);
    };
    g.k_packed = pack("k_packed", g.k, /*transposed=*/true);
    if (shape.d_rope > 0) g.k_rope_packed = pack("k_rope_packed", g.k_rope, /*transposed=*/true);
    g.v_packed = pack("v_packed", g.v, /*transposed=*/false);
  }
  const std::int64_t all_heads = shape.batches * shape.heads;
  if (tiling.kv_splits > 1) {
    g.part_out =
        launch.Workspace("part_out", DType::kF32, {tiling.kv_splits, all_heads, shape.sq, shape.d_v});
    g.part_lse = launch.Workspace("part_lse", DType::kF32, {tiling.kv_splits, all_heads, shape.sq, 1});
  }
  const FlashAttentionSchedule schedule(shape, tiling, sequences);
  launch.OnAiCores(schedule.tasks(),
                   [&](auto& core) { FlashAttentionKernel<T>(core, g, shape, tiling, schedule); });
  if (tiling.kv_splits > 1) {
    launch.OnVectorCores(all_heads * CeilDiv(shape.sq, kCombineRows), [&](auto& core) {
      AttentionCombineKernel(core, *g.part_out, *g.part_lse, *g.out, g.lse);
    });
  }
  return {};
}

Status RunAny(const Device& device, const FlashAttentionArgs& args, Launch& launch) {
  return WithFloatType(args.q.dtype, [&]<class T>(T) { return Run<T>(device, args, launch); });
}

}  // namespace

Status FlashAttention(const Device& device, const FlashAttentionArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return RunLaunch(device, kName, args.workspace, profile,
                   [&](Launch& launch) { return RunAny(device, args, launch); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status FlashAttentionWorkspace(const Device& device, const FlashAttentionArgs& args,
                               std::int64_t* bytes) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return MeasureLaunch(
      device, kName, [&](Launch& launch) { return RunAny(device, args, launch); }, bytes);
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
