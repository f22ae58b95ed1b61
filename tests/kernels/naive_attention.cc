#include "tests/kernels/naive_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "tests/support/matrix.h"

namespace cubist::testing {
namespace {

using reference::AttentionArgs;
using reference::AttentionRow;

float At(const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
  return LoadFloat(x.data, x.dtype, b * x.stride(0) + n * x.stride(1) + s * x.stride(2) + d * x.stride(3));
}

// (B, N, S, D) in fp32.
struct Rows {
  std::int64_t batches = 0, heads = 0, rows = 0, cols = 0;
  std::vector<float> values = std::vector<float>(static_cast<std::size_t>(batches * heads * rows * cols));

  std::int64_t At(std::int64_t b, std::int64_t n, std::int64_t s) const {
    return ((b * heads + n) * rows + s) * cols;
  }
  float* Row(std::int64_t b, std::int64_t n, std::int64_t s) { return values.data() + At(b, n, s); }
  const float* Row(std::int64_t b, std::int64_t n, std::int64_t s) const {
    return values.data() + At(b, n, s);
  }
};

// x with the columns of `rope` behind its own, of one head for all where there is one.
Rows Joined(const ConstTensor& x, const ConstTensor& rope) {
  const std::int64_t own = x.size(3), more = rope.given() ? rope.size(3) : 0;
  Rows joined{x.size(0), x.size(1), x.size(2), own + more};
  for (std::int64_t b = 0; b < joined.batches; ++b) {
    for (std::int64_t n = 0; n < joined.heads; ++n) {
      for (std::int64_t s = 0; s < joined.rows; ++s) {
        float* row = joined.Row(b, n, s);
        for (std::int64_t d = 0; d < own; ++d) row[d] = At(x, b, n, s, d);
        for (std::int64_t d = 0; d < more; ++d) row[own + d] = At(rope, b, rope.size(1) == 1 ? 0 : n, s, d);
      }
    }
  }
  return joined;
}

float Dot(const float* a, const float* b, std::int64_t count) {
  float sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}
void AddScaled(float* to, float factor, const float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += factor * x[i];
}

// The keys that a row sees, and of each what the operators made of its score.
struct Weights {
  std::vector<std::int64_t> keys;
  std::vector<float> slopes;         // of the soft cap
  std::vector<float> weights, kept;  // behind the softmax; behind dropout, too
  std::vector<float> factors;        // of dropout
  float sink = 0;                    // its weight
};

class NaiveOperators {
 public:
  explicit NaiveOperators(const AttentionArgs& args)
      : x_(args),
        group_(args.q.size(1) / args.k.size(1)),
        rope_begin_(args.q_rope.given() ? args.q.size(3) : 0),
        q_(Joined(args.q, args.q_rope)),
        k_(Joined(args.k, args.k_rope)),
        v_(Joined(args.v, {})) {
    const double terms = static_cast<double>(std::max<std::int64_t>(q_.cols, 1));
    scale_ = static_cast<float>(args.scale.value_or(1 / std::sqrt(terms)));
    Turn(q_, args.q_positions, args.q_offset, 1), Turn(k_, args.k_positions, args.k_offset, 1);
  }

  std::vector<double> Output() const {
    std::vector<double> all;
    for (const AttentionRow& row : reference::AllRows(x_)) {
      const Weights w = WeightsOf(row);
      std::vector<float> out(static_cast<std::size_t>(v_.cols));
      for (std::size_t i = 0; i < w.keys.size(); ++i)
        AddScaled(out.data(), w.kept[i], v_.Row(row.batch, row.head / group_, w.keys[i]), v_.cols);
      for (const float value : out) all.push_back(Round(value));
    }
    return all;
  }

