#include "tiling/token_permute_tiling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

using Shape = TokenPermuteShape;

std::int64_t UbBytes(const ChipSpec& chip, DType dtype, std::int64_t rows, std::int64_t cols) {
  return chip.SlotBytes(Buffer::kUB, dtype, rows, cols);
}

// Of a token, at once.
template <class Tiling>
std::int64_t RoutesOf(const Shape& s, const Tiling& t) {
  return std::min(s.top_k, t.routes);
}

// Bytes of UB that the kernels' rings take; the rings are those of token_permute_kernel.h. Of the phases of permute the
// last takes most, or the one that adds up counts, or the first where that alone sorts.
std::int64_t Need(const ChipSpec& chip, const Shape& s, const TokenPermuteTiling& t) {
  const std::int64_t at_once = RoutesOf(s, t);
  const std::int64_t ids = UbBytes(chip, DType::kI32, t.piece_tokens, at_once);
  const std::int64_t wide_ids =
      s.wide_ids ? UbBytes(chip, DType::kI64, t.piece_tokens, at_once) : UbBytes(chip, DType::kI64, 1, 1);
  const std::int64_t bins = t.Bins(s.experts), staging = StagingBytes(chip);
  const std::int64_t sum = t.sums_chunks ? 4 * UbBytes(chip, DType::kI32, 1, kSummedBins) : 0;
  const std::int64_t table =
      3 * UbBytes(chip, DType::kI32, 1, bins) + UbBytes(chip, DType::kI32, 1, bins + 1);
  const std::int64_t zeros = 2 * UbBytes(chip, DType::kF32, 1, ZeroCols(s.hidden));
  const std::int64_t move = 2 * ids + 2 * UbBytes(chip, DType::kF32, t.piece_tokens, at_once) + 2 * staging +
                            2 * UbBytes(chip, DType::kI32, 1, at_once) + zeros +
                            t.row_stages * UbBytes(chip, s.dtype, 1, t.cols);
  if (t.digit_bits == 0) {
    const std::int64_t counts = UbBytes(chip, DType::kI32, t.sums_chunks ? 1 : t.chunks, bins);
    const std::int64_t sort = t.sorts ? 5 * ids + UbBytes(chip, DType::kI32, 2, std::max(at_once, bins) + 1) +
                                            5 * UbBytes(chip, DType::kF32, 1, bins + 1)
                                      : 0;
    const std::int64_t count = 2 * ids + wide_ids + 2 * UbBytes(chip, DType::kI32, 1, bins) + sort,
                       rank = 2 * ids + wide_ids + counts + table + UbBytes(chip, DType::kI32, 1, bins) +
                              (s.drops ? 0 : sort) + move;
    return std::max({sum, count, rank});
  }
  const std::int64_t pass = 7 * ids + wide_ids + UbBytes(chip, DType::kI32, 1, at_once) +
                            UbBytes(chip, DType::kI32, 1, at_once + 1) + staging + table;
  const std::int64_t search = 2 * UbBytes(chip, DType::kI32, 1, 1),
                     rows = UbBytes(chip, DType::kI32, 1, kSummedRanges) +
                            UbBytes(chip, DType::kI32, 1, kSummedRanges + 1),
                     routes = UbBytes(chip, DType::kI32, 1, kSortedRoutes),
                     experts = UbBytes(chip, DType::kI32, 1, t.range_experts),
                     offsets = UbBytes(chip, DType::kI32, 1, t.range_experts + 1);
  const std::int64_t count = search + 2 * routes + 3 * experts + 2 * offsets,
                     place = search + rows + zeros + 6 * routes + staging + 3 * experts + offsets;
  return std::max({sum, pass, count, place, search + rows + move});
}

// Of the tiles of experts' ids, which are of nothing where none are read.
template <class Tiling>
std::int64_t IdsNeed(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const std::int64_t piece = t.piece_tokens, cols = s.reads_ids ? RoutesOf(s, t) : 0;
  const bool wide = s.reads_ids && s.wide_ids;
  return 2 * UbBytes(chip, DType::kI32, piece, cols) +
         UbBytes(chip, DType::kI64, wide ? piece : 1, wide ? cols : 1);
}

