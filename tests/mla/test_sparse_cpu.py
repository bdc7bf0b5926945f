# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention with PyTorch and without a GPU."""

import pytest
import torch
from support.mla import SCALE, make_indexer, make_sparse, narrowed_rows

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def entry_by_entry(q, cache, indices, scale, d_v=512):
    """The definition, a query and head at a time."""
    rows = cache.flatten(0, 1)
    out = torch.zeros(*q.shape[:2], d_v, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for t, listed in enumerate(indices.tolist()):
        keys = [rows[slot] for slot in listed if 0 <= slot < len(rows)]
        if not keys:
            continue
        keys = torch.stack(keys).double()
        for h in range(q.shape[1]):
            scores = keys @ q[t, h].double() * scale
            lse[t, h] = scores.logsumexp(0)
            out[t, h] = scores.softmax(0) @ keys[:, :d_v]
    return out, lse


@pytest.mark.parametrize(("page", "entries"), [(1, 5), (3, 40), (16, 130)])
def test_by_definition(page, entries):
    inputs = make_sparse(4, entries, 2, page=page, dtype=torch.float64)
    inputs[2][1] = -1
    out, lse = ref.mla_sparse_attention(*inputs, scale=0.1, return_lse=True)
    due, sums = entry_by_entry(*inputs, 0.1)
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, sums)


def test_other_sizes():
    q, cache, indices = make_sparse(3, 20, 2, dtype=torch.float64)
    q, cache = q[..., :40], cache[..., :40]
    out = ref.mla_sparse_attention(q, cache, indices, scale=0.3, d_v=24)
    torch.testing.assert_close(out, entry_by_entry(q, cache, indices, 0.3, 24)[0])


def test_an_entry_that_occurs_twice_counts_twice():
    q, cache, indices = make_sparse(1, 4, 2, dtype=torch.float64)
    cache = cache.nan_to_num(0.5)
    indices[0] = torch.tensor([3, 9, 3, -1])
    out, lse = tiercel.ref.mla_sparse_attention(q, cache, indices, scale=0.1, return_lse=True)
    due, sums = entry_by_entry(q, cache, indices, 0.1)
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, sums)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint8])
def test_float8_caches(kind):
    q, cache, indices = make_sparse(3, 50, 2)
    stored, scale = narrowed_rows(cache, kind, 0.01)
    exact = tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE)
    got = tiercel.mla_sparse_attention(q, stored, indices, scale=SCALE, kv_scale=scale)
    error = (got.float() - exact.float()).abs().max() / exact.float().abs().max()
    assert 0 < error < 0.1


def test_results_go_where_they_are_asked_to():
    inputs = make_sparse(3, 50, 2)
    due, sums = tiercel.mla_sparse_attention(*inputs, scale=SCALE, return_lse=True)
    out = torch.empty_like(due)
    assert tiercel.mla_sparse_attention(*inputs, scale=SCALE, out=out) is out
    assert torch.equal(out, due)
    out.zero_()
    both = tiercel.mla_sparse_attention(*inputs, scale=SCALE, out=out, return_lse=True)
    assert both[0] is out and torch.equal(out, due) and torch.equal(both[1], sums)


def test_what_does_not_fit():
    q, cache, indices = make_sparse(2, 8, 2)
    op = "mla_sparse_attention"
    with pytest.raises(ValueError, match=f"{op}: `scale` must be positive and finite"):
        tiercel.mla_sparse_attention(q, cache, indices, scale=0.0)
    with pytest.raises(ValueError, match=f"{op}: `d_v` must be from 1 to the columns of `q`"):
        tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE, d_v=577)
    with pytest.raises(ValueError, match=f"{op}: `kv_cache` of bfloat16 must have 576"):
        tiercel.mla_sparse_attention(q, cache[..., :512], indices, scale=SCALE)
    with pytest.raises(ValueError, match=f"{op}: `kv_scale` must be None"):
        tiercel.mla_sparse_attention(q, cache, indices, scale=SCALE, kv_scale=torch.ones(1))


def test_top_k_by_definition():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 60, generator=generator).mul(2).round()
    logits[0, 3:9], logits[1, ::2], logits[2] = torch.nan, -torch.inf, -torch.inf
    lengths = torch.tensor([60, 40, 60, 0, 99], dtype=torch.int32)
    for k in (1, 7, 40, 70):
        found = tiercel.top_k_indices(logits, k, lengths=lengths)
        for row, length, got in zip(logits.tolist(), lengths.tolist(), found.tolist(), strict=True):
            # NaN first; equal ones by their places.
            order = sorted(
                (-torch.inf if x != x else -x, x == x, i)
                for i, x in enumerate(row[:length])
                if x != -torch.inf
            )
            due = sorted(i for *_, i in order[:k])
            assert got == due + [-1] * (k - len(due))


def test_k_must_be_positive():
    with pytest.raises(ValueError, match="top_k_indices: `k` must be at least 1, got 0"):
        tiercel.top_k_indices(torch.zeros(2, 3), 0)


def test_indexer_by_definition():
    q, k, k_scale, weights, _, _ = make_indexer(4, 50, 3)
    starts = torch.tensor([0, 3, 40, -5], dtype=torch.int32)
    ends = torch.tensor([50, 2, 45, 99], dtype=torch.int32)
    found = tiercel.indexer_logits(q, k, k_scale, weights, starts=starts, ends=ends)
    for t in range(4):
        for j in range(50):
            due = -torch.inf
            if starts[t] <= j < ends[t]:
                products = (q[t].double() @ k[j].double()).relu()
                due = float((products * weights[t].double()).sum() * k_scale[j].double())
            assert found[t, j].item() == pytest.approx(due, rel=1e-4, abs=1e-4)
