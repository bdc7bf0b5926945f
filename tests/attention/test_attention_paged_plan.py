# SPDX-License-Identifier: Apache-2.0
"""paged_attention's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import AttributeTensor, ExchangeTensor
from support.paged_plan import FLOAT8, far, float8, plan

import tiercel

MOST = 2**29 - 1  # rows


@pytest.fixture(params=[ExchangeTensor, AttributeTensor])
def make(request):
    return request.param


@pytest.mark.parametrize(("d", "tile"), [(8, 64), (64, 64), (96, 128), (128, 128), (256, 256)])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "causal"),
        ({"causal": False}, "window"),
        ({"window": (7, 0)}, "window"),
        ({"window": (-1, 3)}, "causal"),
        ({"softcap": 5.0}, "window_capped"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel(make, d, tile, options, kind, dtype):
    got = plan(make, d=d, dtype=dtype, **options)
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert got["kernel"] == f"attention_paged_{short}_d{tile}_{kind}"
    assert got["tile_n"] == (64 if tile == 256 else 128)


@pytest.mark.parametrize(
    ("heads", "queries"),
    [((1, 1), 128), ((8, 2), 32), ((5, 1), 24), ((48, 1), 2), ((64, 1), 2), ((7, 7), 128)],
)
def test_queries_of_a_tile(make, heads, queries):
    got = plan(make, heads=heads)
    assert got["queries"] == queries
    assert got["grid"] == min((900 + 3 * (queries - 1)) // queries * heads[1], 132)


@pytest.mark.parametrize("d", [264, 512])
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "BFloat16"), ("float16", "Float16")])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (7, 0)}, {"softcap": 5.0}])
def test_the_kernel_of_wide_heads(make, d, dtype, name, options):
    for longest in (1, 900):
        got = plan(make, d=d, dtype=dtype, longest=longest, **options)
        assert got["kernel"] == f"attention_paged_wide<{name}, float8=false>"
        assert (got["tile_m"], got["tile_n"], got["block"]) == (64, 64, 512)


@pytest.mark.parametrize(("page", "rows"), [(1, 1), (16, 16), (64, 64), (128, 128), (256, 128)])
def test_rows_of_a_copy(make, page, rows):
    assert plan(make, cache=(50, page))["copy_rows"] == rows
    for d in (256, 512):
        assert plan(make, cache=(50, page), d=d)["copy_rows"] == min(rows, 64)


def test_empty(make):
    for given in ({"rows": 0}, {"batch": 0}, {"heads": (0, 2)}):
        assert plan(make, **given)["kernel"] == "none"


def test_pages_of_any_stride(make):
    """Keys and values in turn, heads before places, pages apart; one page, one place."""
    for strides in ((4096, 128, 64, 1), (4096, 64, 1024, 1), (128 * 1000, 128, 64, 1)):
        k, v = (far(50, 16, 2, 64, strides=strides) for _ in range(2))
        assert plan(ExchangeTensor, k_cache=k, v_cache=v) == plan(make)
    assert plan(make, cache=(1, 16))["copy_rows"] == 16
    assert plan(make, cache=(1, 1))["copy_rows"] == 1


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("`q` must have a head dimension that is a multiple of 8 up to 512", {"d": 520}),
        ("`q` must have a head dimension that is a multiple of 8 up to 512", {"d": 20}),
        ("`q` must have at most 64 heads for each of `k_cache`", {"heads": (65, 1)}),
        ("`scale` must be positive", {"scale": 0.0}),
        ("`softcap` must be None or positive", {"softcap": -1.0}),
        ("`k_cache` must have a page size that is a power of two", {"cache": (50, 24)}),
        ("`k_cache` must have at least one page", {"cache": (0, 16)}),
        ("`page_table` must have room for 1 to 2\\^29 keys", {"columns": 0}),
        ("`page_table` must have room for 1 to 2\\^29 keys", {"columns": 2**25 + 1}),
        ("`q` must have fewer than 2\\^29 rows", {"rows": MOST + 1}),
        ("`q` must have fewer than 2\\^22 tiles", {"rows": MOST, "batch": 2**21}),
        ("`q` must have fewer than 2\\^22 tiles", {"batch": 2**62 - 1}),
        (
            "`page_table` must have elements that are less than 2 GiB apart",
            {"page_table": far(3, 40, strides=(2**31, 1), dtype="int32")},
        ),
        (
            "`cu_seqlens_q` must have elements that are less than 2 GiB apart",
            {"cu_seqlens_q": far(4, strides=(2**29,), dtype="int32")},
        ),
        (
            "`seqused_k` must have elements that are less than 2 GiB apart",
            {"seqused_k": far(3, strides=(2**29,), dtype="int32")},
        ),
        (
            "`k_cache` must have a page stride that is a multiple of the row stride",
            {"k_cache": far(50, 16, 2, 64, strides=(2056, 128, 64, 1))},
        ),
        (
            "`k_cache` must have pages that span fewer than 2\\^31 rows",
            {"k_cache": far(2**27, 16, 2, 64, strides=(2048, 128, 64, 1)), "cache": (2**27, 16)},
        ),
        (
            "`v_cache` must have the page stride of `k_cache`",
            {"v_cache": far(50, 16, 2, 64, strides=(4096, 128, 64, 1))},
        ),
        (
            "`v_cache` must have row strides that are multiples of 16 bytes",
            {"v_cache": far(50, 16, 2, 64, strides=(16 * 132, 132, 64, 1))},
        ),
        (
            "`k_cache` must have a row stride below 2 GiB and a head stride below 16 GiB",
            {"k_cache": far(50, 16, 2, 64, strides=(2**34, 2**30, 64, 1))},
        ),
        (
            "`v_cache` must have a row stride below 2 GiB and a head stride below 16 GiB",
            {"v_cache": far(50, 16, 2, 64, strides=(1024, 64, 2**33, 1))},
        ),
        (
            "`q` must be contiguous in its last dimension",
            {"q": far(900, 8, 64, strides=(1024, 128, 2))},
        ),
        (
            "`tree_mask` must have elements that are less than 2 GiB apart",
            {"tree": far(900, strides=(2**28,), dtype="int64"), "longest": 9},
        ),
        (
            "`cu_seqlens_q` must have elements that are less than 2 GiB apart",
            {"cu_seqlens_q": far(4, strides=(2**29,), dtype="int32"), "longest": 1},
        ),
        (
            "`out` must have rows that are less than 32 GiB apart",
            {"out": far(900, 8, 64, strides=(2**34 + 64, 64, 1))},
        ),
    ],
)
def test_what_there_is_no_kernel_for(text, given):
    with pytest.raises(NotImplementedError, match=f"^paged_attention: {text}"):
        plan(ExchangeTensor, **given)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (
            "`k_cache` must have a number of heads that divides that of `q`, 8, got 3",
            {"heads": (8, 3)},
        ),
        ("`sinks` must", {"sinks": ExchangeTensor(7, dtype="float32")}),
        ("`sinks` must", {"sinks": far(8, strides=(2,), dtype="float32")}),
        ("`lse` must", {"lse": ExchangeTensor(8, 901, dtype="float32")}),
        ("`seqused_k` must", {"seqused_k": ExchangeTensor(4, dtype="int32")}),
        ("`page_table` must", {"page_table": ExchangeTensor(4, 40, dtype="int32")}),
        ("`v_cache` must", {"v_cache": ExchangeTensor(51, 16, 2, 64, dtype="bfloat16")}),
        ("`out` must", {"out": ExchangeTensor(901, 8, 64, dtype="bfloat16")}),
        ("`tree_mask` must", {"tree": ExchangeTensor(901, dtype="int64"), "longest": 9}),
        (
            "`tree_mask` must be None unless `causal`",
            {"tree": ExchangeTensor(900, dtype="int64"), "longest": 9, "causal": False},
        ),
        (
            "`max_seqlen_q` must be at most 64 with `tree_mask`, got 65",
            {"tree": ExchangeTensor(900, dtype="int64"), "longest": 65},
        ),
        ("`k_scale` must be None", {"k_scale": ExchangeTensor(2, dtype="float32")}),
    ],
)
def test_what_does_not_fit(text, given):
    with pytest.raises(ValueError, match=f"^paged_attention: {text}"):
        plan(ExchangeTensor, **given)


@pytest.mark.parametrize(
    ("rows", "heads", "keys", "parts"),
    [
        (2048, (32, 8), 8192, 1),  # more tiles than multiprocessors
        (128, (32, 8), 32768, 4),  # 4 tiles of 8 key heads
        (512, (32, 8), 8192, 1),
        (60, (64, 1), 65536, 4),
        (300, (4, 4), 128, 1),  # too few keys
    ],
)
def test_keys_are_split_where_tiles_are_few(make, rows, heads, keys, parts):
    got = plan(make, rows, heads, 128, batch=1, columns=keys // 16)
    assert got["parts"] == parts
    assert got["combine"] == ("none" if parts == 1 else "paged_combine<BFloat16>")
    assert got["workspace"] == (parts > 1) * parts * rows * heads[0] * (64 + 1)
    assert got == plan(make, rows, heads, 128, batch=1, columns=2 * keys // 16, most=keys)


@pytest.mark.parametrize(
    ("heads", "longest", "d", "few"),
    [
        ((8, 2), 1, 128, True),
        ((8, 2), 8, 128, True),
        ((8, 2), 9, 128, False),
        ((8, 2), 8, 256, False),
        ((64, 1), 1, 128, False),
        ((8, 2), 0, 128, False),
    ],
)
def test_few_new_tokens_are_decoding(make, heads, longest, d, few):
    got = plan(make, heads=heads, longest=longest, d=d)
    assert got["kernel"].startswith("decode_attention<" if few else "attention_paged_")


@pytest.mark.parametrize(("longest", "few"), [(1, True), (16, True), (17, False), (900, False)])
def test_float8_caches(longest, few):
    caches = {
        name: ExchangeTensor(50, 16, 2, 64, dtype="float8_e4m3fn")
        for name in ("k_cache", "v_cache")
    }
    scales = {"k_scale": ExchangeTensor(2, dtype="float32")}
    got = plan(ExchangeTensor, longest=longest, **caches, **scales)
    name = "decode_attention<BFloat16, float8=true" if few else "attention_paged_bf16_d64_causal"
    assert got["kernel"].startswith(name)


def copied(chunks, new, context, d=128, heads=(32, 8), most=None, columns=None, **options):
    """The plan of chunks over a float8 cache with pages of 64 keys."""
    keys = context + new
    columns = columns or -(-keys // 64)
    caches = {
        name: ExchangeTensor(chunks * columns, 64, heads[1], d, dtype=FLOAT8)
        for name in ("k_cache", "v_cache")
    }
    return plan(
        *(ExchangeTensor, chunks * new, heads, d),
        **{"batch": chunks, "columns": columns, "longest": new, "most": most, **caches, **options},
    )


def of_copies(pages, sequences, heads):
    """Floats: copies; their sources, states and places; the sequences' first tiles."""
    return pages * 128 * heads * 128 + (4 * pages + 2 * pages * heads + 2 * sequences + 4) // 4 * 4


