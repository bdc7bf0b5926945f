# SPDX-License-Identifier: Apache-2.0
"""The activations with PyTorch and without a GPU: references, public functions, registration."""

import pytest
import torch
from support.activation_truth import (
    FUNCTIONS,
    NORMAL,
    SLACK,
    allowed_of,
    assert_right,
    every_value,
    slope,
    value,
)
from torch.nn import functional

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

GATED = ["silu_and_mul", "gelu_and_mul", "relu_and_mul"]
PLAIN = ["silu", "gelu", "relu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


def rand(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_(grad)


def plain(name, x, **options):
    return getattr(functional, name.removesuffix("_and_mul"))(x, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_gated(name, dtype):
    x = rand(3, 5, 16, dtype=dtype)
    gate, up = x.chunk(2, -1)
    truth = plain(name, gate.double()) * up.double()
    result = getattr(tiercel, name)(x)
    assert result.dtype == dtype and result.is_contiguous()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), truth, rtol=eps, atol=1e-6)
    assert torch.equal(getattr(tiercel, name)(gate, up), result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_plain(name, dtype):
    for shape in ((3, 5, 7), (), (0, 3)):
        x = rand(*shape, dtype=dtype)
        result = getattr(tiercel, name)(x)
        assert result.shape == x.shape and result.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(result.double(), plain(name, x.double()), rtol=eps, atol=1e-6)


def test_approximations():
    x = rand(4, 16)
    for approximate in ("none", "tanh"):
        due = functional.gelu(x, approximate=approximate)
        torch.testing.assert_close(tiercel.gelu(x, approximate=approximate), due)
        gate, up = x.chunk(2, -1)
        due = functional.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(tiercel.gelu_and_mul(x, approximate=approximate), due)


@pytest.mark.parametrize("name", GATED + PLAIN)
def test_gradients(name):
    function = getattr(tiercel.ref, name)
    x = rand(3, 8, seed=1).double().requires_grad_()
    inputs = [(x,), (x, rand(3, 8, seed=2).double().requires_grad_())][: 1 + (name in GATED)]
    for tensors in inputs:
        assert torch.autograd.gradcheck(function, tensors)
        ours = [t.detach().float().requires_grad_() for t in tensors]
        result = getattr(tiercel, name)(*ours)
        grad = rand(*result.shape, seed=3)
        result.backward(grad)
        due = torch.autograd.grad(function(*tensors), tensors, grad.double())
        for tensor, expected in zip(ours, due, strict=True):
            torch.testing.assert_close(tensor.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GATED)
def test_gradients_and_the_result_again(name):
    options = ("tanh",) if "gelu" in name else ()
    grad, gate, up = (rand(2, 3, 8, seed=i) for i in range(3))
    for inputs in ((gate, up), (torch.cat([gate, up], -1), None)):
        given = (*inputs, *options, None)
        *slopes, result = getattr(torch.ops.tiercel, f"{name}_backward_and_result")(grad, *given)
        due = getattr(torch.ops.tiercel, f"{name}_backward")(grad, *given)
        assert all(map(torch.equal, slopes, due))
        assert torch.equal(result, getattr(torch.ops.tiercel, name)(*inputs, *options, None, None))


def test_gradients_of_gradients():
    x = rand(3, 8, grad=True)
    (first,) = torch.autograd.grad(tiercel.silu_and_mul(x).sum(), x, create_graph=True)
    first.square().sum().backward()
    wide = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(tiercel.ref.silu_and_mul(wide).sum(), wide, create_graph=True)
    first.square().sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GATED + PLAIN)
def test_float8(name):
    x, scale = rand(5, 16, dtype=torch.bfloat16), torch.tensor([0.01])
    result = getattr(tiercel, name)(x, scale=scale)
    assert result.dtype == FP8
    due = (getattr(tiercel.ref, name)(x.double()) / 0.01).clamp(-448, 448)
    torch.testing.assert_close(result.double(), due, rtol=2**-4, atol=2**-9)
    out = torch.empty(result.shape, dtype=FP8)
    assert getattr(tiercel, name)(x, scale=scale, out=out) is out
    assert torch.equal(out.float(), result.float())
    with pytest.raises(RuntimeError, match=f"^{name}: there is no derivative for a float8 result"):
        getattr(tiercel, name)(x.requires_grad_(), scale=scale)


def test_out():
    x = rand(5, 16)
    out = torch.empty(5, 8)
    version = out._version
    assert tiercel.silu_and_mul(x, out=out) is out and out._version > version
    assert torch.equal(out, tiercel.silu_and_mul(x))
    assert tiercel.relu(x, out=x) is x and (x >= 0).all()


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, r"`x` must have an even last dimension .* got \[5, 15\]", {"x": (5, 15)}),
        (ValueError, r"`scale` must have one element, got shape \[2\]", {"scale": (2,)}),
    ],
)
def test_bad_arguments(error, text, arguments):
    made = {
        name: torch.ones(1).double() if shape == "double" else torch.ones(shape)
        for name, shape in arguments.items()
    }
    with pytest.raises(error, match=f"^silu_and_mul: {text}"):
        tiercel.silu_and_mul(**({"x": rand(5, 16)} | made))


