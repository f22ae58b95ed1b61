// The other half of a layer backwards as a case: step by step from d_out to d_x and the weights' gradients.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "reference/bounds.h"
#include "reference/route.h"
#include "tools/block_cases.h"
#include "tools/block_shapes.h"
#include "tools/links.h"
#include "tools/views.h"

namespace cubist {
namespace {

// Of every case's products a link has this part: most take fewer than their share.
constexpr double kLinks = 16;

MoeBlockGradArgs GradArgsOf(const MoeSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out,
                            Tensor forward_out) {
  std::size_t at = 0;
  const auto next = [&] { return out[at++]; };
  MoeBlockGradArgs args;
  args.forward = ArgsOf(s, in, forward_out);
  args.d_out = in.back(), args.d_x = next();
  MoeBlockGradients& g = args.gradients;
  g.norm = next(), g.router = next(), g.gate_up = next(), g.down = next();
  if (s.shared > 0) g.shared_gate_up = next(), g.shared_down = next();
  if (s.workload.sandwich_norm) g.post_norm = next();
  return args;
}

std::vector<TensorSpec> GradientsOf(const MoeSizes& s) {
  const auto weight = [](const char* name, Shape shape) {
    return TensorSpec{.name = name, .dtype = DType::kBF16, .shape = std::move(shape)};
  };
  const auto norm = [&](const char* name) { return TensorSpec{.name = name, .shape = {s.hidden}}; };
  std::vector<TensorSpec> specs = {weight("d_x", {s.tokens, s.hidden}),
                                   norm("d_norm"),
                                   {.name = "d_router", .shape = {s.hidden, s.experts}},
                                   weight("d_gate_up", {s.experts, s.hidden, 2 * s.width}),
                                   weight("d_down", {s.experts, s.width, s.hidden})};
  if (s.shared > 0) {
    specs.push_back(weight("d_shared_gate_up", {s.hidden, 2 * s.shared}));
    specs.push_back(weight("d_shared_down", {s.shared, s.hidden}));
  }
  if (s.workload.sandwich_norm) specs.push_back(norm("d_post_norm"));
  return specs;
}

// What the block has left.
struct Left {
  Left(const MoeSizes& s, BlockState* state) {
    const std::int64_t t = s.tokens, rows = t * s.top_k;
    const auto take = [&](const char* name, std::int64_t of, std::int64_t cols) {
      return state->Take(name, DType::kBF16, {of, cols});
    };
    const auto floats = [&](const char* name, std::int64_t cols) {
      return state->Take(name, DType::kF32, {t, cols});
    };
    normed = take("normed", t, s.hidden), rstd = state->Take("rstd", DType::kF32, {t});
    weights = floats("weights", s.top_k), scores = floats("scores", s.experts);
    ids = state->Take("ids", DType::kI32, {t, s.top_k}),
    places = state->Take("places", DType::kI32, {t, s.top_k});
    counts = state->Take("counts", DType::kI32, {s.experts});
    permuted = take("permuted", rows, s.hidden), gate_up = take("gate_up", rows, 2 * s.width),
    act = take("act", rows, s.width), down = take("down", rows, s.hidden);
    d_down = take("d_down", rows, s.hidden), d_act = take("d_act", rows, s.width),
    d_gate_up = take("d_gate_up", rows, 2 * s.width), d_permuted = take("d_permuted", rows, s.hidden);
    d_routed = take("d_routed", t, s.hidden), d_router = take("d_router", t, s.hidden);
    d_weights = floats("d_weights", s.top_k), d_logits = take("d_logits", t, s.experts);
    d_normed = take("d_normed", t, s.hidden);
    if (s.shared > 0) {
      shared_gate_up = take("shared_gate_up", t, 2 * s.shared), shared_act = take("shared_act", t, s.shared);
      d_shared_act = take("d_shared_act", t, s.shared),
      d_shared_gate_up = take("d_shared_gate_up", t, 2 * s.shared);
      d_shared = take("d_shared", t, s.hidden);
    }
    if (!s.workload.sandwich_norm) return;
    experts = take(s.shared > 0 ? "experts" : "routed", t, s.hidden),
    d_experts = take("d_experts", t, s.hidden), post_rstd = state->Take("post_rstd", DType::kF32, {t});
  }

  std::int64_t Place(std::int64_t token, std::int64_t j) const {
    return LoadInt(places.data, places.dtype, token * places.size(1) + j);
  }
  Range RowsOfExpert(std::int64_t expert) const {
    std::int64_t begin = 0;
    for (std::int64_t e = 0; e < expert; ++e) begin += LoadInt(counts.data, counts.dtype, e);
    return {begin, begin + LoadInt(counts.data, counts.dtype, expert)};
  }

