"""Attention, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from cubist._arrays import Array, Maker, Output, dtype_name, dtype_of, shape_of, size
from cubist._cubist import BlockState
from cubist._device import Call, Device, Profile, first, given, kernel


class Rope(NamedTuple):
    """Rotary positions: pair i of a row at position p becomes (x1 c - x2 s, x2 c + x1 s), c = cos(p, i), s = sin(p, i).

    cos, sin   (P, R / 2), fp32 or the input dtype
    layout     which columns are pairs: "half" (i, i + R / 2), "interleaved" (2 i, 2 i + 1), or "interleaved_to_half"
    q_offset, k_offset   positions of the first query and of the first key
    q_positions, k_positions   (Sq) and (Skv), or (B, Sq) and (B, Skv), int32 or int64: positions one by one
    """

    cos: Array
    sin: Array
    layout: str = "half"
    q_offset: int = 0
    k_offset: int = 0
    q_positions: Array | None = None
    k_positions: Array | None = None


class Alibi(NamedTuple):
    """Linear biases by distance: the score of query i and key j loses slope * |i + offset - j|, or slope times its root.

    slopes   (Nq) or (B, Nq), fp32;   offset   Skv - Sq where it is not given;   root   the square root
    """

    slopes: Array
    offset: int | None = None
    root: bool = False


class Dropout(NamedTuple):
    """Dropout behind the softmax: a weight is kept with probability `keep` and divided by it.

    Which are kept is a function of seed, offset and the weight's place alone.
    """

    keep: float
    seed: int = 0
    offset: int = 0


def _causal(causal: bool | str) -> str:
    return {True: "bottom_right", False: "none"}[causal] if isinstance(causal, bool) else causal


def _options(
    causal: bool | str = False,
    window: Sequence[Any] | None = None,
    rope: Rope | None = None,
    alibi: Alibi | None = None,
    dropout: Dropout | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The options of attention as fields of the extension."""
    fields: dict[str, Any] = {"causal": _causal(causal)}
    if window is not None:
        if len(window) not in (2, 3):
            raise ValueError(f"window is {tuple(window)}, needs (left, right) or (left, right, anchor)")
        left, right, anchor = (*window, "bottom_right")[:3]
        fields |= {"window_left": left, "window_right": right, "window_anchor": anchor}
    for name, group in (("rope", rope), ("alibi", alibi), ("dropout", dropout)):
        if group is not None:
            fields |= {f"{name}_{field}": value for field, value in group._asdict().items()}
    return fields | others


def _forward(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    out_dtype: Any,
    lse: Output,
    workspace: Array | None,
    device: Device | None,
    options: dict[str, Any],
) -> Any:
    dtype = dtype_name(out_dtype) if out_dtype is not None else dtype_of(q)
    rows = (size(q, 0), size(q, 1), size(q, 2))
    call = Call(name, device, q)
    call.output("out", out, (*rows, size(v, 3)), dtype).optional("lse", lse, rows, "fp32")
    return given(call(q=q, k=k, v=v, workspace=workspace, **_options(**options)))


