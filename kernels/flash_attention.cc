#include "kernels/flash_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/attention_combine_kernel.h"
#include "kernels/attention_sequences.h"
#include "kernels/choose_for.h"
#include "kernels/flash_attention_kernel.h"
#include "kernels/pack.h"
#include "kernels/validate.h"
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
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

// The longest of packed sequences, or the only one.
std::int64_t LongestOf(std::span<const std::int64_t> ends, std::int64_t size) {
  if (ends.empty()) return size;
  std::int64_t longest = 0, begin = 0;
  for (const std::int64_t end : ends) longest = std::max(longest, end - begin), begin = end;
  return longest;
}

Status CheckRope(const AttentionRope& rope, const Argument& cos, const Argument& sin, const Argument& turned,
                 bool whole, std::int64_t sq, std::int64_t skv) {
  CUBIST_RETURN_IF_ERROR(CheckShape(cos, {{"P"}, {"R / 2"}}));
  CUBIST_RETURN_IF_ERROR(
      CheckShape(sin, {{"P, of rope.cos", cos.tensor.size(0)}, {"R / 2, of rope.cos", cos.tensor.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(cos, {DType::kF32, turned.tensor.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sin, {cos.tensor.dtype}));
  const std::int64_t turned_cols = 2 * cos.tensor.size(1), cols = turned.tensor.size(3);
  if (whole ? turned_cols != cols : turned_cols > cols) {
    return cos.Error("has " + std::to_string(cos.tensor.size(1)) + " columns, which turn " +
                     std::to_string(turned_cols) + ", needs " + (whole ? "" : "at most ") + "half the " +
                     std::to_string(cols) + " of " + turned.name);
  }
  const auto check = [&](const char* name, std::int64_t offset, std::int64_t rows) {
    if (offset >= 0 && offset <= cos.tensor.size(0) - rows) return Status();
    return InvalidArgument(std::string(kName) + ": " + name + " is " + std::to_string(offset) +
                           ", needs 0 to " + std::to_string(cos.tensor.size(0) - rows) + ": rope.cos has " +
                           std::to_string(cos.tensor.size(0)) + " positions for " + std::to_string(rows) +
                           " rows");
  };
  CUBIST_RETURN_IF_ERROR(check("rope.q_offset", rope.q_offset, sq));
  return check("rope.k_offset", rope.k_offset, skv);
}

Status CheckBias(const FlashAttentionArgs& args, const Argument& bias, std::array<std::int64_t, 4> sizes) {
  CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"B or 1"}, {"Nq or 1"}, {"Sq or 1"}, {"Skv or 1"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(bias, {DType::kF32, args.q.dtype}));
  for (int d = 0; d < 4; ++d) {
    const std::int64_t size = bias.tensor.size(d), needed = sizes[static_cast<std::size_t>(d)];
    if (size == 1 || size == needed) continue;
    return bias.Error("has size " + std::to_string(size) + " in dimension " + std::to_string(d) +
                      ", needs 1 or " + std::to_string(needed));
  }
  return args.lengths.given() ? bias.Error("goes with no lengths") : Status();
}

Status Validate(const Device& device, const FlashAttentionArgs& args) {
  const Argument q{kName, "q", args.q}, k{kName, "k", args.k}, v{kName, "v", args.v};
  const Argument q_rope{kName, "q_rope", args.q_rope}, k_rope{kName, "k_rope", args.k_rope};
  const Argument out{kName, "out", args.out}, lse{kName, "lse", args.lse};
  const Argument cos{kName, "rope.cos", args.rope.cos}, sin{kName, "rope.sin", args.rope.sin};
  const Argument bias{kName, "bias", args.bias}, sinks{kName, "sinks", args.sinks};
  CUBIST_RETURN_IF_ERROR(CheckShape(q, {{"B"}, {"Nq"}, {"Sq"}, {"Dqk"}}));
  const std::int64_t b = args.q.size(0), nq = args.q.size(1), sq = args.q.size(2), d_qk = args.q.size(3);
  CUBIST_RETURN_IF_ERROR(CheckShape(k, {{"B, of q", b}, {"Nkv"}, {"Skv"}, {"Dqk, of q", d_qk}}));
  const std::int64_t nkv = args.k.size(1), skv = args.k.size(2);
  CUBIST_RETURN_IF_ERROR(CheckShape(v, {{"B, of q", b}, {"Nkv, of k", nkv}, {"Skv, of k", skv}, {"Dv"}}));
  if (nkv == 0 ? nq != 0 : nq % nkv != 0) {
    return q.Error("has " + std::to_string(nq) + " heads, needs a multiple of the " + std::to_string(nkv) +
                   " heads of k");
  }
  if (args.q_rope.given() != args.k_rope.given()) {
    return (args.q_rope.given() ? k_rope : q_rope).Error("is not given, but the other rope part is");
  }
  if (args.q_rope.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(q_rope, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}, {"Dr"}}));
    CUBIST_RETURN_IF_ERROR(CheckShape(
        k_rope, {{"B, of q", b}, {"heads"}, {"Skv, of k", skv}, {"Dr, of q_rope", args.q_rope.size(3)}}));
    if (args.k_rope.size(1) != 1 && args.k_rope.size(1) != nkv) {
      return k_rope.Error("has " + std::to_string(args.k_rope.size(1)) + " heads, needs 1 or the " +
                          std::to_string(nkv) + " of k");
    }
  }
  CUBIST_RETURN_IF_ERROR(
      CheckShape(out, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}, {"Dv, of v", args.v.size(3)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(q, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {DType::kF32, args.q.dtype}));
  for (const Argument* arg : {&k, &v, &q_rope, &k_rope}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.q.dtype}));
  }
  if (args.lse.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(lse, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(lse, {DType::kF32}));
  }
  CUBIST_RETURN_IF_ERROR(CheckSequences(kName, args.window, args.prefix, args.lengths, b, sq, skv));
  const float scale = args.scale.value_or(1.0f);
  if (!std::isfinite(scale)) {
    return InvalidArgument(std::string(kName) + ": scale is " + std::to_string(scale) +
                           ", needs a finite number");
  }
  if (args.rope.given()) {
    CUBIST_RETURN_IF_ERROR(CheckRope(args.rope, cos, sin, args.q_rope.given() ? q_rope : q,
                                     args.q_rope.given(), LongestOf(args.lengths.q_ends, sq),
                                     LongestOf(args.lengths.kv_ends, skv)));
  }
  if (args.bias.given()) {
    CUBIST_RETURN_IF_ERROR(CheckBias(args, bias, {b, nq, sq, skv}));
  }
  if (args.sinks.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(sinks, {{"Nq, of q", nq}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(sinks, {DType::kF32}));
  }
  if (args.soft_cap && !(std::isfinite(*args.soft_cap) && *args.soft_cap > 0)) {
    return InvalidArgument(std::string(kName) + ": soft_cap is " + std::to_string(*args.soft_cap) +
                           ", needs a finite number above 0");
  }
  for (const Argument* arg : {&q, &k, &v, &q_rope, &k_rope, &cos, &sin, &bias, &sinks, &out, &lse}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  }
  for (const Argument* output : {&out, &lse}) {
    if (!output->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* input : {&q, &k, &v, &q_rope, &k_rope, &cos, &sin, &bias, &sinks})
      CUBIST_RETURN_IF_ERROR(CheckApart(*output, *input));
  }
  return CheckApart(out, lse);
}

