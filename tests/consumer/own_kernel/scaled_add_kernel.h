// A kernel that Cubist does not have: out = alpha * x + y. Written against the machine, as Cubist's own are.
#ifndef OWN_SCALED_ADD_KERNEL_H_
#define OWN_SCALED_ADD_KERNEL_H_

#include <cstdint>

#include "cubist/machine.h"

namespace own {

struct ScaledAddTiling {
  std::int64_t rows = 1;   // of a tile
  int stages = 1;          // tiles of x, y and out in UB at once
  std::int64_t tiles = 0;  // follows from the rows
  friend bool operator==(const ScaledAddTiling&, const ScaledAddTiling&) = default;
};

struct ScaledAddOperands {
  cubist::Gm x, y, out;
  float alpha = 1;
};

template <class T, cubist::VectorCore Core>
void ScaledAddKernel(Core& core, const ScaledAddOperands& g, const ScaledAddTiling& t) {
  using cubist::Buffer, cubist::Range, cubist::Ring, cubist::UbTile;
  const std::int64_t cols = g.x.cols;
  Ring<Buffer::kUB, float> x_ub(core, "x_ub", t.rows, cols, t.stages),
      y_ub(core, "y_ub", t.rows, cols, t.stages);
  Ring<Buffer::kUB, T> out_ub(core, "out_ub", t.rows, cols, t.stages);
  for (std::int64_t tile = core.index(); tile < t.tiles; tile += core.count()) {
    const Range rows = cubist::Split(g.x.rows, t.rows)[tile];
    const UbTile<float> x = x_ub.Next(rows.size(), cols), y = y_ub.Next(rows.size(), cols);
    const UbTile<T> out = out_ub.Next(rows.size(), cols);
    core.Load(x, g.x.Rows(rows));
    core.Load(y, g.y.Rows(rows));
    core.MulScalar(x, x, g.alpha);
    core.Add(y, x, y);
    core.Cast(out, y);
    core.Store(g.out.Rows(rows), out);
  }
}

}  // namespace own

#endif  // OWN_SCALED_ADD_KERNEL_H_
