// What becomes of a finished block of C on its way to GM: FIX alone, or Vector cores.
#ifndef CUBIST_KERNELS_EPILOGUE_KERNEL_H_
#define CUBIST_KERNELS_EPILOGUE_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// How blocks of C are finished: by FIX, or where the shape says so by Vector cores.
struct Epilogue {
  EpilogueShape shape;
  FixOptions fix;
  EpilogueScalars scalars;
};

// Where a block goes, and what is added to it. Without a tensor: nothing.
struct EpilogueBlock {
  Gm c;         // (m, n)
  Gm bias;      // (1, n)
  Gm residual;  // (m, n)

  EpilogueBlock Rows(Range rows) const {
    return {c.Rows(rows), bias, residual.tensor == nullptr ? residual : residual.Rows(rows)};
  }
  EpilogueBlock Cols(Range cols) const {
    return {c.Cols(cols), bias.tensor == nullptr ? bias : bias.Cols(cols),
            residual.tensor == nullptr ? residual : residual.Cols(cols)};
  }
};

// A Vector core's part. A sum may come in several `parts`.
template <VectorCore V>
struct EpilogueLane {
  EpilogueLane(V& vector, const MatmulTiling& t, const Epilogue& e, std::int64_t parts = 1)
      : core(vector),
        epilogue(e),
        x_ub(core, "x_ub", t.ub_rows, t.n, t.ub_stages),
        residual_ub(core, "residual_ub", e.shape.residual ? t.ub_rows : 0, t.n, t.ub_stages, Role::kRelay),
        bias_ub(core, "bias_ub", e.shape.bias ? 1 : 0, t.n, 1),
        scratch_ub(core, "scratch_ub", e.shape.scratch > 0 ? t.ub_rows : 0, t.n,
                   std::max(e.shape.scratch, 1)),
        part_ub(core, "part_ub", parts > 1 ? t.ub_rows : 0, t.n, t.ub_stages) {}

  // The bias of all strips until the next.
  void LoadBias(const Gm& row) {
    if (!epilogue.shape.bias) return;
    bias = bias_ub.Next(1, row.cols);
    core.Load(bias, row);
  }
  // strip.c = what the epilogue makes of x.
  void Finish(UbTile<float> x, const EpilogueBlock& strip) {
    EpilogueTiles tiles{.x = x, .bias = bias, .residual = {}, .scratch = {}};
    if (epilogue.shape.residual) {
      tiles.residual = residual_ub.Next(x.rows(), x.cols());
      core.Load(tiles.residual, strip.residual);
    }
    for (int i = 0; i < epilogue.shape.scratch; ++i) {
      tiles.scratch[static_cast<std::size_t>(i)] = scratch_ub.Next(x.rows(), x.cols());
    }
    core.StoreActivated(strip.c, tiles, epilogue.scalars);
  }

  V& core;
  const Epilogue& epilogue;
  Ring<Buffer::kUB, float> x_ub, residual_ub, bias_ub, scratch_ub, part_ub;
  UbTile<float> bias;
};

// Blocks of an AI core. Those that Vector cores finish are sent at once, so that L0C is free again; each Vector core
// takes its rows in strips. A block may be the sum of up to `parts`, which Vector cores add up.
template <AiCore Core>
class EpilogueStage {
 public:
  EpilogueStage(Core& core, const MatmulTiling& t, const Epilogue& epilogue, int parts = 1)
      : core_(core), tiling_(t), epilogue_(epilogue) {
    if (!epilogue.shape.vector) return;
    sent_.emplace(core, "c_sent", t.m, t.n, std::max(parts, t.ub_stages));
    for (std::size_t i = 0; i < core.vectors().size(); ++i)
      lanes_[i].emplace(core.vectors()[i], t, epilogue, parts);
  }

  void Store(L0CTile<float> acc, const EpilogueBlock& block) {
    if (!epilogue_.shape.vector) return core_.Store(block.c, acc, epilogue_.fix);
    const HandOverTile<float> sent = NextPart(acc.rows(), acc.cols());
    core_.Send(sent, acc);
    StoreSum({&sent, 1}, block);
  }

  // Where a part of a block is sent to, until StoreSum.
  HandOverTile<float> NextPart(std::int64_t rows, std::int64_t cols) { return sent_->Next(rows, cols); }

  // The parts are added in their order.
  void StoreSum(std::span<const HandOverTile<float>> parts, const EpilogueBlock& block) {
    const std::int64_t rows = parts[0].rows(), cols = parts[0].cols();
    const Split lane_rows(rows, CeilDiv(rows, static_cast<std::int64_t>(core_.vectors().size())));
    for (std::int64_t i = 0; i < lane_rows.count(); ++i) {
      auto& lane = *lanes_[static_cast<std::size_t>(i)];
      lane.LoadBias(block.bias);
      for (const Range strip : Split(lane_rows[i], tiling_.ub_rows)) {
        const UbTile<float> x = lane.x_ub.Next(strip.size(), cols);
        lane.core.Receive(x, parts[0].Rows(strip));
        for (const HandOverTile<float>& sent : parts.subspan(1)) {
          const UbTile<float> part = lane.part_ub.Next(strip.size(), cols);
          lane.core.Receive(part, sent.Rows(strip));
          lane.core.Add(x, x, part);
        }
        lane.Finish(x, block.Rows(strip));
      }
    }
  }

 private:
  using Vector = std::remove_cvref_t<decltype(std::declval<Core&>().vectors()[0])>;

  Core& core_;
  const MatmulTiling& tiling_;
  const Epilogue& epilogue_;
  std::optional<Ring<Buffer::kHandOver, float>> sent_;
  std::array<std::optional<EpilogueLane<Vector>>, kMaxVectorPerCube> lanes_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_EPILOGUE_KERNEL_H_
