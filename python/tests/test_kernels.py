"""Every function but attention against its formula, in double."""

import math

import ml_dtypes
import numpy as np
import pytest
from checks import F32, close, slope_of

import cubist

BF16 = np.dtype(ml_dtypes.bfloat16)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def test_epilogues_and_batches(rng):
    a, b = rng.standard_normal((3, 1, 5, 6)).astype(F32), rng.standard_normal((2, 6, 4)).astype(F32)
    bias, residual = rng.standard_normal(4).astype(F32), rng.standard_normal((5, 4)).astype(F32)
    c = cubist.matmul(a, b, bias=bias, alpha=0.5, beta=2.0, residual=residual, activation="gelu")
    close(c, gelu(0.5 * (a.astype(np.float64) @ b) + bias + 2.0 * residual))
    assert c.shape == (3, 2, 5, 4)
    np.testing.assert_array_equal(
        cubist.matmul(a[:2, 0], packed_b=cubist.pack(b)), cubist.matmul(a[:2, 0], b)
    )
    np.testing.assert_array_equal(cubist.matmul(a, packed_b=cubist.pack(b[0])), cubist.matmul(a, b[0]))

    counts = np.array([2, 3], np.int32)
    x, per_expert = a[0, 0], rng.standard_normal((2, 4)).astype(F32)
    out = cubist.grouped_matmul(
        x, counts, b, bias=per_expert, alpha=-1.0, residual=residual, activation="relu"
    )
    exact = np.concatenate([x[:2].astype(np.float64) @ b[0], x[2:].astype(np.float64) @ b[1]])
    close(out, np.maximum(-exact + np.repeat(per_expert, counts, axis=0) + residual, 0))
    packed = cubist.pack(b, transpose=True)
    np.testing.assert_array_equal(
        cubist.grouped_matmul_grad(residual, counts, packed_weights=packed),
        cubist.grouped_matmul_grad(residual, counts, b),
    )
    many = rng.standard_normal((2, 1, 3, 2, 5, 6)).astype(F32)
    each = rng.standard_normal((4, 1, 2, 6, 4)).astype(F32)
    c = cubist.matmul(many, each)
    close(c, many.astype(np.float64) @ each)
    assert c.shape == (2, 4, 3, 2, 5, 4)
    with pytest.raises(ValueError, match="activation is 'tanh', needs one of 'none', 'relu', 'silu'"):
        cubist.matmul(x, b[0], activation="tanh")


def test_vectors(rng):
    row, column = rng.standard_normal(6).astype(F32), rng.standard_normal(6).astype(F32)
    a, b = rng.standard_normal((2, 3, 5, 6)).astype(F32), rng.standard_normal((3, 6, 4)).astype(F32)
    for left, right in ((row, b), (row, b[0]), (a, column), (a[0, 0], column), (row, column)):
        c, exact = cubist.matmul(left, right), left.astype(np.float64) @ right
        assert c.shape == exact.shape
        close(c, exact)
    residual = rng.standard_normal(4).astype(F32)
    close(cubist.matmul(row, b, residual=residual), row.astype(np.float64) @ b + residual)
    out = np.empty(1, F32)
    assert cubist.matmul(row, column, out=out) is out
    close(out, [row.astype(np.float64) @ column])
    assert cubist.npu("ascend910b2").matmul(row, column)["time_us"] > 0
    with pytest.raises(ValueError, match="matmul: b has size 6 in dimension 0 \\(K, of a\\), needs 5"):
        cubist.matmul(row[:5], column)


def groups_of(counts):
    ends = np.cumsum(counts)
    return [slice(end - count, end) for count, end in zip(counts, ends)]


