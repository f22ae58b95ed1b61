#include "tiling/order_cost.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "tiling/memo.h"

namespace cubist {
namespace {

// Waves that are walked one by one; the others are taken to be like the second half of these.
constexpr std::int64_t kMostWaves = 64;

// Rows or columns of blocks, and whether L2 holds what they read: it does until as many bytes as it has were fetched.
class Bands {
 public:
  Bands(std::int64_t bytes, std::int64_t l2_bytes)
      : bytes_(static_cast<double>(bytes)), l2_bytes_(static_cast<double>(l2_bytes)) {}

  // Whether the band comes from HBM in this wave, for the first core that reads it and for those beside it.
  bool Touch(std::int64_t number, std::int64_t wave, double* fetched) {
    Band& band = bands_[number];
    if (band.missed_in != wave && *fetched - band.touched > l2_bytes_) {
      band.missed_in = wave;
      *fetched += bytes_;
    }
    band.touched = *fetched;
    return band.missed_in == wave;
  }

 private:
  struct Band {
    double touched = -std::numeric_limits<double>::infinity();  // how much had been fetched then
    std::int64_t missed_in = -1;                                // the last wave that it came from HBM in
  };
  double bytes_, l2_bytes_;
  std::unordered_map<std::int64_t, Band> bands_;
};

// Cores of the first wave in front of another on the same band: half of the others.
double SharersOf(std::vector<std::int64_t> bands) {
  if (bands.empty()) return 0;
  const auto together = static_cast<double>(bands.size());
  std::sort(bands.begin(), bands.end());
  const auto distinct = static_cast<double>(std::unique(bands.begin(), bands.end()) - bands.begin());
  return (together / distinct - 1) / 2;
}

// One core's blocks. The core that loads most, and most of it from HBM, ends last: the cost is its own.
struct Walker {
  struct Cold {
    double row = 0, col = 0;
  };

  void Visit(const BlockCoord& block, bool cold_row, bool cold_col) {
    stands += row_before == block.row ? 1 : 0;
    row_before = block.row;
    cold.push_back({cold_row ? 1.0 : 0.0, cold_col ? 1.0 : 0.0});
  }
  double StandsShare() const { return cold.empty() ? 0 : stands / static_cast<double>(cold.size()); }
  // Bytes, those from HBM twice.
  double Loaded(const OrderShape& s) const {
    double row_reads = -stands, col_reads = 0;
    for (const Cold& c : cold) row_reads += 1 + c.row, col_reads += 1 + c.col;
    return row_reads * static_cast<double>(s.row_bytes) + col_reads * static_cast<double>(s.col_bytes);
  }

  std::int64_t row_before = -1;
  double stands = 0;            // blocks in the same row as the one before
  std::vector<Cold> cold = {};  // wave by wave
};

OrderCost Walk(const OrderShape& s) {
  OrderCost cost;
  const std::int64_t count = s.grid.count(), waves = CeilDiv(count, s.cores);
  Bands rows(s.row_bytes, s.l2_bytes), cols(s.col_bytes, s.l2_bytes);
  double fetched = 0;
  std::vector<Walker> walkers(static_cast<std::size_t>(s.cores));
  std::vector<std::int64_t> first_rows, first_cols;
  for (std::int64_t w = 0; w < std::min(waves, kMostWaves); ++w) {
    Wave wave;
    const double before = fetched;
    for (std::int64_t core = 0; core < s.cores; ++core) {
      const CoreTasks tasks(s.grid, s.deal, count, core, s.cores);
      if (w >= tasks.count()) continue;
      const BlockCoord block = s.grid.At(tasks[w]);
      if (w == 0) first_rows.push_back(block.row), first_cols.push_back(block.col);
      ++wave.blocks;
      wave.last_row &= block.row == s.grid.rows - 1, wave.last_col &= block.col == s.grid.cols - 1;
      const bool cold_row = rows.Touch(block.row, w, &fetched), cold_col = cols.Touch(block.col, w, &fetched);
      walkers[static_cast<std::size_t>(core)].Visit(block, cold_row, cold_col);
    }
    wave.fetched = fetched - before;
    fetched += wave.blocks * static_cast<double>(s.block_bytes);  // What is written takes room, too.
    cost.waves.push_back(wave);
  }
  const Walker& last = *std::max_element(walkers.begin(), walkers.end(), [&](const auto& x, const auto& y) {
    return x.Loaded(s) < y.Loaded(s);
  });
  cost.stands = last.StandsShare();
  for (std::size_t w = 0; w < last.cold.size(); ++w)
    cost.waves[w].cold_rows = last.cold[w].row, cost.waves[w].cold_cols = last.cold[w].col;
  constexpr std::int64_t kFirstRepeated = kMostWaves / 2;
  for (std::int64_t w = kFirstRepeated; w < kMostWaves && waves > kMostWaves; ++w) {
    cost.waves[static_cast<std::size_t>(w)].times +=
        static_cast<double>(waves - kMostWaves) / static_cast<double>(kMostWaves - kFirstRepeated);
  }
  cost.sharers_a = SharersOf(std::move(first_rows)), cost.sharers_b = SharersOf(std::move(first_cols));
  return cost;
}

}  // namespace

const OrderCost& CostOfOrder(const OrderShape& shape) {
  thread_local Memo<OrderShape, OrderCost> memo;
  if (memo.Find(shape) == nullptr) memo.Keep(shape, Walk(shape));
  return *memo.Find(shape);
}

}  // namespace cubist
