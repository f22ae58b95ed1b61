#include "tiling/matmul_tiling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tiling/choose.h"
#include "tiling/cost.h"
#include "tiling/order_cost.h"

namespace cubist {
namespace {

std::int64_t Need(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, Buffer buffer) {
  switch (buffer) {
    case Buffer::kL1: {
      const std::int64_t bias = s.bias ? chip.SlotBytes(Buffer::kL1, DType::kF32, 1, t.n) : 0;
      return t.a_stages(s.k) * chip.SlotBytes(Buffer::kL1, s.in, t.m, t.a_k1()) +
             t.l1_stages * chip.SlotBytes(Buffer::kL1, s.in, t.k1, t.n) + bias;
    }
    case Buffer::kL0A:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0A, s.in, t.m, t.k0);
    case Buffer::kL0B:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0B, s.in, t.k0, t.part_n());
    case Buffer::kL0C:
      return t.c_parts * t.l0c_stages * chip.SlotBytes(Buffer::kL0C, DType::kF32, t.m, t.part_n());
    case Buffer::kBT:
      return chip.SlotBytes(Buffer::kBT, DType::kF32, 1, s.bias ? t.n : 1);
    case Buffer::kUB: {
      if (t.prefetch > 0) {
        const auto ahead = [&](std::int64_t rows, std::int64_t cols) {
          return chip.SlotBytes(buffer, s.in, AheadRows(rows, cols, SizeOf(s.in)), cols);
        };
        return ahead(t.m, t.a_k1()) + (t.b_turned ? ahead(t.n, t.k1) : ahead(t.k1, t.n));
      }
      if (!s.epilogue.vector && t.splits == 1) return 0;
      const std::int64_t tile = chip.SlotBytes(Buffer::kUB, DType::kF32, t.ub_rows, t.n);
      return (t.ub_stages * (1 + (s.epilogue.residual ? 1 : 0) + (t.splits > 1 ? 1 : 0)) +
              s.epilogue.scratch) *
                 tile +
             (s.epilogue.bias ? chip.SlotBytes(Buffer::kUB, DType::kF32, 1, t.n) : 0);
    }
    default:
      return 0;
  }
}

// Whether a host has to widen what a caller has packed.
bool IsWidened(const ChipSpec& chip, const MatmulShape& s) { return s.b_packed && !BIsInLayout(chip, s); }

// Whether B serves so few rows, of a product or of a block of it, that it is read where it lies, panel by panel.
bool ReadOnce(const ChipSpec& chip, const MatmulShape& s, std::int64_t rows) {
  return rows <= MostRowsOnce(chip, s);
}

// Columns that such a tile has at least, or as many as a core's share: memory gives long runs faster than short ones.
constexpr std::int64_t kShortestRun = 256;
constexpr std::int64_t kLongestRun = 8192;

// Waves of blocks, from the first on, whose operands Vector cores may read ahead: what they leave in L2 must not drive out
// what it holds.
std::int64_t WavesAhead(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t) {
  if (!MayPrefetch(chip, s)) return 0;
  const std::int64_t row = s.k * chip.OperandBytes(s.in);
  const OrderCost& order = CostOfOrder({.grid = t.grid,
                                        .deal = t.deal(),
                                        .cores = chip.concurrent_cores,
                                        .row_bytes = std::min(t.m, s.m) * row,
                                        .col_bytes = std::min(t.n, s.n) * row,
                                        .block_bytes = t.m * t.n * SizeOf(s.out),
                                        .l2_bytes = chip.memory.l2_bytes});
  double bytes = 0, waves = 0;
  for (const Wave& wave : order.waves) {
    bytes += wave.times * wave.fetched;
    if (bytes > static_cast<double>(chip.memory.l2_bytes) / 2) break;
    waves += wave.times;
  }
  return std::llround(waves);
}

// Which operands a tiling packs first.
struct Packing {
  bool a = false, b = false;
};

