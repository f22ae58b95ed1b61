// SIMD bodies of what moves rows with a weight: one table per Highway target, like those of tile_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_MOVEMENT_OPS_H_
#define CUBIST_NPU_MODEL_HOST_MOVEMENT_OPS_H_

#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

// Rows of elements of `dtype`, each with its weight, and what comes after them: lines are asked for some way ahead, and
// towards the rows' end the first ones of the `upcoming`.
struct WeightedRows {
  DType dtype = DType::kF32;
  const void* const* rows = nullptr;
  const float* weights = nullptr;
  std::int64_t count = 0;
  const void* const* upcoming = nullptr;
  std::int64_t upcoming_count = 0;
};

struct MovementOps {
  // The dot product of x (n) and row (n) of `dtype`, in an order that depends on n and the SIMD target alone.
  float (*dot)(const float* x, const void* row, DType dtype, std::int64_t n);
  // dst[i] (n) = weights[i] * x (n), and sums[i] = the dot product of x and rows[i] (n), of the same bits as `dot`'s; x, dst
  // and rows are of one dtype, and either may be null for an i. With `stream`, by non-temporal stores for all but the
  // unaligned ends.
  void (*scale_dots)(void* const* dst, float* sums, const void* x, std::int64_t n, const WeightedRows& rows,
                     bool stream);
  // acc (n) (+)= sum over i ascending of weights[i] * rows[i] (n).
  void (*weighted_sum)(float* acc, std::int64_t n, const WeightedRows& rows, bool accumulate);
  // The sum alone, rounded to the rows' dtype, by non-temporal stores for all but the unaligned ends of out (n). `sum` is
  // room for n floats, for more rows than one pass adds.
  void (*stream_weighted_sum)(void* out, float* sum, std::int64_t n, const WeightedRows& rows);
  // dst[i] = `bytes` bytes of src, by non-temporal stores for all but the unaligned ends, while those at `next`, unless
  // null, are fetched.
  void (*copy_rows)(void* const* dst, std::int64_t count, const void* src, std::int64_t bytes,
                    const void* next);
};

const MovementOps& BestMovementOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_MOVEMENT_OPS_H_
