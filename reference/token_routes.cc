#include "reference/token_routes.h"

#include <algorithm>
#include <cstddef>

namespace cubist::reference {
namespace {

std::int64_t IntAt(const ConstTensor& x, std::int64_t i, std::int64_t j = 0) {
  return LoadInt(x.data, x.dtype, i * x.stride(0) + (x.rank > 1 ? j * x.stride(1) : 0));
}

double FloatAt(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
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
    std::stable_sort(of_expert.begin(), of_expert.end(),
                     [&](std::size_t a, std::size_t b) { return routes->probs[a] > routes->probs[b]; });
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
