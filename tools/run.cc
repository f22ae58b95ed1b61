#include "tools/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <oneapi/tbb/info.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/host/tile_ops.h"
#include "tools/cases.h"
#include "tools/inputs.h"
#include "tools/npy.h"
#include "tools/progress.h"
#include "tools/table.h"
#include "tools/workload.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// `--quick` divides the tokens once more, and repeats and checks less.
constexpr std::int64_t kQuickTokenScale = 8;
constexpr double kReferenceProducts = 5e8, kQuickReferenceProducts = 1e8;

struct Repetitions {
  int least, most;
  double seconds;  // enough, once there were `least`
};
constexpr Repetitions kRepetitions = {5, 25, 0.4}, kQuickRepetitions = {3, 5, 0.1};

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- What to run ----

struct Plan {
  ScaledWorkload scaled;
  ChipSpec chip;
  int threads = 1;
  std::vector<Case> cases;
  std::vector<Skew> routings;
  std::map<std::string, std::string> timelines;  // file of a case
};

Status ParseRouting(const std::string& routing, std::vector<Skew>* routings) {
  if (routing == "both") *routings = {Skew::kSkewed, Skew::kUniform};
  if (routing == "skewed") *routings = {Skew::kSkewed};
  if (routing == "uniform") *routings = {Skew::kUniform};
  if (!routings->empty()) return {};
  return InvalidArgument(fmt::format("--routing is '{}'; known are skewed, uniform, both", routing));
}

std::string CaseNames(const std::vector<Case>& cases) {
  std::vector<std::string> names;
  for (const Case& c : cases) names.push_back(c.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

bool HasCase(const std::vector<Case>& cases, const std::string& name) {
  return std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; });
}

Status KeepOnly(const std::vector<std::string>& only, std::vector<Case>* cases) {
  for (const std::string& name : only) {
    if (!HasCase(*cases, name)) {
      return InvalidArgument(fmt::format("--only is '{}'; known are {}", name, CaseNames(*cases)));
    }
  }
  if (only.empty()) return {};
  std::erase_if(*cases, [&](const Case& c) { return std::find(only.begin(), only.end(), c.name) == only.end(); });
  return {};
}

// A file that will be written must have a folder to stand in.
Status CheckWritable(const char* option, const std::string& file) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::path(file).parent_path();
  if (folder.empty()) folder = ".";
  if (!std::filesystem::is_directory(folder, error)) {
    return InvalidArgument(fmt::format("{} {}: there is no folder {}", option, file, folder.string()));
  }
  if (std::filesystem::is_directory(file, error)) {
    return InvalidArgument(fmt::format("{} {}: is a folder, expected a file", option, file));
  }
  const bool exists = std::filesystem::exists(file, error);
  if (access(exists ? file.c_str() : folder.c_str(), W_OK) != 0) {
    return InvalidArgument(fmt::format("{} {}: may not be written", option, file));
  }
  return {};
}

Status CheckOutputs(const RunOptions& options, Plan* plan) {
  if (!options.json.empty()) CUBIST_RETURN_IF_ERROR(CheckWritable("--json", options.json));
  for (const std::string& timeline : options.timelines) {
    const std::size_t equals = timeline.find('=');
    if (equals == std::string::npos || equals + 1 == timeline.size()) {
      return InvalidArgument(fmt::format("--timeline is '{}', expected case=file.json", timeline));
    }
    const std::string name = timeline.substr(0, equals), file = timeline.substr(equals + 1);
    if (!HasCase(plan->cases, name)) {
      return InvalidArgument(
          fmt::format("--timeline: no case is named '{}'; known are {}", name, CaseNames(plan->cases)));
    }
    CUBIST_RETURN_IF_ERROR(CheckWritable("--timeline", file));
    plan->timelines[name] = file;
  }
  return {};
}

double CaseBytes(const Case& c) {
  double bytes = 0;
  for (const auto* specs : {&c.inputs, &c.outputs}) {
    for (const TensorSpec& spec : *specs) {
      // 2^62 stands for a size that does not even fit 63 bits.
      const std::int64_t tensor = BytesOf(spec.dtype, spec.shape);
      bytes += tensor < 0 ? 0x1p62 : static_cast<double>(tensor);
    }
  }
  return bytes;
}

