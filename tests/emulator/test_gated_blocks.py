# SPDX-License-Identifier: Apache-2.0
"""gated_linear with scales of blocks on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options
from support.float8 import dequantized
from torch.nn import functional

pytestmark = pytest.mark.torch

GATES = {  # by their numbers
    2: functional.silu,
    3: functional.gelu,
    4: lambda x: functional.gelu(x, approximate="tanh"),
}
TILES = [(64, 64, True), (128, 128, False), (128, 256, False)]


def drawn(m, n, k):
    """x, weight, their scales and a bias, and x and weight in float64. Scales of the halves differ
    by a power of ten."""
    generator = torch.Generator().manual_seed(m + n + k)
    made, wide = [], []
    for rows, down in ((m, 1), (2 * n, 128)):
        values = torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // down), -(-k // 128), generator=generator) * k**-0.25
        if down > 1:
            scale[: n // 128] /= 10
        made.append((values, scale))
        wide.append(dequantized(values, scale, down))
    (x, x_scale), (w, w_scale) = made
    return x, w, x_scale, w_scale, torch.randn(2 * n, generator=generator).bfloat16(), *wide


def assert_near(out, x, w, bias, act, lost=2.0**-18):
    """One rounding of the result. `lost`: of the magnitudes of a sum's terms."""
    sums, terms = x @ w.T, x.abs() @ w.abs().T
    (gate, up), (of_gate, of_up) = (
        (values if bias is None else values + add).chunk(2, 1)
        for values, add in (
            (sums, None if bias is None else bias.double()),
            (terms, None if bias is None else bias.double().abs()),
        )
    )
    truth = GATES[act](gate) * up
    # An activation's slope is below 1.13.
    sizes = 1.13 * up.abs() * of_gate + GATES[act](gate).abs() * of_up
    error = (out.double() - truth).abs()
    allowed = 2**-8 * truth.abs() + lost * sizes + 1e-6
    assert (error <= allowed).all(), (error / allowed).max()


def run(m, n, k, tile, act=2, with_bias=True, splits=1, columns=False, **more):
    x, w, x_scale, w_scale, bias, wide_x, wide_w = drawn(m, n, k)
    bias = bias if with_bias else None
    y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    x_scale = x_scale.t().contiguous().t() if columns else x_scale
    *shape, split_k = tile
    config = (*shape, False, split_k, splits if split_k else 1, 0)
    arguments = (x, w, x_scale, w_scale, bias, y, act, config)
    name = f"gated_linear_blocks_fp8_{shape[0]}x{shape[1]}"
    assert name in kernels.gated_linear_fp8_plan(*arguments)["kernel"]
    kernels.gated_linear_fp8(*arguments)
    assert_near(y, wide_x, wide_w, bias, act, **more)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("act", GATES)
def test_gates(tile, act):
    for m, n, k, splits in (
        (5, 256, 656, 3),
        (300, 128, 272, 1),
        (1, 128, 16, 1),
        (70, 384, 1024, 2),
    ):
        run(m, n, k, tile, act, splits=splits)
        run(m, n, k, tile, act, with_bias=False, splits=splits, columns=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with options(lazy=seed != 2, seed=seed):
        for tile in TILES:
            run(150, 256, 656, tile)


@pytest.mark.parametrize("tile", TILES[1:], ids=lambda t: f"{t[0]}x{t[1]}")
def test_several_tiles_of_a_block(tile):
    for seed in (1, 2):
        with options(seed=seed, multiprocessors=2):
            run(200, 640, 256, tile)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_short_adder(tile):
    """Adds as the GPU does: 13 bits behind the largest product."""
    with options(short_fp8_adder=True):
        run(64, 128, 1024, tile, lost=2.0**-12)


@pytest.mark.parametrize("m", [1, 33, 128, 1000])
def test_the_chosen_kernel(m):
    x, w, x_scale, w_scale, bias, wide_x, wide_w = drawn(m, 256, 400)
    y = torch.full((m, 256), torch.nan, dtype=torch.bfloat16)
    kernels.gated_linear_fp8(x, w, x_scale, w_scale, bias, y, 2)
    assert_near(y, wide_x, wide_w, bias, 2)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_zero_scales_and_nan(tile):
    x, w, x_scale, w_scale, _, _, _ = drawn(70, 256, 400)
    w_scale[1] = 0  # gates of the columns from 128 on
    w_scale[2] = torch.nan  # what the gates of the columns before are for
    y = torch.full((70, 256), 5.0, dtype=torch.bfloat16)
    *shape, split_k = tile
    kernels.gated_linear_fp8(x, w, x_scale, w_scale, None, y, 2, (*shape, False, split_k, 1, 0))
    assert y[:, :128].isnan().all() and not y[:, 128:].any()
