#include "npu_model/sync/touches.h"

#include <algorithm>

namespace cubist::sync {
namespace {

// Whether rows of two matrices with one stride share a byte. Row r of a and row s of b meet where
// -b.burst_bytes < (r - s) * stride + (a.offset - b.offset) < ... ; only r - s matters.
bool RowsMeet(const trace::GmAccess& a, const trace::GmAccess& b) {
  const std::int64_t stride = a.row_stride, apart = b.offset - a.offset;
  // k = r - s with apart - a.burst_bytes < k * stride < apart + b.burst_bytes
  const auto floor_div = [](std::int64_t x, std::int64_t y) { return x >= 0 ? x / y : -((-x + y - 1) / y); };
  const std::int64_t least = floor_div(apart - a.burst_bytes, stride) + 1;
  const std::int64_t most = -floor_div(-(apart + b.burst_bytes), stride) - 1;
  return std::max(least, -(b.rows - 1)) <= std::min(most, a.rows - 1);
}

}  // namespace

bool BytesMeet(const trace::GmAccess& a, const trace::GmAccess& b) {
  if (a.bursts > 1 || b.bursts > 1) return true;
  trace::GmAccess x = a, y = b;
  if (x.rows == 1) x.row_stride = y.row_stride;
  if (y.rows == 1) y.row_stride = x.row_stride;
  return x.row_stride <= 0 || x.row_stride != y.row_stride || RowsMeet(x, y);
}

bool Covers(const Area& a, const Area& b) {
  if (a.gm != nullptr && (a.gm->rows > 1 || a.gm->bursts > 1)) {
    return b.gm != nullptr && a.gm->offset == b.gm->offset && a.gm->rows == b.gm->rows &&
           a.gm->row_stride == b.gm->row_stride && a.gm->bursts == b.gm->bursts &&
           a.gm->burst_stride == b.gm->burst_stride && a.gm->burst_bytes == b.gm->burst_bytes;
  }
  return a.row_begin <= b.row_begin && b.row_end <= a.row_end && a.col_begin <= b.col_begin &&
         b.col_end <= a.col_end;
}

}  // namespace cubist::sync
