#include "src/kernels.h"

#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/loss_scale.h"
#include "kernels/matmul.h"
#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/pack_operand.h"
#include "kernels/reorder_chunks.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "src/arguments.h"
#include "src/device.h"

namespace cubist::python {
namespace {

// Read(in, args): the fields of a kernel's arguments, by name. A new field is a word here.

// activation(alpha x + bias + beta residual), of any product.
template <class Args>
void ReadEpilogue(Arguments& in, Args& a) {
  in("bias", a.bias)("alpha", a.alpha)("beta", a.beta)("residual", a.residual);
  in("activation", a.activation,
     {{"none", Activation::kNone},
      {"relu", Activation::kRelu},
      {"silu", Activation::kSilu},
      {"gelu", Activation::kGelu},
      {"gelu_tanh", Activation::kGeluTanh}});
}

void Read(Arguments& in, MatmulArgs& a) {
  ReadEpilogue(in, a);
  in("a", a.a)("b", a.b)("c", a.c)("transpose_a", a.transpose_a)("transpose_b", a.transpose_b);
  in("packed_a", a.packed_a)("packed_b", a.packed_b)("accumulate", a.accumulate)("any_order", a.any_order);
}

// What the grouped product and its gradients are given alike.
template <class Args>
void ReadGroups(Arguments& in, Args& a) {
  in("groups", a.groups)("group_list", a.group_list,
                         {{"counts", GroupList::kCounts}, {"ends", GroupList::kEnds}});
  in("weights", a.weights)("weight_list", a.weight_list)("packed_weights", a.packed_weights);
  in("transpose_weights", a.transpose_weights);
}

void Read(Arguments& in, GroupedMatmulArgs& a) {
  ReadGroups(in, a);
  ReadEpilogue(in, a);
  in("x", a.x)("out", a.out);
}

void Read(Arguments& in, GroupedMatmulGradArgs& a) {
  ReadGroups(in, a);
  in("dy", a.dy)("dx", a.dx)("x", a.x)("dw", a.dw)("dw_list", a.dw_list)("accumulate_dw", a.accumulate_dw);
}

void ReadCausal(Arguments& in, const char* name, Causal& causal) {
  in(name, causal,
     {{"none", Causal::kNone}, {"top_left", Causal::kTopLeft}, {"bottom_right", Causal::kBottomRight}});
}

void ReadLengths(Arguments& in, AttentionLengths& lengths) {
  in("q_ends", lengths.q_ends)("kv_ends", lengths.kv_ends);
}

void ReadRope(Arguments& in, AttentionRope& rope) {
  in("rope_q_positions", rope.q_positions)("rope_k_positions", rope.k_positions);
  in("rope_cos", rope.cos)("rope_sin", rope.sin)("rope_q_offset", rope.q_offset)("rope_k_offset",
                                                                                 rope.k_offset);
  in("rope_layout", rope.layout,
     {{"half", RopeLayout::kHalf},
      {"interleaved", RopeLayout::kInterleaved},
      {"interleaved_to_half", RopeLayout::kInterleavedToHalf}});
}

// What both passes of attention are given; out and lse are outputs of the one and inputs of the other.
template <class Args>
void ReadAttention(Arguments& in, Args& a) {
  in("q", a.q)("k", a.k)("v", a.v)("q_rope", a.q_rope)("k_rope", a.k_rope)("out", a.out)("lse", a.lse);
  in("scale", a.scale)("prefix", a.prefix)("workspace", a.workspace);
  ReadCausal(in, "causal", a.causal);
  AttentionWindow window;
  in("window_left", window.left)("window_right", window.right);
  ReadCausal(in, "window_anchor", window.anchor);
  if (window.left || window.right) a.window = window;
  ReadLengths(in, a.lengths);
  ReadRope(in, a.rope);
  in("bias", a.bias)("sinks", a.sinks)("soft_cap", a.soft_cap)("mask", a.mask);
  in("alibi_slopes", a.alibi.slopes)("alibi_offset", a.alibi.offset)("alibi_root", a.alibi.root);
  in("dropout_keep", a.dropout.keep)("dropout_seed", a.dropout.seed)("dropout_offset", a.dropout.offset);
}

void Read(Arguments& in, FlashAttentionArgs& a) { ReadAttention(in, a); }

void Read(Arguments& in, FlashAttentionGradArgs& a) {
  ReadAttention(in, a);
  in("dout", a.dout)("dq", a.dq)("dk", a.dk)("dv", a.dv)("dq_rope", a.dq_rope)("dk_rope", a.dk_rope);
  in("dbias", a.dbias)("dsinks", a.dsinks);
}

void Read(Arguments& in, TokenPermuteArgs& a) {
  in("tokens", a.tokens)("topk_ids", a.topk_ids)("routing_map", a.routing_map)("valid", a.valid);
  in("probs", a.probs)("expert_places", a.expert_places)("top_k", a.top_k)("num_experts", a.num_experts);
  in("num_out_tokens", a.num_out_tokens)("row_multiple", a.row_multiple)("rows", a.rows);
  in("capacity", a.capacity)("pad_with_tokens", a.pad_with_tokens);
  in("capacity_keeps", a.capacity_keeps,
     {{"first", CapacityKeeps::kFirst}, {"highest", CapacityKeeps::kHighest}});
  in("permuted", a.permuted)("sorted_indices", a.sorted_indices)("permuted_probs", a.permuted_probs);
  in("expert_counts", a.expert_counts)("expert_offsets", a.expert_offsets)("row_tokens", a.row_tokens);
  in("device_counts", a.device_counts)("node_counts", a.node_counts);
}

// What says where the rows of tokens are.
template <class Args>
void ReadSlots(Arguments& in, Args& a) {
  in("sorted_indices", a.sorted_indices)("row_tokens", a.row_tokens)("capacity", a.capacity);
  in("routing_map", a.routing_map)("top_k", a.top_k)("rows", a.rows);
}

void Read(Arguments& in, TokenUnpermuteArgs& a) {
  ReadSlots(in, a);
  in("permuted", a.permuted)("probs", a.probs)("out", a.out);
  in("bias", a.bias)("topk_ids", a.topk_ids)("residual", a.residual)("residual2", a.residual2);
}

void Read(Arguments& in, TokenPermuteGradArgs& a) {
  ReadSlots(in, a);
  in("permuted_grad", a.permuted_grad)("permuted_probs_grad", a.permuted_probs_grad);
  in("tokens_grad", a.tokens_grad)("probs_grad", a.probs_grad);
}

void Read(Arguments& in, TokenUnpermuteGradArgs& a) {
  ReadSlots(in, a);
  in("out_grad", a.out_grad)("permuted", a.permuted)("probs", a.probs);
  in("bias", a.bias)("topk_ids", a.topk_ids);
  in("permuted_grad", a.permuted_grad)("probs_grad", a.probs_grad);
}

void Read(Arguments& in, ReorderChunksArgs& a) {
  in("tokens", a.tokens)("chunk_counts", a.chunk_counts)("probs", a.probs)("inverse", a.inverse);
  in("out", a.out)("out_probs", a.out_probs)("row_ids", a.row_ids)("expert_counts", a.expert_counts);
}

void ReadOptions(Arguments& in, RouteOptions& o) {
  in("score", o.score,
     {{"softmax", ScoreFunction::kSoftmax},
      {"sigmoid", ScoreFunction::kSigmoid},
      {"sqrt_softplus", ScoreFunction::kSqrtSoftplus}});
  in("renormalise", o.renormalise)("route_eps", o.eps)("scale", o.scale)("groups", o.groups);
  in("top_groups", o.top_groups)("group_top", o.group_top)("temperature", o.temperature);
  in("dropout", o.dropout)("expert_dropout", o.expert_dropout)("seed", o.seed)("limit", o.limit);
  in("aux_coefficient", o.aux_coefficient)("weighting", o.weighting);
  in("bad_logits", o.bad_logits,
     {{"error", BadLogits::kError}, {"zero", BadLogits::kZero}, {"mean", BadLogits::kMean}});
}

void Read(Arguments& in, RouteArgs& a) {
  ReadOptions(in, a.options);
  in("logits", a.logits)("bias", a.bias)("weights", a.weights)("ids", a.ids)("scores", a.scores);
  in("counts", a.counts)("aux_loss", a.aux_loss)("bad", a.bad)("valid", a.valid);
}

void Read(Arguments& in, RouteGradArgs& a) {
  ReadOptions(in, a.options);
  in("d_weights", a.d_weights)("ids", a.ids)("scores", a.scores)("counts", a.counts);
  in("d_aux_loss", a.d_aux_loss)("d_logits", a.d_logits)("valid", a.valid);
}

void Read(Arguments& in, RmsNormArgs& a) {
  in("x", a.x)("residual", a.residual)("gamma", a.gamma)("eps", a.eps)("out", a.out)("sum", a.sum)("rstd",
                                                                                                   a.rstd);
}

void Read(Arguments& in, RmsNormGradArgs& a) {
  in("d_out", a.d_out)("x", a.x)("rstd", a.rstd)("gamma", a.gamma)("d_sum", a.d_sum)("d_x", a.d_x);
  in("d_gamma", a.d_gamma);
}

void Read(Arguments& in, SwiGluArgs& a) { in("gate", a.gate)("up", a.up)("probs", a.probs)("out", a.out); }

void Read(Arguments& in, SwiGluGradArgs& a) {
  in("d_out", a.d_out)("gate", a.gate)("up", a.up)("probs", a.probs)("d_gate", a.d_gate)("d_up", a.d_up);
  in("d_probs", a.d_probs);
}

void Read(Arguments& in, MoeBlockArgs& a) {
  ReadOptions(in, a.route);
  MoeBlockWeights& w = a.weights;
  in("x", a.x)("norm", w.norm)("router", w.router)("router_bias", w.router_bias)("gate_up", w.gate_up);
  in("down", w.down)("shared_gate_up", w.shared_gate_up)("shared_down", w.shared_down);
  in("post_norm", w.post_norm)("top_k", a.top_k)("eps", a.eps)("out", a.out)("aux_loss", a.aux_loss);
  in("weighs_activation", a.weighs_activation)("valid", a.valid);
}

void Read(Arguments& in, MoeBlockGradArgs& a) {
  Read(in, a.forward);
  MoeBlockGradients& g = a.gradients;
  in("d_out", a.d_out)("d_aux_loss", a.d_aux_loss)("d_x", a.d_x)("d_norm", g.norm)("d_router", g.router);
  in("d_gate_up", g.gate_up)("d_down", g.down)("d_shared_gate_up", g.shared_gate_up);
  in("d_shared_down", g.shared_down)("d_post_norm", g.post_norm);
}

// The weight `out` goes by the name out_projection: out is the result.
void Read(Arguments& in, MlaBlockArgs& a) {
  MlaBlockWeights& w = a.weights;
  in("x", a.x)("norm", w.norm)("q_down", w.q_down)("q_norm", w.q_norm)("q_up", w.q_up)("kv_down", w.kv_down);
  in("kv_norm", w.kv_norm)("kv_up", w.kv_up)("out_projection", w.out)("post_norm", w.post_norm);
  in("heads", a.heads)("batch", a.batch)("scale", a.scale)("eps", a.eps)("out", a.out);
  ReadCausal(in, "causal", a.causal);
  ReadLengths(in, a.lengths);
  ReadRope(in, a.rope);
}

void Read(Arguments& in, MlaBlockGradArgs& a) {
  Read(in, a.forward);
  MlaBlockGradients& g = a.gradients;
  in("d_out", a.d_out)("d_x", a.d_x)("d_norm", g.norm)("d_q_down", g.q_down)("d_q_norm", g.q_norm);
  in("d_q_up", g.q_up)("d_kv_down", g.kv_down)("d_kv_norm", g.kv_norm)("d_kv_up", g.kv_up);
  in("d_out_projection", g.out)("d_post_norm", g.post_norm);
}

// Arguments of one call, from Python's values.
template <class Args>
struct Given {
  Given(const char* name, const nb::dict& values) : in(name, values) {
    Read(in, args);
    in.Finish();
  }
  // What the call gave, unless a function of the caller's failed during it.
  nb::object Done(nb::object result) const {
    in.RethrowFailure();
    return result;
  }
  Arguments in;  // Keeps what args point to.
  Args args{};
};

// Names of the fields that a kernel takes, into the module's dictionary of them.
template <class Args>
void DefineFields(nb::module_& module, const char* name) {
  Args args{};
  Arguments in(name, nb::dict());
  Read(in, args);
  if (!nb::hasattr(module, "fields")) module.attr("fields") = nb::dict();
  nb::cast<nb::dict>(module.attr("fields"))[name] = nb::cast(in.taken());
}

template <class Args>
void Define(nb::module_& module, const char* name, Status (*kernel)(const Device&, const Args&, Profile*)) {
  DefineFields<Args>(module, name);
  module.def(
      name,
      [name, kernel](const PythonDevice& device, const nb::dict& values) {
        const Given<Args> given(name, values);
        return given.Done(
            device.Run([&](const Device& d, Profile* profile) { return kernel(d, given.args, profile); }));
      },
      nb::arg("device"), nb::arg("values"));
}

template <class Args>
void DefineBlock(nb::module_& module, const char* name,
                 Status (*kernel)(const Device&, const Args&, BlockState*, BlockProfile*)) {
  DefineFields<Args>(module, name);
  module.def(
      name,
      [name, kernel](const PythonDevice& device, BlockState& state, const nb::dict& values) {
        const Given<Args> given(name, values);
        return given.Done(device.Run<BlockProfile>(
            [&](const Device& d, BlockProfile* profile) { return kernel(d, given.args, &state, profile); }));
      },
      nb::arg("device"), nb::arg("state"), nb::arg("values"));
}

// The bytes that a call works in, which its workspace must have.
template <class Args>
void DefineWorkspace(nb::module_& module, const char* name,
                     Status (*workspace)(const Device&, const Args&, std::int64_t*)) {
  module.def(
      name,
      [name, workspace](const PythonDevice& device, const nb::dict& values) {
        const Given<Args> given(name, values);
        std::int64_t bytes = 0;
        Raise(workspace(device.device, given.args, &bytes));
        return bytes;
      },
      nb::arg("device"), nb::arg("values"));
}

Packed PackArray(const PythonDevice& device, const nb::dict& values) {
  PackOperandArgs args;
  Arguments in("pack_operand", values);
  in("source", args.source)("transpose", args.transpose)("side", args.side,
                                                         {{"a", Side::kA}, {"b", Side::kB}});
  in.Finish();
  const ConstTensor& s = args.source;
  if (s.rank != 2 && s.rank != 3) {
    throw nb::value_error(("pack_operand: source has " + std::to_string(s.rank) +
                           " dimensions, needs (rows, cols) or (matrices, rows, cols)")
                              .c_str());
  }
  std::int64_t rows = s.size(s.rank - 2), cols = s.size(s.rank - 1);
  if (args.transpose) std::swap(rows, cols);
  args.bytes = PackedOperandBytes(device.device, args.side, s.dtype, rows, cols, s.rank == 3 ? s.size(0) : 1);
  Packed packed;
  packed.memory = AlignedMemory(static_cast<std::size_t>(args.bytes));
  args.data = packed.memory.get();
  device.Run(
      [&](const Device& d, Profile* profile) { return PackOperand(d, args, &packed.operand, profile); });
  return packed;
}

bool Unscale(LossScaler& scaler, const nb::object& gradients) {
  std::span<const Tensor> tensors;
  nb::dict values;
  values["gradients"] = gradients;
  Arguments in("loss_scale", values);
  in("gradients", tensors);
  bool apply = false;
  const Status status = [&] {
    nb::gil_scoped_release unlocked;
    return scaler.Unscale(tensors, &apply);
  }();
  Raise(status);
  return apply;
}

}  // namespace

void DefineKernels(nb::module_& module) {
  Define(module, "matmul", &Matmul);
  Define(module, "grouped_matmul", &GroupedMatmul);
  Define(module, "grouped_matmul_grad", &GroupedMatmulGrad);
  Define(module, "flash_attention", &FlashAttention);
  Define(module, "flash_attention_grad", &FlashAttentionGrad);
  DefineWorkspace(module, "flash_attention_workspace", &FlashAttentionWorkspace);
  DefineWorkspace(module, "flash_attention_grad_workspace", &FlashAttentionGradWorkspace);
  Define(module, "token_permute", &TokenPermute);
  Define(module, "token_unpermute", &TokenUnpermute);
  Define(module, "token_permute_grad", &TokenPermuteGrad);
  Define(module, "token_unpermute_grad", &TokenUnpermuteGrad);
  Define(module, "reorder_chunks", &ReorderChunks);
  Define(module, "route", &Route);
  Define(module, "route_grad", &RouteGrad);
  Define(module, "rms_norm", &RmsNorm);
  Define(module, "rms_norm_grad", &RmsNormGrad);
  Define(module, "swiglu", &SwiGlu);
  Define(module, "swiglu_grad", &SwiGluGrad);

  nb::class_<BlockState>(module, "BlockState",
                         "What a block's forward pass keeps for its backward one. One per call in flight.")
      .def(nb::init<>());
  DefineBlock(module, "mla_block", &MlaBlock);
  DefineBlock(module, "mla_block_grad", &MlaBlockGrad);
  DefineBlock(module, "moe_block", &MoeBlock);
  DefineBlock(module, "moe_block_grad", &MoeBlockGrad);

  nb::class_<Packed>(module, "Packed", "An operand in the layout in which a device multiplies it.")
      .def_prop_ro(
          "shape",
          [](const Packed& p) { return nb::make_tuple(p.operand.matrices, p.operand.rows, p.operand.cols); })
      .def_prop_ro("dtype", [](const Packed& p) { return NameOf(p.operand.dtype); })
      .def_prop_ro("side", [](const Packed& p) { return p.operand.side == Side::kA ? "a" : "b"; })
      .def_prop_ro("nbytes", [](const Packed& p) { return p.operand.bytes; });
  module.def("pack", &PackArray, nb::arg("device"), nb::arg("values"));

  nb::class_<LossScaler>(
      module, "LossScaler",
      "The scale that a loss is multiplied by, so that its fp16 gradients neither vanish nor "
      "overflow (Micikevicius et al., 2018).")
      .def(
          "__init__",
          [](LossScaler* self, float initial, float growth, float backoff, std::int64_t growth_interval,
             float least, float most) {
            new (self) LossScaler({initial, growth, backoff, growth_interval, least, most});
          },
          nb::kw_only(), nb::arg("initial") = LossScaleOptions().initial,
          nb::arg("growth") = LossScaleOptions().growth, nb::arg("backoff") = LossScaleOptions().backoff,
          nb::arg("growth_interval") = LossScaleOptions().growth_interval,
          nb::arg("least") = LossScaleOptions().least, nb::arg("most") = LossScaleOptions().most)
      .def_prop_ro("scale", &LossScaler::scale)
      .def_prop_ro("clean_steps", &LossScaler::clean_steps)
      .def("unscale", &Unscale, nb::arg("gradients"),
           "Divides every gradient by the scale, in place. False, and nothing changed, where any is not "
           "finite: the scale has backed off and the step is to be left out.");
}

}  // namespace cubist::python
