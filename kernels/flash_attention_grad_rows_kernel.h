// The phases around the products of attention's backward pass, on Vector cores: what each query row needs before, and the
// sums of parts after.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_GRAD_ROWS_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_GRAD_ROWS_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/attention_scores_kernel.h"
#include "kernels/operand_kernel.h"
#include "kernels/rotate_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {

// The (b, n, s, d) tensors of a call, and what one phase leaves for the next.
struct FlashAttentionGradOperands : ScoreOperands {
  const GmTensor *q = nullptr, *q_rope = nullptr;
  const GmTensor *k = nullptr, *k_rope = nullptr, *v = nullptr;
  const GmTensor *k_finite = nullptr,
                 *k_rope_finite = nullptr;  // Where keys may be hidden: see FiniteRowsKernel.
  const GmTensor* k_rope_unseen = nullptr;  // What stands for keys that no query sees: those are not turned.
  const GmTensor *out = nullptr, *lse = nullptr, *dout = nullptr;  // lse: (b, head, Sq, 1)
  const GmTensor *dq = nullptr, *dq_rope = nullptr, *dk = nullptr, *dk_rope = nullptr, *dv = nullptr;
  const GmTensor *sinks = nullptr, *dsinks = nullptr;  // (1, 1, 1, head)
  const GmTensor* dbias = nullptr;                     // Its own sizes, 1 where it serves all.

  PackedGm q_packed, q_rope_packed, dout_packed;        // One matrix per (b, head), where t.pack_queries.
  const GmTensor *row_lse = nullptr, *delta = nullptr;  // (b, head, Sq, 1), fp32 like all that follow
  const GmTensor *dq_parts = nullptr, *dq_rope_parts = nullptr;  // (chunk, b * heads + head, Sq, d)
  // (b, KV head, Skv, d), of what the second phase does not finish.
  const GmTensor *dk_sums = nullptr, *dk_rope_sums = nullptr, *dv_sums = nullptr;
  // (part, b * heads + head, Sq, Skv) of dbias' sizes, all 0 before the second phase; null where every element of
  // dbias comes from one pair, and goes there at once.
  const GmTensor* dbias_parts = nullptr;

  // The first of the step's query rows among all rows of weights.
  std::int64_t DropoutRow(const FlashAttentionGradStep& step) const {
    return (step.sequence.batch * q->sizes[1] + step.h) * q->sizes[2] + step.QueryRows(step.queries).begin;
  }
  // The query rows of a head as the chosen tiling reads them, those of a block of the step.
  Operand QueriesOf(const GmTensor& plain, const PackedGm& packed, const FlashAttentionGradTiling& t,
                    const FlashAttentionGradStep& step, std::int64_t cols) const {
    const std::int64_t b = step.sequence.batch;
    if (!t.pack_queries) {
      return {MatrixOf(plain, b, step.h).Block(step.QueryRows(step.block), {0, cols}), {}, false};
    }
    const Range rows = step.block.From(-step.sequence.packed_begin);
    return {{}, packed.Matrix(b * plain.sizes[1] + step.h).Block(rows, {0, cols}), true};
  }
};

// Calls visit(sequence, head, rows of the sequence) for a core's share of all rows, `at_once` or fewer at a time: query
// rows of `heads` heads, or keys.
template <class Visit>
void ForEachShare(RoundRobin& share, const FlashAttentionGradSchedule& schedule, bool keys,
                  std::int64_t heads, std::int64_t at_once, Visit&& visit) {
  for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
    const AttentionSequence sequence = schedule.Sequence(i);
    const Split blocks(keys ? sequence.skv : sequence.sq, at_once);
    for (std::int64_t n = 0; n < heads; ++n) {
      share.ForMine(blocks.count(), [&](std::int64_t block) { visit(sequence, n, blocks[block]); });
    }
  }
}