std::int64_t Need(const ChipSpec& chip, const Shape& s, const TokenUnpermuteTiling& t) {
  const std::int64_t routes = RoutesOf(s, t);
  return IdsNeed(chip, s, t) + 2 * UbBytes(chip, DType::kI32, t.piece_tokens, routes) +
         2 * UbBytes(chip, DType::kF32, t.piece_tokens, routes) +
         t.stages * t.rows * UbBytes(chip, s.dtype, 1, t.cols) +
         (t.stages + 1) * UbBytes(chip, DType::kF32, 1, t.cols) + StagingBytes(chip);
}

// Of the three phases the last takes most.
std::int64_t Need(const ChipSpec& chip, const Shape& s, const TokenUnpermuteGradTiling& t) {
  const std::int64_t routes = RoutesOf(s, t);
  return IdsNeed(chip, s, t) + 2 * UbBytes(chip, DType::kI32, t.piece_tokens, routes) +
         2 * UbBytes(chip, DType::kF32, t.piece_tokens, routes) + 3 * UbBytes(chip, DType::kF32, 1, t.cols) +
         UbBytes(chip, DType::kF32, 1, s.dtype == DType::kF32 ? 1 : t.cols) +
         (t.row_stages * t.rows + 2) * UbBytes(chip, s.dtype, 1, t.cols) +
         (s.reads_ids ? 2 * t.rows * UbBytes(chip, s.dtype, 1, t.cols) : 0) +
         2 * UbBytes(chip, DType::kF32, t.slots, kBlockWords) +
         2 * UbBytes(chip, DType::kI32, 1, t.owned_rows);
}

// Tokens are dealt to all Vector cores, in chunks of at least some tokens: a chunk costs a row of counts.
template <class Tiling>
void CutTokens(const ChipSpec& chip, const Shape& s, std::int64_t least, Tiling* t) {
  const std::int64_t cores = chip.cube_cores * chip.vector_per_cube;
  t->chunk_tokens = std::max(CeilDiv(s.tokens, cores), std::max<std::int64_t>(least, 1));
  Complete(s, *t);
}

// Cycles to move `bytes` from GM to UB and `written` back on one core of `cores`.
double MoveCycles(const ChipSpec& chip, double loads, double bytes, double stores, double written,
                  double cores) {
  const double port = chip.memory.core_read_bytes_per_cycle;
  const double share = chip.memory.hbm_bytes_per_s / chip.clock_hz / cores;
  const double load =
      loads * chip.path(Path::kGmToUb).startup +
      bytes / std::min({static_cast<double>(chip.path(Path::kGmToUb).bytes_per_cycle), port, share});
  const double store =
      stores * chip.path(Path::kUbToGm).startup +
      written / std::min({static_cast<double>(chip.path(Path::kUbToGm).bytes_per_cycle),
                          static_cast<double>(chip.memory.core_write_bytes_per_cycle), share});
  return chip.pipes_overlap ? std::max(load, store) : load + store;
}

// Cycles to read what is known of each token (ids, or places and weights) in pieces of `piece` tokens.
double PieceCycles(const ChipSpec& chip, const Shape& s, std::int64_t tokens, std::int64_t piece) {
  const auto loads = static_cast<double>(2 * CeilDiv(tokens, piece));
  return loads * (chip.path(Path::kGmToUb).startup + chip.scalar.issue) +
         2 * static_cast<double>(UbBytes(chip, DType::kI32, tokens, s.top_k)) /
             chip.path(Path::kGmToUb).bytes_per_cycle;
}

// Parts of routes are of single tokens.
template <class Tiling>
bool FitsUb(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  return (t.piece_tokens == 1 || t.routes >= s.top_k) && FitsBuffers(chip, s, t);
}

