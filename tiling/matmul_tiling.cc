#include "tiling/matmul_tiling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

std::int64_t Need(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, Buffer buffer) {
  switch (buffer) {
    case Buffer::kL1: {
      const std::int64_t bias = s.bias ? chip.SlotBytes(Buffer::kL1, DType::kF32, 1, t.n) : 0;
      return t.l1_stages * (chip.SlotBytes(Buffer::kL1, s.in, t.m, t.k1) +
                            chip.SlotBytes(Buffer::kL1, s.in, t.k1, t.n)) +
             bias;
    }
    case Buffer::kL0A:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0A, s.in, t.m, t.k0);
    case Buffer::kL0B:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0B, s.in, t.k0, t.n);
    case Buffer::kL0C:
      return t.l0c_stages * chip.SlotBytes(Buffer::kL0C, DType::kF32, t.m, t.n);
    case Buffer::kBT:
      return chip.SlotBytes(Buffer::kBT, DType::kF32, 1, s.bias ? t.n : 1);
    default:
      return 0;
  }
}

// Whether a Mmad reads A's rows where they lie in GM.
bool LoadedInPlace(const ChipSpec& chip, const MatmulShape& s) {
  return s.a_row_bytes > 0 && s.a_row_bytes <= chip.packing.a_in_place_bytes &&
         chip.OperandBytes(s.in) == SizeOf(s.in);
}

// Whether B serves so few rows that its rows are read where they lie. Elements that change their form on the way pay
// for it once per strip of rows, so one strip is the most.
bool ReadOnce(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kMostRows = 64;
  const bool as_stored = s.in == DType::kF32;
  return s.b_row_bytes > 0 && !s.b_packed && s.m <= (as_stored ? kMostRows : chip.mmad.m_step);
}

// Columns that such a tile has at least: memory gives long runs faster than short ones.
constexpr std::int64_t kShortestRun = 256;

// Every tiling that is considered, whether it fits or not.
std::vector<MatmulTiling> AllTilings(const ChipSpec& chip, const MatmulShape& s) {
  const std::int64_t element = chip.OperandBytes(s.in);
  const std::int64_t k_step = std::max(chip.mmad.k_bytes / element, chip.packing.row_multiple);
  std::vector<MatmulTiling> tilings;
  const auto add = [&](MatmulTiling t) {
    // Where a cache stands for the buffers, an L0B panel set or an accumulator
    // beyond its share is not worth pricing.
    if (!chip.pipes_overlap && ((!t.b_once && t.k0 * t.n * element > chip.buffer(Buffer::kL0B).fast) ||
                                t.m * t.n * 4 > 2 * chip.buffer(Buffer::kL0C).fast)) {
      return;
    }
    if (s.b_packed && t.n < s.n && t.n % kWidestPanel != 0) return;
    t.grid = {CeilDiv(s.m, t.m), CeilDiv(s.n, t.n), BlockOrder::kRowMajor, 1};
    tilings.push_back(t);
    if (t.grid.rows > 1 && t.grid.cols > 1) {
      t.grid.order = BlockOrder::kSwizzled, t.grid.width = 4;
      tilings.push_back(t);
      t.grid.order = BlockOrder::kDiagonal, t.grid.width = 8;
      tilings.push_back(t);
    }
  };
  const auto for_each_shape = [&](auto&& visit) {
    for (std::int64_t m : TileSizes({16, 32, 64, 128, 192, 256, 512}, chip.mmad.m_step, s.m)) {
      for (std::int64_t n : TileSizes({16, 32, 64, 128, 192, 256, 512}, chip.mmad.n_step, s.n)) {
        for (std::int64_t k0 : TileSizes({16, 32, 64, 128, 256, 384, 512}, k_step, s.k)) {
          MatmulTiling t;
          t.m = m, t.n = n, t.k0 = t.k1 = k0;
          visit(t);
        }
      }
    }
  };
  // One thread: nothing to buffer, but whole operands may be packed first.
  const auto add_serial = [&](MatmulTiling t) {
    t.l1_stages = t.l0_stages = 1;
    if (t.m >= s.m && ReadOnce(chip, s) && (t.n >= kShortestRun || t.n >= s.n)) {
      MatmulTiling once = t;
      once.b_once = true;
      add(once);
    }
    for (int packing = 0; packing < 4; ++packing) {
      t.pack_a = (packing & 1) != 0, t.pack_b = (packing & 2) != 0;
      if (t.pack_a && (s.a_packed || CeilDiv(s.n, t.n) == 1 || LoadedInPlace(chip, s))) continue;
      if (t.pack_b && (s.b_packed || CeilDiv(s.m, t.m) == 1)) continue;
      add(t);
    }
  };
  const auto add_overlapped = [&](MatmulTiling t) {
    for (std::int64_t factor : {1, 2, 4, 8}) {
      t.k1 = t.k0 * factor;
      if (factor > 1 && t.k1 >= s.k + t.k0) break;
      for (int stages : {2, 1}) {
        t.l1_stages = t.l0_stages = stages;
        for (int l0c_stages : {1, 2}) {
          t.l0c_stages = l0c_stages;
          for (int pieces : {1, 2, 4}) {
            if (pieces > factor || (pieces > 1 && (s.a_packed || s.b_packed))) break;
            t.pieces = pieces;
            for (bool stagger : {false, true}) {
              if (stagger && (!s.any_order || t.k1 >= s.k)) break;
              t.stagger = stagger;
              add(t);
            }
          }
          t.pieces = 1, t.stagger = false;
        }
      }
    }
  };
  for_each_shape([&](const MatmulTiling& t) { chip.pipes_overlap ? add_overlapped(t) : add_serial(t); });
  return tilings;
}

}  // namespace

bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling) {
  return FitsBuffers(chip, [&](Buffer buffer) { return Need(chip, shape, tiling, buffer); });
}

namespace {

// How many other cores are in front of one that reads a line of A or B: those that run together and share a row or a
// column of blocks ask for the same lines at once, unless they begin at different places along k.
struct Sharers {
  double a = 0, b = 0;
};
Sharers SharersOf(const BlockGrid& grid, std::int64_t cores, double steps) {
  const std::int64_t together = std::min(cores, grid.count());
  std::vector<std::int64_t> rows, cols;
  for (std::int64_t i = 0; i < together; ++i) {
    const BlockCoord block = grid.At(i);
    rows.push_back(block.row), cols.push_back(block.col);
  }
  const auto others = [&](std::vector<std::int64_t>& of) {
    std::sort(of.begin(), of.end());
    const auto distinct = static_cast<double>(std::unique(of.begin(), of.end()) - of.begin());
    return distinct == 0 ? 0 : (static_cast<double>(together) / distinct - 1) / 2 / steps;
  };
  return {others(rows), others(cols)};
}

}  // namespace

// Cycles of the busiest core: per block the slowest pipe (or the sum, where pipes share a thread), times its
// blocks; or the time that HBM needs for everything once, whichever is longer. Blocks at the edges are
// smaller: what counts is the mean over all blocks.
double Price(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, bool one_product) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double bytes = d(chip.OperandBytes(s.in)), blocks = d(std::max<std::int64_t>(t.grid.count(), 1));
  const double steps0 = std::max(1.0, d(CeilDiv(s.k, t.k0))), steps1 = std::max(1.0, d(CeilDiv(s.k, t.k1)));
  const double cores = d(std::min<std::int64_t>(chip.concurrent_cores, t.grid.count()));
  const double m = d(s.m) / d(std::max<std::int64_t>(t.grid.rows, 1)),
               n = d(s.n) / d(std::max<std::int64_t>(t.grid.cols, 1));

  const std::int64_t m_edge = s.m - (t.grid.rows - 1) * t.m, n_edge = s.n - (t.grid.cols - 1) * t.n;
  const auto mmads = [&](std::int64_t rows, std::int64_t cols) {
    return std::floor(d(s.k) / d(t.k0)) * MmadCycles(chip, s.in, rows, t.k0, cols) +
           (s.k % t.k0 != 0 ? MmadCycles(chip, s.in, rows, s.k % t.k0, cols) : 0);
  };
  const double mmad =
      (d((t.grid.rows - 1) * (t.grid.cols - 1)) * mmads(t.m, t.n) + d(t.grid.rows - 1) * mmads(t.m, n_edge) +
       d(t.grid.cols - 1) * mmads(m_edge, t.n) + mmads(m_edge, n_edge)) /
      blocks;
  const double mte1 = PathCycles(chip, Path::kL1ToL0A, m * d(s.k) * bytes, steps0) +
                      PathCycles(chip, Path::kL1ToL0B, d(s.k) * n * bytes, steps0);
  const bool queues = one_product && chip.memory.same_line > 0;
  const Sharers others =
      queues ? SharersOf(t.grid, chip.concurrent_cores, t.stagger ? steps1 : 1) : Sharers();
  const auto load = [&](bool in_layout, double elements, double row, double in_front) {
    const Path path = in_layout ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
    // L2 gives whole lines: short rows cost more than their bytes.
    const double line = d(chip.memory.l2_line), row_bytes = std::max(row * bytes, 1.0);
    const double moved =
        elements * bytes *
        (in_layout || !chip.pipes_overlap ? 1.0 : std::ceil(row_bytes / line) * line / row_bytes);
    // As many lines are on their way at a time as hide the startup; each waits for those in front of it.
    const double queueing = queues ? moved / chip.path(path).bytes_per_cycle * chip.memory.same_line *
                                         in_front / std::max<double>(chip.path(path).startup, 1)
                                   : 0;
    // Further pieces of a tile begin while the first is under way.
    return steps1 * (chip.path(path).startup + d(t.pieces - 1) * chip.path(path).gap) +
           moved / LoadRate(chip, path, cores) + queueing;
  };
  const double mte2 = load(t.pack_a || s.a_packed || LoadedInPlace(chip, s), m * d(s.k),
                           s.a_row_bytes > 0 ? d(std::min(t.piece(), s.k)) : m, others.a) +
                      load(t.pack_b || t.b_once || s.b_packed, d(s.k) * n,
                           s.b_row_bytes > 0 ? n : d(std::min(t.piece(), s.k)), others.b);
  const double fix = PathCycles(chip, Path::kL0CToGm, m * n * d(SizeOf(s.out)), 1);
  const double issue = steps0 * 3 * chip.scalar.issue;

  const bool buffered = t.l1_stages > 1 && t.l0_stages > 1;
  double block = Overlap(chip, buffered, {mmad, mte1, mte2, issue});
  if (chip.pipes_overlap && t.l0c_stages > 1) {
    block = std::max(block, fix);
  } else {
    block += fix;
  }
  // The first piece of a chain of blocks is not hidden.
  const double startups = 2 * chip.path(Path::kGmToL1Nd2Nz).startup;  // of A and of B
  const double tile = mte2 / steps1;
  const double fill =
      chip.pipes_overlap ? std::min(tile, startups + (tile - startups) / d(t.pieces)) + mte1 / steps0 : 0;
  double total = fill + Waves(chip, t.grid.count()) * block;

  const auto pack = [&](bool packed, double elements) {
    if (!packed) return 0.0;
    return chip.sync.barrier_s * chip.clock_hz +
           elements * bytes * 2 / LoadRate(chip, Path::kGmToL1Nd2Nz, d(chip.concurrent_cores)) /
               d(chip.concurrent_cores);
  };
  // On a host, more than one block means more than one thread, which must be woken.
  if (!chip.pipes_overlap && t.grid.count() > 1) total += chip.sync.barrier_s * chip.clock_hz;
  total += pack(t.pack_a, d(s.m) * d(s.k)) + pack(t.pack_b, d(s.k) * d(s.n));
  const double once = (d(s.m) * d(s.k) + d(s.k) * d(s.n)) * bytes + d(s.m) * d(s.n) * d(SizeOf(s.out));
  return std::max(total, once / chip.memory.hbm_bytes_per_s * chip.clock_hz);
}

std::vector<MatmulTiling> Candidates(const ChipSpec& chip, const MatmulShape& shape) {
  std::vector<MatmulTiling> candidates = AllTilings(chip, shape);
  std::erase_if(candidates, [&](const MatmulTiling& t) { return !Fits(chip, shape, t); });
  return candidates;
}

Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulTiling* tiling) {
  return ChooseCheapest(
      chip, shape, "matmul", &AllTilings,
      [&](const MatmulTiling& t, Buffer buffer) { return Need(chip, shape, t, buffer); }, tiling);
}

}  // namespace cubist
