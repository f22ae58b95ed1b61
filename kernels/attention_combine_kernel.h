// Combines the outputs of attention over parts of the keys.
#ifndef CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_
#define CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/flash_attention_lane_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_steps.h"

namespace cubist {

inline constexpr std::int64_t kCombineRows = 16;

// Rows of a sequence's outputs whose parts a task puts together.
struct PartsToCombine {
  std::int64_t sequence = 0, head = 0;
  Range rows;
};

// With m = max over parts p of lse(p), in the order of the parts:
//   w(p) = exp(lse(p) - m);  out = sum of w(p) o(p) / sum of w(p);  lse = m + ln(sum of w(p))
// g.part_out (1, head, rows of parts, d) and g.part_lse (.., 1) are fp32; g.lse may be null. Rows without keys have
// lse(p) = -inf in every part, and give out = 0 and lse = -inf.
template <VectorCore V>
void AttentionCombineKernel(V& core, const FlashAttentionOperands& g, const FlashAttentionSchedule& schedule,
                            std::span<const PartsToCombine> blocks) {
  const std::int64_t d = g.part_out->sizes[3];
  Ring<Buffer::kUB, float> m_ub(core, "m_ub", kCombineRows, 1, 2), w_ub(core, "w_ub", kCombineRows, 1, 2),
      sum_ub(core, "sum_ub", kCombineRows, 1, 2), part_ub(core, "part_ub", kCombineRows, d, 2),
      out_ub(core, "out_ub", kCombineRows, d, 2);
  for (auto task = static_cast<std::size_t>(core.index()); task < blocks.size();
       task += static_cast<std::size_t>(core.count())) {
    const std::int64_t i = blocks[task].sequence, head = blocks[task].head;
    const Range rows = blocks[task].rows;
    const std::int64_t parts = schedule.PartsOf(i);
    const UbTile<float> m = m_ub.Next(rows.size(), 1), sum = sum_ub.Next(rows.size(), 1);
    const UbTile<float> o = out_ub.Next(rows.size(), d);
    core.Fill(m, std::numeric_limits<float>::lowest());
    core.Fill(sum, 0.0f);
    core.Fill(o, 0.0f);
    for (std::int64_t p = 0; p < parts; ++p) {
      const UbTile<float> w = w_ub.Next(rows.size(), 1);
      core.Load(w, MatrixOf(*g.part_lse, 0, head).Rows(rows.From(-schedule.PartRow(i, p))));
      core.Max(m, m, w);
    }
    for (std::int64_t p = 0; p < parts; ++p) {
      const Range at = rows.From(-schedule.PartRow(i, p));
      const UbTile<float> w = w_ub.Next(rows.size(), 1), x = part_ub.Next(rows.size(), d);
      core.Load(w, MatrixOf(*g.part_lse, 0, head).Rows(at));
      core.Load(x, MatrixOf(*g.part_out, 0, head).Rows(at));
      core.Sub(w, w, m);
      core.Exp(w, w);
      core.Add(sum, sum, w);
      core.Mul(x, x, w);
      core.Add(o, o, x);
    }
    const AttentionSequence sequence = schedule.Sequence(i);
    const auto store = [&](const GmTensor& to, UbTile<float> x) {
      ForEachRun(sequence, head, rows, [&](const QueryRun& run) {
        core.Store(run.Of(to, sequence.batch, sequence.q_begin), x.Rows(run.part));
      });
    };
    if (g.lse != nullptr) {
      const UbTile<float> w = w_ub.Next(rows.size(), 1);
      core.Ln(w, sum);
      core.Add(w, w, m);
      store(*g.lse, w);
    }
    core.Fill(m, 1.0f);
    DivideRows(core, o, sum, m);
    store(*g.out, o);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_COMBINE_KERNEL_H_