@pytest.mark.parametrize("form", ["stack", "list", "packed", "ends"])
def test_grouped_matmul(rng, form):
    counts = np.array([3, 0, 6], np.int32)
    x, w = rng.standard_normal((10, 12)).astype(F32), rng.standard_normal((3, 12, 7)).astype(F32)
    arguments = {"weights": w}
    if form == "list":
        arguments = {"weights": [w[0].copy(), w[1].copy(), w[2].copy()]}
    elif form == "packed":
        arguments = {"packed_weights": cubist.pack(w)}
    groups = np.cumsum(counts) if form == "ends" else counts
    out = cubist.grouped_matmul(x, groups, group_list="ends" if form == "ends" else "counts", **arguments)
    exact = np.zeros((10, 7))
    for g, rows in enumerate(groups_of(counts)):
        exact[rows] = x[rows].astype(np.float64) @ w[g]
    close(out, exact)


def test_grouped_matmul_grad(rng):
    counts = np.array([4, 0, 5], np.int64)
    x, w, dy = (rng.standard_normal(s).astype(F32) for s in ((9, 12), (3, 7, 12), (9, 7)))
    dx, dw = cubist.grouped_matmul_grad(dy, counts, w, x, transpose_weights=True)
    exact_dx, exact_dw = np.zeros((9, 12)), np.zeros((3, 7, 12))
    for g, rows in enumerate(groups_of(counts)):
        exact_dx[rows] = dy[rows].astype(np.float64) @ w[g]
        exact_dw[g] = dy[rows].T.astype(np.float64) @ x[rows]
    close(dx, exact_dx)
    close(dw, exact_dw)
    only_dw = cubist.grouped_matmul_grad(dy, counts, x=x, transpose_weights=True)
    np.testing.assert_array_equal(only_dw, dw)
    total = dw.copy()
    assert (
        cubist.grouped_matmul_grad(dy, counts, x=x, transpose_weights=True, dw=total, accumulate_dw=True)
        is total
    )
    np.testing.assert_array_equal(total, dw + dw)
    parts = [np.empty((7, 12), F32) for _ in range(3)]
    np.testing.assert_array_equal(
        cubist.grouped_matmul_grad(dy, counts, w, x, transpose_weights=True, dw=parts), dx
    )
    np.testing.assert_array_equal(np.stack(parts), dw)


