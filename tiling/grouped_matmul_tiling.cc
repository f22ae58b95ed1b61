#include "tiling/grouped_matmul_tiling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

// The shape with its rows to three leading bits, rounded up: tilings are made for those, and a batch that has a few rows
// more than the one before asks for no new choice.
GroupedMatmulShape Rounded(GroupedMatmulShape shape) {
  std::int64_t& rows = shape.axis == GroupedAxis::kM ? shape.product.m : shape.product.k;
  const auto bits =
      static_cast<int>(std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(rows, 0))));
  if (bits > 3) rows = RoundUp(rows, std::int64_t{1} << (bits - 3));
  return shape;
}

std::int64_t RowsOf(const GroupedMatmulShape& s) {
  return s.axis == GroupedAxis::kM ? s.product.m : s.product.k;
}

// `groups` products of `rows` rows each, as one product whose blocks stand below each other.
struct Stacked {
  Stacked(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block, std::int64_t groups,
          std::int64_t rows)
      : shape(s.product), tiling(block), row_blocks(CeilDiv(s.product.m, block.m)) {
    if (s.axis == GroupedAxis::kM) {
      row_blocks = CeilDiv(rows, block.m);
      tiling.m = RoundUp(CeilDiv(rows, row_blocks), chip.RowStep(s.product.in));
    } else {
      shape.k = rows;
    }
    tiling.grid = {groups * row_blocks, CeilDiv(shape.n, block.n)};
    shape.m = tiling.grid.rows * tiling.m;
  }

  MatmulShape shape;
  MatmulTiling tiling;
  std::int64_t row_blocks;  // of a group
};

// Bytes per cycle that a core gets from HBM while all do.
double HbmRate(const ChipSpec& chip) {
  const double share =
      chip.memory.hbm_bytes_per_s / chip.clock_hz / static_cast<double>(chip.concurrent_cores);
  return chip.memory.core_miss_bytes_per_cycle > 0
             ? std::min<double>(share, chip.memory.core_miss_bytes_per_cycle)
             : share;
}

// Cycles by which a block of weights, (k, n), takes longer to load from HBM than from L2.
double FirstTouch(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  // Rows of a plain block touch whole lines.
  const std::int64_t row = std::min(t.n, s.n) * SizeOf(s.in);
  const double bytes =
      static_cast<double>(s.k) * static_cast<double>(s.b_packed ? row : RoundUp(row, chip.memory.l2_line));
  const Path path = s.b_packed ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  const double l2 = LoadRate(chip, path, static_cast<double>(chip.concurrent_cores));
  return bytes * std::max(1 / HbmRate(chip) - 1 / l2, 0.0);
}

double HbmCycles(const ChipSpec& chip, double bytes) {
  return bytes / chip.memory.hbm_bytes_per_s * chip.clock_hz;
}

// Columns of blocks that Vector cores may read ahead (see GroupPrefetch), so that L2 holds them and those that Cube cores are
// at: of two waves. Four gain nothing, and drive out what is still needed where waves are a tenth of L2.
std::int64_t ColumnsAhead(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& t) {
  if (s.axis != GroupedAxis::kM || !MayPrefetch(chip, s.product) || s.groups < 2) return 0;
  constexpr double kEnough = 2, kShare = 0.95;  // The rest of L2 is for what is written.
  const std::int64_t rows = std::max<std::int64_t>(CeilDiv(s.product.m, s.groups), 1),
                     together = std::max<std::int64_t>(chip.concurrent_cores / CeilDiv(rows, t.m), 1),
                     columns = std::min(CeilDiv(s.product.n, t.n), together);
  const double wave = static_cast<double>(chip.OperandBytes(s.product.in)) *
                      static_cast<double>(s.product.k) *
                      static_cast<double>(std::min(s.product.n, columns * t.n) + rows);
  const double held =
      std::floor(kShare * static_cast<double>(chip.memory.l2_bytes) / std::max(wave, 1.0)) - 1;
  return columns * static_cast<std::int64_t>(std::clamp(held, 0.0, kEnough));
}

