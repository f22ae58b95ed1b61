// Devices as Python sees them: a host that computes, or a chip whose calls give profiles.
#ifndef CUBIST_PYTHON_DEVICE_H_
#define CUBIST_PYTHON_DEVICE_H_

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <type_traits>

#include "kernels/block.h"
#include "npu_model/device.h"
#include "npu_model/trace/record.h"
#include "src/arguments.h"

namespace cubist::python {

struct PythonDevice {
  Device device;
  bool details = false;  // Profiles tell pipes, critical path, lines, occupancy and roofline.
  std::string timeline;  // Where a call's timeline is written, if anywhere.

  // Runs kernel(device, profile) without the interpreter's lock. None on a host, the profile on a chip.
  template <class AnyProfile = Profile, class Kernel>
  nb::object Run(Kernel kernel) const {
    if (device.kind() == Device::Kind::kHost) {
      const Status status = Unlocked([&] { return kernel(device, static_cast<AnyProfile*>(nullptr)); });
      Raise(status);
      return nb::none();
    }
    trace::Record record;
    NpuOptions options = device.npu();
    if constexpr (std::is_same_v<AnyProfile, Profile>) {
      if (details) options.record = &record;
      options.timeline = details || !timeline.empty();
    }
    const Device recording = Npu(device.chip(), options);
    AnyProfile profile;
    const Status status = Unlocked([&] { return kernel(recording, &profile); });
    Raise(status);
    return Finish(profile, record);
  }

 private:
  template <class Work>
  static Status Unlocked(Work work) {
    nb::gil_scoped_release unlocked;
    return work();
  }
  nb::object Finish(const Profile& profile, const trace::Record& record) const;
  nb::object Finish(const BlockProfile& profile, const trace::Record& record) const;
};

// Adds the class and its makers to the module.
void DefineDevices(nb::module_& module);

}  // namespace cubist::python

#endif  // CUBIST_PYTHON_DEVICE_H_
