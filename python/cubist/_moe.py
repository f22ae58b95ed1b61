"""The kernels of a Mixture-of-Experts layer: router, permutation of tokens, and the whole block."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from cubist._arrays import Array, Maker, Output, dtype_of, shape_of, size
from cubist._cubist import BlockState
from cubist._device import Call, Device, Profile, first, given, kernel


class Permuted(NamedTuple):
    permuted: Array
    sorted_indices: Array
    permuted_probs: Array | None = None
    expert_counts: Array | None = None
    expert_offsets: Array | None = None


def _rows_out(
    slots: int,
    experts: int,
    num_out_tokens: int,
    capacity: int,
    row_multiple: int,
    rows: Sequence[int] | None,
) -> int:
    if rows is not None:
        return max(rows[1] - rows[0], 0) if len(rows) == 2 else 0
    if capacity > 0:
        return experts * capacity
    room = slots + min(slots, experts) * (row_multiple - 1)
    if num_out_tokens < 0:
        return max(room + num_out_tokens, 0)
    return min(num_out_tokens, room) if num_out_tokens > 0 else room


@kernel
def token_permute(
    tokens: Array,
    topk_ids: Array,
    num_experts: int,
    *,
    probs: Array | None = None,
    num_out_tokens: int = 0,
    capacity: int = 0,
    row_multiple: int = 1,
    rows: Sequence[int] | None = None,
    permuted: Array | None = None,
    sorted_indices: Array | None = None,
    permuted_probs: Output = None,
    expert_counts: Output = None,
    expert_offsets: Output = None,
    device: Device | None = None,
) -> Permuted | Profile:
    """Tokens to rows sorted by expert: slot t * K + j, token t's j-th route, goes to row sorted_indices[t * K + j].

    tokens          (T, H): fp32, bf16 or fp16
    topk_ids        (T, K) or (T), int32 or int64, in [0, num_experts), or -1 for no expert
    probs           (T, K), any float dtype: permuted_probs (M) goes with it, of the same dtype where it is made
    num_out_tokens  room for so many rows, 0 for all; negative: so many fewer than all
    capacity        rows of every expert (drop and pad); 0 for none
    row_multiple    rows of every expert are padded to a multiple of it
    rows            (begin, end): only these rows of the global order arrive (expert parallelism)
    permuted        (M, H), the dtype of tokens;   sorted_indices   (T * K), int32
    expert_counts   (num_experts), int32, if True;   expert_offsets   (num_experts + 1), int32, if True
    """
    slots = size(topk_ids, 0) * (size(topk_ids, 1) if len(shape_of(topk_ids)) == 2 else 1)
    m = max(_rows_out(slots, num_experts, num_out_tokens, capacity, row_multiple, rows), 0)
    call = Call("token_permute", device, tokens)
    call.output("permuted", permuted, (m, size(tokens, 1)), dtype_of(tokens))
    call.output("sorted_indices", sorted_indices, (slots,), "int32")
    wants_probs = True if probs is not None and permuted_probs is None else permuted_probs
    call.optional("permuted_probs", wants_probs, (m,), dtype_of(probs))
    call.optional("expert_counts", expert_counts, (max(num_experts, 0),), "int32")
    call.optional("expert_offsets", expert_offsets, (max(num_experts, 0) + 1,), "int32")
    result = call(
        tokens=tokens,
        topk_ids=topk_ids,
        num_experts=num_experts,
        probs=probs,
        num_out_tokens=num_out_tokens,
        capacity=capacity,
        row_multiple=row_multiple,
        rows=rows,
    )
    return Permuted(*result) if isinstance(result, tuple) else result


@kernel
def token_unpermute(
    permuted: Array,
    sorted_indices: Array,
    probs: Array | None = None,
    *,
    top_k: int | None = None,
    rows: Sequence[int] | None = None,
    out: Array | None = None,
    device: Device | None = None,
) -> Array | Profile:
    """out[t] = sum over j of probs(t, j) permuted[sorted_indices[t * K + j]], in fp32, rounded once.

    permuted        (M, H): fp32, bf16 or fp16
    sorted_indices  (T * K), int32, as `token_permute` gave them; -1 or >= M adds nothing
    probs           (T, K), any float dtype; absent means weight 1, and K is top_k
    rows            as for `token_permute`
    out             (T, H), the dtype of permuted
    """
    k = size(probs, 1) if probs is not None else (1 if top_k is None else top_k)
    tokens = size(probs, 0) if probs is not None else size(sorted_indices, 0) // max(k, 1)
    call = Call("token_unpermute", device, permuted)
    call.output("out", out, (tokens, size(permuted, 1)), dtype_of(permuted))
    return first(call(permuted=permuted, sorted_indices=sorted_indices, probs=probs, top_k=top_k, rows=rows))


@kernel
def token_permute_grad(
    permuted_grad: Array,
    sorted_indices: Array,
    top_k: int,
    *,
    permuted_probs_grad: Array | None = None,
    rows: Sequence[int] | None = None,
    tokens_grad: Array | None = None,
    probs_grad: Output = None,
    device: Device | None = None,
) -> Any:
    """Gradients of `token_permute`: tokens_grad, or (tokens_grad, probs_grad) with permuted_probs_grad.

    permuted_grad  (M, H);   permuted_probs_grad  (M), any float dtype
    tokens_grad    (T, H), the dtype of permuted_grad;   probs_grad  (T, top_k)
    """
    tokens = size(sorted_indices, 0) // max(top_k, 1)
    call = Call("token_permute_grad", device, permuted_grad)
    call.output("tokens_grad", tokens_grad, (tokens, size(permuted_grad, 1)), dtype_of(permuted_grad))
    wants_probs = True if permuted_probs_grad is not None and probs_grad is None else probs_grad
    call.optional("probs_grad", wants_probs, (tokens, max(top_k, 0)), dtype_of(permuted_probs_grad))
    return given(
        call(
            permuted_grad=permuted_grad,
            sorted_indices=sorted_indices,
            permuted_probs_grad=permuted_probs_grad,
            top_k=top_k,
            rows=rows,
        )
    )


@kernel
def token_unpermute_grad(
    out_grad: Array,
    sorted_indices: Array,
    *,
    permuted: Array | None = None,
    probs: Array | None = None,
    num_rows: int | None = None,
    top_k: int | None = None,
    rows: Sequence[int] | None = None,
    permuted_grad: Array | None = None,
    probs_grad: Output = None,
    device: Device | None = None,
) -> Any:
    """Gradients of `token_unpermute`: permuted_grad, or (permuted_grad, probs_grad) with permuted and probs.

    out_grad       (T, H): fp32, bf16 or fp16
    permuted       (M, H), for probs_grad;   probs   (T, K);   top_k   K where there are no probs
    permuted_grad  (M, H): M is that of permuted, or num_rows, or that of rows, or T * K
    probs_grad     (T, K)
    """
    if permuted is not None:
        m = size(permuted, 0)
    elif num_rows is not None:
        m = num_rows
    else:
        m = rows[1] - rows[0] if rows is not None and len(rows) == 2 else size(sorted_indices, 0)
    call = Call("token_unpermute_grad", device, out_grad)
    call.output("permuted_grad", permuted_grad, (max(m, 0), size(out_grad, 1)), dtype_of(out_grad))
    wants_probs = True if permuted is not None and probs is not None and probs_grad is None else probs_grad
    call.optional("probs_grad", wants_probs, shape_of(probs), dtype_of(probs))
    return given(
        call(
            out_grad=out_grad,
            permuted=permuted,
            sorted_indices=sorted_indices,
            probs=probs,
            top_k=top_k,
            rows=rows,
        )
    )


class Routes(NamedTuple):
    weights: Array
    ids: Array
    scores: Array | None = None
    counts: Array | None = None
    aux_loss: Array | None = None
    bad: Array | None = None


@kernel
def route(
    logits: Array,
    top_k: int,
    *,
    bias: Array | None = None,
    score: str = "softmax",
    renormalise: bool = False,
    eps: float = 1e-20,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    temperature: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    bad_logits: str = "error",
    limit: float | None = None,
    aux_coefficient: float = 0.0,
    weights: Array | None = None,
    ids: Array | None = None,
    scores: Output = None,
    counts: Output = None,
    aux_loss: Output = None,
    bad: Output = None,
    device: Device | None = None,
) -> Routes | Profile:
    """The top_k experts of each token by score(logits) + bias, and their scores as weights.

    logits       (T, E): fp32, bf16 or fp16;   bias   (E), selects and does not weigh
    score        "softmax", "sigmoid" or "sqrt_softplus";   renormalise divides weights by their sum + eps, scale follows
    groups, top_groups, group_top   experts are `groups` parts, of which the top_groups best (by the sum of their
                 group_top highest scores) are selected from
    temperature  Gumbel-softmax sampling where > 0;   dropout   share of routes dropped;   seed   of both
    bad_logits   what becomes of NaN or |logit| > limit: "error", "zero" or "mean"
    weights      (T, K), fp32 where they are made;   ids   (T, K), int32, -1 where dropped
    scores       (T, E), fp32;   counts   (E), int32;   aux_loss   (1), fp32, with counts;   bad   (T), fp32; each if True
    """
    tokens, experts = size(logits, 0), size(logits, 1)
    chosen = (tokens, max(top_k, 0))
    call = (
        Call("route", device, logits)
        .output("weights", weights, chosen, "fp32")
        .output("ids", ids, chosen, "int32")
    )
    call.optional("scores", scores, (tokens, experts), "fp32").optional("counts", counts, (experts,), "int32")
    call.optional("aux_loss", aux_loss, (1,), "fp32").optional("bad", bad, (tokens,), "fp32")
    result = call(
        logits=logits,
        bias=bias,
        score=score,
        renormalise=renormalise,
        route_eps=eps,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        group_top=group_top,
        temperature=temperature,
        dropout=dropout,
        seed=seed,
        bad_logits=bad_logits,
        limit=limit,
        aux_coefficient=aux_coefficient,
    )
    return Routes(*result) if isinstance(result, tuple) else result


@kernel
def route_grad(
    d_weights: Array,
    ids: Array,
    scores: Array,
    *,
    counts: Array | None = None,
    d_aux_loss: float = 0.0,
    d_logits: Array | None = None,
    device: Device | None = None,
    eps: float | None = None,
    **options: Any,
) -> Array | Profile:
    """The gradient of `route` with respect to the logits, (T, E), fp32 where it is made.

    d_weights (T, K);  ids, scores, and counts where d_aux_loss is not 0, of the forward call;  options: as it had them
    """
    call = Call("route_grad", device, d_weights).output("d_logits", d_logits, shape_of(scores), "fp32")
    return first(
        call(
            d_weights=d_weights,
            ids=ids,
            scores=scores,
            counts=counts,
            d_aux_loss=d_aux_loss,
            route_eps=eps,
            **options,
        )
    )


class MoeBlock(NamedTuple):
    out: Array
    aux_loss: Array | None = None


@kernel
def moe_block(
    x: Array,
    weights: dict[str, Array],
    top_k: int,
    *,
    route: dict[str, Any] = {},
    eps: float = 1e-6,
    state: BlockState | None = None,
    out: Array | None = None,
    aux_loss: Output = None,
    device: Device | None = None,
) -> MoeBlock | Profile:
    """out = x + y, with y the weighted sum of what each token's top_k experts (and the shared one) make of RmsNorm(x).

    x, out    (T, H), the dtype of the weights: fp32, bf16 or fp16
    weights   norm (H), router (H, E), gate_up (E, H, 2 F) with the gate in front, down (E, F, H); where there is one:
              router_bias (E), shared_gate_up (H, 2 S), shared_down (S, H), post_norm (H)
    route     options of `route`: score, renormalise, scale, groups, ..
    state     what the backward pass needs; give it the same one. One per call in flight.
    aux_loss  (1), fp32, if True

    On a chip the device needs with_data=True; the profile has a list of kernels.
    """
    call = Call("moe_block", device, x, state if state is not None else BlockState())
    call.output("out", out, shape_of(x), dtype_of(x)).optional("aux_loss", aux_loss, (1,), "fp32")
    result = call(x=x, top_k=top_k, eps=eps, **weights, **_route_options(route))
    return MoeBlock(*result) if isinstance(result, tuple) else result


@kernel
def moe_block_grad(
    x: Array,
    weights: dict[str, Array],
    top_k: int,
    d_out: Array,
    state: BlockState,
    *,
    route: dict[str, Any] = {},
    eps: float = 1e-6,
    aux_loss: Array | None = None,
    d_aux_loss: float = 0.0,
    d_x: Array | None = None,
    gradients: dict[str, Output] | None = None,
    device: Device | None = None,
) -> tuple[Array, dict[str, Array]] | Profile:
    """Gradients of sum(d_out * out) + d_aux_loss * aux_loss, after `moe_block` with the same arguments and state.

    d_out, d_x   (T, H)
    aux_loss     what the forward call gave, with d_aux_loss
    gradients    those wanted, by the names of the weights: True, or an array to write; all of them where it is not given
                 (none of router_bias). Made in the weights' dtype.

    Gives (d_x, {name: gradient}).
    """
    if gradients is None:
        gradients = {name: True for name in weights if name != "router_bias"}
    call = Call("moe_block_grad", device, x, state).output("d_x", d_x, shape_of(x), dtype_of(x))
    for name, wanted in gradients.items():
        call.optional(f"d_{name}", wanted, shape_of(weights.get(name)), dtype_of(weights.get(name)))
    result = call(
        x=x,
        top_k=top_k,
        eps=eps,
        d_out=d_out,
        out=Maker(x).empty(shape_of(x), dtype_of(x)),
        aux_loss=aux_loss,
        d_aux_loss=d_aux_loss,
        **weights,
        **_route_options(route),
    )
    return (result[0], dict(zip(gradients, result[1:]))) if isinstance(result, tuple) else result


def _route_options(options: dict[str, Any]) -> dict[str, Any]:
    """The block's own eps is its norms'."""
    return {("route_eps" if name == "eps" else name): value for name, value in options.items()}