// Before it, where rows may see no key at all: seen (b, n, s, d) = source with 0 for the rows whose lse is -inf. Their p and
// ds are 0, and 0 times what dout or q have there may be NaN.
struct SeenRows {
  const GmTensor *source = nullptr, *seen = nullptr;
};
template <VectorCore Core>
void SeenRowsKernel(Core& core, const GmTensor& lse, std::span<const SeenRows> list, std::int64_t most_rows) {
  constexpr std::int64_t kRows = 16;
  const std::int64_t at_once = std::min(kRows, most_rows);
  std::int64_t columns = 0;
  for (const SeenRows& rows : list) columns = std::max(columns, rows.source->sizes[3]);
  Ring<Buffer::kUB, float> x_ub(core, "seen_x_ub", at_once, columns, 2),
      key_ub(core, "seen_key_ub", at_once, columns, 1), zero_ub(core, "seen_zero_ub", at_once, columns, 1),
      lse_ub(core, "seen_lse_ub", at_once, 1, 2);
  const UbTile<float> zero = zero_ub.Next(at_once, columns);
  core.Fill(zero, 0.0f);
  const Split blocks(lse.sizes[2], at_once);
  for (std::int64_t task = core.index(); task < lse.sizes[0] * lse.sizes[1] * blocks.count();
       task += core.count()) {
    const std::int64_t matrix = task / blocks.count(), b = matrix / lse.sizes[1], n = matrix % lse.sizes[1];
    const Range rows = blocks[task % blocks.count()];
    const UbTile<float> row_lse = lse_ub.Next(rows.size(), 1);
    core.Load(row_lse, MatrixOf(lse, b, n).Rows(rows));
    for (const auto& [source, seen] : list) {
      const Range cols{0, source->sizes[3]};
      if (cols.empty()) continue;
      const UbTile<float> x = x_ub.Next(rows.size(), cols.size()),
                          key = key_ub.Next(rows.size(), cols.size());
      core.Load(x, MatrixOf(*source, b, n).Rows(rows));
      core.Fill(key, 0.0f);
      core.Add(key, key, row_lse);
      core.SelectLe(x, key, std::numeric_limits<float>::lowest(), zero.Part({0, rows.size()}, cols), x);
      core.Store(MatrixOf(*seen, b, n).Rows(rows), x);
    }
  }
}

// First phase, on Vector cores, `rows_at_once` rows of a head at a time: what a query row needs beside its scores.
//   delta = sum of dO * O over the row;   row_lse = lse, but the lowest finite float for a row that sees no key,
// so that exp(-inf - row_lse) is 0 there and not NaN.
template <VectorCore Core>
void FlashAttentionGradRowsKernel(Core& core, const FlashAttentionGradOperands& g,
                                  const FlashAttentionGradShape& s,
                                  const FlashAttentionGradSchedule& schedule, std::int64_t rows_at_once) {
  Ring<Buffer::kUB, float> out_ub(core, "out_ub", rows_at_once, s.d_v, 2);
  Ring<Buffer::kUB, float> dout_ub(core, "dout_ub", rows_at_once, s.d_v, 2);
  Ring<Buffer::kUB, float> delta_ub(core, "delta_ub", rows_at_once, 1, 2);
  Ring<Buffer::kUB, float> lse_ub(core, "lse_ub", rows_at_once, 1, 2);
  RoundRobin share(core.index(), core.count());
  ForEachShare(share, schedule, /*keys=*/false, s.heads, rows_at_once,
               [&](const AttentionSequence& sequence, std::int64_t h, Range some) {
                 const Range rows = some.From(-sequence.q_begin);
                 const std::int64_t b = sequence.batch;
                 const UbTile<float> lse = lse_ub.Next(rows.size(), 1);
                 core.Load(lse, MatrixOf(*g.lse, b, h).Rows(rows));
                 core.MaxScalar(lse, lse, std::numeric_limits<float>::lowest());
                 core.Store(MatrixOf(*g.row_lse, b, h).Rows(rows), lse);

                 const UbTile<float> out = out_ub.Next(rows.size(), s.d_v),
                                     dout = dout_ub.Next(rows.size(), s.d_v);
                 core.Load(out, MatrixOf(*g.out, b, h).Rows(rows));
                 core.Load(dout, MatrixOf(*g.dout, b, h).Rows(rows));
                 core.Mul(out, out, dout);
                 const UbTile<float> delta = delta_ub.Next(rows.size(), 1);
                 core.Fill(delta, 0.0f);  // Stays where Dv is 0.
                 core.RowSum(delta, out);
                 core.Store(MatrixOf(*g.delta, b, h).Rows(rows), delta);
               });
}