Status CheckMemory(const std::vector<Case>& cases) {
  const double machine = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  for (const Case& c : cases) {
    if (const double bytes = CaseBytes(c); bytes > machine) {
      return InvalidArgument(
          fmt::format("{} takes {:.1f} GiB of tensors, this machine has {:.1f} GiB; --scale and --head-scale divide "
                      "tokens and heads further",
                      c.name, bytes / 0x1p30, machine / 0x1p30));
    }
  }
  return {};
}

Status MakePlan(const RunOptions& options, Plan* plan) {
  Workload workload;
  CUBIST_RETURN_IF_ERROR(LoadWorkload(options.workload, WorkloadFolders(), &workload));
  CUBIST_RETURN_IF_ERROR(FindChip(options.chip, &plan->chip));
  CUBIST_RETURN_IF_ERROR(ParseRouting(options.routing, &plan->routings));
  const std::int64_t quick_scale = options.quick ? kQuickTokenScale : 1;
  plan->scaled = Scale(workload, options.token_scale.value_or(workload.run.token_scale * quick_scale),
                       options.head_scale.value_or(workload.run.head_scale));
  plan->threads = options.threads > 0 ? options.threads : oneapi::tbb::info::default_concurrency();
  plan->cases = MakeCases(plan->scaled, plan->routings);
  CUBIST_RETURN_IF_ERROR(KeepOnly(options.only, &plan->cases));
  CUBIST_RETURN_IF_ERROR(CheckOutputs(options, plan));
  return CheckMemory(plan->cases);
}

// ---- Running one case ----

struct Tensors {
  std::vector<OwnedTensor> inputs, outputs;

  Tensors(const Case& c, const Inputs& source) {
    for (const TensorSpec& spec : c.inputs) inputs.push_back(source.Make(spec));
    for (const TensorSpec& spec : c.outputs) outputs.emplace_back(spec.dtype, spec.shape);
  }
  std::vector<ConstTensor> InputViews() const {
    std::vector<ConstTensor> views;
    for (const OwnedTensor& tensor : inputs) views.push_back(tensor.view());
    return views;
  }
  std::vector<Tensor> OutputViews() {
    std::vector<Tensor> views;
    for (OwnedTensor& tensor : outputs) views.push_back(tensor.view());
    return views;
  }
  std::uint64_t Digest() const {
    std::uint64_t digest = 0;
    for (const OwnedTensor& tensor : outputs) digest = digest * 0x100000001b3u + tensor.Digest();
    return digest;
  }
};

struct Row {
  const Case* kernel_case = nullptr;
  std::vector<double> seconds;  // of each timed run, ascending
  double floor_s = 0;           // what the ceilings allow at best
  bool memory_bound = false;    // which of them
  Comparison comparison;
  std::uint64_t check_seed = 0;
  Profile profile;
  std::vector<std::string> problems;

  double median() const { return seconds[seconds.size() / 2]; }
  double share() const { return floor_s / median(); }
  bool ok() const { return problems.empty(); }
};

class Runner {
 public:
  Runner(const RunOptions& options, const Plan& plan, const Inputs& inputs)
      : options_(options), plan_(plan), inputs_(inputs), progress_(stderr), host_(Host({.threads = plan.threads})) {}

  int RunAll();

 private:
  Status RunCase(const Case& c, Row* row);
  Status Model(const Case& c, Tensors& tensors, Row* row);
  Status Compute(const Case& c, Tensors& tensors, Row* row);
  void Check(const Case& c, Tensors& tensors, Row* row);
  Status WriteResults(const Case& c, Tensors& tensors) const;
  // Ceilings wander with the neighbours' load: those that a row is held against are measured beside it. For arithmetic
  // the highest ever seen counts, for memory the latest.
  void RefreshCeilings(const Case& c);
  void SetFloor(const Case& c, Row* row) const;
  double& PeakOf(DType dtype) { return dtype == DType::kBF16 ? ceilings_.dot_bf16_flops : ceilings_.fma_flops; }
  double PeakOf(DType dtype) const {
    return dtype == DType::kBF16 ? ceilings_.dot_bf16_flops : ceilings_.fma_flops;
  }
  double ComputeFloor(const Case& c) const { return c.flops / PeakOf(c.dtype); }
  double MemoryFloor(const Case& c) const { return MemoryFloorSeconds(ceilings_, c.bytes_read, c.bytes_written); }