// What may be worth its price for operands whose rows lie askew in GM, so that a block's share of one begins and ends inside
// lines: a copy without gaps of what is read often.
std::vector<Packing> PackingsOf(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kOften = 512;  // Rows or columns of the other operand.
  const auto askew = [&](std::int64_t row_bytes) { return row_bytes % chip.memory.l2_line != 0; };
  const std::int64_t a_row = s.a_row_bytes > 0 ? s.a_row_bytes : s.m * chip.OperandBytes(s.in);
  const bool a = !s.a_packed && !AIsReadInPlace(chip, s) && askew(a_row) && s.n >= kOften,
             b = !s.b_packed && askew(std::max(s.b_row_bytes, s.b_col_bytes)) && s.m >= kOften;
  if (a && b) return {{.b = true}, {.a = true, .b = true}};
  if (a) return {{.a = true}};
  if (b) return {{.b = true}};
  return {};
}

// Tiles of A that fit L1 besides what the walk along k needs there.
int KeptTiles(const ChipSpec& chip, const MatmulShape& s, MatmulTiling t) {
  const std::int64_t capacity = chip.buffer(Buffer::kL1).capacity;
  t.keep_a = 0;
  const std::int64_t tile = std::max<std::int64_t>(chip.SlotBytes(Buffer::kL1, s.in, t.m, t.a_k1()), 1),
                     walk = Need(chip, s, t, Buffer::kL1), all = t.a_tiles(s.k);
  const std::int64_t streamed = t.l1_stages * tile;  // not needed where all of them stay
  if (walk - streamed + all * tile <= capacity) return static_cast<int>(all);
  return static_cast<int>(std::max<std::int64_t>((capacity - walk) / tile, 0));
}

// Every tiling that is considered, whether it fits or not; of equal prices the first one counts.
class TilingList {
 public:
  // k is cut into `parts`. `of_group`: no phase before packs all of B.
  TilingList(const ChipSpec& chip, const MatmulShape& whole, const KParts& parts, bool of_group)
      : chip_(chip), s_(whole), parts_(parts), of_group_(of_group) {
    if (parts.count > 1) s_.k = parts.length;
    k_step_ = chip.KStep(s_.in);
    n_step_ =
        s_.b_packed && !chip.pipes_overlap ? std::max(chip.mmad.n_step, kWidestPanel) : chip.mmad.n_step;
    if (parts.count == 1) packings_ = PackingsOf(chip, s_);
  }

  std::vector<MatmulTiling> Make() && {
    for (std::int64_t m : BlockSizes(chip_.RowStep(s_.in), s_.m)) {
      for (std::int64_t n : Widths()) {
        for (std::int64_t k0 : TileSizes({16, 32, 64, 128, 256, 384, 512, 1024, 2048}, k_step_, s_.k)) {
          if (chip_.pipes_overlap && k0 > 512) break;
          MatmulTiling t;
          t.m = m, t.n = n, t.k0 = t.k1 = k0;
          chip_.pipes_overlap ? AddOverlapped(t) : AddSerial(t);
        }
      }
    }
    return std::move(tilings_);
  }

 private:
  // On a host blocks are of about one size, so that threads end together; an NPU's last one may be small.
  std::vector<std::int64_t> BlockSizes(std::int64_t step, std::int64_t extent) const {
    if (chip_.pipes_overlap) return TileSizes({16, 32, 64, 128, 192, 256, 512}, step, extent);
    const bool many = chip_.InTileRegisters(s_.in) && s_.m >= kLeastThatPass;
    std::vector<std::int64_t> sizes =
        many ? TileSizes({32, 64, 96, 128, 192, 256, 512, 1024, 2048}, step, extent)
             : TileSizes({16, 32, 64, 96, 128, 192, 256, 512}, step, extent);
    for (std::int64_t& size : sizes)
      size = std::max(RoundUp(CeilDiv(extent, std::max<std::int64_t>(CeilDiv(extent, size), 1)), step), step);
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    return sizes;
  }

