// SwiGLU, times a probability per row where one is given, forward and backward.
#ifndef CUBIST_KERNELS_SWIGLU_KERNEL_H_
#define CUBIST_KERNELS_SWIGLU_KERNEL_H_

#include <cstdint>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

struct SwiGluOperands {
  Gm gate, up, out;                 // (M, N)
  const GmTensor* probs = nullptr;  // (M, 1)
};

template <class T, VectorCore V>
void SwiGluKernel(V& core, const SwiGluOperands& g, const RowwiseTiling& t) {
  Ring<Buffer::kUB, T> gate_ub(core, "gate_ub", t.rows, t.cols, t.stages, Role::kRelay),
      up_ub(core, "up_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, T> out_ub(core, "out_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> probs_ub(core, "probs_ub", t.rows, 1, t.stages);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range rows : Split(Split(g.out.rows, t.chunk_rows)[c], t.rows)) {
      const UbTile<float> probs = probs_ub.Next(rows.size(), 1);
      if (g.probs != nullptr) core.Load(probs, MatrixOf(*g.probs).Rows(rows));
      for (const Range cols : Split(g.out.cols, t.cols)) {
        const UbTile<T> gate = gate_ub.Next(rows.size(), cols.size()),
                        up = up_ub.Next(rows.size(), cols.size());
        const Gm destination = g.out.Block(rows, cols);
        const UbTile<T> out = out_ub.Next(destination);
        const UbTile<float> s0 = s0_ub.Next(rows.size(), cols.size()),
                            s1 = s1_ub.Next(rows.size(), cols.size());
        core.Load(gate, g.gate.Block(rows, cols));
        core.Load(up, g.up.Block(rows, cols));
        if (g.probs != nullptr) {
          core.SwiGlu(out, s0, s1, gate, up, probs);
        } else {
          core.SwiGlu(out, s0, s1, gate, up);
        }
        core.Store(destination, out);
      }
    }
  }
}

struct SwiGluGradOperands {
  Gm d_out, gate, up, d_gate, d_up;   // (M, N)
  const GmTensor* probs = nullptr;    // (M, 1)
  const GmTensor* d_probs = nullptr;  // (M, 1)
};

// Everything is read once; the sums of d_probs grow over the column parts, in ascending order.
template <class T, VectorCore V>
void SwiGluGradKernel(V& core, const SwiGluGradOperands& g, const RowwiseTiling& t) {
  Ring<Buffer::kUB, T> d_out_ub(core, "d_out_ub", t.rows, t.cols, t.stages, Role::kRelay),
      gate_ub(core, "gate_ub", t.rows, t.cols, t.stages, Role::kRelay),
      up_ub(core, "up_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, T> d_gate_ub(core, "d_gate_ub", t.rows, t.cols, t.stages, Role::kRelay),
      d_up_ub(core, "d_up_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> scratch_ub(core, "scratch_ub", t.rows, t.cols, 4);
  Ring<Buffer::kUB, float> probs_ub(core, "probs_ub", t.rows, 1, t.stages),
      d_probs_ub(core, "d_probs_ub", t.rows, 1, t.stages);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range rows : Split(Split(g.gate.rows, t.chunk_rows)[c], t.rows)) {
      UbTile<float> probs, d_probs;
      if (g.probs != nullptr) core.Load(probs = probs_ub.Next(rows.size(), 1), MatrixOf(*g.probs).Rows(rows));
      if (g.d_probs != nullptr) core.Fill(d_probs = d_probs_ub.Next(rows.size(), 1), 0.0f);
      for (const Range cols : Split(g.gate.cols, t.cols)) {
        const auto tile = [&](auto& ring) { return ring.Next(rows.size(), cols.size()); };
        const UbTile<T> d_out = tile(d_out_ub), gate = tile(gate_ub), up = tile(up_ub);
        const Gm to_gate = g.d_gate.Block(rows, cols), to_up = g.d_up.Block(rows, cols);
        const UbTile<T> d_gate = d_gate_ub.Next(to_gate), d_up = d_up_ub.Next(to_up);
        const UbTile<float> s0 = tile(scratch_ub), s1 = tile(scratch_ub), s2 = tile(scratch_ub),
                            s3 = tile(scratch_ub);
        core.Load(d_out, g.d_out.Block(rows, cols));
        core.Load(gate, g.gate.Block(rows, cols));
        core.Load(up, g.up.Block(rows, cols));
        core.SwiGluGrad(d_gate, d_up, d_probs, s0, s1, s2, s3, d_out, gate, up, probs);
        core.Store(to_gate, d_gate);
        core.Store(to_up, d_up);
      }
      if (g.d_probs != nullptr) core.Store(MatrixOf(*g.d_probs).Rows(rows), d_probs);
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_SWIGLU_KERNEL_H_
