"""What type checkers know of devices: read by mypy, with test_typing.py, and not run."""

from typing import Any

import numpy as np
from typing_extensions import assert_type

import cubist

x, w = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
ids, logits = np.zeros((4, 2), np.int32), np.ones((4, 8), np.float32)

assert_type(cubist.__version__, str)

# A chip gives profiles.
npu = cubist.npu("ascend910b2", set={"memory.hbm_bytes_per_s": 1e12}, details=False)
assert_type(npu, cubist.Npu)
assert_type(npu.matmul(cubist.spec((64, 32), "bf16"), cubist.spec((32, 16), "bf16")), dict[str, Any])
assert_type(npu.flash_attention(x, x, x, causal=True, lse=True), dict[str, Any])
assert_type(npu.token_permute(x, ids, 8), dict[str, Any])
assert_type(cubist.route(logits, 2, device=npu), dict[str, Any])

# A host gives arrays, in tuples with names where there are several.
host = cubist.host(threads=1)
assert_type(host, cubist.Host)
print(host.matmul(x, w, activation="relu").shape, cubist.matmul(x, w).shape, cubist.swiglu(x, x, device=host).shape)
assert_type(host.token_permute(x, ids, 8), cubist.Permuted)
assert_type(cubist.route(logits, 2), cubist.Routes)
assert_type(host.moe_block(x, {"norm": w}, 2), cubist.MoeBlock)
assert_type(host.pack(w), cubist.Packed)
assert_type(host.flash_attention_workspace(x, x, x), int)


def routed(device: cubist.Device) -> cubist.Routes:
    result = device.route(logits, 2)
    assert_type(result, cubist.Routes | dict[str, Any])
    return result if isinstance(result, cubist.Routes) else host.route(logits, 2)


# What is not there is an error: strict checks ask for each of these to be one.
npu.conv2d(x)  # type: ignore[attr-defined]
npu.matmul(x, w, transpose_c=True)  # type: ignore[call-arg]
host.route(logits)  # type: ignore[call-arg]
host.matmul(x, w, device=host)  # type: ignore[call-arg]
cubist.host(threads="all")  # type: ignore[arg-type]
