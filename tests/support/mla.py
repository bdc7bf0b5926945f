# SPDX-License-Identifier: Apache-2.0
"""Sequences over a paged cache of latents, for tests of mla_decode."""

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
    rows = cache.view(-1, COLUMNS)
    packed = kind == torch.uint8
    scale = None if packed else torch.tensor([factor], device=q.device)
    stored = torch.zeros(*cache.shape[:2], 656 if packed else COLUMNS, dtype=kind, device=q.device)
    slots = torch.arange(len(rows), device=q.device)
    parts = rows.bfloat16().split((VALUES, COLUMNS - VALUES), 1)
    return (q, ref.mla_cache_write(*parts, stored, slots, kv_scale=scale), table, lengths), scale


def results(q):
    batch, queries, heads, _ = q.shape
    out = q.new_full((batch, queries, heads, VALUES), torch.nan)
    return out, q.new_full((batch, heads, queries), torch.nan, dtype=torch.float32)


def assert_right(inputs, out, lse, scale=SCALE, units=6, **options):
    """Probabilities and results are rounded once each; values are about 1."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth, sums = ref.mla_decode(*wide, scale=scale, return_lse=True, **options)
    unit = torch.finfo(out.dtype).eps / 2
    error = (out.double() - truth).abs()
    assert not error.isnan().any()
    if error.numel():
        worst = (error / (truth.abs() + 1.0)).max() / unit
        assert worst <= units, worst.item()
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=5e-5)
