// Rotary positions on rows in UB: of queries and keys on their way into attention, and of their gradients back.
#ifndef CUBIST_KERNELS_ROTATE_KERNEL_H_
#define CUBIST_KERNELS_ROTATE_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/attention_band.h"

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
  // Whether each angle stands twice in the tables, one beside the other.
  bool angles_twice() const { return cos->strides[3] == 2 || sin->strides[3] == 2; }
  // Columns of UB, and those of the halves among them.
  std::int64_t ub_cols() const { return second + half(); }
  Range FirstHalf() const { return {0, half()}; }
  Range SecondHalf() const { return {second, ub_cols()}; }
  // Calls body(columns in GM, the same in UB) for the runs of a row in halves: one where there is no gap between them.
  template <class Body>
  void ForEachRun(Body&& body) const {
    if (second == half()) return body(Range{0, 2 * half()}, Range{0, 2 * half()});
    body(FirstHalf(), FirstHalf());
    body(Range{half(), 2 * half()}, SecondHalf());
  }
};

// Column of UB where the second half of a row of 2 * `half` begins: a block's first, of 16-bit numbers too, where
// instructions ask for one. Then there may be a gap behind the first half.
inline std::int64_t SecondHalfInUb(const ChipSpec& chip, std::int64_t half) {
  return chip.pipes_overlap ? RoundUp(half, 2 * kBlockWords) : half;
}

// Turns rows of T: (y1, y2) = (x1 c - x2 s, x2 c + x1 s); inverse with -s. Pairs stand in halves of a row of UB, at
// RotateOperands::FirstHalf and SecondHalf.
template <class T, VectorCore V>
class Rotator {
 public:
  struct Angles {
    UbTile<float> cos, sin;  // Each in both halves: whole rows are multiplied at once.
  };

  // So many rows at a time at most; none at all without tables. Without `loads` they are in UB already.
  Rotator(V& core, const RotateOperands& g, std::int64_t rows, bool loads)
      : core_(core),
        x_ub_(core, "rotate_x_ub", rows, loads ? Cols(g) : 0, 3),
        product_ub_(core, "rotate_product_ub", rows, Cols(g), 1),
        angles_ub_(core, "rotate_angles_ub", rows, Cols(g), 4),
        pairs_ub_(core, "rotate_pairs_ub", rows, loads && g.interleaved ? 2 * g.half() : 0, 2),
        half_ub_(core, "rotate_half_ub", rows, loads && g.interleaved ? g.half() : 0, 2),
        zipped_ub_(core, "rotate_zipped_ub", rows, !loads && g.interleaved ? 2 * g.half() : 0, 2),
        twice_ub_(core, "rotate_twice_ub", rows, AnglesTwice(g) ? 2 * g.half() : 0, 1),
        once_ub_(core, "rotate_once_ub", rows, AnglesTwice(g) ? g.half() : 0, 1),
        offsets_ub_(core, "rotate_offsets_ub", rows, !loads && g.interleaved ? 2 * g.half() : 0, 1),
        ids_ub_(core, "rotate_ids_ub", 1, Cols(g) > 0 ? rows : 0, 1),
        wide_ids_ub_(core, "rotate_wide_ids_ub", 1, Cols(g) > 0 ? rows : 0, 1) {}

