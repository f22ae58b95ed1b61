// Which keys the query rows of a sequence see by their position alone.
#ifndef CUBIST_TILING_ATTENTION_BAND_H_
#define CUBIST_TILING_ATTENTION_BAND_H_

#include <algorithm>
#include <compare>
#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

// A row at position i sees the keys j with i + lowest <= j <= i + highest, and those below `prefix`: one run of keys, or
// two where the lower side is bounded.
//   full: both unbounded;  causal: highest = 0, or Skv - Sq where the last row sees the last key.
// Row r stands at position r / fold: of heads that share their keys, `fold` rows of one position follow each other.
struct AttentionBand {
  static constexpr std::int64_t kUnbounded = std::int64_t{1} << 61;  // Any sum of two stays in 64 bits.

  std::int64_t lowest = -kUnbounded, highest = kUnbounded;
  std::int64_t prefix = 0;
  std::int64_t fold = 1;

  bool bounded() const { return lowest > -kUnbounded || highest < kUnbounded; }
  // Whether keys between the prefix and a row's own may be hidden from it.
  bool parted() const { return prefix > 0 && lowest > -kUnbounded; }

  // Those of `rows`.
  Range Positions(Range rows) const { return {rows.begin / fold, CeilDiv(rows.end, fold)}; }
  // Of `keys`: from the first to the last that any of `rows` sees; an empty range where none does.
  Range Seen(Range rows, Range keys) const {
    const Range at = Positions(rows);
    return rows.empty() ? Range{} : Within(at.begin + lowest, at.end + highest, keys);
  }
  // Those that each of `rows` sees; of two runs the second.
  Range SeenByAll(Range rows, Range keys) const {
    if (parted()) return WithoutPrefix().SeenByAll(rows, Behind(keys));
    const Range at = Positions(rows);
    return rows.empty() ? Range{} : Within(at.end - 1 + lowest, at.begin + highest + 1, keys);
  }
  // The first run of `keys` that any of `rows` sees.
  Range FirstRun(Range rows, Range keys) const {
    return parted() && keys.begin < prefix ? Range{keys.begin, std::min(prefix, keys.end)} : Seen(rows, keys);
  }
  // Whether every one of `rows` sees all of `keys`.
  bool ShowsAll(Range rows, Range keys) const {
    const Range behind = Behind(keys);
    if (behind.empty()) return true;
    const Range all = WithoutPrefix().SeenByAll(rows, behind);
    return all.begin <= behind.begin && behind.end <= all.end;
  }
  // Of `keys` those that the prefix does not show, and the band that tells which rows see them.
  Range Behind(Range keys) const { return {std::clamp(prefix, keys.begin, keys.end), keys.end}; }
  AttentionBand WithoutPrefix() const {
    AttentionBand band = *this;
    band.prefix = 0;
    return band;
  }

  friend auto operator<=>(const AttentionBand&, const AttentionBand&) = default;

 private:
  Range Within(std::int64_t begin, std::int64_t end, Range keys) const {
    if (prefix > keys.begin) begin = keys.begin;
    const Range seen{std::max(begin, keys.begin), std::min(std::max(end, prefix), keys.end)};
    return seen.empty() ? Range{} : seen;
  }
};

// What a mask leaves of a block of keys, and which block it is.
struct SeenKeys {
  std::int64_t block = 0;
  Range keys;
};

// Where a mask hides blocks (HiddenPairs): counts of a row of cells that are fetched at a time, cells of one column, and
// counts of a row of cells for one block of keys.
inline constexpr std::int64_t kHiddenCounts = 24, kHiddenCells = 64, kHiddenParts = 16;

// One sequence of a batch: its query rows from row `q_begin` and `skv` keys from key `kv_begin` of the matrices of
// batch entry `batch`. Several may lie in one entry, one behind the other; packed operands begin with key packed_begin
// then, a multiple of ChipSpec::PackedBlockStep. `sq` counts band.fold rows for each of the entry's, see AttentionBand.
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
