"""Arrays of several libraries go in and out without copies."""

import threading

import ml_dtypes
import numpy as np
import pytest

import cubist

BF16 = np.dtype(ml_dtypes.bfloat16)


def bound(a, b, unit):
    """Of a product whose sums are fp32 and whose result is rounded once to `unit`."""
    k = a.shape[1]
    sums = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    return (k + 2) * 2.0**-24 * sums + unit * np.abs(a.astype(np.float64) @ b.astype(np.float64)) + 1e-30


@pytest.mark.parametrize("dtype, unit", [(np.float32, 2.0**-24), (BF16, 2.0**-8), (np.float16, 2.0**-11)])
def test_matmul(rng, dtype, unit):
    a = rng.standard_normal((37, 53)).astype(dtype)
    b = rng.standard_normal((53, 29)).astype(dtype)
    c = cubist.matmul(a, b)
    assert isinstance(c, np.ndarray) and c.dtype == dtype and c.shape == (37, 29)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(c.astype(np.float64) - exact) <= bound(a, b, unit))


def test_views_are_not_copied(rng):
    whole = rng.standard_normal((2, 64, 80)).astype(np.float32)
    a, b = whole[0, 1:41:3, 2:62:2], whole[1, 3:33, ::5]
    out = np.zeros((30, 40), np.float32)
    view = out[2:16, 1::3][:, :13]
    with pytest.raises(ValueError, match="matmul: c has size 13 in dimension 1"):
        cubist.matmul(a, b, out=view)
    view = out[2:16, 8:24]
    result = cubist.matmul(a, b, out=view)
    assert result is view
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(view - exact) <= bound(a, b, 2.0**-24))
    assert np.count_nonzero(out) == view.size
    transposed = cubist.matmul(np.ascontiguousarray(a.T).T, b)
    np.testing.assert_array_equal(transposed, view)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_flipped_views_are_not_copied(rng, dtype):
    a, b = rng.standard_normal((9, 16)).astype(dtype), rng.standard_normal((16, 12)).astype(dtype)
    expected = cubist.matmul(a, b, out_dtype=np.float32)
    np.testing.assert_array_equal(cubist.matmul(a[::-1], b, out_dtype=np.float32), expected[::-1])
    np.testing.assert_array_equal(cubist.matmul(a, b[:, ::-1], out_dtype=np.float32), expected[:, ::-1])
    flipped = [np.ascontiguousarray(x)[::-1, ::-1] for x in (a[::-1, ::-1], b[::-1, ::-1])]
    out = np.zeros((18, 24), np.float32)
    view = out[::-2, ::-2]
    assert cubist.matmul(*flipped, out=view) is view
    np.testing.assert_array_equal(view, expected)
    assert np.count_nonzero(out) <= view.size
    with pytest.raises(ValueError, match="matmul: c overlaps a"):
        cubist.matmul(out[:9, :16], b.astype(np.float32), out=out[8::-1, 11::-1])


def test_out_dtype_accumulate_and_bias(rng):
    a, b = rng.standard_normal((5, 8)).astype(BF16), rng.standard_normal((8, 6)).astype(BF16)
    bias = rng.standard_normal(6).astype(np.float32)
    c = cubist.matmul(a, b, bias=bias, out_dtype=np.float32)
    assert c.dtype == np.float32
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64) + bias, rtol=0, atol=1e-5)
    total = c.copy()
    cubist.matmul(a, b, bias=bias, accumulate=True, out=total)
    np.testing.assert_array_equal(total, c + c)


def test_dtype_names():
    a = np.ones((2, 2), BF16)
    for name in ("fp32", "float32", np.float32, np.dtype(np.float32)):
        assert cubist.matmul(a, a, out_dtype=name).dtype == np.float32
    with pytest.raises(ValueError, match="dtype is float64, needs one of fp32, bf16"):
        cubist.matmul(a, a, out_dtype=np.float64)


def test_read_only_inputs_but_no_read_only_outputs(rng):
    a = rng.standard_normal((4, 4)).astype(np.float32)
    out = np.empty_like(a)
    expected = cubist.matmul(a, a)
    a.flags.writeable = False
    np.testing.assert_array_equal(cubist.matmul(a, a), expected)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="matmul: c is read-only"):
        cubist.matmul(a, a, out=out)
    narrow = a.astype(BF16)
    narrow.flags.writeable = False
    assert cubist.matmul(narrow, narrow).dtype == BF16
    with pytest.raises(ValueError, match="matmul: c is read-only"):
        cubist.matmul(narrow, narrow, out=narrow)


def test_packed_operands_give_the_same_bits(rng):
    a, b = rng.standard_normal((40, 70)).astype(BF16), rng.standard_normal((50, 70)).astype(BF16)
    packed = cubist.pack(b, side="b", transpose=True)
    assert packed.shape == (1, 70, 50) and packed.dtype == "bf16" and packed.nbytes >= 2 * 70 * 50
    np.testing.assert_array_equal(cubist.matmul(a, packed_b=packed), cubist.matmul(a, b, transpose_b=True))
    left = cubist.pack(a, side="a")
    np.testing.assert_array_equal(
        cubist.matmul(b=b, packed_a=left, transpose_b=True), cubist.matmul(a, b, transpose_b=True)
    )


def test_threads_of_python_call_at_once_and_give_the_same_bits(rng):
    a = rng.standard_normal((120, 90)).astype(np.float32)
    expected = cubist.host(threads=1).matmul(a, a, transpose_b=True)
    np.testing.assert_array_equal(cubist.host(threads=2, pin=True).matmul(a, a, transpose_b=True), expected)
    results = [None] * 4

    def work(i):
        for _ in range(20):
            results[i] = cubist.host(threads=1 + i).matmul(a, a, transpose_b=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_the_interpreter_runs_while_a_kernel_does(rng):
    """The lock is free: another thread counts while a long call is under way."""
    a = rng.standard_normal((1400, 1400)).astype(np.float32)
    started, done, counted = threading.Event(), threading.Event(), [0]

    def count():
        started.set()
        while not done.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    started.wait()
    before = counted[0]
    cubist.host(threads=1).matmul(a, a)
    during = counted[0] - before
    done.set()
    thread.join()
    # With the lock held the other thread would get at most the instants before and after the call.
    assert during > 1000


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    a = torch.from_numpy(rng.standard_normal((6, 10)).astype(np.float32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = a.to(dtype)
        c = cubist.matmul(x, x.T)
        assert isinstance(c, torch.Tensor) and c.dtype == dtype
        out = torch.empty(6, 6, dtype=dtype)
        assert cubist.matmul(x, x, transpose_b=True, out=out) is out
        assert torch.equal(out, c)
        torch.testing.assert_close(c, x @ x.T, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
    mixed = cubist.matmul(a.numpy(), a, transpose_b=True)
    assert isinstance(mixed, np.ndarray)


def test_jax_arrays(rng):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    a = jax.numpy.asarray(rng.standard_normal((6, 10)).astype(np.float32))
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16):
        x = a.astype(dtype)
        c = cubist.matmul(x, x, transpose_b=True)
        assert isinstance(c, jax.Array) and c.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(c), cubist.matmul(np.asarray(x), np.asarray(x), transpose_b=True)
        )
    with pytest.raises(TypeError, match="is an array of JAX, which may not be written"):
        cubist.matmul(a, a, transpose_b=True, out=a)
