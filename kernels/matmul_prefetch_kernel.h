// L2 prefetch of a product: what its first waves of blocks need, read ahead by Vector cores that have nothing else to do.
#ifndef CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_

#include <cstdint>
#include <set>
#include <type_traits>
#include <vector>

#include "kernels/matmul_operands_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// The rows and columns of blocks of one wave after the other, each in the first that needs it.
class FirstNeeds {
 public:
  FirstNeeds(const MatmulTiling& t, std::int64_t cores) : tiling_(t), cores_(cores) {}

  void NextWave() {
    rows.clear(), cols.clear();
    for (std::int64_t core = 0; core < cores_; ++core) {
      const CoreTasks tasks(tiling_.grid, tiling_.deal(), tiling_.grid.count(), core, cores_);
      if (wave_ >= tasks.count()) continue;
      const BlockCoord block = tiling_.grid.At(tasks[wave_]);
      if (seen_rows_.insert(block.row).second) rows.push_back(block.row);
      if (seen_cols_.insert(block.col).second) cols.push_back(block.col);
    }
    ++wave_;
  }

  std::vector<std::int64_t> rows, cols;

 private:
  const MatmulTiling& tiling_;
  std::int64_t cores_, wave_ = 0;
  std::set<std::int64_t> seen_rows_, seen_cols_;
};

// A Vector core's share of what is read ahead: every so many-th piece of all.
template <class T, VectorCore V>
class AheadReader {
 public:
  AheadReader(V& vector, const char* name, std::int64_t rows, std::int64_t cols)
      : vector_(vector),
        rows_(AheadRows(rows, cols, SizeOf(DTypeOf<T>()))),
        ring_(vector, name, rows_, cols, 1, Role::kRelay) {}

  // `piece` counts the pieces of all Vector cores, of which this one is number `mine` of `all`.
  void Read(const Gm& from, std::int64_t mine, std::int64_t all, std::int64_t* piece) {
    for (const Range rows : Split(from.rows, rows_)) {
      if ((*piece)++ % all == mine) vector_.Load(ring_.Next(rows.size(), from.cols), from.Rows(rows));
    }
  }

 private:
  V& vector_;
  std::int64_t rows_;
  Ring<Buffer::kUB, T> ring_;
};

// L2 prefetch: Vector cores read what the first t.prefetch waves of blocks need, each part once and in the order in which
// it is needed, and drop it. What the Cube cores then load is in L2, or on its way there.
template <class T, AiCore Core>
void Prefetch(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  const auto lanes = static_cast<std::int64_t>(core.vectors().size());
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    auto& vector = core.vectors()[static_cast<std::size_t>(lane)];
    using Vector = std::remove_cvref_t<decltype(vector)>;
    AheadReader<T, Vector> a(vector, "a_ahead", t.m, t.a_k1()),
        b(vector, "b_ahead", t.b_turned ? t.n : t.k1, t.b_turned ? t.k1 : t.n);
    const std::int64_t mine = core.index() * lanes + lane, all = core.count() * lanes;
    std::int64_t piece = 0;
    FirstNeeds needs(t, core.count());
    for (std::int64_t wave = 0; wave < t.prefetch; ++wave) {
      needs.NextWave();
      for (const Range of_a : Split(g.k, t.a_k1())) {
        for (const std::int64_t row : needs.rows)
          a.Read(g.a.At({}).plain.Block(Split(g.c->sizes[2], t.m)[row], of_a), mine, all, &piece);
        if (g.b.is_packed()) continue;  // by the phase before, which has left it in L2
        for (const Range k1 : Split(of_a, t.k1)) {
          for (const std::int64_t col : needs.cols) {
            const Gm of_b = g.b.At({}).plain.Block(k1, Split(g.c->sizes[3], t.n)[col]);
            b.Read(t.b_turned ? of_b.Transposed() : of_b, mine, all, &piece);
          }
        }
      }
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_
