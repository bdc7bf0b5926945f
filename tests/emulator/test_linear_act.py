# SPDX-License-Identifier: Apache-2.0
"""linear_act's kernels (TMA, clusters with multicast, wgmma) on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options
from torch.nn import functional

pytestmark = pytest.mark.torch

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def check(m, n, k, act="none", dtype=torch.bfloat16, bias=True, expected=""):
    generator = torch.Generator().manual_seed(m + n + k)

    def rand(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, w = rand(m, k), rand(n, k, scale=k**-0.5)
    b = rand(n) if bias else None
    y = torch.full((m, n), torch.nan, dtype=dtype)
    arguments = (x, w, b, y, list(ACTIVATIONS).index(act))
    assert expected in kernels.linear_act_plan(*arguments)["kernel"]
    kernels.linear_act(*arguments)
    sums = x.double() @ w.double().T + (b.double() if bias else 0)
    truth = ACTIVATIONS[act](sums)
    # Half a unit of the result, and of sums and activation in float32.
    unit = torch.finfo(dtype).eps / 2
    error = (y.double() - truth).abs() - unit * truth.abs()
    assert error.max() <= 2e-5 * sums.abs().max()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations(act, dtype):
    check(70, 136, 200, act, dtype)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), "split_k"),
        ((3, 4096, 1032), "64x32_split_k"),
        ((17, 264, 4096), "split_k"),
        ((129, 1000, 520), "split_k"),
        ((1000, 1032, 72), "128"),
        ((1100, 2056, 64), "128"),
        ((300, 4104, 136), ""),
    ],
)
def test_shapes(shape, expected):
    check(*shape, expected=expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with options(lazy=seed != 2, seed=seed):
        check(260, 520, 328, "gelu")
        check(20, 520, 2056, "silu")


def test_no_bias():
    check(33, 72, 264, bias=False)
