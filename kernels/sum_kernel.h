// Sums of matrices, for residual streams and branches that meet again.
#ifndef CUBIST_KERNELS_SUM_KERNEL_H_
#define CUBIST_KERNELS_SUM_KERNEL_H_

#include <array>
#include <cstdint>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

struct SumOperands {
  std::array<const GmTensor*, 3> terms{};  // (T, H); those that are null do not count.
  Gm out;
};

// out = the terms' sum, from the first to the last, in fp32, rounded once.
template <VectorCore V>
void SumKernel(V& core, const SumOperands& g, const RowwiseTiling& t) {
  Ring<Buffer::kUB, float> sum_ub(core, "sum_ub", t.rows, t.cols, t.stages),
      term_ub(core, "term_ub", t.rows, t.cols, t.stages);
  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range rows : Split(Split(g.out.rows, t.chunk_rows)[c], t.rows)) {
      for (const Range cols : Split(g.out.cols, t.cols)) {
        const UbTile<float> sum = sum_ub.Next(rows.size(), cols.size());
        core.Load(sum, MatrixOf(*g.terms[0]).Block(rows, cols));
        for (std::size_t i = 1; i < g.terms.size(); ++i) {
          if (g.terms[i] == nullptr) continue;
          const UbTile<float> term = term_ub.Next(rows.size(), cols.size());
          core.Load(term, MatrixOf(*g.terms[i]).Block(rows, cols));
          core.Add(sum, sum, term);
        }
        core.Store(g.out.Block(rows, cols), sum);
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_SUM_KERNEL_H_
