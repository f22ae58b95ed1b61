// What streams by: reads of GM alone, and operators of Vector cores on rows that stay where they are.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tools/validation/read_kernel.h"
#include "tools/validation/rows.h"
#include "tools/validation/stream_kernels.h"

namespace cubist {
namespace {

using Operand = RowRecorder::Operand;

void AddStream(RowRecorder& r, const std::vector<Operand>& inputs, const std::vector<Operand>& outputs,
               const Arithmetic& work) {
  r.AddVector(inputs, outputs, [work](auto& core, const auto& in, const auto& out) {
    ElementwiseKernel(core, in, out, work);
  });
}

// One row for all rows, or a number for each of some of them.
void Broadcast(RowRecorder& r, const Shape& shape, const Shape& other) {
  const DType in = DTypeOfName(r.dtype(0));
  const std::int64_t cols = shape.back(), rows = Count(shape) / std::max<std::int64_t>(cols, 1);
  const bool row = Count(other) == cols && other.back() == cols;
  if (!row && (other.back() != 1 || Count(other) == 0 || rows % Count(other) != 0))
    return r.Skip("the second operand is neither a row nor a column");
  const Operand all{in, rows, cols};
  r.AddVector({all, row ? Operand{in, 1, cols} : Operand{in, Count(other), 1}}, {all},
              [](auto& core, const auto& from, const auto& to) {
                BroadcastMaxKernel(core, from[0], from[1], to[0]);
              });
}

}  // namespace

// Reads into one buffer, with no flag between them: nobody looks at what is there.
void ReadGmRow(RowRecorder& r) {
  r.out.group = kReads;
  r.out.schedule = Schedule::kKnown;
  if (!r.HasRank(0, 2)) return;
  Reads reads{.rows = r.row.attrs.value("tile_rows", std::int64_t{0}),
              .cols = r.row.attrs.value("tile_cols", std::int64_t{0}),
              .slices = r.row.attrs.value("slices", std::int64_t{1}),
              .repeats = r.row.attrs.value("repeats", std::int64_t{1})};
  if (reads.rows <= 0 || reads.cols <= 0 || reads.slices <= 0 || reads.repeats <= 0)
    return r.Skip("tile_rows, tile_cols, slices and repeats are numbers above 0");
  const std::string whose = r.row.attrs.value("rows", std::string("own"));
  reads.whose = whose == "own" ? ReadRows::kOwn : whose == "all" ? ReadRows::kAll : ReadRows::kAllFromOwn;
  const bool ub = r.row.attrs.value("to", std::string("UB")) == "UB";
  r.Add([&](const Device& device) {
    Launch launch(device, "read_gm");
    const Gm matrix =
        MatrixOf(*launch.Input("in", ConstTensor(nullptr, DType::kF16, {r.shape(0)[0], r.shape(0)[1]})));
    if (ub) {
      launch.OnVectorCores(r.chip.cube_cores * r.chip.vector_per_cube,
                           [&](auto& core) { ReadIntoUb(core, matrix, reads); });
    } else {
      launch.OnAiCores(r.chip.cube_cores, [&](auto& core) { ReadIntoL1(core, matrix, reads); });
    }
    return launch.Finish(nullptr);
  });
  if (!r.out.skipped.empty()) return;
  for (sync::PhasePlan& phase : r.out.launches.back().plan.phases) {
    for (sync::CorePlan& core : phase.cores) core.ops.clear();
  }
  r.LeavesOutLaunch();
}

void ElementwiseRow(RowRecorder& r) {
  r.out.group = kMemoryBound;
  if (r.is_int64()) return r.Skip("the Vector core has no int64 arithmetic");
  for (const Shape& operand : r.row.shapes) {
    if (operand.empty()) return r.Skip("an operand has no dimensions");
  }
  const Shape& largest =
      *std::max_element(r.row.shapes.begin(), r.row.shapes.end(),
                        [](const Shape& x, const Shape& y) { return Count(x) < Count(y); });
  const Operand all{DTypeOfName(r.dtype(0)), 1, Count(largest)};
  // sigmoid: 1 / (1 + exp(-x)); gelu by tanh: x / (1 + exp(-|y|)) * exp(min(y, 0)), y = 1.6 x + 0.07 x^3.
  static const std::map<std::string, Arithmetic> works = {
      {"sigmoid", {2, 0, 1, 1}}, {"gelu", {5, 4, 2, 1}}, {"relu", {1, 0, 0, 0}}, {"maximum", {0, 1, 0, 0}}};
  const Shape& last = r.row.shapes.back();
  if (r.row.shapes.size() == 2 && Count(last) < Count(largest)) return Broadcast(r, largest, last);
  AddStream(r, std::vector<Operand>(r.row.shapes.size(), all), {all}, works.at(r.row.op));
}

void SwiGluRow(RowRecorder& r) {
  r.out.group = kMemoryBound;
  const Shape& x = r.shape(0);
  std::int64_t dim = r.row.attrs.value("dim", std::int64_t{-1});
  dim = dim < 0 ? dim + static_cast<std::int64_t>(x.size()) : dim;
  if (dim < 0 || dim >= static_cast<std::int64_t>(x.size())) return r.Skip("dim is not one of the tensor's");
  const DType in = DTypeOfName(r.dtype(0));
  if (r.row.kernels.find("Slice") != std::string::npos) {
    const Operand all{in, 1, Count(x)};
    AddStream(r, {all}, {all}, {});
  }
  std::int64_t outer = 1;
  for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) outer *= x[d];
  const std::int64_t inner = Count(x) / std::max<std::int64_t>(outer, 1) / 2;
  r.AddVector({{in, outer, 2 * inner}}, {{in, outer, inner}},
              [](auto& core, const auto& from, const auto& to) {
                HalvesKernel(core, from[0], to[0], {2, 1, 1, 1});
              });
  r.StartsSlowly();
  r.out.schedule = Schedule::kUnknown;
}

