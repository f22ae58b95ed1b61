// FlashAttentionTiling: how attention is cut for a chip.
#ifndef CUBIST_TILING_FLASH_ATTENTION_TILING_H_
#define CUBIST_TILING_FLASH_ATTENTION_TILING_H_

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstdint>
#include <numeric>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/attention_band.h"
#include "tiling/fields.h"

namespace cubist {

struct FlashAttentionShape {
  std::int64_t batches = 0, heads = 0, kv_heads = 0,
               rope_heads = 0;  // rope_heads: of k_rope, 0 without rope parts
  std::int64_t sq = 0, skv = 0;
  std::int64_t d_qk = 0, d_rope = 0, d_v = 0;
  DType in = DType::kF32, out = DType::kF32;
  AttentionBand band;              // Of every sequence; of ragged ones that of the longest.
  std::int64_t ragged_splits = 0;  // RaggedSplits; 0 where all sequences are alike.
  // What is done to scores: each asks for room in UB.
  bool bias = false, sinks = false;
  int soft_cap = 0;  // 0: none; 1: to the last place of the cap; 2: to that of the score.
  bool mask = false, alibi = false, dropout = false;
  bool v_in_k = false;  // V is the first columns of K.
  // Rows of K or V stand among others, as where heads are columns, and end within a line: all of it is moved for them.
  bool among_others = false;

  // Whether keys may be hidden from rows that meet them.
  bool hides() const { return mask || band.bounded(); }
  // Whether blocks that the mask hides whole are left out: to count them first costs a lone row more than it saves.
  bool skips_hidden() const { return mask && sq > 1; }
  // Whether heads that share their keys are rows of one: then `heads` are those of K, and sq counts rows of all.
  bool folds() const { return band.fold > 1; }
  // Tiles of the scores' shape that finishing them takes.
  int score_scratch() const { return alibi ? std::max(soft_cap, 1) : soft_cap; }

  friend auto operator<=>(const FlashAttentionShape&, const FlashAttentionShape&) = default;
};

// Br = m query rows meet Bc = n keys at a time. Stages of neighbouring blocks of keys overlap `depth` deep.
struct FlashAttentionTiling {
  static constexpr int kMaxDepth = 2;

  std::int64_t m = 0, n = 0;
  std::int64_t k0 = 0;  // of L0, along d for the scores and along the keys for the output
  // That the columns of P V are computed and sent in, so that accumulators of many rows and columns fit L0C.
  int v_parts = 1;
  std::int64_t strip =
      0;  // Rows that walk the edges of the mask together; m or more: edges are not walked apart.
  std::int64_t key_step =
      1;  // Blocks of keys begin at multiples of it, as packed operands ask for; divides n.
  int depth = 0;
  int q_stages = 1, kv_stages = 2, l0_stages = 2;
  int l0c_stages = 1;  // of the scores and of the product each: what is computed is sent on at once
  int s_stages = 1, ub_stages = 1;  // in UB: of the scores, and of all else
  std::int64_t kv_splits =
      1;                  // Parts of the keys that cores walk side by side; their outputs are combined after.
  bool pack_kv = false;   // K and V are packed once per KV head by a phase before.
  bool kv_once = false;   // Their tiles serve few rows, and are read where they lie (Role::kBOnce).
  bool v_from_k = false;  // Where V is in K: its tiles are those of K, which stay in L1 for both products.
  // Each core meets the keys of as few KV heads as it can: those of one stay in a cache that cannot hold all. Else all
  // heads are walked side by side.
  bool by_head = false;
  // Blocks of queries of one KV head follow each other, not those of all heads: where L2 does not hold all keys, and no
  // block sees fewer of them than another.
  bool by_keys = false;
  // What a mask hides at the ends of a block of keys is left out in multiples of so many; 0: in whole blocks alone.
  std::int64_t mask_step = 0;

  // A tile that is made in one stage and used in the next outlives `depth` more of its kind.
  int hand_over_stages() const { return depth + 1; }
  // Keys that are values, too, are used again two stages later.
  int k_stages() const { return kv_stages + (v_from_k ? 2 * depth : 0); }
  // Row statistics live from softmax to rescale, 2 * depth steps later. A block of queries in its round r reads maxima
  // m[r], which stay until then, and writes m[r + 1]; those before and after it may be of one step each.
  int rounds_kept() const { return 2 * depth + 2; }
  int m_stages() const { return rounds_kept() + 4 * depth; }
  int l_stages() const { return 2 * depth + 2; }

  std::int64_t v_cols(std::int64_t d_v) const {
    return v_parts == 1 ? d_v : std::min(RoundUp(CeilDiv(d_v, v_parts), key_step), d_v);
  }

  // Rows of a cell of HiddenPairs, of which all rows that walk keys together are whole ones, and how many these are.
  std::int64_t mask_cell(const FlashAttentionShape& s) const {
    if (s.folds()) return 1;
    return s.band.bounded() && strip < m ? std::gcd(strip, m) : m;
  }
  std::int64_t mask_cells(const FlashAttentionShape& s) const { return m / mask_cell(s); }

  std::int64_t query_blocks(const FlashAttentionShape& s) const { return CeilDiv(s.sq, m); }
  // Where all sequences are alike.
  std::int64_t tasks(const FlashAttentionShape& s) const {
    return s.batches * s.heads * query_blocks(s) * kv_splits;
  }

