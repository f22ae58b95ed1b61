#include "tiling/grouped_matmul_tiling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "tiling/memo.h"

namespace cubist {
namespace {

// The same number with its three leading bits, rounded up: choices are kept by it, and a batch that has a few rows more
// than the one before asks for no new choice.
std::int64_t Rounded(std::int64_t rows) {
  const auto bits =
      static_cast<int>(std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(rows, 0))));
  return bits <= 3 ? rows : RoundUp(rows, std::int64_t{1} << (bits - 3));
}

std::int64_t RowsOf(const GroupedMatmulShape& s) {
  return s.axis == GroupedAxis::kM ? s.product.m : s.product.k;
}

// Cycles of `groups` products of `rows` rows each, as one product whose blocks stand below each other. Every group
// reads a right operand of its own.
double PriceEven(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block,
                 std::int64_t groups, std::int64_t rows) {
  MatmulShape stacked = s.product;
  MatmulTiling t = block;
  std::int64_t row_blocks = CeilDiv(stacked.m, t.m);
  if (s.axis == GroupedAxis::kM) {
    row_blocks = CeilDiv(rows, t.m);
    t.m = RoundUp(CeilDiv(rows, row_blocks), chip.mmad.m_step);
  } else {
    stacked.k = rows;
  }
  t.grid = {groups * row_blocks, CeilDiv(stacked.n, t.n)};
  stacked.m = t.grid.rows * t.m;
  const double weights = static_cast<double>(groups) * static_cast<double>(stacked.k * stacked.n) *
                         static_cast<double>(SizeOf(stacked.in));
  return std::max(Price(chip, stacked, t), weights / chip.memory.hbm_bytes_per_s * chip.clock_hz);
}

// What a block costs besides its rows, from the price of many blocks of few rows and of many.
std::int64_t FixedWork(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block) {
  const std::int64_t few = chip.mmad.m_step,
                     many = std::max(s.axis == GroupedAxis::kM ? block.m : block.k1, 2 * few);
  const std::int64_t groups = 16 * static_cast<std::int64_t>(chip.concurrent_cores);
  const double low = PriceEven(chip, s, block, groups, few), high = PriceEven(chip, s, block, groups, many);
  const double per_row = (high - low) / static_cast<double>(many - few);
  if (!(per_row > 0)) return many;  // Memory bounds both: all blocks weigh about the same.
  return std::clamp<std::int64_t>(std::llround(low / per_row) - few, 0, 1 << 20);
}

}  // namespace

bool Fits(const ChipSpec& chip, const GroupedMatmulShape& shape, const GroupedMatmulTiling& tiling) {
  if (tiling.block.pack_b || (tiling.block.pack_a && shape.axis == GroupedAxis::kK)) return false;
  return Fits(chip, shape.product, tiling.block);
}

std::vector<GroupedMatmulTiling> Candidates(const ChipSpec& chip, const GroupedMatmulShape& shape) {
  std::vector<GroupedMatmulTiling> candidates;
  for (MatmulTiling block : Candidates(chip, shape.product)) {
    // Groups have grids of their own. All weights are too much to pack for one use, and the rows of a group begin
    // anywhere, so that a sum over them cannot be cut at the panels of a packed operand.
    if (block.grid.order != BlockOrder::kRowMajor) continue;
    block.grid = {};
    const GroupedMatmulTiling tiling{.block = block, .row_step = chip.mmad.m_step, .fixed_work = 0};
    if (Fits(chip, shape, tiling)) candidates.push_back(tiling);
  }
  return candidates;
}

double Price(const ChipSpec& chip, const GroupedMatmulShape& shape, const GroupedMatmulTiling& tiling) {
  const std::int64_t groups = std::max<std::int64_t>(shape.groups, 1);
  const std::int64_t rows = std::max<std::int64_t>(RowsOf(shape), 1);
  const double even = PriceEven(chip, shape, tiling.block, groups, CeilDiv(rows, groups));
  const double one = PriceEven(chip, shape, tiling.block, 1, rows);
  return (even + one) / 2;
}

Status Choose(const ChipSpec& chip, const GroupedMatmulShape& exact, GroupedMatmulTiling* tiling) {
  GroupedMatmulShape shape = exact;
  std::int64_t& rows = shape.axis == GroupedAxis::kM ? shape.product.m : shape.product.k;
  rows = Rounded(rows);
  using Key = std::pair<const ChipSpec*, GroupedMatmulShape>;
  thread_local Memo<Key, GroupedMatmulTiling> memo;
  const bool memoised = &chip == &HostChip();
  if (const GroupedMatmulTiling* known = memoised ? memo.Find({&chip, shape}) : nullptr) {
    *tiling = *known;
    return {};
  }
  double best = std::numeric_limits<double>::infinity();
  for (const GroupedMatmulTiling& candidate : Candidates(chip, shape)) {
    const double price = Price(chip, shape, candidate);
    if (price < best) best = price, *tiling = candidate;
  }
  if (best == std::numeric_limits<double>::infinity()) {
    MatmulTiling none;
    return Choose(chip, shape.product, &none);  // Which says what does not fit.
  }
  tiling->fixed_work = FixedWork(chip, shape, tiling->block);
  if (memoised) memo.Keep({&chip, shape}, *tiling);
  return {};
}

}  // namespace cubist