template <class Tiling>
std::vector<Tiling> ThatFit(const ChipSpec& chip, const Shape& shape, std::vector<Tiling> tilings) {
  std::erase_if(tilings, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return tilings;
}

// Tokens that are read at once; where not even one token's routes fit, parts of these.
struct Piece {
  std::int64_t tokens, routes;
};
template <class Tiling>
std::vector<Piece> PiecesOf(const Shape& s, const Tiling& t, bool cut) {
  std::vector<Piece> pieces;
  if (cut) {
    for (const std::int64_t routes : TileSizes({8, 64, 512, 2048, 4096}, 8, s.top_k - 1))
      pieces.push_back({1, routes});
  } else {
    for (const std::int64_t tokens : TileSizes({1, 8, 64, 512}, 1, t.chunk_tokens))
      pieces.push_back({tokens, kAllRoutes});
  }
  return pieces;
}

// all(chip, shape, false), or, where none of these fits an NPU, all(chip, shape, true).
template <class Tiling>
std::vector<Tiling> WholeOrCut(const ChipSpec& chip, const Shape& s,
                               std::vector<Tiling> (*all)(const ChipSpec&, const Shape&, bool)) {
  std::vector<Tiling> whole = all(chip, s, /*cut=*/false);
  const auto fits = [&](const Tiling& t) { return Fits(chip, s, t); };
  if (!chip.pipes_overlap || s.top_k <= kBlockWords || std::any_of(whole.begin(), whole.end(), fits))
    return whole;
  return all(chip, s, /*cut=*/true);
}

// Parts of a row, the whole row first.
std::vector<std::int64_t> RowParts(const Shape& s) {
  return TileSizes({32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768}, 32, s.hidden);
}

// Tokens of a chunk: fewer do not pay for a row of counts, nor on a host for setting a core up. Cores of an NPU stand idle where
// there are few: PermuteTilings tries fewer there.
std::int64_t LeastChunk(const ChipSpec& chip, const Shape& s) {
  constexpr std::int64_t kTokens = 16, kRoutes = 8192, kBytes = 1 << 19;
  if (chip.pipes_overlap) return kTokens;
  const std::int64_t k = std::max<std::int64_t>(s.top_k, 1),
                     row = std::max<std::int64_t>(s.hidden * SizeOf(s.dtype), 1);
  return std::max(kTokens, std::min(CeilDiv(kRoutes, k), CeilDiv(kBytes, row) / (k + 1)));
}

// Routes of a piece that is sorted.
constexpr std::int64_t kMostSorted = kMergedRuns * kMergedRun;
constexpr std::int64_t kMostTabled = std::int64_t{1}
                                     << 20;  // Experts of a table: a host's UB would hold any number.
constexpr std::int64_t kMostSortedExperts = std::int64_t{1} << 24;  // Keys are floats.

// With what fills up the blocks of UB.
std::int64_t SortedRoutes(const Shape& s, const TokenPermuteTiling& t) {
  return t.piece_tokens * RoundUp(RoutesOf(s, t), kBlockWords);
}

bool CanSort(const Shape& s, const TokenPermuteTiling& t) {
  return t.digit_bits == 0 && s.top_k > 0 && s.experts > 0 && s.experts < kMostSortedExperts &&
         SortedRoutes(s, t) <= kMostSorted;
}

// Cycles to sort `routes` keys.
double SortCycles(const ChipSpec& chip, std::int64_t routes) {
  const auto pass = [&](std::int64_t keys, VectorOp op) {
    const auto repeats = static_cast<double>(CeilDiv(routes, keys)),
               parts = static_cast<double>(CeilDiv(routes, kMergedKeys));
    return 2 * chip.vector.head + repeats * chip.vector_cycles(op) +
           2 * parts * chip.vector_cycles(VectorOp::kUnary);
  };
  double cycles = pass(kSortedRun, VectorOp::kSort);
  for (std::int64_t run = kSortedRun; run < routes; run *= kMergedRuns)
    cycles += pass(kMergedKeys, VectorOp::kMergeSort);
  return cycles;
}

double BitWidth(std::int64_t value) {
  return static_cast<double>(std::bit_width(static_cast<std::uint64_t>(value)));
}

// Cycles in which every bin finds its run among `routes` sorted keys, by halves (ExpandSortedRuns), and counts it.
double SearchCycles(const ChipSpec& chip, std::int64_t routes, std::int64_t bins) {
  constexpr double kSingle = 12;  // Instructions that make keys, and counts of runs.
  const auto cycles = [&](VectorOp op) { return static_cast<double>(chip.vector_cycles(op)); };
  const auto repeats =
      static_cast<double>(CeilDiv((bins + 1) * SizeOf(DType::kF32), chip.vector.repeat_bytes));
  const double half =
      5 * chip.vector.head +
      repeats * (cycles(VectorOp::kUnary) + cycles(VectorOp::kCast) + cycles(VectorOp::kGather) +
                 cycles(VectorOp::kBinary) + 2 * cycles(VectorOp::kSelect));
  return BitWidth(routes) * half + kSingle * (chip.vector.head + repeats * cycles(VectorOp::kUnary));
}

// Cycles to count and to rank the routes of a chunk: a table's entry for each, or by sorting and a search, for which each
// phase numbers places and bins. Ranks are sorted back.
double RankCycles(const ChipSpec& chip, const Shape& s, const TokenPermuteTiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double by_table = d(t.chunk_tokens * s.top_k) * chip.scalar.update;
  if (!t.sorts) return 2 * by_table;
  const std::int64_t tokens = std::min(t.piece_tokens, t.chunk_tokens), routes = tokens * s.top_k;
  const double numbers =
      (BitWidth(std::max(RoutesOf(s, t), s.experts)) + BitWidth(tokens)) * chip.vector.head;
  const double pieces = d(CeilDiv(t.chunk_tokens, t.piece_tokens)),
               sort = SortCycles(chip, SortedRoutes(s, t)), search = SearchCycles(chip, routes, s.experts);
  return numbers + pieces * (sort + search) + (s.drops ? by_table : numbers + pieces * (2 * sort + search));
}

// Every tiling that is considered, whether it fits or not.
std::vector<TokenPermuteTiling> PermuteTilings(const ChipSpec& chip, const Shape& s, bool cut) {
  std::vector<TokenPermuteTiling> tilings;
  TokenPermuteTiling t;
  const auto add_cut = [&] {
    for (const Piece& piece : PiecesOf(s, t, cut)) {
      for (std::int64_t cols : RowParts(s)) {
        for (int stages : {2, 4, 8}) {
          t.piece_tokens = piece.tokens, t.routes = piece.routes, t.cols = cols, t.row_stages = stages;
          tilings.push_back(t);
        }
      }
    }
  };
  const auto add = [&] {
    std::int64_t least = LeastChunk(chip, s);
    CutTokens(chip, s, least, &t);
    add_cut();
    for (std::int64_t before = t.chunk_tokens; chip.pipes_overlap && least > 1; before = t.chunk_tokens) {
      CutTokens(chip, s, least /= 4, &t);
      if (t.chunk_tokens == before) break;
      add_cut();
    }
  };
  for (bool sums_chunks : {false, true}) {
    if (s.experts > kMostTabled) break;
    // A host reads the table once more for every chunk, and has its next phase for next to nothing.
    if (!chip.pipes_overlap && !sums_chunks) continue;
    t.sums_chunks = sums_chunks;
    for (bool sorts : {false, true}) {
      t.sorts = sorts;
      if (!sorts || chip.pipes_overlap) add();
    }
  }
  t.sorts = false, t.sums_chunks = true;  // A pass reads sums.
  for (int digit_bits : {4, 8, 11}) {
    if (s.experts <= std::int64_t{1} << digit_bits) break;  // One table has them all.
    for (std::int64_t range : {64, 2048, 16384}) {
      if (range / 8 > s.experts) break;
      t.digit_bits = digit_bits, t.range_experts = range;
      add();
    }
  }
  return tilings;
}

// Columns of a host's fp32 tile beyond which it costs a pass through the second-level cache. A row in more parts than it
// has to be costs as much: every part of every row starts in a page of its own.
constexpr std::int64_t kHostCols = 8192;

// Rows of a gradient that a host reads and writes side by side.
constexpr std::int64_t kHostRows = 8;

// Tokens of a chunk of sums or of gradients: on a host, whose cores cost most of a microsecond each to set up, what it moves in
// two.
std::int64_t LeastChunkOfRows(const ChipSpec& chip, const Shape& s) {
  constexpr std::int64_t kBytes = 1 << 16;
  if (chip.pipes_overlap) return 1;
  const std::int64_t row = std::max<std::int64_t>(s.hidden * SizeOf(s.dtype), 1);
  return CeilDiv(kBytes, row) / (s.top_k + 1);
}

std::vector<TokenUnpermuteTiling> UnpermuteTilings(const ChipSpec& chip, const Shape& s, bool cut) {
  std::vector<TokenUnpermuteTiling> tilings;
  TokenUnpermuteTiling t;
  CutTokens(chip, s, LeastChunkOfRows(chip, s), &t);
  for (const Piece& piece : PiecesOf(s, t, cut)) {
    for (std::int64_t cols : RowParts(s)) {
      if (!chip.pipes_overlap && cols > kHostCols) continue;
      for (std::int64_t rows : {1, 2, 4, 8}) {
        for (int stages : {1, 2}) {
          if (!chip.pipes_overlap && stages == 1) continue;  // A host asks for rows one group ahead.
          t.piece_tokens = piece.tokens, t.routes = piece.routes, t.cols = cols, t.rows = rows,
          t.stages = stages;
          tilings.push_back(t);
        }
      }
    }
  }
  return tilings;
}

std::vector<TokenUnpermuteGradTiling> UnpermuteGradTilings(const ChipSpec& chip, const Shape& s, bool cut) {
  std::vector<TokenUnpermuteGradTiling> tilings;
  TokenUnpermuteGradTiling t;
  CutTokens(chip, s, LeastChunkOfRows(chip, s), &t);
  for (const Piece& piece : PiecesOf(s, t, cut)) {
    for (std::int64_t cols : RowParts(s)) {
      if (!chip.pipes_overlap && cols > kHostCols) continue;
      for (std::int64_t slots : TileSizes({8, 64}, 1, s.top_k)) {
        for (int stages : {2, 4}) {
          if (!chip.pipes_overlap && stages > 2) continue;
          t.piece_tokens = piece.tokens, t.routes = piece.routes, t.cols = cols, t.slots = slots,
          t.row_stages = stages;
          t.rows = chip.pipes_overlap ? 1 : kHostRows;
          tilings.push_back(t);
        }
      }
    }
  }
  return tilings;
}

std::vector<TokenPermuteTiling> AllPermuteTilings(const ChipSpec& chip, const Shape& s) {
  return WholeOrCut(chip, s, &PermuteTilings);
}
std::vector<TokenUnpermuteTiling> AllUnpermuteTilings(const ChipSpec& chip, const Shape& s) {
  return WholeOrCut(chip, s, &UnpermuteTilings);
}
std::vector<TokenUnpermuteGradTiling> AllUnpermuteGradTilings(const ChipSpec& chip, const Shape& s) {
  return WholeOrCut(chip, s, &UnpermuteGradTilings);
}

}  // namespace

