#include "tiling/grouped_matmul_tiling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
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

// `groups` products of `rows` rows each, as one product whose blocks stand below each other. Those of weights' gradients are a
// batch on an NPU: rows of x, which lie across their sums, are no longer for there being many.
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
    const bool as_batch = chip.pipes_overlap && s.axis == GroupedAxis::kK;
    if (as_batch) shape.batches = groups;
    tiling.grid = {as_batch ? row_blocks : groups * row_blocks, CeilDiv(shape.n, block.n)};
    if (!as_batch) shape.m = tiling.grid.rows * tiling.m;
  }

  std::int64_t blocks() const { return shape.batches * tiling.grid.count(); }

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
  // Rows of a plain block touch whole lines: those across k, of n, each; those along k, as transposed weights have them, once
  // for all their pieces.
  const std::int64_t columns = std::min(t.n, s.n), size = SizeOf(s.in);
  const std::int64_t rows = s.b_row_bytes > 0 ? s.k : columns,
                     row = (s.b_row_bytes > 0 ? columns : s.k) * size;
  const double bytes =
      static_cast<double>(rows) * static_cast<double>(s.b_packed ? row : RoundUp(row, chip.memory.l2_line));
  const Path path = s.b_packed ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  const double l2 = LoadRate(chip, path, static_cast<double>(chip.concurrent_cores));
  return bytes * std::max(1 / HbmRate(chip) - 1 / l2, 0.0);
}

double HbmCycles(const ChipSpec& chip, double bytes) {
  return bytes / chip.memory.hbm_bytes_per_s * chip.clock_hz;
}

// Columns of blocks that Vector cores may read ahead (see GroupPrefetch), so that L2 holds them and those that Cube cores are at,
// each with its part of the rows and its output: of one such wave at least, where two fit.
std::int64_t ColumnsAhead(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& t) {
  if (s.axis != GroupedAxis::kM || !MayPrefetch(chip, s.product) || s.groups < 2) return 0;
  constexpr double kShare = 0.8, kShareOfTwo = 0.95;
  const std::int64_t rows = std::max<std::int64_t>(CeilDiv(s.product.m, s.groups), 1),
                     together = std::max<std::int64_t>(chip.concurrent_cores / CeilDiv(rows, t.m), 1),
                     columns = std::max<std::int64_t>(CeilDiv(s.product.n, t.n), 1),
                     at_once = std::min(columns, together);
  const double l2 = static_cast<double>(chip.memory.l2_bytes),
               n = static_cast<double>(std::min(s.product.n, t.n)),
               word = static_cast<double>(chip.OperandBytes(s.product.in)) * static_cast<double>(s.product.k),
               all_rows = word * static_cast<double>(rows), weights = word * n,
               out = static_cast<double>(rows * SizeOf(s.product.out)) * n;
  const double of_wave = static_cast<double>(at_once) * (weights + out) + all_rows,
               of_column = weights + out + all_rows / static_cast<double>(columns);
  const auto held =
      static_cast<std::int64_t>(std::max(kShare * l2 - of_wave, 0.0) / std::max(of_column, 1.0));
  if (2 * of_wave > kShareOfTwo * l2) return 0;
  return held < at_once ? std::max(held, EvenShare(columns, at_once)) : held;
}

// Cycles of `groups` products of `rows` rows on a core's pipes. Each group's weights come from HBM once, and until they are
// there the rows wait behind them on the same pipe.
double PipesEven(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block,
                 std::int64_t groups, std::int64_t rows) {
  const Stacked stacked(chip, s, block, groups, rows);
  const double price = Price(chip, stacked.shape, stacked.tiling, /*one_product=*/false);
  if (!chip.pipes_overlap || s.axis == GroupedAxis::kK) return price;
  const MatmulTiling& t = stacked.tiling;
  const Path path = s.product.b_packed ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  const double cores = static_cast<double>(chip.concurrent_cores);
  // Where the next tile or piece is on its way beside the one before, it is not waited for from the start.
  const bool beside = t.l1_stages > 1 || t.pieces > 1;
  const double latency = beside ? chip.path(path).gap : chip.path(path).startup;
  const double load = 2 * static_cast<double>(CeilDiv(s.product.k, t.k1)) * latency +
                      static_cast<double>(s.product.k * (t.m + std::min(t.n, s.product.n)) *
                                          chip.OperandBytes(s.product.in)) /
                          LoadRate(chip, path, cores);
  const double touch =
      t.prefetch > 0 ? 0 : FirstTouch(chip, s.product, t) / static_cast<double>(stacked.row_blocks);
  return std::max(price, Waves(chip, t.grid.count()) * (load + touch));
}

