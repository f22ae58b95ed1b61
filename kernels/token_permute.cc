#include "kernels/token_permute.h"

#include <limits>

#include "kernels/choose_for.h"
#include "kernels/token_permute_kernel.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kPermute = "token_permute";
constexpr const char* kUnpermute = "token_unpermute";

// (T) as (T, 1).
ConstTensor AsMatrix(ConstTensor t) {
  if (t.rank == 1) t.rank = 2, t.sizes[1] = 1, t.strides[1] = 1;
  return t;
}

// (T * K) as (T, K).
template <class AnyTensor>
AnyTensor AsSlots(AnyTensor t, std::int64_t tokens, std::int64_t top_k) {
  t.rank = 2;
  t.sizes = {tokens, top_k}, t.strides = {top_k * t.strides[0], t.strides[0]};
  return t;
}

std::int64_t RowsOut(const TokenPermuteArgs& args, std::int64_t slots) {
  const std::int64_t wanted = args.num_out_tokens;
  return wanted > 0 ? std::min(wanted, slots) : std::max<std::int64_t>(slots + wanted, 0);
}

// The first element outside [least, limit), as an error.
Status CheckValues(const Argument& arg, std::int64_t least, std::int64_t limit) {
  const ConstTensor t = AsMatrix(arg.tensor);
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    for (std::int64_t j = 0; j < t.size(1); ++j) {
      const std::int64_t value = LoadInt(t.data, t.dtype, i * t.stride(0) + j * t.stride(1));
      if (value >= least && value < limit) continue;
      const std::string where =
          arg.tensor.rank == 1 ? std::to_string(i) : std::to_string(i) + ", " + std::to_string(j);
      return arg.Error("has " + std::to_string(value) + " at (" + where + "), needs values in [" +
                       std::to_string(least) + ", " + std::to_string(limit) + ")");
    }
  }
  return {};
}

Status CheckSlots(const Argument& arg, std::int64_t tokens, std::int64_t top_k) {
  std::int64_t slots = 0;
  if (__builtin_mul_overflow(tokens, top_k, &slots) || slots > std::numeric_limits<std::int32_t>::max()) {
    return arg.Error("makes " + std::to_string(tokens) + " x " + std::to_string(top_k) +
                     " slots, the limit is 2^31 - 1");
  }
  return {};
}

Status Validate(const Device& device, const TokenPermuteArgs& args) {
  const Argument tokens{kPermute, "tokens", args.tokens}, ids{kPermute, "topk_ids", args.topk_ids};
  const Argument permuted{kPermute, "permuted", args.permuted},
      sorted{kPermute, "sorted_indices", args.sorted_indices};
  const Argument counts{kPermute, "expert_counts", args.expert_counts};
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"T"}, {"H"}}));
  const std::int64_t t = args.tokens.size(0), h = args.tokens.size(1);
  if (args.topk_ids.rank == 1) {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {{"T, of tokens", t}}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {{"T, of tokens", t}, {"K"}}));
  }
  const std::int64_t k = AsMatrix(args.topk_ids).size(1);
  CUBIST_RETURN_IF_ERROR(CheckSlots(ids, t, k));
  if (args.num_experts < 0 || args.num_experts > std::numeric_limits<std::int32_t>::max()) {
    return InvalidArgument(std::string(kPermute) + ": num_experts is " + std::to_string(args.num_experts) +
                           ", needs 0 to 2^31 - 1");
  }
  CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"rows out", RowsOut(args, t * k)}, {"H, of tokens", h}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(ids, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {args.tokens.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (counts.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(counts, {{"num_experts", args.num_experts}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(counts, {DType::kI32}));
  }
  CUBIST_RETURN_IF_ERROR(CheckStorage(ids, /*needs_data=*/true));
  for (const Argument* arg : {&tokens, &permuted, &sorted, &counts}) {
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  }
  for (const Argument* output : {&permuted, &sorted, &counts}) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* other : {&tokens, &ids, &permuted, &sorted, &counts}) {
      if (other != output) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *other));
    }
  }
  return CheckValues(ids, 0, args.num_experts);
}

