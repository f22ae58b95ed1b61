// The kernels in C. A field of a kernel's arguments is a line here and one in c.h.
#include "cubist/c/support.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace cubist::c {
namespace {

// call(device, from, reader, profile) with the completed arguments.
template <class Args, class Call>
cubist_status Kernel(const char* name, const cubist_device* device, const Args* args, Args defaults,
                     cubist_profile* profile, Call call) noexcept {
  return Guarded([&]() -> Status {
    const Args from = Complete(name, args, defaults);
    Reader reader(name);
    return call(reader.NotNull("device", device).device, from, reader,
                profile == nullptr ? nullptr : &profile->profile);
  });
}

// The same for a block, whose kernels' profiles become one.
template <class Args, class Call>
cubist_status Block(const char* name, const cubist_device* device, const Args* args, Args defaults,
                    cubist_block_state* state, cubist_profile* profile, Call call) noexcept {
  return Kernel(name, device, args, defaults, profile,
                [&](const Device& on, const Args& from, Reader& reader, Profile* total) -> Status {
                  BlockProfile each;
                  BlockState& kept = const_cast<BlockState&>(reader.NotNull("state", state).state);
                  CUBIST_RETURN_IF_ERROR(call(on, from, reader, &kept, total == nullptr ? nullptr : &each));
                  if (total == nullptr) return {};
                  *total = {};
                  for (const auto& [step, profile_of_step] : each.kernels) total->Append(profile_of_step);
                  total->kernel = name;
                  return {};
                });
}

std::optional<AttentionWindow> WindowOf(const Reader& reader, const cubist_window* from) {
  if (from == nullptr) return {};
  AttentionWindow to;
  if (from->left != CUBIST_UNBOUNDED) to.left = from->left;
  if (from->right != CUBIST_UNBOUNDED) to.right = from->right;
  to.anchor = reader.Enum<Causal>("window.anchor", from->anchor, CUBIST_CAUSAL_BOTTOM_RIGHT);
  return to;
}

AttentionLengths LengthsOf(const Reader& reader, const cubist_lengths& from) {
  return {reader.Numbers("lengths.q_ends", from.q_ends, from.count),
          reader.Numbers("lengths.kv_ends", from.kv_ends, from.count)};
}

AttentionRope RopeOf(const Reader& reader, const cubist_rope& from) {
  AttentionRope to;
  to.cos = reader.Input("rope.cos", from.cos);
  to.sin = reader.Input("rope.sin", from.sin);
  to.layout = reader.Enum<RopeLayout>("rope.layout", from.layout, CUBIST_ROPE_INTERLEAVED_TO_HALF);
  to.q_offset = from.q_offset;
  to.k_offset = from.k_offset;
  to.q_positions = reader.Input("rope.q_positions", from.q_positions);
  to.k_positions = reader.Input("rope.k_positions", from.k_positions);
  return to;
}

FlashAttentionArgs FlashAttentionArgsOf(const Reader& reader, const cubist_flash_attention_args& from) {
  FlashAttentionArgs to;
  to.q = reader.Input("q", from.q);
  to.k = reader.Input("k", from.k);
  to.v = reader.Input("v", from.v);
  to.q_rope = reader.Input("q_rope", from.q_rope);
  to.k_rope = reader.Input("k_rope", from.k_rope);
  to.out = reader.Output("out", from.out);
  to.lse = reader.Output("lse", from.lse);
  to.scale = Reader::Optional(from.scale);
  to.causal = reader.Enum<Causal>("causal", from.causal, CUBIST_CAUSAL_BOTTOM_RIGHT);
  to.window = WindowOf(reader, from.window);
  to.prefix = reader.Numbers("prefix", from.prefix, from.prefix_count);
  to.lengths = LengthsOf(reader, from.lengths);
  to.rope = RopeOf(reader, from.rope);
  to.bias = reader.Input("bias", from.bias);
  to.sinks = reader.Input("sinks", from.sinks);
  to.soft_cap = Reader::Optional(from.soft_cap);
  to.mask = reader.Input("mask", from.mask);
  to.alibi = {reader.Input("alibi.slopes", from.alibi.slopes), Reader::Optional(from.alibi.offset),
              from.alibi.root};
  to.dropout = {from.dropout.keep, from.dropout.seed, from.dropout.offset};
  to.workspace = {from.workspace.data, from.workspace.bytes};
  return to;
}

FlashAttentionGradArgs FlashAttentionGradArgsOf(const Reader& reader,
                                                const cubist_flash_attention_grad_args& from) {
  FlashAttentionGradArgs to;
  to.q = reader.Input("q", from.q);
  to.k = reader.Input("k", from.k);
  to.v = reader.Input("v", from.v);
  to.q_rope = reader.Input("q_rope", from.q_rope);
  to.k_rope = reader.Input("k_rope", from.k_rope);
  to.out = reader.Input("out", from.out);
  to.lse = reader.Input("lse", from.lse);
  to.dout = reader.Input("dout", from.dout);
  to.dq = reader.Output("dq", from.dq);
  to.dk = reader.Output("dk", from.dk);
  to.dv = reader.Output("dv", from.dv);
  to.dq_rope = reader.Output("dq_rope", from.dq_rope);
  to.dk_rope = reader.Output("dk_rope", from.dk_rope);
  to.scale = Reader::Optional(from.scale);
  to.causal = reader.Enum<Causal>("causal", from.causal, CUBIST_CAUSAL_BOTTOM_RIGHT);
  to.window = WindowOf(reader, from.window);
  to.prefix = reader.Numbers("prefix", from.prefix, from.prefix_count);
  to.lengths = LengthsOf(reader, from.lengths);
  to.rope = RopeOf(reader, from.rope);
  to.bias = reader.Input("bias", from.bias);
  to.sinks = reader.Input("sinks", from.sinks);
  to.mask = reader.Input("mask", from.mask);
  to.alibi = {reader.Input("alibi.slopes", from.alibi.slopes), Reader::Optional(from.alibi.offset),
              from.alibi.root};
  to.dropout = {from.dropout.keep, from.dropout.seed, from.dropout.offset};
  to.soft_cap = Reader::Optional(from.soft_cap);
  to.dbias = reader.Output("dbias", from.dbias);
  to.dsinks = reader.Output("dsinks", from.dsinks);
  to.workspace = {from.workspace.data, from.workspace.bytes};
  return to;
}

RouteOptions RouteOptionsOf(const Reader& reader, const cubist_route_options& from) {
  RouteOptions to;
  to.score = reader.Enum<ScoreFunction>("options.score", from.score, CUBIST_SCORE_SQRT_SOFTPLUS);
  to.renormalise = from.renormalise;
  to.eps = from.eps;
  to.scale = from.scale;
  to.groups = from.groups;
  to.top_groups = from.top_groups;
  to.group_top = from.group_top;
  to.temperature = from.temperature;
  to.dropout = from.dropout;
  to.expert_dropout = from.expert_dropout;
  to.seed = from.seed;
  to.bad_logits = reader.Enum<BadLogits>("options.bad_logits", from.bad_logits, CUBIST_BAD_LOGITS_MEAN);
  to.limit = from.limit;
  to.aux_coefficient = from.aux_coefficient;
  return to;
}

MoeBlockArgs MoeBlockArgsOf(const Reader& reader, const cubist_moe_block_args& from) {
  MoeBlockArgs to;
  to.x = reader.Input("x", from.x);
  to.weights.norm = reader.Input("norm", from.norm);
  to.weights.router = reader.Input("router", from.router);
  to.weights.router_bias = reader.Input("router_bias", from.router_bias);
  to.weights.gate_up = reader.Input("gate_up", from.gate_up);
  to.weights.down = reader.Input("down", from.down);
  to.weights.shared_gate_up = reader.Input("shared_gate_up", from.shared_gate_up);
  to.weights.shared_down = reader.Input("shared_down", from.shared_down);
  to.weights.post_norm = reader.Input("post_norm", from.post_norm);
  to.route = RouteOptionsOf(reader, from.route);
  to.top_k = from.top_k;
  to.eps = from.eps;
  to.out = reader.Output("out", from.out);
  to.aux_loss = reader.Output("aux_loss", from.aux_loss);
  return to;
}

}  // namespace
}  // namespace cubist::c

