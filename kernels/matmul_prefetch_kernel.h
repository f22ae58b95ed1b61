// L2 prefetch of a product: what its first waves of blocks need, read ahead by Vector cores that have nothing else to do.
#ifndef CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_

#include <cstdint>
#include <iterator>
#include <set>
#include <type_traits>
#include <vector>

#include "kernels/matmul_operands_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"
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
  static constexpr std::int64_t kSteps = 6;  // For each core: its block, whose row and column are looked up.

 private:
  const MatmulTiling& tiling_;
  std::int64_t cores_, wave_ = 0;
  std::set<std::int64_t> seen_rows_, seen_cols_;
};

// A Vector core's share of what is read ahead, and dropped: of all pieces, those of the same rows of K one after the other, every
// so many-th.
template <class T, VectorCore V>
class AheadReader {
 public:
  AheadReader(V& vector, const MatmulTiling& t, std::int64_t index, std::int64_t readers)
      : vector_(vector),
        tiling_(t),
        pieces_(index, readers),
        a_(vector, "a_ahead", t.m, t.a_k1()),
        b_(vector, "b_ahead", t.b_turned ? t.n : t.k1, t.b_turned ? t.k1 : t.n) {}

  // The blocks of up to `rows` rows a_of(i, of_k) and those of columns b_of(i, of_k), so many of each, for all of k.
  template <class BlockOfA, class BlockOfB>
  void Read(std::int64_t k, std::int64_t a_blocks, std::int64_t rows, BlockOfA&& a_of, std::int64_t b_blocks,
            BlockOfB&& b_of) {
    const MatmulTiling& t = tiling_;
    const Split of_a(k, t.a_k1());
    const std::int64_t of_row = CeilDiv(rows, a_.rows), of_rows = a_blocks * of_row,
                       of_col = CeilDiv(b_.block_rows, b_.rows), of_cols = b_blocks * of_col,
                       all = of_rows + CeilDiv(t.a_k1(), t.k1) * of_cols;
    pieces_.ForMine(of_a.count() * all, [&](std::int64_t piece) {
      constexpr std::int64_t kSteps = 4;  // To find it: divisions.
      vector_.Spend(kSteps);
      const Range range = of_a[piece / all];
      const std::int64_t at = piece % all, behind = at - of_rows;
      if (behind < 0) return Load(a_, a_of(at / of_row, range), at % of_row);
      const Split k1(range, t.k1);
      if (behind / of_cols >= k1.count()) return;
      const Gm block = b_of(behind % of_cols / of_col, k1[behind / of_cols]);
      Load(b_, t.b_turned ? block.Transposed() : block, behind % of_col);
    });
  }
  V& vector() { return vector_; }

 private:
  struct Pieces {
    Pieces(V& vector, const char* name, std::int64_t of_block, std::int64_t cols)
        : block_rows(of_block),
          rows(AheadRows(of_block, cols, SizeOf(DTypeOf<T>()))),
          ring(vector, name, rows, cols, 1, Role::kRelay) {}
    std::int64_t block_rows, rows;
    Ring<Buffer::kUB, T> ring;
  };
  void Load(Pieces& to, const Gm& block, std::int64_t i) {
    const Split pieces(block.rows, to.rows);
    if (i < pieces.count()) vector_.Load(to.ring.Next(pieces[i].size(), block.cols), block.Rows(pieces[i]));
  }

  V& vector_;
  const MatmulTiling& tiling_;
  RoundRobin pieces_;
  Pieces a_, b_;
};

// L2 prefetch: Vector cores read what the first t.prefetch waves of blocks need, each part once and in the order in which
// it is needed, and drop it. What the Cube cores then load is in L2, or on its way there.
template <class T, AiCore Core>
void Prefetch(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  const auto lanes = static_cast<std::int64_t>(core.vectors().size());
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    auto& vector = core.vectors()[static_cast<std::size_t>(lane)];
    using Vector = std::remove_cvref_t<decltype(vector)>;
    AheadReader<T, Vector> reader(vector, t, core.index() * lanes + lane, core.count() * lanes);
    FirstNeeds needs(t, core.count());
    for (std::int64_t wave = 0; wave < t.prefetch; ++wave) {
      needs.NextWave();
      vector.Spend(core.count() * FirstNeeds::kSteps);
      const auto row = [&](std::int64_t i, Range k) {
        return g.a.At({}).plain.Block(Split(g.c->sizes[2], t.m)[needs.rows[static_cast<std::size_t>(i)]], k);
      };
      const auto col = [&](std::int64_t i, Range k) {
        return g.b.At({}).plain.Block(k, Split(g.c->sizes[3], t.n)[needs.cols[static_cast<std::size_t>(i)]]);
      };
      // A packed B is left in L2 by the phase before.
      reader.Read(g.k, std::ssize(needs.rows), t.m, row, g.b.is_packed() ? 0 : std::ssize(needs.cols), col);
    }
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_PREFETCH_KERNEL_H_
