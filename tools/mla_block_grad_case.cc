// The attention half of a layer backwards as a case: step by step from d_out to d_x and the weights' gradients.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/block_steps.h"
#include "reference/attention_grad.h"
#include "tools/block_cases.h"
#include "tools/block_shapes.h"
#include "tools/links.h"
#include "tools/views.h"

namespace cubist {
namespace {

// Of every case's products a link has this part: most take fewer than their share.
constexpr double kLinks = 12;

MlaBlockGradArgs GradArgsOf(const MlaSizes& s, std::span<const ConstTensor> in, std::span<const Tensor> out,
                            Tensor forward_out) {
  std::size_t at = 0;
  const auto next = [&] { return out[at++]; };
  MlaBlockGradArgs args;
  args.forward = ArgsOf(s, in, forward_out);
  args.d_out = in.back(), args.d_x = next();
  args.gradients = {.norm = next(),
                    .q_down = next(),
                    .q_norm = next(),
                    .q_up = next(),
                    .kv_down = next(),
                    .kv_norm = next(),
                    .kv_up = next(),
                    .out = next()};
  if (s.workload.sandwich_norm) args.gradients.post_norm = next();
  return args;
}

std::vector<TensorSpec> GradientsOf(const MlaSizes& s) {
  const auto weight = [](const char* name, Shape shape) {
    return TensorSpec{.name = name, .dtype = DType::kBF16, .shape = std::move(shape)};
  };
  const auto norm = [](const char* name, std::int64_t n) { return TensorSpec{.name = name, .shape = {n}}; };
  std::vector<TensorSpec> specs = {weight("d_x", {s.rows(), s.hidden}),
                                   norm("d_norm", s.hidden),
                                   weight("d_q_down", {s.hidden, s.q_rank}),
                                   norm("d_q_norm", s.q_rank),
                                   weight("d_q_up", {s.q_rank, s.heads * (s.nope + s.rope)}),
                                   weight("d_kv_down", {s.hidden, s.kv_rank + s.rope}),
                                   norm("d_kv_norm", s.kv_rank),
                                   weight("d_kv_up", {s.kv_rank, s.heads * (s.nope + s.v)}),
                                   weight("d_out_weights", {s.heads * s.v, s.hidden})};
  if (s.workload.sandwich_norm) specs.push_back(norm("d_post_norm", s.hidden));
  return specs;
}

// What the block has left.
struct Left {
  Left(const MlaSizes& s, BlockState* state) {
    const std::int64_t t = s.rows();
    const auto take = [&](const char* name, std::int64_t cols) {
      return state->Take(name, DType::kBF16, {t, cols});
    };
    const auto rstd_of = [&](const char* name) { return state->Take(name, DType::kF32, {t}); };
    normed = take("normed", s.hidden), rstd = rstd_of("rstd");
    q_latent = take("q_latent", s.q_rank), q_normed = take("q_normed", s.q_rank), q_rstd = rstd_of("q_rstd");
    q = take("q", s.heads * (s.nope + s.rope));
    kv_latent = take("kv_latent", s.kv_rank + s.rope), kv_normed = take("kv_normed", s.kv_rank),
    kv_rstd = rstd_of("kv_rstd"), kv = take("kv", s.heads * (s.nope + s.v));
    o = take("o", s.heads * s.v);
    d_o = take("d_o", s.heads * s.v), d_q = take("d_q", q.size(1)), d_kv = take("d_kv", kv.size(1));
    d_q_normed = take("d_q_normed", s.q_rank), d_q_latent = take("d_q_latent", s.q_rank);
    d_kv_normed = take("d_kv_normed", s.kv_rank), d_kv_latent = take("d_kv_latent", s.kv_rank + s.rope);
    d_normed_q = take("d_normed_q", s.hidden), d_normed_kv = take("d_normed_kv", s.hidden),
    d_normed = take("d_normed", s.hidden);
    if (!s.workload.sandwich_norm) return;
    y = take("y", s.hidden), d_y = take("d_y", s.hidden), post_rstd = rstd_of("post_rstd");
  }

