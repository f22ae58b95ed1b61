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

// Rows of a batch entry that are packed by themselves, from `packed_begin` on, a multiple of ChipSpec::PackedBlockStep.
struct PackedRows {
  Range rows;
  std::int64_t packed_begin = 0;
};

// The packing of several tensors of T by one phase, their right operands' second role the same.
template <class T>
class SequencePacker {
 public:
  // Of every batch entry those rows alone that `rows` has, where it is not empty; `step` as in PackedRows.
  SequencePacker(Launch& launch, Role second_role, const std::vector<PackedRows>& rows, std::int64_t step)
      : launch_(launch), second_role_(second_role), rows_(rows), step_(step) {}

  // The (s, d) matrices of every batch entry of `source` for all of its heads: where Run will have packed them.
  PackedGm Add(const char* name, const GmTensor& source, bool transposed) {
    const std::int64_t d = source.sizes[3], matrices = source.sizes[0] * source.sizes[1];
    std::int64_t s = rows_.empty() ? source.sizes[2] : 0;
    for (const PackedRows& p : rows_) s = std::max(s, p.packed_begin + RoundUp(p.rows.size(), step_));
    const PackedGm packed = launch_.Packed(name, Role::kB, source.dtype, transposed ? d : s,
                                           transposed ? s : d, matrices, second_role_);
    if (rows_.empty()) parts_.push_back(WholePart(launch_, source, transposed, packed));
    for (const PackedRows& p : rows_) {
      const Range at{p.packed_begin, p.packed_begin + p.rows.size()};
      const PackedGm block = transposed ? packed.Block({0, d}, at) : packed.Block(at, {0, d});
      parts_.push_back({&source, p.rows, transposed, block,
                        PackTilingOf(launch_, source, transposed, packed.role, block.row_part.size(),
                                     block.col_part.size())});
    }
    return packed;
  }

  void Run() {
    std::int64_t tasks = 0;
    for (const PackPart& part : parts_) tasks += part.tiling.tasks();
    launch_.OnAiCores(tasks, [&](auto& core) { PackKernel<T>(core, std::span<const PackPart>(parts_)); });
  }

 private:
  Launch& launch_;
  Role second_role_;
  const std::vector<PackedRows>& rows_;
  std::int64_t step_;
  std::vector<PackPart> parts_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_PACK_H_
