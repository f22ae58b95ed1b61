#include "kernels/token_permute_grad.h"

#include <new>

#include "kernels/choose_for.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/token_permute_grad_kernel.h"
#include "kernels/token_permute_kernel.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kPermuteGrad = "token_permute_grad";
constexpr const char* kUnpermuteGrad = "token_unpermute_grad";

Status CheckTopK(const char* kernel, std::int64_t top_k) {
  if (top_k >= 0) return {};
  return InvalidArgument(std::string(kernel) + ": top_k is " + std::to_string(top_k) + ", needs 0 or more");
}

Status Validate(const Device& device, const TokenPermuteGradArgs& args) {
  const Argument grad{kPermuteGrad, "permuted_grad", args.permuted_grad},
      sorted{kPermuteGrad, "sorted_indices", args.sorted_indices},
      row_probs{kPermuteGrad, "permuted_probs_grad", args.permuted_probs_grad},
      tokens{kPermuteGrad, "tokens_grad", args.tokens_grad},
      probs{kPermuteGrad, "probs_grad", args.probs_grad};
  CUBIST_RETURN_IF_ERROR(CheckShape(grad, {{"M"}, {"H"}}));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kPermuteGrad, args.rows, grad));
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"T"}, {"H, of permuted_grad", args.permuted_grad.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckTopK(kPermuteGrad, args.top_k));
  const std::int64_t t = args.tokens_grad.size(0), k = args.top_k;
  CUBIST_RETURN_IF_ERROR(CheckSlots(tokens, t, k));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(grad, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, {args.permuted_grad.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (row_probs.tensor.given() || probs.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(row_probs, {{"M, of permuted_grad", args.permuted_grad.size(0)}}));
    CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of tokens_grad", t}, {"K", k}}));
    for (const Argument* arg : {&row_probs, &probs})
      CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {DType::kF32, DType::kBF16, DType::kF16}));
  }
  CUBIST_RETURN_IF_ERROR(CheckStorage(sorted, /*needs_data=*/true));
  for (const Argument* arg : {&grad, &row_probs, &tokens, &probs})
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  for (const Argument* output : {&tokens, &probs}) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* other : {&grad, &sorted, &row_probs, &tokens, &probs}) {
      if (other != output) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *other));
    }
  }
  return CheckValues(sorted, -1, std::int64_t{1} << 31);
}

template <class T>
Status Run(const Device& device, const TokenPermuteGradArgs& args, Profile* profile) {
  Launch launch(device, kPermuteGrad);
  TokenPermuteShape shape;
  shape.tokens = args.tokens_grad.size(0), shape.hidden = args.tokens_grad.size(1), shape.top_k = args.top_k;
  shape.dtype = args.permuted_grad.dtype;
  TokenUnpermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kPermuteGrad, shape, &UnpermuteCandidates, &tiling));

  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(*launch.Input("permuted_grad", args.permuted_grad));
  g.sorted_indices =
      MatrixOf(*launch.Input("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.row_values = launch.Input("permuted_probs_grad", AsColumn(args.permuted_probs_grad));
  g.out = MatrixOf(*launch.Output("tokens_grad", args.tokens_grad));
  g.slot_values = launch.Output("probs_grad", args.probs_grad);
  g.first_row = args.rows.value_or(Range()).begin;
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

Status Validate(const Device& device, const TokenUnpermuteGradArgs& args) {
  const Argument out{kUnpermuteGrad, "out_grad", args.out_grad},
      permuted{kUnpermuteGrad, "permuted", args.permuted},
      sorted{kUnpermuteGrad, "sorted_indices", args.sorted_indices},
      probs{kUnpermuteGrad, "probs", args.probs}, grad{kUnpermuteGrad, "permuted_grad", args.permuted_grad},
      probs_grad{kUnpermuteGrad, "probs_grad", args.probs_grad};
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"T"}, {"H"}}));
  const std::int64_t t = args.out_grad.size(0), h = args.out_grad.size(1);
  CUBIST_RETURN_IF_ERROR(CheckShape(grad, {{"M"}, {"H, of out_grad", h}}));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kUnpermuteGrad, args.rows, grad));
  const std::int64_t m = args.permuted_grad.size(0);
  if (probs_grad.tensor.given() || permuted.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"M, of permuted_grad", m}, {"H, of out_grad", h}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {args.out_grad.dtype}));
  }
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of out_grad", t}, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckTopK(kUnpermuteGrad, args.top_k));
  const std::int64_t k = probs.tensor.given() ? args.probs.size(1) : args.top_k;
  if (probs_grad.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(probs_grad, {{"T, of out_grad", t}, {"K", k}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(probs_grad, {DType::kF32, DType::kBF16, DType::kF16}));
  }
  CUBIST_RETURN_IF_ERROR(CheckSlots(out, t, k));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(grad, {args.out_grad.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (probs.tensor.given())
    CUBIST_RETURN_IF_ERROR(CheckDType(probs, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(sorted, /*needs_data=*/true));
  for (const Argument* arg : {&out, &permuted, &probs, &grad, &probs_grad})
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  for (const Argument* output : {&grad, &probs_grad}) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* other : {&out, &permuted, &sorted, &probs, &grad, &probs_grad}) {
      if (other != output) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *other));
    }
  }
  CUBIST_RETURN_IF_ERROR(CheckValues(sorted, -1, std::int64_t{1} << 31));
  return CheckDistinctRows(sorted, args.rows.value_or(Range()).begin, m);
}

template <class T>
Status Run(const Device& device, const TokenUnpermuteGradArgs& args, Profile* profile) {
  Launch launch(device, kUnpermuteGrad);
  TokenPermuteShape shape;
  shape.tokens = args.out_grad.size(0), shape.hidden = args.out_grad.size(1);
  shape.top_k = args.probs.given() ? args.probs.size(1) : args.top_k;
  shape.dtype = args.out_grad.dtype;
  TokenUnpermuteGradTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kUnpermuteGrad, shape, &UnpermuteGradCandidates, &tiling));

  TokenUnpermuteGradOperands g;
  g.out_grad = MatrixOf(*launch.Input("out_grad", args.out_grad));
  g.permuted = launch.Input("permuted", args.permuted);
  g.sorted_indices =
      MatrixOf(*launch.Input("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.probs = launch.Input("probs", args.probs);
  g.permuted_grad = MatrixOf(*launch.Output("permuted_grad", args.permuted_grad));
  g.probs_grad = launch.Output("probs_grad", args.probs_grad);
  g.first_row = args.rows.value_or(Range()).begin;
  g.owned = MatrixOf(*launch.Workspace("owned", DType::kI32, {args.permuted_grad.size(0), 1}));
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { ClearOwnedKernel(core, g, tiling); });
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { MarkOwnedKernel(core, g, tiling); });
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteGradKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status TokenPermuteGrad(const Device& device, const TokenPermuteGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return ForFloatType(args.permuted_grad.dtype,
                      [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status TokenUnpermuteGrad(const Device& device, const TokenUnpermuteGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return ForFloatType(args.out_grad.dtype,
                      [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
