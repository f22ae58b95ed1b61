#include "kernels/mla_block.h"

#include <cmath>
#include <cstddef>
#include <new>
#include <string>

#include "kernels/attention_arguments.h"
#include "kernels/block_steps.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/matmul.h"
#include "kernels/rms_norm.h"
#include "kernels/validate.h"

namespace cubist {
namespace {

constexpr const char* kBlock = "mla_block";

// As the weights' shapes say, which need not agree yet.
struct Sizes {
  explicit Sizes(const MlaBlockArgs& a)
      : tokens(a.x.size(0)),
        hidden(a.x.size(1)),
        heads(a.heads),
        q_rank(a.weights.q_down.given() ? a.weights.q_down.size(1) : hidden),
        kv_rank(a.weights.kv_norm.size(0)),
        rope(a.weights.kv_down.size(1) - kv_rank),
        qk(a.weights.q_up.size(1) / heads),
        nope(qk - rope),
        v(a.weights.out.size(0) / heads) {}

  std::int64_t tokens, hidden, heads, q_rank, kv_rank, rope, qk, nope, v;
};

// The tensors that the forward pass leaves for the backward one.
struct Kept {
  Kept(const Device& device, const MlaBlockArgs& a, const Sizes& s, BlockState* state) {
    const BlockMemory take(device, state);
    const DType t = a.x.dtype;
    normed = take("normed", t, {s.tokens, s.hidden}), rstd = take("rstd", DType::kF32, {s.tokens});
    if (a.weights.q_down.given()) {
      q_latent = take("q_latent", t, {s.tokens, s.q_rank}),
      q_normed = take("q_normed", t, {s.tokens, s.q_rank});
      q_rstd = take("q_rstd", DType::kF32, {s.tokens});
    } else {
      q_normed = normed;
    }
    q = take("q", t, {s.tokens, s.heads * s.qk});
    kv_latent = take("kv_latent", t, {s.tokens, s.kv_rank + s.rope});
    kv_normed = take("kv_normed", t, {s.tokens, s.kv_rank}),
    kv_rstd = take("kv_rstd", DType::kF32, {s.tokens});
    kv = take("kv", t, {s.tokens, s.heads * (s.nope + s.v)});
    o = take("o", t, {s.tokens, s.heads * s.v});
    lse = take("lse", DType::kF32, {a.batch, s.heads, s.tokens / a.batch});
    y = take("y", t, {s.tokens, s.hidden});
    if (a.weights.post_norm.given()) {
      post = take("post", t, {s.tokens, s.hidden}), post_rstd = take("post_rstd", DType::kF32, {s.tokens});
    }
  }

