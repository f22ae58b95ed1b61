#include "tools/validation/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>

#include "kernels/flash_attention.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "npu_model/launch.h"
#include "npu_model/tuning.h"
#include "tools/tiling_search.h"
#include "tools/validation/read_kernel.h"
#include "tools/validation/scheduled_matmul_kernel.h"
#include "tools/validation/stream_kernels.h"

namespace cubist {
namespace {

const std::map<std::string, std::int64_t>& BytesByName() {
  static const std::map<std::string, std::int64_t> bytes = {
      {"float32", 4}, {"fp32", 4},  {"float16", 2}, {"fp16", 2},  {"bfloat16", 2}, {"bf16", 2},
      {"int64", 8},   {"int32", 4}, {"int16", 2},   {"uint8", 1}, {"int8", 1}};
  return bytes;
}
// Integers are moved and computed on as floats of their size.
DType DTypeOfName(const std::string& name) {
  if (name == "bfloat16" || name == "bf16") return DType::kBF16;
  return BytesByName().at(name) == 2 ? DType::kF16 : DType::kF32;
}
std::int64_t Count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// Collects the launches of a row.
class RowRecorder {
 public:
  RowRecorder(const MeasuredRow& row, const ChipSpec& chip) : row_(row), chip_(chip) {}

  Recorded Run() {
    std::string wrong = Unfit();
    try {
      if (wrong.empty()) RunOperator();
    } catch (const nlohmann::json::exception& error) {  // Of an attribute's type.
      wrong = fmt::format("attrs: {}", error.what());
    }
    if (!wrong.empty()) Skip(out_.group.empty() ? "other" : out_.group, wrong);
    return std::move(out_);
  }

 private:
  void RunOperator() {
    static const std::map<std::string, void (RowRecorder::*)()> operators = {
        {"sigmoid", &RowRecorder::Elementwise},
        {"gelu", &RowRecorder::Elementwise},
        {"relu", &RowRecorder::Elementwise},
        {"maximum", &RowRecorder::Elementwise},
        {"swi_glu", &RowRecorder::SwiGluRow},
        {"rms_norm", &RowRecorder::RmsNormRow},
        {"softmax", &RowRecorder::Softmax},
        {"transpose", &RowRecorder::Transpose},
        {"moe_re_routing", &RowRecorder::ReRouting},
        {"moe_finalize_routing", &RowRecorder::FinalizeRow},
        {"moe_init_routing_v3", &RowRecorder::InitRoutingRow},
        {"gemm", &RowRecorder::Gemm},
        {"grouped_matmul", &RowRecorder::Grouped},
        {"mla", &RowRecorder::Attention},
        {"mha", &RowRecorder::Attention},
        {"gqa", &RowRecorder::Attention},
        {"flash_attention", &RowRecorder::Attention},
        {"apply_rotary_pos_emb", &RowRecorder::Rotary},
        {"read_gm", &RowRecorder::ReadGm},
        {"core_matmul", &RowRecorder::CoreMatmul},
    };
    if (!BytesByName().contains(dtype(0))) {
      Skip("other", fmt::format("dtype '{}' is not one that the model knows", dtype(0)));
    } else if (row_.schedule) {
      Schedule();
    } else if (const auto found = operators.find(row_.op); found != operators.end()) {
      (this->*found->second)();
    } else if (row_.op == "moe_distribute_dispatch_v2") {
      Skip("other", "runs on several devices: links between them are not modelled");
    } else {
      Skip("other", fmt::format("no kernel stands for '{}'", row_.op));
    }
  }

  // Why no operator could take the row's tensors; empty where one might.
  std::string Unfit() const {
    constexpr double kMostElements = 0x1p34;
    if (shape(0).empty()) return "the first tensor has no dimensions";
    for (std::size_t i = 0; i < row_.shapes.size(); ++i) {
      double elements = 1;
      for (const std::int64_t size : row_.shapes[i]) elements *= static_cast<double>(size);
      const bool of_no_tokens = row_.op == "moe_init_routing_v3" && IsEmptyInRowsAlone(row_.shapes[i]);
      if (elements == 0 && !of_no_tokens) return fmt::format("tensor {} has a size of 0", i);
      if (elements > kMostElements && !row_.schedule)
        return fmt::format("tensor {} has {:.3g} elements, at most {:.3g} are replayed", i, elements,
                           kMostElements);
    }
    return "";
  }

  // Routing was measured without tokens, too.
  static bool IsEmptyInRowsAlone(const Shape& shape) {
    return !shape.empty() && shape[0] == 0 && std::count(shape.begin(), shape.end(), 0) == 1;
  }

