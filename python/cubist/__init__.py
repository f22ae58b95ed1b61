"""Fused kernels for Mixture-of-Experts training on Cube/Vector NPUs, run and modelled on any CPU.

>>> import cubist, numpy as np
>>> c = cubist.matmul(np.ones((256, 512), np.float32), np.ones((512, 128), np.float32))
>>> profile = cubist.npu("ascend910b2").matmul(cubist.spec((4096, 7168), "bf16"), cubist.spec((7168, 2048), "bf16"))
>>> profile["time_us"], profile["bound"]

Arrays are numpy's (bf16 by ml_dtypes) or anything with ``__dlpack__`` in the CPU's memory; they are never copied, any
strides do, and results are of the first argument's kind (numpy, PyTorch or JAX) unless the caller gives their memory.
Wrong arguments are a ValueError that names the value and the limit; nothing is written then. The interpreter's lock is
released while a kernel runs. Every function takes the `device` that it runs on, this machine where none is given, and is
a method of devices. `cubist.torch` has the kernels with gradients, for PyTorch.
"""

from cubist import _cubist
from cubist._arrays import Spec, spec
from cubist._attention import (
    Alibi,
    Dropout,
    Rope,
    flash_attention,
    flash_attention_grad,
    flash_attention_grad_workspace,
    flash_attention_workspace,
    mla_block,
    mla_block_grad,
)
from cubist._cubist import BlockState, LossScaler, Packed, chips
from cubist._device import Device, Host, Npu, host, npu
from cubist._matmul import grouped_matmul, grouped_matmul_grad, matmul, pack
from cubist._moe import MoeBlock, Routes, moe_block, moe_block_grad, route, route_grad
from cubist._permute import (
    Permuted,
    Reordered,
    reorder_chunks,
    token_permute,
    token_permute_grad,
    token_unpermute,
    token_unpermute_grad,
)
from cubist._rows import SwiGluGradients, rms_norm, rms_norm_grad, swiglu, swiglu_grad

__version__: str = _cubist.__version__

__all__ = [
    "Alibi",
    "BlockState",
    "Device",
    "Dropout",
    "Host",
    "LossScaler",
    "MoeBlock",
    "Npu",
    "Packed",
    "Permuted",
    "Reordered",
    "Rope",
    "Routes",
    "Spec",
    "SwiGluGradients",
    "__version__",
    "chips",
    "flash_attention",
    "flash_attention_grad",
    "flash_attention_grad_workspace",
    "flash_attention_workspace",
    "grouped_matmul",
    "grouped_matmul_grad",
    "host",
    "matmul",
    "mla_block",
    "mla_block_grad",
    "moe_block",
    "moe_block_grad",
    "npu",
    "pack",
    "reorder_chunks",
    "rms_norm",
    "rms_norm_grad",
    "route",
    "route_grad",
    "spec",
    "swiglu",
    "swiglu_grad",
    "token_permute",
    "token_permute_grad",
    "token_unpermute",
    "token_unpermute_grad",
]