  // Columns of a block. Where few rows may read B in place, also what all cores share evenly: without them 1040 columns have
  // no wide block but in threes, which two cores share badly, and so narrow ones won, whose B is packed at half the speed.
  std::vector<std::int64_t> Widths() const {
    std::vector<std::int64_t> widths = BlockSizes(n_step_, s_.n);
    if (chip_.pipes_overlap || !ReadOnce(chip_, s_, s_.m)) return widths;
    for (const std::int64_t blocks : {1, 2, 4}) {
      const std::int64_t width = RoundUp(CeilDiv(s_.n, blocks * chip_.concurrent_cores), n_step_);
      if (width >= kShortestRun && std::find(widths.begin(), widths.end(), width) == widths.end())
        widths.push_back(width);
    }
    return widths;
  }

  // Columns of which each core has as many.
  std::int64_t Share() const { return RoundUp(CeilDiv(s_.n, chip_.concurrent_cores), n_step_); }

  // Columns that a tile of B in place may have, where they are few: without them a product of 64 to 256 columns packs its B in
  // narrow blocks, at half the speed. Every block of a B in columns turns all of A, which costs as much as to pack so many.
  std::int64_t LeastOnce() const {
    constexpr std::int64_t kPerRow = 4;
    if (parts_.count * s_.batches >= chip_.concurrent_cores || chip_.InTileRegisters(s_.in)) return s_.n;
    return std::min(s_.n, s_.b_col_bytes > 0 ? std::max(Share(), kPerRow * s_.m) : Share());
  }

  // One thread: nothing to buffer, but whole operands may be packed first.
  void AddSerial(MatmulTiling t) {
    t.l1_stages = t.l0_stages = 1;
    if (PassesPanelsOnce()) {
      t.b_once = IsWidened(chip_, s_);
      t.k0 = t.k1 = LongStep(t);
      return AddWithNearSums(t);
    }
    const std::int64_t least = IsWidened(chip_, s_) ? 1 : std::min(kShortestRun, LeastOnce());
    const bool once = ReadOnce(chip_, s_, s_.m) && s_.n >= least;
    if (once && t.m >= s_.m && t.n >= least) AddOnce(t);
    const bool by_blocks = TakesBByBlocks(once) && t.n >= least && ReadOnce(chip_, s_, t.m);
    for (int packing = 0; packing < 4; ++packing) {
      t.pack_a = (packing & 1) != 0, t.pack_b = (packing & 2) != 0;
      if (t.pack_b && of_group_) continue;
      if (t.pack_a && (s_.a_packed || CeilDiv(s_.n, t.n) == 1 || AIsReadInPlace(chip_, s_))) continue;
      if (t.pack_b && (s_.b_packed || once || CeilDiv(s_.m, t.m) == 1 || s_.m <= MostByBlocks())) continue;
      AddNear(t);
      if (by_blocks) AddOnce(t);
    }
  }

  // Rows for which no copy of all of B is made: blocks of it are packed as they are met. Where tiles are low such a copy, which
  // memory takes and gives back, makes 48 and 64 rows take up to twice as long.
  std::int64_t MostByBlocks() const { return HasLowTiles(chip_) ? kMostOnce : 0; }

  // Whether blocks of few rows do beside their multiply-adds what they would do before: pack their B for themselves, or widen it.
  bool TakesBByBlocks(bool once) const {
    if (IsWidened(chip_, s_)) return once || of_group_;
    return of_group_ && !once && s_.b_row_bytes > 0 && !chip_.InTileRegisters(s_.in);
  }

  // B is read where it lies.
  void AddOnce(MatmulTiling t) {
    t.b_once = true;
    // These rows wait for memory alone, which gives rows of whole pages up to 1.5 times as fast as pieces of them.
    constexpr std::int64_t kWidest = 4096;
    if (s_.m <= kRowsThatWait) t.n = std::max(t.n, std::min(Share(), kWidest));
    t.k0 = t.k1 = LongStep(t);
    AddNear(t);
  }

  // From end to end: what comes next is asked for in time.
  std::int64_t LongStep(const MatmulTiling& t) const {
    return std::clamp(RoundUp(s_.k, k_step_), t.k0, RoundUp(kLongestRun, k_step_));
  }

