// The grouped matmul algorithm: the blocks of every group's product, dealt evenly to the cores.
#ifndef CUBIST_KERNELS_GROUPED_MATMUL_KERNEL_H_
#define CUBIST_KERNELS_GROUPED_MATMUL_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/epilogue_kernel.h"
#include "kernels/group_order_kernel.h"
#include "kernels/grouped_prefetch_kernel.h"
#include "kernels/multiply_block_kernel.h"
#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/grouped_matmul_tiling.h"

namespace cubist {

// One matrix per group: those of one tensor (1, E, rows, cols), or each a tensor of its own.
struct GroupedMatrices {
  const GmTensor* all = nullptr;
  std::span<const GmTensor* const> each;

  Gm Of(std::int64_t group) const {
    return all != nullptr ? MatrixOf(*all, 0, group) : MatrixOf(*each[static_cast<std::size_t>(group)]);
  }
};

struct GroupedMatmulOperands {
  GroupRows groups;
  Operand x;                            // (M, K)
  GroupedMatrices weights;              // (K, N), or
  PackedGm packed_weights;              // packed, with a tensor,
  const GmTensor* bias = nullptr;       // (E, N)
  const GmTensor* late_bias = nullptr;  // The same, where a Vector core adds it.
  Gm residual;                          // (M, N), or without a tensor
  Gm out;                               // (M, N)
  std::int64_t k = 0;
  Epilogue epilogue, sum_epilogue;  // the second of sums in parts

  EpilogueBlock Target(std::int64_t group, Range m, Range n) const {
    EpilogueBlock block;
    block.c = out.Block(m, n);
    if (late_bias != nullptr) block.bias = MatrixOf(*late_bias).Block({group, group + 1}, n);
    if (residual.tensor != nullptr) block.residual = residual.Block(m, n);
    return block;
  }
  Operand WeightsOf(std::int64_t group, Range n) const {
    if (packed_weights.tensor != nullptr) return {{}, packed_weights.Matrix(group).Block({0, k}, n), true};
    return {weights.Of(group).Cols(n), {}, false};
  }
};

// What blocks of one tiling go through, from GM to GM.
template <class T, AiCore Core>
class GroupPipeline {
 public:
  GroupPipeline(Core& core, const MatmulTiling& t, bool with_bias, const Epilogue& epilogue,
                const Epilogue& sum_epilogue, bool cuts_k)
      : core_(core), tiling_(t), rings_(core, t, with_bias), stage_(core, t, epilogue) {
    if (cuts_k) sum_stage_.emplace(core, t, sum_epilogue, kMostHostParts);
  }

  // finished(part, cols) takes the block's sums.
  template <class Finished>
  void Multiply(const MatmulBlock& block, Finished&& finished) {
    MultiplyBlock<T>(core_, rings_, block, tiling_, finished);
  }

  // The block's sum over k, in parts where it is cut; without its bias then, which the target has.
  void Store(const MatmulBlock& block, const KParts& parts, const EpilogueBlock& target) {
    if (parts.count == 1) {
      return Multiply(block, [&](L0CTile<float> acc, Range cols) { stage_.Store(acc, target.Cols(cols)); });
    }
    std::array<HandOverTile<float>, kMostHostParts> sent;
    const Split k(block.k, parts.length);
    for (std::int64_t i = 0; i < k.count(); ++i) {
      HandOverTile<float>& part = sent[static_cast<std::size_t>(i)];
      part = sum_stage_->NextPart(block.m, block.n);
      Multiply(block.Part(k[i]), [&](L0CTile<float> acc, Range cols) { core_.Send(part.Cols(cols), acc); });
    }
    sum_stage_->StoreSum(std::span(sent).first(static_cast<std::size_t>(k.count())), target);
  }