  // Of `rows` rows; they serve all heads at these positions.
  Angles Load(const RotateOperands& g, const RotatePositions& positions, std::int64_t rows) {
    const Angles angles{angles_ub_.Next(rows, g.ub_cols()), angles_ub_.Next(rows, g.ub_cols())};
    const UbTile<float> cos = angles.cos.Cols(g.FirstHalf()), sin = angles.sin.Cols(g.FirstHalf());
    ForEachRun(positions, rows, [&](Range part, std::int64_t position) {
      const Range at{position, position + part.size()};
      LoadAngles(cos.Rows(part), MatrixOf(*g.cos).Rows(at));
      LoadAngles(sin.Rows(part), MatrixOf(*g.sin).Rows(at));
    });
    if (g.inverse) core_.MulScalar(sin, sin, -1.0f);
    core_.MulScalar(angles.cos.Cols(g.SecondHalf()), cos, 1.0f);
    core_.MulScalar(angles.sin.Cols(g.SecondHalf()), sin, 1.0f);
    return angles;
  }
  UbTile<float> Load(const RotateOperands& g, const Gm& rows) {
    const UbTile<float> x = x_ub_.Next(rows.rows, g.ub_cols());
    if (!g.interleaved) {
      g.ForEachRun([&](Range cols, Range in_ub) { core_.Load(x.Cols(in_ub), rows.Cols(cols)); });
      return x;
    }
    const UbTile<T> pairs = pairs_ub_.Next(rows.rows, rows.cols);
    core_.Load(pairs, rows);
    for (const int i : {0, 1}) {  // Narrow elements are picked in half the time.
      const UbTile<T> half = half_ub_.Next(rows.rows, g.half());
      core_.Unzip(half, pairs, i);
      core_.Cast(x.Cols(i == 0 ? g.FirstHalf() : g.SecondHalf()), half);
    }
    return x;
  }
  // In their place.
  void Turn(const RotateOperands& g, UbTile<float> x, const Angles& angles) {
    const UbTile<float> product = product_ub_.Next(x.rows(), x.cols());
    g.ForEachRun([&](Range, Range in_ub) {
      core_.Mul(product.Cols(in_ub), x.Cols(in_ub), angles.sin.Cols(in_ub));
      core_.Mul(x.Cols(in_ub), x.Cols(in_ub), angles.cos.Cols(in_ub));
    });
    const UbTile<float> first = x.Cols(g.FirstHalf()), second = x.Cols(g.SecondHalf());
    core_.Sub(first, first, product.Cols(g.SecondHalf()));
    core_.Add(second, second, product.Cols(g.FirstHalf()));
  }
  // To rows in GM, as pairs where the operands say so; x is lost.
  void Store(const RotateOperands& g, const Gm& rows, UbTile<float> x) {
    if (!g.interleaved) return StoreHalves(g, rows, x);
    const UbTile<float> zipped = zipped_ub_.Next(rows.rows, rows.cols);
    core_.Zip(zipped, x.Cols(g.FirstHalf()), x.Cols(g.SecondHalf()));
    core_.Store(rows, zipped);
  }
  void StoreHalves(const RotateOperands& g, const Gm& rows, UbTile<float> x) {
    g.ForEachRun([&](Range cols, Range in_ub) { core_.Store(rows.Cols(cols), x.Cols(in_ub)); });
  }

 private:
  // Every other angle is picked from whole rows: elements moved one by one would take ten times as long.
  void LoadAngles(const UbTile<float>& half, const Gm& rows) {
    if (rows.col_stride != 2) return core_.Load(half, rows);
    Gm whole = rows;  // Up to the last angle; there may be none beside it.
    whole.cols = 2 * rows.cols - 1, whole.col_stride = 1;
    const UbTile<float> twice = twice_ub_.Next(rows.rows, 2 * rows.cols),
                        once = once_ub_.Next(rows.rows, rows.cols);
    core_.Load(twice.Cols({0, whole.cols}), whole);
    core_.Unzip(once, twice, 0);
    core_.MulScalar(half, once, 1.0f);
  }
  static bool AnglesTwice(const RotateOperands& g) { return g.cos != nullptr && g.angles_twice(); }
  static std::int64_t Cols(const RotateOperands& g) { return g.cos == nullptr ? 0 : g.ub_cols(); }

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
  Ring<Buffer::kUB, float> x_ub_, product_ub_, angles_ub_;
  Ring<Buffer::kUB, T> pairs_ub_, half_ub_;
  Ring<Buffer::kUB, float> zipped_ub_, twice_ub_, once_ub_;
  Ring<Buffer::kUB, std::int32_t> offsets_ub_;  // Room for those that an NPU's Zip gathers by.
  Ring<Buffer::kUB, std::int32_t> ids_ub_;
  Ring<Buffer::kUB, std::int64_t> wide_ids_ub_;
};