  Tensor normed, rstd, q_latent, q_normed, q_rstd, q, kv_latent, kv_normed, kv_rstd, kv, o;
  Tensor d_o, d_q, d_kv, d_q_normed, d_q_latent, d_kv_normed, d_kv_latent, d_normed_q, d_normed_kv, d_normed;
  Tensor y, d_y, post_rstd;  // With a norm of what attention gives.
};

// A gradient (1, N, rows, D) against what was computed, but for the rows before `first_row`: queries that were not taken reach them.
Comparison CompareGradient(const reference::Gradient& expected, const ConstTensor& actual,
                           std::int64_t first_row) {
  const std::vector<double> bounds = expected.Bounds(actual.dtype);
  Comparison all;
  std::size_t i = 0;
  for (std::int64_t h = 0; h < actual.size(1); ++h) {
    const ConstTensor head = Element(Element(actual, 0), h);
    for (std::int64_t row = 0; row < actual.size(2); ++row) {
      for (std::int64_t d = 0; d < actual.size(3); ++d, ++i) {
        if (row >= first_row) all.Add(At(head, row, d), expected.value[i], bounds[i], actual.dtype, row, d);
      }
    }
  }
  return all;
}

// The last `queries` of a batch entry: no others reach as many of the last keys.
void CheckAttention(const MlaSizes& s, const AttentionRope& rope, const Left& x, std::int64_t entry,
                    std::int64_t queries, double share, Links* links) {
  const Range batch{entry, entry + 1}, last{s.sequence - queries, s.sequence};
  const auto of_keys = [&](const Tensor& matrix, std::int64_t heads, Range cols) {
    return RowsOf(ConstTensor(Heads(matrix, s.batch, heads, cols)), batch);
  };
  const auto of_queries = [&](const Tensor& matrix, Range cols) {
    return PartOf(of_keys(matrix, s.heads, cols), 2, last);
  };
  const Range nope{0, s.nope}, turned{s.nope, s.nope + s.rope}, values{s.nope, s.nope + s.v},
      rope_key{s.kv_rank, s.kv_rank + s.rope};
  const reference::AttentionArgs args{.q = of_queries(x.q, nope),
                                      .k = of_keys(x.kv, s.heads, nope),
                                      .v = of_keys(x.kv, s.heads, values),
                                      .q_rope = of_queries(x.q, turned),
                                      .k_rope = of_keys(x.kv_latent, 1, rope_key),
                                      .mask = reference::Mask::kBottomRight,
                                      .cos = rope.cos,
                                      .sin = rope.sin,
                                      .interleaved = rope.layout != RopeLayout::kHalf,
                                      .q_offset = last.begin};
  const reference::AttentionGradResult expected =
      reference::AttentionGrad(args, of_queries(x.d_o, {0, s.v}), DType::kBF16);
  const auto check = [&](const char* name, const reference::Gradient& gradient, const ConstTensor& actual,
                         std::int64_t first_row = 0) {
    links->Merge(name, CompareGradient(gradient, actual, first_row), share);
  };
  check("d_q", expected.dq, of_queries(x.d_q, nope));
  check("d_q_rope", expected.dq_rope, of_queries(x.d_q, turned));
  check("d_k", expected.dk, of_keys(x.d_kv, s.heads, nope), last.begin);
  check("d_v", expected.dv, of_keys(x.d_kv, s.heads, values), last.begin);
  check("d_k_rope", expected.dk_rope, of_keys(x.d_kv_latent, 1, rope_key), last.begin);
}

void CheckAttentions(const MlaSizes& s, const AttentionRope& rope, const Left& x, double products,
                     std::uint64_t key, Links* links) {
  // A pair of a query and a key takes five products and as many bounds.
  const double of_row = 10.0 * static_cast<double>(s.sequence * s.heads * (s.nope + s.rope + s.v));
  const double rows = std::clamp(products / of_row, 1.0, static_cast<double>(s.rows()));
  const auto queries = std::min(static_cast<std::int64_t>(rows), s.sequence);
  const auto entries = static_cast<std::int64_t>(rows) / queries;
  const double share = static_cast<double>(entries * queries) / static_cast<double>(s.rows());
  for (const std::int64_t entry : SampleRows(s.batch, entries, key))
    CheckAttention(s, rope, x, entry, queries, share, links);
}

Comparison CheckMlaGrad(const MlaSizes& s, const MlaBlockGradArgs& args, double products, std::uint64_t key,
                        BlockState* state) {
  const Left x(s, state);
  const MlaBlockWeights& w = args.forward.weights;
  const MlaBlockGradients& g = args.gradients;
  Links links(products / kLinks, key);

  ConstTensor d_y = args.d_out;
  if (w.post_norm.given()) {
    links.Norm("d_post_norm", {.d_out = args.d_out,
                               .x = x.y,
                               .rstd = x.post_rstd,
                               .gamma = w.post_norm,
                               .d_x = x.d_y,
                               .d_gamma = g.post_norm});
    d_y = x.d_y;
  }
  links.Projection("d_out_weights", {.x = x.o, .weights = w.out, .dy = d_y, .dx = x.d_o, .dw = g.out});
  CheckAttentions(s, args.forward.rope, x, products / kLinks, key, &links);

  links.Projection("d_q_up",
                   {.x = x.q_normed, .weights = w.q_up, .dy = x.d_q, .dx = x.d_q_normed, .dw = g.q_up});
  links.Norm("d_q_norm", {.d_out = x.d_q_normed,
                          .x = x.q_latent,
                          .rstd = x.q_rstd,
                          .gamma = w.q_norm,
                          .d_x = x.d_q_latent,
                          .d_gamma = g.q_norm});
  links.Projection(
      "d_q_down",
      {.x = x.normed, .weights = w.q_down, .dy = x.d_q_latent, .dx = x.d_normed_q, .dw = g.q_down});

  const Range latent{0, s.kv_rank};
  links.Projection("d_kv_up",
                   {.x = x.kv_normed, .weights = w.kv_up, .dy = x.d_kv, .dx = x.d_kv_normed, .dw = g.kv_up});
  links.Norm("d_kv_norm", {.d_out = x.d_kv_normed,
                           .x = ColumnsOf(x.kv_latent, latent),
                           .rstd = x.kv_rstd,
                           .gamma = w.kv_norm,
                           .d_x = ColumnsOf(x.d_kv_latent, latent),
                           .d_gamma = g.kv_norm});
  links.Projection(
      "d_kv_down",
      {.x = x.normed, .weights = w.kv_down, .dy = x.d_kv_latent, .dx = x.d_normed_kv, .dw = g.kv_down});

  links.Sum("what reaches the norm", x.d_normed, {x.d_normed_q, x.d_normed_kv});
  links.Norm("d_norm", {.d_out = x.d_normed,
                        .x = args.forward.x,
                        .rstd = x.rstd,
                        .gamma = w.norm,
                        .d_sum = args.d_out,
                        .d_x = args.d_x,
                        .d_gamma = g.norm});
  return links.Result(s.rows());
}

}  // namespace

Case MlaBlockGradCase(const ScaledWorkload& scaled) {
  const MlaSizes s(scaled);
  Case c{.name = "mla_block.grad", .kernel = "MlaBlockGrad", .shape = s.shape(), .dtype = DType::kBF16};
  c.inputs = InputsOf(s);
  c.inputs.push_back(Normal("mla_block.d_out", {s.rows(), s.hidden}));
  c.outputs = GradientsOf(s);
  // Each projection twice, and of attention five products for two.
  c.flops = 4 * s.ProductsOfProjections() +
            2 * s.ProductsOfScores() * static_cast<double>(3 * (s.nope + s.rope) + 2 * s.v);
  return BackwardCase(std::move(c), s, &MlaBlock, &MlaBlockGrad, &GradArgsOf, &CheckMlaGrad);
}

}  // namespace cubist
