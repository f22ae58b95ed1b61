// GroupedMatmulTiling: how the products of all groups are cut for a chip, before their sizes are known.
#ifndef CUBIST_TILING_GROUPED_MATMUL_TILING_H_
#define CUBIST_TILING_GROUPED_MATMUL_TILING_H_

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
#include "tiling/group_spreads.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// What the groups share out among themselves.
enum class GroupedAxis : std::uint8_t {
  kM,  // rows of the output: each group is a product of (rows, n, k)
  kK,  // the sum: each group is a product of (m, n, rows), the gradient of its weights
};
constexpr const char* NameOf(GroupedAxis axis) { return axis == GroupedAxis::kM ? "m" : "k"; }

// The size of parts of `count`, of `most` at most: as many parts as there have to be, of about one size.
constexpr std::int64_t EvenShare(std::int64_t count, std::int64_t most) {
  return CeilDiv(count, std::max<std::int64_t>(CeilDiv(count, most), 1));
}

// `product` is what one group would be that had all rows.
struct GroupedMatmulShape {
  MatmulShape product;
  std::int64_t groups = 0;
  GroupedAxis axis = GroupedAxis::kM;
  bool adds = false;  // to what the output holds
  // Of each group, for a price by kinds of groups; empty on a host. A call gives those of the spread of its batch.
  std::vector<std::int64_t> rows = {};

  friend auto operator<=>(const GroupedMatmulShape&, const GroupedMatmulShape&) = default;
};

// How the list of all groups' blocks is dealt to the cores; either way every core gets the same work but for a block.
enum class Dealing : std::uint8_t {
  kRuns,   // Each core a run of neighbours: for caches of its own.
  kTurns,  // Block by block to the core that has least: for a cache that all share.
};
constexpr const char* NameOf(Dealing dealing) { return dealing == Dealing::kRuns ? "runs" : "turns"; }

// How groups of up to `rows` rows are cut, along their columns alone: Matmul's tiling for as many rows, where that reads
// weights in place. 0 rows: there is none.
struct FewRowsTiling {
  std::int64_t rows = 0;
  MatmulTiling block;
};

// Blocks of up to (block.m, block.n), none across two groups. block.grid is not used: groups have grids of their own; and
// block.prefetch counts columns of blocks, not waves.
struct GroupedMatmulTiling {
  MatmulTiling block;
  std::array<FewRowsTiling, 4> few = {};  // The first that a group fits is its own.
  Dealing dealing = Dealing::kRuns;
  std::int64_t row_step = 1;  // Rows of a block are a multiple of this, but for a group's last.
  // Work is counted in rows: a block costs its rows and fixed_work, a column of a group's blocks column_work besides,
  // as its weights come from farther away the first time. Where weights are read ahead a column takes HBM read_work, one after
  // the other, and no block of it ends before.
  std::int64_t fixed_work = 0, column_work = 0, read_work = 0;
  bool cuts_k = false;  // Some group's sums may be cut, as Matmul's are.

  // How a group's sums are.
  KParts PartsOf(std::int64_t m, std::int64_t n, std::int64_t k) const {
    return cuts_k ? HostPartsOf(m, n, k) : KParts();
  }

  // What is not of the block follows from it.
  friend bool operator==(const GroupedMatmulTiling& a, const GroupedMatmulTiling& b) {
    return a.block == b.block && a.dealing == b.dealing;
  }
};

// What a launch gives its cores: a tiling for each spread; on a host, which replays nothing, one for all.
struct GroupedTilings {
  GroupSpreads spreads{0};
  std::vector<GroupedMatmulTiling> of = {};
};

template <class Visit>
void VisitFields(const GroupedMatmulShape& s, Visit&& visit) {
  VisitFields(s.product, visit);
  visit({"groups"}, s.groups), visit({"axis"}, s.axis), visit({"adds"}, s.adds);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, GroupedMatmulTiling>
void VisitFields(const ChipSpec& chip, const GroupedMatmulShape& s, Tiling& t, Visit&& visit) {
  VisitFields(chip, s.product, t.block, visit);
  visit({"dealing", 0, 1}, t.dealing);
  constexpr std::int64_t kMostWork = 1 << 20;
  visit({"fixed_work", 0, kMostWork}, t.fixed_work), visit({"column_work", 0, kMostWork}, t.column_work);
  visit({"read_work", 0, kMostWork}, t.read_work);
}

inline void Complete(const ChipSpec& chip, const GroupedMatmulShape& s, GroupedMatmulTiling& t) {
  t.block.ub_stages = UbStages(chip);
  t.block.ub_rows = UbRows(chip, s.product, t.block);
}

inline auto FamilyOf(const GroupedMatmulTiling& t) {
  return std::tuple_cat(FamilyOf(t.block), std::tuple(t.dealing));
}
// The others of short_list.h's kinds are those of the block; groups have no orders of blocks.
inline auto WalkOf(const GroupedMatmulTiling& t) { return WalkOf(t.block); }
inline auto StepOf(const GroupedMatmulTiling& t) { return StepOf(t.block); }
inline bool DifferInStepAlone(const GroupedMatmulTiling& t, const GroupedMatmulTiling& other) {
  return t.dealing == other.dealing && DifferInStepAlone(t.block, other.block);
}
inline std::vector<GroupedMatmulTiling> OtherOrders(const GroupedMatmulTiling&) { return {}; }
// The Mmads of a call: each group ends with a small block, or a small step.
inline std::int64_t ReplayWork(const GroupedMatmulShape& s, const GroupedMatmulTiling& t) {
  const bool of_rows = s.axis == GroupedAxis::kM;
  const std::int64_t size = std::max<std::int64_t>(of_rows ? t.block.m : t.block.k0, 1);
  std::int64_t cut = of_rows ? CeilDiv(s.product.m, size) : CeilDiv(s.product.k, size);
  if (!s.rows.empty()) cut = 0;
  for (const std::int64_t rows : s.rows) cut += CeilDiv(rows, size);
  const std::int64_t whole =
      of_rows ? CeilDiv(s.product.k, std::max<std::int64_t>(t.block.k0, 1)) : CeilDiv(s.product.m, t.block.m);
  return cut * whole * CeilDiv(s.product.n, t.block.n) * t.block.c_parts;
}

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const GroupedMatmulShape& shape,
                         const GroupedMatmulTiling& tiling, Buffer buffer);
// Whether every ring fits its buffer, and what is packed can be: not the weights, and x only where groups share out its rows.
bool Fits(const ChipSpec& chip, const GroupedMatmulShape& shape, const GroupedMatmulTiling& tiling);

std::vector<GroupedMatmulTiling> Candidates(const ChipSpec& chip, const GroupedMatmulShape& shape);

// Predicted cycles: with the groups' rows block by block as they are dealt, without them the mean of two cases: rows spread
// evenly over the groups, and all rows in one group.
double Price(const ChipSpec& chip, const GroupedMatmulShape& shape, const GroupedMatmulTiling& tiling);

// The cheapest candidate. Remembers its last answers. An error names the buffer that nothing fits.
Status Choose(const ChipSpec& chip, const GroupedMatmulShape& shape, GroupedMatmulTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_GROUPED_MATMUL_TILING_H_
