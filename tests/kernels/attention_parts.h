// What the calls of attention's tests share, forward and backward.
#ifndef CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_
#define CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention_arguments.h"
#include "kernels/attention_options.h"
#include "npu_model/types.h"
#include "tests/support/matrix.h"

namespace cubist::testing {

inline constexpr Causal kMasks[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
inline constexpr Layout kApart{.order = {0, 2, 1, 3}, .gap = 5, .offset = 3, .step = 2};

// Rows of a (b, n, s, d) tensor.
template <class T>
T RowsOf(T x, Range rows) {
  return PartOf(x, 2, rows);
}
// Entry i of the first dimension, or the one for all.
inline ConstTensor EntryOf(ConstTensor x, std::size_t i) {
  if (!x.given() || x.size(0) == 1) return x;
  const auto begin = static_cast<std::int64_t>(i);
  return PartOf(x, 0, {begin, begin + 1});
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_