  // Whether panels that the caller has packed meet one strip of A alone, and come as memory gives them: whole, one after the
  // other, 1.1 to 1.35 times as fast as a step of k of each.
  bool PassesPanelsOnce() const {
    return s_.b_packed && s_.m <= chip_.RowStep(s_.in) && !chip_.InTileRegisters(s_.in);
  }

  // Where a cache stands for the buffers, panels of B or an accumulator beyond their share are not worth pricing.
  void AddNear(const MatmulTiling& t) {
    if (chip_.InTileRegisters(s_.in) && !t.b_once) return AddInTileRegisters(t);
    const bool b_is_near =
        t.b_once || t.k0 * t.n * chip_.OperandBytes(s_.in) <= chip_.buffer(Buffer::kL0B).fast;
    if (b_is_near || PassesB(chip_, s_, t)) AddWithNearSums(t);
  }

  void AddWithNearSums(const MatmulTiling& t) {
    if (SumsAreNear(t)) Add(t);
  }
  bool SumsAreNear(const MatmulTiling& t, std::int64_t times = 1) const {
    return t.m * t.n * 4 <= times * 2 * chip_.buffer(Buffer::kL0C).fast;
  }

  // Strips of A that pass a long step of B, in blocks of many rows; or rows of A that stay in L2 while all of B passes, or a step
  // of both beside their sums: of rows as far apart as ways of the first-level cache are long a step as long as one, or a strip.
  void AddInTileRegisters(const MatmulTiling& t) {
    constexpr std::int64_t kMostRows = 256, kMostColumns = 512, kLeastStep = 512;
    constexpr std::int64_t kMostSums = 4;  // Times those that are near.
    const bool whole = t.k0 >= s_.k,
               a_is_near = t.m <= chip_.RowStep(s_.in) ||  // However small L2 is said to be.
                           t.m * t.k0 * chip_.OperandBytes(s_.in) <= chip_.buffer(Buffer::kL0A).fast,
               shares_sets = t.m > chip_.RowStep(s_.in) && s_.a_row_bytes > 0 &&
                             s_.a_row_bytes % kWayBytes == 0 && AIsReadInPlace(chip_, s_) &&
                             t.k0 * chip_.OperandBytes(s_.in) < kWayBytes;
    const bool near = t.m <= kMostRows && t.n <= kMostColumns && a_is_near &&
                      (whole || (SumsAreNear(t) && !shares_sets)),
               passes_b =
                   StripsPassB(chip_, s_, t) && (whole || t.k0 >= kLeastStep) && SumsAreNear(t, kMostSums);
    if (near || passes_b) Add(t);
  }

  // Steps of L1, stages of the buffers and parts of L0C.
  void AddOverlapped(MatmulTiling t) {
    for (std::int64_t factor : {1, 2, 4, 8}) {
      t.k1 = t.k0 * factor;
      if (factor > 1 && t.k1 >= s_.k + t.k0) return;
      for (int stages : {2, 1}) {
        t.l1_stages = t.l0_stages = stages;
        for (const auto& [l0c_stages, c_parts] : {std::pair(1, 1), std::pair(2, 1), std::pair(1, 2)}) {
          t.l0c_stages = l0c_stages, t.c_parts = c_parts;
          if (c_parts > 1 && t.n < 2 * kWidestPanel) continue;
          AddPieces(t);
          AddPacked(t);
        }
      }
    }
  }

  void AddPieces(MatmulTiling t) {
    for (int pieces : {1, 2, 4}) {
      if (pieces > t.k1 / t.k0 || (pieces > 1 && (s_.a_packed || s_.b_packed))) return;
      t.pieces = pieces;
      AddWalks(t);
    }
  }

  void AddPacked(MatmulTiling t) {
    for (const Packing& packing : packings_) {
      if (packing.b && t.n < s_.n && t.n % kWidestPanel != 0) continue;
      t.pack_a = packing.a, t.pack_b = packing.b;
      AddWalks(t);
    }
  }

