#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "reference/bounds.h"
#include "reference/philox.h"

namespace cubist::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double At(const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
  return LoadFloat(x.data, x.dtype, b * x.stride(0) + n * x.stride(1) + s * x.stride(2) + d * x.stride(3));
}

std::int64_t ScoreTerms(const AttentionArgs& args) {
  return args.q.size(3) + (args.q_rope.given() ? args.q_rope.size(3) : 0);
}

double Scale(const AttentionArgs& args) {
  return args.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(ScoreTerms(args), 1))));
}

// TurnedAt. What is exported GCC does not inline, and most of the reference's time is here.
inline AttentionElement Turned(const AttentionArgs& args, const ConstTensor& x, bool rope_part,
                               std::int64_t position, std::int64_t b, std::int64_t n, std::int64_t s,
                               std::int64_t d) {
  const double value = At(x, b, n, s, d);
  const std::int64_t pairs = args.cos.given() ? args.cos.size(1) : 0;
  if (d >= 2 * pairs || (!rope_part && args.q_rope.given())) return {value, std::abs(value)};
  const std::int64_t pair = args.interleaved ? d / 2 : d % pairs;
  const bool first = args.interleaved ? d % 2 == 0 : d < pairs;
  const std::int64_t other = args.interleaved ? d + (first ? 1 : -1) : d + (first ? pairs : -pairs);
  const auto angle = [&](const ConstTensor& table) {
    return LoadFloat(table.data, table.dtype, position * table.stride(0) + pair * table.stride(1));
  };
  const double along = value * angle(args.cos), across = At(x, b, n, s, other) * angle(args.sin);
  return {first ? along - across : along + across, std::abs(along) + std::abs(across)};
}

// Adds q . k over the last dimension; k has one head, or one per group.
void AddDot(const AttentionArgs& args, const ConstTensor& q, const ConstTensor& k, bool whole,
            const AttentionRow& row, std::int64_t group, std::int64_t key, AttentionElement& score) {
  const std::int64_t k_head = k.size(1) == 1 ? 0 : group;
  const std::int64_t at_q = PositionOf(args.q_positions, args.q_offset, row.batch, row.query);
  const std::int64_t at_k = PositionOf(args.k_positions, args.k_offset, row.batch, key);
  for (std::int64_t d = 0; d < q.size(3); ++d) {
    const AttentionElement x = Turned(args, q, whole, at_q, row.batch, row.head, row.query, d);
    const AttentionElement y = Turned(args, k, whole, at_k, row.batch, k_head, key, d);
    score.value += x.value * y.value;
    score.magnitude += x.magnitude * y.magnitude;
  }
}

// Where (b, n, i, j) stands in a tensor whose sizes of 1 serve all.
std::int64_t OffsetOf(const ConstTensor& x, const AttentionRow& row, std::int64_t key) {
  const std::int64_t index[] = {row.batch, row.head, row.query, key};
  std::int64_t offset = 0;
  for (int d = 0; d < 4; ++d) offset += x.size(d) == 1 ? 0 : index[d] * x.stride(d);
  return offset;
}

// What linear biases take from a score.
double AlibiAt(const AttentionArgs& args, const AttentionRow& row, std::int64_t key) {
  const ConstTensor& slopes = args.slopes;
  const std::int64_t at = slopes.rank == 2 ? row.batch * slopes.stride(0) + row.head * slopes.stride(1)
                                           : row.head * slopes.stride(0);
  const std::int64_t offset = args.alibi_offset.value_or(args.k.size(2) - args.q.size(2));
  const auto distance = static_cast<double>(std::abs(row.query + offset - key));
  return LoadFloat(slopes.data, slopes.dtype, at) * (args.alibi_root ? std::sqrt(distance) : distance);
}

void AppendRow(const AttentionArgs& args, const AttentionRow& row, AttentionResult& result) {
  const std::int64_t group = row.head / (args.q.size(1) / args.k.size(1));
  std::vector<std::int64_t> keys;  // That the row sees.
  std::vector<double> p;           // Their scores, then the exponentials.
  double m = -kInfinity, max_product = 0, max_magnitude = 0;
  for (std::int64_t j = 0; j < args.k.size(2); ++j) {
    if (!Sees(args, row, j)) continue;
    keys.push_back(j);
    const AttentionScore score = ScoreOf(args, row, j);
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

  std::vector<double> factors;  // by dropout
  for (const std::int64_t j : keys) factors.push_back(DropoutFactor(args, row, j));
  for (std::int64_t d = 0; d < args.v.size(3); ++d) {
    double out = 0, abs_out = 0, abs_v = 0;
    for (std::size_t i = 0; i < keys.size() && !empty; ++i) {
      const double v = At(args.v, row.batch, group, keys[i], d) * factors[i];
      out += p[i] / l * v;
      abs_out += p[i] / l * std::abs(v);
      abs_v += std::abs(v);
    }
    result.out.push_back(out);
    result.abs_out.push_back(abs_out);
    result.abs_v.push_back(abs_v);
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

AttentionElement TurnedAt(const AttentionArgs& args, const ConstTensor& x, bool rope_part,
                          std::int64_t position, std::int64_t b, std::int64_t n, std::int64_t s,
                          std::int64_t d) {
  return Turned(args, x, rope_part, position, b, n, s, d);
}

AttentionScore ScoreOf(const AttentionArgs& args, const AttentionRow& row, std::int64_t key) {
  const std::int64_t group = row.head / (args.q.size(1) / args.k.size(1));
  AttentionElement product;
  AddDot(args, args.q, args.k, false, row, group, key, product);
  if (args.q_rope.given()) AddDot(args, args.q_rope, args.k_rope, true, row, group, key, product);
  const double scale = Scale(args);
  AttentionScore score;
  score.scaled = score.value = scale * product.value;
  score.product = score.magnitude = std::abs(scale) * product.magnitude;
  if (args.soft_cap > 0) {
    const double capped = std::tanh(score.scaled / args.soft_cap);
    score.value = args.soft_cap * capped, score.slope = 1 - capped * capped;
  }
  if (args.slopes.given()) {
    const double alibi = AlibiAt(args, row, key);
    score.value -= alibi, score.magnitude += std::abs(alibi);
  }
  if (args.bias.given()) {
    const double bias = LoadFloat(args.bias.data, args.bias.dtype, OffsetOf(args.bias, row, key));
    score.value += bias, score.magnitude += std::abs(bias);
  }
  return score;
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
  for (const AttentionRow& row : rows) AppendRow(args, row, result);
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
