#include "tools/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>

#include "kernels/flash_attention.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "reference/attention.h"
#include "reference/matmul.h"
#include "reference/token_permute.h"
#include "tools/block_cases.h"
#include "tools/case_checks.h"
#include "tools/views.h"

namespace cubist {
namespace {

using Fill = TensorSpec::Fill;

// Part `i` of the items, `size` long but for the last.
template <class Item>
std::span<const Item> PartOf(const std::vector<Item>& items, std::int64_t i, std::int64_t size) {
  const Range part = Split(static_cast<std::int64_t>(items.size()), size)[i];
  return std::span(items).subspan(static_cast<std::size_t>(part.begin),
                                  static_cast<std::size_t>(part.size()));
}

// How many rows of `products` multiply-adds each the budget pays for; at least one.
std::int64_t AffordableRows(double budget, double products) {
  return static_cast<std::int64_t>(std::clamp(budget / std::max(products, 1.0), 1.0, 1e12));
}

// (B * S, N, D) or (B * S, D) as (B, N, S, columns of D).
template <class Void>
BasicTensor<Void> AsHeads(const BasicTensor<Void>& x, std::int64_t batch, Range cols) {
  const std::int64_t sequence = x.size(0) / batch;
  BasicTensor<Void> heads = From(x, cols.begin);
  heads.rank = 4;
  heads.sizes = {batch, x.rank == 3 ? x.size(1) : 1, sequence, cols.size()};
  heads.strides = {sequence * x.stride(0), x.rank == 3 ? x.stride(1) : cols.size(), x.stride(0), 1};
  return heads;
}

// ---- Matmul ----

// Rows of c against the reference, a slice of columns at a time. c begins at row `first_row` of the output.
Comparison CompareMatmul(const ConstTensor& a, const ConstTensor& b, const ConstTensor& c,
                         const std::vector<std::int64_t>& rows, std::int64_t first_row) {
  const Split slices(b.size(1), 256);
  Comparison all = CompareParts(slices.count(), [&](std::int64_t slice) {
    const Range cols = slices[slice];
    const auto expected = reference::Matmul(a, false, ColumnsOf(b, cols), false, {}, rows);
    const auto bounds = reference::MatmulBounds(expected, a.size(1), a.dtype, c.dtype);
    Comparison part;
    std::size_t i = 0;
    for (std::int64_t row : rows) {
      for (std::int64_t j = cols.begin; j < cols.end; ++j, ++i) {
        part.Add(At(c, row, j), expected.c[i], bounds[i], c.dtype, first_row + row, j);
      }
    }
    return part;
  });
  all.rows = static_cast<std::int64_t>(rows.size());
  all.all_rows = c.size(0);
  return all;
}

// c (M, N) = a (M, K) b (K, N), both of order 1.
Case MatmulCase(const std::string& name, const std::string& a, const std::string& b, DType dtype,
                std::int64_t m, std::int64_t n, std::int64_t k) {
  Case c{.name = name, .kernel = "Matmul", .shape = fmt::format("{}x{}x{}", m, n, k), .dtype = dtype};
  c.inputs = {{.name = a, .dtype = dtype, .shape = {m, k}, .fill = Fill::kNormal},
              {.name = b,
               .dtype = dtype,
               .shape = {k, n},
               .fill = Fill::kNormal,
               .deviation = 1 / std::sqrt(static_cast<double>(k))}};
  c.outputs = {{.name = "c", .dtype = dtype, .shape = {m, n}}};
  c.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  c.run = [](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
             Profile* profile) { return Matmul(device, {.a = in[0], .b = in[1], .c = out[0]}, profile); };
  c.check = [](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
               std::uint64_t key) {
    const double row_products = static_cast<double>(in[1].count());
    const auto rows = SampleRows(out[0].size(0), AffordableRows(products, row_products), key);
    return CompareMatmul(in[0], in[1], out[0], rows, 0);
  };
  return WithTraffic(std::move(c));
}

// ---- Experts ----

// Rows sorted by expert.
struct ExpertRows {
  std::vector<Range> ranges;

  explicit ExpertRows(const std::vector<std::int64_t>& counts) {
    std::int64_t begin = 0;
    for (std::int64_t count : counts) {
      ranges.push_back({begin, begin + count});
      begin += count;
    }
  }

