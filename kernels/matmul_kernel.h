// The matmul algorithm: C = A B (+ bias), block by block. Transposes are in the operands' strides.
//
// MultiplyBlock is the part that every kernel of the family shares: one block of C, left in L0C.
#ifndef CUBIST_KERNELS_MATMUL_KERNEL_H_
#define CUBIST_KERNELS_MATMUL_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/epilogue_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// The rings of a Cube core that multiplies blocks of up to (t.m, t.n).
template <class T>
struct MatmulRings {
  template <CubeCore Core>
  MatmulRings(Core& core, const MatmulTiling& t, bool with_bias, std::int64_t k = 0)
      : a_l1(core, "a_l1", t.m, t.k1, t.a_stages(k), Role::kA),
        b_l1(core, "b_l1", t.k1, t.n, t.l1_stages, t.b_once ? Role::kBOnce : Role::kB),
        a_l0(core, "a_l0", t.m, t.k0, t.l0_stages, Role::kA),
        b_l0(core, "b_l0", t.k0, t.n, t.l0_stages, Role::kB),
        c_l0(core, "c_l0", t.m, t.n, t.l0c_stages, Role::kRelay),
        bias_bt(core, "bias_bt", 1, with_bias ? t.n : 1, 1) {}

  std::vector<L1Tile<T>> a_kept;  // Of a block that keeps A: its tiles, by their step along k.
  Ring<Buffer::kL1, T> a_l1, b_l1;
  Ring<Buffer::kL0A, T> a_l0;
  Ring<Buffer::kL0B, T> b_l0;
  Ring<Buffer::kL0C, float> c_l0;
  Ring<Buffer::kBT, float> bias_bt;
};

// What one block of C, (m, n), is made of: all of k.
struct MatmulBlock {
  Operand a;  // (m, k)
  Operand b;  // (k, n)
  Gm bias;    // (1, n), added to every row; without a tensor there is none.
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t first_step =
      0;                  // of k, in steps of t.k1: where the walk along k begins. It ends in front of it.
  bool a_stands = false;  // Its rows of A are in rings.a_kept: those of the block before.
};

// a * b + bias in an accumulator that stays in L0C for all of k, in steps of t.k1 from GM to L1 and of t.k0 from
// L1 to L0. An empty k is walked as one empty step, which starts the accumulator.
//
// Two-level pipelining: a tile comes into L1 in pieces of t.piece() along k, so that L0 and the Cube go on with the
// first piece while the others are under way.
template <class T, CubeCore Core>
L0CTile<float> MultiplyBlock(Core& core, MatmulRings<T>& rings, const MatmulBlock& block,
                             const MatmulTiling& t) {
  const bool with_bias = block.bias.tensor != nullptr;
  const L0CTile<float> acc = rings.c_l0.Next(block.m, block.n);
  const BtTile<float> bias = rings.bias_bt.Next(1, with_bias ? block.n : 1);
  if (with_bias) core.Load(bias, block.bias);

  const Split steps = AtLeastOnce(Split(block.k, t.k1));
  if (t.keep_a) rings.a_kept.resize(static_cast<std::size_t>(steps.count()));
  for (std::int64_t i = 0; i < steps.count(); ++i) {
    const std::int64_t step = (block.first_step + i) % steps.count();
    const Range k1 = steps[step];
    const auto kept = static_cast<std::size_t>(step);
    const L1Tile<T> a1 = block.a_stands ? rings.a_kept[kept] : rings.a_l1.Next(block.m, k1.size());
    if (t.keep_a) rings.a_kept[kept] = a1;
    const L1Tile<T> b1 = rings.b_l1.Next(k1.size(), block.n);
    for (const Range piece : AtLeastOnce(Split(k1.size(), t.piece()))) {
      const Range k{k1.begin + piece.begin, k1.begin + piece.end};
      if (!block.a_stands) LoadOperand(core, a1.Cols(piece), block.a.Block({0, block.m}, k));
      LoadOperand(core, b1.Rows(piece), block.b.Block(k, {0, block.n}));
    }

    for (const Range k0 : AtLeastOnce(Split(k1.size(), t.k0))) {
      const L0ATile<T> a0 = rings.a_l0.Next(block.m, k0.size());
      const L0BTile<T> b0 = rings.b_l0.Next(k0.size(), block.n);
      core.Load(a0, a1.Cols(k0));
      core.Load(b0, b1.Rows(k0));

      const bool first = i == 0 && k0.begin == 0;
      if (first && with_bias) {
        core.Mmad(acc, a0, b0, bias);
      } else {
        core.Mmad(acc, a0, b0, first ? Accumulate::kNo : Accumulate::kYes);
      }
    }
  }
  return acc;
}

