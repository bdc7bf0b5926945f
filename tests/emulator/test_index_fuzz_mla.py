# SPDX-License-Identifier: Apache-2.0
"""Whatever index tensors hold, latent attention and its cache stay inside of their tensors."""

import pytest
import torch
from support.emulator import kernels, options
from support.index_fuzz import CASES, Draw, embedded, margins_kept, reference, run
from support.mla import (
    SCALE,
    VALUES,
    assert_logits,
    assert_right,
    assert_sparse,
    keys_of,
    make,
    make_indexer,
    make_sparse,
    results,
    sparse_results,
)

pytestmark = pytest.mark.torch

# Operators whose index tensors this file fuzzes: see tests/api/test_index_checks.py.
FUZZED = (
    "indexer_logits",
    "mla_cache_write",
    "mla_decode",
    "mla_sparse_attention",
    "top_k_indices",
)


@pytest.mark.parametrize("case", range(CASES))
def test_mla_decode(case):
    draw = Draw(case)
    lengths = [draw.of(0, 1, 40, 64, 130) for _ in range(draw.of(1, 4))]
    queries, heads, page = draw.of(1, 3), draw.of(2, 16), draw.of(1, 16, 64, 128)
    q, cache, table, used = make(lengths, queries, heads, page, seed=case)
    cache = cache.nan_to_num(1.0)  # any page may be read
    table = draw.strays(table, len(cache), wide=False)
    used = draw.strays(used, table.shape[1] * page, wide=False)
    given = [embedded(x) for x in (q, cache, table, used)]
    out, lse = (embedded(x) for x in results(q))
    rest = (None, out, lse, SCALE, VALUES)
    # No length makes a launch longer than the table does.
    with margins_kept(), options(multiprocessors=draw.of(1, 4), max_instructions=40_000_000):
        needed = kernels.mla_decode(*given, *rest, None)
        if needed:
            assert kernels.mla_decode(*given, *rest, embedded(torch.full((needed,), 7.0))) == 0
    assert_right(given, out, lse)


@pytest.mark.parametrize("case", range(CASES))
def test_mla_sparse_attention(case):
    draw = Draw(case)
    queries, entries, heads = draw.of(1, 3), draw.of(1, 64, 140), draw.of(2, 16)
    q, cache, indices = make_sparse(queries, entries, heads, page=draw.of(1, 16, 64), seed=case)
    indices = draw.strays(indices, cache.shape[0] * cache.shape[1], wide=False)
    given = [embedded(x) for x in (q, cache.nan_to_num(1.0), indices)]
    out, lse = (embedded(x) for x in sparse_results(q))
    rest = (None, out, lse, SCALE, VALUES)
    with margins_kept(), options(multiprocessors=draw.of(1, 4), max_instructions=40_000_000):
        needed = kernels.mla_sparse_attention(*given, *rest, None)
        if needed:
            workspace = embedded(torch.full((needed,), 7.0))
            assert kernels.mla_sparse_attention(*given, *rest, workspace) == 0
    assert_sparse(given, out, lse)


@pytest.mark.parametrize("case", range(CASES))
def test_top_k_indices(case):
    draw = Draw(case)
    rows, columns, k = draw.of(1, 5), draw.of(1, 40, 5000), draw.of(1, 33)
    lengths = draw.strays(torch.full((rows,), columns // 2), columns, wide=False).int()
    run("top_k_indices", draw.normal(rows, columns).float(), k, lengths, None)


@pytest.mark.parametrize("case", range(CASES))
def test_indexer_logits(case):
    draw = Draw(case)
    q, k, k_scale, weights, _, _ = make_indexer(draw.of(1, 5), draw.of(1, 100, 600), seed=case)
    bounds = [
        draw.strays(torch.full((len(q),), len(k) * i // 2), len(k), wide=False).int()
        for i in (0, 2)
    ]
    given = [embedded(x) for x in (q, k, k_scale, weights, *bounds)]
    out = embedded(torch.full((len(q), len(k)), torch.nan))
    with margins_kept(), options(multiprocessors=draw.of(1, 4), max_instructions=40_000_000):
        kernels.indexer_logits(*given, out)
    assert_logits(given, out)


@pytest.mark.parametrize("case", range(CASES))
def test_mla_cache_write(case):
    draw = Draw(case)
    tokens, blocks, places = draw.of(1, 5, 33), draw.of(2, 5), draw.of(1, 8, 12)
    kind = draw.of(torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    order = torch.randperm(blocks * places, generator=draw.generator)[:tokens]
    slots = torch.full((tokens,), -1)
    slots[: len(order)] = order
    slots = draw.strays(slots, blocks * places, wide=draw.of(False, True))
    cache = torch.zeros(blocks, places, 656 if kind == torch.uint8 else 576, dtype=kind)
    latent, rotary = draw.normal(tokens, 512), draw.normal(tokens, 64)
    scale = draw.uniform(1) + 0.5 if kind == torch.float8_e4m3fn else None
    turned = (None, None, False)
    if draw.of(False, True):
        rows = draw.of(1, 40)
        positions = draw.strays(torch.zeros(tokens), rows, wide=draw.of(False, True))
        turned = (positions, draw.normal(rows, 64), draw.of(False, True))
    due = cache.clone()
    reference("mla_cache_write")(latent, rotary, due, slots, scale, *turned, None)
    _, given = run("mla_cache_write", latent, rotary, cache, slots, scale, *turned, None)
    if turned[0] is None:
        assert torch.equal(given[2].view(torch.uint8), due.view(torch.uint8))
        return
    got, keys = (keys_of(x.view(blocks * places, -1)) for x in (given[2], due))
    torch.testing.assert_close(got.float(), keys.float(), rtol=0.13, atol=1e-2)
    for part in (got, keys):
        part.view(torch.uint8).zero_()
    assert torch.equal(given[2].view(torch.uint8), due.view(torch.uint8))
