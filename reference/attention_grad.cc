#include "reference/attention_grad.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "reference/attention_scores.h"
#include "reference/bounds.h"

namespace cubist::reference {
namespace {

// Elements of row-major (b, n, s, d).
std::size_t Index(const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
  return static_cast<std::size_t>(((b * x.size(1) + n) * x.size(2) + s) * x.size(3) + d);
}

Gradient Zero(const ConstTensor& x) {
  const auto count = static_cast<std::size_t>(x.given() ? x.count() : 0);
  return {std::vector<double>(count), std::vector<double>(count)};
}

struct Sum {
  double value = 0, magnitude = 0;

  void Add(double a, double b) { value += a * b, magnitude += std::abs(a * b); }
};

// A value with its error.
struct Term {
  double value = 0, error = 0;
};

class Differentiation {
 public:
  Differentiation(const AttentionArgs& args, const ConstTensor& dout, DType out_type)
      : x_(args),
        rows_(args),
        dout_(dout),
        out_type_(out_type),
        u_(CubeRoundoff(args.q.dtype)),
        scale_(ScoreScale(args)),
        terms_(ScoreTerms(args)) {
    if (x_.cos.given()) {  // As in AttentionRowBound.
      turning_ =
          Gamma(3, 0x1p-24) + (x_.q.dtype == DType::kF32 ? 0 : UnitRoundoff(x_.q.dtype) * (1 + 0x1p-20));
    }
    result_ = {Zero(x_.q),      Zero(x_.k),    Zero(x_.v),    Zero(x_.q_rope),
               Zero(x_.k_rope), Zero(x_.bias), Zero(x_.sinks)};
  }

  AttentionGradResult Run() {
    std::vector<AttentionRow> rows = AllRows(x_);
    const AttentionResult forward = Attention(x_, rows);
    for (std::size_t r = 0; r < rows.size(); ++r) AddRow(rows[r], r, forward);
    Finish();
    return std::move(result_);
  }

 private:
  // What query row `r` gives to every gradient.
  void AddRow(const AttentionRow& row, std::size_t r, const AttentionResult& forward) {
    const double lse = forward.lse[r];
    if (lse == -std::numeric_limits<double>::infinity()) return;
    const std::int64_t dv = x_.v.size(3);
    const std::vector<double>& dout = dout_.At(row.batch, row.head, row.query).values;
    Sum delta;
    for (std::size_t d = 0; d < dout.size(); ++d) delta.Add(dout[d], forward.out[r * dout.size() + d]);
    const double out_roundoff = out_type_ == DType::kF32 ? 0x1p-24 : UnitRoundoff(out_type_);
    const double delta_error = (Gamma(dv + 2, 0x1p-24) + 2 * out_roundoff) * delta.magnitude +
                               static_cast<double>(dv) * (out_type_ == DType::kF16 ? 0x1p-24 : 0x1p-126);
    if (x_.sinks.given()) AddSink(row, lse, {delta.value, delta_error});

    for (std::int64_t j = 0; j < x_.k.size(2); ++j) {
      if (!Sees(x_, row, j)) continue;
      const AttentionScore score = ScoreOf(x_, rows_, row, j);
      const std::vector<double>& v = rows_.v.At(row.batch, KvHead(x_, row), j).values;
      Sum dp;
      for (std::size_t d = 0; d < v.size(); ++d) dp.Add(dout[d], v[d]);
      const double p = std::exp(score.value - lse), kept = DropoutFactor(x_, row, j);
      // Of p before it is rounded, and of dp - delta.
      const double unrounded = p * WeightError(score, lse);
      const double roundings = kept == 1 ? 0 : 3 * 0x1p-24;  // Of the factor and of the product with it.
      const Term weight = Rounded(kept * p, kept * (unrounded + roundings * p));
      const double difference = kept * dp.value - delta.value;
      const double difference_error = kept * (Gamma(dv + 1, u_) + roundings) * dp.magnitude + delta_error +
                                      0x1p-24 * (kept * std::abs(dp.value) + std::abs(delta.value)) +
                                      static_cast<double>(dv) * CubeUnderflow(x_.q.dtype, 1 + dp.magnitude);
      const double db = p * difference;
      const Term biased = {
          db, (unrounded * (std::abs(difference) + difference_error) + p * difference_error) * (1 + 0x1p-23) +
                  0x1p-24 * std::abs(db)};
      if (x_.bias.given()) AddBias(row, j, biased);
      const double ds = db * score.slope, slope_error = SlopeError(score);
      AddPair(row, j, weight,
              Rounded(ds, biased.error * (score.slope + slope_error) + std::abs(db) * slope_error +
                              (x_.soft_cap > 0 ? 0x1p-24 * std::abs(ds) : 0)));
    }
  }

