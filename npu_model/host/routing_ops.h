// Bodies of the router's instructions of core.h: what tile_ops.h is to the other instructions.
#ifndef CUBIST_NPU_MODEL_HOST_ROUTING_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ROUTING_OPS_H_

#include <cstdint>

#include "npu_model/host/tile_ops.h"

namespace cubist {

// Operands of RoutingOps::grouped_top_k, as GroupedTopKTiles names them. No bias: null data. What is scratch there may stay
// as it is.
struct GroupedTopKRows {
  Rows values, ids, a, bias;
  Rows choice, worths, best, kept;
};

// A matrix of floats, or of int32 where it is called ids.
struct RoutingOps {
  // dst = key <= limit ? a : b; b of the same shape or (r, 1).
  void (*select_le)(const Rows& dst, const Rows& key, float limit, const Rows& a, const Rows& b);
  // The values.cols highest of each row of a, descending; of equals the lower column first. NaN counts as -inf.
  void (*top_k)(const Rows& values, const Rows& ids, const Rows& a);
  // sums(i, g) = sum of the `count` highest elements of part g of row i; -inf does not count beside others.
  void (*group_top)(const Rows& sums, const Rows& a, std::int64_t count);
  // -inf in a outside the parts of group_cols columns that a row of ids names.
  void (*keep_groups)(const Rows& a, const Rows& ids, std::int64_t group_cols);
  // ExpandGroupedTopK.
  void (*grouped_top_k)(const GroupedTopKRows& operands, std::int64_t summed);
  // Whether all of x is within +-limit. NaN is not.
  bool (*all_within)(const Rows& x, float limit);
  // ExpandRepair; bad is (r, 1).
  void (*repair)(const Rows& x, const Rows& bad, float limit, bool by_mean);
};

// The table of the best target that the CPU has; see BestVectorOps.
const RoutingOps& BestRoutingOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ROUTING_OPS_H_