  // Calls body(expert, its rows) for those that have any, until an error.
  template <class Body>
  Status ForEach(const Body& body) const {
    for (std::size_t e = 0; e < ranges.size(); ++e) {
      if (!ranges[e].empty()) CUBIST_RETURN_IF_ERROR(body(static_cast<std::int64_t>(e), ranges[e]));
    }
    return {};
  }
};

// c (R, N): rows of expert e = rows of a (R, K) times b[e] (K, N), by one call.
Case ExpertsCase(const std::string& name, const std::string& a, const std::string& b, std::int64_t n,
                 std::int64_t k, const std::vector<std::int64_t>& counts) {
  const auto experts = static_cast<std::int64_t>(counts.size());
  const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  Case c{.name = name,
         .kernel = "GroupedMatmul",
         .shape = fmt::format("{}x{}x{} in {}", rows, n, k, experts),
         .dtype = DType::kBF16};
  c.inputs = {{.name = a, .dtype = DType::kBF16, .shape = {rows, k}, .fill = Fill::kNormal},
              {.name = b,
               .dtype = DType::kBF16,
               .shape = {experts, k, n},
               .fill = Fill::kNormal,
               .deviation = 1 / std::sqrt(static_cast<double>(k))}};
  c.outputs = {{.name = "c", .dtype = DType::kBF16, .shape = {rows, n}}};
  c.flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  c.run = [counts, experts](const Device& device, std::span<const ConstTensor> in,
                            std::span<const Tensor> out, Profile* profile) {
    const GroupedMatmulArgs args{
        .x = in[0], .groups = ConstTensor(counts.data(), {experts}), .weights = in[1], .out = out[0]};
    return GroupedMatmul(device, args, profile);
  };
  const ExpertRows by_expert(counts);
  c.check = [by_expert, experts](std::span<const ConstTensor> in, std::span<const Tensor> out,
                                 double products, std::uint64_t key) {
    const double share = products / static_cast<double>(experts);
    Comparison all;
    const Status checked = by_expert.ForEach([&](std::int64_t e, Range r) {
      const ConstTensor weights = Element(in[1], e);
      const std::int64_t affordable = AffordableRows(share, static_cast<double>(weights.count()));
      const auto sample = SampleRows(r.size(), affordable, Random(key, static_cast<std::uint64_t>(e)));
      all.Merge(CompareMatmul(RowsOf(in[0], r), weights, RowsOf(out[0], r), sample, r.begin));
      return Status();
    });
    CUBIST_CHECK(checked.ok(), checked.message());
    return all;
  };
  c = WithTraffic(std::move(c));
  // Weights of experts without rows are not read.
  const auto idle = std::count(counts.begin(), counts.end(), 0);
  c.bytes_read -= 2.0 * static_cast<double>(idle) * static_cast<double>(n) * static_cast<double>(k);
  return c;
}

// ---- Attention ----

// Multi-head latent attention as its projections leave it: q holds nope and rope parts side by side, kv holds
// k and v, and one k_rope serves all heads. Nothing is copied; the kernel gets strided views.
struct MlaViews {
  FlashAttentionArgs args;

