# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_weight_grad's kernels on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options

pytestmark = pytest.mark.torch

NARROW, WIDE = "128x128", "128x256"
# Rows and columns of the result, tokens. The wide tiles need more of the narrow ones than there are
# multiprocessors.
SHAPES = [
    ((300, 136, 272), NARROW),
    ((1, 8, 16), NARROW),
    ((129, 264, 1296), NARROW),
    ((1410, 1672, 144), WIDE),
]


def operands(n, k, tokens, by_tokens=True):
    """Operands and scales, and the operands in float64."""
    generator = torch.Generator().manual_seed(n + k + tokens)
    made, wide = [], []
    for rows in (n, k):
        values = torch.randn(rows, tokens, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-tokens // 128), rows, generator=generator)
        made.append((values, scale if by_tokens else scale.t().contiguous().t()))
        wide.append(values.double() * scale.t().double().repeat_interleave(128, 1)[:, :tokens])
    (grad, grad_scale), (x, x_scale) = made
    return (grad, x, grad_scale, x_scale), *wide


def assert_near(result, grad, x, before=0.0):
    """Half a unit of the result, and of float32 sums."""
    truth = grad @ x.T + before
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs() - 1.02 * unit * truth.abs()
    assert (error <= 2**-20 * (grad.abs() @ x.abs().T)).all()


@pytest.mark.parametrize(("shape", "tile"), SHAPES)
@pytest.mark.parametrize("by_tokens", [True, False])
def test_values(shape, tile, by_tokens):
    given, *wide = operands(*shape, by_tokens)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(shape[:2], torch.nan, dtype=dtype)
        assert tile in kernels.fp8_linear_weight_grad_plan(*given, out, False)["kernel"]
        kernels.fp8_linear_weight_grad(*given, out, False)
        assert_near(out, *wide)


@pytest.mark.parametrize(("shape", "tile"), SHAPES)
def test_adds(shape, tile):
    given, *wide = operands(*shape)
    before = torch.randn(shape[:2], generator=torch.Generator().manual_seed(1)) * 10
    total = before.clone()
    assert tile in kernels.fp8_linear_weight_grad_plan(*given, total, True)["kernel"]
    kernels.fp8_linear_weight_grad(*given, total, True)
    assert_near(total, *wide, before.double())


@pytest.mark.parametrize("by_tokens", [True, False])
def test_rows_of_two_launches(by_tokens):
    """Three clusters, of four tiles one below the other."""
    shape = (1000, 256, 2064)
    given, *wide = operands(*shape, by_tokens)
    (grad, x, *scales) = given
    apart = torch.cat([grad, grad], 1)[:, : grad.shape[1]]
    before = torch.randn(shape[:2], generator=torch.Generator().manual_seed(1)) * 10
    with options(multiprocessors=6):
        for first in (grad, apart):
            given = (first, x, *scales)
            total, out = before.clone(), torch.full(shape[:2], torch.nan, dtype=torch.bfloat16)
            plan = kernels.fp8_linear_weight_grad_plan(*given, total, True)
            assert WIDE in plan["kernel"] and plan["rows"] == 768
            kernels.fp8_linear_weight_grad(*given, total, True)
            kernels.fp8_linear_weight_grad(*given, out, False)
            assert_near(total, *wide, before.double())
            assert_near(out, *wide)
    whole = torch.empty(shape[:2])
    parts = torch.empty(shape[:2])
    kernels.fp8_linear_weight_grad(*given, whole, False)
    with options(multiprocessors=6):
        kernels.fp8_linear_weight_grad(*given, parts, False)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with options(lazy=seed != 2, seed=seed):
        test_adds((129, 264, 1296), NARROW)
        test_adds((1410, 1672, 144), WIDE)


def test_rows_apart_zero_scales_and_nan():
    (grad, x, grad_scale, x_scale), *wide = operands(70, 264, 400)
    grad = torch.cat([grad, grad], 1)[:, :400]
    out = torch.full((70, 264), 5.0)
    kernels.fp8_linear_weight_grad(grad, x, grad_scale, x_scale, out, False)
    assert_near(out, *wide)
    grad_scale[:, 0], x_scale[:, 1], grad_scale[3, 3] = 0, 0, torch.nan
    kernels.fp8_linear_weight_grad(grad, x, grad_scale, x_scale, out, False)
    assert not out[0].any() and not out[4:, 1].any()
    assert out[3].isnan().all() and out.isnan().sum() == 264


def test_short_sums_of_the_tensor_cores():
    given, *wide = operands(128, 256, 1024)
    out = torch.full((128, 256), torch.nan)
    with options(short_fp8_adder=True):
        kernels.fp8_linear_weight_grad(*given, out, False)
    truth, sizes = wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T
    assert 2**-18 < ((out.double() - truth).abs() / sizes).max() <= 2**-12
