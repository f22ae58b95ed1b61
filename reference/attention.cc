#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "reference/attention_scores.h"
#include "reference/bounds.h"
#include "reference/philox.h"

namespace cubist::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void AppendRow(const AttentionArgs& args, AttentionRows& rows, const AttentionRow& row,
               AttentionResult& result) {
  std::vector<std::int64_t> keys;  // That the row sees.
  std::vector<double> p;           // Their scores, then the exponentials.
  double m = -kInfinity, max_product = 0, max_magnitude = 0;
  for (std::int64_t j = 0; j < args.k.size(2); ++j) {
    if (!Sees(args, row, j)) continue;
    keys.push_back(j);
    const AttentionScore score = ScoreOf(args, rows, row, j);
    p.push_back(score.value);
    m = std::max(m, score.value);
    max_product = std::max(max_product, score.product);
    max_magnitude = std::max(max_magnitude, score.magnitude);
  }
  double sink = -kInfinity;
  if (args.sinks.given()) {
    sink = LoadFloat(args.sinks.data, args.sinks.dtype, row.head * args.sinks.stride(0));
    m = std::max(m, sink);
    if (std::isfinite(sink)) max_magnitude = std::max(max_magnitude, std::abs(sink));
  }
  const bool empty =
      std::all_of(p.begin(), p.end(), [](double s) { return s == -kInfinity; }) && sink == -kInfinity;

  double l = sink == -kInfinity ? 0 : std::exp(sink - m);
  for (double& s : p) {
    s = empty ? 0 : std::exp(s - m);
    l += s;
  }
  result.lse.push_back(empty ? -kInfinity : m + std::log(l));
  result.max_product.push_back(max_product);
  result.max_score.push_back(max_magnitude);
  result.keys.push_back(static_cast<std::int64_t>(keys.size()) + (args.sinks.given() ? 1 : 0));

  const auto dv = static_cast<std::size_t>(args.v.size(3)), first = result.out.size();
  for (auto* sums : {&result.out, &result.abs_out, &result.abs_v}) sums->resize(first + dv);
  double *const out = result.out.data() + first, *const abs_out = result.abs_out.data() + first,
                *const abs_v = result.abs_v.data() + first;
  for (std::size_t i = 0; i < keys.size() && !empty; ++i) {
    const DoubleRow& v = rows.v.At(row.batch, KvHead(args, row), keys[i]);
    const double weight = p[i] / l, factor = DropoutFactor(args, row, keys[i]);
    for (std::size_t d = 0; d < dv; ++d) {
      const double x = v.values[d] * factor;
      out[d] += weight * x;
      abs_out[d] += weight * std::abs(x);
      abs_v[d] += std::abs(x);
    }
  }
}

AttentionRowBound RowBound(const AttentionArgs& args, const AttentionResult& result, std::size_t row) {
  return {.score_terms = ScoreTerms(args) + (args.bias.given() ? 2 : 0) + (args.slopes.given() ? 4 : 0),
          .keys = result.keys[row],
          .input = args.q.dtype,
          .max_product = result.max_product[row],
          .max_score = result.max_score[row],
          .turned = args.cos.given(),
          .soft_cap = args.soft_cap,
          .dropout = args.kept < 65536};
}

}  // namespace

std::int64_t PositionOf(const ConstTensor& positions, std::int64_t offset, std::int64_t b, std::int64_t s) {
  if (!positions.given()) return offset + s;
  const std::int64_t at =
      positions.rank == 2 ? b * positions.stride(0) + s * positions.stride(1) : s * positions.stride(0);
  return LoadInt(positions.data, positions.dtype, at);
}

bool Sees(const AttentionArgs& args, const AttentionRow& row, std::int64_t key) {
  const auto diagonal = [&](Mask anchor) {
    return row.query + (anchor == Mask::kBottomRight ? args.k.size(2) - args.q.size(2) : 0);
  };
  if (args.hidden.given() &&
      LoadInt(args.hidden.data, args.hidden.dtype, OffsetOf(args.hidden, row, key)) != 0)
    return false;
  if (!args.prefix.empty() && key < args.prefix[static_cast<std::size_t>(row.batch)]) return true;
  if (args.mask != Mask::kNone && key > diagonal(args.mask)) return false;
  if (args.left && key < diagonal(args.window_anchor) - *args.left) return false;
  return !args.right || key <= diagonal(args.window_anchor) + *args.right;
}

double DropoutFactor(const AttentionArgs& args, const AttentionRow& row, std::int64_t key) {
  if (args.kept == 65536) return 1;
  const std::int64_t sq = args.dropout_sq.value_or(args.q.size(2)),
                     skv = args.dropout_skv.value_or(args.k.size(2));
  const std::int64_t line = (row.batch * args.q.size(1) + row.head) * sq + args.dropout_row + row.query;
  const std::int64_t block = line * CeilDiv(skv, 8) + key / 8;
  const auto words = PhiloxWords(args.seed, static_cast<std::uint64_t>(block), args.dropout_offset);
  const std::uint32_t word = words[static_cast<std::size_t>(key % 8 / 2)];
  const std::int64_t number = key % 2 == 0 ? word & 0xffffu : word >> 16;
  return number < args.kept ? 65536.0 / static_cast<double>(args.kept) : 0;
}

AttentionResult Attention(const AttentionArgs& args, std::span<const AttentionRow> rows) {
  AttentionResult result;
  AttentionRows in_double(args);
  for (const AttentionRow& row : rows) AppendRow(args, in_double, row, result);
  return result;
}

std::vector<AttentionRow> AllRows(const AttentionArgs& args) {
  std::vector<AttentionRow> rows;
  for (std::int64_t batch = 0; batch < args.q.size(0); ++batch) {
    for (std::int64_t head = 0; head < args.q.size(1); ++head) {
      for (std::int64_t query = 0; query < args.q.size(2); ++query) rows.push_back({batch, head, query});
    }
  }
  return rows;
}

std::vector<double> OutBounds(const AttentionArgs& args, const AttentionResult& result, DType output) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const AttentionRowBound row = RowBound(args, result, i / static_cast<std::size_t>(args.v.size(3)));
    bounds.push_back(row.Out(output, result.out[i], result.abs_out[i], result.abs_v[i]));
  }
  return bounds;
}

std::vector<double> LseBounds(const AttentionArgs& args, const AttentionResult& result) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < result.lse.size(); ++i) {
    bounds.push_back(RowBound(args, result, i).Lse(result.lse[i]));
  }
  return bounds;
}

}  // namespace cubist::reference
