# SPDX-License-Identifier: Apache-2.0
"""mla_sparse_attention, top_k_indices and indexer_logits on an H100 or H200."""

import pytest
import torch
from support.mla import (
    SCALE,
    assert_logits,
    assert_sparse,
    make_indexer,
    make_sparse,
    narrowed_rows,
)

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def check(inputs, scale=SCALE, **options):
    out, lse = tiercel.mla_sparse_attention(*inputs, scale=scale, return_lse=True, **options)
    assert_sparse(inputs, out, lse, scale, **options)


def draw(*arguments, **options):
    return make_sparse(*arguments, device="cuda", **options)


def check_packed(inputs):
    q, cache, indices = inputs
    stored, _ = narrowed_rows(cache, torch.uint8)
    out = tiercel.mla_sparse_attention(q, stored, indices, scale=SCALE)
    error = out.double() - ref.mla_sparse_attention(q.double(), stored, indices, scale=SCALE)
    assert not error.isnan().any() and error.abs().max() <= 0.05


def check_float8(inputs):
    q, cache, indices = inputs
    stored, scale = narrowed_rows(cache, FP8)
    check((q, stored, indices), kv_scale=scale)


@pytest.mark.sanitize
@pytest.mark.parametrize("judge", [check, check_packed, check_float8])
@pytest.mark.parametrize(("queries", "entries"), [(2, 300), (140, 130)])
def test_small(judge, queries, entries):
    judge(draw(queries, entries))


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 65, 128])
@pytest.mark.parametrize("queries", [1, 3, 70, 200])
def test_heads_and_queries(heads, queries):
    check(draw(queries, 640, heads, rows=5000))


@pytest.mark.parametrize("entries", [1, 63, 64, 65, 128, 129, 2048])
@pytest.mark.parametrize("judge", [check, check_packed, check_float8])
def test_entries(judge, entries):
    judge(draw(5, entries, 16, rows=5000, page=16))


@pytest.mark.parametrize("page", [1, 2, 64, 128])
@pytest.mark.parametrize("judge", [check, check_packed])
def test_many_queries(judge, page):
    judge(draw(300, 512, 128, rows=4000, page=page))


def test_none_at_all():
    q, cache, indices = draw(40, 512)
    out, lse = tiercel.mla_sparse_attention(
        q, cache, torch.full_like(indices, -1), scale=SCALE, return_lse=True
    )
    assert not out.any() and (lse == -torch.inf).all()


def test_extreme_scores():
    check(draw(9, 700), scale=3.0)
    inputs = draw(5, 700, 4)
    inputs[0].fill_(64.0), inputs[1].fill_(100.0)
    check(inputs, 1.0)


def test_a_result_is_the_same_each_time():
    inputs = draw(37, 2048, 128, rows=20000)
    first = tiercel.mla_sparse_attention(*inputs, scale=SCALE, return_lse=True)
    for _ in range(20):
        again = tiercel.mla_sparse_attention(*inputs, scale=SCALE, return_lse=True)
        assert all(map(torch.equal, first, again))


def test_as_mla_decode_of_all_keys():
    """A list of all keys of a sequence."""
    keys = 1000
    q, cache, indices = draw(1, keys, 16, rows=keys, page=8)
    cache = cache.nan_to_num(0.5)
    indices[0] = torch.randperm(keys, device="cuda")
    table = torch.arange(len(cache), dtype=torch.int32, device="cuda")[None]
    used = torch.tensor([keys], dtype=torch.int32, device="cuda")
    due = tiercel.mla_decode(q[None], cache, table, used, scale=SCALE)[0]
    out = tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE)
    assert (out.float() - due.float()).abs().max() <= 0.01


def test_a_graph_reads_indices_again():
    q, cache, indices = draw(10, 512)
    tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE, return_lse=True)
    for _ in range(3):
        indices.copy_(indices.roll(1, 0))
        graph.replay()
        assert_sparse((q, cache, indices), out, lse)


def check_top_k(logits, k, lengths=None):
    found = tiercel.top_k_indices(logits, k, lengths=lengths)
    assert torch.equal(found, ref.top_k_indices(logits, k, lengths))


def numbers(rows, columns):
    generator = torch.Generator("cuda").manual_seed(11)
    return torch.randn(rows, columns, device="cuda", generator=generator)


@pytest.mark.sanitize
@pytest.mark.parametrize(("rows", "columns", "k"), [(2, 700, 64), (1, 9000, 2048), (4, 33000, 500)])
def test_small_top_k(rows, columns, k):
    check_top_k(numbers(rows, columns), k)


@pytest.mark.parametrize("columns", [1, 1000, 4096, 22528, 22532, 65537, 131072, 180224, 200001])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_top_k(rows, columns):
    check_top_k(numbers(rows, columns), 2048)
    check_top_k(numbers(rows, columns).mul(4).round().relu(), 2048)


@pytest.mark.parametrize("k", [1, 512, 2048, 5000, 40000])
def test_top_k_of_ragged_rows(k):
    logits = numbers(300, 30000)
    lengths = (torch.rand(300, device="cuda") * 31000 - 200).int()
    logits[:, ::7] = -torch.inf
    logits[5, 100:3000] = torch.nan
    check_top_k(logits, k, lengths)
    check_top_k(logits[:, 1:29000], k, lengths)


@pytest.mark.parametrize("k", [1, 512, 2048])
@pytest.mark.parametrize("rows", [1, 30, 300])
def test_sampled_top_k(rows, k):
    """Rows of which few elements are chosen; samples that mislead."""
    columns = 70_000
    logits = numbers(rows, columns)
    places = torch.arange(columns, device="cuda")
    sampled = places // 4 % 8 == 0
    lengths = (torch.rand(rows, device="cuda") * 80_000 - 200).int()
    check_top_k(logits, k)
    check_top_k(logits[:, 4:69_999], k, lengths)
    for some in (sampled, ~sampled, (places > 30_000) & (places < 35_000), places % 7 != 0):
        check_top_k(torch.where(some, logits + 9, logits), k)
        check_top_k(torch.where(some, logits, -torch.inf), k, lengths)
    check_top_k(torch.where(places % 20 == 0, torch.nan, logits), k)
    check_top_k(places.float().expand(rows, -1).contiguous(), k)


def check_indexer(q, k, k_scale, weights, starts=None, ends=None):
    found = tiercel.indexer_logits(q, k, k_scale, weights, starts=starts, ends=ends)
    assert_logits((q, k, k_scale, weights, starts, ends), found)


@pytest.mark.sanitize
@pytest.mark.parametrize("heads", [32, 64])
def test_small_indexer(heads):
    check_indexer(*make_indexer(5, 700, heads, "cuda"))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("tokens", [1, 3, 64, 500])
@pytest.mark.parametrize("keys", [1, 64, 1000, 9999])
def test_indexer(heads, tokens, keys):
    check_indexer(*make_indexer(tokens, keys, heads, "cuda"))


def test_bounds_of_the_indexer():
    q, k, k_scale, weights, _, _ = make_indexer(600, 5000, 64, "cuda")
    ends = torch.randint(-10, 5100, (600,), device="cuda").int()
    causal = torch.arange(600, device="cuda").int() + 4000
    for starts, last in ((ends // 2, ends), (None, causal), (causal, None), (causal, causal)):
        check_indexer(q, k, k_scale, weights, starts, last)
