#include "kernels/token_permute.h"

#include <limits>
#include <new>

#include "kernels/choose_for.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/token_permute_kernel.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kPermute = "token_permute";
constexpr const char* kUnpermute = "token_unpermute";

// Rows of the result, M; each argument is valid by itself.
std::int64_t RowsOut(const TokenPermuteArgs& args, std::int64_t slots) {
  if (args.rows.has_value()) return args.rows->size();
  if (args.capacity > 0) return args.num_experts * args.capacity;
  const std::int64_t all = slots + std::min(slots, args.num_experts) * (args.row_multiple - 1);
  const std::int64_t wanted = args.num_out_tokens;
  return wanted > 0 ? std::min(wanted, all) : std::max<std::int64_t>(all + wanted, 0);
}

Status OutOfRange(const char* name, std::int64_t value, const std::string& needs) {
  return InvalidArgument(std::string(kPermute) + ": " + name + " is " + std::to_string(value) + ", needs " +
                         needs);
}

// The numbers of a call, for `slots` slots: what is asked for, and that all rows can be counted.
Status CheckNumbers(const TokenPermuteArgs& args, std::int64_t slots) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (args.num_experts < 0 || args.num_experts > kMost)
    return OutOfRange("num_experts", args.num_experts, "0 to 2^31 - 1");
  if (args.capacity < 0 || args.capacity > kMost)
    return OutOfRange("capacity", args.capacity, "0 to 2^31 - 1");
  if (args.row_multiple < 1 || args.row_multiple > kMost)
    return OutOfRange("row_multiple", args.row_multiple, "1 to 2^31 - 1");
  if (args.capacity > 0 && args.row_multiple > 1)
    return OutOfRange("row_multiple", args.row_multiple, "1 where there is a capacity");
  if (args.num_out_tokens != 0 && (args.capacity > 0 || args.rows.has_value()))
    return OutOfRange("num_out_tokens", args.num_out_tokens, "0 where capacity or rows say it");
  std::int64_t rows = 0;
  const bool overflows = args.capacity > 0 ? __builtin_mul_overflow(args.num_experts, args.capacity, &rows)
                                           : __builtin_mul_overflow(std::min(slots, args.num_experts),
                                                                    args.row_multiple - 1, &rows);
  if (overflows || rows > kMost - slots) {
    return InvalidArgument(std::string(kPermute) + ": capacity " + std::to_string(args.capacity) +
                           " and row_multiple " + std::to_string(args.row_multiple) +
                           " make more than 2^31 - 1 rows and slots");
  }
  return {};
}

Status Validate(const Device& device, const TokenPermuteArgs& args) {
  const Argument tokens{kPermute, "tokens", args.tokens}, ids{kPermute, "topk_ids", args.topk_ids},
      probs{kPermute, "probs", args.probs};
  const Argument permuted{kPermute, "permuted", args.permuted},
      sorted{kPermute, "sorted_indices", args.sorted_indices},
      row_probs{kPermute, "permuted_probs", args.permuted_probs};
  const Argument counts{kPermute, "expert_counts", args.expert_counts},
      offsets{kPermute, "expert_offsets", args.expert_offsets};
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"T"}, {"H"}}));
  const std::int64_t t = args.tokens.size(0), h = args.tokens.size(1);
  if (args.topk_ids.rank == 1) {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {{"T, of tokens", t}}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(ids, {{"T, of tokens", t}, {"K"}}));
  }
  const std::int64_t k = AsMatrix(args.topk_ids).size(1);
  CUBIST_RETURN_IF_ERROR(CheckSlots(ids, t, k));
  CUBIST_RETURN_IF_ERROR(CheckNumbers(args, t * k));
  CUBIST_RETURN_IF_ERROR(CheckWindow(kPermute, args.rows, permuted));
  const std::int64_t m = RowsOut(args, t * k);
  CUBIST_RETURN_IF_ERROR(CheckShape(permuted, {{"rows out", m}, {"H, of tokens", h}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(sorted, {{"T * K", t * k}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, {DType::kF32, DType::kBF16, DType::kF16}));
  CUBIST_RETURN_IF_ERROR(CheckDType(ids, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckDType(permuted, {args.tokens.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sorted, {DType::kI32}));
  if (probs.tensor.given() || row_probs.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(probs, {{"T, of tokens", t}, {"K, of topk_ids", k}}));
    CUBIST_RETURN_IF_ERROR(CheckShape(row_probs, {{"M, of permuted", m}}));
    for (const Argument* arg : {&probs, &row_probs})
      CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {DType::kF32, DType::kBF16, DType::kF16}));
  }
  if (counts.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(counts, {{"num_experts", args.num_experts}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(counts, {DType::kI32}));
  }
  if (offsets.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(offsets, {{"num_experts + 1", args.num_experts + 1}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(offsets, {DType::kI32}));
  }
  CUBIST_RETURN_IF_ERROR(CheckStorage(ids, /*needs_data=*/true));
  for (const Argument* arg : {&tokens, &probs, &permuted, &sorted, &row_probs, &counts, &offsets}) {
    CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  }
  for (const Argument* output : {&permuted, &sorted, &row_probs, &counts, &offsets}) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* other : {&tokens, &ids, &probs, &permuted, &sorted, &row_probs, &counts, &offsets}) {
      if (other != output) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *other));
    }
  }
  return CheckValues(ids, -1, args.num_experts);
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
  g.expert_offsets = launch.Output("expert_offsets", args.expert_offsets);
  g.probs = launch.Input("probs", args.probs);
  g.permuted_probs = launch.Output("permuted_probs", AsColumn(args.permuted_probs));
  g.capacity = args.capacity, g.row_multiple = args.row_multiple;
  g.first_row = args.rows.value_or(Range()).begin;
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
  if (args.top_k < 0) {
    return InvalidArgument(std::string(kUnpermute) + ": top_k is " + std::to_string(args.top_k) +
                           ", needs 0 or more");
  }
  CUBIST_RETURN_IF_ERROR(CheckWindow(kUnpermute, args.rows, permuted));
  const std::int64_t k = probs.tensor.given() ? args.probs.size(1) : args.top_k;
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
  shape.top_k = args.probs.given() ? args.probs.size(1) : args.top_k;
  shape.dtype = args.permuted.dtype;
  TokenUnpermuteTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kUnpermute, shape, &UnpermuteCandidates, &tiling));

  TokenUnpermuteOperands g;
  g.permuted = MatrixOf(*launch.Input("permuted", args.permuted));
  g.sorted_indices =
      MatrixOf(*launch.Input("sorted_indices", AsSlots(args.sorted_indices, shape.tokens, shape.top_k)));
  g.probs = launch.Input("probs", args.probs);
  g.out = MatrixOf(*launch.Output("out", args.out));
  g.first_row = args.rows.value_or(Range()).begin;
  launch.OnVectorCores(tiling.chunks, [&](auto& core) { TokenUnpermuteKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status TokenPermute(const Device& device, const TokenPermuteArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return ForFloatType(args.tokens.dtype,
                      [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status TokenUnpermute(const Device& device, const TokenUnpermuteArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return ForFloatType(args.permuted.dtype,
                      [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
