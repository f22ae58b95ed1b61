#include "kernels/flash_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

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
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

Status Validate(const Device& device, const FlashAttentionArgs& args) {
  const Argument q{kName, "q", args.q}, k{kName, "k", args.k}, v{kName, "v", args.v};
  const Argument q_rope{kName, "q_rope", args.q_rope}, k_rope{kName, "k_rope", args.k_rope};
  const Argument out{kName, "out", args.out}, lse{kName, "lse", args.lse};
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
  if (!args.prefix.empty()) {
    if (static_cast<std::int64_t>(args.prefix.size()) != b) {
      return InvalidArgument(std::string(kName) + ": prefix has " + std::to_string(args.prefix.size()) +
                             " entries, needs the " + std::to_string(b) + " of B, of q");
    }
    for (const std::int64_t keys : args.prefix) {
      if (keys >= 0 && keys <= skv) continue;
      return InvalidArgument(std::string(kName) + ": prefix is " + std::to_string(keys) +
                             ", needs 0 to the " + std::to_string(skv) + " of Skv, of k");
    }
    if (args.window && args.window->left) {
      return InvalidArgument(std::string(kName) + ": prefix goes with no left side of window, which is " +
                             std::to_string(*args.window->left));
    }
  }
  const float scale = args.scale.value_or(1.0f);
  if (!std::isfinite(scale)) {
    return InvalidArgument(std::string(kName) + ": scale is " + std::to_string(scale) +
                           ", needs a finite number");
  }
  for (const Argument* arg : {&q, &k, &v, &q_rope, &k_rope, &out, &lse}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  }
  for (const Argument* output : {&out, &lse}) {
    if (!output->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* input : {&q, &k, &v, &q_rope, &k_rope})
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

template <class T>
Status Run(const Device& device, const FlashAttentionArgs& args, Profile* profile) {
  Launch launch(device, kName);
  const FlashAttentionShape shape = ShapeOf(args);
  FlashAttentionTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kName, shape, &Candidates, &tiling));

  FlashAttentionOperands g;
  g.q = launch.Input("q", args.q), g.q_rope = launch.Input("q_rope", args.q_rope);
  g.k = launch.Input("k", args.k), g.k_rope = launch.Input("k_rope", args.k_rope);
  g.v = launch.Input("v", args.v);
  g.out = launch.Output("out", args.out), g.lse = launch.Output("lse", AsColumns(args.lse));
  g.scale = args.scale.value_or(
      1.0f / std::sqrt(static_cast<float>(std::max<std::int64_t>(shape.d_qk + shape.d_rope, 1))));
  if (tiling.pack_kv) {
    g.k_packed = Pack<T>(launch, "k_packed", Role::kB, *g.k, /*transposed=*/true);
    if (shape.d_rope > 0)
      g.k_rope_packed = Pack<T>(launch, "k_rope_packed", Role::kB, *g.k_rope, /*transposed=*/true);
    g.v_packed = Pack<T>(launch, "v_packed", Role::kB, *g.v, /*transposed=*/false);
  }
  const std::vector<AttentionSequence> sequences =
      SequencesOf(args.causal, args.window, args.prefix, shape.sq, shape.skv);
  const FlashAttentionSchedule schedule(shape, tiling, sequences);
  launch.OnAiCores(schedule.tasks(),
                   [&](auto& core) { FlashAttentionKernel<T>(core, g, shape, tiling, schedule); });
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