@kernel
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_rope: Array | None = None,
    k_rope: Array | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Sequence[Any] | None = None,
    prefix: Sequence[int] | None = None,
    q_ends: Sequence[int] | None = None,
    kv_ends: Sequence[int] | None = None,
    rope: Rope | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
    soft_cap: float | None = None,
    mask: Array | None = None,
    alibi: Alibi | None = None,
    dropout: Dropout | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    lse: Output = None,
    workspace: Array | None = None,
    device: Device | None = None,
) -> Any | Profile:
    """out(i) = sum over j of softmax_j(scale (q(i) . k(j) + q_rope(i) . k_rope(j))) v(j), for every batch and head.

    q        (B, Nq, Sq, Dqk)        fp32, bf16 or fp16; all inputs share it. Layouts are strides: pass a view.
    k        (B, Nkv, Skv, Dqk)      Nq is a multiple of Nkv
    v        (B, Nkv, Skv, Dv)       Dv may differ from Dqk
    q_rope   (B, Nq, Sq, Dr)         optional, both or neither: never concatenated
    k_rope   (B, Nkv or 1, Skv, Dr)
    scale    1 / sqrt(Dqk + Dr) where it is not given
    causal   False; "top_left": j <= i; True or "bottom_right": j <= i + Skv - Sq
    window   (left, right) or (left, right, anchor): keys around the row's own, None for no bound
    prefix   (B): keys j < prefix[b] are always seen, whatever window and causal order say
    q_ends, kv_ends   packed sequences: the row and the key after each one's last (B = 1); [0] where there are none
    rope     positions by which the rope parts, or the first columns of q and k, are turned
    bias     (B, Nq, Sq, Skv), fp32 or the input dtype, added to the scores; sizes of 1 serve all
    sinks    (Nq), fp32: a key of that score without a value
    soft_cap scores become soft_cap tanh(scores / soft_cap)
    mask     (B, Nq, Sq, Skv), bool or bytes; sizes of 1 serve all. True hides the key (PyTorch's attn_mask shows it)
    alibi    biases by distance;   dropout   of the weights
    out      (B, Nq, Sq, Dv), fp32 or the input dtype; made of `out_dtype` (the input's) where it is not given
    lse      (B, Nq, Sq), fp32: True for (out, lse), which the gradient needs
    workspace   memory to work in: an array of `flash_attention_workspace` bytes; the library's own where it is not given
    """
    options = {
        "q_rope": q_rope,
        "k_rope": k_rope,
        "scale": scale,
        "causal": causal,
        "window": window,
        "prefix": prefix,
        "q_ends": q_ends,
        "kv_ends": kv_ends,
        "rope": rope,
        "bias": bias,
        "sinks": sinks,
        "soft_cap": soft_cap,
        "mask": mask,
        "alibi": alibi,
        "dropout": dropout,
    }
    return _forward("flash_attention", q, k, v, out, out_dtype, lse, workspace, device, options)


@kernel
def flash_attention_workspace(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    out_dtype: Any = None,
    lse: Output = None,
    device: Device | None = None,
    **options: Any,
) -> int:
    """The bytes that `flash_attention` with these arguments works in, besides its arrays; nothing is computed.

    q, k, v   (B, Nq, Sq, Dqk), (B, Nkv, Skv, Dqk), (B, Nkv, Skv, Dv)
    out, out_dtype, lse   out (B, Nq, Sq, Dv) or its dtype, lse (B, Nq, Sq) or True, as the call will have them
    options   of `flash_attention`
    """
    return _forward("flash_attention_workspace", q, k, v, out, out_dtype, lse, None, device, options)


def _backward(name: str, inputs: tuple[Array, ...], device: Device | None, options: dict[str, Any]) -> Any:
    """`options` with those outputs that the caller gave or asked for."""
    q, k, v, out, lse, dout = inputs
    call, dtype = Call(name, device, q), dtype_of(q)
    of = {"dq": q, "dk": k, "dv": v, "dq_rope": options.get("q_rope"), "dk_rope": options.get("k_rope")}
    for field, array in of.items():
        given_out = options.pop(field, None)
        if array is not None:
            call.output(field, given_out, shape_of(array), dtype)
    for field in ("bias", "sinks"):
        call.optional(f"d{field}", options.pop(f"d{field}", None), shape_of(options.get(field)), "fp32")
    return given(call(q=q, k=k, v=v, out=out, lse=lse, dout=dout, **_options(**options)))


@kernel
def flash_attention_grad(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dq_rope: Array | None = None,
    dk_rope: Array | None = None,
    dbias: Output = None,
    dsinks: Output = None,
    device: Device | None = None,
    **options: Any,
) -> tuple[Array, ...] | Profile:
    """Gradients of `flash_attention`: (dq, dk, dv), then (dq_rope, dk_rope) where there are rope parts, then what was
    asked for of (dbias, dsinks).

    q, k, v    (B, Nq, Sq, Dqk), (B, Nkv, Skv, Dqk), (B, Nkv, Skv, Dv), as the forward call had them
    out, lse   what it gave: (B, Nq, Sq, Dv), and (B, Nq, Sq) in fp32
    dout       (B, Nq, Sq, Dv), the input dtype
    options    as the forward call had them: q_rope, k_rope, scale, causal, window, prefix, q_ends, kv_ends, rope, bias,
               sinks, soft_cap, mask, alibi, dropout; and a workspace, of `flash_attention_grad_workspace` bytes
    dq, dk, dv, dq_rope, dk_rope   shaped like q, k, v, q_rope, k_rope, each fp32 or the input dtype; made where not given
    dbias      like bias, dsinks like sinks: fp32 if True. Sizes of 1 take the sum of what they serve.
    """
    outputs = {"dq": dq, "dk": dk, "dv": dv, "dq_rope": dq_rope, "dk_rope": dk_rope}
    options |= outputs | {"dbias": dbias, "dsinks": dsinks}
    return _backward("flash_attention_grad", (q, k, v, out, lse, dout), device, options)


