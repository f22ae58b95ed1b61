// Root-mean-square norm (Zhang and Sennrich, 2019), forward and backward.
#ifndef CUBIST_KERNELS_RMS_NORM_KERNEL_H_
#define CUBIST_KERNELS_RMS_NORM_KERNEL_H_

#include <cstdint>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/rowwise_tiling.h"

namespace cubist {

// A row of weights in UB: loaded once where a row is one part, with every part otherwise. 1 where not given.
template <VectorCore V>
class RowWeights {
 public:
  RowWeights(V& core, const GmTensor* weights, const RowwiseTiling& t)
      : core_(core), weights_(weights), ring_(core, "weights_ub", 1, t.cols, 1) {}

  UbTile<float> Load(Range cols) {
    if (loaded_ == cols) return tile_;
    loaded_ = cols;
    tile_ = ring_.Next(1, cols.size());
    if (weights_ != nullptr) {
      core_.Load(tile_, MatrixOf(*weights_).Cols(cols));
    } else {
      core_.Fill(tile_, 1.0f);
    }
    return tile_;
  }

 private:
  V& core_;
  const GmTensor* weights_;
  Ring<Buffer::kUB, float> ring_;
  UbTile<float> tile_;
  Range loaded_{-1, -1};
};

struct RmsNormOperands {
  Gm x, out;                           // (T, H)
  const GmTensor* residual = nullptr;  // (T, H)
  const GmTensor* sum = nullptr;       // (T, H), with residual
  const GmTensor* gamma = nullptr;     // (H)
  const GmTensor* rstd = nullptr;      // (T, 1)
  float eps = 0;
};

// out = x * rstd * gamma, rstd = 1 / sqrt(mean(x^2) + eps). A row that is one part is read once; a longer one is
// read for its squares and again to be scaled.
template <class T, VectorCore V>
void RmsNormKernel(V& core, const RmsNormOperands& g, const RowwiseTiling& t) {
  Ring<Buffer::kUB, T> x_ub(core, "x_ub", t.rows, t.cols, t.stages, Role::kRelay);
  const std::int64_t sum_rows = g.residual == nullptr ? 1 : t.rows,
                     sum_cols = g.residual == nullptr ? 1 : t.cols;
  Ring<Buffer::kUB, T> residual_ub(core, "residual_ub", sum_rows, sum_cols, t.stages, Role::kRelay),
      sum_ub(core, "sum_ub", sum_rows, sum_cols, t.stages);
  Ring<Buffer::kUB, T> out_ub(core, "out_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> rstd_ub(core, "rstd_ub", t.rows, 1, t.stages),
      one_ub(core, "one_ub", t.rows, 1, 1);
  RowWeights<V> weights(core, g.gamma, t);
  const Split parts(g.x.cols, t.cols);
  const float scale = g.x.cols == 0 ? 0.0f : 1.0f / static_cast<float>(g.x.cols);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range rows : Split(Split(g.x.rows, t.chunk_rows)[c], t.rows)) {
      const UbTile<float> rstd = rstd_ub.Next(rows.size(), 1), one = one_ub.Next(rows.size(), 1);
      const auto tile = [&](auto& ring, Range cols) { return ring.Next(rows.size(), cols.size()); };
      // A part of x, with the residual where there is one.
      const auto load = [&](Range cols, const UbTile<float>& s0, const UbTile<float>& s1) {
        const UbTile<T> x = tile(x_ub, cols);
        core.Load(x, g.x.Block(rows, cols));
        if (g.residual == nullptr) return x;
        const UbTile<T> residual = tile(residual_ub, cols), sum = tile(sum_ub, cols);
        core.Load(residual, MatrixOf(*g.residual).Block(rows, cols));
        core.Cast(s0, x);
        core.Cast(s1, residual);
        core.Add(s0, s0, s1);
        core.Cast(sum, s0);
        core.Store(MatrixOf(*g.sum).Block(rows, cols), sum);
        return sum;
      };
      if (parts.count() == 1) {
        const Range cols = parts[0];
        const Gm destination = g.out.Block(rows, cols);
        const UbTile<float> s0 = tile(s0_ub, cols), s1 = tile(s1_ub, cols);
        const UbTile<T> x = load(cols, s0, s1), out = out_ub.Next(destination);
        core.NormRows(out, rstd, one, s0, s1, x, weights.Load(cols), scale, g.eps);
        core.Store(destination, out);
      } else {
        core.Fill(rstd, 0.0f);
        for (const Range cols : parts) {
          const UbTile<float> s0 = tile(s0_ub, cols), s1 = tile(s1_ub, cols);
          const UbTile<T> x = load(cols, s0, s1);
          core.RowDot(rstd, s0, s1, x, x);
        }
        core.MulScalar(rstd, rstd, scale);
        core.AddScalar(rstd, rstd, g.eps);
        core.Sqrt(rstd, rstd);
        core.Fill(one, 1.0f);
        core.Div(rstd, one, rstd);
        for (const Range cols : parts) {
          const UbTile<T> x = tile(x_ub, cols);
          core.Load(x, (g.residual == nullptr ? g.x : MatrixOf(*g.sum)).Block(rows, cols));
          const Gm destination = g.out.Block(rows, cols);
          const UbTile<T> out = out_ub.Next(destination);
          core.ScaleRows(out, tile(s0_ub, cols), x, rstd, weights.Load(cols));
          core.Store(destination, out);
        }
      }
      if (g.rstd != nullptr) core.Store(MatrixOf(*g.rstd).Rows(rows), rstd);
    }
  }
}

