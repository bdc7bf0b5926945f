# SPDX-License-Identifier: Apache-2.0
"""w4_moe with float8 activations on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.w4_weights import FORMATS, Experts, gate, gated

from tiercel import ref
from tiercel.ops.moe.spec import W4_ACTIVATIONS as ACTIVATIONS

pytestmark = pytest.mark.torch

LAYOUTS = ["mxfp4", "int4-32", "int4-64-zero", "int4-128", "int4-128-zero"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def assert_close(got, due, magnitudes, lost):
    """One rounding of the result. `lost`: by the adder, and by scales far below their row's
    largest."""
    error = (got.double() - due).abs()
    assert (error <= 1.1 * 2.0**-8 * due.abs() + lost * magnitudes + 2.0**-20).all(), error.max()


def check(
    layout,
    block,
    tokens=20,
    experts=3,
    k=2,
    hidden=256,
    inner=128,
    activation="silu",
    interleaved=False,
    change=None,
    each=True,
    lost=2.0**-14,
    **values,
):
    """Both products, each against float64 of its own operands. `block` 0: without a routing."""
    half = torch.bfloat16
    parts = 1 if activation == "relu_squared" else 2
    up = Experts(layout, experts, inner * parts, hidden, half, "cpu", rounded=False)
    down = Experts(layout, experts, hidden, inner, half, "cpu", rounded=False)
    x, x_scale = ref.fp8_quantize(torch.randn(tokens, hidden), "row" if each else "tensor")
    ids = torch.rand(tokens, experts).topk(k).indices
    if change is not None:
        ids = change(ids)
    lists = ref.moe_align_block_size(ids, block, experts) if block else (None, None, None)
    middle = torch.full((ids.numel(), inner), torch.nan, dtype=half)
    out = torch.full((ids.numel(), hidden), torch.nan, dtype=half)
    alpha, limit = values.get("alpha", 1.0), values.get("limit", 0.0)
    rest = (block, experts, FORMATS.index(up.format), ACTIVATIONS.index(activation))
    gates = (interleaved, alpha, limit)
    kernels.w4_moe_up(x, *up.native, x_scale, ids, *lists, middle, *rest, *gates)
    rows, row_scale = ref.fp8_quantize(middle.nan_to_num(0.5))
    kernels.w4_moe_down(rows, *down.native, row_scale, ids, *lists, out, *rest[:3])
    x, rows = x.double() * x_scale.double(), rows.double() * row_scale.double()
    for element, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < experts:
            assert not out[element].any()
            continue
        product = up.product(x[element // k], expert)
        due = gated(*product, activation, interleaved, alpha, limit)
        assert_close(middle[element], *due, lost)
        assert_close(out[element], *down.product(rows[element], expert), lost)


@pytest.mark.parametrize("block", [0, 8, 32, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formats(layout, block):
    check(layout, block, tokens=20 if block else 3)


@pytest.mark.parametrize("block", [16, 64])
def test_other_blocks(block):
    check("mxfp4", block, tokens=100, hidden=1472, inner=192)
    check("int4-64", block, tokens=100, hidden=320, inner=192, each=False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("block", [32, 128])
def test_activations(block, activation, interleaved):
    check("mxfp4", block, activation=activation, interleaved=interleaved, alpha=1.702, limit=2.0)


@pytest.mark.parametrize("block", [0, 32, 128])
def test_sizes(block):
    """K that ends within a stage, tiles that end behind the last row, and turns of the ring."""
    check("mxfp4", block, tokens=8, hidden=1472, inner=64)
    check("int4-32-zero", block, tokens=5, hidden=64, inner=1408, experts=1, k=1)


@pytest.mark.parametrize("block", [8, 32, 128])
def test_several_blocks_of_an_expert(block):
    check("int4-128", block, tokens=300, experts=2, k=1, hidden=128, inner=128)


def strays(ids):
    wide = ids.long()
    wide[0, 0], wide[-1, -1], wide[1, 1] = -1, 2**32 + 1, 3
    return wide


@pytest.mark.parametrize("block", [0, 32, 128])
def test_ids_of_no_expert(block):
    check("mxfp4", block, tokens=5, change=strays)


@pytest.mark.parametrize("layout", ["mxfp4", "int4-128-zero"])
def test_short_adder(layout):
    """Adds as the GPU does: 13 bits behind the largest product."""
    with options(short_fp8_adder=True):
        check(layout, 32, hidden=1024, inner=256, lost=1.13 * 2.0**-11)


def test_in_any_order():
    for seed in (1, 2):
        with options(seed=seed):
            check("mxfp4", 16, hidden=1408)
            check("int4-32", 128, hidden=1408)
            check("int4-128", 32, hidden=1408)


def test_nan_stays_in_its_token_and_feature():
    """A token of NaN, and a row of the weight with a scale that stands for NaN."""
    weights = Experts("mxfp4", 2, 128, 256, torch.bfloat16, "cpu")
    weights.scale[1, 7, 3] = 255
    x = torch.randn(20, 256)
    x[4, 9] = torch.nan
    ids = torch.ones(20, 1, dtype=torch.int64)
    lists = ref.moe_align_block_size(ids, 32, 2)
    out = torch.zeros(20, 128, dtype=torch.bfloat16)
    given = (*weights.native, torch.ones(1), ids, *lists, out, 32, 2, FORMATS.index("mxfp4"))
    kernels.w4_moe_down(x.to(torch.float8_e4m3fn), *given)
    due = torch.zeros(20, 128, dtype=torch.bool)
    due[4], due[:, 7] = True, True
    assert torch.equal(out.isnan(), due)


@pytest.mark.parametrize("tokens", [1, 4, 15, 40, 200])
def test_the_operator(tokens):
    """At every way to route, with quantisation between the products."""
    up = Experts("mxfp4", 3, 256, 192, torch.bfloat16, "cpu")
    down = Experts("mxfp4", 3, 192, 128, torch.bfloat16, "cpu")
    x, x_scale = ref.fp8_quantize(torch.randn(tokens, 192))
    weights = torch.rand(tokens, 2)
    ids = torch.rand(tokens, 3).topk(2).indices.int()
    order = (x, up.packed, up.scale, down.packed, down.scale, weights, ids, "mxfp4")
    gates = (up.bias, down.bias, "silu_residual", 1.702, 7.0, True, None)
    rest = (None, None, up.factor, down.factor, x_scale, None)
    got = sm90("w4_moe")(*order, *gates, *rest)
    assert got.dtype == torch.bfloat16
    due, sizes = torch.zeros(tokens, 192).double(), torch.zeros(tokens, 192).double()
    rows = x.double() * x_scale.double()
    for token in range(tokens):
        for choice in range(2):
            expert, factor = int(ids[token, choice]), float(weights[token, choice])
            inner = gate(up.product(rows[token], expert)[0], "silu_residual", True, 1.702, 7.0)
            one, terms = down.product(inner, expert)
            due[token] += one * factor
            sizes[token] += terms * factor
    # The first half is rounded to e4m3, by up to 2^-4 of it; errors differ in sign.
    error = got.double() - due
    assert (error.abs() <= 2.0**-8 * due.abs() + 2.0**-4 * sizes).all()
    assert error.square().mean() <= (2.0**-5 * due).square().mean()
