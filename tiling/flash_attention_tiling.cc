#include "tiling/flash_attention_tiling.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "tiling/choose.h"
#include "tiling/cost.h"
#include "tiling/matmul_tiling.h"

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
             slots(t.k_stages(), s.in, s.d_qk, t.n) + slots(t.kv_stages, s.in, s.d_rope, t.n) +
             (t.v_from_k ? 0 : slots(t.kv_stages, s.in, t.n, s.d_v)) +
             slots(t.hand_over_stages(), s.in, t.m, t.n);
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
             slots(s.score_scratch(), DType::kF32, lane_rows, t.n) +
             (s.skips_hidden() ? slots(1, DType::kI32, t.mask_cells(s), kHiddenCounts) : 0) +
             (s.skips_hidden() ? slots(1, DType::kI32, 1, kHiddenCounts) : 0) +
             (s.mask || s.dropout ? slots(t.ub_stages, DType::kBool, lane_rows, t.n) : 0) +
             ((s.sinks ? 1 : 0) + (s.alibi ? 1 : 0)) *
                 slots(1, DType::kF32, s.folds() ? lane_rows : 1, s.folds() ? 1 : s.heads) +
             (s.folds() && s.alibi ? slots(1, DType::kF32, 1, t.n) : 0);
    default:
      return 0;
  }
}

// The most parts that so many keys are walked in.
std::int64_t MostSplits(const ChipSpec& chip, const Shape& s, std::int64_t keys) {
  constexpr std::int64_t kMostRows = 128, kMostPerCore = 8;
  if (s.sq / s.band.fold > kMostRows)
    return 1;  // Long prompts have rows enough; parts would cost them a twentieth.
  const std::int64_t least_keys = chip.pipes_overlap ? 512 : 1024;
  return std::clamp<std::int64_t>(keys / least_keys, 1, kMostPerCore * chip.cube_cores);
}

// Parts of the keys, where blocks of queries are few: those with which the cores are done first, from the shape, the
// lengths and the chip's cores alone, as they order sums. time(splits) is in keys that a block of queries walks.
template <class Time>
std::int64_t QuickestSplits(const ChipSpec& chip, const Shape& s, std::int64_t keys, Time time) {
  std::int64_t best = 1;
  auto shortest = time(1);
  for (std::int64_t splits = 2; splits <= MostSplits(chip, s, keys); ++splits) {
    const auto needed = time(splits);
    if (needed < shortest) best = splits, shortest = needed;
  }
  return best;
}

// What a task costs beside its keys, its output where that is a part's, and the phase that combines parts: as many keys.
constexpr std::int64_t kTaskKeys = 256, kPartKeys = 128, kCombineKeys = 512;

// The rows of a block of queries that RaggedSplits takes for granted: what most tilings of more take.
constexpr std::int64_t kRaggedRows = 64;

std::int64_t KvSplits(const ChipSpec& chip, const Shape& s, std::int64_t m) {
  const std::int64_t blocks = std::max<std::int64_t>(CeilDiv(s.sq, m), 1),
                     tasks = s.batches * s.heads * blocks;
  const std::int64_t keys = s.band.Seen({0, s.sq}, {0, s.skv}).size();
  if (s.ragged_splits > 0) {  // Of fewer blocks in as many more parts.
    const std::int64_t splits = s.ragged_splits * CeilDiv(s.sq, kRaggedRows) / blocks;
    return std::clamp<std::int64_t>(splits, 1, MostSplits(chip, s, keys));
  }
  return QuickestSplits(chip, s, keys, [&](std::int64_t splits) {
    const std::int64_t task = CeilDiv(keys, splits) + kTaskKeys + (splits > 1 ? kPartKeys : 0);
    const auto rounds = static_cast<double>(CeilDiv(tasks * splits, chip.cube_cores));
    return rounds * static_cast<double>(task) + static_cast<double>(splits > 1 ? kCombineKeys : 0);
  });
}

