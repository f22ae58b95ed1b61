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
  const bool adds = g.residual != nullptr;
  const std::int64_t sum_rows = adds ? t.rows : 1, sum_cols = adds ? t.cols : 1;
  Ring<Buffer::kUB, T> residual_ub(core, "residual_ub", sum_rows, sum_cols, t.stages, Role::kRelay),
      sum_ub(core, "sum_ub", sum_rows, sum_cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, T> out_ub(core, "out_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> rstd_ub(core, "rstd_ub", t.rows, 1, t.stages),
      one_ub(core, "one_ub", t.rows, 1, 1);
  RowWeights<V> weights(core, g.gamma, t);
  const Split parts(g.x.cols, t.cols);
  const float scale = g.x.cols == 0 ? 0.0f : 1.0f / static_cast<float>(g.x.cols);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    for (const Range rows : Split(Split(g.x.rows, t.chunk_rows)[c], t.rows)) {
      NormTiles<T> n;
      n.rstd = rstd_ub.Next(rows.size(), 1), n.one = one_ub.Next(rows.size(), 1);
      // The tiles of a part of x, with the residual where there is one.
      const auto load = [&](Range cols) {
        const auto tile = [&](auto& ring) { return ring.Next(rows.size(), cols.size()); };
        n.s0 = tile(s0_ub), n.s1 = tile(s1_ub), n.x = tile(x_ub);
        core.Load(n.x, g.x.Block(rows, cols));
        if (!adds) return;
        n.residual = tile(residual_ub), n.sum = sum_ub.Next(MatrixOf(*g.sum).Block(rows, cols));
        core.Load(n.residual, MatrixOf(*g.residual).Block(rows, cols));
      };
      if (parts.count() == 1) {
        const Range cols = parts[0];
        const Gm destination = g.out.Block(rows, cols);
        load(cols);
        n.gamma = weights.Load(cols), n.out = out_ub.Next(destination);
        core.NormRows(n, scale, g.eps);
        core.Store(destination, n.out);
        if (adds) core.Store(MatrixOf(*g.sum).Block(rows, cols), n.sum);
      } else {
        core.Fill(n.rstd, 0.0f);
        for (const Range cols : parts) {
          load(cols);
          if (adds) {
            core.Cast(n.s0, n.x);
            core.Cast(n.s1, n.residual);
            core.Add(n.s0, n.s0, n.s1);
            core.Cast(n.sum, n.s0);
            core.Store(MatrixOf(*g.sum).Block(rows, cols), n.sum);
            n.x = n.sum;
          }
          core.RowDot(n.rstd, n.s0, n.s1, n.x, n.x);
        }
        core.MulScalar(n.rstd, n.rstd, scale);
        core.AddScalar(n.rstd, n.rstd, g.eps);
        core.Sqrt(n.rstd, n.rstd);
        core.Fill(n.one, 1.0f);
        core.Div(n.rstd, n.one, n.rstd);
        for (const Range cols : parts) {
          const UbTile<T> x = x_ub.Next(rows.size(), cols.size());
          core.Load(x, (adds ? MatrixOf(*g.sum) : g.x).Block(rows, cols));
          const Gm destination = g.out.Block(rows, cols);
          const UbTile<T> out = out_ub.Next(destination);
          core.ScaleRows(out, s0_ub.Next(rows.size(), cols.size()), x, n.rstd, weights.Load(cols));
          core.Store(destination, out);
        }
      }
      if (g.rstd != nullptr) core.Store(MatrixOf(*g.rstd).Rows(rows), n.rstd);
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
      x_ub(core, "x_ub", t.rows, t.cols, t.stages, Role::kRelay);
  const bool adds = g.d_more != nullptr;
  Ring<Buffer::kUB, T> more_ub(core, "d_more_ub", adds ? t.rows : 1, adds ? t.cols : 1, t.stages,
                               Role::kRelay);
  Ring<Buffer::kUB, T> d_x_ub(core, "d_x_ub", t.rows, t.cols, t.stages, Role::kRelay);
  Ring<Buffer::kUB, float> s0_ub(core, "s0_ub", t.rows, t.cols, 1), s1_ub(core, "s1_ub", t.rows, t.cols, 1);
  Ring<Buffer::kUB, float> rstd_ub(core, "rstd_ub", t.rows, 1, t.stages),
      shift_ub(core, "shift_ub", t.rows, 1, 1);
  Ring<Buffer::kUB, float> d_gamma_ub(core, "d_gamma_ub", 1, t.cols, 1);
  RowWeights<V> weights(core, g.gamma, t);
  const Split parts(g.x.cols, t.cols);
  const bool sums = g.d_gamma_of_chunk.cols > 0;
  const float scale = g.x.cols == 0 ? 0.0f : 1.0f / static_cast<float>(g.x.cols);

  for (std::int64_t c = core.index(); c < t.chunks; c += core.count()) {
    const Range chunk = AtLeastOnce(Split(g.x.rows, t.chunk_rows))[c];
    NormGradTiles<T> n;
    for (const Range rows : AtLeastOnce(Split(chunk, t.rows))) {
      const bool first = rows.begin == chunk.begin, last = rows.end == chunk.end;
      n.rstd = rstd_ub.Next(rows.size(), 1), n.shift = shift_ub.Next(rows.size(), 1);
      core.Load(n.rstd, g.rstd.Rows(rows));
      const auto load = [&](Range cols) {
        const auto tile = [&](auto& ring) { return ring.Next(rows.size(), cols.size()); };
        n.s0 = tile(s0_ub), n.s1 = tile(s1_ub), n.d_out = tile(d_out_ub), n.x = tile(x_ub);
        core.Load(n.d_out, g.d_out.Block(rows, cols));
        core.Load(n.x, g.x.Block(rows, cols));
        n.gamma = weights.Load(cols);
      };
      const auto load_more = [&](Range cols) {
        if (g.d_more == nullptr) return;
        n.more = more_ub.Next(rows.size(), cols.size());
        core.Load(n.more, MatrixOf(*g.d_more).Block(rows, cols));
      };
      if (parts.count() == 1) {
        const Range cols = parts[0];
        const Gm destination = g.d_x.Block(rows, cols);
        load(cols), load_more(cols);
        n.d_x = d_x_ub.Next(destination);
        if (sums && first) {
          n.d_gamma = d_gamma_ub.Next(1, cols.size());
          core.Fill(n.d_gamma, 0.0f);
        }
        core.NormRowsGrad(n, scale);
        core.Store(destination, n.d_x);
        if (sums && last) core.Store(g.d_gamma_of_chunk.Block({c, c + 1}, cols), n.d_gamma);
        continue;
      }
      core.Fill(n.shift, 0.0f);
      for (const Range cols : parts) {
        load(cols);
        core.RowDot(n.shift, n.s0, n.s1, n.d_out, n.x, n.gamma);
      }
      core.MulScalar(n.shift, n.shift, scale);
      for (int i = 0; i < 3; ++i) core.Mul(n.shift, n.shift, n.rstd);
      for (const Range cols : parts) {
        load(cols), load_more(cols);
        const Gm destination = g.d_x.Block(rows, cols);
        n.d_x = d_x_ub.Next(destination);
        core.NormGrad(n);
        core.Store(destination, n.d_x);
        if (!sums) continue;
        // The sum goes through GM with every part.
        const Gm of_chunk = g.d_gamma_of_chunk.Block({c, c + 1}, cols);
        const UbTile<float> d_gamma = d_gamma_ub.Next(1, cols.size());
        if (first) {
          core.Fill(d_gamma, 0.0f);
        } else {
          core.Load(d_gamma, of_chunk);
        }
        core.AddColumnDots(d_gamma, n.s0, n.s1, n.d_out, n.x, n.rstd);
        core.Store(of_chunk, d_gamma);
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
