// Launches the packing of whole operands as a phase before the one that uses them.
#ifndef CUBIST_KERNELS_PACK_H_
#define CUBIST_KERNELS_PACK_H_

#include <algorithm>
#include <utility>

#include "kernels/pack_kernel.h"
#include "npu_model/launch.h"

namespace cubist {

// Tiles of about 64 KiB, whole panels wide where panels are narrow: both the tile and its source stay in a private cache,
// or fill half of L1.
inline PackTiling ChoosePackTiling(const ChipSpec& chip, Role role, DType dtype, std::int64_t rows,
                                   std::int64_t cols, std::int64_t matrices) {
  constexpr std::int64_t kTileBytes = 64 << 10, kTileCols = 256;
  const std::int64_t panel = std::min(chip.PackedStep(role, dtype), kTileCols),
                     element = chip.OperandBytes(dtype);
  PackTiling t;
  t.cols = std::min(RoundUp(cols, panel), RoundUp(kTileCols, panel));
  const std::int64_t step = std::max<std::int64_t>(16, panel);
  t.rows =
      std::min(RoundUp(rows, step), RoundUp(kTileBytes / std::max(t.cols * element, std::int64_t{1}), step));
  t.matrices = matrices;
  t.grid = {CeilDiv(rows, std::max<std::int64_t>(t.rows, 1)),
            CeilDiv(cols, std::max<std::int64_t>(t.cols, 1))};
  return t;
}

// Packs every (rows, cols) matrix of a (b, n, rows, cols) tensor, transposed where asked, one after the other.
template <class T>
void PackInto(Launch& launch, const GmTensor& source, bool transposed, const PackedGm& packed) {
  const PackPart part{&source,
                      {0, source.sizes[2]},
                      packed,
                      ChoosePackTiling(launch.chip(), packed.role, source.dtype, packed.rows, packed.cols,
                                       source.sizes[0] * source.sizes[1])};
  launch.OnAiCores(part.tiling.tasks(), [&](auto& core) { PackKernel<T>(core, {&part, 1}, transposed); });
}

// The same into a workspace of the launch.
template <class T>
PackedGm Pack(Launch& launch, const char* name, Role role, const GmTensor& source, bool transposed = false,
              Role second_role = Role::kRows) {
  std::int64_t rows = source.sizes[2], cols = source.sizes[3];
  if (transposed) std::swap(rows, cols);
  const PackedGm packed =
      launch.Packed(name, role, source.dtype, rows, cols, source.sizes[0] * source.sizes[1], second_role);
  PackInto<T>(launch, source, transposed, packed);
  return packed;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACK_H_
