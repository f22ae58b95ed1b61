#include "kernels/moe_block.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/block_steps.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/rms_norm.h"
#include "kernels/route_options.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/token_permute_grad.h"
#include "kernels/validate.h"

namespace cubist {
namespace {

constexpr const char* kBlock = "moe_block";

struct Sizes {
  std::int64_t tokens, hidden, experts, top_k, width, shared, rows;  // rows = tokens * top_k
};

Sizes SizesOf(const MoeBlockArgs& a) {
  const std::int64_t tokens = a.x.size(0);
  const MoeBlockWeights& w = a.weights;
  return {tokens,          a.x.size(1),    w.router.size(1),
          a.top_k,         w.down.size(1), w.shared_down.given() ? w.shared_down.size(0) : 0,
          tokens * a.top_k};
}

Status Validate(const Device& device, const MoeBlockArgs& args) {
  const MoeBlockWeights& w = args.weights;
  const Argument x{kBlock, "x", args.x}, out{kBlock, "out", args.out}, norm{kBlock, "norm", w.norm};
  const Argument router{kBlock, "router", w.router}, gate_up{kBlock, "gate_up", w.gate_up},
      down{kBlock, "down", w.down};
  const Argument shared_gate_up{kBlock, "shared_gate_up", w.shared_gate_up},
      shared_down{kBlock, "shared_down", w.shared_down}, post_norm{kBlock, "post_norm", w.post_norm},
      router_bias{kBlock, "router_bias", w.router_bias}, aux_loss{kBlock, "aux_loss", args.aux_loss},
      valid{kBlock, "valid", args.valid};
  CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"T"}, {"H"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(x, kFloatTypes));
  const Dim h{"H, of x", args.x.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"T, of x", args.x.size(0)}, h}));
  CUBIST_RETURN_IF_ERROR(CheckShape(norm, {h}));
  CUBIST_RETURN_IF_ERROR(CheckShape(router, {h, {"E"}}));
  const Dim e{"E, of router", w.router.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(down, {e, {"F"}, h}));
  CUBIST_RETURN_IF_ERROR(CheckShape(gate_up, {e, h, {"2 F, of down", 2 * w.down.size(1)}}));
  if (args.top_k < 1 || args.top_k > w.router.size(1)) {
    return OptionError(kBlock, "top_k", args.top_k, "1 to E, " + std::to_string(w.router.size(1)));
  }
  CUBIST_RETURN_IF_ERROR(
      CheckRouteOptions(kBlock, args.route, w.router.size(1), args.top_k, /*backward=*/false));
  if (!(args.eps >= 0) || std::isinf(args.eps))
    return OptionError(kBlock, "eps", args.eps, "a finite value >= 0");
  if (shared_gate_up.tensor.given() != shared_down.tensor.given()) {
    return (shared_down.tensor.given() ? shared_gate_up : shared_down)
        .Error("is not given, and its other half is");
  }
  if (shared_down.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(shared_down, {{"S"}, h}));
    CUBIST_RETURN_IF_ERROR(
        CheckShape(shared_gate_up, {h, {"2 S, of shared_down", 2 * w.shared_down.size(0)}}));
  }
  if (post_norm.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(post_norm, {h}));
  if (router_bias.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(router_bias, {e}));
  for (const Argument* arg : {&norm, &post_norm, &router_bias}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, kFloatTypes));
  }
  if (aux_loss.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(aux_loss, {{"one", 1}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(aux_loss, {DType::kF32}));
  }
  if (valid.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(valid, {{"T, of x", args.x.size(0)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(valid, {DType::kBool}));
  }
  for (const Argument* arg : {&out, &gate_up, &down, &shared_gate_up, &shared_down}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.x.dtype}));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(router, {args.x.dtype, DType::kF32}));
  CUBIST_RETURN_IF_ERROR(CheckTensors(
      device,
      {&x, &norm, &router, &router_bias, &gate_up, &down, &shared_gate_up, &shared_down, &post_norm, &valid},
      {&out, &aux_loss}));
  return router_bias.tensor.given() && device.computes() ? CheckSelectionBias(router_bias) : Status();
}

