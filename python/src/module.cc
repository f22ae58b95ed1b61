// cubist._cubist: the extension under the package's functions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cubist/version.h"
#include "src/arguments.h"
#include "src/device.h"
#include "src/kernels.h"

namespace cubist::python {
namespace {

// Zeros in memory that DLPack hands on, bf16 included.
nb::object Allocate(const std::vector<std::size_t>& shape, const std::string& name) {
  const DType dtype = DTypeNamed(name);
  std::size_t bytes = static_cast<std::size_t>(SizeOf(dtype));
  for (const std::size_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) throw std::bad_alloc();
  }
  auto* memory = new std::shared_ptr<std::byte[]>(AlignedMemory(bytes));
  const nb::capsule owner(memory,
                          [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte[]>*>(p); });
  return nb::cast(nb::ndarray<nb::array_api, nb::device::cpu>(memory->get(), shape.size(), shape.data(),
                                                              owner, nullptr, DlpackOf(dtype)));
}

}  // namespace
}  // namespace cubist::python

NB_MODULE(_cubist, module) {
  using namespace cubist::python;
  module.doc() = "The extension under the functions of cubist.";
  module.attr("__version__") = cubist::Version();
  nb::class_<Spec>(module, "Spec",
                   "Sizes and an element type without memory: for a model that does not compute.")
      .def(
          "__init__",
          [](Spec* self, std::vector<std::int64_t> shape, const std::string& dtype) {
            new (self) Spec{std::move(shape), DTypeNamed(dtype)};
          },
          nb::arg("shape"), nb::arg("dtype"))
      .def_prop_ro("shape", [](const Spec& s) { return nb::tuple(nb::cast(s.shape)); })
      .def_prop_ro("dtype", [](const Spec& s) { return cubist::NameOf(s.dtype); })
      .def("__repr__", [](const Spec& s) {
        std::string text = "Spec((";
        for (const std::int64_t size : s.shape) text += std::to_string(size) + ", ";
        return text + "), '" + cubist::NameOf(s.dtype) + "')";
      });
  module.def("allocate", &Allocate, nb::arg("shape"), nb::arg("dtype"));
  DefineDevices(module);
  DefineKernels(module);
}
