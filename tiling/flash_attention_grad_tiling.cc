#include "tiling/flash_attention_grad_tiling.h"

#include <algorithm>
#include <utility>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

using Shape = FlashAttentionGradShape;
using Tiling = FlashAttentionGradTiling;

constexpr int kNpuL0Stages = 2;

std::int64_t Widest(const Shape& s) { return std::max({s.d_qk, s.d_rope, s.d_v}); }

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
      if (s.hides()) bytes += slots(kept, s.in, t.n, s.d_qk) + slots(kept, s.in, t.n, s.d_rope);
      return bytes;
    }
    case Buffer::kL0A:
      return slots(t.l0_stages, s.in, std::max(t.piece(), t.n), t.k0);
    case Buffer::kL0B:
      return slots(t.l0_stages, s.in, t.k0, std::max(t.piece(), t.cols_at_once(Widest(s))));
    case Buffer::kL0C: {
      const std::int64_t widest_part = t.keep_sums ? std::max(s.d_qk, s.d_rope) : Widest(s);
      std::int64_t bytes =
          slots(2, DType::kF32, t.n, t.piece()) + slots(t.sum_stages, DType::kF32,
                                                        t.keep_sums ? t.piece() : std::max(t.piece(), t.n),
                                                        t.cols_at_once(widest_part));
      if (!t.keep_sums) return bytes;
      for (const std::int64_t cols : {s.d_qk, s.d_rope, s.d_v}) bytes += slots(1, DType::kF32, t.n, cols);
      return bytes;
    }
    case Buffer::kUB:
      return slots(2 * t.ub_stages, DType::kF32, lane_rows, t.piece()) +
             slots(2 * t.ub_stages, s.in, lane_rows, t.piece()) +
             slots(2 * t.ub_stages, DType::kF32, 1, t.piece()) +
             slots((s.by_query() ? 1 : 0) + (s.dbias ? 1 : 0), DType::kF32, t.piece(), lane_rows) +
             slots((s.soft_cap > 0 ? 1 : 0) + (s.scratch() ? 1 : 0), DType::kF32, lane_rows, t.piece()) +
             slots(s.mask ? 1 : 0, DType::kBool, t.piece(), lane_rows) +
             slots(s.mask ? 1 : 0, DType::kF32, lane_rows, 1) +
             slots(s.mask ? 1 : 0, DType::kI32, t.mask_cells(s), t.mask_step == 0 ? 2 : kHiddenParts) +
             slots(s.mask ? 1 : 0, DType::kF32, kZeroRows, std::max(s.d_qk, s.d_rope)) +
             slots(s.dropout ? 1 : 0, DType::kBool, lane_rows, t.piece()) +
             slots(s.alibi ? 1 : 0, DType::kF32, 1, s.heads) +
             slots(t.keep_sums ? 1 : 0, DType::kF32, lane_rows, s.d_qk) +
             slots(t.keep_sums ? 1 : 0, DType::kF32, lane_rows, s.d_rope);
    default:
      return 0;
  }
}

// From the shape alone: enough tasks for many threads, and few copies of dQ, which go to memory and back.
std::int64_t HostChunks(const Shape& s, std::int64_t key_blocks) {
  constexpr std::int64_t kTasks = 16;
  const std::int64_t heads = std::max<std::int64_t>(s.shares(), 1);
  return std::clamp<std::int64_t>(CeilDiv(kTasks, heads), 1, std::max<std::int64_t>(key_blocks, 1));
}

void AddHostTilings(const ChipSpec& chip, const Shape& s, std::vector<Tiling>& tilings) {
  const std::int64_t panel = chip.PackedStep(Role::kB, s.in);
  constexpr std::int64_t kMostInRegisters = 256;  // Rows that pass a panel of B together.
  for (std::int64_t n : TileSizes({16, 32, 64, 128, 192, 256, 320}, chip.RowStep(s.in), s.skv)) {
    if (chip.InTileRegisters(s.in) && n > kMostInRegisters) break;
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
      // Whole tiles of registers, and pairs of keys. A bias of one column adds up the keys of a tile in an order of its own.
      t.mask_step = s.mask && !s.dbias ? 2 * chip.RowStep(s.in) : 0;
      for (bool pack : {false, true}) {
        t.pack_queries = pack;
        if (pack && t.key_blocks(s) <= 1) continue;
        tilings.push_back(t);
      }
    }
  }
}

// The widths of products: all columns, or where the shortest steps of the widest do not fit L0B, what of them may.
std::vector<std::int64_t> NpuWidths(const ChipSpec& chip, const Shape& s, std::int64_t step) {
  const std::int64_t widest = Widest(s), bytes = chip.SlotBytes(Buffer::kL0B, s.in, step, widest);
  if (kNpuL0Stages * bytes <= chip.buffer(Buffer::kL0B).capacity) return {0};
  return TileSizes({64, 128, 192, 256, 384}, step, widest);
}

void AddNpuTilings(const Shape& s, Tiling t, std::vector<Tiling>& tilings) {
  t.l0_stages = kNpuL0Stages;
  // Deeper walks keep more than two of what they load.
  for (const auto& [depth, load_stages] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 1)}) {
    for (int stages : {1, 2}) {
      t.depth = depth, t.load_stages = load_stages, t.sum_stages = t.ub_stages = stages;
      // As many tasks as cores, for 24, 12, 8, 6, 4 or 2 heads on 24 or 20 of them.
      for (std::int64_t chunks : {1, 2, 3, 4, 6, 12}) {
        t.chunks = std::min(chunks, std::max<std::int64_t>(t.key_blocks(s), 1));
        if (t.chunks < chunks) break;
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
  const std::int64_t step = std::max({chip.KStep(s.in), chip.mmad.m_step, chip.mmad.n_step});
  const std::int64_t longest = std::max({Widest(s), s.sq, s.skv});
  const std::vector<std::int64_t> widths = NpuWidths(chip, s, step);
  for (std::int64_t n : TileSizes({16, 32, 64, 128, 256}, step, s.skv)) {
    for (std::int64_t piece : TileSizes({16, 32, 64, 128}, step, s.sq)) {
      for (std::int64_t pieces : {1, 2, 4}) {
        for (std::int64_t k0 : TileSizes({16, 32, 64, 128}, step, longest)) {
          for (std::int64_t width : widths) {
            Tiling t;
            t.n = n, t.strip = piece, t.pieces = pieces;
            t.k0 = k0, t.width = width;
            AddNpuTilings(s, t, tilings);
          }
        }
      }
    }
  }
  return tilings;
}

}  // namespace

std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const Tiling& tiling, Buffer buffer) {
  return Need(chip, shape, tiling, buffer);
}

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  return FitsBuffers(chip, shape, tiling) && (tiling.width == 0 || !tiling.keep_sums);
}

std::vector<Tiling> Candidates(const ChipSpec& chip, const Shape& shape) {
  std::vector<Tiling> candidates = AllTilings(chip, shape);
  std::erase_if(candidates, [&](const Tiling& t) { return !Fits(chip, shape, t); });
  return candidates;
}

Status Choose(const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  return ChooseCheapest(chip, shape, &AllTilings, tiling);
}

}  // namespace cubist
