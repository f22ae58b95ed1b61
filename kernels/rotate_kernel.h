// Rotary positions on rows in UB: of queries and keys on their way into attention, and of their gradients back.
#ifndef CUBIST_KERNELS_ROTATE_KERNEL_H_
#define CUBIST_KERNELS_ROTATE_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/attention_band.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {

// Where rows stand: one behind the other from `first` on, or each where `ids`, (1, rows), says.
struct RotatePositions {
  std::int64_t first = 0;
  Gm ids = {};
  RotatePositions(std::int64_t first) : first(first) {}  // NOLINT: a position.
  explicit RotatePositions(const Gm& ids) : ids(ids) {}
  bool listed() const { return ids.tensor != nullptr; }
};

// The tables, (P, R / 2) as the last two of four dimensions, and which columns form a pair.
struct RotateOperands {
  const GmTensor *cos = nullptr, *sin = nullptr;
  bool interleaved = false;             // Pairs are neighbours, else halves.
  bool inverse = false;                 // Turns back: what the gradient of a turned row asks for.
  std::int64_t second = 0;              // Column of UB where second halves begin, see SecondHalfInUb.
  std::int64_t offset = 0;              // Row i of a sequence stands there + i,
  const GmTensor* positions = nullptr;  // or where this says, (1, 1, b, s).

  // Of `rows` of a sequence that begins with row `begin` of batch entry b.
  RotatePositions At(std::int64_t b, Range rows, std::int64_t begin) const {
    if (positions == nullptr) return offset + rows.begin;
    return RotatePositions(MatrixOf(*positions).Block({b, b + 1}, rows.From(-begin)));
  }

  std::int64_t half() const { return cos->sizes[3]; }
  // Columns of UB, and those of the halves among them.
  std::int64_t ub_cols() const { return second + half(); }
  Range FirstHalf() const { return {0, half()}; }
  Range SecondHalf() const { return {second, ub_cols()}; }
  bool halves_apart() const { return second != half(); }
  // Calls body(columns in GM, the same in UB) for the runs of a row whose pairs are halves.
  template <class Body>
  void ForEachRun(Body&& body) const {
    if (!halves_apart()) return body(Range{0, 2 * half()}, Range{0, 2 * half()});
    body(FirstHalf(), FirstHalf());
    body(Range{half(), 2 * half()}, SecondHalf());
  }
  // The first and second elements of all pairs of rows (r, R) in GM.
  Gm First(const Gm& rows) const { return Every(rows, 0); }
  Gm Second(const Gm& rows) const { return Every(rows, interleaved ? 1 : rows.cols / 2); }

 private:
  Gm Every(const Gm& rows, std::int64_t first) const {
    Gm part = rows;
    part.offset += first * rows.col_stride;
    part.cols = rows.cols / 2;
    if (interleaved) part.col_stride *= 2;
    return part;
  }
};

// Turns rows: (y1, y2) = (x1 c - x2 s, x2 c + x1 s); inverse with -s. Turned pairs stand in halves of a row of R, at
// RotateOperands::FirstHalf and SecondHalf of `cols` of UB.
template <VectorCore V>
class Rotator {
 public:
  static constexpr std::int64_t kRows = kRotateRows;

  Rotator(V& core, std::int64_t cols)
      : core_(core),
        x_ub_(core, "rotate_x_ub", kRows, cols, 1),
        y_ub_(core, "rotate_y_ub", kRows, cols, 1),
        product_ub_(core, "rotate_product_ub", kRows, cols, 1),
        angles_ub_(core, "rotate_angles_ub", kRows, cols, 1),
        ids_ub_(core, "rotate_ids_ub", 1, cols > 0 ? kRows : 0, 1),
        wide_ids_ub_(core, "rotate_wide_ids_ub", 1, cols > 0 ? kRows : 0, 1) {}

