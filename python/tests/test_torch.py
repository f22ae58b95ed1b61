"""cubist.torch: gradients by gradcheck, and against PyTorch's own operators."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cubist  # noqa: E402
import cubist.torch as ct  # noqa: E402

DOUBLE = torch.float64


class InDouble(torch.autograd.Function):
    """Lets gradcheck, which perturbs doubles, see an fp32 function and its gradients: both are computed in fp32."""

    @staticmethod
    def forward(ctx, function, *inputs):
        with torch.enable_grad():
            ctx.inputs = [x.detach().float().requires_grad_() for x in inputs]
            ctx.out = function(*ctx.inputs)
        return ctx.out.detach().double()

    @staticmethod
    def backward(ctx, d_out):
        gradients = torch.autograd.grad(ctx.out, ctx.inputs, d_out.float(), retain_graph=True)
        return None, *(g.double() for g in gradients)


def check(function, *inputs):
    """Central differences with eps = 2^-6. Their error is eps^2 / 6 of the third derivative (for these inputs, of order
    one, at most a few: below 4e-4), and fp32's rounding of about 2^-24 * 16 of the values, divided by eps: below 1e-4.
    """
    inputs = [x.double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda *x: InDouble.apply(function, *x), inputs, eps=2.0**-6, atol=2e-3, rtol=2e-3, nondet_tol=0.0
    )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def randn(*shape):
    return 0.5 * torch.randn(*shape)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_gradcheck(causal):
    q, k, v = randn(1, 2, 5, 6), randn(1, 1, 7, 6), randn(1, 1, 7, 4)
    check(lambda q, k, v: ct.flash_attention(q, k, v, causal=causal), q, k, v)


def test_attention_with_rope_parts_gradcheck():
    q, k, q_rope, k_rope = randn(1, 2, 4, 6), randn(1, 2, 4, 6), randn(1, 2, 4, 2), randn(1, 1, 4, 2)
    check(
        lambda q, k, q_rope, k_rope: ct.flash_attention(q, k, k, q_rope=q_rope, k_rope=k_rope, window=(2, 1)),
        q, k, q_rope, k_rope,
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_matmul_gradcheck(transposed):
    groups = torch.tensor([2, 0, 3], dtype=torch.int32)
    weights = randn(3, 4, 5) if transposed else randn(3, 5, 4)
    check(lambda x, w: ct.grouped_matmul(x, groups, w, transpose_weights=transposed), randn(6, 5), weights)


def test_permute_and_unpermute_gradcheck():
    ids = torch.tensor([[0, 2], [1, 0], [2, -1]], dtype=torch.int32)

    def there_and_back(tokens, probs):
        p = ct.token_permute(tokens, ids, 3, probs=probs)
        return ct.token_unpermute(p.permuted * p.permuted_probs[:, None], p.sorted_indices, probs)

    check(there_and_back, randn(3, 4), torch.rand(3, 2))


def test_permute_with_capacity_gradcheck():
    ids = torch.tensor([0, 0, 0, 1], dtype=torch.int64)
    check(lambda x: ct.token_permute(x, ids, 2, capacity=2).permuted, randn(4, 3))


def test_rows_gradcheck():
    check(lambda g, u, p: ct.swiglu(g, u, probs=p), randn(3, 4), randn(3, 4), torch.rand(3))
    check(lambda x, g: ct.rms_norm(x, g, eps=1e-2), randn(3, 4), randn(4))


@pytest.mark.parametrize(
    "dtype, roundoff", [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]
)
@pytest.mark.parametrize("sq, skv, causal", [(64, 64, True), (40, 100, False), (1, 90, False)])
def test_as_scaled_dot_product_attention(dtype, roundoff, sq, skv, causal):
    """Values and gradients, each set against PyTorch's in double by the error that PyTorch itself makes in this dtype:
    ours stays within twice its largest, or within two roundings of the largest value."""
    q, k, v = (randn(2, 4, n, 32).to(dtype) for n in (sq, skv, skv))
    d_out = randn(2, 4, sq, 32).to(dtype)

    def run(attention, dtype):
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(dtype))]

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    exact, theirs = run(sdpa, DOUBLE), run(sdpa, dtype)
    ours = run(lambda q, k, v: ct.flash_attention(q, k, v, causal=causal), dtype)
    for name, e, t, o in zip(("out", "dq", "dk", "dv"), exact, theirs, ours):
        assert o.dtype == dtype
        their_error, our_error = (t.double() - e).abs().max(), (o.double() - e).abs().max()
        assert our_error <= max(2 * their_error, 2 * roundoff * e.abs().max()), name


def test_grouped_heads_need_no_repetition():
    q, k, v = randn(1, 8, 33, 16), randn(1, 2, 33, 16), randn(1, 2, 33, 16)
    out = ct.flash_attention(q, k, v, causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), is_causal=True
    )
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_views_and_sums():
    """What autograd hands back may be expanded or strided."""
    q = randn(2, 20, 3, 16).requires_grad_()
    x = q.transpose(1, 2)
    ct.flash_attention(x, x, x, causal=True).sum().backward()
    ours, q.grad = q.grad.clone(), None
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    torch.testing.assert_close(ours, q.grad, rtol=1e-4, atol=1e-4)


def test_the_example_trains_as_the_unfused_block(capsys):
    import importlib.util
    import pathlib

    path = pathlib.Path(__file__).parents[1] / "examples" / "moe_block.py"
    example = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location("moe_block", path)
    )
    spec.loader.exec_module(example)
    plain, fused = example.train(example.PlainMoe, steps=6), example.train(example.FusedMoe, steps=6)
    assert plain[-1] < 0.9 * plain[0]
    for a, b in zip(plain, fused):
        assert a == pytest.approx(b, rel=2e-4)


def test_attention_with_bias_sinks_and_soft_cap_gradcheck():
    q, k, v = randn(1, 2, 4, 6), randn(1, 2, 4, 6), randn(1, 2, 4, 6)
    bias, sinks = randn(1, 1, 4, 4), randn(2)

    def attention(q, k, v, bias, sinks):
        return ct.flash_attention(q, k, v, bias=bias, sinks=sinks, soft_cap=2.0, causal=True)

    check(attention, q, k, v, bias, sinks)


def test_attention_with_a_mask_is_pytorchs():
    q, k, v = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
    shown = torch.rand(2, 1, 9, 9) < 0.7
    shown[..., 0] = True
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    expected = torch.autograd.grad(theirs.sum(), (q, k, v))
    ours = ct.flash_attention(q, k, v, mask=~shown)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    for mine, their in zip(torch.autograd.grad(ours.sum(), (q, k, v)), expected):
        torch.testing.assert_close(mine, their, atol=5e-6, rtol=1e-5)


def test_permute_by_map_gradcheck():
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)

    def there_and_back(tokens, probs):
        p = ct.token_permute(tokens, routing_map=routing_map, top_k=2, probs=probs)
        weighted = p.permuted * p.permuted_probs[:, None]
        return ct.token_unpermute(weighted, p.sorted_indices, probs, routing_map=routing_map, top_k=2)

    check(there_and_back, randn(4, 5), torch.rand(4, 3) + 0.5)


@pytest.mark.parametrize("options", [{}, {"top_k": 0}])
def test_permute_by_map_without_routes(options):
    tokens, probs = randn(4, 5).requires_grad_(), torch.rand(4, 3).requires_grad_()
    routing_map = torch.zeros(4, 3, dtype=torch.bool)
    p = ct.token_permute(tokens, routing_map=routing_map, probs=probs, **options)
    assert p.permuted.shape == (0, 5) and p.sorted_indices.shape == (0,) and p.permuted_probs.shape == (0,)
    assert p.expert_counts.tolist() == [0, 0, 0]
    (p.permuted.sum() + p.permuted_probs.sum()).backward()
    torch.testing.assert_close(tokens.grad, torch.zeros(4, 5))
    torch.testing.assert_close(probs.grad, torch.zeros(4, 3))


def test_padding_by_tokens_gradcheck():
    """Rows beyond an expert's tokens are other tokens, which take part in the sums and in the gradients."""
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)

    def there_and_back(tokens, probs):
        p = ct.token_permute(
            tokens, routing_map=routing_map, top_k=2, probs=probs, capacity=3, pad_with_tokens=True
        )
        weighted = p.permuted * p.permuted_probs[:, None]
        return ct.token_unpermute(weighted, probs=probs, row_tokens=p.row_tokens, capacity=3)

    check(there_and_back, randn(4, 5), torch.rand(4, 3) + 0.5)


