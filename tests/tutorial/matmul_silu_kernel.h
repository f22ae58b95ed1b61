// The tutorial's kernel: out = silu(a b + bias), silu(x) = x / (1 + exp(-x)). See kernels/TUTORIAL.md.
#ifndef CUBIST_TESTS_TUTORIAL_MATMUL_SILU_KERNEL_H_
#define CUBIST_TESTS_TUTORIAL_MATMUL_SILU_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/multiply_block_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace tutorial {

using namespace cubist;

// [silu]
// x = silu(x), by four Vector instructions. `s` has the shape of x. exp(-x) may overflow: x / infinity is the limit.
template <VectorCore V>
void Silu(V& core, UbTile<float> x, UbTile<float> s) {
  core.MulScalar(s, x, -1.0f);
  core.Exp(s, s);
  core.AddScalar(s, s, 1.0f);
  core.Div(x, x, s);
}
// [silu]

// [one tile]
// The whole problem in one tile of every buffer, on one core.
template <class T, AiCore Core>
void OneTileKernel(Core& core, const Gm& a, const Gm& b, const Gm& bias, const Gm& out) {
  const std::int64_t m = out.rows, n = out.cols, k = a.cols;
  Ring<Buffer::kL1, T> a_l1(core, "a_l1", m, k, 1, Role::kA), b_l1(core, "b_l1", k, n, 1, Role::kB);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", m, k, 1, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", k, n, 1, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c_l0", m, n, 1);
  Ring<Buffer::kBT, float> bias_bt(core, "bias_bt", 1, n, 1);
  auto& vector = core.vectors()[0];
  Ring<Buffer::kUB, float> x_ub(vector, "x_ub", m, n, 1), s_ub(vector, "s_ub", m, n, 1);

  const auto a1 = a_l1.Next(m, k), b1 = b_l1.Next(k, n);
  core.Load(a1, a);  // MTE2: GM to L1
  core.Load(b1, b);
  const auto row = bias_bt.Next(1, n);
  core.Load(row, bias);
  const auto a0 = a_l0.Next(m, k);
  const auto b0 = b_l0.Next(k, n);
  core.Load(a0, a1);  // MTE1: L1 to L0
  core.Load(b0, b1);
  const auto c = c_l0.Next(m, n);
  core.Mmad(c, a0, b0, row);  // M: c = bias + a b

  const auto x = x_ub.Next(m, n), s = s_ub.Next(m, n);
  vector.Move(x, c);  // Cube to Vector: the route is the chip's affair
  Silu(vector, x, s);
  vector.Store(out, x);  // V narrows to the type of `out`, MTE3: UB to GM
}
// [one tile]

// [kernel]
struct MatmulSiluTiling {
  MatmulTiling product;    // Blocks of the result, and how the Cube core walks k.
  std::int64_t strip = 0;  // Rows that a Vector core takes at a time.

  friend bool operator==(const MatmulSiluTiling&, const MatmulSiluTiling&) = default;
};

// One product: (M, K), (K, N), (N), (M, N).
struct MatmulSiluOperands {
  Gm a, b, bias, c;

  MatmulBlock Block(Range m, Range n) const {
    return {{a.Rows(m), {}, false}, {b.Cols(n), {}, false}, bias.Cols(n), m.size(), n.size(), a.cols};
  }
};

// Blocks of the result are dealt to the cores. The Cube core leaves a block in L0C; its Vector cores share the rows of
// the block and take them in strips, so that UB holds a strip however tall the block is.
template <class T, AiCore Core>
void MatmulSiluKernel(Core& core, const MatmulSiluOperands& g, const MatmulSiluTiling& t) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  struct Lane {
    Lane(Vector& core, const MatmulSiluTiling& t)
        : core(core),
          x_ub(core, "x_ub", t.strip, t.product.n, 2),
          s_ub(core, "s_ub", t.strip, t.product.n, 1) {}
    Vector& core;
    Ring<Buffer::kUB, float> x_ub, s_ub;
  };
  MatmulRings<T> rings(core, t.product, true, g.a.cols);
  std::vector<Lane> lanes;
  lanes.reserve(core.vectors().size());
  for (Vector& vector : core.vectors()) lanes.emplace_back(vector, t);
  const auto lane_count = static_cast<std::int64_t>(lanes.size());

  for (const BlockCoord block : MyBlocks(t.product.grid, core)) {
    const Range m = Split(g.c.rows, t.product.m)[block.row], n = Split(g.c.cols, t.product.n)[block.col];
    MultiplyBlock(core, rings, g.Block(m, n), t.product, [&](L0CTile<float> part, Range cols) {
      const Split lane_rows(m.size(), CeilDiv(m.size(), lane_count));
      for (std::int64_t i = 0; i < lane_rows.count(); ++i) {
        Lane& lane = lanes[static_cast<std::size_t>(i)];
        for (const Range rows : Split(lane_rows[i], t.strip)) {
          const auto x = lane.x_ub.Next(rows.size(), cols.size()),
                     s = lane.s_ub.Next(rows.size(), cols.size());
          lane.core.Move(x, part.Rows(rows));
          Silu(lane.core, x, s);
          lane.core.Store(g.c.Block(m, n).Block(rows, cols), x);
        }
      }
    });
  }
}
// [kernel]

}  // namespace tutorial

#endif  // CUBIST_TESTS_TUTORIAL_MATMUL_SILU_KERNEL_H_
