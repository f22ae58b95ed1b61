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

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROWWISE_H_
