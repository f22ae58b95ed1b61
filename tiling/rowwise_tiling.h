// How kernels that work row by row (norms, activations) are cut for a chip.
#ifndef CUBIST_TILING_ROWWISE_TILING_H_
#define CUBIST_TILING_ROWWISE_TILING_H_

#include <algorithm>
#include <array>
#include <compare>
#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"

namespace cubist {

// A matrix of (rows, cols), and what a kernel holds in UB for a tile of it.
struct RowwiseShape {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::kF32;
  int loads = 0, stores = 0;  // Tiles of dtype that come from GM and go there, in every stage of the rings.
  int scratch = 0;            // fp32 tiles.
  int row_vectors = 0;        // (1, cols) fp32 tiles.
  int column_vectors = 0;     // (rows, 1) fp32 tiles.
  int side_tiles = 0;         // (rows, side_cols) tiles of four bytes.
  std::int64_t side_cols = 0;
  int vector_passes = 0;    // Instructions over the whole tile.
  bool whole_rows = false;  // A second pass over a row needs the first one's sum: a cut row is read again.
  bool uncut_rows = false;  // Rows are not cut at all,
  bool cut_rows = false;    // or they always are.
  // How many of a row's highest are kept while its parts pass: so many, and those of a part, in four tiles of four bytes.
  // They are merged: kMergedBlocks at most.
  std::array<std::int64_t, 3> kept{};
  bool row_by_row =
      false;  // One instruction does all of a tile, where a host has one row after the other in its cache.

  friend auto operator<=>(const RowwiseShape&, const RowwiseShape&) = default;
};

// Rows are cut into `chunks` of `chunk_rows`, dealt to cores; a chunk is walked in tiles of (rows, cols).
struct RowwiseTiling {
  std::int64_t chunks = 0, chunk_rows = 0;
  std::int64_t rows = 0, cols = 0;
  int stages = 2;

  friend bool operator==(const RowwiseTiling&, const RowwiseTiling&) = default;
};

template <class Visit>
void VisitFields(const RowwiseShape& s, Visit&& visit) {
  visit({"rows"}, s.rows), visit({"cols"}, s.cols);
  visit({"dtype"}, s.dtype);
  visit({"loads"}, s.loads), visit({"stores"}, s.stores);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, RowwiseTiling>
void VisitFields(const ChipSpec&, const RowwiseShape&, Tiling& t, Visit&& visit) {
  visit({"chunk_rows"}, t.chunk_rows);
  visit({"rows"}, t.rows), visit({"cols"}, t.cols);
  visit({"stages", 1, 64}, t.stages);
}

inline void Complete(const RowwiseShape& s, RowwiseTiling& t) {
  t.chunks = std::max<std::int64_t>(CeilDiv(s.rows, t.chunk_rows), 1);
}

// No two candidates are of one kind.
inline auto FamilyOf(const RowwiseTiling& t) { return std::tuple(t.chunk_rows, t.rows, t.cols, t.stages); }
inline auto WalkOf(const RowwiseTiling& t) { return FamilyOf(t); }
inline std::vector<RowwiseTiling> OtherOrders(const RowwiseTiling&) { return {}; }
// What the replay of a call costs, in Mmads of a matrix product.
inline std::int64_t ReplayWork(const RowwiseShape& s, const RowwiseTiling& t) {
  constexpr std::int64_t kInstructions = 4;  // Of a tile, as long as a Mmad and what it takes.
  const std::int64_t tiles = t.chunks * CeilDiv(t.chunk_rows, std::max<std::int64_t>(t.rows, 1)) *
                             CeilDiv(s.cols, std::max<std::int64_t>(t.cols, 1));
  return tiles * (s.loads + s.stores + s.vector_passes) / kInstructions;
}

// What the kernel's rings take of a buffer.
CUBIST_EXPORT std::int64_t BufferBytes(const ChipSpec& chip, const RowwiseShape& shape,
                                       const RowwiseTiling& tiling, Buffer buffer);
CUBIST_EXPORT bool Fits(const ChipSpec& chip, const RowwiseShape& shape, const RowwiseTiling& tiling);
CUBIST_EXPORT std::vector<RowwiseTiling> RowwiseCandidates(const ChipSpec& chip, const RowwiseShape& shape);
CUBIST_EXPORT double Price(const ChipSpec& chip, const RowwiseShape& shape, const RowwiseTiling& tiling);
CUBIST_EXPORT Status Choose(const ChipSpec& chip, const RowwiseShape& shape, RowwiseTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_ROWWISE_TILING_H_
