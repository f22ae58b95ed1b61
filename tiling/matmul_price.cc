// The closed-form price of a matmul tiling.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tiling/cost.h"
#include "tiling/matmul_tiling.h"
#include "tiling/order_cost.h"
#include "tiling/pack_tiling.h"

namespace cubist {
namespace {

double D(std::int64_t value) { return static_cast<double>(value); }

// An operand of one block as it comes into L1.
struct Load {
  // Bytes through the port: whole slots of lines, where rows are short or askew; and with every byte once, as a line that
  // pieces or neighbours share misses L2 for the first of them alone.
  double bytes = 0, once = 0;
  double transfers = 0;  // instructions
  Path path = Path::kGmToL1Nd2Nz;
};

// What the pipes have to do for one block of C: of rows x cols, or the mean of all, as those at the edges are smaller.
class Block {
 public:
  Block(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, double rows, double cols)
      : chip_(chip),
        s_(s),
        t_(t),
        bytes_(chip.OperandBytes(s.in)),
        m_(rows),
        n_(cols),
        steps0_(std::max(1.0, D(CeilDiv(s.k, t.k0)))),
        steps1_(std::max(1.0, D(CeilDiv(s.k, t.k1)))),
        mmad_(Mmads(static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols))) {}
  Block(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t)
      : Block(chip, s, t, D(s.m) / D(std::max<std::int64_t>(t.grid.rows, 1)),
              D(s.n) / D(std::max<std::int64_t>(t.grid.cols, 1))) {
    const std::int64_t m_edge = s.m - (t.grid.rows - 1) * t.m, n_edge = s.n - (t.grid.cols - 1) * t.n;
    const double rows = D(t.grid.rows), cols = D(t.grid.cols);
    mmad_ = ((rows - 1) * (cols - 1) * Mmads(t.m, t.n) + (rows - 1) * Mmads(t.m, n_edge) +
             (cols - 1) * Mmads(m_edge, t.n) + Mmads(m_edge, n_edge)) /
            std::max(1.0, rows * cols);
  }

  double m() const { return m_; }
  double n() const { return n_; }
  double steps0() const { return steps0_; }
  double steps1() const { return steps1_; }
  // Cycles without whatever stands between Mmads.
  double Mmad() const { return mmad_; }
  double a_bytes() const { return m_ * D(s_.k * bytes_); }
  double b_bytes() const { return n_ * D(s_.k * bytes_); }
  Load LoadA() const {
    if (t_.pack_a || s_.a_packed || AIsReadInPlace(chip_, s_))
      return {a_bytes(), a_bytes(), steps1_, Path::kGmToL1};
    const std::int64_t piece = std::min(t_.a_span > 1 ? t_.a_k1() : t_.piece(), s_.k),
                       rows = std::max<std::int64_t>(std::min(t_.m, s_.m), 1);
    if (s_.a_row_bytes > 0) return ByPieces(m_, piece, s_.a_row_bytes);
    return AcrossPieces(SlotBytes(chip_, D(s_.k), rows * bytes_, s_.m * bytes_) * m_ / D(rows), a_bytes(),
                        s_.m * bytes_);
  }
  Load LoadB() const {
    if (t_.pack_b || t_.b_once || s_.b_packed) return {b_bytes(), b_bytes(), steps1_, Path::kGmToL1};
    const std::int64_t piece = std::min(t_.piece(), s_.k),
                       cols = std::max<std::int64_t>(std::min(t_.n, s_.n), 1);
    if (s_.b_row_bytes == 0) return ByPieces(n_, piece, s_.k * bytes_);
    return AcrossPieces(SlotBytes(chip_, D(s_.k), cols * bytes_, s_.b_row_bytes) * n_ / D(cols), b_bytes(),
                        s_.b_row_bytes);
  }