  void Show(const Case& c, const char* what);
  void PrintHeader() const;
  void PrintRow(const Row& row);
  int Finish(double seconds);

  const RunOptions& options_;
  const Plan& plan_;
  const Inputs& inputs_;
  Progress progress_;
  Device host_;
  Ceilings ceilings_;
  std::vector<Row> rows_;
};

void Runner::Show(const Case& c, const char* what) {
  const auto index = static_cast<std::size_t>(&c - plan_.cases.data()) + 1;
  progress_.Show(fmt::format("[{}/{}] {}: {}", index, plan_.cases.size(), c.name, what));
}

// Index tensors steer the kernels and stay; floats have no part in timing.
template <class Void>
std::vector<BasicTensor<Void>> WithoutFloats(std::vector<BasicTensor<Void>> tensors) {
  for (auto& tensor : tensors) {
    if (IsFloat(tensor.dtype)) tensor.data = nullptr;
  }
  return tensors;
}

Status Runner::Model(const Case& c, Tensors& tensors, Row* row) {
  const auto timeline = plan_.timelines.find(c.name);
  const bool wanted = timeline != plan_.timelines.end();
  const Device npu = Npu(plan_.chip, {.with_data = false, .timeline = wanted});
  CUBIST_RETURN_IF_ERROR(
      c.run(npu, WithoutFloats(tensors.InputViews()), WithoutFloats(tensors.OutputViews()), &row->profile));
  return wanted ? row->profile.WriteTimeline(timeline->second) : Status();
}

// Every output begins as marks; after the first run none may be left. The timed runs must give the same bits again.
Status Runner::Compute(const Case& c, Tensors& tensors, Row* row) {
  for (OwnedTensor& output : tensors.outputs) output.Mark();
  const auto inputs = tensors.InputViews();
  const auto outputs = tensors.OutputViews();
  CUBIST_RETURN_IF_ERROR(c.run(host_, inputs, outputs, nullptr));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (const std::int64_t marked = tensors.outputs[i].CountMarked(); marked > 0) {
      row->problems.push_back(fmt::format("{} of {} elements of {} were not written", marked,
                                          tensors.outputs[i].count(), c.outputs[i].name));
    }
  }
  const std::uint64_t first_digest = tensors.Digest();

  const Repetitions& wanted = options_.quick ? kQuickRepetitions : kRepetitions;
  double total = 0;
  for (int runs = 0; runs < wanted.least || (runs < wanted.most && total < wanted.seconds); ++runs) {
    const auto start = Clock::now();
    CUBIST_RETURN_IF_ERROR(c.run(host_, inputs, outputs, nullptr));
    row->seconds.push_back(SecondsSince(start));
    total += row->seconds.back();
  }
  std::sort(row->seconds.begin(), row->seconds.end());

  if (tensors.Digest() != first_digest) row->problems.push_back("two runs gave different bits");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!tensors.outputs[i].GuardsIntact()) {
      row->problems.push_back(fmt::format("memory beside {} was overwritten", c.outputs[i].name));
    }
  }
  return {};
}

void Runner::Check(const Case& c, Tensors& tensors, Row* row) {
  std::random_device device;
  row->check_seed = options_.check_seed.value_or(std::uint64_t{device()} << 32 | device());
  const double products = options_.quick ? kQuickReferenceProducts : kReferenceProducts;
  row->comparison =
      c.check(tensors.InputViews(), tensors.OutputViews(), products, StreamKey(row->check_seed, c.name));
  if (!row->comparison.ok()) {
    row->problems.push_back(fmt::format("{} of {} elements are beyond their bounds; {}", row->comparison.beyond,
                                        row->comparison.elements, row->comparison.first_beyond));
  }
}

