// OrderCost: what a block order costs in memory. Cores that run together share rows and columns of blocks: they queue
// for the same lines, and wait for what L2 does not hold yet.
#ifndef CUBIST_TILING_ORDER_COST_H_
#define CUBIST_TILING_ORDER_COST_H_

#include <cstdint>
#include <vector>

#include "tiling/block_order.h"

namespace cubist {

// The blocks that cores work on at one time.
struct Wave {
  double blocks = 0;  // at most as many as there are cores
  // Whether the rows of A, or the columns of B, of the core that ends last come from HBM; a share of them.
  double cold_rows = 0, cold_cols = 0;
  double fetched = 0;  // bytes that come from there
  double times = 1;    // for how many waves it stands
  bool last_row = true,
       last_col = true;  // All its blocks are in the last row or column, which may be narrower.
};

struct OrderCost {
  std::vector<Wave> waves;
  // Of the core that ends last, the share of blocks that are in the same row as the one before.
  double stands = 0;
  // How many other cores are in front of one that reads a line of A or B, on average.
  double sharers_a = 0, sharers_b = 0;
};

// Of a walk by `cores`, in which a row of blocks reads `row_bytes` of A, a column `col_bytes` of B, and each block
// writes `block_bytes`, behind an L2 of `l2_bytes` that holds none of it at first.
struct OrderShape {
  BlockGrid grid;
  CoreTasks::Deal deal = CoreTasks::Deal::kTurns;
  std::int64_t cores = 1, row_bytes = 0, col_bytes = 0, block_bytes = 0, l2_bytes = 0;

  friend bool operator==(const OrderShape&, const OrderShape&) = default;
};

// Remembers its last answers: tilings that differ in their buffers alone have one order.
const OrderCost& CostOfOrder(const OrderShape& shape);

}  // namespace cubist

#endif  // CUBIST_TILING_ORDER_COST_H_