using namespace cubist;
using c::Reader;

cubist_status cubist_matmul(const cubist_device* device, const cubist_matmul_args* args,
                            cubist_profile* profile) {
  return c::Kernel("matmul", device, args, cubist_matmul_args CUBIST_MATMUL_ARGS, profile,
                   [](const Device& on, const cubist_matmul_args& from, Reader& reader, Profile* p) {
                     MatmulArgs to;
                     to.a = reader.Input("a", from.a);
                     to.b = reader.Input("b", from.b);
                     to.bias = reader.Input("bias", from.bias);
                     to.c = reader.Output("c", from.c);
                     to.transpose_a = from.transpose_a;
                     to.transpose_b = from.transpose_b;
                     to.accumulate = from.accumulate;
                     to.any_order = from.any_order;
                     to.packed_a = Reader::Packed(from.packed_a);
                     to.packed_b = Reader::Packed(from.packed_b);
                     to.alpha = from.alpha;
                     to.beta = from.beta;
                     to.residual = reader.Input("residual", from.residual);
                     to.activation =
                         reader.Enum<Activation>("activation", from.activation, CUBIST_ACTIVATION_GELU_TANH);
                     return Matmul(on, to, p);
                   });
}

cubist_status cubist_grouped_matmul(const cubist_device* device, const cubist_grouped_matmul_args* args,
                                    cubist_profile* profile) {
  return c::Kernel(
      "grouped_matmul", device, args, cubist_grouped_matmul_args CUBIST_GROUPED_MATMUL_ARGS, profile,
      [](const Device& on, const cubist_grouped_matmul_args& from, Reader& reader, Profile* p) {
        GroupedMatmulArgs to;
        to.x = reader.Input("x", from.x);
        to.groups = reader.Input("groups", from.groups);
        to.group_list = reader.Enum<GroupList>("group_list", from.group_list, CUBIST_GROUP_ENDS);
        to.weights = reader.Input("weights", from.weights);
        to.weight_list = reader.Inputs("weight_list", from.weight_list, from.weight_count);
        to.packed_weights = Reader::Packed(from.packed_weights);
        to.bias = reader.Input("bias", from.bias);
        to.out = reader.Output("out", from.out);
        to.transpose_weights = from.transpose_weights;
        to.alpha = from.alpha;
        to.beta = from.beta;
        to.residual = reader.Input("residual", from.residual);
        to.activation = reader.Enum<Activation>("activation", from.activation, CUBIST_ACTIVATION_GELU_TANH);
        return GroupedMatmul(on, to, p);
      });
}

