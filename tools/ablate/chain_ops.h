// The small operators that conventional chains are made of, on the model: each one launch that reads and writes GM. They
// stand for a framework's own, and are written as well as those can be: whole rows, double-buffered, on all Vector cores.
#ifndef CUBIST_TOOLS_ABLATE_CHAIN_OPS_H_
#define CUBIST_TOOLS_ABLATE_CHAIN_OPS_H_

#include <cstdint>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"

namespace cubist {

// All tensors of these calls are without data; rows are bf16 unless said otherwise. Each appends its profile.

// out (rows, sum of cols) = the parts side by side. A part of fewer rows than the output repeats. concat, pad, slice.
struct JoinPart {
  std::int64_t rows = 0, cols = 0;
};
Status JoinColumns(const Device& device, std::int64_t rows, const std::vector<JoinPart>& parts,
                   Profile* profile);
// The columns of a (rows, from) matrix that a slice keeps.
Status SliceColumns(const Device& device, std::int64_t rows, std::int64_t from, std::int64_t cols,
                    Profile* profile);
// Rotary positions of (heads, length, cols) rows, pairs in halves, by cosines and sines in fp32; `back` turns gradients.
Status RotateRows(const Device& device, std::int64_t heads, std::int64_t length, std::int64_t cols, bool back,
                  Profile* profile);
// out row i = src row places[i]: index_select, index_copy.
Status GatherRows(const Device& device, std::int64_t src_rows, std::int64_t cols,
                  const std::vector<std::int32_t>& places, Profile* profile);
// int32 to int32, one by one: a slice or a division of indices.
Status MapIndices(const Device& device, std::int64_t count, Profile* profile);
// fp32 out (rows, cols) = bf16 x times an fp32 factor per row.
Status ScaleRows(const Device& device, std::int64_t rows, std::int64_t cols, Profile* profile);
// fp32 out (rows, cols) = sum of `terms` fp32 rows that follow each other.
Status SumRows(const Device& device, std::int64_t rows, std::int64_t terms, std::int64_t cols,
               Profile* profile);
// bf16 out = fp32 x.
Status NarrowRows(const Device& device, std::int64_t rows, std::int64_t cols, Profile* profile);

}  // namespace cubist

#endif  // CUBIST_TOOLS_ABLATE_CHAIN_OPS_H_
