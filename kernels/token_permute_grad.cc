#include "kernels/token_permute_grad.h"

#include <new>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/token_permute_grad_kernel.h"
#include "kernels/token_permute_kernel.h"
#include "kernels/token_routes.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kPermuteGrad = "token_permute_grad";
constexpr const char* kUnpermuteGrad = "token_unpermute_grad";

std::int64_t SlotsOf(const Places& places, const TokenPermuteGradArgs& args) {
  return places.by_row() ? SlotsPerToken(places, args.probs_grad, args.top_k) : args.top_k;
}
std::int64_t SlotsOf(const Places& places, const TokenUnpermuteGradArgs& args) {
  const bool by_grad = places.by_row() && !args.probs.given();
  return SlotsPerToken(places, by_grad ? ConstTensor(args.probs_grad) : args.probs, args.top_k);
}

Status Validate(const Device& device, const TokenPermuteGradArgs& args) {
  const Argument grad{kPermuteGrad, "permuted_grad", args.permuted_grad},
      row_probs{kPermuteGrad, "permuted_probs_grad", args.permuted_probs_grad},
      tokens{kPermuteGrad, "tokens_grad", args.tokens_grad},
      probs{kPermuteGrad, "probs_grad", args.probs_grad}, map{kPermuteGrad, "routing_map", args.routing_map};
  const Places places = PlacesOf(kPermuteGrad, args, args.permuted_grad, "permuted_grad");
  CUBIST_RETURN_IF_ERROR(CheckShape(grad, {{"M"}, {"H"}}));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kPermuteGrad, args.rows, grad));
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"T"}, {"H, of permuted_grad", args.permuted_grad.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckTopK(kPermuteGrad, args.top_k));
  const std::int64_t t = args.tokens_grad.size(0);
  if (probs.tensor.given())
    CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of tokens_grad", t}, {"K, or experts"}}));
  const Slots slots{t, SlotsOf(places, args)};
  CUBIST_RETURN_IF_ERROR(CheckSlots(tokens, t, slots.top_k));
  CUBIST_RETURN_IF_ERROR(CheckPlaces(places, slots));
  CUBIST_RETURN_IF_ERROR(CheckDType(grad, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, {args.permuted_grad.dtype}));
  if (row_probs.tensor.given() || probs.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(row_probs, {{"M, of permuted_grad", args.permuted_grad.size(0)}}));
    const Dim tokens_dim{"T, of tokens_grad", t};
    if (map.tensor.given()) {
      CUBIST_RETURN_IF_ERROR(CheckMapOfProbs(map, probs, tokens_dim, slots.top_k));
    } else {
      CUBIST_RETURN_IF_ERROR(CheckShape(probs, {tokens_dim, {"K", slots.top_k}}));
    }
    for (const Argument* arg : {&row_probs, &probs}) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, kFloatTypes));
  }
  CUBIST_RETURN_IF_ERROR(CheckTensors(
      device, {&grad, &places.sorted_indices, &places.row_tokens, &row_probs, &map}, {&tokens, &probs}));
  return CheckValuesOf(places, slots);
}

template <class T>
Status Run(const Device& device, const TokenPermuteGradArgs& args, Profile* profile) {
  Launch launch(device, kPermuteGrad);
  TokenPermuteShape shape;
  const Places places = PlacesOf(kPermuteGrad, args, args.permuted_grad, "permuted_grad");
  shape.tokens = args.tokens_grad.size(0), shape.hidden = args.tokens_grad.size(1);
  shape.top_k = SlotsOf(places, args);
  shape.dtype = args.permuted_grad.dtype;
  shape.gathers = args.probs_grad.given();
  TokenUnpermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kPermuteGrad, shape, &UnpermuteCandidates, &tiling));

  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(*launch.Input("permuted_grad", args.permuted_grad));
  g.row_values = launch.Input("permuted_probs_grad", AsColumn(args.permuted_probs_grad));
  g.out = MatrixOf(*launch.Output("tokens_grad", args.tokens_grad));
  const GmTensor* probs_grad = launch.Output("probs_grad", args.probs_grad);
  g.slot_values = probs_grad;
  CUBIST_RETURN_IF_ERROR(
      ReadPlaces(launch, places, {shape.tokens, shape.top_k}, &g.sorted_indices, &g.first_row));
  const bool mapped = args.routing_map.given() && probs_grad != nullptr;
  MapOfSlots map;
  if (mapped) {
    CUBIST_RETURN_IF_ERROR(
        map.Read(launch, kPermuteGrad, args.routing_map, shape.tokens, shape.top_k, /*map_probs=*/nullptr));
    g.slot_values = map.SlotValues(launch);
  }
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, tiling); });
  if (mapped) map.Spread(launch, *g.slot_values, *probs_grad);
  return launch.Finish(profile);
}