 private:
  // Rows along k: each is cut where a piece ends.
  Load ByPieces(double rows, std::int64_t piece, std::int64_t stride) const {
    const double pieces = piece > 0 ? D(s_.k) / D(piece) : 0;
    return {SlotBytes(chip_, rows * pieces, piece * bytes_, stride), rows * D(s_.k * bytes_),
            Moves(rows, stride)};
  }
  // Rows across k, `stride` bytes apart: none is.
  Load AcrossPieces(double bytes, double once, std::int64_t stride) const {
    return {bytes, once, Moves(D(s_.k) / steps1_, stride)};
  }
  // Of so many rows in each step along k, cut into pieces.
  double Moves(double rows, std::int64_t stride) const {
    const bool far = stride > kMostNd2NzStride * bytes_;
    return steps1_ * std::max(D(t_.pieces), far ? rows : 1);
  }
  double Mmads(std::int64_t rows, std::int64_t cols) const {
    const std::int64_t part = CeilDiv(cols, t_.c_parts);
    return t_.c_parts * (std::floor(D(s_.k) / D(t_.k0)) * MmadCycles(chip_, s_.in, rows, t_.k0, part) +
                         (s_.k % t_.k0 != 0 ? MmadCycles(chip_, s_.in, rows, s_.k % t_.k0, part) : 0));
  }

  const ChipSpec& chip_;
  const MatmulShape& s_;
  const MatmulTiling& t_;
  std::int64_t bytes_;
  double m_, n_, steps0_, steps1_, mmad_;
};

// ---- A host: its pipes share a thread, and so their times add up ----

// Whether both operands have room in a quarter of L2.
bool IsNear(const ChipSpec& chip, const MatmulShape& s) {
  return (s.m + s.n) * s.k * chip.OperandBytes(s.in) <= chip.buffer(Buffer::kL0C).fast;
}

// What tile registers cost a block besides their multiply-adds: their sums wait in L1 at every piece of k, and in L2 at every
// step. Fitted to 4000 measured tilings of twenty products on a Granite Rapids; where strips pass B (StripsPassB) to 800 of four
// products on an Emerald Rapids, as are the other constants of theirs.
double TileRegisterCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t,
                          const Block& block) {
  constexpr double kStep = 90, kPiece = 160, kNearStep = 270, kFarStep = 400, kNextPiece = 246;
  constexpr std::int64_t kPieceBytes = 512, kLongPieceBytes = 1280;
  const std::int64_t bytes = chip.OperandBytes(s.in);
  const double tiles =
      std::ceil(block.m() / D(chip.RowStep(s.in))) * std::ceil(block.n() / D(chip.mmad.n_step));
  // Products that are all in L2 gain.
  constexpr double kAllNear = -0.25;
  const double near = IsNear(chip, s) ? kAllNear * block.Mmad() : 0;
  if (StripsPassB(chip, s, t)) {
    const bool far = block.m() * block.n() * 4 > D(chip.buffer(Buffer::kL0C).fast);
    const double next = D(CeilDiv(std::min(t.k0, s.k) * bytes, kLongPieceBytes) - 1);
    return tiles * block.steps0() * ((far ? kFarStep : kNearStep) + kNextPiece * std::max(0.0, next)) + near;
  }
  // Rows of A beyond a quarter of L2 are driven out of it by what passes.
  constexpr double kDrivenOut = 0.15;
  const double a_bytes = block.m() * D(std::min(t.k0, s.k) * bytes),
               beyond = a_bytes / D(chip.buffer(Buffer::kL0C).fast) - 1,
               driven_out = IsNear(chip, s) ? 0 : kDrivenOut * std::max(0.0, beyond) * block.Mmad();
  return tiles * (kStep * block.steps0() + kPiece * std::max(1.0, D(CeilDiv(s.k * bytes, kPieceBytes)))) +
         near + driven_out;
}