// lse (b, n, s) as (b, n, s, 1), so that its matrix at (b, n) is a column.
Tensor AsColumns(const Tensor& lse) {
  Tensor columns = lse;
  if (lse.given()) columns.rank = 4, columns.sizes[3] = 1, columns.strides[3] = 1;
  return columns;
}

// Part of one dimension.
template <class Tensor>
Tensor PartOf(Tensor x, int d, Range part) {
  if (x.data != nullptr) {
    auto* bytes =
        static_cast<std::conditional_t<std::is_same_v<Tensor, ConstTensor>, const char, char>*>(x.data);
    x.data = bytes + part.begin * x.stride(d) * SizeOf(x.dtype);
  }
  x.sizes[static_cast<std::size_t>(d)] = part.size();
  return x;
}

// Rotary columns of q and k as rope parts of their own.
void SplitRotaryColumns(FlashAttentionArgs& args) {
  if (!args.rope.given() || args.q_rope.given()) return;
  const std::int64_t turned = 2 * args.rope.cos.size(1), cols = args.q.size(3);
  args.q_rope = PartOf(args.q, 3, {0, turned}), args.q = PartOf(args.q, 3, {turned, cols});
  args.k_rope = PartOf(args.k, 3, {0, turned}), args.k = PartOf(args.k, 3, {turned, cols});
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
  const bool alone = args.prefix.empty() && !args.lengths.given() && !args.rope.given() &&
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

// The bias with every size written out; a row or column that serves all is repeated by stride 0.
ConstTensor Broadcast(ConstTensor bias, std::array<std::int64_t, 4> sizes) {
  for (std::size_t d = 0; d < 4; ++d) {
    if (bias.sizes[d] == 1) bias.strides[d] = 0;
    bias.sizes[d] = sizes[d];
  }
  return bias;
}

// Packs K and V (or another such operand) of every batch entry, or of every sequence, for all KV heads.
template <class T>
PackedGm PackKeys(Launch& launch, const char* name, const GmTensor& source, bool transposed,
                  const std::vector<AttentionSequence>& sequences, std::int64_t step) {
  if (sequences.empty() || sequences.back().batch > 0) {
    return Pack<T>(launch, name, Role::kB, source, transposed);
  }
  const AttentionSequence& last = sequences.back();
  const std::int64_t keys = last.packed_begin + RoundUp(last.skv, step), d = source.sizes[3];
  const PackedGm packed = launch.Packed(name, Role::kB, source.dtype, transposed ? d : keys,
                                        transposed ? keys : d, source.sizes[1]);
  for (const AttentionSequence& s : sequences) {
    GmTensor part = source;
    part.sizes[2] = s.skv;
    if (part.data != nullptr) part.data += s.kv_begin * source.strides[2] * SizeOf(source.dtype);
    const Range at{s.packed_begin, s.packed_begin + s.skv};
    const PackedGm block = transposed ? packed.Block({0, d}, at) : packed.Block(at, {0, d});
    const PackTiling tiling = ChoosePackTiling(launch.chip(), packed.role, source.dtype,
                                               block.row_part.size(), block.col_part.size(), source.sizes[1]);
    launch.OnAiCores(tiling.tasks(),
                     [&](auto& core) { PackKernel<T>(core, part, transposed, block, tiling); });
  }
  return packed;
}

template <class T>
Status Run(const Device& device, FlashAttentionArgs args, Profile* profile) {
  Launch launch(device, kName);
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
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kName, shape, &Candidates, &tiling));
  if (!sequences.empty()) tiling.kv_splits = 1;

  FlashAttentionOperands g;
  g.q = launch.Input("q", args.q), g.q_rope = launch.Input("q_rope", args.q_rope);
  g.k = launch.Input("k", args.k), g.k_rope = launch.Input("k_rope", args.k_rope);
  g.v = launch.Input("v", args.v);
  g.out = launch.Output("out", args.out), g.lse = launch.Output("lse", AsColumns(args.lse));
  g.scale = args.scale.value_or(
      1.0f / std::sqrt(static_cast<float>(std::max<std::int64_t>(shape.d_qk + shape.d_rope, 1))));
  g.soft_cap = args.soft_cap.value_or(0);
  if (shape.bias) {
    g.bias = launch.Input("bias", Broadcast(args.bias, {args.q.size(0), shape.heads, shape.sq, shape.skv}));
  }
  g.sinks = launch.Input("sinks", args.sinks);
  if (shape.rotate) {
    g.rotate = {launch.Input("cos", args.rope.cos), launch.Input("sin", args.rope.sin),
                args.rope.layout != RopeLayout::kHalf, /*inverse=*/false};
    g.q_offset = args.rope.q_offset;
    const GmTensor& plain = *g.k_rope;
    g.k_rope = launch.Workspace("k_turned", shape.in,
                                {plain.sizes[0], plain.sizes[1], plain.sizes[2], plain.sizes[3]});
    const std::int64_t rows = plain.sizes[0] * plain.sizes[1] * plain.sizes[2];
    launch.OnVectorCores(CeilDiv(rows, kRotateRows), [&](auto& core) {
      RotateKernel(core, g.rotate, plain, *g.k_rope, sequences, args.rope.k_offset);
    });
  }
  if (tiling.pack_kv) {
    g.k_packed = PackKeys<T>(launch, "k_packed", *g.k, /*transposed=*/true, sequences, step);
    if (shape.d_rope > 0) {
      g.k_rope_packed = PackKeys<T>(launch, "k_rope_packed", *g.k_rope, /*transposed=*/true, sequences, step);
    }
    g.v_packed = PackKeys<T>(launch, "v_packed", *g.v, /*transposed=*/false, sequences, step);
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
  return launch.Finish(profile);
}

}  // namespace

Status FlashAttention(const Device& device, const FlashAttentionArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  switch (args.q.dtype) {
    case DType::kBF16:
      return Run<BF16>(device, args, profile);
    case DType::kF16:
      return Run<F16>(device, args, profile);
    default:
      return Run<float>(device, args, profile);
  }
}

}  // namespace cubist
