# SPDX-License-Identifier: Apache-2.0
"""fp8_linear with scales of blocks on an H100 or H200, against float64."""

import pytest
import torch
from support.float8 import dequantized
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def layer(m, n, k, with_bias=True):
    """Scales that differ by powers of ten from block to block."""
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda") * 10.0 ** (torch.arange(k, device="cuda") // 128 % 3)
    weight = torch.randn(n, k, device="cuda") * k**-0.5
    weight *= 10.0 ** -(torch.arange(n, device="cuda")[:, None] // 128 % 2)
    bias = torch.randn(n, device="cuda").bfloat16() if with_bias else None
    (x8, x_scale), (w8, w_scale) = (
        tiercel.fp8_quantize(values, kind) for values, kind in ((x, "1x128"), (weight, "128x128"))
    )
    return x8, w8, x_scale, w_scale, bias


def assert_near(out, x8, w8, x_scale, w_scale, bias, activation="none"):
    x, w = dequantized(x8, x_scale, 1), dequantized(w8, w_scale, 128)
    sums = x @ w.T
    truth = ACTIVATIONS[activation](sums if bias is None else sums + bias.double())
    # Half a unit of the result in bfloat16, and what the adders drop of 128 products: they keep 13
    # bits behind the largest of 32 and the sum so far. Float32 sums of these lose less.
    error = (out.double() - truth).abs()
    allowed = 2**-8 * truth.abs() + 1.13 * 2**-12 * (x.abs() @ w.abs().T)
    assert (error <= allowed).all(), (error / allowed).max().item()


def check(m, n, k, activation="none", with_bias=True):
    given = layer(m, n, k, with_bias)
    out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    tiercel.fp8_linear(*given, activation=activation, out=out)
    assert_near(out, *given, activation)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(activation, with_bias):
    for m, n, k in [(1, 8, 16), (5, 264, 144), (129, 520, 272), (1000, 1032, 1040)]:
        check(m, n, k, activation, with_bias)


@pytest.mark.parametrize("m", [1, 16, 64, 77, 128, 300, 1024, 2047])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2056, 1040), (1024, 8192), (2112, 7168)])
def test_sizes(m, n, k):
    check(m, n, k)


CONFIGS = [
    (64, 64, True),
    (64, 96, True),
    (128, 64, True),
    *((128, n, False) for n in (128, 144, 192, 256)),
]


@pytest.mark.parametrize(("tile_m", "tile_n", "split_k"), CONFIGS)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_every_kernel(tile_m, tile_n, split_k, splits):
    for m, n, k in [(3, 264, 1168), (200, 392, 1024), (513, 648, 1552)]:
        x8, w8, x_scale, w_scale, bias = layer(m, n, k)
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        config = (tile_m, tile_n, False, split_k, splits, 0)
        tiercel._C.fp8_linear(x8, w8, x_scale, w_scale, bias, out, 2, config)
        assert_near(out, x8, w8, x_scale, w_scale, bias, "silu")


@pytest.mark.parametrize("m", [7, 700])
def test_strides_zeros_and_nan(m):
    x8, w8, x_scale, w_scale, bias = layer(m, 392, 656)
    apart = torch.cat([x8, x8], 1)[:, :656]
    by_columns = x_scale.t().contiguous().t()
    due = tiercel.fp8_linear(x8, w8, x_scale, w_scale, bias)
    assert torch.equal(tiercel.fp8_linear(apart, w8, by_columns, w_scale, bias), due)
    assert torch.equal(tiercel.fp8_linear(x8[None], w8, x_scale[None], w_scale, bias)[0], due)
    x_scale[0], w_scale[1] = 0, 0  # all of row 0, and columns 128 to 255
    result = tiercel.fp8_linear(x8, w8, x_scale, w_scale, bias)
    assert torch.equal(result[0], bias)
    assert torch.equal(result[:, 128:256], bias[128:256].expand(m, 128))
    x_scale[3, 5] = torch.nan  # the last 16 of K
    result = tiercel.fp8_linear(x8, w8, x_scale, w_scale, bias)
    assert result[3].isnan().all() and result.isnan().sum() == 392


def test_quantises_on_the_way_and_in_a_graph():
    x = torch.randn(4, 9, 512, device="cuda", dtype=torch.bfloat16)
    _, w8, _, w_scale, bias = layer(36, 264, 512)
    x8, x_scale = tiercel.fp8_quantize(x.view(36, 512), "1x128")
    due = tiercel.fp8_linear(x8, w8, x_scale, w_scale, bias)
    assert torch.equal(tiercel.fp8_linear(x, w8, None, w_scale, bias).view(36, 264), due)
    out = torch.empty(4, 9, 264, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.fp8_linear(x, w8, None, w_scale, bias, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out.view(36, 264), due)
    assert tiercel.fp8_linear(x[:0], w8, None, w_scale).shape == (0, 9, 264)
