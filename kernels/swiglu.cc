#include "kernels/swiglu.h"

#include <new>

#include "kernels/element_type.h"
#include "kernels/rowwise.h"
#include "kernels/swiglu_kernel.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kSwiGlu = "swiglu";
constexpr const char* kGrad = "swiglu_grad";

// (M), any float dtype, where given.
Status CheckRowScalars(const Argument& arg, const Dim& m) {
  if (!arg.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckShape(arg, {m}));
  return CheckDType(arg, kFloatTypes);
}

Status Validate(const Device& device, const SwiGluArgs& args) {
  const Argument gate{kSwiGlu, "gate", args.gate}, up{kSwiGlu, "up", args.up},
      probs{kSwiGlu, "probs", args.probs}, out{kSwiGlu, "out", args.out};
  CUBIST_RETURN_IF_ERROR(CheckShape(gate, {{"M"}, {"N"}}));
  const Dim m{"M, of gate", args.gate.size(0)}, n{"N, of gate", args.gate.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckDType(gate, kFloatTypes));
  for (const Argument* arg : {&up, &out}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {m, n}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.gate.dtype}));
  }
  CUBIST_RETURN_IF_ERROR(CheckRowScalars(probs, m));
  return CheckTensors(device, {&gate, &up, &probs}, {&out});
}

Status Validate(const Device& device, const SwiGluGradArgs& args) {
  const Argument d_out{kGrad, "d_out", args.d_out}, gate{kGrad, "gate", args.gate}, up{kGrad, "up", args.up};
  const Argument probs{kGrad, "probs", args.probs}, d_gate{kGrad, "d_gate", args.d_gate},
      d_up{kGrad, "d_up", args.d_up}, d_probs{kGrad, "d_probs", args.d_probs};
  CUBIST_RETURN_IF_ERROR(CheckShape(gate, {{"M"}, {"N"}}));
  const Dim m{"M, of gate", args.gate.size(0)}, n{"N, of gate", args.gate.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckDType(gate, kFloatTypes));
  for (const Argument* arg : {&d_out, &up, &d_gate, &d_up}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {m, n}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.gate.dtype}));
  }
  CUBIST_RETURN_IF_ERROR(CheckRowScalars(probs, m));
  CUBIST_RETURN_IF_ERROR(CheckRowScalars(d_probs, m));
  return CheckTensors(device, {&d_out, &gate, &up, &probs}, {&d_gate, &d_up, &d_probs});
}

// The rings of swiglu_kernel.h.
RowwiseShape ShapeOf(const SwiGluArgs& args) {
  return {.rows = args.gate.size(0),
          .cols = args.gate.size(1),
          .dtype = args.gate.dtype,
          .loads = 2,
          .stores = 1,
          .scratch = 2,
          .column_vectors = 2,
          .vector_passes = 9,
          .row_by_row = true};
}
RowwiseShape ShapeOf(const SwiGluGradArgs& args) {
  return {.rows = args.gate.size(0),
          .cols = args.gate.size(1),
          .dtype = args.gate.dtype,
          .loads = 3,
          .stores = 2,
          .scratch = 4,
          .column_vectors = 4,
          .vector_passes = 21,
          .row_by_row = true};
}

template <class T>
Status Run(const Device& device, const SwiGluArgs& args, Profile* profile) {
  const auto body = [&](Launch& launch, const RowwiseTiling& tiling) {
    SwiGluOperands g;
    g.gate = MatrixOf(*launch.Input("gate", args.gate));
    g.up = MatrixOf(*launch.Input("up", args.up));
    g.probs = launch.Input("probs", AsColumn(args.probs));
    g.out = MatrixOf(*launch.Output("out", args.out));
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { SwiGluKernel<T>(core, g, tiling); });
  };
  return RunRowwise(device, kSwiGlu, ShapeOf(args), {args.gate, args.up, args.probs, args.out}, profile,
                    body);
}

template <class T>
Status Run(const Device& device, const SwiGluGradArgs& args, Profile* profile) {
  const auto body = [&](Launch& launch, const RowwiseTiling& tiling) {
    SwiGluGradOperands g;
    g.d_out = MatrixOf(*launch.Input("d_out", args.d_out));
    g.gate = MatrixOf(*launch.Input("gate", args.gate));
    g.up = MatrixOf(*launch.Input("up", args.up));
    g.probs = launch.Input("probs", AsColumn(args.probs));
    g.d_gate = MatrixOf(*launch.Output("d_gate", args.d_gate));
    g.d_up = MatrixOf(*launch.Output("d_up", args.d_up));
    g.d_probs = launch.Output("d_probs", AsColumn(args.d_probs));
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { SwiGluGradKernel<T>(core, g, tiling); });
  };
  return RunRowwise(device, kGrad, ShapeOf(args),
                    {args.d_out, args.gate, args.up, args.probs, args.d_gate, args.d_up, args.d_probs},
                    profile, body);
}

}  // namespace

Status SwiGlu(const Device& device, const SwiGluArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.gate.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status SwiGluGrad(const Device& device, const SwiGluGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.gate.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
