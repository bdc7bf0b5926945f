# SPDX-License-Identifier: Apache-2.0
"""paged_attention on an H100 or H200, against float64."""

import threading

import pytest
import torch
from support.gpu_memory import skip_without
from support.paged import assert_close, make, random_trees, wide, with_room

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

MIXED = [(1, 777), (150, 210), (0, 40), (3, 3), (1, 1), (700, 1500), (0, 0), (1, 4097), (20, 148)]


def draw(*args, **options):
    return make(*args, device="cuda", **options)


def check(given, **options):
    result, lse = tiercel.paged_attention(*given, return_lse=True, **options)
    truth = tiercel.ref.paged_attention(*wide(given), return_lse=True, **options)
    assert_close(result, lse, *truth)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("page", [1, 16, 256])
def test_small(d, page):
    given = draw([(1, 77), (70, 140), (0, 9), (2, 2)], d=d, page=page, around=(3, 5))
    check(given, sinks=torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (100, 0)},
        {"window": (40, 5), "causal": False},
        {"softcap": 5.0},
        {"scale": 0.3},
    ],
)
def test_mixed(d, dtype, options):
    check(draw(MIXED, (8, 2), d=d, dtype=dtype), **options)


WIDE = [(1, 777), (150, 210), (0, 40), (3, 3), (700, 1500), (0, 0), (1, 4097), (20, 148)]


@pytest.mark.sanitize
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("lengths", [[(1, 77), (9, 140), (0, 9)], [(70, 140), (33, 40)]])
def test_small_wide_heads(lengths, page):
    """Decoding alone, and sequences of several tiles."""
    given = draw(lengths, (8, 2), d=512, page=page, around=(3, 5))
    check(given, sinks=torch.zeros(8, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [264, 320, 448, 512])
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}]
)
def test_wide_heads(d, dtype, options):
    check(draw(WIDE, (8, 2), d=d, dtype=dtype, around=(2, 9)), **options)
    check(draw([(1, 900), (2, 3000), (1, 1)], (8, 2), d=d, dtype=dtype), **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4, 8, 16, 64, 256])
@pytest.mark.parametrize("heads", [(16, 4), (5, 1), (64, 1)])
def test_wide_heads_in_pages(page, layout, heads):
    check(draw(WIDE, heads, page=page, layout=layout, d=512))
    check(draw([(1, 20_000), (1, 100)], heads, page=page, layout=layout, d=512))


@pytest.mark.parametrize("batch", [1, 3, 40, 300])
@pytest.mark.parametrize("keys", [100, 3000, 9000])
@pytest.mark.parametrize("new", [1, 8, 40])
def test_wide_heads_of_batches(new, keys, batch):
    lengths = [(new, max(keys * (i % 4 + 1) // 4, new)) for i in range(batch)]
    given = draw(lengths, (4, 1), d=512, around=(2, 1))
    check(given)
    results = [tiercel.paged_attention(*given) for _ in range(3)]
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.sanitize
@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (128, 64), (64, 128), (40, 8), (8, 256)])
@pytest.mark.parametrize("page", [4, 16, 256])
def test_small_values_of_another_head_dimension(page, d, d_v):
    given = draw([(1, 77), (70, 140), (0, 9), (2, 2)], d=d, d_v=d_v, page=page, around=(3, 5))
    check(given, sinks=torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (128, 64), (64, 128), (256, 136)])
@pytest.mark.parametrize(
    "options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}, {"scale": 0.3}]
)
def test_values_of_another_head_dimension(d, d_v, dtype, options):
    check(draw(MIXED, (8, 2), d=d, d_v=d_v, dtype=dtype), **options)
    check(draw([(1, 20_000), (1, 100)], (8, 2), d=d, d_v=d_v, dtype=dtype), **options)


FEW = [(1, 777), (2, 210), (0, 40), (2, 2), (1, 1), (0, 0), (1, 4097), (2, 1), (1, 0)]


@pytest.mark.sanitize
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_new_tokens(d, page):
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5], device="cuda")
    given = draw(FEW, (8, 2), d=d, page=page, around=(3, 5))
    check(given, sinks=sinks)
    check(given, window=(100, 0), softcap=5.0)