  NaiveAttentionGradients Gradients(const ConstTensor& out, const ConstTensor& dout) const {
    Sums sums{Empty(q_), Empty(k_), Empty(v_), {}, {}};
    sums.dbias.resize(static_cast<std::size_t>(x_.bias.given() ? x_.bias.count() : 0));
    sums.dsinks.resize(static_cast<std::size_t>(x_.sinks.given() ? x_.sinks.count() : 0));
    const Rows outs = Joined(out, {}), douts = Joined(dout, {});
    for (const AttentionRow& row : reference::AllRows(x_)) {
      AddRow(row, outs.Row(row.batch, row.head, row.query), douts.Row(row.batch, row.head, row.query), sums);
    }
    NaiveAttentionGradients all;
    SplitTurnedBack(std::move(sums.dq), x_.q, x_.q_rope, x_.q_positions, x_.q_offset, all.dq, all.dq_rope);
    SplitTurnedBack(std::move(sums.dk), x_.k, x_.k_rope, x_.k_positions, x_.k_offset, all.dk, all.dk_rope);
    for (const float value : sums.dv.values) all.dv.push_back(Round(value));
    for (const float value : sums.dbias) all.dbias.push_back(Round(value));
    all.dsinks.assign(sums.dsinks.begin(), sums.dsinks.end());  // fp32, as sinks are.
    return all;
  }

 private:
  struct Sums {
    Rows dq, dk, dv;
    std::vector<float> dbias, dsinks;
  };

  float Round(float value) const { return static_cast<float>(RoundTo(x_.q.dtype, value)); }
  static Rows Empty(const Rows& like) { return {like.batches, like.heads, like.rows, like.cols}; }

  // Turns the pairs of all rows to their positions, or back where `sign` is -1.
  void Turn(Rows& x, const ConstTensor& positions, std::int64_t offset, float sign) const {
    if (!x_.cos.given()) return;
    const std::int64_t pairs = x_.cos.size(1);
    const auto angle = [](const ConstTensor& table, std::int64_t position, std::int64_t pair) {
      return LoadFloat(table.data, table.dtype, position * table.stride(0) + pair * table.stride(1));
    };
    for (std::int64_t i = 0; i < x.batches * x.heads * x.rows; ++i) {
      const std::int64_t position =
          reference::PositionOf(positions, offset, i / (x.heads * x.rows), i % x.rows);
      float* row = x.values.data() + i * x.cols + rope_begin_;
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        float& first = row[x_.interleaved ? 2 * pair : pair];
        float& second = row[x_.interleaved ? 2 * pair + 1 : pairs + pair];
        const float c = angle(x_.cos, position, pair), s = sign * angle(x_.sin, position, pair);
        const float turned = Round(first * c - second * s);
        second = Round(second * c + first * s), first = turned;
      }
    }
  }

  float Alibi(const AttentionRow& row, std::int64_t key) const {
    const ConstTensor& slopes = x_.slopes;
    const std::int64_t at = slopes.rank == 2 ? row.batch * slopes.stride(0) + row.head * slopes.stride(1)
                                             : row.head * slopes.stride(0);
    const std::int64_t offset = x_.alibi_offset.value_or(x_.k.size(2) - x_.q.size(2));
    const auto distance = static_cast<float>(std::abs(row.query + offset - key));
    return LoadFloat(slopes.data, slopes.dtype, at) * (x_.alibi_root ? std::sqrt(distance) : distance);
  }
  // Of the bias, row-major.
  std::int64_t BiasAt(const AttentionRow& row, std::int64_t key) const {
    const std::int64_t index[] = {row.batch, row.head, row.query, key};
    std::int64_t at = 0;
    for (int d = 0; d < 4; ++d) at = at * x_.bias.size(d) + (x_.bias.size(d) == 1 ? 0 : index[d]);
    return at;
  }
  float Bias(const AttentionRow& row, std::int64_t key) const {
    const auto index = [&](int d, std::int64_t i) { return x_.bias.size(d) == 1 ? 0 : i; };
    return At(x_.bias, index(0, row.batch), index(1, row.head), index(2, row.query), index(3, key));
  }

  float Score(const AttentionRow& row, std::int64_t key, float& slope) const {
    const float* q = q_.Row(row.batch, row.head, row.query);
    float s = Round(Round(Dot(q, k_.Row(row.batch, row.head / group_, key), q_.cols)) * scale_);
    if (x_.soft_cap > 0) {
      const auto cap = static_cast<float>(x_.soft_cap);
      const float capped = Round(std::tanh(Round(s / cap)));
      slope = 1 - capped * capped, s = Round(capped * cap);
    }
    if (x_.slopes.given()) s = Round(s - Round(Alibi(row, key)));
    if (x_.bias.given()) s = Round(s + Bias(row, key));
    return s;
  }