std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const TokenPermuteTiling& tiling,
                         Buffer buffer) {
  return buffer == Buffer::kUB ? Need(chip, shape, tiling) : 0;
}
std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const TokenUnpermuteTiling& tiling,
                         Buffer buffer) {
  return buffer == Buffer::kUB ? Need(chip, shape, tiling) : 0;
}
std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const TokenUnpermuteGradTiling& tiling,
                         Buffer buffer) {
  return buffer == Buffer::kUB ? Need(chip, shape, tiling) : 0;
}

bool Fits(const ChipSpec& chip, const Shape& shape, const TokenPermuteTiling& tiling) {
  if (tiling.sorts && !CanSort(shape, tiling)) return false;
  if (tiling.digit_bits != 0 && !tiling.sums_chunks) return false;
  return FitsUb(chip, shape, tiling);
}

bool Fits(const ChipSpec& chip, const Shape& shape, const TokenUnpermuteTiling& tiling) {
  return FitsUb(chip, shape, tiling);
}

bool Fits(const ChipSpec& chip, const Shape& shape, const TokenUnpermuteGradTiling& tiling) {
  return FitsUb(chip, shape, tiling);
}

double Price(const ChipSpec& chip, const Shape& s, const TokenPermuteTiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double parts = d(std::max<std::int64_t>(CeilDiv(s.hidden, t.cols), 1));
  const double row = d(s.hidden * SizeOf(s.dtype)), tokens = d(t.chunk_tokens), k = d(s.top_k);
  const double cores = d(std::min<std::int64_t>(t.chunks, chip.concurrent_cores * chip.vector_per_cube));
  const double bins = d(t.Bins(s.experts)), passes = t.Passes(s.experts);
  const double barrier = chip.sync.barrier_s * chip.clock_hz;
  const double read_bytes = chip.path(Path::kGmToUb).bytes_per_cycle,
               written_bytes = chip.path(Path::kUbToGm).bytes_per_cycle;
  // A route is counted and ranked, in each pass; with digits it is moved, as an id and as a slot.
  const double moved = t.digit_bits == 0 ? 0 : 2 * (chip.scalar.read + chip.path(Path::kUbToGm).gap);
  const double rank = passes * (RankCycles(chip, s, t) + tokens * k * moved);
  // Counts of all chunks come to every chunk; or sums over them do, after a phase in which a core adds up a range.
  const double sum_steps = std::ceil(bins / d(kSummedBins) / cores) *
                           (d(t.chunks) * (chip.path(Path::kGmToUb).gap + chip.path(Path::kUbToGm).gap) +
                            2 * d(t.chunks) * std::min(bins, d(kSummedBins)) * 4 / written_bytes);
  const double counts = passes * (t.sums_chunks ? 2 : d(t.chunks)) * bins * 4 / read_bytes;
  double sums = t.sums_chunks ? passes * (sum_steps + barrier) : 0;
  if (t.digit_bits != 0) {
    // Two phases over the experts, in which a range is looked for by halves.
    const double ranges = std::ceil(d(CeilDiv(s.experts, t.range_experts)) / cores);
    const double search =
        2 * std::log2(std::max(d(s.tokens) * k, 2.0)) * (chip.path(Path::kGmToUb).startup + chip.scalar.read);
    sums += (passes + 1) * barrier +
            2 * ranges * (search + 4 * d(t.range_experts) * (1 / read_bytes + 1 / written_bytes));
  }
  const double move =
      MoveCycles(chip, tokens * parts, tokens * row, tokens * parts * k, tokens * row * k, cores);
  const double unbuffered =
      t.row_stages > 2 ? 1.0 : 1.2;  // Two rows in flight leave MTE2 waiting for k stores.
  return std::ceil(d(t.chunks) / cores) *
             (rank + counts + PieceCycles(chip, s, t.chunk_tokens, t.piece_tokens) + move * unbuffered) +
         sums + barrier;
}

