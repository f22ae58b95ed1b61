// This library's attention, called as kernels without its ideas have to be: the ablation of `cubist ablate flash_attention`
// on the host. There stages do not overlap, so that its last step, tight stages, has no counterpart.
#ifndef CUBIST_BENCH_SUPPORT_SQUARE_ATTENTION_H_
#define CUBIST_BENCH_SUPPORT_SQUARE_ATTENTION_H_

#include <functional>

#include "bench/support/attention.h"
#include "npu_model/status.h"

namespace cubist::bench {

// What is done in memory beside the kernel.
enum class Detour {
  kJoined,  // Rope columns joined to those of Q and K, gradients cut apart again.
  kPadded,  // And V, out and dout padded to their width by zeros, what comes out sliced.
};

// One call; rope columns have to be there.
std::function<Status()> SquareAttention(const Attention& attention, Detour detour, int threads);
std::function<Status()> SquareAttentionGrad(const AttentionGrad& grad, Detour detour, int threads);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_SQUARE_ATTENTION_H_