// What a host may do with blocks of t.m and t.n.
void AddHostTilings(const ChipSpec& chip, const Shape& s, Tiling t, std::int64_t k_step,
                    std::vector<Tiling>* tilings) {
  t.k0 = std::max({t.n, RoundUp(s.d_qk, k_step), RoundUp(s.d_rope, k_step)});
  t.kv_stages = t.l0_stages = 1;
  t.by_head = true;
  // Blocks are long, and to ask for their parts costs next to nothing.
  t.mask_step = t.key_step;
  // Keys that meet one block of queries are read where they lie: few queries as a packed copy costs as much as 100 rows of products
  // do, and more of them where keys are long. One thread of a Zen 5, without and with: 128 queries of 512 keys 367 and 395 GFLOP/s in
  // bf16, 199 and 220 in fp32, 192 of 4096 408 and 430, 216 and 229; 128 of 256 bf16 361 and 342. Of low tiles (a Zen 3) as many
  // queries, where products would take fewer rows: 24 to 96 of them fp32 1.02 to 1.2 times as fast, bf16 .92 to 1.03.
  constexpr std::int64_t kMostOfShortKeys = 96;
  const std::int64_t most_once = chip.InTileRegisters(s.in) ? kMostOnceInTileRegisters
                                 : s.skv > 2 * s.sq         ? kMostOnce
                                                            : kMostOfShortKeys;
  const bool meets_one = t.query_blocks(s) * (s.heads / std::max<std::int64_t>(s.kv_heads, 1)) <= 1;
  // Register tiles of a strip; of tile registers two at least, or B serves one alone.
  const std::int64_t narrow = (chip.InTileRegisters(s.in) ? 2 : 4) * chip.RowStep(s.in);
  for (std::int64_t strip : TileSizes({narrow, 96, 1024}, chip.RowStep(s.in), t.m)) {
    if (strip < t.m && !s.band.bounded()) continue;
    t.strip = strip;
    for (bool pack : {false, true}) {
      t.pack_kv = pack;
      t.kv_once = meets_one && !pack && s.sq <= most_once;
      if (pack && meets_one) continue;
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
  const std::int64_t k_step = chip.KStep(s.in);
  const std::int64_t n_step = chip.ColumnStep(s.in);
  std::vector<Tiling> tilings;
  for (std::int64_t m : TileSizes({16, 32, 64, 96, 128, 192, 256}, chip.RowStep(s.in), s.sq)) {
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
      t.by_keys = t.query_blocks(s) > 1 && PaysByKeys(chip, s);
      // Of equals the one with longer steps: it issues less.
      std::vector<std::int64_t> steps = TileSizes({16, 32, 64, 128}, k_step, std::max({n, s.d_qk, s.d_rope}));
      std::reverse(steps.begin(), steps.end());
      for (const std::int64_t k0 : steps) {
        t.k0 = k0;
        for (t.v_parts = 1; t.v_parts == 1 || s.d_v / t.v_parts >= kNarrowestPart; t.v_parts *= 2) {
          // Keys that many rows meet come from L2, and the room of two more of their tiles is worth more.
          constexpr std::int64_t kMostRows = 128;
          for (const bool v_from_k : {false, true}) {
            if (v_from_k && (!s.v_in_k || s.sq > kMostRows)) break;
            t.v_from_k = v_from_k;
            for (const bool pack : {false, true}) {
              if (pack && (!s.among_others || v_from_k)) break;
              t.pack_kv = pack;
              t.key_step = pack ? chip.PackedBlockStep(s.in) : n_step;
              if (t.n % t.key_step != 0) continue;
              AddNpuTilings(t, &tilings);
            }
          }
        }
      }
    }
  }
  return tilings;
}

}  // namespace

// Parts are dealt as FlashAttentionSteps deals them: whole ones first, then what is left of each sequence, forth and back.
std::int64_t RaggedSplits(const ChipSpec& chip, const Shape& shape,
                          std::span<const AttentionSequence> sequences) {
  std::vector<std::int64_t> keys;  // Of each block of queries.
  for (const AttentionSequence& x : sequences) {
    const std::int64_t seen = x.band.Seen({0, x.sq}, {0, x.skv}).size();
    keys.insert(keys.end(), static_cast<std::size_t>(CeilDiv(x.sq, kRaggedRows)), seen);
  }
  std::sort(keys.begin(), keys.end(), std::greater<>());
  if (keys.empty()) return 1;
  std::vector<std::int64_t> left, cores(static_cast<std::size_t>(chip.cube_cores));
  const std::int64_t longest = keys.front(), count = chip.cube_cores;
  return QuickestSplits(chip, shape, longest, [&](std::int64_t splits) {
    const std::int64_t part = std::max<std::int64_t>(CeilDiv(longest, splits), 1);
    std::int64_t whole = 0;
    left.clear();
    for (const std::int64_t x : keys) {
      const std::int64_t parts = std::max<std::int64_t>(CeilDiv(x, part), 1);
      whole += parts - 1;
      left.push_back(x - (parts - 1) * part + kTaskKeys + (parts > 1 ? kPartKeys : 0));
    }
    std::sort(left.begin(), left.end(), std::greater<>());
    whole *= shape.heads;
    // Rounds that all cores have a whole part in.
    const std::int64_t rounds = whole / count, task = part + kTaskKeys + kPartKeys;
    std::fill(cores.begin(), cores.end(), rounds * task);
    std::int64_t dealt = rounds * count;
    const auto deal = [&](std::int64_t cost) {
      const std::int64_t at = dealt % count, round = dealt / count;
      cores[static_cast<std::size_t>(round % 2 == 0 ? at : count - 1 - at)] += cost;
      ++dealt;
    };
    for (std::int64_t i = dealt; i < whole; ++i) deal(task);
    for (const std::int64_t cost : left) {
      for (std::int64_t head = 0; head < shape.heads; ++head) deal(cost);
    }
    return *std::max_element(cores.begin(), cores.end()) + (splits > 1 ? kCombineKeys : 0);
  });
}

std::int64_t BufferBytes(const ChipSpec& chip, const Shape& shape, const Tiling& tiling, Buffer buffer) {
  return Need(chip, shape, tiling, buffer);
}

bool Fits(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  return FitsBuffers(chip, shape, tiling);
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