// Register tiles of a block begin with their sums and end with them in every Mmad, and wherever a packed A ends a panel:
// measured beside the multiply-adds of their rows and columns.
double RegisterTileCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t,
                          const Block& block) {
  if (chip.InTileRegisters(s.in)) return TileRegisterCycles(chip, s, t, block);
  constexpr double kCycles = 100;
  const bool a_in_panels = t.pack_a || s.a_packed;
  const std::int64_t run = a_in_panels ? std::min(t.k0, chip.PackedStep(Role::kA, s.in)) : t.k0;
  return kCycles * std::ceil(block.m() / D(chip.RowStep(s.in))) * std::ceil(block.n() / D(chip.mmad.n_step)) *
         std::max(1.0, D(CeilDiv(s.k, run)));
}

// Cycles that a byte of a B which passes beside products costs a block: the first row of blocks has it from memory, the
// others where the part of the last cache holds it that one program may count on.
double PassingCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  constexpr double kFromCache = 0.04;  // of what it costs from memory
  const double memory = chip.memory.hbm_bytes_per_s / chip.clock_hz, rows = D(t.grid.rows);
  const std::int64_t column = t.n * s.k * chip.OperandBytes(s.in);
  return (1 + (rows - 1) * (column >= chip.memory.l2_bytes / 4 ? 1 : kFromCache)) / rows / memory;
}

// Products pack long rows and columns, so many times as fast as the short ones of attention that the chip's rate is of.
constexpr double kLongRows = 2.75;

// Cycles that memory takes for a byte of A, where the last cache does not hold it.
double MemoryCycles(const ChipSpec& chip, const MatmulShape& s) {
  const double bytes = D(s.batches) * D(s.m) * D(s.k) * D(chip.OperandBytes(s.in));
  return bytes > D(chip.memory.l2_bytes) ? chip.clock_hz / chip.memory.hbm_bytes_per_s : 0;
}

// Cycles that a byte costs a block that reads an operand as it is, or packs it for itself. Fitted to the measured order of
// tilings: strips of A are on their way while the one before is multiplied, unless they pass B through tile registers, which
// leave loads from beyond L2 little room; what a block packs drives out what it multiplies.
struct SerialLoads {
  static constexpr double kBeside = 0.5, kPassing = 2.2, kDrivesOutA = 2, kDrivesOutStrips = 3.3;
  static constexpr std::int64_t kFewRows = 64;  // Beside so few what packs B is not hidden.

  SerialLoads(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t)
      : passes_b(StripsPassB(chip, s, t) && !IsNear(chip, s)),
        drives_out_b(passes_b                     ? 1.85
                     : chip.InTileRegisters(s.in) ? (IsNear(chip, s)         ? 1.2
                                                     : StaysInL2(chip, s, t) ? 1.6
                                                                             : 2.6)
                     : s.m <= kFewRows            ? 3.0
                                                  : 1.2),
        in_layout(1 / chip.path(Path::kGmToL1).bytes_per_cycle),
        packing(1 / (chip.path(Path::kGmToL1Nd2Nz).bytes_per_cycle * kLongRows)),
        packing_a(chip.InTileRegisters(s.in) ? packing * kDrivesOutA
                                             : packing * kDrivesOutStrips + 2 * MemoryCycles(chip, s)) {}
  // Whether a step of a block's B, once packed, is still in L2 when it is multiplied: 72 to 128 rows of bf16 that pack 2 MiB at a time
  // on an Emerald Rapids take 1.1 to 1.25 times as long as those that pack a quarter of it. Short pieces of rows, which are packed
  // more slowly, lose as much.
  static bool StaysInL2(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
    constexpr std::int64_t kShortRow = 256;
    const std::int64_t n = std::min(t.n, s.n);
    return (s.b_row_bytes == 0 || n >= std::min(kShortRow, s.n)) &&
           std::min(t.k0, s.k) * n * chip.OperandBytes(s.in) <= chip.buffer(Buffer::kL0C).fast;
  }
  double OfA(bool as_it_is) const {
    return as_it_is ? in_layout * (passes_b ? kPassing : kBeside) : packing_a;
  }
  double OfB(bool as_it_is) const { return as_it_is ? in_layout : packing * drives_out_b; }

