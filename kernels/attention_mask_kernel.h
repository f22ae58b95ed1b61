// Which blocks of scores a boolean mask hides whole: hidden pairs are counted once, before the products, whose walk leaves
// out the blocks that consist of them.
#ifndef CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_
#define CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/attention_band.h"

namespace cubist {

// The pairs that a mask hides, by cells of its rows:
//   counts(b, n, c, j)  those of the rows of cell c with keys before j; b, n and c are 0 where one serves all
// So a block of whole cells of rows and of any keys has counts(.., end) - counts(.., begin) in every cell. Counts that
// 32 bits do not hold wrap; a block may be taken for one that is seen by that, not for one that is hidden.
struct HiddenPairs {
  const GmTensor *mask = nullptr, *counts = nullptr;
  std::int64_t cell = 1;  // Rows of one.

  bool given() const { return counts != nullptr; }
  // Of the mask's batch entries, heads or rows those that differ.
  std::int64_t Distinct(std::size_t d) const { return mask->strides[d] == 0 ? 1 : mask->sizes[d]; }
  Range CellsOf(Range rows) const {
    return Distinct(2) == 1 ? Range{0, 1} : Range{rows.begin / cell, CeilDiv(rows.end, cell)};
  }
  std::int64_t HeadsOf(Range heads) const { return Distinct(1) == 1 ? 1 : heads.size(); }
  // Rows of the mask that the cells of `rows` of `heads` count.
  std::int64_t RowsOf(Range heads, Range rows) const {
    const Range cells = CellsOf(rows);
    return HeadsOf(heads) * (std::min(cells.end * cell, Distinct(2)) - cells.begin * cell);
  }
  // The counts of the first of `heads`.
  Gm MatrixAt(std::int64_t b, Range heads) const {
    return MatrixOf(*counts, Distinct(0) == 1 ? 0 : b, Distinct(1) == 1 ? 0 : heads.begin);
  }
  // Of cells of one head, or of one cell of several, the counts before `keys` keys, from the first on `step` apart.
  Gm OfCells(std::int64_t b, Range heads, Range cells, std::int64_t first_key, std::int64_t keys,
             std::int64_t step) const {
    Gm gm = MatrixAt(b, heads).Rows(cells);
    if (HeadsOf(heads) > 1) gm.rows = HeadsOf(heads), gm.row_stride = counts->strides[1];
    gm.offset += first_key * gm.col_stride;
    gm.cols = keys, gm.col_stride *= step;
    return gm;
  }
  Gm Of(std::int64_t b, Range heads, Range rows, std::int64_t first_key, std::int64_t keys,
        std::int64_t step) const {
    return OfCells(b, heads, CellsOf(rows), first_key, keys, step);
  }
};

// First phase, on Vector cores: g.counts, cell by cell. The mask is read once, whatever it serves.
template <VectorCore Core>
void CountHiddenKernel(Core& core, const HiddenPairs& g) {
  constexpr std::int64_t kMostRows = 32, kMostColumns = 4096, kFlags = 16384;
  const std::int64_t rows_at_once = std::clamp<std::int64_t>(std::min(g.cell, g.Distinct(2)), 1, kMostRows);
  const std::int64_t cols_at_once = std::min(kMostColumns, kFlags / rows_at_once);
  Ring<Buffer::kUB, std::uint8_t> flags_ub(core, "flags_ub", rows_at_once, cols_at_once, 2);
  Ring<Buffer::kUB, std::int32_t> scratch_ub(core, "scratch_ub", rows_at_once, cols_at_once, 1),
      some_ub(core, "some_ub", 1, cols_at_once, 1), column_ub(core, "column_ub", 1, cols_at_once, 1),
      counts_ub(core, "counts_ub", 1, cols_at_once + 1, 2);
  const Split cells(g.Distinct(2), g.cell);
  const std::int64_t keys = g.mask->sizes[3], heads = g.Distinct(1);
  for (std::int64_t task = core.index(); task < g.Distinct(0) * heads * cells.count(); task += core.count()) {
    const std::int64_t cell = task % cells.count(), matrix = task / cells.count();
    const Gm mask = MatrixOf(*g.mask, matrix / heads, matrix % heads).Rows(cells[cell]);
    const Gm counts = MatrixOf(*g.counts, matrix / heads, matrix % heads).Rows({cell, cell + 1});
    std::int64_t before = 0;
    for (const Range cols : AtLeastOnce(Split(keys, cols_at_once))) {
      const UbTile<std::int32_t> column = column_ub.Next(1, cols.size());
      for (const Range rows : Split(mask.rows, rows_at_once)) {
        const UbTile<std::uint8_t> flags = flags_ub.Next(rows.size(), cols.size());
        const UbTile<std::int32_t> scratch = scratch_ub.Next(rows.size(), cols.size());
        core.Load(flags, mask.Block(rows, cols));
        if (rows.begin == 0) {
          core.CountTrue(column, scratch, flags);
        } else {
          const UbTile<std::int32_t> some = some_ub.Next(1, cols.size());
          core.CountTrue(some, scratch, flags);
          core.Add(column, column, some);
        }
      }
      const UbTile<std::int32_t> sums = counts_ub.Next(1, cols.size() + 1);
      core.ExclusiveScan(sums, column, static_cast<std::int32_t>(before));
      core.Store(counts.Cols({cols.begin, cols.end + 1}), sums);
      if (cols.end < keys) before = core.ReadScalar(sums, cols.size());
    }
  }
}

// What the mask hides of blocks of keys from the rows that walk them: several blocks are fetched at a time.
template <VectorCore V>
class HiddenKeyBlocks {
 public:
  // For rows that are counted in up to `most` cells of a head, or of several; 0 without a mask.
  HiddenKeyBlocks(V& core, const HiddenPairs& pairs, std::int64_t most)
      : core_(core),
        pairs_(pairs),
        most_(most),
        counts_ub_(core, "hidden_ub", most_, kHiddenCounts, 1),
        sum_ub_(core, "hidden_sum_ub", std::min<std::int64_t>(most_, 1), kHiddenCounts, 1) {}