Status ValidateGrad(const Device& device, const MoeBlockGradArgs& args) {
  const MoeBlockArgs& f = args.forward;
  CUBIST_RETURN_IF_ERROR(Validate(device, f));
  CUBIST_RETURN_IF_ERROR(
      CheckRouteOptions(kBlock, f.route, f.weights.router.size(1), f.top_k, /*backward=*/true));
  if (!std::isfinite(args.d_aux_loss))
    return OptionError(kBlock, "d_aux_loss", args.d_aux_loss, "a finite value");
  const Argument d_out{kBlock, "d_out", args.d_out}, d_x{kBlock, "d_x", args.d_x};
  for (const Argument* arg : {&d_out, &d_x}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {{"T, of x", f.x.size(0)}, {"H, of x", f.x.size(1)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {f.x.dtype}));
  }
  const MoeBlockGradients& g = args.gradients;
  const MoeBlockWeights& w = f.weights;
  const Argument norm{kBlock, "gradients.norm", g.norm}, router{kBlock, "gradients.router", g.router},
      gate_up{kBlock, "gradients.gate_up", g.gate_up}, down{kBlock, "gradients.down", g.down},
      shared_gate_up{kBlock, "gradients.shared_gate_up", g.shared_gate_up},
      shared_down{kBlock, "gradients.shared_down", g.shared_down},
      post_norm{kBlock, "gradients.post_norm", g.post_norm};
  const std::pair<const Argument*, ConstTensor> gradients[] = {{&norm, w.norm},
                                                               {&router, w.router},
                                                               {&gate_up, w.gate_up},
                                                               {&down, w.down},
                                                               {&shared_gate_up, w.shared_gate_up},
                                                               {&shared_down, w.shared_down},
                                                               {&post_norm, w.post_norm}};
  for (const auto& [gradient, weight] : gradients) CUBIST_RETURN_IF_ERROR(CheckGradient(*gradient, weight));
  const Argument x{kBlock, "x", f.x}, of_norm{kBlock, "norm", w.norm}, of_router{kBlock, "router", w.router},
      of_gate_up{kBlock, "gate_up", w.gate_up}, of_down{kBlock, "down", w.down},
      of_shared_gate_up{kBlock, "shared_gate_up", w.shared_gate_up},
      of_shared_down{kBlock, "shared_down", w.shared_down}, of_post_norm{kBlock, "post_norm", w.post_norm},
      valid{kBlock, "valid", f.valid};
  return CheckTensors(device,
                      {&d_out, &x, &of_norm, &of_router, &of_gate_up, &of_down, &of_shared_gate_up,
                       &of_shared_down, &of_post_norm, &valid},
                      {&d_x, &norm, &router, &gate_up, &down, &shared_gate_up, &shared_down, &post_norm});
}

// The tensors that the forward pass leaves for the backward one.
struct Kept {
  Kept(const Device& device, const MoeBlockArgs& a, const Sizes& s, BlockState* state) {
    const DType t = a.x.dtype;
    const BlockMemory take(device, state);
    normed = take("normed", t, {s.tokens, s.hidden}), rstd = take("rstd", DType::kF32, {s.tokens});
    routed_by = a.weights.router.dtype == t ? normed : take("routed_by", DType::kF32, {s.tokens, s.hidden});
    logits = take("logits", DType::kF32, {s.tokens, s.experts});
    weights = take("weights", DType::kF32, {s.tokens, s.top_k}),
    ids = state->Take("ids", DType::kI32, {s.tokens, s.top_k});
    scores = take("scores", DType::kF32, {s.tokens, s.experts}),
    counts = state->Take("counts", DType::kI32, {s.experts});
    permuted = take("permuted", t, {s.rows, s.hidden}), places = state->Take("places", DType::kI32, {s.rows});
    gate_up = take("gate_up", t, {s.rows, 2 * s.width}), act = take("act", t, {s.rows, s.width});
    down = take("down", t, {s.rows, s.hidden}), routed = take("routed", t, {s.tokens, s.hidden});
    if (a.weighs_activation) row_weights = take("row_weights", DType::kF32, {s.rows});
    if (a.weights.shared_down.given()) {
      shared_gate_up = take("shared_gate_up", t, {s.tokens, 2 * s.shared});
      shared_act = take("shared_act", t, {s.tokens, s.shared}),
      shared = take("shared", t, {s.tokens, s.hidden});
    }
    if (a.weights.post_norm.given()) {
      experts = a.weights.shared_down.given() ? take("experts", t, {s.tokens, s.hidden}) : routed;
      post = take("post", t, {s.tokens, s.hidden}), post_rstd = take("post_rstd", DType::kF32, {s.tokens});
    }
  }

