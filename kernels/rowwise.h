// What the kernels that work row by row share on their way to a launch.
#ifndef CUBIST_KERNELS_ROWWISE_H_
#define CUBIST_KERNELS_ROWWISE_H_

#include "npu_model/types.h"

namespace cubist {

// (N) as (N, 1). Not given stays not given.
template <class AnyTensor>
AnyTensor AsColumn(AnyTensor t) {
  if (t.rank == 1) t.rank = 2, t.sizes[1] = 1, t.strides[1] = 1;
  return t;
}

// run(T()) for the float type that `dtype` stands for.
template <class Run>
auto WithRowType(DType dtype, Run run) {
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

#endif  // CUBIST_KERNELS_ROWWISE_H_