// Cycles of `groups` products of `rows` rows. Each group's weights come from HBM once, and until they are there the
// rows wait behind them on the same pipe.
double PriceEven(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block,
                 std::int64_t groups, std::int64_t rows) {
  const Stacked stacked(chip, s, block, groups, rows);
  const double price = Price(chip, stacked.shape, stacked.tiling, /*one_product=*/false);
  if (!chip.pipes_overlap || s.axis == GroupedAxis::kK) return price;
  const MatmulTiling& t = stacked.tiling;
  const auto element = static_cast<double>(chip.OperandBytes(s.product.in));
  const Path path = s.product.b_packed ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  const double cores = static_cast<double>(chip.concurrent_cores), k = static_cast<double>(s.product.k);
  const double load =
      2 * static_cast<double>(CeilDiv(s.product.k, t.k1)) * chip.path(path).startup +
      k * static_cast<double>(t.m + std::min(t.n, s.product.n)) * element / LoadRate(chip, path, cores);
  const double touch =
      t.prefetch > 0 ? 0 : FirstTouch(chip, s.product, t) / static_cast<double>(stacked.row_blocks);
  const double once =
      static_cast<double>(groups) * k * element * static_cast<double>(rows + s.product.n);  // from HBM
  const double bound = std::max({price, Waves(chip, t.grid.count()) * (load + touch), HbmCycles(chip, once)});
  // Of tilings that wait for their loads alike the best one has least to do besides.
  constexpr double kBesides = 1e-3;
  return bound + kBesides * price;
}

// The tilings of groups so small that their weights are best read where they lie: of one to six rows, which wait for memory
// alone, of more, which still need most of their time for that, and of as many as are worth it.
void SetFew(const ChipSpec& chip, const GroupedMatmulShape& s, GroupedMatmulTiling* t) {
  constexpr std::int64_t kFewRows[] = {kRowsThatWait, 64, 128, std::numeric_limits<std::int64_t>::max()};
  if (chip.pipes_overlap || s.axis == GroupedAxis::kK) return;
  const std::int64_t most = MostRowsOnce(chip, s.product);
  for (std::size_t i = 0; i < t->few.size(); ++i) {
    MatmulShape few = s.product;
    few.m = std::min({few.m, kFewRows[i], most});
    if (few.m <= (i > 0 ? t->few[i - 1].rows : 0)) continue;  // Which the one before serves, or none can.
    MatmulTiling tiling;
    if (!Choose(chip, few, &tiling).ok() || !tiling.b_once || tiling.m < few.m) continue;
    tiling.pack_a = tiling.pack_b = false;
    tiling.splits = 1, tiling.part_k = 0;
    t->few[i] = {few.m, tiling};
  }
}

// What a block costs besides its rows, and a column of blocks besides its blocks, from the price of blocks of few rows
// and of many.
void SetWork(const ChipSpec& chip, const GroupedMatmulShape& s, GroupedMatmulTiling* t) {
  const MatmulTiling& block = t->block;
  const std::int64_t few = chip.RowStep(s.product.in),
                     many = std::max(s.axis == GroupedAxis::kM ? block.m : 4 * block.k1, 2 * few);
  const std::int64_t groups = 16 * static_cast<std::int64_t>(chip.concurrent_cores);
  const auto price = [&](std::int64_t rows) {
    const Stacked stacked(chip, s, block, groups, rows);
    return Price(chip, stacked.shape, stacked.tiling, /*one_product=*/false) /
           Waves(chip, stacked.tiling.grid.count());
  };
  const double low = price(few), high = price(many), per_row = (high - low) / static_cast<double>(many - few);
  constexpr std::int64_t kMost = 1 << 20;
  if (!(per_row > 0)) {
    t->fixed_work = kMost;  // All blocks weigh the same.
    return;
  }
  t->fixed_work = std::clamp<std::int64_t>(std::llround(low / per_row) - few, 0, kMost);
  if (chip.pipes_overlap && s.axis == GroupedAxis::kM && block.prefetch == 0) {
    t->column_work =
        std::clamp<std::int64_t>(std::llround(FirstTouch(chip, s.product, block) / per_row), 0, kMost);
  }
}