// Cycles of an NPU's HBM: it gives operands once, and what is added to; it takes the output, but for what of it is in L2 at the
// end, which then holds its share of all that passed; and it turns around between the two.
double HbmEven(const ChipSpec& chip, const GroupedMatmulShape& s, std::int64_t groups, std::int64_t rows) {
  if (!chip.pipes_overlap) return 0;
  MatmulShape one = s.product;
  (s.axis == GroupedAxis::kM ? one.m : one.k) = rows;
  const auto bytes = [&](std::int64_t n, std::int64_t m, std::int64_t size) {
    return static_cast<double>(groups) * static_cast<double>(n) * static_cast<double>(m) *
           static_cast<double>(size);
  };
  const double in = bytes(one.m + one.n, one.k, chip.OperandBytes(one.in)),
               out = bytes(one.m, one.n, SizeOf(one.out)), read = in + (s.adds ? out : 0),
               written = out * std::max(1 - static_cast<double>(chip.memory.l2_bytes) / (in + out), 0.0);
  return HbmCycles(chip, read + written + chip.memory.turn_around * std::min(read, written));
}

// Of tilings that wait for memory alike the best one has least to do besides.
double WithHbm(const ChipSpec& chip, double pipes, double hbm) {
  constexpr double kBesides = 1e-3;
  return std::max(pipes, hbm) + (chip.pipes_overlap ? kBesides * pipes : 0);
}

double PriceEven(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block,
                 std::int64_t groups, std::int64_t rows) {
  return WithHbm(chip, PipesEven(chip, s, block, groups, rows), HbmEven(chip, s, groups, rows));
}

// Groups of about the same number of rows.
struct LikeGroups {
  std::int64_t rows = 0, count = 0;
};
// Those that have rows, in their order; of more than a few, by size.
std::vector<LikeGroups> LikeGroupsOf(const std::vector<std::int64_t>& rows) {
  constexpr std::size_t kMost = 8;
  std::vector<std::int64_t> all;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(all), [](std::int64_t r) { return r > 0; });
  if (all.size() > kMost) std::sort(all.begin(), all.end(), std::greater<>());
  const std::size_t parts = std::min(all.size(), kMost);
  const auto at = [&](std::size_t part) {
    return all.begin() + static_cast<std::ptrdiff_t>(part * all.size() / parts);
  };
  std::vector<LikeGroups> groups;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::int64_t count = at(i + 1) - at(i),
                       mean = CeilDiv(std::accumulate(at(i), at(i + 1), std::int64_t{0}), count);
    if (groups.empty() || groups.back().rows != mean) groups.push_back({mean, 0});
    groups.back().count += count;
  }
  return groups;
}

// Cores to which blocks are dealt in turns.
class Turns {
 public:
  explicit Turns(std::int64_t cores) : work_(static_cast<std::size_t>(cores)) {}

  void Deal(std::int64_t blocks, double cycles) {
    while (blocks > 0 && last() - *std::min_element(work_.begin(), work_.end()) > cycles)
      DealOne(cycles), --blocks;
    // Cores that are no more than a block apart get as many each.
    const std::int64_t each = blocks / std::ssize(work_);
    for (double& work : work_) work += static_cast<double>(each) * cycles;
    for (std::int64_t i = each * std::ssize(work_); i < blocks; ++i) DealOne(cycles);
  }
  double last() const { return *std::max_element(work_.begin(), work_.end()); }

 private:
  void DealOne(double cycles) { *std::min_element(work_.begin(), work_.end()) += cycles; }
  std::vector<double> work_;
};