 private:
  Core& core_;
  const MatmulTiling& tiling_;
  MatmulRings<T> rings_;
  EpilogueStage<Core> stage_;
  std::optional<EpilogueStage<Core>> sum_stage_;
};

// out = x w_g + bias_g for the rows of each group, as the epilogue has it; 0 after the last: a product with an empty k. A
// group's rows are cut evenly; its blocks go down the rows, so that a panel of weights is read while it is near.
template <class T, AiCore Core>
void GroupedMatmulKernel(Core& core, const GroupedMatmulOperands& g, const GroupedTilings& tilings) {
  const GroupedMatmulTiling& t = TilingFor(core, g.groups, tilings);
  GroupPipeline<T, Core> many(core, t.block, g.bias != nullptr, g.epilogue, g.sum_epilogue, t.cuts_k);
  std::array<std::optional<GroupPipeline<T, Core>>, std::tuple_size_v<decltype(t.few)>> few;
  for (std::size_t i = 0; i < few.size(); ++i) {
    if (t.few[i].rows == 0) continue;
    few[i].emplace(core, t.few[i].block, g.bias != nullptr, g.epilogue, g.sum_epilogue, t.cuts_k);
  }
  const std::int64_t groups = g.groups.groups();
  const auto few_of = [&](std::int64_t group, Range rows) {  // few.size(): none
    std::size_t i = group < groups ? 0 : few.size();
    while (i < few.size() && rows.size() > t.few[i].rows) ++i;
    return i;
  };
  const auto rows_of_block = [&](Range rows) {
    return RoundUp(EvenShare(rows.size(), t.block.m), t.row_step);
  };
  const auto blocks_of = [&](std::int64_t group, Range rows) -> GroupBlocks {
    if (rows.empty()) return {};
    if (const std::size_t i = few_of(group, rows); i < few.size()) {
      const std::int64_t n = t.few[i].block.n;
      return {{CeilDiv(g.out.cols, n), 1}, (rows.size() + t.fixed_work) * n / t.block.n + 1};
    }
    const std::int64_t step = rows_of_block(rows);
    // By columns of blocks: the grid is transposed.
    const BlockGrid grid{CeilDiv(g.out.cols, t.block.n), CeilDiv(rows.size(), step)};
    return {grid, group < groups ? step + t.fixed_work + t.column_work / grid.cols : 1,
            group < groups ? t.read_work : 0, t.block.prefetch};
  };
  std::vector<GroupVisit> visits;
  std::optional<GroupPrefetch<T, Core>> ahead;
  if (t.block.prefetch > 0) {
    visits = Alternating(core, g.groups, blocks_of);
    ahead.emplace(core, t.block);
    ForAhead(core, {g.groups, visits}, blocks_of, t.block.prefetch, [&](const AheadWave& wave) {
      const Range cols{wave.cols.begin * t.block.n, std::min(wave.cols.end * t.block.n, g.out.cols)};
      ahead->Add(wave.at, wave.cols.begin == 0 ? g.x.plain.Rows(wave.rows) : Gm(),
                 g.weights.Of(wave.group).Cols(cols));
    });
  }
  const GroupOrder order{g.groups, visits};
  ForMyGroupBlocks(core, order, t.dealing, blocks_of, [&](const GroupBlock& mine) {
    const auto& [group, rows, at, middle] = mine;
    const std::size_t i = few_of(group, rows);
    const bool is_few = i < few.size();
    const Range m = is_few ? rows : Split(rows, rows_of_block(rows))[at.col],
                n = Split(g.out.cols, is_few ? t.few[i].block.n : t.block.n)[at.row];
    GroupPipeline<T, Core>& pipeline = is_few ? *few[i] : many;
    const Gm out = g.out.Block(m, n);
    if (ahead) ahead->At(middle, out);
    MatmulBlock block;
    block.m = m.size(), block.n = n.size();
    if (group == groups) {
      block.a = g.x.Block(m, {0, 0});
      block.b.plain = {g.x.plain.tensor, 0, 0, n.size()};  // Of no row.
      pipeline.Multiply(block, [&](L0CTile<float> acc, Range cols) { core.Store(out.Cols(cols), acc); });
      return;
    }
    block.k = g.k;
    block.a = g.x.Block(m, {0, g.k});
    block.b = g.WeightsOf(group, n);
    if (g.bias != nullptr) block.bias = MatrixOf(*g.bias).Block({group, group + 1}, n);
    pipeline.Store(block, t.PartsOf(rows.size(), g.out.cols, g.k), g.Target(group, m, n));
  });
  if (ahead) ahead->Finish();
}

struct GroupedGradWeightsOperands {
  GroupRows groups;
  Gm x, dy;            // (M, K), (M, N)
  GroupedMatrices dw;  // (K, N)
  Accumulate accumulate = Accumulate::kNo;
  std::int64_t k = 0, n = 0;
  Epilogue epilogue, sum_epilogue;

  EpilogueBlock Target(std::int64_t group, Range m, Range n_block) const {
    const Gm block = dw.Of(group).Block(m, n_block);
    return {block, {}, accumulate == Accumulate::kYes ? block : Gm()};
  }
};

// dw_g (+)= x_g^T dy_g. An empty group is written as a product with an empty sum, unless it is accumulated onto.
template <class T, CubeCore Core>
void GroupedGradWeightsKernel(Core& core, const GroupedGradWeightsOperands& g,
                              const GroupedTilings& tilings) {
  const GroupedMatmulTiling& t = TilingFor(core, g.groups, tilings);
  GroupPipeline<T, Core> pipeline(core, t.block, /*with_bias=*/false, g.epilogue, g.sum_epilogue, t.cuts_k);
  const auto blocks_of = [&](std::int64_t group, Range rows) -> GroupBlocks {
    if (group == g.groups.groups() || (rows.empty() && g.accumulate == Accumulate::kYes)) return {};
    return {{CeilDiv(g.k, t.block.m), CeilDiv(g.n, t.block.n)}, rows.size() + t.fixed_work + 1};
  };
  const GroupOrder order{g.groups};
  ForMyGroupBlocks(core, order, t.dealing, blocks_of, [&](const GroupBlock& mine) {
    const auto& [group, rows, at, middle] = mine;
    const Range m = Split(g.k, t.block.m)[at.row], n = Split(g.n, t.block.n)[at.col];
    MatmulBlock block;
    block.m = m.size(), block.n = n.size(), block.k = rows.size();
    block.a.plain = g.x.Block(rows, m).Transposed();
    block.b.plain = g.dy.Block(rows, n);
    pipeline.Store(block, t.PartsOf(g.k, g.n, rows.size()), g.Target(group, m, n));
  });
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUPED_MATMUL_KERNEL_H_