@kernel
def flash_attention_grad_workspace(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    device: Device | None = None,
    **options: Any,
) -> int:
    """The bytes that `flash_attention_grad` with these arguments works in, besides its arrays; nothing is computed.

    q, k, v   (B, Nq, Sq, Dqk), (B, Nkv, Skv, Dqk), (B, Nkv, Skv, Dv)
    out, dout, lse   (B, Nq, Sq, Dv) twice, and (B, Nq, Sq) in fp32
    options   of `flash_attention_grad`
    """
    return _backward("flash_attention_grad_workspace", (q, k, v, out, lse, dout), device, options)


def _mla_arguments(
    x: Array, weights: dict[str, Array], heads: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The weight `out` goes by another name: out is the result."""
    named = {("out_projection" if name == "out" else name): value for name, value in weights.items()}
    others: dict[str, Any] = {name: options.pop(name) for name in ("batch", "eps") if name in options}
    return {"x": x, "heads": heads, **others, **named, **_options(**{"causal": "top_left", **options})}


@kernel
def mla_block(
    x: Array,
    weights: dict[str, Array],
    heads: int,
    *,
    batch: int = 1,
    scale: float | None = None,
    causal: bool | str = "top_left",
    q_ends: Sequence[int] | None = None,
    kv_ends: Sequence[int] | None = None,
    rope: Rope | None = None,
    eps: float = 1e-6,
    state: BlockState | None = None,
    out: Array | None = None,
    device: Device | None = None,
) -> Array | Profile:
    """The attention half of a layer with multi-head latent attention: out = x + y, y what attention makes of RmsNorm(x).

    x, out    (B * S, H), batch entry by batch entry; the dtype of the weights: fp32, bf16 or fp16
    weights   norm (H); q_down (H, Rq) and q_norm (Rq), both or neither; q_up (Rq, N (Dn + Dr)); kv_down (H, Rkv + Dr);
              kv_norm (Rkv); kv_up (Rkv, N (Dn + Dv)); out (N Dv, H); and post_norm (H) where there is one
    heads     N
    batch     B: x is that many sequences of S rows each
    eps       of the norms
    q_ends, kv_ends, rope, scale, causal   as for `flash_attention`
    state     scratch memory that calls reuse; one per call in flight
    """
    call = Call("mla_block", device, x, state if state is not None else BlockState())
    call.output("out", out, shape_of(x), dtype_of(x))
    options = {
        "batch": batch,
        "scale": scale,
        "causal": causal,
        "q_ends": q_ends,
        "kv_ends": kv_ends,
        "rope": rope,
        "eps": eps,
    }
    return first(call(**_mla_arguments(x, weights, heads, options)))


@kernel
def mla_block_grad(
    x: Array,
    weights: dict[str, Array],
    heads: int,
    d_out: Array,
    state: BlockState,
    *,
    d_x: Array | None = None,
    gradients: dict[str, Output] | None = None,
    device: Device | None = None,
    **options: Any,
) -> tuple[Array, dict[str, Array]] | Profile:
    """Gradients of sum(d_out * out), after `mla_block` with the same arguments and state.

    x, heads     as the forward call had them: (B * S, H), and N
    weights      likewise, with the shapes that `mla_block` tells
    d_out, d_x   (B * S, H), the dtype of x
    gradients    those wanted, by the names of the weights: True, or an array to write; all of them where it is not given.
                 Made in the weights' dtype.
    options      as the forward call had them: batch, scale, causal, q_ends, kv_ends, rope, eps

    Gives (d_x, {name: gradient}).
    """
    call = Call("mla_block_grad", device, x, state)
    call.output("d_x", d_x, shape_of(x), dtype_of(x))
    names = call.gradients(weights, gradients, rename={"out": "out_projection"})
    result = call(
        d_out=d_out,
        out=Maker(x).empty(shape_of(x), dtype_of(x)),
        **_mla_arguments(x, weights, heads, options),
    )
    return (result[0], dict(zip(names, result[1:]))) if isinstance(result, tuple) else result
