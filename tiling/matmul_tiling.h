// MatmulTiling: how a matrix product is cut for a chip.
#ifndef CUBIST_TILING_MATMUL_TILING_H_
#define CUBIST_TILING_MATMUL_TILING_H_

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "npu_model/cache.h"
#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/block_order.h"
#include "tiling/fields.h"

namespace cubist {

// What becomes of C after the Cube: nothing that FIX cannot do, or work of Vector cores.
struct EpilogueShape {
  bool vector = false;
  bool bias = false, residual = false;  // Given to the Vector core.
  int scratch = 0;                      // Tiles that it needs besides.

  friend auto operator<=>(const EpilogueShape&, const EpilogueShape&) = default;
};

struct MatmulShape {
  std::int64_t m = 0, n = 0, k = 0;
  DType in = DType::kF32, out = DType::kF32;
  bool bias = false;
  std::int64_t a_row_bytes = 0;  // Length of A's rows in GM where its columns are adjacent, else 0.
  std::int64_t b_row_bytes = 0;  // The same of B's.
  bool a_packed = false, b_packed = false;  // By the caller, once for many products.
  bool any_order = false;                   // Sums may begin anywhere along k.
  std::int64_t batches = 1;                 // Products of this shape.
  EpilogueShape epilogue = {};
  std::int64_t b_col_bytes = 0;  // Length of B's columns where its rows are adjacent, else 0.
  // One B serves the whole batch, or one A: sums are cut along k as those of a single product of all its rows, or columns,
  // whether or not strides allow to walk it as that.
  bool rows_of_batch = false, cols_of_batch = false;

  friend auto operator<=>(const MatmulShape&, const MatmulShape&) = default;
};

// A block of C, (m, n), stays in L0C while k is walked: in steps of k1 from GM to L1, of k0 from L1 to L0.
struct MatmulTiling {
  static constexpr bool kKeepsBits = true;  // Results are the same by any of them.

  std::int64_t m = 0, n = 0;
  std::int64_t k1 = 0, k0 = 0;
  int l1_stages = 2, l0_stages = 2, l0c_stages = 1;
  bool pack_a = false, pack_b = false;  // An operand is packed whole, once, by a phase before.
  bool b_once = false;   // B's tiles serve few rows, and are read where they lie (Role::kBOnce).
  int pieces = 1;        // that a tile of L1 comes in, along k
  bool stagger = false;  // Blocks begin at different places along k.
  int keep_a = 0;   // Tiles of A, the first along k, that stay in L1 while a core's blocks lie side by side.
  int a_span = 1;   // Steps of k1 that a tile of A is long.
  int c_parts = 1;  // that a block's columns are computed in, and leave L0C in
  // Vector cores, which have nothing else to do, read what this many waves of blocks need ahead of the Cube cores, into L2.
  std::int64_t prefetch = 0;
  BlockGrid grid;
  // Where C is small against k, each product is cut along it into so many parts of part_k, which Vector cores add up.
  std::int64_t splits = 1, part_k = 0;
  bool b_turned = false;  // B's columns are rows in GM.
  // Rows of the tiles in UB, where Vector cores have work.
  std::int64_t ub_rows = 0;
  int ub_stages = 1;
  bool in_runs =
      false;  // A core takes blocks that follow each other, not those that other cores leave between them.

  std::int64_t tasks(std::int64_t batches) const { return batches * splits * grid.count(); }

  // Length of a piece: whole steps of k0.
  std::int64_t piece() const { return pieces == 1 ? k1 : RoundUp(CeilDiv(k1, pieces), k0); }

  // Tiles of A, how long they are, and how many of them L1 has.
  std::int64_t a_k1() const { return k1 * a_span; }
  std::int64_t a_tiles(std::int64_t k) const {
    return std::max<std::int64_t>(CeilDiv(k, std::max<std::int64_t>(a_k1(), 1)), 1);
  }
  int a_stages(std::int64_t k) const { return keep_a + (a_tiles(k) > keep_a ? l1_stages : 0); }

  // Columns of a part of a block: whole panels of any layout.
  static constexpr int kMostParts = 4;
  std::int64_t part_n() const { return c_parts == 1 ? n : RoundUp(CeilDiv(n, c_parts), kWidestPanel); }

  // How blocks are dealt to cores.
  CoreTasks::Deal deal() const {
    return keep_a > 0 ? CoreTasks::Deal::kTurnedRuns
           : in_runs  ? CoreTasks::Deal::kRuns
                      : CoreTasks::Deal::kTurns;
  }