@pytest.mark.parametrize(
    ("chunks", "new", "context", "most", "copies"),
    [
        (1, 2048, 0, None, True),
        (8, 512, 2048, None, True),
        (1, 512, 32768, None, True),
        (3, 334, 1166, None, True),
        (1, 512, 0, None, False),
        (64, 17, 8192, None, False),
        (4, 512, 32768, 2048, True),
    ],
)
def test_copies_of_float8_caches(chunks, new, context, most, copies):
    got = copied(chunks, new, context, most=most)
    assert got["widen"] == ("paged_widen<BFloat16>" if copies else "none")
    assert got["kernel"] == "attention_paged_bf16_d128_causal"
    of_bf16 = copied(chunks, new, context, most=most, **dict.fromkeys(("k_cache", "v_cache")))
    assert (got["parts"], got["combine"]) == (of_bf16["parts"], of_bf16["combine"])
    if copies:
        pages = -(-(most or context + new) // 128) * chunks
        floats = of_copies(pages, chunks, 8)
        assert got["workspace"] == floats + of_bf16["workspace"]


def test_copies_of_some_heads():
    """Those of all heads would take more than 512 MiB."""
    got = copied(1, 2048, 131072 - 1920)
    assert got["widen"] == "paged_widen<BFloat16>"
    of_parts = 0 if got["combine"] == "none" else 2048 * 16 * 65 * got["parts"]
    assert got["workspace"] == of_copies(1024 + 1, 1, 4) + of_parts
    assert copied(1, 512, 1 << 20)["widen"] == "none"


def test_workspace_of_a_last_slice():
    """16 heads are two slices of 6, then one of 4, which has more parts."""
    whole, first, last = (copied(1, 2704, 131200 - 2704, heads=(8 * n, n)) for n in (16, 6, 4))
    assert first["workspace"] < last["workspace"] == whole["workspace"]


@pytest.mark.parametrize(
    ("decoding", "chunks", "new", "keys", "divided"),
    [
        (64, 1, 1024, 4096, True),
        (256, 4, 2048, 2048, True),
        (2, 1, 512, 1024, False),
        (0, 8, 512, 4096, False),
    ],
)
def test_decoding_beside_chunks(decoding, chunks, new, keys, divided):
    sequences = decoding + chunks
    caches = {
        name: ExchangeTensor(sequences * keys // 64, 64, 8, 128, dtype=FLOAT8)
        for name in ("k_cache", "v_cache")
    }
    sizes = {"batch": sequences, "columns": keys // 64, "longest": new, **caches}
    rows = decoding + chunks * new
    got = plan(ExchangeTensor, rows, (32, 8), 128, **sizes)
    few = "decode_attention<BFloat16, float8=true, d=128, any_d=false, tiles=2"
    assert got["decode"].startswith(few if divided else "none")
    assert got["kernel"] == "attention_paged_bf16_d128_causal"
    if divided:
        most = min(rows // 129, sequences)
        pages = min(most * keys // 128, 1024)
        assert of_copies(pages, 0, 8) < got["workspace"] <= of_copies(pages, 2 * sequences, 8)
        windowed = plan(ExchangeTensor, rows, (32, 8), 128, **sizes, window=(99, 0))
        assert windowed["widen"] == "none" and windowed["decode"] != "none"
        of_bf16 = plan(ExchangeTensor, rows, (32, 8), 128, **sizes | dict.fromkeys(caches))
        assert of_bf16["decode"] == "none"


def test_a_batch_that_is_padded_with_sequences():
    """Those without new tokens, of a graph's batch, are no reason to split keys."""

    def planned(batch):
        k, v = (ExchangeTensor(4096, 64, 8, 128, dtype=FLOAT8) for _ in range(2))
        sizes = {"batch": batch, "columns": 512, "longest": 512, "k_cache": k, "v_cache": v}
        return plan(ExchangeTensor, 600, (32, 8), 128, **sizes)

    padded, exact = planned(1024), planned(90)
    assert padded["decode"] == exact["decode"] != "none"
    assert padded["parts"] == exact["parts"]


def test_a_window_is_not_copied():
    assert copied(1, 2048, 2048, window=(1024, 0))["widen"] == "none"
    assert copied(1, 2048, 2048, window=(-1, 5))["widen"] != "none"


def test_most_rows(make):
    assert plan(make, rows=MOST, heads=(1, 1), d=8, batch=1)["grid"] == 132


@pytest.mark.parametrize(
    ("heads", "d", "longest"),
    [((8, 2), 128, 8), ((8, 2), 256, 64), ((8, 8), 64, 0), ((64, 1), 40, 3)],
)
def test_trees_are_decoding(make, heads, d, longest):
    got = plan(make, heads=heads, d=d, longest=longest, tree=make(900, dtype="int64"))
    assert got["kernel"].startswith("decode_attention<")


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, True),
        ({"d": 72}, True),
        ({"longest": 8}, False),
        ({"d": 64}, False),
        ({"dtype": "float16"}, False),
        ({"window": (99, 0)}, False),
        ({"softcap": 5.0}, False),
        (float8(d=128), False),
    ],
)
def test_trees_of_many_rows(make, options, tiles):
    given = {"d": 128, "longest": 9} | options
    got = plan(make, tree=make(900, dtype="int64"), **given)["kernel"]
    assert got == "attention_paged_bf16_d128_causal_tree" if tiles else "decode" in got
    with tiercel.batch_invariant():
        got = plan(make, tree=make(900, dtype="int64"), **given)["kernel"]
    assert got.startswith("decode_attention<")


@pytest.mark.parametrize("longest", [0, 1, 64])
def test_trees_of_wide_heads(make, longest):
    got = plan(make, heads=(8, 2), d=264, longest=longest, tree=make(900, dtype="int64"))
    assert got["kernel"].startswith("attention_paged_wide<")


def invariant(make, rows=8, keys=6400, **given):
    with tiercel.batch_invariant():
        return plan(make, rows, (32, 8), 128, batch=1, columns=keys // 16, **given)


@pytest.mark.parametrize(
    ("keys", "options", "parts"),
    [
        (16, {}, 1),
        (512, {}, 1),
        (528, {}, 2),
        (4096, {}, 8),
        (4112, {}, 9),
        (8192, {}, 12),
        (10256, {}, 14),
        (6400, {"most": 4096}, 8),
        (2**22, {}, 255),
        (2048, {"softcap": 5.0}, 1),
        (2064, {"softcap": 5.0}, 2),
        (6400, {"dtype": "float16"}, 4),
        (6400, {"causal": False}, 4),
        (6400, {"window": (1000, 0)}, 2),
        (2**22, {"window": (3000, 0)}, 3),
    ],
)
def test_parts_of_fixed_places_in_the_batch_invariant_mode(make, keys, options, parts):
    for rows in (1, 8, 500):
        for longest in (1, 900):
            got = invariant(make, rows, keys, longest=longest, **options)
            assert got["kernel"].startswith("attention_paged_")
            if got["kernel"].endswith("_chained"):
                assert options.keys() <= {"most"} and got["parts"] == 1 < parts
            else:
                assert got["parts"] == parts
            assert (got["combine"] != "none") == (got["parts"] > 1) == (got["workspace"] > 0)


@pytest.mark.parametrize(
    ("options", "chained"),
    [({}, True), ({"softcap": 5.0}, False), ({"window": (3000, 0)}, False)],
)
def test_a_block_has_all_parts_where_tiles_fill_the_gpu(make, options, chained):
    assert invariant(make, 2048, **options)["kernel"].endswith("_chained") == chained
    assert not invariant(make, 1, **options)["kernel"].endswith("_chained")
    sinks = make(32, dtype="float32")
    assert not invariant(make, 2048, sinks=sinks, **options)["kernel"].endswith("_chained")


def test_what_joins_a_row_does_so_after_its_parts(make):
    """A sink and a logarithm have the same bits, however many parts there are."""
    given = {"sinks": make(32, dtype="float32")}, {"lse": make(32, 8, dtype="float32")}
    for extra in given:
        got = invariant(make, keys=16, **extra)
        assert got["parts"] == 1 and got["combine"] != "none" and got["workspace"] > 0


@pytest.mark.parametrize(("rows", "heads"), [(100, 8), (512, 7), (1024, 3), (8192, 1)])
def test_heads_take_turns_where_parts_need_much_memory(make, rows, heads):
    got = invariant(make, rows, 2**17, softcap=5.0)
    assert got["workspace"] == 64 * rows * 4 * heads * (64 + 1)


def test_a_window_of_more_parts_than_there_are(make):
    with pytest.raises(NotImplementedError, match="page_table.*batch-invariant mode"):
        invariant(make, keys=2**22, window=(2**20, 0))
