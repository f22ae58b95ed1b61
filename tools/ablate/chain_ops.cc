#include "tools/ablate/chain_ops.h"

#include <algorithm>

#include "kernels/attention_operands.h"
#include "npu_model/core.h"
#include "npu_model/launch.h"
#include "npu_model/tile.h"

namespace cubist {
namespace {

constexpr std::int64_t kTileBytes = 24
                                    << 10;  // of a row operator's tile: several of them and two stages fit UB

ConstTensor In(DType dtype, std::int64_t rows, std::int64_t cols) {
  return ConstTensor(nullptr, dtype, {rows, cols});
}
Tensor Out(DType dtype, std::int64_t rows, std::int64_t cols) { return Tensor(nullptr, dtype, {rows, cols}); }

std::int64_t TileRows(std::int64_t row_bytes) {
  return std::max<std::int64_t>(1, kTileBytes / std::max<std::int64_t>(row_bytes, 1));
}

// body(core, rows) for every piece of `step` rows, dealt to all Vector cores in turn.
template <class MakeBody>
void OverRows(Launch& launch, std::int64_t rows, std::int64_t step, MakeBody make_body) {
  const Split pieces(rows, step);
  launch.OnVectorCores(pieces.count(), [&](auto& core) {
    auto body = make_body(core);
    for (std::int64_t i = core.index(); i < pieces.count(); i += core.count()) body(pieces[i]);
  });
}

Status Finish(Launch& launch, Profile* profile) {
  Profile one;
  CUBIST_RETURN_IF_ERROR(launch.Finish(profile != nullptr ? &one : nullptr));
  if (profile != nullptr) profile->Append(one);
  return {};
}

}  // namespace

Status JoinColumns(const Device& device, std::int64_t rows, const std::vector<JoinPart>& parts,
                   Profile* profile) {
  Launch launch(device, "join_columns");
  std::vector<Gm> sources;
  std::int64_t cols = 0;
  for (const JoinPart& part : parts) {
    sources.push_back(MatrixOf(*launch.Input("part", In(DType::kBF16, part.rows, part.cols))));
    cols += part.cols;
  }
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kBF16, rows, cols)));
  std::int64_t step = TileRows(cols * 2);
  for (const JoinPart& part : parts) {
    while (part.rows % step != 0) --step;  // A piece does not go over the end of a part that repeats.
  }
  OverRows(launch, rows, step, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, BF16>(core, "rows_ub", step, cols, 2)](Range r) mutable {
      const UbTile<BF16> tile = ring.Next(r.size(), cols);
      std::int64_t at = 0;
      for (const Gm& source : sources) {
        const std::int64_t from = r.begin % source.rows;
        core.Load(tile.Cols({at, at + source.cols}), source.Rows({from, from + r.size()}));
        at += source.cols;
      }
      core.Store(out.Rows(r), tile);
    };
  });
  return Finish(launch, profile);
}

Status SliceColumns(const Device& device, std::int64_t rows, std::int64_t from, std::int64_t cols,
                    Profile* profile) {
  Launch launch(device, "slice_columns");
  const Gm x = MatrixOf(*launch.Input("x", In(DType::kBF16, rows, from))).Cols({0, cols});
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kBF16, rows, cols)));
  const std::int64_t step = TileRows(cols * 2);
  OverRows(launch, rows, step, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, BF16>(core, "rows_ub", step, cols, 2)](Range r) mutable {
      const UbTile<BF16> tile = ring.Next(r.size(), cols);
      core.Load(tile, x.Rows(r));
      core.Store(out.Rows(r), tile);
    };
  });
  return Finish(launch, profile);
}

Status RotateRows(const Device& device, std::int64_t heads, std::int64_t length, std::int64_t cols, bool back,
                  Profile* profile) {
  Launch launch(device, "rotate_rows");
  const ConstTensor angles(nullptr, DType::kF32, {length, cols / 2});
  RotateOperands g = AddRotations(launch, {.cos = angles, .sin = angles}, /*batches=*/1).of_keys;
  g.inverse = back;
  const GmTensor* x = launch.Input("x", ConstTensor(nullptr, DType::kBF16, {1, heads, length, cols}));
  const GmTensor* out = launch.Output("out", Tensor(nullptr, DType::kBF16, {1, heads, length, cols}));
  TurnTensors<BF16>(launch, {{g, x, out, {RowsToTurn{0, 0, {0, length}}}}});
  return Finish(launch, profile);
}

