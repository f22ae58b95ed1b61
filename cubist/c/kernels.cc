// The kernels in C. A field of a kernel's arguments is a word here and a line in c.h.
#include "cubist/c/support.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/reorder_chunks.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"

// A field that has one name in C and C++: in(FIELD(a))(FIELD(b)).
#define FIELD(name) #name, from.name, to.name

namespace cubist::c {
namespace {

// Read(in, from, to): the fields of a kernel's arguments.

void Read(Reader& in, const cubist_matmul_args& from, MatmulArgs& to) {
  in(FIELD(a))(FIELD(b))(FIELD(bias))(FIELD(c))(FIELD(packed_a))(FIELD(packed_b));
  in(FIELD(transpose_a))(FIELD(transpose_b))(FIELD(accumulate))(FIELD(any_order));
  in(FIELD(alpha))(FIELD(beta))(FIELD(residual))(FIELD(activation), CUBIST_ACTIVATION_GELU_TANH);
}

// What the grouped product and its gradients are given alike.
template <class From, class To>
void ReadGroups(Reader& in, const From& from, To& to) {
  in(FIELD(groups))(FIELD(group_list), CUBIST_GROUP_ENDS)(FIELD(weights));
  in("weight_list", from.weight_list, from.weight_count, to.weight_list);
  in(FIELD(packed_weights))(FIELD(transpose_weights));
}

void Read(Reader& in, const cubist_grouped_matmul_args& from, GroupedMatmulArgs& to) {
  ReadGroups(in, from, to);
  in(FIELD(x))(FIELD(bias))(FIELD(out));
  in(FIELD(alpha))(FIELD(beta))(FIELD(residual))(FIELD(activation), CUBIST_ACTIVATION_GELU_TANH);
}

void Read(Reader& in, const cubist_grouped_matmul_grad_args& from, GroupedMatmulGradArgs& to) {
  ReadGroups(in, from, to);
  in(FIELD(dy))(FIELD(dx))(FIELD(x))(FIELD(dw))(FIELD(accumulate_dw));
  in("dw_list", from.dw_list, from.dw_count, to.dw_list);
}

void ReadWindow(const Reader& in, const cubist_window* from, std::optional<AttentionWindow>& to) {
  if (from == nullptr) return;
  to.emplace();
  if (from->left != CUBIST_UNBOUNDED) to->left = from->left;
  if (from->right != CUBIST_UNBOUNDED) to->right = from->right;
  to->anchor = in.Enum<Causal>("window.anchor", from->anchor, CUBIST_CAUSAL_BOTTOM_RIGHT);
}

void ReadLengths(Reader& in, const cubist_lengths& from, AttentionLengths& to) {
  in("lengths.q_ends", from.q_ends, from.count, to.q_ends);
  in("lengths.kv_ends", from.kv_ends, from.count, to.kv_ends);
}

void ReadRope(Reader& in, const cubist_rope& from, AttentionRope& to) {
  in("rope.cos", from.cos, to.cos)("rope.sin", from.sin, to.sin);
  in("rope.layout", from.layout, to.layout, CUBIST_ROPE_INTERLEAVED_TO_HALF);
  in(FIELD(q_offset))(FIELD(k_offset));
  in("rope.q_positions", from.q_positions, to.q_positions);
  in("rope.k_positions", from.k_positions, to.k_positions);
}

// What both passes of attention are given; out and lse are outputs of the one and inputs of the other.
template <class From, class To>
void ReadAttention(Reader& in, const From& from, To& to) {
  in(FIELD(q))(FIELD(k))(FIELD(v))(FIELD(q_rope))(FIELD(k_rope))(FIELD(out))(FIELD(lse));
  in(FIELD(scale))(FIELD(causal), CUBIST_CAUSAL_BOTTOM_RIGHT);
  in("prefix", from.prefix, from.prefix_count, to.prefix);
  ReadWindow(in, from.window, to.window);
  ReadLengths(in, from.lengths, to.lengths);
  ReadRope(in, from.rope, to.rope);
  in(FIELD(bias))(FIELD(sinks))(FIELD(mask))(FIELD(soft_cap))(FIELD(workspace));
  in("alibi.slopes", from.alibi.slopes, to.alibi.slopes)(FIELD(alibi.offset))(FIELD(alibi.root));
  in(FIELD(dropout.keep))(FIELD(dropout.seed))(FIELD(dropout.offset));
}

void Read(Reader& in, const cubist_flash_attention_args& from, FlashAttentionArgs& to) {
  ReadAttention(in, from, to);
}

void Read(Reader& in, const cubist_flash_attention_grad_args& from, FlashAttentionGradArgs& to) {
  ReadAttention(in, from, to);
  in(FIELD(dout))(FIELD(dq))(FIELD(dk))(FIELD(dv))(FIELD(dq_rope))(FIELD(dk_rope));
  in(FIELD(dbias))(FIELD(dsinks));
}

void Read(Reader& in, const cubist_token_permute_args& from, TokenPermuteArgs& to) {
  in(FIELD(tokens))(FIELD(topk_ids))(FIELD(routing_map))(FIELD(valid))(FIELD(probs))(FIELD(expert_places));
  in(FIELD(top_k))(FIELD(num_experts))(FIELD(num_out_tokens))(FIELD(row_multiple))(FIELD(rows));
  in(FIELD(capacity))(FIELD(capacity_keeps), CUBIST_CAPACITY_KEEPS_HIGHEST)(FIELD(pad_with_tokens));
  in(FIELD(permuted))(FIELD(sorted_indices))(FIELD(permuted_probs))(FIELD(row_tokens));
  in(FIELD(expert_counts))(FIELD(expert_offsets))(FIELD(device_counts))(FIELD(node_counts));
}

// What says where the rows of tokens are.
template <class From, class To>
void ReadSlots(Reader& in, const From& from, To& to) {
  in(FIELD(sorted_indices))(FIELD(row_tokens))(FIELD(capacity));
  in(FIELD(routing_map))(FIELD(top_k))(FIELD(rows));
}

void Read(Reader& in, const cubist_token_unpermute_args& from, TokenUnpermuteArgs& to) {
  ReadSlots(in, from, to);
  in(FIELD(permuted))(FIELD(probs))(FIELD(out));
  in(FIELD(bias))(FIELD(topk_ids))(FIELD(residual))(FIELD(residual2));
}

void Read(Reader& in, const cubist_token_permute_grad_args& from, TokenPermuteGradArgs& to) {
  ReadSlots(in, from, to);
  in(FIELD(permuted_grad))(FIELD(permuted_probs_grad))(FIELD(tokens_grad))(FIELD(probs_grad));
}

void Read(Reader& in, const cubist_token_unpermute_grad_args& from, TokenUnpermuteGradArgs& to) {
  ReadSlots(in, from, to);
  in(FIELD(out_grad))(FIELD(permuted))(FIELD(probs))(FIELD(permuted_grad))(FIELD(probs_grad));
  in(FIELD(bias))(FIELD(topk_ids));
}

void Read(Reader& in, const cubist_reorder_chunks_args& from, ReorderChunksArgs& to) {
  in(FIELD(tokens))(FIELD(chunk_counts))(FIELD(probs))(FIELD(inverse));
  in(FIELD(out))(FIELD(out_probs))(FIELD(row_ids))(FIELD(expert_counts));
}

void ReadWeighting(const cubist_route_weighting& from, RouteWeighting& to) {
  if (from.forward != nullptr) {
    to.forward = [from](std::span<const std::int32_t> ids, std::span<const float> scores,
                        std::span<float> weights) {
      from.forward(from.context, ids.size(), ids.data(), scores.data(), weights.data());
    };
  }
  if (from.backward != nullptr) {
    to.backward = [from](std::span<const std::int32_t> ids, std::span<const float> scores,
                         std::span<const float> d_weights, std::span<float> d_scores) {
      from.backward(from.context, ids.size(), ids.data(), scores.data(), d_weights.data(), d_scores.data());
    };
  }
}

void ReadOptions(Reader& in, const cubist_route_options* given, RouteOptions& to) {
  if (given == nullptr) return;
  const cubist_route_options defaults = CUBIST_ROUTE_OPTIONS;
  const cubist_route_options from = Complete(in.function(), given, defaults, "options");
  in("options.score", from.score, to.score, CUBIST_SCORE_SQRT_SOFTPLUS);
  in("options.bad_logits", from.bad_logits, to.bad_logits, CUBIST_BAD_LOGITS_MEAN);
  in(FIELD(renormalise))(FIELD(eps))(FIELD(scale))(FIELD(groups))(FIELD(top_groups))(FIELD(group_top));
  in(FIELD(temperature))(FIELD(dropout))(FIELD(expert_dropout))(FIELD(seed))(FIELD(limit));
  in(FIELD(aux_coefficient));
  ReadWeighting(from.weighting, to.weighting);
}

void Read(Reader& in, const cubist_route_args& from, RouteArgs& to) {
  ReadOptions(in, from.options, to.options);
  in(FIELD(logits))(FIELD(bias))(FIELD(weights))(FIELD(ids))(FIELD(scores))(FIELD(counts));
  in(FIELD(aux_loss))(FIELD(bad))(FIELD(valid));
}

void Read(Reader& in, const cubist_route_grad_args& from, RouteGradArgs& to) {
  ReadOptions(in, from.options, to.options);
  in(FIELD(d_weights))(FIELD(ids))(FIELD(scores))(FIELD(counts))(FIELD(d_aux_loss))(FIELD(d_logits));
  in(FIELD(valid));
}

void Read(Reader& in, const cubist_rms_norm_args& from, RmsNormArgs& to) {
  in(FIELD(x))(FIELD(residual))(FIELD(gamma))(FIELD(eps))(FIELD(out))(FIELD(sum))(FIELD(rstd));
}

void Read(Reader& in, const cubist_rms_norm_grad_args& from, RmsNormGradArgs& to) {
  in(FIELD(d_out))(FIELD(x))(FIELD(rstd))(FIELD(gamma))(FIELD(d_sum))(FIELD(d_x))(FIELD(d_gamma));
}

void Read(Reader& in, const cubist_swiglu_args& from, SwiGluArgs& to) {
  in(FIELD(gate))(FIELD(up))(FIELD(probs))(FIELD(out));
}

void Read(Reader& in, const cubist_swiglu_grad_args& from, SwiGluGradArgs& to) {
  in(FIELD(d_out))(FIELD(gate))(FIELD(up))(FIELD(probs))(FIELD(d_gate))(FIELD(d_up))(FIELD(d_probs));
}

// The weights of a block, or their gradients: what has one name in both.
template <class From, class To>
void ReadMoeWeights(Reader& in, const From& from, To& to) {
  in(FIELD(norm))(FIELD(router))(FIELD(gate_up))(FIELD(down))(FIELD(shared_gate_up))(FIELD(shared_down));
  in(FIELD(post_norm));
}

template <class From, class To>
void ReadMlaWeights(Reader& in, const From& from, To& to) {
  in(FIELD(norm))(FIELD(q_down))(FIELD(q_norm))(FIELD(q_up))(FIELD(kv_down))(FIELD(kv_norm))(FIELD(kv_up));
  in("out_weight", from.out_weight, to.out)(FIELD(post_norm));
}

void Read(Reader& in, const cubist_moe_block_args& from, MoeBlockArgs& to) {
  ReadMoeWeights(in, from, to.weights);
  in("router_bias", from.router_bias, to.weights.router_bias);
  ReadOptions(in, from.route, to.route);
  in(FIELD(x))(FIELD(top_k))(FIELD(eps))(FIELD(out))(FIELD(aux_loss))(FIELD(weighs_activation));
  in(FIELD(valid));
}

void Read(Reader& in, const cubist_mla_block_args& from, MlaBlockArgs& to) {
  ReadMlaWeights(in, from, to.weights);
  ReadLengths(in, from.lengths, to.lengths);
  ReadRope(in, from.rope, to.rope);
  in(FIELD(x))(FIELD(heads))(FIELD(batch))(FIELD(scale))(FIELD(causal), CUBIST_CAUSAL_BOTTOM_RIGHT);
  in(FIELD(eps))(FIELD(out));
}

void Read(Reader& in, const cubist_moe_block_grad_args& from, MoeBlockGradArgs& to) {
  const cubist_moe_block_args defaults = CUBIST_MOE_BLOCK_ARGS;
  Read(in, Complete("moe_block_grad", from.forward, defaults, "forward"), to.forward);
  in(FIELD(d_out))(FIELD(d_aux_loss))(FIELD(d_x));
  ReadMoeWeights(in, from, to.gradients);
}

void Read(Reader& in, const cubist_mla_block_grad_args& from, MlaBlockGradArgs& to) {
  const cubist_mla_block_args defaults = CUBIST_MLA_BLOCK_ARGS;
  Read(in, Complete("mla_block_grad", from.forward, defaults, "forward"), to.forward);
  in(FIELD(d_out))(FIELD(d_x));
  ReadMlaWeights(in, from, to.gradients);
}

// call(device, args, profile) with what was read of the completed arguments.
template <class To, class From, class Call>
cubist_status WithArgs(const char* name, const cubist_device* device, const From* args, From defaults,
                       cubist_profile* profile, Call call) noexcept {
  return Guarded([&]() -> Status {
    const From from = Complete(name, args, defaults);
    Reader reader(name);
    const Device& on = reader.NotNull("device", device).device;
    To to;
    Read(reader, from, to);
    return call(on, to, profile == nullptr ? nullptr : &profile->profile);
  });
}

template <class From, class To>
cubist_status Kernel(const char* name, Status (*kernel)(const Device&, const To&, Profile*),
                     const cubist_device* device, const From* args, From defaults,
                     cubist_profile* profile) noexcept {
  return WithArgs<To>(name, device, args, defaults, profile, kernel);
}

// Of the memory that a call needs.
template <class From, class To>
cubist_status Workspace(const char* name, Status (*workspace)(const Device&, const To&, std::int64_t*),
                        const cubist_device* device, const From* args, From defaults,
                        std::int64_t* bytes) noexcept {
  return WithArgs<To>(name, device, args, defaults, nullptr,
                      [&](const Device& on, const To& to, Profile*) -> Status {
                        if (bytes == nullptr) throw Reader(name).Error("bytes", "is null");
                        return workspace(on, to, bytes);
                      });
}

// A block, whose kernels' profiles become one.
template <class From, class To>
cubist_status Block(const char* name, Status (*block)(const Device&, const To&, BlockState*, BlockProfile*),
                    const cubist_device* device, const From* args, From defaults, cubist_block_state* state,
                    cubist_profile* profile) noexcept {
  return WithArgs<To>(
      name, device, args, defaults, profile, [&](const Device& on, const To& to, Profile* total) -> Status {
        if (state == nullptr) throw Reader(name).Error("state", "is null");
        BlockProfile each;
        CUBIST_RETURN_IF_ERROR(block(on, to, &state->state, total == nullptr ? nullptr : &each));
        if (total == nullptr) return {};
        *total = {};
        for (const auto& [step, profile_of_step] : each.kernels) total->Append(profile_of_step);
        total->kernel = name;
        return {};
      });
}

}  // namespace
}  // namespace cubist::c

