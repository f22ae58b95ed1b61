// The kernels of the library, callable with keyword arguments by the names of their fields.
#ifndef CUBIST_PYTHON_KERNELS_H_
#define CUBIST_PYTHON_KERNELS_H_

#include <nanobind/nanobind.h>

namespace cubist::python {

// Each as kernel(device, {field: value}): None on a host, the profile's dictionary on a chip.
void DefineKernels(nanobind::module_& module);

}  // namespace cubist::python

#endif  // CUBIST_PYTHON_KERNELS_H_
