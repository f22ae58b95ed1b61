// Launches the packing of attention's operands: whole tensors, or sequence by sequence.
#ifndef CUBIST_KERNELS_ATTENTION_PACK_H_
#define CUBIST_KERNELS_ATTENTION_PACK_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pack.h"
#include "npu_model/launch.h"
#include "tiling/attention_band.h"

namespace cubist {

// Rows of a batch entry that are packed by themselves, from `packed_begin` on, a multiple of the layout's panel.
struct PackedRows {
  Range rows;
  std::int64_t packed_begin = 0;
};

// Packs the (s, d) matrices of every batch entry of `source` for all of its heads; where `parts` is not empty, those
// rows alone, of every entry.
template <class T>
PackedGm PackSequences(Launch& launch, const char* name, const GmTensor& source, bool transposed,
                       Role second_role, const std::vector<PackedRows>& parts, std::int64_t step) {
  if (parts.empty()) return Pack<T>(launch, name, Role::kB, source, transposed, second_role);
  std::int64_t rows = 0;
  for (const PackedRows& p : parts) rows = std::max(rows, p.packed_begin + RoundUp(p.rows.size(), step));
  const std::int64_t d = source.sizes[3], matrices = source.sizes[0] * source.sizes[1];
  const PackedGm packed = launch.Packed(name, Role::kB, source.dtype, transposed ? d : rows,
                                        transposed ? rows : d, matrices, second_role);
  std::vector<PackPart> list;
  std::int64_t tasks = 0;
  for (const PackedRows& p : parts) {
    const Range at{p.packed_begin, p.packed_begin + p.rows.size()};
    const PackedGm block = transposed ? packed.Block({0, d}, at) : packed.Block(at, {0, d});
    list.push_back({&source, p.rows, block,
                    PackTilingOf(launch, source, transposed, packed.role, block.row_part.size(),
                                 block.col_part.size())});
    tasks += list.back().tiling.tasks();
  }
  launch.OnAiCores(tasks,
                   [&](auto& core) { PackKernel<T>(core, std::span<const PackPart>(list), transposed); });
  return packed;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_PACK_H_
