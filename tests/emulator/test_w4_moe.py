# SPDX-License-Identifier: Apache-2.0
"""w4_moe (wgmma with weights in registers, rows gathered) on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.w4_weights import FORMATS, Experts, gate, gated

from tiercel import ref
from tiercel.ops.moe.spec import W4_ACTIVATIONS as ACTIVATIONS

pytestmark = pytest.mark.torch

LAYOUTS = ["nvfp4", "mxfp4", "int4-32", "int4-64-zero", "int4-128"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def assert_close(got, due, magnitudes):
    """One rounding of the result, and float32 sums."""
    unit = torch.finfo(got.dtype).eps / 2
    error = (got.double() - due).abs()
    assert (error <= 1.1 * unit * due.abs() + 2.0**-17 * magnitudes + 2.0**-20).all(), error.max()


def check(
    layout,
    block,
    tokens=20,
    experts=3,
    k=2,
    hidden=192,
    inner=128,
    activation="silu",
    interleaved=False,
    dtype=torch.bfloat16,
    change=None,
    **values,
):
    """Both products, each against float64 of its own operands. `block` 0: without a routing."""
    parts = 1 if activation == "relu_squared" else 2
    up = Experts(layout, experts, inner * parts, hidden, dtype, "cpu")
    down = Experts(layout, experts, hidden, inner, dtype, "cpu")
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.rand(tokens, experts).topk(k).indices
    if change is not None:
        ids = change(ids)
    lists = ref.moe_align_block_size(ids, block, experts) if block else (None, None, None)
    middle = torch.full((ids.numel(), inner), torch.nan, dtype=dtype)
    out = torch.full((ids.numel(), hidden), torch.nan, dtype=dtype)
    alpha, limit = values.get("alpha", 1.0), values.get("limit", 0.0)
    rest = (block, experts, FORMATS.index(up.format), ACTIVATIONS.index(activation))
    kernels.w4_moe_up(x, *up.native, None, ids, *lists, middle, *rest, interleaved, alpha, limit)
    kernels.w4_moe_down(middle, *down.native, None, ids, *lists, out, *rest[:3])
    for element, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < experts:
            assert not out[element].any()
            continue
        product = up.product(x[element // k], expert)
        due = gated(*product, activation, interleaved, alpha, limit)
        assert_close(middle[element], *due)
        assert_close(out[element], *down.product(middle[element], expert))


@pytest.mark.parametrize("block", [0, 8, 16, 32, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formats(layout, block):
    check(layout, block, tokens=20 if block else 3, hidden=256)


@pytest.mark.parametrize("layout", ["nvfp4", "mxfp4"])
def test_blocks_of_64(layout):
    check(layout, 64, tokens=100, hidden=1472, inner=192)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("block", [32, 128])
def test_activations(block, activation, interleaved):
    check("mxfp4", block, activation=activation, interleaved=interleaved, alpha=1.702, limit=2.0)


@pytest.mark.parametrize("block", [0, 32, 128])
def test_sizes(block):
    """K that ends within a stage, tiles that end behind the last row, and turns of the ring."""
    check("mxfp4", block, tokens=8, hidden=1472, inner=64)
    check("nvfp4", block, tokens=5, hidden=64, inner=1408, experts=1, k=1)


@pytest.mark.parametrize("layout", ["nvfp4", "int4-32"])
@pytest.mark.parametrize("hidden", [1088, 2112])
def test_divided_k(layout, hidden):
    """Clusters of two and four blocks, whose last parts are shorter."""
    check(layout, 0, tokens=3, hidden=hidden, inner=64, activation="silu_residual")


@pytest.mark.parametrize("block", [8, 16, 32, 128])
def test_several_blocks_of_an_expert(block):
    check("int4-128", block, tokens=300, experts=2, k=1, hidden=128, inner=128)


@pytest.mark.parametrize("layout", ["nvfp4", "int4-64-zero"])
@pytest.mark.parametrize("block", [32, 128])
def test_float16(block, layout):
    check(layout, block, dtype=torch.float16)


def strays(ids):
    wide = ids.long()
    wide[0, 0], wide[-1, -1], wide[1, 1] = -1, 2**32 + 1, 3
    return wide


@pytest.mark.parametrize("block", [0, 32, 128])
def test_ids_of_no_expert(block):
    check("mxfp4", block, tokens=5, change=strays)


def test_in_any_order():
    for seed in (1, 2):
        with options(seed=seed):
            check("mxfp4", 16, hidden=1408)
            check("int4-32", 128, hidden=896)
            check("nvfp4", 64, hidden=896)
            check("mxfp4", 0, tokens=3, hidden=1408)  # K divided by clusters


def run(x, up, down, weights, ids, activation, **more):
    """The operator's fast backend."""
    given = {"alpha": 1.0, "limit": 0.0, "interleaved": False, "expert_map": None, **more}
    names = ("up_bias", "down_bias", "up_zero_point", "down_zero_point")
    tensors = (up.bias, down.bias, up.zero_point, down.zero_point)
    named = dict(zip(names, tensors, strict=True))
    order = (up.packed, up.scale, down.packed, down.scale, weights, ids, up.format)
    return sm90("w4_moe")(
        *(x, *order, named["up_bias"], named["down_bias"], activation),
        *(given["alpha"], given["limit"], given["interleaved"], given["expert_map"]),
        *(named["up_zero_point"], named["down_zero_point"], up.factor, down.factor, None, None),
    )


@pytest.mark.parametrize("tokens", [1, 4, 15, 40, 200])
def test_gpt_oss(tokens):
    """The operator, at every way to route; with an expert that is elsewhere."""
    up = Experts("mxfp4", 3, 256, 192, torch.bfloat16, "cpu")
    down = Experts("mxfp4", 3, 192, 128, torch.bfloat16, "cpu")
    x = torch.randn(tokens, 192).bfloat16()
    ids = torch.rand(tokens, 4).topk(2).indices.int()
    weights = torch.rand(tokens, 2)
    for places in (None, [0, -1, 2, 1]):
        expert_map = None if places is None else torch.tensor(places, dtype=torch.int32)
        options = {"alpha": 1.702, "limit": 7.0, "interleaved": True, "expert_map": expert_map}
        got = run(x, up, down, weights, ids, "silu_residual", **options)
        due = torch.zeros(tokens, 192, dtype=torch.float64)
        sizes = torch.zeros(tokens, 192, dtype=torch.float64)
        for token in range(tokens):
            for choice in range(2):
                expert = int(ids[token, choice])
                expert = (expert if expert < 3 else -1) if places is None else places[expert]
                if expert < 0:
                    continue
                sums, _ = up.product(x[token], expert)
                inner = gate(sums, "silu_residual", True, 1.702, 7.0)
                rows, terms = down.product(inner, expert)
                due[token] += rows * float(weights[token, choice])
                sizes[token] += terms * float(weights[token, choice])
        # Roundings between the halves, of each expert's rows and of the result.
        error, unit = got.double() - due, torch.finfo(got.dtype).eps / 2
        assert (error.abs() <= 1.05 * unit * (due.abs() + 2 * sizes)).all()
        assert error.square().mean() <= (unit * due).square().mean()
