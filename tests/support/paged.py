# SPDX-License-Identifier: Apache-2.0
"""Sequences with any number of new tokens over a paged cache, for tests of paged_attention."""

import itertools

import torch

NO_PAGES = (-7, 1 << 30, -(2**31), 2**31 - 1)


def make(
    lengths,  # (new tokens, keys) of each sequence
    heads=(4, 2),
    d=64,
    page=16,
    dtype=torch.bfloat16,
    layout="NHD",
    around=(0, 0),  # rows of q in no sequence, before and after
    device="cpu",
    seed=7,
    d_v=None,  # the head dimension of values, in a cache of their own
):
    """The arguments q to max_seqlen_q. Places behind a sequence's last key are NaN, and so is the
    rest of the cache; entries of the page table that nobody uses are no pages; keys and values of
    a page lie side by side."""
    widest = max(d, d_v or d)
    generator = torch.Generator(device).manual_seed(seed)
    columns = max((-(-keys // page) for _, keys in lengths), default=0) + 1
    pages = len(lengths) * columns + 3
    order = (0, 1, 2, 3, 4) if layout == "NHD" else (0, 1, 3, 2, 4)
    shape = [(pages, 2, page, heads[1], widest)[i] for i in order]
    stored = torch.full(shape, torch.nan, dtype=dtype, device=device).permute(order)
    table = torch.randperm(pages, device=device, generator=generator)
    table = table[: len(lengths) * columns].view(len(lengths), columns).int()
    pages_of = torch.tensor([-(-keys // page) for _, keys in lengths], dtype=torch.int32)
    behind = (torch.arange(columns) - pages_of[:, None]).to(device)
    no_pages = torch.tensor(NO_PAGES, dtype=torch.int32, device=device)
    table = torch.where(behind < 0, table, no_pages[behind % 4])
    for row, (_, keys), used in zip(table, lengths, pages_of.tolist(), strict=True):
        if keys:
            drawn = (used * page, 2, heads[1], widest)
            values = torch.randn(drawn, device=device, generator=generator).to(dtype)
            values[keys:] = torch.nan
            stored[row[:used].long()] = values.unflatten(0, (used, page)).transpose(1, 2)
    new = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0)
    rows = int(new[-1]) + sum(around)
    q = torch.randn(rows, heads[0], d, device=device, generator=generator).to(dtype)
    q[: around[0]], q[rows - around[1] :] = torch.nan, torch.nan
    starts = (new + around[0]).int().to(device)
    seqused = torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=device)
    longest = max((n for n, _ in lengths), default=0)
    k, v = stored[:, 0], stored[:, 1]
    if d_v is not None:
        k, v = k[..., :d].contiguous(), v[..., :d_v].contiguous()
    return q, k, v, table, seqused, starts, longest


def with_room(given, keys=65536):
    """The arguments with a page table for more keys than any sequence has, which the host's choice
    sees."""
    *before, table, used, starts, most = given
    table = torch.nn.functional.pad(table, (0, keys // given[1].shape[1]), value=NO_PAGES[0])
    return (*before, table, used, starts, most)


def random_trees(given, seed=3):
    """A tree_mask of random trees, one of each sequence's new tokens; any words in other rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, starts = len(given[0]), given[5].tolist()
    words = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    for first, end in itertools.pairwise(starts):
        masks = []
        for i in range(end - first):
            parent = int(torch.randint(-1, i, (), generator=generator)) if i else -1
            masks.append(1 << i | (masks[parent] if parent >= 0 else 0))
        words[first:end] = torch.tensor([mask - (mask >> 63 << 64) for mask in masks])
    return words.to(given[0].device)


def wide(given):
    """For an expected result in float64, the dtype of q. A cache of 16 bits stays as it is: the
    reference converts what it reads of it, and all of it takes gigabytes."""

    def is_converted(i, x):
        return isinstance(x, torch.Tensor) and x.is_floating_point() and (i == 0 or x.itemsize == 1)

    return [x.double() if is_converted(i, x) else x for i, x in enumerate(given)]


def assert_close(result, lse, truth, sums):
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs()
    assert not error.isnan().any()
    assert error.numel() == 0 or error.max() <= 8 * unit, error.max().item() / unit
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=2e-5)
