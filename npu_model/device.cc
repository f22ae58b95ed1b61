#include "npu_model/device.h"

#include <utility>

namespace cubist {

Device Host(HostOptions options) {
  Device device;
  device.kind_ = Device::Kind::kHost;
  device.host_ = std::move(options);
  return device;
}

Device Npu(const ChipSpec& chip, NpuOptions options) {
  Device device;
  device.kind_ = Device::Kind::kNpu;
  device.npu_ = std::move(options);
  device.chip_ = std::make_shared<const ChipSpec>(chip);
  return device;
}

}  // namespace cubist
