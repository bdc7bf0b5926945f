# SPDX-License-Identifier: Apache-2.0
"""fused_moe, moe_up and moe_down (wgmma; rows gathered) on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options, plan, sm90
from support.experts import expert_data
from support.float8 import blocks
from torch.nn import functional

import tiercel
from tiercel import ref
from tiercel.ops.moe import tune as moe

pytestmark = pytest.mark.torch

ACTIVATIONS = (
    lambda a, b: functional.silu(a) * b,
    lambda a, b: functional.gelu(a) * b,
    lambda a, b: functional.relu(a) * b,
    lambda a, b: functional.gelu(a) * (b + 1),
)
REST = (None, 0, None, None)  # topk_ids, experts, scales
UNROUTED = (None, None, None)
NAMES = ("silu", "gelu", "relu", "gelu_residual")


def assert_rounded(got, due):
    """One rounding to the result's type, and what float32 sums and the activation lose."""
    unit = torch.finfo(got.dtype).eps / 2
    assert ((got.double() - due).abs() <= 1.02 * unit * due.abs() + 5e-5).all()


def check_halves(
    tokens,
    experts,
    k,
    hidden,
    inner,
    block,
    activation=0,
    dtype=torch.bfloat16,
    tile=None,
    change=None,
    counters=False,
    elsewhere=None,
):
    """`change`: of ids, which the kernels then route themselves. `counters`: of tiles taken and of
    what is stored. `elsewhere`: an expert of another device, whose weights are not to be met."""
    x, w_up, w_down, weights, ids = expert_data(tokens, experts, k, hidden, inner, dtype)
    routing, rest = UNROUTED, REST
    if change is None:
        routing = ref.moe_align_block_size(ids, block, experts)
        if counters:
            zeros = torch.zeros(2 + routing[1].numel(), dtype=torch.int32)
            routing = (*routing[:2], torch.cat([routing[2], zeros]))
        if elsewhere is not None:
            routing[1][routing[1] == elsewhere] = -1
            weights[ids == elsewhere] = torch.nan
    else:
        ids = change(ids)
        rest = (ids, experts, None, None)
    middle = torch.full((ids.numel(), inner), torch.nan, dtype=dtype)
    out = torch.full((ids.numel(), hidden), torch.nan, dtype=dtype)
    kernels.moe_up(x, w_up, *routing, None, middle, block, activation, *rest, tile)
    kernels.moe_down(middle, w_down, *routing, weights.flatten(), out, block, 0, *rest, tile)
    for element, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < experts or expert == elsewhere:
            assert not out[element].any()
            continue
        sums = w_up[expert].double() @ x[element // k].double()
        assert_rounded(middle[element], ACTIVATIONS[activation](*sums.chunk(2)))
        due = w_down[expert].double() @ middle[element].double()
        assert_rounded(out[element], due * weights.flatten()[element].double())


TILES = [(block, tile) for block in (64, 128) for tile in moe.tiles(block, "down", "bfloat16")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "tile"), TILES)
def test_halves(block, tile, dtype):
    check_halves(150, 3, 2, 328, 360, block, dtype=dtype, tile=tile)


@pytest.mark.parametrize(("block", "tile"), TILES)
def test_an_expert_elsewhere(block, tile):
    check_halves(70, 3, 2, 136, 72, block, tile=tile, elsewhere=1)


@pytest.mark.parametrize(
    ("tokens", "experts", "counters"), [(2200, 1, True), (2100, 3, False), (700, 17, True)]
)
def test_turns(tokens, experts, counters):
    """Several a block of threads; an expert's blocks in the order of turns, up to 16 at a time."""
    check_halves(tokens, experts, 1, 64, 2056, 128, counters=counters)


def strays(ids):
    wide = ids.long()
    wide[0, 0], wide[-1, -1], wide[1, 1] = -1, 2**32 + 1, 4
    return wide


CHANGES = [lambda ids: ids, lambda ids: ids * 0 + 1, strays]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tokens", [3, 150, 512])
@pytest.mark.parametrize("tile", moe.tiles(64, "down", "bfloat16"))
def test_ids_that_the_kernels_route(tile, tokens, change):
    check_halves(tokens, 4, 2, 136, 72, 64, tile=tile, change=change)


