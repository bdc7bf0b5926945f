# SPDX-License-Identifier: Apache-2.0
"""nvfp4_gemv and nvfp4_linear (mma.sync, cp.async, clusters) on the emulator, against float64."""

import pytest
import torch
from support.dlpack_tensor import ExchangeTensor
from support.emulator import kernels, options

from tiercel.ops.gemv.reference import permute_scales
from tiercel.ops.quant.reference import nvfp4_values

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def codes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def scales(*shape):
    return (torch.rand(shape) + 0.05).to(torch.float8_e4m3fn)


def on_cpu(x):
    """Stays a CPU tensor for the launcher: the plain scales, which it only looks at."""
    given = {"strides": x.stride(), "address": x.data_ptr()}
    return ExchangeTensor(*x.shape, dtype="float8_e4m3fn", device="cpu", **given)


def values(q, scale):
    wide = nvfp4_values(q).double().unflatten(-1, (scale.shape[-1], 16))
    return (wide * scale.double()[..., None]).flatten(-2)


def assert_close(got, due):
    """One rounding to the result's type, and float32 sums."""
    unit = torch.finfo(got.dtype).eps / 2
    bound = 1.01 * unit * due.abs() + 1e-5 * due.square().mean().sqrt() + 2.0**-25
    assert ((got.double() - due).abs() <= bound).all()


@pytest.mark.parametrize(
    ("m", "k", "batches"), [(1, 32, 1), (7, 64, 3), (33, 1024, 1), (130, 2080, 2), (64, 7168, 1)]
)
def test_gemv(m, k, batches):
    a, b = codes(batches, m, k // 2).permute(1, 2, 0), codes(batches, 1, k // 2).permute(1, 2, 0)
    scale_a = scales(batches, m, k // 16).permute(1, 2, 0)
    scale_b = scales(batches, 1, k // 16).permute(1, 2, 0)
    c = torch.full((batches, m, 1), torch.nan, dtype=torch.float16).permute(1, 2, 0)
    permuted = permute_scales(scale_a), permute_scales(scale_b)
    kernels.nvfp4_gemv(a, b, on_cpu(scale_a), on_cpu(scale_b), *permuted, c)
    matrix = values(a.permute(2, 0, 1), scale_a.permute(2, 0, 1))
    vector = values(b.permute(2, 0, 1), scale_b.permute(2, 0, 1))
    assert_close(c.permute(2, 0, 1), matrix @ vector.mT)


def check_linear(tokens, features, k, factor=None, cut=()):
    x = torch.randn(tokens, k).bfloat16()
    weight, scale = codes(features, k // 2), scales(features, k // 16)
    out = torch.full((tokens, features), torch.nan, dtype=torch.bfloat16)
    kernels.nvfp4_linear(x, weight, scale, factor, out, *cut)
    truth = x.double() @ values(weight, scale).T
    assert_close(out, truth * (1 if factor is None else factor.double()))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(("features", "k"), [(8, 64), (200, 1024), (72, 2880), (520, 4096)])
def test_linear(tokens, features, k):
    check_linear(tokens, features, k)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize(
    "cut", [(1, 1, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2), (2, 4, 1, 2), (4, 1, 1, 2), (4, 3, 1, 2)]
)
def test_linear_of_several_turns_and_passes(tokens, cut):
    check_linear(tokens, 2200, 1280 if cut[:2] == (1, 1) else 1088, cut=(cut,))


# Blocks have 2 turns in groups of 1, or 3 in groups of 2 and 1; the last K also needs two sections.
@pytest.mark.parametrize(
    ("tokens", "features", "k", "cut"),
    [
        (8, 2216, 4608, (1, 1, 17, 2)),
        (9, 2200, 4864, (2, 1, 9, 2)),
        (9, 1000, 11520, (4, 1, 11, 2)),
    ],
)
def test_linear_of_several_groups(tokens, features, k, cut):
    check_linear(tokens, features, k, cut=(cut,))


def test_linear_in_any_order():
    for seed in (1, 2):
        with options(seed=seed):
            check_linear(1, 136, 2048, torch.tensor([0.3]))
            check_linear(5, 2200, 1280, torch.tensor([0.3]), cut=((2, 1, 2, 2),))
            check_linear(12, 136, 2880, cut=((1, 2, 4, 2),))
            check_linear(16, 300, 2048, cut=((4, 3, 2, 2),))
