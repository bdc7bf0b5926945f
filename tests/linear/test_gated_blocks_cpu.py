# SPDX-License-Identifier: Apache-2.0
"""gated_linear and fused_mlp with scales of blocks on any machine."""

import pytest
import torch
from support.float8 import dequantized
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

M, N, K = 5, 256, 304


def weights(rows, columns, seed=3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return tiercel.fp8_quantize(values, "128x128")


def layer():
    generator = torch.Generator().manual_seed(4)
    x8, x_scale = tiercel.fp8_quantize(torch.randn(M, K, generator=generator), "1x128")
    return x8, x_scale, *weights(2 * N, K), torch.randn(2 * N, generator=generator).bfloat16()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_values(activation):
    x, x_scale, w, w_scale, bias = layer()
    both = dequantized(x, x_scale, 1) @ dequantized(w, w_scale, 128).T + bias.double()
    gate, up = both.chunk(2, 1)
    gate = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    }[activation](gate)
    scales = {"x_scale": x_scale, "weight_scale": w_scale}
    got = tiercel.gated_linear(x, w, bias, activation=activation, **scales)
    torch.testing.assert_close(got.double(), gate * up, rtol=2**-8, atol=1e-4)
    out = torch.empty_like(got)
    given = {"activation": activation, "out": out, **scales}
    assert tiercel.gated_linear(x, w, bias, **given) is out and torch.equal(out, got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantises_on_the_way(dtype):
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, _, w, w_scale, bias = layer()
    x8, x_scale = tiercel.fp8_quantize(x.view(6, K), "1x128")
    due = tiercel.gated_linear(x8, w, bias, x_scale=x_scale, weight_scale=w_scale)
    got = tiercel.gated_linear(x, w, bias, weight_scale=w_scale)
    assert torch.equal(got, due.view(2, 3, N))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_mlp(gated, residual):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(M, K, generator=generator).bfloat16()
    (up, up_scale), (down, down_scale) = weights((1 + gated) * N, K), weights(K, N, 5)
    given = {"activation": "silu", "gated": gated, "residual": x if residual else None}
    got = tiercel.fused_mlp(x, up, down, up_scale=up_scale, down_scale=down_scale, **given)
    x8, x_scale = tiercel.fp8_quantize(x, "1x128")
    sums = dequantized(x8, x_scale, 1) @ dequantized(up, up_scale, 128).T
    hidden = functional.silu(sums)
    if gated:
        gate, other = sums.chunk(2, 1)
        hidden = functional.silu(gate) * other
    h8, h_scale = tiercel.fp8_quantize(hidden.bfloat16(), "1x128")
    due = dequantized(h8, h_scale, 1) @ dequantized(down, down_scale, 128).T
    due = due + x.double() if residual else due
    # A sum near a bfloat16's edge may be rounded to the other one, and so to another e4m3.
    torch.testing.assert_close(got.double(), due, rtol=2**-7, atol=2e-2)
    assert got.dtype == torch.bfloat16


def test_bad_arguments():
    x, x_scale, w, w_scale, bias = layer()
    with pytest.raises(ValueError, match="`weight_scale` must be given where `x_scale` is"):
        tiercel.gated_linear(x, w, bias, x_scale=x_scale)
    text = r"`x_scale` must have shape \[M, K / 128\] = \[5, 3\], got \[5, 2\]"
    with pytest.raises(ValueError, match=text):
        tiercel.gated_linear(x, w, bias, x_scale=x_scale[:, :2], weight_scale=w_scale)
    text = r"`weight_scale` must have shape \[2N / 128, K / 128\] = \[4, 3\], got \[2, 3\]"
    with pytest.raises(ValueError, match=text):
        tiercel.gated_linear(x, w, bias, x_scale=x_scale, weight_scale=w_scale[:2])
    with pytest.raises(TypeError, match="`weight` must have dtype float8_e4m3fn"):
        tiercel.gated_linear(x, w.bfloat16(), x_scale=x_scale, weight_scale=w_scale)
    with pytest.raises(TypeError, match="`bias` must have dtype bfloat16, got float32"):
        tiercel.gated_linear(x, w, bias.float(), x_scale=x_scale, weight_scale=w_scale)
    down, down_scale = weights(K, N)
    text = "fused_mlp: `down_scale` must be given where `up_scale` is, got None"
    with pytest.raises(ValueError, match=text):
        tiercel.fused_mlp(x.bfloat16(), w, down, up_scale=w_scale)
    text = "fused_mlp: `up_scale` must be given where `down_scale` is, got None"
    with pytest.raises(ValueError, match=text):
        tiercel.fused_mlp(x.bfloat16(), w, down, down_scale=down_scale)
