// Bodies of the Vector instructions that only attention needs: the third table beside those of tile_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_
#define CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_

#include <cstdint>

#include "npu_model/host/tile_ops.h"

namespace cubist {

struct AttentionOps {
  // x(i, j) = value unless lowest <= j - i <= highest. Touches no other element.
  void (*mask_outside)(const Rows& x, std::int64_t lowest, std::int64_t highest, float value);
  // x(i, j) = value where flags(i, j), bytes, is not 0; x of any float type.
  void (*mask_where)(DType type, const Rows& x, const Rows& flags, float value);
  // x(i, j) = |first + i - j|
  void (*distances)(const Rows& x, std::int64_t first);
  // s(i, j) = s(i, j) * scale - slope * |first + i - j|, or with its square root.
  void (*add_alibi)(const Rows& s, float scale, float slope, std::int64_t first, bool root);
  // flags(i, j), a byte, = IsDropped(stream, row + i, key + j); transposed (row + j, key + i). See philox.h.
  void (*drop_flags)(const Rows& flags, const DropoutStream& stream, std::int64_t row, std::int64_t key);
  void (*drop_flags_transposed)(const Rows& flags, const DropoutStream& stream, std::int64_t row,
                                std::int64_t key);
};

// The table of the best target that the CPU has (or that hwy::SetSupportedTargetsForTest left). Cheap, not cached.
const AttentionOps& BestAttentionOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_ATTENTION_OPS_H_
