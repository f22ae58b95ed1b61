#include "tools/run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/nearest.h"
#include "tools/bad_input.h"
#include "tools/cases.h"
#include "tools/files.h"
#include "tools/inputs.h"
#include "tools/json_writer.h"
#include "tools/npy.h"
#include "tools/profile_report.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/trial.h"
#include "tools/workload.h"

namespace cubist {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kCeilingsLast{1};  // Of memory; to measure them takes up to half as long.

// `--quick` divides the tokens once more, and repeats and checks less.
constexpr std::int64_t kQuickTokenScale = 8;
constexpr double kReferenceProducts = 5e8, kQuickReferenceProducts = 1e8;

constexpr Repetitions kRepetitions = {.least = 3, .most = 25, .seconds = 0.5};
constexpr Repetitions kQuickRepetitions = {.least = 3, .most = 5, .seconds = 0.1};

// ---- What to run ----

struct Plan {
  RunSettings settings;
  std::vector<Case> cases;
  std::map<std::string, std::string> timelines;  // file of a case
};

Status ParseRouting(const std::string& routing, std::vector<Skew>* routings) {
  if (routing == "both") *routings = {Skew::kSkewed, Skew::kUniform};
  if (routing == "skewed") *routings = {Skew::kSkewed};
  if (routing == "uniform") *routings = {Skew::kUniform};
  if (!routings->empty()) return {};
  return InvalidArgument(fmt::format("--routing is '{}'; known are skewed, uniform, both", routing));
}

std::string KnownCases(const std::string& wanted, const std::vector<Case>& cases) {
  std::vector<std::string> names;
  for (const Case& c : cases) names.push_back(c.name);
  return KnownAndNearest(wanted, names);
}

bool HasCase(const std::vector<Case>& cases, const std::string& name) {
  return std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; });
}

Status KeepOnly(const std::vector<std::string>& only, std::vector<Case>* cases) {
  for (const std::string& name : only) {
    if (!HasCase(*cases, name)) {
      return InvalidArgument(fmt::format("--only is '{}'; {}", name, KnownCases(name, *cases)));
    }
  }
  if (only.empty()) return {};
  std::erase_if(*cases,
                [&](const Case& c) { return std::find(only.begin(), only.end(), c.name) == only.end(); });
  return {};
}

