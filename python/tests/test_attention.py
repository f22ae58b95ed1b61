"""Attention against its formula, in double."""

import numpy as np
import pytest
from checks import F32, close, slope_of

import cubist


def softmax_attention(q, k, v, mask, scale, bias=0.0):
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = scale * np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) + bias
    s = np.where(mask, s, -np.inf)
    lse = np.logaddexp.reduce(s, axis=-1)
    return np.einsum("bhij,bhjd->bhid", np.exp(s - lse[..., None]), v), lse


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_flash_attention(rng, causal):
    q = rng.standard_normal((2, 4, 20, 24)).astype(F32)
    k, v = rng.standard_normal((2, 2, 33, 24)).astype(F32), rng.standard_normal((2, 2, 33, 17)).astype(F32)
    i, j = np.arange(20)[:, None], np.arange(33)[None]
    mask = {False: j >= 0, True: j <= i + 13, "top_left": j <= i}[causal]
    exact, exact_lse = softmax_attention(q, k, v, mask, 24**-0.5)
    close(cubist.flash_attention(q, k, v, causal=causal), exact)
    out, lse = cubist.flash_attention(q, k, v, causal=causal, lse=True)
    close(out, exact)
    close(lse, exact_lse)


def test_attention_takes_layouts_as_strides_and_options(rng):
    bsnd = rng.standard_normal((1, 30, 2, 16)).astype(F32)
    q = bsnd.transpose(0, 2, 1, 3)
    bias = rng.standard_normal((1, 1, 30, 30)).astype(F32)
    i, j = np.arange(30)[:, None], np.arange(30)[None]
    exact, _ = softmax_attention(q, q, q, np.abs(i - j - 1) <= 3, 0.3, bias)
    out = np.empty_like(bsnd)
    cubist.flash_attention(q, q, q, scale=0.3, window=(4, 2), bias=bias, out=out.transpose(0, 2, 1, 3))
    close(out.transpose(0, 2, 1, 3), exact)


def test_masks_biases_by_distance_and_dropout(rng):
    q = rng.standard_normal((2, 3, 12, 8)).astype(F32)
    hidden = rng.random((2, 1, 12, 12)) < 0.3
    hidden[..., 0] = False
    i, j = np.arange(12)[:, None], np.arange(12)[None]
    slopes = np.array([0.5, 0.25, 0.125], F32)
    exact, lse = softmax_attention(q, q, q, ~hidden, 8**-0.5, -slopes[:, None, None] * np.abs(i - j))
    close(cubist.flash_attention(q, q, q, mask=hidden, alibi=cubist.Alibi(slopes)), exact)
    close(
        cubist.flash_attention(q, q, q, mask=hidden.astype(np.uint8) * 7, alibi=cubist.Alibi(slopes)), exact
    )

    ones = np.ones_like(q)
    kept = [cubist.flash_attention(q, q, ones, dropout=cubist.Dropout(0.5, seed=s)) for s in (1, 1, 2)]
    np.testing.assert_array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[0], kept[2])
    # Sums of kept weights, divided by what is kept on average: 1 on average.
    assert abs(np.mean([k.mean() for k in kept[1:]]) - 1) < 0.25


def test_packed_sequences_and_rope(rng):
    q = rng.standard_normal((1, 2, 12, 8)).astype(F32)
    angle = np.arange(12)[:, None] * np.array([1.0, 0.3, 0.1, 0.02])[None]
    rope = cubist.Rope(np.cos(angle).astype(F32), np.sin(angle).astype(F32))
    packed = cubist.flash_attention(
        q, q, q, q_ends=[5, 12], kv_ends=np.array([5, 12]), rope=rope, causal=True
    )
    for begin, end in ((0, 5), (5, 12)):
        part = np.ascontiguousarray(q[:, :, begin:end])
        x1, x2 = part[..., :4].astype(np.float64), part[..., 4:].astype(np.float64)
        c, s = np.cos(angle[: end - begin]), np.sin(angle[: end - begin])
        turned = np.concatenate((x1 * c - x2 * s, x2 * c + x1 * s), axis=-1)
        n = end - begin
        exact, _ = softmax_attention(turned, turned, part, np.tri(n, dtype=bool), 8**-0.5)
        close(packed[:, :, begin:end], exact)