  void AddWalks(MatmulTiling t) {
    for (bool stagger : {false, true}) {
      if (stagger && (!s_.any_order || t.k1 >= s_.k || parts_.count > 1)) return;
      t.stagger = stagger;
      Add(t);
      AddKeeping(t);
    }
  }

  // As many tiles of A as L1 has room for stay there, where cores have several blocks of a row.
  void AddKeeping(MatmulTiling t) {
    if (t.l1_stages < 2 || t.m * chip_.concurrent_cores >= s_.m * CeilDiv(s_.n, t.n) / 2) return;
    for (const int span : {1, 2}) {
      t.a_span = span;
      if (span > 1 && (t.pieces > 1 || t.k1 >= s_.k)) return;
      t.keep_a = KeptTiles(chip_, s_, t);
      if (t.keep_a > 0) Add(t);
    }
  }

  // In the orders that its blocks may be worked on.
  void Add(MatmulTiling t) {
    if (s_.b_packed && t.n < s_.n && t.n % kWidestPanel != 0) return;
    t.splits = parts_.count, t.part_k = parts_.length;
    Complete(chip_, s_, t);
    // A host goes down the columns where B passes: what comes again and again is then in its last cache.
    if (!chip_.pipes_overlap)
      return AddOrder(t, PassesB(chip_, s_, t) ? BlockOrder::kSwizzled : BlockOrder::kRowMajor, 1);
    // Where A is kept, strips of a few columns: all of B at once is more than the first wave gets in time. Short ones are of
    // one length.
    if (t.keep_a > 0) {
      constexpr std::int64_t kLong = 8, kShort = 4;
      if (t.grid.cols > kShort) AddOrder(t, BlockOrder::kSwizzled, kLong);
      return AddOrder(t, BlockOrder::kSwizzled, CeilDiv(t.grid.cols, CeilDiv(t.grid.cols, kShort)));
    }
    AddOrder(t, BlockOrder::kRowMajor, 1);
    if (t.grid.rows == 1 || t.grid.cols == 1) return;
    // One width of each: replay tries others of the best (OtherOrders).
    AddOrder(t, BlockOrder::kSwizzled, 4);
    AddOrder(t, BlockOrder::kDiagonal, 8);
  }

  void AddOrder(const MatmulTiling& tiling, BlockOrder order, std::int64_t width) {
    MatmulTiling& t = tilings_.emplace_back(tiling);
    t.grid.order = order, t.grid.width = width;
    // Blocks that begin all along k need all of it at once: there is no order to read it ahead in. And with one block
    // for each core there is nothing to be ahead of.
    if (t.l1_stages < 2 || parts_.count > 1 || t.stagger || t.pack_a ||
        t.grid.count() <= chip_.concurrent_cores)
      return;
    const std::int64_t ahead = WavesAhead(chip_, s_, t);
    if (ahead <= 0) return;
    tilings_.push_back(t);
    tilings_.back().prefetch = ahead;
  }

  const ChipSpec& chip_;
  MatmulShape s_;  // Of a part.
  KParts parts_;
  bool of_group_;
  std::int64_t k_step_ = 0, n_step_ = 0;
  std::vector<Packing> packings_;
  std::vector<MatmulTiling> tilings_;
};

KParts CutK(std::int64_t k, std::int64_t count) {
  constexpr std::int64_t kStep = 64;  // Whole steps of k on any chip.
  KParts parts;
  parts.length = RoundUp(CeilDiv(k, std::max<std::int64_t>(count, 1)), kStep);
  parts.count = CeilDiv(k, parts.length);
  return parts;
}

std::vector<MatmulTiling> AllTilings(const ChipSpec& chip, const MatmulShape& s) {
  return TilingList(chip, s, PartsOf(chip, s), /*of_group=*/false).Make();
}

