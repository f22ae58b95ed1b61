#include "tiling/reorder_chunks_tiling.h"

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

using Shape = ReorderChunksShape;
using Tiling = ReorderChunksTiling;

// Bytes of UB of the second kernel of reorder_chunks_kernel.h, or of the first, whichever takes more.
std::int64_t Need(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto bytes = [&](DType dtype, std::int64_t rows, std::int64_t cols) {
    return chip.SlotBytes(Buffer::kUB, dtype, rows, cols);
  };
  const std::int64_t starts =
      bytes(DType::kI64, t.piece_ranks, t.experts) + 2 * bytes(DType::kI32, t.piece_ranks, t.experts) +
      4 * bytes(DType::kI32, 1, t.experts) + 2 * bytes(DType::kI32, 1, t.experts + 1) +
      2 * bytes(DType::kI32, 1, t.chunks + 1) + bytes(DType::kI64, 1, t.chunks) +
      2 * bytes(DType::kI32, 1, t.chunks);
  const std::int64_t move = t.stages * bytes(s.dtype, t.rows, t.cols) + 2 * bytes(DType::kF32, 1, t.rows) +
                            bytes(DType::kI32, 1, t.rows) + 2 * bytes(DType::kI32, 1, t.rows + 1) +
                            2 * bytes(DType::kI32, 1, t.chunks + 1) + 2 * bytes(DType::kI32, 1, t.chunks);
  return std::max(starts, move);
}

constexpr std::int64_t kChunks = 1024;  // A few KiB of a list.

std::vector<Tiling> AllTilings(const ChipSpec&, const Shape& s) {
  std::vector<Tiling> tilings;
  Tiling t;
  for (std::int64_t rows : {1, 4, 16, 64}) {
    for (std::int64_t cols : TileSizes({128, 512, 2048, 8192, 32768}, 32, s.hidden)) {
      for (std::int64_t experts : TileSizes({8, 64, 512, 2048}, 8, s.experts)) {
        for (std::int64_t ranks : TileSizes({1, 8, 64}, 1, s.ranks)) {
          for (int stages : {2, 4}) {
            t.rows = rows, t.cols = cols, t.experts = experts, t.piece_ranks = ranks, t.stages = stages;
            t.chunks = std::clamp<std::int64_t>(s.ranks * s.experts, 1, kChunks);
            tilings.push_back(t);
          }
        }
      }
    }
  }
  return tilings;
}

}  // namespace

std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const Tiling& tiling, Buffer buffer) {
  return buffer == Buffer::kUB ? Need(chip, shape, tiling) : 0;
}

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  return FitsBuffers(chip, shape, tiling);
}

std::vector<Tiling> ReorderChunksCandidates(const ChipSpec& chip, const Shape& shape) {
  std::vector<Tiling> tilings = AllTilings(chip, shape);
  std::erase_if(tilings, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return tilings;
}

// Transfers begin for every tile and for every piece of the counts; the bytes are the same for all.
double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double cores = d(chip.concurrent_cores * chip.vector_per_cube);
  // Chunks end inside tiles.
  const double tall = std::min(d(t.rows), std::max(d(s.rows) / std::max(d(s.ranks * s.experts), 1.0), 1.0));
  const double tiles = d(s.rows) / tall * d(std::max<std::int64_t>(CeilDiv(s.hidden, t.cols), 1)) / cores;
  const double in_flight = t.stages > 2 ? 1.0 : 1.2;
  const double startup = chip.path(Path::kGmToUb).startup + chip.path(Path::kUbToGm).startup;
  const double ranges = d(std::max<std::int64_t>(CeilDiv(s.experts, t.experts), 1));
  const double pieces = ranges * d(std::max<std::int64_t>(CeilDiv(s.ranks, t.piece_ranks), 1));
  return in_flight * tiles * startup + (2 * pieces + 2 * d(s.ranks) * ranges) * startup;
}

Status Choose(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  return ChooseCheapest(chip, shape, &AllTilings, tiling);
}

}  // namespace cubist