  // The first from block `i` on of `blocks` of keys of which the mask leaves anything; blocks.count() where there is none.
  // for_each_run(body) calls body(heads, positions) for the rows. With i = 0 another walk begins.
  template <class ForEachRun>
  std::int64_t FirstSeen(std::int64_t sequence, ForEachRun&& for_each_run, const Split& blocks,
                         std::int64_t i) {
    if (!pairs_.given()) return i;
    if (i == 0) fetched_ = {};
    for (; i < blocks.count(); ++i) {
      if (i >= fetched_.end) Fetch(sequence, for_each_run, blocks, i);
      const std::int64_t at = i - fetched_.begin;
      const std::int64_t next = i + 1 < fetched_.end ? at + 1 : end_;
      const std::int64_t hidden = core_.ReadScalar(sum_, next) - core_.ReadScalar(sum_, at);
      if (hidden != rows_ * blocks[i].size()) break;
    }
    return i;
  }

 private:
  template <class ForEachRun>
  void Fetch(std::int64_t sequence, ForEachRun&& for_each_run, const Split& blocks, std::int64_t i) {
    fetched_ = {i, std::min(i + kHiddenCounts - kBlockWords, blocks.count())};
    end_ = RoundUp(fetched_.size(), kBlockWords);
    const Range of_begins{0, fetched_.size()}, of_end{end_, end_ + 1};
    const UbTile<std::int32_t> all = counts_ub_.Next(most_, of_end.end);
    std::int64_t counted = 0;
    rows_ = 0;
    for_each_run([&](Range heads, Range positions) {
      const Gm begins =
          pairs_.Of(sequence, heads, positions, blocks[i].begin, of_begins.size(), blocks[i].size());
      const Gm end = pairs_.Of(sequence, heads, positions, blocks[fetched_.end - 1].end, 1, 1);
      const UbTile<std::int32_t> some = all.Rows({counted, counted + begins.rows});
      core_.Load(some.Cols(of_begins), begins);
      core_.Load(some.Cols(of_end), end);
      counted += begins.rows;
      rows_ += pairs_.RowsOf(heads, positions);
    });
    sum_ = all.Rows({0, 1});
    if (counted == 1) return;
    sum_ = sum_ub_.Next(1, of_end.end);
    for (const Range cols : {of_begins, of_end})
      core_.ColumnSum(sum_.Cols(cols), all.Part({0, counted}, cols));
  }

  V& core_;
  const HiddenPairs& pairs_;
  std::int64_t most_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_, sum_ub_;
  Range fetched_;  // Blocks,
  UbTile<std::int32_t>
      sum_;  // what is hidden before each and, from the next whole block of UB on, before their end,
  std::int64_t end_ = 0;
  std::int64_t rows_ = 0;  // and of how many rows.
};

// Likewise of blocks of queries, which meet the same keys from the last to the first.
template <VectorCore V>
class HiddenQueryBlocks {
 public:
  // For blocks of up to `most` cells; 0 without a mask.
  HiddenQueryBlocks(V& core, const HiddenPairs& pairs, std::int64_t most)
      : core_(core), pairs_(pairs), most_(most), counts_ub_(core, "hidden_ub", most, 2, 1) {}

  // Whether the mask leaves nothing of `keys` to `rows` of a head.
  bool Hides(std::int64_t sequence, std::int64_t head, Range rows, Range keys) {
    if (!pairs_.given()) return false;
    const Range heads{head, head + 1}, cells = pairs_.CellsOf(rows);
    const Matrix matrix{pairs_.MatrixAt(sequence, heads).offset, keys};
    if (matrix != matrix_ || cells.begin < fetched_.begin || cells.end > fetched_.end) {
      matrix_ = matrix, fetched_ = {std::max<std::int64_t>(cells.end - most_, 0), cells.end};
      counts_ = counts_ub_.Next(fetched_.size(), 2);
      core_.Load(counts_, pairs_.OfCells(sequence, heads, fetched_, keys.begin, 2, keys.size()));
    }
    std::int64_t hidden = 0;
    for (std::int64_t cell = cells.begin - fetched_.begin; cell < cells.end - fetched_.begin; ++cell) {
      const UbTile<std::int32_t> counts = counts_.Rows({cell, cell + 1});
      hidden += core_.ReadScalar(counts, 1) - core_.ReadScalar(counts, 0);
    }
    return hidden == pairs_.RowsOf(heads, rows) * keys.size();
  }

 private:
  struct Matrix {
    std::int64_t place = -1;
    Range keys;
    friend bool operator==(const Matrix&, const Matrix&) = default;
  };

  V& core_;
  const HiddenPairs& pairs_;
  std::int64_t most_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
  Matrix matrix_;  // What is fetched: of these keys,
  Range fetched_;  // cells,
  UbTile<std::int32_t> counts_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_