  bool passes_b;
  double drives_out_b, in_layout, packing, packing_a;
};

double SerialCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, const Block& block) {
  const double bytes = D(chip.OperandBytes(s.in)), m = block.m(), n = block.n(), k = D(s.k);
  const std::int64_t tasks = t.tasks(s.batches);
  const double mte1 = PathCycles(chip, Path::kL1ToL0A, m * k * bytes, block.steps0()) +
                      PathCycles(chip, Path::kL1ToL0B, k * n * bytes, block.steps0());
  const SerialLoads loads(chip, s, t);
  const bool a_in_layout = t.pack_a || s.a_packed || AIsReadInPlace(chip, s),
             b_in_layout = t.pack_b || t.b_once || BIsInLayout(chip, s);
  const double startups = chip.path(a_in_layout ? Path::kGmToL1 : Path::kGmToL1Nd2Nz).startup +
                          chip.path(b_in_layout ? Path::kGmToL1 : Path::kGmToL1Nd2Nz).startup;
  const double b_load = PassesB(chip, s, t) ? PassingCycles(chip, s, t) : loads.OfB(b_in_layout);
  const double mte2 =
      block.steps1() * startups + m * k * bytes * loads.OfA(a_in_layout) + k * n * bytes * b_load;
  const double fix = PathCycles(chip, Path::kL0CToGm, m * n * D(SizeOf(s.out)), 1);
  const double issue = block.steps0() * 3 * chip.scalar.issue;
  // Threads take blocks as they come, and end together but for a small part of one.
  constexpr double kEnd = 0.1;
  const double waves =
      D(CeilDiv(tasks, chip.concurrent_cores)) + (tasks > chip.concurrent_cores ? kEnd : 0.0);
  return waves * (block.Mmad() + RegisterTileCycles(chip, s, t, block) + mte1 + mte2 + issue + fix);
}

// ---- An NPU: its pipes run side by side, wave by wave ----

constexpr double kFlags = 3;  // that each Mmad, and each pair of loads to L0, executes

// From L1 into L0 and through the Cube: one block, with its operands in L1.
double CubeCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, const Block& block) {
  const double bytes = D(chip.OperandBytes(s.in)), k = D(s.k), steps = block.steps0() * t.c_parts;
  const PathSpec &to_a = chip.path(Path::kL1ToL0A), &to_b = chip.path(Path::kL1ToL0B);
  const double flags = steps * kFlags * chip.sync.execute;
  const double mmad = block.Mmad() + flags;
  const double mte1 = steps * (to_a.gap + to_b.gap) +
                      t.c_parts * block.m() * k * bytes / to_a.bytes_per_cycle +
                      block.n() * k * bytes / to_b.bytes_per_cycle + flags;
  const double issue = steps * (3 * chip.scalar.issue + 2 * kFlags * chip.scalar.issue_flag);
  if (t.l0_stages > 1) return std::max({mmad, mte1, issue});
  // One stage: a step's load, its product and their flags one after the other.
  const double latencies = steps * (to_b.startup + 2 * chip.sync.flag + chip.mmad.head_idle);
  return std::max(mmad + mte1 + latencies, issue);
}

// Loads of one block at the rates that its operands come with: bytes per cycle of what L2 holds and of what it lacks.
struct LoadRates {
  double held = 1, cold = 1;
};
double LoadCycles(const ChipSpec& chip, const Load& load, double cold, double in_front,
                  const LoadRates& rates) {
  const PathSpec& path = chip.path(load.path);
  // As many lines are on their way at a time as hide the startup; each waits for those in front of it.
  const double missed = std::min(load.once, load.bytes) * cold, found = load.bytes - missed;
  const double queueing =
      found / path.bytes_per_cycle * chip.memory.same_line * in_front / std::max<double>(path.startup, 1);
  return load.transfers * path.gap + found / rates.held + missed / rates.cold + queueing;
}

