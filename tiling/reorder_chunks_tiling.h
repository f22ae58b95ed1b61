// How the re-ordering of chunks of rows is cut for a chip.
#ifndef CUBIST_TILING_REORDER_CHUNKS_TILING_H_
#define CUBIST_TILING_REORDER_CHUNKS_TILING_H_

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/fields.h"

namespace cubist {

struct ReorderChunksShape {
  std::int64_t rows = 0, hidden = 0, ranks = 0, experts = 0;
  DType dtype = DType::kF32;

  friend auto operator<=>(const ReorderChunksShape&, const ReorderChunksShape&) = default;
};

// Rows move in tiles of (rows, cols), `stages` of them in flight. Counts are summed in pieces of (piece_ranks, experts);
// lists of chunks are walked `chunks` at a time.
struct ReorderChunksTiling {
  std::int64_t rows = 1, cols = 0;
  std::int64_t experts = 0, piece_ranks = 0, chunks = 0;
  int stages = 4;

  friend bool operator==(const ReorderChunksTiling&, const ReorderChunksTiling&) = default;
};

template <class Visit>
void VisitFields(const ReorderChunksShape& s, Visit&& visit) {
  visit({"rows"}, s.rows), visit({"hidden"}, s.hidden);
  visit({"ranks"}, s.ranks), visit({"experts"}, s.experts);
  visit({"dtype"}, s.dtype);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, ReorderChunksTiling>
void VisitFields(const ChipSpec&, const ReorderChunksShape&, Tiling& t, Visit&& visit) {
  visit({"rows"}, t.rows), visit({"cols"}, t.cols);
  visit({"experts"}, t.experts), visit({"piece_ranks"}, t.piece_ranks);
  visit({"chunks"}, t.chunks);
  visit({"stages", 1, 64}, t.stages);
}

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const ReorderChunksShape& shape,
                         const ReorderChunksTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const ReorderChunksShape& shape, const ReorderChunksTiling& tiling);
std::vector<ReorderChunksTiling> ReorderChunksCandidates(const ChipSpec& chip,
                                                         const ReorderChunksShape& shape);
double Price(const ChipSpec& chip, const ReorderChunksShape& shape, const ReorderChunksTiling& tiling);
Status Choose(const ChipSpec& chip, const ReorderChunksShape& shape, ReorderChunksTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_REORDER_CHUNKS_TILING_H_