def test_permute_and_back(rng):
    tokens = rng.standard_normal((6, 5)).astype(BF16)
    ids = np.array([[2, 0], [1, 2], [-1, 1], [0, 2], [2, 1], [0, 1]], np.int32)
    probs = rng.random((6, 2)).astype(F32)
    p = cubist.token_permute(tokens, ids, 3, probs=probs, expert_counts=True, expert_offsets=True)
    order = np.argsort(np.where(ids.ravel() < 0, 99, ids.ravel()), kind="stable")[:11]
    np.testing.assert_array_equal(p.permuted[:11], tokens[order // 2])
    np.testing.assert_array_equal(p.permuted_probs[:11], probs.ravel()[order])
    np.testing.assert_array_equal(p.expert_counts, [3, 4, 4])
    np.testing.assert_array_equal(p.expert_offsets, [0, 3, 7, 11])
    assert p.sorted_indices[4] == -1 and not p.permuted[11:].any()
    weights = np.where(ids >= 0, probs, 0).astype(np.float64)
    out = cubist.token_unpermute(p.permuted.astype(F32), p.sorted_indices, probs)
    close(out, tokens.astype(np.float64) * weights.sum(1, keepdims=True))

    d_rows = rng.standard_normal((12, 5)).astype(F32)
    d_tokens = cubist.token_permute_grad(d_rows, p.sorted_indices, 2)
    exact = np.zeros((6, 5))
    np.add.at(exact, order // 2, d_rows[:11].astype(np.float64))
    close(d_tokens, exact)
    d_out = rng.standard_normal((6, 5)).astype(F32)
    d_permuted, d_probs = cubist.token_unpermute_grad(
        d_out, p.sorted_indices, permuted=p.permuted.astype(F32), probs=probs
    )
    exact_rows = np.zeros((12, 5))
    exact_rows[:11] = d_out[order // 2].astype(np.float64) * probs.ravel()[order, None]
    close(d_permuted, exact_rows)
    close(d_probs, (ids >= 0) * (d_out.astype(np.float64) * tokens.astype(np.float64)).sum(1)[:, None])


@pytest.mark.parametrize(
    "options, rows",
    [
        ({"capacity": 2}, 6),
        ({"row_multiple": 4}, 20),
        ({"num_out_tokens": 5}, 5),
        ({"num_out_tokens": -3}, 8),
        ({"rows": (2, 6)}, 4),
    ],
)
def test_sizes_of_permuted_forms(rng, options, rows):
    tokens = rng.standard_normal((11, 3)).astype(F32)
    ids = (np.arange(11, dtype=np.int64) * 2) % 3
    assert cubist.token_permute(tokens, ids, 3, **options).permuted.shape == (rows, 3)


def test_padding_by_tokens(rng):
    tokens, weights = rng.standard_normal((5, 4)).astype(F32), rng.random((5, 3)).astype(F32)
    routing_map = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]], bool)
    p = cubist.token_permute(
        tokens,
        routing_map=routing_map,
        top_k=1,
        probs=weights,
        capacity=3,
        pad_with_tokens=True,
        row_tokens=True,
    )
    assert list(p.row_tokens) == [0, 2, 1, 1, 4, 0, 0, 1, 2]
    experts, back = np.repeat(np.arange(3), 3), {"row_tokens": p.row_tokens, "capacity": 3}
    row_weights = weights[p.row_tokens, experts]
    np.testing.assert_array_equal(p.permuted_probs, row_weights)
    exact = np.zeros((5, 4), np.float64)
    np.add.at(exact, p.row_tokens, p.permuted * row_weights[:, None])
    close(cubist.token_unpermute(p.permuted, probs=weights, **back), exact)
    sums = np.zeros((5, 4), np.float64)
    np.add.at(sums, p.row_tokens, p.permuted)
    close(cubist.token_unpermute(p.permuted, num_tokens=5, **back), sums)
    with pytest.raises(ValueError, match="token_unpermute: num_tokens is not given"):
        cubist.token_unpermute(p.permuted, **back)

    row_grad, exact_probs = rng.standard_normal(9).astype(F32), np.zeros((5, 3), F32)
    exact_probs[p.row_tokens, experts] = row_grad
    d_tokens, d_probs = cubist.token_permute_grad(
        p.permuted, permuted_probs_grad=row_grad, num_tokens=5, **back
    )
    close(d_tokens, sums)
    np.testing.assert_array_equal(d_probs, exact_probs)
    d_out, dots = rng.standard_normal((5, 4)).astype(F32), np.zeros((5, 3), np.float64)
    d_permuted, d_probs = cubist.token_unpermute_grad(d_out, permuted=p.permuted, probs=weights, **back)
    close(d_permuted, d_out[p.row_tokens] * row_weights[:, None])
    dots[p.row_tokens, experts] = (d_out[p.row_tokens] * p.permuted).sum(1)
    close(d_probs, dots)


def test_unpermute_adds_biases_and_residuals(rng):
    tokens, bias = rng.standard_normal((6, 5)).astype(F32), rng.standard_normal((3, 5)).astype(F32)
    residuals = [rng.standard_normal((6, 5)).astype(F32) for _ in range(2)]
    ids = np.array([[2, 0], [1, 2], [0, 1], [0, 2], [2, 1], [0, 1]], np.int32)
    probs = rng.random((6, 2)).astype(F32)
    p = cubist.token_permute(tokens, ids, 3)
    added = {"bias": bias, "topk_ids": ids}
    out = cubist.token_unpermute(
        p.permuted, p.sorted_indices, probs, residual=residuals[0], residual2=residuals[1], **added
    )
    weighted = (tokens[:, None].astype(np.float64) + bias[ids]) * probs[..., None]
    close(out, weighted.sum(1) + residuals[0] + residuals[1])
    d_out = rng.standard_normal((6, 5)).astype(F32)
    _, d_probs = cubist.token_unpermute_grad(
        d_out, p.sorted_indices, permuted=p.permuted, probs=probs, **added
    )
    close(d_probs, (d_out[:, None] * (tokens[:, None].astype(np.float64) + bias[ids])).sum(2))


def test_permute_by_map(rng):
    tokens = rng.standard_normal((5, 4)).astype(F32)
    routing_map = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]], bool)
    valid = np.array([1, 1, 1, 0, 1], bool)
    probs = rng.random((5, 3)).astype(F32)
    places = np.array([2, 0, 1], np.int32)
    p = cubist.token_permute(
        tokens,
        routing_map=routing_map,
        top_k=2,
        valid=valid,
        probs=probs,
        expert_places=places,
        row_tokens=True,
        expert_counts=True,
        device_counts=3,
    )
    routes = [(places[e], t, e) for t, e in zip(*np.nonzero(routing_map & valid[:, None]))]
    routes.sort()
    rows = [t for _, t, _ in routes]
    n = len(rows)
    assert p.permuted.shape == (10, 4) and list(p.row_tokens) == rows + [-1] * (10 - n)
    np.testing.assert_array_equal(p.permuted[:n], tokens[rows])
    np.testing.assert_array_equal(p.permuted_probs[:n], [probs[t, e] for _, t, e in routes])
    np.testing.assert_array_equal(p.expert_counts, p.device_counts)
    slots = {"routing_map": routing_map, "top_k": 2}
    out = cubist.token_unpermute(p.permuted, p.sorted_indices, probs, **slots)
    weights = (routing_map & valid[:, None]) * probs.astype(np.float64)
    close(out, tokens * weights.sum(1, keepdims=True))
    d_out = rng.standard_normal((5, 4)).astype(F32)
    _, d_probs = cubist.token_unpermute_grad(
        d_out, p.sorted_indices, permuted=p.permuted, probs=probs, **slots
    )
    mine = (d_out.astype(np.float64) * tokens).sum(1)[:, None] * (routing_map & valid[:, None])
    close(d_probs, mine)
    d_tokens, d_probs = cubist.token_permute_grad(
        p.permuted, p.sorted_indices, 2, permuted_probs_grad=p.permuted_probs, routing_map=routing_map
    )
    close(d_tokens, tokens.astype(np.float64) * (routing_map & valid[:, None]).sum(1, keepdims=True))
    close(d_probs, weights)
    kept = cubist.token_permute(
        tokens,
        routing_map=routing_map,
        top_k=2,
        probs=probs,
        capacity=1,
        capacity_keeps="highest",
        row_tokens=True,
    )
    best = np.where(routing_map, probs, -1).argmax(0)
    np.testing.assert_array_equal(kept.row_tokens, best)


