// Closed-form costs of instructions and of their overlap, from a chip table alone.
// Every tiling's price is a sum of these.
#ifndef CUBIST_TILING_COST_H_
#define CUBIST_TILING_COST_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/line_slots.h"

namespace cubist {

// Cycles of one Mmad of (m, k, n) among others.
inline double MmadCycles(const ChipSpec& chip, DType dtype, std::int64_t m, std::int64_t k, std::int64_t n) {
  const std::int64_t bytes = chip.OperandBytes(dtype);
  const std::int64_t steps =
      CeilDiv(m, chip.RowStep(dtype)) * CeilDiv(k, chip.mmad.k_bytes / bytes) * CeilDiv(n, chip.mmad.n_step);
  return chip.mmad.head_busy +
         static_cast<double>(steps) * (bytes == 4 ? chip.mmad.fp32_passes : chip.mmad.narrow_passes);
}

// Cycles to move `bytes` over a path in `transfers` instructions.
inline double PathCycles(const ChipSpec& chip, Path path, double bytes, double transfers) {
  const PathSpec& spec = chip.path(path);
  return transfers * spec.startup + bytes / spec.bytes_per_cycle;
}

// Bytes per cycle that one core gets from GM when `cores` load together: its port, or its share of L2. To L1 L2 gives
// less than to UB.
inline double LoadRate(const ChipSpec& chip, Path path, double cores) {
  const ChipSpec::Memory& memory = chip.memory;
  const bool to_l1 = path == Path::kGmToL1 || path == Path::kGmToL1Nd2Nz;
  const double l2 = to_l1 ? std::min<double>(memory.l2_read_bytes_per_s, memory.cube_read_bytes_per_s)
                          : static_cast<double>(memory.l2_read_bytes_per_s);
  const double share = l2 / chip.clock_hz / cores;
  return std::min({static_cast<double>(chip.path(path).bytes_per_cycle),
                   static_cast<double>(chip.memory.core_read_bytes_per_cycle), share});
}

// Bytes through a core's port for `rows` rows of `row` bytes, `stride` apart in GM: whole slots of lines, where rows are
// short or askew.
inline double SlotBytes(const ChipSpec& chip, double rows, std::int64_t row, std::int64_t stride) {
  if (row <= 0) return 0;
  if (row == stride) return rows * static_cast<double>(row);
  constexpr std::int64_t kSamples = 16;  // rows, at the beginning of the first pieces
  const int shift = std::countr_zero(static_cast<std::uint64_t>(chip.memory.l2_line));
  std::int64_t slots = 0;
  for (std::int64_t i = 0; i < kSamples; ++i) slots += LineSlots(i * stride + i % 4 * row, row, shift);
  return rows * static_cast<double>(slots) / static_cast<double>(kSamples) *
         static_cast<double>(chip.memory.l2_line);
}

// Cycles of a Vector instruction over `elements` floats.
CUBIST_EXPORT double VectorCycles(const ChipSpec& chip, VectorOp op, double elements);

// Cycles of a block whose pipes are busy that long: side by side the slowest counts,
// one after the other their sum.
inline double Overlap(const ChipSpec& chip, bool buffered, std::initializer_list<double> pipes) {
  double sum = 0, slowest = 0;
  for (double cycles : pipes) sum += cycles, slowest = std::max(slowest, cycles);
  return chip.pipes_overlap && buffered ? slowest : sum;
}

// How many blocks the busiest core works on, counting half a block for cores that do
// not start and end together.
inline double Waves(const ChipSpec& chip, std::int64_t blocks) {
  return static_cast<double>(CeilDiv(blocks, chip.concurrent_cores)) +
         (blocks > chip.concurrent_cores ? 0.5 : 0.0);
}

// Keys of a run that MrgSort takes, at most; and of one that is whole blocks.
inline constexpr std::int64_t kMergedRun = 4095, kMergedBlocks = kMergedRun / kBlockWords * kBlockWords;

// `sizes` as multiples of `step`, none larger than what covers `extent`; ascending, without repeats.
inline std::vector<std::int64_t> TileSizes(std::initializer_list<std::int64_t> sizes, std::int64_t step,
                                           std::int64_t extent) {
  const std::int64_t cover = std::max(RoundUp(extent, step), step);
  std::vector<std::int64_t> tiles;
  for (std::int64_t size : sizes) {
    const std::int64_t tile = std::min(std::max(size / step, std::int64_t{1}) * step, cover);
    if (tiles.empty() || tile > tiles.back()) tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace cubist

#endif  // CUBIST_TILING_COST_H_
