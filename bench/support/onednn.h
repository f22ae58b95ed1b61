// oneDNN as a peer. Only where CUBIST_BENCH_ONEDNN is defined.
#ifndef CUBIST_BENCH_SUPPORT_ONEDNN_H_
#define CUBIST_BENCH_SUPPORT_ONEDNN_H_

#include <functional>

#include "bench/support/attention.h"
#include "bench/support/gemm.h"

namespace cubist::bench {

// Whether it has a product of these types on this CPU: none of fp16, and of bf16 where there is AVX-512.
bool OneDnnMultiplies(DType input, DType output);

// The matmul primitive on row-major operands, and with b packed beforehand into the format that oneDNN
// prefers.
GemmLibrary OneDnn();
GemmLibrary OneDnnPacked();

// Attention as an assembly: per head and block of 256 queries, a oneDNN product, softmax over whole rows with
// this library's Vector bodies, a oneDNN product; blocks above the diagonal are skipped. Rope parts add up in
// place. Empty for types that oneDNN has no product for.
std::function<void()> ComposedAttention(const Attention& attention, int threads);

// The backward pass in the same manner, heads in parallel: per block of 256 queries five oneDNN products, transposed
// scores between them, this library's fused step of the gradient. Without rope parts, one KV head per head.
std::function<void()> ComposedAttentionGrad(const AttentionGrad& grad, int threads);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_ONEDNN_H_