def test_reorder_chunks(rng):
    counts = np.array([[1, 0, 2], [2, 3, 1]], np.int64)
    tokens, probs = rng.standard_normal((9, 3)).astype(F32), rng.random(9).astype(F32)
    r = cubist.reorder_chunks(tokens, counts, probs=probs, row_ids=True, expert_counts=True)
    chunks = groups_of(counts.ravel())
    order = np.concatenate([np.r_[chunks[n * 3 + e]] for e in range(3) for n in range(2)])
    np.testing.assert_array_equal(r.row_ids, order)
    np.testing.assert_array_equal(r.out, tokens[order])
    np.testing.assert_array_equal(r.out_probs, probs[order])
    np.testing.assert_array_equal(r.expert_counts, counts.sum(0))
    np.testing.assert_array_equal(cubist.reorder_chunks(r.out, counts, inverse=True).out, tokens)


def test_route_and_grad(rng):
    logits = rng.standard_normal((9, 8)).astype(F32)
    r = cubist.route(logits, 3, score="sigmoid", renormalise=True, scale=2.0, scores=True, counts=True)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(r.ids, ids)
    chosen = np.take_along_axis(scores, ids, 1)
    total = chosen.sum(1, keepdims=True)
    close(r.weights, 2 * chosen / total)
    close(r.scores, scores)
    np.testing.assert_array_equal(r.counts, np.bincount(ids.ravel(), minlength=8))
    assert r.aux_loss is None

    d_weights = rng.standard_normal((9, 3)).astype(F32)
    d_logits = cubist.route_grad(d_weights, r.ids, r.scores, score="sigmoid", renormalise=True, scale=2.0)
    d_chosen = 2 * (d_weights / total - (d_weights * chosen).sum(1, keepdims=True) / total**2)
    exact = np.zeros((9, 8))
    np.put_along_axis(exact, ids, d_chosen * chosen * (1 - chosen), 1)
    close(d_logits, exact)


