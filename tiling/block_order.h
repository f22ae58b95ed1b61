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
