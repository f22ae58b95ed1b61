// Attention as a library without a fused kernel computes it: operator by operator, each of which sums in fp32 and
// rounds its result to the dtype of the inputs. The kernels' errors are held against its own (double_benchmark.h).
#ifndef CUBIST_TESTS_KERNELS_NAIVE_ATTENTION_H_
#define CUBIST_TESTS_KERNELS_NAIVE_ATTENTION_H_

#include <vector>

#include "npu_model/types.h"
#include "reference/attention.h"

namespace cubist::testing {

// out (B, Nq, Sq, Dv), row-major. Rounded are: turned rows; the product of q and k, whose rope parts are joined to
// them; that scaled; the cap's quotient, hyperbolic tangent and product; ALiBi's biases; scores with these, and with
// the bias; weights; those that dropout keeps; their product with v. Which keys a row sees and dropout keeps is the
// reference's.
std::vector<double> NaiveAttention(const reference::AttentionArgs& args);

// Its gradients, likewise: the weights again; dout v^T, and what dropout keeps of it; the softmax's gradient
// p (dp - delta) with delta = rowsum(dout * out); the cap's; that scaled; the products, summed over the heads that
// share the other operand; rope parts turned back. Each row-major, and empty where the call has none.
struct NaiveAttentionGradients {
  std::vector<double> dq, dk, dv, dq_rope, dk_rope, dbias, dsinks;
};
NaiveAttentionGradients NaiveAttentionGrad(const reference::AttentionArgs& args, const ConstTensor& out,
                                           const ConstTensor& dout);

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_NAIVE_ATTENTION_H_
