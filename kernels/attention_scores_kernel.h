// What happens to a tile of attention scores between Q K^T and the softmax, forward and backward.
#ifndef CUBIST_KERNELS_ATTENTION_SCORES_KERNEL_H_
#define CUBIST_KERNELS_ATTENTION_SCORES_KERNEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "kernels/attention_mask_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/attention_band.h"

namespace cubist {

// Linear biases by distance. Row i of a sequence stands i + offset behind its first key.
struct AlibiOperands {
  const GmTensor* slopes = nullptr;  // (1, 1, sequences, n)
  std::optional<std::int64_t> offset;
  bool root = false;

  std::int64_t OffsetOf(const AttentionSequence& sequence) const {
    return offset.value_or(sequence.skv - sequence.positions());
  }
};

// What is done to scores before the softmax, and to weights after it.
struct ScoreOperands {
  float scale = 1;
  float soft_cap = 0;              // 0: none.
  const GmTensor* bias = nullptr;  // (sequence, n, sq, skv)
  const GmTensor* mask = nullptr;  // (sequence, n, sq, skv)
  HiddenPairs hidden;              // By the mask.
  AlibiOperands alibi;
  DropoutStream dropout;
  float dropout_factor = 1;  // Of kept weights.
};

// s = cap * tanh(scale * s / cap) as cap - 2 cap / (exp(2 scale s / cap) + 1): exact at both ends, and off by a few units
// of cap's last place between. `scratch` has the shape of s.
template <VectorCore V>
void SoftCapCoarsely(V& core, UbTile<float> s, UbTile<float> scratch, float scale, float cap) {
  core.MulScalar(s, s, 2 * scale / cap);
  core.Exp(s, s);
  core.AddScalar(s, s, 1.0f);
  core.Fill(scratch, -2 * cap);
  core.Div(scratch, scratch, s);
  core.AddScalar(s, scratch, cap);
}

// The same to a few units in the last place of the result, in three times the passes: far from 0 the same, of x = scale * s
// with |x| below 0.35 cap, where that difference would keep the last place of cap alone, as x + x z p(z) with
// z = (x / cap)^2 and the minimax polynomial p. `power` and `series` are scratch of the shape of s.
template <VectorCore V>
void SoftCapFinely(V& core, UbTile<float> s, UbTile<float> power, UbTile<float> series, float scale,
                   float cap) {
  constexpr float kPolynomial[] = {-0x1.5553980p-2f, 0x1.10625c0p-3f, -0x1.92b68c0p-5f};
  constexpr float kTanhOfBound = 0.3363756f;  // tanh(0.35)
  core.MulScalar(s, s, scale);
  core.MulScalar(power, s, 1 / cap);
  core.Mul(power, power, power);
  core.MulScalar(series, power, kPolynomial[2]);
  for (const int degree : {1, 0}) {
    core.AddScalar(series, series, kPolynomial[degree]);
    core.Mul(series, series, power);
  }
  core.Mul(series, series, s);
  core.Add(series, series, s);
  const UbTile<float> capped = power;
  core.MulScalar(s, s, 2 / cap);
  core.Exp(s, s);
  core.AddScalar(s, s, 1.0f);
  core.Fill(capped, -2 * cap);
  core.Div(capped, capped, s);
  core.AddScalar(capped, capped, cap);
  core.SelectLe(series, capped, kTanhOfBound * cap, series, capped);
  core.SelectLe(s, capped, -kTanhOfBound * cap, capped, series);
}

// Scores that are to be masked may be multiplied by their scale after it, unless it is 0: the scale that is left.
template <VectorCore V>
float ScaleForMask(V& core, UbTile<float> s, float scale) {
  if (scale != 0) return scale;
  core.MulScalar(s, s, scale);
  return 1;
}
// What becomes -inf by the scale.
inline float MaskedScore(float scale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return scale < 0 ? kInfinity : -kInfinity;
}

// Whether the band hides some of `keys` from some of `rows`.
inline bool BandCuts(const AttentionSequence& sequence, Range rows, Range keys) {
  return !keys.empty() && !sequence.band.ShowsAll(rows, keys);
}

// `value` to every score that the band hides from `rows`, of which so many follow each other at each position.
template <VectorCore V>
void HideFromFoldedRows(V& core, UbTile<float> s, const AttentionBand& band, Range rows, Range keys,
                        float value) {
  const Range behind = band.Behind(keys);  // Keys of a prefix are seen by all.
  const auto fill = [&](Range part, Range hidden) {
    if (!hidden.empty()) core.Fill(s.Part(part.From(rows.begin), hidden.From(keys.begin)), value);
  };
  for (std::int64_t begin = rows.begin, end; begin < rows.end; begin = end) {
    end = std::min((begin / band.fold + 1) * band.fold, rows.end);
    Range seen = band.WithoutPrefix().Seen({begin, end}, behind);
    if (seen.empty()) seen = {keys.end, keys.end};
    fill({begin, end}, {behind.begin, seen.begin});
    fill({begin, end}, {seen.end, keys.end});
  }
}

// Makes every score that the band hides -inf once it is multiplied by the returned scale: `scale` itself, so that the
// softmax can apply it, or 1 where this has. `s` are the unscaled scores of `rows` and `keys` of the sequence.
template <VectorCore V>
float MaskByBand(V& core, UbTile<float> s, const AttentionSequence& sequence, Range rows, Range keys,
                 float scale) {
  const AttentionBand& band = sequence.band;
  if (!BandCuts(sequence, rows, keys)) return scale;
  scale = ScaleForMask(core, s, scale);
  if (band.fold > 1) {
    HideFromFoldedRows(core, s, band, rows, keys, MaskedScore(scale));
    return scale;
  }
  // Keys below the prefix are seen by all.
  const std::int64_t first = std::clamp<std::int64_t>(band.prefix, keys.begin, keys.end);
  const std::int64_t diagonal = rows.begin - first;
  core.MaskOutside(s.Cols({first - keys.begin, keys.size()}), diagonal + band.lowest, diagonal + band.highest,
                   MaskedScore(scale));
  return scale;
}

// `value` to every element of x (keys, queries) that the band hides.
template <VectorCore V>
void HideKeysByBand(V& core, UbTile<float> x, const AttentionSequence& sequence, Range queries, Range keys,
                    float value) {
  const AttentionBand& band = sequence.band;
  const std::int64_t first = std::clamp<std::int64_t>(band.prefix, keys.begin, keys.end);
  const std::int64_t diagonal = first - queries.begin;
  core.MaskOutside(x.Rows({first - keys.begin, keys.size()}), diagonal - band.highest, diagonal - band.lowest,
                   value);
}

// Whether an element of x (r, 1) is NaN; x is lost.
template <VectorCore V>
bool AnyNaN(V& core, UbTile<float> x) {
  for (std::int64_t rows = x.rows(); rows > 1; rows -= rows / 2) {
    const UbTile<float> first = x.Rows({0, rows / 2});
    core.Add(first, first, x.Rows({rows - rows / 2, rows}));
  }
  return std::isnan(core.ReadScalar(x.Rows({0, 1}), 0));
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_SCORES_KERNEL_H_
