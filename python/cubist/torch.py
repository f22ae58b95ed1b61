"""Cubist's kernels as functions of PyTorch, with gradients, on the CPU.

Tensors go in and come out without copies. Every function takes a `device`, as made by `cubist.host`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

import cubist
from cubist import Device

Tensor = torch.Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_rope, k_rope, bias, sinks, options, device):
        inputs = [_plain(t) for t in (q, k, v)]
        options |= {"q_rope": _plain(q_rope), "k_rope": _plain(k_rope)}
        options |= {"bias": _plain(bias), "sinks": _plain(sinks)}
        out, lse = cubist.flash_attention(*inputs, lse=True, device=device, **options)
        ctx.save_for_backward(q, k, v, q_rope, k_rope, bias, sinks, out, lse)
        ctx.options, ctx.device = options, device
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _):
        q, k, v, q_rope, k_rope, bias, sinks, out, lse = (_plain(t) for t in ctx.saved_tensors)
        wanted = {
            name: None if not wants else torch.empty_like(of, memory_format=torch.contiguous_format)
            for name, of, wants in zip(("dbias", "dsinks"), (bias, sinks), ctx.needs_input_grad[5:7])
        }
        gradients = cubist.flash_attention_grad(
            q, k, v, out, lse, d_out.to(q.dtype), device=ctx.device, **wanted, **ctx.options
        )
        dq, dk, dv, *rest = gradients
        dq_rope, dk_rope = rest[:2] if q_rope is not None else (None, None)
        return dq, dk, dv, dq_rope, dk_rope, wanted["dbias"], wanted["dsinks"], None, None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    device: Device | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cubist.flash_attention` with gradients in q, k, v, the rope parts, bias and sinks.

    q (B, Nq, Sq, Dqk), k (B, Nkv, Skv, Dqk), v (B, Nkv, Skv, Dv), as torch's scaled_dot_product_attention takes them;
    grouped heads need no repetition. Note that causal=True has the last query see the last key ("bottom_right"), where
    is_causal of PyTorch is "top_left"; the two agree where Sq = Skv. lse has no gradient.

    q_rope    (B, Nq, Sq, Dr), with k_rope (B, Nkv or 1, Skv, Dr)
    bias      (B, Nq, Sq, Skv), sizes of 1 serve all;   sinks   (Nq), fp32
    return_lse   for (out, lse), lse (B, Nq, Sq) in fp32; else out (B, Nq, Sq, Dv) alone
    options   of `cubist.flash_attention`: scale, causal, window, prefix, q_ends, kv_ends, rope, soft_cap, mask, alibi,
              dropout
    """
    out, lse = _Attention.apply(q, k, v, q_rope, k_rope, bias, sinks, options, device)
    return (out, lse) if return_lse else out


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, weights, group_list, transpose_weights, device):
        ctx.save_for_backward(x, groups, weights)
        ctx.options = {"group_list": group_list, "transpose_weights": transpose_weights, "device": device}
        return cubist.grouped_matmul(x.detach(), groups, weights.detach(), **ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, groups, weights = (_plain(t) for t in ctx.saved_tensors)
        wants_x, _, wants_weights = ctx.needs_input_grad[:3]
        gradients = cubist.grouped_matmul_grad(
            d_out, groups, weights if wants_x else None, x if wants_weights else None, **ctx.options
        )
        dx, dw = gradients if wants_x and wants_weights else (gradients, gradients)
        return dx if wants_x else None, None, dw if wants_weights else None, None, None, None


def grouped_matmul(
    x: Tensor,
    groups: Tensor,
    weights: Tensor,
    *,
    group_list: str = "counts",
    transpose_weights: bool = False,
    device: Device | None = None,
) -> Tensor:
    """`cubist.grouped_matmul` with gradients in x (M, K) and weights (E, K, N), or (E, N, K) transposed.

    groups (E), int32 or int64, by group_list "counts" or "ends", stays where it is: nothing waits for a count. With
    transpose_weights the weights are (E, N, K). Gives (M, N).
    """
    return _GroupedMatmul.apply(x, groups, weights, group_list, transpose_weights, device)


class _TokenPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, topk_ids, probs, num_experts, options, device):
        result = cubist.token_permute(
            tokens.detach(),
            topk_ids,
            num_experts,
            probs=_plain(probs),
            expert_counts=True,
            row_tokens=options.get("pad_with_tokens", False),
            device=device,
            **options,
        )
        ctx.save_for_backward(result.sorted_indices, result.row_tokens)
        # Without routes (K = 0) no slot tells how many tokens there are.
        ctx.slots = {"rows": options.get("rows"), "num_tokens": tokens.shape[0]}
        if result.row_tokens is not None:  # Rows of padding have no slot.
            ctx.slots |= {"capacity": options["capacity"], "num_experts": result.expert_counts.shape[0]}
        elif topk_ids is None:
            ctx.slots |= {"routing_map": options["routing_map"], "top_k": options.get("top_k") or 0}
        else:
            ctx.slots["top_k"] = topk_ids.shape[1] if topk_ids.dim() == 2 else 1
        ctx.device = device
        indices = (result.sorted_indices, result.expert_counts, result.row_tokens)
        ctx.mark_non_differentiable(*(x for x in indices if x is not None))
        return result.permuted, result.permuted_probs, *indices

    @staticmethod
    @once_differentiable
    def backward(ctx, d_permuted, d_probs, *_):
        sorted_indices, row_tokens = ctx.saved_tensors
        gradients = cubist.token_permute_grad(
            d_permuted,
            sorted_indices if row_tokens is None else None,
            row_tokens=row_tokens,
            permuted_probs_grad=d_probs,
            device=ctx.device,
            **ctx.slots,
        )
        d_tokens, d_probs = gradients if d_probs is not None else (gradients, None)
        return d_tokens, None, d_probs, None, None, None


