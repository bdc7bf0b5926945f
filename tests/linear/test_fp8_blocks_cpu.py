# SPDX-License-Identifier: Apache-2.0
"""fp8_linear with scales of blocks on any machine: values, shapes of scales, errors."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

M, N, K = 5, 200, 304  # blocks that are not whole: 2 by 3 of the weight


def layer(m=M, n=N, k=K):
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator).bfloat16()
    x8, x_scale = tiercel.fp8_quantize(x, "1x128")
    w8, w_scale = tiercel.fp8_quantize(weight * k**-0.5, "128x128")
    return x8, w8, x_scale, w_scale, bias


def exact(x, weight, x_scale, w_scale, bias):
    (m, k), n = x.shape, weight.shape[0]
    truth = bias.double().repeat(m, 1)
    for first in range(0, k, 128):
        part = slice(first, first + 128)
        products = x[:, part].double() @ weight[:, part].double().T
        of_w = w_scale[:, first // 128].double()[torch.arange(n) // 128]
        truth += products * x_scale[:, first // 128, None].double() * of_w
    return truth


@pytest.mark.parametrize("shape", [(M, N, K), (1, 8, 16), (3, 128, 16384), (2, 256, 128)])
def test_values(shape):
    given = layer(*shape)
    truth = functional.silu(exact(*given))
    result = tiercel.fp8_linear(*given, activation="silu")
    torch.testing.assert_close(result.double(), truth, rtol=2**-8, atol=1e-4)
    out = torch.empty_like(result)
    assert tiercel.fp8_linear(*given, activation="silu", out=out) is out
    assert torch.equal(out, result)


def test_scales_with_batch_dimensions_and_any_strides():
    x, weight, x_scale, w_scale, bias = layer()
    due = tiercel.fp8_linear(x, weight, x_scale, w_scale, bias)
    by_columns = x_scale.t().contiguous().t()
    assert torch.equal(tiercel.fp8_linear(x, weight, by_columns, w_scale, bias), due)
    for scale in (x_scale, x_scale.view(M, 1, 3)):
        result = tiercel.fp8_linear(x.view(M, 1, K), weight, scale, w_scale, bias)
        assert torch.equal(result.view(M, N), due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantises_on_the_way(dtype):
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, weight, _, w_scale, bias = layer()
    x8, x_scale = tiercel.fp8_quantize(x.view(6, K), "1x128")
    due = tiercel.fp8_linear(x8, weight, x_scale, w_scale, bias)
    result = tiercel.fp8_linear(x, weight, None, w_scale, bias)
    assert torch.equal(result, due.view(2, 3, N))
    assert tiercel.fp8_linear(x[:0], weight, None, w_scale).shape == (0, 3, N)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            ValueError,
            r"`x_scale` must have shape \[M, K / 128\] = \[5, 3\], got \[5, 2\]",
            {"x_scale": torch.ones(5, 2)},
        ),
        (
            ValueError,
            r"`x_scale` must have shape \[M, K / 128\] = \[5, 3\], got \[5, 1\]",
            {"x_scale": torch.ones(5, 1)},
        ),
        (
            ValueError,
            r"`weight_scale` must have shape \[N / 128, K / 128\] = \[2, 3\], got \[200, 1\]",
            {"weight_scale": torch.ones(200, 1)},
        ),
        (
            ValueError,
            r"`x_scale` must have 1 or M = 5 elements, got shape \[5, 2\]",
            {"x_scale": torch.ones(5, 2), "weight_scale": torch.ones(3, 2)},
        ),
        (
            TypeError,
            "`x_scale` must be a torch.Tensor, got NoneType",
            {"x_scale": None},
        ),
        (
            ValueError,
            r"`weight_scale` must have shape \[N / 128, K / 128\] = \[2, 3\], got \[1\]",
            {
                "x": torch.ones(5, K, dtype=torch.bfloat16),
                "x_scale": None,
                "weight_scale": torch.ones(1),
            },
        ),
    ],
)
def test_bad_arguments(error, text, changes):
    names = ("x", "weight", "x_scale", "weight_scale", "bias")
    with pytest.raises(error, match=f"^fp8_linear: {text}"):
        tiercel.fp8_linear(**(dict(zip(names, layer(), strict=True)) | changes))
