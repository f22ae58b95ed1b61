// Right calls, which tests spoil in one field or run on chips that are too small.
#ifndef CUBIST_TESTS_KERNELS_CALL_FIXTURES_H_
#define CUBIST_TESTS_KERNELS_CALL_FIXTURES_H_

#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {

struct MatmulFixture {
  MatmulFixture() {
    Random random;
    a.FillUniform(random), b.FillUniform(random), bias.FillUniform(random);
  }
  MatmulArgs args() { return {.a = a.view(), .b = b.view(), .bias = bias.view(), .c = c.view()}; }
  std::vector<const Matrix*> all() const { return {&a, &b, &bias, &c}; }

  Matrix a{DType::kF32, {6, 5}}, b{DType::kF32, {5, 7}}, bias{DType::kF32, {7}}, c{DType::kF32, {6, 7}};
};

inline Status RunMatmul(const Device& device, const MatmulArgs& args) { return Matmul(device, args); }

struct AttentionFixture {
  AttentionFixture() {
    Random random;
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope}) x->FillUniform(random);
  }
  FlashAttentionArgs args() {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .q_rope = q_rope.view(),
            .k_rope = k_rope.view(),
            .out = out.view(),
            .lse = lse.view()};
  }
  std::vector<const Matrix*> all() const { return {&q, &k, &v, &q_rope, &k_rope, &out, &lse}; }

  Matrix q{DType::kBF16, {2, 6, 5, 8}}, k{DType::kBF16, {2, 3, 7, 8}}, v{DType::kBF16, {2, 3, 7, 4}};
  Matrix q_rope{DType::kBF16, {2, 6, 5, 2}}, k_rope{DType::kBF16, {2, 3, 7, 2}};
  Matrix out{DType::kBF16, {2, 6, 5, 4}}, lse{DType::kF32, {2, 6, 5}};
};

inline Status RunAttention(const Device& device, const FlashAttentionArgs& args) {
  return FlashAttention(device, args);
}

struct PermuteFixture {
  PermuteFixture() {
    Random random;
    tokens.FillUniform(random), topk_ids.FillIntegers(random, 0, 6);
  }
  TokenPermuteArgs args() {
    return {.tokens = tokens.view(),
            .topk_ids = topk_ids.view(),
            .num_experts = 7,
            .permuted = permuted.view(),
            .sorted_indices = sorted_indices.view(),
            .expert_counts = counts.view()};
  }
  std::vector<const Matrix*> all() const { return {&tokens, &topk_ids, &permuted, &sorted_indices, &counts}; }

  Matrix tokens{DType::kF32, {5, 6}}, topk_ids{DType::kI64, {5, 3}};
  Matrix permuted{DType::kF32, {15, 6}}, sorted_indices{DType::kI32, {15}}, counts{DType::kI32, {7}};
};

inline Status RunPermute(const Device& device, const TokenPermuteArgs& args) {
  return TokenPermute(device, args);
}

struct UnpermuteFixture {
  UnpermuteFixture() {
    Random random;
    permuted.FillUniform(random), probs.FillUniform(random), sorted_indices.FillIntegers(random, 0, 14);
  }
  TokenUnpermuteArgs args() {
    return {.permuted = permuted.view(),
            .sorted_indices = sorted_indices.view(),
            .probs = probs.view(),
            .out = out.view()};
  }
  std::vector<const Matrix*> all() const { return {&permuted, &sorted_indices, &probs, &out}; }

  Matrix permuted{DType::kF16, {15, 6}}, sorted_indices{DType::kI32, {15}};
  Matrix probs{DType::kF32, {5, 3}}, out{DType::kF16, {5, 6}};
};

inline Status RunUnpermute(const Device& device, const TokenUnpermuteArgs& args) {
  return TokenUnpermute(device, args);
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_CALL_FIXTURES_H_