@pytest.mark.parametrize(
    ("columns", "text"),
    [(8, r"`grad` must have shape \[\.\.\., N\] = \[4, 4\]"), (7, "`x` must have an even")],
)
def test_bad_gradients(columns, text):
    backward = torch.ops.tiercel.silu_and_mul_backward
    with pytest.raises(ValueError, match=f"^silu_and_mul: {text}"):
        backward(rand(4, 8), rand(4, columns), None, backend="ref")


def test_modules():
    x = rand(4, 8)
    nn = tiercel.nn
    assert torch.equal(nn.SiluAndMul()(x), tiercel.silu_and_mul(x))
    assert torch.equal(nn.ReluAndMul()(x, x), tiercel.relu_and_mul(x, x))
    module = nn.GeluAndMul(approximate="tanh", backend="ref")
    assert torch.equal(module(x), tiercel.gelu_and_mul(x, approximate="tanh"))
    assert repr(module) == "GeluAndMul(approximate='tanh', backend='ref')"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_value(function, dtype):
    """Relative exactness in the tails, too, where torch.nn.functional's are 0 too early."""
    name, _, approximate = function.partition("_")
    options = {"approximate": approximate or "none"} if name == "gelu" else {}
    x = every_value(dtype)
    exact = value(function, x)
    slack = SLACK[function, dtype == torch.float32]
    result = getattr(tiercel, name)(x, **options)
    assert_right(result, exact, allowed_of(dtype, exact, slack))
    factor = torch.full_like(x, 16.0)
    gated = getattr(tiercel, f"{name}_and_mul")(x, factor, **options)
    assert_right(gated, 16 * exact, allowed_of(dtype, 16 * exact, slack, factor=16.0))

    x = x[x.isnan() | (x.abs() < 1e18)].requires_grad_()  # beyond, PyTorch's are NaN, too
    getattr(tiercel, name)(x, **options).backward(torch.ones_like(x))
    exact = slope(function, x.detach())
    allowed = allowed_of(dtype, exact, 4 * slack, smallest=8 * NORMAL)
    assert_right(x.grad, exact, allowed + ((x > -4) & (x < 1)) * 2.0**-19)


@pytest.mark.parametrize("function", FUNCTIONS[:3])
def test_second_derivatives(function):
    name, _, approximate = function.partition("_")
    options = {"approximate": approximate or "none"} if name == "gelu" else {}
    x = torch.tensor([-80.0, -9.0, -1.5, -0.25, 0.0, 0.25, 3.0, 30.0], dtype=torch.float64)
    x.requires_grad_()
    result = getattr(ref, name)(x, **options)
    (first,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wide = x.detach().requires_grad_()
    due = torch.autograd.grad(slope(function, wide).sum(), wide)[0]
    torch.testing.assert_close(first, slope(function, x), rtol=1e-9, atol=1e-30)
    torch.testing.assert_close(second, due, rtol=1e-9, atol=1e-12)