def token_permute(
    tokens: Tensor,
    topk_ids: Tensor | None = None,
    num_experts: int | None = None,
    *,
    probs: Tensor | None = None,
    device: Device | None = None,
    **options: Any,
) -> cubist.Permuted:
    """`cubist.token_permute` with gradients in tokens (T, H) and probs (T, K), or (T, num_experts) with a routing map.

    topk_ids (T, K) or (T), int32 or int64. Gives permuted (M, H), sorted_indices (T * K), permuted_probs (M) and
    expert_counts (num_experts), which are what `grouped_matmul` takes; with pad_with_tokens row_tokens (M) too, which
    are what `token_unpermute` takes then.

    options   of `cubist.token_permute`: routing_map with top_k, valid, expert_places, capacity, capacity_keeps,
              pad_with_tokens, row_multiple, num_out_tokens, rows
    """
    permuted, permuted_probs, sorted_indices, counts, row_tokens = _TokenPermute.apply(
        tokens, topk_ids, probs, num_experts, options, device
    )
    return cubist.Permuted(permuted, sorted_indices, permuted_probs, counts, row_tokens=row_tokens)


class _TokenUnpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, permuted, sorted_indices, probs, bias, residual, residual2, options, device):
        ctx.save_for_backward(permuted, sorted_indices, probs, bias)
        ctx.options, ctx.device = options, device
        added = {"bias": _plain(bias), "residual": _plain(residual), "residual2": _plain(residual2)}
        return cubist.token_unpermute(
            permuted.detach(), sorted_indices, _plain(probs), device=device, **added, **options
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        permuted, sorted_indices, probs, bias = (_plain(t) for t in ctx.saved_tensors)
        wants_probs, wants_bias, *wants_residuals = ctx.needs_input_grad[2:6]
        options = dict(ctx.options)
        options.pop("num_tokens", None)
        topk_ids = options.pop("topk_ids", None)
        if wants_probs:
            options |= {"permuted": permuted, "bias": bias, "topk_ids": topk_ids}
        gradients = cubist.token_unpermute_grad(
            d_out, sorted_indices, probs=probs, num_rows=permuted.shape[0], device=ctx.device, **options
        )
        d_permuted, d_probs = gradients if wants_probs else (gradients, None)
        d_bias = None
        if wants_bias:
            d_bias = _bias_gradient(bias, d_permuted, sorted_indices, topk_ids, ctx.options.get("rows"))
        d_residuals = (d_out if wants else None for wants in wants_residuals)
        return d_permuted, None, d_probs, d_bias, *d_residuals, None, None


def _bias_gradient(
    bias: Tensor, d_permuted: Tensor, sorted_indices: Tensor, topk_ids: Tensor, rows: tuple[int, int] | None
) -> Tensor:
    """(E, H): the sum of each expert's rows of d_permuted (M, H), in fp32."""
    places = sorted_indices.long() - (rows[0] if rows is not None else 0)
    here = (places >= 0) & (places < d_permuted.shape[0])
    sums = torch.zeros(bias.shape, dtype=torch.float32)
    sums.index_add_(0, topk_ids.reshape(-1)[here].long(), d_permuted[places[here]].float())
    return sums.to(bias.dtype)


def token_unpermute(
    permuted: Tensor,
    sorted_indices: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual2: Tensor | None = None,
    device: Device | None = None,
    **options: Any,
) -> Tensor:
    """`cubist.token_unpermute` with gradients in permuted, probs, bias and both residuals; gives out (T, H).

    permuted        (M, H): fp32, bf16 or fp16
    sorted_indices  (T * K), int32, as `token_permute` gave them
    probs           (T, K), or (T, E) with a routing map
    bias            (E, H), with topk_ids (T, K)
    residual, residual2   (T, H)
    options         of `cubist.token_unpermute`: routing_map (T, E), top_k, topk_ids (T, K), rows; row_tokens (M) with
                    capacity in place of sorted_indices, and num_tokens
    """
    return _TokenUnpermute.apply(
        permuted, sorted_indices, probs, bias, residual, residual2, options, device
    )


class _ReorderChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, chunk_counts, probs, inverse, device):
        result = cubist.reorder_chunks(
            tokens.detach(), chunk_counts, probs=_plain(probs), inverse=inverse, device=device
        )
        ctx.save_for_backward(chunk_counts)
        ctx.inverse, ctx.device = inverse, device
        return result.out, result.out_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_probs):
        (chunk_counts,) = ctx.saved_tensors
        back = cubist.reorder_chunks(
            d_out.contiguous(), chunk_counts, probs=d_probs, inverse=not ctx.inverse, device=ctx.device
        )
        return back.out, None, back.out_probs, None, None


