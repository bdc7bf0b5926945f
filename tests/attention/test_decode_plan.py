# SPDX-License-Identifier: Apache-2.0
"""decode_attention's checks, kernels and splits: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

MULTIPROCESSORS = 132


def plan(
    make=ExchangeTensor,
    shape=(4, 1, 32, 128),
    kv_heads=8,
    page=16,
    columns=64,
    *,
    dtype="bfloat16",
    cache="bfloat16",
    left=-1,
    right=0,
    scale=0.1,
    softcap=0.0,
    max_keys=-1,
    split=0,
    prefix=None,
    k_scale=None,
    v_scale=None,
    lse=None,
    **given,
):
    shapes = {
        "q": (shape, dtype),
        "k_cache": ((1000, page, kv_heads, shape[3]), cache),
        "v_cache": ((1000, page, kv_heads, shape[3]), cache),
        "page_table": ((shape[0], columns), "int32"),
        "seqused_k": ((shape[0],), "int32"),
        "out": (shape, dtype),
    }
    tensors = [given.get(n) or make(*own, dtype=kind) for n, (own, kind) in shapes.items()]
    optional = [prefix, k_scale, v_scale, lse, None]
    return _C.decode_attention_plan(
        *tensors, *optional, left, right, scale, softcap, max_keys, split
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_head_dimension_has_a_kernel(dtype, fp8):
    name = {"bfloat16": "BFloat16", "float16": "Float16"}[dtype]
    for d in range(16, 257, 16 if fp8 else 8):
        for heads, rows in ((8, 8), (32, 8), (64, 8), (128, 16)):
            got = plan(shape=(2, 1, heads, d), dtype=dtype, cache="float8_e4m3fn" if fp8 else dtype)
            tile = d if d in (64, 128) else 128 if d < 128 else 256
            float8 = "true" if fp8 else "false"
            assert got["kernel"].startswith(f"decode_attention<{name}, float8={float8}, d={tile},")
            assert got["rows"] == (rows if d in (64, 128) else 8)
            wide = rows == 8 and (d <= 128 or fp8)
            assert got["block"] == (256 if wide and not got["cluster"] else 128)


@pytest.mark.parametrize(
    ("d", "cache", "step"),
    [
        (64, "bfloat16", 32),
        (128, "bfloat16", 16),
        (256, "bfloat16", 16),
        (64, "float8_e4m3fn", 64),
        (128, "float8_e4m3fn", 32),
        (256, "float8_e4m3fn", 16),
    ],
)
def test_steps_of_about_4_kib(d, cache, step):
    assert plan(shape=(2, 1, 8, d), cache=cache)["step"] == step


def test_several_queries_share_a_tile():
    """Rows are queries times the heads of a key head, 8 or 16 a tile."""
    for queries, heads, rows in ((1, 32, 8), (2, 32, 8), (3, 32, 16), (4, 32, 16), (9, 8, 16)):
        got = plan(shape=(4, queries, heads, 128), split=1)
        assert got["rows"] == rows
        tiles = -(-queries * heads // 8 // rows)
        assert got["grid"] == 4 * 8 * tiles


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_32_rows(dtype):
    """They need 16 steps of 16 keys for each warp, 8 of them in one tile."""

    def chosen(batch, queries, columns, d=128, **options):
        options = {"dtype": dtype, "cache": dtype} | options
        got = plan(shape=(batch, queries, 32, d), columns=columns, **options)
        return got["rows"], got["cluster"], got["block"], got["grid"]

    whole = (32, 0, 256, 128)
    for batch, queries, columns in ((1, 5, 2048), (1, 8, 2048), (4, 8, 512), (2, 16, 512)):
        assert chosen(batch, queries, columns) == whole
        for fewer in (columns // 2, columns - 1):
            assert chosen(batch, queries, fewer)[0] == 16
            assert chosen(batch, queries, fewer, split=-1) == whole
        assert chosen(batch, queries, 4)[1] > 0
        assert chosen(batch, queries, columns, cache="float8_e4m3fn")[0] == 16
        assert chosen(batch, queries, columns, d=64)[0] == 16
        assert chosen(batch, queries, columns, split=4)[:2] == (16, 4)
    assert chosen(32, 8, 64) == chosen(500, 8, 64) == whole
    assert chosen(32, 8, 63)[0] == chosen(500, 8, 63)[0] == 16
    assert chosen(32, 4, 512)[:2] == (16, 0)
    assert plan(shape=(32, 8, 32, 128), columns=512, max_keys=1000)["rows"] == 16


def split_of(batch, keys, *, heads=(32, 8), d=128, **options):
    got = plan(shape=(batch, 1, heads[0], d), kv_heads=heads[1], columns=keys // 16, **options)
    assert got["cluster"] in (0, 1, 2, 4, 8)
    if got["cluster"]:
        assert got["workspace"] == 0 and got["combine"] == "none"
        assert got["grid"] == batch * heads[1] * got["cluster"]
    else:
        assert got["workspace"] > 0 and got["combine"] == "none"
        assert got["grid"] <= MULTIPROCESSORS < got["grid"] + heads[1]
    return got["cluster"]


def test_short_sequences_stay_in_one_launch():
    assert split_of(1, 512) == 8
    assert split_of(1, 2048) == 8
    assert split_of(8, 512) > 0
    assert split_of(1, 64) > 0


def test_long_ones_are_spread():
    for batch, keys in ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 8192)):
        assert split_of(batch, keys) == 0


def test_one_block_a_tile_where_those_fill_the_device():
    """Measured on an H200: 67 us against 73 of the spread blocks at 32 x 2048."""
    assert split_of(32, 512) == split_of(32, 2048) == split_of(128, 512) == 1
    assert split_of(128, 2048) == 1  # rounds of them: lengths even out


@pytest.mark.parametrize(
    ("kv_heads", "grid"),
    [
        (1, 132),
        (2, 132),
        (5, 130),
        (7, 126),
        (8, 128),
        (64, 128),
        (200, 125),
        (131, 131),
        (521, 132),
    ],
)
def test_spread_blocks_take_the_heads_of_a_key_together(kv_heads, grid):
    """Groups of one block a head, or a divisor of the heads; few blocks are left out."""
    got = plan(shape=(2, 1, kv_heads, 128), kv_heads=kv_heads, split=-1)
    assert got["grid"] == grid


@pytest.mark.parametrize(("kv_heads", "batch"), [(1, 1), (2, 1), (1, 3)])
def test_many_parts_are_put_together_by_a_second_kernel(kv_heads, batch):
    """By one block that would take longer than the launch; so would 16 rows."""
    options = {"kv_heads": kv_heads, "columns": 4096, "split": -1}
    got = plan(shape=(batch, 1, 8, 128), **options)
    assert got["combine"].startswith("decode_combine")
    assert plan(shape=(16, 1, 8, 128), **options)["combine"] == "none"
    wide = plan(shape=(16, 1, 16 * kv_heads, 128), **options)
    assert wide["rows"] == 16 and wide["combine"].startswith("decode_combine")


def test_no_more_blocks_than_there_are_steps():
    """A cluster's last block would wait for the others and have nothing to add."""
    for keys in (16, 32, 64, 128, 256, 512):
        cluster = split_of(1, keys)
        assert cluster == 1 or (cluster - 1) * 4 < keys // 16


