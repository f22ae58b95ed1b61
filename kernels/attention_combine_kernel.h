// Combines the outputs of attention over parts of the keys.
#ifndef CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_
#define CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_

#include <cstdint>
#include <limits>

#include "npu_model/core.h"
#include "npu_model/tile.h"

namespace cubist {

inline constexpr std::int64_t kCombineRows = 16;

// With m = max over parts p of lse(p), in the order of the parts:
//   w(p) = exp(lse(p) - m);  out = sum of w(p) o(p) / sum of w(p);  lse = m + ln(sum of w(p))
// part_out (parts, b * n, s, d) and part_lse (parts, b * n, s, 1) are fp32; lse may be null. Rows without keys have
// lse(p) = -inf in every part, and give out = 0 and lse = -inf.
template <VectorCore V>
void AttentionCombineKernel(V& core, const GmTensor& part_out, const GmTensor& part_lse, const GmTensor& out,
                            const GmTensor* lse) {
  const std::int64_t parts = part_out.sizes[0], heads = out.sizes[1], d = part_out.sizes[3];
  Ring<Buffer::kUB, float> m_ub(core, "m_ub", kCombineRows, 1, 2), w_ub(core, "w_ub", kCombineRows, 1, 2),
      sum_ub(core, "sum_ub", kCombineRows, 1, 2), part_ub(core, "part_ub", kCombineRows, d, 2),
      out_ub(core, "out_ub", kCombineRows, d, 2);
  const Split blocks(part_out.sizes[2], kCombineRows);
  for (std::int64_t task = core.index(); task < part_out.sizes[1] * blocks.count(); task += core.count()) {
    const std::int64_t head = task / blocks.count();
    const Range rows = blocks[task % blocks.count()];
    const UbTile<float> m = m_ub.Next(rows.size(), 1), sum = sum_ub.Next(rows.size(), 1);
    const UbTile<float> o = out_ub.Next(rows.size(), d);
    core.Fill(m, std::numeric_limits<float>::lowest());
    core.Fill(sum, 0.0f);
    core.Fill(o, 0.0f);
    for (std::int64_t p = 0; p < parts; ++p) {
      const UbTile<float> w = w_ub.Next(rows.size(), 1);
      core.Load(w, MatrixOf(part_lse, p, head).Rows(rows));
      core.Max(m, m, w);
    }
    for (std::int64_t p = 0; p < parts; ++p) {
      const UbTile<float> w = w_ub.Next(rows.size(), 1), x = part_ub.Next(rows.size(), d);
      core.Load(w, MatrixOf(part_lse, p, head).Rows(rows));
      core.Load(x, MatrixOf(part_out, p, head).Rows(rows));
      core.Sub(w, w, m);
      core.Exp(w, w);
      core.Add(sum, sum, w);
      core.Mul(x, x, w);
      core.Add(o, o, x);
    }
    const std::int64_t b = head / heads, n = head % heads;
    if (lse != nullptr) {
      const UbTile<float> w = w_ub.Next(rows.size(), 1);
      core.Ln(w, sum);
      core.Add(w, w, m);
      core.Store(MatrixOf(*lse, b, n).Rows(rows), w);
    }
    core.MaxScalar(sum, sum, std::numeric_limits<float>::min());
    core.Div(o, o, sum);
    core.Store(MatrixOf(out, b, n).Rows(rows), o);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_
