# SPDX-License-Identifier: Apache-2.0
"""fp8_linear on any machine: values, shapes of scales, errors, registration."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

FLOAT8 = torch.float8_e4m3fn
ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
M, N, K = 5, 24, 48


def layer():
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    bias = torch.randn(N, generator=generator).bfloat16()
    (x8, x_scale), (w8, w_scale) = tiercel.fp8_quantize(x), tiercel.fp8_quantize(weight)
    return x8, w8, x_scale, w_scale, bias


def exact(x, weight, x_scale, w_scale, bias=None, activation="none"):
    sums = (x.double() * x_scale.double()) @ (weight.double() * w_scale.double()).T
    return ACTIVATIONS[activation](sums if bias is None else sums + bias.double())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values(activation, with_bias):
    given = layer()[: 5 if with_bias else 4]
    result = tiercel.fp8_linear(*given, activation=activation)
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    truth = exact(*given, activation=activation)
    torch.testing.assert_close(result.double(), truth, rtol=2**-8, atol=1e-4)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    assert tiercel.fp8_linear(*given, activation=activation, out=out) is out
    assert torch.equal(out, result)


def test_scales_of_any_shape():
    x, weight, x_scale, w_scale, bias = layer()
    due = tiercel.fp8_linear(x, weight, x_scale, w_scale, bias)
    flat = tiercel.fp8_linear(x, weight, x_scale.view(-1), w_scale.view(1, N), bias)
    assert torch.equal(flat, due)
    cube = tiercel.fp8_linear(x.view(1, M, 1, K), weight, x_scale, w_scale, bias)
    assert torch.equal(cube.view(M, N), due)
    one = torch.tensor(0.5)
    truth = exact(x, weight, one, torch.tensor([[2.0]]), bias)
    result = tiercel.fp8_linear(x, weight, one, torch.tensor([[2.0]]), bias)
    torch.testing.assert_close(result.double(), truth, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (ValueError, r"`x_scale` must have 1 or M = 5 elements", {"x_scale": torch.ones(4)}),
        (ValueError, r"`weight_scale` must have 1 or N = 24", {"weight_scale": torch.ones(5)}),
    ],
)
def test_bad_arguments(error, text, changes):
    names = ("x", "weight", "x_scale", "weight_scale", "bias")
    with pytest.raises(error, match=f"^fp8_linear: {text}"):
        tiercel.fp8_linear(**(dict(zip(names, layer(), strict=True)) | changes))