cubist_status cubist_grouped_matmul_grad(const cubist_device* device,
                                         const cubist_grouped_matmul_grad_args* args,
                                         cubist_profile* profile) {
  return c::Kernel(
      "grouped_matmul_grad", device, args, cubist_grouped_matmul_grad_args CUBIST_GROUPED_MATMUL_GRAD_ARGS,
      profile, [](const Device& on, const cubist_grouped_matmul_grad_args& from, Reader& reader, Profile* p) {
        GroupedMatmulGradArgs to;
        to.dy = reader.Input("dy", from.dy);
        to.groups = reader.Input("groups", from.groups);
        to.group_list = reader.Enum<GroupList>("group_list", from.group_list, CUBIST_GROUP_ENDS);
        to.weights = reader.Input("weights", from.weights);
        to.weight_list = reader.Inputs("weight_list", from.weight_list, from.weight_count);
        to.packed_weights = Reader::Packed(from.packed_weights);
        to.dx = reader.Output("dx", from.dx);
        to.x = reader.Input("x", from.x);
        to.dw = reader.Output("dw", from.dw);
        to.dw_list = reader.Outputs("dw_list", from.dw_list, from.dw_count);
        to.accumulate_dw = from.accumulate_dw;
        to.transpose_weights = from.transpose_weights;
        return GroupedMatmulGrad(on, to, p);
      });
}

