// Which blocks of scores a boolean mask hides whole: hidden pairs are counted once, before the products, whose walk leaves
// out the blocks that consist of them and, where the tiling says so, steps of keys at the ends of others.
#ifndef CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_
#define CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

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
  std::int64_t Distinct(std::size_t d) const {
    return mask->strides[d] == 0 ? std::min<std::int64_t>(mask->sizes[d], 1) : mask->sizes[d];
  }
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

// What the mask hides of blocks of keys from the rows that walk them, in steps of keys: counts of several are fetched at a
// time.
template <VectorCore V>
class HiddenKeyBlocks {
 public:
  // For rows that are counted in up to `most` cells of a head, or of several; 0 without a mask. Steps are multiples of
  // `step`, or whole blocks where that is 0.
  HiddenKeyBlocks(V& core, const HiddenPairs& pairs, std::int64_t most, std::int64_t step)
      : core_(core),
        pairs_(pairs),
        most_(most),
        least_step_(step),
        counts_ub_(core, "hidden_ub", most_, kHiddenCounts, 1),
        sum_ub_(core, "hidden_sum_ub", std::min<std::int64_t>(most_, 1), kHiddenCounts, 1) {}

  // The first from block `i` on of `blocks` of keys of which the mask leaves anything, and that without the steps at its ends
  // that it hides; blocks.count() where there is none. for_each_run(body) calls body(heads, positions) for the rows. With
  // i = 0 another walk begins.
  template <class ForEachRun>
  SeenKeys FirstSeen(std::int64_t sequence, ForEachRun&& for_each_run, const Split& blocks, std::int64_t i) {
    if (!pairs_.given()) return {i, blocks[i]};
    if (i == 0) fetched_ = {};
    for (; i < blocks.count(); ++i) {
      if (blocks[i].end > fetched_.end) Fetch(sequence, for_each_run, blocks, i);
      const Range seen = SeenOf(blocks[i]);
      if (!seen.empty()) return {i, seen};
    }
    return {i, {}};
  }

 private:
  Range SeenOf(Range block) {
    const Split steps(block, step_);
    std::int64_t begin = 0, end = steps.count();
    while (begin < end && Hides(steps[begin])) ++begin;
    while (begin < end - 1 && Hides(steps[end - 1])) --end;
    return begin == end ? Range{} : Range{steps[begin].begin, steps[end - 1].end};
  }
  bool Hides(Range keys) { return CountBefore(keys.end) - CountBefore(keys.begin) == rows_ * keys.size(); }
  std::int64_t CountBefore(std::int64_t key) {
    return core_.ReadScalar(sum_, key == fetched_.end ? end_ : (key - fetched_.begin) / step_);
  }

