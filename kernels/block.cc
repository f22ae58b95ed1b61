#include "kernels/block.h"

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "kernels/block_steps.h"
#include "kernels/choose_for.h"
#include "kernels/matmul.h"
#include "kernels/sum_kernel.h"
#include "npu_model/launch.h"

namespace cubist {

Tensor BlockState::Take(const std::string& name, DType dtype, std::initializer_list<std::int64_t> sizes) {
  const Tensor shape(nullptr, dtype, sizes);
  std::vector<Line>& lines = memory_[name];
  const auto needed = static_cast<std::size_t>(CeilDiv(shape.count() * SizeOf(dtype), 64) + 1);
  if (lines.size() < needed) lines.resize(needed);
  return Tensor(static_cast<void*>(lines.data()), dtype, sizes);
}

double BlockProfile::time_s() const {
  double sum = 0;
  for (const auto& [name, profile] : kernels) sum += profile.time_s;
  return sum;
}

void ProjectionGrad(Steps* steps, std::pair<const char*, const char*> names, const ProjectionGradArgs& args) {
  steps->Run(names.first, &Matmul,
             MatmulArgs{.a = args.dy, .b = args.weights, .c = args.dx, .transpose_b = true});
  if (!args.dw.given()) return;
  steps->Run(names.second, &Matmul, MatmulArgs{.a = args.x, .b = args.dy, .c = args.dw, .transpose_a = true});
}

Status CheckGradient(const Argument& gradient, const ConstTensor& weight) {
  if (!gradient.tensor.given()) return {};
  if (!weight.given()) return gradient.Error("is given, and its weight is not");
  std::array<Dim, ConstTensor::kMaxRank> dims;
  for (int d = 0; d < weight.rank; ++d) dims[static_cast<std::size_t>(d)] = {"as its weight", weight.size(d)};
  CUBIST_RETURN_IF_ERROR(CheckShape(gradient, std::span(dims).first(static_cast<std::size_t>(weight.rank))));
  return weight.rank == 1 ? CheckDType(gradient, kFloatTypes)
                          : CheckDType(gradient, {DType::kF32, weight.dtype});
}

Status CheckState(const char* kernel, const BlockState* state) {
  return state != nullptr ? Status() : InvalidArgument(std::string(kernel) + ": state is a null pointer");
}

Status Sum(const Device& device, const SumArgs& args, Profile* profile) {
  Launch launch(device, "sum");
  const RowwiseShape shape{.rows = args.out.size(0),
                           .cols = args.out.size(1),
                           .dtype = DType::kF32,
                           .loads = 1,
                           .stores = 1,
                           .vector_passes = 2};
  RowwiseTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, "sum", shape, &RowwiseCandidates, &tiling));
  SumOperands g;
  g.terms = {launch.Input("a", args.a), launch.Input("b", args.b), launch.Input("c", args.c)};
  g.out = MatrixOf(*launch.Output("out", args.out));
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { SumKernel(core, g, tiling); });
  return launch.Finish(profile);
}

}  // namespace cubist