  friend bool operator==(const FlashAttentionTiling&, const FlashAttentionTiling&) = default;
};

template <class Visit>
void VisitFields(const FlashAttentionShape& s, Visit&& visit) {
  visit({"batches"}, s.batches), visit({"heads"}, s.heads), visit({"kv_heads"}, s.kv_heads);
  visit({"rope_heads"}, s.rope_heads);
  visit({"sq"}, s.sq), visit({"skv"}, s.skv);
  visit({"d_qk"}, s.d_qk), visit({"d_rope"}, s.d_rope), visit({"d_v"}, s.d_v);
  visit({"in"}, s.in), visit({"out"}, s.out);
  visit({"lowest"}, s.band.lowest), visit({"highest"}, s.band.highest), visit({"prefix"}, s.band.prefix);
  visit({"fold"}, s.band.fold), visit({"ragged_splits"}, s.ragged_splits);
  visit({"bias"}, s.bias), visit({"soft_cap"}, s.soft_cap), visit({"sinks"}, s.sinks);
  visit({"mask"}, s.mask), visit({"alibi"}, s.alibi), visit({"dropout"}, s.dropout);
  visit({"v_in_k"}, s.v_in_k), visit({"among_others"}, s.among_others);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, FlashAttentionTiling>
void VisitFields(const ChipSpec& chip, const FlashAttentionShape& s, Tiling& t, Visit&& visit) {
  constexpr std::int64_t kLargest = 1 << 20;
  const std::int64_t k_step = chip.KStep(s.in);
  visit({"pack_kv", 0, 1}, t.pack_kv);
  const std::int64_t n_step = t.pack_kv ? chip.PackedBlockStep(s.in) : chip.ColumnStep(s.in);
  visit({"m", 1, kLargest, chip.RowStep(s.in)}, t.m), visit({"n", 1, kLargest, n_step}, t.n);
  visit({"k0", 1, kLargest, k_step}, t.k0), visit({"strip", 1, kLargest, chip.RowStep(s.in)}, t.strip);
  visit({"v_parts", 1, chip.pipes_overlap ? 64 : 1}, t.v_parts);
  visit({"key_step", 1, kLargest, n_step}, t.key_step);
  visit({"depth", 0, FlashAttentionTiling::kMaxDepth}, t.depth);
  visit({"q_stages", 1, 16}, t.q_stages), visit({"kv_stages", 1, 16}, t.kv_stages);
  visit({"v_from_k", 0, chip.pipes_overlap && s.v_in_k ? 1 : 0}, t.v_from_k);
  visit({"l0_stages", 1, 16}, t.l0_stages), visit({"l0c_stages", 1, 16}, t.l0c_stages);
  visit({"s_stages", 1, 16}, t.s_stages), visit({"ub_stages", 1, 16}, t.ub_stages);
  visit({"kv_splits", 1, 4096}, t.kv_splits);
  visit({"kv_once", 0, 1}, t.kv_once);
  visit({"by_head", 0, 1}, t.by_head), visit({"mask_step", 0, kLargest, n_step}, t.mask_step);
}

// What a tiling's price errs in with others: the blocks, and how stages overlap.
inline auto FamilyOf(const FlashAttentionTiling& t) {
  return std::tuple(t.m, t.n, t.v_parts, t.depth, t.v_from_k, t.pack_kv);
}
// How a family's tilings fill their buffers.
inline auto WalkOf(const FlashAttentionTiling& t) {
  return std::tuple(t.kv_stages, t.l0_stages, t.s_stages, t.ub_stages);
}
// The same with shorter steps of L0, and with more or fewer parts of the keys.
inline std::vector<FlashAttentionTiling> OtherOrders(FlashAttentionTiling t) {
  const std::int64_t k0 = t.k0, splits = t.kv_splits;
  constexpr std::int64_t kShortest = 32;
  std::vector<FlashAttentionTiling> others;
  while (t.k0 % 2 == 0 && t.k0 / 2 >= kShortest) {
    t.k0 /= 2;
    others.push_back(t);
  }
  // As the price takes sequences for alike, other parts of the keys too.
  if (splits > 1) {
    t.k0 = k0;
    for (const std::int64_t other : {splits / 2, splits * 3 / 4, splits * 3 / 2, splits * 2}) {
      t.kv_splits = other;
      others.push_back(t);
    }
  }
  return others;
}
// What the replay of a call costs, in Mmads of a matrix product.
std::int64_t ReplayWork(const FlashAttentionShape& shape, const FlashAttentionTiling& tiling);

// FlashAttentionTiling::kv_splits of a call with these sequences.
std::int64_t RaggedSplits(const ChipSpec& chip, const FlashAttentionShape& shape,
                          std::span<const AttentionSequence> sequences);
// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const FlashAttentionShape& shape,
                         const FlashAttentionTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const FlashAttentionShape& shape, const FlashAttentionTiling& tiling);
std::vector<FlashAttentionTiling> Candidates(const ChipSpec& chip, const FlashAttentionShape& shape);
double Price(const ChipSpec& chip, const FlashAttentionShape& shape, const FlashAttentionTiling& tiling);
Status Choose(const ChipSpec& chip, const FlashAttentionShape& shape, FlashAttentionTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_FLASH_ATTENTION_TILING_H_
