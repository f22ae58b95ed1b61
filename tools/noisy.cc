#include "tools/noisy.h"

#include <utility>

namespace cubist {

Noisy RowOf(const ConstTensor& x, std::int64_t row) {
  Noisy values(x.size(1));
  for (std::int64_t j = 0; j < x.size(1); ++j) values.value[Index(j)] = At(x, row, j);
  return values;
}

Noisy Normed(const Noisy& x, const ConstTensor& gamma, double eps) {
  const auto n = static_cast<double>(x.size());
  double m = n * eps, weighted = 0;
  for (std::size_t i = 0; i < x.value.size(); ++i)
    m += x.value[i] * x.value[i], weighted += x.value[i] * x.value[i] * x.variance[i];
  const double rstd = std::sqrt(n / m);
  Noisy y(x.size());
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const double scale = rstd * At(gamma, i), v = x.value[Index(i)], share = v * v / m;
    y.value[Index(i)] = scale * v;
    y.variance[Index(i)] =
        scale * scale * std::max(x.variance[Index(i)] * (1 - 2 * share) + share * weighted / m, 0.0);
  }
  y.Round();
  return y;
}

Noisy Times(const Noisy& x, const ConstTensor& weights) {
  Noisy y(weights.size(1));
  for (std::int64_t k = 0; k < x.size(); ++k) {
    for (std::int64_t j = 0; j < y.size(); ++j) {
      const double w = At(weights, k, j);
      y.value[Index(j)] += x.value[Index(k)] * w, y.variance[Index(j)] += x.variance[Index(k)] * w * w;
    }
  }
  return y;
}
Noisy RoundedTimes(const Noisy& x, const ConstTensor& weights) {
  Noisy y = Times(x, weights);
  y.Round();
  return y;
}

Noisy Expert(const Noisy& x, const ConstTensor& gate_up, const ConstTensor& down) {
  const Noisy both = RoundedTimes(x, gate_up);
  Noisy act(down.size(0));
  for (std::int64_t f = 0; f < act.size(); ++f) {
    const double gate = both.value[Index(f)], up = both.value[Index(f + act.size())];
    const double sigmoid = 1 / (1 + std::exp(-gate)), silu = gate * sigmoid;
    const double slope = sigmoid * (1 + gate * (1 - sigmoid));
    act.value[Index(f)] = silu * up;
    act.variance[Index(f)] = std::pow(slope * up, 2) * both.variance[Index(f)] +
                             silu * silu * both.variance[Index(f + act.size())];
  }
  act.Round();
  return RoundedTimes(act, down);
}

void Compare(const Noisy& expected, const ConstTensor& out, std::int64_t row, Comparison* all) {
  for (std::int64_t j = 0; j < expected.size(); ++j) {
    all->Add(At(out, row, j), expected.value[Index(j)], kDeviations * std::sqrt(expected.variance[Index(j)]),
             out.dtype, row, j);
  }
}

TensorSpec Weight(const char* name, Shape shape, std::int64_t fan_in) {
  return {.name = name,
          .dtype = DType::kBF16,
          .shape = std::move(shape),
          .fill = TensorSpec::Fill::kNormal,
          .deviation = 1 / std::sqrt(static_cast<double>(fan_in))};
}
TensorSpec Normal(const char* name, Shape shape) {
  return {.name = name, .dtype = DType::kBF16, .shape = std::move(shape), .fill = TensorSpec::Fill::kNormal};
}

}  // namespace cubist
