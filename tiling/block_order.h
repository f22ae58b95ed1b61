// Block order: which core works on which block of a grid, and when.
#ifndef CUBIST_TILING_BLOCK_ORDER_H_
#define CUBIST_TILING_BLOCK_ORDER_H_

#include <algorithm>
#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

enum class BlockOrder : std::uint8_t {
  kRowMajor,  // Along the rows: neighbours in time share rows of A.
  kSwizzled,  // `width` columns at a time, up and down in turn: a band of B stays in L2 while A passes by.
  kDiagonal,  // Bands of `width` rows, along their diagonals: cores that run together share neither row nor
              // column.
};
constexpr const char* NameOf(BlockOrder order) {
  constexpr const char* kNames[] = {"row-major", "swizzled", "diagonal"};
  return kNames[static_cast<int>(order)];
}

inline constexpr int kBlockOrderCount = 3;

struct BlockCoord {
  std::int64_t row = 0, col = 0;
  friend constexpr bool operator==(const BlockCoord&, const BlockCoord&) = default;
};

// A grid of blocks over an (m, n) matrix and the order in which it is walked.
struct BlockGrid {
  std::int64_t rows = 0, cols = 0;
  BlockOrder order = BlockOrder::kRowMajor;
  std::int64_t width = 1;

  constexpr std::int64_t count() const { return rows * cols; }
  friend constexpr bool operator==(const BlockGrid&, const BlockGrid&) = default;

  // The i-th block of the walk; a bijection from [0, count()).
  constexpr BlockCoord At(std::int64_t i) const {
    switch (order) {
      case BlockOrder::kSwizzled: {
        const std::int64_t band = i / (rows * width), j = i % (rows * width);
        const std::int64_t columns = std::min(width, cols - band * width);
        const std::int64_t row = j / columns;
        return {band % 2 == 0 ? row : rows - 1 - row, band * width + j % columns};
      }
      case BlockOrder::kDiagonal: {
        const std::int64_t band = i / (width * cols), j = i % (width * cols);
        const std::int64_t height = std::min(width, rows - band * width);
        return {band * width + j % height, (j % height + j / height) % cols};
      }
      default:
        return {i / cols, i % cols};
    }
  }

  // The stretch of the walk about block i whose blocks lie side by side in one row.
  constexpr Range Strip(std::int64_t i) const {
    if (order == BlockOrder::kDiagonal) return {i, i + 1};
    const std::int64_t columns = order == BlockOrder::kRowMajor ? cols : width, band = i / (rows * columns);
    const std::int64_t across = std::min(columns, cols - band * columns), begin = band * rows * columns;
    const std::int64_t first = begin + (i - begin) / across * across;
    return {first, first + across};
  }
};

// The places in a walk over `tasks` blocks of a grid, or of several one after the other, at which core `index` of `cores`
// works, in its order: every cores-th, or a run of neighbours. Along a strip of a run each core begins at a place of its
// own, so that they do not queue for the same lines of B.
class CoreTasks {
 public:
  enum class Deal : std::uint8_t { kTurns, kRuns, kTurnedRuns };

  CoreTasks(const BlockGrid& grid, Deal deal, std::int64_t tasks, std::int64_t index, std::int64_t cores)
      : grid_(grid), deal_(deal), index_(index), cores_(cores) {
    const std::int64_t share = tasks / cores, rest = tasks % cores;
    begin_ = deal == Deal::kTurns ? index : index * share + std::min(index, rest);
    count_ = share + (index < rest ? 1 : 0);
  }
  std::int64_t count() const { return count_; }
  std::int64_t operator[](std::int64_t i) const {
    if (deal_ == Deal::kTurns) return begin_ + i * cores_;
    const std::int64_t at = begin_ + i;
    if (deal_ == Deal::kRuns) return at;
    const std::int64_t blocks = grid_.count(), before = at / blocks * blocks;
    const Range whole = grid_.Strip(at - before);
    const std::int64_t first = std::max(begin_, before + whole.begin),
                       length = std::min(begin_ + count_, before + whole.end) - first;
    return first + (at - first + length * index_ / cores_) % length;
  }

 private:
  BlockGrid grid_;
  Deal deal_;
  std::int64_t index_, cores_, begin_ = 0, count_ = 0;
};

// The tasks of several lists, dealt to cores one by one as if they were one list.
class RoundRobin {
 public:
  RoundRobin(std::int64_t index, std::int64_t cores) : next_(index), cores_(cores) {}

  // Calls visit(i) for those of the next `count` tasks that are core `index`'s.
  template <class Visit>
  void ForMine(std::int64_t count, Visit&& visit) {
    for (; next_ < count; next_ += cores_) visit(next_);
    next_ -= count;
  }

 private:
  std::int64_t next_, cores_;  // In the list that comes.
};

// The blocks of core `index` of `count`: every count-th of the walk, so that cores
// that run together walk together.
class MyBlocks {
 public:
  template <class Core>
  MyBlocks(const BlockGrid& grid, const Core& core)
      : grid_(grid), first_(core.index()), step_(core.count()) {}

  class Iterator {
   public:
    Iterator(const BlockGrid* grid, std::int64_t at, std::int64_t step) : grid_(grid), at_(at), step_(step) {}
    BlockCoord operator*() const { return grid_->At(at_); }
    Iterator& operator++() {
      at_ += step_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ < other.at_; }

   private:
    const BlockGrid* grid_;
    std::int64_t at_, step_;
  };
  Iterator begin() const { return {&grid_, first_, step_}; }
  Iterator end() const { return {&grid_, grid_.count(), step_}; }

 private:
  BlockGrid grid_;
  std::int64_t first_, step_;
};

}  // namespace cubist

#endif  // CUBIST_TILING_BLOCK_ORDER_H_