  // The error of a score as the kernel has it, scaled and capped: the dot product's roundings, those of scale and bias,
  // those of turned elements, and the cap's (see AttentionRowBound).
  double ScoreError(const AttentionScore& score) const {
    return Gamma(terms_ + 10, u_) * score.magnitude + (2 * turning_ + turning_ * turning_) * score.product +
           SoftCapError(x_.q.dtype, x_.soft_cap, score.product) +
           static_cast<double>(terms_) * CubeUnderflow(x_.q.dtype, 1 + score.magnitude);
  }
  // The relative error of exp(s - lse): that of the score, lse's own (fp32, and what its definition allows the forward
  // pass is not counted: lse is given), that of the difference, and exp's.
  double WeightError(const AttentionScore& score, double lse) const {
    return std::expm1(ScoreError(score) + 0x1p-23 * (std::abs(score.value) + std::abs(lse))) + 2 * kExpError;
  }
  // The slope is 1 - t^2 with |t| = |capped / cap| <= 1: twice the relative error of t, and four roundings.
  double SlopeError(const AttentionScore& score) const {
    return x_.soft_cap > 0 ? 2 * ScoreError(score) / x_.soft_cap + 4 * 0x1p-24 : 0;
  }

  // Rounded to the input dtype, or flushed where it is tiny.
  Term Rounded(double value, double error) const {
    const DType in = x_.q.dtype;
    const double tiny = in == DType::kF16 ? 0x1p-25 : kSmallestNormal;
    const double u = in == DType::kF32 ? 0 : UnitRoundoff(in);
    return {value, error + u * (std::abs(value) + error) + tiny};
  }

  // A weight below the smallest normal number is flushed.
  void AddSink(const AttentionRow& row, double lse, const Term& delta) {
    const auto head = static_cast<std::size_t>(row.head);
    const double sink = LoadFloat(x_.sinks.data, x_.sinks.dtype, row.head * x_.sinks.stride(0));
    const double weight = std::exp(sink - lse);
    if (weight == 0) return;
    const double error = std::expm1(0x1p-23 * (std::abs(sink) + std::abs(lse))) + 2 * kExpError;
    const double value = weight * delta.value;
    result_.dsinks.value[head] -= value;
    result_.dsinks.error[head] += (weight * error + kSmallestNormal) * (std::abs(delta.value) + delta.error) +
                                  weight * delta.error + kSmallestNormal +
                                  Gamma(x_.q.size(0) * x_.q.size(2) + 4, 0x1p-24) * std::abs(value);
  }

  void AddBias(const AttentionRow& row, std::int64_t key, const Term& term) {
    const auto index = [&](int d, std::int64_t i) { return x_.bias.size(d) == 1 ? 0 : i; };
    const std::size_t at =
        Index(x_.bias, index(0, row.batch), index(1, row.head), index(2, row.query), index(3, key));
    const std::int64_t count = x_.q.size(0) * x_.q.size(1) * x_.q.size(2) * x_.k.size(2) /
                               std::max<std::int64_t>(x_.bias.count(), 1);
    result_.dbias.value[at] += term.value;
    result_.dbias.error[at] +=
        term.error + Gamma(count + 4, 0x1p-24) * (std::abs(term.value) + term.error) + 0x1p-126;
  }

  // Row (b, head, row) of what `to` is the gradient of += term * x. The elements of x err by `relative` of their magnitudes.
  void AddTo(Gradient& to, const ConstTensor& dst, std::int64_t b, std::int64_t head, std::int64_t row,
             const Term& term, const DoubleRow& x, double relative, std::int64_t count) {
    const std::size_t first = Index(dst, b, head, row, 0);
    // Any order of a sum of `count` products and of its parts: as many roundings on each, and four more.
    const double factor = std::abs(term.value), roundings = Gamma(count + 4, u_);
    for (std::size_t d = 0; d < x.values.size(); ++d) {
      const double x_error = relative * x.magnitudes[d], size = std::abs(x.values[d]) + x_error;
      to.value[first + d] += term.value * x.values[d];
      to.error[first + d] += factor * x_error + term.error * size * (1 + roundings) +
                             roundings * factor * size + CubeUnderflow(x_.q.dtype, size);
    }
  }

