// Gradients of TokenPermute and TokenUnpermute: token_permute.h says what a slot, a row and a window are.
#ifndef CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_H_
#define CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_H_

#include <optional>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// tokens_grad[t] = sum over j of permuted_grad[row of slot (t, j)], j ascending, in fp32, rounded once
// probs_grad(t, j) = permuted_probs_grad[row of slot (t, j)]
//
//   permuted_grad        (M, H)    fp32, bf16 or fp16
//   sorted_indices       (T * K)   int32, as TokenPermute wrote them; a slot of -1 or of no row here adds nothing
//   row_tokens           (M)       int32, with `capacity`, in place of sorted_indices, as for TokenUnpermute:
//                            tokens_grad[row_tokens[r]] += permuted_grad[r], r ascending
//                            probs_grad(row_tokens[r], r / capacity) = permuted_probs_grad[r], of (T, E)
//   permuted_probs_grad  (M)       optional, any float dtype, together with probs_grad
//   tokens_grad          (T, H)    the dtype of permuted_grad
//   routing_map          (T, E)    optional, bool or uint8, as for TokenPermute
//   probs_grad           (T, K)    optional, any float dtype; 0 for slots without a row. (T, E) with a map
//   rows                 optional: the rows of permuted_grad and of row_tokens are [begin, end) of the global order
//                        (expert parallelism); the results of all ranks then add up to the whole. Absent: [0, M)
//
// K is that of sorted_indices over T, `top_k`. Semantics of aclnnMoeTokenPermuteGrad, its WithEp and WithRoutingMap
// forms, without their limit of K <= 512. Sums are in one order by row_tokens too, where pads take part.
struct TokenPermuteGradArgs {
  ConstTensor permuted_grad, sorted_indices = {};
  ConstTensor row_tokens = {};
  std::int64_t capacity = 0;  // With row_tokens alone.
  ConstTensor permuted_probs_grad = {};
  ConstTensor routing_map = {};
  std::int64_t top_k = 1;
  std::optional<Range> rows = {};
  Tensor tokens_grad;
  Tensor probs_grad = {};
};

// permuted_grad[row of slot (t, j)] = probs(t, j) * out_grad[t], in fp32, rounded once; 0 in rows of no slot
// probs_grad(t, j) = sum over h of out_grad(t, h) * (permuted(row of slot (t, j), h) + bias(topk_ids(t, j), h)), in fp32
//
//   out_grad        (T, H)    fp32, bf16 or fp16
//   permuted        (M, H)    the dtype of out_grad; needed for probs_grad alone
//   sorted_indices  (T * K)   int32; no row stands twice; a slot of -1 or of no row here is passed over
//   row_tokens      (M)       int32, with `capacity`, in place of sorted_indices, as for TokenUnpermute; probs and
//                             probs_grad are (T, E) then, 0 for experts without a row of the token
//   probs           (T, K)    optional, any float dtype; absent means weight 1 and K = top_k
//   routing_map     (T, E)    optional, bool or uint8, with probs: they and probs_grad are (T, E) then, and K = top_k
//   bias            (E, H)    optional, the dtype of out_grad, together with topk_ids (T, K) and probs_grad, as for
//                             TokenUnpermute. Its own gradient is the sum of each expert's rows of permuted_grad
//   permuted_grad   (M, H)    the dtype of out_grad
//   probs_grad      (T, K)    optional, any float dtype; 0 for slots without a row
//   rows            as above
//
// out_grad is read once for all K rows. Semantics of aclnnMoeTokenUnpermuteGrad and its WithEp form, which leave rows of
// no slot as they were; here they become zero.
struct TokenUnpermuteGradArgs {
  ConstTensor out_grad;
  ConstTensor permuted = {};
  ConstTensor sorted_indices = {};
  ConstTensor row_tokens = {};
  std::int64_t capacity = 0;  // With row_tokens alone.
  ConstTensor routing_map = {};
  ConstTensor probs = {};
  ConstTensor bias = {}, topk_ids = {};
  std::int64_t top_k = 1;
  std::optional<Range> rows = {};
  Tensor permuted_grad;
  Tensor probs_grad = {};
};

// Errors name the argument, its value and the limit; nothing is written then. Outputs may not overlap anything. On Npu
// devices `profile` is filled.
CUBIST_EXPORT Status TokenPermuteGrad(const Device& device, const TokenPermuteGradArgs& args,
                                      Profile* profile = nullptr);
CUBIST_EXPORT Status TokenUnpermuteGrad(const Device& device, const TokenUnpermuteGradArgs& args,
                                        Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_TOKEN_PERMUTE_GRAD_H_