// In the same phase, where keys may be hidden: `parts` of finite (b, n, s, d) = source with 0 for what is no finite number,
// for dq alone. A hidden key has ds = 0, and 0 * NaN is NaN. A row that sees NaN or a score of +inf is NaN all the same, by its
// lse.
template <VectorCore Core>
void FiniteRowsKernel(Core& core, const GmTensor& source, const GmTensor& finite,
                      std::span<const RowsToTurn> parts, std::int64_t most_rows) {
  constexpr std::int64_t kRows = 16;  // They are walked several times, so few stay close.
  const std::int64_t cols = source.sizes[3], rows_at_once = std::min(kRows, most_rows);
  Ring<Buffer::kUB, float> x_ub(core, "finite_x_ub", rows_at_once, cols, 2),
      size_ub(core, "finite_size_ub", rows_at_once, cols, 1),
      zero_ub(core, "finite_zero_ub", rows_at_once, 1, 1);
  const UbTile<float> zero = zero_ub.Next(rows_at_once, 1);
  core.Fill(zero, 0.0f);
  RoundRobin tasks(core.index(), core.count());
  for (const RowsToTurn& part : parts) {
    const Split blocks(part.rows, rows_at_once);
    for (std::int64_t n = 0; n < source.sizes[1]; ++n) {
      tasks.ForMine(blocks.count(), [&](std::int64_t block) {
        const Range rows = blocks[block];
        const UbTile<float> x = x_ub.Next(rows.size(), cols), size = size_ub.Next(rows.size(), cols);
        core.Load(x, MatrixOf(source, part.batch, n).Rows(rows));
        core.Abs(size, x);
        core.SelectLe(x, size, std::numeric_limits<float>::max(), x, zero.Rows({0, rows.size()}));
        core.Store(MatrixOf(finite, part.batch, n).Rows(rows), x);
      });
    }
  }
}

// In the last phase, on Vector cores, a head at a time: dsink = - sum over all rows of exp(sink - lse) * delta.
template <VectorCore Core>
void FlashAttentionGradSinksKernel(Core& core, const FlashAttentionGradOperands& g,
                                   const FlashAttentionGradShape& s,
                                   const FlashAttentionGradSchedule& schedule, std::int64_t rows_at_once,
                                   RoundRobin& share) {
  Ring<Buffer::kUB, float> sinks_ub(core, "sinks_ub", 1, s.heads, 1), sum_ub(core, "sum_ub", 1, 1, 2);
  Ring<Buffer::kUB, float> lse_ub(core, "lse_ub", 1, rows_at_once, 2),
      delta_ub(core, "delta_ub", 1, rows_at_once, 2), scratch_ub(core, "scratch_ub", 1, rows_at_once, 1);
  const UbTile<float> sinks = sinks_ub.Next(1, s.heads);
  core.Load(sinks, MatrixOf(*g.sinks));
  share.ForMine(s.heads, [&](std::int64_t h) {
    const float sink = core.ReadScalar(sinks, h);
    const UbTile<float> sum = sum_ub.Next(1, 1);
    core.Fill(sum, 0.0f);
    for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
      const AttentionSequence sequence = schedule.Sequence(i);
      for (const Range some : Split(sequence.sq, rows_at_once)) {
        const Range rows = some.From(-sequence.q_begin);
        const UbTile<float> weight = lse_ub.Next(1, rows.size()), delta = delta_ub.Next(1, rows.size());
        core.Load(weight, MatrixOf(*g.row_lse, sequence.batch, h).Rows(rows).Transposed());
        core.Load(delta, MatrixOf(*g.delta, sequence.batch, h).Rows(rows).Transposed());
        core.MulScalar(weight, weight, -1.0f);
        core.AddScalar(weight, weight, sink);
        core.Exp(weight, weight);
        core.AddDot(sum, scratch_ub.Next(1, rows.size()), weight, delta);
      }
    }
    core.MulScalar(sum, sum, -1.0f);
    core.Store(MatrixOf(*g.dsinks).Cols({h, h + 1}), sum);
  });
}

// All elements of `x` 0.
template <VectorCore Core>
void FillZeroKernel(Core& core, const GmTensor& x, std::int64_t rows_at_once, std::int64_t cols_at_once) {
  Ring<Buffer::kUB, float> zero_ub(core, "zero_ub", rows_at_once, cols_at_once, 1);
  RoundRobin share(core.index(), core.count());
  const Split blocks(x.sizes[2], rows_at_once);
  for (std::int64_t i = 0; i < x.sizes[0]; ++i) {
    for (std::int64_t j = 0; j < x.sizes[1]; ++j) {
      share.ForMine(blocks.count(), [&](std::int64_t block) {
        const Range rows = blocks[block];
        for (const Range cols : Split(x.sizes[3], cols_at_once)) {
          const UbTile<float> zero = zero_ub.Next(rows.size(), cols.size());
          core.Fill(zero, 0.0f);  // A store that narrows loses it.
          core.Store(MatrixOf(x, i, j).Block(rows, cols), zero);
        }
      });
    }
  }
}

