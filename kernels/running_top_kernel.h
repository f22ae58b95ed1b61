// The highest of more elements than fit at once.
#ifndef CUBIST_KERNELS_RUNNING_TOP_KERNEL_H_
#define CUBIST_KERNELS_RUNNING_TOP_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "npu_model/core.h"
#include "npu_model/tile.h"

namespace cubist {

// The `most` highest elements of rows that pass part by part, the largest part first: descending, of equals the one that
// came first, with their numbers. -inf is no element: it fills up those so far to whole blocks, where what a part adds may
// begin, and so comes behind them all.
template <VectorCore V>
class RunningTop {
 public:
  RunningTop(V& core, const char* values_name, const char* ids_name, std::int64_t rows, std::int64_t most,
             std::int64_t part_cols)
      : core_(core),
        most_(most),
        cols_(RoundUp(most, kBlockWords) + std::min(most, part_cols)),
        values_ub_(core, values_name, rows, cols_, 2),
        ids_ub_(core, ids_name, rows, cols_, 2) {}

  void Clear() { count_ = 0; }
  // Column j of x is number first + j.
  void Add(UbTile<float> x, std::int64_t first) {
    if (count_ == 0) Next(x.rows());
    const std::int64_t added = std::min(most_, x.cols()), begin = RoundUp(count_, kBlockWords);
    const Range cols{0, begin + added}, its{begin, cols.end};
    const UbTile<float> values = values_.Cols(cols);
    const UbTile<std::int32_t> ids = ids_.Cols(cols), its_ids = ids.Cols(its);
    core_.TopK(values.Cols(its), its_ids, x);
    if (first != 0) core_.AddScalar(its_ids, its_ids, static_cast<std::int32_t>(first));
    if (count_ > 0) {
      Next(x.rows());
      for (std::int64_t i = 0; i < x.rows(); ++i) {
        const Range row{i, i + 1};
        core_.MergeSort(values_.Part(row, cols), ids_.Part(row, cols), values.Rows(row), ids.Rows(row),
                        begin);
      }
    }
    count_ = std::min(most_, count_ + added);
  }
  // Until the next Add after a Clear.
  UbTile<float> values() const { return values_.Cols({0, count_}); }
  UbTile<std::int32_t> ids() const { return ids_.Cols({0, count_}); }

 private:
  void Next(std::int64_t rows) {
    values_ = values_ub_.Next(rows, cols_), ids_ = ids_ub_.Next(rows, cols_);
    core_.Fill(values_, -std::numeric_limits<float>::infinity());
    core_.Fill(ids_, 0);
  }

  V& core_;
  std::int64_t most_, cols_, count_ = 0;
  Ring<Buffer::kUB, float> values_ub_;
  Ring<Buffer::kUB, std::int32_t> ids_ub_;
  UbTile<float> values_;
  UbTile<std::int32_t> ids_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_RUNNING_TOP_KERNEL_H_
