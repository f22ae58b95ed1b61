#include "tiling/rowwise_tiling.h"

#include <algorithm>
#include <cmath>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

using Shape = RowwiseShape;
using Tiling = RowwiseTiling;

bool WalksRows(const ChipSpec& chip, const Shape& s) { return !chip.pipes_overlap && s.row_by_row; }

std::int64_t KeptBytes(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  std::int64_t bytes = 0;
  for (const std::int64_t kept : s.kept) {
    if (kept > 0)
      bytes += 4 * chip.SlotBytes(Buffer::kUB, DType::kF32, t.rows,
                                  RoundUp(kept, kBlockWords) + std::min(kept, t.cols));
  }
  return bytes;
}

std::int64_t Need(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto bytes = [&](DType dtype, std::int64_t rows, std::int64_t cols) {
    return chip.SlotBytes(Buffer::kUB, dtype, WalksRows(chip, s) ? std::min<std::int64_t>(rows, 1) : rows,
                          cols);
  };
  return t.stages * (s.loads + s.stores) * bytes(s.dtype, t.rows, t.cols) +
         s.scratch * bytes(DType::kF32, t.rows, t.cols) + s.row_vectors * bytes(DType::kF32, 1, t.cols) +
         s.column_vectors * bytes(DType::kF32, t.rows, 1) +
         s.side_tiles * bytes(DType::kF32, t.rows, s.side_cols) + KeptBytes(chip, s, t);
}

// On a host fewer rows do not pay for a chunk's own start: weights to load, a partial sum to store. Rows that are cut pass several
// times. Cores of an NPU stand idle where there are few: it may deal them one by one.
constexpr std::int64_t kLeastChunk = 16, kLeastChunkOfCut = 4;

// Rows of a chunk, largest first.
std::vector<std::int64_t> ChunksOf(const ChipSpec& chip, const Shape& s) {
  const std::int64_t share = CeilDiv(s.rows, chip.cube_cores * chip.vector_per_cube),
                     least = s.cut_rows ? kLeastChunkOfCut : kLeastChunk;
  std::vector<std::int64_t> chunks = {std::max(share, least)};
  for (std::int64_t rows = least / 4; chip.pipes_overlap && rows > 0 && chunks.back() > share; rows /= 4)
    chunks.push_back(std::max(share, rows));
  return chunks;
}

// Elements of a host's tile, unless it is one row: what it reads and writes of them stays in the first-level cache.
constexpr std::int64_t kHostElements = 8192;
// Of rows that are not cut, which many instructions walk: starting these costs more than what the first-level cache saves.
// A router of 256 experts takes 0.97 of the time that it takes with half as many.
constexpr std::int64_t kHostUncutElements = 16384;

std::vector<Tiling> AllTilings(const ChipSpec& chip, const Shape& s) {
  std::vector<Tiling> tilings;
  const std::vector<std::int64_t> widths =
      s.uncut_rows ? std::vector<std::int64_t>{std::max<std::int64_t>(s.cols, 1)}
      : s.cut_rows ? TileSizes({8, 32, 128, 512, 1024, 2048, 4096, 8192}, 8, s.cols - 1)
                   : TileSizes({32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768}, 32, s.cols);
  Tiling t;
  const auto add = [&](std::int64_t cols) {
    for (std::int64_t rows : TileSizes({1, 2, 4, 8, 16, 32, 64, 128}, 1, t.chunk_rows)) {
      for (int stages : {1, 2}) {
        t.rows = rows, t.cols = cols, t.stages = stages;
        if (!chip.pipes_overlap && rows * cols > (s.uncut_rows ? kHostUncutElements : kHostElements) &&
            !WalksRows(chip, s) && !(rows == 1 && s.whole_rows))
          continue;
        tilings.push_back(t);
      }
    }
  };
  for (const std::int64_t chunk : ChunksOf(chip, s)) {
    t.chunk_rows = chunk, t.chunks = std::max<std::int64_t>(CeilDiv(s.rows, chunk), 1);
    for (std::int64_t cols : widths) add(cols);
  }
  return tilings;
}

}  // namespace

std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const Tiling& tiling, Buffer buffer) {
  return buffer == Buffer::kUB ? Need(chip, shape, tiling) : 0;
}

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  if (shape.uncut_rows && tiling.cols < shape.cols) return false;
  if (shape.cut_rows && tiling.cols >= shape.cols) return false;
  if (*std::max_element(shape.kept.begin(), shape.kept.end()) > kMergedBlocks) return false;
  return FitsBuffers(chip, shape, tiling);
}

double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double parts = d(std::max<std::int64_t>(CeilDiv(s.cols, t.cols), 1));
  const double tiles = d(CeilDiv(t.chunk_rows, t.rows)) * parts;
  const double elements = d(t.chunk_rows * s.cols), bytes = elements * d(SizeOf(s.dtype));
  const double cores = d(std::min<std::int64_t>(t.chunks, chip.concurrent_cores * chip.vector_per_cube));
  const double reads = s.loads * (s.whole_rows && parts > 1 ? 2.0 : 1.0);
  // A host reads and writes GM in place: it is a row's part that starts there, a tile on an NPU.
  const double starts = chip.pipes_overlap ? tiles : d(t.chunk_rows) * parts;
  const double share = chip.memory.hbm_bytes_per_s / chip.clock_hz / cores;
  const auto move = [&](Path path, double port, double transfers, double moved) {
    return transfers * chip.path(path).startup +
           moved / std::min({static_cast<double>(chip.path(path).bytes_per_cycle), port, share});
  };
  const double load =
      move(Path::kGmToUb, chip.memory.core_read_bytes_per_cycle, starts * reads, bytes * reads);
  const double store =
      move(Path::kUbToGm, chip.memory.core_write_bytes_per_cycle, starts * s.stores, bytes * s.stores);
  // A row operand that is cut is loaded again for every tile, from L2.
  const double row_loads = parts > 1 ? tiles * s.row_vectors : 0;
  const double weights = chip.pipes_overlap
                             ? row_loads * (chip.path(Path::kGmToUb).startup +
                                            4 * d(t.cols) / chip.memory.core_read_bytes_per_cycle)
                             : row_loads * VectorCycles(chip, VectorOp::kUnary, d(t.cols));
  const double vector = s.vector_passes * tiles * VectorCycles(chip, VectorOp::kBinary, elements / tiles);
  return std::ceil(d(t.chunks) / cores) *
         (Overlap(chip, t.stages > 1, {load + weights, store, vector}) + tiles * chip.scalar.issue);
}

std::vector<Tiling> RowwiseCandidates(const ChipSpec& chip, const Shape& shape) {
  std::vector<Tiling> tilings = AllTilings(chip, shape);
  std::erase_if(tilings, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return tilings;
}

Status Choose(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  return ChooseCheapest(chip, shape, &AllTilings, tiling);
}

}  // namespace cubist
