#include "tools/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "npu_model/host/ceilings.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/subject.h"
#include "tools/table.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// What a call must do at least.
struct Work {
  double products = 0;
  double bytes_read = 0, bytes_written = 0;

  double bytes() const { return bytes_read + bytes_written; }
};

Work WorkOf(const KernelCall& call) {
  Work work;
  work.products = call.products();
  for (const OwnedTensor& input : call.inputs()) work.bytes_read += static_cast<double>(input.bytes());
  for (const Tensor& output : call.outputs())
    work.bytes_written += static_cast<double>(output.count() * SizeOf(output.dtype));
  return work;
}

// The least time that the machine needs, and for what.
struct Floor {
  double seconds = 0;
  const char* of = "nothing";
};

Floor FloorOf(const Ceilings& ceilings, const Work& work, const std::string& dtype) {
  const double peak = dtype == "bf16" ? ceilings.bf16_flops() : ceilings.fma_flops;
  const double arithmetic = 2 * work.products / peak;
  // What stays in the last cache between two calls never comes from memory.
  const auto cache = static_cast<double>(std::max(CacheBytes(2), CacheBytes(3)));
  const double memory =
      work.bytes() > cache ? MemoryFloorSeconds(ceilings, work.bytes_read, work.bytes_written) : 0;
  if (arithmetic == 0 && memory == 0) return {};
  return arithmetic >= memory ? Floor{arithmetic, "arithmetic"} : Floor{memory, "memory"};
}

// Ascending seconds of each run, after one to warm up.
Status Time(const KernelCall& call, const Device& host, const BenchOptions& options,
            std::vector<double>* seconds) {
  CUBIST_RETURN_IF_ERROR(call(host));
  double total = 0;
  const auto enough = [&] {
    const auto runs = static_cast<int>(seconds->size());
    return options.repetitions > 0 ? runs >= options.repetitions : runs >= 3 && total >= options.seconds;
  };
  while (!enough()) {
    const auto start = Clock::now();
    CUBIST_RETURN_IF_ERROR(call(host));
    seconds->push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += seconds->back();
  }
  std::sort(seconds->begin(), seconds->end());
  return {};
}

}  // namespace

int BenchCommand(const BenchOptions& options) {
  KernelCallOptions wanted = options.call;
  wanted.with_data = true;
  KernelCall call;
  Status status = MakeKernelCall(wanted, &call);
  if (status.ok()) status = PrepareOutput("--json", options.json);
  if (!status.ok()) return BadInput("cubist bench", status.message());
  const Device host = Host({.threads = options.threads, .pin = options.pin});
  std::vector<double> seconds;
  if (status = Time(call, host, options, &seconds); !status.ok())
    return BadInput("cubist bench", status.message());

  const double median = seconds[seconds.size() / 2], best = seconds.front();
  const Work work = WorkOf(call);
  const std::string shape = FullShape(options.call);
  const auto counted = [](auto count, const char* what) {
    return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
  };
  fmt::print("{} {} {}, {}: median {}, best {}, {}\n", wanted.kernel, shape, wanted.dtype,
             counted(host.concurrency(), "thread"), FormatSeconds(median), FormatSeconds(best),
             counted(seconds.size(), "run"));
  if (work.products > 0)
    fmt::print("arithmetic  {}\n", FormatPerSecond(2 * work.products / median, "FLOP/s"));
  fmt::print("memory      {}, every tensor once\n", FormatPerSecond(work.bytes() / median, "B/s"));
  Json json = {{"kernel", wanted.kernel},
               {"shape", shape},
               {"dtype", wanted.dtype},
               {"causal", wanted.causal},
               {"chip", host.chip().name},
               {"threads", host.concurrency()},
               {"pin", options.pin},
               {"seconds", options.seconds},
               {"runs", seconds.size()},
               {"median_seconds", median},
               {"best_seconds", best},
               {"flops", 2 * work.products},
               {"bytes_read", work.bytes_read},
               {"bytes_written", work.bytes_written}};
  if (options.ceilings) {
    const Floor floor = FloorOf(MeasureCeilings(host.concurrency()), work, wanted.dtype);
    if (floor.seconds > 0) {
      fmt::print("ceiling     {} allows {}: {:.0f} % of it\n", floor.of, FormatSeconds(floor.seconds),
                 100 * floor.seconds / median);
      json["ceiling"] = {{"of", floor.of}, {"seconds", floor.seconds}, {"share", floor.seconds / median}};
    } else {
      fmt::print("ceiling     none: the tensors fit in the cache\n");
      json["ceiling"] = nullptr;
    }
  }
  if (options.json.empty()) return 0;
  status = WriteJson(options.json, json);
  return status.ok() ? 0 : BadInput("cubist bench", status.message());
}

}  // namespace cubist