Status GatherRows(const Device& device, std::int64_t src_rows, std::int64_t cols,
                  const std::vector<std::int32_t>& places, Profile* profile) {
  Launch launch(device, "gather_rows");
  constexpr std::int64_t kPiece = 64;
  const auto rows = static_cast<std::int64_t>(places.size());
  const Gm index = MatrixOf(*launch.Input("places", ConstTensor(places.data(), {std::int64_t{1}, rows})));
  const Gm src = MatrixOf(*launch.Input("src", In(DType::kBF16, src_rows, cols)));
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kBF16, rows, cols)));
  OverRows(launch, rows, kPiece, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, BF16>(core, "row_ub", 1, cols, 4, Role::kRelay),
            ids_ring = Ring<Buffer::kUB, std::int32_t>(core, "places_ub", 1, kPiece, 2)](Range r) mutable {
      const UbTile<std::int32_t> ids = ids_ring.Next(1, r.size());
      core.Load(ids, index.Cols(r));
      for (std::int64_t i = r.begin; i < r.end; ++i) {
        const std::int64_t from = core.ReadScalar(ids, i - r.begin);
        const UbTile<BF16> row = ring.Next(1, cols);
        core.Load(row, src.Rows({from, from + 1}));
        core.Store(out.Rows({i, i + 1}), row);
      }
    };
  });
  return Finish(launch, profile);
}

Status MapIndices(const Device& device, std::int64_t count, Profile* profile) {
  Launch launch(device, "map_indices");
  constexpr std::int64_t kPiece = 1024;
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(count));
  const Gm x = MatrixOf(*launch.Input("x", ConstTensor(zeros.data(), {std::int64_t{1}, count})));
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kI32, 1, count)));
  OverRows(launch, count, kPiece, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, std::int32_t>(core, "indices_ub", 1, kPiece, 2)](Range r) mutable {
      const UbTile<std::int32_t> tile = ring.Next(1, r.size());
      core.Load(tile, x.Cols(r));
      core.AddScalar(tile, tile, 0);
      core.Store(out.Cols(r), tile);
    };
  });
  return Finish(launch, profile);
}

Status ScaleRows(const Device& device, std::int64_t rows, std::int64_t cols, Profile* profile) {
  Launch launch(device, "scale_rows");
  const Gm x = MatrixOf(*launch.Input("x", In(DType::kBF16, rows, cols)));
  const Gm factor = MatrixOf(*launch.Input("factor", In(DType::kF32, rows, 1)));
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kF32, rows, cols)));
  const std::int64_t step = TileRows(cols * 4);
  OverRows(launch, rows, step, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, float>(core, "rows_ub", step, cols, 2),
            factor_ring = Ring<Buffer::kUB, float>(core, "factor_ub", step, 1, 2)](Range r) mutable {
      const UbTile<float> tile = ring.Next(r.size(), cols), column = factor_ring.Next(r.size(), 1);
      core.Load(tile, x.Rows(r));
      core.Load(column, factor.Rows(r));
      core.Mul(tile, tile, column);
      core.Store(out.Rows(r), tile);
    };
  });
  return Finish(launch, profile);
}

Status SumRows(const Device& device, std::int64_t rows, std::int64_t terms, std::int64_t cols,
               Profile* profile) {
  Launch launch(device, "sum_rows");
  const Gm x = MatrixOf(*launch.Input("x", In(DType::kF32, rows * terms, cols)));
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kF32, rows, cols)));
  OverRows(launch, rows, 1, [&](auto& core) {
    return [&, sum_ring = Ring<Buffer::kUB, float>(core, "sum_ub", 1, cols, 2),
            ring = Ring<Buffer::kUB, float>(core, "term_ub", 1, cols, 3)](Range r) mutable {
      const UbTile<float> sum = sum_ring.Next(1, cols);
      core.Load(sum, x.Rows({r.begin * terms, r.begin * terms + 1}));
      for (std::int64_t j = 1; j < terms; ++j) {
        const UbTile<float> term = ring.Next(1, cols);
        core.Load(term, x.Rows({r.begin * terms + j, r.begin * terms + j + 1}));
        core.Add(sum, sum, term);
      }
      core.Store(out.Rows(r), sum);
    };
  });
  return Finish(launch, profile);
}

Status NarrowRows(const Device& device, std::int64_t rows, std::int64_t cols, Profile* profile) {
  Launch launch(device, "narrow_rows");
  const Gm x = MatrixOf(*launch.Input("x", In(DType::kF32, rows, cols)));
  const Gm out = MatrixOf(*launch.Output("out", Out(DType::kBF16, rows, cols)));
  const std::int64_t step = TileRows(cols * 4);
  OverRows(launch, rows, step, [&](auto& core) {
    return [&, ring = Ring<Buffer::kUB, float>(core, "rows_ub", step, cols, 2)](Range r) mutable {
      const UbTile<float> tile = ring.Next(r.size(), cols);
      core.Load(tile, x.Rows(r));
      core.Store(out.Rows(r), tile);
    };
  });
  return Finish(launch, profile);
}

}  // namespace cubist
