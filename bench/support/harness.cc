#include "bench/support/harness.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "bench/support/gemm.h"
#include "npu_model/host/tile_ops.h"

namespace cubist::bench {
namespace {

double Seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs untimed until caches, pages and thread pools are warm: 10 ms at least, one run of anything longer.
void WarmUp(const Call& call) {
  constexpr double kWarm = 0.01;
  for (double spent = 0; spent < kWarm;) spent += Seconds(call.run);
}

void Finish(benchmark::State& state, const Call& call) {
  const std::string wrong = call.check();
  if (!wrong.empty()) state.SkipWithError(("Incorrect result: " + wrong).c_str());
  if (call.rest) call.rest();
}

// The timed loop; seconds per run.
double TimedLoop(benchmark::State& state, const Call& call) {
  const double seconds = Seconds([&] {
    for (auto _ : state) call.run();
  });
  return seconds / static_cast<double>(state.iterations());
}

// Google Benchmark appends "/process_time/real_time" to the names of cases timed so. Reports drop it again.
class PlainNames : public benchmark::BenchmarkReporter {
 public:
  explicit PlainNames(benchmark::BenchmarkReporter* reporter) : reporter_(reporter) {}

  bool ReportContext(const Context& context) override {
    reporter_->SetOutputStream(&GetOutputStream());
    reporter_->SetErrorStream(&GetErrorStream());
    return reporter_->ReportContext(context);
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    std::vector<Run> plain = runs;
    for (Run& run : plain) {
      run.run_name.time_type.clear();
      failed_ |= run.error_occurred;
    }
    reporter_->ReportRuns(plain);
  }
  void Finalize() override { reporter_->Finalize(); }

  bool failed() const { return failed_; }

 private:
  benchmark::BenchmarkReporter* reporter_;
  bool failed_ = false;
};

constexpr std::string_view kFilterFlag = "--benchmark_filter=";

// A filter is written for the names as reported; Google Benchmark matches it with "/process_time/real_time"
// at their end.
std::string MatchRealNames(std::string_view flag) {
  std::string text;
  for (std::size_t i = 0; i < flag.size(); ++i) {
    if (flag[i] == '$' && (i == 0 || flag[i - 1] != '\\')) text += "(/process_time/real_time)?";
    text += flag[i];
  }
  return text;
}

std::vector<std::string> FlagsWithDefaults(int argc, char** argv, const std::string& skip) {
  std::vector<std::string> flags = {argv[0], "--benchmark_min_time=0.2"};
  if (!skip.empty()) flags.push_back(std::string(kFilterFlag) + "-" + skip);
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    flags.push_back(flag.starts_with(kFilterFlag) ? MatchRealNames(flag) : std::string(flag));
  }
  return flags;
}

// Whether results also go to a file in the default format, JSON.
bool WritesJson(const std::vector<std::string>& flags) {
  bool out = false, json = true;
  for (const std::string& flag : flags) {
    if (flag.starts_with("--benchmark_out=")) out = true;
    if (flag.starts_with("--benchmark_out_format=")) json = flag.ends_with("=json");
  }
  return out && json;
}

void RegisterPeak(const std::string& name, int threads, std::function<double(int)> measure,
                  const char* counter) {
  Register(name + "/threads:" + std::to_string(threads), [=](benchmark::State& state) {
    double best = 0;
    for (auto _ : state) best = std::max(best, measure(threads));
    state.counters[counter] = benchmark::Counter(best);
  });
}

}  // namespace

std::vector<int> ThreadCounts() {
  const int all = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const std::set<int> counts = {1, std::min(2, all), all};
  return {counts.begin(), counts.end()};
}

std::string CaseName(const std::string& kernel, const std::string& library, const std::string& dtype,
                     const std::string& text, int threads) {
  return kernel + "/" + library + "/" + dtype + "/" + text + "/threads:" + std::to_string(threads);
}

