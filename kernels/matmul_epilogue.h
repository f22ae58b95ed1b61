// What products share of their arguments: views of them, and the epilogue as their kernels run it.
#ifndef CUBIST_KERNELS_MATMUL_EPILOGUE_H_
#define CUBIST_KERNELS_MATMUL_EPILOGUE_H_

#include <cstddef>
#include <utility>

#include "kernels/epilogue_kernel.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

struct EpilogueArgs {
  float alpha = 1, beta = 1;
  Activation activation = Activation::kNone;
  bool bias = false;
  ConstTensor residual = {};  // Not given where beta is 0.
  bool accumulate = false;    // Adds to c.
};

// The last two dimensions exchanged, where asked.
template <class AnyTensor>
AnyTensor TransposedIf(bool transpose, AnyTensor t) {
  if (!transpose) return t;
  const auto last = static_cast<std::size_t>(t.rank - 1);
  std::swap(t.sizes[last], t.sizes[last - 1]);
  std::swap(t.strides[last], t.strides[last - 1]);
  return t;
}

// One view of the same elements; dimensions of one element may be missing in front.
bool SameView(const ConstTensor& x, const ConstTensor& y);

Status CheckActivation(const char* kernel, Activation activation);

// FIX casts, scales, keeps above 0 or adds to fp32 memory; what is more is a Vector core's. With `late` everything is: the
// sum is not in L0C. Where epilogue.shape.bias is not set, the bias starts the sums in L0C.
Epilogue EpilogueOf(const EpilogueArgs& args, const ConstTensor& c, bool late);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_EPILOGUE_H_
