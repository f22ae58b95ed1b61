// Root-mean-square norm and SwiGLU with their gradients, naively, in double, and how far a kernel's answers may be off.
#ifndef CUBIST_REFERENCE_ACTIVATIONS_H_
#define CUBIST_REFERENCE_ACTIVATIONS_H_

#include <vector>

#include "npu_model/types.h"

namespace cubist::reference {

// Row-major values, and a bound for each on what a kernel that computes in fp32 may differ by once it has rounded to its
// output dtype.
struct Bounded {
  std::vector<double> values, bounds;
};

// out(t, h) = x(t, h) * rstd(t) * gamma(h), rstd(t) = 1 / sqrt(mean over h of x(t, h)^2 + eps)
//   x (T, H), gamma (H) or not given, which means 1; `output` is the dtype of out
struct RmsNormResult {
  Bounded out, rstd;
};
RmsNormResult RmsNorm(ConstTensor x, ConstTensor gamma, double eps, DType output);

// d_x(t, h) = rstd(t) gamma(h) d_out(t, h) - x(t, h) rstd(t)^3 mean over j of gamma(j) d_out(t, j) x(t, j) + d_sum(t, h)
// d_gamma(h) = sum over t of d_out(t, h) x(t, h) rstd(t)
struct RmsNormGradResult {
  Bounded d_x, d_gamma;
};
RmsNormGradResult RmsNormGrad(ConstTensor d_out, ConstTensor x, ConstTensor rstd, ConstTensor gamma,
                              ConstTensor d_sum, DType output, DType gamma_output);

// out(m, n) = silu(gate(m, n)) * up(m, n) * probs(m), silu(g) = g / (1 + exp(-g)); probs (M) or not given: 1
Bounded SwiGlu(ConstTensor gate, ConstTensor up, ConstTensor probs, DType output);

// The derivatives of sum over m, n of d_out(m, n) * out(m, n).
struct SwiGluGradResult {
  Bounded d_gate, d_up, d_probs;
};
SwiGluGradResult SwiGluGrad(ConstTensor d_out, ConstTensor gate, ConstTensor up, ConstTensor probs,
                            DType output, DType probs_output);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_ACTIVATIONS_H_