@pytest.mark.parametrize("flags", [bool, np.uint8])
def test_route_of_valid_tokens(rng, flags):
    logits = rng.standard_normal((9, 8)).astype(F32)
    valid = np.array([1, 0, 1, 1, 0, 1, 1, 0, 1], flags)
    kept = valid != 0
    logits[~kept] = np.nan
    options = {"renormalise": True, "aux_coefficient": 0.5}
    wanted = {"scores": True, "counts": True, "aux_loss": True}
    r = cubist.route(logits, 3, valid=valid, **options, **wanted)
    alone = cubist.route(logits[kept], 3, **options, **wanted)
    np.testing.assert_array_equal(r.ids[kept], alone.ids)
    np.testing.assert_array_equal(r.weights[kept], alone.weights)
    np.testing.assert_array_equal(r.counts, alone.counts)
    close(r.aux_loss, alone.aux_loss)
    assert (r.ids[~kept] == -1).all() and not r.weights[~kept].any() and not r.scores[~kept].any()

    d_weights = rng.standard_normal((9, 3)).astype(F32)
    loss = {"counts": r.counts, "d_aux_loss": 2.0}
    d_logits = cubist.route_grad(d_weights, r.ids, r.scores, valid=valid, **loss, **options)
    close(d_logits[kept], cubist.route_grad(d_weights[kept], alone.ids, alone.scores, **loss, **options))
    assert not d_logits[~kept].any()
    with pytest.raises(ValueError, match="route: valid has size 8"):
        cubist.route(logits, 3, valid=valid[:8])


def test_weighting_of_the_caller(rng):
    logits = rng.standard_normal((9, 8)).astype(F32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :3]
    chosen = np.take_along_axis(scores, ids, 1)
    options = {
        "score": "sigmoid",
        "weighting": (lambda ids, scores: scores**2, lambda ids, scores, d_weights: 2 * scores * d_weights),
    }
    r = cubist.route(logits, 3, scores=True, **options)
    np.testing.assert_array_equal(r.ids, ids)
    close(r.weights, chosen**2)

    d_weights = rng.standard_normal((9, 3)).astype(F32)
    exact = np.zeros((9, 8))
    np.put_along_axis(exact, ids, d_weights * 2 * chosen * chosen * (1 - chosen), 1)
    close(cubist.route_grad(d_weights, r.ids, r.scores, **options), exact)

    with pytest.raises(ValueError, match="weighting gave 2 values for 3 routes"):
        cubist.route(logits, 3, weighting=lambda ids, scores: scores[:2])
    with pytest.raises(ZeroDivisionError):
        cubist.route(logits, 3, weighting=lambda ids, scores: 1 / 0)
    with pytest.raises(ValueError, match="weighting is 'square', needs a function"):
        cubist.route(logits, 3, weighting="square")
    with pytest.raises(ValueError, match="weighting"):
        cubist.route_grad(d_weights, r.ids, r.scores, score="sigmoid", weighting=options["weighting"][0])


def test_rms_norm_and_grad(rng):
    x, residual, d_out = (rng.standard_normal((7, 10)).astype(F32) for _ in range(3))
    gamma = rng.standard_normal(10).astype(F32)
    z = (x + residual).astype(np.float64)
    rstd = 1 / np.sqrt((z**2).mean(1) + 1e-3)
    out, total, r = cubist.rms_norm(x, gamma, residual=residual, eps=1e-3, rstd=True)
    close(out, z * rstd[:, None] * gamma)
    np.testing.assert_array_equal(total, x + residual)
    close(r, rstd)
    assert isinstance(cubist.rms_norm(x), np.ndarray)
    d_x, d_gamma = cubist.rms_norm_grad(d_out, total, r, gamma)
    g = d_out * gamma.astype(np.float64)
    close(d_x, rstd[:, None] * g - z * rstd[:, None] ** 3 * (g * z).mean(1, keepdims=True))
    close(d_gamma, (d_out * z * rstd[:, None]).sum(0))


