// How the movement of MoE tokens, to expert order and back, is cut for a chip.
#ifndef CUBIST_TILING_TOKEN_PERMUTE_TILING_H_
#define CUBIST_TILING_TOKEN_PERMUTE_TILING_H_

#include <algorithm>
#include <bit>
#include <compare>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/fields.h"

namespace cubist {

struct TokenPermuteShape {
  std::int64_t tokens = 0, hidden = 0, top_k = 0, experts = 0;
  DType dtype = DType::kF32;
  bool wide_ids = false;   // int64
  bool reads_ids = false;  // Of unpermute: the experts' ids as well, for their biases.
  bool gathers = false;    // Of permute's gradient: a value for every slot, before the rows of its token.
  bool drops = false;      // Of permute: routes beyond a capacity, by position. A table ranks them all then.

  friend auto operator<=>(const TokenPermuteShape&, const TokenPermuteShape&) = default;
};

// Rows of no token are filled with zeros by that many columns at most.
inline std::int64_t ZeroCols(std::int64_t hidden) { return std::clamp<std::int64_t>(hidden, 1, 2048); }
inline constexpr std::int64_t kSummedBins = 512;  // A core adds up the counts of that many over all chunks.
// What goes between UB and GM element by element passes through staging: moves begin at whole blocks, so that a row of it
// is one block, of 8 words, and rows take turns, so that one is filled while the other is on its way.
inline constexpr std::int64_t kStagingRows = 2;
inline std::int64_t StagingBytes(const ChipSpec& chip) {
  return chip.SlotBytes(Buffer::kUB, DType::kF32, kStagingRows, kBlockWords);
}
// Sorted routes are read by that many, and the rows of ranges of experts.
inline constexpr std::int64_t kSortedRoutes = 512, kSummedRanges = 64;

// Of a token, read at once: all of them, unless they do not fit.
inline constexpr std::int64_t kAllRoutes = std::numeric_limits<std::int64_t>::max();

// Of any tiling here: as many chunks as there are tokens for.
template <class Tiling>
void Complete(const TokenPermuteShape& s, Tiling& t) {
  t.chunks = std::max<std::int64_t>(CeilDiv(s.tokens, t.chunk_tokens), 1);
}

// Tokens are cut into `chunks` of `chunk_tokens`, ranked side by side. A chunk's ids are read `piece_tokens` tokens at a
// time, or those of single tokens by `routes`, and rows move in parts of `cols`. Routes are ranked by a table of all
// experts, or, with `digit_bits`, by as many passes over tables of 2^digit_bits as the ids have digits, and experts then
// counted in ranges of `range_experts`.
struct TokenPermuteTiling {
  std::int64_t chunks = 0, chunk_tokens = 0;
  std::int64_t piece_tokens = 0, routes = kAllRoutes;
  int digit_bits = 0;
  std::int64_t range_experts = 1;
  std::int64_t cols = 0;
  int row_stages = 2;
  bool sums_chunks = false;  // The counts of all chunks are added up in a phase of their own.
  bool sorts = false;  // Ids are counted and, where none are dropped, ranked by sorting, not in a table.

  // Of a table, for that many experts.
  std::int64_t Bins(std::int64_t experts) const {
    return digit_bits == 0 ? experts : std::int64_t{1} << digit_bits;
  }
  // An id's digits hold one bit more than the experts need: -1 is above them all.
  int Passes(std::int64_t experts) const {
    const auto bits = static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(experts)));
    return digit_bits == 0 ? 1 : static_cast<int>(CeilDiv(bits, digit_bits));
  }

  friend bool operator==(const TokenPermuteTiling&, const TokenPermuteTiling&) = default;
};

