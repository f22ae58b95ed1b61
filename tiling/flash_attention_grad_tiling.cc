#include "tiling/flash_attention_grad_tiling.h"

#include <cmath>
#include <string>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

using Shape = FlashAttentionGradShape;
using Tiling = FlashAttentionGradTiling;

// Bytes that the kernel's rings take; the rings are those of flash_attention_grad_kernel.h.
std::int64_t Need(const ChipSpec& chip, const Shape& s, const Tiling& t, Buffer buffer) {
  const auto slots = [&](int stages, DType dtype, std::int64_t rows, std::int64_t cols) {
    return rows == 0 || cols == 0 ? 0 : stages * chip.SlotBytes(buffer, dtype, rows, cols);
  };
  const std::int64_t lane_rows = CeilDiv(t.n, chip.vector_per_cube);
  const int kept = t.operand_stages(), handed = t.hand_over_stages();
  switch (buffer) {
    case Buffer::kL1: {
      std::int64_t bytes = 2 * slots(handed, s.in, t.n, t.m());
      for (const std::int64_t cols : {s.d_qk, s.d_rope, s.d_v})
        bytes += slots(kept, s.in, t.n, cols) + slots(kept, s.in, t.m(), cols);
      return bytes;
    }
    case Buffer::kL0A:
      return slots(t.l0_stages, s.in, std::max(t.piece(), t.n), t.k0);
    case Buffer::kL0B:
      return slots(t.l0_stages, s.in, t.k0, std::max({t.piece(), s.d_qk, s.d_rope, s.d_v}));
    case Buffer::kL0C: {
      const std::int64_t widest = std::max({s.d_qk, s.d_rope, t.keep_sums ? 0 : s.d_v});
      std::int64_t bytes =
          slots(2, DType::kF32, t.n, t.piece()) +
          slots(t.sum_stages, DType::kF32, t.keep_sums ? t.piece() : std::max(t.piece(), t.n), widest);
      if (!t.keep_sums) return bytes;
      for (const std::int64_t cols : {s.d_qk, s.d_rope, s.d_v}) bytes += slots(1, DType::kF32, t.n, cols);
      return bytes;
    }
    case Buffer::kUB:
      return slots(2 * t.ub_stages, DType::kF32, lane_rows, t.piece()) +
             slots(2 * t.ub_stages, s.in, lane_rows, t.piece()) +
             slots(2 * t.ub_stages, DType::kF32, 1, t.piece()) +
             slots((s.by_query() ? 1 : 0) + (s.dbias ? 1 : 0), DType::kF32, t.piece(), lane_rows) +
             slots((s.soft_cap ? 1 : 0) + (s.scratch() ? 1 : 0), DType::kF32, lane_rows, t.piece()) +
             slots(s.mask ? 1 : 0, DType::kBool, t.piece(), lane_rows) +
             slots(s.mask ? 1 : 0, DType::kF32, lane_rows, 1) +
             slots(s.dropout ? 1 : 0, DType::kBool, lane_rows, t.piece()) +
             slots(s.alibi ? 1 : 0, DType::kF32, 1, s.heads) +
             slots(t.keep_sums ? 1 : 0, DType::kF32, lane_rows, s.d_qk) +
             slots(t.keep_sums ? 1 : 0, DType::kF32, lane_rows, s.d_rope);
    default:
      return 0;
  }
}

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

// From the shape alone: enough tasks for many threads, and few copies of dQ, which go to memory and back.
std::int64_t HostChunks(const Shape& s, std::int64_t key_blocks) {
  constexpr std::int64_t kTasks = 16;
  const std::int64_t heads = std::max<std::int64_t>(s.shares(), 1);
  return std::clamp<std::int64_t>(CeilDiv(kTasks, heads), 1, std::max<std::int64_t>(key_blocks, 1));
}

void AddHostTilings(const ChipSpec& chip, const Shape& s, std::vector<Tiling>& tilings) {
  const std::int64_t panel = chip.PackedStep(Role::kB, s.in);
  for (std::int64_t n : TileSizes({16, 32, 64, 128, 192, 256, 320}, chip.mmad.m_step, s.skv)) {
    for (std::int64_t piece : TileSizes({32, 64, 128, 192, 256}, panel, s.sq)) {
      // Two panels wide where a mask cuts the keys: half of them saves as much as its Mmads lose.
      const std::int64_t narrow = 2 * panel;
      Tiling t;
      t.n = n, t.strip = s.band.bounded() && piece % narrow == 0 ? narrow : piece;
      t.strips = piece / t.strip;
      t.k0 = std::max({n, piece, s.d_qk, s.d_rope, s.d_v, std::int64_t{1}});
      t.l0_stages = 1;
      t.keep_sums = t.by_head = true;
      t.chunks = HostChunks(s, t.key_blocks(s));
      for (bool pack : {false, true}) {
        t.pack_queries = pack;
        if (pack && t.key_blocks(s) <= 1) continue;
        tilings.push_back(t);
      }
    }
  }
}