cubist_status cubist_flash_attention(const cubist_device* device, const cubist_flash_attention_args* args,
                                     cubist_profile* profile) {
  return c::Kernel("flash_attention", device, args, cubist_flash_attention_args CUBIST_FLASH_ATTENTION_ARGS,
                   profile,
                   [](const Device& on, const cubist_flash_attention_args& from, Reader& reader, Profile* p) {
                     return FlashAttention(on, c::FlashAttentionArgsOf(reader, from), p);
                   });
}

cubist_status cubist_flash_attention_workspace(const cubist_device* device,
                                               const cubist_flash_attention_args* args, std::int64_t* bytes) {
  return c::Kernel("flash_attention_workspace", device, args,
                   cubist_flash_attention_args CUBIST_FLASH_ATTENTION_ARGS, nullptr,
                   [&](const Device& on, const cubist_flash_attention_args& from, Reader& reader, Profile*) {
                     reader.NotNull("bytes", bytes);
                     return FlashAttentionWorkspace(on, c::FlashAttentionArgsOf(reader, from), bytes);
                   });
}

cubist_status cubist_flash_attention_grad(const cubist_device* device,
                                          const cubist_flash_attention_grad_args* args,
                                          cubist_profile* profile) {
  return c::Kernel(
      "flash_attention_grad", device, args, cubist_flash_attention_grad_args CUBIST_FLASH_ATTENTION_GRAD_ARGS,
      profile,
      [](const Device& on, const cubist_flash_attention_grad_args& from, Reader& reader, Profile* p) {
        return FlashAttentionGrad(on, c::FlashAttentionGradArgsOf(reader, from), p);
      });
}

cubist_status cubist_flash_attention_grad_workspace(const cubist_device* device,
                                                    const cubist_flash_attention_grad_args* args,
                                                    std::int64_t* bytes) {
  return c::Kernel(
      "flash_attention_grad_workspace", device, args,
      cubist_flash_attention_grad_args CUBIST_FLASH_ATTENTION_GRAD_ARGS, nullptr,
      [&](const Device& on, const cubist_flash_attention_grad_args& from, Reader& reader, Profile*) {
        reader.NotNull("bytes", bytes);
        return FlashAttentionGradWorkspace(on, c::FlashAttentionGradArgsOf(reader, from), bytes);
      });
}

cubist_status cubist_token_permute(const cubist_device* device, const cubist_token_permute_args* args,
                                   cubist_profile* profile) {
  return c::Kernel("token_permute", device, args, cubist_token_permute_args CUBIST_TOKEN_PERMUTE_ARGS,
                   profile,
                   [](const Device& on, const cubist_token_permute_args& from, Reader& reader, Profile* p) {
                     TokenPermuteArgs to;
                     to.tokens = reader.Input("tokens", from.tokens);
                     to.topk_ids = reader.Input("topk_ids", from.topk_ids);
                     to.probs = reader.Input("probs", from.probs);
                     to.num_experts = from.num_experts;
                     to.num_out_tokens = from.num_out_tokens;
                     to.capacity = from.capacity;
                     to.row_multiple = from.row_multiple;
                     to.rows = Reader::Rows(from.rows);
                     to.permuted = reader.Output("permuted", from.permuted);
                     to.sorted_indices = reader.Output("sorted_indices", from.sorted_indices);
                     to.permuted_probs = reader.Output("permuted_probs", from.permuted_probs);
                     to.expert_counts = reader.Output("expert_counts", from.expert_counts);
                     to.expert_offsets = reader.Output("expert_offsets", from.expert_offsets);
                     return TokenPermute(on, to, p);
                   });
}