Status Runner::WriteResults(const Case& c, Tensors& tensors) const {
  if (options_.output.empty()) return {};
  for (std::size_t i = 0; i < tensors.outputs.size(); ++i) {
    const std::string file = fmt::format("{}/{}.{}.npy", options_.output, c.name, c.outputs[i].name);
    CUBIST_RETURN_IF_ERROR(WriteNpy(file, tensors.outputs[i].view()));
  }
  return {};
}

void Runner::RefreshCeilings(const Case& c) {
  if (ComputeFloor(c) > MemoryFloor(c)) {
    double& peak = PeakOf(c.dtype);
    peak = std::max(peak, c.dtype == DType::kBF16 ? MeasurePeakDotBf16(plan_.threads) : MeasurePeakFma(plan_.threads));
  } else {
    ceilings_.read_bytes_per_s = MeasureStreamRead(plan_.threads);
    ceilings_.write_bytes_per_s = MeasureStreamWrite(plan_.threads);
    ceilings_.copy_bytes_per_s = MeasureStreamCopy(plan_.threads);
  }
}

void Runner::SetFloor(const Case& c, Row* row) const {
  row->memory_bound = MemoryFloor(c) >= ComputeFloor(c);
  row->floor_s = std::max(MemoryFloor(c), ComputeFloor(c));
}

Status Runner::RunCase(const Case& c, Row* row) {
  row->kernel_case = &c;
  Show(c, "generating inputs");
  Tensors tensors(c, inputs_);
  Show(c, "modelling");
  CUBIST_RETURN_IF_ERROR(Model(c, tensors, row));
  Show(c, "computing");
  RefreshCeilings(c);
  CUBIST_RETURN_IF_ERROR(Compute(c, tensors, row));
  SetFloor(c, row);
  Show(c, "checking against the reference");
  Check(c, tensors, row);
  return WriteResults(c, tensors);
}

// ---- Printing ----

Table MakeTable() {
  using Align = Column::Align;
  return Table({{"case", "", 18, Align::kLeft},
                {"shape", "", 24, Align::kLeft},
                {"dtype", "", 5, Align::kLeft},
                {"host", "median", 7},
                {"rate", "", 11},
                {"share of", "ceiling", 8},
                {"error", "", 7},
                {"bound", "", 7},
                {"rows", "checked", 9},
                {"chip", "modelled", 7},
                {"Cube", "%", 4},
                {"Vec", "%", 3},
                {"MTE", "%", 3},
                {"verdict", "", 6, Align::kLeft}});
}

void Runner::PrintHeader() const {
  const ScaledWorkload& s = plan_.scaled;
  const Workload& w = s.workload;
  fmt::print("{}: {} layers ({} dense), hidden {}, {} heads of {}+{}/{}, {} experts, top {}, FFN {}\n", w.name, w.layers,
             w.dense_layers, w.hidden, w.attention.heads, w.attention.nope_dim, w.attention.rope_dim, w.attention.v_dim,
             w.moe.experts, w.moe.top_k, w.moe.ffn);
  fmt::print("scaled:  sequence {} / {} = {}, batch {}: {} tokens; heads {} / {} (tensor parallel) / {} = {}; every "
             "other dimension is true\n",
             w.training.sequence, s.token_scale, s.sequence, s.batch, s.tokens(), w.attention.heads,
             w.training.tensor_parallel, s.head_scale, s.heads);
  fmt::print("experts: {} of {} on this device, {} rows ({} tokens x {} / {})\n", s.local_experts(), w.moe.experts,
             s.expert_rows(), s.tokens(), w.moe.top_k, w.training.tensor_parallel);
  const CubeOps& cube = BestCubeOps();
  fmt::print("host:    {}{}, {} thread{}; fp32 {}, bf16 {}; memory: read {}, write {}, copy {}\n", cube.target,
             cube.native_bf16 ? " with native bf16" : "", plan_.threads, plan_.threads == 1 ? "" : "s",
             FormatPerSecond(ceilings_.fma_flops, "FLOP/s"), FormatPerSecond(ceilings_.dot_bf16_flops, "FLOP/s"),
             FormatPerSecond(ceilings_.read_bytes_per_s, "B/s"), FormatPerSecond(ceilings_.write_bytes_per_s, "B/s"),
             FormatPerSecond(ceilings_.copy_bytes_per_s, "B/s"));
  fmt::print("chip:    {}: {} Cube and {} Vector cores at {:.2f} GHz; times are predicted, not measured\n",
             plan_.chip.name, plan_.chip.cube_cores, plan_.chip.cube_cores * plan_.chip.vector_per_cube,
             plan_.chip.clock_hz.value / 1e9);
  fmt::print("seed:    {}\n", options_.seed);
  fmt::print("shapes:  Matmul MxNxK (in E: rows of E experts, one Matmul each); attention batch x heads x length "
             "nope+rope/v, causal;\n         permute tokens x hidden, experts per token of all experts\n\n");
  fmt::print("{}\n", MakeTable().Header());
  std::fflush(stdout);
}

