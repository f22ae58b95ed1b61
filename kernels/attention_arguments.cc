#include "kernels/attention_arguments.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

#include "kernels/attention_sequences.h"
#include "kernels/token_permute_arguments.h"

namespace cubist {

Status AttentionArguments::CheckShapes() const {
  CUBIST_RETURN_IF_ERROR(CheckShape(q, {{"B"}, {"Nq"}, {"Sq"}, {"Dqk"}}));
  CUBIST_RETURN_IF_ERROR(
      CheckShape(k, {{"B, of q", batches()}, {"Nkv"}, {"Skv"}, {"Dqk, of q", q.tensor.size(3)}}));
  CUBIST_RETURN_IF_ERROR(
      CheckShape(v, {{"B, of q", batches()}, {"Nkv, of k", kv_heads()}, {"Skv, of k", skv()}, {"Dv"}}));
  if (kv_heads() == 0 ? heads() != 0 : heads() % kv_heads() != 0) {
    return q.Error("has " + std::to_string(heads()) + " heads, needs a multiple of the " +
                   std::to_string(kv_heads()) + " heads of k");
  }
  if (q_rope.tensor.given() != k_rope.tensor.given()) {
    return (q_rope.tensor.given() ? k_rope : q_rope).Error("is not given, but the other rope part is");
  }
  if (!q_rope.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(
      CheckShape(q_rope, {{"B, of q", batches()}, {"Nq, of q", heads()}, {"Sq, of q", sq()}, {"Dr"}}));
  CUBIST_RETURN_IF_ERROR(CheckShape(
      k_rope,
      {{"B, of q", batches()}, {"heads"}, {"Skv, of k", skv()}, {"Dr, of q_rope", q_rope.tensor.size(3)}}));
  const std::int64_t rope_heads = k_rope.tensor.size(1);
  if (rope_heads == 1 || rope_heads == kv_heads()) return {};
  return k_rope.Error("has " + std::to_string(rope_heads) + " heads, needs 1 or the " +
                      std::to_string(kv_heads()) + " of k");
}

Status AttentionArguments::CheckOutputShape(const Argument& arg) const {
  return CheckShape(arg,
                    {{"B, of q", batches()}, {"Nq, of q", heads()}, {"Sq, of q", sq()}, {"Dv, of v", d_v()}});
}

Status AttentionArguments::CheckStatisticsShape(const Argument& arg) const {
  return CheckShape(arg, {{"B, of q", batches()}, {"Nq, of q", heads()}, {"Sq, of q", sq()}});
}

Status AttentionArguments::CheckDTypes() const {
  CUBIST_RETURN_IF_ERROR(CheckDType(q, kFloatTypes));
  for (const Argument* arg : {&k, &v, &q_rope, &k_rope}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {dtype()}));
  }
  return {};
}

