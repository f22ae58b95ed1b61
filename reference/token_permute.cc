#include "reference/token_permute.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "reference/bounds.h"

namespace cubist::reference {
namespace {

double At(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}

std::vector<std::int64_t> Iota(std::int64_t n) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), std::int64_t{0});
  return values;
}

std::int64_t KeptRows(std::int64_t slots, std::int64_t num_out_tokens) {
  if (num_out_tokens > 0) return std::min(num_out_tokens, slots);
  return std::max<std::int64_t>(slots + num_out_tokens, 0);
}

std::int64_t ExpertOf(const Additions& more, std::int64_t t, std::int64_t j) {
  const ConstTensor& ids = more.topk_ids;
  return LoadInt(ids.data, ids.dtype, t * ids.stride(0) + j * ids.stride(1));
}

}  // namespace

Routing Route(ConstTensor topk_ids, std::int64_t num_experts, std::int64_t num_out_tokens) {
  Routing routing;
  routing.topk = topk_ids.rank == 1 ? 1 : topk_ids.size(1);

  std::vector<std::int64_t> expert;  // of each slot
  for (std::int64_t t = 0; t < topk_ids.size(0); ++t) {
    for (std::int64_t j = 0; j < routing.topk; ++j) {
      const std::int64_t index = t * topk_ids.stride(0) + (topk_ids.rank == 1 ? 0 : j * topk_ids.stride(1));
      expert.push_back(LoadInt(topk_ids.data, topk_ids.dtype, index));
    }
  }
  const auto slots = static_cast<std::int64_t>(expert.size());
  routing.rows = KeptRows(slots, num_out_tokens);

  routing.slot_of_row = Iota(slots);
  std::stable_sort(routing.slot_of_row.begin(), routing.slot_of_row.end(),
                   [&](std::int64_t a, std::int64_t b) {
                     return expert[static_cast<std::size_t>(a)] < expert[static_cast<std::size_t>(b)];
                   });
  routing.sorted_indices.resize(expert.size());
  std::int32_t row = 0;
  for (const std::int64_t slot : routing.slot_of_row) {
    routing.sorted_indices[static_cast<std::size_t>(slot)] = row++;
  }
  routing.expert_counts.resize(static_cast<std::size_t>(num_experts));
  for (std::int64_t e : expert) ++routing.expert_counts[static_cast<std::size_t>(e)];
  return routing;
}

PaddedRouting RoutePadded(ConstTensor topk_ids, std::int64_t num_experts, std::int64_t capacity,
                          std::int64_t row_multiple) {
  const std::int64_t topk = topk_ids.rank == 1 ? 1 : topk_ids.size(1), slots = topk_ids.size(0) * topk;
  PaddedRouting routing;
  routing.sorted_indices.assign(static_cast<std::size_t>(slots), -1);
  std::vector<std::vector<std::int64_t>> slots_of(static_cast<std::size_t>(num_experts));
  for (std::int64_t s = 0; s < slots; ++s) {
    const std::int64_t index =
        s / topk * topk_ids.stride(0) + (topk_ids.rank == 1 ? 0 : s % topk * topk_ids.stride(1));
    const std::int64_t e = LoadInt(topk_ids.data, topk_ids.dtype, index);
    if (e >= 0) slots_of[static_cast<std::size_t>(e)].push_back(s);
  }
  for (const auto& of_expert : slots_of) {
    const auto first = static_cast<std::int64_t>(routing.slot_of_row.size());
    routing.expert_offsets.push_back(static_cast<std::int32_t>(first));
    std::int32_t count = 0;
    for (const std::int64_t s : of_expert) {
      if (++count > capacity && capacity > 0) continue;
      routing.sorted_indices[static_cast<std::size_t>(s)] =
          static_cast<std::int32_t>(routing.slot_of_row.size());
      routing.slot_of_row.push_back(s);
    }
    routing.expert_counts.push_back(count);
    const std::int64_t rows =
        capacity > 0 ? capacity : (count + row_multiple - 1) / row_multiple * row_multiple;
    routing.slot_of_row.resize(static_cast<std::size_t>(first + rows), -1);
  }
  routing.expert_offsets.push_back(static_cast<std::int32_t>(routing.slot_of_row.size()));
  return routing;
}

std::vector<double> Permute(ConstTensor tokens, const Routing& routing, std::span<const std::int64_t> rows) {
  std::vector<double> permuted;
  for (std::int64_t r : rows) {
    const std::int64_t t = routing.slot_of_row[static_cast<std::size_t>(r)] / routing.topk;
    for (std::int64_t h = 0; h < tokens.size(1); ++h) permuted.push_back(At(tokens, t, h));
  }
  return permuted;
}

