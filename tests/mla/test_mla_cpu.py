# SPDX-License-Identifier: Apache-2.0
"""Latent attention with PyTorch and without a GPU: reference, definitions, public functions."""

import math

import pytest
import torch
from support.mla import SCALE, assert_turned, keys_of, make, turned_keys

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

FLOAT8 = torch.float8_e4m3fn


def row_by_row(q, cache, table, lengths, scale, d_v=512):
    """The definition, a query and head at a time."""
    batch, queries, heads, _ = q.shape
    page = cache.shape[1]
    out = torch.zeros(batch, queries, heads, d_v, dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        keys = [cache[table[b, j // page], j % page] for j in range(int(lengths[b]))]
        for i in range(queries):
            seen = keys[: max(len(keys) - queries + i + 1, 0)]
            if not seen:
                continue
            rows = torch.stack(seen).double()
            for h in range(heads):
                scores = rows @ q[b, i, h].double() * scale
                lse[b, h, i] = scores.logsumexp(0)
                out[b, i, h] = scores.softmax(0) @ rows[:, :d_v]
    return out, lse


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_by_definition(page, queries):
    q, cache, table, lengths = make([5, 0, 1, 17], queries, 2, page, torch.float64)
    out, lse = ref.mla_decode(q, cache, table, lengths, scale=0.1, return_lse=True)
    due, sums = row_by_row(q, cache, table, lengths, 0.1)
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, sums)


def test_other_sizes():
    q, cache, table, lengths = make([5, 9], 2, 3, 4, torch.float64)
    q, cache = q[..., :40], cache[..., :40]
    out = ref.mla_decode(q, cache, table, lengths, scale=0.3, d_v=24)
    torch.testing.assert_close(out, row_by_row(q, cache, table, lengths, 0.3, 24)[0])
    assert torch.equal(
        ref.mla_decode(q, cache, table, lengths, scale=0.3, d_v=24),
        ref.mla_decode(q, cache, table, lengths, scale=0.3, d_v=40)[..., :24],
    )


def test_lengths_and_pages_are_not_trusted():
    q, cache, table, lengths = make([5, 9], 1, 2, 4, torch.float64)
    cache = cache.nan_to_num(0.5)
    wrong = table.clone()
    wrong[0, 0], wrong[1, 2] = -3, len(cache)
    table[0, 0] = table[1, 2] = len(cache) - 1
    due = ref.mla_decode(q, cache, table, lengths, scale=0.1)
    assert torch.equal(ref.mla_decode(q, cache, wrong, lengths, scale=0.1), due)
    most = torch.full_like(lengths, table.shape[1] * 4)
    due = ref.mla_decode(q, cache, table, most, scale=0.1)
    assert torch.equal(ref.mla_decode(q, cache, table, most + 1000, scale=0.1), due)
    assert not ref.mla_decode(q, cache, table, lengths - 100, scale=0.1).any()


@pytest.mark.parametrize("kind", [FLOAT8, torch.uint8])
def test_float8_caches_hold_what_was_written(kind):
    """Both layouts, written and read again, against the rows as they were."""
    q, cache, table, lengths = make([70, 5], 2, 4, 16)
    rows = cache.nan_to_num(0.0).view(-1, 576)
    width = 656 if kind == torch.uint8 else 576
    stored = torch.zeros(len(cache), 16, width, dtype=kind)
    scale = torch.tensor([0.01]) if kind == FLOAT8 else None
    parts = rows.split((512, 64), 1)
    slots = torch.arange(len(rows))
    assert tiercel.mla_cache_write(*parts, stored, slots, kv_scale=scale) is stored
    exact = tiercel.mla_decode(q, cache, table, lengths, scale=SCALE)
    got = tiercel.mla_decode(q, stored, table, lengths, scale=SCALE, kv_scale=scale)
    error = (got.float() - exact.float()).abs().max() / exact.float().abs().max()
    assert 0 < error < 0.1


def test_bytes_of_a_packed_row():
    latent = torch.zeros(2, 512, dtype=torch.bfloat16)
    latent[0, :3] = torch.tensor([448.0, -224.0, 1.0])
    latent[0, 130], latent[0, 511] = 2.0, -896.0
    rotary = torch.arange(128).view(2, 64).bfloat16()
    cache = torch.full((1, 3, 656), 255, dtype=torch.uint8)
    tiercel.mla_cache_write(latent, rotary, cache, torch.tensor([2, 0]))
    first, second = cache[0, 2], cache[0, 0]
    assert (cache[0, 1] == 255).all()
    values = first[:512].view(FLOAT8).float()
    assert values[:3].tolist() == [448.0, -224.0, 1.0]
    assert values[130] == 448.0 and values[511] == -448.0
    least = 2.0**-126
    assert first[512:528].view(torch.float32).tolist() == [
        1.0,
        torch.tensor(2.0 / 448).item(),
        least,
        2.0,
    ]
    assert torch.equal(first[528:].view(torch.bfloat16), rotary[0])
    assert not second[:512].any()
    assert second[512:528].view(torch.float32).tolist() == [least] * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_are_skipped(dtype):
    rows = torch.ones(5, 576, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    slots = torch.tensor([-1, 8, 3, 2**31 - 1, -(2**31)], dtype=dtype)
    tiercel.mla_cache_write(rows[:, :512], rows[:, 512:], cache, slots)
    assert cache.sum() == 576 and cache[0, 3].all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, FLOAT8, torch.uint8])
def test_rotated_keys(interleaved, kind):
    """Against the definition; positions outside of the table take its first and last row."""
    dtype = kind if kind.itemsize == 2 else torch.bfloat16
    rows = torch.randn(6, 576).to(dtype)
    parts, table = rows.split((512, 64), 1), torch.randn(9, 64)
    positions, slots = torch.tensor([0, 8, 3, -1, 9, 5]), torch.tensor([3, 0, 1, 7, 5, -1])
    width = 656 if kind == torch.uint8 else 576
    cache, plain = (torch.zeros(2, 4, width, dtype=kind) for _ in range(2))
    scale = torch.tensor([0.3]) if kind == FLOAT8 else None
    tiercel.mla_cache_write(*parts, plain, slots, kv_scale=scale)
    turned = {"positions": positions, "cos_sin_cache": table, "interleaved": interleaved}
    assert tiercel.mla_cache_write(*parts, cache, slots, kv_scale=scale, **turned) is cache
    got, before = (keys_of(x.view(8, -1)) for x in (cache, plain))
    truth = turned_keys(parts[1], positions, table, interleaved)
    assert_turned(got[slots[:5]], truth[:5], scale)
    for keys in (got, before):
        keys.view(torch.uint8)[slots[:5]] = 0
    assert torch.equal(cache.view(torch.uint8), plain.view(torch.uint8))


def test_keys_are_rotated_where_they_are():
    cache = torch.randn(2, 4, 576).bfloat16()
    flat, before, table = cache.view(8, 576), cache.clone().view(8, 576), torch.randn(9, 64)
    turned = {"positions": torch.arange(8), "cos_sin_cache": table}
    tiercel.mla_cache_write(*flat.split((512, 64), 1), cache, torch.arange(8), **turned)
    assert torch.equal(flat[:, :512], before[:, :512])
    assert_turned(flat[:, 512:], turned_keys(before[:, 512:], torch.arange(8), table, False))


def test_rotation_that_is_not_whole():
    latent, rotary = torch.zeros(3, 16).bfloat16(), torch.zeros(3, 8).bfloat16()
    given = (latent, rotary, torch.zeros(2, 4, 24).bfloat16(), torch.arange(3))
    table, positions = torch.zeros(5, 8), torch.arange(3)
    with pytest.raises(ValueError, match="`cos_sin_cache`"):
        tiercel.mla_cache_write(*given, positions=positions)
    with pytest.raises(ValueError, match="`positions`"):
        tiercel.mla_cache_write(*given, cos_sin_cache=table)
    with pytest.raises(ValueError, match="`interleaved` needs `positions` and `cos_sin_cache`"):
        tiercel.mla_cache_write(*given, interleaved=True)
    with pytest.raises(ValueError, match="`cos_sin_cache` must have at least one row"):
        tiercel.mla_cache_write(*given, positions=positions, cos_sin_cache=table[:0])
    odd = (latent, rotary[:, :7], torch.zeros(2, 4, 23).bfloat16(), torch.arange(3))
    with pytest.raises(ValueError, match="`rotary` must have an even number of columns, got 7"):
        tiercel.mla_cache_write(*odd, positions=positions, cos_sin_cache=table[:, :7].contiguous())


def test_results_go_where_they_are_asked_to():
    inputs = make([5, 9], 2, 3, 4)
    due, sums = tiercel.mla_decode(*inputs, scale=SCALE, return_lse=True)
    out = torch.empty_like(due)
    assert tiercel.mla_decode(*inputs, scale=SCALE, out=out) is out
    assert torch.equal(out, due)
    out.zero_()
    both = tiercel.mla_decode(*inputs, scale=SCALE, out=out, return_lse=True)
    assert both[0] is out and torch.equal(out, due) and torch.equal(both[1], sums)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match="mla_decode: `scale` must be positive and finite"):
        tiercel.mla_decode(*make([5]), scale=scale)


@pytest.mark.parametrize("d_v", [0, -1, 577])
def test_d_v_must_fit(d_v):
    with pytest.raises(ValueError, match="mla_decode: `d_v` must be from 1 to the columns of `q`"):
        tiercel.mla_decode(*make([5]), scale=SCALE, d_v=d_v)


def test_caches_of_the_wrong_width():
    q, cache, table, lengths = make([5])
    with pytest.raises(ValueError, match="`kv_cache` of bfloat16 must have 576 in its last"):
        tiercel.mla_decode(q, cache[..., :512], table, lengths, scale=SCALE)
    packed = torch.zeros(4, 64, 656, dtype=torch.uint8)
    with pytest.raises(ValueError, match="`kv_cache` of uint8 must have 656 in its last"):
        tiercel.mla_decode(q, packed[..., :576], table, lengths, scale=SCALE)
    with pytest.raises(ValueError, match="`q` must have 576 columns for a cache of uint8, got 64"):
        tiercel.mla_decode(q[..., :64], packed, table, lengths, scale=SCALE, d_v=64)
    with pytest.raises(ValueError, match="`kv_scale` must be None for a cache that is not float8"):
        tiercel.mla_decode(q, cache, table, lengths, scale=SCALE, kv_scale=torch.ones(1))


def test_rows_that_a_cache_does_not_take():
    latent, rotary = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 64).bfloat16()
    packed, slots = torch.zeros(2, 4, 656, dtype=torch.uint8), torch.arange(3)
    with pytest.raises(ValueError, match="must have 512 and 64 columns for a cache of uint8"):
        tiercel.mla_cache_write(latent[:, :448], rotary, packed, slots)
    with pytest.raises(TypeError, match="`latent` must have dtype bfloat16 for a cache of uint8"):
        tiercel.mla_cache_write(latent.half(), rotary.half(), packed, slots)
    with pytest.raises(ValueError, match="`kv_cache` of bfloat16 must have 576 in its last"):
        tiercel.mla_cache_write(latent, rotary, torch.zeros(2, 4, 512).bfloat16(), slots)