  Tensor normed, rstd;
  Tensor routed_by;  // What the router multiplies: `normed`, in the router's dtype.
  Tensor logits, weights, ids, scores, counts, permuted, places, gate_up, act, down, routed;
  Tensor row_weights;  // By row, with weighs_activation.
  Tensor shared_gate_up, shared_act, shared;
  Tensor experts, post, post_rstd;  // With post_norm: what all experts give together, and its norm.
};

// Whether these are routes that a call has left: the counts are those of the ids, and every route has a place of its own.
bool HasRoutes(const Kept& k, const Sizes& s) {
  std::vector<std::int64_t> missing(static_cast<std::size_t>(s.experts));
  for (std::int64_t e = 0; e < s.experts; ++e)
    missing[static_cast<std::size_t>(e)] = LoadInt(k.counts.data, DType::kI32, e);
  for (std::int64_t slot = 0; slot < s.rows; ++slot) {
    const std::int64_t id = LoadInt(k.ids.data, DType::kI32, slot);
    if (id < -1 || id >= s.experts || (id >= 0 && missing[static_cast<std::size_t>(id)]-- == 0)) return false;
  }
  const Argument places{kBlock, "places", k.places};
  std::int64_t unused = 0;
  return std::all_of(missing.begin(), missing.end(), [](std::int64_t n) { return n == 0; }) &&
         CheckValues(places, -1, s.rows).ok() && CheckDistinctRows(places, 0, s.rows, &unused).ok();
}

// Where the device does not compute, what it would write over the routes.
Tensor WithoutData(const Device& device, Tensor x) {
  if (!device.computes()) x.data = nullptr;
  return x;
}

}  // namespace