@pytest.mark.parametrize("experts", [1, 33, 200, 512])
def test_experts_that_the_kernels_route_to(experts):
    check_halves(16, experts, min(experts, 4), 136, 72, 64, change=lambda ids: ids)


@pytest.mark.parametrize(
    ("experts", "shape", "block"), [(4, (513, 2), 64), (4, (8, 2), 128), (513, (8, 2), 64)]
)
def test_ids_that_the_kernels_do_not_route(experts, shape, block):
    ids = torch.zeros(shape, dtype=torch.int32)
    x, w = torch.zeros(shape[0], 8).bfloat16(), torch.zeros(experts, 16, 8).bfloat16()
    out = torch.empty(ids.numel(), 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="kernels route up to 1024 ids to 512 experts"):
        kernels.moe_up(x, w, *UNROUTED, None, out, block, 0, ids, experts, None, None)
    for given, known in ((None, experts), (ids, experts + 1)):
        with pytest.raises(ValueError, match="`topk_ids` of the experts here"):
            kernels.moe_up(x, w, *UNROUTED, None, out, block, 0, given, known, None, None)
    used = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="`num_tokens_post_padded` must have shape .4. without a"):
        kernels.moe_up(x, w, None, None, used, None, out, block, 0, None, 0, None, None)
    with pytest.raises(ValueError, match="all tensors or all None"):
        kernels.moe_up(x, w, None, used, used, None, out, block, 0, None, 0, None, None)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("activation", range(4))
def test_activations(activation, block):
    check_halves(5, 4, 2, 72, 136, block, activation)


@pytest.mark.parametrize("block", [64, 128])
def test_silu_of_large_gates(block):
    """Two share a reciprocal: neither's size may reach the other."""
    gates = torch.tensor([-100.0, 1.5, -41, -88, 200, -2e4, 3e38, -3e38]).bfloat16()
    x, w = torch.zeros(1, 8).bfloat16(), torch.zeros(1, 16, 8).bfloat16()
    x[0, 0], w[0, :8, 0], w[0, 8:, 0] = 1, gates, torch.tensor([1.0, -2] * 4).bfloat16()
    out = torch.full((1, 8), torch.nan, dtype=torch.bfloat16)
    routing = ref.moe_align_block_size(torch.zeros(1, 1, dtype=torch.int32), block, 1)
    kernels.moe_up(x, w, *routing, None, out, block, 0, *REST, None)
    due = functional.silu(gates.double()) * w[0, 8:, 0].double()
    # Below -42 2^-60 of a gate is left.
    assert (
        (out[0].double() - due).abs() <= 2**-8 * due.abs() + 2**-58 * gates.double().abs()
    ).all()


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 64, 65, 257])
def test_few_and_more_tokens(tokens, block):
    check_halves(tokens, 4, 3, 200, 264, block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (64, 512), (1032, 24)])
def test_small_and_odd_sizes(hidden, inner, block):
    check_halves(7, 3, 2, hidden, inner, block)


def float8(x, dim):
    """Its values as float8 with a scale along `dim`."""
    scale = x.abs().amax(dim) / 448
    return (x / scale.unsqueeze(dim)).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(("block", "tile"), TILES)
def test_float8(tokens, block, tile, per_channel):
    check_float8(tokens, 208, 144, block, tile, per_channel)


@pytest.mark.parametrize(("tokens", "counters", "seed"), [(200, True, 1), (500, False, 2)])
def test_float8_of_wide_tiles(tokens, counters, seed):
    """Of sizes that leave some columns without rows; turns are taken, or not."""
    with options(seed=seed, multiprocessors=3):
        check_float8(tokens, 592, 432, 128, (256, 1), True, counters, elsewhere=1)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("multiprocessors", "seed"), [(1, 4), (2, 1), (3, 2), (7, 3)])