// Every tiling that is considered, whether it fits or not.
std::vector<Tiling> AllTilings(const ChipSpec& chip, const Shape& s) {
  std::vector<Tiling> tilings;
  if (!chip.pipes_overlap) {
    AddHostTilings(chip, s, tilings);
    return tilings;
  }
  const std::int64_t step = std::max({chip.mmad.k_bytes / chip.OperandBytes(s.in), chip.packing.row_multiple,
                                      chip.mmad.m_step, chip.mmad.n_step});
  const std::int64_t longest = std::max({s.d_qk, s.d_rope, s.d_v, s.sq, s.skv});
  for (std::int64_t n : TileSizes({16, 32, 64, 128, 256}, step, s.skv)) {
    for (std::int64_t piece : TileSizes({16, 32, 64, 128}, step, s.sq)) {
      for (std::int64_t pieces : {1, 2, 4}) {
        for (std::int64_t k0 : TileSizes({16, 32, 64, 128}, step, longest)) {
          for (int depth : {0, 1}) {
            for (int stages : {1, 2}) {
              Tiling t;
              t.n = n, t.strip = piece, t.pieces = pieces;
              t.k0 = k0, t.depth = depth;
              t.sum_stages = t.ub_stages = stages;
              t.l0_stages = 2;
              // As many tasks as cores, for 24, 12, 8, 6, 4 or 2 heads on 24 or 20 of them.
              for (std::int64_t chunks : {1, 2, 3, 4, 6, 12}) {
                t.chunks = std::min(chunks, std::max<std::int64_t>(t.key_blocks(s), 1));
                if (t.chunks < chunks) break;
                tilings.push_back(t);
              }
            }
          }
        }
      }
    }
  }
  return tilings;
}

}  // namespace

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  return FitsBuffers(chip, [&](Buffer buffer) { return Need(chip, shape, tiling, buffer); });
}