// The Vector cores' part of a block of C: what comes and goes, and about as many instructions as the activations have.
double VectorCoreCycles(const ChipSpec& chip, const MatmulShape& s, double elements) {
  if (!s.epilogue.vector) return 0;
  const double share = elements / chip.vector_per_cube;
  const double moved = PathCycles(chip, Path::kGmToUb, share * 4 * (s.epilogue.residual ? 2 : 1), 1);
  const double passes =
      1 + (s.epilogue.residual ? 2 : 0) + (s.epilogue.bias ? 1 : 0) + 8 * s.epilogue.scratch;
  return std::max(moved, passes * VectorCycles(chip, VectorOp::kBinary, share));
}

// The pipes of a core that works on blocks of one size.
class OverlappedBlock {
 public:
  // `stands`: share of the blocks that find in L1 what the one before has kept.
  OverlappedBlock(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, const Block& block,
                  double stands = 0)
      : chip_(chip),
        t_(t),
        a_(block.LoadA()),
        b_(block.LoadB()),
        port_(std::min<double>(chip.path(a_.path).bytes_per_cycle, chip.memory.core_read_bytes_per_cycle)),
        miss_(chip.memory.core_miss_bytes_per_cycle > 0
                  ? std::min<double>(port_, chip.memory.core_miss_bytes_per_cycle)
                  : port_),
        steps1_(block.steps1()),
        cube_(CubeCycles(chip, s, t, block)),
        last_mmad_(block.Mmad() / std::max(1.0, block.steps0() / steps1_)),
        ahead_(AheadOfLoads(chip, t, block)),
        fix_(PathCycles(chip, Path::kL0CToGm, block.m() * block.n() * D(SizeOf(s.out)), 1)),
        vector_(VectorCoreCycles(chip, s, block.m() * block.n())) {
    // The first piece of a chain of blocks is not hidden.
    const double tile = (a_.bytes + b_.bytes) / steps1_ / port_;
    fill_ = Startups() + tile / D(t.pieces) + cube_ / block.steps0();
    if (t.keep_a == 0) return;
    stands_ = stands;
    kept_ = std::min(1.0, D(t.keep_a * t.a_k1()) / D(std::max<std::int64_t>(s.k, 1)));
  }

  double fill() const { return fill_; }

  // Blocks that load all of A take longer than those for which a part of it stands: one waits for loads and the other for
  // the Cube, which a mean of their loads would not show.
  double Cycles(const Wave& wave, double sharers_a, double sharers_b) const {
    const double loads_all = stands_ < 1 ? CyclesOf(1, wave, sharers_a, sharers_b) : 0;
    const double keeps = stands_ > 0 ? CyclesOf(1 - kept_, wave, sharers_a, sharers_b) : 0;
    return (1 - stands_) * loads_all + stands_ * keeps;
  }

 private:
  // Of a block that loads so much of its rows of A.
  double CyclesOf(double loaded, const Wave& wave, double sharers_a, double sharers_b) const {
    Load a = a_;
    a.bytes *= loaded, a.once *= loaded, a.transfers *= loaded;
    const auto loads = [&](const LoadRates& rates) {
      return LoadCycles(chip_, a, wave.cold_rows, sharers_a, rates) +
             LoadCycles(chip_, b_, wave.cold_cols, sharers_b, rates);
    };
    // With one stage the next tile's load overlaps the tile's last Mmad alone; with pieces, one is under way while
    // another is multiplied.
    const bool in_turn = t_.l1_stages == 1 && t_.pieces == 1;
    // A core on its own; all of them.
    const double alone = loads({port_, miss_}) + (in_turn ? steps1_ * Startups() : 0);
    const double share = LoadRate(chip_, a_.path, wave.blocks);
    const double together = loads({share, share});  // What some miss, others take.
    const double chain = in_turn ? cube_ + std::max(0.0, alone - last_mmad_) : std::max(cube_, alone);
    const double work = std::max({chain, together, vector_, cube_ + std::max(alone, together) - ahead_});
    return t_.l0c_stages > 1 || t_.c_parts > 1 ? std::max(work, fix_) : work + fix_;
  }

