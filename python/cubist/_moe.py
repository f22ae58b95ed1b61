"""The router of a Mixture-of-Experts layer, and the whole block."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from cubist._arrays import Array, Maker, Output, dtype_of, shape_of, size
from cubist._cubist import BlockState
from cubist._device import Call, Device, Profile, first, kernel

Weighting = Callable[..., Array]
"""weights of (ids, scores), or d_scores of (ids, scores, d_weights): a function of arrays of one token's routes."""


class Routes(NamedTuple):
    """What `route` gives: weights, ids (T, K), scores (T, E), counts (E), aux_loss (1), bad (T)."""

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
    valid: Array | None = None,
    score: str = "softmax",
    renormalise: bool = False,
    eps: float = 1e-20,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    temperature: float = 0.0,
    dropout: float = 0.0,
    expert_dropout: float = 0.0,
    seed: int = 0,
    bad_logits: str = "error",
    limit: float | None = None,
    aux_coefficient: float = 0.0,
    weighting: Weighting | tuple[Weighting, Weighting] | None = None,
    weights: Array | None = None,
    ids: Array | None = None,
    scores: Output = None,
    counts: Output = None,
    aux_loss: Output = None,
    bad: Output = None,
    device: Device | None = None,
) -> Routes | Profile:
    """The top_k experts of each token by score(logits) + bias, and their scores as weights.

    logits       (T, E): fp32, bf16 or fp16;   bias   (E), selects and does not weigh; -inf leaves an expert out
    valid        (T), bool or bytes: a token that is not valid (padding) has ids -1, weights and scores 0, whatever its
                 logits, and counts neither in counts nor in aux_loss, whose mean is over the others
    score        "softmax", "sigmoid" or "sqrt_softplus";   renormalise divides weights by their sum + eps, scale follows
    groups, top_groups, group_top   experts are `groups` parts, of which the top_groups best (by the sum of their
                 group_top highest scores) are selected from
    temperature  Gumbel-softmax sampling where > 0;   dropout   share of routes dropped;   seed   of all that is random
    expert_dropout  the probability by which an expert is left out of the whole call
    weighting    weights(ids, scores) of one token's routes in place of these scores, before renormalisation: a function,
                 or for gradients (function, d_scores(ids, scores, d_weights)). Called token by token, from any thread;
                 dropped routes have id -1 and weigh 0
    aux_coefficient   aux_loss = aux_coefficient E / (K T) sum over e of counts(e) mean over t of scores(t, e) / S(t), S(t)
                 the sum of the token's scores
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
        valid=valid,
        score=score,
        renormalise=renormalise,
        route_eps=eps,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        group_top=group_top,
        temperature=temperature,
        dropout=dropout,
        expert_dropout=expert_dropout,
        seed=seed,
        bad_logits=bad_logits,
        limit=limit,
        aux_coefficient=aux_coefficient,
        weighting=weighting,
    )
    return Routes(*result) if isinstance(result, tuple) else result


@kernel
def route_grad(
    d_weights: Array,
    ids: Array,
    scores: Array,
    *,
    counts: Array | None = None,
    valid: Array | None = None,
    d_aux_loss: float = 0.0,
    d_logits: Array | None = None,
    device: Device | None = None,
    eps: float | None = None,
    **options: Any,
) -> Array | Profile:
    """The gradient of `route` with respect to the logits, (T, E), fp32 where it is made.

    d_weights   (T, K), any float dtype
    ids         (T, K), int32;   scores   (T, E), fp32: of the forward call
    counts      (E), int32, of the forward call, where d_aux_loss is not 0
    valid       (T), bool or bytes, of the forward call, where d_aux_loss is not 0
    d_aux_loss  the gradient of aux_loss, a number
    d_logits    (T, E), any float dtype
    eps, options   of `route`, as the forward call had them
    """
    call = Call("route_grad", device, d_weights).output("d_logits", d_logits, shape_of(scores), "fp32")
    return first(
        call(
            d_weights=d_weights,
            ids=ids,
            scores=scores,
            counts=counts,
            valid=valid,
            d_aux_loss=d_aux_loss,
            route_eps=eps,
            **options,
        )
    )


class MoeBlock(NamedTuple):
    """What `moe_block` gives: out (T, H), and aux_loss (1)."""

    out: Array
    aux_loss: Array | None = None


@kernel
def moe_block(
    x: Array,
    weights: dict[str, Array],
    top_k: int,
    *,
    valid: Array | None = None,
    route: dict[str, Any] = {},
    weighs_activation: bool = False,
    eps: float = 1e-6,
    state: BlockState | None = None,
    out: Array | None = None,
    aux_loss: Output = None,
    device: Device | None = None,
) -> MoeBlock | Profile:
    """out = x + y, with y the weighted sum of what each token's top_k experts (and the shared one) make of RmsNorm(x).

    x, out    (T, H), the dtype of the weights: fp32, bf16 or fp16
    weights   norm (H), router (H, E), gate_up (E, H, 2 F) with the gate in front, down (E, F, H); where there is one:
              router_bias (E), shared_gate_up (H, 2 S), shared_down (S, H), post_norm (H). The router may be fp32 beside
              narrower ones, and is then computed in floats, its gradients too
    valid     (T), bool or bytes: no expert has a row of a token that is not valid; y is the shared expert's, or 0
    weighs_activation   routes weigh the activation, inside SwiGLU, in place of what comes back
    route     options of `route`: score, renormalise, scale, groups, ..
    eps       of the norms
    state     what the backward pass needs; give it the same one. One per call in flight.
    aux_loss  (1), fp32, if True

    On a chip without data the routes are those of the last call with `state` that computed; the profile has a list of kernels.
    """
    call = Call("moe_block", device, x, state if state is not None else BlockState())
    call.output("out", out, shape_of(x), dtype_of(x)).optional("aux_loss", aux_loss, (1,), "fp32")
    result = call(
        x=x,
        top_k=top_k,
        valid=valid,
        weighs_activation=weighs_activation,
        eps=eps,
        **weights,
        **_route_options(route),
    )
    return MoeBlock(*result) if isinstance(result, tuple) else result


@kernel
def moe_block_grad(
    x: Array,
    weights: dict[str, Array],
    top_k: int,
    d_out: Array,
    state: BlockState,
    *,
    valid: Array | None = None,
    route: dict[str, Any] = {},
    weighs_activation: bool = False,
    eps: float = 1e-6,
    aux_loss: Array | None = None,
    d_aux_loss: float = 0.0,
    d_x: Array | None = None,
    gradients: dict[str, Output] | None = None,
    device: Device | None = None,
) -> tuple[Array, dict[str, Array]] | Profile:
    """Gradients of sum(d_out * out) + d_aux_loss * aux_loss, after `moe_block` with the same arguments and state.

    x, top_k, valid, route, weighs_activation, eps   as the forward call had them; x is (T, H), valid (T)
    weights      likewise, with the shapes that `moe_block` tells
    d_out, d_x   (T, H), the dtype of x
    aux_loss     what the forward call gave, with d_aux_loss
    gradients    those wanted, by the names of the weights: True, or an array to write; all of them where it is not given
                 (none of router_bias). Made in the weights' dtype.

    Gives (d_x, {name: gradient}); on a chip a profile, without data by the routes of the state.
    """
    call = Call("moe_block_grad", device, x, state).output("d_x", d_x, shape_of(x), dtype_of(x))
    names = call.gradients(weights, gradients)
    result = call(
        x=x,
        top_k=top_k,
        valid=valid,
        weighs_activation=weighs_activation,
        eps=eps,
        d_out=d_out,
        out=Maker(x).empty(shape_of(x), dtype_of(x)),
        aux_loss=aux_loss,
        d_aux_loss=d_aux_loss,
        **weights,
        **_route_options(route),
    )
    return (result[0], dict(zip(names, result[1:]))) if isinstance(result, tuple) else result


def _route_options(options: dict[str, Any]) -> dict[str, Any]:
    """The block's own eps is its norms'."""
    return {("route_eps" if name == "eps" else name): value for name, value in options.items()}