// Per block of keys and queries the Cube's five products, the Vector's step, the hand-overs and the sums that go to GM;
// the slowest pipe counts where stages overlap, sums where they do not.
double Price(const ChipSpec& chip, const Shape& s, const Tiling& t) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double bytes = d(chip.OperandBytes(s.in));
  const std::int64_t n = std::min(t.n, std::max<std::int64_t>(s.skv, 1));
  const std::int64_t m = std::min(t.m(), std::max<std::int64_t>(s.sq, 1));
  const std::int64_t piece = std::min(t.piece(), m);
  const double pieces = d(m) / d(piece);
  const double cores = std::min(d(t.tasks(s)), d(chip.concurrent_cores));
  const double blocks = ComputedShare(s, t) * d(s.sq) * d(s.skv) / (d(m) * d(n));

  double mmad = 0, mte1 = 0, issue = 0, fix = 0, written = 0;
  // (rows, k) times (k, width), `times` over.
  const auto product = [&](double times, std::int64_t rows, std::int64_t k, std::int64_t width) {
    for (const Range k0 : Split(width == 0 ? 0 : k, t.k0)) {
      mmad += times * MmadCycles(chip, s.in, rows, k0.size(), width);
      mte1 += times * (PathCycles(chip, Path::kL1ToL0A, d(rows * k0.size()) * bytes, 1) +
                       PathCycles(chip, Path::kL1ToL0B, d(k0.size() * width) * bytes, 1));
      issue += times * 3 * chip.scalar.issue;
    }
  };
  const auto store = [&](double times, std::int64_t rows, std::int64_t cols) {
    if (cols == 0) return;
    fix += times * PathCycles(chip, Path::kL0CToGm, d(rows * cols) * 4, 1);
    written += times * d(rows * cols) * 4;
  };
  for (const std::int64_t cols : {s.d_qk, s.d_rope, s.d_v}) product(pieces, n, cols, piece);
  for (const std::int64_t cols : {s.d_qk, s.d_rope}) {
    product(pieces, piece, n, cols), product(1, n, m, cols);
    store(pieces, piece, cols);
    if (!t.keep_sums) store(1, n, cols);
  }
  product(1, n, m, s.d_v);
  if (!t.keep_sums) store(1, n, s.d_v);
  if (chip.pipes_overlap) store(2 * pieces, n, piece);

  const std::int64_t columns = s.d_qk + s.d_rope + s.d_v;
  const Path path = t.pack_queries ? Path::kGmToL1 : Path::kGmToL1Nd2Nz;
  // The host fills a layout for each of the two roles.
  const double layouts = chip.pipes_overlap || t.pack_queries ? 1 : 2;
  const double mte2 =
      3 * chip.path(path).startup + layouts * d(m * columns) * bytes / LoadRate(chip, path, cores) +
      2 * d(m * n) * bytes / LoadRate(chip, Path::kGmToL1Nd2Nz, cores) * (chip.pipes_overlap ? 1 : 0.25);
  const double scores = d(n) / d(chip.vector_per_cube) * d(piece);
  const double vector =
      pieces *
      (VectorCycles(chip, VectorOp::kUnary, scores) + 3 * VectorCycles(chip, VectorOp::kBinary, scores) +
       VectorCycles(chip, VectorOp::kExp, scores) + 2 * VectorCycles(chip, VectorOp::kCast, scores));
  // P and dS leave UB piece by piece, for tiles whose rows are as long as all pieces.
  const double handed =
      2 * pieces * SlotBytes(chip, d(n), piece * chip.OperandBytes(s.in), m * chip.OperandBytes(s.in));
  const double mte3 =
      chip.pipes_overlap ? handed / d(chip.vector_per_cube) / chip.path(Path::kUbToGm).bytes_per_cycle : 0;
  // Scores and their gradients on their way in; with one stage the Vector core waits for part of that, and of what leaves:
  // fitted to replays.
  constexpr double kWaits = 0.2;
  const double received =
      chip.pipes_overlap ? 2 * pieces * PathCycles(chip, Path::kGmToUb, scores * 4, 1) : 0;
  const double vector_side = vector + (t.ub_stages == 1 ? kWaits * (received + mte3) : 0);
  const double waits = t.depth > 0 ? 0 : 2 * pieces * chip.sync.cross_core;
  const double sums = chip.pipes_overlap ? 0 : d(m * (s.d_qk + s.d_rope)) * 0.5;

  // Stages of neighbouring blocks overlap, but for what they wait for each other: fitted to replays.
  constexpr double kBeside = 0.1;
  const double beside =
      chip.pipes_overlap ? kBeside * (mmad + mte1 + mte2 + issue + vector_side + fix + mte3) : 0;
  double block =
      t.depth > 0 ? beside + Overlap(chip, true, {mmad, mte1, mte2, issue, vector_side, fix, received, mte3})
                  : beside + Overlap(chip, true, {mmad, mte1, mte2, issue, fix}) + vector + mte3 + waits;
  // The host's accumulators come from and go to L2 once per block.
  if (!chip.pipes_overlap) block += sums + 0.5 * d(n * columns + m * (s.d_qk + s.d_rope) + 2 * n * m);
  const double ends = layouts * d(n * columns) * bytes / LoadRate(chip, Path::kGmToL1Nd2Nz, cores);
  double total =
      Waves(chip, t.tasks(s)) / d(t.chunks) * (d(s.group()) * blocks * block + d(t.key_blocks(s)) * ends);
  total *= d(s.batches * s.kv_heads) / d(std::max<std::int64_t>(s.shares(), 1));
  // L2 takes what all cores write.
  if (chip.pipes_overlap) {
    total = std::max(total, d(s.batches * s.heads) * blocks * (written + handed) /
                                (chip.memory.l2_write_bytes_per_s / chip.clock_hz));
  }
  total += d(2 * t.depth) * block;
  const double all = d(s.batches * s.heads * s.sq) * d(columns) * bytes;
  if (t.pack_queries) {
    total += chip.sync.barrier_s * chip.clock_hz +
             2 * layouts * all / LoadRate(chip, Path::kGmToL1Nd2Nz, d(chip.concurrent_cores)) /
                 d(chip.concurrent_cores);
  }
  // The last phase reads dQ's parts.
  total += d(t.chunks) * d(s.batches * s.heads * s.sq * (s.d_qk + s.d_rope)) * 4 * 2 /
           LoadRate(chip, Path::kGmToUb, d(chip.concurrent_cores)) / d(chip.concurrent_cores);
  return total;
}

std::int64_t ReplayWork(const Shape& s, const Tiling& t) {
  constexpr std::int64_t kVectorSide = 16;  // of a piece: as long as so many Mmads
  std::int64_t mmads = CeilDiv(s.d_v, t.k0) + CeilDiv(t.piece(), t.k0);
  for (const std::int64_t cols : {s.d_qk, s.d_rope})
    if (cols > 0) mmads += CeilDiv(cols, t.k0) + CeilDiv(t.n, t.k0) + CeilDiv(t.piece(), t.k0);
  const double pieces =
      ComputedShare(s, t) * static_cast<double>(CeilDiv(s.sq, t.piece()) * CeilDiv(s.skv, t.n));
  return static_cast<std::int64_t>(pieces) * s.batches * s.heads * (mmads + kVectorSide);
}

std::vector<Tiling> Candidates(const ChipSpec& chip, const Shape& shape) {
  std::vector<Tiling> candidates = AllTilings(chip, shape);
  std::erase_if(candidates, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return candidates;
}

Status Choose(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  return ChooseCheapest(
      chip, shape, "flash_attention_grad", &AllTilings,
      [&](const Tiling& t, Buffer buffer) { return Need(chip, shape, t, buffer); }, tiling);
}

}  // namespace cubist
