# SPDX-License-Identifier: Apache-2.0
"""Sequences over a paged cache of latents, for tests of mla_decode and mla_sparse_attention."""

import torch

from tiercel import ref

NO_PAGES = (-7, 1 << 30, -(2**31), 2**31 - 1)
COLUMNS, VALUES = 576, 512
SCALE = 192**-0.5


def make(
    lengths,
    queries=1,
    heads=16,
    page=64,
    dtype=torch.bfloat16,
    device="cpu",
    seed=7,
):
    """q, kv_cache, page_table and seqused_k. Places behind a sequence's last key are NaN, and so is
    the rest of the cache; entries of the page table that nobody uses are no pages."""
    generator = torch.Generator(device).manual_seed(seed)
    columns = max((-(-keys // page) for keys in lengths), default=0) + 1
    pages = len(lengths) * columns + 3
    stored = torch.full((pages, page, COLUMNS), torch.nan, dtype=dtype, device=device)
    table = torch.randperm(pages, device=device, generator=generator)
    table = table[: len(lengths) * columns].view(len(lengths), columns).int()
    for row, keys in zip(table, lengths, strict=True):
        used = -(-keys // page)
        drawn = torch.randn(used * page, COLUMNS, device=device, generator=generator)
        drawn[keys:] = torch.nan
        stored[row[:used].long()] = drawn.to(dtype).unflatten(0, (used, page))
        row[used:] = torch.tensor(NO_PAGES, device=device)[torch.arange(columns - used) % 4].int()
    shape = (len(lengths), queries, heads, COLUMNS)
    q = torch.randn(shape, device=device, generator=generator).to(dtype)
    return q, stored, table, torch.tensor(lengths, dtype=torch.int32, device=device)


def narrowed(inputs, kind, factor=0.5):
    """A cache of float8, or of 656 bytes a row, instead, and its scale; rows behind a
    sequence's last key stay NaN."""
    q, cache, table, lengths = inputs
    stored, scale = narrowed_rows(cache, kind, factor)
    return (q, stored, table, lengths), scale


def narrowed_rows(cache, kind, factor=0.5):
    rows = cache.view(-1, COLUMNS)
    packed = kind == torch.uint8
    scale = None if packed else torch.tensor([factor], device=cache.device)
    stored = torch.zeros(
        *cache.shape[:2], 656 if packed else COLUMNS, dtype=kind, device=cache.device
    )
    slots = torch.arange(len(rows), device=cache.device)
    parts = rows.bfloat16().split((VALUES, COLUMNS - VALUES), 1)
    return ref.mla_cache_write(*parts, stored, slots, kv_scale=scale), scale


def keys_of(rows):
    """The rotary keys of a cache's rows, ``[T, 64]``, in the same memory."""
    packed = rows.dtype == torch.uint8
    return rows[:, -128:].view(torch.bfloat16) if packed else rows[:, VALUES:]


def turned_keys(rotary, positions, table, interleaved):
    """The definition, a pair at a time, in float64."""
    turned = rotary.double()
    for token, position in enumerate(positions.tolist()):
        angles = table[min(max(position, 0), len(table) - 1)].double()
        for pair in range(32):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 32)
            x, y = rotary[token, i].double(), rotary[token, j].double()
            turned[token, i] = x * angles[pair] - y * angles[pair + 32]
            turned[token, j] = y * angles[pair] + x * angles[pair + 32]
    return turned


def assert_turned(keys, truth, scale=None):
    """Rounded once, to the cache's format: nearly all are the numbers nearest to float64's."""
    due = truth if scale is None else (truth / scale.double()).clamp(-448.0, 448.0)
    units = torch.finfo(keys.dtype)
    error = (keys.double() - due).abs()
    least = units.smallest_normal * units.eps / 2  # of what is below the normal numbers
    assert bool((error <= due.abs() * units.eps / 2 * 1.001 + least + 1e-5).all())
    assert (keys.double() != due.float().to(keys.dtype).double()).double().mean() < 0.01


def results(q):
    batch, queries, heads, _ = q.shape
    out = q.new_full((batch, queries, heads, VALUES), torch.nan)
    return out, q.new_full((batch, heads, queries), torch.nan, dtype=torch.float32)


def make_sparse(
    queries, entries, heads=16, rows=200, page=64, dtype=torch.bfloat16, device="cpu", seed=7
):
    """q, kv_cache and indices, of which some are none: -1, and others outside of the cache. Rows
    that no entry names are NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, device=device, generator=generator)

    pages = -(-rows // page)
    indices = torch.randint(pages * page, (queries, entries), device=device, generator=generator)
    stray = torch.tensor([-1, -1, -1, pages * page, *NO_PAGES], device=device)
    kind = torch.randint(60, (queries, entries), device=device, generator=generator)
    cache = drawn(pages * page, COLUMNS).to(dtype)
    used = torch.zeros(pages * page, dtype=torch.bool, device=device)
    indices = torch.where(kind < 8, stray[kind.clamp_max(7)], indices)
    used[indices[kind >= 8]] = True
    cache[~used] = torch.nan
    q = drawn(queries, heads, COLUMNS).to(dtype)
    return q, cache.view(pages, page, COLUMNS), indices.int()


def sparse_results(q):
    return q.new_full((*q.shape[:2], VALUES), torch.nan), q.new_full(
        q.shape[:2], torch.nan, dtype=torch.float32
    )


def assert_sparse(inputs, out, lse, scale=SCALE, units=6, **options):
    wide = [x.double() if x.dtype == out.dtype else x for x in inputs]
    assert_near(
        ref.mla_sparse_attention(*wide, scale=scale, return_lse=True, **options), out, lse, units
    )


def assert_right(inputs, out, lse, scale=SCALE, units=6, **options):
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    assert_near(ref.mla_decode(*wide, scale=scale, return_lse=True, **options), out, lse, units)


def assert_near(expected, out, lse, units):
    """Probabilities and results are rounded once each; values are about 1."""
    truth, sums = expected
    unit = torch.finfo(out.dtype).eps / 2
    error = (out.double() - truth).abs()
    assert not error.isnan().any()
    if error.numel():
        worst = (error / (truth.abs() + 1.0)).max() / unit
        assert worst <= units, worst.item()
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=5e-5)


def make_indexer(tokens, keys, heads=64, device="cpu", seed=7):
    """q, k, k_scale, weights, and no bounds."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, device=device, generator=generator)

    q, k = (drawn(*shape).to(torch.float8_e4m3fn) for shape in ((tokens, heads, 128), (keys, 128)))
    return q, k, drawn(keys).abs() * 0.1, drawn(tokens, heads) * 0.1, None, None


def assert_logits(inputs, logits, units=2.0**-11):
    """The tensor cores keep about 13 bits of a sum of products of float8."""
    q, k, k_scale, weights, starts, ends = inputs
    truth = ref.indexer_logits(q, k, k_scale, weights.double(), starts, ends)
    terms = ref.indexer_logits(q, k, k_scale, weights.double().abs())
    assert torch.equal(logits == -torch.inf, truth == -torch.inf)
    seen = truth != -torch.inf
    error = ((logits.double() - truth).abs() / (terms + terms.mean() + 1e-9))[seen]
    assert not error.isnan().any()
    assert error.numel() == 0 or error.max() <= units