  Tensor normed, rstd, q_latent, q_normed, q_rstd, q, kv_latent, kv_normed, kv_rstd, kv, o, lse, y;
  Tensor post, post_rstd;  // With post_norm.
};

FlashAttentionArgs AttentionOf(const MlaBlockArgs& a, const Sizes& s, const Kept& k) {
  FlashAttentionArgs args;
  args.q = Heads(k.q, a.batch, s.heads, {0, s.nope});
  args.k = Heads(k.kv, a.batch, s.heads, {0, s.nope});
  args.v = Heads(k.kv, a.batch, s.heads, {s.nope, s.nope + s.v});
  if (s.rope > 0) {
    args.q_rope = Heads(k.q, a.batch, s.heads, {s.nope, s.qk});
    args.k_rope = Heads(k.kv_latent, a.batch, 1, {s.kv_rank, s.kv_rank + s.rope});
  }
  args.out = Heads(k.o, a.batch, s.heads, {0, s.v});
  args.lse = k.lse;
  args.scale = a.scale, args.causal = a.causal, args.lengths = a.lengths;
  args.rope = a.rope;
  return args;
}

FlashAttentionGradArgs AttentionGradOf(const MlaBlockArgs& a, const Sizes& s, const Kept& k,
                                       const Tensor& d_o, const Tensor& d_q, const Tensor& d_kv,
                                       const Tensor& d_kv_latent) {
  const FlashAttentionArgs forward = AttentionOf(a, s, k);
  FlashAttentionGradArgs args;
  args.q = forward.q, args.k = forward.k, args.v = forward.v;
  args.q_rope = forward.q_rope, args.k_rope = forward.k_rope;
  args.out = forward.out, args.lse = forward.lse;
  args.scale = forward.scale, args.causal = forward.causal;
  args.lengths = forward.lengths, args.rope = forward.rope;
  args.dout = Heads(d_o, a.batch, s.heads, {0, s.v});
  args.dq = Heads(d_q, a.batch, s.heads, {0, s.nope});
  args.dk = Heads(d_kv, a.batch, s.heads, {0, s.nope});
  args.dv = Heads(d_kv, a.batch, s.heads, {s.nope, s.nope + s.v});
  if (s.rope > 0) {
    args.dq_rope = Heads(d_q, a.batch, s.heads, {s.nope, s.qk});
    args.dk_rope = Heads(d_kv_latent, a.batch, 1, {s.kv_rank, s.kv_rank + s.rope});
  }
  return args;
}

// `arg` splits into `parts` along `d`, each of at least `least` elements.
Status CheckParts(const Argument& arg, int d, std::int64_t parts, std::int64_t least) {
  const std::int64_t size = arg.tensor.size(d);
  if (size % parts == 0 && size / parts >= least) return {};
  return arg.Error("has size " + std::to_string(size) + " in dimension " + std::to_string(d) + ", needs " +
                   std::to_string(parts) + " heads of at least " + std::to_string(least));
}

struct Arguments {
  explicit Arguments(const MlaBlockArgs& a)
      : x{kBlock, "x", a.x},
        norm{kBlock, "norm", a.weights.norm},
        q_down{kBlock, "q_down", a.weights.q_down},
        q_norm{kBlock, "q_norm", a.weights.q_norm},
        q_up{kBlock, "q_up", a.weights.q_up},
        kv_down{kBlock, "kv_down", a.weights.kv_down},
        kv_norm{kBlock, "kv_norm", a.weights.kv_norm},
        kv_up{kBlock, "kv_up", a.weights.kv_up},
        out_weights{kBlock, "weights.out", a.weights.out},
        post_norm{kBlock, "post_norm", a.weights.post_norm},
        cos{kBlock, "rope.cos", a.rope.cos},
        sin{kBlock, "rope.sin", a.rope.sin},
        out{kBlock, "out", a.out} {}