  // Cycles of a block by which loads are issued before the Cube needs them: scalar units wait where the queue of the M pipe
  // is full. Of a step that fits it, with its flags to and from MTE2, all.
  double AheadOfLoads(const ChipSpec& chip, const MatmulTiling& t, const Block& block) const {
    constexpr double kStepFlags = 2;
    const double queue = D(chip.scalar.queue_depth),
                 step = block.steps0() * t.c_parts / steps1_ * (1 + kFlags) + kStepFlags;
    return step > queue ? cube_ * queue / step : std::numeric_limits<double>::infinity();
  }
  double Startups() const { return 2 * chip_.path(a_.path).startup; }  // of A and of B

  const ChipSpec& chip_;
  const MatmulTiling& t_;
  Load a_, b_;
  double port_, miss_, steps1_, cube_, last_mmad_, ahead_, fix_, vector_, fill_ = 0;
  double stands_ = 0, kept_ = 0;  // The share of blocks that keep some of A, and how much.
};

// All batches, in whatever order.
double AnyOrderCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  const OverlappedBlock block(chip, s, t, Block(chip, s, t));
  const std::int64_t tasks = t.tasks(s.batches);
  const double cores = std::min(D(chip.concurrent_cores), D(tasks));
  return block.fill() + Waves(chip, tasks) * block.Cycles({.blocks = cores}, 0, 0);
}

// One product, wave by wave. A wave takes as long as its largest block.
double OverlappedCycles(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  const Block mean(chip, s, t);
  const OrderCost& order = CostOfOrder({.grid = t.grid,
                                        .deal = t.deal(),
                                        .cores = chip.concurrent_cores,
                                        .row_bytes = static_cast<std::int64_t>(mean.a_bytes()),
                                        .col_bytes = static_cast<std::int64_t>(mean.b_bytes()),
                                        .block_bytes = t.m * t.n * SizeOf(s.out),
                                        .l2_bytes = chip.memory.l2_bytes});
  const auto block_of = [&](bool last_row, bool last_col) {
    const std::int64_t rows = last_row ? s.m - (t.grid.rows - 1) * t.m : std::min(t.m, s.m),
                       cols = last_col ? s.n - (t.grid.cols - 1) * t.n : std::min(t.n, s.n);
    return OverlappedBlock(chip, s, t, Block(chip, s, t, D(rows), D(cols)), order.stands);
  };
  const OverlappedBlock whole = block_of(false, false);
  const double apart = t.stagger ? mean.steps1() : 1;
  const double hbm = chip.memory.hbm_bytes_per_s / chip.clock_hz;
  // Most waves are like the one before.
  Wave last{.blocks = -1};
  double last_work = 0;
  const auto work_of = [&](const Wave& w) {
    if (w.blocks == last.blocks && w.cold_rows == last.cold_rows && w.cold_cols == last.cold_cols &&
        w.last_row == last.last_row && w.last_col == last.last_col)
      return last_work;
    last = w;
    const bool at_edge = w.last_row || w.last_col;
    last_work = (at_edge ? block_of(w.last_row, w.last_col) : whole)
                    .Cycles(w, order.sharers_a / apart, order.sharers_b / apart);
    return last_work;
  };
  double total = whole.fill(), ahead = 0;  // Cycles by which Vector cores are ahead with what they fetch.
  std::int64_t number = 0;
  for (Wave wave : order.waves) {
    const double fetching = wave.fetched / hbm;
    const bool prefetched = number++ < t.prefetch;
    // A copy has just been written.
    if (t.pack_a) wave.cold_rows = 0;
    if (t.pack_b) wave.cold_cols = 0;
    if (prefetched) {
      // In the first wave both begin at once: what HBM does not give in time is cold.
      const double cold_rows = wave.cold_rows, cold_cols = wave.cold_cols;
      wave.cold_rows = wave.cold_cols = 0;
      const double behind = number == 1 ? std::min(1.0, fetching / work_of(wave)) : 0;
      wave.cold_rows = behind * cold_rows, wave.cold_cols = behind * cold_cols;
    }
    const double work = work_of(wave);
    const double cycles = std::max(work, prefetched ? fetching - ahead : fetching);
    ahead = prefetched ? ahead + cycles - fetching : 0;
    total += wave.times * cycles;
  }
  return total;
}

}  // namespace