// One product, or one for every matrix of c (b0, b1, M, N).
struct MatmulOperands {
  OperandStack a, b;                    // (M, K), (K, N)
  const GmTensor* bias = nullptr;       // (N), added in L0C,
  const GmTensor* late_bias = nullptr;  // or by a Vector core.
  const GmTensor* residual = nullptr;   // (b0, b1, M, N), or 1 for b0 or b1
  const GmTensor* c = nullptr;
  const GmTensor* parts = nullptr;  // (splits, b0 * b1, M, N), where k is split
  std::int64_t k = 0;
  Epilogue epilogue;

  std::int64_t batches() const { return c->sizes[0] * c->sizes[1]; }
  MatmulBlock Block(std::int64_t batch, Range m, Range n, Range k_part) const {
    const std::int64_t i = batch / c->sizes[1], j = batch % c->sizes[1];
    return {a.At(i, j).Block(m, k_part),
            b.At(i, j).Block(k_part, n),
            bias == nullptr ? Gm() : MatrixOf(*bias).Cols(n),
            m.size(),
            n.size(),
            k_part.size()};
  }
  EpilogueBlock Target(std::int64_t batch, Range m, Range n) const {
    const std::int64_t i = batch / c->sizes[1], j = batch % c->sizes[1];
    EpilogueBlock block;
    block.c = MatrixOf(*c, i, j).Block(m, n);
    if (late_bias != nullptr) block.bias = MatrixOf(*late_bias).Cols(n);
    if (residual != nullptr) {
      block.residual =
          MatrixOf(*residual, residual->sizes[0] == 1 ? 0 : i, residual->sizes[1] == 1 ? 0 : j).Block(m, n);
    }
    return block;
  }
};

// The tasks of core `index` of `cores`, in its order: every cores-th, or a run of neighbours. Where A is kept, the run is
// one row of blocks after the other; each core begins a row at a place of its own, so that they do not queue for the same
// lines of B.
class CoreTasks {
 public:
  CoreTasks(const MatmulTiling& t, std::int64_t tasks, std::int64_t index, std::int64_t cores)
      : in_runs_(t.in_runs || t.keep_a),
        turned_(t.keep_a),
        cols_(std::max<std::int64_t>(t.grid.cols, 1)),
        index_(index),
        cores_(cores) {
    const std::int64_t share = tasks / cores, rest = tasks % cores;
    begin_ = in_runs_ ? index * share + std::min(index, rest) : index;
    count_ = share + (index < rest ? 1 : 0);
  }
  std::int64_t count() const { return count_; }
  std::int64_t operator[](std::int64_t i) const {
    if (!in_runs_) return begin_ + i * cores_;
    if (!turned_) return begin_ + i;
    const std::int64_t at = begin_ + i, end = begin_ + count_;
    const std::int64_t row = std::max(begin_, at / cols_ * cols_),
                       length = std::min(end, (at / cols_ + 1) * cols_) - row;
    return row + (at - row + length * index_ / cores_) % length;
  }

 private:
  bool in_runs_, turned_;
  std::int64_t cols_, index_, cores_, begin_ = 0, count_ = 0;
};

// The rows and columns of blocks of one wave after the other, each in the first that needs it.
class FirstNeeds {
 public:
  FirstNeeds(const MatmulTiling& t, std::int64_t cores) : tiling_(t), cores_(cores) {}

