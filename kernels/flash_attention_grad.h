// FlashAttention (RECT-FA), backward.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_GRAD_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_GRAD_H_

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/attention_options.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// The gradients of FlashAttention (flash_attention.h has the notation) for dout, the gradient of out:
//   p(i, j) = exp(s(i, j) - lse(i));   delta(i) = sum over d of dout(i) * out(i)
//   ds(i, j) = scale * p(i, j) * (dout(i) . v(j) - delta(i))
//   dv(j) = sum over i of p(i, j) * dout(i);   dk(j) = sum over i of ds(i, j) * q(i);   dq(i) = sum over j of ds(i, j) * k(j)
// and with q_rope, k_rope in the place of q, k their gradients; dk, dv and dk_rope are summed over the query heads that
// share the head of k, v or k_rope.
//
//   q, k, v, q_rope, k_rope, scale, causal, window, prefix   as the forward call had them
//   out      (B, Nq, Sq, Dv)   what it gave, in fp32 or the input dtype;  lse (B, Nq, Sq), fp32: likewise
//   dout     (B, Nq, Sq, Dv)   the input dtype
//   dq, dk, dv, dq_rope, dk_rope   shaped like q, k, v, q_rope, k_rope, each in fp32 or the input dtype
//
// p and ds / scale are rounded to the input dtype before they meet dout, q and k; sums are fp32. A row that saw no key
// (lse -inf) gives and gets no gradient. Deterministic: bit for bit the same for any number of threads. A masked key
// close to the diagonal has weight 0 but is read: a NaN or Inf in its k or v makes the gradients of those rows NaN.
// Outputs may overlap neither each other nor an input. Workspace: fp32 copies of dk, dv and (as often as the keys are
// cut into chunks: up to 16 / (B * Nkv) times on the host) of dq, two numbers per query row, and on the host q and dout
// in two packed layouts; memory is linear in S.
// After FlashAttention-2 (Dao, 2023), algorithm 2; operator contract: aclnnFlashAttentionScoreGrad.
struct FlashAttentionGradArgs {
  ConstTensor q, k, v;
  ConstTensor q_rope = {}, k_rope = {};
  ConstTensor out, lse, dout;
  Tensor dq, dk, dv;
  Tensor dq_rope = {}, dk_rope = {};
  std::optional<float> scale = {};
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  std::span<const std::int64_t> prefix = {};
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
Status FlashAttentionGrad(const Device& device, const FlashAttentionGradArgs& args,
                          Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_H_
