// The closed-form price of a tiling of attention's forward pass.
#include <algorithm>
#include <numeric>

#include "tiling/attention_cost.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {
namespace {

using Shape = FlashAttentionShape;
using Tiling = FlashAttentionTiling;

double D(std::int64_t value) { return static_cast<double>(value); }

// Cycles of a step's parts.
struct Step {
  ProductCycles products;
  double loads = 0;  // K and V, into L1
  double softmax = 0;
  double stores = 0;                     // scores and outputs, out of L0C
  double scores_in = 0, outputs_in = 0;  // the same, into UB
  double p_out = 0, p_in = 0;            // P, out of UB and into L1
  double spilled = 0;                    // for scores that L2 has no room for
};

// Of the scores of `rows` queries with `n` keys, and of rescaling their outputs.
double SoftmaxCycles(const ChipSpec& chip, const Shape& s, double rows, std::int64_t n) {
  const double scores = rows * D(n), outputs = rows * D(s.d_v);
  const auto cycles = [&](int times, VectorOp op, double elements) {
    return times * VectorCycles(chip, op, elements);
  };
  double sum = cycles(2, VectorOp::kUnary, scores) + cycles(1, VectorOp::kExp, scores) +
               cycles(1, VectorOp::kBinary, scores) + cycles(2, VectorOp::kReduce, scores) +
               cycles(2, VectorOp::kBinary, outputs) + cycles(6, VectorOp::kBinary, rows);
  if (s.bias) sum += cycles(2, VectorOp::kBinary, scores);
  if (s.soft_cap > 0)
    sum += cycles(1, VectorOp::kExp, scores) + cycles(1, VectorOp::kDiv, scores) +
           cycles(4, VectorOp::kUnary, scores);
  if (s.soft_cap > 1)
    sum += cycles(5, VectorOp::kUnary, scores) + cycles(5, VectorOp::kBinary, scores) +
           cycles(2, VectorOp::kSelect, scores);
  if (s.mask) sum += cycles(3, VectorOp::kSelect, scores);
  if (s.alibi) sum += cycles(4, VectorOp::kUnary, scores);
  if (s.dropout) sum += cycles(13, VectorOp::kInteger, scores) + cycles(3, VectorOp::kSelect, scores);
  return sum;
}

// The steps of a call: in each a block of queries meets a block of keys.
class Steps {
 public:
  Steps(const ChipSpec& chip, const Shape& s, const Tiling& t)
      : chip_(chip),
        s_(s),
        t_(t),
        load_path_(t.pack_kv || t.kv_once ? Path::kGmToL1 : Path::kGmToL1Nd2Nz),
        load_rate_(LoadRate(chip, load_path_, std::min(D(t.tasks(s)), D(chip.concurrent_cores)))) {}

  Step Of(std::int64_t rows, std::int64_t n) const {
    const double bytes = D(chip_.OperandBytes(s_.in));
    const double lane_rows = D(rows) / D(chip_.vector_per_cube), scores = lane_rows * D(n);
    const Split outputs_at_once(s_.d_v, t_.v_cols(s_.d_v));
    Step step;
    step.products.Add(chip_, s_.in, 1, rows, s_.d_qk, n, t_.k0);
    step.products.Add(chip_, s_.in, 1, rows, s_.d_rope, n, t_.k0);
    for (const Range cols : outputs_at_once) step.products.Add(chip_, s_.in, 1, rows, n, cols.size(), t_.k0);
    step.loads =
        (t_.v_from_k ? 2 : 3) * chip_.path(load_path_).startup +
        D(n) * (RowBytes(s_.d_qk) + D(s_.d_rope) * bytes + (t_.v_from_k ? 0 : RowBytes(s_.d_v))) / load_rate_;
    step.softmax = SoftmaxCycles(chip_, s_, lane_rows, n);
    step.stores =
        PathCycles(chip_, Path::kL0CToGm, D(rows * (n + s_.d_v)) * 4, 1 + D(outputs_at_once.count()));
    step.scores_in = PathCycles(chip_, Path::kGmToUb, scores * 4, 1);
    step.outputs_in = PathCycles(chip_, Path::kGmToUb, lane_rows * D(s_.d_v) * 4, 1);
    step.p_out = PathCycles(chip_, Path::kUbToGm, scores * bytes, 1);
    step.p_in = PathCycles(chip_, Path::kGmToL1Nd2Nz, D(rows * n) * bytes, 1);
    constexpr double kSpilled = 0.6;
    step.spilled = kSpilled * D(rows * n) * SpilledShare(chip_, s_.in, D(rows * n) * 4);
    return step;
  }

  // One of many: the slowest pipe counts where stages overlap, their sum where they do not.
  double Amid(const Step& x) const {
    const ProductCycles& p = x.products;
    if (!chip_.pipes_overlap)
      return p.mmad + p.mte1 + x.loads + p.issue + x.softmax + x.spilled + HostStepCycles(chip_);
    const double received = x.scores_in + x.outputs_in;
    if (t_.depth == 0) {  // Each of the three hand-overs is waited for.
      return std::max({p.mmad, p.mte1, x.loads, p.issue}) + x.softmax + x.stores + received + x.p_out +
             x.p_in + 3 * chip_.sync.cross_core;
    }
    // With one stage a pipe waits for the one that fills or empties its tile. K waits for the scores and V for the
    // product, so that either load hides behind the other's Mmads.
    const double vector_side =
        x.softmax + (t_.s_stages == 1 ? x.scores_in : 0) + (t_.ub_stages == 1 ? x.p_out : 0);
    const double loads = x.loads + x.p_in, single = t_.kv_stages == 1 ? (x.loads + p.mmad) / 2 + x.p_in : 0;
    const double multiplies = t_.l0_stages == 1 ? p.mmad + p.mte1 : std::max(p.mmad, p.mte1);
    // `depth` steps of the Vector core have to cover a chain.
    const double covered = (x.softmax + Chain(x)) / D(t_.depth + 1);
    // Stages overlap, but for what they wait for each other: little, so that it tells equals apart.
    constexpr double kBeside = 0.02;
    const double beside =
        kBeside * (multiplies + loads + p.issue + vector_side + x.stores + received + x.p_out);
    return beside +
           std::max({multiplies, loads, single, p.issue, vector_side, x.stores, received, x.p_out, covered});
  }