  Tensor normed, rstd, weights, scores, ids, places, counts, permuted, gate_up, act, down;
  Tensor d_down, d_act, d_gate_up, d_permuted, d_routed, d_router, d_weights, d_logits, d_normed;
  Tensor shared_gate_up, shared_act, d_shared_act, d_shared_gate_up, d_shared;  // With a shared expert.
  Tensor experts, d_experts, post_rstd;  // With a norm of what the experts give.
};

// One after the other, a value that fp32 sums may have off by `error`.
void Add(reference::Bounded* to, double value, double error, DType output) {
  to->values.push_back(value);
  to->bounds.push_back(error + reference::OutputRounding(output, value, error));
}

// d_down(row of (t, j)) = weights(t, j) d_experts(t), and d_weights(t, j) = down(row of (t, j)) . d_experts(t).
void CheckUnpermute(const MoeSizes& s, const Left& x, const ConstTensor& d_experts, Links* links) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(x.down.size(0)));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t j = 0; j < s.top_k; ++j)
      slots[static_cast<std::size_t>(x.Place(t, j))] = t * s.top_k + j;
  }
  const auto hidden = static_cast<double>(s.hidden);
  links->Rows("what reaches an expert's rows", x.d_down, hidden, [&](std::int64_t row) {
    const std::int64_t slot = slots[static_cast<std::size_t>(row)], t = slot / s.top_k;
    reference::Bounded expected;
    for (std::int64_t h = 0; h < s.hidden; ++h) {
      const double value = At(x.weights, t, slot % s.top_k) * At(d_experts, t, h);
      Add(&expected, value, reference::Gamma(1, 0x1p-24) * std::abs(value), x.d_down.dtype);
    }
    return expected;
  });
  links->Rows("what reaches a route's weight", x.d_weights, hidden * static_cast<double>(s.top_k),
              [&](std::int64_t t) {
                reference::Bounded expected;
                for (std::int64_t j = 0; j < s.top_k; ++j) {
                  double sum = 0, size = 0;
                  for (std::int64_t h = 0; h < s.hidden; ++h) {
                    const double term = At(x.down, x.Place(t, j), h) * At(d_experts, t, h);
                    sum += term, size += std::abs(term);
                  }
                  Add(&expected, sum, reference::Gamma(s.hidden + 1, 0x1p-24) * size, DType::kF32);
                }
                return expected;
              });
}

// d_routed(t) = the sum of d_permuted over the rows of token t.
void CheckPermute(const MoeSizes& s, const Left& x, Links* links) {
  links->Rows("what comes back from the experts", x.d_routed, static_cast<double>(s.hidden * s.top_k),
              [&](std::int64_t t) {
                reference::Bounded expected;
                for (std::int64_t h = 0; h < s.hidden; ++h) {
                  double sum = 0, size = 0;
                  for (std::int64_t j = 0; j < s.top_k; ++j) {
                    const double term = At(x.d_permuted, x.Place(t, j), h);
                    sum += term, size += std::abs(term);
                  }
                  Add(&expected, sum, reference::Gamma(s.top_k, 0x1p-24) * size, x.d_routed.dtype);
                }
                return expected;
              });
}

// With w = scale n / sum of n over a token's experts: |d_n| is at most 2 scale max|d_w| / sum of n, no slope of a score is
// above 1, and each of a row's operations rounds what is no larger.
void CheckRouter(const MoeSizes& s, const RouteOptions& options, const Left& x, Links* links) {
  const reference::RouterOptions of_reference{
      .score = options.score == ScoreFunction::kSoftmax   ? reference::Score::kSoftmax
               : options.score == ScoreFunction::kSigmoid ? reference::Score::kSigmoid
                                                          : reference::Score::kSqrtSoftplus,
      .renormalise = options.renormalise,
      .eps = static_cast<double>(options.eps),
      .scale = static_cast<double>(options.scale)};
  const auto cost = 30 * static_cast<double>(s.experts);  // A function is worth some products.
  links->Rows("what reaches the router", x.d_logits, cost, [&](std::int64_t t) {
    reference::RouterResult forward;
    std::vector<double> d_weights;
    double sum = 0, most = 0;
    for (std::int64_t e = 0; e < s.experts; ++e) forward.scores.push_back(At(x.scores, t, e));
    for (std::int64_t j = 0; j < s.top_k; ++j) {
      forward.ids.push_back(static_cast<std::int32_t>(LoadInt(x.ids.data, x.ids.dtype, t * s.top_k + j)));
      d_weights.push_back(At(x.d_weights, t, j));
      sum += forward.scores[Index(forward.ids.back())], most = std::max(most, std::abs(d_weights.back()));
    }
    forward.counts.resize(Index(s.experts));
    const std::vector<double> d_logits =
        reference::RouteGrad(d_weights, forward, 1, s.experts, s.top_k, 0, of_reference);
    const double size = 2 * of_reference.scale * most / sum;
    reference::Bounded expected;
    for (const double value : d_logits)
      Add(&expected, value, reference::Gamma(s.top_k + s.experts + 16, 0x1p-24) * 2 * size, x.d_logits.dtype);
    return expected;
  });
}

