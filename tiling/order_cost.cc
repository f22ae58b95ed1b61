#include "tiling/order_cost.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "tiling/memo.h"

namespace cubist {
namespace {

// Waves that are walked one by one; the others are taken to be like the second half of these.
constexpr std::int64_t kMostWaves = 64;

// What L2 has to hold, wave by wave: rows and columns of blocks, bands, which cores of a wave read side by side, and what
// they write.
class Uses {
 public:
  explicit Uses(std::int64_t l2_bytes) : l2_bytes_(static_cast<double>(l2_bytes)) {}

  // A wave that uses so much.
  void Begin(double bytes) { used_.push_back(bytes), newest_.push_back(0); }
  // The share of a band, last used in wave `last` (-1: never), that comes from HBM in this one: what else was used since then
  // has taken its place. As cores drift apart, part of what fits is lost, and part of what does not is still met; fitted
  // to replays of 2048 x 7168 x 18432 behind an L2 of 150 to 400 MB.
  double Missing(std::int64_t last) const {
    if (last < 0) return 1;
    constexpr double kAllHeld = 4.0 / 3, kAllLost = 0.58;  // L2 over what was used
    double between = (used_[static_cast<std::size_t>(last)] + used_.back()) / 2;
    for (std::size_t w = static_cast<std::size_t>(last) + 1; w + 1 < used_.size(); ++w) between += newest_[w];
    if (between <= 0) return 0;
    return std::clamp((kAllHeld - l2_bytes_ / between) / (kAllHeld - kAllLost), 0.0, 1.0);
  }
  // Bytes are used in this wave, after wave `last` or for the first time.
  void Use(double bytes, std::int64_t last) {
    if (last >= 0) newest_[static_cast<std::size_t>(last)] -= bytes;
    newest_.back() += bytes;
  }

 private:
  double l2_bytes_;
  std::vector<double> used_;    // in each wave
  std::vector<double> newest_;  // of these, not used in a later one
};

// Rows or columns of blocks.
class Bands {
 public:
  struct Band {
    std::int64_t now = -1, last = -1;  // the waves that use it: the newest, and the one before
    double missing =
        0;  // the share that comes from HBM, for the first core that reads it and for those beside it
  };

  explicit Bands(std::int64_t bytes) : bytes_(static_cast<double>(bytes)) {}

  // Wave `w` uses it. The band stays where it is.
  const Band* Add(std::int64_t number, std::int64_t w) {
    Band& band = bands_[number];
    if (band.now != w) {
      band.last = band.now, band.now = w;
      touched_.push_back(&band);
    }
    return &band;
  }
  // Of those added.
  double bytes() const { return static_cast<double>(touched_.size()) * bytes_; }
  // What of those added comes from HBM.
  double Fetch(const Uses& uses) {
    double fetched = 0;
    for (Band* band : touched_) {
      band->missing = uses.Missing(band->last);
      fetched += band->missing * bytes_;
    }
    return fetched;
  }
  // Those added have been used.
  void Use(Uses& uses) {
    for (const Band* band : touched_) uses.Use(bytes_, band->last);
    touched_.clear();
  }

 private:
  double bytes_;
  std::unordered_map<std::int64_t, Band> bands_;
  std::vector<Band*> touched_;
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

  void Visit(const BlockCoord& block, const Cold& missing) {
    stands += row_before == block.row ? 1 : 0;
    row_before = block.row;
    cold.push_back(missing);
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
  Bands rows(s.row_bytes), cols(s.col_bytes);
  Uses uses(s.l2_bytes);
  std::vector<Walker> walkers(static_cast<std::size_t>(s.cores));
  std::vector<std::int64_t> first_rows, first_cols;
  struct Visited {
    BlockCoord block;
    const Bands::Band *row = nullptr, *col = nullptr;  // none where the core has no block in this wave
  };
  std::vector<Visited> visited(static_cast<std::size_t>(s.cores));
  for (std::int64_t w = 0; w < std::min(waves, kMostWaves); ++w) {
    Wave wave;
    for (std::int64_t core = 0; core < s.cores; ++core) {
      const CoreTasks tasks(s.grid, s.deal, count, core, s.cores);
      Visited& v = visited[static_cast<std::size_t>(core)];
      v.row = nullptr;
      if (w >= tasks.count()) continue;
      v.block = s.grid.At(tasks[w]);
      const BlockCoord& block = v.block;
      if (w == 0) first_rows.push_back(block.row), first_cols.push_back(block.col);
      ++wave.blocks;
      wave.last_row &= block.row == s.grid.rows - 1, wave.last_col &= block.col == s.grid.cols - 1;
      v.row = rows.Add(block.row, w), v.col = cols.Add(block.col, w);
    }
    const double bytes = rows.bytes() + cols.bytes();
    const double written = wave.blocks * static_cast<double>(s.block_bytes);  // Which takes room, too.
    uses.Begin(bytes + written);
    wave.fetched = rows.Fetch(uses) + cols.Fetch(uses);
    rows.Use(uses), cols.Use(uses), uses.Use(written, -1);
    for (std::size_t core = 0; core < visited.size(); ++core) {
      if (const Visited& v = visited[core]; v.row != nullptr)
        walkers[core].Visit(v.block, {v.row->missing, v.col->missing});
    }
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