cubist_status cubist_token_unpermute(const cubist_device* device, const cubist_token_unpermute_args* args,
                                     cubist_profile* profile) {
  return c::Kernel("token_unpermute", device, args, cubist_token_unpermute_args CUBIST_TOKEN_UNPERMUTE_ARGS,
                   profile,
                   [](const Device& on, const cubist_token_unpermute_args& from, Reader& reader, Profile* p) {
                     TokenUnpermuteArgs to;
                     to.permuted = reader.Input("permuted", from.permuted);
                     to.sorted_indices = reader.Input("sorted_indices", from.sorted_indices);
                     to.probs = reader.Input("probs", from.probs);
                     to.top_k = from.top_k;
                     to.rows = Reader::Rows(from.rows);
                     to.out = reader.Output("out", from.out);
                     return TokenUnpermute(on, to, p);
                   });
}

cubist_status cubist_token_permute_grad(const cubist_device* device,
                                        const cubist_token_permute_grad_args* args, cubist_profile* profile) {
  return c::Kernel(
      "token_permute_grad", device, args, cubist_token_permute_grad_args CUBIST_TOKEN_PERMUTE_GRAD_ARGS,
      profile, [](const Device& on, const cubist_token_permute_grad_args& from, Reader& reader, Profile* p) {
        TokenPermuteGradArgs to;
        to.permuted_grad = reader.Input("permuted_grad", from.permuted_grad);
        to.sorted_indices = reader.Input("sorted_indices", from.sorted_indices);
        to.permuted_probs_grad = reader.Input("permuted_probs_grad", from.permuted_probs_grad);
        to.top_k = from.top_k;
        to.rows = Reader::Rows(from.rows);
        to.tokens_grad = reader.Output("tokens_grad", from.tokens_grad);
        to.probs_grad = reader.Output("probs_grad", from.probs_grad);
        return TokenPermuteGrad(on, to, p);
      });
}

cubist_status cubist_token_unpermute_grad(const cubist_device* device,
                                          const cubist_token_unpermute_grad_args* args,
                                          cubist_profile* profile) {
  return c::Kernel(
      "token_unpermute_grad", device, args, cubist_token_unpermute_grad_args CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS,
      profile,
      [](const Device& on, const cubist_token_unpermute_grad_args& from, Reader& reader, Profile* p) {
        TokenUnpermuteGradArgs to;
        to.out_grad = reader.Input("out_grad", from.out_grad);
        to.permuted = reader.Input("permuted", from.permuted);
        to.sorted_indices = reader.Input("sorted_indices", from.sorted_indices);
        to.probs = reader.Input("probs", from.probs);
        to.top_k = from.top_k;
        to.rows = Reader::Rows(from.rows);
        to.permuted_grad = reader.Output("permuted_grad", from.permuted_grad);
        to.probs_grad = reader.Output("probs_grad", from.probs_grad);
        return TokenUnpermuteGrad(on, to, p);
      });
}

cubist_status cubist_route(const cubist_device* device, const cubist_route_args* args,
                           cubist_profile* profile) {
  return c::Kernel("route", device, args, cubist_route_args CUBIST_ROUTE_ARGS, profile,
                   [](const Device& on, const cubist_route_args& from, Reader& reader, Profile* p) {
                     RouteArgs to;
                     to.logits = reader.Input("logits", from.logits);
                     to.bias = reader.Input("bias", from.bias);
                     to.options = c::RouteOptionsOf(reader, from.options);
                     to.weights = reader.Output("weights", from.weights);
                     to.ids = reader.Output("ids", from.ids);
                     to.scores = reader.Output("scores", from.scores);
                     to.counts = reader.Output("counts", from.counts);
                     to.aux_loss = reader.Output("aux_loss", from.aux_loss);
                     to.bad = reader.Output("bad", from.bad);
                     return Route(on, to, p);
                   });
}