Status AttentionArguments::CheckRope() const {
  if (!rope.given()) {
    for (const Argument* positions : {&q_positions, &k_positions}) {
      if (positions->tensor.given()) return positions->Error("are given, but rope.cos is not");
    }
    for (const auto& [name, offset] :
         {std::pair("rope.q_offset", rope.q_offset), std::pair("rope.k_offset", rope.k_offset)}) {
      if (offset != 0) return OptionError(kernel, name, offset, "0 without rope.cos");
    }
    return {};
  }
  const bool whole = q_rope.tensor.given();
  const Argument& turned = whole ? q_rope : q;
  CUBIST_RETURN_IF_ERROR(CheckShape(cos, {{"P"}, {"R / 2"}}));
  CUBIST_RETURN_IF_ERROR(
      CheckShape(sin, {{"P, of rope.cos", cos.tensor.size(0)}, {"R / 2, of rope.cos", cos.tensor.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(cos, {DType::kF32, dtype()}));
  CUBIST_RETURN_IF_ERROR(CheckDType(sin, {cos.tensor.dtype}));
  const std::int64_t turned_cols = 2 * cos.tensor.size(1), cols = turned.tensor.size(3);
  if (whole ? turned_cols != cols : turned_cols > cols) {
    return cos.Error("has " + std::to_string(cos.tensor.size(1)) + " columns, which turn " +
                     std::to_string(turned_cols) + ", needs " + (whole ? "" : "at most ") + "half the " +
                     std::to_string(cols) + " of " + turned.name);
  }
  CUBIST_RETURN_IF_ERROR(
      CheckPositions(q_positions, "rope.q_offset", rope.q_offset, sq(), LongestOf(lengths.q_ends, sq())));
  return CheckPositions(k_positions, "rope.k_offset", rope.k_offset, skv(),
                        LongestOf(lengths.kv_ends, skv()));
}

// Positions of `rows` rows one by one, or from an offset on, of sequences of up to `longest` rows.
Status AttentionArguments::CheckPositions(const Argument& positions, const char* offset_name,
                                          std::int64_t offset, std::int64_t rows,
                                          std::int64_t longest) const {
  const std::int64_t count = cos.tensor.size(0), last = positions.tensor.given() ? 0 : count - longest;
  if (last < 0) {
    return cos.Error("has " + std::to_string(count) + " positions, needs one for each of " +
                     std::to_string(longest) + " rows");
  }
  if (offset < 0 || offset > last) {
    return OptionError(kernel, offset_name, offset,
                       positions.tensor.given()
                           ? std::string("0 beside ") + positions.name
                           : "0 to " + std::to_string(last) + ": rope.cos has " + std::to_string(count) +
                                 " positions for " + std::to_string(longest) + " rows");
  }
  if (!positions.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(positions.tensor.rank == 2
                             ? CheckShape(positions, {{"B, of q", batches()}, {"S", rows}})
                             : CheckShape(positions, {{"S", rows}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(positions, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(positions, /*needs_data=*/true));
  return CheckValues(positions, 0, count);
}

std::int64_t AttentionArguments::sequences() const {
  return lengths.given() ? static_cast<std::int64_t>(lengths.q_ends.size()) : batches();
}

// Rows and keys count within a sequence where there are several, so that there may be more of them than any needs.
Status AttentionArguments::CheckPairs(const Argument& arg) const {
  CUBIST_RETURN_IF_ERROR(CheckShape(arg, {{"B or 1"}, {"Nq or 1"}, {"Sq or 1"}, {"Skv or 1"}}));
  const std::array<std::int64_t, 4> sizes{sequences(), heads(), LongestOf(lengths.q_ends, sq()),
                                          LongestOf(lengths.kv_ends, skv())};
  for (int d = 0; d < 4; ++d) {
    const std::int64_t size = arg.tensor.size(d), needed = sizes[static_cast<std::size_t>(d)];
    const bool may_be_larger = lengths.given() && d >= 2;
    if (size == 1 || size == needed || (may_be_larger && size > needed)) continue;
    return arg.Error(
        "has size " + std::to_string(size) + " in dimension " + std::to_string(d) + ", needs 1" +
        (needed == 1 && !may_be_larger
             ? ""
             : std::string(" or ") + (may_be_larger ? "at least " : "") + std::to_string(needed)));
  }
  return {};
}

Status AttentionArguments::CheckBias() const {
  if (!bias.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckPairs(bias));
  return CheckDType(bias, {DType::kF32, dtype()});
}

Status AttentionArguments::CheckMask() const {
  if (!mask.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckPairs(mask));
  return CheckDType(mask, {DType::kBool});
}

Status AttentionArguments::CheckSlopes() const {
  if (!slopes.tensor.given()) {
    if (alibi.offset) return OptionError(kernel, "alibi.offset", *alibi.offset, "alibi.slopes beside it");
    if (alibi.root)
      return InvalidArgument(std::string(kernel) + ": alibi.root is set, but there are no alibi.slopes");
    return {};
  }
  constexpr std::int64_t kMostOffset = std::int64_t{1}
                                       << 60;  // Sums of it and of places in a sequence are in range.
  if (alibi.offset && (*alibi.offset < -kMostOffset || *alibi.offset > kMostOffset))
    return OptionError(kernel, "alibi.offset", *alibi.offset, "-2^60 to 2^60");
  CUBIST_RETURN_IF_ERROR(slopes.tensor.rank == 2
                             ? CheckShape(slopes, {{"sequences", sequences()}, {"Nq, of q", heads()}})
                             : CheckShape(slopes, {{"Nq, of q", heads()}}));
  return CheckDType(slopes, {DType::kF32});
}

Status AttentionArguments::CheckNumbers() const {
  // Squares of scores over the cap, and its double, are far from infinite.
  constexpr float kLeastCap = 0x1p-63f, kMostCap = 0x1p126f;
  if (scale && !std::isfinite(*scale)) return OptionError(kernel, "scale", *scale, "a finite number");
  if (soft_cap && !(*soft_cap >= kLeastCap && *soft_cap <= kMostCap))
    return OptionError(kernel, "soft_cap", *soft_cap, TextOf(kLeastCap) + " to " + TextOf(kMostCap));
  if (!(dropout.keep > 0 && dropout.keep <= 1)) {
    return OptionError(kernel, "dropout.keep", dropout.keep, "a probability above 0, up to 1");
  }
  return {};
}

Status AttentionArguments::CheckChoices() const {
  CUBIST_RETURN_IF_ERROR(CheckChoice(kernel, "causal", causal, Causal::kBottomRight));
  if (window)
    CUBIST_RETURN_IF_ERROR(CheckChoice(kernel, "window.anchor", window->anchor, Causal::kBottomRight));
  return CheckChoice(kernel, "rope.layout", rope.layout, RopeLayout::kInterleavedToHalf);
}

Status AttentionArguments::Check() const {
  CUBIST_RETURN_IF_ERROR(CheckChoices());
  CUBIST_RETURN_IF_ERROR(CheckShapes());
  CUBIST_RETURN_IF_ERROR(CheckDTypes());
  CUBIST_RETURN_IF_ERROR(CheckSequences(kernel, prefix, lengths, batches(), sq(), skv()));
  CUBIST_RETURN_IF_ERROR(CheckNumbers());
  CUBIST_RETURN_IF_ERROR(CheckRope());
  CUBIST_RETURN_IF_ERROR(CheckBias());
  CUBIST_RETURN_IF_ERROR(CheckMask());
  CUBIST_RETURN_IF_ERROR(CheckSlopes());
  if (!sinks.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckShape(sinks, {{"Nq, of q", heads()}}));
  return CheckDType(sinks, {DType::kF32});
}

Status AttentionArguments::CheckMemory(bool needs_data, const std::vector<const Argument*>& more_inputs,
                                       const std::vector<const Argument*>& outputs) const {
  std::vector<const Argument*> inputs = all();
  inputs.insert(inputs.end(), more_inputs.begin(), more_inputs.end());
  for (const std::vector<const Argument*>* list : {&std::as_const(inputs), &outputs}) {
    for (const Argument* arg : *list) {
      if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, needs_data));
    }
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i]->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckWritable(*outputs[i]));
    for (const Argument* input : inputs) CUBIST_RETURN_IF_ERROR(CheckApart(*outputs[i], *input));
    for (std::size_t j = i + 1; j < outputs.size(); ++j)
      CUBIST_RETURN_IF_ERROR(CheckApart(*outputs[i], *outputs[j]));
  }
  return {};
}

std::int64_t LongestOf(std::span<const std::int64_t> ends, std::int64_t size) {
  if (ends.empty()) return size;
  std::int64_t longest = 0, begin = 0;
  for (const std::int64_t end : ends) longest = std::max(longest, end - begin), begin = end;
  return longest;
}

float ScaleOf(const std::optional<float>& scale, std::int64_t columns) {
  return scale.value_or(1.0f / std::sqrt(static_cast<float>(std::max<std::int64_t>(columns, 1))));
}

}  // namespace cubist
