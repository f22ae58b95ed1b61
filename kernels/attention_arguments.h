// The arguments that forward and backward of attention share: what they check of them, and views of them.
#ifndef CUBIST_KERNELS_ATTENTION_ARGUMENTS_H_
#define CUBIST_KERNELS_ATTENTION_ARGUMENTS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/attention_options.h"
#include "kernels/validate.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// The inputs of attention by name, in the order of their messages, and the options that go with them.
struct AttentionArguments {
  template <class Args>
  AttentionArguments(const char* kernel, const Args& args)
      : kernel(kernel),
        q{kernel, "q", args.q},
        k{kernel, "k", args.k},
        v{kernel, "v", args.v},
        q_rope{kernel, "q_rope", args.q_rope},
        k_rope{kernel, "k_rope", args.k_rope},
        cos{kernel, "rope.cos", args.rope.cos},
        sin{kernel, "rope.sin", args.rope.sin},
        q_positions{kernel, "rope.q_positions", args.rope.q_positions},
        k_positions{kernel, "rope.k_positions", args.rope.k_positions},
        bias{kernel, "bias", args.bias},
        sinks{kernel, "sinks", args.sinks},
        mask{kernel, "mask", args.mask},
        slopes{kernel, "alibi.slopes", args.alibi.slopes},
        causal(args.causal),
        rope(args.rope),
        alibi(args.alibi),
        dropout(args.dropout),
        window(args.window),
        prefix(args.prefix),
        lengths(args.lengths),
        scale(args.scale),
        soft_cap(args.soft_cap) {}

  // B, Nq, Sq, Nkv, Skv and Dv.
  std::int64_t batches() const { return q.tensor.size(0); }
  std::int64_t heads() const { return q.tensor.size(1); }
  std::int64_t sq() const { return q.tensor.size(2); }
  std::int64_t kv_heads() const { return k.tensor.size(1); }
  std::int64_t skv() const { return k.tensor.size(2); }
  std::int64_t d_v() const { return v.tensor.size(3); }
  DType dtype() const { return q.tensor.dtype; }
  std::vector<const Argument*> all() const {
    return {&q,           &k,           &v,    &q_rope, &k_rope, &cos,   &sin,
            &q_positions, &k_positions, &bias, &sinks,  &mask,   &slopes};
  }

  // Shapes, dtypes and options, but not what `outputs` and storage are.
  Status Check() const;
  // (B, Nq, Sq, Dv), and (B, Nq, Sq).
  Status CheckOutputShape(const Argument& arg) const;
  Status CheckStatisticsShape(const Argument& arg) const;
  // Storage of all tensors, and that `outputs` are writable and share no element with another.
  Status CheckMemory(bool needs_data, const std::vector<const Argument*>& more_inputs,
                     const std::vector<const Argument*>& outputs) const;

  const char* kernel;
  Argument q, k, v, q_rope, k_rope, cos, sin, q_positions, k_positions, bias, sinks, mask, slopes;
  Causal causal;
  AttentionRope rope;
  AttentionAlibi alibi;
  AttentionDropout dropout;
  std::optional<AttentionWindow> window;
  std::span<const std::int64_t> prefix;
  AttentionLengths lengths;
  std::optional<float> scale, soft_cap;

 private:
  Status CheckShapes() const;
  Status CheckDTypes() const;
  Status CheckRope() const;
  Status CheckPositions(const Argument& positions, const char* offset_name, std::int64_t offset,
                        std::int64_t rows, std::int64_t longest) const;
  Status CheckPairs(const Argument& arg) const;
  Status CheckBias() const;
  Status CheckMask() const;
  Status CheckSlopes() const;
  std::int64_t sequences() const;
  Status CheckNumbers() const;
  Status CheckChoices() const;
};

// A caller's workspace as the bytes that it is, which no other argument may share.
// How scores are capped (FlashAttentionShape::soft_cap): what a cap of 64 loses coarsely, 2^-14 of a weight, is a quarter of
// what rounds it to fp16. Beyond the limits of cap and scale the product of the two is no number to count on.
inline int SoftCapForm(DType in, const std::optional<float>& cap, const std::optional<float>& scale) {
  if (!cap) return 0;
  const bool coarse = in != DType::kF32 && *cap >= 1 && *cap <= 64 && std::abs(scale.value_or(1)) <= 0x1p64f;
  return coarse ? 1 : 2;
}

inline Argument AsArgument(const char* kernel, const CallerWorkspace& workspace) {
  if (workspace.data == nullptr || workspace.bytes <= 0) return {kernel, "workspace", {}};
  return {kernel, "workspace", ConstTensor(workspace.data, DType::kBool, {workspace.bytes})};
}

// The longest of packed sequences, or the only one.
std::int64_t LongestOf(std::span<const std::int64_t> ends, std::int64_t size);

// The factor of the scores.
float ScaleOf(const std::optional<float>& scale, std::int64_t columns);

// Part of one dimension.
template <class Tensor>
Tensor PartOf(Tensor x, int d, Range part) {
  if (x.data != nullptr) {
    auto* bytes =
        static_cast<std::conditional_t<std::is_same_v<Tensor, ConstTensor>, const char, char>*>(x.data);
    x.data = bytes + part.begin * x.stride(d) * SizeOf(x.dtype);
  }
  x.sizes[static_cast<std::size_t>(d)] = part.size();
  return x;
}

// The first `turned` columns of `x` as a rope part of its own, the others left.
template <class Tensor>
void SplitColumns(Tensor& x, Tensor& x_rope, std::int64_t turned) {
  const std::int64_t cols = x.size(3);
  x_rope = PartOf(x, 3, {0, turned}), x = PartOf(x, 3, {turned, cols});
}

// Rotary columns of q and k, and of their gradients where a call has them, as rope parts of their own.
template <class Args>
void SplitRotaryColumns(Args& args) {
  if (!args.rope.given() || args.q_rope.given()) return;
  const std::int64_t turned = 2 * args.rope.cos.size(1);
  SplitColumns(args.q, args.q_rope, turned), SplitColumns(args.k, args.k_rope, turned);
  if constexpr (requires { args.dq; })
    SplitColumns(args.dq, args.dq_rope, turned), SplitColumns(args.dk, args.dk_rope, turned);
}

// (b, n, s) as (b, n, s, 1), so that its matrix at (b, n) is a column.
template <class Tensor>
Tensor AsColumns(Tensor x) {
  if (x.given()) x.rank = 4, x.sizes[3] = 1, x.strides[3] = 1;
  return x;
}

// The bias with every size written out; a row or column that serves all is repeated by stride 0.
inline ConstTensor Broadcast(ConstTensor bias, std::array<std::int64_t, 4> sizes) {
  for (std::size_t d = 0; d < 4; ++d) {
    if (bias.sizes[d] == 1) bias.strides[d] = 0;
    bias.sizes[d] = sizes[d];
  }
  return bias;
}

// (s) as (count, s), the same row for each; (count, s) as it is.
inline ConstTensor RowForEach(ConstTensor rows, std::int64_t count) {
  if (rows.rank == 2) return rows;
  rows.rank = 2;
  rows.sizes[1] = rows.sizes[0], rows.strides[1] = rows.strides[0];
  rows.sizes[0] = count, rows.strides[0] = 0;
  return rows;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_ARGUMENTS_H_
