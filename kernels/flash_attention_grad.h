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
//   p(i, j) = exp(s(i, j) - lse(i)), and r(i, j) what dropout multiplies it by, or 1;   delta(i) = sum over d of dout(i) * out(i)
//   db(i, j) = p(i, j) * (r(i, j) * dout(i) . v(j) - delta(i));   ds(i, j) = scale * db(i, j) * the soft cap's slope
//   dv(j) = sum over i of r(i, j) * p(i, j) * dout(i);   dk(j) = sum over i of ds(i, j) * q(i);   dq(i) = sum over j of ds(i, j) * k(j)
//   dbias = db, summed over what a bias of size 1 serves;   dsinks = - sum over b, i of exp(sink - lse(i)) * delta(i)
// and with q_rope, k_rope in the place of q, k their gradients, turned back where `rope` turns them; dk, dv and dk_rope
// are summed over the query heads that share the head of k, v or k_rope.
//
//   q .. k_rope and scale .. soft_cap   as the forward call had them
//   out      (B, Nq, Sq, Dv)   what it gave, in fp32 or the input dtype;  lse (B, Nq, Sq), fp32: likewise
//   dout     (B, Nq, Sq, Dv)   the input dtype
//   dq, dk, dv, dq_rope, dk_rope   shaped like q, k, v, q_rope, k_rope, each in fp32 or the input dtype
//   dbias    like bias, fp32 or the input dtype;   dsinks  like sinks, fp32;   both optional
//
// p and ds / scale are rounded to the input dtype before they meet dout, q and k; sums are fp32. A row to which mask, band
// or bias leave no key (lse -inf) gives and gets no gradient, whatever its q and dout hold. Deterministic: bit for bit the
// same for any number of threads. What a hidden key or its value holds, NaN or Inf, reaches no gradient. A key of -inf that
// a row sees with a weight of 0 gets none from it; dq of such rows is NaN (0 times infinity), but where a mask or a band may
// hide keys infinite elements count as 0 there. Not so what a row itself holds, or the values that it sees: NaN or Inf in q,
// dout or v reaches dk and dv of every key of the blocks that the row is computed with, keys near its diagonal that are hidden
// from it among them. Outputs may overlap neither each other nor an input; rows and keys of no sequence (see
// AttentionLengths) keep what dq, dk and dv hold there.
// Workspace: fp32 copies of dq (as often as the keys are cut into chunks: on the host up to 16 / (B * Nkv) times, with a
// dbias that heads or batches share up to 16), on an NPU of dk and dv, two numbers per query row, with a mask or a band a
// copy of k, with a mask, a bias, or a band that leaves rows without a key copies of q and dout, with a mask counts of what
// it hides (as in the forward pass), turned rope parts, and on the host q and dout in two packed layouts; memory is linear in
// S but for those counts and an fp32 copy of a dbias that is summed over heads or batches.
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
  AttentionLengths lengths = {};
  AttentionRope rope = {};
  ConstTensor bias = {}, sinks = {}, mask = {};
  AttentionAlibi alibi = {};
  AttentionDropout dropout = {};
  std::optional<float> soft_cap = {};
  Tensor dbias = {}, dsinks = {};
  CallerWorkspace workspace = {};  // Of at least FlashAttentionGradWorkspace's bytes, or none.
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status FlashAttentionGrad(const Device& device, const FlashAttentionGradArgs& args,
                                        Profile* profile = nullptr);

// The bytes of GM that the call works in besides its tensors.
CUBIST_EXPORT Status FlashAttentionGradWorkspace(const Device& device, const FlashAttentionGradArgs& args,
                                                 std::int64_t* bytes);

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_H_
