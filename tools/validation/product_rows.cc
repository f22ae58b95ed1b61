// Products: by schedules that are known (pto-dsl's steps, asc-devkit's blocks by core), and the vendor's own.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "tools/validation/rows.h"
#include "tools/validation/scheduled_matmul_kernel.h"

namespace cubist {
namespace {

// Less of a product than a tile takes as long.
std::int64_t AtLeastTile(std::int64_t size) { return std::max<std::int64_t>(size, 128); }

// Of fp16, which costs what bf16 does.
void AddScheduled(RowRecorder& r, std::int64_t m, std::int64_t n, std::int64_t k, bool transpose_b,
                  const MatmulSchedule& s, sync::Policy policy, DType out = DType::kF16) {
  r.Add(
      [&](const Device& device) {
        Launch launch(device, "matmul");
        const Gm a = MatrixOf(*launch.Input("a", ConstTensor(nullptr, DType::kF16, {m, k})));
        const Gm stored =
            MatrixOf(*launch.Input("b", transpose_b ? ConstTensor(nullptr, DType::kF16, {n, k})
                                                    : ConstTensor(nullptr, DType::kF16, {k, n})));
        const Gm b = transpose_b ? stored.Transposed() : stored;
        const Gm c = MatrixOf(*launch.Output("c", Tensor(nullptr, out, {m, n})));
        launch.OnAiCores(s.tasks(), [&](auto& core) { ScheduledMatmul(core, a, b, c, s); });
        return launch.Finish(nullptr);
      },
      policy);
}

// What `add` adds in place of what there is, if it is quicker.
template <class Add>
void KeepBetter(RowRecorder& r, const Add& add) {
  if (!r.out.skipped.empty()) return;
  std::vector<RecordedLaunch> before;
  before.swap(r.out.launches);
  add();
  if (r.out.skipped.empty() && PredictedUs(r.out.launches, r.chip) < PredictedUs(before, r.chip)) return;
  r.out.skipped.clear();
  r.out.launches = std::move(before);
}

void AddMatmul(RowRecorder& r, std::int64_t m, std::int64_t n, std::int64_t k, DType in, bool transpose_b) {
  MatmulArgs args;
  args.a = ConstTensor(nullptr, in, {m, k});
  args.b = transpose_b ? ConstTensor(nullptr, in, {n, k}) : ConstTensor(nullptr, in, {k, n});
  args.transpose_b = transpose_b;
  args.c = Tensor(nullptr, in, {m, n});
  const auto call = [args](const Device& device, Profile* profile) { return Matmul(device, args, profile); };
  r.AddTuned(call, "prefetch=0");
  // Well scheduled: the best of the library's own choice, of that with the guide's blocks turned round, and of the best of
  // the known schedules in two orders.
  KeepBetter(r, [&] { r.AddTuned(call, "prefetch=0,m=256,n=128"); });
  for (const std::int64_t width : {0, 5}) {
    MatmulSchedule s;
    s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), width > 0 ? BlockOrder::kSwizzled : BlockOrder::kRowMajor,
              std::max<std::int64_t>(width, 1)};
    if (SizeOf(in) == 2)
      KeepBetter(r, [&] { AddScheduled(r, m, n, k, transpose_b, s, sync::Policy::kMinimal); });
  }
}

// What a compiler's flags do at the edge of a loop: the first load of a K block waits for the whole block before.
void AddLoopEdges(const trace::CoreRecord& core, sync::CorePlan* plan) {
  std::uint32_t last = 0;
  bool multiplied = false;
  std::uint8_t id = 0;
  for (std::uint32_t i = 0; i < core.instrs.size(); ++i) {
    const Pipe pipe = core.instrs[i].pipe;
    if (pipe == Pipe::kM) {
      last = i;
      multiplied = true;
    } else if (pipe == Pipe::kMte2 && multiplied) {
      plan->ops.push_back({last, true, sync::Kind::kSetFlag, Pipe::kM, -1, Pipe::kMte2, id});
      plan->ops.push_back({i, false, sync::Kind::kWaitFlag, Pipe::kMte2, -1, Pipe::kM, id});
      id = static_cast<std::uint8_t>(1 - id);
      multiplied = false;
    }
  }
  std::stable_sort(plan->ops.begin(), plan->ops.end(),
                   [](const auto& x, const auto& y) { return x.position() < y.position(); });
}

void AddLoopEdges(RecordedLaunch* launch) {
  auto& [record, plan, before_us] = *launch;
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    for (std::size_t c = 0; c < record.phases[p].cores.size(); ++c)
      AddLoopEdges(record.phases[p].cores[c], &plan.phases[p].cores[c]);
  }
}

}  // namespace

