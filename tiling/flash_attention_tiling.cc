#include "tiling/flash_attention_tiling.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "tiling/choose.h"
#include "tiling/cost.h"
#include "tiling/flash_attention_steps.h"

namespace cubist {
namespace {

using Shape = FlashAttentionShape;
using Tiling = FlashAttentionTiling;

// Bytes that the kernel's rings take; the rings are those of flash_attention_kernel.h.
std::int64_t Need(const ChipSpec& chip, const Shape& s, const Tiling& t, Buffer buffer) {
  const auto slots = [&](int stages, DType dtype, std::int64_t rows, std::int64_t cols) {
    return rows == 0 || cols == 0 ? 0 : stages * chip.SlotBytes(buffer, dtype, rows, cols);
  };
  const std::int64_t lane_rows = CeilDiv(t.m, chip.vector_per_cube), v_cols = t.v_cols(s.d_v);
  switch (buffer) {
    case Buffer::kL1:
      return slots(t.q_stages, s.in, t.m, s.d_qk) + slots(t.q_stages, s.in, t.m, s.d_rope) +
             slots(t.kv_stages, s.in, s.d_qk, t.n) + slots(t.kv_stages, s.in, s.d_rope, t.n) +
             slots(t.kv_stages, s.in, t.n, s.d_v) + slots(t.hand_over_stages(), s.in, t.m, t.n);
    case Buffer::kL0A:
      return slots(t.l0_stages, s.in, t.m, t.k0);
    case Buffer::kL0B:
      return slots(t.l0_stages, s.in, t.k0, std::max(t.n, v_cols));
    case Buffer::kL0C:
      return slots(t.l0c_stages, DType::kF32, t.m, t.n) + slots(t.l0c_stages, DType::kF32, t.m, v_cols);
    case Buffer::kUB:
      return slots(t.s_stages, DType::kF32, lane_rows, t.n) + slots(t.ub_stages, s.in, lane_rows, t.n) +
             slots(t.ub_stages, DType::kF32, lane_rows, s.d_v) +
             slots(t.ub_stages, DType::kF32, lane_rows, v_cols) +
             slots(t.m_stages() + t.l_stages(), DType::kF32, lane_rows, 1) +
             (s.hides() ? slots(1, DType::kF32, lane_rows, 1) : 0) +
             (s.bias ? slots(t.ub_stages, DType::kF32, lane_rows, t.n) : 0) +
             (s.soft_cap || s.alibi ? slots(1, DType::kF32, lane_rows, t.n) : 0) +
             (s.mask || s.dropout ? slots(t.ub_stages, DType::kBool, lane_rows, t.n) : 0) +
             ((s.sinks ? 1 : 0) + (s.alibi ? 1 : 0)) * slots(1, DType::kF32, 1, s.heads) +
             (s.rotate ? RotatorBytes(chip, s.d_rope) + slots(1, s.in, kRotateRows, s.d_rope) : 0);
    default:
      return 0;
  }
}

// The same over every block of queries: f(block) is summed over a few that are spread evenly, and over the last, which
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

// Parts of the keys, where blocks of queries are so few that most cores would stand idle: as many as keep cores busy,
// but each long enough to be worth its output. From the shape and the chip's cores alone, as it orders sums.
std::int64_t KvSplits(const ChipSpec& chip, const Shape& s, std::int64_t m) {
  constexpr std::int64_t kMostRows = 128, kLeastKeys = 1024;
  if (s.sq > kMostRows) return 1;  // Long prompts have rows enough; parts would cost them a twentieth.
  const std::int64_t tasks = std::max<std::int64_t>(s.batches * s.heads * CeilDiv(s.sq, m), 1);
  const std::int64_t keys = s.band.Seen({0, s.sq}, {0, s.skv}).size();
  return std::clamp<std::int64_t>(std::min(chip.cube_cores / tasks, keys / kLeastKeys), 1, 4096);
}

// What a host may do with blocks of t.m and t.n.
void AddHostTilings(const ChipSpec& chip, const Shape& s, Tiling t, std::int64_t k_step,
                    std::vector<Tiling>* tilings) {
  t.k0 = std::max({t.n, RoundUp(s.d_qk, k_step), RoundUp(s.d_rope, k_step)});
  t.kv_stages = t.l0_stages = 1;
  t.by_head = true;
  for (std::int64_t strip : TileSizes({48, 96, 1024}, chip.mmad.m_step, t.m)) {
    if (strip < t.m && !s.band.bounded()) continue;
    t.strip = strip;
    for (bool pack : {false, true}) {
      t.pack_kv = pack;
      if (pack && t.query_blocks(s) * (s.heads / std::max<std::int64_t>(s.kv_heads, 1)) <= 1) continue;
      tilings->push_back(t);
    }
  }
}

// What an NPU may, with t.k0 besides.
void AddNpuTilings(Tiling t, std::vector<Tiling>* tilings) {
  for (int depth = 0; depth <= Tiling::kMaxDepth; ++depth) {
    t.depth = depth;
    for (const auto& [s_stages, ub_stages] : {std::pair(1, 1), std::pair(2, 1), std::pair(2, 2)}) {
      t.s_stages = s_stages, t.ub_stages = t.q_stages = ub_stages;
      for (int kv_stages : {1, 2}) {
        t.kv_stages = kv_stages;
        t.l0_stages = 2;
        tilings->push_back(t);
      }
      t.kv_stages = t.l0_stages = 1;
      tilings->push_back(t);
    }
  }
}

// Rows of more queries, their scores and weights leave no room in L2 for the keys.
constexpr std::int64_t kMostHostRows = 192;

// Blocks of a KV head side by side wait for each other at the same lines, but fetch them once.
bool PaysByKeys(const ChipSpec& chip, const Shape& s) {
  const auto keys = [&](std::int64_t row) { return s.band.Seen({row, row + 1}, {0, s.skv}).size(); };
  const std::int64_t bytes =
      s.batches * s.kv_heads * s.skv * (s.d_qk + s.d_rope + s.d_v) * chip.OperandBytes(s.in);
  return bytes > chip.memory.l2_bytes && s.sq > 0 && keys(0) == s.skv && keys(s.sq - 1) == s.skv;
}

// Every tiling that is considered, whether it fits or not.
std::vector<Tiling> AllTilings(const ChipSpec& chip, const Shape& s) {
  constexpr std::int64_t kNarrowestPart = 128;
  const std::int64_t k_step =
      std::max(chip.mmad.k_bytes / chip.OperandBytes(s.in), chip.packing.row_multiple);
  const std::int64_t n_step = std::max(chip.mmad.n_step, chip.PackedStep(Role::kB, s.in));
  std::vector<Tiling> tilings;
  for (std::int64_t m : TileSizes({16, 32, 64, 96, 128, 192, 256}, chip.mmad.m_step, s.sq)) {
    if (!chip.pipes_overlap && m > kMostHostRows && m < s.sq) continue;
    for (std::int64_t n : TileSizes({16, 32, 64, 128, 256, 512, 1024}, n_step, s.skv)) {
      Tiling t;
      t.m = t.strip = m, t.n = n;
      t.kv_splits = KvSplits(chip, s, m);
      t.key_step = n_step;
      if (!chip.pipes_overlap) {
        AddHostTilings(chip, s, t, k_step, &tilings);
        continue;
      }
      t.by_keys = PaysByKeys(chip, s);
      // Of equals the one with longer steps: it issues less.
      std::vector<std::int64_t> steps = TileSizes({16, 32, 64, 128}, k_step, std::max({n, s.d_qk, s.d_rope}));
      std::reverse(steps.begin(), steps.end());
      for (const std::int64_t k0 : steps) {
        t.k0 = k0;
        for (t.v_parts = 1; t.v_parts == 1 || s.d_v / t.v_parts >= kNarrowestPart; t.v_parts *= 2)
          AddNpuTilings(t, &tilings);
      }
    }
  }
  return tilings;
}

}  // namespace

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  return FitsBuffers(chip, [&](Buffer buffer) { return Need(chip, shape, tiling, buffer); });
}