std::string Percent(double share) { return fmt::format("{:.0f}", 100 * share); }

std::string RateOf(const Row& row) {
  const Case& c = *row.kernel_case;
  return row.memory_bound ? FormatPerSecond((c.bytes_read + c.bytes_written) / row.median(), "B/s")
                          : FormatPerSecond(c.flops / row.median(), "FLOP/s");
}

void Runner::PrintRow(const Row& row) {
  progress_.Clear();
  const Case& c = *row.kernel_case;
  const Comparison& comparison = row.comparison;
  const std::string checked = comparison.rows == comparison.all_rows
                                  ? fmt::format("all {}", comparison.rows)
                                  : fmt::format("{}/{}", comparison.rows, comparison.all_rows);
  fmt::print("{}\n", MakeTable().Row({c.name, c.shape, NameOf(c.dtype), FormatSeconds(row.median()), RateOf(row),
                                           fmt::format("{} % {}", Percent(row.share()), row.memory_bound ? "M" : "C"),
                                           FormatError(comparison.error), FormatError(comparison.bound), checked,
                                           FormatSeconds(row.profile.time_s), Percent(row.profile.cube_utilisation),
                                           Percent(row.profile.vector_utilisation),
                                           Percent(row.profile.mte_utilisation), row.ok() ? "ok" : "FAILED"}));
  for (const std::string& problem : row.problems) fmt::print("  FAILED: {}\n", problem);
  std::fflush(stdout);
}

// ---- JSON ----

Json ToJson(const Row& row) {
  const Case& c = *row.kernel_case;
  const Profile& p = row.profile;
  return {{"case", c.name},
          {"kernel", c.kernel},
          {"shape", c.shape},
          {"dtype", NameOf(c.dtype)},
          {"host_seconds_median", row.median()},
          {"host_seconds_best", row.seconds.front()},
          {"host_runs", row.seconds.size()},
          {"flops", c.flops},
          {"bytes_read", c.bytes_read},
          {"bytes_written", c.bytes_written},
          {"limit", row.memory_bound ? "memory" : "compute"},
          {"floor_seconds", row.floor_s},
          {"share_of_ceiling", row.share()},
          {"error", row.comparison.error},
          {"bound", row.comparison.bound},
          {"error_over_bound", row.comparison.ratio},
          {"rows_checked", row.comparison.rows},
          {"rows", row.comparison.all_rows},
          {"check_seed", row.check_seed},
          {"modelled",
           {{"chip", p.chip},
            {"seconds", p.time_s},
            {"cycles", p.cycles},
            {"cube_utilisation", p.cube_utilisation},
            {"vector_utilisation", p.vector_utilisation},
            {"mte_utilisation", p.mte_utilisation},
            {"bound", p.bound},
            {"instructions", p.instructions},
            {"gm_read_bytes", p.gm_read},
            {"gm_written_bytes", p.gm_written},
            {"workspace_bytes", p.workspace_bytes},
            {"l2_hit_rate", p.l2_hit_rate}}},
          {"passed", row.ok()},
          {"problems", row.problems}};
}

Status WriteJson(const std::string& path, const Json& json) {
  std::ofstream file(path);
  file << json.dump(2, ' ', true, Json::error_handler_t::replace) << "\n";
  file.close();
  return file ? Status() : InvalidArgument(fmt::format("{}: cannot be written", path));
}

int Fail(const Status& status) {
  fmt::print(stderr, "cubist run: {}\n", status.message());
  return 2;
}

