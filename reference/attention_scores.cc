#include "reference/attention_scores.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace cubist::reference {
namespace {

// Adds q . k.
void AddDot(const DoubleRow& q, const DoubleRow& k, double& value, double& magnitude) {
  for (std::size_t d = 0; d < q.values.size(); ++d) {
    value += q.values[d] * k.values[d];
    magnitude += q.magnitudes[d] * k.magnitudes[d];
  }
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

}  // namespace

const DoubleRow& DoubleRows::At(std::int64_t b, std::int64_t n, std::int64_t s) {
  if (b != b_ || n != n_) {
    b_ = b, n_ = n;
    kept_.resize(static_cast<std::size_t>(std::min(x_.size(2), kMostKept)));
    for (Kept& kept : kept_) kept.s = -1;
  }
  Kept& kept = kept_[static_cast<std::size_t>(s) % kept_.size()];
  if (kept.s != s) kept.s = s, Read(s, kept.row);
  return kept.row;
}

void DoubleRows::Read(std::int64_t s, DoubleRow& row) const {
  const auto count = static_cast<std::size_t>(x_.size(3));
  row.values.resize(count), row.magnitudes.resize(count);
  std::int64_t at = b_ * x_.stride(0) + n_ * x_.stride(1) + s * x_.stride(2);
  for (double& value : row.values) value = LoadFloat(x_.data, x_.dtype, at), at += x_.stride(3);
  std::transform(row.values.begin(), row.values.end(), row.magnitudes.begin(),
                 [](double x) { return std::abs(x); });
  if (cos_.given()) Turn(PositionOf(positions_, offset_, b_, s), row);
}

void DoubleRows::Turn(std::int64_t position, DoubleRow& row) const {
  const std::int64_t pairs = cos_.size(1);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const auto first = static_cast<std::size_t>(interleaved_ ? 2 * pair : pair);
    const std::size_t second = first + static_cast<std::size_t>(interleaved_ ? 1 : pairs);
    const auto angle = [&](const ConstTensor& table) {
      return LoadFloat(table.data, table.dtype, position * table.stride(0) + pair * table.stride(1));
    };
    const double c = angle(cos_), s = angle(sin_), x1 = row.values[first], x2 = row.values[second];
    row.values[first] = x1 * c - x2 * s, row.magnitudes[first] = std::abs(x1 * c) + std::abs(x2 * s);
    row.values[second] = x2 * c + x1 * s, row.magnitudes[second] = std::abs(x2 * c) + std::abs(x1 * s);
  }
}

// What turns is the rope parts where there are any.
AttentionRows::AttentionRows(const AttentionArgs& args)
    : q(args.q, args, args.q_positions, args.q_offset),
      k(args.k, args, args.k_positions, args.k_offset),
      v(args.v),
      q_rope(args.q_rope, args, args.q_positions, args.q_offset),
      k_rope(args.k_rope, args, args.k_positions, args.k_offset) {
  if (args.q_rope.given()) q = DoubleRows(args.q), k = DoubleRows(args.k);
}

std::int64_t OffsetOf(const ConstTensor& x, const AttentionRow& row, std::int64_t key) {
  const std::int64_t index[] = {row.batch, row.head, row.query, key};
  std::int64_t offset = 0;
  for (int d = 0; d < 4; ++d) offset += x.size(d) == 1 ? 0 : index[d] * x.stride(d);
  return offset;
}

std::int64_t KvHead(const AttentionArgs& args, const AttentionRow& row) {
  return row.head / (args.q.size(1) / args.k.size(1));
}

std::int64_t KRopeHead(const AttentionArgs& args, const AttentionRow& row) {
  return args.k_rope.size(1) == 1 ? 0 : KvHead(args, row);
}

AttentionScore ScoreOf(const AttentionArgs& args, AttentionRows& rows, const AttentionRow& row,
                       std::int64_t key) {
  double product = 0, magnitude = 0;
  AddDot(rows.q.At(row.batch, row.head, row.query), rows.k.At(row.batch, KvHead(args, row), key), product,
         magnitude);
  if (args.q_rope.given()) {
    AddDot(rows.q_rope.At(row.batch, row.head, row.query),
           rows.k_rope.At(row.batch, KRopeHead(args, row), key), product, magnitude);
  }
  const double scale = ScoreScale(args);
  AttentionScore score;
  score.scaled = score.value = scale * product;
  score.product = score.magnitude = std::abs(scale) * magnitude;
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

std::int64_t ScoreTerms(const AttentionArgs& args) {
  return args.q.size(3) + (args.q_rope.given() ? args.q_rope.size(3) : 0);
}

double ScoreScale(const AttentionArgs& args) {
  return args.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(ScoreTerms(args), 1))));
}

}  // namespace cubist::reference
