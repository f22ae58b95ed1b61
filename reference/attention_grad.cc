#include "reference/attention_grad.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "reference/bounds.h"

namespace cubist::reference {
namespace {

double At(const ConstTensor& x, std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) {
  return LoadFloat(x.data, x.dtype, b * x.stride(0) + n * x.stride(1) + s * x.stride(2) + d * x.stride(3));
}

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

// A weight or the gradient of a score, with its error.
struct Term {
  double value = 0, error = 0;
};

class Differentiation {
 public:
  Differentiation(const AttentionArgs& args, const ConstTensor& dout, DType out_type)
      : x_(args), dout_(dout), out_type_(out_type), u_(CubeRoundoff(args.q.dtype)) {
    terms_ = x_.q.size(3) + (x_.q_rope.given() ? x_.q_rope.size(3) : 0);
    scale_ = x_.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(terms_, 1))));
    result_ = {Zero(x_.q), Zero(x_.k), Zero(x_.v), Zero(x_.q_rope), Zero(x_.k_rope)};
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
    const std::int64_t group = row.head / (x_.q.size(1) / x_.k.size(1)), dv = x_.v.size(3);
    Sum delta;
    for (std::int64_t d = 0; d < dv; ++d) {
      delta.Add(At(dout_, row.batch, row.head, row.query, d),
                forward.out[r * static_cast<std::size_t>(dv) + static_cast<std::size_t>(d)]);
    }
    const double out_roundoff = out_type_ == DType::kF32 ? 0x1p-24 : UnitRoundoff(out_type_);
    const double delta_error = (Gamma(dv + 2, 0x1p-24) + 2 * out_roundoff) * delta.magnitude +
                               static_cast<double>(dv) * (out_type_ == DType::kF16 ? 0x1p-24 : 0x1p-126);

    for (std::int64_t j = 0; j < x_.k.size(2); ++j) {
      if (!Sees(x_, row, j)) continue;
      const Sum score = ScoreOf(row, group, j);
      Sum dp;
      for (std::int64_t d = 0; d < dv; ++d)
        dp.Add(At(dout_, row.batch, row.head, row.query, d), At(x_.v, row.batch, group, j, d));
      const double p = std::exp(score.value - lse);
      const Term weight = Rounded(p, p * WeightError(score, lse));
      // Of p before it is rounded, and of dp - delta.
      const double unrounded = p * WeightError(score, lse);
      const double difference = dp.value - delta.value;
      const double difference_error = Gamma(dv + 1, u_) * dp.magnitude + delta_error +
                                      0x1p-24 * (std::abs(dp.value) + std::abs(delta.value)) +
                                      static_cast<double>(dv) * CubeUnderflow(x_.q.dtype, 1 + dp.magnitude);
      const double ds = p * difference;
      const Term gradient = Rounded(
          ds, (unrounded * (std::abs(difference) + difference_error) + p * difference_error) * (1 + 0x1p-23) +
                  0x1p-24 * std::abs(ds));
      AddPair(row, group, j, weight, gradient);
    }
  }

  Sum ScoreOf(const AttentionRow& row, std::int64_t group, std::int64_t key) const {
    Sum score;
    for (const auto& [q, k] : {std::pair(&x_.q, &x_.k), std::pair(&x_.q_rope, &x_.k_rope)}) {
      if (!q->given()) continue;
      const std::int64_t head = k->size(1) == 1 ? 0 : group;
      for (std::int64_t d = 0; d < q->size(3); ++d)
        score.Add(At(*q, row.batch, row.head, row.query, d), At(*k, row.batch, head, key, d));
    }
    return {scale_ * score.value, std::abs(scale_) * score.magnitude};
  }

  // The relative error of exp(s - lse): the dot product's roundings, three of scale, lse's own (fp32, and what its
  // definition allows the forward pass is not counted: lse is given), that of the difference, and exp's.
  double WeightError(const Sum& score, double lse) const {
    const double argument = Gamma(terms_ + 4, u_) * score.magnitude +
                            0x1p-23 * (std::abs(score.value) + std::abs(lse)) +
                            static_cast<double>(terms_) * CubeUnderflow(x_.q.dtype, 1 + score.magnitude);
    return std::expm1(argument) + 2 * kExpError;
  }

  // Rounded to the input dtype, or flushed where it is tiny.
  Term Rounded(double value, double error) const {
    const DType in = x_.q.dtype;
    const double tiny = in == DType::kF16 ? 0x1p-25 : kSmallestNormal;
    const double u = in == DType::kF32 ? 0 : UnitRoundoff(in);
    return {value, error + u * (std::abs(value) + error) + tiny};
  }

  // dst(row of dst) += term * src(row of src).
  void AddTo(Gradient& to, const ConstTensor& dst, std::int64_t dst_head, std::int64_t dst_row,
             const Term& term, const ConstTensor& src, std::int64_t src_head, std::int64_t src_row,
             std::int64_t b, std::int64_t count) {
    for (std::int64_t d = 0; d < dst.size(3); ++d) {
      const std::size_t at = Index(dst, b, dst_head, dst_row, d);
      const double x = At(src, b, src_head, src_row, d);
      to.value[at] += term.value * x;
      // Any order of a sum of `count` products and of its parts: as many roundings on each, and four more.
      to.error[at] += term.error * std::abs(x) * (1 + Gamma(count + 4, u_)) +
                      Gamma(count + 4, u_) * std::abs(term.value * x) +
                      CubeUnderflow(x_.q.dtype, std::abs(x));
    }
  }

  void AddPair(const AttentionRow& row, std::int64_t group, std::int64_t j, const Term& weight,
               const Term& ds) {
    const std::int64_t b = row.batch, h = row.head, i = row.query;
    const std::int64_t heads = x_.q.size(1) / x_.k.size(1) * x_.q.size(2), keys = x_.k.size(2);
    AddTo(result_.dv, x_.v, group, j, weight, dout_, h, i, b, heads);
    AddTo(result_.dq, x_.q, h, i, ds, x_.k, group, j, b, keys);
    AddTo(result_.dk, x_.k, group, j, ds, x_.q, h, i, b, heads);
    if (!x_.q_rope.given()) return;
    const std::int64_t rope = x_.k_rope.size(1) == 1 ? 0 : group;
    AddTo(result_.dq_rope, x_.q_rope, h, i, ds, x_.k_rope, rope, j, b, keys);
    AddTo(result_.dk_rope, x_.k_rope, rope, j, ds, x_.q_rope, h, i, b, x_.q.size(1) * x_.q.size(2));
  }

  // The factor `scale` of what depends on the scores.
  void Finish() {
    for (Gradient* g : {&result_.dq, &result_.dk, &result_.dq_rope, &result_.dk_rope}) {
      for (double& value : g->value) value *= scale_;
      for (std::size_t i = 0; i < g->error.size(); ++i)
        g->error[i] = std::abs(scale_) * g->error[i] + 0x1p-23 * std::abs(g->value[i]) + 0x1p-149;
    }
  }

  const AttentionArgs& x_;
  const ConstTensor& dout_;
  DType out_type_;
  double u_, scale_ = 1;
  std::int64_t terms_ = 0;
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
