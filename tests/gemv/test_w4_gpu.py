# SPDX-License-Identifier: Apache-2.0
"""w4_linear on an H100 or H200, against float64."""

import pytest
import torch
from support.w4_weights import FORMATS, activated, draw

import tiercel
from tiercel import _C
from tiercel.ops.gemv.spec import ACTIVATIONS

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

LAYOUTS = ["nvfp4", "mxfp4", "int4-32", "int4-64-zero", "int4-128", "int4-128-zero"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def truth(x, weights, global_scale=None, bias=None, activation="none"):
    """The due result, and the magnitudes of its terms."""
    factor = 1.0 if global_scale is None else global_scale.double()
    due = (x.double() @ weights.values.T) * factor
    magnitudes = (x.double().abs() @ weights.values.abs().T) * factor
    if bias is not None:
        due = due + bias.double()
    return activated(ACTIVATIONS.index(activation), due), magnitudes


def assert_close(got, due, magnitudes, kind):
    """One rounding of the result, float32 sums, and int4's rounded weights."""
    unit = torch.finfo(got.dtype).eps / 2
    lost = unit / 4 if kind == "int4" else 2.0**-18
    error = (got.double() - due).abs()
    assert (error <= 1.1 * unit * due.abs() + lost * magnitudes + 2.0**-20).all(), error.max()


def check(tokens, features, k, layout, dtype=torch.bfloat16, tiles=None, **more):
    weights = draw(layout, features, k, dtype, "cuda")
    x = torch.randn(tokens, k, device="cuda").to(dtype)
    arguments = {"zero_point": weights.zero_point, **more}
    if tiles is None:
        got = tiercel.w4_linear(
            x, weights.packed, weights.scale, format=weights.format, **arguments
        )
    else:
        got = x.new_full((tokens, features), torch.nan)
        given = [arguments.get(name) for name in ("zero_point", "global_scale", "bias", "x_scale")]
        index = FORMATS.index(weights.format)
        activation = ACTIVATIONS.index(more.get("activation", "none"))
        _C.w4_linear(x, weights.packed, weights.scale, *given, got, index, activation, tiles)
    assert_close(got, *truth(x, weights, **more), weights.format)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 70])
def test_sizes(tokens, layout):
    for features, k in [(1, 128), (40, 384), (136, 640), (200, 2944)]:
        check(tokens, features, k, layout)


@pytest.mark.parametrize("layout", ["nvfp4", "mxfp4", "int4-128-zero"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 40, 100, 256, 777, 2048])
def test_large(tokens, layout):
    for features, k in [(4096, 4096), (2944, 2944), (1024, 8192)]:
        check(tokens, features, k, layout)


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_gpt_oss(tokens):
    """K that is no multiple of a stage."""
    check(tokens, 2880, 2880, "mxfp4", bias=torch.randn(2880, device="cuda").bfloat16())


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["mxfp4", "nvfp4", "int4-64-zero"])
@pytest.mark.parametrize("cluster", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(32, 128), (64, 128), (96, 128), (128, 128), (256, 128)])
def test_every_kernel(shape, cluster, layout):
    for tokens, features, k in [(shape[0] + 3, 264, 1088), (9, 71, 3072)]:
        bias = torch.randn(features, device="cuda").bfloat16()
        for activation in ("none", "gelu"):
            tiles = (*shape, cluster)
            check(tokens, features, k, layout, tiles=tiles, bias=bias, activation=activation)


@pytest.mark.parametrize("tiles", [None, (256, 128, 1, 4), (256, 128, 1, 2)])
def test_tiles_behind_the_last_wave(tiles):
    """160 tiles of 256 tokens: 132, and 28 whose K is split."""
    bias = torch.randn(5120, device="cuda").bfloat16()
    check(1024, 5120, 2880, "mxfp4", tiles=tiles, bias=bias)


def test_192_tokens():
    for cluster in (1, 3):
        bias = torch.randn(264, device="cuda").bfloat16()
        check(195, 264, 1088, "mxfp4", tiles=(192, 128, cluster), bias=bias)


@pytest.mark.parametrize("tokens", [32, 64, 96, 128, 192, 256])
def test_many_steps_many_times(tokens):
    """Rows of many stages in more clusters than fit at once, where warps of a block drift apart."""
    weights = draw("mxfp4", 4096, 8192, torch.bfloat16, "cuda")
    x = torch.randn(64, 8192, device="cuda").bfloat16()
    given = (x, weights.packed, weights.scale, None, None, None, None)
    index, tiles = FORMATS.index("mxfp4"), (tokens, 128, 4)
    results = [x.new_empty(64, 4096) for _ in range(400)]
    for result in results:
        _C.w4_linear(*given, result, index, 0, tiles)
    assert_close(results[0], *truth(x, weights), "mxfp4")
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 9, 50])
def test_epilogue(tokens, activation):
    bias = torch.randn(200, device="cuda").bfloat16()
    factor = torch.tensor([0.3], device="cuda")
    check(tokens, 200, 512, "mxfp4", bias=bias, global_scale=factor, activation=activation)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["nvfp4", "int4-32", "int4-128-zero"])
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_float16(tokens, layout):
    check(tokens, 264, 1152, layout, dtype=torch.float16)


def test_exponents():
    """MXFP4's scales from 2**-62 to 2**63, and NaN in one row."""
    for tokens in (1, 5, 40):
        weights = draw("mxfp4", 128, 128, torch.bfloat16, "cuda")
        x = torch.randn(tokens, 128, device="cuda").bfloat16()
        weights.scale[:] = torch.arange(65, 193, device="cuda")[:, None]
        due = tiercel.ref.w4_linear(x.double(), weights.packed, weights.scale)
        got = tiercel.w4_linear(x, weights.packed, weights.scale)
        torch.testing.assert_close(got.double(), due, rtol=1e-2, atol=0) if tokens == 1 else None
        scale = due.abs().amax(0)
        assert ((got.double() - due).abs() <= 5e-3 * scale).all()
        weights.scale[7, 1] = 255
        got = tiercel.w4_linear(x, weights.packed, weights.scale)
        assert got.isnan().any(0).nonzero().flatten().tolist() == [7]


def test_nvfp4_linear_is_a_format_of_it():
    for tokens in (1, 16, 17, 300):
        weights = draw("nvfp4", 300, 1024, torch.bfloat16, "cuda")
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        packed = weights.packed.view(torch.float4_e2m1fn_x2)
        got = tiercel.nvfp4_linear(x, packed, weights.scale)
        assert torch.equal(got, tiercel.w4_linear(x, packed, weights.scale, format="nvfp4"))


def test_empty():
    for tokens, features, k in [(0, 8, 128), (3, 0, 128), (3, 8, 0), (40, 8, 0)]:
        packed = torch.zeros(features, k // 2, dtype=torch.uint8, device="cuda")
        scale = torch.zeros(features, k // 32, dtype=torch.uint8, device="cuda")
        bias = torch.ones(features, device="cuda").bfloat16()
        x = torch.ones(tokens, k, device="cuda").bfloat16()
        got = tiercel.w4_linear(x, packed, scale, bias=bias)
        assert got.shape == (tokens, features)
        assert k or (got == 1).all()


def test_graph_replay():
    weights = draw("mxfp4", 384, 512, torch.bfloat16, "cuda")
    x = torch.randn(64, 512, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many = tiercel.w4_linear(x, weights.packed, weights.scale)
        few = tiercel.w4_linear(x[:4], weights.packed, weights.scale)
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(many, *truth(x, weights), "mxfp4")
        assert_close(few, *truth(x[:4], weights), "mxfp4")
