#ifndef OWN_SCALED_ADD_H_
#define OWN_SCALED_ADD_H_

#include "cubist/machine.h"

namespace own {

// out = alpha * x + y in fp32, rounded once. x, y, out (M, N): one dtype, fp32, bf16 or fp16.
struct ScaledAddArgs {
  cubist::ConstTensor x, y;
  cubist::Tensor out;
  float alpha = 1;
};

cubist::Status ScaledAdd(const cubist::Device& device, const ScaledAddArgs& args,
                         cubist::Profile* profile = nullptr);

}  // namespace own

#endif  // OWN_SCALED_ADD_H_
