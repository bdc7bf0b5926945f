# SPDX-License-Identifier: Apache-2.0
"""The same for the products of mixtures of experts: ids, maps, and the routing's lists."""

import pytest
import torch
from support.emulator import kernels, options
from support.index_fuzz import CASES, Draw, embedded, margins_kept, reference, run

from tiercel import ref
from tiercel.ops.moe import fused as moe

pytestmark = pytest.mark.torch

FUZZED = ("fused_moe", "moe_down", "moe_up")

FP8 = torch.float8_e4m3fn
KINDS = (None, "rows", "experts", "blocks")  # of float8's scales


def weights_of(draw, shape, kind, dtype=torch.bfloat16):
    """With scales where they are float8."""
    if kind is None:
        return draw.normal(*shape, dtype=dtype, scale=shape[2] ** -0.5), None
    sizes = {
        "rows": shape[:2],
        "experts": (shape[0], 1),
        "blocks": (shape[0], -(-shape[1] // 128), -(-shape[2] // 128)),
    }[kind]
    scale = (draw.uniform(*sizes) + 0.5) * shape[2] ** -0.5
    return draw.normal(*shape, dtype=torch.float32).to(FP8), scale


def rows_of(draw, rows, columns, kind, dtype=torch.bfloat16):
    if kind is None:
        return draw.normal(rows, columns, dtype=dtype), None
    sizes = (rows, -(-columns // 128)) if kind == "blocks" else (draw.of(1, rows), 1)
    return draw.normal(rows, columns, dtype=torch.float32).to(FP8), draw.uniform(*sizes) + 0.5


def lists(draw, tokens, k, experts, block):
    """A routing, in which some of the numbers are others."""
    ids = torch.rand(tokens, max(experts, k), generator=draw.generator).topk(k).indices % experts
    routing = list(ref.moe_align_block_size(ids, block, experts))
    counts = (tokens * k, experts, routing[0].shape[0])
    which = draw.of((0,), (1,), (2,), (0, 1, 2))
    for i in which:
        routing[i] = draw.strays(routing[i], counts[i], wide=False)
    return routing


def once(routing, block, elements):
    """Which elements one place of the blocks in use has: others may be any of several's."""
    used = min(max(int(routing[2][0]), 0), routing[0].shape[0]) // block * block
    ids = routing[0][:used].long()
    return torch.bincount(ids[(ids >= 0) & (ids < elements)], minlength=elements) < 2


@pytest.mark.parametrize("half", ["moe_up", "moe_down"])
@pytest.mark.parametrize("case", range(CASES))
def test_halves(half, case):
    draw = Draw(case)
    kind, block = draw.of(*KINDS), draw.of(64, 128)
    tokens, k, experts = draw.of(1, 9, 70), draw.of(1, 2), draw.of(1, 3)
    rows, columns = (128, 128) if kind == "blocks" else (draw.of(8, 72), draw.of(32, 144))
    routing = lists(draw, tokens, k, experts, block)
    elements = tokens * k
    up = half == "moe_up"
    x, x_scale = rows_of(draw, tokens if up else elements, columns, kind)
    w, w_scale = weights_of(draw, (experts, 2 * rows if up else rows, columns), kind)
    options = [k, block, draw.of("silu", "gelu")] if up else [block]
    factors = [] if up else [draw.uniform(elements)]
    args = (x, w, *factors, *routing, *options, x_scale, w_scale, None)
    due = reference(half)(*args)
    got, _ = run(half, *args)
    same = once(routing, block, elements)
    torch.testing.assert_close(got[same], due[same], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("case", range(CASES))
def test_rows_in_the_order_of_the_routing(case):
    """As fused_moe has them between the halves; and counters of tiles that hold anything."""
    draw = Draw(case)
    tokens, k, experts = draw.of(9, 70), 2, 3
    routing = lists(draw, tokens, k, experts, 128)
    ids = torch.randint(experts, (tokens, k), generator=draw.generator, dtype=torch.int32)
    x = draw.normal(tokens, 64)
    w_up, w_down = draw.normal(experts, 144, 64), draw.normal(experts, 64, 72)
    inner = torch.zeros(routing[0].shape[0], 72, dtype=x.dtype)
    out = torch.zeros(tokens * k, 64, dtype=x.dtype)
    counted = torch.zeros(3 + routing[1].shape[0], dtype=torch.int32)
    counted[:3] = torch.cat([routing[2], draw.strays(torch.zeros(2), 1, wide=False)])
    to_slots = draw.of(False, True)
    tensors = [x, w_up, w_down, *routing, ids, inner, out, draw.uniform(tokens * k), counted]
    x, w_up, w_down, *routing, ids, inner, out, weights, counted = map(embedded, tensors)
    with margins_kept(), options(multiprocessors=4):
        if to_slots:
            named = (ids, experts, None, None)
            kernels.moe_up(x, w_up, *routing, None, inner, 128, 0, *named, None)
            kernels.moe_down(inner, w_down, *routing, weights, out, 128, 0, *named, None)
        else:
            named = (None, 0, None, None)
            block = draw.of(64, 128)
            routing = [*routing[:2], counted]
            if block == 64:
                blocks = -(-routing[0].shape[0] // 64)
                more = torch.cat([routing[1], routing[1]])[:blocks]
                counted = torch.cat([counted, counted])[: 3 + blocks]
                routing = [routing[0], more.contiguous(), counted.contiguous()]
            middle = torch.zeros(tokens * k, 72, dtype=x.dtype)
            kernels.moe_up(x, w_up, *routing, None, middle, block, 0, *named, None)


@pytest.mark.parametrize("case", range(CASES))
def test_fused_moe(case):
    draw = Draw(case)
    kind = draw.of(*KINDS)
    tokens, k, experts = draw.of(1, 4, 9, 70), draw.of(1, 2), draw.of(2, 4)
    if draw.random.random() < 0.1:
        tokens = 600  # the routing is a launch of its own
    hidden, inner = (256, 128) if kind is not None else (72, 40)
    expert_map, everywhere = None, experts
    if draw.of(False, True):
        everywhere = experts + 3
        expert_map = torch.randperm(everywhere, generator=draw.generator)
        expert_map = draw.strays(torch.where(expert_map < experts, expert_map, -1), experts, False)
    ids = torch.rand(tokens, everywhere, generator=draw.generator).topk(k).indices
    ids = draw.strays(ids, everywhere, wide=draw.of(False, True))
    w_up, up_scale = weights_of(draw, (experts, 2 * inner, hidden), kind)
    w_down, down_scale = weights_of(draw, (experts, hidden, inner), kind)
    x, weights = draw.normal(tokens, hidden), draw.uniform(tokens, k)
    options = (draw.of("silu", "relu"), expert_map, up_scale, down_scale, None)
    args = (x, w_up, w_down, weights, ids, *options)
    due = reference("fused_moe")(*args).float()
    got, _ = run("fused_moe", *args)
    # A value between the halves may be rounded to float8's neighbour.
    error = (got.float() - due).square().mean().sqrt()
    assert error <= (2**-7 if kind is None else 4e-2) * due.square().mean().sqrt() + 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_most_experts_are_elsewhere(seed):
    """Nobody loads for their tiles, so who multiplies may be several tiles ahead of who loads."""
    draw = Draw(seed)
    inner, hidden, everywhere, here = draw.of(72, 264), 64, 8, 2
    expert_map = torch.full((everywhere,), -1, dtype=torch.int32)
    order = torch.randperm(everywhere, generator=draw.generator)
    expert_map[order[:here]] = torch.arange(here, dtype=torch.int32)
    ids = torch.rand(300, everywhere, generator=draw.generator).topk(2).indices
    w_up, _ = weights_of(draw, (here, 2 * inner, hidden), None)
    w_down, _ = weights_of(draw, (here, hidden, inner), None)
    x, weights = draw.normal(300, hidden), draw.uniform(300, 2)
    chosen = ("silu", expert_map, None, None, None)
    due = reference("fused_moe")(x, w_up, w_down, weights, ids, *chosen).float()
    wide = (128, (256, 1), (256, 1))
    with options(multiprocessors=1 + seed % 4, seed=seed):
        got = moe.run(x, ((w_up, None), (w_down, None)), weights, ids, "silu", expert_map, wide)
    error = (got.float() - due).square().mean().sqrt()
    assert error <= 2**-7 * due.square().mean().sqrt()


@pytest.mark.parametrize("case", range(CASES))
def test_the_gradients_of_fused_moe(case):
    """Places and offsets that a forward never makes; what comes out is not told."""
    draw = Draw(case)
    tokens, k, experts = draw.of(1, 9, 70), draw.of(1, 2), draw.of(1, 3)
    hidden, inner, rows = 72, 40, tokens * k
    ids = torch.randint(experts, (tokens, k), generator=draw.generator, dtype=torch.int32)
    places = draw.strays(torch.randperm(rows, generator=draw.generator), rows, wide=False)
    offsets = draw.strays(torch.linspace(0, rows, experts + 1).int(), rows, wide=False)
    x, grad, pre = draw.normal(tokens, hidden), draw.normal(tokens, hidden), draw.normal(rows, 80)
    w_up, w_down = draw.normal(experts, 2 * inner, hidden), draw.normal(experts, hidden, inner)
    tensors = (x, grad, w_up, w_down, draw.uniform(tokens, k), ids)
    saved = (pre, places.view(tokens, k), offsets)
    found, _ = run("fused_moe_backward", *tensors, *saved, "silu", None, *[True] * 4, False, None)
    assert [tuple(t.shape) for t in found] == [tuple(t.shape) for t in (x, w_up, w_down, ids)]
