// How an operand is cut into tiles to be packed whole, and what that takes.
#ifndef CUBIST_TILING_PACK_TILING_H_
#define CUBIST_TILING_PACK_TILING_H_

#include <algorithm>
#include <cstdint>

#include "npu_model/chip.h"
#include "tiling/block_order.h"
#include "tiling/cost.h"

namespace cubist {

// Every matrix is cut into tiles of (rows, cols), which begin at multiples of any host's panel along both: the transpose may be
// packed as well.
struct PackTiling {
  std::int64_t rows = 0, cols = 0;
  std::int64_t matrices = 0;
  BlockGrid grid;  // Of one matrix.

  std::int64_t tasks() const { return matrices * grid.count(); }
};

// Tiles of about 64 KiB, whole panels wide where panels are narrow: both the tile and its source stay in a private cache,
// or fill half of L1. On an NPU a small operand is cut finer, that all cores have a part, into no less than takes as long as
// it waits for its startups. A host reads a source that lies column by column in long pieces of few columns: short ones, each
// of a page of its own, come at two thirds of the pace.
inline PackTiling ChoosePackTiling(const ChipSpec& chip, Role role, DType dtype, std::int64_t rows,
                                   std::int64_t cols, std::int64_t matrices, bool by_columns) {
  constexpr std::int64_t kTileBytes = 64 << 10, kLeastBytes = 16 << 10, kTileCols = 256,
                         kPieceBytes = 2 << 10;
  const std::int64_t panel = std::min(chip.PackedStep(role, dtype), kTileCols),
                     element = chip.OperandBytes(dtype);
  const std::int64_t share = CeilDiv(matrices * rows * cols * element, chip.concurrent_cores);
  const std::int64_t bytes = chip.pipes_overlap ? std::clamp(share, kLeastBytes, kTileBytes) : kTileBytes;
  PackTiling t;
  const std::int64_t step = std::max(kWidestPanel, panel);
  const auto fill = [&](std::int64_t others) { return bytes / std::max(others * element, std::int64_t{1}); };
  if (by_columns && !chip.pipes_overlap) {
    t.rows = std::min(RoundUp(rows, step), RoundUp(std::min(kPieceBytes / element, fill(panel)), step));
    t.cols = std::min(RoundUp(cols, panel), RoundUp(fill(t.rows), panel));
  } else {
    t.cols = std::min(RoundUp(cols, panel), RoundUp(kTileCols, panel));
    t.rows = std::min(RoundUp(rows, step), RoundUp(fill(t.cols), step));
  }
  t.matrices = matrices;
  t.grid = {CeilDiv(rows, std::max<std::int64_t>(t.rows, 1)),
            CeilDiv(cols, std::max<std::int64_t>(t.cols, 1))};
  return t;
}

// Cycles of the phase that packs on an NPU: a core's tiles come and go, and all cores wait for the last.
inline double PackCycles(const ChipSpec& chip, const PackTiling& t, DType dtype) {
  const auto cores = static_cast<double>(std::min<std::int64_t>(t.tasks(), chip.concurrent_cores));
  const auto tiles = static_cast<double>(CeilDiv(t.tasks(), chip.concurrent_cores));
  const auto bytes = static_cast<double>(t.rows * t.cols * chip.OperandBytes(dtype));
  const double startups = chip.path(Path::kGmToL1Nd2Nz).startup + chip.path(Path::kL1ToGm).startup;
  return chip.sync.barrier_s * chip.clock_hz + startups +
         2 * tiles * bytes / LoadRate(chip, Path::kGmToL1Nd2Nz, cores);
}

}  // namespace cubist

#endif  // CUBIST_TILING_PACK_TILING_H_
