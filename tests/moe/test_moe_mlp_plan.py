# SPDX-License-Identifier: Apache-2.0
"""The launchers of moe_up and moe_down: checks and plans, without PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

T, E, K, H, I = 5, 4, 2, 384, 320  # noqa: E741


def routing(make, elements, experts, block):
    slots = elements + experts * (block - 1)
    if elements < experts:
        slots = min(elements * block, slots)
    sizes = (slots, -(-slots // block), 1)
    return dict(
        zip(
            ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
            [make(size, dtype="int32") for size in sizes],
            strict=True,
        )
    )


def up(make, tokens=T, experts=E, k=K, hidden=H, inner=I, block=64, dtype="bfloat16", **changes):
    elements = tokens * k
    arguments = {
        "x": make(tokens, hidden, dtype=dtype),
        "w_up": make(experts, 2 * inner, hidden, dtype=dtype),
        **routing(make, elements, experts, block),
        "weights": None,
        "out": make(elements, inner, dtype=dtype),
        "block_size": block,
        "activation": 0,
        "topk_ids": None,
        "experts": experts if "topk_ids" in changes else 0,
        "x_scale": None,
        "w_scale": None,
    } | changes
    return _C.moe_up_plan(*arguments.values())


def down(make, tokens=T, experts=E, k=K, hidden=H, inner=I, block=64, dtype="bfloat16", **changes):
    elements = tokens * k
    arguments = {
        "x": make(elements, inner, dtype=dtype),
        "w_down": make(experts, hidden, inner, dtype=dtype),
        **routing(make, elements, experts, block),
        "weights": make(elements),
        "out": make(elements, hidden, dtype=dtype),
        "block_size": block,
        "activation": 0,
        "topk_ids": None,
        "experts": experts if "topk_ids" in changes else 0,
        "x_scale": None,
        "w_scale": None,
    } | changes
    return _C.moe_down_plan(*arguments.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block", [64, 128])
def test_plans(dtype, block):
    for tokens in (1, 16, 128, 4096):
        for name, plan in (("up_silu", up), ("down", down)):
            got = plan(ExchangeTensor, tokens, 64, 8, 2048, 1024, block=block, dtype=dtype)
            short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
            assert got["kernel"].startswith(f"moe_{name}_{short}_{block}x{got['tile_n']}")
            columns = 1024 * 2 // got["tile_n"] if plan is up else 2048 // got["tile_n"]
            assert got["tile_m"] == block and got["tiles"] % columns == 0
            assert got["grid"] == min(got["tiles"] * got["cluster"], 132)
            assert got["dynamic_smem"] <= 227 * 1024 - 1024


def test_counters_behind_the_number_of_slots(make):
    one, more = (  # of five blocks
        up(make, block=128, num_tokens_post_padded=make(n, dtype="int32")) for n in (1, 3 + 5)
    )
    assert more == one
    for n in (2, 3, 4 + 5):
        with pytest.raises(
            ValueError, match="`num_tokens_post_padded` must have shape .1. = .1., g"
        ):
            up(make, block=128, num_tokens_post_padded=make(n, dtype="int32"))


def float8(make, **changes):
    e4m3, rows = "float8_e4m3fn", T * K
    arguments = {
        "x": make(rows, I, dtype=e4m3),
        "w_down": make(E, H, I, dtype=e4m3),
        "x_scale": make(rows),
        "w_scale": make(E, H),
    }
    return down(make, **(arguments | changes))


def test_float8(make):
    assert float8(make)["kernel"] == "moe_down_fp8_64x128_pingpong"
    assert (
        float8(make, x_scale=make(1), w_scale=make(E, 1))["kernel"]
        == "moe_down_fp8_64x128_pingpong"
    )


def blocks(make, rows=10, hidden=384, inner=256, block=64, **changes):
    e4m3 = "float8_e4m3fn"
    arguments = {
        "x": make(rows, inner, dtype=e4m3),
        "w_down": make(E, hidden, inner, dtype=e4m3),
        "out": make(rows, hidden, dtype="bfloat16"),
        "x_scale": make(rows, inner // 128),
        "w_scale": make(E, hidden // 128, inner // 128),
    }
    return down(make, rows // K, hidden=hidden, inner=inner, block=block, **(arguments | changes))


def test_scales_of_blocks(make):
    assert blocks(make)["kernel"] == "moe_down_fp8_blocks_64x128_pingpong"
    assert blocks(make, block=128)["kernel"] == "moe_down_fp8_blocks_128x256"
    with pytest.raises(ValueError) as info:
        blocks(make, x_scale=make(10, 3))
    shape = "`x_scale` must have shape [rows of x, columns / 128] = [10, 2], got [10, 3]"
    assert str(info.value) == f"moe_down: {shape}"
    with pytest.raises(ValueError, match="rows of weights / 128, columns / 128. = .4, 3, 2., got"):
        blocks(make, w_scale=make(E, 3, 1))
    with pytest.raises(NotImplementedError, match="give a multiple of 128 rows of the result and"):
        blocks(make, hidden=192, w_scale=make(E, 2, 2))


BAD_FLOAT8 = [
    ({"x_scale": None}, ValueError, "`x_scale` and `w_scale` are of float8 `x`, which needs both"),
    ({"x_scale": (3,)}, ValueError, "`x_scale` must have shape [rows of x] = [10], got [3]"),
    (
        {"w_scale": (E, 5)},
        ValueError,
        "`w_scale` must have shape [E, rows of weights] = [4, 384], got [4, 5]",
    ),
]


@pytest.mark.parametrize(("sizes", "error", "text"), BAD_FLOAT8)
def test_bad_scales_are_named(make, sizes, error, text):
    changes = {name: size and make(*size) for name, size in sizes.items()}
    with pytest.raises(error) as info:
        float8(make, **changes)
    assert str(info.value) == f"moe_down: {text}"


def test_scales_without_float8(make):
    with pytest.raises(ValueError, match="`x_scale` and `w_scale` are of float8 `x` alone"):
        down(make, x_scale=make(T * K), w_scale=make(E, H))


UNROUTED = dict.fromkeys(("sorted_token_ids", "expert_ids", "num_tokens_post_padded"))


def test_ids_that_the_kernels_route(make):
    ids = {"topk_ids": make(T, K, dtype="int64")}
    assert up(make, **UNROUTED, **ids)["tiles"] == E * 5  # a block each expert, of 64 columns
    assert down(make, **UNROUTED, **ids)["tiles"] == E * 3
    with pytest.raises(ValueError, match="`topk_ids` of the experts here are needed without"):
        up(make, **UNROUTED)
    with pytest.raises(ValueError, match="must be all tensors or all None"):
        up(make, expert_ids=None, **ids)
    for tokens, block in ((T, 128), (513, 64)):
        ids["topk_ids"] = make(tokens, K, dtype="int32")
        with pytest.raises(NotImplementedError, match="kernels route up to 1024 ids to 512 exper"):
            up(make, tokens, block=block, **UNROUTED, **ids)


def test_each_activation_has_its_kernel():
    names = ["silu", "gelu", "relu", "gelu_residual"]
    for i, name in enumerate(names):
        assert up(ExchangeTensor, activation=i)["kernel"] == f"moe_up_{name}_bf16_64x128_pingpong"


def test_nothing_to_do(make):
    for plan in (up, down):
        assert plan(make, 0)["kernel"] == "none"


def test_a_small_problem_has_a_small_grid():
    assert up(ExchangeTensor, 1, 4, 1)["grid"] == 5  # one block of slots, 320 rows
    assert down(ExchangeTensor, 1, 4, 1)["grid"] == 3


BAD = [
    (
        up,
        "x",
        lambda m: m(T, H),
        TypeError,
        "`x` must have dtype bfloat16, float16 or float8_e4m3fn, got float32",
    ),
    (
        up,
        "w_up",
        lambda m: m(E, 2 * I + 2, H, dtype="bfloat16"),
        ValueError,
        "`w_up` must have shape [E, 2 * I, H] = [4, 640, 384], got [4, 642, 384]",
    ),
    (
        up,
        "out",
        lambda m: m(11, I, dtype="bfloat16"),
        ValueError,
        "`out` must have a multiple of x's 5 rows, got [11, 320]",
    ),
    (
        down,
        "w_down",
        lambda m: m(E, H, I, dtype="float16"),
        TypeError,
        "`w_down` must have dtype bfloat16, got float16",
    ),
    (
        down,
        "weights",
        lambda m: m(9),
        ValueError,
        "`weights` must have shape [T * k] = [10], got [9]",
    ),
    (
        up,
        "expert_ids",
        lambda m: m(3, dtype="int64"),
        TypeError,
        "`expert_ids` must have dtype int32, got int64",
    ),
    (
        up,
        "expert_ids",
        lambda m: m(3, dtype="int32"),
        ValueError,
        "`expert_ids` must have shape [slots / block_size] = [5], got [3]",
    ),
    (
        down,
        "num_tokens_post_padded",
        lambda m: m(2, dtype="int32"),
        ValueError,
        "`num_tokens_post_padded` must have shape [1] = [1], got [2]",
    ),
    (
        up,
        "w_up",
        lambda m: m(E, 2 * I, H, dtype="bfloat16", device="cpu"),
        ValueError,
        "`w_up` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        up,
        "x",
        lambda m: m(T, H, dtype="bfloat16", strides=(H + 4, 1)),
        NotImplementedError,
        "`x` must have rows of neighbouring elements at multiples of 16 bytes, "
        "got strides [388, 1]",
    ),
    (
        up,
        "block_size",
        lambda m: 16,
        NotImplementedError,
        "`block_size` must be 64 or 128 for the kernels, got 16",
    ),
    (
        down,
        "topk_ids",
        lambda m: m(T, 3, dtype="int32"),
        ValueError,
        "`topk_ids` must have 10 elements, got [5, 3]",
    ),
    (
        down,
        "topk_ids",
        lambda m: m(T, K, dtype="int16"),
        TypeError,
        "`topk_ids` must have dtype int32 or int64, got int16",
    ),
    (up, "activation", lambda m: 4, ValueError, "no activation has the index 4"),
]


@pytest.mark.parametrize(("plan", "name", "value", "error", "text"), BAD)
def test_bad_arguments_are_named(make, plan, name, value, error, text):
    with pytest.raises(error) as info:
        plan(make, **{name: value(make)})
    assert str(info.value) == f"{'moe_up' if plan is up else 'moe_down'}: {text}"


@pytest.mark.parametrize(("hidden", "inner"), [(316, 320), (4, 320), (320, 316)])
def test_sizes_that_are_not_supported(make, hidden, inner):
    with pytest.raises(NotImplementedError, match="`w_up` must give a multiple of 8 rows of the r"):
        up(make, hidden=hidden, inner=inner)


def test_strided_weights_are_taken(make):
    w = make(E, 2 * I, H, dtype="bfloat16", strides=(2 * I * 400, 400, 1))
    assert up(make, w_up=w)["kernel"].startswith("moe_up")