double Price(const ChipSpec& chip, const Shape& s, const TokenUnpermuteTiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double parts = d(std::max<std::int64_t>(CeilDiv(s.hidden, t.cols), 1));
  const double row = d(s.hidden * SizeOf(s.dtype)), tokens = d(t.chunk_tokens), k = d(s.top_k);
  const double cores = d(std::min<std::int64_t>(t.chunks, chip.concurrent_cores * chip.vector_per_cube));
  const double move =
      MoveCycles(chip, tokens * parts * k, tokens * row * k, tokens * parts, tokens * row, cores);
  // Each group of rows passes the accumulator once; each row is widened, weighted and added.
  const double cols = d(std::min(t.cols, std::max<std::int64_t>(s.hidden, 1)));
  const double sum =
      tokens * parts *
      (std::ceil(k / d(t.rows)) * VectorCycles(chip, VectorOp::kUnary, cols) +
       k * (VectorCycles(chip, VectorOp::kCast, cols) + VectorCycles(chip, VectorOp::kUnary, cols) +
            VectorCycles(chip, VectorOp::kBinary, cols)));
  // A piece's values are loaded one by one, while the rows in flight, by then half of them, keep memory busy.
  const double pieces = d(CeilDiv(t.chunk_tokens, t.piece_tokens));
  const double values = d(std::min(t.piece_tokens, t.chunk_tokens)) * k * chip.path(Path::kGmToUb).startup;
  const double in_flight = d(t.stages * t.rows) * cols * d(SizeOf(s.dtype)) /
                           (chip.memory.hbm_bytes_per_s / chip.clock_hz / cores);
  const double gather = chip.pipes_overlap && s.gathers ? pieces * std::max(values - in_flight / 2, 0.0) : 0;
  return std::ceil(d(t.chunks) / cores) * (PieceCycles(chip, s, t.chunk_tokens, t.piece_tokens) + gather +
                                           Overlap(chip, t.stages > 1, {move, sum}));
}

