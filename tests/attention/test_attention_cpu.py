# SPDX-License-Identifier: Apache-2.0
"""attention with PyTorch and without a GPU: reference, public function, registration."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def make(length, heads=2, d=16, batch=2, dtype=torch.bfloat16, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(batch, length, heads, d, generator=generator)
    return drawn.to(dtype).requires_grad_(grad)


def arguments(seq_q=9, seq_k=9, kv_heads=2, heads=4, **options):
    q = make(seq_q, heads, seed=1, **options)
    return q, make(seq_k, kv_heads, seed=2, **options), make(seq_k, kv_heads, seed=3, **options)


def sdpa(q, k, v, mask=None, **options):
    """torch's own, on what our layout is for it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


def test_against_torch():
    tensors = arguments(dtype=torch.float64)
    ref = tiercel.ref.attention
    torch.testing.assert_close(ref(*tensors), sdpa(*tensors))
    torch.testing.assert_close(ref(*tensors, causal=True), sdpa(*tensors, is_causal=True))
    torch.testing.assert_close(ref(*tensors, scale=0.5), sdpa(*tensors, scale=0.5))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(9, 9), (3, 11), (11, 5), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0), (None, 3), (4, -1), (0, 0)])
def test_masks_by_definition(seq_q, seq_k, causal, window):
    q, k, v = arguments(seq_q, seq_k, dtype=torch.float64)
    result, lse = tiercel.ref.attention(q, k, v, causal=causal, window=window, return_lse=True)
    left, right = (seq_k + seq_q if x in (None, -1) else x for x in window or (None, None))
    if causal:
        right = 0
    for i in range(seq_q):
        own = i + seq_k - seq_q
        seen = [j for j in range(seq_k) if own - left <= j <= own + right]
        for head in range(4):
            scores = k[0, seen, head // 2] @ q[0, i, head] / 4
            if not seen:
                assert (result[0, i, head] == 0).all() and lse[0, head, i] == -torch.inf
                continue
            torch.testing.assert_close(lse[0, head, i], scores.logsumexp(0))
            torch.testing.assert_close(
                result[0, i, head], scores.softmax(0) @ v[0, seen, head // 2]
            )


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window": (3, 1)}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values(options, dtype):
    tensors = arguments(dtype=dtype)
    result, lse = tiercel.attention(*tensors, return_lse=True, **options)
    doubles = [x.double() for x in tensors]
    truth, sums = tiercel.ref.attention(*doubles, return_lse=True, **options)
    assert result.dtype == dtype and result.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 9)
    torch.testing.assert_close(result.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(tiercel.attention(*tensors, **options), result)


def test_out():
    tensors = arguments()
    expected, sums = tiercel.attention(*tensors, return_lse=True)
    out = torch.empty(2, 9, 8, 16, dtype=torch.bfloat16)[:, :, ::2]
    version = out._version
    assert tiercel.attention(*tensors, out=out) is out
    assert out._version > version and torch.equal(out, expected)
    same, lse = tiercel.attention(*tensors, out=out, return_lse=True)
    assert same is out and torch.equal(lse, sums)


@pytest.mark.parametrize("d_v", [8, 24])
def test_values_of_another_head_dimension(d_v):
    q, k, _ = arguments(dtype=torch.float64, grad=True)
    v = make(9, 2, d_v, dtype=torch.float64, seed=3, grad=True)
    for options, mask in (({}, {}), ({"causal": True}, {"is_causal": True})):
        due = sdpa(q, k, v, **mask)
        grad = make(9, 4, d_v, dtype=torch.float64, seed=4)
        torch.testing.assert_close(tiercel.ref.attention(q, k, v, **options), due)
        expected = torch.autograd.grad(due, (q, k, v), grad)
        halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        result, lse = tiercel.attention(*halves, return_lse=True, **options)
        assert result.shape == (2, 9, 4, d_v) and lse.shape == (2, 4, 9)
        torch.testing.assert_close(result.double(), due, rtol=2e-2, atol=2e-2)
        plain, out = [x.detach() for x in halves], torch.empty_like(result)
        tiercel.attention(*plain, out=out, **options)
        assert torch.equal(out, result)
        found = torch.autograd.grad(result, halves, grad.bfloat16())
        for one, truth in zip(found, expected, strict=True):
            assert (one.double() - truth).norm() / truth.norm() < 2e-2
    with pytest.raises(ValueError, match=r"`out` must have shape \[B, Sq, H, Dv\]"):
        tiercel.attention(*plain, out=torch.empty_like(plain[0]))


def test_compiled_values_of_another_head_dimension():
    q, k, _ = arguments()
    v = make(9, 2, 24, seed=3)
    compiled = torch.compile(lambda *x: tiercel.attention(*x, causal=True), fullgraph=True)
    assert torch.equal(compiled(q, k, v), tiercel.attention(q, k, v, causal=True))


def test_nothing_to_see():
    q, k, v = arguments(5, 0)
    result, lse = tiercel.attention(q, k, v, return_lse=True)
    assert (result == 0).all() and (lse == -torch.inf).all()
    assert tiercel.attention(*arguments(0, 5)).shape == (2, 0, 4, 16)
    q, k, v = arguments(9, 4, grad=True)
    tiercel.attention(q, k, v, causal=True).sum().backward()
    assert (q.grad[:, :5] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": (3, None)}, {"softcap": 2.0}]
)
@pytest.mark.parametrize("seq_k", [9, 12])
def test_gradients(options, seq_k):
    tensors = arguments(9, seq_k, grad=True)
    grad = make(9, 4, seed=4)
    tiercel.attention(*tensors, **options).backward(grad)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    tiercel.ref.attention(*doubles, **options).backward(grad.double())
    for tensor, double in zip(tensors, doubles, strict=True):
        error = (tensor.grad.double() - double.grad).norm() / double.grad.norm()
        assert tensor.grad.dtype == tensor.dtype and error < 2e-2


def test_gradients_of_both_outputs():
    tensors = arguments(grad=True)
    result, lse = tiercel.attention(*tensors, return_lse=True, causal=True)
    (result.sum() + lse.sum()).backward()
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    result, lse = tiercel.ref.attention(*doubles, return_lse=True, causal=True)
    (result.sum() + lse.sum()).backward()
    for tensor, double in zip(tensors, doubles, strict=True):
        assert (tensor.grad.double() - double.grad).norm() / double.grad.norm() < 2e-2


def test_gradcheck_of_the_reference():
    tensors = [x.requires_grad_() for x in arguments(3, 4, dtype=torch.float64, d=4)]
    for options in ({}, {"causal": True}, {"softcap": 2.0, "window": (1, 1)}):
        assert torch.autograd.gradcheck(
            lambda *x, o=options: tiercel.ref.attention(*x, return_lse=True, **o), tensors
        )


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            ValueError,
            "`k_descale` must be None unless `q` is float8_e4m3fn, got a tensor and `q` of bfl",
            {"k_descale": torch.ones(1)},
        ),
        (
            ValueError,
            "`k` must have a number of heads that divides that of `q`, 4, got 3",
            {"k": make(9, 3), "v": make(9, 3)},
        ),
        (ValueError, r"`window` must be None or \(left, right\), got 3", {"window": 3}),
        (ValueError, "`window` must hold whole numbers or None, got 1.5", {"window": (1.5, 0)}),
        (ValueError, "`scale` must be None or positive and finite, got 0", {"scale": 0}),
        (ValueError, "`softcap` must be None or positive and finite, got -1", {"softcap": -1}),
    ],
)
def test_bad_arguments(error, text, changes):
    given = dict(zip("qkv", arguments(), strict=True))
    for name, value in changes.items():
        given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(error, match=f"^attention: {text}"):
        tiercel.attention(**given)


def test_module():
    tensors = arguments()
    module = tiercel.nn.Attention(causal=True, softcap=5.0)
    expected = tiercel.attention(*tensors, causal=True, softcap=5.0)
    assert torch.equal(module(*tensors), expected)
    assert repr(module) == "Attention(causal=True, softcap=5.0)"
    with pytest.raises(ValueError, match="`softcap` must be None or positive"):
        tiercel.nn.Attention(softcap=0.0)