// In the last phase, on Vector cores: a gradient as the sum of its parts, in their order, times `scale`, and where its
// rows were turned to their positions turned back.
struct FlashAttentionGradSum {
  const GmTensor* gradient = nullptr;  // (b, n, s, d)
  const GmTensor* parts = nullptr;
  float scale = 1;
  enum class Of { kOne, kHeads, kChunks } of = Of::kOne;
  bool keys = true;  // Rows are keys, else queries.
  RotateOperands rotate = {};

  std::int64_t count(const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t) const {
    return of == Of::kChunks ? t.chunks : of == Of::kHeads ? s.kv_heads : 1;
  }
  bool turned() const { return rotate.cos != nullptr; }
  std::int64_t ub_cols() const { return turned() ? rotate.ub_cols() : gradient->sizes[3]; }
  // Calls visit(columns in GM, the same in UB) for the runs of a row.
  template <class Visit>
  void ForEachRun(Visit&& visit) const {
    if (turned()) return rotate.ForEachRun(visit);
    visit(Range{0, ub_cols()}, Range{0, ub_cols()});
  }
  Gm Part(std::int64_t b, std::int64_t n, std::int64_t part) const {
    if (of == Of::kChunks) return MatrixOf(*parts, part, b * gradient->sizes[1] + n);
    return MatrixOf(*parts, b, of == Of::kHeads ? part : n);
  }
  // Visits the rows of `rows` that a part has, in ranges. A chunk has those that see any of its blocks of keys.
  template <class Visit>
  void ForEachRange(const FlashAttentionGradSchedule& schedule, const FlashAttentionGradTiling& t,
                    const AttentionSequence& sequence, std::int64_t part, Range rows, Visit&& visit) const {
    if (of != Of::kChunks) return visit(rows);
    const Split blocks = schedule.KeyBlocks(sequence);
    std::int64_t done = rows.begin;
    for (std::int64_t block = part; block < blocks.count() && done < rows.end; block += t.chunks) {
      const Range seeing = schedule.Seeing(sequence, blocks[block]);
      const Range has{std::max(seeing.begin, done), std::min(seeing.end, rows.end)};
      if (has.empty()) continue;
      visit(has);
      done = has.end;
    }
  }
};

inline std::int64_t MostColumns(std::span<const FlashAttentionGradSum> sums) {
  std::int64_t columns = 0;
  for (const FlashAttentionGradSum& sum : sums) columns = std::max(columns, sum.ub_cols());
  return columns;
}
// How rows are turned back, if any are: all have the same number of pairs.
inline RotateOperands OfTurned(std::span<const FlashAttentionGradSum> sums) {
  for (const FlashAttentionGradSum& sum : sums) {
    if (sum.turned()) return sum.rotate;
  }
  return {};
}
// What all tiles ask for, as that many columns of a sum and a part, which have half of UB. A Rotator adds ten tiles to their
// four, in seven eighths of it: FlashAttentionGradSinksKernel is beside them.
inline std::int64_t ColumnsOfSums(std::span<const FlashAttentionGradSum> sums) {
  const std::int64_t columns = MostColumns(sums);
  const RotateOperands turned = OfTurned(sums);
  if (turned.cos == nullptr) return columns;
  return std::max(columns, CeilDiv(4 * columns + 10 * RoundUp(turned.ub_cols(), kBlockWords), 7));
}

// All of them, one after the other, `rows_at_once` rows at a time: a phase for each would wait for its slowest core and for
// its first loads.
template <VectorCore Core>
class FlashAttentionGradSums {
 public:
  using Sum = FlashAttentionGradSum;

  FlashAttentionGradSums(Core& core, std::span<const Sum> sums, const FlashAttentionGradShape& s,
                         const FlashAttentionGradTiling& t, const FlashAttentionGradSchedule& schedule,
                         std::int64_t rows_at_once)
      : core_(core),
        sums_(sums),
        s_(s),
        t_(t),
        schedule_(schedule),
        rows_at_once_(rows_at_once),
        sum_ub_(core, "sum_ub", rows_at_once, MostColumns(sums), 2),
        part_ub_(core, "part_ub", rows_at_once, MostColumns(sums), 2),
        rotator_(core, OfTurned(sums), rows_at_once, /*loads=*/false) {}