def reorder_chunks(
    tokens: Tensor,
    chunk_counts: Tensor,
    *,
    probs: Tensor | None = None,
    inverse: bool = False,
    device: Device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`cubist.reorder_chunks` with gradients in tokens (A, H) and probs (A); gives (out (A, H), out_probs (A)).

    chunk_counts (N, E), int32 or int64: rows from rank n for expert e. With inverse, from the order of experts to ranks.
    """
    return _ReorderChunks.apply(tokens, chunk_counts, probs, inverse, device)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, probs, device):
        ctx.save_for_backward(gate, up, probs)
        ctx.device = device
        return cubist.swiglu(gate.detach(), up.detach(), probs=_plain(probs), device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        gate, up, probs = (_plain(t) for t in ctx.saved_tensors)
        d_probs = None if probs is None else torch.empty_like(probs)
        gradients = cubist.swiglu_grad(d_out, gate, up, probs=probs, d_probs=d_probs, device=ctx.device)
        return gradients.d_gate, gradients.d_up, gradients.d_probs, None


def swiglu(gate: Tensor, up: Tensor, *, probs: Tensor | None = None, device: Device | None = None) -> Tensor:
    """`cubist.swiglu`: silu(gate) * up * probs, with gradients in all three. gate, up (M, N), probs (M); gives (M, N)."""
    return _SwiGlu.apply(gate, up, probs, device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, eps, device):
        out, rstd = cubist.rms_norm(x.detach(), _plain(gamma), eps=eps, rstd=True, device=device)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.device = device
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, gamma, rstd = (_plain(t) for t in ctx.saved_tensors)
        d_gamma = None if gamma is None else torch.empty_like(gamma)
        gradients = cubist.rms_norm_grad(d_out, x, rstd, gamma, d_gamma=d_gamma, device=ctx.device)
        d_x, d_gamma = gradients if gamma is not None else (gradients, None)
        return d_x, d_gamma, None, None


def rms_norm(
    x: Tensor, gamma: Tensor | None = None, *, eps: float = 1e-6, device: Device | None = None
) -> Tensor:
    """`cubist.rms_norm` of x (T, H), by 1 / sqrt(mean square + eps), with gradients in x and gamma (H); gives (T, H)."""
    return _RmsNorm.apply(x, gamma, eps, device)


def _plain(tensor: Tensor | None) -> Tensor | None:
    """The same memory, as DLPack lets it through."""
    return None if tensor is None else tensor.detach()


__all__ = [
    "flash_attention",
    "grouped_matmul",
    "reorder_chunks",
    "rms_norm",
    "swiglu",
    "token_permute",
    "token_unpermute",
]
