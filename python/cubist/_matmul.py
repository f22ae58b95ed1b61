"""Products: one, or one per group of rows."""

from __future__ import annotations

from typing import Any, Sequence

from cubist import _cubist
from cubist._arrays import Array, Output, dtype_name, dtype_of, shape_of, size
from cubist._cubist import Packed
from cubist._device import Call, Device, Profile, default_device, first, given, kernel


@kernel
def matmul(
    a: Array | None = None,
    b: Array | None = None,
    *,
    bias: Array | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    packed_a: Packed | None = None,
    packed_b: Packed | None = None,
    accumulate: bool = False,
    any_order: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    residual: Array | None = None,
    activation: str | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    device: Device | None = None,
) -> Array | Profile:
    """c(i, j) = activation(alpha sum over p of a(i, p) b(p, j) + bias(j) + beta residual(i, j)), alone or in batches.

    a        (.., M, K), or (.., K, M) with transpose_a: fp32, bf16 or fp16, any strides; or packed_a, which `pack` made
    b        (.., K, N), or (.., N, K) with transpose_b: the dtype of a; or packed_b
    bias     (N), fp32, bf16 or fp16
    residual (.., M, N), fp32, bf16 or fp16; may be out itself
    activation  "relu", "silu", "gelu" or "gelu_tanh"
    out      (.., M, N), fp32, bf16 or fp16; made of `out_dtype` (that of a) where it is not given. With accumulate the
             product is added to it; it is fp32 then.

    Up to four dimensions in front make a batch: sizes of 1, or missing ones, serve all of it. Operands of one dimension
    are vectors, which out and residual have no dimension for, as in numpy; of two an `out` of the caller's is (1).
    any_order  sums may begin anywhere along k, where a chip gains by it

    Sums are fp32, in an order that shape, dtype and SIMD target alone decide.
    """
    row = packed_a is None and len(shape_of(a)) == 1
    column = packed_b is None and len(shape_of(b)) == 1
    m = packed_a.shape[1] if packed_a is not None else size(a, -1 if transpose_a else -2)
    n = packed_b.shape[2] if packed_b is not None else size(b, -2 if transpose_b else -1)
    matrix = (() if row else (m,)) + (() if column else (n,)) or (1,)
    batch = _batch((a, 2), (b, 2), (residual, len(matrix)), (packed_a, 2), (packed_b, 2))
    dtype = dtype_name(out_dtype) if out_dtype is not None else dtype_of(a if packed_a is None else packed_a)
    call = Call("matmul", device, a if a is not None else b).output("c", out, (*batch, *matrix), dtype)
    if accumulate:
        call.added_to("c", "accumulate", "out")
    result = first(
        call(
            a=a,
            b=b,
            bias=bias,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            packed_a=packed_a,
            packed_b=packed_b,
            accumulate=accumulate,
            any_order=any_order,
            alpha=alpha,
            beta=beta,
            residual=residual,
            activation=activation,
        )
    )
    return result.reshape(()) if row and column and call.made("c") else result


def _batch(*operands: tuple[Any, int]) -> tuple[int, ...]:
    """Sizes in front of so many of each, where 1 and nothing serve all; what does not fit is the call's to name."""
    batch: tuple[int, ...] = ()
    for operand, behind in operands:
        sizes = shape_of(operand)[:-behind]
        if isinstance(operand, Packed) and sizes == (1,):
            continue
        wide, narrow = (sizes, batch) if len(sizes) > len(batch) else (batch, sizes)
        padded = (1,) * (len(wide) - len(narrow)) + narrow
        batch = tuple(theirs if ours == 1 else ours for ours, theirs in zip(wide, padded))
    return batch


@kernel
def pack(source: Array, *, side: str = "b", transpose: bool = False, device: Device | None = None) -> Packed:
    """A product's operand in the layout in which the device multiplies it, for many products.

    source   (rows, cols) or (matrices, rows, cols): fp32, bf16 or fp16, any strides
    side     "a" or "b": the operand of c = a b that it will be. With transpose each matrix is packed as its transpose.
    """
    target = device or default_device()
    return _cubist.pack(target._device, {"source": source, "side": side, "transpose": transpose})


