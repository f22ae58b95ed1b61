// FlashAttentionGradTiling: how the backward pass of attention is cut for a chip.
#ifndef CUBIST_TILING_FLASH_ATTENTION_GRAD_TILING_H_
#define CUBIST_TILING_FLASH_ATTENTION_GRAD_TILING_H_

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/attention_band.h"
#include "tiling/fields.h"

namespace cubist {

// Rows of dQ that are made zero at a time.
inline constexpr std::int64_t kZeroRows = 16;

struct FlashAttentionGradShape {
  std::int64_t batches = 0, heads = 0, kv_heads = 0,
               rope_heads = 0;  // rope_heads: of k_rope, 0 without rope parts
  std::int64_t sq = 0, skv = 0;
  std::int64_t d_qk = 0, d_rope = 0, d_v = 0;
  DType in = DType::kF32;
  bool bias = false, dbias = false;
  int soft_cap = 0;  // As of the forward pass.
  bool mask = false, alibi = false, dropout = false;
  // Batch entries, or heads, that share a bias whose gradient is asked for: it is added up by one core.
  bool shared_batches = false, shared_heads = false;
  AttentionBand band;  // Of every batch entry; where prefixes differ that of the longest.

  // What chunks of keys can be taken of side by side.
  std::int64_t shares() const {
    return (shared_batches ? std::min<std::int64_t>(batches, 1) : batches) *
           (shared_heads ? std::min<std::int64_t>(kv_heads, 1) : kv_heads);
  }
  // Whether scores have to be fetched as they lie in GM, query by query; or take a step that needs a tile more.
  bool by_query() const { return bias || mask; }
  // Whether keys may be hidden from rows that meet them.
  bool hides() const { return mask || band.bounded(); }
  bool scratch() const { return bias || mask || alibi || soft_cap > 0; }
  std::int64_t group() const { return heads / std::max<std::int64_t>(kv_heads, 1); }

  friend auto operator<=>(const FlashAttentionGradShape&, const FlashAttentionGradShape&) = default;
};

// Blocks of n keys meet m queries at a time, whose scores are made in pieces; where the mask cuts the keys, a strip of
// queries at a time. The key blocks of a KV head are dealt round to `chunks` tasks, so that each has its share of those
// that many queries see; every chunk has a dQ of its own, and the last phase adds them up.
struct FlashAttentionGradTiling {
  std::int64_t n = 0, strip = 0;
  std::int64_t strips = 1;  // of a piece
  std::int64_t pieces = 1;  // of m
  std::int64_t k0 = 0;      // of L0, along whatever a product sums over
  std::int64_t width = 0;   // Columns of dQ, dK and dV that are made at a time; 0: all, as of kept sums.
  std::int64_t chunks = 1;
  int depth = 0;
  int load_stages = 1;  // of K, V, Q and dO in L1 at least; 2: the next ones come while these are in use.
  int l0_stages = 2, ub_stages = 1, sum_stages = 1;
  bool keep_sums = false;     // dK and dV of a block of keys stay in L0C; else they are added up in GM.
  bool pack_queries = false;  // Q and dO are packed once per head by a phase before.
  // What a mask hides at the ends of a block of keys is left out in multiples of so many; 0: in whole blocks alone.
  std::int64_t mask_step = 0;
  bool by_head =
      false;  // The chunks of a KV head are neighbours: they meet the same queries. Else heads alternate.

  // A tile that is made in one stage and used in the next outlives `depth` more of its kind; what the first stage loads
  // or hands over is used until the third.
  int hand_over_stages() const { return depth + 1; }
  int operand_stages() const { return std::max(2 * depth + 1, load_stages); }

  std::int64_t cols_at_once(std::int64_t cols) const { return width == 0 ? cols : std::min(width, cols); }
  std::int64_t piece() const { return strips * strip; }
  std::int64_t m() const { return pieces * piece(); }
  // Rows of a cell of HiddenPairs, of which blocks of queries are whole ones, and how many are fetched at a time.
  std::int64_t mask_cell(const FlashAttentionGradShape& s) const { return s.band.bounded() ? strip : m(); }
  std::int64_t mask_cells(const FlashAttentionGradShape& s) const {
    return std::max(m() / mask_cell(s), kHiddenCells);
  }
  std::int64_t key_blocks(const FlashAttentionGradShape& s) const { return CeilDiv(s.skv, n); }
  std::int64_t tasks(const FlashAttentionGradShape& s) const { return s.shares() * chunks; }