  void AddPair(const AttentionRow& row, std::int64_t j, const Term& weight, const Term& ds) {
    const std::int64_t b = row.batch, h = row.head, i = row.query, group = KvHead(x_, row);
    const std::int64_t heads = x_.q.size(1) / x_.k.size(1) * x_.q.size(2), keys = x_.k.size(2);
    AddTo(result_.dv, x_.v, b, group, j, weight, dout_.At(b, h, i), 0, heads);
    AddTo(result_.dq, x_.q, b, h, i, ds, rows_.k.At(b, group, j), turning_, keys);
    AddTo(result_.dk, x_.k, b, group, j, ds, rows_.q.At(b, h, i), turning_, heads);
    if (!x_.q_rope.given()) return;
    const std::int64_t rope = KRopeHead(x_, row), rope_heads = x_.q.size(1) * x_.q.size(2);
    AddTo(result_.dq_rope, x_.q_rope, b, h, i, ds, rows_.k_rope.At(b, rope, j), turning_, keys);
    AddTo(result_.dk_rope, x_.k_rope, b, rope, j, ds, rows_.q_rope.At(b, h, i), turning_, rope_heads);
  }

  // The factor `scale` of what depends on the scores; turned rows go back.
  void Finish() {
    for (Gradient* g : {&result_.dq, &result_.dk, &result_.dq_rope, &result_.dk_rope}) {
      for (double& value : g->value) value *= scale_;
      for (std::size_t i = 0; i < g->error.size(); ++i)
        g->error[i] = std::abs(scale_) * g->error[i] + 0x1p-23 * std::abs(g->value[i]) + 0x1p-149;
    }
    if (!x_.cos.given()) return;
    const bool parts = x_.q_rope.given();
    TurnBack(parts ? result_.dq_rope : result_.dq, parts ? x_.q_rope : x_.q, x_.q_positions, x_.q_offset);
    TurnBack(parts ? result_.dk_rope : result_.dk, parts ? x_.k_rope : x_.k, x_.k_positions, x_.k_offset);
  }

  // (x1, x2) = (y1 c + y2 s, y2 c - y1 s): three roundings.
  void TurnBack(Gradient& gradient, const ConstTensor& x, const ConstTensor& positions,
                std::int64_t offset) const {
    const std::int64_t pairs = x_.cos.size(1);
    for (std::int64_t row = 0; row < x.size(0) * x.size(1) * x.size(2); ++row) {
      const std::int64_t position =
          PositionOf(positions, offset, row / x.size(2) / x.size(1), row % x.size(2));
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const std::int64_t first = x_.interleaved ? 2 * pair : pair,
                           second = first + (x_.interleaved ? 1 : pairs);
        const auto at = [&](std::int64_t d) { return static_cast<std::size_t>(row * x.size(3) + d); };
        const auto angle = [&](const ConstTensor& table) {
          return LoadFloat(table.data, table.dtype, position * table.stride(0) + pair * table.stride(1));
        };
        const double c = angle(x_.cos), s = angle(x_.sin);
        double &y1 = gradient.value[at(first)], &y2 = gradient.value[at(second)];
        double &e1 = gradient.error[at(first)], &e2 = gradient.error[at(second)];
        const double roundings = Gamma(3, 0x1p-24);
        const double f1 = std::abs(c) * e1 + std::abs(s) * e2, f2 = std::abs(c) * e2 + std::abs(s) * e1;
        const double size1 = std::abs(y1 * c) + std::abs(y2 * s), size2 = std::abs(y2 * c) + std::abs(y1 * s);
        const double x1 = y1 * c + y2 * s, x2 = y2 * c - y1 * s;
        y1 = x1, y2 = x2;
        e1 = f1 + roundings * (size1 + f1), e2 = f2 + roundings * (size2 + f2);
      }
    }
  }

  const AttentionArgs& x_;
  AttentionRows rows_;
  DoubleRows dout_;
  DType out_type_;
  double u_, scale_;
  std::int64_t terms_;
  double turning_ = 0;  // The error of a turned element, relative to its magnitude.
  AttentionGradResult result_;
};

}  // namespace

std::vector<double> Gradient::Bounds(DType output) const {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < value.size(); ++i)
    bounds.push_back(error[i] + OutputRounding(output, value[i], error[i]));
  return bounds;
}

AttentionGradResult AttentionGrad(const AttentionArgs& args, const ConstTensor& dout, DType out_type) {
  return Differentiation(args, dout, out_type).Run();
}

}  // namespace cubist::reference