std::vector<double> Permute(ConstTensor tokens, const Routing& routing) {
  return Permute(tokens, routing, Iota(routing.rows));
}

UnpermuteResult Unpermute(ConstTensor permuted, ConstTensor sorted_indices, ConstTensor probs,
                          std::span<const std::int64_t> tokens, std::int64_t top_k, std::int64_t first_row,
                          const Additions& more) {
  const std::int64_t topk = probs.given() ? probs.size(1) : top_k;
  UnpermuteResult result;
  for (std::int64_t t : tokens) {
    for (std::int64_t h = 0; h < permuted.size(1); ++h) {
      double out = 0, magnitude = 0;
      const auto add = [&](double value) { out += value, magnitude += std::abs(value); };
      for (const ConstTensor& residual : {more.residual, more.residual2}) {
        if (residual.given()) add(At(residual, t, h));
      }
      for (std::int64_t j = 0; j < topk; ++j) {
        const std::int64_t row =
            LoadInt(sorted_indices.data, sorted_indices.dtype, (t * topk + j) * sorted_indices.stride(0)) -
            first_row;
        const double prob = probs.given() ? At(probs, t, j) : 1.0;
        if (row < 0 || row >= permuted.size(0) || prob == 0) continue;
        add(prob * At(permuted, row, h));
        if (more.bias.given()) add(prob * At(more.bias, ExpertOf(more, t, j), h));
      }
      result.out.push_back(out);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

UnpermuteResult Unpermute(ConstTensor permuted, ConstTensor sorted_indices, ConstTensor probs,
                          std::int64_t top_k, std::int64_t first_row, const Additions& more) {
  const std::int64_t tokens =
      probs.given() ? probs.size(0) : sorted_indices.size(0) / std::max<std::int64_t>(top_k, 1);
  return Unpermute(permuted, sorted_indices, probs, Iota(tokens), top_k, first_row, more);
}

std::vector<double> UnpermuteBounds(const UnpermuteResult& result, ConstTensor probs, DType output,
                                    std::int64_t top_k) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const std::int64_t k = probs.given() ? probs.size(1) : top_k;
    bounds.push_back(probs.given() || k > 1 ? WeightedSumBound(k, output, result.out[i], result.magnitude[i])
                                            : 0);
  }
  return bounds;
}

std::vector<double> GatherBySlot(ConstTensor values, ConstTensor sorted_indices, std::int64_t first_row) {
  std::vector<double> gathered;
  for (std::int64_t s = 0; s < sorted_indices.size(0); ++s) {
    const std::int64_t row =
        LoadInt(sorted_indices.data, sorted_indices.dtype, s * sorted_indices.stride(0)) - first_row;
    const bool is_row = row >= 0 && row < values.size(0);
    gathered.push_back(is_row ? LoadFloat(values.data, values.dtype, row * values.stride(0)) : 0.0);
  }
  return gathered;
}

UnpermuteGradResult UnpermuteGrad(ConstTensor out_grad, ConstTensor permuted, ConstTensor sorted_indices,
                                  ConstTensor probs, std::int64_t rows, std::int64_t top_k,
                                  std::int64_t first_row, const Additions& more) {
  const std::int64_t topk = probs.given() ? probs.size(1) : top_k, hidden = out_grad.size(1);
  UnpermuteGradResult result;
  result.permuted_grad.assign(static_cast<std::size_t>(rows * hidden), 0.0);
  for (std::int64_t t = 0; t < out_grad.size(0); ++t) {
    for (std::int64_t j = 0; j < topk; ++j) {
      const std::int64_t row =
          LoadInt(sorted_indices.data, sorted_indices.dtype, (t * topk + j) * sorted_indices.stride(0)) -
          first_row;
      const bool is_row = row >= 0 && row < rows;
      double dot = 0, magnitude = 0;
      for (std::int64_t h = 0; is_row && h < hidden; ++h) {
        const double weight = probs.given() ? At(probs, t, j) : 1.0;
        result.permuted_grad[static_cast<std::size_t>(row * hidden + h)] = weight * At(out_grad, t, h);
        if (!permuted.given()) continue;
        const auto add = [&](double value) { dot += value, magnitude += std::abs(value); };
        add(At(out_grad, t, h) * At(permuted, row, h));
        if (more.bias.given()) add(At(out_grad, t, h) * At(more.bias, ExpertOf(more, t, j), h));
      }
      result.probs_grad.push_back(dot), result.probs_grad_magnitude.push_back(magnitude);
    }
  }
  return result;
}

}  // namespace cubist::reference
