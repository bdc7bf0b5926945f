# SPDX-License-Identifier: Apache-2.0
"""w4_linear with float8 activations on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options
from support.w4_weights import FORMATS, activated, draw

import tiercel

pytestmark = pytest.mark.torch

LAYOUTS = ["mxfp4", "int4-32", "int4-64-zero", "int4-128", "int4-128-zero"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def launch(x, weights, x_scale, bias=None, global_scale=None, activation=0, tiles=()):
    out = torch.full((len(x), len(weights.packed)), torch.nan, dtype=torch.bfloat16)
    kernels.w4_linear(
        *(x, weights.packed, weights.scale, weights.zero_point, global_scale, bias, x_scale, out),
        *(FORMATS.index(weights.format), activation, *tiles),
    )
    return out


def check(tokens, features, k, layout, lost=2.0**-16, dtype=torch.bfloat16, each=True, **more):
    """`lost`: by the adder, and by scales far below their row's largest."""
    weights = draw(layout, features, k, dtype, "cpu")
    x = torch.randn(tokens, k).to(torch.float8_e4m3fn)
    x_scale = torch.rand(tokens, 1) + 0.5 if each else torch.tensor(0.75)
    global_scale = torch.tensor([0.3]) if more.pop("scaled", False) else None
    bias = torch.randn(features).bfloat16() if more.pop("bias", False) else None
    got = launch(x, weights, x_scale, bias, global_scale, **more)
    factor = x_scale.double() * (1.0 if global_scale is None else global_scale.double())
    due = x.double() @ weights.values.T * factor
    magnitudes = x.double().abs() @ weights.values.abs().T * factor
    due = activated(more.get("activation", 0), due if bias is None else due + bias.double())
    error = (got.double() - due).abs()
    assert (error <= 1.1 * 2.0**-8 * due.abs() + lost * magnitudes + 2.0**-20).all(), error.max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_tiles(tokens, layout):
    check(tokens, 136, 384, layout, scaled=True, bias=True, activation=2)


@pytest.mark.parametrize(
    ("layout", "tiles"),
    [
        ("mxfp4", (32, 128, 1)),
        ("mxfp4", (128, 128, 4)),
        ("mxfp4", (256, 128, 2)),
        ("int4-32-zero", (32, 128, 2)),
        ("int4-64", (128, 128, 1)),
        ("int4-128", (32, 128, 4)),
        ("int4-128-zero", (128, 128, 2)),
    ],
)
def test_every_kernel(layout, tiles):
    k = 768 if "128" in layout else 576  # 576: the last stage is half empty
    check(tiles[0] + 3, 200, k, layout, tiles=(tiles,), bias=True, each=False)


@pytest.mark.parametrize("layout", ["mxfp4", "int4-128-zero"])
def test_short_adder(layout):
    """Adds as the GPU does: 13 bits behind the largest product."""
    with options(short_fp8_adder=True):
        check(40, 136, 1024, layout, lost=1.13 * 2.0**-11)


def test_float16_scales():
    check(20, 72, 256, "int4-64-zero", dtype=torch.float16)
    check(20, 72, 256, "int4-128-zero", dtype=torch.float16)


def test_in_any_order():
    for seed in (1, 2):
        with options(seed=seed):
            check(40, 130, 1408, "mxfp4", tiles=((128, 128, 4),), activation=3)
            check(40, 130, 1408, "int4-128-zero", tiles=((32, 128, 4),))


def exponents_of(distances):
    """MXFP4 weights, each row with all 16 codes in each group, and these distances of scales."""
    rows, groups = 16, len(distances)
    weights = draw("mxfp4", rows, 32 * groups, torch.bfloat16, "cpu")
    codes = torch.arange(32).add(torch.arange(rows)[:, None]) % 16
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    weights.packed.copy_(pairs.repeat(1, groups))
    weights.scale.copy_(140 - torch.tensor(distances, dtype=torch.uint8))
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(table + [-v for v in table]).double()[codes].repeat(1, groups)
    weights.values = numbers * (weights.scale.double() - 127).exp2().repeat_interleave(32, -1)
    return weights


def test_scales_down_to_2_to_minus_14_are_exact():
    """One value of x at a time, so that each result is a single product."""
    weights = exponents_of([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 14])
    k = weights.values.shape[1]
    for start in range(0, k, 256):
        x = torch.zeros(256, k)
        x[:, start : start + 256] = torch.eye(256)
        got = launch(x.to(torch.float8_e4m3fn), weights, torch.ones(1), tiles=((256, 128, 1),))
        assert torch.equal(got.double(), x.double() @ weights.values.T)


def test_smaller_scales_are_rounded_to_a_part_of_the_largest():
    weights = exponents_of([0, 15, 16, 17, 18, 19, 60, 140])
    k = weights.values.shape[1]
    x = torch.eye(k)
    got = launch(x.to(torch.float8_e4m3fn), weights, torch.ones(1))
    error = (got.double() - x.double() @ weights.values.T).abs()
    assert error.max() <= 2.0 ** (13 - 16)  # half of 2^-15 of the largest scale, 2^13
    assert (got[32 * 5 :] == 0).all()


def test_nan_stays_in_its_row_and_column():
    weights = draw("mxfp4", 40, 256, torch.bfloat16, "cpu")
    weights.scale[7, 3] = 255
    x = torch.randn(20, 256).to(torch.float8_e4m3fn)
    x[4, 9] = torch.nan
    got = launch(x, weights, torch.ones(1)).isnan()
    due = torch.zeros(20, 40, dtype=torch.bool)
    due[4], due[:, 7] = True, True
    assert torch.equal(got, due)


def test_scales_of_either_end():
    """2^-127, which is no normal number, and 2^127."""
    weights = draw("mxfp4", 8, 128, torch.bfloat16, "cpu")
    weights.packed.fill_(0x22)  # ones
    weights.scale.copy_(torch.tensor([0, 1, 2, 127, 128, 253, 254, 120])[:, None])
    x = torch.zeros(3, 128)
    x[:, 5] = 1.0
    got = launch(x.to(torch.float8_e4m3fn), weights, torch.ones(1))[0].double()
    assert torch.equal(got, (weights.scale[:, 0].double() - 127).exp2())


def test_any_zero_points():
    """Numbers that are no zero points read no memory but the tables."""
    weights = draw("int4-64-zero", 40, 256, torch.bfloat16, "cpu")
    odd = [-1.0, 16.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 3.5]
    weights.zero_point[:8] = torch.tensor(odd)[:, None]
    x = torch.randn(20, 256).to(torch.float8_e4m3fn)
    got = launch(x, weights, torch.ones(1))[:, 8:].double()
    due = x.double() @ weights.values[8:].T
    assert (got - due).abs().max() <= 2.0**-8 * due.abs().max()


@pytest.mark.parametrize("layout", ["mxfp4", "int4-64"])
def test_bits_of_a_row_in_the_batch_invariant_mode(layout):
    weights = draw(layout, 72, 320, torch.bfloat16, "cpu")
    x = torch.randn(130, 320).to(torch.float8_e4m3fn)
    x_scale = torch.rand(130, 1) + 0.5
    with options(short_fp8_adder=True), tiercel.batch_invariant():
        together = launch(x, weights, x_scale)
        for row in (0, 100, 129):
            alone = launch(x[row : row + 1], weights, x_scale[row : row + 1])
            assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16))
