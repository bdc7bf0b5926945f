# SPDX-License-Identifier: Apache-2.0
"""w4_moe on an H100 or H200, against float64."""

import pytest
import torch
from support.w4_weights import Experts, gate

import tiercel
from tiercel.ops.moe.spec import W4_ACTIVATIONS as ACTIVATIONS

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

GPT_OSS = {"activation": "silu_residual", "alpha": 1.702, "limit": 7.0, "interleaved": True}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


class Layer:
    """Random experts with everything that an expert may have."""

    def __init__(self, layout, experts, hidden, inner, dtype=torch.bfloat16, gated=True):
        self.up = Experts(layout, experts, inner * (1 + gated), hidden, dtype, "cuda")
        self.down = Experts(layout, experts, hidden, inner, dtype, "cuda")
        self.arguments = {"format": self.up.format}
        for half, of in (("up", self.up), ("down", self.down)):
            self.arguments |= {
                f"w_{half}": of.packed,
                f"w_{half}_scale": of.scale,
                f"{half}_bias": of.bias,
                f"{half}_zero_point": of.zero_point,
                f"{half}_global_scale": of.factor,
            }

    def __call__(self, x, weights, ids, **options):
        return tiercel.w4_moe(x, topk_weights=weights, topk_ids=ids, **self.arguments, **options)

    def truth(self, x, weights, ids, activation="silu", alpha=1.0, limit=0.0, interleaved=False):
        """The due result, and the magnitudes of the last product's terms."""
        due = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        sizes = torch.zeros_like(due)
        for expert in range(self.up.packed.shape[0]):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            sums, _ = self.up.product(x[token], expert)
            inner = gate(sums, activation, interleaved, alpha, limit)
            rows, terms = self.down.product(inner, expert)
            factors = weights[token, choice, None].double()
            due.index_add_(0, token, rows * factors)
            sizes.index_add_(0, token, terms * factors)
        return due, sizes


def assert_close(got, due, sizes):
    """Roundings between the halves, of each expert's rows and of the result."""
    error, unit = got.double() - due, torch.finfo(got.dtype).eps / 2
    assert torch.isfinite(got).all()
    assert (error.abs() <= 1.05 * unit * (due.abs() + 2 * sizes) + 2.0**-20).all()
    assert error.square().mean() <= (unit * due).square().mean()


def routed(tokens, experts, k):
    weights = torch.rand(tokens, k, device="cuda") / k
    return weights, torch.rand(tokens, experts, device="cuda").topk(k).indices


def check(layer, tokens, experts, k, hidden, dtype=torch.bfloat16, **options):
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    weights, ids = routed(tokens, experts, k)
    assert_close(layer(x, weights, ids, **options), *layer.truth(x, weights, ids, **options))


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["nvfp4", "mxfp4", "int4-32", "int4-64-zero", "int4-128"])
def test_sizes(layout):
    for hidden, inner in [(128, 128), (256, 384), (640, 128)]:
        layer = Layer(layout, 5, hidden, inner)
        for tokens in (1, 8, 9, 33, 150):
            check(layer, tokens, 5, 2, hidden)


@pytest.mark.sanitize
def test_divided_k():
    """Clusters, of four blocks and of two."""
    check(Layer("mxfp4", 3, 2112, 1088), 1, 3, 2, 2112)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_activations(tokens, activation):
    layer = Layer("mxfp4", 3, 192, 320, gated=activation != "relu_squared")
    options = {"activation": activation, "alpha": 1.3, "limit": 1.5}
    for interleaved in (False, True):
        check(layer, tokens, 3, 1, 192, interleaved=interleaved, **options)


@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 64, 300, 1024])
def test_gpt_oss(tokens):
    """K that is no multiple of a stage."""
    check(Layer("mxfp4", 32, 2880, 2880), tokens, 32, 4, 2880, **GPT_OSS)


def test_many_tokens():
    check(Layer("nvfp4", 16, 1024, 768), 4096, 16, 4, 1024)
    check(Layer("int4-128-zero", 8, 2048, 1408), 4096, 8, 2, 2048)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["nvfp4", "int4-128-zero"])
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_float16(tokens, layout):
    layer = Layer(layout, 4, 256, 384, torch.float16)
    check(layer, tokens, 4, 2, 256, torch.float16)