  // Less of a product than a tile takes as long.
  static std::int64_t Tile(std::int64_t size) { return std::max<std::int64_t>(size, 128); }

  // Whether so many multiply-adds are too many to replay.
  bool TooLong(std::initializer_list<std::int64_t> sizes) {
    constexpr double kMostProducts = 0x1p43;
    double products = 1;
    for (const std::int64_t size : sizes) products *= static_cast<double>(size);
    if (products <= kMostProducts) return false;
    Skip(out_.group,
         fmt::format("{:.3g} multiply-adds, at most {:.3g} are replayed", products, kMostProducts));
    return true;
  }

  const Shape& shape(std::size_t i) const {
    static const Shape kNone;
    return i < row_.shapes.size() ? row_.shapes[i] : kNone;
  }
  const std::string& dtype(std::size_t i) const { return row_.dtypes[std::min(i, row_.dtypes.size() - 1)]; }
  bool is_int64() const { return dtype(0) == "int64"; }
  bool attribute(const char* name) const {
    const auto found = row_.attrs.find(name);
    return found != row_.attrs.end() && found->is_boolean() && found->get<bool>();
  }
  bool HasRank(std::size_t i, std::size_t rank) {
    if (shape(i).size() == rank) return true;
    Skip(out_.group, fmt::format("tensor {} has {} dimensions, not {}", i, shape(i).size(), rank));
    return false;
  }

  void Skip(const std::string& group, const std::string& why) {
    out_.group = group;
    out_.skipped = why;
    out_.launches.clear();
  }

  // One launch of whatever `call` runs on the device it is given.
  void Add(const std::function<Status(const Device&)>& call, sync::Policy policy = sync::Policy::kMinimal,
           std::shared_ptr<const Tuning> tuning = nullptr) {
    if (!out_.skipped.empty()) return;
    trace::Record record;
    const Status status =
        call(Npu(chip_, {.with_data = false, .record = &record, .tuning = std::move(tuning)}));
    if (!status.ok()) return Skip(out_.group, status.message());
    sync::Plan plan = sync::PlanFlags(record, policy);
    out_.launches.push_back({std::move(record), std::move(plan)});
  }
  // The launch added last is of an Ascend C operator, whose tiling has so many bytes.
  void StartsSlowly(std::int64_t tiling_bytes = kUsualTiling) {
    if (!out_.skipped.empty()) return;
    const double numbers = static_cast<double>(std::max(tiling_bytes - kUsualTiling, std::int64_t{0})) / 8;
    out_.launches.back().before_us = kOperatorStart + numbers * chip_.scalar.read_gm / chip_.clock_hz * 1e6;
  }
  // The launch added last was timed in the cores.
  void LeavesOutLaunch() {
    if (!out_.skipped.empty()) return;
    RecordedLaunch& launch = out_.launches.back();
    launch.before_us = -trace::LaunchSeconds(launch.record, chip_) * 1e6;
  }
  // A launch of `kernel(core, inputs, outputs)` on all Vector cores; tensors are matrices.
  struct Operand {
    DType dtype;
    std::int64_t rows, cols;
    const void* data = nullptr;  // of integers
  };
  template <class Kernel>
  void AddVector(std::vector<Operand> inputs, std::vector<Operand> outputs, Kernel kernel) {
    Add([&](const Device& device) {
      Launch launch(device, row_.op.c_str());
      std::vector<Gm> in, out;
      for (const Operand& o : inputs)
        in.push_back(MatrixOf(*launch.Input("in", ConstTensor(o.data, o.dtype, {o.rows, o.cols}))));
      for (const Operand& o : outputs)
        out.push_back(MatrixOf(*launch.Output("out", Tensor(nullptr, o.dtype, {o.rows, o.cols}))));
      launch.OnVectorCores(chip_.cube_cores * chip_.vector_per_cube,
                           [&](auto& core) { kernel(core, in, out); });
      return launch.Finish(nullptr);
    });
  }
  void AddStream(std::vector<Operand> inputs, std::vector<Operand> outputs, const Arithmetic& work) {
    AddVector(std::move(inputs), std::move(outputs), [work](auto& core, const auto& in, const auto& out) {
      ElementwiseKernel(core, in, out, work);
    });
  }

  // ---- Products ----

