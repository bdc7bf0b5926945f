# SPDX-License-Identifier: Apache-2.0
"""w4_linear with float8 activations on an H100 or H200, against float64."""

import pytest
import torch
from support.w4_weights import FORMATS, activated, draw

import tiercel
from tiercel import _C
from tiercel.ops.gemv.spec import ACTIVATIONS

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

LAYOUTS = ["mxfp4", "int4-32", "int4-64-zero", "int4-128", "int4-128-zero"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def check(tokens, features, k, layout, dtype=torch.bfloat16, tiles=None, each=True, **more):
    weights = draw(layout, features, k, dtype, "cuda")
    x = torch.randn(tokens, k, device="cuda").to(torch.float8_e4m3fn)
    x_scale = torch.rand(tokens, 1, device="cuda") + 0.5 if each else torch.tensor(0.7).cuda()
    given = {"zero_point": weights.zero_point, "x_scale": x_scale, **more}
    if tiles is None:
        got = tiercel.w4_linear(x, weights.packed, weights.scale, format=weights.format, **given)
    else:
        got = torch.full((tokens, features), torch.nan, dtype=torch.bfloat16, device="cuda")
        names = ("zero_point", "global_scale", "bias", "x_scale")
        index = FORMATS.index(weights.format), ACTIVATIONS.index(more.get("activation", "none"))
        tensors = (given.get(name) for name in names)
        _C.w4_linear(x, weights.packed, weights.scale, *tensors, got, *index, tiles)
    assert got.dtype == torch.bfloat16
    assert_close(got, x, weights, x_scale, **more)


def assert_close(got, x, weights, x_scale, global_scale=None, bias=None, activation="none"):
    """One rounding of the result, and the adder's 13 bits: of a group with int4, of a row with
    mxfp4, where those of all results together are about as much as that rounding."""
    lost = 2.0**-9 if weights.format == "mxfp4" else 2.0**-14
    factor = x_scale.double() * (1.0 if global_scale is None else global_scale.double())
    due = x.double() @ weights.values.T * factor
    magnitudes = x.double().abs() @ weights.values.abs().T * factor
    due = due if bias is None else due + bias.double()
    slope = 2 * due.abs() + lost * magnitudes if activation == "relu_squared" else 1.13
    due = activated(ACTIVATIONS.index(activation), due)
    error = (got.double() - due).abs()
    allowed = 1.1 * 2.0**-8 * due.abs() + slope * lost * magnitudes + 2.0**-20
    assert (error <= allowed).all(), (error / allowed).max()
    if activation == "none" and error.numel() > 1000:
        assert error.square().mean() <= 2.0**-15 * due.square().mean()


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_sizes(tokens, layout):
    for features, k in [(1, 128), (40, 384), (136, 640), (200, 2944)]:
        check(tokens, features, k, layout)


@pytest.mark.parametrize("layout", ["mxfp4", "int4-64", "int4-128-zero"])
@pytest.mark.parametrize("tokens", [1, 40, 100, 256, 777, 2048])
def test_large(tokens, layout):
    for features, k in [(4096, 4096), (2944, 2944), (1024, 8192)]:
        check(tokens, features, k, layout)


@pytest.mark.sanitize
@pytest.mark.parametrize("cluster", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("layout", "tokens"),
    [("mxfp4", 32), ("mxfp4", 128), ("mxfp4", 256)]
    + [(layout, n) for layout in ("int4-64-zero", "int4-128") for n in (32, 128)],
)
def test_every_kernel(layout, tokens, cluster):
    for rows, features, k in [(tokens + 3, 264, 1152), (9, 71, 3072)]:
        bias = torch.randn(features, device="cuda").bfloat16()
        for activation in ("none", "gelu"):
            tiles = (tokens, 128, cluster)
            check(rows, features, k, layout, tiles=tiles, bias=bias, activation=activation)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation):
    bias = torch.randn(200, device="cuda").bfloat16()
    factor = torch.tensor([0.3], device="cuda")
    more = {"bias": bias, "global_scale": factor, "activation": activation}
    check(50, 200, 576, "mxfp4", each=False, **more)


@pytest.mark.sanitize
def test_float16_scales():
    for layout in ("int4-64-zero", "int4-128-zero"):
        check(33, 264, 1152, layout, dtype=torch.float16)


def test_scales_far_apart():
    """Exact down to 2**-14 of the row's largest: each result is a single product."""
    weights = draw("mxfp4", 256, 512, torch.bfloat16, "cuda")
    weights.scale.copy_(140 - torch.arange(16, device="cuda").clamp(max=14))
    values = tiercel.ops.gemv.reference.w4_values(weights.packed, weights.scale, "mxfp4")
    x = torch.eye(512, device="cuda")
    got = tiercel.w4_linear(
        x.to(torch.float8_e4m3fn), weights.packed, weights.scale, x_scale=torch.ones(1).cuda()
    )
    assert torch.equal(got.double(), values.double().T)


def test_quantized_activations():
    """From bfloat16 to bfloat16: the error is that of 8-bit activations."""
    weights = draw("mxfp4", 512, 1024, torch.bfloat16, "cuda")
    x = torch.randn(300, 1024, device="cuda").bfloat16()
    x8, x_scale = tiercel.fp8_quantize(x, "row")
    got = tiercel.w4_linear(x8, weights.packed, weights.scale, x_scale=x_scale).double()
    due = x.double() @ weights.values.T
    assert (got - due).square().mean().sqrt() <= 0.04 * due.square().mean().sqrt()


def test_graph_replay():
    weights = draw("int4-128", 384, 512, torch.bfloat16, "cuda")
    x = torch.randn(64, 512, device="cuda").to(torch.float8_e4m3fn)
    x_scale = torch.rand(64, device="cuda") + 0.5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tiercel.w4_linear(x, weights.packed, weights.scale, format="int4", x_scale=x_scale)
    for _ in range(2):
        x.copy_(torch.randn(64, 512, device="cuda"))
        x_scale.uniform_(0.5, 1.5)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(got, x, weights, x_scale[:, None])
