// Which bytes an instruction touches, as the checker reckons them.
#ifndef CUBIST_NPU_MODEL_SYNC_BYTES_H_
#define CUBIST_NPU_MODEL_SYNC_BYTES_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// Calls visit(begin, end) for the bytes of a rectangle of a slot, adjacent ones joined. UB, BT and hand-over
// slots are row-major, exact to the byte; the Cube's buffers hold panels of a block (L0C: 16 columns), row after
// row, and are moved by whole panels. Padding at a slot's edges belongs to its last row and column.
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
  if (in_gm || slot.buffer == Buffer::kUB || slot.buffer == Buffer::kBT) {
    const std::int64_t element = slot.buffer == Buffer::kBT ? 4 : SizeOf(slot.dtype);
    const std::int64_t pitch = in_gm ? slot.cols * element : RoundUp(slot.cols * element, kBlockBytes);
    const std::int64_t stop = o.col_end == slot.cols ? pitch : o.col_end * element;
    for (std::int64_t r = o.row_begin; r < o.row_end; ++r)
      add(r * pitch + o.col_begin * element, stop - o.col_begin * element);
  } else {
    const bool sums = slot.buffer == Buffer::kL0C;
    const std::int64_t element = sums                  ? 4
                                 : IsFloat(slot.dtype) ? chip.OperandBytes(slot.dtype)
                                                       : SizeOf(slot.dtype);
    const std::int64_t width = sums ? chip.mmad.n_step : std::max<std::int64_t>(kBlockBytes / element, 1);
    const std::int64_t rows = RoundUp(slot.rows, sums ? chip.mmad.m_step : chip.packing.row_multiple);
    const std::int64_t row_end = o.row_end == slot.rows ? rows : o.row_end;
    const std::int64_t pitch = width * element;
    for (std::int64_t panel = o.col_begin / width; panel * width < o.col_end; ++panel)
      add((panel * rows + o.row_begin) * pitch, (row_end - o.row_begin) * pitch);
  }
  if (from != to) visit(slot.address + from, slot.address + to);
}

template <class Visit>
void ForEachByteRange(const trace::GmAccess& gm, Visit visit) {
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
    std::sort(ranges_.begin(), ranges_.end());
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
