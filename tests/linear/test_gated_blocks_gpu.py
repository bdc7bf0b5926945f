# SPDX-License-Identifier: Apache-2.0
"""gated_linear and fused_mlp with scales of blocks on an H100 or H200, against float64."""

import pytest
import torch
from support.float8 import dequantized
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

GATES = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def layer(m, n, k, with_bias=True):
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda") * 10.0 ** (torch.arange(k, device="cuda") // 128 % 2)
    weight = torch.randn(2 * n, k, device="cuda") * k**-0.5
    weight *= 10.0 ** -(torch.arange(2 * n, device="cuda")[:, None] // 128 % 2)
    bias = torch.randn(2 * n, device="cuda").bfloat16() if with_bias else None
    return *tiercel.fp8_quantize(x, "1x128"), *tiercel.fp8_quantize(weight, "128x128"), bias


def assert_near(out, x8, x_scale, w8, w_scale, bias, activation="silu"):
    x, w = dequantized(x8, x_scale, 1), dequantized(w8, w_scale, 128)
    sums, terms = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        sums += bias.double()
    (gate, up), (of_gate, of_up) = sums.chunk(2, 1), terms.chunk(2, 1)
    gate = GATES[activation](gate)
    error = (out.double() - gate * up).abs()
    # Half a unit of the result, and what the adders drop of 128 products, times the slopes.
    lost = 2**-12 * (1.13 * up.abs() * of_gate + gate.abs() * of_up)
    allowed = 2**-8 * (gate * up).abs() + 1.13 * lost
    assert (error <= allowed).all(), (error / allowed).max().item()


def check(m, n, k, activation="silu", with_bias=True):
    x8, x_scale, w8, w_scale, bias = given = layer(m, n, k, with_bias)
    out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    scales = {"x_scale": x_scale, "weight_scale": w_scale}
    tiercel.gated_linear(x8, w8, bias, activation=activation, out=out, **scales)
    assert_near(out, *given, activation)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(activation, with_bias):
    for m, n, k in [(1, 128, 16), (5, 256, 144), (129, 384, 272), (1000, 1024, 1040)]:
        check(m, n, k, activation, with_bias)


@pytest.mark.parametrize("m", [1, 16, 64, 77, 128, 300, 1024, 2047])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (2048, 7168), (18432, 1024)])
def test_sizes(m, n, k):
    check(m, n, k)


@pytest.mark.parametrize("tile", [(64, 64, True), (128, 128, False), (128, 256, False)])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_every_kernel(tile, splits):
    for m, n, k in [(3, 256, 1168), (200, 384, 1024), (513, 640, 1552)]:
        x8, x_scale, w8, w_scale, bias = given = layer(m, n, k)
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        config = (*tile[:2], False, tile[2], splits if tile[2] else 1, 0)
        tiercel._C.gated_linear_fp8(x8, w8, x_scale, w_scale, bias, out, 2, config)
        assert_near(out, *given)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("m", [1, 64, 1000])
def test_mlp_in_a_graph(m, gated):
    torch.manual_seed(m)
    x = torch.randn(m, 1024, device="cuda").bfloat16()
    made = []
    for rows, columns in (((1 + gated) * 2048, 1024), (1024, 2048)):
        weight = torch.randn(rows, columns, device="cuda") * columns**-0.5
        made.append(tiercel.fp8_quantize(weight, "128x128"))
    (up, up_scale), (down, down_scale) = made
    given = {"gated": gated, "up_scale": up_scale, "down_scale": down_scale, "residual": x}
    due = tiercel.fused_mlp(x, up, down, **given)
    wide_up, wide_down = dequantized(up, up_scale, 128), dequantized(down, down_scale, 128)
    sums = x.double() @ wide_up.T
    hidden = functional.silu(sums)
    if gated:
        gate, other = sums.chunk(2, 1)
        hidden = functional.silu(gate) * other
    truth = hidden @ wide_down.T + x.double()
    # x and what is between the products are rounded to e4m3, by 2^-4 at most.
    error = (due.double() - truth).square().mean().sqrt()
    assert error <= 2**-4 * truth.square().mean().sqrt()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tiercel.fused_mlp(x, up, down, **given)
    graph.replay()
    assert torch.equal(out, due)