def test_flash_attention_grad(rng):
    q, k, v, dout = (rng.standard_normal((1, 2, 14, 8)).astype(F32) for _ in range(4))
    q_rope, k_rope = (
        rng.standard_normal((1, 2, 14, 4)).astype(F32),
        rng.standard_normal((1, 1, 14, 4)).astype(F32),
    )
    scale, mask = 12**-0.5, np.tri(14, dtype=bool)

    def full(q, q_rope, k, k_rope):
        return np.concatenate((q, q_rope), -1), np.concatenate((k, np.repeat(k_rope, 2, axis=1)), -1)

    out, lse = cubist.flash_attention(q, k, v, q_rope=q_rope, k_rope=k_rope, causal=True, lse=True)
    gradients = cubist.flash_attention_grad(
        q, k, v, out, lse, dout, q_rope=q_rope, k_rope=k_rope, causal=True
    )
    wide_q, wide_k = (x.astype(np.float64) for x in full(q, q_rope, k, k_rope))
    s = np.where(mask, scale * np.einsum("bhid,bhjd->bhij", wide_q, wide_k), -np.inf)
    p = np.exp(s - np.logaddexp.reduce(s, -1)[..., None])
    d64, v64 = dout.astype(np.float64), v.astype(np.float64)
    dp = np.einsum("bhid,bhjd->bhij", d64, v64)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk = np.einsum("bhij,bhjd->bhid", ds, wide_k), np.einsum("bhij,bhid->bhjd", ds, wide_q)
    dv = np.einsum("bhij,bhid->bhjd", p, d64)
    exact = (dq[..., :8], dk[..., :8], dv, dq[..., 8:], dk[..., 8:].sum(1, keepdims=True))
    assert len(gradients) == 5
    for actual, of in zip(gradients, exact):
        close(actual, of)


def test_flash_attention_grad_takes_what_the_forward_call_took(rng):
    q, k, v = (rng.standard_normal((1, 2, 12, 8)).astype(F32) for _ in range(3))
    bias, sinks = rng.standard_normal((1, 1, 12, 12)).astype(F32), rng.standard_normal(2).astype(F32)
    mask = rng.random((1, 1, 12, 12)) < 0.2
    angle = np.arange(12)[:, None] * np.array([1.0, 0.3, 0.1, 0.02])[None]
    options = {
        "causal": True,
        "scale": 0.4,
        "soft_cap": 3.0,
        "mask": mask,
        "alibi": cubist.Alibi(np.array([0.5, 0.25], F32)),
        "dropout": cubist.Dropout(0.75, seed=3),
        "rope": cubist.Rope(np.cos(angle).astype(F32), np.sin(angle).astype(F32)),
    }

    def forward(q, k, v, bias, sinks):
        return cubist.flash_attention(q, k, v, bias=bias, sinks=sinks, **options)

    out, lse = cubist.flash_attention(q, k, v, bias=bias, sinks=sinks, lse=True, **options)
    arguments = (q, k, v, out, lse, np.ones_like(out))
    options |= {"bias": bias, "sinks": sinks}
    gradients = cubist.flash_attention_grad(*arguments, dbias=True, dsinks=True, **options)
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v, bias, sinks)]
    options = {name: value for name, value in options.items() if name not in ("bias", "sinks")}
    slope_of(forward, (q, k, v, bias, sinks), gradients, rng)
    # Packed sequences, and a window.
    packed = {"q_ends": [5, 12], "kv_ends": [5, 12], "window": (3, 0)}
    out, lse = cubist.flash_attention(q, k, v, lse=True, **packed)
    gradients = cubist.flash_attention_grad(q, k, v, out, lse, np.ones_like(out), **packed)
    slope_of(lambda *qkv: cubist.flash_attention(*qkv, **packed), (q, k, v), gradients, rng)
    with pytest.raises(TypeError, match="flash_attention_grad: there is no argument 'masks'"):
        cubist.flash_attention_grad(*arguments, masks=mask)


def test_attention_works_in_the_callers_memory(rng):
    q, k, v = (rng.standard_normal((1, 2, 40, 16)).astype(F32) for _ in range(3))
    angle = rng.random((40, 8)).astype(F32)
    options = {"rope": cubist.Rope(np.cos(angle), np.sin(angle))}  # turned keys need room
    exact, lse = cubist.flash_attention(q, k, v, lse=True, **options)
    needed = cubist.flash_attention_workspace(q, k, v, lse=True, **options)
    assert isinstance(needed, int) and needed > 0
    room = np.full(needed, 255, np.uint8)
    np.testing.assert_array_equal(cubist.flash_attention(q, k, v, workspace=room, **options), exact)
    assert not np.all(room == 255)
    with pytest.raises(ValueError, match=f"workspace.*{needed}"):
        cubist.flash_attention(q, k, v, workspace=room[: needed - 64], **options)
    with pytest.raises(ValueError, match="workspace is .*without gaps"):
        cubist.flash_attention(q, k, v, workspace=np.empty(2 * needed, np.uint8)[::2], **options)
    arguments = (q, k, v, exact, lse, np.ones_like(exact))
    needed = cubist.flash_attention_grad_workspace(*arguments, **options)
    assert needed > 0
    gradients = cubist.flash_attention_grad(*arguments, workspace=np.empty(needed, np.uint8), **options)
    for ours, theirs in zip(gradients, cubist.flash_attention_grad(*arguments, **options)):
        np.testing.assert_array_equal(ours, theirs)
