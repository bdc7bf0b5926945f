# SPDX-License-Identifier: Apache-2.0
"""The norms with PyTorch and without a GPU: reference, public functions, registration."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ["rms_norm", "layer_norm"]


@pytest.fixture(params=OPS)
def op(request):
    return getattr(tiercel, request.param)


def make(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def tensors(dtype=torch.float32, grad=False, rows=5, columns=24):
    return {
        "x": make(rows, columns, dtype=dtype, seed=1, grad=grad),
        "weight": make(columns, dtype=dtype, seed=2, grad=grad),
        "bias": make(columns, dtype=dtype, seed=3, grad=grad),
        "residual": make(rows, columns, dtype=dtype, seed=4, grad=grad),
    }


def truth(op, x, weight=None, bias=None, residual=None, eps=1e-5):
    """By torch itself, in float64; the sum is rounded as the op rounds it."""
    total = x if residual is None else x + residual
    shape = x.shape[-1:]
    wide = [None if t is None else t.double() for t in (weight, bias)]
    if op is tiercel.layer_norm:
        return functional.layer_norm(total.double(), shape, *wide, eps)
    result = functional.rms_norm(total.double(), shape, wide[0], eps)
    return result if bias is None else result + wide[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("with_residual", [True, False])
def test_values(op, dtype, given, with_residual):
    every = tensors(dtype)
    names = [*given, *(["residual"] if with_residual else [])]
    options = {name: every[name] for name in names}
    result = op(every["x"], eps=1e-5, **options)
    if with_residual:
        result, total = result
        assert torch.equal(total, every["x"] + every["residual"])
    eps = torch.finfo(dtype).eps
    expected = truth(op, every["x"], **options)
    torch.testing.assert_close(result.double(), expected, rtol=2 * eps, atol=4 * eps)
    assert result.dtype == dtype and result.is_contiguous()


def test_the_default_eps(op):
    x = make(3, 8) * 1e-3
    eps = 1e-5 if op is tiercel.layer_norm else 1e-6
    torch.testing.assert_close(op(x), op(x, eps=eps))


def test_float32_parameters(op):
    x, weight, bias = make(3, 40, dtype=torch.bfloat16), make(40), make(40, seed=5)
    result = op(x, weight, bias, eps=1e-5)
    assert result.dtype == torch.bfloat16
    expected = truth(op, x, weight, bias)
    torch.testing.assert_close(result.double(), expected, rtol=4e-3, atol=4e-3)


def test_leading_dimensions(op):
    x, weight = make(2, 3, 4, 16), make(16)
    result = op(x, weight)
    assert result.shape == x.shape
    torch.testing.assert_close(result.view(-1, 16), op(x.view(-1, 16), weight))
    torch.testing.assert_close(op(x[0, 0, 0], weight), result[0, 0, 0])
    assert op(x[:, :0], weight).shape == (2, 0, 4, 16)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("given", [(), ("weight",), ("weight", "bias")])
def test_out(op, given, with_residual):
    every = tensors()
    x, residual = every["x"], every["residual"] if with_residual else None
    options = {name: every[name] for name in given}
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    version = out._version
    if with_residual:
        result = op(x, **options, residual=residual, out=(out, total))
        assert result[0] is out and result[1] is total
        expected, expected_total = op(x, **options, residual=residual)
        assert torch.equal(total, expected_total)
    else:
        assert op(x, **options, out=out) is out
        expected = op(x, **options)
    assert out._version > version
    assert torch.equal(out, expected)


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("with_residual", [True, False])
def test_gradients(op, given, with_residual):
    names = ["x", *given, *(["residual"] if with_residual else [])]
    every = {n: t.double().requires_grad_() for n, t in tensors(rows=3, columns=5).items()}

    def function(*values):
        return getattr(tiercel.ref, op.__name__)(**dict(zip(names, values, strict=True)), eps=1e-5)

    values = tuple(every[name] for name in names)
    torch.autograd.gradcheck(function, values)
    single = {n: every[n].detach().float().requires_grad_() for n in names}
    results = op(**single, eps=1e-5)
    expected = function(*values)
    results = results if with_residual else (results,)
    expected = expected if with_residual else (expected,)
    upstream = [make(3, 5, seed=7 + i) for i in range(len(results))]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(expected, [u.double() for u in upstream])
    for name in names:
        torch.testing.assert_close(
            single[name].grad.double(), every[name].grad, rtol=1e-4, atol=1e-5
        )


def test_only_the_gradients_that_are_asked_for(op):
    every = tensors()
    every["weight"].requires_grad_()
    op(every["x"], every["weight"], every["bias"]).sum().backward()
    assert every["weight"].grad is not None
    assert every["x"].grad is None and every["bias"].grad is None


def test_gradient_of_the_sum_alone(op):
    every = tensors(grad=True)
    _, total = op(**every)
    total.backward(torch.ones_like(total))
    assert torch.equal(every["x"].grad, torch.ones_like(total))
    assert torch.equal(every["residual"].grad, torch.ones_like(total))
    assert every["weight"].grad is None or not every["weight"].grad.any()


def test_second_derivative(op):
    x = make(3, 6, grad=True)
    (first,) = torch.autograd.grad(op(x).square().sum() + op(x).sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (ValueError, r"`x` must have at least 1 column, got \[5, 0\]", {"x": make(5, 0)}),
        (
            TypeError,
            r"with `residual`, `out` must be a pair \(out, residual_out\), got Tensor",
            {"residual": make(5, 24), "out": make(5, 24)},
        ),
    ],
)
def test_bad_arguments(op, error, text, changes):
    arguments = {"x": make(5, 24), "weight": None, "bias": None} | changes
    with pytest.raises(error, match=f"^{op.__name__}: {text}"):
        op(**arguments)


def test_modules():
    x = make(2, 5, 16)
    layer, torch_layer = tiercel.nn.LayerNorm(16), torch.nn.LayerNorm(16)
    rms, torch_rms = tiercel.nn.RMSNorm(16, eps=1e-6), torch.nn.RMSNorm(16, eps=1e-6)
    for ours, theirs in ((layer, torch_layer), (rms, torch_rms)):
        torch.nn.init.normal_(theirs.weight)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))
        result, total = ours(x, x)
        torch.testing.assert_close(total, 2 * x)
        torch.testing.assert_close(result, theirs(2 * x))
        assert "16" in repr(ours) and "eps" in repr(ours)
    with pytest.raises(ValueError, match="`normalized_shape` must be one size"):
        tiercel.nn.RMSNorm([4, 4])
    with pytest.raises(ValueError, match="`eps` must not be negative"):
        tiercel.nn.LayerNorm(4, eps=-1.0)


def test_explain(op):
    x = make(4, 8)
    assert tiercel.explain(op, x).backend == "ref"
