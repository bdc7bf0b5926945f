# SPDX-License-Identifier: Apache-2.0
"""linear_act with PyTorch and without a GPU: reference, public function, registration."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import tiercel
from tiercel.core import platform
from tiercel.ops.linear.kernels import LINEAR_ACT

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
DTYPES = [torch.bfloat16, torch.float16]


def make(*shape, dtype=torch.bfloat16, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / 2).to(dtype).requires_grad_(grad)


def arguments(dtype=torch.bfloat16, grad=False):
    return (
        make(5, 16, dtype=dtype, seed=1, grad=grad),
        make(24, 16, dtype=dtype, seed=2, grad=grad),
        make(24, dtype=dtype, seed=3, grad=grad),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values(dtype, activation, with_bias):
    x, weight, bias = arguments(dtype)
    bias = bias if with_bias else None
    result = tiercel.linear_act(x, weight, bias, activation=activation)
    truth = x.double() @ weight.double().T
    if with_bias:
        truth = truth + bias.double()
    truth = ACTIVATIONS[activation](truth)
    # Rounded to the dtype twice, before and after the activation (of slope at most 1.13).
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), truth, rtol=2 * eps, atol=2 * eps)
    assert result.dtype == dtype and result.is_contiguous()


def test_leading_dimensions():
    x, weight, bias = make(2, 3, 4, 16), make(24, 16), make(24)
    result = tiercel.linear_act(x, weight, bias)
    assert result.shape == (2, 3, 4, 24)
    flat = tiercel.linear_act(x.view(-1, 16), weight, bias)
    torch.testing.assert_close(result.view(-1, 24), flat)
    assert tiercel.linear_act(x[0, 0, 0], weight, bias).shape == (24,)
    assert tiercel.linear_act(x[:, :0], weight, bias).shape == (2, 0, 4, 24)


@pytest.mark.parametrize("with_bias", [True, False])
def test_out(with_bias):
    x, weight, bias = arguments()
    bias = bias if with_bias else None
    out = torch.empty(5, 24, dtype=x.dtype)
    version = out._version
    assert tiercel.linear_act(x, weight, bias, out=out) is out
    assert out._version > version
    assert torch.equal(out, tiercel.linear_act(x, weight, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients(activation, with_bias):
    tensors = arguments(grad=True)[: 3 if with_bias else 2]
    grad = make(5, 24, seed=4)
    tiercel.linear_act(*tensors, activation=activation).backward(grad)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    ACTIVATIONS[activation](functional.linear(*doubles)).backward(grad.double())
    for tensor, double in zip(tensors, doubles, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        torch.testing.assert_close(tensor.grad.double(), double.grad, rtol=0.05, atol=0.05)


def test_only_the_gradients_that_are_asked_for():
    x, weight, bias = arguments()
    weight.requires_grad_()
    tiercel.linear_act(x, weight, bias).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None


@pytest.mark.parametrize("with_out", [True, False])
def test_eager_calls_reach_the_kernels_without_python(monkeypatch, with_out):
    calls = []
    op = LINEAR_ACT.out if with_out else LINEAR_ACT.operator
    fake = replace(LINEAR_ACT._sm90, run=lambda *args: calls.append(("native", args)))
    monkeypatch.setattr(platform, "ready", {-1})
    direct = op._eager_call(
        lambda *args: calls.append(("python", args)),
        LINEAR_ACT._eager(fake, op.argument_names[:-1]),
        op._call,
    )
    x, weight, bias = arguments()
    residual, out = make(5, 24), torch.empty(5, 24, dtype=x.dtype)
    outs = (out,) if with_out else ()

    def call(x, residual):
        version = out._version
        result = direct(x, weight, bias, "gelu", residual, *outs, "sm90")
        assert out._version == version + with_out
        (name, args), *more = calls
        calls.clear()
        assert not more
        return name, [out if result is not None and arg is result else arg for arg in args]

    for given in (None, residual):
        name, args = call(x, given)
        assert name == "native" and len(args) == 7
        assert args[0] is x and args[2] is bias and args[3] is given
        assert args[4] is out and args[5] is None and args[6] == 3
    assert call(x, residual.T.contiguous().T)[0] == "python"
    assert call(x[None], None)[0] == "python"


def test_module():
    module = tiercel.nn.LinearAct(16, 24, activation="relu", dtype=torch.bfloat16)
    linear = torch.nn.Linear(16, 24, dtype=torch.bfloat16)
    module.load_state_dict(linear.state_dict())
    x = make(2, 5, 16)
    torch.testing.assert_close(module(x), functional.relu(linear(x)))
    assert "activation='relu'" in repr(module)
    with pytest.raises(ValueError, match="`activation` must be one of"):
        tiercel.nn.LinearAct(16, 24, activation="tanh")