void TimeCompute(benchmark::State& state, int threads, Arithmetic arithmetic, double flops,
                 const Call& call) {
  HighestPeak(arithmetic, threads);
  WarmUp(call);
  const double seconds = TimedLoop(state, call);
  const double peak = HighestPeak(arithmetic, threads);
  state.counters["FLOPS"] = flops / seconds;
  state.counters["of_peak"] = flops / peak / seconds;
  Finish(state, call);
}

void TimeRoofline(benchmark::State& state, int threads, Arithmetic arithmetic, double flops,
                  double bytes_read, const Call& call) {
  const double read_before = MeasureReadBandwidth(threads);
  WarmUp(call);
  const double seconds = TimedLoop(state, call);
  const double peak = HighestPeak(arithmetic, threads);
  const double read = std::max(read_before, MeasureReadBandwidth(threads));
  state.counters["FLOPS"] = flops / seconds;
  state.counters["of_peak"] = flops / peak / seconds;
  state.counters["of_roofline"] = std::max(flops / peak, bytes_read / read) / seconds;
  Finish(state, call);
}

void TimeMovement(benchmark::State& state, int threads, double bytes_read, double bytes_written,
                  const Call& call) {
  const Bandwidth before = MeasureBandwidth(threads);
  WarmUp(call);
  const double seconds = TimedLoop(state, call);
  const Bandwidth after = MeasureBandwidth(threads);
  const double floor = std::max({bytes_read / std::max(before.read, after.read),
                                 bytes_written / std::max(before.write, after.write),
                                 (bytes_read + bytes_written) / std::max(before.copy, after.copy)});
  state.counters["bytes_per_second"] = (bytes_read + bytes_written) / seconds;
  state.counters["of_floor"] = floor / seconds;
  Finish(state, call);
}

void Register(const std::string& name, std::function<void(benchmark::State&)> body) {
  benchmark::RegisterBenchmark(name.c_str(), std::move(body))
      ->MeasureProcessCPUTime()
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

void RegisterPeaks() {
  for (int threads : ThreadCounts()) {
    RegisterPeak(
        "Peak/fma/fp32", threads, [](int n) { return HighestPeak(Arithmetic::kFma, n); }, "FLOPS");
    if (ArithmeticOf(DType::kBF16) == Arithmetic::kDotBf16) {
      RegisterPeak(
          "Peak/dot/bf16", threads, [](int n) { return HighestPeak(Arithmetic::kDotBf16, n); }, "FLOPS");
    }
    constexpr const char* kBytes = "bytes_per_second";
    RegisterPeak(
        "Peak/stream_write", threads, [](int n) { return MeasureBandwidth(n).write; }, kBytes);
    RegisterPeak(
        "Peak/stream_read", threads, [](int n) { return MeasureReadBandwidth(n); }, kBytes);
    RegisterPeak(
        "Peak/stream_copy", threads, [](int n) { return MeasureBandwidth(n).copy; }, kBytes);
  }
}

int Main(int argc, char** argv, const std::string& skip) {
  std::vector<std::string> flags = FlagsWithDefaults(argc, argv, skip);
  const bool writes_json = WritesJson(flags);
  std::vector<char*> pointers;
  for (std::string& flag : flags) pointers.push_back(flag.data());
  int count = static_cast<int>(pointers.size());
  benchmark::Initialize(&count, pointers.data());
  if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) return 2;
  benchmark::AddCustomContext("simd_target", BestCubeOps().target);
  // Workers that a library made when it was loaded would spin into the first case.
  for (const GemmLibrary& peer : GemmPeers()) peer.rest();

  PlainNames display(benchmark::CreateDefaultDisplayReporter());
  benchmark::JSONReporter json;
  PlainNames file(&json);
  const std::size_t ran = benchmark::RunSpecifiedBenchmarks(&display, writes_json ? &file : nullptr);
  benchmark::Shutdown();
  return ran > 0 && !display.failed() ? 0 : 1;
}

}  // namespace cubist::bench
