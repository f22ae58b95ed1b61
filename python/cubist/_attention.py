"""Attention, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from cubist._arrays import Array, Output, dtype_name, dtype_of, shape_of, size
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


def _fields(name: str, options: NamedTuple | None) -> dict[str, Any]:
    return {} if options is None else {f"{name}_{field}": value for field, value in options._asdict().items()}


def _masks(
    causal: bool | str, window: Sequence[Any] | None, prefix: Sequence[int] | None, scale: float | None
) -> dict[str, Any]:
    left, right, anchor = (*(window or (None, None)), "bottom_right")[:3]
    return {
        "causal": _causal(causal),
        "window_left": left,
        "window_right": right,
        "window_anchor": anchor,
        "prefix": prefix,
        "scale": scale,
    }


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
    device: Device | None = None,
) -> Any:
    """out(i) = sum over j of softmax_j(scale (q(i) . k(j) + q_rope(i) . k_rope(j))) v(j), for every batch and head.

    q        (B, Nq, Sq, Dqk)        fp32, bf16 or fp16; all inputs share it. Layouts are strides: pass a view.
    k        (B, Nkv, Skv, Dqk)      Nq is a multiple of Nkv
    v        (B, Nkv, Skv, Dv)       Dv may differ from Dqk
    q_rope   (B, Nq, Sq, Dr)         optional, both or neither: never concatenated
    k_rope   (B, Nkv or 1, Skv, Dr)
    scale    1 / sqrt(Dqk + Dr) where it is not given
    causal   False; "top_left": j <= i; True or "bottom_right": j <= i + Skv - Sq
    window   (left, right) or (left, right, anchor): keys around the row's own, None for no bound
    prefix   (B): keys j < prefix[b] are always seen
    q_ends, kv_ends   packed sequences: the row and the key after each one's last (B = 1)
    rope     positions by which the rope parts, or the first columns of q and k, are turned
    bias     (B, Nq, Sq, Skv), fp32 or the input dtype, added to the scores; sizes of 1 serve all
    sinks    (Nq), fp32: a key of that score without a value
    soft_cap scores become soft_cap tanh(scores / soft_cap)
    mask     (B, Nq, Sq, Skv), bool or bytes; sizes of 1 serve all. True hides the key (PyTorch's attn_mask shows it)
    alibi    biases by distance;   dropout   of the weights
    out      (B, Nq, Sq, Dv), fp32 or the input dtype; made of `out_dtype` (the input's) where it is not given
    lse      (B, Nq, Sq), fp32: True for (out, lse), which the gradient needs
    """
    dtype = dtype_name(out_dtype) if out_dtype is not None else dtype_of(q)
    rows = (size(q, 0), size(q, 1), size(q, 2))
    call = Call("flash_attention", device, q)
    call.output("out", out, (*rows, size(v, 3)), dtype).optional("lse", lse, rows, "fp32")
    return given(
        call(
            q=q,
            k=k,
            v=v,
            q_rope=q_rope,
            k_rope=k_rope,
            bias=bias,
            sinks=sinks,
            soft_cap=soft_cap,
            mask=mask,
            q_ends=q_ends,
            kv_ends=kv_ends,
            **_fields("rope", rope),
            **_fields("alibi", alibi),
            **_fields("dropout", dropout),
            **_masks(causal, window, prefix, scale),
        )
    )


@kernel
def flash_attention_grad(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    q_rope: Array | None = None,
    k_rope: Array | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Sequence[Any] | None = None,
    prefix: Sequence[int] | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dq_rope: Array | None = None,
    dk_rope: Array | None = None,
    device: Device | None = None,
) -> tuple[Array, ...] | Profile:
    """Gradients of `flash_attention`: (dq, dk, dv), and (dq_rope, dk_rope) behind them where there are rope parts.

    q, k, v, q_rope, k_rope, scale, causal, window, prefix   as the forward call had them
    out, lse   what it gave: (B, Nq, Sq, Dv), and (B, Nq, Sq) in fp32
    dout       (B, Nq, Sq, Dv), the input dtype
    dq, dk, dv, dq_rope, dk_rope   shaped like q, k, v, q_rope, k_rope, each fp32 or the input dtype; made where not given
    """
    dtype = dtype_of(q)
    call = Call("flash_attention_grad", device, q)
    for field, given_out, of in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        call.output(field, given_out, shape_of(of), dtype)
    if q_rope is not None:
        call.output("dq_rope", dq_rope, shape_of(q_rope), dtype)
    if k_rope is not None:
        call.output("dk_rope", dk_rope, shape_of(k_rope), dtype)
    return given(
        call(
            q=q,
            k=k,
            v=v,
            q_rope=q_rope,
            k_rope=k_rope,
            out=out,
            lse=lse,
            dout=dout,
            **_masks(causal, window, prefix, scale),
        )
    )


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
    q_ends, kv_ends, rope, scale, causal   as for `flash_attention`
    state     scratch memory that calls reuse; one per call in flight
    """
    call = Call("mla_block", device, x, state if state is not None else BlockState())
    call.output("out", out, shape_of(x), dtype_of(x))
    named = {("out_projection" if name == "out" else name): value for name, value in weights.items()}
    return first(
        call(
            x=x,
            heads=heads,
            batch=batch,
            scale=scale,
            causal=_causal(causal),
            q_ends=q_ends,
            kv_ends=kv_ends,
            eps=eps,
            **_fields("rope", rope),
            **named,
        )
    )
