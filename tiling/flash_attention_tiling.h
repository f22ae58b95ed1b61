// FlashAttentionTiling: how attention is cut for a chip.
#ifndef CUBIST_TILING_FLASH_ATTENTION_TILING_H_
#define CUBIST_TILING_FLASH_ATTENTION_TILING_H_

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/fields.h"

namespace cubist {

struct FlashAttentionShape {
  std::int64_t batches = 0, heads = 0, kv_heads = 0,
               rope_heads = 0;  // rope_heads: of k_rope, 0 without rope parts
  std::int64_t sq = 0, skv = 0;
  std::int64_t d_qk = 0, d_rope = 0, d_v = 0;
  DType in = DType::kF32, out = DType::kF32;
  bool causal = false;
  std::int64_t shift = 0;  // Query row i sees keys j <= i + shift, where causal.

  friend auto operator<=>(const FlashAttentionShape&, const FlashAttentionShape&) = default;
};

// Br = m query rows meet Bc = n keys at a time. Stages of neighbouring blocks of keys overlap `depth` deep.
struct FlashAttentionTiling {
  std::int64_t m = 0, n = 0;
  std::int64_t k0 = 0;  // of L0, along d for the scores and along the keys for the output
  int depth = 0;
  int q_stages = 1, kv_stages = 2, l0_stages = 2, ub_stages = 1;
  bool pack_kv = false;  // K and V are packed once per KV head by a phase before.

  // A tile that is made in one stage and used in the next outlives `depth` more of its kind.
  int hand_over_stages() const { return depth + 1; }
  // Row statistics live from softmax to rescale, two stages later; the first step of a task takes two of them.
  int statistics_stages() const { return 4 * depth + 3; }

  std::int64_t query_blocks(const FlashAttentionShape& s) const { return CeilDiv(s.sq, m); }
  std::int64_t tasks(const FlashAttentionShape& s) const { return s.batches * s.heads * query_blocks(s); }

  friend bool operator==(const FlashAttentionTiling&, const FlashAttentionTiling&) = default;
};

template <class Visit>
void VisitFields(const FlashAttentionShape& s, Visit&& visit) {
  visit({"batches"}, s.batches), visit({"heads"}, s.heads), visit({"kv_heads"}, s.kv_heads);
  visit({"rope_heads"}, s.rope_heads);
  visit({"sq"}, s.sq), visit({"skv"}, s.skv);
  visit({"d_qk"}, s.d_qk), visit({"d_rope"}, s.d_rope), visit({"d_v"}, s.d_v);
  visit({"in"}, s.in), visit({"out"}, s.out);
  visit({"causal"}, s.causal), visit({"shift"}, s.shift);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, FlashAttentionTiling>
void VisitFields(const ChipSpec& chip, const FlashAttentionShape& s, Tiling& t, Visit&& visit) {
  constexpr std::int64_t kLargest = 1 << 20;
  const std::int64_t n_step = std::max(chip.mmad.n_step, chip.PackedStep(Role::kB, s.in));
  const std::int64_t k_step =
      std::max(chip.mmad.k_bytes / chip.OperandBytes(s.in), chip.packing.row_multiple);
  visit({"m", 1, kLargest, chip.mmad.m_step}, t.m), visit({"n", 1, kLargest, n_step}, t.n);
  visit({"k0", 1, kLargest, k_step}, t.k0);
  visit({"depth", 0, 8}, t.depth);
  visit({"q_stages", 1, 16}, t.q_stages), visit({"kv_stages", 1, 16}, t.kv_stages);
  visit({"l0_stages", 1, 16}, t.l0_stages), visit({"ub_stages", 1, 16}, t.ub_stages);
  visit({"pack_kv", 0, 1}, t.pack_kv);
}

// Keys that any of the query rows sees, from 0.
constexpr std::int64_t VisibleKeys(const FlashAttentionShape& s, Range queries) {
  return s.causal ? std::clamp<std::int64_t>(queries.end + s.shift, 0, s.skv) : s.skv;
}

bool Fits(const ChipSpec& chip, const FlashAttentionShape& shape, const FlashAttentionTiling& tiling);
std::vector<FlashAttentionTiling> Candidates(const ChipSpec& chip, const FlashAttentionShape& shape);
double Price(const ChipSpec& chip, const FlashAttentionShape& shape, const FlashAttentionTiling& tiling);
Status Choose(const ChipSpec& chip, const FlashAttentionShape& shape, FlashAttentionTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_FLASH_ATTENTION_TILING_H_