  Argument x, norm, q_down, q_norm, q_up, kv_down, kv_norm, kv_up, out_weights, post_norm, cos, sin, out;
};

Status CheckShapes(const MlaBlockArgs& a, const Arguments& g) {
  CUBIST_RETURN_IF_ERROR(CheckShape(g.x, {{"T"}, {"H"}}));
  const Dim h{"H, of x", a.x.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(g.out, {{"T, of x", a.x.size(0)}, h}));
  CUBIST_RETURN_IF_ERROR(CheckShape(g.norm, {h}));
  if (g.q_down.tensor.given() != g.q_norm.tensor.given()) {
    return (g.q_down.tensor.given() ? g.q_norm : g.q_down).Error("is not given, and its other half is");
  }
  if (a.heads < 1) return OptionError(kBlock, "heads", a.heads, "at least 1");
  if (a.batch < 1 || a.x.size(0) % a.batch != 0)
    return OptionError(kBlock, "batch", a.batch, "a divisor of T, " + std::to_string(a.x.size(0)));
  Dim q_rank = h;
  if (g.q_down.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(g.q_down, {h, {"Rq"}}));
    q_rank = {"Rq, of q_down", a.weights.q_down.size(1)};
    CUBIST_RETURN_IF_ERROR(CheckShape(g.q_norm, {q_rank}));
  }
  CUBIST_RETURN_IF_ERROR(CheckShape(g.q_up, {q_rank, {"N (Dn + Dr)"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(g.kv_norm, {{"Rkv"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(g.kv_down, {h, {"Rkv + Dr"}}));
  CUBIST_RETURN_IF_ERROR(CheckParts(g.kv_down, 1, 1, a.weights.kv_norm.size(0)));
  CUBIST_RETURN_IF_ERROR(CheckShape(g.out_weights, {{"N Dv"}, h}));
  const Sizes s(a);
  CUBIST_RETURN_IF_ERROR(CheckParts(g.q_up, 1, a.heads, s.rope));
  CUBIST_RETURN_IF_ERROR(CheckParts(g.out_weights, 0, a.heads, 0));
  CUBIST_RETURN_IF_ERROR(
      CheckShape(g.kv_up, {{"Rkv, of kv_norm", s.kv_rank},
                           {"N (Dn + Dv), of q_up, kv_down and weights.out", s.heads * (s.nope + s.v)}}));
  return g.post_norm.tensor.given() ? CheckShape(g.post_norm, {h}) : Status();
}

Status Validate(const Device& device, const MlaBlockArgs& a) {
  const Arguments g(a);
  CUBIST_RETURN_IF_ERROR(CheckShapes(a, g));
  CUBIST_RETURN_IF_ERROR(CheckDType(g.x, kFloatTypes));
  for (const Argument* arg : {&g.out, &g.q_down, &g.q_up, &g.kv_down, &g.kv_up, &g.out_weights}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {a.x.dtype}));
  }
  for (const Argument* arg : {&g.norm, &g.q_norm, &g.kv_norm, &g.post_norm}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, kFloatTypes));
  }
  if (!(a.eps >= 0) || std::isinf(a.eps)) return OptionError(kBlock, "eps", a.eps, "a finite value >= 0");
  const Sizes s(a);
  if (a.rope.given() && s.rope == 0)
    return g.cos.Error("is given, and kv_down has no columns behind the " + std::to_string(s.kv_rank) +
                       " of kv_norm");
  // What attention will ask of its options; its tensors are this block's own.
  BlockState none;
  const FlashAttentionArgs attention =
      AttentionOf(a, s, Kept(Npu(device.chip(), {.with_data = false}), a, s, &none));
  CUBIST_RETURN_IF_ERROR(AttentionArguments(kBlock, attention).Check());
  for (const auto ends : {a.lengths.q_ends, a.lengths.kv_ends}) {
    if (!ends.empty() && ends.back() != s.tokens)
      return OptionError(kBlock, "the last end of lengths", ends.back(), "T, " + std::to_string(s.tokens));
  }
  return CheckTensors(device,
                      {&g.x, &g.norm, &g.q_down, &g.q_norm, &g.q_up, &g.kv_down, &g.kv_norm, &g.kv_up,
                       &g.out_weights, &g.post_norm, &g.cos, &g.sin},
                      {&g.out});
}

// A gradient shaped like a weight, where given.
struct GradientOf {
  Argument gradient;
  ConstTensor weight;
};

Status ValidateGrad(const Device& device, const MlaBlockGradArgs& args) {
  const MlaBlockArgs& f = args.forward;
  CUBIST_RETURN_IF_ERROR(Validate(device, f));
  const Argument d_out{kBlock, "d_out", args.d_out}, d_x{kBlock, "d_x", args.d_x};
  for (const Argument* arg : {&d_out, &d_x}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {{"T, of x", f.x.size(0)}, {"H, of x", f.x.size(1)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {f.x.dtype}));
  }
  const MlaBlockGradients& g = args.gradients;
  const MlaBlockWeights& w = f.weights;
  const GradientOf gradients[] = {{{kBlock, "gradients.norm", g.norm}, w.norm},
                                  {{kBlock, "gradients.q_down", g.q_down}, w.q_down},
                                  {{kBlock, "gradients.q_norm", g.q_norm}, w.q_norm},
                                  {{kBlock, "gradients.q_up", g.q_up}, w.q_up},
                                  {{kBlock, "gradients.kv_down", g.kv_down}, w.kv_down},
                                  {{kBlock, "gradients.kv_norm", g.kv_norm}, w.kv_norm},
                                  {{kBlock, "gradients.kv_up", g.kv_up}, w.kv_up},
                                  {{kBlock, "gradients.out", g.out}, w.out},
                                  {{kBlock, "gradients.post_norm", g.post_norm}, w.post_norm}};
  for (const auto& [gradient, weight] : gradients) CUBIST_RETURN_IF_ERROR(CheckGradient(gradient, weight));
  const auto of = [&](std::size_t i) { return &gradients[i].gradient; };
  const Arguments in(f);
  return CheckTensors(device,
                      {&d_out, &in.x, &in.norm, &in.q_down, &in.q_norm, &in.q_up, &in.kv_down, &in.kv_norm,
                       &in.kv_up, &in.out_weights, &in.post_norm, &in.cos, &in.sin},
                      {&d_x, of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8)});
}

}  // namespace

Status MlaBlock(const Device& device, const MlaBlockArgs& args, BlockState* state,
                BlockProfile* profile) try {
  CUBIST_RETURN_IF_ERROR(CheckState(kBlock, state));
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  const Sizes s(args);
  const MlaBlockWeights& w = args.weights;
  const Kept k(device, args, s, state);
  Steps steps(device, profile);
  const auto norm = [&](const char* name, const ConstTensor& x, const ConstTensor& gamma, const Tensor& out,
                        const Tensor& rstd) {
    steps.Run(name, &RmsNorm, RmsNormArgs{.x = x, .gamma = gamma, .eps = args.eps, .out = out, .rstd = rstd});
  };
  norm("norm", args.x, w.norm, k.normed, k.rstd);
  if (w.q_down.given()) {
    steps.Run("q down", &Matmul, MatmulArgs{.a = k.normed, .b = w.q_down, .c = k.q_latent});
    norm("q norm", k.q_latent, w.q_norm, k.q_normed, k.q_rstd);
  }
  steps.Run("q up", &Matmul, MatmulArgs{.a = k.q_normed, .b = w.q_up, .c = k.q});
  steps.Run("kv down", &Matmul, MatmulArgs{.a = k.normed, .b = w.kv_down, .c = k.kv_latent});
  norm("kv norm", PartOf(k.kv_latent, 1, {0, s.kv_rank}), w.kv_norm, k.kv_normed, k.kv_rstd);
  steps.Run("kv up", &Matmul, MatmulArgs{.a = k.kv_normed, .b = w.kv_up, .c = k.kv});
  steps.Run("attention", &FlashAttention, AttentionOf(args, s, k));
  steps.Run("out", &Matmul, MatmulArgs{.a = k.o, .b = w.out, .c = k.y});
  if (w.post_norm.given()) norm("post norm", k.y, w.post_norm, k.post, k.post_rstd);
  steps.Run("residual", &Sum, SumArgs{.a = args.x, .b = w.post_norm.given() ? k.post : k.y, .out = args.out});
  return steps.status();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status MlaBlockGrad(const Device& device, const MlaBlockGradArgs& args, BlockState* state,
                    BlockProfile* profile) try {
  CUBIST_RETURN_IF_ERROR(CheckState(kBlock, state));
  CUBIST_RETURN_IF_ERROR(ValidateGrad(device, args));
  const MlaBlockArgs& f = args.forward;
  const Sizes s(f);
  const MlaBlockWeights& w = f.weights;
  const MlaBlockGradients& g = args.gradients;
  const Kept k(device, f, s, state);
  const BlockMemory take(device, state);
  const DType t = f.x.dtype;
  Steps steps(device, profile);
  const auto norm = [&](const char* name, const ConstTensor& d_out, const ConstTensor& x, const Tensor& rstd,
                        const ConstTensor& gamma, const Tensor& d_x, const Tensor& d_gamma,
                        const ConstTensor& d_sum = {}) {
    steps.Run(name, &RmsNormGrad,
              RmsNormGradArgs{.d_out = d_out,
                              .x = x,
                              .rstd = rstd,
                              .gamma = gamma,
                              .d_sum = d_sum,
                              .d_x = d_x,
                              .d_gamma = d_gamma});
  };

  // Output projection and attention.
  ConstTensor d_y = args.d_out;
  if (w.post_norm.given()) {
    const Tensor d = take("d_y", t, {s.tokens, s.hidden});
    norm("post norm", args.d_out, k.y, k.post_rstd, w.post_norm, d, g.post_norm);
    d_y = d;
  }
  const Tensor d_o = take("d_o", t, {s.tokens, s.heads * s.v});
  ProjectionGrad(&steps, {"out", "out weights"},
                 {.x = k.o, .weights = w.out, .dy = d_y, .dx = d_o, .dw = g.out});
  const Tensor d_q = take("d_q", t, {s.tokens, s.heads * s.qk});
  const Tensor d_kv_latent = take("d_kv_latent", t, {s.tokens, s.kv_rank + s.rope});
  const Tensor d_kv = take("d_kv", t, {s.tokens, s.heads * (s.nope + s.v)});
  steps.Run("attention", &FlashAttentionGrad, AttentionGradOf(f, s, k, d_o, d_q, d_kv, d_kv_latent));

  // Queries.
  const Tensor d_normed_q = take("d_normed_q", t, {s.tokens, s.hidden});
  if (w.q_down.given()) {
    const Tensor d_q_normed = take("d_q_normed", t, {s.tokens, s.q_rank}),
                 d_q_latent = take("d_q_latent", t, {s.tokens, s.q_rank});
    ProjectionGrad(&steps, {"q up", "q up weights"},
                   {.x = k.q_normed, .weights = w.q_up, .dy = d_q, .dx = d_q_normed, .dw = g.q_up});
    norm("q norm", d_q_normed, k.q_latent, k.q_rstd, w.q_norm, d_q_latent, g.q_norm);
    ProjectionGrad(&steps, {"q down", "q down weights"},
                   {.x = k.normed, .weights = w.q_down, .dy = d_q_latent, .dx = d_normed_q, .dw = g.q_down});
  } else {
    ProjectionGrad(&steps, {"q up", "q up weights"},
                   {.x = k.normed, .weights = w.q_up, .dy = d_q, .dx = d_normed_q, .dw = g.q_up});
  }

  // Keys and values. The gradient of the rotary key stands behind the latent's already.
  const Tensor d_kv_normed = take("d_kv_normed", t, {s.tokens, s.kv_rank}),
               d_normed_kv = take("d_normed_kv", t, {s.tokens, s.hidden});
  const Range latent{0, s.kv_rank};
  ProjectionGrad(&steps, {"kv up", "kv up weights"},
                 {.x = k.kv_normed, .weights = w.kv_up, .dy = d_kv, .dx = d_kv_normed, .dw = g.kv_up});
  norm("kv norm", d_kv_normed, PartOf(k.kv_latent, 1, latent), k.kv_rstd, w.kv_norm,
       PartOf(d_kv_latent, 1, latent), g.kv_norm);
  ProjectionGrad(
      &steps, {"kv down", "kv down weights"},
      {.x = k.normed, .weights = w.kv_down, .dy = d_kv_latent, .dx = d_normed_kv, .dw = g.kv_down});

  // All that reaches the norm, then the norm and the residual stream.
  const Tensor d_normed = take("d_normed", t, {s.tokens, s.hidden});
  steps.Run("sum", &Sum, SumArgs{.a = d_normed_q, .b = d_normed_kv, .out = d_normed});
  norm("norm", d_normed, f.x, k.rstd, w.norm, args.d_x, g.norm, args.d_out);
  return steps.status();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