// `missing` is how many rows of permuted_grad belong to no slot.
Status Validate(const Device& device, const TokenUnpermuteGradArgs& args, std::int64_t* missing) {
  const Argument out{kUnpermuteGrad, "out_grad", args.out_grad},
      permuted{kUnpermuteGrad, "permuted", args.permuted}, probs{kUnpermuteGrad, "probs", args.probs},
      grad{kUnpermuteGrad, "permuted_grad", args.permuted_grad},
      probs_grad{kUnpermuteGrad, "probs_grad", args.probs_grad},
      map{kUnpermuteGrad, "routing_map", args.routing_map};
  const Places places = PlacesOf(kUnpermuteGrad, args, args.permuted_grad, "permuted_grad");
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"T"}, {"H"}}));
  const std::int64_t t = args.out_grad.size(0), h = args.out_grad.size(1);
  CUBIST_RETURN_IF_ERROR(CheckShape(grad, {{"M"}, {"H, of out_grad", h}}));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kUnpermuteGrad, args.rows, grad));
  const std::int64_t m = args.permuted_grad.size(0);
  if (probs_grad.tensor.given() || permuted.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"M, of permuted_grad", m}, {"H, of out_grad", h}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {args.out_grad.dtype}));
  }
  if (map.tensor.given())
    CUBIST_RETURN_IF_ERROR(CheckMapOfProbs(map, probs, {"T, of out_grad", t}, args.top_k));
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of out_grad", t}, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckTopK(kUnpermuteGrad, args.top_k));
  if (probs_grad.tensor.given())
    CUBIST_RETURN_IF_ERROR(CheckShape(probs_grad, {{"T, of out_grad", t}, {"K, or experts"}}));
  const Slots slots{t, SlotsOf(places, args)};
  if (probs_grad.tensor.given()) {
    const std::int64_t columns = map.tensor.given() ? args.routing_map.size(1) : slots.top_k;
    CUBIST_RETURN_IF_ERROR(
        CheckShape(probs_grad, {{"T, of out_grad", t}, {"K, or E of routing_map", columns}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(probs_grad, kFloatTypes));
  }
  CUBIST_RETURN_IF_ERROR(CheckSlots(out, t, slots.top_k));
  CUBIST_RETURN_IF_ERROR(CheckPlaces(places, slots));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckDType(grad, {args.out_grad.dtype}));
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(probs, kFloatTypes));
  const Argument bias{kUnpermuteGrad, "bias", args.bias}, ids{kUnpermuteGrad, "topk_ids", args.topk_ids};
  if (bias.tensor.given() && !probs_grad.tensor.given()) return bias.Error("is given without probs_grad");
  CUBIST_RETURN_IF_ERROR(CheckBias(bias, ids, places, slots));
  CUBIST_RETURN_IF_ERROR(CheckTensors(
      device, {&out, &permuted, &places.sorted_indices, &places.row_tokens, &probs, &map, &bias, &ids},
      {&grad, &probs_grad}));
  CUBIST_RETURN_IF_ERROR(CheckValuesOf(places, slots, missing));
  return CheckIdsOfBias(bias, ids, places, slots);
}

template <class T>
Status Run(const Device& device, const TokenUnpermuteGradArgs& args, std::int64_t missing, Profile* profile) {
  Launch launch(device, kUnpermuteGrad);
  TokenPermuteShape shape;
  shape.tokens = args.out_grad.size(0), shape.hidden = args.out_grad.size(1);
  const Places places = PlacesOf(kUnpermuteGrad, args, args.permuted_grad, "permuted_grad");
  shape.top_k = SlotsOf(places, args);
  shape.dtype = args.out_grad.dtype;
  if (args.bias.given()) shape.reads_ids = true, shape.wide_ids = args.topk_ids.dtype == DType::kI64;
  TokenUnpermuteGradTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kUnpermuteGrad, shape, &UnpermuteGradCandidates, &tiling));

  TokenUnpermuteGradOperands g;
  g.out_grad = MatrixOf(*launch.Input("out_grad", args.out_grad));
  g.permuted = launch.Input("permuted", args.permuted);
  g.probs = launch.Input("probs", args.probs);
  g.permuted_grad = MatrixOf(*launch.Output("permuted_grad", args.permuted_grad));
  const GmTensor* probs_grad = launch.Output("probs_grad", args.probs_grad);
  g.probs_grad = probs_grad;
  g.bias = launch.Input("bias", args.bias), g.topk_ids = launch.Input("topk_ids", args.topk_ids);
  CUBIST_RETURN_IF_ERROR(
      ReadPlaces(launch, places, {shape.tokens, shape.top_k}, &g.sorted_indices, &g.first_row));
  const bool mapped = args.routing_map.given();
  MapOfSlots map;
  if (mapped) {
    CUBIST_RETURN_IF_ERROR(
        map.Read(launch, kUnpermuteGrad, args.routing_map, shape.tokens, shape.top_k, g.probs));
    g.probs = map.slot_probs();
    if (probs_grad != nullptr) g.probs_grad = map.SlotValues(launch);
  }
  if (missing > 0) {
    g.owned = launch.Workspace("owned", DType::kI32, {args.permuted_grad.size(0), 1});
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { ClearOwnedKernel(core, g, tiling); });
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { MarkOwnedKernel(core, g, tiling); });
  }
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteGradKernel<T>(core, g, tiling); });
  if (mapped && probs_grad != nullptr) map.Spread(launch, *g.probs_grad, *probs_grad);
  return launch.Finish(profile);
}

}  // namespace

Status TokenPermuteGrad(const Device& device, const TokenPermuteGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.permuted_grad.dtype,
                       [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status TokenUnpermuteGrad(const Device& device, const TokenUnpermuteGradArgs& args, Profile* profile) try {
  std::int64_t missing = 0;
  CUBIST_RETURN_IF_ERROR(Validate(device, args, &missing));
  return WithFloatType(args.out_grad.dtype,
                       [&](auto zero) { return Run<decltype(zero)>(device, args, missing, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
