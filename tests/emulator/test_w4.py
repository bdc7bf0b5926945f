# SPDX-License-Identifier: Apache-2.0
"""w4_linear (wgmma with weights in registers, TMA, clusters) on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options
from support.w4_weights import FORMATS, activated, draw

import tiercel

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def check(tokens, features, k, layout, dtype=torch.bfloat16, activation=0, tiles=(), **more):
    weights = draw(layout, features, k, dtype, "cpu")
    x = torch.randn(tokens, k).to(dtype)
    global_scale = torch.tensor([0.3]) if more.get("scaled") else None
    bias = torch.randn(features).to(dtype) if more.get("bias") else None
    out = torch.full((tokens, features), torch.nan, dtype=dtype)
    kernels.w4_linear(
        x,
        weights.packed,
        weights.scale,
        weights.zero_point,
        global_scale,
        bias,
        None,
        out,
        FORMATS.index(weights.format),
        activation,
        *tiles,
    )
    due = x.double() @ weights.values.T
    magnitudes = x.double().abs() @ weights.values.abs().T
    if global_scale is not None:
        due, magnitudes = due * global_scale.double(), magnitudes * global_scale.double()
    if bias is not None:
        due = due + bias.double()
    due = activated(activation, due)
    # Weights times scales of int4 are rounded, and the result is.
    unit = torch.finfo(dtype).eps / 2
    lost = unit / 4 if weights.format == "int4" else 2.0**-18
    error = (out.double() - due).abs()
    assert (error <= 1.1 * unit * due.abs() + lost * magnitudes + 2.0**-20).all(), error.max()


LAYOUTS = ["nvfp4", "mxfp4", "int4-32", "int4-64", "int4-128", "int4-128-zero"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "features", "k"), [(1, 40, 384), (5, 72, 512), (16, 40, 384)])
def test_few_tokens(tokens, features, k, layout):
    check(tokens, features, k, layout, bias=True, activation=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [17, 40])
def test_tiles(tokens, layout):
    check(tokens, 136, 384, layout, scaled=True)


@pytest.mark.parametrize("layout", ["nvfp4", "int4-64"])
@pytest.mark.parametrize(
    "tiles",
    [(32, 128, 1), (64, 128, 5), (96, 128, 3), (128, 128, 4), (256, 128, 1), (256, 128, 3)],
)
def test_every_kernel(layout, tiles):
    check(tiles[0] + 3, 200, 576, layout, tiles=(tiles,), bias=True, activation=1)


@pytest.mark.parametrize("layout", ["nvfp4", "int4-32-zero"])
def test_float16(layout):
    check(3, 72, 320, layout, dtype=torch.float16, bias=True)


def test_tiles_behind_the_last_wave():
    check(17 * 32 - 5, 1020, 192, "mxfp4", tiles=((32, 128, 1, 2),), bias=True)


def test_192_tokens():
    check(195, 200, 576, "mxfp4", tiles=((192, 128, 2),), bias=True, activation=1)


# Stages are used several times, by groups that run ahead of each other.
@pytest.mark.parametrize("tokens", [32, 64, 96, 128, 256])
def test_many_steps_in_any_order(tokens):
    for seed in range(3):
        with options(seed=seed):
            check(20, 72, 3904, "mxfp4", tiles=((tokens, 128, 1),))


def test_in_any_order():
    for seed in (1, 2):
        with options(seed=seed):
            check(40, 130, 1408, "mxfp4", tiles=((64, 128, 4),), activation=3)
            check(90, 130, 1408, "nvfp4", tiles=((96, 128, 3),))
            check(40, 130, 3072, "int4-128-zero", tiles=((64, 128, 1),))


@pytest.mark.parametrize(
    ("layout", "dtype"), [("mxfp4", torch.bfloat16), ("int4-64", torch.float16)]
)
def test_bits_of_a_row_in_the_batch_invariant_mode(layout, dtype):
    """bfloat16: launches of 16 rows; float16: tiles of 128. Both end within their second one."""
    weights = draw(layout, 72, 320, dtype, "cpu")
    x = torch.randn(17 if dtype == torch.bfloat16 else 130, 320).to(dtype)

    def run(rows):
        out = torch.full((len(rows), 72), torch.nan, dtype=dtype)
        none = (None, None, None, None)
        kernels.w4_linear(
            *(x[rows], weights.packed, weights.scale, *none, out),
            *(FORMATS.index(weights.format), 0),
        )
        return out.view(torch.int16)

    last = len(x) - 1
    with tiercel.batch_invariant():
        together = run(list(range(len(x))))
        for row in (0, 15, last):
            assert torch.equal(run([row])[0], together[row])
        assert torch.equal(run([last, *range(last)])[0], together[last])
    due = x.double() @ weights.values.T
    torch.testing.assert_close(together.view(dtype).double(), due, rtol=1e-2, atol=0.1)
