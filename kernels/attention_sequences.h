// Attention's options as the bands and sequences that its kernels walk.
#ifndef CUBIST_KERNELS_ATTENTION_SEQUENCES_H_
#define CUBIST_KERNELS_ATTENTION_SEQUENCES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention_options.h"
#include "npu_model/status.h"
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

// The sequences of a call where they are not all alike; empty where each batch entry is one, under one band. `step` is
// what packed operands ask of their beginnings.
inline std::vector<AttentionSequence> SequencesOf(Causal causal, const std::optional<AttentionWindow>& window,
                                                  std::span<const std::int64_t> prefix,
                                                  const AttentionLengths& lengths, std::int64_t sq,
                                                  std::int64_t skv, std::int64_t step) {
  std::vector<AttentionSequence> sequences;
  const std::size_t count = std::max(prefix.size(), lengths.q_ends.size());
  AttentionSequence at;
  for (std::size_t i = 0; i < count; ++i) {
    if (lengths.given()) {
      at.sq = lengths.q_ends[i] - at.q_begin, at.skv = lengths.kv_ends[i] - at.kv_begin;
    } else {
      at.batch = static_cast<std::int64_t>(i), at.sq = sq, at.skv = skv;
    }
    at.band = BandOf(causal, window, at.sq, at.skv, prefix.empty() ? 0 : prefix[i]);
    sequences.push_back(at);
    if (!lengths.given()) continue;
    at.q_begin += at.sq, at.kv_begin += at.skv;
    at.packed_begin += RoundUp(at.skv, step);
  }
  return sequences;
}

// Ends of packed sequences within `size` rows; `dim` names it.
inline Status CheckEnds(const std::string& what, std::span<const std::int64_t> ends, std::int64_t size,
                        const char* dim) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] < before || ends[i] > size) {
      return InvalidArgument(what + "[" + std::to_string(i) + "] is " + std::to_string(ends[i]) + ", needs " +
                             std::to_string(before) + " to the " + std::to_string(size) + " of " + dim);
    }
    before = ends[i];
  }
  return {};
}

// Lengths and prefix of a call with B batch entries of Sq rows and Skv keys.
inline Status CheckSequences(const std::string& kernel, std::span<const std::int64_t> prefix,
                             const AttentionLengths& lengths, std::int64_t batches, std::int64_t sq,
                             std::int64_t skv) {
  if (lengths.given()) {
    if (batches != 1) {
      return InvalidArgument(
          kernel + ": lengths are of sequences in one batch entry, but q has B = " + std::to_string(batches));
    }
    if (lengths.q_ends.size() != lengths.kv_ends.size()) {
      return InvalidArgument(kernel + ": lengths.q_ends has " + std::to_string(lengths.q_ends.size()) +
                             " entries, needs the " + std::to_string(lengths.kv_ends.size()) +
                             " of lengths.kv_ends");
    }
    if (Status s = CheckEnds(kernel + ": lengths.q_ends", lengths.q_ends, sq, "Sq, of q"); !s.ok()) return s;
    if (Status s = CheckEnds(kernel + ": lengths.kv_ends", lengths.kv_ends, skv, "Skv, of k"); !s.ok())
      return s;
    batches = static_cast<std::int64_t>(lengths.q_ends.size());
  }
  if (prefix.empty()) return {};
  if (static_cast<std::int64_t>(prefix.size()) != batches) {
    return InvalidArgument(kernel + ": prefix has " + std::to_string(prefix.size()) + " entries, needs the " +
                           std::to_string(batches) + (lengths.given() ? " sequences" : " of B, of q"));
  }
  for (std::size_t i = 0; i < prefix.size(); ++i) {
    const std::int64_t keys = prefix[i];
    if (keys >= 0 && keys <= skv) continue;
    return InvalidArgument(kernel + ": prefix[" + std::to_string(i) + "] is " + std::to_string(keys) +
                           ", needs 0 to the " + std::to_string(skv) + " of Skv, of k");
  }
  return {};
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_SEQUENCES_H_
