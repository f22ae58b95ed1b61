#include "kernels/matmul_epilogue.h"

#include <string>

#include "kernels/validate.h"

namespace cubist {

bool SameView(const ConstTensor& x, const ConstTensor& y) {
  bool same = x.data == y.data && x.dtype == y.dtype && x.rank == y.rank;
  for (int d = 0; same && d < x.rank; ++d) {
    same = x.size(d) == y.size(d) && (x.size(d) <= 1 || x.stride(d) == y.stride(d));
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
