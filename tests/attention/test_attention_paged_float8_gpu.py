# SPDX-License-Identifier: Apache-2.0
"""paged_attention over float8 caches on an H100 or H200, against float64: head dimensions that
test_attention_paged_gpu.py leaves out, float8 queries, and large caches and batches.

All slots behind a sequence's last key, and all unused pages, are NaN.
"""

import pytest
import torch
from support.gpu_memory import skip_without
from support.paged import assert_close, make, random_trees, wide, with_room

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FLOAT8 = torch.float8_e4m3fn
MIXED = [(1, 777), (150, 210), (0, 40), (3, 3), (1, 1), (700, 1500), (0, 0), (1, 4097), (20, 148)]


def draw(lengths, *args, d=128, queries=None, device="cuda", **options):
    """Rows of the caches are apart by a multiple of 16 bytes."""
    room = -(-d // 16) * 16
    q, k, v, *rest = make(lengths, *args, d=room, device=device, **options)
    q, k, v = (x[..., :d] for x in (q, k.to(FLOAT8), v.to(FLOAT8)))
    return q if queries is None else q.nan_to_num().to(queries), k, v, *rest


def factors(heads, **more):
    one = torch.linspace(0.5, 1.5, heads, device="cuda")
    return {"k_scale": one, "v_scale": one.flip(0), **more}


def check(given, **options):
    result, lse = tiercel.paged_attention(*given, return_lse=True, **options)
    truth = tiercel.ref.paged_attention(*wide(given), return_lse=True, **options)
    assert_close(result, lse, *truth)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [72, 144, 200, 256, 264, 504, 512])
@pytest.mark.parametrize("page", [1, 16, 256])
def test_small(page, d, dtype):
    given = draw([(1, 77), (70, 140), (0, 9), (2, 2)], (8, 2), d=d, page=page, dtype=dtype)
    check(given, sinks=torch.zeros(8, device="cuda"), **factors(2))


@pytest.mark.parametrize("d", [40, 72, 200, 256, 264, 512])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (100, 0)},
        {"window": (40, 5), "causal": False},
        {"softcap": 5.0},
    ],
)
def test_mixed(d, options):
    check(draw(MIXED, (8, 2), d=d, around=(2, 3)), **factors(2), **options)
    check(draw([(1, 900), (2, 3000), (1, 1)], (8, 2), d=d), **factors(2), **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("heads", [(16, 4), (5, 1), (64, 1)])
@pytest.mark.parametrize("d", [256, 512])
def test_pages(page, layout, heads, d):
    check(draw(MIXED, heads, page=page, layout=layout, d=d))
    check(draw([(1, 20_000), (1, 100)], heads, page=page, layout=layout, d=d))


@pytest.mark.parametrize(("page", "d"), [(1, 256), (64, 256), (16, 200)])
@pytest.mark.parametrize(
    "lengths", [[(700, 1500), (300, 2000)], [(700, 1500), (900, 20000), (300, 17000)]]
)
def test_copies_have_the_bits_of_16_bits(page, d, lengths):
    """Copied before the tiles, and in the second case mostly by the tiles' blocks."""
    q, k, v, *rest = draw(lengths, (32, 8), d=d, page=page)
    most = {"max_seqused_k": max(keys for _, keys in lengths), "return_lse": True}
    results = tiercel.paged_attention(q, k, v, *rest, **most)
    expected = tiercel.paged_attention(q, k.to(q.dtype), v.to(q.dtype), *rest, **most)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_trees_of_wide_heads():
    given = draw([(1, 777), (64, 210), (0, 40), (7, 7), (33, 4097)], (8, 2), d=264)
    check(given, tree_mask=random_trees(given), **factors(2))


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 72, 128, 256, 512])
@pytest.mark.parametrize("lengths", [[(1, 77), (2, 140), (0, 9)], [(70, 140), (1, 300), (3, 3)]])
def test_float8_queries(lengths, d):
    given = draw(lengths, (8, 2), d=d, queries=FLOAT8, around=(2, 1))
    q_scale = torch.tensor([0.25], device="cuda")
    check(given, sinks=torch.zeros(8, device="cuda"), **factors(2, q_scale=q_scale))
    out = tiercel.paged_attention(*given, **factors(2))
    other = tiercel.paged_attention(given[0].bfloat16(), *given[1:], **factors(2))
    assert torch.equal(out, other)


@pytest.mark.parametrize("lengths", [MIXED, [(1, 8000)] * 64, [(512, 9000), (1, 3000)] * 4])
def test_batches_of_float8_queries(lengths):
    given = draw(lengths, (32, 8), d=128, queries=FLOAT8)
    check(given, **factors(8, q_scale=torch.tensor([0.25], device="cuda")))