struct RmsNormGradOperands {
  Gm d_out, x, rstd, d_x;            // (T, H), rstd (T, 1)
  const GmTensor* d_more = nullptr;  // (T, H)
  const GmTensor* gamma = nullptr;   // (H)
  Gm d_gamma_of_chunk;               // Workspace (chunks, H); no columns where d_gamma is not wanted
};

// d_x = rstd * d_out * gamma - x * rstd^3 * mean(d_out * gamma * x) + d_more, and each chunk's part of
// d_gamma = sum over rows of d_out * x * rstd.
template <class T, VectorCore V>
void RmsNormGradKernel(V& core, const RmsNormGradOperands& g, const RowwiseTiling& t) {
  Ring<Buffer::kUB, T> d_out_ub(core, "d_out_ub", t.rows, t.cols, t.stages, Role::kRelay),
      x_ub(core, "x_ub", t.rows, t.cols, t.stages, Role::kRelay),
      more_ub(core, "d_more_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, T> d_x_ub(core, "d_x_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> rstd_ub(core, "rstd_ub", t.rows, 1, t.stages),
      shift_ub(core, "shift_ub", t.rows, 1, 1);
  Ring<Buffer::kUB, float> d_gamma_ub(core, "d_gamma_ub", 1, t.cols, 1);
  RowWeights<V> weights(core, g.gamma, t);
  const Split parts(g.x.cols, t.cols);
  const bool whole = parts.count() <= 1, sums = g.d_gamma_of_chunk.cols > 0;
  const float scale = g.x.cols == 0 ? 0.0f : 1.0f / static_cast<float>(g.x.cols);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    const Range chunk = AtLeastOnce(Split(g.x.rows, t.chunk_rows))[c];
    UbTile<float> d_gamma;
    for (const Range rows : AtLeastOnce(Split(chunk, t.rows))) {
      const UbTile<float> rstd = rstd_ub.Next(rows.size(), 1), shift = shift_ub.Next(rows.size(), 1);
      UbTile<T> d_out, x;
      const auto load = [&](Range cols) {
        d_out = d_out_ub.Next(rows.size(), cols.size()), x = x_ub.Next(rows.size(), cols.size());
        core.Load(d_out, g.d_out.Block(rows, cols));
        core.Load(x, g.x.Block(rows, cols));
      };
      core.Load(rstd, g.rstd.Rows(rows));
      core.Fill(shift, 0.0f);
      for (const Range cols : parts) {
        load(cols);
        core.RowDot(shift, s0_ub.Next(rows.size(), cols.size()), s1_ub.Next(rows.size(), cols.size()), d_out,
                    x, weights.Load(cols));
      }
      core.MulScalar(shift, shift, scale);
      core.Mul(shift, shift, rstd);
      core.Mul(shift, shift, rstd);
      core.Mul(shift, shift, rstd);
      for (const Range cols : parts) {
        if (!whole) load(cols);
        const UbTile<float> s0 = s0_ub.Next(rows.size(), cols.size()),
                            s1 = s1_ub.Next(rows.size(), cols.size());
        const Gm destination = g.d_x.Block(rows, cols);
        const UbTile<T> d_x = d_x_ub.Next(destination);
        if (g.d_more != nullptr) {
          const UbTile<T> more = more_ub.Next(rows.size(), cols.size());
          core.Load(more, MatrixOf(*g.d_more).Block(rows, cols));
          core.NormGrad(d_x, s0, s1, d_out, x, weights.Load(cols), rstd, shift, more);
        } else {
          core.NormGrad(d_x, s0, s1, d_out, x, weights.Load(cols), rstd, shift);
        }
        core.Store(destination, d_x);
        if (!sums) continue;
        // The sum stays in UB where rows are whole, and goes through GM with every part otherwise.
        const bool first = rows.begin == chunk.begin, last = rows.end == chunk.end;
        const Gm of_chunk = g.d_gamma_of_chunk.Block({c, c + 1}, cols);
        if (first || !whole) d_gamma = d_gamma_ub.Next(1, cols.size());
        if (first) core.Fill(d_gamma, 0.0f);
        if (!first && !whole) core.Load(d_gamma, of_chunk);
        core.AddColumnDots(d_gamma, s0, s1, d_out, x, rstd);
        if (last || !whole) core.Store(of_chunk, d_gamma);
      }
    }
  }
}

// total (1, H) = sum of the rows of `of_chunk` (chunks, H), ascending; columns are dealt to cores in parts.
template <VectorCore V>
void SumChunksKernel(V& core, const Gm& of_chunk, const Gm& total, std::int64_t part_cols) {
  Ring<Buffer::kUB, float> chunk_ub(core, "chunk_ub", 1, part_cols, 2),
      total_ub(core, "total_ub", 1, part_cols, 1);
  const Split parts(total.cols, part_cols);
  for (std::int64_t p = core.index(); p < parts.count(); p += core.count()) {
    const UbTile<float> sum = total_ub.Next(1, parts[p].size());
    core.Fill(sum, 0.0f);
    for (std::int64_t c = 0; c < of_chunk.rows; ++c) {
      const UbTile<float> part = chunk_ub.Next(1, parts[p].size());
      core.Load(part, of_chunk.Block({c, c + 1}, parts[p]));
      core.Add(sum, sum, part);
    }
    core.Store(total.Cols(parts[p]), sum);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_RMS_NORM_KERNEL_H_
