// Model kernels of vendor operators: what they have to move and to compute. Elementwise ones have two buffers; where a
// kernel reduces or gathers rows it has one, and loads, computes and stores in turn: so the measured times say. They
// are recorded without data.
#ifndef CUBIST_TOOLS_VALIDATION_STREAM_KERNELS_H_
#define CUBIST_TOOLS_VALIDATION_STREAM_KERNELS_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"

namespace cubist {

inline constexpr std::int64_t kUbBytes = 190 * 1024;  // less a little for rings of one row

// Instructions per element, in fp32.
struct Arithmetic {
  int unary = 0, binary = 0, exps = 0, divs = 0;
};

template <VectorCore Core>
void Compute(Core& core, UbTile<float> x, UbTile<float> y, const Arithmetic& work) {
  for (int i = 0; i < work.unary; ++i) core.MulScalar(x, x, 1.0f);
  for (int i = 0; i < work.binary; ++i) core.Mul(x, x, y);
  for (int i = 0; i < work.exps; ++i) core.Exp(x, x);
  for (int i = 0; i < work.divs; ++i) core.Div(x, x, y);
}

// Of an input of `cols` columns what goes with columns r of the output: those, or a piece as large, where it has fewer and
// comes again and again.
inline Range Again(Range r, std::int64_t cols) {
  if (r.end <= cols) return r;
  const std::int64_t size = std::min(r.size(), cols), begin = std::min(r.begin % cols, cols - size);
  return {begin, begin + size};
}

// out = f(in...), element by element; all are rows (1, n). Fewer inputs than outputs or elements are fine.
template <VectorCore Core>
void ElementwiseKernel(Core& core, std::span<const Gm> in, std::span<const Gm> out, const Arithmetic& work) {
  constexpr std::int64_t kTiles = 4;  // of a core, at least: that it loads, computes and stores side by side
  const std::int64_t n = out[0].cols, per_core = RoundUp(CeilDiv(n, core.count()), 256);
  const std::int64_t begin = std::min(n, core.index() * per_core), end = std::min(n, begin + per_core);
  const auto inputs = static_cast<std::int64_t>(in.size());
  // Several operands of bf16, which V has no arithmetic on, are held in fp32 besides: no room for second buffers.
  const int stages = inputs > 1 && out[0].dtype() == DType::kBF16 ? 1 : 2;
  const std::int64_t most = kUbBytes / 4 / (2 * inputs + 1) / 256 * 256;
  const std::int64_t size = std::clamp<std::int64_t>(RoundUp(CeilDiv(per_core, kTiles), 256), 256, most);
  // Second operands begin half of the bank groups after the first, as vendors' allocators place them.
  std::vector<Ring<Buffer::kUB, float>> rings;
  rings.emplace_back(core, "in", 1, size, stages);
  [[maybe_unused]] const Ring<Buffer::kUB, float> apart(core, "apart", 1, 32, 2);
  Ring<Buffer::kUB, float> scratch(core, "scratch", 1, size, 1);
  for (std::int64_t i = 1; i < inputs; ++i) rings.emplace_back(core, "in", 1, size, stages);
  for (const Range r : Split(Range{begin, end}, size)) {
    std::vector<UbTile<float>> x;
    for (std::size_t i = 0; i < in.size(); ++i) {
      x.push_back(rings[i].Next(1, r.size()));
      const Range part = Again(r, in[i].cols);
      core.Load(x[i].Cols({0, part.size()}), in[i].Cols(part));
    }
    Compute(core, x[0], x.size() > 1 ? x[1] : scratch.Next(1, r.size()), work);
    for (std::size_t i = 0; i < out.size(); ++i) core.Store(out[i].Cols(r), x[std::min(i, x.size() - 1)]);
  }
}

// Tiles of up to `most` numbers of (rows, cols), a few for each core: where they begin, and how large they are.
struct TileGrid {
  TileGrid(std::int64_t rows, std::int64_t cols, std::int64_t cores, std::int64_t most)
      : rows(rows), cols(cols) {
    const std::int64_t across =
        std::max(CeilDiv(cols, most), CeilDiv(cores, std::max<std::int64_t>(rows, 1)));
    width = std::min(RoundUp(CeilDiv(cols, across), 256), cols);
    const std::int64_t per_core = CeilDiv(rows * CeilDiv(cols, width), 2 * cores);
    height = std::clamp<std::int64_t>(most / RoundUp(width, 8), 1, std::max<std::int64_t>(per_core, 1));
  }
  std::int64_t count() const { return CeilDiv(rows, height) * CeilDiv(cols, width); }
  Range Rows(std::int64_t task) const { return Split(rows, height)[task / CeilDiv(cols, width)]; }
  Range Cols(std::int64_t task) const { return Split(cols, width)[task % CeilDiv(cols, width)]; }