  void NextWave() {
    rows.clear(), cols.clear();
    for (std::int64_t core = 0; core < cores_; ++core) {
      const CoreTasks tasks(tiling_, tiling_.grid.count(), core, cores_);
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
    AheadReader<T, Vector> a(vector, "a_ahead", t.m, t.k1),
        b(vector, "b_ahead", t.b_turned ? t.n : t.k1, t.b_turned ? t.k1 : t.n);
    const std::int64_t mine = core.index() * lanes + lane, all = core.count() * lanes;
    std::int64_t piece = 0;
    FirstNeeds needs(t, core.count());
    for (std::int64_t wave = 0; wave < t.prefetch; ++wave) {
      needs.NextWave();
      for (const Range k1 : Split(g.k, t.k1)) {
        for (const std::int64_t row : needs.rows)
          a.Read(g.a.At(0, 0).plain.Block(Split(g.c->sizes[2], t.m)[row], k1), mine, all, &piece);
        for (const std::int64_t col : needs.cols) {
          const Gm of_b = g.b.At(0, 0).plain.Block(k1, Split(g.c->sizes[3], t.n)[col]);
          b.Read(t.b_turned ? of_b.Transposed() : of_b, mine, all, &piece);
        }
      }
    }
  }
}

// Each core takes blocks of C in the order of the tiling. C is written once, A is read ceil(N / t.n) times, or by each core
// that has blocks of its rows where it is kept, and B ceil(M / t.m) times. Where k is split, every block is as many, each a
// part of the sum, to be added by AddParts.
template <class T, AiCore Core>
void MatmulKernel(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  MatmulRings<T> rings(core, t, g.bias != nullptr, g.k);
  if (t.prefetch > 0) Prefetch<T>(core, g, t);
  const Epilogue plain;
  EpilogueStage<Core> stage(core, t, t.splits > 1 ? plain : g.epilogue);
  const std::int64_t blocks = t.grid.count();
  const CoreTasks tasks(t, t.tasks(g.batches()), core.index(), core.count());
  std::pair<std::int64_t, std::int64_t> rows_in_l1{-1, -1};  // of which matrix
  for (std::int64_t i = 0; i < tasks.count(); ++i) {
    const std::int64_t task = tasks[i];
    const BlockCoord block = t.grid.At(task % blocks);
    const std::int64_t split = task / blocks % t.splits, batch = task / blocks / t.splits;
    const Range m = Split(g.c->sizes[2], t.m)[block.row], n = Split(g.c->sizes[3], t.n)[block.col];
    const Range k = t.splits > 1 ? Split(g.k, t.part_k)[split] : Range{0, g.k};
    MatmulBlock product = g.Block(batch, m, n, k);
    // K-staggering: blocks that run side by side read A and B at different places. The start comes from the block, not
    // from the core, so that the bits stay.
    if (t.stagger) product.first_step = (block.row + block.col) % AtLeastOnce(Split(g.k, t.k1)).count();
    const std::pair<std::int64_t, std::int64_t> rows{batch, block.row};
    product.a_stands = t.keep_a && std::exchange(rows_in_l1, rows) == rows;
    const EpilogueBlock target = t.splits > 1
                                     ? EpilogueBlock{MatrixOf(*g.parts, split, batch).Block(m, n), {}, {}}
                                     : g.Target(batch, m, n);
    stage.Store(MultiplyBlock(core, rings, product, t), target);
  }
}

// C = what the epilogue makes of the parts' sum, in ascending order.
template <VectorCore Core>
void AddParts(Core& core, const MatmulOperands& g, const MatmulTiling& t) {
  EpilogueLane<Core> lane(core, t, g.epilogue);
  Ring<Buffer::kUB, float> part_ub(core, "part_ub", t.ub_rows, t.n, t.ub_stages);
  const BlockGrid strips{CeilDiv(g.c->sizes[2], t.ub_rows), t.grid.cols};
  const std::int64_t tasks = g.batches() * strips.count();
  for (std::int64_t task = core.index(); task < tasks; task += core.count()) {
    const BlockCoord at = strips.At(task % strips.count());
    const std::int64_t batch = task / strips.count();
    const Range m = Split(g.c->sizes[2], t.ub_rows)[at.row], n = Split(g.c->sizes[3], t.n)[at.col];
    const UbTile<float> sum = lane.x_ub.Next(m.size(), n.size());
    core.Load(sum, MatrixOf(*g.parts, 0, batch).Block(m, n));
    for (std::int64_t split = 1; split < t.splits; ++split) {
      const UbTile<float> part = part_ub.Next(m.size(), n.size());
      core.Load(part, MatrixOf(*g.parts, split, batch).Block(m, n));
      core.Add(sum, sum, part);
    }
    const EpilogueBlock target = g.Target(batch, m, n);
    lane.LoadBias(target.bias);
    lane.Finish(sum, target);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_KERNEL_H_
