// What the calls of attention's tests share, forward and backward.
#ifndef CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_
#define CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/attention_options.h"
#include "npu_model/types.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {

inline constexpr Causal kMasks[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
inline constexpr Layout kApart{.order = kBsnd.order, .gap = 5, .offset = 3, .step = 2};

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

// Hides this share of the pairs, by any byte but 0.
inline void FillMask(Matrix& mask, Random& random, double share) {
  auto* bytes = static_cast<std::uint8_t*>(mask.view().data);
  ForEachElement(mask.view(), [&](const auto&, std::int64_t offset) {
    bytes[offset] = random.Uniform() < share ? static_cast<std::uint8_t>(random.Integer(1, 255)) : 0;
  });
}

// A left side, a right one, both or none, on either anchor.
inline std::optional<AttentionWindow> RandomWindow(Random& random) {
  const std::int64_t sides = random.Integer(0, 3);
  if (sides == 0) return {};
  AttentionWindow window;
  window.anchor = static_cast<Causal>(random.Integer(0, 2));
  if (sides != 2) window.left = random.Integer(-5, 90);
  if (sides != 1) window.right = random.Integer(-5, 90);
  return window;
}

// The ends of four sequences within `size`, empty ones among them.
inline std::vector<std::int64_t> RandomEnds(Random& random, std::int64_t size) {
  std::vector<std::int64_t> ends;
  for (std::int64_t end = 0; ends.size() < 4; ends.push_back(end)) {
    if (random.Integer(0, 3) > 0) end = random.Integer(end, size);
  }
  return ends;
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ATTENTION_PARTS_H_
