# SPDX-License-Identifier: Apache-2.0
"""The checks and the choice of kernel of qk_norm_rope_cache: without PyTorch and without a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

FP8 = "float8_e4m3fn"


def call(make, tokens=6, heads=4, kv_heads=2, size=64, rotated=64, dtype="bfloat16", **changes):
    kinds = {"q_out": dtype, "cache": dtype} | changes.pop("kinds", {})
    given = {
        "q": make(tokens, heads, size, dtype=dtype),
        "k": make(tokens, kv_heads, size, dtype=dtype),
        "v": make(tokens, kv_heads, size, dtype=dtype),
        "q_out": make(tokens, heads, size, dtype=kinds["q_out"]),
        "key_cache": make(9, 16, kv_heads, size, dtype=kinds["cache"]),
        "value_cache": make(9, 16, kv_heads, size, dtype=kinds["cache"]),
        "slots": make(tokens, dtype="int64"),
        "positions": make(tokens, dtype="int32"),
        "cos_sin_cache": make(100, rotated),
        "q_weight": make(size),
        "k_weight": make(size, dtype=dtype),
        "eps": 1e-6,
        "interleaved": False,
        "q_scale": None,
        "key_scale": None,
        "value_scale": None,
    } | changes
    return list(given.values())


def plan(make, *args, **changes):
    return _C.qk_norm_rope_cache_plan(*call(make, *args, **changes))


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    ("size", "rotated", "lanes"),
    [(128, 128, 8), (64, 32, 4), (80, 16, 8), (256, 64, 16), (512, 512, 32), (8, 0, 1)],
)
def test_blocks_are_whole_warps(tokens, size, rotated, lanes):
    for heads, kv_heads in [(1, 1), (32, 8), (131, 3), (0, 1)]:
        got = plan(ExchangeTensor, tokens, heads, kv_heads, size, rotated)
        assert got["lanes"] == lanes
        assert got["block"] % 32 == 0 and got["block"] <= 256
        assert got["grid"] * got["block"] * 2 >= tokens * (heads + 2 * kv_heads) * lanes


def test_many_tokens_take_two_heads_a_thread(make):
    assert plan(make, 64, 32, 8, 128, 128)["kernel"].endswith("heads=1>")
    assert plan(make, 8192, 32, 8, 128, 128)["kernel"].endswith("heads=2>")


@pytest.mark.parametrize("q_out", ["bfloat16", FP8])
@pytest.mark.parametrize("cache", ["bfloat16", FP8])
def test_float8_has_kernels_of_its_own(make, q_out, cache):
    kernel = plan(make, kinds={"q_out": q_out, "cache": cache})["kernel"]
    assert ("float8=true" in kernel) == (FP8 in (q_out, cache))


def test_an_empty_batch_launches_nothing(make):
    assert plan(make, tokens=0)["kernel"] == "none"


def test_parts_of_one_projection(make):
    parts = {
        name: make(6, heads, 64, dtype="bfloat16", strides=(512, 64, 1))
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    assert plan(make, **parts) == plan(make)


def odd(make, *shape, dtype="bfloat16"):
    return make(*shape, dtype=dtype, address=ADDRESS + 8)


LEFT_TO_REF = {
    "q off 16 bytes": lambda make: {"q": odd(make, 6, 4, 64)},
    "v off 16 bytes": lambda make: {"v": odd(make, 6, 2, 64)},
    "q_out off 16 bytes": lambda make: {"q_out": odd(make, 6, 4, 64)},
    "a weight off 16 bytes": lambda make: {"k_weight": odd(make, 64)},
    "angles off 16 bytes": lambda make: {"cos_sin_cache": odd(make, 100, 64)},
    "a cache off 16 bytes": lambda make: {"value_cache": odd(make, 9, 16, 2, 64)},
    "20 columns": lambda make: {"cos_sin_cache": make(100, 20)},
    "a size of 68": lambda make: {"size": 68},
    "a size of 520": lambda make: {"size": 520},
    "inner stride": lambda make: {"q": make(6, 4, 64, dtype="bfloat16", strides=(512, 128, 2))},
    "2**31 heads": lambda make: {"heads": 2**31},
    "2**31 rows": lambda make: {"cos_sin_cache": make(2**31, 64)},
}


@pytest.mark.parametrize("name", LEFT_TO_REF)
def test_left_to_ref(make, name):
    with pytest.raises(NotImplementedError, match="^qk_norm_rope_cache: "):
        plan(make, **LEFT_TO_REF[name](make))


def test_float8_needs_8_bytes(make):
    kinds = {"q_out": FP8, "cache": FP8}
    q_out = odd(make, 6, 4, 64, dtype=FP8)
    assert "float8=true" in plan(make, kinds=kinds, q_out=q_out)["kernel"]


BAD = {
    "q dtype": (
        lambda make: {"q": make(6, 4, 64)},
        TypeError,
        "`q` must have dtype bfloat16 or float16, got float32",
    ),
    "q rank": (
        lambda make: {"q": make(6, 256, dtype="bfloat16")},
        ValueError,
        "`q` must have 3 dimensions, got 2 (shape [6, 256])",
    ),
    "k tokens": (
        lambda make: {"k": make(5, 2, 64, dtype="bfloat16")},
        ValueError,
        "`k` must have shape [T, Hk, D] = [6, 2, 64], got [5, 2, 64]",
    ),
    "k dtype": (
        lambda make: {"k": make(6, 2, 64, dtype="float16")},
        TypeError,
        "`k` must have dtype bfloat16, got float16",
    ),
    "v shape": (
        lambda make: {"v": make(6, 3, 64, dtype="bfloat16")},
        ValueError,
        "`v` must have shape [T, Hk, D] = [6, 2, 64], got [6, 3, 64]",
    ),
    "q_out shape": (
        lambda make: {"q_out": make(6, 3, 64, dtype="bfloat16")},
        ValueError,
        "`q_out` must have shape [T, H, D] = [6, 4, 64], got [6, 3, 64]",
    ),
    "q_out dtype": (
        lambda make: {"q_out": make(6, 4, 64)},
        TypeError,
        "`q_out` must have dtype bfloat16 or float8_e4m3fn, got float32",
    ),
    "cache shape": (
        lambda make: {"value_cache": make(9, 8, 2, 64, dtype="bfloat16")},
        ValueError,
        "`value_cache` must have shape [blocks, block size, Hk, D] = [9, 16, 2, 64], "
        "got [9, 8, 2, 64]",
    ),
    "positions": (
        lambda make: {"positions": make(5, dtype="int64")},
        ValueError,
        "`positions` must have shape [T] = [6], got [5]",
    ),
    "slots": (
        lambda make: {"slots": make(6)},
        TypeError,
        "`slots` must have dtype int32 or int64, got float32",
    ),
    "rotated": (
        lambda make: {"cos_sin_cache": make(100, 66)},
        ValueError,
        "`cos_sin_cache` must have an even second dimension of at most D = 64, got 66",
    ),
    "no rows": (
        lambda make: {"cos_sin_cache": make(0, 64)},
        ValueError,
        "`cos_sin_cache` must have at least one row, got [0, 64]",
    ),
    "angles dtype": (
        lambda make: {"cos_sin_cache": make(100, 64, dtype="float16")},
        TypeError,
        "`cos_sin_cache` must have dtype float32 or bfloat16, got float16",
    ),
    "weight": (
        lambda make: {"q_weight": make(63)},
        ValueError,
        "`q_weight` must have shape [D] = [64], got [63]",
    ),
    "weight dtype": (
        lambda make: {"k_weight": make(64, dtype="float16")},
        TypeError,
        "`k_weight` must have dtype bfloat16 or float32, got float16",
    ),
    "CPU": (
        lambda make: {"q_weight": make(64, device="cpu")},
        ValueError,
        "`q_weight` must be on the device of `q`, a tensor on cuda:0, got a CPU tensor",
    ),
    "scale": (
        lambda make: {"q_scale": make(1)},
        ValueError,
        "`q_scale` must be None for a `q_out` that is not float8, got a tensor",
    ),
    "scale of keys": (
        lambda make: {"key_scale": make(3), "kinds": {"cache": FP8}},
        ValueError,
        "`key_scale` must have 1 element or Hk = 2, got 3",
    ),
    "scale of queries": (
        lambda make: {"q_scale": make(3), "kinds": {"q_out": FP8}},
        ValueError,
        "`q_scale` must have 1 element or H = 4, got 3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(make, name):
    changed, error, text = BAD[name]
    with pytest.raises(error) as info:
        plan(make, **changed(make))
    assert str(info.value) == f"qk_norm_rope_cache: {text}"
    with pytest.raises(error):
        _C.qk_norm_rope_cache(*call(ExchangeTensor, **changed(ExchangeTensor)))


def with_sections(make, sections=(8, 12, 12), interleaved=False, **changes):
    positions = changes.pop("positions", make(3, 6, dtype="int64"))
    return _C.qk_norm_rope_cache_plan(
        *call(make, positions=positions, **changes), sections, interleaved
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_have_kernels_of_their_own(make, interleaved):
    sections = (12, 10, 10) if interleaved else (8, 12, 12)
    got = with_sections(make, sections, interleaved)
    assert "sections=true" in got["kernel"]
    assert "sections=false" in plan(make)["kernel"]
    assert {**got, "kernel": ""} == {**plan(make), "kernel": ""}


BAD_SECTIONS = [
    ((8, 12, 11), False, "`sections` must add up to R / 2 = 32, got [8, 12, 11]"),
    ((2**62, 2**62, 2**62), False, f"`sections` must add up to R / 2 = 32, got {[2**62] * 3}"),
    ((-8, 20, 20), False, "`sections` must not be negative, got [-8, 20, 20]"),
    (
        (8, 12, 12),
        True,
        "`sections` must be at most 11 and 10 for the second and third position, interleaved, "
        "got [8, 12, 12]",
    ),
    (None, True, "`sections_interleaved` needs `sections`"),
    ((8, 24), False, "`sections` must be None or three whole numbers"),
]


@pytest.mark.parametrize(("sections", "interleaved", "text"), BAD_SECTIONS)
def test_bad_sections_are_named(make, sections, interleaved, text):
    changes = {"positions": make(6, dtype="int64")} if sections is None else {}
    with pytest.raises(ValueError) as info:
        with_sections(make, sections, interleaved, **changes)
    assert str(info.value) == f"qk_norm_rope_cache: {text}"


def test_sections_need_three_positions(make):
    with pytest.raises(ValueError) as info:
        with_sections(make, positions=make(6, dtype="int64"))
    due = "`positions` must have shape [3, T] = [3, 6], got [6]"
    assert str(info.value) == f"qk_norm_rope_cache: {due}"
    with pytest.raises(TypeError, match="`sections` must be None or three whole numbers"):
        with_sections(make, sections=3)