def test_a_bound_on_lengths_counts_as_the_table_s_width():
    assert split_of(1, 131072) == 0
    assert split_of(1, 131072, max_keys=512) == split_of(1, 512)
    assert split_of(1, 512, max_keys=131072) == split_of(1, 512)
    assert split_of(1, 131072, left=511) == split_of(1, 512)  # a window needs no more


def test_the_workspace_is_that_of_the_blocks_not_of_the_problem():
    sizes = {plan(shape=(b, 1, 32, 128), split=-1)["workspace"] for b in (1, 8, 64)}
    blocks = MULTIPROCESSORS - MULTIPROCESSORS % 8
    assert sizes == {2 * blocks * (8 * (128 + 2) + 2)}


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_a_split_that_is_asked_for(split):
    assert plan(split=split)["cluster"] == split
    assert plan(split=-1)["cluster"] == 0


@pytest.mark.parametrize("split", [3, 16, -2])
def test_a_split_that_there_is_not(split):
    with pytest.raises(ValueError, match="^decode_attention: `split` must be -1, 0 or a power"):
        plan(split=split)


def test_empty_outputs_launch_nothing(make):
    for q in ((0, 1, 32, 128), (4, 0, 32, 128)):
        assert plan(make, q)["kernel"] == "none"


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
def test_page_sizes(make, page):
    assert plan(make, page=page)["grid"] > 0


