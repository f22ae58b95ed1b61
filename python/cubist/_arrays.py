"""Arrays of numpy, PyTorch and JAX: how results are made for each, and names of element types."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cubist import _cubist
from cubist._cubist import Spec

Array = Any
"""An array in the CPU's memory: numpy's (bf16 by ml_dtypes), or anything with ``__dlpack__``."""

_NUMPY = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    **{name: name for name in _NUMPY},
}


def dtype_name(dtype: Any) -> str:
    """'fp32', 'bf16', 'fp16', 'int32', 'int64' or 'bool' for any library's dtype, or for its name."""
    text = dtype if isinstance(dtype, str) else str(dtype)
    if text.startswith("<class"):
        text = np.dtype(dtype).name
    name = _NAMES.get(text.rsplit(".", 1)[-1])
    if name is None:
        raise ValueError(f"dtype is {text}, needs one of fp32, bf16, fp16, int32, int64, bool")
    return name


def dtype_of(array: Array) -> str:
    """Of an argument that may be anything: what has no element type that we know counts as fp32, for the call to name."""
    try:
        return dtype_name(array.dtype)
    except (AttributeError, ValueError):
        return "fp32"


def size(array: Array, dimension: int) -> int:
    """0 where there is no such dimension: the call says what is wrong with the argument."""
    shape = getattr(array, "shape", ())
    return int(shape[dimension]) if -len(shape) <= dimension < len(shape) else 0


def shape_of(array: Array) -> tuple[int, ...]:
    return tuple(int(n) for n in getattr(array, "shape", ()))


def _root(array: Array) -> str:
    return type(array).__module__.partition(".")[0]


def is_jax(array: Array) -> bool:
    return _root(array) in ("jax", "jaxlib")


class Maker:
    """Makes results of the kind that `like` is: PyTorch and JAX arrays for theirs, numpy's for all others."""

    def __init__(self, like: Array):
        self._torch = sys.modules.get("torch") if _root(like) == "torch" else None
        self._jax = is_jax(like)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        if self._torch is not None:
            return self._torch.empty(shape, dtype=getattr(self._torch, str(_NUMPY[dtype])))
        if self._jax:
            return _cubist.allocate(shape, dtype)
        return np.empty(shape, _NUMPY[dtype])

    def finished(self, array: Array) -> Array:
        """What `empty` gave, once it is written: JAX takes its arrays over."""
        if not self._jax:
            return array
        import jax

        return jax.dlpack.from_dlpack(array)


def spec(shape: tuple[int, ...], dtype: Any) -> Spec:
    """Sizes and an element type without memory, for the arguments of calls on `npu()`.

    >>> cubist.npu("ascend910b2").matmul(cubist.spec((4096, 7168), "bf16"), cubist.spec((7168, 2048), "bf16"))["time_us"]
    """
    return Spec([int(n) for n in shape], dtype_name(dtype))


Output = Any
"""``True`` makes the optional output, an array is written in place, ``None`` leaves it out."""

__all__ = ["Array", "Maker", "Output", "Spec", "dtype_name", "dtype_of", "is_jax", "shape_of", "size", "spec"]