def test_swiglu_and_grad(rng):
    both, d_out = rng.standard_normal((6, 16)).astype(F32), rng.standard_normal((6, 8)).astype(F32)
    probs = rng.random(6).astype(F32)
    gate, up = both[:, :8], both[:, 8:]
    s = 1 / (1 + np.exp(-gate.astype(np.float64)))
    close(cubist.swiglu(gate, up, probs=probs), gate * s * up * probs[:, None])
    g = cubist.swiglu_grad(d_out, gate, up, probs=probs)
    d = d_out * probs[:, None].astype(np.float64)
    close(g.d_gate, d * up * s * (1 + gate * (1 - s)))
    close(g.d_up, d * gate * s)
    close(g.d_probs, (d_out * gate * s * up).sum(1))


def test_moe_block_is_its_kernels(rng):
    t, h, f, e, k = 10, 12, 8, 4, 2
    w = {
        "norm": rng.random(h).astype(F32),
        "router": rng.standard_normal((h, e)).astype(F32),
        "gate_up": rng.standard_normal((e, h, 2 * f)).astype(F32),
        "down": rng.standard_normal((e, f, h)).astype(F32),
    }
    x = rng.standard_normal((t, h)).astype(F32)
    state = cubist.BlockState()
    out = cubist.moe_block(x, w, k, state=state, route={"renormalise": True}).out

    def by_hand(x):
        normed = cubist.rms_norm(x, w["norm"])
        r = cubist.route(cubist.matmul(normed, w["router"]), k, renormalise=True)
        p = cubist.token_permute(normed, r.ids, e, expert_counts=True)
        both = cubist.grouped_matmul(p.permuted, p.expert_counts, w["gate_up"])
        down = cubist.grouped_matmul(cubist.swiglu(both[:, :f], both[:, f:]), p.expert_counts, w["down"])
        return x + cubist.token_unpermute(down, p.sorted_indices, r.weights)

    close(out, by_hand(x), atol=1e-4)
    d_out = rng.standard_normal((t, h)).astype(F32)
    d_x, gradients = cubist.moe_block_grad(x, w, k, d_out, state, route={"renormalise": True})
    assert set(gradients) == set(w) and all(gradients[name].shape == w[name].shape for name in w)
    weighed = cubist.moe_block(x, w, k, state=state, route={"renormalise": True}, weighs_activation=True)
    close(weighed.out, out, atol=1e-4)
    weighed_d_x, _ = cubist.moe_block_grad(
        x, w, k, d_out, state, route={"renormalise": True}, weighs_activation=True
    )
    close(weighed_d_x, d_x, atol=1e-3)
    valid = np.arange(t) % 3 != 1
    masked = cubist.moe_block(x, w, k, valid=valid, state=state, route={"renormalise": True}).out
    np.testing.assert_array_equal(masked[~valid], x[~valid])
    close(masked[valid], out[valid], atol=1e-4)
    masked_d_x, _ = cubist.moe_block_grad(x, w, k, d_out, state, valid=valid, route={"renormalise": True})
    np.testing.assert_array_equal(masked_d_x[~valid], d_out[~valid])
    close(masked_d_x[valid], d_x[valid], atol=1e-3)
    step = rng.standard_normal((t, h)).astype(F32) * F32(1e-3)
    slope = (d_out.astype(np.float64) * (by_hand(x + step).astype(np.float64) - by_hand(x - step))).sum() / 2
    assert slope == pytest.approx((d_x.astype(np.float64) * step).sum(), rel=2e-2, abs=1e-4)


