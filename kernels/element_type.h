// From a tensor's dtype, known when a call is made, to the C++ type that a kernel is compiled for.
#ifndef CUBIST_KERNELS_ELEMENT_TYPE_H_
#define CUBIST_KERNELS_ELEMENT_TYPE_H_

#include "npu_model/types.h"

namespace cubist {

// run(T()) for the float type that `dtype` stands for.
template <class Run>
auto WithFloatType(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kBF16:
      return run(BF16());
    case DType::kF16:
      return run(F16());
    default:
      return run(0.0f);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ELEMENT_TYPE_H_
