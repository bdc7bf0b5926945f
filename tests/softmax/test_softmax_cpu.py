# SPDX-License-Identifier: Apache-2.0
"""softmax_online with PyTorch and without a GPU: reference, public function, registration."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

OPS = {"softmax_online": torch.softmax, "log_softmax": torch.log_softmax}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def rand(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_(grad)


def masks(*shape):
    keep = rand(*shape, seed=5) > -1
    keep[..., 0] = True
    return [None, keep, keep[..., :1, :], rand(*shape, seed=6), rand(shape[-1], seed=7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_values(op, dtype):
    for dim in (-1, 0, 1):
        for mask in masks(3, 4, 5):
            x = rand(3, 4, 5, dtype=dtype)
            scores = x.double() * 0.3
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -INF)
            elif mask is not None:
                scores = scores + mask
            result = getattr(tiercel, op)(x, dim, scale=0.3, mask=mask)
            assert result.dtype == dtype and result.is_contiguous()
            due = OPS[op](scores, dim)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(result.double(), due, rtol=eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_gradients(op):
    for mask in masks(3, 4, 5):
        floating = mask is not None and mask.dtype != torch.bool
        x = rand(3, 4, 5, grad=True)
        mask = mask.clone().requires_grad_() if floating else mask
        grad = rand(3, 4, 5, seed=1)
        if mask is not None and not floating:
            grad = grad * mask.expand(3, 4, 5)  # else 0 * -inf
        getattr(tiercel, op)(x, scale=0.3, mask=mask).backward(grad)
        wide = x.detach().double().requires_grad_()
        wide_mask = mask.detach().double().requires_grad_() if floating else mask
        reference = getattr(tiercel.ref, op)
        reference(wide, scale=0.3, mask=wide_mask).backward(grad.double())
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
        if floating:
            torch.testing.assert_close(mask.grad.double(), wide_mask.grad, rtol=1e-4, atol=1e-6)
            assert torch.autograd.gradcheck(
                lambda a, b, f=reference: f(a, scale=0.3, mask=b), (wide, wide_mask)
            )


def test_rows_without_scores():
    x = rand(3, 8, grad=True)
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[1] = False
    for op in OPS:
        x.grad = None
        result = getattr(tiercel, op)(x, mask=keep)
        assert result[1].isnan().all() and result[[0, 2]].isfinite().all()
        result[keep].sum().backward()
        assert (x.grad[1] == 0).all()


def test_gradients_of_gradients():
    for op, function in OPS.items():
        x = rand(3, 8, grad=True)
        (first,) = torch.autograd.grad(getattr(tiercel, op)(x)[:, 0].sum(), x, create_graph=True)
        first.square().sum().backward()
        wide = x.detach().double().requires_grad_()
        (first,) = torch.autograd.grad(function(wide, -1)[:, 0].sum(), wide, create_graph=True)
        first.square().sum().backward()
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_out():
    x = rand(5, 16)
    due = tiercel.softmax_online(x, scale=2.0)
    out = torch.empty(5, 16)
    assert tiercel.softmax_online(x, scale=2.0, out=out) is out and torch.equal(out, due)
    assert tiercel.softmax_online(x, scale=2.0, out=x) is x and torch.equal(x, due)
    with pytest.raises(RuntimeError, match="no derivative for `out=`"):
        tiercel.softmax_online(rand(5, 16, grad=True), out=out)


def test_set_backend():
    tiercel.set_backend("softmax_online", "ref")
    told = tiercel.explain(tiercel.softmax_online, rand(2, 8), mask=torch.ones(8).bool())
    assert told.backend == "ref"
    with pytest.raises(ValueError, match="softmax_online has no backend 'nothing'"):
        tiercel.set_backend("softmax_online", "nothing")


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "`dim` must be from -2 to 1, got 2 for shape", {"dim": 2}),
        (
            ValueError,
            r"`mask` must broadcast to the shape of `x`, \[5, 16\], got \[8\]",
            {"mask": torch.ones(8).bool()},
        ),
        (ValueError, r"`mask` must broadcast", {"mask": torch.ones(1, 5, 16).bool()}),
    ],
)
def test_bad_arguments(error, text, arguments):
    for op in OPS:
        with pytest.raises(error, match=f"^{op}: {text}"):
            getattr(tiercel, op)(**({"x": rand(5, 16)} | arguments))


def test_module():
    x, mask = rand(4, 8), rand(4, 8, seed=1) > -1
    module = tiercel.nn.SoftmaxOnline(scale=0.5, backend="ref")
    assert torch.equal(module(x, mask), tiercel.softmax_online(x, scale=0.5, mask=mask))
    assert repr(module) == "SoftmaxOnline(dim=-1, scale=0.5, backend='ref')"