@pytest.mark.parametrize(
    ("error", "text", "name", "shape", "dtype"),
    [
        (TypeError, "`q` must have dtype bfloat16 or float16, got float32", "q", None, "float32"),
        (TypeError, "`k_cache` must have dtype bfloat16 or float8_e4m3fn", "k_cache", None, "int8"),
        (TypeError, "`v_cache` must have dtype bfloat16, got float16", "v_cache", None, "float16"),
        (TypeError, "`out` must have dtype bfloat16, got float32", "out", None, "float32"),
        (TypeError, "`page_table` must have dtype int32, got int64", "page_table", None, "int64"),
        (TypeError, "`seqused_k` must have dtype int32, got int64", "seqused_k", None, "int64"),
        (ValueError, "`q` must have 4 dimensions, got 3", "q", (4, 32, 128), "bfloat16"),
        (
            ValueError,
            r"`v_cache` must have shape \[pages, page size, Hk, D\] = \[1000, 16, 8, 128\]",
            "v_cache",
            (1000, 16, 8, 64),
            "bfloat16",
        ),
        (
            ValueError,
            r"`page_table` must have shape \[B, pages of a sequence\] = \[4, 64\], got \[3, 64\]",
            "page_table",
            (3, 64),
            "int32",
        ),
        (ValueError, r"`seqused_k` must have shape \[B\] = \[4\]", "seqused_k", (5,), "int32"),
        (ValueError, r"`out` must have shape \[B, Sq, H, D\]", "out", (4, 1, 32, 64), "bfloat16"),
    ],
)
def test_wrong_tensors(make, error, text, name, shape, dtype):
    known = {
        "q": (4, 1, 32, 128),
        "out": (4, 1, 32, 128),
        "k_cache": (1000, 16, 8, 128),
        "v_cache": (1000, 16, 8, 128),
        "page_table": (4, 64),
        "seqused_k": (4,),
    }
    tensor = make(*(shape or known[name]), dtype=dtype)
    with pytest.raises(error, match=f"^decode_attention: {text}"):
        plan(make, **{name: tensor})


def test_scales(make):
    head, tensor = make(8, dtype="float32"), make(1, dtype="float32")
    assert plan(make, cache="float8_e4m3fn", k_scale=head, v_scale=tensor)["grid"] > 0
    with pytest.raises(ValueError, match="`k_scale` must be None for a cache that is not float8"):
        plan(make, k_scale=tensor)
    with pytest.raises(ValueError, match="`v_scale` must have 1 element or Hk = 8, got 4"):
        plan(make, cache="float8_e4m3fn", v_scale=make(4, dtype="float32"))
    with pytest.raises(TypeError, match="`k_scale` must have dtype float32, got bfloat16"):
        plan(make, cache="float8_e4m3fn", k_scale=make(1, dtype="bfloat16"))


def test_heads_lse_and_prefix(make):
    with pytest.raises(ValueError, match="`k_cache` must have a number of heads that divides"):
        plan(make, kv_heads=5)
    with pytest.raises(ValueError, match=r"`lse` must have shape \[B, H, Sq\] = \[4, 32, 1\]"):
        plan(make, lse=make(4, 1, 32, dtype="float32"))
    with pytest.raises(TypeError, match="`prefix` must have dtype int32, got int64"):
        plan(make, prefix=make(4, dtype="int64"))
    assert plan(make, lse=make(4, 32, 1, dtype="float32"), prefix=make(4, dtype="int32"))["grid"]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "`q` must have a head dimension that is a multiple of 8 up to 256",
            {"shape": (4, 1, 8, 60)},
        ),
        ("`q` must have a head dimension .* got 264", {"shape": (4, 1, 8, 264)}),
        (
            "`q` must have a head dimension that is a multiple of 16 .* with a float8 cache",
            {"shape": (4, 1, 8, 72), "cache": "float8_e4m3fn"},
        ),
        ("`scale` must be positive", {"scale": -1.0}),
        ("`softcap` must be None or positive", {"softcap": -1.0}),
        ("`k_cache` must have a page size that is a power of two", {"page": 24}),
        ("`page_table` must have room for 1 to 2\\^29 keys", {"columns": 0}),
        (
            "`k_cache` must have at least one page",
            {n: ExchangeTensor(0, 16, 8, 128, dtype="bfloat16") for n in ("k_cache", "v_cache")},
        ),
    ],
)
def test_what_there_is_no_kernel_for(make, text, options):
    with pytest.raises(NotImplementedError, match=f"^decode_attention: {text}"):
        plan(make, **options)


