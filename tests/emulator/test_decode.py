# SPDX-License-Identifier: Apache-2.0
"""decode_attention and merge_attention_states on the emulator, against float64.

What a kernel reads or writes outside of its tensors is an error there, so the page table's entries
that nobody may use are no pages.
"""

import itertools

import pytest
import torch
from support.emulator import kernels, sm90

from tiercel import ref

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SPLITS = [-1, 1, 2, 4, 8]  # spread, or blocks of a cluster
ARRIVED = 0x7D1FA3C59B64E28B  # of a part in the workspace, see parts.cuh


def make(lengths, *, queries=1, heads=4, kv_heads=1, d=128, page=16, dtype=BF16, cache=None):
    generator = torch.Generator().manual_seed(len(lengths) + d + page)
    columns = -(-max(lengths) // page) + 1
    pages = len(lengths) * columns + 2
    q = torch.randn(len(lengths), queries, heads, d, generator=generator).to(dtype)
    stored = torch.randn(pages, 2, page, kv_heads, d, generator=generator).to(cache or dtype)
    table = torch.randperm(pages, generator=generator)[: len(lengths) * columns]
    table = table.view(len(lengths), columns).int()
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // page) :] = 1 << 30
    return q, stored[:, 0], stored[:, 1], table, torch.tensor(lengths, dtype=torch.int32)


def check(inputs, out, lse, **options):
    """Probabilities and results are rounded once each; values are about 1."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth, sums = ref.decode_attention(*wide, return_lse=True, **options)
    unit = torch.finfo(out.dtype).eps / 2
    size = max([1.0, *(options["v_scale"].tolist() if "v_scale" in options else [])])
    assert ((out.double() - truth).abs() / (truth.abs() + size)).max() <= 4 * unit
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=5e-5)


def run(inputs, split=0, prefix=None, k_scale=None, v_scale=None, workspace=None, **options):
    """By the launcher's own choice of split, or the test's."""
    q = inputs[0]
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    left, right = (-1 if x is None else x for x in options.get("window", (-1, -1)))
    right = 0 if options.get("causal", True) else right
    scale, softcap = options.get("scale", q.shape[3] ** -0.5), options.get("softcap", 0.0)
    given = (*inputs, out, prefix, k_scale, v_scale, lse)
    rest = (left, right, scale, softcap, -1, split)
    needed = kernels.decode_attention(*given, None, *rest)
    if needed:
        workspace = torch.full((needed,), torch.nan) if workspace is None else workspace
        assert kernels.decode_attention(*given, workspace, *rest) == 0
        assert not (workspace.view(torch.int64) == ARRIVED).any()
    named = {"prefix": prefix, "k_scale": k_scale, "v_scale": v_scale}
    check(inputs, out, lse, **{n: x for n, x in named.items() if x is not None}, **options)


RAGGED = [0, 1, 100, 16, 17]


@pytest.mark.parametrize("value", [4080.0, 133120.0, -(2.0**44)])
@pytest.mark.parametrize("split", [-1, 2])
def test_equal_scores_however_large(value, split):
    """The largest has probability 1, where float32 has no digits behind a score's point either."""
    inputs = make([300], d=128)
    inputs[0].fill_(4096.0), inputs[1].fill_(value), inputs[2].fill_(1.0)
    run(inputs, split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("d", "cache"), list(itertools.product([64, 128, 256], [None, FP8])))
def test_splits(split, d, cache):
    run(make(RAGGED, d=d, cache=cache), split)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("cache", [None, FP8])
def test_pages(page, cache):
    for split in (-1, 2):
        run(make([33, 70], page=page, cache=cache, dtype=F16, d=64), split)


@pytest.mark.parametrize("split", SPLITS)
def test_a_longer_sequence(split):
    run(make([700], kv_heads=2), split)


@pytest.mark.parametrize("heads", [3, 200, 300])
def test_more_heads_than_blocks_take_together(heads):
    """Columns of one tile of a sequence, of some, of all."""
    run(make([40, 3, 20], heads=heads, kv_heads=heads, d=64), -1)


def test_a_workspace_serves_again():
    """As in a graph that runs again, or for the next call on the stream."""
    q, *rest, lengths = make([700, 20, 900], kv_heads=2)
    workspace = torch.full((1_200_000,), torch.nan)
    run((q, *rest, lengths), -1, workspace=workspace)
    run((-q, *rest, lengths - 19), -1, workspace=workspace)
    run(make([1000], d=64), -1, workspace=workspace)  # by decode_combine
    run((q, *rest, lengths), -1, workspace=workspace)


@pytest.mark.parametrize(("d", "cache"), [(8, None), (96, None), (96, FP8), (192, None)])
def test_other_head_dimensions(d, cache):
    run(make([5, 40], d=d, cache=cache))


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("cache", [None, FP8])
def test_heads_and_queries(heads, queries, cache):
    inputs = make([1, 50], queries=queries, heads=heads[0], kv_heads=heads[1], d=64, cache=cache)
    run(inputs, -1)
    run(inputs, 2, causal=False)


@pytest.mark.parametrize(
    ("heads", "queries"), [((8, 2), 8), ((8, 2), 5), ((11, 1), 2), ((4, 1), 17)]
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_tiles_of_32_rows(heads, queries, dtype):
    """Whole and partly filled ones; 68 rows have three."""
    shape = {"queries": queries, "heads": heads[0], "kv_heads": heads[1], "dtype": dtype}
    run(make([0, 1, 100, 700], **shape), -1)
    run(make([90, 2, 0, 40], **shape), -1, window=(20, 1), causal=False)
    prefix = torch.tensor((7, 100), dtype=torch.int32)
    run(make([90, 300], **shape), -1, prefix, window=(5, 0), softcap=2.5)


@pytest.mark.parametrize("window", [(0, 0), (5, None), (20, 1), (60, 0)])
@pytest.mark.parametrize("prefix", [None, (7, 0, 100, 20)])
def test_masks(window, prefix):
    inputs = make([90, 2, 0, 40], queries=2)
    if prefix is not None:
        prefix = torch.tensor(prefix, dtype=torch.int32)
    for split, causal in itertools.product((-1, 2), (False, True)):
        run(inputs, split, prefix, window=window, causal=causal)


@pytest.mark.parametrize("cache", [None, FP8])
def test_softcap_and_scale(cache):
    q, *rest = make([90, 3], cache=cache)
    run((q * 3, *rest), softcap=2.5)
    run((q, *rest), softcap=50.0, scale=0.3)


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_float8_scales_and_queries_beyond_float16(factor):
    q, *rest = make([90, 3], heads=4, kv_heads=2, cache=FP8)
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}
    for split in (-1, 2):
        run((q * factor, *rest), split, **scales, scale=0.1 / factor)


def test_by_the_operator():
    """With outputs given and no workspace: an operator's own allocations are torch's."""
    inputs = make(RAGGED)
    q = inputs[0]
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    options = (None, None, None, True, None, None, None, 100)
    sm90("decode_attention_lse.out")(*inputs, *options, out, lse, None)
    check(inputs, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
def test_merge(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, 3, 5, 16, generator=generator).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 5, 3, generator=generator) * 4 for _ in range(2))
    lse_a[0, :2], lse_b[0, 1:3] = -torch.inf, -torch.inf
    a[0, :, :2] = torch.nan
    out, lse = sm90("merge_attention_states")(a, lse_a, b, lse_b, None)
    truth, sums = ref.merge_attention_states(*(x.double() for x in (a, lse_a, b, lse_b)))
    unit = max(torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(out.double(), truth, rtol=unit, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
