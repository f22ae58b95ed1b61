// How long the model takes: to record a call without data, to place its flags, to prove them, to replay it (beside what the
// host takes to compute it), and all of it as a user meets it, the first time (when the tiling is chosen by replay) and
// again. Instructions per second are the record's, whatever flags stand between them.
#include <benchmark/benchmark.h>

#include <iterator>
#include <memory>
#include <string>

#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/replay.h"
#include "tools/kernel_call.h"

namespace cubist {
namespace {

struct Subject {
  const char* kernel;
  const char* shape;
};
constexpr Subject kSubjects[] = {{"matmul", "4096x4096x4096"},
                                 {"flash_attention", "8x4096x128x128x64"},
                                 {"flash_attention", "32x8192x128x128x0"},
                                 {"token_permute", "4096x7168x8x256"}};

void CountInstructions(benchmark::State& state, std::int64_t each) {
  state.counters["instructions/s"] = benchmark::Counter(
      static_cast<double>(each) * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

// What a step finds made.
enum class Needs { kRecord, kPlan, kData };

Status MakeCall(const Subject& subject, bool with_data, KernelCall* call) {
  KernelCallOptions options;
  options.with_data = with_data;
  options.kernel = subject.kernel, options.shape = subject.shape;
  return MakeKernelCall(options, call);
}

Status RecordOf(const KernelCall& call, trace::Record* record) {
  return call(Npu(Ascend910B2(), {.with_data = false, .record = record}));
}

void Register(const Subject& subject) {
  const auto call = std::make_shared<KernelCall>();
  const auto record = std::make_shared<trace::Record>();
  const auto plan = std::make_shared<sync::Plan>();
  const auto instructions = [record] {
    std::int64_t count = 0;
    for (const trace::Phase& phase : record->phases) {
      for (const trace::CoreRecord& core : phase.cores) count += std::ssize(core.instrs);
    }
    return count;
  };
  // What a step needs of those before it; nothing is kept from one subject to the next.
  const auto prepare = [=](benchmark::State& state, Needs needs) {
    Status status = MakeCall(subject, needs == Needs::kData, call.get());
    if (status.ok()) status = RecordOf(*call, record.get());
    if (!status.ok()) state.SkipWithError(status.message().c_str());
    if (needs == Needs::kPlan) *plan = sync::PlanFlags(*record, sync::Policy::kMinimal);
  };
  const auto add = [&](const char* step, Needs needs, auto body) {
    const std::string name = std::string(step) + "/" + subject.kernel + "/" + subject.shape;
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& state) {
                                   prepare(state, needs);
                                   const std::int64_t each = instructions();
                                   for (auto _ : state) body();
                                   CountInstructions(state, each);
                                   *record = {}, *plan = {};
                                 })
        ->Unit(benchmark::kMillisecond)
        ->UseRealTime();
  };
  add("record", Needs::kRecord, [=] {
    trace::Record again;
    benchmark::DoNotOptimize(RecordOf(*call, &again).ok());
  });
  // On one thread, as a plan and its proof are.
  add("compute", Needs::kData, [=] { benchmark::DoNotOptimize((*call)(Host({.threads = 1})).ok()); });
  add("plan", Needs::kRecord,
      [=] { benchmark::DoNotOptimize(sync::PlanFlags(*record, sync::Policy::kMinimal)); });
  add("check", Needs::kPlan, [=] { benchmark::DoNotOptimize(sync::Check(*record, *plan)); });
  add("replay", Needs::kPlan, [=] { benchmark::DoNotOptimize(trace::Replay(*record, *plan)); });
  const auto predict = [=](const ChipSpec& chip) {
    Profile profile;
    benchmark::DoNotOptimize((*call)(Npu(chip, {.with_data = false}), &profile).ok());
  };
  add("all", Needs::kRecord, [=] { predict(Ascend910B2()); });
  // On a chip for which no tiling is remembered.
  const auto chip = std::make_shared<ChipSpec>(Ascend910B2());
  add("first", Needs::kRecord, [=] {
    chip->memory.hbm_bytes_per_s.value *= 1 + 1e-12;
    predict(*chip);
  });
}

}  // namespace
}  // namespace cubist

int main(int argc, char** argv) {
  for (const cubist::Subject& subject : cubist::kSubjects) cubist::Register(subject);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
