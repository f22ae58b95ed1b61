// An attention problem as the benchmark gives it to a library.
#ifndef CUBIST_BENCH_SUPPORT_ATTENTION_H_
#define CUBIST_BENCH_SUPPORT_ATTENTION_H_

#include <cstdint>

#include "npu_model/types.h"

namespace cubist::bench {

// q (1, heads, sq, dqk), k (1, kv_heads, s, dqk), v (1, kv_heads, s, dv), out like q with dv columns; rope
// parts (1, heads, sq, dr) and (1, 1, s, dr) where dr > 0. All contiguous, of one dtype.
struct Attention {
  DType dtype = DType::kF32;
  bool causal = false;
  std::int64_t heads = 0, kv_heads = 0, sq = 0, s = 0, dqk = 0, dr = 0, dv = 0;
  ConstTensor q = {}, k = {}, v = {}, q_rope = {}, k_rope = {};
  Tensor out = {};
};

// Its backward pass: lse (1, heads, s) in fp32, the others of the forward's dtype; each gradient shaped like what it is
// the gradient of.
struct AttentionGrad {
  Attention forward = {};
  Tensor lse = {};
  ConstTensor dout = {};
  Tensor dq = {}, dk = {}, dv = {}, dq_rope = {}, dk_rope = {};
};

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_ATTENTION_H_
