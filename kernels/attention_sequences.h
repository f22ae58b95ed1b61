// Attention's options as the bands and sequences that its kernels walk.
#ifndef CUBIST_KERNELS_ATTENTION_SEQUENCES_H_
#define CUBIST_KERNELS_ATTENTION_SEQUENCES_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/attention_options.h"
#include "tiling/attention_band.h"

namespace cubist {

// Where causal order and window agree, in a sequence of sq rows and skv keys.
inline AttentionBand BandOf(Causal causal, const std::optional<AttentionWindow>& window, std::int64_t sq,
                            std::int64_t skv, std::int64_t prefix = 0) {
  const auto diagonal = [&](Causal anchor) { return anchor == Causal::kBottomRight ? skv - sq : 0; };
  const auto limited = [](std::int64_t x) {  // Sums with sizes must not overflow.
    return std::clamp(x, -AttentionBand::kUnbounded, AttentionBand::kUnbounded);
  };
  AttentionBand band;
  band.prefix = prefix;
  if (causal != Causal::kNone) band.highest = diagonal(causal);
  if (window && window->left) band.lowest = limited(diagonal(window->anchor) - limited(*window->left));
  if (window && window->right) {
    band.highest = std::min(band.highest, limited(diagonal(window->anchor) + limited(*window->right)));
  }
  return band;
}

// The sequences of a call where they are not all alike; empty where each batch entry is one, under one band.
inline std::vector<AttentionSequence> SequencesOf(Causal causal, const std::optional<AttentionWindow>& window,
                                                  std::span<const std::int64_t> prefix, std::int64_t sq,
                                                  std::int64_t skv) {
  std::vector<AttentionSequence> sequences;
  for (std::size_t b = 0; b < prefix.size(); ++b) {
    sequences.push_back({.batch = static_cast<std::int64_t>(b),
                         .sq = sq,
                         .skv = skv,
                         .band = BandOf(causal, window, sq, skv, prefix[b])});
  }
  return sequences;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_SEQUENCES_H_
