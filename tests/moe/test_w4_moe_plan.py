# SPDX-License-Identifier: Apache-2.0
"""The launcher of w4_moe: it needs neither PyTorch nor a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

import tiercel
from tiercel import _C

NVFP4, MXFP4, INT4 = range(3)
SILU, RELU_SQUARED = 0, 4


def plan(make, half="up", kind=MXFP4, tokens=64, block=32, activation=SILU, **changes):
    """A plan for gpt-oss-20b's shapes."""
    experts, k, hidden, inner = 32, 4, 2880, 2880
    dtype = changes.pop("dtype", "bfloat16")
    up = half == "up"
    rows, columns = (2 * inner, hidden) if up else (hidden, inner)
    if activation == RELU_SQUARED:
        rows = inner
    scale = {
        NVFP4: lambda: make(experts, rows, columns // 16, dtype="float8_e4m3fn"),
        MXFP4: lambda: make(experts, rows, columns // 32, dtype="uint8"),
        INT4: lambda: make(experts, rows, columns // 64, dtype=dtype),
    }[kind]()
    elements = tokens * k
    slots = elements + experts * (block - 1)
    lists = [None] * 3
    if block:
        lists = [make(slots, dtype="int32"), make(-(-slots // block), dtype="int32")]
        lists.append(make(1, dtype="int32"))
    arguments = {
        "x": make(tokens if up else elements, columns, dtype=dtype),
        "weight": make(experts, rows, columns // 2, dtype="uint8"),
        "scale": scale,
        "zero_point": None,
        "global_scale": None,
        "bias": None,
        "x_scale": None,
        "ids": make(tokens, k, dtype="int64"),
        "sorted_token_ids": lists[0],
        "expert_ids": lists[1],
        "num_tokens_post_padded": lists[2],
        "out": make(elements, inner if up else hidden, dtype=dtype),
    } | changes
    rest = (block, experts, kind, *([activation, False, 1.0, 0.0] if up else []))
    return getattr(_C, f"w4_moe_{half}_plan")(*arguments.values(), *rest)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4, INT4])
@pytest.mark.parametrize("half", ["up", "down"])
def test_shapes(half, kind):
    rows = 5760 if half == "up" else 2880
    for tokens, block in ((1, 0), (4, 0), (16, 8), (64, 16), (64, 32), (4096, 128)):
        got = plan(ExchangeTensor, half, kind, tokens, block)
        tile, threads = (192, 512) if block == 128 else (64, 320)
        blocks = -(-(tokens * 4 + 32 * (block - 1)) // block) if block else tokens * 4
        assert got["kernel"].startswith("w4_moe<int4" if kind == INT4 else "w4_moe<e2m1")
        assert (got["rows"], got["blocks"]) == (tile, blocks)
        parts = 2 if tokens == 1 and half == "down" else 1  # 180 tiles for 396 places
        assert (got["parts"], got["grid"]) == (parts, parts * blocks * -(-rows // tile))
        assert got["dynamic_smem"] <= 226 * 1024 and got["block"] == threads


@pytest.mark.parametrize("kind", [NVFP4, MXFP4, INT4])
@pytest.mark.parametrize("block", [0, 8, 16, 32])
def test_three_blocks_of_few_tokens_fit(make, block, kind):
    got = plan(make, kind=kind, tokens=4, block=block)
    assert got["tokens"] == (block or 8)
    assert 3 * (got["dynamic_smem"] + 2048) <= 228 * 1024


def test_scales_of_a_long_k(make):
    """They leave room for fewer blocks a multiprocessor, or for none."""

    def shared(k):
        sizes = {
            "x": make(16, k, dtype="bfloat16"),
            "weight": make(32, 5760, k // 2, dtype="uint8"),
            "scale": make(32, 5760, k // 16, dtype="float8_e4m3fn"),
        }
        return plan(make, kind=NVFP4, tokens=16, block=8, **sizes)["dynamic_smem"]

    # 256 bytes of scales for 64 values of K, and stages of 6 KB.
    assert 3 * (shared(8192) + 2048) <= 228 * 1024
    assert 114 * 1024 < shared(32768) + 2048 <= 228 * 1024
    with pytest.raises(NotImplementedError, match="do not fit shared memory, got K = 65536"):
        shared(65536)


def test_scales_start_at_16_bytes(make):
    """TMA copies them."""
    scale = make(32, 5760, 90, dtype="uint8", address=ADDRESS + 2)
    with pytest.raises(NotImplementedError, match="`scale` must start at a multiple of 16 bytes"):
        plan(make, scale=scale)


def test_k_has_one_order_in_the_batch_invariant_mode(make):
    with tiercel.batch_invariant():
        assert plan(make, "down", tokens=1, block=0)["parts"] == 1


def test_blocks_of_64(make):
    for kind in (NVFP4, MXFP4):
        got = plan(make, kind=kind, block=64)
        assert (got["tokens"], got["rows"], got["block"]) == (64, 128, 320)
        assert 2 * (got["dynamic_smem"] + 2048) <= 228 * 1024  # two thread blocks fit


def float8(make, half="up", kind=MXFP4, tokens=64, **changes):
    """A plan with float8 activations."""
    rows = tokens if half == "up" else tokens * 4
    given = {
        "x": make(rows, 2880, dtype="float8_e4m3fn"),
        "x_scale": make(rows, 1, dtype="float32"),
    }
    if kind == INT4:
        shape = (32, 5760 if half == "up" else 2880, 45)
        given["scale"] = make(*shape, dtype="bfloat16")
    return plan(make, half, kind, tokens, **given | changes)


@pytest.mark.parametrize("kind", [MXFP4, INT4])
@pytest.mark.parametrize("half", ["up", "down"])
def test_float8(half, kind):
    rows = 5760 if half == "up" else 2880
    for tokens, block in ((1, 0), (16, 8), (64, 16), (64, 32), (256, 64), (4096, 128)):
        got = float8(ExchangeTensor, half, kind, tokens, block=block)
        small = block <= 32
        name = "e2m1" if kind == MXFP4 else "int4, group=32"
        assert got["kernel"] == f"w4_moe_float8<{name}, tokens={32 if small else 128}>"
        assert (got["tokens"], got["rows"], got["parts"]) == (block or 8, 128, 1)
        alone = not small or kind == INT4
        assert got["block"] == (384 if alone else 320)
        assert (1 if alone else 2) * (got["dynamic_smem"] + 2048) <= 227 * 1024
        assert got["grid"] == got["blocks"] * -(-rows // 128)


def test_float8_groups_of_128(make):
    """They have kernels that scale less often."""
    sizes = {
        "x": make(64, 2944, dtype="float8_e4m3fn"),
        "weight": make(32, 5760, 1472, dtype="uint8"),
        "scale": make(32, 5760, 23, dtype="bfloat16"),
    }
    got = float8(make, kind=INT4, block=128, **sizes)
    assert got["kernel"] == "w4_moe_float8<int4, group=128, tokens=128>"


def test_bad_float8_arguments(make):
    with pytest.raises(ValueError, match="`format` must be mxfp4 or int4 where `x` is float8"):
        float8(make, kind=NVFP4, scale=make(32, 5760, 180, dtype="float8_e4m3fn"))
    with pytest.raises(TypeError, match="`x` must have dtype float8_e4m3fn, got bfloat16"):
        float8(make, x=make(64, 2880, dtype="bfloat16"))
    with pytest.raises(TypeError, match="`x` must have dtype bfloat16 or float16"):
        float8(make, x_scale=None)
    with pytest.raises(TypeError, match="`x_scale` must have dtype float32"):
        float8(make, x_scale=make(64, 1, dtype="bfloat16"))
    text = r"`x_scale` must have one element or one for each row of `x`, 64, got shape \[63\]"
    with pytest.raises(ValueError, match=text):
        float8(make, x_scale=make(63, dtype="float32"))
    with pytest.raises(TypeError, match="`out` must have dtype bfloat16"):
        float8(make, out=make(256, 2880, dtype="float16"))
    with pytest.raises(TypeError, match="`scale` must have dtype bfloat16"):
        float8(make, kind=INT4, scale=make(32, 5760, 45, dtype="float16"))


def test_without_a_gate(make):
    assert plan(make, activation=RELU_SQUARED)["grid"] == plan(make, "down")["grid"]


def test_float16(make):
    for kind in (NVFP4, INT4):
        assert "float16" in plan(make, "up", kind, dtype="float16")["kernel"]
    with pytest.raises(NotImplementedError, match="MXFP4's scales need the range of bfloat16"):
        plan(make, dtype="float16")


def test_empty(make):
    assert plan(make, tokens=0)["kernel"] == "none"


def vector(*shape, dtype="bfloat16"):
    return lambda make: make(*shape, dtype=dtype)


BAD = [
    ({"x": vector(64, 2816)}, ValueError, "`weight` must have shape [E, N, K / 2]"),
    ({"weight": vector(32, 5760, 1440)}, TypeError, "`weight` must have dtype uint8"),
    ({"out": vector(256, 2816)}, ValueError, "`out` must have shape [T * k, features]"),
    ({"out": vector(256, 2880, dtype="float16")}, TypeError, "`out` must have dtype bfloat16"),
    ({"scale": vector(32, 5760, 90)}, TypeError, "`scale` must have dtype uint8"),
    (
        {"scale": vector(32, 5760, 91, dtype="uint8")},
        ValueError,
        "`scale` must have shape [E, N, K / 32]",
    ),
    ({"zero_point": vector(32, 5760, 90)}, ValueError, "`zero_point` is for int4 only"),
    ({"global_scale": vector(32)}, TypeError, "`global_scale` must have dtype float32"),
    ({"global_scale": vector(1, dtype="float32")}, ValueError, "`global_scale` must have shape"),
    ({"bias": vector(32, 2880)}, ValueError, "`bias` must have shape [E, N]"),
    ({"ids": vector(64, 4)}, TypeError, "`ids` must have dtype int32 or int64"),
    ({"expert_ids": lambda make: None}, ValueError, "must be all tensors or all None"),
    ({"expert_ids": vector(3, dtype="int32")}, ValueError, "`expert_ids` must have shape"),
    ({"num_tokens_post_padded": vector(2, dtype="int32")}, ValueError, "must have shape [1]"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(make, changes, error, text):
    with pytest.raises(error) as info:
        plan(make, **{name: value(make) for name, value in changes.items()})
    assert str(info.value).startswith("w4_moe_up: ") and text in str(info.value)


def test_what_the_kernels_do_not_take(make):
    with pytest.raises(NotImplementedError, match="`block_size` must be 8, 16, 32, 64 or 128"):
        plan(make, block=24)
    with pytest.raises(NotImplementedError, match="`block_size` 64 is for bfloat16 and weights"):
        plan(make, kind=INT4, block=64)
    with pytest.raises(NotImplementedError, match="without a routing there are up to 16 ids"):
        plan(make, tokens=5, block=0)
    narrow = {"x": make(64, 2848, dtype="bfloat16")}
    with pytest.raises(NotImplementedError, match="multiples of 64 features and of 64 values"):
        plan(make, **narrow)