template <class Visit>
void VisitFields(const TokenPermuteShape& s, Visit&& visit) {
  visit({"tokens"}, s.tokens), visit({"hidden"}, s.hidden), visit({"top_k"}, s.top_k);
  visit({"experts"}, s.experts);
  visit({"dtype"}, s.dtype);
  visit({"wide_ids"}, s.wide_ids);
  visit({"reads_ids"}, s.reads_ids), visit({"gathers"}, s.gathers), visit({"drops"}, s.drops);
}

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, TokenPermuteTiling>
void VisitFields(const ChipSpec&, const TokenPermuteShape&, Tiling& t, Visit&& visit) {
  visit({"chunk_tokens"}, t.chunk_tokens), visit({"piece_tokens"}, t.piece_tokens);
  visit({"digit_bits", 0, 16}, t.digit_bits), visit({"range_experts"}, t.range_experts);
  visit({"cols"}, t.cols);
  visit({"row_stages", 2, 64}, t.row_stages);
  visit({"sums_chunks", 0, 1}, t.sums_chunks), visit({"sorts", 0, 1}, t.sorts);
}

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const TokenPermuteShape& shape,
                         const TokenPermuteTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenPermuteTiling& tiling);
std::vector<TokenPermuteTiling> PermuteCandidates(const ChipSpec& chip, const TokenPermuteShape& shape);
double Price(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenPermuteTiling& tiling);
Status Choose(const ChipSpec& chip, const TokenPermuteShape& shape, TokenPermuteTiling* tiling);

// Unpermute: tokens are cut into `chunks`, their routes read as permute's; a token's rows meet in UB in parts of `cols`,
// `rows` of them at a time.
struct TokenUnpermuteTiling {
  std::int64_t chunks = 0, chunk_tokens = 0;
  std::int64_t piece_tokens = 0, routes = kAllRoutes;
  std::int64_t cols = 0, rows = 0;
  int stages = 2;

  friend bool operator==(const TokenUnpermuteTiling&, const TokenUnpermuteTiling&) = default;
};

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, TokenUnpermuteTiling>
void VisitFields(const ChipSpec&, const TokenPermuteShape&, Tiling& t, Visit&& visit) {
  visit({"chunk_tokens"}, t.chunk_tokens), visit({"piece_tokens"}, t.piece_tokens);
  visit({"cols"}, t.cols), visit({"rows", 1, 64}, t.rows);
  visit({"stages", 1, 64}, t.stages);
}

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const TokenPermuteShape& shape,
                         const TokenUnpermuteTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteTiling& tiling);
std::vector<TokenUnpermuteTiling> UnpermuteCandidates(const ChipSpec& chip, const TokenPermuteShape& shape);
double Price(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteTiling& tiling);
Status Choose(const ChipSpec& chip, const TokenPermuteShape& shape, TokenUnpermuteTiling* tiling);

// The gradient of unpermute: a part of `cols` of a token's gradient stays in UB while it goes to `slots` rows; rows of no
// slot are looked for `owned_rows` at a time. `rows` of its rows are multiplied at once, while as many are on their way.
struct TokenUnpermuteGradTiling {
  std::int64_t chunks = 0, chunk_tokens = 0;
  std::int64_t piece_tokens = 0, routes = kAllRoutes;
  std::int64_t cols = 0, slots = 0;
  std::int64_t owned_rows = 512;
  std::int64_t rows = 1;
  int row_stages = 2;

  friend bool operator==(const TokenUnpermuteGradTiling&, const TokenUnpermuteGradTiling&) = default;
};

template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, TokenUnpermuteGradTiling>
void VisitFields(const ChipSpec&, const TokenPermuteShape&, Tiling& t, Visit&& visit) {
  visit({"chunk_tokens"}, t.chunk_tokens), visit({"piece_tokens"}, t.piece_tokens);
  visit({"cols"}, t.cols), visit({"slots"}, t.slots), visit({"owned_rows"}, t.owned_rows);
  visit({"rows", 1, 8}, t.rows), visit({"row_stages", 1, 64}, t.row_stages);
}

// What the kernel's rings take of a buffer.
std::int64_t BufferBytes(const ChipSpec& chip, const TokenPermuteShape& shape,
                         const TokenUnpermuteGradTiling& tiling, Buffer buffer);
bool Fits(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteGradTiling& tiling);
std::vector<TokenUnpermuteGradTiling> UnpermuteGradCandidates(const ChipSpec& chip,
                                                              const TokenPermuteShape& shape);
double Price(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteGradTiling& tiling);
Status Choose(const ChipSpec& chip, const TokenPermuteShape& shape, TokenUnpermuteGradTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_TOKEN_PERMUTE_TILING_H_