  MlaViews(const Workload::Attention& dims, std::int64_t batch, std::span<const ConstTensor> in,
           std::span<const Tensor> out) {
    const std::int64_t nope = dims.nope_dim;
    args.q = AsHeads(in[0], batch, {0, nope});
    args.q_rope = AsHeads(in[0], batch, {nope, dims.qk_dim()});
    args.k = AsHeads(in[1], batch, {0, nope});
    args.v = AsHeads(in[1], batch, {nope, nope + dims.v_dim});
    args.k_rope = AsHeads(in[2], batch, {0, dims.rope_dim});
    args.out = AsHeads(out[0], batch, {0, dims.v_dim});
    args.lse = out[1];
    args.causal = Causal::kTopLeft;
  }
};

Comparison CompareAttention(const FlashAttentionArgs& args, std::span<const reference::AttentionRow> rows) {
  const reference::AttentionArgs reference_args{.q = args.q,
                                                .k = args.k,
                                                .v = args.v,
                                                .q_rope = args.q_rope,
                                                .k_rope = args.k_rope,
                                                .mask = reference::Mask::kTopLeft};
  const auto expected = reference::Attention(reference_args, rows);
  const auto out_bounds = reference::OutBounds(reference_args, expected, args.out.dtype);
  const auto lse_bounds = reference::LseBounds(reference_args, expected);
  const ConstTensor out = args.out, lse = args.lse;
  Comparison all;
  std::size_t i = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const auto& [b, h, s] = rows[r];
    const std::int64_t row = (b * out.size(1) + h) * out.size(2) + s;
    const ConstTensor out_head = Element(Element(out, b), h);
    for (std::int64_t d = 0; d < out.size(3); ++d, ++i) {
      all.Add(At(out_head, s, d), expected.out[i], out_bounds[i], out.dtype, row, d);
    }
    all.Add(At(Element(lse, b), h, s), expected.lse[r], lse_bounds[r], lse.dtype, row, out.size(3));
  }
  all.rows = static_cast<std::int64_t>(rows.size());
  return all;
}

Case AttentionCase(const std::string& name, const ScaledWorkload& scaled, DType dtype) {
  const Workload::Attention dims = scaled.workload.attention;
  const std::int64_t tokens = scaled.tokens(), batch = scaled.batch;
  Case c{.name = name,
         .kernel = "FlashAttention",
         .shape = fmt::format("{}x{}x{} {}+{}/{}", batch, scaled.heads, scaled.sequence, dims.nope_dim,
                              dims.rope_dim, dims.v_dim),
         .dtype = dtype};
  c.inputs = {
      {.name = "q", .dtype = dtype, .shape = {tokens, scaled.heads, dims.qk_dim()}, .fill = Fill::kNormal},
      {.name = "kv",
       .dtype = dtype,
       .shape = {tokens, scaled.heads, dims.nope_dim + dims.v_dim},
       .fill = Fill::kNormal},
      {.name = "k_rope", .dtype = dtype, .shape = {tokens, dims.rope_dim}, .fill = Fill::kNormal}};
  c.outputs = {{.name = "out", .dtype = dtype, .shape = {tokens, scaled.heads, dims.v_dim}},
               {.name = "lse", .dtype = DType::kF32, .shape = {batch, scaled.heads, scaled.sequence}}};
  // 2 B N S^2 (Dqk + Dv), halved by the causal mask.
  c.flops = static_cast<double>(tokens) * static_cast<double>(scaled.heads) *
            static_cast<double>(scaled.sequence) * static_cast<double>(dims.qk_dim() + dims.v_dim);
  c.run = [dims, batch](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                        Profile* profile) {
    return FlashAttention(device, MlaViews(dims, batch, in, out).args, profile);
  };
  c.check = [dims, batch](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                          std::uint64_t key) {
    const FlashAttentionArgs args = MlaViews(dims, batch, in, out).args;
    const std::int64_t heads = args.q.size(1), sequence = args.q.size(2), all_rows = batch * heads * sequence;
    const double row_products =
        0.5 * static_cast<double>(sequence) * static_cast<double>(dims.qk_dim() + dims.v_dim);
    std::vector<reference::AttentionRow> rows;
    for (std::int64_t row : SampleRows(all_rows, AffordableRows(products, row_products), key)) {
      rows.push_back({row / sequence / heads, row / sequence % heads, row % sequence});
    }
    constexpr std::int64_t kRowsPerPart = 4;
    Comparison all =
        CompareParts(CeilDiv(static_cast<std::int64_t>(rows.size()), kRowsPerPart),
                     [&](std::int64_t i) { return CompareAttention(args, PartOf(rows, i, kRowsPerPart)); });
    all.all_rows = all_rows;
    return all;
  };
  return WithTraffic(std::move(c));
}

// ---- Permute and unpermute ----

std::string PermuteShape(const ScaledWorkload& scaled) {
  const Workload& w = scaled.workload;
  return fmt::format("{}x{} {} of {}", scaled.tokens(), w.hidden, w.moe.top_k, w.moe.experts);
}

Case PermuteCase(const ScaledWorkload& scaled, Skew skew) {
  const Workload& w = scaled.workload;
  const std::int64_t tokens = scaled.tokens(), slots = tokens * w.moe.top_k, experts = w.moe.experts;
  Case c{.name = fmt::format("permute.{}", NameOf(skew)),
         .kernel = "TokenPermute",
         .shape = PermuteShape(scaled),
         .dtype = DType::kBF16};
  c.inputs = {{.name = "x", .dtype = DType::kBF16, .shape = {tokens, w.hidden}, .fill = Fill::kNormal},
              {.name = fmt::format("{}.topk_ids", NameOf(skew)),
               .dtype = DType::kI32,
               .shape = {tokens, w.moe.top_k},
               .fill = Fill::kTopkIds,
               .skew = skew}};
  c.outputs = {{.name = "permuted", .dtype = DType::kBF16, .shape = {slots, w.hidden}},
               {.name = "sorted_indices", .dtype = DType::kI32, .shape = {slots}},
               {.name = "expert_counts", .dtype = DType::kI32, .shape = {experts}}};
  c.run = [experts](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
                    Profile* profile) {
    return TokenPermute(device,
                        {.tokens = in[0],
                         .topk_ids = in[1],
                         .num_experts = experts,
                         .permuted = out[0],
                         .sorted_indices = out[1],
                         .expert_counts = out[2]},
                        profile);
  };
  c.check = [experts](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                      std::uint64_t key) {
    const reference::Routing routing = reference::Route(in[1], experts, 0);
    const ConstTensor permuted = out[0];
    const auto rows =
        SampleRows(routing.rows, AffordableRows(products, static_cast<double>(in[0].size(1))), key);
    constexpr std::int64_t kRowsPerPart = 16;
    Comparison all =
        CompareParts(CeilDiv(static_cast<std::int64_t>(rows.size()), kRowsPerPart), [&](std::int64_t i) {
          const auto part_rows = PartOf(rows, i, kRowsPerPart);
          const auto expected = reference::Permute(in[0], routing, part_rows);
          Comparison part;
          std::size_t at = 0;
          for (std::int64_t row : part_rows) {
            for (std::int64_t j = 0; j < permuted.size(1); ++j, ++at) {
              part.Add(At(permuted, row, j), expected[at], 0, permuted.dtype, row, j);
            }
          }
          return part;
        });
    for (std::size_t s = 0; s < routing.sorted_indices.size(); ++s) {
      const auto slot = static_cast<std::int64_t>(s);
      all.Add(static_cast<double>(LoadInt(out[1].data, out[1].dtype, slot)), routing.sorted_indices[s], 0,
              DType::kI32, slot, 0);
    }
    for (std::size_t e = 0; e < routing.expert_counts.size(); ++e) {
      const auto expert = static_cast<std::int64_t>(e);
      all.Add(static_cast<double>(LoadInt(out[2].data, out[2].dtype, expert)), routing.expert_counts[e], 0,
              DType::kI32, expert, 0);
    }
    all.rows = static_cast<std::int64_t>(rows.size());
    all.all_rows = routing.rows;
    return all;
  };
  return WithTraffic(std::move(c));
}

Case UnpermuteCase(const ScaledWorkload& scaled, Skew skew) {
  const Workload& w = scaled.workload;
  const std::int64_t tokens = scaled.tokens(), slots = tokens * w.moe.top_k;
  Case c{.name = fmt::format("unpermute.{}", NameOf(skew)),
         .kernel = "TokenUnpermute",
         .shape = PermuteShape(scaled),
         .dtype = DType::kBF16};
  c.inputs = {
      {.name = "permuted", .dtype = DType::kBF16, .shape = {slots, w.hidden}, .fill = Fill::kNormal},
      {.name = fmt::format("{}.sorted_indices", NameOf(skew)),
       .dtype = DType::kI32,
       .shape = {slots},
       .fill = Fill::kSortedIndices,
       .skew = skew},
      {.name = "probs", .dtype = DType::kF32, .shape = {tokens, w.moe.top_k}, .fill = Fill::kProbabilities}};
  c.outputs = {{.name = "out", .dtype = DType::kBF16, .shape = {tokens, w.hidden}}};
  c.run = [](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
             Profile* profile) {
    return TokenUnpermute(device, {.permuted = in[0], .sorted_indices = in[1], .probs = in[2], .out = out[0]},
                          profile);
  };
  c.check = [](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
               std::uint64_t key) {
    const ConstTensor result = out[0];
    const double token_products = static_cast<double>(result.size(1) * in[2].size(1));
    const auto rows = SampleRows(result.size(0), AffordableRows(products, token_products), key);
    constexpr std::int64_t kRowsPerPart = 4;
    Comparison all =
        CompareParts(CeilDiv(static_cast<std::int64_t>(rows.size()), kRowsPerPart), [&](std::int64_t i) {
          const auto part_rows = PartOf(rows, i, kRowsPerPart);
          const auto expected = reference::Unpermute(in[0], in[1], in[2], part_rows);
          const auto bounds = reference::UnpermuteBounds(expected, in[2], result.dtype);
          Comparison part;
          std::size_t at = 0;
          for (std::int64_t row : part_rows) {
            for (std::int64_t j = 0; j < result.size(1); ++j, ++at) {
              part.Add(At(result, row, j), expected.out[at], bounds[at], result.dtype, row, j);
            }
          }
          return part;
        });
    all.rows = static_cast<std::int64_t>(rows.size());
    all.all_rows = result.size(0);
    return all;
  };
  return WithTraffic(std::move(c));
}

}  // namespace