  // As many blocks as there is room for, where they are whole steps.
  template <class ForEachRun>
  void Fetch(std::int64_t sequence, ForEachRun&& for_each_run, const Split& blocks, std::int64_t i) {
    constexpr std::int64_t kMost = kHiddenCounts - kBlockWords;
    const std::int64_t size = blocks[i].size();
    step_ = least_step_ == 0 ? size : std::min(RoundUp(CeilDiv(size, kMost), least_step_), size);
    const std::int64_t together = size % step_ == 0 ? kMost * step_ / size : 1;
    fetched_ = {blocks[i].begin, blocks[std::min(i + together, blocks.count()) - 1].end};
    const Range of_begins{0, CeilDiv(fetched_.size(), step_)};
    end_ = RoundUp(of_begins.end, kBlockWords);
    const Range of_end{end_, end_ + 1};
    const UbTile<std::int32_t> all = counts_ub_.Next(most_, of_end.end);
    std::int64_t counted = 0;
    rows_ = 0;
    for_each_run([&](Range heads, Range positions) {
      const Gm begins = pairs_.Of(sequence, heads, positions, fetched_.begin, of_begins.size(), step_);
      const Gm end = pairs_.Of(sequence, heads, positions, fetched_.end, 1, 1);
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
  std::int64_t most_, least_step_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_, sum_ub_;
  Range fetched_;  // Keys, in steps of so many,
  std::int64_t step_ = 0;
  UbTile<std::int32_t>
      sum_;  // what is hidden before each step and, from the next whole block of UB on, before their end,
  std::int64_t end_ = 0;
  std::int64_t rows_ = 0;  // and of how many rows.
};

// Likewise of blocks of queries, which meet the same keys from the last to the first.
template <VectorCore V>
class HiddenQueryBlocks {
 public:
  // For blocks of up to `most` cells, 0 without a mask. Steps of keys are multiples of `step`, or all where that is 0.
  HiddenQueryBlocks(V& core, const HiddenPairs& pairs, std::int64_t most, std::int64_t step)
      : core_(core),
        pairs_(pairs),
        most_(most),
        least_step_(step),
        counts_ub_(core, "hidden_ub", most, step == 0 ? 2 : kHiddenParts, 1) {}

  // What the mask leaves of `keys` to `rows` of a head, without the steps at its ends that it hides; nothing where it hides
  // all.
  std::optional<Range> SeenOf(std::int64_t sequence, std::int64_t head, Range rows, Range keys) {
    if (!pairs_.given()) return keys;
    const Range heads{head, head + 1}, cells = pairs_.CellsOf(rows);
    const Matrix matrix{pairs_.MatrixAt(sequence, heads).offset, keys};
    if (matrix != matrix_ || cells.begin < fetched_.begin || cells.end > fetched_.end) {
      matrix_ = matrix, fetched_ = {std::max<std::int64_t>(cells.end - most_, 0), cells.end};
      Fetch(sequence, heads);
    }
    const std::int64_t row_count = pairs_.RowsOf(heads, rows);
    const auto hides = [&](Range step) { return Hidden(cells, step) == row_count * step.size(); };
    const Split steps(keys, step_);
    std::int64_t begin = 0, end = steps.count();
    while (begin < end && hides(steps[begin])) ++begin;
    while (begin < end - 1 && hides(steps[end - 1])) --end;
    if (begin == end) return {};
    return Range{steps[begin].begin, steps[end - 1].end};
  }

 private:
  struct Matrix {
    std::int64_t place = -1;
    Range keys;
    friend bool operator==(const Matrix&, const Matrix&) = default;
  };

  void Fetch(std::int64_t sequence, Range heads) {
    constexpr std::int64_t kMost = kHiddenParts - kBlockWords;
    const Range keys = matrix_.keys;
    const std::int64_t size = std::max<std::int64_t>(keys.size(), 1);
    step_ = least_step_ == 0 ? size : std::min(RoundUp(CeilDiv(size, kMost), least_step_), size);
    const std::int64_t steps = CeilDiv(size, step_);
    const auto load = [&](Range cols, std::int64_t first_key) {
      core_.Load(counts_.Cols(cols),
                 pairs_.OfCells(sequence, heads, fetched_, first_key, cols.size(), step_));
    };
    end_ = steps == 1 ? 1 : kMost;
    counts_ = counts_ub_.Next(fetched_.size(), end_ + 1);
    if (steps == 1) return load({0, 2}, keys.begin);
    load({0, steps}, keys.begin), load({end_, end_ + 1}, keys.end);
  }

  // Pairs of those cells and keys.
  std::int64_t Hidden(Range cells, Range keys) {
    const std::int64_t begin = (keys.begin - matrix_.keys.begin) / step_,
                       end = keys.end == matrix_.keys.end ? end_ : begin + 1;
    std::int64_t hidden = 0;
    for (const Range cell : Split(cells.From(fetched_.begin), 1)) {
      const UbTile<std::int32_t> counts = counts_.Rows(cell);
      hidden += core_.ReadScalar(counts, end) - core_.ReadScalar(counts, begin);
    }
    return hidden;
  }

  V& core_;
  const HiddenPairs& pairs_;
  std::int64_t most_, least_step_;
  Ring<Buffer::kUB, std::int32_t> counts_ub_;
  Matrix matrix_;                // What is fetched: of these keys,
  Range fetched_;                // cells,
  UbTile<std::int32_t> counts_;  // what is hidden before each step and, in column end_, before the keys' end.
  std::int64_t step_ = 1, end_ = 1;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_MASK_KERNEL_H_