cubist_status cubist_route_grad(const cubist_device* device, const cubist_route_grad_args* args,
                                cubist_profile* profile) {
  return c::Kernel("route_grad", device, args, cubist_route_grad_args CUBIST_ROUTE_GRAD_ARGS, profile,
                   [](const Device& on, const cubist_route_grad_args& from, Reader& reader, Profile* p) {
                     RouteGradArgs to;
                     to.d_weights = reader.Input("d_weights", from.d_weights);
                     to.ids = reader.Input("ids", from.ids);
                     to.scores = reader.Input("scores", from.scores);
                     to.counts = reader.Input("counts", from.counts);
                     to.options = c::RouteOptionsOf(reader, from.options);
                     to.d_aux_loss = from.d_aux_loss;
                     to.d_logits = reader.Output("d_logits", from.d_logits);
                     return RouteGrad(on, to, p);
                   });
}

cubist_status cubist_rms_norm(const cubist_device* device, const cubist_rms_norm_args* args,
                              cubist_profile* profile) {
  return c::Kernel("rms_norm", device, args, cubist_rms_norm_args CUBIST_RMS_NORM_ARGS, profile,
                   [](const Device& on, const cubist_rms_norm_args& from, Reader& reader, Profile* p) {
                     RmsNormArgs to;
                     to.x = reader.Input("x", from.x);
                     to.residual = reader.Input("residual", from.residual);
                     to.gamma = reader.Input("gamma", from.gamma);
                     to.eps = from.eps;
                     to.out = reader.Output("out", from.out);
                     to.sum = reader.Output("sum", from.sum);
                     to.rstd = reader.Output("rstd", from.rstd);
                     return RmsNorm(on, to, p);
                   });
}

cubist_status cubist_rms_norm_grad(const cubist_device* device, const cubist_rms_norm_grad_args* args,
                                   cubist_profile* profile) {
  return c::Kernel("rms_norm_grad", device, args, cubist_rms_norm_grad_args CUBIST_RMS_NORM_GRAD_ARGS,
                   profile,
                   [](const Device& on, const cubist_rms_norm_grad_args& from, Reader& reader, Profile* p) {
                     RmsNormGradArgs to;
                     to.d_out = reader.Input("d_out", from.d_out);
                     to.x = reader.Input("x", from.x);
                     to.rstd = reader.Input("rstd", from.rstd);
                     to.gamma = reader.Input("gamma", from.gamma);
                     to.d_sum = reader.Input("d_sum", from.d_sum);
                     to.d_x = reader.Output("d_x", from.d_x);
                     to.d_gamma = reader.Output("d_gamma", from.d_gamma);
                     return RmsNormGrad(on, to, p);
                   });
}

cubist_status cubist_swiglu(const cubist_device* device, const cubist_swiglu_args* args,
                            cubist_profile* profile) {
  return c::Kernel("swiglu", device, args, cubist_swiglu_args CUBIST_SWIGLU_ARGS, profile,
                   [](const Device& on, const cubist_swiglu_args& from, Reader& reader, Profile* p) {
                     SwiGluArgs to;
                     to.gate = reader.Input("gate", from.gate);
                     to.up = reader.Input("up", from.up);
                     to.probs = reader.Input("probs", from.probs);
                     to.out = reader.Output("out", from.out);
                     return SwiGlu(on, to, p);
                   });
}

cubist_status cubist_swiglu_grad(const cubist_device* device, const cubist_swiglu_grad_args* args,
                                 cubist_profile* profile) {
  return c::Kernel("swiglu_grad", device, args, cubist_swiglu_grad_args CUBIST_SWIGLU_GRAD_ARGS, profile,
                   [](const Device& on, const cubist_swiglu_grad_args& from, Reader& reader, Profile* p) {
                     SwiGluGradArgs to;
                     to.d_out = reader.Input("d_out", from.d_out);
                     to.gate = reader.Input("gate", from.gate);
                     to.up = reader.Input("up", from.up);
                     to.probs = reader.Input("probs", from.probs);
                     to.d_gate = reader.Output("d_gate", from.d_gate);
                     to.d_up = reader.Output("d_up", from.d_up);
                     to.d_probs = reader.Output("d_probs", from.d_probs);
                     return SwiGluGrad(on, to, p);
                   });
}

