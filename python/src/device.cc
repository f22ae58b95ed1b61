#include "src/device.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>

#include "npu_model/chip_constants.h"
#include "npu_model/sync/policy.h"
#include "tools/analysis.h"
#include "tools/profile_fields.h"

namespace cubist::python {
namespace {

// Fields of a dictionary; see tools/profile_fields.h.
struct DictWriter {
  nb::dict dict;

  template <class Value>
  void operator()(const char* name, const Value& value) {
    dict[name] = nb::cast(value);
  }
  template <class Items, class Write>
  void List(const char* name, const Items& items, Write write) {
    nb::list list;
    for (const auto& item : items) {
      DictWriter fields;
      write(fields, item);
      list.append(fields.dict);
    }
    dict[name] = list;
  }
  template <class Write>
  void Group(const char* name, Write write) {
    DictWriter fields;
    write(fields);
    dict[name] = fields.dict;
  }
};

DictWriter ProfileFields(const Device& device, const Profile& profile) {
  DictWriter fields;
  fields("kernel", profile.kernel);
  fields("chip", profile.chip);
  fields("policy", sync::NameOf(device.npu().policy));
  WriteProfileFields(fields, profile);
  return fields;
}

std::shared_ptr<const Tuning> ReadTuning(const std::string& path) {
  if (path.empty()) return nullptr;
  auto tuning = std::make_shared<Tuning>();
  Raise(tuning->Read(path));
  return tuning;
}

PythonDevice MakeHost(std::int64_t threads, const std::string& tuning, bool pin) {
  if (threads < 0 || threads > kMostThreads) {
    throw nb::value_error(
        ("host: threads is " + std::to_string(threads) + ", needs 0 to " + std::to_string(kMostThreads))
            .c_str());
  }
  HostOptions options;
  options.threads = static_cast<int>(threads);
  options.tuning = ReadTuning(tuning);
  options.pin = pin;
  return {Host(options), false, ""};
}

PythonDevice MakeNpu(const std::string& name, const std::map<std::string, double>& constants, bool with_data,
                     const std::string& policy, bool details, const std::string& timeline,
                     const std::string& tuning) {
  ChipSpec chip;
  Raise(FindChip(name, &chip));
  for (const auto& [constant, value] : constants) Raise(SetConstant(&chip, constant, value));
  NpuOptions options;
  options.with_data = with_data;
  if (policy == NameOf(sync::Policy::kPerTile)) {
    options.policy = sync::Policy::kPerTile;
  } else if (policy != NameOf(sync::Policy::kMinimal)) {
    throw nb::value_error(("npu: policy is '" + policy + "', needs one of minimal, per-tile").c_str());
  }
  options.tuning = ReadTuning(tuning);
  return {Npu(chip, options), details, timeline};
}

}  // namespace

nb::object PythonDevice::Finish(const Profile& profile, const trace::Record& record) const {
  DictWriter fields = ProfileFields(device, profile);
  if (details) {
    const Analysis analysis = [&] {
      nb::gil_scoped_release unlocked;
      return Analyse(device.chip(), record, profile);
    }();
    WriteAnalysisFields(fields, profile, analysis);
  } else {
    WritePathFields(fields, profile);
  }
  if (!timeline.empty()) Raise(profile.WriteTimeline(timeline));
  return std::move(fields.dict);
}

nb::object PythonDevice::Finish(const BlockProfile& profile, const trace::Record&) const {
  DictWriter fields;
  fields("time_us", profile.time_s() * 1e6);
  nb::list kernels;
  for (const auto& [name, of_kernel] : profile.kernels) {
    DictWriter kernel = ProfileFields(device, of_kernel);
    WritePathFields(kernel, of_kernel);
    kernel("name", name);
    kernels.append(kernel.dict);
  }
  fields.dict["kernels"] = kernels;
  return std::move(fields.dict);
}

void DefineDevices(nb::module_& module) {
  nb::class_<PythonDevice>(module, "Device", "Where a call runs: see cubist.host and cubist.npu.")
      .def_prop_ro("computes", [](const PythonDevice& d) { return d.device.computes(); })
      .def_prop_ro("is_host", [](const PythonDevice& d) { return d.device.kind() == Device::Kind::kHost; })
      .def_prop_ro("chip", [](const PythonDevice& d) { return d.device.chip().name; })
      .def_prop_ro("threads", [](const PythonDevice& d) { return d.device.threads(); });
  module.def("host", &MakeHost, nb::arg("threads"), nb::arg("tuning"), nb::arg("pin"));
  module.def("npu", &MakeNpu, nb::arg("chip"), nb::arg("constants"), nb::arg("with_data"), nb::arg("policy"),
             nb::arg("details"), nb::arg("timeline"), nb::arg("tuning"));
  module.def("chips", &ChipNames, "Names of the chips that npu() knows.");
}

}  // namespace cubist::python