  friend bool operator==(const MatmulTiling&, const MatmulTiling&) = default;
};

// What a Vector core reads at a time of rows that others need: whole rows of a tile in L1, as long as they fit this.
inline constexpr std::int64_t kAheadBytes = 64 << 10;
inline std::int64_t AheadRows(std::int64_t rows, std::int64_t cols, std::int64_t element) {
  return std::clamp<std::int64_t>(kAheadBytes / std::max<std::int64_t>(cols * element, 1), 1,
                                  std::max<std::int64_t>(rows, 1));
}

// Whether Vector cores are free to read operands ahead, and find them row by row.
inline bool MayPrefetch(const ChipSpec& chip, const MatmulShape& s) {
  return chip.pipes_overlap && s.batches == 1 && !s.epilogue.vector && !s.a_packed && !s.b_packed &&
         s.a_row_bytes > 0 && (s.b_row_bytes > 0 || s.b_col_bytes > 0);
}

template <class Visit>
void VisitFields(const MatmulShape& s, Visit&& visit) {
  visit({"m"}, s.m), visit({"n"}, s.n), visit({"k"}, s.k);
  visit({"in"}, s.in), visit({"out"}, s.out);
  visit({"bias"}, s.bias);
  visit({"a_row_bytes"}, s.a_row_bytes);
  visit({"b_row_bytes"}, s.b_row_bytes);
  visit({"a_packed"}, s.a_packed), visit({"b_packed"}, s.b_packed);
  visit({"any_order"}, s.any_order);
  visit({"batches"}, s.batches);
  visit({"vector_epilogue"}, s.epilogue.vector), visit({"epilogue_bias"}, s.epilogue.bias);
  visit({"b_col_bytes"}, s.b_col_bytes);
  visit({"rows_of_batch"}, s.rows_of_batch), visit({"cols_of_batch"}, s.cols_of_batch);
  visit({"epilogue_residual"}, s.epilogue.residual), visit({"epilogue_scratch"}, s.epilogue.scratch);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, MatmulTiling>
void VisitFields(const ChipSpec& chip, const MatmulShape& s, Tiling& t, Visit&& visit) {
  constexpr std::int64_t kLargest = 1 << 20;
  const std::int64_t k_step = chip.KStep(s.in);
  visit({"m", 1, kLargest, chip.RowStep(s.in)}, t.m);
  visit({"n", 1, kLargest, s.b_packed ? kWidestPanel : chip.mmad.n_step}, t.n);
  visit({"k1", 1, kLargest, k_step}, t.k1), visit({"k0", 1, kLargest, k_step}, t.k0);
  visit({"l1_stages", 1, 16}, t.l1_stages), visit({"l0_stages", 1, 16}, t.l0_stages);
  visit({"l0c_stages", 1, 16}, t.l0c_stages);
  const bool in_panels = t.n >= s.n || t.n % chip.PackedBlockStep(s.in) == 0;
  visit({"pack_a", 0, 1}, t.pack_a), visit({"pack_b", 0, in_panels ? 1 : 0}, t.pack_b);
  visit({"b_once", 0, 1}, t.b_once);
  // A packed operand is taken as a whole tile.
  visit({"pieces", 1, s.a_packed || s.b_packed ? 1 : 64}, t.pieces),
      visit({"stagger", 0, s.any_order ? 1 : 0}, t.stagger);
  visit({"keep_a", 0, chip.pipes_overlap ? kLargest : 0}, t.keep_a);
  visit({"a_span", 1, chip.pipes_overlap ? 16 : 1}, t.a_span);
  visit({"c_parts", 1, chip.pipes_overlap ? MatmulTiling::kMostParts : 1}, t.c_parts);
  visit({"prefetch", 0, MayPrefetch(chip, s) ? kLargest : 0}, t.prefetch);
  visit({"order", 0, kBlockOrderCount - 1}, t.grid.order), visit({"width", 1, kLargest}, t.grid.width);
}

// How many parts k is cut into, and their length where that is more than one: by the shape and the dtype alone, however
// operands are stored and whatever becomes of C.
struct KParts {
  std::int64_t count = 1, length = 0;
};
CUBIST_EXPORT KParts PartsOf(const ChipSpec& chip, const MatmulShape& shape);
// The same on a host, whatever the dtype: of kMostCutOutputs sums at most, in kMostHostParts at most.
inline constexpr std::int64_t kMostCutOutputs = 1 << 14;
inline constexpr int kMostHostParts = 16;
CUBIST_EXPORT KParts HostPartsOf(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batches = 1);

// Rows of a tile in UB, with what the shape needs there besides: all of a block's where a Vector core takes it as the
// Cube leaves it, otherwise as many as fit.
CUBIST_EXPORT std::int64_t UbRows(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling);

inline int UbStages(const ChipSpec& chip) { return chip.pipes_overlap ? 2 : 1; }

// The grid that shape and tiles make, and what follows from them.
inline void Complete(const ChipSpec& chip, const MatmulShape& s, MatmulTiling& t) {
  t.grid.rows = CeilDiv(s.m, t.m), t.grid.cols = CeilDiv(s.n, t.n);
  t.b_turned = s.b_row_bytes == 0;
  if (t.splits > 1) t.keep_a = 0;
  if (t.splits > 1 || t.pack_a) t.prefetch = 0;
  // What is packed, and a tile of A that serves several steps, comes whole.
  if (t.pack_a || t.pack_b || t.a_span > 1) t.pieces = 1;
  t.keep_a = static_cast<int>(std::min<std::int64_t>(t.keep_a, t.a_tiles(s.k)));
  t.ub_stages = UbStages(chip);
  // Cores of a host run one after the other, those of an NPU side by side.
  t.in_runs = !chip.pipes_overlap;
  t.ub_rows = UbRows(chip, s, t);
}

// What a tiling's price errs in with others: the blocks, their order, and what is read ahead, kept or packed.
inline auto FamilyOf(const MatmulTiling& t) {
  return std::tuple(t.m, t.n, t.grid.order, t.grid.width, t.keep_a > 0, t.prefetch > 0, t.pack_a, t.pack_b,
                    t.stagger, t.c_parts > 1);
}
// The same in strips of other widths, which candidates do not have.
inline std::vector<MatmulTiling> OtherOrders(const MatmulTiling& t) {
  std::vector<MatmulTiling> others;
  if (t.grid.order == BlockOrder::kRowMajor || t.grid.rows == 1 || t.grid.cols == 1) return others;
  for (const std::int64_t width : {2, 3, 5, 6}) {
    MatmulTiling other = t;
    other.grid.width = width;
    if (width < t.grid.cols && width != t.grid.width) others.push_back(other);
  }
  return others;
}
// How a family's tilings walk along k.
inline auto WalkOf(const MatmulTiling& t) {
  return std::tuple(t.k1, t.pieces, t.keep_a, t.a_span, t.l1_stages);
}
// How they feed L0 and the Cube at each step.
inline auto StepOf(const MatmulTiling& t) { return std::tuple(t.k0, t.c_parts, t.l0_stages, t.l0c_stages); }
inline bool DifferInStepAlone(MatmulTiling t, const MatmulTiling& other) {
  t.k0 = other.k0, t.c_parts = other.c_parts;
  t.l0_stages = other.l0_stages, t.l0c_stages = other.l0c_stages;
  return t == other;
}
// What the replay of a call costs: the Mmads that a tiling makes of its shape.
inline std::int64_t ReplayWork(const MatmulShape& s, const MatmulTiling& t) {
  return s.batches * t.grid.count() * CeilDiv(s.k, std::max<std::int64_t>(t.k0, 1)) * t.c_parts;
}

// What the kernel's rings take of a buffer.
CUBIST_EXPORT std::int64_t BufferBytes(const ChipSpec& chip, const MatmulShape& shape,
                                       const MatmulTiling& tiling, Buffer buffer);
// Whether every ring fits its buffer.
CUBIST_EXPORT bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling);

// Rows of A that a host lets meet a B where it lies at most, each part of it once: a packed copy is neither written nor read. Rows
// of B are packed beside the multiply-adds of the first rows of A. On a Zen 5 96 to 128 rows pass them 1.1 to 1.2 times as fast
// as by packing first, 256 up to 1.05 times; twice as many, whose sums are far, .95 times. Columns, turned before they are
// multiplied, pass 96 to 128 rows up to 1.1 times as fast. Tile registers pack all they meet. Low register tiles, of half as many
// registers, have none to turn or to widen B with: blocks of it that are packed before pass 24 to 132 rows 1.02 to 1.3 times as
// fast where it lies in columns, 9 to 264 rows 1.02 to 1.2 times where it is widened; floats in rows up to 72 rows .82 to .97
// times, and as fast from there on (Zen 3).
CUBIST_EXPORT std::int64_t MostRowsOnce(const ChipSpec& chip, const MatmulShape& shape);
inline constexpr std::int64_t kMostOnce = 264, kMostOnceInTileRegisters = 64;  // Of any host; of those.
inline constexpr std::int64_t kRowsThatWait = 6;  // So few wait for memory alone.

// Whether register tiles are low: see MostRowsOnce.
inline bool HasLowTiles(const ChipSpec& chip) { return !chip.pipes_overlap && chip.mmad.m_step < 12; }

// All tilings worth pricing; those that do not fit are left out.
CUBIST_EXPORT std::vector<MatmulTiling> Candidates(const ChipSpec& chip, const MatmulShape& shape);
// The same for blocks of products that many such products share: B is too much to be packed whole before.
CUBIST_EXPORT std::vector<MatmulTiling> GroupCandidates(const ChipSpec& chip, const MatmulShape& shape);

// Whether tile registers take strips of A one after the other, with a block's step of B, its k0 x n, in L2: then it does not
// matter how many rows of A there are. Fewer of them, or of columns, wait for the other operand.
inline constexpr std::int64_t kLeastThatPass = 256;
inline bool StripsPassB(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  const std::int64_t m = std::min(t.m, s.m), n = std::min(t.n, s.n), k = std::min(t.k0, s.k);
  return chip.InTileRegisters(s.in) && std::min(m, n) >= kLeastThatPass &&
         k * n * chip.OperandBytes(s.in) <= kPassingBytes;
}

// Whether a Mmad reads A's rows where they lie in GM. Rows a multiple of a way of a first-level cache apart would stand in one of
// its sets: a Mmad copies them again for every block of columns. Tile registers copy a strip where it is needed, which of many rows
// costs less than to pack them (2048 x 2048 x 8192 1.19 times as fast, 300 x 3000 x 4096 1.16; 64 x 4096 x 4096 .96); few columns may
// meet them as they lie; and a few rows are read wherever they are.
inline bool AIsReadInPlace(const ChipSpec& chip, const MatmulShape& s) {
  const bool copies_strips =
      chip.InTileRegisters(s.in) && (s.a_row_bytes == kWayBytes || s.m >= kLeastThatPass);
  const bool few = chip.packing.few_columns_in_place && s.n <= kFewColumns && !chip.InTileRegisters(s.in);
  const bool shares_sets = s.a_row_bytes % kWayBytes == 0 && !copies_strips && !few;
  if (chip.packing.a_in_place_bytes == 0 || s.a_row_bytes == 0 || chip.OperandBytes(s.in) != SizeOf(s.in))
    return false;
  return s.m <= chip.RowStep(s.in) || (s.a_row_bytes <= chip.packing.a_in_place_bytes && !shares_sets);
}

// Whether a host multiplies few columns quicker as rows, c^T = b^T a^T. There they meet the other operand where it lies, which is
// read once, at the pace of memory; as columns they leave most of each vector empty. Zen 4, (4000, 3000) times 1, 8, 32 columns:
// 5.1, 2.9, 1.4 times as quick, of the transpose 5.3, 5.6, 1.8 times. Rows that are near and read in place are as quick by
// strips from five columns on, on Intel's CPUs from five to thirteen on.
CUBIST_EXPORT bool IsBetterTurned(const ChipSpec& chip, const MatmulShape& shape);

// Whether what a caller has packed of B is what Mmads take. Elsewhere they widen it: few rows as they meet it, blocks of many
// before.
inline bool BIsInLayout(const ChipSpec& chip, const MatmulShape& s) {
  return s.b_packed && !chip.KeepsNarrow(Role::kB, s.in);
}

// Whether a host's Mmad keeps A near and lets the panels of a packed B pass, one while the next is on its way: for as long
// steps of k as packed rows of A are.
inline bool PassesB(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  if (chip.InTileRegisters(s.in)) return false;  // Whatever it is: see narrow_m_step.
  const std::int64_t step = t.k0 * chip.OperandBytes(s.in);
  // Rows of A in place that share sets go strip by strip, each with all of B: 1024 cubed in fp32 .8 of the pace on a CPU whose
  // last cache gives 26 GB/s.
  if (!t.pack_a && !s.a_packed && s.a_row_bytes == kWayBytes) return false;
  return !chip.pipes_overlap && (BIsInLayout(chip, s) || t.pack_b) && step >= chip.packing.a_width_bytes &&
         t.m * step <= chip.buffer(Buffer::kL0A).fast && t.n * step > chip.buffer(Buffer::kL0B).fast;
}

// Predicted cycles. Without `one_product` blocks of a row or column belong to different operands (GroupedMatmul), no cores
// queue for the same lines, and an NPU's memory is left to the caller, who knows what all groups read.
CUBIST_EXPORT double Price(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling,
                           bool one_product = true);

// The cheapest candidate. Remembers its last answers. An error names the buffer that nothing fits.
CUBIST_EXPORT Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_MATMUL_TILING_H_
