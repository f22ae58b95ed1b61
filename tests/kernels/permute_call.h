// What tests of TokenPermute and of TokenUnpermute share: a permute with its tensors, and shapes.
#ifndef CUBIST_TESTS_KERNELS_PERMUTE_CALL_H_
#define CUBIST_TESTS_KERNELS_PERMUTE_CALL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

inline constexpr Layout kApart{.gap = 5, .offset = 3, .step = 2};

// What a call asks for, besides its sizes.
struct PermuteOptions {
  DType dtype = DType::kF32, ids = DType::kI32;
  std::int64_t num_out_tokens = 0;
  bool counts = true;
  bool one_dimensional_ids = false;  // (T), where K = 1.
  Layout layout = {};

  std::string Name() const {
    return Join(NameOf(dtype), " ids ", NameOf(ids), " num_out_tokens ", num_out_tokens,
                counts ? " counts" : "", one_dimensional_ids ? " 1-D" : "", " step ", layout.step);
  }
};

inline std::int64_t RowsOut(std::int64_t slots, std::int64_t num_out_tokens) {
  return num_out_tokens > 0 ? std::min(num_out_tokens, slots)
                            : std::max<std::int64_t>(slots + num_out_tokens, 0);
}

// Tensors of one call, each between guards. Outputs start as NaN, or as negative numbers.
struct PermuteCall {
  PermuteCall(const PermuteShape& s, const PermuteOptions& o)
      : options(o),
        shape(s),
        tokens(o.dtype, {s.tokens, s.hidden}, o.layout),
        ids(o.one_dimensional_ids ? Matrix(o.ids, {s.tokens}, o.layout)
                                  : Matrix(o.ids, {s.tokens, s.topk}, o.layout)),
        permuted(o.dtype, {RowsOut(s.tokens * s.topk, o.num_out_tokens), s.hidden}, o.layout),
        sorted_indices(DType::kI32, {s.tokens * s.topk}, o.layout),
        counts(DType::kI32, {s.experts}, o.layout) {}

  // Every bit pattern may stand in a row, signalling NaNs among them: rows only move.
  void FillTokens(Random& random) {
    const Tensor view = tokens.view();
    ForEachElement(view, [&](const auto&, std::int64_t offset) {
      const std::uint64_t bits = random.Bits();
      const auto size = static_cast<std::size_t>(SizeOf(view.dtype));
      std::memcpy(static_cast<std::byte*>(view.data) + static_cast<std::size_t>(offset) * size, &bits, size);
    });
  }
  void FillIds(Random& random) {
    if (shape.experts > 0) ids.FillIntegers(random, 0, shape.experts - 1);
  }

  TokenPermuteArgs args() {
    TokenPermuteArgs args{.tokens = tokens.view(),
                          .topk_ids = ids.view(),
                          .num_experts = shape.experts,
                          .num_out_tokens = options.num_out_tokens,
                          .permuted = permuted.view(),
                          .sorted_indices = sorted_indices.view()};
    if (options.counts) args.expert_counts = counts.view();
    return args;
  }

  PermuteOptions options;
  PermuteShape shape;
  Matrix tokens, ids, permuted, sorted_indices, counts;
};

inline std::vector<double> AsDoubles(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

inline std::vector<PermuteShape> FewShapes() {
  return {{1, 1, 1, 1},       {13, 3, 7, 65},   {29, 2, 255, 5}, {5, 17, 11, 3},
          {4, 0, 3, 5},       {3, 2, 4, 0},     {0, 2, 5, 9},    {1, 8, 256, 7168},
          {300, 8, 256, 129}, {3, 2, 2, 20011}, {1021, 8, 64, 3}};
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_PERMUTE_CALL_H_
