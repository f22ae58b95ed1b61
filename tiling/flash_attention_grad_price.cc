// The closed-form price of a tiling of attention's backward pass.
#include <algorithm>

#include "tiling/attention_cost.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {
namespace {

using Shape = FlashAttentionGradShape;
using Tiling = FlashAttentionGradTiling;

double D(std::int64_t value) { return static_cast<double>(value); }

// The share of all pairs of a query and a key that the kernel computes; of many blocks of keys some stand for all.
double ComputedShare(const Shape& s, const Tiling& t) {
  if (!s.band.bounded() || s.sq == 0 || s.skv == 0) return 1;
  constexpr std::int64_t kSamples = 64;
  const Split blocks(s.skv, t.n);
  const std::int64_t stride = CeilDiv(blocks.count(), kSamples);
  double computed = 0, all = 0;
  for (std::int64_t i = 0; i < blocks.count(); i += stride) {
    const Range keys = blocks[i], queries = SeeingQueries(s.band, keys, s.sq, t.strip);
    computed += static_cast<double>(queries.size() * keys.size());
    // Keys behind those that a narrow block of queries sees are left out.
    if (s.band.highest < AttentionBand::kUnbounded) {
      const double edge = static_cast<double>(std::min(queries.size(), keys.size()));
      computed -= edge * std::max(edge - static_cast<double>(t.strip), 0.0) / 2;
    }
    all += static_cast<double>(s.sq * keys.size());
  }
  return computed / all;
}

// What a block of `n` keys and `m` queries, which comes to the Vector cores in pieces, takes of each pipe: cycles.
struct Block {
  std::int64_t n = 0, m = 0;
  ProductCycles products;  // five
  double loads = 0;        // Q and dO, P and dS, into L1
  double vector = 0;
  double stores = 0;              // scores, their gradients and sums, out of L0C
  double received = 0, sent = 0;  // scores and their gradients into UB; P and dS out of it
  double written = 0;             // bytes, to GM
};

class Blocks {
 public:
  Blocks(const ChipSpec& chip, const Shape& s, const Tiling& t)
      : chip_(chip), s_(s), t_(t), cores_(std::min(D(t.tasks(s)), D(chip.concurrent_cores))) {}

  // A whole one.
  Block Of() const {
    Block block;
    block.n = std::min(t_.n, std::max<std::int64_t>(s_.skv, 1));
    block.m = std::min(t_.m(), std::max<std::int64_t>(s_.sq, 1));
    AddCube(&block);
    AddVector(&block);
    block.loads = Loads(block);
    return block;
  }

  // One of many: the slowest pipe counts where stages overlap, their sum where they do not.
  double Amid(const Block& x) const {
    const ProductCycles& p = x.products;
    if (!chip_.pipes_overlap) {
      // The accumulators come from and go to L2 once.
      const double sums = 0.5 * D(x.m * (s_.d_qk + s_.d_rope)) +
                          0.5 * D(x.n * columns() + x.m * (s_.d_qk + s_.d_rope) + 2 * x.n * x.m);
      constexpr double kSpilled = 2.2, kBytes = 12;  // of a score, its gradient, and both as operands
      const double scores = D(x.n * x.m);
      return p.mmad + p.mte1 + x.loads + p.issue + x.vector + x.stores + sums +
             kSpilled * scores * SpilledShare(chip_, s_.in, scores * kBytes);
    }
    // With one stage the Vector core waits for part of what comes and leaves. Stages of neighbouring blocks overlap, but for
    // what they wait for each other. Both fitted to replays.
    constexpr double kWaits = 0.2, kBeside = 0.1;
    const double vector_side = x.vector + (t_.ub_stages == 1 ? kWaits * (x.received + x.sent) : 0);
    const double beside = kBeside * (p.mmad + p.mte1 + x.loads + p.issue + vector_side + x.stores + x.sent);
    const double cube_side = std::max({p.mmad, p.mte1, x.loads, p.issue, x.stores});
    if (t_.depth > 0) return beside + std::max({cube_side, vector_side, x.received, x.sent});
    return beside + cube_side + x.vector + x.sent + 2 * Pieces(x) * chip_.sync.cross_core;
  }

  // K and V of a block of keys, on their way in.
  double Ends(const Block& x) const {
    return layouts() * D(x.n * columns()) * bytes() / LoadRate(chip_, Path::kGmToL1Nd2Nz, cores_);
  }

  // Q and dO packed once, before.
  double Packing() const {
    if (!t_.pack_queries) return 0;
    return PackingCycles(chip_, layouts() * D(s_.batches * s_.heads * s_.sq) * D(columns()) * bytes());
  }

 private:
  std::int64_t columns() const { return s_.d_qk + s_.d_rope + s_.d_v; }
  double bytes() const { return D(chip_.OperandBytes(s_.in)); }
  // The host fills a layout for each of the two roles.
  double layouts() const { return chip_.pipes_overlap || t_.pack_queries ? 1 : 2; }
  std::int64_t Piece(const Block& x) const { return std::min(t_.piece(), x.m); }
  double Pieces(const Block& x) const { return D(x.m) / D(Piece(x)); }