cubist_status cubist_moe_block(const cubist_device* device, const cubist_moe_block_args* args,
                               cubist_block_state* state, cubist_profile* profile) {
  return c::Block("moe_block", device, args, cubist_moe_block_args CUBIST_MOE_BLOCK_ARGS, state, profile,
                  [](const Device& on, const cubist_moe_block_args& from, Reader& reader, BlockState* kept,
                     BlockProfile* p) { return MoeBlock(on, c::MoeBlockArgsOf(reader, from), kept, p); });
}

cubist_status cubist_moe_block_grad(const cubist_device* device, const cubist_moe_block_grad_args* args,
                                    cubist_block_state* state, cubist_profile* profile) {
  return c::Block(
      "moe_block_grad", device, args, cubist_moe_block_grad_args CUBIST_MOE_BLOCK_GRAD_ARGS, state, profile,
      [](const Device& on, const cubist_moe_block_grad_args& from, Reader& reader, BlockState* kept,
         BlockProfile* p) {
        MoeBlockGradArgs to;
        const cubist_moe_block_args defaults = CUBIST_MOE_BLOCK_ARGS;
        to.forward =
            c::MoeBlockArgsOf(reader, c::Complete("moe_block_grad: forward", from.forward, defaults));
        to.d_out = reader.Input("d_out", from.d_out);
        to.d_aux_loss = from.d_aux_loss;
        to.d_x = reader.Output("d_x", from.d_x);
        to.gradients.norm = reader.Output("norm", from.norm);
        to.gradients.router = reader.Output("router", from.router);
        to.gradients.gate_up = reader.Output("gate_up", from.gate_up);
        to.gradients.down = reader.Output("down", from.down);
        to.gradients.shared_gate_up = reader.Output("shared_gate_up", from.shared_gate_up);
        to.gradients.shared_down = reader.Output("shared_down", from.shared_down);
        to.gradients.post_norm = reader.Output("post_norm", from.post_norm);
        return MoeBlockGrad(on, to, kept, p);
      });
}

cubist_status cubist_mla_block(const cubist_device* device, const cubist_mla_block_args* args,
                               cubist_block_state* state, cubist_profile* profile) {
  return c::Block("mla_block", device, args, cubist_mla_block_args CUBIST_MLA_BLOCK_ARGS, state, profile,
                  [](const Device& on, const cubist_mla_block_args& from, Reader& reader, BlockState* kept,
                     BlockProfile* p) {
                    MlaBlockArgs to;
                    to.x = reader.Input("x", from.x);
                    to.weights.norm = reader.Input("norm", from.norm);
                    to.weights.q_down = reader.Input("q_down", from.q_down);
                    to.weights.q_norm = reader.Input("q_norm", from.q_norm);
                    to.weights.q_up = reader.Input("q_up", from.q_up);
                    to.weights.kv_down = reader.Input("kv_down", from.kv_down);
                    to.weights.kv_norm = reader.Input("kv_norm", from.kv_norm);
                    to.weights.kv_up = reader.Input("kv_up", from.kv_up);
                    to.weights.out = reader.Input("out_weight", from.out_weight);
                    to.weights.post_norm = reader.Input("post_norm", from.post_norm);
                    to.heads = from.heads;
                    to.batch = from.batch;
                    to.scale = Reader::Optional(from.scale);
                    to.causal = reader.Enum<Causal>("causal", from.causal, CUBIST_CAUSAL_BOTTOM_RIGHT);
                    to.lengths = c::LengthsOf(reader, from.lengths);
                    to.rope = c::RopeOf(reader, from.rope);
                    to.eps = from.eps;
                    to.out = reader.Output("out", from.out);
                    return MlaBlock(on, to, kept, p);
                  });
}