def test_layouts(make):
    cache = (1000, 16, 8, 128)
    for name, text, tensor in (
        (
            "k_cache",
            "start at a multiple of 16",
            make(*cache, dtype="bfloat16", address=ADDRESS + 8),
        ),
        (
            "v_cache",
            "be contiguous in its last dimension",
            make(*cache, dtype="bfloat16", strides=(16 * 8 * 256, 8 * 256, 256, 2)),
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"^decode_attention: `{name}` must {text}"):
            plan(make, **{name: tensor})
    far = make(4, 64, dtype="int32", strides=(1, 2**29))
    with pytest.raises(NotImplementedError, match="`page_table` must have elements that are less"):
        plan(make, page_table=far)
    strides = (2 * 16 * 1024, 1024, 128, 1)  # k and v in turn
    k, v = (make(*cache, dtype="bfloat16", strides=strides) for _ in range(2))
    assert plan(make, k_cache=k, v_cache=v)["grid"] > 0


def test_index_tensors_have_any_strides(make):
    got = plan(make)
    for strides in ((128, 2), (1, 4), (0, 1)):
        assert plan(make, page_table=make(4, 64, dtype="int32", strides=strides)) == got
    lengths, prefix = (make(4, dtype="int32", strides=(3,)) for _ in range(2))
    assert plan(make, seqused_k=lengths, prefix=prefix) == got


def merge_plan(make, shape=(3, 2, 8, 128), dtype="bfloat16", **given):
    lse = (shape[0], shape[2], shape[1])
    shapes = {"out_a": shape, "lse_a": lse, "out_b": shape, "lse_b": lse, "out": shape, "lse": lse}
    tensors = [
        given.get(name)
        or make(*own, dtype="float32" if "lse" in name else dtype, address=ADDRESS + (i << 16))
        for i, (name, own) in enumerate(shapes.items())
    ]
    return _C.merge_attention_states_plan(*tensors)


def test_merge(make):
    for dtype, name in (("bfloat16", "BFloat16"), ("float16", "Float16"), ("float32", "Float32")):
        got = merge_plan(make, dtype=dtype)
        assert got["kernel"] == f"merge_attention_states<{name}>"
        assert got["grid"] == -(-3 * 2 * 8 * 128 * (4 if dtype == "float32" else 2) // 16 // 256)
    assert merge_plan(make, (0, 2, 8, 128))["kernel"] == "none"
    with pytest.raises(ValueError, match=r"`lse_b` must have shape \[B, H, S\] = \[3, 8, 2\]"):
        merge_plan(make, lse_b=make(3, 2, 8, dtype="float32"))
    with pytest.raises(TypeError, match="`out_b` must have dtype bfloat16, got float16"):
        merge_plan(make, out_b=make(3, 2, 8, 128, dtype="float16"))
    with pytest.raises(NotImplementedError, match="`out_a` must have rows and strides"):
        merge_plan(make, (3, 2, 8, 12))
    for shape in ((1, 2**31, 1, 8), (1, 1, 2**31, 8), (1, 1, 1, 2**40), (2**31, 1, 1, 2048)):
        with pytest.raises(NotImplementedError, match="too large for one launch, got shape"):
            merge_plan(make, shape)
    one, same = (make(3, 8, 2, dtype="float32") for _ in range(2))
    with pytest.raises(ValueError, match="`lse` must not be `lse_a` or `lse_b`, got the same"):
        merge_plan(make, lse_a=one, lse=same)