  void Run(RoundRobin& share) {
    for (const Sum& sum : sums_) {
      ForEachShare(share, schedule_, sum.keys, sum.gradient->sizes[1], rows_at_once_,
                   [&](const AttentionSequence& sequence, std::int64_t n, Range some) {
                     Finish(sum, sequence, n, some);
                   });
    }
  }

 private:
  static std::int64_t FirstRow(const Sum& sum, const AttentionSequence& x) {
    return sum.keys ? x.kv_begin : x.q_begin;
  }

  void AddUp(const Sum& sum, UbTile<float> total, const AttentionSequence& sequence, std::int64_t n,
             Range some, Range cols) {
    bool started = false;
    for (std::int64_t i = 0; i < sum.count(s_, t_); ++i) {
      sum.ForEachRange(schedule_, t_, sequence, i, some, [&](Range has) {
        const Gm from = sum.Part(sequence.batch, n, i).Block(has.From(-FirstRow(sum, sequence)), cols);
        if (!started && has == some) {
          core_.Load(total, from);
        } else {
          if (!started) core_.Fill(total, 0.0f);
          const UbTile<float> part = part_ub_.Next(has.size(), cols.size());
          const UbTile<float> to = total.Rows(has.From(some.begin));
          core_.Load(part, from);
          core_.Add(to, to, part);
        }
        started = true;
      });
    }
    if (!started) core_.Fill(total, 0.0f);
    core_.MulScalar(total, total, sum.scale);
  }

  void Finish(const Sum& sum, const AttentionSequence& sequence, std::int64_t n, Range some) {
    const std::int64_t first = FirstRow(sum, sequence), b = sequence.batch;
    const UbTile<float> total = sum_ub_.Next(some.size(), sum.ub_cols());
    sum.ForEachRun([&](Range cols, Range in_ub) { AddUp(sum, total.Cols(in_ub), sequence, n, some, cols); });
    const Gm gradient = MatrixOf(*sum.gradient, b, n).Rows(some.From(-first));
    if (!sum.turned()) return core_.Store(gradient, total);
    const RotateOperands& g = sum.rotate;
    rotator_.Turn(g, total, rotator_.Load(g, g.At(b, some, first), some.size()));
    rotator_.Store(g, gradient, total);
  }

  Core& core_;
  std::span<const Sum> sums_;
  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  const FlashAttentionGradSchedule& schedule_;
  const std::int64_t rows_at_once_;
  Ring<Buffer::kUB, float> sum_ub_, part_ub_;
  Rotator<float, Core> rotator_;
};

// dbias from its parts, in their order.
template <VectorCore Core>
void FlashAttentionGradBiasKernel(Core& core, const GmTensor& parts, const GmTensor& dbias,
                                  std::int64_t rows_at_once, std::int64_t cols_at_once) {
  Ring<Buffer::kUB, float> sum_ub(core, "sum_ub", rows_at_once, cols_at_once, 2);
  Ring<Buffer::kUB, float> part_ub(core, "part_ub", rows_at_once, cols_at_once, 2);
  RoundRobin share(core.index(), core.count());
  for (std::int64_t matrix = 0; matrix < parts.sizes[1]; ++matrix) {
    const Gm to = MatrixOf(dbias, matrix / dbias.sizes[1], matrix % dbias.sizes[1]);
    const Split blocks(to.rows, rows_at_once);
    share.ForMine(blocks.count(), [&](std::int64_t block) {
      const Range rows = blocks[block];
      for (const Range cols : Split(to.cols, cols_at_once)) {
        const UbTile<float> sum = sum_ub.Next(rows.size(), cols.size());
        core.Load(sum, MatrixOf(parts, 0, matrix).Block(rows, cols));
        for (std::int64_t i = 1; i < parts.sizes[0]; ++i) {
          const UbTile<float> part = part_ub.Next(rows.size(), cols.size());
          core.Load(part, MatrixOf(parts, i, matrix).Block(rows, cols));
          core.Add(sum, sum, part);
        }
        core.Store(to.Block(rows, cols), sum);
      }
    });
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_ROWS_KERNEL_H_
