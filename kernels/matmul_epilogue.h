// The epilogue of a product's arguments, as its kernel runs it.
#ifndef CUBIST_KERNELS_MATMUL_EPILOGUE_H_
#define CUBIST_KERNELS_MATMUL_EPILOGUE_H_

#include "kernels/epilogue_kernel.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

struct EpilogueArgs {
  float alpha = 1, beta = 1;
  Activation activation = Activation::kNone;
  bool bias = false;
  ConstTensor residual;     // Not given where beta is 0.
  bool accumulate = false;  // Adds to c.
};

// One view of the same elements.
bool SameView(const ConstTensor& x, const ConstTensor& y);

Status CheckActivation(const char* kernel, Activation activation);

// FIX casts, scales, keeps above 0 or adds to fp32 memory; what is more is a Vector core's. With `late` everything is: the
// sum is not in L0C. Where epilogue.shape.bias is not set, the bias starts the sums in L0C.
Epilogue EpilogueOf(const EpilogueArgs& args, const ConstTensor& c, bool late);

}  // namespace cubist

#endif  // CUBIST_KERNELS_MATMUL_EPILOGUE_H_