  // Of the first and the last step, whose stages nothing overlaps with.
  double Ends(const Step& x) const {
    if (!chip_.pipes_overlap || t_.depth == 0) return 0;
    return x.loads + x.products.mmad + x.softmax + Chain(x) + x.stores + x.scores_in + x.outputs_in;
  }

 private:
  // What is moved for a row of K or V: where it stands among others, in whole lines.
  double RowBytes(std::int64_t columns) const {
    const std::int64_t bytes = columns * chip_.OperandBytes(s_.in), line = chip_.memory.l2_line;
    if (!s_.among_others || t_.pack_kv || bytes == 0) return D(bytes);
    return D(bytes + line - std::gcd(bytes, line));  // In the mean of its places in a line.
  }
  // From the P of one step to the scores `depth` steps on: P crosses, the product and the next scores are computed one
  // behind the other, the scores cross.
  double Chain(const Step& x) const {
    return x.p_out + x.p_in + x.products.mmad + x.stores + x.scores_in + 2 * chip_.sync.cross_core;
  }

  const ChipSpec& chip_;
  const Shape& s_;
  const Tiling& t_;
  Path load_path_;
  double load_rate_;
};

// A block of queries: its steps, Q on its way in and O on its way out.
double BlockCycles(const ChipSpec& chip, const Shape& s, const Tiling& t, const Steps& steps, Range q) {
  double cycles = PathCycles(chip, Path::kGmToL1Nd2Nz,
                             D(q.size() * (s.d_qk + s.d_rope)) * D(chip.OperandBytes(s.in)), 1) +
                  2 * VectorCycles(chip, VectorOp::kDiv, D(q.size()) / D(chip.vector_per_cube) * D(s.d_v));
  FlashAttentionPieces pieces(s.band, q, {0, CeilDiv(s.skv, t.kv_splits)}, t);
  for (FlashAttentionPiece piece; pieces.Next(piece);) {
    const Split blocks = BlocksOf(piece.keys, t);
    const Step step = steps.Of(piece.rows.size(), CeilDiv(piece.keys.size(), blocks.count()));
    cycles += D(blocks.count()) * steps.Amid(step);
  }
  return cycles;
}

// The mean over blocks of queries: f(block) is summed over a few that are spread evenly, and over the last, which
// alone may be shorter.
template <class F>
double MeanOverQueryBlocks(const Split& blocks, bool alike, F f) {
  constexpr std::int64_t kSamples = 8;
  const std::int64_t whole = blocks.count() - 1, samples = std::min(whole, alike ? 1 : kSamples);
  double sum = 0;
  for (std::int64_t i = 0; i < samples; ++i) sum += f(blocks[(2 * i + 1) * whole / (2 * samples)]);
  if (samples > 0) sum *= static_cast<double>(whole) / static_cast<double>(samples);
  return (sum + f(blocks[whole])) / static_cast<double>(blocks.count());
}

}  // namespace

double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const Steps steps(chip, s, t);
  double dearest = 0;
  const double mean = MeanOverQueryBlocks(AtLeastOnce(Split(s.sq, t.m)), !s.band.bounded(), [&](Range q) {
    const double cycles = BlockCycles(chip, s, t, steps, q);
    dearest = std::max(dearest, cycles);
    return cycles;
  });
  double total = Waves(chip, t.tasks(s)) * mean;
  // Where a mask makes blocks unlike, the dearest go first, and cheap ones even out what cores have: but for a quarter of
  // one, fitted to replays.
  if (chip.pipes_overlap && s.band.bounded())
    total = std::max((D(t.tasks(s)) / D(chip.concurrent_cores) + 0.25) * mean, dearest);
  total += steps.Ends(steps.Of(std::min(t.m, s.sq), std::min(t.n, s.skv)));
  if (t.pack_kv) {
    const std::int64_t row = s.kv_heads * (s.d_qk + s.d_v) + s.rope_heads * s.d_rope;
    total += PackingCycles(chip, D(s.batches * s.skv) * D(row) * D(chip.OperandBytes(s.in)));
  }
  return total;
}

std::int64_t ReplayWork(const Shape& s, const Tiling& t) {
  constexpr std::int64_t kVectorSide = 12;  // of a step: as long as so many Mmads
  const std::int64_t mmads =
      CeilDiv(s.d_qk, t.k0) + CeilDiv(s.d_rope, t.k0) + t.v_parts * CeilDiv(t.n, t.k0) + kVectorSide;
  const double steps = MeanOverQueryBlocks(AtLeastOnce(Split(s.sq, t.m)), !s.band.bounded(), [&](Range q) {
    return D(CeilDiv(s.band.Seen(q, {0, s.skv}).size(), t.n));
  });
  return static_cast<std::int64_t>(steps) * s.batches * s.heads * t.query_blocks(s) * mmads;
}

}  // namespace cubist
