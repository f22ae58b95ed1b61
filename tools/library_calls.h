// The kernels of the library by name: what each one's sizes mean, and how a call of it is made.
#ifndef CUBIST_TOOLS_LIBRARY_CALLS_H_
#define CUBIST_TOOLS_LIBRARY_CALLS_H_

#include <vector>

#include "tools/kernel_call.h"

namespace cubist {

struct NamedKernel {
  KernelForm form;
  MakeCall make;
};
// A new kernel is a line here.
std::vector<NamedKernel> LibraryKernels();

}  // namespace cubist

#endif  // CUBIST_TOOLS_LIBRARY_CALLS_H_