def test_a_router_of_floats_stands_beside_halves(rng):
    t, h, f, e, k = 10, 12, 8, 4, 2
    half = {
        "norm": rng.random(h).astype(np.float16),
        "gate_up": rng.standard_normal((e, h, 2 * f)).astype(np.float16),
        "down": rng.standard_normal((e, f, h)).astype(np.float16),
    }
    x, router = rng.standard_normal((t, h)).astype(np.float16), rng.standard_normal((h, e)).astype(F32)
    state = cubist.BlockState()
    out = cubist.moe_block(x, half | {"router": router}, k, state=state).out
    normed = cubist.rms_norm(x, half["norm"])
    r = cubist.route(cubist.matmul(normed.astype(F32), router), k)
    p = cubist.token_permute(normed, r.ids, e, expert_counts=True)
    both = cubist.grouped_matmul(p.permuted, p.expert_counts, half["gate_up"])
    down = cubist.grouped_matmul(cubist.swiglu(both[:, :f], both[:, f:]), p.expert_counts, half["down"])
    np.testing.assert_array_equal(out, x + cubist.token_unpermute(down, p.sorted_indices, r.weights))
    _, gradients = cubist.moe_block_grad(x, half | {"router": router}, k, x, state)
    assert gradients["router"].dtype == F32 and gradients["down"].dtype == np.float16


def test_loss_scaler():
    scaler = cubist.LossScaler(initial=8.0, growth_interval=1)
    gradients = [np.full(3, 16, np.float16), np.full((2, 2), 24, F32)]
    assert scaler.unscale(gradients)
    assert np.all(gradients[0] == 2) and np.all(gradients[1] == 3) and scaler.scale == 16
    gradients[1][0, 0] = np.inf
    assert not scaler.unscale(gradients)
    assert np.all(gradients[0] == 2) and scaler.scale == 8


def test_mla_block_is_its_kernels(rng):
    t, h, heads, d, dr, dv, rank = 9, 16, 2, 8, 4, 6, 10
    w = {
        "norm": rng.random(h).astype(F32),
        "q_up": rng.standard_normal((h, heads * (d + dr))).astype(F32),
        "kv_down": rng.standard_normal((h, rank + dr)).astype(F32),
        "kv_norm": rng.random(rank).astype(F32),
        "kv_up": rng.standard_normal((rank, heads * (d + dv))).astype(F32),
        "out": rng.standard_normal((heads * dv, h)).astype(F32),
    }
    x = rng.standard_normal((t, h)).astype(F32)
    normed = cubist.rms_norm(x, w["norm"])
    low = cubist.matmul(normed, w["kv_down"])
    q = cubist.matmul(normed, w["q_up"]).reshape(1, t, heads, d + dr).transpose(0, 2, 1, 3)
    kv = cubist.matmul(cubist.rms_norm(low[:, :rank], w["kv_norm"]), w["kv_up"])
    kv = kv.reshape(1, t, heads, d + dv).transpose(0, 2, 1, 3)
    y = cubist.flash_attention(
        q[..., :d],
        kv[..., :d],
        kv[..., d:],
        q_rope=q[..., d:],
        k_rope=low[None, None, :, rank:],
        causal="top_left",
    )
    exact = x + cubist.matmul(np.ascontiguousarray(y.transpose(0, 2, 1, 3)).reshape(t, heads * dv), w["out"])
    state = cubist.BlockState()
    close(cubist.mla_block(x, w, heads, state=state), exact, atol=1e-4)

    d_x, gradients = cubist.mla_block_grad(x, w, heads, np.ones_like(x), state)
    assert set(gradients) == set(w)
    names = ("q_up", "kv_down", "out")

    def forward(x, *weights):
        return cubist.mla_block(x, w | dict(zip(names, weights)), heads)

    slope_of(forward, (x, *(w[n] for n in names)), (d_x, *(gradients[n] for n in names)), rng, step=1e-3)


def test_bool_and_byte_arrays_are_known(rng):
    """They are refused by name where a kernel has no use for them."""
    a = np.ones((2, 2), F32)
    for narrow in (np.bool_, np.uint8):
        with pytest.raises(ValueError, match="matmul: b .*bool"):
            cubist.matmul(a, np.ones((2, 2), narrow))