// Rows of a batch entry that are to be turned, of a sequence that begins with row `begin`.
struct RowsToTurn {
  std::int64_t batch = 0, begin = 0;
  Range rows;
};

// `parts` of `source` (b, n, s, R) go to the same places of `turned`, pairs in halves.
struct TurnedTensor {
  RotateOperands angles;
  const GmTensor *source = nullptr, *turned = nullptr;
  std::vector<RowsToTurn> parts;

  std::int64_t heads() const { return source->sizes[1]; }
  std::int64_t rows() const {
    std::int64_t sum = 0;
    for (const RowsToTurn& p : parts) sum += p.rows.size();
    return heads() * sum;
  }
};

// Rows that a Vector core turns at a time: four tiles for each core at least, as far as there are rows, so that one is
// loaded while another is computed; as many as UB has room for at most.
inline std::int64_t RowsTurnedAtOnce(const ChipSpec& chip, DType in, std::int64_t ub_cols,
                                     std::int64_t rows) {
  constexpr std::int64_t kMost = 32, kLeast = 8;
  const BufferSpec& ub = chip.buffer(Buffer::kUB);
  const auto bytes = [&](std::int64_t r) {
    return 10 * chip.SlotBytes(Buffer::kUB, DType::kF32, r, ub_cols) +
           3 * chip.SlotBytes(Buffer::kUB, in, r, ub_cols) + chip.SlotBytes(Buffer::kUB, DType::kI32, 1, r) +
           chip.SlotBytes(Buffer::kUB, DType::kI64, 1, r);
  };
  std::int64_t at_once = kMost;
  while (at_once > 1 && bytes(at_once) > std::min(ub.fast, ub.capacity)) at_once /= 2;
  const std::int64_t of_four = CeilDiv(rows, 4 * chip.cube_cores * chip.vector_per_cube);
  return std::min(at_once, RoundUp(std::max<std::int64_t>(of_four, 1), kLeast));
}

// A tensor's tiles are counted by part, rows and head. Cores have runs of them, in which the heads of the same rows share
// their angles: runs of each tensor, as those of keys, which have few heads, wait for more of their angles.
template <class T, VectorCore V>
void RotateKernel(V& core, std::span<const TurnedTensor> tensors, std::int64_t rows_at_once) {
  Rotator<T, V> rotator(core, tensors[0].angles, rows_at_once, /*loads=*/true);
  for (const TurnedTensor& x : tensors) {
    const RotateOperands& g = x.angles;
    std::int64_t tiles = 0, tile = 0;
    for (const RowsToTurn& p : x.parts) tiles += x.heads() * Split(p.rows, rows_at_once).count();
    const Range share{tiles * core.index() / core.count(), tiles * (core.index() + 1) / core.count()};
    for (const RowsToTurn& p : x.parts) {
      for (const Range rows : Split(p.rows, rows_at_once)) {
        const Range heads{std::max<std::int64_t>(share.begin - tile, 0),
                          std::min(share.end - tile, x.heads())};
        tile += x.heads();
        if (heads.empty()) continue;
        const auto angles = rotator.Load(g, g.At(p.batch, rows.From(p.begin), p.begin), rows.size());
        for (std::int64_t n = heads.begin; n < heads.end; ++n) {
          const UbTile<float> turned = rotator.Load(g, MatrixOf(*x.source, p.batch, n).Rows(rows));
          rotator.Turn(g, turned, angles);
          rotator.StoreHalves(g, MatrixOf(*x.turned, p.batch, n).Rows(rows), turned);
        }
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROTATE_KERNEL_H_