void ScheduleRow(RowRecorder& r) {
  r.out.group = r.row.op.starts_with("step") ? kKnownSchedules : "vendor GEMM";
  const std::int64_t m = r.shape(0)[0], n = r.shape(0)[1], k = r.shape(0)[2];
  if (r.TooLong({AtLeastTile(m), AtLeastTile(n), AtLeastTile(k)})) return;
  const DType in = DTypeOfName(r.dtype(0));
  if (r.out.group != kKnownSchedules) return AddMatmul(r, m, n, k, in, /*transpose_b=*/true);
  r.out.schedule = Schedule::kKnown;
  const std::string step = r.row.op.substr(0, 5);
  MatmulSchedule s;
  if (step != "step1" && step != "step2" && step != "step3" && step != "step4")
    return r.Skip(fmt::format("no schedule is known as '{}'", r.row.op));
  s.stages = step == "step1" ? 1 : 2;
  s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), BlockOrder::kRowMajor, 1};
  if (step >= "step3") s.grid.order = BlockOrder::kSwizzled, s.grid.width = 5;
  const bool automatic = step != "step4";
  AddScheduled(r, m, n, k, /*transpose_b=*/true, s,
               automatic ? sync::Policy::kPerTile : sync::Policy::kMinimal);
  if (automatic && r.out.skipped.empty()) AddLoopEdges(&r.out.launches.back());
}

void GemmRow(RowRecorder& r) {
  r.out.group = "vendor GEMM";
  if (!r.HasRank(0, 2) || !r.HasRank(1, 2)) return;
  const std::int64_t m = r.shape(0)[0], n = r.shape(1)[1], k = r.shape(0)[1];
  if (k != r.shape(1)[0]) return r.Skip(fmt::format("a has {} columns, b {} rows", k, r.shape(1)[0]));
  if (r.TooLong({AtLeastTile(m), AtLeastTile(n), AtLeastTile(k)})) return;
  AddMatmul(r, m, n, k, DTypeOfName(r.dtype(0)), false);
}

// asc-devkit's products: a core has a rectangle of blocks of 128 x 256, or they go along the diagonals of a band.
void CoreMatmulRow(RowRecorder& r) {
  r.out.group = kCoreProducts;
  if (!r.HasRank(0, 2) || !r.HasRank(1, 2)) return;
  const std::int64_t m = r.shape(0)[0], n = r.shape(1)[1], k = r.shape(0)[1];
  if (r.TooLong({AtLeastTile(m), AtLeastTile(n), AtLeastTile(k)})) return;
  MatmulSchedule s;
  s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), BlockOrder::kRowMajor, 1};
  s.core_rows = r.row.attrs.value("core_rows", std::int64_t{0});
  s.core_cols = r.row.attrs.value("core_cols", std::int64_t{0});
  s.stagger = r.attribute("stagger");
  if (s.core_rows <= 0 || s.core_cols <= 0) {
    s.core_rows = 0;
    s.grid.order = BlockOrder::kDiagonal;
    s.grid.width = std::max<std::int64_t>(r.row.attrs.value("band", std::int64_t{1}), 1);
  } else if (s.grid.rows % s.core_rows != 0 || s.grid.cols % s.core_cols != 0) {
    return r.Skip("the grid is no whole number of rectangles");
  }
  if (s.core_rows > 0 && s.tasks() > r.chip.cube_cores)
    return r.Skip(fmt::format("{} rectangles, and the chip has {} cores", s.tasks(), r.chip.cube_cores));
  AddScheduled(r, m, n, k, /*transpose_b=*/false, s, sync::Policy::kMinimal, DType::kF32);
  if (r.attribute("in_core")) return r.LeavesOutLaunch();
  r.StartsSlowly();
  // Called by Vector cores, which do nothing else.
  if (r.out.skipped.empty()) r.out.launches.back().before_us += r.chip.sync.mixed_launch_s * 1e6;
}

void GroupedRow(RowRecorder& r) {
  r.out.group = "grouped matmul";
  if (!r.HasRank(0, 2) || !r.HasRank(1, 3)) return;
  const bool transposed = r.attribute("transpose_weight");
  const auto list = r.row.attrs.find("group_list");
  if (list == r.row.attrs.end() || !list->is_array()) return r.Skip("attrs has no group_list");
  std::vector<std::int32_t> ends;
  for (const auto& end : *list) {
    if (!end.is_number_integer()) return r.Skip("group_list holds something that is not a number");
    ends.push_back(end);
  }
  const DType in = DTypeOfName(r.dtype(0));
  const Shape& w = r.shape(1);
  if (r.TooLong({r.shape(0)[0], w[1], w[2]})) return;
  GroupedMatmulArgs args;
  args.x = ConstTensor(nullptr, in, {r.shape(0)[0], r.shape(0)[1]});
  args.groups = ConstTensor(ends.data(), {static_cast<std::int64_t>(ends.size())});
  args.group_list = GroupList::kEnds;
  args.weights = ConstTensor(nullptr, in, {w[0], w[1], w[2]});
  args.transpose_weights = transposed;
  args.out = Tensor(nullptr, in, {r.shape(0)[0], transposed ? w[1] : w[2]});
  const auto call = [args](const Device& device, Profile* profile) {
    return GroupedMatmul(device, args, profile);
  };
  // The blocks of the vendor's tiling code (ops-transformer, gmm/grouped_matmul): 256 columns, as much of k as half of L0B has
  // room for, and the rows that then fit L0C.
  r.AddTuned(call, "prefetch=0,m=128,n=256,k0=64");
  r.StartsSlowly();
  r.out.schedule = Schedule::kUnknown;
}

}  // namespace cubist