ScaledWorkload Scale(const Workload& workload, std::int64_t token_scale, std::int64_t head_scale) {
  ScaledWorkload scaled{.workload = workload, .token_scale = token_scale, .head_scale = head_scale};
  scaled.batch = workload.training.micro_batch;
  scaled.sequence = std::max<std::int64_t>(workload.training.sequence / token_scale, 1);
  scaled.heads =
      std::max<std::int64_t>(workload.attention.heads / workload.training.tensor_parallel / head_scale, 1);
  return scaled;
}

std::vector<Case> MakeCases(const ScaledWorkload& scaled, const std::vector<Skew>& routings) {
  const Workload& w = scaled.workload;
  const Workload::Attention& a = w.attention;
  const std::int64_t tokens = scaled.tokens(), heads = scaled.heads;
  constexpr DType kBF16 = DType::kBF16;

  std::vector<Case> cases;
  cases.push_back(MatmulCase("q_down", "x", "q_down.weight", kBF16, tokens, a.q_rank, w.hidden));
  cases.push_back(MatmulCase("q_up", "q_latent", "q_up.weight", kBF16, tokens, heads * a.qk_dim(), a.q_rank));
  cases.push_back(
      MatmulCase("kv_down", "x", "kv_down.weight", kBF16, tokens, a.kv_rank + a.rope_dim, w.hidden));
  cases.push_back(MatmulCase("kv_up", "kv_latent", "kv_up.weight", kBF16, tokens,
                             heads * (a.nope_dim + a.v_dim), a.kv_rank));
  cases.push_back(AttentionCase("attention", scaled, kBF16));
  cases.push_back(AttentionCase("attention.fp16", scaled, DType::kF16));
  cases.push_back(MatmulCase("out", "o", "out.weight", kBF16, tokens, w.hidden, heads * a.v_dim));
  cases.push_back(MatmulCase("router", "x", "router.weight", DType::kF32, tokens, w.moe.experts, w.hidden));
  if (const std::int64_t ffn = w.moe.shared_experts * w.moe.ffn; ffn > 0) {
    cases.push_back(MatmulCase("shared.up", "x", "shared.up.weight", kBF16, tokens, 2 * ffn, w.hidden));
    cases.push_back(
        MatmulCase("shared.down", "shared.hidden", "shared.down.weight", kBF16, tokens, w.hidden, ffn));
  }
  for (Skew skew : routings) {
    const auto counts = SplitRows(ExpertLoads(skew, scaled.local_experts()), scaled.expert_rows());
    const auto name = [&](const char* what) { return fmt::format("{}.{}", what, NameOf(skew)); };
    cases.push_back(PermuteCase(scaled, skew));
    cases.push_back(
        ExpertsCase(name("expert.up"), "expert.rows", "expert.up.weight", 2 * w.moe.ffn, w.hidden, counts));
    cases.push_back(
        ExpertsCase(name("expert.down"), "expert.hidden", "expert.down.weight", w.hidden, w.moe.ffn, counts));
    cases.push_back(UnpermuteCase(scaled, skew));
  }
  cases.push_back(MlaBlockCase(scaled));
  cases.push_back(MlaBlockGradCase(scaled));
  cases.push_back(MoeBlockCase(scaled));
  cases.push_back(MoeBlockGradCase(scaled));
  return cases;
}

}  // namespace cubist
