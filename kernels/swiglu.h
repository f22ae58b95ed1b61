// SwiGlu: the gated activation of an expert (Shazeer, GLU variants improve transformer, 2020), and its gradient.
#ifndef CUBIST_KERNELS_SWIGLU_H_
#define CUBIST_KERNELS_SWIGLU_H_

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// out(m, n) = silu(gate(m, n)) * up(m, n) * probs(m),   silu(g) = g / (1 + exp(-g)), in fp32, rounded once
//
//   gate, up, out   (M, N)   one dtype: fp32, bf16 or fp16. Halves of one (M, 2 N) matrix are views of it.
//   probs           (M)      optional, any float dtype; absent means 1. Weighs a routed row here instead of after the
//                            down projection, which is linear.
//
// Semantics of aclnnSwiGlu, whose input is gate and up side by side. Any M, N >= 0. out may not overlap anything.
struct SwiGluArgs {
  ConstTensor gate, up;
  ConstTensor probs = {};
  Tensor out;
};

// Gradients of SwiGlu. With s = 1 / (1 + exp(-gate)) and d = d_out * probs:
//   d_gate = d * up * s * (1 + gate * (1 - s));   d_up = d * gate * s
//   d_probs(m) = sum over n of d_out(m, n) * gate(m, n) * s(m, n) * up(m, n), in fp32
//
//   d_out, gate, up, d_gate, d_up   (M, N)   one dtype: fp32, bf16 or fp16
//   probs                           (M)      optional, any float dtype
//   d_probs                         (M)      optional, any float dtype
struct SwiGluGradArgs {
  ConstTensor d_out, gate, up;
  ConstTensor probs = {};
  Tensor d_gate, d_up;
  Tensor d_probs = {};
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status SwiGlu(const Device& device, const SwiGluArgs& args, Profile* profile = nullptr);
CUBIST_EXPORT Status SwiGluGrad(const Device& device, const SwiGluGradArgs& args, Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_SWIGLU_H_
