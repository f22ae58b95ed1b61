#include "kernels/reorder_chunks.h"

#include <new>
#include <string>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/reorder_chunks_kernel.h"
#include "kernels/token_permute_arguments.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kKernel = "reorder_chunks";

// Counts are 0 or more, and `rows` in all.
Status CheckCounts(const Argument& counts, std::int64_t rows) {
  CUBIST_RETURN_IF_ERROR(CheckValues(counts, 0, std::int64_t{1} << 31));
  const ConstTensor& t = counts.tensor;
  std::int64_t sum = 0;
  for (std::int64_t n = 0; n < t.size(0); ++n) {
    for (std::int64_t e = 0; e < t.size(1); ++e)
      sum += LoadInt(t.data, t.dtype, n * t.stride(0) + e * t.stride(1));
  }
  if (sum == rows) return {};
  return counts.Error("sum up to " + std::to_string(sum) + ", needs " + std::to_string(rows) +
                      ", the rows of tokens");
}

Status Validate(const Device& device, const ReorderChunksArgs& args) {
  const Argument tokens{kKernel, "tokens", args.tokens}, counts{kKernel, "chunk_counts", args.chunk_counts},
      probs{kKernel, "probs", args.probs}, out{kKernel, "out", args.out},
      out_probs{kKernel, "out_probs", args.out_probs}, row_ids{kKernel, "row_ids", args.row_ids},
      experts{kKernel, "expert_counts", args.expert_counts};
  CUBIST_RETURN_IF_ERROR(CheckShape(tokens, {{"A"}, {"H"}}));
  const Dim rows{"A, of tokens", args.tokens.size(0)};
  CUBIST_RETURN_IF_ERROR(CheckShape(counts, {{"N"}, {"E"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {rows, {"H, of tokens", args.tokens.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckSlots(tokens, rows.size, 1));
  CUBIST_RETURN_IF_ERROR(CheckDType(tokens, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckDType(counts, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {args.tokens.dtype}));
  if (probs.tensor.given() || out_probs.tensor.given()) {
    for (const Argument* arg : {&probs, &out_probs}) {
      CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {rows}));
      CUBIST_RETURN_IF_ERROR(CheckDType(*arg, kFloatTypes));
    }
  }
  if (row_ids.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(row_ids, {rows}));
    CUBIST_RETURN_IF_ERROR(CheckDType(row_ids, {DType::kI32}));
  }
  if (experts.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(experts, {{"E, of chunk_counts", args.chunk_counts.size(1)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(experts, {DType::kI32}));
  }
  CUBIST_RETURN_IF_ERROR(CheckStorage(counts, /*needs_data=*/true));
  CUBIST_RETURN_IF_ERROR(
      CheckTensors(device, {&tokens, &counts, &probs}, {&out, &out_probs, &row_ids, &experts}));
  return CheckCounts(counts, rows.size);
}

template <class T>
Status Run(const Device& device, const ReorderChunksArgs& args, Profile* profile) {
  Launch launch(device, kKernel);
  ReorderChunksShape shape;
  shape.rows = args.tokens.size(0), shape.hidden = args.tokens.size(1), shape.dtype = args.tokens.dtype;
  shape.ranks = args.chunk_counts.size(0), shape.experts = args.chunk_counts.size(1);
  ReorderChunksTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kKernel, shape, &ReorderChunksCandidates, &tiling));

  const std::int64_t chunks = shape.ranks * shape.experts;
  ReorderChunksOperands g;
  g.tokens = MatrixOf(*launch.Input("tokens", args.tokens));
  g.chunk_counts = MatrixOf(*launch.Input("chunk_counts", args.chunk_counts));
  g.probs = launch.Input("probs", AsColumn(args.probs));
  g.out = MatrixOf(*launch.Output("out", args.out));
  g.out_probs = launch.Output("out_probs", AsColumn(args.out_probs));
  g.row_ids = launch.Output("row_ids", AsColumn(args.row_ids));
  g.expert_counts = launch.Output("expert_counts", args.expert_counts);
  g.rank_starts = MatrixOf(*launch.Workspace("rank_starts", DType::kI32, {1, chunks + 1}));
  g.expert_starts = MatrixOf(*launch.Workspace("expert_starts", DType::kI32, {1, chunks}));
  g.inverse = args.inverse;
  launch.OnVectorCores(1, [&](auto& core) { ChunkStartsKernel(core, g, tiling); });
  launch.OnVectorCores(shape.rows, [&](auto& core) { MoveChunksKernel<T>(core, g, tiling); });
  return launch.Finish(profile);
}

}  // namespace

Status ReorderChunks(const Device& device, const ReorderChunksArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.tokens.dtype,
                       [&](auto zero) { return Run<decltype(zero)>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