template <class T>
Status Run(const Device& device, const TokenPermuteArgs& args, Profile* profile) {
  Launch launch(device, kPermute);
  const ConstTensor ids = AsMatrix(args.topk_ids);
  TokenPermuteShape shape;
  shape.tokens = ids.size(0), shape.hidden = args.tokens.size(1), shape.top_k = ids.size(1);
  shape.experts = args.num_experts, shape.dtype = args.tokens.dtype,
  shape.wide_ids = ids.dtype == DType::kI64;
  TokenPermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kPermute, shape, &PermuteCandidates, &tiling));

  TokenPermuteOperands g;
  g.tokens = MatrixOf(*launch.Input("tokens", args.tokens)),
  g.topk_ids = MatrixOf(*launch.Input("topk_ids", ids));
  g.permuted = MatrixOf(*launch.Output("permuted", args.permuted));
  g.sorted_indices =
      MatrixOf(*launch.Output("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.expert_counts = launch.Output("expert_counts", args.expert_counts);
  g.experts = args.num_experts;
  g.chunk_counts = MatrixOf(*launch.Workspace("chunk_counts", DType::kI32, {tiling.chunks, g.experts}));
  const std::int64_t spilled = g.experts > tiling.experts ? g.experts : 0;
  g.next_rows = MatrixOf(*launch.Workspace("next_rows", DType::kI32, {tiling.chunks, spilled}));
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { CountKernel(core, g, tiling); });
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { RankAndMoveKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

Status Validate(const Device& device, const TokenUnpermuteArgs& args) {
  const Argument permuted{kUnpermute, "permuted", args.permuted}, probs{kUnpermute, "probs", args.probs};
  const Argument sorted{kUnpermute, "sorted_indices", args.sorted_indices}, out{kUnpermute, "out", args.out};
  CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"M"}, {"H"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"T"}, {"H, of permuted", args.permuted.size(1)}}));
  const std::int64_t t = args.out.size(0);
  if (probs.tensor.given()) CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of out", t}, {"K"}}));
  const std::int64_t k = probs.tensor.given() ? args.probs.size(1) : 1;
  CUBIST_RETURN_IF_ERROR(CheckSlots(out, t, k));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {args.permuted.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (probs.tensor.given())
    CUBIST_RETURN_IF_ERROR(CheckDType(probs, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(sorted, /*needs_data=*/true));
  for (const Argument* arg : {&permuted, &probs, &out})
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckWritable(out));
  for (const Argument* arg : {&permuted, &sorted, &probs}) CUBIST_RETURN_IF_ERROR(CheckApart(out, *arg));
  return CheckValues(sorted, -1, std::int64_t{1} << 31);
}

template <class T>
Status Run(const Device& device, const TokenUnpermuteArgs& args, Profile* profile) {
  Launch launch(device, kUnpermute);
  TokenPermuteShape shape;
  shape.tokens = args.out.size(0), shape.hidden = args.out.size(1);
  shape.top_k = args.probs.given() ? args.probs.size(1) : 1;
  shape.dtype = args.permuted.dtype;
  TokenUnpermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kUnpermute, shape, &UnpermuteCandidates, &tiling));

  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(*launch.Input("permuted", args.permuted));
  g.sorted_indices =
      MatrixOf(*launch.Input("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.probs = launch.Input("probs", args.probs);
  g.out = MatrixOf(*launch.Output("out", args.out));
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

template <class Args>
Status RunAs(DType dtype, const Device& device, const Args& args, Profile* profile) {
  switch (dtype) {
    case DType::kBF16:
      return Run<BF16>(device, args, profile);
    case DType::kF16:
      return Run<F16>(device, args, profile);
    default:
      return Run<float>(device, args, profile);
  }
}

}  // namespace

Status TokenPermute(const Device& device, const TokenPermuteArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return RunAs(args.tokens.dtype, device, args, profile);
}

Status TokenUnpermute(const Device& device, const TokenUnpermuteArgs& args, Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return RunAs(args.permuted.dtype, device, args, profile);
}

}  // namespace cubist
