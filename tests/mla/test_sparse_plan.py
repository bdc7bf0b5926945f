# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention's checks and launches: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SCALE = 192**-0.5


def plan(make=ExchangeTensor, shape=(64, 16, 576), dtype="bfloat16", entries=2048, **given):
    d_v = given.pop("d_v", 512)
    cache = given.pop("cache", dtype)
    width = 656 if cache == "uint8" else 576
    tensors = {
        "q": make(*shape, dtype=dtype),
        "kv_cache": make(1000, 64, width, dtype=cache),
        "indices": make(shape[0], entries, dtype="int32"),
        "kv_scale": None,
        "out": make(shape[0], shape[1], d_v, dtype=dtype),
        "lse": None,
    }
    scale = given.pop("scale", SCALE)
    return _C.mla_sparse_attention_plan(*(tensors | given).values(), scale, d_v)


@pytest.mark.parametrize(
    ("cache", "layout"), [("bfloat16", "Same"), ("float8_e4m3fn", "Float8"), ("uint8", "Packed")]
)
def test_kernels(make, cache, layout):
    got = plan(make, cache=cache)
    assert got["kernel"] == f"mla_sparse<BFloat16, {layout}>"
    assert got["rows"] == got["step"] == 64 and got["block"] == 384
    assert got["dynamic_smem"] <= 227 << 10


def test_lanes():
    """Equal runs of pairs of steps, that fill the device."""
    got = plan(shape=(64, 128, 576))
    assert got["lanes"] == 66 and got["grid"] == 132
    assert got["combine"] == "mla_combine<BFloat16>" and got["workspace"] > 0
    assert plan(shape=(1, 16, 576))["lanes"] == 16  # pairs of 2048 entries
    assert plan(shape=(9, 16, 576), entries=100)["workspace"] == 0
    assert plan(shape=(4, 16, 576), entries=0)["lanes"] == 4
    got = plan(shape=(2, 20000, 576))
    assert got["lanes"] == 1 and got["combine"] == "none"


@pytest.mark.parametrize("shape", [(0, 16, 576), (3, 0, 576)])
def test_nothing_to_do(shape):
    assert plan(shape=shape)["kernel"] == "none"


def test_shapes_and_dtypes(make):
    cases = [
        (TypeError, "`q` must have dtype", {"dtype": "float16"}),
        (TypeError, "`kv_cache` must have dtype", {"cache": "int8"}),
        (ValueError, "`q` must have 3 dimensions", {"q": make(64, 576, dtype="bfloat16")}),
        (ValueError, "`kv_cache` must have", {"kv_cache": make(9, 64, 512, dtype="bfloat16")}),
        (ValueError, "`indices` must have", {"indices": make(63, 8, dtype="int32")}),
        (TypeError, "`indices` must have dtype", {"indices": make(64, 8, dtype="int64")}),
        (ValueError, "`out` must have shape", {"out": make(64, 16, 576, dtype="bfloat16")}),
        (ValueError, "`lse` must have shape", {"lse": make(16, 64, dtype="float32")}),
        (ValueError, "`kv_scale` must be None", {"kv_scale": make(1, dtype="float32")}),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=f"mla_sparse_attention: {text}"):
            plan(make, **given)


def test_what_the_kernels_do_not_take(make):
    odd = make(64, 16, 576, dtype="bfloat16", address=ADDRESS + 8)
    cases = [
        (
            "`q` must have 576 columns",
            {"shape": (4, 16, 512), "kv_cache": make(9, 64, 512, dtype="bfloat16")},
        ),
        ("`d_v` must be 512", {"d_v": 256}),
        ("`scale` must be positive", {"scale": 0.0}),
        ("page size that is a power of two", {"kv_cache": make(9, 48, 576, dtype="bfloat16")}),
        ("`q` must have contiguous rows", {"q": odd}),
    ]
    for text, given in cases:
        with pytest.raises(NotImplementedError, match=text):
            plan(make, **given)


def top_k_plan(rows, columns, k=2048, make=ExchangeTensor, **given):
    tensors = {
        "logits": make(rows, columns, dtype="float32"),
        "lengths": None,
        "out": make(rows, k, dtype="int32"),
    }
    return _C.top_k_indices_plan(*(tensors | given).values())


def test_blocks_of_a_row():
    """A cluster has as many blocks as keep the row; few rows take more."""
    assert top_k_plan(4096, 20000)["cluster"] == 1
    assert top_k_plan(4096, 65536, 8000)["cluster"] == 4
    assert top_k_plan(4096, 131072, 10000)["cluster"] == 8
    assert top_k_plan(1, 65536, 8000)["cluster"] == 8
    assert top_k_plan(1, 4096)["cluster"] == 1
    assert top_k_plan(64, 16384)["cluster"] == 4
    assert top_k_plan(4096, 10**6)["dynamic_smem"] <= 113 << 10
    assert top_k_plan(0, 100)["kernel"] == "none"


