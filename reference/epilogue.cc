#include "reference/epilogue.h"

#include <cmath>
#include <cstddef>

#include "reference/bounds.h"

namespace cubist::reference {
namespace {

constexpr double kRoundoff = 0x1p-24;
const double kTwoSqrtTwoOverPi = 2 * std::sqrt(2 / std::acos(-1.0));

double TanhArgument(double x) { return kTwoSqrtTwoOverPi * (x + 0.044715 * x * x * x); }

// The error of the activation itself, computed in fp32: a few roundings and those of exp, which makes an absolute error
// of its argument a relative one of its result. GELU's erfc is a polynomial that is 1e-6 from it, relatively.
double ActivationError(Activation activation, double x, double result) {
  const double tiny = 1e-35;  // What exp overflows to leaves.
  switch (activation) {
    case Activation::kSilu:
      return std::abs(result) * (kExpError + 4 * kRoundoff) + tiny;
    case Activation::kGeluTanh:
      return std::abs(result) * (kExpError + (4 + 8 * std::abs(TanhArgument(x))) * kRoundoff) + tiny;
    case Activation::kGelu: {
      const double tail = std::abs(x) * std::erfc(std::abs(x) / std::sqrt(2)) / 2;
      return tail * (1e-6 + kExpError + 8 * (1 + x * x / 2) * kRoundoff) + 4 * kRoundoff * std::abs(result) +
             tiny;
    }
    default:
      return 0;
  }
}

// The steepest that they are.
double SlopeOf(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu ? 1.0 : 1.13;
}

}  // namespace

double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return x <= 0 ? 0 : x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * std::erfc(-x / std::sqrt(2)) / 2;
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-TanhArgument(x)));
    case Activation::kNone:
      break;
  }
  return x;
}

EpilogueResult ApplyEpilogue(const MatmulResult& product, std::int64_t k, DType input, DType output,
                             const Epilogue& e, std::int64_t n) {
  EpilogueResult result;
  for (std::size_t at = 0; at < product.c.size(); ++at) {
    const auto i = static_cast<std::int64_t>(at) / n, j = static_cast<std::int64_t>(at) % n;
    const double bias = e.bias.given() ? LoadFloat(e.bias.data, e.bias.dtype, j * e.bias.stride(0)) : 0.0;
    const double residual = e.residual.given() && e.beta != 0
                                ? e.beta * LoadFloat(e.residual.data, e.residual.dtype,
                                                     i * e.residual.stride(0) + j * e.residual.stride(1))
                                : 0.0;
    const double sum = e.alpha == 0 ? 0 : e.alpha * product.c[at];
    const double x = sum + bias + residual;
    const double magnitude = std::abs(e.alpha) * product.magnitude[at] + std::abs(bias) + std::abs(residual);
    const double before = Gamma(k + 5, CubeRoundoff(input)) * magnitude +
                          std::abs(e.alpha) * static_cast<double>(k) * CubeUnderflow(input, 1) + 0x1p-148;
    const double c = Activate(e.activation, x);
    const double error = SlopeOf(e.activation) * before + ActivationError(e.activation, x, c);
    result.c.push_back(c);
    result.bounds.push_back(error + OutputRounding(output, c, error));
  }
  return result;
}

}  // namespace cubist::reference
