# SPDX-License-Identifier: Apache-2.0
"""The checks and the choice of kernel of rotary_embedding and kv_cache_write: without PyTorch and
without a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C


def rotary(make, tokens=6, heads=4, kv_heads=2, size=64, rotated=64, dtype="bfloat16", **changes):
    given = {
        "positions": make(tokens, dtype="int64"),
        "q": make(tokens, heads, size, dtype=dtype),
        "k": make(tokens, kv_heads, size, dtype=dtype),
        "cache": make(100, rotated),
        "q_out": make(tokens, heads, size, dtype=dtype),
        "k_out": make(tokens, kv_heads, size, dtype=dtype),
        "interleaved": False,
    } | changes
    return list(given.values())


def test_rotary_reads_vectors_where_it_can(make):
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        for interleaved in (False, True):
            got = _C.rotary_embedding_plan(*rotary(make, dtype=dtype, interleaved=interleaved))
            assert got["vector_bytes"] == 16
        odd = make(6, 4, 64, dtype=dtype, address=ADDRESS + size)
        assert _C.rotary_embedding_plan(*rotary(make, dtype=dtype, q=odd))["vector_bytes"] == size
        narrow = rotary(make, dtype=dtype, rotated=2)
        assert _C.rotary_embedding_plan(*narrow)["vector_bytes"] == size


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("size", [2, 64, 80, 128, 256, 512])
def test_rotary_blocks(tokens, size):
    for heads, kv_heads in [(1, 0), (32, 8), (128, 128)]:
        for rotated in {2, size // 2 * 2, size // 4 * 2 or 2}:
            got = _C.rotary_embedding_plan(
                *rotary(ExchangeTensor, tokens, heads, kv_heads, size, rotated)
            )
            assert 1 <= got["block"] <= 512 and got["grid"] >= 1


@pytest.mark.parametrize("rotated", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_neighbours_exchange_pairs_of_few_vectors(tokens, rotated):
    """As many that turn as are copied, no more than 64 bytes of either, and many tokens."""
    out = {
        name: ExchangeTensor(tokens, heads, 64, dtype="bfloat16", address=2 * ADDRESS)
        for name, heads in (("q_out", 32), ("k_out", 8))
    }
    for interleaved in (False, True):
        given = rotary(ExchangeTensor, tokens, 32, 8, 64, rotated, interleaved=interleaved, **out)
        kernel = _C.rotary_embedding_plan(*given)["kernel"]
        wanted = tokens == 8192 and rotated == 32 and not interleaved
        assert ("exchanged" in kernel) == wanted


@pytest.mark.parametrize(("heads", "size"), [(4, 2**32 + 64), (2**32 + 64, 64), (4, 2**32)])
def test_rotary_sizes_that_32_bits_cannot_count_are_left_to_ref(make, heads, size):
    with pytest.raises(NotImplementedError, match="too large for the kernels"):
        _C.rotary_embedding_plan(*rotary(make, heads=heads, size=size))
    with pytest.raises(NotImplementedError, match="too large for the kernels"):
        _C.rotary_embedding_plan(*rotary(make, heads=0, kv_heads=heads, size=size))


def test_one_token_has_any_stride():
    """Vectors are read, and in place is in place."""
    odd = {
        name: ExchangeTensor(1, heads, 64, dtype="bfloat16", strides=(2**40 + 1, 64, 1))
        for name, heads in (("q", 4), ("k", 2))
    }
    given = rotary(ExchangeTensor, tokens=1, **odd)
    assert _C.rotary_embedding_plan(*given) == _C.rotary_embedding_plan(*rotary(ExchangeTensor, 1))


def test_an_empty_batch_launches_nothing(make):
    assert _C.rotary_embedding_plan(*rotary(make, tokens=0))["kernel"] == "none"


BAD_ROTARY = {
    "no rows of the cache": (
        lambda make: {"cache": make(0, 64)},
        ValueError,
        "`cos_sin_cache` must have at least one row, got [0, 64]",
    ),
    "positions dtype": (
        lambda make: {"positions": make(6)},
        TypeError,
        "`positions` must have dtype int32 or int64, got float32",
    ),
    "q rank": (
        lambda make: {"q": make(6, 256, dtype="bfloat16")},
        ValueError,
        "`q` must have 3 dimensions, got 2 (shape [6, 256])",
    ),
    "tokens": (
        lambda make: {"q": make(5, 4, 64, dtype="bfloat16")},
        ValueError,
        "`q` must have shape [T, H, D] = [6, 4, 64], got [5, 4, 64]",
    ),
    "k dtype": (
        lambda make: {"k": make(6, 2, 64)},
        TypeError,
        "`k` must have dtype bfloat16, got float32",
    ),
    "rotated": (
        lambda make: {"cache": make(100, 66)},
        ValueError,
        "`cos_sin_cache` must have an even second dimension of at most D = 64, got 66",
    ),
    "cache dtype": (
        lambda make: {"cache": make(100, 64, dtype="float16")},
        TypeError,
        "`cos_sin_cache` must have dtype bfloat16, got float16",
    ),
    "CPU": (
        lambda make: {"k": make(6, 2, 64, dtype="bfloat16", device="cpu")},
        ValueError,
        "`k` must be on the device of `q`, a tensor on cuda:0, got a CPU tensor",
    ),
    "inner stride": (
        lambda make: {"q": make(6, 4, 64, dtype="bfloat16", strides=(512, 128, 2))},
        NotImplementedError,
        "`q` must be contiguous in its last dimension, got strides [512, 128, 2]",
    ),
}


@pytest.mark.parametrize("name", BAD_ROTARY)
def test_bad_rotary_arguments_are_named(make, name):
    changed, error, text = BAD_ROTARY[name]
    with pytest.raises(error) as info:
        _C.rotary_embedding_plan(*rotary(make, **changed(make)))
    assert str(info.value) == f"rotary_embedding: {text}"
    with pytest.raises(error):
        _C.rotary_embedding(*rotary(ExchangeTensor, **changed(ExchangeTensor)))


def cache_write(make, **changes):
    given = {
        "key": make(6, 2, 64, dtype="bfloat16"),
        "value": make(6, 2, 64, dtype="bfloat16"),
        "key_cache": make(9, 16, 2, 64, dtype="bfloat16"),
        "value_cache": make(9, 16, 2, 64, dtype="bfloat16"),
        "slots": make(6, dtype="int64"),
        "key_scale": None,
        "value_scale": None,
    } | changes
    return list(given.values())


def test_kv_cache_reads_vectors_where_it_can(make):
    assert _C.kv_cache_write_plan(*cache_write(make))["vector_bytes"] == 16
    odd = make(6, 2, 64, dtype="bfloat16", address=ADDRESS + 2)
    assert _C.kv_cache_write_plan(*cache_write(make, value=odd))["vector_bytes"] == 2


def test_what_32_bits_cannot_count_is_left_to_ref(make):
    wide = [make(1, 2**33, 1, 8, dtype="bfloat16") for _ in range(2)]
    rows = [make(6, 1, 8, dtype="bfloat16") for _ in range(2)]
    with pytest.raises(NotImplementedError, match="too large for the kernels"):
        _C.kv_cache_write_plan(
            *cache_write(make, key=rows[0], value=rows[1], key_cache=wide[0], value_cache=wide[1])
        )


BAD_KV = {
    "key dtype": (
        lambda make: {"key": make(6, 2, 64)},
        TypeError,
        "`key` must have dtype bfloat16 or float16, got float32",
    ),
    "value shape": (
        lambda make: {"value": make(6, 3, 64, dtype="bfloat16")},
        ValueError,
        "`value` must have shape [T, H, D] = [6, 2, 64], got [6, 3, 64]",
    ),
    "cache dtype": (
        lambda make: {"key_cache": make(9, 16, 2, 64)},
        TypeError,
        "`key_cache` must have dtype bfloat16 or float8_e4m3fn, got float32",
    ),
    "cache shape": (
        lambda make: {"value_cache": make(9, 8, 2, 64, dtype="bfloat16")},
        ValueError,
        "`value_cache` must have shape [blocks, block size, H, D] = [9, 16, 2, 64], "
        "got [9, 8, 2, 64]",
    ),
    "slots": (
        lambda make: {"slots": make(5, dtype="int64")},
        ValueError,
        "`slots` must have shape [T] = [6], got [5]",
    ),
    "scale": (
        lambda make: {"key_scale": make(1)},
        ValueError,
        "`key_scale` must be None for a cache that is not float8, got a tensor",
    ),
}


@pytest.mark.parametrize("name", BAD_KV)
def test_bad_kv_cache_arguments_are_named(make, name):
    changed, error, text = BAD_KV[name]
    with pytest.raises(error) as info:
        _C.kv_cache_write_plan(*cache_write(make, **changed(make)))
    assert str(info.value) == f"kv_cache_write: {text}"
