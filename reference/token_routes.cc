#include "reference/token_routes.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace cubist::reference {
namespace {

std::int64_t IntAt(const ConstTensor& x, std::int64_t i, std::int64_t j = 0) {
  return LoadInt(x.data, x.dtype, i * x.stride(0) + (x.rank > 1 ? j * x.stride(1) : 0));
}

double FloatAt(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}

// visit(row, token, expert) of every row that is a token's.
template <class Visit>
void ForEachRow(const TokensOfRows& rows, Visit visit) {
  for (std::int64_t r = 0; r < rows.row_tokens.size(0); ++r) {
    const std::int64_t token = IntAt(rows.row_tokens, r);
    if (token >= 0) visit(r, token, (rows.first_row + r) / rows.capacity);
  }
}

}  // namespace

RouteSelection SelectRoutes(ConstTensor topk_ids, ConstTensor routing_map, ConstTensor valid,
                            ConstTensor expert_places, ConstTensor probs, std::int64_t top_k,
                            std::int64_t experts) {
  RouteSelection routes;
  routes.top_k = top_k;
  const std::int64_t tokens = routing_map.given() ? routing_map.size(0) : topk_ids.size(0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int64_t> ids;
    if (routing_map.given()) {
      for (std::int64_t e = 0; e < experts; ++e) {
        if (IntAt(routing_map, t, e) != 0) ids.push_back(e);
      }
      ids.resize(static_cast<std::size_t>(top_k), -1);
    } else {
      for (std::int64_t j = 0; j < top_k; ++j) ids.push_back(IntAt(topk_ids, t, j));
    }
    const bool counts = !valid.given() || IntAt(valid, t) != 0;
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t id = ids[static_cast<std::size_t>(j)];
      const std::int64_t place = id >= 0 && expert_places.given() ? IntAt(expert_places, id) : id;
      routes.ids.push_back(static_cast<std::int32_t>(counts ? place : -1));
      const std::int64_t column = routing_map.given() ? id : j;
      routes.probs.push_back(probs.given() && column >= 0 ? FloatAt(probs, t, column) : 0);
    }
  }
  return routes;
}

void KeepHighest(std::int64_t experts, std::int64_t capacity, RouteSelection* routes) {
  std::vector<std::vector<std::size_t>> slots(static_cast<std::size_t>(experts));
  for (std::size_t s = 0; s < routes->ids.size(); ++s) {
    if (routes->ids[s] >= 0) slots[static_cast<std::size_t>(routes->ids[s])].push_back(s);
  }
  for (std::vector<std::size_t>& of_expert : slots) {
    // NaN and -inf are as low as the lowest number.
    const auto height = [&](std::size_t s) {
      constexpr double kLowest = std::numeric_limits<float>::lowest();
      return routes->probs[s] > kLowest ? routes->probs[s] : kLowest;
    };
    std::stable_sort(of_expert.begin(), of_expert.end(),
                     [&](std::size_t a, std::size_t b) { return height(a) > height(b); });
    for (std::size_t i = static_cast<std::size_t>(capacity); i < of_expert.size(); ++i)
      routes->ids[of_expert[i]] = -1;
  }
}

std::vector<RowSource> RowSources(const PaddedRouting& routing, const RouteSelection& routes,
                                  ConstTensor pad_map, ConstTensor map_probs, std::int64_t capacity) {
  std::vector<RowSource> rows;
  for (const std::int64_t slot : routing.slot_of_row) {
    rows.push_back(slot < 0 ? RowSource()
                            : RowSource{slot / routes.top_k, routes.probs[static_cast<std::size_t>(slot)]});
  }
  if (!pad_map.given()) return rows;
  for (std::int64_t e = 0; e < pad_map.size(1); ++e) {
    std::int64_t token = 0;
    for (std::int64_t r = e * capacity; r < (e + 1) * capacity; ++r) {
      RowSource& row = rows[static_cast<std::size_t>(r)];
      if (row.token >= 0) continue;
      while (token < pad_map.size(0) && IntAt(pad_map, token, e) != 0) ++token;
      if (token == pad_map.size(0)) break;
      row = {token, FloatAt(map_probs, token, e)};
      ++token;
    }
  }
  return rows;
}

