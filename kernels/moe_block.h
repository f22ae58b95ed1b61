// MoeBlock: the feed-forward half of a Mixture-of-Experts layer, whole, forward and backward, from the public kernels.
#ifndef CUBIST_KERNELS_MOE_BLOCK_H_
#define CUBIST_KERNELS_MOE_BLOCK_H_

#include <cstdint>

#include "kernels/block.h"
#include "kernels/route.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// One dtype, fp32, bf16 or fp16, but for norms and router_bias, which may be any float, and the router, which may be fp32 beside
// narrower ones: its product and its gradients are then those of floats (Megatron's moe_router_dtype).
struct MoeBlockWeights {
  ConstTensor norm;                                   // (H)
  ConstTensor router;                                 // (H, E)
  ConstTensor router_bias = {};                       // (E), optional: selects, does not weigh
  ConstTensor gate_up, down;                          // (E, H, 2 F) with the gate in front; (E, F, H)
  ConstTensor shared_gate_up = {}, shared_down = {};  // (H, 2 S), (S, H), optional: the shared expert
  ConstTensor post_norm = {};  // (H), optional: Pangu's sandwich norm, of what the experts give
};

// What is given is written: fp32 or its weight's dtype; norms any float.
struct MoeBlockGradients {
  Tensor norm = {}, router = {}, gate_up = {}, down = {}, shared_gate_up = {}, shared_down = {},
         post_norm = {};
};

// With h = RmsNorm(x, norm), and the routes of Route(h * router):
//   y(t) = sum over the routes (t, e) of weight * down_e(SwiGlu(gate_up_e(h(t))))  (+ down(SwiGlu(gate_up(h(t)))), shared)
//   out = x + y, or x + RmsNorm(y, post_norm)
// With weighs_activation the weight of a route moves forward, through the down projection, which is linear:
//   down_e(weight * SwiGlu(..)), the product inside SwiGlu in fp32
// so that rows come back with a plain sum, and the backward pass reads F numbers per route for its weight in place of H.
// A token that is not valid is as one whose routes were all dropped: no expert has a row of it, y is what the shared expert
// makes of it, or 0, and it is no part of aux_loss. Its x may be NaN, which stays in its row of out; not for gradients.
// Nothing of its d_out reaches experts and router; the shared expert and the norms have their gradients of it.
// x, out (T, H), the dtype of the experts' weights. Nothing waits for a count: the router's counts stay where the grouped products
// read them. Intermediate results are rounded to the dtype, the gradients of logits to the router's; router logits, weights and
// scores stay fp32.
struct MoeBlockArgs {
  ConstTensor x;
  MoeBlockWeights weights;
  ConstTensor valid = {};  // (T), bool or uint8, optional: the tokens that are routed; see Route
  RouteOptions route = {};
  std::int64_t top_k = 1;
  float eps = 1e-6f;
  bool weighs_activation = false;
  Tensor out;
  Tensor aux_loss = {};  // (1) fp32, optional; see Route
};

// Gradients of the sum of d_out * out + d_aux_loss * aux_loss, after MoeBlock with the same arguments and state.
struct MoeBlockGradArgs {
  MoeBlockArgs forward;
  ConstTensor d_out;
  float d_aux_loss = 0;
  Tensor d_x;
  MoeBlockGradients gradients = {};
};

// Errors name the argument, its value and the limit. Arguments are checked before any kernel runs, and no output is written
// then. A kernel that fails later (memory, a buffer of a chip, a tuning that does not fit) ends the block: what the state and
// the outputs hold is then unspecified. On an Npu device without data both take the routes of the state's last call on one that
// computes, and their tensors may be without data.
CUBIST_EXPORT Status MoeBlock(const Device& device, const MoeBlockArgs& args, BlockState* state,
                              BlockProfile* profile = nullptr);
CUBIST_EXPORT Status MoeBlockGrad(const Device& device, const MoeBlockGradArgs& args, BlockState* state,
                                  BlockProfile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MOE_BLOCK_H_