// Per block of keys the Cube's two products, the Vector's softmax and rescale, and the
// movement of K, V, S, P and O; the slowest pipe counts where stages overlap, sums where
// they do not.
double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double bytes = d(chip.OperandBytes(s.in));
  const double cores = std::min(d(t.tasks(s)), d(chip.concurrent_cores));
  const Path path = t.pack_kv ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  const double load_rate = LoadRate(chip, path, cores);

  double fill = 0;  // Of the first and the last step, whose stages nothing overlaps with.
  // One step: `rows` queries meet `n` keys.
  const auto step = [&](std::int64_t rows, std::int64_t n) {
    double mmad = 0, mte1 = 0, issue = 0;
    const auto product = [&](std::int64_t k, std::int64_t width) {
      for (const Range k0 : Split(k, t.k0)) {
        mmad += MmadCycles(chip, s.in, rows, k0.size(), width);
        mte1 += PathCycles(chip, Path::kL1ToL0A, d(rows * k0.size()) * bytes, 1) +
                PathCycles(chip, Path::kL1ToL0B, d(k0.size() * width) * bytes, 1);
        issue += 3 * chip.scalar.issue;
      }
    };
    product(s.d_qk, n);
    product(s.d_rope, n);
    const Split outputs_at_once(s.d_v, t.v_cols(s.d_v));
    for (const Range cols : outputs_at_once) product(n, cols.size());
    const double mte2 = 3 * chip.path(path).startup + d(n * (s.d_qk + s.d_rope + s.d_v)) * bytes / load_rate;
    const double lane_rows = d(rows) / d(chip.vector_per_cube);
    const double scores = lane_rows * d(n), outputs = lane_rows * d(s.d_v);
    const double vector =
        2 * VectorCycles(chip, VectorOp::kUnary, scores) + VectorCycles(chip, VectorOp::kExp, scores) +
        VectorCycles(chip, VectorOp::kBinary, scores) + 2 * VectorCycles(chip, VectorOp::kReduce, scores) +
        2 * VectorCycles(chip, VectorOp::kBinary, outputs) +
        6 * VectorCycles(chip, VectorOp::kBinary, lane_rows) +
        (s.bias ? 2 * VectorCycles(chip, VectorOp::kBinary, scores) : 0) +
        (s.soft_cap
             ? VectorCycles(chip, VectorOp::kExp, scores) + VectorCycles(chip, VectorOp::kDiv, scores) +
                   4 * VectorCycles(chip, VectorOp::kUnary, scores)
             : 0) +
        (s.mask ? 3 * VectorCycles(chip, VectorOp::kSelect, scores) : 0) +
        (s.alibi ? 4 * VectorCycles(chip, VectorOp::kUnary, scores) : 0) +
        (s.dropout ? 13 * VectorCycles(chip, VectorOp::kInteger, scores) +
                         3 * VectorCycles(chip, VectorOp::kSelect, scores)
                   : 0);
    if (!chip.pipes_overlap) return mmad + mte1 + mte2 + issue + vector;

    // Scores and outputs cross to the Vector cores, P back; without overlap each of the three hand-overs is waited for.
    const double sent =
        PathCycles(chip, Path::kL0CToGm, d(rows) * d(n + s.d_v) * 4, 1 + d(outputs_at_once.count()));
    const double scores_in = PathCycles(chip, Path::kGmToUb, scores * 4, 1);
    const double received = scores_in + PathCycles(chip, Path::kGmToUb, outputs * 4, 1);
    const double p_in = PathCycles(chip, Path::kGmToL1Nd2Nz, d(rows * n) * bytes, 1);
    const double p_out = PathCycles(chip, Path::kUbToGm, scores * bytes, 1);
    if (t.depth == 0) {
      return Overlap(chip, true, {mmad, mte1, mte2, issue}) + vector + sent + received + p_out + p_in +
             3 * chip.sync.cross_core;
    }
    // With one stage a pipe waits for the one that fills or empties its tile. K waits for the scores and V for the
    // product, so that either load hides behind the other's Mmads.
    const double vector_side = vector + (t.s_stages == 1 ? scores_in : 0) + (t.ub_stages == 1 ? p_out : 0);
    const double loads = mte2 + p_in, single = t.kv_stages == 1 ? (mte2 + mmad) / 2 + p_in : 0;
    const double multiplies = t.l0_stages == 1 ? mmad + mte1 : std::max(mmad, mte1);
    // From the P of one step to the scores `depth` steps on: P crosses, the product and the next scores are computed
    // one behind the other, the scores cross. `depth` steps of the Vector core have to cover it.
    const double chain = p_out + p_in + mmad + sent + scores_in + 2 * chip.sync.cross_core;
    const double covered = (vector + chain) / d(t.depth + 1);
    fill = mte2 + mmad + vector + chain + sent + received;
    // Stages overlap, but for what they wait for each other: little, so that it tells equals apart.
    constexpr double kBeside = 0.02;
    const double beside = kBeside * (multiplies + loads + issue + vector_side + sent + received + p_out);
    return beside + Overlap(chip, true,
                            {multiplies, loads, single, issue, vector_side, sent, received, p_out, covered});
  };
  // A block of queries: its pieces, Q on its way in and O on its way out.
  double dearest = 0;
  const auto task = [&](Range q) {
    double cycles = PathCycles(chip, Path::kGmToL1Nd2Nz, d(q.size() * (s.d_qk + s.d_rope)) * bytes, 1) +
                    2 * VectorCycles(chip, VectorOp::kDiv, d(q.size()) / d(chip.vector_per_cube) * d(s.d_v));
    FlashAttentionPieces pieces(s.band, q, {0, CeilDiv(s.skv, t.kv_splits)}, t);
    for (FlashAttentionPiece piece; pieces.Next(piece);) {
      const Split blocks = BlocksOf(piece.keys, t);
      cycles += d(blocks.count()) * step(piece.rows.size(), CeilDiv(piece.keys.size(), blocks.count()));
    }
    dearest = std::max(dearest, cycles);
    return cycles;
  };
  const Split query_blocks = AtLeastOnce(Split(s.sq, t.m));
  const double mean = MeanOverQueryBlocks(query_blocks, !s.band.bounded(), task);
  double total = Waves(chip, t.tasks(s)) * mean;
  // Where a mask makes blocks unlike, the dearest go first, and cheap ones even out what cores have: but for a quarter of
  // one, fitted to replays.
  if (chip.pipes_overlap && s.band.bounded())
    total = std::max((d(t.tasks(s)) / d(chip.concurrent_cores) + 0.25) * mean, dearest);
  total += fill;
  if (t.pack_kv) {
    const double all =
        d(s.batches * s.skv) * (d(s.kv_heads * (s.d_qk + s.d_v)) + d(s.rope_heads * s.d_rope)) * bytes;
    total +=
        chip.sync.barrier_s * chip.clock_hz +
        2 * all / LoadRate(chip, Path::kGmToL1Nd2Nz, d(chip.concurrent_cores)) / d(chip.concurrent_cores);
  }
  return total;
}

std::int64_t ReplayWork(const Shape& s, const Tiling& t) {
  constexpr std::int64_t kVectorSide = 12;  // of a step: as long as so many Mmads
  const std::int64_t mmads =
      CeilDiv(s.d_qk, t.k0) + CeilDiv(s.d_rope, t.k0) + t.v_parts * CeilDiv(t.n, t.k0) + kVectorSide;
  const double steps = MeanOverQueryBlocks(AtLeastOnce(Split(s.sq, t.m)), !s.band.bounded(), [&](Range q) {
    return static_cast<double>(CeilDiv(s.band.Seen(q, {0, s.skv}).size(), t.n));
  });
  return static_cast<std::int64_t>(steps) * s.batches * s.heads * t.query_blocks(s) * mmads;
}

std::vector<Tiling> Candidates(const ChipSpec& chip, const Shape& shape) {
  std::vector<Tiling> candidates = AllTilings(chip, shape);
  std::erase_if(candidates, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return candidates;
}

Status Choose(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  return ChooseCheapest(
      chip, shape, "flash_attention", &AllTilings,
      [&](const Tiling& t, Buffer buffer) { return Need(chip, shape, t, buffer); }, tiling);
}

}  // namespace cubist