Status MoeBlock(const Device& device, const MoeBlockArgs& args, BlockState* state,
                BlockProfile* profile) try {
  CUBIST_RETURN_IF_ERROR(CheckState(kBlock, state));
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  const Sizes s = SizesOf(args);
  const MoeBlockWeights& w = args.weights;
  const Kept k(device, args, s, state);
  if (!device.computes() && !HasRoutes(k, s)) {
    return InvalidArgument(
        std::string(kBlock) +
        ": the device does not compute and the state has no routes of these sizes, needs a call on "
        "a device with data before");
  }
  Steps steps(device, profile);
  steps.Run("norm", &RmsNorm,
            RmsNormArgs{.x = args.x, .gamma = w.norm, .eps = args.eps, .out = k.normed, .rstd = k.rstd});
  if (w.router.dtype != args.x.dtype) steps.Run("widen", &Sum, SumArgs{.a = k.normed, .out = k.routed_by});
  steps.Run("router", &Matmul, MatmulArgs{.a = k.routed_by, .b = w.router, .c = k.logits});
  steps.Run("route", &Route,
            RouteArgs{.logits = k.logits,
                      .bias = w.router_bias,
                      .valid = args.valid,
                      .options = args.route,
                      .weights = k.weights,
                      .ids = WithoutData(device, k.ids),
                      .scores = k.scores,
                      .counts = WithoutData(device, k.counts),
                      .aux_loss = args.aux_loss});
  steps.Run("permute", &TokenPermute,
            TokenPermuteArgs{.tokens = k.normed,
                             .topk_ids = k.ids,
                             .probs = args.weighs_activation ? ConstTensor(k.weights) : ConstTensor(),
                             .num_experts = s.experts,
                             .permuted = k.permuted,
                             .sorted_indices = WithoutData(device, k.places),
                             .permuted_probs = k.row_weights});
  steps.Run("experts gate and up", &GroupedMatmul,
            GroupedMatmulArgs{.x = k.permuted, .groups = k.counts, .weights = w.gate_up, .out = k.gate_up});
  steps.Run("experts swiglu", &SwiGlu,
            SwiGluArgs{.gate = PartOf(k.gate_up, 1, {0, s.width}),
                       .up = PartOf(k.gate_up, 1, {s.width, 2 * s.width}),
                       .probs = k.row_weights,
                       .out = k.act});
  steps.Run("experts down", &GroupedMatmul,
            GroupedMatmulArgs{.x = k.act, .groups = k.counts, .weights = w.down, .out = k.down});
  steps.Run("unpermute", &TokenUnpermute,
            TokenUnpermuteArgs{.permuted = k.down,
                               .sorted_indices = k.places,
                               .probs = args.weighs_activation ? ConstTensor() : ConstTensor(k.weights),
                               .top_k = s.top_k,
                               .out = k.routed});
  if (w.shared_down.given()) {
    steps.Run("shared gate and up", &Matmul,
              MatmulArgs{.a = k.normed, .b = w.shared_gate_up, .c = k.shared_gate_up});
    steps.Run("shared swiglu", &SwiGlu,
              SwiGluArgs{.gate = PartOf(k.shared_gate_up, 1, {0, s.shared}),
                         .up = PartOf(k.shared_gate_up, 1, {s.shared, 2 * s.shared}),
                         .out = k.shared_act});
    steps.Run("shared down", &Matmul, MatmulArgs{.a = k.shared_act, .b = w.shared_down, .c = k.shared});
  }
  if (w.post_norm.given()) {
    if (w.shared_down.given())
      steps.Run("sum", &Sum, SumArgs{.a = k.routed, .b = k.shared, .out = k.experts});
    steps.Run("post norm", &RmsNorm,
              RmsNormArgs{
                  .x = k.experts, .gamma = w.post_norm, .eps = args.eps, .out = k.post, .rstd = k.post_rstd});
    steps.Run("residual", &Sum, SumArgs{.a = args.x, .b = k.post, .out = args.out});
  } else {
    steps.Run("residual", &Sum, SumArgs{.a = args.x, .b = k.routed, .c = k.shared, .out = args.out});
  }
  return steps.status();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status MoeBlockGrad(const Device& device, const MoeBlockGradArgs& args, BlockState* state,
                    BlockProfile* profile) try {
  const MoeBlockArgs& f = args.forward;
  CUBIST_RETURN_IF_ERROR(CheckState(kBlock, state));
  CUBIST_RETURN_IF_ERROR(ValidateGrad(device, args));
  const Sizes s = SizesOf(f);
  const MoeBlockWeights& w = f.weights;
  const MoeBlockGradients& g = args.gradients;
  const Kept k(device, f, s, state);
  if (!HasRoutes(k, s)) {
    return InvalidArgument(std::string(kBlock) +
                           ": the state has no routes of these sizes, needs a call of moe_block before");
  }
  const DType t = f.x.dtype;
  const BlockMemory take(device, state);
  Steps steps(device, profile);

  // What reaches the experts' sum.
  ConstTensor d_experts = args.d_out;
  if (w.post_norm.given()) {
    const Tensor d = take("d_experts", t, {s.tokens, s.hidden});
    steps.Run("post norm", &RmsNormGrad,
              RmsNormGradArgs{.d_out = args.d_out,
                              .x = k.experts,
                              .rstd = k.post_rstd,
                              .gamma = w.post_norm,
                              .d_x = d,
                              .d_gamma = g.post_norm});
    d_experts = d;
  }

  // Routed experts.
  const Tensor d_down = take("d_down", t, {s.rows, s.hidden}),
               d_weights = take("d_weights", DType::kF32, {s.tokens, s.top_k});
  const Tensor d_act = take("d_act", t, {s.rows, s.width}),
               d_gate_up = take("d_gate_up", t, {s.rows, 2 * s.width});
  const Tensor d_permuted = take("d_permuted", t, {s.rows, s.hidden}),
               d_routed = take("d_routed", t, {s.tokens, s.hidden});
  // A weight's gradient comes where it was multiplied: with the row's, in SwiGluGrad, or from a row of `down`.
  Tensor d_row_weights;
  TokenUnpermuteGradArgs unpermute{
      .out_grad = d_experts, .sorted_indices = k.places, .top_k = s.top_k, .permuted_grad = d_down};
  if (f.weighs_activation) {
    d_row_weights = take("d_row_weights", DType::kF32, {s.rows});
  } else {
    unpermute.permuted = k.down, unpermute.probs = k.weights, unpermute.probs_grad = d_weights;
  }
  steps.Run("unpermute", &TokenUnpermuteGrad, unpermute);
  steps.Run("experts down", &GroupedMatmulGrad,
            GroupedMatmulGradArgs{.dy = d_down,
                                  .groups = k.counts,
                                  .weights = w.down,
                                  .dx = d_act,
                                  .x = g.down.given() ? ConstTensor(k.act) : ConstTensor(),
                                  .dw = g.down});
  steps.Run("experts swiglu", &SwiGluGrad,
            SwiGluGradArgs{.d_out = d_act,
                           .gate = PartOf(k.gate_up, 1, {0, s.width}),
                           .up = PartOf(k.gate_up, 1, {s.width, 2 * s.width}),
                           .probs = k.row_weights,
                           .d_gate = PartOf(d_gate_up, 1, {0, s.width}),
                           .d_up = PartOf(d_gate_up, 1, {s.width, 2 * s.width}),
                           .d_probs = d_row_weights});
  steps.Run("experts gate and up", &GroupedMatmulGrad,
            GroupedMatmulGradArgs{.dy = d_gate_up,
                                  .groups = k.counts,
                                  .weights = w.gate_up,
                                  .dx = d_permuted,
                                  .x = g.gate_up.given() ? ConstTensor(k.permuted) : ConstTensor(),
                                  .dw = g.gate_up});
  steps.Run("permute", &TokenPermuteGrad,
            TokenPermuteGradArgs{.permuted_grad = d_permuted,
                                 .sorted_indices = k.places,
                                 .permuted_probs_grad = d_row_weights,
                                 .top_k = s.top_k,
                                 .tokens_grad = d_routed,
                                 .probs_grad = f.weighs_activation ? d_weights : Tensor()});

  // Router.
  const Tensor d_logits = take("d_logits", w.router.dtype, {s.tokens, s.experts}),
               d_router = take("d_router", t, {s.tokens, s.hidden});
  steps.Run("route", &RouteGrad,
            RouteGradArgs{.d_weights = d_weights,
                          .ids = k.ids,
                          .scores = k.scores,
                          .counts = k.counts,
                          .valid = f.valid,
                          .options = f.route,
                          .d_aux_loss = args.d_aux_loss,
                          .d_logits = d_logits});
  ProjectionGrad(&steps, {"router", "router weights"},
                 {.x = k.routed_by, .weights = w.router, .dy = d_logits, .dx = d_router, .dw = g.router});

  // Shared expert.
  Tensor d_shared;
  if (w.shared_down.given()) {
    const Tensor d_shared_act = take("d_shared_act", t, {s.tokens, s.shared});
    const Tensor d_shared_gate_up = take("d_shared_gate_up", t, {s.tokens, 2 * s.shared});
    d_shared = take("d_shared", t, {s.tokens, s.hidden});
    ProjectionGrad(&steps, {"shared down", "shared down weights"},
                   {.x = k.shared_act,
                    .weights = w.shared_down,
                    .dy = d_experts,
                    .dx = d_shared_act,
                    .dw = g.shared_down});
    steps.Run("shared swiglu", &SwiGluGrad,
              SwiGluGradArgs{.d_out = d_shared_act,
                             .gate = PartOf(k.shared_gate_up, 1, {0, s.shared}),
                             .up = PartOf(k.shared_gate_up, 1, {s.shared, 2 * s.shared}),
                             .d_gate = PartOf(d_shared_gate_up, 1, {0, s.shared}),
                             .d_up = PartOf(d_shared_gate_up, 1, {s.shared, 2 * s.shared})});
    ProjectionGrad(&steps, {"shared gate and up", "shared gate and up weights"},
                   {.x = k.normed,
                    .weights = w.shared_gate_up,
                    .dy = d_shared_gate_up,
                    .dx = d_shared,
                    .dw = g.shared_gate_up});
  }

  // All that reaches the norm, then the norm and the residual stream.
  const Tensor d_normed = take("d_normed", t, {s.tokens, s.hidden});
  steps.Run("sum", &Sum, SumArgs{.a = d_routed, .b = d_router, .c = d_shared, .out = d_normed});
  steps.Run("norm", &RmsNormGrad,
            RmsNormGradArgs{.d_out = d_normed,
                            .x = f.x,
                            .rstd = k.rstd,
                            .gamma = w.norm,
                            .d_sum = args.d_out,
                            .d_x = args.d_x,
                            .d_gamma = g.norm});
  return steps.status();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
