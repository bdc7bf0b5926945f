# SPDX-License-Identifier: Apache-2.0
"""fused_moe, moe_up and moe_down on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional

import tiercel
from tiercel.ops.moe.fused import run
from tiercel.ops.moe.tiling import MoeTiles, tiles

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "silu": lambda a, b: functional.silu(a) * b,
    "gelu": lambda a, b: functional.gelu(a) * b,
    "relu": lambda a, b: functional.relu(a) * b,
    "gelu_residual": lambda a, b: functional.gelu(a) * (b + 1),
}


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(5)

    def draw(tokens, experts, k, hidden, inner, dtype=torch.bfloat16):
        def random(*shape, scale=1.0):
            return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        return (
            random(tokens, hidden),
            random(experts, 2 * inner, hidden, scale=hidden**-0.5),
            random(experts, hidden, inner, scale=inner**-0.5),
            torch.rand(tokens, k, device="cuda", generator=generator),
            scores.topk(k).indices.int(),
        )

    return draw


def halves(x, w_up, w_down, weights, ids, activation="silu"):
    """(inner, outer) by element, in float64, from the result of the half before."""

    def up(element):
        sums = w_up[ids.flatten()[element]].double() @ x[element // ids.shape[1]].double()
        return ACTIVATIONS[activation](*sums.chunk(2))

    def down(inner, element):
        sums = w_down[ids.flatten()[element]].double() @ inner.double()
        return sums * weights.flatten()[element].double()

    return up, down


def assert_halves(values, block, activation="silu"):
    x, w_up, w_down, weights, ids = values
    k = ids.shape[1]
    routing = tiercel.moe_align_block_size(ids, block, w_up.shape[0])
    inner = tiercel.moe_up(x, w_up, *routing, k, block, activation=activation)
    outer = tiercel.moe_down(inner, w_down, weights.flatten(), *routing, block)
    up, down = halves(*values, activation)
    half = torch.finfo(x.dtype).eps / 2
    for element in range(0, ids.numel(), max(ids.numel() // 64, 1)):
        for got, due in (
            (inner[element], up(element)),
            (outer[element], down(inner[element], element)),
        ):
            error = (got.double() - due).abs()
            assert (error <= 1.02 * half * due.abs() + 5e-5).all(), (element, error.max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 16, 65, 500, 3000])
def test_halves(make, tokens, block, dtype):
    assert_halves(make(tokens, 8, 2, 512, 384, dtype), block)


@pytest.mark.sanitize
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(make, activation, block):
    assert_halves(make(90, 4, 2, 320, 320), block, activation)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (328, 320), (1000, 344), (2048, 1024)])
def test_ragged_sizes(make, hidden, inner, block):
    assert_halves(make(200, 6, 3, hidden, inner), block)


def reference(values, **options):
    x, w_up, w_down, weights, ids = values
    wide = (x.double(), w_up.double(), w_down.double(), weights.double(), ids)
    return tiercel.ref.fused_moe(*wide, **options)


def assert_whole(result, due):
    scale = due.square().mean().sqrt()
    error = (result.double() - due).abs()
    assert (error <= 2**-8 * (due.abs() + 6 * scale)).all(), error.max().item()


@pytest.mark.parametrize("tokens", [1, 4, 16, 128, 1000, 5000])
@pytest.mark.parametrize("experts", [8, 64])
def test_whole(make, tokens, experts):
    values = make(tokens, experts, 4, 512, 384)
    assert_whole(tiercel.fused_moe(*values), reference(values))


def float8(w, per_channel=True):
    scale = w.float().abs().amax(dim=2 if per_channel else (1, 2)).view(w.shape[0], -1) / 448
    return (w.float() / scale[:, :, None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 200, 4000])
def test_float8(make, tokens, per_channel):
    x, w_up, w_down, weights, ids = make(tokens, 16, 4, 512, 384)
    (up, up_scale), (down, down_scale) = float8(w_up, per_channel), float8(w_down, per_channel)
    scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
    got = tiercel.fused_moe(x, up, down, weights, ids, **scales)
    due = tiercel.ref.fused_moe(x.double(), up, down, weights.double(), ids, **scales)
    # A value between the halves may be rounded to float8's neighbour.
    error = (got.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert error < 2.5e-2
    assert torch.equal(tiercel.fused_moe(x, up, down, weights, ids, **scales), got)


@pytest.mark.parametrize("tokens", [1, 16, 200, 4000])
def test_float8_with_scales_of_blocks(make, tokens):
    x, w_up, w_down, weights, ids = make(tokens, 16, 4, 512, 384)
    (up, up_scale), (down, down_scale) = blocks_of(w_up), blocks_of(w_down)
    scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
    got = tiercel.fused_moe(x, up, down, weights, ids, **scales)
    due = tiercel.ref.fused_moe(x.double(), up, down, weights.double(), ids, **scales)
    error = (got.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert error < 2.5e-2
    assert torch.equal(tiercel.fused_moe(x, up, down, weights, ids, **scales), got)


def blocks_of(w):
    tiles = w.float().unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scale = tiles.abs().amax((2, 4)) / 448
    narrow = tiles / scale[:, :, None, :, None]
    return narrow.flatten(3).flatten(1, 2).to(torch.float8_e4m3fn), scale


@pytest.mark.sanitize
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128"])
@pytest.mark.parametrize("tokens", [3, 400])
def test_float8_halves(make, tokens, granularity, block):
    x, w_up, w_down, weights, ids = make(tokens, 8, 2, 512, 384)
    routing = tiercel.moe_align_block_size(ids, block, 8)
    blocks = granularity == "1x128"

    def of(w):
        return blocks_of(w) if blocks else float8(w, granularity == "row")

    (q, x_scale), (up, up_scale) = tiercel.fp8_quantize(x, granularity), of(w_up)
    scales = {"x_scale": x_scale, "w_up_scale": up_scale}
    inner = tiercel.moe_up(q, up, *routing, 2, block, **scales)
    # float64 would widen all weights: float32 sums of few more roundings than the kernel's.
    due = tiercel.ref.moe_up(q, up, *routing, 2, block, **scales)
    torch.testing.assert_close(inner.float(), due.float(), rtol=1.6e-2, atol=8e-3)
    (q, x_scale), (down, down_scale) = tiercel.fp8_quantize(inner, granularity), of(w_down)
    scales = {"x_scale": x_scale, "w_down_scale": down_scale}
    outer = tiercel.moe_down(q, down, weights.flatten(), *routing, block, **scales)
    due = tiercel.ref.moe_down(q, down, weights.flatten(), *routing, block, **scales)
    torch.testing.assert_close(outer.float(), due.float(), rtol=1.6e-2, atol=8e-3)


@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("block", [64, 128])
def test_what_the_tuner_may_choose(make, tokens, block):
    x, w_up, w_down, weights, ids = values = make(tokens, 6, 3, 520, 392)
    due, plain = reference(values, activation="gelu"), ((w_up, None), (w_down, None))
    for up in tiles(block, "up", "bfloat16"):
        for down in tiles(block, "down", "bfloat16"):
            choice = MoeTiles(block, up, down)
            assert_whole(run(x, plain, weights, ids, "gelu", None, choice), due)
    x, w_up, w_down, weights, ids = make(tokens, 6, 3, 528, 400)
    narrow = (float8(w_up), float8(w_down))
    due = run(x, narrow, weights, ids, "silu", None, MoeTiles(64, None, None))
    for up in tiles(block, "up", "float8_e4m3fn"):
        for down in tiles(block, "down", "float8_e4m3fn"):
            got = run(x, narrow, weights, ids, "silu", None, MoeTiles(block, up, down))
            assert torch.equal(got, due)  # the same sums of the same values, whatever the tiles


@pytest.mark.parametrize("tokens", [33, 2000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_elsewhere_and_ids_of_none(make, tokens, dtype):
    x, w_up, w_down, weights, ids = make(tokens, 16, 4, 320, 320)
    ids = ids.to(dtype)
    ids[3, 1], ids[7, 0] = -1, 99
    expert_map = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    expert_map[::2] = torch.arange(8, dtype=torch.int32, device="cuda")
    values = (x, w_up[:8], w_down[:8], weights, ids)
    due = reference(values, expert_map=expert_map)
    assert_whole(tiercel.fused_moe(*values, expert_map=expert_map), due)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "blocks"])
@pytest.mark.parametrize(("tokens", "experts"), [(700, 8), (1500, 33), (5000, 40)])
def test_whole_is_its_halves_one_after_the_other(make, tokens, experts, kind):
    """`down` begins while `up` still works, and reads rows in another order: the same bits."""
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    x, w_up, w_down, weights, ids = make(tokens, experts, 4, 1024, 640, dtype)
    routing = tiercel.moe_align_block_size(ids, 128, experts)
    rows, scales, of_up, of_down = x, {}, {}, {}
    if kind == "blocks":
        (w_up, up_scale), (w_down, down_scale) = blocks_of(w_up), blocks_of(w_down)
        scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
        rows, x_scale = tiercel.fp8_quantize(x, "1x128")
        of_up = {"x_scale": x_scale, "w_up_scale": up_scale}
    act = "gelu" if kind == "blocks" else "silu"  # SiLU before float8 is another instruction
    rows = tiercel.moe_up(rows, w_up, *routing, 4, 128, activation=act, **of_up)
    if kind == "blocks":
        rows, x_scale = tiercel.fp8_quantize(rows, "1x128")
        of_down = {"x_scale": x_scale, "w_down_scale": down_scale}
    outer = tiercel.moe_down(rows, w_down, weights.flatten(), *routing, 128, **of_down)
    due = tiercel.moe_sum(outer.view(tokens, 4, -1))
    for _ in range(10):
        whole = tiercel.fused_moe(x, w_up, w_down, weights, ids, activation=act, **scales)
        assert torch.equal(whole, due)


def test_all_tokens_to_one_expert(make):
    x, w_up, w_down, weights, ids = make(100, 8, 1, 320, 320)
    values = (x, w_up, w_down, weights, torch.full_like(ids, 5))
    assert_whole(tiercel.fused_moe(*values), reference(values))


def test_nan_and_infinity_stay_in_their_token(make):
    values = make(16, 4, 2, 320, 320)
    clean = tiercel.fused_moe(*values)
    values[0][3, 7], values[0][5, 0] = float("nan"), float("inf")
    dirty = tiercel.fused_moe(*values)
    assert dirty[3].isnan().all() and not dirty[5].isfinite().any()
    others = [t for t in range(16) if t not in (3, 5)]
    assert torch.equal(dirty[others], clean[others])


def test_strided(make):
    x, w_up, w_down, weights, ids = make(9, 4, 2, 320, 320)
    due = tiercel.fused_moe(x, w_up, w_down, weights, ids)
    wide = torch.cat([x, x], dim=1)[:, :320]
    padded = torch.zeros(4, 640, 400, dtype=x.dtype, device="cuda")
    padded[:, :, :320] = w_up
    assert torch.equal(tiercel.fused_moe(wide, padded[:, :, :320], w_down, weights, ids), due)


@pytest.mark.parametrize("tokens", [128, 2000])
def test_the_same_every_time(make, tokens):
    values = make(tokens, 64, 8, 512, 384)
    first = tiercel.fused_moe(*values)
    assert all(torch.equal(tiercel.fused_moe(*values), first) for _ in range(10))


def test_empty(make):
    x, w_up, w_down, weights, ids = make(4, 4, 2, 320, 320)
    assert tiercel.fused_moe(x[:0], w_up, w_down, weights[:0], ids[:0]).shape == (0, 320)


def test_captured(make):
    values = make(16, 8, 2, 512, 384)
    due = tiercel.fused_moe(*values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tiercel.fused_moe(*values)
    result.zero_()
    graph.replay()
    assert torch.equal(result, due)


def test_on_a_stream(make):
    values = make(16, 8, 2, 512, 384)
    due = tiercel.fused_moe(*values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = tiercel.fused_moe(*values)
    stream.synchronize()
    assert torch.equal(result, due)


def test_weights_beyond_2_to_31_elements(make):
    """The last expert's rows lie behind what 32 bits count."""
    hidden, inner, experts = 8192, 10240, 14  # 14 * 20480 * 8192 > 2**31
    x, _, _, weights, ids = make(4, 2, 1, hidden, 320)
    up = torch.zeros(experts, 2 * inner, hidden, dtype=x.dtype, device="cuda")
    down = torch.zeros(experts, hidden, inner, dtype=x.dtype, device="cuda")
    for weight in (up, down):
        weight[-1].normal_(std=0.01)
        weight[0] = weight[-1]
    last = tiercel.fused_moe(x, up, down, weights, torch.full_like(ids, experts - 1))
    assert last.count_nonzero() > 0
    assert torch.equal(last, tiercel.fused_moe(x, up, down, weights, torch.zeros_like(ids)))
