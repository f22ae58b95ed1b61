// Routing of mixtures of experts: rows of tokens go to their experts, change places, and come back.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/validation/rows.h"
#include "tools/validation/stream_kernels.h"

namespace cubist {
namespace {

using Operand = RowRecorder::Operand;

// Slots whose rows are gathered: those of the experts in range, to the number that is active.
std::int64_t KeptSlots(const RowRecorder& r, std::int64_t slots) {
  const std::int64_t experts = std::max<std::int64_t>(r.row.attrs.value("expert_num", std::int64_t{1}), 1);
  std::int64_t kept = slots;
  const auto range = r.row.attrs.find("active_expert_range");
  if (range != r.row.attrs.end() && range->is_array() && range->size() == 2 &&
      (*range)[0].is_number_integer() && (*range)[1].is_number_integer()) {
    const std::int64_t in_range = (*range)[1].get<std::int64_t>() - (*range)[0].get<std::int64_t>();
    kept = slots * std::clamp<std::int64_t>(in_range, 0, experts) / experts;
  }
  const std::int64_t active = r.row.attrs.value("active_num", std::int64_t{-1});
  return active > 0 ? std::min(kept, active) : kept;
}

}  // namespace

void InitRoutingRow(RowRecorder& r) {
  r.out.group = "other vector";
  r.out.schedule = Schedule::kUnknown;
  if (!r.HasRank(0, 2) || !r.HasRank(1, 2)) return;
  const std::int64_t tokens = r.shape(0)[0], h = r.shape(0)[1], slots = tokens * r.shape(1)[1];
  const DType in = DTypeOfName(r.dtype(0));
  // Int8 is not one of our types: a row is stored as so many floats.
  const std::int64_t quant = r.row.attrs.value("quant_mode", std::int64_t{-1});
  const Operand ids{DType::kF32, 1, slots}, x{in, tokens, h},
      out{quant < 0 ? in : DType::kF32, KeptSlots(r, slots), quant < 0 ? h : CeilDiv(h, 4)};
  r.Add([&](const Device& device) {
    Launch launch(device, r.row.op.c_str());
    const auto input = [&](const Operand& o) {
      return MatrixOf(*launch.Input("in", ConstTensor(o.data, o.dtype, {o.rows, o.cols})));
    };
    const auto output = [&](const Operand& o) {
      return MatrixOf(*launch.Output("out", Tensor(nullptr, o.dtype, {o.rows, o.cols})));
    };
    const InitRouting g{.ids = input(ids),
                        .sorted = output(ids),
                        .places = output(ids),
                        .tokens = input(x),
                        .out = output(out),
                        .work = quant < 0    ? 0
                                : quant == 0 ? 4
                                             : 10,
                        .once = quant != 0};
    if (slots == 0) return launch.Finish(nullptr);
    const std::int64_t cores = r.chip.cube_cores * r.chip.vector_per_cube;
    constexpr std::int64_t kOneCoreSorts = 6144;  // ids that UB has room to sort
    const bool one = slots <= kOneCoreSorts;
    if (!one) launch.OnVectorCores(cores, [&](auto& core) { SortSlotsKernel(core, g.ids, g.sorted, cores); });
    launch.OnVectorCores(1, [&](auto& core) { SortSlotsKernel(core, g.ids, g.sorted, 1); });
    launch.OnVectorCores(one ? 1 : cores, [&](auto& core) { CountSlotsKernel(core, g.sorted, g.places); });
    if (r.row.attrs.value("drop_pad_mode", std::int64_t{0}) == 1)
      launch.OnVectorCores(cores, [&](auto& core) { ClearSlotsKernel(core, g.out); });
    launch.OnVectorCores(cores, [&](auto& core) { GatherSlotsKernel(core, g); });
    return launch.Finish(nullptr);
  });
  if (slots > 0) r.StartsSlowly();
}

void ReRoutingRow(RowRecorder& r) {
  r.out.group = kMemoryBound;
  if (!r.HasRank(0, 2) || !r.HasRank(1, 2)) return;
  // Rows are moved, whatever they hold: 4 bytes are a float.
  const std::int64_t rows = r.shape(0)[0], cols = CeilDiv(r.shape(0)[1] * BytesByName().at(r.dtype(0)), 4);
  const std::int64_t segments = std::max<std::int64_t>(r.shape(1)[0] * r.shape(1)[1], 1);
  if (segments * 8 > kUbBytes / 2) return r.Skip("the counts do not fit UB");
  std::vector<Operand> in{{DType::kF32, rows, cols}}, out{{DType::kF32, rows, cols}};
  const bool scales = !r.shape(2).empty();
  for (int c = 0; c < (scales ? 2 : 1); ++c) {  // the scale and the index of a row
    in.push_back({DType::kF32, 1, rows});
    out.push_back({DType::kF32, 1, rows});
  }
  const std::vector<std::int32_t> counts(static_cast<std::size_t>(segments), 0);
  in.push_back({DType::kI32, 1, segments, counts.data()});
  const int words = r.dtype(1) == "int64" ? 2 : 1;
  r.AddVector(in, out, [words](auto& core, const auto& from, const auto& to) {
    std::vector<Gm> columns;
    for (std::size_t c = 1; c < to.size(); ++c) columns.push_back(from[c]), columns.push_back(to[c]);
    MoveSegmentsKernel(core, from[0], to[0], columns, from.back(), words);
  });
  r.StartsSlowly();
}

void FinalizeRow(RowRecorder& r) {
  r.out.group = kMemoryBound;
  const bool skips = r.shape(2).size() == 2;
  if (!r.HasRank(0, 2)) return;
  const DType in = DTypeOfName(r.dtype(0));
  const std::int64_t h = r.shape(0)[1];
  const std::int64_t tokens = skips ? r.shape(2)[0] : r.shape(0)[0];
  const bool biased = r.shape(4).size() == 2;
  const Operand rows{in, tokens, h};
  std::vector<Operand> inputs{{in, r.shape(0)[0], h}};
  if (biased) inputs.push_back({in, r.shape(4)[0], h});
  for (std::size_t s = 2; s < 4; ++s) {
    if (r.shape(s).size() == 2) inputs.push_back(rows);
  }
  const std::int64_t top_k = std::max<std::int64_t>(r.shape(0)[0] / std::max<std::int64_t>(tokens, 1), 1);
  r.AddVector(inputs, {rows}, [&](auto& core, const auto& from, const auto& to) {
    Finalize g;
    g.expanded = from[0], g.out = to[0], g.top_k = top_k;
    std::size_t next = 1;
    if (biased) g.bias = from[next++];
    g.skips.assign(from.begin() + static_cast<std::ptrdiff_t>(next), from.end());
    FinalizeKernel(core, g);
  });
  r.StartsSlowly();
  r.out.schedule = Schedule::kUnknown;
}

}  // namespace cubist