  Weights WeightsOf(const AttentionRow& row) const {
    Weights w;
    float m = -std::numeric_limits<float>::infinity(), sink = m, l = 0;
    for (std::int64_t j = 0; j < x_.k.size(2); ++j) {
      if (!reference::Sees(x_, row, j)) continue;
      w.keys.push_back(j), w.slopes.push_back(1);
      w.weights.push_back(Score(row, j, w.slopes.back()));
      m = std::max(m, w.weights.back());
    }
    if (x_.sinks.given())
      m = std::max(m, sink = LoadFloat(x_.sinks.data, x_.sinks.dtype, row.head * x_.sinks.stride(0)));
    for (float& s : w.weights) l += s = std::exp(s - m);
    if (x_.sinks.given()) l += w.sink = std::exp(sink - m);
    w.sink = Round(w.sink / l);
    for (std::size_t i = 0; i < w.keys.size(); ++i) {
      w.weights[i] = Round(w.weights[i] / l);
      w.factors.push_back(static_cast<float>(reference::DropoutFactor(x_, row, w.keys[i])));
      w.kept.push_back(Round(w.weights[i] * w.factors[i]));
    }
    return w;
  }

  // What a query row gives to every gradient.
  void AddRow(const AttentionRow& row, const float* out, const float* dout, Sums& sums) const {
    const Weights w = WeightsOf(row);
    const std::int64_t b = row.batch, group = row.head / group_;
    const float delta = Dot(dout, out, v_.cols);
    for (std::size_t i = 0; i < w.keys.size(); ++i) {
      const std::int64_t j = w.keys[i];
      const float dp = Round(Round(Dot(dout, v_.Row(b, group, j), v_.cols)) * w.factors[i]);
      const float db = Round(w.weights[i] * (dp - delta)), ds = Round(Round(db * w.slopes[i]) * scale_);
      if (x_.bias.given()) sums.dbias[static_cast<std::size_t>(BiasAt(row, j))] += db;
      AddScaled(sums.dq.Row(b, row.head, row.query), ds, k_.Row(b, group, j), k_.cols);
      AddScaled(sums.dk.Row(b, group, j), ds, q_.Row(b, row.head, row.query), q_.cols);
      AddScaled(sums.dv.Row(b, group, j), w.kept[i], dout, v_.cols);
    }
    if (x_.sinks.given()) sums.dsinks[static_cast<std::size_t>(row.head)] += Round(w.sink * (0 - delta));
  }

  // The gradient of a Joined as those of its parts.
  void SplitTurnedBack(Rows gradient, const ConstTensor& x, const ConstTensor& rope,
                       const ConstTensor& positions, std::int64_t offset, std::vector<double>& of_x,
                       std::vector<double>& of_rope) const {
    const std::int64_t own = x.size(3), more = gradient.cols - own;
    const bool shared = rope.given() && rope.size(1) == 1;
    Rows of_shared{gradient.batches, 1, gradient.rows, gradient.cols};
    for (std::int64_t i = 0; shared && i < gradient.batches * gradient.heads; ++i) {
      for (std::int64_t s = 0; s < gradient.rows; ++s) {
        const std::int64_t b = i / gradient.heads;
        AddScaled(of_shared.Row(b, 0, s), 1, gradient.Row(b, i % gradient.heads, s), gradient.cols);
      }
    }
    for (Rows* rows : {&gradient, &of_shared}) {
      for (float& value : rows->values) value = Round(value);
      Turn(*rows, positions, offset, -1);
    }
    const auto append = [](const Rows& rows, std::int64_t begin, std::int64_t end, std::vector<double>& to) {
      for (std::int64_t i = 0; i < rows.batches * rows.heads * rows.rows; ++i) {
        const float* row = rows.values.data() + i * rows.cols;
        to.insert(to.end(), row + begin, row + end);
      }
    };
    append(gradient, 0, own, of_x), append(shared ? of_shared : gradient, own, own + more, of_rope);
  }

  const AttentionArgs& x_;
  std::int64_t group_, rope_begin_;
  Rows q_, k_, v_;  // As the products see them.
  float scale_ = 1;
};

}  // namespace

std::vector<double> NaiveAttention(const AttentionArgs& args) { return NaiveOperators(args).Output(); }

NaiveAttentionGradients NaiveAttentionGrad(const AttentionArgs& args, const ConstTensor& out,
                                           const ConstTensor& dout) {
  return NaiveOperators(args).Gradients(out, dout);
}

}  // namespace cubist::testing