// Prints the summary, writes the JSON file.
int Runner::Finish(double seconds) {
  const auto failed = std::count_if(rows_.begin(), rows_.end(), [](const Row& row) { return !row.ok(); });
  fmt::print("{}\n", MakeTable().Rule());
  fmt::print("share of ceiling: C of peak arithmetic, M of memory bandwidth, whichever bounds the case from below. error: "
             "of the element nearest to its bound.\n");
  fmt::print("rows checked: where not all, drawn at random after the run. Every output element was marked before the run "
             "and looked for after it.\n");
  fmt::print("{} of {} cases passed in {:.0f} s{}\n", rows_.size() - static_cast<std::size_t>(failed), rows_.size(),
             seconds, failed > 0 ? fmt::format("; {} FAILED", failed) : "");
  if (!options_.json.empty()) {
    Json json = {{"workload", plan_.scaled.workload.name},
                 {"token_scale", plan_.scaled.token_scale},
                 {"head_scale", plan_.scaled.head_scale},
                 {"batch", plan_.scaled.batch},
                 {"sequence", plan_.scaled.sequence},
                 {"heads", plan_.scaled.heads},
                 {"seed", options_.seed},
                 {"simd_target", BestCubeOps().target},
                 {"threads", plan_.threads},
                 {"ceilings",
                  {{"fma_flops", ceilings_.fma_flops},
                   {"dot_bf16_flops", ceilings_.dot_bf16_flops},
                   {"read_bytes_per_s", ceilings_.read_bytes_per_s},
                   {"write_bytes_per_s", ceilings_.write_bytes_per_s},
                   {"copy_bytes_per_s", ceilings_.copy_bytes_per_s}}},
                 {"seconds", seconds},
                 {"passed", failed == 0},
                 {"rows", Json::array()}};
    for (const Row& row : rows_) json["rows"].push_back(ToJson(row));
    if (const Status written = WriteJson(options_.json, json); !written.ok()) return Fail(written);
  }
  return failed == 0 ? 0 : 1;
}

int Runner::RunAll() {
  const auto start = Clock::now();
  progress_.Show("measuring the machine's ceilings");
  ceilings_ = MeasureCeilings(plan_.threads);
  progress_.Clear();
  PrintHeader();
  for (const Case& c : plan_.cases) {
    Row row;
    if (const Status status = RunCase(c, &row); !status.ok()) {
      progress_.Clear();
      return Fail(Status(status.code(), fmt::format("{}: {}", c.name, status.message())));
    }
    PrintRow(row);
    rows_.push_back(std::move(row));
  }
  return Finish(SecondsSince(start));
}

// ---- Listing ----

int PrintList(const Plan& plan) {
  fmt::print("cases:\n");
  for (const Case& c : plan.cases) fmt::print("  {:<20} {:<15} {:<26} {}\n", c.name, c.kernel, c.shape, NameOf(c.dtype));
  fmt::print("tensors that --input replaces:\n");
  for (const TensorSpec& spec : ReplaceableInputs(plan.cases)) {
    fmt::print("  {:<20} {:<20} {}\n", spec.name, ToString(spec.shape),
               IsFloat(spec.dtype) ? "fp32, bf16 or fp16" : "int32 or int64");
  }
  return 0;
}

}  // namespace

int RunCommand(const RunOptions& options) {
  try {
    Plan plan;
    if (const Status status = MakePlan(options, &plan); !status.ok()) return Fail(status);
    if (options.list) return PrintList(plan);
    Inputs inputs(plan.scaled, options.seed);
    for (const std::string& input : options.inputs) {
      if (const Status status = inputs.Replace(input, plan.cases); !status.ok()) return Fail(status);
    }
    std::error_code error;
    if (!options.output.empty()) std::filesystem::create_directories(options.output, error);
    if (error || (!options.output.empty() && access(options.output.c_str(), W_OK) != 0)) {
      return Fail(InvalidArgument(fmt::format("--output {}: may not be written", options.output)));
    }
    return Runner(options, plan, inputs).RunAll();
  } catch (const std::bad_alloc&) {
    return Fail(Status(StatusCode::kOutOfMemory, "the machine has no memory left; --scale divides the tokens further"));
  }
}

}  // namespace cubist
