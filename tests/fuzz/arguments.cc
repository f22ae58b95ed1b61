// Calls made from bytes: the first one says of what.
#include <cstddef>
#include <iterator>

#include "tests/fuzz/caller.h"

namespace cubist::fuzz {
namespace {

constexpr void (*kCalls[])(Caller&) = {CallMatmul,
                                       CallPackedMatmul,
                                       CallBatchedMatmul,
                                       CallGroupedMatmul,
                                       CallGroupedMatmulGrad,
                                       CallFlashAttention,
                                       CallFlashAttentionGrad,
                                       CallTokenPermute,
                                       CallTokenUnpermute,
                                       CallTokenPermuteGrad,
                                       CallTokenUnpermuteGrad,
                                       CallReorderChunks,
                                       CallRoute,
                                       CallRouteGrad,
                                       CallRmsNorm,
                                       CallRmsNormGrad,
                                       CallSwiGlu,
                                       CallSwiGluGrad,
                                       CallMoeBlock,
                                       CallMlaBlock};

}  // namespace

void Arguments(Bytes input) {
  if (input.empty()) return;
  Caller caller(input.subspan(1));
  kCalls[static_cast<std::size_t>(input[0]) % std::size(kCalls)](caller);
}

}  // namespace cubist::fuzz
