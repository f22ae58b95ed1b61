#include "tests/tutorial/matmul_silu.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace tutorial {
namespace {

constexpr const char* kName = "matmul_silu";

// [validate]
Status Validate(const Device& device, const MatmulSiluArgs& args) {
  const Argument a{kName, "a", args.a}, b{kName, "b", args.b}, bias{kName, "bias", args.bias},
      out{kName, "out", args.out};
  CUBIST_RETURN_IF_ERROR(CheckShape(a, {{"M"}, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(b, {{"K, of a", args.a.size(1)}, {"N"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"N, of b", args.b.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"M, of a", args.a.size(0)}, {"N, of b", args.b.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(a, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(b, {args.a.dtype}));
  for (const Argument* arg : {&bias, &out}) {
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {DType::kF32, args.a.dtype}));
  }
  return CheckTensors(device, {&a, &b, &bias}, {&out});
}
// [validate]

// UB's bytes: two stages of x and one of s.
std::int64_t UbBytes(const ChipSpec& chip, const MatmulSiluTiling& t) {
  return 3 * chip.SlotBytes(Buffer::kUB, DType::kF32, t.strip, t.product.n);
}

// [launch]
MatmulSiluOperands OperandsOf(Launch& launch, const MatmulSiluArgs& args) {
  return {MatrixOf(*launch.Input("a", args.a)), MatrixOf(*launch.Input("b", args.b)),
          MatrixOf(*launch.Input("bias", args.bias)), MatrixOf(*launch.Output("out", args.out))};
}

// From row to row, where columns are adjacent.
std::int64_t RowBytesOf(const ConstTensor& t) { return t.stride(1) == 1 ? t.stride(0) * SizeOf(t.dtype) : 0; }

template <class T>
Status Run(const Device& device, const MatmulSiluArgs& args, Profile* profile) {
  Launch launch(device, kName);
  MatmulShape shape;
  shape.m = args.a.size(0), shape.k = args.a.size(1), shape.n = args.b.size(1);
  shape.in = args.a.dtype, shape.out = args.out.dtype, shape.bias = true;
  shape.a_row_bytes = RowBytesOf(args.a), shape.b_row_bytes = RowBytesOf(args.b);
  shape.epilogue.vector = true;
  MatmulSiluTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kName, shape, &Tilings, &tiling));
  const MatmulSiluOperands g = OperandsOf(launch, args);
  launch.OnAiCores(tiling.product.grid.count(), [&](auto& core) { MatmulSiluKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}
// [launch]

}  // namespace

// [tiling]
// Every tiling of the product, with the tallest strip that UB holds.
std::vector<MatmulSiluTiling> Tilings(const ChipSpec& chip, const MatmulShape& shape) {
  std::vector<MatmulSiluTiling> tilings;
  for (MatmulTiling product : Candidates(chip, shape)) {
    product.splits = 1;  // A core walks all of k.
    Complete(chip, shape, product);
    MatmulSiluTiling t{product, std::max<std::int64_t>(CeilDiv(product.m, chip.vector_per_cube), 1)};
    while (t.strip > 1 && !Fits(chip, shape, t)) t.strip = CeilDiv(t.strip, 2);
    if (Fits(chip, shape, t)) tilings.push_back(t);
  }
  return tilings;
}

bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulSiluTiling& t) {
  const MatmulTiling& product = t.product;
  if (product.pack_a || product.pack_b || product.keep_a > 0) return false;  // Ours neither packs nor keeps.
  return Fits(chip, shape, product) && UbBytes(chip, t) <= chip.buffer(Buffer::kUB).capacity;
}

// Cycles: where pipes overlap the slower of Cube and Vector side, else both.
double Price(const ChipSpec& chip, const MatmulShape& shape, const MatmulSiluTiling& t) {
  const double product = Price(chip, shape, t.product);
  const double lanes = chip.cube_cores * chip.vector_per_cube;
  const double per_element = 2 * chip.vector_cycles(VectorOp::kUnary) + chip.vector_cycles(VectorOp::kExp) +
                             chip.vector_cycles(VectorOp::kDiv);
  const double silu =
      static_cast<double>(shape.m * shape.n) / lanes / 64 * per_element;  // 64 floats at a time
  return chip.pipes_overlap ? std::max(product, silu) : product + silu;
}

Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulSiluTiling* tiling) {
  double best = std::numeric_limits<double>::infinity();
  for (const MatmulSiluTiling& t : Tilings(chip, shape)) {
    if (const double price = Price(chip, shape, t); price < best) best = price, *tiling = t;
  }
  if (best < std::numeric_limits<double>::infinity()) return {};
  return {StatusCode::kUnsupported, std::string(kName) + ": no tiling fits " + chip.name};
}
// [tiling]

Status MatmulSilu(const Device& device, const MatmulSiluArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.a.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
}

Status OneTile(const Device& device, const MatmulSiluArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  CUBIST_RETURN_IF_ERROR(CheckDType({kName, "a", args.a}, {DType::kBF16}));
  Launch launch(device, kName);
  const MatmulSiluOperands g = OperandsOf(launch, args);
  launch.OnAiCores(1, [&](auto& core) { OneTileKernel<BF16>(core, g.a, g.b, g.bias, g.c); });
  return launch.Finish(profile);
}

}  // namespace tutorial