@pytest.mark.parametrize("batch", [1, 3, 40, 300])
@pytest.mark.parametrize("keys", [100, 3000, 20000])
@pytest.mark.parametrize("new", [1, 8])
def test_decoding(new, keys, batch):
    lengths = [(new, max(keys * (i % 4 + 1) // 4, new)) for i in range(batch)]
    check(draw(lengths, (4, 1), d=128, page=16, around=(2, 1)))


@pytest.mark.parametrize("per_head", [False, True])
def test_float8_cache(per_head):
    q, k, v, *rest = draw(FEW, (8, 2), d=128, around=(0, 2))
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    factors = torch.tensor([0.5, 1.5] if per_head else [0.5], device="cuda")
    scales = {"k_scale": factors, "v_scale": factors}
    out, lse = tiercel.paged_attention(*given, return_lse=True, **scales)
    assert_close(out, lse, *tiercel.ref.paged_attention(*wide(given), return_lse=True, **scales))


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("page", [1, 16, 256])
def test_float8_cache_of_many_new_tokens(page, d, dtype, options):
    q, k, v, *rest = draw(MIXED, (8, 2), d=d, page=page, dtype=dtype, around=(2, 3))
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    scales = {"k_scale": torch.tensor([0.5, 1.5]).cuda(), "v_scale": torch.tensor(0.5).cuda()}
    sinks = torch.ones(8, device="cuda")
    out, lse = tiercel.paged_attention(*given, return_lse=True, sinks=sinks, **scales, **options)
    truth = tiercel.ref.paged_attention(
        *wide(given), return_lse=True, sinks=sinks, **scales, **options
    )
    assert_close(out, lse, *truth)


@pytest.mark.parametrize("context", [0, 1, 127, 5000])
@pytest.mark.parametrize("new", [33, 128, 1000, 4000])
@pytest.mark.parametrize("batch", [1, 5])
def test_chunks_over_a_float8_cache(batch, new, context):
    q, k, v, *rest = draw([(new, context + new)] * batch, (32, 8), d=128)
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    out, lse = tiercel.paged_attention(*given, return_lse=True)
    assert_close(out, lse, *tiercel.ref.paged_attention(*wide(given), return_lse=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page", "d"), [(1, 128), (64, 128), (16, 64), (16, 80)])
def test_copies_of_a_float8_cache(page, d, dtype):
    """Long enough that keys are copied to 16 bits before: the bits of such a cache."""
    lengths = [(700, 1500), (300, 2000), (1, 5)]
    check_copies(lengths, 2000, page, d, dtype)


@pytest.mark.parametrize(("page", "d"), [(1, 128), (64, 128), (16, 64)])
def test_copies_that_tiles_make(page, d):
    """So many keys that the tiles' blocks copy most pages."""
    check_copies([(700, 1500), (900, 20000), (300, 17000)], 20000, page, d, torch.bfloat16)


def check_copies(lengths, longest, page, d, dtype):
    q, k, v, *rest = draw(lengths, (32, 8), d=d, page=page, dtype=dtype)
    narrow = [x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)]
    most = {"max_seqused_k": longest, "return_lse": True}
    results = tiercel.paged_attention(q, *narrow, *rest, **most)
    expected = tiercel.paged_attention(q, *(x.to(dtype) for x in narrow), *rest, **most)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    factors = torch.linspace(0.5, 1.5, 8, device="cuda")
    scales = {"k_scale": factors, "v_scale": factors.flip(0)}
    out, lse = tiercel.paged_attention(q, *narrow, *rest, **most, **scales)
    truth = tiercel.ref.paged_attention(*wide((q, *narrow, *rest)), return_lse=True, **scales)
    assert_close(out, lse, *truth)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page", "d"), [(1, 128), (64, 128), (16, 64), (16, 80)])
def test_decoding_beside_chunks_over_a_float8_cache(page, d, dtype):
    """Decoding sequences and chunks have kernels of their own; keys of long chunks are copied."""
    lengths = [(1, 2000), (150, 1500), (1, 1), (9, 300), (0, 5)] + [(1, 777), (0, 0)] * 4
    q, k, v, *rest = draw(lengths, (32, 8), d=d, page=page, dtype=dtype, around=(2, 3))
    narrow = (x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v))
    given = with_room((q, *narrow, *rest), 4096)
    factors = torch.linspace(0.5, 1.5, 8, device="cuda")
    check(given, sinks=factors.repeat(4), k_scale=factors, v_scale=factors.flip(0))


def test_more_chunks_than_there_is_room_for_copies():
    """16-bit keys and values of all chunks would take more than 512 MiB."""
    lengths = [(1, 3000)] * 12 + [(66, 40000), (70, 50000), (66, 50000), (70, 9000)]
    q, k, v, *rest = draw(lengths, (64, 8), d=128, page=64)
    check((q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest))


def test_a_graph_copies_a_float8_cache_again():
    q, k, v, table, used, *rest = draw([(700, 1500), (300, 2000)], (32, 8), d=128)
    k, v = (x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v))
    given, out = (q, k, v, table, used, *rest), torch.empty_like(q)
    tiercel.paged_attention(*given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.paged_attention(*given, out=out)
    k.copy_(k.flip(0)), used.copy_(torch.tensor([900, 1984]))
    graph.replay()
    assert torch.equal(out, tiercel.paged_attention(*given))


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{}, {"window": (900, 3)}, {"softcap": 5.0}])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_split_among_blocks(d, options):
    lengths = [(70, 2300), (0, 3), (1, 1700), (33, 33), (2, 1)]
    check(draw(lengths, (8, 2), d=d, around=(3, 2)), **options)
    check(draw(lengths, (8, 2), d=d), sinks=torch.ones(8, device="cuda"), **options)


DRAFTS = [(8, 777), (5, 5), (0, 40), (8, 6000), (7, 3), (1, 0), (8, 2100)]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [1, 16])
def test_drafts(page, dtype):
    """Tiles of 32 rows, for which the page table is long enough."""
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5], device="cuda")
    given = with_room(draw(DRAFTS, (8, 2), d=128, page=page, dtype=dtype, around=(3, 5)))
    check(given, sinks=sinks)
    check(given, window=(100, 0), softcap=5.0)


