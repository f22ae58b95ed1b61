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

// The tables, (P, R / 2) as the last two of four dimensions, and which columns form a pair.
struct RotateOperands {
  const GmTensor *cos = nullptr, *sin = nullptr;
  bool interleaved = false;  // Pairs are neighbours, else halves.
  bool inverse = false;      // Turns back: what the gradient of a turned row asks for.

  std::int64_t cols() const { return 2 * cos->sizes[3]; }
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

// Turns rows: (y1, y2) = (x1 c - x2 s, x2 c + x1 s); inverse with -s. Turned pairs stand in halves of a row of R.
template <VectorCore V>
class Rotator {
 public:
  static constexpr std::int64_t kRows = kRotateRows;

  Rotator(V& core, std::int64_t cols)
      : core_(core),
        x_ub_(core, "rotate_x_ub", kRows, cols, 1),
        y_ub_(core, "rotate_y_ub", kRows, cols, 1),
        product_ub_(core, "rotate_product_ub", kRows, cols, 1),
        angles_ub_(core, "rotate_angles_ub", kRows, cols, 1) {}

  // Up to kRows rows in GM, the first at `position`; the result may be changed and stands until the next call.
  UbTile<float> Rotate(const RotateOperands& g, const Gm& rows, std::int64_t position) {
    const UbTile<float> x = x_ub_.Next(rows.rows, rows.cols), y = y_ub_.Next(rows.rows, rows.cols);
    const UbTile<float> product = product_ub_.Next(rows.rows, rows.cols);
    const UbTile<float> angles = angles_ub_.Next(rows.rows, rows.cols);
    const Range first{0, rows.cols / 2}, second{rows.cols / 2, rows.cols}, at{position, position + rows.rows};
    const UbTile<float> cos = angles.Cols(first), sin = angles.Cols(second);
    core_.Load(x.Cols(first), g.First(rows));
    core_.Load(x.Cols(second), g.Second(rows));
    core_.Load(cos, MatrixOf(*g.cos).Rows(at));
    core_.Load(sin, MatrixOf(*g.sin).Rows(at));
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
  V& core_;
  Ring<Buffer::kUB, float> x_ub_, y_ub_, product_ub_, angles_ub_;
};

// Every row of `source` (b, n, s, R) turned once, to the same place of `turned`, pairs in halves. Row i of a sequence,
// or of a batch entry where there is no list, stands at position `offset` + i.
template <VectorCore V>
void RotateKernel(V& core, const RotateOperands& g, const GmTensor& source, const GmTensor& turned,
                  std::span<const AttentionSequence> sequences, std::int64_t offset) {
  Rotator<V> rotator(core, g.cols());
  std::int64_t task = 0;
  const auto rotate = [&](std::int64_t b, Range rows) {
    for (std::int64_t n = 0; n < source.sizes[1]; ++n) {
      for (const Range part : Split(rows, 8 * Rotator<V>::kRows)) {
        if (task++ % core.count() != core.index()) continue;
        for (const Range r : Split(part, Rotator<V>::kRows)) {
          const UbTile<float> y =
              rotator.Rotate(g, MatrixOf(source, b, n).Rows(r), offset + r.begin - rows.begin);
          core.Store(MatrixOf(turned, b, n).Rows(r), y);
        }
      }
    }
  };
  if (sequences.empty()) {
    for (std::int64_t b = 0; b < source.sizes[0]; ++b) rotate(b, {0, source.sizes[2]});
  }
  for (const AttentionSequence& s : sequences) rotate(s.batch, {s.kv_begin, s.kv_begin + s.skv});
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROTATE_KERNEL_H_
