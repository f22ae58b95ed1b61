#include "kernels/matmul.h"

#include <new>
#include <string>
#include <utility>

#include "kernels/choose_for.h"
#include "kernels/matmul_kernel.h"
#include "kernels/pack.h"
#include "kernels/packed_input.h"
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

DType InputType(const MatmulArgs& args) { return args.packed_a.given() ? args.packed_a.dtype : args.a.dtype; }

Status CheckPackedSide(const Device& device, const char* name, const PackedOperand& packed, Side side,
                       const Argument& plain, bool transposed) {
  const auto error = [&](const std::string& what) {
    return InvalidArgument(std::string("matmul: ") + name + " " + what);
  };
  if (plain.tensor.given()) return error(std::string("and ") + plain.name + " are both given");
  if (packed.side != side)
    return error(std::string("was packed as the operand ") + (side == Side::kA ? "b" : "a"));
  if (packed.matrices != 1) return error("holds " + std::to_string(packed.matrices) + " matrices, needs 1");
  if (transposed) return error(std::string("is never transposed, but transpose_") + plain.name + " is set");
  return CheckPacked(device, "matmul", name, packed);
}

// Shape and dtype of both operands, plain or packed.
Status ValidateOperands(const Device& device, const MatmulArgs& args, std::int64_t* m, std::int64_t* n) {
  const Argument a{"matmul", "a", args.a}, b{"matmul", "b", args.b};
  const DType in = InputType(args);
  std::int64_t k = 0;
  if (args.packed_a.given()) {
    CUBIST_RETURN_IF_ERROR(CheckPackedSide(device, "packed_a", args.packed_a, Side::kA, a, args.transpose_a));
    *m = args.packed_a.rows, k = args.packed_a.cols;
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(a, {{args.transpose_a ? "K" : "M"}, {args.transpose_a ? "M" : "K"}}));
    *m = args.a.size(args.transpose_a ? 1 : 0), k = args.a.size(args.transpose_a ? 0 : 1);
    CUBIST_RETURN_IF_ERROR(CheckDType(a, {DType::kF32, DType::kBF16, DType::kF16}));
  }
  if (args.packed_b.given()) {
    const PackedOperand& packed = args.packed_b;
    CUBIST_RETURN_IF_ERROR(CheckPackedSide(device, "packed_b", packed, Side::kB, b, args.transpose_b));
    if (packed.rows != k || packed.dtype != in) {
      return InvalidArgument("matmul: packed_b has " + std::to_string(packed.rows) + " rows of " +
                             NameOf(packed.dtype) + ", needs " + std::to_string(k) + " (K, of a) of " +
                             NameOf(in));
    }
    *n = packed.cols;
    return {};
  }
  if (args.transpose_b) {
    CUBIST_RETURN_IF_ERROR(CheckShape(b, {{"N"}, {"K, of a", k}}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(b, {{"K, of a", k}, {"N"}}));
  }
  *n = args.b.size(args.transpose_b ? 0 : 1);
  return CheckDType(b, {in});
}

Status Validate(const Device& device, const MatmulArgs& args) {
  std::int64_t m = 0, n = 0;
  CUBIST_RETURN_IF_ERROR(ValidateOperands(device, args, &m, &n));
  const DType in = InputType(args);
  const Argument bias{"matmul", "bias", args.bias}, c{"matmul", "c", args.c};
  CUBIST_RETURN_IF_ERROR(CheckShape(c, {{"M, of a", m}, {"N, of b", n}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(c, {DType::kF32, args.accumulate ? DType::kF32 : in}));
  if (args.bias.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"N, of b", n}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(bias, {DType::kF32, in}));
  }
  const Argument inputs[] = {{"matmul", "a", args.a},
                             {"matmul", "b", args.b},
                             bias,
                             {"matmul", "packed_a", args.packed_a.memory()},
                             {"matmul", "packed_b", args.packed_b.memory()}};
  for (const Argument& input : inputs) CUBIST_RETURN_IF_ERROR(CheckStorage(input, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckStorage(c, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckWritable(c));
  for (const Argument& input : inputs) CUBIST_RETURN_IF_ERROR(CheckApart(c, input));
  return {};
}

// An operand as a kernel loads it: packed by the caller, or plain.
Operand OperandOf(Launch& launch, const char* name, const ConstTensor& plain, bool transposed,
                  const char* packed_name, const PackedOperand& packed) {
  if (packed.given()) return {{}, PackedInput(launch, packed_name, packed), true};
  return {MatrixOf(*launch.Input(name, transposed ? Transposed(plain) : plain)), {}, false};
}

// The same once the tiling is known: packed whole by a phase before, where it says so.
template <class T>
void PackWhere(bool pack, Launch& launch, const char* name, Role role, Operand* operand) {
  if (pack) *operand = {{}, Pack<T>(launch, name, role, *operand->plain.tensor), true};
}

template <class T>
Status Run(const Device& device, const MatmulArgs& args, Profile* profile) {
  Launch launch(device, "matmul");
  MatmulOperands operands;
  operands.a = OperandOf(launch, "a", args.a, args.transpose_a, "packed_a", args.packed_a);
  operands.b = OperandOf(launch, "b", args.b, args.transpose_b, "packed_b", args.packed_b);

  MatmulShape shape;
  shape.m = operands.a.rows(), shape.n = operands.b.cols(), shape.k = operands.a.cols();
  shape.in = InputType(args), shape.out = args.c.dtype;
  shape.bias = args.bias.given();
  shape.a_packed = operands.a.is_packed, shape.b_packed = operands.b.is_packed;
  const Gm& a = operands.a.plain;
  shape.a_row_bytes = !shape.a_packed && a.col_stride == 1 ? a.row_stride * SizeOf(shape.in) : 0;
  const Gm& b = operands.b.plain;
  shape.any_order = args.any_order;
  shape.b_row_bytes = !shape.b_packed && b.col_stride == 1 ? b.row_stride * SizeOf(shape.in) : 0;
  MatmulTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, "matmul", shape, &Candidates, &tiling));

  operands.bias = launch.Input("bias", args.bias);
  operands.c = MatrixOf(args.accumulate ? *launch.InOut("c", args.c) : *launch.Output("c", args.c));
  operands.accumulate = args.accumulate ? Accumulate::kYes : Accumulate::kNo;
  operands.k = shape.k;
  PackWhere<T>(tiling.pack_a, launch, "a_packed", Role::kA, &operands.a);
  PackWhere<T>(tiling.pack_b, launch, "b_packed", Role::kB, &operands.b);
  launch.OnAiCores(tiling.grid.count(), [&](auto& core) { MatmulKernel<T>(core, operands, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status Matmul(const Device& device, const MatmulArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  switch (InputType(args)) {
    case DType::kBF16:
      return Run<BF16>(device, args, profile);
    case DType::kF16:
      return Run<F16>(device, args, profile);
    default:
      return Run<float>(device, args, profile);
  }
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