@pytest.mark.parametrize("new", [5, 8])
@pytest.mark.parametrize("batch", [1, 7, 32, 100])
def test_drafts_of_batches(batch, new):
    lengths = [(new, new + 997 * (i % 9 + 1)) for i in range(batch)]
    check(draw(lengths, (32, 8), d=128))


TREES = [(1, 777), (64, 210), (0, 40), (7, 7), (20, 5), (0, 0), (33, 4097), (64, 64)]


@pytest.mark.sanitize
@pytest.mark.parametrize("window", [None, (30, 0)])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_trees(d, window):
    given = draw(TREES, (8, 2), d=d, around=(3, 5))
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5], device="cuda")
    check(given, sinks=sinks, tree_mask=random_trees(given), window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (8, 1)])
@pytest.mark.parametrize("new", [4, 16, 64])
@pytest.mark.parametrize("batch", [1, 16, 200])
def test_trees_of_batches(batch, new, heads, dtype):
    given = draw([(new, new + 97 * i % 3000) for i in range(batch)], heads, d=128, dtype=dtype)
    check(given, tree_mask=random_trees(given))
    check(given, tree_mask=random_trees(given), softcap=5.0)


@pytest.mark.sanitize
@pytest.mark.parametrize("window", [None, (30, 0)])
@pytest.mark.parametrize("d", [264, 512])
def test_trees_of_wide_heads(d, window):
    given = draw(TREES, (8, 2), d=d, around=(3, 5))
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5], device="cuda")
    check(given, sinks=sinks, tree_mask=random_trees(given), window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [4, 64])
@pytest.mark.parametrize("batch", [1, 16, 200])
def test_trees_of_wide_heads_in_batches(batch, new, dtype):
    given = draw([(new, new + 97 * i % 3000) for i in range(batch)], (8, 2), d=512, dtype=dtype)
    check(given, tree_mask=random_trees(given))
    check(given, tree_mask=random_trees(given), softcap=5.0, window=(700, 0))