def test_reorder_chunks_gradcheck():
    counts = torch.tensor([[1, 2], [2, 1]], dtype=torch.int32)

    def reorder(tokens, probs):
        out, out_probs = ct.reorder_chunks(tokens, counts, probs=probs)
        return out * out_probs[:, None] * torch.arange(1, 7)[:, None]

    check(reorder, randn(6, 3), randn(6))


@pytest.mark.parametrize("weighted", [False, True])
def test_unpermute_with_bias_and_residuals_gradcheck(weighted):
    """Two tokens of three routes each; one has no row, one has a row that this rank does not hold."""
    rows, ids = torch.tensor([1, -1, 4, 2, 0, 3], dtype=torch.int32), torch.tensor([[0, 1, 2], [1, 0, 2]])
    inputs = [randn(4, 5), randn(3, 5), randn(2, 5), randn(2, 5)] + [torch.rand(2, 3)] * weighted

    def finalize(permuted, bias, residual, residual2, probs=None):
        added = {"bias": bias, "topk_ids": ids.int(), "residual": residual, "residual2": residual2}
        return ct.token_unpermute(permuted, rows, probs, top_k=3, **added)

    check(finalize, *inputs)


def test_the_bias_of_an_unpermute_over_a_range_of_rows():
    rows, ids = torch.tensor([0, 3, 2, 1], dtype=torch.int32), torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    bias = randn(2, 3).requires_grad_()
    ct.token_unpermute(randn(2, 3), rows, bias=bias, topk_ids=ids[:, None], rows=(2, 4)).sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([[0.0] * 3, [2.0] * 3]))


def test_a_residual_alone_has_a_gradient():
    residual = randn(2, 3).requires_grad_()
    out = ct.token_unpermute(randn(2, 3), torch.tensor([1, 0], dtype=torch.int32), residual=residual)
    out.backward(d_out := randn(2, 3))
    torch.testing.assert_close(residual.grad, d_out)


def test_plain_functions_say_that_they_give_no_gradients():
    a = torch.ones(2, 2, requires_grad=True)
    text = r"matmul: b requires a gradient, which this function does not give: pass b\.detach\(\), or call .* cubist.torch"
    with pytest.raises(ValueError, match=text):
        cubist.matmul(a.detach(), a)
    with pytest.raises(ValueError, match="matmul: c requires a gradient"):
        cubist.matmul(a.detach(), a.detach(), out=a)
    with torch.no_grad():
        torch.testing.assert_close(cubist.matmul(a, a), 2 * torch.ones(2, 2))