@kernel
def grouped_matmul(
    x: Array,
    groups: Array,
    weights: Array | Sequence[Array] | None = None,
    *,
    packed_weights: Packed | None = None,
    bias: Array | None = None,
    group_list: str = "counts",
    transpose_weights: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    residual: Array | None = None,
    activation: str | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    device: Device | None = None,
) -> Array | Profile:
    """out(i) = activation(alpha x(i) w_g + bias(g) + beta residual(i)) for the rows i of each group g; 0 after the last.

    x        (M, K): fp32, bf16 or fp16
    groups   (E), int32 or int64; by group_list the rows of each group ("counts"), or the row after each one's last ("ends")
    weights  (E, K, N), or (E, N, K) with transpose_weights; or a list of E matrices; or packed_weights
    bias     (E, N), fp32, bf16 or fp16
    residual (M, N), fp32, bf16 or fp16; may be out itself;   activation   as for `matmul`
    out      (M, N), fp32, bf16 or fp16; made of `out_dtype` (that of x) where it is not given
    """
    is_list = isinstance(weights, (list, tuple))
    matrix = (weights[0] if weights else None) if is_list else weights
    n = (
        packed_weights.shape[2]
        if packed_weights is not None
        else size(matrix, -2 if transpose_weights else -1)
    )
    dtype = dtype_name(out_dtype) if out_dtype is not None else dtype_of(x)
    call = Call("grouped_matmul", device, x).output("out", out, (size(x, 0), n), dtype)
    return first(
        call(
            x=x,
            groups=groups,
            weights=None if is_list else weights,
            weight_list=weights if is_list else None,
            packed_weights=packed_weights,
            bias=bias,
            group_list=group_list,
            transpose_weights=transpose_weights,
            alpha=alpha,
            beta=beta,
            residual=residual,
            activation=activation,
        )
    )


@kernel
def grouped_matmul_grad(
    dy: Array,
    groups: Array,
    weights: Array | Sequence[Array] | None = None,
    x: Array | None = None,
    *,
    packed_weights: Packed | None = None,
    group_list: str = "counts",
    transpose_weights: bool = False,
    dx: Output = None,
    dw: Output = None,
    accumulate_dw: bool = False,
    device: Device | None = None,
) -> Any | Profile:
    """Gradients of `grouped_matmul`: dx where weights are given, dw where x is; both as (dx, dw).

    dy       (M, N), the gradient of out: fp32, bf16 or fp16
    groups   (E), int32 or int64, with group_list as for `grouped_matmul`
    weights  (E, K, N), or (E, N, K) with transpose_weights; or a list of E matrices
    packed_weights   in place of weights: their transposes, E matrices (N, K)
    x        (M, K)
    dx       (M, K), fp32 or the dtype of dy; made where it is not given
    dw       (E, K, N), or (E, N, K) with transpose_weights: fp32 or the dtype of dy; made where it is not given. A list
             of E matrices is written in place. With accumulate_dw the gradient is added to it, in fp32.
    """
    is_list = isinstance(weights, (list, tuple))
    dw_is_list = isinstance(dw, (list, tuple))
    matrix = (weights[0] if weights else None) if is_list else weights
    dtype = dtype_of(dy)
    if packed_weights is not None:
        k = packed_weights.shape[2]
    else:
        k = size(x, 1) if x is not None else size(matrix, -1 if transpose_weights else -2)
    wants_dx = weights is not None or packed_weights is not None
    n, experts = size(dy, 1), size(groups, 0)
    call = Call("grouped_matmul_grad", device, dy)
    call.output("dx", dx if wants_dx else (False if dx is None else dx), (size(dy, 0), k), dtype)
    if not dw_is_list:
        shape = (experts, n, k) if transpose_weights else (experts, k, n)
        call.output("dw", dw if x is not None else (False if dw is None else dw), shape, dtype)
        if accumulate_dw:
            call.added_to("dw", "accumulate_dw", "dw")
    return given(
        call(
            dy=dy,
            groups=groups,
            weights=None if is_list else weights,
            weight_list=weights if is_list else None,
            packed_weights=packed_weights,
            x=x,
            dw_list=dw if dw_is_list else None,
            group_list=group_list,
            transpose_weights=transpose_weights,
            accumulate_dw=accumulate_dw,
        )
    )
