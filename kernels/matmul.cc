#include "kernels/matmul.h"

#include "kernels/choose_for.h"
#include "kernels/matmul_kernel.h"
#include "kernels/pack.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"
#include "tiling/matmul_tiling.h"

namespace cubist {
namespace {

ConstTensor Transposed(ConstTensor t) {
  std::swap(t.sizes[0], t.sizes[1]);
  std::swap(t.strides[0], t.strides[1]);
  return t;
}

Status Validate(const Device& device, const MatmulArgs& args) {
  const Argument a{"matmul", "a", args.a}, b{"matmul", "b", args.b}, bias{"matmul", "bias", args.bias},
      c{"matmul", "c", args.c};
  CUBIST_RETURN_IF_ERROR(CheckShape(a, {{args.transpose_a ? "K" : "M"}, {args.transpose_a ? "M" : "K"}}));
  const std::int64_t m = args.a.size(args.transpose_a ? 1 : 0), k = args.a.size(args.transpose_a ? 0 : 1);
  if (args.transpose_b) {
    CUBIST_RETURN_IF_ERROR(CheckShape(b, {{"N"}, {"K, of a", k}}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(b, {{"K, of a", k}, {"N"}}));
  }
  const std::int64_t n = args.b.size(args.transpose_b ? 0 : 1);
  CUBIST_RETURN_IF_ERROR(CheckShape(c, {{"M, of a", m}, {"N, of b", n}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(a, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(b, {args.a.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(c, {DType::kF32, args.a.dtype}));
  if (args.bias.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"N, of b", n}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(bias, {DType::kF32, args.a.dtype}));
  }
  for (const Argument* arg : {&a, &b, &bias, &c})
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckWritable(c));
  for (const Argument* arg : {&a, &b, &bias}) CUBIST_RETURN_IF_ERROR(CheckApart(c, *arg));
  return {};
}

template <class T>
Status Run(const Device& device, const MatmulArgs& args, Profile* profile) {
  Launch launch(device, "matmul");
  const GmTensor& a_tensor = *launch.Input("a", args.transpose_a ? Transposed(args.a) : args.a);
  const GmTensor& b_tensor = *launch.Input("b", args.transpose_b ? Transposed(args.b) : args.b);
  const Gm a = MatrixOf(a_tensor), b = MatrixOf(b_tensor);

  MatmulShape shape;
  shape.m = a.rows, shape.n = b.cols, shape.k = a.cols;
  shape.in = args.a.dtype, shape.out = args.c.dtype;
  shape.bias = args.bias.given();
  shape.a_row_bytes = a.col_stride == 1 ? a.row_stride * SizeOf(shape.in) : 0;
  MatmulTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, "matmul", shape, &Candidates, &tiling));

  MatmulOperands operands;
  operands.bias = launch.Input("bias", args.bias);
  operands.c = MatrixOf(*launch.Output("c", args.c));
  operands.k = shape.k;
  operands.a.plain = a, operands.b.plain = b;
  if (tiling.pack_a) operands.a = {{}, Pack<T>(launch, "a_packed", Role::kA, a_tensor), true};
  if (tiling.pack_b) operands.b = {{}, Pack<T>(launch, "b_packed", Role::kB, b_tensor), true};
  launch.OnAiCores(tiling.grid.count(), [&](auto& core) { MatmulKernel<T>(core, operands, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status Matmul(const Device& device, const MatmulArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  switch (args.a.dtype) {
    case DType::kBF16:
      return Run<BF16>(device, args, profile);
    case DType::kF16:
      return Run<F16>(device, args, profile);
    default:
      return Run<float>(device, args, profile);
  }
}

}  // namespace cubist
