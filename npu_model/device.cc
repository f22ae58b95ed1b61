#include "npu_model/device.h"

#include <tbb/task_arena.h>

#include <charconv>
#include <cstdlib>
#include <string>
#include <utility>

#include "npu_model/chip_constants.h"

namespace cubist {
namespace {

// CUBIST_NUM_THREADS, as it was at the first call; 0 where it is not set.
struct Environment {
  int threads = 0;
  Status status;
};

Environment ReadEnvironment() {
  const char* text = std::getenv("CUBIST_NUM_THREADS");
  if (text == nullptr || *text == '\0') return {};
  Environment found;
  const std::string value = text;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), found.threads);
  if (error == std::errc() && end == value.data() + value.size() && found.threads >= 1 &&
      found.threads <= kMostThreads) {
    return found;
  }
  return {0, InvalidArgument("CUBIST_NUM_THREADS is '" + value + "', needs 1 to " +
                             std::to_string(kMostThreads))};
}

}  // namespace

int Device::concurrency() const {
  return host_.threads > 0 ? host_.threads : tbb::this_task_arena::max_concurrency();
}

Device Host(HostOptions options) {
  Device device;
  device.kind_ = Device::Kind::kHost;
  device.host_ = std::move(options);
  if (device.host_.threads <= 0) {
    static const Environment environment = ReadEnvironment();
    device.host_.threads = environment.threads;
    device.status_ = environment.status;
  } else if (device.host_.threads > kMostThreads) {
    device.status_ = InvalidArgument("host: threads is " + std::to_string(device.host_.threads) +
                                     ", needs 0 to " + std::to_string(kMostThreads));
  }
  return device;
}

Device Npu(const ChipSpec& chip, NpuOptions options) {
  Device device;
  device.kind_ = Device::Kind::kNpu;
  device.npu_ = std::move(options);
  device.chip_ = std::make_shared<const ChipSpec>(chip);
  device.status_ = CheckChip(chip);
  return device;
}

}  // namespace cubist