def test_which_rows_are_sampled(make):
    """Long ones of which few elements are chosen."""

    def chosen(rows, columns, k=2048, **given):
        plan = top_k_plan(rows, columns, k, make, **given)
        return plan["kernel"], plan["cluster"]

    assert chosen(1024, 65536) == ("top_k_sampled", 1)
    assert chosen(1024, 65537)[0] == "top_k"  # rows do not begin at 16 bytes
    assert chosen(1024, 131072) == ("top_k_sampled", 2)
    assert chosen(16, 65536) == ("top_k_sampled", 1)
    assert chosen(1, 65536) == ("top_k", 8)  # few elements
    assert chosen(1, 500_000) == ("top_k_sampled", 8)
    assert chosen(1, 600_000)[0] == "top_k"  # parts have up to 65536
    assert chosen(64, 32768 - 4)[0] == "top_k"
    assert chosen(1024, 65536, 2400)[0] == "top_k_sampled"
    assert chosen(1024, 65536, 2600)[0] == "top_k"  # lists would fill
    assert top_k_plan(1024, 65536, 100)["dynamic_smem"] <= 74 << 10  # three blocks fit


def test_top_k_refuses(make):
    cases = [
        (TypeError, "`logits` must have dtype", {"logits": make(3, 100, dtype="bfloat16")}),
        (ValueError, "`logits` must have 2", {"logits": make(100, dtype="float32")}),
        (ValueError, "`out` must have shape", {"out": make(4, 20, dtype="int32")}),
        (TypeError, "`out` must have dtype", {"out": make(3, 20, dtype="int64")}),
        (ValueError, "`lengths` must have shape", {"lengths": make(4, dtype="int32")}),
        (TypeError, "`lengths` must have dtype", {"lengths": make(3, dtype="int64")}),
        (
            NotImplementedError,
            "`logits` must have contiguous rows",
            {"logits": make(3, 100, dtype="float32", strides=(1, 3))},
        ),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=f"top_k_indices: {text}"):
            top_k_plan(3, 100, 20, make, **given)


def indexer_plan(tokens=64, keys=5000, heads=64, make=ExchangeTensor, **given):
    tensors = {
        "q": make(tokens, heads, 128, dtype="float8_e4m3fn"),
        "k": make(keys, 128, dtype="float8_e4m3fn"),
        "k_scale": make(keys, dtype="float32"),
        "weights": make(tokens, heads, dtype="float32"),
        "starts": None,
        "ends": None,
        "out": make(tokens, keys, dtype="float32"),
    }
    return _C.indexer_logits_plan(*(tensors | given).values())


def test_parts_of_the_keys():
    """Long where tokens fill the device, and of 8 tiles of 64 keys at least."""
    got = indexer_plan(4096, 131072)
    assert got["kernel"] == "indexer_logits<64>" and got["tiles"] == 128
    assert (got["grid_x"], got["grid_y"]) == (1024, 16)
    got = indexer_plan(1, 131072)
    assert got["tiles"] == 16 and (got["grid_x"], got["grid_y"]) == (1, 128)
    got = indexer_plan(9, 300, 32)
    assert got["kernel"] == "indexer_logits<32>"
    assert (got["grid_x"], got["grid_y"]) == (2, 1)
    assert indexer_plan(0)["kernel"] == indexer_plan(3, 0)["kernel"] == "none"


def test_indexer_refuses(make):
    fp8 = {"dtype": "float8_e4m3fn"}
    cases = [
        (TypeError, "`q` must have dtype", {"q": make(64, 64, 128, dtype="bfloat16")}),
        (TypeError, "`k` must have dtype", {"k": make(5000, 128, dtype="bfloat16")}),
        (ValueError, "`k` must have shape", {"k": make(5000, 64, **fp8)}),
        (ValueError, "`k_scale` must have shape", {"k_scale": make(64, dtype="float32")}),
        (TypeError, "`weights` must have dtype", {"weights": make(64, 64, dtype="bfloat16")}),
        (TypeError, "`starts` must have dtype", {"starts": make(64, dtype="int64")}),
        (ValueError, "`ends` must have shape", {"ends": make(65, dtype="int32")}),
        (ValueError, "`out` must have shape", {"out": make(64, 64, dtype="float32")}),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=f"indexer_logits: {text}"):
            indexer_plan(make=make, **given)
    with pytest.raises(NotImplementedError, match="`q` must have 32 or 64 heads of 128 columns"):
        indexer_plan(heads=16, make=make)
    with pytest.raises(NotImplementedError, match="`k` must"):
        indexer_plan(make=make, k=make(5000, 128, strides=(132, 1), **fp8))