def check_float8(layer, tokens, experts, k, hidden, **options):
    """Against float64 of the same float8 activations, but for those between the halves."""
    x, x_scale = tiercel.fp8_quantize(torch.randn(tokens, hidden, device="cuda").bfloat16())
    weights, ids = routed(tokens, experts, k)
    got = layer(x, weights, ids, x_scale=x_scale, **options)
    due, sizes = layer.truth(x.double() * x_scale.double(), weights, ids, **options)
    error = got.double() - due
    assert got.dtype == torch.bfloat16 and torch.isfinite(got).all()
    # e4m3's rounding of what is between the halves, up to 2^-4; its errors differ in sign.
    assert (error.abs() <= 2.0**-8 * due.abs() + 2.0**-4 * sizes + 2.0**-20).all()
    assert error.square().mean() <= (2.0**-4.5 * due).square().mean()


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["mxfp4", "int4-32", "int4-64-zero", "int4-128"])
def test_float8_activations(layout):
    for hidden, inner in [(128, 128), (256, 384), (640, 128)]:
        layer = Layer(layout, 5, hidden, inner)
        for tokens in (1, 8, 9, 33, 150):
            check_float8(layer, tokens, 5, 2, hidden)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300, 1024])
def test_gpt_oss_with_float8_activations(tokens):
    check_float8(Layer("mxfp4", 32, 2880, 2880), tokens, 32, 4, 2880, **GPT_OSS)


def test_float8_bits_agree_every_time():
    layer = Layer("mxfp4", 32, 2880, 2880)
    x, x_scale = tiercel.fp8_quantize(torch.randn(700, 2880, device="cuda").bfloat16())
    weights, ids = routed(700, 32, 4)
    due = layer(x, weights, ids, x_scale=x_scale, **GPT_OSS)
    for _ in range(20):
        assert torch.equal(layer(x, weights, ids, x_scale=x_scale, **GPT_OSS), due)


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [4, 40, 400])
def test_expert_map_and_ids_of_no_expert(tokens):
    layer = Layer("mxfp4", 4, 128, 192)
    places = torch.tensor([2, -1, 0, 9, 3, -7, 1], dtype=torch.int32, device="cuda")
    x = torch.randn(tokens, 128, device="cuda").bfloat16()
    weights, ids = routed(tokens, 7, 3)
    ids[0, 0], ids[1, 1], ids[2, 2] = -1, 7, 2**32
    got = layer(x, weights, ids, expert_map=places)
    known = (ids >= 0) & (ids < 7)
    here = torch.where(known, places.long()[ids.clamp(0, 6)], -1)
    assert_close(got, *layer.truth(x, weights, here))
    few = layer(x[:2], weights[:2], ids[:2])
    assert_close(few, *layer.truth(x[:2], weights[:2], ids[:2]))


def test_the_same_bits_every_time():
    layer = Layer("mxfp4", 32, 2880, 2880)
    for tokens in (1, 64, 700):
        x = torch.randn(tokens, 2880, device="cuda").bfloat16()
        weights, ids = routed(tokens, 32, 4)
        due = layer(x, weights, ids, **GPT_OSS)
        for _ in range(20):
            assert torch.equal(layer(x, weights, ids, **GPT_OSS), due)


def test_graph_replay():
    layer = Layer("mxfp4", 8, 512, 384)
    xs = [torch.randn(tokens, 512, device="cuda").bfloat16() for tokens in (1, 40, 500)]
    routes = [routed(len(x), 8, 2) for x in xs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layer(x, *route) for x, route in zip(xs, routes, strict=True)]
    for _ in range(3):
        for x, (weights, ids) in zip(xs, routes, strict=True):
            x.normal_()
            new_weights, new_ids = routed(len(x), 8, 2)
            weights.copy_(new_weights), ids.copy_(new_ids)
        graph.replay()
        torch.cuda.synchronize()
        for got, x, route in zip(results, xs, routes, strict=True):
            assert_close(got, *layer.truth(x, *route))