UnpermuteResult UnpermuteByRow(ConstTensor permuted, const TokensOfRows& rows, ConstTensor probs,
                               std::int64_t tokens, ConstTensor residual) {
  const std::int64_t hidden = permuted.size(1);
  const auto size = static_cast<std::size_t>(tokens * hidden);
  UnpermuteResult result{std::vector<double>(size), std::vector<double>(size)};
  const auto add = [&](std::int64_t t, std::int64_t h, double value) {
    const auto at = static_cast<std::size_t>(t * hidden + h);
    result.out[at] += value, result.magnitude[at] += std::abs(value);
  };
  for (std::int64_t t = 0; residual.given() && t < tokens; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) add(t, h, FloatAt(residual, t, h));
  }
  ForEachRow(rows, [&](std::int64_t r, std::int64_t t, std::int64_t e) {
    const double weight = probs.given() ? FloatAt(probs, t, e) : 1;
    for (std::int64_t h = 0; weight != 0 && h < hidden; ++h) add(t, h, weight * FloatAt(permuted, r, h));
  });
  return result;
}

UnpermuteGradResult UnpermuteGradByRow(ConstTensor out_grad, ConstTensor permuted, const TokensOfRows& rows,
                                       ConstTensor probs, std::int64_t experts) {
  const std::int64_t tokens = out_grad.size(0), hidden = out_grad.size(1);
  UnpermuteGradResult result;
  result.permuted_grad.resize(static_cast<std::size_t>(rows.row_tokens.size(0) * hidden));
  result.probs_grad.resize(static_cast<std::size_t>(tokens * experts));
  result.probs_grad_magnitude = result.probs_grad;
  ForEachRow(rows, [&](std::int64_t r, std::int64_t t, std::int64_t e) {
    const auto prob = static_cast<std::size_t>(t * experts + e);
    for (std::int64_t h = 0; h < hidden; ++h) {
      const double grad = FloatAt(out_grad, t, h), weight = probs.given() ? FloatAt(probs, t, e) : 1;
      result.permuted_grad[static_cast<std::size_t>(r * hidden + h)] = weight * grad;
      const double product = permuted.given() ? grad * FloatAt(permuted, r, h) : 0;
      result.probs_grad[prob] += product, result.probs_grad_magnitude[prob] += std::abs(product);
    }
  });
  return result;
}

std::vector<double> SpreadByRow(ConstTensor values, const TokensOfRows& rows, std::int64_t tokens,
                                std::int64_t experts) {
  std::vector<double> spread(static_cast<std::size_t>(tokens * experts));
  ForEachRow(rows, [&](std::int64_t r, std::int64_t t, std::int64_t e) {
    spread[static_cast<std::size_t>(t * experts + e)] =
        LoadFloat(values.data, values.dtype, r * values.stride(0));
  });
  return spread;
}

std::vector<std::int64_t> ExpertMajorRows(ConstTensor chunk_counts) {
  const std::int64_t ranks = chunk_counts.size(0), experts = chunk_counts.size(1);
  std::vector<std::int64_t> begin{0};
  for (std::int64_t c = 0; c < ranks * experts; ++c)
    begin.push_back(begin.back() + IntAt(chunk_counts, c / experts, c % experts));
  std::vector<std::int64_t> rows;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t n = 0; n < ranks; ++n) {
      const auto chunk = static_cast<std::size_t>(n * experts + e);
      for (std::int64_t r = begin[chunk]; r < begin[chunk + 1]; ++r) rows.push_back(r);
    }
  }
  return rows;
}

}  // namespace cubist::reference