  void AddCube(Block* x) const {
    const std::int64_t n = x->n, m = x->m, piece = Piece(*x);
    const double pieces = Pieces(*x);
    const auto product = [&](double times, std::int64_t rows, std::int64_t k, std::int64_t width) {
      x->products.Add(chip_, s_.in, times, rows, k, width, t_.k0);
    };
    const auto store = [&](double times, std::int64_t rows, std::int64_t cols) {
      x->stores += times * PathCycles(chip_, Path::kL0CToGm, D(rows * cols) * 4, 1);
      x->written += times * D(rows * cols) * 4;
    };
    // Of a gradient, by the columns that are made at a time.
    const auto gradient = [&](double times, std::int64_t rows, std::int64_t k, std::int64_t cols) {
      for (const Range part : Split(cols, t_.cols_at_once(cols))) product(times, rows, k, part.size());
    };
    const auto store_gradient = [&](double times, std::int64_t rows, std::int64_t cols) {
      for (const Range part : Split(cols, t_.cols_at_once(cols))) store(times, rows, part.size());
    };
    for (const std::int64_t cols : {s_.d_qk, s_.d_rope, s_.d_v}) product(pieces, n, cols, piece);
    for (const std::int64_t cols : {s_.d_qk, s_.d_rope}) {
      gradient(pieces, piece, n, cols), gradient(1, n, m, cols);
      store_gradient(pieces, piece, cols);
    }
    gradient(1, n, m, s_.d_v);
    if (!t_.keep_sums)
      for (const std::int64_t cols : {s_.d_qk, s_.d_rope, s_.d_v}) store_gradient(1, n, cols);
    if (chip_.pipes_overlap) store(2 * pieces, n, piece);
  }

  void AddVector(Block* x) const {
    const std::int64_t piece = Piece(*x), operand = chip_.OperandBytes(s_.in);
    const double lanes = D(chip_.vector_per_cube), scores = D(x->n) / lanes * D(piece), pieces = Pieces(*x);
    x->vector =
        pieces *
        (VectorCycles(chip_, VectorOp::kUnary, scores) + 3 * VectorCycles(chip_, VectorOp::kBinary, scores) +
         VectorCycles(chip_, VectorOp::kExp, scores) + 2 * VectorCycles(chip_, VectorOp::kCast, scores));
    if (!chip_.pipes_overlap) return;
    // P and dS leave UB piece by piece, for tiles whose rows are as long as all pieces.
    const double handed = 2 * pieces * SlotBytes(chip_, D(x->n), piece * operand, x->m * operand);
    x->sent = handed / lanes / chip_.path(Path::kUbToGm).bytes_per_cycle;
    x->received = 2 * pieces * PathCycles(chip_, Path::kGmToUb, scores * 4, 1);
    x->written += handed;
  }

  double Loads(const Block& x) const {
    const Path path = t_.pack_queries ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
    return 3 * chip_.path(path).startup +
           layouts() * D(x.m * columns()) * bytes() / LoadRate(chip_, path, cores_) +
           2 * D(x.m * x.n) * bytes() / LoadRate(chip_, Path::kGmToL1Nd2Nz, cores_) *
               (chip_.pipes_overlap ? 1 : 0.25);
  }

  const ChipSpec& chip_;
  const Shape& s_;
  const Tiling& t_;
  double cores_;
};

}  // namespace

double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const Blocks blocks(chip, s, t);
  const Block block = blocks.Of();
  const double amid = blocks.Amid(block),
               count = ComputedShare(s, t) * D(s.sq) * D(s.skv) / (D(block.m) * D(block.n));  // of a head
  double total = Waves(chip, t.tasks(s)) / D(t.chunks) *
                 (D(s.group()) * count * amid + D(t.key_blocks(s)) * blocks.Ends(block)) *
                 D(s.batches * s.kv_heads) / D(std::max<std::int64_t>(s.shares(), 1));
  // L2 takes what all cores write.
  if (chip.pipes_overlap)
    total = std::max(total, D(s.batches * s.heads) * count * block.written /
                                (chip.memory.l2_write_bytes_per_s / chip.clock_hz));
  // The last phase reads dQ's parts.
  const double cores = D(chip.concurrent_cores);
  const double parts = D(t.chunks) * D(s.batches * s.heads * s.sq * (s.d_qk + s.d_rope)) * 4 * 2 /
                       LoadRate(chip, Path::kGmToUb, cores) / cores;
  return total + D(2 * t.depth) * amid + blocks.Packing() + parts;
}

std::int64_t ReplayWork(const Shape& s, const Tiling& t) {
  constexpr std::int64_t kVectorSide = 16;  // of a piece: as long as so many Mmads
  const auto parts = [&](std::int64_t cols) {
    return std::max<std::int64_t>(Split(cols, t.cols_at_once(cols)).count(), 1);
  };
  std::int64_t mmads = CeilDiv(s.d_v, t.k0) + parts(s.d_v) * CeilDiv(t.piece(), t.k0);
  for (const std::int64_t cols : {s.d_qk, s.d_rope}) {
    if (cols > 0)
      mmads += CeilDiv(cols, t.k0) + parts(cols) * (CeilDiv(t.n, t.k0) + CeilDiv(t.piece(), t.k0));
  }
  const double pieces = ComputedShare(s, t) * D(CeilDiv(s.sq, t.piece()) * CeilDiv(s.skv, t.n));
  return static_cast<std::int64_t>(pieces) * s.batches * s.heads * (mmads + kVectorSide);
}

}  // namespace cubist
