# SPDX-License-Identifier: Apache-2.0
"""fused_moe, moe_up and moe_down with PyTorch and without a GPU."""

import pytest
import torch
from torch.nn import functional

import tiercel
from tiercel.ops.moe.tiling import SINGLE_LAUNCH, block_size, choose, from_config

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ACTIVATIONS = {
    "silu": lambda a, b: functional.silu(a) * b,
    "gelu": lambda a, b: functional.gelu(a) * b,
    "relu": lambda a, b: functional.relu(a) * b,
    "gelu_residual": lambda a, b: functional.gelu(a) * (b + 1),
}


def data(tokens=5, experts=4, k=2, hidden=16, inner=24, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.int()
    weights = torch.rand(tokens, k, generator=generator)
    x = random(tokens, hidden) * 4
    return x, random(experts, 2 * inner, hidden), random(experts, hidden, inner), weights, ids


def truth(x, w_up, w_down, weights, ids, activation="silu", expert_map=None):
    """By the definition, in float64, a token and an expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in [(t, j) for t in range(ids.shape[0]) for j in range(ids.shape[1])]:
        expert = int(ids[t, j])
        if expert_map is not None:
            expert = int(expert_map[expert])
        if not 0 <= expert < w_up.shape[0]:
            continue
        a, b = (w_up[expert].double() @ x[t].double()).chunk(2)
        inner = ACTIVATIONS[activation](a, b)
        out[t] += weights[t, j].double() * (w_down[expert].double() @ inner)
    return out


def assert_near(result, due):
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    torch.testing.assert_close(result.double(), due, rtol=1.6e-2, atol=8e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_by_the_definition(activation):
    values = data()
    result = tiercel.fused_moe(*values, activation=activation)
    assert_near(result, truth(*values, activation))


def test_experts_elsewhere_and_ids_of_none_add_nothing():
    x, w_up, w_down, weights, ids = data(9, 6, 3)
    expert_map = torch.tensor([1, -1, 0, -1, 2, -1], dtype=torch.int32)
    local = (w_up[:3], w_down[:3], weights, ids)
    result = tiercel.fused_moe(x, *local, expert_map=expert_map)
    assert_near(result, truth(x, *local, expert_map=expert_map))
    ids[2, 1], ids[4, 0] = -1, 6
    assert_near(
        tiercel.fused_moe(x, w_up, w_down, weights, ids), truth(x, w_up, w_down, weights, ids)
    )


@pytest.mark.parametrize("block", [8, 16])
def test_the_halves_are_the_whole(block):
    x, w_up, w_down, weights, ids = data(20, 6, 3)
    routing = tiercel.moe_align_block_size(ids, block, 6)
    inner = tiercel.moe_up(x, w_up, *routing, 3, block, activation="gelu")
    assert inner.shape == (60, 24)
    outer = tiercel.moe_down(inner, w_down, weights.flatten(), *routing, block)
    result = tiercel.moe_sum(outer.view(20, 3, 16))
    assert_near(result, truth(x, w_up, w_down, weights, ids, "gelu"))


def float8(w, per_channel=True):
    scale = w.float().abs().amax(dim=2 if per_channel else (1, 2)).view(w.shape[0], -1) / 448
    return (w.float() / scale[:, :, None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("per_channel", [True, False])
def test_float8_weights(per_channel):
    x, w_up, w_down, weights, ids = data(40, 4, 2, 64, 48)
    (up, up_scale), (down, down_scale) = float8(w_up, per_channel), float8(w_down, per_channel)
    scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
    result = tiercel.fused_moe(x, up, down, weights, ids, **scales)
    wide = [q.double() * s[:, :, None].double() for q, s in ((up, up_scale), (down, down_scale))]
    due = truth(x, *wide, weights, ids)
    assert result.dtype == torch.bfloat16
    # Rows of x, and those between the halves, are quantised: 1 part in 16 at the worst, each.
    error = (result.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert 5e-3 < error < 5e-2


def test_float8_blocks():
    """Sizes that are no multiples of 128: the last blocks are smaller."""
    x, w_up, w_down, weights, ids = data(hidden=144, inner=136)
    made = [float8_blocks(w) for w in (w_up, w_down)]
    scales = {"w_up_scale": made[0][1], "w_down_scale": made[1][1]}
    got = tiercel.fused_moe(x, made[0][0], made[1][0], weights, ids, **scales)
    wide = [q.double() * spread(s, q) for q, s in made]
    due = truth(x, *wide, weights, ids)
    error = (got.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert error < 5e-2
    bad = {**scales, "w_up_scale": scales["w_up_scale"][:, :1].contiguous()}
    with pytest.raises(
        ValueError, match=r"`w_up_scale` must have shape \[E, rows / 128, columns / 128\] = "
    ):
        tiercel.fused_moe(x, made[0][0], made[1][0], weights, ids, **bad)


def spread(scale, w, rows=128):
    wide = scale.double().repeat_interleave(rows, 1).repeat_interleave(128, 2)
    return wide[:, : w.shape[1], : w.shape[2]]


def float8_blocks(w):
    sizes = [-(-size // 128) for size in w.shape[1:]]
    padded = torch.zeros(w.shape[0], sizes[0] * 128, sizes[1] * 128)
    padded[:, : w.shape[1], : w.shape[2]] = w
    scale = padded.view(w.shape[0], sizes[0], 128, sizes[1], 128).abs().amax((2, 4)) / 448
    return (w.double() / spread(scale, w)).to(torch.float8_e4m3fn), scale


SCALES = {
    "a tensor": (lambda x: tiercel.fp8_quantize(x, "tensor"), lambda w: float8(w, False)),
    "a row": (lambda x: tiercel.fp8_quantize(x, "row"), lambda w: float8(w)),
    "a block": (lambda x: tiercel.fp8_quantize(x, "1x128"), lambda w: float8_blocks(w)),
}


def widened(x, scale, blocks):
    """Rows in float64."""
    factors = scale.double()
    return x.double() * (spread(factors[None, :], x[None], rows=1)[0] if blocks else factors)


@pytest.mark.parametrize("of", SCALES)
def test_halves_of_float8_by_the_definition(of):
    x, w_up, w_down, weights, ids = data(20, 6, 3, 272, 144)
    of_rows, of_weights = SCALES[of]
    routing = tiercel.moe_align_block_size(ids, 8, 6)
    (q, x_scale), (up, up_scale) = of_rows(x), of_weights(w_up)
    inner = tiercel.moe_up(q, up, *routing, 3, 8, x_scale=x_scale, w_up_scale=up_scale)
    (q2, inner_scale), (down, down_scale) = of_rows(inner), of_weights(w_down)
    scales = {"x_scale": inner_scale, "w_down_scale": down_scale}
    outer = tiercel.moe_down(q2, down, weights.flatten(), *routing, 8, **scales)
    assert inner.dtype == outer.dtype == torch.bfloat16
    wide = [
        w.double() * (spread(scale, w) if of == "a block" else scale.double()[:, :, None])
        for w, scale in ((up, up_scale), (down, down_scale))
    ]
    rows, between = (widened(*pair, of == "a block") for pair in ((q, x_scale), (q2, inner_scale)))
    for element, expert in enumerate(ids.flatten().tolist()):
        a, b = (wide[0][expert] @ rows[element // 3]).chunk(2)
        due = functional.silu(a) * b
        torch.testing.assert_close(inner[element].double(), due, rtol=8e-3, atol=1e-3)
        due = weights.flatten()[element].double() * (wide[1][expert] @ between[element])
        torch.testing.assert_close(outer[element].double(), due, rtol=8e-3, atol=1e-3)


def test_halves_of_float8_errors():
    x, w_up, _, _, ids = data(hidden=272)
    routing = tiercel.moe_align_block_size(ids, 8, 4)
    (q, x_scale), (up, up_scale) = tiercel.fp8_quantize(x), float8(w_up)

    def call(w=up, **scales):
        given = {"x_scale": x_scale, "w_up_scale": up_scale} | scales
        return tiercel.moe_up(q, w, *routing, 2, 8, **given)

    with pytest.raises(ValueError, match=r"`x_scale` must have shape \[rows of x, 1\] or \[1, 1\]"):
        call(x_scale=x_scale[:3])
    with pytest.raises(ValueError, match=r"moe_up: `x_scale` must have 2 dimensions, got 1"):
        call(x_scale=x_scale.flatten())
    with pytest.raises(
        ValueError, match=r"`w_up_scale` must have shape \[E, rows\] or \[E, 1\] = "
    ):
        call(w_up_scale=up_scale[:, :7].contiguous())
    up, up_scale = float8_blocks(w_up)
    with pytest.raises(
        ValueError, match=r"must have shape \[rows of x, columns / 128\] = \[5, 3\]"
    ):
        call(w=up, w_up_scale=up_scale)


def test_second_half_of_float8_errors():
    _, _, w_down, weights, ids = data(inner=16)
    routing = tiercel.moe_align_block_size(ids, 8, 4)
    (q, x_scale), (down, down_scale) = tiercel.fp8_quantize(w_down[0, :10]), float8(w_down)
    with pytest.raises(ValueError, match=r"moe_down: `x_scale` must have shape \[rows of x, 1\]"):
        tiercel.moe_down(
            q, down, weights.flatten(), *routing, 8, x_scale=x_scale[:3], w_down_scale=down_scale
        )


def test_float8_errors():
    x, w_up, w_down, weights, ids = data(5, 4, 2, 32, 16)
    (up, up_scale), (down, down_scale) = float8(w_up), float8(w_down)

    def call(**scales):
        given = {"w_up_scale": up_scale, "w_down_scale": down_scale} | scales
        return tiercel.fused_moe(x, up, down, weights, ids, **given)

    with pytest.raises(
        ValueError, match=r"`w_up_scale` must have shape \[E, rows\] or \[E, 1\] = "
    ):
        call(w_up_scale=up_scale[:, :7].contiguous())
    with pytest.raises(ValueError, match="fused_moe: `w_down_scale` must have 2 dimensions, got 1"):
        call(w_down_scale=down_scale[0])


def test_no_tokens():
    x, w_up, w_down, weights, ids = data()
    result = tiercel.fused_moe(x[:0], w_up, w_down, weights[:0], ids[:0])
    assert result.shape == (0, 16)


def test_the_reference_has_a_derivative():
    values = data(3, 3, 2, 4, 4, torch.float64)
    inputs = [v.double().requires_grad_() for v in values[:4]]
    assert torch.autograd.gradcheck(lambda *v: tiercel.ref.fused_moe(*v, values[4]), inputs)


@pytest.mark.parametrize(
    ("elements", "experts", "block"),
    [(8, 64, 64), (3072, 64, 64), (4096, 64, 128), (32768, 128, 128), (0, 0, 64)],
)
def test_blocks_by_tokens_of_an_expert(elements, experts, block):
    assert block_size(elements, experts) == block


def test_few_tokens_take_one_launch():
    def chosen(tokens, k=8, sizes=(64, 2048, 1024), expert_map=None, **options):
        dtype = options.pop("dtype", torch.float8_e4m3fn)
        w_down = torch.empty(sizes, dtype=dtype, device="meta")
        ids = torch.zeros(tokens, k, dtype=torch.int32)
        return choose(w_down, ids, expert_map, False, **options)

    assert (
        all(chosen(tokens) is SINGLE_LAUNCH for tokens in (1, 3, 4))
        and chosen(1, 32) is SINGLE_LAUNCH
    )
    for other in (
        chosen(5, 1),
        chosen(4, 9),
        chosen(0),
        chosen(1, 2, (8, 4096, 14336)),  # so many weights that launches are little beside them
        chosen(1, dtype=torch.bfloat16),
        chosen(1, expert_map=torch.arange(64, dtype=torch.int32)),
        chosen(1, allow_single_launch=False),
    ):
        assert other is not SINGLE_LAUNCH and other.block == 64
    assert from_config((0, 0, 0, 0, 0)) is SINGLE_LAUNCH
    assert from_config((64, 128, 1, 64, 1)) == (64, (128, 1), (64, 1))


def test_rows_of_two_halves():
    x, w_up, _, _, ids = data()
    routing = tiercel.moe_align_block_size(ids, 8, 4)
    with pytest.raises(ValueError, match="moe_up: `w_up` must have two halves of rows"):
        tiercel.moe_up(x, w_up[:, :47], *routing, 2, 8)


def test_a_configuration_that_names_no_kernel_is_left(monkeypatch):
    """A file may say anything: then the heuristic chooses, and nothing fails at the launch."""
    from tiercel import _C
    from tiercel.ops.moe import tiling

    class Weights:  # as one on a GPU
        shape, dtype = (8, 64, 32), torch.bfloat16
        element_size, get_device = (lambda self: 2), (lambda self: 0)

    def choose(*config):
        monkeypatch.setattr(_C, "fused_moe_config", lambda *args: config or None)
        return tiling.choose(Weights(), torch.zeros(4, 2, dtype=torch.int32), None, False)

    assert choose(128, 256, 1, 256, 1) == tiling.MoeTiles(128, (256, 1), (256, 1))
    for config in ((64, 7, 1, 128, 1), (96, 128, 1, 128, 1), (64, 128, 1, 128, 9)):
        assert choose(*config) == choose()