  void Schedule() {
    out_.group = row_.op.starts_with("step") ? kKnownSchedules : "vendor GEMM";
    const std::int64_t m = shape(0)[0], n = shape(0)[1], k = shape(0)[2];
    if (TooLong({Tile(m), Tile(n), Tile(k)})) return;
    const DType in = DTypeOfName(dtype(0));
    if (out_.group != kKnownSchedules) return AddMatmul(m, n, k, in, /*transpose_b=*/true);
    out_.schedule = Schedule::kKnown;
    const std::string step = row_.op.substr(0, 5);
    MatmulSchedule s;
    if (step != "step1" && step != "step2" && step != "step3" && step != "step4")
      return Skip(out_.group, fmt::format("no schedule is known as '{}'", row_.op));
    s.stages = step == "step1" ? 1 : 2;
    s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), BlockOrder::kRowMajor, 1};
    if (step >= "step3") s.grid.order = BlockOrder::kSwizzled, s.grid.width = 5;
    const bool automatic = step != "step4";
    AddScheduled(m, n, k, /*transpose_b=*/true, s,
                 automatic ? sync::Policy::kPerTile : sync::Policy::kMinimal);
    if (automatic && out_.skipped.empty()) AddLoopEdges();
  }

  // What a compiler's flags do at the edge of a loop: the first load of a K block waits for the whole block before.
  void AddLoopEdges() {
    auto& [record, plan, before_us] = out_.launches.back();
    for (std::size_t p = 0; p < record.phases.size(); ++p) {
      for (std::size_t c = 0; c < record.phases[p].cores.size(); ++c)
        AddLoopEdges(record.phases[p].cores[c], &plan.phases[p].cores[c]);
    }
  }
  static void AddLoopEdges(const trace::CoreRecord& core, sync::CorePlan* plan) {
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

  void AddMatmul(std::int64_t m, std::int64_t n, std::int64_t k, DType in, bool transpose_b) {
    MatmulArgs args;
    args.a = ConstTensor(nullptr, in, {m, k});
    args.b = transpose_b ? ConstTensor(nullptr, in, {n, k}) : ConstTensor(nullptr, in, {k, n});
    args.transpose_b = transpose_b;
    args.c = Tensor(nullptr, in, {m, n});
    const auto call = [args](const Device& device, Profile* profile) {
      return Matmul(device, args, profile);
    };
    AddTuned(call, "prefetch=0");
    // Well scheduled: the best of the library's own choice, of that with the guide's blocks turned round, and of the best of
    // the known schedules in two orders.
    KeepBetter([&] { AddTuned(call, "prefetch=0,m=256,n=128"); });
    for (const std::int64_t width : {0, 5}) {
      MatmulSchedule s;
      s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), width > 0 ? BlockOrder::kSwizzled : BlockOrder::kRowMajor,
                std::max<std::int64_t>(width, 1)};
      if (SizeOf(in) == 2) KeepBetter([&] { AddScheduled(m, n, k, transpose_b, s, sync::Policy::kMinimal); });
    }
  }

  // What `add` adds in place of what there is, if it is quicker.
  template <class Add>
  void KeepBetter(const Add& add) {
    if (!out_.skipped.empty()) return;
    std::vector<RecordedLaunch> before;
    before.swap(out_.launches);
    add();
    if (out_.skipped.empty() && PredictedUs(out_.launches, chip_) < PredictedUs(before, chip_)) return;
    out_.skipped.clear();
    out_.launches = std::move(before);
  }

  // A call with the best tilings of those that have `fields`, or the one that has all of its own there. The vendor's
  // products leave their Vector cores idle: nothing is read ahead.
  void AddTuned(const Call& call, const std::string& fields) {
    std::vector<TilingChoice> choices;
    if (const Status status = MeetChoices(call, chip_, {}, &choices); !status.ok())
      return Skip(out_.group, status.message());
    auto tuning = std::make_shared<Tuning>();
    for (const TilingChoice& choice : choices) tuning->Set(choice.kernel, choice.chip, choice.shape, fields);
    Add([&](const Device& device) { return call(device, nullptr); }, sync::Policy::kMinimal, tuning);
  }

  // Of fp16, which costs what bf16 does.
  void AddScheduled(std::int64_t m, std::int64_t n, std::int64_t k, bool transpose_b, const MatmulSchedule& s,
                    sync::Policy policy, DType out = DType::kF16) {
    Add(
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

  void Gemm() {
    out_.group = "vendor GEMM";
    if (!HasRank(0, 2) || !HasRank(1, 2)) return;
    const std::int64_t m = shape(0)[0], n = shape(1)[1], k = shape(0)[1];
    if (k != shape(1)[0]) return Skip(out_.group, fmt::format("a has {} columns, b {} rows", k, shape(1)[0]));
    if (TooLong({Tile(m), Tile(n), Tile(k)})) return;
    AddMatmul(m, n, k, DTypeOfName(dtype(0)), false);
  }

  // asc-devkit's products: a core has a rectangle of blocks of 128 x 256, or they go along the diagonals of a band.
  void CoreMatmul() {
    out_.group = kCoreProducts;
    if (!HasRank(0, 2) || !HasRank(1, 2)) return;
    const std::int64_t m = shape(0)[0], n = shape(1)[1], k = shape(0)[1];
    if (TooLong({Tile(m), Tile(n), Tile(k)})) return;
    MatmulSchedule s;
    s.grid = {CeilDiv(m, s.m), CeilDiv(n, s.n), BlockOrder::kRowMajor, 1};
    s.core_rows = row_.attrs.value("core_rows", std::int64_t{0});
    s.core_cols = row_.attrs.value("core_cols", std::int64_t{0});
    s.stagger = attribute("stagger");
    if (s.core_rows <= 0 || s.core_cols <= 0) {
      s.core_rows = 0;
      s.grid.order = BlockOrder::kDiagonal;
      s.grid.width = std::max<std::int64_t>(row_.attrs.value("band", std::int64_t{1}), 1);
    } else if (s.grid.rows % s.core_rows != 0 || s.grid.cols % s.core_cols != 0) {
      return Skip(out_.group, "the grid is no whole number of rectangles");
    }
    if (s.core_rows > 0 && s.tasks() > chip_.cube_cores)
      return Skip(out_.group,
                  fmt::format("{} rectangles, and the chip has {} cores", s.tasks(), chip_.cube_cores));
    AddScheduled(m, n, k, /*transpose_b=*/false, s, sync::Policy::kMinimal, DType::kF32);
    if (attribute("in_core")) return LeavesOutLaunch();
    StartsSlowly();
    // Called by Vector cores, which do nothing else.
    if (out_.skipped.empty()) out_.launches.back().before_us += chip_.sync.mixed_launch_s * 1e6;
  }

  // Reads into one buffer, with no flag between them: nobody looks at what is there.
  void ReadGm() {
    out_.group = kReads;
    out_.schedule = Schedule::kKnown;
    if (!HasRank(0, 2)) return;
    Reads r{.rows = row_.attrs.value("tile_rows", std::int64_t{0}),
            .cols = row_.attrs.value("tile_cols", std::int64_t{0}),
            .slices = row_.attrs.value("slices", std::int64_t{1}),
            .repeats = row_.attrs.value("repeats", std::int64_t{1})};
    if (r.rows <= 0 || r.cols <= 0 || r.slices <= 0 || r.repeats <= 0)
      return Skip(out_.group, "tile_rows, tile_cols, slices and repeats are numbers above 0");
    const std::string whose = row_.attrs.value("rows", std::string("own"));
    r.whose = whose == "own" ? ReadRows::kOwn : whose == "all" ? ReadRows::kAll : ReadRows::kAllFromOwn;
    const bool ub = row_.attrs.value("to", std::string("UB")) == "UB";
    Add([&](const Device& device) {
      Launch launch(device, "read_gm");
      const Gm matrix =
          MatrixOf(*launch.Input("in", ConstTensor(nullptr, DType::kF16, {shape(0)[0], shape(0)[1]})));
      if (ub) {
        launch.OnVectorCores(chip_.cube_cores * chip_.vector_per_cube,
                             [&](auto& core) { ReadIntoUb(core, matrix, r); });
      } else {
        launch.OnAiCores(chip_.cube_cores, [&](auto& core) { ReadIntoL1(core, matrix, r); });
      }
      return launch.Finish(nullptr);
    });
    if (!out_.skipped.empty()) return;
    for (sync::PhasePlan& phase : out_.launches.back().plan.phases) {
      for (sync::CorePlan& core : phase.cores) core.ops.clear();
    }
    LeavesOutLaunch();
  }

  void Grouped() {
    out_.group = "grouped matmul";
    if (!HasRank(0, 2) || !HasRank(1, 3)) return;
    const bool transposed = attribute("transpose_weight");
    const auto list = row_.attrs.find("group_list");
    if (list == row_.attrs.end() || !list->is_array()) return Skip(out_.group, "attrs has no group_list");
    std::vector<std::int32_t> ends;
    for (const auto& end : *list) {
      if (!end.is_number_integer())
        return Skip(out_.group, "group_list holds something that is not a number");
      ends.push_back(end);
    }
    const DType in = DTypeOfName(dtype(0));
    const Shape& w = shape(1);
    if (TooLong({shape(0)[0], w[1], w[2]})) return;
    GroupedMatmulArgs args;
    args.x = ConstTensor(nullptr, in, {shape(0)[0], shape(0)[1]});
    args.groups = ConstTensor(ends.data(), {static_cast<std::int64_t>(ends.size())});
    args.group_list = GroupList::kEnds;
    args.weights = ConstTensor(nullptr, in, {w[0], w[1], w[2]});
    args.transpose_weights = transposed;
    args.out = Tensor(nullptr, in, {shape(0)[0], transposed ? w[1] : w[2]});
    const auto call = [args](const Device& device, Profile* profile) {
      return GroupedMatmul(device, args, profile);
    };
    AddTuned(call, "prefetch=0");
    StartsSlowly();
    out_.schedule = Schedule::kUnknown;
  }

  // ---- Attention: (B, S, N, D), or (B, N, S, D) ----

  void Attention() {
    out_.group = "attention";
    const bool mla = row_.op == "mla";
    for (std::size_t i = 0; i < (mla ? 5u : 3u); ++i) {
      if (!HasRank(i, 4)) return;
    }
    const bool heads_first = row_.attrs.value("inputLayout", std::string("BSND")) == "BNSD";
    const std::size_t s_at = heads_first ? 2 : 1, n_at = heads_first ? 1 : 2;
    const DType in = DTypeOfName(dtype(0));
    const auto view = [&](const Shape& x) {
      const std::int64_t b = x[0], s = x[s_at], n = x[n_at], d = x[3];
      return heads_first ? ConstTensor(nullptr, in, {b, n, s, d})
                         : ConstTensor(nullptr, in, {b, n, s, d}, {s * n * d, d, n * d, 1});
    };
    FlashAttentionArgs args;
    args.q = view(shape(0));
    args.k = view(shape(mla ? 2 : 1));
    args.v = view(shape(mla ? 4 : 2));
    if (TooLong({args.q.size(0), args.q.size(1), args.q.size(2), args.k.size(2),
                 args.q.size(3) + args.v.size(3)}))
      return;
    if (mla) args.q_rope = view(shape(1)), args.k_rope = view(shape(3));
    const std::int64_t group = args.k.size(1) > 0 ? args.q.size(1) / args.k.size(1) : 0;
    // Heads that share keys are rows of one matrix, as fused kernels have it for few queries. A causal mask is
    // left out: the vendor's kernel, given one without a sparse mode, computes what it hides (rows mha 7 and 9).
    if (group > 1 && args.q.size(2) <= 16) {
      for (ConstTensor* q : {&args.q, &args.q_rope}) {
        if (!q->given()) continue;
        *q = ConstTensor(nullptr, in, {q->size(0), args.k.size(1), group * q->size(2), q->size(3)});
      }
    }
    args.out = Tensor(nullptr, in, {args.q.size(0), args.q.size(1), args.q.size(2), args.v.size(3)});
    if (const std::int64_t block = row_.attrs.value("block_q", std::int64_t{0}); block > 0)
      return AttentionOfBlocks(args, block);
    Add([&](const Device& device) { return FlashAttention(device, args); });
    StartsSlowly(kAttentionTiling);
    out_.schedule = Schedule::kUnknown;
  }

  // pto-isa's kernels: a core takes a block of so many queries through all keys, loads, scores and weights have double
  // buffers, and the scores of the next blocks of keys come first. 128 keys at a time: theirs, 256 in two halves, would leave
  // no room in L0C here. Compiled for their shapes, they start at once.
  void AttentionOfBlocks(const FlashAttentionArgs& args, std::int64_t block) {
    out_.group = kKnownBlocks;
    out_.other_schedule = kOtherAttention;
    AddTuned(
        [args](const Device& device, Profile* profile) { return FlashAttention(device, args, profile); },
        fmt::format(
            "m={0},strip={0},n=128,k0=64,depth=2,kv_splits=1,v_parts=1,key_step=16,kv_stages=2,l0_stages=2,"
            "l0c_stages=1,s_stages=2,ub_stages=1,q_stages=1,pack_kv=0,by_head=0,mask_step=0",
            block));
  }

  // ---- Memory-bound operators ----

  void Elementwise() {
    out_.group = kMemoryBound;
    if (is_int64()) return Skip(out_.group, "the Vector core has no int64 arithmetic");
    for (const Shape& operand : row_.shapes) {
      if (operand.empty()) return Skip(out_.group, "an operand has no dimensions");
    }
    const Shape& largest =
        *std::max_element(row_.shapes.begin(), row_.shapes.end(),
                          [](const Shape& x, const Shape& y) { return Count(x) < Count(y); });
    const Operand all{DTypeOfName(dtype(0)), 1, Count(largest)};
    // sigmoid: 1 / (1 + exp(-x)); gelu by tanh: x / (1 + exp(-|y|)) * exp(min(y, 0)), y = 1.6 x + 0.07 x^3.
    static const std::map<std::string, Arithmetic> works = {
        {"sigmoid", {2, 0, 1, 1}}, {"gelu", {5, 4, 2, 1}}, {"relu", {1, 0, 0, 0}}, {"maximum", {0, 1, 0, 0}}};
    const Shape& last = row_.shapes.back();
    if (row_.shapes.size() == 2 && Count(last) < Count(largest)) return Broadcast(largest, last);
    AddStream(std::vector<Operand>(row_.shapes.size(), all), {all}, works.at(row_.op));
  }

  // One row for all rows, or a number for each of some of them.
  void Broadcast(const Shape& shape, const Shape& other) {
    const DType in = DTypeOfName(dtype(0));
    const std::int64_t cols = shape.back(), rows = Count(shape) / std::max<std::int64_t>(cols, 1);
    const bool row = Count(other) == cols && other.back() == cols;
    if (!row && (other.back() != 1 || Count(other) == 0 || rows % Count(other) != 0))
      return Skip(out_.group, "the second operand is neither a row nor a column");
    const Operand all{in, rows, cols};
    AddVector({all, row ? Operand{in, 1, cols} : Operand{in, Count(other), 1}}, {all},
              [](auto& core, const auto& from, const auto& to) {
                BroadcastMaxKernel(core, from[0], from[1], to[0]);
              });
  }

  void SwiGluRow() {
    out_.group = kMemoryBound;
    const Shape& x = shape(0);
    std::int64_t dim = row_.attrs.value("dim", std::int64_t{-1});
    dim = dim < 0 ? dim + static_cast<std::int64_t>(x.size()) : dim;
    if (dim < 0 || dim >= static_cast<std::int64_t>(x.size()))
      return Skip(out_.group, "dim is not one of the tensor's");
    const DType in = DTypeOfName(dtype(0));
    if (row_.kernels.find("Slice") != std::string::npos) {
      const Operand all{in, 1, Count(x)};
      AddStream({all}, {all}, {});
    }
    std::int64_t outer = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) outer *= x[d];
    const std::int64_t inner = Count(x) / std::max<std::int64_t>(outer, 1) / 2;
    AddVector({{in, outer, 2 * inner}}, {{in, outer, inner}},
              [](auto& core, const auto& from, const auto& to) {
                HalvesKernel(core, from[0], to[0], {2, 1, 1, 1});
              });
    StartsSlowly();
    out_.schedule = Schedule::kUnknown;
  }

  void RmsNormRow() {
    out_.group = kMemoryBound;
    const DType in = DTypeOfName(dtype(0));
    const std::int64_t h = shape(0).back(), t = Count(shape(0)) / std::max<std::int64_t>(h, 1);
    AddVector({{in, t, h}, {in, 1, h}}, {{in, t, h}}, [](auto& core, const auto& from, const auto& to) {
      RmsNormRowsKernel(core, from[0], from[1], to[0]);
    });
    StartsSlowly();
    out_.schedule = Schedule::kUnknown;
  }

  void ReRouting() {
    out_.group = kMemoryBound;
    if (!HasRank(0, 2) || !HasRank(1, 2)) return;
    // Rows are moved, whatever they hold: 4 bytes are a float.
    const std::int64_t rows = shape(0)[0], cols = CeilDiv(shape(0)[1] * BytesByName().at(dtype(0)), 4);
    const std::int64_t segments = std::max<std::int64_t>(shape(1)[0] * shape(1)[1], 1);
    if (segments * 8 > kUbBytes / 2) return Skip(out_.group, "the counts do not fit UB");
    std::vector<Operand> in{{DType::kF32, rows, cols}}, out{{DType::kF32, rows, cols}};
    const bool scales = !shape(2).empty();
    for (int c = 0; c < (scales ? 2 : 1); ++c) {  // the scale and the index of a row
      in.push_back({DType::kF32, 1, rows});
      out.push_back({DType::kF32, 1, rows});
    }
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(segments), 0);
    in.push_back({DType::kI32, 1, segments, counts.data()});
    const int words = dtype(1) == "int64" ? 2 : 1;
    AddVector(in, out, [words](auto& core, const auto& from, const auto& to) {
      std::vector<Gm> columns;
      for (std::size_t c = 1; c < to.size(); ++c) columns.push_back(from[c]), columns.push_back(to[c]);
      MoveSegmentsKernel(core, from[0], to[0], columns, from.back(), words);
    });
    StartsSlowly();
  }

  void FinalizeRow() {
    out_.group = kMemoryBound;
    const bool skips = shape(2).size() == 2;
    if (!HasRank(0, 2)) return;
    const DType in = DTypeOfName(dtype(0));
    const std::int64_t h = shape(0)[1];
    const std::int64_t tokens = skips ? shape(2)[0] : shape(0)[0];
    const bool biased = shape(4).size() == 2;
    const Operand rows{in, tokens, h};
    std::vector<Operand> inputs{{in, shape(0)[0], h}};
    if (biased) inputs.push_back({in, shape(4)[0], h});
    for (std::size_t s = 2; s < 4; ++s) {
      if (shape(s).size() == 2) inputs.push_back(rows);
    }
    const std::int64_t top_k = std::max<std::int64_t>(shape(0)[0] / std::max<std::int64_t>(tokens, 1), 1);
    AddVector(inputs, {rows}, [&](auto& core, const auto& from, const auto& to) {
      Finalize g;
      g.expanded = from[0], g.out = to[0], g.top_k = top_k;
      std::size_t next = 1;
      if (biased) g.bias = from[next++];
      g.skips.assign(from.begin() + static_cast<std::ptrdiff_t>(next), from.end());
      FinalizeKernel(core, g);
    });
    StartsSlowly();
    out_.schedule = Schedule::kUnknown;
  }

  // ---- Others ----

  void Softmax() {
    out_.group = "other vector";
    out_.schedule = Schedule::kUnknown;
    const Shape& x = shape(0);
    std::int64_t dim = row_.attrs.value("dim", std::int64_t{-1});
    if (dim < 0) dim += static_cast<std::int64_t>(x.size());
    if (dim < 0 || dim >= static_cast<std::int64_t>(x.size()))
      return Skip(out_.group, "dim is not one of the tensor's");
    const DType in = DTypeOfName(dtype(0));
    std::int64_t outer = 1, inner = 1;
    for (std::size_t d = 0; d < x.size(); ++d) {
      if (static_cast<std::int64_t>(d) < dim) outer *= x[d];
      if (static_cast<std::int64_t>(d) > dim) inner *= x[d];
    }
    const std::int64_t length = x[static_cast<std::size_t>(dim)];
    if ((inner == 1 ? length : 8 * length) * 8 > kUbBytes)
      return Skip(out_.group, fmt::format("{} numbers of a softmax do not fit UB", length));
    if (inner == 1) {
      const Operand all{in, outer, length};
      return AddVector({all}, {all}, [](auto& core, const auto& from, const auto& to) {
        SoftmaxKernel(core, from[0], to[0]);
      });
    }
    const Operand all{in, outer * length, inner};
    AddVector({all}, {all}, [length](auto& core, const auto& from, const auto& to) {
      ColumnSoftmaxKernel(core, from[0], to[0], length);
    });
  }

  void Transpose() {
    out_.group = "other vector";
    out_.schedule = Schedule::kUnknown;
    if (!HasRank(0, 2)) return;
    // An int64 is two floats.
    const std::int64_t parts = is_int64() ? 2 : 1;
    const DType in = is_int64() ? DType::kF32 : DTypeOfName(dtype(0));
    const Operand from{in, shape(0)[0], shape(0)[1] * parts}, to{in, shape(0)[1], shape(0)[0] * parts};
    AddVector({from}, {to}, [parts](auto& core, const auto& in, const auto& out) {
      TransposeKernel(core, in[0], out[0], parts);
    });
  }

  void InitRoutingRow() {
    out_.group = "other vector";
    out_.schedule = Schedule::kUnknown;
    if (!HasRank(0, 2) || !HasRank(1, 2)) return;
    const std::int64_t tokens = shape(0)[0], h = shape(0)[1], slots = tokens * shape(1)[1];
    const DType in = DTypeOfName(dtype(0));
    // Int8 is not one of our types: a row is stored as so many floats.
    const std::int64_t quant = row_.attrs.value("quant_mode", std::int64_t{-1});
    const Operand ids{DType::kF32, 1, slots}, x{in, tokens, h},
        out{quant < 0 ? in : DType::kF32, KeptSlots(slots), quant < 0 ? h : CeilDiv(h, 4)};
    Add([&](const Device& device) {
      Launch launch(device, row_.op.c_str());
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
      const std::int64_t cores = chip_.cube_cores * chip_.vector_per_cube;
      constexpr std::int64_t kOneCoreSorts = 6144;  // ids that UB has room to sort
      const bool one = slots <= kOneCoreSorts;
      if (!one)
        launch.OnVectorCores(cores, [&](auto& core) { SortSlotsKernel(core, g.ids, g.sorted, cores); });
      launch.OnVectorCores(1, [&](auto& core) { SortSlotsKernel(core, g.ids, g.sorted, 1); });
      launch.OnVectorCores(one ? 1 : cores, [&](auto& core) { CountSlotsKernel(core, g.sorted, g.places); });
      if (row_.attrs.value("drop_pad_mode", std::int64_t{0}) == 1)
        launch.OnVectorCores(cores, [&](auto& core) { ClearSlotsKernel(core, g.out); });
      launch.OnVectorCores(cores, [&](auto& core) { GatherSlotsKernel(core, g); });
      return launch.Finish(nullptr);
    });
    if (slots > 0) StartsSlowly();
  }

  // Slots whose rows are gathered: those of the experts in range, to the number that is active.
  std::int64_t KeptSlots(std::int64_t slots) const {
    const std::int64_t experts = std::max<std::int64_t>(row_.attrs.value("expert_num", std::int64_t{1}), 1);
    std::int64_t kept = slots;
    const auto range = row_.attrs.find("active_expert_range");
    if (range != row_.attrs.end() && range->is_array() && range->size() == 2 &&
        (*range)[0].is_number_integer() && (*range)[1].is_number_integer()) {
      const std::int64_t in_range = (*range)[1].get<std::int64_t>() - (*range)[0].get<std::int64_t>();
      kept = slots * std::clamp<std::int64_t>(in_range, 0, experts) / experts;
    }
    const std::int64_t active = row_.attrs.value("active_num", std::int64_t{-1});
    return active > 0 ? std::min(kept, active) : kept;
  }

  // The kernels that the row lists, one launch each: tables are put together, spread over the batch, and applied.
  void Rotary() {
    out_.group = "other vector";
    out_.schedule = Schedule::kUnknown;
    if (!HasRank(0, 4) || !HasRank(2, 2)) return;
    const DType in = DTypeOfName(dtype(0));
    const Shape& q = shape(0);
    const Shape& table_shape = shape(2);
    const std::int64_t tokens = q[0] * q[1], heads = q[2] * q[3];
    const Operand half{in, table_shape[0], table_shape[1]}, table{in, table_shape[0], 2 * table_shape[1]},
        flat_table{in, 1, 2 * Count(table_shape)}, flat{in, 1, tokens * q[3]}, rows{in, tokens, q[3]},
        all{in, tokens, heads};
    const auto times = [&](std::string_view kernel) {
      const std::size_t at = row_.kernels.find(kernel);
      const std::size_t digit = at == std::string::npos ? at : row_.kernels.find_first_of("0123456789", at);
      return digit == std::string::npos ? 0 : row_.kernels[digit] - '0';
    };
    for (int i = 0; i < times("ConcatD") + times("RepeatInterleave"); ++i) {
      AddVector({half}, {table},
                [](auto& core, const auto& from, const auto& to) { TwiceKernel(core, from[0], to[0]); });
    }
    for (int i = 0; i < times("BroadcastTo"); ++i) AddStream({flat_table}, {flat}, {});
    AddVector({all, all, rows, rows}, {all, all},
              [](auto& core, const auto& from, const auto& to) { RotaryKernel(core, from, to); });
    StartsSlowly();
  }

  const MeasuredRow& row_;
  const ChipSpec& chip_;
  Recorded out_;
};

}  // namespace

Interval IntervalOf(Recorded& recorded, const ChipSpec& chip, double us) {
  Interval all = IntervalOf(recorded.launches, chip, us);
  if (recorded.schedule == Schedule::kKnown) return all;
  double before = 0, starts = 0, launching = 0;
  for (const RecordedLaunch& launch : recorded.launches) {
    before += launch.before_us, launching += trace::LaunchSeconds(launch.record, chip) * 1e6;
    if (launch.before_us > 0) starts += 1;
  }
  const double scheduled = us - before - launching, other = recorded.other_schedule;
  all = Together(us, all, {us - scheduled * other / (1 + other), us + scheduled * other});
  if (recorded.schedule == Schedule::kStandard) {
    const double spread = starts * kStandardStart;
    return Together(us, all, {us - spread, us + spread});
  }
  all = Together(us, all, {us - before, us + starts * kOperatorStart * kOperatorStart.spread});
  return Together(us, all, AnySchedule(recorded.launches, chip));
}

Recorded RecordRow(const MeasuredRow& row, const ChipSpec& chip) { return RowRecorder(row, chip).Run(); }

}  // namespace cubist