def test_a_graph_of_float8_queries():
    given = draw([(70, 300), (1, 2000)], (8, 2), d=128, queries=FLOAT8)
    q_scale = torch.tensor([0.25], device="cuda")
    out = torch.empty(given[0].shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.paged_attention(*given, q_scale=q_scale, out=out)
    given[0].copy_(given[0].flip(0)), q_scale.fill_(0.5)
    graph.replay()
    assert torch.equal(out, tiercel.paged_attention(*given, q_scale=q_scale))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_chunk_has_the_bits_of_decoding_in_the_batch_invariant_mode(d):
    given = q, k, v, table, used, _, _ = draw([(500, 1300), (3, 9)], (8, 2), d=d)
    with tiercel.batch_invariant():
        whole = tiercel.paged_attention(*given, **factors(2))
        check(given, **factors(2))
        for row in (0, 1, 31, 200, 499):
            alone = (q[row : row + 1], k, v, table[:1], used[:1] - 499 + row)
            starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
            assert torch.equal(
                tiercel.paged_attention(*alone, starts, 1, **factors(2))[0], whole[row]
            )


@pytest.mark.parametrize("chunk", [False, True])
def test_a_batch_of_70_000_sequences(chunk):
    """Decoding alone, and beside a chunk."""
    lengths = [(i % 2, i % 3 + 1) for i in range(70_000)] + [(300, 900)] * chunk
    drawn = draw(lengths, (2, 2), d=64, page=1 if not chunk else 16, device="cpu")
    given = [x.cuda() if isinstance(x, torch.Tensor) else x for x in drawn]
    result, lse = tiercel.paged_attention(*given, return_lse=True)
    q, k, v, table, used, _, _ = given
    small = [x.double().nan_to_num() for x in (k, v)]
    odd = (q[:35_000, None].double(), *small, table[1:70_000:2, :4], used[1:70_000:2])
    truth, sums = tiercel.ref.decode_attention(*odd, return_lse=True)
    assert_close(result[:35_000], lse[:, :35_000], truth[:, 0], sums[..., 0].T)
    if chunk:
        starts = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
        last = (q[35_000:].double(), *small, table[-1:], used[-1:], starts, 300)
        truth, sums = tiercel.ref.paged_attention(*last, return_lse=True)
        assert_close(result[35_000:], lse[:, 35_000:], truth, sums)


@pytest.mark.parametrize(
    ("lengths", "d"),
    [
        ([(1, 300), (2, 40)], 128),
        ([(100, 300), (1, 40)], 128),
        ([(700, 1500), (300, 2000)], 128),
        ([(700, 1500), (300, 2000)], 256),
        ([(100, 300), (1, 40)], 512),
    ],
)
def test_more_than_two_to_the_31_elements_of_cache(lengths, d):
    """Keys and values of a page lie side by side; the sequences' pages are the last ones."""
    skip_without(6)
    q, k, v, table, *rest = draw(lengths, (16, 1), d=d, page=16)
    pages = 2**31 // (2 * 16 * d) + 100
    stored = torch.empty(pages, 2, 16, 1, d, dtype=torch.uint8, device="cuda").fill_(0x7F)
    caches = [x.view(FLOAT8) for x in stored.unbind(1)]
    for cache, small in zip(caches, (k, v), strict=True):
        cache.view(torch.uint8)[-len(small) :] = small.view(torch.uint8)
    used = (table >= 0) & (table < len(k))
    moved = torch.where(used, table + pages - len(k), table).int()
    result, lse = tiercel.paged_attention(q, *caches, moved, *rest, return_lse=True)
    truth = tiercel.ref.paged_attention(*wide((q, k, v, table, *rest)), return_lse=True)
    assert_close(result, lse, *truth)


PREFIXES = [(1, 777), (150, 210), (0, 40), (3, 3), (700, 1500), (20, 148)]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("options", [{}, {"window": (-1, 3), "causal": False}, {"softcap": 5.0}])
def test_prefixes(d, dtype, options):
    """16-bit caches too, for which there is no other file."""
    if dtype == FLOAT8:
        given = draw(PREFIXES, (8, 2), d=d)
    else:
        given = make(PREFIXES, (8, 2), d=d, dtype=dtype, device="cuda")
    prefix = torch.tensor([60, 100, 5, 2**31 - 1, 1200, 0], dtype=torch.int32, device="cuda")
    check(given, prefix=prefix, **options)
    given = with_room(make([(2, 900), (1, 3000)], (8, 2), d=d, device="cuda"))
    check(given, prefix=prefix[:2], **options)
