# SPDX-License-Identifier: Apache-2.0
"""Latent attention's checks and launches: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

MULTIPROCESSORS = 132
SCALE = 192**-0.5


def plan(
    make=ExchangeTensor,
    shape=(4, 1, 16, 576),
    page=64,
    columns=16,
    *,
    dtype="bfloat16",
    cache="bfloat16",
    kv_scale=None,
    lse=None,
    scale=SCALE,
    d_v=512,
    **given,
):
    shapes = {
        "q": (shape, dtype),
        "kv_cache": ((1000, page, shape[3]), cache),
        "page_table": ((shape[0], columns), "int32"),
        "seqused_k": ((shape[0],), "int32"),
        "kv_scale": None,
        "out": ((*shape[:3], d_v), dtype),
    }
    tensors = [
        given.get(name, kv_scale if own is None else make(*own[0], dtype=own[1]))
        for name, own in shapes.items()
    ]
    return _C.mla_decode_plan(*tensors, lse, scale, d_v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels(dtype):
    name = {"bfloat16": "BFloat16", "float16": "Float16"}[dtype]
    # If a page has all keys of a step, the scores of the next one are made ahead.
    kernels = {32: f"<{name}, Same>", 64: f"_ahead<{name}>", 256: f"_ahead<{name}>"}
    for page, kernel in kernels.items():
        got = plan(page=page, dtype=dtype, cache=dtype)
        assert got["kernel"] == "mla_decode" + kernel
        assert got["combine"].startswith(f"mla_combine<{name}")
        assert got["rows"] == got["step"] == 64 and got["block"] == 384
        assert got["dynamic_smem"] <= 227 << 10


def test_kernels_of_float8():
    for dtype, name in (("bfloat16", "BFloat16"), ("float16", "Float16")):
        got = plan(dtype=dtype, cache="float8_e4m3fn", kv_scale=ExchangeTensor(1))
        assert got["kernel"] == f"mla_decode<{name}, Float8>"
    packed = ExchangeTensor(1000, 64, 656, dtype="uint8")
    assert plan(kv_cache=packed)["kernel"] == "mla_decode<BFloat16, Packed>"
    # Pages may be anywhere, on 16 bytes.
    odd = ExchangeTensor(1000, 64, 656, dtype="uint8", strides=(64 * 656 + 16, 656, 1))
    assert plan(kv_cache=odd)["kernel"] == "mla_decode<BFloat16, Packed>"


@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 100, 128])
def test_lanes_fill_the_device(queries, heads):
    got = plan(shape=(64, queries, heads, 576))
    blocks = -(-queries * heads // 64)
    assert got["lanes"] == MULTIPROCESSORS // blocks
    assert got["grid"] == got["lanes"] * blocks
    lines = 2 * got["grid"] * min(queries * heads, 64)
    assert got["workspace"] == lines * 514 + 4 * min(64, got["lanes"] - 1)


def test_sequences_in_many_lanes_have_a_kernel_that_combines():
    for batch, name in ((1, ", many"), (5, ", many"), (6, ""), (256, "")):
        got = plan(shape=(batch, 1, 16, 576), columns=200)
        assert got["combine"] == f"mla_combine<BFloat16{name}>"


def test_short_sequences_have_fewer_lanes():
    assert plan(shape=(1, 1, 16, 576), columns=3)["lanes"] == 3
    assert plan(shape=(1, 1, 16, 576), columns=400)["lanes"] == 132
    # A step each: no lanes share a sequence.
    got = plan(shape=(9, 1, 16, 576), columns=1)
    assert got["lanes"] == 9 and got["combine"] == "none" and got["workspace"] == 0
    # More rows than the device has blocks for.
    got = plan(shape=(2, 80, 128, 576))
    assert got["lanes"] == 1 and got["grid"] == 160 and got["workspace"] == 0


@pytest.mark.parametrize("page", [1, 2, 16, 64, 128, 1024])
def test_pages(page):
    """Two blocks that read the same keys load half of them each, or half of their columns."""
    for heads in (16, 64, 129):
        assert plan(shape=(64, 1, heads, 576), page=page)["copy_rows"] == min(page, 64)
    for heads in (65, 128, 256):
        most = 64 if page >= 64 else min(page, 32)
        assert plan(shape=(64, 1, heads, 576), page=page)["copy_rows"] == most


@pytest.mark.parametrize("shape", [(0, 1, 16, 576), (3, 0, 16, 576), (3, 1, 0, 576)])
def test_nothing_to_do(shape):
    got = plan(shape=shape)
    assert got["kernel"] == got["combine"] == "none" and got["grid"] == 0


def refuses(error, text, make=ExchangeTensor, **given):
    with pytest.raises(error, match=text):
        plan(make, **given)


def test_shapes_and_dtypes(make):
    cases = [
        (TypeError, "`q` must have dtype", {"dtype": "float32"}),
        (TypeError, "`kv_cache` must have dtype", {"cache": "int8"}),
        (TypeError, "`kv_cache` must have dtype", {"cache": "float16"}),
        (ValueError, "`q` must have 4 dimensions", {"q": make(4, 16, 576, dtype="bfloat16")}),
        (ValueError, "`kv_cache` must have 3", {"kv_cache": make(9, 576, dtype="bfloat16")}),
        (ValueError, "`kv_cache` must have", {"kv_cache": make(9, 64, 512, dtype="bfloat16")}),
        (ValueError, "`kv_cache` must have", {"kv_cache": make(9, 64, 576, dtype="uint8")}),
        (ValueError, "`page_table` must have", {"page_table": make(3, 16, dtype="int32")}),
        (TypeError, "`page_table` must have dtype", {"page_table": make(4, 16, dtype="int64")}),
        (ValueError, "`seqused_k` must have", {"seqused_k": make(5, dtype="int32")}),
        (TypeError, "`seqused_k` must have dtype", {"seqused_k": make(4, dtype="float32")}),
        (ValueError, "`out` must have shape", {"out": make(4, 1, 16, 576, dtype="bfloat16")}),
        (TypeError, "`out` must have dtype", {"out": make(4, 1, 16, 512, dtype="float16")}),
        (ValueError, "`lse` must have shape", {"lse": make(4, 1, 16, dtype="float32")}),
        (TypeError, "`lse` must have dtype", {"lse": make(4, 16, 1, dtype="bfloat16")}),
        (ValueError, "`kv_scale` must be None", {"kv_scale": make(1, dtype="float32")}),
    ]
    for error, text, given in cases:
        refuses(error, f"mla_decode: {text}", make, **given)
    plan(make, lse=make(4, 16, 1, dtype="float32"))


def test_what_the_kernels_do_not_take(make):
    cases = [
        ("`q` must have 576 columns", {"shape": (4, 1, 16, 512)}),
        ("`d_v` must be 512", {"d_v": 256}),
        (
            "`q` must be bfloat16 for a cache of uint8",
            {"dtype": "float16", "kv_cache": make(9, 64, 656, dtype="uint8")},
        ),
        ("`scale` must be positive", {"scale": 0.0}),
        ("`scale` must be positive", {"scale": float("inf")}),
        ("page size that is a power of two", {"page": 48}),
        ("at most 65535 rows", {"shape": (1, 1024, 128, 576)}),
        ("room for 1 to", {"columns": 0}),
        ("at least one page", {"kv_cache": make(0, 64, 576, dtype="bfloat16")}),
    ]
    for text, given in cases:
        refuses(NotImplementedError, text, make, **given)


def test_layouts(make):
    odd = make(4, 1, 16, 576, dtype="bfloat16", address=ADDRESS + 8)
    refuses(NotImplementedError, "`q` must have contiguous rows", make, q=odd)
    odd = make(4, 1, 16, 576, dtype="bfloat16", strides=(16 * 580, 580, 580, 1))
    refuses(NotImplementedError, "`q` must have contiguous rows", make, q=odd)
    odd = make(4, 1, 16, 512, dtype="bfloat16", strides=(16 * 513, 513, 513, 1))
    refuses(NotImplementedError, "`out` must have contiguous rows", make, out=odd)
    odd = make(1000, 64, 576, dtype="bfloat16", strides=(64 * 576 + 8, 576, 1))
    refuses(NotImplementedError, "page stride that is a multiple", make, kv_cache=odd)
    plan(make, kv_cache=make(1000, 64, 576, dtype="bfloat16", strides=(64 * 1152, 1152, 1)))


def write_plan(
    make,
    tokens=5,
    dtype="bfloat16",
    cache="bfloat16",
    kv_scale=None,
    positions=None,
    angles=None,
    interleaved=False,
    **given,
):
    width = 656 if cache == "uint8" else 576
    tensors = {
        "latent": make(tokens, 512, dtype=dtype),
        "rotary": make(tokens, 64, dtype=dtype),
        "kv_cache": make(10, 16, width, dtype=cache),
        "slots": make(tokens, dtype="int64"),
    }
    rest = (kv_scale, positions, angles, interleaved)
    return _C.mla_cache_write_plan(*(tensors | given).values(), *rest)


@pytest.mark.parametrize(
    ("dtype", "cache", "kernel"),
    [
        ("bfloat16", "bfloat16", "BFloat16, Same"),
        ("float16", "float16", "Float16, Same"),
        ("bfloat16", "float8_e4m3fn", "BFloat16, Float8"),
        ("float16", "float8_e4m3fn", "Float16, Float8"),
        ("bfloat16", "uint8", "BFloat16, Packed"),
    ],
)
def test_layouts_of_a_cache(make, dtype, cache, kernel):
    for tokens in (1, 5, 1000):
        got = write_plan(make, tokens, dtype, cache)
        assert got["kernel"] == f"mla_cache_write<{kernel}>"
        assert got["grid"] == -(-tokens // 4) and got["block"] == 128
    assert write_plan(make, 0, dtype, cache)["kernel"] == "none"
    for positions, angles in (("int32", "float32"), ("int64", dtype)):
        turned = {"positions": make(5, dtype=positions), "angles": make(9, 64, dtype=angles)}
        for interleaved in (False, True):
            got = write_plan(make, 5, dtype, cache, interleaved=interleaved, **turned)
            assert got["kernel"] == f"mla_cache_write<{kernel}, Rotated>"


def test_rotation_refuses(make):
    right = {"positions": make(5, dtype="int64"), "angles": make(9, 64, dtype="float32")}
    cases = [
        (ValueError, "`cos_sin_cache` must be a tensor with `positions`", {"angles": None}),
        (ValueError, "`positions` must be a tensor with `cos_sin_cache`", {"positions": None}),
        (TypeError, "`positions` must have dtype", {"positions": make(5, dtype="int16")}),
        (ValueError, "`positions` must have shape", {"positions": make(4, dtype="int64")}),
        (TypeError, "`cos_sin_cache` must have dtype", {"angles": make(9, 64, dtype="float16")}),
        (ValueError, "`cos_sin_cache` must have 2", {"angles": make(64, dtype="float32")}),
        (ValueError, "`cos_sin_cache` must have shape", {"angles": make(9, 32, dtype="float32")}),
        (ValueError, "at least one row", {"angles": make(0, 64, dtype="float32")}),
        (
            ValueError,
            "`positions` must be contiguous",
            {"positions": make(5, dtype="int64", strides=(2,))},
        ),
        (
            ValueError,
            "`cos_sin_cache` must be contiguous",
            {"angles": make(9, 64, dtype="float32", strides=(128, 1))},
        ),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=f"mla_cache_write: {text}" if "`" in text else text):
            write_plan(make, **(right | given))


def test_cache_write_refuses(make):
    bf16 = {"dtype": "bfloat16"}
    cases = [
        (TypeError, "`latent` must have dtype", {"dtype": "float32"}),
        (TypeError, "`rotary` must have dtype", {"rotary": make(5, 64, dtype="float16")}),
        (ValueError, "`rotary` must have shape", {"rotary": make(4, 64, **bf16)}),
        (TypeError, "`kv_cache` must have dtype", {"cache": "float16"}),
        (ValueError, "`kv_cache` must have shape", {"kv_cache": make(10, 16, 577, **bf16)}),
        (ValueError, "`kv_cache` must have shape", {"kv_cache": make(9, 9, 576, dtype="uint8")}),
        (TypeError, "`latent` must have dtype bfloat16", {"dtype": "float16", "cache": "uint8"}),
        (TypeError, "`slots` must have dtype", {"slots": make(5, dtype="int16")}),
        (ValueError, "`slots` must have shape", {"slots": make(6, dtype="int32")}),
        (ValueError, "`kv_scale` must be None", {"kv_scale": make(1, dtype="float32")}),
        (
            NotImplementedError,
            "512 columns",
            {"latent": make(5, 448, **bf16), "rotary": make(5, 128, **bf16)},
        ),
        (
            NotImplementedError,
            "`latent` must have contiguous rows",
            {"latent": make(5, 512, strides=(516, 1), **bf16)},
        ),
        (
            NotImplementedError,
            "`rotary` must have contiguous rows",
            {"rotary": make(5, 64, strides=(1, 5), **bf16)},
        ),
        (
            NotImplementedError,
            "`kv_cache` must have contiguous rows",
            {"kv_cache": make(10, 16, 576, strides=(16 * 580, 580, 1), **bf16)},
        ),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=text):
            write_plan(make, **given)