def test_trees_over_a_float8_cache():
    q, k, v, *rest = draw(TREES, (8, 2), d=128, around=(0, 2))
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    options = {"tree_mask": random_trees(given), "k_scale": torch.tensor([0.5, 1.5]).cuda()}
    out, lse = tiercel.paged_attention(*given, return_lse=True, **options)
    assert_close(out, lse, *tiercel.ref.paged_attention(*wide(given), return_lse=True, **options))


@pytest.mark.parametrize("heads", [(64, 1), (48, 1), (32, 8)])
@pytest.mark.parametrize("new", [1, 128])
def test_one_long_sequence(new, heads):
    check(draw([(new, 33_000)], heads, d=128, page=64))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_pages(page, layout, d):
    check(draw(MIXED, (8, 2), page=page, layout=layout, d=d))


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (8, 1), (64, 1), (48, 1), (7, 7)])
def test_groups(heads):
    check(draw(MIXED, heads, around=(3, 5), d=128))


@pytest.mark.parametrize("window", [(0, 0), (15, 0), (16, 0), (127, 128), (300, -1), (-1, 4)])
def test_windows_at_the_edges_of_pages(window):
    lengths = [(20, 300), (130, 256), (1, 16), (1, 17), (500, 1000)]
    check(draw(lengths), window=window, causal=False)
    check(draw(lengths), window=window)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sinks(softcap):
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0], device="cuda")
    check(draw(MIXED, d=128), sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("context", [0, 1, 127, 128, 5000])
@pytest.mark.parametrize("new", [1, 2, 33, 128, 1000])
def test_chunks_after_a_context(new, context):
    check(draw([(new, context + new)] * 3, (32, 8), d=128))


def test_rows_in_no_sequence():
    given = draw([(5, 40), (0, 9), (1, 1)], around=(150, 7))
    out, lse = tiercel.paged_attention(*given, return_lse=True)
    assert (out[:150] == 0).all() and (lse[:, :150] == -torch.inf).all()
    assert (out[156:] == 0).all() and (lse[:, 156:] == -torch.inf).all()
    check(given)


def test_a_batch_of_70_000_sequences():
    lengths = [(i % 2, i % 3 + 1) for i in range(70_000)]
    drawn = make(lengths, (2, 2), page=1)  # 70,000 small steps, which a CPU takes sooner
    given = [x.cuda() if isinstance(x, torch.Tensor) else x for x in drawn]
    result, lse = tiercel.paged_attention(*given, return_lse=True)
    q, k, v, table, seqused, _, _ = wide(given)
    odd = (q[:, None], k, v, table[1::2], seqused[1::2])
    truth, sums = tiercel.ref.decode_attention(*odd, return_lse=True)
    assert_close(result, lse, truth[:, 0], sums[..., 0].T)


def test_more_than_two_to_the_31_elements_of_cache():
    """Keys and values of a page lie side by side."""
    skip_without(6)
    q, k, v, table, *rest = draw([(100, 300), (1, 40)], (2, 1), d=128, page=16)
    pages = 2**31 // (2 * 16 * 128) + 100
    stored = torch.empty(pages, 2, 16, 1, 128, dtype=q.dtype, device="cuda")
    caches = stored.unbind(1)
    for cache, small in zip(caches, (k, v), strict=True):
        cache[-len(small) :] = small
    used = (table >= 0) & (table < len(k))
    check((q, *caches, torch.where(used, table + pages - len(k), table).int(), *rest))


@pytest.mark.parametrize("d", [128, 512])
def test_a_graph_whose_sequences_change(d):
    """A server's graph: captured at the first call, and starts, lengths and pages are written
    between replays."""
    other = draw([(1, 50), (0, 0), (5, 9), (30, 300)], d=d, around=(0, 20))
    given = draw([(20, 300), (1, 1), (0, 7), (10, 200)], d=d, around=(0, 25))
    places = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, lse = tiercel.paged_attention(*places, return_lse=True)
    for case in (given, other, given):
        for place, x in zip(places[:6], case[:6], strict=True):
            place[tuple(map(slice, x.shape))].copy_(x)
        graph.replay()
        truth = tiercel.ref.paged_attention(*wide(places), return_lse=True)
        assert_close(result, lse, *truth)


@pytest.mark.parametrize("decoding", [0, 12])
def test_a_graph_over_a_float8_cache_whose_sequences_change(decoding):
    """Sequences turn from decoding to chunks, and from those whose pages a kernel of its own copies
    to those whose pages the tiles' blocks copy. NaN lies behind every length."""
    first, second = [(900, 20000), (300, 17000)], [(300, 20000), (900, 1000)]
    if decoding:
        first += [(1, 3000)] * decoding + [(200, 900), (0, 9), (1, 300)]
        second += [(0, 0), (1, 40), (200, 19000)] + [(1, 2999)] * decoding
    cases = []
    for seed, lengths in enumerate((first, second)):
        q, k, v, *rest = draw(lengths, (32, 8), d=128, page=64, seed=seed)
        cases.append((q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), *rest))
    places = [x.clone() if isinstance(x, torch.Tensor) else x for x in cases[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, lse = tiercel.paged_attention(*places, return_lse=True)
    for case in (*cases, cases[0]):
        for place, x in zip(places[:6], case[:6], strict=True):
            place.view(torch.uint8).copy_(x.view(torch.uint8))
        graph.replay()
        assert_close(result, lse, *tiercel.ref.paged_attention(*wide(case), return_lse=True))


@pytest.mark.parametrize("decoding", [0, 12])
def test_streams_and_threads_over_a_float8_cache(decoding):
    """Calls of several kernels, which use a workspace one after the other: on two streams, and on
    one stream from two threads."""
    cases, due = [], []
    for seed in range(2):
        lengths = [(900, 20000), (300, 17000)] + [(1, 3000)] * decoding
        q, k, v, *rest = draw(lengths, (32, 8), d=128, page=64, seed=seed)
        cases.append((q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), *rest))
        due.append(tiercel.paged_attention(*cases[-1]))
    own = [torch.cuda.Stream() for _ in cases]
    for streams in (own, own[:1] * 2):
        found = [[], []]

        def work(i, streams=streams, found=found):
            with torch.cuda.stream(streams[i]):
                found[i] += [tiercel.paged_attention(*cases[i]) for _ in range(20)]

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        for expected, results in zip(due, found, strict=True):
            assert len(results) == 20 and all(torch.equal(expected, x) for x in results)


@pytest.mark.parametrize("d", [128, 512])
def test_two_streams(d):
    cases = [draw([(200, 900), (1, 3000)], (8, 2), d=d, seed=seed) for seed in range(2)]
    due = [tiercel.paged_attention(*case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(10):
        for stream, case, results in zip(streams, cases, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(tiercel.paged_attention(*case))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, results in zip(due, found, strict=True) for y in results)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 512])
@pytest.mark.parametrize("contents", [-(2**31), -1, 2**29, 2**31 - 1])
def test_any_contents(contents, d):
    """Nothing beside the tensors is touched."""
    q, k, v, table, lengths, starts, longest = draw([(20, 30), (3, 40)], d=d)
    for x in (table, lengths, starts):
        kept = x.clone()
        x.fill_(contents)
        tiercel.paged_attention(q, k, v, table, lengths, starts, longest)
        x.copy_(kept)
    torch.cuda.synchronize()
    check((q, k, v, table, lengths, starts, longest))


def test_strides():
    q, k, v, table, lengths, starts, longest = draw(MIXED, (8, 2), d=64)
    due = tiercel.paged_attention(q, k, v, table, lengths, starts, longest)
    apart = [torch.stack([x, x * 0 - 7], dim=-1)[..., 0] for x in (table, lengths, starts)]
    qkv = torch.cat([q, q], dim=1)[:, :8]
    out = torch.empty(len(q), 16, 64, dtype=q.dtype, device="cuda")[:, ::2]
    tiercel.paged_attention(qkv, k, v, *apart, longest, out=out)
    assert torch.equal(out, due)
