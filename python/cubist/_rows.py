"""Kernels that work row by row: the norm and the gated activation."""

from __future__ import annotations

from typing import Any, NamedTuple

from cubist._arrays import Array, Output, dtype_of, shape_of, size
from cubist._device import Call, Device, Profile, first, given, kernel


@kernel
def rms_norm(
    x: Array,
    gamma: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    out: Array | None = None,
    sum: Output = None,
    rstd: Output = None,
    device: Device | None = None,
) -> Any | Profile:
    """out(t, h) = z(t, h) rstd(t) gamma(h), rstd(t) = 1 / sqrt(mean over h of z(t, h)^2 + eps), z = x (+ residual).

    x, residual   (T, H): fp32, bf16 or fp16
    gamma         (H), any float dtype; absent means 1
    out           (T, H), the dtype of x
    sum           (T, H), z; made with a residual
    rstd          (T), fp32: True for what the gradient needs

    Gives out, or (out, sum, rstd) without those that there are none of.
    """
    shape, dtype = shape_of(x), dtype_of(x)
    call = Call("rms_norm", device, x).output("out", out, shape, dtype)
    call.optional("sum", True if residual is not None and sum is None else sum, shape, dtype)
    call.optional("rstd", rstd, shape[:1], "fp32")
    return given(call(x=x, gamma=gamma, residual=residual, eps=eps))


@kernel
def rms_norm_grad(
    d_out: Array,
    x: Array,
    rstd: Array,
    gamma: Array | None = None,
    *,
    d_sum: Array | None = None,
    d_x: Array | None = None,
    d_gamma: Output = None,
    device: Device | None = None,
) -> Any | Profile:
    """Gradients of `rms_norm`: d_x, or (d_x, d_gamma) where gamma is given.

    d_out, x   (T, H), one dtype; x is z: the sum where there was a residual
    rstd       (T), of the forward call
    gamma      (H)
    d_sum      (T, H), what else reaches the sum
    d_x        (T, H), the gradient of x and of residual alike;   d_gamma   (H), fp32 where it is made
    """
    call = Call("rms_norm_grad", device, x).output("d_x", d_x, shape_of(x), dtype_of(x))
    call.optional(
        "d_gamma", True if gamma is not None and d_gamma is None else d_gamma, (size(x, 1),), "fp32"
    )
    return given(call(d_out=d_out, x=x, rstd=rstd, gamma=gamma, d_sum=d_sum))


@kernel
def swiglu(
    gate: Array,
    up: Array,
    *,
    probs: Array | None = None,
    out: Array | None = None,
    device: Device | None = None,
) -> Array | Profile:
    """out(m, n) = silu(gate(m, n)) up(m, n) probs(m).

    gate, up, out   (M, N), one dtype: fp32, bf16 or fp16. Halves of one matrix are views of it.
    probs           (M), any float dtype; absent means 1
    """
    return first(
        Call("swiglu", device, gate).output("out", out, shape_of(gate), dtype_of(gate))(
            gate=gate, up=up, probs=probs
        )
    )


class SwiGluGradients(NamedTuple):
    """What `swiglu_grad` gives: d_gate, d_up (M, N), and d_probs (M) where there are probs."""

    d_gate: Array
    d_up: Array
    d_probs: Array | None


@kernel
def swiglu_grad(
    d_out: Array,
    gate: Array,
    up: Array,
    *,
    probs: Array | None = None,
    d_gate: Array | None = None,
    d_up: Array | None = None,
    d_probs: Output = None,
    device: Device | None = None,
) -> SwiGluGradients | Profile:
    """Gradients of `swiglu`.

    d_out, gate, up   (M, N), one dtype: fp32, bf16 or fp16
    probs             (M), any float dtype, as the forward call had them
    d_gate, d_up      (M, N), the dtype of gate
    d_probs           (M), with probs: fp32 where it is made
    """
    shape, dtype = shape_of(gate), dtype_of(gate)
    call = Call("swiglu_grad", device, gate)
    call.output("d_gate", d_gate, shape, dtype).output("d_up", d_up, shape, dtype)
    call.optional("d_probs", True if probs is not None and d_probs is None else d_probs, shape[:1], "fp32")
    result = call(d_out=d_out, gate=gate, up=up, probs=probs)
    return SwiGluGradients(*result) if isinstance(result, tuple) else result
