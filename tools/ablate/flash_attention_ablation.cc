// Attention from the conventional kernel (V padded to the width of Q and K and sliced again, rope parts turned to their
// positions and concatenated by kernels of their own, one stage after the other) to RECT-FA, forward and backward. Every step
// is the same kernel text with minimal flags and its own best tiling among those that load by twos: what the last one gains is
// the overlap of stages alone.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "tools/ablate/ablation.h"
#include "tools/ablate/chain_ops.h"

namespace cubist {
namespace {

struct Dims {
  std::int64_t heads = 0, length = 0, d_qk = 0, d_rope = 0, d_v = 0;
  bool causal = false;
  std::int64_t rows() const { return heads * length; }
  std::int64_t wide() const { return d_qk + d_rope; }
};

ConstTensor In(const Dims& d, std::int64_t cols, std::int64_t heads) {
  return ConstTensor(nullptr, DType::kBF16, {1, heads, d.length, cols});
}
Tensor Out(const Dims& d, std::int64_t cols, std::int64_t heads) {
  return Tensor(nullptr, DType::kBF16, {1, heads, d.length, cols});
}

Status Appended(Profile* all, const Profile& one) {
  if (all != nullptr) all->Append(one);
  return {};
}

// How a step calls the kernel.
struct Form {
  std::int64_t d_qk = 0, d_rope = 0, d_v = 0;  // Columns; the rope parts are apart where d_rope is not 0.
  bool turns = false;                          // Rope parts come as they were before rotation.
};

AttentionRope Angles(const Dims& d, const Form& form) {
  if (!form.turns || form.d_rope == 0) return {};
  const ConstTensor angles(nullptr, DType::kF32, {d.length, form.d_rope / 2});
  return {.cos = angles, .sin = angles};
}

Status Forward(const Device& device, const Dims& d, const Form& form, Profile* profile) {
  FlashAttentionArgs args;
  args.q = In(d, form.d_qk, d.heads), args.k = In(d, form.d_qk, d.heads), args.v = In(d, form.d_v, d.heads);
  if (form.d_rope > 0) args.q_rope = In(d, form.d_rope, d.heads), args.k_rope = In(d, form.d_rope, 1);
  args.rope = Angles(d, form);
  args.out = Out(d, form.d_v, d.heads);
  args.lse = Tensor(nullptr, DType::kF32, {1, d.heads, d.length});
  args.causal = d.causal ? Causal::kBottomRight : Causal::kNone;
  Profile one;
  CUBIST_RETURN_IF_ERROR(FlashAttention(device, args, profile != nullptr ? &one : nullptr));
  return Appended(profile, one);
}

Status Backward(const Device& device, const Dims& d, const Form& form, Profile* profile) {
  FlashAttentionGradArgs args;
  args.q = In(d, form.d_qk, d.heads), args.k = In(d, form.d_qk, d.heads), args.v = In(d, form.d_v, d.heads);
  args.dq = Out(d, form.d_qk, d.heads), args.dk = Out(d, form.d_qk, d.heads);
  args.dv = Out(d, form.d_v, d.heads);
  if (form.d_rope > 0) {
    args.q_rope = In(d, form.d_rope, d.heads), args.k_rope = In(d, form.d_rope, 1);
    args.dq_rope = Out(d, form.d_rope, d.heads), args.dk_rope = Out(d, form.d_rope, 1);
  }
  args.rope = Angles(d, form);
  args.out = In(d, form.d_v, d.heads), args.dout = In(d, form.d_v, d.heads);
  args.lse = ConstTensor(nullptr, DType::kF32, {1, d.heads, d.length});
  args.causal = d.causal ? Causal::kBottomRight : Causal::kNone;
  Profile one;
  CUBIST_RETURN_IF_ERROR(FlashAttentionGrad(device, args, profile != nullptr ? &one : nullptr));
  return Appended(profile, one);
}

// The rope parts of all heads' queries and of the keys that they share, or their gradients.
Status TurnRope(const Device& device, const Dims& d, bool back, Profile* profile) {
  if (d.d_rope == 0) return {};
  CUBIST_RETURN_IF_ERROR(RotateRows(device, d.heads, d.length, d.d_rope, back, profile));
  return RotateRows(device, 1, d.length, d.d_rope, back, profile);
}

// Q and K with their rope parts, each a matrix of its own in GM.
Status JoinRope(const Device& device, const Dims& d, Profile* profile) {
  if (d.d_rope == 0) return {};
  CUBIST_RETURN_IF_ERROR(JoinColumns(device, d.rows(), {{d.rows(), d.d_qk}, {d.rows(), d.d_rope}}, profile));
  return JoinColumns(device, d.rows(), {{d.rows(), d.d_qk}, {d.length, d.d_rope}}, profile);
}
// dQ and dK come apart again.
Status SplitRope(const Device& device, const Dims& d, Profile* profile) {
  if (d.d_rope == 0) return {};
  for (const std::int64_t cols : {d.d_qk, d.d_rope, d.d_qk, d.d_rope})
    CUBIST_RETURN_IF_ERROR(SliceColumns(device, d.rows(), d.wide(), cols, profile));
  return {};
}
// A matrix of d_v columns widened by zeros to those of Q and K.
Status Pad(const Device& device, const Dims& d, Profile* profile) {
  if (d.d_v == d.wide()) return {};
  return JoinColumns(device, d.rows(), {{d.rows(), d.d_v}, {d.length, d.wide() - d.d_v}}, profile);
}
Status Slice(const Device& device, const Dims& d, Profile* profile) {
  if (d.d_v == d.wide()) return {};
  return SliceColumns(device, d.rows(), d.wide(), d.d_v, profile);
}

// A field of a tiling; `otherwise` for a kernel that has none of the name.
int NumberOf(const TilingFields& fields, const char* name, int otherwise) {
  const auto field = fields.find(name);
  return field == fields.end() ? otherwise : std::stoi(field->second);
}

// Whether there are two tiles of whatever a loop loads into L1, so that the next one comes while the other is in use: of
// K and V forward; of Q, dO, K and V backward, where a depth of 1 keeps three.
bool LoadsDoubleBuffered(const TilingFields& f) {
  return NumberOf(f, "kv_stages", 2) >= 2 &&
         (NumberOf(f, "load_stages", 2) >= 2 || NumberOf(f, "depth", 0) >= 1);
}

using Pass = Status (*)(const Device&, const Dims&, const Form&, Profile*);

// What forward turned, joined and padded is kept for backward, where the gradients take the way back: that of the output is
// padded as the slice's own, the rest is sliced, split and turned. (That the heads' gradients of the keys that they share are
// summed is not counted.)
AblationCase MakeCase(const Dims& d, bool backward) {
  const Pass pass = backward ? &Backward : &Forward;
  const auto turned_and_joined = [=](const Device& device, std::int64_t d_v, Profile* profile) {
    if (!backward) {
      CUBIST_RETURN_IF_ERROR(TurnRope(device, d, /*back=*/false, profile));
      CUBIST_RETURN_IF_ERROR(JoinRope(device, d, profile));
    }
    const bool pads = d_v != d.d_v;
    if (pads) CUBIST_RETURN_IF_ERROR(Pad(device, d, profile));  // V, or the output's gradient.
    CUBIST_RETURN_IF_ERROR(pass(device, d, {d.wide(), 0, d_v}, profile));
    if (pads) CUBIST_RETURN_IF_ERROR(Slice(device, d, profile));  // The output, or the gradient of V.
    if (!backward) return Status();
    CUBIST_RETURN_IF_ERROR(SplitRope(device, d, profile));
    return TurnRope(device, d, /*back=*/true, profile);
  };
  const auto conventional = [=](const Device& device, Profile* profile) {
    return turned_and_joined(device, d.wide(), profile);
  };
  const auto rectangular = [=](const Device& device, Profile* profile) {
    return turned_and_joined(device, d.d_v, profile);
  };
  const auto apart = [=](const Device& device, Profile* profile) {
    if (!backward) CUBIST_RETURN_IF_ERROR(TurnRope(device, d, /*back=*/false, profile));
    CUBIST_RETURN_IF_ERROR(pass(device, d, {d.d_qk, d.d_rope, d.d_v}, profile));
    return backward ? TurnRope(device, d, /*back=*/true, profile) : Status();
  };
  const auto ours = [=](const Device& device, Profile* profile) {
    return pass(device, d, {d.d_qk, d.d_rope, d.d_v, /*turns=*/true}, profile);
  };
  const auto one_after_the_other = [](const TilingFields& f) {
    return LoadsDoubleBuffered(f) && NumberOf(f, "depth", 0) == 0;
  };
  using sync::Policy;
  return {fmt::format("{} {}{}/{} S {} x {} {}", backward ? "backward" : "forward", d.d_qk,
                      d.d_rope > 0 ? fmt::format("+{}", d.d_rope) : std::string(), d.d_v, d.length, d.heads,
                      d.causal ? "causal" : "full"),
          fmt::format("{} {}", backward ? "backward" : "forward", d.d_rope > 0 ? "MLA" : "128/128"),
          {{"conventional", conventional, Policy::kMinimal, one_after_the_other},
           {"rectangular", rectangular, Policy::kMinimal, one_after_the_other},
           {"no concatenation", apart, Policy::kMinimal, one_after_the_other},
           {"RoPE fused", ours, Policy::kMinimal, one_after_the_other},
           {"tight stages", ours, Policy::kMinimal, &LoadsDoubleBuffered}}};
}

}  // namespace

AblationCase FlashAttentionCase(std::int64_t heads, std::int64_t length, const Workload::Attention& dims,
                                bool causal, bool backward) {
  return MakeCase({heads, length, dims.nope_dim, dims.rope_dim, dims.v_dim, causal}, backward);
}

std::vector<AblationCase> FlashAttentionAblation(const Workload& w) {
  // Heads of a device, few enough to model in a moment; all of them are alike.
  const std::int64_t heads = std::min<std::int64_t>(w.attention.heads / w.training.tensor_parallel, 8);
  std::vector<AblationCase> cases;
  for (const bool backward : {false, true}) {
    for (const std::int64_t length : {2048, 4096, 8192}) {
      for (const bool causal : {false, true}) {
        cases.push_back(FlashAttentionCase(heads, length, w.attention, causal, backward));
        cases.push_back(MakeCase({heads, length, 128, 0, 128, causal}, backward));
      }
    }
  }
  return cases;
}

}  // namespace cubist
