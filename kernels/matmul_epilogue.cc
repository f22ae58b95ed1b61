#include "kernels/matmul_epilogue.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/validate.h"

namespace cubist {

bool SameView(const ConstTensor& x, const ConstTensor& y) {
  bool same = x.data == y.data && x.dtype == y.dtype && x.given() == y.given();
  for (int d = 1; same && d <= std::max(x.rank, y.rank); ++d) {
    const std::int64_t of_x = d <= x.rank ? x.size(x.rank - d) : 1,
                       of_y = d <= y.rank ? y.size(y.rank - d) : 1;
    same = of_x == of_y && (of_x <= 1 || x.stride(x.rank - d) == y.stride(y.rank - d));
  }
  return same;
}

Status CheckActivation(const char* kernel, Activation activation) {
  return CheckChoice(kernel, "activation", activation, Activation::kGeluTanh);
}

Epilogue EpilogueOf(const EpilogueArgs& args, const ConstTensor& c, bool late) {
  const bool residual = args.residual.given() || args.accumulate;
  const bool onto_c = args.accumulate || (args.residual.given() && args.beta == 1 && c.dtype == DType::kF32 &&
                                          c.data != nullptr && SameView(args.residual, c));
  const bool fix_activates =
      args.activation == Activation::kNone || (args.activation == Activation::kRelu && !residual);
  Epilogue e;
  e.scalars = {args.alpha, args.accumulate ? 1 : args.beta, args.activation};
  e.shape.bias = args.bias && (late || args.alpha != 1);
  if (!late && !e.shape.bias && (!residual || onto_c) && fix_activates) {
    e.fix = {onto_c ? Accumulate::kYes : Accumulate::kNo, args.alpha, args.activation == Activation::kRelu};
    return e;
  }
  e.shape.vector = true;
  e.shape.residual = residual;
  e.shape.scratch = e.scalars.scratch();
  return e;
}

}  // namespace cubist