  // Up to kRows rows in GM; the result may be changed and stands until the next call.
  UbTile<float> Rotate(const RotateOperands& g, const Gm& rows, const RotatePositions& positions) {
    const UbTile<float> x = x_ub_.Next(rows.rows, g.ub_cols());
    core_.Load(x.Cols(g.FirstHalf()), g.First(rows));
    core_.Load(x.Cols(g.SecondHalf()), g.Second(rows));
    return Turn(g, x, positions);
  }
  // The same of rows in UB, of ub_cols.
  UbTile<float> Turn(const RotateOperands& g, UbTile<float> x, const RotatePositions& positions) {
    const std::int64_t rows = x.rows(), cols = x.cols();
    const UbTile<float> y = y_ub_.Next(rows, cols), product = product_ub_.Next(rows, cols);
    const UbTile<float> angles = angles_ub_.Next(rows, cols);
    const Range first = g.FirstHalf(), second = g.SecondHalf();
    const UbTile<float> cos = angles.Cols(first), sin = angles.Cols(second);
    ForEachRun(positions, rows, [&](Range part, std::int64_t position) {
      const Range at{position, position + part.size()};
      core_.Load(cos.Rows(part), MatrixOf(*g.cos).Rows(at));
      core_.Load(sin.Rows(part), MatrixOf(*g.sin).Rows(at));
    });
    if (g.inverse) core_.MulScalar(sin, sin, -1.0f);
    core_.Mul(y.Cols(first), x.Cols(first), cos);
    core_.Mul(y.Cols(second), x.Cols(second), cos);
    core_.Mul(product.Cols(first), x.Cols(second), sin);
    core_.Mul(product.Cols(second), x.Cols(first), sin);
    core_.Sub(y.Cols(first), y.Cols(first), product.Cols(first));
    core_.Add(y.Cols(second), y.Cols(second), product.Cols(second));
    return y;
  }

 private:
  // Calls body(rows, the first one's position) for rows that stand one behind the other.
  template <class Body>
  void ForEachRun(const RotatePositions& positions, std::int64_t rows, Body body) {
    if (!positions.listed()) return body(Range{0, rows}, positions.first);
    const UbTile<std::int32_t> ids = ids_ub_.Next(1, rows);
    if (positions.ids.dtype() == DType::kI64) {
      const UbTile<std::int64_t> wide = wide_ids_ub_.Next(1, rows);
      core_.Load(wide, positions.ids);
      core_.Cast(ids, wide);
    } else {
      core_.Load(ids, positions.ids);
    }
    for (std::int64_t begin = 0, end; begin < rows; begin = end) {
      const std::int64_t first = core_.ReadScalar(ids, begin);
      for (end = begin + 1; end < rows && core_.ReadScalar(ids, end) == first + end - begin;) ++end;
      body(Range{begin, end}, first);
    }
  }

  V& core_;
  Ring<Buffer::kUB, float> x_ub_, y_ub_, product_ub_, angles_ub_;
  Ring<Buffer::kUB, std::int32_t> ids_ub_;
  Ring<Buffer::kUB, std::int64_t> wide_ids_ub_;
};

// Rows of a batch entry that are to be turned, of a sequence that begins with row `begin`.
struct RowsToTurn {
  std::int64_t batch = 0, begin = 0;
  Range rows;
};

// Each of `parts` of `source` (b, n, s, R) turned once, to the same place of `turned`, pairs in halves. `task` counts
// what cores share.
template <VectorCore V>
void RotateKernel(V& core, Rotator<V>& rotator, const RotateOperands& g, const GmTensor& source,
                  const GmTensor& turned, std::span<const RowsToTurn> parts, std::int64_t& task) {
  for (const RowsToTurn& p : parts) {
    for (std::int64_t n = 0; n < source.sizes[1]; ++n) {
      for (const Range part : Split(p.rows, 8 * Rotator<V>::kRows)) {
        if (task++ % core.count() != core.index()) continue;
        for (const Range r : Split(part, Rotator<V>::kRows)) {
          const UbTile<float> y = rotator.Rotate(g, MatrixOf(source, p.batch, n).Rows(r),
                                                 g.At(p.batch, r.From(p.begin), p.begin));
          const Gm to = MatrixOf(turned, p.batch, n).Rows(r);
          g.ForEachRun([&](Range cols, Range in_ub) { core.Store(to.Cols(cols), y.Cols(in_ub)); });
        }
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROTATE_KERNEL_H_