std::vector<MatmulTiling> ThoseThatFit(const ChipSpec& chip, const MatmulShape& s,
                                       std::vector<MatmulTiling> tilings) {
  std::erase_if(tilings, [&](const MatmulTiling& t) { return !Fits(chip, s, t); });
  return tilings;
}

}  // namespace

std::int64_t UbRows(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling) {
  const std::int64_t whole = std::min(tiling.m, std::max<std::int64_t>(shape.m, 1));
  if (tiling.splits == 1 && !chip.pipes_overlap) return tiling.m;
  // On a host as many as stay in a first-level cache beside the parts that are added.
  constexpr std::int64_t kFew = 8, kHostElements = 4096;
  if (!chip.pipes_overlap) return std::clamp<std::int64_t>(kHostElements / tiling.n, 1, whole);
  MatmulTiling t = tiling;
  t.ub_rows = RoundUp(CeilDiv(whole, chip.vector_per_cube), kFew);
  while (t.ub_rows > kFew && Need(chip, shape, t, Buffer::kUB) > chip.buffer(Buffer::kUB).capacity) {
    t.ub_rows = RoundUp(t.ub_rows / 2, kFew);
  }
  return t.ub_rows;
}

std::int64_t BufferBytes(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling,
                         Buffer buffer) {
  return Need(chip, shape, tiling, buffer);
}

bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling) {
  return FitsBuffers(chip, shape, tiling);
}

KParts HostPartsOf(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batches) {
  // Worth more than to wake a thread, and less to add up than to multiply, whatever the machine.
  constexpr std::int64_t kLeastK = 1 << 12, kLeastElements = 1 << 18;
  if (m <= 0 || n <= 0 || batches <= 0) return {};
  const bool few = k >= kLeastK && m <= kMostCutOutputs && n <= kMostCutOutputs &&
                   batches <= kMostCutOutputs / m / n && (m + n) * batches >= kLeastElements / k;
  return few ? CutK(k, std::min<std::int64_t>(kMostHostParts, k / (kLeastK / 4))) : KParts();
}

KParts PartsOf(const ChipSpec& chip, const MatmulShape& shape) {
  MatmulShape s = shape;
  if (s.rows_of_batch || s.cols_of_batch) {
    (s.rows_of_batch ? s.m : s.n) *= s.batches;
    s.batches = 1;
  }
  if (!chip.pipes_overlap) return HostPartsOf(s.m, s.n, s.k, s.batches);
  if (s.m <= 0 || s.n <= 0 || s.batches <= 0) return {};
  constexpr std::int64_t kRows = 128, kCols = 256, kLeastK = 512;
  const std::int64_t blocks = CeilDiv(s.m, kRows) * CeilDiv(s.n, kCols) * s.batches;
  if (2 * blocks > chip.concurrent_cores || s.k < 4 * kLeastK) return {};
  // By price, as if operands lay row by row and C were plain.
  MatmulShape plain;
  plain.m = s.m, plain.n = s.n, plain.k = s.k, plain.in = plain.out = s.in, plain.batches = s.batches;
  plain.a_row_bytes = s.k * SizeOf(s.in), plain.b_row_bytes = s.n * SizeOf(s.in);
  const auto best = [&](const KParts& parts) {
    double least = std::numeric_limits<double>::infinity();
    for (const MatmulTiling& t : TilingList(chip, plain, parts, /*of_group=*/false).Make()) {
      if (Fits(chip, plain, t)) least = std::min(least, Price(chip, plain, t));
    }
    return least;
  };
  const KParts whole, parts = CutK(s.k, std::min(chip.concurrent_cores / blocks, s.k / kLeastK));
  return best(parts) < best(whole) ? parts : whole;
}

