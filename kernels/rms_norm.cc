#include "kernels/rms_norm.h"

#include <cmath>
#include <new>

#include "kernels/element_type.h"
#include "kernels/rms_norm_kernel.h"
#include "kernels/rowwise.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kNorm = "rms_norm";
constexpr const char* kGrad = "rms_norm_grad";

Status Validate(const Device& device, const RmsNormArgs& args) {
  const Argument x{kNorm, "x", args.x}, residual{kNorm, "residual", args.residual},
      gamma{kNorm, "gamma", args.gamma};
  const Argument out{kNorm, "out", args.out}, sum{kNorm, "sum", args.sum}, rstd{kNorm, "rstd", args.rstd};
  CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"T"}, {"H"}}));
  const Dim t{"T, of x", args.x.size(0)}, h{"H, of x", args.x.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {t, h}));
  if (residual.tensor.given() != sum.tensor.given()) {
    return sum.Error(sum.tensor.given() ? "is given without residual" : "is not given, and residual is");
  }
  for (const Argument* arg : {&residual, &sum}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {t, h}));
  }
  if (gamma.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(gamma, {h}));
  if (rstd.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(rstd, {t}));
  if (!(args.eps >= 0) || std::isinf(args.eps))
    return OptionError(kNorm, "eps", args.eps, "a finite value >= 0");
  CUBIST_RETURN_IF_ERROR(CheckDType(x, kFloatTypes));
  for (const Argument* arg : {&out, &residual, &sum}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.x.dtype}));
  }
  if (gamma.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(gamma, kFloatTypes));
  if (rstd.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(rstd, {DType::kF32}));
  return CheckTensors(device, {&x, &residual, &gamma}, {&out, &sum, &rstd});
}

Status Validate(const Device& device, const RmsNormGradArgs& args) {
  const Argument d_out{kGrad, "d_out", args.d_out}, x{kGrad, "x", args.x}, rstd{kGrad, "rstd", args.rstd};
  const Argument gamma{kGrad, "gamma", args.gamma}, d_sum{kGrad, "d_sum", args.d_sum};
  const Argument d_x{kGrad, "d_x", args.d_x}, d_gamma{kGrad, "d_gamma", args.d_gamma};
  CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"T"}, {"H"}}));
  const Dim t{"T, of x", args.x.size(0)}, h{"H, of x", args.x.size(1)};
  for (const Argument* arg : {&d_out, &d_x}) CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {t, h}));
  if (d_sum.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(d_sum, {t, h}));
  CUBIST_RETURN_IF_ERROR(CheckShape(rstd, {t}));
  CUBIST_RETURN_IF_ERROR(CheckDType(x, kFloatTypes));
  for (const Argument* arg : {&d_out, &d_x, &d_sum}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.x.dtype}));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(rstd, {DType::kF32}));
  for (const Argument* arg : {&gamma, &d_gamma}) {
    if (!arg->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {h}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, kFloatTypes));
  }
  return CheckTensors(device, {&d_out, &x, &rstd, &gamma, &d_sum}, {&d_x, &d_gamma});
}

// The rings of rms_norm_kernel.h.
RowwiseShape ShapeOf(const RmsNormArgs& args) {
  const int residual = args.residual.given() ? 1 : 0;
  return {.rows = args.x.size(0),
          .cols = args.x.size(1),
          .dtype = args.x.dtype,
          .loads = 1 + residual,
          .stores = 1 + residual,
          .scratch = 2,
          .row_vectors = 1,
          .column_vectors = 3,
          .vector_passes = 7,
          .whole_rows = true,
          .row_by_row = true};
}
RowwiseShape ShapeOf(const RmsNormGradArgs& args) {
  return {.rows = args.x.size(0),
          .cols = args.x.size(1),
          .dtype = args.x.dtype,
          .loads = args.d_sum.given() ? 3 : 2,
          .stores = 1,
          .scratch = 2,
          .row_vectors = 2,
          .column_vectors = 3,
          .vector_passes = 14,
          .whole_rows = true,
          .row_by_row = true};
}

template <class T>
Status Run(const Device& device, const RmsNormArgs& args, Profile* profile) {
  const auto body = [&](Launch& launch, const RowwiseTiling& tiling) {
    RmsNormOperands g;
    g.x = MatrixOf(*launch.Input("x", args.x));
    g.residual = launch.Input("residual", args.residual);
    g.gamma = launch.Input("gamma", args.gamma);
    g.out = MatrixOf(*launch.Output("out", args.out));
    g.sum = launch.Output("sum", args.sum);
    g.rstd = launch.Output("rstd", AsColumn(args.rstd));
    g.eps = args.eps;
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RmsNormKernel<T>(core, g, tiling); });
  };
  return RunRowwise(device, kNorm, ShapeOf(args),
                    {args.x, args.residual, args.gamma, args.out, args.sum, args.rstd}, profile, body);
}

template <class T>
Status Run(const Device& device, const RmsNormGradArgs& args, Profile* profile) {
  const auto body = [&](Launch& launch, const RowwiseTiling& tiling) {
    RmsNormGradOperands g;
    g.d_out = MatrixOf(*launch.Input("d_out", args.d_out));
    g.x = MatrixOf(*launch.Input("x", args.x));
    g.rstd = MatrixOf(*launch.Input("rstd", AsColumn(args.rstd)));
    g.gamma = launch.Input("gamma", args.gamma);
    g.d_more = launch.Input("d_sum", args.d_sum);
    g.d_x = MatrixOf(*launch.Output("d_x", args.d_x));
    const GmTensor* d_gamma = launch.Output("d_gamma", args.d_gamma);
    g.d_gamma_of_chunk = MatrixOf(*launch.Workspace(
        "d_gamma_of_chunk", DType::kF32, {tiling.chunks, d_gamma == nullptr ? 0 : args.x.size(1)}));
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RmsNormGradKernel<T>(core, g, tiling); });
    if (d_gamma != nullptr) {
      constexpr std::int64_t kPartCols = 256;
      const Gm total = MatrixOf(*d_gamma);
      launch.OnVectorCores(CeilDiv(total.cols, kPartCols),
                           [&](auto& core) { SumChunksKernel(core, g.d_gamma_of_chunk, total, kPartCols); });
    }
  };
  return RunRowwise(device, kGrad, ShapeOf(args),
                    {args.d_out, args.x, args.rstd, args.gamma, args.d_sum, args.d_x, args.d_gamma}, profile,
                    body);
}

}  // namespace

Status RmsNorm(const Device& device, const RmsNormArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.x.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status RmsNormGrad(const Device& device, const RmsNormGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.x.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
