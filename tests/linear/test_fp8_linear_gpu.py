# SPDX-License-Identifier: Apache-2.0
"""fp8_linear on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def check(m, n, k, activation="none", with_bias=True, granularity="row"):
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda")
    weight = torch.randn(n, k, device="cuda") * k**-0.5
    bias = torch.randn(n, device="cuda").bfloat16() if with_bias else None
    (x8, x_scale) = tiercel.fp8_quantize(x, granularity)
    (w8, w_scale) = tiercel.fp8_quantize(weight, granularity)
    out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    tiercel.fp8_linear(x8, w8, x_scale, w_scale, bias, activation=activation, out=out)
    sums = (x8.double() * x_scale.double()) @ (w8.double() * w_scale.double()).T
    truth = ACTIVATIONS[activation](sums if bias is None else sums + bias.double())
    # Half a unit of the result in bfloat16, and what the tensor cores' adders drop: they keep 13
    # bits behind the largest of 32 products and the sum so far, which costs 2**-11.5 of the
    # products' magnitudes in a model of them; an activation's slope is at most 1.13.
    error = (out.double() - truth).abs()
    magnitudes = (x8.double() * x_scale.double()).abs() @ (w8.double() * w_scale.double()).abs().T
    allowed = 2**-8 * truth.abs() + 1.13 * 2**-11 * magnitudes
    assert (error <= allowed).all(), (error / allowed).max().item()
    if m * n >= 4096:
        assert error.square().mean() <= (3 * 2**-9) ** 2 * truth.square().mean()


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(activation, with_bias):
    for m, n, k in [(1, 8, 16), (5, 264, 144), (129, 520, 272), (1000, 1032, 1040)]:
        check(m, n, k, activation, with_bias)


@pytest.mark.parametrize("m", [1, 16, 64, 77, 128, 300, 1024, 2047])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2056, 1040), (1024, 8192)])
def test_sizes(m, n, k):
    check(m, n, k)
    check(m, n, k, granularity="tensor")


def test_in_a_graph_and_not_aligned():
    x8, x_scale = tiercel.fp8_quantize(torch.randn(32, 256, device="cuda"))
    w8, w_scale = tiercel.fp8_quantize(torch.randn(64, 256, device="cuda"))
    due = tiercel.fp8_linear(x8, w8, x_scale, w_scale)
    out = torch.empty_like(due)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.fp8_linear(x8, w8, x_scale, w_scale, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, due)
    assert tiercel.fp8_linear(x8[:0], w8, x_scale[:0], w_scale).shape == (0, 64)
    narrow = (x8[:, :24].contiguous(), w8[:, :24].contiguous())
    with pytest.warns(tiercel.FallbackWarning, match="multiple of 16"):
        tiercel.fp8_linear(*narrow, x_scale, w_scale)