// cubist_NAME(device, args, profile) is FUNCTION, of arguments that start as DEFAULTS.
#define KERNEL(name, function, defaults)                                                     \
  cubist_status cubist_##name(const cubist_device* device, const cubist_##name##_args* args, \
                              cubist_profile* profile) {                                     \
    return cubist::c::Kernel(#name, &cubist::function, device, args, defaults, profile);     \
  }
#define WORKSPACE(name, function, defaults)                                                               \
  cubist_status cubist_##name##_workspace(const cubist_device* device, const cubist_##name##_args* args,  \
                                          std::int64_t* bytes) {                                          \
    return cubist::c::Workspace(#name "_workspace", &cubist::function##Workspace, device, args, defaults, \
                                bytes);                                                                   \
  }
#define BLOCK(name, function, defaults)                                                        \
  cubist_status cubist_##name(const cubist_device* device, const cubist_##name##_args* args,   \
                              cubist_block_state* state, cubist_profile* profile) {            \
    return cubist::c::Block(#name, &cubist::function, device, args, defaults, state, profile); \
  }

KERNEL(matmul, Matmul, CUBIST_MATMUL_ARGS)
KERNEL(grouped_matmul, GroupedMatmul, CUBIST_GROUPED_MATMUL_ARGS)
KERNEL(grouped_matmul_grad, GroupedMatmulGrad, CUBIST_GROUPED_MATMUL_GRAD_ARGS)
KERNEL(flash_attention, FlashAttention, CUBIST_FLASH_ATTENTION_ARGS)
WORKSPACE(flash_attention, FlashAttention, CUBIST_FLASH_ATTENTION_ARGS)
KERNEL(flash_attention_grad, FlashAttentionGrad, CUBIST_FLASH_ATTENTION_GRAD_ARGS)
WORKSPACE(flash_attention_grad, FlashAttentionGrad, CUBIST_FLASH_ATTENTION_GRAD_ARGS)
KERNEL(token_permute, TokenPermute, CUBIST_TOKEN_PERMUTE_ARGS)
KERNEL(token_unpermute, TokenUnpermute, CUBIST_TOKEN_UNPERMUTE_ARGS)
KERNEL(token_permute_grad, TokenPermuteGrad, CUBIST_TOKEN_PERMUTE_GRAD_ARGS)
KERNEL(token_unpermute_grad, TokenUnpermuteGrad, CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS)
KERNEL(reorder_chunks, ReorderChunks, CUBIST_REORDER_CHUNKS_ARGS)
KERNEL(route, Route, CUBIST_ROUTE_ARGS)
KERNEL(route_grad, RouteGrad, CUBIST_ROUTE_GRAD_ARGS)
KERNEL(rms_norm, RmsNorm, CUBIST_RMS_NORM_ARGS)
KERNEL(rms_norm_grad, RmsNormGrad, CUBIST_RMS_NORM_GRAD_ARGS)
KERNEL(swiglu, SwiGlu, CUBIST_SWIGLU_ARGS)
KERNEL(swiglu_grad, SwiGluGrad, CUBIST_SWIGLU_GRAD_ARGS)
BLOCK(moe_block, MoeBlock, CUBIST_MOE_BLOCK_ARGS)
BLOCK(moe_block_grad, MoeBlockGrad, CUBIST_MOE_BLOCK_GRAD_ARGS)
BLOCK(mla_block, MlaBlock, CUBIST_MLA_BLOCK_ARGS)
BLOCK(mla_block_grad, MlaBlockGrad, CUBIST_MLA_BLOCK_GRAD_ARGS)