// Cycles of the busiest core: on a host its blocks one after the other; on an NPU wave by wave the slowest of its pipes,
// of L2 and of HBM. At least the time that HBM needs for everything once, but for groups, which know what theirs is.
double Price(const ChipSpec& chip, const MatmulShape& whole, const MatmulTiling& t, bool one_product) {
  MatmulShape s = whole;
  const bool of_group = !one_product;
  if (t.splits > 1) s.k = t.part_k;
  if (s.batches != 1 || t.splits > 1) one_product = false;
  double total = !chip.pipes_overlap ? SerialCycles(chip, s, t, Block(chip, s, t))
                 : one_product       ? OverlappedCycles(chip, s, t)
                                     : AnyOrderCycles(chip, s, t);
  const double bytes = D(chip.OperandBytes(s.in));
  const auto pack = [&](Role role, std::int64_t rows, std::int64_t cols, bool turned) {
    if (chip.pipes_overlap)
      return PackCycles(chip, ChoosePackTiling(chip, role, s.in, rows, cols, s.batches, /*by_columns=*/false),
                        s.in);
    // A host writes lines that it has read; columns along which B is packed are met one panel at a time.
    // Beside tile registers copies stand out, those of A, whose rows are short runs, most of all.
    constexpr double kTurned = 1.36;
    double passes = role == Role::kA ? chip.packing.a_passes : chip.packing.b_passes * (turned ? kTurned : 1);
    if (chip.InTileRegisters(s.in) && role == Role::kB) passes = 3.6;
    passes /= kLongRows;
    const double cores = D(chip.concurrent_cores);
    double of_byte = passes / LoadRate(chip, Path::kGmToL1Nd2Nz, cores);
    if (role == Role::kA && !chip.InTileRegisters(s.in)) of_byte += 5 * MemoryCycles(chip, whole);
    return chip.sync.barrier_s * chip.clock_hz + D(s.batches) * D(rows) * D(cols) * bytes * of_byte / cores;
  };
  // On a host, more than one block means more than one thread, where there is one, which must be woken.
  if (!chip.pipes_overlap && chip.concurrent_cores > 1 && t.tasks(s.batches) > 1)
    total += chip.sync.barrier_s * chip.clock_hz;
  const double all = D(s.batches), k = D(whole.k), c = all * D(s.m) * D(s.n);
  if (t.pack_a) total += pack(Role::kA, s.m, whole.k, false);
  if (t.pack_b) total += pack(Role::kB, whole.k, s.n, s.b_row_bytes == 0);
  if (t.splits > 1) {  // The parts are read and added by all Vector cores.
    total += chip.sync.barrier_s * chip.clock_hz +
             c * 4 * D(t.splits + 1) / LoadRate(chip, Path::kGmToUb, D(chip.concurrent_cores)) /
                 D(chip.concurrent_cores);
  }
  // Where the product alone needs no Vector cores, whoever takes them waits for their start.
  if (!s.epilogue.vector && (t.prefetch > 0 || t.splits > 1))
    total += chip.sync.mixed_launch_s * chip.clock_hz;
  const double once = all * (D(s.m) + D(s.n)) * k * bytes + c * D(SizeOf(s.out));
  const double floor = once / chip.memory.hbm_bytes_per_s * chip.clock_hz;
  if (of_group && chip.pipes_overlap) return total;
  // Of tilings that wait for memory alike a host's best one has least to do besides.
  constexpr double kBesides = 1e-3;
  return std::max(total, floor) + (chip.pipes_overlap ? 0 : kBesides * total);
}

}  // namespace cubist
