// MlaBlock: the attention half of a layer with multi-head latent attention (DeepSeek-V2, 2024), whole, forward and
// backward, from the public kernels.
#ifndef CUBIST_KERNELS_MLA_BLOCK_H_
#define CUBIST_KERNELS_MLA_BLOCK_H_

#include <cstdint>
#include <optional>

#include "kernels/attention_options.h"
#include "kernels/block.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// One dtype, fp32, bf16 or fp16, but for norms, which may be any float. N heads of Dn + Dr columns in queries and keys
// and Dv in values; ranks Rq and Rkv. Dr may be 0.
struct MlaBlockWeights {
  ConstTensor norm;  // (H)
  ConstTensor q_down = {},
              q_norm = {};  // (H, Rq), (Rq); neither: queries come from H at once, and Rq is H below
  ConstTensor q_up;         // (Rq, N (Dn + Dr)): of each head the part without position, then the rotary one
  ConstTensor kv_down, kv_norm;  // (H, Rkv + Dr): the latent, then the rotary key of all heads; (Rkv)
  ConstTensor kv_up;             // (Rkv, N (Dn + Dv)): of each head the key, then the value
  ConstTensor out;               // (N Dv, H)
  ConstTensor post_norm = {};    // (H), optional: Pangu's sandwich norm, of what attention gives
};

// What is given is written: fp32 or the weights' dtype; norms any float.
struct MlaBlockGradients {
  Tensor norm = {}, q_down = {}, q_norm = {}, q_up = {}, kv_down = {}, kv_norm = {}, kv_up = {}, out = {},
         post_norm = {};
};

// With h = RmsNorm(x, norm), latent | k_rope = h * kv_down, and for the rows of each sequence
//   q | q_rope = RmsNorm(h * q_down, q_norm) * q_up;   k | v = RmsNorm(latent, kv_norm) * kv_up
//   y = FlashAttention(q, k, v, q_rope, k_rope) * out
//   out = x + y, or x + RmsNorm(y, post_norm)
// Rotary parts are turned inside attention and never concatenated: q, k and v are strided views of the projections.
//
//   x, out   (B * S, H)   the dtype of the weights, batch entry by batch entry
//
// Intermediate results are rounded to the dtype. On an Npu device without data the tensors may be without data, too.
struct MlaBlockArgs {
  ConstTensor x;
  MlaBlockWeights weights;
  std::int64_t heads = 1, batch = 1;
  std::optional<float> scale = {};  // 1 / sqrt(Dn + Dr) by default
  Causal causal = Causal::kTopLeft;
  AttentionLengths lengths = {};  // Packed sequences, which end at T; batch is 1 then.
  AttentionRope rope = {};        // Not given: rotary parts are used as they come.
  float eps = 1e-6f;
  Tensor out;
};

// Gradients of the sum of d_out * out, after MlaBlock with the same arguments and state. d_out and d_x are shaped like x
// and have its dtype.
struct MlaBlockGradArgs {
  MlaBlockArgs forward;
  ConstTensor d_out;
  Tensor d_x;
  MlaBlockGradients gradients = {};
};

// Arguments are checked before any kernel runs: an error names the argument, its value and the limit, and no output is
// written then. A kernel may still fail for want of memory (kOutOfMemory) or of a chip's buffer (kUnsupported), or by a
// tuning that its tiles do not allow. The block ends there, and what the state and the outputs hold is unspecified:
// MlaBlockGrad writes its own kernel by kernel.
CUBIST_EXPORT Status MlaBlock(const Device& device, const MlaBlockArgs& args, BlockState* state,
                              BlockProfile* profile = nullptr);
CUBIST_EXPORT Status MlaBlockGrad(const Device& device, const MlaBlockGradArgs& args, BlockState* state,
                                  BlockProfile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MLA_BLOCK_H_