  std::int64_t rows, cols, height = 1, width = 1;
};

// Tiles of (rows, cols) as the vendor's SwiGlu cuts them (ops-nn, swi_glu_tiling.cpp): of the widths from all of a row down
// in steps of 512 bytes, with as many rows as UB holds, the one that keeps most cores at work with the fewest tiles.
inline TileGrid FewestTiles(std::int64_t rows, std::int64_t cols, std::int64_t cores, std::int64_t element) {
  constexpr std::int64_t kUb = 192 * 1024, kLine = 512, kBlock = 32;
  // Two buffers of two inputs and an output, and what is computed in fp32 besides.
  const std::int64_t most =
      kUb / (2 * 3 * element + (element == 2 ? 8 : 4)) / (kBlock / element) * (kBlock / element);
  const std::int64_t step = kLine / element;
  TileGrid best(rows, cols, cores, most);
  std::int64_t fewest = 0, busiest = 0, width = cols;
  if (cols > most) width = most / step * step;
  while (width > 0) {
    TileGrid grid = best;
    grid.width = width;
    grid.height =
        std::clamp<std::int64_t>(most / RoundUp(width, kBlock / element), 1, std::max<std::int64_t>(rows, 1));
    const std::int64_t busy = std::min(grid.count(), cores);
    if (busy > busiest || (busy == busiest && grid.count() < fewest)) {
      best = grid;
      busiest = busy, fewest = grid.count();
    }
    if (width <= step || grid.height >= rows) break;
    width = width % step == 0 ? width - step : width / step * step;
  }
  return best;
}

// out = f(left half, right half) of each row of `in`: a half of a row begins where the other ends, on whatever byte that is.
template <VectorCore Core>
void HalvesKernel(Core& core, const Gm& in, const Gm& out, const Arithmetic& work) {
  const TileGrid grid = FewestTiles(out.rows, out.cols, core.count(), SizeOf(out.dtype()));
  Ring<Buffer::kUB, float> left(core, "left", grid.height, grid.width, 2),
      right(core, "right", grid.height, grid.width, 2);
  for (std::int64_t task = core.index(); task < grid.count(); task += core.count()) {
    const Range r = grid.Rows(task), c = grid.Cols(task);
    const auto x = left.Next(r.size(), c.size()), y = right.Next(r.size(), c.size());
    core.Load(x, in.Block(r, c));
    core.Load(y, in.Block(r, {out.cols + c.begin, out.cols + c.end}));
    Compute(core, x, y, work);
    core.Store(out.Block(r, c), x);
  }
}

// out = max(in, other), where `other` is one row for all rows, or a column, again and again: a column is read number by
// number, each filling a row, which leaves no room for a second buffer.
template <VectorCore Core>
void BroadcastMaxKernel(Core& core, const Gm& in, const Gm& other, const Gm& out) {
  const bool row = other.rows == 1;
  TileGrid grid(in.rows, in.cols, core.count(), kUbBytes / 4 / (row ? 3 : 4));
  if (!row) grid.height = std::min(grid.height, other.rows);
  Ring<Buffer::kUB, float> ring(core, "x", grid.height, grid.width, row ? 2 : 1),
      others(core, "other", row ? 1 : grid.height, row ? grid.width : 1, 1),
      spread(core, "spread", row ? 1 : grid.height, grid.width, 1);
  for (std::int64_t task = core.index(); task < grid.count(); task += core.count()) {
    const Range r = grid.Rows(task), c = grid.Cols(task);
    const auto x = ring.Next(r.size(), c.size());
    const auto y = others.Next(row ? 1 : r.size(), row ? c.size() : 1);
    core.Load(x, in.Block(r, c));
    const std::int64_t first = row ? 0 : std::min(r.begin % other.rows, other.rows - r.size());
    core.Load(y, row ? other.Cols(c) : other.Rows({first, first + r.size()}));
    if (row) {
      core.Max(x, x, y);
    } else {
      const auto all = spread.Next(r.size(), c.size());
      for (std::int64_t i = 0; i < r.size(); ++i) {
        core.ReadScalar(y.Rows({i, i + 1}), 0);
        core.Fill(all.Rows({i, i + 1}), 0.0f);
      }
      core.Max(x, x, all);
    }
    core.Store(out.Block(r, c), x);
  }
}

// Softmax of each row. The vendor's reductions of a whole repeat (VCMAX, VCADD) take 7 and 3 cycles, the model's of blocks 1:
// a division and four operations on one number make up for it.
template <VectorCore Core>
void SoftmaxKernel(Core& core, const Gm& in, const Gm& out) {
  const std::int64_t per_core = CeilDiv(in.rows, core.count());
  const std::int64_t begin = std::min(in.rows, core.index() * per_core),
                     end = std::min(in.rows, begin + per_core);
  const bool padded = in.cols * SizeOf(in.dtype()) % 32 != 0;  // in UB: such rows are taken one by one
  const std::int64_t rows = std::clamp<std::int64_t>(kUbBytes / (2 * RoundUp(in.cols * 4, 32) + 64), 1,
                                                     padded ? 1 : std::max<std::int64_t>(per_core, 1));
  Ring<Buffer::kUB, float> ring(core, "x", rows, in.cols, padded && 24 * in.cols <= kUbBytes ? 2 : 1),
      statistics(core, "statistics", rows, 1, 1);
  for (const Range r : Split(Range{begin, end}, rows)) {
    const auto x = ring.Next(r.size(), in.cols);
    const auto s = statistics.Next(r.size(), 1);
    core.Load(x, in.Rows(r));
    core.RowMax(s, x);
    Compute(core, x, x, {.unary = 4, .divs = 1});
    core.Sub(x, x, s);
    core.Exp(x, x);
    core.RowSum(s, x);
    core.Div(x, x, s);
    core.Store(out.Rows(r), x);
  }
}

// out = x / rms(x) * gamma, row by row; rows are taken together up to kTogether numbers.
template <VectorCore Core>
void RmsNormRowsKernel(Core& core, const Gm& in, const Gm& gamma, const Gm& out) {
  constexpr std::int64_t kTogether = 3072;
  const std::int64_t per_core = CeilDiv(in.rows, core.count());
  const std::int64_t begin = std::min(in.rows, core.index() * per_core),
                     end = std::min(in.rows, begin + per_core);
  const std::int64_t rows = std::max<std::int64_t>(kTogether / std::max<std::int64_t>(in.cols, 1), 1);
  Ring<Buffer::kUB, float> ring(core, "x", rows, in.cols, 1), squares(core, "squares", rows, in.cols, 1),
      weights(core, "gamma", 1, in.cols, 1), statistics(core, "rms", rows, 1, 1);
  const auto g = weights.Next(1, in.cols);
  if (begin < end) core.Load(g, gamma);
  for (const Range r : Split(Range{begin, end}, rows)) {
    const auto x = ring.Next(r.size(), in.cols), xx = squares.Next(r.size(), in.cols);
    const auto s = statistics.Next(r.size(), 1);
    core.Load(x, in.Rows(r));
    core.Mul(xx, x, x);
    core.RowSum(s, xx);
    core.MulScalar(s, s, 1.0f);
    core.Sqrt(s, s);
    core.Div(x, x, s);
    for (std::int64_t i = 0; i < r.size(); ++i) core.Mul(x.Rows({i, i + 1}), x.Rows({i, i + 1}), g);
    core.Store(out.Rows(r), x);
  }
}

// Softmax of each column of (outer) matrices (rows, cols) that lie one after the other: strips of columns.
template <VectorCore Core>
void ColumnSoftmaxKernel(Core& core, const Gm& in, const Gm& out, std::int64_t rows) {
  const std::int64_t outer = in.rows / std::max<std::int64_t>(rows, 1);
  const std::int64_t most = kUbBytes / (4 * (2 * rows + 2)) / 8 * 8,
                     strips = CeilDiv(in.cols, std::max<std::int64_t>(most, 8));
  const std::int64_t width = RoundUp(CeilDiv(in.cols, strips), 8);
  Ring<Buffer::kUB, float> ring(core, "x", rows, width, 1), statistics(core, "statistics", 1, width, 1);
  for (std::int64_t task = core.index(); task < outer * strips; task += core.count()) {
    const Range r{task / strips * rows, task / strips * rows + rows};
    const Range c{task % strips * width, std::min(in.cols, task % strips * width + width)};
    if (c.size() <= 0) continue;
    const auto x = ring.Next(rows, c.size());
    const auto s = statistics.Next(1, c.size());
    core.Load(x, in.Block(r, c));
    for (std::int64_t i = 0; i < rows; ++i) core.Max(s, s, x.Rows({i, i + 1}));
    for (std::int64_t i = 0; i < rows; ++i) core.Sub(x.Rows({i, i + 1}), x.Rows({i, i + 1}), s);
    core.Exp(x, x);
    for (std::int64_t i = 0; i < rows; ++i) core.Add(s, s, x.Rows({i, i + 1}));
    for (std::int64_t i = 0; i < rows; ++i) core.Div(x.Rows({i, i + 1}), x.Rows({i, i + 1}), s);
    core.Store(out.Block(r, c), x);
  }
}

// out = in transposed, in tiles whose rows are 128 bytes on either side; two passes of V stand for the shuffle. A number is
// `parts` floats, or one of the tensors' own type.
template <VectorCore Core>
void TransposeKernel(Core& core, const Gm& in, const Gm& out, std::int64_t parts) {
  const std::int64_t side = 128 / (parts * SizeOf(in.dtype()));
  const Split rows(in.rows, side), cols(in.cols / parts, side);
  Ring<Buffer::kUB, float> ring(core, "x", side, side * parts, 2);
  const std::int64_t down = CeilDiv(in.rows, side), across = CeilDiv(in.cols / parts, side);
  for (std::int64_t task = core.index(); task < down * across; task += core.count()) {
    const Range r = rows[task / across], c = cols[task % across];
    const auto x = ring.Next(r.size(), c.size() * parts);
    core.Load(x, in.Block(r, {c.begin * parts, c.end * parts}));
    core.MulScalar(x, x, 1.0f);
    core.MulScalar(x, x, 1.0f);
    core.Store(out.Block(c, {r.begin * parts, r.end * parts}), ring.Next(c.size(), r.size() * parts));
  }
}

// Two copies of `in` side by side, row by row: out = (in, in).
template <VectorCore Core>
void TwiceKernel(Core& core, const Gm& in, const Gm& out) {
  TileGrid grid(in.rows, in.cols, core.count(), kUbBytes / 4 / 2);
  Ring<Buffer::kUB, float> ring(core, "x", grid.height, grid.width, 2);
  for (std::int64_t task = core.index(); task < grid.count(); task += core.count()) {
    const Range r = grid.Rows(task), c = grid.Cols(task);
    const auto x = ring.Next(r.size(), c.size());
    core.Load(x, in.Block(r, c));
    for (const std::int64_t half : {std::int64_t{0}, in.cols})
      core.Store(out.Block(r, {half + c.begin, half + c.end}), x);
  }
}

// Rotary embedding of q and k (tokens, numbers of all heads), up to kTogether numbers at a time: loaded with their rows of
// the tables, rotated and stored, one after the other.
template <VectorCore Core>
void RotaryKernel(Core& core, std::span<const Gm> in, std::span<const Gm> out) {
  constexpr std::int64_t kTogether = 1024;
  const std::int64_t tokens = in[0].rows, per_core = CeilDiv(tokens, core.count());
  const Range mine{std::min(tokens, core.index() * per_core),
                   std::min(tokens, (core.index() + 1) * per_core)};
  const std::int64_t most = std::max<std::int64_t>(kTogether / std::max<std::int64_t>(in[0].cols, 1), 1);
  std::vector<Ring<Buffer::kUB, float>> rings;
  for (const Gm& x : in) rings.emplace_back(core, "in", most, x.cols, 2);
  Ring<Buffer::kUB, float> turned(core, "turned", most, in[0].cols, 1);
  for (const Range r : Split(mine, most)) {
    std::vector<UbTile<float>> x;
    for (std::size_t i = 0; i < in.size(); ++i) {
      x.push_back(rings[i].Next(r.size(), in[i].cols));
      core.Load(x[i], in[i].Rows(r));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto t = turned.Next(r.size(), in[i].cols);
      core.MulScalar(t, x[i], -1.0f);
      core.Mul(x[i], x[i], t);
      core.Mul(t, t, x[i]);
      core.Add(x[i], x[i], t);
      core.Store(out[i].Rows(r), x[i]);
    }
  }
}

// Segments of rows change places: out segment s is in segment (s * 7) mod segments, with a scale and an index per row.
// Every core first works out where segments begin: counts (1, segments) are added up by the scalar unit, those of
// 64 bits in two words.
template <VectorCore Core>
void MoveSegmentsKernel(Core& core, const Gm& in, const Gm& out, std::span<const Gm> columns,
                        const Gm& counts, int words) {
  const std::int64_t segments = counts.cols;
  const std::int64_t row_bytes = RoundUp(in.cols * 4, 32),
                     length = std::max<std::int64_t>(in.rows / segments, 1);
  // No more rows at a time than leave some to every core.
  const std::int64_t most = std::clamp<std::int64_t>(
      std::min((kUbBytes - 8 * counts.cols) / 2 / (row_bytes + 32), CeilDiv(in.rows, core.count())), 1,
      length);
  const std::int64_t pieces = CeilDiv(length, most), tasks = segments * pieces;
  Ring<Buffer::kUB, float> ring(core, "rows", most, in.cols, 1), values(core, "values", 1, most, 1);
  Ring<Buffer::kUB, std::int32_t> scanned(core, "counts", 1, segments, 1), ends(core, "ends", 1, segments, 1);
  const auto scan = scanned.Next(1, segments), sums = ends.Next(1, segments);
  core.Load(scan, counts);
  core.Fill(sums, 0);
  for (int word = 0; word < words; ++word) core.Histogram(sums, scan, {});
  for (std::int64_t s = 0; s < segments; ++s) core.ReadScalar(sums, s);
  for (std::int64_t task = core.index(); task < tasks; task += core.count()) {
    const std::int64_t segment = task / pieces, first = task % pieces * most,
                       n = std::min(most, length - first);
    const std::int64_t from = segment * 7 % segments * length + first, to = segment * length + first;
    if (n <= 0 || from + n > in.rows || to + n > in.rows) continue;
    const auto x = ring.Next(n, in.cols);
    core.Load(x, in.Rows({from, from + n}));
    core.Store(out.Rows({to, to + n}), x);
    for (std::size_t c = 0; c + 1 < columns.size(); c += 2) {
      const auto v = values.Next(1, n);
      core.Load(v, columns[c].Cols({from, from + n}));
      core.Store(columns[c + 1].Cols({to, to + n}), v);
    }
  }
}

// Per token: the sum of `top_k` rows of `expanded`, scattered, each with a weight and a row of bias, and of one row of
// each of `skips`.
struct Finalize {
  Gm expanded, bias, out;
  std::vector<Gm> skips;
  std::int64_t top_k = 1;
};

template <VectorCore Core>
void FinalizeKernel(Core& core, const Finalize& g) {
  const std::int64_t h = g.out.cols, tokens = g.out.rows, per_core = CeilDiv(tokens, core.count());
  const std::int64_t begin = std::min(tokens, core.index() * per_core),
                     end = std::min(tokens, begin + per_core);
  Ring<Buffer::kUB, float> sums(core, "sum", 1, h, 1), rows(core, "row", 1, h, 2),
      biases(core, "bias", 1, h, 1);
  for (std::int64_t t = begin; t < end; ++t) {
    const auto sum = sums.Next(1, h);
    const auto add_row = [&](const Gm& from, std::int64_t row, bool first, bool weighted) {
      const auto x = first ? sum : rows.Next(1, h);
      core.Load(x, from.Rows({row, row + 1}));
      if (weighted && g.bias.tensor != nullptr) {
        const auto b = biases.Next(1, h);
        core.Load(b, g.bias.Rows({row % g.bias.rows, row % g.bias.rows + 1}));
        core.Add(x, x, b);
      }
      if (weighted) core.MulScalar(x, x, 0.5f);
      if (!first) core.Add(sum, sum, x);
    };
    for (std::size_t s = 0; s < g.skips.size(); ++s) add_row(g.skips[s], t, s == 0, false);
    for (std::int64_t j = 0; j < g.top_k; ++j)
      add_row(g.expanded, (t * g.top_k + j) * 7919 % g.expanded.rows, g.skips.empty() && j == 0, true);
    core.Store(g.out.Rows({t, t + 1}), sum);
  }
}

// MoeInitRoutingV3 in its phases: ids are sorted, experts' rows counted, and rows gathered.
struct InitRouting {
  Gm ids, sorted, places;  // (1, slots)
  Gm tokens, out;          // (tokens, h), (rows kept, bytes of a row / 4)
  int work = 0;            // Vector instructions on a row: quantisation,
  bool once = true;        // and whether once for all places of a row
};

// A core's piece of so many; it has room for kAtOnce ids, and sorts as many together.
template <VectorCore Core>
void SortSlotsKernel(Core& core, const Gm& from, const Gm& to, std::int64_t pieces) {
  constexpr std::int64_t kAtOnce = 4096;
  const std::int64_t per_core = CeilDiv(from.cols, pieces);
  const Range mine{std::min(from.cols, core.index() * per_core),
                   std::min(from.cols, (core.index() + 1) * per_core)};
  Ring<Buffer::kUB, float> keys(core, "keys", 1, kAtOnce, 2);
  Ring<Buffer::kUB, std::int32_t> order(core, "order", 1, kAtOnce, 1);
  for (const Range r : Split(mine, kAtOnce)) {
    const auto x = keys.Next(1, r.size()), y = keys.Next(1, r.size());
    core.Load(x, from.Cols(r));
    core.TopK(y, order.Next(1, r.size()), x);
    core.Store(to.Cols(r), y);
  }
}

// The rows of each expert are counted by the scalar unit, slot by slot.
template <VectorCore Core>
void CountSlotsKernel(Core& core, const Gm& sorted, const Gm& places) {
  constexpr std::int64_t kAtOnce = 4096;
  const std::int64_t per_core = CeilDiv(sorted.cols, core.count());
  const Range mine{std::min(sorted.cols, core.index() * per_core),
                   std::min(sorted.cols, (core.index() + 1) * per_core)};
  Ring<Buffer::kUB, float> keys(core, "keys", 1, kAtOnce, 1);
  for (const Range r : Split(mine, kAtOnce)) {
    const auto x = keys.Next(1, r.size());
    core.Load(x, sorted.Cols(r));
    for (std::int64_t i = 0; i < r.size(); ++i) core.ReadScalar(x, i);
    core.Store(places.Cols(r), x);
  }
}

// The places of what is dropped hold zeros.
template <VectorCore Core>
void ClearSlotsKernel(Core& core, const Gm& out) {
  const std::int64_t per_core = CeilDiv(out.rows, core.count());
  Ring<Buffer::kUB, float> zeros(core, "zeros", 1, out.cols, 1);
  const auto zero = zeros.Next(1, out.cols);
  core.Fill(zero, 0.0f);
  for (std::int64_t r = core.index() * per_core; r < std::min(out.rows, (core.index() + 1) * per_core); ++r)
    core.Store(out.Rows({r, r + 1}), zero);
}

// A row of tokens is read once, quantised once or for each place, and stored wherever it goes.
template <VectorCore Core>
void GatherSlotsKernel(Core& core, const InitRouting& g) {
  const std::int64_t h = g.tokens.cols, each = CeilDiv(g.out.rows, g.tokens.rows);
  Ring<Buffer::kUB, float> rows(core, "row", 1, h, 2), places(core, "places", 1, each, 2);
  for (std::int64_t t = core.index(); t < g.tokens.rows; t += core.count()) {
    const Range mine{std::min(g.out.rows, t * each), std::min(g.out.rows, (t + 1) * each)};
    if (mine.size() <= 0) continue;
    const auto place = places.Next(1, mine.size());
    const std::int64_t first = std::min(mine.begin, g.places.cols - mine.size());
    core.Load(place, g.places.Cols({first, first + mine.size()}));
    const auto x = rows.Next(1, h);
    core.Load(x, g.tokens.Rows({t, t + 1}));
    const auto quantise = [&] {
      for (int i = 0; i < g.work; ++i) core.MulScalar(x, x, 1.0f);
    };
    if (g.once) quantise();
    for (std::int64_t r = mine.begin; r < mine.end; ++r) {
      if (!g.once) quantise();
      core.ReadScalar(place, r - mine.begin);
      core.Store(g.out.Rows({r * 7919 % g.out.rows, r * 7919 % g.out.rows + 1}), x.Cols({0, g.out.cols}));
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_STREAM_KERNELS_H_
