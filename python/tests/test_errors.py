"""What a caller gets wrong: the library's own text, and nothing written."""

import numpy as np
import pytest

import cubist

A = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: cubist.matmul(A, A), ValueError, "matmul: b has K, of a = 3, needs 4|matmul: b .*3.*4"),
        (
            lambda: cubist.matmul(A, A.astype(np.float64).T),
            ValueError,
            "matmul: b is float64, needs fp32, bf16",
        ),
        (lambda: cubist.matmul(A, None), ValueError, "matmul: b"),
        (lambda: cubist.matmul([1.0], A), TypeError, "matmul: a is list, needs an array"),
        (lambda: cubist.matmul(np.float32(1), A), ValueError, "matmul: a has 0 dimensions, needs 1 to 6"),
        (
            lambda: cubist.matmul(A, A.T, transpose_a="yes"),
            ValueError,
            "transpose_a is 'yes', needs True or False",
        ),
        (lambda: cubist.grouped_matmul(A, [3], A[None]), TypeError, "groups is list"),
        (lambda: cubist.matmul(A, A.T, accumulate=True), ValueError, "matmul: out is not given, accumulate adds to it"),
        (
            lambda: cubist.grouped_matmul_grad(A, np.array([3]), x=A, accumulate_dw=True),
            ValueError,
            "grouped_matmul_grad: dw is not given, accumulate_dw adds to it",
        ),
        (
            lambda: cubist.token_permute(A, np.zeros((3, 2), np.int32)),
            ValueError,
            "token_permute: num_experts is not given",
        ),
        (lambda: cubist.swiglu(A, A[:, :3]), ValueError, "swiglu: up"),
        (lambda: cubist.flash_attention(A, A, A), ValueError, "flash_attention: q"),
        (lambda: cubist.route(A, 9), ValueError, "route: .*9"),
        (lambda: cubist.npu("ascend910b9"), ValueError, "ascend910b9"),
        (lambda: cubist.npu("ascend910b2", set={"memory.hbm": 1}), ValueError, "memory.hbm"),
        (
            lambda: cubist.npu("ascend910b2", policy="lazy"),
            ValueError,
            "policy is 'lazy', needs one of minimal, per-tile",
        ),
        (lambda: cubist.host(-1), ValueError, "threads is -1, needs 0 to"),
        (lambda: cubist.host(1025), ValueError, "threads is 1025, needs 0 to 1024"),
        (lambda: cubist.host(tuning="/no/such/file"), ValueError, "/no/such/file"),
        (lambda: cubist.host().conv2d(A), AttributeError, "a device has no kernel 'conv2d'"),
        (lambda: cubist.spec((1,), "int8"), ValueError, "dtype is int8"),
    ],
)
def test_message(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_attention_mask_that_does_not_exist():
    q = np.ones((1, 1, 4, 8), np.float32)
    with pytest.raises(ValueError, match="causal is 'both', needs one of 'none', 'top_left', 'bottom_right'"):
        cubist.flash_attention(q, q, q, causal="both")


def test_a_window_of_one_side():
    q = np.ones((1, 1, 4, 8), np.float32)
    with pytest.raises(ValueError, match=r"window is \(3,\), needs \(left, right\) or \(left, right, anchor\)"):
        cubist.flash_attention(q, q, q, window=(3,))


def test_nothing_is_written():
    out = np.full((3, 3), 7, np.float32)
    with pytest.raises(ValueError):
        cubist.matmul(A, A, out=out)
    assert np.all(out == 7)


def test_outputs_may_not_overlap_inputs():
    square = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="matmul: c .*overlap|matmul: c"):
        cubist.matmul(square, square, out=square)
