// Launches the packing of whole operands as a phase before the one that uses them.
#ifndef CUBIST_KERNELS_PACK_H_
#define CUBIST_KERNELS_PACK_H_

#include <cstdint>
#include <cstdlib>
#include <utility>

#include "kernels/pack_kernel.h"
#include "npu_model/launch.h"

namespace cubist {

// How a matrix of so many `rows` and `cols` is cut that is a part of `source`'s, or of their transposes.
inline PackTiling PackTilingOf(const Launch& launch, const GmTensor& source, bool transposed, Role role,
                               std::int64_t rows, std::int64_t cols) {
  const std::int64_t from_row = std::abs(source.strides[transposed ? 3 : 2]),
                     from_col = std::abs(source.strides[transposed ? 2 : 3]);
  return ChoosePackTiling(launch.chip(), role, source.dtype, rows, cols, source.matrices(),
                          /*by_columns=*/from_row < from_col);
}

// All rows of a tensor.
inline PackPart WholePart(const Launch& launch, const GmTensor& source, bool transposed,
                          const PackedGm& packed) {
  return {&source,
          {0, source.sizes[2]},
          transposed,
          packed,
          PackTilingOf(launch, source, transposed, packed.role, packed.rows, packed.cols)};
}

// Packs every (rows, cols) matrix of a (.., rows, cols) tensor, transposed where asked, one after the other.
template <class T>
void PackInto(Launch& launch, const GmTensor& source, bool transposed, const PackedGm& packed) {
  const PackPart part = WholePart(launch, source, transposed, packed);
  launch.OnAiCores(part.tiling.tasks(), [&](auto& core) { PackKernel<T>(core, {&part, 1}); });
}

// The same into a workspace of the launch.
template <class T>
PackedGm Pack(Launch& launch, const char* name, Role role, const GmTensor& source, bool transposed = false,
              Role second_role = Role::kRows) {
  std::int64_t rows = source.sizes[2], cols = source.sizes[3];
  if (transposed) std::swap(rows, cols);
  const PackedGm packed = launch.Packed(name, role, source.dtype, rows, cols, source.matrices(), second_role);
  PackInto<T>(launch, source, transposed, packed);
  return packed;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACK_H_