  friend bool operator==(const FlashAttentionGradTiling&, const FlashAttentionGradTiling&) = default;
};

template <class Visit>
void VisitFields(const FlashAttentionGradShape& s, Visit&& visit) {
  visit({"batches"}, s.batches), visit({"heads"}, s.heads), visit({"kv_heads"}, s.kv_heads);
  visit({"rope_heads"}, s.rope_heads);
  visit({"sq"}, s.sq), visit({"skv"}, s.skv);
  visit({"d_qk"}, s.d_qk), visit({"d_rope"}, s.d_rope), visit({"d_v"}, s.d_v);
  visit({"in"}, s.in);
  visit({"bias"}, s.bias), visit({"dbias"}, s.dbias), visit({"soft_cap"}, s.soft_cap);
  visit({"mask"}, s.mask), visit({"alibi"}, s.alibi), visit({"dropout"}, s.dropout);
  visit({"shared_batches"}, s.shared_batches), visit({"shared_heads"}, s.shared_heads);
  visit({"lowest"}, s.band.lowest), visit({"highest"}, s.band.highest), visit({"prefix"}, s.band.prefix);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, FlashAttentionGradTiling>
void VisitFields(const ChipSpec& chip, const FlashAttentionGradShape& s, Tiling& t, Visit&& visit) {
  constexpr std::int64_t kLargest = 1 << 20;
  const std::int64_t panel = chip.ColumnStep(s.in);
  const std::int64_t k_step = chip.KStep(s.in);
  visit({"n", 1, kLargest}, t.n), visit({"strip", 1, kLargest, panel}, t.strip);
  visit({"strips", 1, 64}, t.strips), visit({"pieces", 1, 64}, t.pieces);
  visit({"k0", 1, kLargest, k_step}, t.k0), visit({"width", 0, kLargest, panel}, t.width);
  visit({"chunks", 1, kLargest}, t.chunks);
  visit({"depth", 0, 2}, t.depth);
  visit({"load_stages", 1, 16}, t.load_stages);
  visit({"l0_stages", 1, 16}, t.l0_stages), visit({"ub_stages", 1, 16}, t.ub_stages);
  visit({"sum_stages", 1, 16}, t.sum_stages);
  visit({"keep_sums", 0, 1}, t.keep_sums);
  visit({"pack_queries", 0, t.strip % chip.PackedBlockStep(s.in) == 0 ? 1 : 0}, t.pack_queries);
  visit({"by_head", 0, 1}, t.by_head);
  visit({"mask_step", 0, kLargest, 2 * chip.RowStep(s.in)}, t.mask_step);
}

// Of `sq` query rows those that see any of the keys, as whole pieces of `step`; what they do not see is masked. Keys of a
// prefix are seen by all rows; of others both ends grow with the keys.
constexpr Range SeeingQueries(const AttentionBand& band, Range keys, std::int64_t sq, std::int64_t step) {
  const bool by_all = keys.begin < band.prefix;
  const std::int64_t begin = by_all ? 0 : std::max<std::int64_t>(keys.begin - band.highest, 0);
  const std::int64_t end = by_all ? sq : std::min(keys.end - band.lowest, sq);
  return begin >= end ? Range{} : Range{begin / step * step, std::min(RoundUp(end, step), sq)};
}

// What a tiling's price errs in with others: the blocks, their tasks, and how stages overlap.
inline auto FamilyOf(const FlashAttentionGradTiling& t) {
  return std::tuple(t.n, t.strip, t.pieces, t.chunks, t.depth);
}
// How a family's tilings fill their buffers.
inline auto WalkOf(const FlashAttentionGradTiling& t) { return std::tuple(t.k0, t.width, t.ub_stages); }
inline std::vector<FlashAttentionGradTiling> OtherOrders(const FlashAttentionGradTiling&) { return {}; }
// What the replay of a call costs, in Mmads of a matrix product.
std::int64_t ReplayWork(const FlashAttentionGradShape& shape, const FlashAttentionGradTiling& tiling);

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const FlashAttentionGradShape& shape,
                         const FlashAttentionGradTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const FlashAttentionGradShape& shape, const FlashAttentionGradTiling& tiling);
std::vector<FlashAttentionGradTiling> Candidates(const ChipSpec& chip, const FlashAttentionGradShape& shape);
double Price(const ChipSpec& chip, const FlashAttentionGradShape& shape,
             const FlashAttentionGradTiling& tiling);
Status Choose(const ChipSpec& chip, const FlashAttentionGradShape& shape, FlashAttentionGradTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_FLASH_ATTENTION_GRAD_TILING_H_