@pytest.mark.parametrize("tile", moe.tiles(64, "down", "float8_e4m3fn"))
def test_float8_of_few_rows_in_turns(tile, multiprocessors, seed, lists):
    """Tiles as blocks of threads come to them, of lists or of what they route themselves."""
    with options(seed=seed, multiprocessors=multiprocessors):
        elsewhere = 1 if lists else None
        check_float8(150, 144, 336, 64, tile, True, True, elsewhere, lists=lists)


def check_float8(
    tokens,
    hidden,
    inner,
    block,
    tile,
    per_channel,
    counters=False,
    elsewhere=None,
    lists=True,
):
    """`elsewhere`: an expert of another device. Without `lists` the kernels route."""
    x, w_up, w_down, weights, ids = expert_data(tokens, 3, 2, hidden, inner, torch.float32)
    routing, named = ref.moe_align_block_size(ids, block, 3), (None, 0)
    if counters:
        zeros = torch.zeros(2 + len(routing[1]), dtype=torch.int32)
        routing = (*routing[:2], torch.cat([routing[2], zeros]))
    if not lists:
        routing, named = (None, None, torch.zeros(4, dtype=torch.int32)), (ids, 3)
    if elsewhere is not None:
        routing[1][routing[1] == elsewhere] = -1
    x, x_scale = float8(x, 1)
    (w_up, up_scale), (w_down, down_scale) = float8(w_up, 2), float8(w_down, 2)
    if not per_channel:
        up_scale, down_scale = up_scale[:, :1].contiguous(), down_scale[:, :1].contiguous()
    if elsewhere is not None:  # an expert's that is not asked for
        up_scale[0], down_scale[0] = torch.inf, torch.nan
        routing[1][routing[1] == 0] = -1
    middle = torch.full((ids.numel(), inner), torch.nan, dtype=torch.bfloat16)
    out = torch.full((ids.numel(), hidden), torch.nan, dtype=torch.bfloat16)
    of_up = tile if tile in moe.tiles(block, "up", "float8_e4m3fn") else None
    kernels.moe_up(x, w_up, *routing, None, middle, block, 0, *named, x_scale, up_scale, of_up)
    q, q_scale = float8(middle.float(), 1)
    if elsewhere is not None:
        gone = (ids.flatten() == 0) | (ids.flatten() == elsewhere)
        weights.view(-1)[gone], q_scale[gone] = torch.nan, torch.inf
    factors = (weights.flatten(), out, block, 0, *named, q_scale, down_scale, tile)
    kernels.moe_down(q, w_down, *routing, *factors)
    if counters:  # of tiles that were taken
        assert routing[2][1] > 0 and routing[2][2] > 0
    for element, expert in enumerate(ids.flatten().tolist()):
        if elsewhere is not None and expert in (0, elsewhere):
            assert not middle[element].any() and not out[element].any()
            continue
        row = x[element // 2].double() * x_scale[element // 2].double()
        sums = w_up[expert].double() @ row * up_scale[expert].double()
        assert_rounded(middle[element], ACTIVATIONS[0](*sums.chunk(2)))
        due = w_down[expert].double() @ (q[element].double() * q_scale[element].double())
        due = due * down_scale[expert].double() * weights.flatten()[element].double()
        assert_rounded(out[element], due)


BLOCK_TILES = [(64, (128, 1)), (128, (256, 1))]


@pytest.mark.parametrize(
    ("tokens", "multiprocessors"), [(1, 132), (70, 132), (70, 3), (420, 5), (600, 132)]
)
@pytest.mark.parametrize(("block", "tile"), BLOCK_TILES)
def test_float8_with_scales_of_blocks(tokens, multiprocessors, block, tile):
    """On few multiprocessors a block of threads has several tiles, in turns; of 420 tokens and more
    an expert has several blocks of the routing."""
    with options(multiprocessors=multiprocessors):
        check_scales_of_blocks(tokens, block, tile)


def check_scales_of_blocks(tokens, block, tile):
    x, w_up, w_down, weights, ids = expert_data(tokens, 3, 2, 384, 256, torch.float32)
    routing = ref.moe_align_block_size(ids, block, 3)
    zeros = torch.zeros(2 + len(routing[1]), dtype=torch.int32)
    routing = (*routing[:2], torch.cat([routing[2], zeros]))
    x, x_scale = ref.fp8_quantize(x, "1x128")
    (w_up, up_scale, up_wide), (w_down, down_scale, down_wide) = blocks(w_up), blocks(w_down)
    middle = torch.full((ids.numel(), 256), torch.nan, dtype=torch.bfloat16)
    out = torch.full((ids.numel(), 384), torch.nan, dtype=torch.bfloat16)
    kernels.moe_up(x, w_up, *routing, None, middle, block, 0, None, 0, x_scale, up_scale, tile)
    q, q_scale = ref.fp8_quantize(middle, "1x128")
    factors = (weights.flatten(), out, block, 0, None, 0, q_scale, down_scale, tile)
    kernels.moe_down(q, w_down, *routing, *factors)
    x_wide = x.double() * x_scale.double().repeat_interleave(128, 1)
    q_wide = q.double() * q_scale.double().repeat_interleave(128, 1)
    for element, expert in enumerate(ids.flatten().tolist()):
        sums = (w_up[expert].double() * up_wide[expert]) @ x_wide[element // 2]
        assert_rounded(middle[element], ACTIVATIONS[0](*sums.chunk(2)))
        due = (w_down[expert].double() * down_wide[expert]) @ q_wide[element]
        assert_rounded(out[element], due * weights.flatten()[element].double())


def in_order(tokens, inner, special=None):
    """moe_up's arguments in the routing's order, for float8 with scales of blocks; and how many
    rows it has."""
    x, w_up, _, _, ids = expert_data(tokens, 3, 2, 256, inner, torch.float32)
    if special is not None:
        x[0, 0] = special
    routing = ref.moe_align_block_size(ids, 128, 3)
    x, x_scale = ref.fp8_quantize(x, "1x128")
    w_up, up_scale, _ = blocks(w_up)
    rest = (ids, 3, x_scale, up_scale, None)
    return (x, w_up, *routing, None), rest, len(routing[0])


@pytest.mark.parametrize("activation", range(4))
@pytest.mark.parametrize(
    ("tokens", "inner", "special"),
    [(1, 128, None), (150, 384, None), (3, 256, torch.nan), (3, 256, 1e6)],
)
def test_rows_that_are_quantised_as_they_are_stored(tokens, inner, special, activation):
    head, rest, slots = in_order(tokens, inner, special)
    plain = torch.zeros(slots, inner, dtype=torch.bfloat16)
    kernels.moe_up(*head, plain, 128, activation, *rest)
    q = torch.zeros(slots, inner, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(slots, inner // 128)
    kernels.moe_up(*head, q, 128, activation, *rest, scale)
    due, due_scale = ref.fp8_quantize(plain, "1x128")
    real = head[2] < 2 * tokens
    if activation == 0:  # SiLU by another instruction: now and then a neighbour
        torch.testing.assert_close(scale[real], due_scale[real], rtol=2**-8, atol=0, equal_nan=True)
        got, due = (v.float().nan_to_num(1e3)[real] for v in (q, due))
        assert ((got - due).abs() <= due.abs() * 2**-3 + 2**-9).all()
        assert (got != due).float().mean() < 0.02
    else:
        assert torch.equal(q.view(torch.uint8)[real], due.view(torch.uint8)[real])
        torch.testing.assert_close(scale[real], due_scale[real], rtol=0, atol=0, equal_nan=True)
    assert not q.view(torch.uint8)[~real].any() and not scale[~real].any()


def test_scales_of_the_result_that_do_not_fit():
    head, rest, slots = in_order(2, 256)
    q = torch.zeros(slots, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"`out_scale` must have shape .rows of out, I / 128. = "):
        kernels.moe_up(*head, q, 128, 0, *rest, torch.zeros(slots, 3))
    with pytest.raises(TypeError, match="`out` must have dtype float8_e4m3fn, got b"):
        kernels.moe_up(*head, q.bfloat16(), 128, 0, *rest, torch.zeros(slots, 2))
    with pytest.raises(
        ValueError, match="`out_scale` is of moe_up with scales of blocks and `bloc"
    ):
        kernels.moe_up(*head, q, 64, 0, *rest, torch.zeros(slots, 2))


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128"])
def test_float8_halves_as_operators(granularity):
    x, w_up, w_down, weights, ids = expert_data(40, 3, 2, 384, 256)
    routing = ref.moe_align_block_size(ids, 64, 3)
    made = []
    for w in (w_up, w_down):
        q, scale = float8(w.float(), 2)
        scale = scale[:, :1].contiguous() if granularity == "tensor" else scale
        made.append(blocks(w)[:2] if granularity == "1x128" else (q, scale))
    (up, up_scale), (down, down_scale) = made
    q, x_scale = ref.fp8_quantize(x, granularity)
    given = (q, up, *routing, 2, 64, "silu", x_scale, up_scale, None)
    inner = sm90("moe_up")(*given)
    scales = {"x_scale": x_scale, "w_up_scale": up_scale}
    due = ref.moe_up(q.double(), up, *routing, 2, 64, **scales)
    assert_rounded(inner, due)
    q, x_scale = ref.fp8_quantize(inner, granularity)
    given = (q, down, weights.flatten(), *routing, 64, x_scale, down_scale, None)
    scales = {"x_scale": x_scale, "w_down_scale": down_scale}
    due = ref.moe_down(q.double(), down, weights.flatten().double(), *routing, 64, **scales)
    assert_rounded(sm90("moe_down")(*given), due)


def test_columns_that_are_stored_are_counted():
    """`down` takes a block's rows by the copy engine once `up` has counted all of them."""
    (x, w_up, *routing, _), rest, slots = in_order(500, 384)
    blocks_used, all_blocks = int(routing[2]) // 128, len(routing[1])
    counters = torch.cat([routing[2], torch.zeros(2 + all_blocks, dtype=torch.int32)])
    q = torch.zeros(slots, 384, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(slots, 3)
    with options(multiprocessors=3):
        kernels.moe_up(x, w_up, *routing[:2], counters, None, q, 128, 0, *rest, scale)
    stored = [8 * 384] * blocks_used + [0] * (all_blocks - blocks_used)  # by 8 warps
    assert counters[3:].tolist() == stored


@pytest.mark.parametrize("mixed", [None, "up", "down"])
# A share of a GPU refuses the single launch of few tokens; then others do it. 300 tokens are in
# blocks of 128.
@pytest.mark.parametrize(("tokens", "share"), [(3, True), (3, False), (100, False), (300, False)])
def test_float8_blocks_whole(tokens, share, mixed):
    x, w_up, w_down, weights, ids = expert_data(tokens, 4, 2, 256, 128)
    (w_up, up_scale, _), (w_down, down_scale, _) = blocks(w_up), blocks(w_down)
    if mixed == "up":
        up_scale = up_scale[:, :1, 0].contiguous()
    if mixed == "down":
        down_scale = down_scale[:, :1, 0].contiguous()
    with options(share=share):
        assert_float8_whole(x, w_up, w_down, up_scale, down_scale, weights, ids)


def test_float8_blocks_in_the_batch_invariant_mode(monkeypatch):
    """300 tokens are in blocks of 128, whose kernel may quantise what it stores; 40 in 64. Its SiLU
    is another one then, which only a GPU's approximations show: nothing may be quantised there."""
    x, w_up, w_down, weights, ids = expert_data(300, 4, 2, 256, 128)
    (w_up, up_scale, _), (w_down, down_scale, _) = blocks(w_up), blocks(w_down)
    stored, moe_up = [], kernels.moe_up

    def noted(*given):
        stored.append(given[6].dtype)
        return moe_up(*given)

    monkeypatch.setattr(kernels, "moe_up", noted)
    more = ("silu", None, up_scale, down_scale, None)
    of_few = (x[:40], w_up, w_down, weights[:40], ids[:40], *more)
    with tiercel.batch_invariant():
        many = sm90("fused_moe")(x, w_up, w_down, weights, ids, *more)
        few = sm90("fused_moe")(*of_few)
    sm90("fused_moe")(x, w_up, w_down, weights, ids, *more)
    assert stored == [torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn]
    assert torch.equal(many[:40], few)


def assert_float8_whole(x, w_up, w_down, up_scale, down_scale, weights, ids, expert_map=None):
    options = ("silu", expert_map, up_scale, down_scale, None)
    got = sm90("fused_moe")(x, w_up, w_down, weights, ids, *options)
    wide = (x.double(), w_up, w_down, weights.double(), ids)
    scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
    due = ref.fused_moe(*wide, expert_map=expert_map, **scales)
    error = (got.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert error < 4e-2  # a value between the halves may be rounded to float8's neighbour


@pytest.mark.parametrize(
    ("lazy", "seed", "elsewhere"), [(True, 1, False), (True, 2, True), (False, 3, False)]
)
def test_float8_blocks_in_turns(lazy, seed, elsewhere):
    """Several tiles a block of threads, more steps than the ring has stages, a last tile of one
    half, whatever the order of copies and warps."""
    expert_map = torch.tensor([0, -1, 1, 2, 3], dtype=torch.int32) if elsewhere else None
    everywhere = 5 if elsewhere else None
    x, w_up, w_down, weights, ids = expert_data(300, 4, 2, 384, 768, everywhere=everywhere)
    (w_up, up_scale, _), (w_down, down_scale, _) = blocks(w_up), blocks(w_down)
    with options(lazy=lazy, seed=seed, multiprocessors=3):
        given = (x, w_up, w_down, up_scale, down_scale, weights, ids, expert_map)
        assert_float8_whole(*given)


@pytest.mark.parametrize("tokens", [3, 300])
def test_float8_whole(tokens):
    *values, ids = expert_data(tokens, 4, 2, 208, 144)
    values = (values[0], *(v.float() for v in values[1:3]), *values[3:], ids)
    (w_up, up_scale), (w_down, down_scale) = float8(values[1], 2), float8(values[2], 2)
    options = ("silu", None, up_scale, down_scale, None)
    arguments = (values[0], w_up, w_down, values[3], ids, *options)
    got = sm90("fused_moe")(*arguments)
    assert plan("fused_moe")(*arguments)["kernel"].startswith("moe_up_silu_fp8_")
    due = ref.fused_moe(
        values[0].double(),
        *(w_up, w_down, values[3].double(), ids),
        w_up_scale=up_scale,
        w_down_scale=down_scale,
    )
    # A value between the halves may be rounded to float8's neighbour.
    error = (got.double() - due).square().mean().sqrt() / due.square().mean().sqrt()
    assert error < 2e-2


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("block", "tile"), TILES)
def test_no_order_of_copies_and_warps_matters(lazy, seed, block, tile):
    with options(lazy=lazy, seed=seed):
        check_halves(20 if block == 64 else 300, 3, 2, 264, 200, block, tile=tile)
        if block == 64:
            check_halves(90, 3, 2, 264, 200, block, tile=tile, change=strays)


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 8, 2), (17, 6, 3), (130, 3, 2), (400, 5, 2)]
)
def test_whole(tokens, experts, k):
    values = expert_data(tokens, experts, k, 200, 136)
    assert_whole(sm90("fused_moe")(*values, "gelu", None, None, None, None), values, "gelu")


def assert_whole(got, values, activation, expert_map=None):
    """Three roundings: between the halves, of each expert's output, of the sum."""
    wide = [v.double() for v in values[:4]]
    due = ref.fused_moe(*wide, values[4], activation=activation, expert_map=expert_map)
    scale = due.square().mean().sqrt()
    assert ((got.double() - due).abs() <= 2**-8 * (due.abs() + 6 * scale)).all()


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_elsewhere_and_ids_of_none(tokens, dtype):
    expert_map = torch.tensor([0, -1, 1, -1, 2, 3], dtype=torch.int32)
    *values, ids = expert_data(tokens, 4, 2, 128, 136, everywhere=6)
    values = (*values, ids.to(dtype))
    values[4][0, 0], values[4][8, 1] = -1, 6
    if dtype == torch.int64:
        values[4][5, 1] = 2**32 + 1
    got = sm90("fused_moe")(*values, NAMES[3], expert_map, None, None, None)
    assert_whole(got, values, NAMES[3], expert_map)