// Whether some group's sums may be cut.
bool MayCutK(const ChipSpec& chip, const GroupedMatmulShape& s) {
  if (chip.pipes_overlap) return false;
  const std::int64_t n = s.product.n, k = s.product.k;
  if (s.axis == GroupedAxis::kK) return HostPartsOf(s.product.m, n, k).count > 1;
  const std::int64_t most_rows = kMostCutOutputs / std::max<std::int64_t>(n, 1);
  return HostPartsOf(std::min(s.product.m, most_rows), n, k).count > 1;
}

// Every tiling that is considered, whether it fits or not, without what follows from it.
std::vector<GroupedMatmulTiling> Tilings(const ChipSpec& chip, const GroupedMatmulShape& shape) {
  std::vector<GroupedMatmulTiling> tilings;
  const bool cuts_k = MayCutK(chip, shape);
  for (MatmulTiling block : GroupCandidates(chip, shape.product)) {
    // Groups have grids of their own. All weights are too much to pack for one use, and the rows of a group begin
    // anywhere, so that a sum over them cannot be cut at the panels of a packed operand.
    if ((chip.pipes_overlap && block.grid.order != BlockOrder::kRowMajor) || block.stagger ||
        block.keep_a > 0 || block.prefetch > 0)
      continue;
    block.splits = 1, block.part_k = 0;
    block.grid = {};
    GroupedMatmulTiling tiling{.block = block,
                               .dealing = chip.pipes_overlap ? Dealing::kTurns : Dealing::kRuns,
                               .row_step = chip.RowStep(shape.product.in)};
    tiling.cuts_k = cuts_k;
    tilings.push_back(tiling);
    const std::int64_t ahead = ColumnsAhead(chip, shape, block);
    if (ahead == 0 || block.pack_a || block.l1_stages < 2) continue;
    tiling.block.prefetch = ahead;
    tilings.push_back(tiling);
  }
  return tilings;
}

}  // namespace

std::int64_t BufferBytes(const ChipSpec& chip, const GroupedMatmulShape& shape,
                         const GroupedMatmulTiling& tiling, Buffer buffer) {
  return BufferBytes(chip, shape.product, tiling.block, buffer);
}

bool Fits(const ChipSpec& chip, const GroupedMatmulShape& shape, const GroupedMatmulTiling& tiling) {
  if (tiling.block.pack_b || (tiling.block.pack_a && shape.axis == GroupedAxis::kK)) return false;
  if (tiling.block.keep_a > 0) return false;  // Of the grid of one product.
  return Fits(chip, shape.product, tiling.block);
}

std::vector<GroupedMatmulTiling> Candidates(const ChipSpec& chip, const GroupedMatmulShape& exact) {
  const GroupedMatmulShape shape = Rounded(exact);
  std::vector<GroupedMatmulTiling> candidates = Tilings(chip, shape);
  std::erase_if(candidates, [&](const GroupedMatmulTiling& t) { return !Fits(chip, shape, t); });
  for (GroupedMatmulTiling& t : candidates) SetWork(chip, shape, &t), SetFew(chip, shape, &t);
  return candidates;
}

double Price(const ChipSpec& chip, const GroupedMatmulShape& exact, const GroupedMatmulTiling& tiling) {
  const GroupedMatmulShape shape = Rounded(exact);
  const std::int64_t groups = std::max<std::int64_t>(shape.groups, 1);
  const std::int64_t rows = std::max<std::int64_t>(RowsOf(shape), 1);
  const double even = PriceEven(chip, shape, tiling.block, groups, CeilDiv(rows, groups));
  const double one = PriceEven(chip, shape, tiling.block, 1, rows);
  return (even + one) / 2;
}

Status Choose(const ChipSpec& chip, const GroupedMatmulShape& exact, GroupedMatmulTiling* tiling) {
  const GroupedMatmulShape shape = Rounded(exact);
  const auto choose = [&](GroupedMatmulTiling* cheapest) -> Status {
    if (!FindCheapest(chip, shape, Tilings(chip, shape), cheapest)) {
      MatmulTiling none;
      return Choose(chip, shape.product, &none);  // Which says what does not fit.
    }
    SetWork(chip, shape, cheapest);
    SetFew(chip, shape, cheapest);
    return {};
  };
  return ChooseOnce(chip, shape, choose, tiling);
}

}  // namespace cubist
