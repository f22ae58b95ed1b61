// The gradients of attention, naively: what the backward kernel's answer is measured against.
#ifndef CUBIST_REFERENCE_ATTENTION_GRAD_H_
#define CUBIST_REFERENCE_ATTENTION_GRAD_H_

#include <vector>

#include "reference/attention.h"

namespace cubist::reference {

// A gradient, row-major in the shape of what it is the gradient of, and how far a kernel's fp32 sums may be off.
struct Gradient {
  std::vector<double> value, error;

  // The bound of each element once it is rounded to the output's dtype.
  std::vector<double> Bounds(DType output) const;
};

struct AttentionGradResult {
  Gradient dq, dk, dv, dq_rope, dk_rope;  // The last two are empty without rope parts,
  Gradient dbias, dsinks;                 // these without a bias, without sinks.
};

// For the loss sum of dout * out, with dout (B, Nq, Sq, Dv) and, in the notation of Attention,
//   p(i, j) = exp(s(i, j) - lse(i)),   out(i) = sum of p(i, j) v(j),
//   db(i, j) = p(i, j) * (dout(i) . v(j) - dout(i) . out(i)),   ds(i, j) = scale * db(i, j) * slope of the soft cap:
//   dv(j) = sum over i of p(i, j) dout(i);   dk(j) = sum over i of ds(i, j) q(i);   dq(i) = sum over j of ds(i, j) k(j)
//   dbias = db, summed over what an element serves;   dsinks(n) = - sum over rows of exp(sink - lse(i)) dout(i) . out(i)
// and so for the rope parts; turned rows count as they are turned, and their gradients are turned back. Heads that share
// a head of k, v or k_rope add up in its gradient. In double, from the inputs alone. Masked pairs are not read. A row
// without keys, or with scores of -inf alone, has and gives no gradient.
//
// Errors allow for what the kernel's contract does: lse in fp32, `out` rounded to `out_type`, p, ds / scale and turned
// rows rounded to the input dtype, sums in fp32.
AttentionGradResult AttentionGrad(const AttentionArgs& args, const ConstTensor& dout, DType out_type);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_ATTENTION_GRAD_H_
