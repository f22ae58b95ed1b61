// Which bytes an instruction touches, as the checker reckons them.
#ifndef CUBIST_NPU_MODEL_SYNC_BYTES_H_
#define CUBIST_NPU_MODEL_SYNC_BYTES_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/ordered.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// A rectangle of a slot in cells: of UB, BT and hand-over slots, which are row-major, bytes of rows `pitch` apart; of the
// Cube's buffers, which are moved by whole panels of a block (L0C: 16 columns), panels of `height` rows of `pitch` bytes.
// Padding at a slot's edges belongs to its last row and column.
struct Cells {
  bool row_major = true;
  std::int64_t row_begin = 0, row_end = 0, begin = 0, end = 0;
  std::int64_t pitch = 0, height = 0;
};
inline Cells CellsOf(const ChipSpec& chip, const trace::SlotInfo& slot, bool in_gm, const trace::Operand& o) {
  if (in_gm || slot.buffer == Buffer::kUB || slot.buffer == Buffer::kBT) {
    const std::int64_t element = slot.buffer == Buffer::kBT ? 4 : SizeOf(slot.dtype);
    const std::int64_t pitch = in_gm ? slot.cols * element : RoundUp(slot.cols * element, kBlockBytes);
    const std::int64_t stop = o.col_end == slot.cols ? pitch : o.col_end * element;
    return {true, o.row_begin, o.row_end, o.col_begin * element, stop, pitch, 1};
  }
  const bool sums = slot.buffer == Buffer::kL0C;
  const std::int64_t element = sums                  ? 4
                               : IsFloat(slot.dtype) ? chip.OperandBytes(slot.dtype)
                                                     : SizeOf(slot.dtype);
  const std::int64_t width = sums ? chip.mmad.n_step : std::max<std::int64_t>(kBlockBytes / element, 1);
  const std::int64_t rows = RoundUp(slot.rows, sums ? chip.mmad.m_step : chip.packing.row_multiple);
  const std::int64_t row_end = o.row_end == slot.rows ? rows : o.row_end;
  return {false, o.row_begin, row_end, o.col_begin / width, CeilDiv(o.col_end, width), width * element, rows};
}

// Calls visit(begin, end) for the bytes of a rectangle of a slot, adjacent ones joined.
template <class Visit>
void ForEachByteRange(const ChipSpec& chip, const trace::SlotInfo& slot, bool in_gm, const trace::Operand& o,
                      Visit visit) {
  std::int64_t from = 0, to = 0;
  const auto add = [&](std::int64_t begin, std::int64_t bytes) {
    if (begin == to && from != to) {
      to += bytes;
      return;
    }
    if (from != to) visit(slot.address + from, slot.address + to);
    from = begin, to = begin + bytes;
  };
  const Cells c = CellsOf(chip, slot, in_gm, o);
  if (c.row_major) {
    for (std::int64_t r = c.row_begin; r < c.row_end; ++r) add(r * c.pitch + c.begin, c.end - c.begin);
  } else {
    for (std::int64_t panel = c.begin; panel < c.end; ++panel)
      add((panel * c.height + c.row_begin) * c.pitch, (c.row_end - c.row_begin) * c.pitch);
  }
  if (from != to) visit(slot.address + from, slot.address + to);
}

template <class Visit>
void ForEachByteRange(const trace::GmAccess& gm, Visit visit) {
  if (gm.rows == 1 && gm.bursts == 1) return visit(gm.offset, gm.offset + gm.burst_bytes);
  for (std::int64_t row = 0; row < gm.rows; ++row) {
    for (std::int64_t burst = 0; burst < gm.bursts; ++burst) {
      const std::int64_t begin = gm.offset + row * gm.row_stride + burst * gm.burst_stride;
      visit(begin, begin + gm.burst_bytes);
    }
  }
}

// Bytes of a tensor as disjoint, sorted intervals.
class ByteSet {
 public:
  void Add(std::int64_t begin, std::int64_t end) {
    if (!ranges_.empty() && ranges_.back().second == begin) {
      ranges_.back().second = end;
    } else {
      ranges_.emplace_back(begin, end);
    }
  }
  void Merge() {
    SortBy(ranges_, [](const auto& range) { return range.first; });
    std::size_t kept = 0;
    for (const auto& range : ranges_) {
      if (kept > 0 && range.first <= ranges_[kept - 1].second) {
        ranges_[kept - 1].second = std::max(ranges_[kept - 1].second, range.second);
      } else {
        ranges_[kept++] = range;
      }
    }
    ranges_.resize(kept);
  }
  // Only after Merge.
  bool Contains(std::int64_t begin, std::int64_t end) const {
    const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), std::pair(begin, INT64_MAX));
    return next != ranges_.begin() && std::prev(next)->second >= end;
  }
  const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_BYTES_H_