namespace {

// Columns of floats that are better turned where A is near. On an Emerald Rapids five and six of them pass 1.2 to 1.6 times as fast so,
// seven to twelve, of rows of a page, 1.04 to 1.5 times. But a B in rows is read where it lies; if no rows of A share sets of the
// first-level cache either, few of them take .7 to 1.0 of the time as they are, and nine columns and more too.
std::int64_t MostTurnedNear(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kInStrips = 4, kOfShortRows = 6, kBesideRows = 8, kOfLongRows = 12;
  constexpr std::int64_t kLongRow = 4096, kFewRows = 64;
  if (!chip.packing.turns_near) return kInStrips;
  const bool beside_rows = s.b_row_bytes > 0 && s.a_row_bytes % kWayBytes != 0;
  if (beside_rows && s.m <= kFewRows) return kInStrips;
  if (s.k * SizeOf(s.in) < kLongRow) return kOfShortRows;
  return beside_rows ? kBesideRows : kOfLongRows;
}

}  // namespace

bool IsBetterTurned(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kFewColumns = 64, kFewFromMemory = 8, kFewByPieces = 24;
  // Bytes of a row: of shorter ones the gain is less than C's turning costs, of which one column has none.
  constexpr std::int64_t kShortestRow = 512, kShortestOfOne = 64;
  // All of A is near: elements where they are turned besides, bytes.
  constexpr std::int64_t kNear = std::int64_t{1} << 18, kNearBytes = std::int64_t{4} << 20;
  // Tile registers take rows as they lie, and whatever is B is to be packed.
  if (chip.pipes_overlap || s.n > kFewColumns || s.m / 2 < s.n || chip.InTileRegisters(s.in)) return false;
  if (s.a_row_bytes == 0) return s.n <= kFewByPieces || s.k > kNear / s.m;
  const std::int64_t row_bytes = s.k * SizeOf(s.in);
  if (row_bytes < (s.n == 1 ? kShortestOfOne : kShortestRow)) return false;
  if (s.n <= MostTurnedNear(chip, s)) return true;
  const bool far = row_bytes > kNearBytes / s.m;
  return (far && s.n <= kFewFromMemory) || (!AIsReadInPlace(chip, s) && (far || s.n <= kFewByPieces));
}

std::int64_t MostRowsOnce(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kMostColumns = 132, kMostOfLowTiles = 132, kMostWidened = 8, kMostTurned = 17;
  // Bytes of B that stay in a first-level cache, whatever they are read for.
  constexpr std::int64_t kSmallB = 1 << 14;
  if (s.b_packed) return IsWidened(chip, s) ? kMostOnce : 0;
  if (s.b_row_bytes == 0 && s.b_col_bytes == 0) return 0;
  const bool in_rows = s.b_row_bytes > 0;
  if (chip.InTileRegisters(s.in)) return kMostOnceInTileRegisters;
  // Of few columns more rows meet a packed B. Emerald Rapids, floats, 16 to 64 rows: 1.03 to 1.47 times as fast; other columns .6 to
  // 1.2 times, fewer rows .6 to 1.6. Other CPUs and what is widened have not been measured.
  constexpr std::int64_t kLeastFew = 5, kMostFew = 64, kMostTurnedByFew = 15;
  const bool few_columns = !in_rows && s.n >= kLeastFew && s.n <= kMostFew;
  const bool widens = chip.OperandBytes(s.in) > SizeOf(s.in);
  if (few_columns && !widens && chip.packing.packs_few_columns) return kMostTurnedByFew;
  const bool is_small = s.k <= kSmallB / chip.OperandBytes(s.in) / std::max<std::int64_t>(s.n, 1);
  if (!HasLowTiles(chip) || is_small) return in_rows ? kMostOnce : kMostColumns;
  if (!in_rows) return kMostTurned;
  return widens ? kMostWidened : kMostOfLowTiles;
}

std::vector<MatmulTiling> Candidates(const ChipSpec& chip, const MatmulShape& shape) {
  return ThoseThatFit(chip, shape, AllTilings(chip, shape));
}

std::vector<MatmulTiling> GroupCandidates(const ChipSpec& chip, const MatmulShape& shape) {
  return ThoseThatFit(chip, shape, TilingList(chip, shape, PartsOf(chip, shape), /*of_group=*/true).Make());
}

Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulTiling* tiling) {
  return ChooseCheapest(chip, shape, &AllTilings, tiling);
}

}  // namespace cubist