double Price(const ChipSpec& chip, const Shape& s, const TokenUnpermuteGradTiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double parts = d(std::max<std::int64_t>(CeilDiv(s.hidden, t.cols), 1));
  const double groups = d(std::max<std::int64_t>(CeilDiv(s.top_k, t.slots), 1));
  const double row = d(s.hidden * SizeOf(s.dtype)), tokens = d(t.chunk_tokens), k = d(s.top_k);
  const double cores = d(std::min<std::int64_t>(t.chunks, chip.concurrent_cores * chip.vector_per_cube));
  // A row is read and a row written for every slot; the token's own comes once per group of slots.
  const double unbuffered = t.row_stages > 2 ? 1.0 : 1.1;
  const double move =
      unbuffered * MoveCycles(chip, tokens * parts * (k + groups), tokens * row * (k + groups),
                              tokens * parts * k, tokens * row * k, cores);
  // Each row is widened, multiplied, summed up and added; the token's is scaled and narrowed for each.
  const double cols = d(std::min(t.cols, std::max<std::int64_t>(s.hidden, 1)));
  const double arithmetic =
      tokens * parts *
      (groups * VectorCycles(chip, VectorOp::kCast, cols) +
       k * (2 * VectorCycles(chip, VectorOp::kCast, cols) + VectorCycles(chip, VectorOp::kBinary, cols) +
            VectorCycles(chip, VectorOp::kUnary, cols) + VectorCycles(chip, VectorOp::kReduce, cols)));
  return std::ceil(d(t.chunks) / cores) * (2 * PieceCycles(chip, s, t.chunk_tokens, t.piece_tokens) +
                                           Overlap(chip, true, {move, arithmetic})) +
         2 * chip.sync.barrier_s * chip.clock_hz;
}

std::vector<TokenPermuteTiling> PermuteCandidates(const ChipSpec& chip, const Shape& shape) {
  return ThatFit(chip, shape, AllPermuteTilings(chip, shape));
}

std::vector<TokenUnpermuteTiling> UnpermuteCandidates(const ChipSpec& chip, const Shape& shape) {
  return ThatFit(chip, shape, AllUnpermuteTilings(chip, shape));
}

std::vector<TokenUnpermuteGradTiling> UnpermuteGradCandidates(const ChipSpec& chip, const Shape& shape) {
  return ThatFit(chip, shape, AllUnpermuteGradTilings(chip, shape));
}

Status Choose(const ChipSpec& chip, const Shape& shape, TokenUnpermuteGradTiling* tiling) {
  return ChooseCheapest(chip, shape, &AllUnpermuteGradTilings, tiling);
}

Status Choose(const ChipSpec& chip, const Shape& shape, TokenPermuteTiling* tiling) {
  return ChooseCheapest(chip, shape, &AllPermuteTilings, tiling);
}

Status Choose(const ChipSpec& chip, const Shape& shape, TokenUnpermuteTiling* tiling) {
  return ChooseCheapest(chip, shape, &AllUnpermuteTilings, tiling);
}

}  // namespace cubist
