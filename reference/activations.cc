#include "reference/activations.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "reference/bounds.h"

namespace cubist::reference {
namespace {

constexpr double kU = 0x1p-24;  // of fp32

double At(const ConstTensor& x, std::int64_t i, std::int64_t j) {
  return LoadFloat(x.data, x.dtype, i * x.stride(0) + j * x.stride(1));
}
// Of a vector that may not be given: 1 then.
double At(const ConstTensor& x, std::int64_t i) {
  return x.given() ? LoadFloat(x.data, x.dtype, i * x.stride(0)) : 1.0;
}

// `value`, computed in fp32 up to `error`, as the output dtype holds it.
void Add(Bounded* to, double value, double error, DType output) {
  const double total = error + kSmallestNormal;  // Underflow on the way.
  to->values.push_back(value);
  to->bounds.push_back(total + OutputRounding(output, value, total));
}

}  // namespace

// The sum of H squares errs by gamma(H), the mean and eps by two more, which the root halves; root and quotient round
// once each, and so do the two products.
RmsNormResult RmsNorm(ConstTensor x, ConstTensor gamma, double eps, DType output) {
  RmsNormResult result;
  const std::int64_t rows = x.size(0), cols = x.size(1);
  for (std::int64_t t = 0; t < rows; ++t) {
    double squares = 0;
    for (std::int64_t h = 0; h < cols; ++h) squares += At(x, t, h) * At(x, t, h);
    const double rstd = 1 / std::sqrt((cols == 0 ? 0 : squares / static_cast<double>(cols)) + eps);
    Add(&result.rstd, rstd, Gamma(cols + 8, kU) * rstd, DType::kF32);
    for (std::int64_t h = 0; h < cols; ++h) {
      const double out = At(x, t, h) * rstd * At(gamma, h);
      Add(&result.out, out, Gamma(cols + 10, kU) * std::abs(out), output);
    }
  }
  return result;
}

RmsNormGradResult RmsNormGrad(ConstTensor d_out, ConstTensor x, ConstTensor rstd, ConstTensor gamma,
                              ConstTensor d_sum, DType output, DType gamma_output) {
  RmsNormGradResult result;
  const std::int64_t rows = x.size(0), cols = x.size(1);
  for (std::int64_t t = 0; t < rows; ++t) {
    const double r = At(rstd, t);
    double dot = 0, dot_size = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      const double term = At(gamma, j) * At(d_out, t, j) * At(x, t, j) / static_cast<double>(cols);
      dot += term, dot_size += std::abs(term);
    }
    for (std::int64_t h = 0; h < cols; ++h) {
      const double direct = r * At(gamma, h) * At(d_out, t, h), more = d_sum.given() ? At(d_sum, t, h) : 0;
      const double shift = At(x, t, h) * r * r * r;
      const double size = std::abs(direct) + std::abs(shift) * dot_size + std::abs(more);
      Add(&result.d_x, direct - shift * dot + more, Gamma(cols + 12, kU) * size, output);
    }
  }
  for (std::int64_t h = 0; h < cols; ++h) {
    double sum = 0, size = 0;
    for (std::int64_t t = 0; t < rows; ++t) {
      const double term = At(d_out, t, h) * At(x, t, h) * At(rstd, t);
      sum += term, size += std::abs(term);
    }
    Add(&result.d_gamma, sum, Gamma(2 * rows + 6, kU) * size, gamma_output);
  }
  return result;
}

// 1 + exp(-g) errs by exp's share of it, at most kExpError; four more operations round.
Bounded SwiGlu(ConstTensor gate, ConstTensor up, ConstTensor probs, DType output) {
  Bounded result;
  for (std::int64_t m = 0; m < gate.size(0); ++m) {
    for (std::int64_t n = 0; n < gate.size(1); ++n) {
      const double g = At(gate, m, n);
      const double out = g / (1 + std::exp(-g)) * At(up, m, n) * At(probs, m);
      const double error = (kExpError + Gamma(6, kU)) * std::abs(out) +
                           kSmallestNormal * std::abs(At(up, m, n) * At(probs, m));
      Add(&result, out, error, output);
    }
  }
  return result;
}

// s errs by e = kExpError + 2 u of itself, 1 - s by e s + u; the slope s (1 + g (1 - s)) therefore by less than
// (2 e + 4 u) s (1 + |g|).
SwiGluGradResult SwiGluGrad(ConstTensor d_out, ConstTensor gate, ConstTensor up, ConstTensor probs,
                            DType output, DType probs_output) {
  SwiGluGradResult result;
  const std::int64_t cols = gate.size(1);
  for (std::int64_t m = 0; m < gate.size(0); ++m) {
    double d_prob = 0, size = 0;
    for (std::int64_t n = 0; n < cols; ++n) {
      const double g = At(gate, m, n), u = At(up, m, n), dy = At(d_out, m, n), d = dy * At(probs, m);
      const double s = 1 / (1 + std::exp(-g));
      const double error = 2 * kExpError + Gamma(10, kU);
      const double tiny = kSmallestNormal * (1 + std::abs(g)) * std::abs(d) * (1 + std::abs(u));
      Add(&result.d_gate, d * u * s * (1 + g * (1 - s)),
          error * std::abs(d * u) * s * (1 + std::abs(g)) + tiny, output);
      Add(&result.d_up, d * g * s, error * std::abs(d * g) * s + tiny, output);
      d_prob += dy * g * s * u, size += std::abs(dy * g * s * u);
    }
    Add(&result.d_probs, d_prob, (Gamma(cols + 6, kU) + 2 * kExpError) * size, probs_output);
  }
  return result;
}

}  // namespace cubist::reference