void RmsNormRow(RowRecorder& r) {
  r.out.group = kMemoryBound;
  const DType in = DTypeOfName(r.dtype(0));
  const std::int64_t h = r.shape(0).back(), t = Count(r.shape(0)) / std::max<std::int64_t>(h, 1);
  r.AddVector({{in, t, h}, {in, 1, h}}, {{in, t, h}}, [](auto& core, const auto& from, const auto& to) {
    RmsNormRowsKernel(core, from[0], from[1], to[0]);
  });
  r.StartsSlowly();
  r.out.schedule = Schedule::kUnknown;
}

void SoftmaxRow(RowRecorder& r) {
  r.out.group = "other vector";
  r.out.schedule = Schedule::kUnknown;
  const Shape& x = r.shape(0);
  std::int64_t dim = r.row.attrs.value("dim", std::int64_t{-1});
  if (dim < 0) dim += static_cast<std::int64_t>(x.size());
  if (dim < 0 || dim >= static_cast<std::int64_t>(x.size())) return r.Skip("dim is not one of the tensor's");
  const DType in = DTypeOfName(r.dtype(0));
  std::int64_t outer = 1, inner = 1;
  for (std::size_t d = 0; d < x.size(); ++d) {
    if (static_cast<std::int64_t>(d) < dim) outer *= x[d];
    if (static_cast<std::int64_t>(d) > dim) inner *= x[d];
  }
  const std::int64_t length = x[static_cast<std::size_t>(dim)];
  if ((inner == 1 ? length : 8 * length) * 8 > kUbBytes)
    return r.Skip(fmt::format("{} numbers of a softmax do not fit UB", length));
  if (inner == 1) {
    const Operand all{in, outer, length};
    return r.AddVector({all}, {all}, [](auto& core, const auto& from, const auto& to) {
      SoftmaxKernel(core, from[0], to[0]);
    });
  }
  const Operand all{in, outer * length, inner};
  r.AddVector({all}, {all}, [length](auto& core, const auto& from, const auto& to) {
    ColumnSoftmaxKernel(core, from[0], to[0], length);
  });
}

void TransposeRow(RowRecorder& r) {
  r.out.group = "other vector";
  r.out.schedule = Schedule::kUnknown;
  if (!r.HasRank(0, 2)) return;
  // An int64 is two floats.
  const std::int64_t parts = r.is_int64() ? 2 : 1;
  const DType in = r.is_int64() ? DType::kF32 : DTypeOfName(r.dtype(0));
  const Operand from{in, r.shape(0)[0], r.shape(0)[1] * parts}, to{in, r.shape(0)[1], r.shape(0)[0] * parts};
  r.AddVector({from}, {to}, [parts](auto& core, const auto& in, const auto& out) {
    TransposeKernel(core, in[0], out[0], parts);
  });
}

// The kernels that the row lists, one launch each: tables are put together, spread over the batch, and applied.
void RotaryRow(RowRecorder& r) {
  r.out.group = "other vector";
  r.out.schedule = Schedule::kUnknown;
  if (!r.HasRank(0, 4) || !r.HasRank(2, 2)) return;
  const DType in = DTypeOfName(r.dtype(0));
  const Shape& q = r.shape(0);
  const Shape& table_shape = r.shape(2);
  const std::int64_t tokens = q[0] * q[1], heads = q[2] * q[3];
  const Operand half{in, table_shape[0], table_shape[1]}, table{in, table_shape[0], 2 * table_shape[1]},
      flat_table{in, 1, 2 * Count(table_shape)}, flat{in, 1, tokens * q[3]}, rows{in, tokens, q[3]},
      all{in, tokens, heads};
  const auto times = [&](std::string_view kernel) {
    const std::size_t at = r.row.kernels.find(kernel);
    const std::size_t digit = at == std::string::npos ? at : r.row.kernels.find_first_of("0123456789", at);
    return digit == std::string::npos ? 0 : r.row.kernels[digit] - '0';
  };
  for (int i = 0; i < times("ConcatD") + times("RepeatInterleave"); ++i) {
    r.AddVector({half}, {table},
                [](auto& core, const auto& from, const auto& to) { TwiceKernel(core, from[0], to[0]); });
  }
  for (int i = 0; i < times("BroadcastTo"); ++i) AddStream(r, {flat_table}, {flat}, {});
  r.AddVector({all, all, rows, rows}, {all, all},
              [](auto& core, const auto& from, const auto& to) { RotaryKernel(core, from, to); });
  r.StartsSlowly();
}

}  // namespace cubist
