// Calls of row kernels and of blocks.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "tests/fuzz/caller.h"

namespace cubist::fuzz {

void CallRmsNorm(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size();
  const DType dtype = in.Float();
  RmsNormArgs args;
  args.x = in.Of(dtype, {t, h});
  args.gamma = in.Maybe(in.Float(), {h});
  if (in.choose().Seldom()) args.residual = in.Of(dtype, {t, h}), args.sum = in.Of(dtype, {t, h});
  if (in.choose().Seldom()) args.eps = in.choose().Number();
  args.out = in.Of(dtype, {t, h});
  args.rstd = in.Maybe(DType::kF32, {t});
  in.Run([&](const Device& device) { return RmsNorm(device, args); });
}

void CallRmsNormGrad(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size();
  const DType dtype = in.Float();
  RmsNormGradArgs args;
  args.d_out = in.Of(dtype, {t, h});
  args.x = in.Of(dtype, {t, h});
  args.rstd = in.Of(DType::kF32, {t});
  args.gamma = in.Maybe(in.Float(), {h});
  args.d_sum = in.Maybe(dtype, {t, h});
  args.d_x = in.Of(dtype, {t, h});
  args.d_gamma = in.Maybe(in.Float(), {h});
  in.Run([&](const Device& device) { return RmsNormGrad(device, args); });
}

void CallSwiGlu(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size();
  const DType dtype = in.Float();
  SwiGluArgs args;
  args.gate = in.Of(dtype, {m, n});
  args.up = in.Of(dtype, {m, n});
  args.probs = in.Maybe(in.Float(), {m});
  args.out = in.Of(dtype, {m, n});
  in.Run([&](const Device& device) { return SwiGlu(device, args); });
}

void CallSwiGluGrad(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size();
  const DType dtype = in.Float();
  SwiGluGradArgs args;
  args.d_out = in.Of(dtype, {m, n});
  args.gate = in.Of(dtype, {m, n});
  args.up = in.Of(dtype, {m, n});
  args.probs = in.Maybe(in.Float(), {m});
  args.d_gate = in.Of(dtype, {m, n});
  args.d_up = in.Of(dtype, {m, n});
  if (args.probs.given()) args.d_probs = in.Maybe(in.Float(), {m});
  in.Run([&](const Device& device) { return SwiGluGrad(device, args); });
}

namespace {

// A block forward, and half of the time its gradients after it, of the weights that `gradients` names. Both on one
// device, as the state is of one.
template <class Args, class GradArgs, class Gradients>
void RunBlock(Caller& in, const Args& args,
              Status (*forward)(const Device&, const Args&, BlockState*, BlockProfile*),
              Status (*backward)(const Device&, const GradArgs&, BlockState*, BlockProfile*),
              const Gradients& gradients) {
  BlockState state;
  const bool back = in.choose().Below(2) == 1;
  in.Run([&](const Device& device) { return forward(device, args, &state, nullptr); });
  if (!back || !forward(Host(), args, &state, nullptr).ok()) return;
  GradArgs grad;
  grad.forward = args;
  grad.d_out = in.Of(args.x.dtype, {args.x.size(0), args.x.size(1)});
  grad.d_x = in.Of(args.x.dtype, {args.x.size(0), args.x.size(1)});
  gradients(&grad);
  in.Run([&](const Device&) { return backward(Host(), grad, &state, nullptr); });
}

}  // namespace

void CallMoeBlock(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size(), e = in.Size(), f = in.choose().Below(4);
  const DType dtype = in.Float();
  MoeBlockArgs args;
  args.x = in.Of(dtype, {t, h});
  args.weights.norm = in.Of(in.Float(), {h});
  args.weights.router = in.Of(in.choose().Seldom() ? DType::kF32 : dtype, {h, e});
  args.weights.router_bias = in.Maybe(in.Float(), {e});
  args.weights.gate_up = in.Of(dtype, {e, h, 2 * f});
  args.weights.down = in.Of(dtype, {e, f, h});
  if (!in.choose().Often()) {
    args.weights.shared_gate_up = in.Of(dtype, {h, 2 * f});
    args.weights.shared_down = in.Of(dtype, {f, h});
  }
  if (in.choose().Seldom()) args.weights.post_norm = in.Of(dtype, {h});
  args.route = OptionsOf(in);
  args.top_k = in.choose().Below(4);
  args.weighs_activation = in.choose().Seldom();
  if (in.choose().Seldom()) args.eps = in.choose().Number();
  args.out = in.Of(dtype, {t, h});
  if (in.choose().Seldom()) args.aux_loss = in.Of(DType::kF32, {1});
  if (in.choose().Seldom()) args.valid = in.Of(DType::kBool, {t});
  RunBlock(in, args, &MoeBlock, &MoeBlockGrad, [&](MoeBlockGradArgs* grad) {
    if (in.choose().Seldom()) grad->d_aux_loss = in.choose().Number();
    grad->gradients.norm = in.Maybe(DType::kF32, {h});
    grad->gradients.router = in.Maybe(dtype, {h, e});
    grad->gradients.gate_up = in.Maybe(dtype, {e, h, 2 * f});
    grad->gradients.down = in.Maybe(DType::kF32, {e, f, h});
  });
}

void CallMlaBlock(Caller& in) {
  const std::int64_t s = in.Size(), h = in.Size(), n = 1 + in.choose().Below(2), dn = in.Size(),
                     dr = 2 * in.choose().Below(3), dv = in.Size(), rank = in.Size();
  const DType dtype = in.Float();
  MlaBlockArgs args;
  args.batch = in.choose().Seldom() ? in.Size() - 1 : 1 + in.choose().Below(2);
  args.heads = in.choose().Seldom() ? in.Size() - 1 : n;
  const std::int64_t rows = std::max<std::int64_t>(args.batch, 1) * s;
  args.x = in.Of(dtype, {rows, h});
  args.weights.norm = in.Of(in.Float(), {h});
  const bool low = !in.choose().Often();
  if (low) args.weights.q_down = in.Of(dtype, {h, rank}), args.weights.q_norm = in.Of(dtype, {rank});
  args.weights.q_up = in.Of(dtype, {low ? rank : h, n * (dn + dr)});
  args.weights.kv_down = in.Of(dtype, {h, rank + dr});
  args.weights.kv_norm = in.Of(in.Float(), {rank});
  args.weights.kv_up = in.Of(dtype, {rank, n * (dn + dv)});
  args.weights.out = in.Of(dtype, {n * dv, h});
  if (in.choose().Seldom()) args.weights.post_norm = in.Of(dtype, {h});
  args.causal = in.choose().Of(kCausal);
  if (in.choose().Seldom()) args.scale = in.choose().Number();
  if (in.choose().Seldom()) args.eps = in.choose().Number();
  std::vector<std::int64_t> ends;
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.choose().Below(4); i > 0; --i) ends.push_back(in.Size());
    args.lengths = {ends, ends};
  }
  if (in.choose().Seldom()) {
    args.rope.cos = in.Of(DType::kF32, {2 * kMost, dr / 2});
    args.rope.sin = in.Of(DType::kF32, {2 * kMost, dr / 2});
  }
  args.out = in.Of(dtype, {rows, h});
  RunBlock(in, args, &MlaBlock, &MlaBlockGrad, [&](MlaBlockGradArgs* grad) {
    grad->gradients.norm = in.Maybe(DType::kF32, {h});
    grad->gradients.q_up = in.Maybe(dtype, {low ? rank : h, n * (dn + dr)});
    grad->gradients.kv_down = in.Maybe(dtype, {h, rank + dr});
    grad->gradients.kv_up = in.Maybe(DType::kF32, {rank, n * (dn + dv)});
    grad->gradients.out = in.Maybe(dtype, {n * dv, h});
  });
}

}  // namespace cubist::fuzz