// Of all experts, each with its rows.
void CheckExperts(const MoeSizes& s, const MoeBlockGradArgs& args, const Left& x, Links* links) {
  const MoeBlockWeights& w = args.forward.weights;
  const double share = 1 / static_cast<double>(s.experts);
  for (std::int64_t e = 0; e < s.experts; ++e) {
    const Range rows = x.RowsOfExpert(e);
    const auto of = [&](const Tensor& tensor) { return ConstTensor(RowsOf(tensor, rows)); };
    const std::string behind = " of expert " + std::to_string(e);
    links->Projection("d_down" + behind,
                      {.x = of(x.act),
                       .weights = Element(w.down, e),
                       .dy = of(x.d_down),
                       .dx = of(x.d_act),
                       .dw = Element(args.gradients.down, e)},
                      share);
    links->Projection("d_gate_up" + behind,
                      {.x = of(x.permuted),
                       .weights = Element(w.gate_up, e),
                       .dy = of(x.d_gate_up),
                       .dx = of(x.d_permuted),
                       .dw = Element(args.gradients.gate_up, e)},
                      share);
  }
}

SwiGluGradArgs Activation(const Tensor& d_act, const Tensor& gate_up, const Tensor& d_gate_up) {
  const std::int64_t width = d_act.size(1);
  const Range gate{0, width}, up{width, 2 * width};
  return {.d_out = d_act,
          .gate = ColumnsOf(gate_up, gate),
          .up = ColumnsOf(gate_up, up),
          .d_gate = ColumnsOf(d_gate_up, gate),
          .d_up = ColumnsOf(d_gate_up, up)};
}

Comparison CheckMoeGrad(const MoeSizes& s, const MoeBlockGradArgs& args, double products, std::uint64_t key,
                        BlockState* state) {
  const Left x(s, state);
  const MoeBlockWeights& w = args.forward.weights;
  const MoeBlockGradients& g = args.gradients;
  Links links(products / kLinks, key);

  ConstTensor d_experts = args.d_out;
  if (w.post_norm.given()) {
    links.Norm("d_post_norm", {.d_out = args.d_out,
                               .x = x.experts,
                               .rstd = x.post_rstd,
                               .gamma = w.post_norm,
                               .d_x = x.d_experts,
                               .d_gamma = g.post_norm});
    d_experts = x.d_experts;
  }
  CheckUnpermute(s, x, d_experts, &links);
  CheckExperts(s, args, x, &links);
  links.Activation("what reaches an expert's activation", Activation(x.d_act, x.gate_up, x.d_gate_up));
  CheckPermute(s, x, &links);

  CheckRouter(s, args.forward.route, x, &links);
  links.Projection("d_router",
                   {.x = x.normed, .weights = w.router, .dy = x.d_logits, .dx = x.d_router, .dw = g.router});

  std::vector<ConstTensor> parts = {x.d_routed, x.d_router};
  if (w.shared_down.given()) {
    links.Projection("d_shared_down", {.x = x.shared_act,
                                       .weights = w.shared_down,
                                       .dy = d_experts,
                                       .dx = x.d_shared_act,
                                       .dw = g.shared_down});
    links.Activation("what reaches the shared expert's activation",
                     Activation(x.d_shared_act, x.shared_gate_up, x.d_shared_gate_up));
    links.Projection("d_shared_gate_up", {.x = x.normed,
                                          .weights = w.shared_gate_up,
                                          .dy = x.d_shared_gate_up,
                                          .dx = x.d_shared,
                                          .dw = g.shared_gate_up});
    parts.push_back(x.d_shared);
  }

  links.Sum("what reaches the norm", x.d_normed, parts);
  links.Norm("d_norm", {.d_out = x.d_normed,
                        .x = args.forward.x,
                        .rstd = x.rstd,
                        .gamma = w.norm,
                        .d_sum = args.d_out,
                        .d_x = args.d_x,
                        .d_gamma = g.norm});
  return links.Result(s.tokens);
}

}  // namespace

Case MoeBlockGradCase(const ScaledWorkload& scaled) {
  const MoeSizes s(scaled);
  Case c{.name = "moe_block.grad", .kernel = "MoeBlockGrad", .shape = s.shape(), .dtype = DType::kBF16};
  c.inputs = InputsOf(s);
  c.inputs.push_back(Normal("moe_block.d_out", {s.tokens, s.hidden}));
  c.outputs = GradientsOf(s);
  c.flops = 4 * static_cast<double>(s.tokens) * s.ProductsOfToken();
  return BackwardCase(std::move(c), s, &MoeBlock, &MoeBlockGrad, &GradArgsOf, &CheckMoeGrad);
}

}  // namespace cubist