Status CheckOutputs(const RunOptions& options, Plan* plan) {
  CUBIST_RETURN_IF_ERROR(PrepareOutput("--json", options.json));
  for (const std::string& timeline : options.timelines) {
    const std::size_t equals = timeline.find('=');
    if (equals == std::string::npos || equals + 1 == timeline.size()) {
      return InvalidArgument(fmt::format("--timeline is '{}', expected case=file.json", timeline));
    }
    const std::string name = timeline.substr(0, equals), file = timeline.substr(equals + 1);
    if (!HasCase(plan->cases, name)) {
      return InvalidArgument(
          fmt::format("--timeline: no case is named '{}'; {}", name, KnownCases(name, plan->cases)));
    }
    CUBIST_RETURN_IF_ERROR(PrepareFile("--timeline", file));
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
  const double machine = MachineBytes();
  for (const Case& c : cases) {
    if (const double bytes = CaseBytes(c); bytes > machine) {
      return InvalidArgument(fmt::format(
          "{} takes {:.1f} GiB of tensors, this machine has {:.1f} GiB; --scale and --head-scale divide "
          "tokens and heads further",
          c.name, bytes / 0x1p30, machine / 0x1p30));
    }
  }
  return {};
}

Status MakePlan(const RunOptions& options, Plan* plan) {
  Workload workload;
  std::vector<Skew> routings;
  RunSettings& settings = plan->settings;
  CUBIST_RETURN_IF_ERROR(LoadWorkload(options.workload, WorkloadFolders(), &workload));
  CUBIST_RETURN_IF_ERROR(LoadChip(options.chip, &settings.chip));
  CUBIST_RETURN_IF_ERROR(ParseRouting(options.routing, &routings));
  const std::int64_t quick_scale = options.quick ? kQuickTokenScale : 1;
  settings.scaled = Scale(workload, options.token_scale.value_or(workload.run.token_scale * quick_scale),
                          options.head_scale.value_or(workload.run.head_scale));
  const Device host = Host({.threads = options.threads});
  CUBIST_RETURN_IF_ERROR(host.status());
  settings.threads = host.concurrency();
  settings.seed = options.seed;
  plan->cases = MakeCases(settings.scaled, routings);
  CUBIST_RETURN_IF_ERROR(KeepOnly(options.only, &plan->cases));
  CUBIST_RETURN_IF_ERROR(CheckOutputs(options, plan));
  return CheckMemory(plan->cases);
}

// ---- Running ----

class Runner {
 public:
  Runner(const RunOptions& options, const Plan& plan, const Inputs& inputs)
      : options_(options), plan_(plan), inputs_(inputs), progress_(stderr) {}

  int RunAll();

 private:
  Status RunCase(const Case& c, RunRow* row);
  Status Model(const Case& c, CaseTensors& tensors, RunRow* row) const;
  void Check(const Case& c, CaseTensors& tensors, RunRow* row) const;
  Status WriteResults(const Case& c, CaseTensors& tensors) const;

  // Ceilings wander with the neighbours' load: those that a row is held against are measured beside it, memory's no more
  // than kCeilingsLast before. Of arithmetic the highest ever seen counts, of memory the latest.
  void RefreshCeilings(const Case& c);
  double ComputeFloor(const Case& c) const {
    return c.flops / (c.dtype == DType::kBF16 ? ceilings_.bf16_flops() : ceilings_.fma_flops);
  }
  double MemoryFloor(const Case& c) const {
    return MemoryFloorSeconds(ceilings_, c.bytes_read, c.bytes_written);
  }

  void Show(const Case& c, const char* what);
  // To stdout, at once.
  void Print(const std::string& text);

  const RunOptions& options_;
  const Plan& plan_;
  const Inputs& inputs_;
  Progress progress_;
  std::optional<MemoryCeilings> memory_;
  Clock::time_point memory_measured_;
  Ceilings ceilings_;
  std::vector<RunRow> rows_;
};

void Runner::Show(const Case& c, const char* what) {
  const auto index = static_cast<std::size_t>(&c - plan_.cases.data()) + 1;
  progress_.Show(fmt::format("[{}/{}] {}: {}", index, plan_.cases.size(), c.name, what));
}

void Runner::Print(const std::string& text) {
  progress_.Clear();
  fmt::print("{}", text);
  std::fflush(stdout);
}

// Index tensors steer the kernels and stay; floats have no part in timing.
template <class Void>
std::vector<BasicTensor<Void>> WithoutFloats(std::vector<BasicTensor<Void>> tensors) {
  for (auto& tensor : tensors) {
    if (IsFloat(tensor.dtype)) tensor.data = nullptr;
  }
  return tensors;
}

Status Runner::Model(const Case& c, CaseTensors& tensors, RunRow* row) const {
  const auto timeline = plan_.timelines.find(c.name);
  const bool wanted = timeline != plan_.timelines.end();
  const Device npu = Npu(plan_.settings.chip, {.with_data = false, .timeline = wanted});
  CUBIST_RETURN_IF_ERROR(
      c.run(npu, WithoutFloats(tensors.InputViews()), WithoutFloats(tensors.OutputViews()), &row->profile));
  return wanted ? row->profile.WriteTimeline(timeline->second) : Status();
}

void Runner::Check(const Case& c, CaseTensors& tensors, RunRow* row) const {
  std::random_device device;
  row->check_seed = options_.check_seed.value_or(std::uint64_t{device()} << 32 | device());
  CheckTrial(c, options_.quick ? kQuickReferenceProducts : kReferenceProducts,
             StreamKey(row->check_seed, c.name), &tensors, &row->trial);
}

Status Runner::WriteResults(const Case& c, CaseTensors& tensors) const {
  if (options_.output.empty()) return {};
  for (std::size_t i = 0; i < tensors.outputs.size(); ++i) {
    const std::string file = fmt::format("{}/{}.{}.npy", options_.output, c.name, c.outputs[i].name);
    CUBIST_RETURN_IF_ERROR(WriteNpy(file, tensors.outputs[i].view()));
  }
  return {};
}

void Runner::RefreshCeilings(const Case& c) {
  const int threads = plan_.settings.threads;
  if (MemoryFloor(c) >= ComputeFloor(c)) {
    if (Clock::now() - memory_measured_ < kCeilingsLast) return;
    memory_->Measure(&ceilings_);
    memory_measured_ = Clock::now();
  } else if (c.dtype == DType::kBF16 && ceilings_.dot_bf16_flops > 0) {
    ceilings_.dot_bf16_flops = std::max(ceilings_.dot_bf16_flops, MeasurePeakDotBf16(threads));
  } else {
    ceilings_.fma_flops = std::max(ceilings_.fma_flops, MeasurePeakFma(threads));
  }
}

Status Runner::RunCase(const Case& c, RunRow* row) {
  row->kernel_case = &c;
  Show(c, "generating inputs");
  CaseTensors tensors(c, inputs_);
  Show(c, "computing");
  RefreshCeilings(c);
  row->memory_bound = MemoryFloor(c) >= ComputeFloor(c);
  row->floor_s = std::max(MemoryFloor(c), ComputeFloor(c));
  const Device host = Host({.threads = plan_.settings.threads});
  CUBIST_RETURN_IF_ERROR(
      ComputeTrial(c, host, options_.quick ? kQuickRepetitions : kRepetitions, &tensors, &row->trial));
  Show(c, "modelling");
  CUBIST_RETURN_IF_ERROR(Model(c, tensors, row));
  Print(LeftOutText(row->profile));
  Show(c, "checking against the reference");
  Check(c, tensors, row);
  return WriteResults(c, tensors);
}

int Fail(const Status& status) { return BadInput("cubist run", status.message()); }

int Runner::RunAll() {
  const auto start = Clock::now();
  progress_.Show("measuring the machine's ceilings");
  memory_.emplace(plan_.settings.threads);
  ceilings_ = MeasureCeilings(plan_.settings.threads, *memory_);
  memory_measured_ = Clock::now();
  Print(HeaderText(plan_.settings, ceilings_));
  for (const Case& c : plan_.cases) {
    RunRow row;
    if (const Status status = RunCase(c, &row); !status.ok()) {
      progress_.Clear();
      return Fail(Status(status.code(), fmt::format("{}: {}", c.name, status.message())));
    }
    Print(RowText(row));
    rows_.push_back(std::move(row));
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  Print(SummaryText(rows_, seconds));
  if (!options_.json.empty()) {
    const Status written = WriteReport(options_.json, plan_.settings, ceilings_, rows_, seconds);
    if (!written.ok()) return Fail(written);
  }
  return std::all_of(rows_.begin(), rows_.end(), [](const RunRow& row) { return row.ok(); }) ? 0 : 1;
}

// ---- Listing ----

nlohmann::ordered_json ListJson(const Plan& plan) {
  using Json = nlohmann::ordered_json;
  Json list{{"cases", Json::array()}, {"inputs", Json::array()}};
  for (const Case& c : plan.cases)
    list["cases"].push_back(
        {{"case", c.name}, {"kernel", c.kernel}, {"shape", c.shape}, {"dtype", NameOf(c.dtype)}});
  for (const TensorSpec& spec : ReplaceableInputs(plan.cases))
    list["inputs"].push_back({{"input", spec.name}, {"shape", spec.shape}, {"floats", IsFloat(spec.dtype)}});
  return list;
}

int PrintList(const Plan& plan, const std::string& json) {
  if (!json.empty()) {
    if (const Status status = WriteJson(json, ListJson(plan)); !status.ok()) return Fail(status);
  }
  fmt::print("cases:\n");
  for (const Case& c : plan.cases)
    fmt::print("  {:<20} {:<15} {:<26} {}\n", c.name, c.kernel, c.shape, NameOf(c.dtype));
  fmt::print("tensors that --input replaces:\n");
  for (const TensorSpec& spec : ReplaceableInputs(plan.cases)) {
    fmt::print("  {:<20} {:<20} {}\n", spec.name, ToString(spec.shape),
               IsFloat(spec.dtype) ? "fp32, bf16 or fp16" : "int32 or int64");
  }
  return 0;
}

}  // namespace

std::vector<std::string> RunCaseNames() {
  Workload workload;
  if (!LoadWorkload(RunOptions().workload, WorkloadFolders(), &workload).ok()) return {};
  std::vector<std::string> names;
  for (const Case& c : MakeCases(Scale(workload, 1, 1), {Skew::kSkewed, Skew::kUniform}))
    names.push_back(c.name);
  return names;
}

int RunCommand(const RunOptions& options) {
  try {
    Plan plan;
    if (const Status status = MakePlan(options, &plan); !status.ok()) return Fail(status);
    if (options.list) return PrintList(plan, options.json);
    Inputs inputs(plan.settings.scaled, options.seed);
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
    return Fail(Status(StatusCode::kOutOfMemory,
                       "the machine has no memory left; --scale divides the tokens further"));
  }
}

}  // namespace cubist