// Cycles of groups whose rows are known: a block of each kind takes what it does among many of its kind.
double PriceKnown(const ChipSpec& chip, const GroupedMatmulShape& s, const MatmulTiling& block) {
  const std::vector<LikeGroups> kinds = LikeGroupsOf(s.rows);
  if (kinds.empty() || Stacked(chip, s, block, 1, kinds[0].rows).blocks() == 0) return 0;
  const std::int64_t many = 16 * static_cast<std::int64_t>(chip.concurrent_cores);
  Turns turns(chip.concurrent_cores);
  double fixed = 0, hbm = 0;
  for (const LikeGroups& kind : kinds) {
    const auto waves = [&](std::int64_t groups) {
      return Waves(chip, Stacked(chip, s, block, groups, kind.rows).blocks());
    };
    const double pipes = PipesEven(chip, s, block, many, kind.rows);
    const double cycles =
        (PipesEven(chip, s, block, 2 * many, kind.rows) - pipes) / (waves(2 * many) - waves(many));
    fixed = std::max(fixed, pipes - waves(many) * cycles);
    hbm += HbmEven(chip, s, kind.count, kind.rows);
    turns.Deal(Stacked(chip, s, block, kind.count, kind.rows).blocks(), cycles);
  }
  const double start =
      block.prefetch > 0 && !s.product.epilogue.vector ? chip.sync.mixed_launch_s * chip.clock_hz : 0;
  return start + WithHbm(chip, fixed - start + turns.last(), hbm);
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

// What a block costs besides its rows, and a column of blocks besides its blocks or before them, from the price of blocks of
// few rows and of many.
void SetWork(const ChipSpec& chip, const GroupedMatmulShape& s, GroupedMatmulTiling* t) {
  const MatmulTiling& block = t->block;
  const std::int64_t few = chip.RowStep(s.product.in),
                     many = std::max(s.axis == GroupedAxis::kM ? block.m : 4 * block.k1, 2 * few);
  const std::int64_t groups = 16 * static_cast<std::int64_t>(chip.concurrent_cores);
  const auto price = [&](std::int64_t rows) {
    const Stacked stacked(chip, s, block, groups, rows);
    return Price(chip, stacked.shape, stacked.tiling, /*one_product=*/false) / Waves(chip, stacked.blocks());
  };
  const double low = price(few), high = price(many), per_row = (high - low) / static_cast<double>(many - few);
  constexpr std::int64_t kMost = 1 << 20;
  if (!(per_row > 0)) {
    t->fixed_work = kMost;  // All blocks weigh the same.
    return;
  }
  t->fixed_work = std::clamp<std::int64_t>(std::llround(low / per_row) - few, 0, kMost);
  if (!chip.pipes_overlap || s.axis == GroupedAxis::kK) return;
  const auto work_of = [&](double cycles) {
    return std::clamp<std::int64_t>(std::llround(cycles / per_row), 0, kMost);
  };
  if (block.prefetch > 0) {
    t->read_work = work_of(HbmCycles(chip, static_cast<double>(s.product.k * std::min(block.n, s.product.n) *
                                                               chip.OperandBytes(s.product.in))));
  } else {
    t->column_work = work_of(FirstTouch(chip, s.product, block));
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

// Before a launch's cores see their batch it is settled whether x is packed: for every spread as is cheapest for even groups.
void SettlePacking(const ChipSpec& chip, GroupedMatmulShape shape,
                   std::vector<GroupedMatmulTiling>* candidates) {
  const auto packs = [](const GroupedMatmulTiling& t) { return t.block.pack_a; };
  const auto all = std::count_if(candidates->begin(), candidates->end(), packs);
  if (!chip.pipes_overlap || all == 0 || all == std::ssize(*candidates)) return;
  if (!shape.rows.empty())
    shape.rows.assign(shape.rows.size(), CeilDiv(shape.product.m, std::ssize(shape.rows)));
  std::array<double, 2> least;
  least.fill(std::numeric_limits<double>::infinity());
  for (const GroupedMatmulTiling& t : *candidates)
    least[packs(t)] = std::min(least[packs(t)], Price(chip, shape, t));
  const bool packed = least[true] < least[false];
  std::erase_if(*candidates, [&](const GroupedMatmulTiling& t) { return packs(t) != packed; });
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
  SettlePacking(chip, shape, &candidates);
  for (GroupedMatmulTiling& t : candidates) SetWork(chip, shape, &t), SetFew(chip, shape, &t);
  return candidates;
}

double Price(const ChipSpec& chip, const GroupedMatmulShape& exact, const GroupedMatmulTiling& tiling) {
  const GroupedMatmulShape shape = Rounded(exact);
  if (!shape.rows.empty()) return PriceKnown(chip, shape, tiling.block);
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
