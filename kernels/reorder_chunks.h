// ReorderChunks: rows that arrived from several ranks, each sorted by expert, sorted by expert over all; and back.
#ifndef CUBIST_KERNELS_REORDER_CHUNKS_H_
#define CUBIST_KERNELS_REORDER_CHUNKS_H_

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Chunk (n, e) is the rows from rank n for expert e, adjacent in either order of chunks:
//   rank-major    (0, 0) (0, 1) .. (0, E - 1) (1, 0) ..
//   expert-major  (0, 0) (1, 0) .. (N - 1, 0) (0, 1) ..
// out holds the chunks of tokens in expert-major order, which were rank-major; the other way round where `inverse`. The
// inverse is also the gradient.
//
//   tokens         (A, H)   fp32, bf16 or fp16
//   chunk_counts   (N, E)   int32 or int64, 0 or more: rows of each chunk, A in all
//   probs          (A)      optional, any float dtype, together with out_probs: a number that goes with each row
//   out            (A, H)   the dtype of tokens
//   out_probs      (A)      optional, any float dtype
//   row_ids        (A)      optional, int32: the row of tokens that each row of out was
//   expert_counts  (E)      optional, int32: rows of each expert
//
// Movement only: rows arrive bit for bit, those of a chunk together. Semantics of aclnnMoeReRouting and its inverse, any
// A < 2^31, H, N, E >= 0. Outputs may not overlap anything.
struct ReorderChunksArgs {
  ConstTensor tokens, chunk_counts;
  ConstTensor probs = {};
  bool inverse = false;
  Tensor out;
  Tensor out_probs = {};
  Tensor row_ids = {};
  Tensor expert_counts = {};
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status ReorderChunks(const Device& device, const ReorderChunksArgs& args,
                                   Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_REORDER_CHUNKS_H_
