// Which keys the query rows of a sequence see by their position alone.
#ifndef CUBIST_TILING_ATTENTION_BAND_H_
#define CUBIST_TILING_ATTENTION_BAND_H_

#include <algorithm>
#include <compare>
#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

// A row at position i sees the keys j with i + lowest <= j <= i + highest, and those below `prefix`. A prefix goes with
// an unbounded lower side only, so that what a row sees is one range.
//   full: both unbounded;  causal: highest = 0, or Skv - Sq where the last row sees the last key.
// Row r stands at position r / fold: of heads that share their keys, `fold` rows of one position follow each other.
struct AttentionBand {
  static constexpr std::int64_t kUnbounded = std::int64_t{1} << 61;  // Any sum of two stays in 64 bits.

  std::int64_t lowest = -kUnbounded, highest = kUnbounded;
  std::int64_t prefix = 0;
  std::int64_t fold = 1;

  bool bounded() const { return lowest > -kUnbounded || highest < kUnbounded; }

  // Those of `rows`.
  Range Positions(Range rows) const { return {rows.begin / fold, CeilDiv(rows.end, fold)}; }
  // Of `keys`: from the first to the last that any of `rows` sees; an empty range where none does.
  Range Seen(Range rows, Range keys) const {
    const Range at = Positions(rows);
    return rows.empty() ? Range{} : Within(at.begin + lowest, at.end + highest, keys);
  }
  // Those that each of `rows` sees.
  Range SeenByAll(Range rows, Range keys) const {
    const Range at = Positions(rows);
    return rows.empty() ? Range{} : Within(at.end - 1 + lowest, at.begin + highest + 1, keys);
  }

  friend auto operator<=>(const AttentionBand&, const AttentionBand&) = default;

 private:
  Range Within(std::int64_t begin, std::int64_t end, Range keys) const {
    const Range seen{std::max(begin, keys.begin), std::min(std::max(end, prefix), keys.end)};
    return seen.empty() ? Range{} : seen;
  }
};

// Where a mask hides blocks whole (HiddenPairs): counts of a row of cells that are fetched at a time, and cells of one
// column.
inline constexpr std::int64_t kHiddenCounts = 16, kHiddenCells = 64;

// One sequence of a batch: its query rows from row `q_begin` and `skv` keys from key `kv_begin` of the matrices of
// batch entry `batch`. Several may lie in one entry, one behind the other; packed operands begin with key packed_begin
// then, a multiple of the layout's panel. `sq` counts band.fold rows for each of the entry's, see AttentionBand.
struct AttentionSequence {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, kv_begin = 0;
  std::int64_t sq = 0, skv = 0;
  std::int64_t packed_begin = 0;
  AttentionBand band;

  std::int64_t positions() const { return sq / band.fold; }
};

}  // namespace cubist

#endif  // CUBIST_TILING_ATTENTION_BAND_H_
